"""Horovod's collectives, under the name of Horovod's module: horovod.torch.mpi_ops.

Operations of one name meet, in whatever order ranks call them. Calls without a name are numbered, so all ranks have to
make them in the same order. `process_set` limits an operation to its members.

All of them raise ValueError for arguments that are wrong on this rank, and HorovodInternalError, on all ranks, for
what is wrong between ranks: different operations, dtypes, shapes or arguments of one name, or a rank that is gone.
After a disagreement the library works as before.
"""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from torchring.collectives import operations
from torchring.dynamo import run_eagerly
from torchring.gradients.group import OptimizerGroup
from torchring.horovod import autograd
from torchring.horovod.compression import Compression
from torchring.horovod.context import (
    Context,
    ProcessSet,
    add_process_set,
    ccl_built,
    context_of_collectives,
    cross_rank,
    cross_size,
    cuda_built,
    ddl_built,
    global_process_set,
    gloo_built,
    gloo_enabled,
    init,
    is_homogeneous,
    is_initialized,
    local_rank,
    local_size,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    process_set_ids_and_ranks,
    rank,
    remove_process_set,
    rocm_built,
    shutdown,
    size,
    start_timeline,
    stop_timeline,
)
from torchring.horovod.engine import Operation
from torchring.horovod.exceptions import HorovodInternalError
from torchring.horovod.negotiation import ALLREDUCE, BARRIER, JOIN, LAYERS, request_of

__all__ = [
    "Adasum",
    "Average",
    "HorovodInternalError",
    "Max",
    "Min",
    "ProcessSet",
    "Product",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "handle_average_backwards_compatibility",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "process_set_ids_and_ranks",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_timeline",
    "stop_timeline",
    "synchronize",
]

Average: Final = 0
Sum: Final = 1
Adasum: Final = 2
Min: Final = 3
Max: Final = 4
Product: Final = 5
_NAMES: Final = {Average: "Average", Sum: "Sum", Adasum: "Adasum", Min: "Min", Max: "Max", Product: "Product"}

_INLINE_BYTES: Final = 16 * 1024
"""An allreduce of up to this size takes one exchange between ranks instead of two."""

Handle = int
Result = Callable[[Any], Any]


def handle_average_backwards_compatibility(op: int | None, average: bool | None) -> int:
    """The op that two arguments ask for, of which `average` is the older one."""
    if op is not None:
        if average is not None:
            raise ValueError("give op or average, not both; average is deprecated")
        return op
    if average is not None:
        warnings.warn(
            "the argument average is deprecated; use op=hvd.Average or op=hvd.Sum", DeprecationWarning, stacklevel=3
        )
        return Average if average else Sum
    return Average


# ---- allreduce


def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """The tensors of all ranks combined. Differentiable: gradients are combined in the same way.

    Args:
        tensor: of any shape, and of a floating-point, complex, integer or boolean dtype; does not change.
        average: deprecated: True for op=Average, False for op=Sum.
        name: of the operation.
        compression: what the tensor is sent as; see `Compression`.
        op: Average, which is the default, Sum, Adasum, Min, Max or Product. The average of integers is cut off towards
            zero. For booleans, Sum and Max are "any", Min and Product are "all".
        prescale_factor: the tensors are multiplied with this number before.
        postscale_factor: the result is multiplied with this number.
        process_set: the ranks that take part.

    Returns:
        A new tensor.
    """
    op = handle_average_backwards_compatibility(op, average)
    compressed, sent = compression.compress(tensor)
    (output,) = _differentiable_all_reduce([compressed], name, op, prescale_factor, postscale_factor, process_set)
    result: torch.Tensor = compression.decompress(output, sent)
    return result


def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """As `allreduce`, in place and without a gradient. Returns the tensor."""
    op = handle_average_backwards_compatibility(op, average)
    _run_all_reduce([tensor], name, op, prescale_factor, postscale_factor, process_set, copies=False)
    return tensor


def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start an `allreduce` without a gradient. `synchronize(handle)` returns a new tensor."""
    op = handle_average_backwards_compatibility(op, average)
    operation = _all_reduce([tensor], name, op, prescale_factor, postscale_factor, process_set, copies=True)
    return _start(operation, operator.itemgetter(0))


def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start an `allreduce_`. The tensor belongs to the library until `synchronize(handle)` returns it."""
    op = handle_average_backwards_compatibility(op, average)
    operation = _all_reduce([tensor], name, op, prescale_factor, postscale_factor, process_set, copies=False)
    return _start(operation, operator.itemgetter(0))


def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """`allreduce` of several tensors as one operation. Dtypes may differ, devices may not."""
    op = handle_average_backwards_compatibility(op, average)
    pairs = [compression.compress(tensor) for tensor in tensors]
    outputs = _differentiable_all_reduce(
        [compressed for compressed, _ in pairs], name, op, prescale_factor, postscale_factor, process_set
    )
    return [compression.decompress(output, sent) for output, (_, sent) in zip(outputs, pairs, strict=True)]


def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """`allreduce_` of several tensors as one operation."""
    op = handle_average_backwards_compatibility(op, average)
    _run_all_reduce(tensors, name, op, prescale_factor, postscale_factor, process_set, copies=False)
    return list(tensors)


def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start a `grouped_allreduce` without gradients. `synchronize(handle)` returns a tuple."""
    op = handle_average_backwards_compatibility(op, average)
    return _start(_all_reduce(tensors, name, op, prescale_factor, postscale_factor, process_set, copies=True))


def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: int | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start a `grouped_allreduce_`. `synchronize(handle)` returns a tuple."""
    op = handle_average_backwards_compatibility(op, average)
    return _start(_all_reduce(tensors, name, op, prescale_factor, postscale_factor, process_set, copies=False))


def _differentiable_all_reduce(
    tensors: Sequence[torch.Tensor], name: str | None, op: int, before: float, after: float, process_set: ProcessSet
) -> list[torch.Tensor]:
    return autograd.apply(
        tensors,
        lambda values: _run_all_reduce(values, name, op, before, after, process_set),
        lambda grads: _differentiable_all_reduce(grads, None, op, before, after, process_set),
    )


def _run_all_reduce(
    tensors: Sequence[torch.Tensor],
    name: str | None,
    op: int,
    before: float,
    after: float,
    process_set: ProcessSet,
    *,
    copies: bool = True,
) -> list[torch.Tensor]:
    return list(_wait_now(_all_reduce(tensors, name, op, before, after, process_set, copies=copies)))


def _all_reduce(
    tensors: Sequence[torch.Tensor],
    name: str | None,
    op: int,
    before: float,
    after: float,
    process_set: ProcessSet,
    *,
    copies: bool,
) -> Operation:
    here = context_of_collectives()
    label = _check_op(op, ALLREDUCE)
    _check_factors(before, after)
    _check_tensors(tensors, "grouped_allreduce")
    for tensor in tensors:
        _check_reducible(tensor, label, ALLREDUCE)
        if not copies:
            operations.check_writable(tensor)
    if not copies:
        operations.check_apart(tensors)
    if op == Adasum:
        members = here.members(process_set)
        if len(members) & (len(members) - 1) or len(members) != here.world.size:
            raise NotImplementedError(
                f"Adasum takes all ranks, and a power of two of them; got {len(members)} of {here.world.size}"
            )
    arguments = {"op": label, "prescale_factor": float(before), "postscale_factor": float(after)}
    sources = [operations.writable(tensor.detach()) for tensor in tensors]
    targets = _copies(sources) if copies else sources
    is_small = sum(tensor.nbytes for tensor in tensors) <= _INLINE_BYTES
    return _operation(here, ALLREDUCE, targets, name, process_set, arguments, is_inline=is_small)


def _copies(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Contiguous copies, which another thread may write to."""
    with torch.inference_mode(False), torch.no_grad():
        return [tensor.clone(memory_format=torch.contiguous_format) for tensor in tensors]


def sparse_allreduce_async(
    tensor: torch.Tensor, name: str, op: int, process_set: ProcessSet = global_process_set
) -> Callable[[], torch.Tensor]:
    """Start the sum of sparse tensors, or their average with op=Average. Calling the result waits for it, and returns
    an uncoalesced sparse tensor."""
    here = context_of_collectives()
    num_members = len(here.members(process_set))
    tensor = tensor if tensor.is_coalesced() else tensor.coalesce()
    indices = allgather_async(tensor.indices().transpose(0, 1).contiguous(), f"{name}.indices", process_set)
    values = allgather_async(tensor.values(), f"{name}.values", process_set)

    def wait() -> torch.Tensor:
        all_values = synchronize(values)
        if op == Average:
            all_values = all_values / num_members
        return torch.sparse_coo_tensor(synchronize(indices).transpose(0, 1), all_values, tensor.size())

    return wait


# ---- allgather


def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """The tensors of all ranks, one after the other along dimension 0, in rank order. Differentiable.

    Args:
        tensor: of any dtype, with at least one dimension; only the size of dimension 0 may differ between ranks.
    """
    return grouped_allgather([tensor], name, process_set, _kind="allgather")[0]


def grouped_allgather(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    *,
    _kind: str = "grouped_allgather",
) -> tuple[torch.Tensor, ...]:
    """`allgather` of several tensors as one operation."""
    starts: list[int] = []

    def gather(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        gathered, own = _wait_now(_all_gather(values, name, process_set, _kind))
        starts.extend(own)
        return list(gathered)

    def average(grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        averages = _differentiable_all_reduce(grads, None, Average, 1.0, 1.0, process_set)
        return [
            mean[start : start + len(tensor)] for mean, start, tensor in zip(averages, starts, tensors, strict=True)
        ]

    return tuple(autograd.apply(tensors, gather, average))


def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start an `allgather` without a gradient."""
    return _start(_all_gather([tensor], name, process_set, "allgather"), lambda result: result[0][0])


def grouped_allgather_async(
    tensors: Sequence[torch.Tensor], name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start a `grouped_allgather` without gradients. `synchronize(handle)` returns a tuple."""
    return _start(_all_gather(tensors, name, process_set, "grouped_allgather"), operator.itemgetter(0))


def _all_gather(tensors: Sequence[torch.Tensor], name: str | None, process_set: ProcessSet, what: str) -> Operation:
    here = context_of_collectives()
    _check_tensors(tensors, what)
    for tensor in tensors:
        if tensor.dim() == 0:
            raise ValueError("allgather takes tensors with at least one dimension, got a scalar")
    return _operation(here, "allgather", [tensor.detach() for tensor in tensors], name, process_set)


# ---- broadcast


def broadcast(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """The tensor of rank `root_rank`, which is a global rank, on all ranks. Differentiable. Returns a new tensor.

    Args:
        tensor: of any dtype, of the same shape on all ranks; does not change.
    """
    is_root = context_of_collectives().world.rank == root_rank

    def average(grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        (mean,) = _differentiable_all_reduce(grads, None, Average, 1.0, 1.0, process_set)
        return [mean if is_root else torch.zeros_like(mean)]

    (result,) = autograd.apply(
        [tensor], lambda values: list(_wait_now(_broadcast(values, root_rank, name, process_set, copies=True))), average
    )
    return result


def broadcast_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """As `broadcast`, in place and without a gradient. Returns the tensor."""
    _wait_now(_broadcast([tensor], root_rank, name, process_set, copies=False))
    return tensor


def broadcast_async(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start a `broadcast` without a gradient."""
    return _start(_broadcast([tensor], root_rank, name, process_set, copies=True), operator.itemgetter(0))


def broadcast_async_(
    tensor: torch.Tensor, root_rank: int, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Handle:
    """Start a `broadcast_`. The tensor belongs to the library until `synchronize(handle)` returns it."""
    return _start(_broadcast([tensor], root_rank, name, process_set, copies=False), operator.itemgetter(0))


def broadcast_together(tensors: Sequence[torch.Tensor], root_rank: int, name: str, process_set: ProcessSet) -> None:
    """`broadcast_` of several tensors as one operation."""
    _wait_now(_broadcast(tensors, root_rank, name, process_set, copies=False))


def _broadcast(
    tensors: Sequence[torch.Tensor], root_rank: int, name: str | None, process_set: ProcessSet, *, copies: bool
) -> Operation:
    here = context_of_collectives()
    _check_tensors(tensors, "broadcast")
    members = here.members(process_set)
    if root_rank not in members:
        raise ValueError(f"root_rank is a global rank, one of {list(members)}, got {root_rank!r}")
    sources = [operations.writable(tensor.detach()) for tensor in tensors]
    for tensor in () if copies else sources:
        operations.check_writable(tensor)
    targets = _copies(sources) if copies else sources
    return _operation(here, "broadcast", targets, name, process_set, {"root rank": int(root_rank)})


# ---- alltoall


def alltoall(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send rows of `tensor` to every rank. Differentiable.

    Args:
        tensor: of any dtype, with at least one dimension.
        splits: number of rows for each rank, which may leave rows over; an int32 tensor or a list. None: equal shares.

    Returns:
        The received rows, in rank order; with `splits`, also how many came from each rank, as an int32 tensor.
    """
    received: list[int] = []

    def send(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        rows, counts = _wait_now(_all_to_all(values[0], splits, name, process_set))
        received.extend(counts)
        return [rows]

    def send_back(grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        grad, _ = alltoall(grads[0], received, None, process_set)
        rest = grad.new_zeros(tensor.shape[0] - grad.shape[0], *tensor.shape[1:])  # rows that were not sent
        return [torch.cat([grad, rest])]

    (result,) = autograd.apply([tensor], send, send_back)
    return result if splits is None else (result, _counts(received, splits))


def alltoall_async(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Handle:
    """Start an `alltoall` without a gradient. `synchronize(handle)` returns a tuple: rows, and rows from each rank."""
    return _start(
        _all_to_all(tensor, splits, name, process_set), lambda result: (result[0], _counts(result[1], splits))
    )


def _all_to_all(
    tensor: torch.Tensor,
    splits: torch.Tensor | Sequence[int] | None,
    name: str | None,
    process_set: ProcessSet,
) -> Operation:
    here = context_of_collectives()
    _check_tensors([tensor], "alltoall")
    num_members = len(here.members(process_set))
    if tensor.dim() == 0:
        raise ValueError("alltoall takes a tensor with at least one dimension, got a scalar")
    rows = tensor.shape[0]
    if splits is None:
        if rows % num_members:
            raise ValueError(f"dimension 0 has {rows} rows, no multiple of {num_members} ranks; give splits")
        counts = [rows // num_members] * num_members
    elif isinstance(splits, torch.Tensor):
        if splits.dtype != torch.int32 or splits.dim() != 1:
            raise ValueError(f"splits is a list, or an int32 tensor of one dimension, got {splits!r}")
        counts = splits.tolist()
    else:
        counts = [operator.index(count) for count in splits]
    if len(counts) != num_members or min(counts, default=0) < 0 or sum(counts) > rows:
        raise ValueError(f"splits has a number of rows for each of {num_members} ranks, {rows} in all, got {counts}")
    return _operation(here, "alltoall", [tensor.detach()], name, process_set, splits=tuple(counts))


def _counts(received: Sequence[int], splits: torch.Tensor | Sequence[int] | None) -> torch.Tensor:
    device = splits.device if isinstance(splits, torch.Tensor) else "cpu"
    return torch.tensor(received, dtype=torch.int32, device=device)


# ---- reducescatter


def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """This rank's share of the rows of the average, or sum, of all ranks' tensors. Differentiable.

    Args:
        tensor: with at least one dimension, of the same shape on all ranks. If the rows cannot be dealt out evenly, the
            first ranks get one more.
        op: Average or Sum. For the others see `allreduce`.
    """
    return grouped_reducescatter(
        [tensor], name, compression, op, process_set, prescale_factor, postscale_factor, _kind="reducescatter"
    )[0]


def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: Any = Compression.none,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    *,
    _kind: str = "grouped_reducescatter",
) -> list[torch.Tensor]:
    """`reducescatter` of several tensors as one operation."""
    pairs = [compression.compress(tensor) for tensor in tensors]
    num_members = len(context_of_collectives().members(process_set))
    factor = prescale_factor * postscale_factor * (num_members if op == Sum else 1)

    def scatter(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return list(
            _wait_now(_reduce_scatter(tensors, name, op, prescale_factor, postscale_factor, process_set, _kind))
        )

    def gather(grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return [grad * factor for grad in grouped_allgather(grads, None, process_set)]

    outputs = autograd.apply([compressed for compressed, _ in pairs], scatter, gather)
    return [compression.decompress(output, sent) for output, (_, sent) in zip(outputs, pairs, strict=True)]


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start a `reducescatter` without a gradient."""
    operation = _reduce_scatter([tensor], name, op, prescale_factor, postscale_factor, process_set, "reducescatter")
    return _start(operation, operator.itemgetter(0))


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: int = Average,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start a `grouped_reducescatter` without gradients. `synchronize(handle)` returns a tuple."""
    return _start(
        _reduce_scatter(tensors, name, op, prescale_factor, postscale_factor, process_set, "grouped_reducescatter")
    )


def _reduce_scatter(
    tensors: Sequence[torch.Tensor],
    name: str | None,
    op: int,
    before: float,
    after: float,
    process_set: ProcessSet,
    what: str,
) -> Operation:
    here = context_of_collectives()
    label = _check_op(op, "reducescatter")
    _check_factors(before, after)
    if op not in (Average, Sum):
        raise HorovodInternalError(f"reducescatter takes op=Average or op=Sum, got {label}")
    _check_tensors(tensors, what)
    for tensor in tensors:
        if tensor.dim() == 0:
            raise ValueError("reducescatter takes tensors with at least one dimension, got a scalar")
        _check_reducible(tensor, label, "reducescatter")
        if tensor.dtype == torch.bool or tensor.is_complex():
            raise ValueError(f"reducescatter does not take {tensor.dtype}")
    arguments = {"op": label, "prescale_factor": float(before), "postscale_factor": float(after)}
    return _operation(here, "reducescatter", [tensor.detach() for tensor in tensors], name, process_set, arguments)


# ---- join, barrier, handles


def join(device: int = -1) -> int:
    """Say that this rank has no more data. Collective: returns when all ranks have joined.

    Until then, this rank takes part in the allreduces of the others, and in those of their DistributedOptimizers, with
    zeros. An average is divided by the number of all ranks all the same. Other collectives of the others, and
    SyncBatchNorm layers in training, raise HorovodInternalError.

    The others may go on for longer than the timeout. Only if there is a DistributedOptimizer, each of its steps has to
    come within the timeout after the one before.

    Args:
        device: for Horovod's signature. Zeros need no GPU.

    Returns:
        The rank that has joined last. Of several in the same moment, the highest.
    """
    here = context_of_collectives()
    arguments = {LAYERS: here.engine.turns.num_begun}
    operation = _operation(here, JOIN, [], "join", global_process_set, arguments, label="join")
    here.engine.submit(operation)  # from now on, the engine's thread contributes zeros
    if here.world.size > 1:
        group = here.world.shared(OptimizerGroup)
        group.guard.run("hvd.join()", lambda: group.follow_others(counts=True))
    return int(here.engine.wait(operation))


def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Wait until all members have called it; not for operations that were started before."""
    here = context_of_collectives()
    _wait_now(_operation(here, BARRIER, [], None, process_set, label="barrier.noname"))


def poll(handle: Handle) -> bool:
    """Whether an operation is done, so that `synchronize` would return at once. ValueError for an unknown handle."""
    here = context_of_collectives()
    if handle not in here.handles:
        raise ValueError(f"{handle!r} is no handle of an operation that was started and not synchronized yet")
    return here.handles[handle][0].is_done


@run_eagerly
def synchronize(handle: Handle) -> Any:
    """Wait for an operation, and return its result. None for a handle that was synchronized before, as in Horovod."""
    here = context_of_collectives()
    operation, result = here.handles.pop(handle, (None, None))
    if operation is None or result is None:
        return None
    return result(here.engine.wait(operation))


@run_eagerly
def _start(operation: Operation, result: Result = tuple) -> Handle:
    here = context_of_collectives()
    here.engine.submit(operation)
    handle = int(operation.handle)
    here.handles[handle] = (operation, result)
    return handle


@run_eagerly
def _wait_now(operation: Operation) -> Any:
    return context_of_collectives().engine.run(operation)


@run_eagerly
def _operation(
    here: Context,
    kind: str,
    tensors: Sequence[torch.Tensor],
    name: str | None,
    process_set: ProcessSet,
    arguments: dict[str, Any] | None = None,
    *,
    splits: tuple[int, ...] = (),
    is_inline: bool = False,
    label: str | None = None,
) -> Operation:
    here.members(process_set)
    handle = here.next_handle()  # counts calls, whether they have a name or not, as in Horovod
    if label is None:
        label = f"{kind}.{name}" if name is not None else f"{kind}.noname.{handle}"
    equal = tuple(arguments.items()) if arguments is not None else ()
    if tensors:
        equal += (("device", "CPU" if tensors[0].device.type == "cpu" else "GPU"),)
    described = tuple([(tensor.dtype, tensor.shape) for tensor in tensors])
    number = process_set.process_set_id or 0
    return Operation(request_of(kind, label, number, described, equal, splits, is_inline), tensors, handle)


def _check_op(op: int, what: str) -> str:
    if op not in _NAMES or isinstance(op, bool):
        known = ", ".join(f"hvd.{name}" for name in _NAMES.values())
        raise ValueError(f"{what} takes op, one of {known}, got {op!r}")
    return _NAMES[op]


def _check_factors(before: float, after: float) -> None:
    if math.isnan(before) or math.isnan(after):
        raise ValueError(f"scale factors are numbers, got prescale_factor={before!r}, postscale_factor={after!r}")


def _check_tensors(tensors: Sequence[torch.Tensor], what: str) -> None:
    if not len(tensors):
        raise ValueError(f"{what} got no tensors")
    for tensor in tensors:
        operations.check_dense(tensor)
    if len({tensor.device.type for tensor in tensors}) > 1:
        raise HorovodInternalError(f"{what} got tensors on the CPU and on the GPU; give it those of one device")


def _check_reducible(tensor: torch.Tensor, label: str, what: str) -> None:
    dtype = tensor.dtype
    if dtype == torch.bool and label in ("Average", "Adasum"):
        raise ValueError(f"{what} has no op={label} of booleans; use op=hvd.Sum for any, op=hvd.Min for all")
    if dtype.is_complex and label not in ("Average", "Sum"):
        raise ValueError(f"{what} of {dtype} takes op=hvd.Average or op=hvd.Sum, got {label}")
    if label == "Adasum" and not dtype.is_floating_point:
        raise ValueError(f"Adasum takes floating-point tensors, got {dtype}")
    if not (operations.is_reducible(dtype) or dtype == torch.bool or dtype in (torch.complex64, torch.complex128)):
        raise ValueError(f"{dtype} cannot be reduced")


class _Basics:
    """horovod.torch.mpi_ops._basics, of which scripts use these methods."""

    init = staticmethod(init)
    shutdown = staticmethod(shutdown)
    rank = staticmethod(rank)
    size = staticmethod(size)
    local_rank = staticmethod(local_rank)
    local_size = staticmethod(local_size)
    cross_rank = staticmethod(cross_rank)
    cross_size = staticmethod(cross_size)
    is_initialized = staticmethod(is_initialized)
    is_homogeneous = staticmethod(is_homogeneous)
    _get_process_set_ids_and_ranks = staticmethod(process_set_ids_and_ranks)


_basics: Final = _Basics()
