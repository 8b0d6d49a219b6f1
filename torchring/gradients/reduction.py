"""Everything that one optimizer's gradients need at run time: its plan, buckets, scheduler and mover.

A round is one reduction of all buckets: `begin`, an `arrived` per gradient, `finish`. After the first round the plan is
rebuilt once, in the order in which rank 0's gradients really became ready.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any, Final

import torch

from torchring.accelerators import accelerator_of
from torchring.allreduce import Mover, Wire
from torchring.allreduce.device.stream import DeviceWire, OnStream
from torchring.allreduce.select import Choice, open_chosen, open_mover, open_on_device
from torchring.collectives.service import Collectives, collectives_of, internal_collectives_of
from torchring.gradients.bucket import Bucket, BucketState, GradientStatus
from torchring.gradients.packing import DevicePacking, HostPacking, Packing
from torchring.gradients.plan import NUM_SIGNALS, BucketPlan, ParameterSpec, Plan, build_plan, describe, shifted
from torchring.gradients.rounds import DeviceRounds
from torchring.gradients.scheduler import Scheduler
from torchring.gradients.sparse import SparseReduction
from torchring.memory.heap import give_back, keep_freed
from torchring.world import World

_BUCKET_MB: Final = 25.0
_BUCKET_MB_BETWEEN_HOSTS: Final = 12.0


@dataclass(frozen=True)
class Options:
    """What the user chose in `wrap`; equal on all ranks."""

    op: str
    compression: str | None
    bucket_mb: float | None
    accumulate: int
    algorithm: str
    overlap: str

    def __str__(self) -> str:
        return ", ".join(f"{field.name}={getattr(self, field.name)!r}" for field in fields(self))

    def scale(self, world_size: int) -> float:
        return 1.0 / world_size if self.op == "mean" else 1.0


@dataclass
class Timing:
    """Milliseconds in all-reduce ("busy"), and those during which backward stood still ("exposed")."""

    last_busy_ms: float = 0.0
    last_exposed_ms: float = 0.0
    total_busy_ms: float = 0.0
    total_exposed_ms: float = 0.0
    num_rounds: int = -1  # in the totals: all but the first, in which ranks also wait for each other to get going

    def add(self, busy_seconds: float, exposed_seconds: float) -> None:
        self.last_busy_ms, self.last_exposed_ms = busy_seconds * 1e3, exposed_seconds * 1e3
        self.num_rounds += 1
        if self.num_rounds > 0:
            self.total_busy_ms += self.last_busy_ms
            self.total_exposed_ms += self.last_exposed_ms


class Reduction:
    """The gradients of one optimizer. Opening it is collective.

    Args:
        world: of more than one rank.
        specs, parameters: in registration order; those that require a gradient.
        options: see `Options`.

    Attributes:
        non_finite: (rank, parameter name, gradient) of the first NaN or infinity in the last round, if any. The rank is
            None if only the sum overflowed.
        choice: the algorithm, and why it is that.
        heard: for each signal passed to `begin`, the share of ranks that had set it in the last round.
    """

    def __init__(
        self, world: World, specs: Sequence[ParameterSpec], parameters: Sequence[torch.nn.Parameter], options: Options
    ) -> None:
        self.world = world
        self.specs: list[ParameterSpec] = []
        self.parameters: list[torch.nn.Parameter] = []
        self.num_rounds = 0
        self.non_finite: tuple[int | None, str, torch.Tensor | None] | None = None
        self.heard = [0.0] * NUM_SIGNALS
        self._signals = [0.0] * NUM_SIGNALS
        self._round_number = 0
        self._is_broken_off = False
        self.timing = Timing()
        self._options = options
        # With the script's collectives: another rank may call one of those instead.
        self._check_agreement(specs, collectives_of(world))
        plan = self._plan(specs)
        self.mover, self.choice = self._open_mover(plan, specs[0].device)
        world.on_failure(self.mover)
        self._rounds = DeviceRounds(world, self.mover, self.timing.add) if isinstance(self.mover, OnStream) else None
        self.scheduler = Scheduler((), self.mover)
        self._sparse = SparseReduction(world, options.scale(world.size), is_sum=options.op == "sum")
        self._holds = False
        self._ready_order: list[int] | None = []  # of the first round, while it lasts
        self._seen_order: list[int] | None = None  # of the first round, until the plan follows it
        self._home: list[tuple[Bucket, int] | None] = []
        self._add(specs, parameters, plan)

    @property
    def buckets(self) -> Sequence[Bucket]:
        return self.scheduler.buckets

    @property
    def overlap(self) -> str:
        """How, in one word."""
        if not self.mover.in_background:
            return "inline"
        return "thread" if self._rounds is None else "stream"

    def is_captured(self) -> bool:
        """Whether what backward calls for is recorded into a graph."""
        return isinstance(self.mover, OnStream) and self.mover.accelerator.is_capturing()

    @property
    def num_bytes(self) -> int:
        """What one rank contributes to a round, sparse gradients not counted."""
        return sum(bucket.plan.num_bytes for bucket in self.buckets)

    def extend(self, specs: Sequence[ParameterSpec], parameters: Sequence[torch.nn.Parameter]) -> None:
        """Collective, between rounds: more parameters, in buckets of their own."""
        self._check_agreement(specs, internal_collectives_of(self.world))
        self._ready_order = self._seen_order = None  # which knows nothing of them; the plan stays as it is
        self._add(specs, parameters, self._plan(specs))

    def begin(self, *, step: int, hold: bool, signals: Sequence[bool]) -> None:
        """A round begins: its first gradient is about to arrive, or `finish` to be called.

        Sends nothing, but before the second round, the first of which has shown in what order gradients become ready.
        Then zero_grad() has usually dropped the old buffers, so that old and new ones need not exist side by side. Not
        with `hold`: ranks whose optimizers take turns begin rounds in an order of their own.
        """
        self.scheduler.settle()
        if self._seen_order is not None and not hold:
            self._rebuild()
        if self._rounds is not None:
            self._rounds.begin(self.buckets)
        self.scheduler.begin(round_number=self._round_number, step=step, hold=hold)
        if self._is_broken_off:
            self._is_broken_off = False
            for bucket in self.buckets:
                bucket.reset()
        self.non_finite = None
        self._holds = hold
        self._signals = [float(signal) for signal in signals]
        if self.buckets:
            self.buckets[0].signals = self._signals

    def arrived(self, index: int) -> None:
        """Parameter `index` has its gradient, in a backward that reduces. From its hook."""
        if self._ready_order is not None:
            self._ready_order.append(index)
        home = self._home[index]
        if home is None:
            self._sparse.accumulated(index, self.parameters[index])
        elif home[0].arrive(home[1]):
            self.scheduler.bucket_is_packed()
        elif self.scheduler.is_waiting and home[0].copies_on_arrival[home[1]]:  # some time has gone by
            self.scheduler.look_in()

    def accumulated(self, index: int) -> None:
        """Parameter `index` has its gradient, in a backward that does not reduce. From its hook."""
        home = self._home[index]
        if home is None:
            self._sparse.accumulated(index, self.parameters[index])
        else:
            home[0].accumulate(home[1])

    def finish(self) -> None:
        """Backward is over: reduce what is left and return when every gradient holds the result.

        Collective, and in the same order on all ranks.
        """
        if self._rounds is not None:
            self._rounds.backward_is_over()
        for bucket in self.buckets:
            if bucket.state in (BucketState.IDLE, BucketState.FILLING):
                bucket.fill_missing()
        self.scheduler.finish()
        if self._rounds is not None:
            self._rounds.end(self.buckets)
            self._agree(self._rounds)
        for bucket in self.buckets:
            if bucket.non_finite is not None and self.non_finite is None:
                name = bucket.name_at(bucket.non_finite.element)
                self.non_finite = (bucket.non_finite.rank, name, bucket.grad_of(name))
            bucket.close_round()
        if self._rounds is None:
            self.timing.add(self.scheduler.busy_seconds, self.scheduler.exposed_seconds)
        self._sparse.reduce(self.specs, self.parameters)
        self.non_finite = self.non_finite or self._sparse.non_finite
        if self._rounds is None:
            self.heard = self._hear()
        self.num_rounds += 1
        self.world.num_reductions += 1
        self._round_number += 1
        if self._ready_order is not None:
            self._seen_order, self._ready_order = self._ready_order, None
        if self._seen_order is not None and self._holds:
            self._rebuild()
        if self._rounds is None:
            give_back()

    def poll(self) -> None:
        """Take in what a device has finished since; raise what it could not."""
        if self._rounds is not None:
            self._rounds.check()
            self._rounds.poll()

    def abandon(self) -> None:
        """A backward was broken off. What had arrived stays marked as local, outside of buffers that are under way.

        If a bucket has left, peers are further on than this rank's next round will be; the round number tells them.
        """
        self._is_broken_off = True
        for bucket in self.buckets:
            bucket.abandon()
        if self.scheduler.has_launched:
            self._round_number += 1
        if self._ready_order is not None and self.scheduler.has_launched_all:
            self._seen_order, self._ready_order = self._ready_order, None  # as on the peers, for whom the round is over
        elif self._ready_order is not None:
            self._ready_order = []

    def needs_synchronize(self) -> bool:
        """Whether some gradient on this rank waits to be reduced, or was written to since."""
        for bucket in self.buckets:
            bucket.mark_written()
        return self.first_unsettled() is not None

    def first_unsettled(self) -> tuple[str, str] | None:
        """(parameter, what its gradient is) of the first one that must not be stepped on."""
        for bucket in self.buckets:
            if found := bucket.unsettled():
                return found
        for index, spec in enumerate(self.specs):
            if spec.is_sparse and self._sparse.unsettled(index, self.parameters[index]):
                return spec.name, GradientStatus.LOCAL.value
        return None

    def mark_zeroed(self) -> None:
        """All gradients were zeroed, or set to None, through the optimizer."""
        for bucket in self.buckets:
            bucket.mark_zeroed()
        self._sparse.mark_zeroed()

    def close(self) -> None:
        """End threads and links. Gradients stay where they are."""
        self.mover.close()

    def _open_mover(self, plan: Plan, device: torch.device) -> tuple[Mover[Any], Choice]:
        world, options, wires = self.world, self._options, _wires_of(plan)
        if accelerator := accelerator_of(device):
            return open_on_device(world, options.algorithm, options.overlap, wires, accelerator)
        if options.algorithm == "auto":
            return open_chosen(world, options.overlap, wires)
        return open_mover(world, options.algorithm, options.overlap), Choice(options.algorithm, "asked for")

    def _agree(self, rounds: DeviceRounds) -> None:
        """Collective, on the host: what travels in the wire buffers where the host reduces them."""
        agreement = rounds.agree(self._round_number, self._signals, self.buckets)
        self.heard = agreement.heard
        if agreement.non_finite is not None:
            rank, index = agreement.non_finite
            # Its gradient of that round is gone; what was trained on it shows.
            self.non_finite = rank, self.specs[index].name, self.parameters[index]

    def _plan(self, specs: Sequence[ParameterSpec], order: Sequence[int] | None = None) -> Plan:
        bucket_mb, compression = self._options.bucket_mb, self._options.compression
        if bucket_mb is None:
            bucket_mb = _BUCKET_MB if self.world.shares_memory else _BUCKET_MB_BETWEEN_HOSTS
        return build_plan(specs, bucket_bytes=int(bucket_mb * 2**20), compression=compression, order=order)

    def _add(self, specs: Sequence[ParameterSpec], parameters: Sequence[torch.nn.Parameter], plan: Plan) -> None:
        first = len(self.specs)
        self.specs += specs
        self.parameters += parameters
        self._home += [None] * len(specs)
        plan = shifted(plan, buckets=len(self.buckets), parameters=first)
        if self._rounds is None:
            self._keep_freed()
        self._install([*self.buckets, *self._open(plan)])

    def _keep_freed(self) -> None:
        gradient_bytes = [spec.numel * spec.dtype.itemsize for spec in self.specs if not spec.is_sparse]
        keep_freed(gradient_bytes)

    def _check_agreement(self, specs: Sequence[ParameterSpec], collectives: Collectives) -> None:
        """Raise PlanMismatchError on every rank unless all are about to reduce the same things in the same way."""
        collectives.check_equal(describe(specs, f"{self._options} on {self.world.size} ranks"))

    def _open(self, plan: Plan) -> list[Bucket]:
        wires = self.mover.open_wires(_wires_of(plan))
        scale = self._options.scale(self.world.size)
        is_sum = self._options.op == "sum"
        return [
            Bucket(
                bucket,
                wire,
                self.specs,
                self.parameters,
                scale=scale,
                is_sum=is_sum,
                packing=self._packing(bucket, wire),
            )
            for bucket, wire in zip(plan.buckets, wires, strict=True)
        ]

    def _packing(self, plan: BucketPlan, wire: Wire) -> Callable[[float], Packing]:
        """Makes the bucket's copies, given the scale that comes before the cast."""
        if not isinstance(self.mover, OnStream):
            return HostPacking
        assert isinstance(wire, DeviceWire)
        stream, accelerator = self.mover.stream, self.mover.accelerator
        return lambda scale: DevicePacking(scale, plan, wire.buffer, wire.found_in_inputs, stream, accelerator)

    def _install(self, buckets: Sequence[Bucket]) -> None:
        for bucket in buckets:
            for position, slot in enumerate(bucket.plan.slots):
                home = self._home[slot.parameter]
                if home is not None and home[0] is not bucket:
                    bucket.adopt(position, *home)
                self._home[slot.parameter] = (bucket, position)
        self.scheduler.replace(buckets)

    def _hear(self) -> list[float]:
        size = self.world.size
        if self.buckets:
            first = self.buckets[0]
            return [value / (first.reduce_scale * size) for value in first.heard()]
        sums = torch.tensor(self._signals, device="cpu")  # nothing but sparse gradients
        internal_collectives_of(self.world).all_reduce(sums, "sum")
        return [value / size for value in sums.tolist()]

    def _rebuild(self) -> None:
        """Collective: lay the buckets out in the order in which rank 0's gradients became ready.

        Gradients that lie in the old buckets stay valid there, and move when they next change.
        """
        assert self._seen_order is not None
        order = list(dict.fromkeys(self._seen_order))
        order += sorted(set(range(len(self.specs))).difference(order), reverse=True)
        collectives = internal_collectives_of(self.world)
        agreed = collectives.broadcast(torch.tensor(order, dtype=torch.int64, device="cpu"), 0).tolist()
        plan = self._plan(self.specs, agreed)
        self._seen_order = None
        if plan.buckets != tuple(bucket.plan for bucket in self.buckets):
            if self._rounds is not None:
                self._rounds.settle()
            for bucket in self.buckets:
                bucket.release()
            collectives.barrier()  # memory is free when all ranks have let go of it
            self._install(self._open(plan))


def _wires_of(plan: Plan) -> list[tuple[int, torch.dtype]]:
    return [(bucket.numel, bucket.wire_dtype) for bucket in plan.buckets]
