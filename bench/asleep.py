"""Models whose backward sleeps where another model computes, and so leaves the cores to communication.

On a machine where all ranks share a few cores, computing and reducing take turns, and what overlaps is hard to tell
from noise. Asleep, gradients of the same sizes come at the same times, as on ranks with cores, or GPUs, of their own.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn

import torchring
from torchring.bench.models import Batch, Workload

_NUM_BACKWARDS: Final = 6  # of which the shortest counts, for each gradient
_SHORTEST_SECONDS: Final = 3e-4  # what is shorter is slept together with what follows
_LATE_SECONDS: Final = 6e-5  # by which the kernel wakes late


@dataclass
class Asleep(Workload):
    """Trains without a batch."""

    def loss(self, model: nn.Module, batch: Batch) -> torch.Tensor:
        loss: torch.Tensor = model(torch.ones(1, requires_grad=True)).sum()
        return loss


class Layers(nn.Module):
    """Parameters of the given sizes, whose gradients come after the given times. In the order of backward."""

    def __init__(self, gradients: list[tuple[int, float]]) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.zeros(numel)) for numel, _ in reversed(gradients))
        seconds, due = [], 0.0
        for _, gap in gradients:
            due += gap
            seconds.append(due if due > _SHORTEST_SECONDS else 0.0)
            due -= seconds[-1]
        self.seconds = seconds[::-1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part, seconds in zip(self.parts, self.seconds, strict=True):
            x = _Sleep.apply(x, part, seconds)  # type: ignore[no-untyped-call]
        return x


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor, part: torch.Tensor, seconds: float) -> torch.Tensor:
        context.numel, context.seconds = part.numel(), seconds
        return x.clone()

    @staticmethod
    def backward(context: Any, *gradients: Any) -> Any:
        if context.seconds:
            time.sleep(context.seconds - _LATE_SECONDS)
        return gradients[0], torch.full((context.numel,), 1e-3), None


def asleep(workload: Workload) -> Asleep:
    """Collective: a model that sleeps as rank 0 has computed, alone."""
    gradients = torchring.broadcast_object(_measure(workload) if torchring.rank() == 0 else None)
    return Asleep(Layers(gradients), workload.batch)


def _measure(workload: Workload) -> list[tuple[int, float]]:
    """(elements, seconds since the gradient before it) of each gradient, in the order in which they come."""
    parameters = list(workload.model.parameters())
    came: dict[int, float] = {}
    handles = [
        parameter.register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
            lambda _, i=i: came.update({i: time.perf_counter()})
        )
        for i, parameter in enumerate(parameters)
    ]
    gaps: dict[int, float] = {}
    order: list[int] = []
    for seed in range(_NUM_BACKWARDS):
        workload.model.zero_grad()
        loss = workload.loss(workload.model, workload.batch(seed=seed))
        came.clear()
        before = time.perf_counter()
        loss.backward()  # type: ignore[no-untyped-call]
        order = sorted(came, key=lambda i: came[i])
        for i in order:
            gaps[i] = min(gaps.get(i, float("inf")), came[i] - before)
            before = came[i]
    for handle in handles:
        handle.remove()
    return [(parameters[i].numel(), gaps[i]) for i in order]
