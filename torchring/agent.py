"""One host's part of a launch: `python -m torchring.agent NUM_PROC NUM_HOSTS HOST_NUMBER ADDRESS PORT COMMAND...`.

Starts the host's ranks through torch.distributed.run, which must be the same version on all hosts. COMMAND is what
stands behind `python`: a script, or -m and a module, and arguments.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import Final

from torch.distributed import DistError, TCPStore
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

_PATIENCE_SECONDS: Final = 10.0  # for the agents to say goodbye to each other


def main(arguments: Sequence[str]) -> int:
    num_proc, num_hosts, number, address, port = arguments[:5]
    where = [f"--nnodes={num_hosts}", f"--node-rank={number}", f"--master-addr={address}", f"--master-port={port}"]
    # The first agent serves the store that all use, torchrun on the same port included. It must not go before the last
    # has left it: they would print a page each.
    store = _store("127.0.0.1", int(port), is_master=True) if number == "0" else None
    code = run(int(num_proc), where, arguments[5:], host=socket.gethostname())
    if code == 0:
        with contextlib.suppress(DistError):
            if store is None:
                _store(address, int(port)).set(f"torchring/done{number}", "")
            else:
                store.wait([f"torchring/done{other}" for other in range(1, int(num_hosts))])
    return code


def _store(address: str, port: int, *, is_master: bool = False) -> TCPStore:
    timeout = timedelta(seconds=_PATIENCE_SECONDS)
    return TCPStore(address, port, is_master=is_master, wait_for_workers=False, multi_tenant=True, timeout=timeout)


def run(num_proc: int, where: Sequence[str], command: Sequence[str], *, host: str | None = None) -> int:
    """Start this host's ranks and wait for them.

    Args:
        num_proc: number of ranks.
        where: torchrun's options that say where agents meet.
        command: as above.
        host: to name in messages; None where there is only one.

    Returns the exit code of the first of these ranks that failed: as the shell has it, 128 + n for signal n.
    """
    # torchrun would set 1, and warn. The cores are shared out evenly instead.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // num_proc)))
    # An option of python's, such as -m, is not torchrun's to understand.
    python = ["--no-python", "--", sys.executable, "-u"] if command[0].startswith("-") else ["--"]
    options = torchrun.parse_args([*where, f"--nproc-per-node={num_proc}", *python, *command])  # type: ignore[no-untyped-call]
    try:
        torchrun.run(options)  # type: ignore[no-untyped-call]
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        on = f" on {host}" if host else ""
        print(f"torchring run: rank {rank} (pid {failure.pid}{on}) ended first, {_ending(code)}", file=sys.stderr)
        return code if code >= 0 else 128 - code
    except SignalException as error:
        return 128 + int(error.sigval)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return 0


def _ending(code: int) -> str:
    return f"with exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
