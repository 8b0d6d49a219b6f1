"""Predicts the duration of a step with other numbers of ranks, other networks, other buckets.

An all-reduce of b bytes among N ranks takes, as a ring, 2 (N - 1) alpha + 2 (N - 1) / N b / bandwidth. That is the
least number of bytes with which it can be done (P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for
clusters of workstations", 2009). Between H hosts of L ranks, the hierarchical algorithm reduces within each host first,
so that rings of H ranks remain, which share the link of the host.

A message takes alpha + bytes / bandwidth (R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective
Communication Operations in MPICH", 2005). Both are fitted to buckets of different sizes.

A step takes as long as the slowest of N ranks computes, and then as long as communication that backward did not hide.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from torchring.observe.recorder.records import RunInfo
from torchring.observer import Phase
from torchring.report.model.bucket_layout import Layout
from torchring.report.model.buckets import bus_bytes
from torchring.report.model.merge import Job
from torchring.report.model.timing import Array, Steps, typical
from torchring.report.model.waits import Critical, computing

SIZES: Final = (1, 2, 4, 8)  # times the ranks that there are: what is beyond is a wild guess
NUM_PARTS: Final = 5  # of the steps, which predict by themselves
_ERROR: Final = 0.05  # of the model, for each doubling of the ranks: simulated jobs were as near as that
SMALL_BYTES: Final = 1 << 16  # less than that is mostly latency, unless the link is very slow
_LEAST_WITHIN_HOST: Final = 1.0  # GB/s: TCP between processes of one host is at least as fast
_APART: Final = 0.2  # two sizes tell latency from bandwidth if they differ by this share of the largest
_NO_FASTER: Final = 0.01  # of the mean time per byte: bytes are never free


@dataclass(frozen=True)
class Network:
    """How long messages take."""

    alpha_ms: float  # latency of one message. A ring of N ranks sends 2 (N - 1) messages one after the other.
    gigabytes_per_s: float  # of 10**9 bytes
    # False if all buckets have about the same size: then latency cannot be told from bandwidth
    is_alpha_known: bool = True


@dataclass(frozen=True)
class Prediction:
    """A step with another number of ranks, each with the batch that it has now."""

    num_ranks: int
    step_ms: float
    exposed_ms: float  # communication that backward does not hide
    waiting_ms: float  # wait for the slowest of so many ranks, beyond the mean rank
    efficiency: float  # step of one rank alone / step_ms, from 0 to 1


@dataclass(frozen=True)
class Workload:
    """The work of a step: what ranks compute, and the buckets that they reduce."""

    computing_ms: Array  # [S, R]
    bucket_bytes: tuple[float, ...]  # in plan order
    # Launch of each bucket, counted from the end of backward on the slowest rank: mostly negative
    ready_ms: tuple[float, ...]
    is_overlapped: bool = True  # backward goes on while buckets are reduced
    # Added to each prediction, so that it is right where it can be compared with the measurement
    unexplained_ms: float = 0.0
    # Position of the one rank that is always slower than the others; None if there is none
    slow_rank: int | None = None
    share: float = 1.0  # share of the steps that reduce these buckets, from 0 to 1. The rest are of other optimizers.


@dataclass(frozen=True)
class Connections:
    """How ranks are connected."""

    network: Network  # between ranks of a ring; between hosts if these reduce first
    ranks_per_host: int = 1  # at most, that reduce first; 1 if all ranks are one ring
    inside: Network | None = None  # between the ranks of a host. None: so fast that it does not count.


def _reduce_ms(num_bytes: float, num_ranks: int, links: Connections) -> float:
    """The duration of one all-reduce, when all ranks are there."""
    if num_ranks < 2:
        return 0.0
    on_host = min(num_ranks, links.ranks_per_host)
    inside = _ring_ms(num_bytes, on_host, links.inside) if links.inside else 0.0
    # Each of the rings between hosts carries a slice; together they carry everything over the link of the host.
    return inside + _ring_ms(num_bytes, -(-num_ranks // on_host), links.network)


def exposed_ms(workload: Workload, num_ranks: int, links: Connections) -> float:
    """Time for which ranks stand still for communication, if all of them compute equally fast.

    Example: buckets ready at -40 and 0 ms, of 30 ms each. The first is reduced from -40 to -10, the second from 0 to
    30, so 30 ms are exposed. If they take 50 ms each: from -40 to 10, from 10 to 60, so 60 ms are. With several
    optimizers, this is the mean over the steps of all of them, of which only some reduce these buckets.
    """
    costs = [_reduce_ms(num_bytes, num_ranks, links) for num_bytes in workload.bucket_bytes]
    if not workload.is_overlapped:
        return workload.share * sum(costs)
    end = -math.inf
    for launched, cost in zip(workload.ready_ms, costs, strict=True):  # no bucket leaves before that in front of it
        end = max(end, launched) + cost
    return workload.share * max(0.0, end)


def slowest_ms(computing_ms: Array, num_ranks: int, slow_rank: int | None = None) -> float:
    """Time for which the slowest of `num_ranks` computes in a step, on average.

    What all ranks have in common in a step, such as a longer batch, does not make them wait for each other. The rest is
    drawn for each rank from what was measured. With `slow_rank`, of any number of ranks exactly one is like that one.
    """
    num_measured = computing_ms.shape[1]
    mean = float(computing_ms.mean())
    if num_measured == 1:
        return mean + _expected_maximum((computing_ms - mean, num_ranks))
    of_rank = computing_ms.mean(0, keepdims=True) - mean
    chance = computing_ms - computing_ms.mean(1, keepdims=True) - of_rank
    # The mean of a step follows each of its R ranks by 1 / R, which hides a part of the differences.
    draws = of_rank + chance * (num_measured / (num_measured - 1)) ** 0.5
    if slow_rank is None:
        return mean + _expected_maximum((draws, num_ranks))
    others = np.delete(draws, slow_rank, axis=1)
    return mean + _expected_maximum((draws[:, slow_rank], 1), (others, num_ranks - 1))


def _expected_maximum(*draws: tuple[Array, int]) -> float:
    """Expected maximum of independent draws: from each array, so many.

    For N draws from m sorted values it is exactly the sum of x_i ((i / m)^N - ((i - 1) / m)^N).
    """
    found = np.unique(np.concatenate([np.ravel(values) for values, _ in draws]))
    below: Array = np.ones(len(found))
    for values, number in draws:
        below = below * (np.searchsorted(np.sort(np.ravel(values)), found, side="right") / values.size) ** number
    return float(np.sum(found * np.diff(below, prepend=0.0)))


def _mean_rank(of_rank: Array, num_ranks: int, slow_rank: int | None) -> float:
    """Mean over `num_ranks` of what the ranks that were measured have."""
    if slow_rank is None:
        return float(of_rank.mean())
    others = float(np.delete(of_rank, slow_rank).mean())
    return others + (float(of_rank[slow_rank]) - others) / num_ranks


def step_ms(workload: Workload, num_ranks: int, links: Connections) -> float:
    slowest = slowest_ms(workload.computing_ms, num_ranks, workload.slow_rank)
    return slowest + exposed_ms(workload, num_ranks, links) + workload.unexplained_ms


def range_of(name: str, predictions: Sequence[Prediction], measured: int) -> tuple[float, float]:
    """The least and the greatest of an attribute of predictions for one size; the worse end by the error of the model.

    `predictions`: by all steps, and by parts of them: their steps and bandwidths differ. `measured`: number of ranks.
    """
    values = [float(getattr(each, name)) for each in predictions]
    error = _ERROR * math.log2(predictions[0].num_ranks / measured)
    low, high = (1.0 - error, 1.0) if name == "efficiency" else (1.0, 1.0 + error)
    return min(values) * low, max(values) * high


def predict(workload: Workload, links: Connections, sizes: Sequence[int]) -> tuple[Prediction, ...]:
    """A step at each number of ranks, each rank with the batch that it has now."""
    computing_ms, slow_rank = workload.computing_ms, workload.slow_rank
    found = []
    for num_ranks in sizes:
        mean = _mean_rank(computing_ms.mean(0), num_ranks, slow_rank)
        # Accidents do not count, as in the measured step.
        alone = typical(np.array([_mean_rank(of_step, num_ranks, slow_rank) for of_step in computing_ms]))
        total = max(alone, step_ms(workload, num_ranks, links))
        waiting = slowest_ms(computing_ms, num_ranks, slow_rank) - mean
        exposed = exposed_ms(workload, num_ranks, links)
        found.append(Prediction(num_ranks, total, exposed, waiting, min(1.0, alone / total)))
    return tuple(found)


def _ring_ms(num_bytes: float, num_ranks: int, network: Network) -> float:
    transfer = bus_bytes(num_bytes, num_ranks) / (network.gigabytes_per_s * 1e6)
    return 2 * (num_ranks - 1) * network.alpha_ms + transfer


def fit(bucket_bytes: Array, medians: Array, num_ranks: int) -> Network | None:
    """The network of a ring of `num_ranks`.

    A line through the medians of buckets, whose slope is that between the third of small and the third of large buckets
    (Tukey 1971, "resistant line"). A median is milliseconds from when the last rank has launched the bucket until it is
    reduced. None if nothing was reduced.
    """
    if num_ranks < 2:
        return None
    sizes = bus_bytes(1.0, num_ranks) * np.asarray(bucket_bytes, float)
    seen = (medians > 0) & (sizes > 0)
    medians, sizes = medians[seen], sizes[seen]
    if not len(sizes):
        return None
    mean_slope = float(medians.sum() / sizes.sum())
    slope, constant = _line(sizes, medians)
    if slope is None:
        return Network(0.0, 1e-6 / mean_slope, is_alpha_known=False)
    if constant < 0:
        slope, constant = mean_slope, 0.0
    slope = max(slope, _NO_FASTER * mean_slope)
    return Network(constant / (2 * (num_ranks - 1)), 1e-6 / slope)


def _line(x: Array, y: Array) -> tuple[float | None, float]:
    """Slope and constant; no slope if all x are about the same."""
    order = np.argsort(x)
    third = -(-len(x) // 3)
    (low, low_y), (high, high_y) = ((np.median(x[few]), np.median(y[few])) for few in (order[:third], order[-third:]))
    if high - low <= _APART * x.max():
        return None, 0.0
    slope = float((high_y - low_y) / (high - low))
    return slope, float(np.median(y - slope * x))


def is_overlapped(run_info: RunInfo) -> bool:
    """True if backward goes on while buckets are reduced. Within a host, the cores that compute also reduce."""
    return run_info.algorithm != "direct"


@dataclass(frozen=True)
class Model:
    """What some steps of a job show."""

    now: Connections | None  # with the network that was fitted to the buckets; None if nothing was reduced
    links: Connections | None  # the same, or with the network that was given
    workload: Workload
    predictions: tuple[Prediction, ...]  # for 1 to 8 times the ranks; empty if they are unknown


def model_of(job: Job, timing: Steps, critical: Critical, given: Network | None, slow_rank: int | None) -> Model:
    """The model of the steps that count. Predictions use the `given` network, if any."""
    run_info = job.traces[0].run_info
    network = fit_network(timing, critical, run_info, job.size)
    has_several_hosts = run_info.local_size < run_info.size
    if given and not given.is_alpha_known and network and network.is_alpha_known and has_several_hosts:
        given = dataclasses.replace(given, alpha_ms=network.alpha_ms, is_alpha_known=True)
    now, links = _links_of(run_info, network, None), _links_of(run_info, network, given)
    workload = dataclasses.replace(_describe(timing, critical, run_info), slow_rank=slow_rank)
    if now is not None:  # what the model cannot explain of a step
        measured_ms = typical(critical.path[timing.counts].sum(1))
        workload = dataclasses.replace(workload, unexplained_ms=measured_ms - step_ms(workload, job.size, now))
    if links is None or not workload.bucket_bytes or job.is_part:
        return Model(now, links, workload, ())
    predicted = workload
    if given and not has_several_hosts:  # between hosts, a thread reduces buckets in the background
        predicted = dataclasses.replace(workload, is_overlapped=True)
    return Model(now, links, workload, predict(predicted, links, [times * job.size for times in SIZES]))


def _describe(timing: Steps, critical: Critical, run_info: RunInfo) -> Workload:
    """The workload of a job as it is, without `unexplained_ms`."""
    counts = timing.reduces
    backward_end = np.take_along_axis(timing.backward_end, critical.slowest[:, None], axis=1)
    ready = np.median((critical.all_launched - backward_end)[counts], axis=0)
    sizes, share = tuple(map(float, timing.bucket_bytes)), float(counts.sum() / timing.counts.sum())
    draws = computing(critical.cycle[timing.counts])
    return Workload(draws, sizes, tuple(map(float, ready)), is_overlapped(run_info), share=share)


def _links_of(run_info: RunInfo, found: Network | None, given: Network | None) -> Connections | None:
    """Connections between ranks. A given network connects hosts; the measured network is then inside a host."""
    if given is None:
        if found is None:
            return None
        return Connections(found, run_info.local_size if run_info.algorithm == "hierarchical" else 1)
    return Connections(given, run_info.local_size, found if run_info.local_size == run_info.size else None)


def fit_network(timing: Steps, critical: Critical, run_info: RunInfo, num_ranks: int) -> Network | None:
    """The network that the buckets show; None if nothing was reduced."""
    if not timing.reduces.any():
        return None
    durations = (critical.reduction_ends - critical.reduction_begins)[timing.reduces]
    found = fit(timing.bucket_bytes, np.median(durations, axis=0), num_ranks)
    if found is None:
        return None
    is_shown = found.is_alpha_known and found.gigabytes_per_s >= _LEAST_WITHIN_HOST
    is_within_host = run_info.local_size == run_info.size and run_info.algorithm != "direct"
    if is_within_host and not is_shown and timing.bucket_bytes.mean() < SMALL_BYTES:  # their time is latency
        transfer_ms = bus_bytes(float(timing.bucket_bytes.sum()), num_ranks) / (_LEAST_WITHIN_HOST * 1e6)
        latency_ms = max(0.0, typical(durations.sum(1)) - transfer_ms)
        found = Network(latency_ms / (2 * (num_ranks - 1) * len(timing.plan)), _LEAST_WITHIN_HOST)
    if is_overlapped(run_info):
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


def with_layout(workload: Workload, layout: Layout, backward_ms: float) -> Workload:
    sizes, shares = layout
    # What packing adds at the end, it adds with other buckets, too.
    late = max(0.0, workload.ready_ms[-1]) if workload.ready_ms else 0.0
    ready_ms = tuple((share - 1.0) * backward_ms + late for share in shares)
    return dataclasses.replace(workload, bucket_bytes=sizes, ready_ms=ready_ms)
