"""The figures of the page. Each function draws one figure of an analysis."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any, Final

import numpy as np
import plotly.graph_objects as go

from torchring.observer import Phase
from torchring.report.model.buckets import BucketSummary
from torchring.report.model.lanes import MOST_RANKS
from torchring.report.model.ranks import RankSummary
from torchring.report.model.timing import Spread
from torchring.report.show.formats import mean_with_spread, milliseconds
from torchring.report.verdict.findings import Analysis
from torchring.report.words import NAMES

# By Okabe and Ito (2008), told apart by people with any kind of colour vision, on white and on black.
COLORS: Final = {
    Phase.INPUT: "#e69f00",
    Phase.FORWARD: "#56b4e9",
    Phase.BACKWARD: "#0072b2",
    Phase.WAITING: "#cc79a7",
    Phase.EXPOSED: "#d55e00",
    Phase.BETWEEN: "#999999",
    Phase.OPTIMIZER: "#009e73",
}
OTHER_COLOR: Final = "#64748b"  # of several phases together


def shown_ranks(analysis: Analysis) -> list[RankSummary]:
    """The ranks that figures show: those that the others wait for most, by rank."""
    by_blame = sorted(analysis.ranks, key=lambda rank: -rank.is_last_share)
    return sorted(by_blame[:MOST_RANKS], key=lambda rank: rank.rank)


def shown_buckets(analysis: Analysis, at_most: int) -> list[BucketSummary]:
    """The buckets with most exposed communication, in plan order."""
    by_exposed = sorted(analysis.buckets, key=lambda bucket: (-bucket.exposed.median, -bucket.num_bytes))
    return sorted(by_exposed[:at_most], key=lambda bucket: bucket.index)


def default_rank(analysis: Analysis) -> int:
    """The rank that is shown first: the one to blame, or else the one that the others wait for most."""
    ranks = shown_ranks(analysis)
    blamed = [rank.rank for rank in ranks if rank.rank == analysis.verdict.rank]
    return blamed[0] if blamed else max(ranks, key=lambda rank: rank.is_last_share).rank


def figure(traces: Sequence[Any], height: int, **layout: Any) -> Any:
    """A figure of so many CSS pixels. Text and marks get their colours from page.css."""
    clear, line = "rgba(0,0,0,0)", "rgba(128,128,128,0.35)"
    drawn = go.Figure(traces, layout={"template": go.layout.Template(), "showlegend": False, "height": height})
    drawn.update_layout(
        margin={"l": 10, "r": 14, "t": 14, "b": 10},
        font={"family": "system-ui, sans-serif", "size": 12},
        hoverlabel={"align": "left", "namelength": -1},
        paper_bgcolor=clear,
        plot_bgcolor=clear,
        **layout,
    )
    ticks = {"ticks": "outside", "ticklen": 4, "tickcolor": line, "tickformat": ",~g"}
    for update in (drawn.update_xaxes, drawn.update_yaxes):
        update(automargin=True, zeroline=False, linecolor=line, gridcolor=line, **ticks)
    return drawn


def _error(spreads: Sequence[Spread], middles: Sequence[float]) -> dict[str, Any]:
    """The ends of error bars around `middles`."""
    pairs = [*zip(spreads, middles, strict=True)]
    above = [max(0.0, spread.high - middle) for spread, middle in pairs]
    below = [max(0.0, middle - spread.low) for spread, middle in pairs]
    return {"array": above, "arrayminus": below, "thickness": 1.5, "width": 3}


def _drawn(kind: Any, x: Sequence[Any], y: Sequence[Any], hover: str | Sequence[str], **style: Any) -> Any:
    """Bars, marks or a line, with a text where the mouse is."""
    return kind(x=x, y=y, hovertext=hover, hoverinfo="text", **style)


def phases_by_rank(analysis: Analysis) -> Any:
    ranks = shown_ranks(analysis)
    labels, means = [str(rank.rank) for rank in ranks], [rank.step.mean for rank in ranks]
    hosts = [f"rank {rank.rank} on {escape(rank.host)}<br>" for rank in ranks]
    drawn = []
    for phase in analysis.phases:
        spreads, name = [rank.phases[phase] for rank in ranks], NAMES[phase]
        hover = [f"{host}{name}: {mean_with_spread(each)}" for host, each in zip(hosts, spreads, strict=True)]
        x, style = [each.mean for each in spreads], {"name": name, "orientation": "h", "marker_color": COLORS[phase]}
        drawn.append(_drawn(go.Bar, x, labels, hover, **style))
    hover = [f"{host}whole step: {mean_with_spread(rank.step)}" for host, rank in zip(hosts, ranks, strict=True)]
    error = _error([rank.step for rank in ranks], means)
    marks = {"name": "whole step", "mode": "markers", "error_x": error, "marker": {"size": 5}}
    return figure(
        [*drawn, _drawn(go.Scatter, means, labels, hover, **marks)],
        height=70 + max(56, len(ranks) * max(12, 36 - len(ranks))),
        barmode="stack",
        bargap=0.25,
        xaxis={"title": "milliseconds of a step", "rangemode": "tozero"},
        yaxis={"title": "rank", "type": "category", "range": [len(ranks) - 0.5, -0.5], "showgrid": False},
    )


def phases_over_time(analysis: Analysis) -> Any:
    """Phases of one rank as stacked areas. The traces of a rank share a legend group; one rank is visible."""
    series, first = analysis.series, default_rank(analysis)
    drawn = []
    for rank in (each.rank for each in shown_ranks(analysis)):
        group = {"legendgroup": str(rank), "visible": rank == first}
        drawn += [
            go.Scatter(
                **group,
                name=NAMES[phase],
                x0=series.numbers[0],
                dx=series.num_steps_per_point,
                y=np.array(values, np.float32),
                stackgroup=str(rank),
                mode="lines",
                line={"width": 0},
                fillcolor=COLORS[phase],
                hovertemplate="%{y:.1f} ms<extra>" + NAMES[phase] + "</extra>",
            )
            for phase, values in series.phases[rank].items()
            if any(values)
        ]
    return figure(
        drawn,
        height=320,
        hovermode="x unified",
        hoverdistance=-1,  # the nearest point, however far it is
        xaxis={"title": "step", "showgrid": False, "hoverformat": ",d"},
        yaxis={"title": "milliseconds of a step", "rangemode": "tozero"},
    )


def predicted_step(analysis: Analysis) -> Any:
    """A bar for each number of ranks: what computes, what waits for the slowest rank, what communicates."""
    predictions = analysis.predictions
    labels = [f"{each.num_ranks:,}" for each in predictions]
    parts = [
        ("everything else", OTHER_COLOR, [each.step_ms - each.waiting_ms - each.exposed_ms for each in predictions]),
        (NAMES[Phase.WAITING], COLORS[Phase.WAITING], [each.waiting_ms for each in predictions]),
        (NAMES[Phase.EXPOSED], COLORS[Phase.EXPOSED], [each.exposed_ms for each in predictions]),
    ]
    drawn = []
    for name, color, values in parts:
        hover = [
            f"{label} ranks<br>{name}: {milliseconds(value)}<br>whole step: {milliseconds(each.step_ms)}"
            for label, value, each in zip(labels, values, predictions, strict=True)
        ]
        drawn.append(_drawn(go.Bar, labels, values, hover, name=name, marker_color=color))
    about = f"measured with {analysis.size:,} ranks<br>{mean_with_spread(analysis.step)}"
    error = _error([analysis.step], [analysis.step.mean])
    marks = {"name": "measured", "mode": "markers", "error_y": error, "marker": {"size": 9, "symbol": "diamond"}}
    drawn.append(_drawn(go.Scatter, [f"{analysis.size:,}"], [analysis.step.mean], about, **marks))
    numbers = sorted({analysis.size, *(each.num_ranks for each in predictions)})
    order = {"categoryorder": "array", "categoryarray": [f"{each:,}" for each in numbers]}
    xaxis = {"title": "ranks", "type": "category", "showgrid": False, **order}
    yaxis = {"title": "milliseconds of a step", "rangemode": "tozero"}
    return figure(drawn, height=320, barmode="stack", xaxis=xaxis, yaxis=yaxis)
