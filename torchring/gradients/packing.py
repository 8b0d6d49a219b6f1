"""Copies a bucket's gradients to its wire buffer and back, on the thread of backward.

A copy on the host is done when the call returns. `devices/packing.py` copies in a stream of a device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, Protocol, TypeVar

import torch

from torchring.allreduce.contract import first_non_finite
from torchring.allreduce.native import NativeWire
from torchring.gradients.plan import BucketPlan
from torchring.kernels import reference

_T = TypeVar("_T")
# A gradient of this size or more is copied the moment it arrives: it is still in cache, and its memory goes straight
# back to the allocator for the next gradient. Smaller gradients are only counted, and copied by one call per bucket: a
# call each would cost more than the copy. (42 M parameters in 4 MiB tensors: 232 ms against 346 copied at the end; 802
# tensors of 4 KiB: 40 against 50 copied on arrival.)
COPY_ON_ARRIVAL_BYTES: Final = 256 * 1024
_PIECE_BYTES: Final = 4 << 20  # is still in the last cache for the look that follows the copy


class Packing(Protocol):
    """The copies of one bucket.

    Attributes:
        is_asynchronous: whether a stream of a device makes the copies, after the calls have returned.
        takes_once: whether a gradient that has been copied on arrival may not grow any more in this reduction.
    """

    is_asynchronous: bool
    takes_once: bool

    def pack(
        self, slots: Sequence[int], grads: Sequence[torch.Tensor], views: Sequence[torch.Tensor], factor: float = 1.0
    ) -> None:
        """views[i] <- cast(grads[i] * scale * factor). views[i] is the place of slot slots[i] in the wire buffer.

        Raises RuntimeError, ValueError or TypeError for gradients that do not fit.
        """

    def scale_in_place(self, slots: Sequence[int], views: Sequence[torch.Tensor], factor: float = 1.0) -> None:
        """views[i] <- views[i] * scale * factor, as `pack`, for gradients that were accumulated in the wire buffer."""

    def finish_packing(self, factor: float = 1.0) -> None:
        """Every gradient of the bucket is packed. What the all-reduce starts now comes after the copies.

        Args:
            factor: by which the wire buffer has been multiplied since.
        """

    def unpack(self, slots: Sequence[int], views: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> None:
        """grads[i] <- cast(views[i])."""

    def undo(self) -> None:
        """The reduction was aborted before the bucket has left: gradients in the wire buffer are unscaled again."""

    def reset(self) -> None:
        """The reduction is over, or was aborted, maybe between `pack` and `finish_packing`."""


class HostPacking:
    """See `Packing`. Without a scale, torch alone checks the shapes."""

    is_asynchronous = False
    takes_once = False

    def __init__(self, scale: float) -> None:
        self._scale = scale

    def pack(
        self, slots: Sequence[int], grads: Sequence[torch.Tensor], views: Sequence[torch.Tensor], factor: float = 1.0
    ) -> None:
        scale = self._scale * factor
        if scale == 1.0:
            torch._foreach_copy_(list(views), list(grads))
        else:
            reference.pack(grads, views, scale=scale)

    def scale_in_place(self, slots: Sequence[int], views: Sequence[torch.Tensor], factor: float = 1.0) -> None: ...

    def finish_packing(self, factor: float = 1.0) -> None: ...

    def unpack(self, slots: Sequence[int], views: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> None:
        reference.unpack(views, grads)

    def undo(self) -> None: ...

    def reset(self) -> None: ...


class MarkingPacking(HostPacking):
    """Scales gradients while it copies them, and looks at them while they are in cache: nobody does so after the sum.

    Where the squares of values have a finite sum, every value is below 2e19 in fp32, and no sum over ranks overflows.
    Otherwise the wire is marked, so that all ranks look at the result. Large gradients are scaled when they are copied.
    Small ones lie side by side, and are scaled together when the bucket is full.

    Args:
        scale: see `Packing`.
        plan: the bucket's. The wire has the dtype of the gradients.
        wire: is marked.
    """

    takes_once = True

    def __init__(self, scale: float, plan: BucketPlan, wire: NativeWire) -> None:
        super().__init__(1.0)
        self._factor = scale
        self._wire = wire
        self._slots = plan.slots
        self._gradients = wire.tensor
        self._piece = _PIECE_BYTES // plan.wire_dtype.itemsize
        self._are_large = [slot.numel * plan.wire_dtype.itemsize >= COPY_ON_ARRIVAL_BYTES for slot in plan.slots]
        self._runs: list[tuple[int, int]] = []  # of small gradients: begin and end
        ends = [slot.offset for slot in plan.slots[1:]] + [plan.numel]
        for slot, end, is_large in zip(plan.slots, ends, self._are_large, strict=True):
            if not is_large:
                begin = self._runs.pop()[0] if self._runs and self._runs[-1][1] == slot.offset else slot.offset
                self._runs.append((begin, end))
        self._scaled: list[tuple[int, int]] = []  # in this reduction

    def pack(
        self, slots: Sequence[int], grads: Sequence[torch.Tensor], views: Sequence[torch.Tensor], factor: float = 1.0
    ) -> None:
        large = [i for i, slot in enumerate(slots) if self._are_large[slot]]
        for i in large:
            grad, view, place = grads[i], views[i], self._slots[slots[i]]
            if grad.stride() == view.stride() and grad.dtype == view.dtype and grad.shape == view.shape:
                self._scale_piecewise(grad.as_strided((place.numel,), (1,)), place.offset)
            else:
                reference.pack([grad], [view])
                self.scale_in_place((slots[i],), (view,))
        if len(large) < len(slots):
            super().pack(slots, without(grads, large), without(views, large))

    def scale_in_place(self, slots: Sequence[int], views: Sequence[torch.Tensor], factor: float = 1.0) -> None:
        for slot in slots:
            if self._are_large[slot]:
                place = self._slots[slot]
                self._scale_piecewise(self._gradients[place.offset : place.offset + place.numel], place.offset)

    def finish_packing(self, factor: float = 1.0) -> None:
        for begin, end in self._runs:
            self._scale_piecewise(self._gradients[begin:end], begin)
        if factor != 1.0:
            self._look(self._gradients, 0)

    def undo(self) -> None:
        for begin, end in self._scaled:
            self._gradients[begin:end].div_(self._factor)
        self._scaled = []

    def reset(self) -> None:
        self._scaled = []
        self._wire.clear()

    def _scale_piecewise(self, values: torch.Tensor, offset: int) -> None:
        """Place the scaled values at `offset` in the wire buffer, and look at them."""
        begin = offset
        places = torch.split(self._gradients[offset : offset + len(values)], self._piece)
        for piece, place in zip(torch.split(values, self._piece), places, strict=True):
            torch.mul(piece, self._factor, out=place)
            self._scaled.append((begin, begin + len(piece)))
            self._look(place, begin)
            begin += self._piece

    def _look(self, values: torch.Tensor, offset: int) -> None:
        if not math.isfinite(torch.dot(values, values)):  # 64 MiB in cache: 1.4 ms, its extremes 2.5
            element = first_non_finite(values)
            self._wire.mark(None if element is None else offset + element)


def without(items: Sequence[_T], odd: Sequence[int]) -> list[_T]:
    return [item for i, item in enumerate(items) if i not in odd] if odd else list(items)
