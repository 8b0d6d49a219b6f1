"""Collectives for scripts: metrics, batch counts, early stopping, objects.

They act on all ranks, or on those of `group`, see `wrap`; ranks then are positions in the group. All ranks of a group
call them in the same order.

A blocking call returns when this rank's result is there. With `async_op=True` a background thread runs the collective,
and the tensor belongs to torchring until `Work.wait()` returns. Collectives, blocking or not, run in the order of the
calls. Threads of one rank take turns, in an order that should be the same on all ranks.

Ranks of one host exchange bytes through shared memory. Between hosts Gloo moves the bytes, in a process group of
torchring's own. For tensors on GPUs, NCCL does: the host waits for the other ranks' hosts, and not for the GPU, but in
"adasum". The current stream waits for the result, with `async_op=True` that of `Work.wait()`. A result that a lost rank
has spoilt is NaN, and the next call raises the error. What NCCL cannot do goes through the CPU: see
`devices/collectives.py`.
"""

from __future__ import annotations

import operator
import pickle
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import Any, Final, Literal, TypeVar, cast, get_args, overload

import torch

from torchring import adasum
from torchring.accelerators import accelerator_of
from torchring.broadcasts import broadcast_bytes, check_dense, check_writable
from torchring.collectives import operations
from torchring.collectives.operations import Backend
from torchring.collectives.service import CALLED, SHUT_DOWN, Collectives, collectives_of
from torchring.collectives.signature import ELEMENTWISE_OPS, ElementwiseOp, signature_of
from torchring.default_world import world_of
from torchring.dynamo import run_eagerly
from torchring.errors import PeerLostError
from torchring.rooms import room
from torchring.world import Group, World

_T = TypeVar("_T")
Op = Literal["mean", "sum", "min", "max", "product", "adasum"]
_OPS: Final = get_args(Op)
REDUCIBLE = (
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
)  # fmt: skip


class Work:
    """A collective that has been started with `async_op=True`."""

    def __init__(self, future: Future[Any], aside: Any = None) -> None:
        self._future = future
        self._aside = aside

    @run_eagerly
    def wait(self) -> torch.Tensor:
        """Block until the collective is done. Returns its result, or raises its error.

        On a GPU: until it is launched. The current stream waits for the result.
        """
        try:
            result = self._future.result()
        except CancelledError:
            raise PeerLostError(SHUT_DOWN) from None
        if self._aside is not None:
            self._aside.wait(result[:1] if isinstance(result, tuple) else [result])
        return cast(torch.Tensor, result)

    def is_completed(self) -> bool:
        """True if `wait` would return at once."""
        return self._future.done()


@overload
def all_reduce(
    tensor: torch.Tensor, op: Op = "mean", async_op: Literal[False] = False, *, group: Group | None = None
) -> torch.Tensor: ...
@overload
def all_reduce(
    tensor: torch.Tensor, op: Op = "mean", *, async_op: Literal[True], group: Group | None = None
) -> Work: ...


def all_reduce(
    tensor: torch.Tensor, op: Op = "mean", async_op: bool = False, *, group: Group | None = None
) -> torch.Tensor | Work:
    """Combine `tensor` over all ranks, in place.

    Args:
        tensor: of any shape and strides, on the CPU on every rank, or on CUDA; shape and dtype are equal, too. The
            dtype is fp16, bf16, fp32, fp64 or an integer dtype. 16-bit values are combined in fp32 and rounded once.
        op: "mean", "sum", "min", "max", "product" or "adasum". "mean" and "adasum" take floating point only.
            "adasum" (Maleki et al. 2021) is the mean of parallel tensors, and the sum of orthogonal ones, in a binary
            tree of the ranks of each host, and then of the hosts. Scalar products are in fp64.
        async_op: return a `Work` at once.
        group: of these ranks. See `wrap`. Opened now if it is not open.

    Returns:
        `tensor`, with the same bits on every rank, or a `Work` whose `wait()` returns it.

    Raises:
        ValueError: the op is unknown, the tensor is sparse, expanded or on another device, or this rank is not in the
            group.
        TypeError: the dtype cannot be combined.
        PlanMismatchError: another rank calls another collective, or with another shape, dtype or op.
        PeerLostError: another rank died or left.
        PeerTimeoutError: another rank did not call the collective within the timeout.
    """
    check_dense(tensor)
    check_writable(tensor)
    check_reducible(tensor, op, _OPS)
    if op == "adasum":
        adasum.check(tensor)
        world = world_of(group)
        return _dispatch("all_reduce", world, tensor, async_op, adasum.all_reduce, tensor, world.hosts)
    return _dispatch("all_reduce", world_of(group), tensor, async_op, operations.all_reduce, tensor, op)


@overload
def broadcast(
    tensor: torch.Tensor, src: int = 0, async_op: Literal[False] = False, *, group: Group | None = None
) -> torch.Tensor: ...
@overload
def broadcast(tensor: torch.Tensor, src: int = 0, *, async_op: Literal[True], group: Group | None = None) -> Work: ...


def broadcast(
    tensor: torch.Tensor, src: int = 0, async_op: bool = False, *, group: Group | None = None
) -> torch.Tensor | Work:
    """Overwrite `tensor` with that of rank `src`, in place.

    Args:
        tensor: on the CPU or CUDA, of any dtype; the shape is equal on every rank.
        src: the rank whose values all ranks get. ValueError if there is no such rank.
        async_op: return a `Work` at once.
        group: of these ranks, among which `src` counts.

    Returns:
        `tensor`, or a `Work` whose `wait()` returns it. Raises what `all_reduce` raises.
    """
    check_dense(tensor)
    check_writable(tensor)
    world = _world_with(src, group)
    return _dispatch("broadcast", world, tensor, async_op, operations.broadcast, tensor, src)


@overload
def all_gather(
    tensor: torch.Tensor, async_op: Literal[False] = False, *, group: Group | None = None
) -> torch.Tensor: ...
@overload
def all_gather(tensor: torch.Tensor, async_op: Literal[True], *, group: Group | None = None) -> Work: ...


def all_gather(tensor: torch.Tensor, async_op: bool = False, *, group: Group | None = None) -> torch.Tensor | Work:
    """Concatenate the tensors of all ranks along dimension 0, in rank order.

    Args:
        tensor: on the CPU or CUDA, of any dtype. Only the size of dimension 0 may differ between ranks. 0-dim tensors
            become a vector of size(group).
        async_op: return a `Work` at once.
        group: of these ranks.

    Returns:
        A new tensor, or a `Work` whose `wait()` returns it. Has no gradient. Raises what `all_reduce` raises.
    """
    check_dense(tensor)
    gather = operations.all_gather
    return _dispatch(
        "all_gather", world_of(group), tensor, async_op, lambda backend: torch.cat(gather(backend, tensor))
    )


@overload
def reduce_scatter(
    tensor: torch.Tensor, op: ElementwiseOp = "mean", async_op: Literal[False] = False, *, group: Group | None = None
) -> torch.Tensor: ...
@overload
def reduce_scatter(
    tensor: torch.Tensor, op: ElementwiseOp = "mean", *, async_op: Literal[True], group: Group | None = None
) -> Work: ...


def reduce_scatter(
    tensor: torch.Tensor, op: ElementwiseOp = "mean", async_op: bool = False, *, group: Group | None = None
) -> torch.Tensor | Work:
    """Combine `tensor` over all ranks, and return this rank's share of dimension 0.

    If dimension 0 is not a multiple of size(group), the first ranks get one row more, as in Horovod. Values are
    combined in rank order, 16-bit values in fp32.

    Args:
        tensor: as for `all_reduce`, but at least 1-dim. It does not change.
        op: "mean", "sum", "min", "max" or "product".
        async_op: return a `Work` at once.
        group: of these ranks.

    Returns:
        A new tensor, or a `Work` whose `wait()` returns it. Raises what `all_reduce` raises.
    """
    check_dense(tensor)
    check_reducible(tensor, op)
    if tensor.dim() == 0 or not tensor.shape[1:].numel():
        raise ValueError(f"reduce_scatter deals out rows of at least one element, got {tuple(tensor.shape)}")
    signature = signature_of("reduce_scatter", [tensor], f"op={op!r}")
    world = world_of(group)
    given = tensor, world.size, op, signature
    return _dispatch("reduce_scatter", world, tensor, async_op, operations.reduce_scatter, *given)


@overload
def all_to_all(
    tensor: torch.Tensor, splits: None = None, async_op: Literal[False] = False, *, group: Group | None = None
) -> torch.Tensor: ...
@overload
def all_to_all(
    tensor: torch.Tensor, splits: Sequence[int], async_op: Literal[False] = False, *, group: Group | None = None
) -> tuple[torch.Tensor, list[int]]: ...
@overload
def all_to_all(
    tensor: torch.Tensor, splits: Sequence[int] | None = None, *, async_op: Literal[True], group: Group | None = None
) -> Work: ...


def all_to_all(
    tensor: torch.Tensor, splits: Sequence[int] | None = None, async_op: bool = False, *, group: Group | None = None
) -> Any:
    """Send a slice of dimension 0 to every rank, and concatenate the received slices in rank order. Any dtype.

    Args:
        tensor: on the CPU or CUDA, at least 1-dim; only dimension 0 may differ between ranks.
        splits: number of rows for each rank, which add up to all rows; by default equal shares.
        async_op: return a `Work` at once.
        group: of these ranks.

    Returns:
        The received rows; with `splits`, a tuple of these and of the number of rows from each rank, as in Horovod.

    Raises:
        ValueError: `splits` does not fit. Otherwise what `all_reduce` raises.
    """
    check_dense(tensor)
    world = world_of(group)
    if tensor.dim() == 0 or not tensor.shape[1:].numel():
        raise ValueError(f"all_to_all splits dimension 0 into rows of at least one element, got {tuple(tensor.shape)}")
    num_rows = tensor.shape[0]
    if splits is None:
        if num_rows % world.size:
            raise ValueError(f"dimension 0 has {num_rows} rows, not a multiple of {world.size} ranks; pass splits")
        shares = [num_rows // world.size] * world.size
    else:
        shares = [operator.index(share) for share in splits]  # TypeError for 3.5
        if len(shares) != world.size or sum(shares) != num_rows or min(shares) < 0:
            raise ValueError(f"splits need {world.size} counts that add up to {num_rows} rows, got {shares}")

    def operation(backend: Backend) -> Any:
        signature = signature_of("all_to_all", [tensor], any_rows=True)
        parts, counts = operations.all_to_all(backend, tensor, shares, signature)
        return torch.cat(parts) if splits is None else (torch.cat(parts), counts)

    return _dispatch("all_to_all", world, tensor, async_op, operation)


def barrier(*, group: Group | None = None) -> None:
    """Wait until all ranks of `group` have called `barrier`.

    Raises PlanMismatchError, PeerLostError and PeerTimeoutError.
    """
    _opened("barrier", world_of(group)).barrier()


def broadcast_object(obj: _T | None, src: int = 0, *, group: Group | None = None) -> _T:
    """The picklable `obj` of rank `src` of `group`, on every rank of it. The argument of other ranks is ignored.

    The bytes of rank `src` are unpickled, which can run code of its choosing: ranks trust each other.
    """
    world = _world_with(src, group)
    data = broadcast_bytes(_opened("broadcast_object", world), pickle.dumps(obj) if world.rank == src else None, src)
    return cast(_T, obj if world.rank == src else pickle.loads(data))


def all_gather_object(obj: _T, *, group: Group | None = None) -> list[_T]:
    """The picklable `obj` of every rank of `group`, in rank order.

    Their bytes are unpickled, which can run code that the sender chooses: ranks trust each other.
    """
    world = world_of(group)
    parts = _opened("all_gather_object", world).all_gather_bytes(pickle.dumps(obj))
    return [obj if rank == world.rank else pickle.loads(part) for rank, part in enumerate(parts)]


@run_eagerly
def _dispatch(
    what: str,
    world: World,
    tensor: torch.Tensor,
    async_op: bool,
    operation: Callable[..., torch.Tensor],
    *arguments: Any,
) -> torch.Tensor | Work:
    """Run `operation(backend, *arguments)` on `tensor`, now or on the background thread."""
    collectives, aside = _opened(what, world), None
    if (accelerator := accelerator_of(tensor.device)) is not None:
        devices = room("device collectives")
        aside, of_script = devices.Aside(accelerator, [tensor]), world.shared(devices.of_script)
        of_caller, operation = operation, lambda backend, *given: of_caller(of_script.instead_of(backend), *given)
        if async_op:
            operation = partial(of_script.run_aside, [aside], operation)
    if async_op:
        return Work(collectives.start(what, operation, *arguments), aside)
    return collectives.run(what, operation, *arguments)


def _opened(what: str, world: World) -> Collectives:
    """The collectives for `what`, which the error names if another rank's script has ended without them."""
    try:
        return collectives_of(world)
    except PeerLostError as error:
        error.message = error.message.replace(world.advice, CALLED.format(what))
        raise


def _world_with(src: int, group: Group | None) -> World:
    """The world of the group. Raises ValueError if it has no rank `src`."""
    world = world_of(group)
    if not isinstance(src, int) or not 0 <= src < world.size:
        raise ValueError(
            f"src must be a rank{' of the group' if world.members else ''}, 0 .. {world.size - 1}, got {src!r}"
        )
    return world


def check_reducible(tensor: torch.Tensor, op: str, ops: Sequence[str] = ELEMENTWISE_OPS) -> None:
    if op not in ops:
        raise ValueError(f"op must be one of {', '.join(map(repr, ops))}, got {op!r}")
    if tensor.dtype not in REDUCIBLE:
        raise TypeError(f"{tensor.dtype} cannot be reduced; these can: {', '.join(map(str, REDUCIBLE))}")
    if op == "mean" and not tensor.is_floating_point():
        raise TypeError(f"the mean of {tensor.dtype} is not of that dtype; use op='sum', or convert to floating point")
