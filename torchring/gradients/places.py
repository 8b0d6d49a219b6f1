"""Where the gradients of a bucket are while ranks reduce them: in the wire buffer, or in tensors of their own.

`InWire`, where the wire has the gradients' own dtype: packing makes `p.grad` a view of the wire buffer, and `p.grad`
holds the mean as soon as the buffer does. `CopyBack`, where packing casts, and with PyTorch 2.11 (`views.CAN_SWAP`):
gradients stay in `.grad`, and results are copied back.

In a wire there are two exceptions. A tensor that was in `.grad` before this backward, and that somebody else has, too,
stays there, and gets a copy of the result: a script may zero, clip or read its gradients through a tensor of its own.
And of a large gradient this rank scales its own slice when it is summed, in cache: until its bucket leaves, the
gradient stays in `.grad`.
"""

from __future__ import annotations

import math
import operator
import weakref
from collections.abc import Callable, Container, Iterable, Sequence
from functools import partial

import torch

from torchring.allreduce import Wire
from torchring.allreduce.slices import SharedWire
from torchring.errors import GradientError
from torchring.gradients.ledger import LOCAL, GradientStatus, Ledger, grad_of, version_of
from torchring.gradients.packing import HostPacking, Packing, is_large
from torchring.gradients.plan import BucketPlan, ParameterSpec
from torchring.gradients.reduction import Reduction
from torchring.gradients.views import as_real, move_out, place_of, referenced, referenced_beside_grad, storage_of


class CopyBack:
    """Gradients that stay in `.grad`. For the thread that runs backward.

    Args:
        plan: the bucket's.
        wire: the wire buffer.
        specs, parameters: all of the optimizer's; the plan's slots are indices into both.
        packing: makes the copies.
        ledger: what is known about each gradient.

    Attributes:
        is_in_wire: whether packing makes `.grad` a view of the wire.
        names, parameters: one per slot.
        positions: of the bucket in the ledger.
        has_arrived: for each slot, whether its gradient has arrived in this reduction. The bucket writes to it.
    """

    is_in_wire = False

    def __init__(
        self,
        plan: BucketPlan,
        wire: Wire,
        specs: Sequence[ParameterSpec],
        parameters: Sequence[torch.nn.Parameter],
        packing: Packing,
        ledger: Ledger,
    ) -> None:
        self.ledger = ledger
        self.first = first = ledger.positions[plan.slots[0].parameter]
        self.positions = slice(first, first + len(plan.slots))
        self.names = [specs[slot.parameter].name for slot in plan.slots]
        self.parameters = [parameters[slot.parameter] for slot in plan.slots]
        self.has_arrived = [False] * len(plan.slots)
        self._plan = plan
        self._specs = [specs[slot.parameter] for slot in plan.slots]
        self._are_complex = any(spec.dtype.is_complex for spec in self._specs)
        self._wire = wire
        self._packing = packing
        # Each gradient's place in the wire. `referenced` counts references, so nothing else may refer to a view.
        self._views = [
            place_of(wire.tensor, slot.offset, spec.shape, spec.gradient_stride, spec.dtype, is_grad=self.is_in_wire)
            for slot, spec in zip(plan.slots, self._specs, strict=True)
        ]
        # In a reduction
        self._current = Reduction(0)
        # Of gradients that do not become views of the wire: the tensor that was packed, and its version.
        self._packed: dict[int, tuple[torch.Tensor, int]] = {}
        self._open(plan, wire, packing)

    def _open(self, plan: BucketPlan, wire: Wire, packing: Packing) -> None: ...

    def begin(self, current: Reduction) -> None:
        """A reduction begins. The first gradient of its backward may be there already."""
        self._current = current

    def pack(self, slots: Sequence[int]) -> None:
        """Copy these gradients to the wire. One alone may be large, and have arrived before the others."""
        grads = [grad for slot in slots if (grad := self.parameters[slot].grad) is not None]
        if len(grads) < len(slots) or any(map(_is_sparse, grads)):
            raise self._unfit(slots)
        if grads:
            self._refuse_mismatch(slots, "it was converted or reshaped")
            views = [self._views[slot] for slot in slots]
            self._packing.pack(slots, self._reals(grads), views, self._current.weight)
            self._packed |= {slot: (grad, grad._version) for slot, grad in zip(slots, grads, strict=True)}

    def keep(self, slots: Iterable[int]) -> None:
        """The gradients of these hold nothing new. If no rank has used them, they stay as they are."""

    def zero(self, slots: Sequence[int]) -> None:
        """These contribute zeros."""
        torch._foreach_zero_([self._views[slot] for slot in slots])

    def note_packed(self) -> None:
        """All are packed. Raises GradientError if somebody has written to a gradient since it was packed on arrival."""

    def leave(self) -> None:
        """The wire buffer goes to the all-reduce."""

    def land(self) -> None:
        """The wire buffer holds the result."""
        if arrived := [slot for slot, is_there in enumerate(self.has_arrived) if is_there]:
            self._unpack(arrived)

    def close(self, missing: Sequence[int], unused: set[int]) -> None:
        """Backward is about to return. This rank had none of the `missing` gradients, and no rank the `unused` ones."""
        handed_out = [slot for slot in missing if slot not in unused]
        for parameter in (self.parameters[slot] for slot in handed_out if slot not in self._packed):
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
        if handed_out:
            self._unpack(handed_out)
        if self._current.scale != 1.0:
            for slot in set(range(len(self.names))) - unused:
                grad = self.parameters[slot].grad
                assert grad is not None
                self.ledger.settle(self.first + slot, grad.mul_(self._current.scale))
        self.ledger.mark_reduced(self.positions, unused)

    def undo(self) -> None:
        """The reduction was aborted before the wire has left: what was kept is as it was, to the last bit."""

    def lose(self) -> None:
        """The reduction was aborted, and the wire is on its way. NaN takes the place of gradients that lie there."""
        for slot in self._packed:
            self.ledger.status[self.first + slot] = LOCAL

    def lose_one(self, slot: int) -> None:
        """The gradient in the wire is no gradient any more. NaN takes its place."""
        parameter = self.parameters[slot]
        parameter.grad = torch.full_like(parameter.detach(), math.nan)
        self.ledger.status[self.first + slot] = GradientStatus.LOST

    def reset(self) -> None:
        """The reduction is over, or was aborted."""
        self._packed = {}

    def release(self) -> None:
        """The wire buffer is about to be freed."""
        self._views.clear()
        del self._wire, self._packing

    def _unfit(self, slots: Sequence[int]) -> GradientError:
        """The error for a gradient that is missing, or sparse."""
        pairs = ((slot, self.parameters[slot].grad) for slot in slots)
        slot, grad = next((slot, grad) for slot, grad in pairs if grad is None or grad.is_sparse)
        if grad is None:
            return self._taken(slot)
        name = self.names[slot]
        return GradientError(
            f"{name} has a sparse gradient. torchring knows beforehand those of nn.Embedding and nn.EmbeddingBag "
            "in the model that torchring.wrap(optimizer, model) gets. Pass the model, or compute with sparse=False",
            parameters=(name,),
        )

    def _unpack(self, slots: Sequence[int]) -> None:
        grads = [self._packed_gradient(slot) for slot in slots]
        reals = self._reals(grads)
        self._packing.unpack(slots, self._reals([self._views[slot] for slot in slots]), reals)
        if self._are_complex or self._packing.is_asynchronous:
            for grad, real in zip(grads, reals, strict=True):
                if grad.is_conj() or grad.is_neg():  # `real` is a copy of such a gradient
                    grad.copy_(torch.view_as_complex(real) if grad.is_complex() else real)
        for slot, grad in zip(slots, grads, strict=True):
            self.ledger.settle(self.first + slot, grad)

    def _packed_gradient(self, slot: int) -> torch.Tensor:
        """The gradient that the result is to be copied to. Raises GradientError if the script has changed it since."""
        grad = self.parameters[slot].grad
        packed, version = self._packed.get(slot, (grad, -1))
        # Slices of one tensor have one version, which each of them changes.
        is_changed = grad is not None and version >= 0 and grad._version != version and not grad._is_view()
        if grad is None or grad is not packed or is_changed:
            raise self._taken(slot)
        return grad

    def _taken(self, slot: int) -> GradientError:
        """The error for a gradient that the script took away or changed during backward."""
        what = "was changed between its accumulation and its reduction; a hook that changes gradients must be "
        what += "registered before torchring.wrap, so that it runs before they leave"
        if self.parameters[slot].grad is None:
            what = "was taken away between its accumulation and its reduction, by a hook that steps an optimizer or "
            what += "moves .grad elsewhere (to main_grad). That would train on this rank's gradient alone. Leave it in "
            what += ".grad until backward() has returned, and step or copy after that"
        return self._wrong(slot, what)

    def _wrong(self, slot: int, what: str) -> GradientError:
        name = self.names[slot]
        return GradientError(f"the gradient of {name} {what}", bucket=self._plan.index, parameters=(name,))

    def _refuse_mismatch(self, slots: Sequence[int], why: object) -> None:
        """Raise GradientError if a parameter has another shape, dtype or device than when it was wrapped."""
        for slot in slots:
            if _kind(self.parameters[slot]) != _kind(self._specs[slot]):
                raise self._mismatch(slot, str(why)) from (why if isinstance(why, Exception) else None)

    def _mismatch(self, slot: int, why: str) -> GradientError:
        name = self.names[slot]
        return GradientError(
            f"{name} is not what it was when it was wrapped ({why}); convert or reshape a model first, then call "
            "torchring.wrap",
            parameters=(name,),
        )

    def _reals(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors as real numbers. A device copies bytes, so it gets no tensor with a negation still to be done."""
        if self._are_complex:
            tensors = list(map(as_real, tensors))
        if self._packing.is_asynchronous and any(map(torch.Tensor.is_neg, tensors)):
            tensors = list(map(torch.Tensor.resolve_neg, tensors))
        return tensors


class InWire(CopyBack):
    """Gradients that become views of the wire. See `CopyBack`, and the module for the exceptions."""

    is_in_wire = True

    def _open(self, plan: BucketPlan, wire: Wire, packing: Packing) -> None:
        self._references = list(map(weakref.ref, self._views))
        self._addresses = [view.data_ptr() for view in self._views]
        self._storages = [storage_of(view) for view in self._views]
        self._matrices = [p for p, spec in zip(self.parameters, self._specs, strict=True) if len(spec.shape) > 1]
        self._strides = [spec.stride for spec in self._specs if len(spec.shape) > 1]
        # What is scaled when the sum reads it: of large gradients, the blocks of this rank's slice.
        self._deferred: dict[int, Callable[..., object]] = {}
        self._own_blocks: dict[int, tuple[int, int, int, int]] = {}
        if isinstance(wire, SharedWire) and isinstance(packing, HostPacking):
            self._deferred, self._host_packing = wire.deferred, packing
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
        self._current = current
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
            self._packing.scale_in_place(there, [self._views[slot] for slot in there], self._current.weight)
            slots = [slot for slot, grad, view in zip(slots, grads, views, strict=True) if grad is not view]
            views = [self._views[slot] for slot in slots]
            grads = [self.parameters[slot].grad for slot in slots]
        packed = [grad for grad in grads if grad is not None]
        if len(packed) < len(slots):
            raise self._unfit(slots)
        if packed:
            if self._earlier or self._restrided:
                self._keep_for_copying_back(slots)
            self._move_out_referenced(slots, views)
            try:
                if len(slots) > 1 or not self._leave(slots[0], packed[0], views[0]):
                    places = list(map(as_real, views)) if self._are_complex else views
                    self._packing.pack(slots, self._reals(packed), places, self._current.weight)
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

    def keep(self, slots: Iterable[int]) -> None:
        self._take_back_moved(list(slots))
        for slot in slots:
            if (grad := self.parameters[slot].grad) is self._views[slot]:
                self._kept[slot] = grad.clone()

    def zero(self, slots: Sequence[int]) -> None:
        self._keep_for_copying_back(slots)
        left = [slot for slot in slots if self.parameters[slot].grad is not self._views[slot]]
        self._move_out_referenced(left, [self._views[slot] for slot in left])
        super().zero(slots)

    def note_packed(self) -> None:
        for slot, version in self._copied.items():
            if self._views[slot]._version != version:
                self.lose_one(slot)
                raise self._written_to(slot)
        self._versions = list(map(version_of, self._views))

    def leave(self) -> None:
        for slot, (grad, version) in self._left.items():
            if self.parameters[slot].grad is not grad:
                raise self._taken(slot)
            if grad._version != version:
                raise self._written_to(slot)
            self._refuse_mismatch((slot,), "it was changed during backward()")
            self.parameters[slot].grad = self._views[slot]
        self._left = {}

    def land(self) -> None: ...

    def close(self, missing: Sequence[int], unused: set[int]) -> None:
        packed, scale = self._packed, self._current.scale
        self._refuse_touched()
        if scale != 1.0:
            self._wire.tensor.mul_(scale)
        for slot in missing:
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
        self.ledger.mark_reduced(self.positions, unused)
        self.ledger.settle_bucket(self.positions, self._references, self._versions)
        for slot, grad in owned.items():
            self.ledger.settle(self.first + slot, grad)

    def lose(self) -> None:
        slots = [slot for slot, view in enumerate(self._views) if self.parameters[slot].grad is view]
        views = [self._views[slot] for slot in slots]
        kept = {slots[i] for i in referenced_beside_grad(views)} if views else set()
        super().lose()
        for slot in slots:
            self.ledger.status[self.first + slot] = LOCAL
            view = self._views[slot]
            if not view.numel():
                continue
            if slot in kept and not self._packing.is_asynchronous:  # a tensor that somebody else has moves itself
                self._replace_view(slot, move_out(view, self._wire.tensor))
                view.fill_(math.nan)
                self.parameters[slot].grad = view
                self.ledger.status[self.first + slot] = GradientStatus.LOST
            else:
                self.lose_one(slot)

    def undo(self) -> None:
        for slot, kept in self._kept.items():
            self._views[slot].copy_(kept)

    def reset(self) -> None:
        self._packed, self._kept, self._copied, self._left = {}, {}, {}, {}
        if self._deferred:
            self._deferred.clear()

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
        place, factor, packing = self._plan.slots[slot], self._current.weight, self._host_packing
        values, scale = grad.as_strided((place.numel,), (1,)), factor * packing.scale
        start, stop = begin - place.offset, end - place.offset
        for i, rest in ((0, values[:start]), (stop, values[stop:])):
            if len(rest):
                packing.pack_values(rest, place.offset + i, factor)
        packing.look(values[start:stop], begin, scale)
        for i, piece in enumerate(torch.split(values[start:stop], step)):
            self._deferred[number + i] = partial(torch.mul, piece, scale)
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
            spec, offset = self._specs[slot], self._plan.slots[slot].offset
            if _kind(self.parameters[slot]) != _kind(spec):
                moved = f"its gradient, now {self._views[slot].dtype}, was moved out of torchring's buffer"
                raise self._mismatch(slot, moved)
            self._earlier.add(slot)
            place = place_of(self._wire.tensor, offset, spec.shape, spec.gradient_stride, spec.dtype, is_grad=True)
            self._replace_view(slot, place)

    def _replace_view(self, slot: int, view: torch.Tensor) -> None:
        self._views[slot] = view
        self._storages[slot] = storage_of(view)
        self._references[slot] = weakref.ref(view)

    def _move_out_referenced(self, slots: Sequence[int], views: list[torch.Tensor]) -> None:
        """Move gradients to a copy that the script still has, before `views` are overwritten."""
        for i in referenced(views, [self._storages[slot] for slot in slots]) if views else ():
            slot = slots[i]
            if self._views[slot].numel():
                views[i] = move_out(views[i], self._wire.tensor)
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
            is_new = self.has_arrived[slot] and grad._version == 0
            if is_new and slot not in self._restrided:
                continue
            if _kind(parameter) != _kind(self._specs[slot]):
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
            for slot, has_arrived in enumerate(self.has_arrived):
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
_kind = operator.attrgetter("shape", "dtype", "device")
