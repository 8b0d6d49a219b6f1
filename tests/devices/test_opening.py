"""What `wrap` finds out before it trusts an algorithm on a device, and how ranks get out of what does not work."""

import functools
import time
from contextlib import nullcontext
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import torchring
from tests.support.checks import digest
from tests.support.fake_device import FakeAccelerator
from tests.support.harness import patient
from tests.support.scenarios import Scenarios, device
from tests.support.training import attempt
from torchring.devices import engines, opening
from torchring.devices.cuda import CudaAccelerator
from torchring.gradients import plan as plan_module
from torchring.kernels.lazy import Kernel
from torchring.memory import host as host_module
from torchring.world import World

pytestmark = pytest.mark.sim
scenario = Scenarios(__name__)
# Interpreted kernels take their time.
_ONCE = {"_NUM_REPEATS": 1, "_NUM_WARM_UPS": 0, "_NUM_TURNS": 1, "_PRODUCT_SIDE": 8}


def _trained(rank: int, **options: Any) -> Any:
    torch.manual_seed(5)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.01), model, **options)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.full((1, 8), 1.0 + rank + step)).square().mean().backward()
        optimizer.step()
    return optimizer


def _error(rank: int, **options: Any) -> str:
    return attempt(lambda: _trained(rank, **options))


def _digest(optimizer: Any) -> str:
    return digest(optimizer.param_groups[0]["params"])


# ---- what does not work


@scenario(["apart", "lossy"])
def test_peer_access_that_is_announced_and_does_not_work_is_not_used(memory: str, rank: int) -> None:
    why = {"apart": "did not come to an end within 0.5 s", "lossy": "gave a wrong sum"}[memory]
    seconds = 0.5 if memory == "apart" else 60.0  # only what is lost never comes
    with mock.patch.object(opening, "_TRIAL_SECONDS", seconds), FakeAccelerator(memory=memory).installed():
        stats = _trained(rank).stats()
        assert stats.algorithm == "native", stats.reason
        assert stats.reason.startswith(f"direct is not to be had: direct, tried out, {why}"), stats.reason
        torchring.shutdown()
    if memory == "lossy":
        with FakeAccelerator(memory=memory).installed():
            assert _error(rank, algorithm="ring").startswith("TopologyError: ring, tried out, gave a wrong sum")


class _TritonError(Exception):
    """As Triton's, which are no RuntimeErrors."""


_NO_KERNELS = "kernels cannot be compiled or launched (Triton needs a C compiler, and the headers of Python): "
_NO_BACKEND = "torch.distributed's backend cannot be opened: "
_NO_NCCL = f"{_NO_BACKEND}module 'torch.distributed' has no attribute 'ProcessGroupNCCL'"
_LACKING: dict[str, tuple[type, str, Any, str]] = {
    "no compiler on rank 1": (
        Kernel,
        "launch",
        _TritonError("No compiler"),
        f"{_NO_KERNELS}No compiler (rank 1 says so)",
    ),
    "another Triton": (Kernel, "launch", TypeError("no argument maxnreg"), f"{_NO_KERNELS}no argument maxnreg"),
    "no NCCL": (FakeAccelerator, "open_backend", CudaAccelerator.open_backend, _NO_NCCL),  # nor has this PyTorch
    "one GPU": (FakeAccelerator, "open_backend", RuntimeError("Duplicate GPU"), f"{_NO_BACKEND}Duplicate GPU"),
}


@scenario(_LACKING)
def test_a_machine_that_cannot_do_it_is_an_error_of_wrap_on_all_ranks(name: str, rank: int) -> None:
    """Else training would come to a kernel."""
    kind, method, does, why = _LACKING[name]
    options = {"algorithm": "native"} if method == "open_backend" else {}
    does = mock.Mock(side_effect=does) if isinstance(does, Exception) else does
    broken = nullcontext() if "rank 1" in name and rank == 0 else mock.patch.object(kind, method, does)
    with FakeAccelerator().installed(), broken:
        text = _error(rank, **options)
    assert text.startswith(f"TopologyError: {why}"), text


def _measure_for_ever(world: Any, all_reduce: Any, *_: object) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        all_reduce.check()
        time.sleep(0.01)


def _some_say(results: list[str], case: Any) -> None:
    assert case == "connecting" or any("measuring did not come to an end" in text for text in results)


@scenario(["connecting", "measuring"], check=_some_say)
def test_no_candidate_keeps_all_ranks_waiting_for_ever(what: str, rank: int) -> str:
    torchring.init(timeout_seconds=3.0)
    started = time.monotonic()
    stuck: Any = {"_PRODUCT_SIDE": 8, "_seconds_together": _measure_for_ever}
    if what == "connecting":
        stuck = {"all_reduce": lambda backend, buffer: backend._aborted.wait(60)}
    with FakeAccelerator(own_devices=True).installed(), mock.patch.multiple(opening, **stuck):
        text = _error(rank, algorithm="native" if what == "connecting" else "auto")
    connecting = "TopologyError: torch.distributed's backend does not connect: no answer within 1.5 s"
    assert text.startswith(connecting if what == "connecting" else "PeerTimeoutError: "), text
    assert time.monotonic() - started < patient(10)
    return text


@scenario(size=3)
def test_ranks_fall_back_together(rank: int) -> str:
    """And refuse together what was asked for: on one rank of the second host, the backend does not connect."""
    host_module._host_identity = lambda: f"host {(0, 0, 1)[rank]}"

    def connect(backend: Any, buffer: Tensor) -> None:
        engines.all_reduce(backend, buffer)
        if rank == 2 and backend.size() == 2:
            raise RuntimeError("NCCL: unhandled system error")

    text = "torch.distributed's backend does not connect: NCCL: unhandled system error (rank 2 says so)"
    with device() as accelerator, mock.patch.object(opening, "all_reduce", connect):
        assert _error(rank, algorithm="hierarchical").startswith(f"TopologyError: {text}")
        optimizer = _trained(rank)
        stats = optimizer.stats()
        assert (stats.algorithm, stats.reason) == ("native", f"hierarchical is not to be had: {text}")
        assert accelerator.calls["abort"] == (0 if rank == 1 else 2), "the column of ranks 0 and 2, twice"
        return _digest(optimizer)


# ---- what "auto" chooses


@scenario()
def test_auto_says_what_it_is_and_why(rank: int) -> None:
    apart = "rank 0 cannot reach rank 1"
    for options, problem, taken, why in (
        ({}, "", "direct", "the GPUs of all ranks reach each other's memory; not measured, because ranks share a GPU"),
        ({}, apart, "native", apart),
        ({"overlap": "inline"}, "", "direct", ""),
        ({}, "", "direct", "not measured, because torch.use_deterministic_algorithms(True)"),
    ):
        torch.use_deterministic_algorithms("deterministic" in why and rank == 1)  # what one asks for, all do
        with FakeAccelerator(problem=problem, own_devices="deterministic" in why).installed():
            stats = _trained(rank, **options).stats()
            torch.use_deterministic_algorithms(False)
            assert (stats.algorithm, stats.overlap) == (taken, options.get("overlap", "stream"))
            assert why in stats.reason
            assert stats.num_reductions == 3
            assert stats.bytes_per_step > 4 * 4 * 72
        torchring.shutdown()
    for algorithm in ("ring", "direct"):
        with FakeAccelerator(problem=apart).installed():
            assert _error(rank, algorithm=algorithm).startswith(f"TopologyError: {apart}")
        torchring.shutdown()


@scenario(size=3)
def test_auto_measures_between_hosts_that_have_several_gpus(rank: int) -> Any:
    """Two hosts, of which one has two ranks. Gloo rounds each of its two sums of 16-bit values."""
    host_module._host_identity = lambda: f"host {(0, 0, 1)[rank]}"
    with device(), mock.patch.multiple(opening, **_ONCE):
        optimizer = _trained(rank)
        stats = optimizer.stats()
        torchring.shutdown()
    why = "ranks share memory within hosts"
    assert stats.reason.startswith(f"{why}; measured beside matrix products for buckets of ")
    assert "MiB: hierarchical " in stats.reason
    assert "native " in stats.reason
    assert stats.algorithm in ("hierarchical", "native")
    with device(), mock.patch.multiple(opening, **_ONCE):
        narrow = _trained(rank, compression="bf16").stats()
    assert narrow.algorithm == "hierarchical"
    assert narrow.reason == f"{why}, and the backend's own all-reduce adds 16-bit values in 16 bits"
    return stats.reason, _digest(optimizer)


class Measured(NamedTuple):
    """How "auto" chooses on one host, with the seconds that candidates take, or without NCCL on one rank or all."""

    algorithm: str
    bucket_mib: int
    seconds: dict[str, float]
    missing: Exception | None = None
    missing_on: tuple[int, ...] = (0, 1)
    compression: str | None = None
    unregistered: str = ""


_SLOW_DIRECT = {"direct": 2.0, "native": 1.0}
_MEASURED = {
    "direct is slower": Measured("native", 25, _SLOW_DIRECT),
    "direct is faster": Measured("direct", 10, {"direct": 1.0, "native": 2.0}),
    "no NCCL": Measured("direct", 10, {}, missing=AttributeError("no attribute 'ProcessGroupNCCL'")),
    "no NCCL on one rank": Measured("direct", 10, {}, missing=RuntimeError("Duplicate GPU"), missing_on=(1,)),
    "16 bits, rounded once": Measured("native", 25, _SLOW_DIRECT, compression="bf16"),
    "plain memory": Measured("native", 25, _SLOW_DIRECT, unregistered="NCCL is too old"),
}


@scenario(_MEASURED)
def test_auto_measures_what_several_gpus_of_one_host_can_do(name: str, rank: int) -> Any:
    """With the wires that will be reduced; and then the buckets have the size that suits the fastest."""
    case, real = _MEASURED[name], opening._seconds_together
    connections: list[int] = []
    turns: dict[str, int] = {}

    def connect(backend: Any, buffer: Tensor) -> None:
        connections.append(backend.size())
        engines.all_reduce(backend, buffer)

    def time_together(world: World, all_reduce: Any, wires: Any, multiply: Any) -> float:
        turns[all_reduce.algorithm] = sum(wire.buffer.nbytes for wire in wires)
        return case.seconds[all_reduce.algorithm] * real(world, all_reduce, wires, multiply) ** 0

    def fail_after(open_it: Any, *args: Any) -> None:
        open_it(*args)  # the fake's connects here, and other ranks wait for this one
        assert case.missing is not None
        raise case.missing

    with (
        device(own_devices=True, unregistered=case.unregistered) as accelerator,
        mock.patch.multiple(opening, **_ONCE, _seconds_together=time_together, all_reduce=connect),
        mock.patch.object(plan_module, "_FEWEST_SHARING_GPUS", 2),
    ):
        if case.missing is not None and rank in case.missing_on:
            opens = functools.partial(fail_after, accelerator.open_backend)
            accelerator.open_backend = opens  # type: ignore[method-assign]
        optimizer = _trained(rank, compression=case.compression)
        assert optimizer._sync.layout._bucket_mb == case.bucket_mib
        reason = optimizer.stats().reason
        assert optimizer.stats().algorithm == case.algorithm, reason
        assert not any(map(int, accelerator.host_words)), "what was measured was no reduction that was aborted"
        in_use = [sum(bucket.wire.memory.parts[0].nbytes for bucket in optimizer._sync.layout.buckets[:1])]
        is_registered = case.algorithm == "native" and not case.unregistered
        assert accelerator.registered == in_use * is_registered, "neither samples nor what the first step used"
    assert set(turns) == set(case.seconds)
    assert len(set(turns.values())) <= 1, "all are given the same wires"
    assert ("measured beside matrix products for buckets of " in reason) == bool(case.seconds), reason
    assert all(f"{algorithm} " in reason.partition("MiB: ")[2] for algorithm in case.seconds), reason
    assert ("ms, all with the same buckets" in reason) is (case.algorithm == "native"), reason
    assert reason.endswith(f"not registered with the backend: {case.unregistered}") is bool(case.unregistered), reason
    assert bool(connections) is ("native" in case.seconds), "nobody waits for a rank that has no backend"
    assert ("the backend does not connect" in reason) is (case.missing is not None), reason
    return reason, _digest(optimizer)


@pytest.mark.parametrize(
    ("sizes_mib", "expected"), [([0, 1], 1), ([1, *[10] * 30], 10), ([200, *[10] * 25], 10), ([600, *[10] * 25], 32)]
)
def test_the_wire_that_is_measured_holds_the_middle_byte(sizes_mib: list[int], expected: int) -> None:
    """A wire of 600 MiB would take the memory of two candidates; what is true of 32 MiB is true of it."""
    assert opening._sample([(size << 18, torch.float32) for size in sizes_mib]) == (expected << 18, torch.float32)
