"""What bounds the job, in one sentence.

Only one rank determines how long a step takes: the one that the others wait for. What it does is what the job is bound
by. Where it takes longer than the others, the rank is to blame, and the phase in which it does says what for: a rank
that is late because its data are late has an input problem, and one that computes longer than others is a straggler.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from torchring.report.buckets import bus_bytes
from torchring.report.findings import BucketSummary, Kind, LateParameter, Network, Phase, Spread, StartUp, Verdict
from torchring.report.formats import share_in_words
from torchring.report.network import SMALL_BYTES
from torchring.report.pauses import Pauses
from torchring.report.timing import Array, Timing, groups, spread_of_steps, typical
from torchring.report.waits import COMPUTING, PHASES, Critical, column, knows_forward

_TELLING: Final = 0.10  # share of a step
_OPTIMIZER_TELLING: Final = 0.25
_BETWEEN_TELLING: Final = 0.15
_JITTER_TELLING: Final = 0.15  # two ranks with noise of 10 % wait for each other for 6 % of a step, eight for 10 %
_WELL: Final = 0.9
_START_UP_TELLING: Final = 0.5  # of the run, if nothing else is wrong
_START_UP_ANYWAY: Final = 0.9
_BLAMED: Final = 0.75  # of the time for which the others wait, they wait for that rank
_MOST: Final = 0.5
_LONGER: Final = 1.1  # times as many samples
_MANY: Final = 4  # buckets, before they can be too many
_SLOWER: Final[dict[Phase | None, str]] = {
    Phase.BETWEEN: "which does more between backward and step() than the others",
    Phase.OPTIMIZER: "whose optimizer's step() takes longer than those of the others",
}
_INPUT, _FORWARD, _BACKWARD = (column(each) for each in (Phase.INPUT, Phase.FORWARD, Phase.BACKWARD))


@dataclass(frozen=True)
class Costs:
    """[S] each: milliseconds of each step that counts, on the rank that the others wait for.

    Attributes:
        blamed: position of the rank that the others wait for most of the time; None if the ranks take turns.
        input: waiting for data.
        straggler: by how much the blamed rank computes for longer than the median of the others.
        jitter: by how much whichever rank is the slowest takes longer than the others, apart from both above.
        communication: as the phase.
        between, optimizer: as the phases, without what is part of `straggler`.
        whole: the step.
        is_input_of_blamed: whether most of `input` is more than the other ranks have.
        batch_ratio: samples of the blamed rank, divided by the median of the others; 1 if unknown, if none is blamed,
            or if that explains less than half of `straggler`.
        slower_in: the phase in which most of `straggler` is; None if it is spread over several.
        is_forward_known: whether INPUT was told apart from FORWARD. If not, `input` is the least that it can be.
    """

    blamed: int | None
    input: Array
    straggler: Array
    jitter: Array
    communication: Array
    between: Array
    optimizer: Array
    whole: Array
    is_input_of_blamed: bool
    batch_ratio: float
    slower_in: Phase | None
    is_forward_known: bool

    @property
    def has_longer_batches(self) -> bool:
        """Whether the blamed rank computes for longer because it has more samples."""
        return self.batch_ratio >= _LONGER and self.slower_in not in (Phase.BETWEEN, Phase.OPTIMIZER)


def find_costs(timing: Timing, critical: Critical) -> Costs:
    """Attribute each step to causes."""
    cycle, path = critical.cycle[timing.counts].copy(), critical.path[timing.counts].copy()
    slowest = critical.slowest[timing.counts]
    rows = np.arange(len(cycle))
    is_forward_known = knows_forward(cycle)
    if not is_forward_known:
        _guess_forward(cycle)
        path = cycle[rows, slowest]
    excess = cycle - _median_of_others(cycle)
    of_slowest = excess[rows, slowest]
    computing = [column(phase) for phase in COMPUTING]
    late = np.clip(of_slowest[:, computing].sum(1), 0, None)
    candidate, is_blamed = _find_blamed(slowest, late, cycle.shape[1])
    is_candidate = slowest == candidate
    of_input = np.clip(of_slowest[:, _INPUT], 0, None)
    of_computing = [each for each in computing if each != _INPUT]
    of_straggler = np.where((is_candidate & is_blamed)[:, None], of_slowest, 0.0)
    straggler = np.clip(of_straggler[:, of_computing].sum(1), 0, None)
    slower_in = next(
        (PHASES[each] for each in of_computing if typical(of_straggler[:, each]) > _MOST * typical(straggler)), None
    )
    path_without = path - np.clip(of_straggler, 0, None)
    own_input = np.where(is_candidate & is_blamed, of_input, 0.0)
    is_input_of_blamed = is_blamed and typical(own_input) > _MOST * typical(path[:, _INPUT])
    explained = straggler + (own_input if is_input_of_blamed else 0.0)
    jitter = np.clip(late - explained, 0, None) + path[:, column(Phase.WAITING)]
    batch_ratio = _batch_ratio(timing, candidate) if is_blamed else 1.0
    of_others = typical(path_without[:, _FORWARD] + path_without[:, _BACKWARD])
    if (batch_ratio - 1.0) * of_others < _MOST * typical(straggler):
        batch_ratio = 1.0
    return Costs(
        candidate if is_blamed else None,
        path[:, _INPUT],
        straggler,
        jitter,
        path[:, column(Phase.COMMUNICATION)],
        path_without[:, column(Phase.BETWEEN)],
        path_without[:, column(Phase.OPTIMIZER)],
        path.sum(1),
        is_input_of_blamed,
        batch_ratio,
        slower_in,
        is_forward_known,
    )


def judge(
    timing: Timing,
    costs: Costs,
    size: int,
    buckets: Sequence[BucketSummary],
    late: Sequence[LateParameter],
    network: Network | None,
    start_up: StartUp | None,
    pauses: Pauses | None,
    efficiency: float,
    exposed_ms: float,
) -> Verdict:
    """The largest of the costs that are worth telling.

    Args:
        exposed_ms: communication that backward does not hide, in a step that has these buckets.
    """
    step = typical(costs.whole)
    found: dict[tuple[Kind, str], Array] = {
        ("input", ""): costs.input,
        ("straggler", ""): costs.straggler,
        ("straggler", "jitter"): costs.jitter,
        ("communication", ""): costs.communication,
        ("optimizer", "between"): costs.between,
        ("optimizer", ""): costs.optimizer,
    }
    least = {
        ("optimizer", ""): _OPTIMIZER_TELLING,
        ("optimizer", "between"): _BETWEEN_TELLING,
        ("straggler", "jitter"): _JITTER_TELLING,
    }
    telling = {
        key: typical(cost)
        for key, cost in found.items()
        if step > 0 and typical(cost) >= least.get(key, _TELLING) * step
    }
    if start_up and start_up.share >= (_START_UP_ANYWAY if telling else _START_UP_TELLING):
        return _start_up(start_up)
    if pauses is not None and pauses.share >= (1.0 - pauses.share) * max(telling.values(), default=0.0) / step:
        return Verdict("input", pauses.rank, pauses.share, pauses.length, pauses.sentence, "pauses")
    if not telling:
        return _compute(costs, size, efficiency)
    kind, detail = max(telling, key=lambda key: telling[key])
    cost = spread_of_steps(found[kind, detail])
    rank = timing.ranks[costs.blamed] if costs.blamed is not None else None
    at_least = ""
    if kind == "input":
        rank = rank if costs.is_input_of_blamed else None
        at_least = "" if costs.is_forward_known else "At least "
        who = "all ranks" if rank is None else f"rank {rank}"
        what = f"waits for data on {who}, or for other code between step() and forward"  # which is not told apart
    elif kind == "straggler":
        rank = None if detail else rank
        slower = _SLOWER.get(costs.slower_in, "which computes more slowly than the others")
        if costs.has_longer_batches:
            slower = f"whose batches have {costs.batch_ratio:.2g} times as many samples as those of the others"
        what = f"waits for rank {rank}, {slower}"
        what = "waits for the slowest rank, and the ranks take turns at that" if detail else what
    elif kind == "communication":
        rank = None
        detail, why = _explain_communication(size, buckets, late, network, exposed_ms)
        what = f"is communication that {why}"
    else:
        rank = None
        what = "passes between backward and step(), in clipping or logging" if detail else "is the optimizer's step()"
    share = cost.median / step
    percent = f"{share_in_words(share)} of each step"
    numbers = _span(cost, spread_of_steps(costs.whole))
    return Verdict(kind, rank, share, cost, f"{at_least}{percent} {what} ({numbers}).", detail)


def _explain_communication(
    size: int, buckets: Sequence[BucketSummary], late: Sequence[LateParameter], network: Network | None, cost_ms: float
) -> tuple[str, str]:
    """The detail, and the rest of a sentence that begins with "communication that"."""
    huge = next((each for each in late if each.holds_ms == 0 and each.exposed_ms >= _MOST * cost_ms), None)
    if huge:
        megabytes = f"{huge.num_bytes / 1e6:.0f} MB"
        return "late parameter", (
            f"nothing hides, because the gradient of {huge.name} ({megabytes}) is ready at the end of backward"
        )
    held = next((each for each in late if each.holds_ms >= _MOST * cost_ms), None)
    if held:
        return "late parameter", (
            f"backward does not hide, because bucket {held.bucket} waits {held.holds_ms:.0f} ms for the gradient of "
            f"{held.name} alone"
        )
    total = sum(bucket.reducing.median for bucket in buckets)
    num_bytes = sum(bucket.num_bytes for bucket in buckets)
    if network and len(buckets) >= _MANY and size > 1 and total > 0:
        latency = 2 * (size - 1) * network.alpha_ms * len(buckets)
        mean_bytes = num_bytes / len(buckets)
        those = f"{len(buckets)} small buckets of {mean_bytes / 1e6:.2g} MB"
        if network.is_alpha_known and latency > _MOST * total:
            return "small buckets", f"backward does not hide, most of it latency of {those}"
        if not network.is_alpha_known and mean_bytes < SMALL_BYTES:
            return "small buckets", (
                f"backward does not hide: {those} take {total / len(buckets):.2g} ms each, because of latency or a "
                "slow link"
            )
    speed = bus_bytes(num_bytes, size) / 1e6 / total if total > 0 else 0.0
    return "slow link", f"backward does not hide: {num_bytes / 1e6:.3g} MB at {speed:.2g} GB/s"


def _compute(costs: Costs, size: int, efficiency: float) -> Verdict:
    lost = costs.communication + costs.jitter + costs.straggler
    cost = spread_of_steps(costs.whole - lost)
    step = spread_of_steps(costs.whole)
    share = cost.median / step.median if step.median else 1.0
    what = "Nothing holds" if share >= _WELL else "No single cause holds"
    begin = f"{what} this job back: {share_in_words(share)} of each step is computing"
    ends = f"{size} ranks do the work of {size * efficiency:.3g}" if size > 1 else "it has one rank"
    return Verdict("compute", None, share, cost, f"{begin} ({_span(cost, step)}), and {ends}.")


def _start_up(start_up: StartUp) -> Verdict:
    seconds = start_up.share * start_up.run_s
    text = f"{share_in_words(start_up.share)} of the run is start-up"
    cost = Spread(seconds, seconds, seconds, "s")
    return Verdict("start-up", None, start_up.share, cost, f"{text} ({seconds:.3g} s of {start_up.run_s:.3g} s).")


def _span(cost: Spread, whole: Spread) -> str:
    """ "61 ms of 145 ms, between 58 and 66"."""
    digits = 0 if cost.median >= 10 else 2 if cost.median < 1 else 1
    return (
        f"{cost.median:.{digits}f} ms of {whole.median:.{digits}f} ms, "
        f"between {cost.low:.{digits}f} and {cost.high:.{digits}f}"
    )


def _find_blamed(slowest: Array, late: Array, num_ranks: int) -> tuple[int, bool]:
    """Position of the rank that is late for longest, and whether it is late for most of the time.

    Groups of steps count equally, so that one accident does not outweigh what happens all the time.
    """
    of_rank = groups(np.where(slowest[:, None] == np.arange(num_ranks), late[:, None], 0.0))
    total = of_rank.sum(1, keepdims=True)
    shares = (of_rank / np.where(total > 0, total, 1.0)).mean(0)
    candidate = int(shares.argmax())
    return candidate, bool(num_ranks > 1 and shares[candidate] >= _BLAMED)


def _batch_ratio(timing: Timing, position: int) -> float:
    samples = np.mean(timing.num_samples[timing.counts], axis=0)
    others = float(np.median(np.delete(samples, position)))
    return float(samples[position]) / others if others > 0 and samples[position] > 0 else 1.0


def _median_of_others(cycle: Array) -> Array:
    """For each step, rank and phase, the median over the other ranks; over this rank if it is alone."""
    num_ranks = cycle.shape[1]
    if num_ranks == 1:
        return cycle
    return np.stack([np.median(np.delete(cycle, rank, axis=1), axis=1) for rank in range(num_ranks)], axis=1)


def _guess_forward(cycle: Array) -> None:
    """Move a part of INPUT to FORWARD, in place: as much as the rank with the shortest INPUT has, or BACKWARD.

    Forward takes as long on all ranks, relative to backward, and hardly ever longer than backward.
    """
    backward = cycle[..., _BACKWARD]
    ratios = np.median(cycle[..., _INPUT] / np.where(backward > 0, backward, np.inf), axis=0)
    forward = np.minimum(cycle[..., _INPUT], backward * min(1.0, float(ratios.min())))
    cycle[..., _FORWARD] += forward
    cycle[..., _INPUT] -= forward
