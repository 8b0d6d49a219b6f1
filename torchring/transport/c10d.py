"""Transport over torch.distributed: a Gloo process group of torchring's own, apart from the script's collectives."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from datetime import timedelta
from typing import Final, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroupGloo
from torch.distributed import Work as BackendWork

from torchring.errors import PeerLostError, PeerTimeoutError, RingError, decode_error, encode_error
from torchring.memory.host import HostGroup, bytes_of
from torchring.rendezvous import Rendezvous
from torchring.worker import Worker

# In truth a bare Gloo backend, which has a group's methods: so no default group has to exist.
Backend = dist.ProcessGroup
_T = TypeVar("_T")
# After a timeout, how long to look for the last words of the suspect: if it was itself waiting for somebody, its own
# timeout comes at about the same moment as ours.
_GRACE_SECONDS: Final = 2.0
_INTERRUPTIBLE_SECONDS: Final = 0.1


class C10dTransport:
    """See `Transport`. Opening it is collective.

    Args:
        rendezvous: the world's store.
        name: of the stream; unique in this world, the same on every rank.
        host: the ranks of this host, if it is known which of them live.
    """

    def __init__(self, rendezvous: Rendezvous, name: str, host: HostGroup | None = None) -> None:
        self._host = host
        self._rendezvous = rendezvous
        self._name = name
        self.rank = rendezvous.rank
        self.size = rendezvous.size
        # Everyone is known to be here before Gloo connects, so that an absent rank is reported by name.
        rendezvous.exchange(f"transport/{name}", b"")
        timeout = timedelta(seconds=rendezvous.timeout_seconds)
        store = PrefixStore(f"transport/{name}/gloo", rendezvous.store)
        self._waiter = Worker(f"torchring-{name}-waiter")
        self._group: Backend | None = cast(Backend, ProcessGroupGloo(store, self.rank, self.size, timeout))

    def send(self, tensor: torch.Tensor, peer: int, tag: int = 0) -> C10dTransfer:
        data = _as_bytes(tensor)
        return self._start(lambda group: group.send([data], peer, tag) if data.numel() else None, peer)

    def receive(self, tensor: torch.Tensor, peer: int, tag: int = 0) -> C10dTransfer:
        data = _as_bytes(tensor)
        return self._start(lambda group: group.recv([data], peer, tag) if data.numel() else None, peer)

    def collective(self, operation: Callable[[Backend], BackendWork]) -> None:
        """Run one of the group's own collectives to its end; failures as for transfers."""
        self._start(operation, None).wait()

    def close(self) -> None:
        # abort() and shutdown() leave Gloo's sockets open; dropping the last reference closes them.
        self._group = None
        self._waiter.close()

    def _start(self, operation: Callable[[Backend], BackendWork | None], peer: int | None) -> C10dTransfer:
        return C10dTransfer(self, self.guard(lambda: operation(self._open_group()), peer), peer)

    def _open_group(self) -> Backend:
        if self._group is None:
            raise PeerLostError("this transport is closed; call torchring.shutdown() and torchring.init()")
        return self._group

    def guard(self, operation: Callable[[], _T], peer: int | None) -> _T:
        """Run `operation`; turn the engine's failure into a RingError that names its cause, and close the stream."""
        started = time.monotonic()
        try:
            return operation()
        except RingError:
            raise
        except RuntimeError as failure:
            raise self.fail(self._explain(failure, peer, time.monotonic() - started)) from failure

    def interruptible(self, wait: Callable[[], object]) -> None:
        """Wait so that Ctrl-C gets through: Gloo waits in C++, where the main thread would not hear it."""
        if threading.current_thread() is not threading.main_thread():
            wait()
            return
        future = self._waiter.submit(wait)
        while True:
            try:
                future.result(_INTERRUPTIBLE_SECONDS)
                return
            except FutureTimeout:
                if future.done():  # it was the wait's own
                    raise

    def fail(self, error: RingError) -> RingError:
        self._leave("last_words", encode_error(error))
        if self._host is not None:
            self._host.report_failure(error)
        self.close()
        return error

    def _explain(self, failure: RuntimeError, peer: int | None, seconds: float) -> RingError:
        """What really happened, as far as this rank can find out."""
        timed_out = "timed out" in str(failure).lower() or "timeout" in str(failure).lower()
        # At once, before the links close: whoever sees a closed link finds it, or knows that its peer died.
        self._leave("suspect", str(-1 if peer is None else peer).encode())
        others = [r for r in range(self.size) if r != self.rank]
        try:
            error = self._seen_by_the_host(others)
            if error is None:
                culprits = self._silent_ones(others) if peer is None else [self._end_of_chain(peer, timed_out)]
                names = f"rank{'s' if len(culprits) > 1 else ''} {', '.join(map(str, culprits)) or '?'}"
                if timed_out:
                    text = f"{names} did not answer within {self._rendezvous.timeout_seconds:g} s"
                    error = PeerTimeoutError(text, peers=culprits)
                else:
                    error = PeerLostError(f"{names} died or exited", peers=culprits)
        except RingError as found:  # somebody's last words, or the end of the store with the rank that hosted it
            error = found
        error.rank, error.seconds = self.rank, seconds
        return error

    def _seen_by_the_host(self, suspects: Sequence[int]) -> RingError | None:
        """Of a rank on this host we know whether it lives, even if a child of its keeps its sockets open."""
        if self._host is None:
            return None
        try:
            self._host.check_peers([rank for rank in suspects if rank in self._host.ranks])
        except RingError as error:
            return error
        return None

    def _end_of_chain(self, suspect: int, timed_out: bool) -> int:
        """Who keeps everybody waiting: the first in the chain of suspects that suspects nobody itself.

        Raises the last words of one that stopped for another reason.
        """
        deadline = time.monotonic() + (_GRACE_SECONDS if timed_out else 0.0)
        seen = {self.rank}
        while True:
            if (words := self._look_up("last_words", suspect, time.monotonic())) is not None:
                raise decode_error(words, suspect)
            answer = self._look_up("suspect", suspect, deadline)
            seen.add(suspect)
            if answer is None or int(answer) < 0 or int(answer) in seen:
                return suspect
            suspect = int(answer)

    def _silent_ones(self, others: Sequence[int]) -> list[int]:
        """After a collective failed, which does not say at whom: the ranks that do not report that it failed."""
        deadline = time.monotonic() + _GRACE_SECONDS
        return [rank for rank in others if self._look_up("suspect", rank, deadline) is None]

    def _look_up(self, what: str, rank: int, deadline: float) -> bytes | None:
        key = f"transport/{self._name}/{what}/{rank}"
        while not self._rendezvous.is_published(key):
            if time.monotonic() >= deadline:
                return None
            time.sleep(0.02)
        return self._rendezvous.fetch(key, rank)

    def _leave(self, what: str, text: bytes) -> None:
        with contextlib.suppress(RingError):  # the store may be gone
            self._rendezvous.publish(f"transport/{self._name}/{what}/{self.rank}", text)


class C10dTransfer:
    """See `Transfer`. `work` is None where there was nothing to move."""

    def __init__(self, transport: C10dTransport, work: BackendWork | None, peer: int | None) -> None:
        self._transport = transport
        self._work = work
        self._peer = peer

    def wait(self) -> None:
        work = self._work
        if work is not None:
            self._transport.guard(lambda: self._transport.interruptible(work.wait), self._peer)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as uint8: every dtype travels, those that Gloo does not know included."""
    if not tensor.is_contiguous():
        raise ValueError(f"a transport moves contiguous tensors, got strides {tensor.stride()}")
    return bytes_of(tensor)
