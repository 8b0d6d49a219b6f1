"""The buckets that should leave the least communication exposed, for parameters whose ready times are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch

from torchring.gradients.participants.tuning.boundaries import ReductionCost, best_cut, finish_seconds
from torchring.gradients.plan import ParameterSpec, Plan, wire_dtype

_SLACK: Final = 0.05  # of the exposed time, for which fewer buckets are preferred
_MOST_SLOWDOWN: Final = 4.0  # of reductions by backward; what looks like more is waiting for other ranks
_LAUNCH_SECONDS: Final = 100e-6  # of the computing thread, for each bucket: hooks, checks, copies, hand-out


def cost_alone(points: Sequence[tuple[int, float]], *, in_background: bool) -> ReductionCost:
    """What reductions take while nothing computes, from measured (bytes, seconds)."""
    sizes, seconds = zip(*points, strict=True)
    return ReductionCost(sizes, seconds, _LAUNCH_SECONDS, in_background)


def slowdown(alone: ReductionCost, current: Plan, busy: float) -> float:
    """By which factor reductions take longer while backward computes, too, because both need the same cores.

    Args:
        alone: what reductions take while nothing computes.
        busy: seconds that the reductions of `current` have taken in backwards.
    """
    expected = float(alone.of([bucket.num_bytes for bucket in current.buckets]).sum())
    return min(max(busy / expected, 1.0), _MOST_SLOWDOWN)


def slowed(alone: ReductionCost, factor: float) -> ReductionCost:
    """Reductions that take so many times as long."""
    return replace(alone, seconds=tuple(factor * each for each in alone.seconds))


def find_groups(
    specs: Sequence[ParameterSpec],
    current: Plan,
    ready: Sequence[float],
    cost: ReductionCost,
    bucket_bytes: int,
    compression: str | None,
) -> list[list[int]]:
    """The parameters of each bucket, in the order of reductions.

    A bucket holds one dtype. The cut is exact for the dtype with the most bytes; parameters of other dtypes share
    buckets as they do by default. The first bucket has the dtype that it has by default: it carries the sum of weights,
    which is rounded to that dtype, and no bit of a result may depend on the buckets.

    Args:
        current: default buckets. Gradients that become ready at the same time stay in their order.
        ready: for each parameter, seconds.
        bucket_bytes: a bucket with so many bytes of gradients is closed.
    """
    position = {slot.parameter: i for i, slot in enumerate(slot for bucket in current.buckets for slot in bucket.slots)}
    order = sorted(position, key=lambda index: (ready[index], position[index]))
    kind = largest_kind(specs)
    members = [index for index in order if kind_of(specs[index]) == kind]
    wire = wire_dtype(kind[0], compression)
    sizes = [specs[index].num_reals * wire.itemsize for index in members]
    most_bytes = bucket_bytes * wire.itemsize / kind[0].itemsize
    cut = best_cut([ready[index] for index in members], sizes, cost, most_bytes=most_bytes, slack=_SLACK)
    groups = cut.groups(members)
    for bucket in current.buckets:
        group = [slot.parameter for slot in bucket.slots]
        if kind_of(specs[group[0]]) != kind:
            groups.append(group)
    groups.sort(key=lambda group: max(ready[index] for index in group))
    kind_of_first = kind_of(specs[current.buckets[0].slots[0].parameter])
    first = next(i for i, group in enumerate(groups) if kind_of(specs[group[0]]) == kind_of_first)
    return [groups.pop(first), *groups]


def predict(plan: Plan, ready: Sequence[float], cost: ReductionCost) -> float:
    """When the last bucket is reduced, in the seconds of `ready`."""
    leaves = [max(ready[slot.parameter] for slot in bucket.slots) for bucket in plan.buckets]
    return finish_seconds(leaves, [bucket.num_bytes for bucket in plan.buckets], cost)


def kind_of(spec: ParameterSpec) -> tuple[torch.dtype, torch.device]:
    return spec.real_dtype, spec.device


def largest_kind(specs: Sequence[ParameterSpec]) -> tuple[torch.dtype, torch.device]:
    """The dtype and device of most of the bytes that travel in buckets."""
    num_bytes: dict[tuple[torch.dtype, torch.device], int] = {}
    for spec in specs:
        if not spec.is_sparse:
            num_bytes[kind_of(spec)] = num_bytes.get(kind_of(spec), 0) + spec.numel * spec.dtype.itemsize
    return max(num_bytes, key=lambda kind: num_bytes[kind])
