"""The same training as DistributedDataParallel, and as one process.

DDP's way, 2 ranks: bit for bit, whatever the optimizer, buckets, algorithm, overlap, accumulation · 3 ranks: every
gradient within 4 roundings of the float64 mean of what the ranks computed · fp64: the parameters of one process that
sees the whole batch · ranks are always compared with each other bit for bit
"""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import torchring
from tests.support.checks import assert_bitwise, assert_same_on_all_ranks, assert_within_rounding, digest
from tests.support.grids import grid
from tests.support.harness import run_pooled, run_ranks

_TINY_MB = 300 / 2**20  # 300 bytes: every layer of the odd model closes a bucket, small ones share one
_ROWS = 6  # of a rank's batch
_kept: list[Any] = []  # Gloo may deadlock with the interpreter when DDP is destroyed, so it is not


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


def _model(case: Case) -> nn.Sequential:
    torch.manual_seed(7)
    # wide: 276 KB, 1.2 MB and small: above and below what fits into a first bucket of 1 MiB
    sizes = {"odd": [5, 13, 17, 1, 3], "wide": [5, 67, 1031, 301, 3]}[case.model]
    layers: list[nn.Module] = []
    for i, (inner, outer) in enumerate(itertools.pairwise(sizes)):
        layers += [nn.Linear(inner, outer, bias=i != 1), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).to(case.dtype)


def _optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    if case.optimizer == "momentum":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def _batch(case: Case, rank: int, step: int, micro_step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(10_000 * rank + 100 * step + micro_step)
    draw = torch.randn(_ROWS, 8, generator=generator).to(case.dtype)
    return draw[:, :5], draw[:, 5:]


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def _sleep_in_backward(model: nn.Sequential, rank: int, world_size: int, step: list[int]) -> None:
    def hook(gradient: Tensor) -> None:
        if step[0] % world_size == rank:
            time.sleep(0.03)

    middle = model[4]
    assert isinstance(middle, nn.Linear)
    middle.weight.register_hook(hook)


def _train(rank: int, world_size: int, case: Case, way: str) -> Trained:
    """way: "ring" for torchring, "ddp", or "alone" without any reduction."""
    model = _model(case)
    step_now = [0]
    forward: nn.Module = model
    optimizer = _optimizer(case, model)
    if way == "ring":
        optimizer = torchring.wrap(optimizer, model, accumulate=case.micro_steps, **case.options)
    elif way == "ddp":
        if not dist.is_initialized():
            dist.init_process_group("gloo")
        forward = DistributedDataParallel(model)
        _kept.append(forward)
    if case.late and way == "ring":
        _sleep_in_backward(model, rank, world_size, step_now)
    result = Trained([], [], [])
    parameters = list(model.parameters())
    for step in range(case.steps):
        step_now[0] = step
        batches = [_batch(case, rank, step, micro_step) for micro_step in range(case.micro_steps)]
        bare = copy.deepcopy(model)
        for p in bare.parameters():
            p._post_accumulate_grad_hooks, p._backward_hooks, p.grad = None, None, None
        for batch in batches:
            _loss(bare, batch).backward()
        result.local.append([_grad(p).clone() for p in bare.parameters()])
        optimizer.zero_grad()
        for micro_step, batch in enumerate(batches):
            silent = isinstance(forward, DistributedDataParallel) and micro_step < case.micro_steps - 1
            with forward.no_sync() if silent else nullcontext():
                _loss(forward, batch).backward()
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
        ring[name] = _train(rank, world_size, case, "ring")
        torchring.shutdown()
    return {name: (ring[name], _train(rank, world_size, case, "ddp")) for name, case in cases.items()}


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
    "sgd in tiny buckets": Case(options={"bucket_mb": _TINY_MB}),
    "adamw in tiny buckets": Case("adamw", options={"bucket_mb": _TINY_MB}),
    "a bucket per parameter": Case(options={"bucket_mb": 0}),
    "wide": Case("adamw", model="wide", steps=3),
    "wide in small buckets": Case(model="wide", steps=3, options={"bucket_mb": 0.3}),
    "ring": Case("adamw", options={"algorithm": "ring", "bucket_mb": _TINY_MB}),
    "native": Case("adamw", options={"algorithm": "native", "bucket_mb": _TINY_MB}),
    "direct on a thread": Case(late=True, options={"algorithm": "direct", "overlap": "thread", "bucket_mb": _TINY_MB}),
    "direct inline": Case(late=True, options={"algorithm": "direct", "overlap": "inline", "bucket_mb": _TINY_MB}),
    "ring on a thread": Case(late=True, options={"algorithm": "ring", "overlap": "thread", "bucket_mb": _TINY_MB}),
    "hierarchical": Case(late=True, options={"algorithm": "hierarchical", "bucket_mb": _TINY_MB}),
    "ring inline": Case(late=True, options={"algorithm": "ring", "overlap": "inline", "bucket_mb": _TINY_MB}),
    "native on a thread": Case(late=True, options={"algorithm": "native", "overlap": "thread"}),
    "native inline": Case(late=True, options={"algorithm": "native", "overlap": "inline"}),
    "3 micro-steps": Case("adamw", micro_steps=3, options={"bucket_mb": _TINY_MB}),
    "2 micro-steps of wide": Case(model="wide", micro_steps=2, steps=3),
    "3 micro-steps, ring, thread": Case(
        micro_steps=3, late=True, options={"algorithm": "ring", "overlap": "thread", "bucket_mb": _TINY_MB}
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
    "adamw", "wide", "ring", "native", "direct on a thread", "hierarchical", "3 micro-steps, ring, thread", "fp64",
)  # fmt: skip


@grid("name", list(_CASES), keep=lambda name: name in _OF_THREE)
def test_three_ranks_average_within_rounding(name: str) -> None:
    """Two additions, one product with a factor 1/3 that is itself rounded: 4 roundings. DDP stays in the same bound."""
    case = _CASES[name]
    runs = run_pooled(_train, 3, case, "ring")
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
    [ring], [plain] = run_pooled(_train, 1, case, "ring"), run_pooled(_train, 1, case, "alone")
    _assert_trained_alike(ring, plain)
    _assert_means([ring], 0, torch.float32)


def _one_process(case: Case, world_size: int) -> Iterator[list[Tensor]]:
    model = _model(case)
    optimizer = _optimizer(case, model)
    for step in range(case.steps):
        optimizer.zero_grad()
        for micro_step in range(case.micro_steps):
            of_ranks = [_batch(case, rank, step, micro_step) for rank in range(world_size)]
            _loss(model, (torch.cat([x for x, _ in of_ranks]), torch.cat([y for _, y in of_ranks]))).backward()
        optimizer.step()
        yield [p.detach().clone() for p in model.parameters()]


@grid("world_size, optimizer, micro_steps", [1, 2, 3], ["momentum", "adamw"], [1, 3])
def test_ranks_train_as_one_process_with_the_whole_batch(world_size: int, optimizer: str, micro_steps: int) -> None:
    case = Case(optimizer, dtype=torch.float64, micro_steps=micro_steps, steps=6, options={"bucket_mb": _TINY_MB})
    runs = run_pooled(_train, world_size, case, "ring")
    _assert_ranks_agree(runs)
    for actual, expected in zip(runs[0].parameters, _one_process(case, world_size), strict=True):
        for mine, theirs in zip(actual, expected, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)


def test_direct_does_not_depend_on_the_bucket_layout() -> None:
    """It adds in rank order, so every element meets the same roundings wherever it lies."""
    options = [{"algorithm": "direct", "bucket_mb": size, "overlap": overlap} for size in (0, _TINY_MB, 25.0)
               for overlap in ("inline", "thread")]  # fmt: skip
    digests = [digest(run_pooled(_train, 3, Case(options=each), "ring")[0].parameters[-1]) for each in options]
    assert_same_on_all_ranks(digests)


def test_these_comparisons_fail_without_a_reduction() -> None:
    """The negative control: ranks have different data, so training alone must be told from training together."""
    alone = run_pooled(_train, 2, Case(), "alone")
    [ring, _] = run_pooled(_train, 2, Case(), "ring")
    with pytest.raises(AssertionError, match="elements differ"):
        _assert_trained_alike(alone[0], ring)
    with pytest.raises(AssertionError, match="rank 1 has"):
        _assert_ranks_agree(alone)
    with pytest.raises(AssertionError, match="roundings"):
        _assert_means(alone, 4, torch.float32)
    case = Case(dtype=torch.float64)
    [lonely] = run_pooled(_train, 1, case, "alone")
    with pytest.raises(AssertionError):
        torch.testing.assert_close(lonely.parameters[0][0], next(_one_process(case, 2))[0], rtol=1e-9, atol=1e-11)
