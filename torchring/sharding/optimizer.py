"""`wrap(..., shard=True)` returns a `ShardedOptimizer`. `DistributedState` is for torch.distributed.checkpoint."""

from __future__ import annotations

import functools
import itertools
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.optim import Optimizer

from torchring.accelerators import accelerator_of
from torchring.errors import GradientError, in_step
from torchring.gradients.layout import Options
from torchring.gradients.reducer import Reducer
from torchring.gradients.reduction import Guest
from torchring.gradients.views import CAN_SWAP
from torchring.optimizer import DistributedOptimizer
from torchring.optimizer_wrapper import OptimizerWrapper
from torchring.sharding import checkpoint
from torchring.sharding.distributed_checkpoint import make_state, shard_state
from torchring.sharding.kinds import kind_of
from torchring.sharding.step import Shards
from torchring.sharding.step_hooks import refuse_patched
from torchring.world import World

_logger: Final = logging.getLogger("torchring")


class ShardedOptimizer(DistributedOptimizer):
    """A `DistributedOptimizer` of which each rank keeps the state for its share of the parameters, and steps that."""

    _shards: Shards | None = None  # None in a world of one rank

    def _check(self, optimizer: Optimizer, options: Options, world: World) -> None:
        _check_shardable(optimizer)
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        if world.is_provisional and any(accelerator_of(p.device) for p in parameters):
            raise ValueError("shard=True in elastic jobs takes parameters on the CPU; leave shard out")

    def _open(self, world: World, *args: Any, **kwargs: Any) -> None:
        super()._open(world, *args, **kwargs)
        if self._shards is not None:
            world.shared(_say_cost)

    def _begin(self, world: World) -> Reducer:
        """Collective: also keep this rank's share of the state."""
        reducer = super()._begin(world)
        assert self._shards is not None
        checkpoint.deal_out(self._shards, dict(self.optimizer.state))
        return reducer

    def _agree(self, world: World, guests: Sequence[Guest] = ()) -> Reducer:
        """Collective: also cut the parameters among the ranks. The state is as it was."""
        reducer = super()._agree(world, guests)
        self._shards = Shards(
            *(world, self.optimizer, self._names, self._sparse, next(world.shared(_numbers))),
            *(self._follow_step, reducer.layout.all_reduce),
        )
        reducer.follower = self._shards.name, weakref.WeakMethod(self._shards.follow)
        return reducer

    def _extend(self, added: list[torch.nn.Parameter]) -> None:
        super()._extend(added)
        if self._shards is not None:
            self._shards.extend()

    def _prepare_step(self, closure: Callable[[], Any] | None) -> Callable[[], Any] | None:
        if closure is not None and self._shards is not None:
            _refuse_closure()
        return closure

    def _step_wrapped(self, closure: Callable[[], Any] | None, *args: Any, **kwargs: Any) -> Any:
        run = functools.partial(super()._step_wrapped, closure)
        return run(*args, **kwargs) if self._shards is None else self._shards.step(run, *args, **kwargs)

    def _follow_step(self) -> None:
        """Step what the wrapped optimizer has got, inside a step of all ranks."""
        self._is_stepping = True
        assert self._sync is not None
        self._sync.agree_on_step()
        try:
            super()._step_wrapped(None)
        finally:
            self._is_stepping = False

    def state_dict(self, *, all_ranks: bool = False) -> dict[str, Any]:
        if self._shards is None:
            return super().state_dict()
        self._refuse_in_backward("state_dict()")
        return checkpoint.gather_state(self._shards, keeps=all_ranks or self._shards.world.rank == 0)  # type: ignore[return-value]

    def load_state_dict(self, state_dict: Mapping[str, Any] | None) -> None:
        if self._shards is None:
            super().load_state_dict(state_dict)
            return
        self._refuse_in_backward("load_state_dict()")
        checkpoint.load_state(self._shards, state_dict)

    def _parts(self) -> dict[str, Any]:
        if self._shards is None:
            return super().state_dict()
        self._refuse_in_backward("state_dict()")
        return shard_state(self._shards)

    def _take_over(self, src: int) -> None:
        if self._shards is None:
            super()._take_over(src)
        else:  # each rank has its share, from the same steps
            self._shards.take_over(src)

    def _refuse_in_backward(self, what: str) -> None:
        if self._sync is not None and self._sync.in_backward:
            raise GradientError(f"{what} was called inside backward(); call it after backward() has returned")

    def close(self) -> None:
        super().close()
        if self._shards is not None:
            self._shards.close()
            self._shards = None

    def __getstate__(self) -> dict[str, Any]:
        if self._shards is not None:
            raise TypeError(
                "an optimizer with shard=True has its state on all ranks together, so it cannot be copied or pickled; "
                "use state_dict()"
            )
        return super().__getstate__()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            value = super().__getattr__(name)
            return value if self._shards is None else self._shards.of_optimizer(name, value)


def _numbers(_: World) -> Iterator[int]:
    """Numbers the sharded optimizers of a world."""
    return itertools.count()


def _check_shardable(optimizer: Optimizer) -> None:
    """Raise ValueError if shard=True does not work with this optimizer, or with this PyTorch."""
    if not CAN_SWAP:
        raise ValueError(f"shard=True takes PyTorch 2.12 or newer, and this is {torch.__version__}; leave shard out")
    refuse_patched(optimizer)
    kind_of(optimizer)


def _say_cost(world: World) -> None:
    if world.rank == 0 and world.num_nodes > 1:
        _logger.warning(
            "between hosts, shard=True sends 1.5 times the bytes: whole gradients, and then parameters. If the network "
            "limits your steps, leave shard out. If you need less memory, use FSDP2 "
            "(torch.distributed.fsdp.fully_shard) in place of torchring.wrap"
        )


def _refuse_closure() -> None:
    raise in_step(
        ValueError(
            "step(closure) does not work with shard=True: a closure may evaluate the model while parameters are "
            "stepped in parts. Call backward() first, and then step()"
        )
    )


class DistributedState(OptimizerWrapper):
    """What torch.distributed.checkpoint saves and loads in place of an optimizer that `wrap` has returned.

    With shard=True, each rank writes the part of the state that it keeps, and reads the part that it steps; no rank
    holds the whole. The files are those of a plain optimizer, for any number of ranks. `dcp.save`, `dcp.load`,
    `get_state_dict` and `set_state_dict` take it, on all ranks.

    Args:
        optimizer: the optimizer, with or without shard=True.
    """

    def state_dict(self) -> dict[str, Any]:
        """Collective with shard=True: the state, with the tensors of this rank's part.

        dcp.load() reads only what is there. So an optimizer without state makes a step with learning rates and
        gradients of 0 first, as get_state_dict() lets any optimizer do.

        Raises:
            ValueError: the optimizer has no state yet, but gradients; or torch.distributed has fewer ranks.
            GradientError: with shard=True, called inside `backward()`.
        """
        parts = self.optimizer._parts if isinstance(self.optimizer, ShardedOptimizer) else self.optimizer.state_dict
        state = parts()
        if not state["state"]:
            make_state(self.optimizer)
            state = parts()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Collective with shard=True: load what dcp.load() has read, or what `state_dict` has returned."""
        self.optimizer.load_state_dict(state_dict)

    def step(self, closure: Any = None) -> Any:
        """Step the optimizer: get_state_dict() does so before there is state, with learning rates of 0."""
        return self._step_wrapped(closure)

    step.hooked = True  # type: ignore[attr-defined]  # the optimizer's own step() runs all hooks

    def zero_grad(self, set_to_none: bool = True) -> None:
        """See `DistributedOptimizer.zero_grad`."""
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """See `DistributedOptimizer.add_param_group`."""
        if not self._is_initialising:
            self.optimizer.add_param_group(param_group)


# What elastic jobs ask of an optimizer


def gather(optimizer: ShardedOptimizer, *, keeps: bool) -> dict[str, Any] | None:
    """Collective: the whole state_dict on ranks that keep it, None on the others."""
    assert optimizer._shards is not None
    return checkpoint.gather_state(optimizer._shards, keeps=keeps)


def deal_out(optimizer: ShardedOptimizer, state: dict[str, Any] | None, src: int, *, has_stepped: bool) -> None:
    """Collective: each rank keeps its share of the whole state, which rank `src` has."""
    assert optimizer._shards is not None
    checkpoint.load_state(optimizer._shards, state, src)
    optimizer._shards.has_said = has_stepped


def release(optimizer: ShardedOptimizer) -> None:
    """The ranks have parted. What this rank has of the state is of no use without the rest."""
    shards, optimizer._shards = optimizer._shards, None
    if shards is not None:
        shards.release()
