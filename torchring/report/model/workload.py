"""Makes the input of `scaling.py` from a trace: what ranks compute, and when each bucket is ready."""

from __future__ import annotations

import dataclasses
from typing import Final

import numpy as np

from torchring.observe.recorder.records import RunInfo
from torchring.observer import Phase
from torchring.report.model.bucket_layout import Layout, layout_between_hosts
from torchring.report.model.buckets import bus_bytes
from torchring.report.model.merge import Job
from torchring.report.model.scaling import Connections, Network, Workload, exposed_ms, fit, slowest_ms
from torchring.report.model.timing import Steps, typical
from torchring.report.model.waits import Critical, computing

_NUM_LANES: Final = 2  # buckets that cross the network at a time, on threads


def is_overlapped(timing: Steps, run_info: RunInfo) -> bool:
    """True if backward goes on while buckets are reduced. Within a host, the cores that compute also reduce."""
    return run_info.algorithm != "direct" and (run_info.overlap != "inline" or not timing.stall.any())


def describe(job: Job, timing: Steps, critical: Critical) -> Workload:
    """The workload of a job as it is, without `unexplained_ms`."""
    run_info, counts = job.traces[0].run_info, timing.reduces
    overlapped = is_overlapped(timing, run_info)
    lanes = _NUM_LANES if run_info.overlap == "thread" and run_info.local_size != run_info.size else 1
    draws = computing(critical.cycle[timing.counts])
    if timing.plan:
        backward_end = np.take_along_axis(timing.backward_end, critical.slowest[:, None], axis=1)
        ready = np.median((critical.all_launched - backward_end)[counts], axis=0)
        sizes, share = tuple(map(float, timing.bucket_bytes)), float(counts.sum() / timing.counts.sum())
        return Workload(draws, sizes, tuple(map(float, ready)), overlapped, lanes, share=share)
    backward_ms = float(np.median(critical.phases[counts][..., Phase.BACKWARD]))
    return with_layout(Workload(draws, (), (), overlapped, lanes), layout_between_hosts(job), backward_ms)


def links_of(run_info: RunInfo, found: Network | None, given: Network | None) -> Connections | None:
    """Connections between ranks. A given network connects hosts; the measured network is then inside a host."""
    if given is None:
        if found is None:
            return None
        is_hierarchical = run_info.algorithm == "hierarchical"
        return Connections(found, is_hierarchical, run_info.local_size if is_hierarchical else 1)
    if run_info.local_size == 1:
        return Connections(given)
    inside = found if run_info.local_size == run_info.size else None
    return Connections(given, True, run_info.local_size, inside)


def calibrated(workload: Workload, links: Connections, num_ranks: int, measured_ms: float) -> Workload:
    """The same workload, with what the model cannot explain of the measured duration of a step."""
    modelled = slowest_ms(workload.computing_ms, num_ranks, workload.slow_rank) + exposed_ms(workload, num_ranks, links)
    return dataclasses.replace(workload, unexplained_ms=measured_ms - modelled)


def fit_network(timing: Steps, critical: Critical, run_info: RunInfo, num_ranks: int) -> Network | None:
    """The network that the buckets show; None if nothing was reduced."""
    if not timing.reduces.any():
        return None
    durations = (critical.reduction_ends - critical.reduction_begins)[timing.reduces]
    found = fit(timing.bucket_bytes, np.median(durations, axis=0), num_ranks)
    if found is None or is_overlapped(timing, run_info):
        return found
    # How long ranks stood still says how much work a reduction was.
    cost = typical(critical.path[timing.reduces][:, Phase.EXPOSED])
    if run_info.algorithm == "direct":
        # A rank looks after its buckets between gradients: that a bucket is reduced may be noticed much later.
        sent = bus_bytes(float(timing.bucket_bytes.sum()), num_ranks)
        return Network(0.0, sent / 1e6 / cost, is_alpha_known=False) if cost > 0 else None
    shown = typical(durations.sum(1))
    ratio = cost / shown if cost > 0 and shown > 0 else 1.0
    return dataclasses.replace(found, alpha_ms=found.alpha_ms * ratio, gigabytes_per_s=found.gigabytes_per_s / ratio)


def between_hosts(workload: Workload) -> Workload:
    """The workload as it would be between hosts, where buckets are reduced by a thread in the background."""
    return dataclasses.replace(workload, is_overlapped=True, num_lanes=_NUM_LANES)


def with_layout(workload: Workload, layout: Layout, backward_ms: float) -> Workload:
    sizes, shares = layout
    # What packing adds at the end, it adds with other buckets, too.
    late = max(0.0, workload.ready_ms[-1]) if workload.ready_ms else 0.0
    ready_ms = tuple((share - 1.0) * backward_ms + late for share in shares)
    return dataclasses.replace(workload, bucket_bytes=sizes, ready_ms=ready_ms)
