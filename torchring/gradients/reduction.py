"""Everything that one optimizer's gradients need at run time: the plan, buckets, scheduler and mover.

A round is one reduction of all buckets: `begin`, `scheduler.mark_ready` for each gradient, `finish`. After the first
round the plan is rebuilt once, in the order in which rank 0's gradients really became ready.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, Literal

import torch

from torchring.accelerators import accelerator_of
from torchring.allreduce import Mover
from torchring.allreduce.choice import Choice
from torchring.allreduce.device.select import open_on_device
from torchring.allreduce.device.stream import DeviceWire, OnStream
from torchring.allreduce.select import open_chosen, open_mover
from torchring.collectives.service import Collectives, collectives_of, internal_collectives_of
from torchring.errors import GradientError, in_step, ranks_in_words
from torchring.gradients.bucket import Bucket
from torchring.gradients.ledger import GradientStatus, is_zero
from torchring.gradients.participants.buffers import BufferSpec, BufferSync, Place, SyncBuffers
from torchring.gradients.participants.recording import RoundRecording, has_arrivals
from torchring.gradients.participants.sparse import NonFiniteGradient, SparseReduction
from torchring.gradients.participants.tuning.candidates import AUTO_COMPRESSION, what_to_tune
from torchring.gradients.participants.tuning.tuning import Tuner, open_tuner, tunes_by_default
from torchring.gradients.participants.weights import Share, Weights
from torchring.gradients.plan import (
    ControlBits,
    ParameterSpec,
    Plan,
    build_plan,
    default_bucket_mb,
    describe,
    shifted,
    wire_dtype,
)
from torchring.gradients.rounds import DeviceRounds, HostRounds, Rounds, Timing, wires_of
from torchring.gradients.scheduler import Round, Scheduler
from torchring.observe.services import flight_recorder_of
from torchring.world import World


@dataclass(frozen=True)
class Options:
    """What the user chose in `wrap`; equal on all ranks."""

    op: str
    compression: str | None
    bucket_mb: float | Literal["auto"] | None
    accumulate: int
    algorithm: str
    overlap: str
    on_nonfinite: str = "raise"
    sync_buffers: SyncBuffers = None

    def __str__(self) -> str:
        return ", ".join(f"{field.name}={getattr(self, field.name)!r}" for field in fields(self))

    def scale(self, world_size: int) -> float:
        """The factor between the sum over ranks and the result."""
        return 1.0 / world_size if self.op == "mean" else 1.0


class Reduction:
    """The gradients of one optimizer. Opening it is collective.

    Args:
        world: has more than one rank.
        specs, parameters: those that require a gradient, in registration order.
        options: see `Options`.
        buffers: those of the model that `options.sync_buffers` is about.

    Attributes:
        specs, parameters: grow with `extend`.
        scheduler: drives the buckets; hooks tell the scheduler that a gradient is ready.
        mover: reduces wire buffers.
        rounds: what ranks agree on in each round, on the host or on a device.
        choice: the algorithm, and why it was chosen.
        control_sums: how many ranks had set each control bit in the last round.
        non_finite: the first NaN or infinity in the last round, if there was one.
        num_rounds: how many rounds are over.
        weights: how much this rank's gradients count.
        buffers: makes the model's buffers equal, if there are any.
        timing: how long rounds took.
    """

    def __init__(
        self,
        world: World,
        specs: Sequence[ParameterSpec],
        parameters: Sequence[torch.nn.Parameter],
        options: Options,
        buffers: Sequence[BufferSpec] = (),
    ) -> None:
        self.world = world
        self.specs: list[ParameterSpec] = []
        self.parameters: list[torch.nn.Parameter] = []
        self.control_sums = ControlBits()
        self.non_finite: NonFiniteGradient | None = None
        self._found_before: NonFiniteGradient | None = None  # as `non_finite`, before the round under way
        self.num_rounds = 0
        self.weights = Weights()
        self._recording = RoundRecording(world)
        self._share = Share()
        self._may_lose_results = False  # if all ranks give weight 0
        self._has_weights: bool | None = None  # None until the first round in which a rank has a gradient
        self._is_late = False  # all gradients are packed in `finish`, when the reference of the weights is known
        self.timing = Timing()
        self._options = options
        # The script's collectives: another rank may be calling one of those, instead of wrapping its optimizer.
        self._check_agreement(specs, collectives_of(world), buffers)
        self._tuner: Tuner | None = None
        self._next_plan: Plan | None = None  # to be installed at the end of the round
        on_device = accelerator_of(specs[0].device) is not None
        ranks = world.size, world.num_nodes
        self._bucket_mb = default_bucket_mb(*ranks, options.algorithm, on_device=on_device)
        plan = self._plan(specs)
        self.mover, self.choice = self._open_mover(plan, specs[0].device)
        if (size := default_bucket_mb(*ranks, self.choice.algorithm, on_device=on_device)) != self._bucket_mb:
            self._bucket_mb = size
            plan = self._plan(specs)
        world.on_failure(self.mover)
        self.rounds: Rounds
        follow: Callable[[], None] = _nothing
        if isinstance(self.mover, OnStream):
            self.rounds = DeviceRounds(world, self.mover, self.timing, self.specs, self.parameters)
            follow = self.mover.stream.follow
        else:
            self.rounds = HostRounds(world, self.mover, self.timing)
        self._sparse = SparseReduction(
            world, self.specs, self.parameters, options.scale(world.size), is_sum=options.op == "sum"
        )
        self._progress = flight_recorder_of(world)
        self._track = self._progress.open_numbered_entry("gradients") if self._progress is not None else None
        self.scheduler = Scheduler((), self.mover, self._sparse.mark_local, self._track)
        tunes_buckets = options.bucket_mb == "auto" or (
            options.bucket_mb is None and tunes_by_default(world, self.mover, plan)
        )
        if tunes_buckets or options.compression == "auto":
            plan = self._open_tuner(specs, plan, buckets=tunes_buckets)
        self._add(specs, parameters, plan)
        self._recording.compare_clocks(self.scheduler.round.next_number)
        self.buffers: BufferSync | None = None
        if buffers:
            self.buffers = BufferSync(world, buffers, self.mover, specs[0].device, follow)

    @property
    def buckets(self) -> Sequence[Bucket]:
        return self.scheduler.buckets

    @property
    def is_sum(self) -> bool:
        """Whether gradients are added up over ranks, and not averaged."""
        return self._options.op == "sum"

    @property
    def num_bytes(self) -> int:
        """What one rank contributes to a round, sparse gradients not counted."""
        return sum(bucket.plan.num_bytes for bucket in self.buckets)

    @property
    def reason(self) -> str:
        """See `Stats.reason`."""
        tuned = self._tuner.reason if self._tuner is not None else ""
        return "; ".join(filter(None, [self.choice.reason, tuned, self._recording.finding]))

    @property
    def mark_ready(self) -> Callable[[int], None]:
        """For the hooks of the round that has begun: called with the index of a parameter that has its gradient."""
        if self._is_late:
            return self.scheduler.mark_local
        if self._tuner is not None and self._tuner.is_observing:
            return self._tuner.mark_ready
        scheduler = self.scheduler
        return scheduler.mark_ready if scheduler.round.arrivals is None else scheduler.mark_ready_and_time

    def extend(self, specs: Sequence[ParameterSpec], parameters: Sequence[torch.nn.Parameter]) -> None:
        """Collective, between rounds: more parameters, in buckets of their own."""
        self._check_agreement(specs, internal_collectives_of(self.world))
        self.scheduler.forget_order()  # the order knows nothing of the new parameters
        if self._tuner is not None:
            plan = self._tuner.stop("default plan, as parameters were added before another plan had won a trial")
            if plan is not None:
                self._install(plan)
        self._add(specs, parameters, self._plan(specs))
        self._recording.note_plan(self.buckets, self.specs, self.reason)

    def begin(
        self, *, step: int, hold: bool, control_bits: ControlBits, is_absent: bool = False, is_again: bool = False
    ) -> None:
        """A round begins: its first gradient is about to arrive, or `finish` to be called.

        Sends nothing, except before the second round: the first round has shown the order in which gradients become
        ready, so the buckets are rebuilt. At that point zero_grad() has usually dropped the old buffers, so old and new
        buffers need not exist side by side. With `hold` buckets are rebuilt in `finish`: ranks whose optimizers take
        turns begin rounds in different orders.

        Args:
            is_absent: this rank has no gradient, and does not count.
            is_again: another round for the same backward, which has left its results in `.grad`.
        """
        scheduler = self.scheduler
        scheduler.settle()
        if not hold and self._recording.clocks_are_due(scheduler.round.next_number):
            self._recording.compare_clocks(scheduler.round.next_number)
        if scheduler.ready_order is not None and not hold:
            self._rebuild(scheduler.ready_order)
        if self._tuner is not None and not is_again:
            self._tune(self._tuner, hold=hold)
        share = self._share = self.weights.share(is_absent=is_absent)
        needs_reference = self.weights.is_fp16 and self._has_weights is not False and not self.is_sum
        self._is_late = needs_reference and hold
        if needs_reference and not hold:
            share = self._agree_on_reference()
        self._may_lose_results = share.weight == 0.0 and not is_again and self.holds_results()
        counts_no_buffers = is_absent or share.weight == 0.0  # no sample of this rank's counts
        control_bits = control_bits._replace(
            is_weighted=int(share.weight is not None),
            is_unweighted=int(share.is_unweighted),
            is_absent=int(is_absent),
            buffers_changed=int(self.buffers is not None and self.buffers.has_changed()),
            buffers_missing=int(self.buffers is not None and (self.buffers.lacks_some() or counts_no_buffers)),
            weight=share.weight or 0.0,
            is_of_batch=int(share.is_of_batch),
            has_left_out=int(share.left_out > 0),
        )
        if self.buffers is not None:
            self.buffers.begin(is_absent=counts_no_buffers)
            scheduler.last = self.buffers if self.buffers.travels else None
        for bucket in self.buckets:
            bucket.begin(share)
        self.rounds.begin(self.buckets, control_bits)
        number = scheduler.round.next_number
        arrivals = [-1] * len(self.specs) if has_arrivals(number) else None
        scheduler.begin(Round(number, step, hold, control_bits, arrivals=arrivals))
        self._found_before, self.non_finite = self.non_finite, None
        if self._tuner is not None:
            self._tuner.begin_round(is_ordinary=not (is_again or is_absent))

    def finish(self, carried: set[Place] | None = None) -> None:
        """Backward is over: reduce what is left and return when every gradient holds the result.

        Collective, and in the same order on all ranks.

        Args:
            carried: the buffers that other optimizers have exchanged after this backward; gets those of this one.
        """
        scheduler = self.scheduler
        buffers = self.buffers
        if buffers is not None and carried is not None:
            places = buffers.places
            if places <= carried:
                buffers = scheduler.last = None
            carried |= places
        self._recording.backward_is_over()
        self.rounds.backward_is_over()
        if self._is_late:
            share = self._agree_on_reference()
            for bucket in self.buckets:
                bucket.share = share
        scheduler.finish()
        if self._tuner is not None:
            self._tuner.end_round()
        self.control_sums, self.non_finite = self.rounds.agree(scheduler.round, self.buckets)
        scale = self._weigh_result()
        if buffers is not None:
            sums = self.control_sums
            buffers.end_round(is_complete=not sums.buffers_missing, some_changed=sums.buffers_changed > 0)
        scheduler.close_round(scale)
        in_sparse = self._sparse.reduce(self._share, scale)
        self.non_finite = self.non_finite or in_sparse
        if self.control_sums.is_absent == self.world.size:  # all gradients are what they were
            self.non_finite = self.non_finite or self._found_before
        self.num_rounds += 1
        self.world.num_reductions += 1
        self._recording.add(scheduler, self.rounds)
        if scheduler.ready_order is not None and scheduler.round.hold:
            self._rebuild(scheduler.ready_order)
        if self._next_plan is not None:
            plan, self._next_plan = self._next_plan, None
            self._install(plan)
        self.rounds.end()

    def _agree_on_reference(self) -> Share:
        """Collective, before the first gradient is packed: what this rank contributes, by the weights of this round."""
        largest = torch.tensor([self._share.weight or 0.0], dtype=torch.float64, device="cpu")
        self.weights.refer_to(float(internal_collectives_of(self.world).all_reduce(largest, "max")))
        self._share = self.weights.share(is_absent=self._share.is_absent)
        return self._share

    def _weigh_result(self) -> float:
        """By which the result of this round has to be multiplied.

        Raises GradientError if only some ranks gave weights, which is collective then, or if all weights are 0 where
        gradients of an earlier round would get that weight, too.
        """
        sums, size = self.control_sums, self.world.size
        had_weights = self._has_weights
        if sums.is_weighted or (had_weights is None and sums.is_absent < size):
            self._has_weights = sums.is_weighted > 0
        if sums.is_of_batch not in (0, sums.is_weighted):
            raise in_step(
                GradientError(
                    "some ranks have called optimizer.weigh() before this backward(), and torchring.elastic has given "
                    "the weights of the others; call it on all ranks, or on none",
                    rank=self.world.rank,
                )
            )
        if sums.is_weighted and sums.is_unweighted:
            mine = torch.tensor([int(self._share.is_unweighted)], device="cpu")
            without = internal_collectives_of(self.world).all_gather(mine)
            others = [rank for rank, is_unweighted in enumerate(without) if int(is_unweighted)]
            raise in_step(
                GradientError(
                    f"{ranks_in_words(others)} did not call "
                    "optimizer.weigh() before this backward(), and other ranks did; call it on all ranks",
                    rank=self.world.rank,
                    peers=others,
                )
            )
        if sums.is_weighted and not sums.weight and self._may_lose_results:
            raise in_step(
                GradientError(
                    "all ranks gave weight 0 to a backward() that adds to gradients of an earlier one; call "
                    "optimizer.zero_grad() before it, or leave it out on all ranks",
                    rank=self.world.rank,
                )
            )
        if self._options.op == "sum":
            return 1.0
        if had_weights is False and self.weights.is_fp16 and not self.weights.fits_fp16(sums.weight / size):
            raise in_step(
                GradientError(
                    f"weights of about {sums.weight / size:g} came after backwards without weights, so gradients were "
                    "not scaled for them before they were rounded to fp16; call optimizer.weigh() before each "
                    "backward(), from the first one on",
                    rank=self.world.rank,
                )
            )
        left_out = 0.0
        if sums.has_left_out:
            mine = torch.tensor([self._share.left_out], dtype=torch.float64, device="cpu")
            left_out = float(internal_collectives_of(self.world).all_reduce(mine, "sum"))
        return self.weights.result_scale(
            size, sums.is_weighted, sums.is_absent, sums.weight, left_out, are_of_batch=sums.is_of_batch > 0
        )

    def has_local(self) -> bool:
        """Whether a gradient is there that no other rank has seen."""
        return any(bucket.ledger.has_local() for bucket in self.buckets) or self._sparse.has_local()

    def holds_results(self) -> bool:
        """Whether a gradient is there that an earlier round has reduced."""
        return any(bucket.ledger.results() for bucket in self.buckets) or bool(self._sparse.results())

    def notice_zeroing(self, arrived: torch.Tensor | None = None) -> None:
        """Find the results that the script has zeroed in place, past the optimizer (`model.zero_grad()`).

        Args:
            arrived: a parameter to whose gradient backward has added since. What its gradient was cannot be seen: zero,
                if all others have become zero.
        """
        zeroed: list[Callable[[], None]] = []
        of_arrived: list[Callable[[], None]] = []
        num_results = 0
        for bucket in self.buckets:
            ledger = bucket.ledger
            for slot in ledger.results():
                num_results += 1
                has_arrived = bucket.parameters[slot] is arrived
                if ledger.was_zeroed(slot, has_arrived=has_arrived):
                    (of_arrived if has_arrived else zeroed).append(partial(ledger.mark_slot_zeroed, slot))
        for index in self._sparse.results():
            num_results += 1
            parameter = self.parameters[index]
            if parameter is arrived:
                of_arrived.append(partial(self._sparse.mark_one_zeroed, index))
            elif parameter.grad is not None and is_zero(parameter.grad):
                zeroed.append(partial(self._sparse.mark_one_zeroed, index))
        if zeroed and len(zeroed) + len(of_arrived) == num_results:
            zeroed += of_arrived
        for mark in zeroed:
            mark()

    def ignore_zeros(self) -> None:
        """This rank has no gradient of its own, so zeros that the script has written are none, either."""
        self.notice_zeroing()
        for bucket in self.buckets:
            bucket.ledger.ignore_zeros()

    def scale_local(self, factor: float) -> None:
        """Multiply the gradients that no other rank has seen."""
        for bucket in self.buckets:
            bucket.ledger.scale_local(factor)
        self._sparse.scale_local(factor)

    def find_non_finite(self) -> NonFiniteGradient | None:
        """Collective: as `non_finite`, of the last round on a device, too, which is waited for."""
        return self.non_finite or self.rounds.find_non_finite()

    def needs_synchronize(self) -> bool:
        """Whether some gradient on this rank waits to be reduced, or was written to since."""
        for bucket in self.buckets:
            bucket.ledger.mark_written()
        return self.first_unsettled() is not None

    def first_unsettled(self) -> tuple[str, str] | None:
        """The first parameter whose gradient must not be stepped on, and what that gradient is."""
        for bucket in self.buckets:
            if found := bucket.ledger.unsettled():
                return found
        name = self._sparse.first_unsettled()
        return None if name is None else (name, GradientStatus.LOCAL.value)

    def mark_zeroed(self) -> None:
        """The optimizer has zeroed all gradients, or set them to None."""
        for bucket in self.buckets:
            bucket.ledger.mark_zeroed()
        self._sparse.mark_zeroed()

    def close(self) -> None:
        """End threads and links. Gradients stay where they are."""
        self.mover.close()
        if self.buffers is not None:
            self.buffers.close()
        if self._track is not None and self._progress is not None:
            self._progress.close_entry(self._track)

    def _open_mover(self, plan: Plan, device: torch.device) -> tuple[Mover[Any], Choice]:
        world, options, wires = self.world, self._options, wires_of(plan)
        if accelerator := accelerator_of(device):
            return open_on_device(world, options.algorithm, options.overlap, wires, accelerator)
        if options.algorithm == "auto":
            narrow = wire_dtype(torch.float32, AUTO_COMPRESSION) if options.compression == "auto" else None
            return open_chosen(world, options.overlap, wires, narrow)
        return open_mover(world, options.algorithm, options.overlap), Choice(options.algorithm, "asked for")

    def _open_tuner(self, specs: Sequence[ParameterSpec], plan: Plan, *, buckets: bool) -> Plan:
        """Collective: let the plan be tuned. Returns the plan to begin with, which an earlier run may have found.

        Args:
            buckets: whether torchring may cut other buckets.
        """
        options, world = self._options, self.world
        tuned = what_to_tune(
            buckets=buckets,
            bucket_bytes=self._bucket_bytes,
            compression=options.compression,
            algorithm=self.mover.algorithm,
        )
        lines = describe(specs, str(options))
        self._tuner = open_tuner(world, self.mover, self.scheduler, plan, lines, tuned)
        if len(tuned.compressions) > 1:  # a weight has to fit into any wire
            self.weights.expect([wire_dtype(torch.float32, AUTO_COMPRESSION)])
        if (known := self._tuner.recall(specs)) is not None:
            self.scheduler.forget_order()  # the plan has the order of an earlier run
            return known
        return self._plan(specs)

    def _plan(self, specs: Sequence[ParameterSpec], order: Sequence[int] | None = None) -> Plan:
        return build_plan(specs, bucket_bytes=self._bucket_bytes, compression=self._compression, order=order)

    @property
    def _compression(self) -> str | None:
        """Of the plan in use."""
        if self._tuner is not None:
            return self._tuner.compression
        return None if self._options.compression == "auto" else self._options.compression

    @property
    def _bucket_bytes(self) -> int:
        bucket_mb = self._options.bucket_mb
        if bucket_mb is None or bucket_mb == "auto":
            bucket_mb = self._bucket_mb
        return int(bucket_mb * 2**20)

    def _add(self, specs: Sequence[ParameterSpec], parameters: Sequence[torch.nn.Parameter], plan: Plan) -> None:
        first = len(self.specs)
        self.specs += specs
        self.parameters += parameters
        plan = shifted(plan, buckets=len(self.buckets), parameters=first)
        self.rounds.expect(self.specs)
        self.scheduler.install([*self.buckets, *self._open(plan)])
        if self.buckets:
            self.weights.expect([bucket.plan.wire_dtype for bucket in self.buckets])

    def _check_agreement(
        self, specs: Sequence[ParameterSpec], collectives: Collectives, buffers: Sequence[BufferSpec] = ()
    ) -> None:
        """Raise PlanMismatchError on every rank unless all are about to reduce the same things in the same way."""
        lines = describe(specs, f"{self._options} on {self.world.size} ranks")
        collectives.check_equal(lines + [f"buffer {i}: {spec.describe()}" for i, spec in enumerate(buffers)])

    def _open(self, plan: Plan) -> list[Bucket]:
        scale, is_sum = self._options.scale(self.world.size), self._options.op == "sum"
        return [
            Bucket(
                *(bucket, wire, self.specs, self.parameters),
                scale=scale,
                is_sum=is_sum,
                packing=packing,
                scale_first=isinstance(wire, DeviceWire) and wire.scale_first,
            )
            for bucket, (wire, packing) in zip(plan.buckets, self.rounds.open_wires(plan), strict=True)
        ]

    def _rebuild(self, order: Sequence[int]) -> None:
        """Collective: lay the buckets out in the order in which rank 0's gradients became ready.

        Gradients that lie in the old buckets stay valid there, and move when they next change.
        """
        order = list(dict.fromkeys(order))
        order += sorted(set(range(len(self.specs))).difference(order), reverse=True)
        collectives = internal_collectives_of(self.world)
        agreed = collectives.broadcast(torch.tensor(order, dtype=torch.int64, device="cpu"), 0).tolist()
        self.scheduler.forget_order()
        self._install(self._plan(self.specs, agreed))
        if self._tuner is not None:
            self._tuner.order_is_known()

    def _install(self, plan: Plan) -> None:
        """Collective, between rounds: go on with the buckets of `plan`."""
        if plan.buckets == tuple(bucket.plan for bucket in self.buckets):
            return
        self.rounds.settle()
        for bucket in self.buckets:
            bucket.release()
        internal_collectives_of(self.world).barrier()  # memory is free when all ranks have let go of it
        self.scheduler.install(self._open(plan))
        self._recording.note_plan(self.buckets, self.specs, self.reason)

    def _tune(self, tuner: Tuner, *, hold: bool) -> None:
        """Collective, before a round begins: other buckets from now on, if it is time for that."""
        before = tuner.reason
        if hold:  # ranks may begin rounds of several optimizers in different orders: installed in `finish`
            reason = "nothing is tuned: with several optimizers, all buckets leave after backward"
            self._next_plan = tuner.stop(reason) or self._next_plan
        elif plan := tuner.next_plan(Plan(tuple(bucket.plan for bucket in self.buckets)), self.specs):
            self._install(plan)
        if tuner.reason != before:
            self._recording.note_plan(self.buckets, self.specs, self.reason)


def _nothing() -> None: ...
