"""Compares the clocks of two hosts by messages that ranks exchange.

A message arrives after it was sent. If a rank's clock is ahead by x, then in each exchange

    it has received (on its clock) - x  >=  rank 0 has sent           so x is at most   received - sent by rank 0
    rank 0 has received  >=  it has sent (on its clock) - x           so x is at least  sent - received by rank 0

The bounds of a few exchanges leave an interval. Its middle is the estimate, and half of its length bounds the error.
Source: K. Marzullo and S. Owicki, "Maintaining the time in a distributed system", 1983.
"""

import itertools
import struct
import time
from collections.abc import Callable, Sequence
from typing import Final

from torchring.collectives.service import internal_collectives_of
from torchring.gradients.contract import Setup
from torchring.gradients.reduction import Participant, Reduction
from torchring.observe.recorder.records import ClockOffset
from torchring.world import World

_NUM_EXCHANGES: Final = 10
_REDUCTIONS_BETWEEN: Final = 500  # clocks drift by some microseconds a second
_TIMES: Final = struct.Struct("2q")  # this exchange was sent, the exchange before was received


def estimate(mine: Sequence[tuple[int, int]], theirs: Sequence[tuple[int, int]]) -> ClockOffset:
    """How far a clock is ahead of another, by when its host sent a message, and had all messages, in each exchange.

    Example: rank 0 sends at 100 and has all messages at 104; a rank whose clock is ahead by 50 sends at 151 and has all
    messages at 153. So the offset is between 47 and 53: 50, with an error of 3 at most.
    """
    pairs = list(zip(mine, theirs, strict=True))
    most = min(received - sent for (_, received), (sent, _) in pairs)
    least = max(sent - received for (sent, _), (_, received) in pairs)
    return ClockOffset(mine[-1][1], (most + least) // 2, max(0, most - least + 1) // 2)


def measure(exchange: Callable[[bytes], Sequence[bytes]], *, is_same_host: bool) -> ClockOffset:
    """Collective: compare this rank's clock with that of rank 0, which is the same on the same host.

    `exchange` sends bytes to all ranks, and returns what each rank has sent, in rank order.
    """
    mine: list[tuple[int, int]] = []
    theirs: list[tuple[int, int]] = []  # each exchange was sent, the exchange before was received
    received = 0
    for _ in range(_NUM_EXCHANGES + 1):  # the last one tells when the one before was received
        sent = time.perf_counter_ns()
        first = exchange(_TIMES.pack(sent, received))[0]
        received = time.perf_counter_ns()
        mine.append((sent, received))
        theirs.append(_TIMES.unpack(first))
    if is_same_host:
        return ClockOffset(received, 0, 0)
    return estimate(mine[:-1], [(sent, after) for (sent, _), (_, after) in itertools.pairwise(theirs)])


def offsets_of(world: World) -> list[ClockOffset]:
    """What was found out in a world, for `World.shared`."""
    return []


class ClockComparison(Participant):
    """Compares clocks now and then, in worlds of several hosts. Opening it is collective."""

    def __init__(self, reducer: object, setup: Setup) -> None:
        self._world = setup.world
        self._compare(0)

    def on_begin(self, current: Reduction) -> None:
        # A rank whose backward has raised at its end never comes to the end of a reduction that its peers do.
        if not current.is_unordered and current.number >= self._compared_at + _REDUCTIONS_BETWEEN:
            self._compare(current.number)

    def _compare(self, number: int) -> None:
        world, self._compared_at = self._world, number
        exchange = internal_collectives_of(world).all_gather_bytes
        world.shared(offsets_of).append(measure(exchange, is_same_host=world.rank in world.hosts[0]))
