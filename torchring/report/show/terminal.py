"""The summary in the terminal: the verdict first, what qualifies it, then advice, then tables."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Final

from torchring.errors import ranks_in_words
from torchring.observer import Phase
from torchring.report.model.buckets import BucketSummary
from torchring.report.model.timing import Spread
from torchring.report.verdict.batch import about_batch
from torchring.report.verdict.findings import NOTICEABLE_WAIT, Advice, Analysis
from torchring.report.words import NAMES, count, share_in_words

_WIDTH: Final = 110  # where neither a terminal nor COLUMNS says another
_SLOW: Final = 0.1  # GB/s, below which a table is in MB/s
_MAX_ROWS: Final = 8
_MAX_NAME: Final = 48
_BOLD, _DIM, _HEADING, _CODE = "1", "2", "1;36", "32"  # colours of a terminal


@dataclass(frozen=True)
class Section:
    """A heading, then sentences, then a table. The second line of a sentence is code."""

    title: str
    columns: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    sentences: tuple[str, ...] = ()


def show(analysis: Analysis, file: IO[str] | None = None) -> None:
    """Print the summary, with colours to a terminal."""
    out = file or sys.stdout
    in_colours = out.isatty() and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
    out.write(plain(analysis, in_colours=in_colours))


def plain(analysis: Analysis, *, in_colours: bool = False) -> str:
    """The summary as text."""
    verdict, title = ("\n".join(_wrap(text)) for text in (analysis.verdict.sentence, _title(analysis)))
    lines = [_painted(verdict, _BOLD, in_colours), "", _painted(title, _DIM, in_colours)]
    for section in sections(analysis):
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


def sections(analysis: Analysis) -> list[Section]:
    """The sections below the verdict, without empty ones."""
    no_advice = "Nothing that is known." if analysis.has_enough_steps else "So few steps do not tell."
    found = [
        Section("What is missing or strange", sentences=analysis.problems),
        Section(
            "What would help, and how much of the time that a sample takes",
            sentences=tuple(map(_advice, analysis.advice)) or (no_advice,),
        ),
        table_of_phases(analysis),
        table_of_waits(analysis),
        _buckets(analysis),
        _scaling(analysis),
    ]
    return [section for section in found if section.rows or section.sentences]


def _title(analysis: Analysis) -> str:
    run_info = analysis.run_info
    hosts = len({rank.host for rank in analysis.ranks})
    speed = f"{analysis.step.mean:.3g} ms on average, {_short(analysis.steps_per_s)} steps/s"
    samples = f", {analysis.samples_per_s:,.0f} samples/s" if analysis.samples_per_s else ""
    first = "first step does" if analysis.num_left_out == 1 else f"first {analysis.num_left_out} do"
    left_out = f"; the {first} not count" if analysis.num_left_out else ""
    error = analysis.job.clock_error_ms
    clocks = f"; times of hosts may differ by {error:.2g} ms" if error else ""
    return (
        f"{count(analysis.size, 'rank')} on {count(hosts, 'host')}, {run_info.device}, algorithm {run_info.algorithm}, "
        f"overlap {run_info.overlap}. {count(analysis.num_steps, 'step')} of {_number(analysis.step)} ms (the median), "
        f"{speed}{samples}{left_out}{clocks}. In brackets: 20 % and 80 % of the steps are below."
    )


def _advice(advice: Advice) -> str:
    gain = share_in_words(advice.saves_share)
    return f"- {advice.what}: {gain} less, {advice.predicted_ms:.4g} ms a step. {advice.why}\n{advice.how}"


def table_of_phases(analysis: Analysis) -> Section:
    ranks, title = list(analysis.ranks), "Milliseconds of a step, by rank, on average"
    if len(ranks) > _MAX_ROWS:
        awaited = {wait.awaited for wait in analysis.waits if wait.mean_ms >= NOTICEABLE_WAIT * analysis.step.mean}
        late = sorted((rank for rank in ranks if rank.rank in awaited), key=lambda rank: -rank.is_last_share)
        other = next((rank for rank in ranks if rank.rank not in awaited), ranks[0])
        title += f" (those of {len(ranks)} for which others wait most, and rank {other.rank})"
        shown = {other.rank, *(rank.rank for rank in late[: _MAX_ROWS - 1])}
        ranks = [rank for rank in ranks if rank.rank in shown]
    has_hosts = len({rank.host for rank in analysis.ranks}) > 1
    least = NOTICEABLE_WAIT * analysis.step.mean
    has_queue = any(rank.queued is not None and rank.queued.mean >= least for rank in analysis.ranks)
    rows = [
        (
            f"{rank.rank} ({rank.host.partition('.')[0]})" if has_hosts else str(rank.rank),
            *(_short(spread.mean) for spread in (rank.step, *(rank.phases[phase] for phase in analysis.phases))),
            *([_short(rank.queued.mean) if rank.queued else "?"] if has_queue else []),
        )
        for rank in ranks
    ]
    columns = {phase: NAMES[phase].split()[0] for phase in Phase}
    columns |= {Phase.EXPOSED: "comm.", Phase.OPTIMIZER: "step()"}
    if not analysis.costs.is_forward_known:
        columns[Phase.INPUT] = "input and forward"
    names = ("rank", "step", *(columns[phase] for phase in analysis.phases), *(["no core"] if has_queue else []))
    return Section(title, names, tuple(rows))


def table_of_waits(analysis: Analysis) -> Section:
    """Who waits for whom. No rows if nobody waits for long."""
    rows = [
        (who, str(wait.awaited), f"{wait.mean_ms:.3g}", share_in_words(wait.share), _number(wait.cost))
        for who, wait in analysis.long_waits[:_MAX_ROWS]
    ]
    columns = ("who", "waits for rank", "ms a step", "in so many steps", "then ms")
    return Section("Who waits for whom", columns, tuple(rows))


def _buckets(analysis: Analysis) -> Section:
    slowest = sorted(analysis.buckets, key=lambda bucket: -bucket.exposed.median)[:_MAX_ROWS]
    path = analysis.bandwidth
    speeds = [bucket.bus_bandwidth for bucket in slowest] + ([path.bus, path.best] if path else [])
    factor, unit = (1e3, "MB/s") if all(speed.median < _SLOW for speed in speeds) else (1.0, "GB/s")
    rows = [_bucket(bucket, factor) for bucket in slowest]
    title = "Buckets"
    if len(rows) < len(analysis.buckets):
        title += f" (those {len(rows)} of {len(analysis.buckets)} that backward hides least)"
    if path:
        title += f"; {path.algorithm} {path.path}: {_number(path.bus, factor)} {unit}, "
        title += f"best bucket {_number(path.best, factor)} {unit}"
        title += f"; the doctor found {path.doctor:.3g} GB/s" if path.doctor is not None else ""
    return Section(title, ("bucket", "MB", "ready ms", "reduced in ms", "exposed ms", unit, "parameters"), tuple(rows))


def _bucket(bucket: BucketSummary, factor: float) -> tuple[str, ...]:
    names = ", ".join(bucket.names)
    names = names if len(names) <= _MAX_NAME else f"{bucket.names[0][:_MAX_NAME]} and {len(bucket.names) - 1} more"
    measured = map(_number, (bucket.ready, bucket.reducing, bucket.exposed))
    return (str(bucket.index), f"{bucket.num_bytes / 1e6:.3g}", *measured, _number(bucket.bus_bandwidth, factor), names)


def _scaling(analysis: Analysis) -> Section:
    rows = [
        (
            f"{each.num_ranks:,}",
            *(_short(each.step_ms), _short(each.exposed_ms), _short(each.waiting_ms)),
            share_in_words(each.efficiency),
        )
        for each in analysis.predictions
    ]
    sentences = [analysis.predictions_note] if analysis.predictions_note else []
    hiding = analysis.hiding_gigabytes_per_s
    if hiding:
        ranks = ranks_in_words(range(max(2, analysis.size)))
        sentences.append(f"Backward would hide communication of {ranks} from {hiding:.3g} GB/s on.")
    elif analysis.predictions and hiding is None:
        sentences.append("No bandwidth would hide communication: latency alone takes longer.")
    if batch_note := about_batch(analysis.run_info):
        sentences.append(batch_note)
    columns = ("ranks", "step ms", "communication ms", "waiting ms", "efficiency")
    return Section("Predicted", columns, tuple(rows), tuple(sentences))


def _number(spread: Spread, factor: float = 1.0) -> str:
    """The median: "61 [58, 66]"."""
    median, low, high = (_short(factor * value) for value in (spread.median, spread.low, spread.high))
    return f"{median} [{low}, {high}]"


def _short(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _fitting(section: Section, width: int) -> Sequence[Sequence[str]]:
    """The rows of a table, without spreads if these do not fit in so many characters: headings would be broken."""
    longest = [max(map(len, cells)) for cells in zip(section.columns, *section.rows, strict=True)]
    if sum(longest) + 2 * len(longest) <= width:
        return section.rows
    return [[cell.partition(" [")[0] for cell in row] for row in section.rows]
