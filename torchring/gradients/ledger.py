"""Knows which `.grad` is the same on all ranks, and which is not.

`step()` asks the ledger before it uses a gradient. A gradient counts as known only while `.grad` is the tensor that the
reduction left there, so that a tensor which the script has put into `.grad` is noticed.
"""

import enum
import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias, TypeVar

import torch

from torchring.errors import GradientError
from torchring.gradients.plan import ParameterSpec

_T = TypeVar("_T")
_Reference: TypeAlias = Callable[[], "torch.Tensor | None"]


class GradientStatus(enum.Enum):
    """What is known about a parameter's `.grad`."""

    UNKNOWN = "has never been reduced"
    LOCAL = "holds local contributions that no other rank has seen"
    ZEROED = "was zeroed in place"
    REDUCED = "is the same on all ranks"
    LOST = "was lost, because an earlier backward() was aborted while ranks were adding the gradient up"


class Ledger:
    """The gradients of one optimizer, in the order of the plan: those of a bucket side by side, sparse ones last.

    With `is_sum`, gradients are added up over ranks, and not averaged. Then a gradient that was reduced before must not
    be added to: the gradient would be counted once per rank.
    """

    def __init__(self, *, is_sum: bool = False) -> None:
        self.is_sum = is_sum
        self.positions: dict[int, int] = {}  # the place in this order, by index of the parameter
        self.status: list[GradientStatus] = []  # by position
        self._names: list[str] = []
        self._parameters: list[torch.nn.Parameter] = []
        # The tensors that held results, and their versions then. References are weak, so that zero_grad() still frees a
        # gradient. A tensor is known by its identity and not by its address, which the allocator uses again.
        self._settled: list[_Reference] = []
        self._versions: list[int] = []
        self._slices: set[int] = set()  # positions that were settled with a slice of a tensor: slices share one version

    def lay_out(
        self, order: Sequence[int], specs: Sequence[ParameterSpec], parameters: Sequence[torch.nn.Parameter]
    ) -> None:
        """The plan has changed: go on in this order of parameters. What is known about a gradient stays known.

        Zeros in `.grad` of a new parameter count as those of the optimizer, which could not tell before.
        """
        earlier = [self.positions.get(index) for index in order]
        self.positions = {index: position for position, index in enumerate(order)}
        self.status = _moved(self.status, earlier, GradientStatus.UNKNOWN)
        self._settled = _moved(self._settled, earlier, lambda: None)
        self._versions = _moved(self._versions, earlier, 0)
        self._names = [specs[index].name for index in order]
        self._parameters = [parameters[index] for index in order]
        for position, known in enumerate(earlier):
            grad = self._parameters[position].grad
            if known is None and grad is not None and is_zero(grad):
                self.status[position] = ZEROED
                self.settle(position, grad)

    # What becomes of gradients

    def mark_local(self, index: int) -> None:
        """Backward has added to the gradient of parameter `index`, and does not reduce. From the parameter's hook."""
        position = self.positions[index]
        if self.is_sum:
            self.refuse_sum_of_sums(position)
        self.status[position] = LOCAL

    def mark_zeroed(self) -> None:
        """The optimizer has zeroed all gradients in place, or set them to None."""
        self.status = [ZEROED] * len(self.status)
        for position, parameter in enumerate(self._parameters):
            if parameter.grad is not None:
                self.settle(position, parameter.grad)
        self._slices.clear()

    def mark_written(self) -> None:
        """Mark gradients as local that the script has written to since they were reduced. Before `synchronize()`."""
        for position, (parameter, version) in enumerate(zip(self._parameters, self._versions, strict=True)):
            grad = parameter.grad
            if grad is None or not self.is_settled(position, grad) or grad._version == version:
                continue
            if self.status[position] is ZEROED and grad._is_view() and is_zero(grad):
                continue  # another optimizer has written to another slice of the tensor
            if self.is_sum:
                name = self._names[position]
                raise GradientError(
                    f"the gradient of {name} was written to after it was summed over ranks; with op='sum', "
                    "synchronize() would count it once per rank. Call optimizer.zero_grad() before writing to it",
                    parameters=(name,),
                )
            self.status[position] = LOCAL

    def mark_reduced(self, bucket: slice, untouched: Iterable[int] = ()) -> None:
        """The gradients of a bucket are the same on all ranks, except `untouched` ones of it that nobody used."""
        before = self.status[bucket]
        self.status[bucket] = [REDUCED] * len(before)
        for slot in untouched:
            self.status[bucket.start + slot] = before[slot]

    def settle(self, position: int, grad: torch.Tensor) -> None:
        """Remember `grad` as the tensor that holds the result."""
        self._settled[position] = weakref.ref(grad)
        self._versions[position] = grad._version
        if grad._is_view():
            self._slices.add(position)

    def settle_bucket(self, bucket: slice, grads: Sequence[_Reference], versions: Sequence[int]) -> None:
        """As `settle`, for all gradients of a bucket, none of which is a slice."""
        self._settled[bucket] = grads
        self._versions[bucket] = versions

    def settle_slices(self) -> None:
        """The results of all buckets are written, which has changed the versions of slices of one tensor."""
        for position in self._slices:
            if (grad := self._settled[position]()) is not None:
                self._versions[position] = grad._version
        self._slices.clear()

    # What is known

    def is_settled(self, position: int, grad: torch.Tensor) -> bool:
        """Whether `grad` is known to be the same on all ranks."""
        status = self.status[position]
        return (status is REDUCED or status is ZEROED) and self._settled[position]() is grad

    def is_result(self, position: int) -> bool:
        """Whether this gradient was reduced, and the optimizer has not zeroed it since."""
        grad = self._parameters[position].grad
        return self.status[position] is REDUCED and grad is not None and self.is_settled(position, grad)

    def holds_results(self) -> bool:
        """Whether a gradient is there that was reduced, and that the optimizer has not zeroed since."""
        return any(map(self.is_result, range(len(self.status))))

    def needs_synchronize(self) -> bool:
        """Whether some gradient on this rank waits to be reduced, or was written to since."""
        self.mark_written()
        return self.first_unsettled() is not None

    def first_unsettled(self) -> tuple[str, str] | None:
        """The first parameter whose `.grad` must not be stepped on, and the reason. None if all gradients are fine."""
        if self.status.count(REDUCED) == len(self.status):
            settled = [reference() for reference in self._settled]
            if all(map(operator.is_, map(grad_of, self._parameters), settled)):
                return None  # as after every ordinary backward
        for position, parameter in enumerate(self._parameters):
            grad = parameter.grad
            if grad is not None and not self.is_settled(position, grad):
                status = self.status[position]
                was_fine = status is REDUCED or status is ZEROED
                return self._names[position], "was replaced by another tensor" if was_fine else status.value
        return None

    def refuse_lost(self) -> None:
        """Raise GradientError if `.grad` still is what an aborted reduction has left of a gradient, which is NaN."""
        for position, (status, parameter) in enumerate(zip(self.status, self._parameters, strict=True)):
            if status is GradientStatus.LOST and parameter.grad is not None:
                if bool(parameter.grad.isnan().all()):
                    name = self._names[position]
                    text = f"the gradient of {name} {status.value}. Call optimizer.zero_grad() first, on all ranks"
                    raise GradientError(text, parameters=(name,))
                self.status[position] = LOCAL

    def refuse_sum_of_sums(self, position: int) -> None:
        """Raise GradientError if backward has added to a gradient that was summed over ranks before."""
        if self.is_result(position):
            name = self._names[position]
            raise GradientError(
                f"backward added to the gradient of {name}, which was summed over ranks before; with "
                "op='sum' it would be counted once per rank. Call optimizer.zero_grad() first, pass "
                "accumulate=n, or use optimizer.no_sync() for all backwards but the last",
                parameters=(name,),
            )


def _moved(values: Sequence[_T], earlier: Sequence[int | None], default: _T) -> list[_T]:
    return [default if position is None else values[position] for position in earlier]


def is_zero(grad: torch.Tensor) -> bool:
    """Whether all elements are 0."""
    return not bool((grad._values() if grad.is_sparse else grad).any())


# To look up a member of an enum takes 0.1 us, which counts for something that is done for every parameter.
LOCAL, REDUCED, ZEROED = GradientStatus.LOCAL, GradientStatus.REDUCED, GradientStatus.ZEROED

grad_of = operator.attrgetter("grad")
version_of = operator.attrgetter("_version")
