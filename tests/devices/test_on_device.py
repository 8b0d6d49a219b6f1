"""Training with gradients on a device that is fake: its streams are as late as allowed, its kernels interpreted.

What a scenario returns is the same on all ranks.
"""

import functools
import math
import re
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import FrameType
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import torchring
import torchring.horovod as hvd
from tests.collectives import test_collectives
from tests.compression import test_hosts
from tests.horovod import test_collectives as horovod
from tests.optimizer.test_semantics import CASES
from tests.participants import test_buffers
from tests.support import fake_device, scripts
from tests.support.adasum import assert_adasum
from tests.support.checks import assert_bitwise, assert_within_rounding, digest, exact_inputs, logged
from tests.support.fake_device import COMPUTE, FakeAccelerator, FakeMark
from tests.support.scenarios import Scenarios, device
from tests.support.training import Script, Side, assert_as_one_process, attempt, loss_on, momentum, small_model
from torchring import accelerators
from torchring.default_world import default_world
from torchring.devices.collectives import DeviceCollectives, of_script
from torchring.devices.packing import DevicePacking
from torchring.errors import TopologyError
from torchring.gradients import views
from torchring.gradients.group import OptimizerGroup
from torchring.horovod.context import engine
from torchring.memory import host as host_module
from torchring.participants import noise

_SMALL_MB = 400 / 2**20  # two or three buckets of the models here
_SHAPES = ((), (7,), (0, 3), (40, 3), (2, 3, 2, 2), (65,))
_STEPS = 2  # the first shows in which order gradients come, the second is laid out so

pytestmark = pytest.mark.sim
scenario = Scenarios(__name__)


# ---- exact sums, by every algorithm


class Case(NamedTuple):
    """How to reduce, and the hosts that the ranks believe to be on."""

    algorithm: str
    compression: str | None = None
    op: str = "mean"
    hosts: tuple[int, ...] = (0, 0)
    mode: str = "late"
    overlap: str = "auto"
    dtype: torch.dtype = torch.float32


_CASES = [
    Case("direct"),
    Case("direct", "fp16"),
    Case("direct", "bf16", "sum"),
    Case("direct", mode="eager"),
    Case("direct", "fp16", overlap="inline", dtype=torch.float64),
    Case("ring", "fp16", "sum"),
    Case("native", "bf16", "sum", dtype=torch.bfloat16),
    Case("native", hosts=(0, 1)),
    Case("hierarchical", "bf16", hosts=(0, 1)),
    Case("direct", hosts=(0, 0, 0)),
    Case("ring", "fp16", "sum", hosts=(0, 0, 0)),
    Case("native", "fp16", "sum", hosts=(0, 1, 2)),
    Case("hierarchical", op="sum", hosts=(0, 0, 1)),
    Case("hierarchical", "fp16", "sum", hosts=(0, 1, 1)),
]


def _gradient(rank: int, step: int, index: int, dtype: torch.dtype) -> Tensor:
    """Whole numbers, so that their sums and halves are exact in 16 bits, too."""
    shape = torch.Size(_SHAPES[index])
    gradient = exact_inputs(shape.numel(), dtype, rank + 7 * step + 3 * index).reshape(shape)
    return gradient.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else gradient


def _parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(3)
    tensors = [torch.randint(-9, 9, shape, generator=generator).to(dtype) for shape in _SHAPES]
    return [nn.Parameter(t.contiguous(memory_format=torch.channels_last) if t.dim() == 4 else t) for t in tensors]


@scenario(_CASES, size=lambda case: len(case.hosts), smoke=[Case("direct", "fp16")])
def test_ranks_reduce_exactly(case: Case, rank: int) -> str:
    size = len(case.hosts)
    host_module._host_identity = lambda: f"host {case.hosts[rank]}"
    with device(case.mode):
        parameters = _parameters(case.dtype)
        sgd = torch.optim.SGD(parameters, lr=2.0**-6)
        options = {"algorithm": case.algorithm, "compression": case.compression, "op": case.op}
        optimizer = torchring.wrap(sgd, bucket_mb=_SMALL_MB, overlap=case.overlap, **options)
        for step in range(_STEPS):
            optimizer.zero_grad(set_to_none=step != 1)
            terms = [(p * _gradient(rank, step, i, case.dtype)).sum() for i, p in enumerate(parameters)]
            torch.stack(terms).sum().backward()
            for index, parameter in enumerate(parameters):
                parts = torch.stack([_gradient(r, step, index, torch.float64) for r in range(size)])
                expected = parts.sum(0) if case.op == "sum" else parts.mean(0)
                assert parameter.grad is not None
                if case.op == "sum" or size == 2:
                    assert_bitwise(parameter.grad, expected.to(case.dtype), f"step {step}, parameter {index}")
                else:
                    assert_within_rounding(parameter.grad, expected, parts.abs().mean(0), size, case.dtype)
            optimizer.step()
        optimizer.synchronize()
        stats = optimizer.stats()
        assert (stats.algorithm, stats.num_reductions) == (case.algorithm, _STEPS)
        assert stats.overlap == ("inline" if case.overlap == "inline" else "stream")
        assert stats.num_buckets > 1
        assert stats.communication_ms > 0
        return digest(parameters)


@scenario([*test_hosts.CASES, "hierarchical"], size=lambda name: 3 if name == "hierarchical" else 2)
def test_int8_between_hosts_as_on_the_cpu(name: str, rank: int) -> str:
    host_module._host_identity = lambda: f"host {rank if name != 'hierarchical' else rank // 2}"
    step, options = test_hosts.CASES.get(name, test_hosts.CASES["plain"])
    train = functools.partial(test_hosts._train, rank, "int8", step, **options)
    expected, cpu = train()
    with device():
        found, stats = train()
    way = (expected - test_hosts._weights(test_hosts._model())).norm()
    assert (found - expected).norm() <= 6e-4 * way  # some codes are off by one. Compression moves weights by 17e-4.
    assert stats.reason.endswith("; compressed by int8 between hosts")
    assert stats.num_skipped_steps == cpu.num_skipped_steps
    assert stats.compression_error == pytest.approx(cpu.compression_error, rel=1e-3, abs=1e-6)
    for refused in ("powersgd", torchring.ddp_hook(None, print), mock.Mock(torchring.compression.Compressor)):
        with device(), pytest.raises(ValueError, match="takes gradients on the CPU; on a GPU, compression='int8'"):
            _wrapped(compression=refused)
    return digest(found)


def test_the_comparison_can_fail() -> None:
    """The ranks' own gradients differ from each other and from the mean."""
    own = [_gradient(rank, 0, 1, torch.float32) for rank in range(2)]
    for gradient in own:
        with pytest.raises(AssertionError):
            assert_bitwise(gradient, torch.stack(own).mean(0))


# ---- what holds on the CPU, against one process that does the work of both ranks


@dataclass(frozen=True)
class DeviceSide(Side):
    """A rank whose parameters are on the fake device."""

    def wrap(self, optimizer: torch.optim.Optimizer, model: nn.Module | None = None, **options: Any) -> Any:
        return super().wrap(optimizer, model, **{**options, "bucket_mb": _SMALL_MB})


class OneOnCpu(DeviceSide):
    """The parameters of the second optimizer are on the CPU."""

    def wrap(self, optimizer: torch.optim.Optimizer, model: nn.Module | None = None, **options: Any) -> Any:
        of_cpu = {torch.device("cpu"): None} if default_world().shared(OptimizerGroup).reducers else {}
        with mock.patch.dict(accelerators._open, of_cpu):
            return super().wrap(optimizer, model, **options)


def _of_cpu(about: str, name: str) -> tuple[Script, tuple[Any, ...]]:
    script, *args = CASES[about][name]
    return script, tuple(args)


Scripts = Mapping[str, tuple[Script, tuple[Any, ...], float]]
_SCRIPTS: Scripts = {
    **scripts.ON_DEVICES,
    **dict.fromkeys(("two models", "two models, one on the CPU"), (*_of_cpu("several", "models"), 1e-9)),
    "own gradients": (*_of_cpu("gradients of the script", "with other strides"), 1e-9),
    "own gradients, bf16": (*_of_cpu("in 16 bits", "gradients of the script"), 2e-2),
    "number, empty, strided": (scripts.of_kind, ("number, empty, strided", {}), 1e-9),
}


def check_script(scripts: Scripts, results: list[Any], name: str) -> None:
    script, args, tolerance = scripts[name]
    assert_as_one_process(script, *args, tolerance=tolerance, run=lambda *_: results)


def run_script(scripts: Scripts, name: str, side: Side) -> Sequence[Any]:
    script, args, _ = scripts[name]
    stream = "another" if "side stream" in name else COMPUTE
    # Where GradScaler asks the host whether to step: a fused optimizer's kernels decide.
    not_waiting = mock.patch.object(torch.amp.GradScaler, "_maybe_opt_step") if "fused" in name else nullcontext()
    with device() as accelerator, accelerator.on_stream(stream), not_waiting:
        return script(side, *args)


_SMOKE = ["unused on some ranks", "no_sync", "kept gradients", "own gradients, bf16"]


@scenario(_SCRIPTS, check=functools.partial(check_script, _SCRIPTS), smoke=_SMOKE)
def test_what_holds_on_the_cpu_holds_on_a_device(name: str, rank: int) -> Sequence[Any]:
    return run_script(_SCRIPTS, name, (OneOnCpu if "CPU" in name else DeviceSide)((rank,), True))


@scenario()
def test_the_same_bits_as_on_the_cpu_without_waiting(rank: int) -> str:
    def train(accelerator: FakeAccelerator | None) -> str:
        model = small_model(torch.float32)
        optimizer = torchring.wrap(momentum(model), model, bucket_mb=_SMALL_MB, algorithm="direct")
        for step in range(4):
            optimizer.zero_grad()
            loss_on(model, rank, step).backward()
            optimizer.step()
            if accelerator is not None:
                assert step < 2 or accelerator.calls["synchronize"] == 0, "the plan is settled"
                accelerator.calls.clear()
        optimizer.close()
        return digest(model.parameters())

    on_cpu = train(None)
    with device() as accelerator:
        assert train(accelerator) == on_cpu
    return on_cpu


@scenario(["direct", "native"])
def test_buffers_follow_all_ranks(algorithm: str, rank: int) -> str:
    with device():
        buffers = test_buffers.train_norms(rank, 2, {"algorithm": algorithm, "bucket_mb": _SMALL_MB}, skips=(1,))
    test_buffers.check_norms([buffers], test_buffers.expected_norms(2, "mean", skips=(1,)))
    return digest(buffers.values())


# ---- the lateness


def _model_of_singles() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))


def _wrapped(**options: Any) -> tuple[nn.Sequential, Any]:
    model = _model_of_singles()
    return model, torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.01), model, **options)


def _steps(rank: int, model: nn.Module, optimizer: Any, steps: Sequence[int]) -> None:
    for step in steps:
        optimizer.zero_grad()
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank + 100 * step))
        model(x).square().mean().backward()
        optimizer.step()


@scenario()
def test_gradients_are_kept_until_they_are_packed(rank: int) -> None:
    """How many are alive beside the wires. Each is a bucket of its own."""
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(5)))
    arrived: list[weakref.ref[Tensor]] = []
    alive: list[int] = []

    def note(p: Tensor) -> None:
        assert p.grad is not None
        arrived.append(weakref.ref(p.grad))
        alive.append(sum(gradient() is not None for gradient in arrived))

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(note)
    with device():
        optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, bucket_mb=256 / 2**20)
        _steps(rank, model, optimizer, range(4))
        assert optimizer.stats().num_buckets == 5
        assert alive[-5:] == [1] * 5
        assert not any(gradient() is not None for gradient in arrived)


def _of_two_streams(accelerator: FakeAccelerator) -> str:
    """What a backward raises whose second gradient of three is another stream's. They are packed together."""
    parameters = first, second, _ = [nn.Parameter(torch.ones(4)) for _ in range(3)]
    optimizer = torchring.wrap(torch.optim.SGD(parameters, lr=0.1))
    for parameter, stream in ((second, "another"), (first, COMPUTE)):
        parameter.register_hook(lambda gradient, to=stream: setattr(accelerator, "current", to) or gradient * 2.0)
    problem = attempt(lambda: torch.stack([parameter.sum() for parameter in parameters]).sum().backward())
    return problem or str([optimizer.stats().num_reductions, accelerator.calls["join"], accelerator.races])


@scenario(smoke=[""])
def test_a_missing_event_is_noticed(rank: int) -> None:
    """So are tests that would not see one."""
    for mode in ("late", "eager"):
        with FakeAccelerator(mode).installed() as accelerator, mock.patch.object(DevicePacking, "finish_packing"):
            model, optimizer = _wrapped()
            assert attempt(functools.partial(_steps, rank, model, optimizer, [0])).startswith("Race")
            assert accelerator.races
        attempt(torchring.shutdown)  # which does what is left, and finds more
    with FakeAccelerator().installed() as accelerator:
        assert _of_two_streams(accelerator) == "[1, 1, []]"
    torchring.shutdown()
    with FakeAccelerator().installed() as accelerator, mock.patch.object(FakeAccelerator, "join"):
        assert _of_two_streams(accelerator).startswith("Race")
    attempt(torchring.shutdown)
    with FakeAccelerator().installed() as accelerator, mock.patch.object(FakeMark, "hold_current"):
        weight = nn.Parameter(torch.ones(4))
        optimizer = torchring.wrap(torch.optim.SGD([weight], lr=1.0))
        (weight * (rank + 1.0)).sum().backward()
        assert weight.grad.tolist() != [1.5] * 4, "the mean was there without waiting for it"
        optimizer.step()
        assert attempt(accelerator.synchronize).startswith("Race")
        attempt(torchring.shutdown)


# ---- what the host's time goes into

_MOST_FRAMES = {"a bucket": 62.0, "a parameter": 1.0}  # these numbers only fall


@scenario()
def test_the_host_does_little_for_a_bucket(rank: int) -> None:
    """Python frames of torchring in a backward, without those of kernels, which are interpreted here."""

    def num_frames(num_parameters: int, num_buckets: int) -> int:
        with FakeAccelerator("lazy").installed() as accelerator:
            parameters = [nn.Parameter(torch.zeros(16)) for _ in range(num_parameters)]
            sgd = torch.optim.SGD(parameters, lr=0.0)
            optimizer = torchring.wrap(sgd, bucket_mb=num_parameters // num_buckets * 64 / 2**20, algorithm="direct")
            frames: list[str] = []

            def note(frame: FrameType, event: str, _: Any) -> None:
                if event == "call" and re.search(r"/torchring/(devices|gradients)/", frame.f_code.co_filename):
                    frames.append(frame.f_code.co_name)

            for step in range(18):
                optimizer.zero_grad()
                losses, ones = [p * 2.0 for p in parameters], [torch.ones(16) for _ in parameters]
                sys.setprofile(note if step == 17 else None)
                torch.autograd.backward(losses, ones)
                sys.setprofile(None)
                optimizer.step()
                accelerator.synchronize()
            assert optimizer.stats().num_buckets == num_buckets
        torchring.shutdown()
        return len(frames)

    few = num_frames(24, 2)
    found = {"a bucket": (num_frames(24, 6) - few) / 4, "a parameter": (num_frames(48, 2) - few) / 24}
    assert all(round(found[what], 1) <= most for what, most in _MOST_FRAMES.items()), found


# ---- values that are not finite


class Bad(NamedTuple):
    """A gradient that is not finite on rank 1, or whose sum over ranks is not, in step 2; how it is reduced."""

    algorithm: str
    value: float
    compression: str | None = None
    dtype: torch.dtype = torch.float32
    in_place: bool = False
    aborts: bool = False


_BAD = [
    Bad("direct", torch.nan),
    Bad("direct", torch.nan, aborts=True),
    Bad("direct", torch.inf, in_place=True),
    Bad("direct", 4e4, "fp16"),
    Bad("direct", 3e38, in_place=True),
    Bad("ring", torch.nan, "bf16"),
    Bad("ring", 3e38),
    Bad("native", torch.nan),
    Bad("native", torch.inf, dtype=torch.bfloat16, in_place=True),
    Bad("native", 3e38, in_place=True),
    Bad("hierarchical", torch.inf, "fp16"),
    Bad("hierarchical", 3e38),
]


@scenario(_BAD, smoke=_BAD[:1])
def test_a_gradient_that_is_not_finite_is_told_to_all_ranks(bad: Bad, rank: int) -> int:
    """Also one that only the sum has made so; in the wire or not; by all algorithms; after an aborted backward."""
    if bad.algorithm == "hierarchical":
        host_module._host_identity = lambda: f"host {rank}"
    with FakeAccelerator("lazy" if bad.aborts else "late").installed():
        model = _model_of_singles().to(bad.dtype)
        layer, x = model[2] if bad.aborts else model[1], torch.ones(1, 8, dtype=bad.dtype)
        options = {"algorithm": bad.algorithm, "compression": bad.compression, "op": "sum"}
        options |= {"bucket_mb": _SMALL_MB} if bad.aborts else {}
        optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.01), model, **options)

        def take_step() -> None:
            model(x).sum().backward()
            optimizer.step()

        for step in range(8):
            optimizer.zero_grad(set_to_none=not bad.in_place)
            if bad.aborts and step == 2:
                attempt(lambda: model[1:](scripts.Raises.apply(model[0](x))).sum().backward())
                optimizer.zero_grad()
            factor = bad.value if step == 2 and (math.isfinite(bad.value) or rank == 1) else 1.0
            handle = layer.weight.register_hook(lambda gradient, factor=factor: torch.full_like(gradient, factor))
            problem = attempt(take_step)
            handle.remove()
            if problem:
                break
        assert 2 < step <= 5
        assert problem.startswith("GradientError"), problem
        assert ("2.weight" if bad.aborts else "1.weight") in problem, problem
        of_sum = "does not fit fp16" if bad.compression == "fp16" else "overflowed"
        assert (f"the sum over ranks {of_sum}" if math.isfinite(bad.value) else "rank 1") in problem, problem
    return step


@scenario()
def test_a_nan_in_a_bucket_that_is_packed_in_two_goes(rank: int) -> None:
    """In step 2, where another gradient, put there by hand, does not arrive."""
    with device():
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
                break
    assert step == 3
    assert problem.startswith("GradientError: the gradient of group0.param1 is not finite"), problem
    assert "rank 1" in problem


@scenario()
def test_a_step_that_the_script_leaves_out_is_no_error(rank: int) -> str:
    """As under a GradScaler: training goes on; until there is a NaN in step 5 that is stepped on, elsewhere."""
    with device():
        model, optimizer = _wrapped(bucket_mb=_SMALL_MB)
        skipped, problem, trained = [], "", ""
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
                break
        assert skipped == [2]
        # What was found in the step that was left out does not hide what comes later.
        assert problem.startswith("GradientError: the gradient of 0.weight is not finite"), problem
        return trained


@scenario()
def test_a_step_that_torchring_leaves_out(rank: int) -> str:
    """By on_nonfinite="skip": in the very step, although the device is late."""
    with device():
        model, optimizer = _wrapped(bucket_mb=_SMALL_MB, on_nonfinite="skip")
        for step in range(6):
            before = digest(model.parameters())
            optimizer.zero_grad()
            loss = model(torch.ones(1, 8)).sum()
            if step in (2, 3) and rank == 1:
                loss = loss + model[step].weight[0, 0] * torch.nan
            loss.backward()
            optimizer.step()
            assert (digest(model.parameters()) == before) == (step in (2, 3))
        assert optimizer.stats().num_skipped_steps == 2
        refused = attempt(lambda: torchring.join(optimizer).__enter__())
        assert refused == 'ValueError: torchring.join() does not work with on_nonfinite="skip" on a GPU'
        return digest(model.parameters())


@scenario()
def test_what_the_host_looks_at_comes_late_and_is_right(rank: int) -> Any:
    """Equal batches on all ranks, and a noise scale from gradients that never change."""
    with device() as accelerator, logged() as lines, mock.patch.object(noise, "_LEAST_SAMPLES", 2):
        model = nn.Linear(4, 2)
        optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.0), model, noise_scale=True)
        for step in range(60):
            optimizer.zero_grad()
            inputs = torch.randn(4, 4, generator=torch.Generator().manual_seed(step if step < 20 else rank))
            model(inputs).square().mean().backward()
            optimizer.step()
            accelerator.synchronize()
        stats = optimizer.stats()
    assert len(lines) == rank
    assert all("ranks 0, 1 got the same batch in each of the last 8 steps" in line for line in lines)
    assert stats.batch_size == 8
    assert stats.noise_scale is not None
    assert 0 < stats.noise_scale < math.inf
    return stats.noise_scale


# ---- refusals, and what else may happen


@scenario()
def test_capture_into_a_graph_is_refused(rank: int) -> str:
    with device() as accelerator:
        model, optimizer = _wrapped()
        _steps(rank, model, optimizer, [0])
        accelerator.capturing = True
        problem = attempt(lambda: _steps(rank, model, optimizer, [1]))
        for async_op in (False, True):
            with pytest.raises(ValueError, match="CUDA graph"):
                torchring.all_reduce(torch.ones(1), async_op=async_op)  # type: ignore[call-overload]
        accelerator.capturing = False
        _steps(rank, model, optimizer, [2, 3])
        assert re.match(r"GradientError.*CUDA graph.*make_graphed_callables", problem), problem
        return digest(model.parameters())


@scenario()
def test_another_default_device(rank: int) -> str:
    """On which nothing could be computed. A profiler shows what is done."""
    model, x = _model_of_singles(), torch.ones(1, 8)
    torch.set_default_device("meta")
    try:
        with device(), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, compression="fp16")
            for _ in range(3):
                optimizer.zero_grad()
                model(x * (rank + 1)).square().mean().backward()
                optimizer.step()
    finally:
        torch.set_default_device(None)
    shown = " ".join(event.name for event in profile.events() or ())
    assert all(f"torchring.{what} bucket 0" in shown for what in ("pack", "direct", "unpack"))
    return digest(model.parameters())


@scenario()
def test_what_an_aborted_reduction_leaves_in_grad(rank: int) -> None:
    """This rank's own gradient; or NaN, if it was packed into the buffer that others may have written to since.

    The backward fails on all ranks after its first buckets had left; nobody zeroes the gradients.
    """
    with device() as accelerator:
        model, optimizer = _wrapped(bucket_mb=_SMALL_MB)
        x = torch.ones(1, 8) * (rank + 1)
        for set_to_none in (True, False):
            _steps(rank, model, optimizer, range(2))
            optimizer.zero_grad(set_to_none=set_to_none)
            attempt(lambda: model[1:](scripts.Raises.apply(model[0](x))).sum().backward())
            local = torch.autograd.grad(model(x).sum(), list(model.parameters())[2:])
            left = [p.grad for p in model.parameters()][2:]
            kept = [torch.equal(mine, theirs) for mine, theirs in zip(left, local, strict=True)]
            nan = [bool(mine.isnan().all()) for mine in left]
            assert all(a or b for a, b in zip(kept, nan, strict=True))
            assert any(kept)
            assert any(nan)
            optimizer.zero_grad()
            accelerator.synchronize()


@scenario(["zeroed", "kept", "kept by name", "the optimizer is kept", "failed"])
def test_memory_of_an_earlier_world_is_given_back(what: str, rank: int) -> None:
    """Whatever of it a script keeps: peers that have died leave their memory mapped here."""
    parts: list[StorageWeakRef] = []
    kept: list[Any] = []
    allocate = fake_device._Group.allocate

    def noted(group: Any, num_bytes: int) -> Any:
        block = allocate(group, num_bytes)
        parts.extend(StorageWeakRef(part.untyped_storage()) for part in block.parts)
        return block

    def use(model: nn.Module, optimizer: Any) -> None:
        for step in range(3):
            optimizer.zero_grad(set_to_none=what != "zeroed")
            x = model[0](torch.full((1, 8), 1.0 + rank + step))
            loss = model[1:](scripts.Raises.apply(x) if what == "failed" and rank else x).sum()
            attempt(loss.backward)
            if "kept" in what:
                kept.append(optimizer if "optimizer" in what else [p.grad for p in model.parameters()])
        attempt(optimizer.step)
        if what == "kept by name":
            model.zero_grad()

    # The CPU keeps the memory for numpy's arrays. GPUs do not.
    moved = mock.patch.object(views, "_copy", lambda view, wire: view.clone().untyped_storage())
    with mock.patch.object(fake_device._Group, "allocate", noted), moved:
        with device():
            model, optimizer = _wrapped(bucket_mb=_SMALL_MB)
            use(model, optimizer)
            before = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
            del optimizer
            torchring.shutdown()
        with device():
            torchring.init(timeout_seconds=20.0)
            num_old = len(parts)
            _wrapped()
            assert num_old >= 6, "pads, and wires of two layouts"
            assert all(part.expired() for part in parts[:num_old])
    for p, then in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(p.grad, then, rtol=0.0, atol=0.0, equal_nan=True)


# ---- collectives of scripts, and Horovod's


def _horovods(*checks: Callable[[int, int], None]) -> Callable[[int, int], None]:
    def run(rank: int, size: int) -> None:
        hvd.init()
        for check in checks:
            check(rank, size)
        assert _has_opened(engine()._planes[0].devices)
        hvd.shutdown()
        torchring.init()

    return run


def _has_opened(devices: DeviceCollectives) -> bool:
    return [opened is not None for opened in devices._opened.values()] == [True]


def _adasum(rank: int, size: int) -> None:
    parts = [torch.randn(3, 5, generator=torch.Generator().manual_seed(r)) for r in range(size)]
    assert_adasum(torchring.all_reduce(parts[rank].clone(), "adasum"), parts)


# Where something goes through the CPU on another thread, "eager": the stand-in cannot tell such a tensor from others.
_CALLS: dict[str, Callable[[int, int], Any]] = {
    "all_reduce, late": test_collectives._all_reduce,
    "broadcast, lazy": test_collectives._broadcast,
    "all_gather, late": test_collectives._all_gather,
    "strides, late": test_collectives._inputs_with_strides,
    "adasum, late": _adasum,
    "asynchronous, eager": test_collectives._asynchronous,
    "mismatches, late": test_collectives._mismatches,
    "Horovod's reductions, late": _horovods(horovod._reductions),
    "Horovod's others, eager": _horovods(horovod._results, horovod._handles, horovod._gradients),
}


@scenario(_CALLS, smoke=["strides, late", "Horovod's reductions, late"])
def test_collectives_do_what_they_do_on_the_cpu(case: str, rank: int) -> None:
    with device(case.split(", ")[1]):
        torchring.init(timeout_seconds=20.0)
        _CALLS[case](rank, 2)
        torchring.all_reduce(torch.ones(1))
        assert _has_opened(default_world().shared(of_script))


@scenario([False, True])
def test_the_host_does_not_wait_in_a_collective(async_op: bool, rank: int) -> None:
    """Nor does a stream, with `async_op`, until `Work.wait()`."""
    with device("lazy") as accelerator:
        torchring.all_reduce(torch.ones(1))
        accelerator.calls.clear()
        tensor = torch.full((3,), rank + 1.0)
        work: Any = torchring.all_reduce(tensor, "sum", async_op=async_op)
        if async_op:
            work._future.result()
            assert accelerator.calls["hold_current"] == 0
            assert work.wait() is tensor
        assert (accelerator.calls["synchronize"], accelerator.calls["hold_current"]) == (0, 1)
        assert any(stream.queue for stream in accelerator.streams), "nothing is done yet"
        assert_bitwise(tensor.clone(), torch.full((3,), 3.0))


@scenario()
def test_joined_ranks_contribute_zeros(rank: int) -> None:
    with device("eager"):
        hvd.init()
        if rank == 0:
            assert hvd.allreduce(torch.ones(2), op=hvd.Sum).tolist() == [1.0, 1.0]
        assert hvd.join() == 0
        assert _has_opened(engine()._planes[0].devices)
        hvd.shutdown()


@scenario()
def test_a_tensor_on_the_cpu_and_one_on_the_device(rank: int) -> None:
    """Also in the first call, in which only one rank would open anything."""
    for _ in range(2):
        with device() if rank else nullcontext():
            problem = attempt(lambda: torchring.broadcast(torch.ones(3)))
        assert re.match(r"PlanMismatchError.*broadcast\(src=0\) of float32 \[3\] (on cpu )?while", problem), problem
        with device():
            torchring.broadcast(torch.ones(3))


@scenario()
def test_what_goes_through_the_cpu_is_said_once(rank: int) -> None:
    with device() as accelerator, logged() as texts:
        for _ in range(2):
            assert len(torchring.all_gather(torch.ones(rank + 1))) == 3
            torchring.all_to_all(torch.ones(2))
            torchring.reduce_scatter(torch.ones(2))
        torchring.shutdown()
        accelerator.open_backend = mock.Mock(side_effect=TopologyError("two ranks on one GPU"))  # type: ignore[method-assign]
        test_collectives._broadcast(rank, 2)
        assert torchring.all_reduce(torch.full((2,), rank + 1.0), "sum").tolist() == [3.0, 3.0]
    found = [text.removeprefix("tensors on a GPU go through the CPU in ").split(",")[0] for text in texts]
    assert found == ([] if rank else ["all_gather", "all_to_all", "reduce_scatter", "collectives"])
    assert rank or texts[-1].endswith("two ranks on one GPU")
