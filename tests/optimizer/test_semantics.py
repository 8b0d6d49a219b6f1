"""What users rely on (every optimizer, model and way of calling backward here is legal in one process).

Unused parameters · several backwards, no_sync, accumulate, synchronize · tied, mixed, strided, empty, sparse, frozen
parameters · checkpointing, retain_graph, double backward, exceptions · op="sum" · the plan after the first step
· other programs' processes

Scripts run on ranks and in one process that does the work of all; see optimizer/test_contract.py.
"""

from __future__ import annotations

import copy
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

import torchring
from tests.optimizer.test_contract import (
    TINY_MB,
    Side,
    assert_as_one_process,
    attempt,
    batch,
    loss_on,
    small_model,
    values,
)
from tests.support.checks import assert_bitwise, assert_same_on_all_ranks, assert_within_rounding, digest
from tests.support.grids import grid
from tests.support.harness import run_pooled, run_ranks


def momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.02)


class Branches(nn.Module):
    """A stem and three heads, of which a call uses those it is told to."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.stem = nn.Linear(4, 6)
        self.heads = nn.ModuleList(nn.Linear(6, 2) for _ in range(3))
        self.double()

    def forward(self, x: Tensor, heads: Sequence[int]) -> Tensor:
        hidden = torch.tanh(self.stem(x))
        return torch.stack([self.heads[i](hidden) for i in heads]).sum(0)


# Unused parameters

_USAGE: dict[str, Callable[[int, int], list[int]]] = {  # which heads a rank uses in a step
    "unused on some ranks": lambda rank, step: [0, 1, 2] if rank == 0 else [0],
    "alternating": lambda rank, step: [(rank + step) % 3],
    "unused on all ranks": lambda rank, step: [0, 1],
    "from the third step on": lambda rank, step: [0] if step < 2 else [0, 1 + rank % 2],
    "until the third step": lambda rank, step: [0, 1, 2] if step < 2 else [0],
    "other sets each step": lambda rank, step: [[0], [1, 2], [0, 2], [1]][step % 4],
}


def _branches(side: Side, usage: str, set_to_none: bool, options: dict[str, Any]) -> Sequence[Any]:
    model = Branches()
    optimizer = side.wrap(momentum(model), model, **options)
    seen: list[Any] = []
    for step in range(5):
        optimizer.zero_grad(set_to_none)

        def loss(rank: int, step: int = step) -> Tensor:
            x, y = batch(rank, step)
            return nn.functional.mse_loss(model(x, _USAGE[usage](rank, step)), y)

        side.mean(loss).backward()
        seen += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
        optimizer.step()
    return [*seen, *values(model)]


@grid(
    "set_to_none, options, usage",
    [True, False],
    [{}, {"overlap": "thread", "bucket_mb": 25.0}, {"algorithm": "ring"}],
    list(_USAGE),
    keep=lambda set_to_none, options, usage: not options or (set_to_none and usage == "other sets each step"),
)
def test_unused_parameters_contribute_zero_or_stay_untouched(
    usage: str, set_to_none: bool, options: dict[str, Any]
) -> None:
    """Gradients, too: one that no rank computed stays None, so momentum and weight decay leave its parameter alone."""
    [first, _] = assert_as_one_process(_branches, usage, set_to_none, options)
    if usage == "unused on all ranks" and set_to_none:
        assert first[6:8] == [None, None]
        assert_bitwise(first[-1], dict(Branches().named_parameters())["heads.2.bias"].detach())


class _Failing(torch.autograd.Function):
    """Fails in backward, when the gradients of later layers have come."""

    @staticmethod
    def forward(_: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, *grads: Tensor) -> Tensor:
        raise KeyError("as a failing backward does")


def _owned(side: Side, how: str, usage: str, options: dict[str, Any]) -> Sequence[Any]:
    """The script zeroes and reads gradients through tensors of its own. `.grad` is None in the first step at most."""
    model = Branches()
    model.heads[2].requires_grad_(usage != "unfrozen")
    optimizer = side.wrap(momentum(model), model, **options)
    parameters = list(model.parameters())
    flat = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64)
    owned = [piece.view_as(p) for p, piece in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True)]
    for p, piece in zip(parameters, owned, strict=True):
        if how == "slices of one tensor":
            p.grad = piece
        elif how == "other memory":
            p.grad = torch.zeros_like(p)
            p.grad.data = piece
    uses = _USAGE.get(usage, lambda rank, step: [0, 1, 2] if rank or step else [2, 1, 0])
    seen: list[Any] = []
    for step in range(8):

        def loss(rank: int, step: int = step) -> Tensor:
            x, y = batch(rank, step)
            return nn.functional.mse_loss(model(x, uses(rank, step)), y)

        if step == 4:
            model.heads[2].requires_grad_(usage != "frozen")
        if usage == "failing" and step in (0, 2, 5):
            with pytest.raises(KeyError):
                _Failing.apply(model.heads[step % 3](torch.ones(6).double())).sum().backward()
        if how != "cached" or step:
            torch._foreach_zero_(owned)
        ranks = [rank for rank in side.mine if usage != "skipped" or step < 5 or (step == 5 and rank == 0)]
        if ranks:
            torch.stack([loss(rank) for rank in ranks]).mean().backward()
        elif side.is_wrapped:
            optimizer.skip()
        if how == "cached" and not step:
            owned = [p.grad for p in parameters if p.grad is not None]
        optimizer.synchronize() if side.is_wrapped else None
        seen += [grad.clone() for grad in owned]
        optimizer.step()
    return [*seen, *values(model)]


@grid(
    "how, usage, options",
    ["slices of one tensor", "other memory", "cached"],
    ["all", "until the third step", "skipped", "frozen", "unfrozen", "failing", "alternating"],
    [{}, {"bucket_mb": 25.0}, {"compression": "bf16"}, {"algorithm": "ring", "overlap": "thread"}],
    keep=lambda how, usage, options: (
        not options if usage == {"cached": "failing"}.get(how, "skipped") else (how[0], usage) == ("s", "all")
    ),
)
def test_gradients_that_the_script_has_get_the_results(how: str, usage: str, options: dict[str, Any]) -> None:
    """Those that were in `.grad` before backward, and those that torchring has put there, also with other buckets."""
    if how == "cached" and usage in ("unfrozen", "alternating"):
        return  # some have no gradient yet
    assert_as_one_process(_owned, how, usage, options, tolerance=0.02 if "compression" in options else 1e-9)


def _restrided(side: Side) -> Sequence[Any]:
    """Fused optimizers pair the elements of a parameter and its gradient by their addresses."""
    torch.manual_seed(5)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 64), nn.Linear(64, 2)).double()
    images, square = model[0], model[2]
    assert isinstance(images, nn.Conv2d)
    assert isinstance(square, nn.Linear)
    optimizer = side.wrap(torch.optim.AdamW(model.parameters(), lr=0.01, fused=True), model)
    for step in range(5):
        if step == 1:
            square.weight.data = square.weight.data.t().contiguous().t()
        elif step == 2:
            model.to(memory_format=torch.channels_last)
        optimizer.zero_grad()

        def loss(rank: int, step: int = step) -> Tensor:
            x = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(10 * step + rank)).double()
            hidden = x.flatten(1)[:, :64] if rank and step > 2 else images(x).flatten(1)  # a rank does without
            return model[3](square(hidden)).square().mean()

        side.mean(loss).backward()
        optimizer.step()
        assert all(p.grad is not None and p.grad.stride() == p.stride() for p in model.parameters())
    return values(model)


def test_gradients_have_the_strides_that_their_parameters_have_now() -> None:
    assert_as_one_process(_restrided)


def _stale(rank: int, world_size: int) -> list[Any]:
    """Not zeroed: the gradient of a parameter that nobody uses any more stays as it was, on all ranks."""
    model = Branches()
    optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.0), model, bucket_mb=TINY_MB)
    model(batch(rank, 0)[0], [0, 1]).sum().backward()
    stale = model.heads[1].weight.grad.clone()
    optimizer.step()
    for step in range(1, 4):
        model.stem.zero_grad()
        model(batch(rank, step)[0], [0]).sum().backward()
        optimizer.step()
    return [stale, model.heads[1].weight.grad.clone()]


def test_a_stale_gradient_that_nobody_uses_stays_as_it_is() -> None:
    results = run_pooled(_stale, 2)
    for stale, after in results:
        assert_bitwise(after, stale)
    assert_same_on_all_ranks([stale for stale, _ in results])


# Several backwards


def _accumulating(side: Side, how: str) -> Sequence[Any]:
    model = small_model()
    accumulate = 3 if how.startswith("accumulate") else 1
    optimizer = side.wrap(momentum(model), model, accumulate=accumulate)
    is_wrapped = isinstance(optimizer, torchring.DistributedOptimizer)
    seen: list[Any] = []
    for step in range(3):
        if how == "accumulate, two are dropped":
            for micro_step in range(2):
                side.mean(lambda rank, at=10 * step + 5 + micro_step: loss_on(model, rank, at)).backward()
        optimizer.zero_grad(set_to_none=how != "two backwards, zeroed in place")
        for micro_step in range(2 if "two backwards" in how or "left" in how else 3):
            last = micro_step == (1 if "two backwards" in how else 2)
            loss = side.mean(lambda rank, at=10 * step + micro_step: loss_on(model, rank, at))
            if is_wrapped and ((how == "no_sync" and not last) or how in ("synchronize", "accumulate in no_sync")):
                with optimizer.no_sync():
                    loss.backward()
            else:
                loss.backward()
        if is_wrapped and how in ("synchronize", "accumulate, two are left", "accumulate in no_sync"):
            optimizer.synchronize()
            optimizer.synchronize()
        seen += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        if is_wrapped and how == "accumulate":
            optimizer.synchronize()  # nothing is left to do
        optimizer.step()
    return [*seen, *values(model)]


@pytest.mark.parametrize(
    "how",
    ["two backwards", "two backwards, zeroed in place", "no_sync", "synchronize", "accumulate",
     "accumulate, two are left", "accumulate, two are dropped", "accumulate in no_sync"],
)  # fmt: skip
def test_gradients_add_up_over_backwards(how: str) -> None:
    assert_as_one_process(_accumulating, how)


def _decided_at_backward(side: Side) -> Sequence[Any]:
    model = small_model()
    optimizer = side.wrap(momentum(model), model)
    if not isinstance(optimizer, torchring.DistributedOptimizer):
        side.mean(lambda rank: loss_on(model, rank, 0)).backward()
        side.mean(lambda rank: loss_on(model, rank, 1)).backward()
        optimizer.step()
        return values(model)
    with optimizer.no_sync():
        synced = loss_on(model, side.mine[0], 0)  # the forward in here does not matter
    local = loss_on(model, side.mine[0], 1)
    with optimizer.no_sync():
        local.backward()
    is_local = attempt(optimizer.step)
    assert is_local.startswith("GradientError"), is_local
    synced.backward()
    optimizer.step()
    return values(model)


def test_no_sync_is_decided_when_backward_runs() -> None:
    assert_as_one_process(_decided_at_backward)


def _no_sync_survives(rank: int, world_size: int) -> str:
    model = small_model()
    optimizer = torchring.wrap(momentum(model), model)
    attempt(lambda: _fail_inside(optimizer))
    with optimizer.no_sync(), optimizer.no_sync():
        pass
    loss_on(model, rank, 0).backward()
    optimizer.step()
    return digest(model.parameters())


def _fail_inside(optimizer: torchring.DistributedOptimizer) -> None:
    with optimizer.no_sync():
        raise KeyError("an error of the script's")


def test_leaving_no_sync_by_an_exception_ends_it() -> None:
    assert_same_on_all_ranks(run_pooled(_no_sync_survives, 2))


def _by_hand(rank: int, world_size: int) -> list[Any]:
    model = small_model()
    optimizer = torchring.wrap(momentum(model), model, bucket_mb=TINY_MB)
    for step in range(3):
        for i, p in enumerate(model.parameters()):
            p.grad = torch.full_like(p, float((rank + 1) * (i + 1) * (step + 1)))
        optimizer.synchronize()
        optimizer.synchronize()
    return [[p.grad.unique().tolist() for p in model.parameters()], attempt(optimizer.step), digest(model.parameters())]


def test_gradients_put_there_by_hand_are_averaged_by_synchronize() -> None:
    results = run_pooled(_by_hand, 2)
    for means, problem, _ in results:
        assert means == [[1.5 * (i + 1) * 3] for i in range(6)]
        assert problem == ""
    assert_same_on_all_ranks([trained for _, _, trained in results])


def _synchronized_on_some(rank: int, world_size: int) -> list[Any]:
    """Only rank 1 has something local; synchronize() is collective and takes it along."""
    model = nn.Linear(3, 1).double()
    optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    if rank == 1:
        with optimizer.no_sync():
            model(torch.ones(1, 3).double()).sum().backward()
    optimizer.synchronize()
    optimizer.step()
    return [model.weight.grad.tolist(), digest(model.parameters())]


def test_synchronize_takes_along_what_one_rank_has() -> None:
    results = run_pooled(_synchronized_on_some, 2)
    assert [grad for grad, _ in results] == [[[0.5, 0.5, 0.5]]] * 2
    assert_same_on_all_ranks([trained for _, trained in results])


def _summed(side: Side, compression: str | None) -> Sequence[Any]:
    """op="sum" of the ranks' losses, each divided by the number of all rows, as scripts with uneven batches do."""
    model = small_model()
    optimizer = side.wrap(momentum(model), model, op="sum", compression=compression)
    for step in range(3):
        (optimizer if step == 1 else model).zero_grad(set_to_none=step == 1)

        def loss(rank: int, step: int = step) -> Tensor:
            rows = 5 - 3 * (rank % 2)
            x, y = batch(rank, step)
            return nn.functional.mse_loss(model(x[:rows]), y[:rows], reduction="sum") / 14

        sum((loss(rank) for rank in side.mine), torch.zeros(())).backward()
        optimizer.step()
    return values(model)


@pytest.mark.parametrize("compression", [None, "bf16"])
def test_sums_over_ranks(compression: str | None) -> None:
    assert_as_one_process(_summed, compression, tolerance=1e-9 if compression is None else 2e-2)


def _sum_of_sums(rank: int, world_size: int) -> list[Any]:
    model = nn.Linear(1, 1, bias=False).double()
    _optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, op="sum")
    x = torch.full((1, 1), float(rank + 1)).double()
    model(x).sum().backward()
    problem = attempt(lambda: model(x).sum().backward())
    return [problem, None if model.weight.grad is None else float(model.weight.grad)]


def test_a_sum_is_never_summed_again() -> None:
    """Two backwards with op="sum" make 2 * (1 + 2), or an error that says what to do; never 2 * 3 + 3."""
    for problem, gradient in run_pooled(_sum_of_sums, 2):
        assert (problem == "" and gradient == 6.0) or ("GradientError" in problem and "zero_grad" in problem)


# All kinds of parameters


class _Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embedding = nn.Embedding(7, 4)
        self.mix = nn.Linear(4, 4)
        self.out = nn.Linear(4, 7, bias=False)
        self.out.weight = self.embedding.weight
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.out(torch.tanh(self.mix(self.embedding((x[:, 0].abs() * 3).long() % 7))))


class _Odd(nn.Module):
    """A number, nothing, a transposed and an expanded-then-copied matrix."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.empty(0, 3))
        self.transposed = nn.Parameter(torch.randn(3, 4).t())
        self.gappy = nn.Parameter(torch.randn(8, 6)[::2, ::3])
        self.one = nn.Parameter(torch.randn(1, 1, 1))
        self.double()
        self.gappy.data = torch.randn(8, 6).double()[::2, ::3]
        self.transposed.data = torch.randn(3, 4).double().t()

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.transposed).sum(1, keepdim=True) * self.scale + x @ self.gappy * self.one + self.nothing.sum()


class _Images(nn.Module):
    def __init__(self, channels_last: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first = nn.Conv2d(3, 5, 3, padding=1)
        self.second = nn.Conv2d(5, 4, 2)
        self.double()
        self.format = torch.channels_last if channels_last else torch.contiguous_format
        self.to(memory_format=self.format)

    def forward(self, x: Tensor) -> Tensor:
        images = x[:, :3, None, None].expand(-1, -1, 4, 4).contiguous(memory_format=self.format)
        return self.second(torch.tanh(self.first(images))).sum((2, 3))


class _Complex(nn.Module):
    """Complex parameters, one of which gets the conjugate of a tensor as its gradient, and quantised weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.rotation = nn.Parameter(torch.randn(4, 3, dtype=torch.complex128).t().contiguous().t())
        self.phase = nn.Parameter(torch.randn(3, dtype=torch.complex128))
        self.offset = nn.Parameter(torch.randn(3, dtype=torch.float64))
        self.quantised = nn.Parameter(torch.tensor([3, -2, 1], dtype=torch.int8), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        turned = (x.to(torch.complex128) @ self.rotation).conj() * self.phase
        return turned.abs() * self.quantised.double() + self.offset


_KINDS: dict[str, Callable[[], nn.Module]] = {
    "tied": _Tied,
    "number, empty, strided": _Odd,
    "convolution": lambda: _Images(False),
    "channels_last": lambda: _Images(True),
    "complex, quantised": _Complex,
}


def _kinds(side: Side, kind: str, options: dict[str, Any]) -> Sequence[Any]:
    model = _KINDS[kind]()
    strides = [p.stride() for p in model.parameters()]
    optimizer = side.wrap(torch.optim.Adam(model.parameters(), lr=0.01), model, **options)
    for step in range(4):
        optimizer.zero_grad(set_to_none=step != 2)
        side.mean(lambda rank, step=step: model(batch(rank, step)[0]).square().mean()).backward()
        optimizer.step()
    same_strides = strides == [p.stride() for p in model.parameters()]
    return [same_strides, *[p.grad.clone() for p in model.parameters() if p.grad is not None], *values(model)]


@grid(
    "kind, options",
    list(_KINDS),
    [{}, {"bucket_mb": 25.0}, {"algorithm": "ring", "overlap": "thread"}],
    keep=lambda kind, options: not options or kind == next(iter(_KINDS)),
)
def test_all_kinds_of_parameters(kind: str, options: dict[str, Any]) -> None:
    [first, _] = assert_as_one_process(_kinds, kind, options)
    assert first[0] is True


def _mixed(rank: int, world_size: int, options: dict[str, Any]) -> list[Any]:
    """Local and reduced gradients of a model with parameters in four dtypes."""
    torch.manual_seed(5)
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.float32]
    layers = nn.ModuleList(nn.Linear(4, 4).to(dtype) for dtype in dtypes)

    def loss(of: nn.ModuleList) -> Tensor:
        x = batch(rank, 0)[0].float()
        for layer in of:
            x = torch.tanh(layer(x.to(layer.weight.dtype)))
        return x.float().square().mean()

    bare = copy.deepcopy(layers)
    loss(bare).backward()
    optimizer = torchring.wrap(torch.optim.SGD(layers.parameters(), lr=0.1), layers, **options)
    loss(layers).backward()
    reduced = [p.grad.clone() for p in layers.parameters()]
    optimizer.step()
    return [[p.grad for p in bare.parameters()], reduced, digest(layers.parameters())]


@pytest.mark.parametrize("options", [{}, {"bucket_mb": TINY_MB, "overlap": "thread"}, {"algorithm": "ring"}], ids=str)
def test_mixed_dtypes(options: dict[str, Any]) -> None:
    """Each in its own precision: one addition and an exact halving, so one rounding and that of the result."""
    results = run_pooled(_mixed, 2, options)
    assert_same_on_all_ranks([digest(reduced) for _, reduced, _ in results])
    assert_same_on_all_ranks([trained for _, _, trained in results])
    for i, gradient in enumerate(results[0][1]):
        parts = torch.stack([local[i].double() / 2 for local, _, _ in results])
        assert gradient.dtype == results[0][0][i].dtype
        assert_within_rounding(gradient, parts.sum(0), parts.abs().sum(0), 1, gradient.dtype)
    with pytest.raises(AssertionError):  # the ranks' own gradients do differ
        assert_same_on_all_ranks([digest(local) for local, _, _ in results])


class _Words(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.words = nn.Embedding(11, 3, sparse=sparse)
        self.bags = nn.EmbeddingBag(9, 3, mode="sum", sparse=sparse)
        self.out = nn.Linear(3, 2)
        self.double()

    def forward(self, x: Tensor, with_bags: bool) -> Tensor:
        ids = (x.abs() * 10).long()
        hidden = self.words(ids % 11).sum(1)
        return self.out(hidden + self.bags(ids % 9) if with_bags else hidden)


def _sparse(side: Side, sparse: bool, set_to_none: bool) -> Sequence[Any]:
    model = _Words(sparse and side.is_wrapped)
    optimizer = side.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for step in range(4):
        optimizer.zero_grad(set_to_none)

        def loss(rank: int, step: int = step) -> Tensor:
            return model(batch(rank, step)[0], with_bags=(rank + step) % 2 == 0 and step < 3).square().mean()

        side.mean(loss).backward()
        optimizer.step()
    gradients = [p.grad.to_dense() for p in (model.words.weight, model.out.weight) if p.grad is not None]
    return [*gradients, *values(model)]


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("sparse", [True, False])
def test_sparse_embeddings_train_as_dense_ones(sparse: bool, set_to_none: bool) -> None:
    assert_as_one_process(_sparse, sparse, set_to_none)


def _sparse_accumulated(side: Side) -> Sequence[Any]:
    model = _Words(side.is_wrapped)
    optimizer = side.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, accumulate=2)
    for step in range(2):
        optimizer.zero_grad()
        for at in (10 * step, 10 * step + 1):
            side.mean(lambda rank, at=at: model(batch(rank, at)[0], True).square().mean()).backward()
        optimizer.step()
    optimizer.zero_grad()
    for at in (50, 51, 52, 53):  # two rounds without zeroing
        side.mean(lambda rank, at=at: model(batch(rank, at)[0], True).square().mean()).backward()
    optimizer.step()
    return values(model)


def test_sparse_gradients_accumulate() -> None:
    assert_as_one_process(_sparse_accumulated)


def _sparse_without_model(rank: int, world_size: int) -> str:
    model = _Words(True)
    _optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1))
    return attempt(lambda: model(batch(rank, 0)[0], True).square().mean().backward())


def test_sparse_gradients_without_the_model_are_an_error_that_says_so() -> None:
    for problem in run_pooled(_sparse_without_model, 2):
        assert problem.startswith("GradientError")
        assert "sparse" in problem
        assert "model" in problem


# Parameters that come and go


def _frozen(side: Side, plan: str) -> Sequence[Any]:
    """f: the first layer is frozen in that step, t: it is trained."""
    model = small_model()
    first = model[0]
    assert isinstance(first, nn.Linear)
    for p in first.parameters():
        p.requires_grad_(plan[0] == "t")
    optimizer = side.wrap(momentum(model), model)
    for step, state in enumerate(plan):
        for p in first.parameters():
            p.requires_grad_(state == "t")
        optimizer.zero_grad()
        side.mean(lambda rank, step=step: loss_on(model, rank, step)).backward()
        optimizer.step()
    return values(model)


@pytest.mark.parametrize("plan", ["ffttt", "ttfff", "ttfftt", "fttff", "ftftft"])
def test_freezing_and_unfreezing(plan: str) -> None:
    assert_as_one_process(_frozen, plan)


def _thawed_on_accumulation(side: Side) -> Sequence[Any]:
    model = small_model()
    model[0].requires_grad_(False)
    optimizer = side.wrap(momentum(model), model, accumulate=2)
    for step in range(4):
        if step == 2:
            model[0].requires_grad_(True)
        optimizer.zero_grad()
        for at in (10 * step, 10 * step + 1):
            side.mean(lambda rank, at=at: loss_on(model, rank, at)).backward()
        optimizer.step()
    return values(model)


def test_unfreezing_with_micro_steps() -> None:
    assert_as_one_process(_thawed_on_accumulation)


# Ways to compute a gradient


class _Checkpointed(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))
        self.how = how
        self.double()

    def _segment(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(torch.tanh(self.first(x))))

    def _nested(self, x: Tensor) -> Tensor:
        return torch.tanh(self.third(checkpoint(self._segment, x, use_reentrant=True)))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "plain":
            return self.third(self._segment(x))
        if self.how == "not reentrant":
            return self.third(checkpoint(self._segment, x, use_reentrant=False))
        if self.how == "not reentrant, layer used twice":
            return self.third(self.first(checkpoint(self._segment, x, use_reentrant=False)))
        x = x.detach().requires_grad_()  # reentrant ones need an input that does
        if self.how == "reentrant":
            return self.third(checkpoint(self._segment, x, use_reentrant=True))
        if self.how == "reentrant, two segments":
            return checkpoint(self.third, checkpoint(self._segment, x, use_reentrant=True), use_reentrant=True)
        if self.how == "reentrant, nested":
            return checkpoint(self._nested, x, use_reentrant=True)
        assert self.how == "all inside a reentrant one"
        return checkpoint(lambda it: self.third(self._segment(it)), x, use_reentrant=True)


def _checkpointed(side: Side, how: str, options: dict[str, Any]) -> Sequence[Any]:
    model = _Checkpointed(how if side.is_wrapped or "twice" in how else "plain")
    if not side.is_wrapped and how == "reentrant, nested":
        model.forward = lambda x: torch.tanh(model.third(model._segment(x)))  # type: ignore[method-assign]
    optimizer = side.wrap(momentum(model), model, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(3):
            optimizer.zero_grad()
            side.mean(lambda rank, step=step: model(batch(rank, step)[0]).square().mean()).backward()
            optimizer.step()
    return values(model)


@grid(
    "how, options",
    ["not reentrant", "not reentrant, layer used twice", "reentrant", "reentrant, two segments", "reentrant, nested",
     "all inside a reentrant one"],
    [{}, {"bucket_mb": 25.0}, {"overlap": "thread"}],
    keep=lambda how, options: not options or how == "reentrant, two segments",
)  # fmt: skip
def test_gradient_checkpointing(how: str, options: dict[str, Any]) -> None:
    assert_as_one_process(_checkpointed, how, options)


def _graph_games(side: Side, game: str) -> Sequence[Any]:
    model = small_model()
    optimizer = side.wrap(momentum(model), model)
    seen: list[Any] = []
    for step in range(3):
        optimizer.zero_grad()
        if game == "retain_graph":
            loss = side.mean(lambda rank, step=step: loss_on(model, rank, step))
            loss.backward(retain_graph=True)
            loss.backward()
        elif game == "gradient penalty":

            def penalised(rank: int, step: int = step) -> Tensor:
                x = batch(rank, step)[0].requires_grad_()
                out = model(x)
                [slope] = torch.autograd.grad(out.sum(), x, create_graph=True)
                return out.square().mean() + (slope.norm(dim=1) - 1).square().mean()

            side.mean(penalised).backward()
        elif game == "gradient of parameters":

            def flattened(rank: int, step: int = step) -> Tensor:
                loss = loss_on(model, rank, step)
                slopes = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
                return loss + sum((slope.square().sum() for slope in slopes), torch.zeros(()))

            side.mean(flattened).backward()
        elif game == "inputs=":
            loss = side.mean(lambda rank, step=step: loss_on(model, rank, step))
            loss.backward(inputs=list(model[2].parameters()))
            seen.append(model[0].weight.grad)
        else:
            assert game == "hooks on tensors"
            handle = model[0].weight.register_hook(lambda gradient: 2 * gradient)
            side.mean(lambda rank, step=step: loss_on(model, rank, step)).backward()
            handle.remove()
        optimizer.step()
    return [*seen, *values(model)]


@pytest.mark.parametrize(
    "game", ["retain_graph", "gradient penalty", "gradient of parameters", "inputs=", "hooks on tensors"]
)
def test_games_with_the_graph(game: str) -> None:
    assert_as_one_process(_graph_games, game)


def _create_graph(rank: int, world_size: int) -> list[str]:
    model = small_model()
    optimizer = torchring.wrap(momentum(model), model)
    loss_on(model, rank, 0).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        problem = attempt(lambda: loss_on(model, rank, 1).backward(create_graph=True))
    for step in range(2):  # and it can be put right
        optimizer.zero_grad()
        loss_on(model, rank, step).backward()
        optimizer.step()
    return [problem, digest(model.parameters())]


def test_backward_with_create_graph_says_what_to_do_instead() -> None:
    results = run_pooled(_create_graph, 2)
    for problem, _ in results:
        assert problem.startswith("GradientError")
        assert "create_graph" in problem
        assert "autograd.grad" in problem
    assert_same_on_all_ranks([trained for _, trained in results])


class _Raises(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise ArithmeticError("an error in a custom function")


def _exception(side: Side, where: int, options: dict[str, Any]) -> Sequence[Any]:
    """In step 1 backward raises before the first layer's gradients, or before all."""
    model = small_model()
    optimizer = side.wrap(momentum(model), model, **options)
    raised = 0
    for step in range(4):
        optimizer.zero_grad()

        def loss(rank: int, step: int = step) -> Tensor:
            x, y = batch(rank, step)
            x = model[:where](x)
            return nn.functional.mse_loss(model[where:](_Raises.apply(x) if step == 1 else x), y)

        try:
            side.mean(loss).backward()
        except ArithmeticError:
            raised += 1
            continue
        optimizer.step()
    return [raised, *values(model)]


@grid(
    "where, options",
    [1, 5],
    [{}, {"bucket_mb": 25.0}, {"overlap": "thread"}, {"algorithm": "ring"}],
    keep=lambda where, options: not options or where == 1,
)
def test_training_goes_on_after_an_exception_in_backward(where: int, options: dict[str, Any]) -> None:
    [first, _] = assert_as_one_process(_exception, where, options)
    assert first[0] == 1


def _exception_then_step(rank: int, world_size: int) -> str:
    model = small_model()
    optimizer = torchring.wrap(momentum(model), model, bucket_mb=25.0)
    x, _ = batch(rank, 0)
    attempt(lambda: model[3:](_Raises.apply(model[:3](x))).sum().backward())
    return attempt(optimizer.step)


def test_half_a_backward_is_not_stepped_on() -> None:
    for problem in run_pooled(_exception_then_step, 2):
        assert problem.startswith("GradientError")
        assert "4." in problem  # the last layer's, which had arrived


# The plan


class _Backwards(nn.Module):
    """Layers registered in one order and used in another, which may change."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(6)).double()

    def forward(self, x: Tensor, order: Sequence[int]) -> Tensor:
        for i in order:
            x = torch.tanh(self.layers[i](x))
        return x


_ORDERS: dict[str, Callable[[int, int], list[int]]] = {
    "as registered": lambda rank, step: [0, 1, 2, 3, 4, 5],
    "reversed": lambda rank, step: [5, 4, 3, 2, 1, 0],
    "another each step": lambda rank, step: torch.randperm(6, generator=torch.Generator().manual_seed(step)).tolist(),
    "another on each rank": lambda rank, step: [(rank * 2 + step + i) % 6 for i in range(6)],
}


def _run_ordered(model: nn.Module, name: str, rank: int, step: int) -> Tensor:
    return model(batch(rank, step)[0], _ORDERS[name](rank, step)).square().mean()


def _ordered(side: Side, name: str, options: dict[str, Any]) -> Sequence[Any]:
    model = _Backwards()
    optimizer = side.wrap(momentum(model), model, **options)
    for step in range(5):
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        side.mean(lambda rank, step=step: _run_ordered(model, name, rank, step)).backward()
        optimizer.step()
    return values(model)


@grid(
    "order, options",
    list(_ORDERS),
    [{}, {"overlap": "thread"}, {"algorithm": "ring"}],
    keep=lambda order, options: not options or order == next(iter(_ORDERS)),
)
def test_gradients_may_come_in_any_order(order: str, options: dict[str, Any]) -> None:
    assert_as_one_process(_ordered, order, options)


def _first_launched(rank: int, world_size: int) -> list[list[str]]:
    """Which parameters are reduced already when the last layer's gradient arrives, by round. Inline, so it is seen; and
    by the ring, which waits for its peers at once."""
    model = _Backwards()
    optimizer = torchring.wrap(momentum(model), model, bucket_mb=TINY_MB, overlap="inline", algorithm="ring")
    rounds: list[list[str]] = []
    expected: dict[str, Tensor] = {}

    def look(_: Tensor) -> None:  # layer 5 is used first, so its gradient is the last one
        rounds.append([n for n, p in model.named_parameters() if p.grad is not None and _is_mean(p.grad, expected[n])])

    model.layers[5].weight.register_hook(lambda gradient: look(gradient))
    for step in range(3):
        optimizer.zero_grad()
        expected.update(_mean_gradients(model, world_size, step))
        model(batch(rank, step)[0], [5, 4, 3, 2, 1, 0]).square().mean().backward()
        optimizer.step()
    return rounds


def _mean_gradients(model: nn.Module, world_size: int, step: int) -> dict[str, Tensor]:
    """By torch.autograd.grad, which nobody hooks."""
    losses = [model(batch(rank, step)[0], [5, 4, 3, 2, 1, 0]).square().mean() for rank in range(world_size)]
    wanted = dict(model.named_parameters())
    hook = model.layers[5].weight._backward_hooks  # type: ignore[union-attr]
    saved, _ = dict(hook or {}), hook.clear() if hook else None
    gradients = torch.autograd.grad(torch.stack(losses).mean(), list(wanted.values()))
    if hook is not None:
        hook.update(saved)
    return dict(zip(wanted, gradients, strict=True))


def _is_mean(gradient: Tensor, mean: Tensor) -> bool:
    return torch.allclose(gradient, mean, rtol=1e-9, atol=1e-12)


def test_after_the_first_step_buckets_leave_in_the_order_of_gradients() -> None:
    """Registered 0 .. 5 and used 5 .. 0: planned for 5 first, which comes last, nothing can leave early in round 0."""
    for first, second, third in run_pooled(_first_launched, 2):
        assert first == []
        assert {"layers.0.weight", "layers.1.weight", "layers.2.weight", "layers.3.weight"} <= set(second)
        assert second == third


def _buffers_when_new_ones_are_opened(_: int, world_size: int) -> list[tuple[int, int]]:
    """(round, old buffers still held by the reduction), each time that buffers are opened after wrap."""
    model = _Backwards()
    optimizer = torchring.wrap(momentum(model), model, bucket_mb=TINY_MB)
    assert optimizer._sync is not None
    reduction = optimizer._sync.reduction
    old = [weakref.ref(bucket.wire) for bucket in reduction.buckets]
    open_wires = reduction.mover.open_wires
    seen: list[tuple[int, int]] = []

    def watched(specs: Any) -> Any:
        seen.append((reduction.num_rounds, sum(wire() is not None for wire in old)))
        return open_wires(specs)

    reduction.mover.open_wires = watched  # type: ignore[method-assign]
    for step in range(4):
        optimizer.zero_grad()
        model(batch(torchring.rank(), step)[0], [5, 4, 3, 2, 1, 0]).square().mean().backward()
        optimizer.step()
    return seen


def test_a_new_plan_does_not_take_a_second_set_of_buffers() -> None:
    """The plan that follows the first round's order is laid out when zero_grad() has let go of the old buffers."""
    assert run_pooled(_buffers_when_new_ones_are_opened, 2) == [[(1, 0)]] * 2


# Company


def _compiled(side: Side) -> Sequence[Any]:
    model = small_model()
    run = torch.compile(model, backend="aot_eager") if side.is_wrapped else model
    optimizer = side.wrap(momentum(model), model)
    for step in range(3):
        optimizer.zero_grad()
        side.mean(lambda rank, step=step: loss_on(run, rank, step)).backward()
        optimizer.step()
    return values(model)


def test_a_compiled_model() -> None:
    """Traced by Dynamo and differentiated ahead of time; run by PyTorch's own kernels, which needs no compiler."""
    assert_as_one_process(_compiled, run=run_ranks)


@pytest.mark.parametrize("algorithm", ["direct", "ring", "native"])
def test_another_default_device(algorithm: str) -> None:
    """What torchring makes for itself on the host does not follow torch.set_default_device."""
    assert_as_one_process(_elsewhere, algorithm)


def _elsewhere(side: Side, algorithm: str) -> Sequence[Any]:
    model = small_model()
    batches = [[batch(rank, step) for step in range(3)] for rank in range(2)]
    torch.set_default_device("meta")  # which nothing could be computed on
    try:
        optimizer = side.wrap(momentum(model), model, algorithm=algorithm)
        for step in range(3):
            optimizer.zero_grad()
            side.mean(
                lambda rank, step=step: nn.functional.mse_loss(model(batches[rank][step][0]), batches[rank][step][1])
            ).backward()
            optimizer.step()
        if side.is_wrapped:
            with optimizer.no_sync():
                model(batches[0][0][0]).sum().backward()
            optimizer.synchronize()
            optimizer.zero_grad()
            numbers = torch.arange(4.0, device="cpu")
            torchring.all_reduce(numbers)
            torchring.all_gather(numbers)
            torchring.reduce_scatter(numbers)
            torchring.all_to_all(numbers)
            torchring.broadcast_object("word")
    finally:
        torch.set_default_device(None)
    return values(model)


def _with_loader(side: Side) -> Sequence[Any]:
    """Worker processes are forked while torchring is up, and live on beside it."""
    model = small_model()
    optimizer = side.wrap(momentum(model), model, overlap="thread")
    draws = [batch(rank, 0) for rank in side.mine]
    data = TensorDataset(*(torch.stack(parts) for parts in zip(*draws, strict=True)))
    workers = 2 if side.is_wrapped else 0
    loader = DataLoader(data, batch_size=None, num_workers=workers, persistent_workers=workers > 0)
    for _ in range(3):
        optimizer.zero_grad()
        losses = [nn.functional.mse_loss(model(x), y) for x, y in loader]
        torch.stack(losses).mean().backward()
        optimizer.step()
    return values(model)


def test_data_loaders_with_worker_processes() -> None:
    assert_as_one_process(_with_loader, run=run_ranks)
