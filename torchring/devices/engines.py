"""Launches all-reduces on a device.

`direct` and `ring` are one kernel each, in memory that the GPUs of one host share. Between hosts, or where GPUs
do not reach each other's memory, torch.distributed's backend (NCCL) moves the bytes: `native` is its own all-reduce,
`hierarchical` its all-reduce in every column, between the two halves of direct on every host.
"""

import contextlib
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, partial
from itertools import accumulate
from typing import Any, Final, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions  # type: ignore[attr-defined]

from torchring.allreduce.slices import slice_bounds
from torchring.collectives.gloo import REDUCE_OPS
from torchring.devices.cuda import Backend, CudaAccelerator
from torchring.devices.symmetric_memory import SymmetricGroup
from torchring.kernels.direct import prepare_direct
from torchring.kernels.guard import prepare_guard
from torchring.kernels.pack import NOT_FOUND
from torchring.kernels.ring import prepare_ring
from torchring.kernels.signals import MAX_BLOCKS, signal_bytes

_Options = TypeVar("_Options", bound=Any)
_ALIGNMENT_BYTES: Final = 1024  # of wires and slices, so that both hold whole rows of 256 elements
_WAITING_SHARE: Final = 6  # one block for so many processors; a block that waits may keep most of a processor


Launch: TypeAlias = Callable[[], None]
"""Launches prepared kernels on the current stream."""


@dataclass(frozen=True, eq=False)
class DeviceWire:
    """A wire buffer on a device. See `Wire`."""

    tensor: torch.Tensor
    buffer: torch.Tensor  # the same memory as `tensor`, for the engine's writes
    addresses: torch.Tensor  # [N] int64 on the device: addresses of all ranks' buffers, in rank order
    bounds: tuple[int, int]  # this rank's slice, in elements
    # [W, 2] int32 on the device, a row for each of the wires that were opened together, which packing writes: see
    # `found` in `kernels.pack`
    report: torch.Tensor
    row: int  # the row of this wire in `report`
    memory: Any = None  # kept because the buffer lies in it
    launches: dict[Hashable, Launch] = field(default_factory=dict)  # prepared launches of the engine, by what they do

    @cached_property
    def own_slice(self) -> torch.Tensor:
        begin, end = self.bounds
        return self.buffer[begin:end]

    @cached_property
    def found(self) -> torch.Tensor:
        return self.report[self.row]


class Engine:
    """Launches all-reduces on the current stream. See the top of this file.

    The backend only adds up. NCCL could take the mean, but would then not let the switch add up (`ncclNvlsSupported` in
    its device.h), which is worth a third more bandwidth among 8 H100 (NVIDIA/nccl#2140).
    """

    def __init__(
        self,
        algorithm: str,  # "direct", "ring", "hierarchical" or "native"
        # the devices that share memory, by which kernels reduce. In a group of one rank the sum is there already.
        group: SymmetricGroup,
        accelerator: CudaAccelerator,
        # number of slices that a buffer is cut into. Rank r has slice r; the ranks beyond have none.
        num_slices: int | None = None,
        # adds up this rank's slice, between the kernel's two halves: of "native" between all ranks, of "hierarchical"
        # between the ranks with the same slice; None on ranks without one.
        backend: Backend | None = None,
    ) -> None:
        self.algorithm = algorithm
        self.backend = backend
        self.between_hosts: Callable[[torch.Tensor], None] | None = None  # adds up own slices, in place of `backend`
        self.group = group
        self.accelerator = accelerator
        self._num_slices = group.size if num_slices is None else num_slices
        # A kernel that waits for other ranks leaves processors to backward.
        self._max_blocks = max(1, min(MAX_BLOCKS, group.num_processors // _WAITING_SHARE))
        if group.size > 1:
            self._pads: Any = group.allocate(signal_bytes(group.size, self._max_blocks))
            self._signals = _addresses(self._pads.parts, accelerator.device)
        # Pinned host memory: whoever aborts may be on another thread than the one that launches, must not wait for what
        # the device does, and calls nothing of CUDA's. Kernels that wait look at it now and then.
        self.abort_word = accelerator.host_word()
        self._releasing = threading.Lock()
        self._is_closed = False
        accelerator.synchronize()

    def open_wires(self, specs: Sequence[tuple[int, torch.dtype]]) -> list[DeviceWire]:
        """Collective: one buffer per (elements, dtype), zeroed."""
        group = self.group
        lengths = [-(-numel * dtype.itemsize // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for numel, dtype in specs]
        if group.is_mapped:
            block = group.allocate(sum(lengths))
            places = [(block, end - length) for end, length in zip(accumulate(lengths), lengths, strict=True)]
        else:  # a gradient that the script keeps then keeps the memory of its own bucket only
            places = [(group.allocate(length), 0) for length in lengths]
        device = self.accelerator.device
        report = torch.full((max(len(specs), 1), 2), NOT_FOUND, dtype=torch.int32, device=device)
        wires = []
        for i, ((numel, dtype), (block, start)) in enumerate(zip(specs, places, strict=True)):
            parts = [part[start : start + numel * dtype.itemsize].view(dtype) for part in block.parts]
            own = parts[group.index]
            slices = slice_bounds(numel, self._num_slices, dtype.itemsize, _ALIGNMENT_BYTES)
            bounds = [*slices, *[(0, 0)] * group.size][group.index]
            wires.append(DeviceWire(own.data, own, _addresses(parts, own.device), bounds, report, i, block))
        self.accelerator.synchronize()
        return wires

    def release(self, wires: Sequence[DeviceWire]) -> None:
        """Collective: these wires, all that were opened with them, are not reduced any more. The device is idle."""
        with self._releasing:
            if not (self._is_closed or int(self.abort_word)):  # else the backend is gone, or about to be
                for block in {id(wire.memory): wire.memory for wire in wires}.values():
                    self.group.release(block)

    def launch(self, wire: DeviceWire) -> None:
        """Launch what replaces the buffer by the sum over ranks, with the same bits on all ranks. Does not wait."""
        if self.algorithm in ("direct", "ring"):
            self.direct(wire)
            return
        self.direct(wire, spread=False)
        if self.backend is not None and wire.own_slice.numel():
            (self.between_hosts or partial(all_reduce, self.backend))(wire.own_slice)
        self.direct(wire, gather=False)

    def direct(self, wire: DeviceWire, *, gather: bool = True, spread: bool = True) -> None:
        """Launch the kernel: its first half (`gather`: sum own slice), its second half (`spread`), or both."""
        if self.group.size == 1:
            return
        launch = wire.launches.get((gather, spread))
        if launch is None:  # a bucket is reduced in the same way in each reduction: Triton looks at arguments once
            launch = wire.launches[gather, spread] = self._prepare(wire, gather=gather, spread=spread)
        launch()

    def gather(self, wire: DeviceWire, owner: int | None) -> None:
        """Of "native": give all ranks the buffer of rank `owner`; or, if that is None, of each rank its Nth part."""
        assert self.backend is not None
        if owner is None:
            share = wire.buffer.numel() // self.backend.size()
            place = self.backend.rank() * share
            all_gather(self.backend, wire.buffer, wire.buffer[place : place + share])
        else:
            broadcast(self.backend, wire.buffer, owner)

    def guard(self, wires: Sequence[DeviceWire]) -> Launch | None:
        """What has to follow the launches for these wires, so that their results are NaN after an abort.

        A kernel poisons what it leaves unfinished. Behind the backend, that takes a launch where no kernel follows.
        """
        if self.backend is None or self.group.size > 1:
            return None
        return prepare_guard([wire.buffer for wire in wires], self.abort_word)

    def abort(self) -> None:
        """End launched work that waits for other ranks. Its results become NaN. From any thread."""
        self.abort_word.fill_(1)  # before NCCL stops amid a sum: what follows it then finds the word
        if self.backend is not None:
            with self._releasing:
                abort(self.backend)

    def close(self) -> None:
        """The memory goes with the last tensor that views it."""
        self._is_closed = True
        if self.backend is not None:
            shut_down(self.backend)

    def forget_peers(self) -> None:
        """The device has finished, and nothing is launched any more: memory of dead ranks is given back."""
        self._pads = None

    def _prepare(self, wire: DeviceWire, *, gather: bool, spread: bool) -> Launch:
        where = wire.addresses, self._signals, wire.buffer
        ranks: Any = {"rank": self.group.index, "num_ranks": self.group.size}
        ranks |= {"abort": self.abort_word, "max_blocks": self._max_blocks}
        if self.algorithm == "ring" and gather and spread:
            return prepare_ring(*where, **ranks)
        begin, end = wire.bounds
        return prepare_direct(*where, **ranks, begin=begin, end=end, gather=gather, spread=spread)


def all_reduce(backend: Backend, buffer: torch.Tensor, op: str = "sum") -> None:
    """Combine `buffer`, which is not empty, over the backend's ranks, on the current stream; "mean" adds up."""
    backend.allreduce([buffer], _combining(op))


def all_gather(backend: Backend, buffer: torch.Tensor, own: torch.Tensor) -> None:
    """Fill `buffer` with the `own` of all ranks, on the current stream. `own` may be this rank's part of `buffer`."""
    backend._allgather_base(buffer, own, _in_stream(AllgatherOptions()))


def all_to_all(backend: Backend, received: torch.Tensor, sent: torch.Tensor) -> None:
    """Send part r of `sent`, which is cut into equal parts, to rank r; part r of `received` is from rank r."""
    backend.alltoall_base(received, sent, [], [], _in_stream(dist.AllToAllOptions()))


def broadcast(backend: Backend, buffer: torch.Tensor, src: int) -> None:
    """Replace `buffer` by that of rank `src`, on the current stream."""
    options = dist.BroadcastOptions()
    options.rootRank = src
    backend.broadcast([buffer], _in_stream(options))


@cache
def _combining(op: str) -> dist.AllreduceOptions:
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(REDUCE_OPS[op])
    return _in_stream(options)


def _in_stream(options: _Options) -> _Options:
    options.asyncOp = False  # NCCL launches in the current stream, and returns None; else it uses one of its own
    return options


def abort(backend: Backend) -> None:
    """End the calls that are under way. Gloo cannot: its calls end when the links of a peer are closed.

    Raises nothing: an abort that fails must not hide the error that led to it.
    """
    if hasattr(backend, "abort"):
        with contextlib.suppress(RuntimeError):
            backend.abort()


def shut_down(backend: Backend) -> None:
    """Close `backend`, which may have been aborted before."""
    with contextlib.suppress(RuntimeError):
        backend.shutdown()


def _addresses(parts: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    return torch.tensor([part.data_ptr() for part in parts], dtype=torch.int64, device="cpu").to(device)
