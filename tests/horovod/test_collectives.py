"""Horovod's collectives: results against plain arithmetic, names, errors on all ranks, joins, process sets."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

import torchring
import torchring.horovod as hvd
from tests.support.adasum import assert_adasum
from tests.support.checks import assert_bitwise, digest
from tests.support.grids import grid
from tests.support.harness import ranks, run_pooled, run_ranks, wait_until
from torchring.horovod import engine as engine_module
from torchring.memory import host as host_module

in_worlds = grid(
    "world_size, shares_memory", [1, 2, 3], [True, False], keep=lambda world_size, shares: shares or world_size == 2
)


def run(test: Callable[..., Any], size: int, arguments: dict[str, Any]) -> list[Any]:
    """The test on every rank, between hvd.init() and hvd.shutdown()."""
    return run_pooled(_in_world, size, test, arguments)


def _in_world(rank: int, size: int, test: Any, arguments: dict[str, Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if not arguments.get("shares_memory", True):
            patch.setattr(host_module, "_host_identity", lambda: f"host {rank}")
        patch.setenv("HOROVOD_DYNAMIC_PROCESS_SETS", "1")
        hvd.init()
        test(rank, size, arguments)
        hvd.barrier()
        hvd.shutdown()


def mine(rank: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Small integers that differ between ranks; 7 or 8 of a kind, so that averages have a fraction."""
    count = torch.Size(shape).numel()
    return ((torch.arange(count) * 7 + 3 * rank) % 5 + 1).reshape(shape).to(dtype)


# ---- values


def _reductions(rank: int, size: int) -> None:
    combine = {
        hvd.Sum: lambda parts: parts.sum(0),
        hvd.Min: lambda parts: parts.amin(0),
        hvd.Max: lambda parts: parts.amax(0),
        hvd.Product: lambda parts: parts.prod(0),
    }
    for dtype in (torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64):
        for shape in ((), (0,), (3, 5), (9000,)):  # the last does not travel with its request
            parts = torch.stack([mine(r, torch.float64, *shape) for r in range(size)])
            for op, expected in combine.items():
                tensor = mine(rank, dtype, *shape)
                before = tensor.clone()
                assert_bitwise(hvd.allreduce(tensor, op=op), expected(parts).to(dtype), f"{op} {dtype} {shape}")
                assert_bitwise(tensor, before)
                assert hvd.allreduce_(tensor, op=op) is tensor
                assert_bitwise(tensor, expected(parts).to(dtype))
            average = hvd.allreduce(mine(rank, dtype, *shape))
            if not dtype.is_floating_point:
                assert_bitwise(average, (parts.sum(0) / size).trunc().to(dtype))  # towards zero, as in Horovod
            elif size != 3:
                assert_bitwise(average, parts.mean(0).to(dtype))


def _scaling(rank: int, size: int) -> None:
    """Scale, reduce, scale: integers in fp64, cut off towards zero; 16-bit values in fp32."""
    integers = torch.tensor([3, -3, 7]) * (rank + 1)
    expected = sum((torch.tensor([3.0, -3.0, 7.0]) * (r + 1) * 0.5).trunc() for r in range(size))
    assert_bitwise(hvd.allreduce(integers, op=hvd.Sum, prescale_factor=0.5), torch.as_tensor(expected).long())
    total = torch.tensor([3.0, -3.0, 7.0], dtype=torch.float64) * sum(range(size + 1))
    after = hvd.allreduce(integers, op=hvd.Sum, postscale_factor=0.3)
    assert_bitwise(after, (total * 0.3).trunc().long())
    halves = torch.full((3,), 40000.0, dtype=torch.float16)  # the sum of two overflows
    assert hvd.allreduce(halves, op=hvd.Sum, prescale_factor=1 / 64).tolist() == [625.0 * size] * 3
    assert hvd.allreduce(torch.full((1,), -7 - rank), op=hvd.Average).item() == int(
        (-7 * size - sum(range(size))) / size
    )


def _moves(rank: int, size: int) -> None:
    for dtype in (torch.uint8, torch.bool, torch.int16, torch.bfloat16, torch.complex64):
        gathered = hvd.allgather(torch.full((rank, 2), rank + 1).to(dtype))
        rows = [torch.full((r, 2), r + 1).to(dtype) for r in range(size)]
        assert_bitwise(gathered, torch.cat(rows))
        tensor = torch.tensor([rank + 1, 0]).to(dtype)
        root = size - 1
        assert_bitwise(hvd.broadcast(tensor, root), torch.tensor([root + 1, 0]).to(dtype))
        assert_bitwise(tensor, torch.tensor([rank + 1, 0]).to(dtype))
        assert hvd.broadcast_(tensor, root) is tensor
        assert_bitwise(tensor, torch.tensor([root + 1, 0]).to(dtype))
    equal = hvd.alltoall(torch.arange(2 * size) + 100 * rank)
    assert equal.tolist() == [100 * r + 2 * rank + i for r in range(size) for i in (0, 1)]
    splits = torch.tensor([r + 1 for r in range(size)], dtype=torch.int32)  # and one row is left over
    received, counts = hvd.alltoall(torch.full((int(splits.sum()) + 1, 2), float(rank)), splits)
    assert counts.dtype == torch.int32
    assert counts.tolist() == [rank + 1] * size
    assert_bitwise(received, torch.arange(float(size)).repeat_interleave(rank + 1)[:, None].expand(-1, 2).contiguous())
    received, counts = hvd.alltoall(torch.ones(size * (rank + 1), 0), [rank + 1] * size)  # rows without elements
    assert received.shape == (size * (size + 1) // 2, 0)
    assert counts.tolist() == [r + 1 for r in range(size)]
    assert hvd.reducescatter(torch.ones(size, 0)).shape == (1, 0)
    source = torch.arange(float(2 * size + 1)) * (rank + 1)  # one row more than can be dealt out evenly
    total = torch.arange(float(2 * size + 1)) * sum(range(size + 1))
    assert_bitwise(hvd.reducescatter(source, op=hvd.Sum), total.tensor_split(size)[rank])
    assert_bitwise(hvd.reducescatter(source.long()), (total / size).trunc().long().tensor_split(size)[rank])
    scaled = hvd.reducescatter(source, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
    assert_bitwise(scaled, 2 * total.tensor_split(size)[rank])


def _groups_and_handles(rank: int, size: int) -> None:
    group = [torch.full((3,), float(rank)), torch.full((2, 2), rank), torch.full((20000,), float(rank))]
    total = sum(range(size))
    reduced = hvd.grouped_allreduce(group, op=hvd.Sum)
    assert [tensor.flatten()[0].item() for tensor in reduced] == [total] * 3
    assert [tensor.dtype for tensor in reduced] == [torch.float32, torch.int64, torch.float32]
    handles = [
        hvd.grouped_allreduce_async(group, op=hvd.Max, name="grouped"),
        hvd.allgather_async(group[0], name="gathered"),
        hvd.broadcast_async(group[1], 0),
        hvd.alltoall_async(torch.arange(size)),
        hvd.reducescatter_async(torch.ones(size), op=hvd.Sum),
        hvd.grouped_allgather_async(group[:2]),
        hvd.grouped_reducescatter_async([torch.ones(size), torch.ones(2 * size)], op=hvd.Sum),
        hvd.allreduce_async_(group[2], op=hvd.Sum),
    ]
    for handle in handles:
        wait_until(lambda h=handle: hvd.poll(h), "the engine's thread carries it out")
    results = [hvd.synchronize(handle) for handle in reversed(handles)][::-1]
    assert isinstance(results[0], tuple)
    assert [tensor.max().item() for tensor in results[0]] == [size - 1] * 3
    assert results[1].tolist() == [float(r) for r in range(size) for _ in range(3)]
    assert results[2].tolist() == [[0, 0], [0, 0]]
    assert results[3][0].tolist() == [rank] * size
    assert results[3][1].tolist() == [1] * size
    assert results[4].tolist() == [size]
    assert [len(tensor) for tensor in results[5]] == [3 * size, 2 * size]
    assert [tensor.tolist() for tensor in results[6]] == [[size], [size, size]]
    assert results[7] is group[2] or results[7].data_ptr() == group[2].data_ptr()
    assert hvd.synchronize(handles[0]) is None  # as in Horovod
    with pytest.raises(ValueError, match="no handle"):
        hvd.poll(handles[0])
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, rank + 1]]), torch.ones(2), (size + 1,))
    summed = hvd.sparse_allreduce_async(sparse, name="sparse", op=hvd.Average)()
    assert summed.to_dense().tolist() == pytest.approx([1.0] + [1 / size] * size)
    objects = hvd.allgather_object({"rank": rank, "text": "x" * 1000 * rank})
    assert [each["rank"] for each in objects] == list(range(size))
    assert hvd.broadcast_object({"from": rank} if rank == size - 1 else None, size - 1) == {"from": size - 1}


def _gradients(rank: int, size: int) -> None:
    """As horovod.torch defines them, which differs from torch.distributed.nn."""

    def grad(function: Callable[[torch.Tensor], torch.Tensor], numel: int = 4) -> list[float]:
        leaf = (torch.arange(float(numel)) + rank).requires_grad_()
        result = function(leaf)
        (result * (rank + 1)).sum().backward()
        assert leaf.grad is not None
        return leaf.grad.tolist()

    total = size * (size + 1) / 2  # of the factors rank + 1
    mean = total / size
    assert grad(lambda t: hvd.allreduce(t, op=hvd.Sum)) == [total] * 4
    assert grad(lambda t: hvd.allreduce(t, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)) == [2 * total] * 4
    assert grad(hvd.allreduce) == pytest.approx([mean] * 4)
    assert grad(lambda t: hvd.grouped_allreduce([t, 2 * t], op=hvd.Sum)[1]) == [2 * total] * 4
    assert grad(lambda t: hvd.allgather(t[: rank + 1])) == pytest.approx([mean] * (rank + 1) + [0.0] * (3 - rank))
    assert grad(lambda t: hvd.grouped_allgather([t, t])[0]) == pytest.approx([mean] * 4)
    assert grad(lambda t: hvd.broadcast(t, 0)) == pytest.approx([mean if rank == 0 else 0.0] * 4)
    sent = grad(lambda t: hvd.alltoall(t, [1] * size)[0], size + 1)
    assert sent == [float(r + 1) for r in range(size)] + [0.0]  # the last row was not sent
    assert grad(lambda t: hvd.alltoall(t), size) == [float(r + 1) for r in range(size)]
    assert grad(lambda t: hvd.reducescatter(t, op=hvd.Sum), size) == [size * (r + 1) for r in range(size)]
    assert grad(hvd.reducescatter, size) == [r + 1 for r in range(size)]
    # Only one rank may need the gradient.
    leaf = torch.ones(2, requires_grad=rank == 0)
    assert hvd.allgather(leaf, name="one").requires_grad is (rank == 0)
    # A gradient of a gradient: of the sum s of all x, and of its cube's derivative 3 s**2.
    x = torch.tensor([1.0], requires_grad=True)
    (first,) = torch.autograd.grad(hvd.allreduce(x, op=hvd.Sum) ** 3, x, create_graph=True)
    assert first.tolist() == [3 * size**3]
    (second,) = torch.autograd.grad(first, x)
    assert second.tolist() == [6 * size**3]
    half = hvd.Compression.fp16
    assert grad(lambda t: hvd.allreduce(t, op=hvd.Sum, compression=half)) == [total] * 4


@in_worlds
@ranks(start=run)
def test_results_and_gradients(rank: int, world_size: int, shares_memory: bool) -> None:
    for check in (_reductions, _scaling, _moves, _groups_and_handles, _gradients):
        check(rank, world_size)


@ranks(2, start=run)
def test_adasum_of_ranks(rank: int, world_size: int) -> None:
    vectors = [torch.tensor([[1.0, 2.0], [0.5, -1.0]]) * (r + 1) + r for r in range(world_size)]
    for dtype in (torch.float16, torch.float64):
        for repeat in (1, 5000):
            parts = [vector.to(dtype).repeat(repeat, 1) for vector in vectors]
            assert_adasum(hvd.allreduce(parts[rank], op=hvd.Adasum), parts)
    first = hvd.add_process_set([0])
    if rank == 0:
        with pytest.raises(NotImplementedError, match="all ranks"):
            hvd.allreduce(torch.ones(2), op=hvd.Adasum, process_set=first)


# ---- names


@pytest.mark.parametrize("shares_memory", [True, False], ids=["memory", "gloo"])
@ranks(2, start=run)
def test_operations_meet_by_name_in_any_order(rank: int, world_size: int, shares_memory: bool) -> None:
    size = world_size
    names = [f"tensor{i}" for i in range(20)]
    order = names if rank % 2 == 0 else names[::-1]
    handles = {
        name: hvd.allreduce_async(torch.full((7,), float(names.index(name))), name=name, op=hvd.Sum) for name in order
    }
    hvd.barrier()  # passes, whatever is under way
    for name in sorted(handles, reverse=rank % 2 == 1):
        assert hvd.synchronize(handles[name]).tolist() == [size * names.index(name)] * 7
    # A barrier passes while an operation waits for ranks that have not called it.
    if rank == 0:
        early = hvd.allreduce_async(torch.ones(2), name="late", op=hvd.Sum)
        with pytest.raises(ValueError, match="same name"):
            hvd.allreduce_async(torch.ones(2), name="late", op=hvd.Sum)
        assert not hvd.poll(early)
    hvd.barrier()
    if rank != 0:
        early = hvd.allreduce_async(torch.ones(2), name="late", op=hvd.Sum)
    assert hvd.synchronize(early).tolist() == [size, size]
    # Two threads of one rank.
    results: dict[str, float] = {}

    def reduce(name: str) -> None:
        for _ in range(20):
            results[name] = hvd.allreduce(torch.full((1,), float(len(name))), name=name, op=hvd.Sum).item()

    threads = [threading.Thread(target=reduce, args=(name,)) for name in (("a", "bb") if rank else ("bb", "a"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == {"a": size, "bb": 2 * size}


# ---- what is wrong


@ranks(2, start=run)
def test_what_ranks_disagree_about_is_named_on_all_of_them(rank: int, world_size: int) -> None:
    odd = rank == world_size - 1
    calls = [
        ("op", lambda: hvd.allreduce(torch.ones(2), name="x", op=hvd.Min if odd else hvd.Max)),
        ("prescale_factor", lambda: hvd.allreduce(torch.ones(2), name="x", prescale_factor=2.0 if odd else 1.0)),
        ("root rank", lambda: hvd.broadcast(torch.ones(2), int(odd), name="x")),
        ("shape", lambda: hvd.alltoall(torch.ones(world_size, 3 if odd else 2), name="x")),
        ("number of tensors", lambda: hvd.grouped_allreduce([torch.ones(2)] * (2 if odd else 1), name="x")),
    ]
    for difference, call in calls:
        with pytest.raises(hvd.HorovodInternalError) as caught:
            call()
        assert f"ranks disagree about the {difference} of" in str(caught.value)
        assert "on rank 0" in str(caught.value)
        assert "on rank 1" in str(caught.value)
        assert len(set(hvd.allgather_object(str(caught.value)))) == 1  # works as before


@ranks(2, start=run)
def test_wrong_arguments_are_refused_before_anything_is_sent(world_size: int) -> None:
    one = torch.ones(1)
    wrong: list[tuple[type[Exception], Callable[[], Any]]] = [
        (ValueError, lambda: hvd.allreduce(torch.ones(1), average=True, op=hvd.Sum)),
        (ValueError, lambda: hvd.allreduce(torch.ones(1), op=17)),
        (ValueError, lambda: hvd.allreduce(torch.ones(1, dtype=torch.bool), op=hvd.Max)),
        (ValueError, lambda: hvd.allgather(torch.tensor(1))),
        (ValueError, lambda: hvd.broadcast(torch.ones(1), world_size)),
        (ValueError, lambda: hvd.alltoall(torch.ones(world_size + 1))),
        (ValueError, lambda: hvd.alltoall(torch.ones(world_size), torch.ones(world_size))),
        (ValueError, lambda: hvd.alltoall(torch.ones(world_size), [world_size + 1] * world_size)),
        (ValueError, lambda: hvd.alltoall(torch.ones(world_size), [1] * (world_size + 1))),
        (ValueError, lambda: hvd.reducescatter(torch.tensor(1.0))),
        (hvd.HorovodInternalError, lambda: hvd.reducescatter(torch.ones(world_size), op=hvd.Max)),
        (ValueError, lambda: hvd.allreduce_(torch.ones(1).expand(3))),
        (ValueError, lambda: hvd.grouped_allreduce_([one, torch.ones(2), one])),
        (TypeError, lambda: hvd.allreduce([1.0])),  # type: ignore[arg-type]
        (ValueError, lambda: hvd.allreduce(torch.ones(1), process_set=hvd.ProcessSet([0]))),
        (ValueError, lambda: hvd.ProcessSet(["a"])),
        (ValueError, lambda: hvd.broadcast_parameters(torch.ones(1), 0)),  # type: ignore[arg-type]
        (ValueError, lambda: hvd.init(comm=[0] if world_size > 1 else [0, 1])),
        (ValueError, lambda: hvd.init(process_sets="sometimes")),
        (ValueError, lambda: hvd.start_timeline("/nowhere/x.json")),
    ]
    for kind, call in wrong:
        with pytest.raises(kind):
            call()
        assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == world_size
    with pytest.warns(DeprecationWarning, match="average"):
        assert hvd.allreduce(torch.ones(1), average=False).item() == world_size


def test_before_init() -> None:
    assert not hvd.is_initialized()
    hvd.shutdown()  # nothing to do
    with pytest.raises(ValueError, match="init"):
        hvd.rank()
    with pytest.raises(hvd.HorovodInternalError, match="init"):
        hvd.allreduce(torch.ones(1))
    assert hvd.gloo_built() is True
    assert [hvd.ddl_built(), hvd.ccl_built(), hvd.rocm_built(), hvd.mpi_enabled()] == [False] * 4
    assert isinstance(hvd.nccl_built(), int)


# ---- join


@in_worlds
@ranks(start=run)
def test_joined_ranks_contribute_zeros(rank: int, world_size: int, shares_memory: bool) -> None:
    """Rank r has r + 1 batches."""
    size = world_size
    for step in range(rank + 1):
        alive = size - step
        total = hvd.allreduce(torch.ones(3), op=hvd.Sum, name="total")
        assert total.tolist() == [alive] * 3
        mean = hvd.allreduce(torch.ones(9000), name="mean")  # by all ranks, those that have joined included
        assert_bitwise(mean, torch.full((9000,), alive / size, dtype=torch.float64).float())
        if step == 1:
            with pytest.raises(hvd.HorovodInternalError, match="join"):
                hvd.allgather(torch.ones(1), name="gather")
    left_over = hvd.allreduce_async(torch.ones(2), op=hvd.Sum, name=f"of rank {rank}")  # others have joined without it
    assert hvd.join() == size - 1
    assert hvd.synchronize(left_over).tolist() == [1, 1]
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum, name="next epoch").item() == size
    assert hvd.join(device=0) in range(size)


# ---- process sets


@grid("shares_memory", [True, False], keep=lambda shares_memory: shares_memory)
@ranks(3, start=run)
def test_process_sets(rank: int, world_size: int, shares_memory: bool) -> None:
    size = world_size
    evens, odds = hvd.ProcessSet(range(0, size, 2)), hvd.ProcessSet([1])
    assert evens.process_set_id is None
    assert evens.size() is None
    hvd.init(process_sets=[evens, odds])
    assert [evens.process_set_id, odds.process_set_id] == [1, 2]
    assert (evens.included(), odds.included()) == (rank % 2 == 0, rank == 1)
    here = odds if rank == 1 else evens
    assert here.size() == len(here.ranks)
    assert here.rank() == here.ranks.index(rank)
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum, process_set=here, name="x").item() == here.size()
    assert hvd.allreduce(torch.ones(9000), op=hvd.Sum, process_set=here, name="x")[0].item() == here.size()
    assert hvd.allgather(torch.tensor([rank]), process_set=here, name="g").tolist() == here.ranks
    assert hvd.broadcast(torch.tensor(rank), here.ranks[-1], process_set=here, name="b").item() == here.ranks[-1]
    assert hvd.broadcast_object(rank, here.ranks[0], process_set=here) == here.ranks[0]
    hvd.barrier(process_set=here)
    with pytest.raises(ValueError, match="not in the process set"):
        hvd.allreduce(torch.ones(1), process_set=evens if rank == 1 else odds)
    if rank != 1:
        with pytest.raises(ValueError, match="global rank"):
            hvd.broadcast(torch.ones(1), 1, process_set=evens)
    with pytest.raises(ValueError, match="registered already"):
        hvd.add_process_set([1])
    with pytest.raises(ValueError, match="duplicate"):
        hvd.init(process_sets=[hvd.ProcessSet([1])])
    with pytest.raises(hvd.HorovodInternalError, match="ranks of"):
        hvd.add_process_set([0, 1] if rank == 0 else [1, 2])
    assert hvd.remove_process_set(odds) is True
    assert hvd.remove_process_set(odds) is False
    assert hvd.remove_process_set(hvd.global_process_set) is False
    again = hvd.add_process_set([size - 1])
    assert again.process_set_id == 2  # ids are used again
    under_way = hvd.allreduce_async(torch.ones(1), process_set=here, name="w") if rank == 0 else None
    hvd.barrier()
    hvd.remove_process_set(evens)
    if under_way is not None:
        with pytest.raises(hvd.HorovodInternalError, match="removed"):
            hvd.synchronize(under_way)
    other = hvd.add_process_set([0, 1])
    assert other.process_set_id == 1
    if rank < 2:
        assert hvd.allreduce(torch.ones(1), process_set=other, name="w", op=hvd.Sum).item() == 2
    os.environ.pop("HOROVOD_DYNAMIC_PROCESS_SETS")
    with pytest.raises(ValueError, match="dynamic"):
        hvd.add_process_set([0, 1])


# ---- life and death


@ranks(2)
def test_init_and_shutdown_any_number_of_times_with_settings_that_differ(rank: int, world_size: int) -> None:
    for turn in range(5):
        hvd.init()
        hvd.init()  # changes nothing
        assert hvd.is_initialized()
        assert hvd.global_process_set.ranks == [*range(world_size)]
        assert (hvd.local_rank(), hvd.local_size(), hvd.cross_rank(), hvd.cross_size()) == (rank, world_size, 0, 1)
        assert hvd.allreduce(torch.ones(1), name=f"turn{turn}", op=hvd.Sum).item() == world_size
        assert torchring.all_reduce(torch.ones(1), "sum").item() == world_size  # the same world
        hvd.shutdown()
        assert not hvd.is_initialized()
        assert hvd.global_process_set.ranks == []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOROVOD_FUSION_THRESHOLD", str(rank * 100_000))
        hvd.init()
        handles = [hvd.allreduce_async(torch.ones(9000), op=hvd.Sum, name=f"tensor{i}") for i in range(4)]
        assert [hvd.synchronize(handle)[0].item() for handle in handles] == [world_size] * 4
        hvd.shutdown()


@ranks(2)
def test_one_rank_that_shuts_down_ends_the_collectives_of_all(rank: int) -> None:
    hvd.init()
    hvd.allreduce(torch.ones(1))
    if rank == 1:
        with pytest.raises(hvd.HorovodInternalError, match="rank 0"):
            hvd.allreduce(torch.ones(1), name="alone")
        with pytest.raises(hvd.HorovodInternalError):
            hvd.allreduce(torch.ones(1), name="later")
    hvd.shutdown()


@ranks(2, start=run_ranks, deadline=40.0, expect_exit={1: 7})
def test_a_rank_that_dies_while_others_wait_for_its_call_is_named(rank: int) -> None:
    hvd.init()
    hvd.allreduce(torch.ones(1))
    hvd.allreduce(torch.ones(1), name="before")
    if rank == 1:
        os._exit(7)
    with pytest.raises(hvd.HorovodInternalError, match="rank 1"):  # the other has never called it
        hvd.synchronize(hvd.allreduce_async(torch.ones(1), name="alone"))


_STALL = {"HOROVOD_STALL_CHECK_TIME_SECONDS": "0.2", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "0.4"}


@ranks(2, start=run_ranks, deadline=40.0, env=_STALL)
def test_a_stall_ends_after_the_time_that_was_set(rank: int) -> None:
    hvd.init()
    with pytest.raises(hvd.HorovodInternalError) as caught:
        hvd.allreduce(torch.ones(1), name=f"of rank {rank}")
    text = str(caught.value)
    assert re.search(r"'allreduce.of rank (0|1)' has waited [0-9.]+ s for rank (?!\1)", text), text


@ranks(2, start=run_ranks, deadline=40.0, env={"HOROVOD_CYCLE_TIME": "100"})
def test_a_failure_in_the_middle_ends_all_operations_on_all_ranks(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    hvd.init()
    if rank == 1:
        monkeypatch.setattr(engine_module, "carry_out", mock.Mock(side_effect=MemoryError("no memory")))
    for handle in [hvd.allreduce_async(torch.ones(9000), name="a"), hvd.allgather_async(torch.ones(2), name="b")]:
        with pytest.raises(hvd.HorovodInternalError, match="no memory"):
            hvd.synchronize(handle)


# ---- timeline


@pytest.mark.parametrize("world_size", [1, 2])
@ranks()
def test_timeline(tmp_path: Path, world_size: int, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "timeline.json"
    monkeypatch.setenv("HOROVOD_TIMELINE", str(path))
    monkeypatch.setenv("HOROVOD_TIMELINE_MARK_CYCLES", "1")
    hvd.init()
    if rank == 0:  # asks first
        handle = hvd.allreduce_async(torch.ones(4), name="measured")
    hvd.barrier()
    if rank == 0:
        hvd.synchronize(handle)
        assert json.loads(path.read_text())  # valid while it is written
    else:
        hvd.allreduce(torch.ones(4), name="measured")
    hvd.start_timeline(f"{path}.second")
    hvd.barrier()
    hvd.allgather(torch.ones(2), name="rows")
    hvd.stop_timeline()
    hvd.stop_timeline()
    hvd.shutdown()
    if rank:
        return
    events = json.loads(path.read_text())
    (row,) = [each["pid"] for each in events if each.get("args", {}).get("name") == "allreduce.measured"]
    phases = [(each.get("name"), each["ph"]) for each in events if each.get("pid") == row and each["ph"] in "BEX"]
    asked = [(str(rank), "X") for rank in range(world_size)]
    assert phases == [("NEGOTIATE_ALLREDUCE", "B"), *asked, (None, "E"), ("ALLREDUCE", "B"), (None, "E")]
    assert any(each.get("name") == "CYCLE_START" for each in events)
    times = [each["ts"] for each in events if "ts" in each]
    assert times == sorted(times)
    assert "allgather.rows" not in path.read_text()
    second = (tmp_path / "timeline.json.second").read_text()
    assert "allgather.rows" in second
    assert "CYCLE_START" not in second


@ranks(3, start=run)
def test_the_same_bits_on_all_ranks_and_on_every_way(rank: int) -> None:
    """Values whose sum depends on the order: from the requests, by themselves, and fused."""
    values = torch.randn(3000, generator=torch.Generator().manual_seed(rank))
    handles = [hvd.allreduce_async(part.contiguous(), name=f"part{i}") for i, part in enumerate(values.split(1000))]
    results = [
        hvd.allreduce(values, name="small"),
        hvd.allreduce(values.repeat(3), name="large")[:3000],
        torch.cat([hvd.synchronize(handle) for handle in handles]),
    ]
    assert len({each for of_rank in hvd.allgather_object([*map(digest, results)]) for each in of_rank}) == 1
