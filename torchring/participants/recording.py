"""Writes down the run and an optimizer's rounds, in the recorder of its world: see `torchring.observe.recorder`."""

from __future__ import annotations

import logging
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final

import torch

from torchring.collectives.service import internal_collectives_of
from torchring.dynamo import has_compiled
from torchring.gradients.bucket import Bucket
from torchring.gradients.layout import BucketLayout
from torchring.gradients.round import Participant, RoundState
from torchring.linux import host_name, process_began_ns
from torchring.observe.recorder import clocks
from torchring.observe.recorder.records import Arrivals, OptimizerRecord, ParameterRecord, RunInfo
from torchring.observe.services import recorder_of
from torchring.observer import EXPOSED
from torchring.releases import installed_version
from torchring.world import World

_MOST_EXPOSED: Final = 0.9  # of communication, where backward hides some
_MOST_OPTIMIZERS: Final = 16  # that are kept in mind: a script may wrap one again and again
_ROUNDS_BETWEEN_CLOCKS: Final = 500  # clocks drift by some microseconds a second
_NUM_BURSTS: Final = 3  # backwards in a row
# Share of a backward in which gradients arrive. It was 2 % for a model in one graph, and 49 % or more for others. Where
# the end of forward is unknown, it is a share of all the time since the script began to wait for data.
_LONGEST_BURST: Final = 0.10
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
        if not current.is_unordered and current.number >= self._clocks_compared_at + _ROUNDS_BETWEEN_CLOCKS:
            self._compare_clocks(current.number)
        self._note_plan()
        self._current, self._arrivals, self._packed_early_ns = current, None, 0
        has_arrivals = 2 <= current.number < 6 or current.number % 64 == 63  # few, as writing them down takes time
        if has_arrivals and current.mark_ready is None:
            self._arrivals = [-1] * len(self._layout.specs)
            current.mark_ready = self._mark_ready

    def backward_is_over(self, current: RoundState) -> None:
        self._backward_began = self._recorder.phase_began  # the last forward had ended, or the first gradient had come
        self._recorder.phase(EXPOSED, current.step)

    def reduced(self, current: RoundState) -> None:
        layout, recorder = self._layout, self._recorder
        stall_ns, began = int(current.stall_seconds * 1e9), self._backward_began
        if self._arrivals is not None and not current.is_unordered and any(at >= 0 for at in self._arrivals):
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
            if self._recorder.run_info is not None:
                self._recorder.run_info = replace(self._recorder.run_info, finding=finding)
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
        layout, known = self._layout, self._recorder.run_info
        now = layout.buckets, layout.reason
        if known is None or (now[0] is self._noted[0] and now[1] == self._noted[1]):
            return
        self._noted = now
        sizes = tuple(bucket.plan.num_bytes for bucket in layout.buckets)
        records = _parameter_records(layout)
        own = _sizes_by_name(records)
        if _sizes_by_name(known.parameters) <= own:  # parameters may have been added
            self._recorder.run_info = replace(known, reason=layout.reason, bucket_bytes=sizes, parameters=records)
            return
        others = tuple(
            OptimizerRecord(sizes, records) if _sizes_by_name(other.parameters) <= own else other
            for other in known.others
        )
        self._recorder.run_info = replace(known, others=others)


def run_info(
    world: World,
    names: Mapping[torch.nn.Parameter, str],
    options: Mapping[str, str],
    layout: BucketLayout | None,
    *,
    wrapped_at: int,
    before: RunInfo | None,
) -> RunInfo:
    """Describe this rank, and the optimizer that is wrapped now.

    Args:
        names: of its parameters.
        layout: its buckets; None while it has none.
        before: describes the optimizers that were wrapped before.
    """
    devices = {parameter.device for parameter in names}
    device = next((each for each in devices if each.type != "cpu"), torch.device("cpu"))
    found = RunInfo(
        rank=world.rank,
        size=world.size,
        local_rank=world.local_rank,
        local_size=world.local_size,
        node_rank=world.node_rank,
        host=host_name(),
        pid=os.getpid(),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        num_cores=world.num_cores,
        num_threads=torch.get_num_threads(),
        process_began=process_began_ns(),
        wrapped=wrapped_at,
        reason="a world of one sends nothing",
        options=dict(options),
        parameters=tuple(_record_of(name, p.numel(), p.dtype, -1) for p, name in names.items() if p.requires_grad),
        versions={
            "torchring": installed_version("torchring") or "unknown",
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    )
    if layout is not None:
        found = replace(
            found,
            algorithm=layout.all_reduce.algorithm,
            reason=layout.reason,
            overlap=layout.agreement.overlap,
            bucket_bytes=tuple(bucket.plan.num_bytes for bucket in layout.buckets),
            parameters=_parameter_records(layout),
        )
    if before is None:
        return found
    others = (OptimizerRecord(before.bucket_bytes, before.parameters), *before.others)  # the last one first
    own = _sizes_by_name(found.parameters)
    kept = [other for other in others if other.parameters and _sizes_by_name(other.parameters) != own]
    return replace(found, others=tuple(kept[: _MOST_OPTIMIZERS - 1]))


def _sizes_by_name(parameters: Sequence[ParameterRecord]) -> set[tuple[str, int]]:
    return {(parameter.name, parameter.num_bytes) for parameter in parameters}


def _parameter_records(layout: BucketLayout) -> tuple[ParameterRecord, ...]:
    buckets = {slot.parameter: bucket.index for bucket in layout.buckets for slot in bucket.plan.slots}
    return tuple(
        _record_of(spec.name, spec.numel, spec.dtype, buckets.get(index, -1)) for index, spec in enumerate(layout.specs)
    )


def _record_of(name: str, numel: int, dtype: torch.dtype, bucket: int) -> ParameterRecord:
    return ParameterRecord(name, numel * dtype.itemsize, bucket, str(dtype).removeprefix("torch."))


class BurstWatch:
    """Notices that all gradients arrive together, at the end of backward, which hides hardly any communication.

    torch.compile makes one autograd node of the backward of a graph, and all gradients of the graph arrive when that
    node has ended. A gradient's hook cannot see which node has computed the gradient. So the times of the few backwards
    whose arrivals are written down decide.

    Attributes:
        finding: a sentence, once gradients have arrived together in several backwards; until then "".
    """

    def __init__(self) -> None:
        self.finding = ""
        self._count = 0

    def note(self, ready_ns: Sequence[int], before_ns: int, *, is_forward_known: bool, hides: bool) -> None:
        """Look at a backward that could have hidden communication.

        Args:
            ready_ns: when each gradient came, after the end of forward or, if that is unknown, after the first
                gradient; -1 for none. Without the time of communication and copies.
            before_ns: time from when the script began to wait for data until then.
            is_forward_known: the end of forward is known.
            hides: backward is known to have hidden some communication.
        """
        if self.finding:
            return
        came = [at for at in ready_ns if at >= 0]
        whole_ns = max(came, default=0) + (0 if is_forward_known else before_ns)
        is_burst = len(came) > 1 and not hides and max(came) - min(came) <= _LONGEST_BURST * whole_ns
        is_burst = is_burst and has_compiled()
        self._count = self._count + 1 if is_burst else 0
        if self._count == _NUM_BURSTS:
            self.finding = (
                "all gradients arrive together at the end of backward(), so hardly any communication is hidden. Is the "
                "model compiled as a whole? Compile each layer instead: for layer in model.layers: layer.compile()"
            )
