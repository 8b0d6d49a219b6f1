"""Copies a bucket's gradients to its wire buffer and back, on the thread of backward or in streams of a device.

On the host a copy is done when the call returns. On a device, one kernel copies a whole bucket on the communication
stream, after the streams that computed the gradients. Results are copied back on the current stream, which waits for
the reduction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol, TypeVar

import torch

from torchring.accelerators import Accelerator, Stream, span
from torchring.gradients.plan import BucketPlan
from torchring.kernels import ChunkTable, pack, reference, unpack
from torchring.kernels.chunks import layout

_T = TypeVar("_T")
_MOST_TABLES: Final = 16  # of one bucket; a bucket needs one table for each set of parameters that a step reaches


class Packing(Protocol):
    """The copies of one bucket.

    Attributes:
        is_asynchronous: whether a stream of a device makes the copies, after the calls have returned.
    """

    is_asynchronous: bool

    def follow_current_stream(self) -> None:
        """A gradient was computed on the current stream, so packing has to wait for that stream."""

    def pack(
        self, slots: Sequence[int], grads: Sequence[torch.Tensor], views: Sequence[torch.Tensor], factor: float = 1.0
    ) -> None:
        """views[i] <- cast(grads[i] * scale * factor). views[i] is the place of slot slots[i] in the wire buffer.

        Raises RuntimeError, ValueError or TypeError for gradients that do not fit.
        """

    def finish_packing(self) -> None:
        """Every gradient of the bucket is packed. What the mover starts now comes after the copies."""

    def unpack(self, slots: Sequence[int], views: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> None:
        """grads[i] <- cast(views[i])."""

    def original(self, slot: int) -> torch.Tensor | None:
        """The gradient that was packed in this round. None if none was packed, or it is not kept."""

    def release(self) -> None:
        """The bucket is reduced: let go of the gradients that were packed."""


class HostPacking:
    """See `Packing`. Without a scale, torch alone checks the shapes."""

    is_asynchronous = False

    def __init__(self, scale: float) -> None:
        self._scale = scale

    def follow_current_stream(self) -> None: ...

    def pack(
        self, slots: Sequence[int], grads: Sequence[torch.Tensor], views: Sequence[torch.Tensor], factor: float = 1.0
    ) -> None:
        scale = self._scale * factor
        if scale == 1.0:
            torch._foreach_copy_(list(views), list(grads))
        else:
            reference.pack(grads, views, scale=scale)

    def finish_packing(self) -> None: ...

    def unpack(self, slots: Sequence[int], views: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> None:
        reference.unpack(views, grads)

    def original(self, slot: int) -> torch.Tensor | None: ...

    def release(self) -> None: ...


class DevicePacking:
    """See `Packing`.

    Gradients are kept alive until the bucket is reduced. From then on the current stream waits for the communication
    stream, which has read the gradients, so the current stream may use their memory again. `record_stream` would hold
    the memory for longer.

    Args:
        scale: applied before the cast.
        plan: the bucket's.
        wire: the wire buffer, on the accelerator's device.
        found: int32[1]; the kernel writes the first chunk with a NaN or an infinity here, see `kernels.pack`.
        stream: where buckets are packed and reduced.
    """

    is_asynchronous = True

    def __init__(
        self,
        scale: float,
        plan: BucketPlan,
        wire: torch.Tensor,
        found: torch.Tensor,
        stream: Stream,
        accelerator: Accelerator,
    ) -> None:
        self._plan = plan
        self._wire = wire
        self._found = found
        self._scale = scale
        self._stream = stream
        self._accelerator = accelerator
        self._producers: set[object] = set()  # streams that computed gradients
        self._has_followed = False
        self._held: dict[int, torch.Tensor] = {}  # by slot: gradients that the communication stream still reads
        self._tables: dict[tuple[int, ...], ChunkTable] = {}
        self._packed: list[tuple[Sequence[int], ChunkTable]] = []
        self._name = f"torchring.pack bucket {plan.index}, {plan.num_bytes / 2**20:.2f} MiB"

    def follow_current_stream(self) -> None:
        self._producers.add(self._accelerator.current_stream())

    def pack(
        self, slots: Sequence[int], grads: Sequence[torch.Tensor], views: Sequence[torch.Tensor], factor: float = 1.0
    ) -> None:
        try:
            self._launch_pack(slots, grads, views, factor)
        except ValueError:  # by the table, before anything was launched
            odd = _odd(grads, views)
            if not odd:
                raise
            reference.pack([grads[i] for i in odd], [views[i] for i in odd], scale=self._scale * factor)
            self._held.update((slots[i], grads[i]) for i in odd)
            self._launch_pack(_without(slots, odd), _without(grads, odd), _without(views, odd), factor)

    def _launch_pack(
        self, slots: Sequence[int], grads: Sequence[torch.Tensor], views: Sequence[torch.Tensor], factor: float
    ) -> None:
        # The table comes first: its columns are filled on the current stream.
        table = self._table(slots, views) if slots else None
        self._follow()
        if table is None:
            return
        wire, found, scale = self._wire, self._found, self._scale * factor
        with span(self._name):
            self._stream.run(lambda: pack(grads, wire, table, scale=scale, found=found))
        self._held.update(zip(slots, grads, strict=True))
        self._packed.append((slots, table))

    def finish_packing(self) -> None:
        if not self._has_followed:  # nothing was packed: gradients were accumulated in place, or zeroed
            self._follow()
        self._has_followed = False

    def unpack(self, slots: Sequence[int], views: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> None:
        try:
            self._launch_unpack(slots, views, grads)
        except ValueError:
            odd = _odd(grads, views)
            if not odd:
                raise
            reference.unpack([views[i] for i in odd], [grads[i] for i in odd])
            self._launch_unpack(_without(slots, odd), _without(views, odd), _without(grads, odd))

    def _launch_unpack(
        self, slots: Sequence[int], views: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]
    ) -> None:
        if slots:
            with span(self._name.replace("pack", "unpack", 1)):
                unpack(self._wire, grads, self._table(slots, views))

    def original(self, slot: int) -> torch.Tensor | None:
        return self._held.get(slot)

    def release(self) -> None:
        self._held.clear()

    def _follow(self) -> None:
        """Have the communication stream wait for the gradients."""
        self._stream.follow(self._producers - {self._accelerator.current_stream()})
        self._producers.clear()
        self._has_followed = True

    def take_packed(self) -> list[tuple[Sequence[int], ChunkTable]]:
        """What was packed since the last call, for `slots_of`."""
        packed, self._packed = self._packed, []
        return packed

    def _table(self, slots: Sequence[int], views: Sequence[torch.Tensor]) -> ChunkTable:
        """The table for these slots. Steps that reach all parameters share one table."""
        key = tuple(slots)
        if key not in self._tables:
            if len(self._tables) >= _MOST_TABLES:
                self._tables.clear()
            places = [self._plan.slots[slot] for slot in slots]
            self._tables[key] = ChunkTable(
                [place.numel for place in places],
                [place.offset for place in places],
                wire_dtype=self._wire.dtype,
                device=self._wire.device,
                layouts=[layout(view) for view in views],
            )
        return self._tables[key]


def slots_of(packed: Sequence[tuple[Sequence[int], ChunkTable]], chunk: int) -> list[int]:
    """The slots that a chunk may belong to: one for each call that packed a part of the bucket."""
    return [slots[table.tensor_of(chunk)] for slots, table in packed if chunk < table.num_chunks]


def _odd(grads: Sequence[torch.Tensor], views: Sequence[torch.Tensor]) -> list[int]:
    """Gradients that are not laid out like their place in the wire: kernels copy in memory order, torch by index."""
    return [i for i, (grad, view) in enumerate(zip(grads, views, strict=True)) if layout(grad) != layout(view)]


def _without(items: Sequence[_T], odd: Sequence[int]) -> list[_T]:
    return [item for i, item in enumerate(items) if i not in odd]
