"""Which rank steps which elements of the parameters. Pure data; every rank computes the same.

A region is memory that is cut among the ranks: a large parameter, or small parameters side by side. Every large
parameter is cut into as many slices as there are ranks, so that each rank has its share of every bucket, whatever the
buckets are. For an optimizer that needs whole parameters, every parameter is a region that one rank owns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch

from torchring.allreduce.slices import ALIGNMENT_BYTES, slice_bounds

_SMALL_BYTES: Final = 256 * 1024  # a smaller parameter shares a region with others: to step a tensor costs 50 us
_SMALL_BYTES_ON_DEVICE: Final = 16 << 20  # each region takes a launch, which takes its time to meet the other ranks
_MOST_SHARED_BYTES: Final = 16 << 20  # in one region, which a checkpoint gathers as a whole


@dataclass(frozen=True)
class Candidate:
    """A parameter that may be cut. `group`: index of its parameter group. `cost`: of its step, in any unit."""

    parameter: int
    group: int
    numel: int
    dtype: torch.dtype
    is_trained: bool = True
    cost: float = 0.0


@dataclass(frozen=True)
class Member:
    """A parameter's place in its region, in elements. `group`: index of its parameter group."""

    parameter: int
    group: int
    offset: int
    numel: int


@dataclass(frozen=True)
class Region:
    """Memory that is cut among the ranks.

    Attributes:
        numel: number of elements, with the gaps between members, each of which begins at a cache line.
        bounds: the [start, stop) of each rank.
    """

    dtype: torch.dtype
    members: tuple[Member, ...]
    numel: int
    bounds: tuple[tuple[int, int], ...]

    @property
    def num_bytes(self) -> int:
        return self.numel * self.dtype.itemsize


def cut_elements(candidates: Sequence[Candidate], num_ranks: int, *, on_device: bool = False) -> list[Region]:
    """Cut parameters anywhere. Small ones that are trained, or are all frozen, lie side by side."""
    small_bytes = _SMALL_BYTES_ON_DEVICE if on_device else _SMALL_BYTES
    open_runs: dict[tuple[int, torch.dtype, bool], list[Candidate]] = {}
    runs: list[list[Candidate]] = []
    for each in candidates:
        if each.numel * each.dtype.itemsize >= small_bytes:
            runs.append([each])
            continue
        key = each.group, each.dtype, each.is_trained
        run = open_runs.get(key)
        if run is None or _length(run) * each.dtype.itemsize > _MOST_SHARED_BYTES:
            runs.append(run := [])
            open_runs[key] = run
        run.append(each)
    regions = []
    for run in runs:
        numel, itemsize = _length(run), run[0].dtype.itemsize
        regions.append(_region(run, tuple(slice_bounds(numel, num_ranks, itemsize))))
    return regions


def assign_whole(candidates: Sequence[Candidate], num_ranks: int) -> list[Region]:
    """Give every parameter one owner: the costliest first, each to the rank with the least to do so far.

    Frozen parameters come last, so that they do not disturb the balance of the others.

    Source: longest processing time first (Graham, 1969).
    """
    loads = [0.0] * num_ranks
    owners: dict[int, int] = {}
    for each in sorted(candidates, key=lambda c: (not c.is_trained, -c.cost, c.parameter)):
        owner = loads.index(min(loads))
        loads[owner] += each.cost
        owners[each.parameter] = owner
    regions = []
    for each in candidates:
        whole, owner = (0, each.numel), owners[each.parameter]
        regions.append(_region([each], tuple(whole if rank == owner else (0, 0) for rank in range(num_ranks))))
    return regions


def _region(run: Sequence[Candidate], bounds: tuple[tuple[int, int], ...]) -> Region:
    members, offset = [], 0
    for each in run:
        members.append(Member(each.parameter, each.group, offset, each.numel))
        offset += _aligned(each.numel, each.dtype)
    return Region(run[0].dtype, tuple(members), _length(run), bounds)


def _length(run: Sequence[Candidate]) -> int:
    """Elements that the run takes. The last member needs no gap behind it."""
    return sum(_aligned(each.numel, each.dtype) for each in run[:-1]) + (run[-1].numel if run else 0)


def _aligned(numel: int, dtype: torch.dtype) -> int:
    line = max(1, ALIGNMENT_BYTES // dtype.itemsize)
    return math.ceil(numel / line) * line
