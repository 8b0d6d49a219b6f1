"""Commands in sessions of their own, of which nothing stays."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.support.documents import ROOT
from tests.support.harness import _clean_environ, patient


def start(
    command: Sequence[str | os.PathLike[str]], env: Mapping[str, str] | None = None, folder: Path | None = None
) -> subprocess.Popen[str]:
    """The command, in `folder`, with pipes."""
    pipe = subprocess.PIPE
    return subprocess.Popen(
        command, cwd=folder, env=env, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    )


def finish(process: subprocess.Popen[str], said: str = "", seconds: float = 60.0) -> subprocess.CompletedProcess[str]:
    """Say `said` to the command, wait for its end, and kill what is left of its session."""
    try:
        out, err = process.communicate(said, timeout=patient(seconds))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def run_python(
    *arguments: str | os.PathLike[str],
    env: Mapping[str, str] | None = None,
    folder: Path | None = None,
    seconds: float = 60.0,
) -> subprocess.CompletedProcess[str]:
    return finish(start([sys.executable, *arguments], env, folder), seconds=seconds)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# As sshd does: what stands behind the host, joined by spaces, is for the user's shell.
_SSH = """#!/bin/sh
while [ $# -gt 0 ]; do
    case "$1" in
        -o) shift 2 ;;
        -G) echo "hostname 127.0.0.1"; exit ;;
        -*) shift ;;
        *) break ;;
    esac
done
host=$1
shift
echo "$host" >>{log}
echo "$*" >>{log}.commands
case "$host" in
{cases}
    *) echo "ssh: Could not resolve hostname $host: Name or service not known" >&2; exit 255 ;;
esac
"""


class Launcher:
    """Runs `python -m torchring ...` in a folder of its own. Processes write what they have to say to $REPORTS.

    `ssh` has by host what the stand-in for ssh does: a line of sh, in which "$*" is what is to run there.
    """

    def __init__(self, folder: Path, ssh: Mapping[str, str] | None = None) -> None:
        self.folder = folder / "a folder's name"
        self.reports_folder = folder / "reports"
        for made in (self.folder, self.reports_folder, folder / "bin"):
            made.mkdir()
        self.ssh_log = folder / "log"  # the hosts that ssh was told. What was to run there is in ssh_log.commands.
        cases = "\n".join(f"    {host}) {line} ;;" for host, line in (ssh or {}).items())
        (folder / "bin" / "ssh").write_text(_SSH.format(log=self.ssh_log, cases=cases))
        (folder / "bin" / "ssh").chmod(0o755)
        self.environ = {name: value for name, value in _clean_environ().items() if not name.startswith("TORCHRING_")}
        self.environ |= {"PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        self.environ["REPORTS"] = str(self.reports_folder)
        del self.environ["OMP_NUM_THREADS"]

    def script(self, code: str, name: str = "script.py") -> str:
        (self.folder / name).write_text(code)
        return name

    def start(self, *arguments: str, before: Sequence[str] = (), **environ: str) -> subprocess.Popen[str]:
        command = [*before, sys.executable, "-m", "torchring", *arguments]
        return start(command, {**self.environ, **environ}, self.folder)

    def finish(self, process: subprocess.Popen[str], said: str = "") -> subprocess.CompletedProcess[str]:
        """`finish`, and no process stays that has reported its number: ranks are in sessions of their own."""
        try:
            return finish(process, said)
        finally:
            for pid in self.pids():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def run(self, *arguments: str, **how: Any) -> subprocess.CompletedProcess[str]:
        return self.finish(self.start(*arguments, **how))

    def reports(self) -> dict[str, dict[str, Any]]:
        """By the name of the file, such as "0" for rank 0."""
        return {file.name: json.loads(file.read_text()) for file in sorted(self.reports_folder.glob("[0-9]*"))}

    def pids(self) -> list[int]:
        return [report["pid"] for report in self.reports().values() if "pid" in report]
