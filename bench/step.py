"""Whole training steps: torchring against DistributedDataParallel, and Horovod where it is installed, in one run.

    python bench/step.py                           all models, 2 ranks, one thread each
    python bench/step.py --models mlp gpt --json results.json

Every rival has its own copy of the model, started from the same weights and fed the same batches, and takes its turn:
zero_grad, forward, backward, step. So does "alone", the same processes without communication; a rival's *overhead* is
its median step minus that of "alone". Rivals at their best settings:
    torchring  torchring.wrap(optimizer, model)
    ddp        DistributedDataParallel(model, gradient_as_bucket_view=True) over Gloo
    horovod    hvd.DistributedOptimizer over MPI, cycle time 0.1 ms, if it can be imported; after the others, because
               its background thread would slow them
    alone      no communication at all
The losses of all rivals but "alone" must agree to within rounding.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

import torchring
from torchring.bench import measure
from torchring.bench.measure import Spread
from torchring.bench.models import MODELS, Workload


@dataclass
class Contestant:
    """One rival's model and what steps it."""

    model: torch.nn.Module
    optimizer: Any
    losses: list[float]


Wrap = Callable[[torch.nn.Module], Contestant]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], help="one table for each")
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=list(MODELS))
    parser.add_argument("--seconds", type=float, default=30.0, help="per model")
    parser.add_argument("--most", type=int, default=60, help="steps of each rival at the most")
    parser.add_argument("--json", help="also write the rows to this file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        train(options)
        return 0
    return measure.run_worlds(__file__, options.ranks, mpi=measure.has_horovod(), json_file=options.json)


def train(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torchring.init()
    measure.open_gloo()
    rows = [compare(name, MODELS[name], options) for name in options.models]
    if torchring.rank() == 0:
        measure.hand_over(rows, options.worker)
        report(rows, measure.provenance() | {"ranks": torchring.size()})
    torchring.barrier()


def compare(name: str, build: Callable[[], Workload], options: argparse.Namespace) -> dict[str, Any]:
    """Time all rivals on one model."""
    contestants: dict[str, Contestant] = {}
    workload = build()  # for its batches and its loss; contestants have a model each
    batches = [workload.batch(seed=1000 * torchring.rank() + i) for i in range(8)]

    def turn(rival: str) -> None:
        contestant = contestants[rival]
        batch = batches[len(contestant.losses) % len(batches)]
        contestant.optimizer.zero_grad()
        loss = workload.loss(contestant.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        contestant.optimizer.step()
        contestant.losses.append(loss.item())

    def take_turns(rivals: dict[str, Wrap], seconds: float) -> dict[str, Spread]:
        for rival, wrap in rivals.items():
            torch.manual_seed(0)
            contestants[rival] = wrap(build().model)
        return measure.take_turns(
            {rival: functools.partial(turn, rival) for rival in rivals},
            prepare=lambda _: None,
            warmups=3,
            seconds=seconds,
            most=options.most,
        )

    spreads = take_turns(RIVALS, options.seconds)
    if measure.has_horovod():
        with measure.horovod() as hvd:
            spreads |= take_turns({"horovod": functools.partial(with_horovod, hvd)}, options.seconds / len(RIVALS))
    difference = loss_difference(contestants)
    optimizer = contestants["torchring"].optimizer
    stats = vars(optimizer.stats())
    optimizer.close()
    parameters = list(workload.model.parameters())
    return {
        "model": name,
        "parameters": sum(p.numel() for p in parameters),
        "tensors": len(parameters),
        "bytes": sum(p.numel() * p.element_size() for p in parameters),
        "ranks": torchring.size(),
        "loss_difference": difference,
        "ms": {rival: vars(spread) for rival, spread in spreads.items()},
        "stats": stats,
    }


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Plain SGD: the optimizer's time is the same for all."""
    return torch.optim.SGD(model.parameters(), lr=1e-3)


def with_torchring(model: torch.nn.Module) -> Contestant:
    return Contestant(model, torchring.wrap(sgd(model), model), [])


def with_ddp(model: torch.nn.Module) -> Contestant:
    ddp = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return Contestant(ddp, sgd(ddp), [])


def with_horovod(hvd: Any, model: torch.nn.Module) -> Contestant:
    optimizer = hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters())
    return Contestant(model, optimizer, [])


def without_communication(model: torch.nn.Module) -> Contestant:
    return Contestant(model, sgd(model), [])


RIVALS: dict[str, Wrap] = {"torchring": with_torchring, "ddp": with_ddp, "alone": without_communication}


def rivals() -> dict[str, Wrap]:
    return RIVALS


def loss_difference(contestants: dict[str, Contestant]) -> float:
    """The largest relative difference between the rivals' losses; stops the run if it is more than rounding."""
    distributed = {rival: c.losses for rival, c in contestants.items() if rival != "alone"}
    reference = distributed["torchring"]
    worst = max(
        abs(a - b) / max(abs(a), 1e-12)
        for losses in distributed.values()
        for a, b in zip(reference, losses, strict=False)  # those of Horovod are fewer or more
    )
    if worst > 1e-3:
        raise SystemExit(f"the losses differ by {worst:.2e}: {distributed}")
    return worst


def report(rows: list[dict[str, Any]], about: dict[str, Any]) -> None:
    names = list(rows[0]["ms"])
    others = [name for name in names if name not in ("torchring", "alone")]
    columns = ["model", "MiB", "tensors", *(f"{name} ms" for name in names), "overhead ms"]
    columns += [
        part for name in others for part in (f"{name} overhead ms", f"ratio to {name}", f"step {name}/torchring")
    ]
    columns += ["efficiency", "loss difference"]
    table = []
    for row in rows:
        spreads = {name: Spread(**values) for name, values in row["ms"].items()}
        alone, ours = spreads["alone"].p50, spreads["torchring"].p50
        cells = [row["model"], f"{row['bytes'] / 2**20:.1f}", str(row["tensors"])]
        cells += [f"{spreads[n].p50:.1f} ({spreads[n].p20:.1f}-{spreads[n].p80:.1f})" for n in names]
        cells.append(f"{ours - alone:.1f}")
        for name in others:
            theirs = spreads[name].p50
            ratio = (ours - alone) / (theirs - alone) if theirs > alone else float("nan")
            cells += [f"{theirs - alone:.1f}", f"{ratio:.2f}", f"{theirs / ours:.2f}x"]
        cells += [f"{alone / ours:.0%}", f"{row['loss_difference']:.0e}"]
        table.append(cells)
    title = f"Training step, {about['ranks']} ranks x 1 thread on {about['cores']} cores, p50 (p20-p80)"
    measure.print_table(f"{title} ({about['processor']}, {about['date']}, commit {about['commit']})", columns, table)


if __name__ == "__main__":
    sys.exit(main())
