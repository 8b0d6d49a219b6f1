"""`torchring doctor`: what these machines offer, how fast ranks communicate, and what is wrong.

    torchring doctor                         two processes on this machine
    torchring doctor -np 4 -H a:2,b:2        several hosts, started as `torchring run` starts them
    mpirun -n 4 torchring doctor             or as a rank: under mpirun, srun, torchrun --no-python
    torchring doctor --json                  the same report as JSON, and nothing else, on stdout

Exit code: 0 if nothing is wrong (there may be warnings), 1 if something is, 2 for a usage error.

The JSON object has the attributes of `report.Report`, a "verdict" ("ok", "warning" or "wrong"), and "findings": the
lines of the text report, each with level, topic and text.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import IO, Final

from torchring.default_world import BACKENDS
from torchring.doctor.checks import examine
from torchring.doctor.facts import gather
from torchring.doctor.rank import take_part
from torchring.doctor.render import render
from torchring.doctor.report import Report, verdict
from torchring.errors import RingError, TopologyError
from torchring.launch.arguments import duration, hosts_of, positive, setting
from torchring.launch.hosts import LaunchError
from torchring.launch.launcher import start
from torchring.launch.output import STDOUT
from torchring.rendezvous.environment import CHOICE, JOB, read_environment

_DEFAULT_RANKS: Final = 2
_DEFAULT_TIMEOUT_SECONDS: Final = 30.0
_REPORT_SECONDS: Final = 120.0  # to import torch and to measure, on top of four time-outs
_ENDING_SECONDS: Final = 10.0  # from the report until the ranks have ended
_SCRIPT: Final = Path(__file__).with_name("__main__.py")
_HANDED_OVER: Final = "torchring-doctor-report "  # begins the line with rank 0's exit code and report
# One line, because lines of other ranks may come between two lines.
_REPORT: Final = re.compile(rf"{_HANDED_OVER}(\[.*\])\n")
_RANK_KEYS: Final = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
_STOPPED_CODES: Final = tuple(128 + number for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM))


def main(arguments: Sequence[str]) -> int:
    """`arguments` are those after "doctor". Returns the exit code; raises SystemExit(2) for a usage error."""
    parser = _parser()
    options = parser.parse_args(arguments)
    starts_ranks = any(value is not None for value in (options.num_proc, options.hosts, options.hostfile))
    try:
        # The ranks that are started here get an address of their own: a MASTER_ADDR of the shell's is not for them.
        is_shells = starts_ranks and "WORLD_SIZE" not in os.environ
        launch = read_environment({k: v for k, v in os.environ.items() if k != "MASTER_ADDR" or not is_shells})
    except TopologyError as error:
        if next((os.environ[key] for key in _RANK_KEYS if key in os.environ), "0") != "0":
            print(f"torchring doctor: {error}", file=sys.stderr)  # rank 0 has the error in its report
            return 1
        return _deliver(options, Report(launcher="?", ranks=[gather(0)], problems=[error.message]))
    if launch.size > 1 and starts_ranks:
        parser.error(f"{launch.launcher} has started {launch.size} ranks already; leave -np, -H and --hostfile out")
    if launch.size == 1 and (starts_ranks or (launch.launcher == "none" and JOB not in os.environ)):
        try:
            return _start(options)
        except LaunchError as error:
            parser.error(str(error))
    try:
        code = take_part(launch, options.backend, options.timeout, functools.partial(_deliver, options))
        return 0 if options.hand_over else code  # `_start` has the code
    except RingError as error:
        print(f"torchring doctor: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchring doctor",
        description="Say what these machines offer, how fast ranks communicate, what algorithm='auto' picks, and what "
        "is wrong. Starts ranks; under mpirun, srun or torchrun it is one of theirs.",
        epilog="Exit code: 0 if nothing is wrong, 1 if something is, 2 for a usage error.",
    )
    count = f"number of ranks to start ({_DEFAULT_RANKS}, or one per slot of -H)"
    parser.add_argument("-np", "--num-proc", type=positive, metavar="N", help=count)
    parser.add_argument("-H", "--hosts", metavar="HOST:SLOTS,...", help="where to start them, as for torchring run")
    parser.add_argument("--hostfile", metavar="FILE", help="the same from a file")
    parser.add_argument(
        "--env", type=setting, action="append", default=[], metavar="K=V", help="for the ranks' environment"
    )
    parser.add_argument("--backend", choices=BACKENDS, default="auto", help="the engine between hosts, as for init()")
    parser.add_argument(
        "--timeout",
        type=duration,
        default=_DEFAULT_TIMEOUT_SECONDS,
        metavar="SECONDS",
        help="how long to wait for a rank that does not come (default: %(default)g)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else, on stdout")
    parser.add_argument("--hand-over", action="store_true", help=argparse.SUPPRESS)  # to `_start`
    return parser


def _deliver(options: argparse.Namespace, report: Report) -> int:
    """Print the report, or hand it over to `_start`. Returns the exit code."""
    findings = examine(report)
    judged = verdict(findings)
    code = 1 if judged == "wrong" else 0
    if options.json:
        found = {"verdict": judged, "findings": [vars(finding) for finding in findings], **asdict(report)}
        text = json.dumps(found, indent=1) + "\n"
    else:
        text = render(report, findings)
    if options.hand_over:
        text = f"{_HANDED_OVER}{json.dumps([code, text])}\n"
    print(text, end="", flush=True)
    return code


def _start(options: argparse.Namespace) -> int:
    """Start ranks as `torchring run` does, and print the report of their rank 0. Raises LaunchError."""
    hosts = hosts_of(options)
    num_proc = options.num_proc if hosts or options.num_proc else _DEFAULT_RANKS
    command = [str(_SCRIPT), "--hand-over", "--backend", options.backend, "--timeout", str(options.timeout)]
    command += ["--json"] if options.json else []
    os.environ.pop(CHOICE, None)  # TORCHRING_LAUNCHER=none of the shell's would have each rank start others
    limit: float = 4 * options.timeout + _REPORT_SECONDS
    deadline, is_late = time.monotonic() + limit, False

    def find_report() -> re.Match[str] | None:
        return _REPORT.search(os.pread(out.fileno(), 1 << 24, 0).decode(errors="replace"))

    def is_over() -> bool:
        nonlocal deadline, is_late
        if find_report():
            deadline = min(deadline, time.monotonic() + _ENDING_SECONDS)
        is_late = time.monotonic() >= deadline
        return is_late

    with tempfile.TemporaryFile() as out:
        with _stdout_to(out):
            code = start(command, num_proc, hosts, dict(options.env), is_over=is_over)
        report = find_report()
    is_stopped = code in _STOPPED_CODES and not is_late
    if report:
        its_code, text = json.loads(report[1])
        print(text, end="", flush=True)
        return code if is_stopped else its_code if is_late else max(its_code, min(code, 1))
    if is_stopped or (code == 2 and not is_late):  # no rank could be started, which the launcher has said
        return code
    how = f"there was none within {limit:g} s" if is_late else f"they ended with exit code {code} before that"
    problem = f"ranks were started, but there is no report: {how}; see what they say on stderr"
    return _deliver(options, Report(launcher="torchring run", problems=[problem]))


@contextlib.contextmanager
def _stdout_to(file: IO[bytes]) -> Iterator[None]:
    """Inside, what this process and its children print on stdout goes to `file`."""
    before = os.dup(STDOUT)
    os.dup2(file.fileno(), STDOUT)
    try:
        yield
    finally:
        os.dup2(before, STDOUT)
        os.close(before)
