"""What the facts mean: pure functions from a `Report` to findings, so that tests can invent the facts."""

from __future__ import annotations

import ipaddress
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations
from typing import Final

from torchring.doctor.facts import usable_cores
from torchring.doctor.report import Finding, RankFacts, Report
from torchring.errors import ranks_in_words
from torchring.memory.handover import why_no_handover

# A rank's own Python and torch, before a model: 0.3 GiB.
_NEEDED_BYTES_PER_RANK: Final = 512 << 20
_MUST_BE_EQUAL: Final = ("torchring", "torch")  # ranks with different versions may not understand each other
_WHOLE_MACHINE: Final = ("0.0.0.0", "::")


def examine(report: Report) -> list[Finding]:
    """All findings, in the order of CHECKS."""
    return [finding for check in CHECKS for finding in check(report)]


def check_presence(report: Report) -> list[Finding]:
    """Every rank has shown up, and no operation failed."""
    here = {rank.rank for rank in report.ranks}
    found = [Finding("wrong", "failed", problem) for problem in report.problems]
    if report.ranks and (missing := [rank for rank in range(report.size) if rank not in here]):
        found.append(
            Finding(
                "wrong",
                "missing",
                f"{ranks_in_words(missing)} of {report.size} did not show up within {report.timeout_seconds:g} s: "
                "never started, stuck in an import, or without a way to the rendezvous; see what the launcher says of "
                f"{'it' if len(missing) == 1 else 'them'}",
            )
        )
    return found


def check_versions(report: Report) -> list[Finding]:
    found = []
    packages = list(dict.fromkeys(name for rank in report.ranks for name in rank.versions))
    for name in packages:
        if len(by := _group(report.ranks, _version_of(name))) > 1:
            differ = ", ".join(f"{version or 'missing'} on {ranks_in_words(ranks)}" for version, ranks in by.items())
            level = "wrong" if name in _MUST_BE_EQUAL else "warning"
            found.append(Finding(level, "versions", f"{name} is {differ}; install the same version everywhere"))
    if len(by := _group(report.ranks, lambda rank: rank.platform)) > 1:
        differ = "; ".join(f"{text} on {ranks_in_words(ranks)}" for text, ranks in by.items())
        text = (
            f"platforms differ ({differ}): such ranks share no memory, and round differently; use one kind of machine"
        )
        found.append(Finding("warning", "platform", text))
    if report.ranks and not found:
        first = report.ranks[0]
        names = [f"{name} {version}" for name, version in first.versions.items() if version]
        everywhere = "; the same on all ranks" if len(report.ranks) > 1 else ""
        found.append(Finding("ok", "versions", f"{', '.join(names)}; {first.platform}{everywhere}"))
    return found


def check_hosts(report: Report) -> list[Finding]:
    texts = [f"{ranks[0].hostname}: {ranks_in_words(r.rank for r in ranks)}" for ranks in machines(report)]
    return [Finding("ok", "hosts", "; ".join(texts))] if texts else []


def check_cores(report: Report) -> list[Finding]:
    """Ranks times threads are no more than the cores of each machine."""
    found = []
    for ranks in machines(report):
        cores, threads = usable_cores(ranks), sum(rank.threads for rank in ranks)
        listed = len({core for rank in ranks for core in rank.cores})
        limit = f" (of {listed}, by the control group's limit)" if cores < listed else ""
        each = _one_or_range(rank.threads for rank in ranks)
        text = f"{ranks[0].hostname}: {_count(cores, 'core')}{limit} for {_count(len(ranks), 'rank')} x {each}"
        if len(ranks) > cores:
            advice = f"start {cores} there, or let them run on more cores (mpirun: --bind-to none)"
            found.append(Finding("warning", "cores", f"{text}: more ranks than cores; {advice}"))
        elif threads > cores:
            advice = f"set OMP_NUM_THREADS={cores // len(ranks)}"
            found.append(Finding("warning", "cores", f"{text}: they will be in each other's way; {advice}"))
        else:
            found.append(Finding("ok", "cores", text))
    return found


def check_memory(report: Report) -> list[Finding]:
    found = []
    for ranks in machines(report):
        available = min(rank.memory_available_bytes for rank in ranks)
        if available == 0:
            continue
        limits = [rank.memory_limit_bytes for rank in ranks if rank.memory_limit_bytes is not None]
        limit = f" (control group's limit: {_gib(min(limits))})" if limits else ""
        text = f"{ranks[0].hostname}: {_gib(available)} available{limit}"
        if available < _NEEDED_BYTES_PER_RANK * len(ranks):
            advice = "start fewer ranks there, or raise the limit"
            found.append(Finding("warning", "memory", f"{text}, which is little for {len(ranks)} ranks; {advice}"))
        else:
            found.append(Finding("ok", "memory", text))
    return found


def check_sharing(report: Report) -> list[Finding]:
    """Ranks of one machine share memory. If not, the finding says why."""
    found = []
    for rank in report.ranks:
        if rank.memfd_error is not None:
            text = f"rank {rank.rank} cannot make shared memory: {rank.memfd_error}; allow memfd_create there"
            found.append(Finding("wrong", "sharing", text))
    group_of = {rank: i for i, group in enumerate(report.hosts) for rank in group}
    facts_of = {rank.rank: rank for rank in report.ranks}
    for ranks in machines(report):
        numbers = [rank.rank for rank in ranks if rank.rank in group_of]
        groups = [[rank for rank in group if rank in numbers] for group in report.hosts]
        groups = [group for group in groups if group]
        if len(groups) > 1:
            reasons = {_why_apart(facts_of[a[0]], facts_of[b[0]]) for a, b in combinations(groups, 2)} - {""}
            unknown = "the hand-over failed, for a reason that does not show in the facts"
            reason = " and ".join(sorted(reasons)) or unknown
            text = f"{' and '.join(map(ranks_in_words, groups))} are on one machine and share no memory: {reason}"
            found.append(Finding("warning", "sharing", f"{text}; they will use the network, which is slower"))
        elif groups and len(numbers) > 1:
            found.append(Finding("ok", "sharing", f"{ranks_in_words(numbers)} share memory"))
    return found


def check_gpus(report: Report) -> list[Finding]:
    found = []
    for ranks in machines(report):
        most = max(ranks, key=lambda rank: len(rank.gpus))
        if not most.gpus:
            continue
        names = ", ".join(f"{count} x {name}" for name, count in Counter(most.gpus).items())
        text = f"{most.hostname}: {names}"
        apart = [f"{i}-{j}" for i, row in enumerate(most.gpu_peers) for j in range(i) if not row[j]]
        if len(most.gpus) > 1:
            text += f"; no peer access between {', '.join(apart)}" if apart else "; all reach each other's memory"
        slow = [f"{i}-{j}" for i, row in enumerate(most.gpu_atomics) for j in range(i) if not row[j]]
        if slow and not apart:
            text += f"; over PCIe, without native atomics, between {', '.join(slow)}"
        if len(ranks) > len(most.gpus):
            text += f"; {len(ranks)} ranks take turns on them"
        found.append(Finding("note", "GPUs", text))
        if why := why_no_handover({rank.rank: rank.handover for rank in ranks if rank.handover}):
            found.append(Finding("warning", "GPUs", f"gradients on GPUs go through NCCL, not directly: {why}"))
    if report.ranks and not found:
        return [Finding("note", "GPUs", "none")]
    if found:
        text = (
            'gradients of a model on a GPU: "auto" is direct (from 4 GPUs on the fastest of direct, nvls and native) '
        )
        text += (
            "where all ranks reach each other's memory, else the backend's own or hierarchical; the table is the CPU's"
        )
        found.append(Finding("note", "GPUs", text))
    return found


def check_backends(report: Report) -> list[Finding]:
    found = []
    several = _has_several_hosts(report)
    without = [rank.rank for rank in report.ranks if not rank.has_gloo]
    if without and several:
        text = f"torch on {ranks_in_words(without)} is built without Gloo, which carries gradients between hosts"
        found.append(Finding("wrong", "backends", f"{text}; install a build that has it"))
    broken = [rank.rank for rank in report.ranks if rank.mpi == ""]
    if broken:
        text = f"mpi4py is installed but does not load on {ranks_in_words(broken)}; "
        text += "`python -c 'from mpi4py import MPI'` there says why"
        found.append(Finding("warning", "backends", text))
    lacking = [rank.rank for rank in report.ranks if rank.mpi is None]
    if report.launcher.startswith("mpi") and lacking:
        text = f"started by {report.launcher}, but {ranks_in_words(lacking)} lack mpi4py, so MPI cannot carry gradients"
        found.append(Finding("warning", "backends", f"{text}; pip install mpi4py, built for that MPI"))
    if len(by := _group([rank for rank in report.ranks if rank.mpi], lambda rank: rank.mpi)) > 1:
        differ = ", ".join(f"{library} on {ranks_in_words(ranks)}" for library, ranks in by.items())
        found.append(Finding("warning", "backends", f"MPI is {differ}; such ranks may not understand each other"))
    if report.ranks and not found:
        first = report.ranks[0]
        engines = {
            "Gloo": first.has_gloo,
            "NCCL": first.has_nccl,
            f"MPI ({first.mpi})" if first.mpi else "MPI": first.mpi,
        }
        have = [name for name, is_there in engines.items() if is_there]
        lack = [name for name, is_there in engines.items() if not is_there]
        text = (", ".join(have) or "none") + (f"; no {', no '.join(lack)}" if lack else "")
        found.append(Finding("ok", "backends", text))
    return found


def check_rendezvous(report: Report) -> list[Finding]:
    """The store has no public address. The store does not authenticate its clients."""
    store = report.store
    if store is None:
        return []
    where = f"{_with_port(store.host, store.port)}, hosted by {store.hosted_by}"
    # The store is on rank 0's machine, as far as ranks can see: torchrun, too, hosts the store on the first node.
    own = next((rank.interfaces for rank in report.ranks if rank.rank == 0), [])
    listens = store.listens_on or list(_WHOLE_MACHINE)  # the default of TCPStore
    reached = [address for _, address in own] if set(listens) & set(_WHOLE_MACHINE) else listens
    reached = [*reached, *store.addresses]
    if public := sorted({address for address in reached if is_public(address)}):
        text = (
            f"{where}, can be reached at {', '.join(public)}, a public address: whoever connects can end or misdirect "
        )
        text += f"the training. Have a firewall close port {store.port} to strangers"
        if set(listens) & set(_WHOLE_MACHINE):
            text += "; another MASTER_ADDR does not help, as the store listens on all interfaces"
        return [Finding("warning", "rendezvous", text)]
    return [Finding("ok", "rendezvous", f"{where}; at no public address")]


def check_gloo_addresses(report: Report) -> list[Finding]:
    """Where several hosts take part, Gloo does not listen at a public address.

    An address that other hosts cannot reach is found when the network is measured: opening the transport says so.
    """
    if report.backend not in ("", "gloo") or report.problems:
        return []
    if len({(rank.machine, rank.network_namespace) for rank in report.ranks}) < 2:
        return []
    addresses = ", ".join(dict.fromkeys(rank.gloo_address for rank in report.ranks))
    if public := [rank.rank for rank in report.ranks if is_public(rank.gloo_address)]:
        text = f"{ranks_in_words(public)} would listen at a public address ({addresses}); set GLOO_SOCKET_IFNAME to an "
        text += "interface of a private network, or have a firewall keep strangers out"
        return [Finding("warning", "Gloo", text)]
    return [Finding("ok", "Gloo", f"listens at {addresses}")]


def check_paths(report: Report) -> list[Finding]:
    """Data arrives unchanged."""
    return [
        Finding(
            "wrong",
            "transfer",
            f"{path.kind} between {ranks_in_words(path.ranks)}: what arrived is not what was sent; do not train on it, "
            "and have the memory and the network of these machines tested",
        )
        for path in report.paths
        if not path.arrived_intact
    ]


CHECKS: Final[tuple[Callable[[Report], list[Finding]], ...]] = (
    check_presence,
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
    grouped: dict[tuple[str, str], list[RankFacts]] = defaultdict(list)
    for rank in report.ranks:
        grouped[rank.machine].append(rank)
    return list(grouped.values())


def is_public(address: str) -> bool:
    """Whether the internet routes to the address."""
    parsed = _parse(address)
    return parsed is not None and parsed.is_global and not parsed.is_multicast


def _parse(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])  # fe80::1%eth0
    except ValueError:
        return None
    mapped = parsed.ipv4_mapped if isinstance(parsed, ipaddress.IPv6Address) else None
    return mapped or parsed


def _has_several_hosts(report: Report) -> bool:
    return len(report.hosts) > 1 or len(machines(report)) > 1


def _why_apart(a: RankFacts, b: RankFacts) -> str:
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


def _version_of(package: str) -> Callable[[RankFacts], str | None]:
    return lambda rank: rank.versions.get(package)


def _group(ranks: Sequence[RankFacts], key: Callable[[RankFacts], str | None]) -> dict[str | None, list[int]]:
    found: dict[str | None, list[int]] = defaultdict(list)
    for rank in ranks:
        found[key(rank)].append(rank.rank)
    return dict(found)


def _one_or_range(numbers: Iterable[int]) -> str:
    """[1, 1] -> "1 thread"; [1, 4] -> "1 to 4 threads"."""
    ordered = sorted(numbers)
    first, last = ordered[0], ordered[-1]
    return _count(first, "thread") if first == last else f"{first} to {last} threads"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.1f} GiB"


def _with_port(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
