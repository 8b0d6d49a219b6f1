"""`LocalSync`: weights, groups of backwards and skipped steps in a world of one, which reduces nothing."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from torchring.errors import GradientError
from torchring.gradients.contract import Stats, Sync
from torchring.gradients.ledger import SeenGradients
from torchring.gradients.validation import is_finite_gradient
from torchring.gradients.weights import ON_RESULTS
from torchring.observer import INPUT, OPTIMIZER
from torchring.world import World


class LocalSync(Sync):
    """Takes the place of a reduction in a world of one. See `contract.Sync`.

    Between backwards, `.grad` is the weighted mean over those that several ranks would reduce together: `accumulate` of
    them, and those inside `no_sync()`. A backward after that adds to `.grad`. See `weights.py` for a world of several
    ranks, where a reduction brings about the mean.

    Args:
        parameters: of the optimizer; may grow.
        accumulate: number of backwards that are reduced together.
        skips_non_finite: whether to leave out a step if a gradient is not finite. Otherwise nobody looks.

    Attributes:
        world: set before a method is called that records a step.
    """

    world: World

    def __init__(self, parameters: Collection[torch.nn.Parameter], *, accumulate: int, skips_non_finite: bool) -> None:
        self.accumulate = accumulate
        self._parameters = parameters
        self._skips_non_finite = skips_non_finite

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

    # Backward

    def weigh(self, weight: float) -> None:
        self._end_micro_step()
        if all(parameter.grad is None for parameter in self._parameters):  # the script has dropped what there was
            self.forget_gradients()
        if self._holds_results and (self.accumulate > 1 or self._no_sync_depth or self._num_backwards):
            raise GradientError(ON_RESULTS)
        self._next = weight
        self._before = SeenGradients(self._parameters)
        for parameter in self._parameters:
            if parameter.requires_grad:
                handle = parameter.register_hook(self._weigh_gradient)  # type: ignore[no-untyped-call]
                self._handles.append(handle)

    def skip(self) -> None:
        self._end_micro_step()
        if self._no_sync_depth == 0:
            self._count()

    def synchronize(self) -> None:
        if self._is_next_used:
            self._end_micro_step()
        self._end_group()

    def forget_gradients(self) -> None:
        """A weight that was given for the next backward stays."""
        self.synchronize()
        self._holds_results = False

    # Step

    def before_step(self) -> None:
        self.synchronize()
        self._enter(OPTIMIZER)

    def accept_parameters(self) -> None:
        self._enter(INPUT)

    def check_backward(self) -> None:
        self.world.refuse_provisional("step()")

    def check_gradients(self) -> bool:
        """Looks at gradients only where a step may be left out."""
        if not self._skips_non_finite or all(map(is_finite_gradient, self._parameters)):
            return True
        self.num_skipped_steps += 1
        self.world.observer.count_step()
        return False

    def _enter(self, phase: int) -> None:
        observer = self.world.observer
        observer.phase(phase, observer.num_steps)

    def agree_on_step(self) -> None:
        """Nobody else takes part."""

    def sync_buffers(self) -> None:
        """The buffers are this rank's own."""

    def has_stepped(self) -> None:
        self.world.observer.count_step()

    # Otherwise

    def stats(self) -> Stats:
        skipped = self.num_skipped_steps
        return Stats("none", "a world of one sends nothing", "inline", 0, 0, 0, 0.0, 0.0, 0.0, 0.0, 0.0, skipped)

    def can_skip_alone(self) -> bool:
        return True

    def extend(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """The parameters are in `parameters` already."""

    def close(self) -> None:
        self._end_micro_step()

    # Weights

    def _end_micro_step(self) -> None:
        """End the backward that a weight was given for. It is over, or does not come."""
        if self._is_next_used:
            self._total += self._next
            self._num_backwards += 1
            if not self._is_next_local:
                self._count()
        self._is_next_used = False
        while self._handles:
            self._handles.pop().remove()

    def _count(self) -> None:
        self._num_counted += 1
        if self._num_counted >= self.accumulate:
            self._end_group()

    def _end_group(self) -> None:
        """End a group of backwards: `.grad` holds their result now."""
        self._holds_results = self._holds_results or self._num_backwards > 0
        self._total, self._num_backwards, self._num_counted = 0.0, 0, 0

    def _weigh_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
        """A gradient of the backward that a weight was given for, before it is added to `.grad`."""
        if not self._is_next_used and self._total and self._before.are_gone():
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
