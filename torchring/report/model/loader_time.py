"""Time for loading batches, and how long a step would take with another number of DataLoader workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from torchring.observer import Phase
from torchring.report.model.core_time import num_workers, threads_of
from torchring.report.model.merge import Job
from torchring.report.model.timing import Array, Steps, typical
from torchring.report.model.waits import Critical, computing

HANDING_OVER_MS: Final = 0.5  # CPU time with which a rank takes a batch from a worker
MOST_WORKERS: Final = 16  # of a rank: each has the data set in its memory
_AS_GOOD: Final = 1.01


@dataclass(frozen=True)
class LoaderTime:
    """S steps of R ranks, milliseconds of a step."""

    waiting: Array  # [S, R], time in which a rank waits for batches, or loads them itself
    worker: Array  # [S, R], time in which a single worker loads them
    cores: Array  # [S, R], time for which that keeps a core busy
    computing: Array  # [S, R], everything else that the rank computes
    others: Array  # [S], communication that cannot be avoided
    has_loader: bool  # a DataLoader gives batches; if not, `waiting` is everything between step() and forward
    num_workers: int  # present number
    num_threads: int  # threads with which a rank computes
    hosts: Array  # [R], number of the host
    num_cores: Array  # [R], of the host

    def step_ms(self, workers: int) -> float:
        """A step with so many workers for each rank. The slowest rank, the loading or the cores are the limit.

        Of each limit, the mean counts: batches that are loaded in advance make up for a step that takes longer.
        """
        if workers == self.num_workers:
            return typical((self.computing + self.waiting).max(1) + self.others)
        rank = typical(self.computing.max(1) + self.others) + (0.0 if self.num_workers else HANDING_OVER_MS)
        return max(rank, float(self.worker.mean(0).max()) / workers, self.busy_ms)

    @property
    def busy_ms(self) -> float:
        """Time for which the cores of the busiest host have work in a step, with workers."""
        work = (self.num_threads * self.computing + self.cores).mean(0)
        work += 0.0 if self.num_workers else HANDING_OVER_MS
        of_hosts = [self.hosts == host for host in np.unique(self.hosts)]
        return max(float(work[each].sum() / self.num_cores[each][0]) for each in of_hosts)

    def best(self) -> int:
        """The least number of workers with which a step is as short as it can be."""
        numbers = range(self.num_workers, MOST_WORKERS + 1)
        found = {number: self.step_ms(number) for number in numbers} or {self.num_workers: 0.0}
        return next(number for number in found if found[number] <= _AS_GOOD * min(found.values()))


def find_loading(job: Job, timing: Steps, critical: Critical, *, is_forward_known: bool) -> LoaderTime | None:
    """Time for loading batches. None if it is unknown: no DataLoader gives batches, and forward is not told apart."""
    counts = timing.counts
    cycle, workers = critical.cycle[counts], num_workers(timing)
    waiting = np.minimum(timing.loading[counts], cycle[..., Phase.INPUT])
    if workers < 0:
        if not is_forward_known:
            return None
        waiting = cycle[..., Phase.INPUT]
    busy = computing(cycle) - waiting
    worker = waiting
    cores = timing.loading_cpu[counts]
    if workers > 0:  # where ranks wait for workers, these are busy all the time
        worker = np.broadcast_to(workers * critical.path[counts].sum(1)[:, None], waiting.shape)
        waiting = np.maximum(0.0, waiting - HANDING_OVER_MS)
        busy = busy + HANDING_OVER_MS
    infos = [trace.run_info for trace in job.traces]
    return LoaderTime(
        waiting,
        worker,
        np.where(cores < 0, worker, cores),
        busy,
        cycle[..., Phase.EXPOSED].min(1),
        workers >= 0,
        max(0, workers),
        threads_of(infos[0]),
        np.array([info.node_rank for info in infos]),
        np.array([info.num_cores for info in infos]),
    )
