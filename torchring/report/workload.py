"""From a trace to what `scaling.py` computes with: what ranks compute, and when which bucket is ready."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Final

import numpy as np

from torchring.report import network
from torchring.report.buckets import bus_bytes
from torchring.report.findings import Network, Phase
from torchring.report.merge import Job
from torchring.report.scaling import Links, Workload, exposed_ms, slowest_ms
from torchring.report.timing import Array, Timing, typical
from torchring.report.waits import COMPUTING, Critical, column
from torchring.tracing.records import About, Arrivals

_NUM_LANES: Final = 2  # buckets that cross the network at a time, on threads
_FIRST_BYTES: Final = 1 << 20  # the first bucket is small, so that the link is busy early in backward
_MIB: Final = 1 << 20


def computing(critical: Critical) -> Array:
    """[S, R], how long each rank computes in each step."""
    return np.asarray(critical.cycle[..., [column(phase) for phase in COMPUTING]].sum(2))


def is_overlapped(timing: Timing, about: About) -> bool:
    """Whether backward goes on while buckets are reduced. Within a host, the cores that compute also reduce."""
    return about.algorithm != "direct" and (about.overlap != "inline" or not timing.stall.any())


def describe(job: Job, timing: Timing, critical: Critical) -> Workload:
    """The workload of a job as it is, without `unexplained_ms`."""
    about, counts = job.traces[0].about, timing.counts
    overlapped = is_overlapped(timing, about)
    lanes = _NUM_LANES if about.overlap == "thread" and about.local_size != about.size else 1
    draws = computing(critical)[counts]
    if timing.bucket_indices:
        backward_end = np.take_along_axis(timing.backward_end, critical.slowest[:, None], axis=1)
        ready = np.median((critical.all_launched - backward_end)[counts], axis=0)
        return Workload(draws, tuple(map(float, timing.bucket_bytes)), tuple(map(float, ready)), overlapped, lanes)
    backward_ms = float(np.median(critical.phases[counts][..., column(Phase.BACKWARD)]))
    sizes, shares = _unreduced(job)
    ready_ms = tuple((share - 1.0) * backward_ms for share in shares)
    return Workload(draws, sizes, ready_ms, overlapped, lanes)


def links_of(about: About, found: Network | None, given: Network | None) -> Links | None:
    """How the ranks are connected. A given network connects hosts; the one that was measured then is inside a host."""
    if given is None:
        if found is None:
            return None
        is_hierarchical = about.algorithm == "hierarchical"
        return Links(found, is_hierarchical, about.local_size if is_hierarchical else 1)
    if about.local_size == 1:
        return Links(given)
    inside = found if about.local_size == about.size else None
    return Links(given, True, about.local_size, inside)


def calibrated(workload: Workload, links: Links, num_ranks: int, measured_ms: float) -> Workload:
    """The same workload, with what the model cannot explain of the measured duration of a step."""
    modelled = slowest_ms(workload.computing_ms, num_ranks) + exposed_ms(workload, num_ranks, links)
    return dataclasses.replace(workload, unexplained_ms=measured_ms - modelled)


def fit_network(timing: Timing, critical: Critical, about: About, num_ranks: int) -> Network | None:
    """The network that the trace shows; None if nothing was reduced."""
    counts = timing.counts
    durations = (critical.reduction_ends - critical.reduction_begins)[counts]
    found = network.fit(timing.bucket_bytes, durations, num_ranks)
    if found is None or is_overlapped(timing, about):
        return found
    # How long ranks stood still says how much work a reduction was.
    cost = typical(critical.path[counts][:, column(Phase.COMMUNICATION)])
    if about.algorithm == "direct":
        # A rank looks after its buckets between gradients: that a bucket is reduced may be noticed much later.
        sent = bus_bytes(float(timing.bucket_bytes.sum()), num_ranks)
        return Network(0.0, sent / 1e6 / cost, is_alpha_known=False) if cost > 0 else None
    shown = typical(durations.sum(1))
    ratio = cost / shown if cost > 0 and shown > 0 else 1.0
    return Network(found.alpha_ms * ratio, found.gigabytes_per_s / ratio, found.is_alpha_known)


def between_hosts(workload: Workload) -> Workload:
    """The workload as it would be between hosts, where buckets are reduced by a thread in the background."""
    return dataclasses.replace(workload, is_overlapped=True, num_lanes=_NUM_LANES)


def laid_out(job: Job, workload: Workload, backward_ms: float, bucket_mb: float) -> Workload | None:
    """The workload with buckets of another size; None if it is unknown when gradients are ready."""
    parameters, shares = job.traces[0].about.parameters, _shares(job)
    if shares is None:
        return None
    total_before = sum(parameter.num_bytes for parameter in parameters if parameter.bucket >= 0)
    sent = sum(workload.bucket_bytes)
    scale = sent / total_before if total_before else 1.0  # compression
    order = sorted((i for i, p in enumerate(parameters) if p.bucket >= 0), key=lambda i: (shares[i], -i))
    sizes: list[float] = []
    ready: list[float] = []
    limit, size, last = min(_FIRST_BYTES, bucket_mb * _MIB), 0.0, 0.0
    for i in order:
        num_bytes = parameters[i].num_bytes * scale
        if size and size + num_bytes > limit:
            sizes.append(size)
            ready.append((last - 1.0) * backward_ms)
            limit, size = bucket_mb * _MIB, 0.0
        size, last = size + num_bytes, shares[i]
    sizes.append(size)
    ready.append((last - 1.0) * backward_ms)
    # What packing adds at the end, it adds with other buckets, too.
    late = max(0.0, workload.ready_ms[-1]) if workload.ready_ms else 0.0
    return dataclasses.replace(workload, bucket_bytes=tuple(sizes), ready_ms=tuple(at + late for at in ready))


def _unreduced(job: Job) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Bytes of the buckets, and at which shares of backward they would be ready, of a job of one rank."""
    about, shares = job.traces[0].about, _shares(job)
    sizes = about.bucket_bytes or tuple(
        sum(p.num_bytes for p in about.parameters if p.bucket == index)
        for index in sorted({p.bucket for p in about.parameters if p.bucket >= 0})
    )
    if not sizes and about.parameters:
        sizes = (sum(parameter.num_bytes for parameter in about.parameters),)
    if shares is None:
        return tuple(map(float, sizes)), tuple((i + 1) / len(sizes) for i in range(len(sizes)))
    of_buckets = []
    for index in range(len(sizes)):
        inside = [shares[i] for i, parameter in enumerate(about.parameters) if parameter.bucket == index]
        of_buckets.append(max(inside, default=1.0))
    return tuple(map(float, sizes)), tuple(of_buckets)


def _shares(job: Job) -> Sequence[float] | None:
    """At which share of backward the gradient of each parameter is ready; None if nobody wrote that down."""
    num_parameters = len(job.traces[0].about.parameters)
    seen: list[Arrivals] = [
        each
        for trace in job.traces
        for each in trace.arrivals
        if each.backward_ns > 0 and len(each.ready_ns) == num_parameters > 0
    ]
    if not seen:
        return None
    table = np.array([[at / each.backward_ns for at in each.ready_ns] for each in seen])
    # A gradient that did not come was needed by nobody: its place in its bucket waits for the end of backward.
    return [float(share) for share in np.median(np.where(table < 0, 1.0, table), axis=0)]
