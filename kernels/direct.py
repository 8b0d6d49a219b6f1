"""Direct: all-reduce over wires that every rank can address, in one launch per rank.

Rank r reads slice r of all wires, adds the slices up in rank order, and writes the sum to all wires. All ranks meet
before the sum, so that all wires are packed, and again after it, so that every rank knows that its wire is complete.

Example: 2 ranks, wires fp32 [1, 2, ..., 32] and [10, 20, ..., 320], slices [0, 16) and [16, 32), scale 0.5
    rank 0 writes 5.5, 11.0, ..., 88.0 to elements 0 to 15 of both wires, rank 1 93.5, ..., 176.0 to the others

The two halves can be separate launches, with other work on the own slice in between: `spread=False` writes the sum to
the own wire only, and `gather=False` copies the own slice to the other ranks.

Of N ranks, each reads (N-1)/N of a wire's bytes over the links, and writes as many. Every rank must be able to address
all wires.
Results are bit-identical to `reference.accumulate` of all wires with that scale.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, no_type_check

from torch import Tensor

from . import reference
from .finite import first_index, is_finite, report
from .lazy import lazy_jit, triton_dtype
from .signals import MAX_BLOCKS, NUM_WARPS, check, meet, num_blocks, poison, tile_numel

if TYPE_CHECKING:
    import triton.language as tl


@lazy_jit()
@no_type_check
def reduce_lanes(
    wires,  # [N] int64 IN
    own,  # pointer to the own wire
    rank,
    lane,  # int64 [n]: indices of elements
    limit,  # int64: lanes from here on are left alone
    factor,  # scalar of dtype COMPUTE
    COMPUTE: tl.constexpr,
    NUM_RANKS: tl.constexpr,
    GATHER: tl.constexpr,
    SPREAD: tl.constexpr,
):
    """Sum some elements, copy them to the other ranks, or both. Returns the values that were written."""
    DTYPE: tl.constexpr = own.dtype.element_ty
    # torch casts fp64 to 16 bits by way of fp32. This kernel must do the same, to round alike.
    ROUNDED: tl.constexpr = tl.float64 if tl.float64 == DTYPE else tl.float32
    if GATHER:
        part = tl.multiple_of(tl.load(wires).to(tl.pointer_type(DTYPE)), 16)
        total = tl.load(part + lane, mask=lane < limit).to(COMPUTE)
        for i in tl.static_range(1, NUM_RANKS):
            part = tl.multiple_of(tl.load(wires + i).to(tl.pointer_type(DTYPE)), 16)
            total += tl.load(part + lane, mask=lane < limit).to(COMPUTE)
        result = (total * factor).to(ROUNDED).to(DTYPE)
        tl.store(own + lane, result, mask=lane < limit)
    else:
        result = tl.load(own + lane, mask=lane < limit)
    if SPREAD:
        for i in tl.static_range(1, NUM_RANKS):  # begin with the next rank, so that all ranks begin with different ones
            peer = (rank + i) % NUM_RANKS
            target = tl.multiple_of(tl.load(wires + peer).to(tl.pointer_type(DTYPE)), 16)
            tl.store(target + lane, result, mask=lane < limit)
    return result


# Slices of different ranks differ by a few elements. A different length must not compile another kernel.
@lazy_jit(
    do_not_specialize=("wires", "signals", "rank", "begin", "end", "numel", "abort", "found"),
    uses=(meet, poison, reduce_lanes, is_finite, first_index, report),
)
@no_type_check
def _direct_kernel(
    wires,  # [N] int64 IN: where each rank's wire begins, a multiple of 64 bytes
    signals,  # [N] int64 IN: where each rank's signal pad begins
    wire,  # [numel] IN and OUT: this rank's own wire, one of `wires`
    rank: tl.int32,
    begin: tl.int64,  # this rank's slice; begins at a multiple of 64 bytes
    end: tl.int64,
    numel: tl.int64,
    scale: tl.float64,  # fp64 so that fp64 wires lose nothing
    abort,  # [1] int32 IN
    found,  # [1] int32 IN and OUT; None without CHECK
    COMPUTE: tl.constexpr,  # fp32, or fp64 for fp64 wires
    NUM_RANKS: tl.constexpr,
    GATHER: tl.constexpr,
    SPREAD: tl.constexpr,
    CHECK: tl.constexpr,
    TILE: tl.constexpr,
):
    factor = tl.full([], scale, COMPUTE)
    # As in accumulate: first a multiple of 16 elements, 128 bits at a time, then the last 0 to 15 elements.
    begin = begin // 8 * 8  # changes nothing, but tells the compiler that vectors begin here
    whole = begin + (end - begin) // 16 * 16
    start = begin + tl.program_id(0).to(tl.int64) * TILE
    stride = tl.num_programs(0).to(tl.int64) * TILE
    met = 1
    if GATHER:
        met = meet(signals, rank, 0, abort, NUM_RANKS)
    if met != 0:
        turn = 0
        first = tl.full([TILE], 2147483647, tl.int32)
        for tile in range(start, whole, stride):
            lane = tile + tl.arange(0, TILE)
            result = reduce_lanes(wires, wire, rank, lane, whole, factor, COMPUTE, NUM_RANKS, GATHER, SPREAD)
            if CHECK:
                bad = (lane < whole) & (is_finite(result, COMPUTE) == 0)
                first = tl.where(bad, tl.minimum(first, turn), first)
                turn += 1
        if CHECK:
            report(found, first_index(first, start, stride, TILE))
        if tl.program_id(0) == 0:
            rest = whole + tl.arange(0, 16)
            last = reduce_lanes(wires, wire, rank, rest, end, factor, COMPUTE, NUM_RANKS, GATHER, SPREAD)
            if CHECK:
                fine = (rest >= end) | is_finite(last, COMPUTE)
                report(found, first_index(tl.where(fine, 2147483647, 0), whole, stride, 16))
        if SPREAD:
            met = meet(signals, rank, NUM_RANKS, abort, NUM_RANKS)
    if met == 0:
        poison(wire, numel, TILE)


def direct(
    wires: Tensor,
    signals: Tensor,
    wire: Tensor,
    *,
    rank: int,
    num_ranks: int,
    begin: int,
    end: int,
    scale: float = 1.0,
    abort: Tensor,
    found: Tensor | None = None,
    gather: bool = True,
    spread: bool = True,
    max_blocks: int = MAX_BLOCKS,
) -> None:
    """All wires' elements [begin, end) <- cast(scale * (wires[0] + wires[1] + ...)), added in rank order.

    Collective: all ranks launch the kernel with the same arguments, except that each passes its own slice. The slices
    should cover the wire.

    wires: int64 [num_ranks]: where each rank's wire lies as this device sees it, at multiples of 64 bytes.
    signals: int64 [num_ranks]: where each rank's pad of `signals.signal_bytes` lies, zeroed before its first use.
    wire: this rank's own wire, 1-D: fp16, bf16, fp32 or fp64, of one size on all ranks.
    begin, end: this rank's slice, in elements. `begin` is a multiple of 64 bytes, unless the slice is empty.
    abort: int32 [1], 0. When `abort` becomes non-zero, a kernel that waits for another rank stops waiting, fills its
        share of the own wire with NaN, and ends.
    found: int32 [1], `finite.NOT_FOUND` or less. Lowered to the index of the first element of the own slice whose
        result, as written, is NaN or infinite (to 2**31 - 2 if the index is larger). None: nothing is checked.
    gather, spread: False leaves out one half. Without `spread` the sum is written to the own wire only. Until this rank
        spreads, the caller may then change only the own slice of the own wire, as other ranks may still read the rest.
        Without `gather` the own slice is copied to the other ranks, unscaled. Gathering and spreading alternate on one
        pad.
    max_blocks: largest number of blocks, the same on all ranks. The pads must be made for at least as many.

    The sum is fp32 (fp64 for fp64) and rounded once. Runs on the current stream, which may wait for the other ranks.
    The host does not wait. The caller keeps all tensors, and all ranks keep their wires, until all streams are past
    this point. The caller has to find out whether the kernel was aborted.
    Raises ValueError or TypeError for arguments that do not fit, and for tensors on a CPU without the interpreter.
    """
    check("direct", wires, signals, wire, rank, num_ranks, abort, found, max_blocks)
    numel, itemsize = wire.numel(), wire.dtype.itemsize
    if not 0 <= begin <= end <= numel:
        raise ValueError(f"the slice [{begin}, {end}) must lie within the wire's {numel} elements")
    if begin == end:
        begin = end = 0  # the kernel needs an aligned slice, also if the slice is empty
    if begin * itemsize % 64:
        raise ValueError(f"the slice must begin at a multiple of 64 bytes, got {begin} elements of {itemsize} bytes")
    if not (gather or spread):
        raise ValueError("gather and spread are both False: nothing is left to do")
    tile = tile_numel(itemsize, num_ranks)
    _direct_kernel.launch(
        wire.device,
        num_blocks(numel, num_ranks, tile, max_blocks),
        wires,
        signals,
        wire,
        rank,
        begin,
        end,
        numel,
        scale,
        abort,
        found,
        COMPUTE=triton_dtype(reference.compute_dtype(wire.dtype, wire.dtype)),
        NUM_RANKS=num_ranks,
        GATHER=gather,
        SPREAD=spread,
        CHECK=found is not None,
        TILE=tile,
        num_warps=NUM_WARPS,
    )


def prepare_direct(*args: Any, multicast: int = 0, **options: Any) -> Callable[[], None]:
    """What launches `direct` with these arguments."""
    if multicast:
        raise NotImplementedError("direct does not use multicast addresses yet")
    return partial(direct, *args, **options)
