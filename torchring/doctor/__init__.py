"""`torchring doctor`: what these machines offer, how fast the ways between ranks are, and what is wrong.

    torchring doctor                         two processes on this machine
    torchring doctor -np 4 -H a:2,b:2        several hosts, started as `torchring run` starts them
    mpirun -n 4 torchring doctor             or as a rank: under mpirun, srun, torchrun --no-python
    torchring doctor --json                  the same report as JSON, and nothing else, on stdout

Exit code: 0 if nothing is wrong (there may be warnings), 1 if something is, 2 for a usage error.

The JSON object:
    schema      1; changes when a key changes its meaning
    verdict     "ok", "warning" or "wrong"
    findings    [{level: "ok"|"note"|"warning"|"wrong", topic, text}], what the text report shows line by line
and the facts, as the dataclasses in `report.py` describe them:
    launcher, size, timeout_seconds, seconds, backend
    store       {host, port, addresses, hosted_by, listens_on} of the rendezvous, or null
    ranks       [`RankFacts`] of the ranks that showed up
    hosts       [[rank, ...]]: the ranks that share memory
    paths       [{kind, ranks, latency_us, gigabytes_per_second, num_bytes, arrived_intact}]
    choices     [{num_bytes, dtype, algorithm, reason, seconds}]: what algorithm="auto" picks for a bucket
    problems    [text]: operations that failed
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
from torchring.doctor.report import SCHEMA, Report, verdict
from torchring.errors import RingError, TopologyError
from torchring.launch.arguments import duration, hosts_of, positive, setting
from torchring.launch.hosts import LaunchError
from torchring.launch.launcher import start
from torchring.launch.output import STDERR, STDOUT
from torchring.rendezvous.environment import CHOICE, JOB, read_environment

_DEFAULT_RANKS: Final = 2
_DEFAULT_TIMEOUT_SECONDS: Final = 30.0
_STARTING_SECONDS: Final = 60.0  # until rank 0 begins, on top of the time-out: importing torch takes seconds
_MEASURING_SECONDS: Final = 90.0  # from then until the report, on top of four time-outs
_ENDING_SECONDS: Final = 10.0  # from then until the ranks have ended
_SCRIPT: Final = Path(__file__).with_name("__main__.py")
_BEGUN: Final = "torchring-doctor-begun"  # the first line of rank 0
_HANDED_OVER: Final = "torchring-doctor-report "  # begins the line with rank 0's exit code and report
# One line, because lines of other ranks may come between two lines.
_REPORT: Final = re.compile(rf"{_HANDED_OVER}(\[.*\])\n")
# What torch's launcher logs, which `torchring run` says shorter, and the frames of its C++ errors.
_LOGGED: Final = re.compile(r"(\[rank\d+\]:)?[IWE]\d{4} |frame #|<omitting python frames>|Exception raised from ")
_RANK_KEYS: Final = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")
_STOPPED_CODES: Final = tuple(128 + number for number in (signal.SIGHUP, signal.SIGINT, signal.SIGTERM))


def main(arguments: Sequence[str]) -> int:
    """`arguments` are those behind "doctor". Returns the exit code; raises SystemExit(2) for a usage error."""
    parser = _parser()
    options = parser.parse_args(arguments)
    is_first = next((os.environ[key] for key in _RANK_KEYS if key in os.environ), "0") == "0"
    if options.hand_over and is_first:
        print(_BEGUN, flush=True)
    starts_ranks = any(value is not None for value in (options.num_proc, options.hosts, options.hostfile))
    try:
        # The ranks that are started here get an address of their own: a MASTER_ADDR of the shell's is not for them.
        is_shells = starts_ranks and "WORLD_SIZE" not in os.environ
        launch = read_environment({k: v for k, v in os.environ.items() if k != "MASTER_ADDR" or not is_shells})
    except TopologyError as error:
        if not is_first:
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
        return take_part(launch, options.backend, options.timeout, functools.partial(_deliver, options))
    except RingError as error:
        print(f"torchring doctor: {error}", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torchring doctor",
        description="Say what these machines offer, how fast the ways between ranks are, what algorithm='auto' picks, "
        "and what is wrong. Starts ranks; under mpirun, srun or torchrun it is one of theirs.",
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
        found = [vars(finding) for finding in findings]
        text = json.dumps({"schema": SCHEMA, "verdict": judged, "findings": found, **asdict(report)}, indent=1) + "\n"
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
    waiting: float = options.timeout
    limits = (waiting + _STARTING_SECONDS, 4 * waiting + _MEASURING_SECONDS, _ENDING_SECONDS)
    step, deadline, is_late = 0, time.monotonic() + limits[0], False

    def is_over() -> bool:
        nonlocal step, deadline, is_late
        printed = _printed(out)
        reached = 2 if _REPORT.search(printed) else int(_BEGUN in printed)
        if reached > step:
            step, deadline = reached, time.monotonic() + limits[reached]
        is_late = time.monotonic() >= deadline
        return is_late

    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        with _redirected(STDOUT, out), _redirected(STDERR, err):
            code = start(command, num_proc, hosts, dict(options.env), is_over=is_over)
        printed, said = _printed(out), _printed(err)
    is_stopped = code in _STOPPED_CODES and not is_late
    if report := _REPORT.search(printed):
        its_code, text = json.loads(report[1])
        print(text, end="", flush=True)
        return code if is_stopped else its_code if is_late else max(its_code, min(code, 1))
    if (code == 2 and not is_late) or is_stopped:  # no rank could be started, or Ctrl-C
        lines = said.splitlines(keepends=True)
        sys.stderr.write("".join(line for line in lines if line.startswith("torchring run: ")))
        return code
    late = f"rank 0 did not {'report' if step else 'start'} within {limits[step]:g} s"
    how = late if is_late else f"they ended with exit code {code} before that"
    problem = f"ranks were started, but there is no report: {how}; the last lines on stderr: {_last_lines(said)}"
    return _deliver(options, Report(launcher="torchring run", problems=[problem]))


def _printed(file: IO[bytes]) -> str:
    return os.pread(file.fileno(), 1 << 24, 0).decode(errors="replace")


@contextlib.contextmanager
def _redirected(descriptor: int, file: IO[bytes]) -> Iterator[None]:
    """Inside, what this process and its children write to `descriptor` goes to `file`."""
    before = os.dup(descriptor)
    os.dup2(file.fileno(), descriptor)
    try:
        yield
    finally:
        os.dup2(before, descriptor)
        os.close(before)


def _last_lines(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip() and not _LOGGED.match(line)]
    return " | ".join(lines[-5:]) or "none"
