"""Collectives of scripts, and Horovod's, on a device that is fake; see `test_on_device.py`."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest
import torch

import torchring
import torchring.horovod as hvd
from tests.collectives import test_collectives as scripts
from tests.horovod import test_collectives as horovod
from tests.support.adasum import assert_adasum
from tests.support.checks import assert_bitwise, logged
from tests.support.fake_device import FakeAccelerator
from tests.support.harness import ranks, run_ranks
from tests.support.scenarios import INTERPRETED, Scenarios, device
from tests.support.training import attempt
from torchring.default_world import default_world
from torchring.devices import watchdog
from torchring.devices.collectives import DeviceCollectives, of_script
from torchring.errors import PlanMismatchError, TopologyError
from torchring.horovod.context import engine
from torchring.memory import host as host_module

pytestmark = pytest.mark.sim
scenario = Scenarios(
    __name__,
    smoke=[
        "test_what_holds_on_the_cpu_holds_on_a_device strides, late",
        "test_what_holds_on_the_cpu_holds_on_a_device Horovod's reductions, late",
    ],
)


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
    "all_reduce, late": scripts._all_reduce,
    "broadcast, lazy": scripts._broadcast,
    "all_gather, late": scripts._all_gather,
    "strides, late": scripts._inputs_with_strides,
    "adasum, late": _adasum,
    "asynchronous, eager": scripts._asynchronous,
    "mismatches, late": scripts._mismatches,
    "Horovod's reductions, late": _horovods(horovod._reductions, horovod._scaling),
    "Horovod's others, eager": _horovods(horovod._moves, horovod._groups_and_handles, horovod._gradients),
}


@scenario(_CALLS)
def test_what_holds_on_the_cpu_holds_on_a_device(case: str, rank: int) -> None:
    with device(case.split(", ")[1]):
        torchring.init(timeout_seconds=20.0)
        _CALLS[case](rank, 2)
        torchring.all_reduce(torch.ones(1))
        assert _has_opened(default_world().shared(of_script))


@scenario([False, True])
def test_the_host_does_not_wait(async_op: bool, rank: int) -> None:
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
        assert accelerator.calls["synchronize"] == 0
        assert accelerator.calls["hold_current"] == 1
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

    def call() -> None:
        torchring.broadcast(torch.ones(3))

    for _ in range(2):
        with pytest.raises(PlanMismatchError, match=r"broadcast\(src=0\) of float32 \[3\] (on cpu )?while"):
            call() if rank == 0 else _on_device(call)
        _on_device(call)


def _on_device(call: Callable[[], None]) -> None:
    with device():
        call()


def _refuse(*_: object) -> None:
    raise TopologyError("two ranks on one GPU")


@scenario()
def test_what_goes_through_the_cpu_is_said_once(rank: int) -> None:
    with device() as accelerator, logged() as texts:
        for _ in range(2):
            assert len(torchring.all_gather(torch.ones(rank + 1))) == 3
            torchring.all_to_all(torch.ones(2))
            torchring.reduce_scatter(torch.ones(2))
        torchring.shutdown()
        accelerator.open_backend = _refuse  # type: ignore[method-assign, assignment]
        scripts._broadcast(rank, 2)
        assert torchring.all_reduce(torch.full((2,), rank + 1.0), "sum").tolist() == [3.0, 3.0]
    found = [text.removeprefix("tensors on a GPU go through the CPU in ").split(",")[0] for text in texts]
    assert found == ([] if rank else ["all_gather", "all_to_all", "reduce_scatter", "collectives"])
    assert rank or texts[-1].endswith("two ranks on one GPU")


@scenario()
def test_a_captured_graph(rank: int) -> None:
    with device() as accelerator:
        accelerator.capturing = True
        for async_op in (False, True):
            with pytest.raises(ValueError, match="CUDA graph"):
                torchring.all_reduce(torch.ones(1), async_op=async_op)  # type: ignore[call-overload]


@ranks(2, start=run_ranks, env=INTERPRETED, deadline=60, expect_exit={1: -signal.SIGKILL})
def test_a_rank_that_is_killed_while_the_device_waits_for_it(rank: int) -> None:
    """What it leaves is NaN, or no number that anybody takes for a result; the next call names the rank."""
    host_module._host_identity = lambda: f"host {rank}"
    watchdog._AFAR_SECONDS = 0.5
    with FakeAccelerator("lazy").installed():
        torchring.init(timeout_seconds=60.0)
        torchring.all_reduce(torch.ones(1))
        of_all, largest, sent = torch.ones(3, 3)
        torchring.all_reduce(of_all)
        torchring.all_reduce(largest, "max")
        torchring.broadcast(sent, src=1)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        assert all(math.isnan(each.sum()) for each in (sent, largest, of_all))  # waits for the device
        error = attempt(lambda: torchring.all_reduce(torch.ones(3)))
        assert error.startswith("PeerLostError"), error
        assert "rank 1" in error
