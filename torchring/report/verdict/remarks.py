"""Sentences about what is missing or strange in a trace."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np

from torchring.observer import Phase
from torchring.report.model.bucket_layout import ready_shares
from torchring.report.model.timing import find_change, typical
from torchring.report.verdict.findings import FEWEST_STEPS, Analysis
from torchring.report.words import share_in_words

_NO_CORE: Final = 0.05  # of a step
# Share of a backward in which gradients arrive. It was 2 % for a model in one graph, and 49 % or more for others.
_LONGEST_BURST: Final = 0.10
_FASTER_OR_SLOWER: Final = 0.20  # of a step


def remarks(analysis: Analysis, num_optimizers: int) -> Iterator[str]:
    timing, costs, verdict = analysis.timing, analysis.costs, analysis.verdict
    if _arrive_together(analysis):
        yield (
            "All gradients arrive together at the end of backward(), so hardly any communication is hidden. Is the "
            "model compiled as a whole? Compile each layer instead: for layer in model.layers: layer.compile()."
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
    if (number := int(timing.counts.sum())) < FEWEST_STEPS:
        counting = "1 step counts" if number == 1 else f"{number} steps count"
        yield f"Only {counting}: too few for advice and predictions. Numbers are more reliable with 50 or more."
    if has_first_only:
        yield "The first step begins in wrap(), so what the script does before its loop is part of that step."
    queued_ms = typical(costs.cores)
    if verdict.kind != "cores" and queued_ms >= _NO_CORE * analysis.step.mean > 0:
        yield (f"For {queued_ms:.3g} ms of a step, a rank was ready to run, but had no core: {analysis.who_has_cores}.")
    whole = analysis.critical.path[timing.counts].sum(1)
    change = find_change(whole, _FASTER_OR_SLOWER * typical(whole))
    if verdict.steps is None and change is not None:
        number = timing.numbers[timing.counts][change]
        before, since = typical(whole[:change]), typical(whole[change:])
        yield f"From step {number:,} on, a step takes {since:.3g} ms on average; before, {before:.3g} ms."


def _about_optimizers(analysis: Analysis, num_optimizers: int) -> str:
    timing, path = analysis.timing, analysis.critical.path
    share = path[timing.reduces].sum() / path[timing.counts].sum()
    parameters = analysis.run_info.parameters
    names = f", {parameters[0].name} and {len(parameters) - 1} more parameters" if len(parameters) > 1 else ""
    remark = (
        f"Steps have {num_optimizers} different sets of buckets, as those of several optimizers. The step of each "
        "optimizer counts as a step, and times are means over all of them. Buckets are those of the steps that send "
        f"{timing.bucket_bytes.sum() / 1e6:.3g} MB{names}: these steps take {share_in_words(share)} of the time."
    )
    if len(timing.optimizers) > 1:
        remark += (
            f" Their backward computes gradients for {len(timing.optimizers)} optimizers, and all of them are reduced. "
            "If only one of the optimizers steps then, call requires_grad_(False) on the parameters of the others "
            "before forward, and requires_grad_(True) after backward."
        )
    return remark


def _arrive_together(analysis: Analysis) -> bool:
    """Whether torch.compile has made one autograd node of the whole backward, where parts could have been hidden."""
    run_info, shares = analysis.run_info, ready_shares(analysis.job)
    if not run_info.is_compiled or run_info.overlap == "inline" or len(analysis.buckets) < 2 or shares is None:
        return False
    if np.isfinite(shares).sum() < 2:
        return False
    spread = float(np.nanmax(shares) - np.nanmin(shares))
    if not analysis.costs.is_forward_known:  # a whole graph leaves out the hooks: backward begins with a gradient
        before, backward = (np.median(analysis.cycle[..., each]) for each in (Phase.INPUT, Phase.BACKWARD))
        spread *= float(backward / max(before + backward, 1e-9))
    return spread <= _LONGEST_BURST
