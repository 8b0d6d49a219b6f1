"""One rank's part, as in a training script: join the world, gather the facts of all ranks, measure.

Every rank has the whole report. A rank that fails, dies or hangs on the way is in the error that the others get.
"""

import contextlib
import functools
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Final

import torch
from torch.distributed import TCPStore

from torchring import default_world as worlds
from torchring.allreduce.direct import DirectAllReduce
from torchring.allreduce.select import choose
from torchring.collectives.service import collectives_of
from torchring.default_world import Backend
from torchring.doctor import training
from torchring.doctor.facts import gather, listening
from torchring.doctor.report import PathFacts, RankFacts, Report, StoreFacts
from torchring.errors import RingError
from torchring.functions import all_reduce, barrier
from torchring.rendezvous.addresses import resolve
from torchring.rendezvous.environment import LaunchEnvironment
from torchring.rendezvous.signed import bottom
from torchring.transport.c10d import open_transport
from torchring.transport.contract import Transport
from torchring.world import World

_SIZES: Final = {1 << 10: 20, 16 << 20: 3}  # in bytes, for latency and for bandwidth, and how often

_Transfer = Callable[[int], float]
"""Carries out a transfer of so many bytes. Returns its seconds."""


def take_part(launch: LaunchEnvironment, backend: Backend, timeout_seconds: float, *, on_gpus: bool = False) -> Report:
    """Collective. What failed is in the report. With `on_gpus`, a model trains there, too."""
    started = time.monotonic()
    report = Report(launch.launcher, launch.size, "gloo" if backend == "auto" else backend)
    report.ranks = [gather(launch.rank)]
    doing = "joining the ranks"
    try:
        world = worlds.init(backend, timeout_seconds=timeout_seconds)
        report.ranks = [RankFacts(**facts) for facts in collectives_of(world).all_gather_json(asdict(report.ranks[0]))]
        report.hosts = [list(ranks) for ranks in world.hosts]
        if world.rank == 0 and world.size > 1:
            report.store = _describe_store(world, launch, report)
        doing = "measuring"
        report.paths = _measure(world)
        doing = "asking what algorithm='auto' picks"
        choice = choose(world)
        report.algorithm, report.reason = choice.algorithm, choice.reason
        doing = "training on GPUs"
        for algorithm in training.ways(world, [len(rank.gpus) for rank in report.ranks]) if on_gpus else ():
            doing = f"training on GPUs with algorithm={algorithm!r}"
            report.trainings.append(training.train(world, worlds.device(), algorithm))
        barrier()  # a rank that is done takes its part of the world with it
        if on_gpus and world.size > 1:
            report.problem = training.abort(world, worlds.device())
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
    own = [address for _, address in report.ranks[0].interfaces]
    hosted_by = launch.launcher if launch.store_is_hosted else "rank 0"
    return StoreFacts(host, port, hosted_by, [*(listening(own, port) or own), *resolve(host)])


def _measure(world: World) -> list[PathFacts]:
    """All-reduces within each host, then between the first ranks of each host and of the next, in turns."""
    found: list[PathFacts] = []
    with contextlib.ExitStack() as opened:
        if any(len(ranks) > 1 for ranks in world.hosts):
            host = world.host
            transfer: _Transfer = _watch
            if host is not None and host.size > 1:
                direct = DirectAllReduce(host)
                opened.callback(direct.close)
                transfer = _reducing(direct)
            path = _time("shared memory", world.hosts[world.node_rank], transfer)
            found += [path] if world.rank == path.ranks[0] and transfer is not _watch else []
        firsts = [ranks[0] for ranks in world.hosts]
        for pair in itertools.pairwise([*firsts, firsts[0]] if len(firsts) > 2 else firsts):
            transport = open_transport(world, ranks=pair if world.rank in pair else (world.rank,))
            opened.callback(transport.close)
            add_up = functools.partial(_add_up, transport) if world.rank in pair else _watch
            path = _time(transport.engine, pair, add_up)
            found += [path] if world.rank == pair[0] else []
    by_rank = collectives_of(world).all_gather_json([*map(asdict, found)])
    return [PathFacts(**path) for of_rank in by_rank for path in of_rank]


def _time(kind: str, ranks: Sequence[int], transfer: _Transfer) -> PathFacts:
    """Time transfers of the `ranks`. Collective among all ranks of the world."""
    latency, seconds = (  # the first transfer fills caches
        statistics.median([_most(transfer(num_bytes)) for _ in range(repetitions + 1)][1:])
        for num_bytes, repetitions in _SIZES.items()
    )
    num_bytes = [*_SIZES][1]
    return PathFacts(kind, list(ranks), latency * 1e6, num_bytes / seconds / 1e9, num_bytes)


def _reducing(direct: DirectAllReduce) -> _Transfer:
    wires = dict(zip(_SIZES, direct.open_wires([(size // 4, torch.float32) for size in _SIZES]), strict=True))

    def reduce(num_bytes: int) -> float:
        wire = wires[num_bytes]
        wire.tensor.fill_(1.0)
        barrier()
        started = time.perf_counter()
        direct.start(wire).wait()
        return time.perf_counter() - started

    return reduce


def _add_up(transport: Transport, num_bytes: int) -> float:
    """The engine's own all-reduce. A link that moves no data raises a RingError after the world's timeout."""
    buffer = torch.ones(num_bytes // 4)
    barrier()
    started = time.perf_counter()
    transport.start_all_reduce(buffer).wait()
    return time.perf_counter() - started


def _watch(num_bytes: int) -> float:
    """Waits for the ranks that measure."""
    barrier()
    return 0.0


def _most(value: float) -> float:
    return float(all_reduce(torch.tensor([value], dtype=torch.float64, device="cpu"), "max"))
