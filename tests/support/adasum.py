"""Adasum by its definition, pair by pair in float64: an answer that knows nothing of matrices of scalar products."""

from collections.abc import Sequence
from typing import NamedTuple

import torch


class Exact(NamedTuple):
    """A result, and for each element the sum of |weight * value| over ranks, of which roundings are a fraction."""

    value: torch.Tensor
    magnitude: torch.Tensor


def _pair(a: Exact, b: Exact) -> Exact:
    dot, of_a, of_b = (a.value * b.value).sum(), (a.value**2).sum(), (b.value**2).sum()
    x, y = (1 - dot / (2 * of_a), 1 - dot / (2 * of_b)) if of_a and of_b else (1, 1)
    return Exact(x * a.value + y * b.value, abs(x) * a.magnitude + abs(y) * b.magnitude)


def _combine(parts: Sequence[Exact], hosts: Sequence[Sequence[int]] = ()) -> Exact:
    """Neighbours first, then their results; the ranks of each host, then the hosts."""
    if len(hosts) > 1:
        return _combine([_combine([parts[rank] for rank in members]) for members in hosts])
    level = list(parts)
    while len(level) > 1:
        pairs = [_pair(a, b) for a, b in zip(level[::2], level[1::2], strict=False)]
        level = [*pairs, *level[len(level) // 2 * 2 :]]
    return level[0]


def exact_adasum(parts: Sequence[torch.Tensor], hosts: Sequence[Sequence[int]] = ()) -> Exact:
    """By the definition, in fp64."""
    return _combine([Exact(part.double(), part.double().abs()) for part in parts], hosts)


def assert_adasum(actual: torch.Tensor, parts: Sequence[torch.Tensor], hosts: Sequence[Sequence[int]] = ()) -> None:
    """`actual` differs from the definition by no more than the roundings of what computes it.

    Each of N weights, N products and N sums is rounded in fp32 (for fp64: in fp64, after scalar products that are off
    by some units), then the result in its dtype; between hosts, results of hosts are rounded, too.
    """
    value, magnitude = exact_adasum(parts, hosts)
    num, unit = len(parts), 2.0**-24 if actual.dtype != torch.float64 else 16 * 2.0**-53
    narrow = torch.finfo(actual.dtype).eps / 2
    bound = (3 * num * unit + (1 + len(hosts)) * narrow) * magnitude + torch.finfo(actual.dtype).tiny
    error = (actual.double() - value).abs()
    assert actual.dtype == parts[0].dtype
    worst = int((error - bound).argmax()) if error.numel() else 0
    text = f"element {worst} is {actual.flatten()[worst:][:1].tolist()}, by definition {value.flatten()[worst:][:1]}"
    assert bool((error <= bound).all()), text
