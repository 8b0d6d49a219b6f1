"""A gradient arrives: one public post-accumulate hook per parameter. Its work is O(1), unless a bucket fills."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from torchring.dynamo import run_eagerly
from torchring.gradients.backward import BackwardWatch

Hook = Callable[[torch.Tensor], None]


class Listener(Protocol):
    """Hears of gradients from the hooks.

    Attributes:
        watch: notices the end of a backward.
        mark_ready: called with the index of a parameter that has its gradient.
    """

    @property
    def watch(self) -> BackwardWatch: ...
    @property
    def mark_ready(self) -> Callable[[int], None]: ...

    def begin_backward(self, index: int) -> None:
        """The first gradient of a backward arrives; or of an outer backward, after the end of an inner one.

        Args:
            index: of the parameter that has the gradient.
        """

    def gradient_failed(self, error: BaseException) -> None:
        """`mark_ready` has raised."""


def attach_hooks(
    listener: Listener, parameters: Sequence[torch.nn.Parameter], first: int
) -> list[torch.utils.hooks.RemovableHandle]:
    """Hook the parameters from index `first` on."""
    for parameter in parameters[first:]:
        if (earlier := parameter._post_accumulate_grad_hooks) is not None:
            parameter._post_accumulate_grad_hooks = earlier  # torch.utils.swap_tensors may have left only the list
    return [
        parameters[index].register_post_accumulate_grad_hook(make_hook(listener, index))  # type: ignore[no-untyped-call]
        for index in range(first, len(parameters))
    ]


def make_hook(listener: Listener, index: int) -> Hook:
    """The hook of parameter `index`."""

    @run_eagerly
    def hook(_: torch.Tensor) -> None:
        if not listener.watch.is_armed:
            listener.begin_backward(index)
        try:
            listener.mark_ready(index)
        except BaseException as error:
            listener.gradient_failed(error)
            raise

    return hook
