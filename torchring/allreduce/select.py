"""Opens all-reduces for gradients on the CPU, and resolves algorithm="auto" and overlap="auto" for them.

See `device/select.py` for gradients on GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, get_args

import torch

from torchring.allreduce.choice import Choice, check_one_host, in_words, measure_in_turns
from torchring.allreduce.contract import AllReduce
from torchring.allreduce.direct import DirectAllReduce
from torchring.allreduce.hierarchical import HierarchicalAllReduce, column_members, num_columns
from torchring.allreduce.native import NativeAllReduce
from torchring.allreduce.ring import RingAllReduce
from torchring.allreduce.threaded import ThreadedAllReduce
from torchring.errors import TopologyError, in_step
from torchring.memory.channel import POLL_SECONDS
from torchring.transport.open import open_transport
from torchring.world import World

Algorithm = Literal["auto", "direct", "ring", "hierarchical", "native", "nvls"]
ALGORITHMS: Final = get_args(Algorithm)
Overlap = Literal["auto", "inline", "thread"]
OVERLAPS: Final = get_args(Overlap)

NUM_LANES: Final = 2  # buckets that cross the network at a time

_SAMPLE_BYTES: Final = 2 << 20  # of each wire that is measured, at most
_NUM_SAMPLES: Final = 3  # wires at a time
_NUM_TURNS: Final = 3
_PATIENCE_SECONDS: Final = 1.0  # for all turns; a slow network is recognised in the warm-up
# The backend's own all-reduce works in C++, and leaves more of the cores to backward. The measurement does not show
# that, because nothing computes meanwhile: at 10 Gbit/s a ring that was 1.18 times as fast by itself made steps 1.1
# times as long.
_LEAST_ADVANTAGE: Final = 1.3


def choose(world: World, specs: Sequence[tuple[int, torch.dtype]]) -> Choice:
    """Collective: the algorithm that "auto" chooses for wires of these (elements, dtype), the same on all ranks.

    "auto" is "direct" where all ranks share memory. Elsewhere torchring measures "native" against "hierarchical", or
    against "ring" where every host has one rank, for wires of this size. "native" is not considered for 16-bit wires.
    """
    choice, all_reduces = _try(world, specs)
    for all_reduce in all_reduces.values():
        all_reduce.close()
    return choice


def open_chosen(
    world: World, overlap: str, specs: Sequence[tuple[int, torch.dtype]], narrow: torch.dtype | None = None
) -> tuple[AllReduce[Any], Choice]:
    """Collective: the all-reduce for algorithm="auto", and the choice with its reason.

    Args:
        narrow: the 16-bit dtype in which wider wires may travel later.
    """
    choice, all_reduces = _try(world, specs, narrow)
    kept = None if overlap == "inline" else all_reduces.pop(choice.algorithm, None)
    for all_reduce in all_reduces.values():
        all_reduce.close()
    return kept or open_all_reduce(world, choice.algorithm, overlap), choice


def _try(
    world: World, specs: Sequence[tuple[int, torch.dtype]], narrow: torch.dtype | None = None
) -> tuple[Choice, dict[str, AllReduce[Any]]]:
    """The choice, and the all-reduces that were measured for it, open."""
    if world.shares_memory:
        return Choice("direct", "all ranks share memory"), {}
    if max(map(len, world.hosts)) > 1:
        ours, why = "hierarchical", "ranks share memory within hosts"
    else:
        ours, why = "ring", "every host has one rank"
    if any(dtype.itemsize == 2 for _, dtype in specs):
        why += ", and it adds 16-bit values in fp32, which the backend's own all-reduce does not"
        return Choice(ours, why), {}
    sample = _sample(specs)
    if not sample:
        return Choice(ours, why), {}
    all_reduces = {name: open_all_reduce(world, name, "thread") for name in (ours, "native")}
    try:
        seconds = _measure(world, all_reduces, sample)
        if narrow is not None:
            # Only ours adds 16-bit values in fp32. Where ours is the faster one in 16 bits alone, the network is the
            # limit. Then both take about as long for wider values, if 16 bits turn out not to pay.
            half = [(numel, narrow) for numel, _ in sample]
            seconds[f"{ours} in 16 bits"] = _measure(world, {ours: all_reduces[ours]}, half)[ours]
    except BaseException:
        for all_reduce in all_reduces.values():
            all_reduce.close()
        raise
    fastest = min(taken for name, taken in seconds.items() if name != "native")
    best = ours if fastest * _LEAST_ADVANTAGE < seconds["native"] else "native"
    mib = sum(numel * dtype.itemsize for numel, dtype in sample) / 2**20
    return Choice(best, f"{why}; measured for {mib:.3g} MiB: {in_words(seconds)}", seconds), all_reduces


def open_all_reduce(world: World, algorithm: str, overlap: str) -> AllReduce[Any]:
    """Collective: the all-reduce for an algorithm other than "auto".

    With overlap="auto", direct reductions proceed in calls of the thread that runs backward if ranks times threads fill
    the cores: a second thread would only take turns with that thread. Over Gloo, "native" proceeds on Gloo's threads.
    Other reductions proceed in lanes: while a lane waits for the network, backward has the core. Raises TopologyError
    for "direct" across hosts, and for "nvls".
    """
    if algorithm == "nvls":
        text = "algorithm='nvls' takes gradients on GPUs, and these are on the CPU; use algorithm='auto'"
        raise in_step(TopologyError(text, rank=world.rank))
    host = world.host
    assert host is not None
    fills_the_cores = world.local_size * torch.get_num_threads() >= world.num_cores
    in_background = overlap == "thread" or (overlap == "auto" and not (algorithm == "direct" and fills_the_cores))
    if algorithm == "direct":
        check_one_host(world, "algorithm='direct' takes one host")
        # A lane must not poll: it would take turns with the thread that computes.
        direct = DirectAllReduce(host, poll_seconds=0.0 if in_background else POLL_SECONDS)
        return ThreadedAllReduce(direct) if in_background else direct
    transports = [open_transport(world)]
    if algorithm == "native" and in_background and transports[0].proceeds_alone:
        return NativeAllReduce(transports)
    if in_background:
        transports += [open_transport(world) for _ in range(NUM_LANES - 1)]
    if algorithm == "hierarchical":
        members = column_members(world.hosts, world.rank)
        ring = None if members is None else RingAllReduce(transports, members)
        if ring is None:  # transports are opened by all ranks together
            for transport in transports:
                transport.close()
        return HierarchicalAllReduce(host, num_columns(world.hosts), ring, in_background=in_background)
    if algorithm == "ring":
        return ThreadedAllReduce(RingAllReduce(transports), in_background=in_background)
    return ThreadedAllReduce(NativeAllReduce(transports), in_background=in_background)


def _sample(specs: Sequence[tuple[int, torch.dtype]]) -> list[tuple[int, torch.dtype]]:
    """The largest wires, cut to a length that suffices to measure the network."""
    largest = sorted(specs, key=lambda spec: spec[0] * spec[1].itemsize, reverse=True)[:_NUM_SAMPLES]
    return [(min(numel, _SAMPLE_BYTES // dtype.itemsize), dtype) for numel, dtype in largest if numel]


def _measure(
    world: World, all_reduces: Mapping[str, AllReduce[Any]], sample: Sequence[tuple[int, torch.dtype]]
) -> dict[str, float]:
    """Collective: seconds that each all-reduce takes for the sample, of which all wires are started at once."""
    wires = {name: all_reduce.open_wires(sample) for name, all_reduce in all_reduces.items()}
    return measure_in_turns(
        world, all_reduces, wires, num_warm_ups=1, num_turns=_NUM_TURNS, patience_seconds=_PATIENCE_SECONDS
    )
