"""Python stacks of a rank for which ranks of its host wait, on its standard error: `torchring run --stacks-on-stall`.

faulthandler prints from within a signal handler in C, so a rank that holds the interpreter's lock prints, too.
"""

from __future__ import annotations

import faulthandler
import signal
from typing import Final

from torchring.linux import is_caught

_SIGNAL: Final = signal.SIGRTMAX - 7  # ends a process that does not catch it, so it is sent to no such process
_STDERR: Final = 2


def offer() -> int:
    """Have a signal print the stacks of this process, from now on until it ends. Returns its number.

    Returns 0 if the script has a handler of its own for the signal.
    """
    if signal.getsignal(_SIGNAL) is not signal.SIG_DFL:
        return 0
    faulthandler.register(_SIGNAL, file=_STDERR, all_threads=True)
    return int(_SIGNAL)


def ask(pid: int, pidfd: int, number: int) -> bool:
    """Send signal `number` to a process that catches it. Returns whether the signal was sent."""
    if not is_caught(number, pid) or not hasattr(signal, "pidfd_send_signal"):
        return False
    try:
        signal.pidfd_send_signal(pidfd, number)
    except OSError:  # the process has ended, or the kernel is older than 5.1
        return False
    return True
