"""Hierarchical all-reduce: within each host through shared memory, between hosts by the engine, column by column.

The buffer is cut into as many columns as the smallest host has ranks. The c-th rank of every host owns column c. The
rank sums the column over its host as in `direct`, has the engine sum it over the owners of the column, and writes the
result to the ranks of its host. So a host of the H hosts sends 2(H-1)/H of a buffer, whatever the number of its ranks:
2 hosts of 2 ranks move 1.0 buffers over each link, a ring of all four ranks 1.5. Ranks beyond the columns send nothing.

      host A                                            host B
      rank 0, column 0:  0+1 --- group of 0 and 2 ---   rank 2, column 0:  2+3
      rank 1, column 1:  0+1 --- group of 1 and 3 ---   rank 3, column 1:  2+3

One thread sums columns over the host and hands them to the engine, another one waits for the engine and writes results.
So the network is busy while the next bucket is summed.

All ranks hold the same bits: the engine leaves the same bits on the owners, and each owner copies them to its host.
16-bit wires are summed in fp32 on the host, and rounded once after each sum.
"""

import time
from collections.abc import Callable, Sequence
from typing import Final

import torch

from torchring.allreduce.native import NativeWork, check_dtypes
from torchring.allreduce.slices import ABORTED, ALIGNMENT_BYTES, SharedBuckets, SharedWire
from torchring.allreduce.threaded import WorkOnThread
from torchring.errors import FirstFailure, RingError
from torchring.memory.host import HostGroup
from torchring.threads import SerialThread
from torchring.transport.c10d import open_transport
from torchring.transport.contract import Transport
from torchring.world import World

# A rank of another host that keeps a column waiting is named by the owners of that column. Ranks of this host that wait
# for the column wait for so much longer, to hear of that name.
GRACE_SECONDS: Final = 5.0
_AT_ONCE_SECONDS: Final = 100e-6


def num_columns(hosts: Sequence[Sequence[int]]) -> int:
    """The number of ranks of the smallest host."""
    return min(map(len, hosts))


def column_ranks(hosts: Sequence[Sequence[int]], rank: int) -> tuple[int, ...] | None:
    """The owners of the column of `rank`, one of each host; None beyond the columns.

    Example: hosts (0, 1), (2, 3), (4,): ranks 0, 2, 4 make the only column, ranks 1 and 3 have none.
    """
    place = next(host.index(rank) for host in hosts if rank in host)
    return tuple(host[place] for host in hosts) if place < num_columns(hosts) else None


class HierarchicalWork:
    """One bucket: threads do this rank's part, and the parts of peers are waited for. See `BucketWork`."""

    def __init__(self, all_reduce: "HierarchicalAllReduce", wire: SharedWire, *, is_aborted: bool = False) -> None:
        self.span: tuple[float, float] | None = None
        self._all_reduce = all_reduce
        self._wire = wire
        self._is_aborted = is_aborted
        self._sum: NativeWork | None = None
        self._is_over = False
        self._number = all_reduce.host.begin(ABORTED if is_aborted else wire.index)
        all_reduce.host.packed.announce()
        self._begun = WorkOnThread(all_reduce.summing, self._begin, all_reduce.failure, all_reduce.fail)
        self._part = WorkOnThread(all_reduce.ending, self._end, all_reduce.failure, all_reduce.fail)
        all_reduce.host.pending.append(self)

    def advance(self, *, waits: bool = False) -> bool:
        """This rank's part is done, or threads do it."""
        return True

    def wait(self) -> None:
        if not self._is_over:
            host = self._all_reduce.host
            assert self is host.pending[0], "buckets end in the order in which they were started"
            try:
                self._part.wait()
                asked_at = time.perf_counter()
                host.done.gather()
            except RingError as error:
                self._all_reduce.fail(error)
                raise
            host.pending.popleft()
            self._is_over = True
            now = time.perf_counter()
            if self._begun.span is not None and self._part.span is not None:
                # Peers were done before, unless this rank has waited for them.
                ended = self._part.span[1] if now - asked_at < _AT_ONCE_SECONDS else now
                self.span = self._begun.span[0], ended

    def _begin(self) -> None:
        """When all ranks have packed: sum this rank's column over the host, and hand it to the engine."""
        host, wire, transport = self._all_reduce.host, self._wire, self._all_reduce.transport
        host.packed.gather()
        host.check(self._number)
        if transport is None:
            return
        if not self._is_aborted:  # else it keeps what it has packed
            host.sum(wire, spread=False)
        self._sum = NativeWork(wire.own, transport, is_aborted=self._is_aborted)

    def _end(self) -> None:
        """When the engine has summed the column: write it to the ranks of this host."""
        self._begun.wait()
        if self._sum is not None:
            self._sum.wait()
            if not self._is_aborted:
                for other in self._wire.others:
                    other.copy_(self._wire.own)
        self._all_reduce.host.done.announce()


class HierarchicalAllReduce:
    """All-reduce in shared memory and between hosts, opened by all ranks of the world together. See `AllReduce`.

    Args:
        group: the ranks of this host.
        columns: number of columns. The ranks whose position in the group is less have a column each.
        transport: to the other owners of this rank's column. None if it has none.
        alignment_bytes: of columns.
    """

    algorithm = "hierarchical"
    in_background = True

    def __init__(
        self, group: HostGroup, columns: int, transport: Transport | None, alignment_bytes: int = ALIGNMENT_BYTES
    ) -> None:
        self.transport = transport
        # Nobody polls: between hosts waits are long, and the threads want the core.
        self.host = SharedBuckets(group, columns, grace_seconds=GRACE_SECONDS, alignment_bytes=alignment_bytes)
        # Threads that run this rank's parts
        self.summing, self.ending = SerialThread("torchring-sums"), SerialThread("torchring-ends")
        self.failure = FirstFailure()  # the first failure of any bucket. Later buckets raise it.
        self._group = group

    def open_wires(self, specs: Sequence[tuple[int, torch.dtype]]) -> list[SharedWire]:
        if self.transport is not None:
            check_dtypes(self.transport, specs)
        return self.host.open_wires(specs)

    def start(self, wire: SharedWire) -> HierarchicalWork:
        return HierarchicalWork(self, wire)

    def abort_bucket(self, wire: SharedWire) -> HierarchicalWork:
        return HierarchicalWork(self, wire, is_aborted=True)

    def fail(self, error: RingError) -> None:
        """Tell the ranks of this host, and the owners of the column: neither know of the others."""
        if self.failure.set(error):
            self._group.report_failure(error)
            if self.transport is not None:
                self.transport.fail(error)

    def close(self) -> None:
        for thread in (self.summing, self.ending):
            thread.close()
        if self.transport is not None:
            self.transport.close()


def open_hierarchical(
    world: World,
    opens: Callable[[World, Sequence[int]], Transport] = open_transport,
    alignment_bytes: int = ALIGNMENT_BYTES,
) -> HierarchicalAllReduce:
    """Collective: an all-reduce in the world's hosts and between them, with a transport of its own.

    `opens`: as `open_transport`. `alignment_bytes`: of columns.
    """
    assert world.host is not None
    ranks = column_ranks(world.hosts, world.rank)
    transport = opens(world, ranks or (world.rank,))
    if ranks is None:  # transports are opened by all ranks together
        transport.close()
    return HierarchicalAllReduce(
        world.host, num_columns(world.hosts), transport if ranks else None, alignment_bytes=alignment_bytes
    )
