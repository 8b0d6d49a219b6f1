"""Sections of `gpu.py` about training: what torchring adds to a step of one rank, and ranks that have to end alike."""

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
from torchring.bench.gpu.timing import Timer, quantiles, spreads, take_turns
from torchring.bench.models import Batch, Workload
from torchring.gradients.plan import Compression
from torchring.optimizer import DistributedOptimizer
from torchring.world import default_world

Row = dict[str, Any]
BUCKET_MB: Final = 25.0
STEPS_PER_TURN: Final = 4
# Of what training moved the weights: between two ways to compute the same in fp32; and where a GPU adds up in an order
# of its own each time, or a wire holds 16 bits.
MOST_DISTANCE: Final = 1e-3
MOST_DISTANCE_ROUNDED: Final = 0.1
_LEARNING_RATE: Final = 1e-3
_NUM_BATCHES: Final = 4


@dataclass
class Trainee:
    """A model and what steps it. `step` does not wait for the device."""

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
    """Plain SGD, the optimizer that leaves a step as short as it can be."""
    return torch.optim.SGD(model.parameters(), lr=_LEARNING_RATE)


def connected(
    model: torch.nn.Module, algorithm: Algorithm, compression: Compression | None = None
) -> DistributedOptimizer:
    """`torchring.wrap`, but in a world of one, too, it packs, reduces and unpacks."""
    optimizer = DistributedOptimizer(
        sgd(model), model, algorithm=algorithm, bucket_mb=BUCKET_MB, compression=compression
    )
    world = default_world()
    if world.size == 1:
        optimizer._connect(world)
    return optimizer


# One rank


@dataclass(frozen=True)
class Course:
    """Something to train. Convolutions are laid out channels last where `channels_last`."""

    name: str
    build: Callable[[], Workload]
    autocast: torch.dtype | None
    channels_last: bool = False


def courses(*, is_dry: bool) -> list[Course]:
    if is_dry:
        return [Course("linear", models.linear, None)]
    return [
        Course("gpt2-bf16", models.gpt2, torch.bfloat16),
        Course("resnet50-bf16", models.resnet50, torch.bfloat16, channels_last=True),
        Course("gpt2-tf32", models.gpt2, None),
    ]


def steps(timer: Timer, *, is_dry: bool, until: float, most: int) -> Iterator[Row]:
    """A row for each course: the plain optimizer, torchring with ring and direct forced, and DDP, in turns."""
    torchring.init()
    try:
        yield from _steps(timer, is_dry=is_dry, until=until, most=most)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _steps(timer: Timer, *, is_dry: bool, until: float, most: int) -> Iterator[Row]:
    todo = courses(is_dry=is_dry)
    for i, course in enumerate(todo):
        row: Row = {"section": "step", "model": course.name, "ranks": 1}
        now = time.monotonic()
        if now > until:
            yield row | {"problem": "there was no time left"}
            continue
        try:
            yield row | _time_course(timer, course, now + (until - now) / (len(todo) - i), most)
        except (RuntimeError, TypeError, ValueError, AssertionError) as error:
            yield row | {"problem": f"{type(error).__name__}: {error}"}


def _time_course(timer: Timer, course: Course, until: float, most: int) -> Row:
    workload, batches = set_up(course, timer.device, first_seed=0)
    model = workload.model
    start = flat_weights(model)
    trainees = {"plain": Trainee(model, sgd(model), course.autocast)}
    problems: dict[str, str] = {}
    for name, make in _WRAPS.items():
        try:
            trainees[name] = make(copy.deepcopy(model), course.autocast)
        except (RuntimeError, TypeError, ValueError, AssertionError, ImportError) as error:
            problems[name] = f"{type(error).__name__}: {error}"

    def turn(name: str) -> float:
        trainee = trainees[name]
        trainee.step(workload, batches)  # which finds the caches, and the allocator, as another left them
        timer.synchronize()
        started = time.perf_counter()
        for _ in range(STEPS_PER_TURN):
            trainee.step(workload, batches)
        timer.synchronize()
        return (time.perf_counter() - started) / STEPS_PER_TURN

    turns = {name: functools.partial(turn, name) for name in trainees}
    times = take_turns(turns, until=until, most=most, warmups=1)
    weights = {name: flat_weights(trainee.model) for name, trainee in trainees.items()}
    distances = {name: distance(own, weights["plain"], start) for name, own in weights.items() if name != "plain"}
    wrong = [f"{name}: {text}" for name, text in problems.items() if name != "ddp"]
    wrong += [
        f"{name} ended {far:.1e} of the way from the plain optimizer"
        for name, far in distances.items()
        if not far < MOST_DISTANCE_ROUNDED
    ]
    rings = trainees.get("ring")
    stats = vars(rings.optimizer.stats()) if rings is not None else None
    for trainee in trainees.values():
        if isinstance(trainee.optimizer, DistributedOptimizer):
            trainee.optimizer.close()
    return {
        "tensors": len(list(model.parameters())),
        "parameters": start.numel(),
        "ms": spreads(times),
        "overhead": overheads(times),
        "distance": distances,
        "has_the_same_bits": {name: torch.equal(weights[name], weights["plain"]) for name in distances},
        "stats": stats,
        "is_checked": True,
        **({"problem": "; ".join(wrong)} if wrong else {}),
        **({"problems": problems} if problems else {}),
    }


def set_up(course: Course, device: torch.device, *, first_seed: int) -> tuple[Workload, list[Batch]]:
    """The model, the same for whoever asks, and some batches, on the device."""
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = True
        torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    workload = course.build()
    layout = torch.channels_last if course.channels_last else torch.preserve_format
    workload.model.to(device)
    if course.channels_last:
        workload.model.to(memory_format=layout)  # type: ignore[call-overload]
    return workload, [_to(workload.batch(seed=first_seed + i), device, layout) for i in range(_NUM_BATCHES)]


def start_course(course: Course, algorithm: Algorithm, device: torch.device) -> tuple[Trainee, Workload, list[Batch]]:
    """Collective: a course for torchring alone, on any number of ranks, which see batches of their own."""
    workload, batches = set_up(course, device, first_seed=100 * torchring.rank())
    return Trainee(workload.model, connected(workload.model, algorithm), course.autocast), workload, batches


def overheads(times: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    """How much longer each took than "plain", as a share of that, repetition by repetition."""
    return {
        name: quantiles([mine / base - 1 for mine, base in zip(own, times["plain"], strict=True)])
        for name, own in times.items()
        if name != "plain"
    }


def _with_torchring(model: torch.nn.Module, autocast: torch.dtype | None, *, algorithm: Algorithm) -> Trainee:
    return Trainee(model, connected(model, algorithm), autocast)


def _with_ddp(model: torch.nn.Module, autocast: torch.dtype | None) -> Trainee:
    """In a group of one rank, over NCCL on a GPU."""
    if not dist.is_initialized():
        on_gpu = next(model.parameters()).is_cuda
        dist.init_process_group("nccl" if on_gpu else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB, gradient_as_bucket_view=True)
    return Trainee(ddp, sgd(ddp), autocast)


_WRAPS: Final[dict[str, Callable[[torch.nn.Module, torch.dtype | None], Trainee]]] = {
    "ring": functools.partial(_with_torchring, algorithm="ring"),
    "direct": functools.partial(_with_torchring, algorithm="direct"),
    "ddp": _with_ddp,
}


# Several ranks


def replicas(device: torch.device, algorithm: Algorithm, num_steps: int, *, is_dry: bool) -> Iterator[Row]:
    """A row for fp32 and one for bf16 wires, on rank 0; collective. All ranks have to end with the same bits.

    They also have to end where one process does that sees all of their batches, and elsewhere than one that sees rank
    0's alone, or the comparison would be worth nothing. Not in a dry run with bf16, which the interpreter truncates.
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
        trainee = Trainee(model := copy.deepcopy(first), connected(model, algorithm, compression), None)
        torchring.barrier()
        started = time.perf_counter()
        for _ in range(num_steps):
            trainee.step(workload, batches[world.rank])
        weights = flat_weights(model)
        digest = hashlib.sha256(weights.cpu().numpy().tobytes()).hexdigest()
        seconds = time.perf_counter() - started
        stats = vars(trainee.optimizer.stats())
        digests = torchring.all_gather_object(digest)
        trainee.optimizer.close()
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
    """Of replicas that ended `far` from where they should, and `control` from where they should not; see `distance`."""
    row: Row = {"has_the_same_bits": len(set(digests)) == 1, "distance": far, "distance_of_control": control}
    if not row["has_the_same_bits"]:
        row["problem"] = f"ranks ended with different bits: {[text[:8] for text in digests]}"
    elif not far < bound:
        row["problem"] = f"{far:.1e} of the way from one process that sees all batches"
    elif not control > min(bound, MOST_DISTANCE_ROUNDED):
        row["problem"] = f"one process that sees rank 0's batches alone ends as near: {control:.1e}"
    return row


def train_alone(
    model: torch.nn.Module, workload: Workload, batches: Sequence[Sequence[Batch]], num_steps: int
) -> torch.Tensor:
    """The weights after as many steps of one process on the mean of all ranks' losses."""
    optimizer = sgd(model)
    for step in range(num_steps):
        optimizer.zero_grad()
        for own in batches:
            loss = workload.loss(model, own[step % len(own)]) / len(batches)
            loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return flat_weights(model)


def flat_weights(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def distance(weights: torch.Tensor, others: torch.Tensor, start: torch.Tensor) -> float:
    """How far two ways ended from each other, over how far the second one came."""
    return float((weights - others).norm() / (others - start).norm())


def _to(batch: Batch, device: torch.device, layout: torch.memory_format = torch.preserve_format) -> Batch:
    inputs, targets = batch
    if inputs.dim() != 4:
        layout = torch.preserve_format
    return inputs.to(device, memory_format=layout), targets.to(device)


def _autocast(device: torch.device, dtype: torch.dtype | None) -> AbstractContextManager[Any]:
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)
