"""A thread that ends kernels which wait for a rank that is dead or late."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from torchring.errors import PeerTimeoutError, RingError
from torchring.memory.host import HostGroup

if TYPE_CHECKING:
    from torchring.allreduce.device.stream import OnStream

_LOOK_SECONDS: Final = 0.1  # between two looks at the ranks that the device waits for


@dataclass(frozen=True)
class Waiting:
    """What the device may be waiting for.

    Attributes:
        what: number of the round, counted by the watchdog.
        since: when the round began, or was sealed; time.monotonic.
        is_sealed: whether all of the round has been started.
    """

    what: int
    since: float
    is_sealed: bool


class DeviceWatchdog:
    """Watches the rounds of one mover.

    The main thread may be waiting for the device itself (`loss.item()`), so the watchdog has a thread. The watchdog
    calls nothing of the device, because a call might break up the capture of a graph on another thread; it looks at
    reports that the device has sent (`Accelerator.fetch`).

    Args:
        mover: fails if a rank is dead or late. Kept weakly: an unused mover must not live on in this thread.
        host: the ranks of this host, if there are others.
        timeout_seconds: how long the device may take for a sealed round.
    """

    def __init__(self, mover: OnStream, host: HostGroup | None, timeout_seconds: float) -> None:
        self._mover = weakref.ref(mover)
        self._host = host if host is not None and host.size > 1 else None
        self._timeout_seconds = timeout_seconds
        self._lock = threading.Lock()
        self._num_sealed = 0
        self._open: Waiting | None = None  # the round that is not sealed
        self._sealed: deque[tuple[torch.Tensor, Waiting]] = deque()
        self._suspicious: Waiting | None = None  # for which a peer was gone at the last look
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def started(self) -> None:
        """A reduction has been started."""
        if self._open is None:
            self._open = Waiting(self._num_sealed, time.monotonic(), is_sealed=False)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="torchring-watchdog", daemon=True)
            self._thread.start()
            atexit.register(self._leave)

    def sealed(self, fetched: torch.Tensor) -> None:
        """See `OnStream.seal`."""
        with self._lock:
            self._sealed.append((fetched, Waiting(self._num_sealed, time.monotonic(), is_sealed=True)))
            self._num_sealed += 1
            self._open = None

    @property
    def is_open(self) -> bool:
        """Whether a round was started and not sealed."""
        return self._open is not None

    def is_pending(self) -> bool:
        """Whether the device has still to send the report of a sealed round."""
        with self._lock:
            return not all(has_come(fetched) for fetched, _ in self._sealed)

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(1.0)
            atexit.unregister(self._leave)

    def _leave(self) -> None:
        """A script ends without closing. No thread may come back from the device while the interpreter ends."""
        mover = self._mover()
        if mover is not None:
            mover.finish()
        self.close()

    def _run(self) -> None:
        while not self._stop.wait(_LOOK_SECONDS):
            error = self._look()
            mover = self._mover()
            if mover is None:
                return
            if error is not None:
                mover.fail(error)
                return
            del mover

    def _look(self) -> RingError | None:
        """Why the device waits in vain; None if it does not, or may not."""
        waiting = self._oldest()
        suspicious, self._suspicious = self._suspicious, None
        if waiting is None:
            return None
        try:
            if self._host is not None:
                self._host.check_peers([rank for rank in self._host.ranks if rank != self._host.rank])
        except RingError as error:
            # A peer that is done may have left while what it sent is still on its way: look again.
            self._suspicious = waiting
            return error if waiting == suspicious else None
        seconds = time.monotonic() - waiting.since
        if not waiting.is_sealed or seconds < self._timeout_seconds:  # a backward may take as long as it likes
            return None
        return PeerTimeoutError(
            "a reduction on the device did not come to an end; some rank's device is stuck, or slow",
            rank=None if self._host is None else self._host.rank,
            seconds=seconds,
        )

    def _oldest(self) -> Waiting | None:
        """The oldest round that the device has not finished."""
        with self._lock:
            while self._sealed and has_come(self._sealed[0][0]):
                self._sealed.popleft()
            return self._sealed[0][1] if self._sealed else self._open


def has_come(fetched: torch.Tensor) -> bool:
    """Whether the device has sent what `Accelerator.fetch` was asked for: no report holds a -1."""
    return bool((fetched != -1).all())
