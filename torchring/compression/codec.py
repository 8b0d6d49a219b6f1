"""What a scheme does with one buffer, and what the scheme knows about the buffer."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

import torch

from torchring.transport.contract import Transfer, Transport

ROW: Final = 256  # elements to which parameters are aligned in a buffer, and of a block that int8 gives one scale


class Piece(NamedTuple):
    """The part of a parameter's gradient that lies in a buffer."""

    name: str
    shape: tuple[int, ...]  # of the whole parameter, from the slowest dimension in memory to the fastest
    begin: int  # in the buffer, in elements
    end: int  # without the padding up to the next multiple of ROW
    first: int  # element of the whole gradient, in memory order


def is_vector(shape: Sequence[int]) -> bool:
    """Whether a parameter is a bias or a scale of a norm, which travels as it is."""
    return sum(length > 1 for length in shape) < 2


@dataclass(frozen=True, eq=False)
class Contents:
    """What a buffer holds: a bucket, or this rank's column of the bucket."""

    index: int  # of the bucket
    buffer: torch.Tensor  # 1-D; a multiple of ROW elements
    pieces: Sequence[Piece]
    feedback: torch.Tensor  # fp32, as long as the buffer: what was lost, in units of this rank's gradient

    def feedback_of(self, piece: Piece) -> torch.Tensor:
        return self.feedback[piece.begin : piece.end]

    def clear_padding(self, tensor: torch.Tensor) -> None:
        """Nobody writes to what lies between gradients, so a NaN there would stay. `tensor`: see `Codec`."""
        for piece in self.pieces:
            tensor[piece.end : math.ceil(piece.end / ROW) * ROW] = 0.0


class Codec(Protocol):
    """Compresses one buffer. `tensor`: the buffer, or zeros in its place, see `Transport.start_nothing`.

    `weight`: 1; or 0, where feedback is not added and stays as it is.
    """

    num_bytes: int  # that this rank contributes

    def begin(self, tensor: torch.Tensor, weight: float, transport: Transport) -> Transfer:
        """Compress, and start a collective."""

    def go_on(self, tensor: torch.Tensor, weight: float, transfer: Transfer, transport: Transport) -> Transfer:
        """Wait for the collective, and start a second one through `transport`, if there is one."""
        return transfer

    def end(self, tensor: torch.Tensor, weight: float, transfer: Transfer) -> None:
        """Wait for the last collective; `tensor` becomes the sum, with the same bits on all ranks."""
        transfer.wait()

    def prepare(self) -> None:
        """Do what the next `begin` needs, when `tensor` has its result."""
        return


class AsItIs(Codec):
    """Sums a buffer without compression."""

    num_bytes = 0

    def begin(self, tensor: torch.Tensor, weight: float, transport: Transport) -> Transfer:
        return transport.start_all_reduce(tensor)
