"""A section of `torchring bench gpu`: what torchring adds to a training step of one rank."""

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
import torch.distributed as dist

import torchring
from torchring.bench import measure
from torchring.bench.gpu.timing import Case, Row, host_seconds, shares, spreads
from torchring.bench.models import Batch, Workload, gpt2, resnet
from torchring.bench.step import distance, flat_weights, sgd
from torchring.default_world import default_world
from torchring.optimizer import DistributedOptimizer

BUCKET_MB: Final = 25.0
_STEPS_PER_TURN: Final = 4
_NUM_TURNS: Final = 12
_NUM_BATCHES: Final = 4
# Bound for the distance of weights that should be equal, as a share of the distance that training moved them: a GPU
# adds up in a different order each time.
_MOST_DISTANCE: Final = 0.1


@dataclass(frozen=True)
class TrainingConfig:
    """A model and how to train it."""

    build: Callable[[], Workload]
    autocast: torch.dtype | None = None
    layout: torch.memory_format = torch.preserve_format  # of tensors of four dimensions


CONFIGS: Final = {
    "gpt2-bf16": TrainingConfig(gpt2, torch.bfloat16),
    "resnet50-bf16": TrainingConfig(lambda: resnet(64, 224), torch.bfloat16, torch.channels_last),
    "gpt2-tf32": TrainingConfig(gpt2),
}


class Training:
    """A model, its optimizer and its batches. `step` trains for one step, and does not wait for the device.

    `wrap` makes the optimizer from the model. It may return another model, too, which is then trained.
    """

    def __init__(self, config: TrainingConfig, wrap: Callable[[torch.nn.Module], Any]) -> None:
        torch.backends.cudnn.benchmark = True
        torch.set_float32_matmul_precision("high")
        torch.manual_seed(0)  # the same weights for all rivals
        self._config, self._workload = config, config.build()
        self.model = self._workload.model.to(device=torchring.device())
        if config.layout == torch.channels_last:
            self.model = self.model.to(memory_format=config.layout)  # type: ignore[call-overload]
        self.start = flat_weights(self.model)
        self._batches = [_to(self._workload.batch(seed=i), config.layout) for i in range(_NUM_BATCHES)]
        self._run = self.model
        self.optimizer = wrap(self.model)
        if isinstance(self.optimizer, tuple):
            self._run, self.optimizer = self.optimizer
        self._num_steps = 0

    def step(self) -> None:
        batch = self._batches[self._num_steps % _NUM_BATCHES]
        self._num_steps += 1
        self.optimizer.zero_grad()
        with torch.autocast("cuda", self._config.autocast) if self._config.autocast else nullcontext():
            loss = self._workload.loss(self._run, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()


def connected(model: torch.nn.Module, *, bucket_mb: float = BUCKET_MB, **options: Any) -> DistributedOptimizer:
    """Like `torchring.wrap`, but packs, reduces and unpacks also in a world of one rank."""
    optimizer = DistributedOptimizer(sgd(model), model, algorithm="direct", bucket_mb=bucket_mb, **options)
    world = default_world()
    if world.size == 1:
        optimizer._connect(world)
    return optimizer


def _with_ddp(model: torch.nn.Module) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """DDP over NCCL, in a group of one rank."""
    if not dist.is_initialized():
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    ddp = torch.nn.parallel.DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB, gradient_as_bucket_view=True)
    return ddp, sgd(ddp)


RIVALS: Final[dict[str, Callable[[torch.nn.Module], Any]]] = {
    "plain": sgd,
    "direct": connected,
    "ddp": _with_ddp,
}


def steps() -> Iterator[Case]:
    """Steps of one rank, which has no other rank to send to, against the plain optimizer."""
    torchring.init()
    for name, config in CONFIGS.items():
        yield {"model": name, "ranks": 1}, partial(_time_steps, config)
    if dist.is_initialized():
        dist.destroy_process_group()


def _time_steps(config: TrainingConfig) -> Row:
    trainings = {name: Training(config, wrap) for name, wrap in RIVALS.items()}
    times: dict[str, list[float]] = {name: [] for name in trainings}
    peaks: dict[str, int] = {}
    for turn in range(-1, _NUM_TURNS):
        for name in measure.in_turn(list(trainings), turn):
            step = trainings[name].step
            peaks[name] = _peak_bytes(step)  # not timed: another rival has used the caches and the allocator
            seconds = host_seconds(step, _STEPS_PER_TURN)
            if turn >= 0:
                times[name].append(seconds)
    weights = {name: flat_weights(training.model) for name, training in trainings.items()}
    plain = weights.pop("plain")
    distances = {name: distance(own, plain, trainings["plain"].start) for name, own in weights.items()}
    if wrong := [name for name, far in distances.items() if not far < _MOST_DISTANCE]:
        raise RuntimeError(f"the weights of {', '.join(wrong)} differ from the plain optimizer's: {distances}")
    stats = vars(trainings["direct"].optimizer.stats())
    for training in trainings.values():
        if isinstance(training.optimizer, DistributedOptimizer):
            training.optimizer.close()
    return {
        "parameters": plain.numel(),
        "ms": spreads(times),
        "overhead": {name: 1 / share - 1 for name, share in shares(times, "plain").items()},
        "of_ddp": 1 / shares(times, "ddp")["direct"],
        "peak_bytes": peaks,
        "distance": distances,
        "stats": stats,
    }


def _peak_bytes(work: Callable[[], object]) -> int:
    """Bytes of a GPU's memory that `work` takes at its peak, beside those that were in use before. Waits for `work`.

    Buckets of DDP are in use all the time. Wires of torchring are not counted, as PyTorch's allocator does not see
    them.
    """
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    work()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _to(batch: Batch, layout: torch.memory_format) -> Batch:
    inputs, targets = batch
    device = torchring.device()
    return inputs.to(device, memory_format=layout if inputs.dim() == 4 else torch.preserve_format), targets.to(device)
