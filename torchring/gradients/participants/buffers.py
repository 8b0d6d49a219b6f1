"""Buffers of a model that forward changes: the running statistics of BatchNorm, and any other.

Each rank's forward sees other data, so each rank's buffers come to differ. Whether that is wrong depends on the buffer.
Running statistics are averaged. Other buffers may belong to a rank, such as a queue of keys or a hidden state, so they
are left alone unless the script chooses, and a warning names them where they differ.

The buffers travel beside the gradients, in a wire of their own, at the end of each backward that reduces. The result is
written when the optimizer steps: until then a graph may still need what the buffers held in forward.

Running statistics always take part: the kernels that write them leave no trace in autograd's version counters. Other
buffers take part when they have changed on some rank, which travels as a control bit. A first change is exchanged in
messages of its own. A buffer that changes again joins the wire.
"""

from __future__ import annotations

import itertools
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
from torchring.collectives.service import collectives_of, internal_collectives_of
from torchring.gradients.round import Participant, RoundState
from torchring.world import World

_logger: Final = logging.getLogger("torchring")
BufferChoice: TypeAlias = Literal["mean", "rank0"] | None
SyncBuffers: TypeAlias = BufferChoice | Mapping[str, BufferChoice]
_CHOICES: Final = ("mean", "rank0", None)
Place: TypeAlias = tuple[weakref.ref[torch.nn.Module], str]
_WIRE: Final = torch.float64  # holds the sum of fp32 values, and every integer of 32 bits
_CHANGES_TO_JOIN: Final = 2  # a buffer that is written to once, as by load_state_dict(), need not travel ever after


@dataclass(frozen=True)
class BufferSpec:
    """A buffer of a model, found again by its module and key: a script may put another tensor in its place.

    Attributes:
        choice: "mean" averages over the ranks that have data; what has no mean follows the lowest of these ranks.
            "rank0": the buffer follows that rank. "own": each rank keeps its own, and a warning says if they differ.
        always: the buffer takes part in every round.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    choice: Literal["mean", "rank0", "own"]
    always: bool
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
        """The module's attribute of that key. A large model has hundreds of buffers, so this is quick."""
        module = self.module()
        buffers = None if module is None else module.__dict__.get("_buffers")
        return buffers.get(self.key) if isinstance(buffers, dict) else getattr(module, self.key, None)

    def fits(self, buffer: object) -> TypeGuard[torch.Tensor]:
        return isinstance(buffer, torch.Tensor) and buffer.dtype == self.dtype and buffer.shape == self.shape

    @property
    def kind(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {self.shape}"

    def describe(self) -> str:
        """The text that ranks compare."""
        return f"{self.name} {self.kind} {self.choice}"


def buffer_specs(model: torch.nn.Module, choices: SyncBuffers) -> list[BufferSpec]:
    """The buffers that may differ between ranks and that torchring looks at, each once.

    Left out: buffers of SyncBatchNorm layers, which are equal anyway; those for which the choice is None; and what
    cannot be averaged or written to: sparse, expanded and quantized tensors, and those without a shape. Where the
    script has not chosen, buffers that are in no checkpoint are left out, too: caches and masks, which a model computes
    anew.
    """
    by_name: dict[str, Any] = dict(choices) if isinstance(choices, Mapping) else {"": choices}
    if choices == "mean":  # for running statistics
        by_name = {}
    seen: set[int] = set()
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
            always = has_statistics and choice != "own"
            specs.append(BufferSpec(name, tuple(buffer.shape), buffer.dtype, choice, always, weakref.ref(module), key))
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
    """The result of a round, to be written with the next step. `is_complete`: every rank has given every buffer."""

    sync: BufferSync
    layout: _Layout
    is_complete: bool


class _Shared:
    """Knowledge of buffers that all optimizers of a world share, as a model may have several optimizers.

    Attributes:
        seen: what a buffer was when all ranks had the same, for the buffers that take part when they have changed.
        told_of: the buffers that a warning has named.
        results: of rounds, the oldest first.
        backward: the last backward after which buffers have travelled. See `RoundState.backward`.
        carried: those buffers.
    """

    def __init__(self, world: World) -> None:
        self.seen: dict[Place, tuple[int, int]] = {}
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
        specs: all buffers, those that are in no wire included.
        places: of these buffers.
        index: of the wire among the buckets.
    """

    bits = ("buffers_changed", "buffers_missing")
    reduce_scale = 1.0

    def __init__(
        self,
        world: World,
        specs: Sequence[BufferSpec],
        all_reduce: AllReduce[Any],
        device: torch.device,
        follow: Callable[[], None],
    ) -> None:
        self.specs = specs
        self.places = frozenset(spec.place for spec in specs)
        self.index = 0
        self._world = world
        self._all_reduce = all_reduce
        self._device = device
        self._follow = follow
        self._shared = world.shared(_Shared)
        self._others = [spec for spec in specs if not spec.always]  # take part when they have changed
        for spec in self._others:
            self._shared.seen.setdefault(spec.place, _state_of(spec))
        self._num_changes = dict.fromkeys(self.places, 0)
        self._num_alarms = 0
        self._wire: Wire | None = None
        self._open([spec for spec in specs if spec.always])
        self._is_absent = False  # in the round: this rank has no data that counts, so its buffers do not count
        self._is_carried = False  # another optimizer of the same model has exchanged them after this backward

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

    def begin(self, current: RoundState) -> None:
        self._is_absent = current.is_empty
        self._drop_results(lambda result: result.sync is self)
        current.bits["buffers_changed"] = self.has_changed()
        current.bits["buffers_missing"] = self.lacks_some() or self._is_absent
        current.extra = self if self.travels else None

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
        """Collective, unless every rank has contributed all buffers in the wire, and no other buffer has changed."""
        if self._is_carried:
            return
        self._drop_results(lambda result: result.sync.places <= self.places)
        if self.travels:
            is_complete = not current.sums["buffers_missing"]
            self._shared.results.append(_Result(self, self._layout, is_complete))
            if not is_complete and (missing := self._layout.missing()):
                self._exchange(missing)
        if current.sums["buffers_changed"]:
            self._exchange_changed()

    def has_changed(self) -> bool:
        """Whether a buffer that is not in the wire was written to, or replaced, and is not made equal since."""
        return any(map(self._is_changed, self._others))

    def lacks_some(self) -> bool:
        """Whether a buffer that is in the wire is gone, or has another shape, on this rank."""
        lacking = [
            spec for spec, buffer in zip(self._layout.specs, self._layout.tensors(), strict=True) if buffer is None
        ]
        self._tell_of_lacking(lacking)
        return bool(lacking)

    def begin_reduce(self) -> None:
        """The wire goes to the all-reduce."""
        self._layout.pack(is_absent=self._is_absent)
        self._follow()

    def end_reduce(self, non_finite: NonFinite | None) -> None:
        """The wire comes back reduced. What is not finite there is the script's: a mask may well hold infinities."""

    def stepping(self) -> None:
        """Give the buffers what the last rounds have found, whichever optimizer's they were."""
        if not self._shared.results:
            return
        for result in [each for each in self._shared.results if not each.sync.places.isdisjoint(self.places)]:
            self._accept(result.layout.unpack(is_complete=result.is_complete))
            self._shared.results.remove(result)

    def take_over(self, src: int) -> None:
        """Collective, between rounds: all buffers get the values of rank `src`, unless they have other shapes.

        Buffers that are known to belong to their ranks stay.
        """
        collectives = collectives_of(self._world)
        specs = [spec for spec in self.specs if spec.choice != "own" or spec in self._others]
        tensors = [spec.tensor() for spec in specs]
        are_there = torch.tensor([tensor is not None for tensor in tensors], dtype=torch.uint8, device="cpu")
        collectives.all_reduce(are_there, "min")
        everywhere = [tensor for tensor, there in zip(tensors, are_there.tolist(), strict=True) if there]
        collectives.broadcast_together([tensor.detach() for tensor in everywhere if tensor is not None], src)
        self._shared.results.clear()
        self._accept(specs)

    def close(self) -> None:
        """Others of the same model go on."""
        self._drop_results(lambda result: result.sync is self)
        for place in self.places:
            self._shared.seen.pop(place, None)

    def _drop_results(self, condition: Callable[[_Result], bool]) -> None:
        if self._shared.results:
            self._shared.results[:] = itertools.filterfalse(condition, self._shared.results)

    def _is_changed(self, spec: BufferSpec) -> bool:
        return _state_of(spec) != self._shared.seen.get(spec.place)

    def _accept(self, specs: Iterable[BufferSpec]) -> None:
        """These buffers are equal on all ranks, as far as they have the same shape."""
        self._shared.seen.update((spec.place, _state_of(spec)) for spec in specs if not spec.always)

    def _exchange_changed(self) -> None:
        """Collective: exchange the buffers that are not in the wire and differ between ranks since a change."""
        self._num_alarms += 1
        only_watched = all(spec.choice == "own" for spec in self._others)
        if only_watched and self._num_alarms & (self._num_alarms - 1):  # 1st, 2nd, 4th ...: nothing waits for this
            return
        collectives = internal_collectives_of(self._world)
        mine = torch.tensor(list(map(self._is_changed, self._others)), dtype=torch.uint8, device="cpu")
        changed = list(itertools.compress(self._others, collectives.all_reduce(mine, "max").tolist()))
        rows = torch.stack(collectives.all_gather(_digests_of(changed, is_absent=self._is_absent)))
        present = rows[~rows[:, -1, 0].bool()]
        differ = (rows != rows[:1])[:, :-1].any(2).any(0).tolist()
        differ_among_present = (present != present[:1])[:, :-1].any(2).any(0).tolist()
        own = [s for s, is_own in zip(changed, differ_among_present, strict=True) if is_own and s.choice == "own"]
        kinds = torch.tensor([_number_of(spec.kind) for spec in changed], dtype=torch.int64, device="cpu")
        fits = (rows[:, :-1, 2] == kinds).any(0).tolist()  # on some rank
        self._tell_of_lacking([spec for spec, is_there in zip(changed, fits, strict=True) if not is_there])
        joining = [
            spec
            for spec, is_other, is_there in zip(changed, differ, fits, strict=True)
            if is_other and is_there and spec.choice != "own"
        ]
        self._accept(spec for spec in changed if spec not in own and spec not in joining)
        if own:
            self._tell_of_own(own)
            self._others = [spec for spec in self._others if spec not in own]
        if not joining:
            return
        self._exchange(joining)
        for spec in joining:
            self._num_changes[spec.place] += 1
        if joins := [spec for spec in joining if self._num_changes[spec.place] >= _CHANGES_TO_JOIN]:
            self._join_wire(joins)

    def _exchange(self, specs: Sequence[BufferSpec]) -> None:
        """Collective: exchange these buffers now. The lowest rank that has data gives what has no mean."""
        collectives = internal_collectives_of(self._world)
        rank, size = self._world.rank, self._world.size
        tensors = [spec.tensor() for spec in specs]
        self._tell_of_lacking([spec for spec, tensor in zip(specs, tensors, strict=True) if tensor is None])
        mine = [size if self._is_absent or tensor is None else rank for tensor in tensors]
        givers = collectives.all_reduce(torch.tensor(mine, device="cpu"), "min").tolist()
        layout = _Layout(specs, self._world, {spec.place: giver for spec, giver in zip(specs, givers, strict=True)})
        layout.attach(torch.zeros(layout.numel, dtype=_WIRE, device=self._device))
        layout.pack(is_absent=self._is_absent)
        collectives.all_reduce(layout.wire, "sum")
        self._shared.results.append(_Result(self, layout, is_complete=False))

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
        self._layout = _Layout(specs, self._world)
        if specs:
            self._wire = self._all_reduce.open_wires([(self._layout.numel, _WIRE)])[0]
            self._layout.attach(self._wire.tensor)

    def _tell_of_own(self, specs: Sequence[BufferSpec]) -> None:
        """Rank 0 warns, once for each buffer, that it is not the same on all ranks."""
        new = [spec.name for spec in specs if spec.place not in self._shared.told_of]
        self._shared.told_of.update(spec.place for spec in specs)
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
            if spec.choice != "own" and spec.place not in self._shared.told_of:
                self._shared.told_of.add(spec.place)
                found = spec.find()
                is_now = f"has become {_kind_of(found)}" if isinstance(found, torch.Tensor) else "is gone"
                _logger.warning(
                    "buffer %s of the model %s on rank %d, and was %s when torchring.wrap was called. Until it is so "
                    "again, this rank keeps its own; sync_buffers={%r: None} leaves it alone on all ranks",
                    *(spec.name, is_now, self._world.rank, spec.kind, spec.name),
                )


class _Layout:
    """The layout of a wire: values that have a mean, integers, integers of 64 bits; then a count for each buffer.

    Of means, each rank contributes the share 1 / size, so that a sum of large values does not overflow. An integer of
    64 bits travels as two of 32. What has no mean is of one rank alone. The other ranks add zeros, so it arrives as it
    is. A count says how many ranks have contributed a buffer.

    Args:
        givers: the rank that gives what has no mean, where it is not rank 0.

    Attributes:
        specs: in the order of the wire.
        names: of the buffers, in this order.
        numel: of the wire.
        wire: see `attach`.
    """

    wire: torch.Tensor

    def __init__(self, specs: Sequence[BufferSpec], world: World, givers: Mapping[Place, int] | None = None) -> None:
        self.specs = sorted(specs, key=lambda spec: (not spec.is_averaged, spec.is_wide))  # stable: alike on all ranks
        self.names = [spec.name for spec in self.specs]
        self._size = world.size
        self._is_mine = [spec.is_averaged or (givers or {}).get(spec.place, 0) == world.rank for spec in self.specs]
        self._offsets = list(itertools.accumulate((spec.num_values for spec in self.specs), initial=0))
        self._num_means = sum(spec.is_averaged for spec in self.specs)
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
        self._means.mul_(1.0 / self._size)
        self._counts.copy_(self._ones_for([tensor is not None for tensor in tensors]))

    def _ones_for(self, given: list[bool]) -> torch.Tensor:
        """1 for each buffer that is given, else 0. Sent to the device when it changes, and the host does not wait."""
        if given != self._ones[0]:
            ones = torch.tensor(given, dtype=_WIRE, device="cpu", pin_memory=self.wire.is_cuda)
            self._ones = given, ones.to(self.wire.device, non_blocking=True)
        return self._ones[1]

    def missing(self) -> list[BufferSpec]:
        """The buffers without a mean that rank 0 has not contributed. A device is waited for."""
        counts = self._counts.tolist()
        return [spec for spec, count in zip(self.specs, counts, strict=True) if not count and not spec.is_averaged]

    @torch.no_grad()
    def unpack(self, *, is_complete: bool) -> list[BufferSpec]:
        """Give each buffer the mean of what the ranks have contributed. Buffers that no rank has given stay.

        Args:
            is_complete: every rank has contributed what it could. If not, a device is waited for.

        Returns the buffers that some rank has given.
        """
        tensors, given = self.tensors(), self.specs
        if not is_complete:
            counts = list(map(round, self._counts.tolist()))
            given = list(itertools.compress(self.specs, counts))
            for i, count in enumerate(counts):
                if not count:
                    tensors[i] = None
                elif i < self._num_means:
                    self._places[i].mul_(self._size / count)
        self._wide.view(torch.int32).copy_(self._halves)
        self._copy(tensors, to_places=False)
        return given

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


def _digests_of(specs: Sequence[BufferSpec], *, is_absent: bool) -> torch.Tensor:
    """[N + 1, 3]: for each buffer its digest, and what kind of tensor it is; last, whether this rank is absent."""
    buffers = [spec.find() for spec in specs]
    tensors = [buffer if isinstance(buffer, torch.Tensor) and _is_writable(buffer) else None for buffer in buffers]
    rows = torch.zeros(len(specs) + 1, 3, dtype=torch.int64, device="cpu")
    there = torch.tensor([tensor is not None for tensor in tensors] + [False], dtype=torch.bool, device="cpu")
    rows[there, :2] = digests([tensor.detach() for tensor in tensors if tensor is not None])
    kinds = [0 if tensor is None else _number_of(_kind_of(tensor)) for tensor in tensors]
    rows[:-1, 2] = torch.tensor(kinds, dtype=torch.int64, device="cpu")
    rows[-1, 0] = is_absent
    return rows


def _kind_of(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _number_of(kind: str) -> int:
    return zlib.crc32(kind.encode())


def _state_of(spec: BufferSpec) -> tuple[int, int]:
    """(id, version) of the buffer. Changes when the script writes to the buffer or replaces it."""
    buffer = spec.find() if spec.choice == "own" else spec.tensor()
    if not isinstance(buffer, torch.Tensor):
        return (0, 0)
    return id(buffer), 0 if buffer.is_inference() else buffer._version
