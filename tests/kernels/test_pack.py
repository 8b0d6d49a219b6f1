import functools
from pathlib import Path

import pytest
import torch

from tests.support import kernels
from tests.support.checks import assert_bitwise
from tests.support.grids import grid
from torchring.kernels.pack import NOT_FOUND

NUMELS = [0, 1, 3, 4095, 4096, 4097, 8209, 0, 17]
WIRE_NUMEL = sum(NUMELS) + 300  # whatever the dtype, and some more


def offsets_for(numels: list[int], dtype: torch.dtype) -> list[int]:
    """Each tensor at the next multiple of 64 bytes."""
    step, offsets, end = 64 // dtype.itemsize, [], 0
    for numel in numels:
        offsets.append(end)
        end += -(-numel // step) * step
    return offsets


def random_tensors(numels: list[int], dtype: torch.dtype, device: str, *, shift: int = 0) -> list[torch.Tensor]:
    """Every tensor `shift` elements behind the start of an allocation of its own."""
    generator = torch.Generator().manual_seed(len(numels) + shift)
    return [torch.randn(n + shift, generator=generator).to(device, dtype)[shift:] for n in numels]


@kernels.where_triton_runs
def test_worked_example(device: str) -> None:
    table = kernels.table_of([2, 1], [0, 32], device)
    wire = torch.full((33,), 9.0, dtype=torch.float16, device=device)
    grads = [torch.tensor([1.0, 2.0], device=device), torch.tensor([3.0], device=device)]
    kernels.pack(grads, wire, table, scale=0.5)
    assert wire.tolist() == [0.5, 1.0, *[9.0] * 30, 1.5]
    kernels.unpack(wire, grads, table)
    assert [grad.tolist() for grad in grads] == [[0.5, 1.0], [1.5]]


@kernels.where_triton_runs
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize(
    ("tensor", "index", "value", "chunk", "is_finite"),
    [
        (3, 0, kernels.NAN, 2, False),  # NUMELS[3] is 4095
        (5, 4095, kernels.INF, 4, False),  # 4097: a whole chunk, and one of a single element
        (5, 4096, -kernels.INF, 5, False),
        (6, 8208, kernels.NAN, 8, False),
        (8, 16, 1e6, 9, False),  # too much for fp16
        (8, 16, -2e4, 9, True),  # two of them are too much for fp16, in the middle of rounding
        (8, 16, 1.6e4, NOT_FOUND, True),
    ],
)
def test_the_first_chunk_that_is_not_finite_or_too_large(
    tensor: int, index: int, value: float, chunk: int, is_finite: bool, shift: int, device: str
) -> None:
    found = torch.full((2,), NOT_FOUND, dtype=torch.int32, device=device)
    look = functools.partial(kernels.pack, found=found, num_ranks=2)
    table = kernels.table_of(NUMELS, offsets_for(NUMELS, torch.float16), device)
    grads = random_tensors(NUMELS, torch.float32, device, shift=shift)
    wire = torch.zeros(WIRE_NUMEL, dtype=torch.float16, device=device)
    look(grads, wire, table)
    assert found.tolist() == [NOT_FOUND] * 2
    grads[tensor][index] = value
    look(grads, wire, table)
    assert found.tolist() == [NOT_FOUND if is_finite else chunk, chunk]
    if chunk != NOT_FOUND:
        assert table.tensor_of(chunk) == tensor
    grads[1][0] = kernels.NAN
    look(grads, wire, table)
    assert (found.tolist(), table.tensor_of(0)) == ([0, 0], 1)
    grads[1][0] = 1.0
    look(grads, wire, table)
    assert found.tolist() == [0, 0]  # never raised again


@kernels.where_triton_runs
def test_gradients_in_the_wire_are_scaled_and_looked_at(device: str) -> None:
    offsets = offsets_for(NUMELS, torch.float32)
    table, wire = kernels.table_of(NUMELS, offsets, device), torch.ones(WIRE_NUMEL, device=device)
    grads = [wire[offset : offset + numel] for offset, numel in zip(offsets, NUMELS, strict=True)]
    grads[6][8208] = kernels.NAN
    found = torch.full((2,), NOT_FOUND, dtype=torch.int32, device=device)
    kernels.pack(grads, wire, table, scale=0.5, found=found)
    assert found.tolist() == [8, 8]
    assert sum(float(grad.nansum()) for grad in grads) == (sum(NUMELS) - 1) / 2


@kernels.where_triton_runs
def test_an_element_of_no_tensor_is_not_looked_at(device: str) -> None:
    table = kernels.table_of([2, 1], [0, 32], device)
    wire = torch.full((40,), kernels.NAN, dtype=torch.float16, device=device)
    found = torch.full((2,), NOT_FOUND, dtype=torch.int32, device=device)
    grads = [torch.tensor([1.0, 2e38], device=device), torch.ones(1, device=device)]
    kernels.pack(grads[::-1], wire, kernels.table_of([1, 2], [32, 0], device), scale=0, found=found)
    assert found.tolist() == [NOT_FOUND] * 2
    kernels.pack(grads, wire, table, scale=0.5, found=found)
    assert found.tolist() == [0, 0]


@kernels.where_triton_runs
@grid("dtype, wire_dtype, shift", kernels.DTYPES, kernels.DTYPES, [0, 1])
def test_bitwise_and_nothing_else_written(dtype: torch.dtype, wire_dtype: torch.dtype, shift: int, device: str) -> None:
    offsets = offsets_for(NUMELS, wire_dtype)
    table = kernels.table_of(NUMELS, offsets, device)
    tensors = random_tensors(NUMELS, dtype, device, shift=shift)
    wire = torch.full((WIRE_NUMEL,), 7.0, dtype=wire_dtype, device=device)
    kernels.pack(tensors, wire, table, scale=1 / 3)
    expected = torch.full((WIRE_NUMEL,), 7.0, dtype=wire_dtype)
    for tensor, offset in zip(tensors, offsets, strict=True):
        expected[offset : offset + tensor.numel()] = kernels.sum_in_order([tensor], wire_dtype, 1 / 3)
    assert_bitwise(wire.cpu(), expected)
    # A guard element on either side of every tensor; with shift 1 no tensor is aligned.
    guarded = [torch.full((shift + n + 1,), 7.0, dtype=dtype, device=device) for n in NUMELS]
    kernels.unpack(wire, [whole[shift:-1] for whole in guarded], table)
    for whole, offset, numel in zip(guarded, offsets, NUMELS, strict=True):
        back = torch.full((shift + numel + 1,), 7.0, dtype=dtype)
        back[shift : shift + numel] = kernels.sum_in_order([wire[offset : offset + numel]], dtype, 1.0)
        assert_bitwise(whole.cpu(), back)
    assert_bitwise(wire.cpu(), expected)


@kernels.needs_interpreter
def test_wire_offsets_beyond_32_bits(tmp_path: Path) -> None:
    far = 2**31 + 64  # elements; the file is sparse, so the 4 GiB are address space only
    wire = torch.from_file(str(tmp_path / "wire"), shared=True, size=far + 3, dtype=torch.float16)
    kernels.pack([torch.tensor([1.0, 2.0, 3.0])], wire, kernels.table_of([3], [far]))
    assert wire[far:].tolist() == [1.0, 2.0, 3.0]
