"""The first sentence of the report for each fault that was put into a simulated job: kind, rank, duration, words.

`qa/report_faults_job.py` puts the same faults into real jobs, and prints the truth beside the sentence.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import pytest

from tests.support.traces import MS, simulate
from torchring.observe.recorder.records import RunInfo
from torchring.report.model.merge import merge
from torchring.report.model.timing import find_change
from torchring.report.show.sections import about_batch, table_of_phases, table_of_waits
from torchring.report.show.terminal import plain
from torchring.report.verdict.analysis import analyse
from torchring.report.verdict.findings import Analysis

# A step of 40 ms, with noise of 5 %: 2 input, 12 forward, 20 backward, 0.5 between, 4 optimizer, and communication.
BASE: Final[dict[str, Any]] = {
    **{"num_steps": 150, "input_ms": 2, "forward_ms": 12, "backward_ms": 20, "between_ms": 0.5, "optimizer_ms": 4},
    **{"bucket_mb": (2.0, 2.0), "latency_ms": 0.05, "gigabytes_per_s": 10.0, "noise": 0.05, "start_up_s": 0.1},
}
TELLS_NOTHING: Final = ("compute", None, "")
Wanted = tuple[str, int | None, str]


def every(usual: float, num_steps: int, extra: float, ranks: Sequence[int] = (0, 1)) -> Callable[[int, int], float]:
    """In the last of each `num_steps` steps, some ranks take longer."""
    return lambda step, rank: usual + extra * (rank in ranks and step % num_steps == num_steps - 1)


def later(
    usual: float, first: int, extra: float, ranks: Sequence[int] = (1,), until: int = 9999
) -> Callable[[int, int], float]:
    """From a step on, some ranks take longer."""
    return lambda step, rank: usual + extra * (rank in ranks and first <= step < until)


# What is put in; kind, rank and detail of the verdict; milliseconds that the verdict says; words of its sentence
STEADY: Final[dict[str, tuple[dict[str, Any], Wanted, float, str]]] = {
    "nothing": ({}, TELLS_NOTHING, 38.5, "Nothing holds this job back"),
    "loader, rank 1": (
        {"input_ms": [2, 42], "loading_ms": [1, 41]},
        *(("input", 1, ""), 42, "of each step waits for data on rank 1 ("),
    ),
    "loader, all ranks": (
        {"input_ms": 42, "loading_ms": 41},
        *(("input", None, ""), 42, "of each step waits for data on all ranks ("),
    ),
    "data of an unknown loader, rank 1": (
        {"input_ms": [2, 32]},
        *(("input", 1, ""), 32, "waits for data on rank 1, or for other code between step() and forward ("),
    ),
    "data of an unknown loader, evaluation with a DataLoader": (
        {"input_ms": 32, "loading_ms": every(0, 30, 5)},
        *(("input", None, ""), 32, "waits for data on all ranks, or for other code between step() and forward ("),
    ),
    "other code, all ranks": (
        {"input_ms": 32, "loading_ms": 1},
        *(("input", None, "other code"), 32, "goes to code between step() and forward on all ranks, which waits"),
    ),
    "forward, rank 1": (
        {"forward_ms": [12, 42]},
        *(("straggler", 1, ""), 30, "waits for rank 1, which computes more slowly than the others"),
    ),
    "backward, rank 1": ({"backward_ms": [20, 50]}, ("straggler", 1, ""), 30, "waits for rank 1, which computes"),
    "optimizer, rank 1": (
        {"optimizer_ms": [4, 34]},
        *(("straggler", 1, ""), 30, "rank 1, whose optimizer's step() takes longer than those of the others"),
    ),
    "between, rank 1": (
        {"between_ms": [0.5, 30.5]},
        *(("straggler", 1, ""), 30, "rank 1, which does more between backward and step() than the others"),
    ),
    "longer batches, rank 1": (
        {"forward_ms": [12, 36], "backward_ms": [20, 60], "num_samples": [16, 48]},
        *(("straggler", 1, ""), 64, "rank 1, whose batches have 3 times as many samples as those of the others"),
    ),
    "often late": (
        {"num_steps": 103, "between_ms": every(0.5, 10, 300, [0])},
        *(("straggler", 0, ""), 30, "of the time waits for rank 0, which does more between backward and step()"),
    ),
    "frozen backbone, no model": (
        {"input_ms": 38, "forward_ms": 0},
        *(("compute", None, "forward or data"), 38, "is forward, or waiting for data: the trace does not tell which"),
    ),
    "frozen backbone, no model, DataLoader": (
        {"input_ms": 38, "forward_ms": 0, "loading_ms": 0.2},
        *(("compute", None, "forward or data"), 37.8, "is forward, or code around it: the trace does not tell which"),
    ),
    "DataLoader, rank 1, no model": (
        {"input_ms": [14, 44], "forward_ms": 0, "loading_ms": [1, 31]},
        *(("input", 1, ""), 31, "waits for data on rank 1 ("),
    ),
    "unknown loader, rank 1, no model": (
        {"input_ms": [14, 44], "forward_ms": 0},
        *(("straggler", 1, ""), 30, "rank 1, which takes longer than the others for forward, or waits for data"),
    ),
    "64 ranks": (
        {"num_ranks": 64, "num_steps": 20, "forward_ms": [12] * 37 + [42] + [12] * 26, "ranks_per_host": 8},
        *(("straggler", 37, ""), 30, "waits for rank 37, which computes more slowly than the others"),
    ),
}  # fmt: skip

# What is put in; kind and rank; number and milliseconds of pauses; who, and where
PAUSES: Final[dict[str, tuple[dict[str, Any], tuple[str, int | None], int, float, str, str]]] = {
    "before forward": (
        {"input_ms": every(2, 25, 500)},
        *(("input", None), 6, 500, "each rank", "from step() to forward, for data, evaluation or a checkpoint"),
    ),
    "evaluation": (
        {"input_ms": every(2, 40, 600), "loading_ms": every(1, 40, 30)},
        *(("input", None), 3, 600, "each rank", "from step() to forward, for evaluation or a checkpoint"),
    ),
    "a new epoch": (
        {"input_ms": every(2, 40, 600), "loading_ms": every(1, 40, 590)},
        *(("input", None), 3, 600, "each rank", "from step() to forward, in the DataLoader"),
    ),
    "garbage collector": (
        {"input_ms": every(2, 20, 1200), "collecting_ms": every(0, 20, 1190)},
        *(("input", None), 7, 1200, "each rank", "from step() to forward, in Python's garbage collector"),
    ),
    "garbage collector in step()": (
        {"optimizer_ms": every(4, 30, 1200), "collecting_ms": every(0, 30, 1190)},
        *(("optimizer", None), 5, 1200, "each rank", "in step(), in Python's garbage collector"),
    ),
    "before forward, rank 1": (
        {"input_ms": every(2, 50, 800, [1])},
        *(("input", 1), 3, 800, "rank 1", "from step() to forward"),
    ),
    "forward": (
        {"num_steps": 300, "forward_ms": every(12, 100, 3000)},
        *(("compute", None), 3, 3000, "each rank", "in forward"),
    ),
    "step(), rank 1": (
        {"num_steps": 300, "optimizer_ms": every(4, 100, 3000, [1])},
        *(("optimizer", 1), 3, 3000, "rank 1", "in step()"),
    ),
    "before step(), rank 1": (
        {"num_steps": 300, "between_ms": every(0.5, 100, 3000, [1])},
        *(("optimizer", 1), 3, 3000, "rank 1", "between backward and step()"),
    ),
    "before step(), rank 1, shorter": (
        {"between_ms": every(0.5, 40, 800, [1])},
        *(("optimizer", 1), 3, 800, "rank 1", "between backward and step()"),
    ),
    "one": (
        {"num_steps": 101, "input_ms": every(2, 100, 3000)},
        *(("input", None), 1, 3000, "one pause: in step 99, each rank", "from step() to forward"),
    ),
}  # fmt: skip

# What is put in; kind, rank and detail; milliseconds in the steps that are meant; how the sentence begins; its end
CHANGES: Final[dict[str, tuple[dict[str, Any], Wanted, float, str, str]]] = {
    "from 60 % on": (
        {"num_steps": 300, "input_ms": later(2, 180, 60)},
        *(("input", 1, ""), 62, "From step 180 on, ", "waits for data on rank 1"),
    ),
    "from 40 % on": (
        {"num_steps": 500, "input_ms": later(2, 200, 40)},
        *(("input", 1, ""), 42, "From step 200 on, ", "waits for data on rank 1"),
    ),
    "the second half": (
        {"num_steps": 300, "backward_ms": later(20, 150, 40)},
        *(("straggler", 1, ""), 40, "From step 150 on, ", "waits for rank 1"),
    ),
    "the beginning": (
        {"num_steps": 300, "input_ms": later(2, 0, 60, [0, 1], 100)},
        *(("input", None, ""), 62, "Before step 100, ", "waits for data on all ranks"),
    ),
    "slow in turns": (
        {"num_steps": 300, "input_ms": lambda step, rank: 2 + 60 * (step % 2 == rank)},
        *(("input", None, ""), 62, "", "waits for data on all ranks"),
    ),
}  # fmt: skip


def of(options: dict[str, Any], **others: Any) -> Analysis:
    """The analysis of a job with these faults. Checks what is true of each job."""
    traces = simulate(**{**BASE, **options, **others})
    analysis = analyse(merge(traces))
    steps = [[step for step in trace.steps if step.number >= 3] for trace in traces]
    seconds = max([(each[-1].end - each[0].begin) / 1e9 for each in steps])
    assert analysis.steps_per_s == pytest.approx(len(steps[0]) / seconds)
    samples = sum(step.num_samples for each in steps for step in each)
    assert analysis.samples_per_s == pytest.approx(samples / seconds)
    for rank, each in zip(analysis.ranks, steps, strict=True):
        if analysis.num_steps == len(each):
            durations = [(step.end - step.begin) / MS for step in each]
            expected = np.mean(durations), *np.quantile(durations, (0.5, 0.2, 0.8))
            assert (rank.step.mean, rank.step.median, rank.step.low, rank.step.high) == pytest.approx(expected)
        assert sum(phase.mean for phase in rank.phases.values()) == pytest.approx(rank.step.mean)
    assert path_of(analysis).sum() == pytest.approx(analysis.step.mean)
    return analysis


def path_of(analysis: Analysis) -> Any:
    """The mean of each phase of the rank that the others wait for."""
    return analysis.critical.path[analysis.timing.counts].mean(0)


@functools.cache
def without_fault() -> Analysis:
    return of({})


@pytest.mark.parametrize("name", STEADY)
def test_a_fault_in_all_steps(name: str) -> None:
    options, wanted, cost_ms, said = STEADY[name]
    verdict = of(options).verdict
    assert (verdict.kind, verdict.rank, verdict.detail) == wanted, verdict.sentence
    assert verdict.cost.mean == pytest.approx(cost_ms, rel=0.05, abs=2)
    assert said in verdict.sentence
    assert "take turns" not in verdict.sentence


@pytest.mark.parametrize("name", PAUSES)
def test_pauses(name: str) -> None:
    options, (kind, rank), count, pause_ms, who, place = PAUSES[name]
    analysis, without = of(options), without_fault()
    verdict = analysis.verdict
    assert (verdict.kind, verdict.rank, verdict.detail) == (kind, rank, "pauses"), verdict.sentence
    assert verdict.cost.mean == pytest.approx(pause_ms, rel=0.06)
    run_ms = (options.get("num_steps", BASE["num_steps"]) - 3) / analysis.steps_per_s * 1e3
    assert verdict.share == pytest.approx(count * verdict.cost.mean / run_ms, abs=0.001)
    assert f"{who} takes {verdict.cost.mean:,.0f} ms longer " in verdict.sentence
    assert place in verdict.sentence
    assert analysis.step.mean == pytest.approx(without.step.mean, rel=0.03), "all other numbers are without pauses"
    assert path_of(analysis) == pytest.approx(path_of(without), rel=0.2, abs=0.5)
    assert sum("left out of all numbers but steps/s and samples/s" in each for each in analysis.problems) == 1


@pytest.mark.parametrize("name", CHANGES)
def test_a_job_that_changes(name: str) -> None:
    options, wanted, cost_ms, begin, said = CHANGES[name]
    verdict = of(options).verdict
    assert (verdict.kind, verdict.rank, verdict.detail) == wanted, verdict.sentence
    assert verdict.cost.mean == pytest.approx(cost_ms, rel=0.05)
    assert verdict.sentence.startswith(begin)
    assert said in verdict.sentence
    assert (verdict.steps is None) == (not begin)
    assert "take turns" not in verdict.sentence


def test_a_long_pause_is_more_than_start_up() -> None:
    options = {"input_ms": every(2, 100, 3000), "start_up_s": 12.0}
    assert of(options).verdict.detail == "pauses"
    assert of({"start_up_s": 12.0}).verdict.kind == "start-up"


def test_a_short_pause_is_told_and_the_verdict_is_of_the_rest() -> None:
    analysis = of({"input_ms": every(2, 100, 400, [1])})
    assert (analysis.verdict.kind, analysis.verdict.rank) == ("compute", None)
    assert analysis.problems[0].startswith("6 % of the time goes to one pause: in step 99, rank 1 takes 3")
    two = of({"input_ms": every(2, 50, 800, [1]), "optimizer_ms": every(4, 60, 400)}, num_steps=151)
    assert two.verdict.rank == 1
    assert sum("left out" in problem for problem in two.problems) == 2


def test_a_job_that_becomes_slower_as_a_whole_is_told() -> None:
    analysis = of({"backward_ms": later(20, 80, 20, [0, 1])})
    assert analysis.verdict.kind == "compute"
    assert "From step 80 on, a step takes 60.2 ms on average; before, 39.3 ms." in analysis.problems
    assert not without_fault().problems


@pytest.mark.parametrize("seed", range(20))
def test_noise_is_no_change(seed: int) -> None:
    values = np.random.default_rng(seed).exponential(size=1000)
    assert find_change(values, 0.0) is None
    values[400:] += 1.0
    assert find_change(values, 0.5) == pytest.approx(400, abs=10)
    assert find_change(values, 1.5) is None


@pytest.mark.parametrize("num_steps", [1, 3, 9])
def test_few_steps_give_facts_only(num_steps: int) -> None:
    analysis = analyse(merge(simulate(**{**BASE, "input_ms": 60, "num_steps": num_steps})))
    assert (analysis.advice, analysis.predictions) == ((), ())
    assert "too few for advice and predictions" in analysis.problems[0]
    assert "So few steps do not tell." in plain(analysis)
    unseen = [  # as in each first step
        dataclasses.replace(trace, run_info=dataclasses.replace(trace.run_info, options={"model": "given"}))
        for trace in simulate(**{**BASE, "forward_ms": 0, "num_steps": num_steps})
    ]
    problems = analyse(merge(unseen)).problems
    assert any(problem.startswith("Forward is not told apart") for problem in problems) == (num_steps > 1)


def test_how_a_job_ended_comes_first() -> None:
    first, second = simulate(**BASE)
    crashed = [
        dataclasses.replace(trace, run_info=dataclasses.replace(trace.run_info, ended_by=ended_by))
        for trace, ended_by in ((first, "rank 1 has ended"), (second, "RuntimeError: injected"))
    ]
    verdict = analyse(merge(crashed)).verdict
    assert verdict.sentence.startswith('Rank 1 ended with an error: "RuntimeError: injected". Nothing holds this job')


def test_tables_of_many_ranks_show_those_that_others_wait_for() -> None:
    analysis = of(STEADY["64 ranks"][0])
    phases, waits = table_of_phases(analysis), table_of_waits(analysis)
    assert [row[0] for row in phases.rows][-2:] == ["6 (host0)", "37 (host4)"]
    assert phases.title.endswith("(those of 64 for which others wait most)")
    assert [row[:2] for row in waits.rows] == [("ranks 0-36, 38-63", "37")]


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
