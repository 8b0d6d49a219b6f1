"""Ordinary checkpoints of a sharded optimizer: the whole state, by parameter, as the plain optimizer has it.

A checkpoint knows no shard and no number of ranks. So any number of ranks can go on from it, and a plain optimizer,
too. State travels from one rank to all, a few parameters at once: so a rank holds little beside the result.
"""

import functools
import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final, TypeAlias

import torch

from torchring import initial_state
from torchring.broadcasts import broadcast_bytes, broadcast_together
from torchring.collectives.service import internal_collectives_of
from torchring.errors import in_step, ranks_in_words
from torchring.gradients.views import whole_of
from torchring.initial_state import fill_outline, load_plain, outline_of, save_plain
from torchring.participants.heap import trim
from torchring.sharding.kinds import Kind, is_scalar
from torchring.sharding.parameters import Shard, flat, laid_out_as
from torchring.sharding.shard_tensor import ShardTensor
from torchring.sharding.step import Shards
from torchring.world import World

_CANNOT_LOAD: Final = "could not load its optimizer's state"
_ELEMENTS_AT_ONCE: Final = 2 << 20  # of parameters, whose state is broadcast

Entry = dict[str, Any]  # the state of one parameter, or of a part of it
Item: TypeAlias = tuple[int, int, int, Entry]  # index of a parameter, start and stop of its elements, their state


def gather_state(shards: Shards, *, keeps: bool) -> dict[str, Any] | None:
    """Collective: the ordinary state_dict on ranks that keep it, None on the others.

    In host memory: a device has room for a share, and maybe not for the whole.
    """
    shards.begin("state_dict()")
    state = shards.optimizer.state
    mine = [(s.index, s.start, s.stop, state[s.tensor]) for s in shards.shards if s.tensor in state]
    found: dict[int, Entry] = {}
    for rank in range(shards.world.size):
        for index, start, stop, entry in _broadcast(shards.world, mine, rank):
            if not keeps:
                continue
            if shards.kind is Kind.WHOLE:
                found[index] = mapped(entry, _on_host)
                continue
            whole, parameter = found.setdefault(index, {}), shards.parameters[index]
            for key, value in entry.items():
                if is_scalar(key, value):
                    whole[key] = mapped(value, _on_host)
                    continue
                if key not in whole:
                    whole[key] = torch.empty_strided(
                        parameter.shape, parameter.stride(), dtype=value.dtype, device="cpu"
                    )
                flat(whole[key])[start:stop] = value
    states = {p: as_parameter(p, found[i]) for i, p in enumerate(shards.parameters) if i in found}
    return shards.state_dict_of(states) if keeps else None


def _on_host(_: object, value: torch.Tensor) -> torch.Tensor:
    return value.cpu().clone()


def _broadcast(world: World, items: Iterable[Item], src: int) -> Iterator[Item]:
    """Collective: the items of rank `src`, a few at once: there its own tensors, elsewhere copies in host memory."""
    collectives, left = internal_collectives_of(world), iter(items)
    while True:
        batch: list[Item] = []
        numel = 0
        for item in left if world.rank == src else ():
            batch.append(item)
            numel += item[2] - item[1]
            if numel >= _ELEMENTS_AT_ONCE:
                break
        own: dict[str, torch.Tensor] = {}
        wanted: dict[str, torch.Tensor] = {}
        outline = load_plain(broadcast_bytes(collectives, save_plain(outline_of(batch, own)), src))
        if not outline:
            return
        batch = fill_outline(outline, own, wanted)
        broadcast_together(collectives, wanted.values(), src)
        yield from batch
        del batch, own, wanted
        trim()  # what was received leaves holes between the results


def load_state(shards: Shards, state_dict: Mapping[str, Any] | None, src: int = 0) -> None:
    """Collective: load an ordinary state_dict, which all ranks have, or rank `src` alone.

    Raises ValueError on all ranks if the state does not fit; then the optimizer keeps what it has.
    """
    world, collectives = shards.world, internal_collectives_of(shards.world)
    said = shards.begin("load_state_dict()", b"\1" if state_dict is not None else b"\0")
    missing = [rank for rank, theirs in enumerate(said) if theirs == b"\0"]
    if missing and missing != [rank for rank in range(world.size) if rank != src]:
        raise in_step(
            ValueError(
                "load_state_dict() takes a state on all ranks, or on rank 0 and None on the others; "
                f"{ranks_in_words(missing)} passed None"
            )
        )
    items: list[Item] = []
    groups: list[dict[str, Any]] = []
    own: dict[int, Entry] = {}
    with collectives.together(_CANNOT_LOAD):
        if state_dict is not None:
            groups, items = _fitting(shards, shards.adapted(dict(state_dict)))
            if missing:
                items = [(i, start, stop, mapped(entry, _complete)) for i, start, stop, entry in items]
            else:
                own = _cut(shards, items)
    if missing:
        groups = load_plain(broadcast_bytes(collectives, save_plain(groups), src))
        own = _cut(shards, _broadcast(world, items, src))
    _load_own(shards, groups, own)


def _load_own(shards: Shards, groups: list[dict[str, Any]], own: dict[int, Entry]) -> None:
    """Collective: have the optimizer load the state of this rank's shards, by their numbers, as if it had no others."""
    numbers: list[list[int]] = [[] for _ in groups]
    for number, shard in enumerate(shards.shards):
        numbers[shards.group_of(shard.parameter)].append(number)
    groups = [{**group, "params": its} for group, its in zip(groups, numbers, strict=True)]
    optimizer = shards.optimizer
    before = optimizer.state, optimizer.param_groups
    hooks = optimizer._optimizer_load_state_dict_pre_hooks
    with shards.under_way("load_state_dict()"):
        shards.put_shards()
        try:
            optimizer._optimizer_load_state_dict_pre_hooks = OrderedDict()  # they have seen the whole state
            with internal_collectives_of(shards.world).together(_CANNOT_LOAD):
                optimizer.load_state_dict({"state": own, "param_groups": groups})
        except BaseException:
            optimizer.state, optimizer.param_groups = before
            raise
        finally:
            optimizer._optimizer_load_state_dict_pre_hooks = hooks
    shards.guard_state()


@torch.no_grad()
def deal_out(shards: Shards) -> None:
    """The optimizer has the whole state: keep this rank's share of it."""
    state, parameters = shards.optimizer.state, shards.parameters
    own = _cut(shards, [(i, 0, p.numel(), state[p]) for i, p in enumerate(map(whole_of, parameters)) if p in state])
    shards.optimizer.state.clear()
    shards.optimizer.state.update({shards.shards[number].tensor: entry for number, entry in own.items()})


def _cut(shards: Shards, items: Iterable[Item]) -> dict[int, Entry]:
    """Copies of what this rank's shards have of the state of whole parameters, by the number of the shard."""
    steps: dict[int, list[int]] = {}
    for number, shard in enumerate(shards.shards):
        steps.setdefault(shard.index, []).append(number)
    own = {}
    for index, _, _, entry in items:
        for number in steps.get(index, ()):
            own[number] = mapped(entry, functools.partial(_part, shards.kind, shards.shards[number]))
    return own


def _part(kind: Kind, shard: Shard, key: object, value: torch.Tensor) -> torch.Tensor:
    value = _local(value)
    if kind is Kind.WHOLE:
        return _complete(key, value).clone()
    if is_scalar(str(key), value):
        return value.clone()
    if isinstance(value, ShardTensor) and value.stride() == shard.parameter.stride():
        return value.part(shard.start, shard.stop).clone()
    return flat(laid_out_as(_complete(key, value), shard.parameter))[shard.start : shard.stop].clone()


def _complete(_: object, value: torch.Tensor) -> torch.Tensor:
    value = _local(value)
    return value.whole() if isinstance(value, ShardTensor) else value


def _local(value: torch.Tensor) -> torch.Tensor:
    return getattr(value, "_local_tensor", value)


def as_parameter(parameter: Any, entry: Entry) -> Any:
    """The state of a parameter, which is of DTensors if the parameter is one."""
    return entry if whole_of(parameter) is parameter else parameter.state_of_whole(entry)


def _fitting(shards: Shards, state_dict: Mapping[str, Any]) -> tuple[list[dict[str, Any]], list[Item]]:
    """The options of the groups, and the states. Raises ValueError if a state does not fit the model."""
    groups, states = state_dict["param_groups"], state_dict["state"]
    lengths = [len(group["params"]) for group in shards.optimizer.param_groups]
    if (saved := [len(group["params"]) for group in groups]) != lengths:
        raise ValueError(f"the parameter groups of this state have {saved} parameters, and the optimizer's {lengths}")
    items: list[Item] = []
    keys = itertools.chain.from_iterable(group["params"] for group in groups)
    for index, (key, parameter) in enumerate(zip(keys, shards.parameters, strict=True)):
        for name, value in states.get(key, {}).items() if shards.kind is Kind.ELEMENTS else ():
            if not is_scalar(name, value) and _local(value).shape != parameter.shape:
                raise ValueError(
                    f"{name} of {shards.names[parameter]} has the shape {tuple(value.shape)} in this state, and the "
                    f"parameter has {tuple(parameter.shape)}; the state belongs to another model"
                )
        if key in states:
            items.append((index, 0, parameter.numel(), states[key]))
    return [{k: v for k, v in group.items() if k != "params"} for group in groups], items


def mapped(state: Any, function: Callable[[str, torch.Tensor], torch.Tensor]) -> Any:
    """A copy of a state in which `function` replaces the tensors, given the place of each."""
    return initial_state.mapped(state, lambda place, value: function(place, value) if torch.is_tensor(value) else value)
