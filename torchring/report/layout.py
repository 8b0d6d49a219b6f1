"""Which gradients share a bucket, as `wrap` would lay them out, and when each bucket would be ready.

The first bucket is small, so that the link is busy early in backward. Gradients are in the order in which they come.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from torchring.observe.recorder.records import About
from torchring.report.merge import Job
from torchring.report.timing import Array

_MIB: Final = 1 << 20
_FIRST_BYTES: Final = 1 << 20
_BUCKET_MIB: Final = 25.0  # what `wrap` chooses on one host
_BUCKET_MIB_BETWEEN_HOSTS: Final = 12.0
_LEAST_BUCKET_MIB: Final = 1.0  # a parameter above that is large, however small buckets are meant to be

Layout = tuple[tuple[float, ...], tuple[float, ...]]
"""Bytes of each bucket, and the share of backward after which it is ready."""


def nominal_bytes(about: About) -> float:
    """The size of a bucket that `wrap` aims at."""
    try:
        return max(_LEAST_BUCKET_MIB, float(about.options.get("bucket_mb", ""))) * _MIB
    except ValueError:
        return (_BUCKET_MIB if about.local_size == about.size > 1 else _BUCKET_MIB_BETWEEN_HOSTS) * _MIB


def ready_shares(job: Job) -> Array | None:
    """After which share of backward the gradient of each parameter is ready: the median of what was written down.

    NaN for a gradient that never came. None if nothing was written down.
    """
    num_parameters = len(job.traces[0].about.parameters)
    rows = [
        np.array(arrivals.ready_ns, float) / arrivals.backward_ns
        for trace in job.traces
        for arrivals in trace.arrivals
        if arrivals.backward_ns > 0 and len(arrivals.ready_ns) == num_parameters > 0
    ]
    if not rows:
        return None
    columns = [column[column >= 0] for column in np.array(rows).T]
    return np.array([np.median(column) if len(column) else np.nan for column in columns])


def fill(num_bytes: Sequence[float], shares: Sequence[float], bucket_bytes: float) -> Layout:
    """Fill buckets with gradients.

    Args:
        num_bytes, shares: of each gradient, in the order in which they come.
        bucket_bytes: limit of all buckets but the first one. A larger gradient has a bucket of its own.
    """
    sizes: list[float] = []
    ready: list[float] = []
    limit, size = min(_FIRST_BYTES, bucket_bytes), 0.0
    for each, share in zip(num_bytes, shares, strict=True):
        if size and size + each > limit:
            limit, size = bucket_bytes, 0.0
        if not size:
            sizes.append(0.0)
            ready.append(0.0)
        size += each
        sizes[-1], ready[-1] = size, share
    return tuple(sizes), tuple(ready)


def laid_out(job: Job, sent_bytes: float, bucket_mb: float) -> Layout | None:
    """The buckets of a job, if they had another size; None if it is unknown when gradients are ready.

    Args:
        sent_bytes: of all buckets, after compression.
        bucket_mb: in MiB, as the option of `wrap`.
    """
    parameters, shares = job.traces[0].about.parameters, ready_shares(job)
    dense = [i for i, parameter in enumerate(parameters) if parameter.bucket >= 0]
    if shares is None or not dense:
        return None
    shares = np.nan_to_num(shares, nan=1.0)  # the place of a gradient that does not come waits for the end of backward
    dense.sort(key=lambda i: (shares[i], -i))
    ratio = sent_bytes / max(1, sum(parameters[i].num_bytes for i in dense))
    return fill([parameters[i].num_bytes * ratio for i in dense], [float(shares[i]) for i in dense], bucket_mb * _MIB)


def imagined(job: Job) -> Layout:
    """The buckets that a job of one rank would have between hosts."""
    about, shares = job.traces[0].about, ready_shares(job)
    parameters = about.parameters
    order = list(reversed(range(len(parameters))))  # gradients come about in the opposite order of forward
    if shares is None:
        # Without anything better, each byte takes equally long.
        total = np.cumsum([parameters[i].num_bytes for i in order])
        in_order = [float(share) for share in total / max(1, total[-1])] if order else []
    else:
        shares = np.nan_to_num(shares, nan=1.0)
        order.sort(key=lambda i: shares[i])
        in_order = [float(shares[i]) for i in order]
    if not about.bucket_bytes:
        return fill([parameters[i].num_bytes for i in order], in_order, nominal_bytes(about))
    by_parameter = dict(zip(order, in_order, strict=True))
    of_buckets = [
        max((by_parameter[i] for i in order if parameters[i].bucket == index), default=1.0)
        for index in range(len(about.bucket_bytes))
    ]
    return tuple(map(float, about.bucket_bytes)), tuple(of_buckets)
