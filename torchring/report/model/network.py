"""Latency and bandwidth of the network, fitted to buckets of different sizes.

The model is t = alpha + bytes / bandwidth for one message. See R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of
Collective Communication Operations in MPICH", 2005.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from torchring.report.model.buckets import bus_bytes
from torchring.report.model.timing import Array

SMALL_BYTES: Final = 1 << 16  # less than that is mostly latency, unless the link is very slow
_APART: Final = 0.2  # two sizes tell latency from bandwidth if they differ by this share of the largest
_MAX_PAIRS: Final = 400  # buckets; of more, every n-th is taken
_NO_FASTER: Final = 0.01  # of the mean time per byte: bytes are never free


@dataclass(frozen=True)
class Network:
    """A message takes alpha_ms + bytes / bandwidth (Thakur, Rabenseifner and Gropp 2005)."""

    alpha_ms: float  # latency of one message. A ring of N ranks sends 2 (N - 1) messages one after the other.
    gigabytes_per_s: float  # of 10**9 bytes
    # False if all buckets have about the same size: then latency cannot be told from bandwidth
    is_alpha_known: bool = True


def fit(bucket_bytes: Array, medians: Array, num_ranks: int) -> Network | None:
    """The network of a ring of `num_ranks`.

    A line through the medians of buckets, whose slope is the median of the slopes between pairs (Theil 1950, Sen 1968),
    weighted by how far the sizes of the pair are apart.

    Args:
        bucket_bytes: [B].
        medians: [B], milliseconds from when the last rank has launched the bucket until it is reduced.

    Returns:
        None if nothing was reduced.
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
    stride = -(-len(x) // _MAX_PAIRS)
    order = np.argsort(x)[::stride]
    i, j = np.triu_indices(len(order), 1)
    apart = x[order][j] - x[order][i]
    far = apart > _APART * x.max()
    if not far.any():
        return None, 0.0
    slopes = (y[order][j] - y[order][i])[far] / apart[far]
    slope = weighted_median(slopes, apart[far])
    return slope, float(np.median(y - slope * x))


def weighted_median(values: Array, weights: Array) -> float:
    """The value below which half of the weight is."""
    order = np.argsort(values)
    total = np.cumsum(weights[order])
    return float(values[order][np.searchsorted(total, total[-1] / 2)])
