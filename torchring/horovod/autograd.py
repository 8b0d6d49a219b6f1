"""Gradients of Horovod's collectives.

The gradient of an allreduce is the allreduce of the gradients with the same op. Of an allgather and of a broadcast it
is the average over ranks, where torch.distributed.nn has the sum. Source: horovod.torch.mpi_ops.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

_Collective = Callable[[Sequence[Tensor]], list[Tensor]]


def apply(tensors: Sequence[Tensor], forward: _Collective, backward: _Collective) -> list[Tensor]:
    """`forward(tensors)`, whose gradient is `backward(gradients)`. `backward` is differentiable itself."""
    if not (torch.is_grad_enabled() and any(getattr(tensor, "requires_grad", False) for tensor in tensors)):
        return forward(tensors)
    return list(_Collectively.apply(forward, backward, *tensors))  # type: ignore[no-untyped-call]


class _Collectively(torch.autograd.Function):
    """Tensors to tensors, by two functions for the values and for the gradients."""

    @staticmethod
    def forward(ctx: Any, forward: _Collective, backward: _Collective, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.backward = backward
        return tuple(forward([tensor.detach() for tensor in tensors]))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        return None, None, *ctx.backward([grad.contiguous() for grad in grads])
