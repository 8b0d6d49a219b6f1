"""Figures: the host's time and its calls of CUDA for a bucket, a step and small parameters. See `qa.gpu.check`."""

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any, Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import torchring
from qa.gpu.check import Figure
from torchring.bench import measure
from torchring.bench.gpu.timing import shares
from torchring.bench.gpu.training import RIVALS, connected
from torchring.bench.step import sgd

_NUM_ROUNDS: Final = 50
_NUM_WARMUPS: Final = 8
_CUDA_CALL: Final = re.compile(r"cu(da)?[A-Z]\w+")


def figures() -> Iterator[Figure]:
    """A step in few buckets and one of the same gradients in many say what a bucket costs, and what a step."""
    torchring.init()
    few, many = (
        _time_backward(10, 2**18, {"plain": sgd, "torchring": partial(connected, bucket_mb=mb)}) for mb in (100, 1)
    )
    for unit, of_a_bucket, of_a_step in (("us", 120, 400), ("calls of CUDA", 10, 14)):
        added = [
            median(ours - plain for ours, plain in zip(each["torchring"], each["plain"], strict=True))
            for each in ((few.us, many.us) if unit == "us" else (few.calls, many.calls))
        ]
        bucket = (added[1] - added[0]) / (many.num_buckets - few.num_buckets)
        yield Figure("the host, for a bucket", bucket, unit, of_a_bucket)
        yield Figure("the host, for a step", added[0] - few.num_buckets * bucket, unit, of_a_step)
    small = _time_backward(800, 1000, {"plain": sgd, "torchring": RIVALS["direct"], "ddp": RIVALS["ddp"]})
    us = ", ".join(f"{name} {median(each):.0f}" for name, each in small.us.items())
    name = f"backward of 800 small parameters on the host, {us} us; torchring's over DDP's"
    yield Figure(name, shares(small.us, "torchring")["ddp"], "", 1.0)
    dist.destroy_process_group()


class _Given(torch.autograd.Function):
    """Gives each parameter a gradient that is there already."""

    @staticmethod
    def forward(ctx: Any, gradients: Sequence[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return None, *ctx.gradients


class _Model(torch.nn.Module):
    """Its backward only accumulates `gradients`."""

    def __init__(self, gradients: Sequence[Tensor]) -> None:
        super().__init__()
        self.gradients = gradients
        self.weights = torch.nn.ParameterList(map(torch.zeros_like, gradients))

    def forward(self) -> Tensor:
        loss: Tensor = _Given.apply(self.gradients, *self.weights)  # type: ignore[no-untyped-call]
        return loss


class _Cost(NamedTuple):
    """By rival: microseconds of the host for each backward, and calls of CUDA in a step."""

    num_buckets: int
    us: dict[str, list[float]]
    calls: dict[str, list[int]]


def _time_backward(num_tensors: int, numel: int, rivals: Mapping[str, Callable[[torch.nn.Module], Any]]) -> _Cost:
    """rivals: "torchring", and others to compare it with; see `training.RIVALS`."""
    gradients = [torch.randn(numel, device=torchring.device()) for _ in range(num_tensors)]
    models: dict[str, torch.nn.Module] = {name: _Model(gradients) for name in rivals}
    parameters = {name: list(model.parameters()) for name, model in models.items()}
    optimizers: dict[str, Any] = {}
    for name, wrap in rivals.items():
        optimizers[name] = wrap(models[name])
        if isinstance(optimizers[name], tuple):
            models[name], optimizers[name] = optimizers[name]
    us: dict[str, list[float]] = {name: [] for name in rivals}

    def step(name: str) -> float:
        optimizers[name].step()
        optimizers[name].zero_grad()
        loss = models[name]()
        torch.cuda.synchronize()  # the queue of a stream takes a thousand operations, and then the host waits
        began = time.perf_counter()
        loss.backward()
        return 1e6 * (time.perf_counter() - began)

    for number in range(-_NUM_WARMUPS, _NUM_ROUNDS):
        for name in measure.in_turn(list(rivals), number):
            taken = step(name)
            if number >= 0:
                us[name].append(taken)
    for name, own in parameters.items():
        if not all(p.grad is not None and torch.equal(p.grad, g) for p, g in zip(own, gradients, strict=True)):
            raise RuntimeError(f"{name} has wrong gradients")
    calls = {name: [_count_calls(partial(step, name))] for name in rivals}
    num_buckets = optimizers["torchring"].stats().num_buckets
    optimizers["torchring"].close()
    return _Cost(num_buckets, us, calls)


def _count_calls(work: Callable[[], object]) -> int:
    """How often `work` calls CUDA, its driver's functions included."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        work()
    events: Any = profiler.events()
    return sum(_CUDA_CALL.fullmatch(event.name) is not None for event in events)
