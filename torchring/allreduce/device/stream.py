"""Reducing in a stream of a device: the mover that buckets see, and the engines that launch what it asks for.

`OnStream` puts a reduction behind what its stream has been told before, and has the current stream wait when it lands:
the host waits for nothing. Whatever ranks compare on the way, they compare on the host; see `rounds.py`.

Engines: `direct` and `ring` are one kernel each, in memory that the GPUs of one host share. Between hosts, or where
GPUs do not reach each other, torch.distributed's backend (NCCL) moves the bytes: its own all-reduce (`native`), a ring
of neighbours (`ring`), or its all-reduce between direct's two halves (`hierarchical`).
"""

from __future__ import annotations

import atexit
import threading
import time
import warnings
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Protocol

import torch
import torch.distributed as dist

from torchring.accelerators import Accelerator, Backend, Mark, Stream, span
from torchring.allreduce.contract import TAGS_PER_ROUND, NonFinite
from torchring.allreduce.slices import slice_bounds
from torchring.errors import PeerLostError, PeerTimeoutError, RingError
from torchring.kernels import accumulate, direct, ring
from torchring.kernels.signals import MAX_BLOCKS, signal_bytes
from torchring.memory.cuda import LonelyGroup, SymmetricGroup
from torchring.memory.host import HostGroup

NOTHING_FOUND: Final = torch.iinfo(torch.int32).max
_ALIGNMENT_BYTES: Final = 256
_LOOK_SECONDS: Final = 0.1  # how often somebody looks whether those that the device waits for are alive


@dataclass(frozen=True)
class DeviceWire:
    """A wire buffer on a device. See `Wire`.

    Attributes:
        buffer: the same memory as `tensor`, for the engine's writes.
        addresses: [N] int64 on the device: everybody's buffer, in rank order.
        bounds: this rank's slice, in elements.
        report: [W, 2] int32 on the device, a row for each wire that was opened together with this one: the first chunk
            of this rank's inputs, and the first element of its part of the result, that held a NaN or an infinity; or
            NOTHING_FOUND.
        row: this wire's.
        memory: what has to live as long as the buffer.
    """

    tensor: torch.Tensor
    buffer: torch.Tensor
    addresses: torch.Tensor
    bounds: tuple[int, int]
    report: torch.Tensor
    row: int
    memory: object = None

    @cached_property
    def found_in_inputs(self) -> torch.Tensor:
        return self.report[self.row, :1]

    @cached_property
    def found_in_result(self) -> torch.Tensor:
        return self.report[self.row, 1:]


class Engine(Protocol):
    """Launches reductions on the current stream."""

    @property
    def algorithm(self) -> str: ...

    def open_wires(self, specs: Sequence[tuple[int, torch.dtype]]) -> list[DeviceWire]:
        """Collective: one buffer per (elements, dtype), zeroed."""

    def launch(self, wire: DeviceWire, scale: float) -> None:
        """The buffer becomes scale * sum over ranks, with the same bits on all of them. Does not wait."""

    def abort(self) -> None:
        """End what was launched and waits for other ranks; results become NaN. From any thread."""

    def close(self) -> None: ...


class PendingOnStream:
    """A reduction in a stream. See `PendingReduction`."""

    span = None

    __slots__ = ("begin", "end")

    def __init__(self, begin: Mark, end: Mark) -> None:
        self.begin = begin
        self.end = end

    def advance(self) -> bool:
        return True

    def contribute(self) -> None:
        """It does so by itself."""

    def wait(self) -> NonFinite | None:
        """The current stream waits; the host does not. Nothing is known yet of what was found."""
        self.end.hold_current()
        return None


class OnStream:
    """Runs an engine in a stream. See `Mover`; used by one thread, but for `fail`.

    Args:
        engine: what reduces.
        accelerator: of its device.
        in_background: whether the stream is one of its own; otherwise nothing overlaps.
        host: the ranks of this host, if there are others, to see which of them live.
        timeout_seconds: how long the device may wait for other ranks.

    Attributes:
        stream: where buckets are packed, too.
        failure: what ended this mover, the first one.
    """

    def __init__(
        self,
        engine: Engine,
        accelerator: Accelerator,
        *,
        in_background: bool,
        host: HostGroup | None,
        timeout_seconds: float,
    ) -> None:
        self.in_background = in_background
        self.accelerator = accelerator
        self.stream: Stream = accelerator.open_stream(in_background=in_background)
        self.failure: RingError | None = None
        self._engine = engine
        self._lock = threading.Lock()
        self._flights: list[PendingOnStream] = []  # since `take_flights`
        self._rank = 0 if host is None else host.rank
        self._guard = _Guard(self, host, timeout_seconds)

    @property
    def algorithm(self) -> str:
        return self._engine.algorithm

    def open_wires(self, specs: Sequence[tuple[int, torch.dtype]]) -> Sequence[DeviceWire]:
        return self._engine.open_wires(specs)

    def start(self, wire: DeviceWire, *, scale: float = 1.0, tag: int = 0) -> PendingOnStream:
        """As of any mover; what the stream was told before comes first, what the current one was told need not."""
        self.check()
        begin = self.stream.mark()
        with span(f"torchring.{self.algorithm} bucket {tag % TAGS_PER_ROUND}, {wire.buffer.nbytes / 2**20:.2f} MiB"):
            self.stream.run(lambda: self._engine.launch(wire, scale))
        flight = PendingOnStream(begin, self.stream.mark())
        self._flights.append(flight)
        self._guard.started()
        return flight

    def seal(self, fetched: torch.Tensor) -> None:
        """All of a round has been started, and `fetched` (see `Accelerator.fetch`) was called for behind it."""
        self._guard.sealed(fetched)

    def take_flights(self) -> list[PendingOnStream]:
        """What was started since the last call."""
        flights, self._flights = self._flights, []
        return flights

    def check(self) -> None:
        """Raise what ended this mover, if something has."""
        if self.failure is not None:
            raise self.failure

    def fail(self, error: RingError) -> None:
        with self._lock:
            if self.failure is not None:
                return
            self.failure = error
        self._engine.abort()

    def finish(self) -> None:
        """Wait until the device is through with the rounds that were sealed, and end what was broken off.

        Peers' devices wait for this one. If it left with the end of the process, they would find it dead, and its last
        round would leave NaN behind.
        """
        failed_before = self.failure is not None
        if self._guard.is_open:
            self.fail(PeerLostError("a round was broken off", rank=self._rank, peers=(self._rank,)))
        elif self._guard.is_pending() and not failed_before:
            self.accelerator.synchronize()
            if self.failure is not None:
                text = f"gradients of the last backward became NaN, and what was trained on them: {self.failure}"
                warnings.warn(text, RuntimeWarning, stacklevel=2)

    def close(self) -> None:
        self.finish()
        self._guard.close()
        self._engine.close()


class _Guard:
    """A thread that ends waiting kernels when those that they wait for are dead or late.

    The host may be waiting for the device itself meanwhile (`loss.item()`), so nobody else would. It asks the device
    nothing, which might break up the capture of a graph on another thread, but looks at what the device has sent.
    """

    def __init__(self, mover: OnStream, host: HostGroup | None, timeout_seconds: float) -> None:
        self._mover = weakref.ref(mover)
        self._host = host if host is not None and host.size > 1 else None
        self._timeout_seconds = timeout_seconds
        self._lock = threading.Lock()
        self._open_since: float | None = None  # of a round that is not sealed
        self._sealed: deque[tuple[torch.Tensor, float]] = deque()
        self._suspicious: object = None  # what was waited for when a peer was first seen to be gone
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def started(self) -> None:
        """A reduction was."""
        if self._open_since is None:
            self._open_since = time.monotonic()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="torchring-guard", daemon=True)
            self._thread.start()
            atexit.register(self._leave)

    @property
    def is_open(self) -> bool:
        """Whether a round was started and not sealed."""
        return self._open_since is not None

    def is_pending(self) -> bool:
        """Whether the device has not yet sent what some round was sealed with."""
        with self._lock:
            return not all(has_come(fetched) for fetched, _ in self._sealed)

    def sealed(self, fetched: torch.Tensor) -> None:
        """See `OnStream.seal`."""
        with self._lock:
            self._sealed.append((fetched, time.monotonic()))
            self._open_since = None

    def close(self) -> None:
        """End the thread."""
        self._stop.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(1.0)
            atexit.unregister(self._leave)

    def _leave(self) -> None:
        """A script ends without closing. No thread may come back from the device while the interpreter ends."""
        mover = self._mover()
        if mover is not None:
            mover.finish()
        self.close()

    def _run(self) -> None:
        while not self._stop.wait(_LOOK_SECONDS):
            error = self._look()
            mover = self._mover()
            if mover is None:
                return
            if error is not None:
                mover.fail(error)
                return
            del mover

    def _look(self) -> RingError | None:
        with self._lock:
            while self._sealed and has_come(self._sealed[0][0]):
                self._sealed.popleft()
            is_sealed = bool(self._sealed)
            since = self._sealed[0][1] if is_sealed else self._open_since
            waits_for = self._sealed[0][0] if is_sealed else self
        suspicious, self._suspicious = self._suspicious, None
        if since is None:
            return None
        try:
            if self._host is not None:
                self._host.check_peers([rank for rank in self._host.ranks if rank != self._host.rank])
        except RingError as error:
            # A peer that is done may have left while what it sent is still on its way: look again.
            self._suspicious = waits_for
            return error if suspicious is waits_for else None
        waited = time.monotonic() - since
        if not is_sealed or waited < self._timeout_seconds:  # how long a backward takes is the script's business
            return None
        return PeerTimeoutError(
            "a reduction on the device did not come to an end; some rank's device is stuck, or slow",
            rank=None if self._host is None else self._host.rank,
            seconds=waited,
        )


def has_come(fetched: torch.Tensor) -> bool:
    """Whether what `Accelerator.fetch` was asked for is there: no report holds a -1."""
    return bool((fetched != -1).all())


class SharedMemoryEngine:
    """direct or ring, one kernel each, in memory shared by the devices of `group`. See `Engine`.

    Args:
        algorithm: "direct", "ring", or "hierarchical" for an engine that only sums and spreads.
        num_slices: into how many slices a buffer is cut; the r-th rank has the r-th, the others none.
    """

    def __init__(
        self, algorithm: str, group: SymmetricGroup, accelerator: Accelerator, num_slices: int | None = None
    ) -> None:
        self.algorithm = algorithm
        self.group = group
        self._accelerator = accelerator
        self._num_slices = group.size if num_slices is None else num_slices
        self._pads = group.allocate(signal_bytes(group.size, MAX_BLOCKS))
        self._signals = _addresses(self._pads.parts, accelerator.device)
        self._abort = torch.zeros(1, dtype=torch.int32, device=accelerator.device)
        accelerator.synchronize()

    def open_wires(self, specs: Sequence[tuple[int, torch.dtype]]) -> list[DeviceWire]:
        lengths = [-(-numel * dtype.itemsize // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for numel, dtype in specs]
        block = self.group.allocate(sum(lengths))
        report = _new_report(len(specs), self._accelerator.device)
        wires, start = [], 0
        for i, ((numel, dtype), length) in enumerate(zip(specs, lengths, strict=True)):
            parts = [part[start : start + numel * dtype.itemsize].view(dtype) for part in block.parts]
            own = parts[self.group.index]
            addresses, bounds = _addresses(parts, own.device), self._bounds(numel, dtype)
            wires.append(DeviceWire(own.data, own, addresses, bounds, report, i, block))
            start += length
        self._accelerator.synchronize()
        return wires

    def launch(self, wire: DeviceWire, scale: float) -> None:
        if self.algorithm == "ring":
            ring(
                wire.addresses, self._signals, wire.buffer,
                rank=self.group.index, num_ranks=self.group.size, scale=scale,
                abort=self._abort, found=wire.found_in_result,
            )  # fmt: skip
        else:
            self.direct(wire, scale)

    def direct(self, wire: DeviceWire, scale: float, *, gather: bool = True, spread: bool = True) -> None:
        """The whole of it, or its first half (`gather`: own slice summed) or its second (`spread`)."""
        begin, end = wire.bounds
        direct(
            wire.addresses, self._signals, wire.buffer,
            rank=self.group.index, num_ranks=self.group.size, begin=begin, end=end, scale=scale,
            abort=self._abort, found=wire.found_in_result, gather=gather, spread=spread,
        )  # fmt: skip

    def abort(self) -> None:
        self._accelerator.write_aside(self._abort, 1)

    def close(self) -> None:
        """Nothing to do: the memory goes with the last tensor that views it."""

    def _bounds(self, numel: int, dtype: torch.dtype) -> tuple[int, int]:
        if self.group.index >= self._num_slices:
            return 0, 0
        return slice_bounds(numel, self._num_slices, dtype.itemsize)[self.group.index]


class BackendEngine:
    """native: the backend's own all-reduce; or ring: neighbours, by means of it. See `Engine`.

    Args:
        algorithm: "native" or "ring".
        backend: between all ranks.
    """

    def __init__(self, algorithm: str, backend: Backend, accelerator: Accelerator) -> None:
        self.algorithm = algorithm
        self._backend = backend
        self._accelerator = accelerator
        self._scratch: dict[torch.dtype, torch.Tensor] = {}
        # As if there were one rank: all of the buffer is its slice.
        self._alone = SharedMemoryEngine("direct", LonelyGroup(backend.rank(), accelerator.device), accelerator)

    def open_wires(self, specs: Sequence[tuple[int, torch.dtype]]) -> list[DeviceWire]:
        device = self._accelerator.device
        report = _new_report(len(specs), device)
        wires = []
        for i, (numel, dtype) in enumerate(specs):
            buffer = torch.zeros(numel, dtype=dtype, device=device)
            wires.append(DeviceWire(buffer.data, buffer, _addresses([buffer], device), (0, numel), report, i))
            longest = -(-numel // self._backend.size()) + _ALIGNMENT_BYTES
            if self.algorithm == "ring" and (dtype not in self._scratch or self._scratch[dtype].numel() < longest):
                self._scratch[dtype] = torch.empty(longest, dtype=dtype, device=device)
        self._accelerator.synchronize()
        return wires

    def launch(self, wire: DeviceWire, scale: float) -> None:
        if not wire.buffer.numel():
            return
        if scale != 1.0 and wire.buffer.dtype.itemsize == 2:
            wire.buffer.mul_(scale)  # first: 16-bit sums might overflow where the result would fit
            scale = 1.0
        if self.algorithm == "native":
            all_reduce(self._backend, wire.buffer)
        else:
            self._ring(wire.buffer)
        self._alone.direct(wire, scale, spread=False)  # scales, and looks for what is not finite

    def abort(self) -> None:
        abort(self._backend)

    def close(self) -> None:
        self._backend.shutdown()

    def _ring(self, buffer: torch.Tensor) -> None:
        """Slice k starts at rank k + 1, is summed on its way to rank k, and then goes round once more."""
        rank, size = self._backend.rank(), self._backend.size()
        slices = [buffer[begin:end] for begin, end in slice_bounds(buffer.numel(), size, buffer.element_size())]
        scratch = self._scratch[buffer.dtype]
        for step in range(size - 1):
            mine, theirs = slices[(rank - step) % size], slices[(rank - step - 1) % size]
            received = scratch[: theirs.numel()]
            self._pass_on(mine, received)
            if theirs.numel():
                accumulate([received, theirs], theirs)
        for step in range(size - 1):
            self._pass_on(slices[(rank - step + 1) % size], slices[(rank - step) % size])

    def _pass_on(self, send: torch.Tensor, receive: torch.Tensor) -> None:
        """To the next rank, from the last one, as one call: in two, each could wait for the other."""
        rank, size = self._backend.rank(), self._backend.size()
        to = [send.numel() if peer == (rank + 1) % size else 0 for peer in range(size)]
        of = [receive.numel() if peer == (rank - 1) % size else 0 for peer in range(size)]
        options = dist.AllToAllOptions()
        options.asyncOp = False
        self._backend.alltoall_base(receive, send, of, to, options).wait()


class HierarchicalEngine:
    """direct's first half on every host, the backend's all-reduce in every column, direct's second half. See `Engine`.

    Args:
        shared: between the devices of this host, cut into columns.
        column: the backend between the ranks with the same column; None on ranks without one.
    """

    algorithm = "hierarchical"

    def __init__(self, shared: SharedMemoryEngine, column: Backend | None) -> None:
        self._shared = shared
        self._column = column

    def open_wires(self, specs: Sequence[tuple[int, torch.dtype]]) -> list[DeviceWire]:
        return self._shared.open_wires(specs)

    def launch(self, wire: DeviceWire, scale: float) -> None:
        begin, end = wire.bounds
        self._shared.direct(wire, scale, spread=False)
        if self._column is not None and end > begin:
            all_reduce(self._column, wire.buffer[begin:end])
        self._shared.direct(wire, 1.0, gather=False)

    def abort(self) -> None:
        self._shared.abort()
        if self._column is not None:
            abort(self._column)

    def close(self) -> None:
        self._shared.close()
        if self._column is not None:
            self._column.shutdown()


def all_reduce(backend: Backend, buffer: torch.Tensor) -> None:
    """Sum, on the current stream. Not empty."""
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(dist.ReduceOp.SUM)
    options.asyncOp = False  # NCCL: in the current stream, not in one of its own
    backend.allreduce([buffer], options).wait()


def abort(backend: Backend) -> None:
    """End what is under way. Gloo cannot; its calls end when a peer's links do."""
    if hasattr(backend, "abort"):
        backend.abort()


def _addresses(parts: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    return torch.tensor([part.data_ptr() for part in parts], dtype=torch.int64, device="cpu").to(device)


def _new_report(count: int, device: torch.device) -> torch.Tensor:
    return torch.full((max(count, 1), 2), NOTHING_FOUND, dtype=torch.int32, device=device)
