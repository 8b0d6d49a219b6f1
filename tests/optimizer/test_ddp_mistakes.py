"""Nine scripts that DistributedDataParallel trains wrong without an error, side by side with torchring.

Each test runs one script three times: under DDP on two ranks, under torchring on the same two ranks, and in one process
that has the batches of both. Under DDP the script ends without an exception, and what it leaves is wrong. Under
torchring the result is that of one process, or step() raises an error that says what is wrong.

docs/guides/ddp.md has these tests in a table. `test_silent_desync.py` has variations: options, places, ways out.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import torchring
from tests.optimizer.test_contract import batch, loss_on, small_model, values
from tests.support.checks import assert_same_on_all_ranks, digest
from tests.support.harness import run_pooled


@dataclass(frozen=True)
class Way:
    """How a script trains: under "ddp" or "torchring" with the batches of one rank, or "alone" with those of both."""

    name: str
    ranks: tuple[int, ...]

    def start(self, model: nn.Module, **sgd: Any) -> tuple[Any, Any]:
        """What to call forward on, and the optimizer."""
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, **sgd)
        if self.name == "ddp":
            return DistributedDataParallel(model), optimizer
        return model, torchring.wrap(optimizer, model) if self.name == "torchring" else optimizer

    def mean(self, loss_of: Callable[[int], Tensor]) -> Tensor:
        """The loss that this process differentiates."""
        return torch.stack([loss_of(rank) for rank in self.ranks]).mean()

    def has(self, rank: int) -> bool:
        """Whether this process does the work of this rank."""
        return rank in self.ranks


Script = Callable[[Way], Sequence[Tensor]]


@contextmanager
def _process_group(rank: int, size: int, file: str) -> Any:
    """The default process group. PyTorch exchanges the excepthook for its own, and does not put it back."""
    excepthook = sys.excepthook
    dist.init_process_group("gloo", store=dist.FileStore(file, size), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = excepthook


def _both(rank: int, size: int, script: Script, file: str) -> tuple[Sequence[Tensor], Any]:
    """What the script leaves under DDP; what it leaves under torchring, or the text of its error."""
    warnings.simplefilter("ignore")  # of PyTorch, on reentrant checkpoints
    with _process_group(rank, size, file):
        of_ddp = script(Way("ddp", (rank,)))
    try:
        return of_ddp, script(Way("torchring", (rank,)))
    except torchring.GradientError as error:
        return of_ddp, str(error)


@dataclass(frozen=True)
class Outcome:
    """What a script leaves on each rank under DDP and under torchring, and in one process."""

    ddp: list[Sequence[Tensor]]
    torchring: list[Any]
    alone: Sequence[Tensor]

    def assert_ddp_differs_between_ranks(self) -> None:
        first, second = self.ddp
        assert digest(first) != digest(second)
        assert max(float((a - b).abs().max()) for a, b in zip(first, second, strict=True)) > 1e-4

    def assert_torchring_is_right(self) -> None:
        assert not any(isinstance(found, str) for found in self.torchring), self.torchring
        assert_same_on_all_ranks([digest(found) for found in self.torchring])
        for found, right in zip(self.torchring[0], self.alone, strict=True):
            torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-12)

    def assert_torchring_raises(self, *fragments: str) -> None:
        for found in self.torchring:
            assert isinstance(found, str), "no error"
            assert all(fragment in found for fragment in fragments), found


@pytest.fixture
def run(tmp_path: Path) -> Callable[[Script], Outcome]:
    def run(script: Script) -> Outcome:
        of_ddp, of_torchring = zip(*run_pooled(_both, 2, script, str(tmp_path / "store")), strict=True)
        return Outcome(list(of_ddp), list(of_torchring), script(Way("alone", (0, 1))))

    return run


Run = Callable[[Script], Outcome]


def _correct(way: Way) -> Sequence[Tensor]:
    model = small_model()
    net, optimizer = way.start(model)
    for step in range(2):
        optimizer.zero_grad()
        way.mean(lambda rank, step=step: loss_on(net, rank, step)).backward()
        optimizer.step()
    return values(model)


def test_without_a_mistake_all_agree(run: Run) -> None:
    outcome = run(_correct)
    outcome.assert_torchring_is_right()
    with pytest.raises(AssertionError):
        outcome.assert_ddp_differs_between_ranks()
    torch.testing.assert_close(outcome.ddp[0], outcome.alone, rtol=1e-9, atol=1e-12)


# a: the letters are those of `test_silent_desync.py`


class _UsedTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.shared = nn.Linear(4, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = torch.tanh(checkpoint(self.shared, x, use_reentrant=True))
        return x


def _checkpointed(way: Way) -> Sequence[Tensor]:
    model = _UsedTwice()
    net, optimizer = way.start(model)
    for step in range(2):
        optimizer.zero_grad()
        way.mean(lambda rank, step=step: net(batch(rank, step)[0].requires_grad_()).square().mean()).backward()
        optimizer.step()
    return values(model)


def test_a_layer_under_reentrant_checkpoints_is_used_twice(run: Run) -> None:
    outcome = run(_checkpointed)
    outcome.assert_ddp_differs_between_ranks()
    outcome.assert_torchring_raises("shared.", "received another gradient in the same backward")


# b, c


def _past_forward(way: Way) -> Sequence[Tensor]:
    model = small_model()
    net, optimizer = way.start(model)
    inner = net.module if way.name == "ddp" else net
    for step in range(2):
        optimizer.zero_grad()
        way.mean(lambda rank, step=step: loss_on(inner, rank, step)).backward()
        optimizer.step()
    return values(model)


def test_the_model_is_called_past_the_wrapper(run: Run) -> None:
    outcome = run(_past_forward)
    outcome.assert_ddp_differs_between_ranks()
    outcome.assert_torchring_is_right()


def _two_and_two(way: Way) -> Sequence[Tensor]:
    model = small_model()
    net, optimizer = way.start(model)
    for step in range(2):
        optimizer.zero_grad()
        losses = [way.mean(lambda rank, at=10 * step + i: loss_on(net, rank, at)) for i in range(2)]
        for loss in losses:
            loss.backward()
        optimizer.step()
    return values(model)


def test_two_forwards_are_followed_by_two_backwards(run: Run) -> None:
    outcome = run(_two_and_two)
    outcome.assert_ddp_differs_between_ranks()
    outcome.assert_torchring_is_right()


# d


def _autograd_grad(way: Way) -> Sequence[Tensor]:
    model = small_model()
    net, optimizer = way.start(model)
    loss = way.mean(lambda rank: loss_on(net, rank, 0))
    for parameter, gradient in zip(
        model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
    ):
        parameter.grad = gradient
    optimizer.step()
    return values(model)


def test_gradients_come_from_autograd_grad(run: Run) -> None:
    outcome = run(_autograd_grad)
    outcome.assert_ddp_differs_between_ranks()
    outcome.assert_torchring_raises("the gradient of 4.bias has never been reduced", "optimizer.synchronize()")


# e, f


def _grows(way: Way) -> Sequence[Tensor]:
    model = small_model()
    net, optimizer = way.start(model)
    torch.manual_seed(8)
    model.append(nn.Linear(2, 2).double())
    optimizer.add_param_group({"params": list(model[5].parameters())})
    for step in range(2):
        optimizer.zero_grad()
        way.mean(lambda rank, step=step: loss_on(net, rank, step)).backward()
        optimizer.step()
    return values(model)


def test_a_layer_is_added_later(run: Run) -> None:
    outcome = run(_grows)
    outcome.assert_ddp_differs_between_ranks()
    outcome.assert_torchring_is_right()


def _unfreezes(way: Way) -> Sequence[Tensor]:
    model = small_model()
    model[0].requires_grad_(False)
    net, optimizer = way.start(model)
    for step in range(3):
        if step == 1:
            model[0].requires_grad_(True)
        optimizer.zero_grad()
        way.mean(lambda rank, step=step: loss_on(net, rank, step)).backward()
        optimizer.step()
    return values(model)


def test_a_layer_is_unfrozen_later(run: Run) -> None:
    outcome = run(_unfreezes)
    outcome.assert_ddp_differs_between_ranks()
    outcome.assert_torchring_is_right()


# g


def _steps_in_a_hook(way: Way) -> Sequence[Tensor]:
    model = small_model()
    net, optimizer = way.start(model)
    own = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}

    def hook(parameter: Tensor) -> None:
        own[parameter].step()

    with ExitStack() as hooks:  # a parameter and its hook keep each other alive
        for parameter in model.parameters():
            hooks.callback(parameter.register_post_accumulate_grad_hook(hook).remove)
        for step in range(2):
            optimizer.zero_grad()
            way.mean(lambda rank, step=step: loss_on(net, rank, step)).backward()
    return values(model)


def test_a_hook_steps_inside_backward(run: Run) -> None:
    outcome = run(_steps_in_a_hook)
    outcome.assert_ddp_differs_between_ranks()
    outcome.assert_torchring_raises("is not the same on all ranks", "outside optimizer.step()")


# h, i


def _drifts(way: Way) -> Sequence[Tensor]:
    model = small_model()
    net, optimizer = way.start(model)
    for step in range(4):
        if step == 1 and way.has(1):
            with torch.no_grad():
                model[2].bias.add_(0.5)
        optimizer.zero_grad()
        way.mean(lambda rank, step=step: loss_on(net, rank, step)).backward()
        optimizer.step()
    return values(model)


def test_one_rank_changes_a_parameter(run: Run) -> None:
    outcome = run(_drifts)
    outcome.assert_ddp_differs_between_ranks()
    outcome.assert_torchring_raises("2.bias", "rank 1")


def _nan_on_one_rank(way: Way) -> Sequence[Tensor]:
    model = small_model()
    net, optimizer = way.start(model)
    optimizer.zero_grad()
    way.mean(lambda rank: loss_on(net, rank, 0) * (float("nan") if rank == 1 else 1.0)).backward()
    optimizer.step()
    return values(model)


def test_a_gradient_is_nan_on_one_rank(run: Run) -> None:
    outcome = run(_nan_on_one_rank)
    for trained in outcome.ddp:
        assert all(bool(parameter.isnan().all()) for parameter in trained)
    outcome.assert_torchring_raises("came from rank 1", "the gradient of 4.")
