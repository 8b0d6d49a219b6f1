"""One contract (`torchring/transport/contract.py`), two implementations: Gloo's and MPI's. And what only one has.

Bodies are functions of the module, so that ranks of an MPI job can run them.
"""

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import torchring
from tests.compression import test_hosts
from tests.support import mpi_job
from tests.support.checks import assert_bitwise, assert_same_on_all_ranks, exact_inputs
from tests.support.harness import RanksFailed, count_open_fds, patient, run_ranks, run_threads, wait_until
from tests.support.mpi_job import needs_mpi
from tests.support.training import Side, assert_as_one_process, momentum, small_model, train, values
from torchring.allreduce.native import NativeAllReduce
from torchring.compression import PowerSGD
from torchring.errors import PeerLostError, PeerTimeoutError, PlanMismatchError, RingError, TopologyError
from torchring.memory import host as host_module
from torchring.rendezvous.rendezvous import Rendezvous
from torchring.transport import c10d
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

job = mpi_job.MpiJob(3)
every_transport = pytest.mark.parametrize("kind", ["c10d", pytest.param("mpi", marks=needs_mpi)])


@pytest.fixture(scope="module", autouse=True)
def _job_ends() -> Iterator[None]:
    yield
    job.end()


def run_transports(kind: str, size: int, body: Callable[..., object], **how: Any) -> None:
    """body(meet, *transports) on every rank: in threads, or under MPI. `how`: see `_on_rank`."""

    def on_rank(rank: int, size: int, store: dist.Store) -> None:
        _on_rank(C10dTransport, rank, size, store, body, **how)

    if kind == "mpi":
        job.run(partial(_on_mpi_rank, body=body, **how), size)
    else:
        run_threads(on_rank, size)


def _on_mpi_rank(rank: int, store: dist.Store, communicator: Any, **how: Any) -> None:
    _on_rank(partial(MpiTransport, communicator=communicator), rank, communicator.size, store, **how)


def _on_rank(
    opens: Callable[..., Any],
    rank: int,
    size: int,
    store: dist.Store,
    body: Callable[..., object],
    num_streams: int = 1,
    timeout_seconds: float = 20.0,
    groups: Sequence[Sequence[int]] = (),
) -> None:
    """Each transport is of a world of its own, so that one that fails says nothing of the others. They are closed when
    all ranks have returned. `groups`: each rank's transport connects the ranks of its group."""
    group = next((group for group in groups if rank in group), None)
    transports = []
    for name in [f"stream{i}" for i in range(num_streams)]:
        world = Rendezvous(dist.PrefixStore(name, store), rank, size, timeout_seconds)
        transports.append(opens(world, name, ranks=group))
    meeting = Rendezvous(store, rank, size, 20.0)
    body(lambda: meeting.all_gather("meet", b""), *transports)
    meeting.all_gather("finished", b"")
    for transport in transports:
        transport.close()


def _sum(transport: Transport) -> float:
    total = torch.tensor([transport.rank + 1.0])
    transport.start_all_reduce(total).wait()
    return float(total)


# ---- the contract: what holds on every rank


def _knows_its_rank_and_its_peers(meet: Meet, transport: Transport) -> None:
    assert transport.ranks == (0, 1, 2)
    assert _sum(transport) == 6.0
    everybody = torch.zeros(3, dtype=torch.int64)
    everybody[transport.rank] = 1
    transport.start_all_reduce(everybody).wait()
    assert everybody.tolist() == [1, 1, 1]


def _transfers_match_in_their_order(meet: Meet, transport: Transport) -> None:
    tensors = [torch.full((5,), 100 * transport.rank + i) for i in range(20)]
    transfers = [transport.start_broadcast(tensor, i % 2) for i, tensor in enumerate(tensors)]
    for transfer in reversed(transfers):  # waiting in another order changes nothing
        transfer.wait()
    assert [tensor.tolist() for tensor in tensors] == [[100 * (i % 2) + i] * 5 for i in range(20)]


def _every_size(meet: Meet, transport: Transport) -> None:
    for num_bytes in (0, 1, 63, 64, 65, 65_537, MIB, 16 * MIB):

        def pattern(rank: int, num_bytes: int = num_bytes) -> torch.Tensor:
            period = torch.arange(251, dtype=torch.int64).mul(2 * rank + 3).remainder(251).to(torch.uint8)  # prime
            return period.repeat(num_bytes // 251 + 1)[:num_bytes]

        tensor = pattern(transport.rank)
        transport.start_broadcast(tensor, 1).wait()
        assert_bitwise(tensor, pattern(1), f"rank {transport.rank}, {num_bytes} bytes")


def _every_dtype_travels_bit_for_bit(meet: Meet, transport: Transport) -> None:
    def payload(rank: int, dtype: torch.dtype) -> torch.Tensor:
        generator = torch.Generator().manual_seed(7 * rank + 1)
        raw = torch.randint(0, 2 if dtype is torch.bool else 256, (64,), generator=generator, dtype=torch.uint8)
        return raw.view(dtype).reshape(2, -1)  # NaNs with odd payloads among them

    tensors = [payload(transport.rank, dtype) for dtype in DTYPES]
    for transfer in [transport.start_broadcast(tensor, 0) for tensor in tensors]:
        transfer.wait()
    for tensor in tensors:
        assert_bitwise(tensor, payload(0, tensor.dtype), str(tensor.dtype))


def _odd_shapes(meet: Meet, transport: Transport) -> None:
    """Without dimensions, and amid a buffer. With gaps, nothing is started."""
    rank = transport.rank
    scalar, buffer = torch.tensor(rank + 0.5), torch.full((5,), -1.0 - rank)
    with pytest.raises(ValueError, match="contiguous"):
        transport.start_broadcast(torch.zeros(4, 4).t()[1:], 0)
    for transfer in [transport.start_broadcast(scalar, 1), transport.start_broadcast(buffer[1:3], 0)]:
        transfer.wait()
    assert [float(scalar), *buffer.tolist()] == [1.5, -1.0 - rank, -1, -1, -1.0 - rank, -1.0 - rank]


def _every_row_reaches_its_rank(meet: Meet, transport: Transport) -> None:
    """And a rank that adds nothing keeps what it has."""
    rank, size = transport.rank, len(transport.ranks)
    for num_bytes in (0, 1, 65_537):
        mine = torch.tensor([[10 * rank + other] * num_bytes for other in range(size)], dtype=torch.uint8)
        swapped, gathered = torch.zeros(2, size, num_bytes, dtype=torch.uint8)
        for transfer in (transport.start_all_to_all(swapped, mine), transport.start_all_gather(gathered, mine[0])):
            transfer.wait()
        assert swapped.tolist() == [[10 * other + rank] * num_bytes for other in range(size)]
        assert gathered.tolist() == [[10 * other] * num_bytes for other in range(size)]
    tensor = torch.tensor([rank + 1.0])
    (transport.start_nothing if rank == 0 else transport.start_all_reduce)(tensor).wait()
    assert float(tensor) == (1.0 if rank == 0 else size * (size + 1) / 2 - 1)


def _threads(meet: Meet, *transports: Transport) -> None:
    def drive(thread: int, transport: Transport) -> None:
        for step in range(30):
            tensor = torch.full((1000,), 1000 * thread + step + 7 * transport.rank)
            transport.start_broadcast(tensor, 0).wait()
            assert int(tensor.min()) == int(tensor.max()) == 1000 * thread + step

    with ThreadPoolExecutor(3) as pool:
        for driven in [pool.submit(drive, *each) for each in enumerate(transports)]:
            driven.result()


def _sums_what_it_says_it_sums(meet: Meet, transport: Transport) -> None:
    size, summed = len(transport.ranks), [dtype for dtype in DTYPES if transport.sums(dtype)]
    assert {torch.float32, torch.float64, torch.int64, torch.float16, torch.bfloat16} <= set(summed)
    assert torch.complex64 not in summed
    for dtype in summed:
        if dtype is not torch.uint8:  # which holds no negative numbers; what wraps around is no sum
            total = exact_inputs(1001, dtype, transport.rank)
            transport.start_all_reduce(total).wait()
            expected = sum(exact_inputs(1001, dtype, rank).double() for rank in range(size))
            assert_bitwise(total, torch.as_tensor(expected).to(dtype), str(dtype))
    transport.start_all_reduce(torch.zeros(0)).wait()


def _groups_sum_apart(meet: Meet, transport: Transport) -> None:
    tensor = torch.full((1000,), float(transport.rank))
    transport.start_all_reduce(tensor).wait()
    assert float(tensor.mean()) == (1.0 if transport.rank == 1 else 2.0)


def _native_reduces_over_it(meet: Meet, transport: Transport) -> None:
    all_reduce = NativeAllReduce(transport)
    with pytest.raises(ValueError, match=f"{transport.engine} does not reduce torch.complex64 between hosts"):
        all_reduce.open_wires([(4, torch.float32), (4, torch.complex64)])
    (wire,) = all_reduce.open_wires([(5000, torch.float32)])
    wire.tensor.copy_(exact_inputs(5000, torch.float32, transport.rank))
    all_reduce.start(wire).wait()
    assert_bitwise(wire.tensor, torch.stack([exact_inputs(5000, torch.float32, rank) for rank in range(3)]).sum(0))
    meet()


def _time_outs_name_the_cause(meet: Meet, transport: Transport) -> None:
    if transport.rank != 1:
        started = time.monotonic()
        with pytest.raises(PeerTimeoutError) as caught:
            transport.start_all_reduce(torch.ones(1000)).wait()
        assert (caught.value.peers, caught.value.rank) == ((1,), transport.rank)
        assert 0.4 < (caught.value.seconds or 0.0) <= time.monotonic() - started < patient(4.0)
    meet()


def _an_error_that_one_rank_leaves_is_raised_by_who_waits_for_it(meet: Meet, transport: Transport) -> None:
    if transport.rank == 1:
        time.sleep(0.1)
        error = PlanMismatchError("the plans differ", peers=(2,))
        assert transport.fail(error) is error
    else:
        with pytest.raises(PlanMismatchError, match="rank 1 stopped: the plans differ") as caught:
            transport.start_all_reduce(torch.ones(4)).wait()
        assert caught.value.peers == (2,)
    meet()


def _who_waits_for_a_closed_transport_is_told(meet: Meet, transport: Transport) -> None:
    if transport.rank == 1:
        time.sleep(0.2)
        transport.close()
        with pytest.raises(PeerLostError):
            transport.start_broadcast(torch.zeros(1), 1)
        return
    started = time.monotonic()
    with pytest.raises(PeerLostError) as caught:
        transport.start_broadcast(torch.empty(4), 1).wait()
    assert caught.value.peers == (1,)
    assert 0.1 < time.monotonic() - started < patient(4.0)


def _closing_with_transfers_under_way(meet: Meet, first: Transport, second: Transport, third: Transport) -> None:
    """Neither has a counterpart, the second is too large for any buffer on the way, and a thread waits for another."""
    rank = first.rank
    transfers = [first.start_broadcast(torch.empty(8), 1 - rank), second.start_broadcast(torch.ones(4 * MIB), rank)]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(first.start_broadcast(torch.empty(8), 1 - rank).wait)
        time.sleep(0.2)
        meet()
        first.close()
        first.close()  # twice is once
        with pytest.raises(PeerLostError):
            waiting.result(10.0)
    second.close()
    for transfer in transfers:
        with pytest.raises(PeerLostError):
            transfer.wait()
    del transfers
    meet()
    assert _sum(third) == 3.0


def _who_is_in_the_midst_of_a_message_when_it_breaks_off_is_told(meet: Meet, *transports: Transport) -> None:
    """Whether the receiver closes its transport or the sender."""
    data = torch.ones(256 * MIB, dtype=torch.uint8)
    for closes, transport in enumerate(transports):
        meet()
        started = time.monotonic()
        with ThreadPoolExecutor(1) as pool:
            moving = pool.submit(transport.start_broadcast(data, 1).wait)
            if transport.rank == closes:
                time.sleep(0.04)
                transport.close()
            with contextlib.suppress(PeerLostError):  # it may have arrived before
                moving.result(15.0)
        assert time.monotonic() - started < patient(10.0)


_CONTRACT: list[tuple[Callable[..., object], int, dict[str, Any]]] = [
    (_knows_its_rank_and_its_peers, 3, {}),
    (_transfers_match_in_their_order, 2, {}),
    (_every_row_reaches_its_rank, 3, {}),
    (_every_size, 2, {}),
    (_every_dtype_travels_bit_for_bit, 2, {}),
    (_odd_shapes, 2, {}),
    (_threads, 2, {"num_streams": 3}),
    (_sums_what_it_says_it_sums, 2, {}),
    (_sums_what_it_says_it_sums, 3, {}),
    (_groups_sum_apart, 3, {"groups": ((0, 2), (1,))}),
    (_native_reduces_over_it, 3, {}),
    (_time_outs_name_the_cause, 3, {"timeout_seconds": patient(0.5)}),
    (_an_error_that_one_rank_leaves_is_raised_by_who_waits_for_it, 3, {}),
    (_who_waits_for_a_closed_transport_is_told, 2, {}),
    (_closing_with_transfers_under_way, 2, {"num_streams": 3}),
    (_who_is_in_the_midst_of_a_message_when_it_breaks_off_is_told, 2, {"num_streams": 2}),
]


@every_transport
@pytest.mark.parametrize(
    ("body", "size", "how"), [pytest.param(*case, id=f"{case[0].__name__}-{case[1]}") for case in _CONTRACT]
)
def test_contract(kind: str, body: Callable[..., object], size: int, how: dict[str, Any]) -> None:
    if kind == "mpi" and body is _who_is_in_the_midst_of_a_message_when_it_breaks_off_is_told:
        pytest.skip("MPI's sender cannot break one off")
    run_transports(kind, size, body, **how)


@every_transport
def test_closing_gives_back_every_descriptor(kind: str) -> None:
    if kind == "mpi":
        for before, after in job.run(_descriptors_under_mpi, 2):
            assert after <= before
        return
    run_transports(kind, 2, _every_dtype_travels_bit_for_bit)  # what is opened once per process
    before = count_open_fds()
    for _ in range(3):
        run_transports(kind, 2, _every_dtype_travels_bit_for_bit)
    wait_until(lambda: count_open_fds() <= before, "descriptors to be given back", 2.0)


def _descriptors_under_mpi(rank: int, store: dist.Store, communicator: Any) -> tuple[int, int]:
    counts = []
    for turn in range(4):
        of_turn = dist.PrefixStore(f"turn{turn}", store)
        _on_mpi_rank(rank, of_turn, communicator, body=_every_dtype_travels_bit_for_bit)
        counts.append(count_open_fds())
    return counts[0], counts[-1]


# ---- what only Gloo has: what `transport/gloo_links.py` relies on, in the words that are looked for there


def _gloo_threads() -> set[str]:
    """Of this process. Earlier tests may have left some that are about to end."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            found |= {task.name} if "gloo" in (task / "comm").read_text() else set()
    return found


def test_no_thread_of_gloos_is_left_when_the_interpreter_goes_down() -> None:
    """Such a thread may still have to drop a tensor, for which it needs the interpreter: SIGABRT."""
    before = _gloo_threads()
    barrier = threading.Barrier(2)

    def body(rank: int, size: int, store: dist.Store) -> Any:
        transport = C10dTransport(Rendezvous(store, rank, size, 20.0), "ending")
        transport.start_all_reduce(torch.ones(3)).wait()
        barrier.wait(20)
        during = _gloo_threads() - before
        barrier.wait(20)
        if rank == 0:
            c10d._let_go_at_exit()
        barrier.wait(20)
        return during

    during = set().union(*run_threads(body, 2))
    assert during
    assert not during & _gloo_threads()


# ---- what only MPI has: its launcher, its ranks, its thread levels, and its errors


def _crossed_ranks(rendezvous: Rendezvous, communicator: Any) -> None:
    crossed = Rendezvous(dist.PrefixStore("crossed", rendezvous.store), 1 - rendezvous.rank, 2, 20.0)
    MpiTransport(crossed, "stream", communicator=communicator)


def _without_mpi4py(rendezvous: Rendezvous, communicator: Any) -> None:
    with mock.patch.dict(sys.modules, {"mpi4py": None} if rendezvous.rank else {}):
        MpiTransport(rendezvous, "stream", communicator=communicator)


def _funneled(rendezvous: Rendezvous, communicator: Any) -> None:
    from mpi4py import MPI

    with mock.patch.object(MPI, "Query_thread", return_value=MPI.THREAD_FUNNELED):
        MpiTransport(rendezvous, "stream", communicator=communicator)


@needs_mpi
@pytest.mark.parametrize(
    ("opening", "says", "culprit"),
    [
        (_crossed_ranks, "rank 0 of this world of 2 is rank 1 of 2 in MPI", 0),
        (_without_mpi4py, r"rank 1 cannot load MPI.*pip install torchring\[mpi\]", 1),
        (_funneled, r"mpi4py\.rc\.thread_level = 'multiple'", 0),
    ],
)
def test_a_rank_that_mpi_does_not_fit_is_named_on_all_of_them(opening: Any, says: str, culprit: int) -> None:
    for text, peers in job.run(partial(_refused, opening=opening), 2):
        assert re.search(says, text), text
        assert peers == (culprit,)


def _refused(rank: int, store: dist.Store, communicator: Any, opening: Any) -> Any:
    with pytest.raises(TopologyError) as caught:
        opening(Rendezvous(store, rank, 2, 20.0), communicator)
    Rendezvous(store, rank, 2, 20.0).all_gather("finished", b"")
    return str(caught.value), caught.value.peers


@needs_mpi
def test_an_error_of_mpis_is_a_ring_error() -> None:
    run_transports("mpi", 2, _without_a_root)


def _without_a_root(meet: Meet, transport: Any) -> None:
    data = torch.ones(8)
    if transport.rank == 0:  # another rank that fails after it would name it
        with pytest.raises(RingError, match=r"(?i)MPI reports.*ROOT"):
            transport._start(lambda: transport._communicator.Ibcast(transport._buffer(data), 99), data)
    meet()


_SCRIPT_THAT_RAISES = """
import os, signal, sys, time
import torch, torch.distributed as dist
from mpi4py import MPI
from torchring.transport.mpi import MpiTransport
from torchring.world import World
rank = MPI.COMM_WORLD.rank
world = World(dist.FileStore(os.environ["TESTS_STORE"]), rank, 2, timeout_seconds=100.0)
transport = MpiTransport(world.rendezvous, "stream", world.host)
if rank == 0:
    raise KeyError("of the script")
transport.start_all_reduce(torch.ones(4)).wait()
"""


@needs_mpi
def test_a_script_that_stops_stops_the_others(tmp_path: Path) -> None:
    """MPI_Finalize waits for all: without a goodbye the one would wait there, and the other one for its message."""
    (tmp_path / "script.py").write_text(_SCRIPT_THAT_RAISES)
    process = mpi_job.mpirun([tmp_path / "script.py"], 2, env={"TESTS_STORE": str(tmp_path / "store")})
    try:
        output, _ = process.communicate(timeout=patient(60.0))  # less than the world's time-out
    except subprocess.TimeoutExpired:
        mpi_job.stop(process)
        raise
    assert process.returncode != 0, output
    for said in ("KeyError: 'of the script'", "PeerLostError: rank 0"):
        assert said in output


def _script(side: Side) -> list[torch.Tensor]:
    model = small_model()
    train(side, model, side.wrap(momentum(model), model, algorithm="native"), range(5))
    return values(model)


@needs_mpi
def test_training_over_mpi_is_training_in_one_process() -> None:
    assert_as_one_process(_script, world_size=job.num_ranks, run=lambda *_: job.run(_train_over_mpi, job.num_ranks))
    found = job.run(_compress_over_mpi, job.num_ranks)
    way = found[0][0] - test_hosts._weights(test_hosts._model())
    for number, most in ((1, 0.03), (2, 0.7)):
        assert_same_on_all_ranks([each[number] for each in found])
        assert 0 < (found[0][number] - found[0][0]).norm() / way.norm() < most


def _compress_over_mpi(rank: int, store: dist.Store, communicator: Any) -> list[torch.Tensor]:
    host = mock.patch.object(host_module, "_host_identity", return_value=f"host {rank % 2}")
    with host, mock.patch.dict(os.environ):
        del os.environ["OMPI_COMM_WORLD_LOCAL_SIZE"]  # which says that all ranks are on one host
        torchring.init(backend="mpi")
    found = [test_hosts._train(rank, kind) for kind in (None, "int8", PowerSGD(2, 3))]
    assert ["compressed" in stats.reason for _, stats in found] == [False, True, True]
    torchring.shutdown()
    return [weights for weights, _ in found]


def _train_over_mpi(rank: int, store: dist.Store, communicator: Any) -> list[torch.Tensor]:
    start = MpiTransport.start_all_reduce
    with mock.patch.object(MpiTransport, "start_all_reduce", autospec=True, side_effect=start) as summed:
        torchring.init(backend="mpi")
        assert (torchring.rank(), torchring.size()) == (rank, communicator.size)
        parameters = _script(Side((rank,), True))
        torchring.shutdown()
    assert summed.called, "nothing went through MPI"
    return parameters


# ---- the last with this MPI job: one that fails in it, and one that dies


@needs_mpi
def test_the_job_tells_which_rank_failed_and_why() -> None:
    with pytest.raises(RanksFailed) as caught:
        job.run(_fails_on_rank_1, 2)
    assert [report.failed for report in caught.value.reports] == [False, True]
    assert "rank 1: ValueError: on purpose" in str(caught.value)


def _fails_on_rank_1(rank: int, store: dist.Store, communicator: Any) -> None:
    if rank == 1:
        raise ValueError("on purpose")


@every_transport
def test_the_death_of_a_peer_names_it(kind: str) -> None:
    if kind == "c10d":
        *survivors, died = run_ranks(_wait_for_the_dying, 3, expect_exit={2: -signal.SIGKILL})
    else:
        *survivors, died = job.run(_wait_for_the_dying_under_mpi, 3, dies=2)
    assert died is None
    for peers, seconds in survivors:
        assert peers == (2,)
        assert seconds < patient(4.0)


def _wait_for_the_dying(rank: int, size: int) -> Any:
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    return _wait(C10dTransport(Rendezvous(store, rank, size, 20.0), "stream"), dies=rank == 2)


def _wait_for_the_dying_under_mpi(rank: int, store: dist.Store, communicator: Any) -> Any:
    world = World(store, rank, communicator.size, timeout_seconds=20.0)  # which knows who on this host lives
    assert world.rendezvous is not None
    return _wait(MpiTransport(world.rendezvous, "stream", world.host, communicator=communicator), dies=rank == 2)


def _wait(transport: Transport, dies: bool = False) -> Any:
    if dies:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(PeerLostError) as caught:
        transport.start_all_reduce(torch.ones(4)).wait()
    seconds = time.monotonic() - started
    transport.close()
    return caught.value.peers, seconds
