"""Which rank steps which elements, and which optimizers can be cut at all."""

from typing import Any

import pytest
import torch
from torch import nn

from torchring.sharding.cut import assign_whole, cut_elements
from torchring.sharding.kinds import Kind, cost_of, kind_of


def _parameters(*numels: int) -> dict[int, torch.Tensor]:
    return {i: torch.empty(n, device="meta", requires_grad=True) for i, n in enumerate(numels)}


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_every_element_belongs_to_one_rank(num_ranks: int) -> None:
    numels = (100_000, 7, 1, 70_001, 300)
    costs = dict(enumerate(map(float, numels)))
    for num_flats, flats in (
        (1, cut_elements(_parameters(*numels), num_ranks)),
        (5, assign_whole(_parameters(*numels), num_ranks, costs)),
    ):
        assert len(flats) == num_flats
        for flat in flats:
            owned = torch.zeros(flat.numel, dtype=torch.int64)
            for start, stop in flat.bounds:
                owned[start:stop] += 1
            assert (owned == 1).all()
            end = 0
            for index, (start, stop) in flat.spans.items():
                assert start * 4 % 64 == 0
                assert start >= end
                assert stop - start == numels[index]
                end = stop
            assert end == flat.numel
        assert sorted(index for flat in flats for index in flat.spans) == list(range(5))


def test_dtypes_and_frozen_parameters_stay_apart() -> None:
    parameters = _parameters(5, 5, 5, 5)
    parameters[1] = parameters[1].detach().bfloat16().requires_grad_()
    parameters[2].requires_grad_(False)
    assert [[*flat.spans] for flat in cut_elements(parameters, 2)] == [[0, 3], [1], [2]]


def test_whole_parameters_are_balanced_by_cost() -> None:
    parameters, costs = _parameters(10, 10, 10, 10, 10, 10), [8.0, 7.0, 6.0, 5.0, 4.0, 100.0]
    parameters[5].requires_grad_(False)
    loads = [0.0, 0.0]
    for index, flat in enumerate(assign_whole(parameters, 2, dict(enumerate(costs)))):
        assert [*flat.spans] == [index]
        if index < 5:
            loads[flat.owner or 0] += costs[index]
    assert sorted(loads) == [13.0, 17.0]


def test_the_cost_of_newton_schulz_is_not_the_size() -> None:
    tall, square = torch.empty(1024, 16), torch.empty(128, 128)
    muon = torch.optim.Muon([square])
    group = muon.param_groups[0]
    assert cost_of(square, group, muon) > 4 * cost_of(tall, group, muon)
    assert cost_of(tall, {}, torch.optim.SGD([tall], lr=0.1)) == tall.numel()


class _Lamb(torch.optim.Optimizer):
    """Each parameter's step depends on its own norm. `together`: and on what belongs to all of them."""

    def __init__(self, params: Any, together: str = "") -> None:
        super().__init__(params, {"lr": 0.1, "estimate": 1.0})
        self.together = together

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        group = self.param_groups[0]
        given = [p for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in given]).norm() if self.together == "norm" else group["estimate"]
        for p in given:
            state = self.state[p]
            state["moment"] = 0.9 * state.get("moment", 0.0) + p.grad
            p -= 0.1 * state["moment"] * p.norm() / norm
            if self.together == "estimate":
                group["estimate"] += float(p.grad.norm())
        if self.together == "indices":
            given[1].zero_()
        if self.together == "mode":
            raise RuntimeError("not in train mode")


class _Clips(torch.optim.Adam):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1.0)
        super().step()


class _Decays(torch.optim.SGD):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        given = [p for p in self.param_groups[0]["params"] if p.grad is not None]
        mean = torch.stack([p.grad.abs().mean() for p in given]).mean()
        for p in given:
            p.mul_(1 - 1e-5 / mean).sub_(p.grad.sign(), alpha=1e-3)


def test_kinds() -> None:
    layer = nn.Linear(6, 4)
    layer.weight.grad = torch.ones_like(layer.weight)
    assert kind_of(torch.optim.AdamW(layer.parameters())) is Kind.ELEMENTS
    before = layer.weight.detach().clone()
    lamb = _Lamb(layer.parameters())
    torch.optim.lr_scheduler.StepLR(lamb, 1)  # puts a step of its own into the optimizer
    state = torch.get_rng_state()
    assert kind_of(lamb) is Kind.WHOLE
    assert torch.equal(layer.weight, before)
    assert not lamb.state
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (torch.optim.LBFGS, "looks at all parameters together"),
        (lambda p: torch.optim.Adam(p, differentiable=True), "differentiable=True"),
        (lambda p: _Lamb(p, "norm"), "depends on other parameters"),
        (lambda p: _Lamb(p, "estimate"), "depends on other parameters"),
        (lambda p: _Lamb(p, "indices"), "alone (IndexError"),
        (lambda p: _Lamb(p, "mode"), "call its train() before torchring.wrap()"),
        (lambda p: _Clips(p, lr=1e-3), "depends on other parameters"),
        (lambda p: _Decays(p, lr=1e-3), "depends on other parameters"),
    ],
)
def test_what_cannot_be_cut_is_refused_with_the_reason(make: Any, reason: str) -> None:
    with pytest.raises(ValueError, match="shard=True does not work with") as caught:
        kind_of(make(nn.Linear(6, 4).parameters()))
    assert reason in str(caught.value)


def test_state_that_belongs_to_no_parameter_is_refused() -> None:
    lamb = _Lamb(nn.Linear(6, 4).parameters())
    lamb.state["global"] = {}
    with pytest.raises(ValueError, match="belong to no parameter"):
        kind_of(lamb)
