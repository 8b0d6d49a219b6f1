"""The digest by which ranks compare tensors: any flipped bit changes it, on the host and on a device."""

from collections.abc import Callable

import pytest
import torch

from torchring.participants import digests

Digest = Callable[[torch.Tensor], tuple[int, int]]


def digest_on_device(value: torch.Tensor) -> tuple[int, int]:
    total, order = digests._digest_on_device(value).tolist()
    return total, order


on_host_and_device = pytest.mark.parametrize("digest_of", [digests._digest, digest_on_device], ids=["host", "device"])


@on_host_and_device
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_any_flipped_bit_changes_the_digest(dtype: torch.dtype, digest_of: Digest) -> None:
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


@on_host_and_device
def test_digest_sees_values_not_their_layout(digest_of: Digest) -> None:
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


def test_the_device_takes_large_parameters_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    value = torch.randn(1001)
    whole = digest_on_device(value)
    monkeypatch.setattr(digests, "_PIECE_WORDS", 64)
    assert digest_on_device(value) == whole


def test_digests_of_host_and_device_come_in_the_order_of_the_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.arange(float(n)) for n in range(1, 5)]
    on_host = [digests._digest(tensor) for tensor in tensors]
    assert digests.digests(tensors).tolist() == [list(digest) for digest in on_host]
    assert digests.digests([]).shape == (0, 2)

    # Without a device: as if tensors of an even length were on one.
    of_host = digests._digest
    monkeypatch.setattr(digests, "_digest", lambda t: of_host(t) if t.numel() % 2 else digests._digest_on_device(t))
    mixed = [on_host[0], digest_on_device(tensors[1]), on_host[2], digest_on_device(tensors[3])]
    assert digests.digests(tensors).tolist() == [list(digest) for digest in mixed]


def test_either_half_of_the_digest_sees_what_the_other_does_not() -> None:
    value = torch.arange(1.0, 9.0, dtype=torch.float64)
    swapped = value[[1, 0, *range(2, 8)]]
    for digest_of in (digests._digest, digest_on_device):
        (total, order), (same_total, other_order) = digest_of(value), digest_of(swapped)
        assert total == same_total
        assert order != other_order
    # A byte that becomes 251 less, and its neighbours that make up for it: the same Adler-32.
    raw = torch.zeros(16, dtype=torch.uint8)
    raw[:3] = torch.tensor([1, 0, 1], dtype=torch.uint8)
    other = torch.zeros(16, dtype=torch.uint8)
    other[1] = 2
    (total, order), (other_total, same_order) = (digests._digest(r.view(torch.float64)) for r in (raw, other))
    assert order == same_order
    assert total != other_total
