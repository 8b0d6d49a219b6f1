"""Learning rates against literal formulas."""

import copy
import re
from collections.abc import Callable
from functools import partial
from math import inf, nan
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer, lr_scheduler

from tests.support.training import Side, assert_as_one_process, attempt, momentum, small_model, train, values
from torchring.recipes import scale_lr, warm_up


def test_scale_lr() -> None:
    assert scale_lr(0.1, 256, 8192) == pytest.approx(3.2)  # Goyal et al.
    assert scale_lr(0.1, 256, numpy.int64(64), "linear") == pytest.approx(0.025)
    assert scale_lr(0.001, 512, 32768, rule="sqrt") == pytest.approx(0.008)
    for *arguments, said in (
        *((rate, 256, 512, "ValueError: base_lr must be above 0 and finite, got ") for rate in (-0.1, 0.0, nan, inf)),
        (0.1, 0, 512, "ValueError: base_batch must be a number of samples, 1 or more, got 0"),
        (0.1, 256, -1, "ValueError: batch must be"),
        (256, 0.1, 512, "TypeError: base_batch must be a whole number of samples, got 0.1; the order is base_lr, "),
        (0.1, 256, True, "TypeError: batch must be a whole number"),
        (0.1, 256, 512, "cubic", "ValueError: rule must be 'linear' or 'sqrt', got 'cubic'"),
    ):
        assert attempt(partial(scale_lr, *arguments)).startswith(said)


def _sgd(*rates: float | Tensor) -> SGD:
    return SGD([{"params": [nn.Parameter(torch.ones(1))], "lr": rate} for rate in rates], lr=0.1)


_SCHEDULERS: dict[str, Callable[[Optimizer], Any]] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "step": lambda o: lr_scheduler.StepLR(o, 2, 0.5),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.4, 20),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.5, 3), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ExponentialLR(o, 0.9), lr_scheduler.ConstantLR(o, 0.5, 3)]
    ),
}


def _rates(optimizer: Optimizer, scheduler: Any, count: int) -> list[list[float]]:
    found = []
    for _ in range(count):
        found.append([float(group["lr"]) for group in optimizer.param_groups])
        optimizer.step()
        scheduler.step()
        assert [float(rate) for rate in scheduler.get_last_lr()] == [float(g["lr"]) for g in optimizer.param_groups]
    return found


@pytest.mark.parametrize("kind", _SCHEDULERS)
@pytest.mark.filterwarnings("error")
def test_warm_up_and_then_the_scheduler(kind: str) -> None:
    plain = _sgd(0.4, 0.8)
    expected = _rates(plain, _SCHEDULERS[kind](plain), 12)
    full = expected[0]
    optimizer = _sgd(0.4, 0.8)
    scheduler = warm_up(_SCHEDULERS[kind](optimizer), 5, start=0.25)
    found = _rates(optimizer, scheduler, 17)
    for step in range(5):  # from a quarter of the rate, where step 0 begins, to all of it at step 5
        assert found[step] == pytest.approx([rate * (0.25 + 0.75 * step / 5) for rate in full])
    assert found[5:] == expected  # bit for bit

    for end in (3, 5, 8):  # resumed in a new process, which builds the optimizer and the scheduler again
        first = _sgd(0.4, 0.8)
        stopped = warm_up(_SCHEDULERS[kind](first), 5, start=0.25)
        assert _rates(first, stopped, end) == found[:end]
        state = copy.deepcopy({"optimizer": first.state_dict(), "scheduler": stopped.state_dict()})
        second = _sgd(0.4, 0.8)
        resumed = warm_up(_SCHEDULERS[kind](second), 5, start=0.25)
        second.load_state_dict(state["optimizer"])
        resumed.load_state_dict(state["scheduler"])
        assert _rates(second, resumed, 17 - end) == found[end:]


@pytest.mark.filterwarnings("error")
def test_warm_up_alone_with_plateau_and_with_tensors() -> None:
    optimizer = _sgd(0.4, torch.tensor(0.8))
    scheduler = warm_up(optimizer, 4)
    found = _rates(optimizer, scheduler, 6)
    for step, rates in enumerate(found):
        assert rates == pytest.approx([min(1.0, step / 4) * 0.4, min(1.0, step / 4) * 0.8])
    assert scheduler.is_over
    assert isinstance(optimizer.param_groups[1]["lr"], Tensor)

    optimizer = _sgd(0.4)
    plateau = warm_up(lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0), 2, start=0.5)
    rates = []
    for loss in (9.0, 9.0, 9.0, 8.0, 8.0):
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        plateau.step(loss)
    assert [*rates, optimizer.param_groups[0]["lr"]] == pytest.approx([0.2, 0.3, 0.4, 0.4, 0.4, 0.2])


def test_warm_up_refuses_nonsense() -> None:
    optimizer = _sgd(0.1)
    state = warm_up(_SCHEDULERS["cosine"](optimizer), 5).state_dict()
    for act, said in (
        (lambda: warm_up(1, 5), "TypeError: .* an optimizer or a scheduler of torch.optim, got int"),
        (lambda: warm_up(optimizer, 5.0), "TypeError: .*steps must be a whole number, got 5.0"),
        (lambda: warm_up(optimizer, 0), "ValueError: .*steps must be 1 or more, got 0"),
        (lambda: warm_up(optimizer, 5, 8.0), "ValueError: .*start must be from 0 to 1: .* got 8.0"),
        (lambda: warm_up(optimizer, 5).load_state_dict(state), "ValueError: .*in one of the runs only"),
    ):
        assert re.match(said, attempt(act))


def _warmed_up(side: Side, shard: bool) -> list[Tensor]:
    net = small_model()
    optimizer = side.wrap(momentum(net), net, shard=shard)
    scheduler = warm_up(lr_scheduler.ExponentialLR(optimizer, 0.5), 3, start=0.25)
    for step in range(6):
        train(side, net, optimizer, [step])
        scheduler.step()
    return values(net)


def test_wrapped_optimizers() -> None:
    """A warm-up of a wrapped optimizer, sharded or not, is that of one process."""
    plain, sharded = (assert_as_one_process(_warmed_up, shard)[0] for shard in (False, True))
    assert all(map(torch.equal, plain, sharded))
