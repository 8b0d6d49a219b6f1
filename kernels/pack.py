"""Pack: gradients of any number and size into one wire buffer, scaled and cast, in one launch.

Example: gradients fp32 [1, 2] and [3], wire offsets 0 and 32, scale 0.5, fp16 wire
    wire[0:2] = [0.5, 1.0], wire[32] = 1.5; elements that belong to no gradient are left as they are.
    With 2e38 instead of 2, wire[1] is infinite, and `found` becomes 0, the index of the chunk of [1, 2].

`reference.pack` is the CPU path and the oracle; results are bit-identical to it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, no_type_check

import torch
from torch import Tensor

from . import reference
from .chunks import ChunkTable
from .finite import NOT_FOUND, is_finite, report
from .lazy import lazy_jit, runs_on_triton, triton_dtype

if TYPE_CHECKING:
    import triton.language as tl


@lazy_jit(uses=(is_finite, report))
@no_type_check
def report_chunk(found, chunk, written, mask, COMPUTE: tl.constexpr):
    """Report `chunk` if an element of `written` with a true `mask` is not finite."""
    bad = tl.max((mask & (is_finite(written, COMPUTE) == 0)).to(tl.int32), 0)
    report(found, tl.where(bad != 0, chunk, 2147483647))


@lazy_jit(do_not_specialize=("address", "wire_offset", "numel", "found"), uses=(report_chunk,))
@no_type_check
def _pack_kernel(
    address,  # [C] int64 IN: address of chunk c's first element; columns belong to the ChunkTable
    wire_offset,  # [C] int64 IN: the element's place in `wire`, in elements; a multiple of 64 bytes
    numel,  # [C] int64 IN: elements in chunk c, at most CHUNK
    wire,  # [W] OUT: the bucket's buffer, at a multiple of 16 bytes; belongs to the caller
    scale: tl.float64,  # usually 1 / world size; fp64 so that fp64 gradients lose nothing
    found,  # [1] int32 IN and OUT: lowered to the lowest chunk that is not finite; None without CHECK
    SOURCE: tl.constexpr,  # dtype of the gradients
    COMPUTE: tl.constexpr,  # fp32, or fp64 where either side is
    CHUNK: tl.constexpr,
    CHECK: tl.constexpr,
):
    chunk = tl.program_id(0)
    begin = tl.load(address + chunk)
    count = tl.load(numel + chunk)
    target = wire + tl.multiple_of(tl.load(wire_offset + chunk), 8)
    factor = tl.full([], scale, COMPUTE)
    # torch casts fp64 to 16 bits by way of fp32. This kernel must do the same, to round alike.
    ROUNDED: tl.constexpr = tl.float64 if wire.dtype.element_ty == tl.float64 else tl.float32
    lane = tl.arange(0, CHUNK)
    if begin % 16 == 0:
        # 128 bits at a time need an aligned address, and a mask that never splits a vector. So first a multiple of 16
        # elements, then the last 0 to 15 elements.
        grad = tl.multiple_of(begin.to(tl.pointer_type(SOURCE)), 16)
        whole = count // 16 * 16
        values = tl.load(grad + lane, mask=lane < whole).to(COMPUTE) * factor
        written = values.to(ROUNDED).to(wire.dtype.element_ty)
        tl.store(target + lane, written, mask=lane < whole)
        rest = whole + tl.arange(0, 16)
        last = tl.load(grad + rest, mask=rest < count).to(COMPUTE) * factor
        end = last.to(ROUNDED).to(wire.dtype.element_ty)
        tl.store(target + rest, end, mask=rest < count)
        if CHECK:
            report_chunk(found, chunk, written, lane < whole, COMPUTE)
            report_chunk(found, chunk, end, rest < count, COMPUTE)
    else:
        odd = begin.to(tl.pointer_type(SOURCE))
        single = tl.load(odd + lane, mask=lane < count).to(COMPUTE) * factor
        rounded = single.to(ROUNDED).to(wire.dtype.element_ty)
        tl.store(target + lane, rounded, mask=lane < count)
        if CHECK:
            report_chunk(found, chunk, rounded, lane < count, COMPUTE)


def pack(
    tensors: Sequence[Tensor], wire: Tensor, table: ChunkTable, *, scale: float = 1.0, found: Tensor | None = None
) -> None:
    """wire[table.wire_offsets[i] + k] <- cast(scale * element k, in memory order, of tensors[i]).

    tensors: tensors that `table` describes, on one device and of one dtype: fp16, bf16, fp32 or fp64. Any address
        works. Tensors at multiples of 16 bytes are read 128 bits at a time.
    wire: 1-D, contiguous, at least table.wire_numel elements of table.wire_dtype.
    found: int32 [1] on the table's device, `finite.NOT_FOUND` or less. Lowered to the first chunk in which a value, as
        written, is NaN or infinite, also by overflow; `table.tensor_of` gives the tensor. None: nothing is checked.
    The product is fp32 (fp64 if either side is fp64) and rounded once. Runs on the current stream and does not wait;
    the caller keeps tensors, wire and table until that stream is past this point.
    Raises ValueError or TypeError for tensors or a wire that do not fit the table.
    """
    prepare_pack(wire, table, tensors[0].dtype if tensors else wire.dtype, scale=scale, found=found)(tensors)


def prepare_pack(
    wire: Tensor, table: ChunkTable, dtype: torch.dtype, *, scale: float = 1.0, found: Tensor | None = None
) -> Callable[[Sequence[Tensor]], None]:
    """`pack` of tensors of `dtype`, for many calls with one wire, table, scale and `found`: f(tensors).

    The wire and `found` are checked once; see `Kernel.prepare`. Errors are those of `pack`.
    """
    table.check_wire(wire)
    if found is not None and (found.dtype != torch.int32 or found.numel() != 1 or found.device != wire.device):
        raise ValueError(f"found must be int32 [1] on {wire.device}, got {found.dtype} {list(found.shape)}")
    if not runs_on_triton(wire.device):
        return lambda tensors: _pack_by_torch(tensors, wire, table, scale, found)
    table.check_dtype(dtype)
    launch = _pack_kernel.prepare(
        wire.device,
        table.num_chunks,
        table.address,
        table.wire_offset,
        table.numel,
        wire,
        scale,
        found,
        SOURCE=triton_dtype(dtype),
        COMPUTE=triton_dtype(reference.compute_dtype(dtype, wire.dtype)),
        CHUNK=table.chunk_numel,
        CHECK=found is not None,
        num_warps=table.num_warps,
    )
    return lambda tensors: table.launch_at(tensors, dtype, launch)


def _pack_by_torch(
    tensors: Sequence[Tensor], wire: Tensor, table: ChunkTable, scale: float, found: Tensor | None
) -> None:
    table.check_tensors(tensors)
    views = table.views_like(tensors, wire)
    reference.pack(tensors, views, scale=scale)
    if found is not None:
        found.clamp_(max=_first_not_finite(wire, table, views))


def _first_not_finite(wire: Tensor, table: ChunkTable, views: Sequence[Tensor]) -> int:
    """The first chunk with NaN or infinity; NOT_FOUND if all chunks are finite."""
    bad = next((i for i, view in enumerate(views) if not view.isfinite().all()), None)
    if bad is None:
        return NOT_FOUND
    for chunk in (table.tensor_index == bad).nonzero().flatten().tolist():
        begin, numel = int(table.wire_offset[chunk]), int(table.numel[chunk])
        if not wire[begin : begin + numel].isfinite().all():
            return int(chunk)
    raise AssertionError(f"tensor {bad} is finite in every chunk, but not as a whole")
