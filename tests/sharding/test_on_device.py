"""Sharded steps on a fake device, whose streams are as late as allowed, in kernels that are interpreted."""

import functools
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import torchring
from tests.devices.test_on_device import check_script, run_script
from tests.optimizer.test_semantics import CASES
from tests.sharding.test_step import Net, compare_twins, compare_whole_parameters
from tests.support.fake_device import FakeAccelerator
from tests.support.scenarios import Scenarios, device
from tests.support.scripts import ON_DEVICES
from tests.support.training import ShardedSide, attempt
from torchring.devices.engines import Engine
from torchring.errors import PeerTimeoutError
from torchring.memory import host as host_module
from torchring.sharding.device import DeviceExchange

pytestmark = pytest.mark.sim
scenario = Scenarios(__name__)

# The others differ in what happens to gradients.
_SCRIPTS = {
    name: ON_DEVICES[name]
    for name in (
        *("unused on some ranks", "channels_last, fp16", "complex", "fused, clipped", "GradScaler, fused"),
        *("GradScaler, clipped", "on a side stream"),
    )
}
_SCRIPTS["a group is added"] = *CASES["optimizers"]["a group is added"], (), 1e-9
_APART = "rank 0 cannot reach rank 1"  # so that the backend carries everything


class _Small(Net):
    """A network that kernels can step in an interpreter."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.back = nn.Linear(8, 301), nn.Linear(301, 5)


_TWINS: dict[str, tuple[Any, ...]] = {
    "direct": (["AdamW fused", "ASGD"], "direct", (0, 0)),
    "ring": (["Adam"], "ring", (0, 0)),
    "native": (["AdamW"], "native", (0, 0)),
    "direct, three": (["Adam foreach"], "direct", (0, 0, 0)),
    "native, three": (["AdamW fused"], "native", (0, 1, 2)),
    "hierarchical": (["AdamW"], "hierarchical", (0, 0, 1)),
}


@scenario(_TWINS, size=lambda name: len(_TWINS[name][2]))
def test_ranks_train_and_go_on_as_without_shard(name: str, rank: int) -> None:
    kinds, algorithm, hosts = _TWINS[name]
    host_module._host_identity = lambda: f"host {hosts[rank]}"
    with device() as accelerator:
        compare_twins(kinds, _Small, num_waits=lambda: accelerator.calls["synchronize"], algorithm=algorithm)


@scenario(_SCRIPTS, check=functools.partial(check_script, _SCRIPTS))
def test_what_scripts_rely_on(name: str, rank: int) -> Sequence[Any]:
    """Against one process that does the work of both ranks."""
    return run_script(_SCRIPTS, name, ShardedSide((rank,), True))


@scenario(["", _APART])
def test_whole_parameters(problem: str, rank: int) -> None:
    with device(problem=problem):
        compare_whole_parameters(rank)


@scenario(size=3)
def test_whole_parameters_on_three_ranks(rank: int) -> None:
    with device(problem=_APART):
        compare_whole_parameters(rank)


@scenario()
def test_no_rank_writes_to_parameters_before_all_devices_have_come(rank: int) -> None:
    """(gather, spread) of each launch of a step's exchange. And what is said if a step is captured."""
    launches: list[tuple[bool, bool]] = []
    direct = Engine.direct

    def noted(engine: Any, wire: Any, *, gather: bool = True, spread: bool = True) -> None:
        launches.append((gather, spread))
        direct(engine, wire, gather=gather, spread=spread)

    with FakeAccelerator().installed() as accelerator:
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).double())
        optimizer = torchring.wrap(torch.optim.SGD(net.parameters(), lr=0.1), net, shard=True)
        sum(p.sum() for p in net.parameters()).backward()
        accelerator.capturing = True
        assert "a CUDA graph cannot hold it" in attempt(optimizer.step)
        accelerator.capturing = False
        with mock.patch.object(Engine, "direct", noted):
            optimizer.step()
    assert launches == [(True, False), (False, True), (False, True)]


@scenario(["", _APART])
def test_a_device_that_does_not_come_leaves_no_half_stepped_parameters(problem: str, rank: int) -> None:
    """Rank 1's device never comes to the second step's exchange, and the watchdog of rank 0 has noticed."""
    launch = DeviceExchange._launch
    with FakeAccelerator("lazy", problem).installed():
        layer = nn.Linear(4, 4)
        optimizer = torchring.wrap(torch.optim.SGD(layer.parameters(), lr=0.1), layer, shard=True)
        for step in range(2):
            optimizer.zero_grad()
            layer(torch.ones(1, 4)).sum().backward()
            absent = (lambda *_: None) if (rank, step) == (1, 1) else launch
            with mock.patch.object(DeviceExchange, "_launch", absent):
                optimizer.step()
        if rank == 0:
            optimizer._sync.layout.all_reduce.fail(PeerTimeoutError("rank 1 is late", rank=0))
            assert bool(layer.weight.isnan().all())
            assert "rank 1 is late" in attempt(lambda: layer(torch.ones(1, 4)).sum().backward())
