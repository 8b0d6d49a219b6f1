"""Loops over a global batch of unequal shares: each loss has the weight of its own batch, or there is an error."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import torchring
from tests.support.harness import run_ranks

Tensor = torch.Tensor
Loop = Callable[["_Job", Iterable[Any]], None]

_LENGTH, _GLOBAL_BATCH = 22, 7  # the last global batch has one sample, so other ranks than 0 repeat it with weight 0
_LR = 0.02

torch.manual_seed(0)
_X = torch.randn(_LENGTH, 3).double()
_DATA = TensorDataset(_X, _X.sum(1, keepdim=True) + torch.arange(_LENGTH)[:, None] * 0.1)


class _Job:
    """What a loop has: in a world of one with plain PyTorch, or on a rank."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = torch.nn.Linear(3, 1).double()
        self.other = torch.nn.Linear(1, 3).double()
        self.start = [p.detach().clone() for p in self.parameters()]
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), lr=_LR)
        self.second: Any = torch.optim.SGD(self.other.parameters(), lr=_LR)
        self.sampler: Any = None
        self.positions: list[int] = []

    def parameters(self) -> list[Tensor]:
        return [*self.model.parameters(), *self.other.parameters()]

    def reset(self) -> None:
        with torch.no_grad():
            for parameter, value in zip(self.parameters(), self.start, strict=True):
                parameter.copy_(value)
        self.optimizer.zero_grad()
        self.second.zero_grad()
        self.positions = []

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return torch.nn.functional.mse_loss(self.model(batch[0]), batch[1])

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.sampler is not None:
            self.positions.append(self.sampler.position)


def _ahead(batches: Iterable[Any], by: int, prepare: Callable[[Any], Any] = lambda batch: batch) -> Iterator[Any]:
    held: list[Any] = []
    for batch in batches:
        held.append(prepare(batch))
        if len(held) > by:
            yield held.pop(0)
    yield from held


def _copies(batch: list[Tensor]) -> list[Tensor]:
    return [each.clone() for each in batch]


def _one(job: _Job, batches: Iterable[Any]) -> None:
    for batch in batches:
        job.loss(batch).backward()
        job.step()


def _two(job: _Job, batches: Iterable[Any]) -> None:
    for batch in batches:
        job.loss(batch).backward()
        (0.3 * (job.model(batch[0]) - batch[1]).abs().mean()).backward()
        job.step()


def _look_ahead(job: _Job, batches: Iterable[Any], by: int = 1) -> None:
    _one(job, _ahead(batches, by))


def _next_in_between(job: _Job, batches: Iterable[Any]) -> None:
    """The next batch is taken between forward and backward."""
    iterator = iter(batches)
    batch = next(iterator, None)
    while batch is not None:
        loss = job.loss((batch[0].clone(), batch[1]))
        batch = next(iterator, None)
        loss.backward()
        job.step()


def _leave_out(job: _Job, batches: Iterable[Any], bad: int, after_forward: bool) -> None:
    for i, batch in enumerate(batches):
        loss = job.loss(_copies(batch) if after_forward else batch) if after_forward or i != bad else None
        if i != bad:
            assert loss is not None
            loss.backward()
            job.step()


def _no_sync(job: _Job, batches: Iterable[Any]) -> None:
    for batch in batches:
        if job.sampler is None:
            job.loss(batch).backward()
        else:
            with job.optimizer.no_sync():
                job.loss(batch).backward()
        (0.3 * (job.model(batch[0]) - batch[1]).abs().mean()).backward()
        job.step()


def _by_hand(job: _Job, batches: Iterable[Any]) -> None:
    """No forward of a module is seen."""
    for x, y in batches:
        for factor in (1.0, 0.3):
            outputs = torch.nn.functional.linear(x, job.model.weight, job.model.bias)
            (factor * (outputs - y)).square().mean().backward()
        job.step()


def _gan(job: _Job, batches: Iterable[Any]) -> None:
    for x, y in batches:
        job.model(x).square().mean().backward()
        fake = job.other(y)
        (job.model(fake.detach()) - 1).square().mean().backward()
        job.step()
        job.model(fake).square().mean().backward()
        job.second.step()
        job.second.zero_grad()
        job.optimizer.zero_grad()


def _accumulate(job: _Job, batches: Iterable[Any], skips: tuple[int, ...] = ()) -> None:
    """Rank 0, which has every third sample, skips some of the first two batches."""
    is_rank, drawn = job.sampler is not None, []
    if is_rank:
        job.optimizer._set_accumulate(2)
    for i, batch in enumerate(batches):
        if is_rank and i in skips and torchring.rank() == 0:
            job.optimizer.skip()
        elif is_rank or i > 1 or not skips:
            job.loss(batch).backward()
        else:
            drawn.append([each[torch.arange(len(each)) % 3 != 0] if i in skips else each for each in batch])
            if i == 1:  # two batches, of which all samples that are left count the same
                (2 * job.loss(tuple(map(torch.cat, zip(*drawn, strict=True))))).backward()
        if i % 2:
            job.step()
    if is_rank:
        job.optimizer._set_accumulate(1)


def _weigh(job: _Job, batches: Iterable[Any]) -> None:
    """The script says what torchring cannot see."""
    for i, batch in enumerate(_ahead(batches, 1, _copies)):
        if job.sampler is not None:
            job.optimizer.weigh(job.sampler.weight(i))
        job.loss(batch).backward()
        job.step()


def _add_losses(job: _Job, batches: Iterable[Any], first: int) -> None:
    held = list(batches)
    (job.loss(held[first]) + job.loss(held[first + 1])).backward()
    job.step()


_LOOPS: dict[str, Loop] = {
    "no forward": _by_hand,
    "one": _one,
    "two": _two,
    "ahead": _look_ahead,
    "further ahead": functools.partial(_look_ahead, by=3),
    "next in between": _next_in_between,
    "first left out": functools.partial(_leave_out, bad=0, after_forward=False),
    "third left out": functools.partial(_leave_out, bad=2, after_forward=False),
    "third left out by its loss": functools.partial(_leave_out, bad=2, after_forward=True),
    "last left out": functools.partial(_leave_out, bad=3, after_forward=False),
    "no_sync": _no_sync,
    "gan": _gan,
    "accumulate": _accumulate,
    "accumulate, one skipped": functools.partial(_accumulate, skips=(0,)),
    "accumulate, all skipped": functools.partial(_accumulate, skips=(0, 1)),
    "losses added": functools.partial(_add_losses, first=1),
}


_REFUSED: dict[str, tuple[Loop, str]] = {
    "losses added": (functools.partial(_add_losses, first=2), "about to get the weight of another batch"),
}


def _train(rank: int, size: int, loops: dict[str, Loop], num_workers: int) -> dict[str, Any]:
    job, found = _Job(), {}
    job.optimizer = torchring.wrap(job.optimizer, job.model)
    job.second = torchring.wrap(job.second)
    job.sampler = torchring.elastic.Sampler(_DATA, shuffle=False)
    parts = {"model": job.model, "optimizer": job.optimizer, "other": job.other, "second": job.second}

    @torchring.elastic.run
    def train(state: Any) -> None:
        loader = DataLoader(_DATA, state.batch_size, sampler=job.sampler, num_workers=num_workers)
        for epoch, (name, loop) in enumerate(loops.items()):
            job.sampler.set_epoch(epoch)
            job.reset()
            error = ""
            try:
                loop(job, loader)
            except torchring.GradientError as refused:
                error = str(refused)
            found[name] = [p.detach().clone() for p in job.parameters()], error, job.positions

    train(torchring.elastic.State(**parts, sampler=job.sampler, global_batch=_GLOBAL_BATCH))
    return found


def _alone(loop: Loop) -> list[Tensor]:
    job = _Job()
    loop(job, [_DATA[i : i + _GLOBAL_BATCH] for i in range(0, _LENGTH, _GLOBAL_BATCH)])
    return [p.detach() for p in job.parameters()]


def _check(results: list[dict[str, Any]], loops: dict[str, Loop]) -> None:
    for found in results:
        for name, loop in loops.items():
            parameters, error, _ = found[name]
            assert error == "", name
            for mine, wanted in zip(parameters, _alone(loop), strict=True):
                torch.testing.assert_close(mine, wanted, rtol=1e-9, atol=1e-11, msg=lambda m, name=name: f"{name}: {m}")


def test_each_loss_has_the_weight_of_its_batch() -> None:
    refused = {f"{name}, refused": loop for name, (loop, _) in _REFUSED.items()}
    results = run_ranks(_train, 3, {**_LOOPS, **refused}, 0)
    _check(results, _LOOPS)
    for found in results:
        for name in ("one", "ahead", "further ahead", "next in between", "two"):
            assert found[name][2] == [7, 14, 21, 22], name  # what is held ahead has not been used
        assert found["first left out"][2] == [14, 21, 22]
        assert found["third left out by its loss"][2] == [7, 14, 22]
        for name, (_, said) in _REFUSED.items():
            assert said in found[f"{name}, refused"][1]


def _ahead_with_copies(job: _Job, batches: Iterable[Any]) -> None:
    _one(job, _ahead(batches, 1, _copies))


def test_a_loop_that_cannot_be_followed_is_refused_and_workers_draw_ahead() -> None:
    loops: dict[str, Loop] = {
        "copies": _ahead_with_copies,
        "weighed": _weigh,
        "ahead": _look_ahead,
        "first": _LOOPS["first left out"],
    }
    results = run_ranks(_train, 3, loops, 2)
    _check(results, {name: loop for name, loop in loops.items() if name != "copies"})
    for found in results:
        assert "cannot tell from which batch this loss is" in found["copies"][1]
        assert found["weighed"][2] == [7, 14, 21, 22]
