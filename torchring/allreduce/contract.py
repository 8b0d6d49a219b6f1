"""The contract between a bucket and the all-reduce that reduces it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar, runtime_checkable

import torch

from torchring.errors import PlanMismatchError, RingError

TAGS_PER_REDUCTION: Final = 1 << 20  # tag = reduction number * TAGS_PER_REDUCTION + bucket index


@dataclass(frozen=True)
class NonFinite:
    """The origin of the first NaN or infinity of a bucket.

    rank: world rank whose input held the value; None if all inputs were finite and their sum overflowed.
    element: index of the value in the wire buffer.
    """

    rank: int | None
    element: int


class Wire(Protocol):
    """One wire buffer. The bucket that packs it owns it, except between `AllReduce.start` and the end of `wait`."""

    @property
    def tensor(self) -> torch.Tensor:
        """[W] wire dtype, on this rank's device; keeps its address for life.

        The tensor has a version counter (`Tensor._version`) of its own, which the all-reduce's writes do not move. So
        the bucket can tell whether the script wrote to gradients while they were being reduced.
        """

    @property
    def scale_first(self) -> bool:
        """Whether inputs should be scaled where they are packed, and not by the all-reduce."""


W = TypeVar("W", bound=Wire)


class BucketWork(Protocol):
    """The all-reduce of one bucket that has been started. Buckets contribute, and end, in the order of their starts."""

    @property
    def span(self) -> tuple[float, float] | None:
        """Begin and end, in seconds of time.perf_counter. Known after `wait`.

        None if the work proceeds only inside calls of these methods.
        """

    def advance(self) -> bool:
        """`contribute`, if no wait is needed. Returns True if this rank's part is done, or proceeds by itself."""

    def contribute(self) -> None:
        """Wait until every rank has started this bucket, and do this rank's part.

        Returns at once if this rank's part proceeds by itself.
        """

    def wait(self) -> NonFinite | None:
        """Contribute, and wait for the parts of all ranks: `Wire.tensor` holds the result. May be called repeatedly.

        Returns the origin of a non-finite value, the same on all ranks, or None. Raises PeerLostError or
        PeerTimeoutError naming the peer; PlanMismatchError where ranks reduce different things.
        """


class AllReduce(Protocol[W]):
    """Reduces wire buffers among the ranks of a world, in the order in which every rank starts them.

    The caller starts buckets, calls `advance` now and then, and waits at the end. So no rank waits in the middle of
    a backward for a rank that happens to be late there.
    """

    @property
    def algorithm(self) -> str:
        """The name in `stats()`: "direct", "ring", "hierarchical" or "native"."""

    @property
    def in_background(self) -> bool:
        """True if buckets proceed while the caller computes, on threads or streams of the all-reduce."""

    def open_wires(self, specs: Sequence[tuple[int, torch.dtype]]) -> Sequence[W]:
        """Collective: one buffer per (elements, dtype), zeroed. The same on every rank."""

    def start(self, wire: W, *, scale: float = 1.0, tag: int = 0) -> BucketWork:
        """Collective: begin to replace `wire.tensor` by scale * sum over ranks, bit-identical on all ranks.

        16-bit wires are summed in fp32 and rounded once per hop. Where partial sums travel in 16 bits, inputs are
        scaled first, so that no partial sum overflows if the result fits. `tag` identifies the bucket: ranks whose
        tags differ raise PlanMismatchError instead of adding up different buckets. If several hundred buckets are
        pending, `start` first waits for the oldest.

        Raises what `BucketWork.wait` raises, if the all-reduce is known to have failed.
        """

    def fail(self, error: RingError) -> None:
        """Have the other ranks raise `error` where they wait for this rank. The all-reduce is of no use afterwards."""

    def close(self) -> None:
        """Release links and threads. Wires stay mapped while tensors view them."""


@runtime_checkable
class AbortingAllReduce(Protocol):
    """An all-reduce that compares no tags: a rank also aborts the buckets that it has not started."""

    def abort_bucket(self, wire: Any) -> BucketWork:
        """Start, in place of this rank's part of `wire`, work that adds nothing. `wire` stays as it is.

        `wait` raises PlanMismatchError, on all ranks, unless all ranks have aborted the bucket.
        """


def is_finite(tensor: torch.Tensor) -> bool:
    """True if all values are finite. Takes one pass, and a second pass only if the sum of finite values overflows."""
    if tensor.dtype.itemsize > 2:
        return math.isfinite(tensor.sum()) or bool(torch.isfinite(tensor).all())
    # A sum of 16-bit values in fp32 takes 28 ms for 25 MiB, their extremes 1.5; of fp32 values, 0.7 and 1.0.
    return not tensor.numel() or all(map(math.isfinite, tensor.aminmax()))  # a NaN is both extremes


def first_non_finite(tensor: torch.Tensor) -> int | None:
    """Index of the first NaN or infinity."""
    return None if is_finite(tensor) else int((~torch.isfinite(tensor)).nonzero()[0])


def aborted(rank: int, at_fault: int) -> PlanMismatchError:
    """The error if `at_fault` has aborted what others have reduced."""
    return PlanMismatchError(
        f"a backward was aborted on rank {at_fault} after part of its gradients had left, and others went on",
        rank=rank,
        peers=(at_fault,),
    )


def tag_mismatch(rank: int, tag: int, other: int, other_tag: int) -> PlanMismatchError:
    """The error if ranks are about to reduce different buckets. The rank that is ahead has skipped a bucket."""
    ahead, its_tag, behind, expected = (
        (rank, tag, other, other_tag) if tag > other_tag else (other, other_tag, rank, tag)
    )
    return PlanMismatchError(
        f"rank {ahead} reduces {_describe(its_tag)} while rank {behind} reduces {_describe(expected)}; a backward was "
        f"aborted on rank {ahead} after part of its gradients had left",
        rank=rank,
        peers=(ahead,),
    )


def _describe(tag: int) -> str:
    return f"bucket {tag % TAGS_PER_REDUCTION} of reduction {tag // TAGS_PER_REDUCTION}"
