"""What the report says about a job, as plain data. `analysis.analyse` makes it; the terminal and the page show it.

Durations are milliseconds. Every measured number is a `Spread` over the steps that count. The first steps of a job do
not, because buckets are laid out anew after the first reduction, and memory is touched for the first time. Nor do steps
with a pause, see `pauses.py`.

What phases cost is told as a mean. Means add up to the mean step, and medians do not: a loader with four workers may
keep a rank waiting in each fourth step only, of which the median shows nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Literal

from torchring.observe.recorder.records import RunInfo


@dataclass(frozen=True)
class Spread:
    """A number that was measured many times.

    Attributes:
        mean: sum of the measurements, divided by their number.
        median: half of the measurements are below.
        low, high: a fifth of the measurements are below `low`, a fifth above `high`.
        unit: "ms", "s" or "GB/s".
    """

    mean: float
    median: float
    low: float
    high: float
    unit: str = "ms"


class Phase(str, Enum):
    """What a rank does in a step. The phases of a step add up to its duration.

    INPUT, FORWARD, BETWEEN, OPTIMIZER: as `torchring.observe.phases.Phase`.
    BACKWARD: without the time in which communication kept it waiting.
    WAITING: communication cannot go on, because another rank is late.
    COMMUNICATION: the rank stands still while gradients are being reduced; all ranks are there.
    """

    INPUT = "input"
    FORWARD = "forward"
    BACKWARD = "backward"
    WAITING = "waiting for a rank"
    COMMUNICATION = "communication"
    BETWEEN = "between backward and step"
    OPTIMIZER = "optimizer"


Kind = Literal["input", "compute", "communication", "straggler", "optimizer", "cores", "start-up"]


@dataclass(frozen=True)
class Verdict:
    """What bounds the job.

    Attributes:
        kind: see above.
        rank: the rank that is to blame; None if no single rank is.
        share: of the time of all steps, from 0 to 1. For "start-up": of the whole run. For "compute": what the ranks
            compute.
        cost: how long that takes, of each step; for "start-up" in seconds of the run.
        sentence: one sentence for people, with share, duration and spread. If the job ended with an error, a sentence
            about that comes first.
        detail: "" or more exactly what it is: "small buckets", "late parameter" or "slow link" for "communication";
            "pauses" for what is long in a few steps only, where `cost` is that of each such step; "jitter" for a
            "straggler" without a rank; "between" for an "optimizer" that waits for clipping or logging; "other code"
            for an "input" of which a DataLoader takes little; "forward or data" for a "compute" of which these two,
            which the trace does not tell apart, take much.
        steps: number of the first and of the last step that this is about; None if it is about all.
    """

    kind: Kind
    rank: int | None
    share: float
    cost: Spread
    sentence: str
    detail: str = ""
    steps: tuple[int, int] | None = None


@dataclass(frozen=True)
class Advice:
    """Something that would make the job faster.

    Attributes:
        what: as an instruction, a few words, without a full stop at the end.
        predicted_ms: duration of a step afterwards.
        saves_share: of the time that a sample takes now, from 0 to 1. Mostly that is the share of a step; with fewer
            ranks, a step has fewer samples.
        why: sentences.
        how: a line of code or of shell, or one sentence.
    """

    what: str
    predicted_ms: float
    saves_share: float
    why: str
    how: str


@dataclass(frozen=True)
class RankSummary:
    """One rank.

    Attributes:
        phases: of a step. Their means add up to the mean of `step`.
        packing: of `phases[BACKWARD]` and `phases[COMMUNICATION]`, copies of gradients to wire buffers.
        stall: inside backward, how long buckets that were being reduced kept it waiting.
        is_last_share: in which share of the steps the others wait for this rank.
        queued: of all phases, how long the rank was ready to run, but had no core; None if that is unknown.
    """

    rank: int
    host: str
    node_rank: int
    step: Spread
    phases: Mapping[Phase, Spread]
    packing: Spread
    stall: Spread
    is_last_share: float
    queued: Spread | None


@dataclass(frozen=True)
class Wait:
    """How long `waiting` waits for `awaited`, of each step. Pairs that never wait are left out.

    Attributes:
        mean_ms: over all steps, those without a wait included.
        share: of the steps that have such a wait.
        cost: over the steps that have such a wait.
    """

    waiting: int
    awaited: int
    mean_ms: float
    share: float
    cost: Spread


@dataclass(frozen=True)
class BucketSummary:
    """One bucket.

    Attributes:
        index: number in the plan; the model's buffers have the number after the last one.
        num_bytes: that one rank contributes, after compression.
        names: of its parameters; empty if unknown, and for the model's buffers.
        ready: from the beginning of the (last) backward to the last gradient, on the slowest rank.
        reducing: from when the last rank has launched it, and the bucket before it is reduced, until it is reduced.
        exposed: how much of `reducing` is behind the end of backward on the last rank.
        bus_bandwidth: 2 (N - 1) / N bytes / `reducing`, in GB/s of 10**9 bytes.
        last_rank: the rank that launches this bucket last in most steps.
    """

    index: int
    num_bytes: int
    names: tuple[str, ...]
    ready: Spread
    reducing: Spread
    exposed: Spread
    bus_bandwidth: Spread
    last_rank: int


@dataclass(frozen=True)
class LateParameter:
    """A parameter that keeps its bucket waiting, or that is so large that nothing hides its reduction.

    Attributes:
        bucket: its number.
        num_bytes: of the gradient.
        ready_share: at which share of backward its gradient is there, from 0 to 1.
        holds_ms: for how long it was the only one of its bucket that was not ready. 0 if it is alone in its bucket.
        exposed_ms: how much of the reduction of its bucket is behind the end of backward.
        why: one sentence.
    """

    name: str
    bucket: int
    num_bytes: int
    ready_share: float
    holds_ms: float
    exposed_ms: float
    why: str


@dataclass(frozen=True)
class Bandwidth:
    """What an algorithm achieved between ranks.

    Attributes:
        path: "within a host" or "between hosts".
        bus: over all buckets of a step, weighted by bytes.
        best: the bucket with the highest median.
        doctor: GB/s that `torchring doctor` has found on this path; None if it was not asked.
    """

    algorithm: str
    path: str
    bus: Spread
    best: Spread
    doctor: float | None = None


@dataclass(frozen=True)
class Network:
    """How long a message takes: alpha_ms + bytes / bandwidth (Thakur, Rabenseifner and Gropp 2005).

    Attributes:
        alpha_ms: latency of one message. A ring of N ranks sends 2 (N - 1) messages one after the other.
        gigabytes_per_s: of 10**9 bytes.
        is_alpha_known: False if all buckets have about the same size, so that latency cannot be told from bandwidth.
        is_least: whether the bandwidth was not measured, and is known to be at least that.
    """

    alpha_ms: float
    gigabytes_per_s: float
    is_alpha_known: bool = True
    is_least: bool = False


@dataclass(frozen=True)
class Prediction:
    """A step with another number of ranks, each with the batch that it has now.

    Attributes:
        exposed_ms: communication that backward does not hide.
        waiting_ms: for the slowest of so many ranks, beyond the mean rank.
        efficiency: step of one rank alone / step_ms, from 0 to 1.
    """

    num_ranks: int
    step_ms: float
    exposed_ms: float
    waiting_ms: float
    efficiency: float


@dataclass(frozen=True)
class StartUp:
    """From the start of the processes to the first step, on the slowest rank. Seconds; None if unknown.

    Attributes:
        until_wrapped_s: from the start of the process until `wrap` returned: imports, model, data, meeting the others.
        until_first_step_s: from then until the end of the first step.
        run_s: from the start of the process until the last step of the trace.
        share: of both in `run_s`, from 0 to 1.
    """

    until_wrapped_s: float
    until_first_step_s: float | None
    run_s: float
    share: float


@dataclass(frozen=True)
class LaneSpan:
    """What a rank does in the median step. Milliseconds from the beginning of the step on the first rank."""

    rank: int
    phase: Phase
    begin_ms: float
    end_ms: float


@dataclass(frozen=True)
class LaneBucket:
    """A bucket of one rank in the median step. Milliseconds from the beginning of the step on the first rank.

    Attributes:
        ready_ms, packed_ms, launched_ms, started_ms, reduced_ms: as `BucketRecord`.
        all_launched_ms: the last rank has launched it. Until then, the bucket waits for `last_rank`.
    """

    rank: int
    index: int
    num_bytes: int
    ready_ms: float
    packed_ms: float
    launched_ms: float
    all_launched_ms: float
    started_ms: float
    reduced_ms: float
    last_rank: int


@dataclass(frozen=True)
class MedianStep:
    """The step whose duration is nearest to the median, in lanes: one lane for a rank, one for its buckets."""

    number: int
    duration_ms: float
    spans: tuple[LaneSpan, ...]
    buckets: tuple[LaneBucket, ...]


@dataclass(frozen=True)
class Series:
    """Phases over time, at most 300 points. A point is the mean of neighbouring steps. The first steps are included.

    Attributes:
        numbers: the first step of each point.
        seconds: from the first step of the trace to the beginning of each point.
        num_steps_per_point: how many steps a point stands for.
        phases: by rank and phase, milliseconds a step.
    """

    numbers: tuple[int, ...]
    seconds: tuple[float, ...]
    num_steps_per_point: int
    phases: Mapping[int, Mapping[Phase, tuple[float, ...]]]


@dataclass(frozen=True)
class Analysis:
    """All that the report says.

    Attributes:
        about: of the lowest rank that has a trace.
        size: number of ranks of the job, whether they have a trace or not.
        num_steps: how many steps count.
        num_left_out: how many steps at the beginning of the trace do not.
        has_enough_steps: for advice and predictions.
        is_forward_known: whether forward was told apart from input. If not, `Phase.INPUT` is both.
        clock_error_ms: by how much times of different hosts may differ, at most; 0 on one host, None if unknown.
        problems: what is missing or strange, sentences.
        advice: the largest gain first.
        step: from the end of a step to the end of the next, on the rank that the others wait for.
        path: phases of the rank that the others wait for. Nothing else determines how long a step takes.
        steps_per_s: number of steps, divided by the time that they took, with those that have a pause.
        samples_per_s: of all ranks together, in the same way; None if unknown.
        efficiency: what ranks compute / duration of a step, from 0 to 1: the speed-up is this times `size`.
        ranks: by rank.
        waits: the longest first.
        buckets: in the order of the plan; empty if nothing was reduced.
        late_parameters: the worst first.
        network: fitted to the buckets, or given; None if nothing was reduced and none was given.
        is_network_given: whether the bandwidth was given on the command line.
        predictions: for 2 ... 1,024 ranks; empty without a network.
        predictions_note: which network, algorithm and hosts the predictions assume, one sentence; "" without any.
        hiding_gigabytes_per_s: from which bandwidth on less than 1 % of a step is exposed communication; None if
            latency alone is more, or the network is unknown. 0 if any bandwidth will do.
    """

    about: RunInfo
    size: int
    num_steps: int
    num_left_out: int
    has_enough_steps: bool
    is_forward_known: bool
    clock_error_ms: float | None
    problems: tuple[str, ...]
    verdict: Verdict
    advice: tuple[Advice, ...]
    step: Spread
    path: Mapping[Phase, Spread]
    steps_per_s: float
    samples_per_s: float | None
    efficiency: float
    ranks: tuple[RankSummary, ...]
    waits: tuple[Wait, ...]
    buckets: tuple[BucketSummary, ...]
    late_parameters: tuple[LateParameter, ...]
    bandwidths: tuple[Bandwidth, ...]
    network: Network | None
    is_network_given: bool
    predictions: tuple[Prediction, ...]
    predictions_note: str
    hiding_gigabytes_per_s: float | None
    start_up: StartUp | None
    median_step: MedianStep
    series: Series
