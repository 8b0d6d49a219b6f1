"""What `torchring doctor` knows, as plain data that travels as JSON: facts of ranks, paths and choices; findings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final, TypeVar

SCHEMA: Final = 1
LEVELS: Final = ("ok", "note", "warning", "wrong")  # from good to bad; a note is a fact that has no verdict

_T = TypeVar("_T")


@dataclass(frozen=True)
class Finding:
    """What a check has to say: `level` is one of LEVELS, `topic` one word, `text` says what to do where that is bad."""

    level: str
    topic: str
    text: str


@dataclass(frozen=True)
class RankFacts:
    """What one rank found out about itself, alone. Every field but `rank` has a value for "unknown".

    Attributes:
        boot: equal on ranks under the same running kernel, containers included.
        network_namespace: of the process, as Linux numbers them; "" where it does not say.
        versions: {package: version or None where it is not installed}, "python" included.
        platform: processor and C library; ranks share memory only where it is equal.
        cores: that the process may run on.
        core_limit: processor time that a control group (a container) grants, in cores; None without a limit.
        threads: that torch computes with.
        memory_available_bytes: what is free, or what a control group has left if that is less; 0 if unknown.
        memory_limit_bytes: that of the control group.
        gpu_peers: [i][j]: whether GPU i reaches GPU j's memory.
        memfd_error: why memory without a name cannot be made here, None if it can.
        mpi: the version that the MPI library states; None without mpi4py, "" where mpi4py does not load.
        interfaces: [name, address] pairs of those that are up: the first IPv4 address of each, all IPv6 ones.
        gloo_interface: GLOO_SOCKET_IFNAME; None if not set.
        gloo_address: at which Gloo will listen; "" if GLOO_SOCKET_IFNAME names no interface that has one.
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
    omp_num_threads: str | None = None
    memory_available_bytes: int = 0
    memory_limit_bytes: int | None = None
    gpus: list[str] = field(default_factory=list)
    gpu_peers: list[list[bool]] = field(default_factory=list)
    memfd_error: str | None = None
    has_gloo: bool = False
    has_nccl: bool = False
    mpi: str | None = None
    interfaces: list[list[str]] = field(default_factory=list)
    gloo_interface: str | None = None
    gloo_address: str = ""

    @property
    def machine(self) -> tuple[str, str]:
        """Equal on ranks of one machine."""
        return (self.boot, self.hostname if not self.boot else "")


@dataclass(frozen=True)
class StoreFacts:
    """Where ranks met.

    Attributes:
        host: name or address, as the ranks were told.
        addresses: what it resolves to, on rank 0.
        hosted_by: "rank 0", or the launcher.
        listens_on: addresses, as rank 0's machine shows them; empty if unknown.
    """

    host: str
    port: int
    addresses: list[str] = field(default_factory=list)
    hosted_by: str = "rank 0"
    listens_on: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class PathFacts:
    """How fast one path is between these ranks.

    Attributes:
        kind: "shared memory", "Gloo" or "MPI".
        latency_us: half a round trip of 8 bytes; in shared memory, one all-reduce of 1 KiB.
        gigabytes_per_second: in each direction, both at once, in transfers of `num_bytes`; in shared memory, bytes over
            time of an all-reduce.
        arrived_intact: whether what arrived was what had been sent.
    """

    kind: str
    ranks: list[int]
    latency_us: float
    gigabytes_per_second: float
    num_bytes: int
    arrived_intact: bool = True


@dataclass(frozen=True)
class ChoiceFacts:
    """What algorithm="auto" takes for a bucket of this size; `seconds` per candidate, empty if nothing was measured."""

    num_bytes: int
    dtype: str
    algorithm: str
    reason: str
    seconds: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Report:
    """Everything, without a verdict. `checks.examine` gives that.

    Attributes:
        launcher: what started the ranks, as torchring reads the environment.
        size: ranks that were asked for.
        ranks: those that showed up, ascending.
        hosts: ranks grouped by shared memory; empty if the world could not be opened.
        problems: what failed, in words.
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

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Report:
        whole = read(Report, data)
        return Report(
            **{
                **vars(whole),
                "store": read(StoreFacts, data["store"]) if data.get("store") else None,
                "ranks": [read(RankFacts, item) for item in data.get("ranks", [])],
                "paths": [read(PathFacts, item) for item in data.get("paths", [])],
                "choices": [read(ChoiceFacts, item) for item in data.get("choices", [])],
            }
        )


def read(kind: type[_T], data: Mapping[str, Any]) -> _T:
    """A dataclass from JSON. Unknown keys are dropped: a rank with another version of torchring may send some."""
    known = {item.name for item in fields(kind)}  # type: ignore[arg-type]
    return kind(**{key: value for key, value in data.items() if key in known})


def verdict(findings: list[Finding]) -> str:
    """The worst level: "ok", "warning" or "wrong"."""
    worst = max((LEVELS.index(finding.level) for finding in findings), default=0)
    return "ok" if LEVELS[worst] == "note" else LEVELS[worst]
