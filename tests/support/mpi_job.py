"""One mpirun for many tests: its ranks wait for work, and say for each piece how it went.

    with MpiJob(3) as job:
        job.run(body, 2)     body(rank, store, communicator) on the first 2 of its ranks; results in rank order

Work and answers travel through a TCPStore of the tests' process, pickled; `body` is a module-level function or a
functools.partial of one.
"""

import contextlib
import faulthandler
import importlib.util
import io
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.harness import _TAIL, RankReport, RanksFailed, _clean_environ, _exit_text

_PATIENCE = 5.0  # seconds that the other ranks get once one has failed
_STARTING = 60.0  # seconds more for the first work, while the ranks import torch
_IDLE = 600.0  # seconds after which a rank without work ends

MISSING = "" if shutil.which("mpirun") and importlib.util.find_spec("mpi4py") else "needs mpirun and mpi4py"
needs_mpi = pytest.mark.skipif(bool(MISSING), reason=MISSING)


def mpirun(
    argv: Sequence[str | os.PathLike[str]],
    num_ranks: int,
    *,
    options: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    output: Any = subprocess.PIPE,
) -> subprocess.Popen[str]:
    """Start python with these arguments on so many ranks of this machine; the caller waits."""
    command = ["mpirun", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none", *options]
    command += ["-np", str(num_ranks), sys.executable, *(os.fspath(argument) for argument in argv)]
    # A short TMPDIR: Open MPI keeps sockets there, whose paths may have 108 bytes.
    environ = {
        **_clean_environ(),
        "PYTHONPATH": str(Path(__file__).resolve().parents[2]),
        "TMPDIR": "/tmp",
        **(env or {}),
    }
    return subprocess.Popen(
        command,
        env=environ,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def stop(process: subprocess.Popen[str]) -> None:
    """End a job that was started by `mpirun`: it ends its ranks itself, given the time."""
    process.terminate()
    try:
        process.wait(_PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


class MpiJob:
    """`num_ranks` processes under one mpirun, started with the first work and again after a failure."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._process: subprocess.Popen[str] | None = None
        self._num_works = 0

    def __enter__(self) -> "MpiJob":
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self, seconds: float = _PATIENCE) -> None:
        """Now, or after as many seconds by force. More work would start another."""
        process, self._process = self._process, None
        if process is not None and process.poll() is None:
            self._store.set(f"work/{self._num_works}", pickle.dumps(None))
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(seconds)
                return
            stop(process)

    def run(self, body: Callable[..., Any], size: int, *, deadline: float = 60.0, dies: int | None = None) -> list[Any]:
        """As harness.run_ranks. body(rank, store, communicator): a store and an MPI communicator of just these ranks.

        dies: a rank that must not answer; its result is None, and the job is over.
        """
        if self._process is None:
            self._start()
            deadline += _STARTING
        process = self._process
        assert process is not None
        work = f"work/{self._num_works}"
        self._num_works += 1
        self._store.set(work, pickle.dumps((pickle.dumps(body), size)))
        reports = [RankReport(rank, f"still running after {deadline} s", failed=True) for rank in range(size)]
        results: list[Any] = [None] * size
        running = set(range(size)) - {dies}
        end = time.monotonic() + deadline
        while running and time.monotonic() < end and process.poll() is None:
            for rank in sorted(running):
                if self._store.check([f"{work}/{rank}"]):
                    answer = io.BytesIO(self._store.get(f"{work}/{rank}"))
                    results[rank], status, text = torch.load(answer, weights_only=False)
                    reports[rank] = RankReport(rank, status, failed=bool(text), traceback=text)
                    running.discard(rank)
                    if text:
                        end = min(end, time.monotonic() + _PATIENCE)
            time.sleep(0.005)
        code = process.poll()
        if running:  # the ranks may be out of step with each other
            for pid in _children_of(process.pid) if code is None else ():
                os.kill(pid, signal.SIGUSR1)  # the fault handler prints all stacks
            time.sleep(0.5)
        if dies is not None:
            reports[dies].failed = self._store.check([f"{work}/{dies}"])
        if running:
            self._process = None
            stop(process)
        elif dies is not None:
            self.end(2.0)  # MPI_Finalize waits for the dead rank; until then the others do what is done at exit
        if any(report.failed for report in reports):
            self._output.seek(0)
            output = self._output.read()[-_TAIL:]
            raise RanksFailed(f"{body}: mpirun: {_exit_text(code)}\n--- output:\n{output}", reports)
        return results

    def _start(self) -> None:
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115  # for as long as the job
        self._num_works = 0
        self._process = mpirun(
            ["-u", "-m", "tests.support.mpi_job"],
            self.num_ranks,
            options=("--runtime-options", "continuous"),  # a rank that dies does not end the others
            env={"TESTS_STORE_PORT": str(self._store.port)},
            output=self._output,
        )


def _children_of(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _save(answer: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(answer, buffer)  # plain pickle does not know all dtypes
    return buffer.getvalue()


def main() -> None:
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)
    torch.set_num_threads(1)
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    store = dist.TCPStore(
        "127.0.0.1",
        int(os.environ["TESTS_STORE_PORT"]),
        is_master=False,
        wait_for_workers=False,
        timeout=timedelta(seconds=_IDLE),
    )
    number = 0
    while (work := pickle.loads(store.get(f"work/{number}"))) is not None:
        payload, size = work
        if world.rank < size:
            communicator = world.Create_group(world.group.Incl(range(size)))
            torch.manual_seed(1000 + world.rank)
            try:
                body = pickle.loads(payload)
                result = body(world.rank, dist.PrefixStore(f"store/{number}", store), communicator)
                answer = _save((result, "ok", ""))
            except BaseException as error:
                answer = _save((None, f"{type(error).__name__}: {error}", traceback.format_exc()))
            store.set(f"work/{number}/{world.rank}", answer)
        number += 1


if __name__ == "__main__":
    main()
