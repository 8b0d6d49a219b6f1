"""The state of a sharded optimizer in the form in which torch.distributed.checkpoint saves and loads it.

An ordinary state_dict, whose tensors are `ShardTensor`s. Each rank writes the elements that it keeps, and reads those
that it steps. `checkpoint.load_state` takes what was read.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from torchring.collectives.initial_state import fill_outline
from torchring.memory.heap import trim
from torchring.sharding.checkpoint import (
    Entry,
    State,
    outlines_in,
    pieces_with_state,
    tell_pieces,
    tell_whole,
)
from torchring.sharding.kinds import Kind
from torchring.sharding.pieces import Piece, copy_of, flat, is_scalar, laid_out_as
from torchring.sharding.shard_tensor import ShardTensor
from torchring.sharding.step import Shards
from torchring.sharding.together import begin_together


def shard_state(shards: Shards) -> dict[str, Any]:
    """Collective: the state_dict, with the same keys on all ranks. Its tensors share memory with the optimizer's state.

    Numbers that a parameter has once, such as `step`, are copies. Raises ValueError unless torch.distributed knows all
    ranks: else each rank would take itself for the only one, and write its part over those of the others.
    """
    size = dist.get_world_size() if dist.is_initialized() else 1
    if size != shards.world.size:
        raise ValueError(
            f"torch.distributed.checkpoint would write the state of {size} of {shards.world.size} ranks, as "
            "torch.distributed's process group has no more; call torchring.init(process_group=True) first"
        )
    begin_together(shards.world, shards.number, "state_dict()")
    shard = _shard_elements if shards.kind is Kind.ELEMENTS else _shard_whole
    found = shard(shards)
    found.update({p: shards.optimizer.state[p] for p in shards.everywhere if p in shards.optimizer.state})
    with shards.whole_state({p: found[p] for p in shards.parameters if p in found}):
        return shards.optimizer.state_dict()


def make_state(optimizer: Optimizer) -> None:
    """Collective: make a first step with learning rates and gradients of 0, as get_optimizer_state_dict() does.

    dcp.load() reads only what an optimizer has already.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
    if any(p.grad is not None for p in parameters):
        raise ValueError(
            "the optimizer has gradients, but no state yet, so torch.distributed.checkpoint has nothing to save, or to "
            "load into; call step() or zero_grad() first"
        )
    rates = [group["lr"] for group in optimizer.param_groups if "lr" in group]
    try:
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        for group in optimizer.param_groups:
            if "lr" in group:
                group["lr"] = torch.tensor(0.0) if isinstance(group["lr"], torch.Tensor) else 0.0
        optimizer.step()
    finally:
        for group, rate in zip((g for g in optimizer.param_groups if "lr" in g), rates, strict=True):
            group["lr"] = rate
        optimizer.zero_grad(set_to_none=True)


def _shard_elements(shards: Shards) -> State:
    mine = pieces_with_state(shards)
    everybody = tell_pieces(shards, mine)
    found: State = {}
    for index, memory in enumerate(shards.memories):
        region = memory.region
        start, stop = region.bounds[shards.world.rank]
        outlines = outlines_in(region, [theirs.get(index, []) for theirs in everybody])
        own = _side_by_side(shards.optimizer.state, mine.get(index, []), start, stop)
        for member in region.members:
            if (outline := outlines.get(member.parameter)) is None:
                continue
            parameter = shards.parameters[member.parameter]
            first, last = max(start, member.offset), min(stop, member.offset + member.numel)
            found[parameter] = entry = {}
            for key, value in outline.items():
                if is_scalar(key, value):
                    entry[key] = copy_of(value)
                    continue
                nothing = torch.empty(0, dtype=value.dtype, device=parameter.device)
                elements = own[key, value.dtype][first - start : last - start] if first < last else nothing
                place = first - member.offset if first < last else 0
                entry[key] = ShardTensor(parameter.shape, parameter.stride(), place, elements)
    return found


@torch.no_grad()
def _side_by_side(
    state: dict[torch.Tensor, Entry], pieces: Sequence[Piece], start: int, stop: int
) -> dict[tuple[str, torch.dtype], torch.Tensor]:
    """This rank's slice of the state of a region, which its pieces share from now on. So a file needs few boxes.

    One key of the state is moved at a time, which takes memory for that.
    """
    owners: dict[tuple[str, torch.dtype], list[Piece]] = {}
    for piece in pieces:
        for key, value in state[piece.tensor].items():
            if not is_scalar(key, value):
                owners.setdefault((key, value.dtype), []).append(piece)
    slices = {}
    for (key, dtype), own in owners.items():
        values = [state[piece.tensor][key] for piece in own]
        storage = values[0].untyped_storage()
        if storage.nbytes() == (stop - start) * dtype.itemsize and all(
            value.untyped_storage().data_ptr() == storage.data_ptr() and value.storage_offset() == piece.start - start
            for piece, value in zip(own, values, strict=True)
        ):
            slices[key, dtype] = values[0].as_strided((stop - start,), (1,), 0)
            continue
        slices[key, dtype] = together = values[0].new_empty(stop - start)
        for piece, value in zip(own, values, strict=True):
            place = piece.start - start
            state[piece.tensor][key] = together[place : place + len(value)].copy_(value)
        del values
        trim()
    return slices


def _shard_whole(shards: Shards) -> State:
    everybody, tensors = tell_whole(shards)
    found: State = {}
    for theirs in everybody:
        for index, outline in theirs.items():
            found[shards.parameters[index]] = _shards_of(outline, tensors.get(index, {}))
    return found


def _shards_of(outline: Entry, own: Mapping[str, torch.Tensor]) -> Entry:
    """The state of a parameter that one rank owns: this rank, if it has its tensors, by place."""
    places: dict[str, torch.Tensor] = {}
    fill_outline(outline, "", {}, places)
    parts: dict[str, torch.Tensor] = {}
    for place, like in places.items():
        elements = flat(laid_out_as(own[place], like)) if place in own else like.new_empty(0)
        parts[place] = ShardTensor(like.shape, like.stride(), 0, elements)
    entry: Entry = fill_outline(outline, "", parts, {})
    return entry
