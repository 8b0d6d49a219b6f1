"""Gradients of 16 bits on the wire: scaled in fp32, cast once, added up in fp32, the same bits on every rank.

Bounds against the float64 mean · nothing overflows whose mean fits · small and large tensors · accumulation, GradScaler
"""

import time
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn

import torchring
from tests.support.checks import assert_bitwise, assert_same_everywhere, assert_within_rounding
from tests.support.harness import ranks

_DTYPES: Final = {"fp16": torch.float16, "bf16": torch.bfloat16}
_MOVERS: Final[list[dict[str, Any]]] = [
    {"algorithm": "direct", "overlap": "inline"},
    {"algorithm": "direct", "overlap": "thread", "bucket_mb": 0},
    {"algorithm": "native", "overlap": "thread"},
    {"algorithm": "native"},
]
_SIZES: Final = [3, 70_003, 1, 1000]  # the big one, over 256 KiB, is copied the moment it arrives


class _Parts(nn.Module):
    """Its loss is sum(gradient * parameter), so that gradients are what the test says."""

    def __init__(self, sizes: list[int]) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(torch.zeros(size)) for size in sizes)

    def loss(self, gradients: list[Tensor]) -> Tensor:
        return torch.stack([(p * g).sum() for p, g in zip(self.parts, gradients, strict=True)]).sum()

    def gradients(self) -> list[Tensor]:
        return [p.grad.clone() for p in self.parts if p.grad is not None]


def _wrapped(model: _Parts, compression: Any, **options: Any) -> torchring.DistributedOptimizer:
    return torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, compression=compression, **options)


def _three_steps(
    rank: int, compression: str | None, options: dict[str, Any], micro_steps: int = 1
) -> tuple[list[list[Tensor]], list[list[Tensor]], torchring.Stats]:
    """Reduced gradients and this rank's, [step][parameter]. On a thread, another rank is late in each step."""
    model = _Parts(_SIZES)
    optimizer = _wrapped(model, compression, accumulate=micro_steps, **options)
    reduced, local = [], []
    for step in range(3):
        optimizer.zero_grad(set_to_none=step != 1)
        total = [torch.zeros(size) for size in _SIZES]
        for micro_step in range(micro_steps):
            generator = torch.Generator().manual_seed(100 * rank + 10 * step + micro_step)
            gradients = [torch.randn(size, generator=generator) for size in _SIZES]
            loss = model.loss(gradients)
            if options.get("overlap") == "thread" and rank == step:
                loss.register_hook(lambda _: time.sleep(0.05))
            loss.backward()
            total = [t + g for t, g in zip(total, gradients, strict=True)]
        reduced.append(model.gradients())
        local.append(total)
        optimizer.step()
    stats = optimizer.stats()
    optimizer.close()
    return reduced, local, stats


def _assert_means(reduced: list[list[Tensor]], local: list[list[Tensor]], roundings: int, dtype: torch.dtype) -> None:
    for gradients, own in zip(reduced, local, strict=True):
        assert_same_everywhere(gradients)
        for gradient, part in zip(gradients, own, strict=True):
            assert gradient.dtype == torch.float32
            parts = torchring.all_gather(part.double()[None]) / torchring.size()
            assert_within_rounding(gradient, parts.sum(0), parts.abs().sum(0), roundings, dtype)


@pytest.mark.parametrize("options", _MOVERS, ids=str)
@ranks(3)
def test_means_are_within_rounding_and_the_same_everywhere(options: dict[str, Any], rank: int) -> None:
    """Direct rounds a part once when it is cast, and the sum once; what fp32 adds is less than half a rounding more.

    Native may round at every hop: 2 more for 3 ranks.
    """
    for compression, micro_steps in (("fp16", 1), ("bf16", 2)):
        reduced, local, stats = _three_steps(rank, compression, options, micro_steps)
        _assert_means(reduced, local, 2 if options["algorithm"] == "direct" else 4, _DTYPES[compression])
        for gradient in reduced[0]:  # and they did travel in 16 bits
            assert_bitwise(gradient, gradient.to(_DTYPES[compression]).float())
        assert stats.algorithm == options["algorithm"]


@ranks(3)
def test_the_bound_is_too_tight_for_the_other_format_and_for_no_reduction(rank: int) -> None:
    """The negative control."""
    reduced, local, _ = _three_steps(rank, "bf16", _MOVERS[0])
    with pytest.raises(AssertionError, match="roundings"):
        _assert_means(reduced, local, 2, torch.float16)
    with pytest.raises(AssertionError, match="rank 1 has"):
        _assert_means(local, local, 4, torch.bfloat16)


@ranks(2)
def test_half_the_bytes_travel(rank: int) -> None:
    whole, *halves = (_three_steps(rank, each, {})[2].bytes_per_step for each in (None, "fp16", "bf16"))
    assert halves == [pytest.approx(whole / 2, rel=0.01)] * 2


# Gradients of ranks 0 and 1 and what they must become. The largest number of fp16 is 65504, 50000 becomes 49984.
_LARGE: Final[list[tuple[float, float, float]]] = [
    (100_032.0, 19_968.0, 60_000.0),
    (60_000.0, 60_000.0, 60_000.0),  # the sum does not fit, the mean does
    (1e5, 0.0, 49_984.0),
    (1e5, -1e5, 0.0),
    (2.0**-23, 2.0**-23, 2.0**-23),  # subnormal
    (2.0**-23, 0.0, 2.0**-24),
]


@pytest.mark.parametrize("options", _MOVERS, ids=str)
@ranks(2)
def test_nothing_overflows_whose_mean_fits(options: dict[str, Any], rank: int) -> None:
    for *per_rank, mean in _LARGE if options == _MOVERS[0] else _LARGE[:1]:
        model = _Parts([5, 70_001])
        optimizer = _wrapped(model, "fp16", **options)
        model.loss([torch.full((5,), per_rank[rank]), torch.full((70_001,), per_rank[rank])]).backward()
        for gradient in model.gradients():
            assert_bitwise(gradient, torch.full_like(gradient, mean))
        optimizer.step()
        optimizer.close()


@ranks(2)
def test_grad_scaler_finds_what_the_wire_cannot_hold(rank: int) -> None:
    """Rank 1 sends 2 * scale, which is below 65504 from scale 2^14 on: 3 steps are skipped, 2 are made, by -0.1 * 2.

    The scale starts too large for fp16 on rank 1, and comes down on all ranks alike.
    """
    model = _Parts([5])
    optimizer = _wrapped(model, "fp16")
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
