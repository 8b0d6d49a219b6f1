"""One contract (`torchring/transport/contract.py`), three implementations: the fake of the tests, Gloo's, and MPI's.

Bodies are functions of the module, so that the ranks of an MPI job can be told to run them.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support import mpi_job
from tests.support.checks import assert_bitwise, exact_inputs
from tests.support.fakes import FakeNetwork
from tests.support.harness import count_open_fds, patient, run_ranks, run_threads
from tests.support.mpi_job import job, job_ends  # noqa: F401  # a fixture
from torchring.allreduce.native import NativeAllReduce
from torchring.errors import PeerLostError, PeerTimeoutError, PlanMismatchError
from torchring.rendezvous.rendezvous import Rendezvous
from torchring.transport.c10d import C10dTransport
from torchring.transport.contract import Transport
from torchring.transport.mpi import MpiTransport
from torchring.world import World

MIB = 2**20
DTYPES = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.bool,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float8_e4m3fn,
)  # fmt: skip

Meet = Callable[[], object]  # a barrier of the ranks that no transport takes part in

needs_mpi = pytest.mark.skipif(bool(mpi_job.MISSING), reason=mpi_job.MISSING)
pytestmark = pytest.mark.parametrize("kind", ["fake", "c10d", pytest.param("mpi", marks=needs_mpi)])


def run_transports(
    kind: str,
    size: int,
    body: Callable[..., Any],
    *,
    num_streams: int = 1,
    timeout_seconds: float = 20.0,
    groups: Sequence[Sequence[int]] = (),
) -> list[Any]:
    """body(meet, *transports) on every rank: in threads, or under MPI; closed when all ranks have returned.

    Each transport is of a world of its own, so that one that fails says nothing of the others.

    Args:
        groups: each rank's transport connects the ranks of its group.
    """
    names = [f"stream{i}" for i in range(num_streams)]
    if kind == "mpi":
        return job.run(
            partial(_on_mpi_rank, body=body, names=names, timeout_seconds=timeout_seconds, groups=groups), size
        )
    network = FakeNetwork(size, timeout_seconds)

    def on_rank(rank: int, size: int, store: dist.Store) -> Any:
        worlds = [Rendezvous(dist.PrefixStore(name, store), rank, size, timeout_seconds) for name in names]
        transports = [
            network.transport(rank, name)
            if kind == "fake"
            else C10dTransport(world, name, ranks=_group_of(rank, groups))
            for world, name in zip(worlds, names, strict=True)
        ]
        return _run_and_close(body, Rendezvous(store, rank, size, 20.0), transports)

    return run_threads(on_rank, size)


def _on_mpi_rank(
    rank: int,
    store: dist.Store,
    communicator: Any,
    body: Callable[..., Any],
    names: list[str],
    timeout_seconds: float,
    groups: Sequence[Sequence[int]] = (),
) -> Any:
    worlds = [Rendezvous(dist.PrefixStore(name, store), rank, communicator.size, timeout_seconds) for name in names]
    transports = [
        MpiTransport(world, name, ranks=_group_of(rank, groups), communicator=communicator)
        for world, name in zip(worlds, names, strict=True)
    ]
    return _run_and_close(body, Rendezvous(store, rank, communicator.size, 20.0), transports)


def _group_of(rank: int, groups: Sequence[Sequence[int]]) -> Sequence[int] | None:
    return next((group for group in groups if rank in group), None)


def _run_and_close(body: Callable[..., Any], meeting: Rendezvous, transports: list[Any]) -> Any:
    result = body(lambda: meeting.all_gather("meet", b""), *transports)
    meeting.all_gather("finished", b"")
    for transport in transports:
        transport.close()
    return result


# ---- broadcasts


def _rank_and_size(_: Meet, transport: Transport) -> tuple[int, int]:
    return transport.rank, len(transport.ranks)


def _in_order(_: Meet, transport: Transport) -> list[int]:
    """From both ranks in turn."""
    tensors = [torch.full((5,), 100 * transport.rank + i) for i in range(20)]
    transfers = [transport.start_broadcast(tensor, i % 2) for i, tensor in enumerate(tensors)]
    for transfer in reversed(transfers):  # waiting in another order changes nothing
        transfer.wait()
    return [int(tensor[0]) if bool((tensor == tensor[0]).all()) else -1 for tensor in tensors]


def test_sizes(kind: str) -> None:
    run_transports(kind, 2, _of_every_size)


def _of_every_size(_: Meet, transport: Transport) -> None:
    for num_bytes in (0, 1, 63, 64, 65, 65_537, MIB, 64 * MIB):

        def pattern(rank: int, num_bytes: int = num_bytes) -> torch.Tensor:
            period = torch.arange(251, dtype=torch.int64).mul(2 * rank + 3).remainder(251).to(torch.uint8)  # prime
            return period.repeat(num_bytes // 251 + 1)[:num_bytes]

        tensor = pattern(transport.rank)
        transport.start_broadcast(tensor, 1).wait()
        assert_bitwise(tensor, pattern(1), f"rank {transport.rank}, {num_bytes} bytes")


def test_every_dtype_travels_bit_for_bit(kind: str) -> None:
    for rank, tensors in enumerate(run_transports(kind, 2, _of_every_dtype)):
        for tensor, dtype in zip(tensors, DTYPES, strict=True):
            assert_bitwise(tensor, _payload(0, dtype), f"rank {rank} {dtype}")


def _payload(rank: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7 * rank + 1)
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (64,), generator=generator, dtype=torch.uint8)
    return raw.view(dtype).reshape(2, -1)  # NaNs with odd payloads among them


def _of_every_dtype(_: Meet, transport: Transport) -> list[torch.Tensor]:
    tensors = [_payload(transport.rank, dtype) for dtype in DTYPES]
    for transfer in [transport.start_broadcast(tensor, 0) for tensor in tensors]:
        transfer.wait()
    return tensors


def _odd_shapes(_: Meet, transport: Transport) -> list[float]:
    """Without dimensions, and amid a buffer."""
    rank = transport.rank
    scalar, buffer = torch.tensor(rank + 0.5), torch.full((5,), -1.0 - rank)
    for transfer in [transport.start_broadcast(scalar, 1), transport.start_broadcast(buffer[1:3], 0)]:
        transfer.wait()
    return [float(scalar), *buffer.tolist()]


def _do_not_mix(_: Meet, *transports: Transport) -> list[int]:
    tensors = [torch.tensor([100 * transport.rank + i]) for i, transport in enumerate(transports)]
    # Rank 1 begins with the last, so a shared link would cross them.
    order = list(enumerate(transports))[:: -1 if transports[0].rank else 1]
    for transfer in [transport.start_broadcast(tensors[i], 1) for i, transport in order]:
        transfer.wait()
    return [int(tensor) for tensor in tensors]


def _in_threads(_: Meet, *transports: Transport) -> list[list[int]]:
    seen: list[list[int]] = [[] for _ in range(3)]

    def drive(thread: int) -> None:
        transport = transports[thread]
        for step in range(30):
            tensor = torch.full((1000,), 1000 * thread + step + 7 * transport.rank)
            transport.start_broadcast(tensor, 0).wait()
            seen[thread].append(int(tensor.min()))
            assert int(tensor.min()) == int(tensor.max())

    threads = [threading.Thread(target=drive, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return seen


def _with_gaps(_: Meet, transport: Transport) -> float:
    gaps = torch.zeros(4, 4).t()[1:]
    with pytest.raises(ValueError, match="contiguous"):
        transport.start_broadcast(gaps, 0)
    return _sum(transport)  # and nothing was started by it


def _sum(transport: Transport) -> float:
    total = torch.tensor([transport.rank + 1.0])
    transport.start_all_reduce(total).wait()
    return float(total)


# ---- the engine's own sum


@pytest.mark.parametrize("size", [2, 3])
def test_all_reduce_sums_what_it_says_it_sums(kind: str, size: int) -> None:
    results = run_transports(kind, size, _sums)
    for dtype, dtypes_sum in results[0].items():
        expected = sum(exact_inputs(1001, dtype, rank).double() for rank in range(size))
        assert_bitwise(dtypes_sum, torch.as_tensor(expected).to(dtype), str(dtype))
        for result in results[1:]:
            assert_bitwise(result[dtype], dtypes_sum, str(dtype))
    assert {torch.float32, torch.float64, torch.int64, torch.float16, torch.bfloat16} <= results[0].keys()
    assert torch.complex64 not in results[0]


def _sums(_: Meet, transport: Transport) -> dict[torch.dtype, torch.Tensor]:
    results = {}
    for dtype in DTYPES:
        # uint8 holds no negative numbers; what wraps around is no sum.
        if dtype is not torch.uint8 and transport.sums(dtype):
            results[dtype] = exact_inputs(1001, dtype, transport.rank)
            transport.start_all_reduce(results[dtype]).wait()
    transport.start_all_reduce(torch.zeros(0)).wait()
    return results


def test_groups_sum_apart(kind: str) -> None:
    if kind == "fake":
        pytest.skip("the fake connects all ranks")
    assert run_transports(kind, 3, _sum_of_ranks, groups=((0, 2), (1,))) == [2.0, 1.0, 2.0]


def _sum_of_ranks(_: Meet, transport: Transport) -> float:
    tensor = torch.full((1000,), float(transport.rank))
    transport.start_all_reduce(tensor).wait()
    return float(tensor.mean())


def test_native_reduces_over_every_transport(kind: str) -> None:
    for result in run_transports(kind, 3, _native):
        expected = [exact_inputs(5000, torch.float32, rank) for rank in range(3)]
        assert_bitwise(result, torch.stack(expected).sum(0))


def _native(meet: Meet, transport: Transport) -> Any:
    all_reduce = NativeAllReduce(transport)
    with pytest.raises(ValueError, match=f"{transport.engine} does not reduce torch.complex64 between hosts"):
        all_reduce.open_wires([(4, torch.float32), (4, torch.complex64)])
    (wire,) = all_reduce.open_wires([(5000, torch.float32)])
    wire.tensor.copy_(exact_inputs(5000, torch.float32, transport.rank))
    all_reduce.start(wire).wait()
    meet()
    return wire.tensor


# ---- failures


def test_time_outs_name_the_cause(kind: str) -> None:
    peers, rank, seconds, elapsed = run_transports(kind, 3, _missing_in_a_sum, timeout_seconds=0.5)[0]
    assert peers == (1,)
    assert rank == 0
    assert 0.4 < seconds <= elapsed < patient(4.0)


def _missing_in_a_sum(meet: Meet, transport: Transport) -> Any:
    result = None
    if transport.rank != 1:
        started = time.monotonic()
        with pytest.raises(PeerTimeoutError) as caught:
            transport.start_all_reduce(torch.ones(1000)).wait()
        result = caught.value.peers, caught.value.rank, caught.value.seconds, time.monotonic() - started
    meet()
    return result


def test_an_error_that_one_rank_leaves_is_raised_by_who_waits_for_it(kind: str) -> None:
    if kind == "fake":
        pytest.skip("the fake passes no words on")
    text, peers = run_transports(kind, 3, _leave_an_error)[0]
    assert "rank 1 stopped: the plans differ" in text
    assert peers == (2,)


def _leave_an_error(meet: Meet, transport: Transport) -> Any:
    result = None
    if transport.rank == 1:
        time.sleep(0.1)
        error = PlanMismatchError("the plans differ", peers=(2,))
        assert transport.fail(error) is error
    else:
        with pytest.raises(PlanMismatchError) as caught:
            transport.start_all_reduce(torch.ones(4)).wait()
        result = str(caught.value), caught.value.peers
    meet()
    return result


def test_who_waits_for_a_closed_transport_is_told(kind: str) -> None:
    peers, seconds = run_transports(kind, 2, _peer_closes)[0]
    assert peers == (1,)
    assert 0.1 < seconds < patient(4.0)


def _peer_closes(_: Meet, transport: Transport) -> Any:
    if transport.rank == 1:
        time.sleep(0.2)
        transport.close()
        with pytest.raises(PeerLostError):
            transport.start_broadcast(torch.zeros(1), 1)
        return None
    started = time.monotonic()
    with pytest.raises(PeerLostError) as caught:
        transport.start_broadcast(torch.empty(4), 1).wait()
    return caught.value.peers, time.monotonic() - started


def _close_one(_: Meet, first: Transport, second: Transport) -> float:
    first.close()
    first.close()  # twice is once
    return _sum(second)


def _close_in_the_middle(meet: Meet, first: Transport, second: Transport, third: Transport) -> float:
    # Neither has a counterpart, and the second is too large for any buffer on the way.
    rank = first.rank
    transfers = [first.start_broadcast(torch.empty(8), 1 - rank), second.start_broadcast(torch.ones(4 * MIB), rank)]
    meet()
    first.close()
    second.close()
    for transfer in transfers:
        with pytest.raises(PeerLostError):
            transfer.wait()
    del transfers
    meet()
    return _sum(third)


def _close_under_a_thread(meet: Meet, transport: Transport) -> str:
    ended: list[str] = []

    def wait() -> None:
        try:
            transport.start_broadcast(torch.empty(8), 1 - transport.rank).wait()
        except PeerLostError as error:
            ended.append(type(error).__name__)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.2)
    meet()
    transport.close()
    thread.join(10.0)
    return ended[0] if ended else "still waits"


def test_who_is_in_the_midst_of_a_message_when_it_breaks_off_is_told(kind: str) -> None:
    if kind != "c10d":
        pytest.skip("the fake's messages are there at once, MPI's sender cannot break one off")
    for closes in (0, 1):
        other, seconds = run_transports(kind, 2, partial(_break_off, closes=closes))[1 - closes]
        assert other in ("PeerLostError", "arrived")  # before the end came
        assert seconds < patient(10.0)


def _break_off(meet: Meet, transport: Transport, closes: int) -> tuple[str, float]:
    data = torch.ones(256 * MIB, dtype=torch.uint8)
    ended: list[str] = []

    def move() -> None:
        try:
            transport.start_broadcast(data, 1).wait()
            ended.append("arrived")
        except PeerLostError as error:
            ended.append(type(error).__name__)

    meet()
    started = time.monotonic()
    thread = threading.Thread(target=move)
    thread.start()
    if transport.rank == closes:
        time.sleep(0.04)
        transport.close()
    thread.join(15.0)
    return (ended or ["still waits"])[0], time.monotonic() - started


def test_the_death_of_a_peer_names_it(kind: str) -> None:
    if kind == "c10d":
        died, *survivors = run_ranks(_wait_for_the_dying, 3, expect_exit={0: -signal.SIGKILL})
        assert died is None
    elif kind == "mpi":
        # Unless told so, mpirun ends the other ranks, too.
        with mpi_job.MpiJob(3, options=("--runtime-options", "continuous")) as own_job:
            died, *survivors = own_job.run(_wait_for_the_dying_under_mpi, 3, dies=0)
        assert died is None
    else:
        network = FakeNetwork(3)

        def on_rank(rank: int, size: int, _: dist.Store) -> Any:
            if rank == 0:
                time.sleep(0.2)
                return network.kill(0)
            return _wait(network.transport(rank))

        survivors = run_threads(on_rank, 3)[1:]
    for peers, seconds in survivors:
        assert peers == (0,)
        assert seconds < patient(4.0)


def _wait_for_the_dying(rank: int, size: int) -> Any:
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    transport = C10dTransport(Rendezvous(store, rank, size, 20.0), "stream")
    if rank == 0:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    return _wait(transport)


def _wait_for_the_dying_under_mpi(rank: int, store: dist.Store, communicator: Any) -> Any:
    world = World(store, rank, communicator.size, timeout_seconds=20.0)  # which knows who on this host lives
    assert world.rendezvous is not None
    transport = MpiTransport(world.rendezvous, "stream", world.host, communicator=communicator)
    if rank == 0:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    return _wait(transport)


def _wait(transport: Transport) -> Any:
    started = time.monotonic()
    with pytest.raises(PeerLostError) as caught:
        transport.start_all_reduce(torch.ones(4)).wait()
    seconds = time.monotonic() - started
    transport.close()
    return caught.value.peers, seconds


_STEPS = [[1000 * thread + step for step in range(30)] for thread in range(3)]


@pytest.mark.parametrize(
    ("body", "num_streams", "expected"),
    [
        pytest.param(_rank_and_size, 1, [(0, 2), (1, 2)], id="rank and size"),
        pytest.param(_rank_and_size, 1, [(0, 3), (1, 3), (2, 3)], id="rank and size of three"),
        pytest.param(_in_order, 1, [[100 * (i % 2) + i for i in range(20)]] * 2, id="transfers match in their order"),
        pytest.param(_odd_shapes, 1, [[1.5, -1, -1, -1, -1, -1], [1.5, -2, -1, -1, -2, -2]], id="odd shapes"),
        pytest.param(_do_not_mix, 3, [[100, 101, 102]] * 2, id="several at once do not mix"),
        pytest.param(_in_threads, 3, [_STEPS] * 2, id="threads"),
        pytest.param(_with_gaps, 1, [3.0] * 2, id="tensors with gaps are refused"),
        pytest.param(_close_one, 2, [3.0] * 2, id="closing one leaves the others open"),
        pytest.param(_close_in_the_middle, 3, [3.0] * 2, id="closing with transfers under way"),
        pytest.param(_close_under_a_thread, 1, ["PeerLostError"] * 2, id="closing while a thread waits"),
    ],
)
def test_what_each_rank_sees(kind: str, body: Callable[..., Any], num_streams: int, expected: list[Any]) -> None:
    assert run_transports(kind, len(expected), body, num_streams=num_streams) == expected


def test_closing_gives_back_every_descriptor(kind: str) -> None:
    if kind == "mpi":
        for before, after in job.run(_descriptors_under_mpi, 2):
            assert after <= before
        return
    run_transports(kind, 2, _use)  # what is opened once per process
    before = count_open_fds()
    for _ in range(3):
        run_transports(kind, 2, _use)
    end = time.monotonic() + 2.0
    while count_open_fds() > before and time.monotonic() < end:
        time.sleep(0.02)
    assert count_open_fds() <= before


def _descriptors_under_mpi(rank: int, store: dist.Store, communicator: Any) -> tuple[int, int]:
    counts = []
    for turn in range(4):
        _on_mpi_rank(rank, dist.PrefixStore(f"turn{turn}", store), communicator, _use, ["stream"], 20.0)
        counts.append(count_open_fds())
    return counts[0], counts[-1]


def _use(_: Meet, transport: Transport) -> None:
    transport.start_broadcast(exact_inputs(8, torch.float32, transport.rank), 0).wait()
