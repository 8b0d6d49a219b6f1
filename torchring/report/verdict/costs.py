"""What each step costs, by cause.

Only one rank determines how long a step takes: the rank that the others wait for. Its phases are what a step costs.
Where that rank takes longer than the others, the rank is to blame, and the phase says what for: a rank that is late
because its data are late has an input problem, and a rank that computes longer is a straggler.
"""

from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from torchring.observer import Phase
from torchring.report.model.core_time import Queue, find_queue
from torchring.report.model.timing import Array, Steps, typical
from torchring.report.model.waits import COMPUTING, Critical, knows_forward

Kind = Literal["input", "compute", "communication", "straggler", "optimizer", "cores"]
TELLING: Final = 0.10  # share of a step
_LEAST: Final[dict[tuple[Kind, str], float]] = {
    ("optimizer", ""): 0.25,
    ("optimizer", "between"): 0.15,
    ("straggler", "jitter"): 0.15,  # two ranks with noise of 10 % wait for each other for 6 % of a step, eight for 10 %
}
_BLAMED: Final = 0.75  # of the time for which the others wait, they wait for that rank
_MOST: Final = 0.5
_LONGER: Final = 1.1  # times as many samples


@dataclass(frozen=True)
class Costs:
    """[S] each: milliseconds of each step that counts, on the rank that the others wait for."""

    blamed: int | None  # position of the rank that the others wait for most of the time; None if the ranks take turns
    input: Array  # from the end of a step to forward. If forward is not told apart: waiting for a DataLoader.
    loading: Array  # of `input`, waiting for a DataLoader
    straggler: Array  # time by which the blamed rank computes longer than the median of the others
    jitter: Array  # time by which whichever rank is slowest takes longer than the others, apart from both above
    cores: Array  # time in which this rank, or a rank awaited in communication, has no core
    queue: Queue | None  # the same of all ranks; None if it is unknown
    communication: Array  # the phase, apart from `cores`
    between: Array  # the phase, without its part of `straggler`
    optimizer: Array  # the same
    unknown: Array  # forward, or waiting for data that no DataLoader gives. Zeros if forward is told apart.
    whole: Array  # the step
    is_input_of_blamed: bool  # most of `input` is more than the other ranks have
    is_blamed_without_core: bool  # the blamed rank has no core for most of `cores`
    # Samples of the blamed rank, divided by the median of the others; 1 if unknown, if none is blamed, or if that
    # explains less than half of `straggler`
    batch_ratio: float
    slower_in: Phase | None  # the phase in which most of `straggler` is; None if it is spread over several
    is_forward_known: bool  # INPUT was told apart from FORWARD

    @property
    def has_longer_batches(self) -> bool:
        """True if the blamed rank computes for longer because it has more samples."""
        return self.batch_ratio >= _LONGER and self.slower_in not in (Phase.BETWEEN, Phase.OPTIMIZER)

    @property
    def by_cause(self) -> dict[tuple[Kind, str], Array]:
        """Costs by kind and detail of a verdict."""
        return {
            ("input", ""): self.input,
            ("straggler", ""): self.straggler,
            ("straggler", "jitter"): self.jitter,
            ("cores", ""): self.cores,
            ("communication", ""): self.communication,
            ("optimizer", "between"): self.between,
            ("optimizer", ""): self.optimizer,
        }

    @property
    def telling(self) -> dict[tuple[Kind, str], float]:
        """Mean of each cost that is worth telling."""
        step = typical(self.whole)
        means = {key: typical(cost) for key, cost in self.by_cause.items()}
        return {key: mean for key, mean in means.items() if mean >= _LEAST.get(key, TELLING) * step > 0}


def find_costs(timing: Steps, critical: Critical) -> Costs:
    cycle, path = critical.cycle[timing.counts].copy(), critical.path[timing.counts].copy()
    slowest = critical.slowest[timing.counts]
    rows = np.arange(len(cycle))
    loading = np.minimum(timing.loading[timing.counts], cycle[..., Phase.INPUT])
    is_forward_known = knows_forward(cycle)
    if not is_forward_known:  # only what was seen counts as waiting for data
        cycle[..., Phase.FORWARD] += cycle[..., Phase.INPUT] - loading
        cycle[..., Phase.INPUT] = loading
        path = cycle[rows, slowest]
    excess = cycle - _median_of_others(cycle)
    of_slowest = excess[rows, slowest]
    late = np.clip(of_slowest[:, COMPUTING].sum(1), 0, None)
    candidate, is_blamed = _find_blamed(slowest, late, cycle.shape[1])
    # Not clipped: where a rank is sometimes faster and sometimes slower, the mean says by how much it is slower.
    of_blamed = np.where((is_blamed & (slowest == candidate))[:, None], of_slowest, 0.0)
    of_computing = COMPUTING[1:]
    queue = find_queue(timing, critical)
    queued = np.zeros(cycle.shape[:2]) if queue is None else queue.of_ranks
    without_core = (queued - _median_of_others(queued))[rows, slowest]  # makes the rank late, which is not its doing
    late = np.clip(late - without_core, 0, None)
    blamed_without_core = np.where(is_blamed & (slowest == candidate), without_core, 0.0)
    straggler = of_blamed[:, of_computing].sum(1) - blamed_without_core
    cores = np.zeros(len(path)) if queue is None else queue.whole
    slower_in = next(
        (each for each in of_computing if typical(of_blamed[:, each]) > _MOST * typical(straggler) > 0), None
    )
    path_without = path - of_blamed
    is_input_of_blamed = is_blamed and typical(of_blamed[:, Phase.INPUT]) > _MOST * typical(path[:, Phase.INPUT])
    explained = straggler + (of_blamed[:, Phase.INPUT] if is_input_of_blamed else 0.0)
    jitter = np.clip(late - np.clip(explained, 0, None), 0, None) + path[:, Phase.WAITING]
    batch_ratio = _batch_ratio(timing, candidate) if is_blamed else 1.0
    of_others = typical(path_without[:, Phase.FORWARD] + path_without[:, Phase.BACKWARD])
    if (batch_ratio - 1.0) * of_others < _MOST * typical(straggler):
        batch_ratio = 1.0
    return Costs(
        candidate if is_blamed else None,
        path[:, Phase.INPUT],
        loading[rows, slowest],
        straggler,
        jitter,
        cores,
        queue,
        path[:, Phase.EXPOSED] - (0.0 if queue is None else queue.communication),
        path_without[:, Phase.BETWEEN],
        path_without[:, Phase.OPTIMIZER],
        path_without[:, Phase.FORWARD] * (not is_forward_known),
        path.sum(1),
        is_input_of_blamed,
        bool(typical(blamed_without_core) > _MOST * typical(cores)),
        batch_ratio,
        slower_in,
        is_forward_known,
    )


def _find_blamed(slowest: Array, late: Array, num_ranks: int) -> tuple[int, bool]:
    """Position of the rank for which the others wait longest, and whether they do most of the time that they wait."""
    of_rank = np.bincount(slowest, late, num_ranks)
    candidate = int(of_rank.argmax())
    return candidate, bool(num_ranks > 1 and of_rank[candidate] >= _BLAMED * max(of_rank.sum(), 1e-9))


def _batch_ratio(timing: Steps, position: int) -> float:
    samples = np.mean(timing.num_samples[timing.counts], axis=0)
    others = float(np.median(np.delete(samples, position)))
    return float(samples[position]) / others if others > 0 and samples[position] > 0 else 1.0


def _median_of_others(cycle: Array) -> Array:
    """For each step, rank and phase, the median over the other ranks; over this rank if it is alone."""
    num_ranks = cycle.shape[1]
    if num_ranks == 1:
        return cycle
    return np.stack([np.median(np.delete(cycle, rank, axis=1), axis=1) for rank in range(num_ranks)], axis=1)
