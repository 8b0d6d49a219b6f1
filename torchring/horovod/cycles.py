"""Negotiation cycles: every rank hands every rank some bytes. A cycle wakes the ranks that sleep.

A rank that has nothing to say sleeps until another rank begins a cycle. So an idle process takes no processor time.
"""

from __future__ import annotations

import contextlib
import threading
import time
from datetime import timedelta
from typing import Final, Protocol

import torch.distributed as dist

from torchring.collectives.operations import Backend
from torchring.collectives.signature import Signature
from torchring.memory import semaphore
from torchring.memory.channel import Channel
from torchring.memory.host import HostGroup, as_words
from torchring.rendezvous.rendezvous import Rendezvous
from torchring.rendezvous.signed import within
from torchring.threads import SerialThread

_ROOM_BYTES: Final = 64 * 1024  # for what a rank says in one turn; a longer message takes several turns
_HEADER_BYTES: Final = 64
_SPIN_SECONDS: Final = 0.005  # a rank that waits for longer sleeps in between
_KEPT_RINGS: Final = 1000  # keys of the store
_FOREVER: Final = timedelta(days=3650)
_POLL_SECONDS: Final = 0.02  # between two looks at a store on which nobody can wait


class Cycles(Protocol):
    """One rank's view. `exchange` is for one thread at a time, `wait` for one other thread, `wake` for any thread."""

    def exchange(self, data: bytes) -> list[memoryview]:
        """Collective: begin a cycle, or take part in the cycle that another rank has begun.

        Args:
            data: any number of bytes; ranks may have different numbers.

        Returns:
            The data of all ranks, in rank order; valid until the next exchange but one.
        """

    def is_awaited(self) -> bool:
        """True if another rank has begun a cycle and waits for this rank."""

    def wait(self, seconds: float) -> None:
        """Sleep until another rank begins a cycle, or `wake` is called; at most `seconds`."""

    def wake(self) -> None:
        """End a `wait` of this rank, or the next one."""

    def wake_others(self) -> None:
        """Have the other ranks find out that this rank has failed."""

    def close(self) -> None:
        """Nobody exchanges any more."""


class SharedMemoryCycles:
    """`Cycles` through memory that all ranks share. All ranks of `host` open it together.

    Every rank has a page of two halves, which alternate between turns, as in `SharedMemoryCollectives`. A page begins
    with three words: the number of turns that this rank has begun, and the length of its data in either half.

    Args:
        cycle_seconds: how long a rank that has begun a cycle waits for the other ranks' scripts to come by themselves,
            before it wakes their sleeping threads.
    """

    def __init__(self, host: HostGroup, cycle_seconds: float) -> None:
        self._cycle_seconds = cycle_seconds
        self._index = host.index
        self._channel = Channel(host)
        self._bells = host.allocate(
            semaphore.SEMAPHORE_STRIDE, prepare=lambda part: semaphore.initialise(part.data_ptr())
        )
        self._bell = self._bells.own.data_ptr()
        self._others = [part.data_ptr() for part in self._bells.parts if part is not self._bells.own]
        pages = host.allocate(_HEADER_BYTES + 2 * _ROOM_BYTES)
        self._words = [as_words(part[:_HEADER_BYTES]) for part in pages.parts]
        views = [memoryview(part.numpy()) for part in pages.parts]  # type: ignore[arg-type]
        middle = _HEADER_BYTES + _ROOM_BYTES
        self._rooms = [[view[_HEADER_BYTES:middle] for view in views], [view[middle:] for view in views]]
        self._num_turns = 0

    def exchange(self, data: bytes) -> list[memoryview]:
        lengths = self._turn(data, 0)
        room = self._rooms[self._num_turns & 1]
        if max(lengths) <= _ROOM_BYTES:
            return [part[:length] for part, length in zip(room, lengths, strict=True)]
        said = [bytearray(length) for length in lengths]
        for start in range(0, max(lengths), _ROOM_BYTES):
            if start:
                self._turn(data, start)
            for part, target in zip(self._rooms[self._num_turns & 1], said, strict=True):
                piece = memoryview(target)[start : start + _ROOM_BYTES]
                piece[:] = part[: len(piece)]
        return [memoryview(text) for text in said]

    def _turn(self, data: bytes, start: int) -> list[int]:
        """Say `data` from `start` on, as far as there is room. Returns how long the data of all ranks is."""
        self._num_turns += 1
        half = self._num_turns & 1
        piece = data[start : start + _ROOM_BYTES]
        self._rooms[half][self._index][: len(piece)] = piece
        mine = self._words[self._index]
        mine[1 + half] = len(data)
        mine[0] = self._num_turns
        self._channel.announce()
        until = time.perf_counter() + self._cycle_seconds
        while not self._channel.has_gathered():
            if time.perf_counter() > until:
                for bell in self._others:
                    semaphore.post(bell)
                self._channel.gather()
                break
            if self._cycle_seconds > _SPIN_SECONDS:
                time.sleep(_SPIN_SECONDS)
            semaphore.give_way()
        return [words[1 + half] for words in self._words]

    def is_awaited(self) -> bool:
        return any(words[0] > self._num_turns for words in self._words)

    def wait(self, seconds: float) -> None:
        if semaphore.wait_for(self._bell, seconds):
            while not semaphore.try_wait(self._bell):  # several ranks may have rung
                pass

    def wake(self) -> None:
        semaphore.post(self._bell)

    def wake_others(self) -> None:
        """They watch the processes of this host anyway."""

    def close(self) -> None:
        """Nothing to release: the memory is freed with the last tensor that views it."""


class StoreCycles:
    """`Cycles` between hosts, through `backend`. A key in the world's store wakes the other ranks.

    Args:
        rendezvous: where the ranks of the world meet.
        backend: collectives that nobody else calls.
    """

    def __init__(self, rendezvous: Rendezvous, backend: Backend) -> None:
        self._store = within(rendezvous.store, "horovod")
        self._backend = backend
        self._num_cycles = 0
        self._begun = 0  # the last cycle of which this rank has heard
        self._bell = threading.Event()
        self._is_closed = False
        self._listener = SerialThread("torchring-horovod-listener")
        self._listener.submit(self._listen)

    def exchange(self, data: bytes) -> list[memoryview]:
        self._num_cycles += 1
        if self._begun < self._num_cycles:
            self._ring(self._num_cycles)
        return [memoryview(bytearray(part)) for part in self._backend.exchange(data, Signature("negotiation"))]

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
