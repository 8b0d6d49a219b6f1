"""Gradients of 16 bits on the wire: scaled in fp32, cast once, added up in fp32, the same bits on every rank.

Bounds against the float64 mean · nothing overflows whose mean fits · small and large tensors · accumulation, GradScaler
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchring
from tests.support.checks import assert_bitwise, assert_same_on_all_ranks, assert_within_rounding, digest
from tests.support.grids import grid
from tests.support.harness import ranks, run_pooled

_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
_MOVERS: list[dict[str, Any]] = [
    {"algorithm": "direct", "overlap": "inline"},
    {"algorithm": "direct", "overlap": "thread", "bucket_mb": 0},
    {"algorithm": "native", "overlap": "thread"},
    {"algorithm": "native"},
]
_compressions = pytest.mark.parametrize("compression", ["fp16", "bf16"])


class _Parts(nn.Module):
    """Its loss is sum(gradient * parameter), so that gradients are what the test says."""

    def __init__(self, sizes: list[int], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.zeros(size, dtype=dtype)) for size in sizes)

    def loss(self, gradients: list[Tensor | None]) -> Tensor:
        pairs = [(p, g) for p, g in zip(self.parts, gradients, strict=True) if g is not None]
        return torch.stack([(p * g).sum() for p, g in pairs]).sum()

    def gradients(self) -> list[Tensor | None]:
        return [None if p.grad is None else p.grad.clone() for p in self.parts]


def _wrapped(model: _Parts, compression: str | None, options: dict[str, Any]) -> torchring.DistributedOptimizer:
    return torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, compression=compression, **options)


_SIZES = [3, 70_003, 1, 1000]  # the big one, over 256 KiB, is copied the moment it arrives


def _random(rank: int, step: int, dtype: torch.dtype = torch.float32) -> list[Tensor | None]:
    generator = torch.Generator().manual_seed(100 * rank + step)
    return [torch.randn(size, generator=generator).to(dtype) for size in _SIZES]


def _three_steps(
    rank: int, world_size: int, compression: str | None, options: dict[str, Any], micro_steps: int, late: bool
) -> dict[str, Any]:
    model = _Parts(_SIZES)
    optimizer = _wrapped(model, compression, {**options, "accumulate": micro_steps})
    reduced, local = [], []
    for step in range(3):
        optimizer.zero_grad(set_to_none=step != 1)
        total = [torch.zeros(size) for size in _SIZES]
        for micro_step in range(micro_steps):
            gradients = _random(rank, 10 * step + micro_step)
            loss = model.loss(gradients)
            if late and rank == step:
                loss.register_hook(lambda _: time.sleep(0.05))
            loss.backward()
            total = [t + g for t, g in zip(total, gradients, strict=True)]
        reduced.append(model.gradients())
        local.append(total)
        optimizer.step()
    return {"reduced": reduced, "local": local, "digest": digest(model.parameters()), "stats": optimizer.stats()}


def _assert_means(results: list[dict[str, Any]], num_roundings: int, dtype: torch.dtype) -> None:
    for step, gradients in enumerate(results[0]["reduced"]):
        for i, gradient in enumerate(gradients):
            assert gradient.dtype == torch.float32
            parts = [result["local"][step][i].double() / len(results) for result in results]
            assert_within_rounding(
                gradient, torch.stack(parts).sum(0), torch.stack(parts).abs().sum(0), num_roundings, dtype
            )


def _assert_ranks_agree(results: list[dict[str, Any]]) -> None:
    assert_same_on_all_ranks([result["digest"] for result in results])
    for step in range(len(results[0]["reduced"])):
        assert_same_on_all_ranks([digest(result["reduced"][step]) for result in results])


@grid("options, compression, micro_steps", _MOVERS, ["fp16", "bf16"], [1, 2])
def test_means_are_within_rounding_and_the_same_everywhere(
    compression: str, options: dict[str, Any], micro_steps: int
) -> None:
    """Direct rounds a part once when it is cast, and the sum once; what fp32 adds is less than half a rounding more.

    Native may round at every hop: 2 more for 3 ranks.
    """
    results = run_pooled(_three_steps, 3, compression, options, micro_steps, options.get("overlap") == "thread")
    _assert_ranks_agree(results)
    _assert_means(results, 2 if options["algorithm"] == "direct" else 4, _DTYPES[compression])
    for gradient in results[0]["reduced"][0]:  # and they did travel in 16 bits
        assert_bitwise(gradient, gradient.to(_DTYPES[compression]).float())
    assert results[0]["stats"].algorithm == options["algorithm"]


def test_the_bound_is_too_tight_for_the_other_format_and_for_no_reduction() -> None:
    """The negative control."""
    results = run_pooled(_three_steps, 3, "bf16", _MOVERS[0], 1, False)
    with pytest.raises(AssertionError, match="roundings"):
        _assert_means(results, 2, torch.float16)
    for result in results:
        result["reduced"] = result["local"]
    with pytest.raises(AssertionError, match="roundings"):
        _assert_means(results, 4, torch.bfloat16)
    with pytest.raises(AssertionError, match="rank 1 has"):
        _assert_ranks_agree(results)


@_compressions
def test_half_the_bytes_travel(compression: str) -> None:
    half, whole = (
        run_pooled(_three_steps, 2, each, {}, 1, False)[0]["stats"].bytes_per_step for each in (compression, None)
    )
    assert half == pytest.approx(whole / 2, rel=0.01)


# Gradients of ranks 0 and 1 and what they must become. The largest number of fp16 is 65504, 50000 becomes 49984.
_LARGE: dict[str, tuple[float, float, float]] = {
    "sum does not fit, mean does": (60_000.0, 60_000.0, 60_000.0),
    "one does not fit, mean does": (1e5, 0.0, 49_984.0),
    "about 1e5 and 2e4": (100_032.0, 19_968.0, 60_000.0),
    "cancelling": (1e5, -1e5, 0.0),
    "subnormal": (2.0**-23, 2.0**-23, 2.0**-23),
    "half of a subnormal": (2.0**-23, 0.0, 2.0**-24),
}


def _large(rank: int, world_size: int, compression: str, name: str, options: dict[str, Any]) -> list[Any]:
    model = _Parts([5, 70_001])
    optimizer = _wrapped(model, compression, options)
    value = _LARGE[name][rank]
    model.loss([torch.full((5,), value), torch.full((70_001,), value)]).backward()
    gradients = model.gradients()
    optimizer.step()
    return gradients


@grid(
    "name, options",
    list(_LARGE),
    _MOVERS,
    keep=lambda name, options: options is _MOVERS[0] or name == "about 1e5 and 2e4",
)
def test_nothing_overflows_whose_mean_fits(name: str, options: dict[str, Any]) -> None:
    for gradients in run_pooled(_large, 2, "fp16", name, options):
        for gradient in gradients:
            assert_bitwise(gradient, torch.full_like(gradient, _LARGE[name][2]))


@ranks(2)
def test_grad_scaler_finds_what_the_wire_cannot_hold(rank: int) -> None:
    """Rank 1 sends 2 * scale, which is below 65504 from scale 2^14 on: 3 steps are skipped, 2 are made, by -0.1 * 2.

    The scale starts too large for fp16 on rank 1, and comes down on all ranks alike.
    """
    model = _Parts([5])
    optimizer = _wrapped(model, "fp16", {})
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**17, growth_interval=100)
    scales = []
    for _ in range(5):
        optimizer.zero_grad()
        scaler.scale(model.loss([torch.full((5,), 4.0 * rank)])).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    assert scales == [2.0**16, 2.0**15, 2.0**14, 2.0**14, 2.0**14]
    torch.testing.assert_close(model.parts[0].detach(), torch.full((5,), -0.4))
