"""The gradient noise scale is that of a literal re-computation."""

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


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 2))


def _size(kind: str, rank: int) -> int:
    return 2 + 3 * rank if kind == "weighed" else 4


def _loss(model: nn.Module, kind: str, rank: int, at: int, micro: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * at + rank)
    batch = (torch.randn(_size(kind, rank), 6, generator=generator) + 0.7).to(next(model.parameters()).dtype)
    if kind == "early" and micro == 1:  # the first layer has its gradient from the other micro-step
        model(batch)  # which is counted
        first, tanh, last = model.children()
        return last(tanh(first(batch)).detach()).square().mean()
    return model(batch).square().mean()


def _train(rank: int, kind: str, options: dict[str, Any]) -> torchring.Stats:
    model = _model()
    optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.0), model, noise_scale=True, **options)
    accumulate = options.get("accumulate", 1)
    for turn in range(_NUM_REDUCTIONS):
        if kind == "frozen" and turn == 10:
            model[0].requires_grad_(False)  # type: ignore[index]
        optimizer.zero_grad()
        for micro in range(accumulate):
            if kind == "weighed":
                optimizer.weigh(_size(kind, rank))
            _loss(model, kind, rank, accumulate * turn + micro, micro).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)  # after which `.grad` is not the mean any more
        optimizer.step()
    stats = optimizer.stats()
    optimizer.close()
    return stats


_CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("plain", {}),
    "sum": ("plain", {"op": "sum"}),
    "fp16": ("plain", {"compression": "fp16"}),
    "unused in the last micro-step": ("early", {"accumulate": 2}),
    **({"sharded": ("plain", {"shard": True})} if CAN_SWAP else {}),
    "weighed": ("weighed", {}),
}


def _expected(kind: str, accumulate: int) -> float:
    """The noise scale in samples, from float64 gradients of single batches."""
    model = _model().double()
    numbers = torch.tensor([_size(kind, rank) for rank in range(2)], dtype=torch.float64)
    small_batch, large_batch = float(accumulate * numbers.mean()), float(accumulate * numbers.sum())
    signal = noise_of_all = 0.0
    for turn in range(noise.REDUCTIONS_BETWEEN_SAMPLES, _LAST + 1, noise.REDUCTIONS_BETWEEN_SAMPLES):
        gradients = []
        for rank in range(2):
            losses = [_loss(model, kind, rank, accumulate * turn + micro, micro) for micro in range(accumulate)]
            found = torch.autograd.grad(torch.stack(losses).mean(), list(model.parameters()))
            gradients.append(torch.cat([g.flatten() for g in found]))
        shares = numbers / numbers.sum()
        small = float(sum(share * g.square().sum() for share, g in zip(shares, gradients, strict=True)))
        large = float(sum(share * g for share, g in zip(shares, gradients, strict=True)).square().sum())  # type: ignore[union-attr]
        signal += (large_batch * large - small_batch * small) / (large_batch - small_batch)
        noise_of_all += (small - large) / (1 / small_batch - 1 / large_batch)
    return noise_of_all / signal


@ranks(2, start=run_ranks)
def test_noise_scale_is_that_of_a_literal_computation(rank: int) -> None:
    _train(rank, "frozen", {})  # goes on
    for name, (kind, options) in _CASES.items():
        found, accumulate = _train(rank, kind, options), options.get("accumulate", 1)
        own, other = torchring.all_gather_object((found.noise_scale, found.batch_size))
        assert own == other
        assert found.batch_size == accumulate * sum(_size(kind, of) for of in range(2))
        tolerance = 2e-3 if name == "fp16" else 1e-4
        assert found.noise_scale == pytest.approx(_expected(kind, accumulate), rel=tolerance), name
