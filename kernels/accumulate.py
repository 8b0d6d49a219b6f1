"""Accumulate: the sum of N buffers of one size, in one pass over each buffer.

Example: parts fp16 [1, 2, 3], [10, 20, 30] and [100, 200, 300], scale 0.5 -> out [55.5, 111.0, 166.5]

fp32 inside, parts added in list order, one rounding at the end. `reference.accumulate` is the CPU path and the oracle;
results are bit-identical to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, no_type_check

import torch
from torch import Tensor

from . import reference
from .chunks import DTYPES, address_column
from .lazy import lazy_jit, runs_on_triton, triton_dtype

if TYPE_CHECKING:
    import triton.language as tl

# With 4 warps of 32 or 64 threads each thread has 16 or 8 elements, so it loads at least 128 bits of every part.
_BLOCK = 2048


# Slices of different ranks differ by a few elements. A different length must not compile another kernel.
@lazy_jit(do_not_specialize=("addresses", "numel"))
@no_type_check
def _accumulate_kernel(
    addresses,  # [NUM_PARTS] int64 IN: where each part begins; parts are [numel] of dtype SOURCE, the caller's
    out,  # [numel] OUT: may be one of the parts, as each thread reads the elements that it writes
    numel: tl.int64,
    scale: tl.float64,
    SOURCE: tl.constexpr,  # dtype of the parts
    COMPUTE: tl.constexpr,  # fp32, or fp64 where either side is
    NUM_PARTS: tl.constexpr,
    ALIGNMENT: tl.constexpr,  # 16 if all parts begin at multiples of 16 bytes, else 1
    BLOCK: tl.constexpr,
):
    begin = tl.program_id(0).to(tl.int64) * BLOCK
    lane = begin + tl.arange(0, BLOCK)
    # As in pack: first a multiple of 16 elements, 128 bits at a time, then the last 0 to 15 elements.
    whole = numel // 16 * 16
    factor = tl.full([], scale, COMPUTE)
    # torch casts fp64 to 16 bits by way of fp32. This kernel must do the same, to round alike.
    ROUNDED: tl.constexpr = tl.float64 if out.dtype.element_ty == tl.float64 else tl.float32
    total = tl.zeros([BLOCK], COMPUTE)
    for i in tl.static_range(NUM_PARTS):
        part = tl.multiple_of(tl.load(addresses + i).to(tl.pointer_type(SOURCE)), ALIGNMENT)
        value = tl.load(part + lane, mask=lane < whole).to(COMPUTE)
        total = value if i == 0 else total + value
    tl.store(out + lane, (total * factor).to(ROUNDED).to(out.dtype.element_ty), mask=lane < whole)
    if begin + BLOCK > whole:
        rest = whole + tl.arange(0, 16)
        tail = tl.zeros([16], COMPUTE)
        for i in tl.static_range(NUM_PARTS):
            end = tl.load(addresses + i).to(tl.pointer_type(SOURCE))
            last = tl.load(end + rest, mask=rest < numel).to(COMPUTE)
            tail = last if i == 0 else tail + last
        tl.store(out + rest, (tail * factor).to(ROUNDED).to(out.dtype.element_ty), mask=rest < numel)


def accumulate(parts: Sequence[Tensor], out: Tensor, *, scale: float = 1.0) -> None:
    """out <- cast(scale * (parts[0] + parts[1] + ...)), added in list order.

    parts: one or more contiguous tensors of one dtype, with out's shape and device; fp16, bf16, fp32 or fp64 on CUDA.
    out: contiguous. May be one of the parts, but must not overlap a part otherwise.
    Runs on the current stream and does not wait; the caller keeps all tensors until that stream is past this point.
    On CPU `reference.accumulate` does the work, and also sums integers. See there for the error bound and exceptions.
    """
    dtype = reference.check_parts(parts, out, scale)
    for i, tensor in enumerate((*parts, out)):
        if tensor.device != out.device or not tensor.is_contiguous():
            name = f"parts[{i}]" if i < len(parts) else "out"
            raise ValueError(f"{name} must be contiguous on {out.device}: strides {tensor.stride()} on {tensor.device}")
    if not runs_on_triton(out.device) or not out.numel():
        reference.accumulate(parts, out, scale=scale)
        return
    if dtype not in DTYPES or out.dtype not in DTYPES:
        raise TypeError(f"the Triton kernel sums {DTYPES}, got parts of {dtype} and out of {out.dtype}")
    reference.check_overlap(parts, out)
    addresses = tuple(part.data_ptr() for part in parts)
    stream = torch.cuda.current_stream(out.device).cuda_stream if out.is_cuda else 0
    _accumulate_kernel.launch(
        out.device,
        -(-out.numel() // _BLOCK),
        address_column(addresses, out.device, stream),
        out,
        out.numel(),
        scale,
        SOURCE=triton_dtype(dtype),
        COMPUTE=triton_dtype(reference.compute_dtype(dtype, out.dtype)),
        NUM_PARTS=len(parts),
        ALIGNMENT=1 if any(address % 16 for address in addresses) else 16,
        BLOCK=_BLOCK,
    )
