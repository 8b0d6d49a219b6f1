"""op="adasum" in `wrap`: each parameter by the definition, in shared memory, between hosts, and hierarchical."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

import torchring
from tests.support.adasum import assert_adasum, exact_adasum
from tests.support.checks import assert_bitwise, assert_same_on_all_ranks, digest
from tests.support.grids import grid
from tests.support.harness import run_pooled
from tests.support.netns import hosts_of, needs_hosts, run_on_hosts
from torchring.bench.netns import Network
from torchring.errors import GradientError, PlanMismatchError
from torchring.gradients.validation import check_combined
from torchring.memory import host as host_module

SIZES = (1, 7, 4095, 0, 70_001, 33_000, 5)  # elements: with others in a block, and across blocks and slices
KINDS = ("random", "zeros", "opposite", "parallel", "unused", "skipped", "again")
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "thread": {"overlap": "thread", "bucket_mb": 0.1},
    "inline": {"overlap": "inline", "bucket_mb": 0.0},
    "fp16": {"compression": "fp16"},
    "bf16": {"compression": "bf16"},
    "shard": {"shard": True},
}


def _gradient(kind: str, rank: int, size: int, index: int, micro: int = 0) -> torch.Tensor:
    """What a backward gives the parameter on this rank; of a rank that skips: nothing."""
    generator = torch.Generator().manual_seed(100 * index + micro)
    shared = torch.randn(SIZES[index], generator=generator)
    if kind == "opposite":
        return shared * (1 - 2 * (rank % 2))
    if kind == "parallel":
        return shared * (rank + 1)
    if kind == "zeros" and rank == 1:
        return torch.zeros(SIZES[index])
    own = torch.randn(SIZES[index], generator=torch.Generator().manual_seed(1000 * (rank + 1) + 100 * index + micro))
    return shared + (rank + 1) * own


def _parts(kind: str, size: int, index: int, wire: torch.dtype) -> list[torch.Tensor]:
    """What the ranks' gradients are when they travel."""
    parts = []
    for rank in range(size):
        part = sum(_gradient(kind, rank, size, index, micro) for micro in range(2 if kind == "again" else 1))
        assert isinstance(part, torch.Tensor)
        is_absent = kind == "skipped" and rank == size - 1
        is_unused = kind == "unused" and index == 2 and rank > 0
        parts.append((torch.zeros_like(part) if is_absent or is_unused else part).to(wire))
    return parts


def _check_wrap(rank: int, size: int, hosts: Sequence[Sequence[int]], options: dict[str, Any]) -> list[str]:
    """Gradients of all kinds. Returns digests of what all ranks must have alike."""
    parameters = [nn.Parameter(torch.zeros(numel)) for numel in SIZES]
    optimizer = torchring.wrap(torch.optim.SGD(parameters, lr=0.5, momentum=0.5), op="adasum", **options)
    wire = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(options.get("compression", ""), torch.float32)
    digests = []
    for kind in KINDS:
        optimizer.zero_grad()
        used = [p for i, p in enumerate(parameters) if not (kind == "unused" and (i == 1 or (i == 2 and rank)))]
        for micro in range(2 if kind == "again" else 1):
            grads = [_gradient(kind, rank, size, i, micro) for i in range(len(SIZES))]
            losses = [(p * grads[i]).sum() for i, p in enumerate(parameters) if any(p is each for each in used)]
            if kind == "skipped" and rank == size - 1:
                optimizer.skip()
            elif kind == "again" and micro == 0:
                with optimizer.no_sync():
                    torch.stack(losses).sum().backward()
            else:
                torch.stack(losses).sum().backward()
        for i, parameter in enumerate(parameters):
            if kind == "unused" and i == 1:
                assert parameter.grad is None
                continue
            assert parameter.grad is not None
            parts = _parts(kind, size, i, wire)
            assert_adasum(parameter.grad.to(wire), parts, hosts)
            assert parameter.grad.to(wire).double().equal(parameter.grad.double())
        optimizer.step()
        digests.append(digest([parameter.grad for parameter in parameters]) + digest(parameters))
    optimizer.close()
    return digests


def _in_world(rank: int, size: int, hosts: Sequence[int], fn: Callable[..., Any], args: Sequence[Any]) -> Any:
    """fn on hosts that are said to be different ones: hosts[r] is that of rank r."""
    grouped = [[r for r in range(size) if hosts[r] == host] for host in sorted(set(hosts))]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host_module, "_host_identity", lambda: f"host {hosts[rank]}")
        torchring.init(timeout_seconds=20.0)
        result = fn(rank, size, grouped, *args)
        torchring.shutdown()
        return result


def _check_all(rank: int, size: int, hosts: Sequence[Sequence[int]], names: Sequence[str]) -> dict[str, list[str]]:
    return {name: _check_wrap(rank, size, hosts, OPTIONS[name]) for name in names}


@grid(
    "hosts, names",
    [(0,) * 2, (0,) * 3, (0,) * 5, (0, 1), (0, 1, 2), (0, 0, 1), (0, 0, 1, 1), (0, 1, 1, 0, 1)],
    [tuple(OPTIONS), ("default", "inline", "bf16")],
    keep=lambda hosts, names: hosts in {(0, 0, 0), (0, 0, 1)} and len(names) == 3,
)
def test_each_parameter_is_combined_by_the_definition(hosts: tuple[int, ...], names: tuple[str, ...]) -> None:
    results = run_pooled(_in_world, len(hosts), hosts, _check_all, [names])
    for name in names:
        assert_same_on_all_ranks(["".join(digests[name]) for digests in results])
    if "shard" in names:  # whose gradients and steps are those of all
        assert results[0]["shard"] == results[0]["default"]


def _on_hosts(rank: int, size: int, ranks_per_host: tuple[int, ...]) -> list[str]:
    torchring.init(timeout_seconds=20.0)
    hosts = hosts_of(ranks_per_host)
    digests = _check_wrap(rank, size, hosts, {})
    parts = [_gradient("random", r, size, 4) for r in range(size)]
    assert_adasum(torchring.all_reduce(parts[rank].clone(), "adasum"), parts, hosts)
    torchring.shutdown()
    return digests


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    with Network(3) as network:
        yield network


@needs_hosts
@grid("ranks_per_host", [(1, 1), (2, 2), (1, 1, 1), (2, 1, 2)], keep=lambda ranks_per_host: ranks_per_host == (2, 2))
def test_between_hosts(network: Network, ranks_per_host: tuple[int, ...]) -> None:
    results = run_on_hosts(network, ranks_per_host, _on_hosts, ranks_per_host)
    assert_same_on_all_ranks(["".join(digests) for digests in results])


def _net() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(6, 40), nn.Tanh(), nn.Linear(40, 3)).double()


def _loss(net: nn.Module, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    x = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    output: torch.Tensor = net(x)
    return (output - x[:, :3].sin()).square().mean()


def _train(rank: int, size: int, hosts: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    """With ranks that run out of data, and two optimizers."""
    net = _net()
    layers = [net[0], net[2]]  # type: ignore[index]
    optimizers = [
        torchring.wrap(torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9), layer, op="adasum")
        for layer in layers
    ]
    with torchring.join(*optimizers):
        for step in range(4 + rank):
            for optimizer in optimizers:
                optimizer.zero_grad()
            _loss(net, rank, step).backward()
            for optimizer in optimizers:
                optimizer.step()
    for optimizer in optimizers:
        optimizer.close()
    return [parameter.detach() for parameter in net.parameters()]


@pytest.mark.parametrize("hosts", [(0, 0), (0, 0, 1)])
def test_training_is_that_of_one_process_that_combines_the_ranks_gradients(hosts: tuple[int, ...]) -> None:
    size = len(hosts)
    grouped = [[r for r in range(size) if hosts[r] == host] for host in sorted(set(hosts))]
    net = _net()
    alone = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for step in range(4 + size - 1):
        grads = []
        for rank in range(size):
            alone.zero_grad()
            if step < 4 + rank:
                _loss(net, rank, step).backward()
            grads.append([torch.zeros_like(p) if p.grad is None else p.grad for p in net.parameters()])
        for parameter, parts in zip(net.parameters(), zip(*grads, strict=True), strict=True):
            parameter.grad = exact_adasum([part.flatten() for part in parts], grouped).value.view_as(parameter)
        alone.step()
    results = run_pooled(_in_world, size, hosts, _train, [])
    assert_same_on_all_ranks([digest(trained) for trained in results])
    for trained, wanted in zip(results[0], net.parameters(), strict=True):
        torch.testing.assert_close(trained, wanted.detach(), rtol=1e-12, atol=1e-12)


def _refuse(rank: int, size: int, hosts: Sequence[Sequence[int]]) -> None:
    parameters = [nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(3, dtype=torch.complex64))]

    def wrap(model: nn.Module | None = None, **options: Any) -> torchring.DistributedOptimizer:
        sgd = torch.optim.SGD(parameters if model is None else model.parameters(), lr=1.0)
        return torchring.wrap(sgd, model, op="adasum", **options)

    for options, words in (
        ({"algorithm": "native"}, r"op='adasum' takes algorithm='auto', 'direct', 'hierarchical', got 'native'"),
        ({"model": nn.Embedding(4, 2, sparse=True)}, r"build the layer of weight with sparse=False"),
    ):
        with pytest.raises(ValueError, match=words):
            wrap(**options)
    with pytest.raises(PlanMismatchError, match=r"op='adasum'"):
        torchring.wrap(torch.optim.SGD(parameters, lr=1.0), op="mean" if rank else "adasum")
    optimizer = wrap()
    with pytest.raises(ValueError, match=r"weigh\(\) takes op='mean'; op='adasum' combines"):
        optimizer.weigh(3.0)

    def backward(values: torch.Tensor) -> None:
        ((parameters[0] * values).sum() + (parameters[1] * (1 + 2j)).real.sum()).backward()

    backward(torch.ones(4))
    assert_bitwise(parameters[0].grad, torch.ones(4))  # parallel: the mean
    torch.testing.assert_close(parameters[1].grad, torch.full((3,), 1 - 2j, dtype=torch.complex64))
    with pytest.raises(GradientError, match=r"op='sum' or 'adasum' it would be counted once per rank"):
        backward(torch.ones(4))
    torchring.shutdown()
    torchring.init(timeout_seconds=20.0)
    optimizer = wrap()
    optimizer.zero_grad()
    backward(torch.tensor([1.0, math.nan if rank == size - 1 else 1.0, 1.0, 1.0]))
    with pytest.raises(
        GradientError, match=rf"group0\.param0 is not finite; NaN or infinity came from rank {size - 1}"
    ):
        optimizer.step()
    optimizer.close()
    optimizer = wrap(compression="fp16", on_nonfinite="skip")
    optimizer.zero_grad()
    backward(60_000 * torch.tensor([1.0, 1 - 2 * (rank % 2), 0.0, 0.0]))  # the sum of orthogonal ones is too large
    optimizer.step()
    assert optimizer.stats().num_skipped_steps == 1


def test_gradients_on_a_device_are_refused() -> None:
    with pytest.raises(ValueError, match=r"op='adasum' takes gradients on the CPU, and weight is on meta"):
        check_combined({nn.Parameter(torch.empty(1, device="meta")): "weight"}, ())


@pytest.mark.parametrize("hosts", [(0, 0), (0, 1), (0, 0, 1)])
def test_what_is_refused_and_what_is_not_finite(hosts: tuple[int, ...]) -> None:
    run_pooled(_in_world, len(hosts), hosts, _refuse, [])
