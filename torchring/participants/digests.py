"""Digests of tensors, by which ranks find out whether theirs are the same."""

from collections.abc import Iterable
from typing import Final

import torch

from torchring.memory.host import bytes_of

_HOST_PLACES: Final = torch.arange(1, 1 + (1 << 16), device="cpu")  # of the words of a piece, which stays in cache
_DEVICE_WORDS: Final = 1 << 22  # of a piece, which is worth a launch


def digests(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """[N, 2] int64 on the host: a sum over the bits, which any single change changes, and one that their order changes.

    A device works its own out, and is waited for once.
    """
    found = list(map(_digest, tensors))
    rows = torch.empty(len(found), 2, dtype=torch.int64, device="cpu")
    for device in {digest.device for digest in found}:
        own = [i for i, digest in enumerate(found) if digest.device == device]
        rows[own] = torch.stack([found[i] for i in own]).cpu()
    return rows


def _digest(tensor: torch.Tensor) -> torch.Tensor:
    """[2] int64 on the tensor's device: a sum, and a sum of words times their positions, modulo 2**64."""
    data = bytes_of(tensor.detach().contiguous())
    if len(data) % 8 or data.data_ptr() % 8 or data.storage_offset() % 8:
        data = torch.nn.functional.pad(data, (0, -len(data) % 8))  # a copy
    words = data.view(torch.int64)
    places = _HOST_PLACES if data.is_cpu else torch.arange(1, 1 + _DEVICE_WORDS, device=data.device)
    pieces = torch.split(words, len(places))
    digest, *others = [torch.stack([piece.sum(), (piece * places[: len(piece)]).sum()]) for piece in pieces]
    for i, other in enumerate(others, start=1):
        digest += other
        digest[1] += other[0] * (i * len(places))
    return digest
