"""Cores: for how long ranks had none, who had them, and what workers of DataLoaders would do with them."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from torchring.observe.recorder.records import RunInfo
from torchring.observer import Phase
from torchring.placement import count
from torchring.report.model.merge import Job
from torchring.report.model.timing import Array, Steps, typical
from torchring.report.model.waits import Critical, computing

OTHERS: Final = "other programs hold the cores"
HANDING_OVER_MS: Final = 0.5  # CPU time with which a rank takes a batch from a worker
MOST_WORKERS: Final = 16  # of a rank: each has the data set in its memory
_AS_GOOD: Final = 1.01
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
    cpu, step_ms = timing.loading_cpu[counts], float(critical.path[counts].sum(1).mean())
    # Workers that wait for a disk need no core.
    busy = float(cpu.mean()) / step_ms if cpu.min() >= 0 and step_ms else float(workers)
    needed = ranks_of_host(run_info) * (threads_of(run_info) + busy * (workers > 0))
    if needed <= _ENOUGH * run_info.num_cores:
        return OTHERS
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


def ranks_of_host(run_info: RunInfo) -> int:
    """Number of ranks of the job on the host of this rank."""
    return run_info.host_ranks or run_info.local_size


def is_crowded(run_info: RunInfo) -> bool:
    """True if the threads of the ranks outnumber the cores."""
    return run_info.device == "cpu" and ranks_of_host(run_info) * threads_of(run_info) > run_info.num_cores


def sharing(run_info: RunInfo, workers: int) -> str:
    """ "2 ranks with 1 thread and 4 workers each share 2 cores"."""
    each = count(threads_of(run_info), "thread") + (f" and {count(workers, 'worker')}" if workers > 0 else "")
    number = ranks_of_host(run_info)
    ranks = f"{count(number, 'rank')} with {each}{' each share' if number > 1 else ' shares'}"
    return f"{ranks} {count(run_info.num_cores, 'core')}"


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
