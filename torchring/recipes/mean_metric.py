"""Weighted means over all samples of all ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from torchring.collectives.service import collectives_of
from torchring.default_world import world_of
from torchring.errors import PlanMismatchError, ranks_in_words
from torchring.world import Group


class MeanMetric:
    """Means of several metrics over all samples of an epoch, on all ranks. Sums are fp64.

        metrics = MeanMetric()
        for images, labels in batches:
            ...
            metrics.update({"loss": loss, "accuracy": correct / len(labels)}, weight=len(labels))
        print(metrics.compute())  # {"accuracy": 0.98, "loss": 0.05}
        metrics.reset()

    `update` sends nothing and does not wait for a GPU. `compute` sends one message for all metrics.

    Args:
        group: the ranks whose samples count. See `wrap`.
    """

    def __init__(self, *, group: Group | None = None) -> None:
        self._group = group
        self._sums: dict[str, torch.Tensor] = {}  # sum of weighted values, sum of weights; on the device of the values

    @torch.no_grad()
    def update(self, values: Mapping[str, torch.Tensor | float], weight: torch.Tensor | float = 1.0) -> None:
        """Add values of a batch.

        Args:
            values: by name; numbers, or tensors of any shape, whose elements all count.
            weight: of each element, 0 or more: how many samples a mean is over. A value of weight 0 is left out, even a
                NaN. A tensor has no dimensions, or the shape of the values.

        Raises ValueError if `weight` is a number that is negative, or not finite.
        """
        if not isinstance(weight, torch.Tensor) and not 0 <= weight < math.inf:
            raise ValueError(f"weight must be 0 or more, and finite, got {weight!r}")
        for name, given in values.items():
            value = torch.as_tensor(given).double()
            if isinstance(weight, torch.Tensor):
                weights = weight.to(value).expand_as(value)
            else:
                weights = torch.full_like(value, weight)  # torch.tensor(weight, device="cuda") would wait for the GPU
            weighted = torch.where(weights == 0, 0.0, value * weights)
            pair = torch.stack([weighted.sum(), weights.sum()])
            self._sums[name] = self._sums[name].to(pair.device) + pair if name in self._sums else pair

    def compute(self) -> dict[str, float]:
        """Collective: the means, by name, in alphabetical order. NaN where no rank has a weight above 0.

        Ranks that were given no values take part. Raises PlanMismatchError if ranks were given different names; and
        what `torchring.all_gather` raises.
        """
        mine = {name: pair.tolist() for name, pair in self._sums.items()}
        world = world_of(self._group)
        of_ranks = collectives_of(world).all_gather_json(mine)
        names = sorted({name for each in of_ranks for name in each})
        for name in names:
            if lacking := [r for r, each in enumerate(of_ranks) if each and name not in each]:
                text = (
                    f"{ranks_in_words(lacking)} gave MeanMetric no {name!r}, which other ranks gave; call update() "
                    "with the same names on all ranks, with weight=0 where there is no value"
                )
                raise world.note_members(PlanMismatchError(text, rank=world.rank, peers=lacking))
        means = {}
        for name in names:
            total, weight = (math.fsum(each[name][i] for each in of_ranks if each) for i in (0, 1))
            means[name] = total / weight if weight else math.nan
        return means

    def reset(self) -> None:
        """Forget all values, before the next epoch."""
        self._sums.clear()
