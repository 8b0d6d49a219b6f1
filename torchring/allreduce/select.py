"""Opens all-reduces for gradients on the CPU, and resolves algorithm="auto" and overlap="auto" for them.

See `devices/opening.py` for gradients on GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, get_args

import torch

from torchring.allreduce.choice import Choice, check_one_host, in_words, measure_in_turns
from torchring.allreduce.contract import AllReduce
from torchring.allreduce.direct import DirectAllReduce
from torchring.allreduce.threaded import ThreadedAllReduce
from torchring.memory.channel import POLL_SECONDS
from torchring.world import World

Algorithm = Literal["auto", "direct", "ring", "hierarchical", "native"]
ALGORITHMS: Final = get_args(Algorithm)
Overlap = Literal["auto", "inline", "thread"]
OVERLAPS: Final = get_args(Overlap)

_SAMPLE_BYTES: Final = 2 << 20  # of each wire that is measured, at most
_NUM_SAMPLES: Final = 3  # wires at a time
_NUM_TURNS: Final = 3
_PATIENCE_SECONDS: Final = 1.0  # for all turns; a slow network is recognised in the warm-up


def choose(world: World, specs: Sequence[tuple[int, torch.dtype]]) -> Choice:
    """Collective: the algorithm that "auto" chooses for wires of these (elements, dtype), the same on all ranks.

    "auto" is "direct" where all ranks share memory, and "native" where no two ranks do. Elsewhere torchring measures
    "native" against "hierarchical", for wires of this size.
    """
    choice, all_reduces = _try(world, specs)
    for all_reduce in all_reduces.values():
        all_reduce.close()
    return choice


def open_chosen(world: World, overlap: str, specs: Sequence[tuple[int, torch.dtype]]) -> tuple[AllReduce[Any], Choice]:
    """Collective: the all-reduce for algorithm="auto", and the choice with its reason."""
    choice, all_reduces = _try(world, specs)
    kept = None if overlap == "inline" else all_reduces.pop(choice.algorithm, None)
    for all_reduce in all_reduces.values():
        all_reduce.close()
    return kept or open_all_reduce(world, choice.algorithm, overlap), choice


def _try(world: World, specs: Sequence[tuple[int, torch.dtype]]) -> tuple[Choice, dict[str, AllReduce[Any]]]:
    """The choice, and the all-reduces that were measured for it, open."""
    if world.shares_memory:
        return Choice("direct", "all ranks share memory"), {}
    if max(map(len, world.hosts)) == 1:
        return Choice("native", "every host has one rank"), {}
    why = "ranks share memory within hosts"
    sample = _sample(specs)
    if not sample:
        return Choice("hierarchical", why), {}
    all_reduces = {name: open_all_reduce(world, name, "thread") for name in ("hierarchical", "native")}
    try:
        seconds = _measure(world, all_reduces, sample)
    except BaseException:
        for all_reduce in all_reduces.values():
            all_reduce.close()
        raise
    mib = sum(numel * dtype.itemsize for numel, dtype in sample) / 2**20
    best = min(seconds, key=lambda name: seconds[name])
    return Choice(best, f"{why}; measured for {mib:.3g} MiB: {in_words(seconds)}", seconds), all_reduces


def open_all_reduce(world: World, algorithm: str, overlap: str) -> AllReduce[Any]:
    """Collective: the all-reduce for an algorithm other than "auto".

    With overlap="auto", "direct" proceeds in calls of the thread that runs backward if ranks times threads fill
    the cores: a second thread would only take turns with that thread. "native" proceeds on the engine's threads. Other
    it proceeds on threads: while a thread waits for the network, backward has the core. "ring" is "native": the
    engine's all-reduce is a ring. Raises TopologyError for "direct" across hosts.
    """
    in_background = _in_background(world, algorithm, overlap)
    if algorithm == "direct":
        check_one_host(world, "algorithm='direct' takes one host")
        # A thread must not poll: it would take turns with the thread that computes.
        assert world.host is not None
        direct = DirectAllReduce(world.host, poll_seconds=0.0 if in_background else POLL_SECONDS)
        return ThreadedAllReduce(direct) if in_background else direct
    # Imported here: a job on one host needs neither.
    if algorithm == "hierarchical":
        from torchring.allreduce.hierarchical import open_hierarchical

        return open_hierarchical(world, in_background=in_background)
    from torchring.allreduce.native import NativeAllReduce
    from torchring.transport.open import open_transport

    return NativeAllReduce(open_transport(world), in_background=in_background)


def _in_background(world: World, algorithm: str, overlap: str) -> bool:
    fills_the_cores = world.local_size * torch.get_num_threads() >= world.num_physical_cores
    return overlap == "thread" or (overlap == "auto" and not (algorithm == "direct" and fills_the_cores))


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
