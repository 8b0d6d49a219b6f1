"""Signals that stop a process."""

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Final

STOPPING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def handled_by(handler: Callable[[int, object], None]) -> Iterator[None]:
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
    with handled_by(lambda number, _: received.append(number)):
        yield received
