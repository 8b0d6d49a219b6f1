"""One rank's part: it tells rank 0 what it knows, measures with the others, and learns how it went.

Whatever can fail is a stage that every rank reports on, so that a rank that fails, dies or hangs there is named and the
others go no further; nobody waits for another longer than the time-out and a few seconds.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

import torch
from torch.distributed import PrefixStore, Store, TCPStore

from torchring import world as worlds
from torchring.allreduce.select import choose
from torchring.doctor import probe
from torchring.doctor.checks import check_gloo_addresses, name_ranks
from torchring.doctor.facts import gather, listening_addresses
from torchring.doctor.report import ChoiceFacts, PathFacts, RankFacts, Report, StoreFacts, read
from torchring.errors import RingError, TopologyError
from torchring.rendezvous.addresses import resolve
from torchring.rendezvous.environment import LaunchEnvironment
from torchring.rendezvous.rendezvous import Rendezvous
from torchring.transport.open import open_transport
from torchring.world import Backend, World

BUCKETS: Final = tuple(
    (num_bytes, dtype) for dtype in (torch.float32, torch.bfloat16) for num_bytes in (64 << 10, 1 << 20, 25 << 20)
)
_GRACE_SECONDS: Final = 5.0  # for others' time-outs, which end with this rank's
_POLL_SECONDS: Final = 0.01
_FAREWELL_SECONDS: Final = 3.0


class Board:
    """Notes that ranks leave for each other in the rendezvous store."""

    def __init__(self, store: Store, rank: int, size: int, timeout_seconds: float) -> None:
        self.rank, self.size, self.timeout_seconds = rank, size, timeout_seconds
        self._rendezvous = Rendezvous(PrefixStore("doctor", store), rank, size, timeout_seconds)

    def publish(self, topic: str, note: object) -> None:
        self._rendezvous.publish(f"{topic}/{self.rank}", json.dumps(note).encode())

    def collect(self, topic: str, ranks: Iterable[int], seconds: float) -> dict[int, Any]:
        """{rank: its note}, when all are there or the time is over; whoever left none is missing."""
        deadline = time.monotonic() + seconds
        found: dict[int, Any] = {}
        missing = set(ranks)
        while missing:
            for rank in sorted(missing):
                if self._rendezvous.is_published(key := f"{topic}/{rank}"):
                    found[rank] = json.loads(self._rendezvous.fetch(key, rank))
            missing -= found.keys()
            if missing and time.monotonic() > deadline:
                break
            if missing:
                time.sleep(_POLL_SECONDS)
        return dict(sorted(found.items()))


@dataclass
class _Gathered:
    """What the stages have found, on every rank."""

    problems: list[str] = field(default_factory=list)
    hosts: list[list[int]] = field(default_factory=list)
    paths: list[PathFacts] = field(default_factory=list)
    choices: list[ChoiceFacts] = field(default_factory=list)


def visit(launch: LaunchEnvironment, backend: Backend, timeout_seconds: float, finish: Callable[[Report], int]) -> int:
    """Collective. Rank 0 passes its report to `finish`; what that returns is returned on every rank.

    Raises a RingError on a rank other than 0 that cannot reach it.
    """
    started = time.monotonic()
    report = Report(
        launcher=launch.launcher, size=launch.size, timeout_seconds=timeout_seconds, backend=backend_for(backend)
    )
    facts = gather(launch.rank)
    try:
        store = worlds.launcher_store(launch, timeout_seconds)
    except RingError as error:
        if launch.rank != 0:
            raise
        return finish(replace(report, ranks=[facts], problems=[error.message]))
    if store is None:
        return finish(replace(report, ranks=[facts], hosts=[[0]], seconds=time.monotonic() - started))
    board = Board(store, launch.rank, launch.size, timeout_seconds)
    board.publish("facts", asdict(facts))
    if launch.rank != 0:
        plan = board.collect("plan", [0], 2 * timeout_seconds).get(0)
        if plan is None:
            raise TopologyError(f"rank 0 did not show up within {2 * timeout_seconds:g} s", rank=launch.rank)
        _measure(board, plan, backend)
        return _leave(board)

    notes = board.collect("facts", range(launch.size), timeout_seconds)
    report = replace(report, ranks=[read(RankFacts, note) for note in notes.values()], store=_describe(launch, store))
    plan = make_plan(report)
    board.publish("plan", plan)
    gathered = _measure(board, plan, backend)
    code = finish(replace(report, **vars(gathered), seconds=time.monotonic() - started))
    board.publish("code", code)
    board.collect("farewell", [rank for rank in notes if rank != 0], _FAREWELL_SECONDS)  # this may host the store
    return code


def make_plan(report: Report) -> dict[str, Any]:
    """What rank 0 has everybody do: whether to measure at all, across the network, and with how much memory."""
    return {
        "open": len(report.ranks) == report.size,
        # Gloo would try to connect to itself until the time-out, and what is wrong is known already.
        "network": report.backend != "gloo" or all(found.level != "wrong" for found in check_gloo_addresses(report)),
        "available_bytes": min(rank.memory_available_bytes for rank in report.ranks),
    }


def backend_for(backend: Backend) -> str:
    """What `init` makes of it."""
    return "gloo" if backend == "auto" else backend


def _describe(launch: LaunchEnvironment, store: Store) -> StoreFacts:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    assert isinstance(store, TCPStore)
    host, port = launch.master or (store.host, store.port)
    hosted_by = launch.launcher if launch.store_is_hosted else "rank 0"
    return StoreFacts(host, port, resolve(host), hosted_by, listening_addresses(port))


def _measure(board: Board, plan: Mapping[str, Any], backend: Backend) -> _Gathered:
    """Collective: the stages, up to the first in which a rank failed."""
    gathered = _Gathered()
    if not plan["open"]:
        return gathered
    try:
        opened: list[World] = []
        stages: list[tuple[str, Callable[[], dict[str, Any]]]] = [
            ("joining the ranks", lambda: _open(board, backend, opened)),
            ("measuring shared memory", lambda: _paths(_shared(opened[0], plan["available_bytes"]))),
        ]
        if plan["network"]:
            stages += [
                ("measuring the network", lambda: _paths(_network(opened[0]))),
                ("asking what algorithm='auto' picks", lambda: {"choices": [asdict(c) for c in _choices(opened[0])]}),
            ]
        for label, stage in stages:
            if not _together(board, label, stage, gathered):
                break
    finally:
        worlds.shutdown()
    return gathered


def _together(board: Board, label: str, stage: Callable[[], dict[str, Any]], gathered: _Gathered) -> bool:
    """Run a stage and add what all ranks found in it. Returns whether it went well everywhere."""
    try:
        note = stage()
    except Exception as problem:  # whatever it is, it belongs into the report, and nobody shall wait for this rank
        note = {"error": problem.message if isinstance(problem, RingError) else f"{type(problem).__name__}: {problem}"}
    board.publish(label, note)
    notes = board.collect(label, range(board.size), board.timeout_seconds + _GRACE_SECONDS)
    failures: dict[str, list[int]] = defaultdict(list)
    for rank, found in notes.items():
        if "error" in found:
            failures[found["error"]].append(rank)
        gathered.paths += [read(PathFacts, item) for item in found.get("paths", [])]
    first = notes.get(0, {})
    gathered.hosts = first.get("hosts", gathered.hosts)
    gathered.choices += [read(ChoiceFacts, item) for item in first.get("choices", [])]
    silent = [rank for rank in range(board.size) if rank not in notes]
    if silent:
        gathered.problems.append(f"{name_ranks(silent)} stopped answering while {label}")
    for error, ranks in failures.items():
        gathered.problems.append(f"{label} failed on {name_ranks(ranks)}: {error}")
    return not silent and not failures


def _open(board: Board, backend: Backend, opened: list[World]) -> dict[str, Any]:
    opened.append(worlds.init(backend, timeout_seconds=board.timeout_seconds))
    return {"hosts": [list(ranks) for ranks in opened[0].hosts]}


def _shared(world: World, available_bytes: int) -> list[PathFacts]:
    return probe.measure_shared_memory(world, available_bytes)


def _network(world: World) -> list[PathFacts]:
    transport = open_transport(world)
    try:
        return probe.measure_pairs(world, transport)
    finally:
        transport.close()


def _choices(world: World) -> list[ChoiceFacts]:
    found = []
    for num_bytes, dtype in BUCKETS:
        choice = choose(world, [(num_bytes // dtype.itemsize, dtype)])
        name = str(dtype).removeprefix("torch.")
        found.append(ChoiceFacts(num_bytes, name, choice.algorithm, choice.reason, dict(choice.seconds)))
    return found


def _paths(paths: list[PathFacts]) -> dict[str, Any]:
    return {"paths": [asdict(path) for path in paths]}


def _leave(board: Board) -> int:
    code = board.collect("code", [0], board.timeout_seconds + _GRACE_SECONDS).get(0)
    if code is None:
        raise TopologyError("rank 0 did not finish its report", rank=board.rank)
    board.publish("farewell", "")
    return int(code)
