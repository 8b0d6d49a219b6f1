"""The figures of the page. Each function draws one figure of an analysis."""

from collections.abc import Callable, Sequence
from html import escape
from typing import Any, Final

import numpy as np
import plotly.graph_objects as go

from torchring.observer import Phase
from torchring.report.model.timing import spans_of
from torchring.report.show.sections import shown_ranks
from torchring.report.verdict.findings import Analysis
from torchring.report.words import NAMES, number

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
_MOST_POINTS: Final = 300  # over time
_MOST_LANES: Final = 8  # ranks


def figure(drawn: Sequence[Any], height: int, x: str, y: str, **yaxis: Any) -> Any:
    """A figure of so many CSS pixels. Text gets its colour from page.css. `x`, `y`: what the axes say."""
    clear, line = "rgba(0,0,0,0)", "rgba(128,128,128,0.35)"
    axis = {"automargin": True, "zeroline": False, "linecolor": line, "gridcolor": line, "ticks": "outside"}
    layout = {
        "template": go.layout.Template(),
        "showlegend": False,
        "height": height,
        "margin": {"l": 10, "r": 14, "t": 14, "b": 10},
        "font": {"family": "system-ui, sans-serif", "size": 12},
        "hoverlabel": {"align": "left", "namelength": -1},
        "paper_bgcolor": clear,
        "plot_bgcolor": clear,
        "xaxis": {"title": x, "tickformat": ",~g", **axis},
        "yaxis": {"title": y, **axis, **yaxis},
    }
    return go.Figure(drawn, layout)


def phases_by_rank(analysis: Analysis) -> Any:
    """A bar for each rank, made of the means of its phases."""
    names = [str(rank) for rank in shown_ranks(analysis)]
    ranks = [rank for rank in analysis.ranks if str(rank.rank) in names]
    bars = [
        go.Bar(
            name=NAMES[phase],
            orientation="h",
            x=[rank.phases[phase].mean for rank in ranks],
            y=names,
            marker_color=COLORS[phase],
            hoverinfo="text",
            hovertext=[
                f"rank {rank.rank} on {escape(rank.host)}<br>{NAMES[phase]}: {number(rank.phases[phase].mean)} ms"
                for rank in ranks
            ],
        )
        for phase in analysis.phases
    ]
    height = 70 + max(56, len(ranks) * max(12, 36 - len(ranks)))
    limits = [len(ranks) - 0.5, -0.5]
    drawn = figure(bars, height, "milliseconds of a step", "rank", type="category", range=limits, showgrid=False)
    return drawn.update_layout(barmode="stack")


def phases_over_time(analysis: Analysis) -> Any:
    """Phases of the rank that others wait for most, as stacked areas. A point is the mean of neighbouring steps."""
    numbers = analysis.timing.numbers
    (rank,) = shown_ranks(analysis, 1)
    stride = -(-len(numbers) // _MOST_POINTS)
    firsts = np.arange(0, len(numbers), stride)
    of_rank = analysis.critical.phases[:, analysis.timing.ranks.index(rank)]
    means = np.add.reduceat(of_rank, firsts, axis=0) / np.diff([*firsts, len(numbers)])[:, None]
    areas = [
        go.Scatter(
            name=NAMES[phase],
            x=numbers[firsts],
            y=means[:, phase],
            stackgroup="phases",
            mode="lines",
            line={"width": 0},
            fillcolor=COLORS[phase],
            hovertemplate="%{y:.1f} ms<extra>" + NAMES[phase] + "</extra>",
        )
        for phase in Phase
        if means[:, phase].any()
    ]
    drawn = figure(areas, 320, "step", f"milliseconds of a step of rank {rank}", rangemode="tozero")
    return drawn.update_layout(hovermode="x unified", hoverdistance=-1)  # the nearest point, however far it is


def median_step(analysis: Analysis) -> Any:
    """One step as lanes: what each rank does, and below that its buckets, which wait for a rank and are reduced."""
    timing, critical, i = analysis.timing, analysis.critical, analysis.median_step
    base = float(timing.begin[i].min())
    bars: dict[tuple[str, Phase], list[tuple[float, float, float, str]]] = {}  # lane, begin, end, what the mouse shows
    ranks = shown_ranks(analysis, _MOST_LANES)
    for lane, rank in enumerate(ranks):
        j = timing.ranks.index(rank)
        step, at_ms = analysis.job.steps[i][j], float(timing.begin[i, j]) - base
        for phase, *times in spans_of(step, float(critical.waiting[i, j])):
            begin, end = (at_ms + (time - step.begin) / 1e6 for time in times)
            text = f"rank {rank}: {NAMES[phase]}<br>{end - begin:.2f} ms"
            bars.setdefault((NAMES[phase], phase), []).append((lane - 0.2, begin, end, text))
        free = -np.inf
        for k in np.argsort(timing.launched[i, j], kind="stable"):
            # Buckets of a rank take turns. Then a bucket waits for the last rank, and is reduced.
            ready, launched, reduced = (
                float(each[i, j, k]) - base for each in (timing.ready, timing.launched, timing.reduced)
            )
            begin = min(max(launched, free), reduced)
            middle = min(max(float(critical.all_launched[i, k]) - base, begin), reduced)
            free = reduced
            text = f"rank {rank}, bucket {k} ({timing.bucket_bytes[k] / 1e6:.2f} MB)<br>ready at {ready:.2f} ms<br>"
            waits = f"{text}waits {middle - begin:.2f} ms for rank {timing.ranks[critical.last[i, k]]}"
            bars.setdefault(("bucket waits", Phase.WAITING), []).append((lane + 0.2, begin, middle, waits))
            took = f"{text}reduced in {reduced - middle:.2f} ms"
            bars.setdefault(("bucket is reduced", Phase.EXPOSED), []).append((lane + 0.2, middle, reduced, took))
    drawn = []
    for (name, phase), each in bars.items():
        lanes, begins, ends, texts = zip(*each, strict=True)
        style = {"marker_color": COLORS[phase], "hoverinfo": "text", "width": 0.36, "orientation": "h", "name": name}
        drawn.append(go.Bar(y=lanes, base=begins, x=np.subtract(ends, begins), hovertext=texts, **style))
    axis = {"range": [len(ranks) - 0.5, -0.5], "tickvals": [*range(len(ranks))], "ticktext": [*map(str, ranks)]}
    drawn = figure(drawn, 110 + 62 * len(ranks), "milliseconds from the beginning of the step", "rank", **axis)
    return drawn.update_layout(barmode="overlay")


DRAW_AS: Final[dict[str, Callable[[Analysis], Any]]] = {
    "by-rank": phases_by_rank,
    "over-time": phases_over_time,
    "lanes": median_step,
}
