"""The hosts that an elastic job can use: fixed ones, those of a file that is read again, those that a script prints.

The file and the script are asked in a thread, because a script may take long, and so may the name service. The last
good answer stays in force while they give no good one.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from torchring.launch.hosts import Host, LaunchError, as_this_host, is_here, parse_host, read_hostfile, share_out

_ASK_SECONDS: Final = 1.0  # between two questions
_SCRIPT_SECONDS: Final = 10.0  # for the script to answer
_LOOK_SECONDS: Final = 0.05  # between two looks whether the script is still wanted
_CLOSE_SECONDS: Final = 2.0  # for the thread to end; the name service may not answer
_MOST_BYTES: Final = 1 << 20  # of an answer
_QUOTED: Final = 200  # characters of what the script printed, in a message


class Hosts:
    """The hosts at this moment.

    Args:
        ask: returns the hosts, or raises LaunchError. Its argument is set by `close`, so that it can return early. None
            if `hosts` does not change.
        hosts: the hosts to begin with; None if they are not known yet.
    """

    def __init__(
        self, ask: Callable[[threading.Event], Sequence[Host]] | None, hosts: Sequence[Host] | None = None
    ) -> None:
        self._ask = ask
        self.problem = ""  # why there is no newer answer; "" if there is
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="torchring-hosts", daemon=True)
        self._here = ""  # the name of this host in the first answer that has it
        # the hosts of the last good answer; None before the first
        self.known: tuple[Host, ...] | None = None if hosts is None else self._merged(hosts)

    @property
    def may_change(self) -> bool:
        """True if other hosts may come."""
        return self._ask is not None

    def start(self) -> None:
        """Ask every second from now on. Names of hosts are looked up in the same thread."""
        if self._ask is not None:
            self._thread.start()

    def close(self) -> None:
        """Ask no more. A script that runs is killed."""
        self._is_closed.set()
        if self._thread.ident is not None:
            self._thread.join(_CLOSE_SECONDS)

    def ask(self) -> None:
        """Ask once, and note the answer or the problem."""
        assert self._ask is not None
        try:
            self.known = self._merged(self._ask(self._is_closed))
            self.problem = ""
        except LaunchError as error:
            self.problem = f"{error}{'' if self.known is None else '; the hosts known so far are kept'}"

    def _merged(self, hosts: Sequence[Host]) -> tuple[Host, ...]:
        """Each host once, and all names of this one as one host, which keeps its name: workers are known by it."""
        merged = as_this_host(share_out(hosts, None))
        self._here = self._here or next((host.name for host in merged if is_here(host.name)), "")
        return tuple(Host(self._here, host.slots) if is_here(host.name) else host for host in merged)

    def _watch(self) -> None:
        while not self._is_closed.is_set():
            self.ask()
            self._is_closed.wait(_ASK_SECONDS)


def from_file(path: str) -> Hosts:
    """The hosts of a host file. Raises LaunchError if it cannot be read now."""
    return Hosts(lambda _: read_hostfile(path), read_hostfile(path))


def from_script(script: str, default_slots: int = 1) -> Hosts:
    """The hosts that a script prints: lines `host:slots`, or `host` for one with `default_slots`.

    `host:0` is a host whose workers are to leave, as if the script did not name it. Text after # is a comment.
    `script` is the path of an executable, or a line for the shell, as for horovodrun. Raises LaunchError if it is
    neither.
    """
    if os.path.exists(script):
        if os.path.isdir(script) or not os.access(script, os.X_OK):
            raise LaunchError(f"the discovery script {script!r} is not an executable file: chmod +x makes it one")
        command = [os.path.abspath(script)]
    elif not script.split() or shutil.which(script.split()[0]) is None:
        raise LaunchError(f"there is no discovery script {script!r}")
    else:
        command = ["sh", "-c", script]
    return Hosts(lambda is_closed: _printed_hosts(script, _run(script, command, is_closed), default_slots))


def _printed_hosts(script: str, text: str, default_slots: int) -> list[Host]:
    lines = [line for each in text.splitlines() if (line := each.partition("#")[0].strip())]
    if not lines:
        raise LaunchError(f"the discovery script {script!r} printed no host; expected lines `host:slots`")
    complaint = f"the discovery script {script!r} printed {{!r}}; expected `host:slots` or `host` on each line"
    hosts = [parse_host(line.removesuffix(":0"), complaint.format(line[:_QUOTED]), default_slots) for line in lines]
    return [host for host, line in zip(hosts, lines, strict=True) if not line.endswith(":0")]


def _run(script: str, command: Sequence[str], is_closed: threading.Event) -> str:
    """Return what the command prints. Raises LaunchError if it fails, does not end in time, or if `is_closed`."""
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
        )
    except OSError as error:
        raise LaunchError(f"the discovery script {script!r} does not start: {error.strerror}") from error
    end = time.monotonic() + _SCRIPT_SECONDS
    out, err, trouble = b"", b"", ""
    with process:
        while not trouble:
            try:
                out, err = process.communicate(timeout=_LOOK_SECONDS)
                break
            except subprocess.TimeoutExpired as running:
                if is_closed.is_set():
                    trouble = "is wanted no more"
                elif time.monotonic() >= end:
                    trouble = f"did not end within {_SCRIPT_SECONDS:g} s, and was killed"
                elif max(map(len, (running.output or b"", running.stderr or b""))) > _MOST_BYTES:
                    trouble = f"printed more than {_MOST_BYTES} bytes"
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
    if code and not trouble:
        said = (err.strip() or out.strip()).decode(errors="replace").splitlines()
        trouble = f"failed with exit code {code}" + (f": {said[-1][:_QUOTED]}" if said else "")
    if trouble:
        raise LaunchError(f"the discovery script {script!r} {trouble}")
    return out.decode(errors="replace")
