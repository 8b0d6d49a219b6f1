"""What fewer bytes cost: loss curves with compression and with local steps, beside those with full gradients.

    torchring bench quality                  digits and a character GPT, 5 seeds (as root)
    torchring bench quality --tasks gpt --seeds 1 --arms none int8 "powersgd 8" "diloco 30"

Two ranks train on two hosts (network namespaces). All arms of a seed begin with the same weights and see the same
samples: none, int8, "powersgd RANK [MIN_RATE]", "diloco H", "local H" (LocalSGD). The last three begin after a fifth of
the steps. A loss is the mean over ranks before a step. "tail": the last tenth. "held out": the end, on new samples.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.functional import cross_entropy, pad

import torchring
from torchring.bench import measure
from torchring.bench.models import Batch, Gpt
from torchring.bench.netns import Network
from torchring.bench.options import parser
from torchring.compression import PowerSGD

STEPS, START, PARTS = 300, 60, 30  # START: of few bytes; PARTS: of a curve in the rows
KINDS = ("whole curve", "tail", "held out")


class Task(NamedTuple):
    model: Callable[[], nn.Module]
    sample: Callable[[torch.Generator], Batch]  # of one rank and step
    held_out: Batch
    lr: float


def digits() -> Task:
    """Convolutional network, 0.15 M parameters; 1437 of scikit-learn's images, batches of 32 shifted by a pixel."""
    from sklearn.datasets import load_digits

    pixels, numbers = load_digits(return_X_y=True)
    images, labels = torch.tensor(pixels).float().view(-1, 1, 8, 8) / 16, torch.tensor(numbers)

    def model() -> nn.Module:
        convolutions = nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU()
        head = nn.Linear(1024, 128), nn.ReLU(), nn.Linear(128, 10)
        return nn.Sequential(*convolutions, nn.MaxPool2d(2), nn.Flatten(), *head)

    def sample(generator: torch.Generator) -> Batch:
        chosen = torch.randint(1437, (32,), generator=generator)
        down, right = torch.randint(3, (2,), generator=generator).tolist()
        return pad(images[chosen], (1, 1, 1, 1))[..., down : down + 8, right : right + 8], labels[chosen]

    return Task(model, sample, (images[1437:], labels[1437:]), 1e-3)


def gpt() -> Task:
    """Transformer, 2 layers of width 64, 0.11 M parameters; windows of 64 characters of the standard library."""
    sources = sorted(Path(os.__file__).parent.glob("*.py"))
    text = "".join(file.read_text("utf-8") for file in sources).encode("ascii", "ignore")
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    characters, ids = torch.unique(data, return_inverse=True)
    last = len(ids) - 512 * 65

    def sample(generator: torch.Generator) -> Batch:
        windows = ids[torch.randint(last - 65, (16, 1), generator=generator) + torch.arange(65)]
        return windows[:, :-1], windows[:, 1:]

    windows = ids[last:].view(512, 65)
    return Task(lambda: Gpt(2, 64, 4, len(characters), 64), sample, (windows[:, :-1], windows[:, 1:]), 3e-3)


TASKS: dict[str, Callable[[], Task]] = {"digits": digits, "gpt": gpt}


def optimizer_of(arm: str, adamw: torch.optim.Optimizer, model: nn.Module, step: int) -> Any:
    name, *numbers = arm.split()
    if name == "diloco" and step:
        outer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.7, nesterov=True)
        return torchring.DiLoCo(adamw, model, every=int(numbers[0]), outer=outer)
    if name == "local" and step:
        return torchring.LocalSGD(adamw, model, every=int(numbers[0]))
    powersgd = PowerSGD(int(numbers[0]), START, *map(float, numbers[1:])) if name == "powersgd" else None
    return torchring.wrap(adamw, model, compression="int8" if name == "int8" else powersgd)


def train(task: Task, arm: str, seed: int) -> dict[str, Any]:
    """Collective: the losses of a run."""

    def loss_of(batch: Batch) -> torch.Tensor:
        return cross_entropy(model(batch[0]).flatten(0, -2), batch[1].flatten())

    torch.manual_seed(seed)
    model, generator = task.model(), torch.Generator().manual_seed(2 * seed + torchring.rank())
    adamw = torch.optim.AdamW(model.parameters(), lr=task.lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adamw, STEPS)
    optimizer, losses = optimizer_of(arm, adamw, model, 0), torch.empty(STEPS)
    for step in range(STEPS):
        if step == START and arm.startswith(("diloco", "local")):
            optimizer.close()
            optimizer = optimizer_of(arm, adamw, model, step)
        optimizer.zero_grad()
        loss = loss_of(task.sample(generator))
        losses[step] = loss.detach()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
    curve, held_out = torchring.all_reduce(losses), torchring.all_reduce(loss_of(task.held_out).detach())
    if isinstance(optimizer, torchring.DistributedOptimizer):
        optimizer.close()
    values = dict(zip(KINDS, (curve.mean().item(), curve[-STEPS // 10 :].mean().item(), held_out.item()), strict=True))
    return {"arm": arm, "seed": seed, **values, "curve": curve.view(PARTS, -1).mean(1).tolist()}


def main() -> int:
    options = parser("quality").parse_args()
    if options.worker is not None:
        torchring.init(process_group=True)
        (name,) = options.tasks
        task = TASKS[name]()
        found = [{"task": name} | train(task, arm, seed) for seed in range(options.seeds) for arm in options.arms]
        if torchring.rank() == 0:
            Path(options.worker).write_text(json.dumps(found))
        torchring.shutdown()
        return 0
    rows: list[dict[str, Any]] = []
    with measure.stopped_by_signals():  # so that the network is removed
        for name in options.tasks:
            with tempfile.TemporaryDirectory() as folder, Network(2) as network:
                arguments = ["--tasks", name, "--seeds", str(options.seeds), "--arms", *options.arms]
                arguments += ["--worker", str(file := Path(folder, "rows.json"))]
                measure.run_on_hosts(network, 1, __file__, arguments)
                rows += json.loads(file.read_text())
    about = measure.provenance() | {"script": Path(__file__).name}
    measure.write_rows(options.json, rows, about)
    report(rows, about, options)
    return 0


def report(rows: list[dict[str, Any]], about: dict[str, Any], options: argparse.Namespace) -> None:
    table = []
    for task in options.tasks:
        by_arm = {arm: [row for row in rows if (row["task"], row["arm"]) == (task, arm)] for arm in options.arms}
        for arm, found in by_arm.items():
            cells = [task, arm]
            for kind in KINDS:
                own = [row[kind] for row in found]
                spread = statistics.stdev(own) if len(own) > 1 else float("nan")
                more = [row[kind] / plain[kind] - 1 for row, plain in zip(found, by_arm["none"], strict=True)]
                cells.append(f"{statistics.mean(own):.4f} ± {spread:.4f} ({statistics.mean(more):+.1%})")
            table.append(cells)
    title = f"Losses, mean ± standard deviation over {options.seeds} seeds (difference from none)"
    measure.print_table(f"{title} {measure.origin(about)}", ["task", "arm", *KINDS], table)


if __name__ == "__main__":
    sys.exit(main())
