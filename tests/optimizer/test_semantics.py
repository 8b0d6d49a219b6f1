"""What a training on ranks computes: the same as one process that does the work of all, and as DistributedDataParallel.

Unused parameters · several backwards, no_sync, accumulate, synchronize · op="sum" · all kinds of parameters · ways to
compute a gradient · the plan after the first step · features of PyTorch · compilers and other programs' processes
· parity with DDP, 2 ranks: bit for bit, whatever the optimizer, buckets, algorithm, overlap; 3 ranks: every gradient
within 4 roundings of the float64 mean of what the ranks computed
"""

from __future__ import annotations

import copy
import itertools
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations, parametrize
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import torchring
from tests.support.checks import (
    assert_bitwise,
    assert_same_on_all_ranks,
    assert_within_rounding,
    digest,
)
from tests.support.grids import grid
from tests.support.harness import ranks, run_pooled, run_ranks
from tests.support.scripts import (
    KINDS,
    ORDERS,
    USAGE,
    Branches,
    Chain,
    accumulating,
    branches,
    checkpointed,
    failing,
    frozen,
    graph_games,
    mixed,
    of_kind,
    ordered,
    sparse_words,
    summed,
)
from tests.support.training import (
    TINY_MB,
    Side,
    assert_as_one_process,
    attempt,
    batch,
    loss_on,
    momentum,
    small_model,
    values,
)

# Unused parameters


@grid(
    "set_to_none, options, usage",
    [True, False],
    [{}, {"overlap": "thread", "bucket_mb": 25.0}, {"algorithm": "native"}],
    list(USAGE),
    keep=lambda set_to_none, options, usage: not options or (set_to_none and usage == "other sets each step"),
)
def test_unused_parameters_contribute_zero_or_stay_untouched(
    usage: str, set_to_none: bool, options: dict[str, Any]
) -> None:
    """Gradients, too: one that no rank computed stays None, so momentum and weight decay leave its parameter alone."""
    [first, _] = assert_as_one_process(branches, usage, set_to_none, options)
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
    uses = USAGE.get(usage, lambda rank, step: [0, 1, 2] if rank or step else [2, 1, 0])
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
    [{}, {"bucket_mb": 25.0}, {"compression": "bf16"}, {"algorithm": "native", "overlap": "thread"}],
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


# Several backwards


@pytest.mark.parametrize(
    "how",
    ["two backwards", "two backwards, zeroed in place", "no_sync", "synchronize", "accumulate",
     "accumulate, two are left", "accumulate, two are dropped", "accumulate in no_sync"],
)  # fmt: skip
def test_gradients_add_up_over_backwards(how: str) -> None:
    assert_as_one_process(accumulating, how)


@pytest.mark.parametrize("compression", [None, "bf16"])
def test_sums_over_ranks(compression: str | None) -> None:
    assert_as_one_process(summed, compression, tolerance=1e-9 if compression is None else 2e-2)


# All kinds of parameters


@grid(
    "kind, options",
    list(KINDS),
    [{}, {"bucket_mb": 25.0}, {"algorithm": "native", "overlap": "thread"}],
    keep=lambda kind, options: not options or kind == next(iter(KINDS)),
)
def test_all_kinds_of_parameters(kind: str, options: dict[str, Any]) -> None:
    [first, _] = assert_as_one_process(of_kind, kind, options)
    assert first[0] is True


@pytest.mark.parametrize("options", [{}, {"bucket_mb": TINY_MB, "overlap": "thread"}, {"algorithm": "native"}], ids=str)
def test_mixed_dtypes(options: dict[str, Any]) -> None:
    """Each in its own precision: one addition and an exact halving, so one rounding and that of the result."""
    results = run_pooled(mixed, 2, options)
    assert_same_on_all_ranks([digest(reduced) for _, reduced, _ in results])
    assert_same_on_all_ranks([trained for _, _, trained in results])
    for i, gradient in enumerate(results[0][1]):
        parts = torch.stack([local[i].double() / 2 for local, _, _ in results])
        assert gradient.dtype == results[0][0][i].dtype
        assert_within_rounding(gradient, parts.sum(0), parts.abs().sum(0), 1, gradient.dtype)
    with pytest.raises(AssertionError):  # the ranks' own gradients do differ
        assert_same_on_all_ranks([digest(local) for local, _, _ in results])


@pytest.mark.parametrize("set_to_none", [True, False])
@pytest.mark.parametrize("sparse", [True, False])
def test_sparse_embeddings_train_as_dense_ones(sparse: bool, set_to_none: bool) -> None:
    assert_as_one_process(sparse_words, sparse, set_to_none)


# Parameters that come and go


@pytest.mark.parametrize("plan", ["ffttt", "ttfff", "ttfftt", "fttff", "ftftft"])
def test_freezing_and_unfreezing(plan: str) -> None:
    assert_as_one_process(frozen, plan)


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


@grid(
    "how, options",
    ["not reentrant", "not reentrant, layer used twice", "reentrant", "reentrant, two segments", "reentrant, nested",
     "all inside a reentrant one"],
    [{}, {"bucket_mb": 25.0}, {"overlap": "thread"}],
    keep=lambda how, options: not options or how == "reentrant, two segments",
)  # fmt: skip
def test_gradient_checkpointing(how: str, options: dict[str, Any]) -> None:
    assert_as_one_process(checkpointed, how, options)


@pytest.mark.parametrize(
    "game", ["retain_graph", "gradient penalty", "gradient of parameters", "inputs=", "hooks on tensors"]
)
def test_games_with_the_graph(game: str) -> None:
    assert_as_one_process(graph_games, game)


def _cached(side: Side, num_parts: int) -> list[Tensor]:
    """GradCache: the embeddings have no graph, and a hook on the loss runs the model again, in parts."""
    model = small_model()
    optimizer = side.wrap(momentum(model), model)

    def loss_of(embeddings: Tensor) -> Tensor:
        return (embeddings @ embeddings.T).logsumexp(1).mean()

    for step in range(3):
        optimizer.zero_grad()
        if not side.is_wrapped:
            side.mean(lambda rank, step=step: loss_of(model(batch(rank, step)[0]))).backward()
        else:
            x = batch(side.mine[0], step)[0]
            embeddings = model(x).detach().requires_grad_()
            loss = loss_of(embeddings)
            (cache,) = torch.autograd.grad(loss, embeddings)

            def run_again(grad: Tensor, x: Tensor = x, cache: Tensor = cache) -> None:
                with torch.enable_grad():
                    for part, of_part in zip(x.chunk(num_parts), cache.chunk(num_parts), strict=True):
                        ((model(part) * of_part).sum() * grad).backward()

            loss = loss.detach().requires_grad_()
            loss.register_hook(run_again)
            (loss * 1.0).backward()
        optimizer.step()
    return values(model)


@pytest.mark.parametrize("num_parts", [1, 3])
def test_a_backward_inside_a_hook_of_another_one(num_parts: int) -> None:
    assert_as_one_process(_cached, num_parts)


class _SAM(torch.optim.Optimizer):
    """As its authors write it: `step()` is left to the optimizer that it holds."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1, "rho": 0.05})
        self.base_optimizer = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
        self.param_groups = self.base_optimizer.param_groups

    def parameters(self) -> list[Tensor]:
        return [p for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def first_step(self) -> None:
        scale = 0.05 / torch.stack([p.grad.norm() for p in self.parameters() if p.grad is not None]).norm()
        for p in self.parameters():
            self.state[p]["old"] = p.clone()
            p.add_(p.grad * scale)
        self.zero_grad()

    @torch.no_grad()
    def second_step(self) -> None:
        for p in self.parameters():
            p.copy_(self.state[p]["old"])
        self.base_optimizer.step()
        self.zero_grad()


def _sam(side: Side, how: str) -> list[Any]:
    """Gradients for the ascent are those of all ranks, or with "own" each rank's. "nan": one of rank 1's, late."""
    model = nn.Sequential(small_model(), nn.BatchNorm1d(2, affine=False).double())
    optimizer = side.wrap(_SAM(model.parameters()), model)
    ascents = [(rank,) for rank in side.mine] if how == "own" else [side.mine]
    problem = ""
    for step in range(3):
        gradients: list[list[Tensor]] = []
        for members in ascents:  # one, on a rank
            with optimizer.no_sync() if how == "own" and side.is_wrapped else nullcontext():
                torch.stack([loss_on(model, rank, 2 * step) for rank in members]).mean().backward()
            optimizer.first_step()
            losses = [loss_on(model, rank, 2 * step + 1) for rank in members]
            if how == "nan" and step == 2 and 1 in side.mine:
                losses.append(torch.tensor(torch.nan) * losses[0])
            torch.stack(losses).mean().backward()
            if len(ascents) > 1:
                gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
                for p in model.parameters():
                    p.data.copy_(optimizer.state[p]["old"])
                optimizer.zero_grad()
        for p, own in zip(model.parameters(), zip(*gradients, strict=True), strict=False):
            p.grad = torch.stack(own).mean(0)
        if how == "nan" and step == 2 and not side.is_wrapped:
            for p in model.parameters():
                p.data.copy_(optimizer.state[p]["old"])
        else:
            problem = attempt(optimizer.second_step)
    assert ("NaN or infinity came from rank 1" in problem) == bool(how == "nan" and side.is_wrapped), problem
    if side.is_wrapped and how != "nan":
        first, second = torchring.all_gather(model.get_buffer("1.running_var")[None])
        assert torch.equal(first, second)
    return values(model)


@pytest.mark.parametrize("how", ["together", "own", "nan"])
def test_a_method_that_steps_an_optimizer_inside_is_a_step(how: str) -> None:
    """Parameters that each rank has moved its own way are no replicas until they are put back."""
    assert_as_one_process(_sam, how)


@grid(
    "where, options",
    [1, 5],
    [{}, {"bucket_mb": 25.0}, {"overlap": "thread"}, {"algorithm": "native"}],
    keep=lambda where, options: not options or where == 1,
)
def test_training_goes_on_after_an_exception_in_backward(where: int, options: dict[str, Any]) -> None:
    [first, _] = assert_as_one_process(failing, where, options)
    assert first[0] == 1


# The plan


@grid(
    "order, options",
    list(ORDERS),
    [{}, {"overlap": "thread"}, {"algorithm": "native"}],
    keep=lambda order, options: not options or order == next(iter(ORDERS)),
)
def test_gradients_may_come_in_any_order(order: str, options: dict[str, Any]) -> None:
    assert_as_one_process(ordered, order, options)


@ranks(2)
def test_a_new_plan_does_not_take_a_second_set_of_buffers() -> None:
    """The plan that follows the first reduction's order is laid out when zero_grad() has let go of the old buffers."""
    model = Chain()
    optimizer = torchring.wrap(momentum(model), model, bucket_mb=TINY_MB)
    assert optimizer._sync is not None
    reducer = optimizer._sync
    old = [weakref.ref(bucket.wire) for bucket in reducer.layout.buckets]
    open_wires = reducer.layout.all_reduce.open_wires
    seen: list[tuple[int, int]] = []  # (reductions, old buffers still held) each time that buffers are opened

    def watched(specs: Any) -> Any:
        seen.append((reducer.num_reductions, sum(wire() is not None for wire in old)))
        return open_wires(specs)

    reducer.layout.all_reduce.open_wires = watched  # type: ignore[method-assign]
    for step in range(4):
        optimizer.zero_grad()
        model(batch(torchring.rank(), step)[0], [5, 4, 3, 2, 1, 0]).square().mean().backward()
        optimizer.step()
    assert seen == [(1, 0)]
    order = [name.split(".")[1] for bucket in reducer.layout.buckets for name in bucket.names]
    assert order == list("001122334455"), "registered 0 .. 5 and used 5 .. 0, so the gradients of 0 come first"


# Company


@pytest.mark.parametrize("algorithm", ["direct", "native"])
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
            with torch.no_grad():
                next(model.parameters()).mul_(1.0)  # so replicas are compared, in a reduction outside of autograd
            optimizer.skip()
            numbers = torch.arange(4.0, device="cpu")
            torchring.all_reduce(numbers)
            torchring.all_gather(numbers)
            torchring.reduce_scatter(numbers)
            torchring.all_to_all(numbers)
            torchring.broadcast_object("word")
    finally:
        torch.set_default_device(None)
    return values(model)


@ranks(2, start=run_ranks)
def test_a_wrapped_model_is_compiled_without_a_graph_break(rank: int) -> None:
    """Of a model that is wrapped, and of the same model that is not; and how often the wrapped one was compiled."""
    torch._dynamo.reset()
    counts = []
    for wraps in (False, True):
        model = small_model()
        sgd: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = torchring.wrap(sgd, model) if wraps else sgd
        for step in range(2):
            optimizer.zero_grad()
            loss_on(model, rank, step).backward()
            optimizer.step()
        counts.append(torch._dynamo.explain(model)(batch(rank, 0)[0]).graph_break_count)
    assert counts == [0, 0]


# Features of PyTorch that change what a parameter is, or how its gradient comes about


_NUM_STEPS = 4


def _trained(side: Side, model: nn.Module, loss: Callable[[int, int], Tensor] | None = None) -> Sequence[Tensor]:
    """Parameters after a few steps. loss(rank, step)."""
    sgd = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
    optimizer = side.wrap(sgd, model)
    for step in range(_NUM_STEPS):
        optimizer.zero_grad()
        side.mean(lambda rank, step=step: loss(rank, step) if loss else loss_on(model, rank, step)).backward()
        optimizer.step()
    return values(model)


class _Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).T


def _parametrized(side: Side) -> Sequence[Tensor]:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    parametrize.register_parametrization(model[0], "weight", _Symmetric())
    parametrizations.orthogonal(model[2])
    return _trained(side, model)


def _weight_norm(side: Side) -> Sequence[Tensor]:
    """The present kind, and the one before it, which recomputes a plain attribute in each forward."""
    model = small_model()
    parametrizations.weight_norm(model[0])
    with pytest.warns(FutureWarning):
        nn.utils.weight_norm(model[2])
    return _trained(side, model)


class _LowRank(nn.Module):
    """A frozen layer with a low-rank correction, as of LoRA."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down = nn.Parameter(torch.full((2, layer.in_features), 0.1, dtype=torch.float64))
        self.up = nn.Parameter(torch.zeros(layer.out_features, 2, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + x @ self.down.T @ self.up.T


def _low_rank(side: Side) -> Sequence[Tensor]:
    model = small_model()
    for i in (0, 2, 4):
        model[i] = _LowRank(model[i])
    return _trained(side, model)


def _functional(side: Side) -> Sequence[Tensor]:
    """torch.func: a call of the module with its parameters as arguments, and gradients per sample within the loss."""
    model = small_model()

    def loss(rank: int, step: int) -> Tensor:
        parameters = dict(model.named_parameters())
        x, y = batch(rank, step)

        def of_sample(x: Tensor, y: Tensor) -> Tensor:
            return nn.functional.mse_loss(torch.func.functional_call(model, parameters, (x,)), y)

        slopes = torch.func.vmap(torch.func.grad(of_sample))(x, y)
        return torch.func.vmap(of_sample)(x, y).mean() + 0.1 * slopes.square().mean()

    return _trained(side, model, loss)


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.gated, self.out = nn.GRUCell(1, 3), nn.LSTM(3, 4, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        state, states = x.new_zeros(len(x), 3), []
        for column in x.split(1, dim=1):
            state = self.cell(column, state)
            states.append(state)
        outputs, _ = self.gated(torch.stack(states))
        result: Tensor = self.out(outputs[-1])
        return result


def _recurrent(side: Side) -> Sequence[Tensor]:
    torch.manual_seed(2)
    model = _Recurrent().double()
    return _trained(side, model)


def _averaged(side: Side) -> Sequence[Tensor]:
    """SWA and an EMA of the parameters, and BatchNorm statistics for the average."""
    model = small_model()
    averages = AveragedModel(model), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = side.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    for step in range(_NUM_STEPS):
        optimizer.zero_grad()
        side.mean(lambda rank, step=step: loss_on(model, rank, step)).backward()
        optimizer.step()
        for average in averages:
            average.update_parameters(model)
    norm = nn.Sequential(averages[0].module, nn.BatchNorm1d(2, dtype=torch.float64))
    update_bn([batch(0, step)[0] for step in range(2)], norm)
    assert norm[1].running_mean is not None
    return [*values(averages[0]), *values(averages[1]), norm[1].running_mean]


_SCRIPTS: dict[str, Callable[[Side], Sequence[Tensor]]] = {
    "parametrizations": _parametrized,
    "weight_norm": _weight_norm,
    "LoRA": _low_rank,
    "torch.func": _functional,
    "recurrent cells": _recurrent,
    "SWA and EMA": _averaged,
}


def _script(side: Side, name: str) -> Sequence[Tensor]:
    return _SCRIPTS[name](side)


@pytest.mark.parametrize("name", _SCRIPTS)
def test_it_trains_as_in_one_process(name: str) -> None:
    assert_as_one_process(_script, name)


# The same training as DistributedDataParallel, bit for bit


_LAYER_MB = 300 / 2**20  # 300 bytes: every layer of the odd model closes a bucket, small ones share one


_ROWS = 6  # of a rank's batch


_kept_alive: list[Any] = []  # Gloo may deadlock with the interpreter when DDP is destroyed, so it is not


@dataclass(frozen=True)
class Case:
    """A training run. `late`: in every step another rank dawdles in the middle of its backward."""

    optimizer: str = "momentum"
    model: str = "odd"
    dtype: torch.dtype = torch.float32
    micro_steps: int = 1
    steps: int = 4
    late: bool = False
    options: dict[str, Any] = field(default_factory=dict)


@dataclass
class Trained:
    """gradients and local: [step][parameter]; local is what this rank alone computed. parameters: after each step."""

    gradients: list[list[Tensor]]
    local: list[list[Tensor]]
    parameters: list[list[Tensor]]
    stats: torchring.Stats | None = None


def _case_model(case: Case) -> nn.Sequential:
    torch.manual_seed(7)
    # wide: 276 KB, 1.2 MB and small: above and below what fits into a first bucket of 1 MiB
    sizes = {"odd": [5, 13, 17, 1, 3], "wide": [5, 67, 1031, 301, 3]}[case.model]
    layers: list[nn.Module] = []
    for i, (inner, outer) in enumerate(itertools.pairwise(sizes)):
        layers += [nn.Linear(inner, outer, bias=i != 1), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).to(case.dtype)


def _case_optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    if case.optimizer == "momentum":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def _case_batch(case: Case, rank: int, step: int, micro_step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10_000 * rank + 100 * step + micro_step)
    draw = torch.randn(_ROWS, 8, generator=generator).to(case.dtype)
    return draw[:, :5], draw[:, 5:]


def _case_loss(model: nn.Module, rows: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(rows[0]), rows[1])


def _sleep_in_backward(model: nn.Sequential, rank: int, world_size: int, step: list[int]) -> None:
    def hook(gradient: Tensor) -> None:
        if step[0] % world_size == rank:
            time.sleep(0.03)

    middle = model[4]
    assert isinstance(middle, nn.Linear)
    middle.weight.register_hook(hook)


def _train_case(rank: int, world_size: int, case: Case, way: str) -> Trained:
    """way: "ring" for torchring, "ddp", or "alone" without any reduction."""
    model = _case_model(case)
    step_now = [0]
    forward: nn.Module = model
    optimizer = _case_optimizer(case, model)
    if way == "ring":
        optimizer = torchring.wrap(optimizer, model, accumulate=case.micro_steps, **case.options)
    elif way == "ddp":
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        forward = DistributedDataParallel(model)
        _kept_alive.append(forward)
    if case.late and way == "ring":
        _sleep_in_backward(model, rank, world_size, step_now)
    result = Trained([], [], [])
    parameters = list(model.parameters())
    for step in range(case.steps):
        step_now[0] = step
        batches = [_case_batch(case, rank, step, micro_step) for micro_step in range(case.micro_steps)]
        bare = copy.deepcopy(model)
        for p in bare.parameters():
            p._post_accumulate_grad_hooks, p._backward_hooks, p.grad = None, None, None
        for rows in batches:
            _case_loss(bare, rows).backward()
        result.local.append([_grad(p).clone() for p in bare.parameters()])
        optimizer.zero_grad()
        for micro_step, rows in enumerate(batches):
            silent = isinstance(forward, DistributedDataParallel) and micro_step < case.micro_steps - 1
            with forward.no_sync() if silent else nullcontext():
                _case_loss(forward, rows).backward()
        result.gradients.append([_grad(p).clone() for p in parameters])
        optimizer.step()
        result.parameters.append([p.detach().clone() for p in parameters])
    if isinstance(optimizer, torchring.DistributedOptimizer):
        result.stats = optimizer.stats()
    if way == "ddp":
        dist.barrier()
    return result


def _grad(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _both(rank: int, world_size: int, cases: dict[str, Case]) -> dict[str, tuple[Trained, Trained]]:
    """torchring first: it takes part in a process group where there is one."""
    ring = {}
    for name, case in cases.items():
        ring[name] = _train_case(rank, world_size, case, "ring")
        torchring.shutdown()
    return {name: (ring[name], _train_case(rank, world_size, case, "ddp")) for name, case in cases.items()}


def _assert_ranks_agree(runs: list[Trained]) -> None:
    for step in range(len(runs[0].parameters)):
        assert_same_on_all_ranks([digest(run.parameters[step]) for run in runs])
        assert_same_on_all_ranks([digest(run.gradients[step]) for run in runs])


def _assert_trained_alike(ring: Trained, other: Trained) -> None:
    for what in ("gradients", "parameters"):
        for step, (mine, theirs) in enumerate(zip(getattr(ring, what), getattr(other, what), strict=True)):
            for index, (actual, expected) in enumerate(zip(mine, theirs, strict=True)):
                assert_bitwise(actual, expected, f"{what} {index} of step {step}")


def _assert_means(runs: list[Trained], num_roundings: int, dtype: torch.dtype) -> None:
    """Rank 0's gradients against the float64 mean of what each rank computed from the same parameters."""
    for step, gradients in enumerate(runs[0].gradients):
        for index, gradient in enumerate(gradients):
            parts = [run.local[step][index].double() / len(runs) for run in runs]
            expected, magnitude = torch.stack(parts).sum(0), torch.stack(parts).abs().sum(0)
            assert_within_rounding(gradient, expected, magnitude, num_roundings, dtype)


_CASES = {
    "sgd": Case(),
    "adamw": Case("adamw"),
    "sgd in tiny buckets": Case(options={"bucket_mb": _LAYER_MB}),
    "adamw in tiny buckets": Case("adamw", options={"bucket_mb": _LAYER_MB}),
    "a bucket per parameter": Case(options={"bucket_mb": 0}),
    "wide": Case("adamw", model="wide", steps=3),
    "wide in small buckets": Case(model="wide", steps=3, options={"bucket_mb": 0.3}),
    "native": Case("adamw", options={"algorithm": "native", "bucket_mb": _LAYER_MB}),
    "direct on a thread": Case(late=True, options={"algorithm": "direct", "overlap": "thread", "bucket_mb": _LAYER_MB}),
    "direct inline": Case(late=True, options={"algorithm": "direct", "overlap": "inline", "bucket_mb": _LAYER_MB}),
    "hierarchical": Case(late=True, options={"algorithm": "hierarchical", "bucket_mb": _LAYER_MB}),
    "wide, hierarchical": Case(model="wide", steps=3, late=True, options={"algorithm": "hierarchical"}),
    "native on a thread": Case(late=True, options={"algorithm": "native", "overlap": "thread", "bucket_mb": _LAYER_MB}),
    "3 micro-steps": Case("adamw", micro_steps=3, options={"bucket_mb": _LAYER_MB}),
    "2 micro-steps of wide": Case(model="wide", micro_steps=2, steps=3),
    "3 micro-steps, native, thread": Case(
        micro_steps=3, late=True, options={"algorithm": "native", "overlap": "thread", "bucket_mb": _LAYER_MB}
    ),
    "fp64": Case("adamw", dtype=torch.float64),
}


def test_two_ranks_train_bit_for_bit_as_under_ddp(subtests: pytest.Subtests) -> None:
    first, second = run_ranks(_both, 2, _CASES)
    for name, case in _CASES.items():
        with subtests.test(name):
            ring, ddp = first[name]
            _assert_ranks_agree([ring, second[name][0]])
            _assert_trained_alike(ring, ddp)
            for option in ("algorithm", "overlap"):
                if option in case.options:
                    assert getattr(ring.stats, option) == case.options[option]


_OF_THREE = (
    "adamw", "wide", "native", "direct on a thread", "hierarchical", "3 micro-steps, native, thread", "fp64",
)  # fmt: skip


@grid("name", list(_CASES), keep=lambda name: name in _OF_THREE)
def test_three_ranks_average_within_rounding(name: str) -> None:
    """Two additions, one product with a factor 1/3 that is itself rounded: 4 roundings. DDP stays in the same bound."""
    case = _CASES[name]
    runs = run_pooled(_train_case, 3, case, "ring")
    _assert_ranks_agree(runs)
    _assert_means(runs, 4, case.dtype)


@pytest.mark.parametrize("world_size", [1, 3])
def test_ddp_keeps_to_the_bound_too(world_size: int) -> None:
    results = run_ranks(_both, world_size, {"adamw": Case("adamw")})
    ring, ddp = zip(*(result["adamw"] for result in results), strict=True)
    _assert_means(list(ddp), world_size + 1, torch.float32)
    if world_size == 1:
        _assert_trained_alike(ring[0], ddp[0])


@pytest.mark.parametrize("case", [Case(), Case("adamw"), Case("adamw", micro_steps=2)], ids=["sgd", "adamw", "micro"])
def test_a_world_of_one_is_the_plain_optimizer(case: Case) -> None:
    [ring], [plain] = run_pooled(_train_case, 1, case, "ring"), run_pooled(_train_case, 1, case, "alone")
    _assert_trained_alike(ring, plain)
    _assert_means([ring], 0, torch.float32)


def _one_process(case: Case, world_size: int) -> Iterator[list[Tensor]]:
    model = _case_model(case)
    optimizer = _case_optimizer(case, model)
    for step in range(case.steps):
        optimizer.zero_grad()
        for micro_step in range(case.micro_steps):
            of_ranks = [_case_batch(case, rank, step, micro_step) for rank in range(world_size)]
            _case_loss(model, (torch.cat([x for x, _ in of_ranks]), torch.cat([y for _, y in of_ranks]))).backward()
        optimizer.step()
        yield [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize(("world_size", "optimizer", "micro_steps"), [(2, "momentum", 3), (3, "adamw", 1)])
def test_ranks_train_as_one_process_with_the_whole_batch(world_size: int, optimizer: str, micro_steps: int) -> None:
    case = Case(optimizer, dtype=torch.float64, micro_steps=micro_steps, steps=6, options={"bucket_mb": _LAYER_MB})
    runs = run_pooled(_train_case, world_size, case, "ring")
    _assert_ranks_agree(runs)
    for actual, expected in zip(runs[0].parameters, _one_process(case, world_size), strict=True):
        for mine, theirs in zip(actual, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)


def test_direct_does_not_depend_on_the_bucket_layout() -> None:
    """It adds in rank order, so every element meets the same roundings wherever it lies."""
    options = [{"algorithm": "direct", "bucket_mb": size, "overlap": overlap} for size in (0, _LAYER_MB, 25.0)
               for overlap in ("inline", "thread")]  # fmt: skip
    digests = [digest(run_pooled(_train_case, 3, Case(options=each), "ring")[0].parameters[-1]) for each in options]
    assert_same_on_all_ranks(digests)


def test_these_comparisons_fail_without_a_reduction() -> None:
    """The negative control: ranks have different data, so training alone must be told from training together."""
    alone = run_pooled(_train_case, 2, Case(), "alone")
    [ring, _] = run_pooled(_train_case, 2, Case(), "ring")
    with pytest.raises(AssertionError, match="elements differ"):
        _assert_trained_alike(alone[0], ring)
    with pytest.raises(AssertionError, match="rank 1 has"):
        _assert_ranks_agree(alone)
    with pytest.raises(AssertionError, match="roundings"):
        _assert_means(alone, 4, torch.float32)
    case = Case(dtype=torch.float64)
    [lonely] = run_pooled(_train_case, 1, case, "alone")
    with pytest.raises(AssertionError):
        torch.testing.assert_close(lonely.parameters[0][0], next(_one_process(case, 2))[0], rtol=1e-9, atol=1e-11)
