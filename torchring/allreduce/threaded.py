"""Buckets that are reduced on a thread, while backward goes on."""

import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future

from torchring.errors import FirstFailure, PeerLostError, RingError
from torchring.threads import SerialThread


class WorkOnThread:
    """One bucket on a thread. See `BucketWork`."""

    __slots__ = ("_fail", "_failure", "_future", "span")

    def __init__(
        self,
        thread: SerialThread,  # calls `reduce`, unless an earlier bucket has failed
        reduce: Callable[[], None],
        failure: FirstFailure,  # the first failure of any bucket of the same all-reduce
        fail: Callable[[RingError], object],  # called with an error of `reduce`; sets `failure`
    ) -> None:
        self.span: tuple[float, float] | None = None
        self._failure = failure
        self._fail = fail
        self._future: Future[None] = thread.submit(lambda: self._run(reduce))

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
            self._fail(error)
            raise
        finally:
            self.span = started, time.perf_counter()
