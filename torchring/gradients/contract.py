"""The contract between an optimizer and what reduces its gradients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from torchring.world import World


class Sync(Protocol):
    """The backwards and steps of one optimizer: `Reducer` with other ranks, `LocalSync` in a world of one.

    Attributes:
        accumulate: number of backwards per reduction; may change between reductions, on all ranks alike.
        num_skipped_steps: how many steps were left out, because a gradient was not finite.
    """

    world: World
    accumulate: int
    num_skipped_steps: int = 0
    _no_sync_depth: int = 0

    # Backward

    def weigh(self, weight: float) -> None:
        """The loss of the next backward is a mean over `weight` samples. See `DistributedOptimizer.weigh`."""

    def skip(self) -> None:
        """Collective: take part in the others' next backward without one of this rank's own."""

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards in here only accumulate, and do not count towards `accumulate`."""
        self._no_sync_depth += 1
        try:
            yield
        finally:
            self._no_sync_depth -= 1

    def synchronize(self) -> None:
        """Collective: reduce whatever is local on any rank. Does nothing where nothing is local."""

    def forget_gradients(self) -> None:
        """The optimizer has dropped or zeroed all gradients, so the next backward begins a group of `accumulate`."""

    # Step

    def before_step(self) -> None:
        """The optimizer is about to write to the parameters."""

    def accept_parameters(self) -> None:
        """The parameters are as the optimizer has left them: its step is about to evaluate a closure."""

    def check_backward(self) -> None:
        """Before a step: raise GradientError if the last backward failed, or is still under way."""

    def check_gradients(self) -> bool:
        """Before a step: raise GradientError if a gradient is known to be wrong. Returns whether to make the step."""

    def write_buffers(self) -> None:
        """Give the model's buffers what the last reduction has found."""

    def has_stepped(self) -> None:
        """The optimizer has made a step."""

    # Otherwise

    def can_skip_alone(self) -> bool:
        """Whether this rank can decide alone to leave out a step."""

    def extend(self, parameters: Sequence[torch.nn.Parameter]) -> None:
        """Collective: more parameters, some of which may be frozen for now."""

    def close(self) -> None:
        """Remove all hooks."""
