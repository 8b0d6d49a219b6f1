"""Which mover reduces, and on which thread: what "auto" means."""

from __future__ import annotations

from typing import Final

import torch

from torchring.allreduce.direct import DirectAllReduce
from torchring.allreduce.mover import Mover
from torchring.allreduce.native import NativeAllReduce
from torchring.allreduce.ring import RingAllReduce
from torchring.errors import TopologyError
from torchring.memory.channel import POLL_SECONDS
from torchring.transport.c10d import C10dTransport
from torchring.world import World

ALGORITHMS: Final = ("auto", "direct", "ring", "native")
OVERLAPS: Final = ("auto", "inline", "thread")


def open_mover(world: World, algorithm: str, overlap: str) -> tuple[Mover, bool]:
    """Collective. Returns the mover, and whether it belongs on a worker thread.

    "auto" is "direct" where all ranks share memory, else "ring". It is inline where waiting for peers leaves no core
    idle: memory is shared and ranks times threads fill the cores. Raises TopologyError for "direct" across hosts.
    """
    if algorithm == "auto":
        algorithm = "direct" if world.shares_memory else "ring"
    fills_the_cores = world.local_size * torch.get_num_threads() >= world.num_cores
    threaded = overlap == "thread" or (overlap == "auto" and not (algorithm == "direct" and fills_the_cores))
    if algorithm == "direct":
        if world.host is None or not world.shares_memory:
            raise TopologyError(
                f"algorithm='direct' takes one host, but ranks share memory only within {list(world.hosts)}; "
                "use algorithm='auto' or 'ring'",
                rank=world.rank,
            )
        # A worker thread that polled would take turns with the one that computes.
        return DirectAllReduce(world.host, poll_seconds=0.0 if threaded else POLL_SECONDS), threaded
    assert world.rendezvous is not None
    transport = C10dTransport(world.rendezvous, world.next_stream_name(), world.host)
    return (RingAllReduce(transport) if algorithm == "ring" else NativeAllReduce(transport)), threaded
