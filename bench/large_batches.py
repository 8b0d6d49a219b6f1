"""What large batches cost in accuracy, and which recipes bring it back: digits and a character GPT, 3 seeds.

    torchring bench large_batches                                   the study: 40 minutes on one core
    torchring bench large_batches --results FILE --plot study.svg   tables and plot of an earlier run (needs matplotlib)

Two trainings, each at batch x1, x8, x32 and x64 with the same number of samples, so with 1, 1/8, 1/32 and 1/64 of the
steps:
    digits   a convolutional network on scikit-learn's 1797 images: SGD with momentum, 40 epochs, x1 is 8 images
    gpt      a transformer of 0.24 M parameters on Python's standard library: AdamW, 1 epoch, x1 is 32 characters

Recipes. k is the factor of the batch; learning rates decay to 0 as a cosine:
    same     the learning rate of x1
    rule     scale_lr: times k (digits), or times sqrt(k) (gpt)
    warm-up  the same, reached in the first tenth of the steps, from 1/k of it
    tuned    warm-up, and the learning rate searched at x32; by the rule from there to the other batches
    layers   LARS (digits) or LAMB (gpt), likewise, with the square root rule
    adasum   gradients of the k micro-batches combined by Adasum, likewise; for SGD, one learning rate for all batches

Each search has 4 values, a factor of 2 apart, and a seed that is not among the three.

One process computes what k ranks would: for the mean, as one batch; for Adasum, as k micro-batches, one for each rank,
combined for each parameter tensor. `check` compares the mean with 4 ranks.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import string
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import nn
from torch.func import functional_call, grad_and_value, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy, pad
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR

import torchring
from torchring.bench import measure
from torchring.bench.models import Gpt
from torchring.collectives.adasum import adasum
from torchring.recipes import LAMB, LARS, MeanMetric, scale_lr, warm_up

FACTORS: Final = (8, 32, 64)
RECIPES: Final = ("same", "rule", "warm-up", "tuned", "layers", "adasum")
NAMES: Final = {"layers": "LARS, LAMB", "adasum": "Adasum"}
SEARCHED: Final = ("tuned", "layers", "adasum")
SEEDS: Final = (0, 1, 2)
SEARCH_SEED: Final = 10
SEARCH_FACTOR: Final = 32
WARM_UP: Final = 0.1  # of the steps
CHECK_RANKS: Final = 4
CHECK_STEPS: Final = 30


Runs = list[tuple[dict[str, Any], list[dict[str, Any]]]]


class Task(ABC):
    """A model, its data, and what it is trained with. `samples` are those of a whole training, in their order.

    Attributes:
        base: number of samples in a batch of x1.
        rates: candidates for the learning rate, by what is searched.
        score: the name of the figure to compare by.
    """

    name: str
    base: int
    samples: int
    rule: Literal["linear", "sqrt"]
    score: Literal["accuracy", "loss"]
    rates: dict[str, tuple[float, ...]]

    @abstractmethod
    def model(self) -> nn.Module: ...

    @abstractmethod
    def load(self, seed: int) -> None: ...

    @abstractmethod
    def batch(self, positions: range) -> tuple[torch.Tensor, torch.Tensor]: ...

    @abstractmethod
    def optimizer(self, model: nn.Module, lr: float, *, is_layer_wise: bool) -> Optimizer: ...

    @abstractmethod
    def evaluate(self, model: nn.Module) -> dict[str, float]: ...


class Digits(Task):
    name, base, samples = "digits", 8, 98 * 512
    rule, score = "linear", "accuracy"
    rates = {  # noqa: RUF012
        "same": (0.005, 0.01, 0.02, 0.04),
        "tuned": (0.25, 0.5, 1.0, 2.0),  # times the rule
        "layers": (0.4, 0.8, 1.6, 3.2),
        "adasum": (1.0, 2.0, 4.0, 8.0),  # times the learning rate of x1
    }

    def model(self) -> nn.Module:
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
            nn.Linear(32 * 4 * 4, 64), nn.ReLU(), nn.Linear(64, 10),
        )  # fmt: skip

    def load(self, seed: int) -> None:
        """1257 images for training and 540 for testing. An image is shifted by at most one pixel, each time anew."""
        from sklearn.datasets import load_digits
        from sklearn.model_selection import train_test_split

        pixels, labels = load_digits(return_X_y=True)
        images = torch.tensor(pixels, dtype=torch.float32).view(-1, 1, 8, 8) / 16
        windows = pad(images, (1, 1, 1, 1)).unfold(2, 8, 1).unfold(3, 8, 1)  # an image at all of its 3 x 3 places
        train, test = train_test_split(range(len(labels)), test_size=0.3, stratify=labels, random_state=seed)
        labels = torch.tensor(labels)
        self._test = images[test], labels[test]
        order = torch.tensor(train)[_epochs(len(train), self.samples, seed)]
        y, x = torch.randint(3, (2, self.samples), generator=torch.Generator().manual_seed(seed))
        self._train = windows[order, :, y, x], labels[order]

    def batch(self, positions: range) -> tuple[torch.Tensor, torch.Tensor]:
        images, labels = self._train
        return images[positions.start : positions.stop], labels[positions.start : positions.stop]

    def optimizer(self, model: nn.Module, lr: float, *, is_layer_wise: bool) -> Optimizer:
        if is_layer_wise:
            return LARS(model.parameters(), lr, momentum=0.9, trust_coefficient=0.02)
        return torch.optim.SGD(model.parameters(), lr, momentum=0.9)

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        images, labels = self._test
        outputs = model(images)
        accuracy = (outputs.argmax(1) == labels).double().mean()
        return {"accuracy": 100 * float(accuracy), "loss": float(cross_entropy(outputs, labels))}


class CharacterGpt(Task):
    name, base, samples = "gpt", 1, 6144
    rule, score = "sqrt", "loss"
    rates = {  # noqa: RUF012
        "same": (0.00025, 0.0005, 0.001, 0.002),
        "tuned": (0.5, 1.0, 2.0, 4.0),  # times the rule
        "layers": (0.005, 0.01, 0.02, 0.04),
        "adasum": (0.5, 1.0, 2.0, 4.0),  # times the rule
    }
    _LENGTH: Final = 32
    _TESTS: Final = 1024

    def __init__(self) -> None:
        """Every tenth source of the standard library is for testing. Other characters than ASCII's become "?"."""
        files = sorted(Path(os.__file__).parent.glob("*.py"))
        codes = {character: i for i, character in enumerate(string.printable)}
        self._windows = []
        for is_test in (False, True):
            text = "".join(file.read_text() for i, file in enumerate(files) if (i % 10 == 9) == is_test)
            tokens = torch.tensor([codes.get(character, codes["?"]) for character in text])
            self._windows.append(tokens[: len(tokens) // (self._LENGTH + 1) * (self._LENGTH + 1)])

    def model(self) -> nn.Module:
        return Gpt(layers=2, width=96, heads=4, vocabulary=len(string.printable), length=self._LENGTH)

    def load(self, seed: int) -> None:
        train, test = (tokens.view(-1, self._LENGTH + 1) for tokens in self._windows)
        generator = torch.Generator().manual_seed(seed)
        self._train = train[torch.randperm(len(train), generator=generator)[: self.samples]]
        self._test = test[torch.randperm(len(test), generator=generator)[: self._TESTS]]

    def batch(self, positions: range) -> tuple[torch.Tensor, torch.Tensor]:
        rows = self._train[positions.start : positions.stop]
        return rows[:, :-1], rows[:, 1:].flatten()

    def optimizer(self, model: nn.Module, lr: float, *, is_layer_wise: bool) -> Optimizer:
        if is_layer_wise:
            return LAMB(model.parameters(), lr, weight_decay=0.01)
        return torch.optim.AdamW(model.parameters(), lr, weight_decay=0.01, fused=True)

    @torch.no_grad()
    def evaluate(self, model: nn.Module) -> dict[str, float]:
        losses = [
            cross_entropy(model(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
            for rows in torch.split(self._test, 128)
        ]
        return {"loss": float(torch.stack(losses).mean())}


TASKS: Final[tuple[type[Task], ...]] = (Digits, CharacterGpt)


def _epochs(length: int, samples: int, seed: int) -> torch.Tensor:
    """The order of the samples: one permutation after another."""
    generator = torch.Generator().manual_seed(seed)
    epochs = [torch.randperm(length, generator=generator) for _ in range(math.ceil(samples / length))]
    return torch.cat(epochs)[:samples]


def rate(task: Task, recipe: str, factor: int, found: dict[str, float]) -> float:
    """The learning rate of a recipe. `found`: what the searches have found."""
    base = found["same"]
    if recipe == "same":
        return base
    if recipe == "layers":
        return scale_lr(found["layers"], SEARCH_FACTOR, factor, "sqrt")
    if recipe == "adasum" and task.rule == "linear":
        return base * found["adasum"]
    return scale_lr(base, 1, factor, task.rule) * (found[recipe] if recipe in SEARCHED else 1.0)


def train(
    task: Task, seed: int, recipe: str, factor: int, lr: float, *, num_steps: int | None = None
) -> tuple[nn.Module, list[float]]:
    """Train in a world of one, or of `factor` ranks, each with its micro-batch. Returns the model, and its losses.

    Args:
        num_steps: stop after so many.
    """
    ranks = torchring.size()
    assert ranks in (1, factor), (ranks, factor)
    task.load(seed)
    torch.manual_seed(seed)
    model = task.model()
    optimizer: Any = task.optimizer(model, lr, is_layer_wise=recipe == "layers")
    if ranks > 1:
        optimizer = torchring.wrap(optimizer, model)
    micro, steps = task.base, task.samples // (task.base * factor)
    warming = 0 if recipe in ("same", "rule") else max(1, round(WARM_UP * steps))
    scheduler: Any = CosineAnnealingLR(optimizer, steps - warming)
    if warming:
        scheduler = warm_up(scheduler, warming, start=1 / factor)
    losses = []
    for step in range(num_steps or steps):
        count = micro * factor // ranks
        first = step * micro * factor + count * torchring.rank()
        inputs, targets = task.batch(range(first, first + count))
        loss = MeanMetric()
        if recipe == "adasum" and ranks == 1:
            grads, values = _gradients(model, inputs, targets, factor)
            loss.update({"loss": values})
            for name, p in model.named_parameters():
                p.grad = adasum(list(grads[name]))
        else:
            optimizer.zero_grad()
            value: Any = cross_entropy(model(inputs).flatten(0, -2), targets)
            value.backward()
            loss.update({"loss": value}, weight=len(targets))
        optimizer.step()
        scheduler.step()
        losses.append(loss.compute()["loss"])
        if not math.isfinite(losses[-1]):
            break
    if isinstance(optimizer, torchring.DistributedOptimizer):
        optimizer.close()
    return model, losses


def _gradients(
    model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, count: int
) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """The gradients and losses of `count` micro-batches, one after the other in the first dimension."""

    def loss(parameters: Any, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return cross_entropy(functional_call(model, parameters, (inputs,)).flatten(0, -2), targets)

    parameters = {name: p.detach() for name, p in model.named_parameters()}
    with sdpa_kernel(SDPBackend.MATH):  # vmap has no rule for the other kernels, and is slow with them
        found = vmap(grad_and_value(loss), in_dims=(None, 0, 0))(
            parameters, inputs.reshape(count, -1, *inputs.shape[1:]), targets.reshape(count, -1)
        )
    gradients: dict[str, torch.Tensor] = found[0]
    return gradients, found[1]


def run(task: Task, seed: int, recipe: str, factor: int, lr: float, purpose: str) -> dict[str, Any]:
    """Train once. Returns a row. A training that breaks has no loss, and the accuracy of what is left of the model."""
    begin = time.process_time()
    model, losses = train(task, seed, recipe, factor, lr)
    scores = {name: value if math.isfinite(value) else None for name, value in task.evaluate(model).items()}
    row = {"task": task.name, "purpose": purpose, "recipe": recipe, "factor": factor, "seed": seed, "lr": lr, **scores}
    row |= {"steps": len(losses), "cpu_seconds": time.process_time() - begin}
    print(json.dumps(row), flush=True)
    return row


def search(task: Task, recipe: str, found: dict[str, float]) -> list[dict[str, Any]]:
    """Find the best of 4 values on a seed of its own, and put it into `found`."""
    rows = []
    for value in task.rates[recipe]:
        factor = 1 if recipe == "same" else SEARCH_FACTOR
        lr = rate(task, recipe, factor, {**found, recipe: value})
        rows.append(run(task, SEARCH_SEED, recipe, factor, lr, "search") | {"value": value})
    found[recipe] = min(rows, key=_worse)["value"]
    return rows


def _worse(row: dict[str, Any]) -> tuple[float, float]:
    """Smaller is better: by accuracy, if there is one, and then by loss."""
    return -row.get("accuracy", 0.0), math.inf if row["loss"] is None else row["loss"]


def study(task: Task) -> list[dict[str, Any]]:
    found: dict[str, float] = {}
    rows = [row for recipe in ("same", *SEARCHED) for row in search(task, recipe, found)]
    for seed in SEEDS:
        rows.append(run(task, seed, "same", 1, found["same"], "result"))
        for factor in FACTORS:
            for recipe in RECIPES:
                rows.append(run(task, seed, recipe, factor, rate(task, recipe, factor, found), "result"))
    return rows


# Ranks against what one process computes for them


def check(tasks: Sequence[Task]) -> list[dict[str, Any]]:
    """Train with 4 ranks, and in one process as if there were 4. Raises AssertionError if they differ."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "losses.json"
        names = [task.name for task in tasks]
        measure.run_here(__file__, CHECK_RANKS, ["--worker", str(file), "--tasks", *names])
        of_ranks = json.loads(file.read_text())
    rows = []
    for (task, recipe), theirs in zip(_cases(tasks), of_ranks, strict=True):
        ours = _losses(task, recipe)
        difference = max(abs(a - b) / a for a, b in zip(ours, theirs, strict=True))
        rows.append({"task": task.name, "purpose": "check", "recipe": recipe, "difference": difference})
        print(json.dumps(rows[-1]), flush=True)
        assert difference < 1e-3, rows[-1]
    return rows


def _cases(tasks: Sequence[Task]) -> list[tuple[Task, str]]:
    return [(task, recipe) for task in tasks for recipe in ("warm-up", "layers")]


def _losses(task: Task, recipe: str) -> list[float]:
    """The losses of the first steps, at a batch of 4 micro-batches."""
    lr = task.rates["layers"][0] if recipe == "layers" else task.rates["same"][1]
    return train(task, SEARCH_SEED, recipe, CHECK_RANKS, lr, num_steps=CHECK_STEPS)[1]


# Tables and a plot


def latest(runs: Runs, task: type[Task]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The provenance and the results of the last run that has this task. `runs`: those of `measure.read_runs`."""
    for about, rows in reversed(runs):
        if found := [row for row in rows if (row["task"], row["purpose"]) == (task.name, "result")]:
            return about, found
    raise SystemExit(f"there are no results of {task.name}")


def results(rows: Sequence[dict[str, Any]], task: type[Task], recipe: str, factor: int) -> list[float]:
    """The score of each seed; NaN where training has broken."""
    return [
        math.nan if row[task.score] is None else row[task.score]
        for row in rows
        if (row["recipe"], row["factor"]) == (recipe, factor)
    ]


def report(runs: Runs) -> None:
    for task in TASKS:
        about, rows = latest(runs, task)
        base = statistics.mean(results(rows, task, "same", 1))
        lines = []
        for recipe in RECIPES:
            cells = [
                NAMES.get(recipe, recipe),
                _cell(results(rows, task, recipe, 1), task, base) if recipe == "same" else "",
            ]
            lines.append(cells + [_cell(results(rows, task, recipe, factor), task, base) for factor in FACTORS])
        what = "accuracy in %, (points from x1)" if task.score == "accuracy" else "loss (distance from x1)"
        columns = ["recipe", "x1", *(f"x{factor}" for factor in FACTORS)]
        title = f"{task.name}: {what}, mean of {len(SEEDS)} seeds and lowest to highest"
        measure.print_table(f"{title} {measure.origin(about)}", columns, lines)


def _cell(scores: Sequence[float], task: type[Task], base: float) -> str:
    finite = [score for score in scores if math.isfinite(score)]
    if len(finite) < len(scores):
        return f"breaks ({len(scores) - len(finite)} of {len(scores)})"
    mean = statistics.mean(finite)
    if task.score == "accuracy":
        return f"{mean:.2f} ({mean - base:+.2f}), {min(finite):.2f} to {max(finite):.2f}"
    return f"{mean:.3f} ({100 * (mean / base - 1):+.1f} %), {min(finite):.3f} to {max(finite):.3f}"


def plot(runs: Runs, path: str) -> None:
    """Draw scores by batch. Raises ModuleNotFoundError without matplotlib."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "torchring", "font.size": 9})
    figure, axes = plt.subplots(1, len(TASKS), figsize=(9.6, 3.4), layout="constrained")
    for task, axis in zip(TASKS, axes, strict=True):
        _, rows = latest(runs, task)
        base = statistics.mean(results(rows, task, "same", 1))
        near = (base - 0.5, base) if task.score == "accuracy" else (base, 1.02 * base)
        axis.axhspan(*near, color="0.9", label="within 0.5 points, 2 %")
        axis.axhline(base, color="0.5", linewidth=1)
        worst = base
        for index, recipe in enumerate(RECIPES):
            found = {1: results(rows, task, "same", 1), **{f: results(rows, task, recipe, f) for f in FACTORS}}
            found = {f: scores for f, scores in found.items() if all(map(math.isfinite, scores))}
            means = [statistics.mean(scores) for scores in found.values()]
            worst = (min if task.score == "accuracy" else max)([worst, *means])
            spread = [[m - min(s) for m, s in zip(means, found.values(), strict=True)],
                      [max(s) - m for m, s in zip(means, found.values(), strict=True)]]  # fmt: skip
            places = [f * (1 + 0.03 * (index - 2.5)) if f > 1 else 1 for f in found]
            style: dict[str, Any] = {"marker": "o", "markersize": 3, "linewidth": 1, "capsize": 2}
            axis.errorbar(places, means, spread, label=NAMES.get(recipe, recipe), **style)
        if task.score == "accuracy":
            axis.set_ylim(max(85.0, worst - 1), 100)
        axis.set_xscale("log", base=2)
        axis.set_xticks([1, *FACTORS], [f"x{f}" for f in (1, *FACTORS)])
        axis.set_xlabel("batch")
        axis.set_title(
            "digits: accuracy, %" if task.score == "accuracy" else "character GPT: held-out loss", fontsize=9
        )
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", fontsize=8, frameon=False)
    figure.savefig(path, metadata={"Date": None})
    text = re.sub(r"(\.\d\d)\d+", r"\1", Path(path).read_text())  # a hundredth of a point is enough
    Path(path).write_text(re.sub(r"\s*\n\s*", "\n", text))


def main() -> int:
    parser = measure.parser("large_batches", __doc__ or "")
    parser.add_argument("--tasks", nargs="+", choices=[kind.name for kind in TASKS], default=[k.name for k in TASKS])
    parser.add_argument("--results", metavar="FILE", help="show the last results of each task in this file")
    parser.add_argument("--plot", type=measure.writable, metavar="FILE", help="draw the results to this SVG file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.worker:
        return work(options)
    if options.results:
        runs = measure.read_runs(options.results)
    else:
        about = measure.provenance() | {"script": "large_batches.py", "ranks": CHECK_RANKS}
        tasks = [kind() for kind in TASKS if kind.name in options.tasks]
        rows = check(tasks)
        for task in tasks:
            rows += study(task)
        measure.write_rows(options.json, rows, about)
        runs = [(about, rows)]
        if len(tasks) < len(TASKS):
            return 0
    report(runs)
    if options.plot:
        plot(runs, options.plot)
    return 0


def work(options: argparse.Namespace) -> int:
    """A rank of `check`."""
    tasks = [kind() for kind in TASKS if kind.name in options.tasks]
    losses = [_losses(task, recipe) for task, recipe in _cases(tasks)]
    if torchring.rank() == 0:
        Path(options.worker).write_text(json.dumps(losses))
    torchring.barrier()
    return 0


if __name__ == "__main__":
    sys.exit(main())
