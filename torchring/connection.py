"""How an optimizer comes to reduce with the other ranks: when it is wrapped, later, and once more in another world."""

import dataclasses
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final

import torch
from torch.optim import Optimizer

from torchring.accelerators import accelerator_of
from torchring.collectives.service import collectives_of
from torchring.default_world import world_of
from torchring.dynamo import run_eagerly
from torchring.gradients.contract import Setup
from torchring.gradients.group import OptimizerGroup, check_free
from torchring.gradients.hooks import make_hook
from torchring.gradients.layout import Options
from torchring.gradients.local import LocalSync
from torchring.gradients.reducer import Reducer
from torchring.gradients.reduction import Participant
from torchring.gradients.validation import (
    check_options,
    named_parameters,
    parameters_of,
    refuse_part_of_state,
    sparse_parameters,
)
from torchring.gradients.views import whole_of
from torchring.observer import Wrapped
from torchring.optimizer_wrapper import OptimizerWrapper
from torchring.rooms import participants, room
from torchring.world import World

_SKIPS_A_PART: Final = (
    "on_nonfinite='skip' and max_error look at one part of DTensors, and ranks with other parts would not follow; use "
    "GradScaler, or pass on_nonfinite='raise' or 'ignore'; leave max_error out"
)


class ConnectedOptimizer(OptimizerWrapper):
    """An optimizer that reduces its gradients with the ranks of a world, where it is connected to them.

    It is connected when it is wrapped. A copy, or an optimizer whose world was closed, is connected when its first
    gradient arrives: a copy is made on one rank at a time, and used on all ranks.

    Attributes:
        is_closed: whether `close()` was called.
    """

    is_closed = False
    _group: Any = None  # see `wrap`
    _has_copied = False  # initial values, from rank 0 of the group

    def _open(
        self,
        world: World,
        optimizer: Optimizer,
        model: torch.nn.Module | None,
        options: Options,
        sync_initial_state: bool = True,
        ignore: Sequence[str | torch.nn.Module | torch.Tensor] = (),
    ) -> None:
        """Collective: find out whether all ranks can wrap their optimizers, and connect them."""
        world.shared(OptimizerGroup).release_dead()
        names: dict[torch.nn.Parameter, str] = {}
        ignored: set[torch.Tensor] = set()
        shared: Mapping[str, torch.Tensor] = {}  # copied from rank 0
        problem: Exception | None = None
        try:
            check_options(options, model)
            if isinstance(optimizer, ConnectedOptimizer):
                raise ValueError("this optimizer is distributed already; wrap the plain one, once")
            names = self._name_parameters(optimizer, model)
            ignored = room("initial state").ignored_tensors(ignore, model, names, world)
            check_free(names, world)
            if world.outer.groups:
                ignored |= room("groups").left_to_others(self, names, model, world)
            if any(p is not whole_of(p) for p in names):
                if options.on_nonfinite == "skip" or options.max_error:
                    raise ValueError(_SKIPS_A_PART)
                if options.scheme is not None:
                    options.scheme.check_parts(world)
            refuse_part_of_state(optimizer)
            self._check(optimizer, options, world, names)
            if sync_initial_state and model is not None:
                of_model = (*model.named_parameters(), *model.named_buffers())
                own = {name: each for name, each in of_model if each not in ignored}
                advice = "; or pass sync_initial_state=False if all ranks start alike"
                shared = room("initial state").check_broadcastable(own, world, advice)
        except Exception as error:
            problem = error
        if world.size > 1:
            collectives_of(world).raise_together(problem, "could not wrap its optimizer")
            # This option decides which collectives follow.
            collectives_of(world).check_equal([f"options: sync_initial_state={sync_initial_state}"])
        elif problem is not None:
            raise problem
        sparse = self._find_sparse(optimizer, model)
        self._initialise(optimizer, options, names, sparse, model, ignored)
        self._has_copied = sync_initial_state
        if sync_initial_state:
            values = shared if model is not None else {name: p.data for p, name in names.items()}
            room("initial state").copy_from(world, 0, values, optimizer)
        if world.size > 1:
            self._begin(world)
            if not any(accelerator_of(parameter.device) for parameter in names):
                numbers = world.local_size, torch.get_num_threads(), world.num_cores, world.num_physical_cores
                room("placement").look_at_cores(numbers, speaks=world.rank == 0)
            return
        self._observe(world)
        if world.is_provisional:
            self._needs_state = True
            self._connect_with_first_gradient()

    # What torchring.horovod's optimizer overrides, or that of torchring.sharding

    def _check(
        self, optimizer: Optimizer, options: Options, world: World, names: Mapping[torch.nn.Parameter, str]
    ) -> None:
        """Raise ValueError for an optimizer of the script with which this class does not work."""
        if options.shard:
            raise ValueError("DistributedOptimizer() takes no shard=True; call torchring.wrap(..., shard=True)")

    def _find_world(self) -> World:
        return world_of(self._group)

    def _name_parameters(self, optimizer: Optimizer, model: torch.nn.Module | None) -> dict[torch.nn.Parameter, str]:
        return named_parameters(optimizer, model)

    def _find_sparse(self, optimizer: Optimizer, model: torch.nn.Module | None) -> set[torch.nn.Parameter]:
        return sparse_parameters(model.modules() if model is not None else ())

    def _find_participants(self, setup: Setup) -> list[type[Participant]]:
        return participants(setup)

    def __getstate__(self) -> dict[str, Any]:
        return {
            "optimizer": self.optimizer,
            "group": self._group,
            "options": self._options,
            "names": [self._names[p] for p in parameters_of(self.optimizer)],
            "is_sparse": [p in self._sparse for p in parameters_of(self.optimizer)],
            "is_closed": self.is_closed,
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        parameters = list(parameters_of(state["optimizer"]))
        names = dict(zip(parameters, state["names"], strict=True))
        sparse = {p for p, is_sparse in zip(parameters, state["is_sparse"], strict=True) if is_sparse}
        self._group = state["group"]
        self._initialise(state["optimizer"], state["options"], names, sparse)
        self.is_closed = state["is_closed"]
        if not self.is_closed:
            self._connect_with_first_gradient()

    def _initialise(
        self,
        optimizer: Optimizer,
        options: Options,
        names: dict[torch.nn.Parameter, str],
        sparse: set[torch.nn.Parameter],
        model: torch.nn.Module | None = None,
        ignored: Collection[torch.Tensor] = (),
    ) -> None:
        OptimizerWrapper.__init__(self, optimizer)

        # What was wrapped
        self._options = options
        self._names = names
        self._sparse = sparse
        self._ignored = ignored  # of the model
        self._model: Callable[[], torch.nn.Module | None] = weakref.ref(model) if model is not None else no_model

        # What reduces: `_sync` if it is connected to other ranks, else `_local`
        self._sync: Reducer | None = None
        self._local: LocalSync = self._make_local()
        self._needs_state = False  # of torchring.elastic, before it can connect

        # Hooks
        self._early_handles: list[torch.utils.hooks.RemovableHandle] = []  # on the parameters, until it is connected
        self._step_handles: list[torch.utils.hooks.RemovableHandle] = []  # on the wrapped optimizer
        self._is_stepping = False  # by `step()` of this class

        # What is recorded
        self._forward_watch: Any = room("forward").ForwardWatch(model)

    def _connect(self, world: World) -> Reducer:
        """Collective: reduce with the ranks of `world` from now on."""
        return world.shared(OptimizerGroup).guard.run("wrap()", self._begin, world)

    def _begin(self, world: World) -> Reducer:
        """Collective: agree, where all ranks have the same optimizer state."""
        return self._agree(world)

    def _agree(self, world: World, guests: Sequence[Participant] = ()) -> Reducer:
        """Collective: agree on a plan with the other ranks and hook the parameters."""
        group = world.shared(OptimizerGroup)
        setup = Setup(
            *(world, self.optimizer, self._model(), self._names, self._sparse, self._ignored, self._options),
            inputs=self._forward_watch.inputs,
            is_sharded=bool(self._options.shard) or room("initial state").is_sharded(self.optimizer),
        )
        self._sync = Reducer(setup, group, self._find_participants(setup), guests=guests, owner=self)
        self._watch_wrapped()
        self._observe(world)
        return self._sync

    def _connect_with_first_gradient(self) -> None:
        """Connect when the first gradient arrives: a copy is made on one rank at a time, and used on all ranks."""

        @run_eagerly
        def hook(parameter: torch.Tensor) -> None:
            self._drop_early_hooks()
            world = self._find_world()
            world.refuse_provisional("backward()")
            if self._needs_state:
                raise ValueError(
                    "an optimizer that was wrapped before torchring.elastic.run began is in no State, so workers that "
                    "come later would not get its state: pass it to torchring.elastic.State"
                )
            if world.size > 1:
                sync = self._connect(world)
                index = next(i for i, p in enumerate(sync.parameters) if p is parameter)
                make_hook(sync, index)(parameter)  # the gradient has arrived just before its hook was there

        self._early_handles = [
            p.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            for p in self._names
            if p.requires_grad
        ]

    def _observe(self, world: World) -> None:
        """Let those who observe `world` see the steps."""
        self._forward_watch.observers = weakref.ref(world.observer)
        self._members = world.members
        world.observer.connect(self._describe)

    def _describe(self) -> Wrapped:
        options = {each.name: str(getattr(self._options, each.name)) for each in dataclasses.fields(self._options)}
        options["model"] = "None" if self._model is no_model else "given"
        options["optimizer"] = type(self.optimizer).__name__
        options["fused"] = str(bool(self.optimizer.defaults.get("fused")))
        return Wrapped(self._names, options, self._sync, self._members)

    def _drop_early_hooks(self) -> None:
        for handle in self._early_handles:
            handle.remove()
        self._early_handles = []

    def _disconnect(self) -> None:
        self._drop_early_hooks()
        while self._step_handles:
            self._step_handles.pop().remove()
        if self._sync is not None:
            self._sync.close()
            self._sync = None
        self._local.close()
        self._local = self._make_local()
        self._forward_watch.observers = no_model

    def _rejoin(self, world: World | None = None, guests: Sequence[Participant] = ()) -> None:
        self._disconnect()
        if world is not None:
            self._needs_state = False
            self.zero_grad()
            if world.size == 1:
                self._observe(world)
            elif not self.is_closed:
                world.shared(OptimizerGroup).guard.run("wrap()", self._agree, world, guests)
        elif not self.is_closed:
            self._connect_with_first_gradient()

    def _make_local(self) -> LocalSync:
        skips = self._options.on_nonfinite == "skip"
        return LocalSync(self._names.keys(), accumulate=self._options.accumulate, skips_non_finite=skips)

    def _watch_wrapped(self) -> None:
        raise NotImplementedError


def no_model() -> None: ...
