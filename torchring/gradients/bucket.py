"""One bucket at run time: it counts arriving gradients, packs them, and gives them back reduced.

Where the wire has the gradients' own dtype, gradients live in it: `p.grad` becomes a view of the wire buffer when it is
packed, and holds the mean as soon as the buffer does. Otherwise packing scales and casts, and results are copied back.
"""

from __future__ import annotations

import enum
import math
import operator
import weakref
from collections.abc import Callable, Sequence
from typing import Final

import torch

from torchring.allreduce import NonFinite, Wire
from torchring.errors import GradientError
from torchring.gradients.packing import HostPacking, Packing
from torchring.gradients.plan import NUM_SIGNALS, BucketPlan, ParameterSpec, Slot
from torchring.gradients.views import as_real, gradient_view, held, leave, storage_of

# From here on a gradient is copied the moment it arrives: still in cache, and its memory goes straight back to the
# allocator for the next one. Smaller ones are only counted, and copied by one call per bucket: a call each would cost
# more than the copy. (42 M parameters in 4 MiB tensors: 232 ms against 346 copied at the end; 802 tensors of 4 KiB: 40
# against 50 copied on arrival.)
COPY_ON_ARRIVAL_BYTES: Final = 256 * 1024


class BucketState(enum.Enum):
    """A bucket's life in one backward. Anything out of this order is an error."""

    IDLE = "waiting for a backward"
    FILLING = "gradients are arriving"
    PACKED = "all gradients are in the wire buffer"
    REDUCING = "the mover owns the wire buffer"
    REDUCED = "the wire buffer holds the result"


class GradientStatus(enum.Enum):
    """What is known about a parameter's `.grad`."""

    UNKNOWN = "has never been reduced"
    LOCAL = "holds local contributions that no other rank has seen"
    ZEROED = "was zeroed in place"
    REDUCED = "is the same on all ranks"


class Bucket:
    """The gradients of one `BucketPlan`, on this rank.

    Used by the thread that runs backward; `begin_reduce` and `end_reduce` by the one that reduces.

    Args:
        plan: what belongs here.
        wire: the buffer, owned by the bucket except while it is REDUCING.
        specs, parameters: all of the optimizer's; the plan's slots index them.
        scale: the factor between the sum over ranks and the result.
        is_sum: whether the result is the plain sum, to which a gradient that was reduced before must not be added: it
            would be counted once per rank.
        packing: makes the copies, given the factor that comes before the cast; on the host unless said.

    Attributes:
        flags: for each parameter whether it is used, and the signals, on the host. Part of the wire buffer where that
            is there, too; otherwise somebody else tells the other ranks (`rounds.py`).
    """

    def __init__(
        self,
        plan: BucketPlan,
        wire: Wire,
        specs: Sequence[ParameterSpec],
        parameters: Sequence[torch.nn.Parameter],
        *,
        scale: float,
        is_sum: bool = False,
        packing: Callable[[float], Packing] = HostPacking,
    ) -> None:
        self.plan = plan
        self.wire = wire
        self.index = plan.index
        self.names = [specs[slot.parameter].name for slot in plan.slots]
        self.parameters = [parameters[slot.parameter] for slot in plan.slots]
        self.state = BucketState.IDLE
        self.status = [GradientStatus.UNKNOWN] * len(plan.slots)
        self.non_finite: NonFinite | None = None
        self.signals = [0.0] * NUM_SIGNALS  # 0 or 1 each: what this rank tells the others with this bucket
        self._is_sum = is_sum
        self._gradients_live_here = plan.wire_dtype == plan.dtype
        # A cast rounds, so the scale goes before it; without one the mover scales what it has just summed, in cache.
        self.packing = packing(1.0 if self._gradients_live_here else scale)
        self.reduce_scale = scale if self._gradients_live_here else 1.0
        self._specs = [specs[slot.parameter] for slot in plan.slots]
        make_view = _gradient if self._gradients_live_here else _place
        self._views = [make_view(wire.tensor, slot, spec) for slot, spec in zip(plan.slots, self._specs, strict=True)]
        self._are_complex = any(spec.dtype.is_complex for spec in self._specs)
        self._addresses = [view.data_ptr() for view in self._views]
        self._storages = [storage_of(view) for view in self._views]
        self.flags = wire.tensor[plan.flags_offset :]
        self._is_on_device = not self.packing.on_arrival
        if self._is_on_device:
            self.flags = torch.zeros(self.flags.shape, dtype=torch.float32, device="cpu")
        element_bytes = plan.dtype.itemsize
        self.copies_on_arrival = [
            self.packing.on_arrival and slot.numel * element_bytes >= COPY_ON_ARRIVAL_BYTES for slot in plan.slots
        ]
        self._has_arrived = [False] * len(plan.slots)
        self._num_missing = len(plan.slots)
        self._missing: list[int] = []
        self._kept: dict[int, torch.Tensor] = {}
        self._is_abandoned = False
        # The tensors that held the results. Another one in `.grad` was put there by somebody else. Known by identity,
        # not by address, which the allocator uses again; weakly, so that zero_grad() still frees them.
        self._view_refs = [weakref.ref(view) for view in self._views]
        self._settled: list[weakref.ref[torch.Tensor] | None] = [None] * len(plan.slots)
        self._settled_versions = [0] * len(plan.slots)
        # Of gradients that are copied to the wire: the tensor that was packed, and its version.
        self._packed: dict[int, tuple[torch.Tensor, int]] = {}
        # A view's version counts our writes and the script's (through `.grad`), but not the mover's.
        self._versions = list(map(_version_of, self._views))

    def arrive(self, slot: int) -> bool:
        """A gradient was accumulated, in a backward that reduces. True if it was the last one: the bucket is PACKED."""
        if self.state is not _FILLING:
            self._open(slot)
        if self._is_sum:
            self._refuse_sum_of_sums(slot)
        self.status[slot] = _LOCAL
        if self._is_on_device:
            self.packing.arrived()
        if not self._has_arrived[slot]:
            self._has_arrived[slot] = True
            self._num_missing -= 1
        if self.copies_on_arrival[slot]:
            self._pack((slot,))
        if self._num_missing:
            return False
        self.flags.fill_(1)
        self._pack_rest()
        return True

    def accumulate(self, slot: int) -> None:
        """A gradient was accumulated, in whatever backward."""
        if self._is_sum:
            self._refuse_sum_of_sums(slot)
        self.status[slot] = _LOCAL

    def fill_missing(self) -> None:
        """Backward is over: parameters whose gradient did not arrive contribute what they hold, or zero. Then PACKED.

        One that holds nothing new is flagged 0. If it is on every rank, its `.grad` comes out as it went in.
        """
        if self.state is BucketState.IDLE:
            self.state = BucketState.FILLING
        self.flags.fill_(1)
        self._missing = [slot for slot, arrived in enumerate(self._has_arrived) if not arrived]
        present: list[int] = []
        absent: list[int] = []
        for slot in self._missing:
            grad = self.parameters[slot].grad
            (absent if grad is None else present).append(slot)
            if grad is None:
                self.flags[slot] = 0
            elif self._is_settled(slot, grad):
                self.flags[slot] = 0
                if self._gradients_live_here:  # the reduction will overwrite it
                    self._kept[slot] = grad.clone()
        if absent:
            self._take_back_moved(absent)
            views = [self._views[slot] for slot in absent]
            self._leave_held(absent, views)
            torch._foreach_zero_(views)
            del views
        self._pack(present)
        self._pack_rest()

    def heard(self) -> list[float]:
        """The `signals` of all ranks after a round: scale times the sum of what each had set."""
        heard: list[float] = self.flags[-NUM_SIGNALS:].tolist()
        return heard

    def begin_reduce(self) -> None:
        """The buffer goes to the mover."""
        self._move(BucketState.PACKED, BucketState.REDUCING)
        self._note_versions()

    def end_reduce(self, non_finite: NonFinite | None) -> None:
        """The buffer comes back reduced. Gradients that do not live in it are written."""
        self._move(BucketState.REDUCING, BucketState.REDUCED)
        self.non_finite = non_finite
        self.packing.release()
        if not self._gradients_live_here and not self._is_abandoned:
            self._unpack([slot for slot, arrived in enumerate(self._has_arrived) if arrived])

    def close_round(self) -> None:
        """Every bucket is reduced and backward about to return: hand out what only other ranks had, and start over."""
        self._require(BucketState.REDUCED, BucketState.IDLE)
        if self._gradients_live_here:
            self._check_untouched()
        if not self._missing:
            self.status = [_REDUCED] * len(self.status)
        else:
            flags = self.flags.tolist()
            unused = {slot for slot in self._missing if flags[slot] == 0}
            self._hand_out([slot for slot in self._missing if slot not in unused])
            for slot in unused & self._kept.keys():
                self._views[slot].copy_(self._kept[slot])
            self.status = [old if slot in unused else _REDUCED for slot, old in enumerate(self.status)]
        if self._gradients_live_here:
            self._settled = list(self._view_refs)
            if self._kept:
                self._note_versions()
        self.reset()

    def abandon(self) -> None:
        """The round was broken off. What is under way goes on, so gradients must not stay where it will be written."""
        is_under_way = self.state in (BucketState.REDUCING, BucketState.REDUCED)
        if not (is_under_way or (self._is_on_device and self.state is BucketState.PACKED)):
            return
        self._is_abandoned = True
        for slot, parameter in enumerate(self.parameters):
            grad = parameter.grad
            if grad is not None and (grad is self._views[slot] or slot in self._packed):
                parameter.grad = self._apart(slot, grad)
                self.status[slot] = _LOCAL

    def reset(self) -> None:
        """Forget a round, finished or broken off. What has arrived in it keeps its status."""
        self.state = BucketState.IDLE
        self._has_arrived = [False] * len(self.names)
        self._num_missing = len(self.names)
        self._missing, self._kept, self._packed = [], {}, {}
        self._is_abandoned = False

    def mark_written(self) -> None:
        """Before an explicit synchronize(): gradients that the script wrote into since they were reduced are local."""
        for slot, parameter in enumerate(self.parameters):
            grad = parameter.grad
            if grad is None or not self._is_settled(slot, grad):
                continue
            if grad._version == self._settled_version(slot):
                continue
            if self._is_sum:
                raise GradientError(
                    f"a gradient of bucket {self.index} ({self.names[0]} .. {self.names[-1]}) was written to after it "
                    "was summed over ranks; with op='sum', synchronize() would count it once per rank. Call "
                    "optimizer.zero_grad() before writing to it",
                    bucket=self.index,
                    parameters=self.names,
                )
            self.status[slot] = _LOCAL

    def unsettled(self) -> tuple[str, str] | None:
        """The first parameter whose `.grad` must not be stepped on, and what it is; None if all are fine."""
        all_reduced = self.status.count(_REDUCED) == len(self.status)
        if all_reduced and all(map(operator.is_, map(_grad_of, self.parameters), self._views)):
            return None  # as after every ordinary backward
        for slot, parameter in enumerate(self.parameters):
            grad = parameter.grad
            if grad is not None and not self._is_settled(slot, grad):
                status = self.status[slot]
                was_fine = status is _REDUCED or status is _ZEROED
                return self.names[slot], "was replaced by another tensor" if was_fine else status.value
        return None

    def mark_zeroed(self) -> None:
        """All gradients were zeroed in place, or set to None, through the optimizer."""
        self.status = [_ZEROED] * len(self.status)
        for slot, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                self._settle(slot, parameter.grad)
        self._note_versions()

    def adopt(self, slot: int, other: Bucket, other_slot: int) -> None:
        """Take over what `other`, which this bucket replaces, knew about a parameter."""
        self.status[slot] = other.status[other_slot]
        self._settled[slot] = other._settled[other_slot]
        self._settled_versions[slot] = other._settled_version(other_slot)

    def release(self) -> None:
        """This bucket is about to be replaced: let go of the buffer. It is still known what gradients there are."""
        self._settled_versions = [self._settled_version(slot) for slot in range(len(self.names))]
        self._views, self._view_refs = [], []
        del self.wire, self.flags, self.packing

    def name_at(self, element: int) -> str:
        """The parameter whose gradient holds that element of the wire buffer."""
        return next(
            name
            for slot, name in reversed(list(zip(self.plan.slots, self.names, strict=True)))
            if element >= slot.offset
        )

    def grad_of(self, name: str) -> torch.Tensor | None:
        return self.parameters[self.names.index(name)].grad

    def _is_settled(self, slot: int, grad: torch.Tensor) -> bool:
        """Whether `grad` is known to be the same on all ranks."""
        status, settled = self.status[slot], self._settled[slot]
        return (status is _REDUCED or status is _ZEROED) and settled is not None and settled() is grad

    def _settled_version(self, slot: int) -> int:
        """Of a settled gradient: what its version was when it was."""
        settled = self._settled[slot]
        lives_here = bool(self._views) and settled is not None and settled() is self._views[slot]
        return self._versions[slot] if lives_here else self._settled_versions[slot]

    def _settle(self, slot: int, grad: torch.Tensor) -> None:
        self._settled[slot] = weakref.ref(grad)
        self._settled_versions[slot] = grad._version

    def _take_back_moved(self, slots: Sequence[int]) -> None:
        """A script may give a gradient other memory (`p.grad.data = ...`): that tensor is the script's from then on.

        Raises GradientError if the parameter was converted (`model.double()`), which moves its gradient, too.
        """
        addresses = list(map(torch.Tensor.data_ptr, [self._views[slot] for slot in slots]))
        if addresses == [self._addresses[slot] for slot in slots]:
            return
        for slot, address in zip(slots, addresses, strict=True):
            if address == self._addresses[slot]:
                continue
            parameter, spec = self.parameters[slot], self._specs[slot]
            if (parameter.shape, parameter.dtype, parameter.device) != (spec.shape, spec.dtype, spec.device):
                moved = f"its gradient, now {self._views[slot].dtype}, was moved out of torchring's buffer"
                raise self._misfit(slot, moved)
            self._replace_view(slot, _gradient(self.wire.tensor, self.plan.slots[slot], spec))

    def _replace_view(self, slot: int, view: torch.Tensor) -> None:
        self._views[slot] = view
        self._view_refs[slot] = weakref.ref(view)
        self._storages[slot] = storage_of(view)
        self._versions[slot] = view._version

    def _note_versions(self) -> None:
        if self._gradients_live_here:
            self._versions = list(map(_version_of, self._views))

    def _leave_held(self, slots: Sequence[int], views: list[torch.Tensor]) -> None:
        """Before `views` are overwritten: a script that still has an older gradient of these slots keeps its values."""
        if not self._gradients_live_here or not views:
            return
        for i in held(views, [self._storages[slot] for slot in slots]):
            slot = slots[i]
            if not self._views[slot].numel():
                continue
            views[i] = leave(views[i], self.wire.tensor)
            self._replace_view(slot, views[i])
            self.packing.arrived()  # on a device: the copy comes before what is packed

    def _apart(self, slot: int, grad: torch.Tensor) -> torch.Tensor:
        """A gradient outside of the wire buffer."""
        if not self._is_on_device:
            return grad.clone()
        if grad is not self._views[slot]:
            return grad
        # To copy it might meet what is under way. One that was accumulated in the buffer is lost; that has to show.
        original = self.packing.original(slot)
        if original is None:
            return torch.full_like(self.parameters[slot].detach(), math.nan)
        return torch.view_as_complex(original) if grad.is_complex() else original

    def _check_untouched(self) -> None:
        """No hook of the script's may have had its hands on what was under way."""
        if not all(map(operator.is_, map(_grad_of, self.parameters), self._views)):
            for slot, arrived in enumerate(self._has_arrived):
                if arrived and self.parameters[slot].grad is not self._views[slot]:
                    raise self._taken(slot)
        versions = list(map(_version_of, self._views))
        if versions != self._versions:
            name = self.names[
                next(i for i, (now, then) in enumerate(zip(versions, self._versions, strict=True)) if now != then)
            ]
            raise GradientError(
                f"the gradient of {name} was written to while it was being reduced. A hook that changes gradients must "
                "be registered before torchring.wrap, so that it runs before they leave",
                bucket=self.index,
                parameters=(name,),
            )

    def _open(self, slot: int) -> None:
        if self.state is not BucketState.IDLE:
            raise GradientError(
                f"{self.names[slot]} received another gradient in the same backward after bucket {self.index} was "
                f"closed ({self.state.value}). Reentrant checkpointing of a layer that is used twice does this: use "
                "checkpoint(..., use_reentrant=False), or run backward() inside optimizer.no_sync() and call "
                "optimizer.synchronize() after it",
                bucket=self.index,
                parameters=(self.names[slot],),
            )
        self.state = BucketState.FILLING

    def _refuse_sum_of_sums(self, slot: int) -> None:
        grad = self.parameters[slot].grad
        if self.status[slot] is _REDUCED and grad is not None and self._is_settled(slot, grad):
            raise GradientError(
                f"backward added to the gradient of {self.names[slot]}, which was summed over ranks before; with "
                "op='sum' it would be counted once per rank. Call optimizer.zero_grad() first, pass accumulate=n, or "
                "use optimizer.no_sync() for all backwards but the last",
                bucket=self.index,
                parameters=(self.names[slot],),
            )

    def _move(self, expected: BucketState, new: BucketState) -> None:
        self._require(expected, new)
        self.state = new

    def _require(self, expected: BucketState, new: BucketState) -> None:
        if self.state is not expected:
            raise AssertionError(
                f"bucket {self.index} ({self.names[0]} .. {self.names[-1]}) is {self.state.name}, "
                f"so it cannot become {new.name}: that takes {expected.name}"
            )

    def _pack_rest(self) -> None:
        """Copy in what was only counted on arrival."""
        arrived = [slot for slot, here in enumerate(self._has_arrived) if here]
        self._pack([slot for slot in arrived if not self.copies_on_arrival[slot]])
        self.packing.packed()
        if not self._is_on_device:
            for i, signal in enumerate(self.signals, start=len(self.names)):
                self.flags[i] = signal
        self._move(BucketState.FILLING, BucketState.PACKED)

    def _pack(self, slots: Sequence[int]) -> None:
        """Copy these gradients to the wire."""
        # Loops in C where there is one pass for each parameter: they are most of what a small gradient costs.
        self._take_back_moved(slots)
        views = [self._views[slot] for slot in slots]
        grads = [self.parameters[slot].grad for slot in slots]
        if any(map(operator.is_, grads, views)):  # accumulated in place
            slots = [slot for slot, grad, view in zip(slots, grads, views, strict=True) if grad is not view]
            views = [self._views[slot] for slot in slots]
            grads = [self.parameters[slot].grad for slot in slots]
        packed: list[torch.Tensor] = [grad for grad in grads if grad is not None]
        if len(packed) < len(slots):
            raise self._taken(slots[next(i for i, grad in enumerate(grads) if grad is None)])
        if any(map(_is_sparse, packed)):
            name = self.names[slots[next(i for i, grad in enumerate(packed) if grad.is_sparse)]]
            raise GradientError(
                f"{name} has a sparse gradient; pass the model to torchring.wrap(optimizer, model), so that sparse "
                "embeddings are found beforehand, or build the layer with sparse=False",
                parameters=(name,),
            )
        if not packed:
            return
        if not self._gradients_live_here:
            self.packing.pack(slots, self._reals(packed), views)
            self._packed |= {slot: (grad, grad._version) for slot, grad in zip(slots, packed, strict=True)}
            return
        self._leave_held(slots, views)
        try:
            self.packing.pack(slots, self._reals(packed), self._reals(views))
            for slot, view in zip(slots, views, strict=True):
                self.parameters[slot].grad = view
        except (RuntimeError, TypeError, ValueError) as error:
            misfit = self._first_misfit(slots)
            if misfit is None:
                raise
            raise self._misfit(misfit, str(error)) from error

    def _unpack(self, slots: Sequence[int]) -> None:
        grads: list[torch.Tensor] = []
        for slot in slots:
            grad = self.parameters[slot].grad
            packed, version = self._packed.get(slot, (grad, -1))
            if grad is None or grad is not packed or (version >= 0 and grad._version != version):
                raise self._taken(slot)
            grads.append(grad)
        reals = self._reals(grads)
        self.packing.unpack(slots, [self._views[slot] for slot in slots], reals)
        if self._are_complex or self._is_on_device:
            for grad, real in zip(grads, reals, strict=True):
                if grad.is_conj() or grad.is_neg():  # of which `real` is a copy
                    grad.copy_(torch.view_as_complex(real) if grad.is_complex() else real)
        for slot, grad in zip(slots, grads, strict=True):
            self._settle(slot, grad)

    def _reals(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """What the packing may copy byte by byte; on a device it does."""
        if self._are_complex:
            tensors = list(map(as_real, tensors))
        return list(map(torch.Tensor.resolve_neg, tensors)) if self._is_on_device else tensors

    def _hand_out(self, slots: Sequence[int]) -> None:
        """Gradients that this rank did not compute in this backward, but another did."""
        for slot in slots:
            parameter = self.parameters[slot]
            if self._gradients_live_here:
                parameter.grad = self._views[slot]
            elif parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
        if not self._gradients_live_here:
            self._unpack(slots)

    def _first_misfit(self, slots: Sequence[int]) -> int | None:
        """A parameter that is not what it was when it was wrapped (model.half() and the like)."""
        for slot in slots:
            parameter, view = self.parameters[slot], self._views[slot]
            if (parameter.shape, parameter.dtype, parameter.device) != (view.shape, view.dtype, view.device):
                return slot
        return None

    def _misfit(self, slot: int, why: str) -> GradientError:
        name = self.names[slot]
        return GradientError(
            f"{name} is not what it was when it was wrapped ({why}); convert or reshape a model first, then call "
            "torchring.wrap",
            parameters=(name,),
        )

    def _taken(self, slot: int) -> GradientError:
        return GradientError(
            f"the gradient of {self.names[slot]} was taken away or replaced between its accumulation and its "
            "reduction; a hook that steps an optimizer during backward would train on this rank's gradient alone. Step "
            "after backward() has returned",
            bucket=self.index,
            parameters=(self.names[slot],),
        )


# Members of an enum take 0.1 us to look up, which counts where it is done for every parameter.
_FILLING = BucketState.FILLING
_LOCAL, _REDUCED, _ZEROED = GradientStatus.LOCAL, GradientStatus.REDUCED, GradientStatus.ZEROED

_grad_of = operator.attrgetter("grad")
_version_of = operator.attrgetter("_version")
_is_sparse = operator.attrgetter("is_sparse")


def _gradient(wire: torch.Tensor, slot: Slot, spec: ParameterSpec) -> torch.Tensor:
    """The slot's elements as the parameter's gradient."""
    return gradient_view(wire[slot.offset : slot.offset + slot.numel], spec.shape, _strides(spec), spec.dtype)


def _place(wire: torch.Tensor, slot: Slot, spec: ParameterSpec) -> torch.Tensor:
    """The slot's elements where gradients do not live in the wire: real numbers, in the shape of `as_real`."""
    shape, stride = spec.shape, _strides(spec)
    if spec.dtype.is_complex:
        shape, stride = (*shape, 2), (*(2 * step for step in stride), 1)
    return wire.as_strided(shape, stride, wire.storage_offset() + slot.offset)


def _strides(spec: ParameterSpec) -> tuple[int, ...]:
    """Of the gradient: those of the parameter, as autograd lays it out, unless the parameter has gaps."""
    return spec.stride if spec.numel and spec.is_dense else torch.empty(spec.shape, device="meta").stride()
