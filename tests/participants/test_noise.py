"""The gradient noise scale is that of a literal re-computation."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchring
from tests.support.harness import ranks, run_ranks
from torchring.gradients.views import CAN_SWAP
from torchring.participants import noise

_NUM_REDUCTIONS = 150
_LAST = _NUM_REDUCTIONS - 2  # is counted: what a reduction finds is told in the next one
_BATCH = 4


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))


def _sizes(kind: str, rank: int, turn: int) -> int:
    return 2 + 3 * rank if kind == "weighed" else _BATCH


def _batch(kind: str, rank: int, turn: int) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * turn + rank)
    return torch.randn(_sizes(kind, rank, turn), 6, generator=generator) + 0.7


def _loss(model: nn.Module, batch: Tensor, kind: str = "", micro: int = 0) -> Tensor:
    if kind == "early" and micro == 1:  # the first layer has its gradient from the other micro-step
        model(batch)
        first, tanh, last = model.children()
        return last(tanh(first(batch)).detach()).square().mean()
    return model(batch).square().mean()


def _train(rank: int, size: int, kind: str, options: dict[str, Any]) -> torchring.Stats:
    model = _model()
    optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.0), model, noise_scale=True, **options)
    accumulate = options.get("accumulate", 1)
    for turn in range(_NUM_REDUCTIONS):
        if kind == "frozen" and turn == 10:
            model[0].requires_grad_(False)  # type: ignore[index]
        optimizer.zero_grad()
        for micro in range(accumulate):
            if kind == "weighed":
                optimizer.weigh(_sizes(kind, rank, turn))
            _loss(model, _batch(kind, rank, accumulate * turn + micro), kind, micro).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)  # after which `.grad` is not the mean any more
        optimizer.step()
    stats = optimizer.stats()
    optimizer.close()
    return stats


_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("plain", {}),
    "sum": ("plain", {"op": "sum"}),
    "fp16": ("plain", {"compression": "fp16"}),
    "accumulate": ("plain", {"accumulate": 2}),
    "unused in the last micro-step": ("early", {"accumulate": 2}),
    **({"sharded": ("plain", {"shard": True})} if CAN_SWAP else {}),
    "weighed": ("weighed", {}),
}


def _expected(kind: str, size: int, accumulate: int) -> float:
    """The noise scale in samples, from float64 gradients of single batches."""
    model = _model().double()
    between = noise.REDUCTIONS_BETWEEN_SAMPLES
    turns = range(between, _LAST + 1, between)
    signals, noises, samples = [], [], []
    for turn in turns:
        numbers = [_sizes(kind, rank, turn) for rank in range(size)]
        gradients = []
        for rank in range(size):
            batches = [_batch(kind, rank, accumulate * turn + micro).double() for micro in range(accumulate)]
            loss = torch.stack([_loss(model, batch, kind, micro) for micro, batch in enumerate(batches)]).mean()
            gradients.append(torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))]))
        total = sum(numbers)
        mean = sum(n * g for n, g in zip(numbers, gradients, strict=True)) / total  # type: ignore[union-attr,operator]
        small = float(sum(n * g.square().sum() for n, g in zip(numbers, gradients, strict=True)) / total)
        large = float(mean.square().sum())  # type: ignore[union-attr]
        small_batch, large_batch = accumulate * total / size, accumulate * total
        signals.append((large_batch * large - small_batch * small) / (large_batch - small_batch))
        noises.append((small - large) / (1 / small_batch - 1 / large_batch))
        samples.append(large_batch)
    return sum(noises) / sum(signals)


@ranks(2, start=run_ranks)
def test_noise_scale_is_that_of_a_literal_computation(rank: int) -> None:
    _train(rank, 2, "frozen", {})  # goes on
    for name, (kind, options) in _CASES.items():
        found, accumulate = _train(rank, 2, kind, options), options.get("accumulate", 1)
        own, other = torchring.all_gather_object((found.noise_scale, found.batch_size))
        assert own == other
        assert found.batch_size == accumulate * sum(_sizes(kind, of, 0) for of in range(2))
        tolerance = 2e-3 if name == "fp16" else 1e-4
        assert found.noise_scale == pytest.approx(_expected(kind, 2, accumulate), rel=tolerance), name


def test_noise_that_hides_the_gradient() -> None:
    """Orthogonal gradients of two ranks: |G|^2 = 2 * 0.5 - 1 = 0."""
    sampled = noise.NoiseScale.__new__(noise.NoiseScale)
    sampled._num_samples, sampled._signal, sampled._noise = 8, 0.0, 1.0
    assert sampled.noise_scale == math.inf
