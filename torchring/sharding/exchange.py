"""Carries parameters that one rank has stepped to the others. On devices, see `device.py`.

Within a host, a rank writes its slices into the memory of its peers. Between hosts, it sends them to one rank of every
other host, which writes them to the peers there. So each host receives every slice once:

      host 0: ranks 0, 1                       host 1: ranks 2, 3
      rank 0 sends its slices to rank 2        rank 2 writes them to its memory, and to that of rank 3
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torchring.memory.channel import Channel
from torchring.sharding.cut import Flat
from torchring.sharding.parameters import FlatMemory
from torchring.transport.c10d import open_transport
from torchring.world import World


class Exchange:
    """Opened by all ranks of `world` together."""

    def __init__(self, world: World) -> None:
        assert world.host is not None
        self._host = world.host
        self._rank = world.rank
        self._left = Channel(world.host)
        self._transport = open_transport(world) if world.num_nodes > 1 else None
        mine, index = world.hosts[world.node_rank], world.host.index
        others = [ranks for ranks in world.hosts if ranks != mine]
        self._receivers = [ranks[index % len(ranks)] for ranks in others]
        self._senders = [rank for ranks in others for i, rank in enumerate(ranks) if mine[i % len(mine)] == world.rank]

    def allocate(self, flats: Sequence[Flat]) -> list[FlatMemory]:
        """Collective: memory that the ranks of this host share."""
        lengths = [-(-flat.numel * flat.dtype.itemsize // 64) * 64 for flat in flats]
        block = self._host.allocate(sum(lengths))
        memories, start = [], 0
        for flat, length in zip(flats, lengths, strict=True):
            views = [part[start : start + length].view(flat.dtype)[: flat.numel] for part in block.parts]
            own = views.pop(self._host.index)
            memories.append(FlatMemory(flat, own, views))
            start += length
        return memories

    def spread(self, memories: Sequence[FlatMemory]) -> None:
        """Give all ranks the slices that this rank has stepped. Returns when this rank's memory is complete.

        In the same order on all ranks. Every rank has called this, or waits to be allowed to, so that its parameters
        may be written.
        """
        receives, sends = [], []
        if self._transport is not None:
            for memory in memories:
                for sender in self._senders:
                    transfer = self._transport.receive(_slice(memory.own, memory, sender), sender)
                    receives.append((memory, sender, transfer))
                own = _slice(memory.own, memory, self._rank)
                sends += [self._transport.send(own, receiver) for receiver in self._receivers]
        for memory in memories:
            _copy_to_peers(memory, self._rank)
        for memory, sender, transfer in receives:
            transfer.wait()
            _copy_to_peers(memory, sender)
        for transfer in sends:
            transfer.wait()
        self._left.barrier()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


def _slice(buffer: torch.Tensor, memory: FlatMemory, rank: int) -> torch.Tensor:
    start, stop = memory.flat.bounds[rank]
    return buffer[start:stop]


def _copy_to_peers(memory: FlatMemory, rank: int) -> None:
    """Copy the slice of `rank` from this rank's memory to that of its peers."""
    own = _slice(memory.own, memory, rank)
    for peer in memory.peers:
        _slice(peer, memory, rank).copy_(own)
