"""Sections of `torchring bench gpu` about buckets: what a bucket costs the host, and all-reduce by size."""

from __future__ import annotations

import functools
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity

import torchring
from torchring.accelerators import accelerator_of
from torchring.bench import measure
from torchring.bench.gpu.kernels import LISTS, Shapes
from torchring.bench.gpu.timing import Case, Row, microseconds, shares
from torchring.bench.gpu.training import connected
from torchring.bench.step import sgd
from torchring.default_world import default_world
from torchring.devices.cuda import CudaAccelerator
from torchring.devices.engines import DeviceWire
from torchring.devices.opening import open_on_device
from torchring.devices.stream import OnStream
from torchring.devices.symmetric_memory import NO_MULTICAST, CudaGroup, SymmetricGroup

_SIZES: Final = [1 << 10, 64 << 10, *(mib << 20 for mib in (1, 4, 8, 12, 16, 25, 32, 64, 128, 256))]
_BUCKET_BYTES: Final = 25 << 20
_SMALL_BYTES: Final = 1 << 20
_CALLS_IF_SMALL: Final = 10
_NUM_ROUNDS: Final = 50
_NUM_WARMUPS: Final = 8
_CUDA_CALL: Final = re.compile(r"cu(da)?[A-Z]\w+")


# Host time of a bucket


def host_times() -> Iterator[Case]:
    """The host's time for a backward that only accumulates gradients, with torchring and without.

    The world has one rank, whose sum is there already: buckets are packed and unpacked. Gradients are 25 MiB from the
    middle of GPT-2, or 20 small tensors.
    """
    torchring.init()
    shapes, chosen = LISTS["gpt2"](), Shapes()
    for shape in shapes[len(shapes) // 2 :]:
        if 4 * sum(each.numel() for each in chosen) < _BUCKET_BYTES:
            chosen.append(shape)
    for load, shapes in (("gpt2 25 MiB", chosen), ("20 small", [torch.Size([1000])] * 20)):
        for compression, moves in ((None, False), ("bf16", False), (None, True)):
            about = {"load": load, "compression": compression, "addresses_change": moves}
            wrap = functools.partial(connected, compression=compression, bucket_mb=4 * _BUCKET_BYTES / 2**20)
            yield about, functools.partial(time_backward, shapes, {"plain": sgd, "torchring": wrap}, moves=moves)


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


def time_backward(
    shapes: Shapes, rivals: Mapping[str, Callable[[torch.nn.Module], Any]], *, moves: bool = False
) -> Row:
    """The host's time, and its calls of CUDA in a step.

    rivals: "torchring", and others to compare it with; see `training.RIVALS`.
    moves: whether each round has gradients at other addresses than the round before, as zero_grad() may cause.
    """
    gradients = [torch.randint(-99, 100, shape, device=torchring.device()).float() for shape in shapes]  # exact in bf16
    models: dict[str, torch.nn.Module] = {name: _Model(gradients) for name in rivals}
    parameters = {name: list(model.parameters()) for name, model in models.items()}
    optimizers: dict[str, Any] = {}
    for name, wrap in rivals.items():
        optimizers[name] = wrap(models[name])
        if isinstance(optimizers[name], tuple):
            models[name], optimizers[name] = optimizers[name]
    kept: dict[str, list[Tensor | None]] = {}
    times: dict[str, list[float]] = {name: [] for name in rivals}

    def backward(name: str) -> float:
        optimizers[name].step()
        kept[name] = [p.grad for p in parameters[name]] if moves else []
        optimizers[name].zero_grad()
        loss = models[name]()
        torch.cuda.synchronize()  # the queue of a stream takes a thousand operations, and then the host waits
        began = time.perf_counter()
        loss.backward()
        return time.perf_counter() - began

    for number in range(-_NUM_WARMUPS, _NUM_ROUNDS):
        for name in measure.in_turn(list(rivals), number):
            seconds = backward(name)
            if number >= 0:
                times[name].append(seconds)
    for name, own in parameters.items():
        if not all(p.grad is not None and torch.equal(p.grad, g) for p, g in zip(own, gradients, strict=True)):
            raise RuntimeError(f"{name} has wrong gradients")
    calls = {name: _count_calls(functools.partial(backward, name)) for name in rivals}
    num_buckets = optimizers["torchring"].stats().num_buckets
    optimizers["torchring"].close()
    us = {name: microseconds(seconds) for name, seconds in times.items()}
    return {"buckets": num_buckets, "us": us, "share": shares(times, "torchring"), "cuda_calls": calls}


def _count_calls(work: Callable[[], object]) -> int:
    """How often `work` calls CUDA, its driver's functions included."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        work()
    events: Any = profiler.events()
    return sum(_CUDA_CALL.fullmatch(event.name) is not None for event in events)


# All-reduce by size


_OF_PYTORCH: Final = {"two_shot": "two_shot_all_reduce_", "multimem": "multimem_all_reduce_"}  # of torch.ops.symm_mem
RIVALS: Final = ("direct", "ring", "native", *_OF_PYTORCH)


def all_reduces(algorithm: str) -> Iterator[Case]:
    """Collective: a case for each size in bytes."""
    world, accelerator = default_world(), accelerator_of(torchring.device())
    assert isinstance(accelerator, CudaAccelerator)
    about = {"algorithm": algorithm, "ranks": world.size, "shares_one_gpu": world.size > torch.cuda.device_count()}
    if algorithm in _OF_PYTORCH:
        os.environ[NO_MULTICAST] = "0"
        group = accelerator.share(world.host, world.rendezvous)
        for size in _SIZES:
            yield about | {"size": size}, functools.partial(_time_of_pytorch, algorithm, group, size // 4)
        return
    all_reduce, choice = open_on_device(world, algorithm, "auto", [(max(_SIZES) // 4, torch.float32)], accelerator)
    for size in _SIZES:
        yield (
            about | {"size": size, "reason": choice.reason},
            functools.partial(_time_all_reduce, all_reduce, size // 4),
        )
    torchring.barrier()
    all_reduce.close()


def _time_all_reduce(all_reduce: OnStream, numel: int) -> Row:
    wire: DeviceWire = all_reduce.open_wires([(numel, torch.float32)])[0]

    def reduce() -> None:
        all_reduce.stream.follow()
        all_reduce.start(wire).wait()

    return _time(wire.buffer, reduce)


def _time_of_pytorch(algorithm: str, group: SymmetricGroup, numel: int) -> Row:
    assert isinstance(group, CudaGroup)
    block = group.allocate(4 * numel)
    if algorithm == "multimem" and not getattr(block.handle, "multicast_ptr", 0):
        raise RuntimeError("these GPUs have no multicast memory")
    buffer = block.parts[group.index].view(torch.float32)
    reduce = getattr(torch.ops.symm_mem, _OF_PYTORCH[algorithm])
    return _time(buffer, lambda: reduce(buffer, "sum", group.name))


def _time(buffer: Tensor, reduce: Callable[[], object]) -> Row:
    """Time on the host, from a barrier until the device is done. One result is checked bit for bit."""
    world, numel = default_world(), buffer.numel()
    pattern = torch.arange(numel, dtype=torch.float32, device=torchring.device()).remainder_(251)
    source = pattern + world.rank
    calls = _CALLS_IF_SMALL if 4 * numel <= _SMALL_BYTES else 1

    def turn() -> None:
        for _ in range(calls):
            reduce()
        torch.cuda.synchronize()

    def prepare(name: str = "") -> None:
        buffer.copy_(source)
        torch.cuda.synchronize()

    prepare()
    torchring.barrier()
    reduce()
    torch.cuda.synchronize()
    is_right = torch.equal(buffer, pattern * world.size + sum(range(world.size)))
    if wrong := [rank for rank, right in enumerate(torchring.all_gather_object(is_right)) if not right]:
        raise RuntimeError(f"the result is wrong on ranks {wrong}")
    spread = measure.take_turns({"all": turn}, prepare=prepare, warmups=1, seconds=1.0, most=30)["all"]
    us = {key: 1e3 * getattr(spread, key) / calls for key in ("p20", "p50", "p80")}
    bus = 4 * numel / us["p50"] / 1e3 * 2 * (world.size - 1) / world.size
    return {"us": us | {"repetitions": spread.repetitions}, "bus_gb_per_s": bus}
