"""Records the steps of a rank while training runs, where a trace or `metrics()` was asked for.

A stamp is a look at the clock and two appended integers, 0.2 us. A step has about a dozen stamps, and five for each
bucket. Finished steps are kept as arrays of integers, which the garbage collector does not look at.
"""

import contextlib
import os
import sys
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from torchring.observe.flight_recorder.call_sites import line_of
from torchring.observe.loading import UNKNOWN, Loading, since
from torchring.observe.recorder import records
from torchring.observe.recorder.device_times import DeviceTimes
from torchring.observe.recorder.records import Arrivals, ClockOffset, ParameterRecord, RankTrace, RunInfo, step_row
from torchring.observer import BACKWARD, EXPOSED, FORWARD, INPUT, Observer

if TYPE_CHECKING:
    from torchring.devices.cuda import CudaAccelerator, CudaMark

NUM_STEPS: Final = 1_000  # that are kept
NUM_ARRIVALS: Final = 16
_NUM_SAMPLES: Final = 2_000
_MOST_STAMPS: Final = 2_048  # of one step; a script with more micro-steps gets the rest in one phase
_MOST_NUMBERS: Final = records.BUCKET_LENGTH * 8_192  # about the buckets of one step: a script may never call step()


class Recorder(Observer):
    """The last steps of one rank in one world and its groups. For the thread that trains; others may read."""

    def __init__(self, num_steps: int = 0) -> None:  # those that this rank has made before
        # What is recorded
        self.run_info = RunInfo()
        self.parameters: dict[int, tuple[ParameterRecord, ...]] = {}  # by optimizer
        self.groups: dict[str, dict[str, Any]] = {}  # see `RunInfo`
        # The steps that have ended
        self.num_steps = num_steps
        self.num_samples_before = 0  # that forward was given in these steps
        self.num_bytes = 0  # that this rank has contributed to reductions
        self.arrivals: deque[Arrivals] = deque(maxlen=NUM_ARRIVALS)  # of gradients, in a few backwards
        self.batch_size = 0.0  # samples of all ranks in a reduction
        self.noise_scale: float | None = None  # of gradients, in samples
        self.compression_error: dict[str, float] = {}  # see `Stats`
        self.clock: list[ClockOffset] = []  # how this host's clock compares with that of rank 0's host, over time
        self._steps: deque[array[int]] = deque(maxlen=NUM_STEPS)
        self._samples: deque[tuple[int, int, str]] = deque(maxlen=_NUM_SAMPLES)
        # The step under way, as in a `StepRecord`
        self.num_samples = 0
        self.loading = Loading()
        # The phase under way
        self.in_phase = INPUT
        self.phase_began = time.perf_counter_ns()
        self.backward_began = self.phase_began  # the end of the last forward, or the first gradient of the backward
        self._stamps = [INPUT, self.phase_began]  # phase, beginning; phase, beginning; ...
        self._device: DeviceTimes | None = None
        self._stall_ns = 0
        self._packing_ns = 0
        self._buckets: list[int] = []
        self._queue = CoreQueue()
        self._queued_before_step = self._queued_before_exposed = UNKNOWN
        self._exposed_queued_ns = 0

    def phase(self, phase: int, step: int) -> None:
        if phase != self.in_phase and len(self._stamps) < _MOST_STAMPS:
            if phase == EXPOSED:
                self.backward_began = self.phase_began
            if EXPOSED in (phase, self.in_phase) and self._device is None:
                self._note_exposed(begins=phase == EXPOSED)
            self.in_phase = phase
            self.loading.counts = phase == INPUT
            self.phase_began = time.perf_counter_ns()
            self._stamps.append(phase)
            self._stamps.append(self.phase_began)
            if self._device is not None:
                self._device.mark(self.phase_began)

    def _note_exposed(self, *, begins: bool) -> None:
        now = self._queue.read_ns()
        if begins:
            self._queued_before_exposed = now
        elif self._exposed_queued_ns != UNKNOWN:
            waited = since(self._queued_before_exposed, now)
            self._exposed_queued_ns = UNKNOWN if waited == UNKNOWN else self._exposed_queued_ns + waited

    def _queued_ns(self) -> tuple[int, int]:
        """How long the thread that trains had no core in the step that ends: in all, and inside EXPOSED."""
        now = self._queue.read_ns()
        queued, exposed = since(self._queued_before_step, now), self._exposed_queued_ns
        self._queued_before_step, self._exposed_queued_ns = now, 0
        # Phases of a device's step are not what this thread does meanwhile.
        return queued, exposed if self._device is None and queued != UNKNOWN else UNKNOWN

    def follow(self, device: "CudaAccelerator") -> None:
        """From now on, times are those at which the work of `device` is done."""
        if self._device is None:
            self._device = DeviceTimes(device, time.perf_counter_ns())

    def add_reduction(
        self, buckets: Sequence[int], stall_ns: int, packing_ns: int, marks: "Sequence[tuple[CudaMark, CudaMark]]" = ()
    ) -> None:
        """Buckets have been reduced.

        Args:
            buckets: a row for each bucket, one after the other, see `records.py`.
            stall_ns, packing_ns: as in a `StepRecord`.
            marks: begin and end of the all-reduce of each bucket, on a device.
        """
        if len(self._buckets) + len(buckets) > _MOST_NUMBERS:
            return
        if self._device is not None:
            self._device.buckets += marks
        self._buckets += buckets
        self._stall_ns += stall_ns
        self._packing_ns += packing_ns

    def forward(self, num_samples: int | None) -> None:
        self.phase(FORWARD if num_samples is not None else BACKWARD, 0)
        self.num_samples += num_samples or 0

    def end_step(self, number: int) -> None:
        now, number = time.perf_counter_ns(), max(number, self.num_steps)  # each group counts its own
        stamps, buckets, loading = self._stamps, self._buckets, self.loading
        own = (
            *(number, stamps[1], now, self.num_samples, self._stall_ns, self._packing_ns),
            *(loading.loading_ns, loading.loading_cpu_ns, loading.num_workers),
            *self._queued_ns(),
        )
        step = step_row(own, stamps, buckets)
        self._steps.append(step)
        if self._device is not None:
            self._device.end_step(step, now)
        self.num_bytes += sum(buckets[records.NUM_BYTES :: records.BUCKET_LENGTH])
        self.num_samples_before += self.num_samples
        self.num_steps = number + 1
        self.num_samples = self._stall_ns = self._packing_ns = 0
        loading.begin_step()
        self.in_phase, self.phase_began = INPUT, now
        self._stamps = [INPUT, now]
        self._buckets = []

    def sample(self) -> None:
        """Look where the script is. For a thread that does not train."""
        step, phase = self.num_steps, self.in_phase
        line = line_of(self.loading.thread)
        if line and (step, phase) == (self.num_steps, self.in_phase):
            self._samples.append((step, phase, line))

    def last_steps(self, count: int = NUM_STEPS) -> "list[array[int]]":
        """The newest steps that a device has finished, encoded, the oldest first."""
        steps = list(self._steps)[-count:]
        return [step for step in steps if self._device is None or not self._device.is_unfinished(step)]

    def trace(
        self, ended_by: str = "end", count: int = NUM_STEPS, first: int = 0
    ) -> "tuple[RankTrace, list[array[int]]]":
        """(the trace without steps, the newest steps from number `first` on, as rows)."""
        run_info = replace(
            self.run_info,
            parameters=tuple(each for _, records in sorted(self.parameters.items()) for each in records),
            ended_by=ended_by,
            written_at=time.time(),
            batch_size=self.batch_size,
            noise_scale=-1.0 if self.noise_scale is None else self.noise_scale,
            compression_error=self.compression_error,
            is_compiled=has_compiled(),
            groups=self.groups,
        )
        steps = [step for step in self.last_steps(count) if step[records.NUMBER] >= first]
        numbers = {step[records.NUMBER] for step in steps}
        samples = tuple(sample for sample in list(self._samples) if sample[0] in numbers)
        return RankTrace(run_info, (), tuple(self.arrivals), tuple(self.clock), samples), steps


class CoreQueue:
    """How long the thread that asks first has waited for a core. One look takes 1 us."""

    def __init__(self) -> None:
        self._thread = 0
        self._file = UNKNOWN

    def read_ns(self) -> int:
        """Nanoseconds since the thread began. UNKNOWN to other threads, and where the kernel does not count."""
        thread = threading.get_ident()
        if self._thread != thread:
            if self._thread:
                return UNKNOWN
            self._thread = thread
            with contextlib.suppress(OSError):
                self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
        if self._file == UNKNOWN:
            return UNKNOWN
        try:
            _, queued, num_slices = os.pread(self._file, 64, 0).split()
        except (OSError, ValueError):
            return UNKNOWN
        return int(queued) if int(num_slices) else UNKNOWN  # a thread that runs has been given the core once at least

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # `os` may be gone when Python ends
        if self._file != UNKNOWN:
            close(self._file)


def has_compiled() -> bool:
    """True if torch.compile has compiled something in this process."""
    module = sys.modules.get("torch._dynamo.utils")
    return module is not None and bool(module.counters.get("stats", {}).get("unique_graphs"))
