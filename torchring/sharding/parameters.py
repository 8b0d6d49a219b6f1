"""Moves parameters to memory in which ranks write each other's copies.

Every rank keeps parameters of its own: a script may write to them on all ranks alike (`p.mul_(0.9)`), which would count
once for each rank if the ranks had one copy together. The memory takes the place of what the parameters had.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Final

import torch

from torchring.accelerators import accelerator_of
from torchring.gradients.views import CAN_SWAP, gradient_view, num_owners, storage_of
from torchring.kernels.chunks import DTYPES
from torchring.memory.host import HostGroup
from torchring.sharding.cut import Flat

_NUM_OWNERS: Final = num_owners(storage_of(torch.nn.Parameter(torch.empty(1, device="cpu"))))


class FlatMemory:
    """The memory of one `Flat`.

    Attributes:
        own: [numel] of its dtype; this rank's parameters.
        peers: the same of the other ranks of the host, where the host writes them.
    """

    def __init__(self, flat: Flat, own: torch.Tensor, peers: Sequence[torch.Tensor]) -> None:
        self.flat = flat
        self.own = own
        self.peers = peers


def movable(parameters: Sequence[torch.Tensor]) -> list[bool]:
    """Which of the parameters of an optimizer can move to other memory, each by itself."""
    storages = [parameter.untyped_storage()._cdata for parameter in parameters]
    num_users = Counter(storages)
    return [_fills_storage(p) and num_users[storage] == 1 for p, storage in zip(parameters, storages, strict=True)]


def _fills_storage(parameter: torch.Tensor) -> bool:
    """Whether the parameter fills a storage of its own without gaps, in any order of dimensions."""
    return (
        CAN_SWAP
        and parameter.layout == torch.strided
        and (accelerator_of(parameter.device) is None or parameter.dtype.to_real() in DTYPES)  # which kernels copy
        and type(parameter.data) is torch.Tensor
        and not (parameter.is_cpu and parameter.is_shared())  # type: ignore[no-untyped-call]  # with other processes
        and parameter.storage_offset() == 0
        and parameter.untyped_storage().nbytes() == parameter.numel() * parameter.dtype.itemsize
        and parameter.numel() > 0
        and not (parameter.is_conj() or parameter.is_neg())
    )


def host_memory(flats: Sequence[Flat], host: HostGroup) -> list[FlatMemory]:
    """Collective: memory that the ranks of this host share."""
    block = host.allocate(sum(_padded(flat.num_bytes) for flat in flats))
    memories, start = [], 0
    for flat in flats:
        views = [part[start : start + flat.num_bytes].view(flat.dtype) for part in block.parts]
        own = views.pop(host.index)
        memories.append(FlatMemory(flat, own, views))
        start += _padded(flat.num_bytes)
    return memories


@torch.no_grad()
def move(parameters: Sequence[torch.nn.Parameter], memories: Sequence[FlatMemory]) -> list[torch.Tensor]:
    """Move parameters to these memories. Tensors that share their memory move with them.

    Returns what has to stay allocated: numpy's arrays may still point there.
    """
    kept = []
    for memory in memories:
        for index, (start, stop) in memory.flat.spans.items():
            parameter = parameters[index]
            view = gradient_view(memory.own[start:stop], parameter.shape, parameter.stride(), parameter.dtype)
            has_others = num_owners(storage_of(parameter)) > _NUM_OWNERS
            view.copy_(parameter)
            parameter.untyped_storage()._swap_data_ptr_(view.untyped_storage())  # type: ignore[attr-defined]
            if has_others and parameter.is_cpu:
                kept.append(view)  # has the memory that the parameter had
    return kept


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // 64) * 64
