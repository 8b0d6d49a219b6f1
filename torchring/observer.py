"""What the core says about its work, while it works. Rooms listen: recorder, flight recorder, data check.

The core calls `World.observer`, which passes each event on to those who listen in that world. Where nobody listens, an
event is a call of an empty loop, or not even that. See `torchring.observe`.
"""

import contextlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from enum import IntEnum
from typing import Any, Final, NamedTuple


class Phase(IntEnum):
    """What a rank does. A step with several micro-steps has several INPUT, FORWARD and BACKWARD."""

    INPUT = 0  # everything from the end of a step to the beginning of forward: waiting for data, zero_grad(), logging
    FORWARD = 1  # the model that `wrap` was given computes. Without a model, forward is not told apart from INPUT.
    # from the end of forward, so with the loss, until the last gradient is computed. Includes stalls for buckets that
    # are reduced meanwhile.
    BACKWARD = 2
    WAITING = 3  # communication cannot go on, because another rank is late. Only reports tell it apart from EXPOSED.
    EXPOSED = 4  # all gradients are computed; backward waits for reductions
    BETWEEN = 5  # from the end of a backward that reduces to `step()`: unscaling, clipping, logging
    OPTIMIZER = 6  # inside `step()`


INPUT, FORWARD, BACKWARD, _, EXPOSED, BETWEEN, OPTIMIZER = map(int, Phase)  # a look-up in an enum takes 0.1 us

# What happens to a bucket. COPYING and COPIED: a gradient is copied to the wire when it arrives. READY: the last
# gradient has come, or backward is over. PACKED: all are in the wire. LAUNCHED: the bucket has left. STARTED, REDUCED:
# the all-reduce begins to work on it, and has ended; without a thread, this rank begins and ends its own part.
# OVER, of no bucket: backward is over.
COPYING, COPIED, READY, PACKED, LAUNCHED, STARTED, REDUCED, OVER = range(8)
BucketEvents = Callable[[int, int, int], None]
"""Called with an event, the index of a bucket, and when it happened in ns of time.perf_counter_ns; 0 for now."""


class Wrapped(NamedTuple):
    """A `DistributedOptimizer` that trains in a world."""

    names: Mapping[Any, str]  # of its parameters
    options: Mapping[str, str]  # how it was wrapped, as text
    reducer: Any  # None in a world of one
    members: tuple[int, ...] = ()  # the ranks of the job that reduce together, if not all do


class Wait(NamedTuple):
    """What a thread waits for. `parameter` is the first one of the bucket."""

    operation: str
    step: int | None = None
    bucket: int | None = None
    parameter: str = ""

    def __str__(self) -> str:
        where = []
        if self.step is not None:
            where.append(f"step {self.step}")
        if self.bucket is not None:
            where.append(f"bucket {self.bucket}")
        if self.parameter:
            where.append(f"first parameter {self.parameter}")
        return f"{self.operation} ({', '.join(where)})" if where else self.operation


class Progress:
    """How far this rank has come in one sequence of operations, which all ranks begin in the same order.

    Operations are counted by their position. Here nobody wants to know.
    """

    def begin(self, position: int) -> None:
        """This rank has begun operation number `position`, and all before it."""

    def finish(self, position: int) -> None:
        """Operation number `position`, and all before it, are over for this rank."""

    def waiting(self, wait: Wait) -> AbstractContextManager[None]:
        """`with progress.waiting(wait):` a thread does what other ranks may keep it waiting in."""
        return _NOTHING

    def operation(self, what: str) -> AbstractContextManager[None]:
        """Inside, the next operation of this sequence is under way. Messages call it `what`."""
        return _NOTHING

    def close(self) -> None:
        """No operation comes any more."""


_NOTHING: Final = contextlib.nullcontext()


class Observer:
    """Hears what this rank does in one world. On the threads that train."""

    def phase(self, phase: int, step: int) -> None:
        """The thread that trains enters a phase of optimizer step `step`."""

    def forward(self, num_samples: int | None) -> None:
        """A model that trains begins its forward, with this number of samples. None: it has ended its forward."""

    def end_step(self, number: int) -> None:
        """An optimizer has made step `number` of this world, or left it out."""

    def connected(self, wrapped: Wrapped) -> None:
        """An optimizer trains in this world from now on."""

    def open_progress(self, name: str) -> Progress | None:
        """A sequence of operations begins. None: this observer does not follow operations."""
        return None


class Observers(Observer):
    """Passes events on to those who listen in one world."""

    def __init__(self) -> None:
        self.listeners: list[Observer] = []  # those who listen
        self._optimizers: list[weakref.WeakMethod[Callable[[], Wrapped]]] = []
        self.operations: dict[int, str] = {}  # the outermost operation between ranks that each thread is in, by thread
        self.num_steps = 0  # how many steps this rank has made, with all optimizers
        # returns what the given ranks did last, for the error if they keep this rank waiting; "" if nobody knows
        self.explain: Callable[[Sequence[int]], str] = lambda ranks: ""

    def phase(self, phase: int, step: int) -> None:
        for each in self.listeners:
            each.phase(phase, step)

    def forward(self, num_samples: int | None) -> None:
        for each in self.listeners:
            each.forward(num_samples)

    def count_step(self) -> None:
        """An optimizer has stepped, or left the step out."""
        self.num_steps += 1
        for each in self.listeners:
            each.end_step(self.num_steps - 1)

    def connect(self, describe: Callable[[], Wrapped]) -> None:
        """An optimizer trains in this world from now on. `describe`: a method of it, which is referred to weakly."""
        self._optimizers = [each for each in self._optimizers if each() is not None]
        self._optimizers.append(weakref.WeakMethod(describe))
        for each in self.listeners:
            each.connected(describe())

    def add(self, listener: Observer) -> None:
        self.listeners.append(listener)
        for each in self._optimizers:
            if (describe := each()) is not None:
                listener.connected(describe())

    def open_progress(self, name: str) -> Progress:
        found = (each.open_progress(name) for each in self.listeners)
        return next(filter(None, found), None) or Progress()
