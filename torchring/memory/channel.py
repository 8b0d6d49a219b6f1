"""Signals between the ranks of one host: every rank tells every other rank "I have come this far".

A `Channel` serves one sequence of operations, which every rank issues in the same order: the buckets of one optimizer,
or the script's collectives. So two sequences never take each other's signals. For ranks a and b, the semaphore
`inbox[a]` in b's part of the block counts the signals of a that b has not taken yet.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Final

import torch

from torchring.memory import semaphore
from torchring.memory.host import HostGroup

POLL_SECONDS: Final = 5e-3
"""Default time for which a rank polls for its peers before it goes to sleep; see `Channel`."""

# If giving way takes longer than a switch to a peer and back, another program computes on this core.
_CROWDED_SECONDS: Final = 300e-6
_WAITS_WHILE_CROWDED: Final = 20
_LOOK_SECONDS: Final = 200e-6  # between two calls of `meanwhile`


class Channel:
    """Signals between the ranks of `group`, opened collectively.

    Every rank announces each phase once and gathers each phase once, in the same order. A rank may announce a phase
    that its peers have not reached yet.

    Args:
        group: the ranks that share memory.
        poll_seconds: time to poll before going to sleep. Waking a sleeper costs about 15 us, and 150 us or more if
            the processor has gone idle. A polling rank gives way to other processes between two looks, so polling does
            no harm where ranks outnumber cores (all-reduce of 1 KiB, 4 ranks on 2 cores: 60 us; asleep 175 us, polling
            without giving way 580 us). If another program keeps the core for long, the rank sleeps in its next few
            waits. Pass 0 if another thread of the process computes all the time.
        grace_seconds: see `HostGroup.wait_until`.
    """

    def __init__(self, group: HostGroup, *, poll_seconds: float = POLL_SECONDS, grace_seconds: float = 0.0) -> None:
        self.group = group
        self.grace_seconds = grace_seconds
        self.poll_seconds = poll_seconds
        # called now and then while this rank waits, until it returns False. Then this rank does not poll.
        self.meanwhile: Callable[[], bool] | None = None
        block = group.allocate(semaphore.SEMAPHORE_STRIDE * group.size, prepare=_initialise_inbox)
        self._block = block  # keeps the mapping alive: the addresses below point into it
        others = [i for i in range(group.size) if i != group.index]
        offset = semaphore.SEMAPHORE_STRIDE
        self._outgoing = [block.parts[i].data_ptr() + offset * group.index for i in others]
        self._incoming = [(block.own.data_ptr() + offset * i, group.ranks[i]) for i in others]
        self._crowded_waits = 0  # number of coming waits in which the rank does not poll
        self._num_gathered = 0  # number of peers whose signal of the current phase has been taken

    def barrier(self) -> None:
        """`announce` and `gather`: return when every rank has called `barrier` as often as this rank."""
        self.announce()
        self.gather()

    def announce(self) -> None:
        """Tell the peers that this rank has reached the next phase. A peer that gathers it sees all earlier writes."""
        for address in self._outgoing:
            semaphore.post(address)

    def has_gathered(self) -> bool:
        """Gather without waiting. Returns True if every peer has announced the current phase; the next phase begins."""
        incoming = self._incoming
        while self._num_gathered < len(incoming):
            if semaphore.try_wait(incoming[self._num_gathered][0]):
                return False
            self._num_gathered += 1
        self._num_gathered = 0
        return True

    def gather(self) -> None:
        """Wait until every peer has announced the current phase.

        Raises PeerLostError within about 0.1 s of a peer's death, PeerTimeoutError after the group's timeout, both
        naming the peer.
        """
        while not self.has_gathered():
            position = self._num_gathered
            address, _ = self._incoming[position]
            is_crowded = self._crowded_waits > 0
            self._crowded_waits -= is_crowded
            is_busy = is_crowded or self.meanwhile is not None
            if is_busy or not (self.poll_seconds and self._poll(address)):
                arrived, missing = partial(self._wait_for, address), partial(self._missing, position)
                self.group.wait_until(arrived, missing, grace_seconds=self.grace_seconds)
            self._num_gathered += 1

    def _wait_for(self, address: int, seconds: float) -> bool:
        """As `semaphore.wait_for`, with calls of `meanwhile`."""
        until = time.monotonic() + seconds
        while self.meanwhile is not None and (now := time.monotonic()) < until:
            if not self.meanwhile():
                self.meanwhile = None
            elif semaphore.wait_for(address, min(_LOOK_SECONDS, until - now)):
                return True
        return semaphore.wait_for(address, max(0.0, until - time.monotonic()))

    def _missing(self, position: int) -> list[int]:
        """The ranks whose signal is missing, while this rank waits for the peer at `position`."""
        # The signals of earlier ranks in the list are taken. A later rank has arrived if its count is above 0.
        return [rank for inbox, rank in self._incoming[position:] if semaphore.value(inbox) == 0]

    def _poll(self, address: int) -> bool:
        """Poll for a signal, giving way between two looks. Returns True if the signal was taken."""
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
