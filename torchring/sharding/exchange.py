"""Carries parameters that one rank has stepped to the others. On devices, see `device.py`.

Within a host, a rank writes its slices into the memory of its peers. Between hosts, ranks with the same place in their
hosts broadcast them to each other, and write what comes to the peers of their host. So each host receives every slice
once:

      host 0: ranks 0, 1                       host 1: ranks 2, 3
      rank 0 broadcasts its slices             rank 2 has them in its memory, and writes them to that of rank 3

Where hosts have different numbers of ranks, ranks share places: a host may receive a slice more than once.
"""

from collections.abc import Sequence

import torch

from torchring.allreduce.hierarchical import GRACE_SECONDS, num_columns
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
        # A rank of this host may be late because it waits for another host, and then names the rank at fault.
        self._left = Channel(world.host, grace_seconds=GRACE_SECONDS if world.num_nodes > 1 else 0.0)
        places = num_columns(world.hosts)
        mine = world.host.index % places
        self._together = [rank for ranks in world.hosts for i, rank in enumerate(ranks) if i % places == mine]
        self._transport = open_transport(world, ranks=self._together) if world.num_nodes > 1 else None

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
        transfers = []
        if self._transport is not None:
            for memory in memories:
                for sender in self._together:
                    part = _slice(memory.own, memory, sender)
                    transfers.append((memory, sender, self._transport.start_broadcast(part, sender)))
        for memory in memories:
            _copy_to_peers(memory, self._rank)
        for memory, sender, transfer in transfers:
            transfer.wait()
            if sender != self._rank:
                _copy_to_peers(memory, sender)
        self._left.barrier()

    def close(self) -> None:
        if self._transport is not None:
            self._transport.close()


def _slice(buffer: torch.Tensor, memory: FlatMemory, rank: int) -> torch.Tensor:
    start, stop = memory.flat.bounds[rank]
    return buffer[start:stop]


def _copy_to_peers(memory: FlatMemory, rank: int) -> None:
    own = _slice(memory.own, memory, rank)
    for peer in memory.peers:
        _slice(peer, memory, rank).copy_(own)
