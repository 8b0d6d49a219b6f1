"""Says in one sentence what bounds the job: the largest of the costs. Then, what is missing or strange in a trace."""

from collections.abc import Iterator
from typing import Final

import numpy as np

from torchring.observer import Phase
from torchring.report.model.bucket_layout import ready_shares
from torchring.report.model.buckets import bus_bytes
from torchring.report.model.scaling import SMALL_BYTES
from torchring.report.model.timing import Spread, spread, typical
from torchring.report.verdict.costs import TELLING
from torchring.report.verdict.findings import FEWEST_STEPS, Analysis, Verdict
from torchring.report.verdict.pauses import TELLING as PAUSES_TELLING
from torchring.report.verdict.pauses import slow_stretches
from torchring.report.words import share_in_words

_WELL: Final = 0.9
_MOST: Final = 0.5
_NEARLY_ALL: Final = 0.75
_EXPLAINED: Final = 1.3  # times what a bandwidth takes: it does not explain more
_MANY: Final = 4  # buckets, before they can be too many
# Share of a backward in which gradients arrive. It was 2 % for a model in one graph, and 49 % or more for others.
_LONGEST_BURST: Final = 0.10
_SLOWER: Final[dict[Phase | None, str]] = {
    Phase.BETWEEN: "which does more between backward and step() than the others",
    Phase.OPTIMIZER: "whose optimizer's step() takes longer than those of the others",
}


def judge(analysis: Analysis) -> Verdict:
    """What bounds the job: the largest of the costs that are worth telling."""
    timing, costs, pauses = analysis.timing, analysis.costs, analysis.pauses
    telling = costs.telling
    pause = next((each for each in pauses if each.share >= PAUSES_TELLING), None)
    if pause and pause.share >= (1.0 - pause.share) * max(telling.values(), default=0.0) / typical(costs.whole):
        return Verdict(pause.kind, pause.rank, pause.sentence)
    if not telling:
        return _compute(analysis)
    largest = max(telling, key=lambda key: telling[key])
    kind, detail = largest
    cost, whole = spread(costs.by_cause[largest]), spread(costs.whole)
    rank = timing.ranks[costs.blamed] if costs.blamed is not None else None
    if kind == "input":
        rank = rank if costs.is_input_of_blamed else None
        what = _explain_input(analysis, "all ranks" if rank is None else f"rank {rank}")
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
        what = f"passes while {'a rank' if rank is None else f'rank {rank}'} has no core: {analysis.who_has_cores}"
    elif kind == "communication":
        rank = None
        what = f"is communication that {_explain_communication(analysis)}"
    else:
        rank = None
        what = "passes between backward and step(), in clipping or logging" if detail else "is the optimizer's step()"
    share = cost.mean / whole.mean
    return Verdict(kind, rank, f"{_share(share, cost)} {what} ({_span(cost, whole)}).")


def _explain_input(analysis: Analysis, who: str) -> str:
    costs = analysis.costs
    loading = typical(costs.loading) / max(typical(costs.input), 1e-9)
    if loading >= _NEARLY_ALL:
        return f"waits for data on {who}"
    if analysis.timing.saw_loader and loading <= 1.0 - _NEARLY_ALL:
        return f"goes to code between step() and forward on {who}, which waits for no DataLoader"
    return f"waits for data on {who}, or for other code between step() and forward"


def _explain_communication(analysis: Analysis) -> str:
    """The end of a sentence that begins with "communication that"."""
    size, buckets, links, cost_ms = analysis.size, analysis.buckets, analysis.model.now, analysis.exposed_ms
    late = analysis.late_parameters
    huge = next((each for each in late if each.holds_ms == 0 and each.exposed_ms >= _MOST * cost_ms), None)
    if huge:
        megabytes = f"{huge.num_bytes / 1e6:.0f} MB"
        return f"nothing hides, because the gradient of {huge.name} ({megabytes}) is ready at the end of backward"
    held = next((each for each in late if each.holds_ms >= _MOST * cost_ms), None)
    if held:
        return (
            f"backward does not hide, because bucket {held.bucket} waits {held.holds_ms:.0f} ms for the gradient of "
            f"{held.name} alone"
        )
    total = sum(bucket.reducing.median for bucket in buckets)
    num_bytes = sum(bucket.num_bytes for bucket in buckets)
    if links and len(buckets) >= _MANY and size > 1 and total > 0:
        latency = 2 * (size - 1) * links.network.alpha_ms * len(buckets)
        mean_bytes = num_bytes / len(buckets)
        those = f"{len(buckets)} small buckets of {mean_bytes / 1e6:.2g} MB"
        if links.network.is_alpha_known and latency > _MOST * total:
            return f"backward does not hide, most of it latency of {those}"
        if not links.network.is_alpha_known and mean_bytes < SMALL_BYTES:
            return (
                f"backward does not hide: {those} take {total / len(buckets):.2g} ms each, because of latency or a "
                "slow link"
            )
    megabytes = f"{num_bytes / 1e6:.3g} MB"
    if total <= 0 or cost_ms > _EXPLAINED * total:
        return f"backward does not hide: {megabytes} take {total:.2g} ms, and ranks stand still for longer"
    speed = bus_bytes(num_bytes, size) / 1e6 / total
    return f"backward does not hide: {megabytes} at {speed:.2g} GB/s"


def _compute(analysis: Analysis) -> Verdict:
    costs, size = analysis.costs, analysis.size
    lost = costs.communication + costs.jitter + costs.straggler + costs.cores
    step = spread(costs.whole)
    ends = f"{size} ranks do the work of {size * analysis.efficiency:.3g}" if size > 1 else "it has one rank"
    unknown = spread(costs.unknown)
    if unknown.mean >= TELLING * step.mean > 0:
        share = unknown.mean / step.mean
        what = "is forward, or code around it" if analysis.timing.saw_loader else "is forward, or waiting for data"
        begin = f"{_share(share, unknown)} {what}: the trace does not tell which ({_span(unknown, step)})"
        return Verdict("compute", None, f"{begin}. Nothing else holds this job back, and {ends}.")
    cost = spread(costs.whole - lost)
    share = cost.mean / step.mean if step.mean else 1.0
    what = "Nothing holds" if share >= _WELL else "No single cause holds"
    begin = f"{what} this job back: {_share(share, cost)} is computing"
    return Verdict("compute", None, f"{begin} ({_span(cost, step)}), and {ends}.")


def _is_in_each_step(cost: Spread) -> bool:
    return cost.low >= _MOST * cost.mean


def _share(share: float, cost: Spread) -> str:
    return f"{share_in_words(share)} of {'each step' if _is_in_each_step(cost) else 'the time'}"


def _span(cost: Spread, whole: Spread) -> str:
    """ "61 ms of 145 ms, between 58 and 66"."""
    digits = 0 if cost.mean >= 10 else 2 if cost.mean < 1 else 1
    mean, low, high = (f"{each:.{digits}f}" for each in (cost.mean, cost.low, cost.high))
    means = f"{mean} ms of {whole.mean:.{digits}f} ms"
    if not _is_in_each_step(cost) or not cost.low <= cost.mean <= cost.high:
        return f"{means} on average"
    return means if low == high else f"{means}, between {low} and {high}"


def remarks(analysis: Analysis, num_optimizers: int) -> Iterator[str]:
    timing, costs, verdict = analysis.timing, analysis.costs, analysis.verdict
    if _arrive_together(analysis):
        yield (
            "All gradients arrive together at the end of backward(), so hardly any communication is hidden. Is the "
            "model compiled as a whole? Then pass backend=torchring.compile_backend() to torch.compile."
        )
    if num_optimizers > 1:
        yield _about_optimizers(analysis, num_optimizers)
    has_model = analysis.run_info.options.get("model") == "given"
    has_first_only = not timing.numbers[timing.counts].any()  # hooks are put on the model after the first step
    if not costs.is_forward_known and not (has_model and has_first_only):
        why = (
            "because it is not called as model(...), or torch.compile leaves the hooks of the model out"
            if has_model
            else "because `wrap` was given no model: torchring.wrap(optimizer, model)"
        )
        other = "other code before backward" if timing.saw_loader else "waiting for data"
        yield f"Forward is not told apart from {other}, {why}."
    for each in analysis.pauses:
        sentence = "" if verdict.sentence.endswith(each.sentence) else f"{each.sentence} "
        these = f"S{each.named_steps[1:]} {'is' if len(each.numbers) == 1 else 'are'}"
        yield f"{sentence}{these} left out of all numbers but steps/s and samples/s; the figure over time shows them."
    yield from slow_stretches(timing, analysis.critical, analysis.run_info)
    if (number := int(timing.counts.sum())) < FEWEST_STEPS:
        counting = "1 step counts" if number == 1 else f"{number} steps count"
        yield f"Only {counting}: too few for advice and predictions. Numbers are more reliable with 50 or more."
    if has_first_only:
        yield "The first step begins in wrap(), so what the script does before its loop is part of that step."


def _about_optimizers(analysis: Analysis, num_optimizers: int) -> str:
    timing, parameters = analysis.timing, analysis.run_info.parameters
    remark = (
        f"Steps have {num_optimizers} different sets of buckets, as those of several optimizers. The step of each "
        "optimizer counts as a step, and times are means over all of them. Buckets are those of the steps that send "
        f"{timing.bucket_bytes.sum() / 1e6:.3g} MB, those of {parameters[0].name} and what follows it."
    )
    if len(timing.optimizers) > 1:
        remark += (
            f" Their backward computes gradients for {len(timing.optimizers)} optimizers. If only one steps then, call "
            "requires_grad_(False) on the parameters of the others before forward, and undo it after backward."
        )
    return remark


def _arrive_together(analysis: Analysis) -> bool:
    """Whether torch.compile has made one autograd node of the whole backward, where parts could have been hidden."""
    run_info, shares = analysis.run_info, ready_shares(analysis.job)
    if not run_info.is_compiled or run_info.overlap == "inline" or len(analysis.buckets) < 2 or shares is None:
        return False
    if np.isfinite(shares).sum() < 2:
        return False
    burst = float(np.nanmax(shares) - np.nanmin(shares))
    if not analysis.costs.is_forward_known:  # a whole graph leaves out the hooks: backward begins with a gradient
        before, backward = (np.median(analysis.cycle[..., each]) for each in (Phase.INPUT, Phase.BACKWARD))
        burst *= float(backward / max(before + backward, 1e-9))
    return burst <= _LONGEST_BURST
