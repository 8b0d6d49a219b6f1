"""Whole training steps: torchring against DistributedDataParallel, and Horovod where it is installed, in one run.

    torchring bench step                     all models, 2 ranks, a thread each
    torchring bench step --models mlp gpt --json results.jsonl
    torchring bench step --models mlp --ranks 4 --group 2    layers cut in two

Rivals take turns of 4 steps, of which the first does not count. Each rival trains its own copy of the model in
processes of its own, from the same weights and on the same batches. A step is zero_grad, forward, backward and step.
A rival's *overhead* is the median, over all repetitions, of the time of its step minus the time of a step of "alone".
Rivals, at their best settings:
    torchring  torchring.wrap(optimizer, model)
    torchring.horovod
               torchring.horovod.DistributedOptimizer(optimizer)
    ddp        DistributedDataParallel(model, gradient_as_bucket_view=True) over Gloo
    horovod    hvd.DistributedOptimizer over MPI, cycle time 0.1 ms
    no group   with --group of all ranks: torchring without group=
    alone      no communication between ranks that have the same parts
At the end all rivals must have the same weights, to within rounding. "alone" must have other weights.
"""

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import torchring
import torchring.horovod as api
from torchring.bench import measure, turns
from torchring.bench.measure import Spread, stopped_by_signals
from torchring.bench.models import MODELS, Batch, Workload
from torchring.bench.options import parser
from torchring.default_world import default_world
from torchring.gradients.group import OptimizerGroup


@dataclass
class Trainer:
    """The model and the optimizer of one rival, and the losses of all steps so far."""

    model: torch.nn.Module
    optimizer: Any
    losses: list[float]

    def step(self, workload: Workload, batches: Sequence[Batch]) -> None:
        """Train for one step, on the next batch."""
        batch = batches[len(self.losses) % len(batches)]
        self.optimizer.zero_grad()
        loss = workload.loss(self.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.losses.append(loss.item())


MOST_DISTANCE = 1e-3
Wrap = Callable[..., Trainer]


def main() -> int:
    options = parser("step").parse_args()
    if options.worker:
        torch.set_num_threads(1)
        torchring.init()
        turns.serve(options.worker, functools.partial(prepare, options.models[0], options.group))
        return 0
    about = measure.provenance() | {"script": Path(__file__).name}
    rows = []
    for ranks in options.ranks:
        table = [compare(name, ranks, options) for name in options.models]
        report(table, about | {"ranks": ranks})
        rows += table
    measure.write_rows(options.json, rows, about)
    return 0


def compare(name: str, ranks: int, options: argparse.Namespace) -> dict[str, Any]:
    """Time the rivals on one model; by default all."""
    default = ["torchring.horovod", "ddp", *["horovod"] * measure.has_horovod()]
    rivals = list(dict.fromkeys(["torchring", "alone", *(options.rivals or (["ddp"] if options.group else default))]))
    arguments, launchers = ["--models", name], {"horovod": measure.mpirun(ranks)}
    if options.group:
        arguments += ["--group", str(options.group)]
    with (
        stopped_by_signals(),
        closing(turns.Coordinator(__file__, rivals, ranks, arguments, launchers=launchers)) as coordinator,
    ):
        coordinator.take_turns(warmups=1, seconds=options.seconds, most=40)
        results = coordinator.finish()
        distances = {rival: check_weights(rival, coordinator.folder) for rival in rivals if rival != "torchring"}
    for rival, per_rank in results.items():
        if rival != "alone" and len({rank["digest"] for rank in per_rank}) > ranks // (options.group or ranks):
            raise SystemExit(f"{rival} left its ranks with different weights")
    model = MODELS[name]().model
    parameters = list(model.parameters())
    return {
        "model": name,
        "parameters": sum(p.numel() for p in parameters),
        "tensors": len(parameters),
        "bytes": sum(p.numel() * p.element_size() for p in parameters),
        "ranks": ranks,
        "distance": distances,
        "losses": {rival: per_rank[0]["losses"][-1] for rival, per_rank in results.items()},
        "ms": {name: vars(Spread.of(rival.seconds)) for name, rival in coordinator.rivals.items()},
        "overhead_ms": {
            name: vars(Spread.of(rival.seconds_more_than(coordinator.rivals["alone"])))
            for name, rival in coordinator.rivals.items()
            if name != "alone"
        },
        "stats": results["torchring"][0]["stats"],
    }


def prepare(
    name: str, group: int | None, rival: str, folder: Path
) -> tuple[Callable[[str], None], Callable[[], dict[str, Any]]]:
    """What `turns.serve` needs on a rank: a function that trains for one step, and one that returns the result."""
    workload, parts = MODELS[name](), torchring.size() // (group or torchring.size())
    batches = [workload.batch(seed=1000 * (torchring.rank() // parts) + i) for i in range(8)]
    torch.manual_seed(0)
    model = MODELS[name]().model
    mesh = cut(model, parts) if group else None
    wrap = RIVALS[rival] if rival != "horovod" else functools.partial(with_horovod, measure.start_horovod())
    trainer = wrap(model, mesh)
    kept = torch.nn.ParameterList(model.parameters())  # the first forward of DDP takes DTensors out of the model
    start = flat_weights(kept)

    def result() -> dict[str, Any]:
        weights = flat_weights(kept)
        if torchring.rank() == 0:
            torch.save((start, weights), folder / f"{rival}.pt")
        stats = vars(trainer.optimizer.stats()) if rival == "torchring" else None
        digest = weights.view(torch.int32).sum(dtype=torch.int64).item()
        return {"losses": trainer.losses, "digest": digest, "stats": stats}

    return lambda _: trainer.step(workload, batches), result


def cut(model: torch.nn.Module, parts: int) -> DeviceMesh:
    """Cut pairs of linear layers, as those of the blocks of a GPT, and return the dimension of the same parts."""
    measure.open_gloo()
    mesh = init_device_mesh("cpu", (torchring.size() // parts, parts), mesh_dim_names=("dp", "tp"))
    for module in model.modules() if parts > 1 else ():
        layers = [layer for layer in module.children() if isinstance(layer, torch.nn.Linear)]
        for i, layer in enumerate(layers[: len(layers) // 2 * 2] if isinstance(module, torch.nn.Sequential) else ()):
            parallelize_module(layer, mesh["tp"], RowwiseParallel() if i % 2 else ColwiseParallel())
    return mesh["dp"]


def flat_weights(model: torch.nn.Module) -> torch.Tensor:
    """Of DTensors, this rank's part."""
    own = (p.to_local() if isinstance(p, DTensor) else p for p in model.parameters())
    return torch.cat([p.detach().flatten() for p in own])


def distance(weights: torch.Tensor, right: torch.Tensor, start: torch.Tensor) -> float:
    """How far these weights are from the right ones, as a share of the way that training moved the right ones."""
    return float((weights - right).norm() / (right - start).norm())


def check_weights(rival: str, folder: Path, *, reference: str = "torchring", most: float = MOST_DISTANCE) -> float:
    """The distance of a rival's weights from the reference's, divided by the distance that training moved these.

    Stops the run if a rival's weights are too far away. All rivals have trained for the same number of steps. "alone"
    saw only its own rank's data, so its weights must be far away: otherwise the check could not tell right from wrong.
    """
    start, ours = torch.load(folder / f"{reference}.pt")
    _, theirs = torch.load(folder / f"{rival}.pt")
    far = distance(theirs, ours, start)
    if (far < most) == (rival == "alone"):
        raise SystemExit(
            f"the weights of {rival} differ from {reference}'s by {far:.1e} of the way that training moved them"
        )
    return far


def alone_in_turn(trainers: dict[str, Trainer]) -> tuple[dict[str, list[Any]], Callable[[str], None]]:
    """The reducers that each rival has made, and a function that prepares the turn of a rival.

    With several optimizers, ranks send a message after each backward, which says what it has reached. So only those
    whose turn it is stay in the group, as in a process of their own.
    """
    group = default_world().shared(OptimizerGroup)
    reducers = {rival: list(group.owners_of(trainer.model.parameters())) for rival, trainer in trainers.items()}

    def prepare(rival: str) -> None:
        group.reducers[:] = reducers[rival]

    return reducers, prepare


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Plain SGD. The optimizer takes the same time for all rivals."""
    return torch.optim.SGD(model.parameters(), lr=1e-3)


def with_torchring(model: torch.nn.Module, mesh: DeviceMesh | None = None) -> Trainer:
    return Trainer(model, torchring.wrap(sgd(model), model, group=mesh), [])


def without_group(model: torch.nn.Module, mesh: DeviceMesh | None = None) -> Trainer:
    return with_torchring(model, None)


def with_api_of_horovod(model: torch.nn.Module, mesh: DeviceMesh | None = None) -> Trainer:
    api.init()
    return with_horovod(api, model, mesh)


def with_ddp(model: torch.nn.Module, mesh: DeviceMesh | None = None) -> Trainer:
    measure.open_gloo()
    ddp = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, device_mesh=mesh)
    return Trainer(ddp, sgd(ddp), [])


def with_horovod(hvd: Any, model: torch.nn.Module, mesh: DeviceMesh | None = None) -> Trainer:
    optimizer = hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters())
    return Trainer(model, optimizer, [])


def without_communication(model: torch.nn.Module, mesh: DeviceMesh | None = None) -> Trainer:
    return Trainer(model, sgd(model), [])


RIVALS: dict[str, Wrap] = {
    "torchring": with_torchring,
    "no group": without_group,
    "torchring.horovod": with_api_of_horovod,
    "ddp": with_ddp,
    "alone": without_communication,
}


def report(rows: list[dict[str, Any]], about: dict[str, Any]) -> None:
    names = list(rows[0]["ms"])
    others = [name for name in names if name not in ("torchring", "alone")]
    columns = ["model", "MiB", "tensors", *(f"{name} ms" for name in names), "overhead ms"]
    columns += [
        part for name in others for part in (f"{name} overhead ms", f"ratio to {name}", f"step {name}/torchring")
    ]
    columns += ["efficiency"]
    table = []
    for row in rows:
        spreads = {name: Spread(**values) for name, values in row["ms"].items()}
        overheads = {name: Spread(**values) for name, values in row["overhead_ms"].items()}
        ours = overheads["torchring"]
        cells = [row["model"], f"{row['bytes'] / 2**20:.1f}", str(row["tensors"])]
        cells += [spreads[name].text(1) for name in names]
        cells.append(ours.text(1))
        for name in others:
            theirs = overheads[name]
            ratio = ours.p50 / theirs.p50 if theirs.p50 > 0 else float("nan")
            cells += [theirs.text(1), f"{ratio:.2f}", f"{spreads[name].p50 / spreads['torchring'].p50:.2f}x"]
        cells.append(f"{spreads['alone'].p50 / spreads['torchring'].p50:.0%}")
        table.append(cells)
    title = f"Training step, {about['ranks']} ranks x 1 thread on {about['cores']} cores, p50 (p20-p80)"
    measure.print_table(f"{title} {measure.origin(about)}", columns, table)


if __name__ == "__main__":
    sys.exit(main())
