"""The other rank of the all-reduce benchmarks: does what rank 0 does, as often as rank 0 does it.

    python -m torchring.bench.micro.peer PORT      started by bench_allreduce.py

Rank 0 broadcasts a `Case`, then True before each all-reduce and False after the last; and so on. The peer ends when its
standard input does, so it never outlives rank 0.
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
from torchring.allreduce.select import open_mover
from torchring.world import default_world

RIVALS = ("direct", "tensor", "gloo")
SIZE = 2
DEADLINE_SECONDS = 60.0


@dataclass(frozen=True)
class Case:
    """One rival on one fp32 tensor."""

    rival: str
    num_bytes: int


class Match:
    """A case, opened by both ranks together: `prepare`, `reduce`, again and again, then `is_right`."""

    def __init__(self, case: Case) -> None:
        world = default_world()
        numel = case.num_bytes // 4
        self.reduce: Callable[[], object]
        self.close: Callable[[], None] = lambda: None
        if case.rival == "direct":
            mover = open_mover(world, "direct", "inline")
            wire = mover.open_wires([(numel, torch.float32)])[0]
            tensor = wire.tensor
            self.reduce = lambda: mover.start(wire).wait()
            self.close = mover.close
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
        """Collective: whether the last result is right on both ranks."""
        is_wrong = not torch.equal(self._tensor, self._expected)
        return not torchring.all_reduce(torch.tensor([int(is_wrong)]), op="max").item()


def join(store: dist.Store, rank: int) -> None:
    """Gloo for the rival, and torchring beside it."""
    timeout = timedelta(seconds=DEADLINE_SECONDS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=SIZE, timeout=timeout)
    torchring.init(timeout_seconds=DEADLINE_SECONDS)


def leave() -> None:
    """Also after the other rank is gone, or has never come."""
    torchring.shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()


def follow() -> NoReturn:
    """Do as rank 0 does, case after case."""
    while True:
        with closing(Match(torchring.broadcast_object(None))) as match:
            while torchring.broadcast_object(None):
                match.prepare()
                match.reduce()
            match.is_right()


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
