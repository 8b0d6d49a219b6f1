"""torchring.horovod.elastic under a driver: ranks are lost, leave, and come."""

from __future__ import annotations

import os
import signal
from typing import Any

import torch

from tests.support.elastic_job import ElasticJob, Slots, is_last, note
from torchring.elastic.worker import worker as workers


def _work() -> None:
    """Trains until the job is asked to stop. The worker that began as rank 2 is killed once a fourth one has come."""
    import torchring.horovod as hvd

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
