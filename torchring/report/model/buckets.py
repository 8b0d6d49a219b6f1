"""Buckets one by one: how fast they were reduced, which were not hidden, and which parameters made them late."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from torchring.report.model.bucket_layout import nominal_bytes, ready_shares
from torchring.report.model.merge import Job
from torchring.report.model.timing import Spread, Steps, spread
from torchring.report.model.waits import Critical
from torchring.report.words import share_in_words

_OVERSIZED: Final = 1.5  # times the size that was asked for
_LEAST_LARGE_BYTES: Final = 1 << 20  # a larger parameter is large, however small buckets are meant to be
_MOST: Final = 0.5  # of a bucket, or of what is exposed
_LATE: Final = 0.8  # share of backward
_HOLDS: Final = 0.05  # share of backward for which a parameter is alone not ready
_WORTH_TELLING: Final = 0.005  # share of a step
_MAX_LATE: Final = 10


@dataclass(frozen=True)
class BucketSummary:
    index: int  # place in the plan; the model's buffers come last
    num_bytes: int  # contributed by one rank, after compression
    names: tuple[str, ...]  # names of parameters; empty if unknown, and for the model's buffers
    ready: Spread  # from the beginning of the (last) backward to the last gradient, on the slowest rank
    reducing: Spread  # from the last rank's launch, and from when the bucket before it is reduced, until it is reduced
    exposed: Spread  # part of `reducing` behind the end of backward on the last rank
    bus_bandwidth: Spread  # 2 (N - 1) / N bytes / `reducing`, in GB/s of 10**9 bytes


@dataclass(frozen=True)
class LateParameter:
    """A parameter that keeps its bucket waiting, or that is so large that nothing hides its reduction."""

    name: str
    bucket: int  # its number
    num_bytes: int  # of the gradient
    # Time for which it was the only parameter of its bucket that was not ready; 0 if it is alone in its bucket.
    holds_ms: float
    exposed_ms: float  # part of the reduction of its bucket behind the end of backward
    why: str  # one sentence


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


def late_parameters(
    job: Job, summaries: Sequence[BucketSummary], backward_ms: float, step_ms: float
) -> tuple[LateParameter, ...]:
    """Parameters whose gradients come late, and cost time: the worst first.

    A parameter is late in two ways. It is so large that its bucket is much larger than others, and its gradient comes
    at the end of backward, so that nothing is left to hide the reduction. Or the other gradients of its bucket are
    ready long before.
    """
    run_info = job.traces[0].run_info
    measured = ready_shares(job)
    shares = {} if measured is None else {i: float(at) for i, at in enumerate(measured) if np.isfinite(at)}
    found = []
    for summary in summaries:
        inside = [i for i, parameter in enumerate(run_info.parameters) if parameter.bucket == summary.index]
        exposed = summary.exposed.median
        if not inside or exposed < _WORTH_TELLING * step_ms:
            continue
        total = sum(run_info.parameters[i].num_bytes for i in inside) or 1
        largest = max(inside, key=lambda i: run_info.parameters[i].num_bytes)
        ready_share = shares.get(largest, min(1.0, summary.ready.median / backward_ms) if backward_ms else 1.0)
        size = run_info.parameters[largest].num_bytes
        nominal = max(_LEAST_LARGE_BYTES, nominal_bytes(run_info))
        if size >= _MOST * total and total >= _OVERSIZED * nominal and ready_share >= _LATE:
            why = (
                f"Its gradient of {size / 1e6:.0f} MB makes its bucket large, and is ready after "
                f"{share_in_words(ready_share)} of backward, so that little is left to hide the reduction."
            )
            found.append(LateParameter(run_info.parameters[largest].name, summary.index, size, 0.0, exposed, why))
            continue
        known = sorted((shares[i], i) for i in inside if i in shares)
        if len(known) < 2:
            continue
        (before, _), (last_share, last) = known[-2:]
        if last_share - before >= _HOLDS:
            holds_ms = (last_share - before) * backward_ms
            why = (
                f"All other gradients of bucket {summary.index} are ready {holds_ms:.1f} ms earlier. The bucket, and "
                "all buckets after it, wait for this one."
            )
            late = run_info.parameters[last]
            found.append(LateParameter(late.name, summary.index, late.num_bytes, holds_ms, exposed, why))
    return tuple(sorted(found, key=lambda late: -late.exposed_ms)[:_MAX_LATE])
