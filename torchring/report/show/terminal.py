"""The report in a terminal: the verdict first, then its sections."""

import shutil
import textwrap
from collections.abc import Sequence
from typing import Final

from torchring.report.show.sections import Section, facts, sections
from torchring.report.verdict.findings import Analysis

_WIDTH: Final = 80  # where neither a terminal nor COLUMNS says another


def plain(analysis: Analysis) -> str:
    lines = [*lines_of(analysis.verdict.sentence), "", *lines_of(facts(analysis))]
    for section in sections(analysis):
        if section.rows or section.sentences:
            lines += ["", text_of(section)]
    return "\n".join(lines) + "\n"


def text_of(section: Section) -> str:
    lines = lines_of(section.title)
    for sentence in section.sentences:
        text, _, code = sentence.partition("\n")
        lines += lines_of(text, "  ", "    ")
        lines += [f"      {code}"] if code else []
    return "\n".join([*lines, *_table([section.columns, *section.rows])] if section.rows else lines)


def _width() -> int:
    return shutil.get_terminal_size((_WIDTH, 0)).columns


def lines_of(text: str, first: str = "", others: str = "") -> list[str]:
    """Lines that leave names of files in one piece."""
    return textwrap.wrap(
        text, _width(), initial_indent=first, subsequent_indent=others, break_long_words=False, break_on_hyphens=False
    )


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines. A table that is too wide loses its spreads, then every other space, then the left of its last column."""
    for gap, spreads in ((2, True), (2, False), (1, False)):
        shown = [[cell if spreads else cell.partition(" [")[0] for cell in row] for row in rows]
        *widths, last = (max(map(len, cells)) for cells in zip(*shown, strict=True))
        room = _width() - sum(widths) - gap * (len(widths) + 1)
        if last <= room:
            break
    lines = []
    for *cells, end in shown:
        end = end if len(end) <= room else f"…{end[1 - room :]}"
        padded = (f"{cell:{width}}" for cell, width in zip(cells, widths, strict=True))
        lines.append(" " * gap + (" " * gap).join([*padded, end]).rstrip())
    return lines
