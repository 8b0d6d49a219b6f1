"""Which bucket goes next.

Hooks fire in an order that may differ between ranks; a reduction needs one order. So packed buckets leave strictly in
plan order: a bucket that is full early waits for the ones before it.

How a bucket proceeds after it has left is the mover's business: in calls that are made here between gradients, where
every core already computes and a second thread would only take turns with the first (2 cores, 2 ranks, MLP of 42 M:
333 ms against 422), or in lanes of its own, where backward goes on while they wait for the network. Either way no rank
waits for late peers before its backward is over; only a network mover that was asked for "inline" does.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from torchring.allreduce import TAGS_PER_ROUND, Mover, PendingReduction
from torchring.errors import GradientError, RingError
from torchring.gradients.bucket import Bucket, BucketState

_T = TypeVar("_T")


class Scheduler:
    """Reduces the buckets of one optimizer, round after round (a round is a backward that reduces).

    Args:
        buckets: in plan order.
        mover: used by the thread that runs backward.

    Attributes:
        has_launched: whether a bucket has left in this round.
        has_launched_all: whether all have.
        is_waiting: whether this rank's part of some bucket that has left is still to be done; `look_in` may do it.
        busy_seconds: time in which something was being reduced in the round so far, waiting for peers included.
        exposed_seconds: the part of it during which backward stood still.
    """

    def __init__(self, buckets: Sequence[Bucket], mover: Mover[Any]) -> None:
        self.buckets = list(buckets)
        self.busy_seconds = 0.0
        self.exposed_seconds = 0.0
        self.is_waiting = False
        self._mover = mover
        self._in_flight: list[tuple[Bucket, PendingReduction]] = []
        self._num_advanced = 0  # of those
        self._next = 0
        self._round = 0
        self._holding = False
        self._step = 0

    @property
    def has_launched(self) -> bool:
        return self._next > 0

    @property
    def has_launched_all(self) -> bool:
        return bool(self.buckets) and self._next == len(self.buckets)

    def settle(self) -> None:
        """Wait for what the last round, if it was broken off, has left under way."""
        with contextlib.suppress(GradientError):  # about gradients of the round that was broken off: nobody uses them
            self._land(discard=True)

    def begin(self, *, round_number: int, step: int, hold: bool) -> None:
        """A round begins, after `settle`.

        Args:
            round_number: ranks compare it before they add up.
            step: for error messages.
            hold: launch nothing before `finish`.
        """
        self._next, self._round, self._step, self._holding = 0, round_number, step, hold
        self.busy_seconds = self.exposed_seconds = 0.0

    def bucket_is_packed(self) -> None:
        """Some bucket has become PACKED; launch what may go now."""
        if self._holding:
            return
        buckets = self.buckets
        while self._next < len(buckets) and buckets[self._next].state is BucketState.PACKED:
            bucket = buckets[self._next]
            self._next += 1
            self._launch(bucket)

    def finish(self) -> None:
        """All buckets are PACKED: launch the rest and return when every one is REDUCED. Raises what went wrong."""
        self._holding = False
        self.bucket_is_packed()
        assert self._next == len(self.buckets), "finish() before every bucket was packed"
        started = time.perf_counter()
        self._land()
        self.exposed_seconds += time.perf_counter() - started

    def look_in(self) -> None:
        """Do what has become possible since buckets were launched. Between gradients, while `is_waiting`."""
        started = time.perf_counter()
        in_flight = self._in_flight
        while self._num_advanced < len(in_flight):
            bucket, flight = in_flight[self._num_advanced]
            if not self._locating(bucket, flight.advance):
                break
            self._num_advanced += 1
        self.is_waiting = self._num_advanced < len(in_flight)
        self._stood_still(time.perf_counter() - started)

    def replace(self, buckets: Sequence[Bucket]) -> None:
        """Go on with other buckets. Between rounds only."""
        self.buckets = list(buckets)

    def _launch(self, bucket: Bucket) -> None:
        bucket.begin_reduce()
        started = time.perf_counter()
        scale, tag = bucket.reduce_scale, self._tag(bucket)
        flight = self._locating(bucket, lambda: self._mover.start(bucket.wire, scale=scale, tag=tag))
        self._in_flight.append((bucket, flight))
        self._stood_still(time.perf_counter() - started)
        self.look_in()

    def _land(self, *, discard: bool = False) -> None:
        """Wait for what is in flight, and raise what went wrong. Peers wait for this rank's parts: those come first."""
        started = time.perf_counter()
        in_flight, self._in_flight = self._in_flight, []
        self._num_advanced, self.is_waiting = 0, False
        for bucket, flight in in_flight:
            self._locating(bucket, flight.contribute)
        problem: GradientError | None = None
        for bucket, flight in in_flight:
            non_finite = self._locating(bucket, flight.wait)
            if discard or problem is not None:
                continue
            try:
                bucket.end_reduce(non_finite)
            except GradientError as error:  # the rest lands all the same: nothing may be under way afterwards
                problem = error
        if self._mover.in_background:
            self.busy_seconds += union_length(flight.span for _, flight in in_flight if flight.span is not None)
        else:
            self.busy_seconds += time.perf_counter() - started
        if problem is not None:
            raise problem

    def _stood_still(self, seconds: float) -> None:
        """Backward did, for calls of the mover."""
        self.exposed_seconds += seconds
        if not self._mover.in_background:
            self.busy_seconds += seconds

    def _tag(self, bucket: Bucket) -> int:
        return self._round * TAGS_PER_ROUND + bucket.index

    def _locating(self, bucket: Bucket, operation: Callable[[], _T]) -> _T:
        """Have errors between ranks say which bucket it was."""
        try:
            return operation()
        except RingError as error:
            error.locate(bucket=bucket.index, parameters=bucket.names, step=self._step)
            raise


def union_length(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals.

    Example: (0, 2), (1, 3), (5, 6) -> 4.
    """
    total, covered = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, covered))
        covered = max(covered, end)
    return total
