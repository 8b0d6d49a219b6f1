"""GPUs: streams, events, memory of other ranks, NCCL. All that torchring asks of a device that works in streams.

All code that reduces on a device uses these classes, so that tests can replace them by a simulated device, which delays
work for as long as the order of streams allows.

      compute stream   ... gradients ready, pack bucket 0 ... pack bucket 1 ............ [hold] unpack, step
      communication                              [follow] reduce bucket 0  [follow] reduce bucket 1 [mark]

Only `synchronize`, which is for set-up, makes the host wait for the device.
"""

import contextlib
import ctypes
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from datetime import timedelta
from functools import partial
from typing import Any, Final, TypeAlias, cast

import torch
import torch.distributed as dist
from torch.distributed import Store

from torchring.devices.nccl import RegisteredGroup
from torchring.devices.symmetric_memory import LonelyGroup, SymmetricGroup, environment, share_memory
from torchring.memory.host import HostGroup
from torchring.rendezvous.rendezvous import Rendezvous

# A backend of torchring's own, apart from the script's process groups. It has a process group's methods.
Backend: TypeAlias = dist.ProcessGroup


def span(name: str, *values: object) -> AbstractContextManager[Any]:
    """A range for torch.profiler, and for NVTX under torch.autograd.profiler.emit_nvtx. Free unless profiled.

    `str.format` puts the values into its name.
    """
    if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
        return cast(AbstractContextManager[Any], torch.profiler.record_function(name.format(*values)))
    return contextlib.nullcontext()


_spare_events: Final[dict[torch.device, list[torch.cuda.Event]]] = {}  # those that no mark uses


class CudaMark:
    """A point in a stream's work. The mark is reached when all work before it is done.

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
        """Whether the device has come this far. Does not wait. May be called from any thread."""
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def hold_current(self) -> None:
        """Make later work on the caller's current stream wait for this mark."""
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def milliseconds_since(self, earlier: "CudaMark") -> float:
        """Time from `earlier` to this mark, both of which are reached. Negative if this mark was reached first."""
        return float(earlier._event.elapsed_time(self._event))


class CudaStream:
    """A queue of work on the device, done in order, with a high priority."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Its blocks are placed before those of backward.
        self._stream = torch.cuda.Stream(device, priority=-1)  # type: ignore[no-untyped-call]
        self._followed = torch.cuda.Event()  # type: ignore[no-untyped-call]  # used again, as those of `CudaMark`

    def follow(self) -> None:
        """Make later work on this stream wait for all work that is now on the caller's current stream."""
        self._followed.record(torch.cuda.current_stream(self._device))
        self._stream.wait_event(self._followed)

    def run(self, work: Callable[[], None]) -> None:
        """Call `work` with this stream as the current stream, so that `work` launches its kernels here."""
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


# Never given back. Kernels that were told to stop may still be queued when their engine is gone. A later engine that
# got the same memory would clear the word, and those kernels would wait for ranks that have left. PyTorch does not know
# that kernels use the memory.
_host_words: Final[list[torch.Tensor]] = []


# PyTorch's own calls keep other threads of Python waiting while CUDA keeps them waiting.
_runtime: Final = ctypes.CDLL(torch._C.__file__)
_RELAXED: Final = 2  # cudaStreamCaptureModeRelaxed: what this thread calls does not end a capture of another one
_PER_THREAD: Final = 2  # cudaStreamPerThread: a stream of this thread's own, without work


class CudaAccelerator:
    """A GPU of NVIDIA (or AMD, which PyTorch calls cuda, too), as this process uses it."""

    def __init__(self, device: torch.device) -> None:
        index = torch.cuda.current_device() if device.index is None else device.index
        self.device = torch.device("cuda", index)
        # A hashable value that `join` accepts. Each gradient's hook calls this, so without a frame.
        self.current_stream: Callable[[], object] = partial(torch._C._cuda_getCurrentStream, index)

    def open_stream(self) -> CudaStream:
        return CudaStream(self.device)

    def join(self, streams: Iterable[object], tensors: Iterable[torch.Tensor]) -> None:
        """Make later work on the current stream wait for all work that is now on `streams`, and read `tensors`.

        The memory of the tensors, which were allocated on any of these streams, is not used again before.
        """
        current = torch.cuda.current_stream(self.device)
        for stream in streams:  # as `current_stream` has returned them
            stream_id, index, kind = cast("tuple[int, int, int]", stream)
            current.wait_stream(torch.cuda.Stream(stream_id=stream_id, device_index=index, device_type=kind))  # type: ignore[no-untyped-call]
        for tensor in tensors:
            tensor.record_stream(current)

    def mark_current(self) -> CudaMark:
        return CudaMark(torch.cuda.current_stream(self.device), self.device)

    def is_capturing(self) -> bool:
        """Whether work that is launched now is recorded into a graph, to be replayed later."""
        with torch.cuda.device(self.device):  # PyTorch asks the current device
            return torch.cuda.is_current_stream_capturing()

    def fetch(self, tensor: torch.Tensor, into: torch.Tensor | None = None) -> torch.Tensor:
        """A copy in host memory, which holds -1 until the current stream has made the copy. Reading it asks no device.

        `into`, an earlier copy of a tensor of this shape and dtype that has come, takes the values. Nobody looks at it.
        """
        if into is None:
            into = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
        return into.fill_(-1).copy_(tensor, non_blocking=True)

    def host_word(self) -> torch.Tensor:
        """int32 [1] in host memory, 0. Kernels that run, and even those that wait, see what the host writes to it."""
        _host_words.append(torch.zeros(1, dtype=torch.int32, device="cpu", pin_memory=True))
        return _host_words[-1]

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def find_fault(self) -> str:
        """Why the device has failed for good, such as an illegal memory access. "" if it works, and for AMD's.

        For a thread that nobody waits for: a launch that waits on another thread may keep it waiting.
        """
        if not hasattr(_runtime, "cudaStreamQuery"):
            return ""
        _runtime.cudaThreadExchangeStreamCaptureMode(ctypes.byref(ctypes.c_int(_RELAXED)))
        code = _runtime.cudaSetDevice(self.device.index) or _runtime.cudaStreamQuery(ctypes.c_void_p(_PER_THREAD))
        return str(torch.cuda.CudaError(code)) if code == 214 or 700 <= code < 730 else ""

    def share(self, host: HostGroup | None, rendezvous: Rendezvous | None) -> SymmetricGroup:
        return share_memory(host, rendezvous, self.device)

    def open_backend(self, store: Store, rank: int, size: int, timeout_seconds: float) -> Backend:
        """Collective: torch.distributed's backend for this device, between the `size` ranks that share `store`."""
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
        options._timeout = timedelta(seconds=timeout_seconds)  # of an abort, too
        # PyTorch's watchdog and heartbeat monitor would end the process, some of them minutes after a peer's connection
        # broke, and those of an elastic job's later workers as well. torchring has a watchdog of its own. In this mode
        # they are not started (ProcessGroupNCCL.cpp: `if (!blockingWait_) watchdog_->start()`; the watchdog starts the
        # monitor). Nothing blocks: work in the current stream is not waited for.
        with environment("TORCH_NCCL_BLOCKING_WAIT", "1"):
            return cast(Backend, dist.ProcessGroupNCCL(store, rank, size, options))

    def register(self, rank: int, backend: Backend) -> LonelyGroup:
        """Memory in which `backend` reduces best. Raises an error if there is none."""
        return RegisteredGroup(rank, self.device, backend)
