"""Pauses: a few steps in which something takes much longer than in all others, such as evaluation or a checkpoint.

Means would spread pauses over steps that have none. So steps with a pause are left out of all numbers but the steps and
samples per second. Steps that are slow for a while, one after the other, are not.
"""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np

from torchring.observe.recorder.records import RunInfo
from torchring.observer import Phase
from torchring.report.model.core_time import find_queue, who_has_them
from torchring.report.model.timing import Array, Spread, Steps, spread
from torchring.report.model.waits import Critical, knows_forward
from torchring.report.verdict.costs import Kind
from torchring.report.words import number, share_in_words

_FEW: Final = 10  # steps, of which none is an exception
_SELDOM: Final = 0.05  # of the steps: workers of a DataLoader give their batches in bursts that are more frequent
_LONG: Final = 2.0  # steps
_NOTICEABLE: Final = 0.02  # of the time
TELLING: Final = 0.10  # of the time
_MOST: Final = 0.75
_NUM_NAMED: Final = 4  # numbers of steps, before the rest is left out
# Steps that are slow for a while
_ENOUGH: Final = 50  # steps, of which some can be slow for a while
_NUM_BLOCKS: Final = 50
_BLOCK: Final = 5  # steps at least
_USUAL: Final = 0.25  # of the blocks are faster
_SLOWER: Final = 0.10  # than usual
_NOISES: Final = 4.0  # times what blocks that follow each other differ by
_MOST_TOLD: Final = 3
_PLACES: Final = {
    Phase.FORWARD: "in forward",
    Phase.BACKWARD: "in backward",
    Phase.BETWEEN: "between backward and step()",
    Phase.OPTIMIZER: "in step()",
}
_KINDS: Final[dict[Phase, Kind]] = {
    Phase.INPUT: "input",
    Phase.EXPOSED: "communication",
    Phase.BETWEEN: "optimizer",
    Phase.OPTIMIZER: "optimizer",
}


@dataclass(frozen=True)
class Pauses:
    """Steps in which one phase is long."""

    phase: Phase
    has_pause: Array  # [S], these steps; behind a pause at the end of a step also the next step, in which others wait
    num_steps: int  # number of all steps
    rank: int | None  # the rank that pauses, while the others wait; None if several do
    is_common: bool  # all ranks pause at the same time
    length: Spread  # time by which the phase is longer than in other steps
    share: float  # of the time of all steps, from 0 to 1
    numbers: tuple[int, ...]  # of the steps
    place: str  # where in a step: "in forward"
    cause: str  # what the trace shows, or what may be the cause: "for evaluation or a checkpoint". May be empty.

    @property
    def kind(self) -> Kind:
        return _KINDS.get(self.phase, "compute")

    @property
    def who(self) -> str:
        if self.rank is not None:
            return f"rank {self.rank}"
        return "each rank" if self.is_common else "one rank or another"

    @property
    def named_steps(self) -> str:
        """ "steps 49, 99, ..."."""
        first = ", ".join(f"{number:,}" for number in self.numbers[:_NUM_NAMED])
        more = ", ..." if len(self.numbers) > _NUM_NAMED else ""
        return f"{'step' if len(self.numbers) == 1 else 'steps'} {first}{more}"

    @property
    def sentence(self) -> str:
        """One sentence: how much time pauses take, and where they are."""
        digits = 0 if self.length.mean >= 10 else 1
        low, middle, high = (f"{each:,.{digits}f}" for each in (self.length.low, self.length.median, self.length.high))
        cause = f", {self.cause}" if self.cause else ""
        if len(self.numbers) == 1:
            what = f"one pause: in step {self.numbers[0]:,}, {self.who} takes {middle} ms longer {self.place}{cause}"
        else:
            what = (
                f"{len(self.numbers)} of {self.num_steps:,} steps, in which {self.who} takes {middle} ms longer "
                f"{self.place}{cause} (between {low} and {high}): {self.named_steps}"
            )
        return f"{share_in_words(self.share)} of the time goes to {what}."


def find_pauses(timing: Steps, critical: Critical) -> tuple[Pauses, ...]:
    """Steps that are long for something that most steps do not have, by phase: those that cost most first."""
    counts, num_steps = timing.counts, int(timing.counts.sum())
    if num_steps < _FEW:
        return ()
    step_ms = float(np.median(critical.path[counts].sum(1)))
    found = []
    for phase in Phase:
        if phase is Phase.WAITING:
            continue
        # Ranks wait for the one that pauses. Where all of them communicate, the one that waits least says for how long.
        of_ranks = critical.phases[..., phase]
        of_step = of_ranks.min(1) if phase is Phase.EXPOSED else of_ranks.max(1)
        longer = of_step - np.median(of_step[counts])
        steps = np.flatnonzero(counts & (longer > _LONG * step_ms))
        share = float(longer[steps].sum()) / timing.counted_ms
        if share >= _NOTICEABLE and len(steps) <= max(1, _SELDOM * num_steps):
            found.append(_describe(timing, critical, phase, steps, longer[steps], share))
    found = sorted(found, key=lambda each: -each.share)
    if not (timing.reduces & without(timing, found).counts).any():  # all steps of an optimizer that makes few of them
        return ()
    return tuple(found)


def _describe(timing: Steps, critical: Critical, phase: Phase, steps: Array, longer: Array, share: float) -> Pauses:
    of_ranks = critical.phases[..., phase]  # [S, R]
    of_rank = np.clip(of_ranks - np.median(of_ranks[timing.counts], axis=0), 0, None)[steps].sum(0)
    most = int(of_rank.argmax())
    is_common = bool(of_rank.min() > _MOST * of_rank[most])
    is_one = len(of_rank) == 1 or bool(of_rank[most] > _MOST * of_rank.sum())
    has_pause = np.zeros(len(timing.counts) + 1, bool)
    has_pause[steps] = True
    if phase in (Phase.BETWEEN, Phase.OPTIMIZER):  # others wait in the next step
        has_pause[steps + 1] = True
    longest = of_ranks[steps].argmax(1)
    cause = ""
    if phase is Phase.INPUT and timing.loading[steps, longest].sum() > _MOST * longer.sum():
        cause = "in the DataLoader"
    elif phase is Phase.INPUT:
        cause = f"for {'' if timing.saw_loader else 'data, '}evaluation or a checkpoint"
    return Pauses(
        phase,
        has_pause[:-1],
        int(timing.counts.sum()),
        timing.ranks[most] if is_one else None,
        is_common,
        spread(longer),
        share,
        tuple(timing.numbers[steps].tolist()),
        _place(phase, timing, critical),
        cause,
    )


def _place(phase: Phase, timing: Steps, critical: Critical) -> str:
    forward = "forward" if knows_forward(critical.cycle[timing.counts]) else "backward"
    return _PLACES.get(phase, f"from step() to {forward}" if phase is Phase.INPUT else "in communication")


def slow_stretches(timing: Steps, critical: Critical, run_info: RunInfo) -> Iterator[str]:
    """Steps that are slow for a while, the most costly first: sentences that say whether other programs held the cores.

    Of blocks of steps, the medians are compared. They must differ by more than blocks that follow each other do.
    """
    positions, queue = np.flatnonzero(timing.counts), find_queue(timing, critical)
    path = critical.path[positions]
    if len(path) < _ENOUGH:
        return
    blocks = np.array_split(path.sum(1), min(_NUM_BLOCKS, len(path) // _BLOCK))
    medians = np.array([np.median(block) for block in blocks])
    usual, noise = np.quantile(medians, _USUAL), np.median(np.abs(np.diff(medians)))
    of_blocks = medians > usual + max(_SLOWER * usual, _NOISES * noise)
    of_blocks[1:-1] |= of_blocks[:-2] & of_blocks[2:]
    is_slow = np.repeat(of_blocks, [len(block) for block in blocks])
    others = path[~is_slow].mean(0)
    stretches = np.flatnonzero(np.diff(is_slow, prepend=False, append=False)).reshape(-1, 2)
    for first, last in sorted(stretches, key=lambda each: -(path[slice(*each)] - others).sum())[:_MOST_TOLD]:
        middle = (path[first:last].sum(1).mean() + others.sum()) / 2
        inside = first + np.flatnonzero(path[first:last].sum(1) > middle)  # blocks at the edges are slow in part
        begin, end = (inside[0], inside[-1] + 1) if len(inside) else (first, last)
        longer = path[begin:end].mean(0) - others
        whole = float(longer.sum())
        if last - first < 2 * _BLOCK or whole * (end - begin) < _NOTICEABLE * path.sum():
            continue
        these = np.isin(np.arange(len(timing.counts)), positions[begin:end])
        phase, rank = Phase(int(longer.argmax())), np.bincount(critical.slowest[these]).argmax()
        on = f" on rank {timing.ranks[rank]}" if (critical.slowest[these] == rank).mean() > _MOST else ""
        why = f"Most of that is {_place(phase, timing, critical)}{on}: {number(longer[phase])} ms"
        queued = 0.0 if queue is None else float(queue.whole[begin:end].mean() - queue.whole[~is_slow].mean())
        if queued > whole / 2:
            of_these = dataclasses.replace(timing, counts=these)
            who = who_has_them(run_info, of_these, critical, find_queue(of_these, critical))
            why = f"For {number(min(queued, whole))} ms of that, a rank had no core: {who}"
        numbers = (f"{timing.numbers[positions[i]]:,}" for i in (begin, end - 1))
        share = share_in_words(whole / float(others.sum()))
        yield f"Steps {' to '.join(numbers)} took {share} longer than the others, by {number(whole)} ms. {why}."


def without(timing: Steps, pauses: tuple[Pauses, ...] | list[Pauses]) -> Steps:
    """The same steps, of which those with a pause do not count."""
    has_pause = np.logical_or.reduce([each.has_pause for each in pauses], initial=False)
    return dataclasses.replace(timing, counts=timing.counts & ~has_pause)
