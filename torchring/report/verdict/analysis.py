"""Makes the analysis of a job from its traces.

`timing.py` puts the steps into arrays. `waits.py` finds out who waits for whom, and `judge.py` what bounds the job.
`buckets.py` looks at communication; `bucket_layout.py` and `scaling.py` predict what would be different.
"""

import dataclasses

import numpy as np

from torchring.errors import ranks_in_words
from torchring.observe.recorder.records import RunInfo
from torchring.observer import Phase
from torchring.placement import count
from torchring.report.model import buckets as of_buckets
from torchring.report.model import waits
from torchring.report.model.core_time import find_loading, who_has_them
from torchring.report.model.merge import Job
from torchring.report.model.scaling import NUM_PARTS, Model, Network, model_of
from torchring.report.model.timing import median_step, of_optimizers, spread, typical
from torchring.report.model.waits import examine, per_second, summarise_ranks
from torchring.report.verdict.advice import advise
from torchring.report.verdict.costs import find_costs
from torchring.report.verdict.findings import FEWEST_STEPS, Analysis
from torchring.report.verdict.judge import judge, remarks
from torchring.report.verdict.pauses import find_pauses, without
from torchring.report.words import about


def analyse(job: Job, given: Network | None = None) -> Analysis:
    """Say what bounds the job, and what would help.

    Predictions use the `given` network in place of the one that the trace shows. If its latency is unknown and the
    trace is of several hosts, the latency of the trace is used.
    """
    run_info = job.traces[0].run_info
    every_step, critical, num_optimizers = examine(job)
    pauses = find_pauses(every_step, critical)
    timing = without(every_step, pauses)
    job = of_optimizers(job, timing)
    path, reducing_path = critical.path[timing.counts], critical.path[timing.reduces]
    step, costs = spread(path.sum(1)), find_costs(timing, critical)
    backward_ms = typical(reducing_path[:, Phase.BACKWARD])
    buckets = of_buckets.summarise(job, timing, critical)
    model = model_of(job, timing, critical, given, costs.blamed)
    computed = typical(waits.computing(critical.cycle[timing.counts]).mean(1))
    slow = None if costs.blamed is None else timing.ranks[costs.blamed]
    predictions = [model.predictions] if len(job.steps) >= FEWEST_STEPS else []
    for part in np.array_split(np.flatnonzero(timing.counts), NUM_PARTS) if any(predictions) else ():
        of_part = dataclasses.replace(timing, counts=np.isin(np.arange(len(timing.counts)), part))
        if of_part.reduces.any():
            predictions.append(model_of(job, of_part, critical, given, costs.blamed).predictions)
    note = _note(model, run_info, given is not None, slow)
    if job.size == 1:
        note = "Nothing is predicted from a rank that trains alone: it reduces nothing."
    analysis = Analysis(
        job=job,
        timing=timing,
        critical=critical,
        costs=costs,
        pauses=pauses,
        num_left_out=int(np.argmax(every_step.counts)),
        step=step,
        steps_per_s=per_second(np.ones((len(job.steps), 1)), every_step),
        samples_per_s=per_second(every_step.num_samples, every_step) or None,
        efficiency=min(1.0, computed / step.mean) if job.size > 1 and step.mean > 0 else 1.0,
        backward_ms=backward_ms,
        who_has_cores=who_has_them(run_info, timing, critical, costs.queue),
        loading=find_loading(job, timing, critical, is_forward_known=costs.is_forward_known),
        ranks=summarise_ranks(job, timing, critical),
        waits=waits.list_waits(timing, critical),
        median_step=median_step(timing),
        exposed_ms=typical(reducing_path[:, Phase.EXPOSED]),
        buckets=buckets,
        late_parameters=of_buckets.late_parameters(job, buckets, backward_ms, typical(reducing_path.sum(1))),
        model=model,
        predictions=tuple(zip(*filter(None, predictions), strict=True)),
        predictions_note=note if any(predictions) or given else "",
    )
    verdict = judge(analysis)
    group = f"Group of {ranks_in_words(job.group)}: " if job.group else ""
    sentence = group + " ".join(filter(None, (job.ended_badly, verdict.sentence)))
    analysis = dataclasses.replace(analysis, verdict=dataclasses.replace(verdict, sentence=sentence))
    problems = (*job.problems, *timing.problems, *remarks(analysis, num_optimizers))
    advice = advise(analysis) if analysis.has_enough_steps else ()
    return dataclasses.replace(analysis, problems=problems, advice=advice)


def _note(model: Model, run_info: RunInfo, is_given: bool, slow_rank: int | None) -> str:
    if (links := model.links) is None:
        return ""
    alpha = f"{links.network.alpha_ms:.2g} ms a message" if links.network.alpha_ms else "latency unknown"
    speed = f"{about(links.network.gigabytes_per_s)} GB/s, {alpha}"
    network = "the network that was given" if is_given else "the network of this trace"
    ways = "hierarchical all-reduce" if links.ranks_per_host > 1 else "a ring"
    hosts = f", hosts of {count(run_info.local_size, 'rank')}"
    assumed = f"Predictions assume {network} ({speed}), {ways}{hosts}, and for each rank the batch that it has now."
    assumed += f" Ranges are what {NUM_PARTS} parts of the trace predict, and 5 % worse for each doubling of the ranks."
    if slow_rank is not None:
        assumed += f" One of the ranks is as slow as rank {slow_rank} is now, and all others are like the others now."
    if is_given or run_info.local_size < run_info.size:
        return assumed
    return f"{assumed} Hosts are connected more slowly than ranks of one host: --bandwidth predicts for several hosts."
