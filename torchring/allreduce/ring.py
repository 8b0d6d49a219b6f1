"""Ring all-reduce: every rank talks to its two neighbours only, and each link carries 2(N-1)/N of the buffer.

The buffer is cut into N chunks. In the first N-1 steps (reduce-scatter) partial sums travel to the right, each rank
adding its own chunk; then every rank owns one finished chunk, which travels on (all-gather) until all have all.

      N = 3     rank 0               rank 1               rank 2
      step 0    sends 0, adds 2      sends 1, adds 0      sends 2, adds 1
      step 1    sends 2, adds 1      sends 0, adds 2      sends 1, adds 0      rank r now owns chunk r+1
      step 2    sends 1, copies 0    sends 2, copies 1    sends 0, copies 2
      step 3    sends 0, copies 2    sends 1, copies 0    sends 2, copies 1

A 16-bit chunk is added in fp32 and rounded once per hop, so the error of an element is at most (N-1) u sum|x| with u
the unit roundoff of the wire dtype. The all-gather copies, so all ranks hold the same bits.

Source: P. Patarasuk and X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations", JPDC 2009.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from torchring.allreduce.direct import slice_bounds
from torchring.allreduce.mover import NonFinite, Wire, blame, first_non_finite, is_finite, tag_mismatch
from torchring.kernels import reference
from torchring.transport import Transport


@dataclass(frozen=True)
class RingStep:
    """One step of one rank: send chunk `send` to the right; receive chunk `receive` from the left, adding it or not."""

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
    """A buffer with one more element per rank at its end: rank r sets its own to 1 if its input is not finite."""

    tensor: torch.Tensor
    whole: torch.Tensor
    flags: torch.Tensor
    chunks: tuple[torch.Tensor, ...]
    received: torch.Tensor


class RingAllReduce:
    """Mover over a transport. See `Mover`.

    Args:
        transport: its neighbours are the ranks before and after this one, cyclically.
    """

    algorithm = "ring"
    sleeps_while_waiting = True

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._scratch = torch.empty(0, dtype=torch.float32)

    def open_wires(self, specs: Sequence[tuple[int, torch.dtype]]) -> list[RingWire]:
        size = self._transport.size
        wires = []
        for numel, dtype in specs:
            whole = torch.zeros(numel + size, dtype=dtype)
            bounds = slice_bounds(whole.numel(), size, dtype.itemsize)
            chunks = tuple(whole[start:stop] for start, stop in bounds)
            received = torch.empty(max(chunk.numel() for chunk in chunks), dtype=dtype)
            wires.append(RingWire(whole[:numel].data, whole, whole[numel:], chunks, received))
            if dtype.itemsize == 2 and received.numel() > self._scratch.numel():
                self._scratch = torch.empty(received.numel(), dtype=torch.float32)
        return wires

    def all_reduce(self, wire: Wire, *, scale: float = 1.0, tag: int = 0) -> NonFinite | None:
        assert isinstance(wire, RingWire)
        transport = self._transport
        rank, size = transport.rank, transport.size
        their_tag = torch.zeros(1, dtype=torch.int64)
        tag_comes = transport.receive(their_tag, (rank - 1) % size)
        tag_goes = transport.send(torch.tensor([tag]), (rank + 1) % size)
        wire.flags.zero_()
        suspect = first_non_finite(wire.whole)
        if wire.whole.dtype.itemsize == 2 and scale != 1.0:
            wire.whole.mul_(scale)  # partial sums travel in 16 bits
            scale = 1.0
        wire.flags[rank] = 0.0 if suspect is None else 1.0
        tag_comes.wait()
        tag_goes.wait()
        if int(their_tag) != tag:
            raise transport.fail(tag_mismatch(rank, tag, (rank - 1) % size, int(their_tag)))
        last_sum = size - 2
        for index, step in enumerate(ring_steps(rank, size)):
            chunk = wire.chunks[step.receive]
            target = wire.received[: chunk.numel()] if step.adds else chunk
            # The receive is posted first, so that no rank waits for a neighbour that waits to send.
            receiving = transport.receive(target, (rank - 1) % size)
            sending = transport.send(wire.chunks[step.send], (rank + 1) % size)
            receiving.wait()
            if step.adds:
                # The chunk is complete, and ours to scale, in the last step that adds.
                factor = scale if index == last_sum else 1.0
                scratch = self._scratch if chunk.dtype.itemsize == 2 else None
                reference.accumulate([target, chunk], chunk, scale=factor, scratch=scratch)
            sending.wait()
        if is_finite(wire.whole) and not bool(wire.flags.any()):
            return None
        # Every rank holds the same bits, so every rank comes here or none does.
        return blame(wire.whole, self._gather(-1 if suspect is None else suspect))

    def _gather(self, number: int) -> list[int]:
        """Everybody's number, in rank order."""
        transport = self._transport
        rank, size = transport.rank, transport.size
        numbers = torch.full((size,), number)
        for step in range(size - 1):
            origin = (rank - step - 1) % size
            receiving = transport.receive(numbers[origin : origin + 1], (rank - 1) % size)
            sent = (rank - step) % size
            sending = transport.send(numbers[sent : sent + 1], (rank + 1) % size)
            receiving.wait()
            sending.wait()
        gathered: list[int] = numbers.tolist()
        return gathered

    def close(self) -> None:
        self._transport.close()
