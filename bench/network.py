"""Training steps between hosts: torchring against DistributedDataParallel, over links of a given rate, in one run.

    torchring bench network     GPT; 1 and 10 Gbit/s; 2 hosts with 1 and 2 ranks
    torchring bench network --rates 25gbit --layouts 3x1 4x1 --json rows.jsonl

Network namespaces of this machine stand in for hosts, which needs root and iproute2. The links between hosts
have the given rate, but all ranks share the cores of one machine. Each rank has one thread. Rivals take turns,
each with its own copy of the model:
    torchring        torchring.wrap(optimizer, model)
    torchring bf16, int8, powersgd   the same with this compression, PowerSGD of rank 4
    ddp              DistributedDataParallel(model, gradient_as_bucket_view=True) over Gloo
    ddp fp16         the same with fp16_compress_hook
    ddp powersgd     the same with powerSGD_hook of rank 4, in one bucket: the hook starts a bucket's second all-reduce
                     on another thread, so with several buckets the order of all-reduces differs between ranks
    alone            no communication at all

"exposed" is the share of a step that communication adds to it. "busiest link" is what crosses it in one direction in a
step, the mean of two, counted by the network interfaces of the hosts. It must be what the algorithm promises: in a
ring of N ranks, 2(N-1)/N of the gradients' bytes, or of what is sent in their place. The wire floor is the time for
these bytes at the link's nominal rate. No step takes less time, however much communication backward hides.

All rivals must train alike. A few steps hardly change a loss, so the weights are compared: the distance of a rival's
weights from torchring's at the end, divided by the distance that training moved torchring's. Rounding gradients to bf16
changes them by at most 0.4 % per rank and hop, and the bound is 2 %. Steps of int8 err by about 1 % of the gradient,
which the next step makes up for: 2 %, too. For ddp the bound is 0.1 %. PowerSGD sends most of a gradient many steps
later, so a few steps bound nothing: see `torchring bench quality`. "alone" is a rival that reduces nothing.
"""

import argparse
import functools
import itertools
import json
import math
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

import torchring
from torchring.bench import measure, netns, step
from torchring.bench.measure import Spread, Turn
from torchring.bench.models import MODELS
from torchring.bench.netns import Network
from torchring.bench.options import parser
from torchring.bench.step import Trainer
from torchring.compression import PowerSGD
from torchring.compression.check import TRIAL

RANK = 4  # of PowerSGD
LARGEST_WEIGHT_DIFFERENCE = {
    "ddp": 1e-3,
    "torchring bf16": 2e-2,
    "torchring int8": 2e-2,
    "ddp fp16": 2e-2,
}
MOST_HEADERS = 0.1  # bytes of headers, confirmations and small messages, for each byte of gradients


@dataclass(frozen=True)
class Layout:
    """The number of hosts, and of ranks on each host. Ranks are numbered host by host."""

    hosts: int
    ranks_per_host: int

    @property
    def num_ranks(self) -> int:
        return self.hosts * self.ranks_per_host

    def __str__(self) -> str:
        return f"{self.hosts}x{self.ranks_per_host}"


def main() -> int:
    options = parser("network").parse_args()
    if options.worker is not None:
        return work(options)
    if (reason := netns.why_unavailable()) is not None:
        print(f"torchring bench network needs network namespaces: {reason}", file=sys.stderr)
        return 2
    about = measure.provenance() | {"script": Path(__file__).name}
    with measure.stopped_by_signals():  # so that the network is removed
        cases = itertools.product(options.models, itertools.starmap(Layout, options.layouts), options.rates)
        rows = [measure_link(*case, options) for case in cases]
    measure.write_rows(options.json, rows, about)
    report(rows, about)
    return 0


def measure_link(model: str, layout: Layout, rate: str, options: argparse.Namespace) -> dict[str, Any]:
    """Run the ranks on hosts that are joined by links of `rate`. Returns the row that rank 0 wrote."""
    with tempfile.TemporaryDirectory() as folder, Network(layout.hosts, rate=rate) as network:
        file = Path(folder, "row.json")
        arguments = ["--models", model, "--worker", str(file), "--rivals", *options.rivals]
        arguments += ["--seconds", str(options.seconds), "--most", str(options.most)]
        measure.run_on_hosts(network, layout.ranks_per_host, __file__, arguments)
        row: dict[str, Any] = {"layout": str(layout), "rate": rate, **json.loads(file.read_text())}
    check_bytes(row)
    return row


def check_bytes(row: dict[str, Any]) -> None:
    """Stop the run if other bytes crossed the busiest link than a rival's algorithm sends."""
    shapes = [p.shape for p in MODELS[row["model"]]().model.parameters()]
    layout = Layout(*map(int, row["layout"].split("x")))
    for rival, found in row["link_bytes"].items():
        is_by_host = row["stats"].get(rival, {}).get("algorithm") == "hierarchical"
        senders = layout.hosts if is_by_host else layout.num_ranks
        copies = 0 if rival == "alone" else 2 * (senders - 1) / senders
        least, most = (  # a matrix may lie in the parts of several ranks of a host
            copies * sum(payload_bytes(rival, shape, columns) for shape in shapes)
            for columns in (1, layout.ranks_per_host if is_by_host else 1)
        )
        if not 0.99 * least <= found <= (1 + MOST_HEADERS) * most + (1 << 18):
            expected = f"{least:.0f} to {most:.0f}"
            raise SystemExit(f"a step of {rival} sent {found} bytes over the busiest link instead of {expected}")


def payload_bytes(rival: str, shape: torch.Size, columns: int) -> float:
    """What a rival sends for a gradient, where each of so many ranks of a host sends its part to the other hosts."""
    numel, rows = shape.numel(), shape[0]
    if rival.endswith("16"):
        return 2 * numel
    if rival.endswith("int8"):
        return math.ceil(numel / 256) * (260 if len(shape) > 1 else 1024)
    factors = RANK * (rows + columns * numel // rows) * (2 if rival == "torchring powersgd" else 1)
    return 4 * (factors if rival.endswith("powersgd") and 2 * factors <= numel else numel)


def work(options: argparse.Namespace) -> int:
    """Run as one rank. Rank 0 writes the row."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    row = compare(options.models[0], options)
    if torchring.rank() == 0:
        Path(options.worker).write_text(json.dumps(row))
    torchring.barrier()
    torchring.shutdown()  # ends Gloo's threads while the interpreter, which they may need, still exists
    dist.destroy_process_group()
    return 0


def compare(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Time all rivals on one model."""
    build = MODELS[name]
    trainers: dict[str, Trainer] = {}
    for rival in [rival for rival in RIVALS if rival in (*ALWAYS, *options.rivals)]:
        torch.manual_seed(0)
        workload = build()
        trainers[rival] = RIVALS[rival](workload.model)
    batches = [workload.batch(seed=1000 * torchring.rank() + i) for i in range(8)]

    reducers, prepare = step.alone_in_turn(trainers)
    steps: dict[str, Turn] = {rival: functools.partial(t.step, workload, batches) for rival, t in trainers.items()}
    spreads = measure.take_turns(
        steps,
        prepare=prepare,
        warmups=TRIAL.stop + 3,  # torchring compresses nothing in some of these, to see whether that is faster
        seconds=options.seconds,
        most=options.most,
    )
    sent = {}
    for rival, train in steps.items():
        prepare(rival)
        sent[rival] = busiest_link(train)
    torch.manual_seed(0)
    weight_differences = check_weights(trainers, build().model)
    stats = {rival: vars(trainers[rival].optimizer.stats()) for rival, found in reducers.items() if found}
    for rival in stats:
        trainers[rival].optimizer.close()
    parameters = list(workload.model.parameters())
    return {
        "model": name,
        "parameters": sum(p.numel() for p in parameters),
        "tensors": len(parameters),
        "bytes": sum(p.numel() * p.element_size() for p in parameters),
        "ranks": torchring.size(),
        "weight_difference": weight_differences,
        "ms": {rival: vars(spread) for rival, spread in spreads.items()},
        "link_bytes": sent,
        "stats": stats,
    }


def busiest_link(train: Turn) -> int:
    """The bytes that a step sends over the busiest link, in one direction."""
    counters = Path("/sys/class/net", netns.INTERFACE, "statistics")

    def counted() -> torch.Tensor:
        torchring.barrier()
        sent = [int((counters / name).read_text()) for name in ("rx_bytes", "tx_bytes")]
        return torchring.all_gather(torch.tensor(sent))

    before = counted()
    train()
    train()
    return int((counted() - before).max()) // 2


def with_torchring(model: torch.nn.Module, compression: Any = None) -> Trainer:
    # All ranks have used the same seed, so the initial state is already the same.
    optimizer = torchring.wrap(step.sgd(model), model, compression=compression, sync_initial_state=False)
    return Trainer(model, optimizer, [])


def with_hook(model: torch.nn.Module, state: Any, hook: Any, bucket_mb: int | None = None) -> Trainer:
    ddp = DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=bucket_mb)
    ddp.register_comm_hook(state, hook)
    return Trainer(ddp, step.sgd(ddp), [])


RIVALS: dict[str, Callable[[torch.nn.Module], Trainer]] = {
    "torchring": with_torchring,
    "torchring bf16": functools.partial(with_torchring, compression="bf16"),
    "torchring int8": functools.partial(with_torchring, compression="int8"),
    "torchring powersgd": lambda m: with_torchring(m, PowerSGD(rank=RANK, start=2)),
    "ddp": step.with_ddp,
    "ddp fp16": lambda m: with_hook(m, None, fp16_compress_hook),
    "ddp powersgd": lambda m: with_hook(m, PowerSGDState(None, RANK, start_powerSGD_iter=2), powerSGD_hook, 1000),
    "alone": step.without_communication,
}
ALWAYS = ("torchring", "ddp", "alone")


def check_weights(trainers: dict[str, Trainer], start: torch.nn.Module) -> dict[str, float]:
    """The distance of each rival's weights from torchring's, divided by the distance of torchring's from `start`.

    Stops the run if a distance is above the rival's bound.
    """

    ours = step.flat_weights(trainers["torchring"].model)
    found = {
        rival: step.distance(step.flat_weights(trainers[rival].model), ours, step.flat_weights(start))
        for rival in trainers
    }
    for rival, difference in found.items():
        if not difference <= LARGEST_WEIGHT_DIFFERENCE.get(rival, math.inf):
            raise SystemExit(
                f"the weights of {rival} differ from torchring's by {difference:.2e} of the distance that training "
                "moved them"
            )
    return found


def report(rows: list[dict[str, Any]], about: dict[str, Any]) -> None:
    columns = ["model", "rate", "layout", "rival", "step ms", "overhead ms", "exposed", "ratio to ddp", "speed-up"]
    columns += ["busiest link MB", "wire floor ms", "weights differ"]
    table = []
    for row in rows:
        spreads = {name: Spread(**values) for name, values in row["ms"].items()}
        alone, ddp = spreads["alone"].p50, spreads["ddp"].p50
        for name, spread in spreads.items():
            sent = row["link_bytes"][name]
            ratio = (spread.p50 - alone) / (ddp - alone) if ddp > alone else float("nan")
            cells = [row["model"], row["rate"], row["layout"], name, spread.text(1 if alone < 50 else 0)]
            cells += [f"{spread.p50 - alone:.1f}", f"{1 - alone / spread.p50:.0%}", f"{ratio:.2f}"]
            cells += [f"{ddp / spread.p50:.2f}x", f"{sent / 1e6:.1f}"]
            cells += [f"{sent * 8e3 / netns.bits_per_second(row['rate']):.1f}"]
            table.append([*cells, f"{row['weight_difference'].get(name, 0.0):.0e}"])
    title = f"Training steps between hosts, 1 thread per rank on {about['cores']} cores, p50 (p20-p80)"
    measure.print_table(f"{title} {measure.origin(about)}", columns, table)
    print("\nspeed-up: over ddp. Below: torchring's own measurements.\n")
    for row in rows:
        print(f"- {row['model']}, {row['rate']}, {row['layout']}")
        for rival, stats in row["stats"].items():
            busy, exposed = stats["mean_communication_ms"], stats["mean_exposed_ms"]
            how = f"{rival} ({stats['algorithm']}, {stats['overlap']})"
            print(f"  - {how}: communication {busy:.0f} ms, of which {exposed:.0f} exposed: {stats['reason']}")


if __name__ == "__main__":
    sys.exit(main())
