"""Transport over torch.distributed: a Gloo process group of torchring's own, apart from the script's collectives."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Final, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroupGloo
from torch.distributed import Work as BackendWork

from torchring.errors import PeerLostError, PeerTimeoutError, RingError, decode_error, encode_error
from torchring.memory.host import HostGroup, bytes_of
from torchring.rendezvous import Rendezvous

# In truth a bare Gloo backend, which has a group's methods: so no default group has to exist.
Backend = dist.ProcessGroup
_T = TypeVar("_T")
# After a timeout, how long to look for the last words of the suspect: if it was itself waiting for somebody, its own
# timeout comes at about the same moment as ours.
_GRACE_SECONDS: Final = 2.0


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
        self._group: Backend | None = cast(Backend, ProcessGroupGloo(store, self.rank, self.size, timeout))

    def send(self, tensor: torch.Tensor, peer: int) -> C10dTransfer:
        data = _as_bytes(tensor)
        return self._start(lambda group: group.send([data], peer, 0) if data.numel() else None, peer)

    def receive(self, tensor: torch.Tensor, peer: int) -> C10dTransfer:
        data = _as_bytes(tensor)
        return self._start(lambda group: group.recv([data], peer, 0) if data.numel() else None, peer)

    def collective(self, operation: Callable[[Backend], BackendWork]) -> None:
        """Run one of the group's own collectives to its end; failures as for transfers."""
        self._start(operation, None).wait()

    def close(self) -> None:
        # abort() and shutdown() leave Gloo's sockets open; dropping the last reference closes them.
        self._group = None

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
            error = self._explain(failure, peer, time.monotonic() - started)
            self.close()
            raise error from failure

    def fail(self, error: RingError) -> RingError:
        self._leave_words(error)
        self.close()
        return error

    def _explain(self, failure: RuntimeError, peer: int | None, seconds: float) -> RingError:
        """What really happened, as far as this rank can find out."""
        timed_out = "timed out" in str(failure).lower() or "timeout" in str(failure).lower()
        suspects = (peer,) if peer is not None else tuple(r for r in range(self.size) if r != self.rank)
        error = self._seen_by_the_host(suspects) or self._said_by(suspects, timed_out)
        if error is None and peer is None:
            kind = PeerTimeoutError if timed_out else PeerLostError
            error = kind(f"a collective of the group failed: {failure}")
        elif error is None and timed_out:
            text = f"rank {peer} did not answer rank {self.rank} within {self._rendezvous.timeout_seconds:g} s"
            error = PeerTimeoutError(text, peers=suspects)
        elif error is None:
            error = PeerLostError(f"rank {peer} died or exited (noticed by rank {self.rank})", peers=suspects)
        error.rank, error.seconds = self.rank, seconds
        # Before the links close: whoever sees a closed link then finds these words, or knows that its peer died.
        self._leave_words(error)
        return error

    def _seen_by_the_host(self, suspects: Sequence[int]) -> RingError | None:
        """Of a suspect on this host we know whether it lives, even if a child of its keeps its sockets open."""
        if self._host is None:
            return None
        try:
            self._host.check_peers([rank for rank in suspects if rank in self._host.ranks])
        except RingError as error:
            return error
        return None

    def _said_by(self, suspects: Sequence[int], timed_out: bool) -> RingError | None:
        """The error that a suspect stopped with; it is a victim then, and its error names the cause."""
        deadline = time.monotonic() + (_GRACE_SECONDS if timed_out else 0.0)
        try:
            while True:
                for suspect in suspects:
                    if self._rendezvous.is_published(self._words_key(suspect)):
                        return decode_error(self._rendezvous.fetch(self._words_key(suspect), suspect), suspect)
                if time.monotonic() > deadline:
                    return None
                time.sleep(0.02)
        except RingError:  # the store went with the rank that hosted it
            return None

    def _leave_words(self, error: RingError) -> None:
        with contextlib.suppress(RingError):
            self._rendezvous.publish(self._words_key(self.rank), encode_error(error))

    def _words_key(self, rank: int) -> str:
        return f"transport/{self._name}/last_words/{rank}"


class C10dTransfer:
    """See `Transfer`. `work` is None where there was nothing to move."""

    def __init__(self, transport: C10dTransport, work: BackendWork | None, peer: int | None) -> None:
        self._transport = transport
        self._work = work
        self._peer = peer

    def wait(self) -> None:
        if self._work is not None:
            self._transport.guard(self._work.wait, self._peer)


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as uint8: every dtype travels, those that Gloo does not know included."""
    if not tensor.is_contiguous():
        raise ValueError(f"a transport moves contiguous tensors, got strides {tensor.stride()}")
    return bytes_of(tensor)
