"""free_gradients: trains as without it, and whoever needs a whole gradient is told so before anything goes wrong."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchring
from tests.sharding.test_step import _KINDS, Lines, Net, _assert_equal_states, _groups, _parameters
from tests.support.checks import assert_same_on_all_ranks
from tests.support.grids import grid
from tests.support.harness import run_pooled, run_ranks
from tests.support.training import attempt
from torchring.errors import GradientError
from torchring.memory import host as host_module

_FREE: dict[str, Any] = {"shard": True, "free_gradients": True}
_SMALL_BUCKETS = 0.05  # MiB


def _train(net: Net, optimizer: Any, num_steps: int) -> list[int]:
    """Returns how many buckets each backward has stepped."""
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    num_early = []
    for step in range(num_steps):
        images = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(10 * step + torchring.rank()))
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        net(images, step if torchring.rank() else 0).square().mean().backward()
        early = optimizer._sync.early_steps
        num_early.append(early.num_stepped if early is not None else 0)
        optimizer.step()
        scheduler.step()
    return num_early


def _compared(rank: int, size: int, kinds: list[str], has_hosts: bool = False) -> list[list[Tensor]]:
    if has_hosts:
        host_module._host_identity = lambda: f"host {rank}"
        torchring.init()
    results = []
    for kind in kinds:
        plain, net = Net(), Net()
        optimizer = torchring.wrap(_KINDS[kind](_groups(plain)), plain)
        free = torchring.wrap(_KINDS[kind](_groups(net)), net, bucket_mb=_SMALL_BUCKETS, **_FREE)
        _train(plain, optimizer, 5)
        num_early = _train(net, free, 5)
        assert num_early[0] == 0
        assert 0 < num_early[1] < len(free._sync.layout.buckets), kind  # one is never used as a whole
        exactly = size == 2 or not has_hosts  # Gloo adds up in the order of a ring
        for (name, expected), found in zip(plain.named_parameters(), net.parameters(), strict=True):
            assert torch.equal(expected, found) if exactly else torch.allclose(expected, found, atol=1e-5), (kind, name)
        _assert_equal_states(optimizer.state_dict(), free.state_dict(all_ranks=True), exactly=exactly)
        results.append(_parameters(net))
        optimizer.close()
        free.close()
    return results


@grid("size", [2, 3, 4], keep=lambda size: size in (2, 3))
def test_trains_as_without_shard(size: int) -> None:
    kinds = ["SGD", "AdamW", "AdamW fused", "NAdam", "Adagrad fused"]
    for ranks in zip(*run_pooled(_compared, size, kinds), strict=True):
        for same in zip(*ranks, strict=True):
            assert_same_on_all_ranks(list(same))


@pytest.mark.parametrize("size", [2, 3])
def test_between_hosts(size: int) -> None:
    for ranks in zip(*run_ranks(_compared, size, ["AdamW", "SGD fused"], True), strict=True):
        for same in zip(*ranks, strict=True):
            assert_same_on_all_ranks(list(same))


def _model() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 300), nn.Tanh(), nn.Linear(300, 6))


def _loss(net: nn.Module, step: int, factor: float = 1.0) -> Tensor:
    data = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + torchring.rank()))
    out: Tensor = net(data).square().mean() * factor
    return out


def _uneven(net: nn.Module, optimizer: Any, rank: int) -> None:
    with torchring.join(optimizer):
        for step in range((3, 6)[rank]):
            optimizer.zero_grad()
            _loss(net, step).backward()
            optimizer.step()


def _around_a_step(rank: int, size: int) -> None:
    """What scripts do around a step without a need for gradients, each for twins, after steps inside backward."""
    for act in ("accumulate", "no_sync", "weigh", "skip", "not finite", "group", "hook", "join", "several"):
        outcomes = []
        for free in ({}, _FREE):
            net = _model()
            sgd = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
            options: dict[str, Any] = {"on_nonfinite": "skip"} if act == "not finite" else {}
            optimizer = torchring.wrap(sgd, net, accumulate=2 if act == "accumulate" else 1, **options, **free)
            other = _model()
            second: torch.optim.Optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
            if act == "several":
                second = torchring.wrap(second, other, **free)
            num_hooked: list[int] = []
            for step in range(6):
                late = step > 2
                if late and act == "hook" and not num_hooked:
                    sgd.register_step_post_hook(lambda *_, calls=num_hooked: calls.append(1))  # type: ignore[misc]
                if step == 3 and act == "group":
                    net.extra = nn.Parameter(torch.ones(7))
                    optimizer.add_param_group({"params": [net.extra], "lr": 0.5})
                if act == "accumulate":
                    _loss(net, 50 + step).backward()
                if late and act == "no_sync":
                    with optimizer.no_sync():
                        _loss(net, 50 + step).backward()
                if late and act == "weigh":
                    optimizer.weigh(rank + 1)
                if late and act == "skip" and rank == step % size:
                    optimizer.skip()
                else:
                    factor = float("nan") if act == "not finite" and (step, rank) == (4, 1) else 1.0
                    loss = _loss(net, step, factor) + (net.extra.sum() if hasattr(net, "extra") else 0)
                    (loss + _loss(other, step) if act == "several" else loss).backward()
                num_early = optimizer._sync.early_steps.num_stepped if free else 0
                waits = act == "not finite" or (late and act in ("weigh", "skip", "hook"))
                assert bool(num_early) == (bool(free) and step > 0 and not waits), (act, step)
                optimizer.step()
                optimizer.zero_grad()
                if act == "several":
                    second.step()
                    second.zero_grad()
            if act == "join":
                _uneven(net, optimizer, rank)
            assert len(num_hooked) == (3 if act == "hook" else 0)
            outcomes.append([*_parameters(net), *_parameters(other)])
            optimizer.close()
            if isinstance(second, torchring.DistributedOptimizer):
                second.close()
        for expected, found in zip(*outcomes, strict=True):
            assert torch.equal(expected, found), act


def test_with_what_scripts_do_around_a_step() -> None:
    run_pooled(_around_a_step, 2)


def _refused(rank: int, size: int) -> None:
    """Nothing is stepped before the first error: the second round is the first that steps inside backward."""
    net = _model()
    before = _parameters(net)
    optimizer = torchring.wrap(torch.optim.AdamW(net.parameters()), net, **_FREE)
    _loss(net, 0).backward()
    grad = net[0].weight.grad
    assert grad is not None
    assert (grad.shape, grad.dtype, grad.device) == ((300, 6), torch.float32, torch.device("cpu"))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    for use in (
        lambda: nn.utils.clip_grad_norm_(net.parameters(), 1.0),
        lambda: scaler.unscale_(optimizer),
        lambda: grad.norm(),
        lambda: grad.zero_(),
        lambda: _loss(net, 1).backward(),  # without zero_grad()
    ):
        with pytest.raises(GradientError, match="leave free_gradients out"):
            use()
    for expected, found in zip(before, net.parameters(), strict=True):
        assert torch.equal(expected, found)
    torchring.shutdown()


def _refused_later(rank: int, size: int) -> None:
    for act, match in (
        ("state", "state_dict.* call step\\(\\) first"),
        ("options", "changed between backward"),
        ("no step", "step\\(\\) was not called after it"),
        ("kept", "the script keeps a tensor for the gradient of 0.weight"),
        ("thaw", "a frozen parameter has come to require a gradient"),
        ("not finite", "the gradient of .* is not finite; NaN or infinity came from rank 1"),
        ("detached", "modified by an inplace operation"),
    ):
        net = _model()
        net.frozen = nn.Parameter(torch.ones(3), requires_grad=False)
        optimizer = torchring.wrap(torch.optim.AdamW(net.parameters()), net, bucket_mb=0, **_FREE)
        for step in range(3):
            optimizer.zero_grad()
            _loss(net, step).backward()
            optimizer.step()
        optimizer.zero_grad()

        def act_wrongly(act: str = act, net: Any = net, optimizer: Any = optimizer) -> None:
            kept = torch.zeros_like(net[0].weight)
            if act == "kept":
                net[0].weight.grad = kept
            net.frozen.requires_grad_(act == "thaw")
            # Backward comes to what forward has computed first when the bucket of the last weight has left.
            first = (net[0].bias.sum() * net[2].weight.detach()).sum() if act == "detached" else torch.zeros(())
            loss = _loss(net, 3, float("nan") if act == "not finite" and rank == 1 else 1.0) + first
            if act == "thaw":
                loss = loss + net.frozen.sum()
            loss.backward()
            if act == "state":
                optimizer.state_dict()
            if act == "no step":
                optimizer.zero_grad()
                _loss(net, 4).backward()
            optimizer.param_groups[0]["lr"] = 0.5
            optimizer.step()

        assert re.search(match, error := attempt(act_wrongly)), (act, error)
        torchring.shutdown()


def test_what_needs_a_gradient_is_refused_before_anything_is_stepped() -> None:
    run_ranks(_refused, 2)


def test_what_stands_between_backward_and_step_is_refused() -> None:
    run_ranks(_refused_later, 2)


def _falls_back(rank: int, size: int) -> list[list[str]]:
    said = []
    with pytest.raises(ValueError, match="free_gradients=True takes shard=True"):
        torchring.wrap(torch.optim.SGD(_model().parameters(), lr=0.1), free_gradients=True)
    for act in ("compression", "Muon", "part", "frozen twin"):
        logging.getLogger("torchring").addHandler(lines := Lines())
        net = _model()
        if act == "part":
            net[0].bias = nn.Parameter(torch.zeros(600)[:300])
        if act == "frozen twin":
            net.twin = nn.Parameter(net[0].bias.data, requires_grad=False)
        parameters = [p for p in net.parameters() if p.dim() == 2 or act != "Muon"]
        make = torch.optim.Adafactor if act == "Muon" else torch.optim.AdamW
        compression: Any = "bf16" if act == "compression" else None
        optimizer = torchring.wrap(make(parameters), net, compression=compression, **_FREE)
        _loss(net, 0).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        said.append([line for line in lines.lines if "keeps whole gradients" in line])
        optimizer.close()
        logging.getLogger("torchring").removeHandler(lines)
    return said


def test_falls_back_to_whole_gradients_and_says_why() -> None:
    first, second = run_pooled(_falls_back, 2)
    reasons = ("another dtype", "Adafactor needs whole", "0.bias is part of a", "0.bias is part of a")
    for lines, reason in zip(first, reasons, strict=True):
        assert len(lines) == 1
        assert reason in lines[0]
    assert not any(second)
