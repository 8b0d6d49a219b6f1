"""One daemon thread that does things in order. Unlike concurrent.futures' threads, it never holds up interpreter exit:
it may be waiting for a peer that is gone."""

from __future__ import annotations

import atexit
import contextlib
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Final, TypeVar

_T = TypeVar("_T")
_Task = tuple["Future[Any]", Callable[[], Any]]


class SerialThread:
    """Runs what is submitted, one after the other, on a thread that begins with the first."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.RLock()  # a signal handler may submit or close, too
        self._is_closed = False

    def submit(self, function: Callable[[], _T]) -> Future[_T]:
        """Run `function` after what was submitted before; the future holds its result or exception.

        It is cancelled if the worker is closed.
        """
        future: Future[_T] = Future()
        with self._lock:
            if self._is_closed:
                future.cancel()
                return future
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
                self._thread.start()
                _workers.add(self)
                _threads.add(self._thread)
            self._tasks.put((future, function))
        return future

    def close(self) -> None:
        """Cancel what has not begun, and end the thread when it is done with what has."""
        cancelled: list[Future[Any]] = []
        with self._lock:
            self._is_closed = True
            with contextlib.suppress(queue.Empty):  # the worker takes tasks meanwhile
                while True:
                    task = self._tasks.get_nowait()
                    if task is not None:
                        cancelled.append(task[0])
            self._tasks.put(None)
        for future in cancelled:  # whoever is called back may close this worker, too, which takes the lock
            future.cancel()

    def join(self, seconds: float) -> None:
        """Wait for the thread of a closed worker, if there is one, to end."""
        if self._thread is not None:
            self._thread.join(seconds)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, function = task
            del task
            if not future.set_running_or_notify_cancel():
                continue
            result, error = None, None
            try:
                result = function()
            except BaseException as caught:  # belongs to whoever waits for the future
                error = caught
            # Before anybody is woken: what the function refers to, such as an engine's handle, would otherwise be torn
            # down here while the interpreter exits, and end the process with SIGABRT.
            del function
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)
            del future, result, error


_workers: weakref.WeakSet[SerialThread] = weakref.WeakSet()
# Apart from their workers, which may be gone already: while a thread runs, Python itself refers to it.
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_FAREWELL_SECONDS: Final = 1.0  # for all that are not stuck


@atexit.register  # on import, so that it comes after what others do with their workers at exit
def _end_all() -> None:
    """No thread may come back from an engine's C++ while the interpreter is being taken down."""
    for worker in list(_workers):
        worker.close()
    end = time.monotonic() + _FAREWELL_SECONDS
    for thread in list(_threads):
        thread.join(max(0.0, end - time.monotonic()))
