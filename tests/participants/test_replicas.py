"""Replicas that become different: what is watched, when replicas are compared, who is named.

For what changes them, and what optimizers must have in common, see optimizer/test_mistakes.py.
"""

import contextlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, Final
from unittest import mock

import pytest
import torch

import torchring
from tests.support.checks import assert_same_everywhere, digest, logged
from tests.support.harness import ranks
from tests.support.training import TINY_MB, Side, attempt, loss_on, momentum, small_model, train
from torchring.errors import GradientError
from torchring.participants import replicas


def test_of_many_parameters_some_are_watched_all_over_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "_WATCHED", 8)
    for count in (1, 8, 9, 16, 100):
        parameters = [torch.nn.Parameter(torch.zeros(1)) for _ in range(count)]
        names, sgd = {p: f"p{i}" for i, p in enumerate(parameters)}, torch.optim.SGD(parameters)
        setup: Any = SimpleNamespace(world=None, names=names, optimizer=sgd, model=None, is_sharded=False)
        watched = []
        for index, parameter in enumerate(parameters):
            check = replicas.ReplicaCheck(None, setup)  # type: ignore[arg-type]
            check.accept()
            with torch.no_grad():
                parameter.add_(1)
            if check.has_changed():
                watched.append(index)
        assert 0 < len(watched) <= 8
        assert max(b - a for a, b in itertools.pairwise([*watched, count])) <= 1 + count // 8


# A change on one rank


@dataclass
class Watched:
    """A training, and what one rank does to it."""

    model: Any
    train_step: Callable[[int], object]
    change: Callable[[], object]
    name: str = "2.bias"  # of the parameter that is named; "": whichever
    latest: int = 1  # so many steps later, it is found


@torch.no_grad()
def _add(parameter: torch.Tensor, value: float = 1e-6) -> None:
    parameter.view(-1)[1] += value


def _watched(
    change: Callable[[Any, Any], object] = lambda model, it: _add(model[2].bias),
    name: str = "2.bias",
    latest: int = 1,
    *,
    is_between: bool = False,
    clips: bool = False,
) -> Callable[..., Watched]:
    """An ordinary training. is_between: the change comes between backward and step, where the alarm can travel with the
    next backward only. clips: all ranks change everything in every step, too.
    """

    def make(rank: int, options: dict[str, Any]) -> Watched:
        model = small_model()
        model[0].requires_grad_(name != "0.weight")
        optimizer = torchring.wrap(momentum(model), model, bucket_mb=TINY_MB, **options)
        changes: list[None] = []

        def before_step(step: int) -> None:
            while changes:
                change(model, optimizer)
                changes.pop()

        def train_step(step: int) -> None:
            train(Side((rank,), True), model, optimizer, [step], before_step=before_step)
            with torch.no_grad():
                for parameter in model.parameters() if clips else ():
                    parameter.mul_(0.99)

        def change_now() -> None:
            changes.append(None)
            if not is_between:
                before_step(0)

        return Watched(model, train_step, change_now, name, latest)

    return make


def _with_a_closure(rank: int, options: dict[str, Any], by_hand: bool = False) -> Watched:
    """Which evaluates the model itself. by_hand: no backward reduces, as with zero-bubble schedules."""
    model = small_model()
    optimizer = torchring.wrap(momentum(model), model, **options)

    def train_step(step: int) -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_on(model, rank, step)
            with optimizer.no_sync() if by_hand else contextlib.nullcontext():
                loss.backward()
            if by_hand:
                optimizer.synchronize()
            return loss

        optimizer.step(closure)

    return Watched(model, train_step, lambda: _add(model[2].bias))


def _all_sparse(rank: int, options: dict[str, Any]) -> Watched:
    """No bucket that the alarm could travel with."""
    table = torch.nn.Embedding(5, 3, sparse=True)
    optimizer = torchring.wrap(torch.optim.SGD(table.parameters(), lr=0.5), table, **options)

    def loss(rank: int, step: int) -> torch.Tensor:
        return table(torch.tensor([0, 1])).sum()

    side = Side((rank,), True)
    return Watched(table, lambda at: train(side, table, optimizer, [at], loss), lambda: _add(table.weight), "weight")


_RHYTHM: Final = 12
CHANGES: Final[dict[str, Callable[[int, dict[str, Any]], Watched]]] = {
    "in place": _watched(latest=0),
    "load_state_dict": _watched(
        lambda model, it: model.load_state_dict({**model.state_dict(), "2.bias": torch.ones(3)}), latest=0
    ),
    "data": _watched(lambda model, it: _add(model[2].bias.data), latest=_RHYTHM),
    "data, another tensor": _watched(
        lambda model, it: setattr(model[2].bias, "data", model[2].bias.data + 1e-6), latest=_RHYTHM
    ),
    "a learning rate": _watched(lambda model, it: it.param_groups[0].update(lr=0.15), "", _RHYTHM),
    "optimizer state": _watched(lambda model, it: it.state[model[2].bias]["momentum_buffer"].add_(1e-3), "", _RHYTHM),
    "frozen": _watched(lambda model, it: _add(model[0].weight), "0.weight", _RHYTHM),
    "between backward and step": _watched(is_between=True),
    "with a closure": _with_a_closure,
    "by synchronize()": partial(_with_a_closure, by_hand=True),
    "all sparse": _all_sparse,
    "among the same changes": _watched(latest=_RHYTHM, clips=True),
}


@pytest.mark.parametrize(("world_size", "culprit", "options"), [(2, 1, {}), (2, 0, {}), (3, 2, {"overlap": "thread"})])
@ranks()
def test_a_change_on_one_rank_is_found_by_all_in_the_same_step(
    world_size: int, culprit: int, options: dict[str, Any], rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And before anything is stepped. Rank 0 is the standard: with two ranks nobody can tell whose fault it is."""
    monkeypatch.setattr(replicas, "STEPS_BETWEEN_CHECKS", _RHYTHM)
    named = (culprit,) if culprit else tuple(range(1, world_size))
    for case, make in CHANGES.items():
        print(case)  # the last one in the output is the one that failed
        watched = make(rank, options)
        error = None
        for step in range(30):
            if step == 3 and rank == culprit:
                watched.change()
            before = digest(watched.model.parameters())
            try:
                watched.train_step(step)
            except GradientError as raised:
                error = raised
                break
        assert error is not None
        assert torchring.all_gather_object(step) == [step] * world_size
        assert 3 <= step <= 3 + watched.latest
        assert digest(watched.model.parameters()) == before or case == "between backward and step"
        assert (error.peers, error.rank) == (named, rank)
        name = watched.name or error.parameters[0]
        assert watched.name in ("", *error.parameters)
        assert str(error).startswith(f"{name} is not the same on all ranks: rank")
        assert ("broadcast_parameters" in str(error)) == (case != "a learning rate")
        torchring.shutdown()


@ranks(2)
def test_replicas_that_differ_from_the_beginning(rank: int) -> None:
    for is_synchronized, name in ((True, "0.bias"), (False, "0.weight")):
        model = small_model(seed=rank)
        optimizer = torchring.wrap(momentum(model), model, sync_initial_state=is_synchronized)
        if is_synchronized and rank == 1:
            model[0].bias.data += 1
        problem = attempt(lambda model=model, it=optimizer: train(Side((rank,), True), model, it, [0]))
        assert problem.startswith(f"GradientError: {name} is not the same on all ranks: rank 1 differ")
        optimizer.close()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [((), [0, 2, 5, 10]), ((3,), [0, 2, 3, 5, 10]), (range(2, 12), [0, 2, 3, 5, 9, 10])],
    ids=["none", "one", "always"],
)
@ranks(2)
def test_replicas_are_compared_by_a_rhythm_and_after_changes_ever_more_rarely(
    changes: Sequence[int], expected: list[int], rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that all ranks leave out are no reason: a GradScaler does, and a script that accumulates."""
    checks: list[int] = []
    monkeypatch.setattr(replicas, "STEPS_BETWEEN_CHECKS", 5)
    monkeypatch.setattr(replicas.ReplicaCheck, "compare", lambda self: checks.append(step))
    model = small_model()
    optimizer = torchring.wrap(momentum(model), model)
    for step in range(12):
        optimizer.zero_grad()
        if step in changes:
            with torch.no_grad():
                model[0].weight.mul_(1.0)
        loss_on(model, rank, step).backward()
        if step % 3:
            optimizer.step()
    assert checks == expected
    assert_same_everywhere(model.parameters())


@ranks(2)
def test_machines_of_two_kinds_may_differ_by_rounding(rank: int) -> None:
    """On rank 1 the last bits differ, and in the end a number does."""
    platform = {"architecture": "x86_64", "torch": ["2.13.0", "2.12.1"][rank]}
    with (
        mock.patch.object(replicas, "_platform", return_value=platform),
        mock.patch.object(replicas, "STEPS_BETWEEN_CHECKS", 4),
        logged() as texts,
    ):
        model = small_model(torch.float32)
        optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.5), model)
        for step in range(8):
            train(Side((rank,), True), model, optimizer, [step])
            if rank == 1:
                for parameter in model.parameters():
                    parameter.data.mul_(1 + 2**-22)
        train(Side((rank,), True), model, optimizer, [8])
        assert_same_everywhere(model.parameters())
        if rank == 1:
            model[2].weight.data[1, 3] += 2**-8
        with pytest.raises(GradientError) as caught:
            train(Side((rank,), True), model, optimizer, range(8))
    assert (caught.value.parameters, caught.value.peers) == (("2.weight",), (1,))
    differ = "torch is 2.12.1 on rank 1, 2.13.0 on rank 0"
    assert str(caught.value).partition(" [")[0].endswith(differ)
    assert len(texts) == (rank == 0)
    assert all(text.startswith(f"the ranks do not compute alike: {differ}.") for text in texts)


@pytest.mark.parametrize(("world_size", "culprits"), [(2, (0, 1)), (3, (0, 2))])
@ranks()
def test_one_step_more_is_found_in_the_next_backward(world_size: int, culprits: tuple[int, ...], rank: int) -> None:
    for culprit, odd in itertools.product(culprits, (3, 5)):
        model = small_model()
        optimizer = torchring.wrap(momentum(model), model)
        train(Side((rank,), True), model, optimizer, range(3))
        optimizer.zero_grad()
        loss_on(model, rank, 3).backward()
        for _ in range(odd - 3 if rank == culprit else 1):
            optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(GradientError) as caught:
            loss_on(model, rank, 4).backward()
        named = (culprit,) if culprit else tuple(range(1, world_size))  # rank 0 is what the others are compared with
        steps, other = (odd, 4) if culprit == 0 else (4, odd), culprit or 1
        told = f"rank 0 has called optimizer.step() {steps[0]} times, rank {other} {steps[1]} times"
        assert caught.value.peers == named
        assert f"In 5 reductions {told}" in str(caught.value)
        assert "inside optimizer.no_sync()" in str(caught.value)
        optimizer.close()
