"""What the ranks of one host share: the buffers, of which each rank sums a slice, a record of each bucket, and signals.

Rank r sums slice r of all buffers, in blocks that fit a cache. The record says which bucket it is.
"""

import itertools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from torchring.allreduce.contract import MAX_PENDING, BucketWork, aborted
from torchring.kernels import reference
from torchring.memory.channel import Channel
from torchring.memory.host import HostGroup, as_words

BLOCK_BYTES: Final = 256 * 1024
ALIGNMENT_BYTES: Final = 64
ABORTED: Final = -1  # in place of the wire's index: the rank has aborted the reduction


def slice_bounds(
    num_elements: int, num_ranks: int, element_bytes: int, alignment_bytes: int = ALIGNMENT_BYTES
) -> list[tuple[int, int]]:
    """The [start, stop) of each rank's slice: equal to within a cache line, together exactly [0, num_elements).

    Example: 100 fp32 elements, 3 ranks -> [(0, 48), (48, 96), (96, 100)]: 16 elements to the 64-byte line.
    """
    line = max(1, alignment_bytes // element_bytes)
    share = math.ceil(math.ceil(num_elements / num_ranks) / line) * line
    starts = [min(rank * share, num_elements) for rank in range(num_ranks + 1)]
    return list(itertools.pairwise(starts))


@dataclass(frozen=True)
class Block:
    """A piece of this rank's slice that fits a cache."""

    start: int  # element index in the buffer
    own: torch.Tensor  # this rank's input, and where the sum is formed
    others: list[torch.Tensor]  # the same piece of the peers' buffers
    sum: reference.Accumulation  # of all inputs, in rank order, into own


@dataclass(frozen=True)
class SharedWire:
    """A buffer in shared memory, with all views that an all-reduce needs, made once."""

    tensor: torch.Tensor
    own: torch.Tensor  # this rank's slice. Empty if it has none.
    others: list[torch.Tensor]  # the same slice of the peers' buffers
    blocks: tuple[Block, ...]  # of this rank's slice
    index: int  # among all wires of the all-reduce
    # By block, what is packed just before the next sum, in cache, as no other rank reads it: a tensor, its factor and
    # its version
    deferred: dict[int, tuple[torch.Tensor, float, int]] = field(default_factory=dict)
    # blocks of the last sum whose tensor had another version by then
    overwritten: list[int] = field(default_factory=list)

    def blocks_within(self, begin: int, end: int) -> tuple[int, int, int, int] | None:
        """The number of the first block in [begin, end), where these blocks begin and end, and elements to a block."""
        inside = [i for i, each in enumerate(self.blocks) if begin <= each.start and each.start + len(each.own) <= end]
        if not inside:
            return None
        first, last = self.blocks[inside[0]], self.blocks[inside[-1]]
        return inside[0], first.start, last.start + len(last.own), len(first.own)


class SharedBuckets:
    """The buckets of one all-reduce, as the ranks of a host share them. Opening it is collective.

    A bucket has a record, a word of each rank: the index of the wire. The n-th bucket and the (n + MAX_PENDING)-th use
    the same record. A rank starts the later bucket when the earlier one has ended on it, and then no peer needs the
    record any more.

    Args:
        group: the ranks of the host.
        num_slices: that a buffer is cut into. The r-th rank has the r-th slice; the ranks beyond have none.
        poll_seconds: see `Channel`.
        grace_seconds: of `done`; see `HostGroup.wait_until`.
        alignment_bytes: of slices.
    """

    def __init__(
        self,
        group: HostGroup,
        num_slices: int,
        *,
        poll_seconds: float = 0.0,
        grace_seconds: float = 0.0,
        alignment_bytes: int = ALIGNMENT_BYTES,
    ) -> None:
        self.packed = Channel(group, poll_seconds=poll_seconds)
        self.done = Channel(group, poll_seconds=poll_seconds, grace_seconds=grace_seconds)
        self.pending: deque[BucketWork] = deque()  # what was started and is not yet over, the oldest first
        self._group = group
        self._num_slices = num_slices
        self._alignment_bytes = alignment_bytes
        self._scratch: dict[torch.dtype, torch.Tensor] = {}
        self._num_wires = 0
        self._records = [as_words(part) for part in group.allocate(MAX_PENDING * 8).parts]
        self._num_begun = 0

    def open_wires(self, specs: Sequence[tuple[int, torch.dtype]]) -> list[SharedWire]:
        """Collective: for each (elements, dtype) a buffer, zeroed."""
        lengths = [math.ceil(numel * dtype.itemsize / ALIGNMENT_BYTES) * ALIGNMENT_BYTES for numel, dtype in specs]
        shared = self._group.allocate(sum(lengths))
        wires, start = [], 0
        for (numel, dtype), length in zip(specs, lengths, strict=True):
            wires.append(
                self._wire([part[start : start + numel * dtype.itemsize].view(dtype) for part in shared.parts])
            )
            start += length
        return wires

    def _wire(self, parts: Sequence[torch.Tensor]) -> SharedWire:
        """The wire of this rank, given the buffers of all ranks in rank order."""
        me, dtype, numel = self._group.index, parts[0].dtype, parts[0].numel()
        if dtype not in self._scratch:
            wide = reference.compute_dtype(dtype, dtype)
            self._scratch[dtype] = torch.empty(BLOCK_BYTES // dtype.itemsize, dtype=wide, device="cpu")
        bounds = slice_bounds(numel, self._num_slices, dtype.itemsize, self._alignment_bytes)
        start, stop = bounds[me] if me < self._num_slices else (0, 0)
        step = BLOCK_BYTES // dtype.itemsize
        blocks = []
        for first in range(start, stop, step):
            inputs = [part[first : min(first + step, stop)] for part in parts]
            others = [view for rank, view in enumerate(inputs) if rank != me]
            accumulation = reference.Accumulation(inputs, inputs[me], self._scratch[dtype])
            blocks.append(Block(first, inputs[me], others, accumulation))
        self._num_wires += 1
        others = [part[start:stop] for rank, part in enumerate(parts) if rank != me]
        return SharedWire(parts[me].data, parts[me][start:stop], others, tuple(blocks), self._num_wires - 1)

    def begin(self, index: int) -> int:
        """Say which bucket, or ABORTED, is next, before "packed" is announced. Returns the number of its record."""
        if len(self.pending) == MAX_PENDING:
            self.pending[0].wait()
        number = self._num_begun
        self._records[self._group.index][number % MAX_PENDING] = index
        self._num_begun += 1
        return number

    def check(self, number: int) -> None:
        """Raise PlanMismatchError, here and on the peers, if ranks reduce different buckets. After "packed" of all.

        Buckets leave in order: a rank that is back at an earlier one has begun another reduction.
        """
        group = self._group
        indices = [record[number % MAX_PENDING] for record in self._records]
        if min(indices) != max(indices):
            error = aborted(group.rank, group.ranks[indices.index(min(indices))])
            group.report_failure(error)
            raise error

    def sum(self, wire: SharedWire, *, spread: bool) -> None:
        """Replace this rank's slice by the sum over the host; with `spread`, in the peers' buffers, too.

        Only one call at a time: calls share scratch memory.
        """
        for number, block in enumerate(wire.blocks):
            if (deferred := wire.deferred.get(number)) is not None:
                tensor, factor, version = deferred
                torch.mul(tensor, factor, out=block.own)
                if tensor._version != version:
                    wire.overwritten.append(number)
            if block.others:
                block.sum.run()
            if spread:
                for other in block.others:
                    other.copy_(block.own)
        wire.deferred.clear()
