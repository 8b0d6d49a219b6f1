"""The contract between a bucket and whatever reduces it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from torchring.errors import PlanMismatchError, RingError

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
    """One wire buffer. Owned by the bucket that packs it, except from `start` until it has landed."""

    @property
    def tensor(self) -> torch.Tensor:
        """[W] wire dtype, on this rank's device; keeps its address for life.

        It has a version counter of its own (`Tensor._version`), which the mover's writes do not move, so that the
        bucket can tell whether the script wrote to gradients while they were under way.
        """


class Mover(Protocol):
    """Reduces wire buffers among the ranks of a world, in the order that every rank calls it in."""

    @property
    def algorithm(self) -> str:
        """What `stats()` reports: "direct", "ring", "hierarchical" or "native"."""

    def open_wires(self, specs: Sequence[tuple[int, torch.dtype]]) -> Sequence[Wire]:
        """Collective: one buffer per (elements, dtype), zeroed. The same on every rank."""

    def all_reduce(self, wire: Wire, *, scale: float = 1.0, tag: int = 0) -> NonFinite | None:
        """Collective: `wire.tensor` becomes scale * sum over ranks, bit-identical on all of them, before it returns.

        16-bit wires are summed in fp32 and rounded once per hop; where partial sums travel in 16 bits, inputs are
        scaled first, so that nothing overflows whose result would fit. `tag` says what is being reduced; ranks whose
        tags differ raise PlanMismatchError instead of adding up different things. Returns where a non-finite value came
        from, the same on all ranks, or None.

        Raises PeerLostError or PeerTimeoutError naming the peer; the mover is of no use afterwards.
        """

    def fail(self, error: RingError) -> None:
        """Have the other ranks raise `error` where they wait for this one. The mover is of no use afterwards."""

    def close(self) -> None:
        """Release links and threads. Wires that tensors still view stay mapped."""


class LaneMover(Mover, Protocol):
    """A mover that reduces several wires at a time, each called for on a thread of its own; see `lanes.py`.

    What is called for in one lane is reduced in the order of the calls, which is the same on every rank.
    """

    @property
    def num_lanes(self) -> int:
        """How many."""

    def all_reduce(self, wire: Wire, *, scale: float = 1.0, tag: int = 0, lane: int = 0) -> NonFinite | None:
        """As of any mover, in a lane, 0 <= lane < num_lanes."""


class PendingReduction(Protocol):
    """A reduction that has been started. A mover's flights contribute and land in the order in which they started."""

    @property
    def span(self) -> tuple[float, float] | None:
        """From when to when it was under way, in seconds of time.perf_counter, once it has landed.

        None if it proceeds only in calls of these methods.
        """

    def advance(self) -> bool:
        """`contribute` if that takes no waiting; whether this rank's part is done, or goes on by itself."""

    def contribute(self) -> None:
        """Wait until every rank has started this one, and do this rank's part, or have it go on by itself."""

    def wait(self) -> NonFinite | None:
        """Contribute, and wait for everybody's part. Returns and raises as `Mover.all_reduce`; again if asked again."""


class StagedMover(Mover, Protocol):
    """A mover whose caller need not stand by: it starts reductions, looks in now and then, and waits at the end.

    So no rank waits in the middle of a backward for one that happens to be late there.
    """

    @property
    def in_background(self) -> bool:
        """Whether reductions proceed on threads of the mover's own."""

    def start(self, wire: Wire, *, scale: float = 1.0, tag: int = 0) -> PendingReduction:
        """Begin `all_reduce`. With a few hundred in flight it first lands the oldest."""


def is_finite(tensor: torch.Tensor) -> bool:
    """Whether all values are finite: one pass for a yes, a second one only if their sum overflows."""
    if tensor.dtype.itemsize > 2:
        return math.isfinite(tensor.sum()) or bool(torch.isfinite(tensor).all())
    # A sum of 16-bit values in fp32 takes 28 ms for 25 MiB, their extremes 1.5; of fp32 values, 0.7 and 1.0.
    return not tensor.numel() or all(map(math.isfinite, tensor.aminmax()))  # a NaN is both extremes


def first_non_finite(tensor: torch.Tensor) -> int | None:
    """Index of the first NaN or infinity."""
    return None if is_finite(tensor) else int((~torch.isfinite(tensor)).nonzero()[0])


def blame(reduced: torch.Tensor, ranks: Sequence[int], suspects: Sequence[int]) -> NonFinite:
    """From the reduced buffer and the ranks' `first_non_finite`, -1 for none; both equal on all ranks."""
    for rank, element in zip(ranks, suspects, strict=True):
        if element >= 0:
            return NonFinite(rank, element)
    return NonFinite(None, first_non_finite(reduced) or 0)


def tag_mismatch(rank: int, tag: int, other: int, other_tag: int) -> PlanMismatchError:
    """Rank `rank` is about to reduce something else than `other`. The one that is ahead has skipped something."""
    ahead, its_tag, behind, expected = (
        (rank, tag, other, other_tag) if tag > other_tag else (other, other_tag, rank, tag)
    )
    return PlanMismatchError(
        f"rank {ahead} reduces {_describe(its_tag)} while rank {behind} reduces {_describe(expected)}; a backward was "
        f"broken off on rank {ahead} after part of its gradients had left",
        rank=rank,
        peers=(ahead,),
    )


def _describe(tag: int) -> str:
    return f"bucket {tag % TAGS_PER_ROUND} of reduction {tag // TAGS_PER_ROUND}"
