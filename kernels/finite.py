"""The index of the first NaN or infinity, found by kernels that handle every element anyway.

Each group of neighbouring elements in a tile remembers where its block first met NaN or infinity: in which iteration of
the block's loop, and at which place in the group. After the loop the groups are reduced to one number. A group is what
a thread loads at a time, so in the loop the check needs no other thread and one register for each group.
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


@lazy_jit(uses=(is_finite,))
@no_type_check
def first_places(
    values,  # [TILE]
    count,  # int64: elements from here on do not matter; may be negative
    turn,  # int32: the iteration
    COMPUTE: tl.constexpr,  # fp32, or fp64 for fp64 values
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
):
    """[TILE // GROUP] int32: turn * GROUP + place of each group's first NaN or infinity; 2**31 - 1 if it has none."""
    place = tl.arange(0, TILE) % GROUP
    place = tl.where(is_finite(values, COMPUTE), 2147483647, turn * GROUP + place)
    first = tl.min(tl.reshape(place, [TILE // GROUP, GROUP]), 1)
    rest = tl.minimum(tl.maximum(count, 0), TILE).to(tl.int32) - tl.arange(0, TILE // GROUP) * GROUP
    return tl.where(first - turn * GROUP < rest, first, 2147483647)


@lazy_jit()
@no_type_check
def first_index(
    places,  # [TILE // GROUP] int32: the least of `first_places` over all iterations
    begin,  # int64: begin of the tile in iteration 0
    stride,  # int64: how far the tile moves with each iteration
    TILE: tl.constexpr,
    GROUP: tl.constexpr,
):
    """int32: the lowest index of an element that is not finite, at most 2**31 - 2; 2**31 - 1 if all are finite."""
    index = begin + (places // GROUP).to(tl.int64) * stride + tl.arange(0, TILE // GROUP) * GROUP + places % GROUP
    return tl.min(tl.where(places == 2147483647, 2147483647, tl.minimum(index, 2147483646)), 0).to(tl.int32)


@lazy_jit()
@no_type_check
def report(
    found,  # [1] int32 IN and OUT
    index,  # int32
):
    """*found <- min(*found, index). Does not touch `found` if all elements are finite."""
    if index < 2147483647:
        tl.atomic_min(found, index, sem="relaxed")
