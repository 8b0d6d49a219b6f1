"""torchring.horovod.elastic: what a commit keeps, when training starts again, and how samples are shared out."""

import os
import signal
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import torchring.horovod as hvd
from tests.support.checks import assert_same_everywhere
from tests.support.elastic_job import ElasticJob, Slots, is_last, note
from tests.support.harness import ranks
from tests.support.training import values
from torchring.elastic.worker import worker as workers
from torchring.errors import GradientError, PeerLostError, PeerTimeoutError, PlanMismatchError
from torchring.horovod import elastic


def trained(steps: int, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    return values(model)


@ranks(2)
def test_all_ranks_go_on_from_rank_0s_state_and_from_their_last_commit(rank: int) -> None:
    hvd.init()
    torch.manual_seed(rank)
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3).eval())
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    sampler = elastic.ElasticSampler(range(8), shuffle=False)
    sampler.record_batch(0, 1 + rank)
    state = elastic.TorchState(model, optimizer, sampler=sampler, batch=0, losses=[1.0], lines=None, spare=None)
    state.batch, state.losses, state.lines = rank + 3, [rank + 1.0], (line for line in "ab") if rank else None
    state.sync()
    assert (state.batch, state.losses, state.lines) == (3, [1.0], None)  # as rank 0 has not committed it
    assert list(sampler) == [2 + rank, 4 + rank, 6 + rank]
    assert_same_everywhere(values(model))
    state.batch = 7
    state.restore()
    assert state.batch == 3  # sync commits, where Horovod keeps the last commit, beside a model that is ahead of it
    trained(2, model, optimizer)
    state.losses.append(2.0)
    state.lines = (line for line in "ab")  # which cannot be copied, and is kept as it is
    state.commit()
    expected = trained(3, model, optimizer)
    next(state.lines)
    for _ in range(2):  # restoring, and training on, leaves what was saved as it was
        state.losses.append(3.0)
        optimizer.param_groups[0]["lr"] = 7.0
        state.restore()
        assert (state.losses, optimizer.param_groups[0]["lr"]) == ([1.0, 2.0], 0.1)
        assert all(map(torch.equal, trained(3, model, optimizer), expected))
    assert next(state.lines) == "b"
    state.model = replacement = torch.nn.Linear(2, 1)
    expected = values(replacement)
    replacement.weight.data.zero_()
    state.restore()
    assert state.model is replacement
    assert all(map(torch.equal, values(replacement), expected))
    assert state.spare is None
    hvd.shutdown()


class Failing(elastic.State):
    def __init__(self) -> None:
        super().__init__(bcast_object=lambda obj: obj)
        self.done: list[str] = []

    def save(self) -> None:
        self.done.append("save")

    def restore(self) -> None:
        self.done.append("restore")

    def sync(self) -> None:
        self.done.append("sync")


def failure(cause: Exception, **facts: object) -> elastic.HorovodInternalError:
    vars(cause).update(facts)
    error = elastic.HorovodInternalError(str(cause))
    error.__cause__ = cause
    return error


_MISMATCH = failure(PlanMismatchError("other shapes"))
_COMMIT = "a commit, and a mismatch"
_AGAIN = "restore callback sync train"


@pytest.mark.parametrize(
    ("endings", "limit", "done", "said"),
    [
        ([_MISMATCH], None, f"sync train {_AGAIN}", ""),
        ([PlanMismatchError("other gradients")], None, f"sync train {_AGAIN}", ""),
        ([elastic.HostsUpdatedInterrupt(True)], None, "sync train callback train", ""),  # removed hosts: no sync
        ([elastic.HostsUpdatedInterrupt(False)], None, "sync train callback sync train", ""),
        ([failure(PeerLostError("gone"))], None, "sync train", "gone"),
        ([failure(PeerTimeoutError("stuck"))], None, "sync train", "stuck"),
        ([failure(PeerTimeoutError("stuck"), in_step=True)], None, f"sync train {_AGAIN}", ""),  # it is there
        ([failure(GradientError("wrong use"))], None, "sync train", "wrong use"),
        ([KeyError("batch")], None, "sync train", "batch"),
        (
            [_MISMATCH, _COMMIT, _MISMATCH, _MISMATCH], None,
            f"sync train {_AGAIN} save {_AGAIN} {_AGAIN}", "3 times without a commit: other shapes",
        ),
        (
            [elastic.HostsUpdatedInterrupt(False), _MISMATCH, elastic.HostsUpdatedInterrupt(False)], 2,
            f"sync train callback sync train {_AGAIN}", "limit of 2 resets",
        ),
    ],
)  # fmt: skip
def test_what_follows_when_training_ends_early(
    endings: list[Any], limit: int | None, done: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The function is called until it returns, or raises what ends the job."""
    state, left, calls = Failing(), iter(endings), []
    monkeypatch.setattr(hvd, "shutdown", lambda: calls.append("shutdown"))
    monkeypatch.setattr(hvd, "init", lambda: calls.append("init"))
    state.register_reset_callbacks([lambda: state.done.append("callback")])

    @elastic.run(reset_limit=limit)
    def train(state: Failing, *, answer: int) -> int:
        state.done.append("train")
        ending = next(left, None)
        if ending is _COMMIT:
            state.commit()
            ending = _MISMATCH
        if ending is not None:
            raise ending
        return answer

    with pytest.raises((elastic.HorovodInternalError, KeyError), match=said) if said else nullcontext():
        assert train(state, answer=42) == 42
    assert train.__name__ == "train"
    assert " ".join(state.done) == done
    assert calls == ["shutdown", "init"] * state.done.count("callback")


def test_a_limit_below_0_is_refused() -> None:
    with pytest.raises(ValueError, match="-1"):
        elastic.run(reset_limit=-1)


def samplers(monkeypatch: pytest.MonkeyPatch, size: int, **options: Any) -> Iterator[elastic.ElasticSampler]:
    """One for each of `size` ranks; while a rank's is looked at, this process is that rank."""
    monkeypatch.setattr(hvd, "size", lambda: size)
    for rank in range(size):
        monkeypatch.setattr(hvd, "rank", lambda rank=rank: rank)
        yield elastic.ElasticSampler(range(10), **options)


def test_samples_that_are_left_are_shared_out_anew_and_shuffled_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = samplers(monkeypatch, 2, shuffle=False)
    assert [list(first), list(second)] == [[0, 2, 4, 6, 8], [1, 3, 5, 7, 9]]
    first.record_batch(0, 2)
    assert list(first) == [0, 2, 4, 6, 8]  # until the ranks change
    for done, left in (
        (first.state_dict()["processed_num"], [[4, 7], [5, 8], [6, 9]]),
        (9, [[9]] * 3),  # few samples for many ranks are repeated
        (12, [[]] * 3),
    ):
        for sampler, its in zip(samplers(monkeypatch, 3, shuffle=False), left, strict=True):
            sampler.load_state_dict({"epoch": 0, "processed_num": done})
            assert (list(sampler), len(sampler)) == (its, len(its))
    epochs: list[list[int]] = [[], []]
    for sampler in samplers(monkeypatch, 2, seed=3):
        epochs[0] += sampler
        sampler.record_batch(0, 1)
        sampler.set_epoch(1)
        epochs[1] += sampler
    assert [sorted(epoch) for epoch in epochs] == [[*range(10)]] * 2
    assert epochs[0] != epochs[1]


def test_a_sampler_of_a_state_follows_commits_and_resets(monkeypatch: pytest.MonkeyPatch) -> None:
    (sampler,) = samplers(monkeypatch, 1, shuffle=False)
    state = elastic.TorchState(sampler=sampler)
    sampler.record_batch(0, 4)
    state.save()
    sampler.record_batch(1, 4)
    state.restore()
    assert sampler.processed_num == 4
    monkeypatch.setattr(hvd, "size", lambda: 2)
    state.on_reset()  # hosts were removed: no sync
    assert list(sampler) == [4, 6, 8]


@ranks(2)
def test_ranks_go_on_together_after_a_mismatch(rank: int) -> None:
    """The collectives themselves: rank 0's state everywhere, then the last commit's."""
    hvd.init()
    torch.manual_seed(rank)
    model = torch.nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), named_parameters=model.named_parameters()
    )
    sampler = elastic.ElasticSampler(range(8), shuffle=False)
    state = elastic.TorchState(model, optimizer, sampler=sampler, batch=10 * rank)
    starts: list[Any] = []

    @elastic.run
    def train(state: elastic.TorchState) -> None:
        starts.append([state.batch, list(state.sampler)])
        for batch in range(state.batch, 4):
            state.batch = batch
            optimizer.zero_grad()
            model(torch.full((1, 2), float(rank + 1))).sum().backward()
            optimizer.step()
            if state.batch == 1:
                state.sampler.record_batch(0, 2)
                state.commit()
            if state.batch == 2 and len(starts) == 1:
                hvd.allreduce(torch.ones(2 + rank), name="other shapes")

    train(state)
    assert starts == [[0, [rank, rank + 2, rank + 4, rank + 6]], [1, [4 + rank, 6 + rank]]]
    assert_same_everywhere(model.parameters())
    hvd.shutdown()


# Under a driver: ranks are lost, leave, and come
def _work() -> None:
    """Trains until the job is asked to stop. The worker that began as rank 2 is killed once a fourth one has come."""
    hvd.init()
    torch.manual_seed(os.getpid())
    model = torch.nn.Linear(2, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9))
    in_no_state = hvd.DistributedOptimizer(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0))
    syncs = 0

    class State(hvd.elastic.TorchState):
        def sync(self) -> None:
            nonlocal syncs
            syncs += 1
            super().sync()

    state = State(model, optimizer, step=0, tries=0, met=False)
    first_rank = -1

    @hvd.elastic.run
    def train(state: State) -> None:
        nonlocal first_rank
        first_rank = hvd.rank() if first_rank < 0 else first_rank
        note(enters=state.step, rank=hvd.rank(), generation=workers._the_worker.generation)
        while not is_last(state.step):
            assert state.tries == state.step  # what was not committed is undone
            state.met = state.met or bool(hvd.allreduce(torch.tensor(float(hvd.rank() == 3)), op=hvd.Max))
            state.tries += 1
            if first_rank == 2 and state.met and state.step > 1:
                os.kill(os.getpid(), signal.SIGKILL)
            optimizer.zero_grad()
            in_no_state.zero_grad()
            (in_no_state.param_groups[0]["params"][0] * model(torch.full((1, 2), hvd.rank() + 1.0))).sum().backward()
            optimizer.step()
            grads = hvd.allgather(in_no_state.param_groups[0]["params"][0].grad.clone())
            assert torch.equal(grads, grads[:1].expand_as(grads))  # reduced, with the ranks that there are
            state.step += 1
            state.commit()
            note(step=state.step)

    train(state)
    note(result=[parameter.tolist() for parameter in model.parameters()], syncs=syncs)


def test_workers_come_are_killed_and_leave() -> None:
    hosts = Slots(["localhost"], 4)
    with ElasticJob(_work, 3, max_size=4, hosts=hosts) as job:
        job.run_until(lambda: 2 not in job.workers and len(job.workers) == 4, "a replacement of worker 2")
        assert job.workers == (0, 1, 3, 4)
        hosts.offer({"localhost": 3})
        job.run_until(lambda: len(job.workers) == 3, "a generation without the worker of slot 3")
        assert job.workers == (0, 1, 4)
        job.stop()
        assert job.run() == 0
        results, entries = job.notes("result"), job.notes("enters")
    generations: dict[int, list[dict[str, Any]]] = {}
    for entry in entries:
        generations.setdefault(entry["generation"], []).append(entry)
    for entered in generations.values():
        assert sorted(entry["rank"] for entry in entered) == list(range(len(entered)))
        assert len({entry["enters"] for entry in entered}) == 1  # a new worker begins where the others are
    assert all(result["result"] == results[0]["result"] for result in results)
    for result in results:  # none after a worker has left: the others agree
        assert result["syncs"] == sum(entry["pid"] == result["pid"] for entry in entries) - 1
