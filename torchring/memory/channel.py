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

_TRIES_BETWEEN_CLOCK_READS: Final = 50


class Channel:
    """A barrier between the ranks of `group`, opened collectively.

    Args:
        group: the ranks that share memory.
        spin_seconds: how long to poll before going to sleep. Waking a sleeper costs about 15 us, and 150 us or more
            where the processor had gone idle; polling wins as long as every rank has a core. It keeps the GIL, so it
            must be 0 for a channel whose thread waits while another one computes, and where ranks outnumber cores.
    """

    def __init__(self, group: HostGroup, *, spin_seconds: float) -> None:
        self.group = group
        self.spin_seconds = spin_seconds
        block = group.allocate(semaphore.SEMAPHORE_STRIDE * group.size, prepare=_initialise_inbox)
        self._block = block  # keeps the mapping alive: the addresses below point into it
        others = [i for i in range(group.size) if i != group.index]
        offset = semaphore.SEMAPHORE_STRIDE
        self._outgoing = [block.parts[i].data_ptr() + offset * group.index for i in others]
        self._incoming = [(block.own.data_ptr() + offset * i, group.ranks[i]) for i in others]

    def barrier(self) -> None:
        """Return when every rank has called it as often as this one.

        What a rank wrote before its call is visible to every rank after theirs. Raises PeerLostError within about
        0.1 s of a peer's death, PeerTimeoutError after the group's timeout, both naming the peer.
        """
        for address in self._outgoing:
            semaphore.post(address)
        for position, (address, _) in enumerate(self._incoming):
            if semaphore.try_wait(address):
                self._wait(position)

    def _wait(self, position: int) -> None:
        address, _ = self._incoming[position]
        if self.spin_seconds:
            until = time.perf_counter() + self.spin_seconds
            while time.perf_counter() < until:
                for _ in range(_TRIES_BETWEEN_CLOCK_READS):
                    if not semaphore.try_wait(address):
                        return

        def missing() -> list[int]:
            # Ranks before this one in the list have been taken; of those after it, a count that is there has arrived.
            return [rank for inbox, rank in self._incoming[position:] if semaphore.value(inbox) == 0]

        self.group.wait_until(lambda seconds: semaphore.wait_for(address, seconds), missing)


def _initialise_inbox(part: torch.Tensor) -> None:
    for offset in range(0, part.numel(), semaphore.SEMAPHORE_STRIDE):
        semaphore.initialise(part.data_ptr() + offset)
