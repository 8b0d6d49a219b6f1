"""One daemon thread that does things in order. Unlike concurrent.futures' threads, it never holds up interpreter exit:
it may be waiting for a peer that is gone."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

_T = TypeVar("_T")
_Task = tuple["Future[Any]", Callable[[], Any]]


class Worker:
    """Runs what is submitted, one after the other, on a thread that begins with the first."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
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
            self._tasks.put((future, function))
        return future

    def close(self) -> None:
        """Cancel what has not begun, and end the thread when it is done with what has."""
        with self._lock:
            self._is_closed = True
            with contextlib.suppress(queue.Empty):  # the worker takes tasks meanwhile
                while True:
                    task = self._tasks.get_nowait()
                    if task is not None:
                        task[0].cancel()
            self._tasks.put(None)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            future, function = task
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            except BaseException as error:  # belongs to whoever waits for the future
                future.set_exception(error)
            # What a waiting thread refers to would be torn down by it, in the middle of the interpreter's exit.
            del task, future, function
