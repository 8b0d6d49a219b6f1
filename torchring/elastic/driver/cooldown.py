"""Leaves slots out where workers fail again and again: Horovod's blacklist with a cooldown.

The first failure leaves the slot in use. The second failure in a row leaves the slot out for a second, the third for
two, and so on up to ten minutes, each time with jitter: slots that fail for the same reason shall not all come back at
the same moment.
"""

from __future__ import annotations

import random
from collections.abc import Hashable
from typing import Final

_JITTER: Final = 0.25  # of a delay is random


class Cooldown:
    """Counts failures, of slots or of whole hosts.

    Args:
        shortest, longest: seconds for which a slot is left out, after its second failure in a row, and at most.
        randomness: where the jitter comes from.
    """

    def __init__(self, shortest: float, longest: float, randomness: random.Random) -> None:
        self._shortest = shortest
        self._longest = longest
        self._random = randomness
        self._failures: dict[Hashable, int] = {}
        self._until: dict[Hashable, float] = {}

    def fail(self, slot: Hashable, now: float) -> float:
        """Note that a worker has failed there. Returns for how many seconds the slot is left out."""
        failures = self._failures[slot] = self._failures.get(slot, 0) + 1
        if failures == 1:
            return 0.0
        delay = min(self._longest, self._shortest * 2.0 ** min(failures - 2, 40))
        delay *= 1 - _JITTER * self._random.random()
        self._until[slot] = now + delay
        return delay

    def succeed(self, slot: Hashable) -> None:
        """Note that a worker has done well there: earlier failures count no more."""
        self._failures.pop(slot, None)
        self._until.pop(slot, None)

    def is_over(self, slot: Hashable, now: float) -> bool:
        """Return True if the slot may be used."""
        return now >= self._until.get(slot, now)

    def failures(self, slot: Hashable) -> int:
        """Number of failures in a row."""
        return self._failures.get(slot, 0)
