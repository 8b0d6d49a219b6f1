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
import operator
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, NamedTuple, TypeAlias, TypeGuard

import torch

from torchring.allreduce import AllReduce, NonFinite, Wire
from torchring.collectives.digests import digests
from torchring.collectives.operations import check_dense, check_writable
from torchring.collectives.service import Collectives, collectives_of, internal_collectives_of
from torchring.gradients.round import Participant, RoundState
from torchring.participants.replicas import STEPS_BETWEEN_CHECKS
from torchring.world import World

_logger: Final = logging.getLogger("torchring")
BufferChoice: TypeAlias = Literal["mean", "rank0"] | None
SyncBuffers: TypeAlias = BufferChoice | Mapping[str, BufferChoice]
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

    def tensor(self) -> torch.Tensor | None:
        """The buffer as it is now. None if it is gone, or has become another shape or dtype."""
        buffer = self.find()
        return buffer if self.fits(buffer) else None

    def find(self) -> object:
        """The module's attribute of that key. A large model has hundreds of buffers, so this is quick."""
        module = self.module()
        buffers = None if module is None else module.__dict__.get("_buffers")
        return buffers.get(self.key) if isinstance(buffers, dict) else getattr(module, self.key, None)

    def writable(self) -> torch.Tensor | None:
        """The buffer as it is now, of whatever shape. None if it is gone, of another dtype, or cannot be written to."""
        buffer = self.find()
        is_usable = isinstance(buffer, torch.Tensor) and buffer.dtype == self.dtype and _is_writable(buffer)
        return buffer if is_usable else None  # type: ignore[return-value]

    def fits(self, buffer: object) -> TypeGuard[torch.Tensor]:
        return isinstance(buffer, torch.Tensor) and buffer.dtype == self.dtype and buffer.shape == self.shape

    @property
    def kind(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {self.shape}"

    def describe(self) -> str:
        """The text that ranks compare."""
        return f"{self.name} {self.kind} {self.choice}"


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


class _Result(NamedTuple):
    """The result of a round, to be written with the next step."""

    sync: BufferSync
    layout: _Layout


class _Shared:
    """Knowledge of buffers that all optimizers of a world share, as a model may have several optimizers.

    Attributes:
        told_of: the buffers that a warning has named.
        results: of rounds, the oldest first.
        backward: the last backward after which buffers have travelled. See `RoundState.backward`.
        carried: those buffers.
    """

    def __init__(self, world: World) -> None:
        self.told_of: set[Place] = set()
        self.results: list[_Result] = []
        self.backward: object = None
        self.carried: set[Place] = set()


class BufferSync(Participant):
    """Makes the buffers of one model equal on all ranks, once for each round of its gradients. See `Reducible`, too.

    Each optimizer of a model has a BufferSync, as any of them may be the one that reduces. Where one backward reaches
    several of them, the buffers travel with the first. The step of any of them writes the result.

    Args:
        world: has more than one rank.
        specs: the buffers; equal on all ranks.
        all_reduce: reduces the wire.
        device: where the wire is.
        follow: called when the wire was packed on the current stream.

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
        self._shared = world.shared(_Shared)
        self._own = [spec for spec in specs if spec.choice == "own"]  # that are not known to differ
        self._due_at = 0  # number of the round after which these are compared
        self._wire: Wire | None = None
        self._open([spec for spec in specs if spec.choice != "own"])
        self._is_absent = False  # in the round: this rank has no data that counts, so its buffers do not count
        self._is_carried = False  # another optimizer of the same model has exchanged them after this backward

    @property
    def names(self) -> list[str]:
        return [spec.name for spec in self._layout.specs]

    @property
    def wire(self) -> Any:
        assert self._wire is not None
        return self._wire

    def begin(self, current: RoundState) -> None:
        self._is_absent = current.is_empty
        self._drop_results(lambda result: result.sync is self)
        current.bits["buffers_missing"] = self._is_absent or any(each is None for each in self._layout.tensors())
        current.extra = None if self._wire is None else self

    def backward_is_over(self, current: RoundState) -> None:
        shared, self._is_carried = self._shared, False
        if current.backward is not None:
            if shared.backward is not current.backward:
                shared.backward, shared.carried = current.backward, set()
            self._is_carried = self.places <= shared.carried
            shared.carried |= self.places
        if self._is_carried:
            current.extra = None

    def agreed(self, current: RoundState) -> None:
        """Collective, unless every rank has contributed all buffers."""
        if self._is_carried or self._wire is None:
            return
        self._drop_results(lambda result: result.sync.places <= self.places)
        layout: _Layout | None = self._layout
        if current.sums["buffers_missing"]:
            layout = self._exchange(internal_collectives_of(self._world), is_absent=self._is_absent)
        if layout is not None:
            self._shared.results.append(_Result(self, layout))

    def finished(self, current: RoundState) -> None:
        """Compare the buffers that are left alone, if it is time to. Collective then."""
        if not self._own or current.number < self._due_at:
            return
        self._due_at = current.number + STEPS_BETWEEN_CHECKS
        if not current.sums["has_ended"]:
            self._compare_own()

    def begin_reduce(self) -> None:
        """The wire goes to the all-reduce."""
        self._layout.pack()
        self._follow()

    def end_reduce(self, non_finite: NonFinite | None) -> None:
        """The wire comes back reduced. What is not finite there is the script's: a mask may well hold infinities."""

    def stepping(self) -> None:
        """Give the buffers what the last rounds have found, whichever optimizer's they were."""
        if not self._shared.results:
            return
        for result in [each for each in self._shared.results if not each.sync.places.isdisjoint(self.places)]:
            result.layout.unpack()
            self._shared.results.remove(result)

    def synchronize(self) -> None:
        """Collective, outside backward: make the buffers equal as they are now."""
        self._drop_results(lambda result: result.sync.places <= self.places)
        if self.places and (layout := self._exchange(collectives_of(self._world), is_absent=False)):
            layout.unpack()

    def take_over(self, src: int) -> None:
        """Collective, between rounds: all buffers get the values of rank `src`, unless they have other shapes.

        Buffers that are known to belong to their ranks stay.
        """
        collectives = collectives_of(self._world)
        tensors = [*self._layout.tensors(), *(spec.tensor() for spec in self._own)]
        are_there = torch.tensor([tensor is not None for tensor in tensors], dtype=torch.uint8, device="cpu")
        collectives.all_reduce(are_there, "min")
        everywhere = [tensor for tensor, there in zip(tensors, are_there.tolist(), strict=True) if there]
        collectives.broadcast_together([tensor.detach() for tensor in everywhere if tensor is not None], src)
        self._shared.results.clear()

    def close(self) -> None:
        """Others of the same model go on."""
        self._drop_results(lambda result: result.sync is self)

    def _drop_results(self, condition: Callable[[_Result], bool]) -> None:
        if self._shared.results:
            self._shared.results[:] = itertools.filterfalse(condition, self._shared.results)

    def _exchange(self, collectives: Collectives, *, is_absent: bool) -> _Layout | None:
        """Collective: exchange the buffers now. Returns what they become, or None if no rank has data.

        A shape that all ranks have come to, as those of quantization observers do in the first forward, is taken over.
        """
        specs = self._layout.specs
        mine = [None if (found := spec.writable()) is None else [*found.shape] for spec in specs]
        said = collectives.all_gather_bytes(b"" if is_absent else json.dumps(mine).encode())
        shapes = {rank: json.loads(theirs) for rank, theirs in enumerate(said) if theirs}
        if not shapes:
            return None
        settled = list(specs)
        for i, spec in enumerate(specs):
            first, *others = (theirs[i] for theirs in shapes.values())
            if len(shapes) == self._world.size and first is not None and all(other == first for other in others):
                settled[i] = dataclasses.replace(spec, shape=tuple(first))
        if settled != specs:
            self._wire = None
            collectives.barrier()  # memory is free when all ranks have let go of the old wire
            self._open(settled)
        givers = {
            spec.place: [rank for rank, theirs in shapes.items() if theirs[i] == [*spec.shape]]
            for i, spec in enumerate(settled)
        }
        if not is_absent:
            self._tell_of_lacking([spec for spec in settled if self._world.rank not in givers[spec.place]])
        layout = _Layout(settled, self._world, givers)
        layout.attach(torch.zeros(layout.numel, dtype=_WIRE, device=self._device))
        layout.pack()
        collectives.all_reduce(layout.wire, "sum")
        return layout

    def _open(self, specs: Sequence[BufferSpec]) -> None:
        """Collective, if there are any."""
        self._layout = _Layout(specs, self._world)
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
        differ = (torch.stack(rows) != rows[0]).any(2).any(0).tolist()
        others = list(itertools.compress(self._own, differ))
        self._own = [spec for spec in self._own if spec not in others]
        new = [spec.name for spec in others if spec.place not in self._shared.told_of]
        self._shared.told_of.update(spec.place for spec in others)
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

    def _tell_of_lacking(self, specs: Sequence[BufferSpec]) -> None:
        """Warn, once for each buffer, that it has no place in what the ranks exchange."""
        for spec in specs:
            if spec.place not in self._shared.told_of:
                self._shared.told_of.add(spec.place)
                found = spec.find()
                is_now = f"has become {_kind_of(found)}" if isinstance(found, torch.Tensor) else "is gone"
                _logger.warning(
                    "buffer %s of the model %s on rank %d, and was %s. Until it is so again, this rank keeps its own; "
                    "sync_buffers={%r: None} leaves it alone on all ranks",
                    *(spec.name, is_now, self._world.rank, spec.kind, spec.name),
                )


class _Layout:
    """The layout of a wire: values that are averaged, then the words of other buffers, of 32 bits, as integers.

    Of means, each of n ranks contributes the share 1 / n, so that a sum of large values does not overflow. What is not
    averaged is of one rank alone. The other ranks add zeros, so it arrives bit by bit as it is.

    Args:
        givers: for each buffer the ranks that have it. All of them if None.

    Attributes:
        specs: in the order of the wire.
        numel: of the wire.
        wire: see `attach`.
    """

    wire: torch.Tensor

    def __init__(
        self, specs: Sequence[BufferSpec], world: World, givers: Mapping[Place, Sequence[int]] | None = None
    ) -> None:
        self.specs = sorted(specs, key=lambda spec: not spec.is_averaged)  # stable: alike on all ranks
        ranks = [range(world.size) if givers is None else givers[spec.place] for spec in self.specs]
        self._is_given = list(map(bool, ranks))
        self._is_mine = [
            world.rank in (of if spec.is_averaged else of[:1]) for spec, of in zip(self.specs, ranks, strict=True)
        ]
        sizes = [spec.num_elements for spec in self.specs]
        self._offsets = list(itertools.accumulate(sizes, initial=0))
        self._num_means = sum(spec.is_averaged for spec in self.specs)
        self.numel = self._offsets[-1]
        self._share: float | torch.Tensor = 1.0 / world.size  # of this rank, in means
        if givers is not None:
            shares = [1.0 / max(len(of), 1) for of in ranks[: self._num_means]]
            self._share = torch.tensor(shares, dtype=_WIRE, device="cpu").repeat_interleave(
                torch.tensor(sizes[: self._num_means], dtype=torch.int64, device="cpu")
            )
        self._found: list[object] = []
        self._shapes: list[object] = []
        self._fitting: list[torch.Tensor | None] = []  # of those that were found last
        self._pairs: dict[bool, list[tuple[torch.Tensor, torch.Tensor]]] = {}  # of these, what `_copy` copies

    def tensors(self) -> list[torch.Tensor | None]:
        """The buffers as they are now; None as in `BufferSpec.tensor`."""
        found = list(map(BufferSpec.find, self.specs))
        shapes = [getattr(buffer, "shape", None) for buffer in found]  # which resize_() changes
        if shapes != self._shapes or any(map(operator.is_not, found, self._found)):
            self._found, self._shapes, self._pairs = found, shapes, {}
            self._fitting = [
                buffer if spec.fits(buffer) else None for spec, buffer in zip(self.specs, found, strict=True)
            ]
        return self._fitting

    def attach(self, wire: torch.Tensor) -> None:
        """Use this wire from now on. [numel] fp64."""
        self.wire = wire
        end = self._offsets[self._num_means]
        self._means, self._rest = wire[:end], wire[end:]
        self._words = torch.zeros(self._rest.numel(), dtype=torch.int32, device=wire.device)
        self._places = list(map(self._place, range(len(self.specs))))
        if isinstance(self._share, torch.Tensor):
            self._share = self._share.to(wire.device)

    @torch.no_grad()
    def pack(self) -> None:
        """Write what this rank contributes."""
        self.wire.zero_()
        self._words.zero_()
        self._copy(to_places=True)
        self._rest.copy_(self._words)
        self._means.mul_(self._share)

    @torch.no_grad()
    def unpack(self) -> None:
        """Give each buffer the mean of what the ranks have contributed. Buffers that no rank has given stay."""
        self._words.copy_(self._rest)
        self._copy(to_places=False)

    def _copy(self, *, to_places: bool) -> None:
        """Copy what this rank contributes to its places, or what some rank has given back."""
        tensors = self.tensors()
        if to_places not in self._pairs:
            are_meant = self._is_mine if to_places else self._is_given
            self._pairs[to_places] = [
                (tensor, place)
                for tensor, place, is_meant in zip(tensors, self._places, are_meant, strict=True)
                if is_meant and tensor is not None
            ]
        if pairs := self._pairs[to_places]:
            buffers = [torch.view_as_real(b) if b.is_complex() and not p.is_complex() else b for b, p in pairs]
            places = [place for _, place in pairs]
            torch._foreach_copy_(*((places, buffers) if to_places else (buffers, places)))

    def _place(self, i: int) -> torch.Tensor:
        spec, start, end = self.specs[i], self._offsets[i], self._offsets[i + 1]
        if spec.is_averaged:
            return self.wire[start:end].view((*spec.shape, 2) if spec.dtype.is_complex else spec.shape)
        first = self._offsets[self._num_means]
        data = self._words[start - first : end - first].view(torch.uint8)[: math.prod(spec.shape) * spec.dtype.itemsize]
        return data.view(spec.dtype).view(spec.shape)


def _digests_of(specs: Sequence[BufferSpec]) -> torch.Tensor:
    """[N, 3]: for each buffer what kind of tensor it is, and its digest. 0 if it is gone."""
    tensors = [spec.writable() for spec in specs]
    rows = torch.zeros(len(specs), 3, dtype=torch.int64, device="cpu")
    there = torch.tensor([tensor is not None for tensor in tensors], dtype=torch.bool, device="cpu")
    present = [tensor.detach() for tensor in tensors if tensor is not None]
    rows[there, 0] = torch.tensor([zlib.crc32(_kind_of(tensor).encode()) for tensor in present], device="cpu")
    rows[there, 1:] = digests(present)
    return rows


def _kind_of(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"
