"""What the facts mean: pure functions from a `Report` to findings, so that tests can invent the facts."""

from __future__ import annotations

import ipaddress
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import combinations
from typing import Final

from torchring import placement
from torchring.devices.handover import why_no_handover
from torchring.doctor.facts import usable_cores
from torchring.doctor.report import Finding, RankFacts, Report
from torchring.errors import ranks_in_words

# A rank's own Python and torch, before a model: 0.3 GiB.
_NEEDED_BYTES_PER_RANK: Final = 512 << 20
_MUST_BE_EQUAL: Final = ("torchring", "torch")  # ranks with different versions may not understand each other
_BUSY: Final = 1.2  # load of a core; the doctor's own ranks run for less than a minute


def examine(report: Report) -> list[Finding]:
    """All findings, in the order of CHECKS."""
    return [finding for check in CHECKS for finding in check(report)]


def check_problem(report: Report) -> Iterator[Finding]:
    """All ranks have met, and no operation failed."""
    if report.problem:
        yield Finding("wrong", "failed", report.problem)


def check_versions(report: Report) -> Iterator[Finding]:
    differs = False
    for name in dict.fromkeys(name for rank in report.ranks for name in rank.versions):
        if len(by := _group((rank.versions.get(name), rank.rank) for rank in report.ranks)) > 1:
            differs = True
            versions = ", ".join(f"{version or 'missing'} on {ranks_in_words(ranks)}" for version, ranks in by.items())
            level = "wrong" if name in _MUST_BE_EQUAL else "warning"
            yield Finding(level, "versions", f"{name} is {versions}; install the same version everywhere")
    if len(by := _group((rank.platform, rank.rank) for rank in report.ranks)) > 1:
        differs = True
        platforms = "; ".join(f"{text} on {ranks_in_words(ranks)}" for text, ranks in by.items())
        yield Finding(
            "warning",
            "platform",
            f"platforms differ ({platforms}): such ranks share no memory, and round differently; use one kind of "
            "machine",
        )
    if report.ranks and not differs:
        first = report.ranks[0]
        names = [f"{name} {version}" for name, version in first.versions.items() if version]
        everywhere = "; the same on all ranks" if len(report.ranks) > 1 else ""
        yield Finding("ok", "versions", f"{', '.join(names)}; {first.platform}{everywhere}")


def check_hosts(report: Report) -> Iterator[Finding]:
    texts = [f"{ranks[0].hostname}: {ranks_in_words(r.rank for r in ranks)}" for ranks in machines(report)]
    if texts:
        yield Finding("ok", "hosts", "; ".join(texts))


def check_cores(report: Report) -> Iterator[Finding]:
    """Ranks times threads are no more than the cores of each machine."""
    for ranks in machines(report):
        cores, threads = usable_cores(ranks), [rank.threads for rank in ranks]
        listed = len({core for rank in ranks for core in rank.cores})
        limit = f" (of {listed}, by the control group's limit)" if cores < listed else ""
        least, most = min(threads), max(threads)
        each = _count(least, "thread") if least == most else f"{least} to {most} threads"
        text = f"{ranks[0].hostname}: {_count(cores, 'core')}{limit} for {_count(len(ranks), 'rank')} x {each}"
        if len(ranks) > cores:
            advice = f"start {cores} there, or let them run on more cores (mpirun: --bind-to none)"
            yield Finding("warning", "cores", f"{text}: more ranks than cores; {advice}")
        elif sum(threads) > cores:
            advice = f"set OMP_NUM_THREADS={cores // len(ranks)}"
            yield Finding("warning", "cores", f"{text}: they will be in each other's way; {advice}")
        elif advice := placement.advice(len(ranks), most, cores, cores // ranks[0].threads_per_core, cores):
            yield Finding("warning", "cores", f"{text}: {advice}")
        else:
            yield Finding("ok", "cores", text)
        if topology := ranks[0].topology:
            if any(rank.topology != topology for rank in ranks):
                topology = f"{topology.partition(';')[0]}; each rank has cores of its own"
            yield Finding("ok", "topology", f"{ranks[0].hostname}: {topology}")
        if (load := min(rank.load for rank in ranks)) > _BUSY:
            text = f"{ranks[0].hostname}: other programs hold the cores, with a load of {load:.1f} a core"
            yield Finding("warning", "load", f"{text} in the last minute; ranks, and measurements, are slower for that")


def check_memory(report: Report) -> Iterator[Finding]:
    for ranks in machines(report):
        available = min(rank.memory_available_bytes for rank in ranks)
        if available == 0:
            continue
        limits = [rank.memory_limit_bytes for rank in ranks if rank.memory_limit_bytes is not None]
        limit = f" (control group's limit: {min(limits) / 2**30:.1f} GiB)" if limits else ""
        text = f"{ranks[0].hostname}: {available / 2**30:.1f} GiB available{limit}"
        if available < _NEEDED_BYTES_PER_RANK * len(ranks):
            advice = "start fewer ranks there, or raise the limit"
            yield Finding("warning", "memory", f"{text}, which is little for {len(ranks)} ranks; {advice}")
        else:
            yield Finding("ok", "memory", text)


def check_sharing(report: Report) -> Iterator[Finding]:
    """Ranks of one machine share memory. If not, the finding says why."""
    for rank in report.ranks:
        if rank.memfd_error is not None:
            text = f"rank {rank.rank} cannot make shared memory: {rank.memfd_error}; allow memfd_create there"
            yield Finding("wrong", "sharing", text)
    facts_of = {rank.rank: rank for rank in report.ranks}
    for ranks in machines(report):
        numbers = {rank.rank for rank in ranks}
        groups = [here for group in report.hosts if (here := [rank for rank in group if rank in numbers])]
        if len(groups) > 1:
            reasons = {_why_separate(facts_of[a[0]], facts_of[b[0]]) for a, b in combinations(groups, 2)} - {""}
            unknown = "the hand-over failed, for a reason that does not show in the facts"
            reason = " and ".join(sorted(reasons)) or unknown
            text = f"{' and '.join(map(ranks_in_words, groups))} are on one machine and share no memory: {reason}"
            yield Finding("warning", "sharing", f"{text}; they will use the network, which is slower")
        elif groups and len(groups[0]) > 1:
            yield Finding("ok", "sharing", f"{ranks_in_words(groups[0])} share memory")


def check_gpus(report: Report) -> Iterator[Finding]:
    has_gpus = False
    for ranks in machines(report):
        most = max(ranks, key=lambda rank: len(rank.gpus))
        if not most.gpus:
            continue
        has_gpus = True
        names = ", ".join(f"{count} x {name}" for name, count in Counter(most.gpus).items())
        text = f"{most.hostname}: {names}"
        out_of_reach = _pairs_without(most.gpu_peers)
        if len(most.gpus) > 1:
            text += f"; no peer access between {out_of_reach}" if out_of_reach else "; all reach each other's memory"
        if len(ranks) > len(most.gpus):
            text += f"; {len(ranks)} ranks take turns on them"
        yield Finding("note", "GPUs", text)
        if why := why_no_handover({rank.rank: rank.handover for rank in ranks if rank.handover}):
            yield Finding("warning", "GPUs", f"gradients on GPUs go through NCCL, not directly: {why}")
        if lacks := next((rank.triton_lacks for rank in ranks if rank.triton_lacks), []):
            text = f"{most.hostname} lacks {' and '.join(lacks)}: Triton cannot compile torchring's kernels there"
            yield Finding("warning", "GPUs", f"{text}; install gcc and python3-dev, or take a -devel image")
    if has_gpus:
        yield Finding(
            "note",
            "GPUs",
            'gradients of a model on a GPU: "auto" is direct (from 4 GPUs on the faster of direct and native) '
            "where all ranks reach each other's memory, else the backend's own or hierarchical; the table is the CPU's",
        )
    elif report.ranks:
        yield Finding("note", "GPUs", "none")


def check_backends(report: Report) -> Iterator[Finding]:
    is_ok = True
    without = [rank.rank for rank in report.ranks if not rank.has_gloo]
    if without and (len(report.hosts) > 1 or len(machines(report)) > 1):
        is_ok = False
        text = f"torch on {ranks_in_words(without)} is built without Gloo, which carries gradients between hosts"
        yield Finding("wrong", "backends", f"{text}; install a build that has it")
    lacking = [rank.rank for rank in report.ranks if not rank.versions.get("mpi4py")]
    if report.launcher.startswith("mpi") and lacking:
        is_ok = False
        text = f"started by {report.launcher}, but {ranks_in_words(lacking)} lack mpi4py, so MPI cannot carry gradients"
        yield Finding("warning", "backends", f"{text}; pip install mpi4py, built for that MPI")
    if report.ranks and is_ok:
        first = report.ranks[0]
        engines = {"Gloo": first.has_gloo, "NCCL": first.has_nccl, "MPI": first.versions.get("mpi4py")}
        have = ", ".join(name for name, is_there in engines.items() if is_there) or "none"
        lack = ", ".join(f"no {name}" for name, is_there in engines.items() if not is_there)
        yield Finding("ok", "backends", "; ".join(filter(None, [have, lack])))


def check_rendezvous(report: Report) -> Iterator[Finding]:
    """The store has no public address. The store does not authenticate its clients."""
    store = report.store
    if store is None:
        return
    host = f"[{store.host}]" if ":" in store.host else store.host
    where = f"{host}:{store.port}, hosted by {store.hosted_by}"
    if public := sorted(set(filter(is_public, store.addresses))):
        yield Finding(
            "warning",
            "rendezvous",
            f"{where}, can be reached at {', '.join(public)}, a public address: whoever connects can end or misdirect "
            f"the training. Have a firewall close port {store.port} to strangers",
        )
    else:
        yield Finding("ok", "rendezvous", f"{where}; at no public address")


def check_gloo_addresses(report: Report) -> Iterator[Finding]:
    """Where several hosts take part, Gloo does not listen at a public address.

    An address that other hosts cannot reach is found when the network is measured: opening the transport says so.
    """
    if report.backend not in ("", "gloo") or report.problem:
        return
    if len({(rank.machine, rank.network_namespace) for rank in report.ranks}) < 2:
        return
    addresses = ", ".join(dict.fromkeys(rank.gloo_address for rank in report.ranks))
    if public := [rank.rank for rank in report.ranks if is_public(rank.gloo_address)]:
        yield Finding(
            "warning",
            "Gloo",
            f"{ranks_in_words(public)} would listen at a public address ({addresses}); set GLOO_SOCKET_IFNAME to an "
            "interface of a private network, or have a firewall keep strangers out",
        )
    else:
        yield Finding("ok", "Gloo", f"listens at {addresses}")


def check_paths(report: Report) -> Iterator[Finding]:
    """Data arrives unchanged."""
    for path in report.paths:
        if not path.arrived_intact:
            yield Finding(
                "wrong",
                "transfer",
                f"{path.kind} between {ranks_in_words(path.ranks)}: what arrived is not what was sent; do not train "
                "on it, and have the memory and the network of these machines tested",
            )


CHECKS: Final[tuple[Callable[[Report], Iterator[Finding]], ...]] = (
    check_problem,
    check_versions,
    check_hosts,
    check_cores,
    check_memory,
    check_sharing,
    check_gpus,
    check_backends,
    check_rendezvous,
    check_gloo_addresses,
    check_paths,
)


def machines(report: Report) -> list[list[RankFacts]]:
    """Ranks grouped by machine, in order of each group's first rank; containers of one machine are together."""
    grouped: dict[str, list[RankFacts]] = defaultdict(list)
    for rank in report.ranks:
        grouped[rank.machine].append(rank)
    return list(grouped.values())


def is_public(address: str) -> bool:
    """Whether the internet routes to the address."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])  # fe80::1%eth0
    except ValueError:
        return False
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    parsed = mapped or parsed
    return parsed.is_global and not parsed.is_multicast


def _why_separate(a: RankFacts, b: RankFacts) -> str:
    """Why two ranks of one machine do not share memory."""
    reasons = []
    if a.uid != b.uid:
        reasons.append(f"they run as different users ({a.uid} and {b.uid})")
    if a.network_namespace != b.network_namespace:
        reasons.append(
            "they are in different network namespaces, as containers are (give these one network, such as the host's)"
        )
    if a.platform != b.platform:
        reasons.append(f"their C libraries differ ({a.platform}; {b.platform})")
    return " and ".join(reasons)


def _group(pairs: Iterable[tuple[str | None, int]]) -> dict[str | None, list[int]]:
    """The ranks that have each value, from (value, rank)."""
    found: dict[str | None, list[int]] = defaultdict(list)
    for value, rank in pairs:
        found[value].append(rank)
    return found


def _pairs_without(matrix: Sequence[Sequence[bool]]) -> str:
    """The pairs of GPUs for which a fact is false: "1-0, 2-0"."""
    return ", ".join(f"{i}-{j}" for i, row in enumerate(matrix) for j in range(i) if not row[j])


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
