"""Captions of the page's sections, as plain text: how to read a section, and what it shows of this job."""

from __future__ import annotations

from statistics import median
from typing import Final

from torchring.observer import Phase
from torchring.report.model.buckets import Bandwidth
from torchring.report.show.formats import (
    mean_with_spread,
    megabytes,
    milliseconds,
    number,
    percent,
    rate,
    with_spread,
)
from torchring.report.verdict.batch import about_batch
from torchring.report.verdict.findings import NOTICEABLE_WAIT, Analysis
from torchring.report.words import NAMES

MEANINGS: Final = {
    Phase.INPUT: "from the end of a step to forward: next batch, zero_grad(), logging",
    Phase.FORWARD: "the model computes",
    Phase.BACKWARD: "loss and gradients, without stops for communication",
    Phase.WAITING: "communication cannot go on, because another rank is late",
    Phase.EXPOSED: "exposed: the rank stands still while gradients are reduced",
    Phase.BETWEEN: "clipping, unscaling, logging",
    Phase.OPTIMIZER: "inside step()",
}
_NOTICEABLE: Final = 0.02  # of a step: ranks that differ by less are alike
_DRIFT: Final = 0.05  # of a step: a job that changes by less is steady


def of_verdict(analysis: Analysis) -> str:
    """The speed-up, and what brackets mean."""
    text = ""
    if analysis.size > 1:
        achieved = analysis.efficiency * analysis.size
        text = f"{analysis.size:,} ranks are as fast as {number(achieved, 10)} ranks that never wait for anything. "
        if achieved < 1:
            text += "One rank alone would be faster. "
    return text + "Numbers in brackets hold the middle three fifths of what was measured."


def of_path(analysis: Analysis) -> str:
    """Which phases make up the step."""
    largest = sorted(analysis.path.items(), key=lambda item: -item[1].mean)[:2]
    pace = "Ranks wait for each other, so the rank that comes last sets the pace: the table shows that rank. "
    pace = pace if analysis.size > 1 else ""
    named = " and ".join(f"{name_of(phase, analysis)} ({milliseconds(spread.mean)})" for phase, spread in largest)
    return f"A step takes {mean_with_spread(analysis.step)} on average. {pace}Most of it is {named}."


def name_of(phase: Phase, analysis: Analysis) -> str:
    """The name of a phase in this job."""
    return "input and forward" if phase is Phase.INPUT and not analysis.costs.is_forward_known else NAMES[phase]


def of_ranks(analysis: Analysis) -> str:
    """Where ranks differ."""
    text = "A bar for each rank, made of the means of its phases. The line at its end is the spread of a whole step. "
    if len(analysis.ranks) == 1:
        return text
    differences = []
    for phase in set(Phase) - {Phase.WAITING}:
        means = [(rank.phases[phase].mean, rank.rank) for rank in analysis.ranks]
        differences.append((max(means)[0] - min(means)[0], NAMES[phase], min(means), max(means)))
    difference, phase_name, (least, fastest), (most, slowest) = max(differences)
    if difference < _NOTICEABLE * analysis.step.mean:
        return f"{text}The ranks are alike: no phase differs by more than {milliseconds(difference)}."
    return (
        f"{text}The ranks differ most in {phase_name}: {milliseconds(least)} on rank {fastest}, "
        f"{milliseconds(most)} on rank {slowest}."
    )


def of_time(analysis: Analysis, rank: int) -> str:
    """How the job changes while it runs."""
    series = analysis.series
    totals = [sum(values) for values in zip(*series.phases[rank].values(), strict=True)]
    text = "The same phases, one rank at a time, from the first recorded step on. "
    if series.num_steps_per_point > 1:
        text += f"Each point is the mean of {series.num_steps_per_point} steps. "
    third = len(totals) // 3
    if third == 0:
        return text
    early, late = median(totals[third : 2 * third]), median(totals[-third:])  # the beginning of a job is special
    change = late / early - 1 if early else 0.0
    if abs(change) < _DRIFT:
        return f"{text}Rank {rank} is steady: about {milliseconds(late)} a step."
    word = "slower" if change > 0 else "faster"
    return f"{text}Rank {rank} becomes {word}: from {milliseconds(early)} to {milliseconds(late)} a step."


def of_waits(analysis: Analysis) -> str:
    """The rank that others wait for most."""
    if not analysis.waits:
        return "No rank waits for another one."
    longest = analysis.waits[0]
    reading = "Each row is a rank that waits, each column a rank that it waits for. "
    example = (
        f"The longest wait: rank {longest.waiting} for rank {longest.awaited}, {milliseconds(longest.mean_ms)} of each "
        "step on average."
    )
    if longest.mean_ms < NOTICEABLE_WAIT * analysis.step.mean:
        return f"{reading}Ranks hardly wait for each other. {example}"
    by_rank = {wait.awaited: 0.0 for wait in analysis.waits}
    for wait in analysis.waits:
        by_rank[wait.awaited] += wait.mean_ms
    blamed = max(by_rank, key=lambda rank: by_rank[rank])
    return f"{reading}{percent(by_rank[blamed] / sum(by_rank.values()))} of all waiting is for rank {blamed}. {example}"


def of_buckets(analysis: Analysis) -> str:
    """Which bucket is slowest, and whether reductions keep backward waiting."""
    slowest = max(analysis.buckets, key=lambda bucket: bucket.reducing.median)
    text = (
        "Gradients are reduced in buckets while backward runs. What is reduced after the end of backward is exposed: "
        f"nothing hides it. Bucket {slowest.index} ({megabytes(slowest.num_bytes)}) takes longest, "
        f"{with_spread(slowest.reducing)}"
    )
    hidden = slowest.exposed.median <= 0
    text += ", and none of that is exposed." if hidden else f", of which {with_spread(slowest.exposed)} is exposed."
    stall = max((rank.stall for rank in analysis.ranks), key=lambda spread: spread.mean)
    if stall.mean >= NOTICEABLE_WAIT * analysis.step.mean:
        text += f" Reductions inside backward keep it waiting for {mean_with_spread(stall)} of each step."
    return text


def of_lanes(analysis: Analysis) -> str:
    """How much of the reductions of that step is behind the end of backward."""
    step = analysis.median_step
    text = (
        f"Step {step.number:,} took {milliseconds(step.duration_ms)}, which is nearest to the median. For each rank, "
        "the upper lane shows what the rank does, the lower lane its buckets, each with its number. A tick marks when "
        "the last gradient of a bucket was ready. "
    )
    if not step.buckets:
        return text
    backward = max((span.end_ms for span in step.spans if span.phase is Phase.BACKWARD), default=0.0)
    reduced = max(bucket.reduced_ms for bucket in step.buckets)
    if reduced <= backward:
        return f"{text}All buckets are reduced before the last backward ends: communication is hidden."
    return f"{text}The last bucket is reduced {milliseconds(reduced - backward)} after the last backward ends."


def of_bandwidth(analysis: Analysis) -> str:
    """The bandwidth that was achieved, and the cost of a message."""
    parts = [
        "Bus bandwidth is 2 (N − 1) / N times the bytes of a bucket, divided by the time of its reduction. For a "
        "perfect ring it is the bandwidth of the link. GB are 10⁹ bytes."
    ]
    if path := analysis.bandwidth:
        parts.append(
            f"The {path.algorithm} algorithm achieves {with_spread(path.bus)} {path.path}, and "
            f"{with_spread(path.best)} with its best bucket.{_doctor(path)}"
        )
    if analysis.network is not None:
        network = analysis.network
        latency = f"{milliseconds(network.alpha_ms)} and " if network.is_alpha_known else ""
        origin = "as given on the command line" if analysis.is_network_given else "fitted to these buckets"
        parts.append(
            f"For predictions, a message costs {latency}its bytes at {rate(network.gigabytes_per_s)}, {origin}."
        )
    return " ".join(parts)


def _doctor(path: Bandwidth) -> str:
    if path.doctor is None:
        return ""
    share = path.bus.median / path.doctor if path.doctor else 0.0
    return f" The doctor found {rate(path.doctor)} there, so the job uses {percent(share)} of it."


def of_scaling(analysis: Analysis) -> str:
    """A step with many ranks, and which network would hide communication."""
    largest = analysis.predictions[-1]
    now = next((each for each in analysis.predictions if each.num_ranks >= 2 * analysis.size), largest)
    text = (
        f"{analysis.predictions_note} Efficiency is 100% if each rank is as fast as one that trains alone. With "
        f"{now.num_ranks:,} ranks a step takes about {milliseconds(now.step_ms)} (efficiency {percent(now.efficiency)})"
    )
    if now is not largest:
        text += (
            f", with {largest.num_ranks:,} ranks about {milliseconds(largest.step_ms)} (efficiency "
            f"{percent(largest.efficiency)})"
        )
    return f"{text}. {about_batch(analysis.run_info)}".rstrip()
