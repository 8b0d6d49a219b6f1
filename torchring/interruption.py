"""Breaks the world, on all ranks, if an operation between ranks is interrupted half way.

Ctrl-C, a time limit or another signal handler that raises can interrupt an operation between any two bytecodes. Then
nobody knows which signals this rank has sent and taken. If the script caught the exception and went on, its next
operations could take bytes of the interrupted operation for their own. So this rank refuses every later operation, and
tells its peers at once. All ranks raise an error that names this rank, until they call `torchring.shutdown()` and
`torchring.init()`.
"""

import threading
from collections.abc import Callable
from typing import Any, Final, TypeVar

from torchring.errors import RingError, with_way_out
from torchring.world import World

_T = TypeVar("_T")
_LOOK_SECONDS: Final = 0.1  # between two looks of a waiting thread at whether the world is broken


class InterruptionGuard:
    """Runs operations of one kind, one at a time, and breaks the world if one of them is interrupted.

    The guard notes an operation before the operation sends anything, and removes the note after the operation has
    received everything. So even if the handling of an interruption is interrupted, the next operation finds the note
    and refuses to run.
    """

    def __init__(self, world: World) -> None:
        self._world = world
        self._turn = threading.Lock()  # stays locked once the world is broken
        self._under_way: dict[int, str] = {}  # thread -> operation

    def run(self, what: str, operation: Callable[..., _T], *arguments: Any) -> _T:
        """Run `operation(*arguments)` and return its result. Error messages call the operation `what`.

        Whatever `operation` raises breaks the world, except errors that all ranks raise at the same point
        (`errors.in_step`). Raises RingError if the world is broken already.
        """
        if self._world.size == 1:
            return operation(*arguments)
        thread = threading.get_ident()
        try:
            self._world.raise_if_broken()
            if (earlier := self._under_way.get(thread)) is not None:
                text = with_way_out(f"{what} was called inside {earlier}, or after {earlier} was interrupted")
                raise RingError(text, rank=self._world.rank, peers=(self._world.rank,))
            self._under_way[thread] = what
            self._world.observer.operations.setdefault(thread, what)  # messages about waits name the outermost one
            while not self._turn.acquire(timeout=_LOOK_SECONDS):
                self._world.raise_if_broken()
            result = operation(*arguments)
            self._end(thread, what)
            return result
        except BaseException as error:
            self._world.note_members(error)
            if self._world.is_in_step(error):
                self._end(thread, what)
            else:
                self._world.break_off(what, error)
            raise

    def _end(self, thread: int, what: str) -> None:
        self._turn.release()
        del self._under_way[thread]
        if (operations := self._world.observer.operations).get(thread) is what:
            del operations[thread]
