"""report.html: one file that holds the report, its figures and the library that draws them. It needs no network."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Final

from torchring.observer import Phase
from torchring.report.show import captions, formats
from torchring.report.verdict.findings import Analysis
from torchring.report.words import NAMES
from torchring.safe_files import replacing

_MAX_ROWS: Final = 12
_FILTERS: Final = (
    formats.number,
    formats.milliseconds,
    formats.percent,
    formats.megabytes,
    formats.seconds,
    formats.rate,
    formats.median,
    formats.bounds,
    formats.mean_with_spread,
)


def write_page(analysis: Analysis, path: Path) -> None:
    """Write report.html.

    Raises OSError, and ImportError, whose text says what to install, if plotly or jinja2 is missing.
    """
    page = page_of(analysis).encode(errors="replace")  # names of files may be no Unicode
    with replacing(path) as file:
        file.write(page)


def page_of(analysis: Analysis) -> str:
    """The page as HTML. Raises what `write_page` raises."""
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
        from markupsafe import Markup
        from plotly.io import to_html
    except ImportError as error:
        missing = "report.html is not written. It needs plotly and jinja2: pip install 'torchring[report]'"
        raise ImportError(missing) from error
    from torchring.report.show import figures, gantt

    draw_as: dict[str, Callable[[Analysis], Any]] = {
        "by-rank": figures.phases_by_rank,
        "over-time": figures.phases_over_time,
        "lanes": gantt.median_step,
        "step-time": figures.predicted_step,
    }

    def draw(name: str) -> Any:
        is_first = name == "by-rank"  # on the page: it brings the library
        config = {"displayModeBar": False, "showTips": False}
        return Markup(to_html(draw_as[name](analysis), config, include_plotlyjs=is_first, full_html=False, div_id=name))

    loader = PackageLoader("torchring.report", "show")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    environment.filters |= {each.__name__: each for each in _FILTERS}
    ranks = figures.shown_ranks(analysis)
    views, view = gantt.views_of(analysis)
    first = figures.default_rank(analysis)
    spent = analysis.critical.phases[analysis.median_step].max(0)
    of_buckets = (Phase.WAITING, Phase.EXPOSED) if analysis.timing.plan else ()
    shown = [phase for phase in Phase if spent[phase] > 0 or phase in of_buckets]
    return environment.get_template("page.html").render(
        a=analysis,
        captions=captions,
        draw=draw,
        colors=figures.COLORS,
        max_rows=_MAX_ROWS,
        ranks=[rank.rank for rank in ranks],
        first=first,
        rank_menu=[(f"{rank.rank} on {rank.host}", rank.rank) for rank in ranks],
        phases=[(NAMES[phase], figures.COLORS[phase]) for phase in analysis.phases],
        lane_phases=[(NAMES[phase], figures.COLORS[phase]) for phase in shown],
        views=views,
        view=view,
        buckets=figures.shown_buckets(analysis, _MAX_ROWS),
        predicted_phases=[
            ("everything else", figures.OTHER_COLOR),
            *((NAMES[phase], figures.COLORS[phase]) for phase in (Phase.WAITING, Phase.EXPOSED)),
            ("measured", "currentColor"),
        ],
        written=datetime.fromtimestamp(analysis.run_info.written_at, timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    )
