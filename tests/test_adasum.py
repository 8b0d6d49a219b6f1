"""Adasum: weights against the tree of the definition, in float64; `all_reduce` in shared memory and between hosts."""

import pytest
import torch

import torchring
from tests.support.adasum import assert_adasum
from tests.support.checks import assert_bitwise, assert_same_everywhere
from tests.support.grids import grid
from tests.support.harness import ranks
from torchring.adasum import adasum
from torchring.memory import host as host_module


def _vectors(count: int, numel: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shared = torch.randn(numel, generator=generator)
    return [(shared + torch.randn(numel, generator=generator) * (i + 1)).to(dtype) for i in range(count)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_random_vectors(count: int, dtype: torch.dtype) -> None:
    parts = _vectors(count, 1001, dtype)
    assert_adasum(adasum(parts), parts)


def test_what_is_known() -> None:
    a, b = torch.randn(1000), torch.zeros(1000)
    a[500:], b[500:] = 0.0, torch.randn(500)
    assert_adasum(adasum([a, b]), [a, b])
    torch.testing.assert_close(adasum([a, b]), a + b)  # orthogonal: the sum
    torch.testing.assert_close(adasum([a, 3 * a]), 2 * a)  # parallel: the mean
    for parts in ([torch.zeros_like(b), b], [b, torch.zeros_like(b)], [torch.zeros_like(b), b, torch.zeros_like(b)]):
        assert_bitwise(adasum(parts), b)
    assert_bitwise(adasum([torch.zeros(3)] * 3), torch.zeros(3))
    assert_adasum(adasum([a, a, b, a, b]), [a, a, b, a, b])


def test_what_cancels_counts_as_zero() -> None:
    a, b = _vectors(2, 1000)
    nearly = -a * (1 + 1e-9 * torch.randn(1000).double()).float()
    for opposite in (-a, nearly):
        assert_adasum(adasum([a, opposite]), [a, -a])
        torch.testing.assert_close(adasum([a, opposite, b]), b, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(adasum([b, b, a, opposite]), b, rtol=1e-5, atol=1e-5)
    assert_adasum(adasum([a, -0.99 * a, b]), [a, -0.99 * a, b])  # 1% of it is a direction


@pytest.fixture
def world_size(hosts: tuple[int, ...]) -> int:
    return len(hosts)


@grid(
    "hosts",
    [(0,), (0, 0), (0, 0, 0), (0,) * 5, (0, 1), (0, 0, 1), (0, 1, 0, 1), (0, 0, 1, 1, 2)],
    keep=lambda hosts: hosts in {(0,), (0, 0, 0), (0, 0, 1)},
)
@ranks()
def test_all_reduce(rank: int, world_size: int, hosts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    grouped = [[r for r in range(world_size) if hosts[r] == host] for host in sorted(set(hosts))]
    monkeypatch.setattr(host_module, "_host_identity", lambda: f"host {hosts[rank]}")
    torchring.init(timeout_seconds=20.0)
    for numel in (0, 1, 5, 70_000):
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            parts = _vectors(world_size, numel, dtype)
            tensor = parts[rank].clone()
            assert torchring.all_reduce(tensor, "adasum") is tensor
            assert_adasum(tensor, parts, grouped)
            assert_same_everywhere([tensor])
    parts = [part.view(300, 4).t() for part in _vectors(world_size, 1200)]
    strided = parts[rank].clone(memory_format=torch.preserve_format)
    work = torchring.all_reduce(strided, "adasum", async_op=True)
    assert_adasum(work.wait(), parts, grouped)
    bad = torch.ones(4)
    if rank == world_size - 1:
        bad[1] = torch.nan
    assert torchring.all_reduce(bad, "adasum").isnan().tolist() == [False, True, False, False]
    for dtype in (torch.int32, torch.complex64):
        with pytest.raises(TypeError, match=r"floating point|cannot be reduced"):
            torchring.all_reduce(torch.ones(2, dtype=dtype), "adasum")
    with pytest.raises(ValueError, match="op must be one of 'mean', 'sum', 'min', 'max', 'product', got 'adasum'"):
        torchring.reduce_scatter(torch.ones(8), "adasum")  # type: ignore[call-overload]
    if world_size > 1:
        with pytest.raises(torchring.PlanMismatchError, match=r"op='adasum'.*op='mean'|op='mean'.*op='adasum'"):
            torchring.all_reduce(torch.ones(2), "adasum" if rank else "mean")
