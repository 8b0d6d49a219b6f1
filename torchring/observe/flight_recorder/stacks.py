"""Python stacks of a rank that others wait for, on its standard error: `torchring run --stacks-on-stall`.

faulthandler prints from within a signal handler in C, so a rank that holds the interpreter's lock prints, too.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from pathlib import Path
from typing import Final

from torchring.rendezvous.environment import STACKS

_SIGNAL: Final = (
    signal.SIGRTMAX - 7
)  # whose default action ends a process; so it is sent to none that does not catch it
NO_SIGNAL: Final = -1  # the timer thread prints the stacks, if it can run
_STDERR: Final = 2


def is_wanted() -> bool:
    """Whether the ranks were started with `--stacks-on-stall`."""
    return os.environ.get(STACKS) == "1"


def is_taken() -> bool:
    """Whether the script has a handler of its own for the signal."""
    return signal.getsignal(_SIGNAL) is not signal.SIG_DFL


def offer() -> int:
    """Have a signal print the stacks of this process, from now on until it ends. Returns the number of the signal.

    Returns NO_SIGNAL if the script uses the signal itself.
    """
    if is_taken():
        return NO_SIGNAL
    faulthandler.register(_SIGNAL, file=_STDERR, all_threads=True)
    return int(_SIGNAL)


def ask(pid: int, pidfd: int, number: int) -> bool:
    """Send signal `number` to a process that catches it. Returns whether the signal was sent."""
    if not hasattr(signal, "pidfd_send_signal") or not _catches(pid, number):
        return False
    try:
        signal.pidfd_send_signal(pidfd, number)
    except OSError:  # the process has ended, or the kernel is older than 5.1
        return False
    return True


def print_own(rank: int) -> None:
    """Print the stacks of this process, which can run."""
    os.write(_STDERR, f"torchring: rank {rank} keeps other ranks waiting. Its Python stacks:\n".encode())
    faulthandler.dump_traceback(file=_STDERR, all_threads=True)


def is_stopped(pid: int) -> bool:
    """Whether a process of this host is stopped by SIGSTOP, or by a debugger."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t")
    except (OSError, IndexError):
        return False


def _catches(pid: int, number: int) -> bool:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    caught = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (number - 1) & 1)
