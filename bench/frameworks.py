"""Training steps through Lightning, Hugging Face's Trainer and Accelerate: with their DDP, and with torchring.

    torchring bench frameworks                                 2 ranks, one thread each
    torchring bench frameworks --models mlp --json results.jsonl

Rivals take turns (see turns.py), and train the same model from the same weights on the same batches. A step is all that
the framework does from the beginning of one batch to that of the next: fetching, forward, backward, clipping in Trainer
and Accelerate, the optimizer, callbacks.
    ddp        the framework's own, with gradient_as_bucket_view=True where the framework lets one, over Gloo
    torchring  RingStrategy, RingTrainer, RingAccelerator
At the end both rivals must have the same weights, to within rounding.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

import torchring
from torchring.bench import measure, turns
from torchring.bench.measure import Spread, stopped_by_signals
from torchring.bench.models import MODELS, Batch, Workload
from torchring.bench.step import check_weights, flat_weights, sgd
from torchring.launch.arguments import duration
from torchring.releases import installed_version

NAMES = ("torchring", "ddp")


class Gate:
    """Lets a Trainer, which has a loop of its own, make one step at a time. The Trainer has the main thread."""

    def __init__(self) -> None:
        self._go, self._arrived = threading.Semaphore(0), threading.Semaphore(0)
        self._is_over = False

    def pause(self) -> bool:
        """For the Trainer, when a step begins, so that the one before has ended. Returns whether to train on."""
        self._arrived.release()
        self._go.acquire()
        return not self._is_over

    def await_start(self) -> None:
        """Until the Trainer is about to make its first step."""
        self._arrived.acquire()

    def step(self, _: str) -> None:
        """Let the Trainer make a step."""
        self._go.release()
        self._arrived.acquire()

    def finish(self) -> None:
        self._is_over = True
        self._go.release()


Train = Callable[[str, torch.nn.Module, Workload, Sequence[Batch], Gate], None]


def with_lightning(
    rival: str, model: torch.nn.Module, workload: Workload, batches: Sequence[Batch], gate: Gate
) -> None:
    import lightning
    from lightning.pytorch.strategies import DDPStrategy

    from torchring.lightning import RingStrategy

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, _: int) -> torch.Tensor:
            return workload.loss(self.model, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self.model)

        def on_train_batch_start(self, *_: Any) -> int | None:
            return None if gate.pause() else -1

    strategy = RingStrategy() if rival == "torchring" else DDPStrategy(gradient_as_bucket_view=True)
    trainer = lightning.Trainer(
        accelerator="cpu", devices=torchring.size(), strategy=strategy, max_epochs=1, use_distributed_sampler=False,
        logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Module(), torch.utils.data.DataLoader([*batches] * 1000, batch_size=None))  # type: ignore[arg-type]


def with_accelerate(
    rival: str, model: torch.nn.Module, workload: Workload, batches: Sequence[Batch], gate: Gate
) -> None:
    from accelerate import Accelerator, DistributedDataParallelKwargs

    from torchring.accelerate import RingAccelerator

    views = DistributedDataParallelKwargs(gradient_as_bucket_view=True)
    accelerator = RingAccelerator() if rival == "torchring" else Accelerator(cpu=True, kwargs_handlers=[views])
    net, optimizer = accelerator.prepare(model, sgd(model))
    for batch in itertools.cycle(batches):
        if not gate.pause():
            break
        with accelerator.accumulate(net):
            accelerator.backward(workload.loss(net, batch))
            accelerator.clip_grad_norm_(net.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()


def with_trainer(rival: str, model: torch.nn.Module, workload: Workload, batches: Sequence[Batch], gate: Gate) -> None:
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from torchring.transformers import RingTrainer

    class Pauses(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            if not gate.pause():
                sys.exit(0)

    base: Any = RingTrainer if rival == "torchring" else Trainer

    class Trains(base):
        def get_train_dataloader(self) -> Any:
            each = [{"x": x, "y": y} for x, y in batches]
            return torch.utils.data.DataLoader(each * 1000, batch_size=None)  # type: ignore[arg-type]

        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> torch.Tensor:
            return workload.loss(model, (inputs["x"], inputs["y"]))

    quiet = {"report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_strategy": "no"}
    arguments = TrainingArguments(
        tempfile.mkdtemp(), use_cpu=True, max_steps=100_000, ddp_find_unused_parameters=False, **quiet
    )
    Trains(model=model, args=arguments, callbacks=[Pauses()], optimizers=(sgd(model), None)).train()


FRAMEWORKS: dict[str, Train] = {
    "lightning": with_lightning,
    "trainer": with_trainer,
    "accelerate": with_accelerate,
}


def main() -> int:
    parser = measure.parser("frameworks", __doc__ or "")
    parser.add_argument("--frameworks", nargs="+", choices=list(FRAMEWORKS), default=list(FRAMEWORKS))
    parser.add_argument("--ranks", type=measure.several, default=2)
    parser.add_argument("--models", nargs="+", choices=sorted(MODELS), default=list(MODELS))
    parser.add_argument("--seconds", type=duration, default=30.0, help="time for each model")
    parser.add_argument("--most", type=measure.positive, default=120, help="largest number of steps that count")
    options = parser.parse_args()
    if options.worker:
        work(options.frameworks[0], options.models[0], options.worker)
        return 0
    about = measure.provenance() | {"script": Path(__file__).name, "ranks": options.ranks}
    about["versions"] |= {framework: installed_version(framework) for framework in options.frameworks}
    pairs = [(framework, model) for framework in options.frameworks for model in options.models]
    rows = [compare(*pair, options.ranks, options.seconds, options.most) for pair in pairs]
    report(rows, about)
    measure.write_rows(options.json, rows, about)
    return 0


def work(framework: str, name: str, worker: str) -> None:
    """On a rank: train with the framework, in steps that the coordinator asks for."""
    torch.set_num_threads(1)
    torchring.init()
    measure.open_gloo()
    workload = MODELS[name]()
    batches = [workload.batch(seed=1000 * torchring.rank() + i) for i in range(8)]
    torch.manual_seed(0)
    model = MODELS[name]().model
    start = flat_weights(model)
    gate = Gate()

    def prepare(rival: str, folder: Path) -> tuple[Callable[[str], None], Callable[[], dict[str, Any]]]:
        def result() -> dict[str, Any]:
            weights = flat_weights(model)
            if torchring.rank() == 0:
                torch.save((start, weights), folder / f"{rival}.pt")
            return {"digest": weights.view(torch.int32).sum(dtype=torch.int64).item()}

        gate.await_start()
        return gate.step, result

    def serve() -> None:
        turns.serve(worker, prepare)
        gate.finish()

    threading.Thread(target=serve, daemon=True).start()
    FRAMEWORKS[framework](worker.partition(",")[0], model, workload, batches, gate)


def compare(framework: str, name: str, ranks: int, seconds: float, most: int) -> dict[str, Any]:
    """Time the rivals on one model."""
    arguments = ["--frameworks", framework, "--models", name]
    with stopped_by_signals(), closing(turns.Coordinator(__file__, NAMES, ranks, arguments)) as coordinator:
        coordinator.take_turns(warmups=1, seconds=seconds, most=-(-most // (turns.STEPS_PER_TURN - 1)))
        results = coordinator.finish()
        distance = check_weights("ddp", coordinator.folder)
    for rival, per_rank in results.items():
        if len({rank["digest"] for rank in per_rank}) > 1:
            raise SystemExit(f"{rival} left its ranks with different weights")
    ours, theirs = (coordinator.rivals[rival] for rival in NAMES)
    ratios = [sum(b) / sum(a) for a, b in zip(ours.turns, theirs.turns, strict=True)]
    return {
        "framework": framework,
        "model": name,
        "ranks": ranks,
        "distance": distance,
        "ms": {rival: vars(Spread.of(coordinator.rivals[rival].seconds)) for rival in NAMES},
        "ratio": vars(Spread.of([ratio / 1000 for ratio in ratios])),  # a Spread is in thousandths of what it gets
    }


def report(rows: list[dict[str, Any]], about: dict[str, Any]) -> None:
    columns = ["framework", "model", *(f"{name} ms" for name in NAMES), "step ddp/torchring"]
    table = [
        [row["framework"], row["model"], *(Spread(**row["ms"][name]).text(1) for name in NAMES),
         Spread(**row["ratio"]).text(2)]
        for row in rows
    ]  # fmt: skip
    title = f"Steps of a Trainer, {about['ranks']} ranks x 1 thread on {about['cores']} cores, p50 (p20-p80)"
    measure.print_table(f"{title} {measure.origin(about)}", columns, table)


if __name__ == "__main__":
    sys.exit(main())
