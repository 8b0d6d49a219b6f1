"""An optimizer that wraps another one, and shares its state."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.optim import Optimizer


def _shared(name: str) -> Any:
    """An attribute of every optimizer, which here is the wrapped optimizer's."""

    def assign(self: OptimizerWrapper, value: Any) -> None:
        if not self._is_initialising:
            setattr(self.optimizer, name, value)

    return property(operator.attrgetter(f"optimizer.{name}"), assign)


def with_held(optimizer: Optimizer) -> list[Optimizer]:
    """The optimizer, and those in its attributes that step some of its parameters, as in SAM and Lookahead."""
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    found = [optimizer]
    for each in found:  # which grows
        for value in vars(each).values():
            for held in value if isinstance(value, (list, tuple)) else (value,):
                is_new = isinstance(held, Optimizer) and not any(held is other for other in found)
                if is_new and any(id(p) in own for group in held.param_groups for p in group["params"]):
                    found.append(held)
    return found


class OptimizerWrapper(Optimizer):
    """A torch.optim.Optimizer that shares `param_groups`, `state` and `defaults` with the optimizer that it wraps.

    It has hooks of its own on steps. Hooks on checkpoints, and all other public names, are the wrapped optimizer's.
    """

    param_groups = _shared("param_groups")
    state = _shared("state")
    defaults = _shared("defaults")

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer  # the wrapped optimizer
        self._is_initialising = True  # Optimizer.__init__ assigns to what the wrapped optimizer has already
        super().__init__([dict(group) for group in optimizer.param_groups], dict(optimizer.defaults))
        self._is_initialising = False

    def _step_wrapped(self, closure: Callable[[], Any] | None, *args: Any, **kwargs: Any) -> Any:
        """An optimizer's step() need not take a closure, so a closure is passed only if there is one."""
        if closure is None and not args:
            return self.optimizer.step(**kwargs)
        return self.optimizer.step(closure, *args, **kwargs)

    @staticmethod
    def profile_hook_step(func: Callable[..., Any]) -> Callable[..., Any]:
        """torch.optim.Optimizer wraps `step` with this function: here, only this optimizer's own step hooks run.

        The wrapped optimizer's step() runs the hooks of all optimizers (`register_optimizer_step_pre_hook`).
        """

        @functools.wraps(func)
        def step(*args: Any, **kwargs: Any) -> Any:
            optimizer: OptimizerWrapper = args[0]
            for pre_hook in list(optimizer._optimizer_step_pre_hooks.values()):
                changed: Any = pre_hook(optimizer, args, kwargs)
                if changed is not None:
                    if not (isinstance(changed, tuple) and len(changed) == 2):
                        raise RuntimeError(
                            f"a step pre-hook must return None or (new_args, new_kwargs), got {changed!r}"
                        )
                    args, kwargs = changed
            result = func(*args, **kwargs)
            for post_hook in list(optimizer._optimizer_step_post_hooks.values()):
                post_hook(optimizer, args, kwargs)
            return result

        return step

    # Hooks on checkpoints belong to the wrapped optimizer, whose state they see.

    def register_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> Any:
        """Register a hook on the wrapped optimizer, which the hook is called with."""
        return self.optimizer.register_state_dict_pre_hook(hook, prepend)

    def register_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> Any:
        """Register a hook on the wrapped optimizer, which the hook is called with."""
        return self.optimizer.register_state_dict_post_hook(hook, prepend)

    def register_load_state_dict_pre_hook(self, hook: Any, prepend: bool = False) -> Any:
        """Register a hook on the wrapped optimizer, which the hook is called with."""
        return self.optimizer.register_load_state_dict_pre_hook(hook, prepend)

    def register_load_state_dict_post_hook(self, hook: Any, prepend: bool = False) -> Any:
        """Register a hook on the wrapped optimizer, which the hook is called with."""
        return self.optimizer.register_load_state_dict_post_hook(hook, prepend)

    if not TYPE_CHECKING:  # to which any misspelt name would be an attribute

        def __getattr__(self, name: str) -> Any:
            """Whatever else the wrapped optimizer offers publicly."""
            if name.startswith("_") or "optimizer" not in self.__dict__:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            return getattr(self.__dict__["optimizer"], name)

        def __setattr__(self, name: str, value: Any) -> None:
            """Set a switch of the wrapped optimizer (`optimizer.acc_stats = True`) there, where its step looks."""
            if name.startswith("_") or name == "optimizer" or hasattr(type(self), name):
                super().__setattr__(name, value)
            else:
                setattr(self.optimizer, name, value)

        def __delattr__(self, name: str) -> None:
            if name in self.__dict__:
                super().__delattr__(name)
            else:
                delattr(self.optimizer, name)
