"""The report in a terminal: the verdict first, then its sections."""

import shutil
import textwrap
from collections.abc import Sequence
from typing import Final

from torchring.report.show.sections import Section, facts, sections
from torchring.report.verdict.comparison import Change, Comparison
from torchring.report.verdict.findings import Analysis
from torchring.report.words import number

_WIDTH: Final = 80  # where neither a terminal nor COLUMNS says another
_MANY_TIMES: Final = 10  # of which no percentages are told


def plain(analysis: Analysis) -> str:
    lines = [*_wrap(analysis.verdict.sentence), "", *_wrap(facts(analysis))]
    for section in sections(analysis):
        if section.rows or section.sentences:
            lines += ["", text_of(section)]
    return "\n".join(lines) + "\n"


def beside(comparison: Comparison) -> str:
    """Two runs, A and B."""
    rows = [
        (name, number(each.before), number(each.after), "within noise" if each.is_noise else _by(each))
        for name, each in comparison.changes.items()
    ]
    facts = [(name, *texts) for name, texts in comparison.facts.items()]
    advice = [f"Gone: {what}." for what in comparison.gone] + [f"New: {what}." for what in comparison.new]
    found = [
        Section("changes", "Milliseconds of a step", (), ("", "A", "B", "change"), tuple(rows)),
        Section("facts", "What was different", (), ("", "A", "B"), tuple(facts)),
        Section("advice", "Advice", tuple(advice)),
    ]
    texts = (text_of(section) for section in found if section.rows or section.sentences)
    return "\n\n".join(["\n".join(_wrap(comparison.sentence)), *texts]) + "\n"


def _by(change: Change) -> str:
    share = f" ({100 * change.by / change.before:+.0f} %)" if change.after < _MANY_TIMES * change.before else ""
    return f"{'+' if change.by > 0 else '-'}{number(abs(change.by))}{share}"


def text_of(section: Section) -> str:
    lines = _wrap(section.title)
    for sentence in section.sentences:
        text, _, code = sentence.partition("\n")
        lines += _wrap(text, "  ", "    ")
        lines += [f"      {code}"] if code else []
    return "\n".join([*lines, *_table([section.columns, *section.rows])] if section.rows else lines)


def _width() -> int:
    return shutil.get_terminal_size((_WIDTH, 0)).columns


def _wrap(text: str, first: str = "", others: str = "") -> list[str]:
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
