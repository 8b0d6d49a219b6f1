"""Elastic training: ranks that are lost, come, leave and fail, and what the others have after that."""

from __future__ import annotations

import signal
import zlib
from typing import Any

import torch
from elastic_job import ElasticJob, is_last, note
from harness import run_ranks
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Dataset

import torchring

GLOBAL_BATCH = 60
LR = 0.05


PIXELS, LABELS = (torch.tensor(each[:600]) for each in load_digits(return_X_y=True))
PIXELS /= 16


class Digits(Dataset[Any]):
    """600 images, each with its number."""

    def __len__(self) -> int:
        return 600

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return PIXELS[index], LABELS[index], index


def make_model() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(64, 24), torch.nn.Tanh(), torch.nn.Linear(24, 10)).double()


def crc(model: torch.nn.Module) -> int:
    value = 0
    for tensor in model.state_dict().values():
        value = zlib.crc32(tensor.numpy().tobytes(), value)
    return value


def train_worker(**options: Any) -> None:
    """The script of a worker."""
    model = make_model()
    optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9), model)
    sampler = torchring.elastic.Sampler(Digits(), seed=5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, gamma=0.9)
    state = torchring.elastic.State(
        model=model, optimizer=optimizer, sampler=sampler, scheduler=scheduler, step=0, global_batch=GLOBAL_BATCH,
        **options,
    )  # fmt: skip

    @torchring.elastic.run
    def train(state: Any) -> None:
        note(enters=state.step, rank=torchring.rank(), size=torchring.size())
        while True:
            for pixels, labels, indices in DataLoader(Digits(), batch_size=state.batch_size, sampler=sampler):
                if is_last(state.step):
                    return
                optimizer.zero_grad()
                torch.nn.functional.cross_entropy(model(pixels), labels).backward()
                optimizer.step()
                scheduler.step()
                state.step += 1
                note(
                    step=state.step,
                    crc=crc(model),
                    indices=indices.tolist(),
                    rank=torchring.rank(),
                    size=torchring.size(),
                )

    train(state)
    note(result=[p.tolist() for p in model.parameters()], lr=scheduler.get_last_lr())


def expected(num_steps: int) -> list[torch.Tensor]:
    """The parameters after as many steps of one process."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, gamma=0.9)
    for order in orders(num_steps):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(PIXELS[order]), LABELS[order]).backward()
        optimizer.step()
        scheduler.step()
    return [parameter.detach() for parameter in model.parameters()]


def orders(num_steps: int) -> list[torch.Tensor]:
    """The samples of each step."""
    steps: list[torch.Tensor] = []
    epoch = 0
    while len(steps) < num_steps:
        order = torch.randperm(600, generator=torch.Generator().manual_seed(5 + epoch))
        steps += order.split(GLOBAL_BATCH)
        epoch += 1
    return steps[:num_steps]


def check_books(job: ElasticJob, num_steps: int) -> None:
    """Whatever has happened: replicas were equal after each step, and each step had its samples, each once."""
    by_step: dict[int, list[dict[str, Any]]] = {}
    for each in job.notes("step"):
        by_step.setdefault(each["step"], []).append(each)
    assert sorted(by_step) == list(range(1, num_steps + 1))
    for step, order in enumerate(orders(num_steps), 1):
        notes = by_step[step]
        assert len({each["crc"] for each in notes}) == 1, f"replicas differ after step {step}"
        drawn = [index for each in notes for index in each["indices"]]
        assert len(drawn) == len(set(drawn)), f"samples were used twice in step {step}"
        assert set(drawn) <= set(order.tolist()), f"step {step} has used samples of another"
        if len({each["size"] for each in notes}) == 1 and len(notes) == notes[0]["size"]:
            assert len(drawn) == GLOBAL_BATCH


def check_result(job: ElasticJob, num_steps: int) -> None:
    """All workers of the last generation have what one process would have, to rounding."""
    results = job.notes("result")
    assert len(results) == len(job.members)
    for result in results:
        for found, wanted in zip(result["result"], expected(num_steps), strict=True):
            torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), wanted, rtol=1e-9, atol=1e-11)


def test_losses_joins_and_polite_ends_change_nothing() -> None:
    with ElasticJob(train_worker, 3) as job:
        job.run_until(lambda: job.last_step() > 30, "30 steps")
        job.send(job.members[0])  # rank 0
        job.run_until(lambda: len(job.members) == 2, "a generation of two")
        job.run_until(lambda: len(job.members) == 3, "a replacement")
        leaving = job.members[1]
        job.send(leaving, signal.SIGTERM)
        job.run_until(lambda: leaving not in job.members, "a generation without it")
        num_steps = job.stop()
        assert job.run() == 0
        check_books(job, num_steps)
        check_result(job, num_steps)


def _train_once(rank: int, size: int) -> None: ...


def test_without_a_driver() -> None:
    run_ranks(_train_once, 1)
