"""A daemon thread that calls a method now and then."""

import contextlib
import logging
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Final

from torchring.threads import end_at_exit

_logger: Final = logging.getLogger("torchring")


class PeriodicThread:
    """Calls `method` every `seconds`, until it is closed or the object of the method is gone.

    Exceptions of the method are logged as debugging information. They must not end the process.
    """

    def __init__(self, name: str, method: Callable[[], object], seconds: float) -> None:
        self._method = weakref.WeakMethod(method)
        self._seconds = seconds
        # Not an Event, whose lock another thread may hold when this process forks, or a signal handler closes this.
        self._stop: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()
        end_at_exit(self, self._thread)

    def close(self) -> None:
        """The thread ends when a call that is under way returns."""
        self._stop.put(None)

    def join(self, seconds: float) -> None:
        """Wait for the closed thread to end."""
        if self._thread is not threading.current_thread():
            self._thread.join(seconds)

    def _work(self) -> None:
        while True:
            with contextlib.suppress(queue.Empty):
                self._stop.get(timeout=self._seconds)
                return
            method = self._method()
            if method is None:
                return
            try:
                method()
            except Exception:
                _logger.debug("the timer thread of torchring has failed, and goes on", exc_info=True)
            del method
