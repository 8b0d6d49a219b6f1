"""The contract between a bucket and the all-reduce that reduces it."""

from collections.abc import Sequence
from typing import Any, Final, Protocol, TypeVar, runtime_checkable

import torch

from torchring.errors import PlanMismatchError, RingError, ranks_in_words

MAX_PENDING: Final = 512  # buckets of one all-reduce at a time


class Wire(Protocol):
    """One wire buffer. The bucket that packs it owns it, except between `AllReduce.start` and the end of `wait`."""

    @property
    def tensor(self) -> torch.Tensor:
        """[W] wire dtype, on this rank's device; keeps its address for life.

        The tensor has a version counter (`Tensor._version`) of its own, which the all-reduce's writes do not move. So
        the bucket can tell whether the script wrote to gradients while they were being reduced.
        """


W = TypeVar("W", bound=Wire)


class BucketWork(Protocol):
    """The all-reduce of one bucket that has been started. Buckets advance, and end, in the order of their starts."""

    @property
    def span(self) -> tuple[float, float] | None:
        """Begin and end, in seconds of time.perf_counter. Known after `wait`.

        None if the work proceeds only inside calls of these methods.
        """

    def advance(self, *, waits: bool = False) -> bool:
        """Do this rank's part, if every rank has started this bucket.

        If the part does not proceed by itself, `waits` until every rank has started it. Returns True if it is done, or
        proceeds by itself.
        """

    def wait(self) -> None:
        """Advance, and wait for the parts of all ranks: `Wire.tensor` holds the result. May be called repeatedly.

        Raises PeerLostError or PeerTimeoutError naming the peer; PlanMismatchError where ranks are seen to reduce
        different things.
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

    def start(self, wire: W) -> BucketWork:
        """Collective: begin to replace `wire.tensor` by the sum over ranks, bit-identical on all ranks.

        16-bit wires are summed in fp32 and rounded once per hop. If several hundred buckets are pending, `start` first
        waits for the oldest.

        Raises what `BucketWork.wait` raises, if the all-reduce is known to have failed.
        """

    def fail(self, error: RingError) -> None:
        """Have the other ranks raise `error` where they wait for this rank. The all-reduce is of no use afterwards."""

    def close(self) -> None:
        """Release links and threads. Wires stay mapped while tensors view them."""


@runtime_checkable
class AbortingAllReduce(Protocol):
    """An all-reduce that does not see which buckets ranks reduce: a rank starts those of an aborted reduction, too."""

    def abort_bucket(self, wire: Any) -> BucketWork:
        """Start, in place of this rank's part of `wire`, work that adds nothing. `wire` stays as it is."""


@runtime_checkable
class PlannedAllReduce(Protocol):
    """An all-reduce that does not treat all parameters alike."""

    def lay_out(self, wires: Sequence[Any], plan: Any, specs: Any, parameters: Any, *, num_kept: int) -> None:
        """The `wires` that were just opened are those of the buckets of `plan`, which has indices into the others.

        They come after `num_kept` buckets, whose wires stay. Other wires are not used any more.
        """


def aborted(rank: int, *at_fault: int) -> PlanMismatchError:
    """The error if these ranks have aborted what others have reduced."""
    who = ranks_in_words(at_fault)
    text = f"a backward was aborted on {who} after part of its gradients had left, and others went on"
    return PlanMismatchError(text, rank=rank, peers=at_fault)
