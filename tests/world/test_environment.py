"""What launchers say, and how the ranks meet that they start: torchrun, mpirun, srun, Kubernetes; and who would train
alone without knowing it."""

import dataclasses
import itertools
import json
import os
import socket
import sys
import threading
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torchring
from tests.support import commands
from tests.support.commands import free_port
from tests.support.harness import _clean_environ, patient, ranks, run_ranks, run_threads
from tests.support.mpi_job import needs_mpi
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


_OF_PMI = {"PMI_RANK": "1", "PMI_SIZE": "4"}
_TASKS = (MPIRUN, SRUN, _OF_PMI, {**SRUN, **_OF_PMI})  # of which each starts a torchrun of its own
_ALL = {**SRUN, **MPIRUN, **TORCHRUN, "WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "4"}


@pytest.mark.parametrize(
    ("environ", "complaint"),
    [
        ({"WORLD_SIZE": "2"}, r"(?=.*RANK)(?=.*MASTER_ADDR)(?=.*MASTER_PORT)"),  # all at once
        ({"RANK": "1", **MASTER}, "WORLD_SIZE is not.*`torchring run -np N SCRIPT`, or unset RANK"),
        (MASTER, r"RANK and WORLD_SIZE are not.*TORCHRING_LAUNCHER=none"),
        ({"ACCELERATE_USE_CPU": "True", **MASTER}, "`accelerate launch --multi_gpu --num_processes 2`, which works on"),
        # Two processes that were both told so would each train alone: a silent wrong answer.
        ({"RANK": "1", "WORLD_SIZE": "1", **MASTER}, "RANK"),
        ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "1", **MASTER}, "OMPI_COMM_WORLD_RANK"),
        ({**TORCHRUN, "WORLD_SIZE": "2", "MASTER_PORT": "0"}, "MASTER_PORT"),
        ({**TORCHRUN, "WORLD_SIZE": "2", "MASTER_PORT": "65536"}, "MASTER_PORT"),
        # What does not fit the tasks of srun.
        ({**SRUN, "WORLD_SIZE": "8", **MASTER}, "WORLD_SIZE=8, but RANK not set"),
        *[
            ({**SRUN, "MASTER_ADDR": here, "SLURM_STEP_NUM_NODES": "5"}, f"{here}, but srun started processes on 5")
            for here in ("localhost", "127.0.1.1")
        ],
        ({key: SRUN[key] for key in SRUN if "NODELIST" not in key}, r"SLURM_STEP_NODELIST.*set MASTER_ADDR"),
        ({**SRUN, "SLURM_PROCID": "0", "SLURMD_NODENAME": "gpu005"}, r"rank 0 runs on gpu005.*MASTER_ADDR=gpu005"),
        # Worlds of one, or of their own, that were not meant to be.
        *[
            ({**outer, **TORCHRUN}, r"=4, but.*torchrun says GROUP_WORLD_SIZE=1.*each would train alone.*--nnodes=4")
            for outer in _TASKS
        ],
        *[
            ({**outer, **TORCHRUN, "WORLD_SIZE": "2"}, r"in a world of 2 of its own.*TORCHRING_LAUNCHER=torchrun")
            for outer in _TASKS
        ],
        ({**SRUN, "RANK": "0", "WORLD_SIZE": "1"}, r"the environment says WORLD_SIZE=1.*TORCHRING_LAUNCHER=none"),
        ({**SRUN, **MPIRUN, "OMPI_COMM_WORLD_SIZE": "1"}, r"SLURM_STEP_NUM_TASKS=4.*OMPI_COMM_WORLD_SIZE=1"),
        ({**MPIRUN, "TORCHRING_LAUNCHER": "srun"}, r"=srun, but srun did not start.*SLURM_STEP_NUM_TASKS"),
        ({**SRUN, "TORCHRING_LAUNCHER": "slurm"}, "one of none, torchrun, horovodrun, mpirun, srun, got 'slurm'"),
    ],
)
def test_what_is_incomplete_or_cannot_be_is_refused(environ: dict[str, str], complaint: str) -> None:
    with pytest.raises(TopologyError, match=complaint):
        read_environment(environ)


def _of_mpi(stem: str, local: str) -> dict[str, str]:
    return {f"{stem}RANK": "3", f"{stem}SIZE": "6", local: "1"}


_FOUR = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}
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
        # Hydra has its proxies started by srun, one a node: their variables are what its ranks inherit.
        ({**SRUN, **_of_mpi("PMI_", "MPI_LOCALRANKID")}, ("mpiexec (MPICH)", 3, 6, 1, None, False, True)),
        *[({**SRUN, **_OF_PMI, **more}, ("srun", 1, 4, 1)) for more in ({}, {"PMI_FD": "7", "PMI_JOBID": "4711.0"})],
        # As batch scripts have it, where RANK cannot be exported.
        ({**SRUN, "WORLD_SIZE": "4", **MASTER}, ("srun", 1, 4, 1, _NODE7, False)),
        *[({**SRUN, "MASTER_ADDR": here, "SLURM_STEP_NUM_NODES": "1"}, ("srun", 1)) for here in ("localhost", "127.0")],
        ({**SRUN, "SLURMD_NODENAME": "gpu005"}, ("srun", 1, 4)),  # ranks other than 0 may be anywhere
        ({**SRUN, "SLURM_PROCID": "0", "SLURMD_NODENAME": "alias"}, ("srun", 0, 4)),
        ({**SRUN, "RANK": "2", "WORLD_SIZE": "4", **MASTER}, ("the environment", 2, 4)),
        # Which launcher counts can be chosen, and that none does.
        *[({**_ALL, "TORCHRING_LAUNCHER": kind}, (kind,)) for kind in ("torchrun", "srun")],
        ({**_ALL, "TORCHRING_LAUNCHER": "mpirun"}, ("mpirun (Open MPI)", 0, 4)),
        *[
            ({**outer, **TORCHRUN, "WORLD_SIZE": "2", "TORCHRING_LAUNCHER": "torchrun"}, ("torchrun", 0, 2))
            for outer in _TASKS
        ],
        *[({**outer, **TORCHRUN, "TORCHRING_LAUNCHER": "none"}, ("none", 0, 1, None, None, False)) for outer in _TASKS],
        # One torchrun over several tasks, and an elastic one, of whose four tasks one has died.
        ({**_ALL, "RANK": "3"}, ("torchrun", 3, 8)),
        ({**MPIRUN, **TORCHRUN, "WORLD_SIZE": "6", "GROUP_WORLD_SIZE": "3"}, ("torchrun", 0, 6)),
        ({**MPIRUN, "OMPI_COMM_WORLD_SIZE": "1", **TORCHRUN}, ("torchrun", 0, 1)),
    ],
)
def test_what_launchers_say(environ: dict[str, str], expected: tuple[Any, ...]) -> None:
    """Launcher, rank, size, local rank, address of the store, whether the launcher hosts it, and whether MPI has it."""
    assert dataclasses.astuple(read_environment(environ))[: len(expected)] == expected


def test_srun() -> None:
    host, port = read_environment(SRUN).master or ("", 0)
    assert host == "gpu003"
    assert 15000 <= port < 30000
    assert read_environment({**SRUN, "MASTER_ADDR": "ib7"}).master == ("ib7", port)
    assert read_environment({**SRUN, "MASTER_PORT": "77"}).master == ("gpu003", 77)
    steps = [("4711", "0"), ("4711", "1"), ("4712", "0"), ("4712", "1"), ("14711", "0")]
    assert len({read_environment({**SRUN, "SLURM_JOB_ID": j, "SLURM_STEP_ID": s}).master for j, s in steps}) == 5
    for missing in ("SLURM_STEP_NODELIST", "SLURM_JOB_ID", "SLURM_STEP_ID"):
        assert read_environment({key: SRUN[key] for key in SRUN if key != missing}).master is not None


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("localhost", "localhost"),
        ("gpu[003-006,9],login1", "gpu003 gpu004 gpu005 gpu006 gpu9 login1"),
        ("rack[1-2]node[3-4]", "rack1node3 rack1node4 rack2node3 rack2node4"),
        ("a,b-c,d[08-11]x", "a b-c d08x d09x d10x d11x"),
        ("n[1,3-4,007].cluster", "n1.cluster n3.cluster n4.cluster n007.cluster"),
        ("[1-2]a", "1a 2a"),
        ("n[1-999999999999]", "n1 n2"),  # not spelled out
    ],
)
def test_host_lists(text: str, names: str) -> None:
    if "9999" not in text:
        assert list(expand_hosts(text)) == names.split()
    assert list(itertools.islice(expand_hosts(text), 2)) == names.split()[:2]


@pytest.mark.parametrize("text", ["", "a[", "a]", "a[1-]", "a[-2]", "a[x]", "a,", ",a", "a,,b", "a[1]b[", "a[1[2]]"])
def test_what_is_no_host_list(text: str) -> None:
    with pytest.raises(ValueError, match=r"host list|no number"):
        list(expand_hosts(text))
    if not text.startswith("a,"):  # no more is looked at than the first
        with pytest.raises(TopologyError, match="MASTER_ADDR"):
            read_environment({**SRUN, "SLURM_STEP_NODELIST": text, "SLURM_JOB_NODELIST": ""})


def test_who_is_a_ranks_child() -> None:
    environ = {**TORCHRUN, "WORLD_SIZE": "4", "RANK": "3"}
    child = {**environ, PARENT: describe_parent(environ, 100, 3, 4, 1)}
    assert parent_rank(child, 101) == LaunchEnvironment("a rank", 3, 4, 1, parent_pid=100)
    assert parent_rank(child, 100) is None, "the rank itself, even after exec"
    assert parent_rank(environ, 101) is None, "of a process that has met nobody"
    anew = ({"RANK": "2"}, {"MASTER_PORT": "2"}, {"OMPI_COMM_WORLD_SIZE": "4"}, {"TORCHRING_LAUNCHER": "none"})
    for changes in anew:
        assert parent_rank({**child, **changes}, 101) is None, changes
    for nonsense in ("", "5", "{"):
        assert parent_rank({**environ, PARENT: nonsense}, 101) is None


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


@pytest.mark.parametrize(
    ("stem", "size_key", "launcher"),
    [("", "WORLD_SIZE", "the environment"), ("OMPI_COMM_WORLD_", "OMPI_COMM_WORLD_SIZE", "mpirun (Open MPI)")],
)
@ranks(2, run_ranks, launcher_env=False)
def test_variables_set_by_hand(rank: int, port: str, stem: str, size_key: str, launcher: str) -> None:
    """As Kubernetes' operators have it: nothing but these, and names that come into being after the pods."""
    sys.modules["mpi4py"] = None  # type: ignore[assignment]
    os.environ |= {f"{stem}RANK": str(rank), size_key: "2", "MASTER_ADDR": "localhost", "MASTER_PORT": port}
    known_from = time.monotonic() + 0.3
    resolve = socket.getaddrinfo

    def getaddrinfo(host: Any, *rest: Any, **more: Any) -> Any:
        if host == "localhost" and time.monotonic() < known_from:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return resolve(host, *rest, **more)

    socket.getaddrinfo = getaddrinfo
    if rank == 0:
        time.sleep(0.5)
    meets_twice(rank, 2, launcher)


_TWO = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_PORT": "29500", "MASTER_ADDR": "localhost"}


@pytest.mark.parametrize(
    ("environ", "said"),
    [
        ({**_TWO, "MASTER_ADDR": "rank0.torchring.invalid"}, "the name 'rank0.torchring.invalid' does not resolve"),
        ({**_TWO, "MASTER_PORT": "1"}, r"rank 1 .*localhost:1 \(MASTER_ADDR:MASTER_PORT.*nobody answers"),
        ({**_TWO, "RANK": "0", "MASTER_PORT": "taken"}, "cannot host the rendezvous store at localhost"),
        (MPIRUN, r"mpirun \(Open MPI\) started 4 processes.*pip install mpi4py.*MASTER_ADDR and MASTER_PORT"),
    ],
)
@ranks(1, run_ranks, launcher_env=False)
def test_where_no_store_can_be_had(environ: dict[str, str], said: str) -> None:
    sys.modules["mpi4py"] = None  # type: ignore[assignment]
    os.environ |= environ
    with socket.create_server(("", 0)) as other:
        if environ.get("MASTER_PORT") == "taken":
            os.environ["MASTER_PORT"] = str(other.getsockname()[1])
        started = time.monotonic()
        with pytest.raises(TopologyError, match=said):
            torchring.init(timeout_seconds=0.5)
    assert time.monotonic() - started < patient(10.0)


# ---- meeting over MPI, with an MPI made of threads


class Comm:
    """The collective that meeting over MPI takes; `shared` is one list for all ranks."""

    def __init__(self, rank: int, size: int, shared: dict[Any, bytes]) -> None:
        self.rank, self.size, self.shared = rank, size, shared

    def Ibcast(self, buffer: bytearray, root: int) -> Any:
        if self.rank == root:
            self.shared["endpoint"] = bytes(buffer)

        def is_done() -> bool:
            buffer[:] = self.shared.get("endpoint", buffer)
            return "endpoint" in self.shared

        return types.SimpleNamespace(Test=is_done)


def launched(rank: int, size: int) -> LaunchEnvironment:
    return LaunchEnvironment("mpirun", rank, size, None, None, False, over_mpi=True)


def meet(size: int, *, is_local: bool = True) -> list[str]:
    """The addresses where they could have met."""
    shared: dict[Any, bytes] = {}
    met = threading.Barrier(size)  # rank 0's store ends with it

    def on_rank(rank: int, size: int, _: Any) -> Any:
        part = store_module._MpiEndpoint(Comm(rank, size, shared), is_local, 10.0)
        endpoint = part.receive(10.0)
        assert len(endpoint["token"]) == 32
        store = part.store or store_module._connect(launched(rank, size), endpoint, 10.0)
        store.set(f"from{rank}", str(rank))
        assert [store.get(f"from{other}") for other in range(size)] == [b"%d" % other for other in range(size)]
        met.wait(10)
        return endpoint["addresses"]

    first, *others = run_threads(on_rank, size)
    assert others == [first] * (size - 1)
    return list(first)


def test_ranks_of_one_host_meet_on_loopback() -> None:
    assert meet(3) == ["127.0.0.1"]


@pytest.mark.parametrize("is_local", [True, False])
def test_where_the_store_listens(is_local: bool) -> None:
    _store, endpoint = store_module._host_store(is_local, 5.0)
    found = set()
    for file in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(file).read_text().splitlines()[1:]:
            _, local, _, state = line.split()[:4]
            address, _, port = local.rpartition(":")
            if state == "0A" and int(port, 16) == endpoint["port"]:
                found.add(address)
    assert (found == {"0100007F"}) is is_local


def test_ranks_of_several_hosts_take_an_address_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the last one: the first has nobody listening, the second is a name that nobody knows."""
    monkeypatch.setattr(store_module, "own_addresses", lambda: ["127.77.77.77", "torchring.invalid", "127.0.0.1"])
    create_server = socket.create_server
    monkeypatch.setattr(socket, "create_server", lambda *_: create_server(("127.0.0.1", 0)))
    assert len(meet(3, is_local=False)) == 3


def test_addresses_that_do_not_work_are_all_named() -> None:
    endpoint = {"host": "far", "port": free_port(), "addresses": ["127.0.0.1", "torchring.invalid"], "token": "x"}
    said = r"rank 1 .*on far, port .*127\.0\.0\.1 \(.*refused\), torchring\.invalid \("
    started = time.monotonic()
    with pytest.raises(TopologyError, match=said) as caught:
        store_module._connect(launched(1, 2), endpoint, 0.3)
    assert caught.value.peers == (0,)
    assert time.monotonic() - started < patient(5.0)


def test_somebody_elses_store_is_not_taken() -> None:
    """A container bridge's address leads each host to itself."""
    other = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    endpoint = {"host": "far", "port": other.port, "addresses": ["127.0.0.1"], "token": "right"}
    for token in (None, "wrong"):
        if token:
            other.set("torchring/token", token)
        with pytest.raises(TopologyError, match="another store answers there"):
            store_module._connect(launched(1, 2), endpoint, 0.1)
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
    for part in [store_module._MpiEndpoint(Comm(rank, 2, shared), True, 5.0) for rank in (0, 1)]:
        assert "cannot host the store: [Errno 24] Too many" in part.receive(5.0)["error"]


def test_own_addresses_are_no_loopback() -> None:
    found = addresses.own_addresses()
    assert found[-1] == socket.gethostname()
    assert not any(address.startswith("127.") or address == "::1" for address in found)
    assert len(set(found)) == len(found)


# ---- mpirun

# Joins, leaves and joins again; then prints what rank, size, local rank, host and sum it had. A default process group
# comes and goes with it. In the end one rank raises, of which the others must hear: they do not communicate.
_SCRIPT = """
import json, sys, time, torch, torch.distributed as dist, torchring
from torch.utils.data import DistributedSampler
sys.excepthook = lambda kind, *_: print("the script sees", kind.__name__, flush=True)
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
torchring.barrier()
if torchring.rank() == 1:
    raise KeyError
time.sleep(300)
"""


@needs_mpi
def test_ranks_of_mpirun_meet_and_one_that_raises_ends_the_job(tmp_path: Path) -> None:
    """Without a word from MPI it would wait at its exit for the others."""
    (tmp_path / "script.py").write_text(_SCRIPT)
    root = ["--allow-run-as-root"] if os.geteuid() == 0 else []
    command = ["mpirun", *root, "--oversubscribe", "-np", "3", sys.executable, tmp_path / "script.py"]
    environ = {**_clean_environ(), "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ran = commands.finish(commands.start(command, environ))
    assert ran.returncode == 1, ran.stderr
    assert "the script sees KeyError" in ran.stdout
    printed = sorted(json.loads(line) for line in ran.stdout.splitlines() if line.startswith("["))
    assert [rank[:2] for rank in printed] == [[0, 3], [1, 3], [2, 3]], ran.stderr
    assert sorted(rank[2] for rank in printed) == [0, 1, 2]
    assert all(rank[3:] == [0, 111.0, "mpirun (Open MPI)"] for rank in printed)


@ranks(1, run_ranks, launcher_env=False, env={"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1"})
def test_an_mpi4py_for_another_mpi_is_noticed() -> None:
    """Every process thinks that it is a world of one."""
    mpi = types.SimpleNamespace(
        COMM_WORLD=types.SimpleNamespace(rank=0, size=1), Get_library_version=lambda: "Open MPI v5.0.11, package: x\0"
    )
    sys.modules["mpi4py"] = types.SimpleNamespace(MPI=mpi)  # type: ignore[assignment]
    said = r"mpiexec \(MPICH\) says rank 1 of 2, but mpi4py says rank 0 of 1.*\(Open MPI v5.0.11, package: x\)"
    with pytest.raises(TopologyError, match=said):
        torchring.init(timeout_seconds=5.0)


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
