"""The plan is data: who shares a bucket, in which order, where; and what ranks must agree on beforehand."""

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from torchring.collectives.signature import first_difference
from torchring.gradients import plan as plans

CPU = torch.device("cpu")


def spec(
    name: str,
    *shape: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    stride: tuple[int, ...] | None = None,
    is_sparse: bool = False,
) -> plans.ParameterSpec:
    strides = torch.empty(shape, device="meta").stride() if stride is None else stride
    return plans.ParameterSpec(name, shape, strides, dtype, device, is_sparse)


def spec_of(tensor: torch.Tensor) -> plans.ParameterSpec:
    return plans.ParameterSpec("p", tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)


def fp32(*numels: int) -> list[plans.ParameterSpec]:
    return [spec(f"p{i}", numel) for i, numel in enumerate(numels)]


def parameters_of(plan: plans.Plan) -> list[list[int]]:
    return [[slot.parameter for slot in bucket.slots] for bucket in plan.buckets]


def test_worked_example() -> None:
    plan = plans.build_plan(fp32(4, 2, 3), bucket_bytes=16)
    assert plan.buckets == (
        plans.BucketPlan(0, torch.float32, torch.float32, (plans.Slot(2, 0, 3), plans.Slot(1, 16, 2)), numel=32),
        plans.BucketPlan(1, torch.float32, torch.float32, (plans.Slot(0, 0, 4),), numel=16),
    )
    assert [bucket.num_bytes for bucket in plan.buckets] == [128, 64]
    assert plan.num_bytes == 192


@pytest.mark.parametrize(
    ("numels", "options", "expected"),
    [
        ((1, 1, 1, 1), {"bucket_bytes": 8}, [[3, 2], [1, 0]]),  # reached exactly
        ((1, 1, 1, 1), {"bucket_bytes": 9}, [[3, 2, 1], [0]]),  # crossed: the one that crosses still goes in
        ((100, 1), {"bucket_bytes": 8}, [[1, 0]]),
        ((1, 100, 1), {"bucket_bytes": 8}, [[2, 1], [0]]),
        ((100,), {"bucket_bytes": 8}, [[0]]),  # never split
        ((1, 1, 1), {"bucket_bytes": 1000}, [[2, 1, 0]]),
        ((), {"bucket_bytes": 8}, []),
        ((5, 0, 3), {"bucket_bytes": 0}, [[2], [1], [0]]),  # each its own
        ((1, 1, 1, 1), {"bucket_bytes": 8, "compression": "fp16"}, [[3, 2], [1, 0]]),  # of gradient, not of the wire
        # the first bucket is smaller
        ((1, 1, 1, 1, 1), {"bucket_bytes": 12, "first_bucket_bytes": 4}, [[4], [3, 2, 1], [0]]),
        ((1, 1, 1 << 18, 1, (1 << 18) - 1), {"bucket_bytes": 1 << 25}, [[4, 3], [2, 1, 0]]),  # 1 MiB
        ((1, 1, 1, 1), {"bucket_bytes": 4, "first_bucket_bytes": 1000}, [[3], [2], [1], [0]]),  # never larger
    ],
)
def test_caps_are_soft(numels: tuple[int, ...], options: dict[str, Any], expected: list[list[int]]) -> None:
    assert parameters_of(plans.build_plan(fp32(*numels), **options)) == expected


def test_little_is_ready_last() -> None:
    specs = [spec(str(i), 1 << 18) for i in range(8)]  # 1 MiB each
    for last, expected in ((None, 6), (4 << 20, 3), (1 << 20, 0), (0, 0), (99 << 20, 6)):
        *_, end = parameters_of(plans.build_plan(specs, bucket_bytes=99 << 20, last_bucket_bytes=last))
        assert (end[0], end[-1]) == (expected, 0), last
    # of two dtypes, in the bucket of the parameter that is ready last
    mixed = [spec("a", 4), spec("b", 4, dtype=torch.float64), spec("c", 4), spec("d", 4)]
    plan = plans.build_plan(mixed, bucket_bytes=64, first_bucket_bytes=64, last_bucket_bytes=0)
    assert parameters_of(plan) == [[3, 2], [1], [0]]


def test_given_order_of_some() -> None:
    some = plans.build_plan(fp32(*[1] * 6), bucket_bytes=8, order=[5, 4, 3], first_index=7)
    assert [bucket.index for bucket in some.buckets] == [7, 8]
    assert parameters_of(some) == [[5, 4], [3]]


@pytest.mark.parametrize(
    ("dtype", "compression", "expected"),
    [
        (torch.float32, None, torch.float32),
        (torch.float32, "fp16", torch.float16),
        (torch.float64, "bf16", torch.bfloat16),
        (torch.float16, "bf16", torch.float16),  # as narrow already
        (torch.bfloat16, "fp16", torch.bfloat16),
    ],
)
def test_compression_only_narrows(dtype: torch.dtype, compression: str | None, expected: torch.dtype) -> None:
    assert plans.wire_dtype(dtype, compression) == expected


def check_layout(plan: plans.Plan, specs: Sequence[plans.ParameterSpec], compression: str | None = None) -> None:
    """Every dense parameter is in one slot, of a bucket of its kind; slots are aligned, side by side, in the buffer."""
    counts = Counter(slot.parameter for bucket in plan.buckets for slot in bucket.slots)
    assert counts == Counter(i for i, s in enumerate(specs) if not s.is_sparse)
    assert [bucket.index for bucket in plan.buckets] == list(range(len(plan.buckets)))
    for bucket in plan.buckets:
        own = [specs[slot.parameter] for slot in bucket.slots]
        assert {(bucket.dtype, own[0].device)} == {(each.dtype, each.device) for each in own}
        assert bucket.wire_dtype == plans.wire_dtype(bucket.dtype, compression)
        line, end = plans.ALIGNMENT_BYTES // bucket.wire_dtype.itemsize, 0
        for slot, each in zip(bucket.slots, own, strict=True):
            assert (slot.offset, slot.numel) == (end, each.numel)
            end += -(-slot.numel // line) * line
        assert bucket.numel == end


def test_random_plans() -> None:
    """Buckets are closed as soon as the cap was reached, and leave in the order of their last gradients."""
    dtypes = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
    for seed in range(40):
        rng = random.Random(seed)
        specs = [
            spec(
                f"p{i}",
                *(rng.choice([0, 1, 1, 2, 3, 7, 33]) for _ in range(rng.randrange(4))),
                dtype=rng.choice(dtypes[: rng.randint(1, 4)]),
                device=rng.choice([CPU, CPU, torch.device("meta")]),
                is_sparse=rng.random() < 0.1,
            )
            for i in range(rng.randint(1, 60))
        ]
        order = rng.sample(range(len(specs)), len(specs)) if rng.random() < 0.7 else None
        cap, first = rng.choice([0, 1, 64, 1000, 10**6]), rng.choice([0, 100, 10**6])
        compression = rng.choice([None, "fp16", "bf16"])
        plan = plans.build_plan(specs, bucket_bytes=cap, first_bucket_bytes=first, compression=compression, order=order)
        check_layout(plan, specs, compression)

        ready = order or [*reversed(range(len(specs)))]
        position = {index: i for i, index in enumerate(ready)}
        last_of = [max(position[slot.parameter] for slot in bucket.slots) for bucket in plan.buckets]
        assert last_of == sorted(last_of)
        kinds = [(bucket.dtype, specs[bucket.slots[0].parameter].device) for bucket in plan.buckets]
        for number, (bucket, kind) in enumerate(zip(plan.buckets, kinds, strict=True)):
            places = [position[slot.parameter] for slot in bucket.slots]
            assert places == sorted(places)
            limit = cap if kind in kinds[:number] else min(cap, first)
            *sizes, last = [slot.numel * bucket.dtype.itemsize for slot in bucket.slots]
            assert not sizes or sum(sizes) < limit
            assert sum(sizes) + last >= limit or kind not in kinds[number + 1 :]


def test_the_check_of_plans_can_fail() -> None:
    specs = fp32(4, 4)
    (bucket,) = plans.build_plan(specs, bucket_bytes=1000).buckets
    for wrong in ({"offset": 0}, {"parameter": 1}, {"offset": 32}):  # overlapping, twice, outside
        slots = bucket.slots[0], replace(bucket.slots[1], **wrong)
        with pytest.raises(AssertionError):
            check_layout(plans.Plan((replace(bucket, slots=slots),)), specs)


def test_is_dense_agrees_with_torch_on_random_strides() -> None:
    rng, answers = random.Random(0), Counter()
    storage = torch.empty(4096)
    for _ in range(3000):
        shape = [rng.randint(1, 3) for _ in range(rng.randint(0, 4))]
        stride = [rng.choice([0, 1, 1, 2, 3, 4, 6, 9]) for _ in shape]
        tensor = storage.as_strided(shape, stride)
        answer = spec_of(tensor).is_dense
        answers[answer] += 1
        assert answer == torch.ops.aten.is_non_overlapping_and_dense(tensor), (shape, stride)
    assert min(answers[True], answers[False]) > 300
    for empty in (torch.empty(0), torch.empty(0, 3), torch.empty(4, 6)[:, :0], torch.empty(4, 6)[::2, :0]):
        assert spec_of(empty).is_dense


def test_what_ranks_compare() -> None:
    """Strides are said only where they order elements. Ranks use different GPUs, but no rank the CPU."""
    tensors = {
        "p (2, 3, 4) float32": torch.empty(2, 3, 4),
        "p (2, 3, 4, 5) float32 dimensions in memory [0, 2, 3, 1]": torch.empty(2, 3, 4, 5).contiguous(
            memory_format=torch.channels_last
        ),
        "p (4, 3) float32 dimensions in memory [1, 0]": torch.empty(3, 4).t(),
        "p (4, 5) float32": torch.empty(4, 6)[:, :5],
        "p (3, 6) float32": torch.empty(6, 4).t()[:3],  # gaps, so it travels contiguously
        "p (1, 3) float32": torch.empty(9).as_strided((1, 3), (77, 1)),
        "p () float64": torch.empty(()).double(),
        "p (4, 1) float32": torch.empty(1, 4).t(),
        "p (3, 0, 2) float32": torch.empty(2, 0, 3).transpose(0, 2),
        "p (1, 3, 4) float32 dimensions in memory [2, 1]": torch.empty(100).as_strided((1, 3, 4), (77, 1, 3)),
        "p (3, 1, 4) float32 dimensions in memory [2, 0]": torch.empty(100).as_strided((3, 1, 4), (1, 1, 3)),
        "p (4, 3, 1) float32 dimensions in memory [1, 0]": torch.empty(100).as_strided((4, 3, 1), (1, 4, 1)),
    }
    assert [spec_of(tensor).describe() for tensor in tensors.values()] == [*tensors]
    specs = [spec("a", 3, is_sparse=True), spec("b", 4, device=torch.device("cuda", 1))]
    assert plans.describe(specs, "op='mean'") == [
        "options: op='mean'",
        "parameter 0: a (3,) float32 sparse",
        "parameter 1: b (4,) float32 on cuda",
    ]


def test_first_difference() -> None:
    base = ["options: op='mean'", "parameter 0: a (4, 3) float32", "parameter 1: b (4,) float32"]
    other = [*base[:2], "parameter 1: b (5,) float32"]
    for descriptions, said in (
        ([base, other, base], "parameter 1: ranks 0, 2 have b (4,) float32; rank 1 has b (5,) float32"),
        ([base, base[:2]], "parameter 1: rank 0 has b (4,) float32; rank 1 has nothing"),
        ([base[:2], base], "parameter 1: rank 0 has nothing; rank 1 has b (4,) float32"),
        ([base, ["options: op='sum'", *other[1:]]], "options: rank 0 has op='mean'; rank 1 has op='sum'"),
        (
            [base, other, base[:2], other],
            "parameter 1: rank 0 has b (4,) float32; ranks 1, 3 have b (5,) float32; rank 2 has nothing",
        ),
    ):
        assert first_difference(descriptions) == f"ranks disagree about {said}; make it the same on all ranks"
    assert first_difference([base] * 3) == "ranks do not disagree"


@pytest.mark.parametrize(
    ("hosts", "algorithm", "on_device", "expected"),
    [
        ([4], "auto", True, 10.0),
        ([4], "native", True, 25.0),
        ([3], "direct", True, 25.0),
        ([4, 4], "auto", True, 25.0),
        ([4], "auto", False, 25.0),
        ([4, 4], "hierarchical", False, 25.0),
    ],
)
def test_how_large_buckets_are(hosts: list[int], algorithm: str, on_device: bool, expected: float) -> None:
    assert plans.default_bucket_mb(sum(hosts), len(hosts), algorithm, on_device=on_device) == expected
