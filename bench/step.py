"""Whole training steps: torchring against DistributedDataParallel, and Horovod where it is installed, in one run.

    torchring bench step                           all models, 2 ranks, one thread each
    torchring bench step --models mlp gpt --json results.json

Every rival trains its own copy of the model in processes of its own, from the same weights and on the same batches, and
takes its turn: zero_grad, forward, backward, step (see turns.py). So does "alone", the same without communication; a
rival's *overhead* is the median, over all repetitions, of its step minus that of "alone". Rivals at their best:
    torchring  torchring.wrap(optimizer, model)
    ddp        DistributedDataParallel(model, gradient_as_bucket_view=True) over Gloo
    horovod    hvd.DistributedOptimizer over MPI, cycle time 0.1 ms (if it can be imported)
    alone      no communication at all
The weights of all rivals must be the same in the end to within rounding, and those of "alone" must not.
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import torchring
from torchring.bench import measure, turns
from torchring.bench.measure import Spread
from torchring.bench.models import MODELS, Batch, Workload
from torchring.launch.arguments import duration


@dataclass
class Contestant:
    """One rival's model and what steps it."""

    model: torch.nn.Module
    optimizer: Any
    losses: list[float]

    def step(self, workload: Workload, batches: Sequence[Batch]) -> None:
        """One training step, on the batch whose turn it is."""
        batch = batches[len(self.losses) % len(batches)]
        self.optimizer.zero_grad()
        loss = workload.loss(self.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.losses.append(loss.item())


Wrap = Callable[[torch.nn.Module], Contestant]


def main() -> int:
    parser = measure.parser("step", __doc__ or "")
    parser.add_argument("--ranks", type=measure.several, nargs="+", default=[2], help="one table for each")
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=list(MODELS))
    parser.add_argument("--seconds", type=duration, default=30.0, help="per model")
    parser.add_argument("--most", type=measure.positive, default=120, help="counted steps of each rival at the most")
    parser.add_argument("--json", type=measure.writable, metavar="FILE", help="also write the rows to this file")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        torch.set_num_threads(1)
        torchring.init()
        turns.play(options.worker, functools.partial(prepare, options.models[0]))
        return 0
    about = measure.provenance() | {"script": Path(__file__).name}
    rows = []
    for ranks in options.ranks:
        table = [compare(name, ranks, options.seconds, options.most) for name in options.models]
        report(table, about | {"ranks": ranks})
        rows += table
    measure.write_json(options.json, rows, about)
    return 0


def compare(name: str, ranks: int, seconds: float, most: int) -> dict[str, Any]:
    """Time all rivals on one model."""
    rivals = [*RIVALS, *(["horovod"] if measure.has_horovod() else [])]
    with turns.referee(__file__, rivals, ranks, ["--models", name], mpi=["horovod"]) as referee:
        referee.take_turns(warmups=1, seconds=seconds, most=-(-most // (turns.STEPS_PER_TURN - 1)))
        results = referee.end()
        distances = {rival: check_weights(rival, referee.folder) for rival in rivals if rival != "torchring"}
    for rival, per_rank in results.items():
        if rival != "alone" and len({rank["digest"] for rank in per_rank}) > 1:
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
        "ms": {rival: vars(Spread.of(team.seconds)) for rival, team in referee.teams.items()},
        "overhead_ms": {
            rival: vars(Spread.of(team.seconds_more_than(referee.teams["alone"])))
            for rival, team in referee.teams.items()
            if rival != "alone"
        },
        "stats": results["torchring"][0]["stats"],
    }


def prepare(name: str, rival: str, folder: Path) -> tuple[Callable[[], None], Callable[[], dict[str, Any]]]:
    """On a rank: what makes a step of `rival`, and what is to be known of it in the end. See `turns.play`."""
    workload = MODELS[name]()
    batches = [workload.batch(seed=1000 * torchring.rank() + i) for i in range(8)]
    torch.manual_seed(0)
    model = MODELS[name]().model
    start = flat_weights(model)
    wrap = RIVALS[rival] if rival != "horovod" else functools.partial(with_horovod, measure.start_horovod())
    contestant = wrap(model)

    def result() -> dict[str, Any]:
        weights = flat_weights(model)
        if torchring.rank() == 0:
            torch.save((start, weights), folder / f"{rival}.pt")
        stats = vars(contestant.optimizer.stats()) if rival == "torchring" else None
        digest = weights.view(torch.int32).sum(dtype=torch.int64).item()
        return {"losses": contestant.losses, "digest": digest, "stats": stats}

    return lambda: contestant.step(workload, batches), result


def flat_weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def check_weights(rival: str, folder: Path) -> float:
    """How far a rival's weights ended from torchring's, over how far training moved them. Stops the run if it is wrong.

    All made the same number of steps. "alone" saw half of the data, so if its weights were as near, the check would be
    worth nothing.
    """
    start, ours = torch.load(folder / "torchring.pt")
    _, theirs = torch.load(folder / f"{rival}.pt")
    distance = float((theirs - ours).norm() / (ours - start).norm())
    if (distance < MOST_DISTANCE) == (rival == "alone"):
        raise SystemExit(f"the weights of {rival} are {distance:.1e} of their way from those of torchring")
    return distance


MOST_DISTANCE = 1e-3


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Plain SGD: the optimizer's time is the same for all."""
    return torch.optim.SGD(model.parameters(), lr=1e-3)


def with_torchring(model: torch.nn.Module) -> Contestant:
    return Contestant(model, torchring.wrap(sgd(model), model), [])


def with_ddp(model: torch.nn.Module) -> Contestant:
    measure.open_gloo()
    ddp = torch.nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return Contestant(ddp, sgd(ddp), [])


def with_horovod(hvd: Any, model: torch.nn.Module) -> Contestant:
    optimizer = hvd.DistributedOptimizer(sgd(model), named_parameters=model.named_parameters())
    return Contestant(model, optimizer, [])


def without_communication(model: torch.nn.Module) -> Contestant:
    return Contestant(model, sgd(model), [])


RIVALS: dict[str, Wrap] = {"torchring": with_torchring, "ddp": with_ddp, "alone": without_communication}


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
