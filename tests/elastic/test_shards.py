"""Elastic jobs whose optimizer is sharded: a rank that is lost takes its share along, and all go back to a checkpoint.

A rank that leaves politely takes nothing along.
"""

import functools
import itertools
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import torchring
from tests.elastic.test_elastic import (
    _once,
    check_books,
    check_continuity,
    check_result,
    expected,
    listed,
    lose_driver,
    spans,
    train_worker,
)
from tests.support.elastic_job import ElasticJob, note
from torchring.elastic.worker.checkpoint import newest
from torchring.sharding import checkpoint, exchange, step


def make_model() -> torch.nn.Module:
    """A matrix that is cut, and small parameters. One is used in every second step."""
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(64, 600), torch.nn.Tanh(), torch.nn.Linear(600, 10)).double()


def make_adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, amsgrad=True)


def _marker(name: str) -> Path:
    return Path(os.environ["TMPDIR"]).with_name(name)


def _num_done(points: list[str]) -> int:
    return sum(_marker(point).exists() for point in points)


def _lose(point: str, points: list[str]) -> None:
    """Lose rank 1 of three here, if one was lost at all earlier points, and all have their shares since."""
    done = _num_done(points)
    is_next = torchring.size() == 3 and points[done:][:1] == [point] and _marker(f"entered after {done}").exists()
    if is_next and torchring.rank() == 1 and _once(point):
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
    before(checkpoint, "load_state", "while state is dealt out")


def train_sharded(points: list[str], **options: Any) -> None:
    _patch(points)
    train_worker(
        make=make_model,
        kind=make_adamw,
        wrapped=lambda: {"shard": True},
        begins=lambda: _marker(f"entered after {_num_done(points)}").touch(),
        trouble=lambda step, loss: loss.register_hook(lambda grad: _lose("in backward", points)) and None,
        stepped=lambda: _lose("between steps", points),
        **options,
    )


_POINTS = ["before the step", "in the step", "in the exchange", "between steps", "in backward"]
_POINTS += ["while state is gathered", "while state is dealt out"]
_EVERY = 9


def test_a_rank_may_be_lost_at_any_point_of_a_sharded_step(tmp_path: Path) -> None:
    script = functools.partial(train_sharded, _POINTS, checkpoint=tmp_path, every=_EVERY)
    with ElasticJob(script, 3) as job:

        def num_lost() -> int:
            return len(job.notes("lost"))

        def are_three() -> bool:
            return len(job.workers) == 3 and job.notes("step")[-1]["size"] == 3

        job.run_until(lambda: num_lost() >= len(_POINTS) - 1, "all losses but one", 120)
        job.run_until(lambda: num_lost() == len(_POINTS) or are_three(), "three ranks")
        if num_lost() < len(_POINTS):  # the replacement came at once: have shares dealt out again
            job.send(job.workers[2], signal.SIGTERM)
        job.run_until(lambda: num_lost() == len(_POINTS), "all losses", 60)
        job.run_until(are_three, "a replacement")
        num_steps = job.stop(50)
        assert job.run(120) == 0
        check_books(job, num_steps)
        _check_result(job, num_steps)
        assert [each["lost"] for each in job.notes("lost")] == _POINTS
        assert check_returns(job) == len(_POINTS) - 1  # with the last one, nothing was lost
        whole = sum(each.nbytes for each in expected(1, make=make_model, kind=make_adamw)[1])
        assert all(r["num_bytes"] < 1 / 3 * 1.02 * whole for r in job.notes("result"))
        check_saved(tmp_path, num_steps)


def _check_result(job: ElasticJob, num_steps: int) -> None:
    check_result(job, num_steps, state_tolerance=(1e-5, 1e-12), make=make_model, kind=make_adamw)


def check_returns(job: ElasticJob) -> int:
    """Each generation began where the one before had ended, or at a checkpoint. Returns how often at a checkpoint."""
    for (_, last), (first, _) in itertools.pairwise(spans(job)):
        if first != last + 1:
            assert first % _EVERY == 1
            assert last - 2 * _EVERY <= first <= last
    log = "".join(path.read_text() for path in job.folder.glob("*.log"))
    return log.count("took its share of the optimizer's state along (shard=True): all go back to a checkpoint")


def check_saved(folder: Path, num_steps: int) -> None:
    """The newest checkpoint has the whole state."""
    step, saved = newest(folder)
    assert step == num_steps
    found, wanted = listed(saved["optimizers"]["optimizer"]), expected(num_steps, make=make_model, kind=make_adamw)[1]
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-12)


def test_ranks_that_are_told_to_end_leave_their_shares_and_without_a_checkpoint_a_loss_means_the_beginning() -> None:
    with ElasticJob(functools.partial(train_sharded, []), 3) as job:
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
        _check_result(job, num_steps)


def test_without_the_driver_rank_0_writes_the_whole_state(tmp_path: Path) -> None:
    with ElasticJob(functools.partial(train_sharded, [], checkpoint=tmp_path), 3) as job:
        job.run_until(lambda: job.last_step() > 20, "20 steps")
        lose_driver(job, tmp_path)
        check_saved(tmp_path, job.last_step())


def test_a_commit_is_refused() -> None:
    model = make_model()
    state = torchring.elastic.State(model=model, optimizer=torchring.wrap(make_adamw(model), model, shard=True))
    with pytest.raises(ValueError, match=r"commit\(\) does not work with shard=True: no rank has the whole state"):
        state.commit()
    torchring.shutdown()
