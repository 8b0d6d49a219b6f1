"""The contract between a bucket and whatever reduces it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch


TAGS_PER_ROUND: Final = 1 << 20  # tag = round number * TAGS_PER_ROUND + bucket index


@dataclass(frozen=True)
class NonFinite:
    """Where the first NaN or infinity of a reduction came from.

    rank: world rank whose input held it; None if all inputs were finite and their sum overflowed.
    element: its index in the wire buffer.
    """

    rank: int | None
    element: int


class Wire(Protocol):
    """One wire buffer. Owned by the bucket that packs it, except while `Mover.all_reduce` runs."""

    @property
    def tensor(self) -> torch.Tensor:
        """[W] wire dtype, on this rank's device; keeps its address for life.

        It has a version counter of its own (`Tensor._version`), which the mover's writes do not move, so that the
        bucket can tell whether the script wrote to gradients while they were under way.
        """


class Mover(Protocol):
    """Reduces wire buffers among the ranks of a world, one at a time, in the order that every rank calls it in."""

    @property
    def algorithm(self) -> str:
        """What `stats()` reports: "direct", "ring", "native" or "none" (a world of one)."""

    @property
    def sleeps_while_waiting(self) -> bool:
        """True if waiting for peers leaves the core to others (a network hop), so that a worker thread pays off."""

    def open_wires(self, specs: Sequence[tuple[int, torch.dtype]]) -> Sequence[Wire]:
        """Collective: one buffer per (elements, dtype), zeroed. The same on every rank."""

    def all_reduce(self, wire: Wire, *, scale: float = 1.0, tag: int = 0) -> NonFinite | None:
        """Collective: `wire.tensor` becomes scale * sum over ranks, bit-identical on all of them, before it returns.

        16-bit wires are summed in fp32 and rounded once per hop; where partial sums travel in 16 bits, inputs are
        scaled first, so that nothing overflows whose result would fit. `tag` says what is being reduced; ranks whose
        tags differ raise PlanMismatchError instead of adding up different things. Returns the first non-finite value found among this
        rank's inputs or those that it reduced, or None; all ranks return the same.

        Raises PeerLostError or PeerTimeoutError naming the peer; the mover is of no use afterwards.
        """

    def close(self) -> None:
        """Release links and threads. Wires that tensors still view stay mapped."""


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether all values are finite: one pass for a yes, a second one only if their sum overflows."""
    wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    return math.isfinite(tensor.sum(dtype=wide)) or bool(torch.isfinite(tensor).all())


def first_non_finite(reduced: torch.Tensor, flags: torch.Tensor) -> NonFinite | None:
    """From the reduced buffer and one flag per rank ("my input is not finite"), both equal on all ranks."""
    flagged = flags.nonzero()
    if not flagged.numel() and is_finite(reduced):
        return None
    bad = (~torch.isfinite(reduced)).nonzero()
    return NonFinite(int(flagged[0]) if flagged.numel() else None, int(bad[0]) if bad.numel() else 0)


def describe_tag(tag: int) -> str:
    """In words, for error messages."""
    return f"bucket {tag % TAGS_PER_ROUND} of reduction {tag // TAGS_PER_ROUND}"
