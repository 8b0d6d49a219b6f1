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
from typing import Literal

from torchring.observe.recorder.records import RunInfo
from torchring.report.model.buckets import Bandwidth, BucketSummary, LateParameter
from torchring.report.model.lanes import MedianStep, Series
from torchring.report.model.network import Network
from torchring.report.model.phases import Phase
from torchring.report.model.ranks import RankSummary, StartUp
from torchring.report.model.scaling import Prediction
from torchring.report.model.timing import Spread
from torchring.report.model.waits import Wait

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


def share_in_words(share: float) -> str:
    """A share, from 0 to 1, in a sentence: "42 %"."""
    return f"{100 * share:.0f} %"
