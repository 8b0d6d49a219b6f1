"""Writes down an optimizer's rounds, in the recorder of its world: see `torchring.observe.recorder`."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from torchring.collectives.service import internal_collectives_of
from torchring.gradients.bucket import Bucket
from torchring.gradients.bursts import BurstWatch
from torchring.gradients.plan import ParameterSpec
from torchring.gradients.rounds import Rounds
from torchring.gradients.scheduler import Scheduler
from torchring.observe.phases import EXPOSED
from torchring.observe.recorder import clocks
from torchring.observe.recorder.records import Arrivals, OptimizerRecord, ParameterRecord, RunInfo
from torchring.observe.services import recorder_of
from torchring.world import World

_MOST_EXPOSED: Final = 0.9  # of communication, where backward hides some
_MOST_OPTIMIZERS: Final = 16  # that are kept in mind: a script may wrap one again and again
_ROUNDS_BETWEEN_CLOCKS: Final = 500  # clocks drift by some microseconds a second
_logger: Final = logging.getLogger("torchring")


class RoundRecording:
    """Where the time of rounds went, when gradients came, how buckets are laid out, and how clocks differ."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._recorder = recorder_of(world)
        self._bursts = BurstWatch()
        self._clocks_compared_at = 0  # number of the next round
        self._backward_began = 0

    def clocks_are_due(self, next_number: int) -> bool:
        """Whether clocks are to be compared again, before the round of this number. The same on all ranks."""
        return next_number >= self._clocks_compared_at + _ROUNDS_BETWEEN_CLOCKS

    def compare_clocks(self, next_number: int) -> None:
        """Collective where there are several hosts: find out how far this host's clock is ahead.

        Between rounds: a rank whose backward has raised at its end never comes to the end of a round that its peers do.
        """
        world = self._world
        self._clocks_compared_at = next_number
        if len(world.hosts) > 1:
            exchange = internal_collectives_of(world).all_gather_bytes
            self._recorder.clock.append(clocks.measure(exchange, is_same_host=world.rank in world.hosts[0]))

    def backward_is_over(self) -> None:
        """What follows, until the round is over, is communication that backward did not hide."""
        self._backward_began = self._recorder.phase_began  # the last forward had ended, or the first gradient had come
        self._recorder.enter(EXPOSED)

    def add(self, scheduler: Scheduler, rounds: Rounds) -> None:
        """A round is over."""
        current, recorder = scheduler.round, self._recorder
        stall_ns, began = int(current.stall_seconds * 1e9), self._backward_began
        if current.arrivals is not None and not current.hold and any(at >= 0 for at in current.arrivals):
            length = recorder.phase_began - began - stall_ns - current.packed_early_ns
            ready = tuple(at if at < 0 else max(0, at - began) for at in current.arrivals)
            recorder.arrivals.append(Arrivals(recorder.num_steps, max(0, length), ready))
            # With "inline" nothing is hidden in any case.
            if len(scheduler.buckets) > 1 and rounds.overlap != "inline" and not self._bursts.finding:
                input_began, is_forward_known = recorder.last_input()
                # What a device hides is known in one of the next rounds.
                hides = rounds.knows_at_once and current.exposed_seconds < _MOST_EXPOSED * current.busy_seconds
                before_ns = began - input_began
                self._bursts.note(ready, before_ns, is_forward_known=is_forward_known, hides=hides)
                if self._bursts.finding:
                    self._tell(self._bursts.finding)
        recorder.add_round(scheduler.times, stall_ns, current.packing_ns, rounds.reductions)

    @property
    def finding(self) -> str:
        """Why hardly any communication is hidden, if the reason is known: a sentence, or ""."""
        return self._bursts.finding

    def _tell(self, finding: str) -> None:
        about = self._recorder.about
        if about is not None:
            self._recorder.about = replace(about, finding=finding)
        if self._world.rank == 0:
            _logger.warning(finding)

    def note_plan(self, buckets: Sequence[Bucket], specs: Sequence[ParameterSpec], reason: str) -> None:
        """The buckets are laid out like this from now on, for that reason: see `Stats.reason`."""
        about = self._recorder.about
        if about is None:
            return
        sizes = tuple(bucket.plan.num_bytes for bucket in buckets)
        records = tuple(parameter_records(buckets, specs))
        now = _sizes_by_name(records)
        if _sizes_by_name(about.parameters) <= now:  # parameters may have been added
            self._recorder.about = replace(about, reason=reason, bucket_bytes=sizes, parameters=records)
            return
        others = tuple(
            OptimizerRecord(sizes, records) if _sizes_by_name(other.parameters) <= now else other
            for other in about.others
        )
        self._recorder.about = replace(about, others=others)


def with_others(about: RunInfo, before: RunInfo | None) -> RunInfo:
    """`about` of an optimizer that is wrapped now, and the optimizers that were wrapped before, the last one first."""
    if before is None:
        return about
    found = (OptimizerRecord(before.bucket_bytes, before.parameters), *before.others)
    names = _sizes_by_name(about.parameters)
    kept = [other for other in found if other.parameters and _sizes_by_name(other.parameters) != names]
    return replace(about, others=tuple(kept[: _MOST_OPTIMIZERS - 1]))


def _sizes_by_name(parameters: Sequence[ParameterRecord]) -> set[tuple[str, int]]:
    return {(parameter.name, parameter.num_bytes) for parameter in parameters}


def parameter_records(buckets: Sequence[Bucket], specs: Sequence[ParameterSpec]) -> list[ParameterRecord]:
    """Name, size and bucket of each parameter."""
    homes = {slot.parameter: bucket.index for bucket in buckets for slot in bucket.plan.slots}
    return [
        ParameterRecord(spec.name, spec.numel * spec.dtype.itemsize, homes.get(index, -1))
        for index, spec in enumerate(specs)
    ]


def has_arrivals(number: int) -> bool:
    """Whether round `number` is one of the few in which the arrival of each gradient is written down."""
    return 2 <= number < 6 or number % 64 == 63
