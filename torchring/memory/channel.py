"""Signals between the ranks of one host: everyone tells everyone "I have come this far".

One `Channel` serves one stream of operations that every rank issues in the same order (one optimizer's buckets, or the
script's collectives), so two streams never take each other's signals. Ranks a, b: the semaphore `inbox[a]` in b's part
of the block counts how often a arrived and b has not yet noticed.
"""

from __future__ import annotations

import time
from typing import Final

import torch

from torchring.memory import semaphore
from torchring.memory.host import HostGroup

POLL_SECONDS: Final = 5e-3
"""How long a rank polls for its peers before it goes to sleep, unless said otherwise; see `Channel`."""

# Giving way took longer than a switch to a peer and back does: something else computes on this core.
_CROWDED_SECONDS: Final = 300e-6
_WAITS_WHILE_CROWDED: Final = 20


class Channel:
    """Signals between the ranks of `group`, opened collectively.

    A phase is announced once by every rank and gathered once by every rank, in the same order. A rank may announce
    phases that its peers have not come to yet.

    Args:
        group: the ranks that share memory.
        poll_seconds: how long to poll before going to sleep. Waking a sleeper costs about 15 us, and 150 us or more
            where the processor had gone idle. A polling rank gives way to others between two looks, so it does no harm
            where ranks outnumber cores (all-reduce of 1 KiB, 4 ranks on 2 cores: 60 us; asleep 175, polling without
            giving way 580). Where it meets a program that takes its turn and does not give it back, it sleeps in the
            next few waits. It should be 0 where another thread of the process computes all the while.
        grace_seconds: see `HostGroup.wait_until`.
    """

    def __init__(self, group: HostGroup, *, poll_seconds: float = POLL_SECONDS, grace_seconds: float = 0.0) -> None:
        self.group = group
        self.grace_seconds = grace_seconds
        self.poll_seconds = poll_seconds
        block = group.allocate(semaphore.SEMAPHORE_STRIDE * group.size, prepare=_initialise_inbox)
        self._block = block  # keeps the mapping alive: the addresses below point into it
        others = [i for i in range(group.size) if i != group.index]
        offset = semaphore.SEMAPHORE_STRIDE
        self._outgoing = [block.parts[i].data_ptr() + offset * group.index for i in others]
        self._incoming = [(block.own.data_ptr() + offset * i, group.ranks[i]) for i in others]
        self._crowded_waits = 0  # to come, in which polling is left alone
        self._num_gathered = 0  # peers whose signal of the phase at hand has been taken

    def barrier(self) -> None:
        """Return when every rank has called it as often as this one: `announce` and `gather`."""
        self.announce()
        self.gather()

    def announce(self) -> None:
        """Tell the peers that this rank has come here. What it wrote before is visible to them once they gather it."""
        for address in self._outgoing:
            semaphore.post(address)

    def has_gathered(self) -> bool:
        """Gather without waiting: whether every peer has announced the phase at hand; if so, the next one begins."""
        incoming = self._incoming
        while self._num_gathered < len(incoming):
            if semaphore.try_wait(incoming[self._num_gathered][0]):
                return False
            self._num_gathered += 1
        self._num_gathered = 0
        return True

    def gather(self) -> None:
        """Wait until every peer has announced the phase at hand.

        Raises PeerLostError within about 0.1 s of a peer's death, PeerTimeoutError after the group's timeout, both
        naming the peer.
        """
        while not self.has_gathered():
            self._wait()
            self._num_gathered += 1

    def _wait(self) -> None:
        """Take the signal of the first peer whose signal is missing."""
        position = self._num_gathered
        address, _ = self._incoming[position]
        if self._crowded_waits:
            self._crowded_waits -= 1
        elif self.poll_seconds and self._poll(address):
            return

        def missing() -> list[int]:
            # Ranks before this one in the list have been taken; of those after it, a count that is there has arrived.
            return [rank for inbox, rank in self._incoming[position:] if semaphore.value(inbox) == 0]

        self.group.wait_until(
            lambda seconds: semaphore.wait_for(address, seconds), missing, grace_seconds=self.grace_seconds
        )

    def _poll(self, address: int) -> bool:
        """Look for a signal for a while, giving way in between; whether it was taken."""
        now = time.perf_counter()
        until = now + self.poll_seconds
        while now < until and not self._crowded_waits:
            semaphore.give_way()
            before, now = now, time.perf_counter()
            if now - before > _CROWDED_SECONDS:
                self._crowded_waits = _WAITS_WHILE_CROWDED
            if not semaphore.try_wait(address):
                return True
        return False


def _initialise_inbox(part: torch.Tensor) -> None:
    for offset in range(0, part.numel(), semaphore.SEMAPHORE_STRIDE):
        semaphore.initialise(part.data_ptr() + offset)
