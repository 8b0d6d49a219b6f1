"""Copies a bucket's gradients to its wire buffer and back, on the thread of backward."""

import math
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple, TypeVar

import torch

from torchring.gradients.plan import BucketPlan, Slot
from torchring.gradients.views import CAN_SWAP
from torchring.kernels import reference

_T = TypeVar("_T")
# A gradient of this size or more is copied the moment it arrives: it is still in cache, and its memory goes straight
# back to the allocator for the next gradient. Smaller gradients are only counted, and copied by one call per bucket: a
# call each would cost more than the copy. (42 M parameters in 4 MiB tensors: 232 ms against 346 copied at the end; 802
# tensors of 4 KiB: 40 against 50 copied on arrival.)
COPY_ON_ARRIVAL_BYTES: Final = 256 * 1024
_PIECE_BYTES: Final = 4 << 20  # is still in the last cache for the look that follows the copy


class Suspect(NamedTuple):
    """A value for whose sake a result may be not finite. element: of the first NaN or infinity nearby, if it is one."""

    plan: BucketPlan
    element: int | None


class Packing:
    """The copies of one bucket. They scale gradients, and look for NaN, infinity, and sums that may overflow.

    Looks at gradients while they are in cache. Where the squares of values have a finite sum, every value is below 2e19
    in fp32, and no sum over ranks overflows. Values of 16 bits are looked at by their extremes. Large gradients are
    scaled when they arrive, but for what this rank adds up (`places.InWire`). Small ones lie side by side, and are
    scaled together when the bucket is full. On a device, `DevicePacking` overrides all of this.

    Args:
        scale: what every gradient is multiplied by, before it is cast.
        plan: the bucket's.
        wire: the wire buffer.
        num_ranks: how many add up.
        suspects: gets what is found.
    """

    is_asynchronous = False  # whether a stream of a device makes the copies, after the calls have returned

    def __init__(
        self, scale: float, plan: BucketPlan, wire: torch.Tensor, num_ranks: int, suspects: list[Suspect]
    ) -> None:
        self.scale = scale
        self._plan = plan
        self._wire = wire
        self._suspects = suspects
        self._casts = not lives_in_wire(plan)
        self._piece = _PIECE_BYTES // wire.itemsize
        self._limit = torch.finfo(wire.dtype).max / num_ranks / 2 if wire.itemsize == 2 else 0.0
        self._are_large = [not self._casts and is_large(plan, slot) for slot in plan.slots]
        runs: list[tuple[int, int]] = []  # begin and end of what is looked at when the bucket is full
        ends = [slot.offset for slot in plan.slots[1:]] + [plan.numel]
        for slot, end, large in zip(plan.slots, ends, self._are_large, strict=True):
            if not large:
                begin = runs.pop()[0] if runs and runs[-1][1] == slot.offset else slot.offset
                runs.append((begin, end))
        self._runs = [(i, wire[i : min(end, i + self._piece)]) for a, end in runs for i in range(a, end, self._piece)]
        self._scaled: list[tuple[torch.Tensor, float]] = []  # in this reduction

    def pack(
        self, slots: Sequence[int], grads: Sequence[torch.Tensor], views: Sequence[torch.Tensor], factor: float
    ) -> None:
        """views[i] <- cast(grads[i] * scale * factor). views[i] is the place of slot slots[i] in the wire buffer.

        Raises RuntimeError, ValueError or TypeError for gradients that do not fit.
        """
        if self._casts:
            reference.pack(grads, views, scale=self.scale * factor)
            return
        large = [i for i, slot in enumerate(slots) if self._are_large[slot]]
        for i in large:
            grad, view, place = grads[i], views[i], self._plan.slots[slots[i]]
            if not (grad.stride() == view.stride() and grad.dtype == view.dtype and grad.shape == view.shape):
                reference.pack([grad], [view])
                self.scale_in_place((slots[i],), (view,), factor)
                continue
            for offset, piece, target in self.pieces(grad.as_strided((place.numel,), (1,)), place.offset):
                self.look(piece, offset, self.scale * factor, target)
        if not large:
            torch._foreach_copy_(list(views), list(grads))
        elif len(large) < len(slots):
            torch._foreach_copy_(without(views, large), without(grads, large))

    def pieces(self, values: torch.Tensor, offset: int) -> Iterable[tuple[int, torch.Tensor, torch.Tensor]]:
        """Cut what goes to `offset` in the wire buffer. Returns (offset, values, place in the wire) of each piece."""
        offsets = range(offset, offset + len(values), self._piece)
        places = torch.split(self._wire[offset : offset + len(values)], self._piece)
        return zip(offsets, torch.split(values, self._piece), places, strict=False)  # of nothing there is one piece

    def look(self, values: torch.Tensor, offset: int, scale: float = 1.0, target: torch.Tensor | None = None) -> None:
        """Find what is not finite, or may not be in the sum. Times `scale`, the values go to `offset` in the wire.

        If `target` is given, it is that place, and the scaled values are put there first.
        """
        if target is not None:
            torch.mul(values, scale, out=target)
            self._scaled.append((target, scale))
            values, scale = target, 1.0
        if self._limit and len(values):
            least, most = values.aminmax()  # a NaN is both extremes
            is_fine = -self._limit <= least.item() * scale and most.item() * scale <= self._limit
        else:
            is_fine = math.isfinite(torch.dot(values, values))  # 64 MiB in cache: 1.4 ms, its extremes 2.5
        if not is_fine:
            element = first_non_finite(values)
            self._suspects.append(Suspect(self._plan, None if element is None else offset + element))

    def scale_in_place(self, slots: Sequence[int], views: Sequence[torch.Tensor], factor: float) -> None:
        """views[i] <- views[i] * scale * factor, as `pack`, for gradients that were accumulated in the wire buffer."""
        for place in (self._plan.slots[slot] for slot in slots if self._are_large[slot]):
            for offset, piece, target in self.pieces(
                self._wire[place.offset : place.offset + place.numel], place.offset
            ):
                self.look(piece, offset, self.scale * factor, target)

    def finish_packing(self, factor: float) -> None:
        """Every gradient of the bucket is packed. What the all-reduce starts now comes after the copies."""
        scale = 1.0 if self._casts else self.scale * factor
        for offset, run in self._runs:
            self.look(run, offset, scale, run if scale != 1.0 else None)

    def unpack(self, slots: Sequence[int], views: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> None:
        """grads[i] <- cast(views[i])."""
        reference.unpack(views, grads)

    def undo(self) -> None:
        """The reduction was aborted before the bucket has left: gradients in the wire buffer are unscaled again."""
        for place, scale in self._scaled:
            if scale:
                place.div_(scale)
        self._scaled.clear()

    def reset(self) -> None:
        """The reduction is over, or was aborted, maybe between `pack` and `finish_packing`."""
        self._scaled.clear()


def slot_at(plan: BucketPlan, element: int) -> int:
    """The slot that holds that element of the wire buffer."""
    return max(i for i, slot in enumerate(plan.slots) if slot.offset <= element)


def lives_in_wire(plan: BucketPlan) -> bool:
    """Whether `.grad` becomes a view of the wire buffer."""
    return CAN_SWAP and plan.wire_dtype == plan.dtype


def is_large(plan: BucketPlan, slot: Slot) -> bool:
    """Whether a gradient on the host is copied when it arrives."""
    return slot.numel * plan.dtype.itemsize >= COPY_ON_ARRIVAL_BYTES


def is_finite(tensor: torch.Tensor) -> bool:
    """True if all values are finite. Takes one pass, and a second pass only if the sum of finite values overflows."""
    if tensor.dtype.itemsize > 2:
        return math.isfinite(tensor.sum()) or bool(torch.isfinite(tensor).all())
    # A sum of 16-bit values in fp32 takes 28 ms for 25 MiB, their extremes 1.5; of fp32 values, 0.7 and 1.0.
    return not tensor.numel() or all(map(math.isfinite, tensor.aminmax()))  # a NaN is both extremes


def first_non_finite(tensor: torch.Tensor) -> int | None:
    """Index of the first NaN or infinity."""
    return None if is_finite(tensor) else int((~torch.isfinite(tensor)).nonzero()[0])


def without(items: Sequence[_T], odd: Sequence[int]) -> list[_T]:
    return [item for i, item in enumerate(items) if i not in odd] if odd else list(items)
