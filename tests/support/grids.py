"""Grids of parameters: `make test-all` runs every point, `make test` those that a fault in any one axis would reach."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest


def grid(names: str, *axes: Sequence[Any], keep: Callable[..., bool] | None = None) -> pytest.MarkDecorator:
    """Parametrize over the product of the axes. Points that `keep` turns down are marked `grid`.

    Without `keep`, every value of the first axis meets every value of the others: of 3 x 3 x 2 points, 9 are kept.
    """
    first, *others = axes
    longest = max((len(axis) for axis in others), default=1)
    beside = {
        (i, *((turn + (k == 0) * i) % len(axis) for k, axis in enumerate(others)))
        for i in range(len(first))
        for turn in range(longest)
    }
    points = []
    for indices in itertools.product(*(range(len(axis)) for axis in axes)):
        values = [axis[index] for axis, index in zip(axes, indices, strict=True)]
        is_kept = keep(*values) if keep else indices in beside
        points.append(pytest.param(*values, marks=() if is_kept else pytest.mark.grid))
    return pytest.mark.parametrize(names, points, ids=lambda value: getattr(value, "__name__", str(value)))
