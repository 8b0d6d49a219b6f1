"""Where the first NaN or infinity lies, found on the way by kernels that handle every element anyhow.

Each lane of a tile remembers in which turn of its block's loop it first met one; only after the loop are lanes reduced
to one number. So a tile costs a comparison, a minimum and a selection per element, and nothing that waits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, no_type_check

from .lazy import lazy_jit

if TYPE_CHECKING:
    import triton.language as tl

NOT_FOUND = 2**31 - 1  # what the caller puts into `found` beforehand


@lazy_jit()
@no_type_check
def is_finite(
    values,
    COMPUTE: tl.constexpr,  # fp32 or fp64, whichever holds them exactly
):
    """int1 of values' shape: neither NaN nor infinite."""
    return tl.abs(values.to(COMPUTE)) < float("inf")


@lazy_jit()
@no_type_check
def first_index(
    turn,  # [TILE] int32: in which turn each lane met the first; 2**31 - 1 if in none
    begin,  # int64: where the tile lay in turn 0
    stride,  # int64: how far it moves each turn
    TILE: tl.constexpr,
):
    """int32: the lowest index of an element that is not finite; 2**31 - 1 if there is none, 2**31 - 2 if far out."""
    index = tl.minimum(begin + turn.to(tl.int64) * stride + tl.arange(0, TILE), 2147483646)
    return tl.min(tl.where(turn == 2147483647, 2147483647, index), 0).to(tl.int32)


@lazy_jit()
@no_type_check
def report(
    found,  # [1] int32 IN and OUT
    index,  # int32
):
    """*found <- min(*found, index), without touching it where there is nothing to report."""
    if index < 2147483647:
        tl.atomic_min(found, index, sem="relaxed")
