"""`torchring doctor --gpu`: a model trains on the GPUs of these ranks, by each all-reduce, as it does on one."""

import contextlib
import time
from collections.abc import Sequence
from typing import Final

import torch
from torch import nn
from torch.nn import functional

from torchring.allreduce.select import Algorithm
from torchring.doctor.report import TrainingFacts
from torchring.errors import PlanMismatchError, TopologyError
from torchring.optimizer import wrap
from torchring.world import World

_STEPS: Final = 20
_WIDTH: Final = 256


def ways(world: World, num_gpus: Sequence[int]) -> list[Algorithm]:
    """The algorithms for these ranks, each of which sees so many GPUs. Raises TopologyError if one sees none."""
    if 0 in num_gpus:
        raise TopologyError(f"rank {num_gpus.index(0)} sees no GPU", rank=world.rank)
    in_memory: list[Algorithm] = ["direct", "ring"] if len(world.hosts) == 1 and world.size > 1 else []
    native: list[Algorithm] = ["native"] if max(map(len, world.hosts)) <= min(num_gpus) else []
    return ["auto", *in_memory, *native]


def train(world: World, device: torch.device, algorithm: Algorithm) -> TrainingFacts:
    """Collective: train with the other ranks, and alone with the batches of all."""
    model, alone = _model(device), _model(device)
    before, optimizer, plain = _values(model), wrap(_sgd(model), model, algorithm=algorithm), _sgd(alone)
    started = time.monotonic()
    for step in range(_STEPS):
        _step(model, optimizer, [_batch(step, world.rank, device)])
    trained, seconds = _values(model), time.monotonic() - started
    taken = optimizer.stats().algorithm
    optimizer.close()
    for step in range(_STEPS):
        _step(alone, plain, [_batch(step, rank, device) for rank in range(world.size)])
    expected = _values(alone)
    difference = (trained - expected).norm() / (expected - before).norm()
    return TrainingFacts(algorithm, taken, float(difference), seconds / _STEPS * 1e3)


def abort(world: World, device: torch.device) -> str:
    """The last rank's backward raises when gradients have left. Returns what is wrong with what others make of it.

    The world is of no use after that.
    """
    model, at_fault = _model(device), world.size - 1
    optimizer = wrap(_sgd(model), model, bucket_mb=0.0)
    batch, first = _batch(0, world.rank, device), next(iter(model.parameters()))
    handle = first.register_hook(_fail) if world.rank == at_fault else None  # type: ignore[no-untyped-call]
    try:
        with contextlib.suppress(ArithmeticError):
            _step(model, optimizer, [batch])
        if handle is not None:
            handle.remove()
        _step(model, optimizer, [batch])
    except PlanMismatchError as error:
        return "" if error.peers == (at_fault,) else f"the wrong rank is named: {error.message}"
    return f"rank {at_fault} has aborted a backward, and nobody noticed"


def _fail(gradient: torch.Tensor) -> torch.Tensor:
    raise ArithmeticError


def _model(device: torch.device) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(_WIDTH, _WIDTH), nn.Tanh())))
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) / _WIDTH**0.5)
    return model.to(device)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _batch(step: int, rank: int, device: torch.device) -> torch.Tensor:
    return torch.randn(8, _WIDTH, generator=torch.Generator().manual_seed(1000 * step + rank)).to(device)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Sequence[torch.Tensor]) -> None:
    """On the mean over the batches."""
    optimizer.zero_grad()
    for batch in batches:
        (functional.mse_loss(model(batch), batch) / len(batches)).backward()  # type: ignore[no-untyped-call]
    optimizer.step()


def _values(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()]).double().cpu()
