"""The `torchring` command: `torchring run` starts a script on several processes, `torchring doctor` says what this
machine offers, `torchring report` says what bounds a job that was traced, `torchring manifest` writes what starts a job
on a cluster, `torchring bench` runs one of the benchmarks that are installed with the package."""

from __future__ import annotations

import argparse
import ast
import contextlib
import importlib
import importlib.util
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import torchring
from torchring import placement
from torchring.elastic.driver import options as elastic
from torchring.elastic.driver.driver import start_elastic
from torchring.launch import horovodrun
from torchring.launch.arguments import Parser, did_you_mean, hosts_of, positive, setting
from torchring.launch.hosts import Host, LaunchError, is_here
from torchring.launch.jobs import OWN_IMPORTS
from torchring.launch.launcher import LAUNCHERS, start
from torchring.launch.output import OutputOptions
from torchring.observe import PROGRESS, STACKS, TRACE
from torchring.releases import require_packages

# Commands whose modules parse their own arguments.
_COMMANDS: Final = {
    "doctor": ("torchring.doctor", "say what this machine offers, and what is wrong"),
    "report": ("torchring.report.command", "say what bounds a job, from its trace"),
    "top": ("torchring.report.show.top", "show how a job goes that is being traced"),
    "manifest": ("torchring.manifest.manifest", "write an sbatch script or objects for Kubernetes from a job file"),
}
_BENCH: Final = Path(__file__).with_name("bench")


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments[:1] and arguments[0] in _COMMANDS:
        module = importlib.import_module(_COMMANDS[arguments[0]][0])
        return _while_it_is_read(module.main, arguments[1:])
    parser = Parser(prog="torchring", description="Data-parallel training for PyTorch.")
    parser.add_argument("-V", "--version", action="version", version=f"torchring {torchring.__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    run = _add_run(commands)
    for name, (_, summary) in _COMMANDS.items():
        commands.add_parser(name, help=summary)
    benchmarks = _benchmarks()
    bench = commands.add_parser(
        "bench",
        help="run a benchmark",
        description="Run a benchmark. `torchring bench NAME --help` shows its options.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    bench.add_argument("name", nargs="?", metavar="NAME", help=", ".join(benchmarks))
    bench.add_argument("arguments", nargs=argparse.REMAINDER, help="handed to the benchmark")
    if arguments[:1] == ["bench"]:  # parsing the benchmarks takes 0.1 s, which `torchring run` need not spend
        summaries = [f"  {name:10} {_summary(source)}" for name, source in benchmarks.items()]
        bench.epilog = "\n".join(["benchmarks:", *summaries])
    if arguments and not arguments[0].startswith("-") and arguments[0] not in commands.choices:
        names = [*commands.choices, "--help", "--version"]
        parser.error(f"there is no command {arguments[0]!r}{did_you_mean(arguments[0], names)}")
    if arguments[:1] == ["run"]:  # errors of its own parser show its own usage
        options = run.parse_args(arguments[1:], argparse.Namespace(command="run"))
    else:
        options = parser.parse_args(arguments)
    # argparse drops a leading "--" from what belongs to the script.
    if arguments[-len(options.arguments) - 1] == "--":
        options.arguments.insert(0, "--")
    if options.command == "bench":
        if options.name is None:
            bench.print_help()
            return 0
        if options.name not in benchmarks:
            near = did_you_mean(options.name, benchmarks)
            bench.error(f"there is no benchmark {options.name!r}, but {', '.join(benchmarks)}{near}")
        return _bench(options.name, options.arguments)
    if options.script is None:
        taken = [name for name in ("trace", "log_dir") if os.path.isfile(getattr(options, name) or "")]
        hint = f": {getattr(options, taken[0])} was taken for --{taken[0].replace('_', '-')} DIR" if taken else ""
        run.error(f"say which script to run{hint}")
    try:
        is_elastic = elastic.is_elastic(options)
    except LaunchError as error:
        run.error(str(error))
    is_alone = options.num_proc is None and options.hosts is None and options.hostfile is None
    if is_alone and not is_elastic and options.launcher != "srun":
        run.error("say how many processes: -np N, or -H HOST:SLOTS,..., or --hostfile FILE")
    if options.quiet and options.log_dir is None:
        run.error("--quiet drops what processes print, unless --log-dir says where to write it")
    return _run(options, is_elastic)


def _add_run(commands: Any) -> argparse.ArgumentParser:  # argparse._SubParsersAction
    """Add `torchring run`, and return its parser."""
    run: argparse.ArgumentParser = commands.add_parser(
        "run",
        help="start a script on N processes, of this machine or of several",
        description="Start a script on N processes: through torchrun's agent on this machine; on several through "
        "mpirun (Open MPI, with mpi4py) where it is installed, else through ssh and torchrun's agents.",
    )
    run.add_argument(
        *("-np", "-n", "--num-proc", "--nproc-per-node"),
        dest="num_proc",
        type=positive,
        metavar="N",
        help="number of processes; all slots of -H or --hostfile by default",
    )
    run.add_argument("--standalone", action="store_true", help=argparse.SUPPRESS)  # torchrun's: so it is without hosts
    run.add_argument("--nnodes", type=_one_node, help=argparse.SUPPRESS)
    where = run.add_mutually_exclusive_group()
    where.add_argument("-H", "--hosts", metavar="HOST:SLOTS,...", help="machines, and how many processes each takes")
    where.add_argument(
        "--hostfile", "-hostfile", metavar="FILE", help="the same, one `host slots=N` or `host:N` a line"
    )
    run.add_argument(
        "--env",
        type=setting,
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="for all processes; without =VALUE, as it is set here; may be repeated",
    )
    run.add_argument("--launcher", choices=LAUNCHERS, default="auto", help="what starts them; chosen by default")
    run.add_argument(
        "--bind",
        choices=placement.MODES,
        help="bind each process to physical cores of its own, or to a NUMA node; by default to cores, on hosts that "
        "have one for each of their processes",
    )
    run.add_argument("--tag-output", action="store_true", help="put [rank] before each line that a process prints")
    run.add_argument(
        "--log-dir",
        metavar="DIR",
        help="also write what rank N prints to DIR/rankN.log, on the host where it runs; with --elastic, what worker N "
        "prints to DIR/workerN.log, here",
    )
    run.add_argument("--quiet", action="store_true", help="with --log-dir: do not show it here")
    run.add_argument(
        "--stacks-on-stall",
        action="store_true",
        help="when a process waits for long, have those that it waits for print their Python stacks",
    )
    run.add_argument(
        "--trace",
        metavar="DIR",
        help="write where the time of each process's last 1,000 steps went to DIR, for `torchring report DIR`; files "
        "of an earlier trace in DIR are removed",
    )
    run.add_argument(
        "--progress",
        action="store_true",
        help="every 10 seconds, say how fast the job is and what bounds it; with several hosts, --trace has to name a "
        "folder that they share",
    )
    elastic.add_options(run, where)
    horovodrun.add_options(run)
    run.add_argument("-m", "--module", action="store_true", help="SCRIPT is a module, as for python -m")
    run.add_argument("script", nargs="?", metavar="SCRIPT", help="the Python script, or a folder with a __main__.py")
    run.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="handed to the script")
    return run


def _one_node(text: str) -> str:
    """A type for torchrun's --nnodes."""
    if text not in ("1", "1:1"):
        raise argparse.ArgumentTypeError(
            f"torchring run starts the processes of all machines: name them with -H HOST:SLOTS,..., got {text!r}"
        )
    return text


def _while_it_is_read(command: Callable[[Sequence[str]], int], arguments: Sequence[str]) -> int:
    """Run a command whose reader may end first, as in `torchring report DIR | head`. Returns the exit code."""
    try:
        code = command(arguments)
        sys.stdout.flush()
    except BrokenPipeError:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())  # Python flushes once more at exit
        return 128 + signal.SIGPIPE
    return code


def _run(options: argparse.Namespace, is_elastic: bool) -> int:
    """Returns the exit code of the first process that failed; 128 + n if signal n ended it, as in a shell."""
    try:
        require_packages()  # the processes would say so in a traceback each
        command = horovodrun.without_interpreter(options.script, options.arguments)
        if command is None or options.module:
            command = [*_program(options.script, options.module), *options.arguments]
        output = OutputOptions(options.tag_output, options.log_dir, options.quiet)
        env = horovodrun.settings_of(options) | ({STACKS: "1"} if options.stacks_on_stall else {})
        ssh_options = horovodrun.ssh_options_of(options)
        if is_elastic:
            limits = elastic.limits_of(options)
            sources = elastic.hosts_of(options, limits)
            hosts: Sequence[Host] | None = sources.known
            may_change = sources.may_change
        else:
            hosts, may_change = hosts_of(options), False
        launcher = horovodrun.launcher_of(options)
        horovodrun.warn_of_ignored(options)
        if options.verbose:
            print(horovodrun.describe(command, options.num_proc, hosts), file=sys.stderr)
        with _tracing(options, lambda: may_change or not all(is_here(host.name) for host in hosts or ())) as traced:
            if is_elastic:
                if options.bind not in (None, "none"):
                    raise LaunchError("--bind is not for elastic jobs, whose processes change; bind them in the script")
                code = start_elastic(command, limits, sources, env | traced, output, ssh_options, launcher)
            else:
                bind = options.bind or "auto"
                code = start(
                    command, options.num_proc, hosts, env | traced, launcher, output, ssh_options=ssh_options, bind=bind
                )
        hints = [] if code == 0 or code > 128 else [elastic.hint(options), horovodrun.hint(options, command[0])]
        print(*(f"torchring run: {hint}\n" for hint in hints if hint), sep="", end="", file=sys.stderr, flush=True)
        return code
    except LaunchError as error:
        print(f"torchring run: {error}", file=sys.stderr)
    return 2


@contextlib.contextmanager
def _tracing(options: argparse.Namespace, is_apart: Callable[[], bool]) -> Iterator[dict[str, str]]:
    """For --trace and --progress: gives variables for the processes, and says how the job goes. Raises LaunchError.

    Args:
        is_apart: says whether processes run on other hosts. Looks names up, so it is asked only if that matters.
    """
    if options.trace is None and not options.progress:
        yield {}
        return
    is_asked_for = options.trace is not None or os.environ.get(TRACE)
    if not is_asked_for and is_apart():
        raise LaunchError("--progress on several hosts needs --trace DIR, with a folder that all hosts share")
    with contextlib.ExitStack() as stack:
        if options.trace is not None:
            folder = _empty_trace(options.trace)
        elif is_asked_for:
            folder = str(Path(os.environ[TRACE]).absolute())
        else:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="torchring-progress-"))
        if options.progress:
            from torchring.report.show import progress

            stack.enter_context(progress.shown(Path(folder)))
        yield {TRACE if is_asked_for else PROGRESS: folder}


def _empty_trace(folder: str) -> str:
    """The folder for a trace, made, as an absolute path. Raises LaunchError if nothing can be written there."""
    path = Path(folder).absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        for file in [*path.glob("rank-*.npz"), *path.glob("live-*.npz")]:
            file.unlink()
    except OSError as error:
        raise LaunchError(f"--trace {folder}: {error.strerror}") from error
    return str(path)


def _program(script: str, is_module: bool) -> list[str]:
    """The arguments of `python`. Raises LaunchError for a script that does not exist."""
    if is_module:
        return ["-m", script]
    if os.path.isdir(script) and not os.path.isfile(os.path.join(script, "__main__.py")):
        raise LaunchError(f"{script!r} is a directory without a __main__.py")
    if script == "-":
        raise LaunchError("several processes cannot read one script from standard input; save it to a file")
    if not os.path.exists(script):
        folder, name = os.path.split(script)
        others = os.listdir(folder or ".") if os.path.isdir(folder or ".") else []
        raise LaunchError(f"there is no script {script!r}{did_you_mean(name, others)}")
    return [os.path.join(".", script) if script.startswith("-") else script]  # python would take it for an option


def _benchmarks() -> dict[str, str]:
    """The benchmarks in bench/: {name: source}. A benchmark is a script, or a folder."""
    scripts = {file.stem: file.read_text() for file in _BENCH.glob("*.py")}
    found = {name: source for name, source in scripts.items() if 'if __name__ == "__main__":' in source}
    folders = [*_BENCH.glob("*/__main__.py"), *_BENCH.glob("micro/__init__.py")]
    return dict(sorted((found | {file.parent.name: file.read_text() for file in folders}).items()))


def _summary(source: str) -> str:
    """The first line of a module's docstring."""
    return (ast.get_docstring(ast.parse(source)) or "").partition("\n")[0]


def _bench(name: str, arguments: Sequence[str]) -> int:
    """Become the benchmark, which ends its own processes. Returns 2 if it cannot be started."""
    require_packages()
    if name != "micro":
        script = _BENCH / name / "__main__.py" if (_BENCH / name).is_dir() else _BENCH / f"{name}.py"
        return _become([sys.executable, str(script), *arguments])
    missing = [tool for tool in ("pytest", "pytest-benchmark") if not importlib.util.find_spec(tool.replace("-", "_"))]
    if missing:
        print(f"torchring bench micro needs {' and '.join(missing)}: pip install 'torchring[bench]'", file=sys.stderr)
        return 2
    program = f"{OWN_IMPORTS}import pytest; sys.exit(pytest.main(sys.argv[1:]))"
    return _become([sys.executable, "-c", program, str(_BENCH / "micro"), *arguments])


def _become(command: list[str]) -> int:
    sys.stdout.flush()
    try:
        os.execv(command[0], command)
    except OSError as error:
        print(f"torchring bench: cannot start {command[0]}: {error.strerror}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
