"""What a State accepts, and what it says about the rest: in this process, alone."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

import torchring


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    yield
    torchring.shutdown()


def parts(width: int = 3) -> dict[str, Any]:
    model = torch.nn.Linear(2, width)
    return {"model": model, "optimizer": torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)}


def test_a_state_needs_an_optimizer_from_wrap() -> None:
    model = torch.nn.Linear(2, 3)
    with pytest.raises(TypeError, match=r"torchring\.wrap"):
        torchring.elastic.State(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_value_that_cannot_be_sent_is_named() -> None:
    with pytest.raises(TypeError, match=r"lock.* of type lock,"):
        torchring.elastic.State(**parts(), lock=threading.Lock())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"global_batch": 0}, "global_batch must be a number of samples, 1 or more, got 0"),
        ({"every": 0}, "every must be a number of steps, 1 or more, or a positive timedelta, got 0"),
        ({"every": timedelta()}, "every must be"),
        ({"commit": 1}, "a State has something else under the name 'commit'"),
        ({"_private": 1}, "_private"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        torchring.elastic.State(**parts(), **options)


def test_batch_size_outside_of_the_training_function() -> None:
    with pytest.raises(ValueError, match="in the training function"):
        torchring.elastic.State(**parts(), global_batch=4).batch_size  # noqa: B018


def test_a_model_of_a_state_can_be_copied_and_pickled() -> None:
    given = parts()
    torchring.elastic.State(**given)
    for model in (copy.deepcopy(given["model"]), pickle.loads(pickle.dumps(given["model"]))):
        (hook,) = model._forward_pre_hooks.values()
        assert hook(model, ()) is None
        assert "torchring" not in repr(hook)


def test_run_takes_a_state() -> None:
    with pytest.raises(TypeError, match=r"must be a torchring\.elastic\.State, got dict"):
        torchring.elastic.run(lambda state: None)({})


def test_a_worker_with_another_module_is_refused_by_name() -> None:
    theirs = torchring.elastic.State(**parts())._layout()
    with pytest.raises(
        torchring.PlanMismatchError, match=r"they have model.weight: \(3, 2\).*it has model.weight: \(4, 2\)"
    ):
        torchring.elastic.State(**parts(4))._check_layout(theirs)


def test_a_checkpoint_of_another_model_is_refused_and_kept(tmp_path: Path) -> None:
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
    before = sorted(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"is of another model or State: it has model.weight"):
        train(4, 5)
    assert sorted(tmp_path.iterdir()) == before
    assert train(3, 9) == 4
