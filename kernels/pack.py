# SPDX-License-Identifier: Apache-2.0
"""Pack: gradients of any number and size into one wire buffer, scaled and cast, in one launch.

Example: gradients fp32 [1, 2] and [3], wire offsets 0 and 32, scale 0.5, fp16 wire
    wire[0:2] = [0.5, 1.0], wire[32] = 1.5; elements that belong to no gradient are left as they are.

`reference.pack` is the CPU path and the oracle; results are bit-identical to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, no_type_check

from torch import Tensor

from . import reference
from .chunks import ChunkTable
from .lazy import lazy_jit, runs_on_triton, triton_dtype

if TYPE_CHECKING:
    import triton.language as tl


@lazy_jit(do_not_specialize=("address", "wire_offset", "numel"))
@no_type_check
def _pack_kernel(
    address,  # [C] int64 IN: where chunk c's first element lies; columns belong to the ChunkTable
    wire_offset,  # [C] int64 IN: where it goes, in elements of `wire`; a multiple of 64 bytes
    numel,  # [C] int64 IN: elements in chunk c, at most CHUNK
    wire,  # [W] OUT: the bucket's buffer, at a multiple of 16 bytes; belongs to the caller
    scale: tl.float64,  # usually 1 / world size; fp64 so that fp64 gradients lose nothing
    SOURCE: tl.constexpr,  # dtype of the gradients
    COMPUTE: tl.constexpr,  # fp32, or fp64 where either side is
    CHUNK: tl.constexpr,
):
    chunk = tl.program_id(0)
    begin = tl.load(address + chunk)
    count = tl.load(numel + chunk)
    target = wire + tl.multiple_of(tl.load(wire_offset + chunk), 8)
    factor = tl.full([], scale, COMPUTE)
    # torch goes from fp64 to 16 bits by way of fp32; so must this, to round alike.
    ROUNDED: tl.constexpr = tl.float64 if wire.dtype.element_ty == tl.float64 else tl.float32
    lane = tl.arange(0, CHUNK)
    if begin % 16 == 0:
        # 128 bits at a time needs an aligned address and a mask that never splits a vector: a multiple of 16 elements
        # first, the last 0 to 15 apart.
        grad = tl.multiple_of(begin.to(tl.pointer_type(SOURCE)), 16)
        whole = count // 16 * 16
        values = tl.load(grad + lane, mask=lane < whole).to(COMPUTE) * factor
        tl.store(target + lane, values.to(ROUNDED).to(wire.dtype.element_ty), mask=lane < whole)
        rest = whole + tl.arange(0, 16)
        last = tl.load(grad + rest, mask=rest < count).to(COMPUTE) * factor
        tl.store(target + rest, last.to(ROUNDED).to(wire.dtype.element_ty), mask=rest < count)
    else:
        odd = begin.to(tl.pointer_type(SOURCE))
        single = tl.load(odd + lane, mask=lane < count).to(COMPUTE) * factor
        tl.store(target + lane, single.to(ROUNDED).to(wire.dtype.element_ty), mask=lane < count)


def pack(tensors: Sequence[Tensor], wire: Tensor, table: ChunkTable, *, scale: float = 1.0) -> None:
    """wire[table.wire_offsets[i] + k] <- cast(scale * element k, in memory order, of tensors[i]).

    tensors: as `table` describes them, on one device and of one dtype: fp16, bf16, fp32 or fp64. Any address works;
        tensors at multiples of 16 bytes are read 128 bits at a time.
    wire: 1-D, contiguous, at least table.wire_numel elements of table.wire_dtype.
    The product is fp32 (fp64 if either side is fp64) and rounded once. Runs on the current stream and does not wait;
    the caller keeps tensors, wire and table until that stream is past this point.
    Raises ValueError or TypeError for what does not fit the table.
    """
    table.check_wire(wire)
    if not runs_on_triton(wire.device):
        table.check_tensors(tensors)
        reference.pack(tensors, table.views_like(tensors, wire), scale=scale)
        return
    table.point_at(tensors)
    if table.num_chunks:
        _pack_kernel.launch(
            wire.device,
            table.num_chunks,
            table.address,
            table.wire_offset,
            table.numel,
            wire,
            scale,
            SOURCE=triton_dtype(tensors[0].dtype),
            COMPUTE=triton_dtype(reference.compute_dtype(tensors[0].dtype, wire.dtype)),
            CHUNK=table.chunk_numel,
            num_warps=table.num_warps,
        )
