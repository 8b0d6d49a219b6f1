"""`torchring report DIR`: the command line of the report."""

import argparse
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from torchring.launch.arguments import Parser, number
from torchring.observe.recorder.files import TraceError
from torchring.report.model.merge import load
from torchring.report.model.scaling import Network
from torchring.report.show.comparison import beside
from torchring.report.show.exports import write_csv, write_trace_json
from torchring.report.show.page import write_page
from torchring.report.show.terminal import plain
from torchring.report.verdict.analysis import analyse
from torchring.report.verdict.findings import Analysis

_TYPICAL_ALPHA_MS: Final = 0.05  # latency of a message over TCP between neighbouring hosts
_GOODPUT: Final = 0.94  # of the bandwidth: headers of Ethernet and TCP take the rest of frames of 1,500 bytes
_PAGE: Final = "report.html"


def main(arguments: Sequence[str]) -> int:
    """`arguments` are those behind "report". Returns the exit code; raises SystemExit(2) for a usage error."""
    parser = _parser()
    options = parser.parse_args(arguments)
    others = [options.html, options.no_html, options.csv, options.trace_json, options.bandwidth]
    if options.other and any(others):
        parser.error("two folders are compared in the terminal only: give one of them, or no option")
    try:
        jobs = load(options.folder)
        if options.other:
            pairs = zip(jobs, load(options.other), strict=False)
            print("\n".join(beside(analyse(a), analyse(b)) for a, b in pairs), end="")
            return 0
    except TraceError as error:
        print(f"torchring report: {error}", file=sys.stderr)
        return 1
    given = None
    if options.bandwidth is not None:
        given = Network(_TYPICAL_ALPHA_MS, options.bandwidth / 8 * _GOODPUT, is_alpha_known=False)
    return max([_report(analyse(job, given), number, options) for number, job in enumerate(jobs, 1)])


def _report(analysis: Analysis, number: int, options: argparse.Namespace) -> int:
    """Show one analysis, and write the files asked for: from the second one on, with its number in their names."""
    with contextlib.suppress(BrokenPipeError):  # as in `torchring report DIR | head`: files are written all the same
        print("\n" * (number > 1) + plain(analysis), end="", flush=True)
    page = None if options.no_html else options.html or Path(options.folder, _PAGE)
    code = 0
    for path, write in ((options.csv, write_csv), (options.trace_json, write_trace_json), (page, write_page)):
        if path is None:
            continue
        path = path if number == 1 else path.with_name(f"{path.stem}-{number}{path.suffix}")
        try:
            write(analysis, path)
        except OSError as error:
            print(f"torchring report: cannot write {path}: {error.strerror}", file=sys.stderr)
            code = max(code, 1)
        except ImportError as error:
            print(f"torchring report: {error}", file=sys.stderr)
            code = max(code, 0 if options.html is None else 2)  # the summary is a report, too
        else:
            with contextlib.suppress(BrokenPipeError):
                print(f"Written: {path}", flush=True)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="torchring report",
        description="Say what slows a job down, by how much, and what would help, from the trace that "
        "`torchring run --trace DIR` has written. With two folders: what changed from the first run to the second.",
        epilog="Exit code: 0 if there is a report or a comparison, 1 if nothing could be read or a file could not be "
        "written, 2 for a usage error, and if --html asks for a page and jinja2 is missing.",
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="the folder of the trace")
    parser.add_argument(
        "other", type=Path, nargs="?", metavar="DIR2", help="that of another run, which is compared with DIR"
    )
    page = parser.add_mutually_exclusive_group()
    page.add_argument("--html", type=Path, metavar="FILE", help=f"where to write the page (default: DIR/{_PAGE})")
    page.add_argument("--no-html", action="store_true", help="write no page")
    parser.add_argument(
        "--trace-json", type=Path, metavar="FILE", help="also write a trace of all ranks for Chrome or Perfetto"
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="also write a table with a row per step and rank")
    parser.add_argument(
        "--bandwidth",
        type=number("a number of Gbit/s, such as 10"),
        metavar="GBIT",
        help="predict for links of so many Gbit/s between hosts, 6 %% of it for headers (default: as in the trace)",
    )
    return parser
