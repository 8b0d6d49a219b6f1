"""One bucket at run time: it counts arriving gradients, packs them, and gives them back reduced.

Where gradients are meanwhile, `places.py` says.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Final

import torch

from torchring.allreduce import Wire
from torchring.errors import GradientError
from torchring.gradients.ledger import LOCAL, Ledger
from torchring.gradients.packing import Packing, is_large, lives_in_wire
from torchring.gradients.places import CopyBack, InWire
from torchring.gradients.plan import BucketPlan, ParameterSpec
from torchring.gradients.reduction import Reduction
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
        ledger: what is known about each gradient.

    Attributes:
        placement: where the gradients are.
        names, parameters: one per slot.
        unused: slots of parameters that this rank has not used in this reduction.
        reduction: the reduction under way, or the last one.
        copies_on_arrival: for each slot, whether `mark_ready` copies the gradient at once. Others are only counted.
    """

    def __init__(
        self,
        plan: BucketPlan,
        wire: Wire,
        specs: Sequence[ParameterSpec],
        parameters: Sequence[torch.nn.Parameter],
        packing: Packing,
        ledger: Ledger,
    ) -> None:
        # What belongs here
        self.plan = plan
        self.index = plan.index
        self.wire = wire
        self.packing = packing
        self.ledger = ledger
        placement = InWire if lives_in_wire(plan) else CopyBack
        self.placement = placement(plan, wire, specs, parameters, packing, ledger)
        self.names, self.parameters = self.placement.names, self.placement.parameters
        self._first = self.placement.first
        self.copies_on_arrival = [not packing.is_asynchronous and is_large(plan, slot) for slot in plan.slots]
        self._small = [slot for slot, copies in enumerate(self.copies_on_arrival) if not copies]

        # The reduction
        self.reduction = Reduction(0)
        self.state = BucketState.IDLE
        self.unused: set[int] = set()
        self._has_arrived = self.placement.has_arrived
        self._num_missing = len(plan.slots)
        self._missing: list[int] = []  # slots that had not arrived when backward ended
        self._is_aborted = False

    def begin(self, current: Reduction) -> None:
        """A reduction begins. The first gradient of its backward may be there already."""
        self.reduction = current
        self.placement.begin(current)

    def mark_ready(self, slot: int) -> bool:
        """A gradient was accumulated, in a backward that reduces. True if it was the last one: the bucket is PACKED."""
        if not self.copies_on_arrival[slot]:
            return self.mark_noted((slot,))
        if self.state is not _FILLING:
            self._open(slot)
        if self.ledger.is_sum:
            self.ledger.refuse_sum_of_sums(self._first + slot)
        self.ledger.status[self._first + slot] = LOCAL
        if not self._has_arrived[slot]:
            self._has_arrived[slot] = True
            self._num_missing -= 1
        elif self.placement.is_in_wire:
            raise self._came_again(slot, "packed")
        if (tell := self.reduction.events) is not None:
            tell(COPYING, self.index, 0)
        self.placement.pack((slot,))
        if tell is not None:
            tell(COPIED, self.index, 0)
        return self._num_missing == 0 and self._pack_rest()

    def mark_noted(self, slots: Sequence[int]) -> bool:
        """As `mark_ready`, for gradients that are only counted."""
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
        present: list[int] = []
        absent: list[int] = []
        for slot in self._missing:
            grad = self.parameters[slot].grad
            is_absent = grad is None or self.reduction.is_absent
            (absent if is_absent else present).append(slot)
            if is_absent or (grad is not None and self.ledger.is_settled(self._first + slot, grad)):
                self.unused.add(slot)
        self.placement.keep(self.unused)
        if absent:
            self.placement.zero(absent)
        self.placement.pack(present)
        self._pack_rest()

    def begin_reduce(self) -> None:
        """The wire buffer goes to the all-reduce."""
        self.placement.leave()
        self._move(BucketState.REDUCING)

    def end_reduce(self) -> None:
        """The wire buffer comes back reduced. Gradients that do not live in it are written."""
        self._move(BucketState.REDUCED)
        if not self._is_aborted:
            self.placement.land()

    def close_reduction(self) -> None:
        """Backward is about to return: hand out gradients that only other ranks had computed, and become IDLE."""
        self._require(BucketState.IDLE)
        unused: set[int] = set()
        if self._missing:
            nobodys = self.reduction.heard.unused
            unused = {slot for slot in self._missing if self.plan.slots[slot].parameter in nobodys}
        self.placement.close(self._missing, unused)
        self.reset()

    def abort(self) -> None:
        """The reduction was aborted. A gradient in a buffer that has left is lost: ranks are adding up there."""
        if self.state in (BucketState.FILLING, BucketState.PACKED):
            self.packing.undo()
            self.placement.undo()
        is_under_way = self.state in (BucketState.REDUCING, BucketState.REDUCED)
        if is_under_way or (self.state is BucketState.PACKED and self.packing.is_asynchronous):
            self._is_aborted = True
            self.placement.lose()

    def reset(self) -> None:
        """Forget a reduction, finished or aborted. Gradients that have arrived keep their status."""
        self.state = BucketState.IDLE
        self.placement.reset()
        self.packing.reset()
        self._has_arrived[:] = [False] * len(self.names)
        self._num_missing = len(self.names)
        self._missing, self.unused = [], set()
        self._is_aborted = False

    def release(self) -> None:
        """Another bucket is about to replace this one: let go of the buffer."""
        self.placement.release()
        del self.wire, self.packing

    def _open(self, slot: int) -> None:
        if self.state is not BucketState.IDLE:
            raise self._came_again(slot, f"closed ({self.state.value})")
        self._move(BucketState.FILLING)

    def _came_again(self, slot: int, how: str) -> GradientError:
        if self.placement.is_in_wire and self.state in (BucketState.FILLING, BucketState.PACKED):
            self.placement.lose_one(slot)
        return GradientError(
            f"{self.names[slot]} received another gradient in the same backward after bucket {self.index} was {how}. "
            "Reentrant checkpointing of a layer that is used twice does this: use checkpoint(..., use_reentrant=False),"
            " or run backward() inside optimizer.no_sync() and call optimizer.synchronize() after it",
            bucket=self.index,
            parameters=(self.names[slot],),
        )

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

    def _pack_rest(self) -> bool:
        """Copy the gradients that were only counted on arrival. Returns True: the bucket is PACKED."""
        tell = self.reduction.events
        if self._num_missing == 0 and tell is not None:
            tell(READY, self.index, 0)
        has_arrived = self._has_arrived
        self.placement.pack(self._small if all(has_arrived) else [slot for slot in self._small if has_arrived[slot]])
        self.packing.finish_packing(self.reduction.weight)
        self.placement.note_packed()
        self._move(BucketState.PACKED)
        if tell is not None:
            tell(PACKED, self.index, 0)
        return True


_BEFORE: Final = {
    BucketState.FILLING: BucketState.IDLE,
    BucketState.PACKED: BucketState.FILLING,
    BucketState.REDUCING: BucketState.PACKED,
    BucketState.REDUCED: BucketState.REDUCING,
    BucketState.IDLE: BucketState.REDUCED,
}
_FILLING = BucketState.FILLING  # to look up a member of an enum takes 0.1 us, which counts for every parameter
