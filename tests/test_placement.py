"""Where ranks run: topologies of machines that tests invent, and what ranks get of them."""

import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from unittest import mock

import pytest

from torchring import placement
from torchring.placement import advice, bind, in_words, numbers_in, topology_of


def machine(
    root: Path, nodes: Sequence[Sequence[Sequence[int]]], *, offline: Sequence[int] = (), file: str = "core_cpus_list"
) -> set[int]:
    """Write what Linux says of a machine: the logical cores of each physical core of each node, a socket each."""
    cpus = root / "devices/system/cpu"
    for number, node in enumerate(nodes):
        folder = root / f"devices/system/node/node{number}"
        folder.mkdir(parents=True)
        here = [cpu for core in node for cpu in core if cpu not in offline]
        (folder / "cpulist").write_text(in_words(here) + "\n")
        for core in node:
            for cpu in set(core) - {*offline}:
                topology = cpus / f"cpu{cpu}/topology"
                topology.mkdir(parents=True)
                (topology / file).write_text(in_words(set(core) - {*offline}) + "\n")
                (topology / "physical_package_id").write_text(f"{number}\n")
    online = {cpu for node in nodes for core in node for cpu in core} - {*offline}
    (cpus / "online").write_text(in_words(online) + "\n")
    return online


# Two sockets of four cores with two hardware threads each, numbered as Linux does, and memory without cores.
TWO_SOCKETS = ([(i, i + 8) for i in range(4)], [(i, i + 8) for i in range(4, 8)], [])


def shares(root: Path, mode: str, size: int, allowed: set[int]) -> list[str]:
    return [in_words(cpu for core in bind(mode, i, size, allowed, root)[0] for cpu in core) for i in range(size)]


def test_each_rank_gets_cores_of_its_own_or_a_node(tmp_path: Path) -> None:
    allowed = machine(tmp_path, TWO_SOCKETS)
    for mode, size, expected, threads in (
        ("core", 1, ["0-15"], 8),
        ("auto", 2, ["0-3,8-11", "4-7,12-15"], 4),
        ("core", 3, ["0-1,8-9", "2-3,10-11", "4-7,12-15"], 2),
        ("core", 8, [f"{i},{i + 8}" for i in range(8)], 1),
        ("auto", 9, [""] * 9, 1),
        ("numa", 1, ["0-3,8-11"], 4),
        ("numa", 3, ["0-3,8-11", "0-3,8-11", "4-7,12-15"], 2),
        ("numa", 10, [*["0-3,8-11"] * 5, *["4-7,12-15"] * 5], 1),
        ("none", 3, [""] * 3, 5),
    ):
        assert shares(tmp_path, mode, size, allowed) == expected
        assert bind(mode, 0, size, allowed, tmp_path)[1] == threads


def test_a_job_shares_out_what_it_may_use(tmp_path: Path) -> None:
    """Slurm, a control group or taskset has left it these. One core is half its own, another is offline."""
    online = machine(tmp_path, TWO_SOCKETS, offline=[3])
    assert shares(tmp_path, "core", 2, {1, 2, 10, 5}) == ["1-2,10", "5"]
    assert shares(tmp_path, "core", 4, online) == ["0-1,8-9", "2,10-11", "4-5,12-13", "6-7,14-15"]
    with pytest.raises(ValueError, match="2 ranks have 1 physical core; use fewer ranks or --bind none"):
        bind("core", 0, 2, {1, 9}, tmp_path)
    assert bind("auto", 0, 2, {1, 9}, tmp_path)[::2] == (
        [],
        "ranks are not bound to cores, as 2 ranks have 1 physical core",
    )


def test_why_a_rank_runs_where_it_runs(tmp_path: Path) -> None:
    allowed = machine(tmp_path, TWO_SOCKETS, file="thread_siblings_list")  # of older kernels
    assert bind("auto", 1, 2, allowed, tmp_path)[2] == "bound to cores 4-7,12-15 of NUMA node 1"
    assert bind("core", 0, 1, allowed, tmp_path)[2] == "bound to cores 0-15 of NUMA nodes 0, 1"
    assert bind("none", 0, 2, allowed, tmp_path) == ([], 8, "ranks are not bound to cores, as --bind none asks")
    nothing = tmp_path / "nothing"
    assert bind("auto", 0, 2, allowed, nothing)[2].endswith("as Linux does not say which there are")
    with pytest.raises(ValueError, match="does not say which cores there are"):
        bind("numa", 0, 2, allowed, nothing)
    assert placement.num_physical({0, 8, 3, 12}, tmp_path) == 3
    assert placement.num_physical({0, 8, 3, 12}, nothing) == 4


def test_without_numa_there_is_one_node(tmp_path: Path) -> None:
    allowed = machine(tmp_path, ([(0,), (1,)],))
    (tmp_path / "devices/system/node/node0/cpulist").unlink()
    assert topology_of(allowed, tmp_path) == [[(0,), (1,)]]
    assert in_words({5, 2, 0, 1}) == "0-2,5"
    assert [numbers_in("0-2,5\n"), numbers_in("\n")] == [{0, 1, 2, 5}, set()]


def test_advice() -> None:
    for ranks, threads, cores, physical, online, expected in (
        (2, 1, 16, 8, 16, "set OMP_NUM_THREADS=4"),
        (1, 1, 2, 2, 64, "the rank of this host computes with one thread and may use 2 cores; set OMP_NUM_THREADS=2"),
        (2, 1, 6, 3, 6, ""),
        (6, 1, 8, 4, 8, ""),
        (2, 4, 8, 8, 8, ""),
        (2, 1, 1, 1, 8, "the 2 ranks of this host share 1 core of 8; let them run on more of them"),
        (3, 1, 2, 2, 2, ""),  # doctor says so
    ):
        found = advice(ranks, threads, cores, physical, online)
        assert expected in found
        assert bool(expected) == bool(found)


def test_a_rank_starts_where_it_is_told() -> None:
    """By the variables of torchrun's agent or of Open MPI's mpirun."""
    show = "import os; print(sorted(os.sched_getaffinity(0)), os.environ['OMP_NUM_THREADS'], os.environ[%r])"
    own = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    agent = {"RANK": "5", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    mpi = {"OMPI_COMM_WORLD_LOCAL_RANK": "0", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}

    def started(mode: str, environ: dict[str, str]) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-I", "-S", placement.__file__, mode, sys.executable, "-c", show % placement.PLACE]
        return subprocess.run(command, env=own | environ, capture_output=True, text=True)

    everything = sorted(os.sched_getaffinity(0))
    for environ in (agent, mpi):
        said = f"{everything} {len(everything)} ranks are not bound to cores, as --bind none asks\n"
        assert started("none", environ).stdout == said
    ran = started("core", {**agent, "LOCAL_WORLD_SIZE": "9999"})
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.startswith("torchring run: --bind core needs a physical core for each rank, and 9999 ranks have ")


def test_wrap_says_so_and_moves_workers(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setenv(placement.WORKER_CORES, "2-3")
    monkeypatch.setattr(placement, "_said", set())
    with (
        caplog.at_level(logging.WARNING, "torchring"),
        mock.patch.object(os, "register_at_fork") as register,
        mock.patch.object(os, "sched_setaffinity") as move,
    ):
        for rank in (2, 0, 0):
            placement.look_at_cores((2, 1, 16, 8), speaks=rank == 0)
        register.call_args.kwargs["after_in_child"]()
    assert [record.message.partition(" (")[0] for record in caplog.records] == [
        "the 2 ranks of this host compute with one thread each and may use 8 cores; set OMP_NUM_THREADS=4"
    ]
    move.assert_called_once_with(0, {2, 3})
