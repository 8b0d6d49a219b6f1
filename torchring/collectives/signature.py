"""What a rank is about to do, so that ranks can compare before they take each other's bytes for something else."""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

import torch

from torchring.errors import PlanMismatchError, in_step

Op = Literal["mean", "sum", "min", "max", "product"]
OPS: Final = get_args(Op)


@dataclass(frozen=True)
class Signature:
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


def signature_of(operation: str, tensor: torch.Tensor, detail: str = "", *, any_rows: bool = False) -> Signature:
    """The call on `tensor`; `any_rows` where dimension 0 may differ between ranks."""
    shape = ["*", *map(str, tensor.shape[1:])] if any_rows else map(str, tensor.shape)
    return Signature(operation, detail, f"{str(tensor.dtype).removeprefix('torch.')} [{', '.join(shape)}]")


def mismatch(rank: int, mine: Signature, other: int, theirs: bytes) -> PlanMismatchError:
    """Rank `rank` sees that `other` calls something else. So do all ranks, at this point."""
    text = theirs.rstrip(b"\0").decode(errors="replace")
    message = f"rank {rank} called {mine} while rank {other} called {text}"
    return in_step(PlanMismatchError(message, rank=rank, peers=(other,)))


def fingerprint(description: Sequence[str]) -> bytes:
    """32 bytes that differ when descriptions do."""
    return hashlib.sha256(repr(list(description)).encode()).digest()


def first_difference(descriptions: Sequence[Sequence[str]]) -> str:
    """Say what differs first between the ranks' descriptions, and on which ranks it is not what rank 0 has."""
    for line in range(max(len(lines) for lines in descriptions)):
        said = [lines[line] if line < len(lines) else "" for lines in descriptions]
        if len(set(said)) == 1:
            continue
        subject = next(text for text in said if text).split(": ", 1)[0]
        parts = []
        for text in dict.fromkeys(said):
            ranks = [rank for rank, other in enumerate(said) if other == text]
            parts.append(f"{_ranks(ranks)} {text.split(': ', 1)[-1] or 'nothing'}")
        return f"ranks disagree about {subject}: {'; '.join(parts)}"
    return "ranks do not disagree"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))} have"
