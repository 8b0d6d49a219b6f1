"""Cores: for how long ranks had none, who had them, and how long ranks wait for DataLoaders."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from torchring.observe.recorder.records import RunInfo
from torchring.observer import Phase
from torchring.report.model.timing import Array, Steps
from torchring.report.model.waits import Critical
from torchring.report.words import count

_ENOUGH: Final = 1.1  # times the cores: threads and workers that need no more leave each other the cores


@dataclass(frozen=True)
class Queue:
    """Milliseconds of each step that counts, in which a rank was ready to run, but had no core."""

    own: Array  # [S], the rank that the others wait for, apart from communication
    communication: Array  # [S], of this phase, the rank that had no core for longest: the others wait for its part
    of_ranks: Array  # [S, R], each rank, apart from communication

    @property
    def whole(self) -> Array:
        """Time of the whole step."""
        return np.asarray(self.own + self.communication)


def find_queue(timing: Steps, critical: Critical) -> Queue | None:
    """Time without a core. None if a kernel does not tell, and on GPUs, which hide what the CPU waits for."""
    counts = timing.counts
    queued, exposed = timing.queued[counts], timing.exposed_queued[counts]
    if min(queued.min(), exposed.min()) < 0:
        return None
    path = critical.path[counts]
    communication = path[:, Phase.EXPOSED]
    of_ranks = queued - exposed
    own = np.minimum(of_ranks[np.arange(len(path)), critical.slowest[counts]], path.sum(1) - communication)
    return Queue(own, np.minimum(exposed.max(1), communication), of_ranks)


def who_has_them(run_info: RunInfo, timing: Steps, critical: Critical, queue: Queue | None) -> str:
    """Who has the cores while a rank has none: a clause."""
    counts, workers = timing.counts, max(0, num_workers(timing))
    step_ms = float(critical.path[counts].sum(1).mean())
    needed = run_info.local_size * (threads_of(run_info) + workers)
    if needed <= _ENOUGH * run_info.num_cores:
        return "other programs hold the cores"
    share = float(queue.whole.mean()) / step_ms if queue is not None and step_ms else 0.0
    # What is runnable takes turns: 4 threads on 2 cores have none for half of the time.
    others = " with other programs" if share > _ENOUGH * (1.0 - run_info.num_cores / needed) else ""
    return sharing(run_info, workers) + others


def num_workers(timing: Steps) -> int:
    """Number of workers of the DataLoader that gives most batches of the steps that count; -1 without a DataLoader."""
    found = timing.num_workers[timing.counts]
    numbers, counts = np.unique(found[found >= 0], return_counts=True)
    return int(numbers[counts.argmax()]) if len(counts) else -1


def threads_of(run_info: RunInfo) -> int:
    """Number of cores that a rank uses at most, without workers. One thread keeps a GPU busy."""
    return run_info.num_threads if run_info.device == "cpu" else 1


def is_crowded(run_info: RunInfo) -> bool:
    """True if the threads of the ranks outnumber the cores."""
    return run_info.device == "cpu" and run_info.local_size * threads_of(run_info) > run_info.num_cores


def sharing(run_info: RunInfo, workers: int) -> str:
    """ "2 ranks with 1 thread and 4 workers each share 2 cores"."""
    each = count(threads_of(run_info), "thread") + (f" and {count(workers, 'worker')}" if workers > 0 else "")
    ranks = f"{count(run_info.local_size, 'rank')} with {each}{' each share' if run_info.local_size > 1 else ' shares'}"
    return f"{ranks} {count(run_info.num_cores, 'core')}"


@dataclass(frozen=True)
class LoaderTime:
    """The time that loading batches takes."""

    waiting: Array  # [S, R], milliseconds of a step in which a rank waits for batches, or loads them itself
    has_loader: bool  # a DataLoader gives batches; if not, `waiting` is everything between step() and forward
    num_workers: int  # of the DataLoader


def find_loading(timing: Steps, critical: Critical, *, is_forward_known: bool) -> LoaderTime | None:
    """Time for loading batches. None if it is unknown: no DataLoader gives batches, and forward is not told apart."""
    spent, workers = critical.cycle[timing.counts][..., Phase.INPUT], num_workers(timing)
    if workers >= 0:
        return LoaderTime(np.minimum(timing.loading[timing.counts], spent), True, workers)
    return LoaderTime(spent, False, 0) if is_forward_known else None
