"""Signals between kernels of different ranks: how one GPU tells another that its data may be read.

A signal is an int32 word in a rank's signal pad, 0 or 1. The sender sets the word to 1. The owner of the pad takes the
signal, which sets the word to 0 again. So nothing has to be counted or cleared between rounds. Block b of a rank only
signals to block b of other ranks, so blocks need not all run at once.

One pad of `signal_bytes` serves both `direct` and `ring`. Block b's words begin at word 4 * N * b, for N ranks:

    word         set by                  means
    [0, N)       `direct` of that rank   my wire is packed (before the sum)
    [N, 2N)      `direct` of that rank   I no longer use your wire (after spreading)
    [2N, 4N-2)   `ring` of the left      my share of this step is written; one word for each step
    4N-1         `ring` of the right     I have read everything

Pads begin as zeros on all ranks. An aborted kernel leaves signals in the pads. Before the pads are used again, they
must be zeroed while no kernel of any rank runs.

Memory order. All threads of the block that takes a signal must see what the sending block, on another GPU, has written:

    sender   all threads: stores | bar.sync | thread 0: exchange, release at system scope
    taker    thread 0: exchange, acquire at system scope | bar.sync | all threads: loads

On the sender, the barrier makes the stores of the other threads precede the exchange. The release covers everything
that precedes the exchange, including what other threads wrote. On the taker, the loads of all threads follow the
exchange in the same way, and the acquire drops stale lines of the first-level cache. Stores of earlier kernels of the
sender's stream precede all threads of the sending kernel anyway.

Words are scalars. Triton makes thread 0 do an atomic operation on a scalar, and passes the result to the whole block,
so all threads leave a loop together. A plain load would be done by each thread for itself. If the word changed
meanwhile, some threads could see the change and others not, and the threads would wait for each other at a barrier
forever. So the abort word, too, is read by an atomic operation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, no_type_check

import torch
from torch import Tensor

from .chunks import DTYPES
from .lazy import lazy_jit, runs_on_triton

if TYPE_CHECKING:
    import triton.language as tl

MAX_BLOCKS = 24  # enough to fill NVLink, and few enough to leave backward most SMs (an A100 has 108, an H100 132)
NUM_WARPS = 8  # 512 threads where warps have 64, which leaves every thread 128 registers


def signal_bytes(num_ranks: int, max_blocks: int = MAX_BLOCKS) -> int:
    """Bytes of every rank's signal pad for `direct` and `ring` with up to `max_blocks` blocks."""
    return 4 * max_blocks * 4 * num_ranks


def check(
    what: str,
    wires: Tensor,
    signals: Tensor,
    wire: Tensor,
    rank: int,
    num_ranks: int,
    abort: Tensor,
    found: Tensor | None,
    max_blocks: int,
) -> None:
    """Raise unless these are arguments that `direct` or `ring`, named by `what`, can work on."""
    device = wire.device
    if not runs_on_triton(device):
        raise ValueError(f"{what} runs on CUDA, or on CPU tensors under TRITON_INTERPRET=1; got a wire on {device}")
    if wire.dtype not in DTYPES:
        raise TypeError(f"{what} sums {DTYPES}, got a wire of {wire.dtype}")
    if wire.dim() != 1 or not wire.is_contiguous() or wire.data_ptr() % 64:
        raise ValueError(
            f"wire must be one-dimensional, contiguous and start at a multiple of 64 bytes; got shape "
            f"{tuple(wire.shape)} with strides {wire.stride()} at {wire.data_ptr():#x}"
        )
    if not 0 <= rank < num_ranks:
        raise ValueError(f"rank must be one of {num_ranks}, got {rank}")
    if max_blocks < 1:
        raise ValueError(f"max_blocks must be at least 1, got {max_blocks}")
    _check_words("wires", wires, torch.int64, num_ranks, device)
    _check_words("signals", signals, torch.int64, num_ranks, device)
    _check_words("abort", abort, torch.int32, 1, device)
    if found is not None:
        _check_words("found", found, torch.int32, 1, device)


def _check_words(name: str, tensor: Tensor, dtype: torch.dtype, numel: int, device: torch.device) -> None:
    if tensor.dtype != dtype or tensor.numel() != numel or tensor.device != device or not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be contiguous, {dtype} [{numel}] on {device}; "
            f"got {tensor.dtype} {list(tensor.shape)} on {tensor.device}"
        )


def num_blocks(numel: int, num_ranks: int, tile: int, max_blocks: int) -> int:
    """Number of blocks of a launch, equal on all ranks: one for each tile of a slice, at most `max_blocks`."""
    return max(1, min(max_blocks, -(-numel // (num_ranks * tile))))


def tile_numel(itemsize: int, num_ranks: int) -> int:
    """Number of elements that a block loads at a time from each rank: 8 warps load 128 bits a thread, from all ranks.

    A link is full when bandwidth times latency, nearly 1 MB, is in flight. For 24 blocks this means tens of KB for each
    block: 16 KiB from each of up to 4 ranks, or 8 KiB from each of more ranks. For these, 64 registers a thread are
    enough.
    """
    return (16384 if num_ranks <= 4 else 8192) // itemsize


@lazy_jit()
@no_type_check
def word_of(
    signals,  # [N] int64 IN: where each rank's pad begins
    rank,  # owner of the pad
    word,  # index among the words of this block
    NUM_RANKS: tl.constexpr,
):
    """A pointer to a word of this block in `rank`'s pad."""
    pad = tl.load(signals + rank).to(tl.pointer_type(tl.int32))
    return pad + tl.program_id(0) * (4 * NUM_RANKS) + word


@lazy_jit()
@no_type_check
def send(word):
    """Set *word to 1. The block that takes the signal sees everything that this block's threads wrote before."""
    tl.debug_barrier()
    tl.atomic_xchg(word, 1, sem="release", scope="sys")


@lazy_jit()
@no_type_check
def take(
    word,
    abort,  # int32 IN: becomes non-zero to stop the wait; in the memory of this device
):
    """Wait until *word is 1, set it to 0, and return 1. Return 0 if *abort has become non-zero and *word is still 0.

    From then on, all threads of this block see what the sender could see when it sent the signal.
    """
    taken = tl.atomic_xchg(word, 0, sem="acquire", scope="sys")
    stop = 0
    looks = 0
    while (taken | stop) == 0:
        if looks % 32 == 0:  # a look takes most of a microsecond, by which a signal would be taken later
            stop = tl.atomic_or(abort, 0, sem="relaxed", scope="sys")
        looks += 1
        taken = tl.atomic_xchg(word, 0, sem="acquire", scope="sys")
    tl.debug_barrier()
    return taken


@lazy_jit(uses=(word_of, send, take))
@no_type_check
def meet(
    signals,  # [N] int64 IN
    rank,
    first,  # index of the block's word for rank 0; the words for the other ranks follow
    abort,  # int32 IN
    NUM_RANKS: tl.constexpr,
):
    """Wait until this block has reached this point on all ranks. Returns 1, or 0 if aborted.

    From then on, the block sees what the same block of the other ranks wrote before this point. Between two calls with
    the same `first` there must be a call with another `first`: a rank that has seen all others arrive may reach its
    next call while its signals for this call are not yet taken.
    """
    for i in range(1, NUM_RANKS):
        send(word_of(signals, (rank + i) % NUM_RANKS, first + rank, NUM_RANKS))
    met = 1
    for i in range(1, NUM_RANKS):
        met &= take(word_of(signals, rank, first + (rank + i) % NUM_RANKS, NUM_RANKS), abort)
    return met


@lazy_jit()
@no_type_check
def poison(
    wire,  # [numel] OUT
    numel,
    TILE: tl.constexpr,
):
    """Fill this block's share of a wire with NaN, so that nobody uses an unfinished result."""
    nothing = tl.full([TILE], float("nan"), wire.dtype.element_ty)
    stride = tl.num_programs(0).to(tl.int64) * TILE
    for tile in range(tl.program_id(0).to(tl.int64) * TILE, numel, stride):
        lane = tile + tl.arange(0, TILE)
        tl.store(wire + lane, nothing, mask=lane < numel)
