"""What a rank records about each step. Plain data.

Times are nanoseconds of CLOCK_MONOTONIC (`time.perf_counter_ns`), a clock that all processes of a host share. Clocks of
different hosts are compared by `ClockOffset`.

A step goes from the end of one `optimizer.step()` to the end of the next. It consists of phases, without gaps:

      begin                                                                                               end
      | INPUT      | FORWARD | BACKWARD                        | EXPOSED      | BETWEEN  | OPTIMIZER          |
        next batch   model     loss, gradients                   last buckets   clipping   step()
                                  bucket 0    |launched|reduced|
                                  bucket 1           |launched        |reduced|

While training runs, a step is a row of integers: fourteen of its own, then two for each phase (which, begin), then
seven for each bucket. Their order is that of the constants below, and of the attributes of `StepRecord` and
`BucketRecord`. A thousand rows take no time of the garbage collector.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from torchring.observe.phases import Phase

STEP_LENGTH: Final = 14  # without phases and buckets
NUMBER, BEGIN, END, NUM_SAMPLES, STALL_NS, PACKING_NS, LOADING_NS = range(7)
LOADING_CPU_NS, NUM_WORKERS, QUEUED_NS, EXPOSED_QUEUED_NS, COLLECTING_NS, NUM_PHASES, NUM_BUCKETS = range(
    7, STEP_LENGTH
)
PHASE_LENGTH: Final = 2
BUCKET_LENGTH: Final = 7
INDEX, NUM_BYTES, READY, PACKED, LAUNCHED, STARTED, REDUCED = range(BUCKET_LENGTH)
_OWN: Final = (  # attributes of a step, in the order of a row
    *("number", "begin", "end", "num_samples", "stall_ns", "packing_ns"),
    *("loading_ns", "loading_cpu_ns", "num_workers", "queued_ns", "exposed_queued_ns", "collecting_ns"),
)
ENDED_WELL: Final = ("", "end", "SIGUSR1")  # see `RunInfo.ended_by`


@dataclass(frozen=True)
class BucketRecord:
    """One bucket in one step.

    Attributes:
        index: number of the bucket in its plan; the model's buffers, which travel last, have the number after it.
        num_bytes: that this rank contributes, after compression.
        ready: the last gradient of the bucket has been computed.
        packed: all gradients are in the wire buffer.
        launched: the bucket has left: it is packed, and so are all buckets before it.
        started: the reduction has begun to work on it, on a thread that may have been busy until then. With
            overlap="inline": this rank has begun to do its part, in a call between gradients or at the end.
        reduced: the result is there. With overlap="inline": this rank has done its part. The result is there when all
            ranks have done theirs.

    On a GPU, `ready`, `packed`, `launched` and `started` are when the GPU has begun to reduce the bucket.
    """

    index: int
    num_bytes: int
    ready: int
    packed: int
    launched: int
    started: int
    reduced: int


@dataclass(frozen=True)
class PhaseRecord:
    """One phase of a step."""

    phase: Phase
    begin: int
    end: int


@dataclass(frozen=True)
class StepRecord:
    """One step of one rank.

    Attributes:
        number: how many steps this rank had made before it.
        begin, end: see above.
        num_samples: length of the first dimension of what forward was given, over all micro-steps; 0 if unknown.
        stall_ns: inside BACKWARD, how long buckets that were being reduced kept backward waiting.
        packing_ns: inside BACKWARD and EXPOSED, how long gradients were copied to wire buffers. 0 on a GPU, as
            `stall_ns` is.
        phases: in order, without gaps, from `begin` to `end`.
        buckets: in the order in which they left. Empty if nothing was reduced.
        loading_ns: how long this rank was in `next()` of a DataLoader, inside INPUT.
        loading_cpu_ns: how long cores worked for it: this thread in `next()`, and the workers; -1 if unknown.
        num_workers: of the DataLoader that gave the last batch; -1 if none gave one.
        queued_ns: how long the thread that trains was ready to run, but had no core; -1 if the kernel does not say.
        exposed_queued_ns: the same, inside EXPOSED; -1 on a GPU, too.
        collecting_ns: how long full collections of Python's garbage collector took.
    """

    number: int
    begin: int
    end: int
    num_samples: int
    stall_ns: int
    packing_ns: int
    phases: tuple[PhaseRecord, ...]
    buckets: tuple[BucketRecord, ...]
    loading_ns: int = 0
    loading_cpu_ns: int = -1
    num_workers: int = -1
    queued_ns: int = -1
    exposed_queued_ns: int = -1
    collecting_ns: int = 0

    def ns_in(self, phase: Phase) -> int:
        """How long this phase took, all its times together."""
        return sum(each.end - each.begin for each in self.phases if each.phase == phase)

    @property
    def exposed_ns(self) -> int:
        """How long communication kept this rank from computing, in all."""
        return self.ns_in(Phase.EXPOSED) + self.stall_ns

    @property
    def num_bytes(self) -> int:
        """What this rank has contributed to reductions."""
        return sum(bucket.num_bytes for bucket in self.buckets)


@dataclass(frozen=True)
class Arrivals:
    """When each gradient of one backward was computed.

    Attributes:
        step: number of the step.
        backward_ns: length of the backward, from the end of forward to the last gradient.
        ready_ns: for each parameter of `RunInfo.parameters`, nanoseconds from the end of forward to its gradient. -1 if
            there was none. What communication and copies took until then is subtracted, so that these are the times of
            a backward that only computes.
    """

    step: int
    backward_ns: int
    ready_ns: tuple[int, ...]


@dataclass(frozen=True)
class ClockOffset:
    """How far the clock of a host is ahead of that of rank 0's host.

    Attributes:
        at: when this was measured, on this rank's clock.
        offset_ns: subtract from this rank's times to get times of rank 0's clock.
        error_ns: the true offset differs by this at most. 0 on rank 0's host.
    """

    at: int
    offset_ns: int
    error_ns: int


@dataclass(frozen=True)
class ParameterRecord:
    """A parameter that is reduced. `bucket` is -1 if its gradient is sparse."""

    name: str
    num_bytes: int
    bucket: int


@dataclass(frozen=True)
class OptimizerRecord:
    """An optimizer of a job that has several. Attributes: as in `RunInfo`."""

    bucket_bytes: tuple[int, ...]
    parameters: tuple[ParameterRecord, ...]


@dataclass(frozen=True)
class RunInfo:
    """What was run: the process, its machine, and how the optimizer was wrapped.

    Attributes:
        rank, size, local_rank, local_size: in the world.
        node_rank: number of the host among the hosts of the world.
        host: name of the host.
        pid: of the process.
        device: "cpu", or name of the GPU.
        num_cores: how many cores the ranks of the host may use together.
        num_threads: of torch, in this process.
        process_began: when the process was started, on this rank's clock; 0 if unknown.
        wrapped: when the optimizer was wrapped.
        algorithm, reason, overlap: see `Stats`.
        finding: the reason why hardly any communication is hidden, a sentence; "" if none is known.
        options: other arguments of `wrap`, by name, as text.
        bucket_bytes: bytes of each bucket of the last plan.
        parameters: in the order of registration.
        others: the other optimizers of the job. What is above is of the one that was wrapped last.
        versions: "torchring", "torch", "python".
        ended_by: why the trace was written: "end", "SIGUSR1", or the text of an error. "" while the job runs.
        written_at: seconds since 1970.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1
    node_rank: int = 0
    host: str = ""
    pid: int = 0
    device: str = "cpu"
    num_cores: int = 1
    num_threads: int = 1
    process_began: int = 0
    wrapped: int = 0
    algorithm: str = "none"
    reason: str = ""
    overlap: str = "inline"
    finding: str = ""
    options: dict[str, str] = field(default_factory=dict)
    bucket_bytes: tuple[int, ...] = ()
    parameters: tuple[ParameterRecord, ...] = ()
    others: tuple[OptimizerRecord, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    ended_by: str = "end"
    written_at: float = 0.0


@dataclass(frozen=True)
class RankTrace:
    """All that one rank has recorded.

    Attributes:
        steps: the last ones, in order. The first steps of a job are special: buckets are laid out anew, memory is
            touched for the first time.
        num_dropped: how many steps there were before the first one of `steps`.
        arrivals: when gradients came, in a few steps.
        clock: comparisons with the clock of rank 0's host. Empty if the ranks are on one host.
    """

    about: RunInfo
    steps: tuple[StepRecord, ...] = ()
    num_dropped: int = 0
    arrivals: tuple[Arrivals, ...] = ()
    clock: tuple[ClockOffset, ...] = ()


def step_row(own: Sequence[int], phases: Sequence[int], buckets: Sequence[int]) -> array[int]:
    """A step; `own` is what comes before NUM_PHASES, `phases` and `buckets` are rows one after the other."""
    row = array("q", (*own, len(phases) // PHASE_LENGTH, len(buckets) // BUCKET_LENGTH))
    row.extend(phases)
    row.extend(buckets)
    return row


def phase_begin(phase: int) -> int:
    """The index in a row of the begin of its n-th phase."""
    return STEP_LENGTH + PHASE_LENGTH * phase + 1


def bucket_start(num_phases: int, bucket: int) -> int:
    """The index in a row at which its n-th bucket begins."""
    return STEP_LENGTH + PHASE_LENGTH * num_phases + BUCKET_LENGTH * bucket


def encode(step: StepRecord) -> array[int]:
    """A step as a row of integers."""
    phases = [number for each in step.phases for number in (each.phase, each.begin)]
    buckets: list[int] = []
    for b in step.buckets:
        buckets += (b.index, b.num_bytes, b.ready, b.packed, b.launched, b.started, b.reduced)
    return step_row([getattr(step, name) for name in _OWN], phases, buckets)


def decode(numbers: Sequence[int]) -> StepRecord:
    """The step that `encode` has made these integers of. Raises ValueError if there are too few or too many."""
    if len(numbers) < STEP_LENGTH:
        raise ValueError("a step is cut short")
    *own, num_phases, num_buckets = numbers[:STEP_LENGTH]
    if min(num_phases, num_buckets) < 0 or len(numbers) != bucket_start(num_phases, num_buckets):
        raise ValueError("a step is cut short")
    first_bucket = bucket_start(num_phases, 0)
    starts = [*numbers[phase_begin(0) : first_bucket : PHASE_LENGTH], numbers[END]]
    kinds = numbers[STEP_LENGTH:first_bucket:PHASE_LENGTH]
    phases = tuple(PhaseRecord(Phase(kind), starts[i], starts[i + 1]) for i, kind in enumerate(kinds))
    buckets = tuple(
        BucketRecord(*numbers[i : i + BUCKET_LENGTH]) for i in range(first_bucket, len(numbers), BUCKET_LENGTH)
    )
    return StepRecord(phases=phases, buckets=buckets, **dict(zip(_OWN, own, strict=True)))
