"""What scripts do with a sharded optimizer beside steps: it works as without shard, or is refused by name."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import torchring
from tests.support.harness import run_pooled
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
    {"op": "adasum"},
)


def _dropped(rank: int, size: int) -> None:
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
    optimizer = torchring.wrap(torch.optim.AdamW(net.parameters()), net, shard=True)
    with torchring.join(optimizer):  # does not miss those that were dropped
        for step in range(2 + rank):
            _backward(net, step)
            optimizer.step()
    optimizer.close()


def test_an_optimizer_that_is_dropped_is_freed() -> None:
    run_pooled(_dropped, 2)


def _lost(*_: Any) -> None:
    raise RingError("a rank is lost")


def _is_lost_while_parameters_are_cut(rank: int, size: int) -> None:
    net = _net()
    plain = torch.optim.AdamW(net.parameters())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Shards, "extend", _lost)
        with pytest.raises(RingError):
            torchring.wrap(plain, net, shard=True)
    plain.step()
    plain.load_state_dict(plain.state_dict())


def test_a_rank_that_is_lost_while_parameters_are_cut_leaves_nothing_in_the_optimizer() -> None:
    run_pooled(_is_lost_while_parameters_are_cut, 2)
