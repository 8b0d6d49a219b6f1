"""Takes the place of a gradient that no rank has as a whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from torchring.errors import GradientError


class FreedGradient(torch.Tensor):
    """Has the shape, strides and dtype of a gradient, and no memory. Whoever reads or writes it gets an error.

    Not None: `clip_grad_norm_` and GradScaler pass over parameters without a gradient, and would clip or check nothing.
    """

    @staticmethod
    def __new__(cls, parameter: torch.Tensor) -> FreedGradient:
        return torch.Tensor._make_wrapper_subclass(
            cls, parameter.shape, strides=parameter.stride(), dtype=parameter.dtype, device=parameter.device
        )

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Callable[..., Any], *_: Any) -> NoReturn:  # type: ignore[override]
        raise GradientError(
            f"{func} needs a gradient, and with free_gradients=True no rank has one after backward(): each rank gets "
            "the sum of the elements that it steps. Call optimizer.zero_grad() before backward(). To clip, unscale or "
            "log gradients, leave free_gradients out of torchring.wrap"
        )

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"FreedGradient({tuple(self.shape)}, {self.dtype})"


def drop_freed(parameter: torch.Tensor) -> None:
    """`.grad` becomes None if a stand-in is there."""
    if isinstance(parameter.grad, FreedGradient):
        parameter.grad = None
