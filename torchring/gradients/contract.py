"""What an optimizer tells those who reduce its gradients, and what they say about it in the end."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import Optimizer

from torchring.gradients.layout import BucketLayout, Options
from torchring.world import World


@dataclass(frozen=True)
class Stats:
    """The cost of communication so far, on one rank.

    Attributes:
        algorithm: "direct", "ring", "hierarchical" or "native"; "none" in a world of one rank.
        reason: why this algorithm was chosen, as a sentence, with the times that "auto" has measured. In a job
            that `torchring run` has started, also where this rank runs, and why.
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
        batch_size: with noise_scale=True, samples of all ranks in a reduction, as a mean over the latest: the first
            dimension of the first tensor that the model gets. 0 if `wrap` was given no model, or its forward is not
            seen.
        noise_scale: with noise_scale=True, the gradient noise scale, in samples (McCandlish et al. 2018): if batch_size
            is far below it, a larger batch still pays. Infinite if noise hides the gradient. None in the first 129
            reductions, in a world of one, and without batch_size.
        group: the ranks of the job that reduce together, ascending; empty if all do.
        compression_error: with a `compression` that checks itself ("int8", for example), the relative error of the mean
            when it was looked at last: the norm of the error divided by the norm of the exact mean, for a sample of the
            gradients, by "1-D", "embedding" and "matrix". Empty before that.
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
    batch_size: float = 0.0
    noise_scale: float | None = None
    group: tuple[int, ...] = ()
    compression_error: Mapping[str, float] = field(default_factory=dict)


def stats_of(
    layout: BucketLayout,
    num_reductions: int,
    num_skipped_steps: int,
    noise: Any,
    group: tuple[int, ...],
    error: Mapping[str, float],
) -> Stats:
    """The cost of communication so far. `noise`: the participant that measures the gradient noise scale, or None."""
    timing = layout.timing
    layout.agreement.poll()
    num_timed = max(timing.num_timed, 1)
    hidden = timing.total_busy_ms - timing.total_exposed_ms
    return Stats(
        algorithm=layout.all_reduce.algorithm,
        reason=layout.reason,
        overlap=layout.agreement.overlap,
        num_buckets=len(layout.buckets),
        bytes_per_step=layout.num_bytes,
        num_reductions=num_reductions,
        communication_ms=timing.last_busy_ms,
        exposed_ms=timing.last_exposed_ms,
        mean_communication_ms=timing.total_busy_ms / num_timed,
        mean_exposed_ms=timing.total_exposed_ms / num_timed,
        overlap_ratio=max(0.0, hidden / timing.total_busy_ms) if timing.total_busy_ms else 0.0,
        num_skipped_steps=num_skipped_steps,
        batch_size=0.0 if noise is None else noise.batch_size,
        noise_scale=None if noise is None else noise.noise_scale,
        group=group,
        compression_error=error,
    )


@dataclass(frozen=True, eq=False)
class Setup:
    """What `wrap` was given, for those who take part in reductions. Not to be kept: it refers to the model."""

    world: World
    optimizer: Optimizer  # the wrapped optimizer
    model: torch.nn.Module | None
    names: Mapping[torch.nn.Parameter, str]  # of its parameters, in its order; may grow
    sparse: Collection[torch.nn.Parameter]  # its parameters whose gradients are sparse
    ignored: Collection[torch.Tensor]  # parameters and buffers of `model` that belong to this rank
    options: Options
    inputs: Any  # sees what the model is given
    is_sharded: bool  # each rank has the optimizer state of other parameters

    @property
    def has_buffers(self) -> bool:
        """Whether the model has buffers that `wrap` was not told to leave alone."""
        model, choices = self.model, self.options.sync_buffers
        return model is not None and choices is not None and any(True for _ in model.buffers())
