"""The hosts of a launch: reads lists of hosts, fills them with processes, and finds out which one is this one."""

from __future__ import annotations

import contextlib
import functools
import json
import re
import socket
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from torchring.launch.output import OutputOptions
from torchring.rendezvous.addresses import own_addresses
from torchring.rendezvous.environment import expand_hosts

_HOST: Final = re.compile(r"(?P<name>\[[0-9a-fA-F:.]+\]|[^\s:,\[\]]+)(?::(?P<slots>[0-9]+))?")
_TASKS: Final = re.compile(r"(\d+)(?:\(x(\d+)\))?")  # of Slurm: 4(x2) is 4,4
_LOOPBACK_SECONDS: Final = 5.0


class LaunchError(Exception):
    """The program could not be started. The text says why, and what would be right."""


@dataclass(frozen=True)
class Host:
    """A host of a launch, and the number of processes that it takes."""

    name: str
    slots: int


@dataclass(frozen=True)
class HostPlan:
    """The share of one host in a launch, for its agent."""

    num_proc: int  # ranks on this host
    first_rank: int
    size: int  # number of all ranks
    num_hosts: int
    number: int  # of this host, 0 <= number < num_hosts
    host: str  # for messages
    address: str  # where the agents meet, if there are several hosts
    port: int
    output: OutputOptions
    bind: str = "auto"  # where the ranks run, see placement.py

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> HostPlan:
        read = json.loads(text)
        return cls(**{**read, "output": OutputOptions(**read["output"])})


def parse_hosts(text: str) -> list[Host]:
    """ "a:2,b:4" is two processes on a and four on b. A host without a number takes one. Raises LaunchError."""
    return [parse_host(item.strip(), f"-H takes host:slots,host:slots,..., got {text!r}") for item in text.split(",")]


def parse_hostfile(text: str) -> list[Host]:
    """One host per line: "a slots=2", "a:2" or "a". Text after # is a comment. Raises LaunchError."""
    hosts = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        complaint = f"line {number} of the host file must be `host`, `host:slots` or `host slots=N`, got {line!r}"
        slots = re.fullmatch("slots=([0-9]+)", words[1]) if len(words) == 2 and ":" not in words[0] else None
        if len(words) > 2 or (len(words) == 2 and slots is None):
            raise LaunchError(complaint)
        hosts.append(parse_host(f"{words[0]}:{slots[1]}" if slots else words[0], complaint))
    if not hosts:
        raise LaunchError("the host file names no host")
    return hosts


def read_hostfile(path: str) -> list[Host]:
    """The hosts of a host file. Raises LaunchError."""
    try:
        return parse_hostfile(Path(path).read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise LaunchError(f"cannot read the host file {path!r}: {getattr(error, 'strerror', error)}") from error


def slurm_hosts(environ: Mapping[str, str]) -> list[Host]:
    """The nodes of the Slurm allocation that this process belongs to, with a slot for each task. Raises LaunchError."""
    names, tasks = environ.get("SLURM_JOB_NODELIST"), environ.get("SLURM_TASKS_PER_NODE")  # "a[1-3]" and "4(x2),2"
    if not names or not tasks:
        raise LaunchError(
            "--launcher srun starts processes inside an allocation of Slurm, and this is none: SLURM_JOB_NODELIST or "
            "SLURM_TASKS_PER_NODE is not set. Use it in a script for sbatch, or after salloc"
        )
    slots = [int(slots) for slots, times in _TASKS.findall(tasks) for _ in range(int(times or 1))]
    try:
        hosts = [Host(name, number) for name, number in zip(expand_hosts(names), slots, strict=True)]
    except ValueError as error:
        raise LaunchError(
            f"SLURM_JOB_NODELIST={names} and SLURM_TASKS_PER_NODE={tasks} do not fit together, as inside a job step: "
            "call torchring run in the batch script or in the shell of salloc, and not through srun"
        ) from error
    num_tasks = int(environ.get("SLURM_NTASKS", "0"))  # may be fewer than the nodes could take
    return share_out(hosts, min(num_tasks, sum(slots)) or None)


def parse_host(text: str, complaint: str, default_slots: int = 1) -> Host:
    """`host:slots` or `host`. Raises LaunchError with the complaint."""
    match = _HOST.fullmatch(text)
    # ssh would take a leading "-" for an option.
    if match is None or match["slots"] == "0" or text.startswith("-"):
        raise LaunchError(complaint)
    return Host(match["name"], int(match["slots"] or default_slots))


def share_out(hosts: Sequence[Host], num_proc: int | None) -> list[Host]:
    """Fill hosts in the given order, and leave out hosts that get no process. The same host twice is one host."""
    slots: dict[str, int] = {}
    for host in hosts:
        slots[host.name] = slots.get(host.name, 0) + host.slots
    total = sum(slots.values())
    left = total if num_proc is None else num_proc
    if left > total:
        offers = ", ".join(f"{name}:{offered}" for name, offered in slots.items())
        raise LaunchError(f"{left} processes are more than the {total} slots of {offers}")
    filled = []
    for name, offered in slots.items():
        if used := min(offered, left):
            filled.append(Host(name, used))
            left -= used
    return filled


def as_this_host(hosts: Sequence[Host]) -> list[Host]:
    """Merge hosts that are all names of this host into one."""
    here = [host for host in hosts if is_here(host.name)]
    if len(here) < 2:
        return list(hosts)
    together = Host(here[0].name, sum(host.slots for host in here))
    return [together if host is here[0] else host for host in hosts if host is here[0] or host not in here]


@functools.cache
def is_here(name: str) -> bool:
    """Return True for a name of this host: it resolves to an address of this host. Looks each name up once."""
    name = name.strip("[]")
    if "@" in name:  # another user, whose files and environment may differ
        return False
    if name in ("localhost", socket.gethostname()):
        return True
    with contextlib.suppress(OSError):
        for family, _, _, _, address in socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.bind(address)
                return True
    return False


def _without_user(name: str) -> str:
    """user@[::1] is ::1."""
    return name.rpartition("@")[2].strip("[]")


def resolvable(name: str) -> str:
    """The host's name, or the address that ssh's configuration has for a name that does not resolve."""
    name = _without_user(name)
    try:
        socket.getaddrinfo(name, 9)
    except OSError:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            said = subprocess.run(["ssh", "-G", name], capture_output=True, text=True, timeout=20).stdout
            if found := re.search("^hostname (.+)$", said, re.MULTILINE):
                return found[1]
    return name


def address_towards(name: str) -> str:
    """This host's address on the network of the named host. The likeliest address if the name does not resolve."""
    with contextlib.suppress(OSError):
        family, kind, _, _, address = socket.getaddrinfo(_without_user(name), 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    return own_addresses()[0]


def why_no_loopback() -> str | None:
    """Why ranks of this host cannot meet. torch would try for a minute, and not say why."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=_LOOPBACK_SECONDS).close()
    except OSError as error:
        return (
            f"this host does not reach itself at 127.0.0.1, where ranks meet ({error.strerror or error}): its "
            "loopback interface may be down; `ip link set lo up` starts it"
        )
    return None
