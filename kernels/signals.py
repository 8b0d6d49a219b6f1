"""Meetings between kernels of different ranks: how one GPU tells another that its data may be read.

A signal is an int32 count, which its sender only ever raises. The sender stores the count in the pad of the rank that
waits for the signal, and that rank looks at its own pad until the count is high enough. So nothing is reset, no launch
argument changes from launch to launch, and no GPU needs atomic operations in the memory of another GPU, which GPUs
behind PCIe may not have. Block b of a rank only signals to block b of other ranks, so blocks need not all run at once.

One pad of `signal_bytes` serves both `direct` and `ring`. Each block has N + 3 words, for N ranks, in 128-byte lines of
its own:

    word    written by                 counts
    i < N   block b of rank i          meetings of `direct` that rank i has come to; word r of rank r's own pad is the
                                       count of rank r itself
    N       block b of the left        steps of `ring` that the left neighbour has finished
    N + 1   block b of the right       steps of `ring` that the right neighbour has read
    N + 2   block b of this rank       steps of `ring` that this rank has finished

Pads begin as zeros on all ranks, and counts continue from launch to launch. An aborted kernel leaves counts that differ
from rank to rank. So after an abort the pads of that group of ranks are never used again.

Example: 2 ranks, the third meeting of block 0
    before      rank 0's pad [2, 2, ...]    rank 1's pad [2, 2, ...]
    rank 0 has 2 in its own word 0, so its next meeting is 3. It stores 3 in word 0 of rank 1, and waits for 3 in its
    own word 1. Rank 1 does the same the other way round. At the end of the launch each rank stores 3 in its own word.

Why counts never overtake. All ranks launch the same kernels in the same order, with the same number of blocks. So the
meetings of block b have one order on all ranks, although a launch with fewer blocks leaves some blocks out: their
counts stand still, on all ranks alike. A rank comes to meeting k+1 only after it has seen k from all ranks. So while a
rank waits for k, each of its words is k-1, k, or k+1 if that sender is one meeting ahead, and `word - k >= 0` tells
k-1 from the others. The subtraction is modulo 2**32, so a count may pass 2**31 and 2**32. For `ring` the same holds
with a round of 2N-2 steps in place of a meeting: the left neighbour begins its next round only after this rank has
stored that it has read the last step.

Memory order (PTX ISA, "Memory Consistency Model"). All threads of the block that waits must see what all threads of
the sending block, on another GPU, have written:

    sender   all threads: stores | bar.sync | thread i: st.release.sys to rank i
    waiter   thread i: ld.acquire.sys of word i | bar.red | all threads: loads

On the sender, the barrier orders the stores of all threads before the release store, and a release is cumulative: it
covers all that precedes it, including what other threads wrote. A waiter whose acquire load returns the value of a
release store synchronises with it. If the value is that of a later store of the same rank, that store is a release too,
and covers more. On the waiter, the barrier orders the acquire loads of all words before the loads of all threads.
Stores of earlier kernels of the sender's stream precede all threads of the sending kernel anyway.

Cost. The release stores to all ranks are one instruction of one warp, behind one MEMBAR.ALL.SYS. The stores are posted:
the sender does not wait for an answer. An acquire load drops the first-level cache of its SM. So after some looks the
waiter pauses between looks, looks with relaxed loads, and confirms what it has seen by one acquire load.

All threads of a block must leave a wait together, or the threads would wait for each other at different barriers. So
each result of a look, and of a look at the abort word, is the outcome of a reduction over the whole block.

On NVIDIA GPUs, `PTX` selects inline PTX. Operands are scalars there, and the code itself chooses the threads that act
(the first ones), so nothing depends on how Triton spreads a tensor over threads. Elsewhere (AMD, interpreter) Triton's
atomic operations on tensors with an element for each thread do the same: an exchange with release to send, and an `or`
with 0 and acquire to look.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, no_type_check

from .lazy import lazy_jit

if TYPE_CHECKING:
    import triton.language as tl

MAX_BLOCKS = 24  # enough to fill NVLink, and few enough to leave backward most SMs (an A100 has 108, an H100 132)


def signal_bytes(num_ranks: int, max_blocks: int = MAX_BLOCKS) -> int:
    """Bytes of every rank's signal pad for `direct` and `ring` with up to `max_blocks` blocks."""
    return 4 * max_blocks * block_words(num_ranks)


def block_words(num_ranks: int) -> int:
    """Number of int32 words between the first words of two blocks."""
    return (num_ranks + 3 + 31) // 32 * 32


@lazy_jit()
@no_type_check
def first_word(NUM_RANKS: tl.constexpr):
    """Index of this block's first word in any pad; see `block_words`."""
    return tl.program_id(0) * ((NUM_RANKS + 3 + 31) // 32 * 32)


@lazy_jit(uses=(first_word,))
@no_type_check
def words_of(
    signals,  # [N] int64 IN: where each rank's pad begins
    rank,  # owner of the pad
    NUM_RANKS: tl.constexpr,
):
    """A pointer to this block's words in `rank`'s pad."""
    pad = tl.load(signals + rank).to(tl.pointer_type(tl.int32))
    return pad + first_word(NUM_RANKS)


@lazy_jit(uses=(first_word,))
@no_type_check
def send(
    signals,  # [width] int64 IN: where the pads begin
    width,  # int32: number of pads
    skip,  # int32: the pad that gets no signal; -1 if all do
    word,  # int32: index among the words of this block
    count,  # int32
    NUM_RANKS: tl.constexpr,
    PTX: tl.constexpr,
):
    """Store `count` in one word of several pads at once.

    A block that sees the count also sees all that the threads of this block wrote before, and had seen.
    """
    word += first_word(NUM_RANKS)
    if PTX:
        tl.inline_asm_elementwise(
            """
            {
                .reg .pred mine;
                .reg .u32 thread;
                .reg .u64 pad;
                mov.u32 thread, %tid.x;
                setp.lt.u32 mine, thread, $2;
                setp.ne.and.u32 mine, thread, $3, mine;
                mad.wide.u32 pad, thread, 8, $1;
                @mine ld.global.u64 pad, [pad];
                mad.wide.u32 pad, $4, 4, pad;
                bar.sync 0;
                @mine st.release.sys.global.u32 [pad], $5;
                mov.u32 $0, 0;
            }
            """,
            "=r,l,r,r,r,r,~{memory}",
            [signals.to(tl.int64), width, skip, word, count],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        lane = tl.arange(0, 512)
        mine = (lane < width) & (lane != skip)
        pad = tl.load(signals + lane, mask=mine, other=0).to(tl.pointer_type(tl.int32))
        tl.debug_barrier()
        tl.atomic_xchg(pad + word, count, mask=mine, sem="release", scope="sys")


@lazy_jit()
@no_type_check
def look(
    words,  # pointer to [width] int32 of the own pad
    width,  # int32: number of words
    skip,  # int32: the word that does not matter; -1 if all do
    count,  # int32
    pause,  # int32: nanoseconds to wait before, or 0
    PTX: tl.constexpr,
):
    """1 if all words have come to `count`, else 0; the same for all threads of this block.

    If 1, and `pause` is 0, this block sees what the senders could see when they sent the count.
    """
    if PTX:
        come = tl.inline_asm_elementwise(
            """
            {
                .reg .pred mine, patient, eager, come;
                .reg .u32 thread;
                .reg .s32 seen;
                .reg .u64 word;
                mov.u32 thread, %tid.x;
                setp.lt.u32 mine, thread, $2;
                setp.ne.and.u32 mine, thread, $3, mine;
                setp.ne.and.u32 patient, $5, 0, mine;
                setp.eq.and.u32 eager, $5, 0, mine;
                mad.wide.u32 word, thread, 4, $1;
                mov.s32 seen, $4;
                @patient nanosleep.u32 $5;
                @patient ld.relaxed.sys.global.s32 seen, [word];
                @eager ld.acquire.sys.global.s32 seen, [word];
                sub.s32 seen, seen, $4;
                setp.ge.s32 come, seen, 0;
                bar.red.and.pred come, 0, come;
                selp.s32 $0, 1, 0, come;
            }
            """,
            "=r,l,r,r,r,r,~{memory}",
            [words.to(tl.int64), width, skip, count, pause],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    else:
        lane = tl.arange(0, 512)
        mine = (lane < width) & (lane != skip)
        seen = tl.atomic_or(words + lane, 0, mask=mine, sem="acquire", scope="sys")
        come = 1 - tl.max((mine & (seen - count < 0)).to(tl.int32), 0)
    return come


@lazy_jit()
@no_type_check
def is_aborted(
    abort,  # [1] int32 IN: in host memory, which a GPU may have no atomic operations for
    PTX: tl.constexpr,
):
    """1 if *abort is not zero, else 0; the same for all threads of this block."""
    if PTX:
        return tl.inline_asm_elementwise(
            """
            {
                .reg .pred mine;
                .reg .u32 thread;
                .reg .s32 seen;
                mov.u32 thread, %tid.x;
                setp.eq.u32 mine, thread, 0;
                mov.s32 seen, 0;
                @mine ld.relaxed.sys.global.s32 seen, [$1];
                setp.ne.s32 mine, seen, 0;
                bar.red.or.pred mine, 0, mine;
                selp.s32 $0, 1, 0, mine;
            }
            """,
            "=r,l,~{memory}",
            [abort.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    seen = tl.load(abort + tl.zeros([512], tl.int32), volatile=True)
    return tl.max((seen != 0).to(tl.int32), 0)


@lazy_jit(uses=(look, is_aborted))
@no_type_check
def wait(
    words,  # pointer to [width] int32 of the own pad
    width,
    skip,
    count,
    abort,  # [1] int32 IN: becomes non-zero to stop the wait
    PTX: tl.constexpr,
):
    """Wait until all words but `skip` have come to `count`. Returns 1, or 0 if aborted before.

    From then on, all threads of this block see what the senders could see when they sent the count.
    """
    come = 0
    stop = 0
    looks = 0
    PERIOD: tl.constexpr = 1024 if PTX else 32  # the interpreter takes a millisecond for a few looks
    while (come | stop) == 0:
        # About once in a millisecond. The looks of all blocks are served one by one, each in a microsecond: if blocks
        # look often, and together, they see signals late.
        if looks % PERIOD == PERIOD - 1:
            stop = is_aborted(abort, PTX)
        pause = tl.where(looks < 32, 0, 400)
        come = look(words, width, skip, count, pause, PTX)
        if (come != 0) & (pause != 0):
            come = look(words, width, skip, count, 0, PTX)
        looks = tl.where(looks < 2047, looks + 1, 1024)  # a count without end would become negative
    return come


@lazy_jit(uses=(words_of, send, wait))
@no_type_check
def meet(
    signals,  # [N] int64 IN
    rank,
    count,  # int32: number of this meeting
    abort,  # [1] int32 IN
    NUM_RANKS: tl.constexpr,
    PTX: tl.constexpr,
):
    """Wait until this block has come to this meeting on all ranks. Returns 1, or 0 if aborted.

    From then on, the block sees what the same block of the other ranks wrote before this meeting.
    """
    send(signals, NUM_RANKS, rank, rank, count, NUM_RANKS, PTX)
    return wait(words_of(signals, rank, NUM_RANKS), NUM_RANKS, rank, count, abort, PTX)
