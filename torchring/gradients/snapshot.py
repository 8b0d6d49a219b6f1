"""Undoes a step that takes a closure: LBFGS moves parameters before it evaluates the closure again."""

from __future__ import annotations

import copy

import torch
from torch.optim import Optimizer

from torchring.gradients.validation import parameters_of


class Snapshot:
    """The parameters, state and hyperparameters of an optimizer, as they are now."""

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
