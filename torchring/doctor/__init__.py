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
    ranks       [`RankFacts`] of those that showed up
    hosts       [[rank, ...]]: which share memory
    paths       [{kind, ranks, latency_us, gigabytes_per_second, num_bytes, arrived_intact}]
    choices     [{num_bytes, dtype, algorithm, reason, seconds}]: what algorithm="auto" picks for a bucket
    problems    [text]: what failed on the way
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from torchring.doctor.checks import examine
from torchring.doctor.facts import gather
from torchring.doctor.rank import visit
from torchring.doctor.render import render
from torchring.doctor.report import SCHEMA, Report, verdict
from torchring.errors import RingError, TopologyError
from torchring.launch.arguments import duration, hosts_of, positive, setting
from torchring.launch.launcher import Host, LaunchError, share_out
from torchring.launch.signals import Stopped, signals_raise
from torchring.rendezvous.environment import read_environment
from torchring.world import BACKENDS

_DEFAULT_RANKS: Final = 2
_DEFAULT_TIMEOUT_SECONDS: Final = 30.0
_MARK: Final = "torchring-doctor-report "  # begins the line in which rank 0 hands its report to whoever started it
_BEGUN: Final = "torchring-doctor-begun"  # what rank 0 says first
_STARTING_SECONDS: Final = 60.0  # until then, on top of the time-out: importing torch takes seconds on an idle machine
_MEASURING_SECONDS: Final = 90.0  # that a visit may take on top of its time-outs
_SETTLE_SECONDS: Final = 10.0  # for ranks to end by themselves once there is a report
_STOP_SECONDS: Final = 50.0  # for `torchring run` to end its ranks; it kills after 40
# What torch's launcher logs, which `torchring run` says shorter, and the frames of its C++ errors.
_LOGGED: Final = re.compile(r"(\[rank\d+\]:)?[IWE]\d{4} |frame #|<omitting python frames>|Exception raised from ")
_RANK_KEYS: Final = ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")


def main(arguments: Sequence[str]) -> int:
    """`arguments` are those behind "doctor". Returns the exit code; raises SystemExit(2) for a usage error."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.hand_over:
        print(_BEGUN, flush=True)
    starts_ranks = any(value is not None for value in (options.num_proc, options.hosts, options.hostfile))
    try:
        # Ranks that are started here are told where they meet; a MASTER_ADDR of the shell's is not for them.
        is_shells = starts_ranks and "WORLD_SIZE" not in os.environ
        launch = read_environment({k: v for k, v in os.environ.items() if k != "MASTER_ADDR" or not is_shells})
    except TopologyError as error:
        if next((os.environ[key] for key in _RANK_KEYS if key in os.environ), "0") != "0":
            print(f"torchring doctor: {error}", file=sys.stderr)  # in the report, rank 0 says it
            return 1
        return _deliver(options, Report(launcher="?", ranks=[gather(0)], problems=[error.message]))
    if launch.size > 1 and starts_ranks:
        parser.error(f"{launch.launcher} has started {launch.size} ranks already; leave -np, -H and --hostfile out")
    if launch.size == 1 and (starts_ranks or launch.launcher == "none"):
        try:
            share_out(hosts_of(options) or [Host("localhost", options.num_proc or _DEFAULT_RANKS)], options.num_proc)
        except LaunchError as error:
            parser.error(str(error))
        return _start(options)
    try:
        return visit(launch, options.backend, options.timeout, functools.partial(_deliver, options))
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
    """Print the report, or hand it over; the exit code."""
    if options.hand_over:
        print(f"{_MARK}{json.dumps(report.to_json())}", flush=True)
        return 0
    findings = examine(report)
    judged = verdict(findings)
    if options.json:
        found = [vars(finding) for finding in findings]
        print(json.dumps({"schema": SCHEMA, "verdict": judged, "findings": found, **report.to_json()}, indent=1))
    else:
        print(render(report, findings), end="")
    sys.stdout.flush()
    return 1 if judged == "wrong" else 0


def _start(options: argparse.Namespace) -> int:
    """Have `torchring run` start ranks, and deliver what their rank 0 hands over."""
    command = [sys.executable, "-m", "torchring.cli", "run"]
    if options.num_proc is not None or not (options.hosts or options.hostfile):
        command += ["-np", str(options.num_proc or _DEFAULT_RANKS)]
    command += ["-H", options.hosts] if options.hosts else []
    command += ["--hostfile", options.hostfile] if options.hostfile else []
    command += [part for name, value in options.env for part in ("--env", f"{name}={value}")]
    script = Path(__file__).with_name("__main__.py")
    command += [str(script), "--hand-over", "--backend", options.backend, "--timeout", str(options.timeout)]
    deadline = time.monotonic() + options.timeout + _STARTING_SECONDS
    has_begun = False
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err, signals_raise():
        # Files, because a rank that hangs would keep a pipe open.
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True)
        try:
            while (line := _handed_over(out.fileno())) is None and process.poll() is None:
                if not has_begun and _BEGUN in _printed(out.fileno()):
                    has_begun = True
                    deadline = time.monotonic() + 4 * options.timeout + _MEASURING_SECONDS
                if time.monotonic() > deadline:
                    break
                time.sleep(0.05)
            ended = process.poll()
            line = line or _handed_over(out.fileno())
            report = None if line is None else Report.from_json(json.loads(line))
            # A rank that has shown up ends by itself.
            if report is not None and len(report.ranks) == report.size:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(_SETTLE_SECONDS)
        except Stopped as stop:
            return 128 + stop.number
        finally:
            with contextlib.suppress(Stopped):  # a second one ends the wait
                _stop(process)
        said = os.pread(err.fileno(), 1 << 20, 0).decode(errors="replace")
    if report is None and ended == 2:  # `torchring run` refused the options, or found no way to start
        sys.stderr.write(said)
        return 2
    if report is None:
        how = "rank 0 did not report" if ended is None else f"they ended with exit code {ended} before a report"
        problem = f"ranks were started, but {how}; the last that was heard: {_last_lines(said)}"
        report = Report(launcher="torchring run", problems=[problem])
    return _deliver(options, report)


def _handed_over(descriptor: int) -> str | None:
    """The report's line in what the ranks have printed so far."""
    for line in _printed(descriptor).splitlines(keepends=True):
        _, mark, rest = line.partition(_MARK)  # mpirun may put a rank's name before it
        if mark and line.endswith("\n"):
            return rest
    return None


def _printed(descriptor: int) -> str:
    return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")


def _last_lines(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip() and not _LOGGED.match(line)]
    return " | ".join(lines[-5:]) or "nothing"


def _stop(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
