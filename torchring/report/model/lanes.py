"""The median step, and the phases of a step as spans."""

from __future__ import annotations

import numpy as np

from torchring.observe.recorder.records import StepRecord
from torchring.observer import Phase
from torchring.report.model.timing import Steps


def median_step(timing: Steps) -> int:
    """The position of the step whose duration is nearest to the median, of those with the buckets of `timing`."""
    durations = (timing.end - timing.begin).max(1)
    off = np.where(timing.reduces, np.abs(durations - np.median(durations[timing.reduces])), np.inf)
    return int(off.argmin())


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
