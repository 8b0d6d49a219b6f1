"""Horovod's collectives: results against plain arithmetic, names, errors on all ranks, joins, process sets."""

import functools
import itertools
import json
import os
import random
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

import torchring
import torchring.horovod as hvd
from tests.support.adasum import assert_adasum
from tests.support.checks import assert_bitwise, digest
from tests.support.grids import grid
from tests.support.harness import ranks, run_pooled, run_ranks, wait_until
from tests.support.training import attempt
from torchring.horovod import engine as engine_module
from torchring.horovod.negotiation import BARRIER, JOIN, Negotiation, Request
from torchring.memory import host as host_module

in_worlds = grid(
    "world_size, shares_memory", [1, 2, 3], [True, False], keep=lambda world_size, shares: shares or world_size == 2
)

exactly = functools.partial(torch.testing.assert_close, rtol=0.0, atol=0.0)


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


def _reductions(rank: int, size: int) -> None:
    dtypes = (torch.uint8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64)
    for dtype, shape in itertools.product(dtypes, ((), (0,), (3, 5), (9000,))):  # 9000 do not travel with their request
        parts = torch.stack([mine(r, torch.float64, *shape) for r in range(size)])
        expected = {hvd.Sum: parts.sum(0), hvd.Min: parts.amin(0), hvd.Max: parts.amax(0), hvd.Product: parts.prod(0)}
        if not dtype.is_floating_point:
            expected[hvd.Average] = (parts.sum(0) / size).trunc()  # towards zero, as in Horovod
        elif size != 3:
            expected[hvd.Average] = parts.mean(0)
        tensor = mine(rank, dtype, *shape)
        for op, right in expected.items():
            assert_bitwise(hvd.allreduce(tensor, op=op), right.to(dtype), f"{op} {dtype} {shape}")
        assert_bitwise(tensor, mine(rank, dtype, *shape))
        assert hvd.allreduce_(tensor, op=hvd.Sum) is tensor
        assert_bitwise(tensor, expected[hvd.Sum].to(dtype))


def cut(values: Tensor) -> Tensor:
    return values.trunc().long()


def _results(rank: int, size: int) -> None:
    number, pair, total, last = torch.arange(size), torch.tensor([0, 1]), sum(range(size + 1)), size - 1
    integers, halves = torch.tensor([3, -3, 7]), torch.full((3,), 40000.0, dtype=torch.float16)
    scaled = torch.stack([cut(integers * 0.5 * (r + 1)) for r in range(size)])
    rows = torch.arange(2.0 * size + 1)  # one more than can be dealt out evenly
    deal = functools.partial(torch.tensor_split, rows * total, size)
    sizes = [r + 1 for r in range(size)]
    splits = torch.tensor(sizes, dtype=torch.int32)
    sent = torch.full((sum(sizes) + 1, 2), float(rank))  # one row is left over
    counts = torch.full((size,), rank + 1, dtype=torch.int32)
    received = number.repeat_interleave(rank + 1)[:, None].expand(-1, 2).float()
    for call, (result, expected) in enumerate([
        # Integers are scaled in fp64 and cut off towards zero. 16-bit values in fp32: the sum of two `halves` overflows
        (hvd.allreduce(integers * (rank + 1), op=hvd.Sum, prescale_factor=0.5), scaled.sum(0)),
        (hvd.allreduce(integers * (rank + 1), op=hvd.Sum, postscale_factor=0.3), cut(integers * total * 0.3)),
        (hvd.allreduce(halves, op=hvd.Sum, prescale_factor=1 / 64), torch.full_like(halves, 625.0 * size)),
        (hvd.allreduce(torch.tensor(-7 - rank)), torch.tensor(int((-6 * size - total) / size))),
        (hvd.alltoall(torch.arange(2 * size) + 100 * rank), (number[:, None] * 100 + pair + 2 * rank).flatten()),
        (hvd.alltoall(sent, splits), (received, counts)),
        (hvd.alltoall(torch.ones(size * (rank + 1), 0), [rank + 1] * size), (torch.ones(total, 0), splits)),
        (hvd.reducescatter(torch.ones(size, 0)), torch.ones(1, 0)),
        (hvd.reducescatter(rows * (rank + 1), op=hvd.Sum), deal()[rank]),
        (hvd.reducescatter((rows * (rank + 1)).long()), cut(rows * total / size).tensor_split(size)[rank]),
        (hvd.reducescatter(rows * (rank + 1), op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0), 2 * deal()[rank]),
    ]):  # fmt: skip
        exactly(result, expected, msg=lambda text, call=call: f"call {call}: {text}")
    for dtype in (torch.uint8, torch.bool, torch.int16, torch.bfloat16, torch.complex64):
        gathered = hvd.allgather(torch.full((rank, 2), rank + 1).to(dtype))
        exactly(gathered, torch.cat([torch.full((r, 2), r + 1) for r in range(size)]).to(dtype))
        tensor = torch.tensor([rank + 1, 0]).to(dtype)
        exactly(hvd.broadcast(tensor, last), torch.tensor([size, 0]).to(dtype))
        exactly(tensor, torch.tensor([rank + 1, 0]).to(dtype))
        assert hvd.broadcast_(tensor, last) is tensor
        exactly(tensor, torch.tensor([size, 0]).to(dtype))
    sparse = torch.sparse_coo_tensor(torch.tensor([[0, rank + 1]]), torch.ones(2), (size + 1,))
    summed = hvd.sparse_allreduce_async(sparse, name="sparse", op=hvd.Average)()
    torch.testing.assert_close(summed.to_dense(), torch.tensor([1.0] + [1 / size] * size))
    assert hvd.allgather_object({"text": "x" * 1000 * rank}) == [{"text": "x" * 1000 * r} for r in range(size)]
    assert hvd.broadcast_object({"from": rank} if rank == last else None, last) == {"from": last}


def _handles(rank: int, size: int) -> None:
    group = [torch.full((3,), float(rank)), torch.full((2, 2), rank), torch.full((20000,), float(rank))]

    def filled(value: int, *tensors: Tensor) -> list[Tensor]:
        return [torch.full_like(tensor, value) for tensor in tensors]

    exactly(hvd.grouped_allreduce(group, op=hvd.Sum), filled(sum(range(size)), *group))
    gathered = [torch.cat([each - rank + r for r in range(size)]) for each in group[:2]]
    started = [
        (hvd.grouped_allreduce_async(group, op=hvd.Max, name="grouped"), filled(size - 1, *group)),
        (hvd.allgather_async(group[0], name="gathered"), gathered[0]),
        (hvd.broadcast_async(group[1], 0), torch.zeros(2, 2, dtype=torch.int64)),
        (hvd.alltoall_async(torch.arange(size)), (torch.full((size,), rank), torch.ones(size, dtype=torch.int32))),
        (hvd.reducescatter_async(torch.ones(size), op=hvd.Sum), torch.tensor([float(size)])),
        (hvd.grouped_allgather_async(group[:2]), gathered),
        (hvd.grouped_reducescatter_async([torch.ones(size), torch.ones(2 * size)], op=hvd.Sum),
         [torch.full((1,), float(size)), torch.full((2,), float(size))]),
        (hvd.allreduce_async_(group[2], op=hvd.Sum), *filled(sum(range(size)), group[2])),
    ]  # fmt: skip
    for handle, _ in started:
        wait_until(lambda handle=handle: hvd.poll(handle), "the engine's thread carries it out")
    results = [hvd.synchronize(handle) for handle, _ in reversed(started)][::-1]
    exactly(results, [expected for _, expected in started])
    assert results[-1].data_ptr() == group[2].data_ptr()
    assert hvd.synchronize(started[0][0]) is None  # as in Horovod
    with pytest.raises(ValueError, match="no handle"):
        hvd.poll(started[0][0])


def _gradients(rank: int, size: int) -> None:
    """As horovod.torch defines them, which differs from torch.distributed.nn."""
    total = size * (size + 1) / 2  # of the factors rank + 1
    mean, factors, half = total / size, [float(r + 1) for r in range(size)], hvd.Compression.fp16
    table: list[tuple[Callable[[Tensor], Tensor], int, list[float]]] = [
        (lambda t: hvd.allreduce(t, op=hvd.Sum), 4, [total] * 4),
        (lambda t: hvd.allreduce(t, op=hvd.Sum, compression=half), 4, [total] * 4),
        (lambda t: hvd.allreduce(t, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0), 4, [2 * total] * 4),
        (hvd.allreduce, 4, [mean] * 4),
        (lambda t: hvd.grouped_allreduce([t, 2 * t], op=hvd.Sum)[1], 4, [2 * total] * 4),
        (lambda t: hvd.allgather(t[: rank + 1]), 4, [mean] * (rank + 1) + [0.0] * (3 - rank)),
        (lambda t: hvd.grouped_allgather([t, t])[0], 4, [mean] * 4),
        (lambda t: hvd.broadcast(t, 0), 4, [mean if rank == 0 else 0.0] * 4),
        (lambda t: hvd.alltoall(t, [1] * size)[0], size + 1, [*factors, 0.0]),  # the last row was not sent
        (hvd.alltoall, size, factors),
        (lambda t: hvd.reducescatter(t, op=hvd.Sum), size, [size * factor for factor in factors]),
        (hvd.reducescatter, size, factors),
    ]
    for row, (function, numel, expected) in enumerate(table):
        leaf = (torch.arange(float(numel)) + rank).requires_grad_()
        (function(leaf) * (rank + 1)).sum().backward()
        assert leaf.grad.tolist() == pytest.approx(expected), row
    # Only one rank may need the gradient.
    leaf = torch.ones(2, requires_grad=rank == 0)
    assert hvd.allgather(leaf, name="one").requires_grad is (rank == 0)
    # A gradient of a gradient: of the sum s of all x, and of its cube's derivative 3 s**2.
    x = torch.tensor([1.0], requires_grad=True)
    (first,) = torch.autograd.grad(hvd.allreduce(x, op=hvd.Sum) ** 3, x, create_graph=True)
    (second,) = torch.autograd.grad(first, x)
    assert (first.item(), second.item()) == (3 * size**3, 6 * size**3)


@in_worlds
@ranks(start=run)
def test_results_and_gradients(rank: int, world_size: int, shares_memory: bool) -> None:
    for check in (_reductions, _results, _handles, _gradients):
        check(rank, world_size)


@ranks(2, start=run)
def test_adasum_of_ranks(rank: int, world_size: int) -> None:
    vectors = [torch.tensor([[1.0, 2.0], [0.5, -1.0]]) * (r + 1) + r for r in range(world_size)]
    for dtype, repeat in ((torch.float16, 5000), (torch.float64, 1)):
        parts = [vector.to(dtype).repeat(repeat, 1) for vector in vectors]
        assert_adasum(hvd.allreduce(parts[rank], op=hvd.Adasum), parts)
    first = hvd.add_process_set([0])
    if rank == 0:
        with pytest.raises(NotImplementedError, match="all ranks"):
            hvd.allreduce(torch.ones(2), op=hvd.Adasum, process_set=first)


@pytest.mark.parametrize("shares_memory", [True, False], ids=["memory", "gloo"])
@ranks(2, start=run)
def test_operations_meet_by_name_in_any_order(rank: int, world_size: int, shares_memory: bool) -> None:
    size = world_size
    order = [*range(20)][:: 1 if rank else -1]
    handles = {i: hvd.allreduce_async(torch.full((7,), float(i)), name=f"tensor{i}", op=hvd.Sum) for i in order}
    for i in sorted(handles, key=str):
        assert hvd.synchronize(handles[i]).tolist() == [size * i] * 7
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

    def reduce(name: str) -> float:
        return [hvd.allreduce(torch.full((1,), float(len(name))), name=name, op=hvd.Sum).item() for _ in range(20)][-1]

    names = ("a", "bb") if rank else ("bb", "a")
    with ThreadPoolExecutor(2) as threads:
        assert [*threads.map(reduce, names)] == [size * len(name) for name in names]


@ranks(2, start=run)
def test_what_ranks_disagree_about_is_named_on_all_of_them(rank: int, world_size: int) -> None:
    odd = rank == world_size - 1
    calls = [
        ("op", lambda: hvd.allreduce(torch.ones(2), name="x", op=hvd.Min if odd else hvd.Max)),
        ("prescale_factor", lambda: hvd.allreduce(torch.ones(2), name="x", prescale_factor=2.0 if odd else 1.0)),
        ("root rank", lambda: hvd.broadcast(torch.ones(2), int(odd), name="x")),
        ("dtype", lambda: hvd.allreduce(torch.ones(2, dtype=torch.float64 if odd else torch.float32), name="x")),
        ("shape", lambda: hvd.allgather(torch.ones(1 + rank, 3 if odd else 2), name="x")),
        ("shape", lambda: hvd.alltoall(torch.ones(world_size, 3 if odd else 2), name="x")),
        ("number of tensors", lambda: hvd.grouped_allreduce([torch.ones(2)] * (2 if odd else 1), name="x")),
    ]
    for difference, call in calls:
        said = attempt(call)
        assert re.search(rf"Internal.*ranks disagree about the {difference} of .* on rank 0, .* on rank 1", said), said
        assert hvd.allgather_object(said) == [said] * 2  # works as before


@ranks(2, start=run)
def test_wrong_arguments_are_refused_before_anything_is_sent(world_size: int) -> None:
    one, value, internal = torch.ones(1), "ValueError", "HorovodInternalError"
    wrong: list[tuple[str, Callable[[], Any]]] = [
        (value, lambda: hvd.allreduce(one, average=True, op=hvd.Sum)),
        (value, lambda: hvd.allreduce(one, op=17)),
        (value, lambda: hvd.grouped_allreduce([])),
        (value, lambda: hvd.allreduce(torch.ones(1, dtype=torch.bool), op=hvd.Max)),
        (value, lambda: hvd.allgather(torch.tensor(1))),
        (value, lambda: hvd.broadcast(one, world_size)),
        (value, lambda: hvd.alltoall(torch.ones(world_size + 1))),
        (value, lambda: hvd.alltoall(torch.ones(world_size), torch.ones(world_size))),
        (value, lambda: hvd.alltoall(torch.ones(world_size), [world_size + 1] * world_size)),
        (value, lambda: hvd.alltoall(torch.ones(world_size), [1] * (world_size + 1))),
        (value, lambda: hvd.reducescatter(torch.tensor(1.0))),
        (internal, lambda: hvd.reducescatter(torch.ones(world_size), op=hvd.Max)),
        (value, lambda: hvd.allreduce_(one.expand(3))),
        (value, lambda: hvd.grouped_allreduce_([one, torch.ones(2), one])),
        ("TypeError", lambda: hvd.allreduce([1.0])),  # type: ignore[arg-type]
        (value, lambda: hvd.allreduce(one, process_set=hvd.ProcessSet([0]))),
        (value, lambda: hvd.DistributedOptimizer(torch.optim.SGD([one]), process_set=hvd.ProcessSet([0]))),
        (value, lambda: hvd.ProcessSet(["a"])),
        (value, lambda: hvd.broadcast_parameters(one, 0)),  # type: ignore[arg-type]
        (value, lambda: hvd.init(comm=[0] if world_size > 1 else [0, 1])),
        (value, lambda: hvd.init(process_sets="sometimes")),
        (value, lambda: hvd.start_timeline("/nowhere/x.json")),
    ]
    for kind, call in wrong:
        assert attempt(call).startswith(kind)
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


@grid("shares_memory", [True, False], keep=lambda shares_memory: shares_memory)
@ranks(3, start=run)
def test_process_sets(rank: int, world_size: int, shares_memory: bool) -> None:
    size = world_size
    evens, odds = hvd.ProcessSet(range(0, size, 2)), hvd.ProcessSet([1])
    assert evens.process_set_id is evens.size() is None
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


@ranks(2)
def test_init_and_shutdown_any_number_of_times_with_settings_that_differ(rank: int, world_size: int) -> None:
    for turn in range(5):
        hvd.init()
        hvd.init()  # changes nothing
        assert hvd.is_initialized()
        assert hvd.global_process_set.ranks == [0, 1]
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


@ranks(2)
def test_a_stall_ends_after_the_time_that_was_set(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_STALL_CHECK_TIME_SECONDS", "0.2")
    monkeypatch.setenv("HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "0.4")
    hvd.init()
    said = attempt(lambda: hvd.allreduce(torch.ones(1), name=f"of rank {rank}"))
    assert re.search(r"Internal.*'allreduce.of rank (0|1)' has waited [0-9.]+ s for rank (?!\1)", said), said
    hvd.shutdown()


@ranks(2)
def test_a_failure_in_the_middle_ends_all_operations_on_all_ranks(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOROVOD_CYCLE_TIME", "60000")  # ms: until somebody waits, so that both travel together
    hvd.init()
    if rank == 1:
        monkeypatch.setattr(engine_module, "carry_out", mock.Mock(side_effect=MemoryError("no memory")))
    for handle in [hvd.allreduce_async(torch.ones(9000), name="a"), hvd.allgather_async(torch.ones(2), name="b")]:
        with pytest.raises(hvd.HorovodInternalError, match="no memory"):
            hvd.synchronize(handle)
    hvd.shutdown()


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
    events, second = json.loads(path.read_text()), Path(f"{path}.second").read_text()
    (row,) = [each["pid"] for each in events if each.get("args", {}).get("name") == "allreduce.measured"]
    phases = [(each.get("name"), each["ph"]) for each in events if each.get("pid") == row and each["ph"] in "BEX"]
    asked = [(str(rank), "X") for rank in range(world_size)]
    assert phases == [("NEGOTIATE_ALLREDUCE", "B"), *asked, (None, "E"), ("ALLREDUCE", "B"), (None, "E")]
    assert any(each.get("name") == "CYCLE_START" for each in events)
    times = [each["ts"] for each in events if "ts" in each]
    assert times == sorted(times)
    assert "allgather.rows" not in path.read_text()
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


# ---- negotiation: which operations may run, from what ranks ask for in cycles


def request(name: str, kind: str = "allreduce", *, process_set: int = 0, shape: tuple[int, ...] = (2,)) -> Request:
    return Request(kind, name, process_set, (("float32", shape),), (("op", "Sum"),))


def test_all_ranks_come_to_the_same_order_and_nothing_is_lost() -> None:
    """Random calls in random cycles: each rank's machine gives the same responses, each operation once."""
    rng = random.Random(1)
    sets = {0: (0, 1, 2), 1: (0, 2), 2: (1,)}
    for _ in range(50):
        wanted = [request(f"op{i}", process_set=rng.choice([0, 0, 1, 2])) for i in range(12)]
        lines = [[each for each in wanted if rank in sets[each.process_set]] for rank in range(3)]
        for line in lines:
            rng.shuffle(line)
        machines = [Negotiation(sets) for _ in range(3)]
        seen: list[str] = []
        while any(lines):
            counts = [rng.randint(0, len(line)) for line in lines]
            submitted = [line[:count] for line, count in zip(lines, counts, strict=True)]
            lines = [line[count:] for line, count in zip(lines, counts, strict=True)]
            answers = [machine.advance(submitted) for machine in machines]
            assert answers[0] == answers[1] == answers[2]
            assert not any(response.error for response in answers[0])
            seen += [response.first.name for response in answers[0]]
        assert sorted(seen) == sorted(each.name for each in wanted)


# What ranks 0 to 2 ask for in each cycle, and what is answered then. j: join, a: all-reduce, g: all-gather, b: barrier.
@pytest.mark.parametrize(
    "cycles",
    [
        [("ab b b", "b"), ("- a -", ""), ("- - a", "a")],  # by name, whatever their order
        [("a - j", ""), ("- a -", "a"), ("g g -", "g!"), ("b b -", "b"), ("j - -", ""), ("- j -", "j"), ("a a -", "")],
        [("j - j", ""), ("- aj -", "aj")],  # what was asked for before is answered, for ranks that have joined, too
        [("j aj j", "aj")],
        [("a - -", ""), ("- j j", "a"), ("j - -", "j")],
    ],
)
def test_ranks_that_have_joined_are_not_waited_for_until_all_have(cycles: list[tuple[str, str]]) -> None:
    negotiation = Negotiation({0: (0, 1, 2)})
    known = {"j": Request(JOIN, "join"), "a": request("a"), "g": request("g", "allgather"), "b": Request(BARRIER, "b")}
    for asked, expected in cycles:
        found = negotiation.advance([[known[name] for name in line.strip("-")] for line in asked.split()])
        assert "".join(each.first.name[0] + "!" * ("join" in each.error) for each in found) == expected
        assert all(each.last_to_join >= 0 for each in found if each.first.kind == JOIN)
