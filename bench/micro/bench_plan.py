"""The time to plan which parameters share a bucket, and to compute the plan's 32-byte fingerprint.

torchring plans once in `wrap`, and once more after the first backward.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from torchring.bench.micro.conftest import Remark
from torchring.bench.models import MODELS
from torchring.collectives.signature import fingerprint
from torchring.gradients.plan import ALIGNMENT_BYTES, ParameterSpec, build_plan, describe

BUCKET_BYTES = 25 << 20
every_model = pytest.mark.parametrize("model", list(MODELS))


@functools.cache
def specs_of(model: str) -> tuple[ParameterSpec, ...]:
    named = MODELS[model]().model.named_parameters()
    return tuple(ParameterSpec(name, tuple(p.shape), p.stride(), p.dtype, p.device) for name, p in named)


@every_model
@pytest.mark.parametrize("compression", [None, "bf16"], ids=["fp32 wire", "bf16 wire"])
@pytest.mark.benchmark(group="build_plan")
def bench_build_plan(benchmark: BenchmarkFixture, remark: Remark, model: str, compression: str | None) -> None:
    specs = specs_of(model)
    plan = benchmark(build_plan, specs, bucket_bytes=BUCKET_BYTES, compression=compression)
    remark("tensors", len(specs))
    remark("buckets", len(plan.buckets))

    placed = [slot.parameter for bucket in plan.buckets for slot in bucket.slots]
    assert placed == list(reversed(range(len(specs))))
    for bucket in plan.buckets:
        end = 0
        for slot in bucket.slots:
            assert slot.numel == specs[slot.parameter].numel
            assert slot.offset >= end
            assert slot.offset * bucket.wire_dtype.itemsize % ALIGNMENT_BYTES == 0
            end = slot.offset + slot.numel
        assert bucket.flags_offset >= end
        assert bucket.numel == bucket.control_offset
        assert bucket.wire_dtype == (torch.bfloat16 if compression else torch.float32)


@every_model
@pytest.mark.benchmark(group="describe and fingerprint")
def bench_fingerprint(benchmark: BenchmarkFixture, model: str) -> None:
    *others, last = specs = specs_of(model)

    def digest(specs: Iterable[ParameterSpec]) -> bytes:
        return fingerprint(describe(specs, "op='mean'"))

    found = benchmark(digest, specs)
    assert len(found) == 32
    assert digest([*others, last]) == found
    assert digest([*others, replace(last, shape=(*last.shape, 1), stride=(*last.stride, 1))]) != found
