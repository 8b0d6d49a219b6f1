"""`torchring.join`: ranks with different numbers of batches train as one process with all of them, and end alike."""

import dataclasses
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchring
from tests.support.checks import assert_same_everywhere
from tests.support.grids import grid
from tests.support.harness import ranks, run_ranks
from tests.support.training import Script, Side, assert_as_one_process, attempt, loss_on, momentum, small_model, values


def _join(side: Side, *objects: Any) -> AbstractContextManager[None]:
    return torchring.join(*objects) if side.is_wrapped else nullcontext()


def _train_unevenly(
    side: Side, num_batches: Sequence[int], accumulate: int, weighted: bool, options: dict[str, Any]
) -> list[Any]:
    """A schedule and clipping, which a rank that has ended does not run; then two steps of all."""
    model = small_model()
    adam = torch.optim.Adam(model.parameters(), lr=0.05)
    schedule = torch.optim.lr_scheduler.StepLR(adam, step_size=2, gamma=0.5)
    optimizer = side.wrap(adam, model, accumulate=accumulate, **options)

    def one_step(step: int, present: Sequence[int]) -> None:
        optimizer.zero_grad()
        weights = {rank: rank + 1 if weighted else 1 for rank in present}
        for micro in range(accumulate):
            if weighted and side.is_wrapped:
                optimizer.weigh(sum(weights.values()))
            losses = [weights[rank] * loss_on(model, rank, 10 * step + micro) for rank in present]
            loss = torch.stack(losses).sum() / sum(weights.values()) / accumulate
            # Weights count over micro-steps, too: there the result is a mean over these, and not their sum.
            (loss if side.is_wrapped or not weighted else loss / accumulate).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        schedule.step()

    with _join(side, optimizer, schedule):
        for step in range(max(num_batches[rank] for rank in side.mine)):
            one_step(step, [rank for rank in side.mine if step < num_batches[rank]])
    assert not side.is_wrapped or all(p.grad is None for p in model.parameters())
    joined = values(model)
    for step in (10, 11):
        one_step(step, side.mine)
    states = [state[name] for state in optimizer.state_dict()["state"].values() for name in ("exp_avg", "step")]
    return [*joined, *values(model), *states, adam.param_groups[0]["lr"]]


@grid(
    "options, num_batches, accumulate, weighted",
    [{}, {"algorithm": "ring"}, {"algorithm": "native"}, {"bucket_mb": 25.0, "overlap": "thread"}],
    [(4, 0, 3), (2, 5)],
    [1, 2],
    [False, True],
)
def test_means_are_over_the_ranks_that_have_data(
    options: dict[str, Any], num_batches: tuple[int, ...], accumulate: int, weighted: bool
) -> None:
    arguments = num_batches, accumulate, weighted, options
    assert_as_one_process(_train_unevenly, *arguments, world_size=len(num_batches), tolerance=1e-6)


def _incomplete_group(side: Side) -> list[Tensor]:
    """Accumulation whose last group is incomplete: `synchronize` in there counts as a reduction."""
    model, num_batches = small_model(), (3, 6)
    optimizer = side.wrap(momentum(model), model, accumulate=2)
    with _join(side, optimizer):
        for first in range(0, max(num_batches[rank] for rank in side.mine), 2):
            present = [rank for rank in side.mine if first < num_batches[rank]]
            optimizer.zero_grad()
            for step in (first, first + 1):
                losses = [loss_on(model, rank, step) for rank in present if step < num_batches[rank]]
                if losses:
                    (torch.stack(losses).sum() / len(present)).backward()
                else:
                    optimizer.synchronize()
            optimizer.step()
    return values(model)


def _two_optimizers(side: Side) -> list[Tensor]:
    """One of a pair steps more often, and has micro-steps; another that nobody uses any more is garbage."""
    nets = [small_model(), small_model()]
    one, other = (side.wrap(momentum(net), net) for net in nets)
    gone = small_model()
    side.wrap(momentum(gone), gone)
    with _join(side, other, one):
        for step in range(max((5, 2)[rank] for rank in side.mine)):
            here = dataclasses.replace(side, mine=tuple(rank for rank in side.mine if step < (5, 2)[rank]))
            one.zero_grad()
            with one.no_sync() if side.is_wrapped else nullcontext():
                here.mean(lambda rank, step=step: loss_on(nets[0], rank, 20 + step)).backward()
            here.mean(lambda rank, step=step: loss_on(nets[0], rank, step)).backward()
            one.step()
            if step % 2 == 0:
                other.zero_grad()
                here.mean(lambda rank, step=step: loss_on(nets[1], rank, 10 + step)).backward()
                other.step()
    return [*values(nets[0]), *values(nets[1])]


@pytest.mark.parametrize("script", [_incomplete_group, _two_optimizers])
def test_groups_of_micro_steps_and_several_optimizers(script: Script) -> None:
    assert_as_one_process(script)


def test_a_world_of_one() -> None:
    assert_as_one_process(_train_unevenly, (4,), 1, False, {}, world_size=1)


@ranks(2)
def test_a_rank_that_stops_early_ends_nobody(rank: int) -> None:
    """At its own criterion, as in reinforcement learning. With BatchNorm, a loss scale, and an average."""
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
    with torch.no_grad():  # replicas are compared again after the block
        next(model.parameters()).add_(rank)
    optimizer.zero_grad()
    model(torch.randn(5, 4)).square().mean().backward()
    with pytest.raises(torchring.GradientError, match=r"^0\.weight is not the same on all ranks"):
        optimizer.step()


@ranks(2)
def test_what_ranks_that_have_ended_would_miss_is_refused(rank: int) -> None:
    model = nn.Sequential(nn.Linear(4, 3), torchring.SyncBatchNorm(3), nn.Linear(3, 2))
    optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    where = ", where ranks whose data has ended would not take part; call it"
    refused: dict[str, Callable[[], object]] = {
        f"all_reduce was called inside torchring.join(){where}": lambda: torchring.all_reduce(torch.ones(1)),
        "broadcast was called inside": lambda: torchring.broadcast(torch.ones(1), async_op=True),
        "SyncBatchNorm was called inside": lambda: model(torch.ones(2, 4)),
        "step(closure) was called inside": lambda: optimizer.step(lambda: 0.0),
        "wrap() was called inside": lambda: torchring.wrap(torch.optim.SGD(small_model().parameters())),
        "add_param_group() was called inside": lambda: optimizer.add_param_group(
            {"params": [nn.Parameter(torch.ones(1))]}
        ),
        "close() was called inside": optimizer.close,
        "torchring.join() was called inside torchring.join(); one block is enough": lambda: torchring.join(
            optimizer
        ).__enter__(),
    }
    with torchring.join(optimizer):
        for said, call in refused.items():
            assert attempt(call).startswith(f"ValueError: {said}")
        assert len(optimizer.param_groups) == 1
        model.eval()
        for _ in range(rank):
            optimizer.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            optimizer.step()
    torchring.all_reduce(torch.ones(1))
    said = r"^torchring\.shutdown\(\) was called inside torchring\.join\(\); call it after the with block$"
    with pytest.raises(ValueError, match=said), torchring.join(optimizer):
        torchring.shutdown()


@ranks(2)
def test_wrong_arguments_are_an_error_on_every_rank(rank: int) -> None:
    model, other = small_model(), small_model()
    optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    unlisted = torchring.wrap(torch.optim.SGD(other.parameters(), lr=0.1), other)

    class Unsendable:
        def state_dict(self) -> dict[str, Any]:
            return {"schedule": [1, lambda step: 0.5**step]}

        load_state_dict = state_dict

    def enter(*objects: Any) -> str:
        def body() -> None:
            with torchring.join(*objects):
                pass

        return attempt(body)

    no_state = "TypeError: torchring.join() takes objects with state_dict(), got int"
    told = "PlanMismatchError: rank 0 could not enter torchring.join(): TypeError" if rank else no_state
    shut = "this DistributedOptimizer belongs to a world that was shut down; wrap again"
    for objects in ((), (optimizer.optimizer,)):
        assert enter(*objects) == (
            "TypeError: torchring.join() takes the optimizers that torchring.wrap() has returned, got none"
        )
    assert enter(optimizer, unlisted, 5) == no_state
    unsendable = enter(optimizer, unlisted, Unsendable())
    assert unsendable.startswith("TypeError: schedule[1] of the Unsendable, of type function, cannot be")
    assert unsendable.endswith("Leave it out, and restore it on all ranks after the with block")
    assert "1 DistributedOptimizers are missing" in enter(optimizer)
    assert enter(*((optimizer, unlisted) if rank else (optimizer, unlisted, 5))).startswith(told)
    another_order = enter(*((optimizer, unlisted, model) if rank else (model, optimizer, unlisted)))
    assert "object 0 of join(): rank 0 has Sequential; rank 1 has DistributedOptimizer" in another_order
    unlisted.close()
    assert enter(optimizer, unlisted).startswith("ValueError: this DistributedOptimizer is closed")
    assert enter(optimizer) == ""
    torchring.shutdown()
    torchring.init()
    assert enter(optimizer) == f"ValueError: {shut}"
    again = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    assert shut in enter(optimizer if rank else again)
    assert enter(again) == ""


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
                loss = (loss_on(model, rank, step) + extra.sum()) * (torch.inf if step > 1 else 1.0)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
    assert_same_everywhere([*values(model), extra.detach()])
    assert scaler.get_scale() == 8.0 / 2**4
    assert str(schedule.milestones) == "Counter({3: 2, 1: 1})"
    assert model.cache.tolist() == [[10.0], [11.0, 11.0]][rank]


@ranks(2, run_ranks)
def test_an_exception_on_one_rank_ends_the_block_on_all(rank: int) -> None:
    """At once: the others need not wait for the time-out."""
    model = small_model()
    optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)

    def body() -> None:
        with torchring.join(optimizer):
            for step in range(1 + 3 * rank):
                loss_on(model, rank, step).backward()
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
                loss_on(model, rank, step).backward()

    assert attempt(body).startswith("GradientError: rank 2 did not call optimizer.weigh()")
