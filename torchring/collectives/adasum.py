"""Adasum: adds gradients of ranks so that parallel ones are averaged, and orthogonal ones are summed.

    adasum(a, b) = (1 - a.b / (2 |a|^2)) a + (1 - a.b / (2 |b|^2)) b          adasum(0, b) = b

More than two tensors are combined in a binary tree of neighbours: (0, 1), (2, 3), ..., and then their results. An odd
last one passes up unchanged. The tree has the ranks of each host combined first, and then the hosts.

Source: S. Maleki et al., "Scaling Distributed Training with Adaptive Summation", MLSys 2021. The order is that of
Horovod.

The result is a weighted sum of the ranks' tensors. For a = sum(x_r g_r) and b = sum(y_r g_r), a.b = x'Gy with the
matrix of scalar products G[r, s] = g_r.g_s. So G gives all weights, and the tensors themselves are read twice: to add
up G, and for the weighted sum. Scalar products are in fp64; sums are in fp32 (fp64 of fp64), and rounded once.

A combination of gradients that cancel is shorter than what rounding has done to them. It counts as zero if it is
shorter than 1e-6 of what was combined: fp64 knows nothing of its direction.

Example: adasum([1, 0], [1, 0]) = [1, 0]; adasum([1, 0], [0, 1]) = [1, 1].
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from torchring.kernels import reference

_BLOCK: Final = 32 * 1024  # elements: the copies of two ranks in fp64 fit the L2 cache
_SMALL: Final = 4 * 1024
_NOISE: Final = 1e-12  # of squares


def coefficients(gram: torch.Tensor, hosts: Sequence[Sequence[int]] = ()) -> torch.Tensor:
    """The weights of N tensors in their Adasum, for each of S sets of tensors.

    Args:
        gram: [S, N, N] fp64, the scalar products.
        hosts: the ranks of each host. Default: all are on one host.

    Returns:
        [S, N] fp64. 1 where a scalar product is not finite: the sum shows what is wrong.
    """
    norms = gram.diagonal(dim1=1, dim2=2).sqrt()[:, None]
    if len(hosts) > 1:
        level = gram.new_zeros(len(gram), len(hosts), gram.shape[-1])
        for host, members in enumerate(map(list, hosts)):
            level[:, host, members] = coefficients(gram[:, members][:, :, members])
    else:
        level = torch.eye(gram.shape[-1], dtype=gram.dtype, device="cpu").expand_as(gram)
    while (end := level.shape[1] // 2 * 2) > 0:
        a, b = level[:, 0:end:2], level[:, 1:end:2]
        dot = (a @ gram * b).sum(-1, keepdim=True)
        of_a, a_is_zero = _square(a, gram, norms)
        of_b, b_is_zero = _square(b, gram, norms)
        weights = [
            torch.where(is_zero, 0.0, torch.where(other_is_zero, 1.0, 1.0 - dot / (2.0 * square)))
            for square, is_zero, other_is_zero in ((of_a, a_is_zero, b_is_zero), (of_b, b_is_zero, a_is_zero))
        ]
        level = torch.cat([weights[0] * a + weights[1] * b, level[:, end:]], 1)
    root = level[:, :1]
    _, is_zero = _square(root, gram, norms)
    root = torch.where(is_zero, 0.0, root)
    is_finite = gram.isfinite().all(-1).all(-1)[:, None]
    return torch.where(is_finite, root[:, 0], 1.0)


def _square(a: torch.Tensor, gram: torch.Tensor, norms: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """|a|^2 of each combination, and whether it counts as zero."""
    square = (a @ gram * a).sum(-1, keepdim=True)
    return square, square <= _NOISE * (a.abs() * norms).sum(-1, keepdim=True).square()


def adasum(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Combine tensors of one shape and floating-point dtype, which are all at hand. Returns that dtype."""
    total = torch.empty_like(parts[0], memory_format=torch.contiguous_format)
    combination = Combination([part.reshape(-1) for part in parts], [0, total.numel()], [total.view(-1)])
    combination.run(coefficients(combination.products()))
    return total


@dataclass(frozen=True)
class _Block:
    """A piece of all parts that fits the cache: of one segment, or of several small ones.

    Attributes:
        segment: the first one.
        small: of several: which they are, how long each is, and where it begins in the block.
    """

    start: int
    stop: int
    segment: int
    small: tuple[torch.Tensor, torch.Tensor, list[int]] | None = None


class Combination:
    """Scalar products and weighted sums of tensors, of each of their segments. Takes views once, to be used often.

    Args:
        parts: flat, of one length and dtype.
        bounds: where segments begin, and the end of the last one. A segment may be empty.
        outs: get the result; may be some of the parts.
    """

    def __init__(self, parts: Sequence[torch.Tensor], bounds: Sequence[int], outs: Sequence[torch.Tensor]) -> None:
        self.parts, self._outs, self._num_segments = list(parts), list(outs), len(bounds) - 1
        self._blocks = list(_blocks(bounds))

    def products(self) -> torch.Tensor:
        """[S, N, N] fp64, for S segments of N parts."""
        parts, num = self.parts, len(self.parts)
        gram = torch.zeros(self._num_segments, num, num, dtype=torch.float64, device="cpu")
        wide = torch.empty(num, _BLOCK, dtype=torch.float64, device="cpu")
        product = torch.empty(_BLOCK, dtype=torch.float64, device="cpu")
        for block in self._blocks:
            length = block.stop - block.start
            rows, of_pair = wide[:, :length], product[:length]
            for row, part in zip(rows, parts, strict=True):
                row.copy_(part[block.start : block.stop])
            if block.small is None:
                gram[block.segment] += rows @ rows.T
                continue
            segments, _, begins = block.small
            for i, j in itertools.combinations_with_replacement(range(num), 2):
                torch.mul(rows[i], rows[j], out=of_pair)
                sums = torch.from_numpy(np.add.reduceat(of_pair.numpy(), begins))
                gram[:, i, j].index_copy_(0, segments, sums)
                gram[:, j, i].index_copy_(0, segments, sums)
        return gram

    def run(self, weights: torch.Tensor, look: Callable[[torch.Tensor], int | None] | None = None) -> int | None:
        """Write the sums of weighted parts.

        Args:
            weights: [S, N] fp64.
            look: called with each piece of the result, while it is in the cache, until it returns an index there.

        Returns that index in the whole result.
        """
        dtype = self.parts[0].dtype
        total = torch.empty(_BLOCK, dtype=reference.compute_dtype(dtype, dtype), device="cpu")
        narrow = weights.to(total.dtype)
        lists = weights.tolist()
        found: int | None = None
        for block in self._blocks:
            start, stop = block.start, block.stop
            acc = total[: stop - start]
            factors: Any = lists[block.segment]
            if block.small is not None:
                segments, lengths, _ = block.small
                factors = narrow[segments].repeat_interleave(lengths, 0, output_size=stop - start).T
            for i, (part, factor) in enumerate(zip(self.parts, factors, strict=True)):
                values = part[start:stop].to(acc.dtype)
                if i == 0:
                    torch.mul(values, factor, out=acc)
                elif block.small is None:
                    acc.add_(values, alpha=factor)
                else:
                    acc.addcmul_(values, factor)
            for out in self._outs:
                out[start:stop].copy_(acc)
            if look is not None and found is None and (index := look(self._outs[0][start:stop])) is not None:
                found = start + index
        return found


def _blocks(bounds: Sequence[int]) -> Iterator[_Block]:
    together: list[int] = []

    def block() -> _Block:
        start = bounds[together[0]]
        lengths = [bounds[segment + 1] - bounds[segment] for segment in together]
        begins = [bounds[segment] - start for segment in together]
        small = torch.tensor(together, device="cpu"), torch.tensor(lengths, device="cpu"), begins
        return _Block(start, start + sum(lengths), together[0], small)

    for segment, (start, stop) in enumerate(itertools.pairwise(bounds)):
        if start == stop:
            continue
        if together and (stop - start >= _SMALL or stop - bounds[together[0]] > _BLOCK):
            yield block()
            together = []
        if stop - start < _SMALL:
            together.append(segment)
            continue
        for first in range(start, stop, _BLOCK):
            yield _Block(first, min(first + _BLOCK, stop), segment)
    if together:
        yield block()
