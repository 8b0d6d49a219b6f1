"""A fake accelerator for dry runs of the GPU benchmarks: its streams run all work on the CPU, at once.

With TRITON_INTERPRET=1 torchring's kernels are interpreted on this accelerator, and ranks share memory of the host.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed import Store

from torchring.accelerators import ACCELERATORS, Backend, Mark
from torchring.memory.cuda import LonelyGroup, SymmetricGroup
from torchring.memory.host import HostGroup
from torchring.rendezvous.rendezvous import Rendezvous


class DryMark:
    """See `torchring.accelerators.Mark`."""

    def __init__(self) -> None:
        self._time = time.perf_counter()

    def is_reached(self) -> bool:
        return True

    def hold_current(self) -> None: ...

    def milliseconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, DryMark)
        return 1e3 * (self._time - earlier._time)


class DryStream:
    """See `torchring.accelerators.Stream`."""

    def follow(self, streams: Iterable[object] = ()) -> None: ...

    def run(self, work: Callable[[], None]) -> None:
        work()

    def mark(self) -> DryMark:
        return DryMark()


class DryAccelerator:
    """See `torchring.accelerators.Accelerator`."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.num_processors = 1

    def open_stream(self) -> DryStream:
        return DryStream()

    def current_stream(self) -> object:
        return "current"

    def mark_current(self) -> DryMark:
        return DryMark()

    def is_capturing(self) -> bool:
        return False

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone()

    def host_word(self) -> torch.Tensor:
        return torch.zeros(1, dtype=torch.int32, device="cpu")

    def synchronize(self) -> None: ...

    def share(self, host: HostGroup | None, rendezvous: Rendezvous | None) -> SymmetricGroup:
        return LonelyGroup(0, self.device) if host is None or host.size == 1 else host

    def open_backend(self, store: Store, rank: int, size: int, timeout_seconds: float) -> Backend:
        return cast(Backend, dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout_seconds)))


def install() -> None:
    """Make torchring use a `DryAccelerator` for the CPU in this process. Call before torchring uses the CPU."""
    ACCELERATORS["cpu"] = DryAccelerator
