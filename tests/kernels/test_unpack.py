import pytest
import torch

from tests.kernels.test_interpreter import DEVICES, DTYPES, cast
from tests.kernels.test_pack import NUMELS, offsets_for, random_tensors
from tests.support.checks import assert_bitwise
from tests.support.grids import grid
from torchring.kernels import ChunkTable, lazy, pack, reference, unpack
from torchring.kernels.chunks import layout


@pytest.mark.parametrize("device", DEVICES)
def test_worked_example(device: str) -> None:
    table = ChunkTable([2, 1], [0, 32], wire_dtype=torch.float16, device=device)
    wire = torch.full((33,), 9.0, dtype=torch.float16, device=device)
    wire[0], wire[1], wire[32] = 1.5, 2.0, 2.5
    grads = [torch.zeros(2, device=device), torch.zeros(1, device=device)]
    unpack(wire, grads, table, scale=2)
    assert [grad.tolist() for grad in grads] == [[3.0, 4.0], [5.0]]


@pytest.mark.parametrize("device", DEVICES)
@grid("dtype, wire_dtype, shift", DTYPES, DTYPES, [0, 1])
def test_bitwise_and_nothing_else_written(dtype: torch.dtype, wire_dtype: torch.dtype, shift: int, device: str) -> None:
    offsets = offsets_for(NUMELS, wire_dtype)
    table = ChunkTable(NUMELS, offsets, wire_dtype=wire_dtype, device=device)
    wire = random_tensors([table.wire_numel], wire_dtype, device)[0]
    before = wire.clone()
    # A guard element on either side of every tensor; with shift 1 no tensor is aligned.
    guarded = [torch.full((shift + n + 1,), 7.0, dtype=dtype, device=device) for n in NUMELS]
    tensors = [whole[shift:-1] for whole in guarded]
    unpack(wire, tensors, table, scale=1 / 3)
    compute = reference.compute_dtype(dtype, wire_dtype)
    for whole, offset, numel in zip(guarded, offsets, NUMELS, strict=True):
        expected = torch.full((shift + numel + 1,), 7.0, dtype=dtype)
        product = wire[offset : offset + numel].cpu().to(compute) * torch.tensor(1 / 3, dtype=compute)
        expected[shift : shift + numel] = cast(product, dtype)
        assert_bitwise(whole.cpu(), expected)
    assert_bitwise(wire, before)


@pytest.mark.parametrize("device", DEVICES)
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


def test_which_path_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("the torch path")

    monkeypatch.setattr(reference, "unpack", fail)
    table = ChunkTable([1], [0], wire_dtype=torch.float32, device="cpu")
    if lazy.INTERPRETED:
        unpack(torch.zeros(1), [torch.ones(1)], table)
    else:
        with pytest.raises(AssertionError, match="the torch path"):
            unpack(torch.zeros(1), [torch.ones(1)], table)


def test_refused() -> None:
    table = ChunkTable([4], [0], wire_dtype=torch.float32, device="cpu")
    with pytest.raises(ValueError, match=r"tensor 0 should have 4 elements, got shape \(2,\)"):
        unpack(torch.zeros(4), [torch.ones(2)], table)
    with pytest.raises(TypeError, match=r"built for a wire of torch\.float32, got torch\.bfloat16"):
        unpack(torch.zeros(4, dtype=torch.bfloat16), [torch.ones(4)], table)
