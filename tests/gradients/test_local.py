"""A world of one, which reduces nothing: weights and groups of backwards are as among several ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import torchring
from tests.support.training import attempt


def _one(**options: Any) -> tuple[nn.Parameter, Any]:
    parameter = nn.Parameter(torch.zeros(2))
    return parameter, torchring.wrap(torch.optim.SGD([parameter], lr=1.0), **options)


def _backward(parameter: nn.Parameter, optimizer: Any, weight: float, gradient: float) -> float:
    """A backward with a weight; the gradient that is there then."""
    optimizer.weigh(weight)
    (parameter * gradient).sum().backward()
    assert parameter.grad is not None
    return float(parameter.grad[0])


def test_a_skipped_backward_ends_a_group_as_any_other_does() -> None:
    parameter, optimizer = _one(accumulate=2)
    assert _backward(parameter, optimizer, 1, 5.0) == 5.0
    optimizer.skip()
    assert "gradients of an earlier step" in attempt(lambda: optimizer.weigh(3))


def test_a_backward_skipped_inside_no_sync_does_not_count() -> None:
    parameter, optimizer = _one(accumulate=2)
    assert _backward(parameter, optimizer, 1, 5.0) == 5.0
    with optimizer.no_sync():
        optimizer.skip()
    with optimizer.no_sync():
        optimizer.weigh(3)
        assert torch.autograd.grad((parameter * 7).sum(), parameter)[0].tolist() == [7.0, 7.0], "not of the mean"
        optimizer.skip()
    assert _backward(parameter, optimizer, 3, 1.0) == 2.0, "the mean of 5 and three times 1"
