"""`torchring.join`: ranks with different numbers of batches train as one process with all of them, and end alike."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchring
from tests.support.checks import assert_same_everywhere
from tests.support.grids import grid
from tests.support.harness import ranks, run_ranks
from tests.support.training import TINY_MB, attempt, batch, small_model, values

_NUM_BATCHES = {1: (4,), 2: (2, 5), 3: (4, 0, 3)}  # of each rank


def _loss(model: nn.Module, rank: int, step: int) -> Tensor:
    inputs, targets = batch(rank, step)
    return nn.functional.mse_loss(model(inputs), targets)


def _optimizer(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    adam = torch.optim.Adam(model.parameters(), lr=0.05)
    return adam, torch.optim.lr_scheduler.StepLR(adam, step_size=2, gamma=0.5)


def _train_unevenly(rank: int, size: int, accumulate: int, weighted: bool, options: dict[str, Any]) -> None:
    """A schedule and clipping, which a rank that has ended does not run; then two steps of all."""
    model = small_model()
    adam, schedule = _optimizer(model)
    optimizer = torchring.wrap(adam, model, accumulate=accumulate, **{"bucket_mb": TINY_MB, **options})

    def one_step(step: int) -> None:
        optimizer.zero_grad()
        for micro in range(accumulate):
            if weighted:
                optimizer.weigh(rank + 1)
            (_loss(model, rank, 10 * step + micro) / accumulate).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()

    with torchring.join(optimizer, schedule):
        for step in range(_NUM_BATCHES[size][rank]):
            one_step(step)
    assert all(p.grad is None for p in model.parameters())
    right, at_the_end, rate = _as_one(size, accumulate, weighted)
    assert_trained(values(model), right)
    for step in (10, 11):
        one_step(step)
    assert_trained(values(model), at_the_end)
    states = optimizer.state_dict()["state"].values()
    assert_same_everywhere([state[name] for state in states for name in ("exp_avg", "step")])
    assert adam.param_groups[0]["lr"] == rate


def assert_trained(found: Sequence[Tensor], right: Sequence[Tensor]) -> None:
    assert_same_everywhere(found)
    torch.testing.assert_close(list(found), list(right), rtol=1e-6, atol=1e-7)


def _as_one(size: int, accumulate: int, weighted: bool) -> tuple[list[Tensor], list[Tensor], float]:
    """Parameters after the batches, and after two more steps of all; and the learning rate."""
    model = small_model()
    adam, schedule = _optimizer(model)
    joined: list[Tensor] = []
    for step in [*range(max(_NUM_BATCHES[size])), 10, 11]:
        present = [rank for rank in range(size) if step >= 10 or step < _NUM_BATCHES[size][rank]]
        if step == 10:
            joined = values(model)
        adam.zero_grad()
        # Weights count over micro-steps, too: there the result is a mean over these, and not their sum.
        weights = {rank: (rank + 1 if weighted else 1) for rank in present}
        micros = accumulate if weighted else 1
        for micro in range(accumulate):
            for rank in present:
                share = weights[rank] / sum(weights.values()) / accumulate / micros
                (_loss(model, rank, 10 * step + micro) * share).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        adam.step()
        schedule.step()
    return joined, values(model), adam.param_groups[0]["lr"]


@grid(
    "options, world_size, accumulate, weighted",
    [
        {},
        {"algorithm": "ring"},
        {"algorithm": "native", "overlap": "inline"},
        {"bucket_mb": 25.0, "overlap": "thread"},
    ],
    [3, 2],
    [1, 2],
    [False, True],
)
@ranks()
def test_means_are_over_the_ranks_that_have_data(
    rank: int, world_size: int, options: dict[str, Any], accumulate: int, weighted: bool
) -> None:
    _train_unevenly(rank, world_size, accumulate, weighted, options)


def test_a_world_of_one() -> None:
    _train_unevenly(0, 1, 1, False, {})
    torchring.shutdown()


def _last_group_as_one() -> list[Tensor]:
    model = small_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    groups = [[(0, 0), (0, 1), (1, 0), (1, 1)], [(0, 2), (1, 2), (1, 3)], [(1, 4), (1, 5)]]
    for group in groups:
        sgd.zero_grad()
        num_ranks = len({rank for rank, _ in group})
        for rank, step in group:
            (_loss(model, rank, step) / num_ranks).backward()
        sgd.step()
    return values(model)


@ranks(2)
def test_an_incomplete_group_of_micro_steps(rank: int) -> None:
    """Accumulation whose last group is incomplete: `synchronize` in there counts as a reduction."""
    model = small_model()
    optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model, accumulate=2)
    num_batches = (3, 6)[rank]
    with torchring.join(optimizer):
        optimizer.zero_grad()
        for step in range(num_batches):
            _loss(model, rank, step).backward()
            if step % 2 or step + 1 == num_batches:
                if step % 2 == 0:
                    optimizer.synchronize()
                optimizer.step()
                optimizer.zero_grad()
    assert_trained(values(model), _last_group_as_one())


def _two_as_one() -> list[Tensor]:
    nets = [small_model(), small_model()]
    sgds = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in nets]
    for step in range(5):
        present = [rank for rank in range(2) if step < (5, 2)[rank]]
        for which, steps in ((0, (20 + step, step)), (1, (10 + step,) if step % 2 == 0 else ())):
            sgds[which].zero_grad()
            for rank in present:
                for number in steps:
                    (_loss(nets[which], rank, number) / len(present)).backward()
            if steps:
                sgds[which].step()
    return [*values(nets[0]), *values(nets[1])]


@ranks(2)
def test_several_optimizers(rank: int) -> None:
    """One of a pair steps more often, and has micro-steps; another that nobody uses any more is garbage."""
    nets = [small_model(), small_model()]
    sgds = [torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9) for net in nets]
    one, other = (torchring.wrap(sgd, net) for sgd, net in zip(sgds, nets, strict=True))
    gone = small_model()
    torchring.wrap(torch.optim.SGD(gone.parameters(), lr=0.1), gone)
    with torchring.join(other, one):
        for step in range((5, 2)[rank]):
            one.zero_grad()
            with one.no_sync():
                _loss(nets[0], rank, 20 + step).backward()
            _loss(nets[0], rank, step).backward()
            one.step()
            if step % 2 == 0:
                other.zero_grad()
                _loss(nets[1], rank, 10 + step).backward()
                other.step()
    assert_trained([*values(nets[0]), *values(nets[1])], _two_as_one())


@ranks(2)
def test_a_rank_that_stops_early_ends_nobody(rank: int) -> None:
    """A rank that stops at its own criterion, as in reinforcement learning; BatchNorm; a loss scale; an average."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 2))
    average = torch.optim.swa_utils.AveragedModel(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=2)
    optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    num_steps = 0
    with torchring.join(optimizer, average, scaler):
        for step in range(9):
            optimizer.zero_grad()
            loss = model(torch.randn(5, 4) + rank).square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            average.update_parameters(model)
            num_steps += 1
            if step == 2 + 3 * rank:
                break
    assert_same_everywhere([*model.state_dict().values(), *average.state_dict().values()])
    assert scaler.get_scale() == 32.0  # after 6 steps
    assert num_steps == (3, 6)[rank]


@ranks(2)
def test_what_ranks_that_have_ended_would_miss_is_refused(rank: int) -> None:
    model = nn.Sequential(nn.Linear(4, 3), torchring.SyncBatchNorm(3), nn.Linear(3, 2))
    optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    refused: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: torchring.all_reduce(torch.ones(1)),
        "broadcast": lambda: torchring.broadcast(torch.ones(1), async_op=True),
        "SyncBatchNorm": lambda: model(torch.ones(2, 4)),
        "step(closure)": lambda: optimizer.step(lambda: 0.0),
        "wrap()": lambda: torchring.wrap(torch.optim.SGD(small_model().parameters())),
        "add_param_group()": lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
        "close()": optimizer.close,
    }
    with torchring.join(optimizer):
        for name, call in refused.items():
            with pytest.raises(ValueError, match="was called inside") as caught:
                call()
            where = "inside torchring.join(), where ranks whose data has ended would not take part; call it"
            assert str(caught.value).startswith(f"{name} was called {where}")
        nested = attempt(lambda: torchring.join(optimizer).__enter__())
        assert nested == "ValueError: torchring.join() was called inside torchring.join(); one block is enough"
        assert len(optimizer.param_groups) == 1
        model.eval()
        for _ in range(rank):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    torchring.all_reduce(torch.ones(1))


class _Unsendable:
    def state_dict(self) -> dict[str, Any]:
        return {"schedule": [1, lambda step: 0.5**step]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError(state)


@ranks(2)
def test_wrong_arguments_are_an_error_on_every_rank(rank: int) -> None:
    model, other = small_model(), small_model()
    optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    unlisted = torchring.wrap(torch.optim.SGD(other.parameters(), lr=0.1), other)

    def enter(*objects: Any) -> str:
        def body() -> None:
            with torchring.join(*objects):
                pass

        return attempt(body)

    found = {
        "none": enter(),
        "plain": enter(optimizer.optimizer),
        "number": enter(optimizer, unlisted, 5),
        "unsendable": enter(optimizer, unlisted, _Unsendable()),
        "missing": enter(optimizer),
        "on one rank": enter(*((optimizer, unlisted) if rank else (optimizer, unlisted, 5))),
        "another order": enter(*((optimizer, unlisted, model) if rank else (model, optimizer, unlisted))),
    }
    unlisted.close()
    found["closed"] = enter(optimizer, unlisted)
    found["right"] = enter(optimizer)
    torchring.shutdown()
    torchring.init()
    found["another world"] = enter(optimizer)
    again = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    found["another world on one rank"] = enter(optimizer if rank else again)
    found["right again"] = enter(again)
    takes = "TypeError: torchring.join() takes the optimizers that torchring.wrap() has returned, got none"
    assert found["none"] == found["plain"] == takes
    assert found["number"] == "TypeError: torchring.join() takes objects with state_dict(), got int"
    assert found["unsendable"].startswith("TypeError: schedule[1] of the _Unsendable, of type function, cannot be")
    assert found["unsendable"].endswith("Leave it out, and restore it on all ranks after the with block")
    assert "1 DistributedOptimizers are missing" in found["missing"]
    told = "PlanMismatchError: rank 0 could not enter torchring.join(): TypeError"
    assert found["on one rank"].startswith(told if rank else "TypeError: torchring.join() takes objects")
    assert "object 0 of join(): rank 0 has Sequential; rank 1 has DistributedOptimizer" in found["another order"]
    assert found["closed"].startswith("ValueError: this DistributedOptimizer is closed")
    shut = "this DistributedOptimizer belongs to a world that was shut down; wrap again"
    assert found["another world"] == f"ValueError: {shut}"
    assert shut in found["another world on one rank"]
    assert found["right"] == found["right again"] == ""


class _Added(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2).double()
        self.register_buffer("cache", torch.zeros(1), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


@pytest.mark.parametrize("mode", ["mean", None])
@ranks(2)
def test_all_that_belongs_to_training_is_taken_over_and_nothing_else(rank: int, mode: str | None) -> None:
    """Parameters outside of the model, a schedule with milestones, a cache of each rank, constants; two blocks.

    Rank 1 goes on with steps that its scaler leaves out: the scale is that of the rank that ended last.
    """
    torch.manual_seed(rank)
    model = _Added()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.MultiStepLR(sgd, [1, 3, 3])
    optimizer = torchring.wrap(sgd, model, sync_buffers=mode)
    extra = nn.Parameter(torch.ones(2, dtype=torch.float64))
    optimizer.add_param_group({"params": [extra]})
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    model.cache = torch.full((1 + rank,), 10.0 + rank)
    for _ in range(2):
        with torchring.join(schedule, optimizer, scaler):
            for step in range(2 + 2 * rank):
                optimizer.zero_grad()
                loss = (_loss(model, rank, step) + extra.sum()) * (torch.inf if step > 1 else 1.0)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
    assert_same_everywhere([*values(model), extra.detach()])
    assert scaler.get_scale() == 8.0 / 2**4
    assert str(schedule.milestones) == "Counter({3: 2, 1: 1})"
    assert model.cache.tolist() == [[10.0], [11.0, 11.0]][rank]


@ranks(2)
def test_shutdown_inside_the_block_is_an_error() -> None:
    model = small_model()
    optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    said = r"^torchring\.shutdown\(\) was called inside torchring\.join\(\); call it after the with block$"
    with pytest.raises(ValueError, match=said), torchring.join(optimizer):
        torchring.shutdown()


@ranks(2, run_ranks)
def test_an_exception_on_one_rank_ends_the_block_on_all(rank: int) -> None:
    """At once: the others need not wait for the time-out."""
    model = small_model()
    optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)

    def body() -> None:
        with torchring.join(optimizer):
            for step in range(1 + 3 * rank):
                _loss(model, rank, step).backward()
                optimizer.step()
                if step == 2:
                    raise KeyError("no such batch")

    raised = "KeyError: 'no such batch'"
    told = f"RingError: rank 1 stopped: torchring.join() was interrupted by {raised}"
    assert attempt(body).startswith(raised if rank else told)


@ranks(3)
def test_an_error_of_a_reduction_reaches_ranks_that_have_ended_too(rank: int) -> None:
    model = small_model()
    optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)

    def body() -> None:
        with torchring.join(optimizer):
            for step in range((3, 0, 3)[rank]):
                if rank == 0:
                    optimizer.weigh(2)
                _loss(model, rank, step).backward()

    assert attempt(body).startswith("GradientError: rank 2 did not call optimizer.weigh()")


@ranks(2)
def test_replicas_are_compared_again_after_the_block(rank: int) -> None:
    """A change on one rank is found."""
    model = small_model()
    optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    with torchring.join(optimizer):
        for step in range(3 + 4 * rank):
            optimizer.zero_grad()
            _loss(model, rank, step).backward()
            optimizer.step()
    with torch.no_grad():
        next(model.parameters()).add_(rank)
    optimizer.zero_grad()
    _loss(model, rank, 20).backward()
    with pytest.raises(torchring.GradientError, match=r"^0\.weight is not the same on all ranks"):
        optimizer.step()
