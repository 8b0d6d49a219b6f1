"""Loops over a global batch of unequal shares: each loss has the weight of its batch, or there is an error."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

import torchring
from tests.support.harness import ranks, run_ranks
from tests.support.training import attempt

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

    def weight(self) -> int:
        return 0 if self.sampler is None else self.sampler.weight()

    def backward(self, loss: Tensor, weight: int, *, with_second: bool = False) -> None:
        if self.sampler is not None:
            for optimizer in [self.optimizer, self.second][: 1 + with_second]:
                optimizer.weigh(weight)
        loss.backward()

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        return torch.nn.functional.mse_loss(self.model(batch[0]), batch[1])

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        if self.sampler is not None:
            self.positions.append(self.sampler.position)


def _two(job: _Job, batches: Iterable[Any]) -> None:
    """Two backwards for a step, of batches that are drawn ahead by a worker."""
    for x, y in batches:
        weight = job.weight()
        job.backward(job.loss((x, y)), weight)
        job.backward(0.3 * (job.model(x) - y).abs().mean(), weight)
        job.step()


def _held(job: _Job, batches: Iterable[Any]) -> None:
    """All batches are drawn ahead, and one is left out."""
    for number, batch in enumerate(list(batches)):
        weight = job.weight()
        if number != 2:
            job.backward(job.loss(batch), weight)
            job.step()


def _gan(job: _Job, batches: Iterable[Any]) -> None:
    for x, y in batches:
        weight = job.weight()
        job.backward(job.model(x).square().mean(), weight)
        fake = job.other(y)
        job.backward((job.model(fake.detach()) - 1).square().mean(), weight)
        job.step()
        job.backward(job.model(fake).square().mean(), weight, with_second=True)
        job.second.step()
        job.second.zero_grad()
        job.optimizer.zero_grad()


def _accumulate(job: _Job, batches: Iterable[Any]) -> None:
    """The mean over the samples of two batches, without those of rank 0 in the first one."""
    if job.sampler is None:
        held = list(batches)
        held[0] = [each[torch.arange(_GLOBAL_BATCH) % 3 != 0] for each in held[0]]
        for pair in (held[:2], held[2:]):
            job.loss(tuple(map(torch.cat, zip(*pair, strict=True)))).backward()  # type: ignore[arg-type]
            job.step()
        return
    job.optimizer._set_accumulate(2)
    for number, batch in enumerate(batches):
        weight = job.weight()
        if number == 0 and torchring.rank() == 0:
            job.optimizer.skip()
        else:
            job.backward(job.loss(batch), weight)
        if number % 2:
            job.step()
    job.optimizer._set_accumulate(1)


def _unweighed(job: _Job, batches: Iterable[Any]) -> None:
    for batch in batches:
        job.loss(batch).backward()


def _evaluation(job: _Job, batches: Iterable[Any]) -> None:
    """A loop without weights inside of another one."""
    with torch.no_grad():
        evaluated = iter(batches)
        job.loss(next(evaluated))
    job.loss(_DATA[:2]).backward()
    next(iter(batches))
    job.loss(_DATA[:2]).backward()


# For each loop: words of its error, or the position of the sampler after each step.
_LOOPS: dict[Loop, str | list[int]] = {
    _two: [7, 14, 21, 22],  # what is drawn ahead has not been used
    _held: [7, 14, 22],
    _gan: [7, 14, 21, 22],
    _accumulate: [14, 22],
    _unweighed: "was not weighed. Ranks have unequal shares of its batches",
    _evaluation: [],
}


@ranks(3, start=run_ranks)
def test_each_loss_has_the_weight_of_its_batch() -> None:
    job, found = _Job(), {}
    job.optimizer = torchring.wrap(job.optimizer, job.model)
    job.second = torchring.wrap(job.second)
    job.sampler = torchring.elastic.Sampler(_DATA, shuffle=False, global_batch=_GLOBAL_BATCH)
    parts = {"model": job.model, "optimizer": job.optimizer, "other": job.other, "second": job.second}

    @torchring.elastic.run
    def train(state: Any) -> None:
        for epoch, loop in enumerate(_LOOPS):
            job.sampler.set_epoch(epoch)
            job.reset()
            options = {"batch_sampler": job.sampler, "num_workers": int(loop is _two)}
            said = attempt(lambda loop=loop, options=options: loop(job, DataLoader(_DATA, **options)))
            found[loop] = said, job.positions, [p.detach().clone() for p in job.parameters()]

    train(torchring.elastic.State(**parts, sampler=job.sampler))
    for loop, expected in _LOOPS.items():
        said, positions, parameters = found[loop]
        if isinstance(expected, str):
            assert said.startswith("GradientError: ")
            assert expected in said
            continue
        assert (said, positions) == ("", expected), loop
        if expected:
            alone = _Job()
            loop(alone, [_DATA[i : i + _GLOBAL_BATCH] for i in range(0, _LENGTH, _GLOBAL_BATCH)])
            wanted = [p.detach() for p in alone.parameters()]
            torch.testing.assert_close(parameters, wanted, rtol=1e-9, atol=1e-11)
