"""Starts a Python program on N processes, of this machine or of several: what `torchring run` does.

    this machine    torch.distributed.run
    several hosts   mpirun (Open MPI), if it and mpi4py are installed; else torch.distributed.run on each, over ssh:

        start ---- pipe -------- reaper --- agent ---- ranks        this machine
              ---- ssh's stdin - reaper --- agent ---- ranks        another

When the process of `start` ends, even by SIGKILL, its pipes close, and the reapers (reaper.py) end all processes.
Reapers run in sessions of their own: Ctrl-C reaches `start` alone, and `start` tells the reapers. Other hosts need the
same Python, torchring and script at the same paths, as on a shared file system. Nothing here imports torch, because
that takes seconds.

mpirun and ssh are both there on purpose: clusters with mpirun may not allow ssh, and mpi4py may not be installed.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import json
import os
import random
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from torchring.launch.output import STDERR, STDOUT, Output, OutputOptions
from torchring.launch.part import Part
from torchring.launch.signals import noted_signals
from torchring.rendezvous.addresses import own_addresses
from torchring.rendezvous.environment import JOB

LAUNCHERS: Final = ("auto", "local", "mpirun", "ssh")
_REAPER: Final = Path(__file__).with_name("reaper.py")
_HOST: Final = re.compile(r"(?P<name>\[[0-9a-fA-F:.]+\]|[^\s:,\[\]]+)(?::(?P<slots>[0-9]+))?")
_PATIENCE_SECONDS: Final = 40.0  # for the reapers after they were told to stop; reaper.py itself waits 32
_LOOPBACK_SECONDS: Final = 5.0
_LAST_WORDS_SECONDS: Final = 2.0  # for the other hosts' ranks to report that a rank has failed
KILL_SECONDS: Final = 5.0  # for the reapers to kill the processes that are left
_POLL_SECONDS: Final = 0.05
HEARTBEAT_SECONDS: Final = 10.0  # between two heartbeats to the reapers of other hosts
_SILENCE_SECONDS: Final = 120  # without a heartbeat, after which reapers of other hosts end their processes
_PORTS: Final = range(20_000, 30_000)  # below the ports that Linux hands out to clients
# Gives each rank an equal share of its host's cores, as the agent does without mpirun.
_SHARE_CORES: Final = (
    'if [ -z "$OMP_NUM_THREADS" ]; then n=$(( $(nproc) / ${OMPI_COMM_WORLD_LOCAL_SIZE:-1} )); '
    'export OMP_NUM_THREADS=$(( n > 0 ? n : 1 )); fi; exec "$@"'
)


# Not `-m`, which puts the working directory first in sys.path: a file of the user's may have the name of a module that
# the agent needs. With SIG_DFL, a SIGINT during the import of torch ends the agent without a traceback.
_AGENT: Final = (
    "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); sys.path = [path for path in sys.path if path]; "
    "from torchring.launch.agent import main; sys.exit(main(sys.argv[1:]))"
)


_AGENT_TITLE: Final = "the process that starts the ranks"


class LaunchError(Exception):
    """The program could not be started. The text says why, and what would be right."""


@dataclass(frozen=True)
class Host:
    """A machine, and the number of processes that it takes."""

    name: str
    slots: int


def parse_hosts(text: str) -> list[Host]:
    """ "a:2,b:4" is two processes on a and four on b. A host without a number takes one. Raises LaunchError."""
    return [parse_host(item.strip(), f"-H takes host:slots,host:slots,..., got {text!r}") for item in text.split(",")]


def parse_hostfile(text: str) -> list[Host]:
    """One host per line: "a slots=2", "a:2" or "a". Text after # is a comment. Raises LaunchError."""
    hosts = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        complaint = f"line {number} of the host file must be `host`, `host:slots` or `host slots=N`, got {line!r}"
        slots = re.fullmatch("slots=([0-9]+)", words[1]) if len(words) == 2 and ":" not in words[0] else None
        if len(words) > 2 or (len(words) == 2 and slots is None):
            raise LaunchError(complaint)
        hosts.append(parse_host(f"{words[0]}:{slots[1]}" if slots else words[0], complaint))
    if not hosts:
        raise LaunchError("the host file names no host")
    return hosts


def share_out(hosts: Sequence[Host], num_proc: int | None) -> list[Host]:
    """Fill hosts in the given order, and leave out hosts that get no process. The same host twice is one host."""
    slots: dict[str, int] = {}
    for host in hosts:
        slots[host.name] = slots.get(host.name, 0) + host.slots
    total = sum(slots.values())
    left = total if num_proc is None else num_proc
    if left > total:
        offers = ", ".join(f"{name}:{offered}" for name, offered in slots.items())
        raise LaunchError(f"-np {left} is more than the {total} slots of {offers}")
    filled = []
    for name, offered in slots.items():
        if used := min(offered, left):
            filled.append(Host(name, used))
            left -= used
    return filled


def start(
    command: Sequence[str],
    num_proc: int | None = None,
    hosts: Sequence[Host] | None = None,
    env: Mapping[str, str] | None = None,
    launcher: str = "auto",
    output: OutputOptions | None = None,
    is_over: Callable[[], bool] = lambda: False,
    ssh_options: Sequence[str] = (),
) -> int:
    """Run `python COMMAND...` in `num_proc` processes that find each other, and wait for them.

    Call `start` from the main thread: SIGINT, SIGTERM and SIGHUP end all processes, and then `start` returns. A second
    signal kills the processes at once. Their output is shown in whole lines. Rank 0 reads this process's standard input
    if rank 0 is on this machine; the other ranks read nothing.

    Args:
        command: the arguments of `python`: a script, or `-m` and a module, and their arguments.
        num_proc: number of processes. By default all slots of `hosts`, or 1 without hosts.
        hosts: by default this machine. The first host gets the lowest ranks.
        env: variables to set for the processes, on every host. Other hosts get these variables, PYTHONPATH,
            OMP_NUM_THREADS and HOROVOD_*, and no others.
        launcher: "local" (this machine only), "mpirun", "ssh", or "auto".
        output: how to show the output of the processes. With ssh, each host writes the log files of its own ranks.
        is_over: called every 50 ms. Once it returns True, the processes end as after SIGTERM.
        ssh_options: arguments for ssh, such as -p and a port. With them, "auto" prefers ssh to mpirun.

    Returns the exit code of the first process that failed, or 0 if none failed. A process that signal n ended has exit
    code 128 + n. With several hosts over ssh, "first" is the host whose processes ended first.

    Raises:
        LaunchError: nothing was started.
    """
    if launcher not in LAUNCHERS:
        raise LaunchError(f"launcher must be one of {', '.join(LAUNCHERS)}, got {launcher!r}")
    if hosts is None:
        hosts = [Host("localhost", num_proc or 1)]
    filled = as_this_machine(share_out(hosts, num_proc))
    launcher = _choose(filled, launcher, prefers_ssh=bool(ssh_options))
    if launcher == "local" and (trouble := why_no_loopback()):
        raise LaunchError(trouble)
    env, output = {JOB: secrets.token_hex(8), **(env or {})}, output or OutputOptions()
    if launcher == "mpirun":
        # mpirun sends values to other hosts in messages. In its command line, all users of the machine could read them.
        environ = {**os.environ, **env}
        jobs = [Job("mpirun", _mpirun(filled, command, env), environ, title="mpirun", is_mpirun=True)]
        return _supervise(jobs, open_output(output), is_over)
    jobs = _agents(filled, command, env, output, ssh_options)
    # The agents write log files and tags. Several agents may print parts of lines at the same time.
    return _supervise(jobs, open_output(OutputOptions()) if len(jobs) > 1 else None, is_over)


def open_output(options: OutputOptions, log_name: str = "rank{}.log") -> Output:
    """An Output, see there. Raises LaunchError if log files cannot be written."""
    try:
        return Output(options, log_name=log_name)
    except OSError as error:
        raise LaunchError(f"cannot write log files to {options.log_dir!r}: {error.strerror}") from error


@dataclass
class Job:
    """One reaper, on this machine or behind ssh, and the command that it runs."""

    name: str
    command: list[str]
    environ: Mapping[str, str]
    is_remote: bool = False
    patience: float | None = None  # seconds that a command on this machine gets to end after a signal
    title: str = ""  # of a command on this machine, for a message if a signal ends the command
    is_mpirun: bool = False
    variables: bytes = b""  # for the command, in JSON, from a reaper that was told their length
    process: subprocess.Popen[bytes] = field(init=False)
    lifeline: int = field(init=False, default=-1)

    def start(self, output: Output | None, rank: int | None = None) -> None:
        """Start the reaper. Its output goes to `output`, or to this process's stdout and stderr if that is None.

        A job that is one rank, or one worker, gives its number, and reads nothing.
        """
        theirs, self.lifeline = os.pipe()
        os.set_blocking(self.lifeline, False)  # a connection that is cut has no reader
        streams = [output.pipe(stream, rank, is_mpirun=self.is_mpirun) for stream in (STDOUT, STDERR)] if output else []
        out, err = streams or (None, None)
        how: dict[str, Any] = {"stdout": out, "stderr": err, "env": self.environ, "start_new_session": True}
        try:
            if self.variables and os.write(self.lifeline, self.variables) < len(self.variables):
                raise OSError(errno.E2BIG, f"{len(self.variables)} bytes of variables are too many for {self.name}")
            if self.is_remote:
                self.process = subprocess.Popen(self.command, stdin=theirs, **how)
            else:
                reaper = [*_reaper(str(theirs), patience=self.patience, title=self.title), *self.command]
                stdin = None if rank is None else subprocess.DEVNULL
                self.process = subprocess.Popen(reaper, stdin=stdin, pass_fds=[theirs], **how)
        except OSError:
            os.close(self.lifeline)
            raise
        finally:
            for descriptor in [theirs, *streams]:
                os.close(descriptor)

    def close(self) -> None:
        """Kill the reaper if it runs. Call this once, after `start`."""
        os.close(self.lifeline)
        self.process.kill()
        self.process.wait()

    def tell(self, number: int) -> None:
        """Have the reaper pass a signal on. 0 is a heartbeat."""
        with contextlib.suppress(OSError):  # the reaper has ended
            os.write(self.lifeline, bytes([number]))


def _reaper(lifeline: str, **options: float | str | None) -> list[str]:
    """The command that starts a reaper, up to the command that the reaper runs. Leaves out options without a value."""
    given = [word for name, value in options.items() if value not in (None, "") for word in (f"--{name}", str(value))]
    return [sys.executable, "-I", str(_REAPER), lifeline, *given]


def _supervise(jobs: Sequence[Job], output: Output | None, is_over: Callable[[], bool]) -> int:
    """Wait for all jobs. A failure, a signal or `is_over` ends the others. A second signal kills them at once."""
    code = 0
    started: list[Job] = []
    with noted_signals() as received:
        try:
            for job in jobs:
                job.start(output)
                started.append(job)
            if output is not None:
                output.start()
            running = list(started)
            heartbeat_at = time.monotonic() + HEARTBEAT_SECONDS
            while running and not code and not received:
                if is_over():
                    received.append(signal.SIGTERM)
                for job in [job for job in running if job.process.poll() is not None]:
                    running.remove(job)
                    code = code or _exit_code(job)
                if time.monotonic() > heartbeat_at:
                    heartbeat_at = time.monotonic() + HEARTBEAT_SECONDS
                    for job in running:
                        job.tell(0)
                if running and not code:
                    time.sleep(_POLL_SECONDS)
        except FileNotFoundError as error:
            raise LaunchError(f"cannot start {error.filename}: it is not installed") from error
        except OSError as error:
            raise LaunchError(f"cannot start the processes: {error.strerror or error}") from error
        finally:
            _end(started, received)
            if output is not None:
                output.close()
    return code or (128 + received[0] if received else 0)


def _end(jobs: Sequence[Job], received: Sequence[int]) -> None:
    """End the jobs by the signal that was received, or by SIGTERM. Kill them after a second signal, or a while."""

    def wait(seconds: float, num_signals: float = float("inf")) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and len(received) < num_signals:
            if all(job.process.poll() is not None for job in jobs):
                return
            time.sleep(_POLL_SECONDS)

    if not received:
        wait(_LAST_WORDS_SECONDS, 1)
    number = received[0] if received else signal.SIGTERM
    for job in jobs:
        job.tell(number)
    wait(_PATIENCE_SECONDS, len(received) + 1)
    for job in jobs:
        job.tell(signal.SIGKILL)
    wait(KILL_SECONDS)
    for job in jobs:
        job.close()


def _exit_code(job: Job) -> int:
    code = job.process.returncode
    if code == 255 and job.is_remote:
        print(
            f"torchring run: {job.name} ended first, with 255: ssh could not run the processes there (it says why "
            "above; try `ssh -o BatchMode=yes` yourself), or one of them ended so",
            file=sys.stderr,
        )
    elif code and job.is_remote:
        print(f"torchring run: the processes on {job.name} failed, with exit code {code}", file=sys.stderr)
    elif code < 0:
        print(
            f"torchring run: the process that watches over the ranks (reaper.py, pid {job.process.pid}) was killed by "
            f"{signal.Signals(-code).name}; the ranks were told to end, but not what they have started",
            file=sys.stderr,
        )
    return code if code >= 0 else 128 - code


def _choose(hosts: Sequence[Host], launcher: str, *, prefers_ssh: bool = False) -> str:
    remote = [host.name for host in hosts if not is_here(host.name)]
    if launcher == "local" and remote:
        raise LaunchError(f"launcher 'local' starts nothing on {', '.join(remote)}; use 'mpirun' or 'ssh'")
    if launcher == "mpirun" and (trouble := _why_no_mpirun()):
        raise LaunchError(trouble)
    if launcher != "auto":
        return launcher
    if not remote:
        return "local"
    return "ssh" if prefers_ssh or _why_no_mpirun() else "mpirun"


def why_no_loopback() -> str | None:
    """Why ranks of this machine cannot meet. torch would try for a minute, and not say why."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=_LOOPBACK_SECONDS).close()
    except OSError as error:
        return (
            f"this machine does not reach itself at 127.0.0.1, where ranks meet ({error.strerror or error}): its "
            "loopback interface may be down; `ip link set lo up` starts it"
        )
    return None


def _find_mpirun() -> str | None:
    """mpirun on PATH, or beside python: pip puts mpirun there, and the virtual environment may not be activated."""
    return shutil.which("mpirun") or shutil.which("mpirun", path=os.path.dirname(sys.executable))


def _why_no_mpirun() -> str | None:
    path = _find_mpirun()
    if path is None:
        return f"there is no mpirun on PATH or beside {sys.executable}; install Open MPI, or use launcher 'ssh'"
    try:
        version = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{path} does not run: {error}"
    if "Open MPI" not in version:
        return f"{path} is not Open MPI's, whose options torchring knows; use launcher 'ssh'"
    if importlib.util.find_spec("mpi4py") is None:
        return f"mpirun needs mpi4py, which is not installed for {sys.executable}; install it, or use launcher 'ssh'"
    return None


def _mpirun(hosts: Sequence[Host], command: Sequence[str], env: Mapping[str, str]) -> list[str]:
    """The mpirun command, with its full path: mpirun uses the path to find its parts on other hosts."""
    options = [_find_mpirun() or "mpirun", "-np", str(sum(host.slots for host in hosts))]
    options += ["-H", ",".join(f"{host.name}:{host.slots}" for host in hosts), "--map-by", "slot", "--bind-to", "none"]
    options += ["--wdir", os.getcwd(), "--tag-output"]  # `Output` reads the rank from the tags, and removes them
    if os.geteuid() == 0:
        options.append("--allow-run-as-root")
    for key in forwarded(env):
        options += ["-x", key]
    # mpi4py aborts the other ranks when a rank fails.
    return [*options, "sh", "-c", _SHARE_CORES, "sh", sys.executable, "-u", "-m", "mpi4py", *command]


def _agents(
    hosts: Sequence[Host],
    command: Sequence[str],
    env: Mapping[str, str],
    output: OutputOptions,
    ssh_options: Sequence[str] = (),
) -> list[Job]:
    """One job per host. Each runs torch.distributed.run."""
    address, port = _rendezvous_endpoint(hosts) if len(hosts) > 1 else ("", 0)
    jobs = []
    for number, host in enumerate(hosts):
        part = Part(host.slots, len(hosts), number, host.name, address, port, output)
        agent = [sys.executable, "-c", _AGENT, part.to_json(), *command]
        if is_here(host.name):
            jobs.append(Job(host.name, agent, {**os.environ, **env}, title=_AGENT_TITLE))
        else:
            jobs.append(remote_job(host.name, agent, env, ssh_options, silence=_SILENCE_SECONDS, title=_AGENT_TITLE))
    return jobs


def remote_job(
    name: str,
    command: Sequence[str],
    env: Mapping[str, str],
    ssh_options: Sequence[str] = (),
    *,
    silence: float,
    patience: float | None = None,
    title: str = "",
) -> Job:
    """A job that runs `command` on another host, through ssh. See `start` for `env` and `ssh_options`.

    Args:
        silence: seconds without a heartbeat, after which the reaper there ends the command.
        patience: seconds that the command gets to end after a signal. By default those of reaper.py.
        title: what to call the command in a message, if a signal ends it. By default there is no message.
    """
    settings = forwarded(env)
    variables = json.dumps(settings).encode()  # may be secrets, which every user could read on a command line
    reaper = _reaper("0", silence=silence, patience=patience, title=title, environ=len(variables))
    # Python may not start without these.
    early = [f"{key}={value}" for key, value in settings.items() if key.startswith("LD_")]
    there = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join(['env', *early, *reaper, *command])}"
    # BatchMode, because ssh must not ask for a password: the reaper uses the standard input.
    ssh = ["ssh", "-o", "BatchMode=yes", *ssh_options, name, there]
    return Job(name, ssh, os.environ, is_remote=True, variables=variables)


def forwarded(env: Mapping[str, str]) -> dict[str, str]:
    """`env`, and what other hosts get of this process's variables."""
    names = ("PYTHONPATH", "OMP_NUM_THREADS")
    own = {key: value for key, value in os.environ.items() if key in names or key.startswith("HOROVOD_")}
    return {**own, **env}


def _rendezvous_endpoint(hosts: Sequence[Host]) -> tuple[str, int]:
    """An address of the first host that the others can reach, and a port. The port is free if the first host is this
    machine."""
    first = hosts[0].name.rpartition("@")[2].strip("[]")
    if not is_here(hosts[0].name):
        return resolvable(first), random.choice(_PORTS)
    remote = next((host.name for host in hosts if not is_here(host.name)), None)
    if remote is not None:  # other hosts would take "localhost" for themselves
        first = address_towards(remote.rpartition("@")[2].strip("[]"))
    for port in random.sample(_PORTS, 50):
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return first, port
    raise LaunchError(f"50 ports between {_PORTS.start} and {_PORTS.stop} are all in use")


def resolvable(name: str) -> str:
    """The name itself, or the address that ssh's configuration has for a name that does not resolve."""
    try:
        socket.getaddrinfo(name, 9)
    except OSError:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):
            said = subprocess.run(["ssh", "-G", name], capture_output=True, text=True, timeout=20).stdout
            if found := re.search("^hostname (.+)$", said, re.MULTILINE):
                return found[1]
    return name


def address_towards(name: str) -> str:
    """This machine's address on the network of the named host. The likeliest address if the name does not resolve."""
    with contextlib.suppress(OSError):
        family, kind, _, _, address = socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    return own_addresses()[0]


def is_here(name: str) -> bool:
    """Whether the host is this machine: its name resolves to an address of this machine."""
    name = name.strip("[]")
    if "@" in name:  # another user, whose files and environment may differ
        return False
    if name in ("localhost", socket.gethostname()):
        return True
    with contextlib.suppress(OSError):
        for family, _, _, _, address in socket.getaddrinfo(name, 0, type=socket.SOCK_STREAM):
            with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
                probe.bind(address)
                return True
    return False


def as_this_machine(hosts: Sequence[Host]) -> list[Host]:
    """Merge hosts that are all names of this machine into one."""
    here = [host for host in hosts if is_here(host.name)]
    if len(here) < 2:
        return list(hosts)
    together = Host(here[0].name, sum(host.slots for host in here))
    return [together if host is here[0] else host for host in hosts if host is here[0] or host not in here]


def parse_host(text: str, complaint: str, default_slots: int = 1) -> Host:
    """`host:slots` or `host`. Raises LaunchError with the complaint."""
    match = _HOST.fullmatch(text)
    # ssh would take a leading "-" for an option.
    if match is None or match["slots"] == "0" or text.startswith("-"):
        raise LaunchError(complaint)
    return Host(match["name"], int(match["slots"] or default_slots))
