"""Copies a bucket's gradients to its wire buffer and back, on the stream that computes.

One kernel copies a whole bucket, behind the kernel that computed the last gradient. The stream that reduces waits for
the copy. Results are copied back on the current stream, which waits for the reductions.

      compute        ... gradients of bucket 0 [pack 0] ... gradients of bucket 1 [pack 1] ... [wait] unpack
      communication                            [follow] reduce 0 ...... [follow] reduce 1 [mark]

A gradient's memory goes back to the allocator as soon as it is packed: what uses the memory next comes later in the
same stream. Gradients that other streams have computed are waited for, and their memory is kept until they are read
(`CudaAccelerator.join`).

Which streams are these? Those that were current when a gradient was accumulated: either the gradient was allocated
there, or autograd has called `record_stream` for that stream (torch/csrc/autograd/input_buffer.cpp), so that the
allocator itself waits for what is now in that stream.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from torchring.devices.cuda import span
from torchring.devices.stream import OnStream
from torchring.gradients.packing import Packing
from torchring.gradients.plan import BucketPlan
from torchring.gradients.views import as_real
from torchring.kernels.chunks import ChunkTable, layout
from torchring.kernels.pack import prepare_pack, prepare_unpack

_MOST_TABLES: Final = 16  # of one bucket; a bucket needs one table for each set of parameters that a step reaches


@dataclass
class _Part:
    """A set of slots that were packed together, and the launches that were prepared for the set."""

    table: ChunkTable
    pack: Callable[[Sequence[torch.Tensor]], None] | None = None
    pack_key: tuple[float, torch.dtype] | None = None  # the scale and the gradients' dtype for which `pack` is
    unpack: Callable[[Sequence[torch.Tensor]], None] | None = None
    unpack_key: torch.dtype | None = None


class DevicePacking(Packing):
    """On a device, see `Packing`."""

    is_asynchronous = True

    def __init__(
        self,
        scale: float,  # applied before the cast
        plan: BucketPlan,  # the bucket's
        wire: torch.Tensor,  # the wire buffer, on the accelerator's device
        # where the kernel reports what is not finite, or may overflow in the sum; see `kernels.pack`.
        found: torch.Tensor,
        num_ranks: int,  # over which the bucket is summed
        all_reduce: OnStream,  # reduces the bucket
        # those on which gradients were computed since the reduction began. Belongs to all buckets.
        streams: set[object],
    ) -> None:
        self._plan = plan
        self._wire = wire
        self._found = found
        self._num_ranks = num_ranks
        self._scale = scale
        self._all_reduce = all_reduce
        self._streams = streams
        self._tables: dict[tuple[int, ...], _Part] = {}  # the one that was used last at the end
        self._packed: list[tuple[Sequence[int], ChunkTable]] = []
        self._bucket = plan.index, plan.num_bytes / 2**20

    def pack(
        self, slots: Sequence[int], grads: Sequence[torch.Tensor], views: Sequence[torch.Tensor], factor: float = 1.0
    ) -> None:
        self._join(grads)
        try:
            self._launch_pack(slots, grads, views, factor)
        except ValueError:  # by the table, before anything was launched
            self._launch_pack(slots, _laid_out_as(views, grads), views, factor)

    def scale_in_place(self, slots: Sequence[int], views: Sequence[torch.Tensor], factor: float = 1.0) -> None:
        self._join(())
        places = list(map(as_real, views))
        self._launch_pack(slots, places, places, factor)

    def _join(self, grads: Sequence[torch.Tensor]) -> None:
        """The current stream waits for gradients of other streams, and for the last reduction in the wire."""
        self._all_reduce.hold_for_earlier()
        if others := self._streams - {self._all_reduce.accelerator.current_stream()}:
            self._all_reduce.accelerator.join(others, grads)

    def _launch_pack(
        self, slots: Sequence[int], grads: Sequence[torch.Tensor], views: Sequence[torch.Tensor], factor: float
    ) -> None:
        key = factor, grads[0].dtype
        with span("torchring.pack bucket {}, {:.2f} MiB", *self._bucket):
            part = self._part(slots, views)
            if part.pack is None or part.pack_key != key:
                scale, found, num_ranks = self._scale * factor, self._found, self._num_ranks
                part.pack = prepare_pack(self._wire, part.table, key[1], scale=scale, found=found, num_ranks=num_ranks)
                part.pack_key = key
            part.pack(grads)
        self._packed.append((slots, part.table))

    def finish_packing(self, factor: float = 1.0) -> None:
        self._all_reduce.stream.follow()

    def unpack(self, slots: Sequence[int], views: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> None:
        try:
            self._launch_unpack(slots, views, grads)
        except ValueError:
            alike = _laid_out_as(views, grads)
            self._launch_unpack(slots, views, alike)
            for grad, copy in zip(grads, alike, strict=True):
                if copy is not grad:
                    grad.copy_(copy)

    def _launch_unpack(
        self, slots: Sequence[int], views: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]
    ) -> None:
        with span("torchring.unpack bucket {}, {:.2f} MiB", *self._bucket):
            part = self._part(slots, views)
            if part.unpack is None or part.unpack_key != grads[0].dtype:
                part.unpack = prepare_unpack(self._wire, part.table, grads[0].dtype)
                part.unpack_key = grads[0].dtype
            part.unpack(grads)

    def undo(self) -> None: ...

    def reset(self) -> None: ...

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
                device=self._wire.device,
                layouts=[layout(view) for view in views],
            )
            part = _Part(table)
        self._tables[key] = part
        return part


def slots_of(packed: Sequence[tuple[Sequence[int], ChunkTable]], chunk: int) -> list[int]:
    """The slots that a chunk may belong to: one for each call that packed a part of the bucket."""
    return [slots[table.tensor_of(chunk)] for slots, table in packed if chunk < table.num_chunks]


def _laid_out_as(views: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients; copies of those that are not laid out like their views. Kernels copy in memory order."""
    return [
        grad
        if layout(grad) == layout(view) or grad.shape != view.shape
        else torch.empty_like(view, dtype=grad.dtype).copy_(grad)
        for grad, view in zip(grads, views, strict=True)
    ]
