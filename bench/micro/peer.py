"""Rank 1 of the all-reduce benchmarks: repeats what rank 0 does.

    started by bench_allreduce.py, with the port of its store

For each case, rank 0 broadcasts the `Case`, then True before each all-reduce, and False after the last one. The peer
exits when its standard input is closed, so it never outlives rank 0.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn

import torch
import torch.distributed as dist

import torchring
from torchring.allreduce.select import open_all_reduce
from torchring.default_world import default_world

RIVALS = ("direct", "tensor", "gloo")
SIZE = 2
DEADLINE_SECONDS = 60.0


@dataclass(frozen=True)
class Case:
    """One rival on one fp32 tensor."""

    rival: str
    num_bytes: int


class CaseRunner:
    """Runs a case on both ranks: `prepare` and `reduce` for each all-reduce, then `is_right`. All are collective."""

    def __init__(self, case: Case) -> None:
        world = default_world()
        numel = case.num_bytes // 4
        self.reduce: Callable[[], object]
        self.close: Callable[[], None] = lambda: None
        if case.rival == "direct":
            all_reduce = open_all_reduce(world, "direct", "inline")
            wire = all_reduce.open_wires([(numel, torch.float32)])[0]
            tensor = wire.tensor
            self.reduce = lambda: all_reduce.start(wire).wait()
            self.close = all_reduce.close
        else:
            tensor = torch.empty(numel)
            gloo = case.rival == "gloo"
            self.reduce = lambda: dist.all_reduce(tensor) if gloo else torchring.all_reduce(tensor, op="sum")
        self._tensor = tensor
        pattern = torch.arange(numel, dtype=torch.float32).remainder_(251)
        self._source = pattern + world.rank
        self._expected = pattern * world.size + sum(range(world.size))

    def prepare(self) -> None:
        self._tensor.copy_(self._source)
        torchring.barrier()

    def is_right(self) -> bool:
        """Whether the last result is right on both ranks. Collective."""
        is_wrong = not torch.equal(self._tensor, self._expected)
        return not torchring.all_reduce(torch.tensor([int(is_wrong)]), op="max").item()


def join(store: dist.Store, rank: int) -> None:
    """Start Gloo for the rival, and torchring."""
    timeout = timedelta(seconds=DEADLINE_SECONDS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=SIZE, timeout=timeout)
    torchring.init(timeout_seconds=DEADLINE_SECONDS)


def leave() -> None:
    """Shut both down. Works even if the other rank has ended, or has never joined."""
    torchring.shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()


def follow() -> NoReturn:
    """Repeat what rank 0 does, case after case."""
    while True:
        with closing(CaseRunner(torchring.broadcast_object(None))) as runner:
            while torchring.broadcast_object(None):
                runner.prepare()
                runner.reduce()
            runner.is_right()


def main() -> NoReturn:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for rank 0
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    timeout = timedelta(seconds=DEADLINE_SECONDS)
    join(dist.TCPStore("127.0.0.1", int(sys.argv[1]), is_master=False, timeout=timeout), 1)
    follow()


def _end_with_parent() -> NoReturn:
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
