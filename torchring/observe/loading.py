"""Notices when a DataLoader keeps a rank from training.

PyTorch has no public way to see when a DataLoader gives a batch. So `__iter__` of DataLoaders and `__next__` of their
iterators are wrapped while somebody wants to know. That adds 4 us to a batch, and 2 us for each worker.
"""

import functools
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, Final

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

UNKNOWN: Final = -1
_CPU_TIME: Final = 2  # with the inverted process id, the number of the clock: as clock_getcpuclockid(3) makes it
_workers_ns: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
_loaders: weakref.WeakKeyDictionary[Any, weakref.ref[DataLoader[Any]]] = weakref.WeakKeyDictionary()  # of iterators


def since(before_ns: int, now_ns: int) -> int:
    """The difference. UNKNOWN if one of the two is."""
    return now_ns - before_ns if before_ns >= 0 and now_ns >= 0 else UNKNOWN


class Loading:
    """What was seen in one thread since `begin_step`, as in a `StepRecord`. `watch` makes this module write it down."""

    def __init__(self) -> None:
        self.num_loaders = 0  # how many DataLoaders have begun, since ever
        self.loader: Callable[[], DataLoader[Any] | None] = lambda: None  # the DataLoader that gave the last batch
        self.counts = True  # whether the thread does nothing else now that takes as long
        self.begin_step()

    def begin_step(self) -> None:
        self.thread = threading.get_ident()
        self.counts = True
        self.loading_ns = 0
        self.loading_cpu_ns = self.num_workers = -1


_watched: weakref.WeakSet[Loading] = weakref.WeakSet()


def _timed(call: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A method of a DataLoader, or of its iterator, that says how long it takes."""

    @functools.wraps(call)
    def timed(self: Any) -> Any:
        thread = threading.get_ident()
        found = [each for each in list(_watched) if each.thread == thread and each.counts]
        waiting = [(each, each.loading_ns, each.loading_cpu_ns) for each in found]
        worked, began = time.thread_time_ns(), time.perf_counter_ns()
        gives = isinstance(self, _BaseDataLoaderIter)
        try:
            result = call(self)
            if not gives:
                _loaders[result] = weakref.ref(self)
            return result
        finally:
            took, worked = time.perf_counter_ns() - began, time.thread_time_ns() - worked
            if waiting and gives and self._num_workers:
                worked = _since_last_batch(self)
            for each, before, cpu_before in waiting:  # not `+=`: the data set may read another DataLoader
                each.loading_ns = before + took
                if gives:
                    each.num_workers, each.loader = self._num_workers, _loaders.get(self, each.loader)
                else:
                    each.num_loaders += 1
                if worked != UNKNOWN:
                    each.loading_cpu_ns = max(0, cpu_before) + worked

    return timed


_begin: Final = DataLoader.__iter__  # starts workers
_load: Final = _BaseDataLoaderIter.__next__
_timed_begin: Final = _timed(_begin)
_timed_load: Final = _timed(_load)


def _since_last_batch(iterator: Any) -> int:
    """CPU time of its workers. UNKNOWN for the first batch, and if a worker is gone."""
    try:
        total = sum(time.clock_gettime_ns((~worker.pid << 3) | _CPU_TIME) for worker in iterator._workers)
    except OSError:
        return UNKNOWN
    before, _workers_ns[iterator] = _workers_ns.get(iterator, UNKNOWN), total
    return since(before, total)


def watch(loading: Loading) -> None:
    """Write to `loading` from now on."""
    if not _watched:
        if DataLoader.__iter__ is _begin:  # a script may have put in its own
            DataLoader.__iter__ = _timed_begin  # type: ignore[method-assign]
        _BaseDataLoaderIter.__next__ = _timed_load  # type: ignore[method-assign, assignment]
    weakref.finalize(loading, _unwrap).atexit = False  # of a world that was dropped and not closed
    _watched.add(loading)


def forget(loading: Loading) -> None:
    """Write to `loading` no more. When nobody wants to know, nothing is wrapped."""
    _watched.discard(loading)
    _unwrap()


def _unwrap() -> None:
    if _watched:
        return
    if DataLoader.__iter__ is _timed_begin:
        DataLoader.__iter__ = _begin  # type: ignore[method-assign]
    if _BaseDataLoaderIter.__next__ is _timed_load:
        _BaseDataLoaderIter.__next__ = _load  # type: ignore[method-assign]
