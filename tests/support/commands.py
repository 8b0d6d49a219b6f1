"""Commands in sessions of their own, of which nothing stays."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.harness import patient


def start(
    command: Sequence[str | os.PathLike[str]], env: Mapping[str, str], folder: Path | None = None
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
        kill(process)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def kill(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
