"""The script's collectives, through shared memory and, where ranks have none, through Gloo."""

from __future__ import annotations

import functools
import gc
import itertools
import math
import os
import pickle
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch

import torchring
from tests.support.checks import assert_bitwise, assert_same_on_all_ranks, assert_within_rounding, exact_inputs
from tests.support.grids import grid
from tests.support.harness import RanksFailed, ranks, run_pooled, wait_until
from torchring import broadcasts
from torchring.collectives import service as collectives_module
from torchring.collectives.service import collectives_of
from torchring.collectives.shared_memory import _SMALL_BYTES, stage_bytes
from torchring.default_world import default_world
from torchring.errors import PeerLostError, PlanMismatchError
from torchring.horovod.calls import check_apart
from torchring.horovod.execution import all_reduce_together
from torchring.memory import host as host_module
from torchring.memory import semaphore

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
OPS = ("mean", "sum", "min", "max", "product")

on_both_exchanges = pytest.mark.parametrize("shares_memory", [True, False], ids=["memory", "gloo"])
# Without memory there is more than one rank, and two or four are no other case than three.
in_worlds = grid(
    "world_size, shares_memory",
    [1, 2, 3, 4],
    [True, False],
    keep=lambda world_size, shares_memory: world_size < 4 if shares_memory else world_size == 3,
)
in_larger_worlds = grid(
    "size, shares_memory", [2, 3], [True, False], keep=lambda size, shares_memory: shares_memory or size == 2
)


def run(fn: Callable[..., Any], size: int, shares_memory: bool, *args: Any, timeout_seconds: float = 20.0) -> list[Any]:
    """fn(rank, size, *args) on every rank of a world that shares memory or does not."""
    return run_pooled(_in_world, size, fn, shares_memory, timeout_seconds, args)


def _in_world(rank: int, size: int, fn: Any, shares_memory: bool, timeout_seconds: float, args: tuple[Any, ...]) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        join(rank, shares_memory, patch, timeout_seconds)
        result = fn(rank, size, *args)
        torchring.shutdown()
        return result


def join(rank: int, shares_memory: bool, patch: pytest.MonkeyPatch, timeout_seconds: float = 20.0) -> None:
    if not shares_memory:
        patch.setattr(host_module, "_host_identity", lambda: f"host {rank}")
    world = torchring.init(timeout_seconds=timeout_seconds)
    assert world.size == 1 or world.shares_memory is shares_memory


def values(rank: int, shape: tuple[int, ...], dtype: torch.dtype, largest: int = 16) -> torch.Tensor:
    """Small integers, other ones on every rank; not negative for uint8."""
    flat = _integers(rank, math.prod(shape), largest)
    return (flat.abs() if dtype == torch.uint8 else flat).to(dtype, copy=True).reshape(shape)


@functools.cache
def _integers(rank: int, count: int, largest: int) -> torch.Tensor:
    return exact_inputs(count, torch.int64, rank).remainder(2 * largest + 1) - largest


def expected_of(op: str, parts: list[torch.Tensor]) -> torch.Tensor:
    """In float64 or int64: independent of the package's arithmetic."""
    exact = torch.float64 if parts[0].is_floating_point() else torch.int64
    stack = torch.stack([part.to(exact) for part in parts])
    if op == "mean":
        return stack.mean(0)
    if op == "sum":
        return stack.sum(0)
    if op == "product":
        return stack.prod(0)
    return stack.amin(0) if op == "min" else stack.amax(0)


# ---- all_reduce


def _all_reduce_everything(rank: int, size: int) -> None:
    for dtype in (*FLOATS, *INTEGERS):
        for op in OPS:
            if op == "mean" and not dtype.is_floating_point:
                with pytest.raises(TypeError, match="mean"):
                    torchring.all_reduce(torch.ones(3, dtype=dtype))
                continue
            largest = 3 if op == "product" else 16
            for shape in [(), (0,), (1,), (7,), (3, 5), (2, 0, 3), (1000,)]:
                parts = [values(r, shape, dtype, largest) for r in range(size)]
                tensor = parts[rank].clone()
                result = torchring.all_reduce(tensor, op)
                assert result is tensor
                what = f"{op} {dtype} {shape}"
                if op == "mean" and size == 3:  # a third is no binary number
                    wanted = expected_of(op, parts)
                    bound = torch.stack([part.double().abs() for part in parts]).mean(0)
                    slack: Any = 2 * 2.0**-24 / (torch.finfo(dtype).eps / 2) if dtype.itemsize == 2 else 2
                    assert_within_rounding(tensor, wanted, bound, slack, dtype)
                else:
                    assert_bitwise(tensor, expected_of(op, parts).to(dtype), what)
    for dtype, op, who in itertools.product(FLOATS, ("min", "max"), range(size)):  # a NaN counts, whoever has it
        parts = [torch.tensor([r, -r, math.inf, -math.inf, r - 1, -0.0], dtype=dtype) for r in range(size)]
        parts[who][[0, 2, 3]] = math.nan
        result = torchring.all_reduce(parts[rank].clone(), op)
        torch.testing.assert_close(result.double(), expected_of(op, parts), rtol=0, atol=0, equal_nan=True)
        bits = torchring.all_gather(result.view(torch.uint8))
        assert_same_on_all_ranks(list(bits.split(len(parts[0]) * dtype.itemsize)))


@grid("world_size, shares_memory", [2, 3], [True, False], keep=lambda world_size, shares_memory: world_size == 2)
@ranks()
def test_all_reduce_of_sizes_around_the_stage(
    rank: int, world_size: int, shares_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    join(rank, shares_memory, monkeypatch)
    size, stage = world_size, stage_bytes(world_size)
    for dtype, op, edges in (
        (torch.float32, "sum", (stage, 2 * stage, 3 * stage, _SMALL_BYTES, 64)),
        (torch.float16, "sum", (stage,)),
        (torch.uint8, "max", (stage,)),
    ):
        counts = [edge // dtype.itemsize + i for edge in edges for i in (-1, 0, 1)]
        for numel in (*counts, 0, 1, size - 1, size, size + 1):
            parts = [values(r, (numel,), dtype) for r in range(size)]
            result = torchring.all_reduce(parts[rank].clone(), op)
            assert_bitwise(result, expected_of(op, parts).to(dtype), f"{op} of {numel} {dtype}")


def _all_reduce_random(rank: int, size: int) -> dict[torch.dtype, torch.Tensor]:
    return {dtype: torchring.all_reduce(_random(rank, dtype), "mean") for dtype in FLOATS}


def _random(rank: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(30_000, generator=torch.Generator().manual_seed(rank + 1)).to(dtype)


@in_larger_worlds
def test_all_reduce_of_random_values_rounds_once_and_gives_all_ranks_the_same_bits(
    size: int, shares_memory: bool
) -> None:
    per_rank = run(_all_reduce_random, size, shares_memory)
    for dtype in FLOATS:
        assert_same_on_all_ranks([results[dtype] for results in per_rank])
        parts = torch.stack([_random(rank, dtype).double() for rank in range(size)]) / size
        # 16-bit values are combined in fp32: size roundings there, one in their own dtype.
        roundings: Any = size if dtype.itemsize > 2 else size * 2.0**-24 / (torch.finfo(dtype).eps / 2)
        assert_within_rounding(per_rank[0][dtype], parts.sum(0), parts.abs().sum(0), roundings, dtype)


def _delayed(rank: int, size: int, delayed: int, one_half: bool) -> int:
    """Rank `delayed` reads its peers' memory as late as it can: when all of them have done what they may do before it
    goes on, and have announced their next barrier. Returns the number of wrong results."""
    torchring.barrier()
    backend: Any = collectives_of(default_world())._backend
    channel = backend._channel
    meet, incoming = channel.barrier, [address for address, _ in channel._incoming]

    def late_barrier() -> None:
        meet()
        wait_until(lambda: all(semaphore.value(address) for address in incoming), "the peers' next barrier")

    num_wrong, stage = 0, stage_bytes(size) // 4
    with pytest.MonkeyPatch.context() as patch:
        if one_half:
            next_half = backend._next_half
            patch.setattr(backend, "_next_half", lambda: 0 * next_half())
        if rank == delayed:
            patch.setattr(channel, "barrier", late_barrier)
        for numel in (5, 2 * stage + 1, stage + 7 * size, 5 * stage // 2, 5):  # last chunks of any length
            parts = [values(r, (numel,), torch.float32) for r in range(size)]
            result = torchring.all_reduce(parts[rank].clone(), "sum")
            num_wrong += not torch.equal(result, sum(parts, torch.zeros(1)))
    torchring.barrier()
    return num_wrong


@grid("size", [2, 3, 5], keep=lambda size: size == 3)
def test_a_late_rank_reads_what_was_meant_for_it(size: int) -> None:
    for delayed in (0, size - 1):
        assert run(_delayed, size, True, delayed, False) == [0] * size


@pytest.mark.parametrize("size", [2, 3])
def test_a_late_rank_would_notice_if_memory_were_used_again_too_early(size: int) -> None:
    assert run(_delayed, size, True, 0, True)[0] > 0


def _together(rank: int, size: int) -> None:
    """Lists whose small tensors fill several stages, and whose large tensors have chunks of their own."""
    stage = stage_bytes(size)
    small: list[tuple[int, ...]] = [(3,), (), (0,), (2, 5), (1, 0, 2), (4, 1)]
    for dtype in (torch.float32, torch.bfloat16, torch.uint8, torch.int64):
        each = stage // dtype.itemsize
        for shapes in (
            [],
            [(0,)],
            [(7,)],
            small,
            [(100, 7)] * 9,  # more than the ranks combine without slices
            [(each // 5 + 3,)] * 11,  # several stages of small tensors
            [*small, (each // 2 + 1,), (5,), (2 * each + 3,), (each // 2,), (each // 2,), (1,), (each,), *small],
        ):
            for op in ("sum", "max"):
                parts = [[values(r + size * i, shape, dtype) for i, shape in enumerate(shapes)] for r in range(size)]
                mine = [part.clone() for part in parts[rank]]
                _all_reduce_together(mine, op)
                for i, (result, shape) in enumerate(zip(mine, shapes, strict=True)):
                    expected = expected_of(op, [of_rank[i] for of_rank in parts]).to(dtype)
                    assert_bitwise(result, expected, f"{op} of {dtype} {shape}, number {i} of {len(shapes)}")
    base = torch.full((6, 8), -5.0)
    base[:, ::2] = values(rank, (6, 4), torch.float32)
    parameter = torch.nn.Parameter(_random(rank, torch.float32))
    version = parameter._version
    _all_reduce_together([base[:, ::2], values(rank, (4, 3), torch.float32).t(), parameter], "mean")
    assert bool((base[:, 1::2] == -5.0).all()), "what lies between is not touched"
    assert size == 1 or parameter._version > version, "autograd has to know that it changed"
    for result in (base, parameter.detach()):
        assert_same_on_all_ranks(torchring.all_gather_object(result))


def _all_reduce_together(tensors: list[torch.Tensor], op: str) -> None:
    collectives_of(default_world()).run("all_reduce", all_reduce_together, tensors, op)


def test_tensors_that_share_memory_are_not_reduced_together() -> None:
    ones = torch.ones(4)
    with pytest.raises(ValueError, match="memory of their own"):
        check_apart([ones, torch.ones(2), ones.view(2, 2)])
    check_apart([ones, torch.empty(0), torch.empty(0)])


@ranks(2)
def test_tensors_of_ever_other_sizes_do_not_fill_the_memory(rank: int) -> None:
    counts = []
    for first in (1, 101):
        for numel in range(first, first + 100):
            torchring.all_reduce(torch.ones(numel))
        gc.collect()
        counts.append(sum(type(each) is torch.Tensor for each in gc.get_objects()))
    assert counts[1] - counts[0] < 200


def _sums_that_wrap_around(rank: int, size: int) -> None:
    for dtype in INTEGERS:
        total = torchring.all_reduce(torch.tensor([100, 120], dtype=dtype), "sum")
        assert_bitwise(total, torch.tensor([100 * size, 120 * size]).to(dtype), str(dtype))


def _inputs_with_strides(rank: int, size: int) -> None:
    def part(r: int) -> torch.Tensor:
        return values(r, (6, 8), torch.float32)

    total = torch.stack([part(r) for r in range(size)]).sum(0)
    for inside in (True, False):  # the first collectives of this world: nothing that they leave may be hard to write
        with torch.inference_mode():
            tensors = [part(rank), part(rank).bfloat16(), part(rank).repeat_interleave(2, 1)[:, ::2], part(rank)]
        with torch.inference_mode(inside):
            torchring.all_reduce(tensors[0])
            torchring.all_reduce(tensors[1], "sum")
            assert torchring.all_reduce(tensors[2], "sum", async_op=True).wait() is tensors[2]
            torchring.broadcast(tensors[3].t(), src=size - 1)
        assert_bitwise(tensors[0].clone(), total * (1 / size))
        assert_bitwise(tensors[1].clone(), total.bfloat16())
        assert_bitwise(tensors[2].clone(), total)
        assert_bitwise(tensors[3].clone(), part(size - 1))
    base = torch.full((6, 16), -5.0)
    for name, view in [
        ("transposed", part(rank).clone().t().contiguous().t()),
        ("every other column", base[:, ::2]),
        ("channels last", torch.empty(1, 2, 3, 8).contiguous(memory_format=torch.channels_last)),
    ]:
        expected = total.reshape(view.shape) if name != "transposed" else total
        with torch.no_grad():
            view.copy_(part(rank).reshape(view.shape))
        strides = view.stride()
        assert torchring.all_reduce(view, "sum") is view
        assert view.stride() == strides
        assert_bitwise(view, expected, name)
    assert bool((base[:, 1::2] == -5.0).all()), "what lies between is not touched"

    parameter = torch.nn.Parameter(part(rank).clone())
    before = parameter._version
    assert torchring.all_reduce(parameter, "sum") is parameter
    assert_bitwise(parameter, total)
    assert parameter.requires_grad
    assert parameter.grad_fn is None
    assert size == 1 or parameter._version > before, "autograd has to know that it changed"
    large = torch.nn.Parameter(_random(rank, torch.float32))  # travels in slices
    before = large._version
    torchring.all_reduce(large, "max")
    assert size == 1 or large._version > before
    torchring.broadcast(parameter, src=size - 1)
    assert not torchring.all_gather(parameter).requires_grad
    assert not torchring.reduce_scatter(parameter).requires_grad

    graph = parameter * 2
    torchring.all_reduce(graph, "sum")
    assert_bitwise(graph.detach(), total * 2 * size)

    window = torch.arange(10.0) + rank
    torchring.all_reduce(window[3:6], "max")
    assert window.tolist() == [
        *(i + rank for i in range(3)),
        *(i + size - 1.0 for i in range(3, 6)),
        *(i + rank for i in range(6, 10)),
    ]


# ---- broadcast


def _broadcast_everything(rank: int, size: int) -> None:
    for src in range(size):
        for dtype in (*FLOATS, *INTEGERS, torch.bool, torch.complex64):
            for shape in [(), (0,), (5,), (3, 4)]:
                tensor = values(rank, shape, torch.int64).to(dtype)
                assert torchring.broadcast(tensor, src) is tensor
                assert_bitwise(tensor, values(src, shape, torch.int64).to(dtype), f"{dtype} {shape} from {src}")
        for num_bytes in (stage_bytes(size) - 1, stage_bytes(size), stage_bytes(size) + 1, 3 * stage_bytes(size) + 7):
            tensor = values(rank, (num_bytes,), torch.uint8)
            torchring.broadcast(tensor, src)
            assert_bitwise(tensor, values(src, (num_bytes,), torch.uint8), f"{num_bytes} bytes from {src}")
        view = torch.full((4, 6), -1.0)
        view[:, 1::2] = float(rank)
        torchring.broadcast(view[:, 1::2], src=src)
        assert_bitwise(view, torch.tensor([-1.0, float(src)] * 12).reshape(4, 6))
    tensor = torch.tensor([math.nan, -0.0, math.inf]) * (1 if rank == 0 else 0)
    assert_bitwise(torchring.broadcast(tensor), torch.tensor([math.nan, -0.0, math.inf]) * 1)


# ---- all_gather


MESSAGE = 1000


def _broadcast_together(rank: int, size: int) -> None:
    """Around the size of a message, in every layout; all of them arrive, in the place where they were."""
    parts = [values(rank, (3,), torch.int64), values(rank, (), torch.float32), torch.empty(0)]
    parts += [values(rank, (4, 6), torch.float64).t(), values(rank, (2, 3, 4, 5), torch.float16)[:, 1]]
    parts += [values(rank, (numel,), torch.uint8) for numel in (MESSAGE, 5, MESSAGE - 5, 1, MESSAGE + 1, 7)]
    parts.append(torch.nn.Parameter(values(rank, (5, 5), torch.float32)))
    addresses, versions = [part.data_ptr() for part in parts], [part._version for part in parts]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(broadcasts, "BATCH_BYTES", MESSAGE)
        broadcasts.broadcast_together(collectives_module.collectives_of(default_world()), parts, size - 1)
    assert [part.data_ptr() for part in parts] == addresses
    if rank != size - 1:
        assert all(part._version > version for part, version in zip(parts, versions, strict=True) if part.numel())
    source = size - 1
    assert_bitwise(parts[0], values(source, (3,), torch.int64))
    assert_bitwise(parts[1], values(source, (), torch.float32))
    assert_bitwise(parts[3], values(source, (4, 6), torch.float64).t())
    assert_bitwise(parts[4], values(source, (2, 3, 4, 5), torch.float16)[:, 1])
    for part in parts[5:-1]:
        assert_bitwise(part, values(source, (part.numel(),), torch.uint8))
    assert_bitwise(parts[-1].detach(), values(source, (5, 5), torch.float32))


def _all_gather_everything(rank: int, size: int) -> None:
    def rows(r: int, dtype: torch.dtype, width: tuple[int, ...]) -> torch.Tensor:
        return values(r, ((2 * r) % 5, *width), torch.int64).to(dtype)  # rank 0 has none

    for dtype in (*FLOATS, *INTEGERS, torch.bool, torch.complex64, torch.complex128):
        for width in [(), (1,), (3,), (2, 2)]:
            mine = rows(rank, dtype, width)
            kept = mine.clone()
            gathered = torchring.all_gather(mine)
            assert_bitwise(gathered, torch.cat([rows(r, dtype, width) for r in range(size)]), f"{dtype} {width}")
            assert_bitwise(mine, kept)
        scalar = torchring.all_gather(torch.tensor(rank + 1).to(dtype))
        assert_bitwise(scalar, torch.arange(1, size + 1).to(dtype), f"0-dim {dtype}")
    empty = torchring.all_gather(torch.empty(rank + 1, 0, 3))
    assert empty.shape == (size * (size + 1) // 2, 0, 3)
    assert torchring.all_gather(torch.empty(0, 4, dtype=torch.int16)).shape == (0, 4)
    strided = torchring.all_gather(values(rank, (3, 4), torch.float32).t())
    assert_bitwise(strided, torch.cat([values(r, (3, 4), torch.float32).t() for r in range(size)]))
    conjugated = torchring.all_gather(torch.tensor([1 + 2j * (rank + 1)]).conj())
    assert_bitwise(conjugated.resolve_conj(), torch.tensor([1 - 2j * (r + 1) for r in range(size)]))
    for num_bytes in (stage_bytes(size) - 1, stage_bytes(size), stage_bytes(size) + 1, 2 * stage_bytes(size) + 1):
        lengths = [num_bytes if r == size - 1 else r for r in range(size)]
        gathered = torchring.all_gather(values(rank, (lengths[rank],), torch.uint8))
        assert_bitwise(gathered, torch.cat([values(r, (lengths[r],), torch.uint8) for r in range(size)]))
    gathered.fill_(0)  # the caller's own
    assert float(torchring.all_gather(torch.ones(1)).sum()) == size


# ---- reduce_scatter


def _reduce_scatter_everything(rank: int, size: int) -> None:
    for dtype in (*FLOATS, *INTEGERS):
        for op in OPS:
            if op == "mean" and (not dtype.is_floating_point or size == 3):
                continue
            for shape in [(size,), (3 * size, 2), (3 * size + 1,), (2 * size - 1, 3), (1, 5), (0, 2)]:
                parts = [values(r, shape, dtype, 3 if op == "product" else 16) for r in range(size)]
                mine = parts[rank].clone()
                result = torchring.reduce_scatter(mine, op)
                share = expected_of(op, parts).to(dtype).tensor_split(size)[rank]
                assert_bitwise(result, share, f"{op} {dtype} {shape}")
                assert_bitwise(mine, parts[rank], "the input is left as it is")
    for rows in (stage_bytes(size) // 4 - 1, stage_bytes(size) // 4, stage_bytes(size) // 4 + 1, stage_bytes(size) + 1):
        parts = [values(r, (rows,), torch.float32) for r in range(size)]
        share = expected_of("sum", parts).float().tensor_split(size)[rank]
        assert_bitwise(torchring.reduce_scatter(parts[rank], "sum"), share, f"{rows} rows")
    for shape in [(), (3, 0)]:
        with pytest.raises(ValueError, match="reduce_scatter"):
            torchring.reduce_scatter(torch.ones(shape))


# ---- all_to_all


def _all_to_all_everything(rank: int, size: int) -> None:
    def rows(r: int, count: int, dtype: torch.dtype) -> torch.Tensor:
        return values(r, (count, 3), torch.int64).to(dtype)

    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64):
        for each in (0, 1, 4):
            received = torchring.all_to_all(rows(rank, each * size, dtype))
            pieces = [rows(r, each * size, dtype)[rank * each : (rank + 1) * each] for r in range(size)]
            assert_bitwise(received, torch.cat(pieces), f"{dtype} {each} rows each")
    splits = [[(r + 2 * p) % 4 for p in range(size)] for r in range(size)]  # from r to p; some are zero
    received, counts = torchring.all_to_all(rows(rank, sum(splits[rank]), torch.float32), splits[rank])
    pieces = [rows(r, sum(splits[r]), torch.float32).split(splits[r])[rank] for r in range(size)]
    assert_bitwise(received, torch.cat(pieces))
    assert counts == [splits[r][rank] for r in range(size)]
    received, counts = torchring.all_to_all(torch.empty(0, 3), [0] * size)
    assert received.shape == (0, 3)
    assert counts == [0] * size
    for num_bytes in (
        stage_bytes(size) // size - 1,
        stage_bytes(size) // size,
        stage_bytes(size) // size + 1,
        2 * stage_bytes(size) + 5,
    ):
        shares = [num_bytes if p == 0 else p for p in range(size)]  # rank 0 receives much, the others little
        received, counts = torchring.all_to_all(values(rank, (sum(shares),), torch.uint8), shares)
        pieces = [values(r, (sum(shares),), torch.uint8).split(shares)[rank] for r in range(size)]
        assert_bitwise(received, torch.cat(pieces), f"{num_bytes} bytes")
    for tensor, wrong in [
        (torch.ones(size + 1), None if size > 1 else [1]),
        (torch.ones(4), [4] * size if size > 1 else [3]),
        (torch.ones(4), [4] + [0] * size),
        (torch.ones(4), [5, *[0] * (size - 2), -1] if size > 1 else [-4]),
        (torch.ones(()), None),
        (torch.ones(size, 0), None),
    ]:
        with pytest.raises(ValueError, match=r"splits|dimension 0"):
            torchring.all_to_all(tensor, wrong)


# ---- barrier and objects


def _barrier(rank: int, size: int) -> None:
    """Nobody passes it before the last has come."""
    times = []
    for turn in range(size):
        if rank == turn:
            time.sleep(0.1)
            arrived = time.monotonic()
            times.append(arrived)
        torchring.barrier()
        if rank != turn:
            times.append(time.monotonic())
    for turn, of_late_rank in enumerate(torchring.all_gather_object(times)):
        assert times[turn] >= of_late_rank[turn]


def _objects(rank: int, size: int) -> None:
    thing = {
        "rank": rank,
        "text": "ü" * rank,
        "blob": b"x" * (stage_bytes(size) * (rank == size - 1)),
        "tensor": torch.ones(rank),
    }
    gathered = torchring.all_gather_object(thing)
    assert [other["rank"] for other in gathered] == list(range(size))
    assert [len(other["text"]) for other in gathered] == list(range(size))
    assert len(gathered[-1]["blob"]) == stage_bytes(size)
    assert [other["tensor"].numel() for other in gathered] == list(range(size))
    for src in range(size):
        received = torchring.broadcast_object(thing if rank == src else (lambda: "not picklable, and not sent"), src)
        assert received["rank"] == src
    assert torchring.broadcast_object(None) is None
    assert torchring.all_gather_object(None) == [None] * size


def _exchange(rank: int, size: int) -> None:
    """Of different lengths, so that some ranks have nothing left to send when others have."""
    stage = stage_bytes(size)
    for longest in (0, 1, 200, stage - 1, stage, stage + 1, 2 * stage + 3):
        lengths = [longest if r == size - 1 else min(longest, r * stage) for r in range(size)]
        sent = [bytes([65 + r]) * length for r, length in enumerate(lengths)]
        assert collectives_of(default_world()).all_gather_bytes(sent[rank]) == sent


# ---- asynchronous


def _asynchronous(rank: int, size: int) -> None:
    tensors = [torch.full((1000,), float(rank + i)) for i in range(10)]
    works = [torchring.all_reduce(tensor, "sum", async_op=True) for tensor in tensors]
    # A blocking one in between: it comes after those ten on every rank.
    middle = torchring.all_reduce(torch.tensor([rank]), "max")
    assert int(middle) == size - 1
    assert all(work.is_completed() for work in works)
    for i, (work, tensor) in enumerate(zip(works, tensors, strict=True)):
        assert isinstance(work, torchring.Work)
        assert work.wait() is tensor
        assert work.wait() is tensor  # again
        assert bool((tensor == sum(r + i for r in range(size))).all())
    handles = [
        torchring.broadcast(torch.tensor([rank]), src=size - 1, async_op=True),
        torchring.all_gather(torch.tensor([rank]), async_op=True),
        torchring.reduce_scatter(torch.arange(float(size)), "sum", async_op=True),
        torchring.all_to_all(torch.arange(size) + 10 * rank, async_op=True),
        torchring.all_to_all(torch.arange(size) + 10 * rank, [1] * size, async_op=True),
    ]
    results = [handle.wait() for handle in reversed(handles)][::-1]
    assert results[0].tolist() == [size - 1]
    assert results[1].tolist() == list(range(size))
    assert results[2].tolist() == [float(rank * size)]
    assert results[3].tolist() == [10 * r + rank for r in range(size)]
    assert results[4][0].tolist() == [10 * r + rank for r in range(size)]
    assert results[4][1] == [1] * size


@on_both_exchanges
@ranks(2)
def test_an_asynchronous_call_returns_before_the_others_have_come(
    rank: int, shares_memory: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    join(rank, shares_memory, monkeypatch)
    torchring.barrier()  # opening the collectives is collective
    if rank == 1:
        wait_until((tmp_path / "has returned").exists, "rank 0's call to return")
    work = torchring.all_reduce(torch.ones(4), "sum", async_op=True)
    assert rank == 1 or not work.is_completed()
    (tmp_path / "has returned").touch()
    assert work.wait().tolist() == [2.0] * 4
    assert work.is_completed()


@on_both_exchanges
@ranks(2)
def test_an_error_of_an_asynchronous_call_comes_out_of_wait(
    rank: int, shares_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    join(rank, shares_memory, monkeypatch, 2.0)
    torchring.barrier()
    good = torchring.all_reduce(torch.ones(1), "sum", async_op=True)
    bad = torchring.all_reduce(torch.ones(3 + rank), "sum", async_op=True)
    later = torchring.all_reduce(torch.ones(1), "sum", async_op=True)
    assert float(good.wait()) == 2.0
    for _ in range(2):
        with pytest.raises(PlanMismatchError):
            bad.wait()
    assert bad.is_completed()
    assert float(later.wait()) == float(torchring.all_reduce(torch.ones(1), "sum")) == 2.0


# ---- all of them in every world

_SCRIPTS = (
    _inputs_with_strides,  # whose collectives are the first of their world
    _all_reduce_everything, _together, _sums_that_wrap_around, _broadcast_everything, _broadcast_together,
    _all_gather_everything, _reduce_scatter_everything, _all_to_all_everything, _barrier, _objects, _exchange,
    _asynchronous,
)  # fmt: skip


class Awaited(Future[Any]):
    def __init__(self) -> None:
        super().__init__()
        self.is_awaited = threading.Event()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self.is_awaited.set()
        return super().exception(timeout)


def test_closing_ends_a_call_that_waits_for_one_that_has_not_begun() -> None:
    torchring.init()
    collectives, last, errors = collectives_of(default_world()), Awaited(), list[BaseException]()
    collectives._last = last

    def call() -> None:
        try:
            torchring.all_reduce(torch.ones(1))
        except PeerLostError as error:
            errors.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    assert last.is_awaited.wait(20)
    last.cancel()
    thread.join(20)
    torchring.shutdown()
    assert "shutdown() was called before this collective began" in str(errors[0])


@in_worlds
@ranks()
def test_right_results_of_every_call(
    rank: int, world_size: int, shares_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    join(rank, shares_memory, monkeypatch)
    for script in _SCRIPTS:
        script(rank, world_size)


# ---- ranks that call different things

_CALLS: dict[str, Callable[[], Any]] = {
    "all_reduce": lambda: torchring.all_reduce(torch.ones(4), "sum"),
    "all_reduce max": lambda: torchring.all_reduce(torch.ones(4), "max"),
    "all_reduce of 5": lambda: torchring.all_reduce(torch.ones(5), "sum"),
    "all_reduce of none": lambda: torchring.all_reduce(torch.ones(0), "sum"),
    "all_reduce of int32": lambda: torchring.all_reduce(torch.ones(4, dtype=torch.int32), "sum"),
    "all_reduce of 2x2": lambda: torchring.all_reduce(torch.ones(2, 2), "sum"),
    "all_reduce of 2 MiB": lambda: torchring.all_reduce(torch.ones(2**19), "sum"),
    "all_reduce of 2 and 2": lambda: _all_reduce_together([torch.ones(2), torch.ones(2)], "sum"),
    "all_reduce of 3 and 1": lambda: _all_reduce_together([torch.ones(3), torch.ones(1)], "sum"),
    "all_reduce of nothing": lambda: _all_reduce_together([], "sum"),
    "all_gather_object": lambda: torchring.all_gather_object("text"),
    "all_reduce of 4 MiB": lambda: torchring.all_reduce(torch.ones(2**20), "sum"),
    "all_reduce max of 4 MiB": lambda: torchring.all_reduce(torch.ones(2**20), "max"),
    "broadcast": lambda: torchring.broadcast(torch.ones(4)),
    "broadcast from 1": lambda: torchring.broadcast(torch.ones(4), src=1),
    "broadcast of 5": lambda: torchring.broadcast(torch.ones(5)),
    "broadcast of int32": lambda: torchring.broadcast(torch.ones(4, dtype=torch.int32)),
    "broadcast of 2x2": lambda: torchring.broadcast(torch.ones(2, 2)),
    "all_gather": lambda: torchring.all_gather(torch.ones(4)),
    "all_gather of int32": lambda: torchring.all_gather(torch.ones(4, dtype=torch.int32)),
    "all_gather of 2x3": lambda: torchring.all_gather(torch.ones(2, 3)),
    "all_gather of 3x2": lambda: torchring.all_gather(torch.ones(3, 2)),
    "all_gather of 2 MiB": lambda: torchring.all_gather(torch.ones(2**19)),
    "all_to_all": lambda: torchring.all_to_all(torch.ones(6)),
    "all_to_all of int32": lambda: torchring.all_to_all(torch.ones(6, dtype=torch.int32)),
    "reduce_scatter": lambda: torchring.reduce_scatter(torch.ones(6), "sum"),
    "reduce_scatter max": lambda: torchring.reduce_scatter(torch.ones(6), "max"),
    "reduce_scatter of 12": lambda: torchring.reduce_scatter(torch.ones(12), "sum"),
    "barrier": lambda: torchring.barrier(),
}
_MISMATCHES = [
    ("all_reduce", "broadcast"),
    ("broadcast", "all_reduce"),
    ("all_reduce", "all_reduce max"),
    ("all_reduce", "all_reduce of 5"),
    ("all_reduce", "all_reduce of none"),
    ("all_reduce", "all_reduce of int32"),
    ("all_reduce", "all_reduce of 2x2"),
    ("all_reduce", "all_reduce of 2 MiB"),
    ("all_reduce", "all_reduce of 2 and 2"),
    ("all_reduce of 2 and 2", "all_reduce of 3 and 1"),
    ("all_reduce of 2 and 2", "all_reduce of nothing"),
    ("all_reduce", "barrier"),
    ("all_reduce", "all_gather_object"),
    ("barrier", "all_gather"),
    ("broadcast", "broadcast from 1"),
    ("broadcast", "broadcast of 5"),
    ("broadcast", "broadcast of int32"),
    ("broadcast", "broadcast of 2x2"),
    ("all_gather", "all_gather of int32"),
    ("all_gather of 2x3", "all_gather of 3x2"),
    ("all_gather of 2x3", "all_gather"),
    ("all_gather of 2 MiB", "all_to_all"),
    ("all_to_all", "all_to_all of int32"),
    ("all_to_all", "reduce_scatter"),
    ("reduce_scatter", "reduce_scatter max"),
    ("reduce_scatter", "reduce_scatter of 12"),
]


def _mismatch(rank: int, size: int, first: str, second: str) -> Any:
    odd = size - 1
    call = _CALLS[second if rank == odd else first]
    with pytest.raises(PlanMismatchError) as caught:
        call()
    # And the world still works.
    assert float(torchring.all_reduce(torch.ones(1), "sum")) == size
    assert torchring.all_gather(torch.tensor([rank])).tolist() == list(range(size))
    assert int(torchring.all_reduce(torch.full((2**18,), rank + 1), "sum")[-1]) == size * (size + 1) // 2
    return caught.value.peers, caught.value.rank


def _mismatches(rank: int, size: int) -> list[Any]:
    results = []
    for pair in _MISMATCHES:
        print(*pair)  # the last one in the output is the one that failed
        results.append(_mismatch(rank, size, *pair))
    return results


@on_both_exchanges
def test_different_calls_are_an_error_on_every_rank_and_the_world_goes_on(
    shares_memory: bool, subtests: pytest.Subtests
) -> None:
    for rank, results in enumerate(run(_mismatches, 2, shares_memory, timeout_seconds=1.0)):
        for (first, second), (peers, who) in zip(_MISMATCHES, results, strict=True):
            with subtests.test(f"{first} against {second}"):
                assert who == rank
                assert peers == (1 - rank,)


@on_both_exchanges
def test_the_odd_one_of_three_is_named_by_the_others(shares_memory: bool) -> None:
    for first, second in [("all_reduce", "barrier"), ("all_reduce of 4 MiB", "all_reduce max of 4 MiB")]:
        results = run(_mismatch, 3, shares_memory, first, second, timeout_seconds=1.0)
        assert [peers for peers, _ in results[:2]] == [(2,), (2,)]


# ---- what a caller gets wrong


@on_both_exchanges
@pytest.mark.parametrize("world_size", [1, 2])
@ranks()
def test_wrong_use_is_refused_before_anything_is_sent(
    rank: int, world_size: int, shares_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only rank 0 does these things: were anything sent, the ranks would be out of step afterwards."""
    join(rank, shares_memory, monkeypatch, 2.0)
    size = world_size
    torchring.barrier()
    ones = torch.ones(6)
    wrong: list[tuple[type[Exception] | tuple[type[Exception], ...], Callable[[], Any]]] = [
        (ValueError, lambda: torchring.all_reduce(ones, "average")),
        (ValueError, lambda: torchring.all_reduce(ones, "MEAN")),
        ((ValueError, TypeError), lambda: torchring.all_reduce(ones, None)),  # type: ignore[arg-type]
        (ValueError, lambda: torchring.reduce_scatter(ones, "avg")),
        (TypeError, lambda: torchring.all_reduce([1.0])),  # type: ignore[arg-type]
        (TypeError, lambda: torchring.all_reduce(1.0)),  # type: ignore[arg-type]
        (TypeError, lambda: torchring.broadcast(None)),  # type: ignore[arg-type]
        (TypeError, lambda: torchring.all_gather("text")),  # type: ignore[arg-type]
        (TypeError, lambda: torchring.all_reduce(torch.ones(2, dtype=torch.bool), "sum")),
        (TypeError, lambda: torchring.all_reduce(torch.ones(2, dtype=torch.complex64), "sum")),
        (TypeError, lambda: torchring.all_reduce(torch.ones(2, dtype=torch.int64), "mean")),
        (TypeError, lambda: torchring.reduce_scatter(torch.ones(2, dtype=torch.int32))),
        (ValueError, lambda: torchring.all_reduce(torch.ones(2, device="meta"))),
        (ValueError, lambda: torchring.broadcast(torch.ones(2, device="meta"))),
        (ValueError, lambda: torchring.all_gather(torch.ones(2, device="meta"))),
        (ValueError, lambda: torchring.reduce_scatter(torch.ones(2, device="meta"))),
        (ValueError, lambda: torchring.all_to_all(torch.ones(2, device="meta"))),
        (ValueError, lambda: torchring.all_reduce(torch.ones(2, 2).to_sparse(), "sum")),
        (ValueError, lambda: torchring.broadcast(torch.ones(2, 2).to_sparse())),
        (ValueError, lambda: torchring.broadcast(ones, src=size)),
        (ValueError, lambda: torchring.broadcast(ones, src=-1)),
        ((ValueError, TypeError), lambda: torchring.broadcast(ones, src=0.5)),  # type: ignore[arg-type]
        ((ValueError, TypeError), lambda: torchring.broadcast(ones, src="0")),  # type: ignore[arg-type]
        ((ValueError, TypeError), lambda: torchring.broadcast(ones, src=None)),  # type: ignore[arg-type]
        (ValueError, lambda: torchring.all_reduce(torch.ones(1).expand(4), "sum")),  # no memory for the result
        (ValueError, lambda: torchring.broadcast_object(1, src=size)),
        ((AttributeError, TypeError, pickle.PicklingError), lambda: torchring.all_gather_object(lambda: None)),
        (ValueError, lambda: torchring.all_to_all(ones, [1] * size)),
        ((ValueError, TypeError), lambda: torchring.all_to_all(ones, [6 // size + 0.5] * size)),  # type: ignore[list-item]
    ]
    if rank == 0:
        for i, (kind, call) in enumerate(wrong):
            try:
                call()
            except kind:
                continue
            except Exception as error:
                raise AssertionError(f"call {i} raised {error!r}") from error
            raise AssertionError(f"call {i} raised nothing")
    assert torchring.all_gather(torch.tensor([rank])).tolist() == list(range(size))
    total = torchring.all_reduce(torch.full((2**18,), rank + 1), "sum")
    assert int(total.min()) == int(total.max()) == size * (size + 1) // 2


def test_messages_say_what_was_received_and_what_would_be_right() -> None:
    with pytest.raises(ValueError, match=r"'mean'.*'average'"):
        torchring.all_reduce(torch.ones(1), "average")
    with pytest.raises(ValueError, match=r"0 \.\. 0, got 3"):
        torchring.broadcast(torch.ones(1), src=3)
    with pytest.raises(ValueError, match="meta"):
        torchring.broadcast(torch.ones(1, device="meta"))
    torchring.shutdown()


# ---- lives of worlds


@on_both_exchanges
@ranks(2)
def test_collectives_come_back_after_shutdown(rank: int, shares_memory: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    for turn in range(3):
        join(rank, shares_memory, monkeypatch)
        assert float(torchring.all_reduce(torch.full((1000,), rank + turn + 1.0), "sum")[7]) == 3.0 + 2 * turn
        torchring.all_reduce(torch.ones(1), async_op=True).wait()
        torchring.shutdown()
        assert not torchring.is_initialized()
    gc.collect()
    with open("/proc/self/maps") as maps:
        assert "memfd:torchring" not in maps.read()


@on_both_exchanges
@ranks(4)
def test_a_script_may_end_right_after_its_last_collective(
    rank: int, shares_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fast rank leaves while the slow one still reads its result."""
    for _ in range(3):
        join(rank, shares_memory, monkeypatch)
        assert float(torchring.all_reduce(torch.full((2**20,), float(rank)), "sum")[-1]) == 6.0
        torchring.shutdown()


def _broken_all_reduce(rank: int, size: int) -> None:
    parts = [values(r, (100,), torch.float32) for r in range(size)]
    result = torchring.all_reduce(parts[rank].clone(), "sum")
    result[99] += float(os.environ.get("RANK", 0)) == 1
    assert_bitwise(result, expected_of("sum", parts).float())


def test_the_comparisons_of_this_file_can_fail() -> None:
    with pytest.raises(RanksFailed, match="1 of 100 elements differ"):
        run(_broken_all_reduce, 2, True)
