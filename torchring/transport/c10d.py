"""Transport over torch.distributed: a Gloo process group of torchring's own, apart from the script's collectives."""

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Final, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup as Backend
from torch.distributed import ProcessGroupGloo
from torch.distributed import Work as BackendWork
from torch.distributed.distributed_c10d import AllgatherOptions  # type: ignore[attr-defined]

from torchring.errors import FirstFailure, PeerTimeoutError, RingError, TopologyError
from torchring.memory.host import HostGroup
from torchring.rendezvous.rendezvous import Rendezvous, within
from torchring.rooms import room
from torchring.threads import SerialThread, at_last, is_done_within
from torchring.transport import gloo_links
from torchring.transport.contract import Transport, closed, contiguous_bytes
from torchring.world import World

_T = TypeVar("_T")
_INTERRUPTIBLE_SECONDS: Final = 0.1
_LATE_SECONDS: Final = 1.0
_CONNECTING_LOOK_SECONDS: Final = 0.2
_FIRST_LOOK_SECONDS: Final = 0.2  # each further look comes after twice the time
# In a collective a peer may close its end when its part is done. The collective is broken if other peers send nothing
# for so long after that.
_SILENT_SECONDS: Final = 1.0
_DIGEST_SECONDS: Final = 0.5  # for what arrived before the connection closed
_SUMMED: Final = (
    torch.uint8, torch.int8, torch.int32, torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64,
)  # fmt: skip


class C10dTransport:
    """See `Transport`. Opening it is collective.

    Args:
        rendezvous, name, host: see `Culprits`.
        ranks: the ranks to connect; by default all. Ranks may be in different groups, each in one.
    """

    engine = "Gloo"

    def __init__(
        self, rendezvous: Rendezvous, name: str, host: HostGroup | None = None, *, ranks: Sequence[int] | None = None
    ) -> None:
        self.rank = rendezvous.rank
        self.ranks = tuple(range(rendezvous.size) if ranks is None else ranks)
        self.size = len(self.ranks)
        self._place = self.ranks.index(self.rank)  # the rank in Gloo's group
        self._name = name
        # Gloo
        self._group: Backend | None = None
        self._under_way: set[C10dTransfer] = set()  # kept alive: Gloo reads and writes the memory of their tensors
        self._pid = os.getpid()
        # Failures
        self._diagnosis: Any = room("diagnosis").Culprits(rendezvous, name, host, self.ranks)
        self._failure = FirstFailure()
        self._failing = threading.RLock()
        self._is_closed = False
        # All ranks are known to be here before Gloo connects, so that an absent rank is reported by name.
        try:
            self._diagnosis.check_endpoints()
        except TopologyError as error:
            self.fail(error)
            raise
        self._group = self.guard(lambda: self._connect(rendezvous))
        self._diagnosis.note_links()
        _transports.add(self)

    def _connect(self, rendezvous: Rendezvous) -> Backend:
        """Gloo connects all ranks with each other, or none. A rank that fails tells the others, which would wait."""
        # Kept alive: a group that connects at first use (TORCH_GLOO_LAZY_INIT) calls it later.
        self._store = store = within(rendezvous.store, f"transport/{self._name}/gloo/{self.ranks[0]}")
        timeout = timedelta(seconds=rendezvous.timeout_seconds)
        others = [rank for rank in range(rendezvous.size) if rank != self.rank]
        thread = SerialThread(f"torchring-{self._name}-connecting")  # which may have to be left behind
        connecting = thread.submit(lambda: ProcessGroupGloo(store, self._place, self.size, timeout))
        end = time.monotonic() + rendezvous.timeout_seconds + _LATE_SECONDS
        while True:
            try:
                if is_done_within(connecting, _CONNECTING_LOOK_SECONDS):
                    return cast(Backend, connecting.result())
            except dist.DistError:  # the store
                raise
            except RuntimeError as failure:
                error = failure if isinstance(failure, RingError) else self._diagnosis.seen_by_the_host(others)
                if error is None:
                    error = self._diagnosis.cannot_connect(failure)
                    with contextlib.suppress(RingError):
                        rendezvous.give_up(error)
                raise self.fail(error) from failure
            if time.monotonic() > end:  # Gloo's own timeout does not cover its waits for the store
                raise RuntimeError("timed out")
            if (lost := self._diagnosis.seen_by_the_host(others)) is not None:
                raise self.fail(lost)
            try:
                rendezvous.with_timeout(_LATE_SECONDS).raise_if_given_up()
            except PeerTimeoutError:  # Gloo has the store to itself while it waits for an address there
                continue
            except RingError as given_up:
                raise self.fail(given_up) from None

    def sums(self, dtype: torch.dtype) -> bool:
        return dtype in _SUMMED

    def start_all_reduce(self, tensor: torch.Tensor) -> "C10dTransfer":
        options = dist.AllreduceOptions()  # a sum
        return self.start(lambda group: group.allreduce([tensor], options) if tensor.numel() else None)

    def start_nothing(self, tensor: torch.Tensor) -> "C10dTransfer":
        return self.start_all_reduce(torch.zeros_like(tensor))

    def start_all_to_all(self, output: torch.Tensor, tensor: torch.Tensor) -> "C10dTransfer":
        options = dist.AllToAllOptions()
        return self.start(
            lambda group: group.alltoall_base(output, tensor, [], [], options) if len(output[0]) else None
        )

    def start_all_gather(self, output: torch.Tensor, tensor: torch.Tensor) -> "C10dTransfer":
        options = AllgatherOptions()
        return self.start(
            lambda group: group._allgather_base(output.view(-1), tensor, options) if len(tensor) else None
        )

    def start_broadcast(self, tensor: torch.Tensor, src: int) -> "C10dTransfer":
        options = dist.BroadcastOptions()
        options.rootRank = self.ranks.index(src)
        data = contiguous_bytes(tensor)
        return self.start(lambda group: group.broadcast([data], options) if data.numel() else None)

    def start(self, operation: Callable[[Backend], BackendWork | None]) -> "C10dTransfer":
        """Start a collective of the group. What it reads and writes belongs to the group until the end.

        `operation` returns None if there are no bytes to move.
        """
        work = self.guard(lambda: operation(self._open_group()))
        transfer = C10dTransfer(self, work)
        if work is not None:
            self._under_way.add(transfer)
        return transfer

    def close(self) -> None:
        self._is_closed = True
        if self._pid != os.getpid():  # a forked child: links and threads are the parent's
            return
        group, self._group = self._group, None
        if group is not None:
            gloo_links.close_links(group, self._place, self.size)
            last = [group]
            del group
            gloo_links.drop(last)
        self._under_way.clear()

    def let_go_if_idle(self) -> None:
        """End Gloo's threads, unless they wait for peers. The process ends, so links close as they would anyway."""
        if self._pid == os.getpid() and self._group is not None and not self._under_way:
            last, self._group = [self._group], None
            gloo_links.drop(last)

    def _open_group(self) -> Backend:
        if self._group is None:
            raise closed(self._failure.error, self.rank)
        return self._group

    def finish(self, transfer: "C10dTransfer", work: BackendWork) -> None:
        """Wait until `transfer` is done."""
        self._open_group()
        self.guard(work.wait if work.is_completed() else partial(self._attend, work))
        self._under_way.discard(transfer)

    def guard(self, operation: Callable[[], _T]) -> _T:
        """Run `operation`. Turn a failure of Gloo into a RingError that names its cause, and close the transport."""
        started = time.monotonic()
        try:
            return operation()
        except RingError:
            raise
        except RuntimeError as failure:
            with self._failing:
                if self._is_closed:
                    raise closed(self._failure.error, self.rank) from failure
                timed_out = gloo_links.has_timed_out(failure)
                self._diagnosis.suspect(timed_out=timed_out)
                if self._group is not None:
                    # Ranks that wait for innocent ranks must notice, too, or they are taken for the rank at fault.
                    gloo_links.close_links(self._group, self._place, self.size)
                seconds = time.monotonic() - started
                raise self.fail(self._diagnosis.explain(seconds, timed_out=timed_out)) from failure

    def _attend(self, work: BackendWork) -> None:
        """Return when a collective is over. Raises if a link is broken, or this transport is closed.

        Waits in this thread, and gives up now and then, so that Ctrl-C gets through. When a link breaks, Gloo may wait
        on in the middle of a message.
        """
        pause = _FIRST_LOOK_SECONDS
        broken: RuntimeError | None = None
        probe_at = time.monotonic() + pause
        while not self._is_done_within(work, _INTERRUPTIBLE_SECONDS if broken is None else _DIGEST_SECONDS):
            if self._is_closed:
                raise closed(self._failure.error, self.rank)
            if broken is not None:  # Gloo has read all that came
                raise broken
            is_time_to_probe = time.monotonic() > probe_at
            broken = self._broken_link(probes=is_time_to_probe)
            if is_time_to_probe:
                pause *= 2
                probe_at = time.monotonic() + pause
        work.wait()  # raises what went wrong

    def _is_done_within(self, work: BackendWork, seconds: float) -> bool:
        try:
            return work.wait(timedelta(seconds=seconds))
        except RuntimeError:  # not yet, or the collective has failed
            return work.is_completed()

    def _broken_link(self, *, probes: bool) -> RuntimeError | None:
        """An error if a connection is closed, and nothing comes any more.

        A peer that has done its part may have left while others still send.
        """
        for other in self.ranks:
            if other == self.rank:
                continue
            is_open = self._diagnosis.is_open(other)
            if is_open is False and self._diagnosis.seconds_silent() > _SILENT_SECONDS:
                return RuntimeError(f"the connection to rank {other} is closed")
            group = self._group if is_open is None and probes else None  # another thread may close it
            if group is not None and (broken := gloo_links.find_failure(group, self.ranks.index(other))) is not None:
                return broken
        return None

    def lost_peer(self) -> RingError | None:
        """The error if a peer has closed its connection. From any thread."""
        error: RingError | None = None if self._is_closed else self._diagnosis.lost_peer()
        return error

    def fail(self, error: RingError) -> RingError:
        if self._failure.set(error):
            self._diagnosis.report(error)
        self.close()
        return error


def open_transport(world: World, ranks: Sequence[int] | None = None) -> Transport:
    """Collective in the world: open links of their own over the world's backend, "gloo" or "mpi".

    By default, all ranks are connected. Ranks may be in different groups, each in one.
    """
    assert world.rendezvous is not None, "a world of one sends nothing"
    kind = room("mpi").MpiTransport if world.backend == "mpi" else C10dTransport
    transport: Transport = kind(world.rendezvous, world.next_channel_name(), world.host, ranks=ranks)
    world.on_failure(transport)
    return transport


_transports: weakref.WeakSet[C10dTransport] = weakref.WeakSet()


@at_last
def _let_go_at_exit() -> None:
    """Have Gloo's threads end before the interpreter does.

    A thread of Gloo drops the tensors of a collective some time after the collective's end, and needs the interpreter
    for that. The interpreter would end the thread, amid C++ code, which ends the process with SIGABRT.
    """
    for transport in list(_transports):
        transport.let_go_if_idle()


class C10dTransfer:
    """See `Transfer`. `work` is None if there are no bytes to move."""

    def __init__(self, transport: C10dTransport, work: BackendWork | None) -> None:
        self._transport = transport
        self._work = work

    def wait(self) -> None:
        if self._work is not None:
            self._transport.finish(self, self._work)
            self._work = None
