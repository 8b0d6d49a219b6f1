"""How long a thread was ready to run, but had no core."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable

from torchring.observe.loading import UNKNOWN


class CoreQueue:
    """How long the thread that asks first has waited for a core. One look takes 1 us."""

    def __init__(self) -> None:
        self._thread = 0
        self._file = UNKNOWN

    def read_ns(self) -> int:
        """Nanoseconds since the thread began. UNKNOWN to other threads, and where the kernel does not count."""
        thread = threading.get_ident()
        if self._thread != thread:
            if self._thread:
                return UNKNOWN
            self._thread = thread
            with contextlib.suppress(OSError):
                self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        if self._file == UNKNOWN:
            return UNKNOWN
        try:
            _, queued, num_slices = os.pread(self._file, 64, 0).split()
        except (OSError, ValueError):
            return UNKNOWN
        return int(queued) if int(num_slices) else UNKNOWN  # a thread that runs has been given the core once at least

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # `os` may be gone when Python ends
        if self._file != UNKNOWN:
            close(self._file)
