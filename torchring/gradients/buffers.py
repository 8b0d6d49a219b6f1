"""Buffers of a model that forward changes: the running statistics of BatchNorm, and any other.

Each rank's forward sees other data, so each rank's buffers come to differ. The buffers travel beside the gradients, in
a wire of their own, at the end of each backward that reduces. The result is written after `step()`: until then a graph
may still need what the buffers held in forward.

Layers that keep running statistics always take part: their kernels leave no trace in autograd's version counters. Other
buffers take part when they have changed on some rank, which travels as a control bit. A first change is exchanged in
messages of its own. A buffer that changes again joins the wire.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch.nn.modules.batchnorm import _NormBase

from torchring.allreduce import Mover, NonFinite, Wire
from torchring.collectives.operations import check_dense, check_writable
from torchring.collectives.service import internal_collectives_of
from torchring.norms import SyncBatchNorm
from torchring.world import World

SyncBuffers = Literal["mean", "rank0"]
_BYTES_ALIGNMENT: Final = 16  # of a buffer among bytes: of the widest dtype
_CHANGES_TO_JOIN: Final = 2  # a buffer that is written to once, as by load_state_dict(), need not travel ever after


@dataclass(frozen=True)
class BufferSpec:
    """A buffer of a model, found again by its module and key: a script may put another tensor in its place.

    Attributes:
        always: the buffer takes part in every round.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    always: bool
    module: weakref.ref[torch.nn.Module]
    key: str

    @property
    def has_mean(self) -> bool:
        """Whether values can be averaged. Integers and booleans cannot."""
        return self.dtype.is_floating_point or self.dtype.is_complex

    def tensor(self) -> torch.Tensor | None:
        """The buffer as it is now. None if it is gone, or has become another shape or dtype."""
        module = self.module()
        buffer = None if module is None else getattr(module, self.key, None)
        if not isinstance(buffer, torch.Tensor) or (buffer.shape, buffer.dtype) != (self.shape, self.dtype):
            return None
        return buffer

    def describe(self) -> str:
        """What ranks must agree on."""
        return f"{self.name} {self.shape} {str(self.dtype).removeprefix('torch.')}"


def buffer_specs(model: torch.nn.Module) -> list[BufferSpec]:
    """The buffers that may differ between ranks, each once.

    Left out: buffers of SyncBatchNorm layers, which are equal anyway, and what nobody can write to (sparse, expanded,
    without a shape).
    """
    seen: set[int] = set()
    specs = []
    for prefix, module in model.named_modules():
        if isinstance(module, (SyncBatchNorm, torch.nn.SyncBatchNorm)):
            continue
        for key, buffer in module.named_buffers(recurse=False):
            if id(buffer) in seen or not _is_writable(buffer):
                continue
            seen.add(id(buffer))
            name = f"{prefix}.{key}" if prefix else key
            always = isinstance(module, _NormBase)
            specs.append(BufferSpec(name, tuple(buffer.shape), buffer.dtype, always, weakref.ref(module), key))
    return specs


def _is_writable(buffer: torch.Tensor) -> bool:
    if isinstance(buffer, torch.nn.parameter.UninitializedBuffer):
        return False
    try:
        check_dense(buffer)
        check_writable(buffer)
    except ValueError:
        return False
    return True


class BufferSync:
    """Makes the buffers of one model equal on all ranks, once for each round of its gradients. See `Reducible`.

    Args:
        world: has more than one rank.
        specs: the buffers; equal on all ranks.
        mode: "mean" averages over the ranks that have data, and integers follow rank 0; "rank0": all follow rank 0.
        mover: reduces the wire.
        device: where the wire is.
        follow: called when the wire is packed on the current stream.

    Attributes:
        index: of the wire among the buckets.
    """

    reduce_scale = 1.0

    def __init__(
        self,
        world: World,
        specs: Sequence[BufferSpec],
        mode: SyncBuffers,
        mover: Mover[Any],
        device: torch.device,
        follow: Callable[[], None],
    ) -> None:
        self.index = 0
        self._is_absent = False
        self._world = world
        self._mode: SyncBuffers = mode
        self._mover = mover
        self._device = device
        self._follow = follow
        # Those that take part when they have changed, by name: what they were when they were equal, how often it was.
        self._others = [spec for spec in specs if not spec.always]
        self._seen = {spec.name: _state_of(spec) for spec in self._others}
        self._num_changes = dict.fromkeys(self._seen, 0)
        self._wire: Wire | None = None
        self._layout = self._lay_out([spec for spec in specs if spec.always])
        self._open()
        self._results: list[tuple[_Layout, torch.Tensor]] = []  # to be written after the step

    @property
    def names(self) -> list[str]:
        return [spec.name for spec in self._layout.specs]

    @property
    def wire(self) -> Any:
        assert self._wire is not None
        return self._wire

    @property
    def travels(self) -> bool:
        """Whether there is a wire to be reduced."""
        return self._wire is not None

    def has_changed(self) -> bool:
        """Whether a buffer that is not in the wire was written to, or replaced, and is not made equal since."""
        return any(map(self._is_changed, self._others))

    def _is_changed(self, spec: BufferSpec) -> bool:
        return _state_of(spec) != self._seen[spec.name]

    def begin(self, *, is_absent: bool) -> None:
        """A round begins. An absent rank has no data, so its buffers do not count."""
        self._is_absent = is_absent
        self._results = []

    def begin_reduce(self) -> None:
        """The wire goes to the mover."""
        self._layout.pack(self.wire.tensor, is_absent=self._is_absent)
        self._follow()

    def end_reduce(self, non_finite: NonFinite | None) -> None:
        """The wire comes back reduced. What is not finite there is the script's: a mask may well hold infinities."""
        self._results.append((self._layout, self.wire.tensor))

    def exchange_changed(self) -> None:
        """Collective: exchange the buffers that are not in the wire and have changed on some rank."""
        collectives = internal_collectives_of(self._world)
        mine = torch.tensor(list(map(self._is_changed, self._others)), dtype=torch.uint8, device="cpu")
        changed = list(itertools.compress(self._others, collectives.all_reduce(mine, "max").tolist()))
        layout = self._lay_out(changed)
        values = torch.zeros(layout.numel, dtype=layout.dtype, device=self._device)
        layout.pack(values, is_absent=self._is_absent)
        self._results.append((layout, collectives.all_reduce(values, "sum")))
        for spec in changed:
            self._num_changes[spec.name] += 1
        if joins := [spec for spec in changed if self._num_changes[spec.name] >= _CHANGES_TO_JOIN]:
            self._join_wire(joins)

    def write(self) -> None:
        """The optimizer has stepped: give the buffers what the last round has found."""
        for layout, values in self._results:
            layout.unpack(values)
            self._seen.update((spec.name, _state_of(spec)) for spec in layout.specs if spec.name in self._seen)
        self._results = []

    def _join_wire(self, joins: Sequence[BufferSpec]) -> None:
        """Collective: from now on these buffers are in the wire."""
        self._results = [(layout, values.clone()) for layout, values in self._results]  # the wire is about to go
        self._layout = self._lay_out([*self._layout.specs, *joins])
        self._others = [spec for spec in self._others if spec not in joins]
        self._wire = None
        internal_collectives_of(self._world).barrier()  # memory is free when all ranks have let go of the old wire
        self._open()

    def _open(self) -> None:
        if self._layout.specs:
            (self._wire,) = self._mover.open_wires([(self._layout.numel, self._layout.dtype)])

    def _lay_out(self, specs: Sequence[BufferSpec]) -> _Layout:
        return _Layout(specs, self._mode, self._world.rank, self._device)


class _Layout:
    """Where each buffer is in a wire: values that have a mean, then the bytes of the others, then a count for each.

    Bytes travel as numbers from 0 to 255, of rank 0 alone. The other ranks add zeros, so bytes arrive as they are. A
    count says how many ranks have contributed a buffer.

    Attributes:
        dtype: fp32, or fp64 if a buffer has double precision.
    """

    def __init__(self, specs: Sequence[BufferSpec], mode: SyncBuffers, rank: int, device: torch.device) -> None:
        self.specs = sorted(specs, key=lambda spec: not spec.has_mean)  # stable, so alike on all ranks
        is_wide = any(spec.dtype in (torch.float64, torch.complex128) for spec in self.specs)
        self.dtype = torch.float64 if is_wide else torch.float32
        sizes = list(map(_num_values, self.specs))
        offsets = list(itertools.accumulate(sizes, initial=0))
        self._num_values = offsets[-1]
        self._bytes_offset = offsets[sum(spec.has_mean for spec in self.specs)]
        self.numel = self._num_values + len(sizes)
        self._is_mine = [rank == 0 or (mode == "mean" and spec.has_mean) for spec in self.specs]

        # This rank's buffers as they travel, and the place of each among them.
        self._values = torch.zeros(self._num_values, dtype=self.dtype, device=device)
        self._bytes = torch.zeros(self._num_values - self._bytes_offset, dtype=torch.uint8, device=device)
        self._places = [self._place(spec, offset) for spec, offset in zip(self.specs, offsets, strict=False)]
        lengths = torch.tensor(sizes, dtype=torch.int64, device="cpu")
        self._spec_of_value = torch.arange(len(sizes), device="cpu").repeat_interleave(lengths).to(device)
        self._counts: tuple[list[bool], torch.Tensor] | None = None  # as a list and on the device, of the last round

    @torch.no_grad()
    def pack(self, wire: torch.Tensor, *, is_absent: bool) -> None:
        """Write what this rank contributes."""
        is_there = self._copy_in()
        mine = [not is_absent and mine and there for mine, there in zip(self._is_mine, is_there, strict=True)]
        if self._counts is None or self._counts[0] != mine:
            self._counts = mine, torch.tensor(mine, dtype=self.dtype, device="cpu").to(wire.device)
        counts = self._counts[1]
        wire[self._num_values :].copy_(counts)
        wire[: self._num_values].copy_(torch.where(counts[self._spec_of_value] > 0, self._values, 0.0))

    @torch.no_grad()
    def unpack(self, wire: torch.Tensor) -> None:
        """Give each buffer the mean of what the ranks have contributed. Buffers that no rank has given stay."""
        self._copy_in()
        counts = wire[self._num_values :][self._spec_of_value]
        self._values.copy_(torch.where(counts > 0, wire[: self._num_values] / counts, self._values))
        self._bytes.copy_(self._values[self._bytes_offset :])
        buffers, places = self._pairs()
        torch._foreach_copy_(buffers, places)

    def _copy_in(self) -> list[bool]:
        """Copy this rank's buffers to `_values`. Returns for each whether it is there."""
        buffers, places = self._pairs()
        torch._foreach_copy_(places, buffers)
        self._values[self._bytes_offset :].copy_(self._bytes)
        if len(buffers) == len(self.specs):
            return [True] * len(buffers)
        return [spec.tensor() is not None for spec in self.specs]

    def _pairs(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The buffers that are there, as real numbers, and their places."""
        buffers, places = [], []
        for spec, place in zip(self.specs, self._places, strict=True):
            if (buffer := spec.tensor()) is not None:
                buffers.append(torch.view_as_real(buffer) if spec.dtype.is_complex else buffer)
                places.append(place)
        return buffers, places

    def _place(self, spec: BufferSpec, offset: int) -> torch.Tensor:
        if spec.has_mean:
            shape = (*spec.shape, 2) if spec.dtype.is_complex else spec.shape
            return self._values[offset : offset + _num_values(spec)].view(shape)
        offset -= self._bytes_offset
        return self._bytes[offset : offset + _num_bytes(spec)].view(spec.dtype).view(spec.shape)


def _num_values(spec: BufferSpec) -> int:
    """Elements of a wire that hold the buffer."""
    if spec.has_mean:
        return math.prod(spec.shape) * (2 if spec.dtype.is_complex else 1)
    return math.ceil(_num_bytes(spec) / _BYTES_ALIGNMENT) * _BYTES_ALIGNMENT


def _num_bytes(spec: BufferSpec) -> int:
    return math.prod(spec.shape) * spec.dtype.itemsize


def _state_of(spec: BufferSpec) -> tuple[int, int]:
    """Is another after the script has written to the buffer, or put another tensor in its place."""
    return (0, 0) if (buffer := spec.tensor()) is None else (id(buffer), buffer._version)
