"""What the facts mean: pure functions from a `Report` to findings, so that tests can invent the facts."""

import functools
import ipaddress
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from torchring import placement
from torchring.devices.handover import why_no_handover
from torchring.doctor.report import Finding, RankFacts, Report
from torchring.errors import ranks_in_words

_MUST_BE_EQUAL: Final = ("torchring", "torch")  # ranks with different versions may not understand each other
_BUSY: Final = 1.2  # load of a core; the doctor's own ranks run for less than a minute
_MOST_DIFFERENCE: Final = 1e-3  # of weights, by rounding in 20 steps
_Said = Iterator[tuple[str, str]]  # level and text


def examine(report: Report) -> list[Finding]:
    """All findings, in the order of `CHECKS`. What is bad ends with the advice."""
    found = []
    for topic, check, advice in CHECKS:
        for level, text in check(report):
            is_bad = level in ("warning", "wrong")
            found.append(Finding(level, topic, f"{text}; {advice}" if advice and is_bad else text))
    return found


def _problem(report: Report) -> _Said:
    if report.problem:
        yield "wrong", report.problem


def _versions(report: Report) -> _Said:
    said = []
    for name in dict.fromkeys(name for rank in report.ranks for name in rank.versions):
        if by := _differs(report, lambda rank, name=name: rank.versions.get(name) or "missing"):  # type: ignore[misc]
            yield "wrong" if name in _MUST_BE_EQUAL else "warning", f"{name} is {by}"
        elif version := report.ranks[0].versions[name]:
            said.append(f"{name} {version}")
    if said:
        yield "ok", ", ".join(said) + ("; the same on all ranks" if len(report.ranks) > 1 else "")


def _private_names(report: Report) -> _Said:
    if lacks := next((rank.torch_lacks for rank in report.ranks if rank.torch_lacks), []):
        yield "warning", f"does not work with this release, for lack of private names: {', '.join(lacks)}"


def _platforms(report: Report) -> _Said:
    if by := _differs(report, lambda rank: rank.platform):
        yield "warning", f"platforms differ ({by}): such ranks share no memory, and round differently"
    elif report.ranks:
        yield "ok", report.ranks[0].platform


def _hosts(report: Report) -> _Said:
    if report.ranks:
        said = [f"{ranks[0].hostname}: {ranks_in_words(rank.rank for rank in ranks)}" for ranks in machines(report)]
        yield "ok", "; ".join(said)


def _each_machine(check: Callable[[list[RankFacts]], _Said]) -> Callable[[Report], _Said]:
    """A check of the ranks of one machine, as one of all machines."""

    @functools.wraps(check)
    def of_report(report: Report) -> _Said:
        for ranks in machines(report):
            for level, text in check(ranks):
                yield level, f"{ranks[0].hostname}: {text}"

    return of_report


@_each_machine
def _cores(ranks: list[RankFacts]) -> _Said:
    """Ranks times threads are no more than the cores."""
    listed = len({core for rank in ranks for core in rank.cores})
    limits = [rank.core_limit for rank in ranks if rank.core_limit is not None]
    cores = min([listed, *(max(1, math.ceil(limit)) for limit in limits)])
    threads = [rank.threads for rank in ranks]
    least, most = min(threads), max(threads)
    limit = f" (of {listed}, by the control group's limit)" if cores < listed else ""
    each = placement.count(least, "thread") if least == most else f"{least} to {most} threads"
    text = f"{placement.count(cores, 'core')}{limit} for {placement.count(len(ranks), 'rank')} x {each}"
    if len(ranks) > cores:
        advice = f"more ranks than cores; start {cores} there, or let them run on more cores (mpirun: --bind-to none)"
    elif sum(threads) > cores:
        advice = f"they will be in each other's way; set OMP_NUM_THREADS={cores // len(ranks)}"
    else:
        advice = placement.advice(len(ranks), most, cores, cores // ranks[0].threads_per_core, cores)
    yield ("warning", f"{text}: {advice}") if advice else ("ok", text)


@_each_machine
def _load(ranks: list[RankFacts]) -> _Said:
    if (load := min(rank.load for rank in ranks)) > _BUSY:
        yield "warning", f"other programs hold the cores, with a load of {load:.1f} a core in the last minute"


def _sharing(report: Report) -> _Said:
    """Ranks of one machine share memory. If not, the finding says why."""
    for ranks in machines(report):
        numbers = {rank.rank for rank in ranks}
        groups = [here for group in report.hosts if (here := [rank for rank in group if rank in numbers])]
        if len(groups) > 1:
            facts = (
                ("they run as different users ({})", {str(rank.uid) for rank in ranks}),
                (
                    "they are in different network namespaces, as containers are (give these one network, such as the "
                    "host's)",
                    {rank.network_namespace for rank in ranks},
                ),
                ("their C libraries differ ({})", {rank.platform for rank in ranks}),
            )
            reasons = [text.format(" and ".join(sorted(found))) for text, found in facts if len(found) > 1]
            why = " and ".join(reasons) or "the hand-over failed, for a reason that does not show in the facts"
            who = " and ".join(map(ranks_in_words, groups))
            yield "warning", f"{who} are on one machine and share no memory: {why}"
        elif groups and len(groups[0]) > 1:
            yield "ok", f"{ranks_in_words(groups[0])} share memory"


@_each_machine
def _gpus(ranks: list[RankFacts]) -> _Said:
    most = max(ranks, key=lambda rank: len(rank.gpus))
    if not most.gpus:
        yield "note", "none"
        return
    text = ", ".join(f"{count} x {name}" for name, count in Counter(most.gpus).items())
    if len(most.gpus) > 1:
        apart = [f"{i}-{j}" for i, row in enumerate(most.gpu_peers) for j in range(i) if not row[j]]
        text += f"; no peer access between {', '.join(apart)}" if apart else "; all reach each other's memory"
    if len(ranks) > len(most.gpus):
        text += f"; {len(ranks)} ranks take turns on them"
    yield "note", f"{text}; what auto picks below is for models on the CPU"
    if why := why_no_handover({rank.rank: rank.handover for rank in ranks if rank.handover}):
        yield "warning", f"gradients on GPUs go through NCCL, not directly: {why}"
    if lacks := next((rank.triton_lacks for rank in ranks if rank.triton_lacks), []):
        text = f"no {' and no '.join(lacks)}: Triton cannot compile torchring's kernels there"
        yield "warning", f"{text}; install gcc and python3-dev, or take a -devel image"


def _trainings(report: Report) -> _Said:
    for each in report.trainings:
        how = each.asked if each.asked == each.taken else f"{each.asked} ({each.taken})"
        is_right = each.difference <= _MOST_DIFFERENCE
        text = "as one process does" if is_right else f"and weights are {each.difference:.1g} off those of one process"
        yield "ok" if is_right else "wrong", f"{how} trains {text}, {each.step_ms:.1f} ms a step"


def _backends(report: Report) -> _Said:
    without = [rank.rank for rank in report.ranks if not rank.has_gloo]
    lacking = [rank.rank for rank in report.ranks if not rank.versions.get("mpi4py")]
    if without and (len(report.hosts) > 1 or len(machines(report)) > 1):
        text = f"torch on {ranks_in_words(without)} is built without Gloo, which carries gradients between hosts"
        yield "wrong", f"{text}; install a build that has it"
    elif lacking and report.launcher.startswith("mpi"):
        text = f"started by {report.launcher}, but {ranks_in_words(lacking)} lack mpi4py, so MPI cannot carry gradients"
        yield "warning", f"{text}; pip install mpi4py, built for that MPI"
    elif report.ranks:
        first = report.ranks[0]
        engines = {"Gloo": first.has_gloo, "NCCL": first.has_nccl, "MPI": first.versions.get("mpi4py")}
        have = ", ".join(name for name, is_there in engines.items() if is_there) or "none"
        lack = ", ".join(f"no {name}" for name, is_there in engines.items() if not is_there)
        yield "ok", "; ".join(filter(None, [have, lack]))


def _rendezvous(report: Report) -> _Said:
    """The store has no public address. The store does not authenticate its clients."""
    if (store := report.store) is None:
        return
    host = f"[{store.host}]" if ":" in store.host else store.host
    where = f"{host}:{store.port}, hosted by {store.hosted_by}"
    if public := sorted(set(filter(is_public, store.addresses))):
        yield (
            "warning",
            f"{where}, can be reached at {', '.join(public)}, a public address: whoever connects can end or misdirect "
            f"the training. Have a firewall close port {store.port} to strangers",
        )
    else:
        yield "ok", f"{where}; at no public address"


def _gloo(report: Report) -> _Said:
    """Where several hosts take part, Gloo does not listen at a public address.

    An address that other hosts cannot reach is found when the network is measured: opening the transport says so.
    """
    places = {(rank.machine, rank.network_namespace) for rank in report.ranks}
    if report.backend not in ("", "gloo") or report.problem or len(places) < 2:
        return
    addresses = ", ".join(dict.fromkeys(rank.gloo_address for rank in report.ranks))
    if public := [rank.rank for rank in report.ranks if is_public(rank.gloo_address)]:
        yield "warning", f"{ranks_in_words(public)} would listen at a public address ({addresses})"
    else:
        yield "ok", f"listens at {addresses}"


# Topic, check, and what to do about what is bad, if that is always the same.
CHECKS: Final[tuple[tuple[str, Callable[[Report], _Said], str], ...]] = (
    ("failed", _problem, ""),
    ("versions", _versions, "install the same version everywhere"),
    ("PyTorch", _private_names, "docs/guides/gpu.md says under Versions which release has what"),
    ("platform", _platforms, "use one kind of machine"),
    ("hosts", _hosts, ""),
    ("cores", _cores, ""),
    ("load", _load, "ranks, and measurements, are slower for that"),
    ("sharing", _sharing, "they will use the network, which is slower"),
    ("GPUs", _gpus, ""),
    ("training", _trainings, "gradients are wrong: open an issue with this report"),
    ("backends", _backends, ""),
    ("rendezvous", _rendezvous, ""),
    (
        "Gloo",
        _gloo,
        "set GLOO_SOCKET_IFNAME to an interface of a private network, or have a firewall keep strangers out",
    ),
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
    parsed = getattr(parsed, "ipv4_mapped", None) or parsed
    return parsed.is_global and not parsed.is_multicast


def _differs(report: Report, fact: Callable[[RankFacts], str]) -> str:
    """ "2.13.0 on rank 0, 2.12.0 on rank 1". "" if the fact is the same on all ranks."""
    found: dict[str, list[int]] = defaultdict(list)
    for rank in report.ranks:
        found[fact(rank)].append(rank.rank)
    said: Sequence[str] = [f"{value} on {ranks_in_words(ranks)}" for value, ranks in found.items()]
    return ", ".join(said) if len(said) > 1 else ""
