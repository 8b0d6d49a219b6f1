"""Elastic jobs whose optimizer is sharded: a rank that is lost takes its share along, and all go back to a checkpoint.

A rank that leaves politely takes nothing along.
"""

from __future__ import annotations

import functools
import gc
import itertools
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import torchring
from tests.elastic.test_elastic import (
    GLOBAL_BATCH,
    LABELS,
    PIXELS,
    Digits,
    _once,
    check_books,
    check_continuity,
    crc,
    orders,
)
from tests.support.elastic_job import NOTES, ElasticJob, is_last, note
from tests.support.harness import patient
from torchring.elastic.worker import shares
from torchring.elastic.worker import worker as workers
from torchring.elastic.worker.checkpoint import newest
from torchring.sharding import checkpoint, exchange, step
from torchring.sharding.optimizer import ShardedOptimizer

Kind = Callable[[torch.nn.Module], torch.optim.Optimizer]


def make_model() -> torch.nn.Module:
    """A matrix that is cut, and small parameters. One is used in every second step."""
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(64, 600), torch.nn.Tanh(), torch.nn.Linear(600, 10)).double()


def make_adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, amsgrad=True)


def make_fused(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def make_adafactor(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adafactor(model.parameters(), lr=1e-2)


def _num_done(points: list[str]) -> int:
    return sum(_marker(point).exists() for point in points)


def _marker(name: str) -> Path:
    return Path(os.environ["TMPDIR"]).with_name(name)


def _is_next(point: str, points: list[str]) -> bool:
    """Whether a rank of three is to be lost here: one was at all earlier points, and all have their shares since."""
    done = _num_done(points)
    return torchring.size() == 3 and points[done:][:1] == [point] and _marker(f"entered after {done}").exists()


def _lose(point: str, points: list[str]) -> None:
    """Be lost, on rank 1."""
    if torchring.rank() == 1 and _is_next(point, points) and _once(point):
        note(lost=point)
        os.kill(os.getpid(), signal.SIGKILL)


def _patch(points: list[str]) -> None:
    """Call `_lose` at certain points of a step, and of what follows."""

    def before(owner: Any, name: str, point: str) -> None:
        original = getattr(owner, name)

        def wrapper(*arguments: Any, **options: Any) -> Any:
            _lose(point, points)
            return original(*arguments, **options)

        setattr(owner, name, wrapper)

    before(step.Shards, "_begin_step", "before the step")
    before(exchange.Exchange, "spread", "in the step")
    before(exchange, "_copy_to_peers", "in the exchange")
    before(checkpoint, "gather_state", "while state is gathered")
    before(shares, "deal_out", "while state is dealt out")


def train_worker(
    make: Kind,
    points: list[str],
    trouble: Callable[[int], object] = lambda step: None,
    **options: Any,
) -> None:
    _patch(points)
    model = make_model()
    optimizer = torchring.wrap(make(model), model, shard=True)
    sampler = torchring.elastic.Sampler(Digits(), seed=5, global_batch=GLOBAL_BATCH)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, gamma=0.9)
    state = torchring.elastic.State(
        model=model,
        optimizer=optimizer,
        sampler=sampler,
        scheduler=scheduler,
        step=0,
        **options,
    )

    @torchring.elastic.run
    def train(state: Any) -> None:
        note(enters=state.step, rank=torchring.rank(), size=torchring.size())
        _marker(f"entered after {_num_done(points)}").touch()
        while True:
            for pixels, labels, indices in DataLoader(Digits(), batch_sampler=sampler):
                if is_last(state.step):
                    return
                optimizer.zero_grad()
                optimizer.weigh(sampler.weight())
                loss = torch.nn.functional.cross_entropy(model(pixels), labels)
                loss.register_hook(lambda grad: _lose("in backward", points))
                loss.backward()
                trouble(state.step)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                state.step += 1
                where = {
                    "rank": torchring.rank(),
                    "size": torchring.size(),
                    "generation": workers._the_worker.generation,
                }
                note(step=state.step, crc=f"{crc(model)} {scheduler.get_last_lr()}", indices=indices.tolist(), **where)
                _lose("between steps", points)

    train(state)
    result = Path(os.environ[NOTES]).with_suffix(".pt")
    torch.save(([p.detach() for p in model.parameters()], whole_state(optimizer)), result)
    num_bytes = sum(value.nbytes for entry in optimizer.state.values() for value in entry.values())
    note(result=str(result), num_bytes=num_bytes)


def whole_state(optimizer: Any) -> list[torch.Tensor]:
    sharded = isinstance(optimizer, ShardedOptimizer)
    found = optimizer.state_dict(all_ranks=True) if sharded else optimizer.state_dict()
    return [torch.as_tensor(value) for _, entry in sorted(found["state"].items()) for _, value in sorted(entry.items())]


def expected(make: Kind, num_steps: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Parameters and state after as many steps of one process."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _expected(make, num_steps)
    finally:
        torch.set_num_threads(num_threads)


def _expected(make: Kind, num_steps: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    model = make_model()
    optimizer = make(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, gamma=0.9)
    for order in orders(num_steps):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(PIXELS[order]), LABELS[order]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    return [parameter.detach() for parameter in model.parameters()], whole_state(optimizer)


def check_result(job: ElasticJob, make: Kind, num_steps: int) -> None:
    results = job.notes("result")
    assert len(results) == len(job.workers)
    parameters, state = expected(make, num_steps)
    for result in results:
        found_parameters, found_state = torch.load(result["result"])
        for found, wanted in zip(found_parameters, parameters, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-7, atol=1e-9)
        for found, wanted in zip(found_state, state, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-12)


_POINTS = [
    "before the step",
    "in the step",
    "in the exchange",
    "between steps",
    "in backward",
    "while state is gathered",
    "while state is dealt out",
]


_EVERY = 9


def _run(make: Kind, points: list[str], folder: Path) -> None:
    with ElasticJob(functools.partial(train_worker, make, points, checkpoint=folder, every=_EVERY), 3) as job:
        job.run_until(lambda: len(job.notes("lost")) >= len(points) - 1, "all losses but one", 120)
        job.run_until(
            lambda: (
                len(job.notes("lost")) == len(points) or (len(job.workers) == 3 and job.notes("step")[-1]["size"] == 3)
            ),
            "three ranks",
        )
        if len(job.notes("lost")) < len(points):  # the replacement came at once: have shares dealt out again
            job.send(job.workers[2], signal.SIGTERM)
        job.run_until(lambda: len(job.notes("lost")) == len(points), "all losses", 60)
        job.run_until(lambda: len(job.workers) == 3 and job.notes("step")[-1]["size"] == 3, "a replacement")
        num_steps = job.stop(50)
        assert job.run(120) == 0
        check_books(job, num_steps)
        check_result(job, make, num_steps)
        assert [each["lost"] for each in job.notes("lost")] == points
        assert check_returns(job) == len(points) - 1  # with the last one, nothing was lost
        whole = sum(each.nbytes for each in expected(make, 1)[1])
        assert make is make_adafactor or all(r["num_bytes"] < 1 / 3 * 1.02 * whole for r in job.notes("result"))
        check_saved(folder, make, num_steps)


def check_returns(job: ElasticJob) -> int:
    """Each generation began where the one before had ended, or at a checkpoint. Returns how often at a checkpoint."""
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for each in job.notes("step"):
        generation, step = each["generation"], each["step"]
        first[generation] = min(step, first.get(generation, step))
        last[generation] = max(step, last.get(generation, step))
    log = "".join(path.read_text() for path in job.folder.glob("*.log"))
    num_returns = log.count("took its share of the optimizer's state along (shard=True): all go back to a checkpoint")
    for earlier, later in itertools.pairwise(sorted(first)):
        if first[later] != last[earlier] + 1:
            assert first[later] % _EVERY == 1
            assert last[earlier] - 2 * _EVERY <= first[later] <= last[earlier]
    return num_returns


def check_saved(folder: Path, make: Kind, num_steps: int) -> None:
    """The newest checkpoint has the whole state."""
    step, saved = newest(folder)
    assert step == num_steps
    found = [
        torch.as_tensor(v)
        for _, e in sorted(saved["optimizers"]["optimizer"]["state"].items())
        for _, v in sorted(e.items())
    ]
    for mine, wanted in zip(found, expected(make, num_steps)[1], strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-12)


def test_a_rank_may_be_lost_at_any_point_of_a_sharded_step(tmp_path: Path) -> None:
    _run(make_adamw, _POINTS, tmp_path)


@pytest.mark.grid
@pytest.mark.parametrize("make", [make_adafactor, make_fused])
def test_other_optimizers(make: Kind, tmp_path: Path) -> None:
    _run(make, _POINTS, tmp_path)


def test_ranks_that_are_told_to_end_leave_their_shares_and_without_a_checkpoint_a_loss_means_the_beginning() -> None:
    with ElasticJob(functools.partial(train_worker, make_adamw, []), 3) as job:
        job.run_until(lambda: job.last_step() > 10, "10 steps")
        leaving, stays = job.workers[:2], job.workers[2]
        for worker in leaving:
            job.send(worker, signal.SIGTERM)
        job.run_until(lambda: job.workers[:1] == (stays,) and len(job.workers) == 3, "replacements")
        job.run_until(lambda: job.notes("step")[-1]["generation"] == job.generation, "a step of theirs")
        check_continuity(job)
        lost = job.workers
        job.send(lost[1])
        job.run_until(lambda: len(job.workers) == 3 and not set(lost) & set(job.workers), "new workers")
        num_steps = job.stop(30)
        assert job.run(120) == 0
        old = {job.pids[worker] for worker in (*leaving, *lost)}
        assert next(each["enters"] for each in job.notes("enters") if each["pid"] not in old) == 0
        assert "new ones start from the beginning. Pass checkpoint=" in (job.folder / f"worker{stays}.log").read_text()
        check_books(job, num_steps)
        check_result(job, make_adamw, num_steps)


def test_without_the_driver_rank_0_writes_the_whole_state(tmp_path: Path) -> None:
    with ElasticJob(functools.partial(train_worker, make_adamw, [], checkpoint=tmp_path), 3) as job:
        job.run_until(lambda: job.last_step() > 20, "20 steps")
        job.driver._store = job.driver._opening = None  # as after SIGKILL, for the workers
        gc.collect()
        end = time.monotonic() + patient(30)
        processes = [job.driver._processes[worker].job.process for worker in job.workers]
        while any(process.poll() is None for process in processes):
            assert time.monotonic() < end, "workers did not end without the driver"
            time.sleep(0.02)
        assert [process.poll() for process in processes] == [1, 1, 1]
        check_saved(tmp_path, make_adamw, job.last_step())
