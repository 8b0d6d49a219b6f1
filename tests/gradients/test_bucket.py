"""One bucket, reduced again and again in one process: wires are plain tensors, and `reduce` below is the all-reduce."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support.checks import assert_bitwise
from tests.support.fake_device import FakeAccelerator
from torchring.devices.packing import DevicePacking
from torchring.errors import GradientError
from torchring.gradients.bucket import Bucket, BucketState
from torchring.gradients.ledger import GradientStatus, Ledger
from torchring.gradients.packing import COPY_ON_ARRIVAL_BYTES, Packing, is_finite, slot_at
from torchring.gradients.places import open_bucket
from torchring.gradients.plan import ParameterSpec, build_plan
from torchring.gradients.reduction import Reduction, Said
from torchring.gradients.views import CAN_SWAP
from torchring.kernels.pack import NOT_FOUND

IDLE, FILLING, PACKED, REDUCING, REDUCED = BucketState
BIG = COPY_ON_ARRIVAL_BYTES // 4  # elements of fp32 that are copied on arrival; one less is only counted


@dataclass
class PlainWire:
    """`tensor` is what the bucket packs; the all_reduce writes to `buffer`, which has a version counter of its own."""

    tensor: torch.Tensor
    buffer: torch.Tensor


def plain_wire(buffer: torch.Tensor) -> PlainWire:
    return PlainWire(buffer.data, buffer)


def buffer_of(bucket: Bucket) -> torch.Tensor:
    assert isinstance(bucket.wire, PlainWire)
    return bucket.wire.buffer


def make(
    parameters: Sequence[torch.Tensor],
    *,
    world_size: int = 1,
    compression: str | None = None,
    is_sum: bool = False,
    order: Sequence[int] | None = None,
    accelerator: FakeAccelerator | None = None,
    ledger: Ledger | None = None,
) -> Bucket:
    """A bucket of all `parameters`, slot i holding parameter i, called p0, p1, ...; its wire starts as NaN.

    With an accelerator, the parameters are on its device. `ledger`: of the bucket that this one replaces.
    """
    parameters = [torch.nn.Parameter(p) if not isinstance(p, torch.nn.Parameter) else p for p in parameters]
    specs = [ParameterSpec(f"p{i}", tuple(p.shape), p.stride(), p.dtype, p.device) for i, p in enumerate(parameters)]
    (plan,) = build_plan(
        specs,
        bucket_bytes=1 << 40,
        first_bucket_bytes=1 << 40,
        compression=compression,
        order=range(len(specs)) if order is None else order,
    ).buckets
    wire = plain_wire(torch.full((plan.numel,), float("nan"), dtype=plan.wire_dtype))

    scale = 1.0 if is_sum else 1 / world_size
    packing = Packing(scale, plan, wire.tensor, world_size, [])
    if accelerator is not None:
        found = torch.full((2,), NOT_FOUND, dtype=torch.int32)
        stream = accelerator.open_stream()
        all_reduce: Any = SimpleNamespace(accelerator=accelerator, stream=stream, hold_for_earlier=lambda: None)
        packing = DevicePacking(scale, plan, wire.buffer, found, world_size, all_reduce, set())
    ledger = ledger or Ledger(is_sum=is_sum)
    ledger.lay_out([slot.parameter for slot in plan.slots], specs, parameters)
    return open_bucket(plan, wire, specs, parameters, packing, ledger)


def ones(*numels: int, **options: Any) -> Bucket:
    return make([torch.ones(numel) for numel in numels], **options)


def give(bucket: Bucket, slot: int, values: Sequence[float] | torch.Tensor | float) -> bool:
    """What autograd and the hook do: accumulate into `.grad`, then tell the bucket."""
    parameter = bucket.parameters[slot]
    new = torch.as_tensor(values, dtype=parameter.dtype).expand(parameter.shape)
    if parameter.grad is None:
        parameter.grad = new.clone()
    else:
        parameter.grad.add_(new)
    if bucket.state is IDLE:
        bucket.begin(bucket.reduction)
    return arrive(bucket, slot)


def arrive(bucket: Bucket, slot: int) -> bool:
    """As the launcher does it."""
    if bucket.copies_on_arrival[slot]:
        is_full = bucket.mark_ready(slot)
        bucket.pack((slot,))
    else:
        is_full = bucket.mark_noted((slot,))
    if is_full:
        bucket.pack_rest()
    return is_full


def reduce(*ranks: Bucket) -> None:
    """From PACKED to REDUCED on every rank."""
    for bucket in ranks:
        bucket.begin_reduce()
    total = torch.stack([bucket.wire.tensor.double() for bucket in ranks]).sum(0)
    for bucket in ranks:
        buffer_of(bucket).copy_(total)
        bucket.end_reduce()


def finish(*ranks: Bucket) -> None:
    """The end of a backward, on every rank."""
    for bucket in ranks:
        if bucket.state is IDLE:
            bucket.begin(bucket.reduction)
        if bucket.state in (IDLE, FILLING):
            bucket.fill_missing()
    reduce(*ranks)
    unused = set.intersection(*({bucket.plan.slots[slot].parameter for slot in bucket.unused} for bucket in ranks))
    for bucket in ranks:
        bucket.reduction.said = Said({}, unused)
        bucket.close_reduction()


def gradient(bucket: Bucket, slot: int) -> torch.Tensor:
    value = bucket.parameters[slot].grad
    assert value is not None
    return value


def grad(bucket: Bucket, slot: int) -> list[float]:
    return gradient(bucket, slot).tolist()


def backward(*ranks: Bucket, values: Sequence[float | None]) -> None:
    """Slot i gets `values[i]` on every rank, if that is not None, and then the backward ends."""
    for bucket in ranks:
        for slot, value in enumerate(values):
            if value is not None:
                give(bucket, slot, value)
    finish(*ranks)


def lies_in_wire(bucket: Bucket, slot: int) -> bool:
    value, wire = bucket.parameters[slot].grad, bucket.wire.tensor
    assert value is not None
    return value.data_ptr() == wire.data_ptr() + bucket.plan.slots[slot].offset * wire.element_size()


# States


def in_state(state: BucketState) -> Bucket:
    """A bucket of p0 and p1 that has been brought to `state` the ordinary way."""
    bucket = ones(2, 3)
    if state is not IDLE:
        give(bucket, 1, 1.0)
    if state in (PACKED, REDUCING, REDUCED):
        give(bucket, 0, 1.0)
    if state in (REDUCING, REDUCED):
        bucket.begin_reduce()
    if state is REDUCED:
        bucket.end_reduce()
    assert bucket.state is state
    return bucket


@pytest.mark.parametrize("state", list(BucketState))
def test_reset_leads_back_from_anywhere(state: BucketState) -> None:
    bucket = in_state(state)
    bucket.reset()
    assert bucket.state is IDLE
    assert [give(bucket, 0, 1.0), give(bucket, 1, 1.0)] == [False, True]


@pytest.mark.parametrize("state", [PACKED, REDUCING, REDUCED])
def test_arrival_after_the_bucket_left_says_what_to_do(state: BucketState) -> None:
    bucket = in_state(state)
    with pytest.raises(GradientError) as caught:
        give(bucket, 1, 1.0)
    assert (caught.value.bucket, caught.value.parameters) == (0, ("p1",))
    for fact in ("p1 received another gradient in the same backward", state.value, "use_reentrant=False", "no_sync()"):
        assert fact in str(caught.value)
    assert bucket.state is state


# Arrival and packing


def test_counts_each_parameter_once() -> None:
    bucket = ones(1, 1, 1)
    assert [give(bucket, slot, 1.0) for slot in (2, 2, 0, 2, 0)] == [False] * 5
    assert bucket.state is FILLING
    assert give(bucket, 1, 1.0) is True


def test_a_bucket_of_one_is_packed_at_once() -> None:
    bucket = ones(3)
    assert give(bucket, 0, [1.0, 2.0, 3.0]) is True
    assert bucket.wire.tensor[:3].tolist() == [1.0, 2.0, 3.0]


@pytest.mark.parametrize("compression", [None, "bf16"])
@pytest.mark.parametrize(("numel", "on_arrival"), [(BIG - 1, False), (BIG, True), (BIG + 1, True)])
def test_big_gradients_are_copied_on_arrival_small_ones_at_the_end(
    numel: int, on_arrival: bool, compression: str | None
) -> None:
    bucket = ones(numel, 1, compression=compression)
    give(bucket, 0, 3.0)
    wire = bucket.wire.tensor
    assert (wire[:numel] == 3).all().item() is on_arrival
    assert wire[:numel].isnan().all().item() is not on_arrival
    if compression is None and CAN_SWAP:
        assert lies_in_wire(bucket, 0) is on_arrival
    give(bucket, 1, 4.0)
    assert (wire[:numel] == 3).all()
    assert wire[bucket.plan.slots[1].offset] == 4


@pytest.mark.takes_2_12
@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_the_limit_is_in_bytes_of_gradient(dtype: torch.dtype) -> None:
    numel = COPY_ON_ARRIVAL_BYTES // dtype.itemsize
    for length, copied in ((numel - 1, False), (numel, True)):
        bucket = make([torch.ones(length, dtype=dtype), torch.ones(1, dtype=dtype)])
        give(bucket, 0, 1.0)
        assert lies_in_wire(bucket, 0) is copied


@pytest.mark.takes_2_12
def test_gradients_become_views_of_the_wire() -> None:
    parameters = [torch.ones(2, 3), torch.ones(4, 5).t(), torch.ones(()), torch.ones(0, 2), torch.ones(2, 3, 2, 2)]
    parameters[4] = parameters[4].contiguous(memory_format=torch.channels_last)
    bucket = make(parameters)
    values = [torch.randn(p.shape) for p in parameters]
    for slot, value in enumerate(values):
        give(bucket, slot, value)
    for slot, value in enumerate(values):
        now = gradient(bucket, slot)
        assert_bitwise(now, value, f"p{slot}")
        assert now.stride() == bucket.parameters[slot].stride()
        assert slot == 3 or lies_in_wire(bucket, slot)


def test_a_parameter_with_gaps_gets_a_contiguous_gradient() -> None:
    bucket = make([torch.nn.Parameter(torch.zeros(4, 6)[:, :5]), torch.nn.Parameter(torch.zeros(3, 1).expand(3, 2))])
    values = [torch.randn(4, 5), torch.randn(3, 2)]
    for slot, value in enumerate(values):
        give(bucket, slot, value)
    assert_bitwise(bucket.wire.tensor[:20], values[0].reshape(-1))
    finish(bucket)
    for slot, value in enumerate(values):
        now = gradient(bucket, slot)
        assert_bitwise(now, value)


@pytest.mark.takes_2_12
@pytest.mark.parametrize("numel", [3, BIG])
def test_accumulating_in_place_keeps_the_memory(numel: int) -> None:
    ranks = [ones(numel, 1, world_size=2) for _ in range(2)]
    addresses: list[list[int]] = [[], []]
    for _ in range(3):
        for rank, bucket in enumerate(ranks):
            give(bucket, 0, float(rank + 1))
            give(bucket, 1, 0.0)
        finish(*ranks)
        for rank, bucket in enumerate(ranks):
            value = gradient(bucket, 0)
            addresses[rank].append(value.data_ptr())
            assert lies_in_wire(bucket, 0)
    assert [len(set(seen)) for seen in addresses] == [1, 1]
    assert grad(ranks[0], 0) == grad(ranks[1], 0) == [4.5] * numel  # mean of 1 and 2, three times


@pytest.mark.parametrize(("numel", "compression"), [(3, None), (3, "fp16"), (BIG, "fp16")])
def test_second_arrival_before_the_bucket_leaves_counts(numel: int, compression: str | None) -> None:
    ranks = [ones(numel, 1, world_size=2, compression=compression) for _ in range(2)]
    for rank, bucket in enumerate(ranks):
        give(bucket, 0, float(rank))
        give(bucket, 0, 10.0)
        give(bucket, 1, 1.0)
    finish(*ranks)
    assert grad(ranks[0], 0) == grad(ranks[1], 0) == [10.5] * numel


# Compression


def test_compressed_gradients_are_scaled_before_the_cast() -> None:
    ranks = [ones(1, world_size=2, compression="fp16") for _ in range(2)]
    for bucket in ranks:
        give(bucket, 0, 1e5)  # inf in fp16; its half is not
        assert bucket.wire.tensor[:1].tolist() == [49984.0]
    for bucket in ranks:
        bucket.begin_reduce()
        buffer_of(bucket)[0] = 50016.0
        bucket.end_reduce()
        assert grad(bucket, 0) == [50016.0]
        bucket.close_reduction()


@pytest.mark.parametrize("compression", ["fp16", "bf16"])
def test_compressed_gradients_keep_their_own_memory_and_dtype(compression: str) -> None:
    bucket = make([torch.ones(3, dtype=torch.float64), torch.ones(2, 2, dtype=torch.float64)], compression=compression)
    assert bucket.wire.tensor.dtype == {"fp16": torch.float16, "bf16": torch.bfloat16}[compression]
    give(bucket, 0, [1.0, 2.0, 1 / 3])
    mine = bucket.parameters[0].grad
    give(bucket, 1, 5.0)
    finish(bucket)
    assert bucket.parameters[0].grad is mine
    rounded = torch.tensor(1 / 3, dtype=bucket.wire.tensor.dtype).item()
    assert grad(bucket, 0) == [1.0, 2.0, rounded]
    assert rounded != 1 / 3
    assert grad(bucket, 1) == [[5.0, 5.0], [5.0, 5.0]]


@pytest.mark.parametrize("conjugate", [False, True])
@pytest.mark.parametrize("compression", [None, "fp16"])
def test_complex_gradients_travel_as_real_numbers(compression: str | None, conjugate: bool) -> None:
    columns = torch.zeros(2, 3, dtype=torch.complex64).t()
    ranks = [make([columns.clone(), torch.zeros(2)], world_size=2, compression=compression) for _ in range(2)]
    numbers = torch.arange(1.0, 7.0).reshape(3, 2)  # no zero, whose sign would count
    for rank, bucket in enumerate(ranks):
        value = torch.complex(numbers * (2 * rank + 2), -numbers)
        bucket.parameters[0].grad = value.conj() if conjugate else value
        arrive(bucket, 0)
        give(bucket, 1, 1.0)
        assert (bucket.plan.dtype, bucket.plan.slots[0].numel) == (torch.float32, 12)
    finish(*ranks)
    expected = torch.complex(numbers * 3, numbers if conjugate else -numbers)
    for bucket in ranks:
        result = gradient(bucket, 0)
        assert_bitwise(result.resolve_conj(), expected)
        assert grad(bucket, 1) == [1.0, 1.0]


@pytest.mark.takes_2_12
def test_a_narrow_gradient_is_not_compressed() -> None:
    bucket = make([torch.ones(3, dtype=torch.bfloat16)], compression="fp16", world_size=2)
    give(bucket, 0, 3.0)
    assert bucket.wire.tensor.dtype == torch.bfloat16
    assert lies_in_wire(bucket, 0)
    assert bucket.wire.tensor[0] == 1.5


# Missing gradients


@pytest.mark.parametrize("compression", [None, "fp16"])
@pytest.mark.parametrize("numel", [2, BIG])
def test_missing_on_one_rank_counts_as_zero(numel: int, compression: str | None) -> None:
    ranks = [ones(numel, 1, world_size=2, compression=compression) for _ in range(2)]
    give(ranks[0], 0, 6.0)
    backward(*ranks, values=[None, 1.0])
    assert grad(ranks[0], 0) == grad(ranks[1], 0) == [3.0] * numel
    assert ranks[0].ledger.status == ranks[1].ledger.status == [GradientStatus.REDUCED] * 2
    assert [bucket.ledger.first_unsettled() for bucket in ranks] == [None, None]


@pytest.mark.parametrize("compression", [None, "bf16"])
@pytest.mark.parametrize("numel", [2, BIG])
def test_unused_on_all_ranks_keeps_an_older_result(numel: int, compression: str | None) -> None:
    """One third is not what it was after another trip over a 16-bit wire, or times 3 ranks and a third."""
    third = torch.tensor(1 / 3)
    ranks = [ones(numel, 1, world_size=3, compression=compression) for _ in range(3)]
    backward(*ranks, values=[third, 1.0])
    for bucket in ranks:
        kept = gradient(bucket, 0)
        kept.copy_(third)  # clipped, say: alike on all ranks
    for _ in range(2):
        backward(*ranks, values=[None, 1.0])
    for bucket in ranks:
        value = gradient(bucket, 0)
        assert_bitwise(value, third.expand(numel))
        assert bucket.ledger.first_unsettled() is None
        assert lies_in_wire(bucket, 0) is (CAN_SWAP and compression is None)


def test_an_older_result_counts_where_another_rank_adds_to_it() -> None:
    ranks = [ones(2, 1, world_size=2) for _ in range(2)]
    backward(*ranks, values=[4.0, 1.0])
    give(ranks[1], 0, 6.0)
    backward(*ranks, values=[None, 1.0])
    assert grad(ranks[0], 0) == grad(ranks[1], 0) == [7.0, 7.0]  # 4 from before, 6 / 2 new


# Gradients that a script keeps over zero_grad(set_to_none=True)

KEEP: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "the gradient": lambda grad: grad,
    "detached": lambda grad: grad.detach(),
    "data": lambda grad: grad.data,
    "flattened": lambda grad: grad.flatten(),
    "a piece": lambda grad: grad[1:],
}


def reduction_of(bucket: Bucket, *values: float | None) -> None:
    """zero_grad(), and a backward."""
    for parameter in bucket.parameters:
        parameter.grad = None
    backward(bucket, values=values)


@pytest.mark.parametrize("next_value", [5.0, None], ids=["used again", "not used again"])
@pytest.mark.parametrize("keep", list(KEEP))
@pytest.mark.parametrize("numel", [4, BIG])
@pytest.mark.parametrize(
    "can_swap", [pytest.param(True, marks=pytest.mark.takes_2_12), False], ids=["", "as in PyTorch 2.11"]
)
def test_a_kept_gradient_keeps_its_values(
    can_swap: bool, numel: int, keep: str, next_value: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where PyTorch cannot swap the memory of storages, gradients do not live in the wire."""
    monkeypatch.setattr("torchring.gradients.packing.CAN_SWAP", can_swap)
    bucket = ones(1, numel)
    reduction_of(bucket, 1.0, 2.0)
    value = gradient(bucket, 1)
    kept = KEEP[keep](value)
    version = kept._version
    del value
    for i in range(3):
        reduction_of(bucket, 3.0 + i, next_value)
        assert grad(bucket, 0) == [3.0 + i]
        assert lies_in_wire(bucket, 0) == can_swap
        if next_value is not None:
            assert bool((gradient(bucket, 1) == 5.0).all())
            assert lies_in_wire(bucket, 1) == can_swap
        assert bool((kept == 2.0).all())
    assert kept._version == version  # so what autograd has saved of it is still good
    assert bucket.ledger.first_unsettled() is None


def test_what_nobody_keeps_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = ones(4, BIG, 0)
    monkeypatch.setattr(
        "torchring.gradients.places.move_out", lambda *_: pytest.fail("a gradient was copied that nobody has")
    )
    for _ in range(3):
        reduction_of(bucket, 1.0, 2.0, 0.0)
        reduction_of(bucket, None, 2.0, None)
        finish(bucket)  # nothing new, and the older gradients are still there
        backward(bucket, values=[1.0])


def test_a_gradient_that_is_not_zeroed_is_accumulated_in_place_for_those_who_keep_it_too() -> None:
    """As in PyTorch."""
    bucket = ones(2)
    reduction_of(bucket, 1.0)
    kept = bucket.parameters[0].grad
    backward(bucket, values=[1.0])
    assert kept is bucket.parameters[0].grad
    assert grad(bucket, 0) == [2.0, 2.0]


@pytest.mark.parametrize("next_value", [5.0, None], ids=["used again", "not used again"])
@pytest.mark.parametrize("numel", [4, BIG])
def test_a_gradient_that_was_given_other_memory_is_the_scripts(numel: int, next_value: float | None) -> None:
    """`p.grad.data = p.grad.data * c`, as older clipping code has it."""
    bucket = ones(1, numel)
    reduction_of(bucket, 1.0, 2.0)
    kept = gradient(bucket, 1)
    kept.data = kept.data * 2
    assert bucket.ledger.first_unsettled() is None
    for i in range(2):
        reduction_of(bucket, 3.0 + i, next_value)
        assert grad(bucket, 0) == [3.0 + i]
        if next_value is not None:
            assert bool((gradient(bucket, 1) == 5.0).all())
            assert lies_in_wire(bucket, 1) is CAN_SWAP
        assert bool((kept == 4.0).all())


@pytest.mark.takes_2_12
def test_an_array_of_a_kept_gradient_outlives_the_bucket() -> None:
    """An array cannot be moved to the copy. The buffer that the array points to must stay."""
    bucket = ones(4)
    reduction_of(bucket, 1.0)
    value = gradient(bucket, 0)
    array, buffer = value.numpy(), weakref.ref(bucket.wire.tensor)
    del value
    reduction_of(bucket, 2.0)
    bucket.parameters[0].grad = None
    del bucket
    assert buffer() is not None
    assert array.tolist() == [2.0] * 4
    del array
    assert buffer() is None


def test_a_gradient_may_be_detached_in_place_and_is_saved_alone() -> None:
    """`p.grad.detach_(); p.grad.zero_()` is how PyTorch zeroed gradients once."""
    bucket = ones(4, 1000)
    reduction_of(bucket, 1.0, 2.0)
    value = gradient(bucket, 0)
    assert value.detach_().zero_() is value
    assert value.untyped_storage().nbytes() == 4 * 4
    assert grad(bucket, 1) == [2.0] * 1000


# Wrong use


@pytest.mark.parametrize("numel", [4, BIG])
def test_sparse_gradient_says_what_to_do(numel: int) -> None:
    bucket = ones(numel, 1)
    bucket.parameters[0].grad = torch.sparse_coo_tensor([[1]], [1.0], (numel,), check_invariants=True)
    with pytest.raises(GradientError, match=r"p0 has a sparse gradient\. torchring knows .* Pass the model") as caught:
        [arrive(bucket, 0), give(bucket, 1, 1.0)]
    assert caught.value.parameters == ("p0",)
    assert "sparse=False" in str(caught.value)


def _take(bucket: Bucket) -> None:
    bucket.parameters[0].grad = None


def _replace(bucket: Bucket) -> None:
    bucket.parameters[0].grad = torch.ones_like(bucket.parameters[0])


def _alias(bucket: Bucket) -> None:
    """Lies at the same address; still it is not the tensor that was handed out."""
    bucket.parameters[0].grad = gradient(bucket, 0).data


def _write(bucket: Bucket) -> None:
    gradient(bucket, 0).mul_(2.0)


@pytest.mark.parametrize(
    ("compression", "when", "act"),
    [
        (None, "packed in part", _take),  # a big gradient's copy has left by then
        *(pytest.param(None, "away", act, marks=pytest.mark.takes_2_12) for act in (_take, _replace, _alias, _write)),
        pytest.param(None, "back", _write, marks=pytest.mark.takes_2_12),
        ("fp16", "away", _take),
        ("fp16", "away", _write),  # its result would overwrite what was written
    ],
)
@pytest.mark.parametrize("numel", [4, BIG])
def test_a_gradient_that_is_changed_amid_a_reduction_is_named_and_not_trained_on(
    numel: int, compression: str | None, when: str, act: Callable[[Bucket], None]
) -> None:
    bucket = ones(numel, 1, compression=compression)
    give(bucket, 0, 1.0)

    def reduction() -> None:
        if when == "packed in part":
            act(bucket)
        give(bucket, 1, 1.0)
        bucket.begin_reduce()
        if when == "away":
            act(bucket)
        buffer_of(bucket).mul_(1.0)  # the all-reduce's own writes do not count
        bucket.end_reduce()
        if when == "back":
            act(bucket)
        bucket.reduction.said = Said({})
        bucket.close_reduction()

    with pytest.raises(GradientError, match=r"the gradient of p0 was (taken|changed|written to while) ") as caught:
        reduction()
    assert (caught.value.bucket, caught.value.parameters) == (0, ("p0",))
    assert bucket.ledger.first_unsettled() is not None
    if act is _write and compression is None:
        assert "was written to while it was being red" in str(caught.value)
        assert "registered before torchring.wrap" in str(caught.value)


@pytest.mark.parametrize("numel", [4, BIG])
def test_a_compressed_gradient_of_no_sync_that_is_written_to_amid_a_reduction(numel: int) -> None:
    """It did not arrive, and was only filled in."""
    bucket = ones(numel, 1, compression="fp16")
    give(bucket, 1, 1.0)
    bucket.parameters[0].grad = torch.ones(numel)
    bucket.ledger.mark_local(0)
    bucket.fill_missing()
    bucket.begin_reduce()
    _write(bucket)
    bucket.reduction.said = Said({})
    with pytest.raises(GradientError, match=r"the gradient of p0 was (taken away|changed)"):
        [bucket.end_reduce(), bucket.close_reduction()]
    assert bucket.ledger.first_unsettled() == ("p0", GradientStatus.LOCAL.value)


def test_writing_to_a_small_gradient_before_its_bucket_leaves_counts() -> None:
    """A hook of the script's own that was there first, say, or one on another parameter."""
    ranks = [ones(4, 1, world_size=2) for _ in range(2)]
    for rank, bucket in enumerate(ranks):
        give(bucket, 0, 1.0 + rank)
        value = gradient(bucket, 0)
        value.mul_(10.0)
        give(bucket, 1, 1.0)
    finish(*ranks)
    assert grad(ranks[0], 0) == grad(ranks[1], 0) == [15.0] * 4


def test_adding_to_a_sum_is_refused() -> None:
    bucket = ones(2, 1, is_sum=True)
    backward(bucket, values=[1.0, 1.0])
    with pytest.raises(GradientError, match=r"gradient of p0, which was summed over ranks before") as caught:
        give(bucket, 0, 1.0)
    assert "zero_grad()" in str(caught.value)
    assert caught.value.parameters == ("p0",)


@pytest.mark.parametrize("how", ["set to none", "zeroed", "second arrival"])
def test_a_sum_may_be_started_afresh(how: str) -> None:
    ranks = [ones(2, 1, is_sum=True) for _ in range(2)]
    backward(*ranks, values=[1.0, 1.0])
    for bucket in ranks:
        for parameter in bucket.parameters:
            if how == "set to none":
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()
        if how != "set to none":
            bucket.ledger.mark_zeroed()
        give(bucket, 0, 3.0)
        if how == "second arrival":
            give(bucket, 0, 2.0)
        give(bucket, 1, 1.0)
    finish(*ranks)
    assert grad(ranks[0], 0) == grad(ranks[1], 0) == ([10.0, 10.0] if how == "second arrival" else [6.0, 6.0])


# Gradients of backwards that do not reduce


@pytest.mark.parametrize("compression", [None, "fp16"])
def test_accumulated_gradients_are_local_and_open_no_reduction(compression: str | None) -> None:
    ranks = [ones(2, 1, world_size=2, compression=compression) for _ in range(2)]
    for _ in range(2):
        for rank, bucket in enumerate(ranks):
            bucket.parameters[0].grad = torch.tensor([1.0, 2.0]) * (rank + 1)
            bucket.ledger.mark_local(0)
            assert bucket.state is IDLE
            assert bucket.ledger.status[0] is GradientStatus.LOCAL
            assert bucket.ledger.first_unsettled() == ("p0", GradientStatus.LOCAL.value)
            give(bucket, 1, 1.0)
        finish(*ranks)
        assert grad(ranks[0], 0) == grad(ranks[1], 0) == [1.5, 3.0]
        assert [bucket.ledger.first_unsettled() for bucket in ranks] == [None, None]


def test_accumulating_onto_a_sum_is_refused_before_it_is_marked() -> None:
    bucket = ones(2, 1, is_sum=True)
    backward(bucket, values=[1.0, 1.0])
    with pytest.raises(GradientError, match=r"gradient of p1, which was summed over ranks before") as caught:
        bucket.ledger.mark_local(1)
    assert caught.value.parameters == ("p1",)
    bucket.parameters[1].grad = torch.ones(1)  # after zero_grad()
    bucket.ledger.mark_local(1)
    bucket.ledger.mark_local(1)  # what is local may grow
    assert bucket.ledger.status == [GradientStatus.REDUCED, GradientStatus.LOCAL]


# Before an explicit synchronize()


@pytest.mark.parametrize("after", ["a reduction", "zeroing"])
@pytest.mark.parametrize("compression", [None, "fp16"])
def test_mark_written_makes_written_gradients_local_again(compression: str | None, after: str) -> None:
    """Those that share a wire share its version, so all of it counts as written to; it is the same on all ranks."""
    ranks = [ones(2, 2, world_size=2, compression=compression) for _ in range(2)]
    backward(*ranks, values=[4.0, 8.0])
    if after == "zeroing":
        for bucket in ranks:
            for parameter in bucket.parameters:
                assert parameter.grad is not None
                parameter.grad.zero_()
            bucket.ledger.mark_zeroed()
            bucket.ledger.mark_written()
            assert bucket.ledger.status == [GradientStatus.ZEROED] * 2
    value = gradient(ranks[1], 0)
    value.add_(torch.tensor([2.0, 4.0]))
    for bucket in ranks:
        bucket.ledger.mark_written()
    assert ranks[0].ledger.first_unsettled() is None
    assert ranks[1].ledger.first_unsettled() == ("p0", GradientStatus.LOCAL.value)
    finish(*ranks)
    old = (4.0, 8.0) if after == "a reduction" else (0.0, 0.0)
    for bucket in ranks:
        assert [grad(bucket, 0), grad(bucket, 1)] == [[old[0] + 1.0, old[0] + 2.0], [old[1]] * 2]
        bucket.ledger.mark_written()
        assert bucket.ledger.first_unsettled() is None


@pytest.mark.parametrize("compression", [None, "fp16"])
def test_mark_written_refuses_to_sum_a_sum(compression: str | None) -> None:
    bucket = ones(2, 1, is_sum=True, compression=compression)
    backward(bucket, values=[1.0, 1.0])
    bucket.ledger.mark_written()
    value = gradient(bucket, 0)
    value.mul_(2.0)
    with pytest.raises(GradientError, match="gradient of p0 was written to after it was summed over ranks") as caught:
        bucket.ledger.mark_written()
    assert "zero_grad()" in str(caught.value)
    assert caught.value.parameters == ("p0",)
    for parameter in bucket.parameters:
        parameter.grad = None
    bucket.ledger.mark_written()


def test_mark_written_passes_over_what_is_local_anyway() -> None:
    bucket = ones(2, 1, is_sum=True)
    backward(bucket, values=[1.0, 1.0])
    bucket.parameters[0].grad = torch.ones(2)
    bucket.parameters[1].grad = None
    bucket.ledger.mark_written()
    assert bucket.ledger.first_unsettled() == ("p0", "was replaced by another tensor")


def test_a_slice_that_was_written_to_counts_though_a_reduction_has_passed_it_by() -> None:
    """Slices of one tensor share a version. It is looked at in reductions that write to a slice, and in no others."""
    bucket = ones(2, 1, compression="fp16")
    bucket.parameters[0].grad = torch.zeros(4)[:2]
    arrive(bucket, 0)
    give(bucket, 1, 1.0)
    finish(bucket)
    bucket.ledger.settle_slices()
    value = gradient(bucket, 0)
    value.add_(1.0)
    give(bucket, 1, 1.0)
    finish(bucket)
    bucket.ledger.settle_slices()
    bucket.ledger.mark_written()
    assert bucket.ledger.first_unsettled() == ("p0", GradientStatus.LOCAL.value)


# What is known about a gradient


@pytest.mark.parametrize("status", [GradientStatus.REDUCED, GradientStatus.ZEROED])
@pytest.mark.parametrize("compression", [None, "fp16"])
def test_known_by_identity_not_by_address(compression: str | None, status: GradientStatus) -> None:
    """The allocator gives the same address to the next gradient of that size."""
    bucket = ones(2, 1, compression=compression)
    backward(bucket, values=[1.0, 1.0])
    bucket.ledger.status[0] = status
    mine = gradient(bucket, 0)
    bucket.parameters[0].grad = mine.data
    assert bucket.parameters[0].grad.data_ptr() == mine.data_ptr()
    assert bucket.ledger.first_unsettled() == ("p0", "was replaced by another tensor")
    bucket.parameters[0].grad = mine
    assert bucket.ledger.first_unsettled() is None


def test_known_weakly() -> None:
    """zero_grad() frees the memory of a gradient that does not live in the wire; nothing here holds on to it."""
    bucket = ones(2, compression="fp16")
    backward(bucket, values=[1.0])
    value = gradient(bucket, 0)
    gone = weakref.ref(value)
    del value
    assert gone() is not None
    bucket.parameters[0].grad = None
    assert gone() is None
    assert bucket.ledger.first_unsettled() is None
    bucket.parameters[0].grad = torch.ones(2)
    assert bucket.ledger.first_unsettled() == ("p0", "was replaced by another tensor")


@pytest.mark.parametrize("compression", [None, "fp16"])
@pytest.mark.parametrize("status", list(GradientStatus))
def test_unsettled_by_status(status: GradientStatus, compression: str | None) -> None:
    bucket = ones(2, 1, compression=compression)
    backward(bucket, values=[1.0, 1.0])
    bucket.ledger.status[1] = status
    expected = None if status in (GradientStatus.REDUCED, GradientStatus.ZEROED) else ("p1", status.value)
    assert bucket.ledger.first_unsettled() == expected
    bucket.parameters[1].grad = None
    assert bucket.ledger.first_unsettled() is None  # the optimizer skips it


def test_unsettled_names_the_first_in_plan_order() -> None:
    bucket = ones(1, 1, 1, order=[2, 0, 1])
    assert bucket.names == ["p2", "p0", "p1"]
    for slot in (2, 1):
        give(bucket, slot, 1.0)
    assert bucket.ledger.first_unsettled() == ("p0", GradientStatus.LOCAL.value)


def test_an_untouched_bucket_is_settled_and_an_older_gradient_is_not() -> None:
    bucket = ones(2, 1)
    assert bucket.ledger.first_unsettled() is None
    bucket.parameters[1].grad = torch.ones(1)
    assert bucket.ledger.first_unsettled() == ("p1", GradientStatus.UNKNOWN.value)


@pytest.mark.parametrize("compression", [None, "fp16"])
def test_mark_zeroed_settles(compression: str | None) -> None:
    bucket = ones(2, 1, compression=compression)
    for parameter in bucket.parameters[:1]:
        parameter.grad = torch.zeros(2)
    bucket.ledger.status = [GradientStatus.LOCAL, GradientStatus.UNKNOWN]
    bucket.ledger.mark_zeroed()
    assert bucket.ledger.status == [GradientStatus.ZEROED] * 2
    assert bucket.ledger.first_unsettled() is None
    bucket.parameters[0].grad = torch.zeros(2)
    assert bucket.ledger.first_unsettled() == ("p0", "was replaced by another tensor")


# Taking over from another bucket


@pytest.mark.parametrize("compression", [None, "fp16"])
def test_another_plan_leaves_known_what_is_known(compression: str | None) -> None:
    parameters = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))]
    old = make(parameters, compression=compression)
    give(old, 0, [1.0, 2.0])
    give(old, 1, [3.0, 4.0, 5.0])
    finish(old)
    old.ledger.status[1] = GradientStatus.ZEROED
    new = make(parameters, compression=compression, order=[1, 0], ledger=old.ledger)
    assert new.ledger.status == [GradientStatus.ZEROED, GradientStatus.REDUCED]
    assert new.ledger.first_unsettled() is None
    assert grad(new, 1) == [1.0, 2.0]  # still where it was
    mine = parameters[1].grad
    assert mine is not None
    for another in (torch.ones(3), mine.data):
        parameters[1].grad = another
        assert new.ledger.first_unsettled() == ("p1", "was replaced by another tensor")
    parameters[1].grad = mine
    del mine, another
    old.release()
    backward(new, values=[1.0, 1.0])
    assert [grad(new, 0), grad(new, 1)] == [[4.0, 5.0, 6.0], [2.0, 3.0]]
    assert lies_in_wire(new, 0) is lies_in_wire(new, 1) is (CAN_SWAP and compression is None)
    assert new.ledger.first_unsettled() is None


@pytest.mark.parametrize("compression", [None, "fp16"])
@pytest.mark.parametrize("is_sum", [False, True])
@pytest.mark.parametrize("reductions", [1, 2, 3])
def test_a_gradient_was_not_written_to_by_another_plan(reductions: int, is_sum: bool, compression: str | None) -> None:
    """It lies in the old wire, and is compared with what was true there."""
    parameters = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))]
    old = make(parameters, compression=compression, is_sum=is_sum)
    for _ in range(reductions):
        for slot in range(2):
            parameters[slot].grad = None
            give(old, slot, 1.0)
        finish(old)
    new = make(parameters, compression=compression, order=[1, 0], ledger=old.ledger)
    old.release()
    new.ledger.mark_written()
    assert new.ledger.status == [GradientStatus.REDUCED] * 2
    mine = parameters[1].grad
    assert mine is not None
    mine.mul_(2.0)
    if is_sum:
        with pytest.raises(GradientError, match="was written to after it was summed"):
            new.ledger.mark_written()
    else:
        new.ledger.mark_written()
        assert new.ledger.first_unsettled() is not None


def test_a_gradient_that_nobody_uses_moves_unchanged_to_another_plan() -> None:
    parameters = [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))]
    old = make(parameters)
    peer = ones(2, 3, order=[1, 0], world_size=2)
    give(old, 0, [1.0, 2.0])
    give(old, 1, 3.0)
    finish(old)
    new = make(parameters, order=[1, 0], world_size=2, ledger=old.ledger)
    old.release()
    for bucket in (new, peer):
        give(bucket, 0, 1.0)
    finish(new, peer)
    assert grad(new, 1) == [1.0, 2.0]
    assert new.ledger.first_unsettled() is None


# Blame


def test_slot_at() -> None:
    bucket = make([torch.ones(17), torch.ones(0), torch.ones(()), torch.ones(2)])
    assert [slot.offset for slot in bucket.plan.slots] == [0, 32, 32, 48]
    found = {element: slot_at(bucket.plan, element) for element in (0, 16, 31, 32, 47, 48, 49)}
    assert found == {0: 0, 16: 0, 31: 0, 32: 2, 47: 2, 48: 3, 49: 3}


def test_a_parameter_that_was_reshaped_since_is_named() -> None:
    bucket = ones(2, 3)
    give(bucket, 0, 1.0)
    bucket.parameters[1].data = torch.ones(4)
    with pytest.raises(GradientError, match=r"p1 is not what it was when it was wrapped") as caught:
        give(bucket, 1, 1.0)
    assert caught.value.parameters == ("p1",)


def test_an_error_that_is_not_about_a_parameter_comes_out_as_it_is() -> None:
    bucket = ones(2)
    bucket.packing.pack = mock.Mock(side_effect=RuntimeError("out of memory"))  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match=r"^out of memory$"):
        give(bucket, 0, 1.0)


# On a device, whose streams are late


@pytest.fixture
def accelerator() -> Iterator[FakeAccelerator]:
    with FakeAccelerator().installed() as accelerator:
        yield accelerator


def test_on_a_device_a_bucket_leaves_behind_every_stream_that_computed_a_gradient(accelerator: FakeAccelerator) -> None:
    bucket = make([torch.ones(2), torch.ones(2)], accelerator=accelerator)
    for value in (3.0, 5.0):  # the second time, gradients are accumulated in the wire buffer
        with accelerator.on_stream("another"):
            assert give(bucket, 0, value) is False
            bucket.packing._streams.add("another")  # type: ignore[attr-defined]  # as the hook does
        assert give(bucket, 1, value) is True
        accelerator.streams[-1].run(lambda: buffer_of(bucket).mul_(10.0))
        accelerator.synchronize()
        bucket.begin_reduce()
        bucket.end_reduce()
        bucket.close_reduction()
    assert [grad(bucket, 0), grad(bucket, 1)] == [[350.0, 350.0], [350.0, 350.0]]
    assert accelerator.races == []


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.0])
def test_on_a_device_a_gradient_is_weighed_wherever_it_lies(factor: float, accelerator: FakeAccelerator) -> None:
    """First in memory of its own, and then in the wire buffer."""
    bucket = make([torch.ones(2)], accelerator=accelerator)
    for number in range(2):
        bucket.reduction = Reduction(number, weight=factor)
        give(bucket, 0, 3.0)
        accelerator.synchronize()
        reduce(bucket)
        bucket.close_reduction()
        assert grad(bucket, 0) == [3.0 * factor] * 2
        bucket.parameters[0].grad.zero_()  # type: ignore[union-attr]
        bucket.ledger.mark_zeroed()


def test_on_a_device_a_result_replaces_a_gradient_with_a_pending_negation(accelerator: FakeAccelerator) -> None:
    """Kernels copy bytes, and such a gradient's bytes are those of its opposite."""
    bucket = make([torch.ones(3)], world_size=2, compression="fp16", accelerator=accelerator)
    bucket.parameters[0].grad = own = torch.complex(torch.zeros(3), torch.arange(3.0)).conj().imag
    assert own.is_neg()
    arrive(bucket, 0)
    accelerator.synchronize()
    bucket.begin_reduce()
    buffer_of(bucket).mul_(3.0)
    bucket.end_reduce()
    accelerator.synchronize()
    bucket.close_reduction()
    assert bucket.parameters[0].grad is own
    assert own.tolist() == [0.0, -1.5, -3.0]


def test_is_finite() -> None:
    assert is_finite(torch.full((10,), 3e38))  # their sum is not
    assert is_finite(torch.empty(0))
    assert is_finite(torch.full((10,), 60_000.0, dtype=torch.float16))
    assert not is_finite(torch.tensor([1.0, math.nan]))
    assert not is_finite(torch.tensor([math.inf, -math.inf, 1.0], dtype=torch.float64))
