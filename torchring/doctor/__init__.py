"""`torchring doctor`: what these machines offer, how fast ranks communicate, and what is wrong.

    torchring doctor                         two processes on this machine
    torchring doctor -np 4 -H a:2,b:2        several hosts, started as `torchring run` starts them
    mpirun -n 4 torchring doctor             or as a rank: under mpirun, srun, torchrun --no-python
    torchring doctor --gpu                   a model also trains on the GPUs, by each all-reduce, as in one process
    torchring doctor --json                  the same report as JSON, and nothing else, on stdout

Exit code: 0 if nothing is wrong (there may be warnings), 1 if something is, 2 for a usage error; or as torchring run's.

The JSON object has the attributes of `report.Report`, a "verdict" ("ok", "warning" or "wrong"), and "findings": the
lines of the text report, each with level, topic and text.
"""

import argparse
import contextlib
import faulthandler
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Final

from torchring.errors import TopologyError
from torchring.launch.arguments import Parser, duration
from torchring.launch.output import STDERR, STDOUT
from torchring.rendezvous.environment import CHOICE, JOB, LaunchEnvironment, read_environment

_DEFAULT_TIMEOUT_SECONDS: Final = 30.0
_MEASURING_SECONDS: Final = 120.0  # on top of four time-outs
_REPORT_SECONDS: Final = 5.0  # that rank 0 may take to print its report, after other ranks have found a problem


def main(arguments: Sequence[str], run: Callable[[Sequence[str], Sequence[str]], int] | None = None) -> int:
    """Measure as a rank, or start ranks that do, by the arguments after "doctor".

    `run` is `torchring run`, which takes the options that are not the doctor's; None in a process that it has started.
    Returns the exit code. Raises SystemExit(2) for a usage error.
    """
    parser = _parser()
    options, others = parser.parse_known_args(arguments)
    try:
        # The ranks that are started here get an address of their own: a MASTER_ADDR of the shell's is not for them.
        is_shells = others and "WORLD_SIZE" not in os.environ
        launch = read_environment({k: v for k, v in os.environ.items() if k != "MASTER_ADDR" or not is_shells})
    except TopologyError as error:
        print(f"torchring doctor: {error}", file=sys.stderr)
        return 1
    if JOB in os.environ and launch.launcher == "torchrun":  # whose variables `torchring run` sets
        launch = replace(launch, launcher="torchring doctor" if run is None else "torchring run")
    if run is not None and launch.size == 1 and (others or (launch.launcher == "none" and JOB not in os.environ)):
        os.environ.pop(CHOICE, None)  # TORCHRING_LAUNCHER=none of the shell's would have each rank be alone
        own = ["--backend", options.backend, "--timeout", str(options.timeout), *(["--json"] if options.json else [])]
        own += ["--gpu"] if options.gpu else []
        # Not by -m: a file in the working directory may have the name of a module that the doctor needs.
        return run(others or ("-np", "2"), (str(Path(__file__).with_name("__main__.py")), *own))
    if others:
        parser.error(f"{launch.launcher} has started {launch.size} ranks already; leave {others[0]} out")
    return _take_part(launch, options)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="torchring doctor",
        description="Say what these machines offer, how fast ranks communicate, what algorithm='auto' picks, and what "
        "is wrong. Starts two ranks on this machine, or others with the options of torchring run, such as -np 4 or "
        "-H a:2,b:2. Under mpirun, srun or torchrun it is one of their ranks.",
        epilog="Exit code: 0 if nothing is wrong, 1 if something is, 2 for a usage error.\n\nexamples:\n"
        "  torchring doctor\n  torchring doctor -H node1:4,node2:4",
    )
    engine = "the engine between hosts, as for init()"
    parser.add_argument("--backend", choices=("auto", "gloo", "mpi"), default="auto", help=engine)
    wait = "how long to wait for a rank that does not come (default: %(default)g)"
    parser.add_argument("--timeout", type=duration, default=_DEFAULT_TIMEOUT_SECONDS, metavar="SECONDS", help=wait)
    trains = "also train a model on the GPUs, by each all-reduce, and compare with one process"
    parser.add_argument("--gpu", action="store_true", help=trains)
    parser.add_argument("--json", action="store_true", help="print JSON, and nothing else, on stdout")
    return parser


def _take_part(launch: LaunchEnvironment, options: argparse.Namespace) -> int:
    """Measure with the other ranks. Rank 0 prints the report, and its exit code says the verdict."""
    stdout = os.dup(STDOUT)
    os.dup2(STDERR, STDOUT)  # libraries print there, too
    # A driver may hang.
    faulthandler.dump_traceback_later(4 * options.timeout + _MEASURING_SECONDS, exit=True, file=STDERR)
    try:
        from torchring.devices.symmetric_memory import OVERLAPPING_DEVICES
        from torchring.doctor.checks import examine
        from torchring.doctor.rank import take_part
        from torchring.doctor.report import show, verdict

        if options.gpu:
            os.environ.setdefault(OVERLAPPING_DEVICES, "1")  # ranks may share a GPU here
        report = take_part(launch, options.backend, options.timeout, on_gpus=options.gpu)
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
    with contextlib.suppress(BrokenPipeError):  # as in `torchring doctor | head`
        if options.json:
            found = {"verdict": verdict(findings), "findings": [*map(vars, findings)], **asdict(report)}
            print(json.dumps(found, indent=1), flush=True)
        else:
            show(report, findings)
    return 1 if verdict(findings) == "wrong" else 0
