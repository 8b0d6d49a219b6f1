"""Deltas in 4 or 2 bits (as in MuLoCo, arXiv 2505.23725), by torch operations.

A matrix is cut into blocks of 256 elements, the last of which may be shorter. So no block spans two tensors. A block
has a scale in fp32, and a code for each element: of 2 bits for -3, -1, 1 and 3 scales, of 4 bits for -15, -13 ... 15.
The scale is the one with the least error for these codes. So what is lost is always smaller than what was to be sent,
which error feedback needs. Vectors (biases, norms) and tensors of less than a block are sent in fp32.
"""

from collections.abc import Sequence
from typing import Final

import torch

BLOCK: Final = 256
_PIECE: Final = 512  # blocks that are coded at a time, so that they stay in the cache
_OPTIMAL_2_BIT: Final = 0.498  # half a step in units of the root mean square, for normally distributed values


def is_coded(shape: torch.Size) -> bool:
    return len(shape) > 1 and shape.numel() >= BLOCK


def encode(deltas: Sequence[torch.Tensor], bits: int) -> torch.Tensor:
    """uint8, on the device of the deltas: scales, packed codes and vectors. Deltas: fp32, finite."""
    parts, vectors = [], []
    for delta in deltas:
        if not is_coded(delta.shape):
            vectors.append(_bytes(delta))
            continue
        pieces = torch.split(_blocks(delta.reshape(-1)), _PIECE)
        last = (delta.numel() - 1) % BLOCK + 1  # elements of the last block
        found = [_encode(piece, bits, BLOCK if piece is not pieces[-1] else last) for piece in pieces]
        parts += [_bytes(torch.cat([scales for scales, _ in found])), *(codes.view(-1) for _, codes in found)]
    return torch.cat([*vectors, *parts, torch.empty(0, dtype=torch.uint8, device=deltas[0].device)])


def _encode(values: torch.Tensor, bits: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and packed codes of some blocks, the last of which has `last` elements."""
    largest = values.abs().amax(1, keepdim=True)
    values = values / largest.where(largest > 0, 1.0)  # whose squares do not overflow
    most = 2**bits - 1  # of scales in an element
    if bits == 2:
        count = torch.full_like(largest, BLOCK)
        count[-1] = last
        half_step = values.square().sum(1, keepdim=True).div(count).sqrt() * _OPTIMAL_2_BIT
        codes = values / half_step.where(half_step > 0, 1.0)
    else:
        codes = values * most
    codes = codes.mul_(0.5).add_(most / 2).round_().clamp_(0, most)
    quarters = codes.to(torch.uint8).view(len(codes), 8 // bits, -1)  # halves, for 4 bits: memory in one piece is fast
    signed = codes.mul_(2).sub_(most)
    signed[-1, last:] = 0  # what fills the last block
    scales = torch.linalg.vecdot(values, signed) / torch.linalg.vecdot(signed, signed) * largest[:, 0]
    packed = quarters[:, 0] | quarters[:, 1] << bits
    for i in range(2, 8 // bits):
        packed |= quarters[:, i] << bits * i
    return scales, packed


def decode(data: torch.Tensor, shapes: Sequence[torch.Size], bits: int) -> list[torch.Tensor]:
    """The deltas, in fp32, that `encode` was given, but for what is lost."""
    found: list[torch.Tensor | None] = [None] * len(shapes)
    at = 0

    def take(num_bytes: int) -> torch.Tensor:
        nonlocal at
        at += num_bytes
        return data[at - num_bytes : at]

    order = sorted(range(len(shapes)), key=lambda i: is_coded(shapes[i]))  # vectors come first
    for i in order:
        shape = shapes[i]
        if not is_coded(shape):
            found[i] = take(4 * shape.numel()).clone().view(torch.float32).view(shape)
            continue
        num_blocks = -(-shape.numel() // BLOCK)
        scales = take(4 * num_blocks).clone().view(torch.float32)
        packed = take(num_blocks * BLOCK * bits // 8)
        packed = packed.view(num_blocks, 1, -1)
        codes = torch.cat([packed >> bits * k & 2**bits - 1 for k in range(8 // bits)], 1).view(num_blocks, BLOCK)
        values = codes.to(torch.float32).mul_(2).sub_(2**bits - 1).mul_(scales[:, None])
        found[i] = values.view(-1)[: shape.numel()].view(shape)
    return [delta for delta in found if delta is not None]


def _blocks(flat: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)


def _bytes(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(-1).view(torch.uint8)
