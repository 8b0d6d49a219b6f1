"""Reductions on threads, which go on while backward does; or in the caller's thread, which waits for them.

A lane is one thread that reduces one wire after the other. With several lanes, the next bucket is on its way while the
previous bucket is checked, added and waited for, so that the network is not idle between buckets. Every rank keeps to
one order within each lane; lanes do not wait for each other.

      lane 0   bucket 0 ..........  bucket 2 ..........
      lane 1        bucket 1 ..........  bucket 3 ...
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from typing import Generic

import torch

from torchring.allreduce.contract import BlockingAllReduce, NonFinite, W
from torchring.errors import FirstFailure, PeerLostError, RingError
from torchring.threads import SerialThread


class PendingInLane:
    """One reduction in a lane. See `PendingReduction`.

    Args:
        thread: calls `reduce`, unless an earlier reduction has failed. None: the constructor calls `reduce`.
        failure: the first failure of any reduction of the same all-reduce.
    """

    __slots__ = ("_failure", "_future", "span")

    def __init__(
        self, thread: SerialThread | None, reduce: Callable[[], NonFinite | None], failure: FirstFailure
    ) -> None:
        self.span: tuple[float, float] | None = None
        self._failure = failure
        self._future: Future[NonFinite | None]
        if thread is not None:
            self._future = thread.submit(lambda: self._run(reduce))
        else:
            self._future = Future()
            self._future.set_result(self._run(reduce))

    def advance(self) -> bool:
        return True

    def contribute(self) -> None:
        """Do nothing: this rank's part is done, or the thread does it."""

    def wait(self) -> NonFinite | None:
        try:
            return self._future.result()
        except CancelledError:
            raise PeerLostError("torchring.shutdown() or close() was called before this reduction began") from None
        except RingError as error:
            raise self._failure.error or error from None  # failures in other lanes are consequences of the first

    def _run(self, reduce: Callable[[], NonFinite | None]) -> NonFinite | None:
        self._failure.raise_if_set()  # nothing is sent through a broken all-reduce
        started = time.perf_counter()
        try:
            return reduce()
        except RingError as error:
            self._failure.set(error)
            raise
        finally:
            self.span = started, time.perf_counter()


class Lanes:
    """Lanes that take reductions in turn, each with a thread of its own or none. Used by one thread.

    Args:
        count: number of lanes.
        in_background: lanes have threads. If False, `start` runs the reduction, and raises its error.

    Attributes:
        failure: the first failure in any lane. Later reductions raise it.
    """

    def __init__(self, count: int, *, in_background: bool = True) -> None:
        self.failure = FirstFailure()
        self._threads = [SerialThread(f"torchring-lane-{i}") if in_background else None for i in range(count)]
        self._num_started = 0

    def start(self, reduce: Callable[[int], NonFinite | None]) -> PendingInLane:
        """Call `reduce(lane)` in the next lane."""
        lane = self._num_started % len(self._threads)
        self._num_started += 1
        return PendingInLane(self._threads[lane], lambda: reduce(lane), self.failure)

    def close(self) -> None:
        for thread in filter(None, self._threads):
            thread.close()


class ThreadedAllReduce(Generic[W]):
    """Runs a blocking all-reduce in lanes. See `AllReduce`.

    Args:
        in_background: reductions go on after `start` has returned. If False, `start` runs the reduction itself.
    """

    def __init__(self, all_reduce: BlockingAllReduce[W], *, in_background: bool = True) -> None:
        self.algorithm = all_reduce.algorithm
        self.in_background = in_background
        self._all_reduce = all_reduce
        self._lanes = Lanes(all_reduce.num_lanes, in_background=in_background)

    def open_wires(self, specs: Sequence[tuple[int, torch.dtype]]) -> Sequence[W]:
        return self._all_reduce.open_wires(specs)

    def start(self, wire: W, *, scale: float = 1.0, tag: int = 0) -> PendingInLane:
        return self._lanes.start(lambda lane: self._all_reduce.all_reduce(wire, scale=scale, tag=tag, lane=lane))

    def fail(self, error: RingError) -> None:
        self._lanes.failure.set(error)
        self._all_reduce.fail(error)

    def close(self) -> None:
        self._lanes.close()
        self._all_reduce.close()
