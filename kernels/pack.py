"""Pack and unpack: gradients of any number and size into one wire buffer, and back, scaled and cast, in one launch.

Example: gradients fp32 [1, 2] and [3], wire offsets 0 and 32, scale 0.5, fp16 wire
    wire[0:2] = [0.5, 1.0], wire[32] = 1.5; elements that belong to no gradient are left as they are.
    With 2e38 instead of 2, wire[1] is infinite, and `found` becomes [0, 0], twice the index of the chunk of [1, 2].
    With 6e4 instead of 2, wire[1] is 3e4: two of its kind do not fit fp16. For 2 ranks `found` becomes [NOT_FOUND, 0].
    Unpacked, the gradients are [0.5, 1.0] and [1.5].

`reference.pack` and `reference.unpack` are the oracle; results are bit-identical to theirs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, no_type_check

import torch
from torch import Tensor

from . import reference
from .chunks import CHUNK_NUMEL, NUM_WARPS, ChunkTable
from .launching import register_limit
from .lazy import lazy_jit, triton_dtype

if TYPE_CHECKING:
    import triton.language as tl


NOT_FOUND = 2**31 - 1  # the caller writes this value to `found` before the launch


@lazy_jit()
@no_type_check
def look(found, chunk, written, mask, limit, COMPUTE: tl.constexpr):
    """Report `chunk` if an element of `written` with a true `mask` exceeds `limit`, and if one is not finite."""
    size = tl.abs(written.to(COMPUTE))
    large = tl.max((mask & ((size <= limit) == 0)).to(tl.int32), 0)  # so is NaN, which is not smaller than anything
    if large != 0:
        tl.atomic_min(found + 1, chunk, sem="relaxed")
        bad = tl.max((mask & ((size < float("inf")) == 0)).to(tl.int32), 0)
        if bad != 0:
            tl.atomic_min(found, chunk, sem="relaxed")


@lazy_jit()
@no_type_check
def move(grad, place, lane, mask, factor, COMPUTE: tl.constexpr, PACK: tl.constexpr):
    """Copy these elements of the gradient to their place in the wire; if not PACK, back. Returns what was written."""
    if PACK:
        source, target = grad, place
    else:
        source, target = place, grad
    # torch casts fp64 to 16 bits by way of fp32. This kernel must do the same, to round alike.
    ROUNDED: tl.constexpr = tl.float64 if target.dtype.element_ty == tl.float64 else tl.float32
    values = tl.load(source + lane, mask=mask).to(COMPUTE) * factor
    written = values.to(ROUNDED).to(target.dtype.element_ty)
    tl.store(target + lane, written, mask=mask)
    return written


@lazy_jit(do_not_specialize=("address", "wire_offset", "numel", "found"), uses=(look, move))
@no_type_check
def _pack_kernel(
    address,  # [C] int64 IN: address of chunk c's first element; columns belong to the ChunkTable
    wire_offset,  # [C] int64 IN: the element's place in `wire`, in elements; a multiple of 64 bytes
    numel,  # [C] int64 IN: elements in chunk c, at most CHUNK
    wire,  # [W] OUT, or IN if not PACK: the bucket's buffer, at a multiple of 16 bytes; belongs to the caller
    scale: tl.float64,  # usually 1 / world size; fp64 so that fp64 gradients lose nothing
    limit: tl.float64,  # a larger value may overflow in the sum over ranks
    found,  # [2] int32 IN and OUT: lowered to the lowest chunk that is not finite, or too large; None without CHECK
    GRADIENT: tl.constexpr,  # dtype of the gradients
    COMPUTE: tl.constexpr,  # fp32, or fp64 where either side is
    CHUNK: tl.constexpr,
    CHECK: tl.constexpr,
    PACK: tl.constexpr,
):
    chunk = tl.program_id(0)
    begin = tl.load(address + chunk)
    count = tl.load(numel + chunk)
    place = wire + tl.multiple_of(tl.load(wire_offset + chunk), 8)
    factor = tl.full([], scale, COMPUTE)
    most = tl.full([], limit, COMPUTE)
    lane = tl.arange(0, CHUNK)
    if begin % 16 == 0:
        # 128 bits at a time need an aligned address, and a mask that never splits a vector. So first a multiple of 16
        # elements, then the last 0 to 15 elements.
        grad = tl.multiple_of(begin.to(tl.pointer_type(GRADIENT)), 16)
        whole = count // 16 * 16
        written = move(grad, place, lane, lane < whole, factor, COMPUTE, PACK)
        rest = whole + tl.arange(0, 16)
        end = move(grad, place, rest, rest < count, factor, COMPUTE, PACK)
        if CHECK:
            look(found, chunk, written, lane < whole, most, COMPUTE)
            look(found, chunk, end, rest < count, most, COMPUTE)
    else:
        odd = begin.to(tl.pointer_type(GRADIENT))
        rounded = move(odd, place, lane, lane < count, factor, COMPUTE, PACK)
        if CHECK:
            look(found, chunk, rounded, lane < count, most, COMPUTE)


def prepare_pack(
    wire: Tensor,
    table: ChunkTable,
    dtype: torch.dtype,
    *,
    scale: float = 1.0,
    found: Tensor | None = None,
    num_ranks: int = 1,
) -> Callable[[Sequence[Tensor]], None]:
    """A function f(tensors): wire[table.wire_offsets[i] + k] <- cast(scale * element k, in memory order, of tensor i).

    tensors: tensors that `table` describes, on one device, and of `dtype`: fp16, bf16, fp32 or fp64. Any address works.
        Tensors at multiples of 16 bytes are read 128 bits at a time. May be their own places in the wire.
    wire: 1-D, contiguous, long enough for the places of all tensors.
    found: int32 [2] on the table's device, `NOT_FOUND` or less; None: nothing is looked at. The first number is lowered
        to the first chunk in which a value, as written, is NaN or infinite, also by overflow. The second is lowered to
        the first chunk in which a value is that, or so large that the sum over `num_ranks` ranks may overflow: more
        than max / (2 * num_ranks) of the wire's dtype. `table.tensor_of` gives the tensor.

    The product is fp32 (fp64 if either side is fp64) and rounded once. f launches on the current stream and does not
    wait; the caller keeps tensors, wire and table until that stream is past this point. See `Kernel.prepare`.
    f raises ValueError or TypeError for tensors that do not fit the table.
    """
    limit = torch.finfo(wire.dtype).max / (2 * num_ranks)
    return _prepare(wire, table, dtype, (scale, limit, found), CHECK=found is not None, PACK=True)


def prepare_unpack(wire: Tensor, table: ChunkTable, dtype: torch.dtype) -> Callable[[Sequence[Tensor]], None]:
    """The reverse of `prepare_pack`, a function f(tensors): element k of tensor i <- cast(wire[...]), unscaled."""
    return _prepare(wire, table, dtype, (1.0, 0.0, None), CHECK=False, PACK=False, **register_limit(wire.device))


def _prepare(
    wire: Tensor, table: ChunkTable, dtype: torch.dtype, scalars: tuple[Any, ...], **options: Any
) -> Callable[[Sequence[Tensor]], None]:
    table.check_dtype(dtype)
    launch = _pack_kernel.prepare(
        wire.device,
        table.num_chunks,
        *(table.address, table.wire_offset, table.numel, wire, *scalars),
        GRADIENT=triton_dtype(dtype),
        COMPUTE=triton_dtype(reference.compute_dtype(dtype, wire.dtype)),
        CHUNK=CHUNK_NUMEL,
        num_warps=NUM_WARPS,
        **options,
    )
    return partial(table.launch_at, dtype=dtype, launch=launch)
