"""The time of each rank: who waits for whom, and which rank determines how long a step takes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from torchring.observe.recorder.records import RunInfo
from torchring.observer import Phase
from torchring.report.model.merge import Job
from torchring.report.model.timing import Array, Spread, Steps, spread, tabulate

COMPUTING: Final = [Phase.INPUT, Phase.FORWARD, Phase.BACKWARD, Phase.BETWEEN, Phase.OPTIMIZER]
_WORTH_TELLING_MS: Final = 0.01


@dataclass(frozen=True)
class RankWait:
    """Time in which ranks wait for the rank `awaited`. A rank that nobody waits for has none."""

    waiting: tuple[int, ...]  # the ranks that wait, now and then
    awaited: int
    mean_ms: float  # mean of all steps, and of these ranks
    share: float  # share of the steps with such a wait
    cost: Spread  # over the steps with such a wait


@dataclass(frozen=True)
class RankSummary:
    rank: int
    host: str
    step: Spread
    phases: Mapping[Phase, Spread]  # means add up to the mean of `step`
    queued: Spread | None  # time in all phases without a core, though ready to run; None if unknown


@dataclass(frozen=True)
class Critical:
    """When R ranks come together in each of S steps to reduce the B buckets of one optimizer, and who comes last.

    Of buckets, only steps of `Steps.has_buckets` mean anything.
    """

    all_launched: Array  # [S, B], time at which the last rank launched the bucket
    last: Array  # [S, B], position of that rank
    # reduction_begins, reduction_ends: [S, B]. One bucket is reduced after the other.
    reduction_begins: Array
    reduction_ends: Array
    waiting: Array  # [S, R], time for which a rank stood still for a late rank
    awaited: Array  # [S, R], position of that rank
    slowest: Array  # [S], position of the rank that the others wait for
    phases: Array  # [S, R, 7], durations by `Phase`, which add up to the step
    # [S, R, 7], the same from the end of a backward to the end of the next, so that BETWEEN and OPTIMIZER are those of
    # the step before: a rank that is late there is awaited in the next step
    cycle: Array
    path: Array  # [S, 7], of `cycle`, the rank that the others wait for. How long a step takes is the sum.


def examine(job: Job) -> tuple[Steps, Critical, int]:
    """The arrays of a job's steps, with the buckets of the optimizer that communicates for longest; and how many do."""
    run_info = job.traces[0].run_info
    timings = tabulate(job)
    found = [_find_meetings(timing, run_info) for timing in timings]
    if _agree_first(job, timings):
        found = [each | _waits_to_agree(job) for each in found]
    criticals = [_find_critical(timings[0], each) for each in found]
    communication = [criticals[0].path[timing.reduces, Phase.EXPOSED].sum() for timing in timings]
    longest = int(np.argmax(communication))
    return timings[longest], criticals[longest], len(timings)


def computing(cycle: Array) -> Array:
    """[S, R], time for which each rank computes, in rows of `Critical.cycle`."""
    return np.asarray(cycle[..., COMPUTING].sum(2))


def knows_forward(cycle: Array) -> bool:
    """True if FORWARD is told apart from INPUT in rows of `Critical.cycle`."""
    return bool((cycle[..., Phase.FORWARD] > 0).any())


def _standstill(timing: Steps) -> Array:
    return np.asarray(timing.parts[..., Phase.EXPOSED] + timing.stall)


def _find_meetings(timing: Steps, run_info: RunInfo) -> dict[str, Array]:
    """Cut the time in which ranks stand still into waiting for a rank, and communication: parts of a `Critical`."""
    num_steps, num_ranks = timing.begin.shape
    launched = np.nan_to_num(timing.launched, nan=-np.inf)
    all_launched, last = launched.max(1), launched.argmax(1)
    ends = np.maximum.accumulate(timing.reduced.max(axis=1), axis=1)
    earlier = np.concatenate([np.full((num_steps, 1), -np.inf), ends], axis=1)[:, :-1]
    begins = np.minimum(np.maximum(all_launched, earlier), ends)
    if run_info.overlap == "inline" and run_info.algorithm == "direct":
        # Ranks do their parts when they come by. The bucket takes as long as the longest part.
        parts = timing.reduced - np.maximum(timing.started, all_launched[:, None])
        begins = ends - np.clip(np.nan_to_num(parts), 0, None).max(axis=1)
    waiting, awaited = np.zeros((num_steps, num_ranks)), np.zeros((num_steps, num_ranks), int)
    if timing.plan:
        lateness = np.nan_to_num(all_launched[:, None] - timing.launched)
        head = _heads(all_launched, earlier, run_info)
        waiting = np.take_along_axis(lateness, head[:, None, None], axis=2)[..., 0]
        waiting = np.clip(np.minimum(waiting, _standstill(timing)), 0, None)
        awaited = np.repeat(np.take_along_axis(last, head[:, None], axis=1), num_ranks, axis=1)
    buckets = {"all_launched": all_launched, "last": last, "reduction_begins": begins, "reduction_ends": ends}
    return {**buckets, "waiting": waiting, "awaited": awaited}


def _find_critical(timing: Steps, found: dict[str, Array]) -> Critical:
    phases = timing.parts.copy()
    phases[..., Phase.BACKWARD] = np.clip(phases[..., Phase.BACKWARD] - timing.stall, 0, None)
    phases[..., Phase.WAITING] = found["waiting"]
    phases[..., Phase.EXPOSED] = _standstill(timing) - found["waiting"]
    cycle = phases.copy()
    for phase in (Phase.BETWEEN, Phase.OPTIMIZER):
        cycle[1:, :, phase] = phases[:-1, :, phase]
    # Where nobody waits, the rank that computes for longest determines the step.
    slowest = np.lexsort((-computing(cycle), found["waiting"]), axis=1)[:, 0]
    path = np.take_along_axis(cycle, slowest[:, None, None], axis=1)[:, 0]
    return Critical(**found, slowest=slowest, phases=phases, cycle=cycle, path=path)


def list_waits(timing: Steps, critical: Critical) -> tuple[RankWait, ...]:
    """Waits for each rank, the longest first."""
    waiting, awaited = critical.waiting[timing.counts], critical.awaited[timing.counts]
    found = []
    for position, rank in enumerate(timing.ranks):
        costs = np.where((waiting > _WORTH_TELLING_MS) & (awaited == position), waiting, 0.0)
        costs[:, position] = 0.0
        who = np.flatnonzero(costs.any(0))
        if len(who):
            costs = costs[:, who]
            ranks = tuple(timing.ranks[i] for i in who)
            mean_ms, share = float(costs.mean()), float((costs > 0).mean())
            found.append(RankWait(ranks, rank, mean_ms, share, spread(costs[costs > 0])))
    return tuple(sorted(found, key=lambda wait: -wait.mean_ms))


def _heads(all_launched: Array, earlier: Array, run_info: RunInfo) -> Array:
    """[S], which bucket's launch determined when the last bucket was reduced: the last one that found the link idle.

    On one host there is no link. Each rank adds up its part of a bucket by itself, and no bucket waits for another.
    """
    num_buckets = all_launched.shape[1]
    if run_info.algorithm == "direct":
        return np.full(len(all_launched), num_buckets - 1)
    found_idle = all_launched >= earlier
    return np.asarray(num_buckets - 1 - np.argmax(found_idle[:, ::-1], axis=1))


def _agree_first(job: Job, timings: Sequence[Steps]) -> bool:
    """True if buckets wait for the end of backward, because ranks first agree on which optimizers take part."""
    timing = timings[0]
    if len(timings) > 1 or not timing.plan or len({each.optimizer for each in job.traces[0].run_info.parameters}) < 2:
        return len(timings) > 1
    return bool(np.nanmin(timing.launched - timing.backward_end[..., None]) >= 0)


def _waits_to_agree(job: Job) -> dict[str, Array]:
    """How long each rank waits where ranks meet, and for whom most. They meet where EXPOSED begins."""
    shape = len(job.steps), len(job.traces)
    waiting, awaited = np.zeros(shape), np.zeros(shape, int)
    for i, row in enumerate(job.steps):
        meetings = [[part for part in step.phases if part.phase is Phase.EXPOSED] for step in row]
        most = -1
        for parts in zip(*meetings, strict=False):  # a step that was aborted on a rank has fewer
            begins = [part.begin for part in parts]
            late = [min(max(begins), part.end) - part.begin for part in parts]
            waiting[i] += np.array(late) / 1e6
            if max(late) > most:
                most, awaited[i] = max(late), begins.index(max(begins))
    return {"waiting": waiting, "awaited": awaited}


def summarise_ranks(job: Job, timing: Steps, critical: Critical) -> tuple[RankSummary, ...]:
    counts = timing.counts
    durations = (timing.end - timing.begin)[counts]
    return tuple(
        RankSummary(
            trace.run_info.rank,
            trace.run_info.host,
            spread(durations[:, i]),
            {phase: spread(critical.phases[counts][:, i, phase]) for phase in Phase},
            spread(timing.queued[counts][:, i]) if (timing.queued[counts][:, i] >= 0).all() else None,
        )
        for i, trace in enumerate(job.traces)
    )


def per_second(values: Array, timing: Steps) -> float:
    """Sum of `values` ([S, R] or [S, 1]) over the steps that count, divided by their time; 0 if unknown on a rank."""
    counted, seconds = values[timing.counts].sum(0), timing.counted_ms / 1e3
    return float(counted.sum() / seconds) if counted.all() and seconds > 0 else 0.0
