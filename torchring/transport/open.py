"""Opens transports over the backend of a world."""

from __future__ import annotations

from collections.abc import Sequence

from torchring.rooms import room
from torchring.transport.c10d import C10dTransport
from torchring.transport.contract import Transport
from torchring.world import World


def open_transport(world: World, name: str | None = None, ranks: Sequence[int] | None = None) -> Transport:
    """Collective in the world: open links of their own over the world's backend, "gloo" or "mpi".

    Args:
        name: name of the channel; by default the next channel name of the world.
        ranks: the ranks that are connected; by default all. Ranks may be in different groups, each in one.
    """
    assert world.rendezvous is not None, "a world of one sends nothing"
    name = world.next_channel_name() if name is None else name
    kind = room("mpi").MpiTransport if world.backend == "mpi" else C10dTransport
    transport: Transport = kind(world.rendezvous, name, world.host, ranks=ranks)
    world.on_failure(transport)
    return transport
