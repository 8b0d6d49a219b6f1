"""DDP or FSDP around a parameter that torchring reduces is an error, whichever came first; around others it is none."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp import ShardingStrategy as Shard
from torch.nn.parallel import DistributedDataParallel

import torchring
from tests.support.harness import run_ranks
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


class _Cases:
    """Each method makes one mistake, and takes care that its optimizer is closed after it."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.model = small_model()

    def wrapped(self, *model: nn.Module) -> Any:
        self.optimizer = torchring.wrap(_sgd(self.model), *model)
        return self.optimizer

    def ddp_then_model(self) -> None:
        self.net = DistributedDataParallel(self.model)
        self.wrapped(self.model)

    def ddp_then_no_model(self) -> None:
        self.net = DistributedDataParallel(self.model)
        self.wrapped()

    def ddp_given(self) -> None:
        self.wrapped(DistributedDataParallel(self.model))

    def ddp_of_a_part(self) -> None:
        self.net = DistributedDataParallel(self.model[2])
        self.wrapped(self.model)

    def subclass(self) -> None:
        class Mine(DistributedDataParallel):
            pass

        self.net = Mine(self.model)
        self.wrapped(self.model)

    def ddp_later(self) -> None:
        optimizer = self.wrapped(self.model)
        _train(DistributedDataParallel(self.model), optimizer, self.rank)

    def ddp_much_later(self) -> None:
        """With a communication hook of its own, when buckets have been laid out anew."""
        optimizer = self.wrapped(self.model)
        _train(self.model, optimizer, self.rank, steps=3)
        net = DistributedDataParallel(self.model)
        net.register_comm_hook(None, default_hooks.allreduce_hook)
        _train(net, optimizer, self.rank)

    def replicate_later(self) -> None:
        from torch.distributed._composable import replicate

        optimizer = self.wrapped(self.model)
        _train(replicate(self.model), optimizer, self.rank)

    def parameters_added_later(self) -> None:
        part = nn.Linear(2, 2).double()
        net = DistributedDataParallel(part)
        optimizer = self.wrapped(self.model)
        _train(self.model, optimizer, self.rank, steps=2)
        optimizer.add_param_group({"params": list(part.parameters())})
        _train(nn.Sequential(self.model, net), optimizer, self.rank)

    def parameters_thawed_later(self) -> None:
        part = self.model[4].requires_grad_(False)
        optimizer = self.wrapped(self.model)
        net = DistributedDataParallel(part.requires_grad_(True))
        _train(nn.Sequential(self.model[:4], net), optimizer, self.rank)

    def fsdp_first(self) -> None:
        net = _fsdp(self.model, True)
        torchring.wrap(_sgd(net))

    def fsdp_flat_first(self) -> None:
        net = _fsdp(self.model, False)
        torchring.wrap(_sgd(net))

    def fsdp_later(self) -> None:
        optimizer = self.wrapped(self.model)
        _train(_fsdp(self.model, True), optimizer, self.rank)

    def fsdp_replicated_later(self) -> None:
        optimizer = self.wrapped(self.model)
        _train(_fsdp(self.model, True, Shard.NO_SHARD), optimizer, self.rank)

    def fsdp_flat_later(self) -> None:
        optimizer = self.wrapped(self.model)
        _train(_fsdp(self.model, False), optimizer, self.rank)

    def fully_shard_first(self) -> None:
        fully_shard(self.model)
        self.wrapped()

    def fully_shard_given(self) -> None:
        fully_shard(self.model)
        self.wrapped(self.model)

    def fully_shard_later(self) -> None:
        optimizer = self.wrapped(self.model)
        fully_shard(self.model)
        _train(self.model, optimizer, self.rank)


# case: type of the error, and what it names
_MISTAKES = {
    "ddp_then_model": ("ValueError", "0.weight", "DistributedDataParallel"),
    "ddp_then_no_model": ("ValueError", "group0.param0", "DistributedDataParallel"),
    "ddp_given": ("ValueError", "the model", "DistributedDataParallel"),
    "ddp_of_a_part": ("ValueError", "2.weight", "DistributedDataParallel"),
    "subclass": ("ValueError", "0.weight", "Mine"),
    "ddp_later": ("GradientError", "0.weight", "DistributedDataParallel"),
    "ddp_much_later": ("GradientError", "0.weight", "DistributedDataParallel"),
    "replicate_later": ("GradientError", "0.weight", "DistributedDataParallel"),
    "parameters_added_later": ("ValueError", "group1.param0", "DistributedDataParallel"),
    "parameters_thawed_later": ("GradientError", "4.weight", "DistributedDataParallel"),
    "fsdp_first": ("ValueError", "group0.param0", "FullyShardedDataParallel"),
    "fsdp_flat_first": ("ValueError", "group0.param0", "FullyShardedDataParallel"),
    "fsdp_later": ("GradientError", "0.weight", "FullyShardedDataParallel"),
    "fsdp_replicated_later": ("GradientError", "0.weight", "FullyShardedDataParallel"),
    "fsdp_flat_later": ("GradientError", "0.weight", "not a parameter of the model any more"),
    "fully_shard_first": ("ValueError", "group0.param0", "DTensor"),
    "fully_shard_given": ("ValueError", "the model", "FSDPSequential"),
    "fully_shard_later": ("GradientError", "0.weight", "not a parameter of the model any more"),
}


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


def _all_cases(rank: int, world_size: int) -> tuple[dict[str, str], dict[str, float]]:
    gc.freeze()  # what was imported: each case collects garbage, which takes 0.2 s otherwise
    dist.init_process_group("gloo")
    problems = {}
    for name in _MISTAKES:
        cases = _Cases(rank)
        problems[name] = attempt(getattr(cases, name))
        if hasattr(cases, "optimizer"):
            cases.optimizer.close()
    fine = _no_mistakes(rank, world_size)
    torchring.shutdown()
    dist.destroy_process_group()
    return problems, fine


def test_ddp_and_fsdp() -> None:
    for problems, fine in run_ranks(_all_cases, 2):
        for name, (kind, *fragments) in _MISTAKES.items():
            problem = problems[name]
            assert problem.startswith(f"{kind}: "), f"{name}: {problem or 'no error'}"
            for fragment in (*fragments, "bare model", "Accelerate", "Trainer", "Lightning"):
                assert fragment in problem, f"{name}: {fragment!r} is not in {problem}"
        assert fine
        assert all(error < 1e-12 for error in fine.values()), fine
