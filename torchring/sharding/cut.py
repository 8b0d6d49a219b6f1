"""Which rank steps which elements of the parameters. Pure data; every rank computes the same.

Parameters lie side by side in flat memory, which is cut into as many slices as there are ranks. For an optimizer that
needs whole parameters, each parameter has flat memory of its own, which one rank owns.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from torchring.allreduce.slices import ALIGNMENT_BYTES, slice_bounds

_FULL_BYTES: Final = 64 << 20  # then another begins: a host sends one while it hands out the one before


@dataclass(frozen=True)
class Candidate:
    """A parameter that may be cut. `index`: among all parameters. `cost`: of its step, in any unit."""

    index: int
    numel: int
    dtype: torch.dtype
    is_trained: bool = True
    cost: float = 0.0


@dataclass(frozen=True)
class Flat:
    """Parameters side by side, in memory that is cut among the ranks.

    Attributes:
        spans: the elements [start, stop) of each parameter, by its index. Each begins at a cache line.
        bounds: the elements [start, stop) of each rank.
    """

    dtype: torch.dtype
    numel: int
    spans: Mapping[int, tuple[int, int]]
    bounds: tuple[tuple[int, int], ...]

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize


def cut_elements(candidates: Sequence[Candidate], num_ranks: int) -> list[Flat]:
    """Cut parameters anywhere. Those that are trained lie apart from those that are frozen."""
    found: list[Flat] = []
    runs: dict[tuple[torch.dtype, bool], list[Candidate]] = {}

    def close(run: list[Candidate]) -> None:
        numel = _lay_out(run)[1]
        found.append(_flat(run, slice_bounds(numel, num_ranks, run[0].dtype.itemsize)))
        run.clear()

    for each in candidates:
        run = runs.setdefault((each.dtype, each.is_trained), [])
        run.append(each)
        if sum(other.numel for other in run) * each.dtype.itemsize >= _FULL_BYTES:
            close(run)
    for run in runs.values():
        if run:
            close(run)
    return found


def assign_whole(candidates: Sequence[Candidate], num_ranks: int) -> list[Flat]:
    """Give every parameter one owner: the costliest first, each to the rank with the least to do so far.

    Frozen parameters come last, so that they do not disturb the balance of the others.

    Source: longest processing time first (Graham, 1969).
    """
    loads = [0.0] * num_ranks
    owners: dict[int, int] = {}
    for each in sorted(candidates, key=lambda c: (not c.is_trained, -c.cost, c.index)):
        owners[each.index] = loads.index(min(loads))
        loads[owners[each.index]] += each.cost
    return [
        _flat([each], [(0, each.numel) if rank == owners[each.index] else (0, 0) for rank in range(num_ranks)])
        for each in candidates
    ]


def _flat(run: Sequence[Candidate], bounds: Sequence[tuple[int, int]]) -> Flat:
    spans, numel = _lay_out(run)
    return Flat(run[0].dtype, numel, spans, tuple(bounds))


def _lay_out(run: Sequence[Candidate]) -> tuple[dict[int, tuple[int, int]], int]:
    """The spans of parameters side by side, and where the last one ends."""
    line = max(1, ALIGNMENT_BYTES // run[0].dtype.itemsize)
    spans, stop = {}, 0
    for each in run:
        start = math.ceil(stop / line) * line
        stop = start + each.numel
        spans[each.index] = start, stop
    return spans, stop
