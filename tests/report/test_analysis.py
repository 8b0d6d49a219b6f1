"""Who waits for whom, what is exposed and which steps count, in jobs of which each number is known."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest

from tests.support.traces import MS, simulate
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
from torchring.report.model.timing import spans_of
from torchring.report.verdict.analysis import analyse
from torchring.report.verdict.findings import Analysis

QUICK = {"gigabytes_per_s": 20.0, "latency_ms": 0.05}
SLOW_LOADER = {"input_ms": [2, 2, 2, 63], **QUICK}


def analysis_of(num_ranks: int = 4, **options: Any) -> Analysis:
    return analyse(merge(simulate(num_ranks, **options)))


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("seed", [0, 1])
def test_noise_of_10_percent_accuses_nobody(num_ranks: int, seed: int) -> None:
    verdict = analysis_of(num_ranks, noise=0.1, seed=seed, **QUICK).verdict
    assert verdict.rank is None
    assert verdict.kind == "compute" or verdict.detail == "jitter"


def test_the_one_rank_that_waits_for_nobody_is_awaited_by_the_others() -> None:
    analysis = analysis_of(noise=0, **SLOW_LOADER)
    (wait,) = analysis.waits
    assert (wait.waiting, wait.awaited, wait.mean_ms) == ((0, 1, 2), 3, pytest.approx(61.0))
    assert [rank.is_last_share for rank in analysis.ranks] == [0, 0, 0, 1]
    assert analysis.ranks[0].phases[Phase.WAITING].mean == pytest.approx(61.0)
    assert analysis.ranks[3].phases[Phase.WAITING].mean == 0
    for rank in analysis.ranks:
        assert sum(spread.mean for spread in rank.phases.values()) == pytest.approx(rank.step.mean)
    assert analysis.samples_per_s is not None
    assert analysis.samples_per_s == pytest.approx(64 / 0.1634, rel=0.01)
    assert (analysis.num_steps, analysis.num_left_out) == (47, 3)


def test_clocks_apart_do_not_change_who_waits_for_whom() -> None:
    options = {"input_ms": [2, 40, 2, 2], "ranks_per_host": 2, "num_steps": 20}
    apart = analysis_of(skew_ms=[0, 0, 5000, 5000], **options)
    together = analysis_of(skew_ms=[0] * 4, **options)
    assert apart.waits == together.waits
    assert apart.verdict == together.verdict
    assert apart.verdict.rank == 1


def one_step(num_steps: int = 12, run_info: RunInfo | None = None, **buckets: Any) -> list[RankTrace]:
    """Two ranks with steps of 100 ms: backward from 20 to 60, exposed until 90. Times of buckets are given in ms."""
    traces = []
    for rank in (0, 1):
        steps = []
        for number in range(num_steps):
            at = number * 100

            def ns(ms: float, at: int = at) -> int:
                return round((at + ms) * MS)

            kinds = (
                (Phase.INPUT, 0, 10),
                (Phase.FORWARD, 10, 20),
                (Phase.BACKWARD, 20, 60),
                (Phase.EXPOSED, 60, 90),
            )
            parts = [PhaseRecord(kind, ns(a), ns(b)) for kind, a, b in (*kinds, (Phase.OPTIMIZER, 90, 100))]
            records = [
                BucketRecord(i, 10_000_000, ns(go), ns(go), ns(go), ns(end))
                for i, (go, end) in enumerate(buckets["of_ranks"][rank])
            ]
            stall = round(buckets.get("stall_ms", [0, 0])[rank] * MS)
            steps.append(StepRecord(number, ns(0), ns(100), 8, stall, 0, tuple(parts), tuple(records)))
        who = run_info or RunInfo(algorithm="ring", overlap="thread", size=2, local_size=1)
        traces.append(RankTrace(dataclasses.replace(who, rank=rank), tuple(steps)))
    return traces


def test_a_rank_that_is_late_while_the_link_is_busy_is_not_waited_for() -> None:
    """Bucket 0 takes from 30 to 70, and bucket 1 from 70 to 90, whether rank 1 launches it at 50 or at 60."""
    analysis = analyse(merge(one_step(of_ranks=[[(30, 70), (50, 90)], [(30, 70), (60, 90)]])))
    assert analysis.waits == ()
    assert [bucket.reducing.median for bucket in analysis.buckets] == pytest.approx([40, 20])
    # The link is idle from 40 on: rank 0 waits for bucket 1 from the end of its backward, at 60, until 65.
    analysis = analyse(merge(one_step(of_ranks=[[(30, 40), (60, 90)], [(30, 40), (65, 90)]])))
    assert [(wait.waiting, wait.awaited, wait.mean_ms) for wait in analysis.waits] == [((0,), 1, pytest.approx(5))]


def test_a_bandwidth_is_told_only_if_it_explains_the_cost() -> None:
    """10 MB are reduced in 25 of the 30 ms in which ranks stand still, or in 5."""
    verdict = analyse(merge(one_step(of_ranks=[[(65, 90)]] * 2))).verdict
    assert verdict.sentence.endswith(
        "communication that backward does not hide: 10 MB at 0.4 GB/s (30 ms of 100 ms, between 30 and 30)."
    )
    verdict = analyse(merge(one_step(of_ranks=[[(60, 65)]] * 2))).verdict
    assert "does not hide: 10 MB take 5 ms, and ranks stand still for longer (30 ms of 100 ms" in verdict.sentence


def test_buckets_that_block_backward_make_ranks_wait_for_each_other_in_turns() -> None:
    """With overlap="inline" between hosts: in bucket 0, rank 0 waits for rank 1; in bucket 1, rank 1 for rank 0."""
    run_info = RunInfo(algorithm="ring", overlap="inline", size=2, local_size=1)
    steps = one_step(run_info=run_info, of_ranks=[[(30, 40), (60, 65)], [(38, 40), (53, 65)]], stall_ms=[10, 2])
    analysis = analyse(merge(steps))
    waits = {(wait.waiting, wait.awaited): wait.mean_ms for wait in analysis.waits}
    assert waits == {((0,), 1): pytest.approx(8), ((1,), 0): pytest.approx(7)}
    assert "Reduce in the background" in [each.what for each in analysis.advice]


def test_within_a_host_standstill_says_how_fast_memory_is() -> None:
    """Each rank stands still for 10 ms in backward and 30 ms after, while 20 MB are reduced."""
    run_info = RunInfo(algorithm="direct", size=2, local_size=2)
    traces = one_step(run_info=run_info, of_ranks=[[(25, 89), (60, 90)], [(25, 89), (60, 90)]], stall_ms=[10, 10])
    analysis = analyse(merge(traces))
    assert analysis.fitted is not None
    assert analysis.fitted.gigabytes_per_s == pytest.approx(0.5)
    assert not analysis.fitted.is_alpha_known
    assert analysis.bandwidth is not None
    assert analysis.bandwidth.median == pytest.approx(0.5)
    assert analysis.predictions[0].exposed_ms == pytest.approx(40)
    assert "--bandwidth" in analysis.predictions_note
    # Of two hosts, a thread reduces in the background: 20 ms in memory and 8 ms on the network, from 25 and from 60 on.
    given = analyse(merge(traces), Network(0.0, 1.25), sizes=(4,))
    assert given.predictions[1].exposed_ms == pytest.approx(28)
    assert "--bandwidth" not in given.predictions_note


def test_a_parameter_for_which_its_bucket_waits_is_named() -> None:
    """The gradients of bucket 0 are ready at 25 % of backward, but for that of a tied embedding, at the end."""
    names = ("head", "embedding", "body")
    parameters = tuple(ParameterRecord(name, 10_000_000, i) for name, i in zip(names, (0, 0, 1), strict=True))
    run_info = RunInfo(algorithm="ring", overlap="thread", size=2, local_size=1, parameters=parameters)
    traces = one_step(run_info=run_info, of_ranks=[[(60, 75), (60, 90)]] * 2)
    arrivals = Arrivals(40 * MS, (10 * MS, 40 * MS, 20 * MS))
    analysis = analyse(merge([dataclasses.replace(trace, arrivals=(arrivals,)) for trace in traces]))
    (late,) = analysis.late_parameters
    assert (late.name, late.bucket, late.holds_ms) == ("embedding", 0, pytest.approx(30))
    assert (analysis.verdict.kind, analysis.verdict.detail) == ("communication", "late parameter")
    assert "bucket 0 waits 30 ms for the gradient of embedding alone" in analysis.verdict.sentence


def test_a_model_compiled_as_a_whole_shows_what_is_exposed_and_why() -> None:
    run_info = RunInfo(algorithm="ring", overlap="thread", size=2, local_size=1, is_compiled=True)
    parameters = tuple(ParameterRecord(name, 4, i) for i, name in enumerate("ab"))
    run_info = dataclasses.replace(run_info, parameters=parameters)
    traces = one_step(run_info=run_info, of_ranks=[[(60, 90), (60, 120)]] * 2)
    for first, is_told in ((57, True), (50, False)):
        arrivals = Arrivals(60 * MS, (60 * MS, first * MS))
        analysis = analyse(merge([dataclasses.replace(trace, arrivals=(arrivals,)) for trace in traces]))
        assert any("All gradients arrive together" in problem for problem in analysis.problems) == is_told
    assert analysis.verdict.kind == "communication"


def test_steps_of_another_layout_of_buckets_are_left_out() -> None:
    before, after = simulate(2, 20, bucket_mb=[50, 1]), simulate(2, 50)
    mixed = [
        dataclasses.replace(new, steps=(*old.steps, *new.steps[20:])) for old, new in zip(before, after, strict=True)
    ]
    analysis = analyse(merge(mixed))
    assert analysis.num_steps == 30
    assert "The layout of buckets changed during the trace: 17 of 50 steps" in analysis.problems[0]
    assert [bucket.num_bytes for bucket in analysis.buckets] == [1_000_000, 25_000_000, 25_000_000]


def of_gan(num_steps: int = 60, **of_generator: Any) -> list[RankTrace]:
    """In each third step the generator, which was wrapped first; its backward goes through the discriminator."""
    discriminator, generator = simulate(2, num_steps, **QUICK), simulate(2, num_steps, **{**QUICK, **of_generator})
    traces = []
    for d, g in zip(discriminator, generator, strict=True):
        of_g = ParameterRecord("generator.weight", 120_000_000, 0, optimizer=1)
        of_d = [bucket.num_bytes for bucket in d.steps[0].buckets]
        steps = []
        for number, step in enumerate(d.steps):
            if number % 3 == 2:
                step = g.steps[number]
                first = [dataclasses.replace(step.buckets[0], index=i, num_bytes=size) for i, size in enumerate(of_d)]
                step = dataclasses.replace(step, buckets=(*first, dataclasses.replace(step.buckets[0], optimizer=1)))
            steps.append(step)
        run_info = dataclasses.replace(d.run_info, parameters=(*d.run_info.parameters, of_g))
        traces.append(dataclasses.replace(d, run_info=run_info, steps=tuple(steps)))
    return traces


def test_the_steps_of_all_optimizers_count() -> None:
    analysis = analyse(merge(of_gan(bucket_mb=[120], input_ms=[2, 152])))
    assert analysis.num_steps == 57
    assert (analysis.verdict.kind, analysis.verdict.rank) == ("input", 1)
    assert analysis.verdict.cost.mean == pytest.approx((2 + 2 + 152) / 3, rel=0.1)
    assert [bucket.index for bucket in analysis.buckets] == [0, 1, 2, 3]
    assert analysis.buckets[0].names == ("layer2.weight",)
    assert analysis.buckets[3].names == ("generator.weight",)
    assert "the steps that send 171 MB, layer2.weight and 3 more parameters" in analysis.problems[0]
    assert "requires_grad_(False)" in analysis.problems[0]
    (now, *_) = analysis.predictions
    assert now.step_ms == pytest.approx(analysis.step.mean)
    assert now.exposed_ms < 0.2 * analysis.step.mean


@pytest.mark.parametrize("all_steps", [False, True])
def test_a_step_that_was_aborted_on_one_rank_does_not_count(all_steps: bool) -> None:
    first, second = simulate(2, 30)
    cut = [
        dataclasses.replace(step, buckets=step.buckets[:1]) if all_steps or step.number == 29 else step
        for step in second.steps
    ]
    analysis = analyse(merge([first, dataclasses.replace(second, steps=tuple(cut))]))
    assert analysis.num_steps == (27 if all_steps else 26)
    assert len(analysis.buckets) == (0 if all_steps else 3)


def test_the_median_step() -> None:
    analysis = analysis_of(noise=0.05, **SLOW_LOADER)
    i, timing = analysis.median_step, analysis.timing
    assert (timing.end - timing.begin)[i].max() == pytest.approx(analysis.step.mean, rel=0.02)
    for rank, step in enumerate(analysis.job.steps[i]):
        spans = spans_of(step, analysis.critical.waiting[i, rank])
        assert all(a[2] == b[1] for a, b in itertools.pairwise(spans))
        assert (Phase.WAITING in [phase for phase, *_ in spans]) == (rank != 3)
    assert (analysis.critical.last[i] == 3).all()
