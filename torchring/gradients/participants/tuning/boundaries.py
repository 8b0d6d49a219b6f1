"""Where to cut the gradients of a backward into buckets, so that the last reduction ends as early as possible. Numbers.

Gradients become ready one after the other, and a bucket leaves with its last gradient. Reductions follow each other on
one network. Large buckets leave late, and many small ones pay the fixed cost of a reduction often. What has to be short
is the end: nothing hides the reduction of the bucket that leaves last.

      gradients   a  b  c        d   e
      backward    |--|--|--------|---|
      buckets           [abc]    [d] [e]
      network            ======   == ==|     the part after backward is exposed

Example, in seconds and bytes, a reduction taking 1 + bytes: four gradients of 1 byte, ready at 1, 2, 3 and 10. One
bucket ends at 10 + 5 = 15. Four buckets end at 3, 5, 7 and 12. Two buckets, of three gradients and of one, leave at 3
and at 10, and end at 7 and at 12, too: with fewer buckets, so they are the best cut, (3, 4).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from torchring.gradients.plan import last_reduced

Floats = npt.NDArray[np.float64]

# Gradients that follow each other are counted as one, where there are more. The time to solve grows with the square.
MOST_GRADIENTS: Final = 400


@dataclass(frozen=True)
class ReductionCost:
    """What the reduction of one bucket takes, by its size: linear between measured sizes, and beyond them.

    Below the smallest size no bucket but an empty one takes 0 seconds, however steep the line is.

    Attributes:
        num_bytes: sizes that were measured, ascending. At least one.
        seconds: what each took.
        launch_seconds: what each bucket takes of the thread that computes, whatever its size.
        in_background: whether the thread that computes goes on during a reduction. If not, a reduction is time of that
            thread.
    """

    num_bytes: tuple[float, ...]
    seconds: tuple[float, ...]
    launch_seconds: float = 0.0
    in_background: bool = True

    def of(self, num_bytes: npt.ArrayLike) -> Floats:
        """Seconds for buckets of these sizes."""
        sizes = np.asarray(num_bytes, np.float64)
        known, seconds = np.asarray(self.num_bytes, np.float64), np.asarray(self.seconds, np.float64)
        seconds = np.maximum.accumulate(seconds)  # a larger size that was faster is noise
        if len(known) == 1:
            return np.asarray(seconds[0] * np.maximum(1.0, sizes / known[0]))
        slopes = np.diff(seconds) / np.diff(known)
        of_nothing = max(0.0, seconds[0] - known[0] * slopes[0])
        below = of_nothing + (seconds[0] - of_nothing) * sizes / max(known[0], 1.0)
        above = seconds[-1] + (sizes - known[-1]) * slopes[-1]
        between = np.interp(sizes, known, seconds)
        cost: Floats = np.where(sizes < known[0], below, np.where(sizes > known[-1], above, between))
        return cost


@dataclass(frozen=True)
class Cut:
    """Buckets, and how they do.

    Attributes:
        ends: for each bucket the number of gradients in it and in all buckets before it.
        seconds: when the last reduction ends, from where `ready` counts.
    """

    ends: tuple[int, ...]
    seconds: float

    def groups(self, items: Sequence[Any]) -> list[list[Any]]:
        """The items of each bucket."""
        return [list(items[begin:end]) for begin, end in itertools.pairwise((0, *self.ends))]


def finish_seconds(leaves: Sequence[float], num_bytes: Sequence[float], cost: ReductionCost) -> float:
    """When the last of these buckets is reduced.

    Args:
        leaves: for each bucket, in the order of reductions, when its last gradient is ready; as `ready` of `best_cut`.
        num_bytes: of each bucket.
    """
    seconds = cost.of(num_bytes)
    if not cost.in_background:
        return float(max(leaves) + (seconds + cost.launch_seconds).sum())
    launched = [full + number * cost.launch_seconds for number, full in enumerate(leaves, start=1)]
    return last_reduced(launched, seconds.tolist(), [0.0] * len(launched))


def best_cut(
    ready: Sequence[float],
    num_bytes: Sequence[float],
    cost: ReductionCost,
    *,
    most_bytes: float = math.inf,
    slack: float = 0.0,
) -> Cut:
    """The buckets whose last reduction ends first; of equal ones the fewest. Exact, up to `MOST_GRADIENTS`.

    Args:
        ready: for each gradient, in the order in which they become ready, seconds from any common time: of a backward
            that only computes.
        num_bytes: of each gradient.
        cost: what reductions take.
        most_bytes: above 0; a bucket of this size is closed. As by default, the gradient that crosses it still goes in.
        slack: ends count as equal to the earliest one if they leave at most so much more exposed, as a fraction.

    Method: dynamic programming. If k buckets hold the first i gradients, all that matters to later buckets is when the
    k-th ends: the earlier the better. So for each (k, i) the earliest end is kept, over all sizes of the k-th bucket.
    """
    if not len(ready) or any(later < earlier for earlier, later in itertools.pairwise(ready)):
        raise ValueError("ready times must be ascending, and there must be one")
    candidates = _candidates(num_bytes)
    times = np.asarray(ready, np.float64)[np.asarray(candidates) - 1]
    sums = np.concatenate([[0.0], np.cumsum(np.asarray(num_bytes, np.float64))])[[0, *candidates]]
    seconds = cost.of(np.maximum(sums[None, 1:] - sums[:-1, None], 0.0))  # [first, last] of a bucket
    seconds[np.tril_indices(len(candidates), -1)] = np.inf
    seconds[(sums[None, :-1] - sums[:-1, None]) >= most_bytes] = np.inf
    if cost.in_background:
        ends = _cut(times, sums, seconds, cost.launch_seconds, slack)
    else:  # everything takes time of one thread, whenever gradients are ready
        ends = _cut(np.zeros_like(times), sums, seconds + cost.launch_seconds, 0.0, slack)
    leaves = [float(times[end - 1]) for end in ends]
    finish = finish_seconds(leaves, np.diff(sums[[0, *ends]]).tolist(), cost)
    return Cut(tuple(candidates[end - 1] for end in ends), finish)


def _candidates(num_bytes: Sequence[float]) -> list[int]:
    """Where a bucket may end: how many gradients there are up to there."""
    if len(num_bytes) <= MOST_GRADIENTS:
        return list(range(1, len(num_bytes) + 1))
    share = sum(num_bytes) / MOST_GRADIENTS
    ends, held = [], 0.0
    for end, more in enumerate(num_bytes, start=1):
        held += more
        if held > share or end == len(num_bytes):
            ends.append(end)
            held = 0.0
    return ends


def _cut(ready: Floats, sums: Floats, seconds: Floats, launch_seconds: float, slack: float) -> list[int]:
    """Where buckets end, if reductions follow each other, and begin when a bucket's last gradient is ready or later."""
    count = len(ready)
    sizes = sums[None, 1:] - sums[:-1, None]
    has_bytes = (sizes > 0) & np.isfinite(seconds)
    fastest = float((seconds[has_bytes] / sizes[has_bytes]).min(initial=_SLOWEST))  # seconds for a byte of any bucket
    earliest = np.full(count + 1, np.inf)  # end of the buckets so far, by number of gradients in them
    earliest[0] = -np.inf
    befores: list[npt.NDArray[np.intp]] = []
    finishes: list[float] = []
    for number in range(1, count + 1):
        leaves = ready + number * launch_seconds
        times = np.maximum(earliest[:-1, None], leaves[None, :])
        times += seconds
        befores.append(times.argmin(axis=0))
        earliest = np.concatenate([[np.inf], times.min(axis=0)])
        finishes.append(float(earliest[-1]))
        # No plan with more buckets ends before this.
        later = np.maximum(earliest[:-1] + fastest * (sums[-1] - sums[:-1]), leaves[-1] + launch_seconds)
        if later.min() >= min(finishes):
            break
    best = min(finishes)
    enough = best + slack * (best - float(ready[-1])) + _TIE * abs(best)
    ends = [count]
    for before in befores[next(k for k, finish in enumerate(finishes) if finish <= enough) : 0 : -1]:
        ends.append(int(before[ends[-1] - 1]))
    return ends[::-1]


_TIE: Final = 1e-12  # of a time: what is closer together is equal
_SLOWEST: Final = 1.0  # seconds for a byte
