"""The harness must fail when a rank fails: each test here breaks something on purpose."""

import atexit
import contextlib
import functools
import gc
import inspect
import io
import itertools
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.support.grids import grid
from tests.support.harness import (
    LEFT_ON_PURPOSE,
    RanksFailed,
    count_open_fds,
    ranks,
    run_pooled,
    run_ranks,
    run_threads,
    wait_until,
)


def _sum_of_big_tensors(rank: int, world_size: int, scale: torch.Tensor) -> tuple[int, torch.Tensor]:
    time.sleep(0.05 * (world_size - rank))  # the last rank answers first
    dist.init_process_group("gloo")
    tensor = torch.full((100_000,), float(rank + 1)) * scale  # more than a pipe holds
    dist.all_reduce(tensor)
    dist.destroy_process_group()
    return rank, tensor


def test_results_come_in_rank_order_from_ranks_that_can_talk_through_torch_distributed() -> None:
    results = run_ranks(_sum_of_big_tensors, 3, torch.tensor(10.0))
    assert [(rank, tensor.unique().tolist()) for rank, tensor in results] == [(rank, [60.0]) for rank in range(3)]


def _environment(rank: int, world_size: int) -> dict[str, str | None]:
    names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "COLOUR", "HOME", "OMP_NUM_THREADS"]
    return {name: os.environ.get(name) for name in names} | {"threads": str(torch.get_num_threads())}


def test_ranks_get_the_launchers_environment_and_changes_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLOUR", "red")  # set after the fork server has started
    monkeypatch.setenv("RANK", "7")
    first, second = run_ranks(_environment, 2, env={"HOME": None})
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "COLOUR": "red", "HOME": None}
    common |= {"OMP_NUM_THREADS": "1", "threads": "1"}
    assert first == {"RANK": "0", "LOCAL_RANK": "0", **common}
    assert second == {"RANK": "1", "LOCAL_RANK": "1", **common}
    (result,) = run_ranks(_environment, 1, launcher_env=False)
    assert [result[name] for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "COLOUR")] == [None, None, None, "red"]


def _imported(rank: int, world_size: int) -> tuple[list[str], int]:
    return list(sys.modules), gc.get_freeze_count()


def test_ranks_find_imported_what_they_need() -> None:
    """Missing modules would be imported by each rank: several times what most tests take."""
    ((modules, num_frozen),) = run_ranks(_imported, 1)
    before = set(modules[: modules.index("tests.support.frozen")])  # what the server has imported
    assert {"torch._dynamo", "torchring.optimizer", "torchring.allreduce.direct", __name__} <= before
    assert num_frozen > 100_000


def _random(rank: int, world_size: int) -> float:
    return torch.rand(()).item()


# What rank 1 does
def _raise() -> None:
    raise LookupError("no such bucket: 17")


def _segfault_at_exit() -> None:
    atexit.register(lambda: time.sleep(0.3) or os.kill(os.getpid(), signal.SIGSEGV))


def _hang() -> None:
    threading.Thread(target=_side_thread_of_the_hang, daemon=True).start()
    time.sleep(1000)


def _side_thread_of_the_hang() -> None:
    time.sleep(1000)


def _fork() -> None:
    if os.fork() == 0:
        time.sleep(1000)


def _leave_many_things() -> None:
    from torchring.memory import host

    os.open("/dev/null", os.O_RDONLY)
    threading.Thread(target=time.sleep, args=(1000,), name="forgotten", daemon=True).start()
    host._host_identity = lambda: "another"
    signal.signal(signal.SIGALRM, lambda *_: None)
    atexit.register(print)
    torch.set_grad_enabled(False)
    torch.set_default_device("meta")
    torch.use_deterministic_algorithms(True)


def _count_otherwise(name: str) -> None:
    from torchring.meeting import meetings

    setattr(meetings, name, getattr(meetings, name) + 1)


_ACTS: dict[str, Callable[[], object]] = {
    "nothing": lambda: None,
    "exit 3": lambda: os._exit(3),
    "exit 0": lambda: sys.exit(0),
    "SIGKILL": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "SIGSEGV": lambda: os.kill(os.getpid(), signal.SIGSEGV),
    "segfault at exit": _segfault_at_exit,
    "raise": _raise,
    "return a lock": threading.Lock,
    "hang": _hang,
    "fork": _fork,
    "spawn": lambda: subprocess.Popen(["sleep", "1000"], start_new_session=True).pid,  # in no group of the rank's
    "leave many things": _leave_many_things,
    # By itself: it opens files, starts threads, and sets the excepthook.
    "process group": lambda: dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1),
    "worlds": lambda: _count_otherwise("num_worlds"),
    "groups": lambda: _count_otherwise("num_groups"),
}


def _act(rank: int, world_size: int, how: str) -> object:
    print("last words")
    return _ACTS[how]() if rank == 1 else None


@pytest.mark.parametrize(
    ("how", "expected", "said", "code"),
    [
        ("exit 3", {}, "exit code 3 before it returned a result", 3),
        ("exit 0", {}, "exit code 0 before it returned a result", 0),
        ("SIGKILL", {}, "SIGKILL before it returned a result", -9),
        ("SIGKILL", {1: -11}, "SIGKILL, expected SIGSEGV", -9),
        ("SIGSEGV", {}, "SIGSEGV before it returned a result", -11),
        ("segfault at exit", {}, "SIGSEGV after it returned a result", -11),
        ("nothing", {1: -9}, "exit code 0, expected SIGKILL", 0),
        ("raise", {}, "LookupError: no such bucket: 17", 1),
        ("return a lock", {}, "TypeError: the result, a lock, cannot be pickled", 1),
    ],
)
def test_every_other_ending_of_rank_1_fails(how: str, expected: dict[int, int], said: str, code: int) -> None:
    with pytest.raises(RanksFailed, match="_act: 1 of 2 ranks failed") as failure:
        run_ranks(_act, 2, how, expect_exit=expected)
    text = str(failure.value)
    assert f"rank 1: {said}" in text
    assert "rank 0: ok" in text
    assert text.count("last words") == 1  # of the rank that failed
    assert [(report.exit_code, report.failed) for report in failure.value.reports] == [(0, False), (code, True)]
    where = {"raise": "in _raise", "segfault at exit": "in <lambda>"}.get(how, "")
    assert where in failure.value.reports[1].traceback + failure.value.reports[1].output


def test_expected_endings_pass_and_give_none_and_what_cannot_be_run_is_refused() -> None:
    assert run_ranks(_random, 3, expect_exit={1: 0})[1] is None
    assert run_ranks(_act, 2, "SIGKILL", expect_exit={1: -9}) == [None, None]
    with pytest.raises(ValueError, match="there are 2"):
        run_ranks(_act, 2, "SIGKILL", expect_exit={2: -9})
    with pytest.raises(TypeError, match="module-level function"):
        run_ranks(lambda rank, world_size: None, 2)


def test_hang_is_ended_and_shows_the_stacks_of_all_threads() -> None:
    with pytest.raises(RanksFailed, match=r"rank 1: still running after \d+\.\d s, killed") as failure:
        run_ranks(_act, 2, "hang", deadline=0.5)
    assert [report.failed for report in failure.value.reports] == [False, True]
    assert "in _hang" in failure.value.reports[1].output
    assert "in _side_thread_of_the_hang" in failure.value.reports[1].output


def _wait_for_the_dead(rank: int, world_size: int) -> None:
    if rank == 0:
        raise RuntimeError("rank 0 gives up")
    time.sleep(1000)


def test_others_do_not_wait_for_the_deadline_once_a_rank_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.harness._PATIENCE", 0.3)
    with pytest.raises(RanksFailed, match="2 of 2 ranks failed") as failure:
        run_ranks(_wait_for_the_dead, 2, deadline=1000.0)
    assert "rank 0: RuntimeError: rank 0 gives up" in str(failure.value)
    assert "in _wait_for_the_dead" in failure.value.reports[1].output


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left on purpose does not vanish, however long one looks."""
    monkeypatch.setattr("tests.support.harness._SETTLE", 0.05)


@pytest.mark.parametrize("how", ["fork", "spawn"])
@pytest.mark.usefixtures("_impatient")
def test_leftover_grandchild_is_found_and_killed(how: str) -> None:
    with pytest.raises(RanksFailed, match="left behind: process ") as failure:
        run_ranks(_act, 2, how)
    assert [report.failed for report in failure.value.reports] == [False, False]
    (leftover,) = failure.value.leftovers
    assert not Path("/proc", leftover.split()[1]).exists()


def _leave_a_file(rank: int, world_size: int, folder: str | None, name: str) -> None:
    if rank == 1:
        Path(folder or os.environ["TMPDIR"], name).write_bytes(b"12345678")


@pytest.mark.usefixtures("_impatient")
def test_files_that_are_left_are_found_but_what_cuda_and_nccl_leave() -> None:
    """The ranks' TMPDIR goes with them."""
    for of in ("", "cuda.shm.", "nccl-"):
        file = Path("/dev/shm", f"{of}{LEFT_ON_PURPOSE}_{os.getpid()}")
        blamed = contextlib.nullcontext() if of else pytest.raises(RanksFailed, match=f"left behind: file {file}")
        try:
            with blamed:
                run_ranks(_leave_a_file, 2, "/dev/shm", file.name)
            run_ranks(_random, 1)  # and this one is clean
        finally:
            file.unlink()
    with pytest.raises(RanksFailed, match=r"left behind: file \S+/forgotten") as failure:
        run_ranks(_leave_a_file, 2, None, "forgotten")
    assert not Path(failure.value.leftovers[0].split()[1]).exists()


def test_runs_leak_nothing_in_this_process() -> None:
    run_ranks(_random, 2)
    before, threads_before = count_open_fds(), threading.active_count()
    with open("/dev/null"):
        assert count_open_fds() == before + 1
    for _ in range(2):
        run_ranks(_random, 2)
    assert count_open_fds() <= before
    assert threading.active_count() == threads_before


def _die_before_its_ranks(rank: int, world_size: int) -> None:
    folder = Path(os.environ["TMPDIR"])
    threading.Thread(target=run_ranks, args=(_act, 2, "hang")).start()
    wait_until(lambda: len(list(folder.glob("*/rank*.log"))) == 2, "ranks")
    shutil.rmtree(folder)
    folder.mkdir()
    os._exit(0)


@pytest.mark.grid
def test_ranks_end_when_the_tests_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.support.harness._SETTLE", 10.0)  # the fork server needs a second to take itself down
    run_ranks(_die_before_its_ranks, 1, expect_exit={0: 0})


def _pooled(rank: int, world_size: int, how: str) -> int:
    import torchring

    torchring.init()
    assert torchring.all_gather(torch.tensor([rank])).tolist() == list(range(world_size))
    print("seen in", os.environ["TMPDIR"])
    _act(rank, world_size, how)
    return os.getpid()


def test_pooled_ranks_stay_alive_and_draw_the_same_numbers() -> None:
    first = run_pooled(_pooled, 2, "nothing")
    assert run_pooled(_pooled, 2, "nothing") == first
    assert len({*first, os.getpid()}) == 3
    assert run_pooled(_random, 2) == run_pooled(_random, 2) == run_ranks(_random, 2)
    assert len(set(run_pooled(_random, 2))) == 2
    assert run_pooled(_environment, 2) == run_ranks(_environment, 2)


_of_grid = functools.partial(pytest.param, marks=pytest.mark.grid)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        (
            "leave many things",
            r"rank 1: left behind: threads .*forgotten.*; native threads 2.*; open files .*; exit functions .*; "
            r"signal handlers .*; settings .*; default device .*; determinism 2, was 0; "
            r"replaced \{'torchring\.memory\.host\._host_identity': ",
        ),
        ("hang", r"rank 1: still running after \d+\.\d s, killed"),
        _of_grid("process group", "rank 1: left behind: .*process group True, was False"),
        _of_grid("worlds", r"left behind: other numbers of worlds and groups on the ranks: \[\(\d, 0\), \(\d, 0\)\]"),
        _of_grid("groups", r"left behind: other numbers of worlds and groups on the ranks: \[\(\d, 0\), \(\d, 1\)\]"),
        _of_grid("exit 3", "rank 1: exit code 3 before it returned a result"),
        _of_grid("spawn", r"left behind: process \d+ \(sleep 1000\), killed"),
        _of_grid("raise", "rank 1: LookupError: no such bucket: 17"),
    ],
)
def test_what_a_pooled_rank_leaves_is_a_failure_and_the_pool_is_replaced(how: str, said: str) -> None:
    before = run_pooled(_pooled, 2, "nothing")
    with pytest.raises(RanksFailed, match=said) as failure:
        run_pooled(_pooled, 2, how, deadline=0.5 if how == "hang" else 60.0)
    assert str(failure.value).count("seen in") in (0, 1)  # failed ranks' output, and of this call alone
    after = run_pooled(_pooled, 2, "nothing")
    assert not set(after) & set(before)
    assert not any(Path("/proc", str(pid)).exists() for pid in before)


@ranks(2)
def _body(rank: int, world_size: int, monkeypatch: pytest.MonkeyPatch, offset: int, tmp_path: Path) -> None:
    from torchring.memory import host

    monkeypatch.setattr(host, "_host_identity", lambda: "another")
    (tmp_path / f"rank{rank}").write_text(f"{host._host_identity()} {offset + rank} of {world_size} {os.getpid()}")
    assert offset < 200


def test_the_body_of_a_test_runs_on_pooled_ranks_with_the_parameters_of_the_test(tmp_path: Path) -> None:
    assert list(inspect.signature(_body).parameters) == ["offset", "tmp_path"]  # what pytest passes
    _body(offset=100, tmp_path=tmp_path)
    said = [(tmp_path / f"rank{rank}").read_text().rpartition(" ") for rank in range(2)]
    assert [text for text, *_ in said] == ["another 100 of 2", "another 101 of 2"]
    assert {int(pid) for *_, pid in said}.isdisjoint({os.getpid()})
    with pytest.raises(RanksFailed, match="_body: 2 of 2 ranks failed") as failure:
        _body(offset=200, tmp_path=tmp_path)
    assert re.search(r"assert offset < 200\n(.*\n)*    offset = 200\n", str(failure.value))


def _in_thread(rank: int, world_size: int, store: dist.Store, act: Callable[[], object]) -> str:
    store.set(f"word{rank}", f"hello{rank}")
    if rank == 1:
        act()
    return store.get(f"word{(rank + 1) % world_size}").decode()


def test_threads_share_a_store_and_return_in_rank_order() -> None:
    assert run_threads(_in_thread, 3, lambda: None) == ["hello1", "hello2", "hello0"]


def test_exception_and_hang_in_a_thread_arrive_with_its_stack() -> None:
    with pytest.raises(RanksFailed, match=r"1 of 2 ranks failed\nrank 1: LookupError: no such bucket: 17") as failure:
        run_threads(_in_thread, 2, _raise)
    assert "in _raise" in failure.value.reports[1].traceback
    released = threading.Event()
    try:
        with pytest.raises(RanksFailed, match=r"1 of 2 ranks failed\nrank 1: still running") as failure:
            run_threads(_in_thread, 2, released.wait, deadline=0.1)
    finally:
        released.set()
    assert "in _in_thread" in failure.value.reports[1].traceback


@pytest.mark.parametrize(("expect_gpu", "outcome"), [("0", "3 skipped in"), ("1", "1 skipped, 2 errors in")])
def test_skipped_gpu_test_fails_where_a_gpu_is_expected(tmp_path: Path, expect_gpu: str, outcome: str) -> None:
    shutil.copy(Path(__file__).resolve().parents[1] / "conftest.py", tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = gpu\n")
    (tmp_path / "test_it.py").write_text(
        "import pytest\n"
        "@pytest.mark.gpu\ndef test_no_device(): pass\n"
        "@pytest.mark.gpu\ndef test_skips(): pytest.skip('no')\n"
        "def test_other(): pytest.skip('this may')\n"
    )
    environ = {"TORCHRING_EXPECT_GPU": expect_gpu, "CUDA_VISIBLE_DEVICES": ""}
    (output,) = run_ranks(_run_pytest, 1, str(tmp_path), env=environ)
    assert outcome in output


def _run_pytest(rank: int, world_size: int, folder: str) -> str:
    os.chdir(folder)
    with contextlib.redirect_stdout(io.StringIO()) as output:
        pytest.main(["-q", "-p", "no:cacheprovider", folder])
    return output.getvalue()


@pytest.mark.parametrize("sizes", [(4, 4, 2), (5, 3, 4), (2, 2, 4)])
def test_of_a_grid_every_pair_of_values_is_kept(sizes: tuple[int, ...]) -> None:
    points = grid("a, b, c", *map(range, sizes)).args[1]
    kept = [point.values for point in points if not point.marks]
    assert len(points) == math.prod(sizes)
    assert len(kept) == sizes[0] * max(sizes[1:])
    for a, b in itertools.combinations(range(3), 2):
        assert len({(values[a], values[b]) for values in kept}) == sizes[a] * sizes[b]
