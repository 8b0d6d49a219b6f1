"""Advice fits what is slow in a simulated job, and names what it assumes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from tests.support.traces import MS, simulate
from torchring.observe.recorder.records import RankTrace
from torchring.report.model.merge import merge
from torchring.report.show.terminal import plain
from torchring.report.verdict.analysis import analyse
from torchring.report.verdict.findings import Analysis


def simulated(num_ranks: int, **options: Any) -> list[RankTrace]:
    """A ring whose messages take 0.1 ms each, and 1.25 GB/s."""
    defaults = {"latency_ms": 0.2 * (num_ranks - 1), "gigabytes_per_s": 1.25, "ranks_per_host": 1, "noise": 0.05}
    return simulate(num_ranks, **(defaults | options))


def of(num_ranks: int, **options: Any) -> Analysis:
    return analyse(merge(simulated(num_ranks, **options)))


def advice_of(analysis: Analysis) -> dict[str, float]:
    return {each.what: each.saves_share for each in analysis.advice}


def test_advice_is_sorted_by_what_it_saves() -> None:
    options = {"bucket_mb": [1, 12, 12, 12], "noise": 0.01, "num_steps": 20}
    analysis = of(4, **options)
    share = analysis.exposed_ms / analysis.step.mean
    assert advice_of(analysis)["Send gradients in 16 bits"] == pytest.approx(share / 2, abs=0.01)
    late = of(4, input_ms=[2, 2, 62, 2], **options)
    assert advice_of(late)["Do less between step() and forward on rank 2"] == pytest.approx(
        31 / late.step.mean, abs=0.02
    )
    assert [each.saves_share for each in late.advice] == sorted(advice_of(late).values(), reverse=True)
    for each in late.advice:
        assert each.predicted_ms == pytest.approx(late.step.mean * (1 - each.saves_share))


def changed(traces: list[RankTrace], run_info: dict[str, Any], **of_steps: int) -> list[RankTrace]:
    """The same traces, with other facts about the job and about each step."""
    return [
        dataclasses.replace(
            trace,
            run_info=dataclasses.replace(trace.run_info, **run_info),
            steps=tuple(dataclasses.replace(step, **of_steps) for step in trace.steps),
        )
        for trace in traces
    ]


def loading(loading_ms: float, workers: int, num_cores: int, forward_ms: float = 2.0, threads: int = 1) -> Analysis:
    """Two ranks that load a batch for so long, and then compute for 7 ms longer than forward takes."""
    options = {"forward_ms": forward_ms, "backward_ms": 6.0, "between_ms": 0.5, "optimizer_ms": 0.5, "noise": 0.0}
    traces = simulate(2, 20, input_ms=loading_ms, loading_ms=loading_ms, bucket_mb=(0.001,), latency_ms=0.0, **options)
    run_info = {"num_cores": num_cores, "num_threads": threads}
    return analyse(merge(changed(traces, run_info, num_workers=workers)))


@pytest.mark.parametrize(
    ("job", "what", "how", "step_ms"),
    [
        # 40 ms for a batch, and 9 ms for the rest: 5 workers, if there are as many cores.
        ((40, 0, 64), "Load data with 5 workers", "num_workers=5", 9.5),
        ((40, 0, 8), "Load data with 3 workers", "num_workers=3", 9.5),
        ((40, 0, 8, 2, 3), "Load data with 1 worker", "num_workers=1", 9.5),
        ((32, 2, 64), "Load data with 4 workers", "num_workers=4", 25.25),
        # Ranks and workers have no core to spare.
        ((40, 0, 2), "Make batches cheaper to load", "", 29.0),
        ((32, 1, 4), "Make batches cheaper to load", "", 25.0),
        # To take a batch from a worker takes about as long as to load it.
        ((0.5, 0, 64, 0.0), "Make batches cheaper to load", "", 7.25),
    ],
)
def test_workers_are_advised_as_far_as_they_help(job: tuple[Any, ...], what: str, how: str, step_ms: float) -> None:
    analysis = loading(*job)
    found = {each.what: each for each in analysis.advice}
    assert what in found
    assert found[what].predicted_ms == pytest.approx(step_ms, abs=0.1)
    assert how in found[what].how


def test_what_is_in_use_is_not_advised() -> None:
    def with_options(**changes: str) -> set[str]:
        traces = simulated(4, ranks_per_host=2, bucket_mb=[1, 25, 25], num_steps=10)
        run_info = dataclasses.replace(traces[0].run_info, **({"options": changes} if changes else {}))
        return {*advice_of(analyse(merge([dataclasses.replace(traces[0], run_info=run_info), *traces[1:]])))}

    usual = with_options()
    assert usual >= {"Send gradients in 16 bits", "Reduce gradients in every second backward only"}
    changed = with_options(compression="bf16", accumulate="4")
    assert usual - changed == {"Send gradients in 16 bits", "Reduce gradients in every second backward only"}


def test_a_job_that_is_well_gets_no_advice() -> None:
    assert advice_of(of(4, gigabytes_per_s=1000.0, latency_ms=0.0, optimizer_ms=1.0, num_steps=20)) == {}


@pytest.mark.parametrize(("num_threads", "what"), [(2, "Use 1 thread in each rank of host0"), (1, None)])
def test_ranks_that_share_too_few_cores(num_threads: int, what: str | None) -> None:
    traces = simulate(4, 30, noise=0.25, gigabytes_per_s=100)
    crowded = [
        dataclasses.replace(trace, run_info=dataclasses.replace(trace.run_info, num_threads=num_threads))
        for trace in traces
    ]
    assert (what in advice_of(analyse(merge(crowded)))) == (what is not None)


def test_more_ranks_than_cores_are_not_faster_with_fewer_ranks() -> None:
    """4 ranks on 2 cores have none for half of the time. 2 ranks would be twice as fast, with half of the samples."""
    crowded = changed(simulate(4, 30, noise=0.25), {"num_cores": 2}, queued_ns=55 * MS, exposed_queued_ns=5 * MS)
    analysis = analyse(merge(crowded))
    assert not any(what.startswith("Start") for what in advice_of(analysis))
    (more,) = (each for each in analysis.advice if each.what == "Give the ranks on host0 more cores")
    assert "4 ranks with 1 thread each share 2 cores. Fewer ranks would not make the job faster" in more.why
    busy = changed(crowded, {}, queued_ns=90 * MS, exposed_queued_ns=5 * MS)
    assert "share 2 cores with other programs. Fewer" in " ".join(each.why for each in analyse(merge(busy)).advice)


@pytest.mark.parametrize(
    ("workers", "who"),
    [(-1, "other programs hold the cores"), (4, "2 ranks with 1 thread and 4 workers each share 2 cores")],
)
def test_time_without_a_core_is_no_communication(workers: int, who: str) -> None:
    """Of 19 ms in which the ranks stand still, rank 1 has no core for 15; and for 10 ms more of its step."""
    traces = simulate(2, 20, noise=0.0, gigabytes_per_s=1.3275, bucket_mb=(1.0, 25.0))
    assert "Reduce gradients in every second backward only" in advice_of(analyse(merge(traces)))
    (first,), (second,) = (
        changed(traces[i : i + 1], {}, queued_ns=queued * MS, exposed_queued_ns=exposed * MS, num_workers=workers)
        for i, (queued, exposed) in enumerate([(10, 0), (25, 15)])
    )
    analysis = analyse(merge([first, second]))
    (cores,) = (each for each in analysis.advice if each.what == "Give the ranks on host0 more cores")
    assert f"For 25.0 ms of a step, a rank was ready to run, but had no core: {who}." in cores.why
    assert cores.predicted_ms == pytest.approx(analysis.step.mean - 25)
    assert (analysis.verdict.kind, analysis.verdict.rank, analysis.verdict.cost.mean) == (
        "cores",
        None,
        pytest.approx(25),
    )
    assert f"passes while a rank has no core: {who} (25 ms of 120 ms" in analysis.verdict.sentence
    assert [rank.queued.mean for rank in analysis.ranks if rank.queued] == pytest.approx([10, 25])
    assert "no core\n" in plain(analysis)
    assert "Reduce gradients in every second backward only" not in advice_of(analysis)
    (unknown,) = changed([second], {}, queued_ns=-1, exposed_queued_ns=-1)
    assert "Give the ranks on host0 more cores" not in advice_of(analyse(merge([first, unknown])))


@pytest.mark.parametrize(("by_ms", "queued_ms", "kind"), [(20, 0, "straggler"), (20, 20, "cores"), (4, 0, "compute")])
def test_only_a_rank_that_computes_more_slowly_is_accused(by_ms: float, queued_ms: int, kind: str) -> None:
    """4 ms are less than 5 % of a step; and for 20 ms, another program may have the core of the rank."""

    def of(input_ms: float) -> Analysis:
        backward_ms = [60, 60 + by_ms]
        traces = simulate(2, 40, noise=0.01, input_ms=[2, input_ms], backward_ms=backward_ms, gigabytes_per_s=100.0)
        (other,) = changed(traces[:1], {}, queued_ns=0, exposed_queued_ns=0)
        (slow,) = changed(traces[1:], {}, queued_ns=queued_ms * MS, exposed_queued_ns=0)
        return analyse(merge([other, slow]))

    verdict = of(2).verdict
    assert (verdict.kind, verdict.rank) == (kind, None if kind == "compute" else 1)
    late = of(62)  # its data are late, too
    assert (late.verdict.kind, late.verdict.rank) == ("input", 1)
    assert ("Find out what slows rank 1 on host0 down" in advice_of(late)) == (kind == "straggler")
    assert any("had no core" in problem for problem in late.problems) == (kind == "cores")


def test_noise_accuses_nobody() -> None:
    """Each rank is slower for a part of the time, one of them a little more often."""

    def backward_ms(number: int, rank: int) -> float:
        return 90.0 if (number // 4) % 2 == rank else 60.0

    traces = simulate(2, 40, noise=0.3, seed=3, input_ms=[2, 62], backward_ms=backward_ms)
    assert not any("slows" in what for what in advice_of(analyse(merge(traces))))


@pytest.mark.parametrize(("name", "is_advised"), [("AdamW", True), ("SGD", True), ("RMSprop", False)])
def test_fusing_is_advised_for_optimizers_that_can(name: str, is_advised: bool) -> None:
    traces = simulate(2, 12, optimizer_ms=40)
    found = [each.how for each in analyse(merge(changed(traces, {"options": {"optimizer": name}}))).advice]
    assert (f"torch.optim.{name}(model.parameters(), fused=True)" in found) == is_advised
    assert not any("foreach" in how for how in found), "it is slower on the CPU"
