"""Finds the step at which a job becomes slower or faster."""

from __future__ import annotations

from typing import Final

import numpy as np

from torchring.report.model.timing import Array

_FEWEST: Final = 10  # steps on each side
_CLEAR: Final = 8.0  # standard errors: the best of 1,000 places, without any change, has 4


def find_change(values: Array, least: float) -> int | None:
    """Find where the mean of `values` changes. Returns the position of the first value after the change, or None.

    Of all places, this is the one where a step function fits best (least squares).

    Args:
        least: None is returned if the means differ by less.
    """
    n = len(values)
    before = np.arange(_FEWEST, n - _FEWEST + 1)
    if not len(before):
        return None
    sums = np.cumsum(values)
    early, late = sums[before - 1] / before, (sums[-1] - sums[before - 1]) / (n - before)
    explained = (late - early) ** 2 * before * (n - before) / n
    best = int(explained.argmax())
    left = float(((values - values.mean()) ** 2).sum() - explained[best])
    is_clear = explained[best] * n > _CLEAR**2 * max(0.0, left)
    return int(before[best]) if is_clear and abs(late[best] - early[best]) >= least else None
