"""Bells, by which a rank that begins a negotiation cycle wakes the threads of the others. Idle processes sleep."""

import contextlib
from datetime import timedelta
from typing import Final

import torch

from torchring.memory import semaphore
from torchring.memory.host import HostGroup, as_words
from torchring.rendezvous.rendezvous import Rendezvous, within
from torchring.rendezvous.signed import unsigned
from torchring.threads import SerialThread

_LINE_BYTES: Final = 64
_KEPT_RINGS: Final = 1000  # keys of the store
_FOREVER: Final = timedelta(days=3650)


class Bell:
    """One rank's bell: of a world of one. `wait` is for one thread, `wake` for any, signal handlers included."""

    def __init__(self, memory: torch.Tensor | None = None) -> None:
        if memory is None:
            memory = torch.zeros(semaphore.SEMAPHORE_STRIDE, dtype=torch.uint8, device="cpu")
            semaphore.initialise(memory.data_ptr())
        self._memory = memory
        self._address = memory.data_ptr()

    def wait(self, seconds: float) -> None:
        """Sleep until `wake` is called, here or by a rank that begins a cycle; at most `seconds`."""
        if semaphore.wait_for(self._address, seconds):
            while not semaphore.try_wait(self._address):  # several may have rung
                pass

    def wake(self) -> None:
        """End a `wait` of this rank, or the next one."""
        semaphore.post(self._address)

    def begin(self, cycle: int) -> None:
        """Have the other ranks hear that this cycle has begun. Cycles are numbered from 1."""

    def last_begun(self) -> int:
        """The last cycle that any rank has begun, as far as this rank has heard."""
        return 0

    def close(self) -> None:
        """Nobody begins a cycle any more."""


class SharedMemoryBell(Bell):
    """Of ranks that share memory: the bells of all ranks, and which cycle each has begun, are there."""

    def __init__(self, host: HostGroup) -> None:
        bells = host.allocate(semaphore.SEMAPHORE_STRIDE, prepare=lambda part: semaphore.initialise(part.data_ptr()))
        super().__init__(bells.own)
        begun = host.allocate(_LINE_BYTES)
        self._own_cycle = as_words(begun.own)
        self._of_ranks = [(as_words(words), bell) for words, bell in zip(begun.parts, bells.parts, strict=True)]

    def begin(self, cycle: int) -> None:
        self._own_cycle[0] = cycle
        for begun, bell in self._of_ranks:
            if begun[0] < cycle:
                semaphore.post(bell.data_ptr())

    def last_begun(self) -> int:
        return max(begun[0] for begun, _ in self._of_ranks)


class StoreBell(Bell):
    """Between hosts: a key of the world's store for each ring, on which a thread of every rank waits."""

    def __init__(self, rendezvous: Rendezvous) -> None:
        super().__init__()
        self._store = within(rendezvous.store, "horovod")
        self._last_begun = 0
        self._is_closed = False
        self._listener = SerialThread("torchring-horovod-listener")
        self._listener.submit(self._listen)

    def begin(self, cycle: int) -> None:
        if self._last_begun < cycle:
            self._ring(cycle)

    def last_begun(self) -> int:
        return self._last_begun

    def close(self) -> None:
        if not self._is_closed:
            self._is_closed = True
            with contextlib.suppress(RuntimeError):  # the store may be gone, and then the listener has ended
                self._ring(0)
            self._listener.close()

    def _ring(self, cycle: int) -> None:
        count = self._store.add("num_rings", 1)
        self._store.set(f"ring/{count}", str(cycle))
        if count > _KEPT_RINGS:
            self._store.delete_key(f"ring/{count - _KEPT_RINGS}")

    def _listen(self) -> None:
        """Hear the newest ring, on a connection of its own. A wait that times out would print warnings."""
        store = self._store.clone()  # type: ignore[attr-defined]  # not in the stubs
        number = 0
        while not self._is_closed:
            number = max(number + 1, store.add("num_rings", 0))
            unsigned(store).wait([f"ring/{number}"], _FOREVER)
            self._last_begun = max(self._last_begun, int(store.get(f"ring/{number}")))
            self.wake()
