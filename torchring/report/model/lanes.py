"""The median step, the phases of a step as spans, and those of all steps over time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from torchring.observe.recorder.records import StepRecord
from torchring.observer import Phase
from torchring.report.model.timing import Steps
from torchring.report.model.waits import Critical

_MAX_POINTS: Final = 300  # over time; fewer with more ranks, lest the page becomes too large
_RANKS_IN_FULL: Final = 24
MOST_RANKS: Final = 64  # that figures show


@dataclass(frozen=True)
class Series:
    """Phases over time, the first steps included. Each of at most 300 points is the mean of neighbouring steps."""

    numbers: tuple[int, ...]  # the first step of each point
    num_steps_per_point: int  # steps that a point stands for
    phases: Mapping[int, Mapping[Phase, tuple[float, ...]]]  # by rank and phase, milliseconds a step


def median_step(timing: Steps) -> int:
    """The position of the step whose duration is nearest to the median, of those with the buckets of `timing`."""
    durations = (timing.end - timing.begin).max(1)
    off = np.where(timing.reduces, np.abs(durations - np.median(durations[timing.reduces])), np.inf)
    return int(off.argmin())


def series(timing: Steps, critical: Critical) -> Series:
    """Means over neighbouring steps."""
    num_steps = len(timing.numbers)
    max_points = _MAX_POINTS // -(-min(len(timing.ranks), MOST_RANKS) // _RANKS_IN_FULL)
    stride = -(-num_steps // max_points)
    firsts = np.arange(0, num_steps, stride)
    lengths = np.diff([*firsts, num_steps])
    means = np.add.reduceat(critical.phases, firsts, axis=0) / lengths[:, None, None]
    phases = {
        rank: {phase: tuple(means[:, j, phase].tolist()) for phase in Phase} for j, rank in enumerate(timing.ranks)
    }
    return Series(tuple(timing.numbers[firsts].tolist()), stride, phases)


def spans_of(step: StepRecord, waiting_ms: float) -> list[tuple[Phase, int, int]]:
    """Phases of a rank in a step, with begin and end in nanoseconds. A rank waits before it communicates.

    A stall inside backward has no known place. It is shown at the end of the last backward, which reduces.
    """
    pieces = []  # the last one first
    stall = step.stall_ns
    for part in reversed(step.phases):
        middle = part.end
        if part.phase is Phase.BACKWARD and stall > 0:
            middle = max(part.begin, part.end - stall)
            stall -= part.end - middle
        pieces += [(Phase.EXPOSED, middle, part.end), (part.phase, part.begin, middle)]
    left = round(waiting_ms * 1e6)
    found = []
    for phase, begin, end in reversed(pieces):
        until = begin
        if phase is Phase.EXPOSED and left > 0:
            until = min(end, begin + left)
            left -= until - begin
        found += [(Phase.WAITING, begin, until), (phase, until, end)]
    return [(phase, begin, end) for phase, begin, end in found if end > begin]
