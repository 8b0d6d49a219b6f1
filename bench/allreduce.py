"""All-reduce by size: torchring against Gloo, and Open MPI and Horovod where they are installed, in one run.

    torchring bench allreduce                      2 ranks, then 4, 1 KiB to 256 MiB
    torchring bench allreduce --ranks 4 --sizes 1024 1048576 --json results.jsonl

Rivals, each at its best settings on one machine:
    direct     torchring's algorithm for gradient buckets: the buffer is already in shared memory, as in training
    tensor     torchring.all_reduce(op="sum") of an ordinary tensor
    torchring.horovod
               torchring.horovod.allreduce_ of an ordinary tensor: ranks match their calls by name first
    ring       torchring's algorithm between hosts: a ring over Gloo point-to-point
    gloo       torch.distributed.all_reduce, what DistributedDataParallel uses on CPUs
    open mpi   Allreduce in place through mpi4py, buffer protocol (if mpirun is found)
    horovod    hvd.allreduce_ in place over MPI, cycle time 0.1 ms (if it can be imported). Horovod comes after the
               others, because its background thread would slow them down
    copy       not a rival: every rank copies a buffer of the same size, all at the same time. An all-reduce of S bytes
               on two ranks reads S bytes and writes S bytes on each rank, as a copy does: the memory bus allows
               little less time
Every result is checked. Up to 1 MiB a turn is 20 calls in a row, and counts with their mean. Above, a turn is one call.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import torchring
import torchring.horovod as hvd
from torchring.allreduce import AllReduce, Wire
from torchring.allreduce.select import open_all_reduce
from torchring.bench import measure
from torchring.bench.measure import Spread, Turn
from torchring.default_world import default_world
from torchring.doctor.render import human_bytes
from torchring.launch.arguments import duration

SMALL_BYTES = 1 << 20
CALLS_IF_SMALL = 20
SIZES = [1 << 10, 16 << 10, 256 << 10, 1 << 20, 4 << 20, 25 << 20, 64 << 20, 256 << 20]


def main() -> int:
    parser = measure.parser("allreduce", __doc__ or "")
    parser.add_argument("--ranks", type=measure.several, nargs="+", default=[2, 4], help="one table for each number")
    parser.add_argument("--sizes", type=measure.positive, nargs="+", default=SIZES, help="sizes in bytes")
    parser.add_argument("--seconds", type=duration, default=4.0, help="time for each size")
    parser.add_argument("--most", type=measure.positive, default=300, help="largest number of repetitions")
    parser.add_argument("--no-mpi", action="store_true", help="leave out Open MPI and Horovod")
    options = parser.parse_args()
    if options.worker:
        compare(options)
        return 0
    rows: list[dict[str, Any]] = []
    for ranks in options.ranks:
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            arguments = [*sys.argv[1:], "--worker", file.name]
            measure.run_here(__file__, ranks, arguments, mpi=measure.has_mpi() and not options.no_mpi)
            rows += json.loads(Path(file.name).read_text())
    measure.write_rows(options.json, rows, measure.provenance() | {"script": Path(__file__).name})
    return 0


def compare(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    hvd.init()
    measure.open_gloo()
    rows = [row_for(num_bytes // 4, options) for num_bytes in options.sizes]
    if torchring.rank() == 0:
        Path(options.worker).write_text(json.dumps(rows))
        report(rows, measure.provenance() | {"ranks": torchring.size()})
    torchring.barrier()


def row_for(numel: int, options: argparse.Namespace) -> dict[str, object]:
    """Time all rivals on fp32 tensors of `numel` elements."""
    world = default_world()
    source = torch.arange(numel, dtype=torch.float32).remainder_(251).add_(torchring.rank())
    expected = torch.arange(numel, dtype=torch.float32).remainder_(251).mul_(world.size)
    expected += sum(range(world.size))
    buffers: dict[str, torch.Tensor] = {}
    rivals: dict[str, Turn] = {}
    closers = []

    for name, algorithm in (("direct", "direct"), ("ring", "ring")):
        all_reduce = open_all_reduce(world, algorithm, "inline")
        wire = all_reduce.open_wires([(numel, torch.float32)])[0]
        buffers[name] = wire.tensor
        rivals[name] = functools.partial(_reduce, all_reduce, wire)
        closers.append(all_reduce.close)

    buffers["tensor"] = torch.empty(numel)
    rivals["tensor"] = lambda: torchring.all_reduce(buffers["tensor"], op="sum")

    buffers["torchring.horovod"] = torch.empty(numel)
    rivals["torchring.horovod"] = lambda: hvd.allreduce_(buffers["torchring.horovod"], op=hvd.Sum, name=f"bench{numel}")

    buffers["gloo"] = torch.empty(numel)
    rivals["gloo"] = lambda: dist.all_reduce(buffers["gloo"])

    if "OMPI_COMM_WORLD_SIZE" in os.environ and not options.no_mpi:
        from mpi4py import MPI

        buffers["open mpi"] = torch.empty(numel)
        array = buffers["open mpi"].numpy()
        rivals["open mpi"] = lambda: MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, array)

    target = torch.empty(numel)
    buffers["copy"] = torch.empty(numel)
    rivals["copy"] = lambda: target.copy_(buffers["copy"])

    def take_turns(rivals: dict[str, Turn], seconds: float) -> dict[str, Spread]:
        for name, turn in rivals.items():  # check the results before timing
            buffers[name].copy_(source)
            turn()
            if name != "copy":
                check(name, buffers[name], expected, rank=world.rank)
        return measure.take_turns(
            rivals,
            prepare=lambda name: buffers[name].copy_(source),
            warmups=3,
            seconds=seconds,
            most=options.most,
            calls=CALLS_IF_SMALL if 4 * numel <= SMALL_BYTES else 1,
        )

    spreads = take_turns(rivals, options.seconds)
    if measure.has_horovod() and not options.no_mpi:
        with measure.horovod() as original:
            buffers["horovod"] = torch.empty(numel)

            def reduce() -> None:
                original.allreduce_(buffers["horovod"], op=original.Sum, name=f"bench{numel}")

            spreads |= take_turns({"horovod": reduce}, options.seconds / len(rivals))
    for close in closers:
        close()
    return {"bytes": 4 * numel, "ranks": world.size, "ms": {name: vars(spread) for name, spread in spreads.items()}}


def _reduce(all_reduce: AllReduce[Any], wire: Wire) -> None:
    all_reduce.start(wire).wait()


def check(name: str, result: torch.Tensor, expected: torch.Tensor, *, rank: int) -> None:
    """Stop the run if a rival's result is wrong."""
    if not torch.equal(result, expected):
        raise SystemExit(f"{name} reduced {expected.numel()} elements wrongly on rank {rank}")


def report(rows: list[dict[str, object]], about: dict[str, object]) -> None:
    names = [name for name in rows[0]["ms"] if name != "copy"]  # type: ignore[attr-defined]
    others = [name for name in names if name not in ("direct", "tensor", "torchring.horovod", "ring")]
    columns = ["size", *(f"{name} ms" for name in names), "copy ms"]
    columns += [f"{name} / direct" for name in others] + ["direct GB/s", "of the floor"]
    table = []
    for row in rows:
        spreads = {name: Spread(**values) for name, values in row["ms"].items()}  # type: ignore[attr-defined]
        direct, copy = spreads["direct"].p50, spreads["copy"].p50
        num_bytes = int(row["bytes"])  # type: ignore[call-overload]
        table.append(
            [
                human_bytes(num_bytes),
                *(spreads[n].text(3) for n in names),
                f"{copy:.3f}",
                *(f"{spreads[n].p50 / direct:.1f}x" for n in others),
                f"{num_bytes / direct / 1e6:.2f}",
                f"{copy / direct:.0%}",
            ]
        )
    title = f"All-reduce, fp32, {about['ranks']} ranks on {about['cores']} cores, p50 (p20-p80) of the slowest rank"
    measure.print_table(f"{title} {measure.origin(about)}", columns, table)


if __name__ == "__main__":
    sys.exit(main())
