"""This block's share of a slice: load it from all ranks, sum it in rank order, and store it on all ranks.

Example: 2 ranks, fp32, a slice [32, 32 + 5000) of rank 1, tiles of 2048 elements, 2 blocks
    block 0 handles elements 32 to 2079 and then 4128 to 5023, block 1 elements 2080 to 4127; block 0 handles the last
    8 elements by themselves, as they are no multiple of 16. Each is loaded from rank 0 and rank 1, and stored on rank 1
    and rank 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, no_type_check

from .launching import lanes_before
from .lazy import lazy_jit

if TYPE_CHECKING:
    import triton.language as tl


@lazy_jit()
@no_type_check
def wires_from(
    wires,  # [N] int64 IN
    first,  # int32: the rank whose wire is the first of the tuple
    DTYPE: tl.constexpr,
    NUM_RANKS: tl.constexpr,
):
    """A tuple of pointers to the wires of ranks first, first + 1, ... modulo N."""
    pointers = ()
    for i in tl.static_range(NUM_RANKS):
        wire = tl.load(wires + (first + i) % NUM_RANKS).to(tl.pointer_type(DTYPE))
        pointers = pointers + (tl.multiple_of(wire, 16),)  # noqa: RUF005 - Triton cannot unpack into a tuple
    return pointers


@lazy_jit(uses=(wires_from,))
@no_type_check
def sources_and_targets(
    wires,  # [N] int64 IN
    rank,
    DTYPE: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    GATHER: tl.constexpr,
):
    """Two tuples of pointers: the wires to load from, in rank order, and all wires, the own wire first."""
    targets = wires_from(wires, rank, DTYPE, NUM_RANKS)
    sources = wires_from(wires, 0, DTYPE, NUM_RANKS) if GATHER else (targets[0],)
    return sources, targets


@lazy_jit()
@no_type_check
def load_all(
    sources,  # tuple of pointers to wires
    tile,  # int64: index of the tile's first element
    mask,  # [TILE] int1: elements to load
    COUNT: tl.constexpr,  # number of sources
    TILE: tl.constexpr,
):
    """A tuple of [TILE]: these elements of all sources."""
    values = ()
    for i in tl.static_range(COUNT):
        values = values + (tl.load(sources[i] + tile + tl.arange(0, TILE), mask=mask),)  # noqa: RUF005
    return values


@lazy_jit()
@no_type_check
def sum_in_order(
    values,  # tuple of [n]
    DTYPE: tl.constexpr,
    COMPUTE: tl.constexpr,
    COUNT: tl.constexpr,  # number of values
    GATHER: tl.constexpr,
):
    """[n] of DTYPE: the sum, added in the order of the tuple. Without GATHER the only value as it is."""
    # torch casts fp64 to 16 bits by way of fp32. This kernel must do the same, to round alike.
    ROUNDED: tl.constexpr = tl.float64 if tl.float64 == DTYPE else tl.float32
    if GATHER:
        total = values[0].to(COMPUTE)
        for i in tl.static_range(1, COUNT):
            total += values[i].to(COMPUTE)
        result = total.to(ROUNDED).to(DTYPE)
    else:
        result = values[0]
    return result


@lazy_jit()
@no_type_check
def store_all(
    targets,  # tuple of N pointers: all wires, the own wire first, then that of the next rank, and so on
    tile,  # int64: index of the tile's first element
    mask,  # [TILE] int1: elements to store
    result,  # [TILE]
    NUM_RANKS: tl.constexpr,
    GATHER: tl.constexpr,
    SPREAD: tl.constexpr,
    TILE: tl.constexpr,
):
    """Store the result in the own wire (GATHER), and in those of the other ranks (SPREAD)."""
    lane = tl.arange(0, TILE)
    if GATHER:
        tl.store(targets[0] + tile + lane, result, mask=mask)
    if SPREAD:
        for i in tl.static_range(1, NUM_RANKS):  # the next rank first, so that all ranks begin with different ones
            tl.store(targets[i] + tile + lane, result, mask=mask)


@lazy_jit(uses=(sources_and_targets, load_all, sum_in_order, store_all, lanes_before))
@no_type_check
def reduce_slice(
    wires,  # [N] int64 IN
    wire,  # pointer to the own wire
    rank,
    begin,  # int64: the slice; a multiple of 64 bytes
    end,  # int64
    COMPUTE: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    GATHER: tl.constexpr,
    SPREAD: tl.constexpr,
    TILE: tl.constexpr,
):
    """This block's share of the slice: sum it, copy it to the other ranks, or both."""
    DTYPE: tl.constexpr = wire.dtype.element_ty
    COUNT: tl.constexpr = NUM_RANKS if GATHER else 1
    # As in pack: first a multiple of 16 elements, 128 bits at a time, then the last 0 to 15 elements.
    begin = begin // 8 * 8  # changes nothing, but tells the compiler that vectors begin here
    whole = begin + (end - begin) // 16 * 16
    start = begin + tl.program_id(0).to(tl.int64) * TILE
    stride = tl.num_programs(0).to(tl.int64) * TILE
    sources, targets = sources_and_targets(wires, rank, DTYPE, NUM_RANKS, GATHER)
    # From few ranks, a tile is loaded one turn ahead: with Triton 3.9 ptxas otherwise delays half of the loads from two
    # ranks, to save registers. It cannot delay loads into the next turn. Of more ranks, two tiles are too many values.
    AHEAD: tl.constexpr = COUNT <= 2
    if AHEAD:
        following = load_all(sources, start, lanes_before(whole - start, TILE), COUNT, TILE)
    for tile in range(start, whole, stride):
        # All values are loaded before the first addition, so that the loads from all ranks are under way at once.
        if AHEAD:
            result = sum_in_order(following, DTYPE, COMPUTE, COUNT, GATHER)
            ahead = tile + stride
            following = load_all(sources, ahead, lanes_before(whole - ahead, TILE), COUNT, TILE)
        else:
            values = load_all(sources, tile, lanes_before(whole - tile, TILE), COUNT, TILE)
            result = sum_in_order(values, DTYPE, COMPUTE, COUNT, GATHER)
        mask = lanes_before(whole - tile, TILE)
        store_all(targets, tile, mask, result, NUM_RANKS, GATHER, SPREAD, TILE)
    if tl.program_id(0) == 0:
        # Not kept from above: the loop needs the registers.
        sources, targets = sources_and_targets(wires, rank, DTYPE, NUM_RANKS, GATHER)
        mask = tl.arange(0, 16) < end - whole
        last = sum_in_order(load_all(sources, whole, mask, COUNT, 16), DTYPE, COMPUTE, COUNT, GATHER)
        store_all(targets, whole, mask, last, NUM_RANKS, GATHER, SPREAD, 16)
