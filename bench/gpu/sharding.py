"""A section of `torchring bench gpu`: training steps with shard=True, against the same steps without."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import torch

import torchring
from torchring.bench import measure
from torchring.bench.gpu.timing import Case, Row, host_seconds, shares, spreads
from torchring.bench.gpu.training import CONFIGS, Training
from torchring.bench.step import flat_weights
from torchring.default_world import default_world
from torchring.optimizer import DistributedOptimizer

_STEPS_PER_TURN: Final = 4
_NUM_TURNS: Final = 10
_MOST_DISTANCE: Final = 0.1  # see training.py


def steps() -> Iterator[Case]:
    """Collective: AdamW, by foreach and fused, for GPT-2."""
    size = default_world().size
    about = {"model": "gpt2-bf16", "ranks": size, "shares_one_gpu": size > torch.cuda.device_count()}
    for options in ({"fused": True}, {"foreach": True}):
        yield {**about, "optimizer": "AdamW", **options}, partial(_time_steps, options)


def _time_steps(options: dict[str, Any]) -> Row:
    def wrap(model: torch.nn.Module, shard: bool) -> DistributedOptimizer:
        return torchring.wrap(torch.optim.AdamW(model.parameters(), lr=1e-4, **options), model, shard=shard)

    config, first_seed = CONFIGS["gpt2-bf16"], 100 * default_world().rank
    trainings = {
        name: Training(config, partial(wrap, shard=shard), first_seed)
        for name, shard in (("whole", False), ("sharded", True))
    }
    times: dict[str, list[float]] = {name: [] for name in trainings}
    for turn in range(-1, _NUM_TURNS):
        for name in measure.in_turn(list(trainings), turn):
            torchring.barrier()
            seconds = host_seconds(trainings[name].step, _STEPS_PER_TURN)
            if turn >= 0:
                times[name].append(seconds)
    whole, sharded = (flat_weights(training.model) for training in trainings.values())
    distance = float((sharded - whole).norm() / (whole - trainings["whole"].start).norm())
    problem = "" if distance < _MOST_DISTANCE else f"weights differ from those without shard by {distance}"
    if len(set(torchring.all_gather_object(sharded.view(torch.int32).sum(dtype=torch.int64).item()))) > 1:
        problem = "weights differ between ranks"
    state_mb = {name: _state_bytes(training.optimizer) / 1e6 for name, training in trainings.items()}
    for training in trainings.values():
        training.optimizer.close()
    if problem:
        raise RuntimeError(problem)
    return {
        "ms": spreads(times),
        "speed": shares(times, "whole"),
        "state_mb": state_mb,
        "distance": distance,
    }


def _state_bytes(optimizer: DistributedOptimizer) -> int:
    state = optimizer.optimizer.state.values()
    return sum(value.nbytes for entry in state for value in entry.values() if isinstance(value, torch.Tensor))
