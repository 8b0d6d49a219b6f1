"""A thread that ends kernels which wait for a rank that is dead or late."""

import atexit
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

import torch

from torchring.errors import PeerTimeoutError, RingError
from torchring.memory.host import HostGroup

if TYPE_CHECKING:
    from torchring.devices.stream import OnStream

_ASK_SECONDS: Final = 2.0  # between two questions whether the device works
_LOOK_SECONDS: Final = 0.1  # between two looks at the ranks that the device waits for
_AFAR_SECONDS: Final = 2.0  # a device that waits for so long may wait for a rank of another host that is gone


class DeviceWatchdog:
    """Watches the reductions of one all-reduce.

    The main thread may be waiting for the device itself (`loss.item()`), so the watchdog has a thread. The watchdog
    calls nothing of the device, because a call may have to wait for a launch that waits for a dead rank; it looks at
    reports that the device has sent (`CudaAccelerator.fetch`). Another thread asks whether the device still works.
    """

    def __init__(
        self,
        # fails if a rank is dead or late. Kept weakly: an unused all-reduce must not live on in this thread.
        all_reduce: "OnStream",
        host: HostGroup | None,  # the ranks of this host, if there are others
        timeout_seconds: float,  # the longest time that the device may take for a sealed reduction
        lost_afar: Callable[[], RingError | None] | None,  # see `OnStream`; its object is kept weakly, too
        find_fault: Callable[[], str],  # see `CudaAccelerator`
    ) -> None:
        self._all_reduce = weakref.ref(all_reduce)
        self._host = host if host is not None and host.size > 1 else None
        self._timeout_seconds = timeout_seconds
        self._lost_afar = None if lost_afar is None else weakref.WeakMethod(lost_afar)
        self._find_fault = find_fault
        self._fault = ""  # what `find_fault` has found
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._open_since: float | None = None  # when the reduction began that is not sealed; time.monotonic, as below
        self._sealed: deque[tuple[torch.Tensor, float]] = deque()  # what a reduction was sealed with, and when
        self._suspicious: float | None = None  # the reduction for which a peer was gone at the last look, by its time
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        atexit.register(self._leave)

    def started(self) -> None:
        if self._open_since is None:
            self._open_since = time.monotonic()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="torchring-watchdog", daemon=True)
            self._thread.start()
            threading.Thread(target=self._ask, name="torchring-device", daemon=True).start()

    def sealed(self, fetched: torch.Tensor) -> None:
        """See `OnStream.seal`."""
        with self._lock:
            self._sealed.append((fetched, time.monotonic()))
            self._open_since = None

    def forget_finished(self) -> None:
        """Reports that have come are about to be used again."""
        with self._lock:
            while self._sealed and has_come(self._sealed[0][0]):
                self._sealed.popleft()

    @property
    def is_open(self) -> bool:
        """True if a reduction was started and not sealed."""
        return self._open_since is not None

    def is_pending(self) -> bool:
        """True if the device has not yet sent the report of a sealed reduction."""
        with self._lock:
            return not all(has_come(fetched) for fetched, _ in self._sealed)

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(1.0)
        atexit.unregister(self._leave)

    def _leave(self) -> None:
        """A script ends without closing. No thread may come back from the device while the interpreter ends.

        NCCL would say that its group was not destroyed, and abort while the interpreter ends. Shutting down may wait
        for other ranks, which may wait for the end of this script: so NCCL is aborted, with nothing left to do.
        """
        if os.getpid() != self._pid:  # a forked child: device, and memory that the device writes to, are the parent's
            return
        all_reduce = self._all_reduce()
        if all_reduce is not None:
            all_reduce.leave()
        self.close()

    def _ask(self) -> None:
        while not (self._fault or self._stop.wait(_ASK_SECONDS)):
            self._fault = self._find_fault()

    def _run(self) -> None:
        while not self._stop.wait(_LOOK_SECONDS):
            error = self._look()
            all_reduce = self._all_reduce()
            if all_reduce is None or self._fault or error is not None:
                self._stop.set()
            if all_reduce is not None and self._fault:
                all_reduce.lose_device(self._fault)
            elif all_reduce is not None and error is not None:
                all_reduce.fail(error)
            del all_reduce

    def _look(self) -> RingError | None:
        """The error if the device waits in vain. None if this is not certain."""
        self.forget_finished()
        with self._lock:
            is_sealed = bool(self._sealed)
            since = self._sealed[0][1] if is_sealed else self._open_since
        suspicious, self._suspicious = self._suspicious, None
        if since is None:
            return None
        seconds = time.monotonic() - since
        if (error := self._lost_peer(seconds)) is not None:
            # A peer that is done may have left while what it sent is still on its way: look again.
            self._suspicious = since
            return error if since == suspicious else None
        if not is_sealed or seconds < self._timeout_seconds:  # a backward may take as long as it likes
            return None
        text = "a reduction on the device did not come to an end; some rank's device is stuck, or slow"
        return PeerTimeoutError(text, rank=None if self._host is None else self._host.rank, seconds=seconds)

    def _lost_peer(self, seconds: float) -> RingError | None:
        """The error if a rank is gone, for which the device may have waited for `seconds`."""
        try:
            if self._host is not None:
                self._host.check_peers(self._host.ranks)
        except RingError as error:
            return error
        find = self._lost_afar() if self._lost_afar is not None and seconds > _AFAR_SECONDS else None
        return None if find is None else find()


def has_come(fetched: torch.Tensor) -> bool:
    """True if the device has sent the result of `CudaAccelerator.fetch`: no report holds a -1."""
    return -1 not in fetched.view(-1).tolist()
