"""Who takes part: rank and size as the launcher said, and which ranks share a host.

`World` is what every other part of torchring is handed. The functions are the door for scripts: they act on one default
`World`, which the first of them that needs other ranks opens.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import json
import math
import os
import sys
import threading
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Final, Literal, Protocol, TypeVar, get_args

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from torchring.errors import (
    PeerLostError,
    PeerTimeoutError,
    RingError,
    TopologyError,
    decode_error,
    encode_error,
    with_way_out,
)
from torchring.memory.host import HostGroup, connect
from torchring.releases import check_torch
from torchring.rendezvous.environment import (
    CHOICE,
    ELASTIC,
    MEMBER,
    LaunchEnvironment,
    check_group,
    membership,
    read_environment,
    started_by_member,
)
from torchring.rendezvous.rendezvous import Rendezvous, ended_key
from torchring.rendezvous.store import mpi_world, open_store, unannounced_mpi
from torchring.stalls.monitor import WARNING_SECONDS, StallMonitor, warn_of_absent
from torchring.stalls.page import PAGE_BYTES, Progress
from torchring.tracing import writer
from torchring.tracing.recorder import Recorder

check_torch(torch.__version__)
_T = TypeVar("_T")
DEFAULT_TIMEOUT_SECONDS: Final = 300.0
Backend = Literal["auto", "gloo", "mpi"]
BACKENDS: Final = get_args(Backend)
_SCRIPTS_GROUP: Final = "torch.distributed"  # in place of a launcher: the script has made a process group
_ADVICE: Final = (
    ". Its own output says whether it failed. If it did not, and others still have batches: give every rank equally "
    "many, as torch's DistributedSampler does, or put the loop into a `with torchring.join(optimizer):` block"
)
_GOODBYE_SECONDS: Final = 2.0  # for telling ranks of other hosts, if the way to the store may be cut
_FORKED: Final = (
    "this process was forked from rank {rank} (pid {pid}) and is no rank itself: it can use its copy of the model, but "
    "cannot call collectives, reduce gradients or step"
)


class Fails(Protocol):
    """What a world tells that it is broken: a channel, a mover, a transport."""

    def fail(self, error: RingError) -> object:
        """Send nothing more, and make the other ranks raise `error` where they wait for this rank."""


class World:
    """The ranks that reduce together, as one of them sees it. Opening it is collective.

    A part of torchring learns of the other ranks through the World that it is handed. So N worlds can live in N threads
    of one process.

    Args:
        store: a key-value store that exactly these ranks share; None for a world of one rank.
        rank: number of this process, 0 <= rank < size.
        size: number of processes.
        local_rank: number of this process on its host; by default its position among the ranks of this host.
        timeout_seconds: how long a live rank may keep the others waiting.
        launcher: name of what started the ranks, for messages.
        store_host: the rank whose process hosts the store; None if no rank's process does.
        backend: the engine between hosts, "gloo" or "mpi"; the same on every rank.
        job: the launcher's name for the job that all these ranks belong to; "" if the launcher gives none.
        stall_warning_seconds: how long this rank waits before it logs which rank is missing; 0 for never.

    Attributes:
        host: the ranks that share memory with this rank.
        hosts: all ranks, grouped by shared memory, in order of each group's first rank.
        num_cores: number of processor cores that the ranks of this host may use together.
        num_reductions: number of reductions of gradients, by all optimizers of this rank.
        progress: where this rank says what it is doing. None in a world of one.
        recorder: the steps of this rank.
        failure: the error that broke this world. A broken world sends nothing more.
        opening: lock of the thread that opens what all threads share.
        is_joining: whether the script is inside `torchring.join`, where ranks may have ended that take part in
            reductions only.
        is_forked: whether this process is a child that the rank's process forked, and so no rank.
        is_provisional: whether this world of one stands for the next generation of an elastic job, which has not met.
        wants_change: whether this rank has heard that its generation is to meet anew, at the end of a step.
        leaves: whether this rank is about to leave its elastic job, at the end of a step.
    """

    def __init__(
        self,
        store: Store | None,
        rank: int,
        size: int,
        *,
        local_rank: int | None = None,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        launcher: str = "none",
        store_host: int | None = None,
        backend: str = "gloo",
        job: str = "",
        stall_warning_seconds: float = WARNING_SECONDS,
        is_provisional: bool = False,
    ) -> None:
        self.rank = rank
        self.size = size
        self.is_provisional = is_provisional
        self.wants_change = False
        self.leaves = False
        self.launcher = launcher
        self.backend = backend
        self.timeout_seconds = timeout_seconds
        self.stall_warning_seconds = stall_warning_seconds
        self.rendezvous: Rendezvous | None = None
        self.host: HostGroup | None = None
        self.hosts: tuple[tuple[int, ...], ...] = ((rank,),)
        self.num_cores = len(os.sched_getaffinity(0))
        self.is_open = True
        self.num_reductions = 0
        self.progress: Progress | None = None
        self.recorder = Recorder()
        self._stalls: StallMonitor | None = None
        self.failure: RingError | None = None
        self.opening = threading.RLock()
        self._told_of_failure: weakref.WeakSet[Fails] = weakref.WeakSet()
        self.is_joining = False
        self.is_forked = False
        self._pid = os.getpid()
        self._num_channels = 0
        self._closing: list[Callable[[], None]] = []
        self._shared: dict[Callable[[World], Any], Any] = {}
        if store is not None and size > 1:
            try:
                self._find_hosts(Rendezvous(store, rank, size, timeout_seconds), store_host, job)
            except BaseException as error:
                if not isinstance(
                    error, RingError
                ):  # the other ranks know of a RingError, or it is this rank's mistake
                    self.break_off("torchring.init()", error)
                self.close()
                raise
        _worlds.add(self)
        writer.add(self.recorder)
        members = self.hosts[self.node_rank]
        self.local_rank = members.index(rank) if local_rank is None else local_rank
        self.local_size = len(members)

    def _find_hosts(self, rendezvous: Rendezvous, store_host: int | None, job: str) -> None:
        """Find out which ranks share memory, and check that all ranks were given the same backend."""
        self.rendezvous = rendezvous
        rendezvous.store_host = store_host
        rendezvous.on_wait = warn_of_absent(self.rank, self.stall_warning_seconds)
        rendezvous.check_job(job)
        rendezvous.agree_on_size()
        rendezvous.claim_rank()
        self.host = connect(rendezvous)
        rendezvous.watch = self.host.check_peers
        self._watch_stalls(rendezvous, self.host)
        mine = {"host": self.host.ranks, "cores": sorted(os.sched_getaffinity(0)), "backend": self.backend}
        cards = [json.loads(text) for text in rendezvous.all_gather("world", json.dumps(mine).encode())]
        if len(first := {card["backend"]: peer for peer, card in reversed([*enumerate(cards)])}) > 1:
            named = ", ".join(f"{backend!r} on rank {peer}" for backend, peer in sorted(first.items()))
            raise TopologyError(f"ranks were given different backends: {named}; give all the same", rank=self.rank)
        self.hosts = tuple(sorted({tuple(card["host"]) for card in cards}))
        self.num_cores = len(set().union(*(cards[peer]["cores"] for peer in self.host.ranks)))
        rendezvous.confirm_opening()

    def _watch_stalls(self, rendezvous: Rendezvous, host: HostGroup) -> None:
        """From now on the ranks see what this rank is doing."""
        self._stalls = StallMonitor(rendezvous, host, host.allocate(PAGE_BYTES), self.stall_warning_seconds)
        self.on_close(self._stalls.close)
        self.progress = self._stalls.progress
        rendezvous.on_wait = host.on_wait = self.progress.await_ranks

    @property
    def node_rank(self) -> int:
        return next(i for i, members in enumerate(self.hosts) if self.rank in members)

    @property
    def num_nodes(self) -> int:
        return len(self.hosts)

    @property
    def shares_memory(self) -> bool:
        """Whether all ranks are on this host."""
        return self.host is not None and self.host.size == self.size

    def next_channel_name(self) -> str:
        """A new name; equal on all ranks, because all ranks open channels in the same order."""
        self._num_channels += 1
        return f"channel{self._num_channels}"

    def shared(self, open_it: Callable[[World], _T]) -> _T:
        """What `open_it(self)` returned at the first call with that function or class. Forgotten when the world closes.

        From any thread; the threads that come later wait for the one that opens.
        """
        if open_it not in self._shared:
            with self.opening:
                if open_it not in self._shared:
                    self._shared[open_it] = open_it(self)
        shared: _T = self._shared[open_it]
        return shared

    def on_close(self, callback: Callable[[], None]) -> None:
        """Call `callback` before the world closes; callbacks run in reverse order."""
        self._closing.append(callback)

    def on_failure(self, channel: Fails) -> None:
        """Call `channel.fail(error)` when the world breaks. The world refers to `channel` weakly."""
        self._told_of_failure.add(channel)

    def fail(self, error: RingError) -> None:
        """Break this world. Peers may be waiting for this rank: they raise the same error."""
        if self.failure is not None:  # later errors are consequences of the first
            return
        self.failure = error
        if self.host is not None:
            self.host.report_failure(error)
            self.host.abort(error)
        for channel in list(self._told_of_failure):
            channel.fail(error)
        if self.rendezvous is not None and not self.shares_memory:  # ranks of other hosts may be opening a channel
            with contextlib.suppress(RingError):
                self.rendezvous.with_timeout(_GOODBYE_SECONDS).give_up(decode_error(encode_error(error), self.rank))
        writer.note_end(self.recorder, str(error))

    def break_off(self, what: str, cause: BaseException) -> None:
        """Break this world because `cause` ended `what`, an operation between ranks, half way."""
        if not isinstance(cause, RingError):
            reason = f"{type(cause).__name__}: {cause}" if str(cause) else type(cause).__name__
            text = with_way_out(f"{what} was interrupted by {reason}, so ranks are out of step")
            cause = RingError(text, rank=self.rank, peers=(self.rank,))
        try:
            if isinstance(cause, PeerTimeoutError) and self._stalls is not None and not cause.explanation:
                cause.explanation = self._stalls.explain(cause.peers)
        finally:
            self.fail(cause)

    def raise_if_broken(self) -> None:
        """Raise the error that broke this world, if there is one."""
        if (failure := self.failure) is not None:
            if self.is_forked:
                raise type(failure)(failure.message, rank=self.rank)
            text = with_way_out(f"an earlier operation failed: {failure.message}")
            raise type(failure)(text, rank=self.rank, peers=failure.peers) from failure

    def say_why_it_ends(self, reason: str, advice: str = "") -> None:
        """Tell the peers why this rank leaves. Only the first reason is told."""
        count = f"{self.num_reductions} reduction{'' if self.num_reductions == 1 else 's'} of gradients"
        error = PeerLostError(f"{reason}, after {count}{advice}", peers=(self.rank,))
        if self.host is not None:
            self.host.report_failure(error)
        if self.rendezvous is not None and not self.shares_memory:
            with contextlib.suppress(RingError):  # the store may be gone
                self.rendezvous.with_timeout(_GOODBYE_SECONDS).publish_once(ended_key(self.rank), encode_error(error))

    def refuse_in_join(self, what: str) -> None:
        """Raise ValueError inside `torchring.join`, for what needs all ranks."""
        if self.is_joining:
            raise ValueError(
                f"{what} was called inside torchring.join(), where ranks whose data has ended would not take part; "
                "call it before or after the with block"
            )

    def refuse_before_generation(self, what: str) -> None:
        """Raise TopologyError in an elastic job whose workers have not met yet."""
        if self.is_provisional:
            raise TopologyError(
                f"{what} was called before the workers of this elastic job have met; call it inside the function that "
                "torchring.elastic.run decorates"
            )

    def refuse_fork(self) -> None:
        """Raise in a forked child, which is not a rank."""
        if self.is_forked:
            self.raise_if_broken()

    def after_fork(self) -> None:
        """In a forked child: cut this copy of the world off from the parent and from the other ranks."""
        if self.size > 1:
            self.is_forked = True
            # The destructors of an engine's objects wait for threads that only the parent has. One more reference keeps
            # the objects until the child ends.
            for channel in list(self._told_of_failure):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(channel))
            self.failure = RingError(_FORKED.format(rank=self.rank, pid=self._pid), rank=self.rank)

    def close(self) -> None:
        """Leave the world. Peers that still wait for this rank raise PeerLostError. A forked child sends nothing."""
        self.is_open = False
        if self.is_forked:
            return
        writer.note_end(self.recorder)
        if self.failure is None:
            self.say_why_it_ends("it called torchring.shutdown()", _ADVICE)
        while self._closing:
            self._closing.pop()()
        self._shared.clear()
        if self.host is not None:
            self.host.close()
            self.host = None


_worlds: weakref.WeakSet[World] = weakref.WeakSet()
_default: World | None = None
_num_inits = 0
_num_inits_before = 0  # the launcher last said who this process is
_own_store: Store | None = None
_num_groups = 0
_own_group: dist.ProcessGroup | None = None  # the default process group, if init() made one
_pid: int | None = None  # of the process that joined
_forked: RingError | None = None  # why this process, a forked child, cannot join


def _after_fork() -> None:
    global _default, _forked, _own_store
    for world in list(_worlds):
        world.after_fork()
    _own_store = None  # its connection is the parent's
    if _default is not None and _default.size == 1:
        _default = None  # the child may become a rank
    if _default is not None:
        _forked = _forked or _default.failure


os.register_at_fork(after_in_child=_after_fork)


def init(
    backend: Backend = "auto",
    *,
    timeout_seconds: float | None = None,
    process_group: bool = False,
    stall_warning_seconds: float | None = None,
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

    Returns:
        The default world. A second call returns the same world.

    Raises:
        ValueError: the backend is unknown, the timeout is not positive, stall_warning_seconds is negative, or the open
            world has another one.
        TopologyError: the launcher's environment is incomplete, ranks were told different world sizes or backends,
            processes that were launched as one job would each see a world of size 1, or the launcher did not start MPI.
        PeerTimeoutError: a rank did not show up.
    """
    global _default
    if _forked is not None:  # the launcher's environment and the store belong to the parent
        raise type(_forked)(_forked.message, rank=_forked.rank)
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(map(repr, BACKENDS))}, got {backend!r}")
    if timeout_seconds is not None and not timeout_seconds > 0:
        raise ValueError(f"timeout_seconds must be positive, got {timeout_seconds!r}")
    if stall_warning_seconds is not None and not 0 <= stall_warning_seconds < math.inf:
        raise ValueError(f"stall_warning_seconds must be finite and not negative, got {stall_warning_seconds!r}")
    if _default is None:
        _default = _join(
            backend,
            DEFAULT_TIMEOUT_SECONDS if timeout_seconds is None else timeout_seconds,
            WARNING_SECONDS if stall_warning_seconds is None else stall_warning_seconds,
        )
    else:
        _check_open_world(_default, backend, timeout_seconds, stall_warning_seconds)
    if process_group and _default.launcher == ELASTIC:
        raise TopologyError(
            "process_group=True does not work in an elastic job, because torch.distributed's process group keeps its "
            "ranks; use torchring's collectives, and torchring.elastic.Sampler"
        )
    if process_group:
        _make_process_group(_default)
    return _default


def _check_open_world(
    world: World, backend: Backend, timeout_seconds: float | None, stall_warning_seconds: float | None
) -> None:
    """Raise unless `world`, which is open, is what init() was asked for."""
    if world.size == 1 and world.launcher != ELASTIC:
        _refuse_to_stay_alone()
    for name, wanted, own in (
        ("timeout_seconds", timeout_seconds, world.timeout_seconds),
        ("stall_warning_seconds", stall_warning_seconds, world.stall_warning_seconds),
        ("backend", backend, world.backend),
    ):
        if wanted not in (None, "auto", own):
            raise ValueError(
                f"the world is open with {name}={own!r}, got {wanted!r}; call init() with it before anything else, or "
                "shutdown() first"
            )


def _join(backend: Backend, timeout_seconds: float, stall_warning_seconds: float) -> World:
    """Open the world that the launcher, or the script's process group, describes. Collective."""
    global _num_inits, _pid
    launch = _launched()
    if launch.invitation is not None:
        return _before_generation(launch, backend, timeout_seconds, stall_warning_seconds)
    if launch.member_pid is not None:
        raise TopologyError(
            f"this process (pid {os.getpid()}) was started by rank {launch.rank} (pid {launch.member_pid}), which "
            "takes part already; it can ask for rank() and size(), but only the rank itself can reduce or exchange "
            f"tensors. If this process is to train by itself, set {CHOICE}=none in its environment",
            rank=launch.rank,
        )
    if launch.launcher == _SCRIPTS_GROUP:
        base: Store | None = dist.distributed_c10d._get_default_store()
        store_host = None
    else:
        base = launcher_store(launch, timeout_seconds)
        store_host = None if launch.store_is_hosted else 0
    if backend == "mpi":
        if launch.launcher == "none":
            raise TopologyError("backend='mpi' needs a script that mpirun started; `mpirun -np 1` will do for one rank")
        mpi_world(launch.launcher, launch.rank, launch.size, instead="init without backend='mpi'")
    store = PrefixStore(f"torchring/{_num_inits - _num_inits_before}", base) if base is not None else None
    _num_inits += 1  # before opening: a world that fails to open leaves keys behind, which the next must not read
    if _pid is None:
        atexit.register(_leave_at_exit)
    _pid = os.getpid()
    world = World(
        store,
        launch.rank,
        launch.size,
        local_rank=launch.local_rank,
        timeout_seconds=timeout_seconds,
        launcher=launch.launcher,
        store_host=store_host,
        backend="gloo" if backend == "auto" else backend,
        job=launch.job,
        stall_warning_seconds=stall_warning_seconds,
    )
    if world.size > 1:
        os.environ[MEMBER] = membership(os.environ, _pid, world.rank, world.size, world.local_rank)
    return world


def _before_generation(
    launch: LaunchEnvironment, backend: str, timeout_seconds: float, stall_warning_seconds: float
) -> World:
    """What init() returns in a worker of an elastic job until `torchring.elastic.run` opens a generation."""
    global _pid
    if backend == "mpi":
        raise TopologyError("backend='mpi' does not work in an elastic job, whose ranks change; leave it out")
    if _pid is None:
        atexit.register(_leave_at_exit)
    _pid = os.getpid()
    os.environ[MEMBER] = membership(os.environ, _pid, launch.rank, launch.size, launch.local_rank or 0)
    return World(
        None,
        launch.rank,
        1,
        local_rank=launch.local_rank,
        timeout_seconds=timeout_seconds,
        launcher=launch.launcher,
        stall_warning_seconds=stall_warning_seconds,
        is_provisional=True,
    )


def open_generation(store: Store | None, rank: int, size: int) -> World:
    """Make the world of a generation of an elastic job the default world, with the options of init(). Collective.

    Args:
        store: shared by the ranks of this generation only.

    Raises:
        RingError: a rank is lost, or does not come.
    """
    global _default, _num_inits
    before = leave_generation()
    _num_inits += 1
    world = World(
        store if size > 1 else None,
        rank,
        size,
        local_rank=before.local_rank,
        timeout_seconds=before.timeout_seconds,
        launcher=before.launcher,
        stall_warning_seconds=before.stall_warning_seconds,
    )
    os.environ[MEMBER] = membership(os.environ, os.getpid(), rank, size, world.local_rank)
    _default = world
    return world


def leave_generation() -> World:
    """Close the world of a generation. Returns the provisional world that is the default world from then on."""
    global _default
    if _default is None:
        return init()
    if not _default.is_provisional:
        world, _default = _default, None
        _default = _before_generation(_launched(), world.backend, world.timeout_seconds, world.stall_warning_seconds)
        world.close()
    return _default


def shutdown() -> None:
    """Leave the world. All ranks may call `init()` again. Does nothing if no world is open."""
    global _default, _own_group
    if _default is not None:
        world, _default = _default, None
        os.environ.pop(MEMBER, None)
        world.close()
    group, _own_group = _own_group, None
    if group is not None and dist.group.WORLD is group and _pid == os.getpid():
        dist.destroy_process_group()


def leave_launch() -> None:
    """Leave the world, and forget the store at which its ranks met: the launcher says anew who this process is.

    The next init() reads the environment again. Its ranks meet at a store of their own, in which no rank has met yet.
    """
    global _own_store, _num_inits_before
    shutdown()
    _own_store, _num_inits_before = None, _num_inits


def is_initialized() -> bool:
    """Whether this process has joined a world."""
    return _default is not None


def default_world() -> World:
    """The world that the module-level functions act on. Joins the world if this process has not joined yet."""
    if _default is None:
        return init()
    if _default.size == 1 and _default.launcher != ELASTIC:
        _refuse_to_stay_alone()
    return _default


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
    return _default.rank if _default is not None else _launched().rank


def size() -> int:
    """Number of processes that train together. Waits for no other rank."""
    return _default.size if _default is not None and not _default.is_provisional else _launched().size


def local_rank() -> int:
    """Number of this process on its host: the launcher's LOCAL_RANK, where the launcher gives one.

    Waits for the other ranks only where the launcher gives none.
    """
    if _default is None and (said := _launched().local_rank) is not None:
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
    """What started this process: "torchrun", "mpirun (Open MPI)", "srun", ...; "none" without a launcher."""
    return _default.launcher if _default is not None else _launched().launcher


def device() -> torch.device:
    """Where this rank should put its model: on a GPU if this process sees any, else on the CPU.

    The GPU is number local_rank() modulo the number of GPUs that this process sees. So a launcher may show each rank a
    single GPU.
    """
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", local_rank() % torch.cuda.device_count())


def _launched() -> LaunchEnvironment:
    """What the script's process group, the rank that started this process, or the launcher says about this process."""
    if dist.is_available() and dist.is_initialized():
        check_group(os.environ, dist.get_world_size())
        local_rank = int(os.environ["LOCAL_RANK"]) if "LOCAL_RANK" in os.environ else None
        return LaunchEnvironment(_SCRIPTS_GROUP, dist.get_rank(), dist.get_world_size(), local_rank, None, False)
    if parent := started_by_member(os.environ, os.getpid()):
        return parent
    launch = read_environment(os.environ)
    return (unannounced_mpi(os.environ) or launch) if launch.launcher == "none" else launch


def _make_process_group(world: World) -> None:
    """Make torch.distributed's default process group, unless there is one. Collective."""
    global _num_groups, _own_group
    if dist.is_initialized():
        return
    name = f"process_group/{_num_groups}"
    _num_groups += 1
    store: Store = dist.HashStore()
    if world.rendezvous is not None:
        world.rendezvous.all_gather(name, b"")  # names an absent rank, as torch.distributed does not
        store = PrefixStore(name, world.rendezvous.store)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo",
        store=store,
        rank=world.rank,
        world_size=world.size,
        timeout=timedelta(seconds=world.timeout_seconds),
    )
    _own_group = dist.group.WORLD


def launcher_store(launch: LaunchEnvironment, timeout_seconds: float) -> Store | None:
    """The store at which the ranks meet. A later init() uses the same store."""
    global _own_store
    if _own_store is None:
        tcp = open_store(launch, timeout_seconds)
        if tcp is None:
            return None
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        _own_store = PrefixStore(f"torchring/attempt{attempt}", tcp)
    return _own_store


def _leave_at_exit() -> None:
    """Tell the peers that this script has ended, and why: the peers may still wait for this rank.

    Under MPI, also leave the world before MPI's own exit. MPI_Finalize waits for all ranks: a rank that has raised an
    exception would wait there, while its peers wait for that rank until the time-out. Without MPI, the end of the
    process tells the peers. A forked child tells nothing, because it shares its parent's sockets.
    """
    if _default is None or _pid != os.getpid():
        return
    # Python sets last_value to an exception that nobody caught. In an interactive session it may be an old exception.
    error = getattr(sys, "last_value", None) if not hasattr(sys, "ps1") else None
    if error is not None:
        _default.say_why_it_ends(f"its script ended with {type(error).__name__}: {error}")
    else:  # after sys.exit(1), too, of which Python keeps no trace
        _default.say_why_it_ends("its script had ended", _ADVICE)
    if "mpi4py.MPI" in sys.modules:
        shutdown()


def _say_if_alone() -> None:
    """At exit of rank 0: print a warning if the processes of this launch have trained, but never joined a world.

    The script has no optimizer to wrap, because it updates parameters by hand; or its author forgot to wrap one. A
    script that cannot have trained, such as a command of torchring's, prints nothing.
    """
    if _num_inits or os.getpid() != _imported_by or getattr(sys, "last_value", None) is not None:
        return  # this process has joined a world, is a fork of one that may have, or has failed
    if not _has_built_graphs():
        return
    # destroy_process_group() leaves this name set.
    if dist.is_available() and (
        dist.is_initialized() or getattr(dist.distributed_c10d, "_default_pg_init_method", None) is not None
    ):
        return
    try:
        launch = _launched()
    except TopologyError:
        return
    if launch.size > 1 and launch.rank == 0 and launch.member_pid is None:
        print(
            f"torchring: {launch.launcher} started this process as one of {launch.size}, but it never met the others. "
            "No optimizer was wrapped with torchring.wrap and no collective was called, so each has trained alone",
            file=sys.stderr,
        )


def _has_built_graphs() -> bool:
    """Whether this thread has built an autograd graph."""
    count = getattr(torch._C._autograd, "_get_sequence_nr", None)
    return count is None or count() > 0


_imported_by: Final = os.getpid()
atexit.register(_say_if_alone)
