"""What launchers say, and how the ranks meet that they start: torchrun, mpirun, srun, Kubernetes; and who would train
alone without knowing it."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchring
from tests.support import commands
from tests.support.commands import free_port
from tests.support.harness import _clean_environ, ranks, run_ranks, run_threads
from torchring.errors import PeerTimeoutError, TopologyError
from torchring.rendezvous import addresses
from torchring.rendezvous import store as store_module
from torchring.rendezvous.environment import (
    PARENT,
    LaunchEnvironment,
    check_group,
    describe_parent,
    expand_hosts,
    parent_rank,
    read_environment,
)

ROOT = Path(__file__).resolve().parents[2]
MASTER = {"MASTER_ADDR": "node7", "MASTER_PORT": "29500"}
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "GROUP_WORLD_SIZE": "1", **MASTER}
MPIRUN = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}
SRUN = {
    "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4", "SLURM_LOCALID": "1", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0", "SLURM_STEP_NODELIST": "gpu[003-006,9],login1", "SLURM_JOB_NODELIST": "gpu[003-006,9],login1",
    "SLURMD_NODENAME": "gpu003", "SLURM_NODEID": "0",
}  # fmt: skip

# Joins, leaves and joins again; then prints what rank, size, local rank, host and sum it had. A default process group
# comes and goes with it.
SCRIPT = """
import json, torch, torch.distributed as dist, torchring
from torch.utils.data import DistributedSampler
for turn in range(2):
    world = torchring.init(timeout_seconds=30, process_group=True)
    total = torchring.all_reduce(torch.tensor([10.0 ** torchring.rank()]), "sum").item()
    theirs = torch.tensor([10.0 ** dist.get_rank()])
    dist.all_reduce(theirs)
    assert theirs.item() == total
    assert list(DistributedSampler(range(torchring.size()), shuffle=False)) == [torchring.rank()]
    if turn == 0:
        torchring.shutdown()
        assert not dist.is_initialized()
place = [torchring.rank(), torchring.size(), torchring.local_rank(), torchring.node_rank()]
print(json.dumps([*place, total, world.launcher]) + "\\n", end="", flush=True)
"""


def run_command(
    command: Sequence[str | os.PathLike[str]], env: dict[str, str] | None = None, deadline: float = 60.0
) -> subprocess.CompletedProcess[str]:
    """Run a launcher in a session of its own, of which nothing stays."""
    environ = {**_clean_environ(), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **(env or {})}
    return commands.finish(commands.start(command, environ), seconds=deadline)


def printed(ran: subprocess.CompletedProcess[str]) -> list[Any]:
    """What the ranks printed, in rank order."""
    assert ran.returncode == 0, ran.stderr[-4000:]
    return sorted(json.loads(line) for line in ran.stdout.splitlines() if line.startswith("["))


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def mpirun(size: int, *command: str | os.PathLike[str], **env: str) -> subprocess.CompletedProcess[str]:
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    return run_command(["mpirun", *root, "--oversubscribe", "-np", str(size), sys.executable, *command], env)


needs_mpirun = pytest.mark.skipif(
    shutil.which("mpirun") is None or importlib.util.find_spec("mpi4py") is None,
    reason="needs mpirun and mpi4py",
)

# ---- what they say


@pytest.mark.parametrize(
    ("rank_key", "size_key", "local_key"),
    [
        ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
        ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
        ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"),
        ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID"),
    ],
)
def test_every_launcher(rank_key: str, size_key: str, local_key: str) -> None:
    environ = {rank_key: "2", size_key: "6", local_key: "0", **MASTER}
    launch = read_environment(environ)
    assert (launch.rank, launch.size, launch.local_rank, launch.master) == (2, 6, 0, ("node7", 29500))
    without_local = {key: value for key, value in environ.items() if key != local_key}
    assert read_environment(without_local).local_rank is None
    for missing in (rank_key, "MASTER_ADDR", "MASTER_PORT") if rank_key != "SLURM_PROCID" else (rank_key,):
        with pytest.raises(TopologyError, match=missing):
            read_environment({key: value for key, value in environ.items() if key != missing})
    for key, wrong in [
        (rank_key, "6"), (rank_key, "-1"), (rank_key, "two"), (size_key, "0"), (size_key, "-2"), (size_key, ""),
        (size_key, "many"), (local_key, "x"), ("MASTER_PORT", "http"),
    ]:  # fmt: skip
        with pytest.raises(TopologyError, match=key):
            read_environment({**environ, key: wrong})
    alone = read_environment({rank_key: "0", size_key: "1", local_key: "0"})
    assert (alone.rank, alone.size, alone.master) == (0, 1, None)


_WITHOUT_HOSTS = {key: value for key, value in SRUN.items() if "NODELIST" not in key}
_OF_PMI = {"PMI_RANK": "1", "PMI_SIZE": "4"}
_APART = r"=4, but.*torchrun says GROUP_WORLD_SIZE=1.*each would train alone.*--nnodes=4"
_TASKS = (MPIRUN, SRUN, _OF_PMI, {**SRUN, **_OF_PMI})  # of which each starts a torchrun of its own


@pytest.mark.parametrize(
    ("environ", "complaint"),
    [
        ({"WORLD_SIZE": "2"}, r"(?=.*RANK)(?=.*MASTER_ADDR)(?=.*MASTER_PORT)"),  # all at once
        ({"RANK": "1", **MASTER}, "WORLD_SIZE"),
        (MASTER, r"RANK and WORLD_SIZE are not.*TORCHRING_LAUNCHER=none"),
        (
            {"ACCELERATE_USE_CPU": "True", **MASTER},
            "`accelerate launch --multi_gpu --num_processes 2`, which works on CPUs",
        ),
        # Two processes that were both told so would each train alone: a silent wrong answer.
        ({"RANK": "1", "WORLD_SIZE": "1", **MASTER}, "RANK"),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "1", **MASTER}, "OMPI_COMM_WORLD_RANK"),
        *[
            ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}, "MASTER_PORT")
            for port in ("0", "-1", "65536", "700000")
        ],
        # What does not fit the tasks of srun.
        ({**SRUN, "WORLD_SIZE": "8", **MASTER}, "WORLD_SIZE=8, but RANK not set"),
        *[
            (
                {**SRUN, "MASTER_ADDR": address, "SLURM_STEP_NUM_NODES": "5"},
                f"MASTER_ADDR={address}, but srun started processes on 5 hosts",
            )
            for address in ("localhost", "127.0.1.1")
        ],
        (_WITHOUT_HOSTS, r"SLURM_STEP_NODELIST.*set MASTER_ADDR"),
        ({**SRUN, "SLURM_PROCID": "0", "SLURMD_NODENAME": "gpu005"}, r"rank 0 runs on gpu005.*MASTER_ADDR=gpu005"),
        # Worlds of one, or of their own, that were not meant to be.
        *[({**outer, **TORCHRUN}, _APART) for outer in _TASKS],
        *[
            ({**outer, **TORCHRUN, "WORLD_SIZE": "2"}, r"in a world of 2 of its own.*TORCHRING_LAUNCHER=torchrun")
            for outer in _TASKS
        ],
        ({**SRUN, "RANK": "0", "WORLD_SIZE": "1"}, r"the environment says WORLD_SIZE=1.*TORCHRING_LAUNCHER=none"),
        ({**SRUN, **MPIRUN, "OMPI_COMM_WORLD_SIZE": "1"}, r"SLURM_STEP_NUM_TASKS=4.*OMPI_COMM_WORLD_SIZE=1"),
        (
            {**MPIRUN, "TORCHRING_LAUNCHER": "srun"},
            r"TORCHRING_LAUNCHER=srun, but srun did not start.*SLURM_STEP_NUM_TASKS",
        ),
        (
            {**SRUN, "TORCHRING_LAUNCHER": "slurm"},
            "must be one of none, torchrun, horovodrun, mpirun, srun, got 'slurm'",
        ),
    ],
)
def test_what_is_incomplete_or_cannot_be_is_refused(environ: dict[str, str], complaint: str) -> None:
    with pytest.raises(TopologyError, match=complaint):
        read_environment(environ)


@pytest.mark.parametrize(
    ("environ", "rank", "size"),
    [
        *[({**SRUN, "MASTER_ADDR": name, "SLURM_STEP_NUM_NODES": "1"}, 1, 4) for name in ("localhost", "127.0.1.1")],
        ({**SRUN, "SLURMD_NODENAME": "gpu005"}, 1, 4),  # ranks other than 0 may be anywhere
        ({**SRUN, "SLURM_PROCID": "0", "SLURMD_NODENAME": "alias"}, 0, 4),
        *[({**outer, **TORCHRUN, "WORLD_SIZE": "2", "TORCHRING_LAUNCHER": "torchrun"}, 0, 2) for outer in _TASKS],
        *[({**outer, **TORCHRUN, "TORCHRING_LAUNCHER": "none"}, 0, 1) for outer in _TASKS],
        # One torchrun over several tasks, and an elastic one, of whose four tasks one has died.
        ({**MPIRUN, **TORCHRUN, "RANK": "3", "WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "4"}, 3, 8),
        ({**MPIRUN, **TORCHRUN, "WORLD_SIZE": "6", "GROUP_WORLD_SIZE": "3"}, 0, 6),
        ({**MPIRUN, "OMPI_COMM_WORLD_SIZE": "1", **TORCHRUN}, 0, 1),
        ({**SRUN, "RANK": "2", "WORLD_SIZE": "4", **MASTER}, 2, 4),
    ],
)
def test_what_looks_odd_and_is_right(environ: dict[str, str], rank: int, size: int) -> None:
    launch = read_environment(environ)
    assert (launch.rank, launch.size) == (rank, size)


def test_who_is_a_ranks_child() -> None:
    environ = {**TORCHRUN, "WORLD_SIZE": "4", "RANK": "3"}
    child = {**environ, PARENT: describe_parent(environ, 100, 3, 4, 1)}
    found = parent_rank(child, 101)
    assert found is not None
    assert (found.rank, found.size, found.local_rank, found.parent_pid) == (3, 4, 1, 100)
    assert parent_rank(child, 100) is None, "the rank itself, even after exec"
    assert parent_rank(environ, 101) is None, "of a process that has met nobody"
    anew = ({"RANK": "2"}, {"MASTER_PORT": "2"}, {"OMPI_COMM_WORLD_SIZE": "4"}, {"TORCHRING_LAUNCHER": "none"})
    for changes in anew:
        assert parent_rank({**child, **changes}, 101) is None, changes
    for nonsense in ("", "5", "{"):
        assert parent_rank({**environ, PARENT: nonsense}, 101) is None


# ---- who counts


def _of_mpi(stem: str, local: str) -> dict[str, str]:
    return {f"{stem}RANK": "3", f"{stem}SIZE": "6", local: "1"}


_FOUR = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
_HYDRA = {"PMI_RANK": "5", "PMI_SIZE": "8", "MPI_LOCALRANKID": "1"}
_NODE7 = ("node7", 29500)


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ("none", 0, 1, None, None, False)),
        ({"PATH": "/bin", "LOCAL_RANK_": "1"}, ("none", 0, 1, None, None, False)),
        ({**MASTER, "TORCHRING_LAUNCHER": "none"}, ("none", 0, 1, None, None, False)),
        # sbatch sets these for the script itself, which runs once.
        ({"SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_JOB_ID": "12"}, ("none", 0, 1, None, None, False)),
        ({"RANK": "1", "WORLD_SIZE": "2", **MASTER}, ("the environment", 1, 2, None, _NODE7, False)),
        ({**_FOUR, **MASTER}, ("torchrun", 3, 4, 1, _NODE7, False)),
        ({**_FOUR, **MASTER, "TORCHELASTIC_USE_AGENT_STORE": "True"}, ("torchrun", 3, 4, 1, _NODE7, True)),
        ({**_FOUR, **MASTER, "TORCHELASTIC_USE_AGENT_STORE": "False"}, ("torchrun", 3, 4, 1, _NODE7, False)),
        ({**SRUN, **MPIRUN, **_FOUR, **MASTER}, ("torchrun", 3, 4, 1, _NODE7, False)),
        ({**MPIRUN, **MASTER}, ("mpirun (Open MPI)", 0, 4, 0, _NODE7, False, False)),
        ({**MPIRUN, "OMPI_COMM_WORLD_RANK": "2"}, ("mpirun (Open MPI)", 2, 4, 0, None, False, True)),
        (_of_mpi("MV2_COMM_WORLD_", "MV2_COMM_WORLD_LOCAL_RANK"), ("mpirun (MVAPICH)", 3, 6, 1, None, False, True)),
        (_of_mpi("PMI_", "PALS_LOCAL_RANKID"), ("mpiexec (PALS)", 3, 6, 1, None, False, True)),
        (_of_mpi("PMI_", "MPI_LOCALRANKID"), ("mpiexec (MPICH)", 3, 6, 1, None, False, True)),
        # As batch scripts have it, where RANK cannot be exported.
        ({**SRUN, "WORLD_SIZE": "4", **MASTER}, ("srun", 1, 4, 1, _NODE7, False)),
        # Hydra has its proxies started by srun, one a node: their variables are what its ranks inherit.
        ({**SRUN, **_HYDRA}, ("mpiexec (MPICH)", 5, 8, 1, None, False, True)),
    ],
)
def test_what_launchers_say(environ: dict[str, str], expected: tuple[Any, ...]) -> None:
    assert dataclasses.replace(read_environment(environ), job="") == LaunchEnvironment(*expected)


def test_srun() -> None:
    launch = read_environment(SRUN)
    assert (launch.launcher, launch.rank, launch.size, launch.local_rank) == ("srun", 1, 4, 1)
    assert launch.master is not None
    host, port = launch.master
    assert host == "gpu003"
    assert 15000 <= port < 30000
    assert read_environment({**SRUN, "MASTER_ADDR": "ib7"}).master == ("ib7", port)
    assert read_environment({**SRUN, "MASTER_PORT": "77"}).master == ("gpu003", 77)
    ports = {read_environment({**SRUN, "SLURM_JOB_ID": job, "SLURM_STEP_ID": step}).master for job, step in
             [("4711", "0"), ("4711", "1"), ("4712", "0"), ("4712", "1"), ("14711", "0")]}  # fmt: skip
    assert len(ports) == 5


@pytest.mark.parametrize("local", [{}, {"PMI_FD": "7", "PMI_JOBID": "4711.0"}])
def test_pmi_of_sruns_own_is_srun(local: dict[str, str]) -> None:
    assert read_environment({**SRUN, "PMI_RANK": "1", "PMI_SIZE": "4", **local}).launcher == "srun"


@pytest.mark.parametrize("missing", ["SLURM_STEP_NODELIST", "SLURM_JOB_ID", "SLURM_STEP_ID"])
def test_srun_says_less(missing: str) -> None:
    environ = {key: value for key, value in SRUN.items() if key != missing}
    assert read_environment(environ).master is not None


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("localhost", "localhost"),
        ("gpu[003-006,9],login1", "gpu003 gpu004 gpu005 gpu006 gpu9 login1"),
        ("rack[1-2]node[3-4]", "rack1node3 rack1node4 rack2node3 rack2node4"),
        ("a,b-c,d[08-11]x", "a b-c d08x d09x d10x d11x"),
        ("n[1,3-4,007].cluster", "n1.cluster n3.cluster n4.cluster n007.cluster"),
        ("[1-2]a", "1a 2a"),
    ],
)
def test_host_lists(text: str, names: str) -> None:
    assert list(expand_hosts(text)) == names.split()


def test_a_long_host_list_is_not_spelled_out() -> None:
    assert list(islice(expand_hosts("n[1-999999999999]"), 2)) == ["n1", "n2"]


@pytest.mark.parametrize(
    "text", ["", "a[", "a]", "a[1-]", "a[-2]", "a[x]", "a[]", "a,", ",a", "a,,b", "a[1]b[", "a[1[2]]"]
)
def test_what_is_no_host_list(text: str) -> None:
    with pytest.raises(ValueError, match=r"host list|no number"):
        list(expand_hosts(text))
    if text.startswith("a,"):  # no more is looked at than the first
        return
    with pytest.raises(TopologyError, match="MASTER_ADDR"):
        read_environment({**SRUN, "SLURM_STEP_NODELIST": text, "SLURM_JOB_NODELIST": ""})


@pytest.mark.parametrize("environ", [MPIRUN, SRUN, {**TORCHRUN, "WORLD_SIZE": "4"}])
def test_training_apart_can_be_asked_for(environ: dict[str, str]) -> None:
    assert read_environment({**environ, "TORCHRING_LAUNCHER": "none"}) == LaunchEnvironment(
        "none", 0, 1, None, None, False
    )


def test_a_launcher_can_be_chosen() -> None:
    both = {**SRUN, **MPIRUN, **TORCHRUN, "WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "4"}
    chosen = {kind: read_environment({**both, "TORCHRING_LAUNCHER": kind}) for kind in ("torchrun", "mpirun", "srun")}
    assert [launch.launcher for launch in chosen.values()] == ["torchrun", "mpirun (Open MPI)", "srun"]


def test_a_group_that_leaves_out_others_is_refused() -> None:
    for environ in (MPIRUN, SRUN, {**TORCHRUN, "WORLD_SIZE": "4"}, {**MPIRUN, **TORCHRUN}):
        with pytest.raises(TopologyError, match=r"has 1 rank, but.*=4.*TORCHRING_LAUNCHER=none"):
            check_group(environ, 1)
        check_group({**environ, "TORCHRING_LAUNCHER": "none"}, 1)
    with pytest.raises(TopologyError, match="has 3 ranks, but"):
        check_group(MPIRUN, 3)
    for size in (4, 8):
        check_group(MPIRUN, size)
        check_group({**MPIRUN, **TORCHRUN, "WORLD_SIZE": str(size)}, size)
    check_group({}, 1)


@ranks(1, run_ranks, launcher_env=False, env=MPIRUN)
def test_a_script_whose_group_is_of_one(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1)
    with pytest.raises(TopologyError, match="OMPI_COMM_WORLD_SIZE=4"):
        torchring.init()
    assert not torchring.is_initialized()
    os.environ["TORCHRING_LAUNCHER"] = "none"
    assert torchring.size() == 1
    torchring.shutdown()
    dist.destroy_process_group()


# ---- meeting at an address


@pytest.fixture
def port() -> str:
    return str(free_port())


def meets_twice(rank: int, size: int, launcher: str) -> None:
    for _ in range(2):
        world = torchring.init(timeout_seconds=20.0)
        assert float(torchring.all_reduce(torch.tensor(rank + 1.0), "sum")) == size * (size + 1) / 2
        torchring.shutdown()
    assert (world.launcher, world.rank, world.size, world.local_rank) == (launcher, rank, size, rank)


@pytest.mark.parametrize("late", [0.0, 0.7])
@ranks(2, run_ranks, launcher_env=False)
def test_variables_set_by_hand(rank: int, port: str, late: float) -> None:
    """As Kubernetes' operators have it: nothing but these, and names that come into being after the pods."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    known_from = time.monotonic() + late
    resolve = socket.getaddrinfo

    def getaddrinfo(host: Any, *rest: Any, **more: Any) -> Any:
        if host == "localhost" and time.monotonic() < known_from:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return resolve(host, *rest, **more)

    socket.getaddrinfo = getaddrinfo
    if rank == 0:
        time.sleep(2 * late)
    meets_twice(rank, 2, "the environment")


def _refused(rank: int, size: int) -> tuple[float, str]:
    """How long init() took, and what it says."""
    sys.modules["mpi4py"] = None  # type: ignore[assignment]
    started = time.monotonic()
    with pytest.raises(TopologyError) as caught:
        torchring.init(timeout_seconds=1.0)
    return time.monotonic() - started, str(caught.value)


def test_a_name_that_never_resolves_is_named() -> None:
    environ = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "rank0.torchring.invalid", "MASTER_PORT": "29500"}
    ((seconds, message),) = run_ranks(_refused, 1, launcher_env=False, env=environ)
    assert 0.5 < seconds < 20.0
    assert "the name 'rank0.torchring.invalid' does not resolve" in message


def test_a_port_that_is_taken() -> None:
    with socket.create_server(("", 0)) as other:
        environ = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
        environ["MASTER_PORT"] = str(other.getsockname()[1])
        ((_, message),) = run_ranks(_refused, 1, launcher_env=False, env=environ)
    assert "cannot host the rendezvous store at localhost" in message


@ranks(3, run_ranks, launcher_env=False)
def test_ranks_of_srun_meet(rank: int) -> None:
    """All that srun sets which has to do with ranks and hosts, and what PMI-2 adds."""
    size, job = 3, os.getppid()  # the same on all ranks, and another in each run of the tests
    os.environ |= {
        "SLURM_JOB_ID": str(job), "SLURM_JOBID": str(job), "SLURM_STEP_ID": "3", "SLURM_STEPID": "3",
        "SLURM_NTASKS": str(size), "SLURM_NPROCS": str(size), "SLURM_STEP_NUM_TASKS": str(size),
        "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_TASKS_PER_NODE": str(size), "SLURM_TASKS_PER_NODE": str(size),
        "SLURM_NNODES": "1", "SLURM_NODEID": "0", "SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank),
        "SLURM_STEP_NODELIST": "localhost", "SLURM_NODELIST": "localhost,node[7-9]",
        "SLURM_JOB_NODELIST": "localhost,node[7-9]", "SLURMD_NODENAME": "localhost",
        "PMI_RANK": str(rank), "PMI_SIZE": str(size), "PMI_FD": "11", "PMI_JOBID": f"{job}.3",
    }  # fmt: skip
    meets_twice(rank, size, "srun")


@pytest.mark.parametrize("name", ["train", "elastic", "requeue"])
def test_batch_scripts_have_their_options_first(name: str) -> None:
    script = ROOT / "examples" / "slurm" / f"{name}.sbatch"
    subprocess.run(["bash", "-n", script], check=True, timeout=20)
    lines = script.read_text().splitlines()
    assert lines[0] == "#!/bin/bash"
    options = [line for line in lines if line.startswith("#SBATCH ")]
    assert len(options) >= 4
    first_command = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert all(lines.index(option) < first_command for option in options), (
        "Slurm reads no further than the first command"
    )
    (example,) = [word for line in lines[first_command:] for word in line.split() if word.endswith(".py")]
    assert (ROOT / example).is_file()


# ---- meeting over MPI, with an MPI made of threads


class Request:
    def __init__(self, is_done: Any) -> None:
        self.Test = is_done


class Comm:
    """The collective that meeting over MPI takes; `shared` is one list for all ranks."""

    def __init__(self, rank: int, size: int, shared: dict[Any, bytes]) -> None:
        self.rank, self.size, self.shared = rank, size, shared

    def Ibcast(self, buffer: bytearray, root: int) -> Request:
        if self.rank == root:
            self.shared["endpoint"] = bytes(buffer)

        def is_done() -> bool:
            buffer[:] = self.shared.get("endpoint", buffer)
            return "endpoint" in self.shared

        return Request(is_done)


def launched(rank: int, size: int) -> LaunchEnvironment:
    return LaunchEnvironment("mpirun", rank, size, None, None, False, over_mpi=True)


def meet(size: int, *, is_local: bool = True) -> list[Any]:
    shared: dict[Any, bytes] = {}
    met = threading.Barrier(size)  # rank 0's store ends with it

    def on_rank(rank: int, size: int, _: Any) -> Any:
        part = store_module._MpiEndpoint(Comm(rank, size, shared), is_local, 10.0)
        endpoint = part.receive(10.0)
        store = part.store or store_module._connect(launched(rank, size), endpoint, 10.0)
        store.set(f"from{rank}", str(rank))
        values = [store.get(f"from{other}") for other in range(size)]
        met.wait(10)
        return endpoint, values

    return run_threads(on_rank, size)


def listening_on(port: int) -> set[str]:
    """The addresses, in the kernel's own notation."""
    found = set()
    for file in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(file).read_text().splitlines()[1:]:
            _, local, _, state = line.split()[:4]
            if state == "0A" and int(local.rpartition(":")[2], 16) == port:
                found.add(local.rpartition(":")[0])
    return found


def test_ranks_of_one_host_meet_on_loopback() -> None:
    for endpoint, values in meet(3):
        assert endpoint["addresses"] == ["127.0.0.1"]
        assert values == [b"0", b"1", b"2"]
    _, endpoint = store_module._host_store(True, 5.0)
    assert len(endpoint["token"]) == 32


@pytest.mark.parametrize("is_local", [True, False])
def test_where_the_store_listens(is_local: bool) -> None:
    _store, endpoint = store_module._host_store(is_local, 5.0)
    assert (listening_on(endpoint["port"]) == {"0100007F"}) is is_local


def test_ranks_of_several_hosts_take_an_address_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the last one: the first has nobody listening, the second is a name that nobody knows."""
    monkeypatch.setattr(store_module, "own_addresses", lambda: ["127.77.77.77", "torchring.invalid", "127.0.0.1"])
    create_server = socket.create_server
    monkeypatch.setattr(socket, "create_server", lambda *_: create_server(("127.0.0.1", 0)))
    for endpoint, values in meet(3, is_local=False):
        assert len(endpoint["addresses"]) == 3
        assert values == [b"0", b"1", b"2"]


def test_addresses_that_do_not_work_are_all_named() -> None:
    endpoint = {"host": "far", "port": free_port(), "addresses": ["127.0.0.1", "torchring.invalid"], "token": "x"}
    started = time.monotonic()
    with pytest.raises(
        TopologyError, match=r"rank 1 .*on far, port .*127\.0\.0\.1 \(.*refused\), torchring\.invalid \("
    ) as caught:
        store_module._connect(launched(1, 2), endpoint, 0.5)
    assert caught.value.peers == (0,)
    assert time.monotonic() - started < 10.0


def test_somebody_elses_store_is_not_taken() -> None:
    """A container bridge's address leads each host to itself."""
    other = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    endpoint = {"host": "far", "port": other.port, "addresses": ["127.0.0.1"], "token": "right"}
    for token in (None, "wrong"):
        if token:
            other.set("torchring/token", token)
        with pytest.raises(TopologyError, match="another store answers there"):
            store_module._connect(launched(1, 2), endpoint, 0.3)
    other.set("torchring/token", "right")
    assert store_module._connect(launched(1, 2), endpoint, 0.3).get("torchring/token") == b"right"


def test_a_meeting_that_not_all_attend_ends_and_can_be_resumed() -> None:
    shared: dict[Any, bytes] = {}
    second = store_module._MpiEndpoint(Comm(1, 2, shared), True, 5.0)
    with pytest.raises(PeerTimeoutError, match="2 processes that mpirun started, not all came"):
        second.receive(0.2)
    first = store_module._MpiEndpoint(Comm(0, 2, shared), True, 5.0)
    assert first.receive(5.0) == second.receive(5.0)


def test_a_rank_0_that_cannot_listen_tells_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(socket, "create_server", fail)
    shared: dict[Any, bytes] = {}
    parts = [store_module._MpiEndpoint(Comm(rank, 2, shared), True, 5.0) for rank in (0, 1)]
    for part in parts:
        assert "cannot host the store: [Errno 24] Too many" in part.receive(5.0)["error"]


def test_own_addresses_are_no_loopback() -> None:
    found = addresses.own_addresses()
    assert found[-1] == socket.gethostname()
    assert not any(address.startswith("127.") or address == "::1" for address in found)
    assert len(set(found)) == len(found)


# ---- mpirun


@needs_mpirun
def test_ranks_of_mpirun_meet(script: Path) -> None:
    ranks = printed(mpirun(3, script))
    assert [rank[:2] for rank in ranks] == [[0, 3], [1, 3], [2, 3]]
    assert sorted(rank[2] for rank in ranks) == [0, 1, 2]
    assert all(rank[3:] == [0, 111.0, "mpirun (Open MPI)"] for rank in ranks)


@needs_mpirun
def test_a_rank_of_mpirun_that_raises_ends_the_job(tmp_path: Path) -> None:
    """Without a word from MPI it would wait at its exit for the others, which do not communicate."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, time, torchring\n"
        "sys.excepthook = lambda kind, *_: print('the script sees', kind.__name__, flush=True)\n"
        "if torchring.rank() == 1:\n    raise KeyError\n"
        "time.sleep(300)\n"
    )
    ran = mpirun(2, script)
    assert ran.returncode == 1, ran.stderr
    assert "the script sees KeyError" in ran.stdout


def test_mpi4py_is_asked_for() -> None:
    ((_, message),) = run_ranks(_refused, 1, launcher_env=False, env=MPIRUN)
    assert "mpirun (Open MPI) started 4 processes" in message
    assert "pip install mpi4py" in message
    assert "MASTER_ADDR and MASTER_PORT" in message


@ranks(2, run_ranks, launcher_env=False)
def test_with_an_address_mpi4py_is_not_needed(rank: int, port: str) -> None:
    sys.modules["mpi4py"] = None  # type: ignore[assignment]
    os.environ |= {"OMPI_COMM_WORLD_RANK": str(rank), "OMPI_COMM_WORLD_SIZE": "2"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    torchring.init(timeout_seconds=10.0)
    assert float(torchring.all_reduce(torch.tensor(rank + 1.0), "sum")) == 3.0


@ranks(1, run_ranks, launcher_env=False, env={"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1"})
def test_an_mpi4py_for_another_mpi_is_noticed() -> None:
    """Every process thinks that it is a world of one."""
    mpi = types.SimpleNamespace(
        COMM_WORLD=types.SimpleNamespace(rank=0, size=1), Get_library_version=lambda: "Open MPI v5.0.11, package: x\0"
    )
    sys.modules["mpi4py"] = types.SimpleNamespace(MPI=mpi)  # type: ignore[assignment]
    with pytest.raises(TopologyError) as caught:
        torchring.init(timeout_seconds=5.0)
    assert "mpiexec (MPICH) says rank 1 of 2, but mpi4py says rank 0 of 1" in str(caught.value)
    assert "(Open MPI v5.0.11, package: x)" in str(caught.value)


def test_a_script_that_has_started_mpi_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = types.SimpleNamespace(
        COMM_WORLD=types.SimpleNamespace(rank=2, size=3), Is_initialized=lambda: True, Is_finalized=lambda: False
    )
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    assert store_module.unannounced_mpi({}) is None
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", fake)  # type: ignore[arg-type]
    found = store_module.unannounced_mpi({})
    assert found == LaunchEnvironment("MPI", 2, 3, None, None, False, over_mpi=True)
    assert store_module.unannounced_mpi({"TORCHRING_LAUNCHER": "none"}) is None
