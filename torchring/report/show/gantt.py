"""The median step as lanes: what each rank does, and below that what becomes of its buckets."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import plotly.graph_objects as go

from torchring.observer import Phase
from torchring.report.model.lanes import LaneBucket
from torchring.report.show.figures import COLORS, default_rank, figure, shown_ranks
from torchring.report.verdict.findings import Analysis
from torchring.report.words import NAMES

_RANKS_IN_VIEW: Final = 8


def median_step(analysis: Analysis) -> Any:
    ranks = [rank.rank for rank in shown_ranks(analysis)]
    place = {rank: i for i, rank in enumerate(ranks)}
    spans = [span for span in analysis.median_step.spans if span.rank in place]
    phases = [
        _bars(
            NAMES[phase],
            COLORS[phase],
            [(place[span.rank] - 0.2, span.begin_ms, span.end_ms) for span in spans if span.phase is phase],
            f"rank %{{customdata[1]}}: {NAMES[phase]}<br>%{{customdata[0]:.2f}} ms, until %{{x:.2f}} ms",
            [(span.rank,) for span in spans if span.phase is phase],
        )
        for phase in Phase
        if any(span.phase is phase for span in spans)
    ]
    views, shown = views_of(analysis)
    return figure(
        [*phases, *_buckets(analysis, place)],
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


def _buckets(analysis: Analysis, place: Mapping[int, int]) -> list[Any]:
    buckets = [bucket for bucket in analysis.median_step.buckets if bucket.rank in place]
    buckets.sort(key=lambda bucket: (bucket.rank, bucket.launched_ms, bucket.index))
    if not buckets:
        return []
    turns = [_turn(bucket, before) for before, bucket in zip([None, *buckets], buckets, strict=False)]
    lanes = [place[bucket.rank] + 0.2 for bucket in buckets]
    about = (
        "rank %{customdata[1]}, bucket %{customdata[2]} (%{customdata[3]:.2f} MB)"
        "<br>ready at %{customdata[4]:.2f} ms, left at %{customdata[5]:.2f} ms<br>"
    )
    facts = [
        (each.rank, each.index, each.num_bytes / 1e6, each.ready_ms, each.launched_ms, each.last_rank)
        for each in buckets
    ]
    return [
        _bars(
            "bucket waits",
            COLORS[Phase.WAITING],
            [(lane, begin, middle) for lane, (begin, middle, _) in zip(lanes, turns, strict=True)],
            about + "waits %{customdata[0]:.2f} ms for rank %{customdata[6]}",
            facts,
        ),
        _bars(
            "bucket is reduced",
            COLORS[Phase.EXPOSED],
            [(lane, middle, end) for lane, (_, middle, end) in zip(lanes, turns, strict=True)],
            about + "reduced in %{customdata[0]:.2f} ms, at %{x:.2f} ms",
            facts,
            [str(bucket.index) for bucket in buckets],
        ),
        go.Scatter(
            name="bucket is ready",
            mode="markers",
            x=np.array([bucket.ready_ms for bucket in buckets], np.float32),
            y=np.array(lanes, np.float32),
            marker={"symbol": "line-ns-open", "size": 20, "line": {"width": 1.5}},
            hoverinfo="skip",
        ),
    ]


def _turn(bucket: LaneBucket, before: LaneBucket | None) -> tuple[float, float, float]:
    """Buckets of a rank take turns. When the turn of this one begins, its reduction begins, and its reduction ends."""
    free = before.reduced_ms if before is not None and before.rank == bucket.rank else -math.inf
    begin = min(max(bucket.launched_ms, free), bucket.reduced_ms)
    middle = min(max(bucket.all_launched_ms, begin), bucket.reduced_ms)
    return begin, middle, bucket.reduced_ms


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
