"""What `torchring doctor` knows, as plain data: facts about ranks, paths and choices, and findings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final, TypeVar

LEVELS: Final = ("ok", "note", "warning", "wrong")  # from good to bad; a note is a fact without a verdict

_T = TypeVar("_T")


@dataclass(frozen=True)
class Finding:
    """What a check found."""

    level: str  # one of LEVELS
    topic: str  # one word
    text: str  # if `level` is bad, also what to do


@dataclass(frozen=True)
class RankFacts:
    """What one rank knows about itself without the others. Every field but `rank` has a value for "unknown"."""

    rank: int
    hostname: str = "?"
    pid: int = 0
    uid: int = -1
    boot: str = ""  # equal on ranks under the same running kernel, containers included
    network_namespace: str = ""  # of the process, as Linux numbers it
    versions: dict[str, str | None] = field(default_factory=dict)  # of "python" and packages; None if not installed
    platform: str = ""  # processor and C library. Ranks with different platforms share no memory.
    cores: list[int] = field(default_factory=list)  # numbers of the cores that the process may run on
    threads_per_core: int = 1  # hardware threads of a physical core, on average
    topology: str = ""  # sockets, NUMA nodes and cores, in words; "" where Linux does not say
    load: float = 0.0  # of the machine in the last minute, divided by its cores
    core_limit: float | None = None  # processor time that a control group (a container) grants, in cores
    threads: int = 0  # that torch computes with
    memory_available_bytes: int = 0  # free memory of the machine or of the control group, whichever is less
    memory_limit_bytes: int | None = None  # of the control group
    gpus: list[str] = field(default_factory=list)
    gpu_peers: list[list[bool]] = field(default_factory=list)  # [i][j]: whether GPU i reaches GPU j's memory
    # [i][j]: whether atomic operations of GPU i on GPU j's memory are atomic for both
    gpu_atomics: list[list[bool]] = field(default_factory=list)
    triton_lacks: list[str] = field(default_factory=list)  # what compiling kernels takes, and is not there
    handover: dict[str, str] = field(default_factory=dict)  # see `devices.handover.describe_handover`
    memfd_error: str | None = None  # why memfd_create fails here; None if it works
    has_gloo: bool = False
    has_nccl: bool = False
    mpi: str | None = None  # version of the MPI library; None without mpi4py, "" if mpi4py does not load
    # [name, address] pairs: the first IPv4 address of each interface, all IPv6 ones
    interfaces: list[list[str]] = field(default_factory=list)
    gloo_address: str = ""  # where Gloo will listen; "" if the interface in GLOO_SOCKET_IFNAME does not exist

    @property
    def machine(self) -> str:
        """Equal on ranks of one machine."""
        return self.boot or self.hostname


@dataclass(frozen=True)
class StoreFacts:
    """The rendezvous store."""

    host: str  # name or address, as the launcher told the ranks
    port: int
    addresses: list[str] = field(default_factory=list)  # what `host` resolves to on rank 0
    hosted_by: str = "rank 0"  # or the launcher
    # Addresses at which a process on rank 0's machine listens; empty if unknown
    listens_on: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class PathFacts:
    """How fast these ranks communicate over one kind of path."""

    kind: str  # "shared memory", "Gloo" or "MPI"
    ranks: list[int]
    latency_us: float  # time to swap 8 bytes; in shared memory, of an all-reduce of 1 KiB
    # In each direction, while both are in use, in transfers of `num_bytes`. In shared memory: bytes over time of an
    # all-reduce.
    gigabytes_per_second: float
    num_bytes: int
    arrived_intact: bool = True  # the data arrived unchanged


@dataclass(frozen=True)
class ChoiceFacts:
    """What algorithm="auto" picks for a bucket."""

    num_bytes: int
    dtype: str
    algorithm: str
    reason: str
    seconds: dict[str, float] = field(default_factory=dict)  # by candidate; empty if none was measured


@dataclass
class Report:
    """All facts, as they are gathered. `checks.examine` judges them."""

    launcher: str = "none"  # what started the ranks, as torchring reads the environment
    size: int = 1  # number of ranks that the launcher started
    timeout_seconds: float = 0.0  # how long rank 0 waits for the others
    seconds: float = 0.0  # how long it took to gather all this
    backend: str = ""
    store: StoreFacts | None = None
    ranks: list[RankFacts] = field(default_factory=list)  # that showed up, in ascending order
    hosts: list[list[int]] = field(default_factory=list)  # ranks that share memory; empty without a world
    paths: list[PathFacts] = field(default_factory=list)
    choices: list[ChoiceFacts] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)  # operations that failed, in words


def read(kind: type[_T], data: Mapping[str, Any]) -> _T:
    """Make a dataclass from JSON. Ignores unknown keys: another rank may have another version of torchring."""
    known = {item.name for item in fields(kind)}  # type: ignore[arg-type]
    return kind(**{key: value for key, value in data.items() if key in known})


def verdict(findings: Sequence[Finding]) -> str:
    """The worst level: "ok", "warning" or "wrong"."""
    worst = max((LEVELS.index(finding.level) for finding in findings), default=0)
    return "ok" if LEVELS[worst] == "note" else LEVELS[worst]
