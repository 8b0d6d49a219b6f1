"""Opens all-reduces for gradients on the CPU, and resolves algorithm="auto" and overlap="auto" for them.

See `devices/opening.py` for gradients on GPUs.
"""

from typing import Any, Final, Literal, NamedTuple, get_args

import torch

from torchring.allreduce.contract import AllReduce
from torchring.allreduce.direct import DirectAllReduce
from torchring.errors import TopologyError, in_step
from torchring.rooms import room
from torchring.world import World

Algorithm = Literal["auto", "direct", "ring", "hierarchical", "native"]
ALGORITHMS: Final = get_args(Algorithm)
Overlap = Literal["auto", "inline", "thread"]
OVERLAPS: Final = get_args(Overlap)


class Choice(NamedTuple):
    """The algorithm that reduces an optimizer's gradients."""

    algorithm: str  # "direct", "ring", "hierarchical" or "native"
    reason: str  # a sentence


def choose(world: World) -> Choice:
    """The algorithm that "auto" chooses, the same on all ranks.

    Where some ranks share memory, "hierarchical" sends each byte between hosts once, and "native" sends it once for
    each rank of a host. For buckets of 1 to 25 MiB it took 0.70 to 0.76 of the engine's time, "native" 0.85 to 1.05.
    """
    if world.shares_memory:
        return Choice("direct", "all ranks share memory")
    if max(map(len, world.hosts)) == 1:
        return Choice("native", "every host has one rank")
    return Choice("hierarchical", "ranks share memory within hosts")


def open_all_reduce(world: World, algorithm: str, overlap: str) -> AllReduce[Any]:
    """Collective: the all-reduce for an algorithm other than "auto".

    With overlap="auto", "direct" proceeds in calls of the thread that runs backward if ranks times threads fill
    the cores: a second thread would only take turns with that thread. "native" proceeds on the engine's threads, and
    "hierarchical" on threads, too: while a thread waits for the network, backward has the core. "ring" is "native": the
    engine's all-reduce is a ring. Raises TopologyError for "direct" across hosts, ValueError for others "inline".
    """
    if algorithm == "direct":
        check_one_host(world, "algorithm='direct' takes one host")
        assert world.host is not None
        fills_the_cores = world.local_size * torch.get_num_threads() >= world.num_physical_cores
        in_background = overlap == "thread" or (overlap == "auto" and not fills_the_cores)
        return DirectAllReduce(world.host, in_background=in_background)
    if overlap == "inline":
        text = f"overlap='inline' takes algorithm='direct', on one host; {algorithm!r} reduces in the background: use"
        raise in_step(ValueError(f"{text} overlap='auto'"))
    if algorithm == "hierarchical":
        all_reduce: AllReduce[Any] = room("hierarchical").open_hierarchical(world)
        return all_reduce
    from torchring.allreduce.native import NativeAllReduce  # imported here: a job on one host does not need it
    from torchring.transport.c10d import open_transport

    return NativeAllReduce(open_transport(world))


def check_one_host(world: World, problem: str, also: str = "'hierarchical'") -> None:
    if len(world.hosts) > 1:
        text = f"{problem}, but ranks share memory only within {list(world.hosts)}; use algorithm='auto' or {also}"
        raise in_step(TopologyError(text, rank=world.rank))
