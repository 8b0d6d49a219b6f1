"""Collectives through memory that the ranks of one host share.

Every rank has a staging buffer of two halves. In each turn, a rank writes to the half of that turn, waits at a barrier,
and reads the same half of its peers. The next turn uses the other half. One barrier per turn is enough: a rank
overwrites a half two turns later, and by then every rank has passed the barrier of the turn between, so every rank has
read the half. A staging buffer stays in the caches, so peers read it from there.

Before the first barrier each rank writes down which collective it calls, and compares after the barrier. So ranks that
call different collectives get an error, and not each other's bytes.

An all-reduce moves a chunk in each turn. Each rank adds up a slice of the chunk for all, and copies the other slices
when a second barrier says that they are there:

    write the chunk | barrier | add up own slice, write the sum | barrier | copy the sums of the others

Two ranks, and any number of ranks with a small tensor, add up the whole chunk each. That saves the second barrier.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import torch

from torchring.collectives.operations import Meanwhile, combine
from torchring.collectives.signature import Signature, mismatch
from torchring.memory.channel import Channel
from torchring.memory.host import HostGroup, as_words, tensor_of

# One half of a staging buffer has 256 KiB for each rank: each slice is large enough to be worth the calls, and all
# halves fit the caches. Two ranks, which pass everything once, gain from larger ones. See bench/NOTES.md.
_BYTES_FOR_EACH_RANK: Final = 256 * 1024
_MOST_STAGE_BYTES: Final = 2 << 20
_STAGE_BYTES_OF_TWO: Final = 4 << 20
_SMALL_BYTES: Final = 16 * 1024  # up to this size every rank adds up everything, which saves a barrier
_LINE_BYTES: Final = 64
_KEPT_VIEWS: Final = 32


def stage_bytes(size: int) -> int:
    """Bytes of one half of a staging buffer, with `size` ranks on the host."""
    return _STAGE_BYTES_OF_TWO if size == 2 else min(_BYTES_FOR_EACH_RANK * size, _MOST_STAGE_BYTES)


class SharedMemoryCollectives:
    """Collectives on flat CPU tensors. All ranks of `group` open and call them in the same order.

    Every method takes a `Signature`. If the ranks' signatures differ, all ranks raise PlanMismatchError.
    """

    on_cpu = True

    def __init__(self, group: HostGroup) -> None:
        self._group = group
        self._channel = Channel(group)
        # A half has a place for each rank's share, a multiple of cache lines.
        self._share_bytes = stage_bytes(group.size) // group.size // _LINE_BYTES * _LINE_BYTES
        self._stage_bytes = self._share_bytes * group.size
        # Most collectives are small. To populate 32 MiB would take 60 ms whenever the ranks of an elastic job change.
        stages = group.allocate(2 * self._stage_bytes, populates=False).parts
        self._halves = [
            [stage[begin : begin + self._stage_bytes] for stage in stages] for begin in (0, self._stage_bytes)
        ]
        self._bytes = [[memoryview(stage.numpy()) for stage in half] for half in self._halves]  # type: ignore[arg-type]
        self._views: dict[tuple[torch.dtype, int, int], list[torch.Tensor]] = {}
        # A header per rank and half: the signature's checksum, up to `size` sizes, and the signature's text for errors.
        self._num_words = 1 + group.size
        headers = group.allocate(2 * (8 * self._num_words + Signature.MAX_BYTES))
        self._words = [as_words(part[: 16 * self._num_words]) for part in headers.parts]
        self._texts = [memoryview(part[16 * self._num_words :].numpy()) for part in headers.parts]  # type: ignore[arg-type]
        self._written: list[Signature | None] = [None, None]  # what the header of each half says
        self._num_turns = 0

    def all_reduce(self, data: torch.Tensor, op: str, signature: Signature) -> None:
        """In place. 16-bit values are combined in fp32 and rounded once. Every rank gets the same bits."""
        in_slices = self._group.size > 2 and data.nbytes > _SMALL_BYTES
        is_one = data.nbytes <= self._stage_bytes
        for number, chunk in enumerate([data] if is_one else torch.split(data, self._stage_bytes // data.itemsize)):
            stages = self._stages(data.dtype, chunk.numel())
            stages[self._group.index].copy_(chunk)
            self._meet(signature if number == 0 else None)
            if in_slices:
                self._add_up_in_slices(stages, chunk, op)
            else:
                self._add_up(stages, chunk, op)

    def _add_up_in_slices(self, stages: Sequence[torch.Tensor], chunk: torch.Tensor, op: str) -> None:
        me = self._group.index
        share = math.ceil(math.ceil(chunk.numel() / len(stages)) * chunk.itemsize / _LINE_BYTES) * _LINE_BYTES
        bounds = [min(rank * share // chunk.itemsize, chunk.numel()) for rank in range(len(stages) + 1)]
        slices = [slice(*pair) for pair in itertools.pairwise(bounds)]
        self._add_up([stage[slices[me]] for stage in stages], chunk[slices[me]], op)
        stages[me][slices[me]].copy_(chunk[slices[me]])
        self._channel.barrier()
        for rank, stage in enumerate(stages):
            if rank != me:
                chunk[slices[rank]].copy_(stage[slices[rank]])

    def _add_up(self, inputs: Sequence[torch.Tensor], out: torch.Tensor, op: str) -> None:
        """out <- the inputs of all ranks. This rank's is in `out`, too: from there it is a quarter faster."""
        me = self._group.index
        if me < 2:  # else `combine` would overwrite `out` too early
            inputs = [*inputs[:me], out, *inputs[me + 1 :]]
        combine(inputs, out, op)

    def broadcast(self, data: torch.Tensor, src: int, signature: Signature) -> None:
        """The uint8 `data` of rank `src` replaces that of the other ranks; equally long on every rank."""
        me = self._group.index
        for start in range(0, max(data.numel(), 1), self._stage_bytes):
            piece = data[start : start + self._stage_bytes]
            stage = self._halves[self._next_half()][src][: piece.numel()]
            if me == src:
                stage.copy_(piece)
            self._meet(signature if start == 0 else None)
            if me != src:
                piece.copy_(stage)

    def all_gather(self, data: torch.Tensor, signature: Signature) -> list[torch.Tensor]:
        """The uint8 `data` of all ranks, in rank order; of any length on each rank."""
        return self._deal([data], self._stage_bytes, 0, signature)

    def start_exchange(self, data: bytes, signature: Signature) -> Callable[[Meanwhile], list[bytes]]:
        """Give all ranks the `data` of all, in rank order; of any length on each rank. As all_gather, without tensors.

        Returns what waits for the other ranks, before any other collective. Its argument: see `Channel`.
        """
        room, stages = self._stage_bytes, self._bytes[self._next_half()]
        first = data[:room]
        stages[self._group.index][: len(first)] = first
        self._announce(signature, [len(data)])
        return partial(self._finish_exchange, stages, data, signature)

    def _finish_exchange(
        self, stages: Sequence[memoryview], data: bytes, signature: Signature, meanwhile: Meanwhile
    ) -> list[bytes]:
        room, self._channel.meanwhile = self._stage_bytes, meanwhile
        try:
            self._channel.gather()
        finally:
            self._channel.meanwhile = None
        sizes = [row[0] for row in self._compare(signature, 1)]
        gathered = [bytes(stage[: min(size, room)]) for stage, size in zip(stages, sizes, strict=True)]
        if max(sizes) <= room:
            return gathered
        rests = self.all_gather(tensor_of(data[room:]), signature)
        return [start + rest.numpy().tobytes() for start, rest in zip(gathered, rests, strict=True)]

    def all_to_all(self, pieces: Sequence[torch.Tensor], signature: Signature) -> list[torch.Tensor]:
        """Send the uint8 `pieces[r]`, of any length, to rank r. Returns what each rank sent to this rank."""
        return self._deal(pieces, self._share_bytes, self._group.index, signature)

    def _deal(self, pieces: Sequence[torch.Tensor], share: int, taken: int, signature: Signature) -> list[torch.Tensor]:
        """Every rank has `share` bytes of its stage for each of its pieces. Returns piece `taken` of each rank."""
        me = self._group.index
        received: list[torch.Tensor] = []
        num_turns, turn = 1, 0
        while turn < num_turns:
            stages = self._halves[self._next_half()]
            for number, data in enumerate(pieces):
                part = data[turn * share : (turn + 1) * share]
                stages[me][number * share : number * share + part.numel()].copy_(part)
            if turn == 0:
                sizes = self._meet(signature, [data.numel() for data in pieces])
                received = [torch.empty(row[taken], dtype=torch.uint8, device="cpu") for row in sizes]
                num_turns = max(1, math.ceil(max(map(max, sizes)) / share))
            else:
                self._meet(None)
            for stage, target in zip(stages, received, strict=True):
                part = target[turn * share : (turn + 1) * share]
                part.copy_(stage[taken * share : taken * share + part.numel()])
            turn += 1
        return received

    def barrier(self, signature: Signature) -> None:
        self._next_half()
        self._meet(signature)

    def close(self) -> None:
        """Nothing to release: the memory is freed with the last tensor that views it."""

    def _next_half(self) -> int:
        """Begin a turn. Returns which half of the staging buffers it uses."""
        self._num_turns += 1
        return self._num_turns & 1

    def _stages(self, dtype: torch.dtype, numel: int) -> list[torch.Tensor]:
        """Begin a turn. Returns the first `numel` elements of the stages of all ranks."""
        key = dtype, numel, self._next_half()
        if (known := self._views.get(key)) is None:
            if len(self._views) == _KEPT_VIEWS:
                self._views.clear()
            known = self._views[key] = [stage.view(dtype)[:numel] for stage in self._halves[key[2]]]
        return known

    def _meet(self, signature: Signature | None, sizes: Sequence[int] = ()) -> list[list[int]]:
        """Barrier. With a signature, also compare it with those of all ranks, and return the `sizes` of all ranks."""
        if signature is None:
            self._channel.barrier()
            return []
        self._announce(signature, sizes)
        self._channel.gather()
        return self._compare(signature, len(sizes))

    def _announce(self, signature: Signature, sizes: Sequence[int]) -> None:
        half = self._num_turns & 1
        mine, first = self._words[self._group.index], half * self._num_words
        if self._written[half] is not signature:
            start = half * Signature.MAX_BYTES
            mine[first] = signature.checksum
            self._texts[self._group.index][start : start + Signature.MAX_BYTES] = signature.text
            self._written[half] = signature
        for i, size in enumerate(sizes, start=first + 1):
            mine[i] = size
        self._channel.announce()

    def _compare(self, signature: Signature, num_sizes: int) -> list[list[int]]:
        half = self._num_turns & 1
        first, start = half * self._num_words, half * Signature.MAX_BYTES
        for index, words in enumerate(self._words):
            if words[first] != signature.checksum:
                theirs = bytes(self._texts[index][start : start + Signature.MAX_BYTES])
                raise mismatch(self._group.rank, signature, self._group.ranks[index], theirs)
        return [words[first + 1 : first + 1 + num_sizes].tolist() for words in self._words] if num_sizes else []
