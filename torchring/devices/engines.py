"""Engines that launch all-reduces on a device.

`direct` and `ring` are one kernel each, in memory that the GPUs of one host share. Between hosts, or where GPUs
do not reach each other's memory, torch.distributed's backend (NCCL) moves the bytes: `native` is its own all-reduce,
`hierarchical` its all-reduce between the two halves of direct.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from typing import Any, Final, TypeVar

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import AllgatherOptions  # type: ignore[attr-defined]

from torchring.allreduce.slices import slice_bounds
from torchring.devices.accelerator import Accelerator, Backend
from torchring.devices.stream import DeviceWire, Launch
from torchring.devices.symmetric_memory import LonelyGroup, SymmetricGroup
from torchring.kernels.direct import prepare_direct
from torchring.kernels.guard import prepare_guard
from torchring.kernels.pack import NOT_FOUND
from torchring.kernels.ring import prepare_ring
from torchring.kernels.signals import MAX_BLOCKS, signal_bytes
from torchring.transport.c10d import all_reduce_options

_Options = TypeVar("_Options", bound=Any)
_ALIGNMENT_BYTES: Final = 256
_WAITING_SHARE: Final = 6  # one block for so many processors; a block that waits may keep most of a processor


class SharedMemoryEngine:
    """direct or ring, a kernel each, in memory shared by the devices of `group`. See `Engine`.

    In a group of one rank the sum is there already.

    Args:
        algorithm: "direct", "ring", or "hierarchical" for the part of a `HierarchicalEngine`.
        num_slices: number of slices that a buffer is cut into. Rank r has slice r; the ranks beyond have none.
    """

    def __init__(
        self, algorithm: str, group: SymmetricGroup, accelerator: Accelerator, num_slices: int | None = None
    ) -> None:
        self.algorithm = algorithm
        self.group = group
        self._accelerator = accelerator
        self._num_slices = group.size if num_slices is None else num_slices
        # A kernel that waits for other ranks leaves processors to backward.
        self._max_blocks = max(1, min(MAX_BLOCKS, group.num_processors // _WAITING_SHARE))
        self._pads = group.allocate(signal_bytes(group.size, self._max_blocks))
        self._signals = _addresses(self._pads.parts, accelerator.device)
        # Pinned host memory: whoever aborts may be on another thread than the one that launches, must not wait for what
        # the device does, and calls nothing of CUDA's. Kernels that wait look at it now and then.
        self.abort_word = accelerator.host_word()
        accelerator.synchronize()

    def open_wires(self, specs: Sequence[tuple[int, torch.dtype]]) -> list[DeviceWire]:
        return _open_wires(specs, self.group, self._accelerator, self._num_slices)

    def direct(self, wire: DeviceWire, *, gather: bool = True, spread: bool = True) -> None:
        """Launch the kernel: its first half (`gather`: sum own slice), its second half (`spread`), or both."""
        if self.group.size == 1:
            return
        launch = wire.launches.get((gather, spread))
        if launch is None:  # a bucket is reduced in the same way in each reduction: Triton looks at arguments once
            launch = wire.launches[gather, spread] = self._prepare(wire, gather=gather, spread=spread)
        launch()

    launch = direct

    def guard(self, wires: Sequence[DeviceWire]) -> None:
        """Nothing to do: each kernel poisons what it leaves unfinished."""

    def abort(self) -> None:
        self.abort_word.fill_(1)

    def close(self) -> None:
        """Nothing to do: the memory goes with the last tensor that views it."""

    def _prepare(self, wire: DeviceWire, *, gather: bool, spread: bool) -> Launch:
        where = wire.addresses, self._signals, wire.buffer
        ranks: Any = {"rank": self.group.index, "num_ranks": self.group.size}
        ranks |= {"abort": self.abort_word, "max_blocks": self._max_blocks}
        if self.algorithm == "ring" and gather and spread:
            return prepare_ring(*where, **ranks)
        begin, end = wire.bounds
        return prepare_direct(*where, **ranks, begin=begin, end=end, gather=gather, spread=spread)


class BackendEngine:
    """native: the backend's own all-reduce. See `Engine`.

    The backend only adds up. NCCL could take the mean, but would then not let the switch add up (`ncclNvlsSupported` in
    its device.h), which is worth a third more bandwidth among 8 H100 (NVIDIA/nccl#2140).

    Args:
        backend: between all ranks.
    """

    algorithm = "native"

    def __init__(self, backend: Backend, accelerator: Accelerator) -> None:
        self._backend = backend
        self._accelerator = accelerator
        self._abort = accelerator.host_word()

    def open_wires(self, specs: Sequence[tuple[int, torch.dtype]]) -> list[DeviceWire]:
        return _open_wires(specs, LonelyGroup(self._backend.rank(), self._accelerator.device), self._accelerator, 1)

    def launch(self, wire: DeviceWire) -> None:
        if wire.buffer.numel():
            all_reduce(self._backend, wire.buffer)

    def gather(self, wire: DeviceWire, owner: int | None) -> None:
        """Give all ranks the buffer of rank `owner`; or, if that is None, of each rank its Nth part."""
        if owner is None:
            share = wire.buffer.numel() // self._backend.size()
            place = self._backend.rank() * share
            all_gather(self._backend, wire.buffer, wire.buffer[place : place + share])
        else:
            broadcast(self._backend, wire.buffer, owner)

    def guard(self, wires: Sequence[DeviceWire]) -> Launch:
        return prepare_guard([wire.buffer for wire in wires], self._abort)

    def abort(self) -> None:
        self._abort.fill_(1)  # before NCCL stops amid a sum: the guard behind it then finds the word
        abort(self._backend)

    def close(self) -> None:
        shut_down(self._backend)


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

    def launch(self, wire: DeviceWire) -> None:
        begin, end = wire.bounds
        self._shared.direct(wire, spread=False)
        if self._column is not None and end > begin:
            all_reduce(self._column, wire.own_slice)
        self._shared.direct(wire, gather=False)

    def guard(self, wires: Sequence[DeviceWire]) -> Launch | None:
        """Where no kernel follows the backend."""
        if self._shared.group.size > 1:
            return None
        return prepare_guard([wire.buffer for wire in wires], self._shared.abort_word)

    def abort(self) -> None:
        self._shared.abort()
        if self._column is not None:
            abort(self._column)

    def close(self) -> None:
        self._shared.close()
        if self._column is not None:
            shut_down(self._column)


def all_reduce(backend: Backend, buffer: torch.Tensor) -> None:
    """Replace `buffer`, which is not empty, by the sum over the backend's ranks, on the current stream."""
    work = backend.allreduce([buffer], _in_current_stream())
    if work is not None:  # NCCL returns None: its kernel is in the current stream already
        work.wait()


def all_gather(backend: Backend, buffer: torch.Tensor, own: torch.Tensor) -> None:
    """Fill `buffer` with the `own` of all ranks, on the current stream. `own` may be this rank's part of `buffer`."""
    work = backend._allgather_base(buffer, own, _in_stream(AllgatherOptions()))
    if work is not None:
        work.wait()


def broadcast(backend: Backend, buffer: torch.Tensor, src: int) -> None:
    """Replace `buffer` by that of rank `src`, on the current stream."""
    options = dist.BroadcastOptions()
    options.rootRank = src
    work = backend.broadcast([buffer], _in_stream(options))
    if work is not None:
        work.wait()


@cache
def _in_current_stream() -> dist.AllreduceOptions:
    return _in_stream(all_reduce_options())


def _in_stream(options: _Options) -> _Options:
    options.asyncOp = False  # else NCCL uses a stream of its own
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


def _open_wires(
    specs: Sequence[tuple[int, torch.dtype]], group: SymmetricGroup, accelerator: Accelerator, num_slices: int
) -> list[DeviceWire]:
    """Collective: see `Engine.open_wires`."""
    lengths = [-(-numel * dtype.itemsize // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES for numel, dtype in specs]
    if group.size > 1:  # one mapping for all wires
        block = group.allocate(sum(lengths))
        places = [(block, end - length) for end, length in zip(accumulate(lengths), lengths, strict=True)]
    else:  # a gradient that the script keeps then keeps the memory of its own bucket only
        places = [(group.allocate(length), 0) for length in lengths]
    report = torch.full((max(len(specs), 1), 2), NOT_FOUND, dtype=torch.int32, device=accelerator.device)
    wires = []
    for i, ((numel, dtype), (block, start)) in enumerate(zip(specs, places, strict=True)):
        parts = [part[start : start + numel * dtype.itemsize].view(dtype) for part in block.parts]
        own = parts[group.index]
        bounds = [*slice_bounds(numel, num_slices, dtype.itemsize), *[(0, 0)] * group.size][group.index]
        wires.append(DeviceWire(own.data, own, _addresses(parts, own.device), bounds, report, i, block))
    accelerator.synchronize()
    return wires


def _addresses(parts: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    return torch.tensor([part.data_ptr() for part in parts], dtype=torch.int64, device="cpu").to(device)
