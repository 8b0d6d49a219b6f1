"""Who waits for whom: test_golden.py has more jobs of which each number is known."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from tests.support.traces import simulate
from torchring.observer import Phase
from torchring.report.model.merge import merge
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


def test_the_median_step() -> None:
    analysis = analysis_of(noise=0.05, **SLOW_LOADER)
    i, timing = analysis.median_step, analysis.timing
    assert (timing.end - timing.begin)[i].max() == pytest.approx(analysis.step.mean, rel=0.02)
    for rank, step in enumerate(analysis.job.steps[i]):
        spans = spans_of(step, analysis.critical.waiting[i, rank])
        assert all(a[2] == b[1] for a, b in itertools.pairwise(spans))
        assert (Phase.WAITING in [phase for phase, *_ in spans]) == (rank != 3)
    assert (analysis.critical.last[i] == 3).all()
