"""The figures of the page as plain data, which page.html draws. Each function makes one figure of an analysis."""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final

import numpy as np

from torchring.observer import Phase
from torchring.report.model.timing import spans_of
from torchring.report.show.sections import shown_ranks
from torchring.report.verdict.findings import Analysis
from torchring.report.words import NAMES, number

_MOST_POINTS: Final = 300  # over time
_MOST_LANES: Final = 8  # ranks
_MOST_TICKS: Final = 7  # of an axis


@dataclass(frozen=True)
class Span:
    begin: float
    end: float
    text: str  # what the mouse shows; may have several lines
    phase: Phase | None = None  # which gives the colour; None for a part of `Figure.areas`


@dataclass(frozen=True)
class Figure:
    """Rows of spans, one below the other."""

    x: str  # what the horizontal axis says
    begin: float  # of the horizontal axis
    end: float
    rows: list[tuple[str, list[Span]]]  # label, spans
    # Upper edges, which cover the spans: the highest first. None for the time without a core.
    areas: dict[Phase | None, list[float]] = field(default_factory=dict)
    most: float = 0.0  # of the vertical axis of `areas`

    @staticmethod
    def ticks(begin: float, end: float) -> list[float]:
        """Round numbers: multiples of 1, 2 or 5 times a power of ten."""
        unit = 10.0 ** np.floor(np.log10(max(end - begin, 1e-9) / _MOST_TICKS))
        tick = next(unit * n for n in (1, 2, 5, 10) if (end - begin) / (unit * n) <= _MOST_TICKS)
        return [float(each) for each in tick * np.arange(np.ceil(begin / tick), np.floor(end / tick) + 1)]


def phases_by_rank(analysis: Analysis) -> Figure:
    """A bar for each rank: its mean step, made of its phases."""
    rows: list[tuple[str, list[Span]]] = []
    shown = shown_ranks(analysis)
    for rank in (rank for rank in analysis.ranks if rank.rank in shown):
        rows.append((f"rank {rank.rank}", spans := []))
        end = 0.0
        for phase in analysis.phases:
            begin, end = end, end + rank.phases[phase].mean
            text = f"rank {rank.rank} on {rank.host}\n{NAMES[phase]}: {number(end - begin)} ms"
            spans.append(Span(begin, end, text, phase))
    return Figure("milliseconds of a step", 0.0, max(spans[-1].end for _, spans in rows), rows)


def phases_over_time(analysis: Analysis) -> Figure:
    """Steps of the rank that others wait for most, one beside the other. A long trace shows means of neighbours."""
    numbers, (rank,) = analysis.timing.numbers, shown_ranks(analysis, 1)
    j = analysis.timing.ranks.index(rank)
    queued = np.maximum(analysis.timing.queued[:, j], 0.0) * (analysis.ranks[j].queued is not None)
    of_rank = np.column_stack([analysis.critical.phases[:, j], queued])
    firsts = np.arange(0, len(numbers), -(-len(numbers) // _MOST_POINTS))
    means = np.add.reduceat(of_rank, firsts, axis=0) / np.diff([*firsts, len(numbers)])[:, None]
    phases = [phase for phase in Phase if means[:, phase].any()]
    edges = np.cumsum(means[:, phases], axis=1)
    steps = edges[:, -1]
    areas: dict[Phase | None, list[float]] = {phase: edges[:, i].tolist() for i, phase in [*enumerate(phases)][::-1]}
    names = {int(phase): NAMES[phase] for phase in phases}
    if queued.any():
        areas[None], names[len(Phase)] = means[:, -1].tolist(), "of this, without a core"
    begins, columns = [*numbers[firsts].tolist(), int(numbers[-1]) + 1], []
    for i, (begin, end) in enumerate(pairwise(begins)):
        name = f"step {begin:,}" if end == begin + 1 else f"mean of steps {begin:,} to {end - 1:,}"
        lines = (f"\n{what}: {number(means[i, k])} ms" for k, what in names.items())
        columns.append(Span(begin, end, f"{name}, rank {rank}: {number(steps[i])} ms{''.join(lines)}"))
    most = min(steps.max(), 2.0 * float(np.quantile(steps, 0.9)))  # a few long steps would flatten all others
    cut = int((steps > most).sum())
    x = f"step ({cut} longer than shown)" if cut else "step"
    return Figure(x, begins[0], begins[-1], [("ms", columns)], areas, most)


def median_step(analysis: Analysis) -> Figure:
    """One step: what each rank does and, below that, when its buckets wait for a rank and when they are reduced."""
    timing, critical, i = analysis.timing, analysis.critical, analysis.median_step
    base = float(timing.begin[i].min())
    rows: list[tuple[str, list[Span]]] = []
    for rank in shown_ranks(analysis, _MOST_LANES):
        j = timing.ranks.index(rank)
        step, at_ms = analysis.job.steps[i][j], float(timing.begin[i, j]) - base
        rows.append((f"rank {rank}", spans := []))
        for phase, *times in spans_of(step, float(critical.waiting[i, j])):
            begin, end = (at_ms + (time - step.begin) / 1e6 for time in times)
            spans.append(Span(begin, end, f"rank {rank}\n{NAMES[phase]}: {end - begin:.2f} ms", phase))
        rows.append(("buckets", buckets := []))
        free = -np.inf
        for k in np.argsort(timing.launched[i, j], kind="stable"):
            # Buckets of a rank take turns. Then a bucket waits for the last rank, and is reduced.
            ready, launched, reduced = (
                float(each[i, j, k]) - base for each in (timing.ready, timing.launched, timing.reduced)
            )
            begin = min(max(launched, free), reduced)
            middle = min(max(float(critical.all_launched[i, k]) - base, begin), reduced)
            free = reduced
            text = f"rank {rank}, bucket {k} ({timing.bucket_bytes[k] / 1e6:.2f} MB)\nready at {ready:.2f} ms\n"
            waits = f"{text}waits {middle - begin:.2f} ms for rank {timing.ranks[critical.last[i, k]]}"
            buckets.append(Span(begin, middle, waits, Phase.WAITING))
            buckets.append(Span(middle, reduced, f"{text}reduced in {reduced - middle:.2f} ms", Phase.EXPOSED))
    rows = [row for row in rows if row[1]]
    return Figure("milliseconds since the step began", 0.0, max(it.end for _, spans in rows for it in spans), rows)


DRAW_AS: Final[dict[str, Callable[[Analysis], Figure]]] = {
    "by-rank": phases_by_rank,
    "over-time": phases_over_time,
    "lanes": median_step,
}
