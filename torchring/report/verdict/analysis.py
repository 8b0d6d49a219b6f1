"""Makes the analysis of a job from its traces.

`timing.py` puts the steps into arrays. `waits.py` finds out who waits for whom. `buckets.py` looks at communication.
`judge.py` says what bounds the job.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from torchring.observer import Phase
from torchring.report.model import buckets as of_buckets
from torchring.report.model import waits
from torchring.report.model.core_time import find_loading, who_has_them
from torchring.report.model.merge import Job
from torchring.report.model.timing import median_step, of_optimizers, spread, typical
from torchring.report.model.waits import examine, find_start_up, per_second, summarise_ranks
from torchring.report.verdict.advice import advise
from torchring.report.verdict.costs import find_costs
from torchring.report.verdict.findings import Analysis
from torchring.report.verdict.judge import judge, remarks
from torchring.report.verdict.pauses import find_pauses, without


def analyse(job: Job) -> Analysis:
    """Say what bounds the job, and what would help."""
    run_info = job.traces[0].run_info
    every_step, critical, num_optimizers = examine(job)
    pauses = find_pauses(every_step, critical)
    timing = without(every_step, pauses)
    job = of_optimizers(job, timing)
    step, costs = spread(critical.path[timing.counts].sum(1)), find_costs(timing, critical)
    exposed = critical.path[timing.reduces][:, Phase.EXPOSED]
    computed = typical(waits.computing(critical.cycle[timing.counts]).mean(1))
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
        who_has_cores=who_has_them(run_info, timing, critical, costs.queue),
        loading=find_loading(timing, critical, is_forward_known=costs.is_forward_known),
        ranks=summarise_ranks(job, timing, critical),
        waits=waits.list_waits(timing, critical),
        start_up=find_start_up(job),
        median_step=median_step(timing),
        exposed_ms=typical(exposed),
        buckets=of_buckets.summarise(job, timing, critical),
        bandwidth=of_buckets.find_bandwidth(job, timing, critical, exposed),
    )
    analysis = dataclasses.replace(analysis, verdict=judge(analysis))
    problems = (*job.problems, *timing.problems, *remarks(analysis, num_optimizers))
    advice = advise(analysis) if analysis.has_enough_steps else ()
    return dataclasses.replace(analysis, problems=problems, advice=advice)
