"""Horovod's variables and options: settings, horovodrun's command line, run(func), what its launchers set."""

import logging
import os
import pickle
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import run_python
from torchring.errors import TopologyError
from torchring.horovod import runner, settings
from torchring.horovod.settings import Settings, read_settings
from torchring.launch.hosts import Host
from torchring.launch.output import OutputOptions
from torchring.rendezvous.environment import LaunchEnvironment, read_environment

ROOT = Path(__file__).resolve().parents[2]

# ---- settings


def test_each_variable_reaches_its_setting() -> None:
    environ = {
        "HOROVOD_FUSION_THRESHOLD": "0",
        "HOROVOD_CYCLE_TIME": "2.5",
        "HOROVOD_TIMELINE": "/tmp/t.json",
        "HOROVOD_TIMELINE_MARK_CYCLES": "1",
        "HOROVOD_STALL_CHECK_DISABLE": "1",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "2",
        "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "5",
        "HOROVOD_DYNAMIC_PROCESS_SETS": "true",
        "HOROVOD_LOG_LEVEL": "error",
        "HOROVOD_GLOO_TIMEOUT_SECONDS": "7",
    }
    expected = Settings(0, 0.0025, "/tmp/t.json", True, False, 2.0, 5.0, True, logging.ERROR, 7.0)
    assert read_settings(environ) == expected
    assert read_settings({**dict.fromkeys(environ, " "), "PATH": "/bin"}) == Settings()
    assert read_settings({"HOROVOD_TIMELINE": "dynamic"}).timeline == settings.DYNAMIC_TIMELINE


@pytest.mark.parametrize(
    "setting",
    [
        *("FUSION_THRESHOLD=64MB", "FUSION_THRESHOLD=-1", "CYCLE_TIME=nan", "CYCLE_TIME=-1", "LOG_LEVEL=loud"),
        *("TIMELINE_MARK_CYCLES=perhaps", "STALL_CHECK_TIME_SECONDS=1m", "GLOO_TIMEOUT_SECONDS=0"),
    ],
)
def test_a_bad_value_is_named(setting: str) -> None:
    key, _, value = f"HOROVOD_{setting}".partition("=")
    with pytest.raises(ValueError, match=rf"{key} needs .*, got '{value}'"):
        read_settings({key: value})


def test_what_means_nothing_is_named_once_in_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settings, "_warned_of", set())
    ours = {"HOROVOD_CYCLE_TIME": "1", "HOROVOD_RANK": "0", "HOROVOD_GLOO_IFACE": "lo", "HOROVOD_WITH_PYTORCH": "1"}
    off = {"HOROVOD_HIERARCHICAL_ALLREDUCE": "0"}
    with pytest.warns(UserWarning, match="^HOROVOD_AUTOTUNE, HOROVOD_CACHE_CAPACITY mean nothing"):
        read_settings({**ours, **off, "HOROVOD_CACHE_CAPACITY": "5", "HOROVOD_AUTOTUNE": "1"})
    with pytest.warns(UserWarning, match="^HOROVOD_TYPO means nothing"):
        read_settings({"HOROVOD_AUTOTUNE": "1", "HOROVOD_TYPO": "1"})


def test_a_script_that_is_not_edited(tmp_path: Path) -> None:
    code = "import os, horovod.common.exceptions as e\n"
    code += "print(os.environ['RANK'], e.__name__, os.environ['HOROVOD_CYCLE_TIME'])"
    (tmp_path / "train.py").write_text(code)
    line = "-m torchring run --horovod -np 1 --cycle-time-ms 2 python train.py"
    ran = run_python(*line.split(), folder=tmp_path, seconds=100.0)
    assert (ran.returncode, ran.stdout) == (0, "0 torchring.horovod.exceptions 2\n"), ran.stderr


# run(func)
@pytest.fixture
def processes(by_value: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """Stands in for the launcher: runs rank after rank, without waiting for torch to be imported in each."""
    seen: list[dict[str, Any]] = []
    for name in ("torchring", "pickle", "hmac"):  # no rank may take these for its own modules
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from the working directory')")
    monkeypatch.chdir(tmp_path)

    def start(command: list[str], num_proc: int, hosts: Any, env: dict[str, str], **options: Any) -> int:
        seen.append({"num_proc": num_proc, "folder": Path(command[-1]), **options})
        code = 0
        for rank in range(num_proc):
            ranks = {"RANK": str(rank), "WORLD_SIZE": str(num_proc), "LOCAL_RANK": str(rank), "PYTHONPATH": str(ROOT)}
            environ = {**os.environ, **env, **ranks, **MASTER}
            ran = run_python(*command, env=environ, seconds=100.0)
            code = code or ran.returncode if ran.returncode >= 0 else 128 - ran.returncode
        return code

    monkeypatch.setattr(runner, "start", start)
    return seen


def test_results_come_in_the_order_of_ranks(processes: list[dict[str, Any]], tmp_path: Path) -> None:
    offset = 10

    def work(factor: int, *, power: int) -> tuple[int, int]:  # cloudpickle sends what is inside a function, too
        return offset + int(os.environ["RANK"]), factor**power

    assert runner.run(work, (3,), {"power": 2}, np=2) == [(10, 9), (11, 9)]
    (started,) = processes
    assert started["num_proc"] == 2
    assert not started["folder"].exists()


def fail_on_rank_1() -> None:
    if os.environ["RANK"] == "1":
        raise KeyError("batch")


def leave_with(code: int) -> None:
    os.kill(os.getpid(), 9) if code == 9 else sys.exit(code)


@pytest.fixture
def by_value() -> Iterator[None]:
    """The functions above are sent as code: no process imports this module, and torch with it."""
    cloudpickle = pytest.importorskip("cloudpickle")
    cloudpickle.register_pickle_by_value(sys.modules[__name__])
    yield
    cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


def test_a_failure_names_the_rank_and_shows_its_traceback(processes: list[dict[str, Any]]) -> None:
    said = r"rank 1 of 2 failed:[\s\S]*fail_on_rank_1[\s\S]*KeyError: 'batch'"
    with pytest.raises(RuntimeError, match=said) as caught:
        runner.run(fail_on_rank_1, num_proc=2)
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(RuntimeError, match="SystemExit: 3"):
        runner.run(leave_with, (3,))
    with pytest.warns(UserWarning, match="max_num_proc, start_timeout: no meaning"):
        assert runner.run(leave_with, (0,), start_timeout=5, max_num_proc=4) == [None]
    with pytest.raises(RuntimeError, match="rank 0 returned nothing, of 1 processes; they ended with signal 9"):
        runner.run(leave_with, (9,))


@pytest.mark.parametrize("forged", ["call", "result0", "failure0"])
def test_what_another_user_has_put_in_the_place_of_a_file_is_not_unpickled(
    forged: str, processes: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is in one that others can write to, who have put a folder of their own in its place."""
    through_processes = runner.start
    pickled = pickle.dumps((sys.path, pickle.dumps((print, ("unpickled",), {}))))

    def start(command: list[str], *arguments: Any, **options: Any) -> int:
        folder = Path(command[-1])
        code = 0 if forged == "call" else through_processes(command, *arguments, **options)
        folder.rename(f"{folder}-away")
        shutil.copytree(f"{folder}-away", folder)
        (folder / forged).unlink(missing_ok=True)
        (folder / forged).write_bytes(pickled)
        return through_processes(command, *arguments, **options) if forged == "call" else code

    monkeypatch.setattr(runner, "start", start)
    with pytest.raises(RuntimeError, match=f"{forged} was not written by this job: another user can write to"):
        runner.run(leave_with, (0,))


def test_where_and_how_the_processes_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[tuple[Any, ...]] = []

    def start(command: list[str], *arguments: Any, output: OutputOptions, ssh_options: list[str]) -> int:
        assert Path(command[-1]).stat().st_mode & 0o077 == 0  # pickles are read there
        assert arguments[2].pop(runner.JOB)
        seen.append((Path(command[-1]).parent, *arguments, output, ssh_options))
        return 3

    monkeypatch.setattr(runner, "start", start)
    monkeypatch.setattr(runner, "is_here", lambda name: name != "far")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RuntimeError, match=r"ranks 0, 1 returned nothing.* exit code 3"):
        runner.run(
            leave_with, np=2, hosts="near:1,far:1", ssh_port=7, network_interfaces="eth0", output_filename="logs"
        )
    sockets = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "eth0"}
    logs, hosts = OutputOptions(log_dir="logs"), [Host("near", 1), Host("far", 1)]
    assert seen == [(tmp_path, 2, hosts, sockets, logs, ["-p", "7"])]  # in a folder that they share


def test_run_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    def assert_refused(complaint: str, error: type[Exception] = ValueError, args: Any = (0,), **options: Any) -> None:
        with pytest.raises(error, match=complaint):
            runner.run(leave_with, args, **options)

    assert_refused("hosts or hostfile, not both", hosts="a:1", hostfile="f")
    assert_refused("host:slots", hosts="a:x")
    assert_refused("num_proc must be 1 or more, got 0", num_proc=0)
    assert_refused(r"cannot send leave_with and its arguments.*lock", args=(threading.Lock(),))
    assert_refused("host_discovery_script", NotImplementedError, host_discovery_script="./hosts")
    monkeypatch.setattr(runner.task, "has_cloudpickle", lambda: False)
    monkeypatch.setattr(leave_with, "__module__", "__main__")
    assert_refused(r"cannot send leave_with, .*pip install cloudpickle")


# ---- variables of Horovod's launchers

MASTER = {"MASTER_ADDR": "node7", "MASTER_PORT": "29500"}


def worker(rank: int, size: int, **more: str) -> dict[str, str]:
    """What Horovod's launchers set."""
    environ = {"RANK": rank, "LOCAL_RANK": rank, "SIZE": size, "LOCAL_SIZE": size}
    return {**{f"HOROVOD_{key}": str(value) for key, value in environ.items()}, **more}


def test_variables_of_horovod_by_hand() -> None:
    expected = LaunchEnvironment("the environment", 1, 2, 1, ("node7", 29500), False, is_one_host=True)
    assert read_environment({**worker(1, 2), **MASTER}) == expected
    assert read_environment(worker(0, 1)).size == 1
    assert not read_environment({**worker(1, 2), **MASTER, "HOROVOD_LOCAL_SIZE": "1"}).is_one_host
    # torchrun is inside horovodrun, and mpirun outside.
    torchrun = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", **MASTER}
    mpirun = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4"}
    launchers = worker(1, 2, HOROVOD_GLOO_RENDEZVOUS_ADDR="127.0.0.1", HOROVOD_HOSTNAME="localhost")
    assert read_environment({**launchers, **torchrun}).launcher == "torchrun"
    assert read_environment({**worker(1, 2), **MASTER, **mpirun}).rank == 1
    assert read_environment({**worker(1, 2), **torchrun, "TORCHRING_LAUNCHER": "horovodrun"}).rank == 1
    for environ in (launchers, {**launchers, **MASTER}, {**launchers, "HOROVOD_SIZE": "1", "HOROVOD_RANK": "0"}):
        with pytest.raises(TopologyError, match=r"Horovod's launcher started this process.*`torchring run --horovod`"):
            read_environment(environ)
