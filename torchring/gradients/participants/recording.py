"""Writes down an optimizer's rounds, in the recorder of its world: see `torchring.observe.recorder`."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from torchring.collectives.service import internal_collectives_of
from torchring.gradients.bucket import Bucket
from torchring.gradients.bursts import BurstWatch
from torchring.gradients.layout import BucketLayout
from torchring.gradients.plan import ParameterSpec
from torchring.gradients.round import Participant, RoundState
from torchring.observe.phases import EXPOSED
from torchring.observe.recorder import clocks
from torchring.observe.recorder.records import Arrivals, OptimizerRecord, ParameterRecord, RunInfo
from torchring.observe.services import recorder_of
from torchring.world import World

_MOST_EXPOSED: Final = 0.9  # of communication, where backward hides some
_MOST_OPTIMIZERS: Final = 16  # that are kept in mind: a script may wrap one again and again
_ROUNDS_BETWEEN_CLOCKS: Final = 500  # clocks drift by some microseconds a second
_logger: Final = logging.getLogger("torchring")


class RoundRecording(Participant):
    """Writes down where the time of rounds went, when gradients came, the plan, and how clocks differ.

    Opening it is collective.
    """

    def __init__(self, world: World, layout: BucketLayout) -> None:
        self._world = world
        self._layout = layout
        self._recorder = recorder_of(world)
        self._bursts = BurstWatch()
        self._noted: tuple[Sequence[Bucket], str] = layout.buckets, layout.reason
        self._compare_clocks(0)

        # The round
        self._current = RoundState(0)
        self._backward_began = 0
        self._arrivals: list[int] | None = None  # of gradients, in nanoseconds by parameter index; -1 for none
        self._packed_early_ns = 0  # time in which gradients were packed before the last one was computed

    def begin(self, current: RoundState) -> None:
        # A rank whose backward has raised at its end never comes to the end of a round that its peers do.
        if not current.hold and current.number >= self._clocks_compared_at + _ROUNDS_BETWEEN_CLOCKS:
            self._compare_clocks(current.number)
        self._note_plan()
        self._current, self._arrivals, self._packed_early_ns = current, None, 0
        if has_arrivals(current.number) and current.mark_ready is None:
            self._arrivals = [-1] * len(self._layout.specs)
            current.mark_ready = self._mark_ready

    def backward_is_over(self, current: RoundState) -> None:
        """From here to the end of the round, communication is exposed."""
        self._backward_began = self._recorder.phase_began  # the last forward had ended, or the first gradient had come
        self._recorder.enter(EXPOSED)

    def reduced(self, current: RoundState) -> None:
        layout, recorder = self._layout, self._recorder
        stall_ns, began = int(current.stall_seconds * 1e9), self._backward_began
        if self._arrivals is not None and not current.hold and any(at >= 0 for at in self._arrivals):
            length = recorder.phase_began - began - stall_ns - self._packed_early_ns
            ready = tuple(at if at < 0 else max(0, at - began) for at in self._arrivals)
            recorder.arrivals.append(Arrivals(recorder.num_steps, max(0, length), ready))
            # With "inline" nothing is hidden in any case.
            if len(layout.buckets) > 1 and layout.agreement.overlap != "inline" and not self._bursts.finding:
                self._look_for_bursts(current, ready)
        recorder.add_round(current.times, stall_ns, current.packing_ns, layout.agreement.reductions)

    def finished(self, current: RoundState) -> None:
        self._note_plan()

    def _mark_ready(self, index: int) -> None:
        """As `Launcher.mark_ready`, and note the time. Stalls and copies until then are taken out."""
        launcher = self._layout.launcher
        if self._arrivals is not None and index < len(self._arrivals):
            stalls_ns = int(self._current.exposed_seconds * 1e9)
            self._arrivals[index] = time.perf_counter_ns() - self._packed_early_ns - stalls_ns
        before = launcher.packing_ns(index)
        launcher.mark_ready(index)
        self._packed_early_ns += launcher.packing_ns(index) - before

    def _look_for_bursts(self, current: RoundState, ready: Sequence[int]) -> None:
        input_began, is_forward_known = self._recorder.last_input()
        # What a device hides is known in one of the next rounds.
        knows_at_once = self._layout.agreement.knows_at_once
        hides = knows_at_once and current.exposed_seconds < _MOST_EXPOSED * current.busy_seconds
        before_ns = self._backward_began - input_began
        self._bursts.note(ready, before_ns, is_forward_known=is_forward_known, hides=hides)
        if finding := self._bursts.finding:
            self._layout.finding = finding
            if self._recorder.about is not None:
                self._recorder.about = replace(self._recorder.about, finding=finding)
            if self._world.rank == 0:
                _logger.warning(finding)

    def _compare_clocks(self, number: int) -> None:
        """Collective where there are several hosts: find out how far this host's clock is ahead."""
        world = self._world
        self._clocks_compared_at = number
        if len(world.hosts) > 1:
            exchange = internal_collectives_of(world).all_gather_bytes
            self._recorder.clock.append(clocks.measure(exchange, is_same_host=world.rank in world.hosts[0]))

    def _note_plan(self) -> None:
        """Write down how the buckets are laid out, and why, if that has changed."""
        layout, about = self._layout, self._recorder.about
        now = layout.buckets, layout.reason
        if about is None or (now[0] is self._noted[0] and now[1] == self._noted[1]):
            return
        self._noted = now
        sizes = tuple(bucket.plan.num_bytes for bucket in layout.buckets)
        records = tuple(parameter_records(layout.buckets, layout.specs))
        own = _sizes_by_name(records)
        if _sizes_by_name(about.parameters) <= own:  # parameters may have been added
            self._recorder.about = replace(about, reason=layout.reason, bucket_bytes=sizes, parameters=records)
            return
        others = tuple(
            OptimizerRecord(sizes, records) if _sizes_by_name(other.parameters) <= own else other
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
    """Name, size, bucket and dtype of each parameter."""
    homes = {slot.parameter: bucket.index for bucket in buckets for slot in bucket.plan.slots}
    return [
        ParameterRecord(
            *(spec.name, spec.numel * spec.dtype.itemsize, homes.get(index, -1)),
            str(spec.dtype).removeprefix("torch."),
        )
        for index, spec in enumerate(specs)
    ]


def has_arrivals(number: int) -> bool:
    """Return True for the few rounds in which the arrival of each gradient is written down."""
    return 2 <= number < 6 or number % 64 == 63
