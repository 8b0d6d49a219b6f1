"""All-reduces between hosts, by size: torchring against the engine (Gloo), over links of a given rate, in one run.

    torchring bench hosts                                2, 3 and 4 hosts x 1 rank, 2 x 2; links of 10 Gbit/s (as root)
    torchring bench hosts --layouts 2x1 --rates 1gbit --json results.jsonl

Network namespaces of this machine stand in for hosts. Each rank has one thread, and all ranks share the cores of one
machine. Rivals take turns:
    gloo         the engine's own all-reduce of an fp32 tensor, among all ranks
    native       torchring's for a bucket of fp32, whose gradients were scaled and looked at when they were packed
    bf16         torchring's for a bucket of bf16: handed to the engine, and looked at before
    hierarchical, hierarchical bf16
                 torchring's where hosts have several ranks: in shared memory, and column by column between hosts

With `--wires N` a turn is N all-reduces that are started at once, as in a backward. Every result is checked.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import torchring
from torchring.allreduce.select import open_all_reduce
from torchring.bench import measure, netns
from torchring.bench.measure import Spread, Turn
from torchring.bench.netns import Network
from torchring.bench.network import Layout
from torchring.default_world import default_world
from torchring.doctor.report import human_bytes
from torchring.launch.arguments import duration
from torchring.transport.open import open_transport

LAYOUTS = [Layout(2, 1), Layout(3, 1), Layout(4, 1), Layout(2, 2)]
SIZES = [1 << 20, 4 << 20, 12 << 20, 25 << 20]


def main() -> int:
    parser = measure.parser("hosts", __doc__ or "")
    parser.add_argument("--rates", type=netns.rate, nargs="+", default=["10gbit"], help="of links, as tc writes them")
    parser.add_argument("--layouts", type=Layout.parse, nargs="+", default=LAYOUTS)
    parser.add_argument("--sizes", type=measure.positive, nargs="+", default=SIZES, help="bytes of fp32")
    parser.add_argument("--wires", type=measure.positive, default=1, help="all-reduces at a time")
    parser.add_argument("--seconds", type=duration, default=4.0, help="time for each size")
    options = parser.parse_args()
    if options.worker is not None:
        return work(options)
    rows = []
    with measure.stopped_by_signals():  # so that the network is removed
        for layout in options.layouts:
            for rate in options.rates:
                with tempfile.TemporaryDirectory() as folder, Network(layout.hosts, rate=rate) as network:
                    file = Path(folder, "rows.json")
                    arguments = ["--sizes", *map(str, options.sizes), "--wires", str(options.wires)]
                    arguments += ["--seconds", str(options.seconds), "--worker", str(file)]
                    measure.run_on_hosts(network, layout.ranks_per_host, __file__, arguments)
                    rows += [{"layout": str(layout), "rate": rate, **row} for row in json.loads(file.read_text())]
    about = measure.provenance() | {"script": Path(__file__).name}
    measure.write_rows(options.json, rows, about)
    report(rows, about)
    return 0


def work(options: argparse.Namespace) -> int:
    """Run as one rank. Rank 0 writes the rows."""
    torch.set_num_threads(1)
    torchring.init()
    rows = [row_for(num_bytes // 4, options) for num_bytes in options.sizes]
    if torchring.rank() == 0:
        Path(options.worker).write_text(json.dumps(rows))
    torchring.barrier()
    torchring.shutdown()
    return 0


def row_for(numel: int, options: argparse.Namespace) -> dict[str, Any]:
    """Time all rivals on tensors of `numel` elements."""
    world = default_world()
    source = torch.arange(numel, dtype=torch.float32).remainder_(13).add_(torchring.rank())
    expected = torch.arange(numel, dtype=torch.float32).remainder_(13).mul_(world.size).add_(sum(range(world.size)))
    engine = open_transport(world)
    names = ["native"] if world.local_size == 1 else ["native", "hierarchical"]
    all_reduces = {name: open_all_reduce(world, name, "thread") for name in names}
    buffers = {"gloo": [torch.empty(numel) for _ in range(options.wires)]}
    rivals: dict[str, Turn] = {}

    def sum_by_engine() -> None:
        for transfer in [engine.start_all_reduce(buffer) for buffer in buffers["gloo"]]:
            transfer.wait()

    rivals["gloo"] = sum_by_engine
    for name, all_reduce in all_reduces.items():
        for dtype in (torch.float32, torch.bfloat16):
            rival = name if dtype == torch.float32 else "bf16" if name == "native" else f"{name} bf16"
            wires = all_reduce.open_wires([(numel, dtype)] * options.wires)
            for wire in wires if rival == "native" else []:
                wire.scale_first = True
            scale = 1.0 if rival == "native" else 0.5

            def reduce(all_reduce: Any = all_reduce, wires: Any = wires, scale: float = scale) -> None:
                for pending in [all_reduce.start(wire, scale=scale) for wire in wires]:
                    pending.wait()

            rivals[rival], buffers[rival] = reduce, [wire.tensor for wire in wires]

    def prepare(rival: str) -> None:
        for buffer in buffers[rival]:
            buffer.copy_(source)
            if rival == "native":
                buffer.mul_(0.5)

    for rival, turn in rivals.items():  # check the results before timing
        prepare(rival)
        turn()
        for buffer in buffers[rival]:
            if not torch.equal(buffer.float(), expected if rival == "gloo" else expected / 2):
                raise SystemExit(f"{rival} reduced {numel} elements wrongly on rank {world.rank}")
    spreads = measure.take_turns(rivals, prepare=prepare, warmups=2, seconds=options.seconds, most=100)
    engine.close()
    for all_reduce in all_reduces.values():
        all_reduce.close()
    return {"bytes": 4 * numel, "wires": options.wires, "ms": {name: vars(spread) for name, spread in spreads.items()}}


def report(rows: list[dict[str, Any]], about: dict[str, Any]) -> None:
    table = []
    for row in rows:
        spreads = {name: Spread(**values) for name, values in row["ms"].items()}
        for name, spread in spreads.items():
            cells = [row["layout"], row["rate"], human_bytes(row["bytes"]), name, spread.text(2)]
            table.append([*cells, f"{spread.p50 / spreads['gloo'].p50:.2f}"])
    title = f"All-reduces between hosts, {rows[0]['wires']} at a time, 1 thread per rank on {about['cores']} cores, "
    columns = ["layout", "rate", "size in fp32", "rival", "ms", "ratio to gloo"]
    measure.print_table(f"{title}p50 (p20-p80) of the slowest rank {measure.origin(about)}", columns, table)


if __name__ == "__main__":
    sys.exit(main())
