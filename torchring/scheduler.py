"""Which bucket goes next, and where it runs.

Hooks fire in an order that may differ between ranks; a reduction needs one order. So packed buckets leave strictly in
plan order: a bucket that is full early waits for the ones before it.

Inline, a bucket is reduced by the thread that runs backward, inside hooks: where every core already computes, a second
thread would only take turns with the first (2 cores, 2 ranks, MLP of 42 M: 333 ms against 422). A staged mover does so
without waiting for late peers before backward is over. With a thread, backward goes on while a worker waits for the
network.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from torchring.allreduce import TAGS_PER_ROUND, Flight, Mover, NonFinite, StagedMover
from torchring.bucket import Bucket, BucketState
from torchring.errors import GradientError, RingError

_T = TypeVar("_T")


class Scheduler:
    """Reduces the buckets of one optimizer, round after round (a round is a backward that reduces).

    Args:
        buckets: in plan order.
        mover: used by one thread at a time.
        threaded: reduce on a worker thread instead of inline.

    Attributes:
        has_launched: whether a bucket has left in this round.
        is_waiting: whether this rank's part of some bucket that has left is still to be done; `look_in` may do it.
        busy_seconds: time spent reducing in the round so far, waiting for peers included.
        exposed_seconds: the part of it during which backward stood still.
    """

    def __init__(self, buckets: Sequence[Bucket], mover: Mover, *, threaded: bool) -> None:
        self.buckets = list(buckets)
        self.threaded = threaded
        self.busy_seconds = 0.0
        self.exposed_seconds = 0.0
        self.is_waiting = False
        self._mover = mover
        self._staged = mover if not threaded and isinstance(mover, StagedMover) else None
        self._in_flight: list[tuple[Bucket, Flight]] = []
        self._num_advanced = 0  # of those
        self._next = 0
        self._round = 0
        self._num_outstanding = 0  # launched to the worker, and not yet waited for
        self._holding = False
        self._failure: BaseException | None = None
        self._step = 0
        self._todo: queue.SimpleQueue[Bucket | None] = queue.SimpleQueue()
        self._num_done = threading.Semaphore(0)
        self._worker: threading.Thread | None = None
        if threaded:
            self._worker = threading.Thread(target=self._work, name="torchring-reduce", daemon=True)
            self._worker.start()

    @property
    def has_launched(self) -> bool:
        return self._next > 0

    def begin(self, *, round_number: int, step: int, hold: bool) -> None:
        """A round begins. Waits for what the last one, if it was broken off, has left under way.

        Args:
            round_number: ranks compare it before they add up.
            step: for error messages.
            hold: launch nothing before `finish`.
        """
        with contextlib.suppress(GradientError):  # about gradients of the round that was broken off: nobody uses them
            self._drain(discard=True)
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
        self._drain()
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
        seconds = time.perf_counter() - started
        self.busy_seconds += seconds
        self.exposed_seconds += seconds

    def replace(self, buckets: Sequence[Bucket]) -> None:
        """Go on with other buckets. Between rounds only."""
        self.buckets = list(buckets)

    def close(self) -> None:
        """End the worker thread."""
        if self._worker is not None:
            self._todo.put(None)
            self._worker = None

    def _drain(self, *, discard: bool = False) -> None:
        """Wait for everything that was launched to be reduced, and raise what went wrong."""
        if self._in_flight:
            self._land(discard=discard)
        while self._num_outstanding:
            self._num_done.acquire()
            self._num_outstanding -= 1
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _launch(self, bucket: Bucket) -> None:
        bucket.begin_reduce()
        started = time.perf_counter()
        if self.threaded:
            self._num_outstanding += 1
            self._todo.put(bucket)
        elif self._staged is not None:
            start, scale, tag = self._staged.start, bucket.reduce_scale, self._tag(bucket)
            flight = self._locating(bucket, lambda: start(bucket.wire, scale=scale, tag=tag))
            self._in_flight.append((bucket, flight))
            self.busy_seconds += time.perf_counter() - started
            self.exposed_seconds += time.perf_counter() - started
            self.look_in()
        else:
            self._reduce(bucket)
            self.exposed_seconds += time.perf_counter() - started

    def _land(self, *, discard: bool) -> None:
        """Wait for what a staged mover has in flight. Peers wait for this rank's parts, so those come first."""
        started = time.perf_counter()
        in_flight, self._in_flight = self._in_flight, []
        self._num_advanced, self.is_waiting = 0, False
        for bucket, flight in in_flight:
            self._locating(bucket, flight.contribute)
        for bucket, flight in in_flight:
            non_finite = self._locating(bucket, flight.land)
            if not discard:
                bucket.end_reduce(non_finite)
        self.busy_seconds += time.perf_counter() - started

    def _reduce(self, bucket: Bucket) -> None:
        started = time.perf_counter()
        bucket.end_reduce(self._locating(bucket, lambda: self._all_reduce(bucket)))
        self.busy_seconds += time.perf_counter() - started

    def _all_reduce(self, bucket: Bucket) -> NonFinite | None:
        return self._mover.all_reduce(bucket.wire, scale=bucket.reduce_scale, tag=self._tag(bucket))

    def _tag(self, bucket: Bucket) -> int:
        return self._round * TAGS_PER_ROUND + bucket.index

    def _locating(self, bucket: Bucket, operation: Callable[[], _T]) -> _T:
        """Have errors between ranks say which bucket it was."""
        try:
            return operation()
        except RingError as error:
            error.locate(bucket=bucket.index, parameters=bucket.names, step=self._step)
            raise

    def _work(self) -> None:
        while (bucket := self._todo.get()) is not None:
            try:
                if self._failure is None:
                    self._reduce(bucket)
            except BaseException as error:  # carried to finish(), on the thread that runs backward
                self._failure = error
            finally:
                self._num_done.release()
