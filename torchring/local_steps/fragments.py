"""Fragments: parts of the parameters, each sent at a time of its own (Streaming DiLoCo, arXiv 2501.18512).

Example of 3 fragments and every=6: they are sent after steps 2, 4 and 6, then after 8, 10 and 12, and so on.
"""

import bisect
import itertools
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Final

import torch
from torch.optim import Optimizer

from torchring.local_steps.outer_exchange import Incoming
from torchring.participants.buffers import BufferSpec

_KEEPS: Final = 0.5  # how much of the local parameters stays, where steps have overlapped with the message


@dataclass(eq=False)
class Fragment:
    """Whole parameters, and what this rank knows of them."""

    outer: Mapping[torch.nn.Parameter, torch.nn.Parameter]  # by parameter: its outer parameter
    sent_at: int  # it is sent after the steps that leave this remainder when divided by `every`
    buffers: Sequence[BufferSpec] = ()  # of which those that are averaged travel with it
    num_made: int = 0  # inner steps since it was sent, without those that a GradScaler has left out
    feedback: torch.Tensor | None = None  # what codes have lost
    # While it is under way: the step after which it is merged, the result, and the inner steps that were sent
    under_way: tuple[int, Future[Incoming], int] | None = None

    def tensors(self) -> list[torch.Tensor]:
        """What is sent: the outer parameters, as this rank has got them, less the local ones; and buffers.

        On the CPU, real; parameters in fp32 or fp64.
        """
        pairs = [(outer.detach(), real(parameter.detach())) for parameter, outer in self.outer.items()]
        deltas = [(outer.to(local.dtype).to(outer.dtype) - local).cpu() for outer, local in pairs]
        return [*deltas, *(buffer.to("cpu", copy=True) for buffer in self._find_buffers())]

    @torch.no_grad()
    def take(self, means: torch.Tensor, optimizer: Optimizer, *, keeps: bool) -> None:
        """Make an outer step. `means`: over ranks, of `tensors`, 1-D. `keeps`: see `load_outer`."""
        targets = [*self.outer.values(), *self._find_buffers()]
        for target, mean in zip(targets, torch.split(means, [each.numel() for each in targets]), strict=True):
            if isinstance(target, torch.nn.Parameter):
                target.grad = mean.view(target.shape).to(target)
            else:
                target.copy_(mean.view(target.shape))
        optimizer.step()
        optimizer.zero_grad()
        self.load_outer(keeps=keeps)

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

    def _find_buffers(self) -> list[torch.Tensor]:
        found = [spec.find() for spec in self.buffers if spec.is_averaged]
        return [real(buffer.detach()) for buffer in found if buffer is not None]


def cut(outer: Mapping[torch.nn.Parameter, torch.nn.Parameter], number: int, every: int) -> list[Fragment]:
    """Fragments of about equally many elements, none of them empty."""
    sizes = [parameter.numel() for parameter in outer]
    middles = [end - size / 2 for end, size in zip(itertools.accumulate(sizes), sizes, strict=True)]
    ends = [0]
    for i in range(1, number + 1):
        least, most = ends[-1] + 1, len(outer) - number + i
        ends.append(min(max(bisect.bisect(middles, sum(sizes) * i / number), least), most))
    parts = [dict([*outer.items()][begin:end]) for begin, end in itertools.pairwise(ends)]
    return [Fragment(part, i * every // number % every) for i, part in enumerate(parts, start=1)]


def real(tensor: torch.Tensor) -> torch.Tensor:
    """A view; complex numbers as pairs of real ones."""
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def outer_of(parameter: torch.Tensor) -> torch.nn.Parameter:
    """A copy, real, in fp32 or fp64."""
    values = real(parameter.detach())
    dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
    return torch.nn.Parameter(values.to(dtype, copy=True, memory_format=torch.contiguous_format))
