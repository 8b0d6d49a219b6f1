"""Fragments: parts of the parameters, each sent at a time of its own (Streaming DiLoCo, arXiv 2501.18512).

Example of 3 fragments and every=6: they are sent after steps 2, 4 and 6, then after 8, 10 and 12, and so on.
"""

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final

import torch

from torchring.local_steps.outer_exchange import Incoming

_KEEPS: Final = 0.5  # how much of the local parameters stays, where steps have overlapped with the message


@dataclass(eq=False)
class Fragment:
    """Whole parameters, and what this rank knows of them."""

    outer: Mapping[torch.nn.Parameter, torch.nn.Parameter]  # by parameter: its outer parameter
    sent_at: int  # it is sent after the steps that leave this remainder when divided by `every`
    num_made: int = 0  # inner steps since it was sent, without those that a GradScaler has left out
    feedback: torch.Tensor | None = None  # what codes have lost
    # While it is under way: the step after which it is merged, the result, and the inner steps that were sent
    under_way: tuple[int, Future[Incoming], int] | None = None

    def deltas(self) -> list[torch.Tensor]:
        """The outer parameters, as this rank has got them, less the local ones. On the CPU, real, fp32 or fp64."""
        pairs = [(outer, real(parameter.detach())) for parameter, outer in self.outer.items()]
        return [(outer.detach().to(local.dtype).to(outer.dtype) - local).cpu() for outer, local in pairs]

    @torch.no_grad()
    def load_outer(self, *, keeps: bool = False) -> None:
        """Local parameters become the outer ones; with `keeps`, the mean of both."""
        for parameter, outer in self.outer.items():
            local = real(parameter.detach())
            local.copy_(torch.lerp(outer, local.to(outer.dtype), _KEEPS) if keeps else outer)

    def drop(self) -> None:
        """Forget what is under way: it is a part of the next deltas."""
        if self.under_way is not None:
            self.num_made += self.under_way[2]
            self.under_way = None


def cut(outer: Mapping[torch.nn.Parameter, torch.nn.Parameter], number: int, every: int) -> list[Fragment]:
    """Fragments of about equally many elements, none of them empty."""
    total, before = sum(p.numel() for p in outer), 0
    parts: list[dict[torch.nn.Parameter, torch.nn.Parameter]] = [{}]
    for i, parameter in enumerate(outer):
        is_full = before + parameter.numel() // 2 > total * len(parts) / number
        is_needed = len(outer) - i <= number - len(parts)  # or the last ones would be empty
        if parts[-1] and len(parts) < number and (is_full or is_needed):
            parts.append({})
        parts[-1][parameter] = outer[parameter]
        before += parameter.numel()
    return [Fragment(part, i * every // number % every) for i, part in enumerate(parts, start=1)]


def real(tensor: torch.Tensor) -> torch.Tensor:
    """A view; complex numbers as pairs of real ones."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def outer_of(parameter: torch.Tensor) -> torch.nn.Parameter:
    """A copy, real, in fp32 or fp64."""
    values = real(parameter.detach())
    dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
    return torch.nn.Parameter(values.to(dtype, copy=True, memory_format=torch.contiguous_format))
