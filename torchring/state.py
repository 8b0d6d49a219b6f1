"""Start all ranks from the same parameters and optimizer state."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch.optim import Optimizer

from torchring.collectives import check_dense, check_writable, collectives_of
from torchring.world import default_world


def broadcast_parameters(model_or_state_dict: torch.nn.Module | Mapping[str, Any], src: int = 0) -> None:
    """Overwrite every tensor of a module (parameters and buffers) or of a mapping with that of rank `src`, in place.

    Collective; tensors on a GPU travel by way of the host. Raises TypeError for anything else, ValueError for a tensor
    that cannot be broadcast (see `check_broadcastable`) or a rank that does not exist, PlanMismatchError where ranks
    pass different tensors.
    """
    tensors = _tensors_of(model_or_state_dict)
    world = default_world()
    if not 0 <= src < world.size:
        raise ValueError(f"src must be a rank, 0 .. {world.size - 1}, got {src}")
    _check_broadcastable(tensors)
    if world.size == 1:
        return
    collectives = collectives_of(world)
    collectives.check_equal([f"tensor {i}: {n} {tuple(t.shape)} {t.dtype}" for i, (n, t) in enumerate(tensors.items())])
    collectives.broadcast_together(tensors.values(), src)


def check_broadcastable(model: torch.nn.Module) -> None:
    """Raise ValueError, with its name, for a parameter or buffer that `broadcast_parameters` cannot write to.

    Those are sparse or expanded tensors, and tensors that are neither on the CPU nor on a GPU.
    """
    _check_broadcastable(_tensors_of(model))


def _tensors_of(model_or_state_dict: Any) -> dict[str, torch.Tensor]:
    if isinstance(model_or_state_dict, torch.nn.Module):
        # Not state_dict(): non-persistent buffers are part of what a replica computes with.
        return dict(model_or_state_dict.named_parameters()) | dict(model_or_state_dict.named_buffers())
    if isinstance(model_or_state_dict, Mapping):
        return {name: value for name, value in model_or_state_dict.items() if isinstance(value, torch.Tensor)}
    raise TypeError(f"expected a torch.nn.Module or a mapping, got {type(model_or_state_dict).__name__}")


def _check_broadcastable(tensors: Mapping[str, torch.Tensor]) -> None:
    for name, tensor in tensors.items():
        try:
            check_dense(tensor)
            check_writable(tensor)
        except ValueError as error:
            raise ValueError(f"{name} cannot be broadcast: {error}") from None


def broadcast_optimizer_state(optimizer: Optimizer, src: int = 0) -> None:
    """Load rank `src`'s state and hyperparameters into `optimizer` on the other ranks.

    Collective. The bytes that arrive are loaded with torch.load(weights_only=True), so they cannot run code.
    """
    world = default_world()
    if world.size == 1:
        return
    buffer = io.BytesIO()
    torch.save(_plain(optimizer.state_dict()), buffer)
    mine = buffer.getvalue()
    theirs = collectives_of(world).broadcast_bytes(mine if world.rank == src else None, src)
    if world.rank != src and theirs != mine:
        optimizer.load_state_dict(torch.load(io.BytesIO(theirs), map_location="cpu", weights_only=True))


def _plain(value: Any) -> Any:
    """Numpy's numbers as Python's, which weights_only loading accepts (a learning rate may well be an np.float64)."""
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_plain, value)) if type(value) in (list, tuple) else value
    return value.item() if isinstance(value, np.generic) else value
