"""Training steps of Hugging Face's Trainer and Accelerate: torchring against DistributedDataParallel (DDP).

    torchring bench frameworks_hf                  2 ranks, one thread each
    torchring bench frameworks_hf --frameworks trainer --json results.jsonl

Rivals take turns (see turns.py). Each trains a transformer in processes of its own, from the same weights and on the
same batches, through the same framework: torchring by RingTrainer or RingAccelerator, DDP by the framework itself, with
find_unused_parameters=False and, where the framework has the option, gradient_as_bucket_view=True. A step is all that
the framework does between two steps: it loads a batch, counts its tokens, clips, and calls its callbacks.
At the end both must have the same weights, to within rounding.
"""

from __future__ import annotations

import functools
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import torchring
from torchring.bench import measure, turns
from torchring.bench.measure import Spread, stopped_by_signals
from torchring.bench.models import MODELS
from torchring.bench.step import check_weights, flat_weights
from torchring.launch.arguments import duration

RIVALS = ("torchring", "ddp")
Step = Callable[[], None]


class Language(nn.Module):
    """The model "gpt" of the other benchmarks, as a Trainer wants it."""

    def __init__(self) -> None:
        super().__init__()
        self.workload = MODELS["gpt"]()
        self.net = self.workload.model

    def forward(self, tokens: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.workload.loss(self.net, (tokens, labels))}


class Rows(Dataset[dict[str, torch.Tensor]]):
    """As many sequences as nobody trains on in one run."""

    def __init__(self) -> None:
        self.batches = [MODELS["gpt"]().batch(seed=i) for i in range(8)]

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens, labels = self.batches[index // 2 % len(self.batches)]
        return {"tokens": tokens[index % 2], "labels": labels[index % 2]}


def main() -> int:
    parser = measure.parser("frameworks_hf", __doc__ or "")
    parser.add_argument("--ranks", type=measure.several, default=2)
    parser.add_argument("--frameworks", nargs="+", choices=sorted(FRAMEWORKS), default=list(FRAMEWORKS))
    parser.add_argument("--seconds", type=duration, default=30.0, help="time for each framework")
    parser.add_argument("--most", type=measure.positive, default=120, help="largest number of steps that count")
    options = parser.parse_args()
    if options.worker:
        torch.set_num_threads(1)
        measure.open_gloo()
        turns.serve(options.worker, functools.partial(prepare, options.frameworks[0]))
        return 0
    about = measure.provenance() | {"script": Path(__file__).name, "ranks": options.ranks}
    rows = [compare(name, options.ranks, options.seconds, options.most) for name in options.frameworks]
    report(rows, about)
    measure.write_rows(options.json, rows, about)
    return 0


def compare(name: str, ranks: int, seconds: float, most: int) -> dict[str, Any]:
    """Time both rivals in one framework."""
    arguments = ["--frameworks", name]
    with stopped_by_signals(), closing(turns.Coordinator(__file__, RIVALS, ranks, arguments)) as coordinator:
        coordinator.take_turns(warmups=1, seconds=seconds, most=-(-most // (turns.STEPS_PER_TURN - 1)))
        results = coordinator.finish()
        distance = check_weights("ddp", coordinator.folder)
    for rival, digests in results.items():
        if len(set(digests)) > 1:
            raise SystemExit(f"{rival} left its ranks with different weights")
    ours, theirs = (coordinator.rivals[rival] for rival in RIVALS)
    pairs = [a for turn in zip(theirs.turns, ours.turns, strict=True) for a in [sum(turn[0]) / sum(turn[1])]]
    return {
        "framework": name,
        "ranks": ranks,
        "distance": distance,
        "ms": {rival.name: vars(Spread.of(rival.seconds)) for rival in (ours, theirs)},
        "ratio": {"p20": _at(pairs, 0.2), "p50": _at(pairs, 0.5), "p80": _at(pairs, 0.8)},
    }


def _at(values: Sequence[float], part: float) -> float:
    return sorted(values)[round(part * (len(values) - 1))]


def prepare(name: str, rival: str, folder: Path) -> tuple[Callable[[str], None], Callable[[], int]]:
    """What `turns.serve` needs on a rank: a function that trains for one step, and one that returns the result."""
    torch.manual_seed(0)
    model = Language()
    start = flat_weights(model)
    step = FRAMEWORKS[name](model, rival == "torchring")

    def result() -> int:
        weights = flat_weights(model)
        if torchring.rank() == 0:
            torch.save((start, weights), folder / f"{rival}.pt")
        return int(weights.view(torch.int32).sum(dtype=torch.int64).item())

    return lambda _: step(), result


def with_accelerate(model: Language, is_ring: bool) -> Step:
    from accelerate import Accelerator, DistributedDataParallelKwargs

    from torchring.accelerate import RingAccelerator

    best = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    accelerator = RingAccelerator() if is_ring else Accelerator(cpu=True, kwargs_handlers=[best])
    plain = torch.optim.SGD(model.parameters(), lr=1e-3)
    net, optimizer, loader = accelerator.prepare(model, plain, DataLoader(Rows(), batch_size=2))

    def steps() -> Iterator[None]:
        for batch in loader:
            with accelerator.accumulate(net):
                accelerator.backward(net(**batch)["loss"])
                accelerator.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            yield

    iterator = steps()
    return lambda: next(iterator)


def with_trainer(model: Language, is_ring: bool) -> Step:
    """The Trainer's loop cannot be left between two steps. It runs in a thread, and a callback stops it there."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from torchring.transformers import RingTrainer

    may_go, has_gone = threading.Semaphore(0), threading.Semaphore(0)

    class Turns(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            may_go.acquire()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            has_gone.release()
            may_go.acquire()

    quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no"}
    options = {"per_device_train_batch_size": 2, "ddp_find_unused_parameters": False, "dataloader_pin_memory": False}
    arguments = TrainingArguments(tempfile.mkdtemp(), use_cpu=True, max_steps=100_000, **options, **quiet)
    trainer = (RingTrainer if is_ring else Trainer)(
        model=model,
        args=arguments,
        train_dataset=Rows(),
        optimizers=(torch.optim.SGD(model.parameters(), lr=1e-3), None),
        callbacks=[Turns()],
    )
    threading.Thread(target=trainer.train, daemon=True).start()

    def step() -> None:
        may_go.release()
        if not has_gone.acquire(timeout=300):
            raise SystemExit("the Trainer made no step for 300 s")

    return step


FRAMEWORKS: dict[str, Callable[[Language, bool], Step]] = {"trainer": with_trainer, "accelerate": with_accelerate}


def report(rows: list[dict[str, Any]], about: dict[str, Any]) -> None:
    table = []
    for row in rows:
        spreads = [Spread(**row["ms"][rival]).text(1) for rival in RIVALS]
        ratio = "{p50:.2f}x ({p20:.2f}-{p80:.2f})".format(**row["ratio"])
        table.append([row["framework"], *spreads, ratio, f"{row['distance']:.0e}"])
    columns = ["framework", *(f"{rival} ms" for rival in RIVALS), "step ddp/torchring", "distance"]
    title = f"Training step, {about['ranks']} ranks x 1 thread on {about['cores']} cores, p50 (p20-p80)"
    measure.print_table(f"{title} {measure.origin(about)}", columns, table)


if __name__ == "__main__":
    sys.exit(main())
