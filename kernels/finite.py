"""The index of the first NaN or infinity, found by kernels that handle every element anyway.

Each lane of a tile remembers the iteration of its block's loop in which it first met NaN or infinity. After the loop
the lanes are reduced to one number. So in the loop the check costs a comparison, a minimum and a selection for each
element, and no reduction.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, no_type_check

from .lazy import lazy_jit

if TYPE_CHECKING:
    import triton.language as tl

NOT_FOUND = 2**31 - 1  # the caller writes this value to `found` before the launch


@lazy_jit()
@no_type_check
def is_finite(
    values,
    COMPUTE: tl.constexpr,  # fp32, or fp64 for fp64 values
):
    """int1 of values' shape: whether each value is neither NaN nor infinite."""
    return tl.abs(values.to(COMPUTE)) < float("inf")


@lazy_jit()
@no_type_check
def first_index(
    turn,  # [TILE] int32: the iteration in which each lane met its first such element; 2**31 - 1 if in none
    begin,  # int64: begin of the tile in iteration 0
    stride,  # int64: how far the tile moves with each iteration
    TILE: tl.constexpr,
):
    """int32: the lowest index of an element that is not finite, at most 2**31 - 2; 2**31 - 1 if all are finite."""
    index = tl.minimum(begin + turn.to(tl.int64) * stride + tl.arange(0, TILE), 2147483646)
    return tl.min(tl.where(turn == 2147483647, 2147483647, index), 0).to(tl.int32)


@lazy_jit()
@no_type_check
def report(
    found,  # [1] int32 IN and OUT
    index,  # int32
):
    """*found <- min(*found, index). Does not touch `found` if all elements are finite."""
    if index < 2147483647:
        tl.atomic_min(found, index, sem="relaxed")
