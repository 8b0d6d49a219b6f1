"""Direct in the switch: NVLink's switch adds the wires of all GPUs (NVLS), and copies a result to all of them.

A multicast address stands for the same place in the memory of all ranks. `multimem.ld_reduce` loads the sum of what all
ranks have there, and `multimem.st` stores a value there on all ranks. So each rank reads 1/N of a wire's bytes and
writes as many over its links, where `direct` without a switch reads and writes (N-1)/N.

Sums have the same bits on all ranks, because one rank computes each of them. They are not those of
`reference.accumulate`: the order in which the switch adds, and its intermediate rounding, are its own (PTX ISA,
multimem.ld_reduce, leaves both open). 16-bit sums are added in fp32 (`.acc::f32`) and rounded to 16 bits by the switch.
A scale other than 1 then rounds once more.

Accesses by a multicast address and by other addresses of the same memory are ordered by `fence.proxy.alias` only (PTX
ISA, "Proxies"). So one such fence follows the meeting before the sum, and one precedes the meeting after it.

Example: 2 ranks, a bf16 wire, slice of rank 0 of 20 elements at byte 0
    three vectors of 16 bytes: elements 0 to 7, 8 to 15, and 16 to 19 with 4 elements behind the slice. The slice is the
    last of its wire, so the elements behind are padding: they are summed and stored as well, but not checked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, no_type_check

import torch
from torch import Tensor

from .finite import is_finite, report
from .lazy import lazy_jit

if TYPE_CHECKING:
    import triton.language as tl

# Vectors of 16 bytes that a block handles at a time, 4 for each of 256 threads: 16 KiB of sums are under way. Fewer
# vectors than threads would be handled twice, and then be summed twice.
VECTORS = 1024


def check_multicast(wire: Tensor, multicast: int, end: int) -> None:
    """Raise unless `direct` can sum `wire` in the switch, where its address is `multicast`."""
    device, numel, itemsize = wire.device, wire.numel(), wire.dtype.itemsize
    if device.type != "cuda" or torch.version.hip is not None:
        raise ValueError(f"multicast needs an NVIDIA GPU (multimem instructions); got a wire on {device}")
    if torch.cuda.get_device_capability(device) < (9, 0):
        raise ValueError(f"multicast needs compute capability 9.0 or later; {device} has less")
    if wire.dtype == torch.float64:
        raise TypeError("multicast sums fp16, bf16 and fp32; got a wire of torch.float64")
    if multicast % 64:
        raise ValueError(f"multicast must be a multiple of 64 bytes, got {multicast:#x}")
    if end * itemsize % 16 and end != numel:
        raise ValueError(f"with multicast, a slice ends at a multiple of 16 bytes or with the wire, got {end} elements")


@lazy_jit()
@no_type_check
def order_aliases():
    """Order accesses by the multicast address with accesses of the same memory by other addresses."""
    tl.inline_asm_elementwise(
        "fence.proxy.alias; mov.u32 $0, 0;", "=r,~{memory}", [], dtype=tl.int32, is_pure=False, pack=1
    )


@lazy_jit()
@no_type_check
def load_sum(
    multicast,  # int64: multicast address of the wire
    vector,  # int64 [n]: indices of vectors of 16 bytes
    mine,  # int1 [n]: vectors to load
    DTYPE: tl.constexpr,
):
    """Four uint32 [n]: the words of each vector, summed over all ranks."""
    address = multicast + vector * 16
    flag = mine.to(tl.int32)
    NARROW: tl.constexpr = "add.acc::f32.v4.bf16x2" if tl.bfloat16 == DTYPE else "add.acc::f32.v4.f16x2"
    SUM: tl.constexpr = "add.v4.f32" if tl.float32 == DTYPE else NARROW
    return tl.inline_asm_elementwise(
        """
        {
            .reg .pred mine;
            .reg .b32 a, b, c, d;
            setp.ne.u32 mine, $5, 0;
            @mine multimem.ld_reduce.relaxed.sys.global."""
        + SUM
        + """ {a, b, c, d}, [$4];
            mov.b32 $0, a;
            mov.b32 $1, b;
            mov.b32 $2, c;
            mov.b32 $3, d;
        }
        """,
        "=r,=r,=r,=r,l,r,~{memory}",
        [address, flag],
        dtype=(tl.uint32, tl.uint32, tl.uint32, tl.uint32),
        is_pure=False,
        pack=1,
    )


@lazy_jit()
@no_type_check
def store_to_all(
    multicast,
    vector,
    mine,
    words,  # tuple of four uint32 [n]
):
    """Store the words of each vector on all ranks."""
    tl.inline_asm_elementwise(
        """
        {
            .reg .pred mine;
            setp.ne.u32 mine, $6, 0;
            @mine multimem.st.relaxed.sys.global.v4.f32 [$1], {$2, $3, $4, $5};
            mov.u32 $0, 0;
        }
        """,
        "=r,l,r,r,r,r,r,~{memory}",
        [multicast + vector * 16, words[0], words[1], words[2], words[3], mine.to(tl.int32)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@lazy_jit()
@no_type_check
def scale_word(
    word,  # uint32 [n]: one fp32 or two 16-bit elements, the first in the lower half
    factor,  # fp32
    DTYPE: tl.constexpr,
):
    """uint32 [n]: the elements times `factor`, rounded to DTYPE."""
    if tl.float32 == DTYPE:
        result = (word.to(tl.float32, bitcast=True) * factor).to(tl.uint32, bitcast=True)
    else:
        low = word.to(tl.uint16).to(DTYPE, bitcast=True).to(tl.float32) * factor
        high = (word >> 16).to(tl.uint16).to(DTYPE, bitcast=True).to(tl.float32) * factor
        low = low.to(DTYPE).to(tl.uint16, bitcast=True).to(tl.uint32)
        high = high.to(DTYPE).to(tl.uint16, bitcast=True).to(tl.uint32)
        result = low | (high << 16)
    return result


@lazy_jit(uses=(is_finite,))
@no_type_check
def first_in_word(
    word,  # uint32 [n]
    index,  # int64 [n]: of the word's first element
    end,  # int64: elements from here on do not matter
    DTYPE: tl.constexpr,
):
    """int64 [n]: index of each word's first NaN or infinity, at most 2**31 - 2; 2**31 - 1 if it has none."""
    if tl.float32 == DTYPE:
        bad = (is_finite(word.to(tl.float32, bitcast=True), tl.float32) == 0) & (index < end)
        result = tl.where(bad, tl.minimum(index, 2147483646), 2147483647)
    else:
        low = (is_finite(word.to(tl.uint16).to(DTYPE, bitcast=True), tl.float32) == 0) & (index < end)
        high = is_finite((word >> 16).to(tl.uint16).to(DTYPE, bitcast=True), tl.float32) == 0
        high = high & (index + 1 < end)
        found = tl.where(low, index, index + 1)
        result = tl.where(low | high, tl.minimum(found, 2147483646), 2147483647)
    return result


@lazy_jit(uses=(load_sum, store_to_all, scale_word, first_in_word, report))
@no_type_check
def reduce_in_switch(
    multicast,  # int64: multicast address of the wire
    wire,  # pointer to the own wire
    begin,  # int64: the slice, in elements; begins at a multiple of 64 bytes
    end,  # int64: ends at a multiple of 16 bytes, or with the wire
    factor,  # fp32
    found,
    GATHER: tl.constexpr,
    SPREAD: tl.constexpr,
    CHECK: tl.constexpr,
    TILE: tl.constexpr,  # vectors
):
    """This block's share of the slice: sum it in the switch, store it on all ranks, or both."""
    DTYPE: tl.constexpr = wire.dtype.element_ty
    PER_VECTOR: tl.constexpr = 128 // DTYPE.primitive_bitwidth
    PER_WORD: tl.constexpr = PER_VECTOR // 4
    own = tl.multiple_of(wire.to(tl.pointer_type(tl.uint32)), 16)
    last = tl.cdiv(end, PER_VECTOR)
    start = begin // PER_VECTOR + tl.program_id(0).to(tl.int64) * TILE
    stride = tl.num_programs(0).to(tl.int64) * TILE
    first = tl.full([TILE], 2147483647, tl.int64)
    for tile in range(start, last, stride):
        vector = tile + tl.arange(0, TILE)
        mine = vector < last
        if GATHER:
            a, b, c, d = load_sum(multicast, vector, mine, DTYPE)
            a = scale_word(a, factor, DTYPE)
            b = scale_word(b, factor, DTYPE)
            c = scale_word(c, factor, DTYPE)
            d = scale_word(d, factor, DTYPE)
        else:
            a = tl.load(own + vector * 4, mask=mine)
            b = tl.load(own + vector * 4 + 1, mask=mine)
            c = tl.load(own + vector * 4 + 2, mask=mine)
            d = tl.load(own + vector * 4 + 3, mask=mine)
        if SPREAD:
            store_to_all(multicast, vector, mine, (a, b, c, d))
        else:
            tl.store(own + vector * 4, a, mask=mine)
            tl.store(own + vector * 4 + 1, b, mask=mine)
            tl.store(own + vector * 4 + 2, c, mask=mine)
            tl.store(own + vector * 4 + 3, d, mask=mine)
        if CHECK:
            index = vector * PER_VECTOR
            first = tl.minimum(first, first_in_word(a, index, end, DTYPE))
            first = tl.minimum(first, first_in_word(b, index + PER_WORD, end, DTYPE))
            first = tl.minimum(first, first_in_word(c, index + 2 * PER_WORD, end, DTYPE))
            first = tl.minimum(first, first_in_word(d, index + 3 * PER_WORD, end, DTYPE))
    if CHECK:
        report(found, tl.min(first, 0).to(tl.int32))
