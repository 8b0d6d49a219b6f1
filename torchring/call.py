"""What a rank is about to do, so that ranks can compare before they take each other's bytes for something else."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from typing import Final, Literal, get_args

import torch

from torchring.errors import PlanMismatchError, in_step

Op = Literal["mean", "sum", "min", "max", "product"]
OPS: Final = get_args(Op)


@dataclass(frozen=True)
class Call:
    """One collective as the caller sees it. Ranks whose calls read differently must not exchange anything.

    Attributes:
        operation: "all_reduce", "broadcast", ...
        detail: the arguments that must agree, as in the call: "op='sum'", "src=1".
        tensor: dtype and shape, without what may differ between ranks; "" where there is no tensor.
    """

    operation: str
    detail: str = ""
    tensor: str = ""

    MAX_BYTES: Final = 192

    def __str__(self) -> str:
        return f"{self.operation}({self.detail}){' of ' if self.tensor else ''}{self.tensor}"

    @property
    def text(self) -> bytes:
        """For a peer's error message, cut to MAX_BYTES."""
        return str(self).encode()[: self.MAX_BYTES]

    @property
    def checksum(self) -> int:
        """A positive number that differs if the call does."""
        return zlib.crc32(str(self).encode()) + 1


def call_for(operation: str, tensor: torch.Tensor, detail: str = "", *, any_rows: bool = False) -> Call:
    """The call on `tensor`; `any_rows` where dimension 0 may differ between ranks."""
    shape = ["*", *map(str, tensor.shape[1:])] if any_rows else map(str, tensor.shape)
    return Call(operation, detail, f"{str(tensor.dtype).removeprefix('torch.')} [{', '.join(shape)}]")


def mismatch(rank: int, mine: Call, other: int, theirs: bytes) -> PlanMismatchError:
    """Rank `rank` sees that `other` calls something else. So do all ranks, at this point."""
    text = theirs.rstrip(b"\0").decode(errors="replace")
    message = f"rank {rank} called {mine} while rank {other} called {text}"
    return in_step(PlanMismatchError(message, rank=rank, peers=(other,)))
