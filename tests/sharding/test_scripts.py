"""What scripts do with a sharded optimizer beside steps: it works as without shard, or is refused by name."""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

import torchring
from tests.sharding.test_step import assert_equal
from tests.support.checks import assert_same_everywhere
from tests.support.harness import ranks, run_pooled
from tests.support.training import attempt, values
from torchring.errors import RingError
from torchring.sharding.step import Shards


def _net() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def _backward(net: nn.Module, step: int = 0) -> None:
    inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + torchring.rank()))
    net(inputs).square().mean().backward()


_OPTIONS: tuple[dict[str, Any], ...] = (
    {},
    {"shard": True},
    {"compression": "bf16"},
    {"accumulate": 2},
    {"algorithm": "native"},
    {"overlap": "thread"},
    {"on_nonfinite": "skip"},
)


@ranks(2)
def test_an_optimizer_that_is_dropped_is_freed(rank: int) -> None:
    for options in _OPTIONS:
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


@ranks(2)
def test_a_rank_that_is_lost_while_parameters_are_cut_leaves_nothing_in_the_optimizer() -> None:
    net = _net()
    plain = torch.optim.AdamW(net.parameters())
    with mock.patch.object(Shards, "extend", side_effect=RingError("a rank is lost")), pytest.raises(RingError):
        torchring.wrap(plain, net, shard=True)
    plain.step()
    plain.load_state_dict(plain.state_dict())


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


class Normed(Optimizer):
    """Divides by the norm of a group: in groups that say so, from a step on."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "normed": 99, "num": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["num"] += 1
            own = [p for p in group["params"] if p.grad is not None]
            is_normed = group["num"] > group["normed"]
            factor = 1 / float(torch.stack([p.grad.norm() for p in own]).norm()) if own and is_normed else 1.0
            for p in own:
                p.add_(p.grad, alpha=-group["lr"] * factor)


@ranks(3)
def test_what_looks_at_all_parameters_or_changes_pieces_is_refused() -> None:
    def refuse(text: str, act: Callable[[], object]) -> None:
        assert text in (said := attempt(act)), said

    net = _net()
    groups: list[dict[str, Any]] = [{"params": [*net[0].parameters()]}, {"params": [*net[2].parameters()]}]
    late, second = dict(groups[0], normed=12), dict(groups[1], normed=0, lr=0)  # a warm-up begins
    for chosen in ([late, groups[1]], [groups[0], second]):
        refuse("depends on other parameters", lambda chosen=chosen: torchring.wrap(Normed(chosen), shard=True))
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


def _pickled(rank: int, size: int, file: Path) -> None:
    net = _net()
    optimizer = torchring.wrap(torch.optim.AdamW(net.parameters()), net, shard=True)
    for step in range(3):
        _backward(net, step)
        optimizer.step()
    torch.save((net, optimizer), file)


def _goes_on(rank: int, size: int, file: Path) -> None:
    net, optimizer = torch.load(file, weights_only=False)
    _backward(net)
    optimizer.step()
    state = optimizer.state_dict(all_ranks=True)["state"]
    assert [float(entry["step"]) for entry in state.values()] == [4.0] * 4
    assert_same_everywhere(list(net.parameters()))


def test_a_pickle_of_a_world_of_one_keeps_its_state_on_several_ranks(tmp_path: Path) -> None:
    run_pooled(_pickled, 1, tmp_path / "job")
    run_pooled(_goes_on, 2, tmp_path / "job")
