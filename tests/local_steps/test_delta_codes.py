"""Codes of 4 and 2 bits."""

import pytest
import torch

from torchring.local_steps import delta_codes


def coded(deltas: list[torch.Tensor], bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    shapes = [delta.shape for delta in deltas]
    codes = delta_codes.encode(torch.cat([delta.reshape(-1) for delta in deltas]), shapes, bits)
    return codes, delta_codes.decode(codes, shapes, bits)


def lost(deltas: list[torch.Tensor], bits: int) -> list[float]:
    found = torch.split(coded(deltas, bits)[1], [delta.numel() for delta in deltas])
    return [float((f.double() - d.view(-1)).norm() / d.double().norm()) for f, d in zip(found, deltas, strict=True)]


@pytest.mark.parametrize("bits", [4, 2])
def test_codes(bits: int) -> None:
    generator = torch.Generator().manual_seed(1)
    matrix, bias = torch.randn(30, 30, generator=generator), torch.randn(30, generator=generator)
    # Known error of 2 and 4 bits for normally distributed values, and of two blocks that overlap.
    assert lost([matrix], bits)[0] == pytest.approx({2: 0.34, 4: 0.11}[bits], rel=0.15)
    assert lost([matrix.view(-1)[:260].view(2, 130), bias, matrix * 1e-6], bits)[1] == 0.0  # in fp32
    small, alone = lost([matrix * 1e4, bias, matrix * 1e-4], bits)[2], lost([matrix], bits)[0]
    assert small == pytest.approx(alone, rel=1e-3)  # a neighbour does not spoil it: no block spans two tensors
    assert len(coded([matrix], bits)[0]) == 4 * 4 + 4 * 256 * bits // 8
    assert len(coded([bias], bits)[0]) == 120

    spike = torch.zeros(2, 256)
    spike[0, 3] = 7.0
    tiny = torch.full((1, 256), 1e-42)  # denormal
    for delta in (spike, matrix * 1e30, matrix[:9, :].clamp(min=0)):
        assert 0.0 < lost([delta], bits)[0] < 1.0  # so error feedback converges
    assert coded([tiny], bits)[1].isfinite().all()
    zero = torch.zeros(2, 300)
    assert not coded([zero], bits)[1].any()
    levels = torch.arange(-15.0, 16.0, 2.0).repeat(16).view(16, 16)
    assert (lost([levels], 4)[0] < 1e-6) == (lost([levels], 2)[0] > 1e-2)  # exact in 4 bits
