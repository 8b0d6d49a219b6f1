"""`torchring run` on several hosts, and the reaper of its processes: who is started where, and that nothing is left."""

import os
import re
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.launch.test_launcher import LISTENING
from tests.support.commands import Launcher
from tests.support.harness import is_running, patient, wait_until
from tests.support.netns import needs_hosts
from torchring.bench.netns import INTERFACE, Network
from torchring.launch import agent, reaper
from torchring.launch import launcher as run_module
from torchring.launch.hosts import Host, HostPlan, LaunchError, is_here, parse_hostfile, parse_hosts, share_out
from torchring.launch.launcher import start
from torchring.launch.output import OutputOptions
from torchring.rendezvous.environment import JOB

REAPER = Path(run_module.__file__).with_name("reaper.py")

# Says where it is, then does as it is told; torch is not imported.
RANK = """
import json, os, pathlib, sys, time
rank = os.environ["RANK"]
path = pathlib.Path(os.environ["REPORTS"], rank)
names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "SETTING"]
facts = {"argv": sys.argv[1:], "pid": os.getpid(), "cwd": os.getcwd(), **{name: os.environ.get(name) for name in names}}
secret = os.environ.get("SETTING", "").rpartition(" ")[2].encode() or b"no secret"
for file in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
    try:
        facts["shown"] = secret in file.read_bytes() or facts.get("shown", False)
    except OSError:
        pass
for i in range(300):
    print("line", i, "of", rank)
print("end of", rank, end="", file=sys.stderr)
path.with_name("." + rank).write_text(json.dumps(facts))
path.with_name("." + rank).rename(path)
if sys.argv[1:2] == ["wait"]:
    time.sleep(60)
if sys.argv[1:2] == ["fail"]:
    while not all(path.with_name(str(rank)).exists() for rank in range(int(os.environ["WORLD_SIZE"]))):
        time.sleep(0.05)
    sys.exit(3) if rank == sys.argv[2] else time.sleep(60)
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Launcher:
    """Two "hosts", both this machine, which only ssh knows."""
    return Launcher(tmp_path, dict.fromkeys(("far", "further"), 'exec sh -c "$*"'))


# ---- hosts


@pytest.mark.parametrize(
    ("parse", "text", "expected"),
    [
        (parse_hosts, "a:2, me@b.cluster:4,10.0.0.7", [Host("a", 2), Host("me@b.cluster", 4), Host("10.0.0.7", 1)]),
        (parse_hosts, "[fe80::1]:2", [Host("[fe80::1]", 2)]),
        *(
            (parse_hosts, text, "-H takes host:slots")
            for text in ("", "a:", "a:0", "a:x", "a:-1", ":2", "a:2,", "a b", "a:1:2", "-oProxyCommand=x", "a;b:")
        ),
        (parse_hostfile, "# two machines\n\na slots=2 # old\n  b:3\nc\n", [Host("a", 2), Host("b", 3), Host("c", 1)]),
        (parse_hostfile, "a\nb slots=x", "line 2 .*got 'b slots=x'"),
        *((parse_hostfile, text, "line 1") for text in ("a slots=0", "a:2 slots=2", "a 2", "a slots=2 max_slots=3")),
        (parse_hostfile, "# nothing", "names no host"),
    ],
)
def test_lists_of_hosts_and_host_files(parse: Any, text: str, expected: Any) -> None:
    if isinstance(expected, str):
        with pytest.raises(LaunchError, match=expected):
            parse(text)
    else:
        assert parse(text) == expected


def test_hosts_are_filled_in_order_and_this_host_has_many_names() -> None:
    hosts = [Host("a", 2), Host("b", 2), Host("a", 1), Host("c", 4)]
    assert share_out(hosts, None) == [Host("a", 3), Host("b", 2), Host("c", 4)]
    assert share_out(hosts, 4) == [Host("a", 3), Host("b", 1)]
    assert share_out(hosts, 1) == [Host("a", 1)]
    with pytest.raises(LaunchError, match="10 processes are more than the 9 slots of a:3, b:2, c:4"):
        share_out(hosts, 10)
    assert all(map(is_here, ("localhost", "127.0.0.1", "[::1]", socket.gethostname())))
    assert not any(map(is_here, ("192.0.2.1", "torchring.invalid", "someone@localhost", "[2001:db8::1]")))
    names = run_module.as_this_host([Host("far", 1), Host("localhost", 2), Host("127.0.0.1", 3)])
    assert names == [Host("far", 1), Host("localhost", 5)]


def test_launchers_that_do_not_fit() -> None:
    for launcher, refused in (
        ("kubectl", "'kubectl' is for --elastic"),
        ("local", "launcher 'local' starts nothing on 192.0.2.1"),
    ):
        with pytest.raises(LaunchError, match=refused):
            start(["x.py"], hosts=[Host("localhost", 2), Host("192.0.2.1", 2)], launcher=launcher)


# ---- the reaper


def reaped(*command: str) -> tuple[subprocess.Popen[bytes], int]:
    theirs, lifeline = os.pipe()
    reaper = [sys.executable, "-I", str(REAPER), str(theirs), "--title", "the command"]
    process = subprocess.Popen([*reaper, *command], pass_fds=[theirs])
    os.close(theirs)
    return process, lifeline


def child_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])


def test_the_reaper_passes_the_exit_code_on() -> None:
    commands = {"exit 0": 0, "exit 7": 7, "kill -9 $$": 137, "kill -15 $$": 143}
    started = [(reaped("sh", "-c", command), code) for command, code in commands.items()]
    for (process, lifeline), code in [*started, (reaped("/nowhere/command"), 127)]:
        assert process.wait(patient(20)) == code
        os.close(lifeline)


@pytest.mark.parametrize(("ending", "code"), [("pipe", 143), ("signal", 143), ("failure", 4), ("kill", 137)])
def test_the_reaper_leaves_nothing(ending: str, code: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Not those that are in sessions of their own and have lost their parent either."""
    orphan = f"setsid sh -c 'echo $$ >{tmp_path}/new && mv {tmp_path}/new {tmp_path}/pid; exec sleep 60' &"
    fails = f"until [ -e {tmp_path}/fail ]; do sleep 0.02; done; exit 4"
    process, lifeline = reaped("sh", "-c", f"{orphan} {fails}")
    wait_until((tmp_path / "pid").exists, "the orphan")
    pid, command = int((tmp_path / "pid").read_text()), child_of(process.pid)
    assert is_running(pid)
    if ending == "pipe":
        os.close(lifeline)
    elif ending == "signal":
        process.terminate()
    elif ending == "failure":
        (tmp_path / "fail").touch()
    else:
        os.kill(command, signal.SIGKILL)
    assert process.wait(patient(20)) == code
    assert not is_running(pid)
    said = (
        f"torchring run: the command (pid {command}) was killed by SIGKILL; the processes that it has started end, too"
    )
    assert capfd.readouterr().err == (f"{said}\n" if ending == "kill" else "")
    if ending != "pipe":
        os.close(lifeline)


def test_the_reaper_collects_orphans(tmp_path: Path) -> None:
    """Zombies would use up the process numbers of a container in a long job."""
    command = f"for i in 1 2 3; do sh -c 'sh -c true &'; done; touch {tmp_path}/started; exec sleep 60"
    process, lifeline = reaped("sh", "-c", command)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    wait_until((tmp_path / "started").exists, "the orphans")
    wait_until(lambda: len(children.read_text().split()) == 1, "the orphans to be collected")
    os.close(lifeline)
    assert process.wait(patient(20)) == 143


def test_a_reaper_and_another_users_process(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """It goes on with the others."""
    own, really_kill = subprocess.Popen(["sleep", "60"]), os.kill

    def kill(pid: int, number: int) -> None:
        if pid == 1:
            raise PermissionError
        really_kill(pid, number)

    monkeypatch.setattr(reaper.os, "kill", kill)
    reaper._kill(lambda: {1, own.pid} if own.poll() is None else {1})
    assert own.wait() == -signal.SIGKILL
    assert capfd.readouterr().err == "torchring run: processes of another user still run: [1]\n"
    monkeypatch.setattr(reaper.os.path, "exists", lambda path: False)
    reaper._kill(set)
    assert "there is no /proc" in capfd.readouterr().err


@pytest.mark.parametrize("beats", [True, False])
def test_a_reaper_that_gets_no_heartbeat_ends_its_command(beats: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind a line that is cut: the pipe is not closed."""
    monkeypatch.setattr(run_module, "HEARTBEAT_SECONDS", 0.1 if beats else 100.0)
    reaper = [sys.executable, "-I", str(REAPER), "0", "--silence", str(silence := patient(1.0))]
    sleep = ["sleep", str(1.5 * silence) if beats else "60"]
    job = run_module.HostJob("host", [*reaper, *sleep], os.environ, is_remote=True)
    assert run_module._supervise([job], None) == (0 if beats else 128 + signal.SIGTERM)


# ---- the agent, in this process


@pytest.fixture
def run_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """Runs a script on two ranks. Returns the exit code."""
    monkeypatch.setenv("REPORTS", str(tmp_path))
    monkeypatch.setenv(JOB, "secret")

    def run(code: str, **output: Any) -> int:
        (tmp_path / "script.py").write_text(code)
        plan = HostPlan(2, 0, 2, 1, 0, "localhost", "", 0, OutputOptions(**output), "none")
        return agent.main([plan.to_json(), str(tmp_path / "script.py")])

    return run


# The exit handlers of rank 0 run for longer than the other rank takes to fail because of it, and to end.
FAILS_AND_TAKES_LONG = """
import atexit, os, sys, time
from pathlib import Path
path = Path(os.environ["REPORTS"], "1")
@atexit.register  # runs last: torchring has said goodbye to the other rank
def wait():
    while os.environ["RANK"] == "0" and os.path.exists(f"/proc/{path.read_text()}"):
        time.sleep(0.01)
import torch, torchring
if os.environ["RANK"] == "1":
    path.write_text(str(os.getpid()))
torchring.barrier()
if os.environ["RANK"] == "0":
    sys.exit(3)
torchring.all_reduce(torch.ones(1))
"""

# The other rank has time to see it, and to say so. It does not count as the one that ended first.
IS_KILLED = """
import os, signal, sys, time
from pathlib import Path
path = Path(os.environ["REPORTS"], "0")
if os.environ["RANK"] == "0":
    path.write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGKILL)
while not path.exists() or not path.read_text() or os.path.exists(f"/proc/{path.read_text()}"):
    time.sleep(0.01)
sys.exit("rank 0 died in step 5")
"""


@pytest.mark.parametrize(
    ("script", "code", "said"),
    [
        (FAILS_AND_TAKES_LONG, 3, r"rank 0 \(pid [0-9]+\) failed first, with exit code 3"),
        (
            IS_KILLED,
            137,
            r"rank 0 died in step 5\ntorchring run: rank 0 \(pid [0-9]+\) failed first, killed by SIGKILL",
        ),
    ],
    ids=["fails", "is killed"],
)
def test_exit_code_of_the_rank_that_failed_first(
    script: str, code: int, said: str, run_here: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    assert run_here(script) == code
    err = capfd.readouterr().err
    assert re.search(said, err), err


def test_a_folder_for_logs_that_cannot_be_made_is_named_with_its_option(
    tmp_path: Path, run_here: Callable[..., int], capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert run_here("", log_dir=str(tmp_path / "file" / "logs")) == 2
    assert (
        capfd.readouterr().err
        == f"torchring run: --log-dir {tmp_path}/file/logs: Not a directory; take a folder you can write to\n"
    )


@pytest.mark.parametrize(
    ("address", "resolved"),
    [
        ("192.0.2.1", ["192.0.2.1"]),  # a router's
        ("node1", ["127.0.1.1"]),  # Debian's idea of a machine's own name
        ("node1", ["192.0.2.1", "2001:db8::1"]),
        ("node1", []),
    ],
)
def test_an_address_that_differs_elsewhere(address: str, resolved: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "resolve", {address: resolved}.__getitem__)
    with agent._listener(HostPlan(1, 0, 2, 2, 0, "node1", address, 0, OutputOptions())) as listener:
        assert listener.getsockname()[0] in ("0.0.0.0", "::")
        with socket.create_connection(("127.0.0.1", listener.getsockname()[1])):
            pass


# ---- over ssh


def test_hosts_over_ssh(cluster: Launcher) -> None:
    """Two hosts of unequal size; everything that a shell could take apart arrives whole, and so does an exit code."""
    given = ["fail", "2", "a b", "$HOME", "it's", "--", "-np", "*", ""]
    hosts = ["--launcher", "ssh", "-H", "far:2,further:9", "-np", "3", "--tag-output"]
    cluster.environ["OMP_NUM_THREADS"] = "3"
    setting = cluster.environ["SETTING"] = f"x y's $Z\n {secrets.token_hex(8)}"
    ran = cluster.run("run", *hosts, "--env", "SETTING", cluster.script(RANK), *given)
    assert ran.returncode == 3, ran.stderr
    lines = ran.stdout.splitlines()
    for rank in range(3):  # each line whole, and each rank's in order
        assert [line for line in lines if line.endswith(f" of {rank}")] == [
            f"[{rank}] line {i} of {rank}" for i in range(300)
        ]
        assert ran.stderr.count(f"[{rank}] end of {rank}") == 1
    assert len(lines) == 3 * 300
    assert "torchring run: rank 2 (pid " in ran.stderr
    assert "torchring run: the processes on further failed, with exit code 3" in ran.stderr
    assert not any(map(is_running, cluster.pids()))
    assert sorted(cluster.ssh_log.read_text().split()) == ["far", "further"]
    assert "Traceback" not in ran.stderr, "no agent was left without the store"
    reports = [*cluster.reports().values()]
    assert [report["RANK"] for report in reports] == ["0", "1", "2"]
    assert [report["LOCAL_RANK"] for report in reports] == ["0", "1", "0"]
    assert [report["LOCAL_WORLD_SIZE"] for report in reports] == ["2", "2", "1"]
    for report in reports:
        assert (report["WORLD_SIZE"], report["SETTING"], report["argv"]) == ("3", setting, given)
        assert report["OMP_NUM_THREADS"] == "3"
        assert not report["shown"], "in a command line, which all users of the machine can read"
        assert report["cwd"] == str(cluster.folder)
    assert setting.split()[-1] not in Path(f"{cluster.ssh_log}.commands").read_text()


def test_a_host_that_ssh_does_not_know(cluster: Launcher) -> None:
    ran = cluster.run("run", "-H", "nowhere:2", cluster.script(RANK))
    assert ran.returncode == 255
    assert "Could not resolve hostname nowhere" in ran.stderr
    assert "torchring run: nowhere ended first, with 255: ssh could not run the processes there" in ran.stderr


@pytest.mark.parametrize(
    ("hosts", "victim", "number", "code"),
    [
        (["-H", "localhost,far", "--launcher", "ssh"], "launcher", signal.SIGINT, 130),
        (["-np", "2"], "launcher", signal.SIGKILL, -signal.SIGKILL),
        (["-np", "2"], "reaper", signal.SIGKILL, 137),
        (["-np", "2"], "agent", signal.SIGKILL, 137),
    ],
    ids=str,
)
def test_nothing_outlives_the_launcher(
    hosts: list[str], victim: str, number: signal.Signals, code: int, cluster: Launcher
) -> None:
    """The signal goes to one process alone, as from a scheduler; a terminal would send Ctrl-C to the ranks as well.

    Where its stdout is closed, ranks print into nothing.
    """
    closed = ["sh", "-c", 'exec "$@" >&-', "sh"]
    process = cluster.start("run", *hosts, cluster.script(RANK), "wait", before=closed)
    try:
        wait_until(lambda: len(cluster.pids()) == 2 or process.poll() is not None, "the ranks")
        pids = cluster.pids()
        assert len(pids) == 2
        assert all(map(is_running, pids))
        reaper = child_of(process.pid)
        pid = {"launcher": process.pid, "reaper": reaper, "agent": child_of(reaper)}[victim]
        for _ in range(3 if number == signal.SIGINT else 1):  # as by somebody in a hurry
            os.kill(pid, number)
        assert process.wait(patient(40)) == code
        wait_until(lambda: not any(map(is_running, pids)), "the ranks to end", seconds=20)
    finally:
        ran = cluster.finish(process)
    assert number != signal.SIGINT or "torch" not in ran.stderr  # tracebacks are the ranks' own
    does = {"reaper": "watches over the ranks (reaper.py, ", "agent": "starts the ranks ("}.get(victim)
    said = f"torchring run: the process that {does}pid {pid}) was killed by SIGKILL"
    assert (said in ran.stderr) is bool(does)


# ---- hosts that are apart

SUM = """
import os, sys, torch, torchring
from pathlib import Path
total = torchring.all_reduce(torch.tensor([10.0 ** torchring.rank()]), "sum").item()
print(torchring.rank(), torchring.local_rank(), torchring.node_rank(), total, os.environ["SETTING"], os.getcwd())
"""


@needs_hosts
@pytest.mark.grid  # test_hosts_over_ssh goes to other hosts of one machine
def test_hosts_that_are_apart(tmp_path: Path) -> None:
    """Started on the first of them, which is not gone to by ssh. The store and Gloo listen at its address."""
    with Network(2) as hosts:
        enter = " ".join(hosts.command(1, ["sh", "-c"]))
        cluster = Launcher(tmp_path, {hosts.addresses[1]: f'exec {enter} "$*"'})
        options = ["-H", f"{hosts.addresses[0]}:2,{hosts.addresses[1]}:1", "--env", "SETTING=x y"]
        options += ["--env", f"GLOO_SOCKET_IFNAME={INTERFACE}", cluster.script(SUM + LISTENING)]
        ran = cluster.run("run", *options, before=hosts.command(0, []))
        assert ran.returncode == 0, ran.stderr[-4000:]
        places = sorted(line for line in ran.stdout.splitlines() if "x y" in line)
        assert places == [f"{ranks} 111.0 x y {cluster.folder}" for ranks in ("0 0 0", "1 1 0", "2 0 1")]
        address = socket.inet_aton(hosts.addresses[0])[::-1].hex().upper()
        (listening,) = (line for line in ran.stderr.splitlines() if line.startswith("listening at"))
        assert set(listening.split()[2:]) == {address}
