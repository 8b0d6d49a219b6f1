"""Horovod's collectives, under the name of Horovod's module: horovod.torch.mpi_ops.

Operations of one name meet, in whatever order ranks call them. Calls without a name are numbered, so all ranks have to
make them in the same order. `process_set` limits an operation to its ranks.

All of them raise ValueError for arguments that are wrong on this rank, and HorovodInternalError, on all ranks, for
what is wrong between ranks: different operations, dtypes, shapes or arguments of one name, or a rank that is gone.
After a disagreement the library works as before.

Functions `_x` describe a call; `calls.form` makes the public forms of it.
"""

import math
import operator
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from torchring.dynamo import run_eagerly
from torchring.gradients.group import OptimizerGroup
from torchring.horovod.calls import Collective, Handle, check_reducible, check_tensors, form
from torchring.horovod.compression import Compression
from torchring.horovod.context import *  # noqa: F403 - horovod.torch.mpi_ops has these, too
from torchring.horovod.context import ProcessSet, engine, global_process_set, ranks_of
from torchring.horovod.exceptions import HorovodInternalError
from torchring.horovod.execution import Operation
from torchring.horovod.negotiation import ALLREDUCE, BARRIER, JOIN, LAYERS, Request
from torchring.joining import follow_others

__all__ = [
    "Adasum", "Average", "Max", "Min", "Product", "Sum", "allgather", "allgather_async", "allreduce", "allreduce_",
    "allreduce_async", "allreduce_async_", "alltoall", "alltoall_async", "barrier", "broadcast", "broadcast_",
    "broadcast_async", "broadcast_async_", "grouped_allgather", "grouped_allgather_async", "grouped_allreduce",
    "grouped_allreduce_", "grouped_allreduce_async", "grouped_allreduce_async_", "grouped_reducescatter",
    "grouped_reducescatter_async", "join", "poll", "reducescatter", "reducescatter_async", "sparse_allreduce_async",
    "synchronize",
]  # fmt: skip

Average: Final = 0
Sum: Final = 1
Adasum: Final = 2
Min: Final = 3
Max: Final = 4
Product: Final = 5
_NAMES: Final = {Average: "Average", Sum: "Sum", Adasum: "Adasum", Min: "Min", Max: "Max", Product: "Product"}


def handle_average_backwards_compatibility(op: int | None, average: bool | None) -> int:
    """The op that two arguments ask for, of which `average` is the older one."""
    if average is None:
        return Average if op is None else op
    if op is not None:
        raise ValueError("give op or average, not both; average is deprecated")
    text = "the argument average is deprecated; use op=hvd.Average or op=hvd.Sum"
    warnings.warn(text, DeprecationWarning, stacklevel=5)
    return Average if average else Sum


def _all(tensors: Sequence[Tensor], _: Sequence[int]) -> Any:
    return tuple(tensors)


def _compressed(compression: Any, tensors: Sequence[Tensor]) -> tuple[Sequence[Tensor], Callable[..., Any]]:
    """The tensors to send, and what makes the caller's result of those that come back."""
    if compression is None:
        return tensors, _all
    pairs = [compression.compress(tensor) for tensor in tensors]

    def give(reduced: Sequence[Tensor], _: Sequence[int]) -> list[Tensor]:
        return [compression.decompress(each, about) for each, (_, about) in zip(reduced, pairs, strict=True)]

    return [sent for sent, _ in pairs], give


def _allreduce(
    tensors: Sequence[Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Collective:
    """The tensors of all ranks combined. Differentiable: gradients are combined in the same way. Returns a new tensor.

    Args:
        tensor: any shape; a floating-point or integer dtype. Does not change.
        average: deprecated: True for op=Average, False for op=Sum.
        name: ranks match their calls by this name.
        compression: how to send the tensor; see `Compression`.
        op: Average, which is the default, Sum, Adasum, Min, Max or Product. The average of integers is cut off towards
            zero.
        prescale_factor, postscale_factor: multiply each tensor before the reduction, and the result.
        process_set: the ranks that take part.
    """
    op = handle_average_backwards_compatibility(op, average)
    arguments = _how_to_reduce(op, prescale_factor, postscale_factor, ALLREDUCE)
    sent, give = _compressed(compression, tensors)
    check_tensors(sent, ALLREDUCE)
    for tensor in sent:
        check_reducible(tensor, arguments["op"], ALLREDUCE)
    if op == Adasum:
        number, size = len(ranks_of(process_set)), engine().world.size
        if number & (number - 1) or number != size:
            raise NotImplementedError(f"Adasum takes all ranks, and a power of two of them; got {number} of {size}")

    def gradient(grads: Sequence[Tensor], _: Sequence[int]) -> Any:
        return _allreduce(grads, None, None, None, op, prescale_factor, postscale_factor, process_set).wait()

    return Collective(ALLREDUCE, sent, name, process_set, give, gradient, arguments, overwrites=True)


allreduce = form("allreduce", _allreduce)
allreduce_ = form("allreduce_", _allreduce)
allreduce_async = form("allreduce_async", _allreduce)
allreduce_async_ = form("allreduce_async_", _allreduce)
grouped_allreduce = form("grouped_allreduce", _allreduce)
grouped_allreduce_ = form("grouped_allreduce_", _allreduce)
grouped_allreduce_async = form("grouped_allreduce_async", _allreduce)
grouped_allreduce_async_ = form("grouped_allreduce_async_", _allreduce)


def sparse_allreduce_async(
    tensor: Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], Tensor]:
    """Start the sum of sparse tensors, or their average with op=Average. Calling the result waits for it, and returns
    an uncoalesced sparse tensor."""
    num_ranks = len(ranks_of(process_set))
    tensor = tensor if tensor.is_coalesced() else tensor.coalesce()
    indices = allgather_async(tensor.indices().transpose(0, 1).contiguous(), f"{name}.indices", process_set)
    values = allgather_async(tensor.values(), f"{name}.values", process_set)

    def wait() -> Tensor:
        all_values = synchronize(values)
        if op == Average:
            all_values = all_values / num_ranks
        return torch.sparse_coo_tensor(synchronize(indices).transpose(0, 1), all_values, tensor.size())

    return wait


def _allgather(
    tensors: Sequence[Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Collective:
    """The tensors of all ranks, one after the other along dimension 0, in rank order. Differentiable.

    Tensors have any dtype, and at least one dimension; only the size of dimension 0 may differ between ranks.
    """
    check_tensors(tensors, "allgather", have_rows=True)
    num_rows = [len(tensor) for tensor in tensors]

    def gradient(grads: Sequence[Tensor], starts: Sequence[int]) -> Sequence[Tensor]:
        means = _allreduce(grads, process_set=process_set).wait()
        return [mean[start : start + rows] for mean, start, rows in zip(means, starts, num_rows, strict=True)]

    return Collective("allgather", tensors, name, process_set, _all, gradient)


allgather = form("allgather", _allgather)
allgather_async = form("allgather_async", _allgather)
grouped_allgather = form("grouped_allgather", _allgather)
grouped_allgather_async = form("grouped_allgather_async", _allgather)


def broadcast_of(
    tensors: Sequence[Tensor], root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Collective:
    """The tensor of rank `root_rank`, which is a global rank, on all ranks. Differentiable. Returns a new tensor.

    The tensor has any dtype, and the same shape on all ranks. It does not change.
    """
    check_tensors(tensors, "broadcast")
    ranks = ranks_of(process_set)
    if root_rank not in ranks:
        raise ValueError(f"root_rank is a global rank, one of {list(ranks)}, got {root_rank!r}")
    is_root = engine().world.rank == root_rank

    def gradient(grads: Sequence[Tensor], _: Sequence[int]) -> Sequence[Tensor]:
        means: Sequence[Tensor] = _allreduce(grads, process_set=process_set).wait()
        return means if is_root else [torch.zeros_like(mean) for mean in means]

    arguments = {"root rank": int(root_rank)}
    return Collective("broadcast", tensors, name, process_set, _all, gradient, arguments, overwrites=True)


broadcast = form("broadcast", broadcast_of)
broadcast_ = form("broadcast_", broadcast_of)
broadcast_async = form("broadcast_async", broadcast_of)
broadcast_async_ = form("broadcast_async_", broadcast_of)


@run_eagerly
def alltoall(
    tensor: Tensor,
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send rows of `tensor` to every rank. Differentiable.

    Args:
        tensor: any dtype, at least one dimension.
        splits: number of rows for each rank, which may leave rows over; an int32 tensor or a list. None: equal shares.

    Returns:
        The received rows, in rank order; with `splits`, also how many came from each rank, as an int32 tensor.
    """
    ((rows, counts),) = _alltoall([tensor], splits, name, process_set).wait()
    return rows if splits is None else (rows, counts)


def _alltoall(
    tensors: Sequence[Tensor],
    splits: Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Collective:
    tensor = tensors[0]
    check_tensors(tensors, "alltoall", have_rows=True)
    num_ranks = len(ranks_of(process_set))
    rows = tensor.shape[0]
    if splits is None:
        if rows % num_ranks:
            raise ValueError(f"dimension 0 has {rows} rows, no multiple of {num_ranks} ranks; give splits")
        counts = [rows // num_ranks] * num_ranks
    elif isinstance(splits, Tensor):
        if splits.dtype != torch.int32 or splits.dim() != 1:
            raise ValueError(f"splits is a list, or an int32 tensor of one dimension, got {splits!r}")
        counts = splits.tolist()
    else:
        counts = [operator.index(count) for count in splits]
    if len(counts) != num_ranks or min(counts, default=0) < 0 or sum(counts) > rows:
        raise ValueError(f"splits has a number of rows for each of {num_ranks} ranks, {rows} in all, got {counts}")
    device = splits.device if isinstance(splits, Tensor) else "cpu"
    unsent = (rows - sum(counts), *tensor.shape[1:])

    def give(tensors: Sequence[Tensor], received: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        return [(tensors[0], torch.tensor(received, dtype=torch.int32, device=device))]

    def gradient(grads: Sequence[Tensor], received: Sequence[int]) -> Sequence[Tensor]:
        ((grad, _),) = _alltoall(grads, received, None, process_set).wait()
        return [torch.cat([grad, grad.new_zeros(unsent)])]

    return Collective("alltoall", tensors, name, process_set, give, gradient, splits=tuple(counts))


alltoall_async = form("alltoall_async", _alltoall)


def _reducescatter(
    tensors: Sequence[Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Collective:
    """This rank's share of the rows of the average, or sum, of all ranks' tensors. Differentiable.

    Args:
        tensor: with at least one dimension, of the same shape on all ranks. If the rows cannot be dealt out evenly, the
            first ranks get one more.
        op: Average or Sum. For the others see `allreduce`.
    """
    arguments = _how_to_reduce(op, prescale_factor, postscale_factor, "reducescatter")
    if op not in (Average, Sum):
        raise HorovodInternalError(f"reducescatter takes op=Average or op=Sum, got {arguments['op']}")
    sent, give = _compressed(compression, tensors)
    check_tensors(sent, "reducescatter", have_rows=True)
    for tensor in sent:
        check_reducible(tensor, arguments["op"], "reducescatter")
    factor = prescale_factor * postscale_factor * (len(ranks_of(process_set)) if op == Sum else 1)

    def gradient(grads: Sequence[Tensor], _: Sequence[int]) -> Sequence[Tensor]:
        return [grad * factor for grad in _allgather(grads, None, process_set).wait()]

    return Collective("reducescatter", sent, name, process_set, give, gradient, arguments)


reducescatter = form("reducescatter", _reducescatter)
reducescatter_async = form("reducescatter_async", _reducescatter)
grouped_reducescatter = form("grouped_reducescatter", _reducescatter)
grouped_reducescatter_async = form("grouped_reducescatter_async", _reducescatter)


def join(device: int = -1) -> int:
    """Say that this rank has no more data. Collective: returns when all ranks have joined.

    Until then, this rank takes part in the allreduces of the others, and in those of their DistributedOptimizers, with
    zeros. An average is divided by the number of all ranks all the same. Other collectives of the others, and
    SyncBatchNorm layers in training, raise HorovodInternalError. Each step of a DistributedOptimizer has to come within
    the timeout after the one before.

    Returns the rank that has joined last. Of several in the same moment, the highest.
    """
    here = engine()
    here.next_handle()
    request = Request(JOIN, JOIN, arguments=((LAYERS, here.turns.num_begun),))
    operation = here.submit(Operation(request))  # from now on, the engine's thread contributes zeros
    if here.world.size > 1:
        group = here.world.shared(OptimizerGroup)
        group.guard.run("hvd.join()", partial(follow_others, group, counts=True))
    return int(here.wait(operation))


@run_eagerly
def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all ranks of the set have called it; not for operations that were started before."""
    Collective(BARRIER, (), "noname", process_set, _all, lambda grads, _: grads).wait()


def poll(handle: Handle) -> bool:
    """True if an operation is done: `synchronize` would return at once. ValueError for an unknown handle."""
    if (operation := engine().handles.get(handle)) is None:
        raise ValueError(f"{handle!r} is no handle of an operation that was started and not synchronized yet")
    return operation.done.done()


@run_eagerly
def synchronize(handle: Handle) -> Any:
    """Wait for an operation and return its result: a tensor, or a tuple of tensors. None for a handle that was
    synchronized before, as in Horovod."""
    operation = engine().handles.pop(handle, None)
    return None if operation is None else operation.give(*engine().wait(operation))


def _how_to_reduce(op: int, before: float, after: float, what: str) -> dict[str, Any]:
    """The arguments of a reduction that must be equal on all ranks."""
    if op not in _NAMES or isinstance(op, bool):
        known = ", ".join(f"hvd.{name}" for name in _NAMES.values())
        raise ValueError(f"{what} takes op, one of {known}, got {op!r}")
    if math.isnan(before) or math.isnan(after):
        raise ValueError(f"scale factors are numbers, got prescale_factor={before!r}, postscale_factor={after!r}")
    return {"op": _NAMES[op], "prescale_factor": float(before), "postscale_factor": float(after)}
