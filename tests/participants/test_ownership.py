"""Parameters that no wrapped optimizer has, and those that belong to a rank on purpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.optim import optimizer as plain

import torchring
from tests.support.checks import assert_same_everywhere, logged
from tests.support.harness import ranks, run_ranks
from tests.support.training import attempt, loss_on, momentum, small_model, values

_NUM_STEPS = 5


def _assign(model: nn.Module) -> None:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


class _Fixed(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return self.layer(x)


_REPLACED = "is not a parameter of the model any more"
_BY_SGD = "4.weight, 4.bias get gradients that nobody reduces: each rank would train alone what its SGD"
_NEW_HEAD = f"the 4.weight that was wrapped {_REPLACED}, and 4.weight, 4.bias get gradients that nobody reduces"
_ADDED = "5.weight, 5.bias get gradients that nobody reduces, because no optimizer has"
_UNFROZEN = "because no optimizer has what was added to the model or unfrozen"
# Layers that are trained, before which step what is done to the model, and words of the error.
_CASES: dict[str, tuple[range, int, Callable[[Any], Any], str]] = {
    "plain optimizer": (range(3), 0, lambda model: None, _BY_SGD),
    "assigned early": (range(5), 0, _assign, _REPLACED),
    "assigned": (range(5), 1, _assign, _REPLACED),
    "new head": (range(5), 0, lambda model: model.__setitem__(4, nn.Linear(3, 2).double()), _NEW_HEAD),
    "added": (range(5), 2, lambda model: model.append(nn.Linear(2, 2).double()), _ADDED),
    "parametrized": (range(5), 2, lambda model: parametrizations.weight_norm(model[2]), _REPLACED),
    "unfrozen": (range(3), 3, lambda model: model[4].requires_grad_(True), _UNFROZEN),
    "earlier": (range(2, 5), 1, lambda model: delattr(model[3], "auxiliary"), ""),
}


@pytest.mark.parametrize("case", _CASES)
@ranks(2)
def test_trained_parameters_belong_to_a_wrapped_optimizer(case: str, rank: int) -> None:
    """The error comes on all ranks, before the optimizer has stepped by gradients through other layers."""
    trained, when, change, said = _CASES[case]
    model = small_model()
    others = [momentum(model[4])] if case == "plain optimizer" else []
    model[4].requires_grad_(case != "unfrozen")
    if case == "earlier":  # gradients of an earlier training, of what is not trained any more
        loss_on(model, rank, 0).backward()
        for p in model[0].parameters():
            p.grad = torch.zeros_like(p)
        model[0] = _Fixed(model[0])
        model[3].register_module("auxiliary", nn.Linear(2, 2).double())
    own = [p for i in trained for p in model[i].parameters()]
    optimizer = torchring.wrap(torch.optim.SGD(own, lr=0.1), model)

    def train() -> None:
        for step in range(_NUM_STEPS):
            if step == when:
                change(model)
            optimizer.zero_grad()
            loss_on(model, rank, step).backward()
            for other in others:
                other.step()
                other.zero_grad()
            optimizer.step()

    error = attempt(train)
    assert error.startswith("GradientError: ") == bool(said), error
    assert said in error
    assert_same_everywhere(own)


@ranks(2)
def test_ignored_parameters_and_buffers_belong_to_a_rank(rank: int) -> None:
    """The second layer is an expert of the rank's own, with a buffer, and on rank 1 wider."""
    model = small_model()
    torch.manual_seed(rank)
    model[2] = nn.Sequential(nn.Linear(7, 4 + rank), nn.BatchNorm1d(4 + rank), nn.Linear(4 + rank, 3)).double()
    shared = [p for i in (0, 4) for p in model[i].parameters()]
    before = values(model[2])
    optimizer = torchring.wrap(torch.optim.SGD(shared, lr=0.1), model, ignore=["2", model[2][0].weight])
    own = torch.optim.SGD(model[2].parameters(), lr=0.1)
    assert all(map(torch.equal, before, model[2].parameters()))
    for step in range(2):
        optimizer.zero_grad()
        own.zero_grad()
        loss_on(model, rank, step).backward()
        optimizer.step()
        own.step()
    assert_same_everywhere(shared)
    assert model[2][1].running_mean.shape == (4 + rank,)
    problem = attempt(lambda: torchring.wrap(momentum(model[2]), model, ignore=[model[2]]))
    assert problem.startswith("ValueError: 2.0.weight is ignored, and in the optimizer")
    optimizer.close()


@ranks(2)
def test_a_closure_that_adds_a_parameter_past_torchring_ends_before_the_update(rank: int) -> None:
    model, extra = small_model(), nn.Parameter(torch.ones(2, dtype=torch.float64))
    optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)

    def closure() -> torch.Tensor:
        loss = loss_on(model, rank, 0) + (1 + rank) * extra.sum()
        loss.backward()
        optimizer.param_groups[0]["params"].append(extra)
        return loss

    assert "came there past torchring" in attempt(lambda: optimizer.step(closure))
    assert extra.tolist() == [1, 1]


def test_wrong_things_to_ignore_are_refused() -> None:
    model = small_model()
    wrap: Callable[..., Any] = torchring.wrap
    for ignore, error in {
        "0": "TypeError: ignore takes a list",
        ("5",): "ValueError: ignore has '5', which is no parameter, buffer or module of the model",
        (nn.Linear(1, 1),): "ValueError: ignore has a Linear",
        (0,): "TypeError: ignore takes names, modules and parameters, got a int",
    }.items():
        assert error in attempt(lambda ignore=ignore: wrap(momentum(model), model, ignore=ignore))
    assert "pass the model" in attempt(lambda: torchring.wrap(momentum(model), ignore=["0"]))


_BESIDE = {  # what is logged of an optimizer beside the wrapped one: the parameter, and its way
    "loss": "a SGD that was not wrapped steps the weight of a Linear",
    "backbone": "a SGD that was not wrapped steps a parameter of shape (2, 2)",
    "wrapped": "",
    "ignored": "",
    "model of its own": "",
    "zeroed before": "",
}


@pytest.mark.parametrize("case", _BESIDE)
@ranks(2, start=run_ranks)
def test_a_plain_optimizer_that_the_same_backward_reaches_is_named_once(case: str, rank: int) -> None:
    model, loss, backbone = nn.Linear(2, 2), nn.Linear(2, 1), nn.Parameter(torch.eye(2))
    own = [backbone] if case == "backbone" else [*loss.parameters()]
    stepped = torch.optim.SGD(own, lr=0.1)
    if case == "wrapped":
        stepped = torchring.wrap(stepped, loss)
    whole, ignore = (nn.ModuleList([model, loss]), [loss]) if case == "ignored" else (model, [])
    optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1), whole, ignore=ignore)
    with logged() as lines:
        for _ in range(4):
            optimizer.zero_grad()
            stepped.zero_grad()
            y = model(torch.randn(3, 2) @ backbone)
            if case == "model of its own":
                y.sum().backward()
                loss(y.detach()).sum().backward()
            elif case == "zeroed before":
                stepped.step()
                y.sum().backward()
            else:
                loss(y).sum().backward()
            optimizer.step()
            stepped.step()
    assert len(lines) == (rank == 0 and bool(_BESIDE[case])), lines
    assert all(line.startswith(_BESIDE[case]) for line in lines), lines
    torchring.shutdown()
    assert not plain._global_optimizer_pre_hooks
    assert not own[0]._post_accumulate_grad_hooks
