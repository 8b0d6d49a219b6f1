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

Example: 2 ranks, wires fp32 [1, 2, ..., 32] and [10, 20, ..., 320]
    rank 0 makes elements 16 to 31, 187 to 352, rank 1 elements 0 to 15, 11 to 176, and each copies the other's

Blocks are independent: block b only reads what block b of the left neighbour has written, and only waits for block b.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, no_type_check

from torch import Tensor

from .launching import poison, prepare_between, tile_numel
from .lazy import lazy_jit
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
    COMPUTE: tl.constexpr,
    ADD: tl.constexpr,
):
    """Add the left neighbour's elements to the own ones, or copy them."""
    DTYPE: tl.constexpr = own.dtype.element_ty
    # torch casts fp64 to 16 bits by way of fp32. This kernel must do the same, to round alike.
    ROUNDED: tl.constexpr = tl.float64 if tl.float64 == DTYPE else tl.float32
    result = tl.load(left + lane, mask=lane < limit)
    if ADD:
        total = result.to(COMPUTE) + tl.load(own + lane, mask=lane < limit).to(COMPUTE)
        result = total.to(ROUNDED).to(DTYPE)
    tl.store(own + lane, result, mask=lane < limit)


@lazy_jit(uses=(hop_lanes,))
@no_type_check
def hop(
    left,
    own,
    begin,  # int64: the slice, which may lie beyond the wire's end; a multiple of 64 bytes
    share,  # int64: elements of a slice
    numel,  # int64: elements of the wire
    COMPUTE: tl.constexpr,
    ADD: tl.constexpr,
    TILE: tl.constexpr,
):
    """This block's share of one slice: own <- left + own; without ADD own <- left."""
    # As in pack: first a multiple of 16 elements, 128 bits at a time, then the last 0 to 15 elements.
    begin = begin // 8 * 8  # changes nothing, but tells the compiler that vectors begin here
    count = tl.maximum(tl.minimum(share, numel - begin), 0)
    end = begin + count
    whole = begin + count // 16 * 16
    start = begin + tl.program_id(0).to(tl.int64) * TILE
    stride = tl.num_programs(0).to(tl.int64) * TILE
    for tile in range(start, whole, stride):
        hop_lanes(left, own, tile + tl.arange(0, TILE), whole, COMPUTE, ADD)
    if tl.program_id(0) == 0:
        hop_lanes(left, own, whole + tl.arange(0, 16), end, COMPUTE, ADD)


@lazy_jit(
    do_not_specialize=("wires", "signals", "rank", "share", "numel", "abort"), uses=(words_of, send, wait, poison, hop)
)
@no_type_check
def _ring_kernel(
    wires,  # [N] int64 IN: where each rank's wire begins, a multiple of 64 bytes
    signals,  # [N] int64 IN: where each rank's signal pad begins
    wire,  # [numel] IN and OUT: this rank's own wire, one of `wires`
    rank: tl.int32,
    share: tl.int64,  # elements of a slice, a multiple of 64 bytes; the last slices may be shorter, or empty
    numel: tl.int64,
    abort,  # [1] int32 IN: in host memory
    COMPUTE: tl.constexpr,  # fp32, or fp64 for fp64 wires
    NUM_RANKS: tl.constexpr,
    PTX: tl.constexpr,
    TILE: tl.constexpr,
):
    left = (rank + NUM_RANKS - 1) % NUM_RANKS
    right = (rank + 1) % NUM_RANKS
    source = tl.multiple_of(tl.load(wires + left).to(tl.pointer_type(wire.dtype.element_ty)), 16)
    share = share // 8 * 8
    # Words of this block, see signals.py.
    FROM_LEFT: tl.constexpr = NUM_RANKS
    FROM_RIGHT: tl.constexpr = NUM_RANKS + 1
    OWN: tl.constexpr = NUM_RANKS + 2
    words = words_of(signals, rank, NUM_RANKS)
    count = tl.load(words + OWN) + 1
    send(signals + right, 1, -1, FROM_LEFT, count, NUM_RANKS, PTX)
    met = 1
    for step in range(NUM_RANKS - 1):
        met &= wait(words + FROM_LEFT, 1, -1, count, abort, PTX)
        if met != 0:
            begin = ((rank + NUM_RANKS - step - 1) % NUM_RANKS) * share
            hop(source, wire, begin, share, numel, COMPUTE, True, TILE)
            count += 1
            send(signals + right, 1, -1, FROM_LEFT, count, NUM_RANKS, PTX)
    for step in range(NUM_RANKS - 1):
        met &= wait(words + FROM_LEFT, 1, -1, count, abort, PTX)
        if met != 0:
            begin = ((rank + NUM_RANKS - step) % NUM_RANKS) * share
            hop(source, wire, begin, share, numel, COMPUTE, False, TILE)
            if step < NUM_RANKS - 2:
                count += 1
                send(signals + right, 1, -1, FROM_LEFT, count, NUM_RANKS, PTX)
    if met != 0:
        send(signals + left, 1, -1, FROM_RIGHT, count, NUM_RANKS, PTX)
        met = wait(words + FROM_RIGHT, 1, -1, count, abort, PTX)
        tl.store(words + OWN, count)
    if met == 0:
        poison(wire, numel, TILE)


def prepare_ring(
    wires: Tensor,
    signals: Tensor,
    wire: Tensor,
    *,
    rank: int,
    num_ranks: int,
    abort: Tensor,
    max_blocks: int = MAX_BLOCKS,
) -> Callable[[], None]:
    """A function: all wires <- the sum over all wires, added around a ring. Rank r only reads from rank r-1.

    Calls are collective: all ranks launch the kernel with the same arguments. Slices are equal to within 64 bytes, in
    rank order.
    Arithmetic is fp32 (fp64 for fp64). Every addition rounds to the wire's dtype once, so each element is rounded
    num_ranks - 1 times. All ranks end with the same bits.

    Other arguments, stream, ownership and abort are those of `prepare_direct`. Of `wires` and `signals`, a
    rank only uses its neighbours' entries and its own.
    """
    numel, line = wire.numel(), 64 // wire.dtype.itemsize
    share = -(-numel // (num_ranks * line)) * line
    arguments = wires, signals, wire, rank, share, numel, abort
    return prepare_between(_ring_kernel, arguments, wire, num_ranks, tile_numel(wire.dtype.itemsize, 2), max_blocks)
