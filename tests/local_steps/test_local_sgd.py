"""Local steps are those of a simulation of all ranks in one process."""

import functools
import itertools
from typing import Any

import torch
from torch import Tensor, nn

import torchring
from tests.support.harness import ranks

EVERY = 6
NESTEROV = functools.partial(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)
ADAMW = functools.partial(torch.optim.AdamW, lr=0.01)


def make_model(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 1)).to(dtype)


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    dtype = next(model.parameters()).dtype
    return model(torch.randn(4, 6, generator=generator).to(dtype)).square().mean()  # type: ignore[no-any-return]


def simulate(
    num_ranks: int, num_steps: int, inner: Any = ADAMW, outer: Any = NESTEROV, overlap: int = 0, cut: Any = (range(6),)
) -> list[list[Tensor]]:
    """The parameters of all ranks. `cut`: the indices of the parameters in each fragment."""
    models = [make_model() for _ in range(num_ranks)]
    optimizers = [inner(model.parameters()) for model in models]
    own = [[*model.parameters()] for model in models]
    outers = [p.detach().clone().requires_grad_() for p in own[0]]
    optimizer = outer(outers)
    waiting: list[tuple[int, dict[int, Tensor]]] = []
    for step in range(1, num_steps + 1):
        for rank, model in enumerate(models):
            optimizers[rank].zero_grad()
            loss_of(model, rank, step).backward()
            optimizers[rank].step()
        with torch.no_grad():
            sent = [
                {i: sum(outers[i] - p[i] for p in own) / num_ranks for i in part}
                for f, part in enumerate(cut)
                if (step - (f + 1) * EVERY // len(cut)) % EVERY == 0
            ]
            waiting += [(step + overlap, each) for each in sent]
            for deltas in [each for due, each in waiting if due == step]:
                for i, delta in deltas.items():
                    outers[i].grad = delta
                optimizer.step()
                optimizer.zero_grad()
                for p, i in itertools.product(own, deltas):
                    p[i].copy_(0.5 * p[i] + 0.5 * outers[i] if overlap else outers[i])
    return [[p.detach() for p in each] for each in own]


def train(rank: int, num_steps: int, make: Any, model: nn.Module | None = None) -> tuple[nn.Module, Any]:
    model = model or make_model()
    optimizer = make(model)
    for step in range(1, num_steps + 1):
        optimizer.zero_grad()
        loss_of(model, rank, step).backward()
        optimizer.step()
    return model, optimizer


def is_close(model: nn.Module, expected: list[Tensor]) -> bool:
    return all(torch.allclose(p, e, rtol=1e-10, atol=1e-12) for p, e in zip(model.parameters(), expected, strict=True))


def are_alike(model: nn.Module) -> bool:
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    return all(torch.equal(each, flat) for each in torchring.all_gather(flat[None]))


THIRDS = ((0,), (1, 2), (3, 4, 5))  # of about equally many elements


@ranks(2)
def test_steps_are_those_of_one_process(rank: int) -> None:
    diloco = functools.partial(torchring.DiLoCo, every=EVERY)
    model, _ = train(rank, 12, lambda m: diloco(ADAMW(m.parameters()), m))
    assert is_close(model, simulate(2, 12)[rank])
    assert are_alike(model)
    assert not is_close(model, simulate(2, 12, outer=functools.partial(torch.optim.SGD, lr=0.7))[rank])  # can fail

    plain = lambda params: torch.optim.SGD(params, lr=1.0)  # noqa: E731
    model, _ = train(rank, 12, lambda m: torchring.LocalSGD(ADAMW(m.parameters()), m, every=EVERY))
    assert is_close(model, simulate(2, 12, outer=plain)[rank])
    for overlap in (0, 2):  # streaming
        make = lambda m, overlap=overlap: diloco(ADAMW(m.parameters()), m, fragments=3, overlap=overlap)  # noqa: E731
        model, optimizer = train(rank, 15, make)
        assert is_close(model, simulate(2, 15, overlap=overlap, cut=THIRDS)[rank])
        optimizer.load_outer()  # after what is under way
        assert are_alike(model)


@ranks(2)
def test_averaging_in_each_step_is_averaging_gradients(rank: int) -> None:
    sgd = functools.partial(torch.optim.SGD, lr=0.05)
    model, _ = train(rank, 5, lambda m: torchring.LocalSGD(sgd(m.parameters()), m, every=1))
    wrapped, _ = train(rank, 5, lambda m: torchring.wrap(sgd(m.parameters()), m))
    assert is_close(model, [p.detach() for p in wrapped.parameters()])
