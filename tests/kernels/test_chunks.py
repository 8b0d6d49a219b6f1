import pytest
import torch

from tests.support.kernels import F32, table_of
from torchring.kernels.chunks import layout


def test_every_element_belongs_to_exactly_one_chunk() -> None:
    numels = [0, 1, 4095, 4096, 4097, 0, 50_021]
    offsets = [0, 0, 16, 4112, 8208, 12_320, 12_320]
    table = table_of(numels, offsets)
    seen = [torch.zeros(n, dtype=torch.int64) for n in numels]
    columns = (table.tensor_index, table.source_offset, table.wire_offset, table.numel)
    assert all(column.dtype == torch.int64 for column in (*columns, table.address))
    for index, source, wire, numel in zip(*(column.tolist() for column in columns), strict=True):
        assert 0 < numel <= 4096
        assert wire - offsets[index] == source
        seen[index][source : source + numel] += 1
    for counts, numel in zip(seen, numels, strict=True):
        assert counts.tolist() == [1] * numel


def test_addresses_are_sent_only_when_one_changed() -> None:
    """To another dtype at the same address belong other places of the second chunk."""
    table, memory = table_of([5000, 4], [0, 5008]), torch.zeros(5000)
    first, second = [memory, torch.zeros(4)], [torch.zeros(5000), torch.zeros(4)]
    halves = [memory.view(torch.float16)[:5000], torch.zeros(4).half()]
    sent = 0
    for tensors in (first, first, second, second, [second[0], first[1]], first, halves, halves):
        version = table.address._version
        table.point_at(tensors)
        sent += table.address._version > version
        rows = [tensors[0].data_ptr(), tensors[0][4096:].data_ptr(), tensors[1].data_ptr()]
        assert table.address.tolist() == rows
    assert sent == 5


@pytest.mark.parametrize(
    ("error", "message", "tensors"),
    [
        (ValueError, "describes 2 tensors, got 1", [torch.ones(6)]),
        (ValueError, r"tensor 1 has .* \(\(5, 1\),\), its wire view \(\(6, 1\),\)", [torch.ones(6), torch.ones(5)]),
        (ValueError, "memory order is what is copied", [torch.ones(6), torch.ones(2, 3).t()]),
        (TypeError, r"tensors must have one of .* got torch.int32", [torch.ones(6).int()] * 2),
        (TypeError, r"tensor 0 has torch\.float32, tensor 1 has torch\.float16", [torch.ones(6), torch.ones(6).half()]),
        (ValueError, "tensor 1 should be on cpu, got meta", [torch.ones(6), torch.ones(6, device="meta")]),
    ],
)
def test_tensors_that_do_not_fit(error: type[Exception], message: str, tensors: list[torch.Tensor]) -> None:
    table = table_of([6, 6], [0, 16])
    with pytest.raises(error, match=message):
        table.point_at(tensors)
    assert table.address.tolist() == [0, 0]


def test_a_tensor_that_changed_where_it_lies_is_looked_at_again() -> None:
    memory = torch.zeros(8)
    tensor = memory[:6].view(2, 3)
    table = table_of([6], [0], layouts=[layout(tensor)])
    table.point_at([tensor])
    for changed, message in [
        (tensor.t(), "memory order is what is copied"),
        (memory[:5], "memory order is what is copied"),
        (memory.view(torch.int32)[:6].view(2, 3), r"tensors must have one of"),
    ]:
        assert changed.data_ptr() == tensor.data_ptr()
        with pytest.raises((ValueError, TypeError), match=message):
            table.point_at([changed])
    table.point_at([memory[:6].view(1, 2, 3)])  # another shape is another look, but no refusal
    tensor.resize_(2, 2)  # the same tensor, changed in place
    with pytest.raises(ValueError, match="memory order"):
        table.point_at([tensor])


def test_layout_is_memory_order() -> None:
    image = torch.zeros(2, 3, 4, 5)
    assert layout(image) == ((2, 60), (3, 20), (4, 5), (5, 1))
    assert layout(image.to(memory_format=torch.channels_last)) == ((2, 60), (3, 1), (4, 15), (5, 3))
    assert layout(torch.zeros(())) == ()
    # A dimension of one element may have any stride.
    assert layout(torch.zeros(3, 1)) == layout(torch.zeros(3, 1).as_strided((3, 1), (1, 77))) == ((3, 1),)


def test_a_prepared_launch_is_for_one_dtype() -> None:
    table, launched = table_of([4], [0]), []
    tensor = torch.zeros(4)
    table.launch_at([tensor], F32, lambda: launched.append(table.address.tolist()))
    with pytest.raises(TypeError, match=r"prepared for tensors of torch\.float32, got torch\.float16"):
        table.launch_at([tensor.half()], F32, lambda: launched.append([]))
    table_of([0], [0]).launch_at([torch.zeros(0)], F32, lambda: launched.append([]))
    assert launched == [[tensor.data_ptr()]]


def test_a_device_gets_its_columns_from_pinned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy from other memory would make the host wait for the stream in mid-backward."""
    pinned: list[torch.Size] = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: pinned.append(tensor.shape) or tensor)
    device = torch.device("meta")
    table = table_of([4, 5000], [0, 16], device=device)
    table.point_at([torch.zeros(4, device=device), torch.zeros(5000, device=device)])
    assert pinned == [(3, 3), (3,)]
