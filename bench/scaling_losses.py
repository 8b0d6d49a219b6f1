"""Where the speed of N ranks is lost, from the step times of six runs. Pure arithmetic.

                       batches from the DataLoader     the first batch again and again
    N ranks            given                           synthetic
    N ranks, silent    silent                          compute
    1 rank             one                             ideal

"silent" ranks do not exchange gradients. Between `ideal` and `given` a step gets longer for four reasons:

    interference     compute of a typical rank - ideal: N ranks on one machine share its memory and its cores
    stragglers       compute of the slowest rank - compute of a typical rank; and, where another rank is the slowest in
                     each step, what it costs to wait for it: the mean of the slowest steps of compute - compute of the
                     slowest rank, but not more than ranks take longer that exchange gradients
    communication    given - silent, and synthetic - compute: the mean of both differences, without that cost
    input            given - synthetic, and silent - compute: the mean of both differences

The four add up to `given - ideal`. The two differences of a pair are not the same where input and communication hide
each other: while ranks wait for gradients, workers load the next batch. What a remedy would gain at once is the first
difference of the pair.

Ranks are compared by the time that a rank takes for a sample. So a script may give each rank the same batch as one rank
alone, or divide a batch among the ranks. Times are stated for the batch that a rank has in `given`.

Example, in ms: given 12, synthetic 9, silent 9, compute 7 (typical rank 6.5; slowest in each step 8), ideal 6.
Interference 0.5, stragglers 0.5 + 1, communication 2.5 - 1, input 2.5: in all 6, which is 12 - 6. Half of the ideal
speed is lost.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from torchring.bench.measure import Spread
from torchring.observe.recorder.records import RankTrace

NEGLIGIBLE: Final = 0.03  # of a step
GIVEN, SYNTHETIC, SILENT, COMPUTE, ONE, IDEAL = "given", "synthetic", "silent", "compute", "one", "ideal"
INPUT, COMMUNICATION = "input", "communication"
INTERFERENCE, STRAGGLERS = "interference", "stragglers"

_REMEDIES: Final = {
    INPUT: "give the DataLoader more workers (num_workers), or let it do less for each sample",
    COMMUNICATION: "send less (compression='bf16', accumulate), or over a faster network",
    INTERFERENCE: "ranks of one machine share its memory and its cores: try fewer ranks or fewer threads for each "
    "(OMP_NUM_THREADS), pinned to cores of their own",
    STRAGGLERS: "a rank is slower than the others, or batches differ in length: a trace (torchring run --trace) shows "
    "which rank the others wait for",
}


@dataclass(frozen=True)
class Stretches:
    """One run, in stretches of some steps.

    A DataLoader with workers gives its batches in bursts. So a stretch counts with the mean of its steps.

    Attributes:
        step_ms: for each stretch, the mean step of the slowest rank.
        typical_ms: for each stretch, the mean step of all ranks.
        in_step_ms: for each stretch, the mean of the slowest step: each step counts as on the rank that is slowest in
            it. On a GPU the same as `step_ms`: the host runs ahead there, and single steps say nothing.
        num_samples: in a step of one rank, mean; 0 if unknown.
        num_steps: that were counted.
    """

    step_ms: tuple[float, ...]
    typical_ms: tuple[float, ...]
    in_step_ms: tuple[float, ...]
    num_samples: float
    num_steps: int


def stretches(traces: Sequence[RankTrace], num_warm_up: int, num_in_stretch: int) -> Stretches:
    """Cut a run into stretches.

    Args:
        traces: of all ranks.
        num_warm_up: steps at the beginning that do not count.
        num_in_stretch: steps in a stretch. A shorter rest counts only if there is nothing else.
    """
    counted = [[step for step in trace.steps if step.number >= num_warm_up] for trace in traces]
    num_steps = min(map(len, counted))
    periods = [[(step.end - step.begin) / 1e6 for step in steps[:num_steps]] for steps in counted]
    on_host = all(trace.about.device == "cpu" for trace in traces)
    slowest, typical, in_step = [], [], []
    length = min(num_in_stretch, num_steps)
    for start in range(0, num_steps - length + 1, length) if length else ():
        parts = [rank[start : start + length] for rank in periods]
        means = list(map(statistics.fmean, parts))
        slowest.append(max(means))
        typical.append(statistics.fmean(means))
        in_step.append(statistics.fmean(map(max, zip(*parts, strict=True))) if on_host else max(means))
    samples = [step.num_samples for steps in counted for step in steps[:num_steps]]
    num_samples = statistics.fmean(samples) if samples and all(samples) else 0.0
    return Stretches(tuple(slowest), tuple(typical), tuple(in_step), num_samples, num_steps)


@dataclass(frozen=True)
class Measured:
    """All runs of one condition.

    Attributes:
        num_ranks: that trained.
        step: of the slowest rank, over all stretches.
        typical_ms: step of a typical rank, the median over all stretches.
        in_step_ms: the slowest step, the median over all stretches; see `Stretches`.
        num_samples: in a step of one rank; 0 if unknown.
        num_steps: that were counted, in all runs.
    """

    num_ranks: int
    step: Spread
    typical_ms: float
    in_step_ms: float
    num_samples: float
    num_steps: int

    @staticmethod
    def of(num_ranks: int, runs: Sequence[Stretches]) -> Measured:
        samples = [run.num_samples for run in runs]
        return Measured(
            num_ranks,
            Spread.of([ms / 1e3 for run in runs for ms in run.step_ms]),
            statistics.median(ms for run in runs for ms in run.typical_ms),
            statistics.median(ms for run in runs for ms in run.in_step_ms),
            statistics.fmean(samples) if all(samples) else 0.0,
            sum(run.num_steps for run in runs),
        )

    @property
    def samples_per_s(self) -> float:
        """Of all ranks together; 0 if unknown."""
        return 1e3 * self.num_ranks * self.num_samples / self.step.p50

    def factor_to(self, other: Measured) -> float:
        """By which times are multiplied to be those of as many samples as a rank of `other` has."""
        return other.num_samples / self.num_samples if self.num_samples and other.num_samples else 1.0


@dataclass(frozen=True)
class Losses:
    """Why a step of N ranks takes longer than the ideal step. Milliseconds.

    Attributes:
        num_ranks: N.
        step_ms: of the script as given, on N ranks.
        ideal_ms: of one rank that only computes, for as many samples.
        lost_ms: by reason; adds up to `step_ms - ideal_ms`. Noise can make it negative.
        gain_ms: by reason, how much shorter a step would be without it, and with all else as it is.
        speed_up: samples per second of N ranks, divided by those of one rank, both as given.
        lost_alone: part of a step that one rank loses to input.
        divides_batch: whether a rank of N has fewer samples than one rank alone.
    """

    num_ranks: int
    step_ms: float
    ideal_ms: float
    lost_ms: dict[str, float]
    gain_ms: dict[str, float]
    speed_up: float
    lost_alone: float
    divides_batch: bool

    @property
    def efficiency(self) -> float:
        """Part of the ideal speed that is reached."""
        return self.ideal_ms / self.step_ms


def losses_of(measured: Mapping[str, Measured]) -> Losses:
    """What was lost, from the six conditions by name."""
    given = measured[GIVEN]
    factor = {name: each.factor_to(given) for name, each in measured.items()}
    ms = {name: each.step.p50 * factor[name] for name, each in measured.items()}
    typical = measured[COMPUTE].typical_ms * factor[COMPUTE]
    waits_in_step = measured[COMPUTE].in_step_ms * factor[COMPUTE] - ms[COMPUTE]
    exchange = (ms[GIVEN] - ms[SILENT] + ms[SYNTHETIC] - ms[COMPUTE]) / 2
    waits_in_step = min(waits_in_step, max(0.0, exchange))
    lost = {
        INPUT: (ms[GIVEN] - ms[SYNTHETIC] + ms[SILENT] - ms[COMPUTE]) / 2,
        COMMUNICATION: exchange - waits_in_step,
        INTERFERENCE: typical - ms[IDEAL],
        STRAGGLERS: ms[COMPUTE] - typical + waits_in_step,
    }
    gains = lost | {INPUT: ms[GIVEN] - ms[SYNTHETIC], COMMUNICATION: ms[GIVEN] - ms[SILENT] - waits_in_step}
    return Losses(
        given.num_ranks,
        ms[GIVEN],
        ms[IDEAL],
        lost,
        gains,
        given.num_ranks * ms[ONE] / ms[GIVEN],
        1 - ms[IDEAL] / ms[ONE],
        given.num_samples < 0.9 * measured[ONE].num_samples,
    )


def in_words(losses: Losses, turns: Sequence[Losses]) -> list[str]:
    """The result in sentences: how fast, what is lost, what to attack first, and how sure that is.

    Args:
        losses: from all runs.
        turns: from the runs of each turn alone.
    """
    n, step = losses.num_ranks, losses.step_ms
    parts = {reason: ms / step for reason, ms in losses.lost_ms.items()}
    named = [f"{part:.0%} to {reason}" for reason, part in _largest_first(parts) if part >= 0.005]
    loss = f": {', '.join(named).replace(' to ', ' is lost to ', 1)}" if named else ""
    lines = [
        f"{n} ranks give {losses.speed_up:.2f} times the speed of one (ideal {n}).",
        f"They reach {losses.efficiency:.0%} of the speed of {n} ranks that only compute, each as one alone{loss}.",
    ]
    if losses.lost_alone >= NEGLIGIBLE:
        lines.append(f"One rank alone loses {losses.lost_alone:.0%} to input, too.")
    if losses.divides_batch:
        lines.append("A rank of several has a smaller batch than one alone; what that costs counts as interference.")
    reason, gain = _largest_first(losses.gain_ms)[0]
    gains = [turn.gain_ms[reason] for turn in turns]
    noise = max(gains) - min(gains)
    if gain < NEGLIGIBLE * step:
        lines.append(f"Nothing stands out: no single loss is {NEGLIGIBLE:.0%} of a step.")
    elif noise >= gain:
        lines.append(
            f"What to attack first is not certain: {reason} seems to cost {gain / step:.0%} of a step, but turns "
            f"differ by {noise / step:.0%}. Stop what else runs on the machine, or give more --turns."
        )
    else:
        faster = step / max(step - gain, losses.ideal_ms)  # noise may have made another loss negative
        lines.append(f"Attack {reason} first: without it, {n} ranks are {faster:.2f} times as fast. {_remedy(reason)}.")
    return lines


def _largest_first(values: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(values.items(), key=lambda item: -item[1])


def _remedy(reason: str) -> str:
    text = _REMEDIES[reason]
    return text[0].upper() + text[1:]
