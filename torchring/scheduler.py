"""Which bucket goes next, and where it runs.

Hooks fire in an order that may differ between ranks; a reduction needs one order. So packed buckets leave strictly in
plan order: a bucket that is full early waits for the ones before it.

Inline, a bucket is reduced by the thread that runs backward, inside the hook that completed it: where every core
already computes, a second thread would only take turns with the first (2 cores, 2 ranks, MLP of 42 M: 333 ms against
422). With a thread, backward goes on while a worker waits for the network.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence

from torchring.allreduce import TAGS_PER_ROUND, Mover
from torchring.bucket import Bucket, BucketState
from torchring.errors import RingError


class Scheduler:
    """Reduces the buckets of one optimizer, round after round (a round is a backward that reduces).

    Args:
        buckets: in plan order.
        mover: used by one thread at a time.
        threaded: reduce on a worker thread instead of inline.

    Attributes:
        has_launched: whether a bucket has left in this round.
        busy_seconds: time spent reducing in the round so far, waiting for peers included.
        exposed_seconds: the part of it during which backward stood still.
    """

    def __init__(self, buckets: Sequence[Bucket], mover: Mover, *, threaded: bool) -> None:
        self.buckets = list(buckets)
        self.threaded = threaded
        self.busy_seconds = 0.0
        self.exposed_seconds = 0.0
        self._mover = mover
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
        """A round begins. Waits for what the last one, if it was broken off, has left with the worker.

        Args:
            round_number: ranks compare it before they add up.
            step: for error messages.
            hold: launch nothing before `finish`.
        """
        self._drain()
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
        if self.threaded:
            started = time.perf_counter()
            self._drain()
            self.exposed_seconds += time.perf_counter() - started

    def replace(self, buckets: Sequence[Bucket]) -> None:
        """Go on with other buckets. Between rounds only."""
        self.buckets = list(buckets)

    def close(self) -> None:
        """End the worker thread."""
        if self._worker is not None:
            self._todo.put(None)
            self._worker = None

    def _drain(self) -> None:
        """Wait for the worker to have done everything, and raise what went wrong there."""
        while self._num_outstanding:
            self._num_done.acquire()
            self._num_outstanding -= 1
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    def _launch(self, bucket: Bucket) -> None:
        bucket.begin_reduce()
        if self.threaded:
            self._num_outstanding += 1
            self._todo.put(bucket)
        else:
            started = time.perf_counter()
            self._reduce(bucket)
            self.exposed_seconds += time.perf_counter() - started

    def _reduce(self, bucket: Bucket) -> None:
        started = time.perf_counter()
        try:
            tag = self._round * TAGS_PER_ROUND + bucket.index
            non_finite = self._mover.all_reduce(bucket.wire, scale=bucket.reduce_scale, tag=tag)
        except RingError as error:
            error.locate(bucket=bucket.index, parameters=bucket.names, step=self._step)
            raise
        bucket.end_reduce(non_finite)
        self.busy_seconds += time.perf_counter() - started

    def _work(self) -> None:
        while (bucket := self._todo.get()) is not None:
            try:
                if self._failure is None:
                    self._reduce(bucket)
            except BaseException as error:  # carried to finish(), on the thread that runs backward
                self._failure = error
            finally:
                self._num_done.release()
