"""Buckets one by one: how fast they were reduced, and which were not hidden."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from torchring.report.model.merge import Job
from torchring.report.model.timing import Array, Spread, Steps, spread
from torchring.report.model.waits import Critical


@dataclass(frozen=True)
class BucketSummary:
    """One bucket."""

    index: int  # place in the plan; the model's buffers come last
    num_bytes: int  # contributed by one rank, after compression
    names: tuple[str, ...]  # names of parameters; empty if unknown, and for the model's buffers
    ready: Spread  # from the beginning of the (last) backward to the last gradient, on the slowest rank
    reducing: Spread  # from the last rank's launch, and from when the bucket before it is reduced, until it is reduced
    exposed: Spread  # part of `reducing` behind the end of backward on the last rank
    bus_bandwidth: Spread  # 2 (N - 1) / N bytes / `reducing`, in GB/s of 10**9 bytes


def bus_bytes(num_bytes: float, num_ranks: int) -> float:
    """Bytes that each rank must send, and receive, in an all-reduce (Patarasuk and Yuan 2009)."""
    return 2 * (num_ranks - 1) / num_ranks * num_bytes


def summarise(job: Job, timing: Steps, critical: Critical) -> tuple[BucketSummary, ...]:
    """The buckets, in the order of the plan."""
    counts, run_info = timing.reduces, job.traces[0].run_info
    begins, ends = critical.reduction_begins[counts], critical.reduction_ends[counts]
    ready = (timing.ready - timing.backward_begin[..., None])[counts].max(1)
    backward_end = np.take_along_axis(timing.backward_end, critical.slowest[:, None], axis=1)[counts]
    exposed = np.clip(ends - np.maximum(begins, backward_end), 0, None)
    found = []
    for i in range(len(timing.plan)):
        durations = ends[:, i] - begins[:, i]
        size = bus_bytes(timing.bucket_bytes[i], job.size)
        # A bucket that was reduced before this rank looked took no time that can be seen.
        bandwidth = size / 1e6 / np.where(durations > 0, durations, np.nan)
        found.append(
            BucketSummary(
                i,
                int(timing.bucket_bytes[i]),
                tuple(parameter.name for parameter in run_info.parameters if parameter.bucket == i),
                spread(ready[:, i]),
                spread(durations),
                spread(exposed[:, i]),
                spread(bandwidth),
            )
        )
    return tuple(found)


def find_bandwidth(job: Job, timing: Steps, critical: Critical, exposed: Array) -> Spread | None:
    """Bus bandwidth over all buckets of a step, in GB/s. None if nothing was reduced.

    Args:
        exposed: [steps of `Steps.reduces`], standstill of the slowest rank. Within a host, where ranks look
            after their buckets between gradients, that is what a reduction takes.
    """
    durations = (critical.reduction_ends - critical.reduction_begins)[timing.reduces]
    if job.size == 1 or not (durations > 0).any():
        return None
    total = exposed if job.traces[0].run_info.algorithm == "direct" else durations.sum(1)
    bus = bus_bytes(timing.bucket_bytes.sum(), job.size) / 1e6 / np.where(total > 0, total, np.nan)
    return spread(bus)
