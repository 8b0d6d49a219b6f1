"""Steps that take a closure: the loss that it returns, and how to undo such a step."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.optim import Optimizer

from torchring.collectives.service import internal_collectives_of
from torchring.gradients.validation import parameters_of
from torchring.world import World


def mean_loss(loss: Any, world: World) -> Any:
    """Collective: the mean of the ranks' losses. A rank without a loss (None) takes the mean of the others."""
    if world.size == 1:
        return loss
    mine = [0.0, 0.0] if loss is None else [float(loss.detach() if isinstance(loss, torch.Tensor) else loss), 1.0]
    sums = torch.tensor(mine, dtype=torch.float64, device="cpu")
    total, num_losses = internal_collectives_of(world).all_reduce(sums, "sum").tolist()
    if not num_losses:
        return None
    mean = total / num_losses
    return torch.full_like(loss.detach(), mean) if isinstance(loss, torch.Tensor) else mean


class Snapshot:
    """The parameters, state and hyperparameters of an optimizer as they are now, before a step that may be left out.

    LBFGS moves parameters before it evaluates the closure again.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._parameters = [(parameter, parameter.detach().clone()) for parameter in parameters_of(optimizer)]
        self._state = {key: copy.deepcopy(value) for key, value in optimizer.state.items()}
        self._groups = [
            {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ]

    @torch.no_grad()
    def restore(self) -> None:
        """Undo what has happened since."""
        for parameter, value in self._parameters:
            parameter.copy_(value)
        self._optimizer.state.clear()
        self._optimizer.state.update(self._state)
        for group, before in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.update(before)
