"""Buffers of a model that forward changes: the running statistics of BatchNorm, and any other.

Each rank's forward sees other data, so each rank's buffers come to differ. The buffers travel beside the gradients, in
a wire of their own, at the end of each backward that reduces. The result is written after `step()`: until then a graph
may still need what the buffers held in forward.

Running statistics always take part: the kernels that write them leave no trace in autograd's version counters. Other
buffers take part when they have changed on some rank, which travels as a control bit. A first change is exchanged in
messages of its own. A buffer that changes again joins the wire.
"""

from __future__ import annotations

import itertools
import math
import operator
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeGuard

import torch

from torchring.allreduce import Mover, NonFinite, Wire
from torchring.collectives.digests import digests
from torchring.collectives.operations import check_dense, check_writable
from torchring.collectives.service import collectives_of, internal_collectives_of
from torchring.norms import SyncBatchNorm
from torchring.world import World

SyncBuffers = Literal["mean", "rank0"]
_WIRE: Final = torch.float64  # holds the sum of fp32 values, and every integer of 32 bits
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

    @property
    def is_wide(self) -> bool:
        """Whether fp64 does not hold every value."""
        return self.dtype in (torch.int64, torch.uint64)

    @property
    def num_values(self) -> int:
        """Elements of a wire that hold the buffer."""
        return math.prod(self.shape) * (2 if self.is_wide or self.dtype.is_complex else 1)

    def tensor(self) -> torch.Tensor | None:
        """The buffer as it is now. None if it is gone, or has become another shape or dtype."""
        buffer = self.find()
        return buffer if self.fits(buffer) else None

    def find(self) -> object:
        """What the module has under the key. A large model has hundreds of buffers, so this is quick."""
        module = self.module()
        buffers = None if module is None else module.__dict__.get("_buffers")
        return buffers.get(self.key) if isinstance(buffers, dict) else getattr(module, self.key, None)

    def fits(self, buffer: object) -> TypeGuard[torch.Tensor]:
        return isinstance(buffer, torch.Tensor) and buffer.dtype == self.dtype and buffer.shape == self.shape

    def describe(self) -> str:
        """What ranks must agree on."""
        return f"{self.name} {self.shape} {str(self.dtype).removeprefix('torch.')}"


def buffer_specs(model: torch.nn.Module) -> list[BufferSpec]:
    """The buffers that may differ between ranks, each once.

    Left out: buffers of SyncBatchNorm layers, which are equal anyway, and what cannot be averaged or written to:
    sparse, expanded and quantized tensors, and those without a shape.
    """
    seen: set[int] = set()
    specs = []
    for prefix, module in model.named_modules():
        if isinstance(module, (SyncBatchNorm, torch.nn.SyncBatchNorm)):
            continue
        own = dict(module.named_buffers(recurse=False))
        has_statistics = not own.keys().isdisjoint(("running_mean", "running_var"))
        for key, buffer in own.items():
            if id(buffer) in seen or not _is_writable(buffer):
                continue
            seen.add(id(buffer))
            name = f"{prefix}.{key}" if prefix else key
            specs.append(BufferSpec(name, tuple(buffer.shape), buffer.dtype, has_statistics, weakref.ref(module), key))
    return specs


def _is_writable(buffer: torch.Tensor) -> bool:
    if isinstance(buffer, torch.nn.parameter.UninitializedBuffer) or buffer.is_quantized:
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
        follow: called when the wire was packed on the current stream.

    Attributes:
        specs: all buffers, those that are in no wire included.
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
        self.specs = specs
        self.index = 0
        self._world = world
        self._mode: SyncBuffers = mode
        self._mover = mover
        self._device = device
        self._follow = follow
        # Buffers that take part when they have changed. By name: what they were when they were equal, and how often
        # they were not.
        self._others = [spec for spec in specs if not spec.always]
        self._seen = {spec.name: _state_of(spec) for spec in self._others}
        self._num_changes = dict.fromkeys(self._seen, 0)
        self._wire: Wire | None = None
        self._open([spec for spec in specs if spec.always])
        # The round
        self._is_absent = False
        self._results: list[tuple[_Layout, bool]] = []  # to be written after the step; whether all ranks gave all

    @property
    def names(self) -> list[str]:
        return self._layout.names

    @property
    def wire(self) -> Any:
        assert self._wire is not None
        return self._wire

    @property
    def travels(self) -> bool:
        """Whether there is a wire to be reduced."""
        return self._wire is not None

    def begin(self, *, is_absent: bool) -> None:
        """A round begins. An absent rank has no data, so its buffers do not count."""
        self._is_absent = is_absent
        self._results = []

    def has_changed(self) -> bool:
        """Whether a buffer that is not in the wire was written to, or replaced, and is not made equal since."""
        return any(map(self._is_changed, self._others))

    def lacks_some(self) -> bool:
        """Whether a buffer that is in the wire is gone, or has another shape, on this rank."""
        return any(buffer is None for buffer in self._layout.tensors())

    def begin_reduce(self) -> None:
        """The wire goes to the mover."""
        self._layout.pack(is_absent=self._is_absent)
        self._follow()

    def end_reduce(self, non_finite: NonFinite | None) -> None:
        """The wire comes back reduced. What is not finite there is the script's: a mask may well hold infinities."""

    def end_round(self, *, is_complete: bool, some_changed: bool) -> None:
        """Every rank has taken part, and agrees about the arguments. Collective if `some_changed`.

        Args:
            is_complete: every rank has contributed all buffers in the wire.
            some_changed: a buffer that is not in the wire has changed on some rank.
        """
        if self.travels:
            self._results.append((self._layout, is_complete))
        if some_changed:
            self._exchange_changed()

    def write(self) -> None:
        """The optimizer has stepped: give the buffers what the last round has found."""
        for layout, is_complete in self._results:
            layout.unpack(is_complete=is_complete)
            self._accept(layout.specs)
        self._results = []

    def take_over(self, src: int) -> None:
        """Collective, between rounds: all buffers get the values of rank `src`, unless they have other shapes."""
        collectives = collectives_of(self._world)
        tensors = [spec.tensor() for spec in self.specs]
        are_there = torch.tensor([tensor is not None for tensor in tensors], dtype=torch.uint8, device="cpu")
        collectives.all_reduce(are_there, "min")
        everywhere = [tensor for tensor, there in zip(tensors, are_there.tolist(), strict=True) if there]
        collectives.broadcast_together([tensor.detach() for tensor in everywhere if tensor is not None], src)
        self._results = []
        self._accept(self.specs)

    def _is_changed(self, spec: BufferSpec) -> bool:
        return _state_of(spec) != self._seen[spec.name]

    def _accept(self, specs: Sequence[BufferSpec]) -> None:
        """These buffers are equal on all ranks, as far as they have the same shape."""
        self._seen.update((spec.name, _state_of(spec)) for spec in specs if spec.name in self._seen)

    def _exchange_changed(self) -> None:
        """Collective: exchange the buffers that are not in the wire and differ between ranks since a change."""
        collectives = internal_collectives_of(self._world)
        mine = torch.tensor(list(map(self._is_changed, self._others)), dtype=torch.uint8, device="cpu")
        changed = list(itertools.compress(self._others, collectives.all_reduce(mine, "max").tolist()))
        digests_of_ranks = torch.stack(collectives.all_gather(_digests_of(changed)))
        differs = (digests_of_ranks != digests_of_ranks[0]).flatten(2).any(2).any(0).tolist()
        differing = list(itertools.compress(changed, differs))
        self._accept([spec for spec, is_other in zip(changed, differs, strict=True) if not is_other])
        if not differing:
            return
        layout = self._lay_out(differing)
        layout.attach(torch.zeros(layout.numel, dtype=_WIRE, device=self._device))
        layout.pack(is_absent=self._is_absent)
        collectives.all_reduce(layout.wire, "sum")
        self._results.append((layout, False))
        for spec in differing:
            self._num_changes[spec.name] += 1
        if joins := [spec for spec in differing if self._num_changes[spec.name] >= _CHANGES_TO_JOIN]:
            self._join_wire(joins)

    def _join_wire(self, joins: Sequence[BufferSpec]) -> None:
        """Collective: from now on these buffers are in the wire."""
        if self.travels:
            self._layout.attach(self._layout.wire.clone())  # of the result; the wire is about to go
            self._wire = None
        internal_collectives_of(self._world).barrier()  # memory is free when all ranks have let go of the old wire
        self._others = [spec for spec in self._others if spec not in joins]
        self._open([*self._layout.specs, *joins])

    def _open(self, specs: Sequence[BufferSpec]) -> None:
        """Collective, if there are any."""
        self._layout = self._lay_out(specs)
        if specs:
            self._wire = self._mover.open_wires([(self._layout.numel, _WIRE)])[0]
            self._layout.attach(self._wire.tensor)

    def _lay_out(self, specs: Sequence[BufferSpec]) -> _Layout:
        return _Layout(specs, self._mode, self._world)


class _Layout:
    """Where each buffer is in a wire: values that have a mean, integers, integers of 64 bits; then a count for each.

    Of means, each rank contributes the share 1 / size, so that a sum of large values does not overflow. An integer of
    64 bits travels as two of 32. Integers are of rank 0 alone. The other ranks add zeros, so integers arrive as they
    are. A count says how many ranks have contributed a buffer.

    Attributes:
        specs: in the order of the wire.
        names: of the buffers, in this order.
        numel: of the wire.
        wire: see `attach`.
    """

    wire: torch.Tensor

    def __init__(self, specs: Sequence[BufferSpec], mode: SyncBuffers, world: World) -> None:
        self.specs = sorted(specs, key=lambda spec: (not spec.has_mean, spec.is_wide))  # stable: alike on all ranks
        self.names = [spec.name for spec in self.specs]
        self._size = world.size
        self._is_mean = mode == "mean"
        self._is_mine = [world.rank == 0 or (self._is_mean and spec.has_mean) for spec in self.specs]
        self._offsets = list(itertools.accumulate((spec.num_values for spec in self.specs), initial=0))
        self._num_means = sum(spec.has_mean for spec in self.specs)
        self._num_narrow = len(self.specs) - sum(spec.is_wide for spec in self.specs)
        self.numel = self._offsets[-1] + len(self.specs)
        self._fitting: list[torch.Tensor | None] = [None] * len(self.specs)  # that were found last

    def tensors(self) -> list[torch.Tensor | None]:
        """The buffers as they are now; None as in `BufferSpec.tensor`."""
        found = list(map(BufferSpec.find, self.specs))
        if any(map(operator.is_not, found, self._fitting)):
            self._fitting = [
                buffer if spec.fits(buffer) else None for spec, buffer in zip(self.specs, found, strict=True)
            ]
        return list(self._fitting)

    def attach(self, wire: torch.Tensor) -> None:
        """Use this wire from now on. [numel] fp64."""
        self.wire = wire
        self._means = wire[: self._offsets[self._num_means]]
        self._halves = wire[self._offsets[self._num_narrow] : self._offsets[-1]]
        self._counts = wire[self._offsets[-1] :]
        self._wide = torch.zeros(self._halves.numel() // 2, dtype=torch.int64, device=wire.device)
        self._places = list(map(self._place, range(len(self.specs))))
        self._ones: tuple[list[bool], torch.Tensor] = [], self._counts[:0].clone()

    @torch.no_grad()
    def pack(self, *, is_absent: bool) -> None:
        """Write what this rank contributes."""
        self.wire.zero_()
        if is_absent:
            return
        tensors = [buffer if mine else None for buffer, mine in zip(self.tensors(), self._is_mine, strict=True)]
        self._wide.zero_()
        self._copy(tensors, to_places=True)
        self._halves.copy_(self._wide.view(torch.int32))
        if self._is_mean:
            self._means.mul_(1.0 / self._size)
        self._counts.copy_(self._ones_for([tensor is not None for tensor in tensors]))

    def _ones_for(self, given: list[bool]) -> torch.Tensor:
        """1 for each buffer that is given, else 0. Sent to the device when it changes, and the host does not wait."""
        if given != self._ones[0]:
            ones = torch.tensor(given, dtype=_WIRE, device="cpu", pin_memory=self.wire.is_cuda)
            self._ones = given, ones.to(self.wire.device, non_blocking=True)
        return self._ones[1]

    @torch.no_grad()
    def unpack(self, *, is_complete: bool) -> None:
        """Give each buffer the mean of what the ranks have contributed. Buffers that no rank has given stay.

        Args:
            is_complete: every rank has contributed what it could. If not, a device is waited for.
        """
        tensors = self.tensors()
        if not is_complete:
            for i, count in enumerate(map(round, self._counts.tolist())):
                if not count:
                    tensors[i] = None
                elif self._is_mean and i < self._num_means:
                    self._places[i].mul_(self._size / count)
        self._wide.view(torch.int32).copy_(self._halves)
        self._copy(tensors, to_places=False)

    def _copy(self, tensors: Sequence[torch.Tensor | None], *, to_places: bool) -> None:
        """Copy the buffers that are not None to their places, or back."""
        buffers, places = [], []
        for tensor, place in zip(tensors, self._places, strict=True):
            if tensor is not None:
                buffers.append(_plain(tensor))
                places.append(place)
        if buffers:
            torch._foreach_copy_(*((places, buffers) if to_places else (buffers, places)))

    def _place(self, i: int) -> torch.Tensor:
        spec, start, end = self.specs[i], self._offsets[i], self._offsets[i + 1]
        if spec.is_wide:
            first = self._offsets[self._num_narrow]
            return self._wide[(start - first) // 2 : (end - first) // 2].view(spec.shape)
        return self.wire[start:end].view((*spec.shape, 2) if spec.dtype.is_complex else spec.shape)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as real numbers, or as signed integers."""
    if tensor.is_complex():
        return torch.view_as_real(tensor)
    return tensor.view(torch.int64) if tensor.dtype == torch.uint64 else tensor


def _digests_of(specs: Sequence[BufferSpec]) -> torch.Tensor:
    """A row for each buffer; zeros for one that has another shape."""
    tensors = [spec.tensor() for spec in specs]
    rows = digests([tensor.detach() for tensor in tensors if tensor is not None])
    found = torch.zeros(len(specs), *rows.shape[1:], dtype=rows.dtype, device="cpu")
    found[torch.tensor([tensor is not None for tensor in tensors], dtype=torch.bool, device="cpu")] = rows
    return found


def _state_of(spec: BufferSpec) -> tuple[int, int]:
    """Is another after the script has written to the buffer, or put another tensor in its place."""
    return (0, 0) if (buffer := spec.tensor()) is None else (id(buffer), buffer._version)
