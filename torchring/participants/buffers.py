"""Buffers of a model that forward changes: the running statistics of BatchNorm, and any other.

Each rank's forward sees other data, so each rank's buffers come to differ. Whether that is wrong depends on the buffer.
Running statistics are averaged. Other buffers may belong to a rank, such as a queue of keys or a hidden state, so they
are left alone unless the script chooses. Every STEPS_BETWEEN_CHECKS rounds they are compared, and a warning names those
that differ.

What is averaged, or follows rank 0, travels in every round, whether it has changed or not: many kernels write without a
trace in autograd's version counters. It travels beside the gradients, in a wire of its own, at the end of each backward
that reduces. The result is written when the optimizer steps: until then a graph may still need what the buffers held in
forward. A round in which some rank has no data, or a buffer of another shape, takes messages of its own.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import math
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, TypeAlias

import torch

from torchring.allreduce import AllReduce, NonFinite, Wire
from torchring.collectives.digests import digests
from torchring.collectives.operations import check_dense, check_writable
from torchring.collectives.service import Collectives, collectives_of, internal_collectives_of
from torchring.gradients.contract import Setup
from torchring.gradients.layout import SyncBuffers
from torchring.gradients.reducer import Reducer
from torchring.gradients.round import STEPS_BETWEEN_CHECKS, Participant, RoundState
from torchring.world import World

_logger: Final = logging.getLogger("torchring")
_CHOICES: Final = ("mean", "rank0", None)
Place: TypeAlias = tuple[weakref.ref[torch.nn.Module], str]
_WIRE: Final = torch.float64  # holds the sum of fp32 values, and every integer of 32 bits
_ALIGNED_BYTES: Final = 16  # the largest element


@dataclass(frozen=True)
class BufferSpec:
    """A buffer of a model, found again by its module and key: a script may put another tensor in its place.

    Attributes:
        choice: "mean" averages over the ranks that have data; what has no mean follows the lowest of these ranks.
            "rank0": the buffer follows that rank. "own": each rank keeps its own, and a warning says if they differ.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    choice: Literal["mean", "rank0", "own"]
    module: weakref.ref[torch.nn.Module]
    key: str

    @property
    def place(self) -> Place:
        """Identifies the buffer, whatever its name is in the model that a `wrap` was given."""
        return self.module, self.key

    @property
    def is_averaged(self) -> bool:
        """Whether the ranks' values are averaged. Integers and booleans have no mean."""
        return self.choice == "mean" and (self.dtype.is_floating_point or self.dtype.is_complex)

    @property
    def num_elements(self) -> int:
        """Elements of a wire that hold the buffer."""
        numel = math.prod(self.shape)
        if self.is_averaged:
            return numel * (2 if self.dtype.is_complex else 1)
        return -(-numel * self.dtype.itemsize // _ALIGNED_BYTES) * _ALIGNED_BYTES // 4

    def find(self) -> torch.Tensor | None:
        """The buffer as it is now, of whatever shape. None if it is gone, or of another dtype."""
        module = self.module()
        buffers = None if module is None else module.__dict__.get("_buffers")
        found = buffers.get(self.key) if isinstance(buffers, dict) else getattr(module, self.key, None)
        return found if isinstance(found, torch.Tensor) and found.dtype == self.dtype else None

    def tensor(self) -> torch.Tensor | None:
        """The buffer as it is now. None if it is gone, or has become another shape or dtype."""
        found = self.find()
        return found if found is not None and found.shape == self.shape else None

    def describe(self) -> str:
        """The text that ranks compare."""
        return f"{self.name} {_kind(self)} {self.choice}"


def buffer_specs(
    model: torch.nn.Module, choices: SyncBuffers, ignored: Iterable[torch.Tensor] = ()
) -> list[BufferSpec]:
    """The buffers that may differ between ranks and that torchring looks at, each once.

    Left out: those `ignored`; buffers of SyncBatchNorm layers, which are equal anyway; those for which the choice is
    None; and what cannot be averaged or written to: sparse, expanded and quantized tensors, and those without a shape.
    Where the script has not chosen, buffers that are in no checkpoint are left out, too: caches and masks, which a
    model computes anew.
    """
    by_name: dict[str, Any] = dict(choices) if isinstance(choices, Mapping) else {"": choices}
    if choices == "mean":  # for running statistics
        by_name = {}
    seen = set(map(id, ignored))
    specs = []
    for prefix, module in model.named_modules():
        if isinstance(module, torch.nn.SyncBatchNorm) or getattr(module, "_keeps_buffers_equal", False):
            continue
        own = dict(module.named_buffers(recurse=False))
        has_statistics = not own.keys().isdisjoint(("running_mean", "running_var"))
        for key, buffer in own.items():
            name = f"{prefix}.{key}" if prefix else key
            choice = _choice_for(name, by_name)
            if choice is None or id(buffer) in seen or not _is_writable(buffer):
                continue
            if choice == "own":
                if has_statistics and (key.startswith("running_") or key == "num_batches_tracked"):
                    choice = "mean"
                elif key in getattr(module, "_non_persistent_buffers_set", ()):
                    continue
            seen.add(id(buffer))
            specs.append(BufferSpec(name, tuple(buffer.shape), buffer.dtype, choice, weakref.ref(module), key))
    return specs


def check_choices(choices: SyncBuffers, model: torch.nn.Module | None) -> None:
    """Raise ValueError for a choice that does not exist, or for a name that is no buffer or module of the model."""
    by_name = choices if isinstance(choices, Mapping) else {"": choices}
    for name, choice in by_name.items():
        if choice not in _CHOICES:
            where = f"sync_buffers[{name!r}]" if isinstance(choices, Mapping) else "sync_buffers"
            raise ValueError(f"{where} must be one of {', '.join(map(repr, _CHOICES))}, got {choice!r}")
    if isinstance(choices, Mapping):
        if model is None:
            raise ValueError("sync_buffers names buffers of the model; pass the model to torchring.wrap, too")
        names = {name for name, _ in (*model.named_buffers(), *model.named_modules())}
        if unknown := [name for name in choices if name not in names]:
            raise ValueError(f"sync_buffers has {unknown[0]!r}, which is the name of no buffer or module of the model")


def _choice_for(name: str, choices: Mapping[str, Any]) -> Literal["mean", "rank0", "own"] | None:
    """The choice for this buffer, or for the innermost module around it that has one."""
    while name and name not in choices:
        name = name.rpartition(".")[0]
    return choices.get(name, "own")  # type: ignore[no-any-return]


def _is_writable(buffer: torch.Tensor) -> bool:
    if isinstance(buffer, torch.nn.parameter.UninitializedBuffer) or buffer.is_quantized:
        return False
    try:
        check_dense(buffer)
        check_writable(buffer)
    except ValueError:
        return False
    return True


class _Pending:
    """The exchanges of a world whose results are to be written with the next step, the oldest first.

    A model may have several optimizers. Each of them may be the one that reduces, and the step of any writes.
    """

    def __init__(self, world: World) -> None:
        self.results: list[tuple[BufferSync, _Layout]] = []
        self.told_of: set[Place] = set()  # the buffers that a warning has named


class BufferSync(Participant):
    """Makes the buffers of one model equal on all ranks, once for each round of its gradients. See `Reducible`, too.

    Args:
        world: has more than one rank.
        specs: the buffers; equal on all ranks.
        all_reduce: reduces the wire.
        device: where the wire is.
        follow: called when the wire was packed on the current stream of the device.

    Attributes:
        places: of the buffers that travel.
        index: of the wire among the buckets.
    """

    bits = ("buffers_missing",)
    reduce_scale = 1.0

    def __init__(
        self,
        world: World,
        specs: Sequence[BufferSpec],
        all_reduce: AllReduce[Any],
        device: torch.device,
        follow: Callable[[], None],
    ) -> None:
        self.places = frozenset(spec.place for spec in specs if spec.choice != "own")
        self.index = 0
        self._world = world
        self._all_reduce = all_reduce
        self._device = device
        self._follow = follow
        self._pending = world.shared(_Pending)
        self._own = [spec for spec in specs if spec.choice == "own"]  # that are not known to differ
        self._due_at = 0  # number of the round after which these are compared
        self._wire: Wire | None = None
        self._open([spec for spec in specs if spec.choice != "own"])
        self._is_absent = False  # in the round: this rank has no data that counts, so its buffers do not count

    @classmethod
    def open(cls, reducer: Reducer, setup: Setup) -> BufferSync:
        assert setup.model is not None
        specs = buffer_specs(setup.model, setup.options.sync_buffers, setup.ignored)
        collectives_of(setup.world).check_equal([f"buffer {i}: {spec.describe()}" for i, spec in enumerate(specs)])
        layout = reducer.layout
        follow = layout.agreement.follow_current_stream
        reducer.buffers = own = cls(setup.world, specs, layout.all_reduce, reducer.parameters[0].device, follow)
        return own

    @property
    def names(self) -> list[str]:
        return [spec.name for spec in self._layout.specs]

    @property
    def wire(self) -> Any:
        assert self._wire is not None
        return self._wire

    def on_begin(self, current: RoundState) -> None:
        self._is_absent = current.is_empty
        self.close()  # the wire is about to be used again
        if self._wire is not None:
            current.extra = self
            current.bits["buffers_missing"] = self._is_absent or any(s.tensor() is None for s in self._layout.specs)

    def begin_reduce(self) -> None:
        """The wire goes to the all-reduce."""
        self._layout.pack()
        self._follow()

    def end_reduce(self, non_finite: NonFinite | None) -> None:
        """The wire comes back reduced. What is not finite there is the script's: a mask may well hold infinities."""

    def on_message(self, current: RoundState) -> None:
        """Collective, unless every rank has contributed all buffers."""
        if self._wire is None:
            return
        layout: _Layout | None = self._layout
        if current.sums["buffers_missing"]:
            layout = self._exchange(internal_collectives_of(self._world), self._layout.specs, is_absent=self._is_absent)
        self._drop_older()
        if layout is not None:
            self._pending.results.append((self, layout))

    def on_reduced(self, current: RoundState) -> None:
        """Compare the buffers that are left alone, if it is time to. Collective then."""
        if self._own and current.number >= self._due_at:
            self._due_at = current.number + STEPS_BETWEEN_CHECKS
            if not current.sums["has_ended"]:
                self._compare_own()

    def on_step(self, when: str) -> None:
        """Give the buffers what the last rounds have found, whichever optimizer's they were."""
        if when == "agreed" and self._pending.results:
            for each in [each for each in self._pending.results if not each[0].places.isdisjoint(self.places)]:
                each[1].unpack()
                self._pending.results.remove(each)

    def synchronize(self) -> None:
        """Collective, outside backward: make the buffers equal as they are now."""
        self._write(self._layout.specs, is_absent=False)

    def take_over(self, src: int) -> None:
        """Collective, between rounds: all buffers get the values of rank `src`, unless they have other shapes.

        Buffers that are known to belong to their ranks stay.
        """
        self._write([*self._layout.specs, *self._own], is_absent=self._world.rank != src)

    def _write(self, specs: Sequence[BufferSpec], *, is_absent: bool) -> None:
        self._drop_older()
        if specs and (layout := self._exchange(collectives_of(self._world), specs, is_absent=is_absent)):
            layout.unpack()

    def close(self) -> None:
        """Others of the same model go on."""
        self._pending.results[:] = [each for each in self._pending.results if each[0] is not self]

    def _drop_older(self) -> None:
        """There is something newer for all buffers of these results."""
        self._pending.results[:] = [each for each in self._pending.results if not each[0].places <= self.places]

    def _exchange(self, collectives: Collectives, specs: Sequence[BufferSpec], *, is_absent: bool) -> _Layout | None:
        """Collective: exchange the buffers now. Returns what they become, or None if no rank has data.

        A shape that all ranks have come to, as those of quantization observers do in the first forward, is taken over.
        """
        found = [spec.find() for spec in specs]
        mine = [None if tensor is None else [*tensor.shape] for tensor in found]
        said = collectives.all_gather_bytes(b"" if is_absent else json.dumps(mine).encode())
        shapes = {rank: json.loads(theirs) for rank, theirs in enumerate(said) if theirs}
        if not shapes:
            return None
        specs = list(specs)
        for i, shape in enumerate(next(iter(shapes.values()))):
            if shape is not None and len(shapes) == self._world.size and all(s[i] == shape for s in shapes.values()):
                specs[i] = dataclasses.replace(specs[i], shape=tuple(shape))
        if len(shapes) == self._world.size and specs != self._layout.specs:
            self._wire = None
            collectives.barrier()  # memory is free when all ranks have let go of the old wire
            self._open(specs)
        givers = {
            spec.place: [rank for rank, theirs in shapes.items() if theirs[i] == [*spec.shape]]
            for i, spec in enumerate(specs)
        }
        for spec, tensor in zip(specs, found, strict=True):
            if not is_absent and self._world.rank not in givers[spec.place]:
                self._tell_of_lacking(spec, tensor)
        layout = _Layout(specs, self._world, givers)
        layout.attach(torch.zeros(layout.numel, dtype=_WIRE, device=self._device))
        layout.pack()
        collectives.all_reduce(layout.wire, "sum")
        return layout

    def _open(self, specs: Sequence[BufferSpec]) -> None:
        """Collective, if there are any."""
        self._layout = _Layout(specs, self._world, {spec.place: range(self._world.size) for spec in specs})
        if specs:
            self._wire = self._all_reduce.open_wires([(self._layout.numel, _WIRE)])[0]
            self._layout.attach(self._wire.tensor)

    def _compare_own(self) -> None:
        """Collective: rank 0 warns, once for each buffer, that it is not the same on all ranks that have data."""
        mine = b"" if self._is_absent else _digests_of(self._own).numpy().tobytes()
        said = internal_collectives_of(self._world).all_gather_bytes(mine)
        rows = [torch.frombuffer(bytearray(each), dtype=torch.int64).view(-1, 3) for each in said if each]
        if not rows:
            return
        others = list(itertools.compress(self._own, (torch.stack(rows) != rows[0]).any(2).any(0).tolist()))
        self._own = [spec for spec in self._own if spec not in others]
        new = [spec.name for spec in others if spec.place not in self._pending.told_of]
        self._pending.told_of.update(spec.place for spec in others)
        if new and self._world.rank == 0:
            _logger.warning(
                "%s of the model %s not the same on all ranks. Each rank keeps its own: pass sync_buffers={%r: None} "
                "to torchring.wrap if that is right, as for a queue or a hidden state. 'mean' in place of None takes "
                "the mean over ranks, as is right for a moving average. 'rank0' follows rank 0, as with "
                "DistributedDataParallel",
                f"buffer {new[0]}" if len(new) == 1 else f"buffers {', '.join(new)}",
                "is" if len(new) == 1 else "are",
                new[0],
            )

    def _tell_of_lacking(self, spec: BufferSpec, tensor: torch.Tensor | None) -> None:
        """Warn once that the buffer has no place in what the ranks exchange."""
        if spec.place in self._pending.told_of:
            return
        self._pending.told_of.add(spec.place)
        is_now = "is gone" if tensor is None else f"has become {_kind(tensor)}"
        _logger.warning(
            "buffer %s of the model %s on rank %d, and was %s. Until it is so again, this rank keeps its own; "
            "sync_buffers={%r: None} leaves it alone on all ranks",
            *(spec.name, is_now, self._world.rank, _kind(spec), spec.name),
        )


class _Layout:
    """The layout of a wire: values that are averaged, then the words of other buffers, of 32 bits, as integers.

    Of means, each of n ranks contributes the share 1 / n, so that a sum of large values does not overflow. What is not
    averaged is of one rank alone. The other ranks add zeros, so it arrives bit by bit as it is.

    Args:
        givers: for each buffer the ranks that have it.

    Attributes:
        specs: in the order of the wire.
        numel: of the wire.
        wire: see `attach`.
    """

    wire: torch.Tensor

    def __init__(self, specs: Sequence[BufferSpec], world: World, givers: Mapping[Place, Sequence[int]]) -> None:
        self.specs = sorted(specs, key=lambda spec: not spec.is_averaged)  # stable: alike on all ranks
        ranks = [givers[spec.place] for spec in self.specs]
        self._is_given = list(map(bool, ranks))
        self._is_mine = [
            world.rank in (of if spec.is_averaged else of[:1]) for spec, of in zip(self.specs, ranks, strict=True)
        ]
        self._offsets = list(itertools.accumulate((spec.num_elements for spec in self.specs), initial=0))
        self._shares = [1.0 / max(len(of), 1) for spec, of in zip(self.specs, ranks, strict=True) if spec.is_averaged]
        self.numel = self._offsets[-1]

    def attach(self, wire: torch.Tensor) -> None:
        """Use this wire from now on. [numel] fp64."""
        self.wire = wire
        self._rest = wire[self._offsets[len(self._shares)] :]
        self._words = torch.zeros(self._rest.numel(), dtype=torch.int32, device=wire.device)
        self._places = list(map(self._place, range(len(self.specs))))

    @torch.no_grad()
    def pack(self) -> None:
        """Write what this rank contributes."""
        self.wire.zero_()
        self._words.zero_()
        places, buffers = self._pairs(self._is_mine)
        if places:
            torch._foreach_copy_(places, buffers)
        self._rest.copy_(self._words)
        if self._shares:
            torch._foreach_mul_(self._places[: len(self._shares)], self._shares)

    @torch.no_grad()
    def unpack(self) -> None:
        """Give each buffer the mean of what the ranks have contributed. Buffers that no rank has given stay."""
        self._words.copy_(self._rest)
        places, buffers = self._pairs(self._is_given)
        if places:
            torch._foreach_copy_(buffers, places)

    def _pairs(self, are_meant: Sequence[bool]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Places in the wire, and the buffers that belong there. Those that have another shape by now are left out."""
        places, buffers = [], []
        for spec, place, is_meant in zip(self.specs, self._places, are_meant, strict=True):
            if is_meant and (buffer := spec.tensor()) is not None:
                places.append(place)
                buffers.append(torch.view_as_real(buffer) if buffer.is_complex() and not place.is_complex() else buffer)
        return places, buffers

    def _place(self, i: int) -> torch.Tensor:
        spec, start, end = self.specs[i], self._offsets[i], self._offsets[i + 1]
        if spec.is_averaged:
            return self.wire[start:end].view((*spec.shape, 2) if spec.dtype.is_complex else spec.shape)
        first = self._offsets[len(self._shares)]
        data = self._words[start - first : end - first].view(torch.uint8)[: math.prod(spec.shape) * spec.dtype.itemsize]
        return data.view(spec.dtype).view(spec.shape)


def _digests_of(specs: Sequence[BufferSpec]) -> torch.Tensor:
    """[N, 3]: for each buffer what kind of tensor it is, and its digest. 0 if it is gone."""
    tensors = [spec.find() for spec in specs]
    rows = torch.zeros(len(specs), 3, dtype=torch.int64, device="cpu")
    there = torch.tensor([tensor is not None for tensor in tensors], dtype=torch.bool, device="cpu")
    present = [tensor.detach() for tensor in tensors if tensor is not None]
    rows[there, 0] = torch.tensor([zlib.crc32(_kind(tensor).encode()) for tensor in present], device="cpu")
    rows[there, 1:] = digests(present)
    return rows


def _kind(buffer: BufferSpec | torch.Tensor) -> str:
    return f"{str(buffer.dtype).removeprefix('torch.')} {tuple(buffer.shape)}"
