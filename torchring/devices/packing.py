"""Copies a bucket's gradients to its wire buffer and back, in streams of a device.

One kernel copies a whole bucket on a stream of its own, after the streams that computed the gradients. The stream that
reduces waits for the copy. Results are copied back on the current stream, which waits until the bucket is reduced.

      compute        ... gradients of bucket 0 ... gradients of bucket 1 [wait a] ... gradients of bucket 2 [wait b] ...
      packing             [follow] pack 0 [mark a]      [follow] pack 1 [mark b]        [follow] pack 2 [mark c]
      communication               [wait a] reduce 0 ............. [wait b] reduce 1 ................

A gradient's memory goes back to the allocator one bucket later (see `UnreadGradients`): so beside the wire buffers
there are the gradients of the bucket that fills, and those of one that is packed. On the communication stream, packing
would wait for the buckets before it. Then the computation would have to wait for them, too, or keep all gradients.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from torchring.accelerators import Accelerator, Mark, Stream
from torchring.devices.cuda import span
from torchring.gradients.packing import without
from torchring.gradients.plan import BucketPlan
from torchring.kernels import reference
from torchring.kernels.chunks import ChunkTable, layout
from torchring.kernels.pack import prepare_pack
from torchring.kernels.unpack import prepare_unpack

_MOST_TABLES: Final = 16  # of one bucket; a bucket needs one table for each set of parameters that a step reaches


class UnreadGradients:
    """Keeps gradients, of all buckets, that a stream packs until their memory may be used again.

    A gradient's memory belongs to the stream on which the gradient was allocated. As soon as nobody refers to the
    gradient, that stream's later work gets the memory, maybe before the packing stream has read it. So first the
    packing must have been done (the mark is reached), or that stream must have been told to wait for the mark.

    Which stream is it? The stream that was current when the gradient was accumulated: either the gradient was allocated
    there, or autograd has called `record_stream` for that stream (torch/csrc/autograd/input_buffer.cpp), so that the
    allocator itself waits for what is now in that stream. If all gradients of a pack are the current stream's, the
    current stream waits for the mark. If there were several streams, the gradients stay until the mark is reached.

    Waiting costs the current stream nothing: it has computed another bucket since, and packing, which is a matter of
    microseconds, waits for no bucket.
    """

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._kept: deque[tuple[dict[int, torch.Tensor], Mark, frozenset[object]]] = deque()

    def keep(self, gradients: dict[int, torch.Tensor], mark: Mark, streams: frozenset[object]) -> None:
        """Keep what is in `gradients` until it is released. At `mark`, the gradients of `streams` have been read."""
        self._kept.append((gradients, mark, streams))

    def release(self) -> None:
        """Empty the dictionaries of gradients that may be overwritten by the current stream's later work."""
        current = frozenset((self._accelerator.current_stream(),))
        while self._kept:
            gradients, mark, streams = self._kept[0]
            if gradients and not mark.is_reached():
                if streams != current:
                    return
                mark.hold_current()
            gradients.clear()
            self._kept.popleft()


@dataclass
class _Part:
    """A set of slots that were packed together, and the launches that were prepared for the set."""

    table: ChunkTable
    pack: Callable[[Sequence[torch.Tensor]], None] | None = None
    pack_key: tuple[float, torch.dtype] | None = None  # the scale and the gradients' dtype for which `pack` is
    unpack: Callable[[Sequence[torch.Tensor]], None] | None = None
    unpack_key: torch.dtype | None = None


class DevicePacking:
    """See `Packing`.

    Args:
        scale: applied before the cast.
        plan: the bucket's.
        wire: the wire buffer, on the accelerator's device.
        found: int32[1]; the kernel writes the first chunk with a NaN or an infinity here, see `kernels.pack`.
        stream: where buckets are packed.
        reduction_stream: where the bucket is reduced. Waits for the copies.
        unread: keeps the gradients of all buckets that are packed in `stream`.
    """

    is_asynchronous = True
    takes_once = False

    def __init__(
        self,
        scale: float,
        plan: BucketPlan,
        wire: torch.Tensor,
        found: torch.Tensor,
        stream: Stream,
        accelerator: Accelerator,
        *,
        reduction_stream: Stream,
        unread: UnreadGradients,
    ) -> None:
        self._plan = plan
        self._wire = wire
        self._found = found
        self._scale = scale
        self._stream = stream
        self._reduction_stream = reduction_stream
        self._accelerator = accelerator
        self._producers: set[object] = set()  # streams that computed gradients
        self._has_followed = False
        self._mark: Mark | None = None  # after the last copy of this reduction
        self._unread = unread
        self._held: list[dict[int, torch.Tensor]] = []  # by slot, for each copy: see `UnreadGradients`
        self._tables: dict[tuple[int, ...], _Part] = {}  # the one that was used last at the end
        self._packed: list[tuple[Sequence[int], ChunkTable]] = []
        self._name = f"torchring.pack bucket {plan.index}, {plan.num_bytes / 2**20:.2f} MiB"

    def follow_current_stream(self) -> None:
        self._producers.add(self._accelerator.current_stream())

    def pack(
        self, slots: Sequence[int], grads: Sequence[torch.Tensor], views: Sequence[torch.Tensor], factor: float = 1.0
    ) -> None:
        self._unread.release()
        try:
            self._launch_pack(slots, grads, views, factor)
        except ValueError:  # by the table, before anything was launched
            odd = _odd(grads, views)
            if not odd:
                raise
            reference.pack([grads[i] for i in odd], [views[i] for i in odd], scale=self._scale * factor)
            self._launch_pack(without(slots, odd), without(grads, odd), without(views, odd), factor)

    def _launch_pack(
        self, slots: Sequence[int], grads: Sequence[torch.Tensor], views: Sequence[torch.Tensor], factor: float
    ) -> None:
        streams = self._follow()
        if not slots:
            return
        key, scale = (factor, grads[0].dtype), self._scale * factor

        def launch() -> None:
            part = self._part(slots, views)
            if part.pack is None or part.pack_key != key:
                part.pack = prepare_pack(self._wire, part.table, key[1], scale=scale, found=self._found)
                part.pack_key = key
            part.pack(grads)
            self._packed.append((slots, part.table))

        with span(self._name):
            self._stream.run(launch)
        self._mark = self._stream.mark()
        self._held.append(dict(zip(slots, grads, strict=True)))
        self._unread.keep(self._held[-1], self._mark, streams)

    def scale_in_place(self, slots: Sequence[int], views: Sequence[torch.Tensor], factor: float = 1.0) -> None:
        if (scale := self._scale * factor) != 1.0:
            torch._foreach_mul_(list(views), scale)
            self.follow_current_stream()

    def finish_packing(self, factor: float = 1.0) -> None:
        if self._producers or not self._has_followed:  # the last gradients were accumulated in place, or zeroed
            self._follow()
        self._has_followed = False
        mark = self._mark or self._stream.mark()
        self._reduction_stream.run(mark.hold_current)
        self._mark = None

    def unpack(self, slots: Sequence[int], views: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> None:
        try:
            self._launch_unpack(slots, views, grads)
        except ValueError:
            odd = _odd(grads, views)
            if not odd:
                raise
            reference.unpack([views[i] for i in odd], [grads[i] for i in odd])
            self._launch_unpack(without(slots, odd), without(views, odd), without(grads, odd))

    def _launch_unpack(
        self, slots: Sequence[int], views: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]
    ) -> None:
        if not slots:
            return
        with span(self._name.replace("pack", "unpack", 1)):
            part = self._part(slots, views)
            if part.unpack is None or part.unpack_key != grads[0].dtype:
                part.unpack = prepare_unpack(self._wire, part.table, grads[0].dtype)
                part.unpack_key = grads[0].dtype
            part.unpack(grads)

    def original(self, slot: int) -> torch.Tensor | None:
        return next((held[slot] for held in reversed(self._held) if slot in held), None)

    def release(self) -> None:
        self._unread.release()  # the current stream waits for the bucket, but maybe not the one that owns the memory
        self._held.clear()

    def undo(self) -> None: ...

    def reset(self) -> None:
        self._has_followed = False
        self._mark = None

    def _follow(self) -> frozenset[object]:
        """Have the packing stream wait for the gradients. Returns the streams that computed the gradients."""
        current = self._accelerator.current_stream()
        streams = frozenset((*self._producers, current))
        self._stream.follow(self._producers - {current})
        self._producers.clear()
        self._has_followed = True
        self._mark = None
        return streams

    def take_packed(self) -> list[tuple[Sequence[int], ChunkTable]]:
        """The tables that were packed since the last call, for `slots_of`."""
        packed, self._packed = self._packed, []
        return packed

    def _part(self, slots: Sequence[int], views: Sequence[torch.Tensor]) -> _Part:
        """The table for these slots, and its launches. Steps that reach all parameters share one table.

        A new table is filled on the current stream, which will launch what reads the table. `take_packed` hands tables
        out to whoever waits for the device, so a table that is forgotten here stays alive while kernels read it.
        """
        key = tuple(slots)
        part = self._tables.pop(key, None)
        if part is None:
            if len(self._tables) >= _MOST_TABLES:
                del self._tables[next(iter(self._tables))]  # the one that was not used for longest
            places = [self._plan.slots[slot] for slot in slots]
            table = ChunkTable(
                [place.numel for place in places],
                [place.offset for place in places],
                wire_dtype=self._wire.dtype,
                device=self._wire.device,
                layouts=[layout(view) for view in views],
            )
            part = _Part(table)
        self._tables[key] = part
        return part


def slots_of(packed: Sequence[tuple[Sequence[int], ChunkTable]], chunk: int) -> list[int]:
    """The slots that a chunk may belong to: one for each call that packed a part of the bucket."""
    return [slots[table.tensor_of(chunk)] for slots, table in packed if chunk < table.num_chunks]


def _odd(grads: Sequence[torch.Tensor], views: Sequence[torch.Tensor]) -> list[int]:
    """Gradients that are not laid out like their place in the wire: kernels copy in memory order, torch by index."""
    return [i for i, (grad, view) in enumerate(zip(grads, views, strict=True)) if layout(grad) != layout(view)]
