"""Optimizer state on its way to the other ranks, and to and from a distributed checkpoint."""

from types import SimpleNamespace

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_state_dict

import torchring
from tests.support.checks import assert_bitwise, assert_same_everywhere, digest
from tests.support.harness import ranks, run_ranks
from tests.support.training import attempt
from torchring import initial_state as state
from torchring.collectives import operations
from torchring.collectives.service import Collectives


def trained(rank: int) -> tuple[torch.nn.Linear, torch.optim.Adam]:
    """The same parameters everywhere, and after a step on another gradient on every rank, state of its own."""
    torch.manual_seed(0)
    model = torch.nn.Linear(300, 100)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    with torch.no_grad():
        kept = [parameter.clone() for parameter in model.parameters()]
    model(torch.full((2, 300), rank + 1.0)).square().mean().backward()
    optimizer.step()
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), kept, strict=True):
            parameter.copy_(value)
    optimizer.zero_grad()
    return model, optimizer


def tensors_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [value for state in optimizer.state.values() for value in state.values()]


@ranks(2)
def test_state_is_sent_where_it_differs_and_what_cannot_is_named(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[int] = []  # bytes of each message that is not a digest
    broadcast, broadcast_bytes = operations.broadcast, state.broadcast_bytes

    def count(backend: operations.Backend, tensor: torch.Tensor, src: int) -> torch.Tensor:
        moved.append(tensor.nbytes)
        return broadcast(backend, tensor, src)

    def count_bytes(self: Collectives, data: bytes | None, src: int) -> bytes:
        result = broadcast_bytes(self, data, src)
        moved.append(len(result))
        return result

    monkeypatch.setattr(operations, "broadcast", count)
    monkeypatch.setattr(state, "broadcast_bytes", count_bytes)

    _, optimizer = trained(0)
    torchring.broadcast_optimizer_state(optimizer)
    assert sum(moved) == 0

    _, other = trained(rank)
    other.param_groups[0]["lr"] = 0.1 + rank
    places = [tensor.data_ptr() for tensor in tensors_of(other)]
    torchring.broadcast_optimizer_state(other)
    state_bytes = 2 * 4 * (300 * 100 + 100)
    assert state_bytes < sum(moved) < 1.1 * state_bytes
    assert [tensor.data_ptr() for tensor in tensors_of(other)] == places
    for tensor, right in zip(tensors_of(other), tensors_of(optimizer), strict=True):
        assert_bitwise(tensor, right)
    assert other.param_groups[0]["lr"] == 0.1

    torch.manual_seed(0)
    fresh = torch.optim.Adam(torch.nn.Linear(300, 100).parameters(), lr=0.3)  # as on a rank that finds no checkpoint
    torchring.broadcast_optimizer_state(fresh if rank == 1 else optimizer)
    if rank == 1:
        for tensor, right in zip(tensors_of(fresh), tensors_of(optimizer), strict=True):
            assert_bitwise(tensor, right)

    place = "param_groups[1]['schedule'] of the optimizer, of type "
    others = "PlanMismatchError: rank {} could not send its optimizer's state: TypeError: "
    for value, kind, holders, culprit in (
        (lambda step: step, "function", (0, 1), rank),
        (lambda step: step, "function", (1,), 1),
        (SimpleNamespace(period=rank), "SimpleNamespace", (0, 1), 0),
        (SimpleNamespace(period=5), "", (0, 1), None),
        ({"a": (rank, [0.5])}, "", (0, 1), None),
    ):
        _, optimizer = trained(0)
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(2))]})
        optimizer.param_groups[1]["schedule"] = value if rank in holders else None
        error = attempt(lambda optimizer=optimizer: torchring.wrap(optimizer).close())
        beginning = "TypeError: " if rank == culprit else others.format(culprit)
        assert error.startswith(f"{beginning}{place}{kind}, cannot be sent to other ranks: ") if kind else not error
        if holders == (0, 1) and kind == "function":
            assert error.endswith("or pass sync_initial_state=False to torchring.wrap if all ranks start alike")
    assert optimizer.param_groups[1]["schedule"] == {"a": (0, [0.5])}


@ranks(2)
def test_a_distributed_checkpoint_of_an_optimizer_without_state_changes_nothing(rank: int) -> None:
    """PyTorch takes a step for it, before the first step and after. sharding/test_checkpoints.py loads one."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.25, weight_decay=0.1), model)
    for step in range(2):
        before = digest(model.parameters())
        get_state_dict(model, optimizer)
        assert digest(model.parameters()) == before
        assert optimizer.param_groups[0]["lr"] == 0.25
        model(torch.full((2, 4), rank + step + 1.0)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert digest(model.parameters()) != before
    assert_same_everywhere(model.parameters())


@ranks(2, run_ranks)
def test_each_rank_keeps_its_part_of_a_sharded_state(rank: int) -> None:
    """Each rank of a ZeroRedundancyOptimizer has the state of a part of the parameters."""
    torchring.init(process_group=True)
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
    plain = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    optimizer = torchring.wrap(plain, model)
    for step in range(3):
        optimizer.zero_grad()
        model(torch.full((2, 4), rank + step + 1.0)).square().mean().backward()
        optimizer.step()
    with pytest.raises(ValueError, match="each rank has a part of the state"):
        torchring.broadcast_optimizer_state(plain)
    assert_same_everywhere(model.parameters())
