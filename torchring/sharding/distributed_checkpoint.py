"""The state of a sharded optimizer in the form in which torch.distributed.checkpoint saves and loads it.

An ordinary state_dict, whose tensors are `ShardTensor`s. Each rank writes the elements that it keeps, and reads those
that it steps. `checkpoint.load_state` takes what was read.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from torchring.sharding.checkpoint import Entry, Outline, State, mapped, tell
from torchring.sharding.kinds import Kind, is_scalar
from torchring.sharding.shard import Shard, by_parameter, flat, laid_out_as
from torchring.sharding.shard_tensor import ShardTensor
from torchring.sharding.step import Shards
from torchring.sharding.together import begin_together


def shard_state(shards: Shards) -> dict[str, Any]:
    """Collective: the state_dict, with the same keys on all ranks.

    Raises ValueError unless torch.distributed knows all ranks: else each rank would take itself for the only one, and
    write its part over those of the others.
    """
    size = dist.get_world_size() if dist.is_initialized() else 1
    if size != shards.world.size:
        raise ValueError(
            f"torch.distributed.checkpoint would write the state of {size} of {shards.world.size} ranks, as "
            "torch.distributed's process group has no more; call torchring.init(process_group=True) first"
        )
    begin_together(shards.world, shards.number, "state_dict()")
    everybody, _ = tell(shards)
    state, own = shards.optimizer.state, by_parameter(shards.shards)
    found: State = {}
    for index, parameter in enumerate(shards.parameters):
        outlines = [outline for theirs in everybody for _, _, outline in theirs.get(index, ())]
        mine = [shard for shard in own.get(index, ()) if shard.tensor in state]
        if parameter in shards.everywhere and parameter in state:
            found[parameter] = state[parameter]
        elif outlines and shards.kind is Kind.ELEMENTS:
            found[parameter] = _elements(outlines[0], parameter, mine, [state[shard.tensor] for shard in mine])
        elif outlines:
            found[parameter] = mapped(state[parameter] if mine else outlines[0], lambda _, value: _whole(value))
    with shards.whole_state(found):
        return shards.optimizer.state_dict()


def _elements(outline: Outline, parameter: torch.Tensor, mine: Sequence[Shard], entries: Sequence[Entry]) -> Entry:
    """The state of a parameter of which this rank steps some elements, with copies of these."""
    found: Entry = {}
    for key, value in outline.items():
        if is_scalar(key, value):
            found[key] = value
            continue
        parts = [torch.empty(0, dtype=value.dtype, device=parameter.device), *(entry[key] for entry in entries)]
        first = mine[0].start if mine else 0
        found[key] = ShardTensor(parameter.shape, parameter.stride(), first, torch.cat(parts))
    return found


def _whole(value: torch.Tensor) -> ShardTensor:
    """A tensor in the state of a whole parameter. Another rank has its elements if it is in an outline."""
    if value.is_meta:
        return ShardTensor(value.shape, value.stride(), 0, torch.empty(0, dtype=value.dtype, device="cpu"))
    like = torch.empty_like(value, device="meta")
    return ShardTensor(like.shape, like.stride(), 0, flat(laid_out_as(value, like)))


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
