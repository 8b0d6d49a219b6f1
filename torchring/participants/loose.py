"""Warns of a plain optimizer beside wrapped ones, such as that of a loss with parameters of its own.

`ownership.py` looks at the parameters of models that `wrap` was given. These belong to none. If the
backward that reaches them reaches a wrapped optimizer, too, all ranks are probably meant to train them together.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Container
from typing import Final

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from torchring.dynamo import run_eagerly
from torchring.gradients.group import Reducers
from torchring.gradients.hooks import BackwardWatch
from torchring.gradients.module_wrappers import MODULE_WRAPPERS, living, sharded_by
from torchring.optimizer_wrapper import OptimizerWrapper
from torchring.participants.ownership import Ownership

_logger: Final = logging.getLogger("torchring")


class LooseOptimizers:
    """Looks at each optimizer of this process once, in its first step that has gradients. Says what it finds once.

    Args:
        reducers: the wrapped optimizers.
        owned: returns the ids of their parameters.
    """

    def __init__(self, reducers: Reducers, owned: Callable[[], Container[int]]) -> None:
        self._reducers = reducers
        self._owned = owned
        self._seen: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        look = run_eagerly(lambda stepped, *_: self._look(stepped))
        self._handle = register_optimizer_step_pre_hook(look)
        self._hooked: dict[int, torch.utils.hooks.RemovableHandle] = {}  # by id of the parameter, which may be gone
        self._reached: dict[torch.Tensor, str] = {}  # by the backward under way, which has reached no reducer yet
        self._watch = BackwardWatch(self._ended, self._reached.clear)

    def close(self) -> None:
        for handle in (self._handle, *self._hooked.values()):
            handle.remove()
        self._watch.close()
        del self._watch, self._owned  # which refer back

    def _look(self, stepped: Optimizer) -> None:
        """Hook one parameter of an optimizer that has some which no reducer reduces."""
        if stepped in self._seen:
            return
        trained = [p for group in stepped.param_groups for p in group["params"] if p.grad is not None]
        if not trained:
            return
        self._seen.add(stepped)
        owned, kind = self._owned(), type(stepped).__name__
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
        if any(reducer.in_backward for reducer in self._reducers):
            self._ended()
        elif not self._watch.is_armed:
            self._watch.arm()

    def _ended(self) -> None:
        reached = list(self._reached.items())
        self._reached.clear()
        if any(reducer.in_backward for reducer in self._reducers):
            for parameter, kind in reached:
                if (handle := self._hooked.pop(id(parameter), None)) is not None:
                    handle.remove()
                if not self._is_known(parameter):
                    _logger.warning(_TEXT, kind, _name(parameter))

    def _is_known(self, parameter: torch.Tensor) -> bool:
        """Whether somebody reduces the gradient, has looked at the parameter, or is to leave it alone."""
        watches = (each for reducer in self._reducers for each in reducer.participants if isinstance(each, Ownership))
        return (
            any(
                parameter is p
                for each in living(OptimizerWrapper)
                for group in each.param_groups
                for p in group["params"]
            )
            or any(watch.watches(parameter) for watch in watches)
            or MODULE_WRAPPERS.first_shared([parameter]) is not None
            or sharded_by(parameter) is not None
        )


_TEXT: Final = (
    "a %s that was not wrapped steps %s, and no rank reduces its gradient: each rank trains it alone. Wrap that "
    "optimizer, too, with the module that has the parameters: torchring.wrap(loss_optimizer, loss). If ranks are to "
    "train it alone, or the script averages its gradients itself, wrap the other optimizer with "
    "torch.nn.ModuleList([model, loss]) and ignore=[loss]"
)


def _name(parameter: torch.Tensor) -> str:
    for module in living(torch.nn.Module):
        for name, each in module._parameters.items():
            if each is parameter:
                return f"the {name} of a {type(module).__name__}"
    return f"a parameter of shape {tuple(parameter.shape)}"
