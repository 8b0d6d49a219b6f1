"""All-reduce by size: torchring against Gloo, and against Open MPI and Horovod if installed, in one run.

    torchring bench allreduce              2 ranks, then 4, 1 KiB to 256 MiB
    torchring bench allreduce --ranks 4 --sizes 1024 1048576 --json rows.jsonl

Rivals, each at its best settings on one machine:
    direct     torchring's algorithm for gradients: the buffer is shared memory
    tensor     torchring.all_reduce(op="sum") of an ordinary tensor
    torchring.horovod
               torchring.horovod.allreduce_ of an ordinary tensor, by name
    native     the engine's all-reduce, as between hosts, over loopback
    gloo       torch.distributed.all_reduce, what DDP uses on CPUs
    open mpi   Allreduce in place through mpi4py, buffer protocol
    horovod    hvd.allreduce_ in place over MPI, cycle time 0.1 ms
    copy       not a rival: all ranks copy a buffer of that size at the same
               time. Each reads and writes as many bytes as in an all-reduce on
               two ranks: the memory bus allows little less time
Open MPI and Horovod take part if they are installed, in processes of their own, which are stopped between their turns.
A rival that fails, or takes longer than 90 s to start or for a turn, is left out from there on.
Every result is checked. A turn is 4 steps, of which the first does not count. Up to 1 MiB a step is 20 calls in a row,
and counts with their mean. Above, a step is one call.
"""

import argparse
import functools
import itertools
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import torchring
import torchring.horovod as hvd
from torchring.allreduce.select import Algorithm, open_all_reduce
from torchring.bench import measure, turns
from torchring.bench.measure import Spread, Turn, stopped_by_signals
from torchring.bench.options import parser
from torchring.default_world import default_world

OURS = ("direct", "native", "tensor", "torchring.horovod", "gloo", "copy")
OTHERS = {"open mpi": measure.has_mpi, "horovod": measure.has_horovod}  # each under mpirun
Reduce = Callable[[torch.Tensor], object]
_TIMEOUT = timedelta(seconds=90)
SMALL_BYTES = 1 << 20
CALLS_IF_SMALL = 20


def main() -> int:
    options = parser("allreduce").parse_args()
    if options.worker:
        torch.set_num_threads(1)
        turns.serve(options.worker, prepare)
        return 0
    rows: list[dict[str, Any]] = []
    about = measure.provenance() | {"script": Path(__file__).name}
    for ranks in options.ranks:
        table = compare(ranks, options)
        report(table, about | {"ranks": ranks})
        rows += table
    measure.write_rows(options.json, rows, about)
    return 0


def compare(ranks: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Time all rivals with this number of ranks. Returns a row for each size."""
    with (
        stopped_by_signals(),
        closing(turns.Coordinator(__file__, ["torchring"], ranks, [], limit=_TIMEOUT)) as coordinator,
    ):
        jobs = dict.fromkeys(OURS, "torchring")
        for rival in options.rivals:
            if not OTHERS[rival]():
                print(f"{rival} does not take part: it needs mpirun, mpi4py and its own package")
                continue
            with left_out_if_it_fails(rival, jobs, coordinator):
                coordinator.start(rival, measure.mpirun(ranks))
                jobs[rival] = rival
        rows = [row_for(num_bytes // 4, jobs, coordinator, options) for num_bytes in options.sizes]
        with suppress(turns.RivalFailed):
            coordinator.finish()
    return rows


def row_for(
    numel: int, jobs: dict[str, str], coordinator: turns.Coordinator, options: argparse.Namespace
) -> dict[str, Any]:
    """Time all rivals on fp32 tensors of `numel` elements. Drops those that fail."""
    times: dict[str, list[float]] = {name: [] for name in jobs}
    started = time.monotonic()
    for repetition in range(-1, -(-options.most // (turns.STEPS_PER_TURN - 1))):
        for name in measure.in_turn(list(jobs), repetition):
            with left_out_if_it_fails(name, jobs, coordinator):
                seconds = coordinator.turn(jobs[name], counts=False, request=f"{name}:{numel}")
                times[name] += seconds if repetition >= 0 else []
        if repetition >= 1 and time.monotonic() - started > options.seconds:
            break
    calls = calls_for(numel)
    spreads = {name: vars(Spread.of([each / calls for each in found])) for name, found in times.items() if found}
    return {"bytes": 4 * numel, "ranks": coordinator.ranks, "ms": spreads}


@contextmanager
def left_out_if_it_fails(rival: str, jobs: dict[str, str], coordinator: turns.Coordinator) -> Iterator[None]:
    """Drop a rival that ends or hangs in here, unless it is one of torchring's job."""
    try:
        yield
    except turns.RivalFailed as error:
        if rival in OURS:
            raise
        print(f"{rival} with {coordinator.ranks} ranks is left out from here on: {error}")
        coordinator.drop(rival)
        jobs.pop(rival, None)


def prepare(job: str, folder: Path) -> tuple[Callable[[str], None], Callable[[], None]]:
    """What `turns.serve` needs on a rank: a function that calls a rival's all-reduce, as RIVAL:NUMEL says."""
    if job == "torchring":
        hvd.init()
        measure.open_gloo()
        openers = open_ours()
    else:
        torchring.init()
        openers = {job: functools.partial(ordinary, open_other(job))}
    opened: dict[str, Opened] = {}
    steps = itertools.count()

    def step(request: str) -> None:
        name, _, text = request.partition(":")
        numel = int(text)
        if opened and next(iter(opened.values())).buffer.numel() != numel:
            for each in opened.values():
                each.close()
            opened.clear()
        if name not in opened:
            opened[name] = openers[name](numel)
            verify(name, opened[name])
        if next(steps) % turns.STEPS_PER_TURN == 0:
            opened[name].buffer.fill_(1e-36)  # grows with each call; with 4 ranks, stays finite for 80 calls
        for _ in range(calls_for(numel)):
            opened[name].turn()

    return step, lambda: None


@dataclass(frozen=True)
class Opened:
    """A rival that is ready for one size: its buffer, a function that adds up the buffer, and one that frees it."""

    buffer: torch.Tensor
    turn: Turn
    close: Callable[[], object] = lambda: None


def open_ours() -> dict[str, Callable[[int], Opened]]:
    """The rivals of torchring's job: for each a function that opens it for a number of elements."""

    def bucket(algorithm: Algorithm, numel: int) -> Opened:
        all_reduce = open_all_reduce(default_world(), algorithm, "inline" if algorithm == "direct" else "auto")
        wire = all_reduce.open_wires([(numel, torch.float32)])[0]
        return Opened(wire.tensor, lambda: all_reduce.start(wire).wait(), all_reduce.close)

    def copy(numel: int) -> Opened:
        source, target = torch.empty(numel), torch.empty(numel)
        return Opened(source, lambda: target.copy_(source))

    of_tensors: dict[str, Reduce] = {
        "tensor": lambda tensor: torchring.all_reduce(tensor, op="sum"),
        "torchring.horovod": lambda tensor: hvd.allreduce_(tensor, op=hvd.Sum, name=f"bench{tensor.numel()}"),
        "gloo": dist.all_reduce,
    }
    buckets = {name: functools.partial(bucket, name) for name in ("direct", "native")}
    tensors = {name: functools.partial(ordinary, reduce) for name, reduce in of_tensors.items()}
    return {**buckets, **tensors, "copy": copy}


def open_other(rival: str) -> Reduce:
    """The function with which a rival under mpirun adds up a tensor in place. Collective."""
    if rival == "horovod":
        horovod = measure.start_horovod()
        return lambda tensor: horovod.allreduce_(tensor, op=horovod.Sum, name=f"bench{tensor.numel()}")
    from mpi4py import MPI

    return lambda tensor: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, tensor.numpy())


def ordinary(reduce: Reduce, numel: int) -> Opened:
    """A rival that adds up an ordinary tensor."""
    buffer = torch.empty(numel)
    return Opened(buffer, lambda: reduce(buffer))


def calls_for(numel: int) -> int:
    return CALLS_IF_SMALL if 4 * numel <= SMALL_BYTES else 1


def verify(name: str, opened: Opened) -> None:
    """Check a rival's result."""
    expected = torch.arange(opened.buffer.numel(), dtype=torch.float32).remainder_(251)
    opened.buffer.copy_(expected).add_(torchring.rank())
    opened.turn()
    if name != "copy":
        size = torchring.size()
        check(name, opened.buffer, expected.mul_(size).add_(sum(range(size))), rank=torchring.rank())


def check(name: str, result: torch.Tensor, expected: torch.Tensor, *, rank: int) -> None:
    """Stop the run if a rival's result is wrong."""
    if not torch.equal(result, expected):
        raise SystemExit(f"{name} reduced {expected.numel()} elements wrongly on rank {rank}")


def report(rows: list[dict[str, Any]], about: dict[str, object]) -> None:
    names = [name for name in dict.fromkeys(name for row in rows for name in row["ms"]) if name != "copy"]
    others = [name for name in names if name == "gloo" or name in OTHERS]
    columns = ["size", *(f"{name} ms" for name in names), "copy ms"]
    columns += [f"{name} / direct" for name in others] + ["direct GB/s", "of the floor"]
    table = []
    for row in rows:
        spreads = {name: Spread(**values) for name, values in row["ms"].items()}
        direct, copy = spreads["direct"].p50, spreads["copy"].p50
        table.append(
            [
                measure.human_bytes(row["bytes"]),
                *(spreads[n].text(3) if n in spreads else "" for n in names),
                f"{copy:.3f}",
                *(f"{spreads[n].p50 / direct:.1f}x" if n in spreads else "" for n in others),
                f"{row['bytes'] / direct / 1e6:.2f}",
                f"{copy / direct:.0%}",
            ]
        )
    title = f"All-reduce, fp32, {about['ranks']} ranks on {about['cores']} cores, p50 (p20-p80) of the slowest rank"
    measure.print_table(f"{title} {measure.origin(about)}", columns, table)


if __name__ == "__main__":
    sys.exit(main())
