"""The script's collectives through memory that the ranks of one host share.

Every rank has a stage of two halves. A round is: write into the half whose turn it is, barrier, read the peers' halves.
Nobody writes a half again before the round after next, and to get there everybody must have come out of this one's
reads, so one barrier per round is enough. A stage fits the L2 cache, where the peers then find it.

What each rank is about to do is written down before the first barrier and compared after it, so ranks that call
different collectives get an error and not each other's bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

import torch

from torchring.errors import PlanMismatchError
from torchring.kernels import reference
from torchring.memory.channel import Channel
from torchring.memory.host import HostGroup, as_words

STAGE_BYTES: Final = 256 * 1024  # one half: measured best of 64 KiB to 2 MiB (64 MiB, 2 ranks: 8.6 ms, with 64 KiB 22)
_SMALL_BYTES: Final = 16 * 1024  # up to here every rank sums everything: one barrier instead of two

_OPERATIONS: Final = ("all_reduce", "broadcast", "all_gather", "all_to_all", "barrier")
_DTYPES: Final = (
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
)  # fmt: skip
_PAIRWISE: Final[dict[str, Callable[..., torch.Tensor]]] = {
    "min": torch.minimum,
    "max": torch.maximum,
    "product": torch.mul,
}
OPS: Final = ("mean", "sum", "min", "max", "product")


class HostExchange:
    """Collectives on flat CPU tensors; opened and called by all ranks of `group` in the same order."""

    def __init__(self, group: HostGroup, *, spin_seconds: float) -> None:
        self._group = group
        self._channel = Channel(group, spin_seconds=spin_seconds)
        self._stages = group.allocate(2 * STAGE_BYTES)
        # One row per rank and half: operation, dtype, detail, then up to `size` sizes.
        self._row_length = 3 + group.size
        rows = group.allocate(2 * 8 * self._row_length)
        self._rows = [as_words(part) for part in rows.parts]
        self._num_rounds = 0
        self._views: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}

    def all_reduce(self, data: torch.Tensor, op: str) -> None:
        """In place; 16-bit values are combined in fp32 and rounded once; every rank gets the same bits."""
        size, me = self._group.size, self._group.index
        step = STAGE_BYTES // data.element_size()
        facts = [_OPERATIONS.index("all_reduce"), _DTYPES.index(data.dtype), OPS.index(op), data.numel()]
        for start in range(0, max(data.numel(), 1), step):
            piece = data[start : start + step]
            stages = [stage[: piece.numel()] for stage in self._next_half(data.dtype)]
            stages[me].copy_(piece)
            self._round(facts if start == 0 else None)
            if size == 2 or piece.numel() * piece.element_size() <= _SMALL_BYTES:
                combine(stages, piece, op)
                continue
            # Each rank combines one slice for all: N times less to add, one more barrier.
            share = math.ceil(piece.numel() / size)
            mine = [stage[me * share : (me + 1) * share] for stage in stages]
            combine(mine, mine[me], op)
            self._channel.barrier()
            for rank, stage in enumerate(stages):
                piece[rank * share : (rank + 1) * share].copy_(stage[rank * share : (rank + 1) * share])

    def broadcast(self, data: torch.Tensor, src: int) -> None:
        """`data`: uint8, as long on every rank; that of rank `src` replaces the others'."""
        me = self._group.index
        facts = [_OPERATIONS.index("broadcast"), 0, src, data.numel()]
        for start in range(0, max(data.numel(), 1), STAGE_BYTES):
            piece = data[start : start + STAGE_BYTES]
            stage = self._next_half(torch.uint8)[src][: piece.numel()]
            if me == src:
                stage.copy_(piece)
            self._round(facts if start == 0 else None)
            if me != src:
                piece.copy_(stage)

    def all_gather(self, data: torch.Tensor) -> list[torch.Tensor]:
        """`data`: uint8, of any length on each rank. Returns everybody's, in rank order."""
        me = self._group.index
        stages = self._next_half(torch.uint8)
        first = data[:STAGE_BYTES]
        stages[me][: first.numel()].copy_(first)
        rows = self._round([_OPERATIONS.index("all_gather"), 0, 0], [data.numel()])
        gathered = [torch.empty(row[3], dtype=torch.uint8) for row in rows]
        for start in range(0, max(max(row[3] for row in rows), 1), STAGE_BYTES):
            if start:
                stages = self._next_half(torch.uint8)
                piece = data[start : start + STAGE_BYTES]
                stages[me][: piece.numel()].copy_(piece)
                self._round(None)
            for stage, target in zip(stages, gathered, strict=True):
                piece = target[start : start + STAGE_BYTES]
                piece.copy_(stage[: piece.numel()])
        return gathered

    def all_to_all(self, pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """`pieces[r]`: uint8 of any length, for rank r. Returns what each rank had for this one."""
        size, me = self._group.size, self._group.index
        share = STAGE_BYTES // size
        received: list[torch.Tensor] = []
        num_rounds, turn = 1, 0
        while turn < num_rounds:
            stages = self._next_half(torch.uint8)
            for rank, data in enumerate(pieces):
                part = data[turn * share : (turn + 1) * share]
                stages[me][rank * share : rank * share + part.numel()].copy_(part)
            if turn == 0:
                rows = self._round([_OPERATIONS.index("all_to_all"), 0, 0], [data.numel() for data in pieces])
                received = [torch.empty(row[3 + me], dtype=torch.uint8) for row in rows]
                num_rounds = max(1, math.ceil(max(max(row[3:]) for row in rows) / share))
            else:
                self._round(None)
            for stage, target in zip(stages, received, strict=True):
                part = target[turn * share : (turn + 1) * share]
                part.copy_(stage[me * share : me * share + part.numel()])
            turn += 1
        return received

    def barrier(self) -> None:
        """Return when every rank has come here."""
        self._next_half(torch.uint8)
        self._round([_OPERATIONS.index("barrier"), 0, 0])

    def close(self) -> None:
        """Nothing to release: the memory goes with the last tensor that views it."""

    def _next_half(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """Everybody's half whose turn it is, as flat tensors of `dtype`, in rank order."""
        self._num_rounds += 1
        if dtype not in self._views:
            halves = (slice(None, STAGE_BYTES), slice(STAGE_BYTES, None))
            first, second = ([part[half].view(dtype) for part in self._stages.parts] for half in halves)
            self._views[dtype] = (first, second)
        return self._views[dtype][self._num_rounds & 1]

    def _round(self, facts: list[int] | None, sizes: Sequence[int] = ()) -> list[list[int]]:
        """Barrier. With `facts`, which must be equal on all ranks, returns everybody's facts and `sizes`."""
        if facts is None:
            self._channel.barrier()
            return []
        offset = (self._num_rounds & 1) * self._row_length
        mine = self._rows[self._group.index]
        for i, fact in enumerate((*facts, *sizes)):
            mine[offset + i] = fact
        self._channel.barrier()
        length = len(facts) + len(sizes)
        rows = [row[offset : offset + length].tolist() for row in self._rows]
        for rank, row in zip(self._group.ranks, rows, strict=True):
            if row[: len(facts)] != facts:
                raise PlanMismatchError(
                    f"rank {self._group.rank} called {_describe(facts)} "
                    f"while rank {rank} called {_describe(self._rows[rank][offset : offset + 4].tolist())}",
                    rank=self._group.rank,
                    peers=(rank,),
                )
        return rows


def combine(parts: Sequence[torch.Tensor], out: torch.Tensor, op: str) -> None:
    """out <- parts[0] op parts[1] op ..., in rank order, 16-bit values in fp32; `out` may be one of them."""
    if op in ("sum", "mean"):
        reference.accumulate(parts, out, scale=1.0 / len(parts) if op == "mean" else 1.0)
        return
    pairwise = _PAIRWISE[op]
    total = parts[0].to(reference.compute_dtype(out.dtype, out.dtype))
    for part in parts[1:]:
        total = pairwise(total, part.to(total.dtype))
    out.copy_(total)


def _describe(facts: Sequence[int]) -> str:
    operation = _OPERATIONS[facts[0]]
    if operation == "all_reduce":
        return f"all_reduce(op={OPS[facts[2]]!r}) of {facts[3]} {str(_DTYPES[facts[1]]).removeprefix('torch.')}"
    if operation == "broadcast":
        return f"broadcast(src={facts[2]}) of {facts[3]} bytes"
    return operation
