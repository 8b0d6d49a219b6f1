"""The `torchring` command. `torchring run` starts a script on several processes of this machine; `torchring bench` runs
one of the benchmarks that are installed with the package."""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib.metadata
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

_BENCH: Final = Path(__file__).with_name("bench")
_STOPPING: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_PATIENCE_SECONDS: Final = 10.0  # for a benchmark that was told to stop: it may have a network to take down


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    parser = argparse.ArgumentParser(prog="torchring", description="Data-parallel training for PyTorch.")
    parser.add_argument("--version", action="version", version=f"torchring {importlib.metadata.version('torchring')}")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser(
        "run",
        help="start a script on N processes of this machine",
        description="Start a script on N processes of this machine, through torch.distributed.run.",
    )
    run.add_argument("-np", "--num-proc", type=_positive, required=True, metavar="N", help="number of processes")
    run.add_argument("script", help="the Python script")
    run.add_argument("arguments", nargs=argparse.REMAINDER, help="handed to the script")
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
    options = parser.parse_args(arguments)
    # argparse drops a leading "--" from what belongs to the script.
    if arguments[-len(options.arguments) - 1] == "--":
        options.arguments.insert(0, "--")
    if options.command == "bench":
        return _bench(options.name, options.arguments)
    return _run(options.num_proc, options.script, options.arguments)


def _run(num_proc: int, script: str, arguments: Sequence[str]) -> int:
    """Returns the exit code of the first process that failed: as the shell has it, 128 + n for signal n."""
    if not os.path.isfile(script):
        print(f"torchring run: there is no script {script!r}", file=sys.stderr)
        return 2
    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    # torchrun would set 1, and warn. The cores are shared out evenly instead.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // num_proc)))
    options = torchrun.parse_args(  # type: ignore[no-untyped-call]
        ["--standalone", f"--nproc-per-node={num_proc}", "--", script, *arguments]
    )
    try:
        torchrun.run(options)  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        print(
            f"torchring run: rank {rank} (pid {failure.pid}) ended first, {_ending(code)}",
            file=sys.stderr,
        )
        return code if code >= 0 else 128 - code
    except SignalException as error:
        return 128 + int(error.sigval)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


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
        with _signals_raise():
            try:
                code = process.wait()
            except _Signal as stop:
                code = -stop.number
                with contextlib.suppress(_Signal):  # a second one ends the wait
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


class _Signal(BaseException):
    """This process was told to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextlib.contextmanager
def _signals_raise() -> Iterator[None]:
    """Inside, those that stop a process raise _Signal, except where whoever started this one had them ignored."""

    def stop(number: int, _: object) -> None:
        raise _Signal(number)

    before = {number: signal.getsignal(number) for number in _STOPPING}
    try:
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, stop)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ending(code: int) -> str:
    return f"with exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"needs a number of processes, 1 or more, got {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
