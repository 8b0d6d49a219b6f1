"""A rank that dies costs its inner steps only, and what compression between hosts had kept on it."""

import zlib
from typing import Any

import torch

import torchring
from tests.local_steps.test_local_sgd import loss_of, make_model
from tests.support.elastic_job import ElasticJob, Slots, is_last, note
from torchring.elastic.worker import worker as workers
from torchring.memory import host as host_module

EVERY = 5


def crc(tensors: Any) -> int:
    return zlib.crc32(b"".join(tensor.detach().numpy().tobytes() for tensor in tensors))


def enter(host: str) -> None:
    """Be on this host, as other ranks see it."""
    host_module._host_identity = lambda: host


def train_worker() -> None:
    """With local steps, and another model whose gradients are compressed between hosts."""
    model, other = make_model(), make_model(torch.float32)
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    optimizer = torchring.DiLoCo(inner, model, every=EVERY, fragments=2, bits=4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 10, gamma=0.99)
    sgd = torch.optim.SGD(other.parameters(), lr=0.05, momentum=0.9)
    wrapped = torchring.wrap(sgd, other, compression="int8", bucket_mb=1e-3)
    parts = {"model": model, "other": other, "optimizer": optimizer, "wrapped": wrapped, "scheduler": scheduler}
    state = torchring.elastic.State(**parts, step=0)

    @torchring.elastic.run
    def train(state: Any) -> None:
        where = {"generation": workers._the_worker.generation, "worker": workers._the_worker.number}
        outer = optimizer.state_dict()["local_steps"]
        crcs = {"outer": crc(outer["parameters"]), "local": crc(model.parameters())}
        kept = sum(float(each.norm()) for each in torchring.compression.state_dict(wrapped).values())
        note(enters=state.step, made=[made for made, _ in outer["fragments"]], kept=kept, **crcs, **where)
        while not is_last(state.step):
            optimizer.zero_grad()
            loss_of(model, where["worker"], state.step).backward()
            optimizer.step()
            wrapped.zero_grad()
            (loss := loss_of(other, where["worker"], state.step)).backward()
            wrapped.step()
            scheduler.step()
            state.step += 1
            outer = optimizer.state_dict()["local_steps"]
            where |= {"other": crc(other.parameters()), "loss": loss.item(), "error": wrapped.stats().compression_error}
            note(step=state.step, outer=crc(outer["parameters"]), local=crc(model.parameters()), **where)

    train(state)


def test_survivors_keep_their_inner_steps_and_a_new_rank_begins_from_the_outer_state() -> None:
    with ElasticJob(train_worker, 3, hosts=Slots(["a", "b"]), enter_host=enter) as job:
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
    assert all(len({each[what] for each in notes}) == 1 for notes in at.values() for what in ("outer", "other"))
    assert {bool(each["kept"]) for each in entries if each["generation"] > 1} == {True}  # the survivors' part
    assert steps[-1]["error"]["matrix"] > 0
    assert steps[-1]["loss"] < 0.2 * steps[0]["loss"]
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
