"""The script's collectives, through shared memory and, where ranks have none, through Gloo."""

import functools
import gc
import itertools
import math
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
from tests.support.checks import assert_bitwise, assert_same_everywhere, assert_within_rounding, exact_inputs
from tests.support.harness import ranks, wait_until
from torchring import broadcasts, functions
from torchring.collectives import shared_memory
from torchring.collectives.operations import combine
from torchring.collectives.service import collectives_of
from torchring.default_world import default_world
from torchring.errors import PeerLostError, PlanMismatchError
from torchring.horovod.execution import all_reduce_together
from torchring.memory import host as host_module
from torchring.memory import semaphore

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
OPS = ("mean", "sum", "min", "max", "product")
STAGE = 96 * 1024  # bytes of a staging buffer here, of 2, 3 or 4 equal shares; in earnest it has some MiB
EDGES = (STAGE - 1, STAGE, STAGE + 1, 3 * STAGE + 7)

on_both_exchanges = pytest.mark.parametrize("shares_memory", [True, False], ids=["memory", "gloo"])
# Without memory there is more than one rank, and two or four are no other case than three.
in_worlds = pytest.mark.parametrize(
    ("world_size", "shares_memory"),
    [(1, True), (2, True), (3, True), (3, False), pytest.param(4, True, marks=pytest.mark.grid)],
)


def join(rank: int, shares_memory: bool, patch: pytest.MonkeyPatch, timeout_seconds: float = 20.0) -> None:
    patch.setattr(shared_memory, "stage_bytes", lambda size: STAGE)
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
    stack = torch.stack([part.to(torch.float64 if part.is_floating_point() else torch.int64) for part in parts])
    exact: dict[str, Callable[..., torch.Tensor]] = {
        "mean": torch.mean, "sum": torch.sum, "min": torch.amin, "max": torch.amax, "product": torch.prod,
    }  # fmt: skip
    return exact[op](stack, 0)


def _all_reduce(rank: int, size: int) -> None:
    shapes: list[tuple[int, ...]] = [(3, 5), (), (0,), (1,), (7,), (2, 0, 3), (1000,)]
    for dtype, op in itertools.product((*FLOATS, *INTEGERS), OPS):
        if op == "mean" and not dtype.is_floating_point:
            continue
        for shape in shapes if dtype == torch.float32 else shapes[:1]:
            parts = [values(r, shape, dtype, 3 if op == "product" else 16) for r in range(size)]
            tensor = parts[rank].clone()
            assert torchring.all_reduce(tensor, op) is tensor
            if op == "mean" and size == 3:  # a third is no binary number
                _assert_rounded_once(tensor, parts)
            else:
                assert_bitwise(tensor, expected_of(op, parts).to(dtype), f"{op} {dtype} {shape}")
    for dtype, op, who in itertools.product(FLOATS, ("min", "max"), range(size)):  # a NaN counts, whoever has it
        parts = [torch.tensor([r, -r, math.inf, -math.inf, r - 1, -0.0], dtype=dtype) for r in range(size)]
        parts[who][[0, 2, 3]] = math.nan
        result = torchring.all_reduce(parts[rank].clone(), op)
        torch.testing.assert_close(result.double(), expected_of(op, parts), rtol=0, atol=0, equal_nan=True)
        assert_same_everywhere([result])
    for dtype in INTEGERS:
        total = torchring.all_reduce(torch.tensor([100, 120], dtype=dtype), "sum")
        assert_bitwise(total, torch.tensor([100 * size, 120 * size]).to(dtype), f"{dtype} wraps around")


def _assert_rounded_once(mean: torch.Tensor, parts: list[torch.Tensor]) -> None:
    """Or, in a dtype of more than 16 bits, at each addition. 16-bit values are combined in fp32."""
    shares = torch.stack([part.double() for part in parts]) / len(parts)
    unit = torch.finfo(mean.dtype).eps / 2
    roundings: Any = len(parts) * (2.0**-24 / unit if mean.dtype.itemsize == 2 else 1)
    assert_within_rounding(mean, shares.sum(0), shares.abs().sum(0), roundings, mean.dtype)


def _all_reduce_of_any_size(rank: int, size: int) -> None:
    for dtype, op, edges in (
        (torch.float32, "sum", (STAGE, 2 * STAGE, 3 * STAGE, shared_memory._SMALL_BYTES, 64, 4 * size)),
        (torch.float16, "sum", (STAGE,)),
        (torch.uint8, "max", (STAGE,)),
    ):
        for numel in [edge // dtype.itemsize + i for edge in edges for i in (-1, 0, 1)]:
            parts = [values(r, (numel,), dtype) for r in range(size)]
            result = torchring.all_reduce(parts[rank].clone(), op)
            assert_bitwise(result, expected_of(op, parts).to(dtype), f"{op} of {numel} {dtype}")
    for dtype in FLOATS:
        parts = [_random(r, dtype) for r in range(size)]
        mean = torchring.all_reduce(parts[rank].clone())
        _assert_rounded_once(mean, parts)
        assert_same_everywhere([mean])


def _random(rank: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(30_000, generator=torch.Generator().manual_seed(rank + 1)).to(dtype)


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
    for view in (part(rank).t().contiguous().t(), base[:, ::2].copy_(part(rank))):
        strides = view.stride()
        assert torchring.all_reduce(view, "sum") is view
        assert view.stride() == strides
        assert_bitwise(view, total)
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

    together = [part(rank).t(), part(rank).repeat_interleave(2, 1)[:, ::2]]  # as Horovod's groups
    collectives_of(default_world()).run("all_reduce", all_reduce_together, together, "sum")
    assert_bitwise(together[0], total.t())
    assert_bitwise(together[1], total)

    window = torch.arange(5.0) + rank
    torchring.all_reduce(window[2:4], "max")
    assert window.tolist() == [rank, 1.0 + rank, 1.0 + size, 2.0 + size, 4.0 + rank]


def _broadcast(rank: int, size: int) -> None:
    for src in range(size):
        for dtype in (*FLOATS, *INTEGERS, torch.bool, torch.complex64):
            for shape in [(), (0,), (3, 4)]:
                tensor = values(rank, shape, torch.int64).to(dtype)
                assert torchring.broadcast(tensor, src) is tensor
                assert_bitwise(tensor, values(src, shape, torch.int64).to(dtype), f"{dtype} {shape} from {src}")
        for num_bytes in EDGES:
            tensor = values(rank, (num_bytes,), torch.uint8)
            torchring.broadcast(tensor, src)
            assert_bitwise(tensor, values(src, (num_bytes,), torch.uint8), f"{num_bytes} bytes from {src}")
        view = torch.full((4, 6), -1.0)
        view[:, 1::2] = float(rank)
        torchring.broadcast(view[:, 1::2], src=src)
        assert_bitwise(view, torch.tensor([-1.0, float(src)] * 12).reshape(4, 6))
    tensor = torch.tensor([math.nan, -0.0, math.inf]) * (1 if rank == 0 else 0)
    assert_bitwise(torchring.broadcast(tensor), torch.tensor([math.nan, -0.0, math.inf]) * 1)


def _broadcast_together(rank: int, size: int) -> None:
    """Around the size of a message, in every layout; all of them arrive, in the place where they were."""
    message = 1000

    def parts_of(r: int) -> list[torch.Tensor]:
        parts = [values(r, (3,), torch.int64), values(r, (), torch.float32), torch.empty(0)]
        parts += [values(r, (4, 6), torch.float64).t(), values(r, (2, 3, 4, 5), torch.float16)[:, 1]]
        parts += [values(r, (numel,), torch.uint8) for numel in (message, 5, message - 5, 1, message + 1, 7)]
        return [*parts, torch.nn.Parameter(values(r, (5, 5), torch.float32))]

    parts = parts_of(rank)
    addresses, versions = [part.data_ptr() for part in parts], [part._version for part in parts]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(broadcasts, "BATCH_BYTES", message)
        broadcasts.broadcast_together(collectives_of(default_world()), parts, size - 1)
    assert [part.data_ptr() for part in parts] == addresses
    if rank != size - 1:
        assert all(part._version > version for part, version in zip(parts, versions, strict=True) if part.numel())
    for part, expected in zip(parts, parts_of(size - 1), strict=True):
        assert_bitwise(part.detach(), expected.detach())


def _all_gather(rank: int, size: int) -> None:
    def check(part_of: Callable[[int], torch.Tensor], what: str) -> None:
        mine = part_of(rank)
        gathered = torchring.all_gather(mine)
        assert_bitwise(gathered, torch.cat([part_of(r) for r in range(size)]), what)
        assert_bitwise(mine, part_of(rank))
        gathered.fill_(0)  # the caller's own

    for dtype in (*FLOATS, *INTEGERS, torch.bool, torch.complex64, torch.complex128):
        for width in [(), (2, 2)]:  # rank 0 has none
            check(lambda r: values(r, ((2 * r) % 5, *width), torch.int64).to(dtype), f"{dtype} {width}")  # noqa: B023
        scalar = torchring.all_gather(torch.tensor(rank + 1).to(dtype))
        assert_bitwise(scalar, torch.arange(1, size + 1).to(dtype), f"0-dim {dtype}")
    check(lambda r: torch.empty(r + 1, 0, 3), "rows without elements")
    check(lambda r: torch.empty(0, 4, dtype=torch.int16), "no rows")
    check(lambda r: values(r, (3, 4), torch.float32).t(), "transposed")
    for num_bytes in EDGES:
        check(lambda r: values(r, (num_bytes if r == size - 1 else r,), torch.uint8), f"{num_bytes} bytes")  # noqa: B023
    conjugated = torchring.all_gather(torch.tensor([1 + 2j * (rank + 1)]).conj())
    assert_bitwise(conjugated.resolve_conj(), torch.tensor([1 - 2j * (r + 1) for r in range(size)]))


def _reduce_scatter(rank: int, size: int) -> None:
    shapes = [(3 * size + 1,), (size,), (3 * size, 2), (2 * size - 1, 3), (1, 5), (0, 2)]
    cases = [(dtype, op, shapes[0]) for dtype in (*FLOATS, *INTEGERS) for op in OPS]
    cases += [(torch.bfloat16, "sum", shape) for shape in shapes]
    cases += [(torch.float32, "sum", (edge // 4 + 1,)) for edge in EDGES]
    for dtype, op, shape in cases:
        if op == "mean" and (not dtype.is_floating_point or size == 3):
            continue
        parts = [values(r, shape, dtype, 3 if op == "product" else 16) for r in range(size)]
        mine = parts[rank].clone()
        share = expected_of(op, parts).to(dtype).tensor_split(size)[rank]
        assert_bitwise(torchring.reduce_scatter(mine, op), share, f"{op} {dtype} {shape}")
        assert_bitwise(mine, parts[rank], "the input is left as it is")


def _all_to_all(rank: int, size: int) -> None:
    def check(splits: list[list[int]], width: tuple[int, ...], dtype: torch.dtype) -> None:
        """splits[r][p] rows go from rank r to rank p."""
        sent = [values(r, (sum(splits[r]), *width), torch.int64).to(dtype) for r in range(size)]
        received, counts = torchring.all_to_all(sent[rank], splits[rank])
        wanted = torch.cat([rows.split(splits[r])[rank] for r, rows in enumerate(sent)])
        assert_bitwise(received, wanted, f"{dtype} {splits}")
        assert counts == [splits[r][rank] for r in range(size)]
        if len({count for counts in splits for count in counts}) == 1:
            assert_bitwise(torchring.all_to_all(sent[rank]), wanted, f"{dtype}, equal shares")

    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64):
        for each in (0, 1, 4):
            check([[each] * size] * size, (3,), dtype)
    check([[(r + 2 * p) % 4 for p in range(size)] for r in range(size)], (3,), torch.float32)
    share = STAGE // size
    for num_bytes in (share - 1, share, share + 1, 2 * STAGE + 5):  # rank 0 receives much, the others little
        check([[num_bytes if p == 0 else p for p in range(size)]] * size, (), torch.uint8)


def _barrier(rank: int, size: int) -> None:
    """Nobody passes it before the last has come."""
    times = []
    for turn in range(size):
        if rank == turn:
            time.sleep(0.05)
            times.append(time.monotonic())
        torchring.barrier()
        if rank != turn:
            times.append(time.monotonic())
    for turn, of_late_rank in enumerate(torchring.all_gather_object(times)):
        assert times[turn] >= of_late_rank[turn]


def _objects(rank: int, size: int) -> None:
    """Bytes of different lengths, so that some ranks have nothing left to send when others have."""

    def thing(r: int) -> dict[str, Any]:
        return {"text": "ü" * r, "blob": b"x" * (STAGE * (r == size - 1)), "numbers": torch.ones(r).tolist()}

    assert torchring.all_gather_object(thing(rank)) == [thing(r) for r in range(size)]
    for src in range(size):
        mine = thing(src) if rank == src else (lambda: "not picklable, and not sent")
        assert torchring.broadcast_object(mine, src) == thing(src)
    assert torchring.broadcast_object(None) is None
    for longest in (0, 1, 200, STAGE - 1, STAGE, STAGE + 1, 2 * STAGE + 3):
        lengths = [longest if r == size - 1 else min(longest, r * STAGE) for r in range(size)]
        sent = [bytes([65 + r]) * length for r, length in enumerate(lengths)]
        assert collectives_of(default_world()).all_gather_bytes(sent[rank]) == sent


def _asynchronous(rank: int, size: int) -> None:
    tensors = [torch.full((1000,), float(rank + i)) for i in range(10)]
    works = [torchring.all_reduce(tensor, "sum", async_op=True) for tensor in tensors]
    # A blocking one in between: it comes after those ten on every rank.
    assert int(torchring.all_reduce(torch.tensor([rank]), "max")) == size - 1
    assert all(work.is_completed() for work in works)
    for i, (work, tensor) in enumerate(zip(works, tensors, strict=True)):
        assert work.wait() is work.wait() is tensor
        assert bool((tensor == sum(r + i for r in range(size))).all())
    handles = [
        torchring.broadcast(torch.tensor([rank]), src=size - 1, async_op=True),
        torchring.all_gather(torch.tensor([rank]), async_op=True),
        torchring.reduce_scatter(torch.arange(float(size)), "sum", async_op=True),
        torchring.all_to_all(torch.arange(size) + 10 * rank, async_op=True),
        torchring.all_to_all(torch.arange(size) + 10 * rank, [1] * size, async_op=True),
    ]
    *results, (received, counts) = [handle.wait() for handle in reversed(handles)][::-1]
    dealt = [10 * r + rank for r in range(size)]
    assert [result.tolist() for result in results] == [[size - 1], list(range(size)), [float(rank * size)], dealt]
    assert (received.tolist(), counts) == (dealt, [1] * size)


_SCRIPTS = (
    _inputs_with_strides,  # whose collectives are the first of their world
    _all_reduce, _all_reduce_of_any_size, _broadcast, _broadcast_together, _all_gather, _reduce_scatter,
    _all_to_all, _barrier, _objects, _asynchronous,
)  # fmt: skip


@in_worlds
@ranks()
def test_results_of_all_calls(rank: int, world_size: int, shares_memory: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    join(rank, shares_memory, monkeypatch)
    for script in _SCRIPTS:
        script(rank, world_size)


@ranks(2)
def test_the_comparisons_of_this_file_can_fail(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(parts: list[torch.Tensor], out: torch.Tensor, op: str) -> None:
        combine([parts[0], *[torch.zeros_like(part) for part in parts[1:]]], out, op)

    monkeypatch.setattr(shared_memory, "combine", forget)
    with pytest.raises(AssertionError, match="elements differ"):
        _all_reduce(rank, 2)


@pytest.mark.parametrize(
    ("world_size", "delayed", "one_half"), [(2, 1, False), (3, 0, False), (3, 2, False), (2, 0, True), (3, 0, True)]
)
@ranks()
def test_a_late_rank_reads_what_was_meant_for_it(
    world_size: int, rank: int, delayed: int, one_half: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank `delayed` reads its peers' memory as late as it can: when all of them have done what they may do before it
    goes on, and have announced their next barrier. It would read wrong numbers if there were only one half."""
    join(rank, True, monkeypatch)
    torchring.barrier()
    backend: Any = collectives_of(default_world())._backend
    channel = backend._channel
    meet, incoming = channel.barrier, [address for address, _ in channel._incoming]

    def late_barrier() -> None:
        meet()
        wait_until(lambda: all(semaphore.value(address) for address in incoming), "the peers' next barrier")

    num_wrong, stage = 0, STAGE // 4
    with pytest.MonkeyPatch.context() as patch:
        if one_half:
            next_half = backend._next_half
            patch.setattr(backend, "_next_half", lambda: 0 * next_half())
        if rank == delayed:
            patch.setattr(channel, "barrier", late_barrier)
        for numel in (5, 2 * stage + 1, stage + 7 * world_size, 5 * stage // 2, 5):  # last chunks of any length
            parts = [values(r, (numel,), torch.float32) for r in range(world_size)]
            result = torchring.all_reduce(parts[rank].clone(), "sum")
            num_wrong += not torch.equal(result, sum(parts, torch.zeros(1)))
    torchring.barrier()
    assert rank != delayed or (num_wrong > 0) == one_half


@ranks(2)
def test_tensors_of_ever_other_sizes_do_not_fill_the_memory(rank: int) -> None:
    counts = []
    for first in (1, 101):
        for numel in range(first, first + 100):
            torchring.all_reduce(torch.ones(numel))
        gc.collect()
        counts.append(sum(type(each) is torch.Tensor for each in gc.get_objects()))
    assert counts[1] - counts[0] < 200


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
def test_errors_of_async_calls_come_from_wait(rank: int, shares_memory: bool, monkeypatch: pytest.MonkeyPatch) -> None:
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


# ---- ranks that call different things

_MISMATCHES = [
    ("all_reduce(ones(4))", "broadcast(ones(4))"),
    ("broadcast(ones(4))", "all_reduce(ones(4))"),
    ("all_reduce(ones(4))", "all_reduce(ones(4), 'max')"),
    ("all_reduce(ones(4))", "all_reduce(ones(5))"),
    ("all_reduce(ones(4))", "all_reduce(ones(0))"),
    ("all_reduce(ones(4))", "all_reduce(ones(4).half())"),
    ("all_reduce(ones(4))", "all_reduce(ones(2, 2))"),
    ("all_reduce(ones(4))", "all_reduce(ones(2**20))"),
    ("all_reduce(ones(4))", "barrier()"),
    ("all_reduce(ones(4))", "all_gather_object('text')"),
    ("barrier()", "all_gather(ones(4))"),
    ("broadcast(ones(4))", "broadcast(ones(4), src=1)"),
    ("all_gather(ones(4))", "all_gather(ones(4).half())"),
    ("all_gather(ones(2, 3))", "all_gather(ones(3, 2))"),
    ("all_gather(ones(2, 3))", "all_gather(ones(4))"),
    ("all_gather(ones(2**19))", "all_to_all(ones(6))"),
    ("all_to_all(ones(6))", "reduce_scatter(ones(6))"),
    ("reduce_scatter(ones(6))", "reduce_scatter(ones(6), 'max')"),
    ("reduce_scatter(ones(6))", "reduce_scatter(ones(12))"),
]


def _mismatches(rank: int, size: int, pairs: list[tuple[str, str]] = _MISMATCHES) -> None:
    """The last rank calls the second of each pair. All ranks are told, and the world still works."""
    for pair in pairs:
        print(*pair)  # the last one in the output is the one that failed
        with pytest.raises(PlanMismatchError) as caught:
            eval(pair[rank == size - 1], {**vars(functions), "ones": torch.ones})
        assert caught.value.rank == rank
        assert caught.value.peers in ([(size - 1,)] if rank < size - 1 else [(r,) for r in range(size - 1)])
        _assert_in_step(rank, size)


def _assert_in_step(rank: int, size: int) -> None:
    assert torchring.all_gather(torch.tensor([rank])).tolist() == list(range(size))
    total = torchring.all_reduce(torch.full((2**16,), rank + 1), "sum")
    assert int(total.min()) == int(total.max()) == size * (size + 1) // 2


@on_both_exchanges
@ranks(2)
def test_different_calls_are_an_error_on_every_rank_and_the_world_goes_on(
    rank: int, shares_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    join(rank, shares_memory, monkeypatch, 1.0)
    _mismatches(rank, 2)


@on_both_exchanges
@ranks(3)
def test_the_odd_one_is_named_by_the_others(rank: int, shares_memory: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    join(rank, shares_memory, monkeypatch, 1.0)
    _mismatches(rank, 3, [_MISMATCHES[8], ("all_reduce(ones(2**20))", "all_reduce(ones(2**20), 'max')")])


@on_both_exchanges
@pytest.mark.parametrize("world_size", [1, 2])
@ranks()
def test_wrong_use_is_refused_before_anything_is_sent(
    rank: int, world_size: int, shares_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only rank 0 does these things: were anything sent, the ranks would be out of step afterwards."""
    join(rank, shares_memory, monkeypatch, 2.0)
    torchring.barrier()
    calls: Any = torchring  # with arguments that mypy would refuse
    size, ones, meta, sparse = world_size, torch.ones(6), torch.ones(2, device="meta"), torch.ones(2, 2).to_sparse()
    splits, tensors = r"splits|dimension 0", "expected a torch.Tensor"
    every = (calls.all_reduce, calls.broadcast, calls.all_gather, calls.reduce_scatter, calls.all_to_all)
    wrong: list[tuple[type[Exception] | tuple[type[Exception], ...], str, Callable[[], Any]]] = [
        (ValueError, r"'mean'.*'average'", lambda: calls.all_reduce(ones, "average")),
        (ValueError, "MEAN", lambda: calls.all_reduce(ones, "MEAN")),
        (ValueError, "None", lambda: calls.all_reduce(ones, None)),
        (ValueError, "avg", lambda: calls.reduce_scatter(ones, "avg")),
        (TypeError, tensors, lambda: calls.all_reduce([1.0])),
        (TypeError, tensors, lambda: calls.broadcast(None)),
        (TypeError, tensors, lambda: calls.all_gather("text")),
        (TypeError, "bool", lambda: calls.all_reduce(torch.ones(2, dtype=torch.bool), "sum")),
        (TypeError, "complex64", lambda: calls.all_reduce(torch.ones(2, dtype=torch.complex64), "sum")),
        *[(TypeError, "mean", lambda dtype=dtype: calls.all_reduce(torch.ones(3, dtype=dtype))) for dtype in INTEGERS],
        (TypeError, "mean", lambda: calls.reduce_scatter(torch.ones(2, dtype=torch.int32))),
        *[(ValueError, "meta", functools.partial(call, meta)) for call in every],
        (ValueError, "to_dense", lambda: calls.all_reduce(sparse, "sum")),
        (ValueError, "to_dense", lambda: calls.broadcast(sparse)),
        (ValueError, rf"0 \.\. {size - 1}, got {size}", lambda: calls.broadcast(ones, src=size)),
        *[(ValueError, "src", lambda src=src: calls.broadcast(ones, src=src)) for src in (-1, 0.5, "0", None)],
        (ValueError, "src", lambda: calls.broadcast_object(1, src=size)),
        (ValueError, "expanded", lambda: calls.all_reduce(torch.ones(1).expand(4), "sum")),
        (ValueError, "expanded", lambda: calls.broadcast(torch.ones(1).expand(4))),
        ((AttributeError, TypeError, pickle.PicklingError), "", lambda: calls.all_gather_object(lambda: None)),
        *[(ValueError, "reduce_scatter", lambda at=at: calls.reduce_scatter(torch.ones(at))) for at in ((), (3, 0))],
        (ValueError, splits, lambda: calls.all_to_all(ones, [1] * size)),
        (TypeError, "float", lambda: calls.all_to_all(ones, [6 // size + 0.5] * size)),
        (ValueError, splits, lambda: calls.all_to_all(torch.ones(size + 1), None if size > 1 else [1])),
        (ValueError, splits, lambda: calls.all_to_all(torch.ones(4), [4] + [0] * size)),
        (ValueError, splits, lambda: calls.all_to_all(torch.ones(4), [5, *[0] * (size - 2), -1][:size])),
        (ValueError, splits, lambda: calls.all_to_all(torch.ones(()))),
        (ValueError, splits, lambda: calls.all_to_all(torch.ones(size, 0))),
    ]
    for number, (kind, said, call) in enumerate(wrong if rank == 0 else []):
        print(number)  # the last one in the output is the one that failed
        with pytest.raises(kind, match=said):
            call()
    _assert_in_step(rank, size)


@on_both_exchanges
@ranks(4)
def test_a_script_may_end_right_after_its_last_collective_and_come_back(
    rank: int, shares_memory: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fast rank leaves while the slow one still reads its result."""
    for turn in range(3):
        join(rank, shares_memory, monkeypatch)
        torchring.all_reduce(torch.ones(1), async_op=True).wait()
        assert float(torchring.all_reduce(torch.full((2**18,), rank + turn + 0.0), "sum")[-1]) == 6.0 + 4 * turn
        torchring.shutdown()
        assert not torchring.is_initialized()
