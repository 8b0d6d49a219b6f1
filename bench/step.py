"""Whole training steps: torchring against DistributedDataParallel, and Horovod where it is installed, in one run.

    python bench/step.py                           all models, 2 ranks, one thread each
    python bench/step.py --models mlp gpt --json results.json

Every rival has its own copy of the model, started from the same weights and fed the same batches, and takes its turn:
zero_grad, forward, backward, step. So does "alone", the same processes without communication; a rival's *overhead* is
its median step minus that of "alone". Rivals at their best settings:
    torchring  torchring.wrap(optimizer, model)
    ddp        DistributedDataParallel(model, gradient_as_bucket_view=True) over Gloo
    horovod    hvd.DistributedOptimizer, if it can be imported
    alone      no communication at all
The losses of all rivals but "alone" must agree to within rounding.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=list(MODELS))
    parser.add_argument("--seconds", type=float, default=30.0, help="per model")
    parser.add_argument("--most", type=int, default=60, help="steps of each rival at the most")
    parser.add_argument("--json", help="also write the rows to this file")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.worker:
        arguments = [*sys.argv[1:], "--worker"]
        return measure.start_ranks(__file__, options.ranks, arguments, mpi=False, rendezvous=measure.free_port())
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rows = [compare(name, MODELS[name], options) for name in options.models]
    if torchring.rank() == 0:
        about = measure.provenance() | {"ranks": torchring.size(), "script": Path(__file__).name}
        measure.write_json(options.json, rows, about)
        report(rows, about)
    torchring.barrier()
    return 0


def compare(name: str, build: Callable[[], Workload], options: argparse.Namespace) -> dict[str, Any]:
    """Time all rivals on one model."""
    contestants: dict[str, Contestant] = {}
    for rival, wrap in rivals().items():
        torch.manual_seed(0)
        workload = build()
        contestants[rival] = wrap(workload.model)
    batches = [workload.batch(seed=1000 * torchring.rank() + i) for i in range(8)]
    num_steps = dict.fromkeys(contestants, 0)

    def turn(rival: str) -> None:
        contestant = contestants[rival]
        batch = batches[num_steps[rival] % len(batches)]
        num_steps[rival] += 1
        contestant.optimizer.zero_grad()
        loss = workload.loss(contestant.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        contestant.optimizer.step()
        contestant.losses.append(loss.item())

    spreads = measure.take_turns(
        {rival: lambda rival=rival: turn(rival) for rival in contestants},  # type: ignore[misc]
        prepare=lambda _: None,
        warmups=3,
        seconds=options.seconds,
        most=options.most,
    )
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


def rivals() -> dict[str, Callable[[torch.nn.Module], Contestant]]:
    """How each rival makes a model distributed. Plain SGD: the optimizer's time is the same for all."""

    def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=1e-3)

    def with_ddp(model: torch.nn.Module) -> Contestant:
        ddp = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
        return Contestant(ddp, sgd(ddp), [])

    found: dict[str, Callable[[torch.nn.Module], Contestant]] = {
        "torchring": lambda model: Contestant(model, torchring.wrap(sgd(model), model), []),
        "ddp": with_ddp,
        "alone": lambda model: Contestant(model, sgd(model), []),
    }
    if importlib.util.find_spec("horovod") is not None:
        import horovod.torch as hvd

        if not hvd.is_initialized():
            os.environ.setdefault("HOROVOD_CYCLE_TIME", "0.1")
            hvd.init()

        def with_horovod(model: torch.nn.Module) -> Contestant:
            return Contestant(
                model, hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters()), []
            )

        found["horovod"] = with_horovod
    return found


def loss_difference(contestants: dict[str, Contestant]) -> float:
    """The largest relative difference between the rivals' losses; stops the run if it is more than rounding."""
    distributed = {rival: c.losses for rival, c in contestants.items() if rival != "alone"}
    reference = distributed["torchring"]
    worst = max(
        abs(a - b) / max(abs(a), 1e-12)
        for losses in distributed.values()
        for a, b in zip(reference, losses, strict=True)
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
