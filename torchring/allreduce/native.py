"""Native all-reduce: the packed bucket is handed to the backend's own collective (Gloo)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from torchring.allreduce.mover import NonFinite, Wire, first_non_finite, is_finite
from torchring.transport.c10d import C10dTransport


@dataclass(frozen=True)
class NativeWire:
    tensor: torch.Tensor


class NativeAllReduce:
    """Mover over the backend's all-reduce, for comparison and as a fallback. See `Mover`.

    16-bit wires are summed as the backend sums them.
    """

    algorithm = "native"
    sleeps_while_waiting = True

    def __init__(self, transport: C10dTransport) -> None:
        self._transport = transport

    def open_wires(self, specs: Sequence[tuple[int, torch.dtype]]) -> list[NativeWire]:
        return [NativeWire(torch.zeros(numel, dtype=dtype)) for numel, dtype in specs]

    def all_reduce(self, wire: Wire, *, scale: float = 1.0) -> NonFinite | None:
        if not wire.tensor.numel():
            return None
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)
        mine = torch.tensor([0 if is_finite(wire.tensor) else 1])
        self._transport.collective(lambda group: group.allreduce([wire.tensor], options))
        if scale != 1.0:
            wire.tensor.mul_(scale)
        if is_finite(wire.tensor):
            return None
        # Every rank holds the same bits, so every rank comes here or none does.
        flags = [torch.zeros_like(mine) for _ in range(self._transport.size)]
        self._transport.collective(lambda group: group.allgather([flags], [mine]))
        return first_non_finite(wire.tensor, torch.cat(flags))

    def close(self) -> None:
        self._transport.close()
