"""The measurement that decides which algorithm reduces gradients on GPUs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torchring.allreduce.contract import AllReduce
from torchring.collectives.service import internal_collectives_of
from torchring.world import World


def measure_in_turns(
    world: World,
    all_reduces: Mapping[str, AllReduce[Any]],
    wires: Mapping[str, Sequence[Any]],
    *,
    num_warm_ups: int,
    num_turns: int,
    synchronize: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Collective: seconds that each all-reduce takes to reduce its wires, which are all started at once.

    They take turns. The time of a turn is that of the slowest rank, and the result is the median of turns: the same
    numbers on all ranks, so that all ranks decide alike.

    Args:
        wires: for each all-reduce, wires that it has opened.
        num_warm_ups: number of turns at the beginning whose times do not count.
        num_turns: number of turns whose times count.
        synchronize: waits until results are there.
    """
    seconds: dict[str, list[float]] = {name: [] for name in all_reduces}
    for turn in range(num_warm_ups + num_turns):
        for name, all_reduce in all_reduces.items():
            slowest = seconds_together(world, all_reduce, wires[name], synchronize)
            if turn >= num_warm_ups:
                seconds[name].append(slowest)
    return {name: statistics.median(taken) for name, taken in seconds.items()}


def seconds_together(
    world: World, all_reduce: AllReduce[Any], wires: Sequence[Any], synchronize: Callable[[], None] = lambda: None
) -> float:
    """Collective: seconds to reduce all these wires, started at once, on the slowest rank.

    Args:
        synchronize: waits until results are there.
    """
    collectives = internal_collectives_of(world)
    collectives.barrier()
    started = time.perf_counter()
    pending = [all_reduce.start(wire) for wire in wires]
    for work in pending:
        work.advance(waits=True)
    for work in pending:
        work.wait()
    synchronize()
    taken = torch.tensor(time.perf_counter() - started, dtype=torch.float64, device="cpu")
    return float(collectives.all_reduce(taken, "max"))


def in_words(seconds: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {taken * 1e3:.3g} ms" for name, taken in seconds.items())
