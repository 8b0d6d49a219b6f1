"""Sections of `torchring bench gpu` about training: torchring's overhead on one rank, and whether ranks end alike."""

from __future__ import annotations

import copy
import functools
import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist

import torchring
from torchring.allreduce.select import Algorithm
from torchring.bench.gpu import models
from torchring.bench.gpu.buckets import shares_one_gpu
from torchring.bench.gpu.timing import NO_TIME, Timer, quantiles, spreads, take_turns
from torchring.bench.models import Batch, Workload
from torchring.default_world import default_world
from torchring.gradients.plan import Compression
from torchring.optimizer import DistributedOptimizer

Row = dict[str, Any]
BUCKET_MB: Final = 25.0
STEPS_PER_TURN: Final = 4
# Bounds for the distance of weights that should be equal, as a share of the distance that training moved them.
MOST_DISTANCE: Final = 1e-3  # for two ways to compute the same in fp32
MOST_DISTANCE_ROUNDED: Final = 0.1  # where a GPU adds up in a different order each time, or a wire has 16 bits
_LEARNING_RATE: Final = 1e-3
_NUM_BATCHES: Final = 4


@dataclass
class Trainer:
    """A model and its optimizer. `step` trains for one step, and does not wait for the device."""

    model: torch.nn.Module
    optimizer: Any
    autocast: torch.dtype | None
    num_steps: int = 0

    def step(self, workload: Workload, batches: Sequence[Batch]) -> None:
        batch = batches[self.num_steps % len(batches)]
        self.optimizer.zero_grad()
        with _autocast(batch[0].device, self.autocast):
            loss = workload.loss(self.model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.num_steps += 1


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Plain SGD. No other optimizer makes a shorter step."""
    return torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE)


def connected(
    model: torch.nn.Module, algorithm: Algorithm, compression: Compression | None = None
) -> DistributedOptimizer:
    """Like `torchring.wrap`, but packs, reduces and unpacks also in a world of one rank."""
    optimizer = DistributedOptimizer(
        sgd(model), model, algorithm=algorithm, bucket_mb=BUCKET_MB, compression=compression
    )
    world = default_world()
    if world.size == 1:
        optimizer._connect(world)
    return optimizer


# One rank


@dataclass(frozen=True)
class TrainingConfig:
    """A model and how to train it.

    Attributes:
        build: makes the model.
        autocast: dtype of autocast; None for none.
        channels_last: whether tensors of four dimensions have the channels_last memory format.
    """

    name: str
    build: Callable[[], Workload]
    autocast: torch.dtype | None
    channels_last: bool = False


def training_configs(*, is_dry: bool) -> list[TrainingConfig]:
    if is_dry:
        return [TrainingConfig("linear", models.linear, None)]
    return [
        TrainingConfig("gpt2-bf16", models.gpt2, torch.bfloat16),
        TrainingConfig("resnet50-bf16", models.resnet50, torch.bfloat16, channels_last=True),
        TrainingConfig("gpt2-tf32", models.gpt2, None),
    ]


def steps(timer: Timer, *, is_dry: bool, until: float, most: int) -> Iterator[Row]:
    """A row for each config. Rivals: the plain optimizer, torchring with the algorithms ring and direct, and DDP."""
    torchring.init()
    try:
        yield from _steps(timer, is_dry=is_dry, until=until, most=most)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _steps(timer: Timer, *, is_dry: bool, until: float, most: int) -> Iterator[Row]:
    todo = training_configs(is_dry=is_dry)
    for i, config in enumerate(todo):
        row: Row = {"section": "step", "model": config.name, "ranks": 1}
        now = time.monotonic()
        if now > until:
            yield row | {"problem": NO_TIME}
            continue
        try:
            yield row | _time_config(timer, config, now + (until - now) / (len(todo) - i), most)
        except (RuntimeError, TypeError, ValueError, AssertionError) as error:
            yield row | {"problem": f"{type(error).__name__}: {error}"}


def _time_config(timer: Timer, config: TrainingConfig, until: float, most: int) -> Row:
    workload, batches = set_up(config, timer.device, first_seed=0)
    model = workload.model
    start = flat_weights(model)
    trainers = {"plain": Trainer(model, sgd(model), config.autocast)}
    problems: dict[str, str] = {}
    for name, make in _WRAPS.items():
        try:
            trainers[name] = make(copy.deepcopy(model), config.autocast)
        except (RuntimeError, TypeError, ValueError, AssertionError, ImportError) as error:
            problems[name] = f"{type(error).__name__}: {error}"

    peaks: dict[str, int] = {}

    def turn(name: str) -> float:
        trainer = trainers[name]
        # Not timed: another rival has used the caches and the allocator.
        peaks[name] = peak_bytes(timer, lambda: trainer.step(workload, batches))
        started = time.perf_counter()
        for _ in range(STEPS_PER_TURN):
            trainer.step(workload, batches)
        timer.synchronize()
        return (time.perf_counter() - started) / STEPS_PER_TURN

    turns = {name: functools.partial(turn, name) for name in trainers}
    times = take_turns(turns, until=until, most=most, warmups=1)
    weights = {name: flat_weights(trainer.model) for name, trainer in trainers.items()}
    distances = {name: distance(own, weights["plain"], start) for name, own in weights.items() if name != "plain"}
    wrong = [f"{name}: {text}" for name, text in problems.items() if name != "ddp"]
    wrong += [
        f"{name} ended {far:.1e} of the way from the plain optimizer's weights"
        for name, far in distances.items()
        if not far < MOST_DISTANCE_ROUNDED
    ]
    rings = trainers.get("ring")
    stats = vars(rings.optimizer.stats()) if rings is not None else None
    for trainer in trainers.values():
        if isinstance(trainer.optimizer, DistributedOptimizer):
            trainer.optimizer.close()
    return {
        "tensors": len(list(model.parameters())),
        "parameters": start.numel(),
        "ms": spreads(times),
        "overhead": overheads(times),
        "peak_bytes": peaks,
        "distance": distances,
        "has_the_same_bits": {name: torch.equal(weights[name], weights["plain"]) for name in distances},
        "stats": stats,
        "is_checked": True,
        **({"problem": "; ".join(wrong)} if wrong else {}),
        **({"problems": problems} if problems else {}),
    }


def peak_bytes(timer: Timer, work: Callable[[], object]) -> int:
    """Bytes of a GPU's memory that `work` takes at its peak, beside those that were in use before. Waits for `work`.

    Buckets of DDP are in use all the time. Wires of torchring are not counted, as PyTorch's allocator does not see
    them.
    """
    if timer.device.type != "cuda":
        work()
        return 0
    before = torch.cuda.memory_allocated(timer.device)
    torch.cuda.reset_peak_memory_stats(timer.device)
    work()
    timer.synchronize()
    return torch.cuda.max_memory_allocated(timer.device) - before


def set_up(config: TrainingConfig, device: torch.device, *, first_seed: int) -> tuple[Workload, list[Batch]]:
    """The model and some batches, on the device. The model always starts from the same weights."""
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = True
        torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    workload = config.build()
    layout = torch.channels_last if config.channels_last else torch.preserve_format
    workload.model.to(device)
    if config.channels_last:
        workload.model.to(memory_format=layout)  # type: ignore[call-overload]
    return workload, [_to(workload.batch(seed=first_seed + i), device, layout) for i in range(_NUM_BATCHES)]


def start_training(
    config: TrainingConfig, algorithm: Algorithm, device: torch.device
) -> tuple[Trainer, Workload, list[Batch]]:
    """Collective: set up training with torchring, on any number of ranks. Each rank has batches of its own."""
    workload, batches = set_up(config, device, first_seed=100 * torchring.rank())
    return Trainer(workload.model, connected(workload.model, algorithm), config.autocast), workload, batches


def overheads(times: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """By how much each rival took longer than "plain" in the same repetition, as a share of the time of "plain"."""
    return {
        name: quantiles([mine / base - 1 for mine, base in zip(own, times["plain"], strict=True)])
        for name, own in times.items()
        if name != "plain"
    }


def _with_torchring(model: torch.nn.Module, autocast: torch.dtype | None, *, algorithm: Algorithm) -> Trainer:
    return Trainer(model, connected(model, algorithm), autocast)


def _with_ddp(model: torch.nn.Module, autocast: torch.dtype | None) -> Trainer:
    """DDP in a group of one rank, over NCCL on a GPU and over Gloo on the CPU."""
    if not dist.is_initialized():
        on_gpu = next(model.parameters()).is_cuda
        dist.init_process_group("nccl" if on_gpu else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB, gradient_as_bucket_view=True)
    return Trainer(ddp, sgd(ddp), autocast)


_WRAPS: Final[dict[str, Callable[[torch.nn.Module, torch.dtype | None], Trainer]]] = {
    "ring": functools.partial(_with_torchring, algorithm="ring"),
    "direct": functools.partial(_with_torchring, algorithm="direct"),
    "ddp": _with_ddp,
}


# Several ranks


def replicas(device: torch.device, algorithm: Algorithm, num_steps: int, *, is_dry: bool) -> Iterator[Row]:
    """Collective. Yields a row for fp32 wires and a row for bf16 wires, on rank 0.

    All ranks have to end with the same bits. They also have to end near a single process that trains on the batches of
    all ranks. A single process that trains on rank 0's batches alone must end far away: otherwise the comparison could
    not tell right from wrong. Distances are not checked in a dry run with bf16, as Triton's interpreter truncates.
    """
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    world = default_world()
    torch.manual_seed(0)
    workload = (models.linear if is_dry else models.gpt_small)()
    first = workload.model.to(device)
    start = flat_weights(first)
    batches = [[_to(workload.batch(seed=100 * r + i), device) for i in range(_NUM_BATCHES)] for r in range(world.size)]
    right: tuple[torch.Tensor, torch.Tensor] | None = None
    for compression in (None, "bf16"):
        trainer = Trainer(model := copy.deepcopy(first), connected(model, algorithm, compression), None)
        torchring.barrier()
        started = time.perf_counter()
        for _ in range(num_steps):
            trainer.step(workload, batches[world.rank])
        weights = flat_weights(model)
        digest = hashlib.sha256(weights.cpu().numpy().tobytes()).hexdigest()
        seconds = time.perf_counter() - started
        stats = vars(trainer.optimizer.stats())
        digests = torchring.all_gather_object(digest)
        trainer.optimizer.close()
        if world.rank == 0:
            if right is None:
                right = (
                    train_alone(copy.deepcopy(first), workload, batches, num_steps),
                    train_alone(copy.deepcopy(first), workload, batches[:1], num_steps),
                )
            row: Row = {"section": "replicas", "algorithm": algorithm, "ranks": world.size, "compression": compression}
            row |= {"shares_one_gpu": shares_one_gpu(world, device), "steps": num_steps, "parameters": start.numel()}
            row |= {"step_ms": 1e3 * seconds / num_steps, "stats": stats}
            far, control = (distance(weights, other, start) for other in right)
            bound = MOST_DISTANCE if compression is None else MOST_DISTANCE_ROUNDED
            yield row | verdict_of(digests, far, control, math.inf if is_dry and compression else bound)
        torchring.barrier()


def verdict_of(digests: Sequence[str], far: float, control: float, bound: float) -> Row:
    """The part of a row that judges replicas.

    Args:
        digests: digest of the weights of each rank.
        far: `distance` to one process that trains on all batches, which has to be below `bound`.
        control: `distance` to one process that trains on rank 0's batches alone.
    """
    row: Row = {"has_the_same_bits": len(set(digests)) == 1, "distance": far, "distance_of_control": control}
    if not row["has_the_same_bits"]:
        row["problem"] = f"ranks ended with different bits: {[text[:8] for text in digests]}"
    elif not far < bound:
        row["problem"] = f"{far:.1e} of the way from one process that trains on all batches"
    elif not control > min(bound, MOST_DISTANCE_ROUNDED):
        row["problem"] = f"one process that trains on rank 0's batches alone ends as near: {control:.1e}"
    return row


def train_alone(
    model: torch.nn.Module, workload: Workload, batches: Sequence[Sequence[Batch]], num_steps: int
) -> torch.Tensor:
    """The weights after one process has trained on the mean of the losses of all ranks."""
    optimizer = sgd(model)
    for step in range(num_steps):
        optimizer.zero_grad()
        for of_rank in batches:
            loss = workload.loss(model, of_rank[step % len(of_rank)]) / len(batches)
            loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return flat_weights(model)


def flat_weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def distance(weights: torch.Tensor, others: torch.Tensor, start: torch.Tensor) -> float:
    """The distance between two results of training, divided by the distance of the second result from `start`."""
    return float((weights - others).norm() / (others - start).norm())


def _to(batch: Batch, device: torch.device, layout: torch.memory_format = torch.preserve_format) -> Batch:
    inputs, targets = batch
    if inputs.dim() != 4:
        layout = torch.preserve_format
    return inputs.to(device, memory_format=layout), targets.to(device)


def _autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)
