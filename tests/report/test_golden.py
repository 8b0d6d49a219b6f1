"""What the report says about simulated jobs, each with a fault: golden.txt has it word for word.

python -m tests.report.test_golden      writes golden.txt anew; look at the differences, number by number
"""

import dataclasses
import itertools
import math
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from tests.support.documents import golden
from tests.support.traces import MS, simulate, with_facts
from torchring.observe.recorder.records import (
    Arrivals,
    BucketRecord,
    ParameterRecord,
    PhaseRecord,
    RankTrace,
    RunInfo,
    StepRecord,
)
from torchring.observer import Phase
from torchring.report.model.merge import merge
from torchring.report.model.scaling import Network
from torchring.report.show.comparison import beside, compare
from torchring.report.show.sections import about_batch
from torchring.report.show.terminal import plain
from torchring.report.verdict.analysis import analyse
from torchring.report.verdict.findings import Analysis

GOLDEN: Final = Path(__file__).parent / "golden.txt"
Job = Callable[[], list[RankTrace]]


def every(usual: float, num_steps: int, extra: float, ranks: Sequence[int] = (0, 1)) -> Callable[[int, int], float]:
    """In the last of each `num_steps` steps, some ranks take longer."""
    return lambda step, rank: usual + extra * (rank in ranks and step % num_steps == num_steps - 1)


def for_a_while(usual: float, extra: float) -> Callable[[int, int], float]:
    """In 50 steps, rank 1 takes longer."""
    return lambda step, rank: usual + extra * (rank == 1 and 100 <= step < 150)


# A step of 40 ms, with noise of 5 %: 2 input, 12 forward, 20 backward, 0.5 between, 4 optimizer, and communication.
BASE: Final[dict[str, Any]] = {
    **{"num_steps": 150, "input_ms": 2, "forward_ms": 12, "backward_ms": 20, "between_ms": 0.5, "optimizer_ms": 4},
    **{"bucket_mb": (2.0, 2.0), "latency_ms": 0.05, "gigabytes_per_s": 10.0, "noise": 0.05},
}
OF_BASE: Final[dict[str, dict[str, Any]]] = {
    "nothing": {},
    # all steps
    "loader, rank 1": {"input_ms": [2, 42], "loading_ms": [1, 41]},
    "loader, all ranks": {"input_ms": 42, "loading_ms": 41},
    "data of an unknown loader, rank 1": {"input_ms": [2, 32]},
    "an unknown loader, evaluation with a DataLoader": {"input_ms": 32, "loading_ms": every(0, 30, 5)},
    "other code, all ranks": {"input_ms": 32, "loading_ms": 1},
    "other code, rank 1": {"input_ms": [2, 62], "loading_ms": [1, 1]},
    "other code and a slower loader, rank 1": {"input_ms": [2, 92], "loading_ms": [1, 31]},
    "optimizer, rank 1": {"optimizer_ms": [4, 34]},
    "between, rank 1": {"between_ms": [0.5, 30.5]},
    "longer batches, rank 1": {"forward_ms": [12, 36], "backward_ms": [20, 60], "num_samples": [16, 48]},
    "often late": {"num_steps": 103, "between_ms": every(0.5, 10, 300, [0])},
    "late in each fourth step": {"num_steps": 83, "input_ms": every(2, 4, 200, [1])},
    "late after each second step": {"optimizer_ms": every(4, 2, 60, [1])},
    "no model": {"input_ms": 38, "forward_ms": 0},
    "no model, DataLoader": {"input_ms": 38, "forward_ms": 0, "loading_ms": 0.2},
    "no model, DataLoader, rank 1": {"input_ms": [14, 44], "forward_ms": 0, "loading_ms": [1, 31]},
    "no model, unknown loader, rank 1": {"input_ms": [14, 44], "forward_ms": 0},
    "64 ranks": {**{"num_ranks": 64, "num_steps": 20, "forward_ms": [12] * 37 + [42] + [12] * 26, "ranks_per_host": 8}},
    # pauses
    "before forward": {"input_ms": every(2, 25, 500)},
    "evaluation": {"input_ms": every(2, 40, 600), "loading_ms": every(1, 40, 30)},
    "a new epoch": {"input_ms": every(2, 40, 600), "loading_ms": every(1, 40, 590)},
    "before forward, rank 1": {"input_ms": every(2, 50, 800, [1])},
    "a pause in forward": {"num_steps": 300, "forward_ms": every(12, 100, 3000)},
    "a pause in step(), rank 1": {"num_steps": 300, "optimizer_ms": every(4, 100, 3000, [1])},
    "a pause before step(), rank 1": {"num_steps": 300, "between_ms": every(0.5, 100, 3000, [1])},
    "one pause": {"num_steps": 101, "input_ms": every(2, 100, 3000)},
    "a short pause": {"input_ms": every(2, 100, 400, [1])},
    "two pauses": {**{"num_steps": 151, "input_ms": every(2, 50, 800, [1]), "optimizer_ms": every(4, 60, 400)}},
    # changes
    "slow in turns": {"num_steps": 300, "input_ms": lambda step, rank: 2 + 60 * (step % 2 == rank)},
    "slow for a while, rank 1": {"num_steps": 300, "forward_ms": for_a_while(12, 20)},
    # how much is known
    "one step": {"num_steps": 1, "input_ms": 60},
    "nine steps": {"num_steps": 9, "input_ms": 60},
    "one rank": {"num_ranks": 1, "bucket_mb": ()},
    "one rank, loader": {"num_ranks": 1, "bucket_mb": (), "input_ms": 60},
    "two hosts": {"num_ranks": 4, "ranks_per_host": 2, "input_ms": [2, 40, 2, 2], "skew_ms": [0, 0, 5000, 5000]},
}

# 4 ranks that compute for 100.5 ms. 1 MB takes 1.5 MB / bandwidth and the latency.
QUICK: Final[dict[str, Any]] = {"gigabytes_per_s": 20.0, "latency_ms": 0.05}
OF_FOUR: Final[dict[str, dict[str, Any]]] = {
    # The large buckets are ready after 40 and 60 of 60 ms of backward, and take 75.2 ms each: until 190.4.
    "slow link": {"gigabytes_per_s": 0.5, "ranks_per_host": 1},
    # 200 buckets of 1 ms + 0.075 ms each; the first leaves after 0.3 ms.
    "tiny buckets": {"bucket_mb": [0.05, 0.15] * 100, "latency_ms": 1.0, "ranks_per_host": 2},
    # Equal sizes do not tell latency from bandwidth. Within a host, no link is as slow as that.
    "tiny buckets of one size, 4 hosts": {
        **{"noise": 0, "bucket_mb": [0.004] * 40, "latency_ms": 3.0, "ranks_per_host": 1}
    },
    # Hidden: 51 MB. At the end of backward, 120 MB begin, and take 90.2 ms.
    "huge late parameter": {"bucket_mb": [1, 25, 25, 120], "ready_at": [0.1, 0.3, 0.5, 1.0]},
    "optimizer": {"optimizer_ms": 60, **QUICK},
    "clipping": {"between_ms": 30, **QUICK},
    "slow in turns, noise of 40 %": {"num_steps": 60, "noise": 0.4, **QUICK},
}


def changed(job: Job, ranks: Sequence[int] = range(64), run_info: dict[str, Any] | None = None, **of_steps: Any) -> Job:
    """The same traces, with other facts about the job and about each step of some ranks."""

    def traces() -> list[RankTrace]:
        return [
            dataclasses.replace(
                with_facts(trace, **(run_info or {})),
                steps=tuple(dataclasses.replace(step, **of_steps) for step in trace.steps),
            )
            if trace.run_info.rank in ranks
            else trace
            for trace in job()
        ]

    return traces


_CROWDED = partial(simulate, 4, 30, noise=0.25, gigabytes_per_s=100)
# Of 19 ms in which the ranks stand still, rank 1 has no core for 15; and for 10 ms more of its step.
_IDLE = partial(simulate, 2, 20, noise=0.0, gigabytes_per_s=1.3275, bucket_mb=(1.0, 25.0))


def _of_cores(**of_steps: int) -> Job:
    first = changed(_IDLE, [0], queued_ns=10 * MS, exposed_queued_ns=0, **of_steps)
    return changed(first, [1], queued_ns=25 * MS, exposed_queued_ns=15 * MS, **of_steps)


def loading(loading_ms: float, cpu_ms: float, workers: int, num_cores: int, forward_ms: float = 2.0) -> Job:
    """Two ranks that load a batch for so long, and then compute for 7 ms longer than forward takes."""
    options = {"forward_ms": forward_ms, "backward_ms": 6.0, "between_ms": 0.5, "optimizer_ms": 0.5, "noise": 0.0}
    options |= {"input_ms": loading_ms, "loading_ms": loading_ms, "latency_ms": 0.0}
    job = partial(simulate, 2, 20, bucket_mb=(0.001,), **options)
    return changed(
        job, run_info={"num_cores": num_cores, "num_threads": 1}, num_workers=workers, loading_cpu_ns=round(cpu_ms * MS)
    )


_UNKNOWN_LOADER = partial(
    simulate, 4, 10, input_ms=200, noise=0.0, gigabytes_per_s=1000.0, latency_ms=0.0, ranks_per_host=1
)
_SENDS = partial(simulate, 4, 10, gigabytes_per_s=1.25, latency_ms=0.6, ranks_per_host=2)


def one_step(*of_ranks: Sequence[tuple[float, float]], stall_ms: Sequence[float] = (0, 0), **run_info: Any) -> Job:
    """Two ranks with steps of 100 ms: backward from 20 to 60, exposed until 90.

    Args:
        of_ranks: when each bucket of 10 MB leaves and is reduced, in ms.
    """

    def traces() -> list[RankTrace]:
        found = []
        for rank, buckets in enumerate(of_ranks):
            steps = []
            for number in range(12):
                ns = [round((number * 100 + at) * MS) for at in (0, 10, 20, 60, 90, 100)]
                kinds = Phase.INPUT, Phase.FORWARD, Phase.BACKWARD, Phase.EXPOSED, Phase.OPTIMIZER
                parts = tuple(PhaseRecord(*each) for each in zip(kinds, ns, ns[1:], strict=False))
                sent = [[round((number * 100 + at) * MS) for at in times] for times in buckets]
                records = [BucketRecord(i, 10_000_000, go, go, go, end) for i, (go, end) in enumerate(sent)]
                stall = round(stall_ms[rank] * MS)
                steps.append(StepRecord(number, ns[0], ns[-1], 8, stall, 0, parts, tuple(records)))
            facts = {"algorithm": "ring", "overlap": "thread", "size": 2, "local_size": 1, **run_info}
            found.append(RankTrace(RunInfo(rank=rank, **facts), tuple(steps)))
        return found

    return traces


def _arriving(backward_ms: int, ready_ms: Sequence[int], job: Job) -> Job:
    arrivals = (Arrivals(backward_ms * MS, tuple(each * MS for each in ready_ms)),)
    return lambda: [dataclasses.replace(trace, arrivals=arrivals) for trace in job()]


def _parameters(num_bytes: int, of_buckets: dict[str, int]) -> tuple[ParameterRecord, ...]:
    return tuple(ParameterRecord(name, num_bytes, bucket) for name, bucket in of_buckets.items())


def of_gan() -> list[RankTrace]:
    """In each third step the generator, which was wrapped first; its backward goes through the discriminator."""
    options = {"gigabytes_per_s": 20.0, "latency_ms": 0.05}
    discriminator = simulate(2, 60, **options)
    generator = simulate(2, 60, bucket_mb=[120], input_ms=[2, 152], **options)
    traces = []
    for d, g in zip(discriminator, generator, strict=True):
        of_g = ParameterRecord("generator.weight", 120_000_000, 0, optimizer=1)
        of_d = [bucket.num_bytes for bucket in d.steps[0].buckets]
        steps = list(d.steps)
        for number, step in enumerate(g.steps):
            if number % 3 == 2:
                first = [dataclasses.replace(step.buckets[0], index=i, num_bytes=size) for i, size in enumerate(of_d)]
                own = dataclasses.replace(step.buckets[0], optimizer=1)
                steps[number] = dataclasses.replace(step, buckets=(*first, own))
        both = with_facts(d, parameters=(*d.run_info.parameters, of_g))
        traces.append(dataclasses.replace(both, steps=tuple(steps)))
    return traces


def _aborted(first: int) -> Job:
    """From step `first` on, rank 1 has reduced one bucket only."""

    def traces() -> list[RankTrace]:
        other, trace = simulate(2, 30)
        cut = [dataclasses.replace(step, buckets=step.buckets[:1]) for step in trace.steps[first:]]
        return [other, dataclasses.replace(trace, steps=(*trace.steps[:first], *cut))]

    return traces


def _another_layout() -> list[RankTrace]:
    pairs = zip(simulate(2, 20, bucket_mb=[50, 1]), simulate(2, 50), strict=True)
    return [dataclasses.replace(new, steps=(*old.steps, *new.steps[20:])) for old, new in pairs]


def _of_steps(job: Job, **first_and_end: tuple[int, int]) -> Job:
    """Some ranks, as rank1=(20, 30), have these steps only."""
    return lambda: [
        dataclasses.replace(trace, steps=trace.steps[slice(*first_and_end.get(f"rank{rank}", (0, None)))])
        for rank, trace in enumerate(job())
    ]


def _sampled(job: Job, phase: Phase, *lines: str) -> Job:
    """Samples have found each of the lines once in each step."""

    def traces() -> list[RankTrace]:
        samples = tuple((step.number, int(phase), line) for step in job()[0].steps for line in lines)
        return [dataclasses.replace(trace, samples=samples) for trace in job()]

    return traces


def _of_two_runs() -> list[RankTrace]:
    """Rank 1 of the second run was killed, and wrote nothing. Its file is that of the first run, as that of rank 3."""
    now = changed(partial(simulate, 3, 20), run_info={"run": "now", "written_at": 70.0})()
    earlier = changed(partial(simulate, 4, 20), run_info={"run": "earlier", "written_at": 10.0})()
    return [now[0], earlier[1], earlier[3], now[2]]


def _while_others_compute() -> list[RankTrace]:
    """For a while, the core of rank 1 has something else to do."""

    def queued(step: StepRecord) -> StepRecord:
        return dataclasses.replace(step, queued_ns=20 * MS * (100 <= step.number < 150), exposed_queued_ns=0)

    job = simulate(**{**BASE, **OF_BASE["slow for a while, rank 1"]})
    return [dataclasses.replace(trace, steps=tuple(map(queued, trace.steps))) for trace in job]


def _slower(by_ms: float, queued_ms: int, input_ms: float = 2) -> Job:
    """4 ms are less than 5 % of a step; and for 20 ms, another program may have the core of the rank."""
    backward_ms = [60, 60 + by_ms]
    job = partial(simulate, 2, 40, noise=0.01, input_ms=[2, input_ms], backward_ms=backward_ms, gigabytes_per_s=100.0)
    known = changed(job, queued_ns=0, exposed_queued_ns=0)
    return changed(known, [1], queued_ns=queued_ms * MS)


# Each rank stands still for 10 ms in backward and 30 ms after, while 20 MB are reduced: 0.5 GB/s.
_MEMORY = one_step(*[[(25, 89), (60, 90)]] * 2, stall_ms=[10, 10], algorithm="direct", overlap="inline", local_size=2)

JOBS: Final[dict[str, Job]] = {
    **{name: partial(simulate, **{**BASE, **options}) for name, options in OF_BASE.items()},
    **{name: partial(simulate, 4, **{"num_steps": 20, "noise": 0.005, **options}) for name, options in OF_FOUR.items()},
    "crashed": changed(
        changed(partial(simulate, **BASE), [0], {"ended_by": "rank 1 has ended"}),
        *([1], {"ended_by": "RuntimeError: injected"}),
    ),
    "a model that was never called": changed(
        partial(simulate, **{**BASE, "forward_ms": 0, "num_steps": 3}), run_info={"options": {"model": "given"}}
    ),
    "tiny buckets of one size, by a ring": changed(
        partial(simulate, 4, 20, noise=0, bucket_mb=[0.004] * 40, latency_ms=3.0), run_info={"algorithm": "ring"}
    ),
    "2 threads each on 4 cores": changed(_CROWDED, run_info={"num_threads": 2}),
    # Fewer ranks are not advised: 2 would be twice as fast, with half of the samples.
    "more ranks than cores": changed(_CROWDED, run_info={"num_cores": 2}, queued_ns=55 * MS, exposed_queued_ns=5 * MS),
    "and other programs": changed(_CROWDED, run_info={"num_cores": 2}, queued_ns=90 * MS, exposed_queued_ns=5 * MS),
    "slow communication": _IDLE,
    "no core, while workers wait for a disk": _of_cores(num_workers=4, loading_cpu_ns=MS),
    "data of rank 1, sampled": _sampled(
        partial(simulate, **{**BASE, **OF_BASE["data of an unknown loader, rank 1"]}),
        *(Phase.INPUT, "train.py:9 (read())", "train.py:8 (log())", "train.py:9 (read())"),
    ),
    "a pause, sampled": _sampled(
        partial(simulate, **{**BASE, **OF_BASE["before forward"]}),
        *(Phase.INPUT, "a.py:1 (a())", "b.py:1 (b())", "a.py:2 (c())"),
    ),
    "no core, because of workers": _of_cores(num_workers=4, loading_cpu_ns=99 * MS),
    "slow for a while, for want of a core": _while_others_compute,
    "20 ms slower": _slower(20, 0),
    "20 ms slower, for want of a core": _slower(20, 20),
    "4 ms slower": _slower(4, 0),
    "20 ms slower, and late data": _slower(20, 0, 62),
    # 40 ms for a batch, without work for a core: 5 workers load one in 8 ms, and the rank needs 9.5 ms.
    "loading, no work": loading(40, 0, 0, 2),
    # One worker is there. A step takes as long as it needs for a batch: 41 ms.
    "loading, one worker": loading(32, 0, 1, 2),
    # To take a batch from a worker takes as long as to load it.
    "loading, quick": loading(0.6, 0.6, 0, 64, 0.0),
    "loading, workers that keep up": loading(0.6, 8.0, 4, 2),
    # 200 ms between step() and forward, and 98.5 ms for the rest: as much work for cores. Each rank has a host.
    **{
        f"an unknown loader, {cores} cores": changed(_UNKNOWN_LOADER, run_info={"num_cores": cores}) for cores in (1, 2)
    },
    "all can be advised": _SENDS,
    "all is in use": changed(_SENDS, run_info={"options": {"compression": "bf16", "accumulate": "4"}}),
    "well": partial(simulate, 4, 20, gigabytes_per_s=1000.0, latency_ms=0.0, optimizer_ms=1.0),
    # Bucket 0 takes from 30 to 70, and bucket 1 from 70 to 90, whether rank 1 launches it at 50 or at 60.
    "late while the link is busy": one_step([(30, 70), (50, 90)], [(30, 70), (60, 90)]),
    # The link is idle from 40 on: rank 0 waits for bucket 1 from the end of its backward, at 60, until 65.
    "late while the link is idle": one_step([(30, 40), (60, 90)], [(30, 40), (65, 90)]),
    # A bandwidth is told only if it explains the cost: 10 MB are reduced in 25 of the 30 ms, or in 5.
    "a slow bucket": one_step([(65, 90)], [(65, 90)]),
    "a quick bucket": one_step([(60, 65)], [(60, 65)]),
    # In bucket 0, rank 0 waits for rank 1; in bucket 1, rank 1 for rank 0.
    "standstill in memory": _MEMORY,
    # On two hosts, a thread reduces in the background: 20 ms in memory, 8 ms on the network, from 25 and from 60 on.
    "standstill in memory, predicted for a network": _MEMORY,
    # The gradients of bucket 0 are ready at 25 % of backward, but for that of a tied embedding, at the end.
    "a late parameter": _arriving(
        40,
        (10, 40, 20),
        one_step(
            *[[(60, 75), (60, 90)]] * 2, parameters=_parameters(10_000_000, {"head": 0, "embedding": 0, "body": 1})
        ),
    ),
    **{
        f"compiled, the first gradient after {first} of 60 ms": _arriving(
            60,
            (60, first),
            one_step(*[[(60, 90), (60, 120)]] * 2, is_compiled=True, parameters=_parameters(4, {"a": 0, "b": 1})),
        )
        for first in (57, 50)
    },
    "another layout of buckets": _another_layout,
    "two optimizers": of_gan,
    "one step aborted": _aborted(29),
    "all steps aborted": _aborted(0),
    "ranks without common steps": _of_steps(partial(simulate, 3, 30), rank0=(0, 10), rank1=(20, 30), rank2=(0, 0)),
    "steps that were forgotten": _of_steps(partial(simulate, 3, 30), rank1=(0, 25), rank2=(12, 30)),
    "files of another run": _of_two_runs,
    "a batch that may be larger": changed(
        partial(simulate, **BASE), run_info={"batch_size": 512, "noise_scale": 2134.0}
    ),
    **{
        f"a slow {name}": changed(partial(simulate, 2, 12, optimizer_ms=40), run_info={"options": {"optimizer": name}})
        for name in ("AdamW", "SGD", "RMSprop")  # which cannot be fused
    },
}
_NOTHING = partial(simulate, **BASE)
# Beside each other
PAIRS: Final[dict[str, tuple[Job, Job]]] = {
    "of one script": (_NOTHING, partial(simulate, **{**BASE, "seed": 1})),
    "two halves of one run": tuple(_of_steps(_NOTHING, rank0=half, rank1=half) for half in ((0, 75), (75, 150))),
    "a loader that was mended": (
        JOBS["loader, rank 1"],
        changed(_NOTHING, run_info={"options": {"bucket_mb": "5", "fused": "True"}}, num_workers=2),
    ),
    "twice the batch": (_NOTHING, partial(simulate, **{**BASE, "num_samples": 32, "backward_ms": 30})),
    "other programs": (JOBS["20 ms slower, for want of a core"], _slower(0, 0)),
    "unknown samples": (_NOTHING, partial(simulate, **{**BASE, "num_samples": 0})),
    "slow for a while": (_NOTHING, partial(simulate, **{**BASE, "forward_ms": lambda step, _: 12 + 30 * (step < 60)})),
    "few steps": (_NOTHING, JOBS["nine steps"]),
}
# Of these, all that is printed; of the others, the verdict, what is strange, and what is advised.
WHOLE: Final = (
    *("nothing", "loader, rank 1", "64 ranks", "two pauses", "one step", "one rank", "two hosts"),
    *("slow link", "huge late parameter", "no core, because of workers"),
    *("late while the link is busy", "late while the link is idle", "standstill in memory"),
    *("data of rank 1, sampled", "a pause, sampled"),
    *("standstill in memory, predicted for a network", "another layout of buckets", "two optimizers"),
    *("one step aborted", "all steps aborted", "steps that were forgotten", "a batch that may be larger"),
)
NETWORKS: Final = {"standstill in memory, predicted for a network": Network(0.0, 1.25)}  # those that are given


def analysis_of(job: Job, network: Network | None = None) -> Analysis:
    traces = job()
    analysis = analyse(merge(traces), network)
    traces = [trace for trace in traces if trace.run_info.rank in [each.rank for each in analysis.ranks]]
    steps = [[step for step in trace.steps if step.number >= 3] for trace in traces]
    is_whole = all(a.end == b.begin for a, b in itertools.pairwise(steps[0]))
    if 9 < analysis.num_steps == len(steps[0]) and is_whole:
        seconds = max((each[-1].end - each[0].begin) / 1e9 for each in steps if each)
        assert analysis.steps_per_s == pytest.approx(len(steps[0]) / seconds)
        samples = sum(step.num_samples for each in steps for step in each)
        assert (analysis.samples_per_s or 0.0) == pytest.approx(samples / seconds)
    for rank, each in zip(analysis.ranks, steps, strict=True):
        if analysis.num_steps == len(each):
            durations = [(step.end - step.begin) / MS for step in each]
            expected = np.mean(durations), *np.quantile(durations, (0.5, 0.2, 0.8))
            assert (rank.step.mean, rank.step.median, rank.step.low, rank.step.high) == pytest.approx(expected)
        assert sum(phase.mean for phase in rank.phases.values()) == pytest.approx(rank.step.mean)
    path = analysis.critical.path[analysis.timing.counts]  # of the rank that the others wait for
    assert path.mean(0).sum() == pytest.approx(analysis.step.mean)
    return analysis


def summary(name: str) -> str:
    if name in PAIRS:
        return beside(*map(analysis_of, PAIRS[name]))
    analysis = analysis_of(JOBS[name], NETWORKS.get(name))
    if name in WHOLE:
        return plain(analysis)
    lines = [analysis.verdict.sentence, *(f"! {problem}" for problem in analysis.problems)]
    advice = [(f"{it.saves_share:.0%}, {it.predicted_ms:.4g} ms: {it.what}", it.how) for it in analysis.advice]
    lines += [": ".join(filter(None, each)) for each in advice]
    return "\n".join(lines) + "\n"


def test_the_report_says_what_it_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert (said := {name: summary(name) for name in (*JOBS, *PAIRS)}) == golden(GOLDEN)
    assert not [line for name in (*WHOLE, *PAIRS) for line in said[name].splitlines() if len(line) > 80]


def test_noise_may_hide_the_gradient() -> None:
    said = about_batch(RunInfo(batch_size=64, noise_scale=math.inf))
    assert "Batch 64; noise hides the gradient of so few samples" in said


def test_noise_of_10_percent_is_no_change_and_5_percent_more_are() -> None:
    jobs = [analyse(merge(simulate(2, noise=0.1, seed=seed, **QUICK))) for seed in range(20)]
    assert not [pair for pair in itertools.pairwise(jobs) if not compare(*pair)["step"].is_noise]
    slower = analyse(merge(simulate(2, noise=0.1, forward_ms=36, seed=20, **QUICK)))
    assert sum(not compare(each, slower)["step"].is_noise for each in jobs) > 15


def test_noise_of_10_percent_accuses_nobody() -> None:
    for num_ranks, seed in itertools.product((2, 3, 4, 8), (0, 1)):
        verdict = analyse(merge(simulate(num_ranks, noise=0.1, seed=seed, **QUICK))).verdict
        assert verdict.rank is None, (num_ranks, seed)
        assert verdict.kind == "compute" or "the ranks take turns at that" in verdict.sentence, (num_ranks, seed)


if __name__ == "__main__":
    os.environ["COLUMNS"] = "80"
    GOLDEN.write_text("".join(f"=== {name}\n{summary(name)}" for name in (*JOBS, *PAIRS)), encoding="utf-8")
