"""What the workers of `torchring bench elastic` do: train without end, and write each finished step to a file.

Every worker has a file of its own, PID.log, to which it appends a line of JSON for each `Line`. A line is one write, so
a killed worker leaves whole lines. The process that kills workers reads these files, and measures by them alone.
"""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch

import torchring
import torchring.elastic
from torchring.bench.models import MODELS

Event = Literal["ready", "step", "digest"]


@dataclass(frozen=True)
class Line:
    """What a worker writes to its file."""

    ns: int  # time.monotonic_ns()
    # "ready": the worker has its model, and is about to join the others. "step": the parameters have changed. "digest":
    # the digest of all parameters after the first step in a world.
    event: Event
    step: int = 0  # number of steps that the parameters have behind them
    rank: int = -1
    size: int = 0
    world: int = 0  # counts the worlds of this worker
    digest: int = 0  # of all parameters, in "step" of a few


def train(folder: Path, name: str) -> None:
    """Train on batches that depend on rank and step."""
    file = os.open(folder / f"{os.getpid()}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(event: Event, **values: Any) -> None:
        os.write(file, (json.dumps(asdict(Line(time.monotonic_ns(), event, **values))) + "\n").encode())

    torch.set_num_threads(1)
    torch.manual_seed(0)
    workload = MODELS[name]()
    model = workload.model
    parameters = list(model.parameters())
    # AdamW has two moments for each parameter, which a new worker needs, too.
    optimizer = torchring.wrap(torch.optim.AdamW(parameters, lr=1e-4, fused=True), model)
    state = torchring.elastic.State(model=model, optimizer=optimizer, step=0)
    worlds = 0

    @torchring.elastic.run
    def loop(state: torchring.elastic.State) -> None:
        nonlocal worlds
        worlds += 1
        is_first = True
        while True:
            optimizer.zero_grad()
            batch = workload.batch(seed=1000 * torchring.rank() + state.step)
            workload.loss(model, batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            state.step += 1
            place = {"step": state.step, "rank": torchring.rank(), "size": torchring.size(), "world": worlds}
            write("step", **place, digest=digest([parameters[0][:64], parameters[-1]]))
            if is_first:
                write("digest", **place, digest=digest(parameters))
            is_first = False
            state.commit()

    write("ready")
    loop(state)


def digest(tensors: Sequence[torch.Tensor]) -> int:
    """A number that differs if a bit differs, but for swaps."""
    return sum(int(t.detach().flatten().view(torch.int32).sum(dtype=torch.int64)) for t in tensors)
