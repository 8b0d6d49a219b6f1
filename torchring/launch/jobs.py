"""Jobs: a command on one host, under a reaper that ends the command's processes. See launcher.py for the picture."""

import contextlib
import errno
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from torchring.launch.hosts import LaunchError, is_here
from torchring.launch.output import STDERR, STDOUT, Output, OutputOptions

HEARTBEAT_SECONDS: Final = 10.0  # between two heartbeats to the reapers of other hosts
KILL_SECONDS: Final = 5.0  # for the reapers to kill the processes that are left
# Starts a job step of its own, which shares the node's cores with other steps. srun gives up after 20 s if Slurm offers
# no node, instead of waiting for the node to come back.
_SRUN: Final = ("srun", "--overlap", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1", "--cpu-bind=none", "--mpi=none",
                "--export=ALL", "--immediate=20", "--quiet")  # fmt: skip
# Begins a program for `python -c`, which imports from the working directory first, as `python -m` does. A file there
# may have the name of a module that the program needs: one of the user's, or, in /tmp, one of somebody else's.
OWN_IMPORTS: Final = "import sys; path, sys.path = sys.path, [each for each in sys.path if each]; "
_REAPER: Final = Path(__file__).with_name("reaper.py")


@dataclass
class HostJob:
    """One reaper, on this host or behind ssh, srun or kubectl, and the command that it runs."""

    name: str
    command: list[str]
    environ: Mapping[str, str]
    is_remote: bool = False
    options: Mapping[str, str | float | None] = field(default_factory=dict)  # for the reaper of a command here
    variables: bytes = b""  # for the command, in JSON, from a reaper that was told their length
    process: subprocess.Popen[bytes] = field(init=False)
    lifeline: int = field(init=False, default=-1)

    def start(self, output: Output | None, rank: int | None = None) -> None:
        """Start the reaper. Its output goes to `output`, or to this process's stdout and stderr if that is None.

        A job that is one rank, or one worker, gives its number, and reads nothing.
        """
        theirs, self.lifeline = os.pipe()
        os.set_blocking(self.lifeline, False)  # a connection that is cut has no reader
        streams = [output.pipe(stream, rank) for stream in (STDOUT, STDERR)] if output else []
        out, err = streams or (None, None)
        how: dict[str, Any] = {"stdout": out, "stderr": err, "env": self.environ, "start_new_session": True}
        try:
            if self.variables and os.write(self.lifeline, self.variables) < len(self.variables):
                raise OSError(errno.E2BIG, f"{len(self.variables)} bytes of variables are too many for {self.name}")
            if self.is_remote:
                self.process = subprocess.Popen(self.command, stdin=theirs, **how)
            else:
                reaper = [*_reaper(str(theirs), **self.options), *self.command]
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


def host_job(
    name: str,
    command: Sequence[str],
    env: Mapping[str, str],
    *,
    environ: Mapping[str, str],
    silence: float,
    sharing: int | None = None,
    ssh_options: Sequence[str] = (),
    launcher: str = "ssh",
    patience: float | None = None,
    title: str = "",
) -> HostJob:
    """A job on this host, or on another one through ssh, srun or kubectl (if `name` is that of a pod).

    Args:
        env: variables to set for the command.
        environ: the other variables of a command on this host, and of one that srun starts. Through ssh, a command gets
            PYTHONPATH, OMP_NUM_THREADS and HOROVOD_* of this process.
        silence, sharing, patience, title: of the reaper, see reaper.py. `silence` counts on other hosts only.
        ssh_options: arguments for ssh, such as -p and a port.
    """
    options = {"patience": patience, "title": title, "sharing": sharing}
    if is_here(name):
        return HostJob(name, list(command), {**environ, **env}, options=options)
    names = ("PYTHONPATH", "OMP_NUM_THREADS")
    own = {key: value for key, value in os.environ.items() if key in names or key.startswith("HOROVOD_")}
    settings = {**own, **env}
    variables = json.dumps(settings).encode()  # may be secrets, which every user could read on a command line
    reaper = _reaper("0", silence=silence, environ=len(variables), **options)
    # Python may not start without these. `env` takes a path with "=" for a variable, `exec` in sh does not.
    early = [f"{key}={value}" for key, value in settings.items() if key.startswith("LD_")]
    words = ["env", *early, "sh", "-c", 'exec "$0" "$@"'] if early else []
    there = f"cd {shlex.quote(os.getcwd())} && exec {shlex.join([*words, *reaper, *command])}"
    if launcher == "srun":
        shell = [*_SRUN, f"--nodelist={name}", "sh", "-c"]
    elif launcher == "kubectl":
        shell = ["kubectl", "exec", "-i", name, "--", "sh", "-c"]
    else:  # BatchMode, because ssh must not ask for a password: the reaper uses the standard input
        shell = ["ssh", "-o", "BatchMode=yes", *ssh_options, name]
    return HostJob(name, [*shell, there], environ, is_remote=True, variables=variables)


def _reaper(lifeline: str, **options: str | float | None) -> list[str]:
    """The command that starts a reaper, up to the command that the reaper runs. Leaves out options without a value."""
    given = [word for name, value in options.items() if value not in (None, "") for word in (f"--{name}", str(value))]
    return [sys.executable, "-I", str(_REAPER), lifeline, *given]


def open_output(options: OutputOptions, log_name: str = "rank{}.log") -> Output:
    """An `Output`. Raises LaunchError if log files cannot be written."""
    try:
        return Output(options, log_name=log_name)
    except OSError as error:
        raise LaunchError(f"--log-dir {options.log_dir}: {error.strerror}; take a folder you can write to") from error
