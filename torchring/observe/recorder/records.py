"""What a rank records about each step. Plain data.

Times are nanoseconds of CLOCK_MONOTONIC (`time.perf_counter_ns`), a clock that all processes of a host share. Clocks of
different hosts are compared by `ClockOffset`.

A step goes from the end of one `optimizer.step()` to the end of the next. It consists of phases, without gaps:

      begin                                                                                               end
      | INPUT      | FORWARD | BACKWARD                        | EXPOSED      | BETWEEN  | OPTIMIZER          |
        next batch   model     loss, gradients                   last buckets   clipping   step()
                                  bucket 0    |launched|reduced|
                                  bucket 1           |launched        |reduced|

While training runs, a step is a row of integers: thirteen of its own, then two for each phase (which, begin), then
seven for each bucket. Their order is that of the constants below, and of the attributes of `StepRecord` and
`BucketRecord`. A thousand rows take no time of the garbage collector.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final, NamedTuple

from torchring.observer import Phase

STEP_LENGTH: Final = 13  # without phases and buckets
NUMBER, BEGIN, END, NUM_SAMPLES, STALL_NS, PACKING_NS, LOADING_NS = range(7)
LOADING_CPU_NS, NUM_WORKERS, QUEUED_NS, EXPOSED_QUEUED_NS, NUM_PHASES, NUM_BUCKETS = range(7, STEP_LENGTH)
PHASE_LENGTH: Final = 2
BUCKET_LENGTH: Final = 7
INDEX, NUM_BYTES, READY, LAUNCHED, STARTED, REDUCED, OPTIMIZER = range(BUCKET_LENGTH)
ENDED_WELL: Final = ("", "end")  # see `RunInfo.ended_by`


@dataclass(frozen=True)
class BucketRecord:
    """One bucket in one step.

    On a GPU, `ready`, `launched` and `started` are when the GPU has begun to reduce the bucket.
    """

    index: int  # number of the bucket in its plan; the model's buffers, which travel last, have the number after it
    num_bytes: int  # that this rank contributes, after compression
    ready: int  # the last gradient of the bucket has been computed
    launched: int  # the bucket has left: it is packed, and so are all buckets before it
    # The reduction has begun to work on it, on a thread that may have been busy until then. With overlap="inline": this
    # rank has begun to do its part, in a call between gradients or at the end.
    started: int
    # The result is there. With overlap="inline": this rank has done its part. The result is there when all have.
    reduced: int
    optimizer: int = 0  # number of its optimizer, as in `ParameterRecord`


@dataclass(frozen=True)
class PhaseRecord:
    phase: Phase
    begin: int
    end: int


@dataclass(frozen=True)
class StepRecord:
    number: int  # how many steps this rank had made before it
    begin: int
    end: int
    num_samples: int  # length of the first dimension of what forward was given, over all micro-steps; 0 if unknown
    stall_ns: int  # inside BACKWARD, how long buckets that were being reduced kept backward waiting; 0 on a GPU
    packing_ns: int  # inside BACKWARD and EXPOSED, how long gradients were copied to wire buffers; 0 on a GPU
    phases: tuple[PhaseRecord, ...]  # in order, without gaps, from `begin` to `end`
    buckets: tuple[BucketRecord, ...]  # in the order in which they left. Empty if nothing was reduced.
    loading_ns: int = 0  # how long this rank was in `next()` of a DataLoader, inside INPUT
    loading_cpu_ns: int = -1  # how long cores worked for it: this thread in `next()`, and the workers; -1 if unknown
    num_workers: int = -1  # of the DataLoader that gave the last batch; -1 if none gave one
    queued_ns: int = -1  # how long the thread that trains was ready to run, but had no core; -1 if unknown
    exposed_queued_ns: int = -1  # the same, inside EXPOSED; -1 on a GPU, too

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


_OWN: Final = [each.name for each in fields(StepRecord) if each.name not in ("phases", "buckets")]  # as in a row


class Arrivals(NamedTuple):
    """When the gradients of one optimizer were computed, in a backward. Without what communication and copies took."""

    backward_ns: int  # from the end of forward to the last gradient
    ready_ns: tuple[int, ...]  # from the end of forward to the gradient of each of its parameters; -1 if there was none
    optimizer: int = 0  # its number, as in `ParameterRecord`


class ClockOffset(NamedTuple):
    """How far the clock of a host is ahead of that of rank 0's host."""

    at: int  # when this was measured, on this rank's clock
    offset_ns: int  # subtract from this rank's times to get times of rank 0's clock
    error_ns: int  # the true offset differs by this at most. 0 on rank 0's host.


class ParameterRecord(NamedTuple):
    """A parameter that is reduced."""

    name: str
    num_bytes: int
    bucket: int  # -1 if its gradient is sparse
    dtype: str = "float32"
    optimizer: int = 0  # which one: numbers are given in the order of wrapping


@dataclass(frozen=True)
class RunInfo:
    """What was run: the process, its host, and how the optimizer was wrapped."""

    # In the world
    run: str = ""  # the same on all its ranks, and no other world has it
    rank: int = 0
    size: int = 1
    local_size: int = 1
    node_rank: int = 0  # number of the host among the hosts of the world
    # The process
    host: str = ""
    pid: int = 0
    device: str = "cpu"  # or name of the GPU
    num_cores: int = 1  # that the ranks of the host may use together
    num_threads: int = 1  # of torch
    # The optimizer that was wrapped last
    algorithm: str = "none"  # this, `reason` and `overlap`: see `Stats`
    reason: str = ""
    overlap: str = "inline"
    batch_size: float = 0.0  # samples of all ranks in a reduction; 0 if unknown
    noise_scale: float = -1.0  # of gradients, in samples; infinite if noise hides the gradient, -1 if unknown
    compression_error: dict[str, float] = field(default_factory=dict)  # see `Stats`
    is_compiled: bool = False  # torch.compile has compiled something
    options: dict[str, str] = field(default_factory=dict)  # other arguments of `wrap`, by name, as text
    parameters: tuple[ParameterRecord, ...] = ()  # of one optimizer after the other, in the order of registration
    # of optimizers in groups of ranks, by number: "ranks", and "algorithm", "overlap", "options" and "clock" as here
    groups: dict[str, dict[str, Any]] = field(default_factory=dict)
    host_ranks: int = 0  # of the job on this host, where `local_size` is that of a group
    # The trace
    versions: dict[str, str] = field(default_factory=dict)  # of "torchring", "torch" and "python"
    ended_by: str = "end"  # or the text of an error; "" if the rank goes on, and these are its last steps only
    written_at: float = 0.0  # seconds since 1970


@dataclass(frozen=True)
class RankTrace:
    """All that one rank has recorded."""

    run_info: RunInfo
    # The last ones, in order. The first steps of a job are special: buckets are laid out anew, memory is touched for
    # the first time.
    steps: tuple[StepRecord, ...] = ()
    arrivals: tuple[Arrivals, ...] = ()  # in a few backwards
    clock: tuple[ClockOffset, ...] = ()  # comparisons with the clock of rank 0's host. Empty on one host.
    # Where the script was, ten times a second: number of the step, phase, and line: "train.py:30 (loss.item())"
    samples: tuple[tuple[int, int, str], ...] = ()


def step_row(own: Sequence[int], phases: Sequence[int], buckets: Sequence[int]) -> "array[int]":
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


def decode(numbers: Sequence[int]) -> StepRecord:
    """The step of a row. Raises ValueError if there are too few or too many integers."""
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
