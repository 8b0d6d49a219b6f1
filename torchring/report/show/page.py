"""report.html: one file that holds the report and its figures. It needs no network."""

import re
from datetime import datetime, timezone
from pathlib import Path

from torchring.placement import count
from torchring.report.show.figures import DRAW_AS
from torchring.report.show.sections import facts, sections
from torchring.report.verdict.findings import Analysis
from torchring.report.words import NAMES, number, share_in_words
from torchring.safe_files import replacing


def write_page(analysis: Analysis, path: Path) -> None:
    """Write report.html.

    Raises OSError, and ImportError, whose text says what to install, if jinja2 is missing.
    """
    page = page_of(analysis).encode(errors="replace")  # names of files may be no Unicode
    with replacing(path) as file:
        file.write(page)


def page_of(analysis: Analysis) -> str:
    """The page as HTML. Raises what `write_page` raises."""
    try:
        from jinja2 import Environment, PackageLoader, StrictUndefined
    except ImportError as error:
        missing = "report.html is not written. It needs jinja2: pip install 'torchring[report]'"
        raise ImportError(missing) from error
    loader = PackageLoader("torchring.report", "show")
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined)
    environment.filters |= {"count": count, "number": number, "share": share_in_words, "slug": _slug}
    return environment.get_template("page.html").render(
        analysis=analysis,
        facts=facts(analysis),
        sections=sections(analysis),
        figures={name: (draw(analysis), draw.__doc__) for name, draw in DRAW_AS.items()},
        names=NAMES,
        written=datetime.fromtimestamp(analysis.run_info.written_at, timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
    )


def _slug(sentence: str) -> str:
    """The part of a link that names a finding: its sentence until the first colon or full stop, without durations."""
    what = re.split(r"[:.](?:\s|$)", sentence)[0].lower()
    return "-".join(re.findall(r"\w+", re.sub(r"[\d.,]+ (?:%|m?s\b)", "", what)))
