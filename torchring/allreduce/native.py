"""Native all-reduce: the packed bucket is handed to the engine's own collective (Gloo, MPI)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from torchring.allreduce.contract import NonFinite, blame, first_non_finite, is_finite, tag_mismatch
from torchring.errors import RingError, in_step
from torchring.transport.contract import Transport


@dataclass(frozen=True)
class NativeWire:
    tensor: torch.Tensor
    buffer: torch.Tensor  # the same memory, for the mover's writes


class NativeAllReduce:
    """Mover over the engine's all-reduce, with a transport for each lane. See `BlockingMover`.

    Gloo sums 16-bit wires in 16 bits. MPI has no 16-bit types, so `open_wires` raises ValueError.
    """

    algorithm = "native"

    def __init__(self, transports: Sequence[Transport]) -> None:
        self._transports = transports
        self.num_lanes = len(transports)

    def open_wires(self, specs: Sequence[tuple[int, torch.dtype]]) -> list[NativeWire]:
        transport = self._transports[0]
        for _, dtype in specs:
            if not transport.sums(dtype):
                text = f"algorithm='native' under {transport.engine} does not reduce {dtype}; use algorithm='ring'"
                raise in_step(ValueError(text))
        buffers = [torch.zeros(numel, dtype=dtype, device="cpu") for numel, dtype in specs]
        return [NativeWire(buffer.data, buffer) for buffer in buffers]

    def all_reduce(self, wire: NativeWire, *, scale: float = 1.0, tag: int = 0, lane: int = 0) -> NonFinite | None:
        try:
            return self._reduce(wire.buffer, scale, tag, self._transports[lane])
        except RingError as error:
            self.fail(error)  # in the other lanes, too
            raise

    def fail(self, error: RingError) -> None:
        for transport in self._transports:
            transport.fail(error)

    def _reduce(self, buffer: torch.Tensor, scale: float, tag: int, transport: Transport) -> NonFinite | None:
        for rank, other in enumerate(transport.all_gather(tag)):
            if other != tag:
                raise tag_mismatch(transport.rank, tag, rank, other)
        if not buffer.numel():
            return None
        suspect = first_non_finite(buffer)
        if buffer.dtype.itemsize == 2 and scale != 1.0:
            buffer.mul_(scale)  # the engine sums in 16 bits
            scale = 1.0
        transport.all_reduce(buffer)
        if scale != 1.0:
            buffer.mul_(scale)
        if is_finite(buffer):
            return None
        # All ranks hold the same bits, so either all ranks come here or none.
        return blame(buffer, range(transport.size), transport.all_gather(-1 if suspect is None else suspect))

    def close(self) -> None:
        for transport in self._transports:
            transport.close()
