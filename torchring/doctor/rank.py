"""One rank's part: it tells rank 0 what it knows, measures with the other ranks, and learns the verdict.

Measuring goes in stages, and every rank says how each stage ended. So rank 0 can name a rank that fails, dies or hangs
in a stage, and the others start no further stage. No rank waits for another longer than the time-out and a few seconds.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any, Final

import torch
from torch.distributed import Store, TCPStore

from torchring import default_world as worlds
from torchring.allreduce.select import choose
from torchring.default_world import Backend
from torchring.doctor import probe
from torchring.doctor.facts import gather, listening_addresses
from torchring.doctor.report import ChoiceFacts, PathFacts, RankFacts, Report, StoreFacts, read
from torchring.errors import RingError, TopologyError, ranks_in_words
from torchring.meeting import launcher_store
from torchring.rendezvous.addresses import resolve
from torchring.rendezvous.environment import LaunchEnvironment
from torchring.rendezvous.rendezvous import Rendezvous
from torchring.rendezvous.signed import bottom, within
from torchring.transport.open import open_transport
from torchring.world import World

BUCKETS: Final = tuple(
    (num_bytes, dtype) for dtype in (torch.float32, torch.bfloat16) for num_bytes in (64 << 10, 1 << 20, 25 << 20)
)
_GRACE_SECONDS: Final = 5.0  # the time-outs of the other ranks may end a little later than this rank's
_POLL_SECONDS: Final = 0.01
_STAY_SECONDS: Final = 3.0  # for the other ranks to read the exit code, if rank 0 hosts the store


def take_part(
    launch: LaunchEnvironment, backend: Backend, timeout_seconds: float, finish: Callable[[Report], int]
) -> int:
    """Collective. Rank 0 passes its report to `finish`, and every rank returns the exit code that `finish` returns.

    Raises a RingError on a rank other than 0 that cannot reach rank 0.
    """
    started = time.monotonic()
    engine = "gloo" if backend == "auto" else backend
    report = Report(launch.launcher, launch.size, timeout_seconds, backend=engine)
    report.ranks.append(gather(launch.rank, joins_mpi=launch.over_mpi or backend == "mpi"))
    try:
        store = launcher_store(launch, timeout_seconds)
    except RingError as error:
        if launch.rank != 0:
            raise
        report.problems.append(error.message)
        return finish(report)
    if store is None:
        report.hosts = [[0]]
        report.seconds = time.monotonic() - started
        return finish(report)
    rendezvous = Rendezvous(within(store, "doctor"), launch.rank, launch.size, timeout_seconds)
    rendezvous.store_host = None if launch.store_is_hosted else 0
    _publish(rendezvous, "facts", report.ranks[0])
    if launch.rank == 0:
        facts = _collect(rendezvous, "facts", range(launch.size), timeout_seconds)
        report.ranks = [read(RankFacts, of_rank) for of_rank in facts.values()]
        report.store = _describe(launch, store)
        available = min(rank.memory_available_bytes for rank in report.ranks)
        _publish(rendezvous, "plan", {"all_are_here": len(facts) == launch.size, "available_bytes": available})
    plan = _collect(rendezvous, "plan", [0], 2 * timeout_seconds).get(0)
    if plan is None:
        raise TopologyError(f"rank 0 did not show up within {2 * timeout_seconds:g} s", rank=launch.rank)
    if plan["all_are_here"]:
        _measure(rendezvous, report, plan["available_bytes"], backend)
    if launch.rank == 0:
        report.seconds = time.monotonic() - started
        code = finish(report)
        rendezvous.publish("code", str(code).encode())
        rendezvous.stay_until_published([f"left/{rank.rank}" for rank in report.ranks[1:]], _STAY_SECONDS)
    else:
        code = int(rendezvous.fetch("code", 0))
        with contextlib.suppress(RingError):  # rank 0 may have gone, and the store with it
            rendezvous.publish(f"left/{launch.rank}", b"")
    return code


def _publish(rendezvous: Rendezvous, topic: str, value: object) -> None:
    rendezvous.publish(f"{topic}/{rendezvous.rank}", json.dumps(value, default=asdict).encode())


def _collect(rendezvous: Rendezvous, topic: str, ranks: Iterable[int], seconds: float) -> dict[int, Any]:
    """{rank: what it published}, once all are there or `seconds` have passed. Ranks that published nothing are absent.

    `Rendezvous.all_gather` would raise for the first rank that is absent, and not tell of the others.
    """
    deadline = time.monotonic() + seconds
    found: dict[int, Any] = {}
    missing = set(ranks)
    while True:
        for rank in sorted(missing):
            if rendezvous.is_published(key := f"{topic}/{rank}"):
                found[rank] = json.loads(rendezvous.fetch(key, rank))
        missing -= found.keys()
        if not missing or time.monotonic() > deadline:
            return dict(sorted(found.items()))
        time.sleep(_POLL_SECONDS)


def _describe(launch: LaunchEnvironment, store: Store) -> StoreFacts:
    store = bottom(store)
    assert isinstance(store, TCPStore)
    host, port = launch.master or (store.host, store.port)
    hosted_by = launch.launcher if launch.store_is_hosted else "rank 0"
    return StoreFacts(host, port, resolve(host), hosted_by, listening_addresses(port))


def _measure(rendezvous: Rendezvous, report: Report, available_bytes: int, backend: Backend) -> None:
    """Collective. Runs stages up to the first one in which a rank fails, and adds to `report` what they find."""
    stages: dict[str, Callable[[], dict[str, Any]]] = {
        "joining the ranks": lambda: _join(backend, rendezvous.timeout_seconds),
        "measuring shared memory": lambda: _shared(worlds.default_world(), available_bytes),
        "measuring the network": lambda: _network(worlds.default_world()),
        "asking what algorithm='auto' picks": lambda: _choices(worlds.default_world()),
    }
    try:
        for label, stage in stages.items():
            if not _run_stage(rendezvous, report, label, stage):
                break
    finally:
        worlds.shutdown()


def _run_stage(rendezvous: Rendezvous, report: Report, label: str, stage: Callable[[], dict[str, Any]]) -> bool:
    """Run a stage, and add to `report` what it found on all ranks. Returns whether it succeeded on every rank."""
    try:
        result = stage()
    except Exception as error:  # every error belongs into the report, and no rank shall wait for this one
        result = {"error": error.message if isinstance(error, RingError) else f"{type(error).__name__}: {error}"}
    _publish(rendezvous, label, result)
    results = _collect(rendezvous, label, range(rendezvous.size), rendezvous.timeout_seconds + _GRACE_SECONDS)
    failures: dict[str, list[int]] = defaultdict(list)
    for rank, found in results.items():
        if "error" in found:
            failures[found["error"]].append(rank)
        report.hosts = found.get("hosts", report.hosts)  # the same on all ranks, as choices are
        report.paths += [read(PathFacts, path) for path in found.get("paths", [])]
        if "choices" in found:
            report.choices = [read(ChoiceFacts, choice) for choice in found["choices"]]
    if silent := set(range(rendezvous.size)) - results.keys():
        report.problems.append(f"{ranks_in_words(silent)} stopped answering while {label}")
    for text, ranks in failures.items():
        report.problems.append(f"{label} failed on {ranks_in_words(ranks)}: {text}")
    return not silent and not failures


def _join(backend: Backend, timeout_seconds: float) -> dict[str, Any]:
    return {"hosts": worlds.init(backend, timeout_seconds=timeout_seconds).hosts}


def _shared(world: World, available_bytes: int) -> dict[str, Any]:
    return {"paths": probe.measure_shared_memory(world, available_bytes)}


def _network(world: World) -> dict[str, Any]:
    transport = open_transport(world)
    try:
        return {"paths": probe.measure_pairs(world, transport)}
    finally:
        transport.close()


def _choices(world: World) -> dict[str, Any]:
    found = []
    for num_bytes, dtype in BUCKETS:
        choice = choose(world, [(num_bytes // dtype.itemsize, dtype)])
        name = str(dtype).removeprefix("torch.")
        found.append(ChoiceFacts(num_bytes, name, choice.algorithm, choice.reason, dict(choice.seconds)))
    return {"choices": found}
