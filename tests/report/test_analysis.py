"""The verdict finds what was put into a simulated job, and its numbers are those of the simulation."""

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
# Each with the cost in ms of the step, and the length of the step, that follow from the durations that are given.
# Without faults, ranks compute for 100.5 ms. Of N = 4 ranks, 1 MB takes 1.5 MB / bandwidth and the latency.
FAULTS = {
    "slow loader": ({"input_ms": [2, 2, 2, 63], **QUICK}, "input", 3, "", 63.0, 163.4),
    "slow loaders": ({"input_ms": 60, **QUICK}, "input", None, "", 60.0, 160.4),
    "slow rank": (
        {"forward_ms": [30, 30, 45, 30], "backward_ms": [60, 60, 90, 60], "optimizer_ms": [8, 8, 12, 8], **QUICK},
        *("straggler", 2, "", 49.0, 151.4),
    ),
    # The large buckets are ready after 40 and 60 of 60 ms of backward, and take 75.2 ms each: until 190.4.
    "slow link": ({"gigabytes_per_s": 0.5, "ranks_per_host": 1}, "communication", None, "slow link", 130.4, 230.9),
    # 200 buckets of 1 ms + 0.075 ms each; the first leaves after 0.3 ms.
    "tiny buckets": (
        {"bucket_mb": [0.05, 0.15] * 100, "latency_ms": 1.0, "ranks_per_host": 2},
        *("communication", None, "small buckets", 155.3, 255.8),
    ),
    # Hidden: 51 MB. At the end of backward, 120 MB begin, and take 90.2 ms.
    "huge late parameter": (
        {"bucket_mb": [1, 25, 25, 120], "ready_at": [0.1, 0.3, 0.5, 1.0]},
        *("communication", None, "late parameter", 90.2, 190.7),
    ),
    "optimizer": ({"optimizer_ms": 60, **QUICK}, "optimizer", None, "", 60.0, 154.4),
    "clipping": ({"between_ms": 30, **QUICK}, "optimizer", None, "between", 30.0, 131.9),
    "nothing": (QUICK, "compute", None, "", 100.5, 102.4),
}  # fmt: skip


def analysis_of(num_ranks: int = 4, **options: Any) -> Analysis:
    return analyse(merge(simulate(num_ranks, **options)))


@pytest.mark.parametrize("name", FAULTS)
def test_the_verdict_finds_the_fault(name: str) -> None:
    options, kind, rank, detail, cost_ms, step_ms = FAULTS[name]
    analysis = analysis_of(noise=0.005, num_steps=20, start_up_s=0.1, **options)
    verdict = analysis.verdict
    assert (verdict.kind, verdict.rank, verdict.detail) == (kind, rank, detail)
    assert verdict.cost.mean == pytest.approx(cost_ms, rel=0.02, abs=0.5)
    assert analysis.step.mean == pytest.approx(step_ms, rel=0.02)
    assert verdict.share == pytest.approx(cost_ms / step_ms, abs=0.02)
    assert verdict.sentence.startswith(f"{verdict.share:.0%}".replace("%", " %")) or kind == "compute"
    assert verdict.cost.low <= verdict.cost.mean <= verdict.cost.high
    path = analysis.critical.path[analysis.timing.counts]
    assert path.mean(0).sum() == pytest.approx(analysis.step.mean, rel=0.01)


@pytest.mark.parametrize(
    ("per_host", "said"), [(4, "most of it latency of 40"), (1, "because of latency or a slow link")]
)
def test_tiny_buckets_of_one_size(per_host: int, said: str) -> None:
    """Equal sizes do not tell latency from bandwidth. Within a host, no link is as slow as that."""
    traces = simulate(4, 20, noise=0, bucket_mb=[0.004] * 40, latency_ms=3.0, ranks_per_host=per_host)
    ring = [dataclasses.replace(each, run_info=dataclasses.replace(each.run_info, algorithm="ring")) for each in traces]
    analysis = analyse(merge(ring))
    assert (analysis.verdict.kind, analysis.verdict.detail) == ("communication", "small buckets")
    assert said in analysis.verdict.sentence
    assert "40 small buckets of 0.004 MB" in analysis.verdict.sentence
    assert (analysis.advice[0].what == "Use buckets of 1 MiB") == (per_host == 4)


@pytest.mark.parametrize(
    ("options", "what", "why"),
    [
        ({"optimizer_ms": [8, 68]}, "Find out what rank 1 does in step(), hooks included", "This takes 60.0 ms longer"),
        ({"between_ms": [1, 61]}, "Find out what rank 1 does between backward and step()", "60.0 ms longer"),
        (
            {"input_ms": [2, 62], "loading_ms": [1, 1]},
            "Find out what rank 1 does between step() and forward, apart from its DataLoader",
            "This takes 60.0 ms longer",
        ),
        (
            {"input_ms": [2, 92], "loading_ms": [1, 31]},  # and its DataLoader is slower
            "Find out what rank 1 does between step() and forward, apart from its DataLoader",
            "This takes 60.0 ms longer",
        ),
        (
            {"forward_ms": [30, 90]},
            "Find out what slows rank 1 on host0 down",
            "60.0 ms longer than the others in f",
        ),
    ],
)
def test_advice_for_a_slow_rank_names_the_phase(options: dict[str, Any], what: str, why: str) -> None:
    (advice, *_) = analysis_of(2, noise=0, **QUICK, **options).advice
    assert advice.what == what
    assert why in advice.why


def test_a_rank_with_longer_batches_is_told_so() -> None:
    one, two = simulate(2, 20, noise=0, forward_ms=[30, 120], backward_ms=[60, 240], **QUICK)
    longer = tuple(dataclasses.replace(step, num_samples=4 * step.num_samples) for step in two.steps)
    crowded = dataclasses.replace(two.run_info, num_threads=8)
    analysis = analyse(merge([one, dataclasses.replace(two, run_info=crowded, steps=longer)]))
    assert "rank 1, whose batches have 4 times as many samples as those of the others" in analysis.verdict.sentence
    assert analysis.advice[0].what == "Give each rank as many samples"
    assert not any("thread" in advice.what for advice in analysis.advice)


def test_the_sentences() -> None:
    said = {
        name: analysis_of(noise=0, num_steps=5, start_up_s=0.01, **FAULTS[name][0]).verdict.sentence for name in FAULTS
    }
    assert said["slow loader"] == (
        "39 % of each step waits for data on rank 3, or for other code between step() and forward (63 ms of 163 ms, "
        "between 63 and 63)."
    )
    assert "waits for data on all ranks" in said["slow loaders"]
    assert "waits for rank 2, which computes more slowly than the others" in said["slow rank"]
    assert "communication that backward does not hide: 51 MB at 0.5 GB/s" in said["slow link"]
    assert "latency of 200 small buckets of 0.1 MB" in said["tiny buckets"]
    assert "the gradient of layer0.weight (120 MB) is ready at the end of backward" in said["huge late parameter"]
    assert "is the optimizer's step()" in said["optimizer"]
    assert "passes between backward and step()" in said["clipping"]
    assert said["nothing"].startswith("Nothing holds this job back: 98 % of each step is computing")
    assert said["nothing"].endswith("and 4 ranks do the work of 3.92.")


@pytest.mark.parametrize("num_ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("seed", [0, 1])
def test_noise_of_10_percent_accuses_nobody(num_ranks: int, seed: int) -> None:
    verdict = analysis_of(num_ranks, noise=0.1, seed=seed, **QUICK).verdict
    assert verdict.rank is None
    assert verdict.kind == "compute" or verdict.detail == "jitter"


@pytest.mark.parametrize("num_ranks", [2, 8])
def test_ranks_that_are_slow_in_turns_are_not_accused_one_by_one(num_ranks: int) -> None:
    verdict = analysis_of(num_ranks, noise=0.4, num_steps=60, **QUICK).verdict
    assert (verdict.kind, verdict.rank, verdict.detail) == ("straggler", None, "jitter")


def test_start_up_is_the_verdict_only_if_nothing_else_is() -> None:
    quick = analysis_of(2, start_up_s=20.0, **QUICK)
    assert quick.verdict.kind == "start-up"
    assert quick.start_up is not None
    assert quick.start_up.share == pytest.approx(20.1 / 25.1, abs=0.01)
    assert "80 % of the run is start-up (20.1 s of 25.1 s)" in quick.verdict.sentence
    assert analysis_of(2, start_up_s=20.0, optimizer_ms=60, **QUICK).verdict.kind == "optimizer"
    assert analysis_of(2, start_up_s=99.0, optimizer_ms=60, **QUICK).verdict.kind == "start-up"


def test_the_one_rank_that_waits_for_nobody_is_awaited_by_the_others() -> None:
    analysis = analysis_of(noise=0, **FAULTS["slow loader"][0])
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


def test_a_loader_that_is_late_in_each_fourth_step_is_found() -> None:
    verdict = analyse(merge(delayed(simulate(4, 80, noise=0.01, **QUICK), 1, by_ms=200, each=4))).verdict
    assert (verdict.kind, verdict.rank) == ("input", 1)
    assert verdict.cost.mean == pytest.approx(52, abs=4)  # 200 ms in each fourth step, and the 2 ms of all
    assert verdict.cost.high > 150
    assert "of the time waits for data on rank 1" in verdict.sentence
    assert verdict.sentence.endswith("ms on average).")


def test_a_rank_that_is_late_after_a_step_is_awaited_in_the_next() -> None:
    """In each second step, rank 2 does something in step() that takes 60 ms, such as a checkpoint."""
    traces = delayed(simulate(4, 60, noise=0.01, **QUICK), 2, by_ms=60, each=2, part=Phase.OPTIMIZER)
    verdict = analyse(merge(traces)).verdict
    assert (verdict.kind, verdict.rank) == ("straggler", 2)
    assert verdict.cost.mean == pytest.approx(30, abs=3)
    assert "waits for rank 2, whose optimizer's step() takes longer than those of the others" in verdict.sentence


def test_one_pause_is_told_and_changes_no_other_number() -> None:
    traces = delayed(simulate(4, 60, noise=0.01, **QUICK), 1, by_ms=20_000, each=50)
    analysis = analyse(merge(traces))
    said = "of the time goes to one pause: in step 50, rank 1 takes 20,000 ms longer from step() to forward, for data, "
    assert said in analysis.verdict.sentence
    assert analysis.step.mean == pytest.approx(102.4, rel=0.02)
    short = analyse(merge(delayed(simulate(4, 60, noise=0.01, **QUICK), 1, by_ms=300, each=50)))
    assert short.verdict.kind == "compute"
    assert short.problems[0].startswith("5 % of the time goes to one pause: in step 50, rank 1 takes 300 ms longer ")


@pytest.mark.parametrize("late", [1, None])
def test_pauses_of_a_few_steps_do_not_hide_what_the_others_do(late: int | None) -> None:
    """Rank 1, or each rank, evaluates for 4 s before steps 25, 50 and 75."""
    traces = simulate(4, 80, noise=0.01, **QUICK)
    delays = {"by_ns": 4_000 * MS, "each": 25, "part": Phase.INPUT}
    analysis = analyse(merge([delayed_rank(trace, late in (trace.run_info.rank, None), **delays) for trace in traces]))
    assert (analysis.verdict.kind, analysis.verdict.rank, analysis.verdict.detail) == ("input", late, "pauses")
    assert analysis.verdict.share == pytest.approx(12 / (12 + 77 * 0.1024), abs=0.01)
    who = "each rank" if late is None else "rank 1"
    assert f"3 of 77 steps, in which {who} takes 4,000 ms" in analysis.verdict.sentence
    assert analysis.step.mean == pytest.approx(102.4, rel=0.02)
    assert "steps 25, 50, 75" in analysis.advice[0].what
    assert analysis.predictions[-1].waiting_ms < 20, "pauses are not multiplied by the number of ranks"


def delayed(traces: list[RankTrace], late: int, by_ms: int, each: int, part: Phase = Phase.INPUT) -> list[RankTrace]:
    """The same job, but that one rank takes longer in each n-th step, and so the others wait for the rank."""
    return [delayed_rank(trace, trace.run_info.rank == late, by_ms * MS, each, part) for trace in traces]


def delayed_rank(trace: RankTrace, is_late: bool, by_ns: int, each: int, part: Phase) -> RankTrace:
    steps, moved = [], 0
    # What is late in the optimizer is waited for in the reduction of the next step.
    until_next = int(part is Phase.OPTIMIZER and not is_late)
    longer = part if is_late else Phase.EXPOSED
    for step in trace.steps:
        number = step.number - until_next
        delay = by_ns if number > 0 and number % each == 0 else 0
        begins = [each_part.begin for each_part in step.phases] + [step.end]
        position = next(i for i, each_part in enumerate(step.phases) if each_part.phase is longer)
        times = [at + moved + (delay if i > position else 0) for i, at in enumerate(begins)]
        parts = tuple(
            PhaseRecord(old.phase, a, b) for old, (a, b) in zip(step.phases, itertools.pairwise(times), strict=True)
        )
        own = moved + (delay if is_late and part is Phase.INPUT else 0)
        reduced = moved + (delay if part is Phase.INPUT or not is_late else 0)
        buckets = tuple(
            dataclasses.replace(
                bucket,
                ready=bucket.ready + own,
                launched=bucket.launched + own,
                started=bucket.started + own,
                reduced=bucket.reduced + reduced,
            )
            for bucket in step.buckets
        )
        steps.append(dataclasses.replace(step, begin=times[0], end=times[-1], phases=parts, buckets=buckets))
        moved += delay
    return dataclasses.replace(trace, steps=tuple(steps))


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


def test_without_a_model_only_time_in_a_data_loader_is_called_input() -> None:
    """INPUT includes forward then."""
    even = analysis_of(input_ms=32, forward_ms=0, **QUICK)
    assert (even.verdict.kind, even.verdict.detail) == ("compute", "forward or data")
    assert "is forward, or waiting for data: the trace does not tell which (32 ms of 104 ms" in even.verdict.sentence
    assert any("torchring.wrap(optimizer, model)" in problem for problem in even.problems)
    uneven = analysis_of(input_ms=[32, 32, 92, 32], forward_ms=0, **QUICK)
    assert (uneven.verdict.kind, uneven.verdict.rank) == ("straggler", 2)
    assert uneven.verdict.cost.mean == pytest.approx(60, abs=2)
    assert (
        "waits for rank 2, which takes longer than the others for forward, or waits for data" in uneven.verdict.sentence
    )
    slow = analysis_of(input_ms=[32, 64, 32, 32], forward_ms=0, backward_ms=[60, 120, 60, 60], **QUICK)
    assert (slow.verdict.kind, slow.verdict.rank) == ("straggler", 1)


def test_one_rank_alone_is_analysed_too() -> None:
    analysis = analysis_of(1, bucket_mb=[])
    assert analysis.verdict.kind == "compute"
    assert analysis.verdict.sentence.endswith("and it has one rank.")
    assert (analysis.efficiency, analysis.waits, analysis.buckets, analysis.fitted) == (1.0, (), (), None)
    assert analysis_of(1, bucket_mb=[], input_ms=60).verdict.kind == "input"


def test_a_single_step_is_shown() -> None:
    analysis = analysis_of(2, num_steps=1)
    assert analysis.num_steps == 1
    assert [problem.partition(":")[0] for problem in analysis.problems] == [
        "Only 1 step counts",
        "The first step begins in wrap(), so what the script does before its loop is part of that step.",
    ]
    assert (analysis.advice, analysis.predictions) == ((), ())
    assert analysis_of(2, num_steps=9).advice == analysis_of(2, num_steps=9, optimizer_ms=60).advice == ()
    assert analysis_of(2, num_steps=9, noise=0).step.mean == pytest.approx(analysis_of(2, noise=0).step.mean)


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
    analysis = analysis_of(noise=0.05, **FAULTS["slow loader"][0])
    i, timing = analysis.median_step, analysis.timing
    assert (timing.end - timing.begin)[i].max() == pytest.approx(analysis.step.mean, rel=0.02)
    for rank, step in enumerate(analysis.job.steps[i]):
        spans = spans_of(step, analysis.critical.waiting[i, rank])
        assert all(a[2] == b[1] for a, b in itertools.pairwise(spans))
        assert (Phase.WAITING in [phase for phase, *_ in spans]) == (rank != 3)
    assert (analysis.critical.last[i] == 3).all()
