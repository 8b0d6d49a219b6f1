"""Writes down the run and an optimizer's reductions, in the recorder of its world."""

import os
import platform
import time
from collections.abc import Sequence
from dataclasses import replace

import torch

from torchring.gradients.bucket import Bucket
from torchring.gradients.group import OptimizerGroup
from torchring.gradients.layout import BucketLayout
from torchring.gradients.reducer import Reducer
from torchring.gradients.reduction import Participant, Reduction
from torchring.linux import host_name
from torchring.observe.recorder.recorder import Recorder
from torchring.observe.recorder.records import REDUCED as REDUCED_AT
from torchring.observe.recorder.records import STARTED as STARTED_AT
from torchring.observe.recorder.records import Arrivals, ParameterRecord, RunInfo
from torchring.observer import COPIED, COPYING, LAUNCHED, OVER, PACKED, READY, STARTED, Wrapped
from torchring.releases import installed_version
from torchring.world import World


class ReductionRecording(Participant):
    """Writes down where the time of one optimizer's reductions went, when gradients came, and the plan."""

    def __init__(self, recorder: Recorder, reducer: Reducer, number: int) -> None:
        self._recorder = recorder
        self._reducer = reducer
        self._group = reducer.world.shared(OptimizerGroup)
        self._layout = layout = reducer.layout
        self._number = number  # of the optimizer
        self._noted: tuple[Sequence[Bucket], str] = layout.buckets, layout.reason
        # The reduction
        self._current: Reduction | None = None
        self._rows: list[int] = []  # a row for each bucket that has left, one after the other, see `records.py`
        self._starts: dict[int, int] = {}  # by bucket: where its row begins
        self._since: dict[int, int] = {}  # by bucket: when a copy has begun, or the last gradient has come
        self._stall_ns = self._packing_ns = self._early_packing_ns = 0  # as in a `StepRecord`; before backward was over
        self._arrivals: list[int] = []  # of gradients, by parameter; -1 for none. Without stalls and copies until then.

    def on_begin(self, current: Reduction) -> None:
        self._note_plan()
        # Few, as writing them down takes time
        has_arrivals = (2 <= current.number < 6 or current.number % 64 == 63) and not self._group.are_beside_others
        self._current = current
        self._rows, self._starts, self._since = [], {}, {}
        self._stall_ns = self._packing_ns = self._early_packing_ns = 0
        self._arrivals = [-1] * (len(self._layout.specs) if has_arrivals else 0)
        current.events = self._note
        if has_arrivals:
            current.mark_ready = self._mark_ready

    def _note(self, event: int, index: int, at: int) -> None:
        now = at or time.perf_counter_ns()
        if event in (COPYING, READY):
            self._since[index] = now
        elif event in (COPIED, PACKED):
            self._packing_ns += now - self._since.get(index, now)
        elif event == LAUNCHED:
            self._starts[index] = len(self._rows)
            buckets, extra = self._layout.buckets, self._current.extra if self._current is not None else None
            bucket = buckets[index] if index < len(buckets) or extra is None else extra
            ready = self._since.get(index, now)
            self._rows += (index, bucket.wire.tensor.nbytes, ready, now, now, 0, self._number)
        elif event == OVER:
            self._early_packing_ns, self._stall_ns = self._packing_ns, self._exposed_ns()
        elif index in self._starts:  # else of a reduction that was aborted
            self._rows[self._starts[index] + (STARTED_AT if event == STARTED else REDUCED_AT)] = now

    def _mark_ready(self, index: int) -> None:
        """As `Launcher.mark_ready`, and note the time."""
        if index < len(self._arrivals):
            self._arrivals[index] = time.perf_counter_ns() - self._packing_ns - self._exposed_ns()
        self._layout.launcher.mark_ready(index)

    def _exposed_ns(self) -> int:
        return 0 if self._current is None else int(self._current.exposed_seconds * 1e9)

    def on_message(self, current: Reduction) -> None:
        if current is not self._current:  # recording has begun in the midst of the reduction
            return
        self._current = None
        recorder, began = self._recorder, self._recorder.backward_began
        if any(at >= 0 for at in self._arrivals):
            length = recorder.phase_began - began - self._stall_ns - self._early_packing_ns
            ready = tuple(at if at < 0 else max(0, at - began) for at in self._arrivals)
            recorder.arrivals.append(Arrivals(max(0, length), ready, self._number))
        marks = [(work.begin, work.end) for work in self._layout.agreement.works]
        recorder.add_reduction(self._rows, self._stall_ns, self._packing_ns, marks)

    def on_reduced(self, current: Reduction) -> None:
        self._note_plan()
        if (noise := self._reducer.noise) is not None:
            self._recorder.batch_size, self._recorder.noise_scale = noise.batch_size, noise.noise_scale
        self._recorder.compression_error |= self._reducer.compression_error

    def _note_plan(self) -> None:
        """Write down how the buckets are laid out, and why, if that has changed."""
        layout, recorder = self._layout, self._recorder
        if layout.buckets is not self._noted[0] or layout.reason != self._noted[1]:
            self._noted = layout.buckets, layout.reason
            recorder.run_info = replace(recorder.run_info, reason=layout.reason)
            recorder.parameters[self._number] = _of_layout(layout, self._number)


def describe(world: World, wrapped: Wrapped, layout: BucketLayout | None) -> RunInfo:
    """Describe this rank, and the optimizer that is wrapped now, without its parameters, with its buckets, if any."""
    devices = {parameter.device for parameter in wrapped.names}
    device = next((each for each in devices if each.type != "cpu"), torch.device("cpu"))
    found = RunInfo(
        run="" if world.rendezvous is None else world.rendezvous.run(),
        rank=world.rank,
        size=world.size,
        local_size=world.local_size,
        node_rank=world.node_rank,
        host=host_name(),
        pid=os.getpid(),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        num_cores=world.num_cores,
        num_threads=torch.get_num_threads(),
        reason="a world of one sends nothing",
        options=dict(wrapped.options),
        versions={
            "torchring": installed_version("torchring") or "unknown",
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    )
    if layout is None:
        return found
    algorithm, overlap = layout.all_reduce.algorithm, layout.agreement.overlap
    return replace(found, algorithm=algorithm, reason=layout.reason, overlap=overlap)


def parameter_records(wrapped: Wrapped, layout: BucketLayout | None, number: int) -> tuple[ParameterRecord, ...]:
    """The parameters of optimizer `number` that are reduced."""
    if layout is not None:
        return _of_layout(layout, number)
    known = ((name, p) for p, name in wrapped.names.items() if p.requires_grad)
    return tuple(_record_of(name, p.numel(), p.dtype, -1, number) for name, p in known)


def _of_layout(layout: BucketLayout, number: int) -> tuple[ParameterRecord, ...]:
    buckets = {slot.parameter: bucket.index for bucket in layout.buckets for slot in bucket.plan.slots}
    return tuple(
        _record_of(spec.name, spec.numel, spec.dtype, buckets.get(index, -1), number)
        for index, spec in enumerate(layout.specs)
    )


def _record_of(name: str, numel: int, dtype: torch.dtype, bucket: int, optimizer: int) -> ParameterRecord:
    return ParameterRecord(name, numel * dtype.itemsize, bucket, str(dtype).removeprefix("torch."), optimizer)
