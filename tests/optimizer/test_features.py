"""Features of PyTorch that change what a parameter is, how a gradient comes about, or what happens after a step.

Each is used by a script that runs on two ranks and in one process, see optimizer/test_contract.py. Kinds of parameters,
checkpointing, graphs, freezing and compilation: test_semantics.py. Optimizers, schedulers, closures, clipping,
GradScaler and several optimizers: optimizer/test_contract.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import torchring
from tests.optimizer.test_contract import Side, assert_as_one_process, batch, loss_on, small_model, values
from tests.support.harness import run_ranks

_STEPS = 4


def _train(side: Side, model: nn.Module, loss: Callable[[int, int], Tensor], optimizer: Any = None) -> Sequence[Tensor]:
    """Parameters after a few steps. loss(rank, step)."""
    if optimizer is None:
        optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    optimizer = side.wrap(optimizer, model)
    for step in range(_STEPS):
        optimizer.zero_grad()
        side.mean(lambda rank, step=step: loss(rank, step)).backward()
        optimizer.step()
    return values(model)


class _Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).T


def _parametrized(side: Side) -> Sequence[Tensor]:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    parametrize.register_parametrization(model[0], "weight", _Symmetric())
    parametrizations.orthogonal(model[2])
    return _train(side, model, lambda rank, step: loss_on(model, rank, step))


def _weight_norm(side: Side) -> Sequence[Tensor]:
    """The present kind, and the one before it, which recomputes a plain attribute in each forward."""
    model = small_model()
    parametrizations.weight_norm(model[0])
    with pytest.warns(FutureWarning):
        nn.utils.weight_norm(model[2])
    return _train(side, model, lambda rank, step: loss_on(model, rank, step))


class _LowRank(nn.Module):
    """A frozen layer with a low-rank correction, as of LoRA."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Parameter(torch.full((2, layer.in_features), 0.1, dtype=torch.float64))
        self.up = nn.Parameter(torch.zeros(layer.out_features, 2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + x @ self.down.T @ self.up.T


def _low_rank(side: Side) -> Sequence[Tensor]:
    model = small_model()
    for i in (0, 2, 4):
        model[i] = _LowRank(model[i])
    return _train(side, model, lambda rank, step: loss_on(model, rank, step))


def _functional(side: Side) -> Sequence[Tensor]:
    """torch.func: a call of the module with its parameters as arguments, and gradients per sample within the loss."""
    model = small_model()

    def loss(rank: int, step: int) -> Tensor:
        parameters = dict(model.named_parameters())
        x, y = batch(rank, step)

        def of_sample(x: Tensor, y: Tensor) -> Tensor:
            return nn.functional.mse_loss(torch.func.functional_call(model, parameters, (x,)), y)

        slopes = torch.func.vmap(torch.func.grad(of_sample))(x, y)
        return torch.func.vmap(of_sample)(x, y).mean() + 0.1 * slopes.square().mean()

    return _train(side, model, loss)


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.gated, self.out = nn.GRUCell(1, 3), nn.LSTM(3, 4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        state, states = x.new_zeros(len(x), 3), []
        for column in x.split(1, dim=1):
            state = self.cell(column, state)
            states.append(state)
        outputs, _ = self.gated(torch.stack(states))
        result: Tensor = self.out(outputs[-1])
        return result


def _recurrent(side: Side) -> Sequence[Tensor]:
    torch.manual_seed(2)
    model = _Recurrent().double()
    return _train(side, model, lambda rank, step: loss_on(model, rank, step))


def _averaged(side: Side) -> Sequence[Tensor]:
    """SWA and an EMA of the parameters, and BatchNorm statistics for the average."""
    model = small_model()
    averages = AveragedModel(model), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = side.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for step in range(_STEPS):
        optimizer.zero_grad()
        side.mean(lambda rank, step=step: loss_on(model, rank, step)).backward()
        optimizer.step()
        for average in averages:
            average.update_parameters(model)
    norm = nn.Sequential(averages[0].module, nn.BatchNorm1d(2, dtype=torch.float64))
    update_bn([batch(0, step)[0] for step in range(2)], norm)
    assert norm[1].running_mean is not None
    return [*values(averages[0]), *values(averages[1]), norm[1].running_mean]


def _sparse_adam(side: Side) -> Sequence[Tensor]:
    torch.manual_seed(2)
    model = nn.Embedding(6, 3, sparse=True, dtype=torch.float64)
    adam = torch.optim.SparseAdam(list(model.parameters()), lr=0.1)

    def loss(rank: int, step: int) -> Tensor:
        return model(torch.tensor([rank, step, 5])).square().mean()

    return _train(side, model, loss, adam)


_SCRIPTS: dict[str, Callable[[Side], Sequence[Tensor]]] = {
    "parametrizations": _parametrized,
    "weight_norm": _weight_norm,
    "LoRA": _low_rank,
    "torch.func": _functional,
    "recurrent cells": _recurrent,
    "SWA and EMA": _averaged,
    "SparseAdam": _sparse_adam,
}


def _script(side: Side, name: str) -> Sequence[Tensor]:
    return _SCRIPTS[name](side)


@pytest.mark.parametrize("name", _SCRIPTS)
def test_it_trains_as_in_one_process(name: str) -> None:
    assert_as_one_process(_script, name)


def _count_graph_breaks(rank: int, size: int) -> list[int]:
    """Of a model that is wrapped, and of the same model that is not; and how often the wrapped one was compiled."""
    torch._dynamo.reset()
    counts = []
    for wraps in (False, True):
        model = small_model()
        sgd: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = torchring.wrap(sgd, model) if wraps else sgd
        for step in range(2):
            optimizer.zero_grad()
            loss_on(model, rank, step).backward()
            optimizer.step()
        counts.append(torch._dynamo.explain(model)(batch(rank, 0)[0]).graph_break_count)
    return counts


def test_a_wrapped_model_is_compiled_without_a_graph_break() -> None:
    assert run_ranks(_count_graph_breaks, 2) == [[0, 0]] * 2
