"""The functions of a script: `init`, `rank`, `size` ... They act on one default `World`, as the launcher describes it.

The first function that needs other ranks opens the world.
"""

from __future__ import annotations

import atexit
import contextlib
import math
import multiprocessing
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, Literal, get_args

import torch
import torch.distributed as dist
from torch.distributed import Store

from torchring.errors import PeerTimeoutError, RingError, TopologyError
from torchring.rendezvous.environment import (
    CHOICE,
    ELASTIC,
    MEMBER,
    LaunchEnvironment,
    check_group,
    membership,
    read_environment,
    secret_of_group,
    started_by_member,
)
from torchring.rendezvous.frameworks import refuse_lone_tasks
from torchring.rendezvous.rendezvous import blames_key
from torchring.rendezvous.signed import signed, unsigned, within
from torchring.rendezvous.store import mpi_world, open_store, unannounced_mpi
from torchring.rooms import room
from torchring.threads import is_done_within
from torchring.world import DEFAULT_TIMEOUT_SECONDS, DEFAULT_WARNING_SECONDS, World

Backend = Literal["auto", "gloo", "mpi"]
BACKENDS: Final = get_args(Backend)
_SCRIPTS_GROUP: Final = "torch.distributed"  # in place of a launcher: the script has made a process group


@dataclass
class _Process:
    """This process, and the worlds that it has joined.

    Attributes:
        world: the default world, while one is open.
        pid: of the process that joined; None before the first world.
        forked: why this process cannot join: it was forked from a rank.
        store: where the ranks of this launch meet.
        launch: the launch to which `store` belongs. Spark starts several, one after the other, in the same process.
        num_inits: number of worlds so far, of this launch. It names the keys of the next one.
        process_group: the default process group of torch.distributed, if init() made it.
        group_store: of that group, which does not keep a store of Python's alive.
        num_groups: number of process groups that init() has made in this launch.
    """

    world: World | None = None
    pid: int | None = None
    forked: RingError | None = None
    store: Store | None = None
    launch: LaunchEnvironment | None = None
    num_inits: int = 0
    process_group: dist.ProcessGroup | None = None
    group_store: Store | None = None
    num_groups: int = 0

    def join(self) -> None:
        """This process becomes a rank, and says at exit how its script has ended."""
        if self.pid is None:
            atexit.register(_leave_at_exit)
        self.pid = os.getpid()

    def after_fork(self) -> None:  # called after that of `world.py`, so a world of several ranks has its failure by now
        self.store = None  # its connection is the parent's
        if self.world is not None and self.world.size == 1:
            self.world = None  # the child may become a rank
        if self.world is not None:
            self.forked = self.forked or self.world.failure


_process: Final = _Process()
os.register_at_fork(after_in_child=_process.after_fork)


def init(
    backend: Backend = "auto",
    *,
    timeout_seconds: float | None = None,
    process_group: bool = False,
    stall_warning_seconds: float | None = None,
    check_data: bool | None = None,
) -> World:
    """Join the world that the launcher started. Collective. `wrap` and the collectives call init() themselves.

    If the script has made a process group, torchring uses its rank, size and store, and nothing else of it: the
    script's collectives never mix with torchring's. torchring makes no default process group unless asked to, so a
    script may still make its own.

    Args:
        backend: the engine between hosts: "gloo", or "mpi" (mpi4py) where mpirun started the script. "auto" is "gloo".
        timeout_seconds: a rank that keeps others waiting for longer makes them raise PeerTimeoutError. Default: 300.
        process_group: also make torch.distributed's default process group, unless the script has made one: over NCCL
            for tensors on a GPU, over Gloo for others. `DistributedSampler(dataset)` and metrics that call `dist.*`
            need a process group. `shutdown()` destroys a process group that init() has made.
        stall_warning_seconds: a rank that has waited for others for that long logs a warning through
            `logging.getLogger("torchring")`, once for each wait: which ranks are missing, and what each of them did
            last. Default: 30. 0 turns the warning off. Ranks may have different values.
        check_data: compare digests of the batches that ranks train on, and warn of ranks that get the same ones, and of
            epochs in the same order. Nothing is sent for it. Default: True. False where that is on purpose.

    Returns:
        The default world. A second call returns the same world.

    Raises:
        ValueError: the backend is unknown, the timeout is not positive, stall_warning_seconds is negative, or the open
            world has another one, or other than check_data.
        TopologyError: the launcher's environment is incomplete, ranks were told different world sizes or backends,
            processes that were launched as one job would each see a world of size 1, or the launcher did not start MPI.
        PeerTimeoutError: a rank did not show up.
    """
    if _process.forked is not None:  # the launcher's environment and the store belong to the parent
        raise type(_process.forked)(_process.forked.message, rank=_process.forked.rank)
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(map(repr, BACKENDS))}, got {backend!r}")
    if timeout_seconds is not None and not timeout_seconds > 0:
        raise ValueError(f"timeout_seconds must be positive, got {timeout_seconds!r}")
    if stall_warning_seconds is not None and not 0 <= stall_warning_seconds < math.inf:
        raise ValueError(f"stall_warning_seconds must be finite and not negative, got {stall_warning_seconds!r}")
    if _process.world is None:
        _process.world = _join(
            backend,
            DEFAULT_TIMEOUT_SECONDS if timeout_seconds is None else timeout_seconds,
            DEFAULT_WARNING_SECONDS if stall_warning_seconds is None else stall_warning_seconds,
        )
        _process.world.check_data = check_data is not False
    else:
        _check_open_world(_process.world, backend, timeout_seconds, stall_warning_seconds, check_data)
    if process_group and _process.world.launcher == ELASTIC:
        raise TopologyError(
            "process_group=True does not work in an elastic job, because torch.distributed's process group keeps its "
            "ranks; use torchring's collectives, and torchring.elastic.Sampler"
        )
    if process_group:
        _make_process_group(_process.world)
    return _process.world


def _check_open_world(
    world: World,
    backend: Backend,
    timeout_seconds: float | None,
    stall_warning_seconds: float | None,
    check_data: bool | None,
) -> None:
    """Raise unless `world`, which is open, is what init() was asked for."""
    if world.size == 1 and world.launcher != ELASTIC:
        _refuse_to_stay_alone()
    for name, wanted, own in (
        ("timeout_seconds", timeout_seconds, world.timeout_seconds),
        ("stall_warning_seconds", stall_warning_seconds, world.stall_warning_seconds),
        ("check_data", check_data, world.check_data),
        ("backend", backend, world.backend),
    ):
        if wanted not in (None, "auto", own):
            raise ValueError(
                f"the world is open with {name}={own!r}, got {wanted!r}; call init() with it before anything else, or "
                "shutdown() first"
            )


def _join(backend: Backend, timeout_seconds: float, stall_warning_seconds: float) -> World:
    """Open the world that the launcher, or the script's process group, describes. Collective."""
    launch = _launched()
    if launch.launcher == "none" and os.environ.get(CHOICE) != "none":
        refuse_lone_tasks()
    if launch.launcher == ELASTIC:
        return _before_generation(launch, backend, timeout_seconds, stall_warning_seconds)
    if launch.member_pid is not None and getattr(multiprocessing.current_process(), "_inheriting", False):
        raise TopologyError(
            f"this process (pid {os.getpid()}) is a worker that rank {launch.rank} has started by spawn or forkserver, "
            "such as a DataLoader's, and runs the script from its top again. Put what the script does under "
            '`if __name__ == "__main__":`',
            rank=launch.rank,
        )
    if launch.member_pid is not None:
        raise TopologyError(
            f"this process (pid {os.getpid()}) was started by rank {launch.rank} (pid {launch.member_pid}), which "
            "takes part already; it can ask for rank() and size(), but only the rank itself can reduce or exchange "
            f"tensors. If this process is to train by itself, set {CHOICE}=none in its environment",
            rank=launch.rank,
        )
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
    store = within(base, f"torchring/{_process.num_inits}") if base is not None else None
    # Counted before it is open: a world that fails to open leaves keys behind, which the next world must not read.
    _process.num_inits += 1
    _process.join()
    world = _observed(
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
        os.environ[MEMBER] = membership(os.environ, os.getpid(), world.rank, world.size, world.local_rank)
    return world


def _before_generation(
    launch: LaunchEnvironment, backend: str, timeout_seconds: float, stall_warning_seconds: float
) -> World:
    """The world of a worker of an elastic job until `torchring.elastic.run` opens a generation."""
    if backend == "mpi":
        raise TopologyError("backend='mpi' does not work in an elastic job, whose ranks change; leave it out")
    _process.join()
    os.environ[MEMBER] = membership(os.environ, os.getpid(), launch.rank, launch.size, launch.local_rank or 0)
    world = World(
        None,
        launch.rank,
        1,
        local_rank=launch.local_rank,
        timeout_seconds=timeout_seconds,
        launcher=launch.launcher,
        stall_warning_seconds=stall_warning_seconds,
        is_provisional=True,
    )
    return _observed(world)


def open_generation(store: Store | None, rank: int, size: int) -> World:
    """Make the world of a generation of an elastic job the default world, with the options of init(). Collective.

    Args:
        store: shared by the ranks of this generation only.

    Raises:
        RingError: a rank is lost, or does not come.
    """
    before = leave_generation()
    _process.num_inits += 1
    world = _observed(
        World(
            store if size > 1 else None,
            rank,
            size,
            local_rank=before.local_rank,
            timeout_seconds=before.timeout_seconds,
            launcher=before.launcher,
            stall_warning_seconds=before.stall_warning_seconds,
        )
    )
    world.check_data = before.check_data
    os.environ[MEMBER] = membership(os.environ, os.getpid(), rank, size, world.local_rank)
    _process.world = world
    return world


def leave_generation() -> World:
    """Close the world of a generation. Returns the provisional world that is the default world from then on."""
    if _process.world is None:
        return init()
    if not _process.world.is_provisional:
        world, _process.world = _process.world, None
        options = (world.backend, world.timeout_seconds, world.stall_warning_seconds)
        _process.world = _before_generation(_launched(), *options)
        _process.world.check_data = world.check_data
        world.close()
    return _process.world


def _observed(world: World) -> World:
    """Let those who observe worlds listen to this one, which has just been opened. Collective. Returns `world`."""
    room("observe").observe(world)
    return world


def shutdown() -> None:
    """Leave the world. All ranks may call `init()` again. Does nothing if no world is open."""
    if _process.world is not None:
        world, _process.world = _process.world, None
        os.environ.pop(MEMBER, None)
        world.close()
    group, _process.process_group = _process.process_group, None
    if group is not None and dist.group.WORLD is group and _process.pid == os.getpid():
        dist.destroy_process_group()
        _process.group_store = None


def leave(reason: str) -> None:
    """`shutdown()` where the script of this rank has ended, but its process lives on, as workers of frameworks do.

    Args:
        reason: told to peers that still wait for this rank, such as "its training loop had ended".
    """
    if _process.world is not None:
        _process.world.say_why_it_ends(reason)
    shutdown()


def is_initialized() -> bool:
    """Whether this process has joined a world."""
    return _process.world is not None


def default_world() -> World:
    """The world that the module-level functions act on. Joins the world if this process has not joined yet."""
    if _process.world is None:
        return init()
    if _process.world.size == 1 and _process.world.launcher != ELASTIC:
        _refuse_to_stay_alone()
    return _process.world


def _refuse_to_stay_alone() -> None:
    """Raise TopologyError if this process joined a world of one, and has become one of several ranks since."""
    launch = _launched()
    if launch.size > 1:
        raise TopologyError(
            f"this process is rank {launch.rank} of {launch.size} by now, but it joined a world of size 1 before, when "
            "it was alone, and would train alone. Call torchring.shutdown() after init_process_group(), or call "
            "nothing of torchring's before init_process_group()"
        )


def rank() -> int:
    """Number of this process, 0 <= rank() < size(). Waits for no other rank.

    In a process that a rank has started, such as a DataLoader's worker: the number of that rank.
    """
    return _process.world.rank if _process.world is not None else _launched().rank


def size() -> int:
    """Number of processes that train together. Waits for no other rank."""
    world = _process.world
    return _launched().size if world is None or world.is_provisional else world.size


def local_rank() -> int:
    """Number of this process on its host: the launcher's LOCAL_RANK, where the launcher gives one.

    Waits for the other ranks only where the launcher gives none.
    """
    if _process.world is None and (said := _launched().local_rank) is not None:
        return said
    return default_world().local_rank


def local_size() -> int:
    """Number of ranks on this host, this rank included."""
    return default_world().local_size


def node_rank() -> int:
    """Number of this host, 0 <= node_rank() < num_nodes()."""
    return default_world().node_rank


def num_nodes() -> int:
    """Number of hosts; ranks that cannot share memory count as on different hosts."""
    return default_world().num_nodes


def launcher() -> str:
    """Name of the launcher: "torchrun", "mpirun (Open MPI)", "srun", ...; "none" without one."""
    return _process.world.launcher if _process.world is not None else _launched().launcher


def device() -> torch.device:
    """The device for this rank's model: a GPU if this process sees any, else the CPU.

    The GPU is number local_rank() modulo the number of GPUs that this process sees. So a launcher may show each rank a
    single GPU.
    """
    if not torch.cuda.is_available():
        if (other := torch.accelerator.current_accelerator(check_available=True)) is not None:
            text = f"torchring trains on GPUs of NVIDIA and AMD, and on the CPU; it does not use this machine's {other}"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        return torch.device("cpu")
    return torch.device("cuda", local_rank() % torch.cuda.device_count())


def _launched() -> LaunchEnvironment:
    """Describe this process: by the script's process group, the rank that started it, or the launcher."""
    if dist.is_available() and dist.is_initialized():
        check_group(os.environ, dist.get_world_size())
        local_rank = int(os.environ["LOCAL_RANK"]) if "LOCAL_RANK" in os.environ else None
        size = dist.get_world_size()
        secret, is_one_host = secret_of_group(os.environ, size), os.environ.get("LOCAL_WORLD_SIZE") == str(size)
        return LaunchEnvironment(
            _SCRIPTS_GROUP, dist.get_rank(), size, local_rank, is_one_host=is_one_host, secret=secret
        )
    if parent := started_by_member(os.environ, os.getpid()):
        return parent
    launch = read_environment(os.environ)
    return (unannounced_mpi(os.environ) or launch) if launch.launcher == "none" else launch


def _make_process_group(world: World) -> None:
    """Make torch.distributed's default process group, unless there is one. Collective."""
    if dist.is_initialized():
        return
    name = f"process_group/{_process.num_groups}"
    _process.num_groups += 1
    store: Store = dist.HashStore()
    if world.rendezvous is not None:
        world.rendezvous.all_gather(name, b"")  # names an absent rank, as torch.distributed does not
        store = within(world.rendezvous.store, name)
    has_nccl = torch.cuda.is_available() and dist.is_nccl_available()
    _process.group_store = store = unsigned(store) if has_nccl else store
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if has_nccl else "gloo",
        store=store,
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=world.timeout_seconds),
    )
    _process.process_group = dist.group.WORLD
    if world.rendezvous is not None:  # a rank that goes on to shutdown() would break off connections of the others
        world.rendezvous.all_gather(name, b"")


def launcher_store(launch: LaunchEnvironment, timeout_seconds: float) -> Store | None:
    """The store at which the ranks meet. A later init() uses the same store, unless this is another launch by then."""
    is_another = _process.launch is None or _meeting(_process.launch) != _meeting(launch)
    if _process.store is None or is_another:
        tcp = open_store(launch, timeout_seconds)
        if tcp is None:
            return None
        if is_another:  # its ranks may have had other numbers of worlds before
            _process.launch, _process.num_inits, _process.num_groups = launch, 0, 0
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        _process.store = within(signed(tcp, launch.secret), f"torchring/attempt{attempt}")
    return _process.store


def forget_store() -> None:
    """Close the store of this launch, where this process may listen. Call this after `shutdown`."""
    _process.store = _process.launch = None


def _meeting(launch: LaunchEnvironment) -> object:
    """What two launches do not have alike. A script may change LOCAL_RANK, or spell MASTER_ADDR in another way."""
    return launch.master and launch.master[1], launch.key_values, launch.over_mpi, launch.job, launch.secret


def _blame(world: World, peers: Sequence[int]) -> None:
    """Tell `torchring run`, whose agent hosts the store, that these ranks have failed before this one."""
    store, launch = _process.store, _process.launch
    is_told = launch is not None and launch.secret and launch.store_is_hosted
    if is_told and store is not None and world.rendezvous is not None and peers and world.rank not in peers:
        key, text = blames_key(world.rank), ",".join(map(str, peers))
        with contextlib.suppress(dist.DistError):  # the agent has ended
            is_done_within(world.rendezvous.start(lambda _: store.set(key, text)), 1.0)


def _leave_at_exit() -> None:
    """Tell the peers that this script has ended, and why: the peers may still wait for this rank.

    Under MPI, also leave the world before MPI's own exit. MPI_Finalize waits for all ranks: a rank that has raised an
    exception would wait there, while its peers wait for that rank until the time-out. Without MPI, the end of the
    process tells the peers. A forked child tells nothing, because it shares its parent's sockets.
    """
    if _process.world is None or _process.pid != os.getpid():
        return
    # Python sets last_value to an exception that nobody caught. In an interactive session it may be an old exception.
    error = getattr(sys, "last_value", None) if not hasattr(sys, "ps1") else None
    if error is not None:
        _process.world.say_why_it_ends(f"its script ended with {type(error).__name__}: {error}", has_failed=True)
        if isinstance(error, RingError) and not isinstance(error, PeerTimeoutError):
            _blame(_process.world, error.peers)
    else:  # after sys.exit(1), too, of which Python keeps no trace
        _process.world.say_why_it_ends("its script had ended")
    if "mpi4py.MPI" in sys.modules:
        shutdown()
