"""Quantize, add and decode: rows of 256 values as 8-bit integers and one scale each, in one launch for a whole buffer.

Example: a row [254, -4, 5, 0.5, 0, 0, ...], its feedback [0, 0.5, 0, 0, 0, ...], weight 2
    quantize  -> of [254, -3, 5, 0.5, 0, ...]: scale 2, codes [127, -2, 2, 0, 0, ...]; -1.5 and 2.5 are rounded to even
                 feedback [0, 0.5, 0.5, 0.25, 0, ...], which is what was lost, divided by the weight
    add       -> to [1, 1, 1, 1, 1, ...]: [255, -3, 5, 1, 1, ...]
    decode    -> [254, -4, 4, 0, 0, ...]

`reference_quantize` is the oracle. A product and the sum with it are rounded once, together (fused multiply-add), as
in torch's own operations on CPUs with AVX2 or AVX-512.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, no_type_check

from torch import Tensor

from .chunks import CHUNK_NUMEL, NUM_WARPS
from .launching import register_limit
from .lazy import Kernel, lazy_jit

if TYPE_CHECKING:
    import triton.language as tl

ROW = 256


@lazy_jit()
@no_type_check
def rows_of_program(num_rows, ROWS: tl.constexpr, ROW: tl.constexpr):
    """[ROWS, 1] int64: this program's rows; [ROWS, 1] int1: which of them exist; [ROWS, ROW] int64: their elements."""
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS))[:, None].to(tl.int64)
    return row, row < num_rows, row * ROW + tl.arange(0, ROW)[None, :]


@lazy_jit(do_not_specialize=("num_rows", "weight"), uses=(rows_of_program,))
@no_type_check
def _quantize_kernel(
    num_rows: tl.int32,
    rows,  # [num_rows, ROW] IN: fp32, fp16 or bf16; all four belong to the caller
    codes,  # [num_rows, ROW] int8 OUT
    scales,  # [num_rows] fp32 OUT
    feedback,  # [num_rows, ROW] fp32 IN and OUT, or None
    weight: tl.float32,
    ROWS: tl.constexpr,
    ROW: tl.constexpr,
):
    row, mask, element = rows_of_program(num_rows, ROWS, ROW)
    values = tl.load(rows + element, mask=mask, other=0.0).to(tl.float32)
    if feedback is not None:
        factor = tl.full([], weight, tl.float32)
        values = tl.fma(tl.load(feedback + element, mask=mask, other=0.0), factor, values)
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
    tl.store(codes + element, rounded.to(tl.int8), mask=mask)
    tl.store(scales + row, scale, mask=mask)
    if feedback is not None:
        lost = tl.div_rn(tl.fma(-rounded, scale, values), factor)
        tl.store(feedback + element, lost, mask=mask & is_finite)


@lazy_jit(do_not_specialize=("num_rows",), uses=(rows_of_program,))
@no_type_check
def _decode_kernel(
    num_rows: tl.int32,
    codes,  # [num_rows, ROW] int8 IN; all three belong to the caller
    scales,  # [num_rows] fp32 IN
    rows,  # [num_rows, ROW] OUT: fp32, fp16 or bf16; to ADD fp32, IN and OUT
    ROWS: tl.constexpr,
    ROW: tl.constexpr,
    ADD: tl.constexpr,
):
    row, mask, element = rows_of_program(num_rows, ROWS, ROW)
    scale = tl.load(scales + row, mask=mask, other=0.0)
    code = tl.load(codes + element, mask=mask, other=0).to(tl.float32)
    values = tl.fma(code, scale, tl.load(rows + element, mask=mask, other=0.0)) if ADD else code * scale
    tl.store(rows + element, values.to(rows.dtype.element_ty), mask=mask)


def prepare_quantize(
    rows: Tensor, codes: Tensor, scales: Tensor, feedback: Tensor | None = None, weight: float = 1.0
) -> Callable[[], None]:
    """A function: codes, scales <- rows + weight * feedback; feedback <- what is lost, divided by `weight`.

    rows: [R, 256] fp32, fp16 or bf16; not modified.
    codes, scales, feedback, weight: as for `reference_quantize.quantize_rows`. Codes of a row that is not finite are 0.

    All tensors are contiguous and on one device. Any address works. Tensors at multiples of 16 bytes are read and
    written 128 bits at a time. The function launches on the current stream and does not wait; the caller keeps the
    tensors until that stream is past this point. See `Kernel.prepare`.
    """
    return _prepare(_quantize_kernel, scales, rows, codes, scales, feedback if weight else None, weight)


def prepare_add(total: Tensor, codes: Tensor, scales: Tensor) -> Callable[[], None]:
    """A function: total += codes * scales. total: fp32 [R, 256]; otherwise as `prepare_quantize`."""
    return _prepare(_decode_kernel, scales, codes, scales, total, ADD=True)


def prepare_decode(codes: Tensor, scales: Tensor, rows: Tensor) -> Callable[[], None]:
    """A function: rows <- codes * scales, rounded to fp32, then to the dtype of `rows`. See `prepare_quantize`."""
    return _prepare(_decode_kernel, scales, codes, scales, rows, ADD=False)


def _prepare(kernel: Kernel, scales: Tensor, *args: Any, **constants: bool) -> Callable[[], None]:
    num_rows, rows = scales.numel(), CHUNK_NUMEL // ROW
    options = {**constants, **register_limit(scales.device)}
    programs = -(-num_rows // rows)
    return kernel.prepare(scales.device, programs, num_rows, *args, ROWS=rows, ROW=ROW, num_warps=NUM_WARPS, **options)
