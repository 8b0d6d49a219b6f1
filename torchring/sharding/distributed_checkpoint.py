"""The state of a sharded optimizer for torch.distributed.checkpoint: ordinary tensors, the same on all ranks.

torch.distributed.checkpoint writes each of them once, and shares the writing out among the ranks.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from torchring.optimizer_wrapper import OptimizerWrapper
from torchring.sharding.optimizer import ShardedOptimizer, shards_of


class DistributedState(OptimizerWrapper):
    """What torch.distributed.checkpoint saves and loads in place of an optimizer that `wrap` has returned.

    With shard=True, each rank gathers the whole state in host memory. The ranks share the writing out. The files are
    those of a plain optimizer, for any number of ranks. `dcp.save`, `dcp.load`, `get_state_dict` and `set_state_dict`
    take it, on all ranks.

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
        """Collective with shard=True: the whole state.

        dcp.load() reads only what is there. So an optimizer without state makes a step with learning rates and
        gradients of 0 first, as get_state_dict() lets any optimizer do.

        Raises:
            ValueError: the optimizer has no state yet, but gradients; or torch.distributed has fewer ranks.
            GradientError: with shard=True, called inside `backward()`.
        """
        from torch.distributed.checkpoint.state_dict import _init_optim_state

        state = self._whole()
        if not state["state"]:
            if any(p.grad is not None for group in self.param_groups for p in group["params"]):
                raise ValueError(
                    "the optimizer has gradients, but no state yet, so torch.distributed.checkpoint has nothing to "
                    "save, or to load into; call step() or zero_grad() first"
                )
            _init_optim_state(self.optimizer)
            state = self._whole()
        return state

    def _whole(self) -> dict[str, Any]:
        """Raises ValueError unless torch.distributed knows all ranks: else each would write the same files."""
        if not isinstance(self.optimizer, ShardedOptimizer):
            return self.optimizer.state_dict()
        shards, size = shards_of(self.optimizer, "state_dict()"), dist.get_world_size() if dist.is_initialized() else 1
        if shards is not None and size != shards.world.size:
            raise ValueError(
                f"torch.distributed.checkpoint would write the state of {size} of {shards.world.size} ranks, as "
                "torch.distributed's process group has no more; call torchring.init(process_group=True) first"
            )
        return self.optimizer.state_dict(all_ranks=True)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Collective with shard=True: load what dcp.load() has read, or what `state_dict` has returned."""
        self.optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See `DistributedOptimizer.add_param_group`."""
        if not self._is_initialising:
            self.optimizer.add_param_group(param_group)
