"""Measures the paths between ranks: short, whatever they are made of, and with a look at what arrives.

Sizes grow by four from what every link moves quickly, until one transfer takes a fair share of the time there is: a
link of 100 Mbit/s is measured with 1 MiB, shared memory with 64. All ranks that measure together stop at the same size,
for they decide by times that they have exchanged.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Final

import torch

from torchring.allreduce.direct import DirectAllReduce
from torchring.doctor.report import PathFacts
from torchring.memory.channel import POLL_SECONDS
from torchring.transport.contract import Transport
from torchring.world import World

SECONDS: Final = 2.0  # for all paths of a kind together
_LEAST_SECONDS: Final = 0.15  # for each, however many there are
_SMALLEST_BYTES: Final = 64 << 10
_LARGEST_BYTES: Final = 64 << 20
_LATENCY_BYTES: Final = 1 << 10  # an all-reduce in shared memory
_REPETITIONS: Final = 3


def measure_shared_memory(world: World, available_bytes: int) -> list[PathFacts]:
    """Collective among the ranks of each host. All-reduce as training does it; the host's first rank has the result.

    Args:
        available_bytes: memory that the ranks of this host may take for it; equal on all of them.
    """
    host = world.host
    if host is None or host.size == 1:
        return []
    mover = DirectAllReduce(host, poll_seconds=POLL_SECONDS)
    intact = True

    def time_it(numel: int, repetitions: int) -> float:
        """Seconds that the slowest rank took for one."""
        nonlocal intact
        (wire,) = mover.open_wires([(numel, torch.float32)])
        pattern = _repeated(torch.arange(251, dtype=torch.float32), numel)
        expected = pattern * host.size + sum(host.ranks)
        times = []
        for _ in range(repetitions + 1):  # the first is for caches
            wire.tensor.copy_(pattern).add_(world.rank)
            started = time.perf_counter()
            mover.start(wire).wait()
            times.append(time.perf_counter() - started)
            intact = intact and torch.equal(wire.tensor, expected)
        note = notes.tensor.zero_()
        note[host.index] = statistics.median(times[1:])
        mover.start(notes).wait()
        return float(note.max())

    (notes,) = mover.open_wires([(host.size, torch.float32)])
    try:
        latency = time_it(_LATENCY_BYTES // 4, 50)
        largest = min(_LARGEST_BYTES, available_bytes // (8 * host.size))
        for size in _sizes(largest):
            seconds = time_it(size // 4, _REPETITIONS)
            if _is_long(seconds, SECONDS):
                break
    finally:
        mover.close()
    if host.index != 0:
        return []
    return [PathFacts("shared memory", list(host.ranks), latency * 1e6, size / seconds / 1e9, size, intact)]


def measure_pairs(world: World, transport: Transport) -> list[PathFacts]:
    """Collective. Point-to-point between neighbouring hosts, and within one; the pair's first rank has the result.

    Pairs take turns. A link that moves nothing any more raises a RingError after the world's timeout.
    """
    assert world.rendezvous is not None
    pairs = list(choose_pairs(world.hosts))
    found = []
    for pair in pairs:
        if world.rank in pair:
            other = pair[0] if world.rank == pair[1] else pair[1]
            seconds = max(_LEAST_SECONDS, SECONDS / len(pairs))
            path = _measure_pair(transport, world.rank, other, seconds)
            if world.rank == pair[0]:
                found.append(path)
        world.rendezvous.all_gather("doctor/pair", b"")
    return found


def choose_pairs(hosts: tuple[tuple[int, ...], ...]) -> Iterator[tuple[int, int]]:
    """Two ranks of the first host that has two, and the first ranks of each host and the next; the last and the first.

    Example: hosts (0, 1), (2, 3), (4,) -> (0, 1), (0, 2), (2, 4), (4, 0).
    """
    yield from itertools.islice(((host[0], host[1]) for host in hosts if len(host) > 1), 1)
    firsts = [host[0] for host in hosts]
    if len(firsts) > 1:
        yield from itertools.pairwise(firsts)
    if len(firsts) > 2:
        yield firsts[-1], firsts[0]


def _measure_pair(transport: Transport, rank: int, other: int, seconds: float) -> PathFacts:
    def swap(outgoing: torch.Tensor, incoming: torch.Tensor) -> None:
        transfers = [transport.receive(incoming, other), transport.send(outgoing, other)]
        for transfer in transfers:
            transfer.wait()

    def agree(mine: float) -> float:
        """The longer of both times, on both ranks."""
        theirs = torch.zeros(1, dtype=torch.float64)
        swap(torch.tensor([mine], dtype=torch.float64), theirs)
        return max(mine, float(theirs))

    def ping_pong() -> None:
        if rank < other:
            transport.send(ball, other).wait()
            transport.receive(ball, other).wait()
        else:
            transport.receive(ball, other).wait()
            transport.send(ball, other).wait()

    ball = torch.zeros(8, dtype=torch.uint8)
    ping_pong()
    once = agree(_time(ping_pong))
    round_trips = [_time(ping_pong) for _ in range(max(3, min(100, int(seconds / 8 / once))))]
    intact = True
    for size in _sizes(_LARGEST_BYTES):
        outgoing, expected = _pattern(size, rank), _pattern(size, other)
        times = []
        incoming = torch.zeros_like(outgoing)
        for _ in range(_REPETITIONS):
            incoming.zero_()
            agree(0.0)  # so that neither waits for the other to prepare
            started = time.perf_counter()
            swap(outgoing, incoming)
            times.append(time.perf_counter() - started)
            intact = intact and torch.equal(incoming, expected)
        elapsed = agree(statistics.median(times))
        if _is_long(elapsed, seconds):
            break
    intact = bool(agree(0.0 if intact else 1.0) == 0.0)
    latency = statistics.median(round_trips) / 2
    return PathFacts(transport.engine, [rank, other], latency * 1e6, size / elapsed / 1e9, size, intact)


def _sizes(largest: int) -> Iterator[int]:
    size = _SMALLEST_BYTES
    yield size
    while size < largest:
        size = min(4 * size, _LARGEST_BYTES)
        if size <= largest:
            yield size


def _is_long(elapsed: float, seconds: float) -> bool:
    """Whether a size four times as large, as often, would take more than about half of `seconds`."""
    return elapsed * 4 * _REPETITIONS > seconds / 2


def _pattern(size: int, rank: int) -> torch.Tensor:
    """[size] uint8, another one for each rank; no 4 KiB of it are like the next."""
    return _repeated(torch.arange(251).add_(rank * 7).to(torch.uint8), size)


def _repeated(values: torch.Tensor, numel: int) -> torch.Tensor:
    return values.repeat(numel // values.numel() + 1)[:numel]


def _time(turn: Callable[[], None]) -> float:
    started = time.perf_counter()
    turn()
    return time.perf_counter() - started
