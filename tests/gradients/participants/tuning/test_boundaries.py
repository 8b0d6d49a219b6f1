"""Cuts of gradients into buckets: the worked example, all cuts of small cases, and what must hold of large ones."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from torchring.gradients.participants.tuning import boundaries
from torchring.gradients.participants.tuning.boundaries import (
    MOST_GRADIENTS,
    Cut,
    ReductionCost,
    best_cut,
    finish_seconds,
)

ONE_PLUS_BYTES = ReductionCost((0.0, 1.0), (1.0, 2.0))


def all_ends(count: int) -> Iterator[tuple[int, ...]]:
    for size in range(count):
        for inner in itertools.combinations(range(1, count), size):
            yield (*inner, count)


def simulated(ready: Sequence[float], num_bytes: Sequence[float], ends: Sequence[int], cost: ReductionCost) -> float:
    """Plays backward and network, gradient by gradient. Returns when both are over."""
    now = network = 0.0  # `now`: by how much launches and reductions have delayed the thread that computes
    begin = 0
    for end in ends:
        size = sum(num_bytes[begin:end])
        steps = list(itertools.pairwise(cost.num_bytes))
        assert len(steps) == 1, "only lines are simulated"
        slope = (cost.seconds[1] - cost.seconds[0]) / (cost.num_bytes[1] - cost.num_bytes[0])
        taken = cost.seconds[0] + (size - cost.num_bytes[0]) * slope
        now += cost.launch_seconds
        if cost.in_background:
            network = max(network, ready[end - 1] + now) + taken
        else:
            now += taken
        begin = end
    return max(network, ready[-1] + now)


def draw(random_numbers: random.Random, in_background: bool) -> tuple[list[float], list[float], ReductionCost]:
    """Whole numbers, so that no sum is rounded and times are equal where they should be."""
    count = random_numbers.randint(1, 9)
    ready = sorted(float(random_numbers.randint(0, 30)) for _ in range(count))
    num_bytes = [float(random_numbers.choice([0, 1, 2, 3, 8, 20])) for _ in range(count)]
    alpha, beta = float(random_numbers.randint(0, 6)), float(random_numbers.randint(0, 3))
    launch = float(random_numbers.randint(0, 3))
    return ready, num_bytes, ReductionCost((0.0, 10.0), (alpha, alpha + 10.0 * beta), launch, in_background)


def test_worked_example() -> None:
    ready, num_bytes = [1.0, 2.0, 3.0, 10.0], [1.0] * 4
    ends = {1: (4,), 4: (1, 2, 3, 4), 2: (3, 4)}
    assert {n: simulated(ready, num_bytes, cut, ONE_PLUS_BYTES) for n, cut in ends.items()} == {1: 15, 4: 12, 2: 12}
    assert finish_seconds(ready, num_bytes, ONE_PLUS_BYTES) == 12
    assert best_cut(ready, num_bytes, ONE_PLUS_BYTES) == Cut((3, 4), 12.0)
    assert Cut((3, 4), 12.0).groups("abcd") == [["a", "b", "c"], ["d"]]


@pytest.mark.parametrize("in_background", [True, False])
def test_no_cut_is_better(in_background: bool) -> None:
    random_numbers = random.Random(f"cuts {in_background}")
    num_several = 0
    for _ in range(150):
        ready, num_bytes, cost = draw(random_numbers, in_background)
        outcomes = {ends: simulated(ready, num_bytes, ends, cost) for ends in all_ends(len(ready))}
        least = min(outcomes.values())
        fewest = min(len(ends) for ends, seconds in outcomes.items() if seconds == least)
        cut = best_cut(ready, num_bytes, cost)
        case = ready, num_bytes, cost
        assert (cut.seconds, outcomes[cut.ends], len(cut.ends)) == (least, least, fewest), case
        num_several += fewest > 1
    assert num_several > 30 or not in_background


def test_no_cut_is_better_within_a_size_and_a_slack() -> None:
    random_numbers = random.Random("limits")
    num_closed = num_fewer = 0
    for _ in range(150):
        ready, num_bytes, cost = draw(random_numbers, True)
        outcomes = {}
        for ends in all_ends(len(ready)):
            groups = Cut(ends, 0.0).groups(num_bytes)
            if all(sum(group[:-1]) < 12.0 for group in groups):
                outcomes[ends] = simulated(ready, num_bytes, ends, cost) - ready[-1]
        enough = 1.25 * min(outcomes.values())
        fewest = min(len(ends) for ends, exposed in outcomes.items() if exposed <= enough)
        cut = best_cut(ready, num_bytes, cost, most_bytes=12.0, slack=0.25)
        assert len(cut.ends) == fewest, (ready, num_bytes, cost)
        assert outcomes[cut.ends] == cut.seconds - ready[-1] <= enough
        free = best_cut(ready, num_bytes, cost)
        num_closed += len(free.ends) < fewest
        num_fewer += len(free.ends) > fewest
    assert min(num_closed, num_fewer) > 10


def test_inline_several_buckets_only_where_large_ones_take_more_for_each_byte() -> None:
    fits_the_cache = ReductionCost((1.0, 2.0, 3.0), (1.5, 2.0, 9.0), in_background=False)  # a cache of 2 bytes
    assert best_cut([0.0] * 6, [1.0] * 6, fits_the_cache) == Cut((2, 4, 6), 6.0)


@pytest.mark.parametrize(
    ("num_bytes", "seconds"),
    [(0, 5.0), (10, 6.0), (20, 7.0), (30, 7.0), (40, 7.0), (50, 9.0), (60, 11.0), (100, 19.0)],
)
def test_cost_between_and_beyond_what_was_measured(num_bytes: float, seconds: float) -> None:
    """A size that was faster than a smaller one is noise."""
    assert ReductionCost((10.0, 20.0, 40.0, 50.0), (6.0, 7.0, 6.5, 9.0)).of(num_bytes) == seconds


def test_only_empty_buckets_may_cost_nothing() -> None:
    assert ReductionCost((10.0, 20.0), (1.0, 9.0)).of([0.0, 8.0, 10.0]).tolist() == [0.0, 0.8, 1.0]


def test_one_measured_size() -> None:
    assert ReductionCost((10.0,), (4.0,)).of([1.0, 10.0, 20.0]).tolist() == [4.0, 4.0, 8.0]


def test_many_gradients_are_counted_together(monkeypatch: pytest.MonkeyPatch) -> None:
    random_numbers = np.random.default_rng(3)
    count = 5 * MOST_GRADIENTS
    ready, num_bytes = np.sort(random_numbers.random(count)).tolist(), random_numbers.random(count).tolist()
    cost = ReductionCost((0.0, 1.0), (2e-3, 2e-3 + 0.9 / sum(num_bytes)))
    coarse = best_cut(ready, num_bytes, cost)
    assert coarse.ends[-1] == count
    assert 1 < len(coarse.ends) <= MOST_GRADIENTS
    monkeypatch.setattr(boundaries, "MOST_GRADIENTS", 100)
    coarser = best_cut(ready, num_bytes, cost)
    assert coarse.seconds <= coarser.seconds < coarse.seconds + 0.02  # a hundredth of what has to be sent, at most


def test_times_must_ascend() -> None:
    for ready in ([2.0, 1.0], []):
        with pytest.raises(ValueError, match="ascending"):
            best_cut(ready, [1.0] * len(ready), ONE_PLUS_BYTES)
