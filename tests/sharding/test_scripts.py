"""What scripts do with a sharded optimizer beside steps: it works as without shard, or is refused by name."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

import torchring
from tests.sharding.test_step import assert_equal
from tests.support.checks import assert_same_everywhere
from tests.support.harness import ranks
from tests.support.training import attempt, values


def _net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def _backward(net: nn.Module, step: int = 0) -> None:
    inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + torchring.rank()))
    net(inputs).square().mean().backward()


@ranks(2)
def test_an_optimizer_that_is_dropped_is_freed(rank: int) -> None:
    every: tuple[dict[str, Any], ...] = (
        {},
        {"shard": True},
        {"compression": "bf16", "accumulate": 2, "overlap": "thread"},
    )
    for options in every:
        net = _net()
        optimizer: Any = torchring.wrap(torch.optim.AdamW(net.parameters()), net, **options)
        for step in range(options.get("accumulate", 1)):
            _backward(net, step)
        optimizer.step()
        dropped = weakref.ref(optimizer)
        del optimizer
        gc.collect()
        assert dropped() is None, options
    optimizer = torchring.wrap(torch.optim.AdamW(net.parameters()), net)
    with torchring.join(optimizer):  # does not miss those that were dropped
        for step in range(2 + rank):
            _backward(net, step)
            optimizer.step()
    optimizer.close()


# Hooks, and methods beside step()


def _clip(optimizer: Optimizer, *_: Any) -> None:
    nn.utils.clip_grad_norm_([p for group in optimizer.param_groups for p in group["params"]], 0.05)


@torch.no_grad()
def _project(optimizer: Optimizer, *_: Any) -> None:
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        parameter.div_(parameter.norm().clamp(min=0.5))


class Averaging(Optimizer):
    """As Schedule-Free: trains one point, and evaluates an average of points, which eval() puts in its place."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "evaluates": False})
        self.counts = {"steps": 0}

    def _swap(self, evaluates: bool) -> int:
        num_swapped = 0
        for group in self.param_groups:
            for p in group["params"] if group["evaluates"] is not evaluates else ():
                if "average" in self.state[p]:
                    kept = p.detach().clone()
                    p.data.copy_(self.state[p]["average"])
                    self.state[p]["average"] = kept
                    num_swapped += 1
            group["evaluates"] = evaluates
        return num_swapped

    def eval(self) -> int:
        return self._swap(True)

    def train(self) -> int:
        return self._swap(False)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.counts["steps"] += 1
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                p.sub_(p.grad, alpha=group["lr"])
                self.state[p].setdefault("average", p.detach().clone()).lerp_(p, 1 / self.counts["steps"])


def _train(kind: str, shard: bool) -> list[torch.Tensor]:
    net = _net()
    parameters = [{"params": net[0].parameters(), "lr": 0.2}, {"params": net[2].parameters()}]
    plain: Any = Averaging(parameters) if kind == "eval" else torch.optim.AdamW(parameters, lr=0.01)
    handles = []
    if kind == "before":
        handles.append(plain.register_step_pre_hook(_clip))
    elif kind == "after":
        handles.append(plain.register_step_post_hook(_project))
    elif kind == "all optimizers":
        handles.append(register_optimizer_step_post_hook(_project))
    optimizer: Any = torchring.wrap(plain, net, shard=shard)
    seen = []
    for step in range(5):
        optimizer.zero_grad()
        _backward(net, step)
        optimizer.step()
        if kind == "eval" and step % 2:
            assert optimizer.eval() > 0
            seen += values(net)
            optimizer.train()
    for handle in handles:
        handle.remove()
    optimizer.close()
    return [*seen, *values(net)]


@pytest.mark.parametrize("kind", ["before", "after", "all optimizers", "eval"])
@ranks(2)
def test_hooks_and_other_methods_of_the_optimizer_have_whole_parameters(kind: str) -> None:
    found = _train(kind, True)
    assert_equal(_train(kind, False), found)
    assert_same_everywhere(found)


# What is refused


@ranks(3)
def test_what_looks_at_all_parameters_or_changes_pieces_is_refused() -> None:
    def refuse(text: str, act: Callable[[], object]) -> None:
        assert text in (said := attempt(act)), said

    net = _net()
    groups: list[dict[str, Any]] = [{"params": [*net[0].parameters()]}, {"params": [*net[2].parameters()]}]
    patched = torch.optim.SGD(net.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(patched, 1)
    torchring.wrap(patched, net, shard=True).close()
    patched = torch.optim.SGD(net.parameters(), lr=0.1)
    patched.step = lambda *_: None  # type: ignore[assignment]
    refuse("was replaced in the instance", lambda: torchring.wrap(patched, net, shard=True))

    plain = torch.optim.AdamW(groups)
    optimizer: Any = torchring.wrap(plain, net, shard=True)
    _backward(net)
    optimizer.step()
    first, last = (group["params"] for group in plain.param_groups)
    first[:], last[:] = first[:1], [*last, first[1]]
    refuse("0.bias is in another parameter group", optimizer.step)
    first[:], last[:] = [first[0], last[-1]], last[:2]
    state, bias = optimizer.state, net[2].bias
    for act in (lambda: state.pop(bias, None), lambda: state.__setitem__(bias, {}), lambda: state[bias]):
        refuse("GradientError: optimizer.state has no entry for 2.bias", act)
    optimizer.step()
    optimizer.close()
