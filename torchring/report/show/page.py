"""report.html: one file that holds the report, its figures and the library that draws them. It needs no network."""

from __future__ import annotations

from html import escape
from importlib import resources
from pathlib import Path
from typing import Final

from torchring.report.verdict.findings import Analysis

# Nothing is fetched from anywhere, whatever the text of a trace says.
_POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data: blob:"


def write_page(analysis: Analysis, path: Path) -> None:
    """Write report.html.

    Raises ImportError, whose text says what to install, if plotly is missing, and OSError.
    """
    path.write_text(page_of(analysis), encoding="utf-8", errors="replace")  # names of files may be no Unicode


def page_of(analysis: Analysis) -> str:
    """The page as HTML. Raises as `write_page`."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ImportError("report.html is not written. It needs plotly: pip install 'torchring[report]'") from error
    from torchring.report.show.sections import body

    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="torchring">
<title>{escape(analysis.verdict.sentence)} · torchring report</title>
<link rel="icon" href="data:,">
<style>
{_asset("page.css")}</style>
</head>
<body>
{body(analysis)}
<script>{get_plotlyjs()}</script>
<script>
{_asset("page.js")}</script>
</body>
</html>
"""


def _asset(name: str) -> str:
    return resources.files("torchring.report.show").joinpath(name).read_text(encoding="utf-8")
