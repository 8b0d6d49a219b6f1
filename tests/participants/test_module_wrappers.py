"""DDP or FSDP around a parameter that torchring reduces is an error, whichever came first; around others it is none."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable import replicate
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp import ShardingStrategy as Shard
from torch.nn.parallel import DistributedDataParallel

import torchring
from tests.support.harness import ranks, run_ranks
from tests.support.training import attempt, loss_on, small_model

STEP = 7  # of `batch`, whichever


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def _train(net: nn.Module, optimizer: Any, rank: int, steps: int = 1) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        loss_on(net, rank, STEP).backward()
        optimizer.step()


def _fsdp(model: nn.Module, use_orig_params: bool, strategy: Shard = Shard.FULL_SHARD) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return FullyShardedDataParallel(
            model, use_orig_params=use_orig_params, sharding_strategy=strategy, device_id=torch.device("cpu")
        )


# With a model, and `wrap(*given)`, which wraps an optimizer of it.
Mistake = Callable[[Any, Callable[..., Any], int], object]


def _first(around: Callable[[Any], Any], *, is_given: bool = True) -> Mistake:
    return lambda model, wrap, rank: [around(model), wrap(*([model] if is_given else []))]


def _later(around: Callable[[Any], Any], steps: int = 0) -> Mistake:
    def make(model: Any, wrap: Callable[..., Any], rank: int) -> None:
        optimizer = wrap(model)
        _train(model, optimizer, rank, steps)
        _train(around(model), optimizer, rank)

    return make


class _Mine(DistributedDataParallel):
    pass


def _with_a_hook(model: nn.Module) -> nn.Module:
    net = DistributedDataParallel(model)
    net.register_comm_hook(None, default_hooks.allreduce_hook)
    return net


def _parameters_added_later(model: Any, wrap: Callable[..., Any], rank: int) -> None:
    part = nn.Linear(2, 2).double()
    net = DistributedDataParallel(part)
    optimizer = wrap(model)
    _train(model, optimizer, rank, steps=2)
    optimizer.add_param_group({"params": list(part.parameters())})
    _train(nn.Sequential(model, net), optimizer, rank)


def _parameters_thawed_later(model: Any, wrap: Callable[..., Any], rank: int) -> None:
    part = model[4].requires_grad_(False)
    optimizer = wrap(model)
    net = DistributedDataParallel(part.requires_grad_(True))
    _train(nn.Sequential(model[:4], net), optimizer, rank)


def _fsdp_first(use_orig_params: bool) -> Mistake:
    return lambda model, wrap, rank: [net := _fsdp(model, use_orig_params), torchring.wrap(_sgd(net))]


_DDP, _FSDP = DistributedDataParallel, "FullyShardedDataParallel"
_OTHER = "not a parameter of the model any more"
# The mistake, the type of the error, and what it names
_MISTAKES: list[tuple[Mistake, str, str, str]] = [
    (_first(_DDP), "ValueError", "0.weight", "DistributedDataParallel"),
    (_first(_DDP, is_given=False), "ValueError", "group0.param0", "DistributedDataParallel"),
    (lambda model, wrap, rank: wrap(_DDP(model)), "ValueError", "the model", "DistributedDataParallel"),
    (_first(lambda model: _DDP(model[2])), "ValueError", "2.weight", "DistributedDataParallel"),
    (_first(_Mine), "ValueError", "0.weight", "Mine"),
    (_later(_DDP), "GradientError", "0.weight", "DistributedDataParallel"),
    # When buckets have been laid out anew.
    (_later(_with_a_hook, steps=3), "GradientError", "0.weight", "DistributedDataParallel"),
    (_later(replicate), "GradientError", "0.weight", "DistributedDataParallel"),
    (_parameters_added_later, "ValueError", "group1.param0", "DistributedDataParallel"),
    (_parameters_thawed_later, "GradientError", "4.weight", "DistributedDataParallel"),
    (_fsdp_first(True), "ValueError", "group0.param0", _FSDP),
    (_fsdp_first(False), "ValueError", "group0.param0", _FSDP),
    (_later(lambda model: _fsdp(model, True)), "GradientError", "0.weight", _FSDP),
    (_later(lambda model: _fsdp(model, True, Shard.NO_SHARD)), "GradientError", "0.weight", _FSDP),
    (_later(lambda model: _fsdp(model, False)), "GradientError", "0.weight", _OTHER),
    (_first(fully_shard, is_given=False), "ValueError", "group0.param0", "DTensor"),
    (_first(fully_shard), "ValueError", "the model", "FSDPSequential"),
    (_later(fully_shard), "GradientError", "0.weight", _OTHER),
]


def _mean_gradients(model: nn.Module, world_size: int) -> list[Tensor]:
    """The right answer: every rank knows the batches of all."""
    loss = torch.stack([loss_on(model, rank, STEP) for rank in range(world_size)]).mean()
    return list(torch.autograd.grad(loss, list(model.parameters())))


def _largest_error(forward: Callable[[], Any], model: nn.Module, rank: int, world_size: int) -> float:
    """Of the gradients, over two steps."""
    errors = [0.0]
    optimizer = forward()
    for _ in range(2):
        expected = _mean_gradients(model, world_size)
        optimizer.zero_grad()
        loss_on(model, rank, STEP).backward()
        errors += [float((p.grad - e).abs().max()) for p, e in zip(model.parameters(), expected, strict=True)]
        optimizer.step()
    optimizer.close()
    return max(errors)


def _drop_in_a_cycle(garbage: Any) -> None:
    cycle = [garbage]
    cycle.append(cycle)


def _no_mistakes(rank: int, world_size: int) -> dict[str, float]:
    model = small_model()

    def dropped_before() -> Any:
        DistributedDataParallel(model)
        return torchring.wrap(_sgd(model), model)

    def dropped_after() -> Any:
        optimizer = torchring.wrap(_sgd(model), model)
        DistributedDataParallel(model)
        return optimizer

    def dropped_in_a_cycle() -> Any:
        _drop_in_a_cycle(DistributedDataParallel(model))
        return torchring.wrap(_sgd(model), model)

    def around_a_frozen_copy() -> Any:
        other = small_model()
        kept.append(DistributedDataParallel(other))
        return torchring.wrap(_sgd(model), model)

    def told_to_ignore() -> Any:
        both = nn.ModuleDict({"mine": model, "theirs": nn.Linear(2, 2).double()})
        ignored = [name for name, _ in both.named_parameters() if name.startswith("mine")]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(both, ignored)
        kept.append(DistributedDataParallel(both))
        return torchring.wrap(_sgd(model), model)

    def refused_by_ddp() -> Any:
        """An exception, which holds the half-made DDP, is kept."""
        try:
            DistributedDataParallel(model, device_ids=[0, 1])
        except ValueError as error:
            kept.append(error)
        return torchring.wrap(_sgd(model), model)

    kept: list[Any] = []
    cases = (dropped_before, dropped_after, dropped_in_a_cycle, around_a_frozen_copy, told_to_ignore, refused_by_ddp)
    return {case.__name__: _largest_error(case, model, rank, world_size) for case in cases}


@ranks(2, start=run_ranks)
def test_ddp_and_fsdp(rank: int) -> None:
    gc.freeze()  # what was imported: each case collects garbage, which takes 0.2 s otherwise
    dist.init_process_group("gloo")
    for number, (mistake, kind, *fragments) in enumerate(_MISTAKES):
        model, wrapped = small_model(), []

        def wrap(*given: nn.Module, model: nn.Module = model, wrapped: list[Any] = wrapped) -> Any:
            wrapped.append(torchring.wrap(_sgd(model), *given))
            return wrapped[0]

        problem = attempt(lambda mistake=mistake, model=model, wrap=wrap: mistake(model, wrap, rank))
        assert problem.startswith(f"{kind}: "), f"{number}: {problem or 'no error'}"
        for fragment in (*fragments, "bare model", "Accelerate", "Trainer", "Lightning"):
            assert fragment in problem, f"{number}: {fragment!r} is not in {problem}"
        for optimizer in wrapped:
            optimizer.close()
    fine = _no_mistakes(rank, 2)
    assert fine
    assert all(error < 1e-12 for error in fine.values()), fine
    torchring.shutdown()
    dist.destroy_process_group()
