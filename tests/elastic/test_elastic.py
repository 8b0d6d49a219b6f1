"""Elastic training: ranks that are lost, come, leave and fail, and what the others have after that."""

import functools
import gc
import itertools
import os
import re
import signal
import threading
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import torchring
from tests.support.commands import run_python
from tests.support.elastic_job import NOTES, ElasticJob, Slots, is_last, note
from tests.support.harness import count_open_fds, run_ranks, wait_until
from tests.support.training import attempt
from torchring.default_world import default_world
from torchring.elastic.worker import worker as workers
from torchring.elastic.worker.checkpoint import newest_step
from torchring.sharding.optimizer import ShardedOptimizer

GLOBAL_BATCH = 60
LR = 0.05

_RANDOM = torch.Generator().manual_seed(0)
PIXELS = torch.rand(600, 64, generator=_RANDOM, dtype=torch.float64)
LABELS = (PIXELS @ torch.randn(64, 10, generator=_RANDOM, dtype=torch.float64)).argmax(1)
DIGITS = TensorDataset(PIXELS, LABELS, torch.arange(600))


def make_model() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(64, 24), torch.nn.Tanh(), torch.nn.Linear(24, 10)).double()


def crc(model: torch.nn.Module) -> int:
    return zlib.crc32(b"".join(tensor.numpy().tobytes() for tensor in model.state_dict().values()))


def make_sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)


def train_worker(
    *,
    trouble: Callable[[int, Any], object] = lambda step, loss: None,  # called before backward
    make: Callable[[], torch.nn.Module] = make_model,
    kind: Callable[[Any], torch.optim.Optimizer] = make_sgd,
    wrapped: Callable[[], dict[str, Any]] = dict,  # gives options of `wrap`
    # Train with a GradScaler, and call this between its `unscale_()` and `step()`
    scaled_trouble: Callable[[int], object] | None = None,
    begins: Callable[[], object] = lambda: None,  # called at the begin of a generation
    stepped: Callable[[], object] = lambda: None,  # called after each step
    **options: Any,
) -> None:
    model = make()
    optimizer = torchring.wrap(kind(model), model, **wrapped())
    sampler = torchring.elastic.Sampler(DIGITS, seed=5, global_batch=GLOBAL_BATCH)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, gamma=0.9)
    scaler = torch.amp.GradScaler("cpu", enabled=scaled_trouble is not None)
    parts = {"model": model, "optimizer": optimizer, "sampler": sampler, "scheduler": scheduler, "scaler": scaler}
    state = torchring.elastic.State(**parts, step=0, **options)

    @torchring.elastic.run
    def train(state: Any) -> None:
        hosts, rank = default_world().hosts, torchring.rank()
        place = next(ranks.index(rank) for ranks in hosts if rank in ranks)
        # By what there are links to other ranks: a rank with a column has some of its own if "hierarchical" is chosen.
        layout = [torchring.size(), len(hosts), torchring.local_size(), place < min(map(len, hosts))]
        note(enters=state.step, layout=[*layout, optimizer.stats().algorithm], **resources())
        begins()
        while True:
            for pixels, labels, indices in DataLoader(DIGITS, batch_sampler=sampler):
                if is_last(state.step):
                    return
                optimizer.weigh(sampler.weight())
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(model(pixels), labels)
                loss = trouble(state.step, loss) or loss
                scale = scaler.get_scale()
                scaler.scale(loss).backward()
                scaler.unscale_(optimizer)
                if scaled_trouble is not None:
                    scaled_trouble(state.step)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                scheduler.step()
                if scaler.get_scale() < scale:  # the step was left out
                    continue
                state.step += 1
                where = {"size": torchring.size(), "generation": workers._the_worker.generation}
                is_like = f"{crc(model)} {scheduler.get_last_lr()} {scaler.get_scale()}"
                note(step=state.step, crc=is_like, indices=indices.tolist(), **where)
                stepped()

    train(state)
    result = Path(os.environ[NOTES]).with_suffix(".pt")
    torch.save(([p.detach() for p in model.parameters()], whole_state(optimizer)), result)
    note(result=str(result), num_bytes=sum(v.nbytes for each in optimizer.state.values() for v in each.values()))


def whole_state(optimizer: Any) -> list[torch.Tensor]:
    how = {"all_ranks": True} if isinstance(optimizer, ShardedOptimizer) else {}
    return listed(optimizer.state_dict(**how))


def listed(state_dict: dict[str, Any]) -> list[torch.Tensor]:
    entries = sorted(state_dict["state"].items())
    return [torch.as_tensor(value) for _, entry in entries for _, value in sorted(entry.items())]


@functools.cache
def expected(
    num_steps: int,
    global_batch: int = GLOBAL_BATCH,
    accumulate: int = 1,
    make: Callable[[], torch.nn.Module] = make_model,
    kind: Callable[[Any], torch.optim.Optimizer] = make_sgd,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The parameters and the state of the optimizer after as many steps of one process."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # with more, tests that run side by side wait for each other's threads
    model = make()
    optimizer = kind(model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, gamma=0.9)
    batches = orders(num_steps * accumulate, global_batch)
    for step in range(num_steps):
        optimizer.zero_grad()
        order = torch.cat(batches[step * accumulate : (step + 1) * accumulate])
        torch.nn.functional.cross_entropy(model(PIXELS[order]), LABELS[order]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    torch.set_num_threads(num_threads)
    return [parameter.detach() for parameter in model.parameters()], whole_state(optimizer)


def orders(num_steps: int, global_batch: int = GLOBAL_BATCH) -> list[torch.Tensor]:
    num_epochs = num_steps // (600 // global_batch) + 1
    epochs = [torch.randperm(600, generator=torch.Generator().manual_seed(5 + epoch)) for epoch in range(num_epochs)]
    return [batch for order in epochs for batch in order.split(global_batch)][:num_steps]


def resources() -> dict[str, int]:
    gc.collect()
    status = Path("/proc/self/status").read_text()
    return {
        "descriptors": count_open_fds(),
        "threads": threading.active_count(),
        "mappings": Path("/proc/self/maps").read_bytes().count(b"\n"),
        "kilobytes": int(re.findall(r"^VmRSS:\s*([0-9]+)", status, re.MULTILINE)[0]),
    }


def check_books(job: ElasticJob, num_steps: int) -> None:
    """Whatever has happened: replicas were equal after each step, and each step had its samples, each once."""
    by_step: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for each in job.notes("step"):
        by_step.setdefault((each["generation"], each["step"]), []).append(each)
    assert {step for _, step in by_step} == set(range(1, num_steps + 1))
    samples = [set(order.tolist()) for order in orders(num_steps)]
    for (_, step), notes in by_step.items():
        assert len({each["crc"] for each in notes}) == 1, f"replicas differ after step {step}"
        drawn = [index for each in notes for index in each["indices"]]
        assert len(drawn) == len(set(drawn)), f"samples were used twice in step {step}"
        assert set(drawn) <= samples[step - 1], f"step {step} has used samples of another"
        if len(notes) == notes[0]["size"]:  # nobody was lost before it could write
            assert len(drawn) == GLOBAL_BATCH


def spans(job: ElasticJob) -> list[tuple[int, int]]:
    """The first and the last step of each generation."""
    found: dict[int, list[int]] = {}
    for each in job.notes("step"):
        found.setdefault(each["generation"], []).append(each["step"])
    return [(min(steps), max(steps)) for _, steps in sorted(found.items())]


def check_continuity(job: ElasticJob) -> None:
    """Each generation began where the one before had ended: no finished step was lost."""
    assert all(first == last + 1 for (_, last), (first, _) in itertools.pairwise(spans(job)))


def lose_driver(job: ElasticJob, folder: Path) -> None:
    """The workers end, and the newest checkpoint is of the last step."""
    job.driver._store = job.driver._opening = None  # as after SIGKILL, for the workers
    gc.collect()
    processes = [job.driver._processes[worker].job.process for worker in job.workers]
    wait_until(lambda: all(process.poll() is not None for process in processes), "workers to end without the driver")
    assert [process.poll() for process in processes] == [1] * len(processes)
    assert newest_step(folder) == job.last_step()


def check_growth(job: ElasticJob) -> dict[str, int]:
    """No worker has grown with the number of changes. Returns the most that one has grown, of each kind."""
    most = {"descriptors": 4, "threads": 2, "mappings": 40, "kilobytes": 20_000}
    grown = dict.fromkeys(most, 0)
    by_layout: dict[Any, list[dict[str, Any]]] = {}
    for each in job.notes("enters"):
        by_layout.setdefault((each["pid"], *each["layout"]), []).append(each)
    for entries in by_layout.values():
        settled = entries[2:]  # what is made once, was
        # What some generations open and others do not, such as links for collectives, is in the first half.
        for kind in grown if (half := len(settled) // 2) else ():
            grown[kind] = max(grown[kind], settled[-1][kind] - max(each[kind] for each in settled[:half]))
    assert all(grown[kind] <= most[kind] for kind in most), grown
    return grown


def check_result(
    job: ElasticJob, num_steps: int, *, state_tolerance: tuple[float, float] = (1e-9, 1e-11), **what: Any
) -> None:
    """All workers of the last generation have what one process would have, to rounding. `what`: of `expected`."""
    results = job.notes("result")
    assert len(results) == len(job.workers)
    parameters, state = expected(num_steps, **what)
    for result in results:
        found, found_state = torch.load(result["result"])
        torch.testing.assert_close(found, parameters, rtol=1e-7 if what else 1e-9, atol=1e-9 if what else 1e-11)
        torch.testing.assert_close(found_state, state, rtol=state_tolerance[0], atol=state_tolerance[1])


def _is_infinite(step: int) -> bool:
    return step == 15 and workers._the_worker.generation == 1


def _overflow_once(step: int, loss: torch.Tensor) -> torch.Tensor | None:
    return loss * float("inf") if _is_infinite(step) else None


def _lose_two(step: int) -> None:
    """A rank is lost in a step that GradScaler leaves out: rank 1 does so, rank 0 does not come to it. Later, a rank is
    lost between `unscale_()` and `step()`. Later, one is stuck, and the others wait for it."""
    if step == 30 and torchring.rank() == 0 and _once("lost after unscale_"):
        os.kill(os.getpid(), signal.SIGKILL)
    if step == 30 or (_is_infinite(step) and torchring.rank() == 0):
        torchring.all_reduce(torch.ones(1))
    if _is_infinite(step) and torchring.rank() == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if step >= 45 and torchring.rank() == 1 and _once("stuck"):
        note(stuck=os.getpid())
        threading.Event().wait()


def test_losses_joins_and_polite_ends_change_nothing() -> None:
    script = functools.partial(train_worker, trouble=_overflow_once, scaled_trouble=_lose_two)
    with ElasticJob(script, 3, stall_timeout=1.5) as job:
        job.run_until(lambda: job.workers, "a generation")
        lost = job.workers[0]
        # On a busy machine, the replacement may come before the others have met.
        job.run_until(lambda: lost not in job.workers and len(job.workers) == 3, "a replacement")
        leaving = job.workers[1]
        job.send(leaving, signal.SIGTERM)
        job.run_until(lambda: leaving not in job.workers, "a generation without it")
        job.run_until(lambda: job.last_step() > 60 and job.notes("stuck"), "60 steps, and a worker that is stuck")
        stuck = next(worker for worker, pid in job.pids.items() if pid == job.notes("stuck")[0]["stuck"])
        job.run_until(lambda: not job.is_alive(stuck), "its end")
        num_steps = job.stop(100)
        assert job.run() == 0
        check_books(job, num_steps)
        check_continuity(job)
        assert job.num_heartbeats > 0
        check_result(job, num_steps)


def _once(name: str) -> bool:
    """Whether this is the first time that a worker of this job asks."""
    try:
        os.close(os.open(Path(os.environ["TMPDIR"]).with_name(name), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return False
    return True


def _raise_once(step: int, loss: torch.Tensor) -> None:
    if step == 20 and torchring.rank() == 0 and _once("error"):
        raise ZeroDivisionError("injected")


def _misfit() -> dict[str, Any]:
    """Worker 2 does not fit the others."""
    return {"compression": "bf16"} if workers.worker_of_process().number == 2 else {}


def test_without_a_commit_a_failing_rank_ends_and_lost_jobs_go_on_from_a_checkpoint(tmp_path: Path) -> None:
    script = functools.partial(train_worker, trouble=_raise_once, wrapped=_misfit, checkpoint=tmp_path, every=7)
    with ElasticJob(script, 2) as job:
        job.run_until(lambda: job.workers == (1,) or job.workers[:1] == (1,), "a generation without rank 0")
        job.run_until(lambda: 3 in job.workers and job.last_step() > 60, "a replacement that fits, and 60 steps")
        lost = job.workers
        for worker in lost:
            job.send(worker)
        job.run_until(lambda: not set(lost) & set(job.workers), "new workers")
        num_steps = job.stop(100)
        assert job.run() == 0
        check_books(job, num_steps)
        check_result(job, num_steps)
        reached = max(each["step"] for each in job.notes("step") if each["generation"] < job.generation)
        enters = [each["enters"] for each in job.notes("enters")]
        assert "compression='bf16'" in (job.folder / "worker2.log").read_text()
        assert 20 in enters  # the other one went on where they were
        # And the new ones from a checkpoint. How many steps old it is depends on how long writing takes.
        assert 20 < enters[-1] <= reached


ENDS_EARLY = """
import sys
from torch.distributed import TCPStore
from torchring.elastic import protocol as p
from torchring.elastic.worker.checkpoint import CheckpointWriter
from torchring.elastic.worker.worker import Worker
from torchring.rendezvous.signed import signed

server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
store = signed(server, "s")
store.set(p.TOKEN, "")
store.set(p.ORDERS, p.Orders().encode())
p.LOOK_SECONDS = 0  # so the worker's thread is nearly always in the store's code
worker = Worker(p.Invitation(0, 0, 1, ("127.0.0.1",), server.port, "s", "localhost"))
writer = CheckpointWriter(sys.argv[1])
writer.write(1, {"list": list(range(200_000))})
sys.exit(5)
"""


def test_a_worker_that_ends_early_keeps_its_exit_code_and_its_last_checkpoint(tmp_path: Path) -> None:
    """No thread of it is in C++ code when the interpreter is taken down, which would end the process with SIGABRT."""
    (tmp_path / "ends_early.py").write_text(ENDS_EARLY)
    result = run_python(tmp_path / "ends_early.py", tmp_path / "checkpoints")
    assert (result.returncode, result.stderr) == (5, "")
    assert newest_step(tmp_path / "checkpoints") == 1


_NUM_STEPS = 24


def _train_alone(rank: int, size: int, folder: Path, is_told: bool, shard: bool) -> Any:
    """Under any launcher, with shares that differ and a smaller last batch; rank 1 is told to end after 12 steps."""
    model = make_model()
    optimizer = torchring.wrap(
        torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9), model, accumulate=2, on_nonfinite="skip", shard=shard
    )
    sampler = torchring.elastic.Sampler(DIGITS, seed=5, global_batch=64)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, gamma=0.9)
    parts = {"model": model, "optimizer": optimizer, "sampler": sampler, "scheduler": scheduler}
    state = torchring.elastic.State(**parts, step=0, checkpoint=folder, every=5)

    @torchring.elastic.run
    def train(state: Any) -> int:
        first, num_micro = state.step, 0
        while True:
            for pixels, labels, _ in DataLoader(DIGITS, batch_sampler=sampler):
                if state.step == _NUM_STEPS:
                    return first
                if is_told and rank == 1 and state.step == 12 and num_micro % 2 == 0:
                    os.kill(os.getpid(), signal.SIGTERM)
                optimizer.weigh(sampler.weight())
                torch.nn.functional.cross_entropy(model(pixels), labels).backward()
                num_micro += 1
                if num_micro % 2 == 0:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                    optimizer.step()
                    optimizer.zero_grad()
                    scheduler.step()
                    state.step += 1

    def without_weights() -> None:
        sampler.set_epoch(7)
        with torch.no_grad():
            next(iter(DataLoader(DIGITS, batch_sampler=sampler)))
        model(PIXELS[:4]).sum().backward()  # for a loop that evaluates
        optimizer.zero_grad()
        for pixels, *_ in DataLoader(DIGITS, batch_sampler=sampler):
            model(pixels).sum().backward()

    return train(state), [parameter.detach() for parameter in model.parameters()], attempt(without_weights)


@pytest.mark.takes_2_12
@pytest.mark.parametrize("shard", [False, True])
def test_without_a_driver_a_job_that_is_told_to_end_goes_on_when_started_again(shard: bool, tmp_path: Path) -> None:
    run_ranks(_train_alone, 2, tmp_path, True, shard, expect_exit={0: 143, 1: 143})
    for first, parameters, said in run_ranks(_train_alone, 3, tmp_path, False, not shard):
        assert first == 13  # the signal came before the step was over
        assert said.startswith("GradientError: a backward() in a loop over a torchring.data.Sampler was not weighed.")
        for found, wanted in zip(parameters, expected(_NUM_STEPS, 64, accumulate=2)[0], strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)


def _train_badly() -> None:
    """What a script may do wrong before `run`, and the wrong State."""
    model, other = make_model(), make_model()
    optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=LR), model)
    unlisted = torchring.wrap(torch.optim.SGD(other.parameters(), lr=LR), other)
    model[0].weight.grad = torch.ones_like(model[0].weight)
    calls = [lambda: torchring.all_reduce(torch.zeros(1)), optimizer.step, lambda: torchring.init(process_group=True)]
    note(wrong=[attempt(call) for call in calls], ranks=[torchring.rank(), torchring.size()])

    @torchring.elastic.run
    def train(state: Any) -> None:
        model(PIXELS[:4]).sum().backward()
        other(PIXELS[:4]).sum().backward()

    try:
        train(torchring.elastic.State(model=model, optimizer=optimizer))
    except ValueError as error:
        note(error=str(error))
        unlisted.close()
        raise


def test_mistakes_before_run_are_errors() -> None:
    with ElasticJob(_train_badly, 2) as job:
        assert job.run() == 1
        noted = job.notes("wrong")
        assert sorted(each["ranks"] for each in noted) == [[0, 2], [1, 2]]
        for each in noted:
            assert all(said.startswith("TopologyError: ") for said in each["wrong"])
            assert "inside the function that torchring.elastic.run decorates" in each["wrong"][0]
        assert job.notes("error")
        assert all("pass it to torchring.elastic.State" in each["error"] for each in job.notes("error"))


def _make_with_batch_norm() -> torch.nn.Module:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(64, 24), torch.nn.BatchNorm1d(24), torch.nn.Linear(24, 10)).double()


def _note_resize(old: int, new: int) -> None:
    note(old=old, new=new, rank=torchring.rank())


def test_buffers_are_equal_callbacks_are_called_and_a_job_without_a_driver_saves(tmp_path: Path) -> None:
    options = {"make": _make_with_batch_norm, "on_resize": _note_resize}
    hosts = Slots(["a"], 3)
    with ElasticJob(functools.partial(train_worker, checkpoint=tmp_path, **options), 3, hosts=hosts) as job:
        job.run_until(lambda: job.last_step() > 20, "20 steps")
        hosts.offer({"a": 2})
        job.run_until(lambda: len(job.notes("old")) == 2, "callbacks")
        hosts.offer({"a": 3})
        job.run_until(lambda: len(job.notes("old")) == 5, "callbacks on three")
        resized = [(each["old"], each["new"]) for each in job.notes("old")]
        assert resized == [(3, 2)] * 2 + [(2, 3)] * 3  # the new one, too
        lose_driver(job, tmp_path)
        by_step: dict[tuple[int, int], set[int]] = {}
        for each in job.notes("step"):
            by_step.setdefault((each["generation"], each["step"]), set()).add(each["crc"])
        assert all(len(crcs) == 1 for crcs in by_step.values())
