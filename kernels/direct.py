"""Direct: all-reduce over wires that every rank can address, in one launch per rank.

Rank r reads slice r of all wires, adds the slices up in rank order, and writes the sum to all wires. All ranks meet
before the sum, so that all wires are packed, and again after it, so that every rank knows that its wire is complete.

Example: 2 ranks, wires fp32 [1, 2, ..., 32] and [10, 20, ..., 320], slices [0, 16) and [16, 32)
    rank 0 writes 11, 22, ..., 176 to elements 0 to 15 of both wires, rank 1 187, ..., 352 to the others

The two halves can be separate launches, with other work on the own slice in between: `spread=False` writes the sum to
the own wire only, and `gather=False` copies the own slice to the other ranks.

Of N ranks, each reads (N-1)/N of a wire's bytes over the links, and writes as many. Every rank must be able to address
all wires.
Results are bit-identical to `reference.Accumulation` of all wires.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, no_type_check

from torch import Tensor

from .launching import poison, prepare_between, tile_numel
from .lazy import lazy_jit
from .signals import MAX_BLOCKS, is_aborted, meet, words_of

if TYPE_CHECKING:
    import triton.language as tl


@lazy_jit()
@no_type_check
def lanes_before(
    count,  # int64: a multiple of 16; may be negative, or more than TILE
    TILE: tl.constexpr,
):
    """[TILE] int1: whether a lane is one of the first `count`."""
    return tl.arange(0, TILE) < tl.multiple_of(tl.minimum(tl.maximum(count, 0), TILE).to(tl.int32), 16)


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
    """This block's share of the slice: sum it, copy it to the other ranks, or both.

    Example: 2 ranks, fp32, a slice [32, 32 + 5000) of rank 1, tiles of 2048 elements, 2 blocks
        block 0 handles elements 32 to 2079 and then 4128 to 5023, block 1 elements 2080 to 4127; block 0 handles the
        last 8 elements by themselves, as they are no multiple of 16. Each is loaded from rank 0 and rank 1, and stored
        on rank 1 and rank 0.
    """
    DTYPE: tl.constexpr = wire.dtype.element_ty
    COUNT: tl.constexpr = NUM_RANKS if GATHER else 1
    # As in pack: first a multiple of 16 elements, 128 bits at a time, then the last 0 to 15 elements.
    begin = begin // 8 * 8  # changes nothing, but tells the compiler that vectors begin here
    whole = begin + (end - begin) // 16 * 16
    start = begin + tl.program_id(0).to(tl.int64) * TILE
    stride = tl.num_programs(0).to(tl.int64) * TILE
    sources, targets = sources_and_targets(wires, rank, DTYPE, NUM_RANKS, GATHER)
    # Loads are two turns ahead: Triton keeps the tiles that are under way in shared memory, on AMD in registers. From
    # more ranks than eight, on AMD four, a tile alone is large enough, and two are too large.
    STAGES: tl.constexpr = 3 if NUM_RANKS * TILE * DTYPE.primitive_bitwidth <= 8 * 32768 else 1
    for tile in tl.range(start, whole, stride, num_stages=STAGES):
        # All values are loaded before the first addition, so that the loads from all ranks are under way at once.
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


# Slices of different ranks differ by a few elements. A different length must not compile another kernel.
@lazy_jit(
    do_not_specialize=("wires", "signals", "rank", "begin", "end", "numel", "abort"),
    uses=(words_of, meet, is_aborted, poison, reduce_slice),
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
    abort,  # [1] int32 IN: in host memory
    COMPUTE: tl.constexpr,  # fp32, or fp64 for fp64 wires
    NUM_RANKS: tl.constexpr,
    GATHER: tl.constexpr,
    SPREAD: tl.constexpr,
    PTX: tl.constexpr,
    TILE: tl.constexpr,
):
    own_count = words_of(signals, rank, NUM_RANKS) + rank
    count = tl.load(own_count)
    if GATHER:
        count += 1
        met = meet(signals, rank, count, abort, NUM_RANKS, PTX)
    else:  # what another library has summed before is half a sum if that was aborted, too
        met = 1 - is_aborted(abort, PTX)
    if met != 0:
        reduce_slice(wires, wire, rank, begin, end, COMPUTE, NUM_RANKS, GATHER, SPREAD, TILE)
        if SPREAD:
            count += 1
            met = meet(signals, rank, count, abort, NUM_RANKS, PTX)
        tl.store(own_count, count)
    if met == 0:
        poison(wire, numel, TILE)


def prepare_direct(
    wires: Tensor,
    signals: Tensor,
    wire: Tensor,
    *,
    rank: int,
    num_ranks: int,
    begin: int,
    end: int,
    abort: Tensor,
    gather: bool = True,
    spread: bool = True,
    max_blocks: int = MAX_BLOCKS,
) -> Callable[[], None]:
    """A function: all wires' elements [begin, end) <- cast(wires[0] + wires[1] + ...), added in rank order.

    The launch is prepared now, and made at each call. Calls are collective: all ranks launch the kernel with the same
    arguments, except that each passes its own slice. The slices should cover the wire.

    wires: int64 [num_ranks]: where each rank's wire lies as this device sees it, at multiples of 64 bytes.
    signals: int64 [num_ranks]: where each rank's pad of `signals.signal_bytes` lies, zeroed before its first use.
    wire: this rank's own wire, 1-D: fp16, bf16, fp32 or fp64, of one size on all ranks.
    begin, end: this rank's slice, in elements. `begin` is a multiple of 64 bytes, unless the slice is empty.
    abort: int32 [1], 0, in host memory; on CUDA in pinned host memory. When the host makes `abort` non-zero, a kernel
        that waits for another rank stops waiting, fills its share of the own wire with NaN, and ends. So does a kernel
        without `gather`, which begins then. The pads are never used again after that.
    gather, spread: False leaves out one half. Without `spread` the sum is written to the own wire only. Until this rank
        spreads, the caller may then change only the own slice of the own wire, as other ranks may still read the rest.
        Without `gather` the own slice is copied to the other ranks.
    max_blocks: largest number of blocks, the same on all ranks. The pads must be made for at least as many.

    The sum is fp32 (fp64 for fp64) and rounded once. Runs on the current stream, which may wait for the other ranks.
    The host does not wait. The caller keeps all tensors while it may call the function, and all ranks keep
    their wires until all streams are past the last call. The caller has to find out whether the kernel was aborted.
    """
    if begin == end:
        begin = end = 0  # the kernel needs an aligned slice, also if the slice is empty
    arguments = wires, signals, wire, rank, begin, end, wire.numel(), abort
    tile = tile_numel(wire.dtype.itemsize, num_ranks)
    return prepare_between(_direct_kernel, arguments, wire, num_ranks, tile, max_blocks, GATHER=gather, SPREAD=spread)
