"""The options of Horovod's launcher, horovodrun, on the command line of `torchring run`.

    horovodrun  -np 4 -H a:2,b:2 --timeline-filename t.json python train.py
    torchring run --horovod -np 4 -H a:2,b:2 --timeline-filename t.json python train.py

Options that set HOROVOD_* variables for the processes do so here, and torchring.horovod reads the variables. Options
that have no meaning here give one warning that names them.
"""

import argparse
import functools
import os
import re
import sys
from collections import ChainMap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from torchring.launch.arguments import whole

_STARTUP: Final = Path(__file__).parent.parent / "horovod" / "startup"  # see horovod/aliases.py
_MIB: Final = 2**20
SOCKETS: Final = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
# Options without a meaning here; those with a value end with "=".
_IGNORED: Final = """--verbose --mpi --disable-cache --jsrun --hierarchical-allreduce --no-hierarchical-allreduce
    --hierarchical-allgather --no-hierarchical-allgather --torus-allreduce --no-torus-allreduce --autotune --no-autotune
    --mpi-threads-disable --no-mpi-threads-disable --tcp --log-with-timestamp --log-without-timestamp -prefix-timestamp
    --prefix-output-with-timestamp --start-timeout= --cache-capacity= --autotune-log-file= --autotune-warmup-samples=
    --autotune-steps-per-sample= --autotune-bayes-opt-max-samples= --autotune-gaussian-process-noise= --mpi-args=
    --binding-args= --num-nccl-streams= --thread-affinity= --reset-limit="""
# Names of horovodrun for options of `torchring run`.
_NAMES: Final = {"--output-filename": "--log-dir", "--min-num-proc": "--min-np", "--max-num-proc": "--max-np",
                 "--host-discovery-script": "--discover", "--slots-per-host": "--slots"}  # fmt: skip


def _timeline(text: str) -> str:
    return text if text.upper() == "DYNAMIC" else os.path.abspath(text)


def _megabytes(text: str) -> str:
    return str(whole("a whole number of megabytes, 0 or more", 0)(text) * _MIB)


def _interfaces(text: str) -> str:
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise argparse.ArgumentTypeError(f"needs names of network interfaces, a,b, got {text!r}")
    return ",".join(names)


# Options that set variables for the processes: to their value, and to a fixed value.
_SETTINGS: Final[Mapping[str, tuple[Callable[[str], str], Sequence[str]]]] = {
    "--network-interfaces": (_interfaces, SOCKETS),
    "--network-interface": (_interfaces, SOCKETS),
    "--timeline-filename": (_timeline, ["HOROVOD_TIMELINE"]),
    "--fusion-threshold-mb": (_megabytes, ["HOROVOD_FUSION_THRESHOLD"]),
    "--cycle-time-ms": (str, ["HOROVOD_CYCLE_TIME"]),
    "--stall-check-warning-time-seconds": (str, ["HOROVOD_STALL_CHECK_TIME_SECONDS"]),
    "--stall-check-shutdown-time-seconds": (str, ["HOROVOD_STALL_SHUTDOWN_TIME_SECONDS"]),
    "--gloo-timeout-seconds": (str, ["HOROVOD_GLOO_TIMEOUT_SECONDS"]),
    "--log-level": (str.upper, ["HOROVOD_LOG_LEVEL"]),
}
_SWITCHES: Final[Mapping[str, Mapping[str, str]]] = {
    "--timeline-mark-cycles": {"HOROVOD_TIMELINE_MARK_CYCLES": "1"},
    "--no-timeline-mark-cycles": {"HOROVOD_TIMELINE_MARK_CYCLES": "0"},
    "--stall-check": {"HOROVOD_STALL_CHECK_DISABLE": "0"},
    "--no-stall-check": {"HOROVOD_STALL_CHECK_DISABLE": "1"},
    "--gloo": {},  # as it is without the option
}


def add_options(parser: argparse.ArgumentParser, arguments: Sequence[str]) -> None:
    """Add --horovod. If it is among the arguments, also the options that horovodrun has and `torchring run` has not."""
    finds = "`import horovod.torch` finds torchring.horovod; `--horovod --help` shows more"
    parser.add_argument("--horovod", action="store_true", help=finds)
    parser.set_defaults(settings=[], ignored=[])
    if "--horovod" not in arguments:
        return
    for name, own in _NAMES.items():
        parser._option_string_actions[name] = parser._option_string_actions[own]
    add = parser.add_argument_group("as horovodrun has them").add_argument
    for name, (convert, variables) in _SETTINGS.items():
        setting = functools.partial(
            lambda convert, names, text: dict.fromkeys(names, convert(text)), convert, variables
        )
        add(name, dest="settings", type=setting, action="append", metavar=name.rpartition("-")[2].upper())
    for name, values in _SWITCHES.items():
        add(name, dest="settings", const=values, action="append_const")
    ignore(parser, _IGNORED)


def ignore(parser: argparse.ArgumentParser, names: str) -> None:
    """Add options that have no meaning here. `names`: as in `_IGNORED`."""
    for word in names.split():  # their name in place of their value
        name = word.rstrip("=")
        how: Any = {"action": "append_const", "const": name}
        if name != word:
            how = {"action": "append", "type": functools.partial(lambda name, _: name, name)}
        parser.add_argument(name, dest="ignored", help=argparse.SUPPRESS, **how)


def is_name(word: str) -> bool:
    """Return True for an option that is known with --horovod only."""
    name = word[:2] + word[2:].replace("_", "-")
    return name in {*_NAMES, *_SETTINGS, *_SWITCHES, *_IGNORED.replace("=", "").split()}


def settings_of(options: argparse.Namespace) -> dict[str, str]:
    """The variables that the options set for the processes, among them those of `--env`."""
    env = dict(ChainMap(dict(options.env), *reversed(options.settings)))
    if options.horovod:
        env["PYTHONPATH"] = with_aliases({**os.environ, **env})["PYTHONPATH"]
    return env


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
