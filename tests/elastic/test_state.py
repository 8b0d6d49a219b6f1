"""What a State accepts, and what it says about the rest: in this process, alone."""

from __future__ import annotations

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

import torchring
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
    data = torch.utils.data.TensorDataset(torch.ones(4, 2))
    sampler = torchring.elastic.Sampler(data, batch_size=2)
    state = torchring.elastic.State(**parts(), sampler=sampler, epoch=0)
    entered(state)

    def train(num_steps: int) -> None:
        sampler.set_epoch(state.epoch)
        for (x,) in itertools.islice(torch.utils.data.DataLoader(data, batch_sampler=sampler), num_steps):
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


def test_a_checkpoint_is_named_and_one_of_another_model_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
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
    assert re.fullmatch(
        rf"training goes on from the checkpoint of step 5 in {tmp_path}, which is 0:\d\d:\d\d old", told
    )
