"""Joining and leaving: sizes, hosts, other people's process groups, ranks that do not come, again and again."""

from __future__ import annotations

import atexit
import functools
import gc
import itertools
import math
import os
import re
import subprocess
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
from tests.support.checks import logged
from tests.support.commands import free_port
from tests.support.harness import count_open_fds, patient, run_ranks, run_threads, wait_until
from torchring.default_world import default_world, leave
from torchring.errors import PeerLostError, PeerTimeoutError, TopologyError
from torchring.memory import host as host_module
from torchring.rendezvous.environment import JOB, PARENT
from torchring.world import World


def own_store() -> dict[str, str | None]:
    """As under mpirun or srun, where no launcher hosts the store and rank 0 has to."""
    return {"TORCHELASTIC_USE_AGENT_STORE": None, "MASTER_PORT": str(free_port())}


# ---- one process


@pytest.fixture
def alone() -> Any:
    torchring.shutdown()
    yield
    torchring.shutdown()


def _alone(rank: int, size: int) -> Any:
    assert not torchring.is_initialized()
    facts = (torchring.rank(), torchring.size(), torchring.local_rank(), torchring.local_size())
    assert torchring.is_initialized(), "who shares its memory is known when all have met"
    more = (torchring.node_rank(), torchring.num_nodes(), torchring.device())
    assert torchring.init() is torchring.init(process_group=True) is default_world()
    assert dist.get_world_size() == 1
    assert torchring.all_reduce(torch.tensor([2.0])).tolist() == [2.0]
    torchring.shutdown()
    torchring.shutdown()
    assert not torchring.is_initialized()
    assert not dist.is_initialized()
    return facts, more, os.listdir("/proc/self/fd") and len(default_world().hosts)


def test_without_a_launcher_it_is_a_world_of_one() -> None:
    ((facts, more, hosts),) = run_ranks(_alone, 1, launcher_env=False)
    assert facts == (0, 1, 0, 1)
    assert more == (0, 1, torch.device("cpu"))
    assert hosts == 1


# ---- processes that are no ranks, and ranks that never meet

_CHILD = """
import multiprocessing, torchring
print(torchring.rank(), torchring.size(), torchring.local_rank(), torchring.is_initialized())
multiprocessing.current_process()._inheriting = True  # as where spawn imports the script
try:
    torchring.barrier()
except torchring.TopologyError as error:
    print(error)
del multiprocessing.current_process()._inheriting
torchring.barrier()
"""


def _has_a_child(rank: int, size: int) -> Any:
    answers = (torchring.rank(), torchring.size(), torchring.local_rank(), torchring.is_initialized())
    torchring.init()
    child = None
    if rank == 1:  # only one rank has one: it must not wait for others like it
        child = subprocess.run([sys.executable, "-c", _CHILD], capture_output=True, text=True, timeout=patient(50))
    torchring.barrier()  # in which the child must not have taken this rank's place
    torchring.shutdown()
    return answers, child and (child.stdout, child.stderr), PARENT in os.environ


def test_a_process_that_a_rank_starts_knows_its_rank_but_does_not_take_part() -> None:
    """As a DataLoader's worker that is spawned, or any other program that inherits the rank's environment."""
    (first, _, _), (second, child, is_marked) = run_ranks(_has_a_child, 2)
    assert (first, second) == ((0, 2, 0, False), (1, 2, 1, False)), "nobody is met for that"
    facts, of_spawn = child[0].splitlines()
    assert facts == "1 2 1 False"
    assert "is a worker that rank 1 has started by spawn or forkserver" in of_spawn
    assert 'Put what the script does under `if __name__ == "__main__":`' in of_spawn
    assert re.search(r"TopologyError: this process .* was started by rank 1 .* TORCHRING_LAUNCHER=none", child[1])
    assert not is_marked, "after shutdown() children may be ranks"


def _in_workers_of_frameworks(rank: int, size: int) -> Any:
    """Tasks of Spark's and Ray's, as far as torchring looks at them."""

    class BarrierTaskContext:
        num = 2

        def getTaskInfos(self) -> list[int]:
            return list(range(self.num))

        def partitionId(self) -> int:
            return 1

    tasks = {"pyspark": BarrierTaskContext(), "plain": types.SimpleNamespace(partitionId=lambda: 3)}
    context = types.SimpleNamespace(worker=types.SimpleNamespace(mode=1))
    found: list[Any] = []
    modules: dict[str, Any] = {
        "pyspark": types.SimpleNamespace(
            BarrierTaskContext=BarrierTaskContext, TaskContext=types.SimpleNamespace(get=lambda: tasks[kind])
        ),
        "ray": types.SimpleNamespace(WORKER_MODE=1, is_initialized=lambda: True, get_runtime_context=lambda: context),
    }
    with logged() as said:
        for kind, choice in itertools.product(("pyspark", "plain", "ray"), (None, "none")):
            name = "pyspark" if kind == "plain" else kind
            sys.modules[name] = modules[name]
            os.environ.pop("TORCHRING_LAUNCHER", None)
            if choice is not None:
                os.environ["TORCHRING_LAUNCHER"] = choice
            try:
                torchring.init()
            except TopologyError as error:
                found.append(str(error))
            else:
                found.append(len(said))
                torchring.shutdown()
            del sys.modules[name]
        os.environ["SLURM_NTASKS"] = "4"
        torchring.init()
        torchring.shutdown()
        del os.environ["TORCHRING_LAUNCHER"]
        torchring.init()
    return found, said


def test_workers_of_frameworks_do_not_train_alone_without_a_word() -> None:
    [(found, said)] = run_ranks(_in_workers_of_frameworks, 1, launcher_env=False)
    assert "task 1 of 2 of a Spark barrier stage" in found[0]
    assert "torchring.spark.run" in found[0]
    assert found[1:] == [0, 1, 1, 2, 2]
    of_spark, of_ray, of_slurm = said
    assert of_spark.startswith("this task of Spark, of partition 3, trains alone")
    assert of_ray.startswith("this worker of Ray trains alone")
    assert "torchring.ray.run or ray.train.torch.TorchTrainer" in of_ray
    assert of_slurm.startswith("this process trains alone, although its Slurm job has 4 tasks (SLURM_NTASKS)")


def _leaves(rank: int, size: int) -> str:
    """As a worker of a framework, which lives on after its function has returned."""
    torchring.barrier()
    if rank == 0:
        leave("its function had returned")
        leave("nothing is open")
        return ""
    with pytest.raises(PeerLostError) as caught:
        torchring.barrier()
    return str(caught.value)


def test_a_rank_that_leaves_says_why_to_those_that_wait_for_it() -> None:
    assert "rank 0 stopped: its function had returned, after 0 reductions" in run_ranks(_leaves, 2)[1]


def _launch_after_launch(process: int, size: int, launches: dict[int, list[int]]) -> Any:
    """As in Python workers that Spark uses again: each launch has other processes, and one was alone before."""
    found = []
    if process == 0:
        torchring.init()
        torchring.shutdown()
    for port, members in launches.items():
        if process in members:
            rank = str(members.index(process))
            os.environ |= {"RANK": rank, "WORLD_SIZE": "2", "LOCAL_RANK": rank}
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            torchring.init(timeout_seconds=15.0)
            found.append(torchring.all_gather_object(process))
            torchring.shutdown()
    return found


def test_a_process_can_take_part_in_one_launch_after_another() -> None:
    launches = {free_port(): members for members in ([0, 1], [1, 2], [2, 0])}
    found = run_ranks(_launch_after_launch, 3, launches, launcher_env=False)
    assert found == [[members for members in launches.values() if process in members] for process in range(3)]


def _becomes_one_of_two(rank: int, size: int) -> Any:
    """A notebook that asked torchring something first, and then starts ranks or makes a process group."""
    launched = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    torchring.init()
    child = os.fork()
    if child == 0:
        os.environ.update(launched)
        os._exit(10 * torchring.rank() + torchring.size())
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.environ.update(launched)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    problems = []
    for join in (torchring.init, lambda: torchring.wrap(optimizer), torchring.barrier):
        with pytest.raises(TopologyError) as caught:
            join()  # type: ignore[operator]
        problems.append(str(caught.value))
    return code, set(problems)


def test_a_world_of_one_is_left_before_it_is_one_of_several() -> None:
    [(code, problems)] = run_ranks(_becomes_one_of_two, 1)
    assert code == 12
    (problem,) = problems
    for fact in ("rank 1 of 2 by now", "train alone", "torchring.shutdown()"):
        assert fact in problem


def _never_meets(rank: int, size: int, what: str) -> None:
    torch.manual_seed(torchring.rank())
    weight = torch.ones(3, requires_grad=what != "infer")
    (weight * 2).sum()
    if what == "meet":
        torchring.init()
    if what in ("group", "ddp"):
        os.environ[JOB] = "of torchring run"
        dist.init_process_group("gloo")
        if what == "ddp":
            torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1, 1))
        dist.barrier()  # Gloo: a rank that ends while another one still connects breaks that
        dist.destroy_process_group()


@pytest.mark.parametrize("what", ["train", "infer", "meet", "group", "ddp"])
def test_ranks_that_train_alone_are_told_once(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A process group of the script, as a framework makes it, is no sign that gradients are reduced. DDP is."""
    run_ranks(_never_meets, 2, what)
    output = capsys.readouterr().out
    assert output.count("never met the others") == (what == "train")
    assert output.count("each process has trained alone") == (what == "group")
    if what in ("train", "group"):
        typed = "torchring run" if what == "group" else "torchrun"
        assert f"torchring: {typed} started this process as one of 2, but" in output


def _alone_in_a_collective(rank: int, size: int) -> str:
    torchring.barrier()
    if rank == 0:
        with pytest.raises(PeerLostError) as caught:
            torchring.all_reduce(torch.ones(1))
        return str(caught.value)
    return ""


def test_a_collective_of_one_rank_at_the_end_is_named() -> None:
    message, _ = run_ranks(_alone_in_a_collective, 2)
    assert "rank 1 stopped: its script had ended" in message
    assert "this rank is in all_reduce(), which every rank has to call equally often. Is the call in an `if" in message
    assert "DistributedSampler" not in message


_WRONG = [
    *[("backend", value, ValueError, "'auto', 'gloo', 'mpi'") for value in ("nccl", "MPI", "", None, "Gloo")],
    *[("timeout_seconds", value, ValueError, "timeout_seconds") for value in (0, -1, math.nan, -math.inf)],
    *[("timeout_seconds", value, (TypeError, ValueError), None) for value in ("60", [60])],
    *[("stall_warning_seconds", value, ValueError, "stall_warning_seconds") for value in (-1.0, math.nan, math.inf)],
]


@pytest.mark.parametrize(("option", "value", "error", "said"), _WRONG)
def test_wrong_options_of_init(alone: None, option: str, value: Any, error: Any, said: str | None) -> None:
    with pytest.raises(error, match=said):
        torchring.init(**{option: value})
    assert not torchring.is_initialized()


# ---- several


def _facts(rank: int, size: int, hosts: int) -> Any:
    if hosts > 1:
        host_module._host_identity = lambda: f"host {rank // (size // hosts)}"
    torchring.init(timeout_seconds=10.0)
    facts = {
        name: getattr(torchring, name)()
        for name in ("rank", "size", "local_rank", "local_size", "node_rank", "num_nodes", "device")
    }
    facts["hosts"] = default_world().hosts
    facts["total"] = float(torchring.all_reduce(torch.tensor(float(rank)), "sum"))
    torchring.shutdown()
    return facts


@pytest.mark.parametrize("own", [False, True], ids=["hosted store", "store of rank 0"])
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_of_one_host(size: int, own: bool) -> None:
    for rank, facts in enumerate(run_ranks(_facts, size, 1, env=own_store() if own else {})):
        assert facts == {
            "rank": rank, "size": size, "local_rank": rank, "local_size": size, "node_rank": 0, "num_nodes": 1,
            "device": torch.device("cpu"), "hosts": (tuple(range(size)),), "total": sum(range(size)),
        }  # fmt: skip


def test_ranks_of_two_hosts() -> None:
    for rank, facts in enumerate(run_ranks(_facts, 4, 2, env={"LOCAL_RANK": None})):
        assert facts == {
            "rank": rank, "size": 4, "local_rank": rank % 2, "local_size": 2, "node_rank": rank // 2, "num_nodes": 2,
            "device": torch.device("cpu"), "hosts": ((0, 1), (2, 3)), "total": 6.0,
        }  # fmt: skip


def test_the_launchers_local_rank_counts() -> None:
    assert [facts["local_rank"] for facts in run_ranks(_facts, 2, 1, env={"LOCAL_RANK": "7"})] == [7, 7]


def test_hosts_may_interleave() -> None:
    def body(rank: int, size: int, store: dist.Store) -> Any:
        world = World(store, rank, size, timeout_seconds=10.0)
        facts = world.hosts, world.node_rank, world.num_nodes, world.local_rank, world.local_size, world.shares_memory
        world.close()
        return facts

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_module, "_host_identity", _even_or_odd)
        results = run_threads(body, 5)
    hosts = ((0, 2, 4), (1, 3))
    assert results == [
        (hosts, 0, 2, 0, 3, False), (hosts, 1, 2, 0, 2, False), (hosts, 0, 2, 1, 3, False),
        (hosts, 1, 2, 1, 2, False), (hosts, 0, 2, 2, 3, False),
    ]  # fmt: skip


def _join(store: dist.Store, rank: int, size: int, job: str = "") -> str:
    """What it fails with, or "joined"."""
    try:
        World(store, rank, size, timeout_seconds=50.0, job=job).close()
    except TopologyError as error:
        return error.message
    return "joined"


def test_a_rank_of_another_job_is_turned_away() -> None:
    starts = [(0, "a"), (1, "a"), (1, "b"), (1, "")]  # the last: of a launcher that has no names

    def body(index: int, _: int, store: dist.Store) -> str:
        rank, job = starts[index]
        if index == 3:
            wait_until(lambda: store.check(["open"]), "the others to meet")
        return _join(store, rank, 2, job)

    results = run_threads(body, 4)
    assert results[:2] == ["joined", "joined"]
    assert "rank 1 of job b has come to the store of job a" in results[2]
    assert "two processes were started as rank 1 of 2" in results[3]


def test_a_rank_that_is_there_twice_is_named_to_all() -> None:
    """Rather than the one that is missing."""
    for message in run_threads(lambda index, _, store: _join(store, min(index, 1), 3), 3):
        assert re.search(rf"two processes were started as rank 1 of 3: pid {os.getpid()} on \S+, and pid", message)


def test_who_comes_later_does_not_break_a_world_that_is_open() -> None:
    def body(index: int, _: int, store: dist.Store) -> None:
        if index == 2:
            wait_until(lambda: store.check(["open"]), "the others to meet")
            assert "rank 1 was started for a world of 3" in _join(store, 1, 3)
            assert "two processes" in _join(store, 1, 2)
            store.set("tried", "")
            return
        world = World(store, index, 2, timeout_seconds=50.0)
        assert world.rendezvous is not None
        world.rendezvous.fetch("tried", 0)
        world.rendezvous.all_gather("later", b"")
        world.close()

    run_threads(body, 3)


def _even_or_odd() -> str:
    return f"host {int(threading.current_thread().name.split()[1]) % 2}"


def _init_twice(rank: int, size: int) -> bool:
    first = torchring.init(timeout_seconds=10.0)
    return first is torchring.init() is torchring.init("gloo") is default_world()


def test_a_second_init_returns_the_same_world() -> None:
    assert run_ranks(_init_twice, 2) == [True, True]


def _cycles(rank: int, size: int, own_group: bool) -> Any:
    if own_group:
        dist.init_process_group("gloo")
    sums, fds = [], []
    for turn in range(5):
        assert not torchring.is_initialized()
        torchring.init(timeout_seconds=10.0)
        sums.append(float(torchring.all_reduce(torch.tensor(rank + turn + 0.0), "sum")))
        torchring.shutdown()
        if turn in (1, 4):
            gc.collect()
            fds.append(count_open_fds())
    if own_group:
        dist.destroy_process_group()
    return sums, fds[1] - fds[0]


@pytest.mark.parametrize("own_group", [False, True])
@pytest.mark.parametrize("own", [False, True], ids=["hosted store", "store of rank 0"])
def test_leaving_and_coming_back(own: bool, own_group: bool) -> None:
    for sums, leaked in run_ranks(_cycles, 3, own_group, env=own_store() if own else {}):
        assert sums == [3.0, 6.0, 9.0, 12.0, 15.0]
        assert leaked <= 0


# ---- the engine between hosts


def _backends(rank: int, size: int) -> str:
    with pytest.raises(TopologyError, match="different backends: 'gloo' on rank 0, 'mpi' on rank 1") as caught:
        World(dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"])), rank, size, backend=("gloo", "mpi")[rank])
    return str(caught.value)


def test_ranks_with_different_backends() -> None:
    run_ranks(_backends, 2)


def _one_backend(rank: int, size: int) -> None:
    assert torchring.init(timeout_seconds=10.0).backend == "gloo"
    assert torchring.init("gloo").backend == "gloo"
    with pytest.raises(ValueError, match="open with backend='gloo', got 'mpi'"):
        torchring.init("mpi")


def test_the_backend_of_an_open_world_stays() -> None:
    run_ranks(_one_backend, 2)


def test_mpi_without_mpirun_is_refused(alone: None) -> None:
    with pytest.raises(TopologyError, match="needs a script that mpirun started"):
        torchring.init("mpi")
    assert not torchring.is_initialized()


def _mpi_under_torchrun(rank: int, size: int) -> str:
    sys.modules["mpi4py"] = None  # type: ignore[assignment]
    with pytest.raises(TopologyError) as caught:
        torchring.init("mpi", timeout_seconds=5.0)
    assert not torchring.is_initialized()
    return str(caught.value)


def test_mpi_without_mpi4py_is_refused() -> None:
    for message in run_ranks(_mpi_under_torchrun, 2):
        assert "need mpi4py" in message
        assert "init without backend='mpi'" in message


# ---- leaving without a word


def _ends_without_shutdown(rank: int, size: int, hosts: int, noticed: Path) -> Any:
    """Rank 1 is through, but lingers, as in MPI_Finalize, which waits for the others."""
    sys.modules.setdefault("mpi4py.MPI", types.ModuleType("mpi4py.MPI"))
    if hosts > 1:
        host_module._host_identity = lambda: f"host {rank}"
    torchring.init(timeout_seconds=60.0)
    torchring.barrier()
    if rank == 1:
        if (child := os.fork()) == 0:
            atexit._run_exitfuncs()  # a fork's end is not its parent's
            os._exit(0)
        os.waitpid(child, 0)
        torchring.barrier()
        atexit._run_exitfuncs()
        wait_until(noticed.exists, "rank 0 to notice")
        return None
    torchring.barrier()
    with pytest.raises(torchring.PeerLostError, match="rank 1"):  # long before the time-out
        torchring.all_reduce(torch.ones(1))
    noticed.touch()
    return None


@pytest.mark.parametrize("hosts", [1, 2])
def test_under_mpi_a_script_that_ends_leaves_the_world(hosts: int, tmp_path: Path) -> None:
    run_ranks(_ends_without_shutdown, 2, hosts, tmp_path / "noticed", deadline=40.0)


# ---- beside torch.distributed


def _beside(rank: int, size: int, first: str) -> Any:
    if first == "torchring":
        torchring.init(timeout_seconds=10.0)
        assert not dist.is_initialized(), "the script may still make its own"
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo")
        torchring.init(timeout_seconds=10.0, process_group=True)
    group = dist.distributed_c10d._get_default_group()
    sums = []
    for turn in range(3):
        theirs, ours = torch.tensor([rank + 1.0 + turn]), torch.tensor([10.0 * rank])
        work = dist.all_reduce(theirs, async_op=True)  # both under way at once
        torchring.all_reduce(ours, "sum")
        work.wait()
        sums.append((float(theirs), float(ours)))
    torchring.shutdown()
    assert dist.is_initialized(), "it was not ours to take down"
    assert dist.distributed_c10d._get_default_group() is group
    last = torch.ones(1)
    dist.all_reduce(last)
    torchring.init(timeout_seconds=10.0)
    again = float(torchring.all_reduce(torch.ones(1), "sum"))
    torchring.shutdown()
    dist.destroy_process_group()
    return sums, float(last), again


@pytest.mark.parametrize("own", [False, True], ids=["hosted store", "store of rank 0"])
@pytest.mark.parametrize("first", ["torchring", "torch.distributed"])
def test_a_process_group_of_the_script_works_on(first: str, own: bool) -> None:
    for sums, last, again in run_ranks(_beside, 2, first, env=own_store() if own else {}):
        assert sums == [(3.0, 10.0), (5.0, 10.0), (7.0, 10.0)]
        assert (last, again) == (2.0, 2.0)


def _group_without_launcher(rank: int, size: int, file: str) -> tuple[int, int, int, float]:
    dist.init_process_group("gloo", store=dist.FileStore(file, size), rank=rank, world_size=size)
    result = torchring.rank(), torchring.size(), torchring.local_rank()
    total = float(torchring.all_reduce(torch.tensor(rank + 1.0), "sum"))
    torchring.shutdown()
    dist.destroy_process_group()
    return *result, total


def test_an_existing_process_group_is_enough(tmp_path: Path) -> None:
    """No launcher's variables: rank, size and store are those of the group."""
    results = run_ranks(_group_without_launcher, 2, str(tmp_path / "store"), launcher_env=False)
    assert results == [(0, 2, 0, 3.0), (1, 2, 1, 3.0)]


# ---- worlds that do not come to be


def _told_another_size(rank: int, size: int) -> Any:
    if rank == 0:
        os.environ["WORLD_SIZE"] = "3"
    started = time.monotonic()
    with pytest.raises(TopologyError, match=r"WORLD_SIZE|world of") as caught:
        torchring.init(timeout_seconds=20.0)
    assert not torchring.is_initialized()
    return time.monotonic() - started, str(caught.value)


def test_different_world_sizes_are_an_error_on_every_rank_at_once() -> None:
    for seconds, message in run_ranks(_told_another_size, 2):
        assert seconds < patient(3.0)
        assert "2" in message
        assert "3" in message


def _absent(rank: int, size: int, absent: int) -> Any:
    if rank == absent:
        return None
    started = time.monotonic()
    with pytest.raises(PeerTimeoutError, match=f"rank {absent}") as caught:
        torchring.init(timeout_seconds=1.0)
    assert not torchring.is_initialized()
    return caught.value.peers, caught.value.rank, time.monotonic() - started


@pytest.mark.parametrize("absent", [0, 2])
def test_a_rank_that_never_shows_up_is_named(absent: int) -> None:
    results = run_ranks(_absent, 3, absent)
    for rank in {0, 1, 2} - {absent}:
        peers, who, seconds = results[rank]
        assert (peers, who) == ((absent,), rank)
        assert 0.9 < seconds < patient(4.0)


def _no_store(rank: int, size: int) -> Any:
    started = time.monotonic()
    with pytest.raises((TopologyError, PeerTimeoutError), match="MASTER_ADDR") as caught:
        torchring.init(timeout_seconds=1.0)
    return time.monotonic() - started, str(caught.value), os.environ["MASTER_PORT"]


def test_a_store_that_cannot_be_reached_is_named() -> None:
    env = {**own_store(), "RANK": "1", "WORLD_SIZE": "2"}  # nobody is rank 0
    ((seconds, message, port),) = run_ranks(_no_store, 1, env=env)
    assert seconds < 10.0
    assert port in message


def _incomplete(rank: int, size: int) -> str:
    del os.environ["MASTER_ADDR"]
    with pytest.raises(TopologyError, match="MASTER_ADDR") as caught:
        torchring.all_reduce(torch.ones(1))
    assert not torchring.is_initialized()
    return str(caught.value)


def test_an_incomplete_environment_is_refused_with_a_way_out() -> None:
    for message in run_ranks(_incomplete, 2):
        assert "torchrun" in message


def _late_and_again(rank: int, size: int, file: str) -> float:
    """Rank 1 comes too late for the first try of all, and all try again, as one does after an error."""
    if rank == 1:
        while not Path(file).exists():
            time.sleep(0.01)
        with pytest.raises((PeerTimeoutError, TopologyError, torchring.PeerLostError)):
            torchring.init(timeout_seconds=1.0)
    else:
        with pytest.raises(PeerTimeoutError):
            torchring.init(timeout_seconds=0.5)
        Path(file).touch()
        time.sleep(2.5)
    torchring.shutdown()
    torchring.init(timeout_seconds=10.0)
    return float(torchring.all_reduce(torch.ones(1), "sum"))


def test_all_may_try_again_after_a_time_out(tmp_path: Path) -> None:
    assert run_ranks(_late_and_again, 2, str(tmp_path / "late")) == [2.0, 2.0]


# ---- a World by itself


def test_closing_calls_back_the_latest_first() -> None:
    calls: list[int] = []
    world = World(None, 0, 1)
    assert world.is_open
    for i in range(3):
        world.on_close(functools.partial(calls.append, i))
    world.close()
    world.close()
    assert calls == [2, 1, 0]
    assert not world.is_open


def test_stream_names_are_new_every_time() -> None:
    world = World(None, 0, 1)
    names = [world.next_channel_name() for _ in range(3)]
    assert len(set(names)) == 3
    assert names == [World(None, 0, 1).next_channel_name(), *names[1:]], "and the same on every rank"


def test_what_is_shared_is_opened_once_and_forgotten_at_the_end() -> None:
    opened: list[World] = []

    def slowly(world: World) -> object:
        opened.append(world)
        time.sleep(0.05)
        return object()

    world, other = World(None, 0, 1), World(None, 0, 1)
    found: list[object] = []
    threads = [threading.Thread(target=lambda: found.append(world.shared(slowly))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, found))) == 1
    assert opened == [world]
    assert world.shared(list_of_ranks) == [0]
    assert other.shared(slowly) is not found[0]
    world.close()
    assert world.shared(slowly) is not found[0]
    other.close()


def list_of_ranks(world: World) -> list[int]:
    return [world.rank]


def test_what_cannot_be_opened_is_tried_again() -> None:
    world, attempts = World(None, 0, 1), []

    def fails_once(world: World) -> str:
        attempts.append(world)
        if len(attempts) == 1:
            raise OSError("not yet")
        return "open"

    with pytest.raises(OSError, match="not yet"):
        world.shared(fails_once)
    assert world.shared(fails_once) == "open"
    world.close()


def test_an_accelerator_that_is_not_used_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("xpu"))
    with pytest.warns(RuntimeWarning, match="does not use this machine's xpu"):
        assert torchring.device() == torch.device("cpu")
