"""What the workers of `torchring bench elastic` do: train without end, and write each finished step to a file.

Every worker has a file of its own, PID.log, to which it appends a line of JSON for each `Line`. A line is one write, so
a killed worker leaves whole lines. The process that kills workers reads these files, and measures by them alone.

All rivals train the same model with the same optimizer on batches that depend on rank and step.
"""

from __future__ import annotations

import itertools
import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final, Literal

import torch
import torch.distributed as dist

import torchring
import torchring.elastic
from torchring.bench import measure
from torchring.bench.models import MODELS

Event = Literal["start", "ready", "step", "digest", "saved"]

_SHARE_OF_CHECKPOINTS: Final = 0.05  # of the time, under torchrun
_CHECKPOINT: Final = "checkpoint.pt"
PAIRS_IN_BLOCK: Final = 10  # of steps with and without a State: their times are compared block by block


@dataclass(frozen=True)
class Line:
    """What a worker writes to its file.

    Attributes:
        ns: `time.monotonic_ns()`.
        event: "start": the script runs. "ready": the worker has its model, and is about to join the others.
            "step": a step is finished: the parameters have changed. "digest": the digest of all parameters after the
            first step in a world. "saved": a checkpoint is written.
        step: number of steps that the parameters have behind them.
        rank: of the worker in that step.
        size: number of workers in that step.
        world: counts the worlds of this worker. Under torchrun: of the job.
        digest: of parameters, see `event`. In "step": of a few parameters.
        seconds: how long "saved" took.
    """

    ns: int
    event: Event
    step: int = 0
    rank: int = -1
    size: int = 0
    world: int = 0
    digest: int = 0
    seconds: float = 0.0


class Training:
    """The model and the optimizer of one worker, and its file.

    Args:
        folder: where the file is written.
        model: name of the model.
    """

    def __init__(self, folder: Path, model: str) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self._file = os.open(folder / f"{os.getpid()}.log", flags)
        self._world = 0  # of the newest step
        self.write("start")
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.folder = folder
        self.workload = MODELS[model]()
        self.model = self.workload.model
        self.optimizer = adamw(self.model)

    def write(self, event: Event, **values: Any) -> None:
        line = Line(time.monotonic_ns(), event, **values)
        os.write(self._file, (json.dumps(asdict(line)) + "\n").encode())

    def finished(self, step: int, rank: int, size: int, world: int) -> None:
        """Write that a step is finished; after the first step in a world, the digest of all parameters too."""
        place = {"step": step, "rank": rank, "size": size, "world": world}
        parameters = list(self.model.parameters())
        self.write("step", **place, digest=digest([parameters[0][:64], parameters[-1]]))
        if world != self._world:
            self._world = world
            self.write("digest", **place, digest=digest(parameters))

    def train(self, model: torch.nn.Module, optimizer: Any, rank: int, step: int) -> None:
        """Train for one step. `step` and `rank` choose the batch."""
        batch = self.workload.batch(seed=1000 * rank + step)
        optimizer.zero_grad()
        self.workload.loss(model, batch).backward()  # type: ignore[no-untyped-call]
        optimizer.step()


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Two moments for each parameter, which a new worker needs, too."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def digest(tensors: Sequence[torch.Tensor]) -> int:
    """A number that differs if a bit differs, but for swaps."""
    return sum(int(t.detach().flatten().view(torch.int32).sum(dtype=torch.int64)) for t in tensors)


def train_with_torchring(folder: Path, model: str) -> None:
    training = Training(folder, model)
    optimizer = torchring.wrap(training.optimizer, training.model)
    state = torchring.elastic.State(model=training.model, optimizer=optimizer, step=0)
    worlds = 0

    @torchring.elastic.run
    def train(state: torchring.elastic.State) -> None:
        nonlocal worlds
        worlds += 1
        while True:
            training.train(training.model, optimizer, torchring.rank(), state.step)
            state.step += 1
            training.finished(state.step, torchring.rank(), torchring.size(), worlds)
            state.commit()

    training.write("ready")
    train(state)


def train_with_torchrun(folder: Path, model: str) -> None:
    """DistributedDataParallel, and a checkpoint as often as 5 % of the time allow."""
    training = Training(folder, model)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, size = dist.get_rank(), dist.get_world_size()
    world = 1 + int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    file = folder / _CHECKPOINT
    step = 0
    if file.exists():
        state = torch.load(file, mmap=True)
        _load(state, training.model, training.optimizer)
        step = state["step"]
        del state
    ddp = torch.nn.parallel.DistributedDataParallel(training.model, gradient_as_bucket_view=True)
    training.write("ready")
    due = time.monotonic() if rank == 0 else float("inf")
    while True:
        training.train(ddp, training.optimizer, rank, step)
        step += 1
        training.finished(step, rank, size, world)
        if time.monotonic() >= due:
            began = time.monotonic()
            partial = file.with_suffix(".partial")
            values = {"model": training.model.state_dict(), "optimizer": training.optimizer.state_dict()}
            torch.save({**values, "step": step}, partial)
            partial.replace(file)
            seconds = time.monotonic() - began
            due = began + seconds / _SHARE_OF_CHECKPOINTS
            training.write("saved", step=step, rank=rank, world=world, seconds=seconds)


def _load(state: dict[str, Any], model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])


def compare_steps(folder: Path, model: str, *, seconds: float) -> None:
    """Train two copies of the model in turns: one in a State with commits, the other without. Rank 0 writes times.

    Both copies are in the same processes: two jobs would differ by more than what is to be measured.
    """
    training = Training(folder, model)
    other = Training(folder, model)
    elastic = torchring.wrap(training.optimizer, training.model)
    state = torchring.elastic.State(model=training.model, optimizer=elastic, step=0)

    @torchring.elastic.run
    def train(state: torchring.elastic.State) -> list[dict[str, tuple[float, float]]]:
        plain = torchring.wrap(other.optimizer, other.model)  # in here, what is wrapped need not be in the State

        def step_plain() -> None:
            other.train(other.model, plain, torchring.rank(), state.step)

        def step_elastic() -> None:
            training.train(training.model, elastic, torchring.rank(), state.step)
            state.step += 1
            state.commit()

        rows = []
        turns: dict[str, Callable[[], None]] = {"plain": step_plain, "elastic": step_elastic}
        end = time.monotonic() + seconds
        for repetition in itertools.count():
            row = {}
            for name in measure.in_turn(list(turns), repetition):
                torchring.barrier()
                wall, cpu = time.perf_counter(), time.process_time()
                turns[name]()
                row[name] = (time.perf_counter() - wall, time.process_time() - cpu)
            if repetition >= 2:
                rows.append(row)
            if rows and len(rows) % PAIRS_IN_BLOCK == 0 and torchring.broadcast_object(time.monotonic() > end):
                break
        return rows

    rows = train(state)
    (folder / f"cost{torchring.rank()}.json").write_text(json.dumps(rows))


WORKERS: Final[dict[str, Callable[[Path, str], None]]] = {
    "torchring": train_with_torchring,
    "torchrun": train_with_torchrun,
}


def work(text: str, model: str) -> None:
    """Do what a job asks of its workers in `text`: NAME,FOLDER. NAME is a rival, or "cost:SECONDS"."""
    name, _, folder = text.partition(",")
    if name.startswith("cost:"):
        compare_steps(Path(folder), model, seconds=float(name.removeprefix("cost:")))
    else:
        WORKERS[name](Path(folder), model)
