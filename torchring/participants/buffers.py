"""Buffers of a model that forward changes: the running statistics of BatchNorm, and any other.

Each rank's forward sees other data, so each rank's buffers come to differ. Whether that is wrong depends on the buffer.
Running statistics are averaged. Other buffers may belong to a rank, such as a queue of keys or a hidden state, so they
are left alone unless the script chooses. Every STEPS_BETWEEN_CHECKS reductions they are compared, and a warning names
those that differ.

What is averaged, or follows rank 0, travels in every reduction, whether it has changed or not: many kernels write
without a trace in autograd's version counters. It travels beside the gradients, in a wire of its own, at the end of
each backward that reduces. The result is written when the optimizer steps: until then a graph may still need what the
buffers held in forward.
"""

import itertools
import weakref
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Final, Literal

import torch

from torchring.broadcasts import broadcast_together, check_dense, check_writable
from torchring.collectives.service import Collectives, collectives_of, internal_collectives_of
from torchring.errors import GradientError
from torchring.gradients.contract import Setup
from torchring.gradients.layout import SyncBuffers
from torchring.gradients.reducer import Reducer
from torchring.gradients.reduction import STEPS_BETWEEN_CHECKS, Participant, Reduction
from torchring.gradients.views import local_of
from torchring.participants.digests import digests
from torchring.world import World

_CHOICES: Final = ("mean", "rank0", None)
_CANNOT: Final = "cannot exchange its buffers"


@dataclass(frozen=True)
class BufferSpec:
    """A buffer of a model, found again by its module and key: a script may put another tensor in its place."""

    name: str
    shape: torch.Size
    dtype: torch.dtype
    # "mean" averages over the ranks that have data; what has no mean follows the lowest of these ranks. "rank0": all
    # follow that rank. "own": each rank keeps its own, and a warning says if they differ.
    choice: Literal["mean", "rank0", "own"]
    module: weakref.ref[torch.nn.Module]
    key: str

    @property
    def is_averaged(self) -> bool:
        """Whether the ranks' values are averaged. Integers and booleans have no mean."""
        return self.choice == "mean" and (self.dtype.is_floating_point or self.dtype.is_complex)

    def find(self) -> torch.Tensor | None:
        """The buffer as it is now, whatever it has become. None if it is gone."""
        found = getattr(self.module(), self.key, None)
        return local_of(found) if isinstance(found, torch.Tensor) else None


def buffer_specs(
    model: torch.nn.Module, choices: SyncBuffers, ignored: Iterable[torch.Tensor] = ()
) -> list[BufferSpec]:
    """The buffers that may differ between ranks and that torchring looks at, each once.

    Left out: those `ignored`; buffers of SyncBatchNorm layers, which are equal anyway; those for which the choice is
    None; and what cannot be averaged or written to: sparse, expanded and quantized tensors, and those without a shape.
    Where the script has not chosen, buffers that are in no checkpoint are left out, too: caches and masks, which a
    model computes anew.
    """
    if isinstance(choices, Mapping):
        by_name: Mapping[str, Any] = choices
    else:  # "mean" is for running statistics alone
        by_name = {} if choices == "mean" else {"": choices}
    seen = set(map(id, ignored))
    specs = []
    for prefix, module in model.named_modules():
        if isinstance(module, torch.nn.SyncBatchNorm) or getattr(module, "_keeps_buffers_equal", False):
            continue
        own = dict(module.named_buffers(recurse=False))
        has_statistics = not own.keys().isdisjoint(("running_mean", "running_var"))
        for key, buffer in own.items():
            buffer = local_of(buffer)
            choice = _choice_for(name := f"{prefix}.{key}" if prefix else key, by_name)
            if choice == "own" and has_statistics and (key.startswith("running_") or key == "num_batches_tracked"):
                choice = "mean"
            is_in_no_checkpoint = key in getattr(module, "_non_persistent_buffers_set", ())
            if choice is None or (choice == "own" and is_in_no_checkpoint):
                continue
            if id(buffer) not in seen and _is_writable(buffer):
                seen.add(id(buffer))
                specs.append(BufferSpec(name, buffer.shape, buffer.dtype, choice, weakref.ref(module), key))
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


def _results_of(world: World) -> "list[BufferSync]":
    """Those whose wires hold what is to be written with the next step, the oldest first.

    A model may have several optimizers: any of them may reduce, and the step of any of them writes.
    """
    return []


class BufferSync(Participant):
    """Makes the buffers of one model equal on all ranks, once in each reduction of its gradients. See `Reducible`."""

    fields = ("has_other_buffers",)

    def __init__(self, reducer: Reducer, setup: Setup) -> None:
        assert setup.model is not None
        specs = buffer_specs(setup.model, setup.options.sync_buffers, setup.ignored)
        lines = [f"buffer {i}: {spec.name} {_kind(spec)} {spec.choice}" for i, spec in enumerate(specs)]
        collectives_of(setup.world).check_equal(lines)
        self.index = 0  # of the wire among the buckets
        self._world = setup.world
        self._follow = reducer.layout.agreement.follow_current_stream
        self._results = setup.world.shared(_results_of)
        self._own = [spec for spec in specs if spec.choice == "own"]  # that are not known to differ
        self._due_at = 0  # number of the reduction after which these are compared
        self._specs = [spec for spec in specs if spec.choice != "own"]
        self._specs.sort(key=lambda spec: (not spec.is_averaged, str(spec.dtype)))  # stable: alike on all ranks
        self._num_averaged = sum(spec.is_averaged for spec in self._specs)
        # of the buffers that travel: these identify them, whatever their names are in the model of a `wrap`
        self.places = frozenset((spec.module, spec.key) for spec in self._specs)
        self._is_absent = False  # in the reduction: this rank has no data that counts, so its buffers do not count
        self._problem: GradientError | None = None  # or its buffers have changed their shapes
        if self._specs:
            self._shapes = [words.shape for words in self._find()[0]]
            self.wire = reducer.layout.all_reduce.open_wires([(sum(s.numel() for s in self._shapes), torch.float64)])[0]
            self._views = self._lay_out(self.wire.tensor)
        reducer.buffers = self

    @property
    def names(self) -> list[str]:
        return [spec.name for spec in self._specs]

    def on_begin(self, current: Reduction) -> None:
        self._is_absent = not current.weight
        self.close()  # the wire is about to be used again
        if self._specs:
            current.extra = self
            _, self._problem = self._find()
            current.mine["has_other_buffers"] = self._problem is not None

    def begin_reduce(self) -> None:
        """The wire goes to the all-reduce."""
        self.wire.tensor.zero_()
        if self._problem is None:
            self._pack(self._views)
        self._follow()

    def end_reduce(self) -> None:
        """The wire comes back reduced. What is not finite there is the script's: a mask may well hold infinities."""

    def on_message(self, current: Reduction) -> None:
        """Raises on all ranks if a buffer has changed its shape on one. If no rank has data, buffers stay."""
        if not self._specs:
            return
        collectives, weights = internal_collectives_of(self._world), current.heard.by_rank["weight"]
        if current.heard.sums["has_other_buffers"]:
            collectives.raise_together(self._problem, _CANNOT)
        if present := [rank for rank, weight in enumerate(weights) if weight]:
            self._finish(self._views, present, collectives)
            self._results.append(self)

    def on_reduced(self, current: Reduction) -> None:
        """Compare the buffers that are left alone, if it is time to. Collective then."""
        if self._own and current.number >= self._due_at:
            self._due_at = current.number + STEPS_BETWEEN_CHECKS
            if not current.heard.sums["has_ended"]:
                self._compare_own()

    def on_step(self, when: str) -> None:
        """Give the buffers what the last reductions have found, whichever optimizer's they were."""
        if when == "agreed":
            for each in [each for each in self._results if not each.places.isdisjoint(self.places)]:
                each._unpack(each._views)
                each.close()

    def synchronize(self) -> None:
        """Collective, outside backward: make the buffers equal as they are now."""
        self._forget_results()
        if not self._specs:
            return
        collectives = collectives_of(self._world)
        collectives.raise_together(self._find()[1], _CANNOT)
        self._is_absent = False
        views = self._lay_out(wire := torch.zeros_like(self.wire.tensor))
        self._pack(views)
        collectives.all_reduce(wire, "sum")
        self._finish(views, range(self._world.size), collectives)
        self._unpack(views)

    def take_over(self, src: int) -> None:
        """Collective, between reductions: all buffers get the values of rank `src`, unless they have other shapes.

        Buffers that are known to belong to their ranks stay.
        """
        self._forget_results()
        collectives = collectives_of(self._world)
        found = [spec.find() for spec in (*self._specs, *self._own)]
        kinds = [tensor is not None and _kind(tensor) for tensor in found]
        everywhere = [len({*of_ranks}) == 1 for of_ranks in zip(*collectives.all_gather_json(kinds), strict=True)]
        alike = [tensor for tensor, is_alike in zip(found, everywhere, strict=True) if tensor is not None and is_alike]
        broadcast_together(collectives, alike, src, "sync_buffers")

    def close(self) -> None:
        """Others of the same model go on."""
        self._results[:] = [each for each in self._results if each is not self]

    def _forget_results(self) -> None:
        """There is something newer for all buffers of these results."""
        self._results[:] = [each for each in self._results if not each.places <= self.places]

    def _lay_out(self, wire: torch.Tensor) -> list[torch.Tensor]:
        parts = torch.split(wire, [shape.numel() for shape in self._shapes])
        return [part.view(shape) for part, shape in zip(parts, self._shapes, strict=True)]

    @torch.no_grad()
    def _pack(self, views: list[torch.Tensor]) -> None:
        """Write what this rank contributes to a wire of zeros.

        Of means, each of n ranks contributes the share 1 / n, so that a sum of large values does not overflow. What is
        not averaged is of rank 0 alone: the others add zeros.
        """
        num, (words, _) = self._num_averaged, self._find()
        if num and not self._is_absent:
            _copy(views[:num], words[:num])
            torch._foreach_mul_(views[:num], 1.0 / self._world.size)
        if self._world.rank == 0 and words[num:]:
            _copy(views[num:], words[num:])

    @torch.no_grad()
    def _finish(self, views: list[torch.Tensor], present: Sequence[int], collectives: Collectives) -> None:
        """Sums over ranks become what buffers are to be. Collective if rank 0 is not `present`: its buffers are old."""
        num = self._num_averaged
        if num and len(present) < self._world.size:
            torch._foreach_mul_(views[:num], self._world.size / len(present))
        if views[num:] and (src := present[0]) != 0:
            if self._world.rank == src:
                _copy(views[num:], self._find()[0][num:])
            broadcast_together(collectives, views[num:], src, "sync_buffers")

    @torch.no_grad()
    def _unpack(self, views: list[torch.Tensor]) -> None:
        """Write to the buffers. If one has changed since, the next reduction tells all ranks."""
        words, problem = self._find()
        if problem is None:
            _copy(words, views)

    def _find(self) -> tuple[list[torch.Tensor], GradientError | None]:
        """The buffers as they are now; and an error if one is gone, or of another shape or dtype."""
        words = []
        for spec in self._specs:
            found = spec.find()
            if found is None or found.shape != spec.shape or found.dtype != spec.dtype:
                return [], GradientError(
                    f"buffer {spec.name} of the model was {_kind(spec)} in torchring.wrap, and on rank "
                    f"{self._world.rank} it is {'gone' if found is None else _kind(found)}. Buffers that "
                    "ranks exchange take their shapes before torchring.wrap, in a forward for instance. "
                    f"sync_buffers={{{spec.name!r}: None}} leaves this one alone"
                )
            words.append(_words(found))
        return words, None

    def _compare_own(self) -> None:
        """Collective: rank 0 warns, once for each buffer, that it is not the same on all ranks that have data."""
        found = [spec.find() for spec in self._own]
        rows = iter(digests([tensor.detach() for tensor in found if tensor is not None]).tolist())
        mine = [tensor is not None and [_kind(tensor), *next(rows)] for tensor in found]
        said = internal_collectives_of(self._world).all_gather_json([] if self._is_absent else mine)
        first, *rest = list(filter(None, said)) or [mine]
        others = [spec for i, spec in enumerate(self._own) if any(each[i] != first[i] for each in rest)]
        self._own = [spec for spec in self._own if spec not in others]
        if others and self._world.rank == 0:
            what = f"buffer{'s' * (len(others) > 1)} {', '.join(spec.name for spec in others)} of the model"
            self._world.warn(
                f"{what} {'is' if len(others) == 1 else 'are'} not the same on all ranks. Each rank keeps its own: "
                f"pass sync_buffers={{{others[0].name!r}: None}} to torchring.wrap if that is right, as for a queue or "
                "a hidden state. 'mean' in place of None takes the mean over ranks, as is right for a moving average. "
                "'rank0' follows rank 0, as with DistributedDataParallel"
            )


def _copy(targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
    """Copy with one call for each dtype: only then does a device copy all of them in one launch."""
    pairs, dtype = zip(targets, sources, strict=True), attrgetter("dtype")
    for _, alike in itertools.groupby(pairs, lambda pair: tuple(map(dtype, pair))):
        to, of = zip(*alike, strict=True)
        torch._foreach_copy_(to, of)


def _words(buffer: torch.Tensor) -> torch.Tensor:
    """A view of the buffer, whose elements fp64 holds."""
    if buffer.is_complex():
        return torch.view_as_real(buffer)
    if buffer.dtype in (torch.int64, torch.uint64):
        return buffer.unsqueeze(-1).view(torch.int32)
    return buffer


def _kind(buffer: BufferSpec | torch.Tensor) -> str:
    return f"{str(buffer.dtype).removeprefix('torch.')} {tuple(buffer.shape)}"
