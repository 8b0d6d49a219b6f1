"""Where ranks run: binds a rank to cores, sets its OMP_NUM_THREADS, and becomes the rank's program.

    python placement.py MODE COMMAND...

MODE is "core", "numa", "none" or "auto", as in `torchring run --bind`. The launcher starts this file, which needs
nothing but Python, in the place of each rank. So the rank's memory, wire buffers too, comes from its own NUMA node.
Ranks of a host decide alike, because each reads the same facts: the cores that the job may use, and the topology in
/sys.

    2 nodes of 4 physical cores      core                       numa
    2 ranks                          0-3, 4-7                   0-3, 4-7
    3 ranks                          0-1, 2-3, 4-7              0-3, 0-3, 4-7
    1 rank                           0-7                        0-3
"""

import functools
import os
import sys
from collections.abc import Iterable
from pathlib import Path

MODES = ("core", "numa", "none")  # and "auto"
PLACE = "TORCHRING_PLACE"  # where the rank runs and why, a sentence
WORKER_CORES = "TORCHRING_WORKER_CORES"  # for the processes that load the rank's data

_said: set[str] = set()


Core = tuple[int, ...]
"""The logical cores of one physical core."""

Topology = list[list[Core]]
"""The physical cores of each NUMA node that has any."""


def topology_of(allowed: set[int], root: Path = Path("/sys")) -> Topology:
    """The physical cores among the `allowed` logical ones. OSError or ValueError where Linux does not say."""
    cores = {}
    for cpu in allowed:
        folder = root / f"devices/system/cpu/cpu{cpu}/topology"
        file = folder / "core_cpus_list"
        siblings = numbers_in((file if file.exists() else folder / "thread_siblings_list").read_text())
        cores[cpu] = tuple(sorted(allowed & siblings | {cpu}))
    nodes = sorted(
        (root / "devices/system/node").glob("node[0-9]*/cpulist"), key=lambda path: int(path.parent.name[4:])
    )
    sets = [numbers_in(node.read_text()) & allowed for node in nodes]
    sets.append(allowed.difference(*sets))  # of no node, as on hosts without NUMA
    return [sorted({cores[cpu] for cpu in each}) for each in sets if each]


def num_physical(allowed: set[int], root: Path = Path("/sys")) -> int:
    """The number of physical cores among the `allowed` logical ones; of the latter, where Linux does not say."""
    try:
        return sum(map(len, topology_of(allowed, root)))
    except (OSError, ValueError):
        return len(allowed)


def share_of(topology: Topology, mode: str, index: int, size: int) -> list[Core]:
    """The physical cores of rank `index` of `size`. With "core", there are at least as many cores as ranks."""
    if mode == "core" and size < len(topology):
        begin, end = (number * len(topology) // size for number in (index, index + 1))
        return [core for node in topology[begin:end] for core in node]
    counts = [0] * len(topology)
    for _ in range(size):  # to the node that has most for one more rank, and the fewest ranks if several have
        fullest = max(range(len(topology)), key=lambda i: (len(topology[i]) / (counts[i] + 1), -counts[i]))
        counts[fullest] += 1
    node = 0
    while index >= counts[node]:
        index, node = index - counts[node], node + 1
    cores, count = topology[node], counts[node]
    if mode == "numa":
        return cores
    return cores[index * len(cores) // count : (index + 1) * len(cores) // count]


def bind(mode: str, index: int, size: int, allowed: set[int], root: Path = Path("/sys")) -> tuple[list[Core], int, str]:
    """What rank `index` of the `size` ranks of its host gets: (physical cores, threads, a sentence that says why).

    Without cores the rank is not bound. Raises ValueError if "core" was asked for, and there are too few.
    """
    equal = max(1, len(allowed) // size)
    if mode == "none":
        return [], equal, "ranks are not bound to cores, as --bind none asks"
    try:
        topology = topology_of(allowed, root)
    except (OSError, ValueError):
        if mode != "auto":
            raise ValueError(f"Linux does not say which cores there are in {root}/devices/system/cpu") from None
        return [], equal, "ranks are not bound to cores, as Linux does not say which there are"
    number = sum(map(len, topology))
    if mode != "numa" and number < size:
        few = f"{size} ranks have {count(number, 'physical core')}"
        if mode == "core":
            raise ValueError(
                f"--bind core needs a physical core for each rank, and {few}; use fewer ranks or --bind none"
            )
        return [], equal, f"ranks are not bound to cores, as {few}"
    cores = share_of(topology, "core" if mode == "auto" else mode, index, size)
    sharing = sum(share_of(topology, mode, other, size) == cores for other in range(size)) if mode == "numa" else 1
    nodes = [str(i) for i, node in enumerate(topology) if set(node) & set(cores)]
    where = f"NUMA node {nodes[0]}" if len(nodes) == 1 else f"NUMA nodes {', '.join(nodes)}"
    logical = in_words(cpu for core in cores for cpu in core)
    return cores, max(1, len(cores) // sharing), f"bound to cores {logical} of {where}"


def advice(num_ranks: int, threads: int, num_cores: int, num_physical_cores: int, num_online: int) -> str:
    """What to change about where the ranks of a host run; "" if that is fine.

    The cores are those that the ranks may use together, and `num_online` those of the host. Both count hardware
    threads, as `num_physical_cores` does not.
    """
    ranks = "the rank of this host" if num_ranks == 1 else f"the {num_ranks} ranks of this host"
    if num_ranks > num_cores < num_online:
        few = count(num_cores, "core")
        return f"{ranks} share {few} of {num_online}; let them run on more of them (mpirun: --bind-to none)"
    if threads == 1 and num_physical_cores >= 2 * num_ranks:
        compute = "computes with one thread" if num_ranks == 1 else "compute with one thread each"
        more = f"set OMP_NUM_THREADS={num_physical_cores // num_ranks}"
        more += " (torchrun sets it to 1), or start them by `torchring run`"
        return f"{ranks} {compute} and may use {num_physical_cores} cores; {more}"
    return ""


def look_at_cores(numbers: tuple[int, int, int, int], *, speaks: bool) -> None:
    """Say once what keeps the ranks of this host from its cores. Keep workers of data loaders off those of a rank.

    `numbers` are the arguments of `advice`, but for the last.
    """
    text = advice(*numbers, os.cpu_count() or 1)
    if text and speaks and text not in _said:
        import logging  # takes as long as to start a rank

        _said.add(text)
        logging.getLogger("torchring").warning("%s", text)
    if (left := os.environ.get(WORKER_CORES)) and left not in _said:
        _said.add(left)
        os.register_at_fork(after_in_child=functools.partial(os.sched_setaffinity, 0, numbers_in(left)))


def in_words(numbers: Iterable[int]) -> str:
    """0, 1, 2, 5 -> "0-2,5"."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def numbers_in(text: str) -> set[int]:
    """ "0-2,5" -> 0, 1, 2, 5, as Linux writes it."""
    ranges = [part.partition("-") for part in text.strip().split(",") if part]
    return {number for first, _, last in ranges for number in range(int(first), int(last or first) + 1)}


def count(number: int, noun: str) -> str:
    """ "1 rank", "2 ranks"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def main(arguments: list[str]) -> int:
    """Does not return unless the rank cannot be bound."""
    mode, command, environ = arguments[0], arguments[1:], os.environ
    mpi = "OMPI_COMM_WORLD_LOCAL_RANK" in environ
    names = ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE") if mpi else ("LOCAL_RANK", "LOCAL_WORLD_SIZE")
    index, size = (int(environ[name]) for name in names)
    try:
        cores, threads, sentence = bind(mode, index, size, os.sched_getaffinity(0))
    except ValueError as error:
        if index == 0:
            print(f"torchring run: {error}", file=sys.stderr)
        return 2
    if cores:
        os.sched_setaffinity(0, {cpu for core in cores for cpu in core})
    threads = int(environ.get("OMP_NUM_THREADS") or threads)
    environ["OMP_NUM_THREADS"] = str(threads)
    environ[PLACE] = sentence
    if mode != "numa" and (left := cores[threads:]):
        environ[WORKER_CORES] = in_words(cpu for core in left for cpu in core)
    if not mpi and environ.get("RANK") != "0":  # if all ranks read the standard input, each would get a part of it
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.execvp(command[0], command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
