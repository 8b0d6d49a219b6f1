"""`wrap(..., shard=True)` returns a `ShardedOptimizer`."""

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from torchring.accelerators import accelerator_of
from torchring.errors import GradientError, in_step
from torchring.gradients.layout import Options
from torchring.gradients.reducer import Reducer
from torchring.gradients.reduction import Participant
from torchring.optimizer import DistributedOptimizer
from torchring.releases import missing_names
from torchring.sharding import checkpoint
from torchring.sharding.kinds import kind_of
from torchring.sharding.parameters import check_movable
from torchring.sharding.step import Shards, refuse_patched
from torchring.world import World


class ShardedOptimizer(DistributedOptimizer):
    """A `DistributedOptimizer` of which each rank keeps the state for its share of the parameters, and steps that."""

    _shards: Shards | None = None  # None in a world of one rank

    def _check(
        self, optimizer: Optimizer, options: Options, world: World, names: Mapping[torch.nn.Parameter, str]
    ) -> None:
        if missing := missing_names("shard=True"):
            raise ValueError(
                f"shard=True takes PyTorch 2.12 or newer, and this is {torch.__version__}, which lacks "
                f"torch.{missing[0]}; leave shard out"
            )
        refuse_patched(optimizer)
        kind_of(optimizer)
        check_movable(names)
        if world.is_provisional and any(accelerator_of(parameter.device) for parameter in names):
            raise ValueError("shard=True in elastic jobs takes parameters on the CPU; leave shard out")

    def _find_sparse(self, optimizer: Optimizer, model: torch.nn.Module | None) -> set[torch.nn.Parameter]:
        sparse = super()._find_sparse(optimizer, model)
        if taken := [name for p, name in self._name_parameters(optimizer, model).items() if p in sparse]:
            raise in_step(
                ValueError(
                    f"shard=True does not take sparse gradients, as {taken[0]} has: give that an optimizer of its own, "
                    "without shard, or compute with sparse=False"
                )
            )
        for module in () if model is None else model.modules():
            if "make_graphed_callables" in getattr(vars(module).get("forward"), "__qualname__", ""):
                raise in_step(
                    ValueError(
                        f"shard=True moves parameters, and the CUDA graph of this {type(module).__name__} goes on "
                        "reading them where they were. Call torch.cuda.make_graphed_callables after torchring.wrap"
                    )
                )
        return sparse

    def _open(self, world: World, *args: Any, **kwargs: Any) -> None:
        super()._open(world, *args, **kwargs)
        if self._shards is not None:
            world.shared(_say_cost)

    def _begin(self, world: World) -> Reducer:
        """Collective: also keep this rank's share of the state."""
        reducer = super()._begin(world)
        assert self._shards is not None
        checkpoint.deal_out(self._shards)
        return reducer

    def _agree(self, world: World, guests: Sequence[Participant] = ()) -> Reducer:
        """Collective: also cut the parameters among the ranks. The state is as it was."""
        reducer = super()._agree(world, guests)
        all_reduce, number = reducer.layout.all_reduce, next(world.shared(_numbers))
        self._shards = Shards(world, self.optimizer, self._names, number, all_reduce)
        return reducer

    def _extend(self, added: list[torch.nn.Parameter]) -> None:
        check_movable({parameter: self._names[parameter] for parameter in added})
        super()._extend(added)
        if self._shards is not None:
            self._shards.extend()

    def _prepare_step(self, closure: Callable[[], Any] | None) -> Callable[[], Any] | None:
        if closure is not None and self._shards is not None:
            raise in_step(
                ValueError(
                    "step(closure) does not work with shard=True: a closure may evaluate the model while parameters "
                    "are stepped in parts. Call backward() first, and then step()"
                )
            )
        return closure

    def _step_wrapped(self, closure: Callable[[], Any] | None, *args: Any, **kwargs: Any) -> Any:
        run = functools.partial(super()._step_wrapped, closure, *args, **kwargs)
        return run() if self._shards is None else self._shards.step(run)

    def state_dict(self, *, all_ranks: bool = False) -> dict[str, Any]:
        if (shards := shards_of(self, "state_dict()")) is None:
            return super().state_dict()
        return checkpoint.gather_state(shards, keeps=all_ranks or shards.world.rank == 0)  # type: ignore[return-value]

    def load_state_dict(self, state_dict: Mapping[str, Any] | None) -> None:
        if (shards := shards_of(self, "load_state_dict()")) is None:
            super().load_state_dict(state_dict)
        else:
            checkpoint.load_state(shards, state_dict)

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


def _say_cost(world: World) -> None:
    if world.rank == 0 and world.num_nodes > 1:
        world.warn(
            "between hosts, shard=True sends 1.5 times the bytes: whole gradients, and then parameters. If the network "
            "limits your steps, leave shard out. If you need less memory, use FSDP2 "
            "(torch.distributed.fsdp.fully_shard) in place of torchring.wrap"
        )


def shards_of(optimizer: Optimizer, what: str) -> Shards | None:
    """What `optimizer` has of a sharded state. Raises GradientError if `what` is called in a backward."""
    if not isinstance(optimizer, ShardedOptimizer) or optimizer._shards is None:
        return None
    if optimizer._sync is not None and optimizer._sync.in_backward:
        raise GradientError(f"{what} was called inside backward(); call it after backward() has returned")
    return optimizer._shards


def release(optimizer: ShardedOptimizer) -> None:
    """The ranks of an elastic job have parted. What this rank has of the state is of no use without the rest."""
    shards, optimizer._shards = optimizer._shards, None
    if shards is not None:
        shards.release()
