"""Predictions: formulas against worked examples, and a trace of two ranks against a simulation of more."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.traces import MS, simulate, with_facts
from torchring.gradients.plan import ParameterSpec, build_plan
from torchring.observe.recorder.records import Arrivals, ParameterRecord, RankTrace
from torchring.report.model.bucket_layout import layout_with
from torchring.report.model.merge import merge
from torchring.report.model.scaling import Connections, Network, Workload, exposed_ms, fit, range_of, slowest_ms
from torchring.report.verdict.analysis import analyse
from torchring.report.verdict.findings import Analysis

MB = 1_000_000
COMPUTING = np.full((5, 2), 100.0)


def simulated(num_ranks: int, **options: Any) -> list[RankTrace]:
    """A ring whose messages take 0.1 ms each, and 1.25 GB/s."""
    defaults = {"latency_ms": 0.2 * (num_ranks - 1), "gigabytes_per_s": 1.25, "ranks_per_host": 1, "noise": 0.05}
    return simulate(num_ranks, **(defaults | options))


def of(num_ranks: int, **options: Any) -> Analysis:
    return analyse(merge(simulated(num_ranks, **options)))


def test_two_ranks_predict_four_and_eight() -> None:
    of_jobs: tuple[dict[str, Any], ...] = (
        {},
        {"bucket_mb": [1, 25, 25, 60], "backward_ms": 120},
        {"bucket_mb": [0.5, 1.0] * 8, "noise": 0.02},
        {"noise": 0.15, "bucket_mb": [1, 12], "gigabytes_per_s": 12.5},
    )
    for options in of_jobs:
        for predictions in analyse(merge(simulated(2, num_steps=60, **options))).predictions[1:3]:
            measured = of(predictions[0].num_ranks, num_steps=40, seed=1, **options).step.mean
            assert predictions[0].step_ms == pytest.approx(measured, rel=0.05), options
            low, high = range_of("step_ms", predictions, 2)
            assert low < measured < high, options


@pytest.mark.parametrize(
    ("compression", "dtypes"),
    [(None, ("float32",)), ("bf16", ("float32",)), (None, ("float32", "bfloat16", "complex64"))],
)
def test_buckets_are_predicted_as_wrap_makes_them(compression: str | None, dtypes: tuple[str, ...]) -> None:
    """Parameters come in the order of forward, and their gradients one after the other in a backward of 60 ms.

    Caps are soft, and count bytes of gradient. A bucket holds one dtype; complex gradients are real numbers.
    """
    mib = 1 << 20
    num_bytes = [20 * mib] * 5 + [1 * mib] * 8 + [60 * mib, 256, 256]
    names = [dtypes[i % len(dtypes)] for i in range(len(num_bytes))]
    (trace,) = simulated(1, bucket_mb=[])
    records = tuple(ParameterRecord("", size, 0, name) for size, name in zip(num_bytes, names, strict=True))
    ready = tuple(60 * MS * (len(records) - i) // len(records) for i in range(len(records)))
    job = merge([dataclasses.replace(with_facts(trace, parameters=records), arrivals=(Arrivals(60 * MS, ready),))])
    kinds = [getattr(torch, name) for name in names]
    specs = [
        ParameterSpec(str(i), (each // kind.itemsize,), (1,), kind, torch.device("cpu"))
        for i, (each, kind) in enumerate(zip(num_bytes, kinds, strict=True))
    ]
    for bucket_mb in (1, 10, 25, 100):
        plan = build_plan(specs, bucket_bytes=bucket_mb * mib, compression=compression)
        predicted = layout_with(job, sum(num_bytes) / (2 if compression else 1), bucket_mb)
        assert predicted is not None
        sizes, shares = predicted
        # A bucket has flags and control bits, too, and each parameter begins at 64 bytes.
        assert sizes == pytest.approx([bucket.num_bytes for bucket in plan.buckets], abs=5000)
        last = [bucket.slots[-1].parameter for bucket in plan.buckets]
        assert shares == pytest.approx([(len(specs) - i) / len(specs) for i in last])


def test_the_example_of_exposed_communication() -> None:
    workload = Workload(COMPUTING, (30.0 * MB, 30.0 * MB), (-40.0, 0.0))
    assert exposed_ms(workload, 2, Connections(Network(0.0, 1.0))) == pytest.approx(30)
    assert exposed_ms(workload, 1, Connections(Network(0.0, 1.0))) == 0
    inline = dataclasses.replace(workload, is_overlapped=False)
    assert exposed_ms(inline, 2, Connections(Network(0.0, 1.0))) == pytest.approx(60)


def test_what_all_ranks_have_in_common_makes_nobody_wait() -> None:
    rng = np.random.default_rng(0)
    batch = rng.normal(100, 20, (2000, 1))
    assert slowest_ms(np.repeat(batch, 4, axis=1), 64) == pytest.approx(batch.mean())
    # Independent noise: the maximum of 4 normal draws is 1.0294 standard deviations above the mean.
    for num_measured in (1, 2, 4):
        own = rng.normal(100, 10, (4000, num_measured))
        assert slowest_ms(own, 4) == pytest.approx(110.294, abs=0.7)
    # One rank of four that is always 30 ms slower.
    uneven = np.full((10, 4), 100.0) + np.array([0, 0, 30.0, 0])
    assert slowest_ms(uneven, 1) == pytest.approx(107.5)
    assert slowest_ms(uneven, 1024) == pytest.approx(130)


def test_latency_and_bandwidth_are_fitted_despite_outliers() -> None:
    rng = np.random.default_rng(1)
    sizes = np.array([0.1, 0.5, 1, 5, 12, 12, 25, 25]) * MB
    durations = 6 * 0.2 + 1.5 * sizes / 2e6  # 4 ranks, 0.2 ms, 2 GB/s
    seen = durations * rng.normal(1, 0.01, (40, 8))
    seen[:8] *= 5
    seen[:, 4] *= 3  # one bucket is always interrupted
    network = fit(sizes, np.median(seen, axis=0), 4)
    assert network.alpha_ms == pytest.approx(0.2, rel=0.05)
    assert network.gigabytes_per_s == pytest.approx(2, rel=0.05)
    assert network.is_alpha_known
    network = fit(np.full(5, 10.0 * MB), np.full(5, 20.0), 2)
    assert network == Network(0.0, pytest.approx(0.5), is_alpha_known=False)
    assert fit(np.array([]), np.array([]), 2) is None
