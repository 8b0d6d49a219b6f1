"""The cost of communication so far, which `DistributedOptimizer.stats` returns."""

from __future__ import annotations

from dataclasses import dataclass

from torchring.gradients.local import LocalSync
from torchring.gradients.reducer import Reducer


@dataclass(frozen=True)
class Stats:
    """The cost of communication so far, on one rank.

    Attributes:
        algorithm: "direct", "ring", "hierarchical", "native" or "nvls"; "none" in a world of one rank.
        reason: why this algorithm was chosen, as a sentence, with the times that "auto" has measured. Where torchring
            tunes buckets or compression, also what it has decided, and why. If all gradients arrive together, as those
            of a model that is compiled as a whole, a sentence says so.
        overlap: "inline" or "thread"; on a GPU "inline" or "stream".
        num_buckets: number of buckets in the current plan.
        bytes_per_step: bytes that this rank contributes to one reduction, after compression.
        num_reductions: number of reductions so far.
        communication_ms: time in the last reduction during which some bucket was being reduced. Includes waiting for
            other ranks. On a GPU: in the last reduction that the GPU has finished.
        exposed_ms: the part of communication_ms during which `backward()` stood still.
        mean_communication_ms: mean of communication_ms over all reductions but the first, in which ranks also
            wait for each other to start.
        mean_exposed_ms: mean of exposed_ms over the same reductions.
        overlap_ratio: share of the communication that `backward()` hid, from 0 to 1, over the same reductions.
        num_skipped_steps: number of steps that on_nonfinite="skip" has left out.
    """

    algorithm: str
    reason: str
    overlap: str
    num_buckets: int
    bytes_per_step: int
    num_reductions: int
    communication_ms: float
    exposed_ms: float
    mean_communication_ms: float
    mean_exposed_ms: float
    overlap_ratio: float
    num_skipped_steps: int = 0


def stats_of(sync: Reducer | LocalSync) -> Stats:
    """The statistics of one optimizer."""
    if isinstance(sync, LocalSync):
        skipped = sync.num_skipped_steps
        return Stats("none", "a world of one sends nothing", "inline", 0, 0, 0, 0.0, 0.0, 0.0, 0.0, 0.0, skipped)
    layout, timing = sync.layout, sync.layout.timing
    layout.agreement.poll()
    num_timed = max(timing.num_timed, 1)
    hidden = timing.total_busy_ms - timing.total_exposed_ms
    return Stats(
        algorithm=layout.mover.algorithm,
        reason="; ".join(filter(None, (layout.reason, layout.finding))),
        overlap=layout.agreement.overlap,
        num_buckets=len(layout.buckets),
        bytes_per_step=layout.current_plan.num_bytes,
        num_reductions=sync.num_reductions,
        communication_ms=timing.last_busy_ms,
        exposed_ms=timing.last_exposed_ms,
        mean_communication_ms=timing.total_busy_ms / num_timed,
        mean_exposed_ms=timing.total_exposed_ms / num_timed,
        overlap_ratio=max(0.0, hidden / timing.total_busy_ms) if timing.total_busy_ms else 0.0,
        num_skipped_steps=sync.num_skipped_steps,
    )
