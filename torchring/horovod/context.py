"""Starting and ending Horovod's API, ranks and sizes, build flags, process sets, timeline: horovod.common.basics.

`init()` joins torchring's default world, so Horovod's functions and torchring's can be used side by side.
"""

import importlib
import logging
import os
from collections.abc import Iterable, Sequence
from typing import Any, Final

from torchring import default_world as worlds
from torchring.errors import RingError, TopologyError
from torchring.horovod import builds
from torchring.horovod.builds import *  # noqa: F403
from torchring.horovod.elastic.worker import current_worker, find_worker
from torchring.horovod.engine import ADD_SET, REMOVE_SET, CollectiveEngine
from torchring.horovod.exceptions import HorovodInternalError
from torchring.horovod.execution import Operation
from torchring.horovod.negotiation import Request
from torchring.horovod.settings import Settings, read_settings
from torchring.horovod.timeline import Timeline
from torchring.world import World

__all__ = [
    "ProcessSet", "add_process_set", "cross_rank", "cross_size", "global_process_set", "init", "is_initialized",
    "local_rank", "local_size", "rank", "remove_process_set", "shutdown", "size", "start_timeline", "stop_timeline",
    *builds.__all__,
]  # fmt: skip

_MOST_TRIES: Final = 20  # to meet, in an elastic job whose workers are lost meanwhile


class ProcessSet:
    """Some of the ranks, which run collectives among themselves: global ranks, or those of an mpi4py communicator."""

    process_set_id: int | None = None  # until `init` or `add_process_set` has registered the set

    def __init__(self, ranks_or_comm: Any) -> None:
        self.mpi_comm = ranks_or_comm if hasattr(ranks_or_comm, "Get_group") else None
        ranks = list(ranks_or_comm) if self.mpi_comm is None else _ranks_of(ranks_or_comm)
        if not all(isinstance(rank, int) and not isinstance(rank, bool) for rank in ranks):
            raise ValueError(f"a process set takes the global ranks of its processes, got {ranks!r}")
        self.ranks = sorted(set(ranks))

    def included(self) -> bool:
        """True if this process is in the set."""
        return rank() in self.ranks

    def size(self) -> int | None:
        """Number of ranks; None if the set is not registered."""
        return None if self.process_set_id is None else len(self.ranks)

    def rank(self) -> int | None:
        """Position of this process in the set; None if the set is not registered."""
        if self.process_set_id is None:
            return None
        if not self.included():
            raise ValueError(f"this process, rank {rank()}, is not in the process set of ranks {self.ranks}")
        return self.ranks.index(rank())

    def __repr__(self) -> str:
        return f"ProcessSet(process_set_id={self.process_set_id}, ranks={self.ranks})"


global_process_set: Final = ProcessSet([])
"""All ranks. Its list of ranks is empty until `init` has been called."""


_engine: CollectiveEngine | None = None
_sets: dict[int, ProcessSet] = {}  # that are registered, by number


class _NotInitializedError(HorovodInternalError, ValueError):
    """Horovod's functions about ranks raise ValueError before `init`, and its collectives HorovodInternalError."""


def engine() -> CollectiveEngine:
    """What `init` has opened. Raises an error before `init`."""
    if _engine is None:
        raise _NotInitializedError("Horovod has not been initialized; call hvd.init() first")
    return _engine


def ranks_of(process_set: ProcessSet) -> tuple[int, ...]:
    """Global ranks of a registered process set that this rank is in. ValueError for any other set."""
    here = engine()
    if process_set.process_set_id is None or process_set.process_set_id not in _sets:
        raise ValueError(f"{process_set!r} is not registered; call hvd.add_process_set() on all ranks first")
    ranks = here.sets[process_set.process_set_id]
    if here.world.rank not in ranks:
        raise ValueError(f"this process, rank {here.world.rank}, is not in the process set {list(ranks)}")
    return ranks


def init(comm: Any = None, process_sets: Sequence[ProcessSet] | str | None = None) -> None:
    """Join the other ranks that the launcher has started. Collective. A second call changes nothing but process sets.

    In an elastic job, this waits until the driver says who trains together, this worker among them: a new worker waits
    for the next commit of those that train. The process ends here if the job is over, or goes on without this worker.

    Args:
        comm: None, the list of all ranks, or an mpi4py communicator of all ranks. A part of the ranks is a ProcessSet.
        process_sets: sets to register at once, on all ranks alike; or "dynamic", which allows `add_process_set` and
            `remove_process_set` afterwards, as HOROVOD_DYNAMIC_PROCESS_SETS=1 does.

    Raises ValueError for wrong arguments or HOROVOD_* variables, HorovodInternalError if ranks could not meet.
    """
    global _engine
    if isinstance(process_sets, str):
        if process_sets.lower() != "dynamic":
            raise ValueError(f'process_sets is a list of ProcessSet, or "dynamic", got {process_sets!r}')
        os.environ["HOROVOD_DYNAMIC_PROCESS_SETS"] = "1"
        process_sets = None
    settings = read_settings(os.environ)
    if _engine is not None and not _engine.world.is_open:  # after torchring.shutdown()
        shutdown()
    if _engine is None:
        if settings.log_level is not None:
            logging.getLogger("torchring").setLevel(settings.log_level)
        _engine = _join(settings)
        global_process_set.ranks = list(range(_engine.world.size))
        global_process_set.process_set_id = 0
        _sets[0] = global_process_set
    _check_comm(comm, _engine.world.size)
    for number, process_set in enumerate(process_sets or ()):
        if not isinstance(process_set, ProcessSet):
            raise ValueError(f"process_sets[{number}] is no ProcessSet, but {process_set!r}")
        if process_set.process_set_id is None:
            _add(process_set)


def _join(settings: Settings) -> CollectiveEngine:
    worker = find_worker()
    if worker is None:
        timeout = None if worlds.is_initialized() else settings.timeout_seconds
        return CollectiveEngine(worlds.init(timeout_seconds=timeout), settings)
    importlib.import_module("torch._dynamo")  # takes seconds, and any optimizer needs it: do not let others wait for it
    num_tries = 0
    while True:
        try:
            return CollectiveEngine(worker.join(settings.timeout_seconds), settings)
        except RingError as error:
            worker.elastic.leave()
            num_tries += 1
            if num_tries == _MOST_TRIES or isinstance(error, TopologyError):
                raise
            worker.reason = f"{type(error).__name__}: {error}"


def _check_comm(comm: Any, size: int) -> None:
    if comm is None:
        return
    ranks = sorted(_ranks_of(comm)) if hasattr(comm, "Get_group") else sorted(comm)
    if ranks and ranks != list(range(size)):
        raise ValueError(
            f"comm holds ranks {ranks} of {size}; torchring trains with all ranks that were launched. For collectives "
            "among some of them, pass process_sets=[hvd.ProcessSet(ranks)]"
        )


def _ranks_of(comm: Any) -> list[int]:
    from mpi4py import MPI

    group = comm.Get_group()
    translated = MPI.Group.Translate_ranks(group, list(range(group.Get_size())), MPI.COMM_WORLD.Get_group())
    return [int(rank) for rank in translated]


def shutdown() -> None:
    """Leave the other ranks, whose collectives raise HorovodInternalError from then on. `init` may be called again."""
    global _engine
    if _engine is None:
        return
    over, _engine = _engine, None
    for process_set in _sets.values():
        process_set.process_set_id = None
    _sets.clear()
    global_process_set.ranks = []
    if over.timeline is not None:
        over.timeline.close()
    if worlds.is_initialized() and worlds.default_world() is over.world:
        worker = current_worker()
        if worker is None:
            worlds.shutdown()
        else:
            worker.elastic.leave()


def is_initialized() -> bool:
    """True between `init` and `shutdown`."""
    return _engine is not None


def rank() -> int:
    """Number of this process among all."""
    return engine().world.rank


def size() -> int:
    """Number of processes."""
    return engine().world.size


def local_rank() -> int:
    """Number of this process on its host."""
    return engine().world.local_rank


def local_size() -> int:
    """Number of processes on this host."""
    return engine().world.local_size


def cross_rank() -> int:
    """Number of this process's host among the hosts that have a process with the same local rank."""
    world = engine().world
    return _hosts_with_local_rank(world).index(world.node_rank)


def cross_size() -> int:
    """Number of hosts that have a process with the same local rank."""
    return len(_hosts_with_local_rank(engine().world))


def _hosts_with_local_rank(world: World) -> list[int]:
    return [number for number, ranks in enumerate(world.hosts) if len(ranks) > world.local_rank]


def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Register a process set, on all ranks in the same order. Collective among all ranks, in the set or not.

    Raises ValueError for a set that cannot be added, HorovodInternalError if other ranks add another set.
    """
    _check_dynamic()
    if not isinstance(process_set, ProcessSet):
        process_set = ProcessSet(process_set)
    _add(process_set)
    return process_set


def _add(process_set: ProcessSet) -> None:
    here = engine()
    if process_set.process_set_id is not None or any(known.ranks == process_set.ranks for known in _sets.values()):
        raise ValueError(f"a process set of the ranks {process_set.ranks} is registered already: this is a duplicate")
    if not process_set.ranks or not set(process_set.ranks) <= set(range(here.world.size)):
        raise ValueError(f"a process set takes ranks in 0 .. {here.world.size - 1}, got {process_set.ranks}")
    request = Request(ADD_SET, "add_process_set", arguments=(("ranks", tuple(process_set.ranks)),))
    process_set.process_set_id = number = int(here.run(Operation(request)))
    _sets[number] = process_set


def remove_process_set(process_set: ProcessSet) -> bool:
    """Forget a process set. Collective among all ranks. Returns False for a set that is not registered, or global."""
    here = engine()
    _check_dynamic()
    number = process_set.process_set_id
    if not number or _sets.get(number) is not process_set:
        return False
    process_set.process_set_id = None
    here.run(Operation(Request(REMOVE_SET, "remove_process_set", arguments=(("process set", number),))))
    del _sets[number]
    return True


def _check_dynamic() -> None:
    if not read_settings(os.environ).dynamic_process_sets:
        raise ValueError(
            'process sets can change after hvd.init() only with hvd.init(process_sets="dynamic"), or with '
            "HOROVOD_DYNAMIC_PROCESS_SETS=1"
        )


def start_timeline(file_path: str, mark_cycles: bool = False) -> None:
    """Write a timeline from now on: rank 0 does, for all ranks. HOROVOD_TIMELINE must have been set before `init`."""
    here = engine()
    if here.settings.timeline is None:
        raise ValueError("set HOROVOD_TIMELINE=DYNAMIC before hvd.init() to start timelines later")
    stop_timeline()
    if here.world.rank == 0:
        here.timeline = Timeline(file_path, mark_cycles=mark_cycles)


def stop_timeline() -> None:
    """Close the timeline. Does nothing if none is written. Raises ValueError before `init`."""
    here = engine()
    timeline, here.timeline = here.timeline, None
    if timeline is not None:
        timeline.close()
