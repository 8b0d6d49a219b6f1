import torch

from tests.kernels.test_pack import NUMELS, offsets_for, random_tensors
from tests.support.checks import assert_bitwise
from tests.support.grids import grid
from tests.support.kernels import DTYPES, on_each_device, pack, sum_in_order, unpack
from torchring.kernels.chunks import ChunkTable, layout


@on_each_device
def test_worked_example(device: str) -> None:
    table = ChunkTable([2, 1], [0, 32], wire_dtype=torch.float16, device=device)
    wire = torch.full((33,), 9.0, dtype=torch.float16, device=device)
    wire[0], wire[1], wire[32] = 1.5, 2.0, 2.5
    grads = [torch.zeros(2, device=device), torch.zeros(1, device=device)]
    unpack(wire, grads, table)
    assert [grad.tolist() for grad in grads] == [[1.5, 2.0], [2.5]]


@on_each_device
@grid("dtype, wire_dtype, shift", DTYPES, DTYPES, [0, 1])
def test_bitwise_and_nothing_else_written(dtype: torch.dtype, wire_dtype: torch.dtype, shift: int, device: str) -> None:
    offsets = offsets_for(NUMELS, wire_dtype)
    table = ChunkTable(NUMELS, offsets, wire_dtype=wire_dtype, device=device)
    wire = random_tensors([table.wire_numel], wire_dtype, device)[0]
    before = wire.clone()
    # A guard element on either side of every tensor; with shift 1 no tensor is aligned.
    guarded = [torch.full((shift + n + 1,), 7.0, dtype=dtype, device=device) for n in NUMELS]
    tensors = [whole[shift:-1] for whole in guarded]
    unpack(wire, tensors, table)
    for whole, offset, numel in zip(guarded, offsets, NUMELS, strict=True):
        expected = torch.full((shift + numel + 1,), 7.0, dtype=dtype)
        expected[shift : shift + numel] = sum_in_order([wire[offset : offset + numel]], dtype, 1.0)
        assert_bitwise(whole.cpu(), expected)
    assert_bitwise(wire, before)


@on_each_device
def test_pack_then_unpack_gives_every_value_back(device: str) -> None:
    image = torch.randn(4, 3, 5, 5).to(device).to(memory_format=torch.channels_last)
    matrix = torch.randn(70, 61).to(device)
    layouts = [layout(image), layout(matrix)]
    table = ChunkTable([300, 4270], [0, 304], wire_dtype=torch.float32, device=device, layouts=layouts)
    wire = torch.zeros(table.wire_numel, device=device)
    back = [torch.zeros_like(image), torch.zeros_like(matrix)]
    pack([image, matrix], wire, table)
    unpack(wire, back, table)
    assert_bitwise(back[0], image)
    assert_bitwise(back[1], matrix)
