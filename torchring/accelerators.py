"""Devices whose work is called for now and done later, in streams; and all that torchring asks of one.

A CPU is none: what is called for there is done when the call returns. `ACCELERATORS` says which device types are. What
reduces on a device goes through `Accelerator`, so that tests can put another one in its place: one whose streams are as
late as they are allowed to be.

      compute stream   ... gradients ready ......................................... [hold] unpack, step
      communication          [follow] pack bucket 0, reduce it [mark]  pack bucket 1, reduce it [mark]

Nothing here makes the host wait for the device, except `synchronize`, which is for set-up.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Final, Protocol, cast

import torch
import torch.distributed as dist
from torch.distributed import Store

from torchring.memory.cuda import SymmetricGroup, environment, share_memory
from torchring.memory.host import HostGroup
from torchring.rendezvous.rendezvous import Rendezvous

# A bare backend, which has a process group's methods, apart from the script's own groups.
Backend = dist.ProcessGroup


class Mark(Protocol):
    """A point in a stream's work, reached when everything before it is done."""

    def is_reached(self) -> bool:
        """Does not wait. From any thread."""

    def hold_current(self) -> None:
        """What the caller puts on its current stream from now on is done after this point."""

    def milliseconds_since(self, earlier: Mark) -> float:
        """Between two marks that are both reached; negative if this one was reached first."""


class Stream(Protocol):
    """A queue of work on the device, done in order."""

    def follow(self, streams: Iterable[object] = ()) -> None:
        """What is put here from now on is done after what is on the caller's current stream, and on `streams`, now."""

    def run(self, work: Callable[[], None]) -> None:
        """Call `work`, with this stream the current one, so that what it launches is put here."""

    def mark(self) -> Mark: ...


class Accelerator(Protocol):
    """A device as this process uses it."""

    device: torch.device

    def open_stream(self, *, in_background: bool) -> Stream:
        """Of high priority, beside the current one; without `in_background` whichever is current: nothing overlaps."""

    def current_stream(self) -> object:
        """Which stream is current: hashable, and good for `Stream.follow`."""

    def mark_current(self) -> Mark:
        """On the current stream."""

    def is_capturing(self) -> bool:
        """Whether what is called for now is recorded into a graph, to be done again and again later."""

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in host memory, all -1 until the current stream has come this far. To look there asks no device."""

    def write_aside(self, word: torch.Tensor, value: int) -> None:
        """Set a one-element tensor, whatever the streams are waiting for. From any thread."""

    def synchronize(self) -> None:
        """Wait until the device has done all that was called for. For set-up and tests."""

    def share(self, host: HostGroup | None, rendezvous: Rendezvous | None) -> SymmetricGroup:
        """Collective: memory of the device that the ranks of this host reach; TopologyError where they do not."""

    def open_backend(self, store: Store, rank: int, size: int, timeout_seconds: float) -> Backend:
        """Collective: torch.distributed's engine for this device between the `size` ranks that share `store`."""


def accelerator_of(device: torch.device) -> Accelerator | None:
    """The accelerator of a device that works in streams; None for one that does not, which is the CPU."""
    if device not in _open:
        opened = ACCELERATORS.get(device.type)
        _open[device] = None if opened is None else opened(device)
    return _open[device]


def span(name: str) -> AbstractContextManager[Any]:
    """A range for torch.profiler, and for NVTX under torch.autograd.profiler.emit_nvtx; free while nobody looks."""
    if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        return cast(AbstractContextManager[Any], torch.profiler.record_function(name))
    return contextlib.nullcontext()


class CudaMark:
    """See `Mark`."""

    __slots__ = ("_device", "_event")

    def __init__(self, stream: torch.cuda.Stream, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._event.record(stream)

    def is_reached(self) -> bool:
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def hold_current(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def milliseconds_since(self, earlier: Mark) -> float:
        assert isinstance(earlier, CudaMark)
        return float(earlier._event.elapsed_time(self._event))


class CudaStream:
    """See `Stream`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _stream_on(device, priority=-1)  # before backward's, where both have blocks to place

    def follow(self, streams: Iterable[object] = ()) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        _wait_for(self._stream, streams)

    def run(self, work: Callable[[], None]) -> None:
        if torch.cuda.current_device() != self._device.index:
            with torch.cuda.device(self._device):
                self.run(work)
            return
        before = torch.cuda.current_stream(self._device)
        torch.cuda.set_stream(self._stream)  # for every bucket: two of these take less than torch.cuda.stream
        try:
            work()
        finally:
            torch.cuda.set_stream(before)

    def mark(self) -> CudaMark:
        return CudaMark(self._stream, self._device)


class CurrentCudaStream:
    """Whichever stream is current; what is put into one after the other is done in order. See `Stream`."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: torch.cuda.Stream | None = None

    def follow(self, streams: Iterable[object] = ()) -> None:
        _wait_for(torch.cuda.current_stream(self._device), streams)

    def run(self, work: Callable[[], None]) -> None:
        stream = torch.cuda.current_stream(self._device)
        if self._last is not None and self._last != stream:  # reductions share their signals
            stream.wait_stream(self._last)
        self._last = stream
        work()

    def mark(self) -> CudaMark:
        return CudaMark(torch.cuda.current_stream(self._device), self._device)


def _stream_on(device: torch.device, priority: int = 0) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]


def _wait_for(waiting: torch.cuda.Stream, streams: Iterable[object]) -> None:
    """Streams as `CudaAccelerator.current_stream` tells them."""
    for stream in streams:
        stream_id, index, kind = cast("tuple[int, int, int]", stream)
        other = torch.cuda.Stream(stream_id=stream_id, device_index=index, device_type=kind)  # type: ignore[no-untyped-call]
        waiting.wait_stream(other)


class CudaAccelerator:
    """NVIDIA GPUs (and AMD's, which PyTorch calls cuda, too). See `Accelerator`."""

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        # For `write_aside`, made now: later, to open a stream or to pin memory might wait for kernels that never end.
        self._aside = _stream_on(self.device)
        self._pinned: dict[tuple[int, torch.dtype], torch.Tensor] = {}
        self._pin(1, torch.int32)

    def open_stream(self, *, in_background: bool) -> Stream:
        return CudaStream(self.device) if in_background else CurrentCudaStream(self.device)

    def current_stream(self) -> object:
        return torch._C._cuda_getCurrentStream(self.device.index)

    def mark_current(self) -> CudaMark:
        return CudaMark(torch.cuda.current_stream(self.device), self.device)

    def is_capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        copy = torch.full(tensor.shape, -1, dtype=tensor.dtype, device="cpu", pin_memory=True)
        return copy.copy_(tensor, non_blocking=True)

    def write_aside(self, word: torch.Tensor, value: int) -> None:
        # By a copy, not a kernel: copies need no room beside kernels that wait.
        source = self._pin(value, word.dtype)
        with torch.cuda.device(self.device), torch.cuda.stream(self._aside):
            word.copy_(source, non_blocking=True)
        self._aside.synchronize()

    def _pin(self, value: int, dtype: torch.dtype) -> torch.Tensor:
        """[1], in memory that a device copies from by itself."""
        if (value, dtype) not in self._pinned:
            self._pinned[value, dtype] = torch.full((1,), value, dtype=dtype, device="cpu", pin_memory=True)
        return self._pinned[value, dtype]

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def share(self, host: HostGroup | None, rendezvous: Rendezvous | None) -> SymmetricGroup:
        return share_memory(host, rendezvous, self.device)

    def open_backend(self, store: Store, rank: int, size: int, timeout_seconds: float) -> Backend:
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        # Its watchdog ends the process. Ours, which names the rank, comes first.
        options._timeout = timedelta(seconds=2 * timeout_seconds + 60)
        # It would also end the process when a peer's links break. The hosts find out who is gone, and `abort` ends it.
        with environment("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0"):
            return cast(Backend, dist.ProcessGroupNCCL(store, rank, size, options))


ACCELERATORS: Final[dict[str, Callable[[torch.device], Accelerator]]] = {"cuda": CudaAccelerator}
_open: Final[dict[torch.device, Accelerator | None]] = {}
