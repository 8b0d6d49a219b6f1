"""Cores: for how long ranks had none, and who had them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from torchring.report.findings import Phase
from torchring.report.merge import Job
from torchring.report.timing import Array, Timing
from torchring.report.waits import Critical, column
from torchring.tracing.records import About


@dataclass(frozen=True)
class Queue:
    """[S] each: milliseconds of each step that counts, in which a rank was ready to run, but had no core.

    Attributes:
        own: the rank that the others wait for, apart from communication.
        communication: of this phase, the rank that had no core for longest: the others wait for its part.
    """

    own: Array
    communication: Array

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
    own = (queued - exposed)[np.arange(len(path)), critical.slowest[counts]]
    return Queue(
        np.minimum(own, path.sum(1) - communication),
        np.minimum(exposed.max(1), communication),
    )


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


def who_has_the_cores(about: About, workers: int) -> str:
    """Who has the cores while a rank has none: a clause. `workers`: of a DataLoader, see `num_workers`."""
    ranks, threads, workers = about.local_size, threads_of(about), max(0, workers)
    if ranks * (threads + workers) <= about.num_cores:
        return "other programs hold the cores"
    each = f"{threads} {'thread' if threads == 1 else 'threads'}"
    each += f" and {workers} {'worker' if workers == 1 else 'workers'}" if workers else ""
    cores = f"{about.num_cores} {'core' if about.num_cores == 1 else 'cores'}"
    return f"{ranks} {'rank' if ranks == 1 else 'ranks'} with {each}{' each' if ranks > 1 else ''} share {cores}"
