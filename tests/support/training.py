"""Scripts that train on ranks, each with a batch of its own, and once more in one process that has everybody's batch.

In fp64 the two must agree to 1e-9, and the ranks among each other bit for bit.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchring
from tests.support.checks import assert_same_on_all_ranks
from tests.support.harness import run_pooled

TINY_MB = 100 / 2**20  # buckets of 100 bytes: the small models here need several


@dataclass(frozen=True)
class Side:
    """One way to run a script: as one of several ranks, or as the one process that does the work of all of them."""

    mine: tuple[int, ...]
    is_wrapped: bool

    def wrap(self, optimizer: torch.optim.Optimizer, model: nn.Module | None = None, **options: Any) -> Any:
        return torchring.wrap(optimizer, model, **{"bucket_mb": TINY_MB, **options}) if self.is_wrapped else optimizer

    def mean(self, loss_of: Callable[[int], Tensor]) -> Tensor:
        """The loss that this process differentiates: loss_of(rank), averaged over the ranks whose work it does."""
        return torch.stack([loss_of(rank) for rank in self.mine]).mean()


@dataclass(frozen=True)
class ShardedSide(Side):
    def wrap(self, optimizer: torch.optim.Optimizer, model: nn.Module | None = None, **options: Any) -> Any:
        return super().wrap(optimizer, model, **{"shard": True, **options})


Script = Callable[..., Sequence[Any]]


def on_rank(rank: int, world_size: int, script: Script, args: tuple[Any, ...]) -> Sequence[Any]:
    return script(Side((rank,), True), *args)


def assert_as_one_process(
    script: Script, *args: Any, world_size: int = 2, tolerance: float = 1e-9, run: Callable[..., list[Any]] = run_pooled
) -> list[Any]:
    """script(side, *args) gives a list of tensors, None and numbers; returns those of the ranks, in rank order."""
    expected = script(Side(tuple(range(world_size)), False), *args)
    results = run(on_rank, world_size, script, args)
    assert_alike(results, expected, tolerance)
    return results


def in_turn(rank: int, world_size: int, cases: Mapping[str, Any], side: type[Side]) -> dict[str, Sequence[Any]]:
    """What each script leaves on this rank. Each has a world of its own."""
    results = {}
    for name, (script, *args) in cases.items():
        print(name)  # the last one in the output is the one that failed
        results[name] = script(side((rank,), True), *args)
        torchring.shutdown()
    return results


def assert_each_as_one_process(
    cases: Mapping[str, Sequence[Any]],
    subtests: pytest.Subtests,
    world_size: int = 2,
    tolerance: float = 1e-9,
    side: type[Side] = Side,
) -> None:
    """The same for scripts and their arguments, by name, one after another on the same ranks."""
    per_rank = run_pooled(in_turn, world_size, cases, side)
    for name, (script, *args) in cases.items():
        with subtests.test(name):
            expected = script(Side(tuple(range(world_size)), False), *args)
            assert_alike([results[name] for results in per_rank], expected, tolerance)


def assert_alike(results: Sequence[Sequence[Any]], expected: Sequence[Any], tolerance: float) -> None:
    assert expected
    for result in results:
        assert len(result) == len(expected)
    for i, right in enumerate(expected):
        if isinstance(right, Tensor):
            assert_same_on_all_ranks([result[i] for result in results])
            torch.testing.assert_close(
                results[0][i], right, rtol=tolerance, atol=tolerance, msg=lambda m, i=i: f"{i}: {m}"
            )
        elif isinstance(right, float):
            assert [result[i] for result in results] == [pytest.approx(right, rel=tolerance)] * len(results)
        else:
            assert [result[i] for result in results] == [right] * len(results)


def batch(rank: int, step: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """On the default device, which may be a GPU: the same numbers everywhere."""
    draw = torch.randn(5, 6, generator=torch.Generator().manual_seed(1000 * rank + step), device="cpu")
    device = torch.get_default_device()
    return draw[:, :4].to(device, dtype), draw[:, 4:].to(device, dtype)


def small_model(dtype: torch.dtype = torch.float64, seed: int = 3) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 2)).to(dtype)


def loss_on(model: nn.Module, rank: int, step: int) -> Tensor:
    x, y = batch(rank, step, next(model.parameters()).dtype)
    return nn.functional.mse_loss(model(x), y)


def values(module: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in module.parameters()]


def attempt(action: Callable[[], Any]) -> str:
    """ "TypeName: message" of what action raises, or "" if nothing."""
    try:
        action()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def train(
    side: Side,
    model: nn.Module,
    optimizer: Any,
    steps: Sequence[int],
    loss: Callable[[int, int], Tensor] | None = None,
    before_step: Callable[[int], object] = lambda step: None,
) -> None:
    """An ordinary loop over these steps. loss(rank, step) is that of `loss_on` if not given."""
    for step in steps:
        optimizer.zero_grad()
        side.mean(lambda rank, step=step: loss(rank, step) if loss else loss_on(model, rank, step)).backward()
        before_step(step)
        optimizer.step()


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.02)
