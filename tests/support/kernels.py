"""What the kernels' tests run on, and how values are rounded there: see kernels/test_interpreter.py."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from torchring.kernels import lazy
from torchring.kernels.chunks import ChunkTable, Layout, layout
from torchring.kernels.pack import prepare_pack, prepare_unpack

F32, F16, B16, F64 = DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
INF, NAN = float("inf"), float("nan")

needs_interpreter = pytest.mark.skipif(not lazy.INTERPRETED, reason="runs in test_interpreter's child process")
_CUDA = pytest.param("cuda", marks=pytest.mark.gpu)
_CPU = pytest.param("cpu", marks=needs_interpreter)
where_triton_runs = pytest.mark.parametrize("device", [_CPU, _CUDA])
PTX = "cpu with PTX"  # the interpreter, with the inline PTX that NVIDIA GPUs run (support/ptx.py)
where_ranks_signal = pytest.mark.parametrize("device", [_CPU, pytest.param(PTX, marks=needs_interpreter), _CUDA])


def truncate_to_bfloat16(values: torch.Tensor) -> torch.Tensor:
    """Drops the lower 16 bits of fp32, as the interpreter does where a GPU (and torch) round to nearest even."""
    return (values.to(torch.float32).view(torch.int32) & -65536).view(torch.float32).to(torch.bfloat16)


def cast(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`values.to(dtype)` as whatever runs these tests rounds it."""
    if lazy.INTERPRETED and dtype == torch.bfloat16 and values.dtype != torch.bfloat16:
        return truncate_to_bfloat16(values)
    return values.to(dtype)


def sum_in_order(parts: list[torch.Tensor], dtype: torch.dtype, scale: float) -> torch.Tensor:
    """cast(scale * (parts[0] + parts[1] + ...)): one whole tensor at a time, through plain conversions only."""
    compute = F64 if F64 in (parts[0].dtype, dtype) else F32
    total = parts[0].cpu().to(compute)
    for part in parts[1:]:
        total = total + part.cpu().to(compute)
    return cast(total * torch.tensor(scale, dtype=compute), dtype)


def table_of(
    numels: Sequence[int], offsets: Sequence[int], device: str = "cpu", layouts: Sequence[Layout] | None = None
) -> ChunkTable:
    """Of contiguous tensors, unless `layouts` says otherwise."""
    contiguous = [layout(torch.empty(numel, device="meta")) for numel in numels]
    return ChunkTable(numels, offsets, device=device, layouts=layouts or contiguous)


def pack(tensors: list[torch.Tensor], wire: torch.Tensor, table: ChunkTable, **options: Any) -> None:
    prepare_pack(wire, table, tensors[0].dtype if tensors else wire.dtype, **options)(tensors)


def unpack(wire: torch.Tensor, tensors: list[torch.Tensor], table: ChunkTable) -> None:
    prepare_unpack(wire, table, tensors[0].dtype if tensors else wire.dtype)(tensors)
