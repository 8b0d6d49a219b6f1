"""Hierarchical all-reduce: within each host through shared memory, between hosts in rings, one for each column.

The buffer is cut into as many columns as the smallest host has ranks. Column c belongs to the c-th rank of every host.
It sums the column over its host as in `direct`, reduces that with its counterparts in a ring, and writes the result to
its host's ranks. So a host sends 2(H-1)/H of a buffer, whatever the number of its ranks: 2 hosts of 2 ranks move 1.0
buffers over each link, a ring of the four ranks 1.5. Ranks beyond the columns have nothing to send.

      host A                                           host B
      rank 0, column 0:  0+1 --- ring of 0 and 2 ---   rank 2, column 0:  2+3
      rank 1, column 1:  0+1 --- ring of 1 and 3 ---   rank 3, column 1:  2+3

All ranks hold the same bits: a ring leaves them on its members, which copy them to their hosts. 16-bit wires are summed
in fp32 on the host and at every hop, and rounded after each.
"""

from __future__ import annotations

import contextlib
import heapq
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from torchring.allreduce.lanes import Lanes, StandingBy
from torchring.allreduce.mover import NonFinite, PendingReduction, StagedMover, Wire
from torchring.allreduce.notes import MAX_IN_FLIGHT, Notes
from torchring.allreduce.ring import RingAllReduce, RingWire
from torchring.allreduce.slices import SharedWire, Slices
from torchring.errors import RingError
from torchring.memory.channel import Channel
from torchring.memory.host import HostGroup

# A rank of another host that keeps a column waiting is named by that column's ring; who waits for the column waits on.
_GRACE_SECONDS: Final = 5.0
_LOOK_SECONDS: Final = 0.1  # how often a lane that waits for its turn looks whether another has failed


def num_columns(hosts: Sequence[Sequence[int]]) -> int:
    """As many as the smallest host has ranks."""
    return min(map(len, hosts))


def column_members(hosts: Sequence[Sequence[int]], rank: int) -> tuple[int, ...] | None:
    """The ranks of the ring that `rank` is in, one of each host; None beyond the columns.

    Example: hosts (0, 1), (2, 3), (4,): ranks 0, 2, 4 make the only column, ranks 1 and 3 have none.
    """
    place = next(members.index(rank) for members in hosts if rank in members)
    return tuple(members[place] for members in hosts) if place < num_columns(hosts) else None


@dataclass(frozen=True)
class HierarchicalWire:
    """A buffer in shared memory. `column` is this rank's, from element `first` on; None if it has none."""

    shared: SharedWire
    first: int
    column: RingWire | None
    others: tuple[torch.Tensor, ...]  # the column in the peers' buffers

    @property
    def tensor(self) -> torch.Tensor:
        return self.shared.tensor


@dataclass(frozen=True)
class _Ticket:
    """A flight, as its lane sees it."""

    number: int
    wire: HierarchicalWire

    @property
    def tensor(self) -> torch.Tensor:
        return self.wire.tensor


class PendingHierarchical:
    """One reduction. See `PendingReduction`: goes on by itself, or is over but for the peers' parts after `start`."""

    def __init__(self, mover: HierarchicalAllReduce, number: int, part: PendingReduction) -> None:
        self._mover = mover
        self._result: NonFinite | None = None
        self.number = number
        self.part = part
        self.is_over = False
        self.span: tuple[float, float] | None = None

    def advance(self) -> bool:
        return self.part.advance()

    def contribute(self) -> None:
        self.part.contribute()

    def wait(self) -> NonFinite | None:
        if not self.is_over:
            self._result = self._mover.wait(self)
        return self._result


class HierarchicalAllReduce:
    """Mover over shared memory and rings; all ranks of the world open it together. See `StagedMover`.

    Args:
        group: the ranks of this host.
        columns: how many; the ranks whose position in the group is less have one.
        ring: of this rank's column, None if it has none.
        in_background: whether reductions proceed in lanes, or while the caller waits in `start`.
    """

    algorithm = "hierarchical"

    def __init__(
        self, group: HostGroup, columns: int, ring: RingAllReduce | None, *, in_background: bool = True
    ) -> None:
        self.in_background = in_background
        part = _Part(group, columns, ring, in_background=in_background)
        self._part = part
        self._parts: StagedMover = Lanes(part) if in_background else StandingBy(part)
        self._in_flight: deque[PendingHierarchical] = deque()
        self._num_started = 0

    def open_wires(self, specs: Sequence[tuple[int, torch.dtype]]) -> list[HierarchicalWire]:
        return self._part.open_wires(specs)

    def all_reduce(self, wire: Wire, *, scale: float = 1.0, tag: int = 0) -> NonFinite | None:
        return self.start(wire, scale=scale, tag=tag).wait()

    def start(self, wire: Wire, *, scale: float = 1.0, tag: int = 0) -> PendingHierarchical:
        assert isinstance(wire, HierarchicalWire)
        if len(self._in_flight) == MAX_IN_FLIGHT:
            self._in_flight[0].wait()
        number = self._num_started
        self._num_started += 1
        began = time.perf_counter()
        with self._telling_everybody():
            self._part.announce(number, tag)
            part = self._parts.start(_Ticket(number, wire), scale=scale, tag=tag)
        flight = PendingHierarchical(self, number, part)
        flight.span = (began, began) if self.in_background else None
        self._in_flight.append(flight)
        return flight

    def wait(self, flight: PendingHierarchical) -> NonFinite | None:
        """Wait for this rank's part, and for the peers' results."""
        assert flight is self._in_flight[0], "flights land in the order in which they were started"
        with self._telling_everybody():
            flight.part.wait()
            found = self._part.gather_results(flight.number)
        self._in_flight.popleft()
        flight.is_over = True
        if flight.span is not None:
            flight.span = (flight.span[0], time.perf_counter())
        return found

    def fail(self, error: RingError) -> None:
        self._parts.fail(error)

    def close(self) -> None:
        self._parts.close()

    @contextlib.contextmanager
    def _telling_everybody(self) -> Iterator[None]:
        """What goes wrong on this host stops the rings, whose members know nothing of it."""
        try:
            yield
        except RingError as error:
            self.fail(error)
            raise


class _Part:
    """This rank's part of every reduction. See `LaneMover`; what happens in shared memory happens in flight order."""

    algorithm = "hierarchical"

    def __init__(self, group: HostGroup, columns: int, ring: RingAllReduce | None, *, in_background: bool) -> None:
        self.num_lanes = 1 if ring is None else ring.num_lanes
        self._group = group
        self._ring = ring
        # Nobody polls: between hosts waits are long, and lanes want the core. Without lanes, peers that have not packed
        # may be waiting for other hosts, too.
        grace = 0.0 if in_background else _GRACE_SECONDS
        self._packed = Channel(group, poll_seconds=0.0, grace_seconds=grace)
        self._done = Channel(group, poll_seconds=0.0, grace_seconds=_GRACE_SECONDS)
        self._slices = Slices(group, columns)
        self._notes = Notes(group)
        self._turns = threading.Condition()  # held while waiting for peers to pack
        self._finishing = threading.Lock()
        self._num_summed = self._num_done = 0  # flights
        self._early: list[int] = []  # flights whose part is done, before that of an earlier one
        self._failure: RingError | None = None

    def open_wires(self, specs: Sequence[tuple[int, torch.dtype]]) -> list[HierarchicalWire]:
        return [self._wire(parts) for parts in self._slices.allocate(specs)]

    def announce(self, number: int, tag: int) -> None:
        """This rank has packed its n-th wire."""
        self._notes.write_tag(number, tag)
        self._packed.announce()

    def all_reduce(self, wire: Wire, *, scale: float = 1.0, tag: int = 0, lane: int = 0) -> NonFinite | None:
        assert isinstance(wire, _Ticket)
        number, column = wire.number, wire.wire.column
        # 16-bit partial sums travel, so they are scaled before; wider ones after, as in a ring.
        is_narrow = wire.tensor.dtype.itemsize == 2
        within, between = (scale, 1.0) if is_narrow else (1.0, scale)
        culprit = self._sum_on_host(number, wire.wire, within, tag)
        found: NonFinite | None = None
        if column is not None:
            assert self._ring is not None
            found = self._ring.reduce_checked(column, culprit, scale=between, tag=tag, lane=lane)
            for other in wire.wire.others:
                other.copy_(column.whole)
        if found is not None:
            found = NonFinite(found.rank, found.element + wire.wire.first)
        self._notes.write(number, found)
        with self._finishing:  # peers count: the n-th "done" is that of the n-th flight
            heapq.heappush(self._early, number)
            while self._early and self._early[0] == self._num_done:
                heapq.heappop(self._early)
                self._num_done += 1
                self._done.announce()
        return found

    def gather_results(self, number: int) -> NonFinite | None:
        """Wait until all parts of the n-th wire are written; what was found in any."""
        self._done.gather()
        return self._notes.read(number)

    def fail(self, error: RingError) -> None:
        self._failure = self._failure or error
        self._group.report_failure(error)
        if self._ring is not None:
            self._ring.fail(error)

    def close(self) -> None:
        if self._ring is not None:
            self._ring.close()

    def _sum_on_host(self, number: int, wire: HierarchicalWire, scale: float, tag: int) -> NonFinite | None:
        """Once all have packed: this rank's column over its host. Lanes take turns, and share what a sum needs."""
        with self._turns:
            while self._num_summed != number:
                if self._failure is not None:
                    raise self._failure
                self._turns.wait(_LOOK_SECONDS)
            try:
                self._packed.gather()
                self._notes.check_tags(number, tag)
                culprit = self._slices.sum(wire.shared, scale, spread=False)
            except RingError as error:
                self._failure = self._failure or error
                raise
            self._num_summed += 1
            self._turns.notify_all()
        return None if culprit is None else NonFinite(culprit.rank, culprit.element - wire.first)

    def _wire(self, parts: Sequence[torch.Tensor]) -> HierarchicalWire:
        shared, (start, stop) = self._slices.wire(parts), self._slices.bounds(parts[0])
        if self._ring is None:
            return HierarchicalWire(shared, 0, None, ())
        me = self._group.index
        others = tuple(part[start:stop] for i, part in enumerate(parts) if i != me)
        return HierarchicalWire(shared, start, self._ring.wire_over(parts[me][start:stop]), others)
