import pytest
import torch

from tests.support import kernels
from tests.support.checks import assert_bitwise
from tests.support.kernels import B16, F16, F32
from torchring.kernels.quantize import prepare_decode, prepare_quantize
from torchring.kernels.reference_quantize import add_rows, decode_rows, quantize_rows

NUM_ROWS = 37  # two programs, and a part of the third
NOT_FINITE, EXACT = [8, 9, 20], [2, 19]
OWN = slice(18, 22)
OTHERS = [*range(18), *range(22, NUM_ROWS)]
PART = 2 * 1024 + NUM_ROWS * 260 + 12  # bytes: values, codes, scales, and a gap


def row_of(device: str, *values: float) -> torch.Tensor:
    return torch.tensor([[*values, *[0.0] * (256 - len(values))]], device=device)


def places(device: str) -> torch.Tensor:
    rows = torch.arange(NUM_ROWS, dtype=torch.int32)
    columns = [128 + 16 * rows, 512 + 64 * NUM_ROWS + rows, torch.full_like(rows, -1), torch.full_like(rows, 256)]
    columns[2][EXACT] = torch.tensor([0, 64], dtype=torch.int32)
    columns[3][-1] = 100
    return torch.stack(columns).to(device)


def parts_of(message: torch.Tensor, part: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    sizes = [2 * 1024, NUM_ROWS * 256, NUM_ROWS * 4, 12]
    values, codes, scales, _ = message[part * PART : (part + 1) * PART].split(sizes)
    return values.view(F32).view(-1, 256), codes.view(torch.int8).view(-1, 256), scales.view(F32)


def random_rows(dtype: torch.dtype, seed: int = 1) -> torch.Tensor:
    """From 1e-6, where fp16 has denormals, to 1e4."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(NUM_ROWS, 256, generator=generator) * torch.logspace(-6, 4, NUM_ROWS)[:, None]
    # Zero, a denormal (the interpreter misreads those of bf16), and numbers on either side of 1e-30.
    rows[4:8] = torch.tensor([0.0, 1e-36 if dtype == B16 else 1e-40, 9e-31, 1.1e-30])[:, None]
    rows[8, 200], rows[9, 255], rows[20, :2] = kernels.NAN, -kernels.INF, torch.tensor([kernels.INF, kernels.NAN])
    rows[EXACT[0], 7] = kernels.NAN
    return rows.to(dtype)


@kernels.where_triton_runs
def test_worked_example(device: str) -> None:
    where = torch.tensor([[0], [64], [-1], [256]], dtype=torch.int32, device=device)
    messages = torch.zeros(2, 2, 272, dtype=torch.uint8, device=device)  # of two parts
    row, feedback = row_of(device, 254.0, -4.0, 5.0, 0.5), row_of(device, 0.0, 1.0)
    prepare_quantize(row, messages[0], where, feedback, (1, 1))()
    assert messages[0, 0, 256:260].view(F32).tolist() == [2.0]
    assert messages[0, 0, :256].view(torch.int8).tolist() == row_of(device, 127, -2, 2)[0].tolist()
    assert feedback.tolist() == row_of(device, 0.0, 1.0, 1.0, 0.5).tolist()
    messages[1, 1] = messages[0, 0]
    prepare_quantize(row_of(device, 0.0, 1.0), messages[1], where, None, (0, 1), 0, 2)()
    assert messages[1, 0].tolist() == messages[0, 0].tolist()
    prepare_decode(row, messages[1], where)()
    assert row.tolist() == row_of(device, 254.0, -4.0, 4.0).tolist()


@kernels.where_triton_runs
@pytest.mark.parametrize("dtype", [F32, F16, B16])
def test_quantized_added_up_and_decoded_as_by_the_reference(dtype: torch.dtype, device: str) -> None:
    own, rows = (OWN.start, OWN.stop), random_rows(dtype)
    message, before = (
        torch.full((3 * PART,), 77, dtype=torch.uint8),
        random_rows(F32, 2).nan_to_num(0.0, 0.0, 0.0) / 127,
    )
    source, found, kept = (tensor.to(device, copy=True) for tensor in (rows, message, before))
    prepare_quantize(source, found, places(device), kept, own)()
    assert_bitwise(source.cpu(), rows)
    expected, (values, codes, scales) = before.clone(), parts_of(message, 0)
    quantized = torch.empty(NUM_ROWS, 256, dtype=torch.int8), torch.empty(NUM_ROWS)
    quantize_rows(rows.clone(), *quantized, expected)
    values[0], codes[OTHERS], scales[OTHERS] = rows[EXACT[0]], quantized[0][OTHERS], quantized[1][OTHERS]
    codes[[EXACT[0], *NOT_FINITE[:2]]], scales[EXACT[0]], expected[EXACT[0]], expected[OWN] = 0, 0.0, 0.0, before[OWN]
    for each in (found := found.cpu(), message):
        parts_of(each, 0)[2].nan_to_num_(1.0)  # any NaN will do
    assert_bitwise(found, message, "what is not of these rows stays")
    # The interpreter rounds a product before the sum, torch may not.
    assert bool(((kept.cpu() - expected).abs() <= 1e-4 * quantized[1].nan_to_num(0.0)[:, None]).all())
    assert_bitwise(kept.cpu()[[2, *NOT_FINITE]], expected[[2, *NOT_FINITE]])

    total, kept = rows.to(F32, copy=True), before.to(device, copy=True)
    for part in (1, 2):
        values, codes, scales = parts_of(message, part)
        values[:] = (addend := random_rows(F32, part))[EXACT]
        quantize_rows(addend, codes, scales)
        codes[EXACT], scales[EXACT] = 0, 0.0
        add_rows(total, codes, scales)
        total[EXACT[1]] += values[1]
    found = message.to(device)
    prepare_quantize(source, found, places(device), kept, own, 0, 3)()
    assert_bitwise(parts_of(found.cpu(), 0)[0][1], total[EXACT[1]])
    total[EXACT[1]] = before[EXACT[1]] = 0.0
    quantize_rows(total, *quantized, before)
    for there, wanted, error in zip(parts_of(found.cpu(), 0)[1:], quantized, (1, 1e-9), strict=True):
        assert bool(((there[OWN].float() - wanted[OWN].float()).nan_to_num(0.0).abs() <= error).all())

    rows = torch.full((NUM_ROWS + 1, 256), 7.0, dtype=dtype, device=device)
    prepare_decode(rows[:-1], message[2 * PART :].to(device), places(device))()
    decoded = torch.full((NUM_ROWS + 1, 256), 7.0)
    decode_rows(codes, scales, decoded[:-1])
    decoded[EXACT], decoded[-2, 100:] = values, 0.0
    torch.testing.assert_close(rows.cpu(), kernels.cast(decoded, dtype), rtol=0, atol=0, equal_nan=True)
