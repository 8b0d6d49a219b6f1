"""Collectives through memory that the ranks of one host share.

Every rank has a staging buffer of two halves. In each round, a rank writes to the half of that round, waits at a
barrier, and reads the same half of its peers. The next round uses the other half. One barrier per round is enough: a
rank overwrites a half two rounds later, and by then every rank has passed the barrier of the round between, so every
rank has read the half. A staging buffer fits the L2 cache, so peers read it from there.

Before the first barrier each rank writes down which collective it calls, and compares after the barrier. So ranks that
call different collectives get an error, and not each other's bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

import torch

from torchring.collectives.signature import Signature, mismatch
from torchring.kernels import reference
from torchring.memory.channel import Channel
from torchring.memory.host import HostGroup, as_words

STAGE_BYTES: Final = 256 * 1024  # one half: measured best of 64 KiB to 2 MiB (64 MiB, 2 ranks: 8.6 ms, with 64 KiB 22)
_SMALL_BYTES: Final = 16 * 1024  # up to this size every rank combines everything, which saves a barrier

_PAIRWISE: Final[dict[str, Callable[..., torch.Tensor]]] = {
    "min": torch.minimum,
    "max": torch.maximum,
    "product": torch.mul,
}


class SharedMemoryCollectives:
    """Collectives on flat CPU tensors. All ranks of `group` open and call them in the same order.

    Every method takes a `Signature`. If the ranks' signatures differ, all ranks raise PlanMismatchError.
    """

    def __init__(self, group: HostGroup) -> None:
        self._group = group
        self._channel = Channel(group)
        self._stages = group.allocate(2 * STAGE_BYTES)
        self._bytes = [memoryview(part.numpy()) for part in self._stages.parts]  # type: ignore[arg-type]
        # A header per rank and half: the signature's checksum, up to `size` sizes, and the signature's text for errors.
        self._num_words = 1 + group.size
        headers = group.allocate(2 * (8 * self._num_words + Signature.MAX_BYTES))
        self._words = [as_words(part[: 16 * self._num_words]) for part in headers.parts]
        self._texts = [memoryview(part[16 * self._num_words :].numpy()) for part in headers.parts]  # type: ignore[arg-type]
        self._num_rounds = 0
        self._views: dict[torch.dtype, tuple[list[torch.Tensor], list[torch.Tensor]]] = {}

    def all_reduce(self, parts: Sequence[torch.Tensor], op: str, signature: Signature) -> None:
        """In place, as if the flat `parts`, of one dtype, were one tensor. 16-bit values are combined in fp32 and
        rounded once. Every rank gets the same bits."""
        if len(parts) != 1:
            data = torch.cat(list(parts)) if parts else torch.empty(0, device="cpu")
            self.all_reduce([data], op, signature)
            if parts:
                torch._foreach_copy_(list(parts), list(torch.split(data, [part.numel() for part in parts])))
            return
        data = parts[0]
        size, me = self._group.size, self._group.index
        step = STAGE_BYTES // data.element_size()
        for start in range(0, max(data.numel(), 1), step):
            piece = data[start : start + step]
            stages = [stage[: piece.numel()] for stage in self._next_half(data.dtype)]
            stages[me].copy_(piece)
            self._round(signature if start == 0 else None)
            if size == 2 or piece.numel() * piece.element_size() <= _SMALL_BYTES:
                combine(stages, piece, op)
                continue
            # Each rank combines one slice for all ranks: a rank adds N times less, and there is one more barrier.
            share = math.ceil(piece.numel() / size)
            mine = [stage[me * share : (me + 1) * share] for stage in stages]
            combine(mine, mine[me], op)
            self._channel.barrier()
            for rank, stage in enumerate(stages):
                piece[rank * share : (rank + 1) * share].copy_(stage[rank * share : (rank + 1) * share])

    def broadcast(self, data: torch.Tensor, src: int, signature: Signature) -> None:
        """The uint8 `data` of rank `src` replaces that of the other ranks; equally long on every rank."""
        me = self._group.index
        for start in range(0, max(data.numel(), 1), STAGE_BYTES):
            piece = data[start : start + STAGE_BYTES]
            stage = self._next_half(torch.uint8)[src][: piece.numel()]
            if me == src:
                stage.copy_(piece)
            self._round(signature if start == 0 else None)
            if me != src:
                piece.copy_(stage)

    def all_gather(self, data: torch.Tensor, signature: Signature) -> list[torch.Tensor]:
        """The uint8 `data` of all ranks, in rank order; of any length on each rank."""
        me = self._group.index
        stages = self._next_half(torch.uint8)
        first = data[:STAGE_BYTES]
        stages[me][: first.numel()].copy_(first)
        sizes = [row[0] for row in self._round(signature, [data.numel()])]
        gathered = [torch.empty(size, dtype=torch.uint8, device="cpu") for size in sizes]
        for start in range(0, max(*sizes, 1), STAGE_BYTES):
            if start:
                stages = self._next_half(torch.uint8)
                piece = data[start : start + STAGE_BYTES]
                stages[me][: piece.numel()].copy_(piece)
                self._round(None)
            for stage, target in zip(stages, gathered, strict=True):
                piece = target[start : start + STAGE_BYTES]
                piece.copy_(stage[: piece.numel()])
        return gathered

    def exchange(self, data: bytes, signature: Signature) -> list[bytes]:
        """The `data` of all ranks, in rank order; of any length on each rank. As all_gather, without tensors."""
        begin = self._next_begin()
        self._bytes[self._group.index][begin : begin + min(len(data), STAGE_BYTES)] = data[:STAGE_BYTES]
        sizes = [row[0] for row in self._round(signature, [len(data)])]
        gathered = [
            bytes(stage[begin : begin + min(size, STAGE_BYTES)]) for stage, size in zip(self._bytes, sizes, strict=True)
        ]
        if max(sizes) <= STAGE_BYTES:
            return gathered
        pieces = [[first] for first in gathered]
        for start in range(STAGE_BYTES, max(sizes), STAGE_BYTES):
            begin = self._next_begin()
            piece = data[start : start + STAGE_BYTES]
            self._bytes[self._group.index][begin : begin + len(piece)] = piece
            self._round(None)
            for stage, size, found in zip(self._bytes, sizes, pieces, strict=True):
                found.append(bytes(stage[begin : begin + max(0, min(size - start, STAGE_BYTES))]))
        return [b"".join(found) for found in pieces]

    def all_to_all(self, pieces: Sequence[torch.Tensor], signature: Signature) -> list[torch.Tensor]:
        """Send the uint8 `pieces[r]`, of any length, to rank r. Returns what each rank sent to this rank."""
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
                sizes = self._round(signature, [data.numel() for data in pieces])
                received = [torch.empty(row[me], dtype=torch.uint8, device="cpu") for row in sizes]
                num_rounds = max(1, math.ceil(max(max(row) for row in sizes) / share))
            else:
                self._round(None)
            for stage, target in zip(stages, received, strict=True):
                part = target[turn * share : (turn + 1) * share]
                part.copy_(stage[me * share : me * share + part.numel()])
            turn += 1
        return received

    def barrier(self, signature: Signature) -> None:
        """Return when every rank has called it."""
        self._next_half(torch.uint8)
        self._round(signature)

    def close(self) -> None:
        """Nothing to release: the memory is freed with the last tensor that views it."""

    def _next_begin(self) -> int:
        """Where the half of the next round begins in every rank's staging buffer."""
        self._num_rounds += 1
        return STAGE_BYTES * (self._num_rounds & 1)

    def _next_half(self, dtype: torch.dtype) -> list[torch.Tensor]:
        """The half of the next round in every rank's staging buffer, as flat tensors of `dtype`, in rank order."""
        self._num_rounds += 1
        if dtype not in self._views:
            halves = (slice(None, STAGE_BYTES), slice(STAGE_BYTES, None))
            first, second = ([part[half].view(dtype) for part in self._stages.parts] for half in halves)
            self._views[dtype] = (first, second)
        return self._views[dtype][self._num_rounds & 1]

    def _round(self, signature: Signature | None, sizes: Sequence[int] = ()) -> list[list[int]]:
        """Barrier. With a signature, also compare it with those of all ranks, and return the `sizes` of all ranks."""
        if signature is None:
            self._channel.barrier()
            return []
        half = self._num_rounds & 1
        first = half * self._num_words
        mine, checksum, text = self._words[self._group.index], signature.checksum, signature.text
        mine[first] = checksum
        for i, size in enumerate(sizes, start=first + 1):
            mine[i] = size
        start = half * Signature.MAX_BYTES
        self._texts[self._group.index][start : start + Signature.MAX_BYTES] = text
        self._channel.barrier()
        for index, words in enumerate(self._words):
            if words[first] != checksum:
                theirs = bytes(self._texts[index][start : start + Signature.MAX_BYTES])
                raise mismatch(self._group.rank, signature, self._group.ranks[index], theirs)
        return [words[first + 1 : first + 1 + len(sizes)].tolist() for words in self._words]


def combine(parts: Sequence[torch.Tensor], out: torch.Tensor, op: str) -> None:
    """out <- parts[0] op parts[1] op ..., in rank order, 16-bit values in fp32. `out` may be one of the parts."""
    if op in ("sum", "mean"):
        reference.accumulate(parts, out, scale=1.0 / len(parts) if op == "mean" else 1.0)
        return
    pairwise = _PAIRWISE[op]
    total = parts[0].to(reference.compute_dtype(out.dtype, out.dtype))
    for part in parts[1:]:
        total = pairwise(total, part.to(total.dtype))
    out.copy_(total)
