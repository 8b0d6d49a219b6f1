import pytest
import torch

from tests.support.checks import assert_bitwise
from tests.support.grids import grid
from tests.support.kernels import DTYPES, on_each_device, sum_in_order
from torchring.kernels.accumulate import accumulate


def random_parts(num_parts: int, numel: int, dtype: torch.dtype, device: str, *, shift: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(num_parts * 10_000 + numel)
    return [torch.randn(numel + shift, generator=generator).to(device, dtype)[shift:] for _ in range(num_parts)]


@on_each_device
def test_worked_example(device: str) -> None:
    parts = [torch.tensor([1.0, 2.0, 3.0], dtype=torch.float16, device=device) * k for k in (1, 10, 100)]
    out = torch.zeros(3, dtype=torch.float16, device=device)
    accumulate(parts, out, scale=0.5)
    assert out.tolist() == [55.5, 111.0, 166.5]


@on_each_device
@grid("dtype, out_dtype, num_parts", DTYPES, DTYPES, [1, 3])
def test_bitwise_for_every_dtype(dtype: torch.dtype, out_dtype: torch.dtype, num_parts: int, device: str) -> None:
    parts = random_parts(num_parts, 2053, dtype, device)
    guarded = torch.full((2053 + 9,), 7.0, dtype=out_dtype, device=device)
    accumulate(parts, guarded[:2053], scale=1 / 3)
    assert_bitwise(guarded[:2053].cpu(), sum_in_order(parts, out_dtype, 1 / 3))
    assert guarded[2053:].tolist() == [7.0] * 9


@on_each_device
@pytest.mark.parametrize("numel", [0, 1, 15, 16, 17, 2047, 2048, 2049, 4095, 4096, 4097, 10_007])
def test_every_size(numel: int, device: str) -> None:
    parts = random_parts(2, numel, torch.float32, device)
    out = torch.full((numel,), 7.0, device=device)
    accumulate(parts, out)
    assert_bitwise(out.cpu(), sum_in_order(parts, torch.float32, 1.0))


@on_each_device
@pytest.mark.parametrize("num_parts", [2, 5, 8])
def test_order_is_the_lists(num_parts: int, device: str) -> None:
    parts = random_parts(num_parts, 3000, torch.float32, device)
    forward, backward = torch.empty(3000, device=device), torch.empty(3000, device=device)
    accumulate(parts, forward)
    accumulate(parts[::-1], backward)
    assert_bitwise(forward.cpu(), sum_in_order(parts, torch.float32, 1.0))
    assert torch.equal(forward, backward) == (num_parts == 2)  # with more parts the order shows


@on_each_device
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_into_one_of_the_parts(dtype: torch.dtype, place: int, device: str) -> None:
    parts = random_parts(3, 5003, dtype, device)
    expected = sum_in_order(parts, dtype, 0.1)
    accumulate(parts, parts[place], scale=0.1)
    assert_bitwise(parts[place].cpu(), expected)


@on_each_device
def test_misaligned_parts(device: str) -> None:
    parts = random_parts(3, 3001, torch.float16, device, shift=1)
    assert any(part.data_ptr() % 16 for part in parts)
    out = torch.zeros(3002, dtype=torch.float16, device=device)[1:]
    accumulate(parts, out)
    assert_bitwise(out.cpu(), sum_in_order(parts, torch.float16, 1.0))
