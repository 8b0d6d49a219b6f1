"""Cores: for how long ranks had none, and who had them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from torchring.report.findings import Phase
from torchring.report.merge import Job
from torchring.report.timing import Array, Timing
from torchring.report.waits import Critical, column
from torchring.tracing.records import About

_ENOUGH: Final = 1.1  # times the cores: threads and workers that need no more leave each other the cores


@dataclass(frozen=True)
class Queue:
    """[S] each: milliseconds of each step that counts, in which a rank was ready to run, but had no core.

    Attributes:
        own: the rank that the others wait for, apart from communication.
        communication: of this phase, the rank that had no core for longest: the others wait for its part.
        of_ranks: [S, R], each rank, apart from communication.
        who: who had the cores meanwhile, a clause.
    """

    own: Array
    communication: Array
    of_ranks: Array
    who: str

    @property
    def whole(self) -> Array:
        """Of the step."""
        return np.asarray(self.own + self.communication)


def find_queue(job: Job, timing: Timing, critical: Critical) -> Queue | None:
    """None if a kernel does not tell, and on GPUs, which hide what the CPU waits for."""
    counts = timing.counts
    rows = [row for row, counts_here in zip(job.steps, counts, strict=True) if counts_here]
    queued = np.array([[step.queued_ns for step in row] for row in rows]) / 1e6
    exposed = np.array([[step.exposed_queued_ns for step in row] for row in rows]) / 1e6
    if min(queued.min(), exposed.min()) < 0:
        return None
    path = critical.path[counts]
    communication = path[:, column(Phase.COMMUNICATION)]
    of_ranks = queued - exposed
    own = of_ranks[np.arange(len(path)), critical.slowest[counts]]
    loading = np.array([[step.loading_cpu_ns for step in row] for row in rows]) / 1e6
    about, workers = job.traces[0].about, max(0, num_workers(job, timing))
    # Workers that wait for a disk need no core.
    busy_workers = float(loading.mean() / path.sum(1).mean()) if loading.min() >= 0 else float(workers)
    has_enough = about.local_size * (threads_of(about) + busy_workers * (workers > 0)) <= _ENOUGH * about.num_cores
    who = "other programs hold the cores" if has_enough else sharing(about, workers)
    own, communication = np.minimum(own, path.sum(1) - communication), np.minimum(exposed.max(1), communication)
    return Queue(own, communication, of_ranks, who)


def num_workers(job: Job, timing: Timing) -> int:
    """Of the DataLoader that gives most batches of the steps that count; -1 if none gives any."""
    found = [
        step.num_workers
        for row, counts in zip(job.steps, timing.counts, strict=True)
        for step in row
        if counts and step.num_workers >= 0
    ]
    return max(set(found), key=found.count) if found else -1


def threads_of(about: About) -> int:
    """How many cores a rank uses at most, apart from workers. Where a GPU computes, one thread keeps it busy."""
    return about.num_threads if about.device == "cpu" else 1


def is_crowded(about: About) -> bool:
    """Whether the threads of the ranks outnumber the cores."""
    return about.device == "cpu" and about.local_size * threads_of(about) > about.num_cores


def sharing(about: About, workers: int) -> str:
    """ "2 ranks with 1 thread and 4 workers each share 2 cores"."""
    each = _count(threads_of(about), "thread") + (f" and {_count(workers, 'worker')}" if workers > 0 else "")
    ranks = f"{_count(about.local_size, 'rank')} with {each}{' each share' if about.local_size > 1 else ' shares'}"
    return f"{ranks} {_count(about.num_cores, 'core')}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
