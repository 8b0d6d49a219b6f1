"""The functions of a script: `init`, `rank`, `size` ... They act on one default `World`, as the launcher describes it.

The first function that needs other ranks opens the world.
"""

from __future__ import annotations

import atexit
import math
import os
import sys
import warnings
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

import torch

from torchring.errors import PeerTimeoutError, RingError
from torchring.rooms import room
from torchring.world import DEFAULT_TIMEOUT_SECONDS, DEFAULT_WARNING_SECONDS, Group, World

Backend = Literal["auto", "gloo", "mpi"]
BACKENDS: Final = get_args(Backend)


@dataclass
class _ThisProcess:
    """This process, and the worlds that it has joined."""

    world: World | None = None  # the default world, while one is open
    pid: int | None = None  # of the process that joined; None before the first world
    forked: RingError | None = None  # why this process cannot join: it was forked from a rank

    def after_fork(self) -> None:  # called after that of `world.py`, so a world of several ranks has its failure by now
        if self.world is not None and self.world.size == 1:
            self.world = None  # the child may become a rank
        if self.world is not None:
            self.forked = self.forked or self.world.failure


_process: Final = _ThisProcess()
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
        world: World = room("meeting").open_world(
            backend,
            DEFAULT_TIMEOUT_SECONDS if timeout_seconds is None else timeout_seconds,
            DEFAULT_WARNING_SECONDS if stall_warning_seconds is None else stall_warning_seconds,
        )
        world.check_data = check_data is not False
        become(world)
    else:
        world = _process.world
        _check_open_world(world, backend, timeout_seconds, stall_warning_seconds, check_data)
    if process_group:
        room("meeting").make_process_group(world)
    return world


def become(world: World) -> None:
    """`world`, which has just been opened, is the default world from now on."""
    if _process.pid is None:
        atexit.register(_leave_at_exit)
    _process.pid = os.getpid()
    _process.world = world


def _check_open_world(
    world: World,
    backend: Backend,
    timeout_seconds: float | None,
    stall_warning_seconds: float | None,
    check_data: bool | None,
) -> None:
    """Raise unless `world`, which is open, is what init() was asked for."""
    room("meeting").refuse_to_stay_alone(world)
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


def shutdown() -> None:
    """Leave the world. All ranks may call `init()` again. Does nothing if no world is open."""
    if _process.world is not None:
        world, _process.world = _process.world, None
        world.close()


def leave(reason: str) -> None:
    """`shutdown()` where the script of this rank has ended, but its process lives on, as workers of frameworks do.

    Peers that still wait for this rank are told the reason, such as "its training loop had ended".
    """
    if _process.world is not None:
        _process.world.say_why_it_ends(reason)
    shutdown()


def open_world() -> World | None:
    """The default world, if this process has joined one."""
    return _process.world


def is_initialized() -> bool:
    """Whether this process has joined a world."""
    return _process.world is not None


def default_world() -> World:
    """The world that the module-level functions act on. Joins the world if this process has not joined yet."""
    if _process.world is None:
        return init()
    if _process.world.size == 1:
        room("meeting").refuse_to_stay_alone(_process.world)
    return _process.world


def world_of(group: Group | None) -> World:
    """The world of this rank's group; None is the group of all ranks. Collective over the group at its first use."""
    world = default_world()
    found: World = world if group is None else room("groups").open_group(world, group)
    return found


def members_of(group: Group) -> tuple[int, ...]:
    """The ranks of this rank's group, in ascending order. Sends nothing. Raises ValueError and TypeError."""
    found: tuple[int, ...] = room("groups").members_of(group, rank(), size(), launcher())
    return found


def _launched() -> Any:
    return room("meeting").launched()


def rank(group: Group | None = None) -> int:
    """Number of this process, 0 <= rank() < size(). Waits for no other rank.

    In a process that a rank has started, such as a DataLoader's worker: the number of that rank.

    Args:
        group: see `wrap`. The number is then the position among the ranks of that group.
    """
    own = int(_process.world.rank if _process.world is not None else _launched().rank)
    return own if group is None else members_of(group).index(own)


def size(group: Group | None = None) -> int:
    """Number of processes that train together; of `group`, if it is given. Waits for no other rank."""
    world = _process.world
    if group is not None:
        return len(members_of(group))
    return int(_launched().size) if world is None or world.is_provisional else world.size


def local_rank() -> int:
    """Number of this process on its host: the launcher's LOCAL_RANK, where the launcher gives one.

    Waits for the other ranks only where the launcher gives none.
    """
    if _process.world is None and (said := _launched().local_rank) is not None:
        return int(said)
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
            room("meeting").blame(_process.world, error.peers)
    else:  # after sys.exit(1), too, of which Python keeps no trace
        _process.world.say_why_it_ends("its script had ended")
    if "mpi4py.MPI" in sys.modules:
        shutdown()
