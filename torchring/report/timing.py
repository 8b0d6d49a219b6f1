"""The steps of a job as arrays, with one row for a step and one column for a rank."""

from __future__ import annotations

import collections
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from torchring.report.findings import Spread
from torchring.report.merge import Job
from torchring.tracing.records import Part, PartRecord, StepRecord

Array = NDArray[Any]

_NUM_FIRST: Final = 3  # buckets are laid out anew after the first reduction, and memory is touched for the first time
_ENOUGH: Final = 10  # steps, to leave some out
_MANY_CHANGES: Final = 8  # of buckets, which a job with one optimizer does not have
_QUANTILES: Final = (0.5, 0.2, 0.8)
_NUM_GROUPS: Final = 5  # of neighbouring steps, at least
_MAX_GROUP: Final = 32  # steps


@dataclass(frozen=True)
class Timing:
    """S steps of R ranks with B buckets. Times and durations are milliseconds; times count from the first step.

    Attributes:
        ranks: numbers of the ranks.
        numbers: numbers of the steps.
        counts: [S], which steps are part of the statistics.
        begin, end: [S, R], of the step.
        parts: [S, R, 6], durations by `Part`.
        stall, packing: [S, R], durations.
        backward_begin, backward_end: [S, R], of the last backward of the step.
        num_samples: [S, R].
        bucket_indices: [B], numbers of the buckets, of the plan that most steps have.
        bucket_bytes: [B].
        ready, packed, launched, started, reduced: [S, R, B]; NaN in steps that have another plan.
        problems: sentences.
    """

    ranks: tuple[int, ...]
    numbers: Array
    counts: Array
    begin: Array
    end: Array
    parts: Array
    stall: Array
    packing: Array
    backward_begin: Array
    backward_end: Array
    num_samples: Array
    bucket_indices: tuple[int, ...]
    bucket_bytes: Array
    ready: Array
    packed: Array
    launched: Array
    started: Array
    reduced: Array
    problems: tuple[str, ...]


def tabulate(job: Job) -> Timing:
    """The arrays of a job's steps."""
    rows = job.steps
    base = min(step.begin for step in rows[0])
    plans = [_plan_of(row) for row in rows]
    known = [plan for plan in reversed(plans) if plan is not None]
    plan = collections.Counter(known).most_common(1)[0][0] if known else ()  # of two, the later one
    numbers = np.array([row[0].number for row in rows])
    has_plan = np.array([each == plan or not known for each in plans])
    counts = has_plan & (numbers >= _NUM_FIRST) if len(rows) > _ENOUGH else has_plan
    if not counts.any():
        counts = has_plan
    others = sum(not has for has, number in zip(has_plan, numbers, strict=True) if number >= _NUM_FIRST)
    problems = []
    if others and np.count_nonzero(np.diff(has_plan[numbers >= _NUM_FIRST])) >= _MANY_CHANGES:
        problems.append(
            "Steps have different buckets, as those of several optimizers do. The statistics are those of "
            f"{int(counts.sum())} of {len(rows)} steps, which have the same buckets."
        )
    elif others:
        problems.append(
            f"The layout of buckets changed during the trace: {others} of {len(rows)} steps have another one than the "
            f"other {len(rows) - others}, and are left out of the statistics."
        )
    nothing = [[np.nan] * 5] * len(plan)
    times = [
        [
            [[at - base for at in (b.ready, b.packed, b.launched, b.started, b.reduced)] for b in _sorted(step)]
            if has and plan
            else nothing
            for step in row
        ]
        for row, has in zip(rows, has_plan, strict=True)
    ]
    shape = (len(rows), len(job.traces), len(plan), 5)
    bucket_times = np.array(times, float).reshape(shape) / 1e6
    backwards = [[_last_backward(step) for step in row] for row in rows]
    return Timing(
        ranks=tuple(trace.about.rank for trace in job.traces),
        numbers=numbers,
        counts=counts,
        begin=_ms([[step.begin - base for step in row] for row in rows]),
        end=_ms([[step.end - base for step in row] for row in rows]),
        parts=_ms([[[step.ns_in(part) for part in Part] for step in row] for row in rows]),
        stall=_ms([[step.stall_ns for step in row] for row in rows]),
        packing=_ms([[step.packing_ns for step in row] for row in rows]),
        backward_begin=_ms([[part.begin - base for part in row] for row in backwards]),
        backward_end=_ms([[part.end - base for part in row] for row in backwards]),
        num_samples=np.array([[step.num_samples for step in row] for row in rows]),
        bucket_indices=tuple(index for index, _ in plan),
        bucket_bytes=np.array([num_bytes for _, num_bytes in plan], float),
        ready=bucket_times[..., 0],
        packed=bucket_times[..., 1],
        launched=bucket_times[..., 2],
        started=bucket_times[..., 3],
        reduced=bucket_times[..., 4],
        problems=tuple(problems),
    )


def spread(values: Any, unit: str = "ms") -> Spread:
    """Median, and the quantiles of 20 % and 80 %. Zeros if there is no value."""
    found = np.asarray(values, float).ravel()
    found = found[np.isfinite(found)]
    median, low, high = np.quantile(found, _QUANTILES) if len(found) else (0.0, 0.0, 0.0)
    return Spread(float(median), float(low), float(high), unit)


def groups(values: Any) -> Array:
    """Means over groups of neighbouring steps, which are the first dimension."""
    found = np.asarray(values, float)
    length = min(_MAX_GROUP, max(1, len(found) // _NUM_GROUPS))
    firsts = np.arange(0, max(1, len(found) - length + 1), length)
    lengths = np.diff([*firsts, len(found)]).reshape(-1, *[1] * (found.ndim - 1))
    return np.asarray(np.add.reduceat(found, firsts, axis=0) / lengths)


def typical(values: Any) -> float:
    """Median over groups of neighbouring steps."""
    return float(np.median(groups(values)))


def spread_of_steps(values: Any, unit: str = "ms") -> Spread:
    """Median over groups of neighbouring steps, and the quantiles of 20 % and 80 % of single steps."""
    median, single = typical(values), spread(values, unit)
    return Spread(median, min(single.low, median), max(single.high, median), unit)


def _sorted(step: StepRecord) -> list[Any]:
    return sorted(step.buckets, key=lambda bucket: bucket.index)


def _plan_of(row: tuple[StepRecord, ...]) -> tuple[tuple[int, int], ...] | None:
    """Number and bytes of each bucket; None if ranks have different buckets, as in a step that was broken off."""
    first, *others = ([(bucket.index, bucket.num_bytes) for bucket in _sorted(step)] for step in row)
    indices = [index for index, _ in first]
    is_shared = all([index for index, _ in other] == indices for other in others)
    return tuple(first) if is_shared else None


def _last_backward(step: StepRecord) -> PartRecord:
    found = [part for part in step.parts if part.part is Part.BACKWARD]
    return found[-1] if found else PartRecord(Part.BACKWARD, step.end, step.end)


def _ms(nanoseconds: Any) -> Array:
    return np.array(nanoseconds, np.int64) / 1e6
