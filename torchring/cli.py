"""The `torchring` command: `torchring run` starts a script on several processes, `torchring doctor` says what this
machine offers, `torchring bench` runs one of the benchmarks that are installed with the package."""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.metadata
import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from torchring.run import LAUNCHERS, LaunchError, Stopped, parse_hostfile, parse_hosts, signals_raise, start

_BENCH: Final = Path(__file__).with_name("bench")
_PATIENCE_SECONDS: Final = 10.0  # for a benchmark that was told to stop: it may have a network to take down


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="torchring", description="Data-parallel training for PyTorch.")
    parser.add_argument("--version", action="version", version=f"torchring {importlib.metadata.version('torchring')}")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser(
        "run",
        help="start a script on N processes, of this machine or of several",
        description="Start a script on N processes: through torch.distributed.run on this machine; on several through "
        "mpirun (Open MPI, with mpi4py) where it is installed, else through ssh and torch.distributed.run.",
    )
    run.add_argument("-np", "--num-proc", type=_positive, metavar="N", help="number of processes; all slots by default")
    where = run.add_mutually_exclusive_group()
    where.add_argument("-H", "--hosts", metavar="HOST:SLOTS,...", help="machines, and how many processes each takes")
    where.add_argument("--hostfile", metavar="FILE", help="the same, one `host slots=N` or `host:N` a line")
    run.add_argument(
        "--env",
        type=_setting,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="for all processes; may be repeated",
    )
    run.add_argument("--launcher", choices=LAUNCHERS, default="auto", help="what starts them; chosen by default")
    run.add_argument("script", help="the Python script")
    run.add_argument("arguments", nargs=argparse.REMAINDER, help="handed to the script")
    doctor = commands.add_parser("doctor", help="say what this machine offers, and what is wrong", add_help=False)
    doctor.add_argument("arguments", nargs=argparse.REMAINDER)
    benchmarks = _benchmarks()
    bench = commands.add_parser(
        "bench",
        help="run a benchmark",
        description="Run a benchmark. `torchring bench NAME --help` shows its options.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    bench.add_argument("name", choices=list(benchmarks), metavar="NAME", help=", ".join(benchmarks))
    bench.add_argument("arguments", nargs=argparse.REMAINDER, help="handed to the benchmark")
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] == ["bench"]:  # parsing them takes 0.1 s, for which `torchring run` need not wait
        summaries = [f"  {name:10} {_summary(source)}" for name, source in benchmarks.items()]
        bench.epilog = "\n".join(["benchmarks:", *summaries])
    if arguments[:1] == ["doctor"]:  # which has options of its own
        from torchring.doctor import main as doctor_main

        return int(doctor_main(arguments[1:]))
    options = parser.parse_args(arguments)
    # argparse drops a leading "--" from what belongs to the script.
    if arguments[-len(options.arguments) - 1] == "--":
        options.arguments.insert(0, "--")
    if options.command == "bench":
        return _bench(options.name, options.arguments)
    if options.num_proc is None and options.hosts is None and options.hostfile is None:
        run.error("say how many processes: -np N, or -H HOST:SLOTS,..., or --hostfile FILE")
    return _run(options)


def _run(options: argparse.Namespace) -> int:
    """Returns the exit code of the first process that failed: as the shell has it, 128 + n for signal n."""
    if not os.path.isfile(options.script):
        print(f"torchring run: there is no script {options.script!r}", file=sys.stderr)
        return 2
    try:
        hosts = None
        if options.hosts is not None:
            hosts = parse_hosts(options.hosts)
        if options.hostfile is not None:
            hosts = parse_hostfile(Path(options.hostfile).read_text())
        command = [options.script, *options.arguments]
        return start(command, options.num_proc, hosts, dict(options.env), options.launcher)
    except LaunchError as error:
        print(f"torchring run: {error}", file=sys.stderr)
    except (OSError, UnicodeDecodeError) as error:
        print(f"torchring run: cannot read the host file {options.hostfile!r}: {error}", file=sys.stderr)
    return 2


def _benchmarks() -> dict[str, str]:
    """What can be run in bench/: {name: source}."""
    sources = {file.stem: file.read_text() for file in _BENCH.glob("*.py")}
    found = {name: source for name, source in sources.items() if 'if __name__ == "__main__":' in source}
    if (micro := _BENCH / "micro" / "__init__.py").exists():
        found["micro"] = micro.read_text()
    return dict(sorted(found.items()))


def _summary(source: str) -> str:
    """The first line of what a module says about itself."""
    return (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]


def _bench(name: str, arguments: Sequence[str]) -> int:
    """Returns the benchmark's exit code: as the shell has it, 128 + n for signal n."""
    if name != "micro":
        return _run_alone([sys.executable, str(_BENCH / f"{name}.py"), *arguments])
    missing = [tool for tool in ("pytest", "pytest-benchmark") if not importlib.util.find_spec(tool.replace("-", "_"))]
    if missing:
        print(f"torchring bench micro needs {' and '.join(missing)}: pip install 'torchring[bench]'", file=sys.stderr)
        return 2
    return _run_alone([sys.executable, "-m", "pytest", str(_BENCH / "micro"), *arguments])


def _run_alone(command: Sequence[str]) -> int:
    """Run `command` in a process group of its own, of which nothing is left when this returns, by a signal or not."""
    process = subprocess.Popen(command, start_new_session=True)
    try:
        with signals_raise():
            try:
                code = process.wait()
            except Stopped as stop:
                code = -stop.number
                with contextlib.suppress(Stopped):  # a second one ends the wait
                    _stop(process, stop.number)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return code if code >= 0 else 128 - code


def _stop(process: subprocess.Popen[bytes], number: int) -> None:
    """Send a signal to the process's whole group, and wait until all have tidied up and ended."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)
    end = time.monotonic() + _PATIENCE_SECONDS
    while _is_running(process.pid) and time.monotonic() < end:
        time.sleep(0.05)


def _is_running(group: int) -> bool:
    """Whether the process group has a member that has not ended."""
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # gone meanwhile
            state, _, its_group = file.read_text().rpartition(")")[2].split()[:3]
            if int(its_group) == group and state != "Z":
                return True
    return False


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"needs a number of processes, 1 or more, got {text!r}")
    return int(text)


def _setting(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not re.fullmatch("[A-Za-z_][A-Za-z0-9_]*", name):
        raise argparse.ArgumentTypeError(f"needs NAME=VALUE, got {text!r}")
    return name, value


if __name__ == "__main__":
    sys.exit(main())
