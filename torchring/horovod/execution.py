"""Computes Horovod's collectives, on every rank, once all ranks have agreed on the tensors. The engine calls it.

Numerics are Horovod's where scripts can rely on them: scale, reduce, scale again; integers are scaled in fp64 and cut
off towards zero; an average divides by the number of ranks, those that have joined included. 16-bit values are
summed in fp32 and rounded once, where Horovod rounds after each step.
"""

import functools
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Final

import torch

from torchring import adasum
from torchring.accelerators import accelerator_of
from torchring.broadcasts import broadcast_batches
from torchring.collectives import operations
from torchring.collectives.operations import Backend
from torchring.collectives.service import Collectives
from torchring.collectives.signature import signature_of
from torchring.default_world import device
from torchring.horovod.negotiation import BARRIER, Request, Response, dtype_of
from torchring.rooms import room

Result = tuple[Sequence[torch.Tensor], Sequence[int]]
"""The tensors that a call of a collective returns, and numbers. Of allgather: the first of this rank's rows in each
tensor. Of alltoall: how many rows came from each rank. Of others: none."""
_OPS: Final = {"Average": "mean", "Sum": "sum", "Min": "min", "Max": "max", "Product": "product"}


class Operation:
    """One call of a collective on this rank, whose `tensors` are sent, or reduced in place."""

    def __init__(
        self, request: Request, tensors: Sequence[torch.Tensor] = (), give: Callable[..., Any] = lambda result: result
    ) -> None:
        self.request = request
        self.tensors = tensors
        self.give = give  # makes what the script gets, of both parts of a `Result`
        accelerator = accelerator_of(tensors[0].device) if tensors else None
        # Tensors on a device, for the engine's thread.
        self.aside = accelerator and room("device collectives").Aside(accelerator, tensors)
        self.done: Future[Any] = Future()  # gets a `Result`, or the number that an operation on ranks or sets returns
        self.since = time.monotonic()


@dataclass(frozen=True)
class Plane:
    """The ranks of one process set, as one of them sees them."""

    collectives: Collectives  # of a world of exactly these ranks
    ranks: tuple[int, ...]  # their global ranks, ascending

    @property
    def rank(self) -> int:
        """This rank's place among them."""
        return self.collectives.world.rank

    def backend_for(self, request: Request) -> Backend:
        """What moves the tensors of a request; for the engine's thread, inside a cycle."""
        backend = self.collectives.opened()
        return self.devices.instead_of(backend) if ("device", "GPU") in request.arguments else backend

    @functools.cached_property
    def devices(self) -> Any:
        """The `DeviceCollectives` of these ranks."""
        return room("device collectives").DeviceCollectives(self.collectives)


@torch.no_grad()
def carry_out(plane: Plane, calls: Sequence[Operation | None], responses: Sequence[Response]) -> list[Result]:
    """The results of `calls` on this rank; one is None where this rank has joined, and gives zeros.

    There are several only of reductions that are alike.
    """
    first, operation = responses[0].first, calls[0]
    if first.kind == "allreduce":
        tensors = [
            list(call.tensors) if call is not None else _zeros(response.first)
            for call, response in zip(calls, responses, strict=True)
        ]
        _all_reduce(plane, [tensor for each in tensors for tensor in each], first)
        return [(tuple(each), ()) for each in tensors]
    if operation is None or first.kind == BARRIER:  # negotiation has shown that all ranks have called it
        return [((), ())]
    return [_MOVES[first.kind](plane, operation, responses[0])]


def _all_reduce(plane: Plane, tensors: Sequence[torch.Tensor], request: Request) -> None:
    op = request.argument("op")
    for tensor in tensors:
        scale(tensor, request.argument("prescale_factor"))
    backend = plane.backend_for(request)
    if op == "Adasum":
        for tensor in tensors:
            adasum.all_reduce(backend, tensor, [[rank] for rank in range(len(plane.ranks))])
    else:
        for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
            alike = [tensor for tensor in tensors if tensor.dtype == dtype]
            all_reduce_together(backend, alike, _reduction(op, dtype))
    for tensor in tensors:
        _complete(tensor, request, len(plane.ranks))


@torch.no_grad()
def all_reduce_together(backend: Backend, tensors: Sequence[torch.Tensor], op: str) -> None:
    """Combine tensors over all ranks, in place, by way of one copy of all. This takes one exchange, not one for each.

    tensors: have one dtype, and any shapes, strides and devices. `calls.py` has checked them.
    Raises PlanMismatchError if another rank passes other shapes, another dtype or another op.
    """
    parts = [operations.plain(backend, tensor).view(-1) for tensor in tensors]
    flat = torch.cat([part.to(parts[0].device) for part in parts])
    backend.all_reduce(flat, op, signature_of("all_reduce", tensors, operations.DETAILS[op]))
    for tensor, part in zip(tensors, torch.split(flat, [tensor.numel() for tensor in tensors]), strict=True):
        operations.writable(tensor).copy_(part.view(tensor.shape))


def _reduction(op: str, dtype: torch.dtype) -> str:
    """The name of the reduction for `torchring.collectives`. Averages of integers are sums, divided afterwards."""
    return _OPS[op] if op != "Average" or dtype.is_floating_point else "sum"


def _complete(tensor: torch.Tensor, request: Request, size: int) -> None:
    """What follows a reduction over `size` ranks: averages of integers are divided, then all values are scaled."""
    if request.argument("op") == "Average" and _reduction("Average", tensor.dtype) == "sum":
        tensor.div_(size, rounding_mode="trunc")
    scale(tensor, request.argument("postscale_factor"))


def scale(tensor: torch.Tensor, factor: float) -> None:
    """Multiply in place: 16-bit values in fp32, integers in fp64, cut off towards zero."""
    if factor == 1.0:
        return
    if tensor.dtype.itemsize == 2 and tensor.is_floating_point():
        tensor.copy_(tensor.float().mul_(factor))
    elif tensor.is_floating_point():
        tensor.mul_(factor)
    else:
        tensor.copy_(tensor.double().mul_(factor).trunc_())


def _zeros(request: Request) -> list[torch.Tensor]:
    """The tensors that a rank contributes after it has joined."""
    where = "cpu" if request.argument("device") == "CPU" else device()
    return [torch.zeros(shape, dtype=dtype_of(dtype), device=where) for dtype, shape in request.tensors]


def _all_gather(plane: Plane, operation: Operation, response: Response) -> Result:
    backend = plane.backend_for(response.first)
    results = tuple(torch.cat(operations.all_gather(backend, tensor)) for tensor in operation.tensors)
    before = [response.requests[rank].tensors for rank in plane.ranks[: plane.rank]]
    return results, [sum(tensors[i][1][0] for tensors in before) for i in range(len(results))]


def _broadcast(plane: Plane, operation: Operation, response: Response) -> Result:
    src = plane.ranks.index(response.first.argument("root rank"))
    broadcast_batches(plane.backend_for(response.first), operation.tensors, src, is_src=plane.rank == src)
    return tuple(operation.tensors), ()


def _all_to_all(plane: Plane, operation: Operation, response: Response) -> Result:
    tensor, splits = operation.tensors[0], operation.request.splits
    if not tensor.shape[1:].numel():  # rows without elements: the requests say how many come
        counts = [response.requests[rank].splits[plane.rank] for rank in plane.ranks]
        return (tensor.new_empty(sum(counts), *tensor.shape[1:]),), counts
    signature = signature_of("alltoall", [tensor], any_rows=True)
    parts, counts = operations.all_to_all(plane.backend_for(response.first), tensor[: sum(splits)], splits, signature)
    return (torch.cat(parts),), counts


def _reduce_scatter(plane: Plane, operation: Operation, response: Response) -> Result:
    request, size = response.first, len(plane.ranks)
    backend, results = plane.backend_for(request), []
    for tensor in operation.tensors:
        tensor = tensor.clone()
        scale(tensor, request.argument("prescale_factor"))
        if not tensor.shape[1:].numel():
            results.append(tensor[: operations.even_shares(len(tensor), size)[plane.rank]])
            continue
        op, signature = _reduction(request.argument("op"), tensor.dtype), signature_of("reducescatter", [tensor])
        result = operations.reduce_scatter(backend, tensor, size, op, signature)
        _complete(result, request, size)
        results.append(result)
    return tuple(results), ()


_MOVES: Final[dict[str, Callable[[Plane, Operation, Response], Result]]] = {
    "allgather": _all_gather,
    "broadcast": _broadcast,
    "alltoall": _all_to_all,
    "reducescatter": _reduce_scatter,
}
