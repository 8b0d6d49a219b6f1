"""Objects, parameters and optimizer state from one rank to all: horovod.torch.functions."""

import pickle
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from torchring.horovod.context import ProcessSet, engine, global_process_set
from torchring.horovod.mpi_ops import allgather, allgather_async, broadcast_, broadcast_of, synchronize
from torchring.initial_state import broadcast_optimizer_state as broadcast_state_of
from torchring.launch.task import dumps
from torchring.memory.host import tensor_of
from torchring.optimizer import DistributedOptimizer

__all__ = ["allgather_object", "broadcast_object", "broadcast_optimizer_state", "broadcast_parameters"]


def broadcast_parameters(
    params: Mapping[str, Any] | Iterable[Any], root_rank: int, process_set: ProcessSet = global_process_set
) -> None:
    """Overwrite tensors with those of the global rank `root_rank`, in place, as one operation.

    `params` is `model.state_dict()`, or (name, tensor) pairs such as `model.named_parameters()`, or tensors. Values of
    a dictionary that are no tensors are left alone.
    """
    if isinstance(params, torch.Tensor) or not isinstance(params, Iterable):
        raise ValueError(f"broadcast_parameters takes a state_dict() or parameters, got {type(params).__name__}")
    items = sorted(params.items()) if isinstance(params, Mapping) else list(params)
    tensors = [item[1] if isinstance(item, tuple) and len(item) == 2 else item for item in items]
    if not isinstance(params, Mapping) and (wrong := [t for t in tensors if not isinstance(t, torch.Tensor)]):
        raise ValueError(f"broadcast_parameters takes tensors or (name, tensor) pairs, got {type(wrong[0]).__name__}")
    tensors = [tensor for tensor in tensors if isinstance(tensor, torch.Tensor)]
    if tensors:
        broadcast_of(tensors, root_rank, "parameters", process_set).wait_in_place()


def broadcast_optimizer_state(
    optimizer: torch.optim.Optimizer, root_rank: int, model: torch.nn.Module | None = None
) -> None:
    """Give `optimizer` the state and the options of that of rank `root_rank`. Collective.

    The ranks' own optimizers may have no state yet. Gradients that are None become zero, as in Horovod.
    """
    plain = optimizer.optimizer if isinstance(optimizer, DistributedOptimizer) else optimizer
    if isinstance(plain, torch.optim.LBFGS):
        raise ValueError("the state of torch.optim.LBFGS cannot be broadcast")
    engine()
    broadcast_state_of(plain, root_rank)
    for group in plain.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)


def broadcast_object(
    obj: Any = None, root_rank: int = 0, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """The picklable `obj` of rank `root_rank`, on all ranks. The argument of other ranks is ignored.

    Pickled by cloudpickle, where it is installed. Ranks trust each other: unpickling can run code.
    """
    name = "object" if name is None else name
    is_root = engine().world.rank == root_rank
    data = tensor_of(dumps(obj) if is_root else b"")
    length = broadcast_(torch.tensor([len(data)], device="cpu"), root_rank, f"{name}.sz", process_set)
    if not is_root:
        data = torch.empty(int(length), dtype=torch.uint8, device="cpu")
    broadcast_(data, root_rank, f"{name}.t", process_set)
    return obj if is_root else pickle.loads(data.numpy().tobytes())


def allgather_object(obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set) -> list[Any]:
    """The picklable `obj` of every rank, in rank order. See `broadcast_object`."""
    name = "object" if name is None else name
    data = tensor_of(dumps(obj))
    lengths = allgather_async(torch.tensor([len(data)], device="cpu"), f"{name}.sz", process_set)
    gathered = allgather(data, f"{name}.t", process_set)
    parts = torch.split(gathered, synchronize(lengths).tolist())
    return [pickle.loads(part.numpy().tobytes()) for part in parts]
