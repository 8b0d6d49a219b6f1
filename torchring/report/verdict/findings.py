"""The analysis of a job as plain data. `analysis.analyse` makes it, and `show` shows it.

Durations are milliseconds. Every measured number is a `Spread` over the steps that count. The first steps of a job do
not, because buckets are laid out anew after the first reduction, and memory is touched for the first time. Nor do steps
with a pause, see `pauses.py`.

What phases cost is told as a mean. Means add up to the mean step, and medians do not: a loader with four workers may
keep a rank waiting in each fourth step only, of which the median shows nothing.
"""

from dataclasses import dataclass
from typing import Final

from torchring.observe.recorder.records import RunInfo
from torchring.observer import Phase
from torchring.report.model.buckets import BucketSummary, LateParameter
from torchring.report.model.core_time import LoaderTime
from torchring.report.model.merge import Job
from torchring.report.model.scaling import Model, Prediction
from torchring.report.model.timing import Array, Spread, Steps
from torchring.report.model.waits import Critical, RankSummary, RankWait
from torchring.report.verdict.costs import Costs, Kind
from torchring.report.verdict.pauses import Pauses

NOTICEABLE_WAIT: Final = 0.005  # of a step
FEWEST_STEPS: Final = 10  # for advice and predictions


@dataclass(frozen=True)
class Verdict:
    """What bounds the job."""

    kind: Kind
    rank: int | None  # the rank to blame; None if no single rank is
    sentence: str  # with share, duration and spread; behind a sentence about an error, if the job ended with one


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
    """All that is known of a job, and what follows from it. The answers are drawn from the rest."""

    job: Job
    timing: Steps  # steps with a pause do not count
    critical: Critical
    costs: Costs
    pauses: tuple[Pauses, ...]  # the most costly first
    num_left_out: int  # steps at the beginning of the trace that do not count
    # Time
    step: Spread  # from the end of a step to the end of the next, on the rank that the others wait for
    steps_per_s: float  # this and `samples_per_s` count steps with a pause, too
    samples_per_s: float | None  # of all ranks together; None if unknown
    efficiency: float  # share of a step in which ranks compute, from 0 to 1: the speed-up is this times `size`
    backward_ms: float  # on the slowest rank
    who_has_cores: str  # while a rank has none: a clause
    loading: LoaderTime | None  # None if nothing is known of loading
    ranks: tuple[RankSummary, ...]  # by rank
    waits: tuple[RankWait, ...]  # the longest first
    median_step: int  # position of the step whose duration is nearest to the median
    # Communication
    exposed_ms: float  # in a step that has the buckets below
    buckets: tuple[BucketSummary, ...]  # in plan order; empty if nothing was reduced
    late_parameters: tuple[LateParameter, ...]  # the worst first
    model: Model
    # More ranks
    # by all steps and by parts of them, for up to 8 times the ranks; empty without a network
    predictions: tuple[tuple[Prediction, ...], ...]
    predictions_note: str  # one sentence: which network, algorithm and hosts the predictions assume; "" without any
    # The answers
    verdict: Verdict = Verdict("compute", None, "")
    problems: tuple[str, ...] = ()  # sentences: what is missing or strange
    advice: tuple[Advice, ...] = ()  # the largest gain first

    @property
    def run_info(self) -> RunInfo:
        """That of the lowest rank that has a trace."""
        return self.job.traces[0].run_info

    @property
    def size(self) -> int:
        """Number of ranks, whether they have a trace or not."""
        return self.job.size

    @property
    def num_steps(self) -> int:
        return int(self.timing.counts.sum())

    @property
    def has_enough_steps(self) -> bool:
        return len(self.job.steps) >= FEWEST_STEPS

    @property
    def cycle(self) -> Array:
        """[S, R, 7], `Critical.cycle` of the steps that count."""
        return self.critical.cycle[self.timing.counts]

    @property
    def phases(self) -> list[Phase]:
        """The phases that some rank spends time in, in the order of a step."""
        return [phase for phase in Phase if any(rank.phases[phase].mean > 0 for rank in self.ranks)]
