"""What the report says about simulated jobs, each with a fault: golden.txt has it word for word.

python -m tests.report.test_golden      writes golden.txt anew; look at the differences, number by number
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest

from tests.support.traces import MS, simulate
from torchring.observe.recorder.records import RankTrace, RunInfo
from torchring.report.model.merge import merge
from torchring.report.show.sections import about_batch
from torchring.report.show.terminal import plain
from torchring.report.verdict.analysis import analyse
from torchring.report.verdict.findings import Analysis

GOLDEN: Final = Path(__file__).parent / "golden.txt"
Job = Callable[[], list[RankTrace]]


def every(usual: float, num_steps: int, extra: float, ranks: Sequence[int] = (0, 1)) -> Callable[[int, int], float]:
    """In the last of each `num_steps` steps, some ranks take longer."""
    return lambda step, rank: usual + extra * (rank in ranks and step % num_steps == num_steps - 1)


# A step of 40 ms, with noise of 5 %: 2 input, 12 forward, 20 backward, 0.5 between, 4 optimizer, and communication.
BASE: Final[dict[str, Any]] = {
    **{"num_steps": 150, "input_ms": 2, "forward_ms": 12, "backward_ms": 20, "between_ms": 0.5, "optimizer_ms": 4},
    **{"bucket_mb": (2.0, 2.0), "latency_ms": 0.05, "gigabytes_per_s": 10.0, "noise": 0.05, "start_up_s": 0.1},
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
    "forward, rank 1": {"forward_ms": [12, 42]},
    "backward, rank 1": {"backward_ms": [20, 50]},
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
    "64 ranks": {
        **{"num_ranks": 64, "num_steps": 20, "forward_ms": [12] * 37 + [42] + [12] * 26, "ranks_per_host": 8},
    },
    # pauses
    "before forward": {"input_ms": every(2, 25, 500)},
    "evaluation": {"input_ms": every(2, 40, 600), "loading_ms": every(1, 40, 30)},
    "a new epoch": {"input_ms": every(2, 40, 600), "loading_ms": every(1, 40, 590)},
    "before forward, rank 1": {"input_ms": every(2, 50, 800, [1])},
    "a pause in forward": {"num_steps": 300, "forward_ms": every(12, 100, 3000)},
    "a pause in step(), rank 1": {"num_steps": 300, "optimizer_ms": every(4, 100, 3000, [1])},
    "a pause before step(), rank 1": {"num_steps": 300, "between_ms": every(0.5, 100, 3000, [1])},
    "shorter pauses before step(), rank 1": {"between_ms": every(0.5, 40, 800, [1])},
    "one pause": {"num_steps": 101, "input_ms": every(2, 100, 3000)},
    "one pause, and a long start-up": {"input_ms": every(2, 100, 3000), "start_up_s": 12.0},
    "a short pause": {"input_ms": every(2, 100, 400, [1])},
    "two pauses": {
        **{"num_steps": 151, "input_ms": every(2, 50, 800, [1]), "optimizer_ms": every(4, 60, 400)},
    },
    # changes
    "slow in turns": {"num_steps": 300, "input_ms": lambda step, rank: 2 + 60 * (step % 2 == rank)},
    # how much is known
    "start-up": {"start_up_s": 12.0},
    "one step": {"num_steps": 1, "input_ms": 60},
    "nine steps": {"num_steps": 9, "input_ms": 60},
    "one rank": {"num_ranks": 1, "bucket_mb": ()},
    "one rank, loader": {"num_ranks": 1, "bucket_mb": (), "input_ms": 60},
    "two hosts": {"num_ranks": 4, "ranks_per_host": 2, "input_ms": [2, 40, 2, 2], "skew_ms": [0, 0, 5000, 5000]},
}

# 4 ranks that compute for 100.5 ms. 1 MB takes 1.5 MB / bandwidth and the latency.
QUICK: Final = {"gigabytes_per_s": 20.0, "latency_ms": 0.05}
OF_FOUR: Final[dict[str, dict[str, Any]]] = {
    # The large buckets are ready after 40 and 60 of 60 ms of backward, and take 75.2 ms each: until 190.4.
    "slow link": {"gigabytes_per_s": 0.5, "ranks_per_host": 1},
    # 200 buckets of 1 ms + 0.075 ms each; the first leaves after 0.3 ms.
    "tiny buckets": {"bucket_mb": [0.05, 0.15] * 100, "latency_ms": 1.0, "ranks_per_host": 2},
    # Equal sizes do not tell latency from bandwidth. Within a host, no link is as slow as that.
    "tiny buckets of one size, 4 hosts": {
        **{"noise": 0, "bucket_mb": [0.004] * 40, "latency_ms": 3.0, "ranks_per_host": 1},
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
                trace,
                run_info=dataclasses.replace(trace.run_info, **(run_info or {})),
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


def _slower(by_ms: float, queued_ms: int, input_ms: float = 2) -> Job:
    """4 ms are less than 5 % of a step; and for 20 ms, another program may have the core of the rank."""
    backward_ms = [60, 60 + by_ms]
    job = partial(simulate, 2, 40, noise=0.01, input_ms=[2, input_ms], backward_ms=backward_ms, gigabytes_per_s=100.0)
    known = changed(job, queued_ns=0, exposed_queued_ns=0)
    return changed(known, [1], queued_ns=queued_ms * MS)


JOBS: Final[dict[str, Job]] = {
    **{name: partial(simulate, **{**BASE, **options}) for name, options in OF_BASE.items()},
    **{
        name: partial(simulate, 4, **{"num_steps": 20, "noise": 0.005, "start_up_s": 0.1, **options})
        for name, options in OF_FOUR.items()
    },
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
    "1 thread each on 4 cores": changed(_CROWDED, run_info={"num_threads": 1}),
    # Fewer ranks are not advised: 2 would be twice as fast, with half of the samples.
    "more ranks than cores": changed(_CROWDED, run_info={"num_cores": 2}, queued_ns=55 * MS, exposed_queued_ns=5 * MS),
    "and other programs": changed(_CROWDED, run_info={"num_cores": 2}, queued_ns=90 * MS, exposed_queued_ns=5 * MS),
    "slow communication": _IDLE,
    "no core": _of_cores(),
    "no core, while workers wait for a disk": _of_cores(num_workers=4, loading_cpu_ns=MS),
    "no core, because of workers": _of_cores(num_workers=4, loading_cpu_ns=99 * MS),
    "20 ms slower": _slower(20, 0),
    "20 ms slower, for want of a core": _slower(20, 20),
    "4 ms slower": _slower(4, 0),
    "20 ms slower, and late data": _slower(20, 0, 62),
    **{
        f"a slow {name}": changed(partial(simulate, 2, 12, optimizer_ms=40), run_info={"options": {"optimizer": name}})
        for name in ("AdamW", "SGD", "RMSprop")  # which cannot be fused
    },
}
# Of these, all that is printed; of the others, the verdict, what is strange, and what is advised.
WHOLE: Final = (
    *("nothing", "loader, rank 1", "64 ranks", "two pauses", "from 60 % on", "one step", "one rank", "two hosts"),
    *("slow link", "huge late parameter", "no core, because of workers"),
)


def analysis_of(job: Job) -> Analysis:
    """Checks what is true of each job."""
    traces = job()
    analysis = analyse(merge(traces))
    steps = [[step for step in trace.steps if step.number >= 3] for trace in traces]
    if len(steps[0]) > 9:
        seconds = max((each[-1].end - each[0].begin) / 1e9 for each in steps if each)
        assert analysis.steps_per_s == pytest.approx(len(steps[0]) / seconds)
        samples = sum(step.num_samples for each in steps for step in each)
        assert analysis.samples_per_s == pytest.approx(samples / seconds)
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
    analysis = analysis_of(JOBS[name])
    if name in WHOLE:
        return plain(analysis)
    lines = [analysis.verdict.sentence, *(f"! {problem}" for problem in analysis.problems)]
    lines += [f"{each.saves_share:.0%} {each.what}: {each.how}".rstrip(": ") for each in analysis.advice]
    return "\n".join(lines) + "\n"


def golden() -> dict[str, str]:
    jobs = GOLDEN.read_text(encoding="utf-8").split("=== ")[1:]
    return dict(each.split("\n", 1) for each in jobs)  # type: ignore[misc]


@pytest.mark.parametrize("name", JOBS)
def test_the_report_says_what_it_said(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    assert summary(name) == golden()[name]


def test_each_golden_text_belongs_to_a_job() -> None:
    assert list(golden()) == list(JOBS)


@pytest.mark.parametrize(
    ("batch_size", "noise_scale", "words"),
    [
        (
            512,
            2134,
            "noise scale about 2,100: twice the ranks would take 60 % of the steps, and four times the ranks 40 %.",
        ),
        (512, 100, "twice the ranks would take 92 % of the steps, and four times the ranks 88 %."),
        (64, math.inf, "Batch 64; noise hides the gradient of so few samples"),
        (0, 100, ""),
        (64, -1, ""),
    ],
)
def test_whether_a_larger_batch_pays(batch_size: float, noise_scale: float, words: str) -> None:
    sentence = about_batch(RunInfo(batch_size=batch_size, noise_scale=noise_scale))
    assert words in sentence
    assert bool(sentence) == bool(words)
    first, *others = simulate(**BASE)
    run_info = dataclasses.replace(first.run_info, batch_size=batch_size, noise_scale=noise_scale)
    analysis = analyse(merge([dataclasses.replace(first, run_info=run_info), *others]))
    assert sentence in " ".join(plain(analysis).split())


if __name__ == "__main__":
    GOLDEN.write_text("".join(f"=== {name}\n{summary(name)}" for name in JOBS), encoding="utf-8")
