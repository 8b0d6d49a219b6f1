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
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from torchring.allreduce.direct import DirectAllReduce, DirectFlight, DirectWire, slice_bounds
from torchring.allreduce.lanes import Lanes, StandingBy
from torchring.allreduce.mover import NonFinite, StagedMover, Wire, is_finite
from torchring.allreduce.ring import RingAllReduce, RingWire
from torchring.errors import RingError
from torchring.memory.host import HostGroup

# A rank of another host that keeps a column waiting is named by that column's ring; who waits for the column waits on.
_GRACE_SECONDS: Final = 5.0


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
class _ColumnWire:
    """One flight's column, as its ring sees it."""

    flight: DirectFlight
    culprit: NonFinite | None  # of the sum over the host

    @property
    def tensor(self) -> torch.Tensor:
        return self.flight.wire.tensor


@dataclass(frozen=True)
class HierarchicalWire(DirectWire):
    ring: RingWire | None
    first: int  # element of the buffer that the column begins with
    others: tuple[torch.Tensor, ...]  # the column in the peers' buffers


class HierarchicalAllReduce(DirectAllReduce):
    """Mover over shared memory and rings; all ranks of the world open it together. See `StagedMover`.

    Args:
        group: the ranks of this host.
        columns: how many; the ranks whose position in the group is less have one.
        ring: of this rank's column, None if it has none.
        in_background: whether rings proceed in lanes, or while the caller waits in `advance` and `contribute`.
    """

    algorithm = "hierarchical"

    def __init__(
        self, group: HostGroup, columns: int, ring: RingAllReduce | None, *, in_background: bool = True
    ) -> None:
        # Nobody polls: between hosts waits are long, and lanes want the core.
        super().__init__(group, poll_seconds=0.0, grace_seconds=_GRACE_SECONDS)
        if not in_background:  # then peers that have not packed may be waiting for other hosts, too
            self._packed.grace_seconds = _GRACE_SECONDS
        self._columns = columns
        self._ring = ring
        self.in_background = in_background
        self._column: StagedMover | None = None
        if ring is not None:
            self._column = Lanes(_Column(self, ring)) if in_background else StandingBy(_Column(self, ring))
        self._lock = threading.Lock()
        self._early: list[int] = []  # numbers of flights whose column is done, before that of an earlier one
        self._num_done = 0

    def advance(self, flight: DirectFlight) -> bool:
        with self._telling_other_hosts():
            return super().advance(flight)

    def contribute(self, flight: DirectFlight) -> None:
        with self._telling_other_hosts():
            super().contribute(flight)

    def start(self, wire: Wire, *, scale: float = 1.0, tag: int = 0) -> DirectFlight:
        flight = super().start(wire, scale=scale, tag=tag)
        now = time.perf_counter()
        flight.span = (now, now)
        return flight

    def land(self, flight: DirectFlight) -> None:
        if flight.has_landed:
            return
        with self._telling_other_hosts():
            self.contribute(flight)
            if flight.column is not None:
                flight.column.land()
            super().land(flight)
        assert flight.span is not None
        flight.span = (flight.span[0], time.perf_counter())

    def fail(self, error: RingError) -> None:
        super().fail(error)
        if self._column is not None:
            self._column.fail(error)

    def close(self) -> None:
        if self._column is not None:
            self._column.close()

    def spread(self, flight: DirectFlight, found: NonFinite | None) -> None:
        """The column is reduced: hand it out, and say so. In the column's lane."""
        wire = flight.wire
        assert isinstance(wire, HierarchicalWire)
        if wire.ring is not None:
            for other in wire.others:
                other.copy_(wire.ring.whole)
        if found is not None:
            found = NonFinite(found.rank, found.element + wire.first)
        self._note(flight, found)
        with self._lock:  # peers count: the n-th "done" is that of the n-th flight
            heapq.heappush(self._early, flight.number)
            while self._early and self._early[0] == self._num_done:
                heapq.heappop(self._early)
                self._num_done += 1
                self._done.announce()

    def _reduce(self, flight: DirectFlight) -> None:
        self._check_tags(flight.tag, flight.record)
        if self._column is None:
            flight.is_reduced = True
            self.spread(flight, None)
            return
        wire = flight.wire
        assert isinstance(wire, HierarchicalWire)
        # 16-bit partial sums travel, so they are scaled before; wider ones after, as in a ring.
        is_narrow = wire.tensor.dtype.itemsize == 2
        within, between = (flight.scale, 1.0) if is_narrow else (1.0, flight.scale)
        culprit: NonFinite | None = None
        for block in wire.blocks:
            if len(block.inputs) > 1 or within != 1.0:
                block.sum.run(within)
            if culprit is None and not is_finite(block.own):
                culprit = self._blame(block, within)
        if culprit is not None:
            culprit = NonFinite(culprit.rank, culprit.element - wire.first)
        flight.is_reduced = True  # as far as this thread is concerned
        flight.column = self._column.start(_ColumnWire(flight, culprit), scale=between, tag=flight.tag)

    def _wire(self, parts: Sequence[torch.Tensor]) -> HierarchicalWire:
        direct = super()._wire(parts)
        start, stop = self._own_slice(parts[0].numel(), parts[0].element_size())
        if self._ring is None:
            return HierarchicalWire(direct.tensor, (), None, 0, ())
        me = self._group.index
        others = tuple(part[start:stop] for i, part in enumerate(parts) if i != me)
        return HierarchicalWire(
            direct.tensor, direct.blocks, self._ring.wire_over(parts[me][start:stop]), start, others
        )

    def _own_slice(self, num_elements: int, element_bytes: int) -> tuple[int, int]:
        if self._ring is None:
            return 0, 0
        return slice_bounds(num_elements, self._columns, element_bytes)[self._group.index]

    @contextlib.contextmanager
    def _telling_other_hosts(self) -> Iterator[None]:
        """What goes wrong on this host stops the rings, whose members know nothing of it."""
        try:
            yield
        except RingError as error:
            self.fail(error)
            raise


class _Column:
    """What happens in a column's lane. See `LaneMover`."""

    algorithm = "hierarchical"

    def __init__(self, mover: HierarchicalAllReduce, ring: RingAllReduce) -> None:
        self._mover = mover
        self._ring = ring
        self.num_lanes = ring.num_lanes

    def open_wires(self, specs: Sequence[tuple[int, torch.dtype]]) -> Sequence[Wire]:
        raise NotImplementedError("columns are cut from the wires of the hierarchical mover")

    def all_reduce(self, wire: Wire, *, scale: float = 1.0, tag: int = 0, lane: int = 0) -> NonFinite | None:
        assert isinstance(wire, _ColumnWire)
        flight = wire.flight
        assert isinstance(flight.wire, HierarchicalWire)
        assert flight.wire.ring is not None
        found = self._ring.reduce_checked(flight.wire.ring, wire.culprit, scale=scale, tag=tag, lane=lane)
        self._mover.spread(flight, found)
        return found

    def fail(self, error: RingError) -> None:
        self._ring.fail(error)

    def close(self) -> None:
        self._ring.close()
