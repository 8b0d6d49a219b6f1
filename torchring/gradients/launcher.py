"""Launches the buckets of one optimizer in plan order, and waits until all are reduced.

Hooks fire in an order that may differ between ranks, and ranks need one order. So packed buckets leave strictly in plan
order: a bucket that is full early waits for the buckets before it.

The all-reduce decides how a bucket proceeds after it has left. On one host it proceeds in calls between gradients:
every core already computes there, and a second thread would only take turns with the first (2 cores, 2 ranks, MLP of
42 M: 333 ms against 422). Between hosts it proceeds on threads of the engine, or on a thread of its own, and backward
goes on meanwhile. Either way no rank waits for late peers before its backward is over.
"""

import contextlib
import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

from torchring.allreduce import AllReduce, BucketWork
from torchring.allreduce.contract import MAX_PENDING, AbortingAllReduce
from torchring.errors import GradientError, RingError
from torchring.gradients.bucket import Bucket, BucketState
from torchring.gradients.ledger import LOCAL, GradientStatus, Ledger
from torchring.gradients.reduction import Reducible, Reduction, ReductionPhase
from torchring.observer import COPIED, COPYING, LAUNCHED, OVER, REDUCED, STARTED, Progress, Wait

_TAGS_PER_REDUCTION: Final = 1 << 20  # how far this rank is: number of the reduction, and index of the bucket


class Launcher:
    """Moves buckets from state to state; nothing else does. For the thread that runs backward."""

    def __init__(
        self,
        all_reduce: AllReduce[Any],  # reduces the buckets
        ledger: Ledger,  # what is known about each gradient
        progress: Progress | None = None,  # says which buckets this rank has launched, and for which one it waits
        # The launchers with a launched bucket that still waits for this rank's part. One set for all optimizers that a
        # backward may reach: their hooks help each other.
        waiting: "set[Launcher] | None" = None,
    ) -> None:
        self.buckets: list[Bucket] = []  # in plan order
        self.ledger = ledger
        self._bucket_of: dict[int, Bucket] = {}  # by parameter index
        self._slot_of: dict[int, int] = {}
        self._all_reduce = all_reduce
        self._progress = progress or Progress()

        # The reduction
        self.reduction = Reduction(0)  # the reduction under way, or the last one
        self._waiting = set() if waiting is None else waiting
        self._pending: list[tuple[Reducible, BucketWork]] = []
        self._num_advanced = 0  # how many of `_pending` have this rank's part

        # What hooks call
        self._on_ready: list[Callable[[int], None]] | None = None  # None while the order of gradients is unknown
        self._noted: list[int] = []  # parameters whose gradient is there, and is still to be counted
        self._last: dict[Bucket, int] = {}  # the parameter whose hook counts what was noted

        # The order in which the gradients of the first reduction became ready, by parameter index, which the plan then
        # follows. None while that reduction is still to be finished, and after `forget_order`.
        self.ready_order: list[int] | None = None
        self._order_so_far: list[int] | None = []

    @property
    def num_aborted(self) -> int:
        """Number of buckets that had left when their reduction was aborted. 0 after the next `begin`."""
        return self.reduction.num_launched if self.reduction.phase is ReductionPhase.ABORTED else 0

    def install(self, buckets: Sequence[Bucket]) -> None:
        """Go on with these buckets. Between reductions only."""
        for bucket in buckets:
            for position, slot in enumerate(bucket.plan.slots):
                self._bucket_of[slot.parameter], self._slot_of[slot.parameter] = bucket, position
        self.buckets = list(buckets)
        self._on_ready = None

    def drain(self) -> None:
        """Wait for what an aborted reduction has left under way. Others hear of it with the next message."""
        current, aborted = self.reduction, list[tuple[Reducible, BucketWork]]()
        is_aborted = current.phase is ReductionPhase.ABORTED and current.num_launched
        if is_aborted and isinstance(self._all_reduce, AbortingAllReduce):
            rest = self._leaving(is_over=True)
            aborted = [(bucket, self._all_reduce.abort_bucket(bucket.wire)) for bucket in rest]
            current.num_launched, current.extra = len(self.buckets), None
        with contextlib.suppress(GradientError):  # about gradients of the aborted reduction, which nobody uses
            self.wait(discard=True)
        for bucket, work in aborted:
            with self._at(bucket):
                work.wait()

    def begin(self, current: Reduction) -> None:
        """A reduction begins, after `drain`. Its first gradient may be there already."""
        for bucket in self.buckets:
            if self.reduction.phase is ReductionPhase.ABORTED:
                bucket.reset()
            bucket.begin(current)
        self.reduction = current

    def on_ready(self, num_parameters: int) -> Sequence[Callable[[int], None]]:
        """What the hook of each parameter calls with its index, in a backward that reduces.

        Once the order of gradients is known, most hooks of small gradients only note the index in a list. The hook of
        the gradient that comes last in its bucket, and any other hook that calls `mark_ready`, has them counted. Where
        gradients come in another order, buckets are full somewhat later.
        """
        if self._order_so_far is not None:
            return [self.mark_ready] * num_parameters
        if self._on_ready is None or len(self._on_ready) != num_parameters:
            self._on_ready, self._last = [self.mark_ready] * num_parameters, {}
            for bucket in self.buckets:
                for slot, is_copied in zip(bucket.plan.slots, bucket.copies_on_arrival, strict=True):
                    if not is_copied:
                        self._on_ready[slot.parameter] = self._noted.append
                self._count_at(bucket, len(bucket.plan.slots) - 1)
        return self._on_ready

    def mark_ready(self, index: int) -> None:
        """Parameter `index` has its gradient, in a backward that reduces. From the parameter's hook."""
        if self._order_so_far is not None:
            self._order_so_far.append(index)
        bucket = self._bucket_of.get(index)
        if bucket is None:
            self.ledger.mark_local(index)  # it is sparse
            return
        is_large = bucket.copies_on_arrival[slot := self._slot_of[index]]
        if not is_large:
            self._noted.append(index)
        full = self.count_noted() if self._noted else []
        for each in full:  # before this gradient counts: if it came before them, it comes again
            each.pack_rest()
        if is_large:
            is_last = bucket.mark_ready(slot)
            if (tell := self.reduction.events) is not None:
                tell(COPYING, bucket.index, 0)
            bucket.pack((slot,))
            if tell is not None:
                tell(COPIED, bucket.index, 0)
            if is_last:
                bucket.pack_rest()
                full.append(bucket)
        if full or (self._waiting and is_large):  # some time has gone by
            self.launch()  # these two are `advance`, without its frame
            self.proceed()
            for other in tuple(self._waiting):
                if other is not self:
                    other.advance()

    def count_noted(self) -> list[Bucket]:
        """Count the gradients that hooks have only noted. Returns the buckets of which none is missing any more."""
        full, noted, bucket_of = list[Bucket](), self._noted, self._bucket_of
        buckets = dict.fromkeys(map(bucket_of.__getitem__, noted))
        for bucket in buckets:
            own = noted if len(buckets) == 1 else [index for index in noted if bucket_of[index] is bucket]
            if bucket.mark_noted(list(map(self._slot_of.__getitem__, own))):
                if self._last.get(bucket) != own[-1]:
                    self._count_at(bucket, self._slot_of[own[-1]])  # gradients came in another order than before
                full.append(bucket)
        noted.clear()
        return full

    def advance(self) -> None:
        """Launch the buckets that may go now, and do this rank's part of those that have left, if nobody is late."""
        self.launch()
        self.proceed()

    def launch(self, *, is_over: bool = False) -> None:
        """Launch the buckets that may go now. With `is_over`, all gradients are packed, and everything goes."""
        current = self.reduction
        for bucket in self._leaving(is_over):
            bucket.begin_reduce()
            current.num_launched += bucket is not current.extra
            started = time.perf_counter()
            if (tell := current.events) is not None:
                tell(LAUNCHED, bucket.index, 0)
            self._progress.begin(current.number * _TAGS_PER_REDUCTION + bucket.index)
            with self._at(bucket):
                work = self._all_reduce.start(bucket.wire)
            self._pending.append((bucket, work))
            self.stood_still(time.perf_counter() - started)

    def _leaving(self, is_over: bool) -> Sequence[Reducible]:
        """The buckets that may go now, in plan order."""
        current, buckets = self.reduction, self.buckets
        first = last = current.num_launched
        if is_over:
            return [*buckets[first:], *([] if current.extra is None else [current.extra])]
        if current.defers_launch:
            return []
        end = len(buckets)
        if current.is_unordered:  # `start` would wait for ranks that may wait for this one, in another reduction
            end = min(end, first + MAX_PENDING - len(self._pending))
        while last < end and buckets[last].state is BucketState.PACKED:
            last += 1
        return buckets[first:last]

    def proceed(self) -> None:
        """Do this rank's part of the buckets that have left, if nobody is late."""
        current, pending = self.reduction, self._pending
        if not pending:
            return
        started = time.perf_counter()
        while self._num_advanced < len(pending):
            launched, work = pending[self._num_advanced]
            if (tell := current.events) is not None:
                tell(STARTED, launched.index, 0)
            try:
                if not work.advance():
                    break
            except RingError as error:
                _locate(error, launched, current)
                raise
            if tell is not None:
                tell(REDUCED, launched.index, 0)
            self._num_advanced += 1
        if self._num_advanced < len(pending):
            self._waiting.add(self)
        else:
            self._waiting.discard(self)
        self.stood_still(time.perf_counter() - started)

    def fill_rest(self) -> None:
        """Backward is over: fill the remaining buckets."""
        current = self.reduction
        if current.is_filled:
            return
        current.is_filled = True
        if current.events is not None:
            current.events(OVER, -1, 0)
        for bucket in self.buckets:
            if bucket.state in (BucketState.IDLE, BucketState.FILLING):
                bucket.fill_missing()

    def launch_rest(self) -> None:
        """Backward is over, and ranks agree that it has reached these parameters: fill and launch what remains."""
        self.fill_rest()
        if (extra := self.reduction.extra) is not None:
            extra.index = len(self.buckets)
        self.launch(is_over=True)

    def wait(self, *, discard: bool = False) -> None:
        """Return when every bucket that has left is REDUCED; `discard` leaves it as it is. Raises what went wrong."""
        started = time.perf_counter()
        pending, self._pending = self._pending, []
        num_advanced, self._num_advanced = self._num_advanced, 0
        self._waiting.discard(self)
        tell = self.reduction.events
        for bucket, work in pending[num_advanced:]:
            if tell is not None:
                tell(STARTED, bucket.index, 0)
            with self._at(bucket):
                work.advance(waits=True)
            if tell is not None:
                tell(REDUCED, bucket.index, 0)
        problem: GradientError | None = None
        for bucket, work in pending:
            with self._at(bucket):
                work.wait()
            if tell is not None and work.span is not None:  # a thread has reduced the bucket
                for event, seconds in zip((STARTED, REDUCED), work.span, strict=True):
                    tell(event, bucket.index, int(seconds * 1e9))
            if discard or problem is not None:
                continue
            try:
                bucket.end_reduce()
            except GradientError as error:  # the others are waited for all the same: nothing may stay under way
                problem = error
        seconds = time.perf_counter() - started
        self.reduction.exposed_seconds += seconds
        if self._all_reduce.in_background:
            seconds = union_length(r.span for _, r in pending if r.span is not None)
        self.reduction.busy_seconds += seconds
        if problem is not None:
            raise problem

    def locate(self, error: RingError) -> None:
        """Other ranks are late: have `error` name the first bucket that waits for them, or else the last that left."""
        if pending := self._pending[: self._num_advanced + 1]:
            _locate(error, pending[-1][0], self.reduction)

    def close_reduction(self) -> None:
        """Every bucket is REDUCED, and ranks agree about the reduction: every gradient gets its result."""
        current = self.reduction
        for bucket in self.buckets:
            bucket.close_reduction()
        self.ledger.settle_slices()
        current.phase = ReductionPhase.OVER
        self._progress.finish(current.next_number * _TAGS_PER_REDUCTION - 1)
        self._keep_order()

    def refuse_lost(self) -> None:
        """Raise GradientError if the script goes on with a gradient of the last reduction, which was aborted."""
        if self.reduction.phase is ReductionPhase.ABORTED:
            self.ledger.refuse_lost()

    def abort(self) -> None:
        """The reduction was aborted. Gradients that have arrived stay local, or are lost in buffers that left."""
        if self.reduction.phase is ReductionPhase.UNDER_WAY:
            self.reduction.phase = ReductionPhase.ABORTED
        self._waiting.discard(self)
        status = self.ledger.status
        for position in map(self.ledger.positions.__getitem__, self._noted):
            if status[position] is not GradientStatus.LOST:
                status[position] = LOCAL
        self._noted.clear()
        for bucket in self.buckets:
            bucket.abort()
        if self.buckets and self.reduction.num_launched == len(self.buckets):
            self._keep_order()  # as on the peers, for whom the reduction is over
        elif self._order_so_far is not None:
            self._order_so_far = []

    def forget_order(self) -> None:
        """The plan stays as it is."""
        self.ready_order = self._order_so_far = None

    def close(self) -> None:
        """No backward comes any more. What hooks call refers to this launcher."""
        self._on_ready = None

    def _count_at(self, bucket: Bucket, slot: int) -> None:
        """The hook of this gradient is the one that has noted gradients counted, of all small ones of the bucket."""
        if (on_ready := self._on_ready) is None:  # closed
            return
        if (earlier := self._last.pop(bucket, None)) is not None:
            on_ready[earlier] = self._noted.append
        if not bucket.copies_on_arrival[slot]:
            self._last[bucket] = index = bucket.plan.slots[slot].parameter
            on_ready[index] = self.mark_ready

    def _keep_order(self) -> None:
        if self._order_so_far is not None:
            self.ready_order, self._order_so_far = self._order_so_far, None

    def stood_still(self, seconds: float) -> None:
        """Backward stood still for that long, in calls of the all-reduce, or because it waits for other ranks."""
        self.reduction.exposed_seconds += seconds
        if not self._all_reduce.in_background:
            self.reduction.busy_seconds += seconds

    def _at(self, bucket: Reducible) -> "_At":
        """Inside, other ranks and warnings say that this rank waits for a bucket, and errors between ranks name it."""
        wait = Wait("the reduction of gradients", self.reduction.step, bucket.index, bucket.names[0])
        return _At(self._progress.waiting(wait), self.reduction, bucket)


class _At:
    """See `Launcher._at`. A class, as a generator costs more, and each bucket enters this several times."""

    __slots__ = ("_bucket", "_current", "_waiting")

    def __init__(self, waiting: AbstractContextManager[None], current: Reduction, bucket: Reducible) -> None:
        self._waiting = waiting
        self._current = current
        self._bucket = bucket

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self._waiting.__exit__(None, None, None)
        if isinstance(error, RingError):
            _locate(error, self._bucket, self._current)


def _locate(error: RingError, bucket: Reducible, current: Reduction) -> None:
    error.locate(bucket=bucket.index, parameters=bucket.names, step=current.step)


def union_length(spans: Iterable[tuple[float, float]]) -> float:
    """Length of the union of intervals.

    Example: (0, 2), (1, 3), (5, 6) -> 4.
    """
    total, covered = 0.0, -math.inf
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, covered))
        covered = max(covered, end)
    return total
