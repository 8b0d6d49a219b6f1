"""The report as text for people: a line per finding, with advice if the finding is bad, and two small tables."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Sequence
from typing import Final

from torchring.doctor.report import ChoiceFacts, Finding, PathFacts, Report, verdict
from torchring.errors import ranks_in_words

_WIDTH: Final = 110
_LEVELS: Final = {"ok": "ok", "note": "", "warning": "WARNING", "wrong": "WRONG"}


def render(report: Report, findings: Sequence[Finding]) -> str:
    """The text of the report. Its last line says the verdict."""
    lines = [_title(report), ""]
    topics = max([len(finding.topic) for finding in findings], default=0)
    for finding in findings:
        head = f"  {_LEVELS[finding.level]:7}  {finding.topic:{topics}}  "
        lines += textwrap.wrap(
            finding.text,
            _WIDTH,
            initial_indent=head,
            subsequent_indent=" " * len(head),
            break_long_words=False,
            break_on_hyphens=False,
        )
    if report.paths:
        lines += ["", *_table(["path", "latency", "bandwidth"], [_path_row(report, path) for path in report.paths])]
    if report.choices:
        lines += ["", *_table(["bucket", "wire", "auto picks", "because"], _choice_rows(report.choices))]
    return "\n".join([*lines, "", _summary(findings)]) + "\n"


def human_bytes(count: int) -> str:
    """65536 -> "64 KiB"."""
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{round(count / size, 2):g} {unit}"
    return f"{count} B"


def _title(report: Report) -> str:
    if not report.ranks or report.launcher == "?":
        return "torchring doctor"
    by = f"started by {report.launcher}" + (f", backend {report.backend}" if report.backend else "")
    return f"torchring doctor: {len(report.ranks)} of {report.size} ranks, {by}; took {report.seconds:.1f} s"


def _path_row(report: Report, path: PathFacts) -> list[str]:
    names = list(dict.fromkeys(rank.hostname for rank in report.ranks if rank.rank in path.ranks))
    where = f" on {names[0]}" if len(names) == 1 else f" ({' and '.join(names)})"
    speed = f"{path.gigabytes_per_second:.3g} GB/s"
    how = "all-reduce" if path.kind == "shared memory" else "each way"
    latency = f"{path.latency_us:.0f} us" if path.latency_us >= 10 else f"{path.latency_us:.1f} us"
    size = human_bytes(path.num_bytes)
    return [f"{path.kind}, {ranks_in_words(path.ranks)}{where}", latency, f"{speed} {how} ({size})"]


def _choice_rows(choices: Sequence[ChoiceFacts]) -> list[list[str]]:
    """Choices that are alike share a row: first sizes, then dtypes."""
    sizes: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for choice in choices:
        sizes[choice.dtype, choice.algorithm, choice.reason].append(human_bytes(choice.num_bytes))
    dtypes: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for (dtype, algorithm, reason), found in sizes.items():
        dtypes[", ".join(found), algorithm, reason].append(dtype)
    return [[size, ", ".join(found), algorithm, reason] for (size, algorithm, reason), found in dtypes.items()]


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of an aligned table. The last column is wrapped."""
    widths = [max(map(len, cells)) for cells in zip(columns, *rows, strict=True)][:-1]
    lines = []
    for row in (columns, *rows):
        head = "  " + "".join(f"{cell:{width}}   " for cell, width in zip(row, widths, strict=False))
        wrapped = textwrap.wrap(row[-1], max(30, _WIDTH - len(head)), break_long_words=False) or [""]
        lines += [head + wrapped[0], *(" " * len(head) + rest for rest in wrapped[1:])]
    return [line.rstrip() for line in lines]


def _summary(findings: Sequence[Finding]) -> str:
    wrong = sum(finding.level == "wrong" for finding in findings)
    warnings = sum(finding.level == "warning" for finding in findings)
    also = f", {warnings} {'warning' if warnings == 1 else 'warnings'}" if warnings else ""
    if wrong:
        return f"{wrong} {'thing is' if wrong == 1 else 'things are'} wrong{also}."
    return f"Nothing is wrong{also}." if verdict(findings) == "warning" else "All is well."
