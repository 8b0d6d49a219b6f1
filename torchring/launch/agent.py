"""Starts the ranks of one host through torch.distributed.run, and passes on what they print.

    python -c BOOT '{"num_proc": 2, ...}' COMMAND...

BOOT imports this module and calls `main`. The first argument is a `Part`. COMMAND has the arguments of `python`: a
script, or -m and a module, and their arguments. All hosts need the same version of torch.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import uuid
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, Final

from torch.distributed import DistError, TCPStore
from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import elastic_launch

from torchring.launch.output import STDERR, STDOUT, Output
from torchring.launch.part import Part

_PATIENCE_SECONDS: Final = 10.0  # for the agents to tell each other that they are done
# Only rank 0 reads the standard input. If all ranks did, each would get a part of it.
_RANK: Final = '[ "$RANK" = 0 ] || exec </dev/null; exec "$@"'


def main(arguments: Sequence[str]) -> int:
    """Returns the exit code of the first rank of this host that failed; 128 + n if signal n ended it, as in a shell."""
    part, command = Part.from_json(arguments[0]), arguments[1:]
    # The first agent hosts the store for all agents, torchrun on the same port included. The first agent must end last:
    # an agent that loses the store prints a page.
    has_store = part.num_hosts > 1
    store = _store("127.0.0.1", part.port, is_master=True) if has_store and part.number == 0 else None
    try:
        code = _run(part, command)
    except OSError as error:
        print(f"torchring run: cannot start the ranks: {error}", file=sys.stderr)
        return 2
    if code == 0 and has_store:
        with contextlib.suppress(DistError):
            if store is None:
                _store(part.address, part.port).set(f"torchring/done{part.number}", "")
            else:
                store.wait([f"torchring/done{other}" for other in range(1, part.num_hosts)])
    return code


def _store(address: str, port: int, *, is_master: bool = False) -> TCPStore:
    timeout = timedelta(seconds=_PATIENCE_SECONDS)
    return TCPStore(address, port, is_master=is_master, wait_for_workers=False, multi_tenant=True, timeout=timeout)


def _run(part: Part, command: Sequence[str]) -> int:
    """Start this host's ranks and wait for them."""
    # torchrun would set 1, and warn. Instead, each rank gets an equal share of the cores.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // part.num_proc)))
    for name in logging.root.manager.loggerDict:
        if name.startswith("torch.distributed.elastic"):  # failures are reported below, in fewer lines
            logging.getLogger(name).setLevel(logging.CRITICAL)
    if part.num_hosts == 1:
        where = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", f"--rdzv-id={uuid.uuid4()}"]
    else:
        where = [f"--nnodes={part.num_hosts}", f"--node-rank={part.number}"]
        where += [f"--master-addr={part.address}", f"--master-port={part.port}"]
    rank = ["sh", "-c", _RANK, "sh", sys.executable, "-u", *command]
    options = torchrun.parse_args(  # type: ignore[no-untyped-call]
        [*where, f"--nproc-per-node={part.num_proc}", f"--log-dir={os.devnull}", "--no-python", "--", *rank]
    )
    config, entrypoint, arguments = torchrun.config_from_args(options)
    output = Output(part.output)
    config.logs_specs = _Pipes(output)
    failure: ChildFailedError | None = None
    try:
        elastic_launch(config, entrypoint)(*arguments)
    except ChildFailedError as error:
        failure = error
    except SignalException as error:
        return 128 + int(error.sigval)
    finally:
        output.close()
    if failure is None:
        return 0
    rank_number, first = failure.get_first_failure()
    on = f" on {part.host}" if part.num_hosts > 1 else ""
    text = f"rank {rank_number} (pid {first.pid}{on}) ended first, {_ending(first.exitcode)}"
    print(f"torchring run: {text}", file=sys.stderr)
    return first.exitcode if first.exitcode >= 0 else 128 - first.exitcode


class _Pipes(LogsSpecs):
    """Has torch's agent connect the stdout and stderr of each rank to pipes of `output`, and write no files."""

    def __init__(self, output: Output) -> None:
        super().__init__()
        self._output = output

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        ends: dict[int, dict[int, Any]] = {STDOUT: {}, STDERR: {}}  # torch calls open(), which accepts a descriptor
        for local_rank, environ in envs.items():
            environ["TORCHELASTIC_ERROR_FILE"] = ""
            for stream, of_ranks in ends.items():
                of_ranks[local_rank] = self._output.pipe(stream, int(environ["RANK"]))
        self._output.start()
        no_files = dict.fromkeys(envs, os.devnull)
        return LogsDest(stdouts=ends[STDOUT], stderrs=ends[STDERR], error_files=no_files)

    @property
    def root_log_dir(self) -> str:
        return os.devnull


def _ending(code: int) -> str:
    return f"with exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
