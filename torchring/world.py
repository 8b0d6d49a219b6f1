"""Who takes part: the ranks that reduce together, and which of them share a host.

`World` is what every other part of torchring is handed. `default_world.py` opens the one that scripts act on.
"""

import contextlib
import ctypes
import functools
import json
import logging
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, TypeVar, Union

import torch
from torch.distributed import ProcessGroup, Store

from torchring.errors import (
    PeerLostError,
    PeerTimeoutError,
    RingError,
    TopologyError,
    decode_error,
    encode_error,
    in_group,
    with_way_out,
)
from torchring.memory.host import HostGroup, connect
from torchring.observer import Observers
from torchring.releases import check_torch
from torchring.rendezvous.rendezvous import Rendezvous
from torchring.rooms import room

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

Group: TypeAlias = Union[ProcessGroup, "DeviceMesh", Sequence[Sequence[int]]]
"""Ranks that reduce together: a process group, a mesh of one dimension, or lists of ranks, one of which has this rank.
"""

check_torch(torch.__version__)
_T = TypeVar("_T")
_E = TypeVar("_E", bound=BaseException)
_logger: Final = logging.getLogger("torchring")
DEFAULT_TIMEOUT_SECONDS: Final = 300.0
DEFAULT_WARNING_SECONDS: Final = 30.0
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
    """A channel, an all-reduce or a transport, which a world tells that it is broken."""

    def fail(self, error: RingError) -> object:
        """Send nothing more, and make the other ranks raise `error` where they wait for this rank."""


class World:
    """The ranks that reduce together, as one of them sees it. Opening it is collective.

    A part of torchring learns of the other ranks through the World that it is handed. So N worlds can live in N threads
    of one process.
    """

    def __init__(
        self,
        store: Store | None,  # a key-value store that exactly these ranks share; None for a world of one rank
        rank: int,  # number of this process, 0 <= rank < size
        size: int,  # number of processes
        *,
        # Number of this process on its host; by default its position among the ranks of this host
        local_rank: int | None = None,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,  # how long a live rank may keep the others waiting
        launcher: str = "none",  # name of what started the ranks, for messages
        store_host: int | None = None,  # the rank whose process hosts the store; None if no rank's process does
        backend: str = "gloo",  # the engine between hosts, "gloo" or "mpi"; the same on every rank
        job: str = "",  # the launcher's name for the job that all these ranks belong to; "" if the launcher gives none
        # Whether the launcher says that all ranks run on this host. Then they share memory, or none opens.
        is_one_host: bool = False,
        # How long this rank waits before it logs which rank is missing; 0 for never
        stall_warning_seconds: float = DEFAULT_WARNING_SECONDS,
        # A world of one, in place of which a world of several ranks is to open: collectives raise
        is_provisional: bool = False,
        outer: "World | None" = None,  # the world of all ranks, if this one is of a group: see `groups.py`
        members: Sequence[int] = (),  # the ranks of that world in the group, in the order of their ranks here
    ) -> None:
        # Who takes part
        self._outer = outer  # not this one: that would be a cycle of references
        self.members = tuple(members)
        # The worlds of the groups that this rank has opened, by their members. They end with this one.
        self.groups: dict[tuple[int, ...], World] = {}
        self.rank = rank
        self.size = size
        self.launcher = launcher
        self.is_provisional = is_provisional
        self.rendezvous: Rendezvous | None = None
        self.host: HostGroup | None = None  # the ranks that share memory with this rank
        # All ranks, grouped by shared memory, in order of each group's first rank
        self.hosts: tuple[tuple[int, ...], ...] = ((rank,),)
        self._cores = os.sched_getaffinity(0)  # of the ranks of this host

        # Options
        self.backend = backend
        self.timeout_seconds = timeout_seconds
        self.stall_warning_seconds = stall_warning_seconds
        self.check_data = True  # whether ranks look for mistakes in their data

        # From opening to failure or close
        self.is_open = True
        self.failure: RingError | None = None  # the error that broke this world. A broken world sends nothing more.
        self.observer = Observers()  # hears what this rank does
        self.num_reductions = 0  # number of reductions of gradients, by all optimizers of this rank
        self.advice = _ADVICE  # what peers are told to do that still need this rank when its script has ended
        self._pid = os.getpid()
        self._told_of_failure: weakref.WeakKeyDictionary[Fails, None] = weakref.WeakKeyDictionary()
        self._closing: list[Callable[[], None]] = []

        # What the parts of torchring share
        self._opening = threading.RLock()  # held by the thread that opens what all threads share
        self._num_channels = 0
        self._shared: dict[Callable[[World], Any], Any] = {}

        _worlds.add(self)
        if store is not None and size > 1:
            try:
                rendezvous = Rendezvous(store, rank, size, timeout_seconds, self.members)
                rendezvous.is_one_host = is_one_host
                self._find_hosts(rendezvous, store_host, job)
            except BaseException as error:
                self.note_members(error)
                # Of other errors the ranks know, or they are this rank's own mistakes.
                if isinstance(error, PeerLostError) or not isinstance(error, RingError):
                    self.break_off("torchring.init()", error)
                self.close()
                raise
        self.local_rank = self.hosts[self.node_rank].index(rank) if local_rank is None else local_rank

    def _find_hosts(self, rendezvous: Rendezvous, store_host: int | None, job: str) -> None:
        """Find out which ranks share memory, and check that all ranks were given the same backend."""
        self.rendezvous = rendezvous
        rendezvous.store_host = store_host
        rendezvous.warn_of_absent(self.stall_warning_seconds)
        rendezvous.check_job(job)
        rendezvous.agree_on_size()
        rendezvous.claim_rank()
        self.host = connect(rendezvous)
        rendezvous.watch = self.host.check_peers
        mine = {"host": self.host.ranks, "cores": sorted(os.sched_getaffinity(0)), "backend": self.backend}
        cards = [json.loads(text) for text in rendezvous.all_gather("world", json.dumps(mine).encode())]
        if len(first := {card["backend"]: peer for peer, card in reversed([*enumerate(cards)])}) > 1:
            named = ", ".join(f"{backend!r} on rank {peer}" for backend, peer in sorted(first.items()))
            raise TopologyError(f"ranks were given different backends: {named}; give all the same", rank=self.rank)
        self.hosts = tuple(sorted({tuple(card["host"]) for card in cards}))
        self._cores = set().union(*(cards[peer]["cores"] for peer in self.host.ranks))
        if self.rank == 0:
            rendezvous.publish("open", b"")  # a process that comes later does not belong to the ranks: see `refuse`

    @property
    def outer(self) -> "World":
        """The world of all ranks: this one, if it is not of a group."""
        return self._outer or self

    @property
    def ranks(self) -> Sequence[int]:
        """The ranks of the job in this world, in the order of their ranks here."""
        return self.members or range(self.size)

    @property
    def num_steps(self) -> int:
        """How many steps this rank has made, with all optimizers of this world and of its groups."""
        return sum(world.observer.num_steps for world in (self, *self.groups.values()))

    @property
    def num_cores(self) -> int:
        """Number of processor cores that the ranks of this host may use together, as Linux counts them."""
        return len(self._cores)

    @functools.cached_property
    def num_physical_cores(self) -> int:
        """The same, without hardware threads of one core."""
        number: int = room("placement").num_physical(self._cores)
        return number

    @property
    def node_rank(self) -> int:
        return next(i for i, ranks in enumerate(self.hosts) if self.rank in ranks)

    @property
    def local_size(self) -> int:
        return len(self.hosts[self.node_rank])

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

    def shared(self, open_it: "Callable[[World], _T]") -> _T:
        """Open one object per world: returns what `open_it(self)` returned at the first call with that function.

        For any thread; later threads wait for the thread that opens. The world forgets the object when it closes.
        """
        if open_it not in self._shared:
            with self._opening:
                if open_it not in self._shared:
                    self._shared[open_it] = open_it(self)
        shared: _T = self._shared[open_it]
        return shared

    def on_close(self, callback: Callable[[], None]) -> None:
        """Call `callback` before the world closes; callbacks run in reverse order."""
        self._closing.append(callback)

    def on_failure(self, channel: Fails) -> None:
        """Call `channel.fail(error)` when the world breaks: first the channel that came last.

        The world refers to `channel` weakly.
        """
        self._told_of_failure[channel] = None

    def fail(self, error: RingError) -> None:
        """Break this world. Peers may be waiting for this rank: they raise the same error."""
        self.note_members(error)
        if self.failure is not None:  # later errors are consequences of the first
            return
        self.failure = error
        if self.host is not None:
            self.host.abort(error)  # first: the way to the store, for ranks of other hosts, may be cut
            self.host.report_failure(error)
        for channel in [*self._told_of_failure][::-1]:
            channel.fail(error)
        if self.rendezvous is not None and not self.shares_memory:  # ranks of other hosts may be opening a channel
            with contextlib.suppress(RingError):
                self.rendezvous.with_timeout(_GOODBYE_SECONDS).give_up(decode_error(encode_error(error), self.rank))

    def note_members(self, error: _E) -> _E:
        """Returns `error`, which is about ranks of this world, unless it has come from another one."""
        if isinstance(error, RingError) and error.members is None:
            error.members = self.members
        return error

    def is_in_step(self, error: BaseException) -> bool:
        """Whether all ranks of this world raise `error`, or one like it, at this point (`errors.in_step`)."""
        members = getattr(error, "members", None)
        is_of_all = not members or (bool(self.members) and {*self.members} <= {*members})
        return getattr(error, "in_step", False) and is_of_all

    def warn(self, text: str) -> None:
        """Log a warning about ranks of this world."""
        _logger.warning("%s", in_group(text, self.members))

    def break_off(self, what: str, cause: BaseException) -> None:
        """Break this world because `cause` ended `what`, an operation between ranks, half way."""
        if not isinstance(cause, RingError):
            reason = f"{type(cause).__name__}: {cause}" if str(cause) else type(cause).__name__
            text = with_way_out(f"{what} was interrupted by {reason}, so ranks are out of step")
            cause = RingError(text, rank=self.rank, peers=(self.rank,))
        elif cause.members not in (None, self.members):  # whose ranks are others
            cause = type(cause)(str(cause), rank=self.rank, peers=(self.rank,))
        try:
            if isinstance(cause, PeerTimeoutError) and not cause.explanation:
                cause.explanation = self.observer.explain(cause.peers)
        finally:
            self.fail(cause)

    def refuse_provisional(self, what: str) -> None:
        """Raise TopologyError in an elastic job whose workers have not met yet."""
        if self.is_provisional:
            raise TopologyError(
                f"{what} was called before the workers of this elastic job have met; call it inside the function that "
                "torchring.elastic.run decorates (docs/guides/elastic.md shows how)"
            )

    def raise_if_broken(self) -> None:
        """Raise the error that broke this world, if there is one."""
        if (failure := self.failure) is not None:
            if self.is_forked:
                raise self.note_members(type(failure)(failure.message, rank=self.rank))
            text = with_way_out(f"an earlier operation failed: {failure.message}")
            raise self.note_members(type(failure)(text, rank=self.rank, peers=failure.peers)) from failure

    def say_why_it_ends(self, reason: str, has_failed: bool = False) -> None:
        """Tell the peers why this rank leaves, and `advice` unless it has failed. Only the first reason is told."""
        for group in self.groups.values():
            group.say_why_it_ends(reason, has_failed)
        number = self.num_reductions + sum(group.num_reductions for group in self.groups.values())
        count = f"{number} reduction{'' if number == 1 else 's'} of gradients"
        advice = "" if has_failed else self.advice
        error = PeerLostError(f"{reason}, after {count}{advice}", peers=(self.rank,))
        if self.host is not None:
            self.host.report_failure(error)

    @property
    def is_forked(self) -> bool:
        """Whether this process was forked from the rank's process. A forked child is no rank."""
        return self.size > 1 and os.getpid() != self._pid

    def after_fork(self) -> None:
        """In a forked child: cut this copy of the world off from the parent and from the other ranks."""
        if self.size > 1:
            # The destructors of an engine's objects wait for threads that only the parent has. One more reference keeps
            # the objects until the child ends.
            for channel in list(self._told_of_failure):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(channel))
            if self.host is not None:
                self.host.forget()
            self.failure = RingError(_FORKED.format(rank=self.rank, pid=self._pid), rank=self.rank)

    def close(self) -> None:
        """Leave the world. Peers that still wait for this rank raise PeerLostError. A forked child sends nothing."""
        self.is_open = False
        if self.is_forked:
            return
        if self.failure is None:
            self.say_why_it_ends("it called torchring.shutdown()")
        for group in self.groups.values():
            group.close()
        while self._closing:
            self._closing.pop()()
        self._shared.clear()
        if self.host is not None:
            self.host.close()
            self.host = None


_worlds: weakref.WeakSet[World] = weakref.WeakSet()


def _after_fork() -> None:
    for world in list(_worlds):
        world.after_fork()


os.register_at_fork(after_in_child=_after_fork)
