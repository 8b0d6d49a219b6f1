"""Signatures of collectives, and descriptions of plans, which ranks compare before they exchange bytes."""

import functools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, get_args

import torch

from torchring.errors import PlanMismatchError, in_step, ranks_in_words

ElementwiseOp = Literal["mean", "sum", "min", "max", "product"]
ELEMENTWISE_OPS: Final = get_args(ElementwiseOp)
_KEPT: Final = 256  # signatures. To make one takes 10 us, a tenth of which is CRC-32


@dataclass(frozen=True)
class Signature:
    """One call of a collective, in words. Ranks whose signatures differ must not exchange bytes."""

    operation: str  # "all_reduce", "broadcast", ...
    detail: str = ""  # the arguments that must be equal on all ranks, as in the call: "op='sum'", "src=1"
    tensor: str = ""  # dtype and shape, without what may differ between ranks; "" if there is no tensor

    MAX_BYTES: Final = 192

    def __str__(self) -> str:
        return f"{self.operation}({self.detail}){' of ' if self.tensor else ''}{self.tensor}"

    @functools.cached_property
    def text(self) -> bytes:
        """The signature for a peer's error message, cut or filled up with zeros to MAX_BYTES."""
        return str(self).encode()[: self.MAX_BYTES].ljust(self.MAX_BYTES, b"\0")

    @functools.cached_property
    def checksum(self) -> int:
        """A positive number that differs where signatures differ, but for collisions of CRC-32."""
        return zlib.crc32(str(self).encode()) + 1


def signature_of(
    operation: str, tensors: Sequence[torch.Tensor], detail: str = "", *, any_rows: bool = False
) -> Signature:
    """The signature of `operation` on tensors of one dtype. With `any_rows`, dimension 0 may differ between ranks."""
    return _signature_of(operation, detail, tensors[0].dtype, tuple(tensor.shape for tensor in tensors), any_rows)


@functools.lru_cache(_KEPT)
def _signature_of(
    operation: str, detail: str, dtype: torch.dtype, shapes: tuple[torch.Size, ...], any_rows: bool
) -> Signature:
    rows = [["*", *map(str, shape[1:])] if any_rows else map(str, shape) for shape in shapes]
    text = ", ".join(f"[{', '.join(row)}]" for row in rows)
    return Signature(operation, detail, f"{str(dtype).removeprefix('torch.')} {text}")


def mismatch(rank: int, mine: Signature, other: int, theirs: bytes) -> PlanMismatchError:
    """The error of rank `rank`, whose signature differs from that of rank `other`.

    All ranks raise one, unless a rank is in a backward: it may wait for buckets, and has to hear of the error.
    """
    text = theirs.rstrip(b"\0").decode(errors="replace")
    message = f"rank {rank} called {mine} while rank {other} called {text}"
    error = PlanMismatchError(message, rank=rank, peers=(other,))
    return error if "backward" in (mine.operation, text.split("(")[0]) else in_step(error)


def first_difference(descriptions: Sequence[Sequence[str]]) -> str:
    """The first line that differs between the ranks' descriptions, in words, with what each rank has there."""
    for line in range(max(len(lines) for lines in descriptions)):
        said = [lines[line] if line < len(lines) else "" for lines in descriptions]
        if len(set(said)) == 1:
            continue
        subject = next(text for text in said if text).split(": ", 1)[0]
        parts = []
        for text in dict.fromkeys(said):
            ranks = [rank for rank, other in enumerate(said) if other == text]
            have = "has" if len(ranks) == 1 else "have"
            parts.append(f"{ranks_in_words(ranks)} {have} {text.split(': ', 1)[-1] or 'nothing'}")
        return f"ranks disagree about {subject}: {'; '.join(parts)}; make it the same on all ranks"
    return "ranks do not disagree"
