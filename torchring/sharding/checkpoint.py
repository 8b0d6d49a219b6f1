"""Ordinary checkpoints of a sharded optimizer: the whole state, by parameter, as the plain optimizer has it.

A checkpoint knows no shard and no number of ranks. So any number of ranks can go on from it, and a plain optimizer,
too. Beside the result, a rank holds 64 MiB while state is gathered, and the state of one parameter while it is dealt
out.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeVar, cast

import torch

from torchring.collectives.initial_state import fill_outline, load_plain, outline_of, save_plain
from torchring.collectives.service import internal_collectives_of
from torchring.errors import in_step, ranks_in_words
from torchring.memory.heap import trim
from torchring.sharding.kinds import Kind, is_scalar
from torchring.sharding.shard import Shard, by_parameter, flat, laid_out_as, num_bytes_of
from torchring.sharding.shard_tensor import ShardTensor
from torchring.sharding.step import Shards
from torchring.sharding.together import begin_together

_BYTES_AT_ONCE: Final = 64 << 20  # that are gathered; or one shard

_V = TypeVar("_V")
Entry = dict[str, Any]  # the state of one parameter, or of one shard
State = dict[torch.Tensor, Entry]
Tensors = dict[str, torch.Tensor]  # of an entry, by their places in it
Outline = Entry  # an entry whose tensors have no values, but those that `is_scalar`
Rows = dict[int, list[tuple[int, int, Outline]]]  # the shards of a rank that have state, by parameter: start, stop


def outline(kind: Kind, entry: Entry, tensors: Tensors) -> Outline:
    """The outline of an entry. Its tensors are put into `tensors`."""
    if kind is Kind.WHOLE:
        return cast(Outline, outline_of(entry, "", tensors))
    return {k: v if is_scalar(k, v) else outline_of(v, k, tensors) for k, v in entry.items()}


# Gathering


def gather_state(shards: Shards, *, keeps: bool) -> dict[str, Any] | None:
    """Collective: the ordinary state_dict on ranks that keep it, None on the others.

    In host memory: a device has room for a share, and maybe not for the whole.
    """
    begin_together(shards.world, shards.number, "state_dict()")
    state, collectives = shards.optimizer.state, internal_collectives_of(shards.world)
    everybody, mine = tell(shards)
    found: State = {}
    for rank, theirs in enumerate(everybody):
        rows = [(index, *row) for index, its in theirs.items() for row in its][::-1]
        while rows:
            batch: list[tuple[torch.Tensor, int, int, Entry]] = []
            tensors: list[torch.Tensor] = []
            num_bytes = 0
            while rows and num_bytes < _BYTES_AT_ONCE:
                index, start, stop, its = rows.pop()
                wanted: Tensors = {}
                own = mine[index, start] if rank == shards.world.rank else {}
                batch.append((shards.parameters[index], start, stop, fill_outline(its, "", own, wanted)))
                tensors += wanted.values()
                num_bytes += num_bytes_of(wanted)
            collectives.broadcast_together(tensors, rank)
            for parameter, start, stop, entry in batch if keeps else ():
                _add(shards.kind, found.setdefault(parameter, {}), entry, parameter, start, stop)
            del tensors, batch
            trim()  # what was received leaves holes between the results
    if not keeps:
        return None
    found.update({p: on_host(state[p]) for p in shards.everywhere if p in state})
    with shards.whole_state({p: found[p] for p in shards.parameters if p in found}):
        return shards.optimizer.state_dict()


def tell(shards: Shards) -> tuple[list[Rows], dict[tuple[int, int], Tensors]]:
    """Collective: which shards have which state, by rank. And the tensors of this rank's, by parameter and start."""
    shards.split()
    said: Rows = {}
    mine: dict[tuple[int, int], Tensors] = {}
    for shard in shards.shards:
        if shard.tensor in shards.optimizer.state:
            its = outline(
                shards.kind, shards.optimizer.state[shard.tensor], mine.setdefault((shard.index, shard.start), {})
            )
            said.setdefault(shard.index, []).append((shard.start, shard.stop, its))
    gathered = internal_collectives_of(shards.world).all_gather_bytes(save_plain(said))
    return [load_plain(text) for text in gathered], mine


def _add(kind: Kind, whole: Entry, entry: Entry, parameter: torch.Tensor, start: int, stop: int) -> None:
    """Add the entry of elements [start, stop) to the entry of the whole parameter."""
    if kind is Kind.WHOLE:
        whole.update(on_host(entry))
        return
    for key, value in entry.items():
        if is_scalar(key, value):
            whole[key] = value
            continue
        if key not in whole:
            whole[key] = torch.empty_strided(parameter.shape, parameter.stride(), dtype=value.dtype, device="cpu")
        flat(whole[key])[start:stop] = value


# Dealing out


def load_state(shards: Shards, state_dict: Mapping[str, Any] | None, src: int = 0) -> None:
    """Collective: load an ordinary state_dict, which all ranks have, or rank `src` alone.

    Raises ValueError on all ranks if the state does not fit; then the optimizer keeps what it has.
    """
    world, optimizer = shards.world, shards.optimizer
    collectives = internal_collectives_of(world)
    said = begin_together(world, shards.number, "load_state_dict()", b"\1" if state_dict is not None else b"\0")
    missing = [rank for rank, theirs in enumerate(said) if theirs == b"\0"]
    if missing and missing != [rank for rank in range(world.size) if rank != src]:
        raise in_step(
            ValueError(
                "load_state_dict() takes a state on all ranks, or on rank 0 and None on the others; "
                f"{ranks_in_words(missing)} passed None"
            )
        )
    entries: State = {}
    problem: Exception | None = None
    if state_dict is not None:
        try:
            state = _fitting(shards, state_dict, is_shared=not missing)
            entries = _loaded(shards, {**state_dict, "state": state})
        except Exception as error:
            problem = error
    collectives.raise_together(problem, "could not load its optimizer's state")
    if missing:
        with shards.whole_state({}):
            groups = save_plain(optimizer.state_dict()["param_groups"]) if world.rank == src else b""
            groups = load_plain(collectives.broadcast_bytes(groups, src))
            if world.rank != src:
                optimizer.load_state_dict({"state": {}, "param_groups": groups})
    deal_out(shards, entries, src if missing else None)
    if state_dict is not None and state_dict["state"]:
        shards.keep_an_entry()


@torch.no_grad()
def deal_out(shards: Shards, entries: Mapping[torch.Tensor, Entry], src: int | None = None) -> None:
    """Make this rank's share of a state the state of the optimizer.

    Args:
        entries: of whole parameters, in host memory.
        src: collective: only this rank has them. By default, all have.
    """
    tensors: dict[int, Tensors] = {}
    indices = {index: p for index, p in enumerate(shards.parameters) if p in entries}
    outlines = {i: outline(shards.kind, entries[p], tensors.setdefault(i, {})) for i, p in indices.items()}
    collectives = internal_collectives_of(shards.world)
    if src is not None:
        outlines = load_plain(collectives.broadcast_bytes(save_plain(outlines), src))
    shards.optimizer.state.clear()
    shards.split()
    trim()
    own = by_parameter(shards.shards)
    groups = {parameter: group for group in shards.optimizer.param_groups for parameter in group["params"]}
    for index, parameter in enumerate(shards.parameters):
        if index not in outlines:
            continue
        if src is None:
            entry = entries[parameter]
        else:
            wanted: Tensors = {}
            entry = fill_outline(outlines[index], "", tensors.get(index, {}), wanted)
            collectives.broadcast_together(wanted.values(), src)
        _keep(shards, parameter, groups[parameter], entry, own.get(index, []))
    if outlines:
        shards.keep_an_entry()


def _keep(
    shards: Shards, parameter: torch.nn.Parameter, group: Mapping[str, Any], entry: Entry, own: Sequence[Shard]
) -> None:
    """Give this rank's shards, or a parameter that every rank steps, their state."""
    has_steps = group.get("fused") or group.get("capturable")

    def placed(key: object, value: torch.Tensor) -> torch.Tensor:
        """A copy, where `Optimizer.load_state_dict` puts it."""
        return value.clone() if key == "step" and not has_steps else value.to(parameter.device, copy=True)

    if parameter in shards.everywhere:
        shards.optimizer.state[parameter] = mapped(entry, placed)
    for shard in own:
        part = entry if shards.kind is Kind.WHOLE else {k: _part(k, v, shard) for k, v in entry.items()}
        shards.optimizer.state[shard.tensor] = mapped(part, placed)


def _part(key: str, value: Any, shard: Shard) -> Any:
    if is_scalar(key, value):
        return value
    if isinstance(value, ShardTensor):
        return value.elements[shard.start - value.first : shard.stop - value.first]
    return flat(laid_out_as(value, shard.parameter))[shard.start : shard.stop]


def _loaded(shards: Shards, state_dict: Mapping[str, Any]) -> State:
    """The state of whole parameters that the optimizer makes of a state_dict; in host memory."""
    optimizer = shards.optimizer
    whole = [group["params"] for group in optimizer.param_groups]
    with shards.whole_state({}):
        if shards.accelerator is None:
            optimizer.load_state_dict(dict(state_dict))
            return dict(optimizer.state)
        # torch moves state to where its parameter is. In place of a parameter it gets a tensor that takes no memory.
        stand_ins = {torch.empty((), dtype=p.dtype, device="cpu").expand(p.shape): p for p in shards.parameters}
        left = iter(stand_ins)
        try:
            for group in optimizer.param_groups:
                group["params"] = list(itertools.islice(left, len(group["params"])))
            optimizer.load_state_dict(dict(state_dict))
            return {stand_ins.get(key, key): entry for key, entry in optimizer.state.items()}
        finally:
            for group, parameters in zip(optimizer.param_groups, whole, strict=True):
                group["params"] = parameters


def on_host(entry: Entry) -> Entry:
    return mapped(entry, lambda _, value: value.cpu())


def mapped(value: _V, function: Callable[[object, torch.Tensor], torch.Tensor], key: object = None) -> _V:
    """A copy of a state in which `function` replaces the tensors, given the key of each."""
    result: Any = value
    if isinstance(value, torch.Tensor):
        result = function(key, value)
    elif isinstance(value, dict):
        result = {name: mapped(item, function, name) for name, item in value.items()}
    elif isinstance(value, (list, tuple)):
        result = type(value)(mapped(item, function) for item in value)
    return cast(_V, result)


# What does not fit


def _fitting(shards: Shards, state_dict: Mapping[str, Any], *, is_shared: bool) -> dict[Any, Any]:
    """The states by parameter. Of what torch.distributed.checkpoint has loaded, this rank's whole parameters are plain
    tensors then. Raises ValueError if a state does not fit the model, or has other elements than this rank steps.

    Args:
        is_shared: all ranks pass a state.
    """
    states, own = dict(state_dict["state"]), by_parameter(shards.shards)
    has_state = any(shards.optimizer.state.values())
    saved = [key for group in state_dict["param_groups"] for key in group["params"]]
    for index, (key, parameter) in enumerate(zip(saved, shards.parameters, strict=False)):  # torch says what differs
        if key not in states:
            continue
        name, entry, steps = shards.names[index], states[key], own.get(index, [])
        if has_state and not entry:
            raise ValueError(
                f"the state has no values for {name}. With shard=True, set_optimizer_state_dict() takes no state that "
                "was saved with flatten_optimizer_state_dict=True; leave that option out, when saving, too"
            )
        if shards.kind is Kind.WHOLE:
            if is_shared and not steps and parameter not in shards.everywhere:  # another rank owns it
                del states[key]
                continue
        else:
            _check_shapes(entry, parameter, name)
        states[key] = mapped(entry, functools.partial(_own, shards.kind, parameter, steps if is_shared else None))
    return states


def _check_shapes(entry: Entry, parameter: torch.Tensor, name: str) -> None:
    """Raise ValueError if a state belongs to a parameter of another shape. torch would notice in the next step."""
    for key, value in entry.items():
        if not is_scalar(key, value) and value.shape != parameter.shape:
            raise ValueError(
                f"{key} of {name} has the shape {tuple(value.shape)} in this state, and the parameter has "
                f"{tuple(parameter.shape)}; the state belongs to another model"
            )


def _own(
    kind: Kind, parameter: torch.Tensor, steps: Sequence[Shard] | None, _: object, value: torch.Tensor
) -> torch.Tensor:
    """A tensor in the state of a parameter, of which this rank `steps` shards. None: others need this state, too."""
    if not isinstance(value, ShardTensor):
        return value
    if steps is not None and kind is Kind.WHOLE and value.elements.numel() == value.numel():
        return value.whole()
    if steps is not None and kind is Kind.ELEMENTS and value.stride() == parameter.stride():
        stop = value.first + value.elements.numel()
        if all(value.first <= shard.start and shard.stop <= stop for shard in steps):
            return value
    raise ValueError(
        "this rank has only a part of this state, which torchring.sharding.DistributedState has cut for "
        "torch.distributed.checkpoint: save it there, and load it from there, on all ranks; or load what state_dict() "
        "of the optimizer has returned"
    )
