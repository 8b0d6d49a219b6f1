"""Negotiation cycles: every rank hands every rank some bytes. A cycle wakes the ranks that sleep.

A rank that has nothing to say sleeps until another rank begins a cycle. So an idle process takes no processor time.
"""

from __future__ import annotations

import contextlib
import threading
import time
from abc import ABC, abstractmethod
from datetime import timedelta
from typing import Final

import torch.distributed as dist

from torchring.collectives.operations import Backend, exchange
from torchring.collectives.signature import Signature
from torchring.memory import semaphore
from torchring.memory.host import HostGroup, as_words
from torchring.rendezvous.rendezvous import Rendezvous
from torchring.rendezvous.signed import within
from torchring.threads import SerialThread

_SIGNATURE: Final = Signature("negotiation")
_LINE_BYTES: Final = 64
_SPIN_SECONDS: Final = 0.005  # a rank that waits for longer sleeps in between
_KEPT_RINGS: Final = 1000  # keys of the store
_FOREVER: Final = timedelta(days=3650)
_POLL_SECONDS: Final = 0.02  # between two looks at a store on which nobody can wait


class Cycles(ABC):
    """One rank's view. `exchange` is for one thread at a time, `wait` for one other thread, `wake` for any thread.

    Args:
        backend: collectives that nobody else calls meanwhile.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._num_cycles = 0

    def exchange(self, data: bytes) -> list[bytes]:
        """Collective: begin a cycle, or take part in another rank's. Returns the data of all ranks, in rank order."""
        self._num_cycles += 1
        self._begin()
        return exchange(self._backend, data, _SIGNATURE)

    @abstractmethod
    def _begin(self) -> None:
        """Have the other ranks take part in cycle number `_num_cycles`."""

    @abstractmethod
    def is_awaited(self) -> bool:
        """True if another rank has begun a cycle and waits for this rank."""

    @abstractmethod
    def wait(self, seconds: float) -> None:
        """Sleep until another rank begins a cycle, or `wake` is called; at most `seconds`."""

    @abstractmethod
    def wake(self) -> None:
        """End a `wait` of this rank, or the next one."""

    def wake_others(self) -> None:  # noqa: B027 - ranks of one host watch each other anyway
        """Have the other ranks find out that this rank has failed."""

    def close(self) -> None:  # noqa: B027 - memory is freed with the last tensor that views it
        """Nobody exchanges any more."""


class SharedMemoryCycles(Cycles):
    """`Cycles` of ranks that share memory: a bell for each rank, and how many cycles it has begun.

    A rank that has begun a cycle waits `cycle_seconds` for the other ranks' scripts to come by themselves, before it
    wakes their sleeping threads.
    """

    def __init__(self, host: HostGroup, backend: Backend, cycle_seconds: float) -> None:
        super().__init__(backend)
        self._cycle_seconds = cycle_seconds
        bells = host.allocate(semaphore.SEMAPHORE_STRIDE, prepare=lambda part: semaphore.initialise(part.data_ptr()))
        begun = host.allocate(_LINE_BYTES)
        self._memory = bells, begun
        self._bell = bells.own.data_ptr()
        self._others = [part.data_ptr() for part in bells.parts if part is not bells.own]
        self._begun, self._begun_by = as_words(begun.own), [as_words(part) for part in begun.parts]

    def _begin(self) -> None:
        self._begun[0] = self._num_cycles
        until = time.perf_counter() + self._cycle_seconds
        while any(words[0] < self._num_cycles for words in self._begun_by):
            if time.perf_counter() > until:
                for bell in self._others:
                    semaphore.post(bell)
                return
            if self._cycle_seconds > _SPIN_SECONDS:
                time.sleep(_SPIN_SECONDS)
            semaphore.give_way()

    def is_awaited(self) -> bool:
        return any(words[0] > self._num_cycles for words in self._begun_by)

    def wait(self, seconds: float) -> None:
        if semaphore.wait_for(self._bell, seconds):
            while not semaphore.try_wait(self._bell):  # several ranks may have rung
                pass

    def wake(self) -> None:
        semaphore.post(self._bell)


class StoreCycles(Cycles):
    """`Cycles` between hosts, through `backend`. A key in the world's store wakes the other ranks."""

    def __init__(self, rendezvous: Rendezvous, backend: Backend) -> None:
        super().__init__(backend)
        self._store = within(rendezvous.store, "horovod")
        self._begun = 0  # the last cycle of which this rank has heard
        self._bell = threading.Event()
        self._is_closed = False
        self._listener = SerialThread("torchring-horovod-listener")
        self._listener.submit(self._listen)

    def _begin(self) -> None:
        if self._begun < self._num_cycles:
            self._ring(self._num_cycles)

    def is_awaited(self) -> bool:
        return self._begun > self._num_cycles

    def wait(self, seconds: float) -> None:
        self._bell.wait(seconds)
        self._bell.clear()

    def wake(self) -> None:
        self._bell.set()

    def wake_others(self) -> None:
        with contextlib.suppress(RuntimeError):  # the store may be gone
            self._ring(self._num_cycles + 1)

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        with contextlib.suppress(RuntimeError):  # the store may be gone, and then the listener has ended
            self._ring(self._num_cycles)
        self._listener.close()

    def _ring(self, number: int) -> None:
        """Have all ranks hear that cycle `number` has begun."""
        count = self._store.add("num_rings", 1)
        self._store.set(f"ring/{count}", str(number))
        if count > _KEPT_RINGS:
            self._store.delete_key(f"ring/{count - _KEPT_RINGS}")

    def _listen(self) -> None:
        """Hear of all cycles that other ranks begin. On a thread and, where PyTorch can, a connection of its own."""
        own = self._store.clone() if hasattr(dist.Store, "clone") else None  # type: ignore[attr-defined]
        num_heard = 0
        while not self._is_closed:
            if num_heard % 100 == 0:  # a thread that was starved for long does not wait for keys that are gone
                num_heard = max(num_heard, (own or self._store).add("num_rings", 0) - _KEPT_RINGS // 2)
            key = f"ring/{num_heard + 1}"
            if own is not None:
                own.wait([key], _FOREVER)  # a wait that times out prints warnings
            else:
                while not self._store.check([key]):
                    time.sleep(_POLL_SECONDS)
            num_heard += 1
            self._begun = max(self._begun, int((own or self._store).get(key)))
            self._bell.set()
