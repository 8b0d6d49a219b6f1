"""Ring: all-reduce in which every rank reads only from its left neighbour, in one launch per rank.

The wire is cut into N slices. In N-1 steps each slice travels around the ring, and every rank adds its own slice. In
N-1 more steps the sums travel around the ring. The steps of 3 ranks, where "1+2" is the sum of the slices of ranks 1
and 2:

    step           rank 0 reads from 2      rank 1 reads from 0      rank 2 reads from 1
    reduce 0       slice 2 -> 2+0           slice 0 -> 0+1           slice 1 -> 1+2
    reduce 1       slice 1 -> 1+2+0         slice 2 -> 2+0+1         slice 0 -> 0+1+2
    gather 0       slice 0, whole           slice 1, whole           slice 2, whole
    gather 1       slice 2, whole           slice 0, whole           slice 1, whole

So rank r works on slice r-s-1 in reduce step s and on slice r-s in gather step s, modulo N. A step begins when the
left neighbour has signalled the end of its previous step. A signal is a count of steps, which goes on from launch to
launch. So no sender waits for a free word. At the end each rank signals to its left neighbour that it has read
everything, and waits for this signal from its right neighbour. Then its wire may be overwritten.

Example: 2 ranks, wires fp32 [1, 2, ..., 32] and [10, 20, ..., 320], scale 0.5
    rank 0 makes elements 16 to 31, 93.5 to 176.0, rank 1 elements 0 to 15, 5.5 to 88.0, and each copies the other's

Blocks are independent: block b only reads what block b of the left neighbour has written, and only waits for block b.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, no_type_check

from torch import Tensor

from . import reference
from .finite import first_index, first_places, report
from .launching import check, launch_options, num_blocks, poison, takes_ptx, tile_numel
from .lazy import lazy_jit, triton_dtype
from .signals import MAX_BLOCKS, send, wait, words_of

if TYPE_CHECKING:
    import triton.language as tl


@lazy_jit()
@no_type_check
def hop_lanes(
    left,  # pointer to the left neighbour's wire
    own,  # pointer to the own wire
    lane,  # int64 [n]: indices of elements
    limit,  # int64: lanes from here on are left alone
    theirs,  # scalar of dtype COMPUTE: factor of the left neighbour's elements
    ours,  # scalar of dtype COMPUTE: factor of the own elements
    COMPUTE: tl.constexpr,
    ADD_LEFT: tl.constexpr,
    ADD_OWN: tl.constexpr,
):
    """Sum, scale or copy some elements. Returns the values that were written."""
    DTYPE: tl.constexpr = own.dtype.element_ty
    # torch casts fp64 to 16 bits by way of fp32. This kernel must do the same, to round alike.
    ROUNDED: tl.constexpr = tl.float64 if tl.float64 == DTYPE else tl.float32
    if ADD_OWN:
        total = tl.load(own + lane, mask=lane < limit).to(COMPUTE) * ours
        if ADD_LEFT:
            total = tl.load(left + lane, mask=lane < limit).to(COMPUTE) * theirs + total
        result = total.to(ROUNDED).to(DTYPE)
    else:
        result = tl.load(left + lane, mask=lane < limit)
    tl.store(own + lane, result, mask=lane < limit)
    return result


@lazy_jit(uses=(hop_lanes, first_places, first_index, report))
@no_type_check
def hop(
    left,
    own,
    begin,  # int64: the slice, which may lie beyond the wire's end; a multiple of 64 bytes
    share,  # int64: elements of a slice
    numel,  # int64: elements of the wire
    theirs,
    ours,
    found,
    COMPUTE: tl.constexpr,
    ADD_LEFT: tl.constexpr,
    ADD_OWN: tl.constexpr,
    CHECK: tl.constexpr,
    TILE: tl.constexpr,
):
    """This block's share of one slice: own <- left * theirs + own * ours; ADD_LEFT and ADD_OWN choose the terms.

    Without ADD_OWN the left neighbour's slice is copied, unscaled.
    """
    # As in accumulate: first a multiple of 16 elements, 128 bits at a time, then the last 0 to 15 elements.
    begin = begin // 8 * 8  # changes nothing, but tells the compiler that vectors begin here
    count = tl.maximum(tl.minimum(share, numel - begin), 0)
    end = begin + count
    whole = begin + count // 16 * 16
    start = begin + tl.program_id(0).to(tl.int64) * TILE
    stride = tl.num_programs(0).to(tl.int64) * TILE
    GROUP: tl.constexpr = 128 // own.dtype.element_ty.primitive_bitwidth
    turn = 0
    places = tl.full([TILE // GROUP], 2147483647, tl.int32)
    for tile in range(start, whole, stride):
        lane = tile + tl.arange(0, TILE)
        result = hop_lanes(left, own, lane, whole, theirs, ours, COMPUTE, ADD_LEFT, ADD_OWN)
        if CHECK:
            places = tl.minimum(places, first_places(result, whole - tile, turn, COMPUTE, TILE, GROUP))
            turn += 1
    if CHECK:
        report(found, first_index(places, start, stride, TILE, GROUP))
    if tl.program_id(0) == 0:
        rest = whole + tl.arange(0, 16)
        last = hop_lanes(left, own, rest, end, theirs, ours, COMPUTE, ADD_LEFT, ADD_OWN)
        if CHECK:
            last_places = first_places(last, end - whole, 0, COMPUTE, 16, GROUP)
            report(found, first_index(last_places, whole, stride, 16, GROUP))


@lazy_jit(
    do_not_specialize=("wires", "signals", "rank", "share", "numel", "abort", "found"),
    uses=(words_of, send, wait, poison, hop),
)
@no_type_check
def _ring_kernel(
    wires,  # [N] int64 IN: where each rank's wire begins, a multiple of 64 bytes
    signals,  # [N] int64 IN: where each rank's signal pad begins
    wire,  # [numel] IN and OUT: this rank's own wire, one of `wires`
    rank: tl.int32,
    share: tl.int64,  # elements of a slice, a multiple of 64 bytes; the last slices may be shorter, or empty
    numel: tl.int64,
    scale: tl.float64,  # fp64 so that fp64 wires lose nothing
    abort,  # [1] int32 IN: in host memory
    found,  # [1] int32 IN and OUT; None without CHECK
    COMPUTE: tl.constexpr,  # fp32, or fp64 for fp64 wires
    NUM_RANKS: tl.constexpr,
    CHECK: tl.constexpr,
    PTX: tl.constexpr,
    TILE: tl.constexpr,
):
    factor = tl.full([], scale, COMPUTE)
    left = (rank + NUM_RANKS - 1) % NUM_RANKS
    right = (rank + 1) % NUM_RANKS
    source = tl.multiple_of(tl.load(wires + left).to(tl.pointer_type(wire.dtype.element_ty)), 16)
    share = share // 8 * 8
    # Words of this block, see signals.py.
    FROM_LEFT: tl.constexpr = NUM_RANKS
    FROM_RIGHT: tl.constexpr = NUM_RANKS + 1
    OWN: tl.constexpr = NUM_RANKS + 2
    if NUM_RANKS == 1:
        hop(source, wire, 0, share, numel, factor, factor, found, COMPUTE, False, True, CHECK, TILE)
    else:
        words = words_of(signals, rank, NUM_RANKS)
        count = tl.load(words + OWN) + 1
        send(signals + right, 1, -1, FROM_LEFT, count, NUM_RANKS, PTX)
        met = 1
        for step in range(NUM_RANKS - 1):
            met &= wait(words + FROM_LEFT, 1, -1, count, abort, PTX)
            if met != 0:
                begin = ((rank + NUM_RANKS - step - 1) % NUM_RANKS) * share
                theirs = tl.where(step == 0, factor, 1.0)  # later the left neighbour's slice is a sum of scaled values
                hop(source, wire, begin, share, numel, theirs, factor, found, COMPUTE, True, True, CHECK, TILE)
                count += 1
                send(signals + right, 1, -1, FROM_LEFT, count, NUM_RANKS, PTX)
        for step in range(NUM_RANKS - 1):
            met &= wait(words + FROM_LEFT, 1, -1, count, abort, PTX)
            if met != 0:
                begin = ((rank + NUM_RANKS - step) % NUM_RANKS) * share
                hop(source, wire, begin, share, numel, factor, factor, found, COMPUTE, True, False, False, TILE)
                if step < NUM_RANKS - 2:
                    count += 1
                    send(signals + right, 1, -1, FROM_LEFT, count, NUM_RANKS, PTX)
        if met != 0:
            send(signals + left, 1, -1, FROM_RIGHT, count, NUM_RANKS, PTX)
            met = wait(words + FROM_RIGHT, 1, -1, count, abort, PTX)
            tl.store(words + OWN, count)
        if met == 0:
            poison(wire, numel, TILE)


def ring(
    wires: Tensor,
    signals: Tensor,
    wire: Tensor,
    *,
    rank: int,
    num_ranks: int,
    scale: float = 1.0,
    abort: Tensor,
    found: Tensor | None = None,
    max_blocks: int = MAX_BLOCKS,
) -> None:
    """All wires <- the sum of scale * wire over all wires, added around a ring. Rank r only reads from rank r-1.

    Collective: all ranks launch the kernel with the same arguments. Slices are equal to within 64 bytes, in rank order.

    Arithmetic is fp32 (fp64 for fp64). Every addition rounds to the wire's dtype once, so each element is rounded
    num_ranks - 1 times (with a single rank once, for the scale). All ranks end with the same bits.
    found: int32 [1], `finite.NOT_FOUND` or less. Lowered to the index of the first element for which a sum written by
        this rank is NaN or infinite. The minimum over all ranks is the first such element of the result.

    Other arguments, stream, ownership, abort and errors are those of `direct`. Of `wires` and `signals`, a rank only
    uses its neighbours' entries and its own.
    """
    prepare_ring(
        wires,
        signals,
        wire,
        rank=rank,
        num_ranks=num_ranks,
        scale=scale,
        abort=abort,
        found=found,
        max_blocks=max_blocks,
    )()


def prepare_ring(
    wires: Tensor,
    signals: Tensor,
    wire: Tensor,
    *,
    rank: int,
    num_ranks: int,
    scale: float = 1.0,
    abort: Tensor,
    found: Tensor | None = None,
    max_blocks: int = MAX_BLOCKS,
) -> Callable[[], None]:
    """`ring` of these arguments as a function: checked now, launched on the current stream at each call.

    The arguments are those of `ring`, which also raises the same. The caller keeps all tensors while it may call the
    function.
    """
    check("ring", wires, signals, wire, rank, num_ranks, abort, found, max_blocks)
    numel, itemsize = wire.numel(), wire.dtype.itemsize
    line = 64 // itemsize
    tile = tile_numel(itemsize, 2)
    launch: Callable[[], None] = _ring_kernel.prepare(
        wire.device,
        num_blocks(numel, itemsize, num_ranks, tile, max_blocks),
        wires,
        signals,
        wire,
        rank,
        -(-numel // (num_ranks * line)) * line,
        numel,
        scale,
        abort,
        found,
        COMPUTE=triton_dtype(reference.compute_dtype(wire.dtype, wire.dtype)),
        NUM_RANKS=num_ranks,
        CHECK=found is not None,
        PTX=takes_ptx(wire.device),
        TILE=tile,
        **launch_options(wire.device),
    )
    return launch
