"""Notices when a model computes its forward, through hooks on the model."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch

from torchring.observe.phases import BACKWARD, FORWARD
from torchring.observe.recorder.recorder import Recorder

_watches: weakref.WeakKeyDictionary[torch.nn.Module, ForwardWatch] = weakref.WeakKeyDictionary()


class ForwardWatch:
    """Tells a recorder of each forward with which a model trains, from `start` on.

    A new watch takes over from an earlier one of the model. A scripted model takes no hooks.

    Args:
        model: the model that gets the hooks, if there is one.
        recorder: returns the recorder of the world in which the model trains now; None if there is nothing to record.
    """

    def __init__(self, model: torch.nn.Module | None, recorder: Callable[[], Recorder | None]) -> None:
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._recorder = recorder
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
            model.register_forward_pre_hook(_Hook(self._recorder, _begins), with_kwargs=True),
            model.register_forward_hook(_Hook(self._recorder, _ends)),
        ]

    def close(self) -> None:
        """Remove the hooks."""
        self._model = None
        for handle in self._handles:
            handle.remove()
        self._handles = []


class TransientHook:
    """A hook on a module. In a copy of the module, and in a pickled one, a function that does nothing takes its place.

    So a model that was wrapped can be unpickled where torchring is not installed.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (contextlib.nullcontext(), "__exit__")

    @property
    def __name__(self) -> NoReturn:
        raise RuntimeError(
            "torch.jit.script() does not compile the hooks that torchring.wrap() puts on a model; script the model "
            "before wrap(), script a model with the same state_dict(), or call optimizer.close() first"
        )


class _Hook(TransientHook):
    """Tells a recorder when a model that trains is called."""

    def __init__(
        self, recorder: Callable[[], Recorder | None], tell: Callable[[Recorder, tuple[Any, ...]], None]
    ) -> None:
        self._recorder = recorder
        self._tell = tell

    def __call__(self, module: torch.nn.Module, *arguments: Any) -> None:
        # A look at the clock would break the graph, or become a constant of it.
        if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
            return
        if torch.is_grad_enabled() and (recorder := self._recorder()) is not None:
            self._tell(recorder, arguments)


def _begins(recorder: Recorder, arguments: tuple[Any, ...]) -> None:
    recorder.enter(FORWARD)
    recorder.num_samples += _num_samples(*arguments)


def _ends(recorder: Recorder, _: tuple[Any, ...]) -> None:
    recorder.enter(BACKWARD)


def _num_samples(inputs: tuple[Any, ...], keywords: Mapping[str, Any]) -> int:
    """Length of the first dimension of the first tensor; 0 if there is none."""
    for each in (*inputs, *keywords.values()):
        if isinstance(each, torch.Tensor):
            return int(each.size(0)) if each.dim() else 0  # a nested tensor has no shape
    return 0
