"""Accelerators: devices that queue work in streams and do it later. `Accelerator` is all that torchring asks of one.

A CPU is no accelerator: its work is done when a call returns. `ACCELERATORS` lists the device types that are. All code
that reduces on a device uses `Accelerator`, so that tests can replace it by a simulated device, which delays work for
as long as the order of streams allows.

      compute stream   ... gradients ready ......................................... [hold] unpack, step
      packing                [follow] pack bucket 0 [mark]  pack bucket 1 [mark]
      communication            [hold] reduce bucket 0 [mark]  [hold] reduce bucket 1 [mark]

Only `synchronize`, which is for set-up, makes the host wait for the device.
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

    def follow(self, streams: Iterable[object] = ()) -> None:
        """Make later work on this stream wait for all work that is now on the caller's current stream and on
        `streams`.
        """

    def run(self, work: Callable[[], None]) -> None:
        """Call `work` with this stream as the current stream, so that `work` launches its kernels here."""

    def mark(self) -> Mark: ...


class Accelerator(Protocol):
    """A device as this process uses it.

    Attributes:
        num_processors: how many multiprocessors the device has. Each runs a few blocks of a kernel at a time.
    """

    device: torch.device
    num_processors: int

    def open_stream(self) -> Stream:
        """Open a stream of high priority beside the current one."""

    def current_stream(self) -> object:
        """The current stream, as a hashable value that `Stream.follow` accepts."""

    def mark_current(self) -> Mark:
        """A mark at the present end of the current stream."""

    def is_capturing(self) -> bool:
        """Whether work that is launched now is recorded into a graph, to be replayed later."""

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy in host memory, which holds -1 until the current stream has made the copy. Reading it asks no
        device.
        """

    def host_word(self) -> torch.Tensor:
        """int32 [1] in host memory, 0. Kernels that run, and even those that wait, see what the host writes to it."""

    def synchronize(self) -> None:
        """Wait until the device has done all its work. For set-up and tests."""

    def share(self, host: HostGroup | None, rendezvous: Rendezvous | None, *, multicast: bool) -> SymmetricGroup:
        """Collective: device memory that all ranks of this host reach. Raises TopologyError if they cannot reach it.

        multicast: the memory gets multicast addresses, see `memory.cuda.Block`, where the devices have them.
        """

    def open_backend(self, store: Store, rank: int, size: int, timeout_seconds: float) -> Backend:
        """Collective: torch.distributed's backend for this device, between the `size` ranks that share `store`."""


def accelerator_of(device: torch.device) -> Accelerator | None:
    """The accelerator of `device`; None for the CPU."""
    if device not in _open:
        opened = ACCELERATORS.get(device.type)
        _open[device] = None if opened is None else opened(device)
    return _open[device]


def span(name: str) -> AbstractContextManager[Any]:
    """A named range for torch.profiler, and for NVTX under torch.autograd.profiler.emit_nvtx. Free unless profiled."""
    if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        return cast(AbstractContextManager[Any], torch.profiler.record_function(name))
    return contextlib.nullcontext()


_spare_events: Final[dict[torch.device, list[torch.cuda.Event]]] = {}  # those that no mark uses


class CudaMark:
    """See `Mark`.

    An event is used again when its mark is gone, since making an event takes longer than recording it. Streams that
    were told to wait for the mark still wait for it: "cudaStreamWaitEvent() uses the most recently captured state at
    the time of the API call" (CUDA Runtime API, cudaEventRecord).
    """

    __slots__ = ("_device", "_event", "_spare")

    def __init__(self, stream: torch.cuda.Stream, device: torch.device) -> None:
        self._device = device
        self._spare = _spare_events.setdefault(device, [])
        try:
            self._event = self._spare.pop()
        except IndexError:
            self._event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._event.record(stream)

    def __del__(self) -> None:
        self._spare.append(self._event)

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
        # Its blocks are placed before those of backward.
        self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._followed = torch.cuda.Event()  # type: ignore[no-untyped-call]  # used again, as those of `CudaMark`

    def follow(self, streams: Iterable[object] = ()) -> None:
        self._wait_for(torch.cuda.current_stream(self._device))
        for stream in streams:  # as `CudaAccelerator.current_stream` has returned them
            stream_id, index, kind = cast("tuple[int, int, int]", stream)
            self._wait_for(torch.cuda.Stream(stream_id=stream_id, device_index=index, device_type=kind))  # type: ignore[no-untyped-call]

    def run(self, work: Callable[[], None]) -> None:
        if torch.cuda.current_device() != self._device.index:
            with torch.cuda.device(self._device):
                self.run(work)
            return
        before = torch.cuda.current_stream(self._device)
        torch.cuda.set_stream(self._stream)  # cheaper for each bucket than torch.cuda.stream
        try:
            work()
        finally:
            torch.cuda.set_stream(before)

    def mark(self) -> CudaMark:
        return CudaMark(self._stream, self._device)

    def _wait_for(self, other: torch.cuda.Stream) -> None:
        self._followed.record(other)
        self._stream.wait_event(self._followed)


# Never given back. Kernels that were told to stop may still be queued when their engine is gone. A later engine that
# got the same memory would clear the word, and those kernels would wait for ranks that have left. PyTorch does not know
# that kernels use the memory.
_host_words: Final[list[torch.Tensor]] = []


class CudaAccelerator:
    """NVIDIA GPUs (and AMD's, which PyTorch calls cuda, too). See `Accelerator`."""

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        self.num_processors = torch.cuda.get_device_properties(self.device).multi_processor_count

    def open_stream(self) -> Stream:
        return CudaStream(self.device)

    def current_stream(self) -> object:
        return torch._C._cuda_getCurrentStream(self.device.index)

    def mark_current(self) -> CudaMark:
        return CudaMark(torch.cuda.current_stream(self.device), self.device)

    def is_capturing(self) -> bool:
        with torch.cuda.device(self.device):  # PyTorch asks the current device
            return torch.cuda.is_current_stream_capturing()

    def fetch(self, tensor: torch.Tensor) -> torch.Tensor:
        copy = torch.full(tensor.shape, -1, dtype=tensor.dtype, device="cpu", pin_memory=True)
        return copy.copy_(tensor, non_blocking=True)

    def host_word(self) -> torch.Tensor:
        _host_words.append(torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=True))
        return _host_words[-1]

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def share(self, host: HostGroup | None, rendezvous: Rendezvous | None, *, multicast: bool) -> SymmetricGroup:
        return share_memory(host, rendezvous, self.device, multicast=multicast)

    def open_backend(self, store: Store, rank: int, size: int, timeout_seconds: float) -> Backend:
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = timedelta(seconds=timeout_seconds)  # of an abort, too
        # PyTorch's watchdog and heartbeat monitor would end the process, some of them minutes after a peer's connection
        # broke, and those of an elastic job's later workers as well. torchring has a watchdog of its own. In this mode
        # they are not started (ProcessGroupNCCL.cpp: `if (!blockingWait_) watchdog_->start()`; the watchdog starts the
        # monitor). Nothing blocks: work in the current stream is not waited for.
        with environment("TORCH_NCCL_BLOCKING_WAIT", "1"):
            return cast(Backend, dist.ProcessGroupNCCL(store, rank, size, options))


ACCELERATORS: Final[dict[str, Callable[[torch.device], Accelerator]]] = {"cuda": CudaAccelerator}
_open: Final[dict[torch.device, Accelerator | None]] = {}
