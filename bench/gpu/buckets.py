"""Sections of `torchring bench gpu` about buckets: host time of a bucket, and all-reduce by size."""

from __future__ import annotations

import functools
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity

import torchring
from torchring.accelerators import Accelerator, accelerator_of
from torchring.allreduce.device.select import open_on_device
from torchring.allreduce.device.stream import DeviceWire, OnStream
from torchring.bench import measure
from torchring.bench.gpu.kernels import LISTS, Shapes
from torchring.bench.gpu.timing import Case, Row, microseconds
from torchring.default_world import default_world
from torchring.gradients.bucket import Bucket
from torchring.gradients.packing import DevicePacking, UnreadGradients
from torchring.gradients.plan import ParameterSpec, build_plan

_SIZES: Final = [1 << 10, 64 << 10, *(mib << 20 for mib in (1, 4, 8, 12, 16, 25, 32, 64, 128, 256))]
_BUCKET_BYTES: Final = 25 << 20
_SMALL_BYTES: Final = 1 << 20
_CALLS_IF_SMALL: Final = 10
_NUM_ROUNDS: Final = 200
_NUM_WARMUPS: Final = 8
_ROUNDS_BETWEEN_WAITS: Final = 8  # a round queues about ten operations, and the queue of a stream takes a thousand
_SCALE: Final = 0.5
_PHASES: Final = ("arrive", "pack", "reduce", "land")
_API_CALL: Final = re.compile(r"cu(da)?[A-Z]\w+")
_LAUNCH: Final = re.compile(r"cu(da)?LaunchKernel\w*")


# Host time of a bucket


def bucket_shapes() -> dict[str, Shapes]:
    """The shapes in each bucket: 25 MiB from the middle of GPT-2, and 20 small tensors."""
    shapes = LISTS["gpt2"]()
    chosen: Shapes = []
    for shape in shapes[len(shapes) // 2 :]:
        if 4 * sum(each.numel() for each in chosen) >= _BUCKET_BYTES:
            break
        chosen.append(shape)
    return {"gpt2 25 MiB": chosen, "20 small": [torch.Size([1000])] * 20}


def host_times() -> Iterator[Case]:
    """Host time of a bucket by phase, and the number of launches and CUDA calls.

    The world has one rank, so kernels do everything except wait for other ranks. Phases: "arrive" is the hooks of all
    parameters except the last, "pack" is the hook of the last parameter, "reduce" is the launch of the reduction, and
    "land" is the wait for the reduction and unpacking.
    """
    torchring.init()
    for load, shapes in bucket_shapes().items():
        for algorithm in ("direct", "ring"):
            for compression, moves in ((None, False), ("bf16", False), (None, True)):
                about = {"load": load, "algorithm": algorithm, "compression": compression, "addresses_change": moves}
                yield about, functools.partial(_time_bucket, shapes, algorithm, compression, moves=moves)


def _time_bucket(shapes: Shapes, algorithm: str, compression: str | None, *, moves: bool) -> Row:
    one = OneBucket.open(shapes, algorithm, compression)
    try:
        return one.measure(moves=moves)
    finally:
        one.all_reduce.close()


@dataclass
class OneBucket:
    """A bucket with its all-reduce. Gradients are set by hand instead of by autograd.

    Attributes:
        grads: two sets of gradients, at different addresses.
        originals: the initial values of the gradients: whole numbers whose halves are exact in bf16.
    """

    accelerator: Accelerator
    all_reduce: OnStream
    bucket: Bucket
    grads: list[list[Tensor]]
    originals: list[list[Tensor]]

    @staticmethod
    def open(shapes: Shapes, algorithm: str, compression: str | None) -> OneBucket:
        accelerator = _accelerator()
        device = accelerator.device
        parameters = [torch.nn.Parameter(torch.zeros(shape, device=device)) for shape in shapes]
        specs = [
            ParameterSpec(f"p{i}", tuple(p.shape), p.stride(), p.dtype, p.device, False)
            for i, p in enumerate(parameters)
        ]
        plan = build_plan(specs, bucket_bytes=1 << 40, first_bucket_bytes=1 << 40, compression=compression).buckets[0]
        all_reduce, _ = open_on_device(default_world(), algorithm, "auto", [(plan.numel, plan.wire_dtype)], accelerator)
        wire = all_reduce.open_wires([(plan.numel, plan.wire_dtype)])[0]

        stream, unread = accelerator.open_stream(), UnreadGradients(accelerator)

        def packing(scale: float) -> DevicePacking:  # as `DeviceAgreement` does
            place = wire.buffer, wire.found_in_inputs
            return DevicePacking(
                scale, plan, *place, stream, accelerator, reduction_stream=all_reduce.stream, unread=unread
            )

        bucket = Bucket(plan, wire, specs, parameters, scale=_SCALE, packing=packing)
        grads = [[torch.randint(-99, 100, p.shape, device=device).float() for p in bucket.parameters] for _ in "ab"]
        return OneBucket(accelerator, all_reduce, bucket, grads, [[grad.clone() for grad in one] for one in grads])

    def measure(self, *, moves: bool) -> Row:
        """Run and time many rounds.

        moves: whether each round has gradients at other addresses than the round before, as zero_grad() may cause.
        """
        times: dict[str, list[float]] = {phase: [] for phase in _PHASES}
        self.check()
        for number in range(_NUM_ROUNDS):
            taken = self.round(number % 2 if moves else 0)
            if number >= _NUM_WARMUPS:
                for phase, seconds in zip(_PHASES, taken, strict=True):
                    times[phase].append(seconds)
            if number % _ROUNDS_BETWEEN_WAITS == 0:
                self.accelerator.synchronize()
        self.check()
        times["total"] = [sum(parts) for parts in zip(*(times[phase] for phase in _PHASES[1:]), strict=True)]
        calls, on_device = count_calls(lambda: self.round(0))
        plan = self.bucket.plan
        return {
            "tensors": len(plan.slots),
            "bytes": plan.num_bytes,
            "us": {phase: microseconds(seconds) for phase, seconds in times.items()},
            "launches": sum(count for name, count in calls.items() if _LAUNCH.fullmatch(name)),
            "api_calls": calls,
            "on_device": on_device,
        }

    def round(self, chosen: int) -> tuple[float, float, float, float]:
        """Run one round with the chosen set of gradients. Returns the host's seconds for each phase."""
        bucket, all_reduce = self.bucket, self.all_reduce
        for parameter, grad in zip(bucket.parameters, self.grads[chosen], strict=True):
            parameter.grad = grad
        last = len(bucket.parameters) - 1
        begin = time.perf_counter()
        for slot in range(last):
            bucket.mark_ready(slot)
        arrived = time.perf_counter()
        bucket.mark_ready(last)
        packed = time.perf_counter()
        bucket.begin_reduce()
        assert isinstance(bucket.wire, DeviceWire)
        pending = all_reduce.start(bucket.wire, scale=bucket.reduce_scale)
        started = time.perf_counter()
        bucket.end_reduce(pending.wait())
        landed = time.perf_counter()
        bucket.close_round()
        all_reduce.take_started()
        assert isinstance(bucket.packing, DevicePacking)
        bucket.packing.take_packed()
        return arrived - begin, packed - arrived, started - packed, landed - started

    def check(self) -> None:
        """Run a round with each set of gradients. Raises RuntimeError unless all gradients are halved."""
        for chosen, (grads, originals) in enumerate(zip(self.grads, self.originals, strict=True)):
            for grad, original in zip(grads, originals, strict=True):
                grad.copy_(original)
            self.round(chosen)
            self.accelerator.synchronize()
            for parameter, original in zip(self.bucket.parameters, originals, strict=True):
                if parameter.grad is None or not torch.equal(parameter.grad, original * _SCALE):
                    raise RuntimeError("a bucket returned wrong gradients")


def count_calls(work: Callable[[], object]) -> tuple[dict[str, int], dict[str, int]]:
    """Profile `work`. Returns two counts by name: the host's calls of CUDA functions, and what ran on the device."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    events = profiler.events() or []
    calls = Counter(event.name for event in events if _API_CALL.fullmatch(event.name))
    on_device = Counter(
        event.name
        for event in events
        if event.device_type != DeviceType.CPU and not event.name.startswith("torchring.")
    )
    return dict(calls), dict(on_device)


# All-reduce by size


def all_reduces(algorithm: str) -> Iterator[Case]:
    """Collective: a case for each size in bytes."""
    world = default_world()
    wires = [(max(_SIZES) // 4, torch.float32)]
    all_reduce, choice = open_on_device(world, algorithm, "auto", wires, _accelerator())
    for size in _SIZES:
        about = {"algorithm": all_reduce.algorithm, "ranks": world.size, "size": size, "reason": choice.reason}
        about["shares_one_gpu"] = world.size > torch.cuda.device_count()
        yield about, functools.partial(_time_all_reduce, all_reduce, size // 4)
    torchring.barrier()
    all_reduce.close()


def _time_all_reduce(all_reduce: OnStream, numel: int) -> Row:
    """Time on the host, from a barrier until the device is done. One result is checked bit for bit."""
    world = default_world()
    wire: DeviceWire = all_reduce.open_wires([(numel, torch.float32)])[0]
    pattern = torch.arange(numel, dtype=torch.float32, device=torchring.device()).remainder_(251)
    source = pattern + world.rank
    calls = _CALLS_IF_SMALL if 4 * numel <= _SMALL_BYTES else 1

    def reduce(scale: float) -> None:
        all_reduce.stream.follow()
        all_reduce.start(wire, scale=scale).wait()

    def turn() -> None:
        for _ in range(calls):
            reduce(1 / world.size)
        torch.cuda.synchronize()
        all_reduce.take_started()

    def prepare(name: str = "") -> None:
        wire.buffer.copy_(source)
        torch.cuda.synchronize()

    prepare()
    reduce(1.0)
    torch.cuda.synchronize()
    is_right = torch.equal(wire.buffer, pattern * world.size + sum(range(world.size)))
    if wrong := [rank for rank, right in enumerate(torchring.all_gather_object(is_right)) if not right]:
        raise RuntimeError(f"the result is wrong on ranks {wrong}")
    spread = measure.take_turns({"all": turn}, prepare=prepare, warmups=1, seconds=1.0, most=30)["all"]
    us = {key: 1e3 * getattr(spread, key) / calls for key in ("p20", "p50", "p80")}
    bus = 4 * numel / us["p50"] / 1e3 * 2 * (world.size - 1) / world.size
    return {"us": us | {"repetitions": spread.repetitions}, "bus_gb_per_s": bus}


def _accelerator() -> Accelerator:
    accelerator = accelerator_of(torchring.device())
    assert accelerator is not None
    return accelerator
