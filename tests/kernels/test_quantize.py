import pytest
import torch

from tests.support import kernels
from tests.support.checks import assert_bitwise, assert_within_rounding
from tests.support.grids import grid
from tests.support.kernels import B16, F16, F32
from torchring.kernels.quantize import prepare_add, prepare_decode, prepare_quantize
from torchring.kernels.reference_quantize import decode_rows, quantize_rows

NUM_ROWS = 37  # two programs, and a part of the third
NOT_FINITE = [8, 9, 20]


def row_of(device: str, *values: float, rest: float = 0.0) -> torch.Tensor:
    return torch.tensor([[*values, *[rest] * (256 - len(values))]], device=device)


def random_rows(dtype: torch.dtype) -> torch.Tensor:
    """From 1e-6, where fp16 has denormals, to 1e4."""
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(NUM_ROWS, 256, generator=generator) * torch.logspace(-6, 4, NUM_ROWS)[:, None]
    # Zero, a denormal (the interpreter misreads those of bf16), and numbers on either side of 1e-30.
    rows[4:8] = torch.tensor([0.0, 1e-36 if dtype == B16 else 1e-40, 9e-31, 1.1e-30])[:, None]
    rows[8, 200], rows[9, 255], rows[20, :2] = kernels.NAN, -kernels.INF, torch.tensor([kernels.INF, kernels.NAN])
    return rows.to(dtype)


@kernels.where_triton_runs
def test_worked_example(device: str) -> None:
    row, feedback = row_of(device, 254.0, -4.0, 5.0, 0.5), row_of(device, 0.0, 0.5)
    codes, scales = torch.full((1, 256), 9, dtype=torch.int8, device=device), torch.zeros(1, device=device)
    prepare_quantize(row, codes, scales, feedback, 2.0)()
    assert scales.tolist() == [2.0]
    assert codes.tolist() == row_of(device, 127, -2, 2).tolist()
    assert feedback.tolist() == row_of(device, 0.0, 0.5, 0.5, 0.25).tolist()
    total = row_of(device, rest=1.0)
    prepare_add(total, codes, scales)()
    assert total.tolist() == row_of(device, 255.0, -3.0, 5.0, rest=1.0).tolist()
    prepare_decode(codes, scales, row)()
    assert row.tolist() == row_of(device, 254.0, -4.0, 4.0).tolist()


@kernels.where_triton_runs
@grid("dtype, weight", [F32, F16, B16], [None, 1.0, 0.0, 3.0])
def test_quantized_as_by_the_reference(dtype: torch.dtype, weight: float | None, device: str) -> None:
    rows, factor = random_rows(dtype), 1.0 if weight is None else weight
    before = torch.randn(NUM_ROWS, 256, generator=torch.Generator().manual_seed(2))
    before *= rows.float().abs().amax(1, keepdim=True).nan_to_num(1.0, 1.0) / 127
    expected_codes = torch.full((NUM_ROWS + 1, 256), 9, dtype=torch.int8)  # the last row is no part of the buffer
    expected_scales = torch.full((NUM_ROWS + 1,), 7.0)
    tensors = rows, expected_codes, expected_scales, before
    source, codes, scales, feedback = (tensor.to(device, copy=True) for tensor in tensors)
    prepare_quantize(source, codes[:-1], scales[:-1], None if weight is None else feedback, factor)()
    source, codes, scales, feedback = (tensor.cpu() for tensor in (source, codes, scales, feedback))
    own = None if weight is None else before.clone()
    quantize_rows(rows.clone(), expected_codes[:-1], expected_scales[:-1], own, factor)

    assert_bitwise(source, rows)
    is_finite = scales.isfinite()
    assert (~is_finite).nonzero().flatten().tolist() == NOT_FINITE
    # The interpreter rounds 3 * feedback before the sum, torch may not. All other sums have the same bits.
    roundings = 4 if weight == 3.0 else 0
    torch.testing.assert_close(scales, expected_scales, rtol=roundings * 2**-24, atol=0, equal_nan=True)
    assert int((codes[is_finite] != expected_codes[is_finite]).count_nonzero()) <= roundings
    assert int(codes[NOT_FINITE].count_nonzero()) == 0
    assert_bitwise(feedback[NOT_FINITE], before[NOT_FINITE])
    if not weight:
        assert_bitwise(feedback, before)
        return
    # What is lost: a rounding of each product and sum, and of the quotient.
    parts = torch.stack([rows.double() / weight, before.double(), -codes[:-1] * scales[:-1, None].double() / weight])
    parts = parts[:, is_finite[:-1]]
    assert_within_rounding(feedback[is_finite[:-1]], parts.sum(0), parts.abs().sum(0), 4, F32)


@kernels.where_triton_runs
@pytest.mark.parametrize("dtype", [F32, F16, B16])
def test_added_and_decoded(dtype: torch.dtype, device: str) -> None:
    codes, scales = torch.empty(NUM_ROWS, 256, dtype=torch.int8), torch.empty(NUM_ROWS)
    quantize_rows(random_rows(F32), codes, scales)
    coded = codes.to(device), scales.to(device)
    total, rows = (torch.full((NUM_ROWS + 1, 256), 7.0, dtype=kind, device=device) for kind in (F32, dtype))
    prepare_add(total[:-1], *coded)()
    prepare_decode(*coded, rows[:-1])()
    expected = torch.full((NUM_ROWS + 1, 256), 7.0)
    decode_rows(codes, scales, expected[:-1])
    assert expected.isfinite().all(1).logical_not().nonzero().flatten().tolist() == NOT_FINITE
    torch.testing.assert_close(rows.cpu(), kernels.cast(expected, dtype), rtol=0, atol=0, equal_nan=True)
    product = codes.double() * scales[:, None].double()
    assert_within_rounding(total[:-1].cpu(), product + 7, product.abs() + 7, 1, F32)
    assert total[-1].unique().tolist() == [7.0]
