"""`torchring run` on several hosts, and the reaper of its processes: who is started where, and that nothing is left."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.launch.test_launcher import Launcher
from tests.support import commands
from tests.support.harness import is_running, patient, wait_until
from tests.support.netns import needs_hosts
from torchring.bench.netns import INTERFACE, Network
from torchring.launch import agent, reaper
from torchring.launch import launcher as run_module
from torchring.launch.hosts import Host, HostPlan, LaunchError, is_here, parse_hostfile, parse_hosts, share_out
from torchring.launch.launcher import start
from torchring.launch.output import OutputOptions

REAPER = Path(run_module.__file__).with_name("reaper.py")

# As sshd does: what stands behind the host, joined by spaces, is for the user's shell. `cases` says where that runs.
SSH = """while [ $# -gt 0 ]; do
    case "$1" in
        -o) shift 2 ;;
        -G) echo "hostname 127.0.0.1"; exit ;;
        -*) shift ;;
        *) break ;;
    esac
done
host=$1
shift
echo "$host" >>"$SSH_LOG"
echo "$*" >>"$SSH_LOG.commands"
case "$host" in
%s
    *) echo "ssh: Could not resolve hostname $host: Name or service not known" >&2; exit 255 ;;
esac
"""

# Says where it is, then does as it is told; torch is not imported.
RANK = """
import json, os, pathlib, sys, time
rank = os.environ["RANK"]
path = pathlib.Path(os.environ["REPORTS"], rank)
names = ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SETTING"]
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

SUM = """
import json, os, torch, torchring
total = torchring.all_reduce(torch.tensor([10.0 ** torchring.rank()]), "sum").item()
facts = [torchring.rank(), torchring.local_rank(), torchring.node_rank(), total, os.environ["SETTING"], os.getcwd()]
print(json.dumps(facts) + "\\n", end="", flush=True)
"""

# What the rank and its agent listen at, and the kernel's text for these addresses.
LISTENING = """
import pathlib
def listening(pid):
    links = [os.readlink(link) for link in pathlib.Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()]
    for table in ("tcp", "tcp6"):
        for line in pathlib.Path("/proc/net", table).read_text().splitlines()[1:]:
            _, here, _, state, *others = line.split()
            if state == "0A" and f"socket:[{others[5]}]" in links:
                yield here.partition(":")[0]
if torchring.rank() == 0:
    print("listening at", *sorted([*listening(os.getpid()), *listening(os.getppid())]), file=sys.stderr, flush=True)
torchring.all_reduce(torch.zeros(1))
"""


def _of_kernel(address: str) -> str:
    return socket.inet_aton(address)[::-1].hex().upper()


def check_lines(out: str, ranks: int, tag: str = "") -> None:
    """Each of them whole, and each rank's in order."""
    lines = out.splitlines()
    for rank in range(ranks):
        start = tag.format(rank)
        mine = [line for line in lines if line.endswith(f" of {rank}")]
        assert mine == [f"{start}line {i} of {rank}" for i in range(300)]
    assert len(lines) == 300 * ranks


class Cluster(Launcher):
    """With an ssh that knows the hosts of `cases`."""

    def __init__(self, folder: Path, cases: str) -> None:
        super().__init__(folder, SSH % cases)
        self.log = folder / "log"
        self.log.touch()
        self.environ["SSH_LOG"] = str(self.log)

    def start(self, *arguments: str, code: str = RANK, **how: Any) -> subprocess.Popen[str]:
        self.script(code)
        return super().start("run", *arguments, **how)

    def finish(self, process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
        try:
            return commands.finish(process)
        finally:
            for pid in self.pids():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def run(self, *arguments: str, **how: Any) -> subprocess.CompletedProcess[str]:
        return self.finish(self.start(*arguments, **how))

    def pids(self) -> list[int]:
        return [report["pid"] for report in self.reports()]


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    """Two "hosts", both this machine, which only ssh knows."""
    return Cluster(tmp_path, '    far | further) exec sh -c "$*" ;;')


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
    with pytest.raises(LaunchError, match="-np 10 is more than the 9 slots of a:3, b:2, c:4"):
        share_out(hosts, 10)
    assert all(map(is_here, ("localhost", "127.0.0.1", "[::1]", socket.gethostname())))
    assert not any(map(is_here, ("192.0.2.1", "torchring.invalid", "someone@localhost", "[2001:db8::1]")))
    names = run_module.as_this_host([Host("far", 1), Host("localhost", 2), Host("127.0.0.1", 3)])
    assert names == [Host("far", 1), Host("localhost", 5)]


def test_what_starts_them() -> None:
    here, far = Host("localhost", 2), Host("192.0.2.1", 2)
    assert run_module._choose([here], "auto") == "local"
    assert run_module._choose([here, far], "auto") == "ssh"
    assert run_module._choose([here, far], "srun") == "srun"
    with pytest.raises(LaunchError, match="'kubectl' is for --elastic"):
        run_module._choose([here], "kubectl")
    with pytest.raises(LaunchError, match="must be one of auto, local, ssh, srun, kubectl, got 'mpirun'"):
        start(["x.py"], launcher="mpirun")


# ---- the reaper


def reaped(*command: str) -> tuple[subprocess.Popen[bytes], int]:
    theirs, lifeline = os.pipe()
    process = subprocess.Popen([sys.executable, "-I", str(REAPER), str(theirs), *command], pass_fds=[theirs])
    os.close(theirs)
    return process, lifeline


@pytest.mark.parametrize(
    ("command", "code"),
    [
        *(
            (["sh", "-c", command], code)
            for command, code in (("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137), ("kill -15 $$", 143))
        ),
        (["/nowhere/command"], 127),
    ],
)
def test_the_reaper_passes_the_exit_code_on(command: list[str], code: int) -> None:
    process, lifeline = reaped(*command)
    assert process.wait(patient(20)) == code
    os.close(lifeline)


@pytest.mark.parametrize("ending", ["pipe", "signal", "failure"])
def test_the_reaper_leaves_nothing(ending: str, tmp_path: Path) -> None:
    """Not those that are in sessions of their own and have lost their parent either."""
    orphan = f"setsid sh -c 'echo $$ >{tmp_path}/new && mv {tmp_path}/new {tmp_path}/pid; exec sleep 60' &"
    process, lifeline = reaped("sh", "-c", f"{orphan} {'sleep 1; exit 4' if ending == 'failure' else 'sleep 60'}")
    wait_until((tmp_path / "pid").exists, "the orphan")
    pid = int((tmp_path / "pid").read_text())
    assert is_running(pid)
    if ending == "pipe":
        os.close(lifeline)
    elif ending == "signal":
        process.terminate()
    assert process.wait(patient(20)) == (4 if ending == "failure" else 143)
    assert not is_running(pid)
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


def test_the_reaper_meets_a_process_of_another_user(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
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


@pytest.mark.parametrize("beats", [True, False])
def test_a_reaper_that_gets_no_heartbeat_ends_its_command(beats: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As behind a line that is cut: the pipe is not closed."""
    monkeypatch.setattr(run_module, "HEARTBEAT_SECONDS", 0.1 if beats else 100.0)
    reaper = [sys.executable, "-I", str(REAPER), "0", "--silence", "1"]
    job = run_module.HostJob("host", [*reaper, "sleep", "2" if beats else "60"], os.environ, is_remote=True)
    assert run_module._supervise([job], None) == (0 if beats else 128 + signal.SIGTERM)


# ---- over ssh


def test_hosts_over_ssh(cluster: Cluster) -> None:
    """Two hosts of unequal size; everything that a shell could take apart arrives whole, and so does an exit code."""
    given = ["fail", "2", "a b", "$HOME", "it's", "--", "-np", "*", ""]
    hosts = ["-H", "far:2,further:9", "-np", "3", "--tag-output"]
    cluster.environ["SETTING"] = f"x y's $Z\n {secrets.token_hex(8)}"
    ran = cluster.run("--launcher", "ssh", *hosts, "--env", "SETTING", "script.py", *given)
    assert ran.returncode == 3, ran.stderr
    check_lines(ran.stdout, 3, "[{}] ")
    assert [ran.stderr.count(f"[{rank}] end of {rank}") for rank in range(3)] == [1, 1, 1]
    assert "torchring run: rank 2 (pid " in ran.stderr
    assert "torchring run: the processes on further failed, with exit code 3" in ran.stderr
    assert not any(map(is_running, cluster.pids()))
    assert sorted(cluster.log.read_text().split()) == ["far", "further"]
    assert "Traceback" not in ran.stderr, "no agent was left without the store"
    reports = cluster.reports()
    assert [report["RANK"] for report in reports] == ["0", "1", "2"]
    assert [report["LOCAL_RANK"] for report in reports] == ["0", "1", "0"]
    assert [report["LOCAL_WORLD_SIZE"] for report in reports] == ["2", "2", "1"]
    for report in reports:
        assert (report["WORLD_SIZE"], report["SETTING"], report["argv"]) == ("3", cluster.environ["SETTING"], given)
        assert not report["shown"], "in a command line, which all users of the machine can read"
        assert report["cwd"] == str(cluster.folder)
    assert cluster.environ["SETTING"].split()[-1] not in Path(f"{cluster.log}.commands").read_text()


def test_a_host_that_ssh_does_not_know(cluster: Cluster) -> None:
    ran = cluster.run("--launcher", "ssh", "-H", "localhost,nowhere", "script.py", "wait")
    assert ran.returncode == 255
    assert "Could not resolve hostname nowhere" in ran.stderr
    assert "torchring run: nowhere ended first, with 255: ssh could not run the processes there" in ran.stderr
    assert not any(map(is_running, cluster.pids()))


@pytest.mark.parametrize(
    ("hosts", "number", "code"),
    [
        (["-H", "localhost,far", "--launcher", "ssh"], signal.SIGTERM, 143),
        (["-np", "2"], signal.SIGINT, 130),
        (["-np", "2"], signal.SIGKILL, -signal.SIGKILL),
    ],
    ids=str,
)
def test_nothing_outlives_the_launcher(hosts: list[str], number: signal.Signals, code: int, cluster: Cluster) -> None:
    """The signal goes to the launcher alone, as from a scheduler; a terminal would send Ctrl-C to the ranks as well."""
    process = cluster.start(*hosts, "script.py", "wait")
    try:
        wait_until(lambda: len(cluster.pids()) == 2 or process.poll() is not None, "the ranks")
        pids = cluster.pids()
        assert len(pids) == 2
        assert all(map(is_running, pids))
        for _ in range(3 if number == signal.SIGINT else 1):  # as by somebody in a hurry
            process.send_signal(number)
        assert process.wait(patient(40)) == code
        wait_until(lambda: not any(map(is_running, pids)), "the ranks to end", seconds=20)
    finally:
        ran = cluster.finish(process)
    assert number != signal.SIGINT or "torch" not in ran.stderr  # tracebacks are the ranks' own


@pytest.mark.parametrize(
    ("depth", "message"),
    [
        (1, "the process that watches over the ranks (reaper.py, pid {}) was killed by SIGKILL"),
        (2, "the process that starts the ranks (pid {}) was killed by SIGKILL"),
    ],
    ids=["reaper", "agent"],
)
def test_a_process_between_launcher_and_ranks_is_killed(depth: int, message: str, cluster: Cluster) -> None:
    """The job ends, and the launcher says why."""
    process = cluster.start("-np", "2", "script.py", "wait")
    try:
        wait_until(lambda: len(cluster.pids()) == 2 or process.poll() is not None, "the ranks")
        victim = process.pid
        for _ in range(depth):
            victim = int(Path(f"/proc/{victim}/task/{victim}/children").read_text().split()[0])
        os.kill(victim, signal.SIGKILL)
        assert process.wait(patient(40)) == 137
        wait_until(lambda: not any(map(is_running, cluster.pids())), "the ranks to end", seconds=20)
    finally:
        ran = cluster.finish(process)
    assert f"torchring run: {message.format(victim)}" in ran.stderr


def test_a_folder_for_logs_that_cannot_be_made_is_named_with_its_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(agent, "_store", lambda plan: None)
    plan = HostPlan(1, 0, 1, 1, 0, "localhost", "", 0, OutputOptions(log_dir=str(tmp_path / "file" / "logs")), "none")
    assert agent.main([plan.to_json(), "script.py"]) == 2
    assert capsys.readouterr().err == f"torchring run: --log-dir {tmp_path}/file/logs: Not a directory\n"


# ---- where the store listens


def test_one_machine_listens_on_loopback_only(cluster: Cluster) -> None:
    ran = cluster.run("-np", "2", "--env", "SETTING=", "script.py", code=f"import sys{SUM}{LISTENING}")
    assert ran.returncode == 0, ran.stderr
    assert ran.stderr == f"listening at {_of_kernel('127.0.0.1')}\n"


@pytest.mark.parametrize(
    ("address", "resolved"),
    [
        ("192.0.2.1", ["192.0.2.1"]),  # a router's
        ("node1", ["127.0.1.1"]),  # Debian's idea of a machine's own name
        ("node1", ["192.0.2.1", "2001:db8::1"]),
        ("node1", []),
    ],
)
def test_an_address_that_may_differ_for_other_hosts(
    address: str, resolved: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent, "resolve", {address: resolved}.__getitem__)
    with agent._listener(HostPlan(1, 0, 2, 2, 0, "node1", address, 0, OutputOptions())) as listener:
        assert listener.getsockname()[0] in ("0.0.0.0", "::")
        with socket.create_connection(("127.0.0.1", listener.getsockname()[1])):
            pass


# ---- hosts that are apart


@pytest.fixture
def network(tmp_path: Path) -> Iterator[tuple[Network, Cluster]]:
    """Two namespaces with host names of their own, which Open MPI goes by, and a name service that answers at once."""
    with Network(2) as network:
        folders = [Path("/etc/netns", network.name(host)) for host in range(2)]
        cases = []
        for host, folder in enumerate(folders):
            folder.mkdir(parents=True)
            (folder / "resolv.conf").write_text("nameserver 127.0.0.1\n")
            names = [f"{address} torchring-host{i}\n" for i, address in enumerate(network.addresses)]
            (folder / "hosts").write_text("127.0.0.1 localhost\n" + "".join(names))
            there = " ".join(network.command(host, ["unshare", "--uts", "sh", "-c"]))
            cases.append(
                f"""    {network.addresses[host]}) exec {there} 'hostname torchring-host{host}; eval "$0"' "$*" ;;"""
            )
        try:
            yield network, Cluster(tmp_path, "\n".join(cases))
        finally:
            for folder in folders:
                shutil.rmtree(folder)
            with contextlib.suppress(OSError):
                folders[0].parent.rmdir()


@needs_hosts
@pytest.mark.grid  # test_hosts_over_ssh goes to other hosts of one machine
def test_hosts_that_are_apart(network: tuple[Network, Cluster]) -> None:
    """Started on the first of them, which is not gone to by ssh."""
    hosts, cluster = network
    on_first = hosts.command(0, ["unshare", "--uts", "sh", "-c", 'hostname torchring-host0; exec "$@"', "sh"])
    slots = f"{hosts.addresses[0]}:2,{hosts.addresses[1]}:1"
    options = ["-H", slots, "--env", "SETTING=x y", "--env", f"GLOO_SOCKET_IFNAME={INTERFACE}"]
    ran = cluster.run(*options, "script.py", code=f"import sys{SUM}{LISTENING}", before=on_first)
    assert ran.returncode == 0, ran.stderr[-4000:]
    ranks = sorted(json.loads(line) for line in ran.stdout.splitlines() if line.startswith("["))
    folder = str(cluster.folder)
    assert ranks == [
        [0, 0, 0, 111.0, "x y", folder], [1, 1, 0, 111.0, "x y", folder], [2, 0, 1, 111.0, "x y", folder]
    ]  # fmt: skip
    assert cluster.log.read_text().split() == [hosts.addresses[1]]
    listening = {
        word for line in ran.stderr.splitlines() if line.startswith("listening at") for word in line.split()[2:]
    }
    assert listening == {_of_kernel(hosts.addresses[0])}  # the store, and Gloo
