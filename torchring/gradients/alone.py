"""What a DistributedOptimizer does in a world of one, where no reduction scales gradients or looks at them."""

from __future__ import annotations

from collections.abc import Collection

import torch

from torchring.gradients.validation import is_finite_gradient


class Alone:
    """Weights and skipped steps in a world of one.

    Between backwards, `.grad` is the weighted mean over all of them since the last step. See `weights.py` for a world
    of several ranks, where a reduction brings about the mean.

    Args:
        parameters: of the optimizer; may grow.

    Attributes:
        num_skipped_steps: how many steps were left out, because a gradient was not finite.
    """

    def __init__(self, parameters: Collection[torch.nn.Parameter]) -> None:
        self.num_skipped_steps = 0
        self._parameters = parameters
        self._total = 0.0  # of the backwards since the last step
        self._next = 0.0  # of the next backward, or of the one whose gradients have come
        self._is_next_used = False
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def weigh(self, weight: float) -> None:
        """The next backward has this weight."""
        self.settle()
        if all(parameter.grad is None for parameter in self._parameters):
            self._total = 0.0  # the script has dropped what there was
        self._next = weight
        for parameter in self._parameters:
            if parameter.requires_grad:
                handle = parameter.register_hook(self._weigh_gradient)  # type: ignore[no-untyped-call]
                self._handles.append(handle)

    def settle(self) -> None:
        """The backward that a weight was given for is over, or does not come."""
        if self._is_next_used:
            self._total += self._next
        self._is_next_used = False
        while self._handles:
            self._handles.pop().remove()

    def forget(self) -> None:
        """All gradients are gone. A weight that was given for the next backward stays."""
        if self._is_next_used:
            self.settle()
        self._total = 0.0

    def may_step(self) -> bool:
        """Whether all gradients are finite. If not, the step counts as skipped."""
        is_finite = all(map(is_finite_gradient, self._parameters))
        self.num_skipped_steps += not is_finite
        return is_finite

    def _weigh_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """A gradient of the backward that a weight was given for, before it is added to `.grad`."""
        weight, before = self._next, self._total
        share = weight / (before + weight) if weight else 0.0
        if not self._is_next_used:
            self._is_next_used = True
            for parameter in self._parameters:
                if before and weight and parameter.grad is not None:
                    parameter.grad = parameter.grad * (1.0 - share)
        if not weight:
            return torch.zeros_like(gradient)
        return gradient * share if before else gradient
