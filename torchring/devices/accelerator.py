"""`Accelerator` is all that torchring asks of a device that queues work in streams and does it later.

All code that reduces on a device uses it, so that tests can replace it by a simulated device, which delays work for as
long as the order of streams allows.

      compute stream   ... gradients ready, pack bucket 0 ... pack bucket 1 ............ [hold] unpack, step
      communication                              [follow] reduce bucket 0  [follow] reduce bucket 1 [mark]

Only `synchronize`, which is for set-up, makes the host wait for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
import torch.distributed as dist

# A backend of torchring's own, apart from the script's process groups. It has a process group's methods.
Backend = dist.ProcessGroup


class Mark(Protocol):
    """A point in a stream's work. The mark is reached when all work before it is done."""

    def is_reached(self) -> bool:
        """Whether the device has come this far. Does not wait. May be called from any thread."""

    def hold_current(self) -> None:
        """Make later work on the caller's current stream wait for this mark."""

    def milliseconds_since(self, earlier: Mark) -> float:
        """Time from `earlier` to this mark, both of which are reached. Negative if this mark was reached first."""


class Stream(Protocol):
    """A queue of work on the device, done in order."""

    def follow(self) -> None:
        """Make later work on this stream wait for all work that is now on the caller's current stream."""

    def run(self, work: Callable[[], None]) -> None:
        """Call `work` with this stream as the current stream, so that `work` launches its kernels here."""

    def mark(self) -> Mark: ...


class Accelerator(Protocol):
    """A device as this process uses it."""

    device: torch.device

    def open_stream(self) -> Stream:
        """Open a stream of high priority beside the current one."""

    def current_stream(self) -> object:
        """The current stream, as a hashable value that `join` accepts. Each gradient's hook calls this."""

    def join(self, streams: Iterable[object], tensors: Iterable[torch.Tensor]) -> None:
        """Make later work on the current stream wait for all work that is now on `streams`, and read `tensors`.

        The memory of the tensors, which were allocated on any of these streams, is not used again before.
        """

    def mark_current(self) -> Mark:
        """A mark at the present end of the current stream."""

    def is_capturing(self) -> bool:
        """Whether work that is launched now is recorded into a graph, to be replayed later."""

    def fetch(self, tensor: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        """A copy in host memory, which holds -1 until the current stream has made the copy. Reading it asks no
        device.

        Args:
            into: an earlier copy of a tensor of this shape and dtype, which takes the values. It has come, and nobody
                looks at it any more.
        """

    def host_word(self) -> torch.Tensor:
        """int32 [1] in host memory, 0. Kernels that run, and even those that wait, see what the host writes to it."""

    def synchronize(self) -> None:
        """Wait until the device has done all its work. For set-up and tests."""

    def share(self, host: Any, rendezvous: Any) -> Any:
        """Collective: device memory that all ranks of this host reach, as a `devices.symmetric_memory.SymmetricGroup`.

        Raises TopologyError if they cannot reach it.
        """

    def open_backend(self, store: dist.Store, rank: int, size: int, timeout_seconds: float) -> Backend:
        """Collective: torch.distributed's backend for this device, between the `size` ranks that share `store`."""
