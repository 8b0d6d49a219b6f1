import pytest
import torch

from tests.support.checks import assert_bitwise
from tests.support.grids import grid
from tests.support.kernels import B16, DTYPES, F16, sum_in_order
from torchring.kernels import reference


def accumulate(parts: list[torch.Tensor], out: torch.Tensor, scratch: torch.Tensor | None = None) -> None:
    reference.Accumulation(parts, out, scratch).run()


def test_scaled_before_cast() -> None:
    view = torch.zeros(1, dtype=F16)
    reference.pack([torch.tensor([1e5])], [view], scale=0.5)
    assert view.item() == 49984  # fp16 has multiples of 32 there
    reference.pack([torch.tensor([1e5])], [view])
    assert view.item() == float("inf")  # the mean fits, the gradient does not: casting first is what goes wrong


@grid("wire_dtype, dtype, numel, scale", DTYPES, DTYPES, [5, 16 * 1024, 16 * 1024 + 1, 256 * 1024 + 3], [1.0, 1 / 3])
def test_pack_and_unpack_round_once(numel: int, wire_dtype: torch.dtype, dtype: torch.dtype, scale: float) -> None:
    grad = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
    expected = sum_in_order([grad], wire_dtype, scale)
    for move in (reference.pack, reference.unpack):
        target = torch.full((numel,), 7.0, dtype=wire_dtype)
        move([grad, grad], [target.clone(), target], scale=scale)
        assert_bitwise(target, expected)


def test_rounding_twice_would_be_seen() -> None:
    grad = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    once, twice = torch.empty(10_000, dtype=B16), (grad.to(B16) * torch.tensor(1 / 3)).to(B16)
    reference.pack([grad], [once], scale=1 / 3)
    assert (once != twice).sum() > 1000


def test_values_follow_their_index_whatever_the_strides() -> None:
    grad = torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last)
    for scale in (1.0, 0.5):
        contiguous, strided = torch.zeros(2, 3, 4, 5), torch.zeros_like(grad)
        reference.pack([grad, grad], [contiguous, strided], scale=scale)
        assert torch.equal(contiguous, torch.arange(120.0).view(2, 3, 4, 5) * scale)
        assert torch.equal(strided, contiguous)
    large = torch.randn(4, 64, 32, 32).to(memory_format=torch.channels_last)  # in several blocks
    target = torch.zeros(4, 64, 32, 32, dtype=B16)
    reference.pack([large], [target], scale=0.3)
    assert torch.equal(target, (large * 0.3).to(B16))


def test_pack_refuses_what_torch_would_broadcast() -> None:
    with pytest.raises(ValueError, match=r"tensor 1 has shape \(1,\), its target has shape \(3,\)"):
        reference.pack([torch.ones(2), torch.ones(1)], [torch.ones(2), torch.ones(3)])
    with pytest.raises(ValueError, match="2 tensors cannot be copied to 1"):
        reference.pack([torch.ones(2), torch.ones(1)], [torch.ones(2)])
    with pytest.raises(TypeError, match=r"torch\.int32 takes scale 1 only, got 0\.5"):
        reference.pack([torch.ones(2)], [torch.ones(2, dtype=torch.int32)], scale=0.5)


@pytest.mark.parametrize("num_parts", [1, 2, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_accumulate(dtype: torch.dtype, num_parts: int) -> None:
    generator = torch.Generator().manual_seed(num_parts)
    parts = [torch.randn(1031, generator=generator).to(dtype) for _ in range(num_parts)]
    before = [part.clone() for part in parts]
    expected = sum_in_order(parts, dtype, 1.0)
    out = torch.full((1031,), 7.0, dtype=dtype)
    accumulate(parts, out)
    assert_bitwise(out, expected)
    scratch = torch.full((2000,), 7.0, dtype=reference.compute_dtype(dtype, dtype))
    out.fill_(7.0)
    accumulate(parts, out, scratch=scratch)
    assert_bitwise(out, expected)
    for part, original in zip(parts, before, strict=True):
        assert torch.equal(part, original)


@pytest.mark.parametrize("dtype", [F16, torch.int64])
@pytest.mark.parametrize("place", [0, 1, 3])
def test_accumulate_into_one_of_the_parts(dtype: torch.dtype, place: int) -> None:
    parts = [torch.tensor([1, 2, 3], dtype=dtype) * 4**i for i in range(4)]
    accumulate(parts, parts[place])
    assert torch.equal(parts[place], torch.tensor([85, 170, 255]).to(dtype))
    for i in {0, 1, 2, 3} - {place}:
        assert torch.equal(parts[i], torch.tensor([1, 2, 3], dtype=dtype) * 4**i)


@pytest.mark.parametrize(
    ("dtype", "values", "total"),
    [
        (torch.float32, [1.0, 1.0, 2.0**24], 2**24 + 2),
        (torch.float32, [2.0**24, 1.0, 1.0], 2**24),  # in this order, each 1 is lost on its own
        (B16, [256.0, 1.0, 1.0], 258),  # adding in bf16 stays at 256: 257 is not a bf16 value
        (torch.int64, [2**62, 1], 2**62 + 1),
    ],
)
def test_accumulate_adds_in_list_order_and_rounds_once(dtype: torch.dtype, values: list[float], total: int) -> None:
    out = torch.empty(1, dtype=dtype)
    accumulate([torch.tensor([value], dtype=dtype) for value in values], out)
    assert out.item() == total
