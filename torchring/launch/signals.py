"""Signals that stop a process, as exceptions."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Final

STOPPING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(BaseException):
    """This process was told to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextlib.contextmanager
def _handled_by(handler: Callable[[int, object], None]) -> Iterator[None]:
    """A context with a handler for signals that stop a process. Signals that were ignored stay ignored."""
    before = {number: signal.getsignal(number) for number in STOPPING}
    try:
        for number, earlier in before.items():
            if earlier is not signal.SIG_IGN:
                signal.signal(number, handler)
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextlib.contextmanager
def noted_signals() -> Iterator[list[int]]:
    """A context in which signals that stop a process are noted in a list.

    Python allows this in the main thread only. In others the list stays empty.
    """
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    with _handled_by(lambda number, _: received.append(number)):
        yield received


@contextlib.contextmanager
def signals_raise() -> Iterator[Callable[[], contextlib.AbstractContextManager[None]]]:
    """A context in which signals that stop a process raise Stopped.

    Yields a context that delays the signals until it ends: for steps that must not be left half done, such as to start
    a process and keep a reference to it.
    """
    waiting: list[int] = []
    is_held = False

    def stop(number: int, _: object) -> None:
        if not is_held:
            raise Stopped(number)
        waiting.append(number)

    @contextlib.contextmanager
    def held() -> Iterator[None]:
        nonlocal is_held
        is_held = True
        try:
            yield
        finally:
            is_held = False
        if waiting:
            raise Stopped(waiting[0])

    with _handled_by(stop):
        yield held
