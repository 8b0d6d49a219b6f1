"""Daemon threads that run functions in order.

Unlike the threads of concurrent.futures, they never hold up interpreter exit: they may wait for a peer that is gone.
"""

import atexit
import contextlib
import ctypes
import queue
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, Final, Protocol, TypeVar

_T = TypeVar("_T")
_Task = tuple["Future[Any]", Callable[[], Any]]


def is_done_within(future: Future[Any], seconds: float) -> bool:
    """Wait for `future`. If this returns True, `future.result()` returns or raises at once.

    Not `future.result(seconds)`: its TimeoutError may be the function's own, and the function may end just after it.
    """
    try:
        future.exception(seconds)
    except (FutureTimeout, CancelledError):
        return future.done()
    return True


class SerialThread:
    """Runs submitted functions one after the other, on a thread that starts with the first function.

    The thread ends when this object is closed, or is gone.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: queue.SimpleQueue[_Task | None] = queue.SimpleQueue()
        weakref.finalize(self, self._tasks.put, None).atexit = False  # at exit, `close` is called
        self._thread: threading.Thread | None = None
        self._lock = threading.RLock()  # a signal handler may submit or close, too
        self._is_closed = False

    def submit(self, function: Callable[[], _T]) -> Future[_T]:
        """Run `function` after those submitted earlier. The future gets its result or exception.

        The future is cancelled if the thread is closed.
        """
        future: Future[_T] = Future()
        with self._lock:
            if self._is_closed:
                future.cancel()
                return future
            if self._thread is None:
                self._thread = threading.Thread(target=_work_off, args=(self._tasks,), name=self._name, daemon=True)
                self._thread.start()
                end_at_exit(self, self._thread)
            self._tasks.put((future, function))
        return future

    def close(self) -> None:
        """Cancel the functions that have not begun. The thread ends when the running function returns."""
        cancelled: list[Future[Any]] = []
        with self._lock:
            self._is_closed = True
            with contextlib.suppress(queue.Empty):  # the thread takes tasks meanwhile
                while True:
                    task = self._tasks.get_nowait()
                    if task is not None:
                        cancelled.append(task[0])
            self._tasks.put(None)
        for future in cancelled:  # outside the lock: a callback may close this thread, too
            future.cancel()

    def join(self, seconds: float) -> None:
        """Wait for the closed thread to end, if it was ever started."""
        if self._thread is not None:
            self._thread.join(seconds)


def _work_off(tasks: queue.SimpleQueue[_Task | None]) -> None:
    """Without the `SerialThread`, which nothing else may refer to any more."""
    while (task := tasks.get()) is not None:
        future, function = task
        del task
        if not future.set_running_or_notify_cancel():
            continue
        result, error = None, None
        try:
            result = function()
        except BaseException as caught:  # raised where somebody waits for the future
            error = caught
        # Delete the function before waking anybody: else this thread might destroy what the function refers to,
        # such as an engine's handle, while the interpreter exits, which ends the process with SIGABRT.
        del function
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)
        del future, result, error


class _Closable(Protocol):
    def close(self) -> object: ...


_open_threads: weakref.WeakSet[_Closable] = weakref.WeakSet()
# A SerialThread may be garbage while its thread still runs, so threads are kept apart.
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_JOIN_SECONDS: Final = 1.0  # for threads that are not stuck
_at_last: list[Callable[[], None]] = []


def end_at_exit(owner: _Closable, thread: threading.Thread) -> None:
    """Have the interpreter call `owner.close()` and join `thread` when it exits.

    Needed for every thread that calls C++ code. Otherwise the process may end with SIGABRT: see
    `_outlive_stuck_threads`.
    """
    _open_threads.add(owner)
    _threads.add(thread)


def at_last(callback: Callable[[], None]) -> Callable[[], None]:
    """Call `callback` when the interpreter exits, after the exit handlers of other modules. A decorator."""
    _at_last.append(callback)
    return callback


@atexit.register  # registered on import, so that it runs after the exit handlers of other modules
def _end_all() -> None:
    """Join all threads: none may return from an engine's C++ code while the interpreter is taken down."""
    for callback in _at_last:
        with contextlib.suppress(Exception):  # the threads have to be joined all the same
            callback()
    for open_thread in list(_open_threads):
        open_thread.close()
    end = time.monotonic() + _JOIN_SECONDS
    for thread in list(_threads):
        thread.join(max(0.0, end - time.monotonic()))
    if any(thread.is_alive() for thread in _threads):
        _outlive_stuck_threads()


def _outlive_stuck_threads() -> None:
    """Keep the exit code, even if a thread returns from C++ code while the interpreter is taken down.

    Python before 3.14 ends such a thread with pthread_exit (python/cpython#87135). The C++ frames of the thread do not
    let that pass, and call std::terminate, which would end the process with SIGABRT. Here std::terminate puts the
    thread to sleep, and the process ends as it would have.
    """
    with contextlib.suppress(OSError, AttributeError):
        pause = ctypes.CDLL(None).pause
        ctypes.CDLL("libstdc++.so.6")._ZSt13set_terminatePFvvE(pause)  # std::set_terminate
