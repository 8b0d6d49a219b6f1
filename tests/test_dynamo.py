"""torch.compile around the training step: backward runs inside, and Dynamo looks at every hook that it calls."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from checks import assert_bitwise
from harness import run_ranks

import torchring


def _train(rank: int, backend: str | None) -> tuple[list[torch.Tensor], list[float]]:
    """Three steps; the second one lays out the buckets anew. The sum is one that breaks the graph, too."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = (model(x) - y).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return torchring.all_reduce(loss.detach())

    if backend is not None:
        step = torch.compile(step, backend=backend)
    data = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(float(step(torch.randn(5, 4, generator=data), torch.randn(5, 2, generator=data))))
        optimizer.step()
    optimizer.close()
    return [parameter.detach() for parameter in model.parameters()], losses


def _compile(rank: int, size: int) -> Any:
    expected, losses = _train(rank, None)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Dynamo does not know how to trace")  # a page each
        for backend in ("eager", "aot_eager"):
            torch._dynamo.reset()  # type: ignore[no-untyped-call]
            parameters, compiled_losses = _train(rank, backend)
            for parameter, same in zip(parameters, expected, strict=True):
                assert_bitwise(parameter, same)
            assert compiled_losses == losses
    torch._dynamo.reset()  # type: ignore[no-untyped-call]
    with (
        torch._dynamo.config.patch(compiled_autograd=True),  # type: ignore[no-untyped-call]
        pytest.raises(torchring.GradientError, match=r"torch._dynamo.config.compiled_autograd = False"),
    ):
        _train(rank, "eager")
    return [parameter.tolist() for parameter in expected]


def test_a_compiled_step_gives_the_same_bits_and_compiled_autograd_is_refused() -> None:
    first, second = run_ranks(_compile, 2, deadline=150.0)
    assert first == second
