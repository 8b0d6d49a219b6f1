"""The state of a sharded optimizer for torch.distributed.checkpoint.

An ordinary state_dict, whose tensors are `ShardTensor`s. Each rank writes the elements that it keeps, and reads those
that it steps. `checkpoint.load_state` takes what was read.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from torchring.collectives.service import internal_collectives_of
from torchring.initial_state import load_plain, save_plain
from torchring.optimizer_wrapper import OptimizerWrapper
from torchring.sharding.checkpoint import Entry, as_parameter, mapped
from torchring.sharding.kinds import Kind, is_scalar
from torchring.sharding.optimizer import shards_of
from torchring.sharding.parameters import Shard, flat, laid_out_as
from torchring.sharding.shard_tensor import ShardTensor
from torchring.sharding.step import Shards


class DistributedState(OptimizerWrapper):
    """What torch.distributed.checkpoint saves and loads in place of an optimizer that `wrap` has returned.

    With shard=True, each rank writes the part of the state that it keeps, and reads the part that it steps; no rank
    holds the whole. The files are those of a plain optimizer, for any number of ranks. `dcp.save`, `dcp.load`,
    `get_state_dict` and `set_state_dict` take it, on all ranks.

    Args:
        optimizer: the optimizer, with or without shard=True.
    """

    @property
    def state(self) -> Any:
        """The optimizer's. Never empty: else get_state_dict() would make a step, where a rank has no share of it."""
        return self.optimizer.state or {None: {}}

    @state.setter
    def state(self, _: Any) -> None:
        """Optimizer.__init__ assigns it."""

    def state_dict(self) -> dict[str, Any]:
        """Collective with shard=True: the state, with the tensors of this rank's part.

        dcp.load() reads only what is there. So an optimizer without state makes a step with learning rates and
        gradients of 0 first, as get_state_dict() lets any optimizer do.

        Raises:
            ValueError: the optimizer has no state yet, but gradients; or torch.distributed has fewer ranks.
            GradientError: with shard=True, called inside `backward()`.
        """
        from torch.distributed.checkpoint.state_dict import _init_optim_state

        state = _state_dict(self.optimizer)
        if not state["state"]:
            if any(p.grad is not None for group in self.param_groups for p in group["params"]):
                raise ValueError(
                    "the optimizer has gradients, but no state yet, so torch.distributed.checkpoint has nothing to "
                    "save, or to load into; call step() or zero_grad() first"
                )
            _init_optim_state(self.optimizer)
            state = _state_dict(self.optimizer)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Collective with shard=True: load what dcp.load() has read, or what `state_dict` has returned."""
        self.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See `DistributedOptimizer.add_param_group`."""
        if not self._is_initialising:
            self.optimizer.add_param_group(param_group)


def _state_dict(optimizer: Optimizer) -> dict[str, Any]:
    shards = shards_of(optimizer, "state_dict()")
    return optimizer.state_dict() if shards is None else _shard_state(shards)


def _shard_state(shards: Shards) -> dict[str, Any]:
    """Collective: the state_dict, with the same keys on all ranks.

    Raises ValueError unless torch.distributed knows all ranks: else each rank would take itself for the only one, and
    write its part over those of the others.
    """
    size = dist.get_world_size() if dist.is_initialized() else 1
    if size < shards.world.size:
        raise ValueError(
            f"torch.distributed.checkpoint would write the state of {size} of {shards.world.size} ranks, as "
            "torch.distributed's process group has no more; call torchring.init(process_group=True) first"
        )
    shards.begin("state_dict()")
    state = shards.optimizer.state
    own: dict[int, list[Shard]] = {}
    for shard in shards.shards:
        if shard.tensor in state:
            own.setdefault(shard.index, []).append(shard)

    def outline(key: object, value: torch.Tensor) -> torch.Tensor:
        return value if shards.kind is Kind.ELEMENTS and is_scalar(str(key), value) else value.to("meta")

    mine = {index: mapped(state[its[0].tensor], outline) for index, its in own.items()}
    outlines: dict[int, Entry] = {}
    for text in internal_collectives_of(shards.world).all_gather_bytes(save_plain(mine)):
        outlines.update(load_plain(text))
    found: dict[torch.Tensor, Entry] = {}
    for index in sorted(outlines):
        parameter = shards.parameters[index]
        found[parameter] = as_parameter(parameter, _parts(shards, index, outlines[index], own.get(index, [])))
    return shards.state_dict_of(found)


def _parts(shards: Shards, index: int, outline: Entry, own: Sequence[Shard]) -> Entry:
    """The state of a parameter of which this rank steps the shards `own`. Of slices, it has copies."""
    state, parameter = shards.optimizer.state, shards.parameters[index]

    def whole(_: object, value: torch.Tensor) -> torch.Tensor:
        if value.is_meta:  # another rank has its elements
            return ShardTensor(value.shape, value.stride(), 0, torch.empty(0, dtype=value.dtype, device="cpu"))
        like = torch.empty_like(value, device="meta")
        return ShardTensor(like.shape, like.stride(), 0, flat(laid_out_as(value, like)))

    def elements(key: Any, value: torch.Tensor) -> torch.Tensor:
        if is_scalar(key, value):
            return value
        parts = [torch.empty(0, dtype=value.dtype, device=parameter.device), *(state[s.tensor][key] for s in own)]
        result = ShardTensor(parameter.shape, parameter.stride(), own[0].start if own else 0, torch.cat(parts))
        result.origin = getattr(parameter, "offset", ())
        return result

    is_whole = shards.kind is Kind.WHOLE
    parts: Entry = mapped(state[parameter] if is_whole and own else outline, whole if is_whole else elements)
    return parts
