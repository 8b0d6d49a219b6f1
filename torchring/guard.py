"""Sees to it that nothing outlives a launch. Run by its path, needs nothing but Python.

    python guard.py FD COMMAND...     runs the command; the exit code is the command's, 128 + n if signal n ended it
    python guard.py FD --watch MARK   runs nothing; watches over processes that have MARK in their environment

Whoever starts it holds the other end of the pipe FD. When that end closes, by intention or because its holder was
killed or the connection to it broke, the processes are asked to end (SIGTERM) and, after a while, killed: the command's
with all that it has started, in sessions of their own or not. So are those that a command leaves when it fails. A byte
in the pipe ends the watch: all went well.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

PATIENCE_SECONDS = 10.0
_PR_SET_CHILD_SUBREAPER = 36
_POLL_SECONDS = 0.2


def main(arguments: list[str]) -> int:
    lifeline, command = int(arguments[0]), arguments[1:]
    if command[0] == "--watch":
        return _watch(lifeline, command[1])
    return _run(lifeline, command)


def _run(lifeline: int, command: list[str]) -> int:
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)  # what the command leaves becomes our child
    ended, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    received: set[int] = set()
    for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, _: received.add(number))
    try:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL if lifeline == 0 else None)
    except OSError as error:
        print(f"torchring run: cannot start {command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    while process.poll() is None:
        readable, _, _ = select.select([lifeline, ended], [], [], _POLL_SECONDS)
        if ended in readable:
            os.read(ended, 4096)
        closed = lifeline in readable and not os.read(lifeline, 4096)
        if closed or received & {signal.SIGTERM, signal.SIGHUP}:
            if signal.SIGINT not in received:  # else Ctrl-C, of which the terminal has told the command as well
                process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE_SECONDS)
            break
    if process.poll() != 0:
        _kill(_descendants)
    code = process.wait()
    return code if code >= 0 else 128 - code


def _watch(lifeline: int, mark: str) -> int:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if os.read(lifeline, 1):
        return 0
    for pid in _marked(mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
    end = time.monotonic() + PATIENCE_SECONDS
    while _marked(mark) and time.monotonic() < end:
        time.sleep(_POLL_SECONDS)
    _kill(lambda: _marked(mark))
    return 0


def _kill(find: Callable[[], set[int]]) -> None:
    """A few rounds: a process may start another while it is being killed."""
    end = time.monotonic() + 2.0
    while (pids := find()) and time.monotonic() < end:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)


def _marked(mark: str) -> set[int]:
    found = set()
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # gone meanwhile, or not ours
            if mark.encode() in file.read_bytes().split(b"\0"):
                found.add(int(file.parent.name))
    return found - {os.getpid()}


def _descendants() -> set[int]:
    parents = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # gone meanwhile
            state, parent = file.read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                parents[int(file.parent.name)] = int(parent)
    family = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return family - {os.getpid()}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
