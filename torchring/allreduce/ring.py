"""Ring all-reduce: every rank talks to its two neighbours only, and each link carries 2(N-1)/N of the buffer.

The buffer is cut into N chunks. In the first N-1 steps (reduce-scatter) partial sums travel to the right, and each rank
adds its own chunk. Then every rank owns one finished chunk. In the other N-1 steps (all-gather) the finished chunks
travel on until all ranks have all chunks.

      N = 3     rank 0               rank 1               rank 2
      step 0    sends 0, adds 2      sends 1, adds 0      sends 2, adds 1
      step 1    sends 2, adds 1      sends 0, adds 2      sends 1, adds 0      rank r now owns chunk r+1
      step 2    sends 1, copies 0    sends 2, copies 1    sends 0, copies 2
      step 3    sends 0, copies 2    sends 1, copies 0    sends 2, copies 1

Chunks travel in blocks. A rank passes a block on as soon as it has added the block, while the next blocks of the chunk
arrive. So receiving, adding and sending overlap. Receives are posted a few blocks ahead, because the engine sends
nothing before the receiver has posted the receive, which takes a round trip. While one wire ends, the next wire begins
in another lane (see `threaded.py`).

A 16-bit chunk is added in fp32 and rounded once per hop, so the error of an element is at most (N-1) u sum|x| with u
the unit roundoff of the wire dtype. The all-gather copies, so all ranks hold the same bits.

Source: P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 2009.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from torchring.allreduce.contract import NonFinite, blame, first_non_finite, is_finite, tag_mismatch
from torchring.allreduce.slices import slice_bounds
from torchring.errors import RingError
from torchring.kernels import reference
from torchring.transport.contract import Transfer, Transport

BLOCK_BYTES: Final = 1 << 20
NUM_AHEAD: Final = 4  # receives that are posted before their blocks are needed


@dataclass(frozen=True)
class RingStep:
    """One step of one rank: send chunk `send` to the right, receive chunk `receive` from the left, add it if `adds`."""

    send: int
    receive: int
    adds: bool


def ring_steps(rank: int, size: int) -> Iterator[RingStep]:
    """The 2(N-1) steps of one rank.

    Example: ring_steps(1, 2) -> RingStep(send=1, receive=0, adds=True), RingStep(send=0, receive=1, adds=False).
    """
    for step in range(size - 1):
        yield RingStep((rank - step) % size, (rank - step - 1) % size, adds=True)
    for step in range(size - 1):
        yield RingStep((rank + 1 - step) % size, (rank - step) % size, adds=False)


@dataclass(frozen=True)
class RingWire:
    """A buffer with views of its blocks: `blocks[i]` are those of chunk i."""

    tensor: torch.Tensor
    whole: torch.Tensor  # the same memory, for the all-reduce's writes
    blocks: tuple[tuple[torch.Tensor, ...], ...]


class _Lane:
    """A transport, and room for the blocks of one reduction that have arrived and are not yet added."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._room = torch.empty(NUM_AHEAD, BLOCK_BYTES, dtype=torch.uint8, device="cpu")
        # for a block of 16-bit elements
        self.scratch = torch.empty(BLOCK_BYTES // 2, dtype=torch.float32, device="cpu")

    def place(self, number: int, like: torch.Tensor) -> torch.Tensor:
        """Memory for the n-th received block, if the block is to be added."""
        return self._room[number % NUM_AHEAD, : like.numel() * like.element_size()].view(like.dtype)


class RingAllReduce:
    """All-reduce over one transport for each lane. See `BlockingAllReduce`.

    Args:
        transports: one for each lane, so that a small message of one lane does not queue behind a large message of
            another lane.
        members: the ranks of the ring, in ring order. All ranks of the transports by default.
    """

    algorithm = "ring"

    def __init__(self, transports: Sequence[Transport], members: Sequence[int] | None = None) -> None:
        self.members = tuple(range(transports[0].size) if members is None else members)
        self.num_lanes = len(transports)
        self._rank = transports[0].rank
        self._index = self.members.index(self._rank)
        self._left = self.members[self._index - 1]
        self._right = self.members[(self._index + 1) % len(self.members)]
        self._steps = list(ring_steps(self._index, len(self.members)))
        self._lanes = [_Lane(transport) for transport in transports]

    def open_wires(self, specs: Sequence[tuple[int, torch.dtype]]) -> list[RingWire]:
        return [self.wire_over(torch.zeros(numel, dtype=dtype, device="cpu")) for numel, dtype in specs]

    def wire_over(self, whole: torch.Tensor) -> RingWire:
        """A wire in the memory of `whole`, which is flat and has the same length on all members."""
        length = BLOCK_BYTES // whole.element_size()
        blocks = []
        for start, stop in slice_bounds(whole.numel(), len(self.members), whole.element_size()):
            blocks.append(tuple(whole[first : min(first + length, stop)] for first in range(start, stop, length)))
        return RingWire(whole.data, whole, tuple(blocks))

    def all_reduce(self, wire: RingWire, *, scale: float = 1.0, tag: int = 0, lane: int = 0) -> NonFinite | None:
        element = first_non_finite(wire.whole)
        culprit = None if element is None else NonFinite(self._rank, element)
        return self.reduce_checked(wire, culprit, scale=scale, tag=tag, lane=lane)

    def reduce_checked(
        self, wire: RingWire, culprit: NonFinite | None, *, scale: float, tag: int, lane: int
    ) -> NonFinite | None:
        """Does what `all_reduce` does, after the caller has looked for NaN and infinities in this rank's input.

        Args:
            culprit: the rank that the first non-finite value came from, which may be another rank of this host; None if
                the input is finite.
        """
        try:
            return self._reduce(wire, culprit, scale, tag, self._lanes[lane])
        except RingError as error:
            self.fail(error)  # in the other lanes, too
            raise

    def fail(self, error: RingError) -> None:
        """Close every link. Members that wait on a link raise `error`."""
        for lane in self._lanes:
            lane.transport.fail(error)

    def close(self) -> None:
        for lane in self._lanes:
            lane.transport.close()

    def _reduce(
        self, wire: RingWire, culprit: NonFinite | None, scale: float, tag: int, lane: _Lane
    ) -> NonFinite | None:
        transport, whole = lane.transport, wire.whole
        if len(self.members) == 1:
            if scale != 1.0:
                whole.mul_(scale)
            return None if is_finite(whole) else culprit or NonFinite(None, first_non_finite(whole) or 0)
        their_tag = torch.zeros(1, dtype=torch.int64, device="cpu")
        tag_comes = transport.receive(their_tag, self._left)
        tag_goes = transport.send(torch.tensor([tag], device="cpu"), self._right)
        if whole.dtype.itemsize == 2 and scale != 1.0:
            whole.mul_(scale)  # partial sums travel in 16 bits
            scale = 1.0
        tag_comes.wait()
        tag_goes.wait()
        # Before a receive is posted: Gloo ends the process if more bytes arrive than were expected.
        if int(their_tag) != tag:
            raise tag_mismatch(self._rank, tag, self._left, int(their_tag))
        self._go_round(wire, scale, lane)
        if is_finite(whole):
            return None
        # All ranks hold the same bits, so either all ranks come here or none.
        rank, element = (-1, -1) if culprit is None or culprit.rank is None else (culprit.rank, culprit.element)
        return blame(whole, *self._gather([rank, element], transport))

    def _go_round(self, wire: RingWire, scale: float, lane: _Lane) -> None:
        transport, blocks = lane.transport, wire.blocks
        own_last_sum = len(self.members) - 2  # the step after which a chunk is complete; this rank scales the chunk
        arrivals = [(n, step, block) for n, step in enumerate(self._steps) for block in blocks[step.receive]]
        receives: deque[tuple[Transfer, torch.Tensor]] = deque()
        to_post = enumerate(arrivals)

        def post(count: int) -> None:
            for number, (_, step, block) in itertools.islice(to_post, count):
                target = lane.place(number, block) if step.adds else block
                receives.append((transport.receive(target, self._left), target))

        post(NUM_AHEAD)
        sends = [transport.send(block, self._right) for block in blocks[self._steps[0].send]]
        for n, step, block in arrivals:
            transfer, target = receives.popleft()
            transfer.wait()
            if step.adds:
                factor = scale if n == own_last_sum else 1.0
                scratch = lane.scratch if block.dtype.itemsize == 2 else None
                reference.accumulate([target, block], block, scale=factor, scratch=scratch)
            if n + 1 < len(self._steps):  # what was received in one step is sent in the next
                sends.append(transport.send(block, self._right))
            post(1)
        for transfer in sends:
            transfer.wait()

    def _gather(self, numbers: list[int], transport: Transport) -> list[list[int]]:
        """For each of `numbers` the numbers of all members, in ring order."""
        size = len(self.members)
        gathered = torch.tensor([numbers] * size, device="cpu")
        for step in range(size - 1):
            origin = (self._index - step - 1) % size
            receiving = transport.receive(gathered[origin], self._left)
            sent = (self._index - step) % size
            sending = transport.send(gathered[sent], self._right)
            receiving.wait()
            sending.wait()
        columns: list[list[int]] = gathered.t().tolist()
        return columns
