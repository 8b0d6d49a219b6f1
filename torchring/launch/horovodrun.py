"""What users of Horovod's launcher, horovodrun, type: its options, on the command line of `torchring run`.

    horovodrun  -np 4 -H a:2,b:2 --timeline-filename t.json python train.py
    torchring run --horovod -np 4 -H a:2,b:2 --timeline-filename t.json python train.py

Options that set HOROVOD_* variables for the processes do so here, and torchring.horovod reads the variables. Options
that have no meaning here give one warning that names them.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from torchring.launch.hosts import Host

_STARTUP: Final = Path(__file__).parent.parent / "horovod" / "startup"  # see horovod/aliases.py
_MIB: Final = 2**20
SOCKETS: Final = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
# Options without a meaning here, by the number of values that they take.
_IGNORED: Final = {
    0: """--disable-cache --jsrun --hierarchical-allreduce --no-hierarchical-allreduce --hierarchical-allgather
        --no-hierarchical-allgather --torus-allreduce --no-torus-allreduce --autotune --no-autotune
        --mpi-threads-disable --no-mpi-threads-disable --tcp --log-with-timestamp --log-without-timestamp
        -prefix-timestamp --prefix-output-with-timestamp""",
    1: """--start-timeout --cache-capacity --autotune-log-file --autotune-warmup-samples
        --autotune-steps-per-sample --autotune-bayes-opt-max-samples --autotune-gaussian-process-noise --mpi-args
        --binding-args --num-nccl-streams --thread-affinity""",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add horovodrun's options, but for those that `torchring run` has under the same name."""
    group = parser.add_argument_group("for users of horovodrun")
    group.add_argument(
        "--horovod", action="store_true", help="have `import horovod.torch` find torchring.horovod in the script"
    )
    group.add_argument(
        *("-cb", "--check-build"),
        action="version",
        version="torchring: PyTorch; Gloo between hosts, and MPI under mpirun with mpi4py; NCCL's place is taken by "
        "torchring's own kernels. `torchring doctor` says what this machine offers.",
        help="say what processes reduce with",
    )
    group.add_argument("--config-file", type=_no_file, metavar="FILE", help="refused: pass its settings as options")
    group.add_argument("--verbose", action="store_true", help="say what is started where")
    group.add_argument("-p", "--ssh-port", type=_port, metavar="PORT", help="of ssh on other hosts")
    group.add_argument("-i", "--ssh-identity-file", metavar="FILE", help="key for ssh")
    group.add_argument("--output-filename", dest="log_dir", metavar="DIR", help="as --log-dir")
    how = group.add_mutually_exclusive_group()
    how.add_argument("--gloo", action="store_true", help="start processes without mpirun")
    how.add_argument("--mpi", action="store_true", help="start processes with mpirun")
    _add_setting(group, ("--network-interfaces", "--network-interface"), SOCKETS, _interfaces, "a,b")
    _add_setting(group, ("--timeline-filename",), "HOROVOD_TIMELINE", _timeline, "FILE")
    _add_setting(group, ("--timeline-mark-cycles",), "HOROVOD_TIMELINE_MARK_CYCLES", value="1")
    _add_setting(group, ("--no-timeline-mark-cycles",), "HOROVOD_TIMELINE_MARK_CYCLES", value="0")
    _add_setting(group, ("--fusion-threshold-mb",), "HOROVOD_FUSION_THRESHOLD", _megabytes, "MB")
    _add_setting(group, ("--cycle-time-ms",), "HOROVOD_CYCLE_TIME", _number, "MS")
    _add_setting(group, ("--stall-check",), "HOROVOD_STALL_CHECK_DISABLE", value="0")
    _add_setting(group, ("--no-stall-check",), "HOROVOD_STALL_CHECK_DISABLE", value="1")
    _add_setting(group, ("--stall-check-warning-time-seconds",), "HOROVOD_STALL_CHECK_TIME_SECONDS", _number, "SECONDS")
    _add_setting(
        group, ("--stall-check-shutdown-time-seconds",), "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", _number, "SECONDS"
    )
    _add_setting(group, ("--gloo-timeout-seconds",), "HOROVOD_GLOO_TIMEOUT_SECONDS", _number, "SECONDS")
    _add_setting(group, ("--log-level",), "HOROVOD_LOG_LEVEL", str.upper, "LEVEL")
    for num_values, names in _IGNORED.items():
        for name in names.split():
            group.add_argument(
                name, nargs=num_values, action=_Ignore, dest="ignored", default=[], help=argparse.SUPPRESS
            )


def settings_of(options: argparse.Namespace) -> dict[str, str]:
    """The variables that the options set for the processes, among them those of `--env`."""
    env = {**options.settings, **dict(options.env)}
    if options.horovod:
        env["PYTHONPATH"] = with_aliases({**os.environ, **env})["PYTHONPATH"]
    return env


def warn_of_ignored(options: argparse.Namespace) -> None:
    """Name the options that have no meaning."""
    if options.ignored:
        names = ", ".join(dict.fromkeys(options.ignored))
        print(f"torchring run: {names}: no meaning here, ignored", file=sys.stderr)


def launcher_of(options: argparse.Namespace) -> str:
    """What starts the processes: --launcher, else --mpi or --gloo."""
    if options.launcher != "auto" or not (options.mpi or options.gloo):
        return str(options.launcher)
    if options.mpi:
        return "mpirun"
    return "local" if options.hosts is None and options.hostfile is None else "ssh"


def ssh_options_of(options: argparse.Namespace) -> list[str]:
    """Arguments for ssh."""
    port = [] if options.ssh_port is None else ["-p", str(options.ssh_port)]
    return port + ([] if options.ssh_identity_file is None else ["-i", options.ssh_identity_file])


def describe(command: Sequence[str], num_proc: int | None, hosts: Sequence[Host] | None) -> str:
    """What is started where, for --verbose."""
    places = "this machine" if hosts is None else ", ".join(f"{host.name}:{host.slots}" for host in hosts)
    number = "as many processes as there are slots" if num_proc is None else f"{num_proc} processes"
    return f"torchring run: starting {number} on {places}: python {' '.join(command)}"


def without_interpreter(script: str, arguments: Sequence[str]) -> list[str] | None:
    """The arguments of `python` in `python train.py`, which horovodrun's users type. None for another command."""
    name = os.path.basename(script)
    is_python = re.fullmatch(r"python(3(\.[0-9]+)?)?", name) is not None or script == sys.executable
    return list(arguments) if is_python and arguments and not os.path.isfile(name) else None


def with_aliases(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ`, in which every Python process finds torchring for `import horovod.torch`."""
    paths = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != str(_STARTUP)]
    return {**environ, "PYTHONPATH": os.pathsep.join([str(_STARTUP), *paths])}


def _add_setting(
    group: Any,  # argparse._ArgumentGroup
    names: Sequence[str],
    variables: str | Sequence[str],
    convert: Callable[[str], str] = str,
    metavar: str | None = None,
    value: str | None = None,
) -> None:
    """An option that sets variables to its value, or to `value`."""
    keys = [variables] if isinstance(variables, str) else list(variables)
    group.add_argument(
        *names,
        action=_Set,
        dest="settings",
        default={},
        nargs=None if value is None else 0,
        type=convert,
        metavar=metavar,
        variables=keys,
        value=value,
        help=f"{' and '.join(keys)} for the processes",
    )


class _Set(argparse.Action):
    """Notes variables and their value."""

    def __init__(self, *, variables: Sequence[str], value: str | None, **options: Any) -> None:
        super().__init__(**options)
        self.variables = variables
        self.value = value

    def __call__(
        self, parser: object, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        value = values if self.value is None else self.value
        namespace.settings = {**namespace.settings, **dict.fromkeys(self.variables, value)}


class _Ignore(argparse.Action):
    """Notes that the option was given."""

    def __call__(
        self, parser: object, namespace: argparse.Namespace, values: Any, option_string: str | None = None
    ) -> None:
        namespace.ignored = [*namespace.ignored, option_string]


def _timeline(text: str) -> str:
    return text if text.upper() == "DYNAMIC" else os.path.abspath(text)


def _no_file(text: str) -> str:
    raise argparse.ArgumentTypeError(
        f"{text} is not read, so its settings would be lost: pass them as options, such as --fusion-threshold-mb"
    )


def _port(text: str) -> int:
    if not text.isdecimal() or not 0 < int(text) < 65536:
        raise argparse.ArgumentTypeError(f"needs a TCP port, 1 to 65535, got {text!r}")
    return int(text)


def _number(text: str) -> str:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"needs a number, 0 or more, got {text!r}")
    return text


def _megabytes(text: str) -> str:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"needs a whole number of megabytes, 0 or more, got {text!r}")
    return str(int(text) * _MIB)


def _interfaces(text: str) -> str:
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise argparse.ArgumentTypeError(f"needs names of network interfaces, a,b, got {text!r}")
    return ",".join(names)
