"""Adasum: adds gradients of ranks so that parallel ones are averaged, and orthogonal ones are summed.

    adasum(a, b) = (1 - a.b / (2 |a|^2)) a + (1 - a.b / (2 |b|^2)) b          adasum(0, b) = b

More than two tensors are combined in a binary tree of neighbours: (0, 1), (2, 3), ..., and then their results. An odd
last one passes up unchanged. The tree has the ranks of each host combined first, and then the hosts.

Source: S. Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021. The order is that of
Horovod.

The result is a weighted sum of the ranks' tensors. For a = sum(x_r g_r) and b = sum(y_r g_r), a.b = x'Gy with the
matrix of scalar products G[r, s] = g_r.g_s. So G gives all weights, and the tensors themselves are read twice: for G,
and for the weighted sum. Scalar products are in fp64; sums are in fp32 (fp64 of fp64), and rounded once.

A combination of gradients that cancel is shorter than what rounding has done to them. It counts as zero if it is
shorter than 1e-6 of what was combined: fp64 knows nothing of its direction.

Example: adasum([1, 0], [1, 0]) = [1, 0]; adasum([1, 0], [0, 1]) = [1, 1].
"""

from collections.abc import Sequence
from typing import Final

import torch

from torchring.collectives import operations
from torchring.collectives.operations import Backend
from torchring.collectives.signature import signature_of
from torchring.kernels import reference

_BLOCK: Final = 32 * 1024  # elements: the copies of two ranks in fp64 fit the L2 cache
_NOISE: Final = 1e-12  # of squares


def coefficients(gram: torch.Tensor, hosts: Sequence[Sequence[int]] = ()) -> torch.Tensor:
    """The weights [N] of N tensors in their Adasum, fp64; 1 where a product is not finite: the sum shows what is wrong.

    `gram` [N, N], fp64, has the scalar products; `hosts` the ranks of each host. Default: all are on one host.
    """
    if not bool(gram.isfinite().all()):
        return torch.ones_like(gram[0])
    if len(hosts) > 1:
        level = gram.new_zeros(len(hosts), len(gram))
        for host, ranks in enumerate(map(list, hosts)):
            level[host, ranks] = coefficients(gram[ranks][:, ranks])
    else:
        level = torch.eye(len(gram), dtype=gram.dtype, device="cpu")
    while (end := len(level) // 2 * 2) > 0:
        a, b = level[0:end:2], level[1:end:2]
        dot = (a @ gram * b).sum(-1, keepdim=True)
        of_a, a_is_zero = _square(a, gram)
        of_b, b_is_zero = _square(b, gram)
        weight_a, weight_b = (
            torch.where(is_zero, 0.0, torch.where(other_is_zero, 1.0, 1.0 - dot / (2.0 * square)))
            for square, is_zero, other_is_zero in ((of_a, a_is_zero, b_is_zero), (of_b, b_is_zero, a_is_zero))
        )
        level = torch.cat([weight_a * a + weight_b * b, level[end:]])
    return torch.where(_square(level, gram)[1], 0.0, level)[0]


def _square(a: torch.Tensor, gram: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """|a|^2 of each combination, and whether it counts as zero."""
    square = (a @ gram * a).sum(-1, keepdim=True)
    return square, square <= _NOISE * (a.abs() * gram.diagonal().sqrt()).sum(-1, keepdim=True).square()


def products(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """[N, N] fp64: the scalar products of N flat tensors of one length."""
    gram = torch.zeros(len(parts), len(parts), dtype=torch.float64, device=parts[0].device)
    for block in zip(*(torch.split(part, _BLOCK) for part in parts), strict=True):
        rows = torch.stack(block).double()
        gram += rows @ rows.T
    return gram.cpu()


def adasum(parts: Sequence[torch.Tensor], hosts: Sequence[Sequence[int]] = ()) -> torch.Tensor:
    """Combine the ranks' tensors, of one shape and floating-point dtype. Returns that dtype. See `coefficients`."""
    flat = [part.reshape(-1) for part in parts]
    total = torch.zeros_like(flat[0], dtype=reference.compute_dtype(flat[0].dtype, flat[0].dtype))
    for part, weight in zip(flat, coefficients(products(flat), hosts).tolist(), strict=True):
        total.add_(part, alpha=weight)
    return total.to(flat[0].dtype).view(parts[0].shape)


def check(tensor: torch.Tensor) -> None:
    """Raise TypeError for a tensor that has no Adasum."""
    if not tensor.is_floating_point():
        raise TypeError(f"op='adasum' takes floating point, got {tensor.dtype}; use op='sum', or convert the tensor")


@torch.no_grad()
def all_reduce(backend: Backend, tensor: torch.Tensor, hosts: Sequence[Sequence[int]]) -> torch.Tensor:
    """In place. Each rank gets the tensors of all, and combines them; `hosts` has the ranks of each host."""
    flat = operations.plain(backend, tensor).view(-1)
    parts = operations.all_gather(backend, flat, signature_of("all_reduce", (tensor,), "op='adasum'"))
    operations.writable(tensor).copy_(adasum(parts, hosts).view(tensor.shape))
    return tensor
