"""Joining and leaving: sizes, hosts, other people's process groups, ranks that do not come, again and again."""

import atexit
import gc
import math
import os
import re
import sys
import time
import types
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import torchring
from tests.support.checks import logged
from tests.support.commands import free_port, run_python
from tests.support.harness import count_open_fds, patient, ranks, run_ranks, run_threads, wait_until
from torchring.default_world import default_world
from torchring.errors import PeerLostError, PeerTimeoutError, TopologyError
from torchring.memory import host as host_module
from torchring.rendezvous.environment import JOB, PARENT
from torchring.world import World


@pytest.fixture
def port() -> str:
    return str(free_port())


def _as_under_mpirun(port: str) -> None:
    """Or srun, where no launcher hosts the store and rank 0 has to."""
    del os.environ["TORCHELASTIC_USE_AGENT_STORE"]
    os.environ["MASTER_PORT"] = port


on_both_stores = pytest.mark.parametrize("is_hosted", [True, False], ids=["hosted store", "store of rank 0"])


@ranks(1, run_ranks, launcher_env=False)
def test_without_a_launcher_it_is_a_world_of_one() -> None:
    assert not torchring.is_initialized()
    assert (torchring.rank(), torchring.size(), torchring.local_rank(), torchring.local_size()) == (0, 1, 0, 1)
    assert torchring.is_initialized(), "who shares its memory is known when all have met"
    assert (torchring.node_rank(), torchring.num_nodes(), torchring.device()) == (0, 1, torch.device("cpu"))
    assert torchring.init() is torchring.init(process_group=True) is default_world()
    assert dist.get_world_size() == 1
    assert torchring.all_reduce(torch.tensor([2.0])).tolist() == [2.0]
    torchring.shutdown()
    torchring.shutdown()
    assert not torchring.is_initialized()
    assert not dist.is_initialized()
    assert len(default_world().hosts) == 1


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


@ranks(2, run_ranks)
def test_a_process_that_a_rank_starts_knows_its_rank_but_does_not_take_part(rank: int) -> None:
    """As a DataLoader's worker that is spawned, or any other program that inherits the rank's environment."""
    assert (torchring.rank(), torchring.size(), torchring.local_rank()) == (rank, 2, rank)
    assert not torchring.is_initialized(), "nobody is met for that"
    torchring.init()
    if rank == 1:  # only one rank has one: it must not wait for others like it
        child = run_python("-c", _CHILD, seconds=50.0)
        facts, of_spawn = child.stdout.splitlines()
        assert facts == "1 2 1 False"
        assert "is a worker that rank 1 has started by spawn or forkserver" in of_spawn
        assert 'Put what the script does under `if __name__ == "__main__":`' in of_spawn
        said = r"TopologyError: this process .* was started by rank 1 .* TORCHRING_LAUNCHER=none"
        assert re.search(said, child.stderr)
    torchring.barrier()  # in which the child must not have taken this rank's place
    torchring.shutdown()
    assert PARENT not in os.environ, "after shutdown() children may be ranks"


class BarrierTaskContext:
    """Spark's and Ray's, as far as torchring looks at them."""

    def getTaskInfos(self) -> list[int]:
        return [0, 1]

    def partitionId(self) -> int:
        return 1


def _spark(task: Any) -> dict[str, Any]:
    of_task = types.SimpleNamespace(get=lambda: task)
    return {"pyspark": types.SimpleNamespace(BarrierTaskContext=BarrierTaskContext, TaskContext=of_task)}


def _ray() -> dict[str, Any]:
    context = types.SimpleNamespace(worker=types.SimpleNamespace(mode=1))
    ray = types.SimpleNamespace(WORKER_MODE=1, is_initialized=lambda: True, get_runtime_context=lambda: context)
    return {"ray": ray}


@pytest.mark.parametrize(
    ("kind", "environ", "expected"),
    [
        ("barrier", {}, r".*task 1 of 2 of a Spark barrier stage.*torchring\.spark\.run"),
        ("task", {}, "this task of Spark, of partition 3, trains alone"),
        ("ray", {}, r"this worker of Ray trains alone.*torchring\.ray\.run or ray\.train\.torch\.TorchTrainer"),
        ("", {"SLURM_NTASKS": "4"}, r"this process trains alone, although its Slurm job has 4 tasks \(SLURM_NTASKS\)"),
    ],
)
@ranks(1, run_ranks, launcher_env=False)
def test_workers_of_frameworks_do_not_train_alone_in_silence(kind: str, environ: dict[str, str], expected: str) -> None:
    if kind in ("barrier", "task"):
        task = BarrierTaskContext() if kind == "barrier" else types.SimpleNamespace(partitionId=lambda: 3)
        sys.modules.update(_spark(task))
    sys.modules.update(_ray() if kind == "ray" else {})
    os.environ |= environ
    with logged() as said:
        if kind == "barrier":
            with pytest.raises(TopologyError) as caught:
                torchring.init()
            said.append(str(caught.value))
        else:
            torchring.init()
            torchring.shutdown()
        os.environ["TORCHRING_LAUNCHER"] = "none"  # it is meant
        torchring.init()
    (text,) = said
    assert re.match(expected, text)


@ranks(1, run_ranks)
def test_a_world_of_one_is_left_before_it_is_one_of_several() -> None:
    """A notebook that asked torchring something first, and then starts ranks or makes a process group."""
    launched = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    torchring.init()
    child = os.fork()
    if child == 0:
        os.environ.update(launched)
        os._exit(10 * torchring.rank() + torchring.size())
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 12
    os.environ.update(launched)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    for join in (torchring.init, lambda: torchring.wrap(optimizer), torchring.barrier):
        said = r"(?=.*rank 1 of 2 by now)(?=.*train alone)(?=.*torchring\.shutdown\(\))"
        with pytest.raises(TopologyError, match=said):
            join()  # type: ignore[operator]


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


@pytest.mark.parametrize("before", [torchring.init, torchring.barrier])
@ranks(2, run_ranks)
def test_a_collective_of_one_rank_at_the_end_is_named(before: Any, rank: int) -> None:
    before()
    if rank == 0:
        with pytest.raises(PeerLostError) as caught:
            torchring.all_reduce(torch.ones(1))
        message = str(caught.value)
        assert "rank 1 stopped: its script had ended" in message
        assert "in all_reduce(), which every rank has to call equally often. Is the call in an `if" in message
        assert "DistributedSampler" not in message


@pytest.mark.parametrize(
    ("option", "value", "error", "said"),
    [
        *[("backend", value, ValueError, "'auto', 'gloo', 'mpi'") for value in ("nccl", "MPI", None)],
        *[("timeout_seconds", value, ValueError, "timeout_seconds") for value in (0, -1, math.nan, -math.inf)],
        *[("timeout_seconds", value, (TypeError, ValueError), None) for value in ("60", [60])],
        *[("stall_warning_seconds", value, ValueError, "stall_warning") for value in (-1.0, math.nan, math.inf)],
        ("backend", "mpi", TopologyError, "needs a script that mpirun started"),
    ],
)
@ranks(1, run_ranks, launcher_env=False)
def test_wrong_options_of_init(option: str, value: Any, error: Any, said: str | None) -> None:
    with pytest.raises(error, match=said):
        torchring.init(**{option: value})
    assert not torchring.is_initialized()


@on_both_stores
@pytest.mark.parametrize(
    ("local", "hosts"), [(None, ((0, 1, 2, 3),)), (None, ((0, 1), (2, 3))), ("7", ((0, 2), (1, 3)))]
)
@ranks(4, run_ranks)
def test_where_a_rank_is(
    rank: int, is_hosted: bool, local: str | None, hosts: tuple[tuple[int, ...], ...], port: str
) -> None:
    """The local rank is the launcher's, if it says one."""
    if not is_hosted:
        _as_under_mpirun(port)
    del os.environ["LOCAL_RANK"]
    os.environ |= {"LOCAL_RANK": local} if local else {}
    node = next(i for i, members in enumerate(hosts) if rank in members)
    host_module._host_identity = lambda: f"host {node}"
    torchring.init(timeout_seconds=10.0)
    assert (torchring.rank(), torchring.size(), torchring.local_size()) == (rank, 4, len(hosts[node]))
    assert torchring.local_rank() == (int(local) if local else hosts[node].index(rank))
    assert (torchring.node_rank(), torchring.num_nodes(), torchring.device()) == (node, len(hosts), torch.device("cpu"))
    assert (default_world().hosts, default_world().shares_memory) == (hosts, len(hosts) == 1)
    assert float(torchring.all_reduce(torch.tensor(float(rank)), "sum")) == 6.0


def _join(store: dist.Store, rank: int, size: int, job: str = "") -> str:
    try:
        World(store, rank, size, timeout_seconds=50.0, job=job).close()
    except TopologyError as error:
        return error.message
    return "joined"


def test_a_rank_that_is_there_twice_is_named_to_all() -> None:
    """Rather than the one that is missing."""
    for message in run_threads(lambda index, _, store: _join(store, min(index, 1), 3), 3):
        assert re.search(rf"two processes were started as rank 1 of 3: pid {os.getpid()} on \S+, and pid", message)


def test_who_does_not_belong_to_a_world_is_turned_away_and_does_not_break_it() -> None:
    def body(index: int, _: int, store: dist.Store) -> None:
        if index == 2:
            assert "rank 1 of job b has come to the store of job a" in _join(store, 1, 2, "b")
            wait_until(lambda: store.check(["open"]), "the others to meet")
            assert "rank 1 was started for a world of 3" in _join(store, 1, 3)
            assert "two processes were started as rank 1 of 2" in _join(store, 1, 2)  # of a launcher without names
            store.set("tried", "")
            return
        world = World(store, index, 2, timeout_seconds=50.0, job="a")
        world.rendezvous.fetch("tried", 0)
        world.rendezvous.all_gather("later", b"")
        world.close()

    run_threads(body, 3)


@pytest.mark.parametrize(("own_group", "is_hosted"), [(False, False), (True, True)])
@ranks(3, run_ranks)
def test_leaving_and_coming_back(rank: int, own_group: bool, is_hosted: bool, port: str) -> None:
    if not is_hosted:
        _as_under_mpirun(port)
    if own_group:
        dist.init_process_group("gloo")
    fds = []
    for turn in range(5):
        assert not torchring.is_initialized()
        assert torchring.init(timeout_seconds=10.0) is torchring.init() is torchring.init("gloo") is default_world()
        with pytest.raises(ValueError, match="open with backend='gloo', got 'mpi'"):
            torchring.init("mpi")
        assert float(torchring.all_reduce(torch.tensor(rank + turn + 0.0), "sum")) == 3.0 * (turn + 1)
        torchring.shutdown()
        if turn in (1, 4):
            gc.collect()
            fds.append(count_open_fds())
    if own_group:
        dist.destroy_process_group()
    assert fds[1] <= fds[0]
    assert "memfd:torchring" not in Path("/proc/self/maps").read_text()


@ranks(2, run_ranks)
def test_ranks_with_different_backends(rank: int) -> None:
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]))
    with pytest.raises(TopologyError, match="different backends: 'gloo' on rank 0, 'mpi' on rank 1"):
        World(store, rank, 2, backend=("gloo", "mpi")[rank])


@ranks(2, run_ranks)
def test_mpi_without_mpi4py_is_refused() -> None:
    sys.modules["mpi4py"] = None  # type: ignore[assignment]
    with pytest.raises(TopologyError, match=r"(?=.*need mpi4py)(?=.*init without backend='mpi')"):
        torchring.init("mpi", timeout_seconds=5.0)
    assert not torchring.is_initialized()


@pytest.mark.parametrize("hosts", [1, 2])
@ranks(2, run_ranks, deadline=40.0)
def test_under_mpi_a_script_that_ends_leaves_the_world(rank: int, hosts: int, tmp_path: Path) -> None:
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
        wait_until((tmp_path / "noticed").exists, "rank 0 to notice")
        return
    torchring.barrier()
    with pytest.raises(PeerLostError, match="rank 1"):  # long before the time-out
        torchring.all_reduce(torch.ones(1))
    (tmp_path / "noticed").touch()


@ranks(2, run_ranks)
def test_ranks_that_share_a_gpu_get_a_process_group_over_gloo(rank: int) -> None:
    """NCCL refuses them. Ranks with a GPU each ask for it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "is_nccl_available", lambda: True)
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "device_count", lambda: 1)
        patch.setattr(torch.cuda, "get_device_properties", lambda _: types.SimpleNamespace(uuid="the GPU"))
        torchring.init(process_group=True)
        assert dist.get_backend() == "gloo"
        torchring.shutdown()
        patch.setattr(torch.cuda, "get_device_properties", lambda _: types.SimpleNamespace(uuid=f"GPU {rank}"))
        patch.setattr(dist, "init_process_group", mock.Mock(side_effect=RuntimeError))
        with pytest.raises(RuntimeError):
            torchring.init(process_group=True)
        assert dist.init_process_group.call_args.args == ("cpu:gloo,cuda:nccl",)  # type: ignore[attr-defined]


@on_both_stores
@pytest.mark.parametrize("first", ["torchring", "torch.distributed"])
@ranks(2, run_ranks)
def test_a_process_group_of_the_script_works_on(rank: int, first: str, is_hosted: bool, port: str) -> None:
    if not is_hosted:
        _as_under_mpirun(port)
    if first == "torchring":
        torchring.init(timeout_seconds=10.0)
        assert not dist.is_initialized(), "the script may still make its own"
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo")
        torchring.init(timeout_seconds=10.0, process_group=True)
    group = dist.distributed_c10d._get_default_group()
    for turn in range(3):
        theirs, ours = torch.tensor([rank + 1.0 + turn]), torch.tensor([10.0 * rank])
        work = dist.all_reduce(theirs, async_op=True)  # both under way at once
        torchring.all_reduce(ours, "sum")
        work.wait()
        assert (float(theirs), float(ours)) == (3.0 + 2 * turn, 10.0)
    torchring.shutdown()
    assert dist.is_initialized(), "it was not ours to take down"
    assert dist.distributed_c10d._get_default_group() is group
    last = torch.ones(1)
    dist.all_reduce(last)
    torchring.init(timeout_seconds=10.0)
    assert float(torchring.all_reduce(torch.ones(1), "sum")) == float(last) == 2.0
    torchring.shutdown()
    dist.destroy_process_group()


@ranks(2, run_ranks, launcher_env=False)
def test_an_existing_process_group_is_enough(rank: int, tmp_path: Path) -> None:
    """No launcher's variables: rank, size and store are those of the group."""
    dist.init_process_group("gloo", store=dist.FileStore(str(tmp_path / "store"), 2), rank=rank, world_size=2)
    assert (torchring.rank(), torchring.size(), torchring.local_rank()) == (rank, 2, rank)
    assert float(torchring.all_reduce(torch.tensor(rank + 1.0), "sum")) == 3.0
    torchring.shutdown()
    dist.destroy_process_group()


@ranks(2, run_ranks)
def test_different_world_sizes_are_an_error_on_every_rank_at_once(rank: int) -> None:
    if rank == 0:
        os.environ["WORLD_SIZE"] = "3"
    started = time.monotonic()
    with pytest.raises(TopologyError, match=r"(?=.*(WORLD_SIZE|world of))(?=.*2)(?=.*3)"):
        torchring.init(timeout_seconds=20.0)
    assert not torchring.is_initialized()
    assert time.monotonic() - started < patient(3.0)


@pytest.mark.parametrize("absent", [0, 2])
@ranks(3, run_ranks)
def test_a_rank_that_never_shows_up_is_named(rank: int, absent: int, tmp_path: Path) -> None:
    if rank == absent:
        return
    (tmp_path / str(rank)).touch()
    # Starting may take longer than the time-out.
    wait_until(lambda: len(list(tmp_path.iterdir())) == 2, "the other one")
    started = time.monotonic()
    with pytest.raises(PeerTimeoutError, match=f"rank {absent}") as caught:
        torchring.init(timeout_seconds=1.5)
    assert not torchring.is_initialized()
    assert (caught.value.peers, caught.value.rank) == ((absent,), rank)
    assert 1.4 < time.monotonic() - started < patient(4.5)


@ranks(2)
def test_all_may_try_again_after_a_time_out(rank: int, tmp_path: Path) -> None:
    """Rank 1 comes too late for the first try of all, and all try again, as one does after an error."""
    if rank == 1:
        wait_until((tmp_path / "late").exists, "rank 0 to give up")
        with pytest.raises((PeerTimeoutError, TopologyError, PeerLostError)):
            torchring.init(timeout_seconds=1.0)
    else:
        with pytest.raises(PeerTimeoutError):
            torchring.init(timeout_seconds=0.5)
        (tmp_path / "late").touch()
        wait_until((tmp_path / "too late").exists, "rank 1 to give up")
    (tmp_path / "too late").touch()
    torchring.shutdown()
    torchring.init(timeout_seconds=10.0)
    assert float(torchring.all_reduce(torch.ones(1), "sum")) == 2.0


def test_an_accelerator_that_is_not_used_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("xpu"))
    with pytest.warns(RuntimeWarning, match="does not use this machine's xpu"):
        assert torchring.device() == torch.device("cpu")
