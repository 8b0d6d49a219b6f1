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


def needs_grad(tensors: Sequence[Tensor]) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def all_reduce(tensors: Sequence[Tensor], forward: _Collective, backward: _Collective) -> list[Tensor]:
    """`forward(tensors)`, whose gradient is `backward(gradients)`."""
    if not needs_grad(tensors):
        return forward(tensors)
    return list(_Mapped.apply(forward, backward, *tensors))  # type: ignore[no-untyped-call]


def all_gather(
    tensors: Sequence[Tensor],
    forward: _Collective,
    average: _Collective,
    first_rows: Callable[[Sequence[int]], list[int]],
) -> list[Tensor]:
    """`forward(tensors)`, whose gradient is this rank's rows of the average over ranks.

    first_rows: of this rank in each gathered tensor, given how many rows it has of each. Collective.
    """
    if not needs_grad(tensors):
        return forward(tensors)
    lengths = [tensor.shape[0] for tensor in tensors]
    starts = first_rows(lengths)

    def backward(grads: Sequence[Tensor]) -> list[Tensor]:
        averages = average(grads)
        return [grad[start : start + n] for grad, start, n in zip(averages, starts, lengths, strict=True)]

    return list(_Mapped.apply(forward, backward, *tensors))  # type: ignore[no-untyped-call]


def broadcast(
    tensor: Tensor, forward: Callable[[Tensor], Tensor], average: Callable[[Tensor], Tensor], *, is_root: bool
) -> Tensor:
    """`forward(tensor)`, whose gradient is the average over ranks on the root, and zero elsewhere."""
    if not needs_grad([tensor]):
        return forward(tensor)

    def backward(grads: Sequence[Tensor]) -> list[Tensor]:
        mean = average(grads[0])
        return [mean if is_root else torch.zeros_like(mean)]

    (result,) = _Mapped.apply(lambda tensors: [forward(tensors[0])], backward, tensor)  # type: ignore[no-untyped-call]
    return result  # type: ignore[no-any-return]


def all_to_all(
    tensor: Tensor,
    forward: Callable[[Tensor], tuple[Tensor, list[int]]],
    backward: Callable[[Tensor, Sequence[int]], Tensor],
) -> tuple[Tensor, list[int]]:
    """`forward(tensor)`: rows, and how many came from each rank. The gradient of each row goes back where it came from;
    rows that were not sent have gradient 0."""
    if not needs_grad([tensor]):
        return forward(tensor)
    received: list[int] = []

    def send(tensors: Sequence[Tensor]) -> list[Tensor]:
        rows, counts = forward(tensors[0])
        received.extend(counts)
        return [rows]

    def send_back(grads: Sequence[Tensor]) -> list[Tensor]:
        grad = backward(grads[0], received)
        rest = grad.new_zeros(tensor.shape[0] - grad.shape[0], *tensor.shape[1:])
        return [torch.cat([grad, rest])]

    (result,) = _Mapped.apply(send, send_back, tensor)  # type: ignore[no-untyped-call]
    return result, received


def reduce_scatter(tensors: Sequence[Tensor], forward: _Collective, backward: _Collective) -> list[Tensor]:
    """`forward(tensors)`, whose gradient is `backward(gradients)`."""
    return all_reduce(tensors, forward, backward)


class _Mapped(torch.autograd.Function):
    """Tensors to tensors, by two functions for the values and for the gradients."""

    @staticmethod
    def forward(ctx: Any, forward: _Collective, backward: _Collective, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.backward = backward
        return tuple(forward([tensor.detach() for tensor in tensors]))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:
        with torch.no_grad():
            return None, None, *ctx.backward([grad.contiguous() for grad in grads])
