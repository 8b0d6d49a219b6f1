"""A rank that dies costs its inner steps only."""

import zlib
from typing import Any

import torch

import torchring
from tests.local_steps.test_local_sgd import loss_of, make_model
from tests.support.elastic_job import ElasticJob, is_last, note
from torchring.elastic.worker import worker as workers

EVERY = 5


def crc(tensors: Any) -> int:
    return zlib.crc32(b"".join(tensor.detach().numpy().tobytes() for tensor in tensors))


def train_worker() -> None:
    model = make_model()
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer = torchring.DiLoCo(inner, model, every=EVERY, fragments=2, bits=4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, gamma=0.99)
    state = torchring.elastic.State(model=model, optimizer=optimizer, scheduler=scheduler, step=0)

    @torchring.elastic.run
    def train(state: Any) -> None:
        where = {"generation": workers._the_worker.generation, "worker": workers._the_worker.number}
        outer = optimizer.state_dict()["local_steps"]
        crcs = {"outer": crc(outer["parameters"]), "local": crc(model.parameters())}
        note(enters=state.step, made=[made for made, _ in outer["fragments"]], **crcs, **where)
        while not is_last(state.step):
            optimizer.zero_grad()
            loss_of(model, where["worker"], state.step).backward()
            optimizer.step()
            scheduler.step()
            state.step += 1
            outer = optimizer.state_dict()["local_steps"]
            note(step=state.step, outer=crc(outer["parameters"]), local=crc(model.parameters()), **where)

    train(state)


def test_survivors_keep_their_inner_steps_and_a_new_rank_begins_from_the_outer_state() -> None:
    with ElasticJob(train_worker, 3) as job:
        job.run_until(lambda: job.last_step() > 20, "20 steps")
        lost = job.workers[1]
        job.send(lost)
        job.run_until(lambda: lost not in job.workers and len(job.workers) == 3, "a replacement")
        generation = job.generation
        job.run_until(lambda: any(n["generation"] == generation for n in job.notes("step")), "its first step")
        num_steps = job.stop(50)
        assert job.run() == 0
        steps, entries = job.notes("step"), job.notes("enters")
    assert max(each["step"] for each in steps) == num_steps
    at: dict[Any, list[Any]] = {}
    for each in steps:
        at.setdefault((each["generation"], each["step"]), []).append(each)
    assert all(len({each["outer"] for each in notes}) == 1 for notes in at.values())
    assert any(len({each["local"] for each in notes}) > 1 for notes in at.values())  # ranks do step alone
    after = [each for each in entries if each["generation"] == generation]
    assert len(after) == 3
    assert len({each["outer"] for each in after}) == 1
    new = max(after, key=lambda each: int(each["worker"]))
    assert new["made"] == [0, 0]
    assert new["local"] == new["outer"]
    before = [each for each in after if each is not new]
    assert after[0]["enters"] > 15
    assert all(max(each["made"]) > 0 and each["local"] != each["outer"] for each in before)
