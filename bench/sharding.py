"""Steps with a sharded optimizer: against plain torchring, DDP, DDP with ZeroRedundancyOptimizer and FSDP2, in one run.

    torchring bench sharding                          one host, 2 ranks
    torchring bench sharding --rates 10gbit 1gbit     two namespaces, as root
    torchring bench sharding --models gpt --optimizers muon

Rivals take turns: on one host in processes of their own, on two in the same processes. Malloc keeps the memory of freed
gradients, as torchring has it do, for all of them.
    shard      torchring.wrap(optimizer, model, shard=True)
    torchring  torchring.wrap(optimizer, model)
    ddp        DistributedDataParallel(model, gradient_as_bucket_view=True) over Gloo
    zero       the same, with ZeroRedundancyOptimizer
    fsdp2      fully_shard() of each layer and of the model, over Gloo
    alone      no communication at all
Optimizers: AdamW as it is by default on the CPU (a for-loop), with fused=True, and Muon for the matrices of the blocks
beside AdamW for the rest. At the end, on one host, shard must have the weights of torchring, bit by bit.
"""

import argparse
import functools
import json
import sys
import tempfile
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

import torchring
from torchring.bench import measure, step, turns
from torchring.bench.measure import Spread
from torchring.bench.models import MODELS, Block
from torchring.bench.netns import Network
from torchring.bench.options import parser
from torchring.participants.heap import keep_freed

Make = Callable[..., Optimizer]
_ADAMW: Final = functools.partial(torch.optim.AdamW, lr=1e-4)
_FUSED: Final = functools.partial(_ADAMW, fused=True)


class Several:
    """Optimizers that are used as one."""

    def __init__(self, optimizers: Iterable[Optimizer]) -> None:
        self.optimizers = list(optimizers)

    def zero_grad(self) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def step(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def state_bytes(self) -> int:
        """Of the state on this rank."""
        plain = [getattr(optimizer, "optim", optimizer) for optimizer in self.optimizers]  # ZeRO's own
        states = [entry for optimizer in plain for entry in optimizer.state.values()]
        tensors = [value for entry in states for value in entry.values() if isinstance(value, torch.Tensor)]
        return sum((t.to_local() if hasattr(t, "to_local") else t).nbytes for t in tensors)


def parts_of(model: torch.nn.Module, kind: str) -> list[tuple[list[torch.nn.Parameter], Make]]:
    """Which parameters each optimizer has, and how to make it."""
    if kind != "muon":
        return [(list(model.parameters()), _FUSED if kind == "adamw-fused" else _ADAMW)]
    matrices = [p for block in model.modules() if isinstance(block, Block) for p in block.parameters() if p.dim() == 2]
    rest = [p for p in model.parameters() if all(p is not other for other in matrices)]
    return [(matrices, functools.partial(torch.optim.Muon, lr=1e-3)), (rest, _FUSED)]


def build(rival: str, model: torch.nn.Module, kind: str) -> step.Trainer:
    keep_freed([parameter.nbytes for parameter in model.parameters()])
    trained = model
    if rival in ("ddp", "zero"):
        trained = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if rival == "fsdp2":
        for layer in model.children():
            if any(True for _ in layer.parameters()):
                fully_shard(layer)
        fully_shard(model)
    optimizers: list[Any] = []
    for parameters, make in parts_of(model, kind):
        if rival == "zero":
            optimizers.append(ZeroRedundancyOptimizer(parameters, make.func, **make.keywords))  # type: ignore[attr-defined]
            continue
        optimizers.append(make(parameters))
        if rival in ("torchring", "shard"):
            optimizers[-1] = torchring.wrap(optimizers[-1], model, shard=rival == "shard")
    return step.Trainer(trained, Several(optimizers), [])


def main() -> int:
    options = parser("sharding").parse_args()
    if options.worker is not None:
        torch.set_num_threads(1)
        torchring.init(process_group=True)
        if options.rates == ["none"]:
            turns.serve(options.worker, functools.partial(prepare, options.models[0], options.optimizers[0]))
        else:
            train_on_hosts(options)
        return 0
    rows = []
    with measure.stopped_by_signals():  # so that the network is removed
        for rate in options.rates:
            for model in options.models:
                kinds = options.optimizers or ("adamw", "adamw-fused", *(["muon"] if model == "gpt" else []))
                rows += [compare(model, kind, rate, options) for kind in kinds]
    about = measure.provenance() | {"script": Path(__file__).name, "ranks": options.ranks}
    measure.write_rows(options.json, rows, about)
    columns = ["model", "optimizer", "rate", "rival", "step ms", "rival / shard", "state MB"]
    table = []
    for row in rows:
        for rival, ms in row["ms"].items():
            cells = [row["model"], row["optimizer"], row["rate"], rival, Spread(**ms).text(1)]
            table.append([*cells, f"{row['ratio'][rival]:.2f}", f"{row['state_bytes'][rival] / 1e6:.4g}"])
    title = f"Sharded steps, {about['ranks']} ranks with a thread each on {about['cores']} cores, p50 (p20-p80)"
    measure.print_table(f"{title} {measure.origin(about)}", columns, table)
    return 0


def compare(model: str, kind: str, rate: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train one case."""
    arguments = ["--models", model, "--optimizers", kind, "--rates", rate, "--rivals", *options.rivals]
    case = {"model": model, "optimizer": kind, "rate": rate}
    if rate != "none":
        with tempfile.TemporaryDirectory() as folder, Network(2, rate=rate) as network:
            file = Path(folder, "row.json")
            arguments += ["--seconds", str(options.seconds), "--worker", str(file)]
            measure.run_on_hosts(network, options.ranks // 2, __file__, arguments)
            row: dict[str, Any] = json.loads(file.read_text())
            return case | row
    with closing(turns.Coordinator(__file__, options.rivals, options.ranks, arguments)) as coordinator:
        coordinator.take_turns(warmups=1, seconds=options.seconds, most=40)
        results = coordinator.finish()
        weights = [torch.load(coordinator.folder / f"{r}.pt") for r in ("shard", "torchring") if r in options.rivals]
    if not torch.equal(weights[0], weights[-1]):
        raise SystemExit("shard does not have the weights of torchring")
    spreads = {name: Spread.of(rival.seconds) for name, rival in coordinator.rivals.items()}
    return case | outcome(spreads, {name: ranks[0] for name, ranks in results.items()})


def outcome(spreads: dict[str, Spread], state_bytes: dict[str, int]) -> dict[str, Any]:
    return {
        "ms": {rival: vars(spread) for rival, spread in spreads.items()},
        "ratio": {rival: spread.p50 / spreads["shard"].p50 for rival, spread in spreads.items()},
        "state_bytes": state_bytes,
    }


def prepare(name: str, kind: str, rival: str, folder: Path) -> tuple[Callable[[str], None], Callable[[], Any]]:
    """What `turns.serve` needs on a rank."""
    torch.manual_seed(0)
    workload = MODELS[name]()
    trainer = build(rival, workload.model, kind)
    batches = [workload.batch(seed=1000 * torchring.rank() + i) for i in range(8)]

    def result() -> int:
        if torchring.rank() == 0 and rival in ("shard", "torchring"):
            torch.save(step.flat_weights(trainer.model), folder / f"{rival}.pt")
        return int(trainer.optimizer.state_bytes())

    return lambda _: trainer.step(workload, batches), result


def train_on_hosts(options: argparse.Namespace) -> None:
    """All rivals in the same processes. Rank 0 writes the row."""
    (name,), (kind,) = options.models, options.optimizers
    trainers: dict[str, step.Trainer] = {}
    for rival in options.rivals:
        torch.manual_seed(0)
        workload = MODELS[name]()
        trainers[rival] = build(rival, workload.model, kind)
    batches = [workload.batch(seed=1000 * torchring.rank() + i) for i in range(8)]

    _, choose = step.alone_in_turn(trainers)
    actions: dict[str, Callable[[], object]] = {
        rival: functools.partial(trainer.step, workload, batches) for rival, trainer in trainers.items()
    }
    spreads = measure.take_turns(actions, prepare=choose, warmups=2, seconds=options.seconds, most=60, calls=2)
    if torchring.rank() == 0:
        state_bytes = {rival: trainer.optimizer.state_bytes() for rival, trainer in trainers.items()}
        Path(options.worker).write_text(json.dumps(outcome(spreads, state_bytes)))


if __name__ == "__main__":
    sys.exit(main())
