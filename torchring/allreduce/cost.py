"""Measures the time of a reduction by its size, with the all-reduce that reduces gradients."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from torchring.allreduce.contract import AllReduce
from torchring.collectives.service import internal_collectives_of
from torchring.world import World

SIZES_BYTES: Final = (64 << 10, 512 << 10, 2 << 20, 8 << 20)
_NUM_WIRES: Final = 2  # at a time, as in a backward: a cost that both share, such as a wait for a message, counts half
_NUM_TURNS: Final = 3
_PATIENCE_SECONDS: Final = 0.25  # for a turn; after a longer one, larger sizes are not measured


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
    for reduction in pending:
        reduction.contribute()
    for reduction in pending:
        reduction.wait()
    synchronize()
    taken = torch.tensor(time.perf_counter() - started, dtype=torch.float64, device="cpu")
    return float(collectives.all_reduce(taken, "max"))


def measure_cost(world: World, all_reduce: AllReduce[Any], dtype: torch.dtype) -> list[tuple[int, float]]:
    """Collective, while no reduction is under way: (bytes, seconds) of one reduction, for several sizes.

    The time of a turn is that of the slowest rank, and of several turns the median counts: the same numbers on all
    ranks. Needs memory for two wires of 8 MiB, which is free again afterwards.
    """
    measured = []
    for num_bytes in SIZES_BYTES:
        seconds = _measure(world, all_reduce, num_bytes // dtype.itemsize, dtype)
        measured.append((num_bytes, seconds))
        if seconds * _NUM_WIRES > _PATIENCE_SECONDS:
            break
    internal_collectives_of(world).barrier()  # memory is free when all ranks have let go of it
    return measured


def _measure(world: World, all_reduce: AllReduce[Any], numel: int, dtype: torch.dtype) -> float:
    wires = all_reduce.open_wires([(numel, dtype)] * _NUM_WIRES)
    turns: list[float] = []
    for turn in range(_NUM_TURNS + 1):  # the first is a warm-up, unless it takes so long that one turn suffices
        slowest = seconds_together(world, all_reduce, wires)
        if turn or slowest > _PATIENCE_SECONDS:
            turns.append(slowest)
        if slowest > _PATIENCE_SECONDS:
            break
    return statistics.median(turns) / _NUM_WIRES
