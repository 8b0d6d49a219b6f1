"""A GAN on a global batch of unequal shares: each loss has the weight of its batch. What has none is an error.

Other loops: qa/elastic_pairs.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import torchring
from tests.support.harness import ranks, run_ranks
from tests.support.training import attempt

_LENGTH, _GLOBAL_BATCH = 22, 7  # the last global batch has one sample, so other ranks than 0 repeat it with weight 0
_X = torch.randn(_LENGTH, 3, generator=torch.Generator().manual_seed(0)).double()
_DATA = TensorDataset(_X, _X.sum(1, keepdim=True) + torch.arange(_LENGTH)[:, None] * 0.1)


def _parts() -> tuple[list[torch.nn.Module], list[Any]]:
    torch.manual_seed(1)
    nets: list[torch.nn.Module] = [torch.nn.Linear(3, 1).double(), torch.nn.Linear(1, 3).double()]
    return nets, [torch.optim.SGD(net.parameters(), lr=0.02) for net in nets]


def _train(
    nets: list[torch.nn.Module], optimizers: list[Any], batches: Iterable[Any], weigh: Callable[[], Callable[..., None]]
) -> None:
    critic, maker = nets
    for x, y in batches:
        weighed = weigh()
        weighed(optimizers[0])
        critic(x).square().mean().backward()
        fake = maker(y)
        weighed(optimizers[0])
        (critic(fake.detach()) - 1).square().mean().backward()
        optimizers[0].step()
        weighed(*optimizers)
        critic(fake).square().mean().backward()
        optimizers[1].step()
        for optimizer in optimizers:
            optimizer.zero_grad()


@ranks(3, start=run_ranks)
def test_each_loss_has_the_weight_of_its_batch() -> None:
    nets, optimizers = _parts()
    optimizers = [torchring.wrap(optimizers[0], nets[0]), torchring.wrap(optimizers[1])]
    sampler = torchring.elastic.Sampler(_DATA, shuffle=False, global_batch=_GLOBAL_BATCH)
    loader = DataLoader(_DATA, batch_sampler=sampler)
    positions, said = [], []

    def weigh() -> Callable[..., None]:
        weight = sampler.weight()
        positions.append(sampler.position)
        return lambda *those: [each.weigh(weight) for each in those] and None

    def without_weights() -> None:
        for x, _ in loader:
            nets[0](x).sum().backward()

    @torchring.elastic.run
    def train(state: Any) -> None:
        _train(nets, optimizers, loader, weigh)
        positions.append(sampler.position)
        optimizers[0].zero_grad()
        sampler.set_epoch(1)
        with torch.no_grad():
            evaluated = iter(loader)
            next(evaluated)
        nets[0](_X).sum().backward()  # for a loop that evaluates
        optimizers[0].zero_grad()
        said.append(attempt(without_weights))

    parts = {"model": nets[0], "optimizer": optimizers[0], "other": nets[1], "second": optimizers[1]}
    train(torchring.elastic.State(**parts, sampler=sampler))
    assert positions == [0, 7, 14, 21, 22]
    assert said[0].startswith("GradientError: a backward() in a loop over a torchring.data.Sampler was not weighed.")
    expected, plain = _parts()
    batches = [_DATA[i : i + _GLOBAL_BATCH] for i in range(0, _LENGTH, _GLOBAL_BATCH)]
    _train(expected, plain, batches, lambda: lambda *those: None)
    for net, right in zip(nets, expected, strict=True):
        torch.testing.assert_close(net.state_dict(), right.state_dict(), rtol=1e-9, atol=1e-11)
