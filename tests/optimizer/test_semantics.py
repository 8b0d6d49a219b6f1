"""What a training on ranks computes: the same as one process that does the work of all.

`CASES` lists what scripts do: a script of `support/scripts.py` or of this file, and its arguments. Their gradients,
parameters, and whatever else they return, are compared with those of one process: in fp64 to 1e-9, and between ranks
bit for bit. For how all pairs of features go together see `qa/pairs.py`.
"""

import copy
import io
import pickle
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, Final

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR, ReduceLROnPlateau, SequentialLR, StepLR
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import torchring
from tests.support import scripts
from tests.support.checks import assert_same_on_all_ranks, assert_within_rounding, digest
from tests.support.harness import run_pooled
from tests.support.training import (
    Side,
    assert_as_one_process,
    assert_each_as_one_process,
    attempt,
    batch,
    loss_on,
    momentum,
    small_model,
    train,
    values,
)

# Gradients that the script has, and parameters that change


def _owned(side: Side, how: str, usage: str, options: dict[str, Any]) -> Sequence[Any]:
    """The script zeroes and reads gradients through tensors of its own. `.grad` is None in the first step at most."""
    model = scripts.Branches()
    model.heads[2].requires_grad_(usage != "unfrozen")
    optimizer = side.wrap(momentum(model), model, **options)
    parameters = list(model.parameters())
    flat = torch.zeros(sum(p.numel() for p in parameters), dtype=torch.float64)
    owned = [piece.view_as(p) for p, piece in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True)]
    for p, piece in zip(parameters, owned, strict=True):
        if how == "slices":
            p.grad = piece
        elif how == "other memory":
            p.grad = torch.zeros_like(p)
            p.grad.data = piece
    uses = scripts.USAGE.get(usage, lambda rank, step: [0, 1, 2] if rank or step else [2, 1, 0])
    seen: list[Any] = []
    for step in range(8):

        def loss(rank: int, step: int = step) -> Tensor:
            x, y = batch(rank, step)
            return nn.functional.mse_loss(model(x, uses(rank, step)), y)

        if step == 4:
            model.heads[2].requires_grad_(usage != "frozen")
        if usage == "failing" and step in (0, 2, 5):
            with pytest.raises(ArithmeticError):
                scripts.Raises.apply(model.heads[step % 3](torch.ones(6).double())).sum().backward()
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


def _restrided(side: Side) -> Sequence[Any]:
    """Fused optimizers pair the elements of a parameter and its gradient by their addresses."""
    torch.manual_seed(5)
    model: Any = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Flatten(), nn.Linear(64, 64), nn.Linear(64, 2)).double()
    images, _, square, last = model
    optimizer = side.wrap(torch.optim.AdamW(model.parameters(), lr=0.01, fused=True), model)

    def loss(rank: int, step: int) -> Tensor:
        x = torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(10 * step + rank)).double()
        hidden = x.flatten(1)[:, :64] if rank and step > 2 else images(x).flatten(1)  # a rank does without
        return last(square(hidden)).square().mean()

    for step in range(5):
        if step == 1:
            square.weight.data = square.weight.data.t().contiguous().t()
        elif step == 2:
            model.to(memory_format=torch.channels_last)
        train(side, model, optimizer, [step], loss)
        assert all(p.grad is not None and p.grad.stride() == p.stride() for p in model.parameters())
    return values(model)


# Sparse gradients


# Rows of a table that each rank looks up, in each of a few backwards.
_LOOKED_UP: Final[list[tuple[list[int], ...]]] = [
    ([0, 3], [2, 6], [3, 3, 6]),
    ([1, 4], [4, 1], [4]),  # the same rows
    ([5, 5, 5, 0], [2], []),
    ([], [], []),
    ([3, 3, 1], [3, 1, 1, 3], [0]),
    ([], [2, 2, 4], []),
    ([0, 1, 2, 3, 4, 5, 6], [6, 5, 4, 3, 2, 1, 0], [1]),
    ([2, 2], [3], [2]),
]


def _sparse(side: Side, kind: str, options: dict[str, Any]) -> Sequence[Any]:
    """kind: "step" makes a step after each backward; "twice" and "no_sync" after every other."""
    torch.manual_seed(5)
    table = nn.Embedding(7, 3, sparse=side.is_wrapped or kind == "SparseAdam", dtype=torch.float64)
    head = nn.Linear(3, 2).double()
    model = table if kind == "SparseAdam" else nn.ModuleList([table, head])
    kind_of = torch.optim.SparseAdam if kind == "SparseAdam" else torch.optim.SGD
    optimizer = side.wrap(kind_of(model.parameters(), lr=0.1), model, **options)
    seen: list[Any] = []

    def loss(rank: int, rows: Sequence[int]) -> Tensor:
        of_head = head(torch.ones(3).double()).square().sum()
        value = of_head + table(torch.tensor(rows)).square().sum() if rows else of_head
        return value / torchring.size() if options.get("op") == "sum" and side.is_wrapped else value

    for i, per_rank in enumerate(_LOOKED_UP):
        if kind == "SparseAdam" and not all(per_rank):
            continue
        is_last = kind not in ("twice", "no_sync") or i % 2 == 1
        with optimizer.no_sync() if side.is_wrapped and kind == "no_sync" and not is_last else nullcontext():
            side.mean(lambda rank, per_rank=per_rank: loss(rank, per_rank[rank])).backward()
        if is_last:
            grad = table.weight.grad
            if side.is_wrapped and grad is not None:
                assert grad.is_sparse
                assert grad.is_coalesced() or torchring.size() == 1
            seen += [None if grad is None else grad.to_dense().clone()]
            optimizer.step()
            optimizer.zero_grad(set_to_none=i % 4 != 1)
    return [*seen, *values(model)]


# Backwards inside of backwards, and steps inside of methods


def _cached(side: Side, num_parts: int) -> list[Tensor]:
    """GradCache: the embeddings have no graph, and a hook on the loss runs the model again, in parts."""
    model = small_model()
    optimizer = side.wrap(momentum(model), model)

    def loss_of(embeddings: Tensor) -> Tensor:
        return (embeddings @ embeddings.T).logsumexp(1).mean()

    def cached_loss(rank: int, step: int) -> Tensor:
        x = batch(rank, step)[0]
        if not side.is_wrapped:
            return loss_of(model(x))
        embeddings = model(x).detach().requires_grad_()
        loss = loss_of(embeddings)
        (cache,) = torch.autograd.grad(loss, embeddings)

        def run_again(grad: Tensor) -> None:
            with torch.enable_grad():
                for part, of_part in zip(x.chunk(num_parts), cache.chunk(num_parts), strict=True):
                    ((model(part) * of_part).sum() * grad).backward()

        loss = loss.detach().requires_grad_()
        loss.register_hook(run_again)
        return loss * 1.0

    train(side, model, optimizer, range(3), cached_loss)
    return values(model)


def _sam(side: Side, how: str) -> list[Any]:
    """Gradients for the ascent are those of all ranks, or with "own" each rank's. "nan": one of rank 1's, late.

    Parameters that each rank has moved its own way are no replicas until they are put back.
    """
    model = nn.Sequential(small_model(), nn.BatchNorm1d(2, affine=False).double())
    optimizer = side.wrap(scripts.Sam(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)), model)
    ascents = [(rank,) for rank in side.mine] if how == "own" else [side.mine]
    problem = ""
    for step in range(3):
        gradients: list[list[Tensor]] = []
        optimizer.zero_grad()
        for members in ascents:  # one, on a rank
            with optimizer.no_sync() if how == "own" and side.is_wrapped else nullcontext():
                torch.stack([loss_on(model, rank, 2 * step) for rank in members]).mean().backward()
            optimizer.first_step()
            optimizer.zero_grad()
            losses = [loss_on(model, rank, 2 * step + 1) for rank in members]
            if how == "nan" and step == 2 and 1 in side.mine:
                losses.append(torch.tensor(torch.nan) * losses[0])
            torch.stack(losses).mean().backward()
            if len(ascents) > 1:
                gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
                optimizer.put_back()
                optimizer.zero_grad()
        for p, own in zip(model.parameters(), zip(*gradients, strict=True), strict=False):
            p.grad = torch.stack(own).mean(0)
        if how == "nan" and step == 2 and not side.is_wrapped:
            optimizer.put_back()
        else:
            problem = attempt(optimizer.second_step)
    assert ("NaN or infinity came from rank 1" in problem) == bool(how == "nan" and side.is_wrapped), problem
    if side.is_wrapped and how != "nan":
        first, second = torchring.all_gather(model.get_buffer("1.running_var")[None])
        assert torch.equal(first, second)
    return values(model)


# Features of PyTorch that change what a parameter is, or how its gradient comes about


class _Symmetric(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return weight.triu() + weight.triu(1).T


def _parametrized(side: Side) -> Sequence[Tensor]:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    parametrize.register_parametrization(model[0], "weight", _Symmetric())
    parametrizations.orthogonal(model[2])
    train(side, model, side.wrap(momentum(model), model), range(4))
    return values(model)


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

    train(side, model, side.wrap(momentum(model), model), range(4), loss)
    return values(model)


def _averaged(side: Side) -> Sequence[Tensor]:
    """SWA and an EMA of the parameters, and BatchNorm statistics for the average."""
    model = small_model()
    averages = AveragedModel(model), AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = side.wrap(momentum(model), model)
    for step in range(4):
        train(side, model, optimizer, [step])
        if step == 1 and 0 in side.mine:  # nothing is sent for a copy of the model: a rank may use it as it likes
            loss_on(copy.deepcopy(model), 0, 0).backward()
        for average in averages:
            average.update_parameters(model)
    norm = nn.Sequential(averages[0].module, nn.BatchNorm1d(2, dtype=torch.float64))
    update_bn([batch(0, step)[0] for step in range(2)], norm)
    assert norm[1].running_mean is not None
    return [*values(averages[0]), *values(averages[1]), norm[1].running_mean]


def _elsewhere(side: Side, algorithm: str) -> Sequence[Any]:
    """What torchring makes for itself on the host does not follow torch.set_default_device."""
    model = small_model()
    batches = [[batch(rank, step) for step in range(3)] for rank in range(2)]

    def loss(rank: int, step: int) -> Tensor:
        x, y = batches[rank][step]
        return nn.functional.mse_loss(model(x), y)

    torch.set_default_device("meta")  # which nothing could be computed on
    try:
        optimizer = side.wrap(momentum(model), model, algorithm=algorithm)
        train(side, model, optimizer, range(3), loss)
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


# Optimizers, schedules, checkpoints and copies


_OPTIMIZERS: Final[dict[str, Callable[[Any], torch.optim.Optimizer]]] = {
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adam fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "differentiated groups": lambda p: torch.optim.SGD([{"params": [q], "lr": 0.1 / (i + 1)} for i, q in enumerate(p)]),
}


def _with_optimizer(side: Side, name: str) -> Sequence[Any]:
    model = small_model()
    train(side, model, side.wrap(_OPTIMIZERS[name](model.parameters()), model), range(4))
    return values(model)


_SCHEDULERS: Final[dict[str, Callable[[Any], LRScheduler]]] = {
    "one cycle": lambda it: OneCycleLR(it, max_lr=0.2, total_steps=8),
    "plateau": lambda it: ReduceLROnPlateau(it, factor=0.5, patience=1),
    "sequential": lambda it: SequentialLR(it, [LambdaLR(it, lambda n: 0.1 * (n + 1)), StepLR(it, 1, 0.9)], [2]),
}


def _scheduled(side: Side, name: str) -> Sequence[Any]:
    model = small_model()
    optimizer = side.wrap(momentum(model), model)
    learning_rates: list[Any] = []
    with warnings.catch_warnings(record=True) as caught:  # such as of a scheduler that steps before its optimizer
        warnings.simplefilter("always")
        scheduler = _SCHEDULERS[name](optimizer)
        for step in range(6):
            train(side, model, optimizer, [step])
            scheduler.step(*[1.0] if name == "plateau" else [])
            learning_rates += [optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]]
        _SCHEDULERS[name](optimizer).load_state_dict(scheduler.state_dict())
    unexpected = [str(w.message) for w in caught if "deprecat" not in str(w.message).lower()]
    return [*learning_rates, unexpected, *values(model)]


def _saved_and_loaded(side: Side, into: str) -> Sequence[Any]:
    """Train 2 steps, save, train 2 more; then again from the checkpoint. Both ends."""
    model = small_model()
    optimizer = side.wrap(torch.optim.AdamW(model.parameters(), lr=0.01), model)
    train(side, model, optimizer, range(2))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    checkpoint = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    train(side, model, optimizer, range(2, 4))
    uninterrupted = values(model)
    if into == "itself":
        again, other = model, optimizer
    else:
        again = small_model(seed=8)
        other = torch.optim.AdamW(again.parameters(), lr=0.5)
    again.load_state_dict(checkpoint["model"])
    if into == "wrapped":
        other = side.wrap(other, again)
    other.load_state_dict(checkpoint["optimizer"])
    if into == "plain, then wrapped":
        other = side.wrap(other, again)
    train(side, again, other, range(2, 4))
    return [sorted(checkpoint["optimizer"]), *uninterrupted, *values(again)]


def _copied(side: Side, how: str) -> Sequence[Any]:
    def copy_of(given: tuple[nn.Module, Any]) -> tuple[nn.Module, Any]:
        return copy.deepcopy(given) if how == "deepcopy" else pickle.loads(pickle.dumps(given))

    model = small_model()
    optimizer = side.wrap(momentum(model), model)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.9)
    train(side, model, optimizer, range(2))
    scheduler.step()
    other_model, other = copy_of((model, optimizer))
    train(side, other_model, other, range(2, 4))  # the copy on its own data, then both in turns
    for step in range(4, 6):
        train(side, model, optimizer, [step])
        train(side, other_model, other, [step + 1])
    third_model, third = copy_of((other_model, other))  # a copy of a copy, which nothing has connected yet
    third.zero_grad()
    third.step()
    train(side, third_model, third, [6])
    return [isinstance(other, torch.optim.Optimizer), *values(model), *values(other_model), *values(third_model)]


def _dropped(side: Side) -> Sequence[Any]:
    """As in a notebook: the cell that wraps is run again. The optimizer that is gone gives its parameters back."""
    model = small_model()
    for start in range(0, 6, 2):
        optimizer = None
        optimizer = side.wrap(momentum(model), model)
        StepLR(optimizer, 1)
        train(side, model, optimizer, range(start, start + 2))
    return values(model)


def _grown(side: Side) -> Sequence[Any]:
    body, head = small_model(), nn.Linear(2, 2).double()
    optimizer = side.wrap(momentum(body), body)
    train(side, body, optimizer, range(2))
    torch.manual_seed(20 + side.mine[0])  # every rank makes another head; rank 0's counts
    head.load_state_dict(nn.Linear(2, 2).double().state_dict())
    optimizer.add_param_group({"params": head.parameters(), "lr": 0.3})
    whole = nn.Sequential(body, head)
    train(side, whole, optimizer, range(2, 5))
    return [len(optimizer.param_groups), *values(whole)]


# Zeroing, clipping, closures


def _by_hand(model: nn.Module) -> None:
    """As PyTorch once did."""
    for p in model.parameters():
        p.grad.detach_()
        p.grad.zero_()


_ZEROING: Final[dict[str, Callable[[nn.Module, Any], object]]] = {
    "optimizer": lambda model, it: it.zero_grad(),
    "optimizer, in place": lambda model, it: it.zero_grad(set_to_none=False),
    "wrapped optimizer": lambda model, it: getattr(it, "optimizer", it).zero_grad(),
    "wrapped optimizer, in place": lambda model, it: getattr(it, "optimizer", it).zero_grad(set_to_none=False),
    "model": lambda model, it: model.zero_grad(),
    "model, in place": lambda model, it: model.zero_grad(set_to_none=False),
    "by hand": lambda model, it: [setattr(p, "grad", None) for p in model.parameters()],
    "by hand, anew": lambda model, it: [setattr(p, "grad", torch.zeros_like(p)) for p in model.parameters()],
    "by hand, in place": lambda model, it: _by_hand(model),
}


def _zeroed(side: Side, way: str) -> Sequence[Any]:
    model = small_model()
    optimizer = side.wrap(momentum(model), model)
    seen: list[Any] = []
    for step in range(4):
        side.mean(lambda rank, step=step: loss_on(model, rank, step)).backward()
        optimizer.step()
        _ZEROING[way](model, optimizer)
        seen += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    if way != "by hand, anew":
        optimizer.step()  # nothing, or zeros, on which momentum rolls on
    return [*seen, *values(model)]


def _clipped(side: Side) -> Sequence[Any]:
    model = small_model()
    norms: list[Any] = []

    def clip(step: int) -> None:
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05))

    train(side, model, side.wrap(momentum(model), model), range(3), before_step=clip)
    return [*norms, *values(model)]


def _closure(side: Side, kind: str) -> Sequence[Any]:
    """The loss that they return is the mean over ranks: LBFGS branches on it, and has to branch alike everywhere."""
    model = small_model()
    if "sgd" in kind:
        plain: torch.optim.Optimizer = momentum(model)
    else:
        search = "strong_wolfe" if kind == "lbfgs, wolfe" else None
        plain = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn=search)
    optimizer = side.wrap(plain, model)
    losses = []
    for _ in range(3):

        def closure() -> Tensor | float | None:
            optimizer.zero_grad()
            if kind == "lbfgs, a rank skips" and side.mine == (1,):
                optimizer.skip()
                return None
            loss = side.mean(lambda rank: loss_on(model, 0 if kind == "lbfgs, a rank skips" else rank, 0))
            loss.backward()
            return loss.item() if kind == "sgd, a number" else loss

        loss = optimizer.step(closure) if "sgd" in kind else optimizer.step(closure=closure)
        losses.append(float(torch.as_tensor(loss).detach()))
    return [*losses, *values(model)]


def _skipping(side: Side, value: float, options: dict[str, Any]) -> Sequence[Any]:
    """Rank 1 has such a gradient in step 1, which all ranks leave out."""
    model = small_model()
    optimizer = side.wrap(torch.optim.Adam(model.parameters(), lr=0.05), model, on_nonfinite="skip", **options)

    def loss(rank: int, step: int) -> Tensor:
        return loss_on(model, rank, step) * (value if (rank, step) == (1, 1) else 1.0)

    train(side, model, optimizer, range(4) if side.is_wrapped else (0, 2, 3), loss)
    num_skipped = optimizer.stats().num_skipped_steps if side.is_wrapped else 1
    return [num_skipped, *(int(state["step"]) for state in optimizer.state.values()), *values(model)]


# Several optimizers and models


def _two_optimizers(side: Side, options: dict[str, Any]) -> Sequence[Any]:
    model = small_model()
    body = side.wrap(torch.optim.SGD([*model[0].parameters(), *model[2].parameters()], lr=0.1), model, **options)
    head = side.wrap(torch.optim.AdamW(model[4].parameters(), lr=0.01), model)
    for step in range(6):
        head.zero_grad()
        train(side, model, body, [step], before_step=lambda step: step % 3 != 1 and head.step())
    return values(model)


def _gan(side: Side, ranks_differ: str) -> Sequence[Any]:
    generator, critic = small_model(seed=1), nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 1)).double()
    of_generator = side.wrap(torch.optim.Adam(generator.parameters(), lr=0.01), generator)
    of_critic = side.wrap(torch.optim.Adam(critic.parameters(), lr=0.02), critic)

    def critic_loss(rank: int, step: int) -> Tensor:
        x, y = batch(rank, step)
        fake = generator(x).detach()
        if ranks_differ == "critic sees no fakes" and rank == 1:
            return critic(y).square().mean()
        return critic(fake).square().mean() - critic(y).mean()

    def generator_loss(rank: int, step: int) -> Tensor:
        x, _ = batch(rank, step)
        if ranks_differ == "no critic" and rank == 1:
            return generator(x).square().mean()
        return -critic(generator(x)).mean()

    for step in range(4):
        train(side, critic, of_critic, [step], critic_loss)
        train(side, generator, of_generator, [step], generator_loss)  # the critic's gradients wait for its zero_grad
    return [*values(generator), *values(critic)]


def _in_another_order(side: Side) -> Sequence[Any]:
    """Two models, two backwards, which every other rank does in the other order."""
    models = [small_model(seed=1), small_model(seed=2)]
    optimizers = [side.wrap(momentum(model), model) for model in models]
    for step in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for rank in side.mine:
            for model in models if rank % 2 == 0 else reversed(models):
                (loss_on(model, rank, step) / len(side.mine)).backward()
        for optimizer in optimizers:
            optimizer.step()
    return [*values(models[0]), *values(models[1])]


_THREAD: Final[dict[str, Any]] = {"overlap": "thread", "bucket_mb": 25.0}
_NATIVE: Final[dict[str, Any]] = {"algorithm": "native"}
_NATIVE_THREAD: Final[dict[str, Any]] = {"algorithm": "native", "overlap": "thread"}

# By what they are about, and by name: a script and its arguments.
CASES: Final[dict[str, dict[str, tuple[Any, ...]]]] = {
    "unused parameters": {
        **{
            f"{usage}, {none}": (scripts.branches, usage, none, {}) for usage in scripts.USAGE for none in (True, False)
        },
        "on a thread": (scripts.branches, "other sets each step", True, _THREAD),
        "native": (scripts.branches, "other sets each step", True, _NATIVE),
    },
    "gradients of the script": {
        "slices of one tensor": (_owned, "slices", "all", {}),
        "one bucket": (_owned, "slices", "all", {"bucket_mb": 25.0}),
        "native, on a thread": (_owned, "slices", "all", _NATIVE_THREAD),
        "slices, a rank skips": (_owned, "slices", "skipped", {}),
        "slices, thawed": (_owned, "slices", "unfrozen", {}),
        "slices, no more used": (_owned, "slices", "until the third step", {}),
        "other memory": (_owned, "other memory", "skipped", {}),
        "other memory, frozen": (_owned, "other memory", "frozen", {}),
        "torchring's, cached": (_owned, "cached", "failing", {}),
        "kept over zero_grad": (scripts.keeping, "the gradient"),
        "kept, detached": (scripts.keeping, "detached"),
        "with other strides": (_restrided,),
    },
    "several backwards": {
        how: (scripts.accumulating, how)
        for how in (
            *("two backwards", "two backwards, zeroed in place", "no_sync", "synchronize", "accumulate"),
            *("accumulate, two are left", "accumulate, two are dropped", "accumulate in no_sync"),
        )
    },
    "kinds of parameters": {
        **{kind: (scripts.of_kind, kind, {}) for kind in scripts.KINDS},
        "tied, one bucket": (scripts.of_kind, "tied", {"bucket_mb": 25.0}),
        "tied, native, on a thread": (scripts.of_kind, "tied", _NATIVE_THREAD),
        **{
            f"sparse {sparse}, {none}": (scripts.sparse_words, sparse, none)
            for sparse in (True, False)
            for none in (True, False)
        },
        **{f"freezing {plan}": (scripts.frozen, plan) for plan in ("ffttt", "ttfff", "ttfftt", "fttff", "ftftft")},
        "summed": (scripts.summed, None),
    },
    "sparse": {
        "on a thread": (_sparse, "step", {"overlap": "thread"}),
        **{kind: (_sparse, kind, {}) for kind in ("step", "twice", "no_sync", "SparseAdam")},
        **{f"sum, {kind}": (_sparse, kind, {"op": "sum"}) for kind in ("step", "no_sync")},
    },
    "the graph": {
        **{
            f"checkpoints: {how}": (scripts.checkpointed, how, {})
            for how in (
                *("not reentrant", "not reentrant, layer used twice", "reentrant", "reentrant, two segments"),
                *("reentrant, nested", "all inside a reentrant one"),
            )
        },
        "checkpoints, on a thread": (scripts.checkpointed, "reentrant, two segments", _THREAD),
        **{
            game: (scripts.graph_games, game)
            for game in ("retain_graph", "gradient penalty", "gradient of parameters", "inputs=", "hooks on tensors")
        },
        "a backward in a hook": (_cached, 1),
        "three backwards in a hook": (_cached, 3),
        "an exception, early": (scripts.failing, 1, {}),
        "an exception, one bucket": (scripts.failing, 1, {"bucket_mb": 25.0}),
        "an exception, on a thread": (scripts.failing, 1, {"overlap": "thread"}),
        "an exception, native": (scripts.failing, 1, _NATIVE),
        "an exception, late": (scripts.failing, 5, {}),
        **{f"layers {order}": (scripts.ordered, order, {}) for order in scripts.ORDERS},
        "layers on a thread": (scripts.ordered, "another each step", {"overlap": "thread"}),
        "layers, native": (scripts.ordered, "another each step", _NATIVE),
    },
    "PyTorch": {
        "parametrizations": (_parametrized,),
        "torch.func": (_functional,),
        "SWA and EMA": (_averaged,),
        "default device": (_elsewhere, "direct"),
        "default device, native": (_elsewhere, "native"),
    },
    "optimizers": {
        **{name: (_with_optimizer, name) for name in _OPTIMIZERS},
        **{f"schedule: {name}": (_scheduled, name) for name in _SCHEDULERS},
        **{f"GradScaler, {kind}": (scripts.amp, kind, None) for kind in ("plain", "clipped", "fused")},
        **{f"GradScaler, {kind}, inf on rank 1": (scripts.amp, kind, 2) for kind in ("plain", "clipped", "fused")},
        **{f"SAM, {how}": (_sam, how) for how in ("together", "own", "nan")},
        "NaN, skip": (_skipping, float("nan"), {}),
        "infinity, skip, native": (_skipping, float("-inf"), _NATIVE),
        "NaN, skip, on a thread": (_skipping, float("nan"), {"overlap": "thread"}),
        **{f"load into {into}": (_saved_and_loaded, into) for into in ("itself", "plain, then wrapped", "wrapped")},
        "deepcopy": (_copied, "deepcopy"),
        "pickle": (_copied, "pickle"),
        "run again in a notebook": (_dropped,),
        "a group is added": (_grown,),
    },
    "zeroing and clipping": {**{way: (_zeroed, way) for way in _ZEROING}, "clip": (_clipped,)},
    "closures": {
        kind: (_closure, kind) for kind in ("sgd", "sgd, a number", "lbfgs", "lbfgs, wolfe", "lbfgs, a rank skips")
    },
    "several": {
        "optimizers": (_two_optimizers, {}),
        "optimizers, on a thread": (_two_optimizers, {"overlap": "thread"}),
        "optimizers, native": (_two_optimizers, _NATIVE),
        "models": (_gan, ""),
        "models, one unused on rank 1": (_gan, "no critic"),
        "models, one used otherwise on rank 1": (_gan, "critic sees no fakes"),
        "models in another order": (_in_another_order,),
    },
    "in 16 bits": {
        "summed": (scripts.summed, "bf16"),
        "gradients of the script": (_owned, "slices", "all", {"compression": "bf16"}),
        "autocast": (scripts.amp, "autocast", None),
        "autocast, inf on rank 1": (scripts.amp, "autocast", 2),
    },
}
_TOLERANCES: Final = {"closures": 1e-7, "in 16 bits": 2e-2}


@pytest.mark.parametrize("about", CASES)
def test_ranks_train_as_one_process(about: str, subtests: pytest.Subtests) -> None:
    assert_each_as_one_process(CASES[about], subtests, tolerance=_TOLERANCES.get(about, 1e-9))


def test_a_world_of_one_does_too(subtests: pytest.Subtests) -> None:
    cases = CASES["several"] | {"a group is added": (_grown,), "sparse": (_sparse, "twice", {})}
    del cases["models in another order"]
    assert_each_as_one_process(cases, subtests, world_size=1)


def test_three_ranks_do_too(subtests: pytest.Subtests) -> None:
    cases = CASES["sparse"] | {"models in another order": (_in_another_order,)}
    assert_each_as_one_process(cases, subtests, world_size=3)


def _forgets_to_wrap(side: Side) -> Sequence[Any]:
    model = small_model()
    train(side, model, momentum(model), range(2))
    return values(model)


def test_without_wrapping_the_comparison_fails() -> None:
    with pytest.raises(AssertionError, match="elements differ"):
        assert_as_one_process(_forgets_to_wrap)


@pytest.mark.parametrize("options", [{}, {"overlap": "thread"}, _NATIVE], ids=str)
def test_mixed_dtypes(options: dict[str, Any]) -> None:
    """Each in its own precision: one addition and an exact halving, so one rounding and that of the result."""
    results = run_pooled(scripts.mixed, 2, {"bucket_mb": 1e-4, **options})
    assert_same_on_all_ranks([digest(reduced) for _, reduced, _ in results])
    assert_same_on_all_ranks([trained for _, _, trained in results])
    for i, gradient in enumerate(results[0][1]):
        parts = torch.stack([local[i].double() / 2 for local, _, _ in results])
        assert gradient.dtype == results[0][0][i].dtype
        assert_within_rounding(gradient, parts.sum(0), parts.abs().sum(0), 1, gradient.dtype)
    with pytest.raises(AssertionError):  # the ranks' own gradients do differ
        assert_same_on_all_ranks([digest(local) for local, _, _ in results])
