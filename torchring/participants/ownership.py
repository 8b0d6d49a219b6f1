"""Does every parameter that trains belong to a wrapped optimizer, and to nobody else who reduces gradients?

Parameters of no wrapped optimizer would be trained by each rank alone. Of those that DDP or FSDP has, see
`module_wrappers.py`.

Each rank looks at its own model at the end of a reduction: after 1, 2, 3, 5, 9 ... of them, and every 100. If there
was none since the last step, no backward has reached a wrapped parameter, and a rank looks before the step. What is
wrong is an error in `step()`.

A plain optimizer beside wrapped ones, such as that of a loss with parameters of its own, may have parameters that
belong to no model that `wrap` was given. If the backward that reaches them reaches a wrapped optimizer, too, all ranks
are probably meant to train them together. A warning says so.
"""

import logging
import operator
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torchring.dynamo import run_eagerly
from torchring.errors import GradientError
from torchring.gradients.contract import Setup
from torchring.gradients.group import OptimizerGroup
from torchring.gradients.hooks import BackwardWatch
from torchring.gradients.ledger import is_zero
from torchring.gradients.reducer import Reducer
from torchring.gradients.reduction import STEPS_BETWEEN_CHECKS, Participant, Reduction, StepPoint
from torchring.gradients.validation import parameters_of
from torchring.gradients.views import local_of, whole_of
from torchring.optimizer_wrapper import OptimizerWrapper
from torchring.participants.module_wrappers import MODULE_WRAPPERS, WAY_OUT, explain, living
from torchring.world import World

_logger: Final = logging.getLogger("torchring")
_MOST_NAMES: Final = 3
_ON_PURPOSE: Final = "For parameters that belong to a rank on purpose, pass ignore=[...] to torchring.wrap()"
_NOT_WRAPPED: Final = (
    "a %s that was not wrapped steps %s, and no rank reduces its gradient: each rank trains it alone. Wrap that "
    "optimizer, too, with the module that has the parameters: torchring.wrap(loss_optimizer, loss). If ranks are to "
    "train it alone, or the script averages its gradients itself, wrap the other optimizer with "
    "torch.nn.ModuleList([model, loss]) and ignore=[loss]"
)


class Ownership(Participant):
    """Looks at the parameters of the optimizer, and of the model that `wrap` was given. Refers to the model weakly."""

    def __init__(self, reducer: Reducer, setup: Setup) -> None:
        model = setup.model
        self._model: Callable[[], torch.nn.Module | None] = weakref.ref(model) if model is not None else lambda: None
        self._names = setup.names  # may grow
        self._parameters = reducer.parameters  # may grow
        self._reducer = weakref.ref(reducer)
        self._optimizer = weakref.ref(setup.optimizer)
        self._kind = type(setup.optimizer).__name__
        self._stepped = list(setup.names)  # in the order of `param_groups`
        self._group = setup.world.shared(OptimizerGroup)
        self._ignored = setup.ignored
        self._rank = setup.world.rank
        self._seen = 0, 0  # see `_refuse_module_wrappers`
        self._has_reduction = False  # since the last step
        self._is_stepping = False
        self._found: dict[str, torch.nn.Parameter] = {}
        if model is not None:
            _note_stale(p for p in model.parameters() if p not in setup.names)
        if self._rank == 0:
            setup.world.shared(LooseOptimizers)

    def close(self) -> None:
        _note_stale(self._parameters)

    def before_backward(self) -> None:
        self._refuse_module_wrappers()

    def on_message(self, current: Reduction) -> None:
        """A rank without data has computed nothing: its gradients are those of its last step, scaled by clipping."""
        self._has_reduction = True
        is_due = not current.number & (current.number - 1) or current.number % STEPS_BETWEEN_CHECKS == 0
        if is_due and current.weight:
            self._look()

    def on_step(self, when: StepPoint) -> None:
        """Raise GradientError if a parameter has got a gradient that nobody reduces."""
        if when == "before":
            self._refuse_module_wrappers()
            self._refuse_other_parameters()
        if when != "agreed":
            self._is_stepping = when == "before" or self._is_stepping
            return
        if self._is_stepping and not self._has_reduction:
            self._look()
        self._is_stepping = self._has_reduction = False
        found, self._found = self._found, {}
        if found:
            raise self._error(found)

    def watches(self, parameter: torch.Tensor) -> bool:
        """Whether the parameter is one of the model's, or ignored."""
        model = self._model()
        return parameter in self._ignored or (model is not None and any(parameter is p for p in model.parameters()))

    def _look(self) -> None:
        """Find the parameters that have a gradient which nobody reduces, before a script zeroes it."""
        if (model := self._model()) is not None:
            owned = _owned(self._group)
            has_grad = ((name, p) for name, p in model.named_parameters() if p.grad is not None)
            self._found = {n: p for n, p in has_grad if p.requires_grad and id(p) not in owned and self._is_new(p)}

    def _refuse_module_wrappers(self) -> None:
        """Raise GradientError if a DDP or FSDP reduces one of the parameters, too, whenever it was built."""
        seen = MODULE_WRAPPERS.num_built, len(self._parameters)
        if self._seen == seen:
            return
        reducer, shared = self._reducer(), MODULE_WRAPPERS.first_shared(self._parameters)
        if shared and reducer is not None:
            index, kind = shared
            name = self._names[self._parameters[index]]
            raise GradientError(explain(name, kind), rank=self._rank, parameters=(name,), step=reducer.num_steps)
        self._seen = seen

    def _refuse_other_parameters(self) -> None:
        """Raise GradientError if the optimizer steps other parameters by now than those that are reduced."""
        if (optimizer := self._optimizer()) is None:
            return
        now = [p for group in optimizer.param_groups for p in group["params"]]
        if len(now) == len(self._stepped) and all(map(operator.is_, now, self._stepped)):
            return
        again = "close() this optimizer and call torchring.wrap() again, on all ranks"
        for g, group in enumerate(optimizer.param_groups):
            for i, parameter in enumerate(group["params"]):
                if parameter not in self._names:
                    raise GradientError(
                        f"group{g}.param{i} of the wrapped optimizer, shape {tuple(parameter.shape)}, came there past "
                        f"torchring, so its gradient is this rank's own. After replacing parameters, {again}; add "
                        "parameters with add_param_group() of the DistributedOptimizer",
                        rank=self._rank,
                    )
        if gone := self._names.keys() - now:
            name = next(name for parameter, name in self._names.items() if parameter in gone)
            text = f"{name} was taken out of the wrapped optimizer. After that, {again}"
            raise GradientError(text, rank=self._rank, parameters=(name,))
        self._stepped = now  # the same in another order, or more that were added

    def _is_new(self, parameter: torch.nn.Parameter) -> bool:
        """Whether backward has computed the gradient since `wrap` or `close()`, of a parameter that is not ignored.

        Scripts put zeros into `.grad` of parameters that they do not train, as slices of one tensor.
        """
        grad, (stale, version) = parameter.grad, _stale.get(id(parameter), (lambda: None, 0))
        if grad is None or parameter in self._ignored or (stale() is grad and grad._version == version):
            return False
        return not is_zero(grad)

    def _error(self, loose: Mapping[str, torch.nn.Parameter]) -> GradientError:
        model = self._model()
        present = set() if model is None else set(map(hash, model.parameters()))
        gone = next((name for p, name in self._names.items() if hash(p) not in present), None)
        names = list(loose)
        more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
        what = ", ".join(names[:_MOST_NAMES]) + more
        gets = f"{what} {'gets a gradient' if len(names) == 1 else 'get gradients'}"
        ids = set(map(id, loose.values()))
        others = (each for each in living(Optimizer) if not ids.isdisjoint(map(hash, parameters_of(each))))
        if gone is not None:
            text = (
                f"the {gone} that was wrapped is not a parameter of the model any more, and {gets} that nobody reduces"
            )
            had_dtensors = any(p is not whole_of(p) for p in self._names)
            if not had_dtensors and any(local_of(p) is not p or hasattr(p, "_is_flat_param") for p in loose.values()):
                text += f", as after fully_shard() or FSDP. {WAY_OUT}"
            else:
                text += (
                    ". Parameters were replaced after wrap(), as by load_state_dict(assign=True), a new layer or "
                    "parametrize. Do that first, and build the optimizer and call wrap() after it; or close() this "
                    "optimizer, and wrap one with the new parameters, on all ranks"
                )
        elif (other := next(others, None)) is not None:
            text = (
                f"{gets} that nobody reduces: each rank would train alone what its {type(other).__name__} has, which "
                f"was not wrapped. Pass that optimizer to torchring.wrap(), too, before the first backward(). "
                f"{_ON_PURPOSE}"
            )
        else:
            text = (
                f"{gets} that nobody reduces, because no optimizer has what was added to the model or unfrozen. Add it "
                f"to the wrapped {self._kind} with add_param_group(), or freeze it with requires_grad_(False). "
                f"{_ON_PURPOSE}"
            )
        return GradientError(text, rank=self._rank, parameters=names)


class LooseOptimizers:
    """Looks at each optimizer of this process once, in its first step that has gradients. Says what it finds once.

    `world.shared(LooseOptimizers)` opens it once.
    """

    def __init__(self, world: World) -> None:
        self._group = world.shared(OptimizerGroup)
        self._seen: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        look = run_eagerly(lambda stepped, *_: self._look(stepped))
        self._handle = register_optimizer_step_pre_hook(look)
        self._hooked: dict[int, torch.utils.hooks.RemovableHandle] = {}  # by id of the parameter, which may be gone
        self._reached: dict[torch.Tensor, str] = {}  # by the backward under way, which has reached no reducer yet
        self._watch = BackwardWatch(self._ended, self._reached.clear)
        world.on_close(self.close)

    def close(self) -> None:
        for handle in (self._handle, *self._hooked.values()):
            handle.remove()
        self._watch.close()
        del self._watch  # which refers back

    def _look(self, stepped: Optimizer) -> None:
        """Hook one parameter of an optimizer that has some which no reducer reduces."""
        if stepped in self._seen:
            return
        trained = [p for group in stepped.param_groups for p in group["params"] if p.grad is not None]
        if not trained:
            return
        self._seen.add(stepped)
        owned, kind = _owned(self._group), type(stepped).__name__
        self._hooked = {key: each for key, each in self._hooked.items() if each.hooks_dict_ref() is not None}
        left = (
            p for p in trained if p.requires_grad and p.is_leaf and id(p) not in owned and id(p) not in self._hooked
        )
        if (loose := next(left, None)) is not None:
            hook = run_eagerly(lambda parameter: self._arrived(kind, parameter))
            self._hooked[id(loose)] = loose.register_post_accumulate_grad_hook(hook)

    def _arrived(self, kind: str, parameter: torch.Tensor) -> None:
        """A loose parameter has its gradient, before or after the first gradient of a reducer."""
        self._reached[parameter] = kind
        if any(reducer.in_backward for reducer in self._group.reducers):
            self._ended()
        elif not self._watch.is_armed:
            self._watch.arm()

    def _ended(self) -> None:
        reached = list(self._reached.items())
        self._reached.clear()
        if any(reducer.in_backward for reducer in self._group.reducers):
            for parameter, kind in reached:
                if (handle := self._hooked.pop(id(parameter), None)) is not None:
                    handle.remove()
                if not self._is_known(parameter):
                    _logger.warning(_NOT_WRAPPED, kind, _name(parameter))

    def _is_known(self, parameter: torch.Tensor) -> bool:
        """Whether somebody reduces the gradient, has looked at the parameter, or is to leave it alone."""
        everybody = (each for reducer in self._group.reducers for each in reducer.participants)
        return (
            any(parameter is p for each in living(OptimizerWrapper) for p in parameters_of(each))
            or any(isinstance(each, Ownership) and each.watches(parameter) for each in everybody)
            or MODULE_WRAPPERS.first_shared([parameter]) is not None
            or local_of(parameter) is not parameter
        )


_stale: Final[dict[int, tuple[weakref.ref[torch.Tensor], int]]] = {}
"""By id of the parameter: a gradient that no wrapped optimizer is to step any more, and its version."""


def _note_stale(parameters: Iterable[torch.Tensor]) -> None:
    for key in [key for key, (gradient, _) in _stale.items() if gradient() is None]:
        del _stale[key]
    _stale.update((id(p), (weakref.ref(p.grad), p.grad._version)) for p in parameters if p.grad is not None)


def _owned(group: OptimizerGroup) -> set[int]:
    """The ids of all parameters that a reducer reduces, or would if they were not frozen."""
    reducers = (reducer for each in group.of_this_rank for reducer in each.reducers)
    return {hash(p) for reducer in reducers for p in (*reducer.parameters, *reducer.frozen)}


def _name(parameter: torch.Tensor) -> str:
    for module in living(torch.nn.Module):
        for name, each in module._parameters.items():
            if each is parameter:
                return f"the {name} of a {type(module).__name__}"
    return f"a parameter of shape {tuple(parameter.shape)}"
