"""The analysis of a job as plain data. `analysis.analyse` makes it; the terminal and the page show it.

Durations are milliseconds. Every measured number is a `Spread` over the steps that count. The first steps of a job do
not, because buckets are laid out anew after the first reduction, and memory is touched for the first time. Nor do steps
with a pause, see `pauses.py`.

What phases cost is told as a mean. Means add up to the mean step, and medians do not: a loader with four workers may
keep a rank waiting in each fourth step only, of which the median shows nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from torchring.observe.recorder.records import RunInfo
from torchring.observer import Phase
from torchring.report.model.buckets import Bandwidth, BucketSummary, LateParameter
from torchring.report.model.lanes import MedianStep, Series
from torchring.report.model.network import Network
from torchring.report.model.ranks import RankSummary, StartUp
from torchring.report.model.scaling import Prediction
from torchring.report.model.timing import Spread
from torchring.report.model.waits import RankWait, together

NOTICEABLE_WAIT: Final = 0.005  # of a step
Kind = Literal["input", "compute", "communication", "straggler", "optimizer", "cores", "start-up"]


@dataclass(frozen=True)
class Verdict:
    """What bounds the job.

    `detail` may say more than `kind`: "small buckets", "late parameter" or "slow link" for "communication"; "pauses"
    for a cost of few steps; "jitter" for a "straggler" without a rank; "between" for an "optimizer" that waits for
    clipping or logging; "other code" for an "input" of which a DataLoader takes little; "forward or data" for a
    "compute" of which these two take much, if the trace does not tell them apart.
    """

    kind: Kind
    rank: int | None  # the rank to blame; None if no single rank is
    share: float  # of the time of all steps, from 0 to 1; of the whole run for "start-up"
    cost: Spread  # of each step; for "pauses" of each step with a pause; for "start-up" seconds of the run
    sentence: str  # with share, duration and spread; behind a sentence about an error, if the job ended with one
    detail: str = ""
    steps: tuple[int, int] | None = None  # the first and the last step that this is about; None: all


@dataclass(frozen=True)
class Advice:
    """Something that would make the job faster."""

    what: str  # an instruction in a few words, without a full stop
    predicted_ms: float  # duration of a step afterwards
    saves_share: float  # share of the time that a sample takes now, from 0 to 1
    why: str  # sentences
    how: str  # a line of code or of shell, or one sentence


@dataclass(frozen=True)
class Analysis:
    """All that the report says."""

    # The job
    run_info: RunInfo  # of the lowest rank that has a trace
    size: int  # number of ranks, whether they have a trace or not
    num_steps: int  # steps that count
    num_left_out: int  # steps at the beginning of the trace that do not count
    has_enough_steps: bool  # for advice and predictions
    is_forward_known: bool  # forward was told apart from input; if not, `Phase.INPUT` is both
    clock_error_ms: float | None  # times of different hosts differ by at most this; 0 on one host, None if unknown
    problems: tuple[str, ...]  # sentences: what is missing or strange
    # The answers
    verdict: Verdict
    advice: tuple[Advice, ...]  # the largest gain first
    # Time
    step: Spread  # from the end of a step to the end of the next, on the rank that the others wait for
    path: Mapping[Phase, Spread]  # phases of that rank, which alone determines how long a step takes
    steps_per_s: float  # this and `samples_per_s` count steps with a pause, too
    samples_per_s: float | None  # of all ranks together; None if unknown
    efficiency: float  # share of a step in which ranks compute, from 0 to 1: the speed-up is this times `size`
    ranks: tuple[RankSummary, ...]  # by rank
    waits: tuple[RankWait, ...]  # the longest first
    start_up: StartUp | None
    median_step: MedianStep
    series: Series
    # Communication
    buckets: tuple[BucketSummary, ...]  # in plan order; empty if nothing was reduced
    late_parameters: tuple[LateParameter, ...]  # the worst first
    bandwidth: Bandwidth | None  # None if nothing was reduced
    network: Network | None  # fitted to the buckets, or given; None if nothing was reduced and none was given
    is_network_given: bool  # on the command line
    # More ranks
    predictions: tuple[Prediction, ...]  # for 2 to 1,024 ranks; empty without a network
    batch_note: str  # one sentence: whether a larger batch still pays; "" if that is unknown
    predictions_note: str  # one sentence: which network, algorithm and hosts the predictions assume; "" without any
    # From this bandwidth on, less than 1 % of a step is exposed communication. 0: with any bandwidth. None: with none,
    # because latency alone is more, or the network is unknown.
    hiding_gigabytes_per_s: float | None

    @property
    def phases(self) -> list[Phase]:
        """The phases that some rank spends time in, in the order of a step."""
        return [phase for phase in Phase if any(rank.phases[phase].mean > 0 for rank in self.ranks)]

    @property
    def long_waits(self) -> list[tuple[str, RankWait]]:
        """Waits for each rank that cost at least 0.5 % of a step, and who waits, in words; the longest first."""
        least = NOTICEABLE_WAIT * self.step.mean
        return [(who, wait) for who, wait in together(self.waits) if wait.mean_ms >= least]
