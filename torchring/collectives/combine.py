"""The arithmetic of collectives: values of several ranks become one, in rank order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch

from torchring.kernels import reference

_PAIRWISE: Final[dict[str, Callable[..., torch.Tensor]]] = {
    "mean": torch.add,
    "sum": torch.add,
    "min": torch.minimum,
    "max": torch.maximum,
    "product": torch.mul,
}


def combine(parts: Sequence[torch.Tensor], out: torch.Tensor, op: str) -> None:
    """out <- parts[0] op parts[1] op ..., of one dtype, in list order. 16-bit values are combined in fp32, and rounded
    once. `out` may be one of the first two parts, and must not overlap the others. Checks nothing, as it is called for
    each piece of a tensor.
    """
    pairwise = _PAIRWISE[op]
    if len(parts) == 2 and op != "mean":  # torch computes in fp32 here, and rounds once
        pairwise(parts[0], parts[1], out=out)
        return
    wide = reference.compute_dtype(out.dtype, out.dtype)
    if wide == out.dtype and len(parts) > 1:
        total = out
        pairwise(parts[0], parts[1], out=total)
        later = parts[2:]
    else:
        total = torch.empty_like(out, dtype=wide)
        total.copy_(parts[0])
        later = parts[1:]
    for part in later:
        pairwise(total, part, out=total)
    if op == "mean" and out.numel():
        total.mul_(1.0 / len(parts))
    if total is not out:
        out.copy_(total)
