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

from . import reference
from .launching import launch_options, num_blocks, poison, takes_ptx, tile_numel
from .lazy import lazy_jit, triton_dtype
from .reduce_slice import reduce_slice
from .signals import MAX_BLOCKS, is_aborted, meet, words_of

if TYPE_CHECKING:
    import triton.language as tl


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

    The launch is prepared now, and made at each call. Calls are collective, of two ranks or more: all
    ranks launch the kernel with the same arguments, except that each passes its own slice. The slices should cover the
    wire.

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
    numel, itemsize = wire.numel(), wire.dtype.itemsize
    if begin == end:
        begin = end = 0  # the kernel needs an aligned slice, also if the slice is empty
    tile = tile_numel(itemsize, num_ranks)
    launch: Callable[[], None] = _direct_kernel.prepare(
        wire.device,
        num_blocks(numel, itemsize, num_ranks, tile, max_blocks),
        wires,
        signals,
        wire,
        rank,
        begin,
        end,
        numel,
        abort,
        COMPUTE=triton_dtype(reference.compute_dtype(wire.dtype, wire.dtype)),
        NUM_RANKS=num_ranks,
        GATHER=gather,
        SPREAD=spread,
        PTX=takes_ptx(wire.device),
        TILE=tile,
        **launch_options(wire.device),
    )
    return launch
