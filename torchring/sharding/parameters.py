"""Moves parameters to memory in which the ranks of a host write each other's copies.

Every rank keeps parameters of its own: a script may write to them on all ranks alike (`p.mul_(0.9)`), which would count
once for each rank if the ranks had one copy together. The memory takes the place of what the parameters had.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import torch

from torchring.gradients.views import CAN_SWAP, gradient_view, num_owners, storage_of
from torchring.memory.host import HostGroup
from torchring.sharding.cut import Region

_NUM_OWNERS: Final = num_owners(storage_of(torch.nn.Parameter(torch.empty(1, device="cpu"))))


class RegionMemory:
    """The memory of one region.

    Attributes:
        own: [numel] of the region's dtype; this rank's parameters.
        peers: the same of the other ranks of the host.
        gradient: [numel]; a bucket that holds the gradients of this rank's slice. None: gradients are in `.grad`.
    """

    def __init__(self, region: Region, own: torch.Tensor, peers: Sequence[torch.Tensor]) -> None:
        self.region = region
        self.own = own
        self.peers = peers
        self.gradient: torch.Tensor | None = None


def can_move(parameter: torch.Tensor) -> bool:
    """Whether the parameter fills a storage of its own without gaps, in any order of dimensions."""
    return (
        CAN_SWAP
        and parameter.device.type == "cpu"
        and parameter.layout == torch.strided
        and type(parameter.data) is torch.Tensor
        and not parameter.is_shared()  # type: ignore[no-untyped-call]  # with processes of the script's own
        and parameter.storage_offset() == 0
        and parameter.untyped_storage().nbytes() == parameter.numel() * parameter.dtype.itemsize
        and parameter.numel() > 0
        and not (parameter.is_conj() or parameter.is_neg())
    )


def move(
    parameters: Sequence[torch.nn.Parameter], regions: Sequence[Region], host: HostGroup
) -> tuple[list[RegionMemory], list[torch.Tensor]]:
    """Collective: move the members of `regions` to shared memory. Tensors that share their memory move with them.

    Returns the memory of the regions, and what has to stay allocated: numpy's arrays may still point there.
    """
    block = host.allocate(sum(_padded(region.num_bytes) for region in regions))
    memories, kept, start = [], [], 0
    for region in regions:
        views = [part[start : start + region.num_bytes].view(region.dtype) for part in block.parts]
        own = views.pop(host.index)
        for member in region.members:
            parameter = parameters[member.parameter]
            place = own[member.offset : member.offset + member.numel]
            view = gradient_view(place, parameter.shape, parameter.stride(), parameter.dtype)
            has_others = num_owners(storage_of(parameter)) > _NUM_OWNERS
            with torch.no_grad():
                view.copy_(parameter)
            parameter.untyped_storage()._swap_data_ptr_(view.untyped_storage())  # type: ignore[attr-defined]
            if has_others:
                kept.append(view)  # has the memory that the parameter had
        memories.append(RegionMemory(region, own, views))
        start += _padded(region.num_bytes)
    return memories, kept


def _padded(num_bytes: int) -> int:
    return -(-num_bytes // 64) * 64
