"""Captions of the page's sections, as plain text: how to read a section, and what it shows of this job."""

from __future__ import annotations

from typing import Final

from torchring.observer import Phase
from torchring.report.show.formats import mean_with_spread, milliseconds, number, percent, rate, with_spread
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


def of_verdict(analysis: Analysis) -> str:
    text = ""
    if analysis.size > 1:
        achieved = analysis.efficiency * analysis.size
        text = f"{analysis.size:,} ranks are as fast as {number(achieved, 10)} ranks that never wait for anything. "
        if achieved < 1:
            text += "One rank alone would be faster. "
    return text + "Numbers in brackets hold the middle three fifths of what was measured."


def of_path(analysis: Analysis) -> str:
    pace = " Ranks wait for each other, so the rank that comes last sets the pace: the table shows that rank."
    return f"A step takes {mean_with_spread(analysis.step)} on average.{pace if analysis.size > 1 else ''}"


def name_of(phase: Phase, analysis: Analysis) -> str:
    return "input and forward" if phase is Phase.INPUT and not analysis.costs.is_forward_known else NAMES[phase]


def of_buckets(analysis: Analysis) -> str:
    stall = max((rank.stall for rank in analysis.ranks), key=lambda spread: spread.mean)
    if stall.mean < NOTICEABLE_WAIT * analysis.step.mean:
        return ""
    return f" Reductions inside backward keep it waiting for {mean_with_spread(stall)} of each step."


def of_lanes(analysis: Analysis) -> str:
    timing, i = analysis.timing, analysis.median_step
    took = milliseconds(float((timing.end - timing.begin)[i].max()))
    text = (
        f"Step {timing.numbers[i]:,} took {took}, which is nearest to the median. For each rank, the upper lane shows "
        "what the rank does, the lower lane its buckets, each with its number. A tick marks when the last gradient of "
        "a bucket was ready. "
    )
    if not timing.plan:
        return text
    late = float(timing.reduced[i].max() - timing.backward_end[i].max())
    if late <= 0:
        return f"{text}All buckets are reduced before the last backward ends: communication is hidden."
    return f"{text}The last bucket is reduced {milliseconds(late)} after the last backward ends."


def of_bandwidth(analysis: Analysis) -> str:
    parts = [
        "Bus bandwidth is 2 (N − 1) / N times the bytes of a bucket, divided by the time of its reduction. For a "
        "perfect ring it is the bandwidth of the link. GB are 10⁹ bytes."
    ]
    if path := analysis.bandwidth:
        parts.append(
            f"The {path.algorithm} algorithm achieves {with_spread(path.bus)} {path.path}, and "
            f"{with_spread(path.best)} with its best bucket."
        )
        if path.doctor:
            share = percent(path.bus.median / path.doctor)
            parts.append(f"The doctor found {rate(path.doctor)} there, so the job uses {share} of it.")
    if analysis.network is not None:
        network = analysis.network
        latency = f"{milliseconds(network.alpha_ms)} and " if network.is_alpha_known else ""
        origin = "as given on the command line" if analysis.is_network_given else "fitted to these buckets"
        parts.append(
            f"For predictions, a message costs {latency}its bytes at {rate(network.gigabytes_per_s)}, {origin}."
        )
    return " ".join(parts)


def of_scaling(analysis: Analysis) -> str:
    text = f"{analysis.predictions_note} Efficiency is 100% if each rank is as fast as one that trains alone."
    return f"{text} {about_batch(analysis.run_info)}".rstrip()
