"""Every check passes what is right (positive control) and fails what is wrong (negative control)."""

from contextlib import nullcontext

import pytest
import torch

from tests.support.checks import assert_bitwise, assert_same_on_all_ranks, assert_within_rounding, digest, exact_inputs

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", [*FLOATS, torch.int32, torch.int64])
def test_exact_inputs_sum_exactly_in_any_order(dtype: torch.dtype) -> None:
    parts = [exact_inputs(1000, dtype, rank) for rank in range(8)]
    exact = torch.stack(parts).double().sum(0)
    for order in (parts, parts[::-1]):
        total = torch.zeros(1000, dtype=dtype)
        for part in order:
            total += part
        assert_bitwise(total.double(), exact)
    assert exact.abs().max() > 30  # not a trivial range
    assert_bitwise(exact_inputs(50, dtype, 3), exact_inputs(50, dtype, 3))


def test_exact_inputs_differ_between_ranks() -> None:
    firsts = [exact_inputs(1, torch.float32, seed).item() for seed in range(33)]
    assert len(set(firsts)) == 33
    assert firsts[:3] == [1.0, 6.0, 11.0]  # the numbers in the source
    assert exact_inputs(0, torch.float32, 1).shape == (0,)
    assert not torch.equal(exact_inputs(50, torch.float16, 3)[1:], exact_inputs(50, torch.float16, 4)[1:])


@pytest.mark.parametrize("shape", [(), (0,), (7,), (3, 5)])
def test_bitwise_passes_equal_tensors(shape: tuple[int, ...]) -> None:
    for dtype in (*FLOATS, torch.int64, torch.bool, torch.complex64):
        assert_bitwise(torch.ones(shape).to(dtype), torch.ones(shape).to(dtype))


_QUIET, _PAYLOAD = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32).split(1)


@pytest.mark.parametrize(
    ("actual", "expected", "message"),
    [
        (torch.zeros(3, 4), torch.zeros(4, 3).t(), ""),  # other strides
        (_QUIET, _QUIET.clone(), ""),
        (_PAYLOAD, _QUIET, r"nan \(0x7fc00001\), expected nan \(0x7fc00000\)"),
        (torch.zeros(2), torch.zeros(3), r"shape \(2,\), expected \(3,\)"),
        (torch.zeros(1), torch.zeros(()), r"shape \(1,\), expected \(\)"),
        (torch.zeros(2), torch.zeros(2, dtype=torch.float64), "dtype torch.float32, expected torch.float64"),
        (torch.tensor([0.0, -0.0]), torch.zeros(2), r"first at \(1,\): -0.0 \(0x80000000\)"),
        (torch.tensor(1.0), torch.tensor(2.0), r"first at \(\): 1.0"),
        (
            torch.tensor([[0.0, 1.0, 2.0], [3.0, 4.0 + 2.0**-18, 0.0]]),
            torch.arange(6.0).reshape(2, 3),
            r"x: 2 of 6 elements .* at \(1, 1\): 4.000003814697266 \(0x40800008\), expected 4.0 \(0x40800000\)$",
        ),
        (None, torch.zeros(2), "actual is no tensor but None"),
    ],
)
def test_bitwise_fails_where_bits_differ(actual: torch.Tensor, expected: torch.Tensor, message: str) -> None:
    with pytest.raises(AssertionError, match=message) if message else nullcontext():
        assert_bitwise(actual, expected, "x")


def test_same_on_all_ranks() -> None:
    tensor = torch.arange(5.0)
    assert_same_on_all_ranks([tensor, tensor.clone(), tensor.clone()])
    assert_same_on_all_ranks(["ab", "ab"])
    with pytest.raises(AssertionError, match="rank 2 against rank 0"):
        assert_same_on_all_ranks([tensor, tensor.clone(), tensor + 1])
    with pytest.raises(AssertionError, match="rank 1 has ab, rank 0 has cd"):
        assert_same_on_all_ranks(["cd", "ab"])
    for incomparable in ([None, None], [tensor, "ab"], ["ab", None]):
        with pytest.raises(TypeError):
            assert_same_on_all_ranks(incomparable)
    with pytest.raises(ValueError, match="nothing to compare"):
        assert_same_on_all_ranks([])


@pytest.mark.parametrize("dtype", FLOATS[:3])
def test_rounding_passes_an_honest_sum_and_fails_a_sloppy_one(dtype: torch.dtype) -> None:
    parts = torch.randn(8, 10_000).to(dtype)
    exact, scale = parts.double().sum(0), parts.double().abs().sum(0)
    total = parts[0].clone()
    for part in parts[1:]:
        total += part  # 7 additions: 6 roundings on the way, one at the end
    assert_within_rounding(total, exact, scale, 6, dtype)
    unit = torch.finfo(dtype).eps / 2
    assert_within_rounding(exact.to(dtype), exact, scale, 0, dtype)
    with pytest.raises(AssertionError, match="elements are off by more than"):  # one rounding, none allowed
        assert_within_rounding(total, exact, scale, 0, dtype)
    with pytest.raises(AssertionError, match="worst at"):
        assert_within_rounding((exact + 8.5 * unit * scale).to(dtype), exact, scale, 6, dtype)
    with pytest.raises(AssertionError, match="1 of 10000 elements"):
        assert_within_rounding(total.index_fill(0, torch.tensor(77), 0.0), exact, scale, 6, dtype)


@pytest.mark.parametrize(
    ("dtype", "bits", "smallest"),
    [*zip(FLOATS, (11, 8, 24, 53), (2.0**-24, 2.0**-133, 2.0**-149, 2.0**-1074), strict=True)],
)
def test_rounding_allows_so_many_units_and_no_other_floor(dtype: torch.dtype, bits: int, smallest: float) -> None:
    unit = 2.0**-bits
    one, zero = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    assert_within_rounding(one - unit, one, one, 0, dtype)
    assert_within_rounding(one - 2 * unit, one, one, 1, dtype)
    near = one * (1 + unit)
    assert_within_rounding(one.to(dtype), near, near, 0, dtype)  # the example of the docstring
    assert_within_rounding(zero + smallest, zero, zero, 3, dtype)
    for actual, expected in ((one - 2 * unit, one), (one.to(dtype), one * (1 + 4 * unit))):
        with pytest.raises(AssertionError, match="bound"):
            assert_within_rounding(actual, expected, expected, 0, dtype)
    with pytest.raises(AssertionError, match="bound"):
        assert_within_rounding(zero + 2 * smallest, zero, zero, 3, dtype)


@pytest.mark.parametrize("actual", ["inf", "-inf", "nan", "1"])
@pytest.mark.parametrize("expected", ["inf", "nan", "1"])
def test_rounding_wants_nan_and_infinity_exactly(actual: str, expected: str) -> None:
    pair = torch.tensor([[0.0, float(actual)], [0.0, float(expected)]], dtype=torch.float64)
    fails = pytest.raises(AssertionError, match=r"1 of 2 elements .* worst at \(1,\)")
    with nullcontext() if actual == expected else fails:
        assert_within_rounding(pair[0], pair[1], pair[1].abs(), 5, torch.float32)


def test_rounding_refuses_a_reference_that_is_none() -> None:
    one = torch.ones(2, dtype=torch.float64)
    with pytest.raises(TypeError, match="float64"):
        assert_within_rounding(one, one.float(), one, 1, torch.float32)
    with pytest.raises(AssertionError, match="shapes"):
        assert_within_rounding(one, one, one[:1], 1, torch.float32)
    with pytest.raises(ValueError, match="absolute values"):  # a plain sum, in which parts cancel
        assert_within_rounding(one, one, one * 0.5, 1, torch.float32)


def test_digest_is_the_same_for_the_same_bytes_only() -> None:
    tensors = [torch.arange(6.0).reshape(2, 3), None, torch.ones(2, dtype=torch.bfloat16)]
    same = digest(tensors)
    assert same == digest(t if t is None else t.clone() for t in tensors)
    different = [
        digest([tensors[0], tensors[2]]),
        digest(tensors[::-1]),
        digest([tensors[0].reshape(3, 2), None, tensors[2]]),
        digest([tensors[0].view(torch.int32), None, tensors[2]]),
        digest([tensors[0] + 2.0**-20, None, tensors[2]]),
        digest(tensors[0]),
    ]
    assert len({same, *different}) == 7
    with pytest.raises(ValueError, match="nothing to digest"):
        digest([])
    with pytest.raises(TypeError, match="takes tensors"):
        digest({"weight": torch.zeros(1)})
