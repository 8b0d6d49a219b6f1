"""What the ranks of one host share: the buffers, of which each rank sums a slice, and a record of each bucket.

Rank r sums slice r of all buffers, in blocks that fit a cache. The record says which bucket it is.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from torchring.allreduce.contract import MAX_PENDING, aborted
from torchring.kernels import reference
from torchring.memory.host import HostGroup, as_words

BLOCK_BYTES: Final = 256 * 1024
ALIGNMENT_BYTES: Final = 64
ABORTED: Final = -1  # in place of the wire's index: the rank has aborted the reduction


def slice_bounds(num_elements: int, num_ranks: int, element_bytes: int) -> list[tuple[int, int]]:
    """The [start, stop) of each rank's slice: equal to within a cache line, together exactly [0, num_elements).

    Example: 100 fp32 elements, 3 ranks -> [(0, 48), (48, 96), (96, 100)]: 16 elements to the 64-byte line.
    """
    line = max(1, ALIGNMENT_BYTES // element_bytes)
    share = math.ceil(math.ceil(num_elements / num_ranks) / line) * line
    starts = [min(rank * share, num_elements) for rank in range(num_ranks + 1)]
    return list(itertools.pairwise(starts))


@dataclass(frozen=True)
class Block:
    """A piece of this rank's slice that fits a cache."""

    start: int  # element index in the buffer
    inputs: list[torch.Tensor]  # in rank order
    own: torch.Tensor  # this rank's input, and where the sum is formed
    sum: reference.Accumulation  # of inputs into own
    others: list[torch.Tensor]  # the peers' buffers, if the result is written there, too


@dataclass(frozen=True)
class SharedWire:
    """A buffer in shared memory, with all views that an all-reduce needs, made once.

    Attributes:
        blocks: of this rank's slice.
        index: among all wires of the all-reduce.
        deferred: by block, what writes this rank's input to `out` just before the next sum, in cache. No other rank
            reads it.
    """

    tensor: torch.Tensor
    blocks: tuple[Block, ...]
    index: int
    deferred: dict[int, Callable[..., object]] = field(default_factory=dict)

    def blocks_within(self, begin: int, end: int) -> tuple[int, int, int, int] | None:
        """The number of the first block in [begin, end), where these blocks begin and end, and elements to a block."""
        inside = [i for i, each in enumerate(self.blocks) if begin <= each.start and each.start + len(each.own) <= end]
        if not inside:
            return None
        first, last = self.blocks[inside[0]], self.blocks[inside[-1]]
        return inside[0], first.start, last.start + len(last.own), len(first.own)


class Slices:
    """The slices of one host's buffers.

    Args:
        group: the ranks of the host.
        count: number of slices that a buffer is cut into. The r-th rank has the r-th slice; the ranks beyond have none.
    """

    def __init__(self, group: HostGroup, count: int) -> None:
        self._group = group
        self._count = count
        self._scratch: dict[torch.dtype, torch.Tensor] = {}
        self._num_wires = 0

    def allocate(self, specs: Sequence[tuple[int, torch.dtype]]) -> list[list[torch.Tensor]]:
        """Collective: for each (elements, dtype) the buffers of all ranks, zeroed, in rank order."""
        lengths = [_aligned(numel * dtype.itemsize) for numel, dtype in specs]
        shared = self._group.allocate(sum(lengths))
        buffers, start = [], 0
        for (numel, dtype), length in zip(specs, lengths, strict=True):
            buffers.append([part[start : start + numel * dtype.itemsize].view(dtype) for part in shared.parts])
            start += length
        return buffers

    def bounds(self, buffer: torch.Tensor) -> tuple[int, int]:
        """This rank's slice."""
        if self._group.index >= self._count:
            return 0, 0
        return slice_bounds(buffer.numel(), self._count, buffer.element_size())[self._group.index]

    def wire(self, parts: Sequence[torch.Tensor]) -> SharedWire:
        """The wire of this rank, given the buffers of all ranks in rank order."""
        me, dtype = self._group.index, parts[0].dtype
        if dtype not in self._scratch:
            wide = reference.compute_dtype(dtype, dtype)
            self._scratch[dtype] = torch.empty(BLOCK_BYTES // dtype.itemsize, dtype=wide, device="cpu")
        scratch = self._scratch[dtype]
        start, stop = self.bounds(parts[0])
        step = BLOCK_BYTES // dtype.itemsize
        blocks = []
        for first in range(start, stop, step):
            inputs = [part[first : min(first + step, stop)] for part in parts]
            others = [view for rank, view in enumerate(inputs) if rank != me]
            accumulation = reference.Accumulation(inputs, inputs[me], scratch)
            blocks.append(Block(first, inputs, inputs[me], accumulation, others))
        self._num_wires += 1
        return SharedWire(parts[me].data, tuple(blocks), self._num_wires - 1)

    def sum(self, wire: SharedWire, *, spread: bool) -> None:
        """Replace this rank's slice by the sum over the host; with `spread`, in the peers' buffers, too.

        Only one call at a time: calls share scratch memory.
        """
        for number, block in enumerate(wire.blocks):
            if (pack := wire.deferred.get(number)) is not None:
                pack(out=block.own)
            if len(block.inputs) > 1:
                block.sum.run()
            if spread:
                for other in block.others:
                    other.copy_(block.own)
        wire.deferred.clear()


class BucketRecords:
    """A word per rank and bucket, in shared memory: the index of the wire.

    The n-th bucket and the (n + MAX_PENDING)-th use the same record. A rank starts the later bucket when the
    earlier one has ended on it, and then no peer needs the record any more.
    """

    def __init__(self, group: HostGroup) -> None:
        self._group = group
        self._block = group.allocate(MAX_PENDING * 8)
        self._records = [as_words(part) for part in self._block.parts]
        self._own = self._records[group.index]
        self._num_begun = 0

    def begin(self, index: int) -> int:
        """Say which bucket this rank reduces next, before "packed" is announced. Returns the number of its record."""
        number = self._num_begun
        self._own[number % MAX_PENDING] = index
        self._num_begun += 1
        return number

    def check(self, number: int) -> None:
        """Raise PlanMismatchError, here and on the peers, if ranks reduce different buckets.

        Buckets leave in order: a rank that is back at an earlier one has begun another reduction.
        """
        group = self._group
        indices = [record[number % MAX_PENDING] for record in self._records]
        if min(indices) != max(indices):
            error = aborted(group.rank, group.ranks[indices.index(min(indices))])
            group.report_failure(error)
            raise error


def _aligned(num_bytes: int) -> int:
    return math.ceil(num_bytes / ALIGNMENT_BYTES) * ALIGNMENT_BYTES
