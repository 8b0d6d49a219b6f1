"""Reads job files: what to run, on how many hosts, with what."""

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final

from torchring.launch.arguments import LAUNCHERS_OWN, did_you_mean
from torchring.launch.horovodrun import without_interpreter
from torchring.launch.hosts import LaunchError

_UNITS: Final = {f"{prefix}{i}": (1024 if i else 1000) ** n for n, prefix in enumerate("KMGTP", 1) for i in ("i", "")}
GRACE_SECONDS: Final = 120  # between SIGTERM and the end, to finish the step and write a checkpoint
_SEVERAL_MB: Final = 1 << 22  # Python alone takes more


@dataclass(frozen=True)
class JobFile:
    """What a job file says. A worker is a host or a pod. 0: the file does not say."""

    name: str  # of the job, and of its objects in Kubernetes
    command: list[str]  # starts one process
    image: str = ""  # of the pods
    workers: int = 1  # in an elastic job of Kubernetes, how many it starts with
    gpus: int = 0  # of each worker
    cpus: int = 0  # cores of each worker
    memory: int = 0  # bytes of each worker
    processes: int = 0  # of each worker. One for each GPU; without GPUs, one for each core
    elastic: tuple[int, int] | None = None  # the fewest and the most workers; None if their number stays the same
    env: Mapping[str, str] = field(default_factory=dict)  # for all processes
    volumes: Mapping[str, str] = field(default_factory=dict)  # persistent volume claims, and where each is mounted

    @property
    def threads(self) -> int:
        """Cores of each process; 0 if the file does not say."""
        return self.cpus // self.processes

    @property
    def variables(self) -> dict[str, str]:
        """What each process gets: its number of threads, and `env`."""
        return {**({"OMP_NUM_THREADS": str(self.threads)} if self.threads else {}), **self.env}


_KEYS: Final = [key.name for key in fields(JobFile)]


def read_job(path: str) -> JobFile:
    """The job of a file. Raises LaunchError for what is not a job file, and for a job that no host can run."""
    try:
        with open(path) as file:
            import yaml

            said = yaml.safe_load(file)
    except ImportError as error:
        raise LaunchError("job files need PyYAML: pip install pyyaml") from error
    except OSError as error:
        raise LaunchError(f"cannot be read: {error.strerror}") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise LaunchError(f"is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(said, dict):
        raise LaunchError(f"a job file has a line `key: value` for each of {', '.join(_KEYS)}; got {said!r}")
    return parse_job(said)


def parse_job(said: Mapping[Any, Any]) -> JobFile:
    """The job that a file's keys and values describe. Raises LaunchError."""
    for key in said:
        if key not in _KEYS:
            hint = did_you_mean(str(key), _KEYS) or f"; there are {', '.join(_KEYS)}"
            raise LaunchError(f"unknown key {key!r}{hint}")
    name = said.get("name")
    if not isinstance(name, str) or not re.fullmatch("[a-z]([-a-z0-9]{0,38}[a-z0-9])?", name):
        # A pod's name adds more than 20 letters to it, and may have 63.
        raise LaunchError(f"name: lower-case letters, digits and -, a letter first, 40 at most; got {name!r}")
    gpus, cpus = _number(said, "gpus", 0), _number(said, "cpus", 0)
    processes = _number(said, "processes", 1, default=gpus or cpus)
    if not processes:
        raise LaunchError("say gpus or cpus of a worker: it runs a process for each GPU, else one for each core")
    if gpus and processes > gpus:
        raise LaunchError(f"{processes} processes do not fit on {gpus} GPUs of a worker; each takes one of its own")
    if cpus and processes > cpus:
        what = "processes" if "processes" in said else "processes, one for each GPU,"
        raise LaunchError(f"{processes} {what} need as many cores, and cpus is {cpus}")
    workers = _number(said, "workers", 1, default=1)
    command = _command(said.get("command"), is_elastic="elastic" in said)
    image = said.get("image", "")
    if not isinstance(image, str) or re.search(r"\s", image):
        raise LaunchError(f"image: the name of a container image; got {image!r}")
    bounds = _bounds(said["elastic"], workers) if "elastic" in said else None
    env = _strings(said, "env", "[A-Za-z_][A-Za-z0-9_]*", "names of variables, with a value each")
    claims = "names of persistent volume claims, with a path each"
    volumes = _strings(said, "volumes", "[a-z0-9]([-.a-z0-9]*[a-z0-9])?", claims)
    memory = _bytes(said.get("memory", "0"))
    return JobFile(name, command, image, workers, gpus, cpus, memory, processes, bounds, env, volumes)


def _number(said: Mapping[Any, Any], key: str, least: int, default: int = 0) -> int:
    if key not in said:
        return default
    if type(said[key]) is not int or said[key] < least:
        raise LaunchError(f"{key}: a whole number, {least} or more; got {said[key]!r}")
    return int(said[key])


def _command(said: Any, is_elastic: bool) -> list[str]:
    try:
        words = shlex.split(said) if isinstance(said, str) else said
    except ValueError as error:
        raise LaunchError(f"command: {error}; got {said!r}") from error
    if not isinstance(words, list) or not words or not all(isinstance(word, str) and word for word in words):
        raise LaunchError(f"command: what starts one process, such as `python train.py --epochs 3`; got {said!r}")
    if is_elastic and without_interpreter(words[0], words[1:]) is None:
        raise LaunchError(f"elastic: the command begins with `python`, got {said!r}")
    return words


def _bytes(said: Any) -> int:
    found = re.fullmatch("([0-9]+)([KMGTP]?i?)", str(said))
    if found is None or found[2] == "i":
        raise LaunchError(f"memory: of a worker, such as 64Gi or 500M; got {said!r}")
    size: int = int(found[1]) * _UNITS.get(found[2], 1)
    if 0 < size < _SEVERAL_MB or (not size and str(said) != "0"):
        raise LaunchError(f"memory: {said} is {size} bytes, which no process can run in; did you mean {found[1]}Gi?")
    return size


def _bounds(said: Any, workers: int) -> tuple[int, int]:
    if not isinstance(said, dict) or set(said) != {"min", "max"} or {type(bound) for bound in said.values()} != {int}:
        raise LaunchError(f"elastic: the fewest and the most workers, as {{min: 2, max: 8}}; got {said!r}")
    least, most = said["min"], said["max"]
    if not 1 <= least <= workers <= most:
        raise LaunchError(f"elastic: 1 <= min <= workers <= max; got min {least}, {workers} workers, max {most}")
    return least, most


def _strings(said: Mapping[Any, Any], key: str, names: str, what: str) -> dict[str, str]:
    found = said.get(key, {})
    if not isinstance(found, dict):
        raise LaunchError(f"{key}: {what}; got {found!r}")
    for name, value in found.items():
        if not isinstance(name, str) or not re.fullmatch(names, name) or type(value) not in (str, int):
            raise LaunchError(f"{key}: {what}, in quotes if YAML would read it as a number; got {name!r}: {value!r}")
        if key == "env" and name in LAUNCHERS_OWN:
            raise LaunchError(f"env: {name} is set for each process by what starts it")
        if key == "volumes" and not str(value).startswith("/"):
            raise LaunchError(f"volumes: the path at which {name} is mounted begins with /; got {value!r}")
    return {name: str(value) for name, value in found.items()}
