"""report.html: one file that holds the report, its figures and the library that draws them. It needs no network."""

from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from torchring.report.show.sections import facts, sections
from torchring.report.verdict.findings import Analysis
from torchring.report.words import NAMES
from torchring.safe_files import replacing


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
    from torchring.report.show.figures import COLORS, DRAW_AS

    def draw(name: str) -> Any:
        is_first = name == "by-rank"  # on the page: it brings the library
        config = {"displayModeBar": False, "showTips": False}
        drawn = DRAW_AS[name](analysis)
        return Markup(to_html(drawn, config, include_plotlyjs=is_first, full_html=False, div_id=name))

    loader = PackageLoader("torchring.report", "show")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    return environment.get_template("page.html").render(
        verdict=analysis.verdict.sentence,
        facts=facts(analysis),
        sections=sections(analysis),
        run_info=analysis.run_info,
        draw=draw,
        captions={name: drawing.__doc__ for name, drawing in DRAW_AS.items()},
        phases=[(NAMES[phase], COLORS[phase]) for phase in analysis.phases],
        written=datetime.fromtimestamp(analysis.run_info.written_at, timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    )
