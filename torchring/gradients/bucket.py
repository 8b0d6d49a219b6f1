"""One bucket at run time: it counts arriving gradients, packs them, and gives them back reduced.

Gradients stay in `.grad`, and results are copied back: where packing casts, and with PyTorch 2.11 (`views.CAN_SWAP`).
In other buckets they become views of the wire buffer: see `places.InWire`.
"""

import enum
import math
import operator
from collections.abc import Iterable, Sequence
from typing import Final

import torch

from torchring.allreduce import Wire
from torchring.errors import GradientError
from torchring.gradients.ledger import LOCAL, GradientStatus, Ledger
from torchring.gradients.packing import Packing, is_large
from torchring.gradients.plan import BucketPlan, ParameterSpec
from torchring.gradients.reduction import Reduction
from torchring.gradients.views import as_real, place_of
from torchring.observer import PACKED, READY


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
    """

    is_in_wire = False  # whether packing makes `.grad` a view of the wire buffer

    def __init__(
        self,
        plan: BucketPlan,  # what belongs here
        wire: Wire,  # the wire buffer; the all-reduce has it while the bucket is REDUCING, and else the bucket
        specs: Sequence[ParameterSpec],  # all of the optimizer's; the plan's slots are indices into them
        parameters: Sequence[torch.nn.Parameter],  # the same
        packing: Packing,  # makes the copies
        ledger: Ledger,  # what is known about each gradient
    ) -> None:
        # What belongs here
        self.plan = plan
        self.index = plan.index
        self.wire = wire
        self.packing = packing
        self.ledger = ledger
        self.names = [specs[slot.parameter].name for slot in plan.slots]
        self.parameters = [parameters[slot.parameter] for slot in plan.slots]
        self._specs = [specs[slot.parameter] for slot in plan.slots]
        self._are_complex = any(spec.dtype.is_complex for spec in self._specs)
        self._first = first = ledger.positions[plan.slots[0].parameter]
        self._positions = slice(first, first + len(plan.slots))  # in the ledger
        # For each slot, whether `mark_ready` copies the gradient at once. Others are only counted.
        self.copies_on_arrival = [not packing.is_asynchronous and is_large(plan, slot) for slot in plan.slots]
        self._small = [slot for slot, copies in enumerate(self.copies_on_arrival) if not copies]
        # Each gradient's place in the wire. `referenced` counts references, so nothing else may refer to a view.
        self._views = [
            place_of(wire.tensor, slot.offset, spec.shape, spec.gradient_stride, spec.dtype, is_grad=self.is_in_wire)
            for slot, spec in zip(plan.slots, self._specs, strict=True)
        ]

        # The reduction
        self.reduction = Reduction(0)  # the reduction under way, or the last one
        self.state = BucketState.IDLE
        self.unused: set[int] = set()  # slots of parameters that this rank has not used in this reduction
        self._has_arrived = [False] * len(plan.slots)
        self._num_missing = len(plan.slots)
        self._missing: list[int] = []  # slots that had not arrived when backward ended
        # Of gradients that do not become views of the wire: the tensor that was packed, and its version.
        self._packed: dict[int, tuple[torch.Tensor, int]] = {}

    def begin(self, current: Reduction) -> None:
        """A reduction begins. The first gradient of its backward may be there already."""
        self.reduction = current

    def mark_ready(self, slot: int) -> bool:
        """A large gradient was accumulated, and is about to be packed. True if it was the last one."""
        if self.state is not _FILLING:
            self._open(slot)
        if self.ledger.is_sum:
            self.ledger.refuse_sum_of_sums(self._first + slot)
        self.ledger.status[self._first + slot] = LOCAL
        if not self._has_arrived[slot]:
            self._has_arrived[slot] = True
            self._num_missing -= 1
        elif self.is_in_wire:
            raise self._came_again(slot, "packed")
        return self._num_missing == 0

    def mark_noted(self, slots: Sequence[int]) -> bool:
        """As `mark_ready`, for gradients that are only counted, until `pack_rest`."""
        if self.state is not _FILLING:
            self._open(slots[0])
        status, has_arrived, first = self.ledger.status, self._has_arrived, self._first
        if self.ledger.is_sum:
            for slot in slots:
                self.ledger.refuse_sum_of_sums(first + slot)
        for slot in slots:
            status[first + slot] = LOCAL
            has_arrived[slot] = True
        self._num_missing = has_arrived.count(False)
        return self._num_missing == 0

    def pack_rest(self) -> None:
        """Copy the gradients that were only counted on arrival. Then the bucket is PACKED."""
        tell = self.reduction.events
        if self._num_missing == 0 and tell is not None:
            tell(READY, self.index, 0)
        has_arrived = self._has_arrived
        self.pack(self._small if all(has_arrived) else [slot for slot in self._small if has_arrived[slot]])
        self.packing.finish_packing(self.reduction.weight)
        self._note_packed()
        self._move(BucketState.PACKED)
        if tell is not None:
            tell(PACKED, self.index, 0)

    def fill_missing(self) -> None:
        """Backward is over: parameters whose gradient did not arrive contribute what they hold, or zero. Then PACKED.

        A parameter whose gradient holds nothing new is unused. If it is unused on every rank, `.grad` stays as it is.
        """
        if (tell := self.reduction.events) is not None:
            tell(READY, self.index, 0)
        if self.state is BucketState.IDLE:
            self._move(BucketState.FILLING)
        self._missing = [slot for slot, arrived in enumerate(self._has_arrived) if not arrived]
        present: list[int] = []
        absent: list[int] = []
        for slot in self._missing:
            grad = self.parameters[slot].grad
            is_absent = grad is None or self.reduction.is_absent
            (absent if is_absent else present).append(slot)
            if is_absent or (grad is not None and self.ledger.is_settled(self._first + slot, grad)):
                self.unused.add(slot)
        self._keep(self.unused)
        if absent:
            self._zero(absent)
        self.pack(present)
        self.pack_rest()

    def begin_reduce(self) -> None:
        """The wire buffer goes to the all-reduce."""
        self._move(BucketState.REDUCING)

    def end_reduce(self) -> None:
        """The wire buffer comes back reduced. Gradients that do not live in it are written."""
        self._move(BucketState.REDUCED)
        if arrived := [slot for slot, is_there in enumerate(self._has_arrived) if is_there]:
            self._unpack(arrived)

    def close_reduction(self) -> None:
        """Backward is about to return: hand out gradients that only other ranks had computed, and become IDLE."""
        assert self.state is BucketState.REDUCED, f"bucket {self.index} is {self.state}, so it cannot become IDLE"
        unused: set[int] = set()
        if self._missing:
            nobodys = self.reduction.heard.unused
            unused = {slot for slot in self._missing if self.plan.slots[slot].parameter in nobodys}
        self._hand_out(unused)
        self.ledger.mark_reduced(self._positions, unused)
        self.reset()

    def abort(self) -> None:
        """The reduction was aborted. A gradient in a buffer that has left is lost: ranks are adding up there."""
        if self.state in (BucketState.FILLING, BucketState.PACKED):
            self.packing.undo()
            self._undo()
        is_under_way = self.state in (BucketState.REDUCING, BucketState.REDUCED)
        if is_under_way or (self.state is BucketState.PACKED and self.packing.is_asynchronous):
            self._lose()

    def reset(self) -> None:
        """Forget a reduction, finished or aborted. Gradients that have arrived keep their status."""
        self.state = BucketState.IDLE
        self.packing.reset()
        self._has_arrived = [False] * len(self.names)
        self._num_missing = len(self.names)
        self._missing, self.unused, self._packed = [], set(), {}
        self._forget()

    def release(self) -> None:
        """Let go of the buffer, which another one is about to replace, or nobody needs any more."""
        if self._views:
            self._views.clear()
            del self.wire, self.packing

    def _open(self, slot: int) -> None:
        if self.state is not BucketState.IDLE:
            raise self._came_again(slot, f"closed ({self.state.value})")
        self.state = BucketState.FILLING

    def _came_again(self, slot: int, how: str) -> GradientError:
        if self.is_in_wire and self.state in (BucketState.FILLING, BucketState.PACKED):
            self._lose_one(slot)
        return GradientError(
            f"{self.names[slot]} received another gradient in the same backward after bucket {self.index} was {how}. "
            "Reentrant checkpointing of a layer that is used twice does this: use checkpoint(..., use_reentrant=False),"
            " or run backward() inside optimizer.no_sync() and call optimizer.synchronize() after it",
            bucket=self.index,
            parameters=(self.names[slot],),
        )

    def _move(self, new: BucketState) -> None:
        assert self.state is _BEFORE[new], f"bucket {self.index} is {self.state}, so it cannot become {new}"
        self.state = new

    # Where gradients are meanwhile

    def pack(self, slots: Sequence[int]) -> None:
        """Copy these gradients to the wire. One alone may be large, and have arrived before the others."""
        grads = [grad for slot in slots if (grad := self.parameters[slot].grad) is not None]
        if len(grads) < len(slots) or any(map(_is_sparse, grads)):
            raise self._unfit(slots)
        if grads:
            self._refuse_mismatch(slots, "it was converted or reshaped")
            views = [self._views[slot] for slot in slots]
            self.packing.pack(slots, self._reals(grads), views, self.reduction.weight)
            self._packed |= {slot: (grad, grad._version) for slot, grad in zip(slots, grads, strict=True)}

    def _keep(self, slots: Iterable[int]) -> None:
        """The gradients of these hold nothing new. If no rank has used them, they stay as they are."""

    def _zero(self, slots: Sequence[int]) -> None:
        torch._foreach_zero_([self._views[slot] for slot in slots])

    def _note_packed(self) -> None:
        """All are packed. Raises GradientError if somebody has written to a gradient since it was packed on arrival."""

    def _hand_out(self, unused: set[int]) -> None:
        """Backward is about to return. This rank had none of the missing gradients, and no rank the `unused` ones."""
        handed_out = [slot for slot in self._missing if slot not in unused]
        for parameter in (self.parameters[slot] for slot in handed_out if slot not in self._packed):
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
        if handed_out:
            self._unpack(handed_out)
        if self.reduction.scale != 1.0:
            for slot in set(range(len(self.names))) - unused:
                grad = self.parameters[slot].grad
                assert grad is not None
                self.ledger.settle(self._first + slot, grad.mul_(self.reduction.scale))

    def _undo(self) -> None:
        """The reduction was aborted before the wire has left: what was kept is as it was, to the last bit."""

    def _lose(self) -> None:
        """The reduction was aborted, and the wire is on its way. NaN takes the place of gradients that lie there."""
        for slot in self._packed:
            self.ledger.status[self._first + slot] = LOCAL

    def _lose_one(self, slot: int) -> None:
        """The gradient in the wire is no gradient any more. NaN takes its place."""
        parameter = self.parameters[slot]
        parameter.grad = torch.full_like(parameter.detach(), math.nan)
        self.ledger.status[self._first + slot] = GradientStatus.LOST

    def _forget(self) -> None:
        """The reduction is over, or was aborted."""

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
        self.packing.unpack(slots, self._reals([self._views[slot] for slot in slots]), reals)
        if self._are_complex or self.packing.is_asynchronous:
            for grad, real in zip(grads, reals, strict=True):
                if grad.is_conj() or grad.is_neg():  # `real` is a copy of such a gradient
                    grad.copy_(torch.view_as_complex(real) if grad.is_complex() else real)
        for slot, grad in zip(slots, grads, strict=True):
            self.ledger.settle(self._first + slot, grad)

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
        return GradientError(f"the gradient of {name} {what}", bucket=self.plan.index, parameters=(name,))

    def _refuse_mismatch(self, slots: Sequence[int], why: object) -> None:
        """Raise GradientError if a parameter has another shape, dtype or device than when it was wrapped."""
        for slot in slots:
            if kind_of(self.parameters[slot]) != kind_of(self._specs[slot]):
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
        if self.packing.is_asynchronous and any(map(torch.Tensor.is_neg, tensors)):
            tensors = list(map(torch.Tensor.resolve_neg, tensors))
        return tensors


_BEFORE: Final = {
    BucketState.FILLING: BucketState.IDLE,
    BucketState.PACKED: BucketState.FILLING,
    BucketState.REDUCING: BucketState.PACKED,
    BucketState.REDUCED: BucketState.REDUCING,
}
_FILLING = BucketState.FILLING  # to look up a member of an enum takes 0.1 us, which counts for every parameter
_is_sparse = operator.attrgetter("is_sparse")
kind_of = operator.attrgetter("shape", "dtype", "device")
