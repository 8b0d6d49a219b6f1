"""`torchring doctor`: what these machines offer, how fast ranks communicate, and what is wrong.

    torchring doctor                         two processes on this machine
    torchring doctor -np 4 -H a:2,b:2        several hosts, started as `torchring run` starts them
    mpirun -n 4 torchring doctor             or as a rank: under mpirun, srun, torchrun --no-python
    torchring doctor --json                  the same report as JSON, and nothing else, on stdout

Exit code: 0 if nothing is wrong (there may be warnings), 1 if something is, 2 for a usage error; or as torchring run's.

The JSON object has the attributes of `report.Report`, a "verdict" ("ok", "warning" or "wrong"), and "findings": the
lines of the text report, each with level, topic and text.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import os
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

from torchring.errors import TopologyError
from torchring.launch.arguments import Parser, duration, hosts_of, positive, setting
from torchring.launch.hosts import LaunchError
from torchring.launch.jobs import OWN_IMPORTS
from torchring.launch.launcher import start
from torchring.launch.output import STDERR, STDOUT
from torchring.releases import require_packages
from torchring.rendezvous.environment import CHOICE, JOB, LaunchEnvironment, read_environment

_PROGRAM: Final = f"{OWN_IMPORTS}import runpy; runpy.run_module('torchring.doctor', run_name='__main__')"
_DEFAULT_RANKS: Final = 2
_DEFAULT_TIMEOUT_SECONDS: Final = 30.0
_MEASURING_SECONDS: Final = 120.0  # on top of four time-outs
_REPORT_SECONDS: Final = 5.0  # that rank 0 may take to print its report, after other ranks have found a problem


def main(arguments: Sequence[str]) -> int:
    """`arguments` are those after "doctor". Returns the exit code; raises SystemExit(2) for a usage error."""
    parser = _parser()
    options = parser.parse_args(arguments)
    starts_ranks = any(value is not None for value in (options.num_proc, options.hosts, options.hostfile))
    try:
        # The ranks that are started here get an address of their own: a MASTER_ADDR of the shell's is not for them.
        is_shells = starts_ranks and "WORLD_SIZE" not in os.environ
        launch = read_environment({k: v for k, v in os.environ.items() if k != "MASTER_ADDR" or not is_shells})
        if launch.size > 1 and starts_ranks:
            parser.error(f"{launch.launcher} has started {launch.size} ranks already; leave -np, -H and --hostfile out")
        if launch.size == 1 and (starts_ranks or (launch.launcher == "none" and JOB not in os.environ)):
            return _start(options)
    except LaunchError as error:
        parser.error(str(error))
    except TopologyError as error:
        print(f"torchring doctor: {error}", file=sys.stderr)
        return 1
    return _take_part(launch, options)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="torchring doctor",
        description="Say what these machines offer, how fast ranks communicate, what algorithm='auto' picks, and what "
        "is wrong. Starts ranks; under mpirun, srun or torchrun it is one of theirs.",
        epilog="Exit code: 0 if nothing is wrong, 1 if something is, 2 for a usage error.",
    )
    count = f"number of ranks to start ({_DEFAULT_RANKS}, or one per slot of -H)"
    parser.add_argument("-np", "--num-proc", type=positive, metavar="N", help=count)
    parser.add_argument("-H", "--hosts", metavar="HOST:SLOTS,...", help="where to start them, as for torchring run")
    parser.add_argument("--hostfile", metavar="FILE", help="the same from a file")
    env = "for the ranks' environment"
    parser.add_argument("--env", type=setting, action="append", default=[], metavar="K=V", help=env)
    engine = "the engine between hosts, as for init()"
    parser.add_argument("--backend", choices=("auto", "gloo", "mpi"), default="auto", help=engine)
    wait = "how long to wait for a rank that does not come (default: %(default)g)"
    parser.add_argument("--timeout", type=duration, default=_DEFAULT_TIMEOUT_SECONDS, metavar="SECONDS", help=wait)
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else, on stdout")
    return parser


def _start(options: argparse.Namespace) -> int:
    """Run ranks as `torchring run` does. Rank 0 prints the report. Raises LaunchError."""
    require_packages()
    hosts = hosts_of(options)
    num_proc = options.num_proc if hosts or options.num_proc else _DEFAULT_RANKS
    command = ["-c", _PROGRAM, "--backend", options.backend, "--timeout", str(options.timeout)]
    command += ["--json"] if options.json else []
    os.environ.pop(CHOICE, None)  # TORCHRING_LAUNCHER=none of the shell's would have each rank start others
    return start(command, num_proc, hosts, dict(options.env))


def _take_part(launch: LaunchEnvironment, options: argparse.Namespace) -> int:
    """Measure with the other ranks. Rank 0 prints the report, and its exit code says the verdict."""
    stdout = os.dup(STDOUT)
    os.dup2(STDERR, STDOUT)  # libraries print there, too
    # A driver may hang.
    faulthandler.dump_traceback_later(4 * options.timeout + _MEASURING_SECONDS, exit=True, file=STDERR)
    try:
        from torchring.doctor.checks import examine
        from torchring.doctor.rank import take_part
        from torchring.doctor.report import show, verdict

        report = take_part(launch, options.backend, options.timeout)
        findings = examine(report)
    finally:
        faulthandler.cancel_dump_traceback_later()
        os.dup2(stdout, STDOUT)
        os.close(stdout)
    if launch.rank != 0:
        if report.problem:
            # Launchers end the other ranks as soon as one fails. So rank 0 gets time for its report, if it is there.
            time.sleep(_REPORT_SECONDS)
            print(f"torchring doctor: rank {launch.rank}: {report.problem}", file=sys.stderr)
        return int(bool(report.problem))
    if options.json:
        found = {"verdict": verdict(findings), "findings": [vars(finding) for finding in findings], **asdict(report)}
        print(json.dumps(found, indent=1), flush=True)
    else:
        show(report, findings)
    return 1 if verdict(findings) == "wrong" else 0
