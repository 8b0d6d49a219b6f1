"""All-reduce by size, for `torchring bench gpu`."""

import functools
import os
from collections.abc import Callable, Iterator
from typing import Final

import torch
from torch import Tensor

import torchring
from torchring.accelerators import accelerator_of
from torchring.bench import measure
from torchring.bench.gpu.timing import Case, Row
from torchring.default_world import default_world
from torchring.devices.cuda import CudaAccelerator
from torchring.devices.engines import DeviceWire
from torchring.devices.opening import open_on_device
from torchring.devices.stream import OnStream
from torchring.devices.symmetric_memory import NO_MULTICAST, CudaGroup, SymmetricGroup

_SIZES: Final = [1 << 10, 64 << 10, *(mib << 20 for mib in (1, 4, 8, 12, 16, 25, 32, 64, 128, 256))]
_SMALL_BYTES: Final = 1 << 20
_CALLS_IF_SMALL: Final = 10
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
