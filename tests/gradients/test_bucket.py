"""What becomes of gradients in reductions, on ranks that take turns in one process."""

import math
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from tests.support.checks import assert_bitwise
from tests.support.fake_device import FakeAccelerator
from tests.support.fakes import FakeRank, fake_ranks, finish
from torchring.devices import packing as device_packing
from torchring.errors import GradientError
from torchring.gradients.ledger import GradientStatus
from torchring.gradients.packing import COPY_ON_ARRIVAL_BYTES, Packing, is_finite, slot_at
from torchring.gradients.views import CAN_SWAP
from torchring.kernels.pack import NOT_FOUND

BIG = COPY_ON_ARRIVAL_BYTES // 4  # elements of fp32 that are copied on arrival
LOCAL, REDUCED, ZEROED = GradientStatus.LOCAL, GradientStatus.REDUCED, GradientStatus.ZEROED
REPLACED = "was replaced by another tensor"


def backward(*ranks: FakeRank, values: list[Any]) -> None:
    """Gradient i gets `values[i]` on every rank, if that is not None."""
    for rank in ranks:
        for index, value in enumerate(values):
            if value is not None:
                rank.give(index, value)
    finish(*ranks)


def wire_of(rank: FakeRank) -> Tensor:
    return rank.launcher.buckets[0].wire.tensor


def problem(rank: FakeRank) -> tuple[str, str] | None:
    return rank.ledger.first_unsettled()


# Arrival and packing


@pytest.mark.parametrize(
    ("dtype", "compression", "lives_in_wire"),
    [
        (torch.float32, None, CAN_SWAP),
        (torch.float64, None, CAN_SWAP),
        (torch.float32, "bf16", False),
        (torch.bfloat16, "fp16", CAN_SWAP),  # as narrow already
    ],
)
@pytest.mark.parametrize("is_large", [False, True])
def test_large_gradients_are_copied_on_arrival_small_ones_when_the_bucket_is_full(
    is_large: bool, dtype: torch.dtype, compression: str | None, lives_in_wire: bool
) -> None:
    numel = COPY_ON_ARRIVAL_BYTES // dtype.itemsize - (not is_large)
    [rank] = fake_ranks(1, torch.ones(numel, dtype=dtype), torch.ones(1, dtype=dtype), compression=compression)
    wire = wire_of(rank)
    rank.give(0, 3.0)
    assert (wire[:numel] == 3).all().item() is is_large
    assert wire[:numel].isnan().all().item() is not is_large
    assert rank.is_in_wire(0) is (is_large and lives_in_wire)
    rank.give(1, 4.0)
    assert (wire[:numel] == 3).all()
    assert wire[rank.launcher.buckets[0].plan.slots[1].offset] == 4
    assert rank.is_in_wire(0) is lives_in_wire


@pytest.mark.takes_2_12
def test_gradients_become_views_of_the_wire_laid_out_as_their_parameters() -> None:
    square = torch.ones(2, 3, 2, 2).contiguous(memory_format=torch.channels_last)
    with_gaps = [torch.zeros(4, 6)[:, :5], torch.zeros(3, 1).expand(3, 2)]
    [rank] = fake_ranks(1, torch.ones(4, 5).t(), torch.ones(()), torch.ones(0, 2), square, *with_gaps)
    values = [torch.randn(p.shape) for p in rank.parameters]
    backward(rank, values=values)
    for index, value in enumerate(values):
        gradient = rank.gradient(index)
        assert_bitwise(gradient, value, f"p{index}")
        assert gradient.stride() == (rank.parameters[index].stride() if index < 4 else value.stride())
        assert index == 2 or rank.is_in_wire(index)


@pytest.mark.parametrize(("numel", "compression"), [(3, None), (3, "fp16"), (BIG, "fp16")])
def test_what_comes_again_or_is_written_before_the_bucket_leaves_counts(numel: int, compression: str | None) -> None:
    ranks = fake_ranks(2, numel, 1, compression=compression)
    for i, rank in enumerate(ranks):
        rank.give(0, float(i))
        if numel == 3:
            rank.gradient(0).add_(5.0)  # as a hook of another parameter does
        rank.give(0, 10.0)
        rank.give(1, 1.0)
    finish(*ranks)
    expected = 10.5 if numel == BIG else 15.5
    assert ranks[0].gradients() == ranks[1].gradients() == [[expected] * numel, [1.0]]


@pytest.mark.parametrize(
    ("numel", "defers_launch", "when"),
    [
        (2, False, "closed (the all-reduce owns the wire buffer)"),
        (2, True, "closed (all gradients are in the wire buffer)"),
        pytest.param(BIG, True, "packed", marks=pytest.mark.takes_2_12),
    ],
)
def test_what_comes_again_later_says_what_to_do(numel: int, defers_launch: bool, when: str) -> None:
    [rank] = fake_ranks(1, numel, 1)
    rank.begin(defers_launch=defers_launch)
    rank.give(0, 1.0)
    if numel == 2:
        rank.give(1, 1.0)
    with pytest.raises(GradientError) as caught:
        rank.give(0, 1.0)
    assert (caught.value.bucket, caught.value.parameters) == (0, ("p0",))
    for fact in (f"p0 received another gradient in the same backward after bucket 0 was {when}", "use_reentrant=False"):
        assert fact in str(caught.value)
    rank.abort()
    assert problem(rank) is not None
    if CAN_SWAP:
        assert rank.gradient(0).isnan().all()


@pytest.mark.parametrize("numel", [2, BIG])
@pytest.mark.parametrize("num_given", [0, 1, 2])
def test_a_reduction_that_is_aborted_before_its_bucket_leaves_is_undone(num_given: int, numel: int) -> None:
    ranks = fake_ranks(3, numel, 1)
    third = torch.tensor(1 / 3)
    backward(*ranks, values=[3.0, 1.0])
    for rank in ranks:
        rank.zero_grad()
        rank.begin(defers_launch=True)
        for index in range(num_given):
            rank.give(index, third)
        rank.abort()
        for index in range(num_given):
            assert bool((rank.gradient(index) == third).all())
            assert problem(rank) == ("p0", LOCAL.value)
        rank.zero_grad()
        assert problem(rank) is None
    backward(*ranks, values=[6.0, 2.0])
    for rank in ranks:
        torch.testing.assert_close(rank.gradient(0), torch.full((numel,), 6.0))


@pytest.mark.parametrize("numel", [2, BIG])
def test_a_tensor_that_the_script_has_put_into_grad_gets_the_result(numel: int) -> None:
    ranks = fake_ranks(3, numel, 1)
    own = [torch.zeros(numel) for _ in ranks]
    for step in (1, 2):
        for i, (rank, mine) in enumerate(zip(ranks, own, strict=True)):
            rank.parameters[0].grad = mine
            if i:  # rank 0 has no new gradient
                rank.give(0, 3.0 * i)
        backward(*ranks, values=[None, 1.0])
        assert all(rank.parameters[0].grad is mine for rank, mine in zip(ranks, own, strict=True))
        assert [mine.tolist() for mine in own] == [[3.0 * step] * numel] * 3


@pytest.mark.parametrize("conjugate", [False, True])
@pytest.mark.parametrize("compression", [None, "fp16"])
def test_complex_gradients_travel_as_real_numbers(compression: str | None, conjugate: bool) -> None:
    ranks = fake_ranks(2, torch.zeros(2, 3, dtype=torch.complex64).t(), torch.zeros(2), compression=compression)
    numbers = torch.arange(1.0, 7.0).reshape(3, 2)  # no zero, whose sign would count
    for i, rank in enumerate(ranks):
        value = torch.complex(numbers * (2 * i + 2), -numbers)
        rank.parameters[0].grad = value.conj() if conjugate else value
        rank.arrive(0)
        rank.give(1, 1.0)
    finish(*ranks)
    for rank in ranks:
        expected = torch.complex(numbers * 3, numbers if conjugate else -numbers)
        assert_bitwise(rank.gradient(0).resolve_conj(), expected)
        assert rank.gradient(1).tolist() == [1.0, 1.0]


@pytest.mark.parametrize("compression", [None, "bf16"])
@pytest.mark.parametrize("numel", [2, BIG])
def test_gradients_that_ranks_do_not_have(numel: int, compression: str | None) -> None:
    """They count as zero, and older results count where another rank adds to them. What nobody adds to stays.

    One third is not what it was after another trip over a 16-bit wire, or times 3 ranks and a third.
    """
    ranks = fake_ranks(3, numel, 1, compression=compression)
    for expected in (2.0, 4.0):
        ranks[1].give(0, 6.0)
        backward(*ranks, values=[None, 1.0])
        for rank in ranks:
            torch.testing.assert_close(rank.gradient(0), torch.full((numel,), expected))
            assert rank.ledger.status == [REDUCED] * 2
            assert problem(rank) is None
    third = torch.tensor(1 / 3)
    for rank in ranks:
        rank.gradient(0).copy_(third)  # clipped, say: alike on all ranks
    for _ in range(2):
        backward(*ranks, values=[None, 1.0])
    for rank in ranks:
        assert_bitwise(rank.gradient(0), third.expand(numel))
        assert problem(rank) is None
        assert rank.is_in_wire(0) is (CAN_SWAP and compression is None)


# Gradients that a script keeps over zero_grad(set_to_none=True)


def _in_other_memory(grad: Tensor) -> Tensor:
    """As older clipping code has it."""
    grad.data = grad.data * 2
    return grad


KEEP: dict[str, Callable[[Tensor], Tensor]] = {
    "the gradient": lambda grad: grad,
    "detached": lambda grad: grad.detach(),
    "data": lambda grad: grad.data,
    "flattened": lambda grad: grad.flatten(),
    "a piece": lambda grad: grad[1:],
    "in other memory": _in_other_memory,
}


@pytest.mark.parametrize("next_value", [5.0, None], ids=["used again", "not used again"])
@pytest.mark.parametrize("keep", KEEP)
@pytest.mark.parametrize("numel", [4, BIG])
@pytest.mark.parametrize("can_swap", [pytest.param(True, marks=pytest.mark.takes_2_12), False], ids=["", "as in 2.11"])
def test_a_kept_gradient_keeps_its_values(
    can_swap: bool, numel: int, keep: str, next_value: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where PyTorch cannot swap the memory of storages, gradients do not live in the wire."""
    monkeypatch.setattr("torchring.gradients.packing.CAN_SWAP", can_swap)
    [rank] = fake_ranks(1, 1, numel)
    backward(rank, values=[1.0, 2.0])
    kept = KEEP[keep](rank.gradient(1))
    values, version = kept.clone(), kept._version
    for i in range(3):
        rank.zero_grad()
        backward(rank, values=[3.0 + i, next_value])
        assert rank.gradient(0).tolist() == [3.0 + i]
        assert rank.is_in_wire(0) is can_swap
        if next_value is not None:
            assert bool((rank.gradient(1) == 5.0).all())
            assert rank.is_in_wire(1) is can_swap
        assert_bitwise(kept, values)
    assert kept._version == version  # so what autograd has saved of it is still good
    assert problem(rank) is None


def test_what_nobody_keeps_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    [rank] = fake_ranks(1, 4, BIG, 0)
    monkeypatch.setattr("torchring.gradients.places.move_out", lambda *_: pytest.fail("nobody has it"))
    for _ in range(3):
        for values in ([1.0, 2.0, 0.0], [None, 2.0, None], [], [1.0]):
            if values[1:]:
                rank.zero_grad()
            backward(rank, values=values)


@pytest.mark.takes_2_12
def test_an_array_of_a_kept_gradient_outlives_the_bucket() -> None:
    """An array cannot be moved to the copy. The buffer that the array points to must stay."""
    [rank] = fake_ranks(1, 4)
    backward(rank, values=[1.0])
    array, buffer = rank.gradient(0).numpy(), weakref.ref(wire_of(rank))
    rank.zero_grad()
    backward(rank, values=[2.0])
    rank.zero_grad()
    rank.launcher.close()
    del rank
    assert buffer() is not None
    assert array.tolist() == [2.0] * 4
    del array
    assert buffer() is None


def test_a_gradient_may_be_detached_in_place_and_is_saved_alone() -> None:
    """`p.grad.detach_(); p.grad.zero_()` is how PyTorch zeroed gradients once."""
    [rank] = fake_ranks(1, 4, 1000)
    backward(rank, values=[1.0, 2.0])
    gradient = rank.gradient(0)
    assert gradient.detach_().zero_() is gradient
    assert gradient.untyped_storage().nbytes() == 4 * 4
    assert rank.gradient(1).tolist() == [2.0] * 1000


# Wrong use


@pytest.mark.parametrize(("numel", "compression"), [(4, None), (BIG, None), (4, "fp16")])
def test_a_sparse_gradient_says_what_to_do(numel: int, compression: str | None) -> None:
    [rank] = fake_ranks(1, numel, 1, compression=compression)
    rank.parameters[0].grad = torch.sparse_coo_tensor([[1]], [1.0], (numel,), check_invariants=True)
    with pytest.raises(GradientError, match=r"p0 has a sparse gradient\. torchring knows .* Pass the model") as caught:
        [rank.arrive(0), rank.give(1, 1.0)]
    assert caught.value.parameters == ("p0",)
    assert "sparse=False" in str(caught.value)


def _take(rank: FakeRank) -> None:
    rank.parameters[0].grad = None


def _replace(rank: FakeRank) -> None:
    rank.parameters[0].grad = torch.ones_like(rank.parameters[0])


def _alias(rank: FakeRank) -> None:
    """Lies at the same address; still it is not the tensor that was handed out."""
    rank.parameters[0].grad = rank.gradient(0).data


def _write(rank: FakeRank) -> None:
    rank.gradient(0).mul_(2.0)


@pytest.mark.parametrize(
    ("compression", "when", "act"),
    [
        (None, "arrived", _take),
        *(pytest.param(None, "away", act, marks=pytest.mark.takes_2_12) for act in (_take, _replace, _alias, _write)),
        pytest.param(None, "back", _write, marks=pytest.mark.takes_2_12),
        ("fp16", "away", _take),
        ("fp16", "away", _write),  # its result would overwrite what was written
        ("fp16", "filled in", _write),  # a gradient of no_sync()
    ],
)
@pytest.mark.parametrize("numel", [4, BIG])
def test_a_gradient_that_is_changed_amid_a_reduction_is_named_and_not_trained_on(
    numel: int, compression: str | None, when: str, act: Callable[[FakeRank], None]
) -> None:
    [rank] = fake_ranks(1, numel, 1, compression=compression)
    if when == "filled in":
        rank.parameters[0].grad = torch.ones(numel)
        rank.ledger.mark_local(0)
    else:
        rank.give(0, 1.0)

    def reduction() -> None:
        if when == "arrived":
            act(rank)
        rank.give(1, 1.0)
        rank.fill()
        if when in ("away", "filled in"):
            act(rank)
        rank.launcher.wait()
        if when == "back":
            act(rank)
        rank.close()

    with pytest.raises(GradientError, match=r"the gradient of p0 was (taken|changed|written to while) ") as caught:
        reduction()
    assert (caught.value.bucket, caught.value.parameters) == (0, ("p0",))
    assert problem(rank) is not None
    if act is _write:
        assert "registered before torchring.wrap" in str(caught.value)
        assert compression or "was written to while it was being red" in str(caught.value)


def test_an_error_that_is_not_about_a_parameter_comes_out_as_it_is() -> None:
    [rank] = fake_ranks(1, 2)
    with (
        mock.patch.object(Packing, "pack", side_effect=RuntimeError("out of memory")),
        pytest.raises(RuntimeError, match=r"^out of memory$"),
    ):
        rank.give(0, 1.0)


@pytest.mark.parametrize("compression", [None, "fp16"])
@pytest.mark.parametrize(
    ("numel", "how"), [(2, "is added to"), (BIG, "is added to"), (2, "is added to in no_sync"), (2, "is written to")]
)
def test_adding_to_a_sum_is_refused(numel: int, how: str, compression: str | None) -> None:
    [rank] = fake_ranks(1, numel, 1, is_sum=True, compression=compression)
    backward(rank, values=[1.0, 1.0])
    rank.ledger.mark_written()

    def add() -> None:
        if how == "is added to":
            rank.give(0, 1.0)
            rank.give(1, 1.0)
        elif how == "is added to in no_sync":
            rank.ledger.mark_local(0)
        else:
            rank.gradient(0).mul_(2.0)
            rank.ledger.mark_written()

    match = "which was summed over ranks before" if "added" in how else "written to after it was summed over ranks"
    with pytest.raises(GradientError, match=match) as caught:
        add()
    assert caught.value.parameters == ("p0",)
    assert "zero_grad()" in str(caught.value)
    rank.zero_grad()
    rank.ledger.mark_written()
    for _ in range(2):  # what is local may grow
        rank.ledger.mark_local(0)


# What is known about a gradient


@pytest.mark.parametrize("after", ["a reduction", "zeroing"])
@pytest.mark.parametrize("compression", [None, "fp16"])
def test_gradients_that_were_written_to_are_local_again(compression: str | None, after: str) -> None:
    """Those that share a wire share its version, so all of it counts as written to; it is the same on all ranks."""
    ranks = fake_ranks(2, 2, 2, compression=compression)
    backward(*ranks, values=[4.0, 8.0])
    if after == "zeroing":
        for rank in ranks:
            torch._foreach_zero_([rank.gradient(0), rank.gradient(1)])
            rank.ledger.mark_zeroed()
            rank.ledger.mark_written()
            assert rank.ledger.status == [ZEROED] * 2
    ranks[1].gradient(0).add_(torch.tensor([2.0, 4.0]))
    for rank in ranks:
        rank.ledger.mark_written()
    assert [problem(rank) for rank in ranks] == [None, ("p0", LOCAL.value)]
    finish(*ranks)
    expected = [[5.0, 6.0], [8.0, 8.0]] if after == "a reduction" else [[1.0, 2.0], [0.0, 0.0]]
    for rank in ranks:
        assert rank.gradients() == expected
        rank.ledger.mark_written()
        assert problem(rank) is None


def test_a_slice_that_was_written_to_counts_though_a_reduction_has_passed_it_by() -> None:
    """Slices of one tensor share a version. It is looked at in reductions that write to a slice, and in no others."""
    [rank] = fake_ranks(1, 2, 1, compression="fp16")
    rank.parameters[0].grad, rank.parameters[1].grad = torch.zeros(3).split([2, 1])
    backward(rank, values=[1.0, 1.0])
    rank.ledger.mark_written()
    assert problem(rank) is None
    rank.gradient(0).add_(1.0)
    rank.parameters[1].grad = None
    backward(rank, values=[None, 1.0])
    rank.ledger.mark_written()
    assert problem(rank) == ("p0", LOCAL.value)


@pytest.mark.parametrize("compression", [None, "fp16"])
@pytest.mark.parametrize("status", GradientStatus)
def test_what_is_known_by_status_and_by_identity(status: GradientStatus, compression: str | None) -> None:
    """Not by address: the allocator gives the same one to the next gradient of that size."""
    [rank] = fake_ranks(1, 2, 1, compression=compression)
    backward(rank, values=[1.0, 1.0])
    rank.ledger.status[1] = status
    is_known = status in (REDUCED, ZEROED)
    assert problem(rank) == (None if is_known else ("p1", status.value))
    mine = rank.gradient(1)
    rank.parameters[1].grad = mine.data
    assert problem(rank) == ("p1", REPLACED if is_known else status.value)
    rank.parameters[1].grad = None
    assert problem(rank) is None  # the optimizer skips it


def test_a_gradient_from_before_the_first_reduction_is_unknown_and_the_first_in_the_plan_is_named() -> None:
    [rank] = fake_ranks(1, 1, 1, 1, order=[2, 0, 1])
    assert problem(rank) is None
    for index in (0, 1):
        rank.parameters[index].grad = torch.ones(1)
    assert problem(rank) == ("p0", GradientStatus.UNKNOWN.value)


def test_known_weakly() -> None:
    """zero_grad() frees the memory of a gradient that does not live in the wire; nothing here holds on to it."""
    [rank] = fake_ranks(1, 2, compression="fp16")
    backward(rank, values=[1.0])
    gone = weakref.ref(rank.gradient(0))
    assert gone() is not None
    rank.zero_grad()
    assert gone() is None
    rank.parameters[0].grad = torch.ones(2)
    rank.ledger.mark_written()
    assert problem(rank) == ("p0", REPLACED)


def test_what_is_zeroed_in_place_stays_so_where_nobody_uses_it() -> None:
    [rank] = fake_ranks(1, 2, 1, 1)
    rank.parameters[1].grad = torch.zeros(1)
    rank.ledger.mark_zeroed()
    backward(rank, values=[1.0, None, 1.0])
    assert rank.ledger.status == [REDUCED, ZEROED, REDUCED]
    assert problem(rank) is None
    rank.parameters[1].grad = torch.zeros(1)
    assert problem(rank) == ("p1", REPLACED)


# Another plan


@pytest.mark.parametrize("compression", [None, "fp16"])
def test_another_plan_leaves_known_what_is_known(compression: str | None) -> None:
    [rank] = fake_ranks(1, 2, 3, compression=compression)
    backward(rank, values=[[1.0, 2.0], [3.0, 4.0, 5.0]])
    rank.ledger.status[1] = ZEROED
    rank.lay_out([1, 0], compression=compression)
    assert rank.ledger.status == [ZEROED, REDUCED]
    assert problem(rank) is None
    mine = rank.gradient(0)
    for another in (torch.ones(2), mine.data):
        rank.parameters[0].grad = another
        assert problem(rank) == ("p0", REPLACED)
    rank.parameters[0].grad = mine
    del mine, another
    backward(rank, values=[1.0, 1.0])
    assert rank.gradients() == [[2.0, 3.0], [4.0, 5.0, 6.0]]
    assert rank.is_in_wire(0) is rank.is_in_wire(1) is (CAN_SWAP and compression is None)
    assert problem(rank) is None
    rank.lay_out([0, 1], compression=compression)
    backward(rank, values=[None, 1.0])  # what nobody uses moves unchanged
    assert rank.gradients() == [[2.0, 3.0], [5.0, 6.0, 7.0]]
    assert problem(rank) is None


@pytest.mark.parametrize("compression", [None, "fp16"])
@pytest.mark.parametrize("is_sum", [False, True])
@pytest.mark.parametrize("reductions", [1, 2, 3])
def test_a_gradient_was_not_written_to_by_another_plan(reductions: int, is_sum: bool, compression: str | None) -> None:
    """It lies in the old wire, and is compared with what was true there."""
    [rank] = fake_ranks(1, 2, 3, compression=compression, is_sum=is_sum)
    for _ in range(reductions):
        rank.zero_grad()
        backward(rank, values=[1.0, 1.0])
    rank.lay_out([1, 0], compression=compression)
    rank.ledger.mark_written()
    assert rank.ledger.status == [REDUCED] * 2
    rank.gradient(1).mul_(2.0)
    if is_sum:
        with pytest.raises(GradientError, match="was written to after it was summed"):
            rank.ledger.mark_written()
    else:
        rank.ledger.mark_written()
        assert problem(rank) is not None


# On a device, whose streams are late


@pytest.fixture
def accelerator() -> Iterator[FakeAccelerator]:
    with FakeAccelerator().installed() as accelerator:
        yield accelerator


def on_device(accelerator: FakeAccelerator, streams: set[object], *parameters: int, **options: Any) -> FakeRank:
    stream = accelerator.open_stream()
    all_reduce: Any = SimpleNamespace(accelerator=accelerator, stream=stream, hold_for_earlier=lambda: None)

    def open_packing(scale: float, plan: Any, wire: Tensor, num_ranks: int, _: object) -> Packing:
        found = torch.full((2,), NOT_FOUND, dtype=torch.int32)
        return device_packing.DevicePacking(scale, plan, wire, found, num_ranks, all_reduce, streams)

    return fake_ranks(1, *parameters, open_packing=open_packing, **options)[0]


def test_on_a_device_all_streams_are_weighed_by_launches_that_are_prepared_once(accelerator: FakeAccelerator) -> None:
    """First in memory of their own, and then in the wire buffer."""
    streams = set[object]()
    rank = on_device(accelerator, streams, 2, 2)
    with mock.patch.object(device_packing, "prepare_pack", wraps=device_packing.prepare_pack) as prepare:
        for weight, times in ((0.5, 1), (0.5, 1), (1.0, 2), (2.0, 3)):
            rank.begin(defers_launch=True, weight=weight)
            with accelerator.on_stream("another"):
                rank.give(0, 3.0)
                streams.add("another")  # as the hook does
            rank.give(1, 5.0)
            accelerator.streams[-1].run(lambda: wire_of(rank).mul_(10.0))
            accelerator.synchronize()
            finish(rank)
            accelerator.synchronize()
            assert rank.gradients() == [[30.0 * weight] * 2, [50.0 * weight] * 2]
            assert prepare.call_count == times
            torch._foreach_zero_([rank.gradient(0), rank.gradient(1)])
            rank.ledger.mark_zeroed()
    assert accelerator.races == []


def test_on_a_device_a_result_replaces_a_gradient_with_a_pending_negation(accelerator: FakeAccelerator) -> None:
    """Kernels copy bytes, and such a gradient's bytes are those of its opposite."""
    rank = on_device(accelerator, set(), 3, compression="fp16")
    rank.parameters[0].grad = own = torch.complex(torch.zeros(3), torch.arange(3.0)).conj().imag
    assert own.is_neg()
    rank.begin(defers_launch=True)
    rank.arrive(0)
    accelerator.synchronize()
    wire_of(rank).mul_(3.0)
    finish(rank)
    accelerator.synchronize()
    assert rank.parameters[0].grad is own
    assert own.tolist() == [0.0, -3.0, -6.0]


def test_slot_at() -> None:
    [rank] = fake_ranks(1, 17, 0, torch.ones(()), 2)
    plan = rank.launcher.buckets[0].plan
    assert [slot.offset for slot in plan.slots] == [0, 32, 32, 48]
    found = {element: slot_at(plan, element) for element in (0, 16, 31, 32, 47, 48, 49)}
    assert found == {0: 0, 16: 0, 31: 0, 32: 2, 47: 2, 48: 3, 49: 3}


def test_is_finite() -> None:
    assert is_finite(torch.full((10,), 3e38))  # their sum is not
    assert is_finite(torch.empty(0))
    assert is_finite(torch.full((10,), 60_000.0, dtype=torch.float16))
    assert not is_finite(torch.tensor([1.0, math.nan]))
    assert not is_finite(torch.tensor([math.inf, -math.inf, 1.0], dtype=torch.float64))
