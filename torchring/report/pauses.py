"""Pauses: a few steps that begin with something else than training, such as evaluation or a checkpoint.

Medians do not show pauses, and means would spread them over steps that have none. So steps with a pause are left out of
all other numbers.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Final

import numpy as np

from torchring.report.findings import Phase, Spread
from torchring.report.formats import share_in_words
from torchring.report.timing import Array, Timing, spread
from torchring.report.waits import Critical, column, knows_forward

_SELDOM: Final = 0.05  # of the steps: workers of a DataLoader give their batches in bursts that are more frequent
_LONG: Final = 2.0  # steps
_TELLING: Final = 0.10  # of the time
_MANY: Final = 200  # steps, of which one pause is no accident if it takes that much of their time
_MOST: Final = 0.75


@dataclass(frozen=True)
class Pauses:
    """Steps that have a long INPUT.

    Attributes:
        has_pause: [S], those steps.
        num_steps: how many steps there are with them.
        rank: the rank that pauses, while the others wait; None if several do.
        is_common: whether all ranks pause at the same time.
        length: how much longer INPUT is than in other steps.
        share: of the time of all steps, from 0 to 1.
        numbers: of the steps.
        before: what comes after the pause: "forward", or "backward" if forward is not told apart from INPUT.
    """

    has_pause: Array
    num_steps: int
    rank: int | None
    is_common: bool
    length: Spread
    share: float
    numbers: tuple[int, ...]
    before: str

    @property
    def who(self) -> str:
        """Who pauses, in words."""
        if self.rank is not None:
            return f"rank {self.rank}"
        return "each rank" if self.is_common else "one rank or another"

    @property
    def sentence(self) -> str:
        """What bounds a job that pauses for most of the time."""
        digits = 0 if self.length.median >= 10 else 1
        low, median, high = (f"{each:,.{digits}f}" for each in (self.length.low, self.length.median, self.length.high))
        spread_of = f" (between {low} and {high})" if len(self.numbers) > 1 else ""
        return (
            f"{share_in_words(self.share)} of the time goes to {len(self.numbers)} of {self.num_steps:,} steps, "
            f"in which {self.who} takes "
            f"{median} ms{spread_of} longer from step() to {self.before}: for data, evaluation or a checkpoint."
        )


def find_pauses(timing: Timing, critical: Critical) -> Pauses | None:
    """Steps that wait long for something that most steps do not have; None if they cost little."""
    counts = timing.counts
    inputs = critical.cycle[..., column(Phase.INPUT)]  # [S, R]
    of_path = critical.path[:, column(Phase.INPUT)]
    whole = critical.path.sum(1)
    longer = of_path - np.median(of_path[counts])
    has_pause = counts & (longer > _LONG * np.median(whole[counts]))
    num_pauses, num_steps = int(has_pause.sum()), int(counts.sum())
    share = float(longer[has_pause].sum() / whole[counts].sum()) if num_pauses else 0.0
    if num_pauses > _SELDOM * num_steps or share < _TELLING or num_pauses < (1 if num_steps >= _MANY else 2):
        return None
    if not (timing.reduces & ~has_pause).any():  # all steps of an optimizer that makes few of them
        return None
    of_rank = np.clip(inputs - np.median(inputs[counts], axis=0), 0, None)[has_pause].sum(0)  # [R]
    most = int(of_rank.argmax())
    is_common = bool(of_rank.min() > _MOST * of_rank[most])
    is_one = of_rank[most] > _MOST * of_rank.sum()
    return Pauses(
        has_pause,
        num_steps,
        timing.ranks[most] if is_one else None,
        is_common,
        spread(longer[has_pause]),
        share,
        tuple(timing.numbers[has_pause].tolist()),
        "forward" if knows_forward(critical.cycle[counts]) else "backward",
    )


def without(timing: Timing, pauses: Pauses | None) -> Timing:
    """The same steps, of which those with a pause do not count."""
    return timing if pauses is None else dataclasses.replace(timing, counts=timing.counts & ~pauses.has_pause)
