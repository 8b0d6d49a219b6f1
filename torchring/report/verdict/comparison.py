"""Two runs beside each other: what changed, by how much, and whether that is more than noise.

The steps of a run that count are cut into ten parts. A number is the median of the means of these parts, so that what
disturbs a few steps does not decide. It has changed if nine of ten pairs of parts, one of each run, agree about the
direction, and if the change is at least 3 % of the longer step. The former is the test of Mann and Whitney (1947), and
wrong for 0.2 % of equal runs. It compares parts and not steps, because what disturbs one step often disturbs the next,
too. The latter is for what differs between two runs of one script, such as where their memory lies.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from torchring.observer import Phase
from torchring.report.model.core_time import OTHERS, num_workers
from torchring.report.model.timing import Array, typical
from torchring.report.verdict.costs import TELLING
from torchring.report.verdict.findings import Analysis
from torchring.report.words import NAMES, number

_NUM_PARTS: Final = 10
_AGREE: Final = 0.9
_LEAST: Final = 0.03
_SAME: Final = 0.01  # samples of a step
_MOST: Final = 0.5  # of the change of a step
STEP, WAITING, NO_CORE, ON_CORE, SPEED = "step", "ranks wait", "no core", "step without that", "samples/s"


@dataclass(frozen=True)
class Change:
    """A number in two runs: milliseconds of a step, or samples a second."""

    before: float
    after: float
    is_noise: bool

    @property
    def by(self) -> float:
        return self.after - self.before


@dataclass(frozen=True)
class Comparison:
    """What differs between two runs, A and B."""

    sentence: str
    changes: Mapping[str, Change]  # of the step, of its phases on the rank that the others wait for, and of the rest
    facts: Mapping[str, tuple[str, str]]  # that differ: those of A and of B
    gone: tuple[str, ...]  # what was advised for A only
    new: tuple[str, ...]  # what is advised for B only


def compare(a: Analysis, b: Analysis) -> Comparison:
    """Compare the steps that count, so those without a pause."""
    old, new = _parts(a), _parts(b)
    least = _LEAST * float(max(np.median(old[STEP]), np.median(new[STEP])))
    changes = {name: _change(old[name], new[name], least) for name in old if name in new}
    if SPEED in changes:
        changes[SPEED] = _change(old[SPEED], new[SPEED], _LEAST * changes[SPEED].before)
    known, found = _facts(a), _facts(b)
    facts = {name: (known.get(name, "-"), found.get(name, "-")) for name in {**known, **found}}
    of_a, of_b = ({re.sub(r"\d+|,.*| on .*", "", each.what): each.what for each in run.advice} for run in (a, b))
    if not (a.has_enough_steps and b.has_enough_steps):
        of_a = of_b = {}  # a run of few steps gets no advice
    return Comparison(
        _sentence(changes, a, b),
        {name: each for name, each in changes.items() if max(each.before, each.after) >= least},
        {name: texts for name, texts in facts.items() if texts[0] != texts[1]},
        tuple(of_a[what] for what in of_a if what not in of_b),
        tuple(of_b[what] for what in of_b if what not in of_a),
    )


def _parts(run: Analysis) -> dict[str, Array]:
    """[10], means of the parts of a run, by name."""
    counts = run.timing.counts
    path = run.critical.path[counts]
    found = {STEP: path.sum(1)} | {NAMES[phase]: path[:, phase] for phase in Phase if phase != Phase.WAITING}
    found[WAITING] = run.critical.phases[counts][..., Phase.WAITING].mean(1)
    if run.costs.queue is not None:
        found |= {NO_CORE: run.costs.queue.whole, ON_CORE: found[STEP] - run.costs.queue.whole}
    samples = run.timing.num_samples[counts]
    if samples.all():
        found[SPEED] = samples.sum(1) * 1e3
    means = {
        name: np.array([each.mean() for each in np.array_split(values, _NUM_PARTS) if len(each)])
        for name, values in found.items()
    }
    if SPEED in means:
        means[SPEED] = means[SPEED] / means[STEP]
    return means


def _change(old: Array, new: Array, least: float) -> Change:
    before, after = float(np.median(old)), float(np.median(new))
    longer = float((new[:, None] > old).mean())
    is_clear = max(longer, 1.0 - longer) >= _AGREE and min(len(old), len(new)) == _NUM_PARTS
    return Change(before, after, not is_clear or abs(after - before) < least)


def _sentence(changes: Mapping[str, Change], a: Analysis, b: Analysis) -> str:
    step, speed, rest = changes[STEP], changes.get(SPEED), changes.get(ON_CORE)
    values = f"{number(step.before)} -> {number(step.after)} ms a step"
    if (num_steps := min(a.num_steps, b.num_steps)) < _NUM_PARTS:
        return f"{num_steps} steps are too few to tell a change from noise: {values}."
    if speed is not None and abs(_samples(b) / _samples(a) - 1.0) > _SAME:  # a step says little about other batches
        return f"{_ratio(speed.after, speed.before, speed)}: {number(speed.before)} -> {number(speed.after)} samples/s."
    lost = [run.step.mean and typical(run.costs.cores) / run.step.mean for run in (a, b) if run.who_has_cores == OTHERS]
    if rest is not None and max(lost, default=0.0) >= TELLING:
        text = f"{_ratio(rest.before, rest.after, rest)}, without the time for which other programs held the cores"
        return f"{text}: {number(rest.before)} -> {number(rest.after)} ms a step. With that time: {values}."
    text = f"{_ratio(step.before, step.after, step)}: {values}."
    causes = {name: abs(each.by) for name, each in changes.items() if each.by * step.by > 0 and not each.is_noise}
    cause = max(causes.keys() - {STEP, ON_CORE, SPEED}, key=lambda name: causes[name], default="")
    if step.is_noise or not cause or causes[cause] < _MOST * abs(step.by):
        return text
    return f"{text} {cause.capitalize()} {'rose' if step.by > 0 else 'fell'} by {number(causes[cause])} ms."


def _ratio(better: float, worse: float, change: Change) -> str:
    if change.is_noise:
        return "No difference beyond noise"
    ratio = better / worse
    fast, slow = ("B", "A") if ratio > 1.0 else ("A", "B")
    return f"{fast} is {max(ratio, 1.0 / ratio):.2f} times as fast as {slow}"


def _samples(run: Analysis) -> float:
    """Samples of all ranks in a step."""
    return float(np.mean(run.timing.num_samples[run.timing.counts].sum(1)))


def _facts(run: Analysis) -> dict[str, str]:
    """What was run, by name."""
    info, workers = run.run_info, num_workers(run.timing)
    return {
        "ranks": str(run.size),
        "hosts": str(len({rank.host for rank in run.ranks})),
        "device": info.device,
        "cores of a host": str(info.num_cores),
        "threads of a rank": str(info.num_threads),
        "samples of a step": number(_samples(run)),
        "workers of a DataLoader": str(workers) if workers >= 0 else "-",
        "MB of gradients": number(sum(each.num_bytes for each in info.parameters) / 1e6),
        "buckets": str(len(run.buckets)),
        "algorithm": info.algorithm,
        "overlap": info.overlap,
        **info.options,
        **info.versions,
    }
