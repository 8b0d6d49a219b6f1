"""Knows which `.grad` is the same on all ranks, and which is not.

`step()` asks the ledger before it uses a gradient. A gradient counts as known only while `.grad` is the tensor that the
reduction left there, so that a tensor which the script has put into `.grad` is noticed.
"""

from __future__ import annotations

import enum
import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeAlias

import torch

from torchring.errors import GradientError


class GradientStatus(enum.Enum):
    """What is known about a parameter's `.grad`."""

    UNKNOWN = "has never been reduced"
    LOCAL = "holds local contributions that no other rank has seen"
    ZEROED = "was zeroed in place"
    REDUCED = "is the same on all ranks"
    LOST = "was lost, because an earlier backward() was aborted while ranks were adding the gradient up"


class Ledger(Protocol):
    """Knows the state of some gradients, each of which has a slot."""

    def holds_results(self) -> bool:
        """Whether a gradient is there that was reduced, and that the optimizer has not zeroed since."""

    def mark_zeroed(self) -> None:
        """The optimizer has zeroed all gradients in place, or set them to None."""

    def mark_written(self) -> None:
        """Mark gradients as local that the script has written to since they were reduced. Before `synchronize()`."""

    def unsettled(self) -> tuple[str, str] | None:
        """The first parameter whose `.grad` must not be stepped on, and the reason. None if all gradients are fine."""


class OptimizerLedger:
    """All gradients of one optimizer.

    Args:
        ledgers: returns those of its parts.
    """

    def __init__(self, ledgers: Callable[[], Sequence[Ledger]]) -> None:
        self._ledgers = ledgers

    def holds_results(self) -> bool:
        """Whether a gradient is there that was reduced, and that the optimizer has not zeroed since."""
        return any(ledger.holds_results() for ledger in self._ledgers())

    def needs_synchronize(self) -> bool:
        """Whether some gradient on this rank waits to be reduced, or was written to since."""
        for ledger in self._ledgers():
            ledger.mark_written()
        return self.first_unsettled() is not None

    def first_unsettled(self) -> tuple[str, str] | None:
        """The first parameter whose gradient must not be stepped on, and what that gradient is."""
        return next((found for ledger in self._ledgers() if (found := ledger.unsettled())), None)

    def mark_zeroed(self) -> None:
        """The optimizer has zeroed all gradients, or set them to None."""
        for ledger in self._ledgers():
            ledger.mark_zeroed()


class GradientLedger:
    """The gradients of one bucket, by slot. See `Ledger`.

    Args:
        bucket: index of the bucket, for error messages.
        names, parameters: one per slot.
        views: the place of each gradient in the wire buffer. The bucket may exchange a view for another one, see
            `view_was_replaced`.
        live_in_wire: whether `.grad` is the view itself, and not a tensor that is copied to the wire buffer.
        is_sum: whether gradients are added up over ranks, or combined, and not averaged. A gradient that was reduced
            before must not be added to: the gradient would be counted once per rank.

    Attributes:
        status: one per slot.
    """

    def __init__(
        self,
        bucket: int,
        names: Sequence[str],
        parameters: Sequence[torch.nn.Parameter],
        views: list[torch.Tensor],
        *,
        live_in_wire: bool,
        is_sum: bool,
    ) -> None:
        self.status = [GradientStatus.UNKNOWN] * len(names)
        self._bucket = bucket
        self._names = names
        self._parameters = parameters
        self._live_in_wire = live_in_wire
        self._is_sum = is_sum
        self._views = views
        # References are weak, so that zero_grad() still frees a gradient. A tensor is known by its identity and not by
        # its address, which the allocator uses again.
        self._view_refs = [weakref.ref(view) for view in views]
        self._settled: list[weakref.ref[torch.Tensor] | None] = [None] * len(names)  # the tensors that held results
        self._settled_versions = [0] * len(names)
        self._slices: set[int] = set()  # slots that were settled with a slice of a tensor: slices share one version
        # A view's version counts torchring's writes and the script's writes through `.grad`, but not the all-reduce's.
        self._versions = list(map(version_of, views))

    def mark_local(self, slot: int) -> None:
        """Backward has accumulated a gradient that no other rank has seen. Raises GradientError for a sum of sums."""
        if self._is_sum:
            self.refuse_sum_of_sums(slot)
        self.status[slot] = LOCAL

    def holds_results(self) -> bool:
        return any(map(self.is_result, range(len(self.status))))

    def is_result(self, slot: int) -> bool:
        """Whether this gradient was reduced, and the optimizer has not zeroed it since."""
        grad = self._parameters[slot].grad
        return self.status[slot] is REDUCED and grad is not None and self.is_settled(slot, grad)

    def mark_zeroed(self) -> None:
        self.status = [ZEROED] * len(self.status)
        for slot, parameter in enumerate(self._parameters):
            if parameter.grad is not None:
                self.settle(slot, parameter.grad)
        self.note_versions()

    def mark_written(self) -> None:
        for slot, parameter in enumerate(self._parameters):
            grad = parameter.grad
            if grad is None or not self.is_settled(slot, grad):
                continue
            if grad._version == self._settled_version(slot):
                continue
            if self._is_sum:
                raise GradientError(
                    f"a gradient of bucket {self._bucket} ({self._names[0]} .. {self._names[-1]}) was written to after "
                    "it was summed over ranks; with op='sum', synchronize() would count it once per rank. "
                    "Call optimizer.zero_grad() before writing to it",
                    bucket=self._bucket,
                    parameters=self._names,
                )
            self.status[slot] = LOCAL

    def mark_reduced(self, untouched: Iterable[int] = ()) -> None:
        """A reduction is over: gradients are the same on all ranks, except the `untouched` slots that nobody used."""
        before = self.status
        self.status = [REDUCED] * len(before)
        for slot in untouched:
            self.status[slot] = before[slot]
        if self._live_in_wire:
            self._settled = list(self._view_refs)

    def settle(self, slot: int, grad: torch.Tensor) -> None:
        """Remember `grad` as the tensor that holds the result."""
        self._settled[slot] = weakref.ref(grad)
        self._settled_versions[slot] = grad._version
        if grad._is_view():
            self._slices.add(slot)

    def settle_slices(self) -> None:
        """The results of all buckets are written, which has changed the versions of slices of one tensor."""
        for slot in self._slices:
            settled = self._settled[slot]
            if settled is not None and (grad := settled()) is not None:
                self._settled_versions[slot] = grad._version
        self._slices.clear()

    def is_settled(self, slot: int, grad: torch.Tensor) -> bool:
        """Whether `grad` is known to be the same on all ranks."""
        status, settled = self.status[slot], self._settled[slot]
        return (status is REDUCED or status is ZEROED) and settled is not None and settled() is grad

    def refuse_lost(self) -> None:
        """Raise GradientError if `.grad` still is what an aborted reduction has left of a gradient, which is NaN."""
        for slot, (status, parameter) in enumerate(zip(self.status, self._parameters, strict=True)):
            if status is GradientStatus.LOST and parameter.grad is not None:
                if bool(parameter.grad.isnan().all()):
                    raise GradientError(
                        f"the gradient of {self._names[slot]} {status.value}. Call optimizer.zero_grad() first, on all "
                        "ranks",
                        bucket=self._bucket,
                        parameters=(self._names[slot],),
                    )
                self.status[slot] = LOCAL

    def unsettled(self) -> tuple[str, str] | None:
        all_reduced = self.status.count(REDUCED) == len(self.status)
        if all_reduced and all(map(operator.is_, map(grad_of, self._parameters), self._views)):
            return None  # as after every ordinary backward
        for slot, parameter in enumerate(self._parameters):
            grad = parameter.grad
            if grad is not None and not self.is_settled(slot, grad):
                status = self.status[slot]
                was_fine = status is REDUCED or status is ZEROED
                return self._names[slot], "was replaced by another tensor" if was_fine else status.value
        return None

    def refuse_sum_of_sums(self, slot: int) -> None:
        """Raise GradientError if backward has added to a gradient that was summed over ranks before."""
        if self.is_result(slot):
            raise GradientError(
                f"backward added to the gradient of {self._names[slot]}, which was summed over ranks before; with "
                "op='sum' it would be counted once per rank. Call optimizer.zero_grad() first, pass "
                "accumulate=n, or use optimizer.no_sync() for all backwards but the last",
                bucket=self._bucket,
                parameters=(self._names[slot],),
            )

    def refuse_touched(self, arrived: Sequence[bool]) -> None:
        """Raise GradientError if the script took or changed one of the `arrived` gradients during the reduction."""
        if not self._live_in_wire:
            return
        if not all(map(operator.is_, map(grad_of, self._parameters), self._views)):
            for slot, has_arrived in enumerate(arrived):
                if has_arrived and self._parameters[slot].grad is not self._views[slot]:
                    raise self.taken(slot)
        versions = list(map(version_of, self._views))
        if versions != self._versions:
            pairs = enumerate(zip(versions, self._versions, strict=True))
            raise self.written_to(next(i for i, (now, then) in pairs if now != then))

    def written_to(self, slot: int) -> GradientError:
        name = self._names[slot]
        return GradientError(
            f"the gradient of {name} was written to while it was being reduced. A hook that changes gradients must be "
            "registered before torchring.wrap, so that it runs before they leave",
            bucket=self._bucket,
            parameters=(name,),
        )

    def note_versions(self) -> None:
        """Torchring has written to the views: later changes are the script's."""
        if self._live_in_wire:
            self._versions = list(map(version_of, self._views))

    def view_was_replaced(self, slot: int) -> None:
        """Another view has taken the place of this slot's view."""
        view = self._views[slot]
        self._view_refs[slot] = weakref.ref(view)
        self._versions[slot] = view._version

    def adopt(self, slot: int, other: GradientLedger, other_slot: int) -> None:
        """Take over what the ledger of an earlier bucket knew about a parameter."""
        self.status[slot] = other.status[other_slot]
        self._settled[slot] = other._settled[other_slot]
        self._settled_versions[slot] = other._settled_version(other_slot)

    def release_views(self) -> None:
        """The buffer is about to be freed. The ledger still knows what gradients there are."""
        self._settled_versions = [self._settled_version(slot) for slot in range(len(self._names))]
        self._view_refs.clear()
        self._views.clear()

    def taken(self, slot: int) -> GradientError:
        """The error for a gradient that the script took away or changed during backward."""
        what = "was changed between its accumulation and its reduction; a hook that changes gradients must be "
        what += "registered before torchring.wrap, so that it runs before they leave"
        if self._parameters[slot].grad is None:
            what = "was taken away between its accumulation and its reduction, by a hook that steps an optimizer or "
            what += "moves .grad elsewhere (to main_grad). That would train on this rank's gradient alone. Leave it in "
            what += ".grad until backward() has returned, and step or copy after that"
        return GradientError(
            f"the gradient of {self._names[slot]} {what}",
            bucket=self._bucket,
            parameters=(self._names[slot],),
        )

    def _settled_version(self, slot: int) -> int:
        """The version that a settled gradient had when it was settled."""
        settled = self._settled[slot]
        lives_here = bool(self._views) and settled is not None and settled() is self._views[slot]
        return self._versions[slot] if lives_here else self._settled_versions[slot]


StaleGradients: TypeAlias = dict[int, tuple["weakref.ref[torch.Tensor]", int]]
"""By id of the parameter: a gradient that no wrapped optimizer is to step any more, and its version."""


def note_stale(stale: StaleGradients, parameters: Iterable[torch.Tensor]) -> None:
    stale |= {id(p): (weakref.ref(p.grad), p.grad._version) for p in parameters if p.grad is not None}


def is_zero(grad: torch.Tensor) -> bool:
    """Whether all elements are 0."""
    return not bool((grad._values() if grad.is_sparse else grad).any())


# To look up a member of an enum takes 0.1 us, which counts for something that is done for every parameter.
LOCAL, REDUCED, ZEROED = GradientStatus.LOCAL, GradientStatus.REDUCED, GradientStatus.ZEROED

grad_of = operator.attrgetter("grad")
version_of = operator.attrgetter("_version")
