"""The report in a terminal: the verdict first, then its sections."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import IO, Final

from torchring.report.show.sections import Section, facts, sections
from torchring.report.verdict.findings import Analysis

_WIDTH: Final = 110  # where neither a terminal nor COLUMNS says another
_BOLD, _DIM, _HEADING, _CODE = "1", "2", "1;36", "32"  # colours of a terminal


def show(analysis: Analysis, file: IO[str] | None = None) -> None:
    """Print the summary, with colours to a terminal."""
    out = file or sys.stdout
    in_colours = out.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    out.write(plain(analysis, in_colours=in_colours))


def plain(analysis: Analysis, *, in_colours: bool = False) -> str:
    """The summary as text."""
    verdict, title = ("\n".join(_wrap(text)) for text in (analysis.verdict.sentence, facts(analysis)))
    lines = [_painted(verdict, _BOLD, in_colours), "", _painted(title, _DIM, in_colours)]
    for section in sections(analysis):
        if section.rows or section.sentences:
            lines += ["", text_of(section, in_colours=in_colours)]
    return "\n".join(lines) + "\n"


def text_of(section: Section, *, in_colours: bool = False) -> str:
    lines = [_painted("\n".join(_wrap(section.title)), _HEADING, in_colours)]
    for sentence in section.sentences:
        text, _, code = sentence.partition("\n")
        lines += _wrap(text, "  ", "    ")
        lines += [_painted(f"      {code}", _CODE, in_colours)] if code else []
    if section.rows:
        rows = (section.columns, *_fitting(section, _width()))
        widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
        for row in rows:
            cells = (f"{cell:{width}}" for cell, width in zip(row, widths, strict=True))
            lines.append(f"  {'  '.join(cells)}".rstrip())
    return "\n".join(lines)


def _painted(text: str, colour: str, in_colours: bool) -> str:
    return f"\x1b[{colour}m{text}\x1b[0m" if in_colours else text


def _width() -> int:
    return shutil.get_terminal_size((_WIDTH, 0)).columns


def _wrap(text: str, first: str = "", others: str = "") -> list[str]:
    """Lines that leave names of files in one piece."""
    return textwrap.wrap(
        text, _width(), initial_indent=first, subsequent_indent=others, break_long_words=False, break_on_hyphens=False
    )


def _fitting(section: Section, width: int) -> Sequence[Sequence[str]]:
    """The rows of a table, without spreads if these do not fit in so many characters: headings would be broken."""
    longest = [max(map(len, cells)) for cells in zip(section.columns, *section.rows, strict=True)]
    if sum(longest) + 2 * len(longest) <= width:
        return section.rows
    return [[cell.partition(" [")[0] for cell in row] for row in section.rows]
