"""Traces of jobs that never ran: made from the durations that a test gives, so that the right answer is known."""

import dataclasses
import itertools
import random
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path

from torchring.observe.recorder import files
from torchring.observe.recorder.records import (
    Arrivals,
    BucketRecord,
    ClockOffset,
    ParameterRecord,
    PhaseRecord,
    RankTrace,
    RunInfo,
    StepRecord,
    decode,
    step_row,
)
from torchring.observer import Phase

MS = 1_000_000
MB = 1_000_000
Duration = float | Sequence[float] | Callable[[int, int], float]


def simulate(
    num_ranks: int = 2,
    num_steps: int = 50,
    *,
    input_ms: Duration = 2.0,
    forward_ms: Duration = 30.0,
    backward_ms: Duration = 60.0,
    between_ms: Duration = 0.5,
    optimizer_ms: Duration = 8.0,
    loading_ms: Duration | None = None,  # how much of the input a DataLoader takes; None if there is no DataLoader
    bucket_mb: Sequence[float] = (1.0, 25.0, 25.0),  # bytes of each bucket, in units of 10**6
    ready_at: Sequence[float] | None = None,  # by bucket, after which part of backward; equally spaced by default
    latency_ms: float = 0.2,
    gigabytes_per_s: float = 2.0,
    noise: float = 0.02,  # standard deviation of each duration, as a part of it
    skew_ms: Sequence[float] | None = None,  # by how much each rank's clock is ahead, as its `ClockOffset` says
    ranks_per_host: int | None = None,  # all by default
    num_samples: int | Sequence[int] = 16,
    seed: int = 0,
) -> list[RankTrace]:
    """One trace per rank. Durations may be given for each rank, or as a function of the step and the rank.

    A bucket of b bytes takes latency + 2 (N - 1) / N b / bandwidth.
    """
    rng = random.Random(seed)
    per_host = ranks_per_host or num_ranks
    skews = [round(ms * MS) for ms in (skew_ms or [0.0] * num_ranks)]
    fractions = ready_at or [(i + 1) / len(bucket_mb) for i in range(len(bucket_mb))]

    def known(given: Duration, number: int, rank: int) -> float:
        if callable(given):
            return given(number, rank)
        return given if isinstance(given, float | int) else given[rank]

    def duration(given: Duration, number: int, rank: int) -> int:
        return max(0, round(known(given, number, rank) * MS * (1.0 + noise * rng.gauss(0.0, 1.0))))

    recorded = [phase for phase in Phase if phase is not Phase.WAITING]
    begins = [1_000_000 * MS] * num_ranks
    steps: list[list[StepRecord]] = [[] for _ in range(num_ranks)]
    for number in range(num_steps):
        cut = []
        for rank, begin in enumerate(begins):
            forward = begin + duration(input_ms, number, rank)
            backward = forward + duration(forward_ms, number, rank)
            exposed = backward + duration(backward_ms, number, rank)
            cut.append((begin, forward, backward, exposed))
        times: list[list[tuple[int, int]]] = []  # per bucket: launched and reduced, per rank
        free = 0
        for megabytes, fraction in zip(bucket_mb, fractions, strict=True):
            launched = [round(back + (exposed - back) * fraction) for _, _, back, exposed in cut]
            took = latency_ms * MS + 2 * (num_ranks - 1) / num_ranks * megabytes * MB / gigabytes_per_s
            free = max(free, *launched) + max(0, round(took * (1.0 + noise * rng.gauss(0.0, 1.0))))
            times.append([(at, free) for at in launched])
        for rank, (begin, forward, backward, exposed) in enumerate(cut):
            between = max(exposed, free)
            optimizer = between + duration(between_ms, number, rank)
            end = optimizer + duration(optimizer_ms, number, rank)
            starts = [begin, forward, backward, exposed, between, optimizer, end]
            parts = tuple(
                PhaseRecord(part, a + skews[rank], b + skews[rank])
                for part, (a, b) in zip(recorded, itertools.pairwise(starts), strict=True)
                if b > a
            )
            buckets = []
            for index, row in enumerate(times):
                launched_at, reduced_at = (t + skews[rank] for t in row[rank])
                size = round(bucket_mb[index] * MB)
                buckets.append(BucketRecord(index, size, launched_at - MS // 10, launched_at, launched_at, reduced_at))
            steps[rank].append(
                StepRecord(
                    *(number, begin + skews[rank], end + skews[rank]),
                    num_samples if isinstance(num_samples, int) else num_samples[rank],
                    *(0, MS // 2, parts, tuple(buckets)),
                    loading_ns=round(known(loading_ms or 0.0, number, rank) * MS),
                    num_workers=0 if known(loading_ms or 0.0, number, rank) else -1,
                )
            )
            begins[rank] = end
    traces = []
    names = [f"layer{i}.weight" for i in reversed(range(len(bucket_mb)))]
    for rank in range(num_ranks):
        run_info = RunInfo(
            rank=rank,
            size=num_ranks,
            local_size=per_host,
            node_rank=rank // per_host,
            host=f"host{rank // per_host}",
            pid=1000 + rank,
            num_cores=num_ranks,
            algorithm="direct" if per_host == num_ranks else "ring",
            reason="simulated",
            options={"bucket_mb": "25", "compression": "None"},
            parameters=tuple(
                ParameterRecord(name, round(mb * MB), i)
                for i, (name, mb) in enumerate(zip(names, bucket_mb, strict=True))
            ),
            versions={"torchring": "0.1.0", "torch": "2.13.0", "python": "3.11.0"},
            written_at=1.8e9,
        )
        first = steps[rank][0]
        backward = first.ns_in(Phase.BACKWARD)
        arrivals = (Arrivals(backward, tuple(round(backward * part) for part in fractions)),)
        clock = () if skew_ms is None else (ClockOffset(first.begin, skews[rank], 0 if rank < per_host else MS // 20),)
        traces.append(RankTrace(run_info, tuple(steps[rank]), arrivals, clock))
    return traces


def with_facts(trace: RankTrace, **changes: object) -> RankTrace:
    """The same steps, of a run with other facts."""
    return dataclasses.replace(trace, run_info=dataclasses.replace(trace.run_info, **changes))


def shifted(trace: RankTrace, num_dropped: int) -> RankTrace:
    """The same trace, with its first steps forgotten."""
    return dataclasses.replace(trace, steps=trace.steps[num_dropped:])


def encode(step: StepRecord) -> "array[int]":
    own = (step.number, step.begin, step.end, step.num_samples, step.stall_ns, step.packing_ns, step.loading_ns)
    load = (step.loading_cpu_ns, step.num_workers, step.queued_ns, step.exposed_queued_ns)
    phases = [number for each in step.phases for number in (each.phase, each.begin)]
    return step_row((*own, *load), phases, [number for each in step.buckets for number in dataclasses.astuple(each)])


def decoded(trace: RankTrace, rows: Sequence[Sequence[int]]) -> RankTrace:
    """What `Recorder.trace` returns, as one trace."""
    return dataclasses.replace(trace, steps=tuple(map(decode, rows)))


def write(folder: Path, trace: RankTrace) -> Path:
    return files.write(files.path_of(folder, trace.run_info.rank), trace, [encode(step) for step in trace.steps])
