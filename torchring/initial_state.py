"""Start all ranks from the same parameters and optimizer state."""

from __future__ import annotations

import hashlib
import io
import pickle
import sys
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any, Final, Protocol

import numpy as np
import torch
from torch.optim import Optimizer

from torchring.broadcasts import broadcast_bytes, broadcast_together, check_dense, check_writable, is_movable
from torchring.collectives.service import collectives_of
from torchring.default_world import default_world, world_of
from torchring.gradients.validation import parameters_of
from torchring.gradients.views import local_of, whole_of
from torchring.participants.digests import digests
from torchring.rooms import room
from torchring.world import Group, World

_ADVICE_AT_START: Final = (
    "Set it after torchring.wrap, or pass sync_initial_state=False to torchring.wrap if all ranks start alike"
)
_DICTS: Final = (dict, OrderedDict, Counter)  # that torch.load(weights_only=True) gives back; others become dicts


def broadcast_parameters(
    model_or_state_dict: torch.nn.Module | Mapping[str, Any], src: int = 0, *, group: Group | None = None
) -> None:
    """Overwrite the tensors of a module or of a mapping with those of rank `src`, in place. Collective.

    Args:
        model_or_state_dict: a module, whose parameters and buffers are meant, or a mapping of names to tensors. Tensors
            are on the CPU or on a GPU; those on a GPU travel through CPU memory.
        src: the rank whose values all ranks get.
        group: of these ranks, among which `src` counts. See `wrap`.

    Raises:
        TypeError: `model_or_state_dict` is something else.
        ValueError: `src` is no rank, or a tensor is sparse, expanded or on another device; names the tensor.
        PlanMismatchError: ranks pass different tensors.
    """
    world = world_of(group)
    tensors = check_broadcastable(model_or_state_dict, world)
    if not 0 <= src < world.size:
        raise ValueError(f"src must be a rank, 0 .. {world.size - 1}, got {src}")
    _broadcast(world, tensors, src)


def _broadcast(world: World, tensors: Mapping[str, torch.Tensor], src: int) -> None:
    if world.size == 1:
        return
    collectives = collectives_of(world)
    kinds = (f"{name} {tuple(t.shape)} {t.dtype}{getattr(t, 'place', '')}" for name, t in tensors.items())
    collectives.check_equal([f"tensor {i}: {kind}" for i, kind in enumerate(kinds)])
    broadcast_together(collectives, tensors.values(), src, "broadcast_parameters")


def copy_from(world: World, src: int, tensors: Mapping[str, torch.Tensor], optimizer: Optimizer | None = None) -> None:
    """Collective: overwrite `tensors` and the state of `optimizer` with those of rank `src` of `world`."""
    _broadcast(world, check_broadcastable(tensors), src)
    if optimizer is not None and not is_sharded(optimizer):  # or else each rank has loaded its part
        broadcast_state(optimizer, src, world)


def ignored_tensors(
    ignore: Sequence[str | torch.nn.Module | torch.Tensor],
    model: torch.nn.Module | None,
    names: Mapping[torch.nn.Parameter, str],
    world: World,
) -> set[torch.Tensor]:
    """The parameters and buffers that `wrap(ignore=...)` means. `names`: of the optimizer's parameters."""
    if isinstance(ignore, (str, torch.Tensor, torch.nn.Module)):
        raise TypeError(f"ignore takes a list of names, modules and parameters, got a {type(ignore).__name__}")
    if ignore and model is None:
        raise ValueError("ignore takes parts of the model, so pass the model to torchring.wrap(), too")
    if ignore and world.is_provisional:
        raise ValueError("ignore does not work in elastic jobs, where new workers get all that others have")
    everything: dict[str, torch.Tensor | torch.nn.Module] = {}
    for found in () if model is None else (model.named_modules, model.named_parameters, model.named_buffers):
        everything |= dict(found(remove_duplicate=False))
    ids = set(map(id, everything.values()))
    ignored: set[torch.Tensor] = set()
    for each in ignore:
        part = everything.get(each) if isinstance(each, str) else each
        if not isinstance(each, (str, torch.nn.Module, torch.Tensor)):
            raise TypeError(f"ignore takes names, modules and parameters, got a {type(each).__name__}")
        if part is None or id(part) not in ids:
            what = repr(each) if isinstance(each, str) else f"a {type(each).__name__}"
            raise ValueError(f"ignore has {what}, which is no parameter, buffer or module of the model")
        parts = (*part.parameters(), *part.buffers()) if isinstance(part, torch.nn.Module) else (part,)
        ignored.update(map(local_of, parts))
    if (name := next((name for p, name in names.items() if p in ignored), None)) is not None:
        raise ValueError(
            f"{name} is ignored, and in the optimizer, whose parameters are equal on all ranks; give what belongs to a "
            "rank an optimizer of its own that is not wrapped"
        )
    return ignored


def check_broadcastable(
    model_or_state_dict: Any, world: World | None = None, advice: str = ""
) -> dict[str, torch.Tensor]:
    """The tensors of a module or of a mapping, by name. `advice` ends the message of an error.

    Raises ValueError, with its name, for one that `broadcast_parameters` cannot write to: it is sparse or expanded, or
    neither on the CPU nor on a GPU; or a DTensor of which ranks of `world` have different parts.
    """
    if isinstance(model_or_state_dict, torch.nn.Module):
        # Not state_dict(): non-persistent buffers are part of what a replica computes with.
        tensors = dict(model_or_state_dict.named_parameters()) | dict(model_or_state_dict.named_buffers())
    elif isinstance(model_or_state_dict, Mapping):
        tensors = {name: value for name, value in model_or_state_dict.items() if isinstance(value, torch.Tensor)}
    else:
        raise TypeError(f"expected a torch.nn.Module or a mapping, got {type(model_or_state_dict).__name__}")
    tensors = {name: local_of(tensor) for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        try:
            check_dense(tensor)
            check_writable(tensor)
            if world is not None and tensor is not whole_of(tensor):
                room("mesh").common_dimensions(tensor, name, world)
        except ValueError as error:
            raise ValueError(f"{name} cannot be broadcast: {error}{advice}") from None
    return tensors


class Stateful(Protocol):
    """An object that a checkpoint can hold."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


def broadcast_optimizer_state(optimizer: Optimizer, src: int = 0, *, group: Group | None = None) -> None:
    """Load rank `src`'s state and hyperparameters into `optimizer` on the other ranks. Collective.

    If all ranks have the same state, only a digest is sent. Values that are not tensors are loaded with
    torch.load(weights_only=True), so received bytes cannot run code.

    Args:
        optimizer: the same kind of optimizer, over the same parameters, on every rank.
        src: the rank whose state all ranks get.
        group: of these ranks, among which `src` counts. See `wrap`.

    Raises:
        TypeError: a value cannot be sent; names its place in the optimizer's state_dict().
        ValueError: the state belongs to another optimizer, or each rank has a part of it (ZeroRedundancyOptimizer).
        PlanMismatchError: another rank failed.
    """
    if is_sharded(optimizer):
        raise ValueError(
            "each rank has a part of the state (of a ZeroRedundancyOptimizer, or with shard=True), so no rank has "
            "what the others need; load a checkpoint on all ranks instead"
        )
    broadcast_state(optimizer, src, world_of(group))


def is_sharded(optimizer: object) -> bool:
    """True if each rank has a part of the optimizer's state: of ZeroRedundancyOptimizer, or with shard=True."""
    if getattr(optimizer, "_shards", None) is not None:
        return True
    module = sys.modules.get("torch.distributed.optim")  # which has been imported if there is such an optimizer
    kind = getattr(module, "ZeroRedundancyOptimizer", None)
    return kind is not None and isinstance(optimizer, kind)


def check_sendable(stateful: Stateful) -> None:
    """Raise TypeError, with its place, for a value that `broadcast_state` could not send."""
    advice = "Leave it out, and restore it on all ranks after the with block"
    _send(_name_of(stateful), outline_of(stateful.state_dict(), {}), _save_and_load, advice)


def broadcast_state(stateful: Stateful, src: int = 0, world: World | None = None) -> None:
    """Like `broadcast_optimizer_state`, for any object with a state_dict, such as a scheduler. Collective."""
    world = world or default_world()
    if world.size == 1:
        return
    collectives = collectives_of(world)
    name = _name_of(stateful)
    is_src = world.rank == src
    mine: dict[str, torch.Tensor] = {}
    outline = outline_of(stateful.state_dict(), mine)
    with collectives.together(f"could not send its {name}'s state"):
        own_data = _send(name, outline, save_plain)
    digest = hashlib.sha256(own_data + digests(mine.values()).numpy().tobytes()).digest()
    if len(set(collectives.all_gather_bytes(digest))) == 1:
        return
    with collectives.together(f"could not send its {name}'s state"):
        if is_src:
            _send(name, outline, _save_and_load)
    data = broadcast_bytes(collectives, own_data, src)
    wanted = mine if is_src else {}
    with collectives.together(f"could not read its {name}'s state"):
        state: Any = None if is_src else fill_outline(load_plain(data), mine, wanted)
    broadcast_together(collectives, wanted.values(), src)
    if not is_src and isinstance(stateful, Optimizer):
        keys = chain.from_iterable(group["params"] for group in state["param_groups"])
        parameter: Any
        for key, parameter in zip(keys, parameters_of(stateful), strict=False):
            if key in state["state"] and parameter is not whole_of(parameter):
                state["state"][key] = parameter.state_of_whole(state["state"][key])
    with collectives.together(f"could not load its {name}'s state"):
        if not is_src:
            stateful.load_state_dict(state)


def _name_of(stateful: Stateful) -> str:
    return "optimizer" if isinstance(stateful, Optimizer) else type(stateful).__name__


def mapped(value: Any, function: Callable[[str, Any], Any], place: str = "") -> Any:
    """A copy of a state in which `function` replaces what is no dict, list or tuple, given the place of each.

    A place is what Python writes: param_groups[0]['lr'].
    """
    if isinstance(value, dict):
        items = {key: mapped(item, function, f"{place}[{key!r}]" if place else str(key)) for key, item in value.items()}
        return type(value)(items) if type(value) in _DICTS else items
    if type(value) in (list, tuple):
        return type(value)(mapped(item, function, f"{place}[{i}]" if place else str(i)) for i, item in enumerate(value))
    return function(place, value)


def outline_of(state: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """A copy of a state_dict in which tensors have no values; those are put into `tensors`, by their place.

    Numpy's numbers become Python's, which weights_only loading accepts (a learning rate may well be an np.float64).
    """

    def outline(place: str, value: Any) -> Any:
        local = local_of(value)
        is_plain = type(value) is torch.Tensor or local is not value
        if is_plain and local.layout == torch.strided and is_movable(local.device):
            tensors[place] = local.contiguous() if 0 in local.stride() else local  # an expanded one cannot be written
            return tensors[place].to("meta")
        return value.item() if isinstance(value, np.generic) else value

    return mapped(state, outline)


def fill_outline(outline: Any, mine: Mapping[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> Any:
    """The state_dict of an outline; its tensors, also put into `wanted`, are this rank's own where they fit."""

    def fill(place: str, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.is_meta:
            return value
        own = mine.get(place)
        if own is None or own.shape != value.shape or own.dtype != value.dtype:
            own = torch.empty_like(value, device="cpu")
        wanted[place] = own
        return whole_of(own)

    return mapped(outline, fill)


def save_plain(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def load_plain(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


def _save_and_load(value: Any) -> Any:
    return load_plain(save_plain(value))


def _send(owner: str, outline: Any, send: Callable[[Any], Any], advice: str = _ADVICE_AT_START) -> Any:
    """`send(outline)`. If that fails, raise TypeError, which names the value with which it fails."""
    try:
        return send(outline)
    except Exception as error:
        what, cause = f"the {owner}'s state", error
    leaves: list[tuple[str, Any]] = []
    mapped(outline, lambda place, value: leaves.append((place, value)))
    for place, value in leaves:
        try:
            send(value)
        except Exception as error:
            what, cause = f"{place} of the {owner}, of type {type(value).__name__},", error
            break
    reason = str(cause).partition("\n")[0]
    if isinstance(cause, pickle.UnpicklingError):  # whose own text takes a page
        reason = "torch.load(weights_only=True) does not accept it"
    raise TypeError(f"{what} cannot be sent to other ranks: {reason}. {advice}") from cause
