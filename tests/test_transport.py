"""One contract (`torchring/transport/__init__.py`), two implementations: the fake of the tests, and Gloo's."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checks import assert_bitwise, exact_inputs
from fakes import FakeNetwork
from harness import count_open_fds, run_ranks, run_threads

from torchring.errors import PeerLostError, PeerTimeoutError
from torchring.rendezvous import Rendezvous
from torchring.transport import Transport
from torchring.transport.c10d import C10dTransport

KINDS = ("fake", "c10d")
MIB = 2**20
DTYPES = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.bool,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float8_e4m3fn,
)  # fmt: skip

pytestmark = pytest.mark.parametrize("kind", KINDS)


def run_transports(
    kind: str, size: int, body: Callable[..., Any], *, num_streams: int = 1, timeout_seconds: float = 20.0
) -> list[Any]:
    """body(rank, *transports) on every rank, in threads; transports are closed when all ranks have returned."""
    network = FakeNetwork(size, timeout_seconds)
    finished = threading.Barrier(size)

    def on_rank(rank: int, size: int, store: dist.Store) -> Any:
        rendezvous = Rendezvous(store, rank, size, timeout_seconds)
        names = [f"stream{i}" for i in range(num_streams)]
        transports: list[Transport] = [
            network.transport(rank, name) if kind == "fake" else C10dTransport(rendezvous, name) for name in names
        ]
        result = body(rank, *transports)
        finished.wait(20.0)
        for transport in transports:
            transport.close()
        return result

    return run_threads(on_rank, size)


@pytest.mark.parametrize("size", [2, 3])
def test_rank_and_size(kind: str, size: int) -> None:
    assert run_transports(kind, size, lambda _, t: (t.rank, t.size)) == [(rank, size) for rank in range(size)]


def test_transfers_match_in_the_order_in_which_they_were_started(kind: str) -> None:
    def body(rank: int, transport: Transport) -> list[int]:
        peer = 1 - rank
        outgoing = [torch.full((5,), 100 * rank + i) for i in range(20)]
        incoming = [torch.zeros(5, dtype=torch.int64) for _ in range(20)]
        if rank:  # one side posts receives first, the other one sends
            receiving = [transport.receive(tensor, peer) for tensor in incoming]
            sending = [transport.send(tensor, peer) for tensor in outgoing]
        else:
            sending = [transport.send(tensor, peer) for tensor in outgoing]
            receiving = [transport.receive(tensor, peer) for tensor in incoming]
        for transfer in reversed([*receiving, *sending]):  # waiting in another order changes nothing
            transfer.wait()
        return [int(tensor[0]) if bool((tensor == tensor[0]).all()) else -1 for tensor in incoming]

    assert run_transports(kind, 2, body) == [list(range(100, 120)), list(range(20))]


@pytest.mark.parametrize("num_bytes", [0, 1, 63, 64, 65, 65_537, MIB, 64 * MIB])
def test_sizes(kind: str, num_bytes: int) -> None:
    def pattern(rank: int) -> torch.Tensor:
        period = torch.arange(251, dtype=torch.int64).mul(2 * rank + 3).remainder(251).to(torch.uint8)  # prime
        return period.repeat(num_bytes // 251 + 1)[:num_bytes]

    def body(rank: int, transport: Transport) -> torch.Tensor:
        incoming = torch.full((num_bytes,), 255, dtype=torch.uint8)
        receiving = transport.receive(incoming, 1 - rank)
        sending = transport.send(pattern(rank), 1 - rank)
        receiving.wait()
        sending.wait()
        return incoming

    for rank, incoming in enumerate(run_transports(kind, 2, body)):
        assert_bitwise(incoming, pattern(1 - rank), f"rank {rank}")


def test_every_dtype_travels_bit_for_bit(kind: str) -> None:
    def payload(rank: int, dtype: torch.dtype) -> torch.Tensor:
        generator = torch.Generator().manual_seed(7 * rank + 1)
        raw = torch.randint(0, 2 if dtype is torch.bool else 256, (64,), generator=generator, dtype=torch.uint8)
        return raw.view(dtype).reshape(2, -1)  # NaNs with odd payloads among them

    def body(rank: int, transport: Transport) -> list[torch.Tensor]:
        incoming = [torch.zeros_like(payload(rank, dtype)) for dtype in DTYPES]
        receiving = [transport.receive(tensor, 1 - rank) for tensor in incoming]
        sending = [transport.send(payload(rank, dtype), 1 - rank) for dtype in DTYPES]
        for transfer in receiving + sending:
            transfer.wait()
        return incoming

    for rank, incoming in enumerate(run_transports(kind, 2, body)):
        for tensor, dtype in zip(incoming, DTYPES, strict=True):
            assert_bitwise(tensor, payload(1 - rank, dtype), f"rank {rank} {dtype}")


def test_zero_dim_and_offset_tensors(kind: str) -> None:
    def body(rank: int, transport: Transport) -> tuple[torch.Tensor, torch.Tensor]:
        scalar, buffer = torch.tensor(0.0), torch.full((10,), -1.0)
        receiving = [transport.receive(scalar, 1 - rank), transport.receive(buffer[3:7], 1 - rank)]
        sending = [transport.send(torch.tensor(rank + 0.5), 1 - rank)]
        sending.append(transport.send((torch.arange(10.0) + 10 * rank)[2:6], 1 - rank))
        for transfer in receiving + sending:
            transfer.wait()
        return scalar, buffer

    (scalar, buffer), _ = run_transports(kind, 2, body)
    assert_bitwise(scalar, torch.tensor(1.5))
    assert_bitwise(buffer, torch.tensor([-1.0] * 3 + [12.0, 13.0, 14.0, 15.0] + [-1.0] * 3))


def test_a_ring_of_five(kind: str) -> None:
    def body(rank: int, transport: Transport) -> list[int]:
        token, seen = torch.tensor([rank]), []
        for _ in range(5):
            incoming = torch.empty_like(token)
            receiving = transport.receive(incoming, (rank - 1) % 5)
            transport.send(token, (rank + 1) % 5).wait()
            receiving.wait()
            token = incoming
            seen.append(int(token))
        return seen

    expected = [[(rank - 1 - step) % 5 for step in range(5)] for rank in range(5)]
    assert run_transports(kind, 5, body) == expected


def test_several_transports_at_once_do_not_mix(kind: str) -> None:
    def body(rank: int, *transports: Transport) -> list[int]:
        incoming = [torch.zeros(1, dtype=torch.int64) for _ in transports]
        receiving = [t.receive(target, 1 - rank) for t, target in zip(transports, incoming, strict=True)]
        # Rank 1 sends in the opposite order, so a shared link would cross them.
        order = list(enumerate(transports))[:: -1 if rank else 1]
        sending = [t.send(torch.tensor([100 * rank + i]), 1 - rank) for i, t in order]
        for transfer in receiving + sending:
            transfer.wait()
        return [int(tensor) for tensor in incoming]

    assert run_transports(kind, 2, body, num_streams=3) == [[100, 101, 102], [0, 1, 2]]


def test_threads_may_drive_a_transport_each(kind: str) -> None:
    def body(rank: int, *transports: Transport) -> list[list[int]]:
        seen: list[list[int]] = [[] for _ in transports]

        def drive(index: int) -> None:
            for step in range(30):
                incoming = torch.empty(1000, dtype=torch.int64)
                receiving = transports[index].receive(incoming, 1 - rank)
                transports[index].send(torch.full((1000,), 1000 * index + step), 1 - rank).wait()
                receiving.wait()
                seen[index].append(int(incoming.min()))
                assert int(incoming.min()) == int(incoming.max())

        threads = [threading.Thread(target=drive, args=(i,)) for i in range(len(transports))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return seen

    expected = [list(range(30)), list(range(1000, 1030))]
    assert run_transports(kind, 2, body, num_streams=2) == [expected, expected]


def test_tensors_with_gaps_are_refused(kind: str) -> None:
    def body(rank: int, transport: Transport) -> float:
        gaps = torch.zeros(4, 4).t()[1:]
        with pytest.raises(ValueError, match="contiguous"):
            transport.send(gaps, 1 - rank)
        with pytest.raises(ValueError, match="contiguous"):
            transport.receive(gaps, 1 - rank)
        incoming = torch.zeros(1)  # and nothing was started by it
        receiving = transport.receive(incoming, 1 - rank)
        transport.send(torch.tensor([rank + 1.0]), 1 - rank).wait()
        receiving.wait()
        return float(incoming)

    assert run_transports(kind, 2, body) == [2.0, 1.0]


def test_a_time_out_names_the_peer(kind: str) -> None:
    has_failed = threading.Event()

    def body(rank: int, transport: Transport) -> Any:
        if rank != 0:
            assert has_failed.wait(15.0)
            return None
        started = time.monotonic()
        with pytest.raises(PeerTimeoutError) as caught:
            transport.receive(torch.empty(4), 2).wait()
        has_failed.set()
        return caught.value.peers, caught.value.rank, caught.value.seconds, time.monotonic() - started

    peers, rank, seconds, elapsed = run_transports(kind, 3, body, timeout_seconds=0.5)[0]
    assert peers == (2,)
    assert rank == 0
    assert 0.4 < seconds <= elapsed < 4.0


def test_a_time_out_names_the_cause_and_not_its_victims(kind: str) -> None:
    """Rank 0 waits for 1, which waits for 2, which does nothing."""
    if kind == "fake":
        pytest.skip("the fake knows of no chains")
    have_failed = threading.Barrier(3)

    def body(rank: int, transport: Transport) -> Any:
        error = None
        if rank < 2:
            with pytest.raises(PeerTimeoutError) as caught:
                transport.receive(torch.empty(4), rank + 1).wait()
            error = caught.value.peers
        have_failed.wait(15.0)
        return error

    assert run_transports(kind, 3, body, timeout_seconds=0.5) == [(2,), (2,), None]


def test_who_waits_for_a_closed_transport_is_told(kind: str) -> None:
    def body(rank: int, transport: Transport) -> Any:
        if rank == 1:
            time.sleep(0.2)
            transport.close()
            with pytest.raises(PeerLostError):
                transport.send(torch.zeros(1), 0)
            return None
        started = time.monotonic()
        with pytest.raises(PeerLostError) as caught:
            transport.receive(torch.empty(4), 1).wait()
        return caught.value.peers, time.monotonic() - started

    peers, seconds = run_transports(kind, 2, body)[0]
    assert peers == (1,)
    assert 0.1 < seconds < 3.0


def test_closing_one_transport_leaves_the_others_open(kind: str) -> None:
    def body(rank: int, first: Transport, second: Transport) -> float:
        first.close()
        first.close()  # twice is once
        incoming = torch.zeros(1)
        receiving = second.receive(incoming, 1 - rank)
        second.send(torch.tensor([rank + 1.0]), 1 - rank).wait()
        receiving.wait()
        return float(incoming)

    assert run_transports(kind, 2, body, num_streams=2) == [2.0, 1.0]


def test_the_death_of_a_peer_names_it(kind: str) -> None:
    if kind == "c10d":
        died, *survivors = run_ranks(_wait_for_the_dying, 3, expect_exit={0: -signal.SIGKILL})
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
        assert seconds < 3.0


def _wait_for_the_dying(rank: int, size: int) -> Any:
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    transport = C10dTransport(Rendezvous(store, rank, size, 20.0), "stream")
    if rank == 0:
        time.sleep(0.2)
        os.kill(os.getpid(), signal.SIGKILL)
    return _wait(transport)


def _wait(transport: Transport) -> Any:
    """Rank 1 waits for rank 0, rank 2 for rank 1, which has gone for want of rank 0."""
    started = time.monotonic()
    with pytest.raises(PeerLostError) as caught:
        transport.receive(torch.empty(4), transport.rank - 1).wait()
    seconds = time.monotonic() - started
    transport.close()
    return caught.value.peers, seconds


def test_closing_gives_back_every_descriptor(kind: str) -> None:
    def body(rank: int, transport: Transport) -> None:
        incoming = torch.zeros(8)
        receiving = transport.receive(incoming, 1 - rank)
        transport.send(exact_inputs(8, torch.float32, rank), 1 - rank).wait()
        receiving.wait()

    run_transports(kind, 2, body)  # what is opened once per process
    before = count_open_fds()
    for _ in range(3):
        run_transports(kind, 2, body)
    end = time.monotonic() + 2.0
    while count_open_fds() > before and time.monotonic() < end:
        time.sleep(0.02)
    assert count_open_fds() <= before
