"""Means over all samples of all ranks."""

import math

import pytest
import torch

import torchring
from tests.support.harness import ranks
from torchring.errors import PlanMismatchError
from torchring.recipes import MeanMetric


def _batches(rank: int) -> list[tuple[torch.Tensor, int]]:
    """Losses of samples. Rank 1 has fewer, and rank 2 none."""
    generator = torch.Generator().manual_seed(rank)
    return [(torch.rand(n, generator=generator), n) for n in ([5, 5, 3], [2], [])[rank]]


@ranks(3)
def test_means_over_all_ranks(rank: int, world_size: int) -> None:
    metrics = MeanMetric()
    for losses, n in _batches(rank):
        mean = losses.mean().requires_grad_()
        metrics.update({"loss": mean, "above": float((losses > 0.5).float().mean())}, weight=n)
        metrics.update({"each": losses})
        metrics.update({"counted": losses}, weight=torch.arange(n))
    if rank != 2:
        metrics.update({"loss": torch.tensor(math.nan), "never": 1.0}, weight=0)  # an empty batch
    first = metrics.compute()
    assert len(set(torchring.all_gather_object(str(first)))) == 1  # NaN, too
    assert str(metrics.compute()) == str(first)
    metrics.reset()
    assert metrics.compute() == {}

    losses = torch.cat([losses for r in range(world_size) for losses, _ in _batches(r)]).double()
    assert list(first) == ["above", "counted", "each", "loss", "never"]
    assert first["each"] == pytest.approx(float(losses.mean()), rel=1e-12)
    assert first["loss"] == pytest.approx(float(losses.mean()), rel=1e-6)  # of means that are fp32
    assert first["above"] == pytest.approx(float((losses > 0.5).double().mean()), rel=1e-6)
    weights = torch.cat([torch.arange(n) for r in range(world_size) for _, n in _batches(r)])
    assert first["counted"] == pytest.approx(float((losses * weights).sum() / weights.sum()), rel=1e-12)
    assert math.isnan(first["never"])

    metrics.update({"a": 1.0} if rank == 0 else {"a": 2.0, "b": 1.0})
    with pytest.raises(PlanMismatchError, match="rank 0 gave MeanMetric no 'b', which other ranks gave"):
        metrics.compute()


def test_update_reads_nothing_from_the_device() -> None:
    metrics = MeanMetric()
    for weight in (3, torch.empty((), device="meta"), torch.empty(4, device="meta")):
        for _ in range(2):
            metrics.update({"loss": torch.empty(4, device="meta")}, weight)
    with pytest.raises(NotImplementedError):
        metrics.compute()  # as a tensor on "meta" has no value


def test_weights_that_make_no_sense() -> None:
    for weight in (-1, math.nan, math.inf):
        with pytest.raises(ValueError, match=f"weight must be 0 or more, and finite, got {weight}"):
            MeanMetric().update({"loss": 1.0}, weight=weight)
