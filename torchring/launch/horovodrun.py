"""The options of Horovod's launcher, horovodrun, on the command line of `torchring run`.

    horovodrun  -np 4 -H a:2,b:2 --timeline-filename t.json python train.py
    torchring run --horovod -np 4 -H a:2,b:2 --timeline-filename t.json python train.py

Options that set HOROVOD_* variables for the processes do so here, and torchring.horovod reads the variables. Options
that have no meaning here give one warning that names them.
"""

import argparse
import functools
import importlib.util
import os
import re
import sys
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

from torchring.launch.arguments import number, whole

_STARTUP: Final = Path(__file__).parent.parent / "horovod" / "startup"  # see horovod/aliases.py
_MIB: Final = 2**20
SOCKETS: Final = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
# Options without a meaning here: those that take no value, and those that take one.
_IGNORED_SWITCHES: Final = """--verbose --mpi --disable-cache --jsrun
    --hierarchical-allreduce --no-hierarchical-allreduce
    --hierarchical-allgather --no-hierarchical-allgather --torus-allreduce --no-torus-allreduce --autotune --no-autotune
    --mpi-threads-disable --no-mpi-threads-disable --tcp --log-with-timestamp --log-without-timestamp -prefix-timestamp
    --prefix-output-with-timestamp"""
_IGNORED_SETTINGS: Final = """--start-timeout --cache-capacity --autotune-log-file --autotune-warmup-samples
    --autotune-steps-per-sample --autotune-bayes-opt-max-samples --autotune-gaussian-process-noise --mpi-args
    --binding-args --num-nccl-streams --thread-affinity --rdzv-backend --rdzv-endpoint --rdzv-id --master-addr
    --master-port --reset-limit"""


def _timeline(text: str) -> str:
    return text if text.upper() == "DYNAMIC" else os.path.abspath(text)


def _number(text: str) -> str:
    number("a number, 0 or more", 0)(text)
    return text


def _megabytes(text: str) -> str:
    return str(whole("a whole number of megabytes, 0 or more", 0)(text) * _MIB)


# Options that set a variable for the processes: to their value, and to a fixed value.
_SETTINGS: Final[Sequence[tuple[str, str, Callable[[str], str], str]]] = (
    ("--timeline-filename", "HOROVOD_TIMELINE", _timeline, "FILE"),
    ("--fusion-threshold-mb", "HOROVOD_FUSION_THRESHOLD", _megabytes, "MB"),
    ("--cycle-time-ms", "HOROVOD_CYCLE_TIME", _number, "MS"),
    ("--stall-check-warning-time-seconds", "HOROVOD_STALL_CHECK_TIME_SECONDS", _number, "SECONDS"),
    ("--stall-check-shutdown-time-seconds", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", _number, "SECONDS"),
    ("--gloo-timeout-seconds", "HOROVOD_GLOO_TIMEOUT_SECONDS", _number, "SECONDS"),
    ("--log-level", "HOROVOD_LOG_LEVEL", str.upper, "LEVEL"),
)
_SWITCHES: Final = (
    ("--timeline-mark-cycles", "HOROVOD_TIMELINE_MARK_CYCLES", "1"),
    ("--no-timeline-mark-cycles", "HOROVOD_TIMELINE_MARK_CYCLES", "0"),
    ("--stall-check", "HOROVOD_STALL_CHECK_DISABLE", "0"),
    ("--no-stall-check", "HOROVOD_STALL_CHECK_DISABLE", "1"),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add horovodrun's options, but for those that `torchring run` has under the same name."""
    group = parser.add_argument_group("for users of horovodrun")
    group.add_argument(
        "--horovod", action="store_true", help="have `import horovod.torch` find torchring.horovod in the script"
    )
    port = whole("a TCP port, 1 to 65535", 1, 65535)
    group.add_argument("-p", "--ssh-port", type=port, metavar="PORT", help="of ssh on other hosts")
    group.add_argument("-i", "--ssh-identity-file", metavar="FILE", help="key for ssh")
    group.add_argument("--output-filename", dest="log_dir", metavar="DIR", help="as --log-dir")
    group.add_argument("--gloo", action="store_true", help=argparse.SUPPRESS)  # as it is without the option
    names, sockets = ("--network-interfaces", "--network-interface"), f"{' and '.join(SOCKETS)} for the processes"
    group.add_argument(*names, dest="settings", type=_interfaces, action="append", metavar="a,b", help=sockets)
    for name, variable, convert, metavar in _SETTINGS:
        setting = functools.partial(lambda variable, convert, text: {variable: convert(text)}, variable, convert)
        help_ = f"{variable} for the processes"
        group.add_argument(name, dest="settings", type=setting, action="append", metavar=metavar, help=help_)
    for name, variable, value in _SWITCHES:
        help_ = f"{variable}={value} for the processes"
        group.add_argument(name, dest="settings", const={variable: value}, action="append_const", help=help_)
    for name in _IGNORED_SWITCHES.split():
        group.add_argument(name, dest="ignored", const=name, action="append_const", help=argparse.SUPPRESS)
    for name in _IGNORED_SETTINGS.split():  # their name in place of their value
        its_name = functools.partial(lambda name, _: name, name)
        group.add_argument(name, dest="ignored", type=its_name, action="append", help=argparse.SUPPRESS)
    parser.set_defaults(settings=[], ignored=[])


def settings_of(options: argparse.Namespace) -> dict[str, str]:
    """The variables that the options set for the processes, among them those of `--env`."""
    env = dict(ChainMap(dict(options.env), *reversed(options.settings)))
    if options.horovod:
        env["PYTHONPATH"] = with_aliases({**os.environ, **env})["PYTHONPATH"]
    return env


def hint(options: argparse.Namespace, script: str) -> str:
    """For a script that has failed: a sentence if it imports a Horovod that is not there. Else empty."""
    if options.horovod or importlib.util.find_spec("horovod") or not os.path.isfile(script):
        return ""
    if not re.search(rb"^\s*(import|from) horovod\b", Path(script).read_bytes(), re.MULTILINE):
        return ""
    return f"{script} imports horovod: with --horovod, `import horovod.torch` finds torchring.horovod"


def warn_of_ignored(options: argparse.Namespace) -> None:
    """Name the options that have no meaning."""
    if options.ignored:
        names = ", ".join(dict.fromkeys(options.ignored))
        print(f"torchring run: {names}: no meaning here, ignored", file=sys.stderr)


def ssh_options_of(port: int | None, identity_file: str | None) -> list[str]:
    return ([] if port is None else ["-p", str(port)]) + ([] if identity_file is None else ["-i", identity_file])


def without_interpreter(script: str, arguments: Sequence[str]) -> list[str] | None:
    """The arguments of `python` in `python train.py`, which horovodrun's users type. None for another command."""
    name = os.path.basename(script)
    is_python = re.fullmatch(r"python(3(\.[0-9]+)?)?", name) is not None or script == sys.executable
    return list(arguments) if is_python and arguments and not os.path.isfile(name) else None


def with_aliases(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ`, in which every Python process finds torchring for `import horovod.torch`."""
    paths = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path and path != str(_STARTUP)]
    return {**environ, "PYTHONPATH": os.pathsep.join([str(_STARTUP), *paths])}


def _interfaces(text: str) -> dict[str, str]:
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise argparse.ArgumentTypeError(f"needs names of network interfaces, a,b, got {text!r}")
    return dict.fromkeys(SOCKETS, ",".join(names))
