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
        values = _blocks(delta.reshape(-1))
        largest = values.abs().amax(1, keepdim=True)
        values = values / largest.where(largest > 0, 1.0)  # whose squares do not overflow
        count = torch.full_like(largest, BLOCK)
        count[-1] = (delta.numel() - 1) % BLOCK + 1
        most = 2**bits - 1  # of scales in an element
        half_step = values.square().sum(1, keepdim=True).div(count).sqrt() * _OPTIMAL_2_BIT if bits == 2 else 1 / most
        codes = (values / half_step / 2 + most / 2).nan_to_num(0.0).round_().clamp_(0, most)
        signed = codes * 2 - most
        signed[-1, int(count[-1]) :] = 0  # what fills the last block
        scales = (values * signed).sum(1) / signed.square().sum(1) * largest[:, 0]
        narrow = codes.to(torch.uint8).view(-1, 8 // bits)
        packed = narrow[:, 0].clone()
        for i in range(1, 8 // bits):
            packed |= narrow[:, i] << bits * i
        parts += [_bytes(scales), packed]
    return torch.cat([*vectors, *parts, torch.empty(0, dtype=torch.uint8, device=deltas[0].device)])


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
        codes = torch.stack([packed >> bits * k & 2**bits - 1 for k in range(8 // bits)], 1).view(num_blocks, BLOCK)
        values = codes.to(torch.float32).mul_(2).sub_(2**bits - 1).mul_(scales[:, None])
        found[i] = values.view(-1)[: shape.numel()].view(shape)
    return [delta for delta in found if delta is not None]


def _blocks(flat: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.pad(flat, (0, -len(flat) % BLOCK)).view(-1, BLOCK)


def _bytes(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(-1).view(torch.uint8)
