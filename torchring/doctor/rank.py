"""One rank's part, as in a training script: join the world, gather the facts of all ranks, measure.

Every rank has the whole report. A rank that fails, dies or hangs on the way is in the error that the others get.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Final

import torch
from torch.distributed import TCPStore

from torchring import default_world as worlds
from torchring.allreduce.direct import DirectAllReduce
from torchring.allreduce.select import choose
from torchring.collectives.functions import barrier
from torchring.collectives.service import collectives_of
from torchring.default_world import Backend
from torchring.doctor.facts import gather, listening_addresses
from torchring.doctor.report import ChoiceFacts, PathFacts, RankFacts, Report, StoreFacts
from torchring.errors import RingError
from torchring.memory.channel import POLL_SECONDS
from torchring.rendezvous.addresses import resolve
from torchring.rendezvous.environment import LaunchEnvironment
from torchring.rendezvous.signed import bottom
from torchring.transport.contract import Transport
from torchring.transport.open import open_transport
from torchring.world import World

_BUCKETS: Final = (64 << 10, 1 << 20, 25 << 20)
_LATENCY_BYTES: Final = 1 << 10
_SMALLEST_BYTES: Final = 64 << 10
_LARGEST_BYTES: Final = 64 << 20
_LONG_SECONDS: Final = 0.05  # a transfer that takes as long needs no larger one
_REPETITIONS: Final = 3
_WHOLE_MACHINE: Final = ("0.0.0.0", "::")


def take_part(launch: LaunchEnvironment, backend: Backend, timeout_seconds: float) -> Report:
    """Collective. What failed is in the report."""
    started = time.monotonic()
    report = Report(launch.launcher, launch.size, "gloo" if backend == "auto" else backend)
    report.ranks = [gather(launch.rank)]
    doing = "joining the ranks"
    try:
        world = worlds.init(backend, timeout_seconds=timeout_seconds)
        report.ranks = [RankFacts(**facts) for facts in _gather(world, asdict(report.ranks[0]))]
        report.hosts = [list(ranks) for ranks in world.hosts]
        if world.rank == 0 and world.size > 1:
            report.store = _describe_store(world, launch, report)
        doing = "measuring"
        report.paths = _measure(world, min(rank.memory_available_bytes for rank in report.ranks))
        doing = "asking what algorithm='auto' picks"
        for num_bytes in _BUCKETS:
            choice = choose(world, [(num_bytes // 4, torch.float32)])
            report.choices.append(ChoiceFacts(num_bytes, choice.algorithm, choice.reason))
        barrier()  # a rank that is done takes its part of the world with it
    except Exception as error:  # every error belongs into the report
        said = error.message if isinstance(error, RingError) else f"{type(error).__name__}: {error}"
        report.problem = f"{doing} failed: {said}"
    finally:
        worlds.shutdown()
    report.seconds = time.monotonic() - started
    return report


def _describe_store(world: World, launch: LaunchEnvironment, report: Report) -> StoreFacts | None:
    """The store is on rank 0's machine, as far as ranks can see: torchrun, too, hosts the store on the first node."""
    tcp = None if world.rendezvous is None else bottom(world.rendezvous.store)
    if not isinstance(tcp, TCPStore):
        return None
    host, port = launch.master or (tcp.host, tcp.port)
    listens = listening_addresses(port) or _WHOLE_MACHINE  # the default of TCPStore
    if not set(listens).isdisjoint(_WHOLE_MACHINE):
        listens = [address for _, address in report.ranks[0].interfaces]
    hosted_by = launch.launcher if launch.store_is_hosted else "rank 0"
    return StoreFacts(host, port, hosted_by, [*listens, *resolve(host)])


def _measure(world: World, available_bytes: int) -> list[PathFacts]:
    """All-reduces within each host, then messages between the first ranks of each host and of the next, in turns."""
    found = []
    if world.host is not None and world.host.size > 1:
        path = _measure_host(world, min(_LARGEST_BYTES, available_bytes // (8 * world.size)))
        found += [path] if world.host.index == 0 else []
    if len(world.hosts) > 1:
        transport = open_transport(world)
        try:
            firsts = [ranks[0] for ranks in world.hosts]
            for pair in itertools.pairwise([*firsts, firsts[0]] if len(firsts) > 2 else firsts):
                if world.rank in pair:
                    path = _measure_pair(transport, world.rank, sum(pair) - world.rank)
                    found += [path] if world.rank == pair[0] else []
                barrier()
        finally:
            transport.close()
    return [PathFacts(**path) for of_rank in _gather(world, [*map(asdict, found)]) for path in of_rank]


def _gather(world: World, facts: object) -> list[Any]:
    """The facts of all ranks, which travel as JSON: what a rank sends is not executed."""
    return [json.loads(text) for text in collectives_of(world).all_gather_bytes(json.dumps(facts).encode())]


def _measure_host(world: World, most_bytes: int) -> PathFacts:
    """All-reduce as training does."""
    assert world.host is not None
    host = world.host
    all_reduce = DirectAllReduce(host, poll_seconds=POLL_SECONDS)

    def prepare(num_bytes: int) -> Callable[[], tuple[float, bool]]:
        (wire,) = all_reduce.open_wires([(num_bytes // 4, torch.float32)])
        pattern = torch.arange(num_bytes // 4, dtype=torch.float32).remainder_(251)
        expected = pattern * host.size + sum(host.ranks)

        def once() -> tuple[float, bool]:
            wire.tensor.copy_(pattern).add_(world.rank)
            started = time.perf_counter()
            all_reduce.start(wire).wait()
            return time.perf_counter() - started, torch.equal(wire.tensor, expected)

        return once

    def agree(value: float) -> float:
        of_ranks.tensor.zero_()[host.index] = value
        all_reduce.start(of_ranks).wait()
        return float(of_ranks.tensor.max())

    try:
        (of_ranks,) = all_reduce.open_wires([(host.size, torch.float32)])
        return _time("shared memory", list(host.ranks), prepare, agree, most_bytes)
    finally:
        all_reduce.close()


def _measure_pair(transport: Transport, rank: int, other: int) -> PathFacts:
    """Messages in both directions at once. A link that moves no data raises a RingError after the world's timeout."""

    def swap(outgoing: torch.Tensor, incoming: torch.Tensor) -> None:
        for transfer in [transport.receive(incoming, other), transport.send(outgoing, other)]:
            transfer.wait()

    def agree(value: float) -> float:
        theirs = torch.zeros(1, dtype=torch.float64)
        swap(torch.tensor([value], dtype=torch.float64), theirs)
        return max(value, float(theirs))

    def prepare(num_bytes: int) -> Callable[[], tuple[float, bool]]:
        outgoing, expected = (_pattern(num_bytes, of) for of in (rank, other))
        incoming = torch.zeros_like(outgoing)

        def once() -> tuple[float, bool]:
            incoming.zero_()
            agree(0.0)  # so that neither rank waits for the other to prepare
            started = time.perf_counter()
            swap(outgoing, incoming)
            return time.perf_counter() - started, torch.equal(incoming, expected)

        return once

    return _time(transport.engine, [rank, other], prepare, agree, _LARGEST_BYTES)


def _pattern(num_bytes: int, rank: int) -> torch.Tensor:
    """[num_bytes] uint8, different for each rank. No 4 KiB of it are like the next."""
    return torch.arange(num_bytes).add_(rank * 7).remainder_(251).to(torch.uint8)


def _time(
    kind: str,
    ranks: list[int],
    prepare: Callable[[int], Callable[[], tuple[float, bool]]],
    agree: Callable[[float], float],
    most_bytes: int,
) -> PathFacts:
    """Time transfers of sizes that grow by four, until one is long: 100 Mbit/s need less data than shared memory.

    Args:
        prepare: gives a transfer of so many bytes, which returns its seconds and whether the data arrived unchanged.
        agree: the largest value of the ranks, on all of them, so that all of them stop at the same size.
    """
    arrived_intact = True

    def seconds_of(num_bytes: int, repetitions: int = _REPETITIONS) -> float:
        nonlocal arrived_intact
        once = prepare(num_bytes)
        results = [once() for _ in range(repetitions + 1)]  # the first one fills caches
        arrived_intact &= all(intact for _, intact in results)
        return agree(statistics.median(seconds for seconds, _ in results[1:]))

    latency = seconds_of(_LATENCY_BYTES, 20)
    size = _SMALLEST_BYTES
    while (seconds := seconds_of(size)) < _LONG_SECONDS and 4 * size <= most_bytes:
        size *= 4
    arrived_intact = agree(0.0 if arrived_intact else 1.0) == 0.0
    return PathFacts(kind, ranks, latency * 1e6, size / seconds / 1e9, size, arrived_intact)
