"""Elastic jobs whose optimizer is sharded: a rank that is lost takes its share along, and nothing is lost."""

from __future__ import annotations

import functools
import gc
import itertools
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
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
from torchring.collectives.service import Collectives
from torchring.elastic.worker import worker as workers
from torchring.elastic.worker.checkpoint import newest, newest_step
from torchring.memory import host as host_module
from torchring.sharding import handover, step

Kind = Callable[[torch.nn.Module], torch.optim.Optimizer]


def make_model() -> torch.nn.Module:
    """A matrix that is cut, and small parameters that share pieces. One is used in every second step."""
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

    before(step.Shards, "_enter", "before the step")
    before(step.Shards, "_spread_copies", "in the step")
    before(step.Shards, "_step_mirror", "half done")
    before(handover._Elements, "fetch", "while state is handed over")
    before(handover._Whole, "fetch", "while state is handed over")
    copies = step.stepped_copies

    def some_copies(*arguments: Any) -> Iterator[Any]:
        for i, each in enumerate(copies(*arguments)):
            if i:
                _lose("in the exchange", points)
            yield each
        _lose("before the barrier", points)

    step.stepped_copies = some_copies
    all_gather = Collectives.all_gather

    def gather(self: Collectives, *arguments: Any) -> Any:
        result = all_gather(self, *arguments)
        if sys._getframe(1).f_code.co_name == "_gather_elements":
            _lose("while state is gathered", points)
        return result

    Collectives.all_gather = gather
    barrier = Collectives.barrier

    def pass_barrier(self: Collectives) -> None:
        is_in_step = sys._getframe(1).f_code.co_name == "_spread_copies"
        is_next = is_in_step and _is_next("after the barrier", points)
        barrier(self)
        if is_next:
            _lose("after the barrier", points)
            if torchring.rank() == 2:  # as if it had heard of the loss first; for rank 0, the step counts
                raise torchring.PeerLostError("rank 1 is lost", rank=2, peers=(1,))

    Collectives.barrier = pass_barrier


def train_worker(
    make: Kind,
    shard: Any,
    points: list[str],
    trouble: Callable[[int], object] = lambda step: None,
    num_hosts: int = 1,
    **options: Any,
) -> None:
    _patch(points)
    number = workers.worker_of_process().number
    host_module._host_identity = lambda: f"host {number % num_hosts}"
    model = make_model()
    optimizer = torchring.wrap(make(model), model, shard=shard)
    sampler = torchring.elastic.Sampler(Digits(), seed=5)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, gamma=0.9)
    state = torchring.elastic.State(
        model=model,
        optimizer=optimizer,
        sampler=sampler,
        scheduler=scheduler,
        step=0,
        global_batch=GLOBAL_BATCH,
        **options,
    )

    @torchring.elastic.run
    def train(state: Any) -> None:
        note(enters=state.step, rank=torchring.rank(), size=torchring.size())
        _marker(f"entered after {_num_done(points)}").touch()
        while True:
            for pixels, labels, indices in DataLoader(Digits(), batch_size=state.batch_size, sampler=sampler):
                if is_last(state.step):
                    return
                optimizer.zero_grad()
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
    sharded = isinstance(optimizer, torchring.DistributedOptimizer) and optimizer._shards is not None
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
    assert len(results) == len(job.members)
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
    "before the barrier",
    "after the barrier",
    "half done",
    "between steps",
    "in backward",
    "while state is gathered",
    "while state is handed over",
]


def check_survivors(job: ElasticJob) -> None:
    """No step that a survivor had finished was lost. Between hosts, a rank may finish a step, and be lost before the
    others hear that it takes part."""
    steps: dict[int, dict[int, list[int]]] = {}
    for each in job.notes("step"):
        steps.setdefault(each["generation"], {}).setdefault(each["pid"], []).append(each["step"])
    for earlier, later in itertools.pairwise(sorted(steps)):
        last = max(steps[earlier][pid][-1] for pid in steps[earlier].keys() & steps[later].keys())
        assert {numbers[0] for numbers in steps[later].values()} == {last + 1}


def _run(make: Kind, points: list[str], folder: Path, num_hosts: int = 1) -> None:
    options = {"num_hosts": num_hosts, "checkpoint": folder, "every": 9}
    with ElasticJob(functools.partial(train_worker, make, True, points, **options), 3) as job:
        job.run_until(lambda: len(job.notes("lost")) >= len(points) - 1, "all losses but one", 120)
        job.run_until(
            lambda: (
                len(job.notes("lost")) == len(points) or (len(job.members) == 3 and job.notes("step")[-1]["size"] == 3)
            ),
            "three ranks",
        )
        if len(job.notes("lost")) < len(points):  # the replacement came at once: have shares handed over again
            job.send(job.members[2], signal.SIGTERM)
        job.run_until(lambda: len(job.notes("lost")) == len(points), "all losses", 60)
        job.run_until(lambda: len(job.members) == 3 and job.notes("step")[-1]["size"] == 3, "a replacement")
        num_steps = job.stop(50)
        assert job.run(120) == 0
        check_books(job, num_steps)
        check_survivors(job)
        if num_hosts == 1:
            check_continuity(job)
        check_result(job, make, num_steps)
        assert [each["lost"] for each in job.notes("lost")] == points
        whole = sum(each.nbytes for each in expected(make, 1)[1])
        assert make is make_adafactor or all(r["num_bytes"] < 2 / 3 * 1.02 * whole for r in job.notes("result"))
        check_saved(folder, make, num_steps)


def check_saved(folder: Path, make: Kind, num_steps: int) -> None:
    """The newest checkpoint has the whole state."""
    step, saved = newest(folder)
    assert step == num_steps
    found = [
        torch.as_tensor(v)
        for _, e in sorted(saved["stateful"]["optimizer"]["state"].items())
        for _, v in sorted(e.items())
    ]
    for mine, wanted in zip(found, expected(make, num_steps)[1], strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-5, atol=1e-12)


def test_a_rank_may_be_lost_at_any_point_of_a_sharded_step(tmp_path: Path) -> None:
    _run(make_adamw, _POINTS, tmp_path)


@pytest.mark.grid
@pytest.mark.parametrize(
    ("make", "num_hosts"), [(make_adafactor, 1), (make_fused, 1), (make_adamw, 2), (make_adafactor, 2)]
)
def test_other_optimizers_and_hosts(make: Kind, num_hosts: int, tmp_path: Path) -> None:
    missing = ("in the exchange", "while state is gathered") if make is make_adafactor else ()
    # Between hosts, replacements often come before shares are mirrored again: then a second loss is one too many.
    points = _POINTS[:-1] if num_hosts > 1 else _POINTS
    _run(make, [point for point in points if point not in missing], tmp_path, num_hosts)


def _lose_host(step: int) -> None:
    if step == 10 and torchring.rank() in (1, 3) and torchring.size() == 4 and _once(f"lost {torchring.rank()}"):
        os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.grid
def test_a_host_takes_nothing_along() -> None:
    with ElasticJob(functools.partial(train_worker, make_adamw, True, [], _lose_host, num_hosts=2), 4) as job:
        job.run_until(lambda: job.last_step() > 20, "20 steps", 120)
        num_steps = job.stop(30)
        assert job.run(120) == 0
        check_books(job, num_steps)
        check_survivors(job)
        check_result(job, make_adamw, num_steps)


def _write_and_lose(step: int) -> None:
    """At step 30, after a checkpoint, two ranks are lost at once: with them, a share and its mirror."""
    if step == 30 and torchring.rank() > 0 and torchring.size() == 3 and _once(f"lost {torchring.rank()}"):
        os.kill(os.getpid(), signal.SIGKILL)


def _run_back(shard: Any, trouble: Callable[[int], object], folder: Path) -> None:
    script = functools.partial(train_worker, make_adamw, shard, [], trouble, checkpoint=folder, every=7)
    with ElasticJob(script, 3) as job:
        job.run_until(lambda: job.last_step() > 50 and job.notes("step")[-1]["size"] == 3, "50 steps, and 3 ranks", 120)
        num_steps = job.stop(50)
        assert job.run(120) == 0
        check_books(job, num_steps)
        check_result(job, make_adamw, num_steps)
        again = [each["enters"] for each in job.notes("enters")]
        assert again[:3] == [0, 0, 0]
        assert 14 <= again[3] <= 28  # from a checkpoint
        assert again[3] % 7 == 0
        log = (job.folder / "worker0.log").read_text()
        assert "took a share of the optimizer's state along that no other rank had" in log
        assert "training goes on from the checkpoint of step" in log
        assert newest_step(folder) == num_steps


def test_if_a_share_and_its_mirror_are_lost_all_go_back_to_a_checkpoint(tmp_path: Path) -> None:
    _run_back(True, _write_and_lose, tmp_path)


def _lose_one(step: int) -> None:
    if step == 30 and torchring.rank() == 1 and _once("lost"):
        os.kill(os.getpid(), signal.SIGKILL)


def test_unmirrored_shares_go_back_to_a_checkpoint(tmp_path: Path) -> None:
    _run_back("unmirrored", _lose_one, tmp_path)


@pytest.mark.parametrize("shard", [True, "unmirrored"])
def test_ranks_that_are_told_to_end_leave_their_shares_behind(shard: Any) -> None:
    """With shard=True, a rank and the one that keeps its mirror. No checkpoint is there."""
    with ElasticJob(functools.partial(train_worker, make_adamw, shard, []), 3) as job:
        job.run_until(lambda: job.last_step() > 10, "10 steps")
        leaving = job.members[1:]
        for worker in leaving:
            job.send(worker, signal.SIGTERM)
        job.run_until(lambda: not set(leaving) & set(job.members) and len(job.members) == 3, "replacements")
        num_steps = job.stop(30)
        assert job.run(120) == 0
        check_books(job, num_steps)
        check_continuity(job)
        check_result(job, make_adamw, num_steps)


def test_without_the_driver_rank_0_writes_the_whole_state(tmp_path: Path) -> None:
    with ElasticJob(functools.partial(train_worker, make_adamw, True, [], checkpoint=tmp_path), 3) as job:
        job.run_until(lambda: job.last_step() > 20, "20 steps")
        job.driver._store = job.driver._opening = None  # as after SIGKILL, for the workers
        gc.collect()
        end = time.monotonic() + patient(30)
        processes = [job.driver._processes[worker].job.process for worker in job.members]
        while any(process.poll() is None for process in processes):
            assert time.monotonic() < end, "workers did not end without the driver"
            time.sleep(0.02)
        assert [process.poll() for process in processes] == [1, 1, 1]
        check_saved(tmp_path, make_adamw, job.last_step())
