"""How long a place is left out where workers fail again and again: Horovod's blacklist with a cooldown.

A place is a host, or a slot of a host. The first failure leaves the place in use. The second failure in a row leaves
the place out for a second, the third for two, and so on up to ten minutes, each time with jitter: places that fail for
the same reason shall not all come back at the same moment.
"""

from __future__ import annotations

import random
from collections.abc import Hashable
from typing import Final

_JITTER: Final = 0.25  # of a delay is random


class Cooldown:
    """Failures of places.

    Args:
        shortest, longest: seconds for which a place is left out, after its second failure in a row, and at most.
        randomness: where the jitter comes from.
    """

    def __init__(self, shortest: float, longest: float, randomness: random.Random) -> None:
        self._shortest = shortest
        self._longest = longest
        self._random = randomness
        self._failures: dict[Hashable, int] = {}
        self._until: dict[Hashable, float] = {}

    def fail(self, place: Hashable, now: float) -> float:
        """A worker has failed there. Returns for how many seconds the place is left out."""
        failures = self._failures[place] = self._failures.get(place, 0) + 1
        if failures == 1:
            return 0.0
        delay = min(self._longest, self._shortest * 2.0 ** min(failures - 2, 40))
        delay *= 1 - _JITTER * self._random.random()
        self._until[place] = now + delay
        return delay

    def succeed(self, place: Hashable) -> None:
        """A worker has done well there: earlier failures count no more."""
        self._failures.pop(place, None)
        self._until.pop(place, None)

    def is_over(self, place: Hashable, now: float) -> bool:
        """Whether the place may be used."""
        return now >= self._until.get(place, now)

    def failures(self, place: Hashable) -> int:
        """Number of failures in a row."""
        return self._failures.get(place, 0)
