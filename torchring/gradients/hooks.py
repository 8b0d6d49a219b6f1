"""Hears from autograd: a gradient has arrived, or backward is about to return. Only this file asks autograd's engine.

A gradient arrives in a public post-accumulate hook of its parameter. Most hooks only note a number in a list: see
`Launcher.on_ready`. On a device they also note the stream that computed the gradient, in the same frame.

The end of backward comes through `Variable._execution_engine.queue_callback`, which is not a public name.
DistributedDataParallel and FSDP2 use the same name. The engine leaves two cases to us. With reentrant checkpointing a
backward runs inside a backward, and a callback queued in the inner backward fires at the end of the inner backward.
When backward raises, callbacks do not fire at all.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch.autograd import Variable

from torchring.dynamo import run_eagerly

if TYPE_CHECKING:
    from torchring.gradients.reducer import Reducer

Hook = Callable[[torch.Tensor], None]
StreamNotes = tuple[Callable[[], object], Callable[[object], None]]
"""On a device: returns the current stream, and takes the stream that has computed a gradient."""


def attach_hooks(reducer: Reducer, first: int) -> list[torch.utils.hooks.RemovableHandle]:
    """Hook the parameters of the reducer from index `first` on."""
    parameters = reducer.parameters
    for parameter in parameters[first:]:
        if (earlier := parameter._post_accumulate_grad_hooks) is not None:
            parameter._post_accumulate_grad_hooks = earlier  # torch.utils.swap_tensors may have left only the list
    return [
        parameters[index].register_post_accumulate_grad_hook(make_hook(reducer, index))  # type: ignore[no-untyped-call]
        for index in range(first, len(parameters))
    ]


def make_hook(reducer: Reducer, index: int) -> Hook:
    """The hook of parameter `index`. On a device it notes the stream that has computed the gradient, too."""

    @run_eagerly
    def hook(_: torch.Tensor) -> None:
        if not reducer.watch.is_armed:
            reducer.begin_backward()
        try:
            reducer.on_ready[index](index)
        except BaseException as error:
            reducer.gradient_failed(error)
            raise

    if (notes := reducer.stream_notes) is None:
        return hook
    current_stream, note = notes

    @run_eagerly
    def hook_on_device(_: torch.Tensor) -> None:
        if not reducer.watch.is_armed:
            reducer.begin_backward()
        try:
            note(current_stream())
            reducer.on_ready[index](index)
        except BaseException as error:
            reducer.gradient_failed(error)
            raise

    return hook_on_device


class BackwardWatch:
    """Calls `on_end` once at the end of the outermost backward, on the thread of backward(), just before it returns.

    Calls `on_abort` if backward or `on_end` raised, as soon as the engine has let go of it.
    """

    def __init__(self, on_end: Callable[[], None], on_abort: Callable[[], None]) -> None:
        self._on_end = on_end
        self._on_abort = on_abort
        self._token: weakref.ref[_EndToken] | None = None
        self.is_armed = False
        """Whether the end of the backward under way will be noticed. A plain attribute, because every hook reads it."""

    def arm(self) -> None:
        """Call from a hook, inside backward, when not armed."""
        self._queue(_EndToken(self._ended))

    def close(self) -> None:
        """Call back no more, and let go of the callbacks. Not inside a backward: its end has to be noticed."""
        self._on_end = self._on_abort = lambda: None

    def _queue(self, token: _EndToken) -> None:
        self._token = weakref.ref(token, self._dropped)
        self.is_armed = True
        # From here on only the engine holds the token. The engine drops the token when backward raises.
        Variable._execution_engine.queue_callback(token)

    @run_eagerly
    def _ended(self) -> None:
        self.is_armed = False
        node = torch._C._current_autograd_node()
        # In a hook on a leaf, as in GradCache, an inner backward is one of its own: nothing comes after a leaf.
        if node is None or not node.next_functions:
            self._token = None
            try:
                self._on_end()
            except BaseException:
                self._on_abort()
                raise
            return
        # An inner backward has ended, which `node` of an outer backward runs. What runs after `node` belongs to the
        # outer backward: the first successor of `node`, or our next hook, whichever comes first, arms the watch there.
        token = _EndToken(self._ended)
        self._token = weakref.ref(token, self._dropped)
        for successor, _ in node.next_functions:
            if successor is not None:
                token.handles.append(successor.register_prehook(run_eagerly(lambda _: self._rearm(token))))

    def _rearm(self, token: _EndToken) -> None:
        for handle in token.handles:
            handle.remove()
        token.handles.clear()
        if self._token is not None and self._token() is token:
            self._queue(token)

    @run_eagerly
    def _dropped(self, reference: weakref.ref[_EndToken]) -> None:
        if reference is self._token:  # the engine let go of the token without calling it
            self._token = None
            self.is_armed = False
            self._on_abort()


class _EndToken(functools.partial[None]):
    """The engine holds the token and calls it. A token that dies without a call means that backward has raised."""

    def __init__(self, _: Callable[[], None]) -> None:
        self.handles: list[torch.utils.hooks.RemovableHandle] = []


def is_compiled_backward() -> bool:
    """True if compiled autograd runs the current backward."""
    module = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(getattr(module, "in_compiled_autograd_region", False))
