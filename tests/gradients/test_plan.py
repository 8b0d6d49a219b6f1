"""The plan is data: who shares a bucket, in which order, where; and what ranks must agree on beforehand."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from torchring.collectives.signature import fingerprint, first_difference
from torchring.gradients.plan import (
    ALIGNMENT_BYTES,
    BucketPlan,
    ParameterSpec,
    Plan,
    Slot,
    build_plan,
    default_bucket_mb,
    describe,
    wire_dtype,
)

CPU = torch.device("cpu")


def spec(
    name: str,
    *shape: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    stride: tuple[int, ...] | None = None,
    is_sparse: bool = False,
) -> ParameterSpec:
    strides = torch.empty(shape, device="meta").stride() if stride is None else stride
    return ParameterSpec(name, shape, strides, dtype, device, is_sparse)


def spec_of(tensor: torch.Tensor) -> ParameterSpec:
    return ParameterSpec("p", tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)


def fp32(*numels: int) -> list[ParameterSpec]:
    return [spec(f"p{i}", numel) for i, numel in enumerate(numels)]


def parameters_of(plan: Plan) -> list[list[int]]:
    return [[slot.parameter for slot in bucket.slots] for bucket in plan.buckets]


# build_plan


def test_worked_example() -> None:
    plan = build_plan(fp32(4, 2, 3), bucket_bytes=16)
    assert plan.buckets == (
        BucketPlan(0, torch.float32, torch.float32, (Slot(2, 0, 3), Slot(1, 16, 2)), numel=32),
        BucketPlan(1, torch.float32, torch.float32, (Slot(0, 0, 4),), numel=16),
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
    assert parameters_of(build_plan(fp32(*numels), **options)) == expected


def test_each_dtype_has_a_small_first_bucket() -> None:
    specs = [spec(f"p{i}", 2, dtype=(torch.float32, torch.bfloat16)[i % 2]) for i in range(8)]
    plan = build_plan(specs, bucket_bytes=24, first_bucket_bytes=4)
    assert parameters_of(plan) == [[7], [6], [5, 3, 1], [4, 2, 0]]
    bf16, fp32 = torch.bfloat16, torch.float32
    assert [bucket.dtype for bucket in plan.buckets] == [bf16, fp32, bf16, fp32]


def test_little_is_ready_last() -> None:
    specs = [spec(str(i), 1 << 18) for i in range(8)]  # 1 MiB each
    for last, expected in ((None, 6), (4 << 20, 3), (1 << 20, 0), (0, 0), (99 << 20, 6)):
        *_, end = parameters_of(build_plan(specs, bucket_bytes=99 << 20, last_bucket_bytes=last))
        assert (end[0], end[-1]) == (expected, 0), last
    # of two dtypes, in the bucket of the parameter that is ready last
    mixed = [spec("a", 4), spec("b", 4, dtype=torch.float64), spec("c", 4), spec("d", 4)]
    assert parameters_of(build_plan(mixed, bucket_bytes=64, first_bucket_bytes=64, last_bucket_bytes=0)) == [
        [3, 2],
        [1],
        [0],
    ]


def test_given_order() -> None:
    specs = fp32(*[1] * 6)
    assert parameters_of(build_plan(specs, bucket_bytes=8, order=[1, 4, 0, 2, 3, 5])) == [[1, 4], [0, 2], [3, 5]]
    some = build_plan(specs, bucket_bytes=8, order=[5, 4, 3], first_index=7)
    assert [(bucket.index, [slot.parameter for slot in bucket.slots]) for bucket in some.buckets] == [
        (7, [5, 4]),
        (8, [3]),
    ]


def test_dtypes_and_devices_do_not_mix() -> None:
    kinds = [
        (torch.float32, CPU),
        (torch.float64, CPU),
        (torch.float32, torch.device("meta")),
        (torch.float16, CPU),
    ]
    specs = [spec(f"p{i}", 3, dtype=kinds[i % 4][0], device=kinds[i % 4][1]) for i in range(12)]
    plan = build_plan(specs, bucket_bytes=1000)
    assert sorted(map(sorted, parameters_of(plan))) == [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]]
    for bucket in plan.buckets:
        assert {(specs[slot.parameter].dtype, specs[slot.parameter].device) for slot in bucket.slots} in [
            {kind} for kind in kinds
        ]
        assert {specs[slot.parameter].dtype for slot in bucket.slots} == {bucket.dtype}


def test_buckets_leave_in_the_order_of_their_last_gradient() -> None:
    # The half-precision bucket is opened first and is complete last.
    specs = [spec("half0", 1, dtype=torch.float16), *fp32(4, 4), spec("half1", 1, dtype=torch.float16)]
    plan = build_plan(specs, bucket_bytes=16)
    assert parameters_of(plan) == [[2], [1], [3, 0]]
    assert [bucket.index for bucket in plan.buckets] == [0, 1, 2]


@pytest.mark.parametrize(
    ("dtype", "compression", "elements_to_the_line"),
    [
        (torch.float32, None, 16),
        (torch.float64, None, 8),
        (torch.float16, None, 32),
        (torch.float32, "fp16", 32),
        (torch.float64, "bf16", 32),
    ],
)
def test_slots_are_aligned_in_the_wire_dtype(
    dtype: torch.dtype, compression: str | None, elements_to_the_line: int
) -> None:
    line = elements_to_the_line
    specs = [spec(f"p{i}", numel, dtype=dtype) for i, numel in enumerate([1, line, line + 1, line - 1])]
    (bucket,) = build_plan(specs, bucket_bytes=10_000, compression=compression).buckets
    assert [slot.offset for slot in bucket.slots] == [0, line, 3 * line, 4 * line]
    assert [slot.numel for slot in bucket.slots] == [line - 1, line + 1, line, 1]
    assert bucket.numel == 5 * line


def test_empty_and_0_dim_parameters() -> None:
    specs = [spec("scalar"), spec("none", 0, 3), spec("row", 2)]
    (bucket,) = build_plan(specs, bucket_bytes=1000).buckets
    assert bucket.slots == (Slot(2, 0, 2), Slot(1, 16, 0), Slot(0, 16, 1))
    assert bucket.numel == 32
    (alone,) = build_plan([spec("none", 0)], bucket_bytes=1000).buckets
    assert (alone.slots, alone.numel) == ((Slot(0, 0, 0),), 0)


def test_sparse_parameters_are_in_no_bucket() -> None:
    specs = [spec("a", 2), spec("emb", 9, 2, is_sparse=True), spec("b", 2)]
    assert parameters_of(build_plan(specs, bucket_bytes=1000)) == [[2, 0]]
    assert build_plan([specs[1]], bucket_bytes=0).buckets == ()


@pytest.mark.parametrize(
    ("dtype", "compression", "expected"),
    [
        (torch.float32, None, torch.float32),
        (torch.float32, "fp16", torch.float16),
        (torch.float64, "bf16", torch.bfloat16),
        (torch.float16, "bf16", torch.float16),  # as narrow already
        (torch.bfloat16, "fp16", torch.bfloat16),
        (torch.float16, None, torch.float16),
    ],
)
def test_compression_narrows_and_never_widens(
    dtype: torch.dtype, compression: str | None, expected: torch.dtype
) -> None:
    assert wire_dtype(dtype, compression) == expected
    (bucket,) = build_plan([spec("p", 5, dtype=dtype)], bucket_bytes=100, compression=compression).buckets
    assert (bucket.dtype, bucket.wire_dtype) == (dtype, expected)


def check_layout(plan: Plan, specs: Sequence[ParameterSpec]) -> None:
    """Every dense parameter is in exactly one slot; slots are aligned, disjoint, and within the buffer."""
    counts = Counter(slot.parameter for bucket in plan.buckets for slot in bucket.slots)
    assert counts == Counter(i for i, s in enumerate(specs) if not s.is_sparse)
    assert [bucket.index for bucket in plan.buckets] == list(range(len(plan.buckets)))
    for bucket in plan.buckets:
        assert bucket.slots
        end = 0
        for slot in bucket.slots:
            assert slot.numel == specs[slot.parameter].numel
            assert slot.offset >= end
            assert slot.offset * bucket.wire_dtype.itemsize % ALIGNMENT_BYTES == 0
            end = slot.offset + slot.numel
        assert bucket.numel >= end


@pytest.mark.parametrize("seed", range(40))
def test_random_plans(seed: int) -> None:
    rng = random.Random(seed)
    dtypes = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
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
    cap, first_cap = rng.choice([0, 1, 64, 1000, 10**6]), rng.choice([0, 100, 10**6])
    compression = rng.choice([None, "fp16", "bf16"])
    plan = build_plan(specs, bucket_bytes=cap, first_bucket_bytes=first_cap, compression=compression, order=order)
    check_layout(plan, specs)

    ready = order or [*reversed(range(len(specs)))]
    position = {index: i for i, index in enumerate(ready)}
    last_of = [max(position[slot.parameter] for slot in bucket.slots) for bucket in plan.buckets]
    assert last_of == sorted(last_of)
    seen: set[tuple[torch.dtype, torch.device]] = set()
    for bucket in plan.buckets:
        places = [position[slot.parameter] for slot in bucket.slots]
        assert places == sorted(places)
        kinds = {(specs[slot.parameter].dtype, specs[slot.parameter].device) for slot in bucket.slots}
        assert len(kinds) == 1
        limit = cap if kinds <= seen else min(cap, first_cap)
        seen |= kinds
        but_last = sum(slot.numel for slot in bucket.slots[:-1]) * bucket.dtype.itemsize
        assert len(bucket.slots) == 1 or but_last < limit  # closed as soon as the cap was reached


def test_random_plan_check_can_fail() -> None:
    specs = fp32(4, 4)
    plan = build_plan(specs, bucket_bytes=1000)
    (bucket,) = plan.buckets
    overlapping = replace(bucket, slots=(bucket.slots[0], replace(bucket.slots[1], offset=0)))
    twice = replace(bucket, slots=(bucket.slots[0], replace(bucket.slots[1], parameter=1)))
    outside = replace(bucket, slots=(bucket.slots[0], replace(bucket.slots[1], offset=32)))
    for wrong in (overlapping, twice, outside):
        with pytest.raises(AssertionError):
            check_layout(Plan((wrong,)), specs)


# is_dense


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


# describe, fingerprint, first_difference

BASE = [spec("a.weight", 4, 3), spec("a.bias", 4), spec("b.weight", 2, 2, 4, 4)]
CHANGES = {
    "name": [replace(BASE[0], name="c.weight"), *BASE[1:]],
    "shape": [replace(BASE[0], shape=(3, 4), stride=(4, 1)), *BASE[1:]],
    "number of dimensions": [BASE[0], spec("a.bias", 4, 1), BASE[2]],
    "dtype": [BASE[0], replace(BASE[1], dtype=torch.float64), BASE[2]],
    "stride": [*BASE[:2], replace(BASE[2], stride=(32, 1, 8, 2))],  # channels_last
    "transposed": [replace(BASE[0], stride=(1, 4)), *BASE[1:]],
    "sparse": [replace(BASE[0], is_sparse=True), *BASE[1:]],
    "one less": BASE[:2],
    "one more": [*BASE, spec("d", 1)],
    "order": [BASE[1], BASE[0], BASE[2]],
}


@pytest.mark.parametrize("change", CHANGES)
def test_fingerprint_differs_with(change: str) -> None:
    mine, theirs = describe(BASE, "op='mean'"), describe(CHANGES[change], "op='mean'")
    assert fingerprint(mine) != fingerprint(theirs)
    assert len(fingerprint(mine)) == 32


def test_fingerprint_differs_with_an_option() -> None:
    assert fingerprint(describe(BASE, "op='mean'")) != fingerprint(describe(BASE, "op='sum'"))


def test_fingerprint_differs_whatever_a_parameter_is_called() -> None:
    two = [spec("v", 2), spec("w", 3)]
    one = [spec("v (2,) float32\nparameter 1: w", 3)]
    assert describe(two, "x") != describe(one, "x")
    assert fingerprint(describe(two, "x")) != fingerprint(describe(one, "x"))


def test_ranks_use_different_gpus_but_no_rank_the_cpu() -> None:
    """As a rank would that sees no GPU."""
    first, second = ([replace(s, device=torch.device("cuda", number)) for s in BASE] for number in range(2))
    assert fingerprint(describe(first, "x")) == fingerprint(describe(second, "x")) != fingerprint(describe(BASE, "x"))
    assert first[0].describe() == f"{BASE[0].describe()} on cuda"


@pytest.mark.parametrize(
    ("shape", "one", "another"),
    [((1, 3, 4), (12, 1, 3), (77, 1, 3)), ((3, 1, 4), (1, 3, 3), (1, 1, 3)), ((4, 3, 1), (1, 4, 12), (1, 4, 1))],
)
def test_fingerprint_ignores_a_stride_that_orders_nothing_beside_those_that_do(
    shape: tuple[int, ...], one: tuple[int, ...], another: tuple[int, ...]
) -> None:
    tensors = [torch.empty(100).as_strided(shape, stride) for stride in (one, another)]
    plain = torch.empty(shape)
    assert torch.equal(*(t.copy_(torch.arange(12.0).view(shape)).as_strided((12,), (1,)) for t in tensors))
    said = [describe([spec_of(tensor)], "x") for tensor in tensors]
    assert fingerprint(said[0]) == fingerprint(said[1])
    assert fingerprint(said[0]) != fingerprint(describe([spec_of(plain)], "x"))


def test_strides_are_said_only_where_they_order() -> None:
    tensors = [
        torch.empty(2, 3, 4),
        torch.empty(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
        torch.empty(3, 4).t(),
        torch.empty(4, 6)[:, :5],
        torch.empty(6, 4).t()[:3],  # gaps, so it travels contiguously
        torch.empty(9).as_strided((1, 3), (77, 1)),
        torch.empty(()),
        torch.empty(1, 4).t(),
        torch.empty(2, 0, 3).transpose(0, 2),
    ]
    assert [spec_of(tensor).describe() for tensor in tensors] == [
        "p (2, 3, 4) float32",
        "p (2, 3, 4, 5) float32 dimensions in memory [0, 2, 3, 1]",
        "p (4, 3) float32 dimensions in memory [1, 0]",
        "p (4, 5) float32",
        "p (3, 6) float32",
        "p (1, 3) float32",
        "p () float32",
        "p (4, 1) float32",
        "p (3, 0, 2) float32",
    ]


@pytest.mark.parametrize(
    ("one", "another"),
    [
        (["a", "b"], ["a\nb"]),
        (["a", "b"], ["a', 'b"]),
        (["a", ""], ["a"]),
        (["ab", "c"], ["a", "bc"]),
        (["a\\n"], ["a\n"]),
        ([], [""]),
    ],
)
def test_fingerprint_knows_where_lines_end(one: list[str], another: list[str]) -> None:
    assert fingerprint(one) != fingerprint(another)
    assert fingerprint(tuple(one)) == fingerprint(one)


def test_first_difference_worked_example() -> None:
    theirs = [*BASE[:2], spec("b.weight", 2, 2, 4, 5)]
    said = first_difference([describe(BASE, "x"), describe(theirs, "x"), describe(BASE, "x")])
    assert said == (
        "ranks disagree about parameter 2: ranks 0, 2 have b.weight (2, 2, 4, 4) float32; "
        "rank 1 has b.weight (2, 2, 4, 5) float32"
    )


@pytest.mark.parametrize(
    ("change", "subject", "facts"),
    [
        ("name", "parameter 0", ["rank 1 has c.weight (4, 3)", "rank 0 has a.weight (4, 3)"]),
        ("dtype", "parameter 1", ["rank 0 has a.bias (4,) float32", "rank 1 has a.bias (4,) float64"]),
        ("stride", "parameter 2", ["b.weight", "rank 1 has", "[0, 2, 3, 1]"]),
        ("sparse", "parameter 0", ["rank 1 has a.weight (4, 3) float32 sparse"]),
        ("one less", "parameter 2", ["rank 0 has b.weight", "rank 1 has nothing"]),
        ("one more", "parameter 3", ["rank 1 has d (1,) float32", "rank 0 has nothing"]),
        ("order", "parameter 0", ["rank 0 has a.weight", "rank 1 has a.bias"]),
    ],
)
def test_first_difference_names_parameter_and_ranks(change: str, subject: str, facts: list[str]) -> None:
    said = first_difference([describe(BASE, "x"), describe(CHANGES[change], "x")])
    assert said.startswith(f"ranks disagree about {subject}: ")
    for fact in facts:
        assert fact in said


def test_first_difference_names_the_option_before_any_parameter() -> None:
    theirs = describe(CHANGES["name"], "op='sum'")
    said = first_difference([describe(BASE, "op='mean'"), theirs, theirs])
    assert said == "ranks disagree about options: rank 0 has op='mean'; ranks 1, 2 have op='sum'"


def test_first_difference_of_three_opinions() -> None:
    texts = [describe(CHANGES[change], "x") for change in ("name", "shape", "sparse", "name")]
    said = first_difference(texts)
    assert said == (
        "ranks disagree about parameter 0: ranks 0, 3 have c.weight (4, 3) float32; "
        "rank 1 has a.weight (3, 4) float32; rank 2 has a.weight (4, 3) float32 sparse"
    )


def test_first_difference_of_none() -> None:
    assert first_difference([describe(BASE, "x")] * 3) == "ranks do not disagree"


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
    assert default_bucket_mb(sum(hosts), len(hosts), algorithm, on_device=on_device) == expected
