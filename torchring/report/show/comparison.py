"""Two runs beside each other: what changed, by how much, and whether that is more than noise.

The steps of a run that count are cut into ten parts. A number is the median of the means of these parts, so that what
disturbs a few steps does not decide. It has changed if nine of ten pairs of parts, one of each run, agree about the
direction, and if the change is at least 3 % of the longer step. The former is the test of Mann and Whitney (1947), and
wrong for 0.2 % of equal runs. It compares parts and not steps, because what disturbs one step often disturbs the next,
too. The latter is for what differs between two runs of one script, such as where their memory lies.
"""

import re
from collections.abc import Mapping
from typing import Final, NamedTuple

import numpy as np

from torchring.observer import Phase
from torchring.report.model.core_time import OTHERS, num_workers
from torchring.report.model.timing import Array, typical
from torchring.report.show.sections import Section
from torchring.report.show.terminal import lines_of, text_of
from torchring.report.verdict.costs import TELLING
from torchring.report.verdict.findings import Analysis
from torchring.report.verdict.pauses import slow_stretches
from torchring.report.words import NAMES, number

_NUM_PARTS: Final = 10
_AGREE: Final = 0.9
_LEAST: Final = 0.03
_SAME: Final = 0.01  # samples of a step
_MOST: Final = 0.5  # of the change of a step
_MANY_TIMES: Final = 10  # of which no percentages are told
STEP, ON_CORE, SPEED = "step", "step without that", "samples/s"
_OF_RUN: Final = ("size", "local_size", "device", "num_cores", "num_threads", "algorithm", "overlap")


class Change(NamedTuple):
    """A number in two runs: milliseconds of a step, or samples a second."""

    before: float
    after: float
    is_noise: bool

    def __str__(self) -> str:
        share = f" ({100 * (self.after / self.before - 1):+.0f} %)" if self.after < _MANY_TIMES * self.before else ""
        by = f"{'+' if self.after > self.before else '-'}{number(abs(self.after - self.before))}{share}"
        return "within noise" if self.is_noise else by


def beside(a: Analysis, b: Analysis) -> str:
    """A sentence, and tables of what differs between two runs, for a terminal. Steps with a pause do not count."""
    changes = compare(a, b)
    rows = ((name, number(each.before), number(each.after), str(each)) for name, each in changes.items())
    known, found = _facts(a), _facts(b)
    facts = ((name, known.get(name, "-"), found.get(name, "-")) for name in {**known, **found})
    # What is advised, by the same without numbers and ranks. A run of few steps gets no advice.
    runs = (a, b) if a.has_enough_steps and b.has_enough_steps else ()
    kinds = [{re.sub(r"\d+|,.*| on .*", "", each.what): each.what for each in run.advice} for run in runs]
    pairs = zip(("Gone", "New"), kinds, kinds[::-1], strict=False)
    advice = [f"{word}: {own[kind]}." for word, own, others in pairs for kind in own if kind not in others]
    sections = [
        Section("changes", "Milliseconds of a step", (), ("", "A", "B", "change"), tuple(rows)),
        Section("facts", "What was different", (), ("", "A", "B"), tuple(row for row in facts if row[1] != row[2])),
        Section("advice", "Advice", tuple(advice)),
    ]
    texts = (text_of(section) for section in sections if section.rows or section.sentences)
    slow = [
        f"{name}: {text}"
        for name, run in (("A", a), ("B", b))
        for text in slow_stretches(run.timing, run.critical, run.run_info)
    ]
    sentence = _sentence(changes, a, b)
    if slow:  # the median of the parts may not show them
        sentence = sentence.replace("No difference beyond noise", "The runs differ in a part of their steps")
    return "\n\n".join(["\n".join(lines_of(" ".join([sentence, *slow]))), *texts]) + "\n"


def compare(a: Analysis, b: Analysis) -> dict[str, Change]:
    """What both runs have, by name, without what is short in both: the step, and its phases on the slowest rank."""
    old, new = _parts(a), _parts(b)
    medians = {name: (float(np.median(old[name])), float(np.median(new[name]))) for name in old if name in new}
    found = {}
    for name, (before, after) in medians.items():
        least = _LEAST * (before if name == SPEED else max(medians[STEP]))
        agree = float((new[name][:, None] > old[name]).mean())
        is_clear = max(agree, 1.0 - agree) >= _AGREE and min(a.num_steps, b.num_steps) >= _NUM_PARTS
        if max(before, after) >= least:
            found[name] = Change(before, after, not is_clear or abs(after - before) < least)
    return found


def _parts(run: Analysis) -> dict[str, Array]:
    """[10], the means of the parts of a run, by name."""
    counts, queue = run.timing.counts, run.costs.queue
    path, samples = run.critical.path[counts], run.timing.num_samples[counts]
    found = {STEP: path.sum(1)} | {NAMES[phase]: path[:, phase] for phase in Phase if phase != Phase.WAITING}
    found["ranks wait"] = run.critical.phases[counts][..., Phase.WAITING].mean(1)
    if queue is not None:
        found |= {"no core": queue.whole, ON_CORE: path.sum(1) - queue.whole}
    if samples.all():
        found[SPEED] = 1e3 * samples.sum(1)
    parts = {name: np.array_split(values, min(_NUM_PARTS, len(path))) for name, values in found.items()}
    means = {name: np.array([part.mean() for part in each]) for name, each in parts.items()}
    return means | {name: means[name] / means[STEP] for name in means if name == SPEED}


def _sentence(changes: Mapping[str, Change], a: Analysis, b: Analysis) -> str:
    step, rest, speed = (changes.get(name) for name in (STEP, ON_CORE, SPEED))
    if (num_steps := min(a.num_steps, b.num_steps)) < _NUM_PARTS or step is None:
        return f"{num_steps} steps are too few to tell a change from noise."
    if speed is not None and abs(_samples(b) - _samples(a)) > _SAME * _samples(a):  # then a step says little
        return _faster(speed, SPEED)
    lost = [typical(run.costs.cores) / run.step.mean for run in (a, b) if run.who_has_cores == OTHERS]
    if rest is not None and max(lost, default=0.0) >= TELLING:
        return _faster(rest, "ms a step, without the time for which other programs held the cores")
    sign = 1 if step.after > step.before else -1
    by = {name: (each.after - each.before) * sign for name, each in changes.items() if not each.is_noise}
    cause = max(by.keys() - {STEP, ON_CORE, SPEED}, key=by.__getitem__, default=STEP)
    text = _faster(step, "ms a step")
    if step.is_noise or cause == STEP or by[cause] < _MOST * by[STEP]:
        return text
    return f"{text} {cause.capitalize()} {'rose' if sign > 0 else 'fell'} by {number(by[cause])} ms."


def _faster(change: Change, unit: str) -> str:
    before, after, is_noise = change
    fast, slow = ("B", "A") if (before > after) == (unit != SPEED) else ("A", "B")
    text = f"{fast} is {max(before, after) / max(min(before, after), 1e-9):.2f} times as fast as {slow}"
    text = "No difference beyond noise" if is_noise else text
    return f"{text}: {number(before)} -> {number(after)} {unit}."


def _samples(run: Analysis) -> float:
    return float(np.mean(run.timing.num_samples[run.timing.counts].sum(1)))


def _facts(run: Analysis) -> dict[str, str]:
    own = {name.replace("_", " "): str(getattr(run.run_info, name)) for name in _OF_RUN}
    own |= {
        "samples": number(_samples(run)),
        "workers": str(num_workers(run.timing)).replace("-1", "-"),
        "buckets": str(len(run.buckets)),
    }
    return own | run.run_info.options | run.run_info.versions
