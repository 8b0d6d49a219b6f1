"""Makes the analysis of a job from its traces.

`timing.py` puts the steps into arrays. `waits.py` finds out who waits for whom, and `verdict.py` what bounds the job.
`buckets.py` and `network.py` look at communication; `layout.py`, `workload.py` and `scaling.py` predict what would be
different.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

import numpy as np

from torchring.observe.recorder.records import RunInfo
from torchring.report.model import buckets as of_buckets
from torchring.report.model import lanes, waits
from torchring.report.model.change import find_change
from torchring.report.model.cores import find_queue, who_has_them
from torchring.report.model.loading import find_loading
from torchring.report.model.merge import Job
from torchring.report.model.network import Network
from torchring.report.model.optimizers import of_optimizer
from torchring.report.model.phases import Phase, column
from torchring.report.model.ranks import efficiency as efficiency_of
from torchring.report.model.ranks import find_start_up, per_second, summarise_ranks
from torchring.report.model.scaling import SIZES, Links, Prediction, hiding_gigabytes_per_s, predict
from torchring.report.model.timing import Timing, spread, typical
from torchring.report.model.waits import Critical, examine
from torchring.report.model.workload import between_hosts, calibrated, describe, fit_network, links_of
from torchring.report.verdict.advice import Situation, advise
from torchring.report.verdict.costs import find_costs
from torchring.report.verdict.findings import Analysis, Verdict
from torchring.report.verdict.judge import judge
from torchring.report.verdict.pauses import Pauses, find_pauses, without
from torchring.report.words import count, share_in_words

__all__ = ["Analysis", "analyse"]

_FEW: Final = 10  # steps, from which nothing is predicted
_NO_CORE: Final = 0.05  # of a step
_FASTER_OR_SLOWER: Final = 0.20  # of a step


def analyse(
    job: Job,
    given: Network | None = None,
    sizes: Sequence[int] = SIZES,
    doctor: Mapping[str, float] = MappingProxyType({}),
) -> Analysis:
    """Say what bounds the job, and what would help.

    Args:
        given: use this network in predictions, in place of the one that the trace shows. If its latency is unknown and
            the trace is of several hosts, the latency of the trace is used.
        sizes: predict for these numbers of ranks, and for the size of the job.
        doctor: see `doctor.bus_bandwidths`.
    """
    about = job.traces[0].about
    has_model = about.options.get("model") == "given"
    examined = examine(job)
    timing, critical = examined[0]
    all_counting = timing
    pauses = find_pauses(timing, critical)
    changes = _about_change(without(timing, pauses), critical)
    examined = [(without(each, pauses), its_critical) for each, its_critical in examined]
    timing = examined[0][0]
    if len(examined) > 1 or len(timing.rounds) > 1:
        job = of_optimizer(job, timing)
    path, reducing_path = critical.path[timing.counts], critical.path[timing.reduces]
    step = spread(path.sum(1))
    backward_ms = typical(reducing_path[:, column(Phase.BACKWARD)])
    efficiency = efficiency_of(critical, timing, step.mean, job.size)
    costs = find_costs(timing, critical)
    start_up = find_start_up(job)
    buckets = of_buckets.summarise(job, timing, critical)
    late = of_buckets.late_parameters(job, buckets, backward_ms, typical(reducing_path.sum(1)))
    exposed = reducing_path[:, column(Phase.COMMUNICATION)]
    network = fit_network(examined, about, job.size)
    if given and not given.is_alpha_known and network and network.is_alpha_known and about.local_size < about.size:
        given = dataclasses.replace(given, alpha_ms=network.alpha_ms, is_alpha_known=True)
    own_links, links = links_of(about, network, None), links_of(about, network, given)
    workload = dataclasses.replace(describe(job, examined), slow_rank=costs.blamed)
    if own_links is not None:
        workload = calibrated(workload, own_links, job.size, step.mean)
    predictions: list[Prediction] = []
    hiding = None
    has_few = len(job.steps) < _FEW
    if links is not None and workload.bucket_bytes and not has_few:
        num_ranks = max(job.size, SIZES[0])
        predicted = between_hosts(workload) if given and about.local_size == about.size else workload
        predictions = predict(predicted, links, sorted({*sizes, num_ranks}))
        hiding = hiding_gigabytes_per_s(predicted, num_ranks, links.network.alpha_ms)
    slow = None if costs.blamed is None else timing.ranks[costs.blamed]
    queue, who = find_queue(timing, critical), who_has_them(about, timing, critical)
    situation = Situation(
        job,
        critical.cycle[timing.counts],
        costs,
        step.mean,
        backward_ms,
        workload,
        own_links,
        pauses,
        queue,
        who,
        find_loading(job, timing, critical, is_forward_known=costs.is_forward_known),
    )
    verdict = judge(
        timing,
        critical,
        costs,
        *(job.size, buckets, late, network, start_up, pauses, efficiency, typical(exposed), who),
    )
    if job.ended_badly:
        verdict = dataclasses.replace(verdict, sentence=f"{job.ended_badly} {verdict.sentence}")
    return Analysis(
        about=about,
        size=job.size,
        num_steps=int(timing.counts.sum()),
        num_left_out=int(np.argmax(all_counting.counts)),
        has_enough_steps=not has_few,
        is_forward_known=costs.is_forward_known,
        clock_error_ms=job.clock_error_ms,
        problems=(
            *job.problems,
            *timing.problems,
            *_about_optimizers(job, timing, critical, len(examined)),
            *_remarks(timing, pauses, verdict, is_forward_known=costs.is_forward_known, has_model=has_model),
            *_about_cores(typical(costs.cores), step.mean, who, verdict),
            *(changes if verdict.steps is None else ()),
        ),
        verdict=verdict,
        advice=() if has_few else advise(situation),
        step=step,
        path=waits.spread_by_phase(path),
        steps_per_s=per_second(np.ones((len(job.steps), 1)), all_counting),
        samples_per_s=per_second(all_counting.num_samples, all_counting) or None,
        efficiency=efficiency,
        ranks=summarise_ranks(job, timing, critical),
        waits=waits.list_waits(timing, critical),
        buckets=buckets,
        late_parameters=late,
        bandwidths=of_buckets.bandwidths(job, timing, critical, exposed, doctor),
        network=given or network,
        is_network_given=given is not None,
        predictions=tuple(predictions),
        predictions_note=_note(predictions, links, about, given is not None, slow),
        hiding_gigabytes_per_s=hiding,
        start_up=start_up,
        median_step=lanes.median_step(job, timing, critical),
        series=lanes.series(timing, critical),
    )


def _remarks(
    timing: Timing, pauses: Sequence[Pauses], verdict: Verdict, *, is_forward_known: bool, has_model: bool
) -> list[str]:
    remarks = []
    has_first_only = not timing.numbers[timing.counts].any()  # hooks are put on the model after the first step
    if not is_forward_known and not (has_model and has_first_only):
        why = (
            "because it is not called as model(...), or torch.compile leaves the hooks of the model out"
            if has_model
            else "because `wrap` was given no model: torchring.wrap(optimizer, model)"
        )
        other = "other code before backward" if timing.saw_loader else "waiting for data"
        remarks.append(f"Forward is not told apart from {other}, {why}.")
    for each in pauses:
        sentence = "" if verdict.sentence.endswith(each.sentence) else f"{each.sentence} "
        these = f"S{each.named_steps[1:]} {'is' if len(each.numbers) == 1 else 'are'}"
        remarks.append(
            f"{sentence}{these} left out of all numbers but steps/s and samples/s; the figure over time shows them."
        )
    number = int(timing.counts.sum())
    if number < _FEW:
        counting = "1 step counts" if number == 1 else f"{number} steps count"
        remarks.append(
            f"Only {counting}: too few for advice and predictions. Numbers are more reliable with 50 or more."
        )
    if has_first_only:
        remarks.append("The first step begins in wrap(), so what the script does before its loop is part of that step.")
    return remarks


def _about_cores(queued_ms: float, step_ms: float, who: str, verdict: Verdict) -> list[str]:
    """Time without a core, if the verdict is about something else."""
    if verdict.kind == "cores" or queued_ms < _NO_CORE * step_ms or step_ms <= 0:
        return []
    return [f"For {queued_ms:.3g} ms of a step, a rank was ready to run, but had no core: {who}."]


def _about_change(timing: Timing, critical: Critical) -> list[str]:
    """Say whether the job becomes slower or faster."""
    whole = critical.path[timing.counts].sum(1)
    change = find_change(whole, _FASTER_OR_SLOWER * typical(whole))
    if change is None:
        return []
    number = timing.numbers[timing.counts][change]
    before, since = typical(whole[:change]), typical(whole[change:])
    return [f"From step {number:,} on, a step takes {since:.3g} ms on average; before, {before:.3g} ms."]


def _about_optimizers(job: Job, timing: Timing, critical: Critical, num_optimizers: int) -> list[str]:
    """Say what numbers mean if there are several optimizers."""
    if num_optimizers == 1:
        return []
    share = critical.path[timing.reduces].sum() / critical.path[timing.counts].sum()
    parameters = job.traces[0].about.parameters
    names = f", {parameters[0].name} and {len(parameters) - 1} more parameters" if len(parameters) > 1 else ""
    remark = (
        f"Steps have {num_optimizers} different sets of buckets, as those of several optimizers. The step of each "
        "optimizer counts as a step, and times are means over all of them. Buckets are those of the steps that send "
        f"{timing.bucket_bytes.sum() / 1e6:.3g} MB{names}: these steps take {share_in_words(share)} of the time."
    )
    if len(timing.rounds) > 1:
        remark += (
            f" Their backward computes gradients for {len(timing.rounds)} optimizers, and all of them are reduced. If "
            "only one of the optimizers steps then, call requires_grad_(False) on the parameters of the others before "
            "forward, and requires_grad_(True) after backward."
        )
    return [remark]


def _note(
    predictions: list[Prediction], links: Links | None, about: RunInfo, is_given: bool, slow_rank: int | None
) -> str:
    if not predictions or links is None:
        return ""
    alpha = f"{links.network.alpha_ms:.2g} ms a message" if links.network.alpha_ms else "latency unknown"
    speed = f"{links.network.gigabytes_per_s:.3g} GB/s{' at least' if links.network.is_least else ''}, {alpha}"
    network = "the network that was given" if is_given else "the network of this trace"
    ways = "hierarchical all-reduce" if links.is_hierarchical else "a ring"
    hosts = f", hosts of {count(about.local_size, 'rank')}"
    assumed = f"Predictions assume {network} ({speed}), {ways}{hosts}, and for each rank the batch that it has now."
    if slow_rank is not None:
        assumed += f" One of the ranks is as slow as rank {slow_rank} is now, and all others are like the others now."
    if is_given or about.local_size < about.size:
        return assumed
    return f"{assumed} Hosts are connected more slowly than ranks of one host: --bandwidth predicts for several hosts."
