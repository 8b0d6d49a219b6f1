"""The tensors that a script sees as `.grad`. Each lies in a wire buffer, but is a tensor in its own right, not a view.

A script may keep a gradient over `zero_grad(set_to_none=True)`, to log the gradient or to combine it with the next one
(PCGrad). Plain PyTorch makes a new gradient for the next backward, so the kept one keeps its values. torchring writes
the next gradient to the same place in the buffer. Before torchring does so, `referenced` finds the gradients that the
script still refers to, and `move_out` moves these gradients to a copy. If the script refers to no gradient, nothing is
copied.

Every gradient has a storage and a version counter of its own. So a kept gradient does not keep the other gradients of
the buffer, `torch.save` writes one gradient instead of the whole buffer, and `grad.detach_()` works, which fails on
views.
"""

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch.utils import dlpack

from torchring.rooms import room

# Private names of PyTorch's, which CUDA graph trees use for the same purpose. PyTorch 2.11 cannot swap: tensors that
# share a kept gradient's memory (`p.grad.detach()`) could not move with it. So gradients do not live in wires there.
num_owners: Callable[[int], int] = torch._C._storage_Use_Count
CAN_SWAP: Final = hasattr(torch.UntypedStorage, "_swap_data_ptr_")


def gradient_view(piece: torch.Tensor, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """The memory of the flat tensor `piece`, as a tensor that autograd does not take for a view.

    `dtype` may be the complex dtype of the real numbers in `piece`. The memory lives as long as the result.
    """
    storage = dlpack.from_dlpack(dlpack.to_dlpack(piece)).untyped_storage()  # type: ignore[attr-defined]
    return _shaped(storage, piece.new_empty(0, dtype=dtype), shape, stride)


def place_of(
    wire: torch.Tensor, offset: int, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype, *, is_grad: bool
) -> torch.Tensor:
    """The place at `offset` in the wire buffer of a gradient with this shape, stride and dtype.

    If it is not to become the gradient, complex numbers are real numbers in the shape of `as_real`.
    """
    if is_grad:
        numel = math.prod(shape) * (2 if dtype.is_complex else 1)
        return gradient_view(wire[offset : offset + numel], shape, stride, dtype)
    if dtype.is_complex:
        shape, stride = (*shape, 2), (*(2 * step for step in stride), 1)
    return wire.as_strided(shape, stride, wire.storage_offset() + offset)


def as_real(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or its real and imaginary parts in a last dimension of 2."""
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def storage_of(view: torch.Tensor) -> int:
    """Identifies the storage of a gradient for `referenced`, for as long as the gradient lives."""
    return int(view.untyped_storage()._cdata)


def referenced(
    views: Sequence[torch.Tensor], storages: Sequence[int], free: tuple[int, int] | None = None
) -> list[int]:
    """Positions of the gradients that somebody else has, or whose memory another tensor shares.

    Args:
        views: the gradients. This list and one other list refer to each gradient, and nothing else in torchring does.
        storages: `storage_of` each gradient.
        free: references and owners of a gradient that nobody else has. Default: of one that is in no `.grad`.

    Takes 45 ns for each gradient.
    """
    most_references, most_owners = free or _FREE
    references, owners = list(map(sys.getrefcount, views)), list(map(num_owners, storages))
    if max(references) == most_references and max(owners) == most_owners:
        return []
    return [i for i in range(len(views)) if references[i] > most_references or owners[i] > most_owners]


def referenced_beside_grad(grads: Sequence[torch.Tensor]) -> list[int]:
    """As `referenced`, of gradients each of which is in the `.grad` of its parameter."""
    return referenced(grads, list(map(storage_of, grads)), _FREE_IN_GRAD)


def move_out(view: torch.Tensor, wire: torch.Tensor) -> torch.Tensor:
    """A new tensor in the place of `view` in the buffer. `view`, and all that shares its memory, moves to a copy.

    A numpy array that was made from `view` cannot be moved: the array goes on showing the buffer, and keeps it alive.
    """
    copy = _copy(view, wire)
    view.untyped_storage()._swap_data_ptr_(copy)  # type: ignore[attr-defined]
    return _shaped(copy, view.new_empty(0), view.shape, view.stride())


class _Holding(np.ndarray):
    """Memory that keeps `wire` alive, too: an array may still point there."""

    wire: torch.Tensor


def _copy(view: torch.Tensor, wire: torch.Tensor) -> torch.UntypedStorage:
    storage = view.untyped_storage()
    if view.device.type != "cpu":
        return view.clone().untyped_storage()
    memory: Any = np.empty(storage.nbytes(), dtype=np.uint8).view(_Holding)
    memory.wire = wire
    return torch.from_numpy(memory).untyped_storage().copy_(storage)


def _shaped(
    storage: torch.UntypedStorage, tensor: torch.Tensor, shape: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    return tensor.set_(storage, 0, tuple(shape), tuple(stride))


def local_of(tensor: torch.Tensor) -> Any:
    """What is reduced, compared and sent of a tensor: itself, or what this rank has of a DTensor."""
    dtensor = getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())
    return room("mesh").local_of(tensor) if isinstance(tensor, dtensor) else tensor


def whole_of(parameter: torch.Tensor) -> Any:
    """The tensor that `local_of` was given."""
    return getattr(parameter, "whole", parameter)


def _free(has_another_owner: bool) -> tuple[int, int]:
    """What `referenced` counts of a gradient that nobody else has, or only C++."""
    kept = [torch.empty(1, device="cpu")]
    passed = [kept[0]]
    owner = torch.empty(1, device="cpu", requires_grad=True)
    if has_another_owner:
        owner.grad = passed[0]
    return next(map(sys.getrefcount, passed)), num_owners(storage_of(passed[0]))


_FREE, _FREE_IN_GRAD = _free(False), _free(True)
