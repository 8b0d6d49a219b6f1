"""Buckets whose gradients live in the wire buffer, where the wire has the gradients' own dtype.

Packing makes `p.grad` a view of the wire buffer, and `p.grad` holds the mean as soon as the buffer does. There are two
exceptions. A tensor that was in `.grad` before this backward, and that somebody else has, too, stays there, and gets a
copy of the result: a script may zero, clip or read its gradients through a tensor of its own. And of a large gradient
this rank scales its own slice when it is summed, in cache: until its bucket leaves, the gradient stays in `.grad`.
"""

import math
import operator
import weakref
from collections.abc import Container, Iterable, Sequence
from typing import Any

import torch

from torchring.allreduce.slices import SharedWire
from torchring.errors import GradientError
from torchring.gradients.bucket import Bucket, BucketState, kind_of
from torchring.gradients.ledger import LOCAL, GradientStatus, grad_of, version_of
from torchring.gradients.packing import is_large, lives_in_wire
from torchring.gradients.plan import BucketPlan
from torchring.gradients.reduction import Reduction
from torchring.gradients.views import as_real, move_out, place_of, referenced, referenced_beside_grad, storage_of


def open_bucket(plan: BucketPlan, *args: Any) -> Bucket:
    """A bucket with these arguments of `Bucket`."""
    return (InWire if lives_in_wire(plan) else Bucket)(plan, *args)


class InWire(Bucket):
    """A bucket whose gradients become views of the wire buffer."""

    is_in_wire = True

    def __init__(self, plan: BucketPlan, *args: Any) -> None:
        super().__init__(plan, *args)
        self._references = list(map(weakref.ref, self._views))
        self._addresses = [view.data_ptr() for view in self._views]
        self._storages = [storage_of(view) for view in self._views]
        self._matrices = [p for p, spec in zip(self.parameters, self._specs, strict=True) if len(spec.shape) > 1]
        self._strides = [spec.stride for spec in self._specs if len(spec.shape) > 1]
        # What is scaled when the sum reads it: of large gradients, the blocks of this rank's slice.
        self._deferred: dict[int, tuple[torch.Tensor, float, int]] = {}
        self._overwritten: list[int] = []
        self._own_blocks: dict[int, tuple[int, int, int, int]] = {}
        if isinstance(wire := self.wire, SharedWire):
            self._deferred, self._overwritten = wire.deferred, wire.overwritten
            large = ((i, slot) for i, slot in enumerate(plan.slots) if is_large(plan, slot))
            places = ((i, wire.blocks_within(slot.offset, slot.offset + slot.numel)) for i, slot in large)
            self._own_blocks = {i: blocks for i, blocks in places if blocks is not None}
        # In a reduction
        self._kept: dict[int, torch.Tensor] = {}  # copies of settled gradients, which the reduction overwrites
        self._left: dict[int, tuple[torch.Tensor, int]] = {}  # gradients that the sum reads, and their versions
        self._copied: dict[int, int] = {}  # of slots that were packed on arrival: the version of the view
        self._earlier: set[int] = set()  # slots with another tensor than the view in `.grad` before this backward
        self._restrided: set[int] = set()  # slots whose parameter has other strides than when it was wrapped
        # A view's version counts torchring's writes and the script's writes through `.grad`, but not the all-reduce's.
        self._versions: list[int] = []  # of all views, when the bucket was packed

    def begin(self, current: Reduction) -> None:
        self.reduction = current
        self._earlier = set()
        grads = list(map(grad_of, self.parameters))
        if not all(map(operator.is_, grads, self._views)):
            others = ((slot, grad) for slot, grad in enumerate(grads) if grad is not None)
            self._earlier = {slot for slot, grad in others if grad is not self._views[slot]}
        self._restrided = set()
        if list(map(torch.Tensor.stride, self._matrices)) != self._strides:
            pairs = enumerate(zip(self.parameters, self._specs, strict=True))
            self._restrided = {slot for slot, (parameter, spec) in pairs if parameter.stride() != spec.stride}

    def pack(self, slots: Sequence[int]) -> None:
        # Passes over all parameters are loops in C: these passes are most of what a small gradient costs.
        self._take_back_moved(slots)
        arrived = slots[0] if len(slots) == 1 else None  # and nobody may write to it any more
        views = [self._views[slot] for slot in slots]
        grads = [self.parameters[slot].grad for slot in slots]
        if any(map(operator.is_, grads, views)):  # accumulated in place
            there = [slot for slot, grad, view in zip(slots, grads, views, strict=True) if grad is view]
            self._refuse_shared(slots, grads, set(there))
            self.packing.scale_in_place(there, [self._views[slot] for slot in there], self.reduction.weight)
            slots = [slot for slot, grad, view in zip(slots, grads, views, strict=True) if grad is not view]
            views = [self._views[slot] for slot in slots]
            grads = [self.parameters[slot].grad for slot in slots]
        packed = [grad for grad in grads if grad is not None]
        if len(packed) < len(slots):
            raise self._unfit(slots)
        if packed:
            if self._earlier or self._restrided:
                self._keep_for_copying_back(slots)
            if kept := referenced(views, [self._storages[slot] for slot in slots]):
                self._move_out(kept, slots, views)
            try:
                if len(slots) > 1 or not self._leave(slots[0], packed[0], views[0]):
                    places = list(map(as_real, views)) if self._are_complex else views
                    self.packing.pack(slots, self._reals(packed), places, self.reduction.weight)
                    for slot, view in zip(slots, views, strict=True):
                        if slot not in self._packed:
                            self.parameters[slot].grad = view
            except (RuntimeError, TypeError, ValueError) as error:
                if any(map(_is_sparse, packed)):
                    raise self._unfit(slots) from None
                self._refuse_mismatch(slots, error)
                raise
        if arrived is not None:
            self._copied[arrived] = self._views[arrived]._version

    def release(self) -> None:
        views = list(self._views)
        if views and self.packing.is_asynchronous:  # one gradient would keep the memory of all wires, and of dead ranks
            self._move_out(referenced(views, self._storages), range(len(views)), views)
        super().release()

    def _keep(self, slots: Iterable[int]) -> None:
        self._take_back_moved(list(slots))
        for slot in slots:
            if (grad := self.parameters[slot].grad) is self._views[slot]:
                self._kept[slot] = grad.clone()

    def _zero(self, slots: Sequence[int]) -> None:
        self._keep_for_copying_back(slots)
        left = [slot for slot in slots if self.parameters[slot].grad is not self._views[slot]]
        views = [self._views[slot] for slot in left]
        if left and (kept := referenced(views, [self._storages[slot] for slot in left])):
            self._move_out(kept, left, views)
        del views
        super()._zero(slots)

    def _note_packed(self) -> None:
        for slot, version in self._copied.items():
            if self._views[slot]._version != version:
                self._lose_one(slot)
                raise self._written_to(slot)
        self._versions = list(map(version_of, self._views))

    def begin_reduce(self) -> None:
        for slot, (grad, version) in self._left.items():
            if self.parameters[slot].grad is not grad:
                raise self._taken(slot)
            if grad._version != version:
                raise self._written_to(slot)
            self._refuse_mismatch((slot,), "it was changed during backward()")
            self.parameters[slot].grad = self._views[slot]
        self._left = {}
        self._move(BucketState.REDUCING)

    def end_reduce(self) -> None:
        self._move(BucketState.REDUCED)
        if self._overwritten:
            before = [slot for slot, (first, *_) in self._own_blocks.items() if first <= self._overwritten[0]]
            raise self._written_to(max(before))

    def _hand_out(self, unused: set[int]) -> None:
        packed, scale = self._packed, self.reduction.scale
        self._refuse_touched()
        if scale != 1.0:
            self.wire.tensor.mul_(scale)
        for slot in self._missing:
            if slot in unused or slot in packed:
                continue
            if slot in self._restrided:
                self.parameters[slot].grad = grad = torch.empty_like(self.parameters[slot])
                packed[slot] = grad, grad._version
            else:
                self.parameters[slot].grad = self._views[slot]
        for slot in unused & self._kept.keys():
            self._views[slot].copy_(self._kept[slot])
            self.parameters[slot].grad = self._views[slot]
        owned = self._give_back(unused) if packed else {}
        if self._kept or packed or scale != 1.0:
            self._versions = list(map(version_of, self._views))
        self.ledger.settle_bucket(self._positions, self._references, self._versions)
        for slot, grad in owned.items():
            self.ledger.settle(self._first + slot, grad)

    def _lose(self) -> None:
        slots = [slot for slot, view in enumerate(self._views) if self.parameters[slot].grad is view]
        views = [self._views[slot] for slot in slots]
        kept = {slots[i] for i in referenced_beside_grad(views)} if views else set()
        super()._lose()
        for slot in slots:
            self.ledger.status[self._first + slot] = LOCAL
            view = self._views[slot]
            if not view.numel():
                continue
            if slot in kept and not self.packing.is_asynchronous:  # a tensor that somebody else has moves itself
                self._replace_view(slot, move_out(view, self.wire.tensor))
                view.fill_(math.nan)
                self.parameters[slot].grad = view
                self.ledger.status[self._first + slot] = GradientStatus.LOST
            else:
                self._lose_one(slot)

    def _undo(self) -> None:
        for slot, kept in self._kept.items():
            self._views[slot].copy_(kept)

    def _forget(self) -> None:
        self._kept, self._copied, self._left = {}, {}, {}
        self._deferred.clear()
        self._overwritten.clear()

    def _leave(self, slot: int, grad: torch.Tensor, view: torch.Tensor) -> bool:
        """Pack what other ranks read of a large gradient. This rank's slice is scaled when it is summed, in cache.

        The gradient stays in `.grad` until the bucket leaves. Returns False if it has to be packed as a whole.
        """
        if slot not in self._own_blocks or slot in self._packed:
            return False
        is_plain = type(grad) is torch.Tensor and not (grad._is_view() or grad.is_inference() or grad.is_complex())
        is_alike = (grad.shape, grad.stride(), grad.dtype) == (view.shape, view.stride(), view.dtype)
        if not (is_plain and is_alike):
            return False
        number, begin, end, step = self._own_blocks[slot]
        place, packing = self.plan.slots[slot], self.packing
        values, scale = grad.as_strided((place.numel,), (1,)), self.reduction.weight * packing.scale
        start, stop = begin - place.offset, end - place.offset
        for i, rest in ((0, values[:start]), (stop, values[stop:])):
            for offset, piece, target in packing.pieces(rest, place.offset + i):
                packing.look(piece, offset, scale, target)
        packing.look(values[start:stop], begin, scale)
        for i, piece in enumerate(torch.split(values[start:stop], step)):
            self._deferred[number + i] = piece, scale, grad._version
        self._left[slot] = grad, grad._version
        return True

    def _take_back_moved(self, slots: Sequence[int]) -> None:
        """Replace views whose memory the script has exchanged (`p.grad.data = ...`). Such a tensor is the script's.

        Raises GradientError if the parameter was converted (`model.double()`), which moves its gradient, too.
        """
        addresses = list(map(torch.Tensor.data_ptr, [self._views[slot] for slot in slots]))
        if addresses == [self._addresses[slot] for slot in slots]:
            return
        for slot, address in zip(slots, addresses, strict=True):
            if address == self._addresses[slot]:
                continue
            spec, offset = self._specs[slot], self.plan.slots[slot].offset
            if kind_of(self.parameters[slot]) != kind_of(spec):
                moved = f"its gradient, now {self._views[slot].dtype}, was moved out of torchring's buffer"
                raise self._mismatch(slot, moved)
            self._earlier.add(slot)
            place = place_of(self.wire.tensor, offset, spec.shape, spec.gradient_stride, spec.dtype, is_grad=True)
            self._replace_view(slot, place)

    def _replace_view(self, slot: int, view: torch.Tensor) -> None:
        self._views[slot] = view
        self._storages[slot] = storage_of(view)
        self._references[slot] = weakref.ref(view)

    def _move_out(self, kept: Sequence[int], slots: Sequence[int], views: list[torch.Tensor]) -> None:
        """Move gradients to a copy that the script still has, before `views` are overwritten. `kept`: their places."""
        for i in kept:
            slot = slots[i]
            if self._views[slot].numel():
                views[i] = move_out(views[i], self.wire.tensor)
                self._replace_view(slot, views[i])

    def _refuse_shared(self, slots: Sequence[int], grads: Sequence[torch.Tensor | None], there: Container[int]) -> None:
        """Raise GradientError if a gradient shares the memory of another one in the wire: it would be scaled twice."""
        for slot, grad in zip(slots, grads, strict=True):
            if slot not in there and grad is not None and not grad.is_sparse and storage_of(grad) in self._storages:
                raise self._wrong(slot, f"shares memory with that of another parameter; give {self.names[slot]} a copy")

    def _keep_for_copying_back(self, slots: Sequence[int]) -> None:
        """Find the gradients that stay in `.grad` for now, and that the results may have to be copied back to."""
        for slot in (self._earlier | self._restrided).intersection(slots):
            parameter = self.parameters[slot]
            grad = parameter.grad
            if grad is None or grad is self._views[slot] or grad.is_inference():
                continue
            # The first gradient of a backward comes before `begin`. If it is new, nobody has added to it.
            is_new = self._has_arrived[slot] and grad._version == 0
            if is_new and slot not in self._restrided:
                continue
            if kind_of(parameter) != kind_of(self._specs[slot]):
                raise self._mismatch(slot, f"{tuple(parameter.shape)}, {parameter.dtype} on {parameter.device}")
            self._packed[slot] = grad, grad._version

    def _give_back(self, unused: Container[int]) -> dict[int, torch.Tensor]:
        """Copy results to the tensors that were packed and that somebody else has. Views replace the other tensors.

        Returns the tensors that stay in `.grad`.
        """
        slots = list(self._packed)
        grads = [self._packed_gradient(slot) for slot in slots]
        owned = {slots[i] for i in referenced_beside_grad(grads)} | (self._restrided & self._packed.keys())
        for slot, grad in zip(slots, grads, strict=True):
            if slot not in owned:
                if slot in unused:
                    self._views[slot].copy_(grad)
                self.parameters[slot].grad = self._views[slot]
        if back := [slot for slot in slots if slot in owned and slot not in unused]:
            self._unpack(back)
        return {slot: grad for slot, grad in zip(slots, grads, strict=True) if slot in owned}

    def _refuse_touched(self) -> None:
        """Raise GradientError if the script took or changed one of the gradients that have arrived since then."""
        if not all(map(operator.is_, map(grad_of, self.parameters), self._views)):
            for slot, has_arrived in enumerate(self._has_arrived):
                if has_arrived and slot not in self._packed and self.parameters[slot].grad is not self._views[slot]:
                    raise self._taken(slot)
        versions = list(map(version_of, self._views))
        if versions != self._versions:
            pairs = enumerate(zip(versions, self._versions, strict=True))
            raise self._written_to(next(i for i, (now, then) in pairs if now != then))

    def _written_to(self, slot: int) -> GradientError:
        return self._wrong(
            slot,
            "was written to while it was being reduced. A hook that changes gradients must be registered before "
            "torchring.wrap, so that it runs before they leave",
        )


_is_sparse = operator.attrgetter("is_sparse")
