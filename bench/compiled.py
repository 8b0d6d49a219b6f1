"""torch.compile and overlap: how much communication backward hides, with models that are compiled in several ways.

    torchring bench compiled                  GPT, 2 ranks, buckets of 4 MiB
    torchring bench compiled --model small --json results.jsonl

Rivals take turns (see turns.py), each in processes of its own, with overlap="thread":
    eager     not compiled
    whole     torch.compile(model)
    layers    each layer of the model compiled
    ddp       torch.compile(DistributedDataParallel(model, bucket_cap_mb=4))
"left" is the share of backward, from its begin to the last gradient, that is left when the first gradient has come.
"hidden" is `stats().overlap_ratio`. At the end all rivals must have the same weights, up to the rounding of compiled
kernels.
"""

from __future__ import annotations

import functools
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

import torchring
from torchring.bench import measure, step, turns
from torchring.bench.measure import Spread, stopped_by_signals
from torchring.bench.models import MODELS
from torchring.bench.step import Trainer
from torchring.launch.arguments import duration

_BUCKET_MB = 4.0
_MOST_DISTANCE = 1e-2  # between the weights, of the distance that training moved them


def main() -> int:
    parser = measure.parser("compiled", __doc__ or "")
    parser.add_argument("--model", choices=sorted(MODELS), default="gpt")
    parser.add_argument("--ranks", type=measure.several, default=2)
    parser.add_argument("--seconds", type=duration, default=30.0, help="time for all rivals")
    options = parser.parse_args()
    if options.worker:
        torch.set_num_threads(1)
        torchring.init()
        turns.serve(options.worker, functools.partial(prepare, options.model))
        return 0
    about = measure.provenance() | {"script": Path(__file__).name, "model": options.model, "ranks": options.ranks}
    rows = compare(options.model, options.ranks, options.seconds)
    report(rows, about)
    measure.write_rows(options.json, rows, about)
    return 0


def compare(model: str, ranks: int, seconds: float) -> list[dict[str, Any]]:
    """A row for each rival."""
    worker = ["--model", model]
    with stopped_by_signals(), closing(turns.Coordinator(__file__, list(RIVALS), ranks, worker)) as coordinator:
        coordinator.take_turns(warmups=2, seconds=seconds, most=40)
        results = coordinator.finish()
        for rival in RIVALS:
            step.check_weights(rival, coordinator.folder, reference="eager", most=_MOST_DISTANCE)
    return [
        {
            "rival": name,
            "ms": vars(Spread.of(coordinator.rivals[name].seconds)),
            "left": statistics.median(share for rank in per_rank for share in rank["left"]),
            "hidden": per_rank[0]["hidden"],
            "loss": per_rank[0]["loss"],
        }
        for name, per_rank in results.items()
    ]


def prepare(name: str, rival: str, folder: Path) -> tuple[Callable[[str], None], Callable[[], dict[str, Any]]]:
    """What `turns.serve` needs on a rank: a function that trains for one step, and one that returns the result."""
    workload = MODELS[name]()
    batches = [workload.batch(seed=1000 * torchring.rank() + i) for i in range(8)]
    torch.manual_seed(0)
    model = MODELS[name]().model
    start = step.flat_weights(model)
    trainer = RIVALS[rival](model)
    arrivals: list[float] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda _: arrivals.append(time.perf_counter()))  # type: ignore[no-untyped-call]
    left: list[float] = []

    def train(_: str) -> None:
        trainer.optimizer.zero_grad()
        batch = batches[len(trainer.losses) % len(batches)]
        loss = workload.loss(trainer.model, batch)
        arrivals.clear()
        began = time.perf_counter()
        loss.backward()  # type: ignore[no-untyped-call]
        left.append((arrivals[-1] - arrivals[0]) / (arrivals[-1] - began))
        trainer.optimizer.step()
        trainer.losses.append(loss.item())

    def result() -> dict[str, Any]:
        if torchring.rank() == 0:
            torch.save((start, step.flat_weights(model)), folder / f"{rival}.pt")
        hidden = trainer.optimizer.stats().overlap_ratio if rival != "ddp" else None
        return {"left": left[2:], "hidden": hidden, "loss": trainer.losses[-1]}

    return train, result


def _wrapped(model: torch.nn.Module, run: torch.nn.Module) -> Trainer:
    optimizer = torchring.wrap(step.sgd(model), model, overlap="thread", bucket_mb=_BUCKET_MB)
    return Trainer(run, optimizer, [])


def _layers(model: torch.nn.Module) -> Trainer:
    for layer in model.children():
        layer.compile()
    return _wrapped(model, model)


def _ddp(model: torch.nn.Module) -> Trainer:
    measure.open_gloo()
    ddp = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True, bucket_cap_mb=_BUCKET_MB)
    return Trainer(torch.compile(ddp), step.sgd(model), [])  # type: ignore[arg-type]


RIVALS: dict[str, Callable[[torch.nn.Module], Trainer]] = {
    "eager": lambda model: _wrapped(model, model),
    "whole": lambda model: _wrapped(model, torch.compile(model)),  # type: ignore[arg-type]
    "layers": _layers,
    "ddp": _ddp,
}


def report(rows: list[dict[str, Any]], about: dict[str, Any]) -> None:
    cells = [
        [
            row["rival"],
            Spread(**row["ms"]).text(1),
            f"{row['left']:.0%}",
            "" if row["hidden"] is None else f"{row['hidden']:.0%}",
        ]
        for row in rows
    ]
    title = f"{about['model']}, {about['ranks']} ranks x 1 thread on {about['cores']} cores {measure.origin(about)}"
    measure.print_table(title, ["rival", "step ms", "left of backward", "hidden"], cells)


if __name__ == "__main__":
    sys.exit(main())
