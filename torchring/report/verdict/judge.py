"""What bounds the job, in one sentence.

Only one rank determines how long a step takes: the one that the others wait for. What it does is what the job is bound
by. Where it takes longer than the others, the rank is to blame, and the phase in which it does says what for: a rank
that is late because its data are late has an input problem, and one that computes longer than others is a straggler.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from torchring.report.model.buckets import BucketSummary, LateParameter, bus_bytes
from torchring.report.model.change import find_change
from torchring.report.model.cores import find_queue
from torchring.report.model.network import SMALL_BYTES, Network
from torchring.report.model.phases import COMPUTING, PHASES, Phase, column
from torchring.report.model.ranks import StartUp
from torchring.report.model.timing import Array, Spread, Timing, spread, typical
from torchring.report.model.waits import Critical, knows_forward
from torchring.report.verdict.findings import Kind, Verdict, share_in_words
from torchring.report.verdict.pauses import TELLING as PAUSES_TELLING
from torchring.report.verdict.pauses import Pauses

_TELLING: Final = 0.10  # share of a step
_LEAST: Final[dict[tuple[Kind, str], float]] = {
    ("optimizer", ""): 0.25,
    ("optimizer", "between"): 0.15,
    ("straggler", "jitter"): 0.15,  # two ranks with noise of 10 % wait for each other for 6 % of a step, eight for 10 %
}
_WELL: Final = 0.9
_START_UP_TELLING: Final = 0.5  # of the run, if nothing else is wrong
_START_UP_ANYWAY: Final = 0.9
_BLAMED: Final = 0.75  # of the time for which the others wait, they wait for that rank
_MOST: Final = 0.5
_NEARLY_ALL: Final = 0.75
_EXPLAINED: Final = 1.3  # times what a bandwidth takes: it does not explain more
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
        input: from the end of a step to forward. If forward is not told apart: waiting for a DataLoader.
        loading: of `input`, waiting for a DataLoader.
        straggler: by how much the blamed rank computes for longer than the median of the others.
        jitter: by how much whichever rank is the slowest takes longer than the others, apart from both above.
        cores: the rank, or one that the others wait for in communication, has no core.
        communication: as the phase, apart from that.
        between, optimizer: as the phases, without what is part of `straggler`.
        unknown: forward, or waiting for data that no DataLoader gives. Zeros if forward is told apart.
        whole: the step.
        is_input_of_blamed: whether most of `input` is more than the other ranks have.
        is_blamed_without_core: whether it is the blamed rank that has no core for most of `cores`.
        batch_ratio: samples of the blamed rank, divided by the median of the others; 1 if unknown, if none is blamed,
            or if that explains less than half of `straggler`.
        slower_in: the phase in which most of `straggler` is; None if it is spread over several.
        is_forward_known: whether INPUT was told apart from FORWARD.
        saw_loader: whether a DataLoader gave batches.
    """

    blamed: int | None
    input: Array
    loading: Array
    straggler: Array
    jitter: Array
    cores: Array
    communication: Array
    between: Array
    optimizer: Array
    unknown: Array
    whole: Array
    is_input_of_blamed: bool
    is_blamed_without_core: bool
    batch_ratio: float
    slower_in: Phase | None
    is_forward_known: bool
    saw_loader: bool

    @property
    def has_longer_batches(self) -> bool:
        """Whether the blamed rank computes for longer because it has more samples."""
        return self.batch_ratio >= _LONGER and self.slower_in not in (Phase.BETWEEN, Phase.OPTIMIZER)

    @property
    def by_cause(self) -> dict[tuple[Kind, str], Array]:
        """By kind and detail of a verdict."""
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
        """Those of `by_cause` that are worth telling: the mean."""
        step = typical(self.whole)
        means = {key: typical(cost) for key, cost in self.by_cause.items()}
        return {key: mean for key, mean in means.items() if mean >= _LEAST.get(key, _TELLING) * step > 0}


def find_costs(timing: Timing, critical: Critical) -> Costs:
    """Attribute each step to causes."""
    cycle, path = critical.cycle[timing.counts].copy(), critical.path[timing.counts].copy()
    slowest = critical.slowest[timing.counts]
    rows = np.arange(len(cycle))
    loading = np.minimum(timing.loading[timing.counts], cycle[..., _INPUT])
    is_forward_known = knows_forward(cycle)
    if not is_forward_known:  # only what was seen counts as waiting for data
        cycle[..., _FORWARD] += cycle[..., _INPUT] - loading
        cycle[..., _INPUT] = loading
        path = cycle[rows, slowest]
    excess = cycle - _median_of_others(cycle)
    of_slowest = excess[rows, slowest]
    computing = [column(phase) for phase in COMPUTING]
    late = np.clip(of_slowest[:, computing].sum(1), 0, None)
    candidate, is_blamed = _find_blamed(slowest, late, cycle.shape[1])
    # Not clipped: where a rank is sometimes faster and sometimes slower, the mean says by how much it is slower.
    of_blamed = np.where((is_blamed & (slowest == candidate))[:, None], of_slowest, 0.0)
    of_computing = [each for each in computing if each != _INPUT]
    queue = find_queue(timing, critical)
    queued = np.zeros(cycle.shape[:2]) if queue is None else queue.of_ranks
    without_core = (queued - _median_of_others(queued))[rows, slowest]  # makes the rank late, which is not its doing
    late = np.clip(late - without_core, 0, None)
    blamed_without_core = np.where(is_blamed & (slowest == candidate), without_core, 0.0)
    straggler = of_blamed[:, of_computing].sum(1) - blamed_without_core
    cores = np.zeros(len(path)) if queue is None else queue.whole
    slower_in = next(
        (PHASES[each] for each in of_computing if typical(of_blamed[:, each]) > _MOST * typical(straggler) > 0), None
    )
    path_without = path - of_blamed
    is_input_of_blamed = is_blamed and typical(of_blamed[:, _INPUT]) > _MOST * typical(path[:, _INPUT])
    explained = straggler + (of_blamed[:, _INPUT] if is_input_of_blamed else 0.0)
    jitter = np.clip(late - np.clip(explained, 0, None), 0, None) + path[:, column(Phase.WAITING)]
    batch_ratio = _batch_ratio(timing, candidate) if is_blamed else 1.0
    of_others = typical(path_without[:, _FORWARD] + path_without[:, _BACKWARD])
    if (batch_ratio - 1.0) * of_others < _MOST * typical(straggler):
        batch_ratio = 1.0
    return Costs(
        candidate if is_blamed else None,
        path[:, _INPUT],
        loading[rows, slowest],
        straggler,
        jitter,
        cores,
        path[:, column(Phase.COMMUNICATION)] - (0.0 if queue is None else queue.communication),
        path_without[:, column(Phase.BETWEEN)],
        path_without[:, column(Phase.OPTIMIZER)],
        path_without[:, _FORWARD] * (not is_forward_known),
        path.sum(1),
        is_input_of_blamed,
        bool(typical(blamed_without_core) > _MOST * typical(cores)),
        batch_ratio,
        slower_in,
        is_forward_known,
        timing.saw_loader,
    )


def judge(
    timing: Timing,
    critical: Critical,
    costs: Costs,
    size: int,
    buckets: Sequence[BucketSummary],
    late: Sequence[LateParameter],
    network: Network | None,
    start_up: StartUp | None,
    pauses: Sequence[Pauses],
    efficiency: float,
    exposed_ms: float,
    who_has_cores: str,
) -> Verdict:
    """The largest of the costs that are worth telling.

    Args:
        pauses: the largest first.
        exposed_ms: communication that backward does not hide, in a step that has these buckets.
        who_has_cores: while a rank has none, a clause.
    """
    telling = costs.telling
    pause = next((each for each in pauses if each.share >= PAUSES_TELLING), None)
    if start_up and start_up.share >= (_START_UP_ANYWAY if telling or pause else _START_UP_TELLING):
        return _start_up(start_up)
    if pause and pause.share >= (1.0 - pause.share) * max(telling.values(), default=0.0) / typical(costs.whole):
        return Verdict(pause.kind, pause.rank, pause.share, pause.length, pause.sentence, "pauses")
    if not telling:
        return _compute(costs, size, efficiency)
    largest = max(telling, key=lambda key: telling[key])
    changed = _where_it_is_large(timing, costs.by_cause[largest], _TELLING * typical(costs.whole))
    when = ""
    if changed is not None:
        when, timing = changed
        costs = find_costs(timing, critical)
        telling = costs.telling
        largest = max(telling, key=lambda key: telling[key], default=largest)
    kind, detail = largest
    cost, whole = spread(costs.by_cause[largest]), spread(costs.whole)
    rank = timing.ranks[costs.blamed] if costs.blamed is not None else None
    if kind == "input":
        rank = rank if costs.is_input_of_blamed else None
        detail, what = _explain_input(costs, "all ranks" if rank is None else f"rank {rank}")
    elif kind == "straggler":
        rank = None if detail else rank
        slower = _SLOWER.get(costs.slower_in, "which computes more slowly than the others")
        if costs.slower_in is Phase.FORWARD and not costs.is_forward_known:
            slower = "which takes longer than the others for forward, or waits for data"
        if costs.has_longer_batches:
            slower = f"whose batches have {costs.batch_ratio:.2g} times as many samples as those of the others"
        what = f"waits for rank {rank}, {slower}"
        what = "waits for the slowest rank, and the ranks take turns at that" if detail else what
    elif kind == "cores":
        rank = rank if costs.is_blamed_without_core else None
        what = f"passes while {'a rank' if rank is None else f'rank {rank}'} has no core: {who_has_cores}"
    elif kind == "communication":
        rank = None
        detail, why = _explain_communication(size, buckets, late, network, exposed_ms)
        what = f"is communication that {why}"
    else:
        rank = None
        what = "passes between backward and step(), in clipping or logging" if detail else "is the optimizer's step()"
    share = cost.mean / whole.mean
    sentence = f"{when}{_share(share, cost)} {what} ({_span(cost, whole)})."
    numbers = timing.numbers[timing.counts]
    return Verdict(kind, rank, share, cost, sentence, detail, (int(numbers[0]), int(numbers[-1])) if when else None)


def _where_it_is_large(timing: Timing, cost: Array, least: float) -> tuple[str, Timing] | None:
    """If something costs much in a part of the run only: when, for a sentence, and the same steps, of which those
    count. `cost`: of each step that counts."""
    change = find_change(cost, least)
    if change is None:
        return None
    early, late = typical(cost[:change]), typical(cost[change:])
    if min(early, late) > _MOST * max(early, late):
        return None
    first = int(np.flatnonzero(timing.counts)[change])
    is_late = np.arange(len(timing.counts)) >= first
    number = int(timing.numbers[first])
    when = f"From step {number:,} on, " if late > early else f"Before step {number:,}, "
    return when, dataclasses.replace(timing, counts=timing.counts & (is_late == (late > early)))


def _explain_input(costs: Costs, who: str) -> tuple[str, str]:
    """The detail, and what stands behind the share in the sentence."""
    loading = typical(costs.loading) / max(typical(costs.input), 1e-9)
    if loading >= _NEARLY_ALL:
        return "", f"waits for data on {who}"
    if costs.saw_loader and loading <= 1.0 - _NEARLY_ALL:
        return "other code", f"goes to code between step() and forward on {who}, which waits for no DataLoader"
    return "", f"waits for data on {who}, or for other code between step() and forward"


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
    megabytes = f"{num_bytes / 1e6:.3g} MB"
    if total <= 0 or cost_ms > _EXPLAINED * total:
        return "", f"backward does not hide: {megabytes} take {total:.2g} ms, and ranks stand still for longer"
    speed = bus_bytes(num_bytes, size) / 1e6 / total
    return "slow link", f"backward does not hide: {megabytes} at {speed:.2g} GB/s"


def _compute(costs: Costs, size: int, efficiency: float) -> Verdict:
    lost = costs.communication + costs.jitter + costs.straggler + costs.cores
    step = spread(costs.whole)
    ends = f"{size} ranks do the work of {size * efficiency:.3g}" if size > 1 else "it has one rank"
    unknown = spread(costs.unknown)
    if unknown.mean >= _TELLING * step.mean > 0:
        share = unknown.mean / step.mean
        what = "is forward, or code around it" if costs.saw_loader else "is forward, or waiting for data"
        begin = f"{_share(share, unknown)} {what}: the trace does not tell which ({_span(unknown, step)})"
        sentence = f"{begin}. Nothing else holds this job back, and {ends}."
        return Verdict("compute", None, share, unknown, sentence, "forward or data")
    cost = spread(costs.whole - lost)
    share = cost.mean / step.mean if step.mean else 1.0
    what = "Nothing holds" if share >= _WELL else "No single cause holds"
    begin = f"{what} this job back: {_share(share, cost)} is computing"
    return Verdict("compute", None, share, cost, f"{begin} ({_span(cost, step)}), and {ends}.")


def _start_up(start_up: StartUp) -> Verdict:
    seconds = start_up.share * start_up.run_s
    text = f"{share_in_words(start_up.share)} of the run is start-up"
    cost = spread([seconds], "s")
    return Verdict("start-up", None, start_up.share, cost, f"{text} ({seconds:.3g} s of {start_up.run_s:.3g} s).")


def _is_in_each_step(cost: Spread) -> bool:
    return cost.low >= _MOST * cost.mean


def _share(share: float, cost: Spread) -> str:
    return f"{share_in_words(share)} of {'each step' if _is_in_each_step(cost) else 'the time'}"


def _span(cost: Spread, whole: Spread) -> str:
    """ "61 ms of 145 ms, between 58 and 66"."""
    digits = 0 if cost.mean >= 10 else 2 if cost.mean < 1 else 1
    means = f"{cost.mean:.{digits}f} ms of {whole.mean:.{digits}f} ms"
    if not _is_in_each_step(cost):
        return f"{means} on average"
    return f"{means}, between {cost.low:.{digits}f} and {cost.high:.{digits}f}"


def _find_blamed(slowest: Array, late: Array, num_ranks: int) -> tuple[int, bool]:
    """Position of the rank for which the others wait longest, and whether they do most of the time that they wait."""
    of_rank = np.bincount(slowest, late, num_ranks)
    candidate = int(of_rank.argmax())
    return candidate, bool(num_ranks > 1 and of_rank[candidate] >= _BLAMED * max(of_rank.sum(), 1e-9))


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
