"""The tensors that an optimizer steps in place of the parameters, and their gradients.

A shard lies in the memory of its parameter, so a step of the shard is a step of these elements. It has at most 512 KiB:
a plain for-loop optimizer, which is PyTorch's default on the CPU, passes over a tensor a dozen times, and finds a small
one in the cache again. (AdamW, 21 M elements on each of 2 cores: 29 ms; in shards of 16 MiB 61 to 79 ms. `fused=True`:
17 and 16 ms.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from torchring.errors import GradientError
from torchring.sharding.parameters import FlatMemory

_MOST_BYTES: Final = 512 * 1024
_MOST_BYTES_ON_DEVICE: Final = 16 << 20  # few launches


@dataclass(frozen=True, eq=False)
class Shard:
    """Elements [start, stop) of a parameter, in memory order, which this rank steps.

    Attributes:
        tensor: what the optimizer sees; the parameter itself if the optimizer needs whole parameters.
        index: of the parameter.
    """

    tensor: torch.Tensor
    parameter: torch.nn.Parameter
    index: int
    start: int
    stop: int

    def take_gradient(self, name: str) -> None:
        """Give the tensor its part of the gradient. Raises GradientError, with this name, if that is sparse."""
        grad = self.parameter.grad
        if grad is None or self.tensor is self.parameter:
            return
        if grad.is_sparse:
            raise GradientError(
                f"{name} has a sparse gradient; with shard=True, pass the model to torchring.wrap(optimizer, model), "
                "so that sparse embeddings are found beforehand",
                parameters=(name,),
            )
        self.tensor.grad = flat(laid_out_as(grad.detach(), self.parameter))[self.start : self.stop]

    def drop_gradient(self) -> None:
        if self.tensor is not self.parameter:
            self.tensor.grad = None


def cut_shards(
    memory: FlatMemory, rank: int, parameters: Sequence[torch.nn.Parameter], *, on_device: bool = False
) -> list[Shard]:
    """What a rank steps of the parameters in this memory."""
    step = max(1, (_MOST_BYTES_ON_DEVICE if on_device else _MOST_BYTES) // memory.flat.dtype.itemsize)
    first, last = memory.flat.bounds[rank]
    shards = []
    for index, (begin, end) in memory.flat.spans.items():
        for start in range(max(first, begin), min(last, end), step):
            stop = min(start + step, last, end)
            tensor = memory.own[start:stop]
            shards.append(Shard(tensor, parameters[index], index, start - begin, stop - begin))
    return shards


def whole_shards(memory: FlatMemory, rank: int, parameters: Sequence[torch.nn.Parameter]) -> list[Shard]:
    """As `cut_shards`, for an optimizer that needs whole parameters."""
    first, last = memory.flat.bounds[rank]
    ((index, (start, stop)),) = memory.flat.spans.items()
    return [Shard(parameters[index], parameters[index], index, start, stop)] if first < last else []


def by_parameter(shards: Sequence[Shard]) -> dict[int, list[Shard]]:
    """The shards, by the index of their parameter."""
    found: dict[int, list[Shard]] = {}
    for shard in shards:
        found.setdefault(shard.index, []).append(shard)
    return found


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor without gaps, in memory order."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def laid_out_as(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy, with its elements in the same order in memory as those of `like`."""
    if tensor.stride() == like.stride() and not (tensor.is_conj() or tensor.is_neg()):
        return tensor
    return torch.empty_strided(like.shape, like.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)
