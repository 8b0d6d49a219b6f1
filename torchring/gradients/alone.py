"""What a DistributedOptimizer does in a world of one, where no reduction scales gradients or looks at them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch

from torchring.errors import GradientError
from torchring.gradients.ledger import SeenGradients, is_zero
from torchring.gradients.participants.weights import ON_RESULTS
from torchring.gradients.validation import is_finite_gradient


class Alone:
    """Weights and skipped steps in a world of one.

    Between backwards, `.grad` is the weighted mean over those that several ranks would reduce together: `accumulate` of
    them, and those inside `no_sync()`. A backward after that adds to `.grad`. See `weights.py` for a world of several
    ranks, where a reduction brings about the mean.

    Args:
        parameters: of the optimizer; may grow.
        accumulate: number of backwards that are reduced together.

    Attributes:
        accumulate: see above; may change between groups of backwards.
        num_skipped_steps: how many steps were left out, because a gradient was not finite.
    """

    def __init__(self, parameters: Collection[torch.nn.Parameter], accumulate: int) -> None:
        self.num_skipped_steps = 0
        self._parameters = parameters
        self.accumulate = accumulate
        self._no_sync_depth = 0

        # The backwards with weights that are reduced together
        self._total = 0.0
        self._num_backwards = 0
        self._num_counted = 0  # without those inside no_sync()
        self._holds_results = False  # of earlier ones, in `.grad`

        # The next backward, or the one whose gradients have come
        self._next = 0.0
        self._before = SeenGradients()  # when the weight was given
        self._is_next_used = False
        self._is_next_local = False
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def weigh(self, weight: float) -> None:
        """The next backward has this weight."""
        self.settle()
        if all(parameter.grad is None for parameter in self._parameters):  # the script has dropped what there was
            self.forget_gradients()
        self._notice_zeroing()
        if self._holds_results and (self.accumulate > 1 or self._no_sync_depth or self._num_backwards):
            raise GradientError(ON_RESULTS)
        self._next = weight
        self._before = SeenGradients(self._parameters)
        for parameter in self._parameters:
            if parameter.requires_grad:
                handle = parameter.register_hook(self._weigh_gradient)  # type: ignore[no-untyped-call]
                self._handles.append(handle)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards in here do not count towards `accumulate`."""
        self._no_sync_depth += 1
        try:
            yield
        finally:
            self._no_sync_depth -= 1

    def skip(self) -> None:
        """A backward is left out."""
        self.settle()
        if self._no_sync_depth == 0:
            self._count()

    def settle(self) -> None:
        """The backward that a weight was given for is over, or does not come."""
        if self._is_next_used:
            self._total += self._next
            self._num_backwards += 1
            if not self._is_next_local:
                self._count()
        self._is_next_used = False
        while self._handles:
            self._handles.pop().remove()

    def synchronize(self) -> None:
        """Several ranks would reduce what there is."""
        if self._is_next_used:
            self.settle()
        self._end_group()

    def forget_gradients(self) -> None:
        """All gradients are gone. A weight that was given for the next backward stays."""
        self.synchronize()
        self._holds_results = False

    def may_step(self) -> bool:
        """Whether all gradients are finite. If not, the step counts as skipped."""
        is_finite = all(map(is_finite_gradient, self._parameters))
        self.num_skipped_steps += not is_finite
        return is_finite

    def _notice_zeroing(self) -> None:
        """The script may have zeroed results in place, before backwards that are added up."""
        if self._holds_results and not self._num_backwards and (self.accumulate > 1 or self._no_sync_depth):
            grads = (parameter.grad for parameter in self._parameters)
            self._holds_results = not all(grad is None or is_zero(grad) for grad in grads)

    def _count(self) -> None:
        self._num_counted += 1
        if self._num_counted >= self.accumulate:
            self._end_group()

    def _end_group(self) -> None:
        """What was reduced together is a result now."""
        self._holds_results = self._holds_results or self._num_backwards > 0
        self._total, self._num_backwards, self._num_counted = 0.0, 0, 0

    def _weigh_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """A gradient of the backward that a weight was given for, before it is added to `.grad`."""
        if not self._is_next_used:
            self._notice_zeroing()
            if self._total and self._before.is_gone():
                self._total = 0.0
        weight, before = self._next, self._total
        share = weight / (before + weight) if weight else 0.0
        if not self._is_next_used:
            self._is_next_used = True
            self._is_next_local = self._no_sync_depth > 0
            for parameter in self._parameters:
                if before and weight and (grad := parameter.grad) is not None:
                    if grad.is_sparse:  # its detach() has values of its own
                        parameter.grad = grad * (1.0 - share)
                    else:
                        grad.detach().mul_(1.0 - share)
        if not weight:
            return torch.zeros_like(gradient)
        return gradient * share if before else gradient
