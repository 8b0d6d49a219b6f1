"""Time of each rank in a step, and of the job to start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torchring.observer import Phase
from torchring.report.model import waits
from torchring.report.model.merge import Job
from torchring.report.model.timing import Array, Spread, Steps, spread
from torchring.report.model.waits import Critical


@dataclass(frozen=True)
class RankSummary:
    """One rank."""

    rank: int
    host: str
    step: Spread
    phases: Mapping[Phase, Spread]  # means add up to the mean of `step`
    is_last_share: float  # share of the steps in which the others wait for this rank
    queued: Spread | None  # time in all phases without a core, though ready to run; None if unknown


@dataclass(frozen=True)
class StartUp:
    """From the start of the process until the end of the first step, on the slowest rank."""

    seconds: float  # until `wrap` returned, if the first step is unknown
    run_s: float  # from the start of the process until the last step of the trace

    @property
    def share(self) -> float:
        """From 0 to 1."""
        return self.seconds / self.run_s


def summarise_ranks(job: Job, timing: Steps, critical: Critical) -> tuple[RankSummary, ...]:
    counts = timing.counts
    durations = (timing.end - timing.begin)[counts]
    return tuple(
        RankSummary(
            trace.run_info.rank,
            trace.run_info.host,
            spread(durations[:, i]),
            waits.spread_by_phase(critical.phases[counts][:, i]),
            waits.is_last_share(timing, critical, i),
            spread(timing.queued[counts][:, i]) if (timing.queued[counts][:, i] >= 0).all() else None,
        )
        for i, trace in enumerate(job.traces)
    )


def find_start_up(job: Job) -> StartUp | None:
    """The start of the slowest rank; None if no rank recorded it."""
    found = []
    for trace in job.traces:
        run_info, first, last = trace.run_info, trace.steps[0], trace.steps[-1]
        if not run_info.process_began or not run_info.wrapped:
            continue
        until = run_info.wrapped if first.number else first.end
        if last.end > run_info.process_began:
            found.append(StartUp(*((at - run_info.process_began) / 1e9 for at in (until, last.end))))
    return max(found, key=lambda each: each.share, default=None)


def per_second(values: Array, timing: Steps) -> float:
    """Sum of `values` ([S, R] or [S, 1]) over the steps that count, divided by their time; 0 if unknown on a rank."""
    counted, seconds = values[timing.counts].sum(0), timing.counted_ms / 1e3
    return float(counted.sum() / seconds) if counted.all() and seconds > 0 else 0.0
