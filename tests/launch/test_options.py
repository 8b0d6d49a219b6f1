"""The command line of `torchring run`, with horovodrun's options and those of elastic jobs: what would be started."""

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from torchring import cli
from torchring.elastic.driver.host_list import Hosts
from torchring.elastic.driver.workers import UNLIMITED, Limits
from torchring.horovod.settings import Settings, read_settings
from torchring.launch.hosts import Host
from torchring.launch.jobs import host_job
from torchring.launch.output import OutputOptions

Started = list[dict[str, Any]]

TWO = [Host("a", 2), Host("b", 3)]
SOCKETS = {"GLOO_SOCKET_IFNAME": "eth0,eth1", "NCCL_SOCKET_IFNAME": "eth0,eth1"}


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    """What would have been started; exit code 7."""
    seen: Started = []

    def start(*arguments: Any, **options: Any) -> int:
        names = ("command", "num_proc", "hosts")
        seen.append({**dict(zip(names, arguments, strict=True)), **options})
        seen[-1]["env"].pop("PYTHONPATH", None)  # of --horovod
        return 7

    def start_elastic(command: Any, limits: Limits, hosts: Hosts, **_: Any) -> int:
        seen.append({"command": command, "limits": limits, "slots": sum(host.slots for host in hosts.known or ())})
        return 7

    monkeypatch.setattr(cli, "start", start)
    monkeypatch.setattr(cli, "start_elastic", start_elastic)
    return seen


def run(*line: str) -> int:
    try:
        return cli.main(["run", *line])
    except SystemExit as error:
        return int(str(error.code))


def test_what_stands_behind_the_script_is_taken_apart_by_nobody(started: Started) -> None:
    """A "--" before the script is the launcher's own. An interpreter before it, as horovodrun has it, is left out."""
    for given in ("-- -a", "-- --", "a -- b", "a --", "--", "-np 3", "--env A=B", ""):
        for before in ([], ["--"], ["python"]):
            assert run("-np", "2", *before, __file__, *given.split()) == 7
            found = started.pop()
            assert (found["command"], found["num_proc"], found["env"]) == ([__file__, *given.split()], 2, {})


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("-np 2", {"num_proc": 2}),
        ("-H a:2,b:3", {"hosts": TWO}),
        ("--nproc-per-node 4 --hostfile={file} --launcher ssh", {"num_proc": 4, "hosts": TWO, "launcher": "ssh"}),
        ("-np 1 --env K=V=W --env EMPTY=", {"num_proc": 1, "env": {"K": "V=W", "EMPTY": ""}}),
        ("-np 1 --log-dir logs --tag-output --quiet", {"num_proc": 1, "output": OutputOptions(True, "logs", True)}),
        ("--horovod -np 1 --output-filename logs", {"num_proc": 1, "output": OutputOptions(log_dir="logs")}),
        ("--horovod -np 2 --network-interface eth0,eth1", {"num_proc": 2, "env": SOCKETS}),
        ("-H a:2,b:3 -p 2222 -i key", {"hosts": TWO, "ssh_options": ["-p", "2222", "-i", "key"]}),
        ("-np 2 --bind numa", {"num_proc": 2, "bind": "numa"}),
        ("--horovod -np 2 --gloo", {"num_proc": 2}),
        ("--standalone --nnodes=1 --nproc_per_node=2", {"num_proc": 2}),  # as torchrun has them
        ("-np 2 --tag_output", {"num_proc": 2, "output": OutputOptions(True)}),
        ("-np 2 --launcher local", {"num_proc": 2, "launcher": "local"}),
    ],
)
def test_options(line: str, expected: dict[str, Any], started: Started, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a slots=2\nb:3  # fast\n")
    assert run(*line.format(file=tmp_path / "hosts").split(), "-m", "module", "-np", "1") == 7
    default = {"num_proc": None, "hosts": None, "env": {}, "launcher": "auto", "output": OutputOptions()}
    assert started == [
        {"command": ["-m", "module", "-np", "1"], **default, "ssh_options": [], "bind": "auto", **expected}
    ]


@pytest.mark.parametrize(
    ("nodes", "tasks", "number", "hosts"),
    [
        ("gpu[07-08],login", "4(x2),2", "10", [("gpu07", 4), ("gpu08", 4), ("login", 2)]),
        ("gpu[07-08]", "2(x2)", "3", [("gpu07", 2), ("gpu08", 1)]),
        ("gpu7", "3", None, [("gpu7", 3)]),
    ],
)
def test_srun_takes_the_nodes_of_the_allocation(
    nodes: str, tasks: str, number: str | None, hosts: Any, started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("JOB_NODELIST", nodes), ("TASKS_PER_NODE", tasks), ("NTASKS", number)):
        if value is None:
            monkeypatch.delenv(f"SLURM_{name}", raising=False)
        else:
            monkeypatch.setenv(f"SLURM_{name}", value)
    assert run("--launcher", "srun", __file__) == run("--launcher", "srun", "--elastic", __file__) == 7
    assert (started[0]["hosts"], started[0]["launcher"]) == ([Host(*host) for host in hosts], "srun")
    assert (started[1]["limits"], started[1]["slots"]) == (Limits(UNLIMITED), sum(number for _, number in hosts))


def test_srun_starts_a_step_that_reads_what_ssh_reads() -> None:
    """And gets the variables of this process, apart from those that an elastic job leaves out."""
    jobs = [
        host_job("b", ["train"], {"A": "secret"}, environ={"B": "1"}, silence=9.0, launcher=launcher)
        for launcher in ("ssh", "srun")
    ]
    assert [job.command[0] for job in jobs] == ["ssh", "srun"]
    assert [(job.environ, job.is_remote) for job in jobs] == [({"B": "1"}, True)] * 2
    assert "--nodelist=b" in jobs[1].command
    assert jobs[1].command[-3:-1] == ["sh", "-c"]
    assert (jobs[1].command[-1], jobs[1].variables) == (jobs[0].command[-1], jobs[0].variables)
    assert "secret" not in " ".join(jobs[1].command)


def test_a_python_with_an_equals_sign_in_its_path_starts_afar(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "a=b"))
    (tmp_path / "a=b").symlink_to(os.path.realpath("/proc/self/exe"))
    for name in ("A", "LD_A"):
        command = [sys.executable, "-I", "-c", f"import os; print(os.environ[{name!r}])"]
        job = host_job("b", command, {name: "b c"}, environ={}, silence=9.0)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen(["sh", "-c", job.command[-1]], **pipes) as process:  # type: ignore[call-overload]
            process.stdin.write(job.variables)
            process.stdin.flush()
            assert process.stdout.read() == b"b c\n"


@pytest.mark.parametrize(
    ("line", "limits", "slots"),
    [
        ("--elastic -np 3", Limits(3, 1, 3), 3),
        ("-np 2 --min-np 2", Limits(2, 2, 2), 2),
        ("-np 4 --min-np 2 --max-np 8 --stall-timeout 9", Limits(4, 2, 8, stall_timeout=9), 8),
        ("--max-np 3", Limits(3, 1, 3), 3),
        ("--horovod -H localhost:5 --min-num-proc 2", Limits(UNLIMITED, 2), 5),
        ("-H localhost:5 -np 2 --elastic --elastic-timeout 7", Limits(2, 1, 2, elastic_timeout=7), 5),
        (
            "--horovod --host-discovery-script true --slots 2 --heartbeat-timeout 3 --stall-timeout 60",
            Limits(UNLIMITED, heartbeat_timeout=3, stall_timeout=60),
            0,
        ),
        ("--discover true --blacklist-cooldown-range 2 9", Limits(UNLIMITED, cooldown=(2, 9)), 0),
    ],
)
def test_options_of_elastic_jobs(line: str, limits: Limits, slots: int, started: Started) -> None:
    assert run(*line.split(), __file__, "--max-np", "x") == 7
    assert started == [{"command": [__file__, "--max-np", "x"], "limits": limits, "slots": slots}]


# ---- horovodrun's


def test_options_that_set_variables(started: Started) -> None:
    line = """--timeline-filename t.json --timeline-mark-cycles --fusion-threshold-mb 2 --cycle-time-ms 3.5
        --no-stall-check --stall-check-warning-time-seconds 4 --stall-check-shutdown-time-seconds 5
        --gloo-timeout-seconds 6 --log-level debug"""
    run("--horovod", "-np", "1", *line.split(), "--env", "HOROVOD_CYCLE_TIME=9", __file__)
    env = started[0]["env"]
    assert env.pop("HOROVOD_CYCLE_TIME") == "9"  # what --env says counts
    read = read_settings({**env, "HOROVOD_CYCLE_TIME": "3.5"})
    timeline = os.path.abspath("t.json")
    assert read == Settings(2 * 2**20, 0.0035, timeline, True, False, 4, 5, False, logging.DEBUG, 6)
    run("--horovod", "-np", "1", "--timeline-filename", "DYNAMIC", __file__)
    assert started[1]["env"] == {"HOROVOD_TIMELINE": "DYNAMIC"}  # nothing of the first call's


def test_options_without_a_meaning_are_named_in_one_line(started: Started, capsys: pytest.CaptureFixture[str]) -> None:
    line = "--horovod -np 1 --start-timeout 30 --autotune --cache-capacity 9 --start-timeout 31"
    run(*line.split(), __file__)
    expected = "torchring run: --start-timeout, --autotune, --cache-capacity: no meaning here, ignored\n"
    assert capsys.readouterr().err == expected
    run("-np", "1", __file__)
    assert capsys.readouterr().err == ""
