"""One contract (`torchring/allreduce/contract.py`), and all all-reduces: direct, native over Gloo, hierarchical with
even and uneven hosts."""

import functools
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.checks import assert_bitwise, assert_same_on_all_ranks, assert_within_rounding, digest, exact_inputs
from tests.support.grids import grid
from tests.support.harness import patient, run_threads, wait_until
from torchring.allreduce.contract import MAX_PENDING, AllReduce, Wire
from torchring.allreduce.direct import DirectAllReduce
from torchring.allreduce.hierarchical import HierarchicalAllReduce, column_ranks, num_columns
from torchring.allreduce.native import NativeAllReduce, NativeWork
from torchring.allreduce.slices import ALIGNMENT_BYTES, BLOCK_BYTES
from torchring.errors import PeerLostError, PeerTimeoutError, PlanMismatchError
from torchring.memory import host as host_module
from torchring.transport.c10d import C10dTransport
from torchring.transport.diagnosis import culprit as culprit_module
from torchring.world import World

KINDS = ("direct", "hierarchical", "native")
HOSTS = {2: (0, 1), 3: (0, 0, 1), 5: (0, 1, 0, 1, 0)}  # of each rank, where there are several
WORLDS = (2, 3, 5)
DTYPES = (torch.float32, torch.float64, torch.float16, BF16 := torch.bfloat16)
MIB = 2**20

every_all_reduce = pytest.mark.parametrize("kind", KINDS)
every_world = pytest.mark.parametrize("size", WORLDS)
# Every all-reduce in a world of 3, and the others where they differ: one peer, and hosts of 3 and 2 ranks.
every_all_reduce_and_world = grid(
    "kind, size",
    KINDS,
    WORLDS,
    keep=lambda kind, size: size == 3 or (kind, size) in {("direct", 2), ("hierarchical", 5)},
)
every_all_reduce_world_and_dtype = grid(
    "kind, size, dtype",
    KINDS,
    WORLDS,
    DTYPES,
    keep=lambda kind, size, dtype: (
        size == (2 if dtype in (torch.float16, torch.float64) else 5 if (kind, dtype) == ("hierarchical", BF16) else 3)
    ),
)


def run_all_reduces(
    kind: str, size: int, body: Callable[..., Any], *, num_all_reduces: int = 1, timeout_seconds: float = 20.0
) -> list[Any]:
    """body(rank, *all-reduces) on every rank, in threads of this process."""

    def on_rank(rank: int, size: int, store: dist.Store) -> Any:
        world = World(store, rank, size, timeout_seconds=timeout_seconds)
        all_reduces = [_open(kind, world) for _ in range(num_all_reduces)]
        try:
            return body(rank, *all_reduces)
        finally:
            for all_reduce in all_reduces:
                all_reduce.close()
            world.close()

    with pytest.MonkeyPatch.context() as patch:
        if kind == "hierarchical":
            patch.setattr(host_module, "_host_identity", lambda: _host_of(size))
        return run_threads(on_rank, size)


def _open(kind: str, world: World) -> AllReduce[Any]:
    assert world.host is not None
    if kind == "direct":
        return DirectAllReduce(world.host)
    if kind == "hierarchical":
        ranks = column_ranks(world.hosts, world.rank)
        transport = _transport(world, ranks or (world.rank,))
        return HierarchicalAllReduce(world.host, num_columns(world.hosts), transport if ranks else None)
    return NativeAllReduce(_transport(world))


def _transport(world: World, ranks: Sequence[int] | None = None) -> C10dTransport:
    assert world.rendezvous is not None
    return C10dTransport(world.rendezvous, world.next_channel_name(), world.host, ranks=ranks)


def _host_of(size: int) -> str:
    return f"host {HOSTS[size][int(threading.current_thread().name.split()[1])]}"


def sizes_of(size: int, dtype: torch.dtype) -> list[int]:
    """Element counts around every boundary: ranks, cache lines, blocks of a buffer and of a slice."""
    block, line = BLOCK_BYTES // dtype.itemsize, ALIGNMENT_BYTES // dtype.itemsize
    edges = [line, line * size, block, block * size]
    around = {edge + i for edge in edges for i in (-1, 0, 1)}
    return sorted({0, 1, size - 1, size, size + 1, 63, 64, 65, MIB // dtype.itemsize} | around)


@functools.cache
def _inputs(dtype: torch.dtype, rank: int) -> torch.Tensor:
    return exact_inputs(6 * BLOCK_BYTES // dtype.itemsize, dtype, rank)


@functools.cache
def _sums(dtype: torch.dtype, ranks: int) -> torch.Tensor:
    return torch.stack([_inputs(dtype, rank).double() for rank in range(ranks)]).sum(0).to(dtype)


def _random_inputs(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank + 1)).to(dtype)


def num_roundings(kind: str, dtype: torch.dtype, size: int) -> float:
    """Of the wire dtype, on the way of a sum of `size` parts, the last one not counted."""
    in_fp32 = size * 2.0**-24 / (torch.finfo(dtype).eps / 2)  # 16-bit wires: every fp32 rounding, in units of theirs
    if dtype.itemsize > 2 or kind == "native":
        return size - 1
    if kind == "direct":
        return in_fp32
    # The engine rounds at every hop; hosts of several ranks round what they have summed, too.
    return (len(set(HOSTS[size])) if size > 2 else 0) + in_fp32


def reduce(all_reduce: AllReduce[Any], wire: Wire, inputs: torch.Tensor | None = None) -> None:
    if inputs is not None:
        wire.tensor.copy_(inputs[: wire.tensor.numel()])
    all_reduce.start(wire).wait()


# ---- the contract


@every_all_reduce_world_and_dtype
def test_exact_sums_of_every_size(kind: str, size: int, dtype: torch.dtype) -> None:
    sizes = sizes_of(size, dtype)

    def body(rank: int, all_reduce: AllReduce[Any]) -> None:
        wires = all_reduce.open_wires([(numel, dtype) for numel in sizes])
        for wire, numel in zip(wires, sizes, strict=True):
            assert (wire.tensor.shape, wire.tensor.dtype) == ((numel,), dtype)
            assert not wire.tensor.any(), "a new wire is zeroed"
            address = wire.tensor.data_ptr()
            reduce(all_reduce, wire, _inputs(dtype, rank))
            assert wire.tensor.data_ptr() == address
        for wire, numel in zip(wires, sizes, strict=True):
            assert_bitwise(wire.tensor, _sums(dtype, size)[:numel], f"{numel} elements")

    _sums(dtype, size)  # once, before the threads
    run_all_reduces(kind, size, body)


def test_the_suite_notices_an_all_reduce_that_forgets_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    start = NativeAllReduce.start

    def forgetful(self: NativeAllReduce, wire: Any) -> NativeWork:
        if self._transport.rank == 0:
            wire.tensor.zero_()
        return start(self, wire)

    monkeypatch.setattr(NativeAllReduce, "start", forgetful)
    with pytest.raises(AssertionError, match="elements differ"):
        test_exact_sums_of_every_size("native", 2, torch.float32)


@every_all_reduce_world_and_dtype
def test_random_inputs_stay_within_the_rounding_bound(kind: str, size: int, dtype: torch.dtype) -> None:
    def body(rank: int, all_reduce: AllReduce[Any]) -> torch.Tensor:
        (wire,) = all_reduce.open_wires([(20_000, dtype)])
        reduce(all_reduce, wire, _random_inputs(rank, 20_000, dtype))
        return wire.tensor.clone()

    results = run_all_reduces(kind, size, body)
    assert_same_on_all_ranks(results)
    roundings: Any = num_roundings(kind, dtype, size)
    parts = torch.stack([_random_inputs(rank, 20_000, dtype).double() for rank in range(size)])
    assert_within_rounding(results[0], parts.sum(0), parts.abs().sum(0), roundings, dtype)
    with pytest.raises(AssertionError):  # it would notice a rank that was left out
        assert_within_rounding(results[0], parts[1:].sum(0), parts.abs().sum(0), roundings, dtype)


@every_all_reduce
def test_wires_of_one_all_reduce_may_differ_in_dtype_and_size(kind: str) -> None:
    specs = [(7, torch.float16), (0, torch.float32), (100_000, torch.float64), (33, torch.bfloat16), (1, torch.float32)]

    def body(rank: int, all_reduce: AllReduce[Any]) -> None:
        # A second time, as for added parameters.
        wires = [*all_reduce.open_wires(specs), *all_reduce.open_wires(specs[:2])]
        for i, wire in enumerate(wires):
            wire.tensor.copy_(exact_inputs(wire.tensor.numel(), wire.tensor.dtype, rank + 3 * i))
        for wire in reversed(wires):
            reduce(all_reduce, wire)
        for i, (wire, (numel, dtype)) in enumerate(zip(wires, [*specs, *specs[:2]], strict=True)):
            parts = [exact_inputs(numel, torch.float64, rank + 3 * i) for rank in range(3)]
            assert_bitwise(wire.tensor, torch.stack(parts).sum(0).to(dtype), f"wire {i}")

    run_all_reduces(kind, 3, body)


@every_all_reduce_and_world
def test_all_reduces_in_two_threads_do_not_take_each_others_signals(kind: str, size: int) -> None:
    """Many in a row, with a delayed rank."""
    numel = 3000

    def inputs(rank: int, thread: int, turn: int) -> torch.Tensor:
        return exact_inputs(numel + turn % 2, torch.float32, (3 * rank + 7 * thread + turn) % 33)

    def body(rank: int, *all_reduces: AllReduce[Any]) -> list[list[str]]:
        wires = [all_reduce.open_wires([(numel + i, torch.float32) for i in (0, 1)]) for all_reduce in all_reduces]

        def drive(thread: int) -> list[str]:
            digests = []
            for turn in range(40):
                if rank == turn % size and turn % 8 == thread:
                    time.sleep(0.06 if turn < 16 else 0.01)  # or longer than others wait until they look after peers
                reduce(all_reduces[thread], wires[thread][turn % 2], inputs(rank, thread, turn))
                digests.append(digest(wires[thread][turn % 2].tensor))
            return digests

        with ThreadPoolExecutor(2) as threads:
            return list(threads.map(drive, range(2)))

    right = [
        [digest(torch.stack([inputs(rank, thread, turn) for rank in range(size)]).sum(0)) for turn in range(40)]
        for thread in range(2)
    ]
    assert len({*right[0], *right[1]}) > 60
    assert run_all_reduces(kind, size, body, num_all_reduces=2) == [right] * size


@pytest.fixture
def _one_suspect(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two ranks only one can be late or gone, so nobody need look for long whether another one is to blame."""
    monkeypatch.setattr(culprit_module, "_GRACE_SECONDS", 0.2)
    monkeypatch.setattr(culprit_module, "_STAY_SECONDS", 0.2)


@pytest.mark.usefixtures("_one_suspect")
@every_all_reduce
def test_a_rank_that_leaves_is_named(kind: str) -> None:
    def body(rank: int, all_reduce: AllReduce[Any]) -> Any:
        (wire,) = all_reduce.open_wires([(10, torch.float32)])
        reduce(all_reduce, wire)
        if rank == 1:
            return None  # its world is closed next
        with pytest.raises(PeerLostError) as caught:
            reduce(all_reduce, wire)
        return caught.value.peers

    assert run_all_reduces(kind, 2, body)[0] == (1,)


@pytest.mark.usefixtures("_one_suspect")
@every_all_reduce
def test_a_rank_that_does_not_come_is_named(kind: str) -> None:
    has_failed = threading.Event()

    def body(rank: int, all_reduce: AllReduce[Any]) -> Any:
        (wire,) = all_reduce.open_wires([(10, torch.float32)])
        if rank == 1:
            assert has_failed.wait(15.0)
            return None
        with pytest.raises(PeerTimeoutError) as caught:
            reduce(all_reduce, wire)
        has_failed.set()
        return caught.value.peers, caught.value.rank

    assert run_all_reduces(kind, 2, body, timeout_seconds=patient(0.4))[0] == ((1,), 0)


@every_all_reduce
def test_in_the_background_start_waits_for_nobody(kind: str) -> None:
    has_started = threading.Event()

    def body(rank: int, all_reduce: AllReduce[Any]) -> None:
        assert (all_reduce.algorithm, all_reduce.in_background) == (kind, kind != "direct")
        (wire,) = all_reduce.open_wires([(100, torch.float32)])
        before = time.perf_counter()
        if rank == 1:
            assert has_started.wait(10), "rank 0 waits for rank 1 in start()"
        pending = all_reduce.start(wire)
        has_started.set()
        assert not all_reduce.in_background or pending.advance(), "this rank's part proceeds by itself"
        pending.wait()
        if all_reduce.in_background:
            assert before <= pending.span[0] < pending.span[1] <= time.perf_counter()

    run_all_reduces(kind, 2, body)


# What one of them promises beyond the contract
@grid("dtype, size", DTYPES, WORLDS, keep=lambda dtype, size: size == 3)
def test_direct_adds_in_rank_order_whatever_the_layout(size: int, dtype: torch.dtype) -> None:
    """The same values at two places of buffers of two sizes give the same bits, those of a sum in rank order."""
    numel = 5000
    wide = torch.float32 if dtype.itemsize == 2 else dtype
    total = _random_inputs(0, numel, dtype).to(wide)
    for rank in range(1, size):
        total += _random_inputs(rank, numel, dtype).to(wide)

    def body(rank: int, all_reduce: AllReduce[Any]) -> None:
        for wire in all_reduce.open_wires([(numel, dtype), (3 * numel + 17, dtype)]):
            wire.tensor[-numel:] = _random_inputs(rank, numel, dtype)
            reduce(all_reduce, wire)
            assert_bitwise(wire.tensor[-numel:], total.to(dtype))

    run_all_reduces("direct", size, body)


# ---- pending reductions


@every_world
def test_a_rank_may_run_ahead_of_its_peers(size: int) -> None:
    """The last rank starts everything before any other starts anything, and has its part done when they come."""
    numels = [5, 3000, 200_000, 70]
    is_ahead = threading.Event()

    def body(rank: int, all_reduce: DirectAllReduce) -> None:
        wires, mine = all_reduce.open_wires([(numel, torch.float32) for numel in numels]), _inputs(torch.float32, rank)
        for wire, numel in zip(wires, numels, strict=True):
            wire.tensor.copy_(mine[:numel])
        if rank != size - 1:
            assert is_ahead.wait(15.0)
        pending = [all_reduce.start(wire) for wire in wires]
        if rank == size - 1:
            assert not pending[0].advance(), "its peers have not started"
            for wire, numel in zip(wires, numels, strict=True):
                assert_bitwise(wire.tensor, mine[:numel])
            is_ahead.set()
        for reduction in pending:
            reduction.wait()
        for wire, numel in zip(wires, numels, strict=True):
            assert_bitwise(wire.tensor, _sums(torch.float32, size)[:numel])

    run_all_reduces("direct", size, body)


def test_a_late_rank_finds_its_peers_part_done() -> None:
    """Nobody waits: after rank 0 has looked in, rank 1 lands at once though rank 0 is elsewhere."""
    has_started, has_looked, is_over = threading.Event(), threading.Event(), threading.Event()

    def body(rank: int, all_reduce: DirectAllReduce) -> None:
        (wire,) = all_reduce.open_wires([(1000, torch.float32)])
        wire.tensor.copy_(_inputs(torch.float32, rank)[:1000])
        reduction = all_reduce.start(wire)
        if rank == 0:
            assert has_started.wait(15.0)
            assert reduction.advance()
            assert reduction.advance(), "asking again does no harm"
            has_looked.set()
            assert is_over.wait(15.0)
        else:
            has_started.set()
            assert has_looked.wait(15.0)
        for _ in range(3):
            reduction.wait()
            reduction.advance(waits=True)
        is_over.set()
        assert_bitwise(wire.tensor, _sums(torch.float32, 2)[:1000])

    run_all_reduces("direct", 2, body)


@grid("count", [MAX_PENDING, MAX_PENDING + 1, 3 * MAX_PENDING + 5], keep=lambda count: count == MAX_PENDING + 1)
def test_more_reductions_than_there_are_records(count: int) -> None:
    def body(rank: int, all_reduce: DirectAllReduce) -> None:
        wires = all_reduce.open_wires([(40 + i, torch.float32) for i in range(count)])
        for i, wire in enumerate(wires):
            wire.tensor.copy_(_inputs(torch.float32, rank)[: 40 + i])
        for reduction in [all_reduce.start(wire) for wire in wires]:
            reduction.wait()
        for i, wire in enumerate(wires):
            assert_bitwise(wire.tensor, _sums(torch.float32, 2)[: 40 + i])

    run_all_reduces("direct", 2, body)


@pytest.mark.parametrize(
    ("kind", "size", "aborts"), [("direct", 2, False), ("hierarchical", 3, False), ("hierarchical", 3, True)]
)
def test_ranks_whose_nth_reductions_differ_are_told_which(kind: str, size: int, aborts: bool) -> None:
    """Rank 1 has left out the second of two, and begins again; or says that it has aborted the second."""

    def body(rank: int, all_reduce: Any) -> None:
        wires = all_reduce.open_wires([(100, torch.float32)] * 2)
        reduce(all_reduce, wires[0])
        begin = all_reduce.abort_bucket if aborts and rank == 1 else all_reduce.start
        work = begin(wires[0 if rank == 1 and not aborts else 1])
        with pytest.raises(PlanMismatchError, match="a backward was aborted on rank 1 after part of its gradients had"):
            work.wait()

    run_all_reduces(kind, size, body)


def test_threads_end_where_an_earlier_reduction_has_failed() -> None:
    """The second reduction waits for its turn. A thread that waited for ever would keep the shared memory."""
    has_started = threading.Event()

    def body(rank: int, all_reduce: AllReduce[Any]) -> None:
        wires = all_reduce.open_wires([(100, torch.float32)] * 2)
        if rank == 1:
            assert has_started.wait(10)
        pending = [all_reduce.start(wire) for wire in (wires if rank == 0 else reversed(wires))]
        if rank == 0:
            threads: Any = [all_reduce.ending, all_reduce.summing]  # type: ignore[attr-defined]
            wait_until(lambda: [thread._tasks.qsize() for thread in threads] == [1, 1], "both threads to begin")
            has_started.set()
        with pytest.raises(PlanMismatchError):
            pending[0].wait()

    run_all_reduces("hierarchical", 3, body)
    threads = [t for t in threading.enumerate() if t.name in ("torchring-sums", "torchring-ends")]
    for thread in threads:
        thread.join(20.0)
    assert not any(thread.is_alive() for thread in threads)
