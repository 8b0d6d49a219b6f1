"""The tensors that an optimizer steps in place of the parameters, and their gradients.

A piece lies in the memory of the parameters, so a step of the piece is a step of these parameters. The elements are cut
into pieces of 512 KiB: a plain for-loop optimizer, which is PyTorch's default on the CPU, passes over a tensor a dozen
times, and finds a piece in the cache again. (AdamW, 21 M elements on each of 2 cores: 29 ms; in pieces of 16 MiB 61 to
79 ms. `fused=True`: 17 and 16 ms.)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from torchring.errors import GradientError
from torchring.sharding.cut import Member, Region
from torchring.sharding.kinds import SCALARS
from torchring.sharding.parameters import RegionMemory

_MOST_BYTES: Final = 512 * 1024
_MOST_BYTES_ON_DEVICE: Final = 16 << 20  # few launches; a checkpoint gathers one at a time


@dataclass(frozen=True)
class Part:
    """Elements [start, stop) of a parameter, in memory order. They begin at element `place` of their piece."""

    parameter: torch.nn.Parameter
    name: str
    start: int
    stop: int
    place: int

    @property
    def numel(self) -> int:
        return self.stop - self.start

    @property
    def is_whole(self) -> bool:
        return self.numel == self.parameter.numel()


@dataclass(eq=False)
class Piece:
    """A tensor to step: a part of one parameter, or parts of several that lie side by side.

    Attributes:
        tensor: what the optimizer sees; a parameter itself if the optimizer needs whole parameters.
        region: index of the region.
        group: index of the parameter group.
        start: the first element in the region.
    """

    tensor: torch.Tensor
    region: int
    group: int
    start: int
    parts: tuple[Part, ...]
    _gradient: torch.Tensor | None = field(default=None, init=False)  # of several parts, side by side
    _places: list[torch.Tensor] = field(default_factory=list, init=False)  # of the parts there

    @property
    def is_parameter(self) -> bool:
        return self.tensor is self.parts[0].parameter

    def take_gradient(self) -> bool:
        """Give the tensor its gradient. Returns False if only some of the parts have one: then split the piece."""
        if self.is_parameter:
            return True
        if len(self.parts) == 1:
            self.tensor.grad = _gradient_of(self.parts[0])
            return True
        grads = [part.parameter.grad for part in self.parts]
        if all(grad is None for grad in grads):
            return True
        if any(grad is None for grad in grads):
            return False
        if self._gradient is None:
            self._gradient = torch.zeros_like(self.tensor)
            self._places = [_place(self._gradient, part) for part in self.parts]
        torch._foreach_copy_(self._places, list(map(_gradient_for_copy, self.parts)))
        self.tensor.grad = self._gradient
        return True

    def drop_gradient(self) -> None:
        if not self.is_parameter:
            self.tensor.grad = None

    def split(self) -> list[Piece]:
        """A piece for each part."""
        pieces = []
        for part in self.parts:
            tensor = self.tensor[part.place : part.place + part.numel]
            moved = Part(part.parameter, part.name, part.start, part.stop, 0)
            pieces.append(Piece(tensor, self.region, self.group, self.start + part.place, (moved,)))
        return pieces

    def split_state(self, state: dict[str, Any]) -> list[dict[str, Any]]:
        """The optimizer's state for each part, given that of the piece."""
        return [
            {
                key: copy_of(value) if is_scalar(key, value) else value[part.place : part.place + part.numel].clone()
                for key, value in state.items()
            }
            for part in self.parts
        ]


def is_scalar(key: str, value: Any) -> bool:
    """Whether an optimizer that steps elements keeps this once for each tensor, and not for each element."""
    return key in SCALARS or not isinstance(value, torch.Tensor)


def piece_bytes(on_device: bool) -> int:
    return _MOST_BYTES_ON_DEVICE if on_device else _MOST_BYTES


def cut_pieces(
    index: int, memory: RegionMemory, rank: int, parameters: Sequence[torch.nn.Parameter], names: Sequence[str],
    *, most_bytes: int = _MOST_BYTES,
) -> list[Piece]:  # fmt: skip
    """The pieces of a rank's slice of a region. The parameters of a piece are in one group."""
    region = memory.region
    step = max(1, most_bytes // region.dtype.itemsize)
    pieces = []
    for start, stop, inside in _ranges(region, *region.bounds[rank], step):
        begin = max(start, inside[0].offset)
        end = min(stop, inside[-1].offset + inside[-1].numel)
        parts = []
        for member in inside:
            first_element, last_element = max(begin - member.offset, 0), min(end - member.offset, member.numel)
            place = member.offset + first_element - begin
            parameter, name = parameters[member.parameter], names[member.parameter]
            parts.append(Part(parameter, name, first_element, last_element, place))
        pieces.append(Piece(memory.own[begin:end], index, inside[0].group, begin, tuple(parts)))
    return pieces


def _ranges(region: Region, first: int, last: int, step: int) -> Iterator[tuple[int, int, list[Member]]]:
    """Cut elements [first, last) every `step` elements, and where members are in another group than those before."""
    for start in range(first, last, step):
        stop = min(start + step, last)
        inside = [m for m in region.members if m.offset < stop and m.offset + m.numel > start]
        for _, members in itertools.groupby(inside, key=lambda member: member.group):
            yield start, stop, list(members)


def whole_piece(
    index: int, memory: RegionMemory, rank: int, parameters: Sequence[torch.nn.Parameter], names: Sequence[str]
) -> list[Piece]:
    """As `cut_pieces`, for an optimizer that needs whole parameters."""
    (member,), (start, stop) = memory.region.members, memory.region.bounds[rank]
    if start == stop:
        return []
    parameter = parameters[member.parameter]
    return [Piece(parameter, index, member.group, 0, (Part(parameter, names[member.parameter], 0, member.numel, 0),))]


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements of a tensor without gaps, in memory order."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def laid_out_as(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy, with its elements in the same order in memory as the parameter's."""
    if tensor.stride() == parameter.stride() and not (tensor.is_conj() or tensor.is_neg()):
        return tensor
    return torch.empty_strided(parameter.shape, parameter.stride(), dtype=tensor.dtype, device=tensor.device).copy_(
        tensor
    )


def _gradient_of(part: Part) -> torch.Tensor | None:
    grad = _checked(part)
    return None if grad is None else flat(laid_out_as(grad, part.parameter))[part.start : part.stop]


def _gradient_for_copy(part: Part) -> torch.Tensor:
    """As `_gradient_of`; of a whole parameter in its shape, which saves two views."""
    if part.is_whole and (grad := _checked(part)) is not None:
        return grad
    gradient = _gradient_of(part)
    assert gradient is not None
    return gradient


def _place(buffer: torch.Tensor, part: Part) -> torch.Tensor:
    place = buffer[part.place : part.place + part.numel]
    parameter = part.parameter
    return place.as_strided(parameter.shape, parameter.stride(), place.storage_offset()) if part.is_whole else place


def _checked(part: Part) -> torch.Tensor | None:
    """The gradient of a parameter. Raises GradientError if it is sparse."""
    grad = part.parameter.grad
    if grad is not None and grad.is_sparse:
        raise GradientError(
            f"{part.name} has a sparse gradient; with shard=True, pass the model to torchring.wrap(optimizer, model), "
            "so that sparse embeddings are found beforehand",
            parameters=(part.name,),
        )
    return None if grad is None else grad.detach()


def copy_of(value: Any) -> Any:
    """The value, or a copy of it if it is a tensor."""
    return value.clone() if isinstance(value, torch.Tensor) else value
