"""`torchring top DIR`: how a job that is being traced goes, right now.

Each rank of the job writes its last 50 steps to DIR every other second. This command reads them, and sends the job
nothing.
"""

import argparse
import contextlib
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from torchring.launch.arguments import Parser, duration
from torchring.observe.recorder.files import TraceError, find
from torchring.observe.recorder.records import ENDED_WELL
from torchring.placement import count
from torchring.report.model.merge import Job, merge_groups, read_all
from torchring.report.show.sections import table_of_phases, table_of_waits
from torchring.report.show.terminal import text_of
from torchring.report.verdict.analysis import analyse

_STILL_SECONDS: Final = 10.0  # without a new step, after which the picture says so


@dataclass(frozen=True)
class Picture:
    """The text of a moment."""

    text: str  # for people
    is_over: bool = False  # the job has ended
    is_empty: bool = False  # no rank has written anything


def main(arguments: Sequence[str]) -> int:
    """`arguments` are those behind "top". Returns the exit code; raises SystemExit(2) for a usage error."""
    options = _parser().parse_args(arguments)
    folder = options.folder
    may_come = (options.once or sys.stdout.isatty()) and not folder.exists()
    if not folder.is_dir() and not may_come:
        how = "A trace is a folder; `torchring run --trace DIR ...` writes one"
        print(f"torchring top: there is no folder {folder}. {how}", file=sys.stderr)
        return 1
    try:
        if options.once:
            picture = look(folder)
            print(picture.text)
            return int(picture.is_empty)
        _watch(folder, options.every)
    except KeyboardInterrupt:
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="torchring top",
        description="Watch a job that `torchring run --trace DIR` has started: steps and samples a second, "
        "where the time goes, and who waits for whom, over the last 50 steps.",
        epilog="Exit code: 0 when the job has ended, 1 if nothing could be read, 2 for a usage error, 130 after Ctrl-C."
        "\n\nexample:\n  torchring run -np 4 --trace trace train.py     in one terminal\n"
        "  torchring top trace                            in another one",
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="the folder of the trace")
    often = "how often to look (default: %(default)g)"
    parser.add_argument("--every", type=duration, default=1.0, metavar="SECONDS", help=often)
    parser.add_argument("--once", action="store_true", help="look once, and end")
    return parser


def look(folder: Path) -> Picture:
    """Read what the ranks have written, and put it in words."""
    paths: dict[int, Path] = {}
    with contextlib.suppress(OSError):
        paths = find(folder)
    traces = [trace for trace in read_all(paths, []).values() if trace.steps]  # those that can be read
    running = [trace for trace in traces if not trace.run_info.ended_by]
    ends = [trace.run_info.written_at for trace in traces if trace.run_info.ended_by]
    if all(trace.run_info.written_at < max(ends, default=0.0) for trace in running):
        running = []  # they were killed
    if not traces:
        how = f"`torchring run --trace {folder} ...` writes it"
        return Picture(f"no rank has written to {folder} yet; {how}", is_empty=True)
    try:
        jobs = merge_groups(running or traces)
    except TraceError as error:
        return Picture(str(error), is_empty=True)
    return Picture("\n\n".join(_words(job, is_over=not running) for job in jobs), is_over=not running)


def _words(job: Job, *, is_over: bool) -> str:
    analysis = analyse(job)
    last = max(trace.steps[-1].number for trace in job.traces)
    samples = f", {analysis.samples_per_s:,.0f} samples/s" if analysis.samples_per_s else ""
    facts = f"{analysis.steps_per_s:.3g} steps/s{samples}, {count(analysis.size, 'rank')}"
    lines = [f"Step {last + 1:,}: {facts}, the last {count(analysis.num_steps, 'step')}."]
    still = time.time() - max(trace.run_info.written_at for trace in job.traces)
    if is_over:
        reasons = sorted({trace.run_info.ended_by for trace in job.traces} - {*ENDED_WELL})
        lines.append(f"The job has ended{''.join(f': {reason}' for reason in reasons)}.")
    elif still > _STILL_SECONDS:
        lines.append(f"No rank has made a step for {still:.0f} s.")
    lines += [analysis.verdict.sentence, *analysis.problems, ""]
    tables = (table_of_phases(analysis), table_of_waits(analysis))
    return "\n".join([*lines, *(text_of(table) for table in tables if table.rows)])


def _watch(folder: Path, seconds: float) -> None:
    begin, end = ("\x1b[H\x1b[J", "\n") if sys.stdout.isatty() else ("", "\n\n")  # at the top of an empty screen
    last = Picture("")
    while not last.is_over:
        picture = look(folder)
        if picture != last or not picture.is_empty:  # the sentence that there is nothing is shown once
            print(begin + picture.text, end=end, flush=True)
        last = picture
        if not picture.is_over:
            time.sleep(seconds)
