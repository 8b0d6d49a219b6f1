"""The `torchring` command, and its commands `run` and `bench`."""

import argparse
import ast
import functools
import importlib
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torchring
from torchring import placement
from torchring.elastic.driver import options as elastic
from torchring.elastic.driver.driver import start_elastic
from torchring.launch import horovodrun
from torchring.launch.arguments import Parser, did_you_mean, hosts_of, positive, setting, whole
from torchring.launch.hosts import LaunchError
from torchring.launch.launcher import LAUNCHERS, start
from torchring.launch.output import OutputOptions
from torchring.observe import TRACE
from torchring.requirements import require_packages

_Command = Callable[[Sequence[str]], int]

_BENCH: Final = Path(__file__).with_name("bench")


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if arguments and arguments[0] in _COMMANDS:
        return _COMMANDS[arguments[0]][0](arguments[1:])
    parser = Parser(
        prog="torchring",
        usage="torchring COMMAND ...",
        description="Data-parallel training for PyTorch. `torchring COMMAND --help` shows the options of a command.",
        epilog="\n".join(["commands:", *(f"  {name:10} {summary}" for name, (_, _, summary) in _COMMANDS.items())]),
    )
    parser.add_argument("-V", "--version", action="version", version=f"torchring {torchring.__version__}")
    script = "print a script that completes commands and options in this shell"
    parser.add_argument("--print-completion", choices=("bash", "zsh"), help=script)
    if arguments and not arguments[0].startswith("-"):
        names = [*_COMMANDS, "--help", "--version"]
        parser.error(f"there is no command {arguments[0]!r}{did_you_mean(arguments[0], names)}")
    if shell := parser.parse_args(arguments).print_completion:
        print(_completion(parser, shell))
        return 0
    parser.print_help(sys.stderr)
    return 2


def _completion(parser: argparse.ArgumentParser, shell: str) -> str:
    try:
        import shtab
    except ImportError:
        parser.error("--print-completion needs shtab: pip install shtab")
    parser.usage = None
    commands = parser.add_subparsers()
    for name, (_, parser_of, summary) in _COMMANDS.items():
        command = commands.add_parser(name, parents=[parser_of()], add_help=False, help=summary)
        for action in command._actions:
            if action.metavar in ("FILE", "DIR", "SCRIPT", "JOB.YAML", "..."):
                vars(action)["complete"] = shtab.FILE
    return str(shtab.complete(parser, shell))


def _of_module(name: str, *more: Any) -> tuple[_Command, Callable[[], argparse.ArgumentParser]]:
    """A command whose module parses its arguments. Its reader may end first, as in `torchring report DIR | head`."""

    def command(arguments: Sequence[str]) -> int:
        try:
            code: int = importlib.import_module(name).main(arguments, *more)
            sys.stdout.flush()
        except BrokenPipeError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, sys.stdout.fileno())  # Python flushes once more at exit
            return 128 + signal.SIGPIPE
        return code

    return command, lambda: importlib.import_module(name)._parser()


def _run_command(arguments: Sequence[str], program: Sequence[str] = ()) -> int:
    """`torchring run`. `program`: run this, with its arguments, in place of a script that the user names."""
    run = _parser_of_run(arguments)
    if program:
        run.prog = "torchring doctor"
        for name in ("--backend", "--timeout", "--gpu", "--json"):  # which the doctor has taken: for suggestions
            run.add_argument(name)
    options = run.parse_args(arguments)
    if program:
        if options.script is not None:
            run.error(f"runs no script; leave {options.script!r} out")
        options.script, *options.arguments = program
    else:
        _keep_dashes(options, arguments)
    if options.script is None:
        run.error("say which script to run, as in `torchring run -np 4 train.py`")
    try:
        is_elastic = elastic.is_elastic(options)
    except LaunchError as error:
        run.error(str(error))
    is_alone = options.num_proc is None and options.hosts is None and options.hostfile is None
    if is_alone and not is_elastic and options.launcher != "srun":
        own = {"-np", "-n", "-H"} & {*options.arguments}
        late = f"; {min(own)} stands behind {options.script}, so {options.script} gets it" if own else ""
        run.error(f"say how many processes: -np N, or -H HOST:SLOTS,..., or --hostfile FILE{late}")
    if options.quiet and options.log_dir is None:
        run.error("--quiet drops what processes print, unless --log-dir says where to write it")
    return _run(options, is_elastic)


def _keep_dashes(options: argparse.Namespace, arguments: Sequence[str]) -> None:
    """argparse drops a leading "--" from what belongs to the script."""
    if len(options.arguments) < len(arguments) and arguments[-len(options.arguments) - 1] == "--":
        options.arguments.insert(0, "--")


class _RunParser(Parser):
    def hint(self, word: str) -> str:
        if horovodrun.is_name(word):
            return "; --horovod takes it"
        near = super().hint(word)
        return near or ("" if "doctor" in self.prog else "; options of the script stand behind the script")


def _parser_of_run(arguments: Sequence[str] = ()) -> argparse.ArgumentParser:
    """The parser for these arguments: --elastic and --horovod have it show, and take, more options."""
    run = _RunParser(
        prog="torchring run",
        usage="torchring run [options] SCRIPT ...",
        description="Start a script on N processes of this host; or of several, through ssh.",
        epilog="examples:\n  torchring run -np 4 train.py --epochs 3\n  torchring run -H node1:4,node2:4 train.py\n"
        "  torchring run -np 4 --trace trace train.py     then: torchring report trace",
    )
    add = run.add_argument
    names = ("-np", "-n", "--num-proc", "--nproc-per-node")
    number: Any = {
        "type": lambda text: positive(text.removeprefix("p")),
        "metavar": "N",
    }  # -np2 is -n p2 to argparse
    add(*names, dest="num_proc", **number, help="number of processes (default: all slots of -H or --hostfile)")
    add("--standalone", action="store_true", help=argparse.SUPPRESS)  # torchrun's: so it is without hosts
    add("--nnodes", type=_one_node, help=argparse.SUPPRESS)
    where = run.add_mutually_exclusive_group()
    where.add_argument("-H", "--hosts", metavar="HOST:SLOTS,...", help="hosts, and how many processes each takes")
    where.add_argument("--hostfile", "-hostfile", metavar="FILE", help="the same, `host slots=N` or `host:N` a line")
    add("-m", "--module", action="store_true", help="SCRIPT is a module, as for python -m")
    env = "for all processes; without =VALUE, as it is set here; may be repeated"
    add("--env", type=setting, action="append", default=[], metavar="NAME[=VALUE]", help=env)
    add("--launcher", choices=LAUNCHERS, default="auto", help="what starts them; chosen by default")
    port = whole("a TCP port, 1 to 65535", 1, 65535)
    add("-p", "--ssh-port", type=port, metavar="PORT", help="port of ssh on the hosts")
    add("-i", "--ssh-identity-file", metavar="FILE", help="key for ssh")
    bind = "where each process runs: on physical cores of its own (the default, where there are enough), or a NUMA node"
    add("--bind", choices=placement.MODES, help=bind)
    add("--tag-output", action="store_true", help="put [rank] before each line that a process prints")
    add("--log-dir", metavar="DIR", help="also write what rank N prints to DIR/rankN.log, on its host")
    add("--quiet", action="store_true", help="with --log-dir: do not show it here")
    trace = "write where the time of the last 1,000 steps went to DIR, for `torchring report DIR`; replaces old ones"
    add("--trace", metavar="DIR", help=trace)
    elastic.add_options(run, where, arguments)
    horovodrun.add_options(run, arguments)
    horovodrun.ignore(run, "--rdzv-backend= --rdzv-endpoint= --rdzv-id= --master-addr= --master-port=")
    add("script", nargs="?", metavar="SCRIPT", help="the Python script, or a folder with a __main__.py")
    add("arguments", nargs=argparse.REMAINDER, metavar="...", help="handed to the script")
    return run


def _one_node(text: str) -> None:
    if text not in ("1", "1:1"):
        raise argparse.ArgumentTypeError("-H HOST:SLOTS,... names the hosts, whose processes torchring run starts")


def _run(options: argparse.Namespace, is_elastic: bool) -> int:
    """Returns the exit code of the first process that failed; 128 + n if signal n ended it, as in a shell."""
    try:
        require_packages()  # the processes would say so in a traceback each
        command = horovodrun.without_interpreter(options.script, options.arguments)
        if command is None or options.module:
            command = [*_program(options.script, options.module), *options.arguments]
        output = OutputOptions(options.tag_output, options.log_dir, options.quiet)
        env = horovodrun.settings_of(options)
        ssh_options = horovodrun.ssh_options_of(options.ssh_port, options.ssh_identity_file)
        if is_elastic:
            limits = elastic.limits_of(options)
            run = functools.partial(start_elastic, command, limits, elastic.hosts_of(options, limits))
        else:
            bind = options.bind or "auto"
            run = functools.partial(start, command, options.num_proc, hosts_of(options), bind=bind)
        if options.ignored:
            names = ", ".join(dict.fromkeys(options.ignored))
            print(f"torchring run: {names}: no meaning here, ignored", file=sys.stderr)
        if options.trace is not None:
            env[TRACE] = _empty_trace(options.trace)
        return run(env=env, output=output, ssh_options=ssh_options, launcher=options.launcher)
    except LaunchError as error:
        print(f"torchring run: {error}", file=sys.stderr)
    return 2


def _empty_trace(folder: str) -> str:
    """The folder for a trace, made, as an absolute path. Raises LaunchError if nothing can be written there."""
    path = Path(folder).absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
        for file in path.glob("rank-*.npz"):
            file.unlink()
    except OSError as error:
        raise LaunchError(f"--trace {folder}: {error.strerror}; take a folder you can write to") from error
    return str(path)


def _program(script: str, is_module: bool) -> list[str]:
    """The arguments of `python`. Raises LaunchError for a script that does not exist."""
    if is_module:
        return ["-m", script]
    if os.path.isdir(script) and not os.path.isfile(os.path.join(script, "__main__.py")):
        raise LaunchError(f"{script!r} is a directory without a __main__.py")
    if not os.path.exists(script):
        folder, name = os.path.split(script)
        others = os.listdir(folder or ".") if os.path.isdir(folder or ".") else []
        raise LaunchError(f"there is no script {script!r}{did_you_mean(name, others)}")
    return [os.path.join(".", script) if script.startswith("-") else script]  # python would take it for an option


def _benchmarks() -> dict[str, Path]:
    """The benchmarks in bench/ by name: scripts, and folders with a __main__.py."""
    scripts = {file.stem: file for file in _BENCH.glob("*.py") if 'if __name__ == "__main__":' in file.read_text()}
    return dict(sorted((scripts | {file.parent.name: file for file in _BENCH.glob("*/__main__.py")}).items()))


def _parser_of_bench() -> argparse.ArgumentParser:
    scripts = _benchmarks()
    docs = {name: ast.get_docstring(ast.parse(file.read_text())) or "" for name, file in scripts.items()}
    bench = Parser(
        prog="torchring bench",
        usage="torchring bench NAME ...",
        description="Run a benchmark. `torchring bench NAME --help` says what it does.",
        epilog="\n".join(["benchmarks:", *(f"  {name:10} {re.split('[:.]', docs[name])[0]}" for name in docs)]),
    )
    bench.add_argument("name", nargs="?", choices=[*scripts], metavar="NAME", help="one of the benchmarks below")
    bench.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="handed to the benchmark")
    return bench


def _bench(arguments: Sequence[str]) -> int:
    """Become the benchmark, which ends its own processes. Returns 2 if it cannot be started."""
    bench = _parser_of_bench()
    options = bench.parse_args(arguments)
    _keep_dashes(options, arguments)
    if options.name is None:
        bench.print_help()
        return 0
    command_lines = importlib.import_module("torchring.bench.options")
    if options.name in command_lines.OPTIONS:  # before torch is imported, which takes seconds
        command_lines.parser(options.name).parse_args(options.arguments)
    require_packages()
    sys.stdout.flush()
    try:
        os.execv(sys.executable, [sys.executable, str(_benchmarks()[options.name]), *options.arguments])
    except OSError as error:
        print(f"torchring bench: cannot start {sys.executable}: {error.strerror}", file=sys.stderr)
    return 2


_COMMANDS: Final[dict[str, tuple[_Command, Callable[[], argparse.ArgumentParser], str]]] = {
    "run": (_run_command, _parser_of_run, "start a script on N processes, of this host or of several"),
    "doctor": (*_of_module("torchring.doctor", _run_command), "say what this host offers, and what is wrong"),
    "report": (*_of_module("torchring.report.command"), "say what slows a traced job down, and what would help"),
    "top": (*_of_module("torchring.report.show.top"), "watch a job that is being traced"),
    "manifest": (*_of_module("torchring.manifest.manifest"), "write what starts a job on Slurm or Kubernetes"),
    "bench": (_bench, _parser_of_bench, "run a benchmark"),
}

if __name__ == "__main__":
    sys.exit(main())
