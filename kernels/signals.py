"""Signals between kernels of different ranks: how one GPU tells another that its data may be read.

A signal is an int32 word in a rank's signal pad, 0 or 1. The sender makes it 1, the owner of the pad takes it, which
makes it 0 again: nothing has to be counted or cleared between rounds. Blocks signal for themselves: block b of one rank
talks to block b of the others only, so blocks need not run all at once.

One pad of `signal_bytes` serves both `direct` and `ring`. Block b's words begin at word 4 * N * b, for N ranks:

    word         set by                  means
    [0, N)       `direct` of that rank   my wire is packed (before the sum)
    [N, 2N)      `direct` of that rank   I am through with your wire (after spreading)
    [2N, 4N-2)   `ring` of the left      my share of this step is there; one word for each step
    4N-1         `ring` of the right     I have pulled everything

Pads begin as zeros on all ranks. Once a kernel was aborted they hold what it left: they, too, must be zeroed, while no
kernel of any rank runs, before they are used again.

Memory order. What a block wrote must be seen, on another GPU, by all threads of the block that takes the signal:

    sender   all threads: stores | bar.sync | thread 0: exchange, release at system scope
    taker    thread 0: exchange, acquire at system scope | bar.sync | all threads: loads

The barrier makes the other threads' stores precede the exchange, and release covers whatever precedes it, also what
other threads wrote. On the other side it is the same the other way round, and the acquire drops stale lines of the
first-level cache. What earlier kernels of the sender's stream wrote precedes all of this one's threads anyway.

Words are scalars. Triton lets thread 0 do an atomic operation on a scalar and hands the result to the whole block, so
all threads leave a loop together. A plain load of a word that changes meanwhile, each thread would do for itself: some
could see it changed and others not, and these would wait at a barrier for those. So the abort word, too, is read by an
atomic operation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, no_type_check

import torch
from torch import Tensor

from .chunks import DTYPES
from .lazy import lazy_jit, runs_on_triton

if TYPE_CHECKING:
    import triton.language as tl

MAX_BLOCKS = 24  # enough in flight to fill NVLink; backward keeps the other SMs (an A100 has 108, an H100 132)
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
    """Blocks of a launch: as many as have a tile each. It depends on nothing in which ranks may differ."""
    return max(1, min(max_blocks, -(-numel // (num_ranks * tile))))


def tile_numel(itemsize: int, num_ranks: int) -> int:
    """Elements that a block works on at a time: what its 8 warps load 128 bits at a time, from all ranks at once.

    A link is full when bandwidth times latency, nearly 1 MB, is under way. With 24 blocks that takes tens of KB each:
    16 KiB of each of up to 4 ranks, 8 KiB of each of more, for which 64 or more registers a thread do.
    """
    return (16384 if num_ranks <= 4 else 8192) // itemsize


@lazy_jit()
@no_type_check
def word_of(
    signals,  # [N] int64 IN: where each rank's pad begins
    rank,  # whose pad
    word,  # which word of the block's own
    NUM_RANKS: tl.constexpr,
):
    """A pointer to a word of this block in `rank`'s pad."""
    pad = tl.load(signals + rank).to(tl.pointer_type(tl.int32))
    return pad + tl.program_id(0) * (4 * NUM_RANKS) + word


@lazy_jit()
@no_type_check
def send(word):
    """Make *word 1. All that the block's threads wrote so far can be seen by whoever takes the signal."""
    tl.debug_barrier()
    tl.atomic_xchg(word, 1, sem="release", scope="sys")


@lazy_jit()
@no_type_check
def take(
    word,
    abort,  # int32 IN: not 0 when waiting has become pointless; in this device's own memory
):
    """Wait until *word is 1 and make it 0; returns 1. Returns 0 if *abort has become non-zero and there is no signal.

    What the sender could see when it sent can be seen by all threads of the block from here on.
    """
    taken = tl.atomic_xchg(word, 0, sem="acquire", scope="sys")
    stop = 0
    looks = 0
    while (taken | stop) == 0:
        if looks % 32 == 0:  # each look costs most of a microsecond, which the signal would have to wait
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
    first,  # which of the block's words is for rank 0; those of the other ranks follow
    abort,  # int32 IN
    NUM_RANKS: tl.constexpr,
):
    """Wait until this block has come here on all ranks, each seeing what the others had written; 0 if aborted, else 1.

    Between two meetings with the same `first` there must be one with another: a rank that has seen all others arrive
    may run ahead to the next meeting while its signal for this one still lies untaken.
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
    """Fill this block's share of a wire with NaN: nobody may take for a result what is none."""
    nothing = tl.full([TILE], float("nan"), wire.dtype.element_ty)
    stride = tl.num_programs(0).to(tl.int64) * TILE
    for tile in range(tl.program_id(0).to(tl.int64) * TILE, numel, stride):
        lane = tile + tl.arange(0, TILE)
        tl.store(wire + lane, nothing, mask=lane < numel)
