"""Predicts buckets: the gradients that `wrap` puts into each, and when each is ready.

The planner needs torch, whose import takes seconds. It is imported where it is asked: wrong folders are told at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from torchring.observe.recorder.records import ParameterRecord, RunInfo
from torchring.report.model.merge import Job
from torchring.report.model.timing import Array

if TYPE_CHECKING:
    from torchring.gradients.plan import ParameterSpec

_MIB: Final = 1 << 20

Layout = tuple[tuple[float, ...], tuple[float, ...]]
"""Bytes of each bucket, and the share of backward after which it is ready."""


def nominal_bytes(run_info: RunInfo) -> float:
    """The size of a bucket that `wrap` aims at; for one rank, the size between hosts."""
    from torchring.gradients.plan import default_bucket_mb

    try:
        return float(run_info.options.get("bucket_mb", "")) * _MIB
    except ValueError:  # "None"
        num_hosts = 1 if run_info.local_size == run_info.size > 1 else 2
        on_device = run_info.device != "cpu"
        return default_bucket_mb(run_info.size, num_hosts, run_info.algorithm, on_device=on_device) * _MIB


def ready_shares(job: Job) -> Array | None:
    """Share of backward after which the gradient of each parameter is ready: the median of what the ranks recorded.

    NaN for a gradient that never came. None if nothing was recorded.
    """
    parameters = job.traces[0].run_info.parameters
    shares = np.full(len(parameters), np.nan)
    for optimizer in {each.optimizer for each in parameters}:
        own = [i for i, each in enumerate(parameters) if each.optimizer == optimizer]
        rows = [
            np.array(each.ready_ns, float) / each.backward_ns
            for trace in job.traces
            for each in trace.arrivals
            if each.optimizer == optimizer and each.backward_ns > 0 and len(each.ready_ns) == len(own)
        ]
        for i, column in zip(own, np.array(rows).T, strict=False):  # no columns without rows
            if (column >= 0).any():
                shares[i] = np.median(column[column >= 0])
    return shares if np.isfinite(shares).any() else None


def lay_out(
    parameters: Sequence[ParameterRecord],
    # for each parameter, the share of backward after which its gradient is ready. NaN if it never comes: then its
    # bucket leaves at the end of backward.
    shares: Array,
    bucket_bytes: float,  # cap of a bucket, in bytes of gradient
    ratio: float,  # bytes in the bucket for each byte of gradient; less than 1 if gradients are compressed
) -> Layout:
    """The buckets that `wrap` makes of parameters."""
    from torchring.gradients.plan import build_plan

    shares = np.nan_to_num(shares, nan=1.0)
    order = sorted(range(len(parameters)), key=lambda i: (shares[i], -i))
    specs = [_spec(each) for each in parameters]
    plan = build_plan(specs, bucket_bytes=int(bucket_bytes), order=order)
    indices = [[slot.parameter for slot in bucket.slots] for bucket in plan.buckets]
    sizes = tuple(sum(parameters[i].num_bytes for i in each) * ratio for each in indices)
    return sizes, tuple(float(max(shares[i] for i in each)) for each in indices)


def _spec(parameter: ParameterRecord) -> ParameterSpec:
    import torch

    from torchring.gradients.plan import ParameterSpec

    named = getattr(torch, parameter.dtype, None)
    dtype = named if isinstance(named, torch.dtype) else torch.float32
    numel = -(-parameter.num_bytes // dtype.itemsize)
    return ParameterSpec(parameter.name, (numel,), (1,), dtype, torch.device("cpu"))


def layout_with(job: Job, sent_bytes: float, bucket_mb: float) -> Layout | None:
    """The buckets of a job with another bucket size; None if the trace does not tell when gradients are ready.

    `sent_bytes` are those of all buckets, after compression.
    """
    parameters, shares = job.traces[0].run_info.parameters, ready_shares(job)
    dense = [i for i, parameter in enumerate(parameters) if parameter.bucket >= 0]
    if shares is None or not dense:
        return None
    ratio = sent_bytes / max(1, sum(parameters[i].num_bytes for i in dense))
    return lay_out([parameters[i] for i in dense], shares[dense], bucket_mb * _MIB, ratio)
