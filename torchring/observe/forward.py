"""Notices when a model computes its forward, through hooks on the model."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch

from torchring.observe.inputs import Inputs
from torchring.observer import Observers

_watches: weakref.WeakKeyDictionary[torch.nn.Module, ForwardWatch] = weakref.WeakKeyDictionary()


class ForwardWatch:
    """Tells those who observe a world of each forward with which a model trains, from `start` on.

    A new watch takes over from an earlier one of the model. A scripted model takes no hooks.

    Args:
        model: the model that gets the hooks, if there is one.
        observers: returns those of the world in which the model trains now; None if there is no world.

    Attributes:
        inputs: sees what the model is given.
    """

    def __init__(self, model: torch.nn.Module | None, observers: Callable[[], Observers | None]) -> None:
        self.inputs = Inputs()
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._observers = observers
        self._model = None if model is None or isinstance(model, torch.jit.ScriptModule) else weakref.ref(model)

    def start(self) -> None:
        """Put the hooks on the model. Does nothing from the second call on.

        Call this when a first step has been made: torch.cuda.make_graphed_callables, with which a script may prepare
        its model after `wrap`, takes no model with hooks.
        """
        if self._model is None:
            return
        model, self._model = self._model(), None
        if model is None:
            return
        if (earlier := _watches.get(model)) is not None:  # of an optimizer that may be gone
            earlier.close()
        _watches[model] = self
        self._handles = [
            model.register_forward_pre_hook(_CallHook(self.begin), with_kwargs=True),
            model.register_forward_hook(_CallHook(self.end)),
        ]

    def begin(self, arguments: tuple[Any, ...], keywords: Mapping[str, Any]) -> None:
        if (observers := self._observers()) is not None:
            observers.forward(self.inputs.see(arguments, keywords))

    def end(self, *_: Any) -> None:
        if (observers := self._observers()) is not None:
            observers.forward(None)

    def close(self) -> None:
        self._model = None
        for handle in self._handles:
            handle.remove()
        self._handles = []


class _CallHook:
    """A hook on a module, which calls when the module is called and trains.

    In copies of the module and in files of it, a function that does nothing takes the place of the hook. So a model
    that was wrapped can be unpickled where torchring is not installed.
    """

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, module: torch.nn.Module, *arguments: Any) -> None:
        # A look at the clock would break the graph, or become a constant of it.
        if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
            return
        if torch.is_grad_enabled():
            self._call(*arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")

    @property
    def __name__(self) -> NoReturn:
        raise RuntimeError(
            "torch.jit.script() does not compile the hooks that torchring.wrap() puts on a model; script the model "
            "before wrap(), script a model with the same state_dict(), or call optimizer.close() first"
        )
