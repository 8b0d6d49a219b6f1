"""A DistributedOptimizer is a torch.optim.Optimizer: what a script may do with one, it may do with the other.

For what it computes see test_semantics.py.
"""

import copy
import gc
import os
import time
import weakref
from typing import Any

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import torchring
from tests.support.checks import assert_bitwise, assert_same_everywhere, digest
from tests.support.harness import count_open_fds, patient, ranks, run_ranks
from tests.support.training import TINY_MB, Side, attempt, batch, loss_on, momentum, small_model, train, values

worlds_of_one_and_two = pytest.mark.parametrize("world_size", [1, 2])


@worlds_of_one_and_two
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


@worlds_of_one_and_two
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


@ranks(1, run_ranks, launcher_env=False)
def test_a_single_process_needs_no_launcher() -> None:
    model, alone = small_model(), small_model()
    optimizer = torchring.wrap(momentum(model), model, accumulate=2, compression="fp16", algorithm="native")
    with optimizer.no_sync():
        loss_on(model, 0, 0).backward()
    optimizer.synchronize()
    optimizer.step()
    assert optimizer.stats().bytes_per_step == 0
    optimizer.close()
    train(Side((0,), False), alone, momentum(alone), [0])
    for mine, expected in zip(values(model), values(alone), strict=True):
        assert_bitwise(mine, expected)


@worlds_of_one_and_two
@ranks()
def test_hooks_run_once(world_size: int, rank: int) -> None:
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

    heard.clear()
    optimizer.register_state_dict_pre_hook(lambda *_: heard.append("before saving"))
    optimizer.register_state_dict_post_hook(lambda *_: heard.append("after saving"))
    optimizer.register_load_state_dict_pre_hook(lambda *_: heard.append("before loading"))
    optimizer.register_load_state_dict_post_hook(lambda *_: heard.append("after loading"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert heard == ["before saving", "after saving", "before loading", "after loading"]


@worlds_of_one_and_two
@ranks()
def test_a_parameter_has_one_optimizer(world_size: int, rank: int) -> None:
    """What is refused harms nothing."""
    model, other = small_model(), small_model()
    plain = momentum(model)
    optimizer, of_other = torchring.wrap(plain, model), torchring.wrap(momentum(other), other)
    refused = [
        (lambda: torchring.wrap(optimizer, model), "ValueError"),
        (lambda: torchring.DistributedOptimizer(optimizer), "ValueError"),
        (
            lambda: torchring.wrap(plain, model),
            "ValueError: 0.weight belongs to another DistributedOptimizer; call close()",
        ),
        (lambda: torchring.wrap(torch.optim.SGD([model[2].weight], lr=0.1)), "ValueError"),
        (lambda: optimizer.add_param_group({"params": [model[0].weight]}), "ValueError"),
        (
            lambda: optimizer.add_param_group({"params": of_other.param_groups[0]["params"]}),
            "ValueError: group1.param0 belongs to another DistributedOptimizer",
        ),
        (lambda: copy.copy(optimizer), "TypeError: copy.copy()"),
    ]
    for action, error in refused if world_size > 1 else refused[:2]:
        problem = attempt(action)
        assert problem.startswith(error), problem
    train(Side((rank,), True), model, optimizer, range(2))
    assert_same_everywhere(model.parameters())


@ranks(2)
def test_after_close_the_wrapped_optimizer_goes_on_alone_and_may_be_wrapped_again(rank: int) -> None:
    model = small_model()
    plain = momentum(model)
    optimizer = torchring.wrap(plain, model)
    side = Side((rank,), True)
    train(side, model, optimizer, range(2))
    assert_same_everywhere(model.parameters())
    optimizer.close()
    optimizer.close()
    for action in (optimizer.step, optimizer.synchronize, optimizer.no_sync):
        problem = attempt(action)
        assert problem.startswith("ValueError"), problem
        assert "closed" in problem
    if rank == 0:
        train(side, model, plain, range(2, 4))  # alone: nobody else takes part
    of_0, of_1 = torchring.all_gather_object(digest(model.parameters()))
    assert of_0 != of_1
    again = torchring.wrap(plain, model)
    assert digest(model.parameters()) == of_0
    train(side, model, again, range(4, 6))
    assert_same_everywhere([*model.parameters(), *(plain.state[p]["momentum_buffer"] for p in model.parameters())])


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


@pytest.mark.parametrize(
    ("how", "options"),
    [
        ("leave to shutdown", {"overlap": "inline"}),
        ("close", {"overlap": "thread"}),
        ("close", {"algorithm": "native"}),
    ],
)
@ranks(2)
def test_worlds_come_and_go_without_a_trace(how: str, options: dict[str, Any], rank: int) -> None:
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
        end = time.monotonic() + patient(5.0)  # a thread that was told to end takes its time
        while cycle > 1 and len(os.listdir("/proc/self/task")) > threads[1] and time.monotonic() < end:
            time.sleep(0.01)
        fds.append(count_open_fds())
        threads.append(len(os.listdir("/proc/self/task")))
    assert not torchring.is_initialized()
    assert fds[4] <= fds[1], fds
    assert threads[4] <= threads[1], threads
    assert len({*digests}) == 1
    assert torchring.all_gather_object(digests) == [digests] * 2


@ranks(2)
def test_stats_say_what_was_done(rank: int) -> None:
    model = small_model(torch.float32)
    optimizer = torchring.wrap(momentum(model), model, algorithm="direct", overlap="thread", bucket_mb=TINY_MB)
    train(Side((rank,), True), model, optimizer, range(3))
    stats = optimizer.stats()
    assert (stats.algorithm, stats.overlap, stats.num_reductions) == ("direct", "thread", 3)
    assert stats.num_buckets > 1
    assert stats.bytes_per_step >= 4 * sum(p.numel() for p in model.parameters())
    assert stats.communication_ms > 0
    assert 0 <= stats.overlap_ratio <= 1
