"""Native all-reduce: the packed bucket is handed to the backend's own collective (Gloo)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from torchring.allreduce.mover import NonFinite, Wire, blame, first_non_finite, is_finite, tag_mismatch
from torchring.transport.c10d import C10dTransport


@dataclass(frozen=True)
class NativeWire:
    tensor: torch.Tensor
    buffer: torch.Tensor  # the same memory, for the mover's writes


class NativeAllReduce:
    """Mover over the backend's all-reduce, for comparison and as a fallback. See `Mover`.

    16-bit wires are summed as the backend sums them.
    """

    algorithm = "native"
    sleeps_while_waiting = True

    def __init__(self, transport: C10dTransport) -> None:
        self._transport = transport

    def open_wires(self, specs: Sequence[tuple[int, torch.dtype]]) -> list[NativeWire]:
        buffers = [torch.zeros(numel, dtype=dtype) for numel, dtype in specs]
        return [NativeWire(buffer.data, buffer) for buffer in buffers]

    def all_reduce(self, wire: Wire, *, scale: float = 1.0, tag: int = 0) -> NonFinite | None:
        assert isinstance(wire, NativeWire)
        self._check_tags(tag)
        buffer = wire.buffer
        if not buffer.numel():
            return None
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)
        suspect = first_non_finite(buffer)
        if buffer.dtype.itemsize == 2 and scale != 1.0:
            buffer.mul_(scale)  # the backend sums in 16 bits
            scale = 1.0
        self._transport.collective(lambda group: group.allreduce([buffer], options))
        if scale != 1.0:
            buffer.mul_(scale)
        if is_finite(buffer):
            return None
        # Every rank holds the same bits, so every rank comes here or none does.
        return blame(buffer, self._gather(-1 if suspect is None else suspect))

    def _gather(self, number: int) -> list[int]:
        mine = torch.tensor([number])
        numbers = [torch.zeros_like(mine) for _ in range(self._transport.size)]
        self._transport.collective(lambda group: group.allgather([numbers], [mine]))
        return [int(other) for other in numbers]

    def _check_tags(self, tag: int) -> None:
        tags = self._gather(tag)
        for rank, other in enumerate(tags):
            if other != tag:
                raise self._transport.fail(tag_mismatch(self._transport.rank, tag, rank, other))

    def close(self) -> None:
        self._transport.close()
