"""Local steps are those of a simulation of all ranks in one process."""

import copy
import functools
import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchring
from tests.support.harness import ranks, run_ranks
from tests.support.netns import needs_hosts, run_on_hosts
from tests.support.training import attempt
from torchring.bench.netns import Network
from torchring.errors import GradientError, PeerLostError, PlanMismatchError

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


def train(rank: int, num_steps: int, make: Any) -> tuple[nn.Module, Any]:
    model = make_model()
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
        assert is_close(model, simulate(2, 15, overlap=overlap, cut=((0,), (1,), (2, 3, 4, 5)))[rank])
        optimizer.load_outer()  # after what is under way
        assert are_alike(model)


@ranks(2)
def test_what_codes_lose_is_sent_later(rank: int) -> None:
    """Gradients are constant, so after many outer steps the mean is that of full precision; without feedback not."""
    found = {}
    for kind in ("full", "coded", "forgets"):
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(6, 60), nn.Tanh(), nn.Linear(60, 1))
        before = [p.detach().clone() for p in model.parameters()]
        sgd = torch.optim.SGD(model.parameters(), lr=0.01)
        outer = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = torchring.DiLoCo(sgd, model, every=2, outer=outer, bits=None if kind == "full" else 2)
        generator = torch.Generator().manual_seed(rank)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator)
        for _ in range(40):
            optimizer.step()
            if kind == "forgets":
                optimizer._fragments[0].feedback = None
        assert are_alike(model)
        found[kind] = (next(model.parameters()) - before[0]).detach()
    errors = {kind: float((found[kind] - found["full"]).norm() / found["full"].norm()) for kind in found}
    assert errors["coded"] < 0.15 < 0.3 < errors["forgets"]


@ranks(2)
def test_muon_16_bits_complex_buffers_and_a_scaler(rank: int) -> None:
    """Two optimizers of one model; parameters of several dtypes; a GradScaler that leaves out steps of one rank."""
    torch.manual_seed(rank)  # the model of rank 0 is everybody's
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    both = [torch.optim.Muon(matrices, lr=0.05), torch.optim.AdamW(others, lr=0.05)]
    optimizers = [torchring.DiLoCo(each, model, every=3) for each in both]
    schedulers = [torch.optim.lr_scheduler.StepLR(each, 3, gamma=0.5) for each in optimizers]
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=100)
    for step in range(6):
        loss = model(torch.randn(4, 8) + rank).square().mean()
        scaler.scale(loss * (float("inf") if rank == 1 and step == 1 else 1.0)).backward()
        scaler.unscale_(optimizers[0])
        for each, scheduler in zip(optimizers, schedulers, strict=True):
            scaler.step(each)
            each.zero_grad()
            scheduler.step()
        scaler.update()
    assert scaler.get_scale() == (8.0 if rank == 1 else 16.0)
    assert optimizers[0].param_groups[0]["lr"] == 0.05 * 0.25
    assert are_alike(model)
    means = torchring.all_gather(torch.cat([model[1].running_mean, model[1].running_var])[None])
    assert torch.equal(means[0], means[1])
    assert abs(float(means[0, :8].mean())) > 1e-3
    counts = torchring.all_gather(next(iter(both[1].state.values()))["step"].reshape(1))
    assert counts.tolist() == [6, 5]  # rank 1 has left one out, and came to each exchange all the same

    params = [nn.Parameter(torch.full((3,), 1.0 + rank, dtype=d)) for d in (torch.bfloat16, torch.complex64)]
    params.append(nn.Parameter(torch.ones(3, 1)))
    params[2].grad = torch.sparse_coo_tensor([[rank]], [[2.0]], (3, 1))
    optimizer = torchring.LocalSGD(torch.optim.SGD(params, lr=1.0), every=1)
    params[0].grad, params[1].grad = torch.full_like(params[0], rank), torch.full_like(params[1], 2j * rank)
    optimizer.step()
    assert params[0].tolist() == [0.5] * 3  # all began with 1
    assert params[1].tolist() == [1 - 1j] * 3
    assert params[2].flatten().tolist() == [0.0, 0.0, 1.0]
    optimizer.found_inf = torch.tensor(1.0)  # as a GradScaler says: no rank makes this step
    optimizer.step()
    assert params[1].tolist() == [1 - 1j] * 3


@ranks(2)
def test_checkpoints_go_on_where_they_were(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    make = lambda m: torchring.DiLoCo(ADAMW(m.parameters()), m, every=EVERY, fragments=2, overlap=1, bits=4)  # noqa: E731
    whole, _ = train(rank, 20, make)
    model, optimizer = train(rank, 11, make)
    own = copy.deepcopy((optimizer.state_dict(), model.state_dict()))
    saved = copy.deepcopy(torchring.broadcast_object(own))
    for state in (own, saved):
        again = make_model()
        optimizer = make(again)
        again.load_state_dict(state[1])
        optimizer.load_state_dict(state[0])
        for step in range(12, 21):
            optimizer.zero_grad()
            loss_of(again, rank, step).backward()
            optimizer.step()
        if state is own:
            assert all(torch.equal(p, q) for p, q in zip(again.parameters(), whole.parameters(), strict=True))
        optimizer.load_outer()
        assert are_alike(again)
    plain = ADAMW(again.parameters())
    plain.load_state_dict(optimizer.state_dict())  # a script without torchring
    with pytest.raises(TypeError, match="use state_dict"):
        copy.deepcopy(optimizer)


@ranks(2)
def test_mistakes_are_errors_on_all_ranks(rank: int) -> None:
    def diloco(**options: Any) -> torchring.DiLoCo:
        model = make_model()
        return torchring.DiLoCo(ADAMW(model.parameters()), model, **{"every": 4, **options})

    def refused(kind: type[Exception], text: str, function: Any, **options: Any) -> None:
        with pytest.raises(kind, match=text):
            function(**options)

    def steps(optimizer: Any, number: int) -> None:
        for _ in range(number):
            optimizer.step()

    for options, text in (
        ({"every": 0}, "every must be a whole number, at least 1, got 0"),
        ({"every": "2"}, "every must be a whole number"),
        ({"fragments": 5}, "fragments must be a whole number, at least 1, at most every=4, got 5"),
        ({"overlap": 4}, "overlap must be a whole number, at least 0, less than every=4, got 4"),
        ({"bits": 8}, "bits must be 4, 2 or None"),
    ):
        refused(ValueError, text, diloco, **options)
        if rank:  # on one rank only
            refused(ValueError, text, diloco, **options)
        else:
            refused(PlanMismatchError, "rank 1 could not make its DiLoCo: ValueError", diloco)
    refused(PlanMismatchError, "every=4.*every=5|every=5.*every=4", diloco, every=4 + rank)
    model = make_model()
    wrapped = torchring.wrap(ADAMW(model.parameters()), model)
    refused(ValueError, "within='host'", lambda: torchring.DiLoCo(wrapped, model, every=2))
    wrapped.close()
    for other, text in ((torch.zeros(2).long(), "is torch.int64, which"), (torch.eye(2).to_sparse(), "a dense tensor")):
        parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(other, requires_grad=False)]
        optimizer = torch.optim.SGD(parameters)
        refused(ValueError, f"group0.param1 .*{text}", lambda o=optimizer: torchring.LocalSGD(o, every=2))
    optimizer, new = diloco(), {"params": [nn.Parameter(torch.zeros(2))]}
    refused(ValueError, "add parameters before", lambda: optimizer.add_param_group(new))
    optimizer.optimizer.add_param_group(new)
    refused(ValueError, "add parameters before", optimizer.step)

    for optimizer, overlap in ((diloco(), 0), (diloco(overlap=1), 1)):
        parameters = list(optimizer._names)
        steps(optimizer, 1)
        outer = [p.detach().clone() for p in optimizer._outer.values()]
        with torch.no_grad():
            parameters[2].fill_(float("nan") if rank else 0.0)
        steps(optimizer, 2 + overlap)
        text = "2.weight is not finite on rank 1 after 4 inner steps"
        refused(GradientError, text, steps, optimizer=optimizer, number=1)
        assert all(torch.equal(o, p) for o, p in zip(outer, optimizer._outer.values(), strict=True))
        optimizer.load_outer()
        with torch.no_grad():
            optimizer._outer[parameters[1]].mul_(1.0 + rank)
        text = "outer value of 0.bias is not the same.*rank 1 differ"
        refused(GradientError, text, steps, optimizer=optimizer, number=4)
        optimizer._num_steps += 4 * rank
        text = "rank 1 exchanges the fragment of 0.weight after inner step"
        refused(PlanMismatchError, text, steps, optimizer=optimizer, number=4)


@ranks(2, run_ranks)
def test_a_rank_that_steps_less_often_is_an_error(rank: int) -> None:
    model = make_model()
    optimizer = torchring.LocalSGD(ADAMW(model.parameters()), model, every=4)
    for _ in range(3):
        optimizer.step()
    if rank == 0:
        with pytest.raises(PeerLostError, match="rank 1"):
            optimizer.step()


def test_alone_it_is_the_inner_optimizer() -> None:
    model, optimizer = train(0, 7, lambda m: torchring.LocalSGD(ADAMW(m.parameters()), m, every=2))
    plain, _ = train(0, 7, lambda m: ADAMW(m.parameters()))
    assert is_close(model, [*plain.parameters()])
    assert optimizer.step(lambda: loss_of(model, 0, 1).detach()) > 0
    torchring.shutdown()


@needs_hosts
def test_within_hosts_gradients_are_averaged_in_each_step() -> None:
    with Network(2) as network:
        results = run_on_hosts(network, (2, 1), _train_within)
    for found in results[1:]:
        assert all(torch.equal(p, q) for p, q in zip(found[0], results[0][0], strict=True))
    assert all(torch.equal(p, q) for p, q in zip(results[0][1], results[1][1], strict=True))  # of one host
    assert not torch.equal(results[0][1][0], results[2][1][0])
    for found in results:  # a host counts by its ranks
        torch.testing.assert_close(found[2], found[3], rtol=1e-10, atol=1e-12)
        assert "2.weight is not finite on rank 2 after 6 inner steps" in found[4]


def _train_within(rank: int, world_size: int) -> Any:
    make = lambda m: torchring.DiLoCo(ADAMW(m.parameters()), m, every=2, within="host", bits=4)  # noqa: E731
    even, _ = train(rank, 4, make)
    odd, optimizer = train(rank, 5, make)
    sgd = functools.partial(torch.optim.SGD, lr=0.05)
    each, _ = train(rank, 3, lambda m: torchring.LocalSGD(sgd(m.parameters()), m, every=1, within="host"))
    wrapped, _ = train(rank, 3, lambda m: torchring.wrap(sgd(m.parameters()), m))
    found = [[p.detach().clone() for p in model.parameters()] for model in (even, odd, each, wrapped)]
    with torch.no_grad():
        odd[2].weight.fill_(float("nan") if rank == 2 else 0.0)
    odd.zero_grad()
    loss_of(odd, rank, 6).backward() if rank < 2 else None
    return *found, attempt(optimizer.step)


@ranks(2)
def test_weights_that_are_loaded_before_the_first_step_are_where_training_begins(rank: int) -> None:
    model = nn.Linear(3, 1)
    optimizer = torchring.DiLoCo(torch.optim.SGD(model.parameters(), lr=0.0), model, every=1)
    optimizer.state_dict()  # as torchring.elastic.State calls it
    loaded = {"weight": torch.full((1, 3), 10.0), "bias": torch.ones(1)}
    model.load_state_dict(loaded)
    saved = optimizer.state_dict()["local_steps"]["parameters"]
    assert [values.flatten().tolist() for values in saved] == [[10.0] * 3, [1.0]]
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    assert model.weight.tolist() == [[10.0] * 3]

    one = nn.Parameter(torch.zeros(1))
    average = torchring.LocalSGD(torch.optim.SGD([one], lr=1.0), every=4)
    for i in range(4):
        if i == 3 and rank == 0:
            average.load_outer()  # its weight is that of the one step since
        one.grad = -torch.ones(1)
        average.step()
    assert one.item() == pytest.approx((1 * 1 + 4 * 4) / 5)
    torchring.shutdown()
    with pytest.raises(ValueError, match="belongs to a world that was shut down"):
        optimizer.step()


@ranks(2)
def test_fragments_are_never_empty() -> None:
    model = nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 1))
    sgd, some = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(model[0].parameters(), lr=1.0)
    with pytest.raises(ValueError, match="outer has other parameters"):
        torchring.DiLoCo(sgd, model, every=4, outer=some)
    with pytest.raises(ValueError, match="fragments=5, but the optimizer has 4 parameters"):
        torchring.DiLoCo(sgd, model, every=5, fragments=5)
    outer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer = torchring.DiLoCo(sgd, model, every=4, fragments=4, bits=4, outer=outer)
    before = [p.detach().clone() for p in model.parameters()]
    for _ in range(4):
        model(torch.ones(1, 30)).sum().backward()
        optimizer.step()
    assert not any(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
