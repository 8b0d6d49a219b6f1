"""Trials of a plan that was found: the plan takes turns with the default one, and the better one is kept. Numbers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from torchring.gradients.participants.tuning.candidates import LEAST_GAIN_OF_ROUNDING, Candidate, milliseconds
from torchring.gradients.plan import Plan

_NUM_TURNS: Final = 4  # of both plans together


class Times(NamedTuple):
    """What all ranks know of one round: of each time of an `Observation` the shortest, in seconds.

    That is the time of the rank that began last, and waited for nobody.
    """

    total: float
    exposed: float
    busy: float


@dataclass
class Trial:
    """A plan that was found takes turns with the default one: other load on the machine may come and go.

    Attributes:
        candidate: what is tried.
        default, found: the two plans.
        with_default, with_found: what was measured with each.
        num_turns: how many are over. The default plan has the first.
    """

    candidate: Candidate
    default: Plan
    found: Plan
    with_default: list[Times]
    with_found: list[Times] = field(default_factory=list)
    num_turns: int = 1

    @property
    def is_turn_of_found(self) -> bool:
        return self.num_turns % 2 == 1

    def end_turn(self, times: list[Times]) -> bool:
        """The rounds of a turn are measured. Returns whether there is another turn."""
        (self.with_found if self.is_turn_of_found else self.with_default).extend(times)
        self.num_turns += 1
        return self.num_turns < _NUM_TURNS

    def is_won(self) -> bool:
        """Whether the plan that was found is better.

        It has to leave less exposed, by more than the noise, and backward must not take longer. A plan that rounds has
        to shorten backward by more than the noise.
        """
        default, noise = _median_and_noise([times.exposed for times in self.with_default])
        found, more_noise = _median_and_noise([times.exposed for times in self.with_found])
        if found >= default - math.hypot(noise, more_noise):
            return False
        default, noise = _median_and_noise([times.total for times in self.with_default])
        found, more_noise = _median_and_noise([times.total for times in self.with_found])
        if self.candidate.is_rounded:
            return found < min(default - math.hypot(noise, more_noise), default * (1 - LEAST_GAIN_OF_ROUNDING))
        return found <= default

    def describe(self) -> str:
        default, found = (
            [statistics.median(column) for column in zip(*times, strict=True)]
            for times in (self.with_default, self.with_found)
        )
        before, after = self.candidate.default_exposed, self.candidate.exposed
        return (
            f"{milliseconds(found[1])} exposed instead of {milliseconds(default[1])}, and backward took "
            f"{milliseconds(found[0])} instead of {milliseconds(default[0])}; {milliseconds(after)} instead of "
            f"{milliseconds(before)} exposed was predicted"
        )


def _median_and_noise(values: Sequence[float]) -> tuple[float, float]:
    """The median and its standard error, estimated from the median distance to it, which outliers do not move."""
    median = statistics.median(values)
    distance = statistics.median(abs(value - median) for value in values)
    return median, 1.2533 * 1.4826 * distance / math.sqrt(len(values))
