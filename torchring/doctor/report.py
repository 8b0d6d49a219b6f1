"""What `torchring doctor` knows, as plain data: facts about ranks, paths and choices, and findings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Final, TypeVar

LEVELS: Final = ("ok", "note", "warning", "wrong")  # from good to bad; a note is a fact without a verdict

_T = TypeVar("_T")


@dataclass(frozen=True)
class Finding:
    """What a check found: `level` is one of LEVELS, `topic` is one word. If `level` is bad, `text` says what to do."""

    level: str
    topic: str
    text: str


@dataclass(frozen=True)
class RankFacts:
    """What one rank knows about itself without the others. Every field but `rank` has a value for "unknown".

    Attributes:
        boot: equal on ranks under the same running kernel, containers included.
        network_namespace: the namespace of the process, as Linux numbers it.
        versions: {package: version}, "python" included. The version is None for a package that is not installed.
        platform: processor and C library. Ranks with different platforms share no memory.
        cores: numbers of the cores that the process may run on.
        core_limit: processor time that a control group (a container) grants, in cores; None without a limit.
        threads: number of threads that torch computes with.
        memory_available_bytes: free memory of the machine or of the control group, whichever is less; 0 if unknown.
        memory_limit_bytes: limit of the control group.
        gpu_peers: [i][j]: whether GPU i reaches GPU j's memory.
        gpu_atomics: [i][j]: whether atomic operations of GPU i on GPU j's memory are atomic for both; empty if unknown.
        handover: see `memory.handover.describe_handover`; empty if unknown.
        memfd_error: why memfd_create fails here; None if it works.
        mpi: version of the MPI library; None without mpi4py, "" if mpi4py does not load.
        interfaces: [name, address] pairs: the first IPv4 address of each interface, all IPv6 ones.
        gloo_address: where Gloo will listen; "" if the interface in GLOO_SOCKET_IFNAME does not exist.
    """

    rank: int
    hostname: str = "?"
    pid: int = 0
    uid: int = -1
    boot: str = ""
    network_namespace: str = ""
    versions: dict[str, str | None] = field(default_factory=dict)
    platform: str = ""
    cores: list[int] = field(default_factory=list)
    core_limit: float | None = None
    threads: int = 0
    memory_available_bytes: int = 0
    memory_limit_bytes: int | None = None
    gpus: list[str] = field(default_factory=list)
    gpu_peers: list[list[bool]] = field(default_factory=list)
    gpu_atomics: list[list[bool]] = field(default_factory=list)
    handover: dict[str, str] = field(default_factory=dict)
    memfd_error: str | None = None
    has_gloo: bool = False
    has_nccl: bool = False
    mpi: str | None = None
    interfaces: list[list[str]] = field(default_factory=list)
    gloo_address: str = ""

    @property
    def machine(self) -> str:
        """Equal on ranks of one machine."""
        return self.boot or self.hostname


@dataclass(frozen=True)
class StoreFacts:
    """The rendezvous store.

    Attributes:
        host: name or address, as the launcher told the ranks.
        addresses: what `host` resolves to on rank 0.
        hosted_by: "rank 0", or the launcher.
        listens_on: the addresses at which a process on rank 0's machine listens; empty if unknown.
    """

    host: str
    port: int
    addresses: list[str] = field(default_factory=list)
    hosted_by: str = "rank 0"
    listens_on: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class PathFacts:
    """How fast these ranks communicate over one kind of path.

    Attributes:
        kind: "shared memory", "Gloo" or "MPI".
        latency_us: time to swap 8 bytes; in shared memory, of an all-reduce of 1 KiB.
        gigabytes_per_second: in each direction, while both are in use, in transfers of `num_bytes`. In shared memory:
            bytes over time of an all-reduce.
        arrived_intact: whether the data arrived unchanged.
    """

    kind: str
    ranks: list[int]
    latency_us: float
    gigabytes_per_second: float
    num_bytes: int
    arrived_intact: bool = True


@dataclass(frozen=True)
class ChoiceFacts:
    """What algorithm="auto" picks for a bucket. `seconds` has a time per candidate, or nothing if none was measured."""

    num_bytes: int
    dtype: str
    algorithm: str
    reason: str
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass
class Report:
    """All facts, as they are gathered. `checks.examine` judges them.

    Attributes:
        launcher: what started the ranks, as torchring reads the environment.
        size: number of ranks that the launcher started.
        timeout_seconds: how long rank 0 waits for the others.
        seconds: how long it took to gather all this.
        ranks: the ranks that showed up, in ascending order.
        hosts: ranks grouped by shared memory; empty if the world could not be opened.
        problems: operations that failed, in words.
    """

    launcher: str = "none"
    size: int = 1
    timeout_seconds: float = 0.0
    seconds: float = 0.0
    backend: str = ""
    store: StoreFacts | None = None
    ranks: list[RankFacts] = field(default_factory=list)
    hosts: list[list[int]] = field(default_factory=list)
    paths: list[PathFacts] = field(default_factory=list)
    choices: list[ChoiceFacts] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def read(kind: type[_T], data: Mapping[str, Any]) -> _T:
    """Make a dataclass from JSON. Ignores unknown keys: another rank may have another version of torchring."""
    known = {item.name for item in fields(kind)}  # type: ignore[arg-type]
    return kind(**{key: value for key, value in data.items() if key in known})


def verdict(findings: Sequence[Finding]) -> str:
    """The worst level: "ok", "warning" or "wrong"."""
    worst = max((LEVELS.index(finding.level) for finding in findings), default=0)
    return "ok" if LEVELS[worst] == "note" else LEVELS[worst]
