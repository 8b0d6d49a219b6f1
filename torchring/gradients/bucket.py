"""One bucket at run time: it counts arriving gradients, packs them, and gives them back reduced.

Packing scales gradients. Where the wire has the gradients' own dtype, gradients live in the wire buffer: packing makes
`p.grad` a view of the buffer, and `p.grad` holds the mean as soon as the buffer does. Otherwise packing casts, and the
results are copied back, as with PyTorch 2.11 (`views.CAN_SWAP`). They are also copied back to a tensor that was in
`.grad` before this backward, and that somebody else has, too: a script may zero, clip or read its gradients through a
tensor of its own.
"""

from __future__ import annotations

import enum
import math
import operator
from collections.abc import Callable, Container, Sequence
from functools import partial
from typing import Final

import torch

from torchring.allreduce import Wire
from torchring.allreduce.slices import SharedWire
from torchring.errors import GradientError
from torchring.gradients.ledger import LOCAL, GradientLedger, GradientStatus, grad_of
from torchring.gradients.packing import HostPacking, Packing, is_large, lives_in_wire
from torchring.gradients.plan import BucketPlan, ParameterSpec, Slot
from torchring.gradients.reduction import Reduction
from torchring.gradients.views import (
    as_real,
    gradient_view,
    move_out,
    referenced,
    referenced_beside_grad,
    storage_of,
)
from torchring.observer import COPIED, COPYING, PACKED, READY


class BucketState(enum.Enum):
    """The states of a bucket in one reduction, in this order, and then again."""

    IDLE = "waiting for a backward"
    FILLING = "gradients are arriving"
    PACKED = "all gradients are in the wire buffer"
    REDUCING = "the all-reduce owns the wire buffer"
    REDUCED = "the wire buffer holds the result"


class Bucket:
    """The gradients of one `BucketPlan`, on this rank. For the thread that runs backward.

    Only the launcher calls what changes `state`.

    Args:
        plan: what belongs here.
        wire: the wire buffer; it belongs to the all-reduce while the bucket is REDUCING, and else to the bucket.
        specs, parameters: all of the optimizer's; the plan's slots are indices into both.
        packing: makes the copies.
        is_sum: whether the result is the plain sum; see `GradientLedger`.

    Attributes:
        ledger: what is known about each gradient.
        unused: slots of parameters that this rank has not used in this reduction.
        reduction: the reduction under way, or the last one.
        copies_on_arrival: for each slot, whether `mark_ready` copies the gradient at once.
        only_counts: for each slot, whether `mark_ready` does nothing but count, unless the bucket is full.
    """

    def __init__(
        self,
        plan: BucketPlan,
        wire: Wire,
        specs: Sequence[ParameterSpec],
        parameters: Sequence[torch.nn.Parameter],
        packing: Packing,
        *,
        is_sum: bool = False,
    ) -> None:
        # What belongs here
        self.plan = plan
        self.index = plan.index
        self.names = [specs[slot.parameter].name for slot in plan.slots]
        self.parameters = [parameters[slot.parameter] for slot in plan.slots]
        self._specs = [specs[slot.parameter] for slot in plan.slots]
        self._are_complex = any(spec.dtype.is_complex for spec in self._specs)
        self._is_sum = is_sum

        # The wire buffer and each gradient's place in it. `referenced` counts references, so only `_views` may refer to
        # a view.
        self.wire = wire
        self._live_in_wire = lives_in_wire(plan)
        make_view = _gradient if self._live_in_wire else _place
        self._views = [make_view(wire.tensor, slot, spec) for slot, spec in zip(plan.slots, self._specs, strict=True)]
        self._addresses = [view.data_ptr() for view in self._views]
        self._storages = [storage_of(view) for view in self._views]
        self._matrices = [p for p, spec in zip(self.parameters, self._specs, strict=True) if len(spec.shape) > 1]
        self._strides = [spec.stride for spec in self._specs if len(spec.shape) > 1]
        self.ledger = GradientLedger(
            plan.index, self.names, self.parameters, self._views, live_in_wire=self._live_in_wire, is_sum=is_sum
        )

        # Copies
        self.packing = packing
        self._is_asynchronous = packing.is_asynchronous
        self.copies_on_arrival = [not self._is_asynchronous and is_large(plan, slot) for slot in plan.slots]
        self.only_counts = [not copies for copies in self.copies_on_arrival]

        # Of large gradients: the first block of this rank's slice within, begin and end of the blocks in the gradient,
        # and elements to a block. These are packed when the sum reads them.
        self._own_blocks: dict[int, tuple[int, int, int, int]] = {}
        self._deferred: dict[int, Callable[[torch.Tensor], None]] = {}
        if isinstance(wire, SharedWire) and isinstance(packing, HostPacking) and packing.defers:
            self._deferred, self._host_packing = wire.deferred, packing
            large = [slot for slot, is_large in enumerate(self.copies_on_arrival) if is_large]
            self._own_blocks = {slot: found for slot in large if (found := _blocks_in(wire, plan.slots[slot]))}

        # The reduction
        self.reduction = Reduction(0)
        self.state = BucketState.IDLE
        self.unused: set[int] = set()
        self._has_arrived = [False] * len(plan.slots)
        self._num_missing = len(plan.slots)
        self._missing: list[int] = []  # slots that had not arrived when backward ended
        self._kept: dict[int, torch.Tensor] = {}  # copies of settled gradients, which the reduction overwrites
        self._left: dict[int, tuple[torch.Tensor, int]] = {}  # gradients that the sum reads, and their versions
        self._copied: dict[int, int] = {}  # of slots that were scaled on arrival: the version of the view
        # Of gradients that do not become views of the wire: the tensor that was packed, and its version.
        self._packed: dict[int, tuple[torch.Tensor, int]] = {}
        self._earlier: set[int] = set()  # slots with another tensor than the view in `.grad` before this backward
        self._restrided: set[int] = set()  # slots whose parameter has other strides than when it was wrapped
        self._is_aborted = False

    def begin(self, current: Reduction) -> None:
        """A reduction begins. The first gradient of its backward may be there already."""
        self.reduction = current
        if not self._live_in_wire:
            return
        self._earlier = set()
        grads = list(map(grad_of, self.parameters))
        if not all(map(operator.is_, grads, self._views)):
            others = ((slot, grad) for slot, grad in enumerate(grads) if grad is not None)
            self._earlier = {slot for slot, grad in others if grad is not self._views[slot]}
        self._restrided = set()
        if list(map(torch.Tensor.stride, self._matrices)) != self._strides:
            pairs = enumerate(zip(self.parameters, self._specs, strict=True))
            self._restrided = {slot for slot, (parameter, spec) in pairs if parameter.stride() != spec.stride}

    def mark_ready(self, slot: int) -> bool:
        """A gradient was accumulated, in a backward that reduces. True if it was the last one: the bucket is PACKED."""
        if self.state is not _FILLING:
            self._open(slot)
        if self._is_sum:
            self.ledger.refuse_sum_of_sums(slot)
        self.ledger.status[slot] = LOCAL
        if not self._has_arrived[slot]:
            self._has_arrived[slot] = True
            self._num_missing -= 1
        elif self._live_in_wire and self.copies_on_arrival[slot]:
            raise self._came_again(slot, "packed")
        if self.copies_on_arrival[slot]:
            if (tell := self.reduction.events) is not None:
                tell(COPYING, self.index, 0)
            self._pack((slot,))
            if self._live_in_wire:
                self._copied[slot] = self._views[slot]._version
            if tell is not None:
                tell(COPIED, self.index, 0)
        return self._num_missing == 0 and self._pack_rest()

    def mark_noted(self, slots: Sequence[int]) -> bool:
        """As `mark_ready`, for several gradients that are only counted."""
        if self.state is not _FILLING:
            self._open(slots[0])
        for slot in slots:
            if self._is_sum:
                self.ledger.refuse_sum_of_sums(slot)
            self.ledger.status[slot] = LOCAL
            if not self._has_arrived[slot]:
                self._has_arrived[slot] = True
                self._num_missing -= 1
        return self._num_missing == 0 and self._pack_rest()

    def fill_missing(self) -> None:
        """Backward is over: parameters whose gradient did not arrive contribute what they hold, or zero. Then PACKED.

        A parameter whose gradient holds nothing new is unused. If it is unused on every rank, `.grad` stays as it is.
        """
        if (tell := self.reduction.events) is not None:
            tell(READY, self.index, 0)
        if self.state is BucketState.IDLE:
            self._move(BucketState.FILLING)
        self._missing = [slot for slot, arrived in enumerate(self._has_arrived) if not arrived]
        self._take_back_moved(self._missing)
        present: list[int] = []
        absent: list[int] = []
        for slot in self._missing:
            grad = self.parameters[slot].grad
            (absent if grad is None or self.reduction.is_absent else present).append(slot)
            if grad is None or self.reduction.is_absent or self.ledger.is_settled(slot, grad):
                self.unused.add(slot)
                if grad is not None and grad is self._views[slot]:
                    self._kept[slot] = grad.clone()
        if absent:
            self._keep_for_copying_back(absent)
            left = [slot for slot in absent if self.parameters[slot].grad is not self._views[slot]]
            self._move_out_referenced(left, [self._views[slot] for slot in left])
            torch._foreach_zero_([self._views[slot] for slot in absent])
        self._pack(present)
        self._pack_rest()

    def begin_reduce(self) -> None:
        """The wire buffer goes to the all-reduce."""
        for slot, (grad, version) in self._left.items():
            if self.parameters[slot].grad is not grad:
                raise self.ledger.taken(slot)
            if grad._version != version:
                raise self.ledger.written_to(slot)
            if self._first_mismatch((slot,)) is not None:
                raise self._mismatch(slot, "it was changed during backward()")
            self.parameters[slot].grad = self._views[slot]
        self._left = {}
        self._move(BucketState.REDUCING)

    def end_reduce(self) -> None:
        """The wire buffer comes back reduced. Gradients that do not live in it are written."""
        self._move(BucketState.REDUCED)
        if not self._live_in_wire and not self._is_aborted:
            self._unpack([slot for slot, arrived in enumerate(self._has_arrived) if arrived])

    def close_reduction(self) -> None:
        """Backward is about to return: hand out gradients that only other ranks had computed, and become IDLE."""
        self._require(BucketState.IDLE)
        scale = self.reduction.scale
        copies_back = self._live_in_wire and bool(self._packed)
        self.ledger.refuse_touched(
            [here and slot not in self._packed for slot, here in enumerate(self._has_arrived)]
            if copies_back
            else self._has_arrived
        )
        if scale != 1.0 and self._live_in_wire:
            self.wire.tensor.mul_(scale)
        unused: set[int] = set()
        if self._missing:
            nobodys = self.reduction.heard.unused
            unused = {slot for slot in self._missing if self.plan.slots[slot].parameter in nobodys}
            self._hand_out([slot for slot in self._missing if slot not in unused])
            for slot in unused & self._kept.keys():
                self._views[slot].copy_(self._kept[slot])
                self.parameters[slot].grad = self._views[slot]
        owned = self._give_back(unused) if self._live_in_wire and self._packed else {}
        if scale != 1.0 and not self._live_in_wire:
            for slot in set(range(len(self.names))) - unused:
                grad = self.parameters[slot].grad
                assert grad is not None
                self.ledger.settle(slot, grad.mul_(scale))
        self.ledger.mark_reduced(unused)
        for slot, grad in owned.items():
            self.ledger.settle(slot, grad)
        if self._kept or self._packed or scale != 1.0:
            self.ledger.note_versions()
        self.reset()

    def abort(self) -> None:
        """The reduction was aborted. A gradient in a buffer that has left is lost: ranks are adding up there.

        NaN takes the place of the gradient, outside of the buffer.
        """
        is_under_way = self.state in (BucketState.REDUCING, BucketState.REDUCED)
        if self.state in (BucketState.FILLING, BucketState.PACKED):
            self.packing.undo()
        if not (is_under_way or (self._is_asynchronous and self.state is BucketState.PACKED)):
            return
        self._is_aborted = True
        slots = [slot for slot, view in enumerate(self._views) if self.parameters[slot].grad is view]
        views = [self._views[slot] for slot in slots]
        kept = {slots[i] for i in referenced_beside_grad(views)} if views else set()
        for slot in {*slots, *self._packed}:
            self.ledger.status[slot] = LOCAL
        for slot in slots:
            view = self._views[slot]
            if view.numel():
                if slot in kept and not self._is_asynchronous:  # a tensor that somebody else has moves itself
                    self._replace_view(slot, move_out(view, self.wire.tensor))
                    view.fill_(math.nan)
                else:
                    view = torch.full_like(self.parameters[slot].detach(), math.nan)
                self.parameters[slot].grad = view
                self.ledger.status[slot] = GradientStatus.LOST

    def reset(self) -> None:
        """Forget a reduction, finished or aborted. Gradients that have arrived keep their status."""
        self.state = BucketState.IDLE
        self._has_arrived = [False] * len(self.names)
        self._num_missing = len(self.names)
        self.unused = set()
        self._missing, self._kept, self._packed, self._copied, self._left = [], {}, {}, {}, {}
        self._deferred.clear()
        self._is_aborted = False
        self.packing.reset()

    def release(self) -> None:
        """Another bucket is about to replace this one: let go of the buffer. The ledger stays."""
        self.ledger.release_views()
        del self.wire, self.packing

    def _open(self, slot: int) -> None:
        if self.state is not BucketState.IDLE:
            raise self._came_again(slot, f"closed ({self.state.value})")
        self._move(BucketState.FILLING)

    def _came_again(self, slot: int, how: str) -> GradientError:
        if self._live_in_wire and self.state in (BucketState.FILLING, BucketState.PACKED):
            self._lose(slot)
        return GradientError(
            f"{self.names[slot]} received another gradient in the same backward after bucket {self.index} was {how}. "
            "Reentrant checkpointing of a layer that is used twice does this: use checkpoint(..., use_reentrant=False),"
            " or run backward() inside optimizer.no_sync() and call optimizer.synchronize() after it",
            bucket=self.index,
            parameters=(self.names[slot],),
        )

    def _lose(self, slot: int) -> None:
        """The gradient was scaled in the wire buffer, and something unscaled was added. NaN takes its place."""
        parameter = self.parameters[slot]
        parameter.grad = torch.full_like(parameter.detach(), math.nan)
        self.ledger.status[slot] = GradientStatus.LOST

    def _move(self, new: BucketState) -> None:
        if self.state is not _BEFORE[new]:
            self._require(new)
        self.state = new

    def _require(self, new: BucketState) -> None:
        expected = _BEFORE[new]
        if self.state is not expected:
            raise AssertionError(
                f"bucket {self.index} ({self.names[0]} .. {self.names[-1]}) is {self.state.name}, "
                f"so it cannot become {new.name}: that takes {expected.name}"
            )

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
            parameter, spec = self.parameters[slot], self._specs[slot]
            if (parameter.shape, parameter.dtype, parameter.device) != (spec.shape, spec.dtype, spec.device):
                moved = f"its gradient, now {self._views[slot].dtype}, was moved out of torchring's buffer"
                raise self._mismatch(slot, moved)
            self._earlier.add(slot)
            self._replace_view(slot, _gradient(self.wire.tensor, self.plan.slots[slot], spec))

    def _replace_view(self, slot: int, view: torch.Tensor) -> None:
        self._views[slot] = view
        self._storages[slot] = storage_of(view)
        self.ledger.view_was_replaced(slot)

    def _move_out_referenced(self, slots: Sequence[int], views: list[torch.Tensor]) -> None:
        """Move gradients to a copy that the script still has, before `views` are overwritten."""
        if not self._live_in_wire or not views:
            return
        for i in referenced(views, [self._storages[slot] for slot in slots]):
            slot = slots[i]
            if not self._views[slot].numel():
                continue
            views[i] = move_out(views[i], self.wire.tensor)
            self._replace_view(slot, views[i])

    def _pack_rest(self) -> bool:
        """Copy the gradients that were only counted on arrival. Returns True: the bucket is PACKED."""
        tell = self.reduction.events
        if self._num_missing == 0 and tell is not None:
            tell(READY, self.index, 0)
        arrived = [slot for slot, here in enumerate(self._has_arrived) if here]
        self._pack([slot for slot in arrived if not self.copies_on_arrival[slot]])
        for slot, version in self._copied.items():
            if self._views[slot]._version != version:
                self._lose(slot)
                raise self.ledger.written_to(slot)
        self.packing.finish_packing(self.reduction.factor)
        self.ledger.note_versions()
        self._move(BucketState.PACKED)
        if tell is not None:
            tell(PACKED, self.index, 0)
        return True

    def _pack(self, slots: Sequence[int]) -> None:
        """Copy these gradients to the wire."""
        # Passes over all parameters are loops in C: these passes are most of what a small gradient costs.
        self._take_back_moved(slots)
        views = [self._views[slot] for slot in slots]
        grads = [self.parameters[slot].grad for slot in slots]
        if any(map(operator.is_, grads, views)):  # accumulated in place
            there = [slot for slot, grad, view in zip(slots, grads, views, strict=True) if grad is view]
            self._refuse_shared(slots, grads, set(there))
            self.packing.scale_in_place(there, [self._views[slot] for slot in there], self.reduction.factor)
            slots = [slot for slot, grad, view in zip(slots, grads, views, strict=True) if grad is not view]
            views = [self._views[slot] for slot in slots]
            grads = [self.parameters[slot].grad for slot in slots]
        packed: list[torch.Tensor] = [grad for grad in grads if grad is not None]
        if len(packed) < len(slots):
            raise self.ledger.taken(slots[next(i for i, grad in enumerate(grads) if grad is None)])
        if any(map(_is_sparse, packed)):
            name = self.names[slots[next(i for i, grad in enumerate(packed) if grad.is_sparse)]]
            raise GradientError(
                f"{name} has a sparse gradient. torchring knows beforehand those of nn.Embedding and nn.EmbeddingBag "
                "in the model that torchring.wrap(optimizer, model) gets. Pass the model, or compute with sparse=False",
                parameters=(name,),
            )
        if not packed:
            return
        if not self._live_in_wire:
            self.packing.pack(slots, self._reals(packed), views, self.reduction.factor)
            self._packed |= {slot: (grad, grad._version) for slot, grad in zip(slots, packed, strict=True)}
            return
        self._keep_for_copying_back(slots)
        self._move_out_referenced(slots, views)
        try:
            if len(slots) == 1 and self._leave(slots[0], packed[0], views[0]):
                return
            self.packing.pack(slots, self._reals(packed), self._reals(views), self.reduction.factor)
            for slot, view in zip(slots, views, strict=True):
                if slot not in self._packed:
                    self.parameters[slot].grad = view
        except (RuntimeError, TypeError, ValueError) as error:
            mismatch = self._first_mismatch(slots)
            if mismatch is None:
                raise
            raise self._mismatch(mismatch, str(error)) from error

    def _leave(self, slot: int, grad: torch.Tensor, view: torch.Tensor) -> bool:
        """Pack what other ranks read of a large gradient. This rank's slice is packed when it is summed, in cache.

        The gradient stays in `.grad` until the bucket leaves. Returns False if it has to be packed as a whole.
        """
        if slot not in self._own_blocks or self.reduction.is_unordered or slot in self._packed:
            return False
        is_plain = type(grad) is torch.Tensor and not (grad._is_view() or grad.is_inference())
        is_alike = (grad.shape, grad.stride(), grad.dtype) == (view.shape, view.stride(), view.dtype)
        if not (is_plain and is_alike):
            return False
        number, begin, end, step = self._own_blocks[slot]
        place, factor = self.plan.slots[slot], self.reduction.factor
        values, packing = grad.as_strided((place.numel,), (1,)), self._host_packing
        for i, rest in ((0, values[:begin]), (end, values[end:])):
            if len(rest):
                packing.pack_values(rest, place.offset + i, factor)
        for i, piece in enumerate(torch.split(values[begin:end], step)):
            offset, scale = place.offset + begin + i * step, factor * packing.scale
            self._deferred[number + i] = partial(packing.pack_piece, piece, offset, scale)
        self._left[slot] = grad, grad._version
        return True

    def _refuse_shared(self, slots: Sequence[int], grads: Sequence[torch.Tensor | None], there: Container[int]) -> None:
        """Raise GradientError if a gradient shares the memory of another one in the wire: it would be scaled twice."""
        for slot, grad in zip(slots, grads, strict=True):
            if slot not in there and grad is not None and not grad.is_sparse and storage_of(grad) in self._storages:
                name = self.names[slot]
                text = f"the gradient of {name} shares memory with that of another parameter; give {name} a copy"
                raise GradientError(text, parameters=(name,))

    def _keep_for_copying_back(self, slots: Sequence[int]) -> None:
        """Find the gradients that stay in `.grad` for now, and that the results may have to be copied back to."""
        for slot in (self._earlier | self._restrided).intersection(slots):
            parameter, spec = self.parameters[slot], self._specs[slot]
            grad = parameter.grad
            if grad is None or grad is self._views[slot] or grad.is_inference():
                continue
            # The first gradient of a backward comes before `begin`. If it is new, nobody has added to it.
            is_new = self._has_arrived[slot] and grad._version == 0
            if is_new and slot not in self._restrided:
                continue
            if (parameter.shape, parameter.dtype, parameter.device) != (spec.shape, spec.dtype, spec.device):
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
        self._unpack([slot for slot in slots if slot in owned and slot not in unused])
        return {slot: grad for slot, grad in zip(slots, grads, strict=True) if slot in owned}

    def _packed_gradient(self, slot: int) -> torch.Tensor:
        """The gradient that the result is to be copied to. Raises GradientError if the script has changed it since."""
        grad = self.parameters[slot].grad
        packed, version = self._packed.get(slot, (grad, -1))
        if grad is None or grad is not packed:
            raise self.ledger.taken(slot)
        # Slices of one tensor have one version, which each of them changes.
        if version >= 0 and grad._version != version and not grad._is_view():
            raise self.ledger.taken(slot)
        return grad

    def _unpack(self, slots: Sequence[int]) -> None:
        if not slots:
            return
        grads = [self._packed_gradient(slot) for slot in slots]
        reals = self._reals(grads)
        self.packing.unpack(slots, self._reals([self._views[slot] for slot in slots]), reals)
        if self._are_complex or self._is_asynchronous:
            for grad, real in zip(grads, reals, strict=True):
                if grad.is_conj() or grad.is_neg():  # `real` is a copy of such a gradient
                    grad.copy_(torch.view_as_complex(real) if grad.is_complex() else real)
        for slot, grad in zip(slots, grads, strict=True):
            self.ledger.settle(slot, grad)

    def _reals(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors as real numbers. A device copies bytes, so it gets no tensor with a negation still to be done."""
        if not (self._are_complex or self._is_asynchronous):
            return tensors
        if self._are_complex:
            tensors = list(map(as_real, tensors))
        return list(map(torch.Tensor.resolve_neg, tensors)) if self._is_asynchronous else tensors

    def _hand_out(self, slots: Sequence[int]) -> None:
        """Give these parameters the gradients that other ranks computed, and this rank did not."""
        for slot in slots:
            parameter = self.parameters[slot]
            if slot in self._packed:
                continue
            if slot in self._restrided:
                parameter.grad = grad = torch.empty_like(parameter)
                self._packed[slot] = grad, grad._version
            elif self._live_in_wire:
                parameter.grad = self._views[slot]
            elif parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
        if not self._live_in_wire:
            self._unpack(slots)

    def _first_mismatch(self, slots: Sequence[int]) -> int | None:
        """A parameter whose shape, dtype or device has changed since it was wrapped (by model.half(), for instance)."""
        for slot in slots:
            parameter, view = self.parameters[slot], self._views[slot]
            if (parameter.shape, parameter.dtype, parameter.device) != (view.shape, view.dtype, view.device):
                return slot
        return None

    def _mismatch(self, slot: int, why: str) -> GradientError:
        name = self.names[slot]
        return GradientError(
            f"{name} is not what it was when it was wrapped ({why}); convert or reshape a model first, then call "
            "torchring.wrap",
            parameters=(name,),
        )


_BEFORE: Final = {
    BucketState.FILLING: BucketState.IDLE,
    BucketState.PACKED: BucketState.FILLING,
    BucketState.REDUCING: BucketState.PACKED,
    BucketState.REDUCED: BucketState.REDUCING,
    BucketState.IDLE: BucketState.REDUCED,
}
_FILLING = BucketState.FILLING  # to look up a member of an enum takes 0.1 us, which counts for every parameter
_is_sparse = operator.attrgetter("is_sparse")


def _blocks_in(wire: SharedWire, slot: Slot) -> tuple[int, int, int, int] | None:
    """The blocks of this rank's slice that lie within the slot: see `Bucket._own_blocks`."""
    ends = slot.offset, slot.offset + slot.numel
    inside = [
        i for i, each in enumerate(wire.blocks) if ends[0] <= each.start and each.start + len(each.own) <= ends[1]
    ]
    if not inside:
        return None
    first, last = wire.blocks[inside[0]], wire.blocks[inside[-1]]
    return inside[0], first.start - slot.offset, last.start + len(last.own) - slot.offset, len(first.own)


def _gradient(wire: torch.Tensor, slot: Slot, spec: ParameterSpec) -> torch.Tensor:
    """The slot's elements as the parameter's gradient."""
    return gradient_view(wire[slot.offset : slot.offset + slot.numel], spec.shape, _strides(spec), spec.dtype)


def _place(wire: torch.Tensor, slot: Slot, spec: ParameterSpec) -> torch.Tensor:
    """The slot's elements as real numbers in the shape of `as_real`, for gradients that do not live in the wire."""
    shape, stride = spec.shape, _strides(spec)
    if spec.dtype.is_complex:
        shape, stride = (*shape, 2), (*(2 * step for step in stride), 1)
    return wire.as_strided(shape, stride, wire.storage_offset() + slot.offset)


def _strides(spec: ParameterSpec) -> tuple[int, ...]:
    """Strides of the gradient: the parameter's, as autograd has them, unless the parameter has gaps."""
    return spec.stride if spec.numel and spec.is_dense else torch.empty(spec.shape, device="meta").stride()
