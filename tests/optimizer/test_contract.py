"""A DistributedOptimizer is a torch.optim.Optimizer: what a script may do with one, it may do with the other."""

from __future__ import annotations

import copy
import dataclasses
import gc
import io
import os
import pickle
import time
import warnings
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, OneCycleLR, ReduceLROnPlateau, SequentialLR, StepLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import torchring
from tests.support.checks import assert_bitwise, assert_same_everywhere, assert_same_on_all_ranks, digest
from tests.support.grids import grid
from tests.support.harness import count_open_fds, ranks, run_pooled, run_ranks
from tests.support.scripts import amp, keeping
from tests.support.training import (
    TINY_MB,
    Side,
    assert_as_one_process,
    attempt,
    batch,
    loss_on,
    momentum,
    small_model,
    train,
    values,
)

# The comparison itself


def _forgets_to_wrap(side: Side) -> Sequence[Any]:
    model = small_model()
    train(side, model, momentum(model), range(2))
    return values(model)


def test_without_wrapping_the_comparison_fails() -> None:
    with pytest.raises(AssertionError, match="elements differ"):
        assert_as_one_process(_forgets_to_wrap)


# An Optimizer among others


@pytest.mark.parametrize("world_size", [1, 2])
@ranks()
def test_it_is_an_optimizer_that_shares_everything_with_the_wrapped_one(world_size: int, rank: int) -> None:
    model = small_model()
    plain = momentum(model)
    optimizer = torchring.wrap(plain, model)
    train(Side((rank,), True), model, optimizer, range(2))
    optimizer.param_groups[0]["lr"] = 0.25
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert type(optimizer) is torchring.DistributedOptimizer
    assert optimizer.optimizer is plain
    assert optimizer.param_groups is plain.param_groups
    assert plain.param_groups[0]["lr"] == 0.25
    assert optimizer.state is plain.state
    assert len(plain.state) == 6
    assert optimizer.defaults is plain.defaults
    assert "DistributedOptimizer" in repr(optimizer)
    assert repr(plain) in repr(optimizer)
    for name in ("no_such_thing", "_no_such_thing"):
        with pytest.raises(AttributeError, match=name):
            getattr(optimizer, name)
    assert not hasattr(optimizer, "no_such_thing")


class _Unusual(torch.optim.SGD):
    """With a method and a switch of its own, and signatures that torch.optim.Optimizer does not have."""

    is_noisy = False

    def warm(self, factor: float) -> float:
        return factor * self.param_groups[0]["lr"]

    def zero_grad(self) -> None:  # type: ignore[override]
        super().zero_grad()

    def step(self, *, noise: float = 0.0) -> str:  # type: ignore[override]
        super().step()
        return f"noise {noise}, switched {self.is_noisy}"


@pytest.mark.parametrize("world_size", [1, 2])
@ranks()
def test_what_is_special_about_the_users_optimizer_class_is_within_reach(world_size: int, rank: int) -> None:
    model = small_model()
    plain = _Unusual(model.parameters(), lr=0.5)
    optimizer = torchring.wrap(plain, model)
    loss_on(model, rank, 0).backward()
    assert optimizer.warm(4.0) == 2.0
    assert optimizer.step() == "noise 0.0, switched False"
    optimizer.is_noisy = True
    optimizer.zero_grad()
    assert [p.grad for p in model.parameters()] == [None] * 6
    assert plain.is_noisy
    assert optimizer.step(noise=2.0) == "noise 2.0, switched True"
    del optimizer.is_noisy
    assert not plain.is_noisy


def _alone(rank: int, world_size: int) -> list[Any]:
    model = small_model()
    optimizer = torchring.wrap(momentum(model), model, accumulate=2, compression="fp16", algorithm="native")
    with optimizer.no_sync():
        loss_on(model, 0, 0).backward()
    optimizer.synchronize()
    optimizer.step()
    stats = optimizer.stats()
    optimizer.close()
    return [values(model), dataclasses.is_dataclass(stats), stats.bytes_per_step, attempt(optimizer.step)]


def test_a_single_process_needs_no_launcher() -> None:
    [[trained, is_dataclass, sent, after_close]] = run_ranks(_alone, 1, launcher_env=False)
    model = small_model()
    train(Side((0,), False), model, momentum(model), [0])
    for mine, expected in zip(trained, values(model), strict=True):
        assert_bitwise(mine, expected)
    assert (is_dataclass, sent) == (True, 0)
    assert after_close.startswith("ValueError")


# Learning rates


def _scheduler(name: str, optimizer: torch.optim.Optimizer) -> LRScheduler:
    if name == "step":
        return StepLR(optimizer, step_size=2, gamma=0.5)
    if name == "lambda":
        return LambdaLR(optimizer, lambda epoch: 1.0 / (1 + epoch))
    if name == "one cycle":
        return OneCycleLR(optimizer, max_lr=0.2, total_steps=8)
    if name == "plateau":
        return ReduceLROnPlateau(optimizer, factor=0.5, patience=1)
    parts = [LambdaLR(optimizer, lambda epoch: 0.1 * (epoch + 1)), StepLR(optimizer, 1, 0.9)]
    return SequentialLR(optimizer, parts, milestones=[2])


def _scheduled(side: Side, name: str) -> Sequence[Any]:
    model = small_model()
    optimizer = side.wrap(momentum(model), model)
    learning_rates: list[Any] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        scheduler = _scheduler(name, optimizer)
        for step in range(6):
            train(side, model, optimizer, [step])
            if isinstance(scheduler, ReduceLROnPlateau):
                scheduler.step(1.0)
            else:
                scheduler.step()
            learning_rates += [optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]]
        resumed = _scheduler(name, optimizer)
        resumed.load_state_dict(scheduler.state_dict())
    unexpected = [str(w.message) for w in caught if "deprecat" not in str(w.message).lower()]
    return [*learning_rates, unexpected, *values(model)]


@pytest.mark.parametrize("name", ["step", "lambda", "one cycle", "plateau", "sequential"])
def test_learning_rate_schedulers(name: str) -> None:
    [first, _] = assert_as_one_process(_scheduled, name)
    assert first[12] == []  # no warning of a scheduler that steps before its optimizer
    assert len(set(first[0:12:2])) > 1


# Every optimizer of PyTorch, with and without fused kernels


_OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "sgd foreach": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "adam fused": lambda p: torch.optim.Adam(p, lr=0.01, fused=True),
    "adam amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=0.01, foreach=True),
    "adamw tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), foreach=False),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1),
    "differentiated groups": lambda p: torch.optim.SGD([{"params": [q], "lr": 0.1 / (i + 1)} for i, q in enumerate(p)]),
}


def _with_optimizer(side: Side, name: str) -> Sequence[Any]:
    model = small_model()
    optimizer = side.wrap(_OPTIMIZERS[name](model.parameters()), model)
    train(side, model, optimizer, range(4))
    return values(model)


@pytest.mark.parametrize("name", _OPTIMIZERS)
def test_optimizers(name: str) -> None:
    assert_as_one_process(_with_optimizer, name)


# GradScaler


@pytest.mark.parametrize("poisoned", [None, 2], ids=["finite", "inf on rank 1"])
@pytest.mark.parametrize("kind", ["plain", "autocast", "clipped", "fused"])
def test_grad_scaler(kind: str, poisoned: int | None) -> None:
    tolerance = 2e-2 if kind == "autocast" else 1e-9
    [first, _] = assert_as_one_process(amp, kind, poisoned, tolerance=tolerance)
    assert first[1:10:2] == [step == poisoned for step in range(5)]  # only the poisoned step leaves parameters alone


# Hooks


@pytest.mark.parametrize("world_size", [1, 2])
@ranks()
def test_step_hooks_run_once_a_step(world_size: int, rank: int) -> None:
    model = small_model()
    plain = momentum(model)
    optimizer = torchring.wrap(plain, model)
    heard: list[str] = []
    handles = [
        register_optimizer_step_pre_hook(lambda it, *_: heard.append(f"all pre, {type(it).__name__}")),
        register_optimizer_step_post_hook(lambda it, *_: heard.append(f"all post, {type(it).__name__}")),
    ]
    for name, target in (("wrapper", optimizer), ("wrapped", plain)):
        handles += [
            target.register_step_pre_hook(lambda *_, name=name: heard.append(f"{name} pre")),
            target.register_step_post_hook(lambda *_, name=name: heard.append(f"{name} post")),
        ]
    is_optimizer: list[bool] = []
    optimizer.register_step_pre_hook(lambda it, args, kwargs: is_optimizer.append(it is optimizer))
    train(Side((rank,), True), model, optimizer, [0])
    for handle in handles:
        handle.remove()
    train(Side((rank,), True), model, optimizer, [1])
    wrapped = ["all pre, SGD", "wrapped pre", "wrapped post", "all post, SGD"]
    assert heard == ["wrapper pre", *wrapped, "wrapper post"]
    assert is_optimizer == [True, True]


@ranks(1)
def test_state_dict_hooks_run() -> None:
    model = small_model()
    optimizer = torchring.wrap(momentum(model), model)
    heard: list[str] = []
    optimizer.register_state_dict_pre_hook(lambda *_: heard.append("before saving"))
    optimizer.register_state_dict_post_hook(lambda *_: heard.append("after saving"))
    optimizer.register_load_state_dict_pre_hook(lambda *_: heard.append("before loading"))
    optimizer.register_load_state_dict_post_hook(lambda *_: heard.append("after loading"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert heard == ["before saving", "after saving", "before loading", "after loading"]


# Checkpoints and copies


def _saved_and_loaded(side: Side, into: str) -> Sequence[Any]:
    """Train 2 steps, save, train 2 more; then again from the checkpoint. Both ends."""
    model = small_model()
    optimizer = side.wrap(torch.optim.AdamW(model.parameters(), lr=0.01), model)
    train(side, model, optimizer, range(2))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    checkpoint = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    keys = sorted(checkpoint["optimizer"])
    train(side, model, optimizer, range(2, 4))
    uninterrupted = values(model)
    if into == "itself":
        again, other = model, optimizer
        model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
    else:
        again = small_model(seed=8)
        again.load_state_dict(checkpoint["model"])
        plain = torch.optim.AdamW(again.parameters(), lr=0.5)
        if into == "plain, then wrapped":
            plain.load_state_dict(checkpoint["optimizer"])
            other = side.wrap(plain, again)
        else:
            other = side.wrap(plain, again)
            other.load_state_dict(checkpoint["optimizer"])
    train(side, again, other, range(2, 4))
    return [keys, *uninterrupted, *values(again)]


@pytest.mark.parametrize("into", ["itself", "plain, then wrapped", "wrapped"])
def test_checkpoints_resume_and_are_those_of_the_plain_optimizer(into: str) -> None:
    [first, _] = assert_as_one_process(_saved_and_loaded, into)
    assert first[0] == ["param_groups", "state"]
    for uninterrupted, resumed in zip(first[1:7], first[7:], strict=True):
        assert_bitwise(resumed, uninterrupted)


def _copy_of(how: str, model: nn.Module, optimizer: Any) -> tuple[nn.Module, Any]:
    if how == "deepcopy":
        return copy.deepcopy((model, optimizer))
    if how == "pickle":
        return pickle.loads(pickle.dumps((model, optimizer)))
    file = io.BytesIO()
    torch.save((model, optimizer), file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


def _copied(side: Side, how: str) -> Sequence[Any]:
    model = small_model()
    optimizer = side.wrap(momentum(model), model)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.9)
    train(side, model, optimizer, range(2))
    scheduler.step()
    other_model, other = _copy_of(how, model, optimizer)
    train(side, other_model, other, range(2, 4))  # the copy on its own data, then both in turns
    for step in range(4, 6):
        train(side, model, optimizer, [step])
        train(side, other_model, other, [step + 1])
    third_model, third = _copy_of(how, other_model, other)  # a copy of a copy, which nothing has connected yet
    third.zero_grad()
    third.step()
    train(side, third_model, third, [6])
    return [isinstance(other, torch.optim.Optimizer), *values(model), *values(other_model), *values(third_model)]


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_train_on_their_own(how: str) -> None:
    assert_as_one_process(_copied, how)


def _copy_of_the_model_alone(side: Side) -> Sequence[Any]:
    model = small_model()
    optimizer = side.wrap(momentum(model), model)
    average = torch.optim.swa_utils.AveragedModel(model)
    train(side, model, optimizer, range(2))
    average.update_parameters(model)
    if 0 in side.mine:  # nothing is sent for a copy of the model, so one rank may do with it what it likes
        loss_on(copy.deepcopy(model), 0, 0).backward()
    train(side, model, optimizer, range(2, 4))
    average.update_parameters(model)
    return [*values(average), *values(model)]


def test_a_copy_of_the_model_alone_is_not_hooked() -> None:
    assert_as_one_process(_copy_of_the_model_alone)


# Zeroing, clipping, closures, groups


def _zero(way: str, model: nn.Module, optimizer: Any) -> None:
    if way == "optimizer":
        optimizer.zero_grad()
    elif way == "optimizer, in place":
        optimizer.zero_grad(set_to_none=False)
    elif way == "wrapped optimizer":
        getattr(optimizer, "optimizer", optimizer).zero_grad()
    elif way == "wrapped optimizer, in place":
        getattr(optimizer, "optimizer", optimizer).zero_grad(set_to_none=False)
    elif way == "model":
        model.zero_grad()
    elif way == "model, in place":
        model.zero_grad(set_to_none=False)
    elif way == "by hand, as PyTorch once did":
        for p in model.parameters():
            if p.grad is not None:
                p.grad.detach_()
                p.grad.zero_()
    else:
        for p in model.parameters():
            p.grad = torch.zeros_like(p) if way == "by hand, anew" else None


def _zeroed(side: Side, way: str) -> Sequence[Any]:
    model = small_model()
    optimizer = side.wrap(momentum(model), model)
    seen: list[Any] = []
    for step in range(4):
        side.mean(lambda rank, step=step: loss_on(model, rank, step)).backward()
        optimizer.step()
        _zero(way, model, optimizer)
        seen += [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    if way != "by hand, anew":
        optimizer.step()  # nothing, or zeros, on which momentum rolls on
    return [*seen, *values(model)]


_ZEROING = ["optimizer", "optimizer, in place", "wrapped optimizer", "wrapped optimizer, in place", "model",
            "model, in place", "by hand", "by hand, anew", "by hand, as PyTorch once did"]  # fmt: skip


@pytest.mark.parametrize("way", _ZEROING)
def test_zeroing_gradients(way: str) -> None:
    assert_as_one_process(_zeroed, way)


@pytest.mark.parametrize("keep", ["the gradient", "detached"])
def test_gradients_kept_over_zeroing(keep: str) -> None:
    assert_as_one_process(keeping, keep)


def _clipped(side: Side, kind: str) -> Sequence[Any]:
    model = small_model()
    optimizer = side.wrap(momentum(model), model)
    norms: list[Any] = []
    for step in range(3):
        optimizer.zero_grad()
        side.mean(lambda rank, step=step: loss_on(model, rank, step)).backward()
        if kind == "value":
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
        else:
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.05, foreach=kind == "foreach"))
        optimizer.step()
    return [*norms, *values(model)]


@pytest.mark.parametrize("kind", ["foreach", "loop", "value"])
def test_clipping_needs_no_extra_call(kind: str) -> None:
    [first, _] = assert_as_one_process(_clipped, kind)
    assert kind == "value" or float(first[0]) > 0.05  # it does clip


def _closure(side: Side, kind: str) -> Sequence[Any]:
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


@pytest.mark.parametrize("kind", ["sgd", "sgd, a number", "lbfgs", "lbfgs, wolfe", "lbfgs, a rank skips"])
def test_closures(kind: str) -> None:
    """The loss that they return is the mean over ranks: LBFGS branches on it, and has to branch alike everywhere."""
    [first, _] = assert_as_one_process(_closure, kind, tolerance=1e-7)
    assert first[0] > first[1] > first[2]


def _grown(side: Side) -> Sequence[Any]:
    body, head = small_model(), nn.Linear(2, 2).double()
    optimizer = side.wrap(momentum(body), body)
    train(side, body, optimizer, range(2))
    torch.manual_seed(20 + side.mine[0])  # every rank makes another head; rank 0's counts
    new = nn.Linear(2, 2).double()
    head.load_state_dict(new.state_dict())
    optimizer.add_param_group({"params": head.parameters(), "lr": 0.3})
    whole = nn.Sequential(body, head)
    train(side, whole, optimizer, range(2, 5))
    optimizer.zero_grad()
    return [len(optimizer.param_groups), *values(whole)]


@pytest.mark.parametrize("world_size", [1, 2])
def test_groups_added_after_wrapping_are_reduced_too(world_size: int) -> None:
    assert_as_one_process(_grown, world_size=world_size)


@ranks(2)
def test_a_parameter_has_one_optimizer(rank: int) -> None:
    model, other = small_model(), small_model()
    optimizer = torchring.wrap(momentum(model), model)
    of_other = torchring.wrap(momentum(other), other)
    twice = attempt(lambda: optimizer.add_param_group({"params": [model[0].weight]}))
    of_another = attempt(lambda: optimizer.add_param_group({"params": of_other.param_groups[0]["params"]}))
    copied = attempt(lambda: copy.copy(optimizer))
    train(Side((rank,), True), model, optimizer, range(2))
    assert twice.startswith("ValueError")
    assert of_another.startswith("ValueError: group1.param0 belongs to another DistributedOptimizer")
    assert copied.startswith("TypeError: copy.copy()")
    assert "copy.deepcopy(" in copied
    assert_same_everywhere(model.parameters())


# Once, twice, several


def _wrapped_twice(rank: int, world_size: int) -> list[str]:
    model = small_model()
    plain = momentum(model)
    optimizer = torchring.wrap(plain, model)
    problems = [
        attempt(lambda: torchring.wrap(optimizer, model)),
        attempt(lambda: torchring.DistributedOptimizer(optimizer)),
        attempt(lambda: torchring.wrap(plain, model)),
        attempt(lambda: torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)),
        attempt(lambda: torchring.wrap(torch.optim.SGD([model[2].weight], lr=0.1))),
    ]
    train(Side((rank,), True), model, optimizer, range(2))
    return [*problems, digest(model.parameters())]


def test_wrapping_twice_is_an_error_and_harms_nothing() -> None:
    results = run_pooled(_wrapped_twice, 2)
    for *problems, _ in results:
        assert all(problem.startswith("ValueError") for problem in problems), problems
    assert_same_on_all_ranks([result[-1] for result in results])


def test_wrapping_twice_is_an_error_in_a_world_of_one() -> None:
    [[of_wrapper, of_wrapper_again, *_]] = run_pooled(_wrapped_twice, 1)
    assert of_wrapper.startswith("ValueError")
    assert of_wrapper_again.startswith("ValueError")


def _closed(rank: int, world_size: int) -> dict[str, Any]:
    model = small_model()
    plain = momentum(model)
    optimizer = torchring.wrap(plain, model)
    side = Side((rank,), True)
    train(side, model, optimizer, range(2))
    together = digest(model.parameters())
    optimizer.close()
    optimizer.close()
    problems = [attempt(action) for action in (optimizer.step, optimizer.synchronize, optimizer.no_sync)]
    if rank == 0:
        train(side, model, plain, range(2, 4))  # alone: nobody else takes part
    apart = digest(model.parameters())
    again = torchring.wrap(plain, model)
    from_rank_0 = digest(model.parameters())
    train(side, model, again, range(4, 6))
    return {"phases": [together, apart, from_rank_0, digest(model.parameters())], "problems": problems,
            "momentum": digest([plain.state[p]["momentum_buffer"] for p in model.parameters()])}  # fmt: skip


def test_after_close_the_wrapped_optimizer_goes_on_alone_and_may_be_wrapped_again() -> None:
    first, second = run_pooled(_closed, 2)
    alike = [a == b for a, b in zip(first["phases"], second["phases"], strict=True)]
    assert alike == [True, False, True, True]
    assert first["momentum"] == second["momentum"]
    assert first["phases"][1] == first["phases"][2]
    assert all(p.startswith("ValueError") and "closed" in p for p in first["problems"] + second["problems"])


@ranks(2)
def test_a_closed_optimizer_holds_no_parameters_until_the_garbage_collector_comes(rank: int) -> None:
    """Closed after 0, 1, 2 ... backwards and a synchronize()."""
    kept = []
    for num_backwards in range(5):
        model = small_model()
        optimizer = torchring.wrap(momentum(model), model)
        train(Side((rank,), True), model, optimizer, range(num_backwards))
        with optimizer.no_sync():
            model(batch(rank, 0)[0]).sum().backward()
        optimizer.synchronize()
        optimizer.zero_grad()
        gc.collect()
        gc.disable()
        optimizer.close()
        parameter = weakref.ref(model[0].weight)
        del model, optimizer
        kept.append(parameter() is not None)
        gc.enable()
    assert kept == [False] * 5


def _dropped(side: Side) -> Sequence[Any]:
    """As in a notebook: the cell that wraps is run again."""
    model = small_model()
    for start in range(0, 6, 2):
        optimizer = None
        optimizer = side.wrap(momentum(model), model)
        StepLR(optimizer, 1)
        train(side, model, optimizer, range(start, start + 2))
    return values(model)


def test_an_optimizer_that_is_gone_gives_its_parameters_back() -> None:
    assert_as_one_process(_dropped)


def _two_optimizers(side: Side, options: dict[str, Any]) -> Sequence[Any]:
    model = small_model()
    body = side.wrap(torch.optim.SGD([*model[0].parameters(), *model[2].parameters()], lr=0.1), model, **options)
    head = side.wrap(torch.optim.AdamW(model[4].parameters(), lr=0.01), model)
    for step in range(6):
        body.zero_grad()
        head.zero_grad()
        side.mean(lambda rank, step=step: loss_on(model, rank, step)).backward()
        if step % 3 != 1:
            head.step()
        body.step()
    return values(model)


@pytest.mark.parametrize("options", [{}, {"overlap": "thread"}, {"algorithm": "native"}], ids=str)
@pytest.mark.parametrize("world_size", [1, 2])
def test_several_optimizers_on_one_model(options: dict[str, Any], world_size: int) -> None:
    assert_as_one_process(_two_optimizers, options, world_size=world_size)


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
        of_critic.zero_grad()
        side.mean(lambda rank, step=step: critic_loss(rank, step)).backward()
        of_critic.step()
        of_generator.zero_grad()  # the critic's gradients of this backward are left for its own zero_grad
        side.mean(lambda rank, step=step: generator_loss(rank, step)).backward()
        of_generator.step()
    return [*values(generator), *values(critic)]


@pytest.mark.parametrize("ranks_differ", ["", "critic sees no fakes", "no critic"])
def test_two_models_trained_against_each_other(ranks_differ: str) -> None:
    assert_as_one_process(_gan, ranks_differ)


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


@pytest.mark.parametrize("world_size", [2, 3])
def test_two_backwards_in_another_order_on_another_rank(world_size: int) -> None:
    assert_as_one_process(_in_another_order, world_size=world_size)


# Worlds come and go


@grid(
    "how, options",
    ["close", "leave to shutdown"],
    [{"overlap": "inline"}, {"overlap": "thread"}, {"algorithm": "native"}],
    keep=lambda how, options: (how == "close") == (options in ({"overlap": "thread"}, {"algorithm": "native"})),
)
@ranks(2)
def test_worlds_come_and_go_without_a_trace(options: dict[str, Any], how: str, rank: int) -> None:
    side = Side((rank,), True)
    fds, threads, digests = [], [], []
    for cycle in range(5):
        torchring.init()
        model = small_model(seed=rank)
        plain = momentum(model)
        optimizer = torchring.wrap(plain, model, **options)
        train(side, model, optimizer, range(3))
        digests.append(digest(model.parameters()))
        if how == "close":
            optimizer.close()
        torchring.shutdown()
        if cycle == 1 and how != "close":
            assert attempt(optimizer.step).startswith("ValueError")
        train(side, model, plain, range(3))  # its hooks are gone: this reduces nothing and waits for nobody
        del optimizer, plain, model
        gc.collect()  # buffers stay mapped until nothing views them
        end = time.monotonic() + 5.0  # a thread that was told to end takes its time
        while cycle > 1 and len(os.listdir("/proc/self/task")) > threads[1] and time.monotonic() < end:
            time.sleep(0.01)
        fds.append(count_open_fds())
        threads.append(len(os.listdir("/proc/self/task")))
    assert not torchring.is_initialized()
    assert fds[4] <= fds[1], fds
    assert threads[4] <= threads[1], threads
    assert len({*digests}) == 1
    assert torchring.all_gather_object(digests) == [digests] * 2


@pytest.mark.parametrize("compression", [None, "fp16"])
@ranks(2)
def test_stats_say_what_was_done(compression: str | None, rank: int) -> None:
    model = small_model(torch.float32)
    options: dict[str, Any] = {"compression": compression, "algorithm": "direct", "overlap": "thread"}
    optimizer = torchring.wrap(momentum(model), model, bucket_mb=TINY_MB, **options)
    train(Side((rank,), True), model, optimizer, range(3))
    stats = optimizer.stats()
    assert (stats.algorithm, stats.overlap, stats.num_reductions) == ("direct", "thread", 3)
    assert stats.num_buckets > 1
    assert stats.bytes_per_step >= sum(p.numel() for p in model.parameters()) * (2 if compression else 4)
    assert stats.communication_ms > 0
    assert 0 <= stats.overlap_ratio <= 1
