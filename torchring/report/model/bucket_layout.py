"""Predicts buckets: the gradients that `wrap` puts into each, and when each is ready.

The planner needs torch, whose import takes seconds. It is imported where it is asked: wrong folders are told at once.
"""

from typing import Final

import numpy as np

from torchring.observe.recorder.records import RunInfo
from torchring.report.model.merge import Job
from torchring.report.model.timing import Array

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


def layout_with(job: Job, sent_bytes: float, bucket_mb: float) -> Layout | None:
    """The buckets that `wrap` makes with another bucket size; None if the trace does not tell when gradients are ready.

    `sent_bytes` are those of all buckets, after compression. Where a gradient never comes, its bucket leaves at the end
    of backward.
    """
    import torch

    from torchring.gradients.plan import ParameterSpec, build_plan

    if (shares := ready_shares(job)) is None:
        return None
    pairs = zip(job.traces[0].run_info.parameters, np.nan_to_num(shares, nan=1.0).tolist(), strict=True)
    dense = [(parameter, share) for parameter, share in pairs if parameter.bucket >= 0]
    if not dense:
        return None
    ratio = sent_bytes / max(1, sum(parameter.num_bytes for parameter, _ in dense))
    specs = []
    for parameter, _ in dense:
        dtype = getattr(torch, parameter.dtype, torch.float32)  # another release may have others
        numel = -(-parameter.num_bytes // dtype.itemsize)
        specs.append(ParameterSpec(parameter.name, (numel,), (1,), dtype, torch.device("cpu")))
    order = sorted(range(len(dense)), key=lambda i: (dense[i][1], -i))
    plan = build_plan(specs, bucket_bytes=int(bucket_mb * _MIB), order=order)
    buckets = [[dense[slot.parameter] for slot in bucket.slots] for bucket in plan.buckets]
    sizes = tuple(sum(parameter.num_bytes for parameter, _ in bucket) * ratio for bucket in buckets)
    return sizes, tuple(max(share for _, share in bucket) for bucket in buckets)
