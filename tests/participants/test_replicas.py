"""When replicas are compared, what is watched, how an alarm is followed up. For what is found: test_mistakes.py."""

from __future__ import annotations

import itertools
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import torchring
from tests.support.harness import ranks
from tests.support.training import attempt
from torchring.gradients.reduction import Reduction, Said
from torchring.gradients.views import CAN_SWAP
from torchring.participants import replicas


class CountingCheck(replicas.ReplicaCheck):
    """Of parameters in this process; comparisons are counted instead of made."""

    def __init__(self, num_parameters: int) -> None:
        self.parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(num_parameters)]
        names, sgd = {p: f"p{i}" for i, p in enumerate(self.parameters)}, torch.optim.SGD(self.parameters)
        super().__init__(None, SimpleNamespace(world=None, names=names, optimizer=sgd, model=None, is_sharded=False))  # type: ignore[arg-type]
        self.num_checks = 0

    def compare(self) -> None:
        self.num_checks += 1

    def write(self, *indices: int) -> None:
        with torch.no_grad():
            for index in indices:
                self.parameters[index].add_(1)


def finish_reduction(check: replicas.ReplicaCheck, number: int = 0, *, alarmed: bool = False) -> None:
    check.on_reduced(Reduction(number, said=Said({"parameters_changed": [alarmed]})))


def step(check: CountingCheck) -> None:
    """What DistributedOptimizer.step() does: it asks, writes to all parameters, and accepts. That is no change."""
    check.has_changed()
    check.write(*range(len(check.parameters)))
    check.accept()


def test_a_change_is_remembered_until_all_ranks_were_told() -> None:
    """Between the reduction that could not tell and the next one lies a step, which accepts what parameters are."""
    check = CountingCheck(3)
    check.write(0)
    assert not check.has_changed()  # nothing is watched before the first step: the first reduction compares anyway
    for _ in range(4):
        step(check)
        assert not check.has_changed()
    finish_reduction(check, alarmed=True)  # of another rank
    assert not check.has_changed()
    check.write(1)
    step(check)
    assert check.has_changed()
    finish_reduction(check)  # a reduction whose message was sent before
    assert check.has_changed()
    finish_reduction(check, alarmed=True)
    assert not check.has_changed()
    for _ in range(2):
        check.write(1)
        assert check.has_changed()
        finish_reduction(check, alarmed=True)
        assert not check.has_changed()


def test_of_many_parameters_some_are_watched_all_over_the_model() -> None:
    for count in (1, replicas._WATCHED, replicas._WATCHED + 1, 100, 2 * replicas._WATCHED, 1000):
        check = CountingCheck(count)
        check.accept()
        place = {id(parameter): i for i, parameter in enumerate(check.parameters)}
        watched = [place[id(parameter)] for parameter, _ in check._watched]
        assert 0 < len(watched) <= replicas._WATCHED
        gaps = [b - a for a, b in itertools.pairwise([*watched, count])]
        assert max(gaps) <= 1 + count // replicas._WATCHED
        for index in range(count):
            check._changed = False
            check.write(index)
            assert check.has_changed() is (index in watched)
            check._watched = [(p, p._version) for p, _ in check._watched]


def test_alarms_are_followed_up_ever_more_rarely_and_the_rhythm_goes_on() -> None:
    check = CountingCheck(1)
    due = []
    for turn in range(2 * replicas.STEPS_BETWEEN_CHECKS + 1):
        before = check.num_checks
        finish_reduction(check, turn, alarmed=turn > 0)
        if check.num_checks > before:
            due.append(turn)
    assert due == [0, 1, 2, 4, 8, 16, 32, 64, 100, 128, 200]
    check = CountingCheck(1)
    for number in range(2 * replicas.STEPS_BETWEEN_CHECKS + 1):
        finish_reduction(check, number)
    assert check.num_checks == 3  # without alarms


class _OfItsOwn(torch.optim.SGD):
    """Keeps whatever it likes where others have a dict with a number of steps, from the first step on."""

    def step(self, closure: Any = None) -> None:
        for i, p in enumerate(self.param_groups[0]["params"]):
            self.state[p] = {"step": [1, 2]} if i else torch.ones_like(p)


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("lr", "lr of param_groups.0. is 0.2 on rank 1, 0.1 on rank 0, so the next step"),
        ("weight_decay", "weight_decay of param_groups.0. is 0.1 on rank 1, 0.0 on rank 0"),
        ("state", "(?s)step of param_groups.0. is 0.0 on rank 1, 1.0 on rank 0.*broadcast_optimizer_state"),
        *((harmless, "^$") for harmless in ("name", "shard", "schedule", "of its own")),
    ],
)
@ranks(2)
def test_optimizers_that_would_step_in_another_way_are_refused(
    case: str, said: str, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "STEPS_BETWEEN_CHECKS", 1)
    model = torch.nn.Linear(3, 2)
    plain = (_OfItsOwn if case == "of its own" else torch.optim.AdamW)(model.parameters(), lr=0.1)
    optimizer = torchring.wrap(plain, model, shard=CAN_SWAP and case == "shard")
    if case == "state" and rank == 0:
        trained = torch.optim.AdamW(other := [p.detach().clone() for p in model.parameters()])
        for p in other:
            p.grad = torch.ones_like(p)
        trained.step()
        optimizer.load_state_dict(trained.state_dict() | {"param_groups": plain.state_dict()["param_groups"]})
    optimizer.param_groups[0] |= {
        "lr": {"lr": 0.1 + 0.1 * rank},
        "weight_decay": {"weight_decay": 0.1 * rank},
        "name": {"name": f"of rank {rank}"},
        "schedule": {"lr": torch.tensor(0.1)},
    }.get(case, {})
    found = attempt(lambda: model(torch.ones(1, 3)).sum().backward())
    assert re.search(said, found.removeprefix("GradientError: ")), found
    if not found:
        optimizer.step()
        model(torch.ones(1, 3)).sum().backward()
