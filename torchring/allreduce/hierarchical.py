"""Hierarchical all-reduce: within each host through shared memory, between hosts in rings, one ring for each column.

The buffer is cut into as many columns as the smallest host has ranks. The c-th rank of every host owns column c. The
rank sums the column over its host as in `direct`, reduces the sum with the other owners of the column in a ring, and
writes the result to the ranks of its host. So a host of the H hosts sends 2(H-1)/H of a buffer, whatever the number of
its ranks: 2 hosts of 2 ranks move 1.0 buffers over each link, a ring of all four ranks 1.5. Ranks beyond the columns
send nothing.

      host A                                           host B
      rank 0, column 0:  0+1 --- ring of 0 and 2 ---   rank 2, column 0:  2+3
      rank 1, column 1:  0+1 --- ring of 1 and 3 ---   rank 3, column 1:  2+3

All ranks hold the same bits: a ring leaves the same bits on its members, and each member copies them to its host.
16-bit wires are summed in fp32 on the host and at every hop, and rounded once after each sum.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from torchring.allreduce.contract import NonFinite
from torchring.allreduce.records import MAX_PENDING, ReductionRecords
from torchring.allreduce.ring import RingAllReduce, RingWire
from torchring.allreduce.slices import SharedWire, Slices
from torchring.allreduce.threaded import Lanes
from torchring.errors import RingError
from torchring.memory.channel import Channel
from torchring.memory.host import HostGroup

# A rank of another host that keeps a column waiting is named by the ring of that column. Ranks of this host that wait
# for the column wait for so much longer, to hear of that name.
_GRACE_SECONDS: Final = 5.0
_LOOK_SECONDS: Final = 0.1  # how often a lane that waits for its turn looks whether another lane has failed
_AT_ONCE_SECONDS: Final = 100e-6


def num_columns(hosts: Sequence[Sequence[int]]) -> int:
    """The number of ranks of the smallest host."""
    return min(map(len, hosts))


def column_members(hosts: Sequence[Sequence[int]], rank: int) -> tuple[int, ...] | None:
    """The ranks of the ring that `rank` is in, one of each host; None beyond the columns.

    Example: hosts (0, 1), (2, 3), (4,): ranks 0, 2, 4 make the only column, ranks 1 and 3 have none.
    """
    place = next(members.index(rank) for members in hosts if rank in members)
    return tuple(members[place] for members in hosts) if place < num_columns(hosts) else None


@dataclass(frozen=True)
class HierarchicalWire:
    """A buffer in shared memory.

    Attributes:
        first: index of the first element of this rank's column.
        column: this rank's column; None if this rank has none.
        others: the same column in the peers' buffers.
    """

    shared: SharedWire
    first: int
    column: RingWire | None
    others: tuple[torch.Tensor, ...]

    @property
    def tensor(self) -> torch.Tensor:
        return self.shared.tensor


@dataclass
class _Host:
    """Shared by all reductions of one `HierarchicalAllReduce`.

    Attributes:
        group: the ranks of this host.
        ring: the ring of this rank's column; None if this rank has no column.
        lanes: threads that run this rank's parts.
        packed, done: the two signals.
        records, slices: what the ranks of the host share.
        pending: started and not yet over, the oldest first.
        turns: held while a column is summed over the host.
        num_summed: number of columns that have been summed over the host.
        finishing: held while "done" is announced.
        num_done: number of reductions whose "done" this rank has announced.
        early: later reductions whose part is done already.
    """

    group: HostGroup
    ring: RingAllReduce | None
    lanes: Lanes
    packed: Channel
    done: Channel
    records: ReductionRecords
    slices: Slices
    pending: deque[PendingHierarchical] = field(default_factory=deque)
    turns: threading.Condition = field(default_factory=threading.Condition)
    num_summed: int = 0
    finishing: threading.Lock = field(default_factory=threading.Lock)
    num_done: int = 0
    early: set[int] = field(default_factory=set)

    def announce_done(self, number: int) -> None:
        """Peers count signals: the n-th "done" is that of the n-th reduction, though lanes may end in another order."""
        with self.finishing:
            self.early.add(number)
            while self.num_done in self.early:
                self.early.remove(self.num_done)
                self.num_done += 1
                self.done.announce()

    def fail(self, error: RingError) -> None:
        """Tell the ranks of this host, and those of the ring: neither know of the others."""
        if self.lanes.failure.set(error):
            self.group.report_failure(error)
            if self.ring is not None:
                self.ring.fail(error)


class PendingHierarchical:
    """One reduction: this rank's part runs in a lane, the parts of peers are waited for. See `PendingReduction`."""

    def __init__(self, host: _Host, wire: HierarchicalWire, scale: float, tag: int) -> None:
        self.span: tuple[float, float] | None = None
        self._host = host
        self._is_over = False
        self._result: NonFinite | None = None
        self._number = host.records.begin(tag)
        host.packed.announce()
        self._part = host.lanes.start(lambda lane: self._reduce(wire, scale, tag, lane))
        host.pending.append(self)

    def advance(self) -> bool:
        return True

    def contribute(self) -> None:
        """Nothing to do: this rank's part is done, or a lane does it."""

    def wait(self) -> NonFinite | None:
        if not self._is_over:
            host = self._host
            assert self is host.pending[0], "reductions end in the order in which they were started"
            try:
                self._part.wait()
                asked_at = time.perf_counter()
                host.done.gather()
            except RingError as error:
                host.fail(error)
                raise
            host.pending.popleft()
            self._is_over = True
            self._result = host.records.read(self._number)
            now = time.perf_counter()
            if (span := self._part.span) is not None:  # peers were done before, unless this rank has waited for them
                self.span = span if now - asked_at < _AT_ONCE_SECONDS else (span[0], now)
        return self._result

    def _reduce(self, wire: HierarchicalWire, scale: float, tag: int, lane: int) -> NonFinite | None:
        """This rank's part, in a lane."""
        host, column = self._host, wire.column
        # 16-bit partial sums travel, so they are scaled before the ring; wider sums after, as in a ring.
        is_narrow = wire.tensor.dtype.itemsize == 2
        within, between = (scale, 1.0) if is_narrow else (1.0, scale)
        found: NonFinite | None = None
        try:
            culprit = self._sum_on_host(wire, within, tag)
            if column is not None:
                assert host.ring is not None
                found = host.ring.reduce_checked(column, culprit, scale=between, tag=tag, lane=lane)
                for other in wire.others:
                    other.copy_(column.whole)
        except RingError as error:
            host.fail(error)
            raise
        if found is not None:
            found = NonFinite(found.rank, found.element + wire.first)
        host.records.write(self._number, found)
        host.announce_done(self._number)
        return found

    def _sum_on_host(self, wire: HierarchicalWire, scale: float, tag: int) -> NonFinite | None:
        """Sum this rank's column over its host, when all ranks have packed. Lanes take turns: they share the buffers
        that a sum needs."""
        host = self._host
        with host.turns:
            while host.num_summed != self._number:
                host.lanes.failure.raise_if_set()
                host.turns.wait(_LOOK_SECONDS)
            host.packed.gather()
            host.records.check_tags(self._number, tag)
            culprit = host.slices.sum(wire.shared, scale, spread=False)
            host.num_summed += 1
            host.turns.notify_all()
        return None if culprit is None else NonFinite(culprit.rank, culprit.element - wire.first)


class HierarchicalAllReduce:
    """All-reduce in shared memory and in rings, opened by all ranks of the world together. See `AllReduce`.

    Args:
        group: the ranks of this host.
        columns: number of columns. The ranks whose position in the group is less have a column each.
        ring: of this rank's column, None if it has none.
        in_background: whether reductions go on after `start` has returned. If not, `start` does this rank's part.
    """

    algorithm = "hierarchical"

    def __init__(
        self, group: HostGroup, columns: int, ring: RingAllReduce | None, *, in_background: bool = True
    ) -> None:
        self.in_background = in_background
        # Nobody polls: between hosts waits are long, and lanes want the core. If `start` does this rank's part,
        # peers that have not packed may themselves be waiting for other hosts.
        self._host = _Host(
            group,
            ring,
            Lanes(1 if ring is None else ring.num_lanes, in_background=in_background),
            packed=Channel(group, poll_seconds=0.0, grace_seconds=0.0 if in_background else _GRACE_SECONDS),
            done=Channel(group, poll_seconds=0.0, grace_seconds=_GRACE_SECONDS),
            records=ReductionRecords(group),
            slices=Slices(group, columns),
        )

    def open_wires(self, specs: Sequence[tuple[int, torch.dtype]]) -> list[HierarchicalWire]:
        return [self._wire(parts) for parts in self._host.slices.allocate(specs)]

    def start(self, wire: HierarchicalWire, *, scale: float = 1.0, tag: int = 0) -> PendingHierarchical:
        if len(self._host.pending) == MAX_PENDING:
            self._host.pending[0].wait()
        return PendingHierarchical(self._host, wire, scale, tag)

    def fail(self, error: RingError) -> None:
        self._host.fail(error)

    def close(self) -> None:
        self._host.lanes.close()
        if self._host.ring is not None:
            self._host.ring.close()

    def _wire(self, parts: Sequence[torch.Tensor]) -> HierarchicalWire:
        host = self._host
        shared, (start, stop) = host.slices.wire(parts), host.slices.bounds(parts[0])
        if host.ring is None:
            return HierarchicalWire(shared, 0, None, ())
        me = host.group.index
        others = tuple(part[start:stop] for i, part in enumerate(parts) if i != me)
        return HierarchicalWire(shared, start, host.ring.wire_over(parts[me][start:stop]), others)
