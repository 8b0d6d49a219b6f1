"""What `torchring doctor` knows, as plain data, and how it is printed."""

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from torchring.errors import ranks_in_words

_WIDTH: Final = 110  # of tables


@dataclass(frozen=True)
class Finding:
    level: str  # "ok", "note" (a fact without a verdict), "warning" or "wrong"
    topic: str  # one word
    text: str  # if `level` is bad, also what to do


@dataclass(frozen=True)
class RankFacts:
    """What one rank knows about itself without the others. Every field but `rank` has a value for "unknown"."""

    rank: int
    hostname: str = "?"
    uid: int = -1
    boot: str = ""  # equal on ranks under the same running kernel, containers included
    network_namespace: str = ""  # of the process, as Linux numbers it
    versions: dict[str, str | None] = field(default_factory=dict)  # of "python" and packages; None if not installed
    platform: str = ""  # processor and C library. Ranks with different platforms share no memory.
    cores: list[int] = field(default_factory=list)  # numbers of the cores that the process may run on
    threads_per_core: int = 1  # hardware threads of a physical core, on average
    load: float = 0.0  # of the machine in the last minute, divided by its cores
    core_limit: float | None = None  # processor time that a control group (a container) grants, in cores
    threads: int = 0  # that torch computes with
    gpus: list[str] = field(default_factory=list)
    gpu_peers: list[list[bool]] = field(default_factory=list)  # [i][j]: whether GPU i reaches GPU j's memory
    torch_lacks: list[str] = field(default_factory=list)  # what does not work with this release of PyTorch
    triton_lacks: list[str] = field(default_factory=list)  # what compiling kernels takes, and is not there
    handover: dict[str, str] = field(default_factory=dict)  # see `memory.handover.describe_handover`
    has_gloo: bool = False
    has_nccl: bool = False
    # [name, address] pairs: the first IPv4 address of each interface, all IPv6 ones
    interfaces: list[list[str]] = field(default_factory=list)
    gloo_address: str = ""  # where Gloo will listen; "" if the interface in GLOO_SOCKET_IFNAME does not exist

    @property
    def machine(self) -> str:
        """Equal on ranks of one machine."""
        return self.boot or self.hostname


@dataclass(frozen=True)
class StoreFacts:
    host: str  # name or address, as the launcher told the ranks
    port: int
    hosted_by: str  # "rank 0" or the launcher
    addresses: list[str]  # at which the store can be reached


@dataclass(frozen=True)
class PathFacts:
    """How fast these ranks communicate: by all-reduces in shared memory, or by messages in both directions at once."""

    kind: str  # "shared memory", "Gloo" or "MPI"
    ranks: list[int]
    latency_us: float  # of 1 KiB
    gigabytes_per_second: float  # of `num_bytes`; of messages in each direction
    num_bytes: int


@dataclass(frozen=True)
class TrainingFacts:
    """How a model trained on the GPUs of all ranks."""

    asked: str  # the algorithm that was asked for
    taken: str
    difference: float  # of its weights from those of one process, as a share of what training has changed
    step_ms: float


@dataclass
class Report:
    """All facts, as they are gathered. `checks.examine` judges them."""

    launcher: str  # what started the ranks, as torchring reads the environment
    size: int = 1  # number of ranks that the launcher started
    backend: str = ""
    seconds: float = 0.0  # how long it took to gather all this
    ranks: list[RankFacts] = field(default_factory=list)  # of all ranks; of this one where they did not meet
    hosts: list[list[int]] = field(default_factory=list)  # ranks that share memory; empty where they did not meet
    store: StoreFacts | None = None
    paths: list[PathFacts] = field(default_factory=list)
    trainings: list[TrainingFacts] = field(default_factory=list)  # with --gpu
    algorithm: str = ""
    reason: str = ""
    problem: str = ""  # what failed, in words


def verdict(findings: Sequence[Finding]) -> str:
    """The worst level: "ok", "warning" or "wrong"."""
    found = {finding.level for finding in findings}
    return next((level for level in ("wrong", "warning") if level in found), "ok")


def show(report: Report, findings: Sequence[Finding]) -> None:
    """Print the report for people. Its last line says the verdict."""
    by = f"started by {report.launcher}, backend {report.backend}"
    print(f"torchring doctor: {len(report.ranks)} of {report.size} ranks, {by}; took {report.seconds:.1f} s\n")
    marks = {"ok": "ok", "note": "", "warning": "WARNING", "wrong": "WRONG"}
    _table((), [(marks[finding.level], finding.topic, finding.text) for finding in findings])
    paths = []
    for path in report.paths:
        how = "all-reduce" if path.kind == "shared memory" else "each way"
        speed = f"{path.gigabytes_per_second:.3g} GB/s {how} ({path.num_bytes / 2**20:g} MiB)"
        paths.append((f"{path.kind}, {ranks_in_words(path.ranks)}", f"{path.latency_us:.0f} us", speed))
    _table(("path", "1 KiB", "bandwidth"), paths)
    _table(("auto picks", "because"), [(report.algorithm, report.reason)] if report.algorithm else [])
    wrong, warnings = (sum(finding.level == level for finding in findings) for level in ("wrong", "warning"))
    counts = f"{wrong} error{'s' * (wrong != 1)}, {warnings} warning{'s' * (warnings != 1)}"
    print(counts if wrong or warnings else "All is well.", flush=True)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Aligned columns, the last of which is wrapped. Nothing without rows."""
    if not rows:
        return
    lines = [header, *rows] if header else rows
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)][:-1]
    for *cells, last in lines:
        start = "".join(f"{cell:{width}}  " for cell, width in zip(cells, widths, strict=True))
        print(textwrap.fill(last, _WIDTH, initial_indent=start, subsequent_indent=" " * len(start)))
    print()
