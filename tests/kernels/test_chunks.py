from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.kernels import unpack
from torchring.kernels.chunks import ChunkTable, layout

F32 = torch.float32


def build(numels: list[int], offsets: list[int], **options: object) -> ChunkTable:
    return ChunkTable(numels, offsets, **{"wire_dtype": F32, "device": "cpu", **options})  # type: ignore[arg-type]


def test_worked_example() -> None:
    table = build([5000, 3], [0, 5008])
    assert table.tensor_index.tolist() == [0, 0, 1]
    assert table.source_offset.tolist() == [0, 4096, 0]
    assert table.wire_offset.tolist() == [0, 4096, 5008]
    assert table.numel.tolist() == [4096, 904, 3]
    assert (table.num_chunks, table.wire_numel, table.num_refreshes) == (3, 5011, 0)
    assert [table.tensor_of(chunk) for chunk in range(3)] == [0, 0, 1]
    tensors = [torch.zeros(5000), torch.zeros(3)]
    table.point_at(tensors)
    base0, base1 = (tensor.data_ptr() for tensor in tensors)
    assert table.address.tolist() == [base0, base0 + 16384, base1]


@pytest.mark.parametrize("chunk_numel", [4096, 8192, 16384])
def test_every_element_belongs_to_exactly_one_chunk(chunk_numel: int) -> None:
    numels = [0, 1, 4095, 4096, 4097, 0, 50_021]
    offsets = [0, 0, 16, 4112, 8208, 12_320, 12_320]
    table = build(numels, offsets, chunk_numel=chunk_numel)
    seen = [torch.zeros(n, dtype=torch.int64) for n in numels]
    columns = (table.tensor_index, table.source_offset, table.wire_offset, table.numel)
    assert all(column.dtype == torch.int64 for column in (*columns, table.address))
    for index, source, wire, numel in zip(*(column.tolist() for column in columns), strict=True):
        assert 0 < numel <= chunk_numel
        assert wire - offsets[index] == source
        seen[index][source : source + numel] += 1
    for counts, numel in zip(seen, numels, strict=True):
        assert counts.tolist() == [1] * numel


def test_columns_hold_64_bits() -> None:
    numels, offsets = [2**31 + 5, 7], [0, 2**31 + 16]
    table = build(numels, offsets, wire_dtype=torch.float64)
    assert table.num_chunks == 2**31 // 4096 + 2
    assert table.source_offset[-2].item() == 2**31
    assert table.wire_offset[-1].item() == 2**31 + 16
    assert table.numel[-2:].tolist() == [5, 7]
    assert table.wire_numel == 2**31 + 23


def test_addresses_are_sent_only_when_one_changed() -> None:
    table = build([4, 4], [0, 16])
    first, second = [torch.zeros(4), torch.zeros(4)], [torch.zeros(4), torch.zeros(4)]
    for tensors, refreshes in [(first, 1), (first, 1), (second, 2), (second, 2), ([second[0], first[1]], 3)]:
        table.point_at(tensors)
        assert table.num_refreshes == refreshes
        assert table.address.tolist() == [tensor.data_ptr() for tensor in tensors]


def test_another_dtype_at_the_same_address_is_a_change() -> None:
    table = build([5000], [0])
    memory = torch.zeros(5000)
    for tensor, second_chunk in [(memory, 4096 * 4), (memory.half(), 4096 * 2), (memory.view(torch.float16), 4096 * 2)]:
        table.point_at([tensor[:5000]])
        assert (table.address - tensor.data_ptr()).tolist() == [0, second_chunk]


def test_a_tensor_that_changed_where_it_lies_is_looked_at_again() -> None:
    table, memory = build([6], [0]), torch.zeros(8)
    tensor = memory[:6].view(2, 3)
    table.point_at([tensor])
    for changed, message in [
        (tensor.t(), r"strides \(1, 3\), its wire view is contiguous"),
        (memory[:5], r"should have 6 elements, got shape \(5,\)"),
        (memory.view(torch.int32)[:6], r"tensors must have one of"),
    ]:
        assert changed.data_ptr() == tensor.data_ptr()
        with pytest.raises((ValueError, TypeError), match=message):
            table.point_at([changed])
    table.point_at([memory[:6]])  # another shape is another look, but no refusal, and no other address
    assert table.num_refreshes == 1
    tensor.resize_(2, 2)  # the same tensor, changed in place
    with pytest.raises(ValueError, match="should have 6 elements"):
        table.point_at([tensor])


def test_layout_is_memory_order() -> None:
    image = torch.zeros(2, 3, 4, 5)
    assert layout(image) == ((2, 60), (3, 20), (4, 5), (5, 1))
    assert layout(image.to(memory_format=torch.channels_last)) == ((2, 60), (3, 1), (4, 15), (5, 3))
    assert layout(torch.zeros(())) == ()
    # A dimension of one element may have any stride: both are the same three numbers in a row.
    assert layout(torch.zeros(3, 1)) == layout(torch.zeros(3, 1).as_strided((3, 1), (1, 77))) == ((3, 1),)


def test_memory_order_must_be_the_views() -> None:
    image = torch.zeros(2, 3, 4, 5)
    channels_last = image.to(memory_format=torch.channels_last)
    table = build([120], [0], layouts=[layout(channels_last)])
    table.point_at([channels_last])
    with pytest.raises(ValueError, match="memory order is what is copied"):
        table.point_at([image])
    with pytest.raises(ValueError, match=r"strides \(60, 1, 15, 3\), its wire view is contiguous"):
        build([120], [0]).point_at([channels_last])
    with pytest.raises(ValueError, match="memory order is what is copied"):
        unpack(torch.zeros(120), [image], table)


def test_tensors_of_two_dtypes_or_devices() -> None:
    table = build([4, 4], [0, 16])
    with pytest.raises(TypeError, match=r"tensor 0 has torch\.float32, tensor 1 has torch\.float16"):
        table.point_at([torch.zeros(4), torch.zeros(4).half()])
    with pytest.raises(ValueError, match="tensor 1 should be on cpu, got meta"):
        table.point_at([torch.zeros(4), torch.zeros(4, device="meta")])
    assert table.num_refreshes == 0


def test_a_prepared_launch_is_for_one_dtype() -> None:
    table, launched = build([4], [0]), []
    tensor = torch.zeros(4)
    table.launch_at([tensor], F32, lambda: launched.append(table.address.tolist()))
    with pytest.raises(TypeError, match=r"prepared for tensors of torch\.float32, got torch\.float16"):
        table.launch_at([tensor.half()], F32, lambda: launched.append([]))
    build([0], [0]).launch_at([torch.zeros(0)], F32, lambda: launched.append([]))
    assert launched == [[tensor.data_ptr()]]


@pytest.mark.gpu
def test_refresh_on_cuda_does_not_synchronise() -> None:
    table = build([4096, 5], [0, 4096], device="cuda")
    sets = [[torch.zeros(n, device="cuda") for n in (4096, 5)] for _ in range(2)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for tensors in sets:
            table.point_at(tensors)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert table.address.tolist() == [tensor.data_ptr() for tensor in sets[1]]


class _Copies(TorchDispatchMode):
    """Notes copies from the CPU to a device: from where, and whether the host would wait."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[torch.Tensor, bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result, kwargs = func(*args, **(kwargs or {})), kwargs or {}
        source = next((arg for arg in reversed(args) if isinstance(arg, torch.Tensor)), None)
        if source is not None and isinstance(result, torch.Tensor) and source.device != result.device:
            self.seen.append((source, kwargs.get("non_blocking", len(args) > 2 and args[2])))
        return result


def test_a_device_gets_its_columns_from_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy from other memory, or one that blocks, would make the host wait for the stream in mid-backward."""
    pinned: list[torch.Tensor] = []

    def pin(tensor: torch.Tensor) -> torch.Tensor:
        pinned.append(tensor.clone())
        return pinned[-1]

    monkeypatch.setattr(torch.Tensor, "pin_memory", pin)
    device = torch.device("meta")
    with _Copies() as copies:
        table = build([4, 5000], [0, 16], device=device)
        table.point_at([torch.zeros(4, device=device), torch.zeros(5000, device=device)])
    assert [(id(source), is_asynchronous) for source, is_asynchronous in copies.seen] == [(id(p), True) for p in pinned]
    assert [source.shape for source, _ in copies.seen] == [(3, 3), (3,)]
