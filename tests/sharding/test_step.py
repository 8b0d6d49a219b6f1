"""A sharded optimizer trains as the same optimizer does without shard: bit for bit, on any number of ranks."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import torchring
from tests.gradients.test_weights import skipping, weighted
from tests.optimizer.test_semantics import CASES
from tests.support.checks import assert_same_everywhere, logged
from tests.support.harness import ranks, run_ranks
from tests.support.training import ShardedSide, assert_each_as_one_process, values
from torchring.memory import host as host_module

KINDS: dict[str, Callable[[Any], Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.01, fused=True),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "Adam foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "Adam fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.01, fused=True),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "Adagrad fused": lambda p: torch.optim.Adagrad(p, lr=0.01, fused=True),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.01),
}


class Net(nn.Module):
    """Parameters of all sorts: large, small, of odd sizes, channels_last, 0-dim, tied, frozen, not always used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.conv = nn.Conv2d(3, 8, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.large = nn.Linear(8, 9001)
        self.back = nn.Linear(9001, 5)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.tied = self.scale
        self.seldom = nn.Linear(5, 5)
        self.never = nn.Linear(5, 5)
        self.frozen = nn.Linear(5, 5).requires_grad_(False)

    def forward(self, images: Tensor, step: int) -> Tensor:
        hidden = self.conv(images).mean(dim=(2, 3))
        out = self.frozen(self.back(self.large(hidden).relu() * self.scale)) + self.tied
        return self.seldom(out) if step % 2 else out


def groups(net: Net) -> list[dict[str, Any]]:
    few = [net.scale, *net.back.parameters()]
    rest = [p for p in net.parameters() if all(p is not other for other in few)]
    return [{"params": rest}, {"params": few, "lr": 0.02}]


def train(net: Net, optimizer: Any, steps: range) -> None:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for step in steps:
        images = torch.randn(2, 3, 6, 6, generator=torch.Generator().manual_seed(10 * step + torchring.rank()))
        if step == 3:
            net.frozen.requires_grad_(True)
        optimizer.zero_grad()
        net(images, step).square().mean().backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        scheduler.step()


def compare_twins(
    kinds: Sequence[str],
    network: Callable[[], Net] = Net,
    exactly: bool = True,
    num_waits: Callable[[], int] = lambda: 0,
    **options: Any,
) -> None:
    """Train twins, one of them sharded, which go on from a checkpoint in the middle."""
    for kind in kinds:
        outcomes = []
        for shard in (False, True):
            net = network()
            optimizer = torchring.wrap(KINDS[kind](groups(net)), net, shard=shard, **options)
            train(net, optimizer, range(3))
            optimizer.load_state_dict(optimizer.state_dict())
            before = num_waits()
            train(net, optimizer, range(3, 5))
            waits = num_waits() - before
            outcomes.append((values(net), optimizer.state_dict(all_ranks=shard), waits))
            optimizer.close()
        (plain, expected, plain_waits), (sharded, found, waits) = outcomes
        assert_equal(plain, sharded, exactly)
        assert_equal_states(expected, found, exactly)
        assert_same_everywhere(sharded)
        assert waits == plain_waits


def assert_equal(expected: Sequence[Tensor], found: Sequence[Tensor], exactly: bool = True) -> None:
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one, check_stride=True, **({"rtol": 0, "atol": 0} if exactly else {}))


def assert_equal_states(expected: dict[str, Any], found: dict[str, Any], exactly: bool = True) -> None:
    assert expected["param_groups"] == found["param_groups"]
    assert expected["state"].keys() == found["state"].keys()
    for index, entry in expected["state"].items():
        other = found["state"][index]
        is_tensor = {key: isinstance(value, Tensor) for key, value in entry.items()}
        assert is_tensor == {key: isinstance(value, Tensor) for key, value in other.items()}
        assert_equal(*([each[key] for key in entry if is_tensor[key]] for each in (entry, other)), exactly)
        assert all(value == other[key] for key, value in entry.items() if not is_tensor[key])


@pytest.mark.parametrize("world_size", [3, pytest.param(4, marks=pytest.mark.grid)])
@ranks()
def test_trains_as_without_shard(world_size: int) -> None:
    with logged() as lines:
        compare_twins(list(KINDS))
    assert not [line for line in lines if "1.5 times the bytes" in line]


@ranks(3)
def test_between_hosts(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks 0 and 1 on one, rank 2 on another."""
    monkeypatch.setattr(host_module, "_host_identity", lambda: f"host {rank // 2}")
    with logged() as lines:
        compare_twins(["AdamW", "SGD fused"], exactly=False)
    cost = [line for line in lines if "1.5 times the bytes" in line and "fully_shard" in line]
    assert len(cost) == (rank == 0)


def compare_whole_parameters(rank: int) -> None:
    """Muon and AdamW for one model. Each matrix has its state on one rank."""
    nets, muons = [], []
    for shard in (False, True):
        torch.manual_seed(1)
        net = nn.Sequential(nn.Linear(20, 60), nn.Tanh(), nn.Linear(60, 30), nn.Tanh(), nn.Linear(30, 20))
        matrices = [p for p in net.parameters() if p.dim() == 2]
        vectors = [p for p in net.parameters() if p.dim() < 2]
        muon = torchring.wrap(torch.optim.Muon(matrices, lr=0.02), net, shard=shard)
        optimizers = [muon, torchring.wrap(torch.optim.AdamW(vectors, fused=True), net, shard=shard)]
        for step in range(4):
            net.zero_grad()
            data = torch.randn(4, 20, generator=torch.Generator().manual_seed(10 * step + rank))
            (net(data) - data).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
        nets.append(values(net))
        muons.append(muon)
    assert_equal(*nets)
    assert_equal_states(muons[0].state_dict(), muons[1].state_dict(all_ranks=True))
    whole, mine = (sum(t.nbytes for e in each.state.values() for t in e.values()) for each in muons)
    shares = torchring.all_gather_object(mine)
    assert sum(shares) == whole > max(shares)


@ranks(3)
def test_muon_steps_a_matrix_on_one_rank(rank: int) -> None:
    compare_whole_parameters(rank)


_SCRIPTS = {
    **CASES["several backwards"],
    **CASES["several"],
    **{
        name: script
        for about in ("kinds of parameters", "PyTorch", "optimizers", "zeroing and clipping")
        for name, script in CASES[about].items()
        if name.startswith(("tied", "complex", "freezing ttf", "SWA", "GradScaler", "a group", "clip"))
    },
    "weigh": (weighted, 2, "accumulate", 1, {}),
    "skip": (skipping, True, {}),
}


def test_scripts_train_as_one_process(subtests: pytest.Subtests) -> None:
    assert_each_as_one_process(_SCRIPTS, subtests, side=ShardedSide)


@ranks(2)
def test_a_step_that_is_not_finite_is_left_out(rank: int) -> None:
    layer = nn.Linear(300, 30)
    optimizer = torchring.wrap(torch.optim.AdamW(layer.parameters()), layer, shard=True, on_nonfinite="skip")
    trained = []
    for factor in (1.0, float("nan") if rank else 1.0):
        (layer(torch.ones(1, 300)).sum() * factor).backward()
        optimizer.step()
        optimizer.zero_grad()
        trained.append(values(layer))
    assert_equal(*trained)


@ranks(2, start=run_ranks)
def test_a_graph_from_before_the_step_is_refused() -> None:
    """Peers have written to the weight, so a graph from before is refused, as in plain PyTorch."""
    layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torchring.wrap(torch.optim.SGD(layers.parameters(), lr=0.1), layers, shard=True)
    loss = layers(torch.ones(1, 4)).square().sum()
    loss.backward(retain_graph=True)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    torchring.shutdown()
