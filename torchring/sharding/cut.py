"""Which rank steps which elements of the parameters. Pure data; every rank computes the same.

Parameters lie side by side in flat memory, which is cut into as many slices as there are ranks. For an optimizer that
needs whole parameters, each parameter has flat memory of its own, which one rank owns.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from torchring.allreduce.slices import ALIGNMENT_BYTES, slice_bounds


@dataclass(frozen=True)
class Flat:
    """Parameters side by side, in memory that is cut among the ranks."""

    dtype: torch.dtype
    numel: int
    # the elements [start, stop) of each parameter, by its index. Each begins at a cache line.
    spans: Mapping[int, tuple[int, int]]
    bounds: Sequence[tuple[int, int]]  # the elements [start, stop) of each rank

    @property
    def owner(self) -> int | None:
        """The rank that steps all elements, if there is one."""
        ranks = [rank for rank, (start, stop) in enumerate(self.bounds) if stop > start]
        return ranks[0] if len(ranks) == 1 else None


def cut_elements(parameters: Mapping[int, torch.Tensor], num_ranks: int) -> list[Flat]:
    """Cut parameters anywhere. Those that are trained lie apart from those that are frozen."""
    alike: dict[tuple[torch.dtype, bool], dict[int, torch.Tensor]] = {}
    for index, parameter in parameters.items():
        alike.setdefault((parameter.dtype, parameter.requires_grad), {})[index] = parameter
    flats = []
    for (dtype, _), run in alike.items():
        line = max(1, ALIGNMENT_BYTES // dtype.itemsize)
        spans, stop = {}, 0
        for index, parameter in run.items():
            start = math.ceil(stop / line) * line
            stop = start + parameter.numel()
            spans[index] = start, stop
        flats.append(Flat(dtype, stop, spans, slice_bounds(stop, num_ranks, dtype.itemsize)))
    return flats


def assign_whole(parameters: Mapping[int, torch.Tensor], num_ranks: int, costs: Mapping[int, float]) -> list[Flat]:
    """Give every parameter one owner: the costliest first, each to the rank with the least to do so far.

    Parameters, and the costs of their steps in any unit, are by index. Frozen parameters come last, so that they do not
    disturb the balance of the others.

    Source: longest processing time first (Graham, 1969).
    """
    loads = [0.0] * num_ranks
    flats = {}
    for index in sorted(parameters, key=lambda i: (not parameters[i].requires_grad, -costs[i], i)):
        owner, numel = loads.index(min(loads)), parameters[index].numel()
        loads[owner] += costs[index]
        bounds = [(0, numel if rank == owner else 0) for rank in range(num_ranks)]
        flats[index] = Flat(parameters[index].dtype, numel, {index: (0, numel)}, bounds)
    return [flats[index] for index in parameters]
