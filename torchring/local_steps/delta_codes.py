"""Deltas in 4 or 2 bits (as in MuLoCo, arXiv 2505.23725), by torch operations.

A matrix is cut into blocks of 256 elements. The last block reaches back into the one before, if it would be shorter, so
no block spans two tensors. A block has a scale in fp32, and a code for each element: of 2 bits for -3, -1, 1 and 3
scales, of 4 bits for -15, -13 ... 15. The scale is the one with the least error for these codes. So what is lost is
always smaller than what was to be sent, which error feedback needs. Vectors (biases, norms) and tensors of less than a
block are sent in fp32.
"""

from collections.abc import Sequence
from itertools import repeat
from typing import Final

import torch

from torchring.memory.host import bytes_of

BLOCK: Final = 256
_PIECE: Final = 512  # blocks that are coded at a time, so that they stay in the cache
_OPTIMAL_2_BIT: Final = 0.498  # half a step in units of the root mean square, for normally distributed values


def encode(values: torch.Tensor, shapes: Sequence[torch.Size], bits: int) -> torch.Tensor:
    """uint8: vectors, scales, packed codes. `values`: fp32, finite, 1-D: tensors of these shapes, one after another."""
    exact, blocks = [values[:0]], [values[:0]]
    for part, shape in zip(torch.split(values, [shape.numel() for shape in shapes]), shapes, strict=True):
        if not _is_coded(shape):
            exact.append(part)
        elif rest := len(part) % BLOCK:
            blocks += [part[:-rest], part[-BLOCK:]]
        else:
            blocks.append(part)
    pieces = [_encode(piece, bits) for piece in torch.split(torch.cat(blocks).view(-1, BLOCK), _PIECE)]
    scales, codes = zip(*pieces, strict=True)
    return torch.cat([bytes_of(torch.cat([*exact, *scales])), *codes])


def decode(data: torch.Tensor, shapes: Sequence[torch.Size], bits: int) -> torch.Tensor:
    """The values that `encode` was given, but for what is lost. `data` as `encode` returns it, but of any alignment."""
    counts = [-(-shape.numel() // BLOCK) if _is_coded(shape) else 0 for shape in shapes]
    num_exact = sum(shape.numel() for shape in shapes if not _is_coded(shape))
    at = 4 * (num_exact + sum(counts))
    exact, scales = torch.split(data[:at].clone().view(torch.float32), [num_exact, sum(counts)])
    packed = data[at:].view(sum(counts), 1, BLOCK * bits // 8)
    parts = []
    for shape, codes, scale in zip(shapes, torch.split(packed, counts), torch.split(scales, counts), strict=True):
        if not _is_coded(shape):
            part, exact = exact[: shape.numel()], exact[shape.numel() :]
            parts.append(part)
            continue
        *pieces, last = map(_decode, torch.split(codes, _PIECE), torch.split(scale, _PIECE), repeat(bits))
        rest = shape.numel() % BLOCK
        parts += [*pieces, last[: len(last) - BLOCK] if rest else last, last[len(last) - rest :]]
    return torch.cat(parts)


def _decode(packed: torch.Tensor, scales: torch.Tensor, bits: int) -> torch.Tensor:
    """1-D: the values of some blocks."""
    codes = torch.cat([packed >> bits * k & 2**bits - 1 for k in range(8 // bits)], 1).view(-1, BLOCK)
    return codes.float().mul_(2).sub_(2**bits - 1).mul_(scales[:, None]).view(-1)


def _is_coded(shape: torch.Size) -> bool:
    return len(shape) > 1 and shape.numel() >= BLOCK


def _encode(values: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales, and packed codes as 1-D uint8, of some blocks."""
    largest = values.abs().amax(1, keepdim=True)
    values = values / largest.where(largest > 0, 1.0)  # whose squares do not overflow
    most = 2**bits - 1  # of scales in an element
    if bits == 2:
        half_step = values.square().mean(1, keepdim=True).sqrt() * _OPTIMAL_2_BIT
        codes = values / half_step.where(half_step > 0, 1.0)
    else:
        codes = values * most
    codes = codes.mul_(0.5).add_(most / 2).round_().clamp_(0, most)
    quarters = codes.to(torch.uint8).view(-1, 8 // bits, BLOCK * bits // 8)  # or halves: memory in one piece is fast
    packed = quarters[:, 0] | quarters[:, 1] << bits
    for k in range(2, 8 // bits):
        packed |= quarters[:, k] << bits * k
    signed = codes.mul_(2).sub_(most)
    scales = torch.linalg.vecdot(values, signed) / torch.linalg.vecdot(signed, signed) * largest[:, 0]
    return scales, packed.view(-1)
