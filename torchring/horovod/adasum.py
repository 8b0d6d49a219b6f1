"""Adasum: adds gradients of ranks so that parallel ones are averaged, and orthogonal ones are summed.

    adasum(a, b) = (1 - a.b / (2 |a|^2)) a + (1 - a.b / (2 |b|^2)) b

More than two tensors are combined in a binary tree: first the neighbours, (0, 1), (2, 3), ..., and then their results.

Source: S. Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021. The order is that of
Horovod. Scalar products and norms are computed in fp64.

Example: adasum([1, 0], [1, 0]) = [1, 0]; adasum([1, 0], [0, 1]) = [1, 1].
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def adasum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Combine tensors of one shape and floating-point dtype. Their number is a power of two. Returns that dtype."""
    assert len(parts) & (len(parts) - 1) == 0, len(parts)
    level = list(parts)
    while len(level) > 1:
        level = [_pair(a, b) for a, b in zip(level[::2], level[1::2], strict=True)]
    return level[0]


def _pair(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    wide_a, wide_b = a.double().flatten(), b.double().flatten()
    dot = torch.dot(wide_a, wide_b)
    square_a, square_b = torch.dot(wide_a, wide_a), torch.dot(wide_b, wide_b)
    of_a = 1.0 - dot / (2.0 * square_a) if square_a else torch.ones_like(dot)
    of_b = 1.0 - dot / (2.0 * square_b) if square_b else torch.ones_like(dot)
    return (of_a * wide_a + of_b * wide_b).to(a.dtype).view(a.shape)
