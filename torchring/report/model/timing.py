"""The steps of a job as arrays, with one row for a step and one column for a rank."""

import collections
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from torchring.observe.recorder.records import BucketRecord, PhaseRecord, StepRecord
from torchring.observer import Phase
from torchring.report.model.merge import BUCKET_TIMES, Job

Array = NDArray[Any]
Plan = tuple[tuple[int, int, int], ...]
"""Optimizer, number and bytes of each bucket."""

_NUM_FIRST: Final = 3  # buckets are laid out anew after the first reduction, and memory is touched for the first time
_OFTEN: Final = 0.25  # of the steps: the step of a second optimizer may use the same batch
_ENOUGH: Final = 10  # steps, to leave some out
_SELDOM: Final = 0.05  # of the steps: an optimizer that makes fewer is not shown
_DURATIONS: Final = ("stall", "loading_cpu", "queued", "exposed_queued")  # of a `StepRecord`
_QUANTILES: Final = (0.5, 0.2, 0.8)


@dataclass(frozen=True)
class Spread:
    """A number that was measured many times."""

    mean: float
    median: float
    low: float  # a fifth of the measurements are below
    high: float  # a fifth of the measurements are above


@dataclass(frozen=True)
class Steps:
    """S steps of R ranks with B buckets. Times and durations are milliseconds; times count from the first step."""

    ranks: tuple[int, ...]
    numbers: Array  # [S], of the steps
    counts: Array  # [S], True for steps in the statistics; with several optimizers, for steps of all of them
    has_buckets: Array  # [S], True for steps with the buckets below; with several optimizers, for steps of one of them
    # Of each step and rank: [S, R]
    begin: Array
    end: Array
    parts: Array  # [S, R, 7], durations by `Phase`, of which none is WAITING
    stall: Array
    backward_begin: Array  # of the last backward
    backward_end: Array
    num_samples: Array
    loading: Array  # part of Phase.INPUT that was in a DataLoader
    num_workers: Array  # as in `StepRecord`, like the three below: negative if unknown
    loading_cpu: Array
    queued: Array
    exposed_queued: Array
    plan: Plan  # B buckets, those of one optimizer after the other
    # Of each step, rank and bucket: [S, R, B]; NaN in steps that have another plan
    ready: Array
    launched: Array
    started: Array
    reduced: Array
    problems: tuple[str, ...]  # sentences

    @property
    def bucket_bytes(self) -> Array:
        """[B]."""
        return np.array([num_bytes for *_, num_bytes in self.plan], float)

    @property
    def optimizers(self) -> tuple[int, ...]:
        """Of the buckets. There are several where a backward goes through all of them, as that of a GAN's generator."""
        return tuple(dict.fromkeys(optimizer for optimizer, *_ in self.plan))

    @property
    def reduces(self) -> Array:
        """[S], which steps are part of the statistics of buckets."""
        return np.asarray(self.counts & self.has_buckets)

    @property
    def saw_loader(self) -> bool:
        """True if DataLoaders give the batches. A DataLoader that is used now and then does not count."""
        return bool((self.num_workers[self.counts] >= 0).mean() >= _OFTEN)

    @property
    def counted_ms(self) -> float:
        """Duration of all steps that count, on the rank that was last."""
        return float((self.end - self.begin)[self.counts].sum(0).max())


def tabulate(job: Job) -> tuple[Steps, ...]:
    """The arrays of a job's steps, once for the buckets of each optimizer: the one with most steps first."""
    rows = job.steps
    base = min(step.begin for step in rows[0])
    plans = [_plan_of(row) for row in rows]
    numbers = np.array([row[0].number for row in rows])
    of_optimizers = _plans_of_optimizers(plans)
    has_plan = np.array([each in of_optimizers for each in plans])
    # The step 0 begins in `wrap`, so it has the time until the loop begins.
    counts = has_plan & (numbers >= (_NUM_FIRST if len(rows) > _ENOUGH else 1))
    if not counts.any():
        counts = has_plan
    others = sum(not has for has, number in zip(has_plan, numbers, strict=True) if number >= _NUM_FIRST)
    problems = []
    if others:
        problems.append(
            f"The layout of buckets changed during the trace: {others} of {len(rows)} steps have another one than the "
            f"other {len(rows) - others}, and are left out of the statistics."
        )
    backwards = [[_last_backward(step) for step in row] for row in rows]

    def of_steps(name: str) -> Array:
        return np.array([[getattr(step, name) for step in row] for row in rows], np.int64)

    without_buckets = Steps(
        ranks=tuple(trace.run_info.rank for trace in job.traces),
        numbers=numbers,
        counts=counts,
        has_buckets=np.zeros(len(rows), bool),
        begin=_ms(of_steps("begin") - base),
        end=_ms(of_steps("end") - base),
        parts=_ms([[[step.ns_in(part) for part in Phase] for step in row] for row in rows]),
        backward_begin=_ms([[part.begin - base for part in row] for row in backwards]),
        backward_end=_ms([[part.end - base for part in row] for row in backwards]),
        num_samples=of_steps("num_samples"),
        loading=_ms([[min(step.loading_ns, step.ns_in(Phase.INPUT)) for step in row] for row in rows]),
        num_workers=of_steps("num_workers"),
        **{name: _ms(of_steps(f"{name}_ns")) for name in _DURATIONS},
        plan=(),
        **{name: np.zeros((len(rows), len(job.traces), 0)) for name in BUCKET_TIMES},
        problems=tuple(problems),
    )
    return tuple(_with_buckets(without_buckets, job, plan, plans, base) for plan in of_optimizers)


def _with_buckets(timing: Steps, job: Job, plan: Plan | None, plans: Sequence[Plan | None], base: int) -> Steps:
    has_plan = np.array([each == plan for each in plans])
    times = np.full((len(job.steps), len(job.traces), len(plan or ()), len(BUCKET_TIMES)), np.nan)
    for i in np.flatnonzero(has_plan) if plan else ():
        for j, step in enumerate(job.steps[i]):
            times[i, j] = [[getattr(bucket, name) - base for name in BUCKET_TIMES] for bucket in _sorted(step)]
    fields: dict[str, Any] = {name: times[..., k] / 1e6 for k, name in enumerate(BUCKET_TIMES)}
    return replace(timing, has_buckets=has_plan, plan=plan or (), **fields)


def spread(values: Any) -> Spread:
    """Mean, median, and the quantiles of 20 % and 80 %. Zeros if there is no value."""
    found = np.asarray(values, float).ravel()
    found = found[np.isfinite(found)]
    median, low, high = np.quantile(found, _QUANTILES) if len(found) else (0.0, 0.0, 0.0)
    return Spread(float(found.mean()) if len(found) else 0.0, float(median), float(low), float(high))


def typical(values: Any) -> float:
    """Mean over steps; 0 without any. Steps with a pause do not count, so no accident decides."""
    return float(np.mean(values)) if len(values) else 0.0


def _sorted(step: StepRecord) -> list[BucketRecord]:
    """In the order of the plan; of a plan that was reduced twice in the step, one reduction after the other."""
    seen: collections.Counter[tuple[int, int]] = collections.Counter()
    places = []
    for position, bucket in enumerate(step.buckets):
        key = bucket.optimizer, bucket.index
        places.append((seen[key], *key, position))
        seen[key] += 1
    return [step.buckets[position] for *_, position in sorted(places)]


def _plans_of_optimizers(plans: Sequence[Plan | None]) -> list[Plan | None]:
    """The plan that most steps of each optimizer have, the later of two such plans. The most frequent comes first."""
    found: dict[frozenset[int], collections.Counter[Plan]] = collections.defaultdict(collections.Counter)
    for plan in reversed(plans):
        if plan is not None:
            found[frozenset(optimizer for optimizer, *_ in plan)][plan] += 1
    counted = sorted((each.most_common(1)[0] for each in found.values()), key=lambda pair: -pair[1])
    return [plan for i, (plan, count) in enumerate(counted) if not i or count > _SELDOM * len(plans)] or [None]


def _plan_of(row: tuple[StepRecord, ...]) -> Plan | None:
    """The buckets of a step. None if ranks have different buckets, as in a step that was aborted."""
    first, *others = ([(bucket.optimizer, bucket.index, bucket.num_bytes) for bucket in _sorted(step)] for step in row)
    is_shared = all([each[:2] for each in other] == [each[:2] for each in first] for other in others)
    return tuple(first) if is_shared else None


def of_optimizers(job: Job, timing: Steps) -> Job:
    """The same job, with the parameters of the optimizers whose buckets these are, and the buckets' places there."""
    if not timing.plan:
        return job
    places: dict[tuple[int, int], int] = {}
    for place, (optimizer, index, _) in enumerate(timing.plan):
        places.setdefault((optimizer, index), place)
    traces = []
    for trace in job.traces:
        own = (each for each in trace.run_info.parameters if each.optimizer in timing.optimizers)
        parameters = tuple(each._replace(bucket=places.get((each.optimizer, each.bucket), -1)) for each in own)
        traces.append(replace(trace, run_info=replace(trace.run_info, parameters=parameters)))
    return replace(job, traces=tuple(traces))


def _last_backward(step: StepRecord) -> PhaseRecord:
    found = [part for part in step.phases if part.phase is Phase.BACKWARD]
    return found[-1] if found else PhaseRecord(Phase.BACKWARD, step.end, step.end)


def _ms(nanoseconds: Any) -> Array:
    return np.array(nanoseconds, np.int64) / 1e6


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
