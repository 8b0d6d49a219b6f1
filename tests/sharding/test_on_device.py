"""Sharded steps on a fake device, whose streams are as late as allowed, in kernels that are interpreted.

As in devices/test_on_device.py, scenarios run one after the other in the same few processes.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import torchring
from tests.sharding.test_step import (
    _KINDS,
    Net,
    _assert_equal_states,
    _groups,
    _of_whole_parameters,
    _parameters,
    _train,
    _with_everything,
)
from tests.support.checks import digest
from tests.support.fake_device import COMPUTE, FakeAccelerator
from tests.support.harness import run_ranks
from tests.support.scripts import ON_DEVICES
from tests.support.training import Side, assert_as_one_process, attempt
from torchring.devices.engines import SharedMemoryEngine
from torchring.errors import PeerTimeoutError
from torchring.memory import host as host_module
from torchring.sharding.device import DeviceExchange

pytestmark = pytest.mark.sim

# The others differ in what happens to gradients.
_SCRIPTS = (
    "unused on some ranks", "channels_last, fp16", "complex", "fused, clipped", "GradScaler, fused",
    "GradScaler, clipped", "on a side stream",
)  # fmt: skip
_APART = "rank 0 cannot reach rank 1"  # so that the backend carries everything


@dataclass(frozen=True)
class ShardedSide(Side):
    """A rank whose parameters are on the fake device, and its optimizer sharded."""

    def wrap(self, optimizer: torch.optim.Optimizer, model: nn.Module | None = None, **options: Any) -> Any:
        return super().wrap(optimizer, model, **{"shard": True, **options})


class _Small(Net):
    """A network that kernels can step in an interpreter."""

    def __init__(self) -> None:
        super().__init__()
        self.large, self.back = nn.Linear(8, 301), nn.Linear(301, 5)


def _as_without_shard(
    rank: int, size: int, kinds: Sequence[str], mode: str, algorithm: str, hosts: Sequence[int] = (0, 0, 0)
) -> list[str]:
    """Twins, one of them sharded. Goes on from a checkpoint in the middle. Returns digests of the parameters."""
    host_module._host_identity = lambda: f"host {hosts[rank]}"
    trained = []
    for kind in kinds:
        with FakeAccelerator(mode).installed() as accelerator:
            outcomes = []
            for is_sharded in (False, True):
                net = _Small()
                options: dict[str, Any] = {"algorithm": algorithm, "shard": is_sharded}
                optimizer = torchring.wrap(_KINDS[kind](_groups(net)), net, **options)
                _train(net, optimizer, range(3))
                state = optimizer.state_dict()
                optimizer.load_state_dict(state)
                accelerator.calls.clear()
                _train(net, optimizer, range(3, 5))
                waits = accelerator.calls["synchronize"]
                final = optimizer.state_dict(all_ranks=is_sharded)
                outcomes.append((_parameters(net), final, waits))
                optimizer.close()
            (plain, expected, plain_waits), (sharded, found, waits) = outcomes
            for one, other in zip(plain, sharded, strict=True):
                assert torch.equal(one, other), kind
            _assert_equal_states(expected, found)
            assert waits == plain_waits
            assert accelerator.races == []
            trained.append(digest(sharded))
    return trained


def _scripted(rank: int, size: int, name: str) -> Sequence[Any]:
    script, args, _ = ON_DEVICES[name]
    stream = "another" if "side stream" in name else COMPUTE
    # Where GradScaler asks the host whether to step: a fused optimizer's kernels decide.
    not_waiting = mock.patch.object(torch.amp.GradScaler, "_maybe_opt_step") if "fused" in name else nullcontext()
    with FakeAccelerator().installed() as accelerator, accelerator.on_stream(stream), not_waiting:
        return script(ShardedSide((rank,), True), *args)


def _on_device(rank: int, size: int, scenario: Callable[[int, int], object], problem: str = "") -> list[str]:
    with FakeAccelerator(problem=problem).installed() as accelerator:
        scenario(rank, size)
        return accelerator.races


def _absent_rank(rank: int, size: int, problem: str = "") -> list[Any]:
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
        if rank == 1:
            return []
        optimizer._sync.layout.all_reduce.fail(PeerTimeoutError("rank 1 is late", rank=0))
        return [bool(layer.weight.isnan().all()), attempt(lambda: layer(torch.ones(1, 4)).sum().backward())]


def _order(rank: int, size: int) -> tuple[list[tuple[bool, bool]], str]:
    """(gather, spread) of each launch of a step's exchange. And what is said if a step is captured."""
    launches: list[tuple[bool, bool]] = []
    direct = SharedMemoryEngine.direct

    def noted(engine: Any, wire: Any, *, gather: bool = True, spread: bool = True) -> None:
        launches.append((gather, spread))
        direct(engine, wire, gather=gather, spread=spread)

    with FakeAccelerator().installed() as accelerator:
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4).double())
        optimizer = torchring.wrap(torch.optim.SGD(net.parameters(), lr=0.1), net, shard=True)
        sum(p.sum() for p in net.parameters()).backward()
        accelerator.capturing = True
        problem = attempt(optimizer.step)
        accelerator.capturing = False
        with mock.patch.object(SharedMemoryEngine, "direct", noted):
            optimizer.step()
    return launches, problem


_SCENARIOS: dict[int, dict[str, Callable[[int, int], Any]]] = {
    2: {
        "direct, late": functools.partial(
            _as_without_shard, kinds=["AdamW fused", "ASGD"], mode="late", algorithm="direct"
        ),
        "ring, thread": functools.partial(_as_without_shard, kinds=["Adam"], mode="thread", algorithm="ring"),
        "native, late": functools.partial(_as_without_shard, kinds=["AdamW"], mode="late", algorithm="native"),
        **{name: functools.partial(_scripted, name=name) for name in _SCRIPTS},
        "whole": functools.partial(_on_device, scenario=_of_whole_parameters),
        "whole, native": functools.partial(_on_device, scenario=_of_whole_parameters, problem=_APART),
        "with everything": functools.partial(
            _on_device, scenario=functools.partial(_with_everything, acts=("group", "loaded before"))
        ),
        "order": _order,
        "absent rank": _absent_rank,
        "absent rank, native": functools.partial(_absent_rank, problem=_APART),
    },
    3: {
        "direct": functools.partial(_as_without_shard, kinds=["Adam foreach"], mode="late", algorithm="direct"),
        "native": functools.partial(
            _as_without_shard, kinds=["AdamW fused"], mode="thread", algorithm="native", hosts=(0, 1, 2)
        ),
        "hierarchical": functools.partial(
            _as_without_shard, kinds=["AdamW"], mode="late", algorithm="hierarchical", hosts=(0, 0, 1)
        ),
        "whole": functools.partial(_on_device, scenario=_of_whole_parameters, problem=_APART),
    },
}
_TWINS = [(2, "direct, late"), (2, "ring, thread"), (2, "native, late")]
_TWINS += [(3, "direct"), (3, "native"), (3, "hierarchical")]


def _attempts(rank: int, size: int) -> dict[str, Any]:
    """What each scenario gives on this rank, or its traceback."""
    results: dict[str, Any] = {}
    identity = host_module._host_identity
    for name, scenario in _SCENARIOS[size].items():
        try:
            results[name] = scenario(rank, size)
        except Exception:
            results[name] = RuntimeError(traceback.format_exc())
        torchring.shutdown()
        host_module._host_identity = identity
    return results


@functools.cache
def _results(size: int) -> list[dict[str, Any]]:
    return run_ranks(_attempts, size, env={"TRITON_INTERPRET": "1"}, deadline=150)


def results_of(name: str, size: int = 2) -> list[Any]:
    results = [of_rank[name] for of_rank in _results(size)]
    failures = [f"rank {rank}:\n{result}" for rank, result in enumerate(results) if isinstance(result, Exception)]
    assert not failures, "\n".join(failures)
    return results


@pytest.mark.parametrize(("size", "name"), _TWINS)
def test_trains_and_goes_on_as_without_shard(size: int, name: str) -> None:
    for trained in zip(*results_of(name, size), strict=True):
        assert len(set(trained)) == 1


@pytest.mark.parametrize("name", _SCRIPTS)
def test_what_scripts_rely_on(name: str) -> None:
    """Against one process that does the work of both ranks."""
    script, args, tolerance = ON_DEVICES[name]
    assert_as_one_process(script, *args, tolerance=tolerance, run=lambda *_: results_of(name))


@pytest.mark.parametrize(("size", "name"), [(2, "whole"), (2, "whole, native"), (3, "whole"), (2, "with everything")])
def test_without_races(size: int, name: str) -> None:
    assert results_of(name, size) == [[]] * size


def test_no_rank_writes_to_parameters_before_all_devices_have_come() -> None:
    for launches, problem in results_of("order"):
        assert launches == [(True, False), (False, True), (False, True)]
        assert "a CUDA graph cannot hold it" in problem


@pytest.mark.parametrize("name", ["absent rank", "absent rank, native"])
def test_a_device_that_does_not_come_leaves_no_half_stepped_parameters(name: str) -> None:
    (is_nan, problem), _ = results_of(name)
    assert is_nan
    assert "rank 1 is late" in problem
