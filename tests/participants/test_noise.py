"""The gradient noise scale is that of a literal re-computation."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchring
from tests.support.harness import run_ranks
from torchring.gradients.plan import ParameterSpec
from torchring.observe import data_check
from torchring.participants import noise
from torchring.participants.noise import Rows

_NUM_REDUCTIONS = 150
_LAST = _NUM_REDUCTIONS - 2  # is counted: what a reduction finds is told in the next one
_BATCH = 4


def _model(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, 2))


def _sizes(kind: str, rank: int, turn: int) -> int:
    return 2 + 3 * rank if kind == "weighed" else _BATCH


def _batch(kind: str, rank: int, turn: int) -> Tensor:
    seed = rank if kind == "windows" else 1000 * turn + rank
    return torch.randn(_sizes(kind, rank, turn), 6, generator=torch.Generator().manual_seed(seed)) + 0.7


def _loss(model: nn.Module, batch: Tensor, kind: str = "", micro: int = 0) -> Tensor:
    if kind == "early" and micro == 1:  # the first layer has its gradient from the other micro-step
        model(batch)
        first, tanh, last = model.children()
        return last(tanh(first(batch)).detach()).square().mean()
    return model(batch).square().mean()


def _train(rank: int, size: int, kind: str, options: dict[str, Any]) -> torchring.Stats:
    model = _model(30_000 if kind == "windows" else 5)
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
    "sharded": ("plain", {"shard": True}),
    "weighed": ("weighed", {}),
    "windows": ("windows", {}),
}


def _train_all(rank: int, size: int) -> dict[str, torchring.Stats]:
    _train(rank, size, "frozen", {})  # goes on
    return {name: _train(rank, size, kind, options) for name, (kind, options) in _CASES.items()}


def _expected(kind: str, size: int, accumulate: int) -> float:
    """The noise scale in samples, from float64 gradients of single batches."""
    model = _model(30_000 if kind == "windows" else 5).double()
    between = noise.REDUCTIONS_BETWEEN_SAMPLES
    turns = [16] if kind == "windows" else range(between, _LAST + 1, between)
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


@pytest.fixture(scope="module")
def stats() -> list[dict[str, torchring.Stats]]:
    return run_ranks(_train_all, 2)


@pytest.mark.parametrize("name", _CASES)
def test_noise_scale_is_that_of_a_literal_computation(stats: Sequence[dict[str, torchring.Stats]], name: str) -> None:
    first, second = (each[name] for each in stats)
    assert (first.noise_scale, first.batch_size) == (second.noise_scale, second.batch_size)
    kind, options = _CASES[name]
    accumulate = options.get("accumulate", 1)
    assert first.batch_size == accumulate * sum(_sizes(kind, rank, 0) for rank in range(2))
    assert first.noise_scale == pytest.approx(_expected(kind, 2, accumulate), rel=2e-3 if name == "fp16" else 1e-4)


def test_windows_cover_each_row_once() -> None:
    """Rows are cut, small tensors put together; sparse and empty ones left out."""

    def spec(*shape: int, is_sparse: bool = False) -> ParameterSpec:
        return ParameterSpec("p", shape, (), torch.float32, torch.device("cpu"), is_sparse)

    specs = [spec(), spec(3, 1000), spec(1, 200_000), spec(400, 1000), spec(0, 3), spec(9, is_sparse=True)]
    specs += [spec(4)] * 20
    windows = list(noise._windows(specs))
    rows = [Rows(0, 0, 1), Rows(1, 0, 3), Rows(2, 0, 1), *(Rows(3, i, min(i + 65, 400)) for i in range(0, 400, 65))]
    rows += [Rows(i, 0, 4) for i in range(6, 26)]
    assert [each for window in windows for each in window] == rows
    assert [len(window) for window in windows] == [2, 1, *[1] * 6, 4, 4, 4, 4, 4, 1]


def test_noise_that_hides_the_gradient() -> None:
    """Orthogonal gradients of two ranks: |G|^2 = 2 * 0.5 - 1 = 0."""
    sampled = noise.NoiseScale.__new__(noise.NoiseScale)
    sampled._size, sampled._num_samples = 2, 8
    sampled.batch_size = 8.0
    sampled._signal, sampled._noise = torch.zeros(1).numpy(), torch.ones(1).numpy()
    assert sampled.noise_scale == math.inf


def test_nothing_is_sent_for_what_ranks_tell_each_other() -> None:
    """It travels in the message of a reduction."""
    for module in (noise, data_check):
        assert "collectives" not in inspect.getsource(module)
