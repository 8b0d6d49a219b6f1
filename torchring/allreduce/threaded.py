"""Buckets are reduced on a thread, while backward goes on; or in the caller's thread, which waits for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future
from typing import Generic

import torch

from torchring.allreduce.contract import AllReduce, W
from torchring.errors import FirstFailure, PeerLostError, RingError
from torchring.threads import SerialThread


class WorkOnThread:
    """One bucket on a thread. See `BucketWork`.

    Args:
        thread: calls `reduce`, unless an earlier bucket has failed. None: the constructor calls `reduce`.
        failure: the first failure of any bucket of the same all-reduce.
    """

    __slots__ = ("_failure", "_future", "span")

    def __init__(self, thread: SerialThread | None, reduce: Callable[[], None], failure: FirstFailure) -> None:
        self.span: tuple[float, float] | None = None
        self._failure = failure
        self._future: Future[None]
        if thread is not None:
            self._future = thread.submit(lambda: self._run(reduce))
        else:
            self._future = Future()
            self._run(reduce)
            self._future.set_result(None)

    def advance(self, *, waits: bool = False) -> bool:
        """This rank's part is done, or the thread does it."""
        return True

    def wait(self) -> None:
        try:
            self._future.result()
        except CancelledError:
            raise PeerLostError("torchring.shutdown() or close() was called before this reduction began") from None
        except RingError as error:
            raise self._failure.error or error from None  # later failures are consequences of the first

    def _run(self, reduce: Callable[[], None]) -> None:
        self._failure.raise_if_set()  # nothing is sent through a broken all-reduce
        started = time.perf_counter()
        try:
            reduce()
        except RingError as error:
            self._failure.set(error)
            raise
        finally:
            self.span = started, time.perf_counter()


class ThreadedAllReduce(Generic[W]):
    """Runs another all-reduce on a thread, one after the other. See `AllReduce`."""

    in_background = True

    def __init__(self, all_reduce: AllReduce[W]) -> None:
        self.algorithm = all_reduce.algorithm
        self._all_reduce = all_reduce
        self._thread = SerialThread("torchring-reductions")
        self._failure = FirstFailure()

    def open_wires(self, specs: Sequence[tuple[int, torch.dtype]]) -> Sequence[W]:
        return self._all_reduce.open_wires(specs)

    def start(self, wire: W) -> WorkOnThread:
        return WorkOnThread(self._thread, lambda: self._all_reduce.start(wire).wait(), self._failure)

    def fail(self, error: RingError) -> None:
        self._failure.set(error)
        self._all_reduce.fail(error)

    def close(self) -> None:
        self._thread.close()
        self._all_reduce.close()
