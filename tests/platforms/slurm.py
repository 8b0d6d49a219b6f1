"""A small Slurm cluster, all of it real: a login node with slurmctld and munged, and two nodes with a slurmd each.

    with Cluster() as cluster:
        job = cluster.submit("train.sbatch", folder=folder)
        assert cluster.wait(job) == "COMPLETED", cluster.output(job)

Nodes are hosts of a `torchring.bench.netns.Network`, which kills all that runs there when it goes. They share the
processor and the files of this machine; Slurm gives out NUM_CPUS cores of each, and binds no process to them.
"""

import contextlib
import ctypes
import os
import re
import secrets
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.support import commands
from tests.support.harness import patient
from tests.support.netns import EXPECT, why_skipped
from torchring.bench.netns import Network

HOSTS = ["login", "node1", "node2"]
NUM_CPUS = 8
_OVER = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")
_PROGRAMS = ("slurmctld", "slurmd", "munged", "srun", "sbatch", "scontrol", "unshare")
_PATH = "/usr/sbin:/sbin:/usr/bin:/bin"
_POLL_SECONDS = 0.25
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37


def why_no_slurm() -> str | None:
    """Why there is no cluster here. None where there can be one, or has to be, and then fails with the cause."""
    return None if os.environ.get(EXPECT) == "1" else why_skipped() or _missing()


def _missing() -> str | None:
    names = [name for name in _PROGRAMS if shutil.which(name, path=_PATH) is None]
    return f"not installed: {', '.join(names)} (apt-get install slurm-wlm munge)" if names else None


class Cluster:
    """Runs inside `with`. `folder` has the logs of the daemons; host 0 of `network` is the login node."""

    def __init__(self) -> None:
        self._daemons: list[subprocess.Popen[bytes]] = []
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> "Cluster":
        assert not (trouble := _missing()), trouble
        with self._stack as stack:
            stack.enter_context(_no_subreaper())
            self.folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="torchring-slurm-")))
            stack.callback(self._reap)
            self.network = stack.enter_context(Network(len(HOSTS)))
            self._write_files()
            files = [f"--{kind}-file={self.folder}/munge.{kind}" for kind in ("key", "pid", "log", "seed")]
            self._start_daemon(
                "login", "munged", "--foreground", "--force", f"--socket={self.folder}/munge.socket", *files
            )
            self._wait_until((self.folder / "munge.socket").exists, "munged")
            self._start_daemon("login", "slurmctld", "-D", "-i")
            self.boot(*HOSTS[1:])
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def boot(self, *nodes: str) -> None:
        """Start the slurmd of nodes, and wait until all nodes of the cluster are there."""
        for node in nodes:
            self._start_daemon(node, "slurmd", "-D", "-N", node)
        states = ("sinfo", "-hN", "-o", "%T")
        self._wait_until(lambda: {*commands.finish(self.start(*states)).stdout.split()} == {"idle"}, "the nodes")

    def start(self, *command: str | Path, folder: Path | None = None) -> subprocess.Popen[str]:
        """A command on the login node, in `folder`, with pipes. `commands.finish` waits for its end."""
        return commands.start(self._on("login", command), self._environ(), folder or self.folder)

    def ask(self, *command: str | Path, folder: Path | None = None) -> str:
        """What a command on the login node prints, which must not fail."""
        result = commands.finish(self.start(*command, folder=folder))
        assert result.returncode == 0, result.stderr
        return result.stdout.strip()

    def submit(self, *command: str | Path, folder: Path | None = None) -> int:
        """`sbatch` with these options, a script, and its arguments. Returns the number of the job."""
        return int(self.ask("sbatch", "--parsable", *command, folder=folder))

    def about(self, job: int) -> dict[str, str]:
        """What Slurm says of a job: JobState, ExitCode, Reason, Restarts, StdOut and so on."""
        return dict(re.findall(r"(\S+?)=(\S*)", self.ask("scontrol", "show", "job", str(job))))

    def wait(self, job: int) -> str:
        """Wait until a job is over. Returns its state."""
        self._wait_until(lambda: self.about(job)["JobState"] in _OVER, f"job {job}", job)
        return self.about(job)["JobState"]

    def output(self, job: int) -> str:
        file = Path(self.about(job)["StdOut"])
        return file.read_text() if file.exists() else ""

    def wait_for(self, text: str, job: int) -> str:
        """Wait until a job has printed this. Returns all that the job has printed."""
        self._wait_until(lambda: text in self.output(job), repr(text), job)
        return self.output(job)

    def kill(self, node: str) -> None:
        """Kill all processes of a node at once. Its connections close; its link stays up."""
        name = self.network.name(HOSTS.index(node))
        for pid in subprocess.check_output(["ip", "netns", "pids", name], text=True).split():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)

    def _start_daemon(self, host: str, *command: str) -> None:
        with (self.folder / f"{host}.out").open("ab") as output:
            process = subprocess.Popen(
                self._on(host, command), env=self._environ(), cwd=self.folder, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            )  # fmt: skip
        self._daemons.append(process)

    def _reap(self) -> None:
        for daemon in self._daemons:
            daemon.wait()

    def _wait_until(self, condition: Callable[[], bool], what: str, job: int | None = None) -> None:
        end = time.monotonic() + patient(60.0)
        while not condition():
            if time.monotonic() > end:
                logs = [f"{path.name}: {path.read_text()[-2000:]}" for path in self.folder.glob("*.out")]
                raise AssertionError("\n".join([f"waited for {what}", self.output(job) if job else "", *logs]))
            time.sleep(_POLL_SECONDS)

    def _on(self, host: str, command: Sequence[str | Path]) -> list[str]:
        """The command on a host, in the same process. `ip netns exec` has given it its own mounts already."""
        mounts = " && ".join(f"mount --bind {self.folder}/{name} /etc/{name}" for name in ("hosts", "resolv.conf"))
        script = f'hostname {host} && {mounts} && exec "$@"'
        words = ["unshare", "--uts", "sh", "-c", script, "sh", *map(str, command)]
        return self.network.command(HOSTS.index(host), words)

    def _environ(self) -> dict[str, str]:
        own = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "SBATCH_", "SRUN_"))}
        path = f"{own.get('PATH', '')}:{_PATH}"
        return {**own, "PATH": path, "SLURM_CONF": str(self.folder / "slurm.conf")}

    def _write_files(self) -> None:
        places = list(zip(HOSTS, self.network.addresses, strict=True))
        nodes = [f"NodeName={name} NodeAddr={address} CPUs={NUM_CPUS} RealMemory=1000" for name, address in places[1:]]
        conf = Path(__file__).with_suffix(".conf").read_text()
        files = {
            "hosts": "".join(f"{address} {name}\n" for name, address in [("localhost", "127.0.0.1"), *places]),
            "resolv.conf": "nameserver 127.0.0.1\n",  # refuses at once: no node has a name server
            "slurm.conf": conf.format(folder=self.folder, nodes="\n".join(nodes)),
            "cgroup.conf": "CgroupPlugin=cgroup/v1\n",  # v2 needs systemd. Nothing uses either
        }
        for name, text in files.items():
            (self.folder / name).write_text(text)
        (self.folder / "munge.key").touch(0o600)
        (self.folder / "munge.key").write_bytes(secrets.token_bytes(128))
        for name in ("state", *HOSTS[1:]):
            (self.folder / name).mkdir()


@contextlib.contextmanager
def _no_subreaper() -> Iterator[None]:
    """Orphans become children of the machine's process 1, which reaps them, and not of this process, as ranks' do.

    For Slurm, a process that has ended is one that cannot be killed, until somebody reaps it.
    """
    prctl, found = ctypes.CDLL(None).prctl, ctypes.c_int()
    prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(found))
    prctl(_PR_SET_CHILD_SUBREAPER, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, found.value)
