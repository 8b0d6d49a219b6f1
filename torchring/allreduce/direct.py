"""Direct all-reduce: every rank reduces one slice of the buffer, straight in its peers' memory.

Rank r owns slice r of everybody's buffer between two signals: it reads the N inputs of that slice, adds them in rank
order, scales, and writes the result to all N buffers. Two signals, no copy, each input read once.

      rank 0                                         rank 1
      says "packed", goes on with backward           ...
      ...                                            says "packed", finds that rank 0 has said so:
      looks in, finds that rank 1 has said so:       slice 1 of both buffers summed and written to both,
      slice 0 of both buffers summed and written     says "done", goes on with backward
      to both, says "done"                           ...
      at the end of backward: both wait for each other's "done"

Work goes in blocks that fit the L2 cache, so that the sum is still there when it is scaled, checked and spread (64 MiB,
2 ranks: 4.1 ms in 256 KiB blocks, 7.1 ms in one piece). Because every element is summed in rank order, the result does
not depend on how parameters are laid out in buckets.

Example: 2 ranks, inputs [1, 2, 3, 4] and [10, 20, 30, 40], scale 0.5 -> [5.5, 11, 16.5, 22] on both; rank 0 computes
the first 2 elements and rank 1 the rest (in truth slices are multiples of 64 bytes).
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from torchring.allreduce.mover import Flight, NonFinite, Wire, first_non_finite, is_finite, tag_mismatch
from torchring.errors import RingError
from torchring.kernels import reference
from torchring.memory.channel import Channel
from torchring.memory.host import HostGroup, as_words

BLOCK_BYTES: Final = 256 * 1024
ALIGNMENT_BYTES: Final = 64
MAX_IN_FLIGHT: Final = 512
_NOBODY: Final = -1  # in a note: the sum overflowed, no input is to blame


def slice_bounds(num_elements: int, num_ranks: int, element_bytes: int) -> list[tuple[int, int]]:
    """The [start, stop) of each rank's slice: equal to within a cache line, together exactly [0, num_elements).

    Example: 100 fp32 elements, 3 ranks -> [(0, 48), (48, 96), (96, 100)]: 16 elements to the 64-byte line.
    """
    line = max(1, ALIGNMENT_BYTES // element_bytes)
    share = math.ceil(math.ceil(num_elements / num_ranks) / line) * line
    starts = [min(rank * share, num_elements) for rank in range(num_ranks + 1)]
    return list(itertools.pairwise(starts))


@dataclass(frozen=True)
class _Block:
    """One cache-sized piece of this rank's slice."""

    start: int  # element index in the buffer
    inputs: list[torch.Tensor]  # in rank order
    own: torch.Tensor  # this rank's input, and where the sum is formed
    sum: reference.Accumulation  # of inputs into own
    others: list[torch.Tensor]  # where the result is spread


@dataclass(frozen=True)
class DirectWire:
    """A buffer in shared memory, with the views that reducing it takes, made once."""

    tensor: torch.Tensor
    blocks: tuple[_Block, ...]


class DirectFlight:
    """One reduction from "packed" to everybody's "done". See `Flight`."""

    __slots__ = (
        "_mover",
        "column",
        "has_landed",
        "is_gathered",
        "is_reduced",
        "number",
        "record",
        "result",
        "scale",
        "span",
        "tag",
        "wire",
    )

    def __init__(self, mover: DirectAllReduce, number: int, wire: DirectWire, scale: float, tag: int) -> None:
        self._mover = mover
        self.number = number
        self.record = number % MAX_IN_FLIGHT * 3  # where its record begins in the notes, in words
        self.wire = wire
        self.scale = scale
        self.tag = tag
        self.is_gathered = False  # all ranks have packed
        self.is_reduced = False  # this rank's slice
        self.has_landed = False
        self.result: NonFinite | None = None
        self.column: Flight | None = None  # where part of it crosses the network; see `hierarchical.py`
        self.span: tuple[float, float] | None = None

    def advance(self) -> bool:
        return self.is_reduced or self._mover.advance(self)

    def contribute(self) -> None:
        self._mover.contribute(self)

    def land(self) -> NonFinite | None:
        self._mover.land(self)
        return self.result


class DirectAllReduce:
    """Mover over shared memory; all ranks of `group` open it together. See `StagedMover`, and `LaneMover`: of one lane.

    Args:
        group: the ranks of this host.
        poll_seconds, grace_seconds: see `Channel`; the latter for the wait for results.
    """

    algorithm = "direct"
    in_background = False
    num_lanes = 1

    def __init__(self, group: HostGroup, *, poll_seconds: float, grace_seconds: float = 0.0) -> None:
        self._group = group
        self._packed = Channel(group, poll_seconds=poll_seconds)
        self._done = Channel(group, poll_seconds=poll_seconds, grace_seconds=grace_seconds)
        # A record per rank and flight: the tag; 1 + the rank that a non-finite value came from (0: none), its element.
        # A rank starts a flight when it has landed the one that had the same record, which no peer needs by then.
        notes = group.allocate(MAX_IN_FLIGHT * 24)
        self._notes = [as_words(part) for part in notes.parts]
        self._scratch: dict[torch.dtype, torch.Tensor] = {}
        self._num_started = self._num_gathered = 0  # flights
        self._in_flight: deque[DirectFlight] = deque()
        self._failure: RingError | None = None

    def open_wires(self, specs: Sequence[tuple[int, torch.dtype]]) -> list[DirectWire]:
        lengths = [_aligned(numel * dtype.itemsize) for numel, dtype in specs]
        shared = self._group.allocate(sum(lengths))
        wires, start = [], 0
        for (numel, dtype), length in zip(specs, lengths, strict=True):
            parts = [part[start : start + numel * dtype.itemsize].view(dtype) for part in shared.parts]
            wires.append(self._wire(parts))
            start += length
        return wires

    def all_reduce(self, wire: Wire, *, scale: float = 1.0, tag: int = 0, lane: int = 0) -> NonFinite | None:
        return self.start(wire, scale=scale, tag=tag).land()

    def start(self, wire: Wire, *, scale: float = 1.0, tag: int = 0) -> DirectFlight:
        assert isinstance(wire, DirectWire)
        if self._failure is not None:
            raise self._failure
        if len(self._in_flight) == MAX_IN_FLIGHT:
            self.land(self._in_flight[0])
        flight = DirectFlight(self, self._num_started, wire, scale, tag)
        self._num_started += 1
        self._notes[self._group.index][flight.record] = tag
        self._in_flight.append(flight)
        self._packed.announce()
        return flight

    def advance(self, flight: DirectFlight) -> bool:
        """Reduce this rank's slice if all inputs are packed."""
        if not flight.is_gathered:
            assert flight.number == self._num_gathered, "flights advance in the order in which they were started"
            if not self._packed.has_gathered():
                return False
            self._set_gathered(flight)
        self._reduce(flight)
        return True

    def contribute(self, flight: DirectFlight) -> None:
        """Wait until all inputs are packed, and reduce this rank's slice."""
        if not flight.is_gathered:
            assert flight.number == self._num_gathered, "flights advance in the order in which they were started"
            self._packed.gather()
            self._set_gathered(flight)
        if not flight.is_reduced:
            self._reduce(flight)

    def land(self, flight: DirectFlight) -> None:
        """Wait until all slices are written."""
        if flight.has_landed:
            return
        assert flight is self._in_flight[0], "flights land in the order in which they were started"
        self.contribute(flight)
        self._done.gather()
        self._in_flight.popleft()
        flight.has_landed = True
        record = flight.record
        for note in self._notes:
            if note[record + 1]:
                rank = None if note[record + 1] == _NOBODY else note[record + 1] - 1
                flight.result = NonFinite(rank, note[record + 2])
                break

    def _set_gathered(self, flight: DirectFlight) -> None:
        flight.is_gathered = True
        self._num_gathered += 1

    def _reduce(self, flight: DirectFlight) -> None:
        self._check_tags(flight.tag, flight.record)
        found: NonFinite | None = None
        for block in flight.wire.blocks:
            block.sum.run(flight.scale)
            # A sum over the block while it is in cache costs 3%; torch.isfinite would triple the whole reduction.
            if found is None and not is_finite(block.own):
                found = self._blame(block, flight.scale)
            for other in block.others:
                other.copy_(block.own)
        flight.is_reduced = True
        self._note(flight, found)
        self._done.announce()

    def _note(self, flight: DirectFlight, found: NonFinite | None) -> None:
        """For everybody, what there was in this rank's slice; before its "done"."""
        own_note, record = self._notes[self._group.index], flight.record
        own_note[record + 1] = 0 if found is None else _NOBODY if found.rank is None else found.rank + 1
        own_note[record + 2] = 0 if found is None else found.element

    def _check_tags(self, tag: int, record: int) -> None:
        group = self._group
        for rank, note in zip(group.ranks, self._notes, strict=True):
            if note[record] != tag:
                error = tag_mismatch(group.rank, tag, rank, note[record])
                group.report_failure(error)
                raise error

    def fail(self, error: RingError) -> None:
        self._failure = self._failure or error
        self._group.report_failure(error)

    def close(self) -> None:
        """Nothing to do: the memory goes when the last tensor that views it does."""

    def _wire(self, parts: Sequence[torch.Tensor]) -> DirectWire:
        me, dtype = self._group.index, parts[0].dtype
        if dtype not in self._scratch:
            wide = reference.compute_dtype(dtype, dtype)
            self._scratch[dtype] = torch.empty(BLOCK_BYTES // dtype.itemsize, dtype=wide)
        scratch = self._scratch[dtype]
        element_bytes = parts[0].element_size()
        start, stop = self._own_slice(parts[0].numel(), element_bytes)
        step = BLOCK_BYTES // element_bytes
        blocks = []
        for first in range(start, stop, step):
            inputs = [part[first : min(first + step, stop)] for part in parts]
            others = [view for rank, view in enumerate(inputs) if rank != me]
            accumulation = reference.Accumulation(inputs, inputs[me], scratch)
            blocks.append(_Block(first, inputs, inputs[me], accumulation, others))
        return DirectWire(parts[me].data, tuple(blocks))

    def _own_slice(self, num_elements: int, element_bytes: int) -> tuple[int, int]:
        return slice_bounds(num_elements, self._group.size, element_bytes)[self._group.index]

    def _blame(self, block: _Block, scale: float) -> NonFinite:
        """Whose input made the block non-finite. Ours is overwritten by the sum, so it is found by exclusion."""
        element = first_non_finite(block.own)
        assert element is not None
        others = 0.0
        for rank, view in zip(self._group.ranks, block.inputs, strict=True):
            if view is block.own:
                continue
            value = float(view[element])
            if not math.isfinite(value):
                return NonFinite(rank, block.start + element)
            others += abs(value)
        # Finite values give no NaN, and can only overflow if the others' carry the largest number over its last bit:
        # 16-bit ones when the scaled sum is rounded, wider ones before it is scaled.
        limits = torch.finfo(block.own.dtype)
        room = limits.max * limits.eps / 4
        if block.own.dtype.itemsize == 2:
            room = (limits.max + room) / scale - limits.max
        could_overflow = others >= room and not math.isnan(block.own[element])
        return NonFinite(None if could_overflow else self._group.rank, block.start + element)


def _aligned(num_bytes: int) -> int:
    return math.ceil(num_bytes / ALIGNMENT_BYTES) * ALIGNMENT_BYTES
