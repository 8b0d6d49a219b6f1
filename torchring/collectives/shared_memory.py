"""Collectives through memory that the ranks of one host share.

Every rank has a staging buffer of two halves. In each round, a rank writes to the half of that round, waits at a
barrier, and reads the same half of its peers. The next round uses the other half. One barrier per round is enough: a
rank overwrites a half two rounds later, and by then every rank has passed the barrier of the round between, so every
rank has read the half. A staging buffer stays in the caches, so peers read it from there.

Before the first barrier each rank writes down which collective it calls, and compares after the barrier. So ranks that
call different collectives get an error, and not each other's bytes.

An all-reduce moves a chunk in each round. Two ranks both add up the whole chunk. Of more ranks, each adds up a slice of
the chunk for all, and writes the result to its own half, from which the others copy it after the next barrier. That is
the barrier of the next chunk:

    round 0     pack chunk 0                                                       | barrier
    round 1     reduce own slice of chunk 0, pack chunk 1                          | barrier
    round 2     copy out chunk 0, reduce own slice of chunk 1, pack chunk 2        | barrier
    ...

While a rank packs chunk 2 into the half of chunk 0, others still copy its slice of chunk 0 from there. So each slice
has its place in a half, whatever the size of the chunk, and a rank packs only the slices of others: it takes its own
slice from the tensor.

More than two ranks pass large tensors along a chain, which moves fewer bytes: rank 0 writes a chunk to a slot, each
other rank adds its own chunk to the slot, and all copy the result. In each round the ranks work on different chunks:

    round       0          1          2                  3                  4                    (3 ranks)
    rank 0      write 0    write 1    write 2            copy 0, write 3    copy 1, write 4
    rank 1                 add 0      add 1              copy 0, add 2      copy 1, add 3
    rank 2                            add 0, copy 0      add 1, copy 1      add 2, copy 2

A slot is used again by the chunk that comes N + 1 later. The halves of all ranks are the slots, so there is one more
barrier before the first chunk, and one after the last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import torch

from torchring.collectives.combine import accumulate, combine
from torchring.collectives.signature import Signature, mismatch
from torchring.kernels import reference
from torchring.memory.channel import Channel
from torchring.memory.host import HostGroup, as_words

# One half of a staging buffer has 256 KiB for each rank: each slice is large enough to be worth the calls, and all
# halves fit the caches. Two ranks, which pass everything once, gain from larger ones. See bench/NOTES.md.
_BYTES_FOR_EACH_RANK: Final = 256 * 1024
_MOST_STAGE_BYTES: Final = 2 << 20
_STAGE_BYTES_OF_TWO: Final = 4 << 20
_SMALL_BYTES: Final = 16 * 1024  # up to this size every rank combines everything, which saves a barrier
_CHAIN_FROM: Final = 4  # staging buffers: with fewer chunks, too many ranks would have nothing to do in most rounds
_LINE_BYTES: Final = 64
_KEPT_VIEWS: Final = 32


def stage_bytes(size: int) -> int:
    """Bytes of one half of a staging buffer, with `size` ranks on the host."""
    return _STAGE_BYTES_OF_TWO if size == 2 else min(_BYTES_FOR_EACH_RANK * size, _MOST_STAGE_BYTES)


class _Views(NamedTuple):
    """Views of one half of the staging buffers, for chunks of a certain dtype and size.

    Attributes:
        own: in this rank's half: the input if every rank adds up everything, the result if each adds up a slice.
        inputs: the inputs of all ranks to what this rank adds up, in rank order.
        sizes: elements of each slice.
        to_others: in this rank's half: the input to the slices of the others.
        results: in the halves of the others: their results.
    """

    own: torch.Tensor
    inputs: list[torch.Tensor]
    sizes: list[int]
    to_others: list[torch.Tensor]
    results: list[torch.Tensor]


class _Chunk(NamedTuple):
    """The elements that travel in one round.

    Attributes:
        pieces: parts of the caller's tensors.
        flat: the only piece, or a copy of all pieces.
        own: the part of `flat` that this rank adds up: its slice, or everything.
        others: the slices of the others.
    """

    pieces: Sequence[torch.Tensor]
    flat: torch.Tensor
    views: _Views
    own: torch.Tensor
    others: list[torch.Tensor]


class SharedMemoryCollectives:
    """Collectives on flat CPU tensors. All ranks of `group` open and call them in the same order.

    Every method takes a `Signature`. If the ranks' signatures differ, all ranks raise PlanMismatchError.
    """

    def __init__(self, group: HostGroup) -> None:
        self._group = group
        self._channel = Channel(group)
        # A half has a place for each rank's slice, a multiple of cache lines.
        self._share_bytes = stage_bytes(group.size) // group.size // _LINE_BYTES * _LINE_BYTES
        self._stage_bytes = self._share_bytes * group.size
        stages = group.allocate(2 * self._stage_bytes).parts
        self._halves = [
            [stage[begin : begin + self._stage_bytes] for stage in stages] for begin in (0, self._stage_bytes)
        ]
        self._bytes = [[memoryview(stage.numpy()) for stage in half] for half in self._halves]  # type: ignore[arg-type]
        self._views: dict[tuple[torch.dtype, int, bool], list[_Views]] = {}
        self._scratch: list[torch.Tensor] = []  # for small tensors that are reduced together, one for each half
        # A header per rank and half: the signature's checksum, up to `size` sizes, and the signature's text for errors.
        self._num_words = 1 + group.size
        headers = group.allocate(2 * (8 * self._num_words + Signature.MAX_BYTES))
        self._words = [as_words(part[: 16 * self._num_words]) for part in headers.parts]
        self._texts = [memoryview(part[16 * self._num_words :].numpy()) for part in headers.parts]  # type: ignore[arg-type]
        self._written: list[Signature | None] = [None, None]  # what the header of each half says
        self._num_rounds = 0

    def all_reduce(self, parts: Sequence[torch.Tensor], op: str, signature: Signature) -> None:
        """In place, as if the flat `parts`, of one dtype, were one tensor. 16-bit values are combined in fp32 and
        rounded once. Every rank gets the same bits."""
        num_bytes = sum([part.nbytes for part in parts])
        in_slices = self._group.size > 2 and num_bytes > _SMALL_BYTES
        if len(parts) == 1 and not in_slices and num_bytes <= self._stage_bytes:  # one round, as fast as can be
            chunk = self._pack(parts, in_slices)
            self._round(signature)
            self._reduce(chunk, op)
            return
        if in_slices and num_bytes > _CHAIN_FROM * self._stage_bytes:
            self._all_reduce_in_chain(parts, num_bytes, op, signature)
            return
        chunks = _cut(parts, num_bytes, self._stage_bytes)
        before: _Chunk | None = None
        for number, pieces in enumerate(chunks):
            chunk = self._pack(pieces, in_slices)
            self._round(signature if number == 0 else None)
            if before is not None:
                self._unpack(before)
            self._reduce(chunk, op)
            before = chunk
        assert before is not None
        if in_slices:
            self._channel.barrier()
        self._unpack(before)

    def _pack(self, pieces: Sequence[torch.Tensor], in_slices: bool) -> _Chunk:
        """Begin a round by writing `pieces` to this rank's half."""
        half = self._next_half()
        flat = pieces[0] if len(pieces) == 1 else self._joined(pieces, half)
        views = self._views_of(flat.dtype, flat.numel(), in_slices)[half]
        if not in_slices:
            views.own.copy_(flat)
            return _Chunk(pieces, flat, views, flat, [])
        others = list(torch.split(flat, views.sizes))
        own = others.pop(self._group.index)
        torch._foreach_copy_(views.to_others, others)
        return _Chunk(pieces, flat, views, own, others)

    def _reduce(self, chunk: _Chunk, op: str) -> None:
        """Add up this rank's slice, or everything."""
        me, views, own = self._group.index, chunk.views, chunk.own
        if chunk.others:
            combine([*views.inputs[:me], own, *views.inputs[me + 1 :]], views.own, op)
            own.copy_(views.own)
        elif me < 2:  # from the tensor instead of from this rank's half: a quarter faster
            combine([*views.inputs[:me], own, *views.inputs[me + 1 :]], own, op)
        else:  # the tensor would be overwritten too early
            combine(views.inputs, own, op)

    def _unpack(self, chunk: _Chunk) -> None:
        """Copy out the results of the other ranks, when all have them."""
        if chunk.others:
            torch._foreach_copy_(chunk.others, chunk.views.results)
        if len(chunk.pieces) > 1:
            torch._foreach_copy_(
                list(chunk.pieces), list(torch.split(chunk.flat, [piece.numel() for piece in chunk.pieces]))
            )

    def _all_reduce_in_chain(
        self, parts: Sequence[torch.Tensor], num_bytes: int, op: str, signature: Signature
    ) -> None:
        size, me, dtype = self._group.size, self._group.index, parts[0].dtype
        wide = reference.compute_dtype(dtype, dtype)
        chunks = _cut(parts, num_bytes, self._stage_bytes * dtype.itemsize // wide.itemsize)
        slots = [self._halves[i // size][i % size].view(wide) for i in range(size + 1)]
        self._next_half()
        self._round(signature)  # and all have read what the slots held before
        for turn in range(len(chunks) + size):
            if turn >= size and me < size - 1:
                self._copy_from_chain(chunks[turn - size], slots[(turn - size) % len(slots)])
            if 0 <= turn - me < len(chunks):
                chunk, slot = chunks[turn - me], slots[(turn - me) % len(slots)]
                self._add_to_chain(chunk, slot, op)
                if me == size - 1:  # the sum is complete, and in the cache
                    self._copy_from_chain(chunk, slot)
            self._channel.barrier()

    def _add_to_chain(self, pieces: Sequence[torch.Tensor], slot: torch.Tensor, op: str) -> None:
        me, flat = self._group.index, pieces[0] if len(pieces) == 1 else self._joined(pieces, 0)
        total = slot[: flat.numel()]
        if me == 0:
            total.copy_(flat)
            return
        accumulate(total, flat, op)
        if me == self._group.size - 1 and op == "mean":
            total.mul_(1.0 / self._group.size)

    def _copy_from_chain(self, pieces: Sequence[torch.Tensor], slot: torch.Tensor) -> None:
        if len(pieces) == 1:
            pieces[0].copy_(slot[: pieces[0].numel()])
            return
        sizes = [piece.numel() for piece in pieces]
        torch._foreach_copy_(list(pieces), list(torch.split(slot[: sum(sizes)], sizes)))

    def broadcast(self, data: torch.Tensor, src: int, signature: Signature) -> None:
        """The uint8 `data` of rank `src` replaces that of the other ranks; equally long on every rank."""
        me = self._group.index
        for start in range(0, max(data.numel(), 1), self._stage_bytes):
            piece = data[start : start + self._stage_bytes]
            stage = self._halves[self._next_half()][src][: piece.numel()]
            if me == src:
                stage.copy_(piece)
            self._round(signature if start == 0 else None)
            if me != src:
                piece.copy_(stage)

    def all_gather(self, data: torch.Tensor, signature: Signature) -> list[torch.Tensor]:
        """The uint8 `data` of all ranks, in rank order; of any length on each rank."""
        me = self._group.index
        stages = self._halves[self._next_half()]
        first = data[: self._stage_bytes]
        stages[me][: first.numel()].copy_(first)
        sizes = [row[0] for row in self._round(signature, [data.numel()])]
        gathered = [torch.empty(size, dtype=torch.uint8, device="cpu") for size in sizes]
        for start in range(0, max(*sizes, 1), self._stage_bytes):
            if start:
                stages = self._halves[self._next_half()]
                piece = data[start : start + self._stage_bytes]
                stages[me][: piece.numel()].copy_(piece)
                self._round(None)
            for stage, target in zip(stages, gathered, strict=True):
                piece = target[start : start + self._stage_bytes]
                piece.copy_(stage[: piece.numel()])
        return gathered

    def exchange(self, data: bytes, signature: Signature, meanwhile: Callable[[], bool] | None = None) -> list[bytes]:
        """The `data` of all ranks, in rank order; of any length on each rank. As all_gather, without tensors.

        Args:
            meanwhile: see `Channel`.
        """
        me, room = self._group.index, self._stage_bytes
        stages = self._bytes[self._next_half()]
        first = data[:room]
        stages[me][: len(first)] = first
        self._channel.meanwhile = meanwhile
        try:
            sizes = [row[0] for row in self._round(signature, [len(data)])]
        finally:
            self._channel.meanwhile = None
        gathered = [bytes(stage[: min(size, room)]) for stage, size in zip(stages, sizes, strict=True)]
        for start in range(room, max(sizes), room):
            stages = self._bytes[self._next_half()]
            piece = data[start : start + room]
            stages[me][: len(piece)] = piece
            self._round(None)
            for rank, stage in enumerate(stages):
                gathered[rank] += stage[: max(0, min(sizes[rank] - start, room))]
        return gathered

    def all_to_all(self, pieces: Sequence[torch.Tensor], signature: Signature) -> list[torch.Tensor]:
        """Send the uint8 `pieces[r]`, of any length, to rank r. Returns what each rank sent to this rank."""
        me = self._group.index
        share = self._share_bytes
        received: list[torch.Tensor] = []
        num_rounds, turn = 1, 0
        while turn < num_rounds:
            stages = self._halves[self._next_half()]
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
        self._next_half()
        self._round(signature)

    def close(self) -> None:
        """Nothing to release: the memory is freed with the last tensor that views it."""

    def _next_half(self) -> int:
        """Begin a round. Returns which half of the staging buffers it uses."""
        self._num_rounds += 1
        return self._num_rounds & 1

    def _joined(self, pieces: Sequence[torch.Tensor], half: int) -> torch.Tensor:
        """A copy of all `pieces`, one after the other, which lasts until the half is used again."""
        if not pieces:
            return torch.empty(0, device="cpu")
        if not self._scratch:
            self._scratch = list(torch.empty(2, self._stage_bytes, dtype=torch.uint8, device="cpu"))
        sizes = [piece.numel() for piece in pieces]
        joined = self._scratch[half].view(pieces[0].dtype)[: sum(sizes)]
        torch._foreach_copy_(list(torch.split(joined, sizes)), list(pieces))
        return joined

    def _views_of(self, dtype: torch.dtype, numel: int, in_slices: bool) -> list[_Views]:
        """The views that chunks of `numel` elements need of each half."""
        key = dtype, numel, in_slices
        if (known := self._views.get(key)) is None:
            if len(self._views) == _KEPT_VIEWS:
                self._views.clear()
            known = self._views[key] = [self._make_views(half, *key) for half in self._halves]
        return known

    def _make_views(self, half: Sequence[torch.Tensor], dtype: torch.dtype, numel: int, in_slices: bool) -> _Views:
        me, size = self._group.index, self._group.size
        stages = [stage.view(dtype) for stage in half]
        if not in_slices:
            inputs = [stage[:numel] for stage in stages]
            return _Views(inputs[me], inputs, [numel], [], [])
        line = _LINE_BYTES // dtype.itemsize
        share = math.ceil(math.ceil(numel / size) / line) * line
        sizes = [max(0, min(share, numel - rank * share)) for rank in range(size)]
        place = self._share_bytes // dtype.itemsize
        slices = [[stage[r * place : r * place + sizes[r]] for r in range(size)] for stage in stages]
        inputs = [of_stage[me] for of_stage in slices]
        others = [rank for rank in range(size) if rank != me]
        to_others, results = [slices[me][r] for r in others], [slices[r][r] for r in others]
        return _Views(inputs[me], inputs, sizes, to_others, results)

    def _round(self, signature: Signature | None, sizes: Sequence[int] = ()) -> list[list[int]]:
        """Barrier. With a signature, also compare it with those of all ranks, and return the `sizes` of all ranks."""
        if signature is None:
            self._channel.barrier()
            return []
        half = self._num_rounds & 1
        first = half * self._num_words
        start = half * Signature.MAX_BYTES
        mine, checksum = self._words[self._group.index], signature.checksum
        if self._written[half] is not signature:
            mine[first] = checksum
            self._texts[self._group.index][start : start + Signature.MAX_BYTES] = signature.text
            self._written[half] = signature
        for i, size in enumerate(sizes, start=first + 1):
            mine[i] = size
        self._channel.barrier()
        for index, words in enumerate(self._words):
            if words[first] != checksum:
                theirs = bytes(self._texts[index][start : start + Signature.MAX_BYTES])
                raise mismatch(self._group.rank, signature, self._group.ranks[index], theirs)
        return [words[first + 1 : first + 1 + len(sizes)].tolist() for words in self._words] if sizes else []


def _cut(parts: Sequence[torch.Tensor], num_bytes: int, most_bytes: int) -> list[Sequence[torch.Tensor]]:
    """Chunks of at most `most_bytes`, equal on all ranks: pieces of large tensors, and small tensors together."""
    if num_bytes <= most_bytes:
        return [parts]
    chunks: list[Sequence[torch.Tensor]] = []
    together: list[torch.Tensor] = []
    room = most_bytes
    for part in parts:
        if part.nbytes >= most_bytes // 4:  # a chunk of its own: it need not be copied next to others
            chunks += [[piece] for piece in torch.split(part, most_bytes // part.itemsize)]
            continue
        if part.nbytes > room:
            chunks.append(together)
            together, room = [], most_bytes
        together.append(part)
        room -= part.nbytes
    return [*chunks, together] if together else chunks
