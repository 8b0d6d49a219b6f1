"""Measures how fast ranks communicate, and checks that data arrives unchanged.

Sizes grow by four until one transfer takes a fair share of the time: a link of 100 Mbit/s is measured with 1 MiB,
shared memory with 64 MiB. Ranks that measure together exchange their times, so that all of them stop at the same size.
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
_LEAST_SECONDS: Final = 0.15  # for each path, however many there are
_SMALLEST_BYTES: Final = 64 << 10
_LARGEST_BYTES: Final = 64 << 20
_LATENCY_BYTES: Final = 1 << 10  # an all-reduce in shared memory
_REPETITIONS: Final = 3


def measure_shared_memory(world: World, available_bytes: int) -> list[PathFacts]:
    """All-reduce as training does. Collective among the ranks of each host; the host's first rank has the result.

    Args:
        available_bytes: memory that the ranks of this host may use together; equal on all of them.
    """
    host = world.host
    if host is None or host.size == 1:
        return []
    all_reduce = DirectAllReduce(host, poll_seconds=POLL_SECONDS)
    intact = True

    def time_it(num_bytes: int, repetitions: int = _REPETITIONS) -> float:
        """Seconds that one all-reduce took on the slowest rank: the median of several."""
        nonlocal intact
        numel = num_bytes // 4
        (wire,) = all_reduce.open_wires([(numel, torch.float32)])
        pattern = _repeated(torch.arange(251, dtype=torch.float32), numel)
        expected = pattern * host.size + sum(host.ranks)
        times = []
        for _ in range(repetitions + 1):  # the first one fills caches
            wire.tensor.copy_(pattern).add_(world.rank)
            started = time.perf_counter()
            all_reduce.start(wire).wait()
            times.append(time.perf_counter() - started)
            intact = intact and torch.equal(wire.tensor, expected)
        of_ranks = medians.tensor.zero_()
        of_ranks[host.index] = statistics.median(times[1:])
        all_reduce.start(medians).wait()
        return float(of_ranks.max())

    try:
        (medians,) = all_reduce.open_wires([(host.size, torch.float32)])
        latency = time_it(_LATENCY_BYTES, 50)
        size, seconds = _grow(time_it, SECONDS, min(_LARGEST_BYTES, available_bytes // (8 * host.size)))
    finally:
        all_reduce.close()
    if host.index != 0:
        return []
    return [PathFacts("shared memory", list(host.ranks), latency * 1e6, size / seconds / 1e9, size, intact)]


def measure_pairs(world: World, transport: Transport) -> list[PathFacts]:
    """Point-to-point between hosts, and within one host. Collective; the first rank of each pair has the result.

    Pairs take turns. A link that moves no data raises a RingError after the world's timeout.
    """
    assert world.rendezvous is not None
    pairs = list(choose_pairs(world.hosts))
    found = []
    for pair in pairs:
        if world.rank in pair:
            other = pair[0] if world.rank == pair[1] else pair[1]
            path = _measure_pair(transport, world.rank, other, max(_LEAST_SECONDS, SECONDS / len(pairs)))
            if world.rank == pair[0]:
                found.append(path)
        world.rendezvous.all_gather("doctor/pair", b"")
    return found


def choose_pairs(hosts: tuple[tuple[int, ...], ...]) -> Iterator[tuple[int, int]]:
    """A pair within the first host that has two ranks, and a ring of hosts: the first rank of each and of the next.

    Example: hosts (0, 1), (2, 3), (4,) -> (0, 1), (0, 2), (2, 4), (4, 0).
    """
    yield from itertools.islice(((host[0], host[1]) for host in hosts if len(host) > 1), 1)
    firsts = [host[0] for host in hosts]
    yield from itertools.pairwise([*firsts, firsts[0]] if len(firsts) > 2 else firsts)


def _measure_pair(transport: Transport, rank: int, other: int, seconds: float) -> PathFacts:
    intact = True

    def swap(outgoing: torch.Tensor, incoming: torch.Tensor) -> None:
        for transfer in [transport.receive(incoming, other), transport.send(outgoing, other)]:
            transfer.wait()

    def agree(mine: float) -> float:
        """The larger number of the two ranks, on both."""
        theirs = torch.zeros(1, dtype=torch.float64)
        swap(torch.tensor([mine], dtype=torch.float64), theirs)
        return max(mine, float(theirs))

    def time_it(size: int, repetitions: int = _REPETITIONS) -> float:
        """Seconds that a swap of `size` bytes took on the slower rank: the median of several."""
        nonlocal intact
        outgoing, expected = _pattern(size, rank), _pattern(size, other)
        incoming = torch.zeros_like(outgoing)
        times = []
        for _ in range(repetitions):
            incoming.zero_()
            agree(0.0)  # so that neither rank waits for the other to prepare
            started = time.perf_counter()
            swap(outgoing, incoming)
            times.append(time.perf_counter() - started)
            intact = intact and torch.equal(incoming, expected)
        return agree(statistics.median(times))

    latency = time_it(8, max(3, min(50, int(seconds / 16 / time_it(8)))))
    size, elapsed = _grow(time_it, seconds, _LARGEST_BYTES)
    intact = agree(0.0 if intact else 1.0) == 0.0
    return PathFacts(transport.engine, [rank, other], latency * 1e6, size / elapsed / 1e9, size, intact)


def _grow(time_it: Callable[[int], float], seconds: float, largest_bytes: int) -> tuple[int, float]:
    """Time sizes that grow by four, until the next size might take half of `seconds`. Returns (bytes, seconds)."""
    size = _SMALLEST_BYTES
    while (elapsed := time_it(size)) * 4 * _REPETITIONS <= seconds / 2 and 4 * size <= largest_bytes:
        size *= 4
    return size, elapsed


def _pattern(size: int, rank: int) -> torch.Tensor:
    """[size] uint8, different for each rank. No 4 KiB of it are like the next."""
    return _repeated(torch.arange(251).add_(rank * 7).to(torch.uint8), size)


def _repeated(values: torch.Tensor, numel: int) -> torch.Tensor:
    return values.repeat(numel // values.numel() + 1)[:numel]
