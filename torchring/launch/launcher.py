"""`torchring run` starts a Python program on N processes, of this host or of several.

An agent (agent.py) on each host starts the ranks there. It is reached over ssh, or over srun if asked:

        start ---- pipe -------- reaper --- agent ---- ranks        this host
              ---- ssh's stdin - reaper --- agent ---- ranks        another

When the process of `start` ends, even by SIGKILL, its pipes close, and the reapers (reaper.py) end all processes.
Reapers run in sessions of their own: Ctrl-C reaches `start` alone, and `start` tells the reapers. Other hosts need the
same Python, torchring and script at the same paths, as on a shared file system. Nothing here imports torch, because
that takes seconds.
"""

import contextlib
import os
import random
import secrets
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final

from torchring.launch.hosts import (
    Host,
    HostPlan,
    LaunchError,
    address_towards,
    as_this_host,
    is_here,
    resolvable,
    share_out,
    why_no_loopback,
)
from torchring.launch.jobs import HEARTBEAT_SECONDS, KILL_SECONDS, OWN_IMPORTS, HostJob, host_job, open_output
from torchring.launch.output import Output, OutputOptions
from torchring.launch.signals import noted_signals
from torchring.rendezvous.environment import JOB

LAUNCHERS: Final = ("auto", "local", "ssh", "srun", "kubectl")
_PATIENCE_SECONDS: Final = 40.0  # for the reapers after they were told to stop; reaper.py itself waits 32
_REPORT_SECONDS: Final = 2.0  # for the other hosts' ranks to report that a rank has failed
_POLL_SECONDS: Final = 0.02
_SILENCE_SECONDS: Final = 120  # without a heartbeat, after which reapers of other hosts end their processes
_PORTS: Final = range(20_000, 30_000)  # below the ports that Linux hands out to clients
_AGENT_TITLE: Final = "the process that starts the ranks"
# With SIG_DFL, a SIGINT during the imports ends the agent without a traceback. To tear torch down takes long, so
# `os._exit` leaves it.
_AGENT: Final = (
    f"{OWN_IMPORTS}import signal; signal.signal(signal.SIGINT, signal.SIG_DFL); "
    "import os; from torchring.launch.agent import main; os._exit(main(sys.argv[1:]))"
)


def start(
    command: Sequence[str],
    num_proc: int | None = None,
    hosts: Sequence[Host] | None = None,  # by default this host. The first host gets the lowest ranks.
    # variables for the processes. Other hosts get these, PYTHONPATH, OMP_NUM_THREADS and HOROVOD_*.
    env: Mapping[str, str] | None = None,
    launcher: str = "auto",
    output: OutputOptions | None = None,
    ssh_options: Sequence[str] = (),  # arguments for ssh, such as -p and a port
    # see placement.py. "auto" is "core" on hosts with a physical core for each of their ranks, else "none".
    bind: str = "auto",
) -> int:
    """Run `python COMMAND...` in `num_proc` processes that find each other, and wait for them.

    Call it from the main thread: SIGINT, SIGTERM and SIGHUP end all processes, a second signal at once. Rank 0 reads
    this process's standard input if rank 0 is on this host; the other ranks read nothing.

    Returns the exit code of the process that failed first (over ssh: on the host whose processes ended first), 128 + n
    if signal n ended it, or 0. Raises LaunchError if nothing was started.
    """
    if hosts is None:
        hosts = [Host("localhost", num_proc or 1)]
    hosts = as_this_host(share_out(hosts, num_proc))
    launcher = _choose(hosts, launcher)
    if launcher == "local" and (trouble := why_no_loopback()):
        raise LaunchError(trouble)
    env = {JOB: secrets.token_hex(16), **(env or {})}
    address, port = _rendezvous_endpoint(hosts) if len(hosts) > 1 else ("", 0)
    how: dict[str, Any] = {"environ": os.environ, "silence": _SILENCE_SECONDS, "title": _AGENT_TITLE}
    how |= {"ssh_options": ssh_options, "launcher": launcher}
    jobs, size = [], sum(host.slots for host in hosts)
    for number, host in enumerate(hosts):
        first = sum(each.slots for each in hosts[:number])
        output = output or OutputOptions()
        plan = HostPlan(host.slots, first, size, len(hosts), number, host.name, address, port, output, bind)
        jobs.append(host_job(host.name, [sys.executable, "-c", _AGENT, plan.to_json(), *command], env, **how))
    # The agents write log files and tags. Several agents may print parts of lines at the same time.
    return _supervise(jobs, open_output(OutputOptions()) if len(jobs) > 1 else None)


def _supervise(jobs: Sequence[HostJob], output: Output | None) -> int:
    """Wait for all jobs. A failure or a signal ends the others. A second signal kills them at once."""
    code = 0
    started: list[HostJob] = []
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
                for job in [job for job in running if job.process.poll() is not None]:
                    running.remove(job)
                    code = code or _exit_code(job)
                if time.monotonic() > heartbeat_at:
                    heartbeat_at = time.monotonic() + HEARTBEAT_SECONDS
                    for job in running:
                        job.tell(0)
                if running and not code:
                    time.sleep(_POLL_SECONDS)
        except OSError as error:
            what = error.filename or "the processes"
            raise LaunchError(f"cannot start {what}: {error.strerror or error}") from error
        finally:
            _end(started, received)
            if output is not None:
                output.close()
    return code or (128 + received[0] if received else 0)


def _end(jobs: Sequence[HostJob], received: Sequence[int]) -> None:
    """End the jobs by the signal that was received, or by SIGTERM. Kill them after a second signal, or a while."""

    def wait(seconds: float, num_signals: float = float("inf")) -> None:
        end = time.monotonic() + seconds
        while time.monotonic() < end and len(received) < num_signals:
            if all(job.process.poll() is not None for job in jobs):
                return
            time.sleep(_POLL_SECONDS)

    if not received:
        wait(_REPORT_SECONDS, 1)
    number = received[0] if received else signal.SIGTERM
    for job in jobs:
        job.tell(number)
    wait(_PATIENCE_SECONDS, len(received) + 1)
    for job in jobs:
        job.tell(signal.SIGKILL)
    wait(KILL_SECONDS)
    for job in jobs:
        job.close()


def _exit_code(job: HostJob) -> int:
    code, said = job.process.returncode, ""
    if code == 255 and job.is_remote and job.command[0] == "ssh":
        said = (
            f"{job.name} ended first, with 255: ssh could not run the processes there, and says why above; or a "
            f"process there ended so. `ssh -o BatchMode=yes {job.name} true` has to work"
        )
    elif code and job.is_remote:
        said = f"the processes on {job.name} failed, with exit code {code}"
    elif code < 0:
        said = (
            f"the process that watches over the ranks (reaper.py, pid {job.process.pid}) was killed by "
            f"{signal.Signals(-code).name}; the ranks were told to end, but not what they have started"
        )
    if said:
        print(f"torchring run: {said}", file=sys.stderr)
    return code if code >= 0 else 128 - code


def _choose(hosts: Sequence[Host], launcher: str) -> str:
    remote = [host.name for host in hosts if not is_here(host.name)]
    if launcher == "local" and remote:
        raise LaunchError(f"launcher 'local' starts nothing on {', '.join(remote)}; use 'ssh'")
    if launcher == "kubectl":
        raise LaunchError("launcher 'kubectl' is for --elastic: pods do not know each other by their names")
    return launcher if launcher != "auto" else "ssh" if remote else "local"


def _rendezvous_endpoint(hosts: Sequence[Host]) -> tuple[str, int]:
    """An address of the first host that the others can reach, and a port, which is free if that is this host."""
    first = hosts[0].name
    if not is_here(first):
        return resolvable(first), random.choice(_PORTS)
    for port in random.sample(_PORTS, 50):
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return address_towards(hosts[1].name), port  # other hosts would take "localhost" for themselves
    raise LaunchError(f"50 ports between {_PORTS.start} and {_PORTS.stop} are all in use")
