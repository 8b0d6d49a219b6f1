"""Unpack: the reduced wire buffer back into gradients of any number and size, cast, in one launch.

Example: fp16 wire with [1.5, 2.0] at offset 0 and [2.5] at offset 32, fp32 gradients of 2 and 1 elements
    gradients = [1.5, 2.0] and [2.5]

`reference.unpack` is the CPU path and the oracle; results are bit-identical to it. `pack.py` is this file's mirror.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, no_type_check

import torch
from torch import Tensor

from . import reference
from .chunks import ChunkTable
from .launching import register_limit
from .lazy import lazy_jit, runs_on_triton, triton_dtype

if TYPE_CHECKING:
    import triton.language as tl


@lazy_jit(do_not_specialize=("address", "wire_offset", "numel"))
@no_type_check
def _unpack_kernel(
    wire,  # [W] IN: the bucket's buffer, at a multiple of 16 bytes; belongs to the caller
    address,  # [C] int64 IN: target address of chunk c's first element; columns belong to the ChunkTable
    wire_offset,  # [C] int64 IN: the element's place in `wire`, in elements; a multiple of 64 bytes
    numel,  # [C] int64 IN: elements in chunk c, at most CHUNK
    TARGET: tl.constexpr,  # dtype of the gradients
    CHUNK: tl.constexpr,
):
    chunk = tl.program_id(0)
    begin = tl.load(address + chunk)
    count = tl.load(numel + chunk)
    source = wire + tl.multiple_of(tl.load(wire_offset + chunk), 8)
    # torch casts fp64 to 16 bits by way of fp32. This kernel must do the same, to round alike.
    ROUNDED: tl.constexpr = tl.float64 if tl.float64 == TARGET else tl.float32
    lane = tl.arange(0, CHUNK)
    if begin % 16 == 0:
        # As in pack: first a multiple of 16 elements, 128 bits at a time, then the last 0 to 15 elements.
        grad = tl.multiple_of(begin.to(tl.pointer_type(TARGET)), 16)
        whole = count // 16 * 16
        values = tl.load(source + lane, mask=lane < whole)
        tl.store(grad + lane, values.to(ROUNDED).to(TARGET), mask=lane < whole)
        rest = whole + tl.arange(0, 16)
        last = tl.load(source + rest, mask=rest < count)
        tl.store(grad + rest, last.to(ROUNDED).to(TARGET), mask=rest < count)
    else:
        odd = begin.to(tl.pointer_type(TARGET))
        single = tl.load(source + lane, mask=lane < count)
        tl.store(odd + lane, single.to(ROUNDED).to(TARGET), mask=lane < count)


def prepare_unpack(wire: Tensor, table: ChunkTable, dtype: torch.dtype) -> Callable[[Sequence[Tensor]], None]:
    """A function f(tensors): element k, in memory order, of tensors[i] <- cast(wire[table.wire_offsets[i] + k]).

    wire: 1-D, contiguous, at least table.wire_numel elements of table.wire_dtype; not modified.
    tensors: tensors that `table` describes, on one device, and of `dtype`; overwritten.
    Rounding, stream and ownership are those of `prepare_pack`.
    """
    if not runs_on_triton(wire.device):
        return lambda tensors: _unpack_by_torch(wire, tensors, table)
    table.check_dtype(dtype)
    launch = _unpack_kernel.prepare(
        wire.device,
        table.num_chunks,
        wire,
        table.address,
        table.wire_offset,
        table.numel,
        TARGET=triton_dtype(dtype),
        CHUNK=table.chunk_numel,
        num_warps=table.num_warps,
        **register_limit(wire.device),
    )
    return partial(table.launch_at, dtype=dtype, launch=launch)


def _unpack_by_torch(wire: Tensor, tensors: Sequence[Tensor], table: ChunkTable) -> None:
    table.check_tensors(tensors)
    reference.unpack(table.views_like(tensors, wire), tensors)
