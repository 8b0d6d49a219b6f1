"""Drives the buckets of one optimizer through a round: which bucket is filled, which one goes next, when all are done.

Hooks fire in an order that may differ between ranks, and a reduction needs one order. So packed buckets leave strictly
in plan order: a bucket that is full early waits for the buckets before it.

The mover decides how a bucket proceeds after it has left. On one host a reduction proceeds in calls between gradients:
every core already computes there, and a second thread would only take turns with the first (2 cores, 2 ranks, MLP of
42 M: 333 ms against 422). Between hosts a reduction proceeds on a thread of its own, and backward goes on while that
thread waits for the network. Either way no rank waits for late peers before its backward is over, except between hosts
with overlap="inline".
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from torchring.allreduce import TAGS_PER_ROUND, Mover, NonFinite, PendingReduction
from torchring.errors import GradientError, RingError
from torchring.gradients.bucket import Bucket, BucketState
from torchring.gradients.plan import ControlBits
from torchring.observe.flight_recorder.entries import Entry, Wait
from torchring.observe.recorder.records import BUCKET_LENGTH, REDUCED, STARTED

_T = TypeVar("_T")


@dataclass
class Round:
    """The state of one round, on this rank. A round is one reduction of all buckets.

    Attributes:
        number: ranks compare the number before they add up.
        step: number of the optimizer step, for error messages.
        hold: launch no bucket before backward is over.
        control_bits: what this rank tells the others.
        num_launched: how many buckets have left.
        is_over: every bucket is reduced and handed out.
        is_broken_off: the round was given up.
        busy_seconds: time in which something was being reduced, waiting for peers included.
        exposed_seconds: the part of `busy_seconds` during which backward stood still.
        stall_seconds: the part of `exposed_seconds` before the last gradient was computed.
        packing_ns: how long this rank has copied gradients to wire buffers.
        packed_early_ns: the part of `packing_ns` before the last gradient was computed, in a round with `arrivals`.
        arrivals: if it is known, when each gradient has come, in nanoseconds by parameter index; -1 for none.
    """

    number: int
    step: int = 0
    hold: bool = False
    control_bits: ControlBits = field(default_factory=ControlBits)
    num_launched: int = 0
    is_over: bool = False
    is_broken_off: bool = False
    busy_seconds: float = 0.0
    exposed_seconds: float = 0.0
    stall_seconds: float = 0.0
    packing_ns: int = 0
    packed_early_ns: int = 0
    arrivals: list[int] | None = None

    @property
    def next_number(self) -> int:
        """If a bucket has left, peers are past this round, even if the round was broken off here."""
        return self.number + (self.is_over or self.num_launched > 0)


class Reducible(Protocol):
    """What leaves in a round: a bucket, or the model's buffers."""

    index: int
    """Among the buckets; the buffers come last."""

    @property
    def names(self) -> list[str]: ...

    @property
    def wire(self) -> Any: ...

    @property
    def reduce_scale(self) -> float:
        """The factor that the mover applies to the sum."""

    def begin_reduce(self) -> None:
        """The wire goes to the mover."""

    def end_reduce(self, non_finite: NonFinite | None) -> None:
        """The wire comes back reduced."""


class Scheduler:
    """Moves buckets from state to state; nothing else does. For the thread that runs backward.

    Args:
        buckets: in plan order.
        mover: reduces the buckets.
        mark_sparse: called with the index of a parameter that is in no bucket and has a new gradient.
        track: where other ranks see which buckets this rank has launched, and for which one it waits.

    Attributes:
        last: leaves after all buckets, if there is anything.
        round: the round under way, or the last one.
        ready_order: the order in which the gradients of the first round became ready, by parameter index. None while
            that round is still to be finished, and after `forget_order`.
        is_waiting: whether `advance` may be able to do this rank's part of a bucket that has left.
        times: of the buckets that have left in this round: a row each, see `torchring.observe.recorder.records`.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        mover: Mover[Any],
        mark_sparse: Callable[[int], None] | None = None,
        track: Entry | None = None,
    ) -> None:
        self.buckets: list[Bucket] = []
        self.last: Reducible | None = None
        self._slots: dict[int, tuple[Bucket, int]] = {}  # by parameter index: its bucket, and its slot there
        self._mover = mover
        self._mark_sparse = mark_sparse or _refuse_sparse
        self._track = track or Entry.private("gradients")
        self.install(buckets)

        # The round
        self.round = Round(0)
        self.is_waiting = False
        self.times: list[int] = []
        self._pending: list[tuple[Reducible, PendingReduction]] = []
        self._num_advanced = 0  # how many of `_pending` have this rank's part

        # The first round, after which the plan follows the order of gradients
        self.ready_order: list[int] | None = None
        self._order_so_far: list[int] | None = []

    @property
    def has_launched(self) -> bool:
        """Whether a bucket has left in this round."""
        return self.round.num_launched > 0

    def install(self, buckets: Sequence[Bucket]) -> None:
        """Go on with these buckets, which take over what earlier buckets knew. Between rounds only."""
        for bucket in buckets:
            for position, slot in enumerate(bucket.plan.slots):
                earlier = self._slots.get(slot.parameter)
                if earlier is not None and earlier[0] is not bucket:
                    bucket.ledger.adopt(position, earlier[0].ledger, earlier[1])
                self._slots[slot.parameter] = (bucket, position)
        self.buckets = list(buckets)

    def settle(self) -> None:
        """Wait for what a round that was broken off has left under way."""
        with contextlib.suppress(GradientError):  # about gradients of the broken round, which nobody uses
            self._wait(discard=True)

    def begin(self, new: Round) -> None:
        """A round begins, after `settle`."""
        if self.round.is_broken_off:
            for bucket in self.buckets:
                bucket.reset()
        self.round = new
        self.times = []

    def mark_ready(self, index: int) -> None:
        """Parameter `index` has its gradient, in a backward that reduces. From the parameter's hook."""
        if self._order_so_far is not None:
            self._order_so_far.append(index)
        place = self._slots.get(index)
        if place is None:
            self._mark_sparse(index)
            return
        bucket, slot = place
        if bucket.mark_ready(slot):
            self.launch_packed()
        elif self.is_waiting and bucket.copies_on_arrival[slot]:  # some time has gone by
            self.advance()

    def mark_ready_and_time(self, index: int) -> None:
        """As `mark_ready`, in a round with `arrivals`. Stalls and copies until then are taken out."""
        current, place = self.round, self._slots.get(index)
        if current.arrivals is not None and index < len(current.arrivals):
            stalls_ns = int(current.exposed_seconds * 1e9)
            current.arrivals[index] = time.perf_counter_ns() - current.packed_early_ns - stalls_ns
        before = 0 if place is None else place[0].packing_ns
        self.mark_ready(index)
        if place is not None:
            current.packed_early_ns += place[0].packing_ns - before

    def mark_local(self, index: int) -> None:
        """Parameter `index` has its gradient, in a backward that does not reduce. From the parameter's hook."""
        place = self._slots.get(index)
        if place is None:
            self._mark_sparse(index)
        else:
            place[0].ledger.mark_local(place[1])

    def launch_packed(self) -> None:
        """Some bucket has become PACKED: launch the buckets that may go now."""
        if not self.round.hold:
            self._launch_packed()

    def advance(self) -> None:
        """Do what has become possible since buckets were launched. Between gradients, while `is_waiting`."""
        started = time.perf_counter()
        pending = self._pending
        while self._num_advanced < len(pending):
            bucket, reduction = pending[self._num_advanced]
            self._note_start(self._num_advanced)
            if not self._locating(bucket, reduction.advance):
                break
            self._note_end(self._num_advanced)
            self._num_advanced += 1
        self.is_waiting = self._num_advanced < len(pending)
        self._stood_still(time.perf_counter() - started)

    def finish(self) -> None:
        """Backward is over: fill and launch the remaining buckets, and return when every bucket is REDUCED."""
        self.round.stall_seconds = self.round.exposed_seconds
        for bucket in self.buckets:
            if bucket.state in (BucketState.IDLE, BucketState.FILLING):
                bucket.fill_missing()
        self._launch_packed()
        if self.last is not None:
            self.last.index = len(self.buckets)
            self._launch(self.last, time.perf_counter_ns(), 0)
        started = time.perf_counter()
        self._wait()
        self.round.exposed_seconds += time.perf_counter() - started

    def close_round(self, scale: float = 1.0) -> None:
        """Every bucket is REDUCED, and ranks agree about the round: every gradient gets its result, times `scale`."""
        self.round.packing_ns = sum(bucket.packing_ns for bucket in self.buckets)
        for bucket in self.buckets:
            bucket.close_round(scale)
        for bucket in self.buckets:
            bucket.ledger.settle_slices()
        self.round.is_over = True
        self._track.finish(self.round.next_number * TAGS_PER_ROUND - 1)
        self._keep_order()

    def abandon(self) -> None:
        """The round was broken off. Gradients that have arrived stay local, outside of buffers that are under way."""
        self.round.is_broken_off = True
        for bucket in self.buckets:
            bucket.abandon()
        if self.buckets and self.round.num_launched == len(self.buckets):
            self._keep_order()  # as on the peers, for whom the round is over
        elif self._order_so_far is not None:
            self._order_so_far = []

    def forget_order(self) -> None:
        """The plan stays as it is."""
        self.ready_order = self._order_so_far = None

    def _keep_order(self) -> None:
        if self._order_so_far is not None:
            self.ready_order, self._order_so_far = self._order_so_far, None

    def _launch_packed(self) -> None:
        buckets = self.buckets
        while self.round.num_launched < len(buckets):
            bucket = buckets[self.round.num_launched]
            if bucket.state is not BucketState.PACKED:
                return
            self.round.num_launched += 1
            self._launch(bucket, bucket.ready_at, bucket.packed_at)

    def _launch(self, bucket: Reducible, ready_at: int, packed_at: int) -> None:
        bucket.begin_reduce()
        started = time.perf_counter()
        launched_at = int(started * 1e9)
        num_bytes = bucket.wire.tensor.nbytes
        self.times += (bucket.index, num_bytes, ready_at, packed_at or launched_at, launched_at, launched_at, 0)
        scale, tag = bucket.reduce_scale, self.round.number * TAGS_PER_ROUND + bucket.index
        self._track.begin(tag)
        reduction = self._waiting(bucket, lambda: self._mover.start(bucket.wire, scale=scale, tag=tag))
        self._pending.append((bucket, reduction))
        self._stood_still(time.perf_counter() - started)
        self.advance()

    def _wait(self, *, discard: bool = False) -> None:
        """Do this rank's part of all pending reductions, then wait for the other ranks. Raises what went wrong.

        Args:
            discard: leave the buckets as they are.
        """
        started = time.perf_counter()
        pending, self._pending = self._pending, []
        num_advanced, self._num_advanced, self.is_waiting = self._num_advanced, 0, False
        for number, (bucket, reduction) in enumerate(pending):
            if number >= num_advanced:
                self._note_start(number)
            self._waiting(bucket, reduction.contribute)
            if number >= num_advanced:
                self._note_end(number)
        problem: GradientError | None = None
        for number, (bucket, reduction) in enumerate(pending):
            non_finite = self._waiting(bucket, reduction.wait)
            if reduction.span is not None:
                self._note_span(number, *reduction.span)
            if discard or problem is not None:
                continue
            try:
                bucket.end_reduce(non_finite)
            except GradientError as error:  # the others are waited for all the same: nothing may stay under way
                problem = error
        if self._mover.in_background:
            self.round.busy_seconds += union_length(r.span for _, r in pending if r.span is not None)
        else:
            self.round.busy_seconds += time.perf_counter() - started
        if problem is not None:
            raise problem

    def _note_start(self, number: int) -> None:
        """This rank does its part of the n-th bucket that has left, unless it has to wait for others once more."""
        start = BUCKET_LENGTH * number
        if start < len(self.times):  # not that of a round which was broken off
            self.times[start + STARTED] = time.perf_counter_ns()

    def _note_end(self, number: int) -> None:
        """This rank's part of the n-th bucket that has left is done."""
        start = BUCKET_LENGTH * number
        if start < len(self.times):
            self.times[start + REDUCED] = time.perf_counter_ns()

    def _note_span(self, number: int, started: float, ended: float) -> None:
        """A thread has reduced the n-th bucket that has left."""
        start = BUCKET_LENGTH * number
        if start < len(self.times):
            self.times[start + STARTED], self.times[start + REDUCED] = int(started * 1e9), int(ended * 1e9)

    def _stood_still(self, seconds: float) -> None:
        """Backward stood still for that long, in calls of the mover."""
        self.round.exposed_seconds += seconds
        if not self._mover.in_background:
            self.round.busy_seconds += seconds

    def _waiting(self, bucket: Reducible, operation: Callable[[], _T]) -> _T:
        """Have other ranks, and warnings, say that this rank waits for a bucket."""
        wait = Wait("the reduction of gradients", self.round.step, bucket.index, bucket.names[0])
        with self._track.waiting(wait):
            return self._locating(bucket, operation)

    def _locating(self, bucket: Reducible, operation: Callable[[], _T]) -> _T:
        """Have errors between ranks say which bucket it was."""
        try:
            return operation()
        except RingError as error:
            error.locate(bucket=bucket.index, parameters=bucket.names, step=self.round.step)
            raise


def _refuse_sparse(index: int) -> None:
    raise AssertionError(f"parameter {index} is in no bucket")


def union_length(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals.

    Example: (0, 2), (1, 3), (5, 6) -> 4.
    """
    total, covered = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, covered))
        covered = max(covered, end)
    return total
