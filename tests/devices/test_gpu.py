"""Training on a real GPU, which several ranks share: `test_on_device.py` has a stand-in, here is what may differ.

TORCHRING_EXPECT_GPU=1 python -m pytest -m gpu
"""

import functools
import math
import os
import signal
import time
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import torchring
import torchring.horovod as hvd
from tests.compression import test_hosts
from tests.support.checks import assert_bitwise, exact_inputs
from tests.support.commands import run_python
from tests.support.documents import ROOT
from tests.support.harness import ranks, run_ranks
from tests.support.scripts import ON_DEVICES
from tests.support.training import ShardedSide, Side, assert_as_one_process
from torchring.accelerators import accelerator_of
from torchring.collectives import operations
from torchring.collectives.service import Collectives
from torchring.compression.codec import Contents, Piece
from torchring.compression.on_device import BetweenHosts, Int8OnDevice
from torchring.devices import nccl
from torchring.devices.collectives import Aside, DeviceCollectives
from torchring.devices.cuda import CudaAccelerator
from torchring.devices.engines import Engine, all_reduce
from torchring.devices.opening import open_on_device
from torchring.devices.stream import OnStream
from torchring.devices.symmetric_memory import LonelyGroup
from torchring.errors import GradientError, PeerLostError
from torchring.functions import REDUCIBLE
from torchring.kernels.reference_quantize import decode_rows, quantize_rows
from torchring.memory import host as host_module
from torchring.world import World

pytestmark = pytest.mark.gpu

SHARED = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
DEADLINE = 120.0  # each rank starts CUDA and compiles or loads its kernels
on_gpu = ranks(2, start=run_ranks, env=SHARED, deadline=DEADLINE)


def make_model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    layers = [nn.Linear(300, 500), nn.ReLU(), nn.Linear(500, 501), nn.ReLU(), nn.Linear(501, 7)]
    return nn.Sequential(*layers).to("cuda")


def make_wrapped() -> tuple[nn.Module, Any]:
    model = make_model()
    return model, torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)


def batch(step: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    x = torch.randn(16, 300, generator=generator)
    return x.cuda(), torch.randint(7, (16,), generator=generator).cuda()


def loss_of(model: nn.Module, step: int, rank: int) -> Tensor:
    x, y = batch(step, rank)
    return nn.functional.cross_entropy(model(x), y)


# Each against one process that does the work of both ranks
_NEEDS_SWAP = pytest.mark.takes_2_12
_CASES = [pytest.param(name, False, id=name) for name in ON_DEVICES]
_CASES += [pytest.param(name, True, id=f"{name}, sharded", marks=_NEEDS_SWAP) for name in ON_DEVICES]


def run_on_gpu(side: Side, name: str) -> list[Any]:
    stream = torch.cuda.stream(torch.cuda.Stream()) if "side stream" in name else nullcontext()
    with torch.device("cuda"), stream:
        script, args, _ = ON_DEVICES[name]
        seen = script(side, *args)
        torch.cuda.synchronize()
        return [each.cpu() if isinstance(each, Tensor) else each for each in seen]


def run_scripts(rank: int, size: int, shard: bool) -> dict[str, Any]:
    """By name, what each gives, or its traceback."""
    results: dict[str, Any] = {}
    side = (ShardedSide if shard else Side)((rank,), True)
    for name in ON_DEVICES:
        try:
            torchring.init(timeout_seconds=20)  # a rank that fails leaves the other one waiting
            results[name] = run_on_gpu(side, name)
        except Exception:
            results[name] = traceback.format_exc()
        torchring.shutdown()
    return results


@functools.cache
def results_of_scripts(shard: bool) -> list[dict[str, Any]]:
    return run_ranks(run_scripts, 2, shard, env=SHARED, deadline=2 * DEADLINE)


@pytest.mark.timeout(3 * DEADLINE)  # the first one waits for all
@pytest.mark.parametrize(("name", "shard"), _CASES)
def test_scripts(name: str, shard: bool) -> None:
    results = [of_rank[name] for of_rank in results_of_scripts(shard)]
    failures = [result for result in results if isinstance(result, str)]
    assert not failures, "\n".join(failures)
    assert_as_one_process(run_on_gpu, name, tolerance=ON_DEVICES[name][2], run=lambda *_: results)


# Between hosts


class GlooOnCuda:
    """Takes NCCL's place among ranks that share a GPU, which NCCL refuses: Gloo adds up copies on the host.

    Like NCCL with asyncOp=False, `allreduce` returns None, and the current stream has the sums.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout_seconds: float) -> None:
        self._gloo = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=timeout_seconds))
        self.rank, self.size, self.shutdown = self._gloo.rank, self._gloo.size, self._gloo.shutdown

    def allreduce(self, tensors: Sequence[Tensor], options: Any) -> None:
        self._on_host(self._gloo.allreduce, tensors, options)

    def broadcast(self, tensors: Sequence[Tensor], options: Any) -> None:
        self._on_host(self._gloo.broadcast, tensors, options)

    def _on_host(self, collective: Any, tensors: Sequence[Tensor], options: Any) -> None:
        copies = [tensor.cpu() for tensor in tensors]
        collective(copies, options).wait()
        for tensor, copy in zip(tensors, copies, strict=True):
            tensor.copy_(copy)

    def _allgather_base(self, output: Tensor, own: Tensor, *options: Any, name: str = "_allgather_base") -> None:
        copy = output.cpu()
        getattr(self._gloo, name)(copy, own.cpu(), *options).wait()
        output.copy_(copy)

    alltoall_base = functools.partialmethod(_allgather_base, name="alltoall_base")


def pretend_hosts(rank: int, hosts: Sequence[int]) -> None:
    """Make the ranks believe that they are on several hosts."""
    host_module._host_identity = lambda: f"host {hosts[rank]}"
    CudaAccelerator.open_backend = lambda _, *args: GlooOnCuda(*args)  # type: ignore[assignment, method-assign]


def reduce_sizes(rank: int, size: int, algorithm: str, hosts: Sequence[int]) -> None:
    if algorithm not in ("direct", "ring"):
        pretend_hosts(rank, hosts)
    world = torchring.init()
    accelerator = accelerator_of(torch.device("cuda", 0))
    assert accelerator is not None
    all_reduce, _ = open_on_device(world, algorithm, "auto", [], accelerator)
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
        numels = [1, 63, 64, 1000, 70_001, 1_000_003]
        wires = all_reduce.open_wires([(numel, dtype) for numel in numels])
        for turn in range(3):
            inputs = [[exact_inputs(n, dtype, seed=r + turn) for n in numels] for r in range(size)]
            for wire, mine in zip(wires, inputs[rank], strict=True):
                wire.tensor.copy_(mine)
            all_reduce.stream.follow()
            pending = [all_reduce.start(wire) for wire in wires]
            for reduction, wire, parts in zip(pending, wires, zip(*inputs, strict=True), strict=True):
                reduction.wait()
                assert_bitwise(wire.tensor.cpu(), torch.stack(parts).double().sum(0).to(dtype), f"{dtype} {turn}")
    all_reduce.close()
    torchring.shutdown()


@pytest.mark.parametrize(
    ("algorithm", "hosts"),
    [
        *[(each, (0,) * size) for each in ("direct", "ring") for size in (1, 2, 3)],
        ("native", (0, 0)),
        ("native", (0, 1, 2)),
        ("hierarchical", (0, 0, 1, 1)),
    ],
)
def test_sums_are_exact(algorithm: str, hosts: Sequence[int]) -> None:
    run_ranks(reduce_sizes, len(hosts), algorithm, hosts, env=SHARED, deadline=DEADLINE)


def compress(rank: int, size: int, hosts: Sequence[int]) -> None:
    pretend_hosts(rank, hosts)
    with torch.device("cuda"):
        start, exact, found = (
            test_hosts._weights(test_hosts._model()),
            *(test_hosts._train(rank, kind)[0] for kind in (None, "int8")),
        )
    assert 0 < (found - exact).norm() < 0.01 * (exact - start).norm()
    torchring.shutdown()


@pytest.mark.parametrize("hosts", [(0, 1), (0, 0, 1, 1)])
def test_int8_between_hosts(hosts: Sequence[int]) -> None:
    run_ranks(compress, len(hosts), hosts, env=SHARED, deadline=DEADLINE)


@pytest.mark.parametrize("shard", [False, pytest.param(True, marks=_NEEDS_SWAP)])
@pytest.mark.parametrize("fused", [False, True])
@on_gpu
def test_no_step_waits_for_the_device(fused: bool, shard: bool, rank: int) -> None:
    """With a fused optimizer also under a GradScaler."""
    model = make_model()
    optimizer = torchring.wrap(torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused), model, shard=shard)
    scaler = torch.amp.GradScaler("cuda", enabled=fused)
    batches = [batch(step, rank) for step in range(12)]
    torch.cuda.synchronize()
    for step, (x, y) in enumerate(batches):
        if step == 3:  # the plan is rebuilt after the first, which allocates
            torch.cuda.set_sync_debug_mode("error")
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16, enabled=fused):
            loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    torch.cuda.set_sync_debug_mode("default")
    torchring.shutdown()


def test_synchronising_would_have_been_noticed() -> None:
    """The control of the last test."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        with pytest.raises(RuntimeError, match="synchroniz"):
            torch.ones(1, device="cuda").item()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@on_gpu
def test_gradients_are_kept_until_they_have_been_read(rank: int, world_size: int) -> None:
    """Gradients' memory is taken for something else as soon as the allocator gives it away."""
    model = make_model()
    reference = [p.detach().clone().double() for p in model.parameters()]
    optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.5), model, bucket_mb=0.1)
    used: list[Tensor] = []
    for p in model.parameters():  # in backward, too, when the gradients of earlier buckets are given away
        p.register_post_accumulate_grad_hook(lambda p: used.append(torch.full_like(p, math.nan)))
    for step in range(30):
        optimizer.zero_grad()
        used.clear()
        # Gradients of one value each, so that a single wrong element shows.
        factors = [(step + i) % 7 + 1 for i in range(len(reference))]
        terms = [(p * (rank + 1) * k).sum() for p, k in zip(model.parameters(), factors, strict=True)]
        torch.stack(terms).sum().backward()
        junk = [torch.full_like(p, math.nan) for p in model.parameters()]
        optimizer.step()
        for value, k in zip(reference, factors, strict=True):
            value -= 0.5 * k * sum(range(1, world_size + 1)) / world_size
        del junk
    for p, value in zip(model.parameters(), reference, strict=True):
        torch.testing.assert_close(p.detach().double(), value, rtol=1e-5, atol=1e-4)
    torchring.shutdown()


@on_gpu
def test_a_nan_is_traced_to_its_rank(rank: int) -> None:
    model, optimizer = make_wrapped()

    def take_step(step: int) -> None:
        optimizer.zero_grad()
        loss = loss_of(model, step, rank)
        if rank == 1 and step == 2:
            loss = loss + model[2].weight[3, 3] * math.nan
        loss.backward()
        optimizer.step()
        torch.cuda.synchronize()

    for step in range(3):
        take_step(step)
    with pytest.raises(GradientError, match=r"2\.weight.*rank 1"):
        list(map(take_step, range(3, 8)))
    torchring.shutdown()


@ranks(2, start=run_ranks, env=SHARED, deadline=DEADLINE, expect_exit={1: -signal.SIGKILL})
def test_a_dead_rank_is_named_while_the_device_waits(rank: int) -> None:
    model, optimizer = make_wrapped()
    started = 0.0

    def take_step(step: int) -> None:
        nonlocal started
        if rank == 1 and step == 5:
            os.kill(os.getpid(), signal.SIGKILL)
        started = time.monotonic()
        optimizer.zero_grad()
        loss = loss_of(model, step, rank)
        loss.backward()
        optimizer.step()
        loss.item()

    with pytest.raises(PeerLostError) as caught:
        list(map(take_step, range(200)))
    assert time.monotonic() - started < 20  # seconds; a deadline, not a measurement
    assert caught.value.peers == (1,)
    torch.cuda.synchronize()  # no kernel waits any more


@on_gpu
def test_a_script_that_ends_leaves_no_peer_behind(rank: int) -> None:
    """One rank ends right after its last step, without a word; its device has yet to do its part for the other."""
    model, optimizer = make_wrapped()
    for step in range(5):
        optimizer.zero_grad()
        loss = loss_of(model, step, rank)
        torch.cuda._sleep(200_000_000)  # cycles: a host well ahead of its device
        loss.backward()
        optimizer.step()
    if rank == 0:
        time.sleep(2.0)
        assert all(bool(p.isfinite().all()) for p in model.parameters())


@on_gpu
def test_collectives_for_scripts(rank: int, world_size: int) -> None:
    torchring.init()
    tensor = torch.arange(5, device="cuda", dtype=torch.float32) + rank
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(50_000_000)
        late = tensor * 2
        work = torchring.all_reduce(late, op="sum", async_op=True)
    assert_bitwise(work.wait().cpu(), (torch.arange(5) * 2 * world_size + 2 * sum(range(world_size))).float())
    assert torchring.all_gather(tensor).device == tensor.device
    assert_bitwise(torchring.broadcast(tensor, src=1).cpu(), torch.arange(5).float() + 1)
    assert torchring.device() == torch.device("cuda", torchring.local_rank() % torch.cuda.device_count())
    hvd.init()
    handles = [hvd.allreduce_async_(torch.full((3,), float(rank), device="cuda"), op=hvd.Sum) for _ in range(3)]
    assert [hvd.synchronize(handle).tolist() for handle in handles] == [[sum(range(world_size))] * 3] * 3
    hvd.shutdown()


def test_collectives_over_nccl_alone() -> None:
    """Of one rank: a result is what was given. The host does not wait, and what was aborted is NaN."""
    accelerator = accelerator_of(torch.device("cuda", 0))
    backend = accelerator.open_backend(dist.HashStore(), 0, 1, 30.0)
    engine = Engine("native", LonelyGroup(0, accelerator.device), accelerator, 1, backend)
    stream = OnStream(engine, World(None, 0, 1), in_background=True)
    devices = DeviceCollectives(Collectives(World(None, 0, 1)))
    devices._opened[(0,)] = stream
    for dtype in (*REDUCIBLE, torch.bool, torch.complex64):
        given = exact_inputs(1001, torch.int64, seed=1).to(dtype)
        tensor = given.cuda()
        for op in ("mean", "sum", "min", "max", "product") if dtype in REDUCIBLE else ():
            if op != "mean" or dtype.is_floating_point:
                operations.all_reduce(devices, tensor, op)
                assert_bitwise(tensor.cpu(), given, f"{op} {dtype}")
        assert_bitwise(torch.cat(operations.all_gather(devices, tensor)).cpu(), given, str(dtype))
        operations.broadcast(devices, tensor[1:], 0)
        assert_bitwise(tensor.cpu(), given, str(dtype))
    ones = torch.zeros(1001, device="cuda")
    for cycles, one in ((1, 0.0), (400_000_000, 1.0)):  # to load a kernel may take a device that is idle
        torch.cuda._sleep(cycles)
        ones += one
    operations.all_reduce(devices, ones, "max")
    aside = Aside(accelerator, [ones])
    (gathered,) = devices.run_aside([aside], operations.all_gather, devices, ones)
    assert not torch.cuda.current_stream().query(), "the host has not waited"
    aside.wait([gathered])
    assert_bitwise(gathered.cpu(), torch.ones(1001))
    rows, buffer = torch.randn(4, 256), torch.zeros(1024, device="cuda")
    codec = Int8OnDevice(
        Contents(0, buffer, [Piece("w", (4, 256), 0, 1024, 0)], torch.zeros_like(buffer)), BetweenHosts(backend)
    )
    for mode in ("default", "error"):  # the first launch compiles
        buffer.copy_(rows.view(-1))
        torch.cuda.set_sync_debug_mode(mode)
        codec.launch(backend, 0.0)
        torch.cuda.set_sync_debug_mode("default")
    quantize_rows(rows.clone(), codes := torch.empty(4, 256, dtype=torch.int8), scales := torch.empty(4))
    decode_rows(codes, scales, rows)
    assert_bitwise(buffer.cpu(), rows.view(-1))
    engine.abort_word.fill_(1)
    operations.all_reduce(devices, ones, "sum")
    assert bool(ones.isnan().all())
    stream.close()


def reduce_in_registered_memory() -> None:
    """Over NCCL, as the only rank. To open wires anew takes no more memory; behind NCCL, the guard alone runs."""
    accelerator: Any = accelerator_of(torch.device("cuda", 0))
    backend = accelerator.open_backend(dist.HashStore(), 0, 1, 30.0)
    all_reduce(backend, torch.zeros(1, device="cuda"))
    accelerator.synchronize()
    with mock.patch.object(nccl, "_LEAST_NCCL", 0):  # no other rank can be lost, so an older one will do
        engine = Engine("native", accelerator.register(0, backend), accelerator, 1, backend)
    free = []
    for _ in range(6):
        wires = None  # before others take their place
        began = time.monotonic()
        wires = engine.open_wires([(1000, torch.float32), (5_000_003, torch.float32), (5_000_003, torch.bfloat16)])
        assert free or time.monotonic() - began <= 1.0
        free.append(torch.cuda.mem_get_info()[0])
        if len(free) < 6:
            engine.release(wires)
    assert free[1] - free[-1] <= 2 << 20
    guard: Any = engine.guard(wires)

    def reduce() -> None:
        for wire in wires:
            engine.launch(wire)
        guard()
        accelerator.synchronize()

    given = [torch.arange(wire.buffer.numel()).remainder(251).to(wire.buffer.dtype) for wire in wires]
    for wire, values in zip(wires, given, strict=True):
        wire.buffer.copy_(values)
    reduce()  # compiles
    with torch.profiler.profile() as profiler:
        reduce()
    kernels = [event.name for event in profiler.events() or () if event.device_type.name == "CUDA"]
    kernels = [name for name in kernels if not name.startswith(("Memcpy", "Memset", "nccl"))]  # it copies one rank's
    assert kernels, "the guard is missing"
    assert all("_guard_kernel" in name for name in kernels), kernels
    for wire, values in zip(wires, given, strict=True):
        assert_bitwise(wire.buffer.cpu(), values)
    began = time.monotonic()
    engine.abort()
    assert time.monotonic() - began <= 5.0
    guard()
    assert all(bool(wire.buffer.isnan().all()) for wire in wires)
    engine.close()


def test_nccl_in_registered_memory_and_the_end_of_its_process() -> None:
    """After an abort, nothing complains."""
    ran = run_python("-c", f"import {__name__} as test; test.reduce_in_registered_memory()", folder=ROOT)
    assert (ran.returncode, ran.stderr.count("destroy_process_group")) == (0, 0), ran.stderr
