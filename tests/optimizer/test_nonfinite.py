"""What `on_nonfinite` does about a NaN in a gradient: all ranks alike. What "raise" does: test_silent_desync.py, i."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchring
from tests.optimizer.test_contract import attempt, loss_on, small_model, values
from tests.support.checks import assert_same_on_all_ranks
from tests.support.grids import grid
from tests.support.harness import run_pooled

_POISONED = 1  # the step
_STEPS = 4
_OPTIMIZERS: dict[str, Any] = {
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.05),
    "LBFGS": lambda parameters: torch.optim.LBFGS(parameters, lr=0.1, max_iter=3),
}


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([value.flatten() for value in values(model)])


def _skipping(
    rank: int, size: int, kind: str, closure: bool, value: float, options: dict[str, Any], poisoned: int = 1
) -> tuple[Tensor, int, list[Any], list[bool]]:
    """Parameters, number of skipped steps, step counts of the optimizer, and which calls of step() returned None.

    Args:
        poisoned: which evaluation of the step.
    """
    model = small_model()
    optimizer = torchring.wrap(_OPTIMIZERS[kind](model.parameters()), model, on_nonfinite="skip", **options)
    returned = []
    for step in range(_STEPS):
        evaluations = itertools.count(1)

        def evaluate(step: int = step, evaluations: Iterator[int] = evaluations) -> Tensor:
            optimizer.zero_grad()
            loss = loss_on(model, rank, step)
            is_bad = next(evaluations) == poisoned and step == _POISONED and rank == size - 1
            (loss * (value if is_bad else 1.0)).backward()
            return loss

        if closure:
            returned.append(optimizer.step(evaluate) is None)
        else:
            evaluate()
            optimizer.step()
    counts = [int(state["step"]) for state in optimizer.state.values() if "step" in state]
    return _flat(model), optimizer.stats().num_skipped_steps, counts, returned


def _as_one(kind: str, size: int) -> Tensor:
    """One process that has all batches, and leaves the poisoned step out."""
    model = small_model()
    optimizer = _OPTIMIZERS[kind](model.parameters())
    for step in set(range(_STEPS)) - {_POISONED}:

        def evaluate(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = torch.stack([loss_on(model, rank, step) for rank in range(size)]).mean()
            loss.backward()
            return loss

        optimizer.step(evaluate)
    return _flat(model)


@pytest.mark.parametrize(("kind", "closure"), [("Adam", False), ("Adam", True), ("LBFGS", True)])
@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
def test_a_step_is_left_out_on_all_ranks(kind: str, closure: bool, value: float) -> None:
    results = run_pooled(_skipping, 2, kind, closure, value, {})
    assert_same_on_all_ranks([parameters for parameters, *_ in results])
    torch.testing.assert_close(results[0][0], _as_one(kind, 2), rtol=1e-9, atol=1e-9)
    for _, num_skipped, counts, returned in results:
        assert num_skipped == 1
        assert set(counts) <= {_STEPS - 1}
        assert returned == [step == _POISONED for step in range(_STEPS)] * closure


@pytest.mark.parametrize("size", [1, 2])
def test_a_step_that_has_begun_is_undone(size: int) -> None:
    """LBFGS has moved parameters when it evaluates the closure again."""
    for parameters, num_skipped, _, returned in run_pooled(_skipping, size, "LBFGS", True, float("nan"), {}, 3):
        torch.testing.assert_close(parameters, _as_one("LBFGS", size), rtol=1e-9, atol=1e-9)
        assert num_skipped == 1
        assert returned == [step == _POISONED for step in range(_STEPS)]


@grid(
    "options",
    [{"algorithm": "ring"}, {"algorithm": "native"}, {"overlap": "thread"}, {"compression": "bf16"}],
    keep=lambda options: "algorithm" in options,
)
def test_by_every_way_to_reduce(options: dict[str, Any]) -> None:
    results = run_pooled(_skipping, 3, "Adam", False, float("nan"), options)
    assert_same_on_all_ranks([parameters for parameters, *_ in results])
    for parameters, num_skipped, counts, _ in results:
        assert num_skipped == 1
        assert set(counts) == {_STEPS - 1}
        assert bool(parameters.isfinite().all())


def _others(rank: int, size: int) -> dict[str, Any]:
    """ "ignore"; a sparse gradient; one that the script mends; a GradScaler; options that differ."""
    found: dict[str, Any] = {}
    x = torch.ones(1, 3) * (float("nan") if rank == 1 else 1.0)

    model = nn.Linear(3, 2)
    optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, on_nonfinite="ignore")
    model(x).sum().backward()
    optimizer.step()
    found["ignored"] = [bool(p.isnan().any()) for p in model.parameters()]
    optimizer.close()

    embedding = nn.Embedding(4, 2, sparse=True)
    optimizer = torchring.wrap(torch.optim.SGD(embedding.parameters(), lr=0.1), embedding, on_nonfinite="skip")
    before = values(embedding)
    for _ in range(2):  # in the second, `.grad` is there already
        (embedding(torch.tensor([rank])) * x[0, 0]).sum().backward()
        optimizer.step()
    found["sparse"] = torch.equal(values(embedding)[0], before[0]), optimizer.stats().num_skipped_steps
    optimizer.close()

    model = nn.Linear(3, 2)
    optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, on_nonfinite="skip")
    model(x).sum().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.nan_to_num_(0.5)
    before = values(model)
    optimizer.step()
    found["mended"] = [bool((p != old).all()) for p, old in zip(model.parameters(), before, strict=True)]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(model(x if step == 1 else torch.ones(1, 3)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    found["scaler"] = scaler.get_scale(), optimizer.stats().num_skipped_steps
    optimizer.close()

    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    found["differ"] = attempt(lambda: torchring.wrap(sgd, model, on_nonfinite=("skip", "ignore")[rank]))
    return found


def test_other_ways() -> None:
    for found in run_pooled(_others, 2):
        assert found["ignored"] == [True, False]
        assert found["sparse"] == (True, 2)
        assert found["mended"] == [True, True]
        assert found["scaler"] == (2.0, 0)  # the scaler has skipped the step by itself
        assert found["differ"].startswith("PlanMismatchError")
        assert "on_nonfinite='skip'" in found["differ"]


def test_a_world_of_one() -> None:
    weight = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    for closure in (False, True):
        optimizer = torchring.wrap(torch.optim.SGD([weight], lr=0.1), on_nonfinite="skip")
        for factor in (float("nan"), 1.0):

            def evaluate(factor: float = factor, optimizer: Any = optimizer) -> Tensor:
                optimizer.zero_grad()
                loss = (weight * factor).abs().sum()
                loss.backward()
                return loss

            before = weight.detach().clone()
            if closure:
                assert (optimizer.step(evaluate) is None) == (factor != 1.0)
            else:
                evaluate()
                optimizer.step()
            assert torch.equal(weight.detach(), before) == (factor != 1.0)
        assert optimizer.stats().num_skipped_steps == 1
        optimizer.close()
    with pytest.raises(ValueError, match="on_nonfinite must be one of 'raise', 'skip', 'ignore', got 'stop'"):
        torchring.wrap(torch.optim.SGD([weight], lr=0.1), on_nonfinite="stop")  # type: ignore[arg-type]


def _before_all_skip(rank: int, size: int, mode: str) -> list[Any]:
    """NaN in one backward, and none at all in the next, which all ranks leave out."""
    model = small_model()
    optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, on_nonfinite=mode)
    start = _flat(model)
    (loss_on(model, rank, 0) * (torch.nan if rank == 0 else 1.0)).backward()
    optimizer.skip()
    error = attempt(optimizer.step)
    has_stepped = not torch.equal(_flat(model), start)
    optimizer.zero_grad()
    optimizer.skip()
    optimizer.step()
    loss_on(model, rank, 1).backward()
    optimizer.step()
    return [error, has_stepped, optimizer.stats().num_skipped_steps, bool(_flat(model).isfinite().all())]


@pytest.mark.parametrize("mode", ["raise", "skip"])
def test_a_nan_is_not_forgotten_where_all_ranks_skip_the_next_backward(mode: str) -> None:
    for error, has_stepped, num_skipped, is_finite in run_pooled(_before_all_skip, 2, mode):
        assert ("is not finite; NaN or infinity came from rank 0" in error) == (mode == "raise")
        assert not has_stepped
        assert num_skipped == (mode == "skip")
        assert is_finite
