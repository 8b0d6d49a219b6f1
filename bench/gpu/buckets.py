"""Sections of `torchring bench gpu` about buckets: host time of a bucket, and all-reduce by size."""

from __future__ import annotations

import functools
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd import DeviceType  # type: ignore[attr-defined]
from torch.profiler import ProfilerActivity

import torchring
from torchring.accelerators import Accelerator, accelerator_of
from torchring.allreduce.device.select import open_on_device
from torchring.allreduce.device.stream import DeviceWire, OnStream
from torchring.bench import measure
from torchring.bench.gpu import models
from torchring.bench.gpu.models import Shapes
from torchring.bench.gpu.timing import NO_TIME, spreads
from torchring.default_world import default_world
from torchring.gradients.bucket import Bucket
from torchring.gradients.packing import DevicePacking
from torchring.gradients.plan import ParameterSpec, build_plan
from torchring.gradients.unread import UnreadGradients
from torchring.world import World

Row = dict[str, Any]
BUCKET_BYTES: Final = 25 << 20
SMALL_BYTES: Final = 1 << 20
CALLS_IF_SMALL: Final = 10
_ROUNDS_BETWEEN_WAITS: Final = 8  # a round queues about ten operations, and the queue of a stream takes a thousand
_SCALE: Final = 0.5
_PHASES: Final = ("arrive", "pack", "reduce", "land")
_API_CALL: Final = re.compile(r"cu(da)?[A-Z]\w+")
_LAUNCH: Final = re.compile(r"cu(da)?LaunchKernel\w*")


# Host time of a bucket


def bucket_loads(*, is_dry: bool) -> dict[str, Shapes]:
    """The shapes in each bucket: 25 MiB from the middle of GPT-2, and 20 small tensors."""
    small = [torch.Size([1000])] * 20
    if is_dry:
        return {"20 small": [torch.Size([8])] * 2}
    shapes = models.LISTS["gpt2"]()
    begin, num_bytes = len(shapes) // 2, 0
    chosen: Shapes = []
    for shape in shapes[begin:]:
        if num_bytes >= BUCKET_BYTES:
            break
        chosen.append(shape)
        num_bytes += 4 * shape.numel()
    return {"gpt2 25 MiB": chosen, "20 small": small}


def host_times(device: torch.device, *, is_dry: bool, until: float, most: int) -> Iterator[Row]:
    """A row for each bucket, algorithm and wire dtype: host time by phase, and the number of launches and CUDA calls.

    The world has one rank, so kernels do everything except wait for other ranks. Phases: "arrive" is the hooks of all
    parameters except the last, "pack" is the hook of the last parameter, "reduce" is the launch of the reduction, and
    "land" is the wait for the reduction and unpacking.
    """
    torchring.init()
    world, accelerator = default_world(), _accelerator(device)
    configurations = [
        (load, algorithm, compression, moves)
        for load in bucket_loads(is_dry=is_dry)
        for algorithm in ("direct", "ring")
        for compression, moves in ((None, False), ("bf16", False), (None, True))
    ]
    for i, (load, algorithm, compression, moves) in enumerate(configurations):
        row: Row = {"section": "bucket", "load": load, "algorithm": algorithm, "compression": compression}
        row["addresses_change"] = moves
        now = time.monotonic()
        try:
            one = OneBucket.open(world, accelerator, bucket_loads(is_dry=is_dry)[load], algorithm, compression)
            limit = now + (until - now) / (len(configurations) - i)
            yield row | one.measure(moves=moves, until=limit, most=most)
            one.mover.close()
        except (RuntimeError, TypeError, ValueError, AssertionError) as error:
            yield row | {"problem": f"{type(error).__name__}: {error}"}


@dataclass
class OneBucket:
    """A bucket with its mover. Gradients are set by hand instead of by autograd.

    Attributes:
        grads: two sets of gradients, at different addresses.
        originals: the initial values of the gradients: whole numbers whose halves are exact in bf16.
    """

    accelerator: Accelerator
    mover: OnStream
    bucket: Bucket
    grads: list[list[Tensor]]
    originals: list[list[Tensor]]

    @staticmethod
    def open(
        world: World, accelerator: Accelerator, shapes: Shapes, algorithm: str, compression: str | None
    ) -> OneBucket:
        device = accelerator.device
        parameters = [torch.nn.Parameter(torch.zeros(shape, device=device)) for shape in shapes]
        specs = [
            ParameterSpec(f"p{i}", tuple(p.shape), p.stride(), p.dtype, p.device, False)
            for i, p in enumerate(parameters)
        ]
        plan = build_plan(specs, bucket_bytes=1 << 40, first_bucket_bytes=1 << 40, compression=compression).buckets[0]
        mover, _ = open_on_device(world, algorithm, "auto", [(plan.numel, plan.wire_dtype)], accelerator)
        wire = mover.open_wires([(plan.numel, plan.wire_dtype)])[0]

        stream, unread = accelerator.open_stream(), UnreadGradients(accelerator)

        def packing(scale: float) -> DevicePacking:  # as `DeviceRounds` does
            place = wire.buffer, wire.found_in_inputs
            return DevicePacking(scale, plan, *place, stream, accelerator, reduction_stream=mover.stream, unread=unread)

        bucket = Bucket(plan, wire, specs, parameters, scale=_SCALE, packing=packing)
        grads = [[torch.randint(-99, 100, p.shape, device=device).float() for p in bucket.parameters] for _ in "ab"]
        return OneBucket(accelerator, mover, bucket, grads, [[grad.clone() for grad in one] for one in grads])

    def measure(self, *, moves: bool, until: float, most: int) -> Row:
        """Run and time many rounds. Returns the part of a row that holds the measurements.

        moves: whether each round has gradients at other addresses than the round before, as zero_grad() may cause.
        """
        times: dict[str, list[float]] = {phase: [] for phase in _PHASES}
        self.check()
        for repetition in range(-1, most):
            for turn in range(min(most, _ROUNDS_BETWEEN_WAITS)):
                taken = self.round(turn % 2 if moves else 0)
                if repetition >= 0:
                    for phase, seconds in zip(_PHASES, taken, strict=True):
                        times[phase].append(seconds)
            self.accelerator.synchronize()
            if repetition >= 2 and time.monotonic() > until:
                break
        self.check()
        totals = [sum(parts) for parts in zip(*(times[phase] for phase in _PHASES[1:]), strict=True)]
        calls, on_device = count_calls(lambda: self.round(0), self.accelerator)
        plan = self.bucket.plan
        return {
            "tensors": len(plan.slots),
            "bytes": plan.num_bytes,
            "ms": spreads(times | {"total": totals}),
            "launches": sum(count for name, count in calls.items() if _LAUNCH.fullmatch(name)),
            "api_calls": calls,
            "on_device": on_device,
            "is_checked": True,
        }

    def round(self, chosen: int) -> tuple[float, float, float, float]:
        """Run one round with the chosen set of gradients. Returns the host's seconds for each phase."""
        bucket, mover = self.bucket, self.mover
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
        pending = mover.start(bucket.wire, scale=bucket.reduce_scale)
        started = time.perf_counter()
        bucket.end_reduce(pending.wait())
        landed = time.perf_counter()
        bucket.close_round()
        mover.take_started()
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


def count_calls(work: Callable[[], object], accelerator: Accelerator) -> tuple[dict[str, int], dict[str, int]]:
    """Profile `work`. Returns two counts by name: the host's calls of CUDA functions, and what ran on the device."""
    activities = [ProfilerActivity.CPU]
    if accelerator.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    accelerator.synchronize()
    with torch.profiler.profile(activities=activities) as profiler:
        work()
        accelerator.synchronize()
    events = profiler.events() or []
    calls = Counter(event.name for event in events if _API_CALL.fullmatch(event.name))
    on_device = Counter(
        event.name
        for event in events
        if event.device_type != DeviceType.CPU and not event.name.startswith("torchring.")
    )
    return dict(calls), dict(on_device)


# All-reduce by size


def all_reduces(
    device: torch.device, algorithm: str, sizes: Sequence[int], *, until: float, most: int
) -> Iterator[Row]:
    """Collective. Yields a row for each size in bytes.

    Times are measured on the host, from a barrier until the device is done. For each size one result is checked bit for
    bit, with whole numbers.
    """
    world, accelerator = default_world(), _accelerator(device)
    mover, choice = open_on_device(world, algorithm, "auto", [(max(sizes) // 4, torch.float32)], accelerator)
    for i, size in enumerate(sizes):
        row: Row = {"section": "allreduce", "algorithm": mover.algorithm, "ranks": world.size, "size": size}
        row |= {"shares_one_gpu": shares_one_gpu(world, device), "reason": choice.reason}
        now = time.monotonic()
        if torchring.broadcast_object(now > until):
            yield row | {"problem": NO_TIME}
            continue
        seconds = (until - now) / (len(sizes) - i)
        yield row | _time_all_reduce(world, accelerator, mover, size // 4, seconds, most)
    torchring.barrier()
    mover.close()


def _time_all_reduce(
    world: World, accelerator: Accelerator, mover: OnStream, numel: int, seconds: float, most: int
) -> Row:
    wire: DeviceWire = mover.open_wires([(numel, torch.float32)])[0]
    pattern = torch.arange(numel, dtype=torch.float32, device=accelerator.device).remainder_(251)
    source = pattern + world.rank
    expected = pattern * world.size + sum(range(world.size))
    wire.buffer.copy_(source)
    mover.stream.follow()
    mover.start(wire).wait()
    accelerator.synchronize()
    is_right = torch.equal(wire.buffer, expected)
    wrong = [rank for rank, right in enumerate(torchring.all_gather_object(is_right)) if not right]
    if wrong:
        return {"problem": f"the result is wrong on ranks {wrong}"}
    calls = min(CALLS_IF_SMALL, most) if 4 * numel <= SMALL_BYTES else 1

    def turn() -> None:
        for _ in range(calls):
            mover.stream.follow()
            mover.start(wire, scale=1 / world.size).wait()
        accelerator.synchronize()
        mover.take_started()

    def prepare(name: str) -> None:
        wire.buffer.copy_(source)
        accelerator.synchronize()

    spread = measure.take_turns({"all": turn}, prepare=prepare, warmups=1, seconds=seconds, most=most)["all"]
    times = {key: value / calls for key, value in vars(spread).items() if key != "repetitions"}
    bus = 4 * numel / (times["p50"] / 1e3) / 1e9 * 2 * (world.size - 1) / world.size
    return {"ms": times | {"repetitions": spread.repetitions}, "bus_gb_per_s": bus, "is_checked": True}


def shares_one_gpu(world: World, device: torch.device) -> bool:
    """Whether there are fewer GPUs than ranks, so that ranks take turns on a GPU."""
    return world.size > 1 and (device.type != "cuda" or torch.cuda.device_count() < world.size)


@functools.cache
def _accelerator(device: torch.device) -> Accelerator:
    accelerator = accelerator_of(device)
    assert accelerator is not None, f"there is no accelerator for {device}"
    return accelerator
