"""The digest by which ranks compare tensors: any flipped bit changes it."""

import pytest
import torch

from torchring.participants import digests


def digest_of(value: torch.Tensor) -> tuple[int, int]:
    total, order = digests.digests([value]).tolist()[0]
    return total, order


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_any_flipped_bit_changes_the_digest(dtype: torch.dtype) -> None:
    unnoticed = []
    for numel in (1, 2, 3, 4, 5, 9):
        value = torch.linspace(-1.0, 2.0, numel, dtype=torch.float64).to(dtype)
        before = digest_of(value)
        assert digest_of(value.clone()) == before
        for bit in range(8 * value.nbytes):
            changed = value.clone()
            changed.view(torch.uint8)[bit // 8] ^= 1 << bit % 8
            if digest_of(changed) == before:
                unnoticed.append((numel, bit))
    assert unnoticed == []


def test_digest_sees_values_not_their_layout() -> None:
    value = torch.arange(12.0).view(3, 4)
    assert digest_of(value.t().contiguous().t()) == digest_of(value)
    assert digest_of(torch.arange(13.0)[1:]) == digest_of(torch.arange(1.0, 13.0))
    assert digest_of(torch.arange(13.0)[1:]) != digest_of(torch.arange(12.0))
    assert [type(part) for part in digest_of(torch.tensor(3.0))] == [int, int]
    assert digest_of(torch.empty(0)) == digest_of(torch.empty(0, 3))
    strided = torch.arange(6.0)[4:].as_strided((1, 1), (1, 2))
    assert digest_of(strided) == digest_of(torch.tensor([4.0]))
    for numel, value in ((1000, -1.0), (1001, float("nan")), (3, -1e300)):
        digest = digest_of(torch.full((numel,), value, dtype=torch.float64))
        assert torch.tensor(digest).dtype == torch.int64  # as which they travel


def test_large_parameters_are_taken_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    value = torch.randn(1001)
    whole = digest_of(value)
    monkeypatch.setattr(digests, "_HOST_PLACES", digests._HOST_PLACES[:64])
    assert digest_of(value) == whole


def test_digests_come_in_the_order_of_the_tensors() -> None:
    tensors = [torch.arange(float(n)) for n in range(1, 5)]
    assert digests.digests(tensors).tolist() == [list(digest_of(tensor)) for tensor in tensors]
    assert digests.digests([]).shape == (0, 2)


def test_only_the_second_half_of_the_digest_sees_the_order() -> None:
    value = torch.arange(1.0, 9.0, dtype=torch.float64)
    (total, order), (same_total, other_order) = digest_of(value), digest_of(value[[1, 0, *range(2, 8)]])
    assert total == same_total
    assert order != other_order
