"""Several optimizers against one over the same parameters: how much communication is exposed, and steps, in one run.

    torchring bench optimizers                            one host, and two hosts with links of 10 Gbit/s (as root)
    torchring bench optimizers --rates none --seconds 20

Two ranks with a thread each; with a rate, each on a host of its own (a network namespace). Every backward reaches all
parameters. Rivals take turns in the same processes, each with its own copy of the model:
    one        a single optimizer
    several    two optimizers. gan: one for each half of the MLP, as in a generator's step. muon: one for the matrices
               in the blocks of the GPT, one for all other parameters
    alone      no communication at all

"exposed" is the sum of `stats().exposed_ms` over the optimizers. At the end, "one" and "several" must have the same
weights, bit by bit.
"""

from __future__ import annotations

import argparse
import copy
import functools
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch

import torchring
from torchring.bench import measure, step
from torchring.bench.measure import Spread
from torchring.bench.models import MODELS, Block
from torchring.bench.netns import Network
from torchring.default_world import default_world
from torchring.gradients.group import OptimizerGroup
from torchring.gradients.plan import default_bucket_mb
from torchring.launch.arguments import duration

Parameters = list[torch.nn.Parameter]
_RIVALS: Final = ("one", "several", "alone")
_NUM_WARMUPS: Final = 4


def main() -> int:
    parser = measure.parser("optimizers", __doc__ or "")
    parser.add_argument("--cases", nargs="+", choices=sorted(CASES), default=list(CASES))
    parser.add_argument("--rates", nargs="+", default=["none", "10gbit"], help='of links; "none": one host')
    parser.add_argument("--seconds", type=duration, default=20.0, help="time for each case and rate")
    options = parser.parse_args()
    if options.worker is not None:
        return work(options)
    rows = []
    with measure.stopped_by_signals():  # so that the network is removed
        for rate in options.rates:
            rows += [compare(name, rate, options.seconds) for name in options.cases]
    about = measure.provenance() | {"script": Path(__file__).name}
    measure.write_rows(options.json, rows, about)
    columns = ["case", "rate", "algorithm", "rival", "step ms", "exposed ms", "ratio"]
    table = []
    for row in rows:
        for rival, ms in row["ms"].items():
            cells = [row["case"], row["rate"], row["algorithm"], rival, Spread(**ms).text(1)]
            if rival in row["exposed_ms"]:
                exposed = {name: Spread(**values) for name, values in row["exposed_ms"].items()}
                cells += [exposed[rival].text(1), f"{exposed[rival].p50 / exposed['one'].p50:.2f}"]
            table.append([*cells, "", ""][: len(columns)])
    title = f"One optimizer and several, 2 ranks with a thread each on {about['cores']} cores, p50 (p20-p80)"
    measure.print_table(f"{title} {measure.origin(about)}", columns, table)
    return 0


def compare(name: str, rate: str, seconds: float) -> dict[str, Any]:
    """Train one case. Returns the row that rank 0 wrote."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "row.json")
        arguments = ["--cases", name, "--worker", str(file), "--seconds", str(seconds)]
        if rate == "none":
            measure.run_here(__file__, 2, arguments)
        else:
            with Network(2, rate=rate) as network:
                measure.run_on_hosts(network, 1, __file__, arguments)
        return {"case": name, "rate": rate, **json.loads(file.read_text())}


def work(options: argparse.Namespace) -> int:
    """Run as one rank. Rank 0 writes the row."""
    torch.set_num_threads(1)
    torchring.init()
    world = default_world()
    bucket_mb = default_bucket_mb(world.size, world.num_nodes, "auto", on_device=False)
    model_name, parts_of = CASES[options.cases[0]]
    torch.manual_seed(0)
    workload = MODELS[model_name]()
    batches = [workload.batch(seed=1000 * torchring.rank() + i) for i in range(8)]
    models = {rival: copy.deepcopy(workload.model) for rival in _RIVALS}
    optimizers: dict[str, list[Any]] = {}
    for rival, model in models.items():
        parts = parts_of(model) if rival == "several" else [list(model.parameters())]
        plain = [torch.optim.SGD(part, lr=1e-3) for part in parts]
        wrap = functools.partial(torchring.wrap, model=model, bucket_mb=bucket_mb, sync_initial_state=False)
        optimizers[rival] = list(map(wrap, plain)) if rival != "alone" else [*plain]
    # Only the optimizers whose turn it is stay in the group, as in a process of their own.
    group = world.shared(OptimizerGroup)
    members = {rival: group.owners_of(model.parameters()) for rival, model in models.items()}
    num_steps = dict.fromkeys(_RIVALS, 0)
    exposed: dict[str, list[float]] = {"one": [], "several": []}

    def prepare(rival: str) -> None:
        for member in (member for others in members.values() for member in others):
            group.members.remove(member)
        for member in members[rival]:
            group.members.add(member)

    def train(rival: str) -> None:
        for optimizer in optimizers[rival]:
            optimizer.zero_grad()
        batch = batches[num_steps[rival] % len(batches)]
        num_steps[rival] += 1
        workload.loss(models[rival], batch).backward()  # type: ignore[no-untyped-call]
        if rival in exposed:
            exposed[rival].append(sum(optimizer.stats().exposed_ms for optimizer in optimizers[rival]) / 1e3)
        for optimizer in optimizers[rival]:
            optimizer.step()

    spreads = measure.take_turns(
        {rival: functools.partial(train, rival) for rival in _RIVALS},
        prepare=prepare,
        warmups=_NUM_WARMUPS,
        seconds=options.seconds,
        most=200,
    )
    weights = {rival: step.flat_weights(model) for rival, model in models.items()}
    if not torch.equal(weights["one"], weights["several"]) or torch.equal(weights["one"], weights["alone"]):
        raise SystemExit("several optimizers have trained other weights than one, or nothing was reduced")
    if torchring.rank() == 0:
        row = {
            "algorithm": optimizers["several"][0].stats().algorithm,
            "bytes": [optimizer.stats().bytes_per_step for optimizer in optimizers["several"]],
            "ms": {rival: vars(spread) for rival, spread in spreads.items()},
            "exposed_ms": {rival: vars(Spread.of(row[_NUM_WARMUPS:])) for rival, row in exposed.items()},
        }
        Path(options.worker).write_text(json.dumps(row))
    torchring.barrier()
    torchring.shutdown()
    return 0


def halves(model: torch.nn.Module) -> list[Parameters]:
    layers = list(model.children())
    middle = len(layers) // 2
    return [[p for layer in half for p in layer.parameters()] for half in (layers[:middle], layers[middle:])]


def matrices_and_rest(model: torch.nn.Module) -> list[Parameters]:
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    matrices = [p for block in blocks for p in block.parameters() if p.dim() == 2]
    chosen = {id(p) for p in matrices}
    return [matrices, [p for p in model.parameters() if id(p) not in chosen]]


CASES: dict[str, tuple[str, Callable[[torch.nn.Module], list[Parameters]]]] = {
    "gan": ("mlp", halves),
    "muon": ("gpt", matrices_and_rest),
}


if __name__ == "__main__":
    sys.exit(main())
