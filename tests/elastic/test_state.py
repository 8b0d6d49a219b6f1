"""What a State accepts, and what it says about the rest; and that after `commit()` an exception at any point of an
iteration is as if nothing had been."""

import itertools
import logging
import re
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import torchring
from tests.elastic.test_elastic import _once
from tests.support.elastic_job import ElasticJob, note
from torchring.elastic.worker.membership import MembershipChange
from torchring.elastic.worker.state import GenerationOver
from torchring.world import World


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    yield
    torchring.shutdown()


def parts(width: int = 3, kind: Any = torch.optim.SGD) -> dict[str, Any]:
    model = torch.nn.Linear(2, width)
    return {"model": model, "optimizer": torchring.wrap(kind(model.parameters(), lr=0.1), model)}


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"optimizer": lambda: torch.optim.SGD([torch.nn.Parameter()], lr=0.1)}, TypeError, r"torchring\.wrap"),
        ({"sampler": torchring.elastic.Sampler(range(4))}, ValueError, "the DataLoader makes the batches"),
        ({"lock": threading.Lock()}, TypeError, r"lock.* of type lock,"),
        ({"global_batch": 4}, ValueError, r"takes no global_batch: use DataLoader\(data, batch_sampler=Sampler"),
        ({"every": 0}, ValueError, "every must be a number of steps, 1 or more, or a positive timedelta, got 0"),
        ({"every": timedelta()}, ValueError, "every must be"),
        ({"commit": 1}, ValueError, "a State has something else under the name 'commit'"),
        ({"_private": 1}, ValueError, "_private"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], kind: type[Exception], text: str) -> None:
    assert torchring.elastic.Sampler is torchring.data.Sampler
    given = {name: value() if callable(value) else value for name, value in options.items()}
    with pytest.raises(kind, match=text):
        torchring.elastic.State(**{**parts(), **given})
    with pytest.raises(ValueError, match="optimizer is LBFGS, which changes parameters several times in a step"):
        torchring.elastic.State(**parts(kind=torch.optim.LBFGS))
    with pytest.raises(TypeError, match=r"must be a torchring\.elastic\.State, got dict"):
        torchring.elastic.run(lambda state: None)({})


def entered(state: Any) -> World:
    """A world of one, in which the state trains."""
    world = torchring.init()
    state._enter(world, None, has_failed=False)
    return world


def test_a_world_of_one_is_left_before_a_step() -> None:
    state = torchring.elastic.State(**parts())
    model, optimizer, world = state.model, state.optimizer, entered(state)
    before = model.weight.detach().clone()
    world.shared(MembershipChange).is_wanted = True
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(GenerationOver):
        optimizer.step()
    assert torch.equal(model.weight, before)
    entered(state).shared(MembershipChange).is_wanted = False

    def closure() -> torch.Tensor:
        world.shared(MembershipChange).is_wanted = True
        loss = model(torch.ones(1, 2)).sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    with pytest.raises(GenerationOver):
        optimizer.step(closure)


@pytest.mark.parametrize("makes_step", [False, True])
def test_after_the_last_commit_of_an_epoch_it_is_not_trained_again(makes_step: bool) -> None:
    """An exception comes at the first batch of the next epoch, or after its step, which is not committed."""
    data = TensorDataset(torch.ones(4, 2))
    sampler = torchring.elastic.Sampler(data, batch_size=2)
    state = torchring.elastic.State(**parts(), sampler=sampler, epoch=0)
    entered(state)

    def train(num_steps: int) -> None:
        sampler.set_epoch(state.epoch)
        for (x,) in itertools.islice(DataLoader(data, batch_sampler=sampler), num_steps):
            state.optimizer.weigh(sampler.weight())
            state.model(x).sum().backward()
            state.optimizer.step()
            state.optimizer.zero_grad()

    train(2)
    state.commit()
    state.epoch = 1
    train(int(makes_step))
    state._return_to_commit()
    assert (state.epoch, sampler.position) == (0, 4)
    sampler.set_epoch(0)
    assert list(sampler) == []


def test_a_checkpoint_is_named_and_another_models_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def train(width: int, num_steps: int) -> int:
        @torchring.elastic.run
        def body(state: Any) -> int:
            first = state.step
            for state.step in range(state.step, num_steps):  # noqa: B020
                state.model(torch.ones(1, 2)).sum().backward()
                state.optimizer.step()
            return first

        return body(torchring.elastic.State(**parts(width), step=0, checkpoint=tmp_path, every=1))

    assert train(3, 5) == 0
    assert not caplog.records
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"is of another model or State: it has model.weight"):
        train(4, 5)
    assert sorted(tmp_path.iterdir()) == before
    assert train(3, 9) == 4
    (told,) = (record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING)
    assert re.fullmatch(rf"training goes on from the checkpoint of step 5 in {tmp_path}, which is 0:[\d:]+ old", told)


# ---- commits, in jobs

_NOT_FINITE = "not finite"  # which a rank that is alone does not look for
_POINTS = ["iteration", "forward", "backward", _NOT_FINITE]
_POINTS += ["half a step", "after step", "before commit", "after commit"]
_NUM_STEPS = 3 * len(_POINTS)  # at each point, one rank raises, then the other, then both
_SAMPLES = torch.randn(4 * _NUM_STEPS, 4, generator=torch.Generator().manual_seed(1)).double()


def _reach(point: str, step: int) -> None:
    if _is_at(point, step):
        raise MemoryError("injected")


def _is_at(point: str, step: int) -> bool:
    """Whether this rank has come to the point for the first time in a step in which it is to raise there."""
    turn, index = divmod(step, len(_POINTS))
    if _POINTS[index] != point or turn not in (torchring.rank(), 2):
        return False
    if is_first := _once(f"step {step} rank {torchring.rank()}"):
        note(raises=point, step=step)
    return is_first


class _Model(torch.nn.Sequential):
    """Counts forwards in a buffer that no state_dict has."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        self.register_buffer("seen", torch.tensor(0), persistent=False)
        self.double()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return super().forward(inputs)


class _Momentum(torch.optim.SGD):
    """Steps group after group, as optimizers do that lack memory for the next one."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__([{"params": list(each.parameters())} for each in (model[0], model[2])], lr=0.05, momentum=0.9)

    def step(self, closure: Any = None) -> None:
        groups, number = self.param_groups, self.param_groups[0].setdefault("number", 0)
        try:
            for self.param_groups in ([group] for group in groups):
                super().step()
                _reach("half a step", number)
        finally:
            self.param_groups = groups
        groups[0]["number"] += 1


class _Metric:
    def __init__(self) -> None:
        self.values: list[float] = []

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.values = state_dict["values"]


def _train(is_wrapped: bool) -> list[Any]:
    torch.set_num_threads(1)
    model, metric = _Model(), _Metric()
    optimizer: Any = _Momentum(model)
    if is_wrapped:
        optimizer = torchring.wrap(optimizer, model)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.9)
    data = TensorDataset(_SAMPLES)
    if not is_wrapped:
        state: Any = type("Plain", (), {"step": 0, "sum": torch.zeros(()), "commit": lambda self: None})()
    else:
        sampler = torchring.elastic.Sampler(data, shuffle=False, global_batch=4)
        state = torchring.elastic.State(
            **{"model": model, "optimizer": optimizer, "sampler": sampler, "scheduler": scheduler, "metric": metric},
            **{"step": 0, "sum": torch.zeros(())},
        )

    def train(state: Any) -> None:
        if is_wrapped:
            note(enters=state.step)
        state.commit()
        loader = DataLoader(data, batch_sampler=sampler) if is_wrapped else DataLoader(data, 4)
        for (inputs,) in loader:
            step = state.step
            metric.values.append(float(step))
            state.sum += step
            for group in optimizer.param_groups:
                group["lr"] *= 0.99
            if step:
                scheduler.step()
            _reach("iteration", step)
            optimizer.zero_grad()
            if is_wrapped:
                optimizer.weigh(sampler.weight())
            loss = model(inputs).square().mean()
            _reach("forward", step)
            loss.register_hook(lambda _, step=step: _reach("backward", step))
            (loss * float("nan") if torchring.size() > 1 and _is_at(_NOT_FINITE, step) else loss).backward()
            optimizer.step()
            _reach("after step", step)
            if is_wrapped and step // len(_POINTS) % 2:  # then the others have made the step that one rank has not
                torchring.all_reduce(loss.detach())
            state.step += 1
            _reach("before commit", step)
            state.commit()
            _reach("after commit", step)

    (torchring.elastic.run(train) if is_wrapped else train)(state)
    result = [model.seen, state.step, state.sum, metric.values, *scheduler.get_last_lr(), *model.state_dict().values()]
    result += [entry["momentum_buffer"] for entry in optimizer.state.values()]
    return [torch.as_tensor(value).tolist() for value in result]


def _work() -> None:
    note(result=_train(True))


@pytest.mark.parametrize("size", [1, 2])
def test_after_an_exception_anywhere_all_is_as_if_nothing_had_been(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with ElasticJob(_work, size) as job:
        assert job.run(120) == 0
        assert {each["raises"] for each in job.notes("raises")} == {*_POINTS} - ({_NOT_FINITE} if size == 1 else set())
        entered = {each["enters"] for each in job.notes("enters")}
        # The last commit, each time; another rank may have made one more.
        assert all(entered & {each["step"], each["step"] + 1} for each in job.notes("raises"))
        results = [each["result"] for each in job.notes("result")]
        assert len(results) == len(job.pids) == size  # nobody was replaced
    monkeypatch.setattr(f"{__name__}._is_at", lambda *_: False)
    right = _train(False)
    for result in results:
        for found, wanted in zip(result, right, strict=True):
            torch.testing.assert_close(torch.tensor(found), torch.tensor(wanted), rtol=1e-6, atol=1e-9)
