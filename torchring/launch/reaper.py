"""Runs a command, and makes sure that no process outlives a launch. Run by its path, needs nothing but Python.

    python reaper.py FD [OPTIONS] COMMAND...

    --silence N    N seconds without a byte from FD count as a closed pipe
    --patience N   the command gets N seconds to end after a signal
    --title T      if a signal ends the command, a message calls it T
    --environ N    the first N bytes from FD are JSON: variables for the command, which all users could read if they
                   were in a command line
    --sharing N    OMP_NUM_THREADS becomes the number of cores divided by N, if it is not set

The exit code is the command's, 128 + n if signal n ended it.

The process that starts a reaper holds the other end of the pipe FD, and writes numbers of signals into the pipe, a byte
each. The reaper passes the first SIGINT, SIGTERM or SIGHUP on to the command, and gives it some time to end. SIGKILL
ends the command at once. A pipe that closes counts as SIGTERM: its holder has ended, or the connection broke. A network
connection that is cut does not close the pipe, so the holder writes a heartbeat (a byte of 0) now and then. If the
command was stopped or has failed, the reaper kills every process that the command has started, in any session. It
finds these processes in /proc. If the reaper itself is killed, the command gets SIGTERM.
"""

import contextlib
import ctypes
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

PATIENCE_SECONDS = 32.0  # the agent gives its ranks 30
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_POLL_SECONDS = 0.2
_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main(arguments: list[str]) -> int:
    lifeline, command = int(arguments[0]), arguments[1:]
    options: dict[str, str | float] = {"--silence": "inf", "--patience": PATIENCE_SECONDS, "--title": ""}
    options |= {"--environ": 0, "--sharing": 0}
    while command[0] in options:
        options[command[0]], command = command[1], command[2:]
    silence, patience, title = float(options["--silence"]), float(options["--patience"]), str(options["--title"])
    environ = b""
    while (left := int(options["--environ"]) - len(environ)) > 0:
        environ += (more := os.read(lifeline, left))
        if not more:  # the connection broke
            return 128 + signal.SIGTERM
    os.environ.update(json.loads(environ or b"{}"))
    if (sharing := int(options["--sharing"])) and not os.environ.get("OMP_NUM_THREADS"):
        os.environ["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // sharing))
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1)  # orphans of the command become children of this process
    ended, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    received: list[int] = []
    for number in _STOPPING:
        signal.signal(number, lambda number, _: received.append(number))
    signal.signal(signal.SIGCHLD, lambda number, _: None)  # wakes select
    try:
        stdin = subprocess.DEVNULL if lifeline == 0 else None
        process = subprocess.Popen(command, stdin=stdin, preexec_fn=lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGTERM))
    except OSError as error:
        print(f"torchring run: cannot start {command[0]}: {error.strerror}", file=sys.stderr)
        return 127
    sources = select.poll()  # unlike select, poll takes descriptors above 1023
    sources.register(lifeline, select.POLLIN)
    sources.register(ended, select.POLLIN)
    end, last_byte_at = float("inf"), time.monotonic()
    while process.poll() is None and time.monotonic() < end:
        readable = [descriptor for descriptor, _ in sources.poll(_POLL_SECONDS * 1e3)]
        if ended in readable:
            os.read(ended, 4096)
            _collect_orphans(process.pid)
        now = time.monotonic()
        if lifeline in readable:
            last_byte_at = now
            told = os.read(lifeline, 4096)
            received += told.replace(b"\0", b"") if told else [signal.SIGTERM]
            if not told:
                sources.unregister(lifeline)
        elif now > last_byte_at + silence:
            received.append(signal.SIGTERM)
        if signal.SIGKILL in received:
            break
        stopping = [number for number in received if number in _STOPPING]
        if stopping and end == float("inf"):
            process.send_signal(stopping[0])
            end = time.monotonic() + patience
    code = process.poll()
    if title and code is not None and code < 0 and not received:
        print(
            f"torchring run: {title} (pid {process.pid}) was killed by {signal.Signals(-code).name}; "
            "the processes that it has started end, too",
            file=sys.stderr,
        )
    if code != 0:
        process.kill()
        _kill(_descendants)
    code = process.wait()
    return code if code >= 0 else 128 - code


def _collect_orphans(command: int) -> None:
    """Remove orphans that have ended from the process table. The command itself is left to subprocess."""
    with contextlib.suppress(ChildProcessError):  # there are no children
        while (child := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) and child.si_pid != command:
            os.waitpid(child.si_pid, os.WNOHANG)


def _kill(find: Callable[[], set[int]]) -> None:
    """Kill in several turns, because a process may start another one meanwhile."""
    end = time.monotonic() + 2.0
    others: set[int] = set()  # processes of other users, as of sudo
    while (pids := find() - others) and time.monotonic() < end:
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            except OSError:
                others.add(pid)
        time.sleep(0.02)
    if others:
        print(f"torchring run: processes of another user still run: {sorted(others)}", file=sys.stderr)
    if not os.path.exists("/proc/self/stat"):
        print("torchring run: there is no /proc; processes that the ranks have started may still run", file=sys.stderr)


def _descendants() -> set[int]:
    parents = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process has ended meanwhile
            state, parent = file.read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                parents[int(file.parent.name)] = int(parent)
    family = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    return family - {os.getpid()}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
