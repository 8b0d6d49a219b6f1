"""Quantize, add up and decode: rows of 256 values as 8-bit integers and one scale each, one launch for a whole buffer.

Example: a row [254, -4, 5, 0.5, 0, 0, ...] of rank 1 with feedback [0, 1, 0, ...], and a row [0, 1, 0, ...] of rank 0
    quantize (rank 1)  [254, -3, 5, 0.5, 0, ...]: scale 2, codes [127, -2, 2, 0, 0, ...], half to even
                       feedback [0, 1, 1, 0.5, 0, ...], which is what was lost
    add up (rank 0)    [254, -3, 4, 0, 0, ...], and again codes [127, -2, 2, 0, 0, ...]
    decode (both)      [254, -4, 4, 0, 0, ...]

A message has equally long parts, for the shares of all ranks. `places`, int32 [4, R], says of each row of the buffer
    [0], [1]  where its codes begin in the message, in units of 16 bytes; where its scale is, in units of 4 bytes
    [2]       -1; or, if the row travels in fp32, where its values begin, in units of 16 bytes
    [3]       how many of its elements are in use. What is behind them becomes 0.

`reference_quantize` is the oracle. A product and the sum with it are rounded once, together (fused multiply-add), as
in torch's own operations on CPUs with AVX2 or AVX-512.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, no_type_check

import torch
from torch import Tensor

from .chunks import CHUNK_NUMEL, NUM_WARPS
from .launching import register_limit
from .lazy import Kernel, lazy_jit

if TYPE_CHECKING:
    import triton.language as tl

ROW = 256


@lazy_jit()
@no_type_check
def load_rows(places, num_rows, row, mask, shift, codes, floats, ROW: tl.constexpr):
    """Codes, scales and fp32 values; codes are 0, or values are. They lie `shift` 16 bytes behind their places."""
    lane = tl.arange(0, ROW)[None, :]
    # Products of a constant tell the compiler that all rows begin at multiples of 16 bytes.
    at = (tl.load(places + row, mask=mask, other=0) + shift).to(tl.int64) * 16 + lane
    code = tl.load(codes + at, mask=mask, other=0).to(tl.float32)
    scale = tl.load(floats + tl.load(places + num_rows + row, mask=mask, other=0) + 4 * shift, mask=mask, other=0.0)
    exact = tl.load(places + 2 * num_rows + row, mask=mask, other=-1)
    value = tl.load(floats + (exact + shift).to(tl.int64) * 4 + lane, mask=exact >= 0, other=0.0)
    return code, scale, value


@lazy_jit(do_not_specialize=("num_rows", "begin", "end", "rank", "num_ranks", "part"), uses=(load_rows,))
@no_type_check
def _quantize_kernel(
    places,  # [4, num_rows] int32 IN; all tensors belong to the caller
    num_rows: tl.int32,
    rows,  # [num_rows, ROW] IN: fp32, fp16 or bf16
    codes,  # int8 OUT, the message; to ADD also IN
    floats,  # fp32, the same memory
    feedback,  # [num_rows, ROW] fp32 IN and OUT, or None
    begin: tl.int32,  # this rank's rows: those to ADD up; or else all others are quantized
    end: tl.int32,
    rank: tl.int32,  # this and the next two: to ADD
    num_ranks: tl.int32,
    part: tl.int32,  # length of a part, in units of 16 bytes
    ROWS: tl.constexpr,
    ROW: tl.constexpr,
    ADD: tl.constexpr,
):
    lane = tl.arange(0, ROW)[None, :]
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    row += begin if ADD else 0
    mask = row < end if ADD else (row < num_rows) & ((row < begin) | (row >= end))
    element = row.to(tl.int64) * ROW + lane
    values = tl.load(rows + element, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        for other in range(num_ranks):
            shift, there = (other - rank) * part, mask & (other != rank)
            code, scale, value = load_rows(places, num_rows, row, there, shift, codes, floats, ROW)
            values = tl.fma(code, scale, values) + value
    exact = tl.load(places + 2 * num_rows + row, mask=mask, other=-1)
    tl.store(floats + exact.to(tl.int64) * 4 + lane, values, mask=exact >= 0)
    if feedback is not None:
        values += tl.load(feedback + element, mask=mask, other=0.0)
    values = tl.where(exact < 0, values, 0.0)
    # A maximum of floats leaves out NaN. Without their signs, the bits of floats are in the order of the floats, with
    # NaN above infinity.
    size = values.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    scale = tl.max(size, 1)[:, None].to(tl.float32, bitcast=True) * (1 / 127)
    scale = tl.where(scale < 1e-30 / 127, 0.0, scale)
    is_finite = (scale < float("inf")) != 0
    is_coded = is_finite & ((scale > 0.0) != 0)
    inverse = tl.div_rn(1.0, tl.where(is_coded, scale, 1.0))  # `/` is off by up to two units in the last place
    # From 2**23 to 2**24 fp32 has integers only, so that the sum is rounded to one of them, half to even.
    rounded = (tl.where(is_coded, values, 0.0) * inverse + 12582912.0) - 12582912.0
    at = tl.load(places + row, mask=mask, other=0).to(tl.int64) * 16 + lane
    tl.store(codes + at, rounded.to(tl.int8), mask=mask)
    tl.store(floats + tl.load(places + num_rows + row, mask=mask, other=0), scale, mask=mask)
    if feedback is not None:
        tl.store(feedback + element, tl.fma(-rounded, scale, values), mask=mask & is_finite)


@lazy_jit(do_not_specialize=("num_rows",), uses=(load_rows,))
@no_type_check
def _decode_kernel(places, num_rows: tl.int32, rows, codes, floats, ROWS: tl.constexpr, ROW: tl.constexpr):
    """Arguments as above; `rows` OUT, the message IN."""
    lane = tl.arange(0, ROW)[None, :]
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None]
    mask = row < num_rows
    code, scale, value = load_rows(places, num_rows, row, mask, 0, codes, floats, ROW)
    in_use = tl.load(places + 3 * num_rows + row, mask=mask, other=0)
    values = tl.where(lane < in_use, code * scale + value, 0.0)
    tl.store(rows + row.to(tl.int64) * ROW + lane, values.to(rows.dtype.element_ty), mask=mask)


def prepare_quantize(
    rows: Tensor, message: Tensor, places: Tensor, feedback: Tensor | None, own: tuple[int, int], *add: int
) -> Callable[[], None]:
    """A function: message <- rows + feedback, of all rows but `own`; feedback <- what is lost.

    rows: [R, 256] fp32, fp16 or bf16; not modified.
    message: uint8, at a multiple of 16 bytes. Codes of a row that is not finite are 0, its scale is not finite.
    feedback: fp32 [R, 256]. That of a row that is not finite stays as it was, that of a row in fp32 becomes 0.
    add: the rank and the number of ranks. Adds to `own` rows, in rank order, what all other ranks' parts of the message
        have for them. The sum, quantized, becomes this rank's part.

    Tensors are contiguous and on one device. The function launches on the current stream and does not wait; the caller
    keeps the tensors until that stream is past this point. See `Kernel.prepare`.
    """
    parts = (*add, message.numel() // add[1] // 16) if add else (0, 0, 0)
    num_rows = own[1] - own[0] if add else places.numel() // 4
    return _prepare(_quantize_kernel, num_rows, rows, message, places, feedback, *own, *parts, ADD=bool(add))


def prepare_decode(rows: Tensor, message: Tensor, places: Tensor) -> Callable[[], None]:
    """A function: rows <- message, rounded to fp32, then to the dtype of `rows`. See `prepare_quantize`."""
    return _prepare(_decode_kernel, places.numel() // 4, rows, message, places)


def _prepare(
    kernel: Kernel, num_rows: int, rows: Tensor, message: Tensor, places: Tensor, *args: Any, **constants: Any
) -> Callable[[], None]:
    tensors = places, places.numel() // 4, rows, message.view(torch.int8), message.view(torch.float32)
    constants |= {"ROWS": CHUNK_NUMEL // ROW, "ROW": ROW, "num_warps": NUM_WARPS, **register_limit(rows.device)}
    return kernel.prepare(rows.device, max(1, -(-num_rows * ROW // CHUNK_NUMEL)), *tensors, *args, **constants)
