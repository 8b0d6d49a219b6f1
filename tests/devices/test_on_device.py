"""Training with gradients on a device that is fake: its streams are as late as allowed, its kernels interpreted.

Scenarios run one after the other in the same few processes: each starts a world of its own, in 0.1 s, where an
interpreter that has read TRITON_INTERPRET=1 takes 4.
"""

from __future__ import annotations

import functools
import math
import re
import sys
import traceback
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import FrameType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import torchring
from tests import test_joining as test_join
from tests.gradients import test_weights
from tests.participants import test_buffers
from tests.support import scripts
from tests.support.checks import (
    assert_bitwise,
    assert_same_on_all_ranks,
    assert_within_rounding,
    digest,
    exact_inputs,
    logged,
)
from tests.support.fake_device import COMPUTE, FakeAccelerator, FakeMark, FakeStream
from tests.support.harness import run_ranks
from tests.support.training import Script, Side, assert_as_one_process, attempt, batch, momentum, small_model, values
from torchring.allreduce import choice
from torchring.devices import engines, opening
from torchring.devices.packing import DevicePacking
from torchring.gradients import plan as plan_module
from torchring.gradients.contract import Setup
from torchring.gradients.group import OptimizerGroup
from torchring.gradients.layout import Options
from torchring.gradients.reducer import Reducer
from torchring.kernels.lazy import Kernel
from torchring.memory import host as host_module
from torchring.rooms import participants
from torchring.world import World

_SMALL_MB = 400 / 2**20  # two or three buckets of the models here
_SHAPES = ((), (7,), (0, 3), (40, 3), (2, 3, 2, 2), (65,))
_STEPS = 2  # the first shows in which order gradients come, the second is laid out so

pytestmark = pytest.mark.sim


@dataclass(frozen=True)
class DeviceSide(Side):
    """A rank whose parameters are on the fake device."""

    def wrap(self, optimizer: torch.optim.Optimizer, model: nn.Module | None = None, **options: Any) -> Any:
        return super().wrap(optimizer, model, **{**options, "bucket_mb": _SMALL_MB})


@dataclass(frozen=True)
class Failure:
    """A scenario that raised on a rank."""

    text: str


# ---- exact sums, by every algorithm


@dataclass(frozen=True)
class Case:
    """How to reduce, and the hosts that the ranks believe to be on."""

    algorithm: str
    compression: str | None = None
    op: str = "mean"
    hosts: tuple[int, ...] = (0, 0, 0)
    mode: str = "late"
    overlap: str = "auto"
    dtype: torch.dtype = torch.float32

    def __str__(self) -> str:
        hosts = "" if len(set(self.hosts)) == 1 else f" on {len(set(self.hosts))} hosts"
        precision = f"{self.dtype} {self.compression or ''}".removeprefix("torch.").strip()
        return f"{self.algorithm}{hosts}, {precision}, {self.op}, {self.mode}, {self.overlap}"


_CASES = {
    2: [
        Case("direct"),
        Case("direct", "fp16"),
        Case("direct", "bf16", "sum", mode="thread"),
        Case("direct", mode="eager"),
        Case("direct", "fp16", overlap="inline"),
        Case("direct", "fp16", dtype=torch.float64),
        Case("ring", op="sum"),
        Case("ring", "fp16"),
        Case("native", "bf16", "sum"),
        Case("native", dtype=torch.bfloat16),
        Case("native", hosts=(0, 1)),
        Case("hierarchical", "bf16", hosts=(0, 1)),
    ],
    3: [
        Case("direct", op="sum"),
        Case("ring", "fp16", "sum"),
        Case("native", "fp16", "sum"),
        Case("native", op="sum", hosts=(0, 1, 2)),
        Case("hierarchical", op="sum", hosts=(0, 0, 1)),
        Case("hierarchical", "fp16", "sum", hosts=(0, 1, 1)),
        Case("direct"),
    ],
}


def _gradient(rank: int, step: int, index: int, dtype: torch.dtype) -> Tensor:
    """Whole numbers, so that their sums and halves are exact in 16 bits, too."""
    shape = torch.Size(_SHAPES[index])
    gradient = exact_inputs(shape.numel(), dtype, rank + 7 * step + 3 * index).reshape(shape)
    return gradient.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else gradient


def _parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    tensors = [torch.randint(-9, 9, shape, generator=generator).to(dtype) for shape in _SHAPES]
    return [nn.Parameter(t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t) for t in tensors]


def _train_exactly(rank: int, size: int, case: Case) -> dict[str, Any]:
    host_module._host_identity = lambda: f"host {case.hosts[rank]}"
    with FakeAccelerator(case.mode).installed() as accelerator:
        parameters = _parameters(case.dtype)
        sgd = torch.optim.SGD(parameters, lr=2.0**-6)
        options = {"algorithm": case.algorithm, "compression": case.compression, "op": case.op}
        optimizer = torchring.wrap(sgd, bucket_mb=_SMALL_MB, overlap=case.overlap, **options)
        gradients = []
        for step in range(_STEPS):
            optimizer.zero_grad(set_to_none=step != 1)
            terms = [(p * _gradient(rank, step, i, case.dtype)).sum() for i, p in enumerate(parameters)]
            torch.stack(terms).sum().backward()
            gradients.append([p.grad.clone() for p in parameters if p.grad is not None])
            optimizer.step()
        optimizer.synchronize()
        stats = optimizer.stats()
        return {
            "gradients": gradients, "parameters": digest(parameters), "races": accelerator.races,
            "algorithm": stats.algorithm, "overlap": stats.overlap, "buckets": stats.num_buckets,
            "ms": stats.communication_ms, "reductions": stats.num_reductions, "bytes": stats.bytes_per_step,
        }  # fmt: skip


# ---- what else happens in a training


def _as_on_the_cpu(rank: int, size: int) -> list[str]:
    """Digests of the parameters of a model of real numbers, trained on the CPU and on the device."""

    def train() -> str:
        model = small_model(torch.float32)
        optimizer = torchring.wrap(momentum(model), model, bucket_mb=_SMALL_MB, algorithm="direct")
        for step in range(4):
            optimizer.zero_grad()
            x, y = batch(rank, step, torch.float32)
            nn.functional.mse_loss(model(x), y).backward()
            optimizer.step()
        optimizer.close()
        return digest(model.parameters())

    on_cpu = train()
    with FakeAccelerator().installed():
        return [on_cpu, train()]


def _two_models(side: Side) -> Sequence[Any]:
    """Two optimizers that take turns; the second one's backward reaches the first model, too."""
    maker, judge = small_model(), small_model(seed=4)
    first, second = (side.wrap(torch.optim.Adam(m.parameters(), lr=0.02), m) for m in (maker, judge))
    for step in range(3):

        def judged(rank: int, step: int = step) -> Tensor:
            x, _ = batch(rank, step)
            return judge(torch.cat([maker(x), x[:, :2]], 1)).square().mean()

        for optimizer in (second, first):
            first.zero_grad()
            second.zero_grad()
            side.mean(judged).backward()
            optimizer.step()
    return [*values(maker), *values(judge)]


def _growing(side: Side) -> Sequence[Any]:
    """A layer that joins the optimizer after two steps."""
    model, late = small_model(), nn.Linear(2, 2).double()
    with torch.no_grad():
        for p in late.parameters():
            p.fill_(0.25)
    optimizer = side.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for step in range(4):
        if step == 2:
            optimizer.add_param_group({"params": list(late.parameters())})
        optimizer.zero_grad()
        side.mean(lambda rank, step=step: late(model(batch(rank, step)[0])).square().mean()).backward()
        optimizer.step()
    return [*values(model), *values(late)]


class _Strided(torch.autograd.Function):
    """Gradients as some operations make them: expanded, transposed."""

    @staticmethod
    def forward(ctx: Any, bias: Tensor, weight: Tensor, factor: float) -> Tensor:
        ctx.factor, ctx.shapes = factor, (bias.shape, weight.shape)
        return (bias.sum() + weight.sum()) * factor

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        bias, (rows, columns) = ctx.shapes
        numbers = torch.arange(rows * columns, dtype=gradient.dtype).view(columns, rows).t()
        return (gradient * ctx.factor).expand(bias), numbers * ctx.factor * gradient, None


def _strided_gradients(side: Side, options: dict[str, Any]) -> Sequence[Any]:
    bias, weight = nn.Parameter(torch.ones(17).double()), nn.Parameter(torch.ones(5, 3).double())
    optimizer = side.wrap(torch.optim.SGD([bias, weight], lr=0.125), **options)
    for _ in range(3):
        optimizer.zero_grad()
        side.mean(lambda rank: _Strided.apply(bias, weight, float(rank + 1))).backward()
        optimizer.step()
    return [bias.grad, weight.grad, bias.detach(), weight.detach()]


_SCRIPTS: dict[str, tuple[Script, tuple[Any, ...], float]] = {
    **scripts.ON_DEVICES,
    "two models": (_two_models, (), 1e-9),
    "growing": (_growing, (), 1e-9),
    "strided gradients, fp16": (_strided_gradients, ({"compression": "fp16"},), 1e-12),
}


def _on_device(rank: int, size: int, name: str) -> Sequence[Any]:
    script, args, _ = _SCRIPTS[name]
    stream = "another" if "side stream" in name else COMPUTE
    # Where GradScaler asks the host whether to step: a fused optimizer's kernels decide.
    not_waiting = mock.patch.object(torch.amp.GradScaler, "_maybe_opt_step") if "fused" in name else nullcontext()
    with FakeAccelerator().installed() as accelerator, accelerator.on_stream(stream), not_waiting:
        return script(DeviceSide((rank,), True), *args)


def _mixed(rank: int, size: int) -> list[Any]:
    with FakeAccelerator().installed():
        return scripts.mixed(rank, size, {"bucket_mb": _SMALL_MB, "compression": "fp16"})


# ---- the lateness


def _model_of_singles() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))


def _steps(rank: int, model: nn.Module, optimizer: Any, steps: Sequence[int], loss: Any = None) -> None:
    for step in steps:
        optimizer.zero_grad()
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank + 100 * step))
        (loss or (lambda out: out.square().mean()))(model(x)).backward()
        optimizer.step()


def _held(rank: int, size: int) -> dict[str, Any]:
    """Bytes of gradients that are alive beside the wires: at most, in backward; when buckets land; and afterwards."""
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(5)))
    local: list[tuple[weakref.ref[Tensor], int]] = []
    peaks: list[int] = []
    landing: list[int] = []
    do_until = FakeStream.do_until

    def alive() -> int:
        return sum(num_bytes for gradient, num_bytes in local if gradient() is not None)

    def arrived(p: Tensor) -> None:
        assert p.grad is not None
        local.append((weakref.ref(p.grad), p.grad.nbytes))
        peaks.append(alive())

    def landed(stream: FakeStream, mark: FakeMark) -> None:
        if not accelerator.is_executing and stream is accelerator.streams[0]:  # where buckets are reduced
            landing.append(alive())
        do_until(stream, mark)

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(arrived)
    with FakeAccelerator().installed() as accelerator, mock.patch.object(FakeStream, "do_until", landed):
        optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, bucket_mb=256 / 2**20)
        _steps(rank, model, optimizer, range(2))
        accelerator.calls.clear()
        _steps(rank, model, optimizer, range(2, 6))
        waited = accelerator.calls["synchronize"]
        optimizer.zero_grad()
        for noted in (local, peaks, landing):
            noted.clear()
        model(torch.ones(1, 8)).sum().backward()
        result = {"peak": max(peaks), "landing": landing, "after": alive(), "waited": waited}
        return {**result, "buckets": optimizer.stats().num_buckets, "races": accelerator.races}


def _of_two_streams(accelerator: FakeAccelerator) -> str:
    """What a backward raises whose second gradient of three is another stream's. They are packed together."""
    parameters = first, second, _ = [nn.Parameter(torch.ones(4)) for _ in range(3)]
    optimizer = torchring.wrap(torch.optim.SGD(parameters, lr=0.1))
    for parameter, stream in ((second, "another"), (first, COMPUTE)):
        parameter.register_hook(lambda gradient, to=stream: setattr(accelerator, "current", to) or gradient * 2.0)
    problem = attempt(lambda: torch.stack([parameter.sum() for parameter in parameters]).sum().backward())
    return problem or str([optimizer.stats().num_reductions, accelerator.calls["join"], accelerator.races])


def _broken(rank: int, size: int) -> dict[str, Any]:
    """What is noticed where an event is missing, and memory not kept."""
    found: dict[str, Any] = {}
    for mode in ("late", "eager"):
        with FakeAccelerator(mode).installed() as accelerator, mock.patch.object(DevicePacking, "finish_packing"):
            model = _model_of_singles()
            optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
            found[f"no follow, {mode}"] = attempt(functools.partial(_steps, rank, model, optimizer, [0]))
            found[f"no follow, {mode}, races"] = len(accelerator.races)
        torchring.shutdown()
    with FakeAccelerator().installed() as accelerator:
        found["join"] = _of_two_streams(accelerator)
    torchring.shutdown()
    with FakeAccelerator().installed() as accelerator, mock.patch.object(FakeAccelerator, "join"):
        found["no join"] = _of_two_streams(accelerator)
    torchring.shutdown()
    with FakeAccelerator().installed() as accelerator, mock.patch.object(FakeMark, "hold_current"):
        weight = nn.Parameter(torch.ones(4))
        optimizer = torchring.wrap(torch.optim.SGD([weight], lr=1.0))
        (weight * (rank + 1.0)).sum().backward()
        found["no hold"] = weight.tolist(), weight.grad.tolist()
        optimizer.step()
        found["no hold, races"] = attempt(accelerator.synchronize)
        attempt(torchring.shutdown)  # which does what is left, and finds more
    return found


# ---- what the host's time goes into


def _counts(rank: int, size: int) -> dict[str, float]:
    """CUDA's calls in a step, on average of 16, and Python frames of torchring in a backward. No kernel runs."""
    totals: dict[tuple[int, int], tuple[float, int]] = {}
    for num_parameters, num_buckets in ((24, 2), (24, 6), (48, 2)):
        with FakeAccelerator().installed() as accelerator:
            parameters = [nn.Parameter(torch.zeros(16)) for _ in range(num_parameters)]
            sgd = torch.optim.SGD(parameters, lr=0.0)
            optimizer = torchring.wrap(sgd, bucket_mb=num_parameters // num_buckets * 64 / 2**20, algorithm="direct")
            frames: list[str] = []

            def note(frame: FrameType, event: str, _: Any, frames: list[str] = frames) -> None:
                if event == "call" and re.search(r"/(devices|gradients|kernels)/\w+.py", frame.f_code.co_filename):
                    frames.append(frame.f_code.co_name)

            def step(profile: Any = None, optimizer: Any = optimizer, parameters: Any = parameters) -> None:
                optimizer.zero_grad()
                losses, ones = [p * 2.0 for p in parameters], [torch.ones(16) for _ in parameters]
                sys.setprofile(profile)
                try:
                    torch.autograd.backward(losses, ones)
                finally:
                    sys.setprofile(None)
                optimizer.step()
                accelerator.synchronize()

            with mock.patch.object(Kernel, "_run"):
                for _ in range(17):
                    step()
                accelerator.calls.clear()
                for _ in range(16):
                    step()
                num_calls = accelerator.num_cuda_calls / 16
                step(note)
            assert optimizer.stats().num_buckets == num_buckets
            totals[num_parameters, num_buckets] = num_calls, len(frames)
        torchring.shutdown()
    few, many_buckets, many_parameters = totals.values()
    a_bucket = (many_buckets[0] - few[0]) / 4
    return {
        "calls a bucket": a_bucket,
        "calls a step": few[0] - 2 * a_bucket,
        "frames a bucket": (many_buckets[1] - few[1]) / 4,
        "frames a parameter": (many_parameters[1] - few[1]) / 24,
    }


# ---- values that are not finite


@dataclass(frozen=True)
class Bad:
    """A gradient that is not finite on rank 1, or whose sum over ranks is not, in step 2; how it is reduced."""

    algorithm: str
    value: float
    compression: str | None = None
    dtype: torch.dtype = torch.float32
    in_place: bool = False
    aborts: bool = False

    def __str__(self) -> str:
        precision = f"{self.dtype} {self.compression or ''}".removeprefix("torch.").strip()
        place = ", in place" * self.in_place + ", after an aborted reduction" * self.aborts
        return f"{self.value:g}, {self.algorithm}, {precision}{place}"

    @property
    def is_finite(self) -> bool:
        """Whether only the sum is not."""
        return math.isfinite(self.value)


_BAD = [
    Bad("direct", torch.nan),
    Bad("direct", torch.nan, aborts=True),
    Bad("direct", torch.inf, in_place=True),
    Bad("direct", 4e4, "fp16"),
    Bad("direct", 3e38, in_place=True),
    Bad("ring", torch.nan, "bf16"),
    Bad("ring", torch.nan, in_place=True),
    Bad("ring", 3e38),
    Bad("native", torch.nan),
    Bad("native", torch.inf, dtype=torch.bfloat16, in_place=True),
    Bad("native", 3e38, dtype=torch.bfloat16),
    Bad("native", 3e38, in_place=True),
    Bad("hierarchical", torch.inf, "fp16"),
    Bad("hierarchical", torch.nan, in_place=True),
    Bad("hierarchical", 3e38),
]


def _not_finite(rank: int, size: int, bad: Bad) -> tuple[int, str]:
    """In which step an error comes, and its text. A backward may be aborted before the gradient comes."""
    if bad.algorithm == "hierarchical":
        host_module._host_identity = lambda: f"host {rank}"
    with FakeAccelerator("lazy" if bad.aborts else "late").installed():
        model = _model_of_singles().to(bad.dtype)
        layer, x = model[2] if bad.aborts else model[1], torch.ones(1, 8, dtype=bad.dtype)
        options = {"algorithm": bad.algorithm, "compression": bad.compression, "op": "sum"}
        options |= {"bucket_mb": _SMALL_MB} if bad.aborts else {}
        optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.01), model, **options)
        for step in range(8):
            optimizer.zero_grad(set_to_none=not bad.in_place)
            if bad.aborts and step == 2:
                attempt(lambda: model[1:](scripts.Raises.apply(model[0](x))).sum().backward())
                optimizer.zero_grad()
            factor = bad.value if step == 2 and (bad.is_finite or rank == 1) else 1.0
            handle = layer.weight.register_hook(lambda gradient, factor=factor: torch.full_like(gradient, factor))
            problem = attempt(lambda: _steps_one(model, optimizer, x))
            handle.remove()
            if problem:
                return step, problem
    return -1, ""


def _beside_a_stale_one(rank: int, size: int) -> tuple[int, str]:
    """In which step an error comes if a NaN arrives in step 2 where another gradient, put there by hand, does not."""
    with FakeAccelerator().installed():
        parameters = first, second, third = [nn.Parameter(torch.ones(4)) for _ in range(3)]
        optimizer = torchring.wrap(torch.optim.SGD(parameters, lr=0.1))
        for step in range(6):
            optimizer.zero_grad()
            loss = first.sum() + second.sum() * (torch.nan if rank == 1 and step == 2 else 1.0)
            if step == 2:
                third.grad = torch.ones(4)
            else:
                loss = loss + third.sum()
            loss.backward()
            if problem := attempt(optimizer.step):
                return step, problem
    return -1, ""


def _steps_one(model: nn.Module, optimizer: Any, x: Tensor) -> None:
    model(x).sum().backward()
    optimizer.step()


def _skipped(rank: int, size: int) -> list[Any]:
    """As under a GradScaler: a step whose gradients overflowed is left out, and training goes on; until there is a NaN
    in step 5 that is stepped on, in another parameter.
    """
    with FakeAccelerator().installed():
        model = _model_of_singles()
        optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.01), model, bucket_mb=_SMALL_MB)
        skipped = []
        for step in range(9):
            if step == 5:
                trained = digest(model.parameters())
                if rank == 1:
                    model[0].weight.register_hook(lambda gradient: gradient * torch.nan)
            optimizer.zero_grad()
            factor = torch.inf if rank == 1 and step == 2 else 1.0
            (model(torch.ones(1, 8)).sum() * factor).backward()
            if step < 5 and any(not bool(p.grad.isfinite().all()) for p in model.parameters() if p.grad is not None):
                skipped.append(step)
            elif problem := attempt(optimizer.step):
                return [skipped, trained, problem]
        return [skipped, trained, ""]


def _left_out(rank: int, size: int) -> list[Any]:
    """By on_nonfinite="skip": in the very step, although the device is late."""
    with FakeAccelerator().installed():
        model = _model_of_singles()
        sgd = torch.optim.SGD(model.parameters(), lr=0.01)
        optimizer = torchring.wrap(sgd, model, bucket_mb=_SMALL_MB, on_nonfinite="skip")
        changed = []
        for step in range(6):
            before = digest(model.parameters())
            optimizer.zero_grad()
            loss = model(torch.ones(1, 8)).sum()
            if step in (2, 3) and rank == 1:
                loss = loss + model[step].weight[0, 0] * torch.nan
            loss.backward()
            optimizer.step()
            changed.append(digest(model.parameters()) != before)
        return [changed, digest(model.parameters()), optimizer.stats().num_skipped_steps]


def _weighed(rank: int, size: int, compression: str | None) -> Any:
    """Weights, micro-steps, gradients in the wire buffer; ranks that skip."""
    with FakeAccelerator().installed() as accelerator:
        options = {"compression": compression, "bucket_mb": _SMALL_MB}
        weighed = test_weights._weighted(rank, size, 2, "no_sync", torch.float64, 1, options)
        skipped = test_weights._skipping(rank, size, True, options)
        return [*weighed, *skipped], accelerator.races


def _joined(rank: int, size: int) -> Any:
    with FakeAccelerator().installed() as accelerator:
        result = test_join._uneven(rank, size, 1, True, {"bucket_mb": _SMALL_MB})
        optimizer = torchring.wrap(torch.optim.SGD(small_model().parameters(), lr=0.1), on_nonfinite="skip")
        return result, attempt(lambda: torchring.join(optimizer).__enter__()), accelerator.races


def _running_statistics(rank: int, size: int, algorithm: str) -> Any:
    with FakeAccelerator().installed() as accelerator:
        options = {"algorithm": algorithm, "bucket_mb": _SMALL_MB}
        return test_buffers.train_norms(rank, size, options, skips=(1,)), accelerator.races


# ---- choices, refusals


def _choices(rank: int, size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, problem, options in (
        ("auto", "", {}),
        ("apart", "rank 0 cannot reach rank 1", {}),
        ("ring apart", "rank 0 cannot reach rank 1", {"algorithm": "ring"}),
        ("inline", "", {"overlap": "inline"}),
        ("direct apart", "rank 0 cannot reach rank 1", {"algorithm": "direct"}),
    ):
        with FakeAccelerator(problem=problem).installed():
            model = _model_of_singles()
            sgd = torch.optim.SGD(model.parameters(), lr=0.1)

            def train(model: nn.Module = model, sgd: Any = sgd, options: Any = options, name: str = name) -> None:
                optimizer = torchring.wrap(sgd, model, **options)
                _steps(rank, model, optimizer, range(3))
                found[name] = optimizer.stats()

            if problem := attempt(train):
                found[name] = problem
        torchring.shutdown()
    return found


_ONCE = {"_NUM_REPEATS": 1, "_NUM_WARM_UPS": 0, "_NUM_TURNS": 1}  # interpreted kernels take their time


def _measured(rank: int, size: int) -> Any:
    """What "auto" is on two hosts, of which one has two ranks."""
    host_module._host_identity = lambda: f"host {(0, 0, 1)[rank]}"
    with FakeAccelerator().installed(), mock.patch.multiple(opening, **_ONCE):
        model = _model_of_singles()
        optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
        _steps(rank, model, optimizer, range(2))
        return [optimizer.stats(), digest(model.parameters())]


def _half_open(rank: int, size: int) -> list[Any]:
    """As above; but on one rank of the second host, the backend between the hosts does not connect."""
    host_module._host_identity = lambda: f"host {(0, 0, 1)[rank]}"

    def connect(backend: Any, buffer: Tensor) -> None:
        engines.all_reduce(backend, buffer)
        if rank == 2 and backend.size() == 2:
            raise RuntimeError("NCCL: unhandled system error")

    found: list[Any] = []
    with FakeAccelerator().installed() as accelerator, mock.patch.object(opening, "all_reduce", connect):
        model = _model_of_singles()
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        found.append(attempt(lambda: torchring.wrap(sgd, model, algorithm="hierarchical")))
        optimizer = torchring.wrap(sgd, model)
        _steps(rank, model, optimizer, range(2))
        stats = optimizer.stats()
        return [*found, stats.algorithm, stats.reason, accelerator.calls["abort"], digest(model.parameters())]


def _fail_after(open_it: Callable[..., object], problem: Exception, *args: Any) -> None:
    open_it(*args)  # the fake's connects here, and other ranks wait for this one
    raise problem


def _measured_on_one_host(rank: int, size: int) -> list[Any]:
    """As among four GPUs or more: also with wires of 16 bits, and without NCCL on one rank or all."""
    found = []
    real = choice.seconds_together
    for problem, compression, seconds in (
        (None, None, {"direct": 2.0, "native": 1.0}),
        (None, None, {"direct": 1.0, "native": 2.0}),
        (AttributeError("no attribute 'ProcessGroupNCCL'"), None, {}),
        (RuntimeError("Duplicate GPU") if rank == 1 else None, None, {}),
        (None, "bf16", {}),
    ):
        connections: list[int] = []

        def connect(backend: Any, buffer: Tensor, to: Any = connections) -> None:
            to.append(backend.size())
            engines.all_reduce(backend, buffer)

        turns: list[tuple[str, int]] = []

        def time_together(
            world: World, all_reduce: Any, wires: Any, wait: Any, told: Any = seconds, at: Any = turns
        ) -> float:
            at.append((all_reduce.algorithm, sum(wire.buffer.nbytes for wire in wires)))
            return told[all_reduce.algorithm] * real(world, all_reduce, wires, wait) ** 0

        with (
            FakeAccelerator().installed() as accelerator,
            mock.patch.multiple(opening, FEWEST_MEASURED=2, **_ONCE),
            mock.patch.object(plan_module, "_FEWEST_SHARING_GPUS", 2),
            mock.patch.object(choice, "seconds_together", time_together),
            mock.patch.object(opening, "all_reduce", connect),
        ):
            if problem is not None:
                accelerator.open_backend = functools.partial(_fail_after, accelerator.open_backend, problem)
            model = _model_of_singles()
            optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, compression=compression)
            asked = optimizer._sync.layout.bucket_bytes
            _steps(rank, model, optimizer, range(2))
            stats = optimizer.stats()
            found.append([stats.algorithm, stats.reason, asked, digest(model.parameters()), turns])
            found[-1] += [accelerator.races, [int(word) for word in accelerator.host_words], connections]
        torchring.shutdown()
    return found


def _captured(rank: int, size: int) -> list[Any]:
    """While a graph is captured, and afterwards."""
    with FakeAccelerator().installed() as accelerator:
        model = _model_of_singles()
        optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
        _steps(rank, model, optimizer, [0])
        accelerator.capturing = True
        problem = attempt(lambda: _steps(rank, model, optimizer, [1]))
        accelerator.capturing = False
        _steps(rank, model, optimizer, [2, 3])
        return [problem, digest(model.parameters())]


def _converted(rank: int, size: int) -> str:
    with FakeAccelerator().installed():
        model = _model_of_singles()
        optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
        _steps(rank, model, optimizer, [0])
        optimizer.zero_grad()
        model.double()
        return attempt(lambda: model(torch.ones(1, 8).double()).sum().backward())


def _elsewhere(rank: int, size: int) -> str:
    """With a default device that nothing could be computed on."""
    model, x = _model_of_singles(), torch.ones(1, 8)
    torch.set_default_device("meta")
    try:
        with FakeAccelerator().installed():
            optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, compression="fp16")
            for _ in range(3):
                optimizer.zero_grad()
                model(x * (rank + 1)).square().mean().backward()
                optimizer.step()
    finally:
        torch.set_default_device(None)
    return digest(model.parameters())


def _aborted_and_kept(rank: int, size: int) -> list[Any]:
    """A backward that fails on all ranks after its first buckets had left; nobody zeroes the gradients."""
    with FakeAccelerator().installed() as accelerator:
        model = _model_of_singles()
        optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.01), model, bucket_mb=_SMALL_MB)
        x = torch.ones(1, 8) * (rank + 1)
        found = []
        for set_to_none in (True, False):
            _steps(rank, model, optimizer, range(2))
            optimizer.zero_grad(set_to_none=set_to_none)
            attempt(lambda: model[1:](scripts.Raises.apply(model[0](x))).sum().backward())
            local = torch.autograd.grad(model(x).sum(), list(model.parameters())[2:])
            kept = [p.grad for p in model.parameters()][2:]
            found.append([torch.equal(mine, theirs) for mine, theirs in zip(kept, local, strict=True)])
            found.append([bool(mine.isnan().all()) for mine in kept])
            optimizer.zero_grad()
            accelerator.synchronize()
        return [found, accelerator.races]


def _alone(rank: int, size: int) -> list[Any]:
    """A world of one whose reductions are made all the same: gradients, and the algorithm."""
    found = []
    for algorithm in ("ring", "direct", "auto"):
        with FakeAccelerator().installed():
            world = World(None, 0, 1)
            parameters = [nn.Parameter(torch.zeros(70)), nn.Parameter(torch.zeros(3))]
            names = {p: f"p{i}" for i, p in enumerate(parameters)}
            options = Options("mean", "fp16", 25.0, 1, algorithm, "auto")
            owner, group = nn.Module(), world.shared(OptimizerGroup)
            sgd = torch.optim.SGD(parameters, lr=0.1)
            setup = Setup(world, sgd, None, names, set(), set(), options, None, False, group.owned, {})
            kinds, end_backward = participants(setup), group.end_backward
            reducer = Reducer(setup, group.reducers, kinds, end_backward=end_backward, owner=owner)
            for step in range(2):
                for p in parameters:
                    p.grad = None
                gradients = [torch.full_like(p, i + 1.0 + step) for i, p in enumerate(parameters)]
                torch.autograd.backward(parameters, gradients)
                reducer.has_stepped()
            means = [p.grad.unique().tolist() for p in parameters if p.grad is not None]
            found.append((means, reducer.layout.all_reduce.algorithm, reducer.reduction.heard.sums["odd_steps"]))
            world.close()
    return found


def _signals(rank: int, size: int) -> list[Any]:
    """Equal batches on all ranks, and a noise scale from gradients that never change: warnings, stats, races."""
    with FakeAccelerator().installed() as accelerator, logged() as lines:
        model = nn.Linear(4, 2)
        optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.0), model, noise_scale=True)
        for step in range(150):
            optimizer.zero_grad()
            batch = torch.randn(4, 4, generator=torch.Generator().manual_seed(step if step < 20 else rank))
            model(batch).square().mean().backward()
            optimizer.step()
            accelerator.synchronize()
        return [lines, optimizer.stats().noise_scale, optimizer.stats().batch_size, accelerator.races]


# ---- run them


def _attempts(rank: int, size: int, names: Sequence[str]) -> dict[str, Any]:
    """What each scenario gives on this rank, or its traceback."""
    results: dict[str, Any] = {}
    identity = host_module._host_identity
    for name in names:
        torch.manual_seed(rank)
        try:
            results[name] = _SCENARIOS[size][name](rank, size)
        except Exception:
            results[name] = Failure(traceback.format_exc())
        torchring.shutdown()
        host_module._host_identity = identity
    return results


Scenario = Callable[[int, int], Any]

_SCENARIOS: dict[int, dict[str, Scenario]] = {
    size: {str(case): functools.partial(_train_exactly, case=case) for case in cases} for size, cases in _CASES.items()
}
_SCENARIOS[3] |= {"measured": _measured, "half open": _half_open}
_SCENARIOS[2] |= {name: functools.partial(_on_device, name=name) for name in _SCRIPTS}
_SCENARIOS[2] |= {str(bad): functools.partial(_not_finite, bad=bad) for bad in _BAD}
_SCENARIOS[2] |= {
    "as on the CPU": _as_on_the_cpu,
    "mixed": _mixed,
    "held": _held,
    "counts": _counts,
    "broken": _broken,
    "NaN beside a stale gradient": _beside_a_stale_one,
    "skipped": _skipped,
    "left out": _left_out,
    "weighed": functools.partial(_weighed, compression=None),
    "joined": _joined,
    "running statistics": functools.partial(_running_statistics, algorithm="direct"),
    "running statistics, native": functools.partial(_running_statistics, algorithm="native"),
    "weighed, bf16": functools.partial(_weighed, compression="bf16"),
    "choices": _choices,
    "measured on one host": _measured_on_one_host,
    "captured": _captured,
    "converted": _converted,
    "elsewhere": _elsewhere,
    "aborted and kept": _aborted_and_kept,
    "alone": _alone,
    "signals": _signals,
}


_SMOKE = {
    "direct, float32 fp16, mean, late, auto", "unused on some ranks", "no_sync", "kept gradients", "broken",
    str(_BAD[0]),
}  # fmt: skip


def _tier(name: str) -> str:
    """Scenarios of a tier share a world: `make test` has few of them."""
    return "smoke" if name in _SMOKE else "sim"


def _marked(names: Iterable[object]) -> list[Any]:
    return [pytest.param(name, marks=getattr(pytest.mark, _tier(str(name)))) for name in names]


@functools.cache
def _results(size: int, tier: str) -> list[dict[str, Any]]:
    names = [name for name in _SCENARIOS[size] if _tier(name) == tier]
    return run_ranks(_attempts, size, names, env={"TRITON_INTERPRET": "1"}, deadline=150)


def results_of(name: str, size: int = 2) -> list[Any]:
    """Of one scenario, in rank order."""
    results = [of_rank[name] for of_rank in _results(size, _tier(name))]
    failures = [f"rank {rank}:\n{result.text}" for rank, result in enumerate(results) if isinstance(result, Failure)]
    assert not failures, "\n".join(failures)
    return results


@pytest.mark.parametrize(
    ("size", "case"),
    [
        pytest.param(size, case, marks=getattr(pytest.mark, _tier(str(case))))
        for size, cases in _CASES.items()
        for case in cases
    ],
    ids=str,
)
def test_every_algorithm_reduces_exactly(size: int, case: Case) -> None:
    results = results_of(str(case), size)
    assert_same_on_all_ranks([result["parameters"] for result in results])
    for rank, result in enumerate(results):
        assert result["races"] == []
        assert (result["algorithm"], result["reductions"]) == (case.algorithm, _STEPS)
        assert result["overlap"] == ("inline" if case.overlap == "inline" else "stream")
        assert result["buckets"] > 1
        assert result["ms"] > 0
        for step, gradients in enumerate(result["gradients"]):
            assert len(gradients) == len(_SHAPES)
            for index, gradient in enumerate(gradients):
                parts = torch.stack([_gradient(r, step, index, torch.float64) for r in range(size)])
                expected = parts.sum(0) if case.op == "sum" else parts.mean(0)
                what = f"rank {rank}, step {step}, parameter {index}"
                if case.op == "sum" or size == 2:
                    assert_bitwise(gradient, expected.to(case.dtype), what)
                else:
                    assert_within_rounding(gradient, expected, parts.abs().mean(0), size, case.dtype)


def test_the_comparison_can_fail() -> None:
    """The ranks' own gradients differ from each other and from the mean."""
    own = [_gradient(rank, 0, 1, torch.float32) for rank in range(2)]
    for gradient in own:
        with pytest.raises(AssertionError):
            assert_bitwise(gradient, torch.stack(own).mean(0))


@pytest.mark.parametrize("name", _marked(_SCRIPTS))
def test_what_holds_on_the_cpu_holds_on_a_device(name: str) -> None:
    """Scripts of optimizer/test_semantics.py, and some more, against one process that does the work of both ranks."""
    script, args, tolerance = _SCRIPTS[name]
    assert_as_one_process(script, *args, tolerance=tolerance, run=lambda *_: results_of(name))


def test_the_same_bits_as_on_the_cpu() -> None:
    results = results_of("as on the CPU")
    assert_same_on_all_ranks([trained for result in results for trained in result])


def test_parameters_of_several_dtypes() -> None:
    results = results_of("mixed")
    assert_same_on_all_ranks([trained for _, _, trained in results])
    for i, gradient in enumerate(results[0][1]):
        parts = torch.stack([local[i].double() / 2 for local, _, _ in results])
        assert gradient.dtype == results[0][0][i].dtype
        torch.testing.assert_close(gradient.double(), parts.sum(0), rtol=1e-2, atol=1e-3)


def test_gradients_are_kept_until_they_are_read_and_no_longer() -> None:
    """And in a step whose plan is settled, the host never waits. A bucket has the 256 bytes of one weight."""
    for result in results_of("held"):
        assert result["waited"] == 0
        assert result["buckets"] == 5
        assert result["peak"] == 256, "a bucket that fills"
        assert result["landing"] == [0], "what is packed is free; and there is one wait"
        assert result["after"] == 0, result
        assert result["races"] == []


# These numbers only fall. The goals were 10, 14, and 1 frame for a parameter.
_MOST = {"calls a bucket": 6.4, "calls a step": 7.4, "frames a bucket": 83.0, "frames a parameter": 1.0}


@pytest.mark.parametrize("what", _MOST)
def test_the_host_asks_little_of_the_device(what: str) -> None:
    for counted in results_of("counts"):
        assert round(counted[what], 1) <= _MOST[what], counted


@pytest.mark.smoke
def test_a_missing_event_is_noticed() -> None:
    """So are tests that would not see one."""
    for rank, found in enumerate(results_of("broken")):
        for mode in ("late", "eager"):
            assert found[f"no follow, {mode}"].startswith("Race"), found
            assert found[f"no follow, {mode}, races"] > 0
        assert found["join"] == "[1, 1, []]"
        assert found["no join"].startswith("Race"), found
        assert found["no hold"] != ([1.0] * 4, [1.5] * 4), "the mean was there without waiting for it"
        assert found["no hold, races"].startswith("Race"), (rank, found)


@pytest.mark.parametrize("bad", _marked(_BAD), ids=str)
def test_a_gradient_that_is_not_finite_is_told_to_all_ranks(bad: Bad) -> None:
    """Also one that only the sum has made so; in the wire or not; by all algorithms."""
    results = results_of(str(bad))
    assert len({step for step, _ in results}) == 1, results
    for step, problem in results:
        assert 2 < step <= 5, results
        assert problem.startswith("GradientError"), problem
        assert ("2.weight" if bad.aborts else "1.weight") in problem, problem
        from_sum = (
            "the sum over ranks does not fit fp16" if bad.compression == "fp16" else "the sum over ranks overflowed"
        )
        assert (from_sum if bad.is_finite else "rank 1") in problem, problem


def test_a_nan_in_a_bucket_that_is_packed_in_two_goes() -> None:
    for step, problem in results_of("NaN beside a stale gradient"):
        assert step == 3
        assert problem.startswith("GradientError: the gradient of group0.param1 is not finite"), problem
        assert "rank 1" in problem


def test_a_step_that_the_script_leaves_out_is_no_error() -> None:
    results = results_of("skipped")
    assert [skipped for skipped, _, _ in results] == [[2], [2]]
    assert_same_on_all_ranks([trained for _, trained, _ in results])
    for _, _, problem in results:  # what was found in the step that was left out does not hide what comes later
        assert problem.startswith("GradientError: the gradient of 0.weight is not finite"), problem


@pytest.mark.parametrize(("name", "tolerance"), [("weighed", 1e-9), ("weighed, bf16", 0.05)])
def test_weights_and_ranks_that_skip(name: str, tolerance: float) -> None:
    results = results_of(name)
    expected = [*test_weights._as_one(2, 2, torch.float64), *test_weights._skipping_as_one(2, True)]
    assert [races for _, races in results] == [[], []]
    for i, right in enumerate(expected):
        assert_same_on_all_ranks([parameters[i] for parameters, _ in results])
        torch.testing.assert_close(results[0][0][i], right, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["running statistics", "running statistics, native"])
def test_buffers_follow_all_ranks(name: str) -> None:
    results = results_of(name)
    assert [races for _, races in results] == [[], []]
    test_buffers.check_norms([buffers for buffers, _ in results], test_buffers.expected_norms(2, "mean", skips=(1,)))


def test_ranks_with_different_numbers_of_batches() -> None:
    results = results_of("joined")
    assert [races for *_, races in results] == [[], []]
    test_join._check([result for result, *_ in results], test_join._as_one(2, 1, True))
    for _, refused, _ in results:
        assert refused == 'ValueError: torchring.join() does not work with on_nonfinite="skip" on a GPU'


def test_a_step_that_torchring_leaves_out() -> None:
    results = results_of("left out")
    assert_same_on_all_ranks([trained for _, trained, _ in results])
    for changed, _, num_skipped in results:
        assert changed == [True, True, False, False, True, True]
        assert num_skipped == 2


def test_what_the_host_looks_at_comes_late_and_is_right() -> None:
    (quiet, scale, batch, first_races), (lines, *others, races) = results_of("signals")
    assert quiet == first_races == races == []
    assert len(lines) == 1
    assert "ranks 0, 1 got the same batch in each of the last 8 steps" in lines[0]
    assert others == [scale, batch]
    assert batch == 8
    assert scale is not None
    assert 0 < scale < math.inf


def test_auto_says_what_it_is_and_why() -> None:
    for found in results_of("choices"):
        assert (found["auto"].algorithm, found["auto"].overlap) == ("direct", "stream")
        assert "reach each other's memory" in found["auto"].reason
        assert found["apart"].algorithm == "native"
        assert "rank 0 cannot reach rank 1" in found["apart"].reason
        assert found["ring apart"].startswith("TopologyError: rank 0 cannot reach rank 1")
        assert (found["inline"].algorithm, found["inline"].overlap) == ("direct", "inline")
        assert found["direct apart"].startswith("TopologyError: rank 0 cannot reach rank 1")
        assert found["auto"].bytes_per_step > 4 * 4 * 72
        assert found["auto"].num_reductions == 3


def test_auto_measures_between_hosts_that_have_several_gpus() -> None:
    results = results_of("measured", 3)
    assert len({stats.reason for stats, _ in results}) == 1
    for stats, _ in results:
        assert stats.reason.startswith("ranks share memory within hosts; measured for buckets of ")
        assert "MiB: hierarchical " in stats.reason
        assert "native " in stats.reason
        assert stats.algorithm in ("hierarchical", "native")
    assert_same_on_all_ranks([trained for _, trained in results])


def test_auto_measures_what_several_gpus_of_one_host_can_do() -> None:
    """With the wires that will be reduced; and then the buckets have the size that suits the fastest."""
    by_rank = results_of("measured on one host")
    mib = 2**20
    expected = [
        ("native", 25 * mib, {"direct", "native"}),
        ("direct", 10 * mib, {"direct", "native"}),
        ("direct", 10 * mib, set()),
        ("direct", 10 * mib, set()),
        ("direct", 10 * mib, set()),
    ]
    for i, (algorithm, size, measured) in enumerate(expected):
        assert_same_on_all_ranks([found[i][3] for found in by_rank])
        assert len({found[i][1] for found in by_rank}) == 1
        for used, reason, bucket_bytes, _, turns, races, aborted, connections in (of[i] for of in by_rank):
            assert not any(aborted), "what was measured was no reduction that was aborted"
            assert (used, bucket_bytes, races) == (algorithm, size, []), reason
            assert {name for name, _ in turns} == measured
            assert len({num_bytes for _, num_bytes in turns}) <= 1, "all are given the same wires"
            assert ("measured for buckets of " in reason) == bool(measured), reason
            assert all(f"{name} " in reason.partition("MiB: ")[2] for name in measured), reason
            assert reason.endswith("ms, all with the same buckets") is (algorithm == "native"), reason
            assert connections == [2] * ("native" in measured), "nobody waits for a rank that has no backend"
            assert ("16-bit values are added in fp32" in reason) is (i == 4), reason
            assert ("the backend does not connect" in reason) is (i in (2, 3)), reason


def test_ranks_fall_back_together() -> None:
    """And refuse together what was asked for."""
    results = results_of("half open", 3)
    text = "torch.distributed's backend does not connect: NCCL: unhandled system error (rank 2 says so)"
    for rank, (problem, algorithm, reason, num_aborted, _) in enumerate(results):
        assert problem.startswith(f"TopologyError: {text}")
        assert (algorithm, reason) == ("native", f"hierarchical is not to be had: {text}")
        assert num_aborted == (0 if rank == 1 else 2), "the column of ranks 0 and 2, twice"
    assert_same_on_all_ranks([trained for *_, trained in results])


@pytest.mark.parametrize(
    ("sizes_mib", "expected"),
    [([], []), ([0], []), ([1], [1, 1, 1]), ([1, *[10] * 30], [10] * 3), ([200, *[10] * 25], [10, 10, 32])],
)
def test_wires_that_are_measured_stand_for_the_bytes_of_all(sizes_mib: list[int], expected: list[int]) -> None:
    """A wire of 200 MiB would take the memory of six candidates; what is true of 32 MiB is true of it."""
    sample = opening._sample([(size << 18, torch.float32) for size in sizes_mib])
    assert [numel >> 18 for numel, _ in sample] == expected


def test_capture_into_a_graph_is_refused() -> None:
    results = results_of("captured")
    for problem, _ in results:
        assert problem.startswith("GradientError")
        assert "CUDA graph" in problem
        assert "make_graphed_callables" in problem
    assert_same_on_all_ranks([trained for _, trained in results])


def test_a_model_that_was_converted_after_wrap_is_refused() -> None:
    for problem in results_of("converted"):
        assert problem.startswith("GradientError"), problem
        assert "is not what it was when it was wrapped" in problem


def test_another_default_device() -> None:
    assert_same_on_all_ranks(results_of("elsewhere"))


def test_what_an_aborted_reduction_leaves_in_grad() -> None:
    """This rank's own gradient; or NaN, if it was packed into the buffer that others may have written to since."""
    for (new, new_nan, in_place, in_place_nan), races in results_of("aborted and kept"):
        for kept, nan in ((new, new_nan), (in_place, in_place_nan)):
            assert all(a or b for a, b in zip(kept, nan, strict=True))
            assert any(kept)
            assert any(nan)
        assert races == []


def test_a_world_of_one_can_be_made_to_reduce() -> None:
    for found in results_of("alone"):
        assert [algorithm for _, algorithm, _ in found] == ["ring", "direct", "direct"]
        for gradients, _, odd_steps in found:
            assert gradients == [[2.0], [3.0]]
            assert odd_steps == 1
