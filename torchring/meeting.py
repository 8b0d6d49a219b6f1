"""Opens the world that the launcher, or the script's process group, describes: the side of `default_world.py` that
knows launchers."""

import functools
import multiprocessing
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from torch.distributed import Store

from torchring.default_world import device
from torchring.errors import TopologyError
from torchring.rendezvous.environment import (
    CHOICE,
    ELASTIC,
    PARENT,
    LaunchEnvironment,
    check_group,
    describe_parent,
    parent_rank,
    read_environment,
    secret_of_group,
)
from torchring.rendezvous.frameworks import refuse_lone_tasks
from torchring.rendezvous.rendezvous import within
from torchring.rendezvous.signed import signed, unsigned
from torchring.rendezvous.store import blames_key, mpi_world, open_store, unannounced_mpi
from torchring.rooms import room
from torchring.threads import is_done_within
from torchring.world import World

_SCRIPTS_GROUP: Final = "torch.distributed"  # in place of a launcher: the script has made a process group


@dataclass
class _ProcessMeetings:
    """The meetings of this process."""

    store: Store | None = None  # where the ranks of this launch meet
    # the launch to which `store` belongs. Spark starts several, one after the other, in the same process.
    launch: LaunchEnvironment | None = None
    num_worlds: int = 0  # number of worlds so far, of this launch. It names the keys of the next one.
    num_groups: int = 0  # number of process groups that torchring has made in this launch
    group_store: Store | None = None  # of the last one, which does not keep a store of Python's alive

    def after_fork(self) -> None:
        self.store = None  # its connection is the parent's


meetings: Final = _ProcessMeetings()
os.register_at_fork(after_in_child=meetings.after_fork)


def launched() -> LaunchEnvironment:
    """Describe this process: by the script's process group, the rank that started it, or the launcher."""
    if dist.is_available() and dist.is_initialized():
        check_group(os.environ, dist.get_world_size())
        local_rank = int(os.environ["LOCAL_RANK"]) if "LOCAL_RANK" in os.environ else None
        size = dist.get_world_size()
        secret, is_one_host = secret_of_group(os.environ, size), os.environ.get("LOCAL_WORLD_SIZE") == str(size)
        return LaunchEnvironment(
            _SCRIPTS_GROUP, dist.get_rank(), size, local_rank, is_one_host=is_one_host, secret=secret
        )
    if parent := parent_rank(os.environ, os.getpid()):
        return parent
    launch = read_environment(os.environ)
    return (unannounced_mpi(os.environ) or launch) if launch.launcher == "none" else launch


def open_world(backend: str, timeout_seconds: float, stall_warning_seconds: float) -> World:
    """Open the world that the launcher, or the script's process group, describes. Collective."""
    launch = launched()
    if launch.launcher == "none" and os.environ.get(CHOICE) != "none":
        refuse_lone_tasks()
    if launch.launcher == ELASTIC:
        world: World = room("elastic").open_provisional(launch, backend, timeout_seconds, stall_warning_seconds)
        return world
    _refuse_child(launch)
    if launch.launcher == _SCRIPTS_GROUP:
        base: Store | None = signed(dist.distributed_c10d._get_default_store(), launch.secret)
        store_host = None
    else:
        base = launcher_store(launch, timeout_seconds)
        store_host = None if launch.store_is_hosted else 0
    if backend == "mpi":
        if launch.launcher == "none":
            raise TopologyError("backend='mpi' needs a script that mpirun started; `mpirun -np 1` will do for one rank")
        mpi_world(launch.launcher, launch.rank, launch.size, instead="init without backend='mpi'")
    store = within(base, f"torchring/{meetings.num_worlds}") if base is not None else None
    # Counted before it is open: a world that fails to open leaves keys behind, which the next world must not read.
    meetings.num_worlds += 1
    world = room("observe").observe(
        World(
            store,
            launch.rank,
            launch.size,
            local_rank=launch.local_rank,
            timeout_seconds=timeout_seconds,
            launcher=launch.launcher,
            store_host=store_host,
            backend="gloo" if backend == "auto" else backend,
            job=launch.job,
            is_one_host=launch.is_one_host,
            stall_warning_seconds=stall_warning_seconds,
        )
    )
    if world.size > 1:
        enter(world, world.size)
    return world


def _refuse_child(launch: LaunchEnvironment) -> None:
    """Raise TopologyError in a process that a rank has started."""
    if launch.parent_pid is None:
        return
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise TopologyError(
            f"this process (pid {os.getpid()}) is a worker that rank {launch.rank} has started by spawn or forkserver, "
            "such as a DataLoader's, and runs the script from its top again. Put what the script does under "
            '`if __name__ == "__main__":`',
            rank=launch.rank,
        )
    raise TopologyError(
        f"this process (pid {os.getpid()}) was started by rank {launch.rank} (pid {launch.parent_pid}), which "
        "takes part already; it can ask for rank() and size(), but only the rank itself can reduce or exchange "
        f"tensors. If this process is to train by itself, set {CHOICE}=none in its environment",
        rank=launch.rank,
    )


def enter(world: World, size: int) -> None:
    """Tell processes that this one starts that it is a rank of `world`, of so many, until that closes."""
    os.environ[PARENT] = describe_parent(os.environ, os.getpid(), world.rank, size, world.local_rank)
    world.on_close(_forget_parent)


def _forget_parent() -> None:
    os.environ.pop(PARENT, None)


def refuse_to_stay_alone(world: World) -> None:
    """Raise TopologyError if this process joined a world of one, and has become one of several ranks since."""
    if world.size > 1 or world.launcher == ELASTIC:
        return
    launch = launched()
    if launch.size > 1:
        raise TopologyError(
            f"this process is rank {launch.rank} of {launch.size} by now, but it joined a world of size 1 before, when "
            "it was alone, and would train alone. Call torchring.shutdown() after init_process_group(), or call "
            "nothing of torchring's before init_process_group()"
        )


def make_process_group(world: World) -> None:
    """Make torch.distributed's default process group, unless there is one, for as long as `world` is open. Collective.

    Raises TopologyError in an elastic job.
    """
    if world.launcher == ELASTIC:
        raise TopologyError(
            "process_group=True does not work in an elastic job, because torch.distributed's process group keeps its "
            "ranks; use torchring's collectives, and torchring.elastic.Sampler"
        )
    if dist.is_initialized():
        return
    name = f"process_group/{meetings.num_groups}"
    meetings.num_groups += 1
    store: Store = dist.HashStore()
    has_nccl = torch.cuda.is_available() and dist.is_nccl_available()
    if world.rendezvous is not None:
        gpu = str(torch.cuda.get_device_properties(device()).uuid) if has_nccl else ""
        gpus = world.rendezvous.all_gather(name, gpu.encode())  # names an absent rank, as torch.distributed does not
        has_nccl = len({*gpus} - {b""}) == world.size  # which refuses ranks that share a GPU
        store = within(world.rendezvous.store, name)
    meetings.group_store = store = unsigned(store) if has_nccl else store
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if has_nccl else "gloo",
        store=store,
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=world.timeout_seconds),
    )
    world.on_close(functools.partial(_destroy, dist.group.WORLD))
    if world.rendezvous is not None:  # a rank that goes on to shutdown() would break off connections of the others
        world.rendezvous.all_gather(name, b"")


def _destroy(group: dist.ProcessGroup | None) -> None:
    if dist.group.WORLD is group:
        dist.destroy_process_group()
        meetings.group_store = None


def launcher_store(launch: LaunchEnvironment, timeout_seconds: float) -> Store | None:
    """The store at which the ranks meet. A later init() uses the same store, unless this is another launch by then."""
    is_another = meetings.launch is None or _where(meetings.launch) != _where(launch)
    if meetings.store is None or is_another:
        tcp = open_store(launch, timeout_seconds)
        if tcp is None:
            return None
        if is_another:  # its ranks may have had other numbers of worlds before
            meetings.launch, meetings.num_worlds, meetings.num_groups = launch, 0, 0
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        meetings.store = within(signed(tcp, launch.secret), f"torchring/attempt{attempt}")
    return meetings.store


def forget_store() -> None:
    """Close the store of this launch, where this process may listen. Call this after `shutdown`."""
    meetings.store = meetings.launch = None


def _where(launch: LaunchEnvironment) -> object:
    """What two launches do not have alike. A script may change LOCAL_RANK, or spell MASTER_ADDR in another way."""
    return launch.master and launch.master[1], launch.over_mpi, launch.job, launch.secret


def blame(world: World, peers: Sequence[int]) -> None:
    """Tell `torchring run`, whose agent hosts the store, that these ranks have failed before this one."""
    store, launch = meetings.store, meetings.launch
    is_told = launch is not None and launch.secret and launch.store_is_hosted
    if is_told and store is not None and world.rendezvous is not None and peers and world.rank not in peers:
        key, text = blames_key(world.rank), ",".join(map(str, peers))
        is_done_within(world.rendezvous.start(lambda _: store.set(key, text)), 1.0)
