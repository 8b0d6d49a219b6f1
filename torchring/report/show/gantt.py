"""The median step as lanes: what each rank does, and below that what becomes of its buckets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import plotly.graph_objects as go

from torchring.observer import Phase
from torchring.report.model.lanes import spans_of
from torchring.report.show.figures import COLORS, default_rank, figure, shown_ranks
from torchring.report.verdict.findings import Analysis
from torchring.report.words import NAMES

_RANKS_IN_VIEW: Final = 8


def median_step(analysis: Analysis) -> Any:
    timing, i = analysis.timing, analysis.median_step
    ranks, base = [rank.rank for rank in shown_ranks(analysis)], float(timing.begin[i].min())
    bars: dict[Phase, list[tuple[float, float, float]]] = {phase: [] for phase in Phase}
    ranks_of: dict[Phase, list[tuple[int]]] = {phase: [] for phase in Phase}
    for place, rank in enumerate(ranks):
        j = timing.ranks.index(rank)
        step, at_ms = analysis.job.steps[i][j], float(timing.begin[i, j]) - base
        for phase, *times in spans_of(step, float(analysis.critical.waiting[i, j])):
            begin, end = (at_ms + (time - step.begin) / 1e6 for time in times)
            bars[phase].append((place - 0.2, begin, end))
            ranks_of[phase].append((rank,))
    phases = [
        _bars(
            NAMES[phase],
            COLORS[phase],
            bars[phase],
            f"rank %{{customdata[1]}}: {NAMES[phase]}<br>%{{customdata[0]:.2f}} ms, until %{{x:.2f}} ms",
            ranks_of[phase],
        )
        for phase in Phase
        if bars[phase]
    ]
    views, shown = views_of(analysis)
    return figure(
        [*phases, *_buckets(analysis, ranks, base)],
        height=110 + 62 * min(len(ranks), _RANKS_IN_VIEW),
        barmode="overlay",
        uniformtext={"minsize": 9, "mode": "hide"},
        xaxis={"title": "milliseconds from the beginning of the step"},
        yaxis={
            "title": "rank",
            "range": views[shown][1],
            "tickvals": [*range(len(ranks))],
            "ticktext": [*map(str, ranks)],
            "showgrid": False,
        },
    )


def views_of(analysis: Analysis) -> tuple[list[tuple[str, list[float]]], int]:
    """Groups of ranks that are seen together: names, and the range of the axis. Also, which group is shown first."""
    ranks = [rank.rank for rank in shown_ranks(analysis)]
    views = []
    for first in range(0, len(ranks), _RANKS_IN_VIEW):
        last = min(first + _RANKS_IN_VIEW, len(ranks)) - 1
        views.append((f"{ranks[first]} to {ranks[last]}", [last + 0.5, first - 0.5]))
    return views, ranks.index(default_rank(analysis)) // _RANKS_IN_VIEW


def _buckets(analysis: Analysis, ranks: Sequence[int], base: float) -> list[Any]:
    timing, critical, i = analysis.timing, analysis.critical, analysis.median_step
    facts: list[tuple[float, ...]] = []
    waits: list[tuple[float, float, float]] = []
    reductions: list[tuple[float, float, float]] = []
    for place, rank in enumerate(ranks):
        j, free = timing.ranks.index(rank), -math.inf
        for k in np.argsort(timing.launched[i, j], kind="stable"):
            ready, launched, reduced = (
                float(each[i, j, k]) - base for each in (timing.ready, timing.launched, timing.reduced)
            )
            # Buckets of a rank take turns. Then a bucket waits for the last rank, and is reduced.
            begin = min(max(launched, free), reduced)
            middle = min(max(float(critical.all_launched[i, k]) - base, begin), reduced)
            waits.append((place + 0.2, begin, middle))
            reductions.append((place + 0.2, middle, reduced))
            last = timing.ranks[critical.last[i, k]]
            facts.append((rank, int(k), timing.bucket_bytes[k] / 1e6, ready, launched, last))
            free = reduced
    if not facts:
        return []
    about = (
        "rank %{customdata[1]}, bucket %{customdata[2]} (%{customdata[3]:.2f} MB)"
        "<br>ready at %{customdata[4]:.2f} ms, left at %{customdata[5]:.2f} ms<br>"
    )
    of_waits = about + "waits %{customdata[0]:.2f} ms for rank %{customdata[6]}"
    of_reductions = about + "reduced in %{customdata[0]:.2f} ms, at %{x:.2f} ms"
    numbers = [str(index) for _, index, *_ in facts]
    return [
        _bars("bucket waits", COLORS[Phase.WAITING], waits, of_waits, facts),
        _bars("bucket is reduced", COLORS[Phase.EXPOSED], reductions, of_reductions, facts, numbers),
        go.Scatter(
            name="bucket is ready",
            mode="markers",
            x=np.array([ready for _, _, _, ready, *_ in facts], np.float32),
            y=np.array([lane for lane, *_ in waits], np.float32),
            marker={"symbol": "line-ns-open", "size": 20, "line": {"width": 1.5}},
            hoverinfo="skip",
        ),
    ]


def _bars(
    name: str,
    color: str,
    bars: Sequence[tuple[float, float, float]],
    template: str,
    facts: Sequence[Sequence[float]],
    texts: Sequence[str] | None = None,
) -> Any:
    """Bars in lanes: (middle of the lane, begin, end).

    In the template `x` is the end, `customdata[0]` the length, and from `customdata[1]` on there are the facts.
    """
    middles, begins, ends = np.array(bars, np.float32).T
    return go.Bar(
        name=name,
        orientation="h",
        y=middles,
        base=begins,
        x=ends - begins,
        width=0.36,
        marker={"color": color, "line": {"width": 0}},
        customdata=np.column_stack([ends - begins, np.array(facts, np.float32)]),
        hovertemplate=template + "<extra></extra>",
        text=texts,
        textposition="inside",
        insidetextanchor="middle",
        textangle=0,
        textfont={"color": "#ffffff"},
    )
