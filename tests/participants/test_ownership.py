"""Parameters that no wrapped optimizer has, and those that belong to a rank on purpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.optim import optimizer as plain

import torchring
from tests.support.checks import assert_same_on_all_ranks, digest, logged
from tests.support.harness import run_pooled, run_ranks
from tests.support.training import attempt, loss_on, momentum, small_model, values

_NUM_STEPS = 5


class _Script:
    """A training that is changed in some way before a step. Each `case` returns that step and the change."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.model = small_model()
        self.others: list[torch.optim.Optimizer] = []  # not wrapped; stepped first, and zeroed

    def run(self, case: str) -> None:
        self.trained = range(5)  # layers of the wrapped optimizer
        when, change = getattr(self, case)()
        own = [p for i in self.trained for p in self.model[i].parameters()]
        self.optimizer = torchring.wrap(torch.optim.SGD(own, lr=0.1), self.model)
        for step in range(_NUM_STEPS):
            if step == when:
                change()
            self.optimizer.zero_grad()
            loss_on(self.model, self.rank, step).backward()
            for other in self.others:
                other.step()
                other.zero_grad()
            self.optimizer.step()

    def plain_optimizer(self) -> Any:
        self.trained, self.others = range(3), [momentum(self.model[4])]
        return 0, lambda: None

    def assigned_early(self) -> Any:
        return 0, self._assign

    def assigned(self) -> Any:
        return 1, self._assign

    def new_head(self) -> Any:
        return 0, lambda: self.model.__setitem__(4, nn.Linear(3, 2).double())

    def added(self) -> Any:
        return 2, lambda: self.model.append(nn.Linear(2, 2).double())

    def parametrized(self) -> Any:
        return 2, lambda: parametrizations.weight_norm(self.model[2])

    def unfrozen(self) -> Any:
        self.trained = range(3)
        self.model[4].requires_grad_(False)
        return 3, lambda: self.model[4].requires_grad_(True)

    def earlier(self) -> Any:
        """Gradients of an earlier training, of what is not trained any more. A layer is dropped later."""
        loss_on(self.model, self.rank, 0).backward()
        self.trained = range(2, 5)
        first = self.model[0]
        self.model[0] = _Fixed(first)
        self.model[3].register_module("auxiliary", nn.Linear(2, 2).double())
        for p in first.parameters():
            p.grad = torch.zeros_like(p)
        return 1, lambda: delattr(self.model[3], "auxiliary")

    def _assign(self) -> None:
        self.model.load_state_dict(
            {name: value.clone() for name, value in self.model.state_dict().items()}, assign=True
        )


class _Fixed(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return self.layer(x)


_REPLACED = "is not a parameter of the model any more"
_CASES = {
    "plain_optimizer": "4.weight, 4.bias get gradients that nobody reduces: each rank would train alone what its SGD",
    "assigned_early": _REPLACED,
    "assigned": _REPLACED,
    "new_head": f"the 4.weight that was wrapped {_REPLACED}, and 4.weight, 4.bias get gradients that nobody reduces",
    "added": "5.weight, 5.bias get gradients that nobody reduces, because no optimizer has",
    "parametrized": _REPLACED,
    "unfrozen": "because no optimizer has what was added to the model or unfrozen",
    "earlier": "",
}


def _run_all(rank: int, world_size: int) -> dict[str, tuple[str, str]]:
    found = {}
    for case in _CASES:
        script = _Script(rank)
        error = attempt(lambda script=script, case=case: script.run(case))
        found[case] = error, digest([p.detach() for p in script.optimizer.param_groups[0]["params"]])
        script.optimizer.close()
    return found


def test_trained_parameters_belong_to_a_wrapped_optimizer() -> None:
    """The error comes on all ranks, before the optimizer has stepped by gradients through other layers."""
    results = run_pooled(_run_all, 2)
    for case, fragment in _CASES.items():
        for error, _ in (result[case] for result in results):
            assert error.startswith("GradientError: ") == bool(fragment), (case, error)
            assert fragment in error, (case, error)
        assert_same_on_all_ranks([result[case][1] for result in results])


def _with_experts(rank: int, world_size: int) -> tuple[list[Tensor], list[Tensor], list[float], str]:
    """The second layer is an expert of the rank's own, with a buffer, and on rank 1 wider."""
    model = small_model()
    torch.manual_seed(rank)
    model[2] = nn.Sequential(nn.Linear(7, 4 + rank), nn.BatchNorm1d(4 + rank), nn.Linear(4 + rank, 3)).double()
    shared = [p for i in (0, 4) for p in model[i].parameters()]
    before = values(model[2])
    optimizer = torchring.wrap(torch.optim.SGD(shared, lr=0.1), model, ignore=["2", model[2][0].weight])
    own = torch.optim.SGD(model[2].parameters(), lr=0.1)
    kept = [float((a - b).detach().abs().max()) for a, b in zip(before, model[2].parameters(), strict=True)]
    for step in range(2):
        optimizer.zero_grad()
        own.zero_grad()
        loss_on(model, rank, step).backward()
        optimizer.step()
        own.step()
    statistics = model[2][1].running_mean
    problem = attempt(lambda: torchring.wrap(momentum(model[2]), model, ignore=[model[2]]))
    optimizer.close()
    return [p.detach() for p in shared], [statistics], kept, problem


def test_ignored_parameters_and_buffers_belong_to_a_rank() -> None:
    (shared, first, kept, problem), (others, second, *_) = run_pooled(_with_experts, 2)
    assert digest(shared) == digest(others)
    assert first[0].shape != second[0].shape
    assert not any(kept)
    assert problem.startswith("ValueError: 2.0.weight is ignored, and in the optimizer")


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


def _beside(rank: int, world_size: int) -> tuple[dict[str, list[str]], list[int]]:
    found, num_hooks = {}, []
    for case in _BESIDE:
        model, loss, backbone = nn.Linear(2, 2), nn.Linear(2, 1), nn.Parameter(torch.eye(2))
        own = [backbone] if case == "backbone" else [*loss.parameters()]
        stepped = torch.optim.SGD(own, lr=0.1)
        if case == "wrapped":
            stepped = torchring.wrap(stepped, loss)
        whole, ignore = (nn.ModuleList([model, loss]), [loss]) if case == "ignored" else (model, [])
        optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1), whole, ignore=ignore)
        with logged() as found[case]:
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
        torchring.shutdown()
        num_hooks.append(len(plain._global_optimizer_pre_hooks) + len(own[0]._post_accumulate_grad_hooks or ()))
    return found, num_hooks


def test_a_plain_optimizer_that_the_same_backward_reaches_is_named_once() -> None:
    (first, num_hooks), (second, _) = run_ranks(_beside, 2)
    for case, fragment in _BESIDE.items():
        assert len(first[case]) == bool(fragment), (case, first[case])
        assert all(line.startswith(fragment) for line in first[case]), first[case]
    assert not any(second.values())
    assert not any(num_hooks)
