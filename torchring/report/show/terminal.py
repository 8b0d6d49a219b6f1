"""The report in a terminal: the verdict first, then its sections."""

import shutil
import textwrap
from collections.abc import Sequence
from typing import Final

from torchring.report.show.sections import Section, facts, sections
from torchring.report.verdict.findings import Analysis

_WIDTH: Final = 110  # where neither a terminal nor COLUMNS says another


def plain(analysis: Analysis) -> str:
    lines = [*_wrap(analysis.verdict.sentence), "", *_wrap(facts(analysis))]
    for section in sections(analysis):
        if section.rows or section.sentences:
            lines += ["", text_of(section)]
    return "\n".join(lines) + "\n"


def text_of(section: Section) -> str:
    lines = _wrap(section.title)
    for sentence in section.sentences:
        text, _, code = sentence.partition("\n")
        lines += _wrap(text, "  ", "    ")
        lines += [f"      {code}"] if code else []
    if section.rows:
        rows = (section.columns, *_fitting(section, _width()))
        widths = [max(map(len, cells)) for cells in zip(*rows, strict=True)]
        for row in rows:
            cells = (f"{cell:{width}}" for cell, width in zip(row, widths, strict=True))
            lines.append(f"  {'  '.join(cells)}".rstrip())
    return "\n".join(lines)


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
