"""Parity with DistributedDataParallel, whatever the optimizer, buckets, algorithm and overlap.

2 ranks: bit for bit. 3 ranks: every gradient is within 4 roundings of the float64 mean of what the ranks computed.
"""

import copy
import itertools
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import torchring
from tests.support.checks import assert_bitwise, assert_same_everywhere, assert_within_rounding, digest
from tests.support.harness import ranks, run_ranks

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
    late: bool = False
    options: dict[str, Any] = field(default_factory=dict)


_TINY: Final[dict[str, Any]] = {"bucket_mb": _LAYER_MB}
_CASES: Final = {
    "sgd": Case(),
    "adamw": Case("adamw"),
    "sgd in tiny buckets": Case(options=_TINY),
    "a bucket per parameter": Case(options={"bucket_mb": 0}),
    "wide": Case("adamw", model="wide"),
    "wide in small buckets": Case(model="wide", options={"bucket_mb": 0.3}),
    "native": Case("adamw", options={"algorithm": "native", **_TINY}),
    "direct on a thread": Case(late=True, options={"algorithm": "direct", "overlap": "thread", **_TINY}),
    "direct inline": Case(late=True, options={"algorithm": "direct", "overlap": "inline", **_TINY}),
    "hierarchical": Case(late=True, options={"algorithm": "hierarchical", **_TINY}),
    "wide, hierarchical": Case(model="wide", options={"algorithm": "hierarchical"}),
    "native on a thread": Case(late=True, options={"algorithm": "native", "overlap": "thread", **_TINY}),
    "3 micro-steps": Case("adamw", micro_steps=3, options=_TINY),
    "2 micro-steps of wide": Case(model="wide", micro_steps=2),
    "3 micro-steps, native": Case(micro_steps=3, options={"algorithm": "native", "overlap": "thread", **_TINY}),
    "fp64": Case("adamw", dtype=torch.float64),
}


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


def _loss(model: nn.Module, case: Case, rank: int, at: int) -> Tensor:
    draw = torch.randn(_ROWS, 8, generator=torch.Generator().manual_seed(10_000 * rank + at)).to(case.dtype)
    return nn.functional.mse_loss(model(draw[:, :5]), draw[:, 5:])


def _train(rank: int, size: int, case: Case, way: str) -> Trained:
    """way: "torchring", "ddp", or "alone" without any reduction."""
    model = _model(case)
    forward: nn.Module = model
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    if case.optimizer == "adamw":
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    if way == "torchring":
        optimizer = torchring.wrap(optimizer, model, accumulate=case.micro_steps, **case.options)
    elif way == "ddp":
        forward = DistributedDataParallel(model, process_group=case.options.get("group"))
        _kept_alive.append(forward)
    late = -1
    if case.late and way == "torchring":
        model[4].weight.register_hook(lambda _: time.sleep(0.03) if late == rank else None)  # type: ignore[union-attr,arg-type]
    result = Trained([], [], [])
    for step in range(3):
        late = step % size
        micro_steps = [100 * step + micro for micro in range(case.micro_steps)]
        bare = _model(case)
        bare.load_state_dict(copy.deepcopy(model.state_dict()))
        for at in micro_steps:
            _loss(bare, case, rank, at).backward()
        result.local.append(_gradients(bare))
        optimizer.zero_grad()
        for at in micro_steps:
            is_silent = isinstance(forward, DistributedDataParallel) and at != micro_steps[-1]
            with forward.no_sync() if is_silent else nullcontext():
                _loss(forward, case, rank, at).backward()
        result.gradients.append(_gradients(model))
        optimizer.step()
        result.parameters.append([p.detach().clone() for p in model.parameters()])
    if way == "torchring":
        result.stats = optimizer.stats()
    return result


def _gradients(model: nn.Module) -> list[Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def _assert_ranks_agree(run: Trained) -> None:
    assert_same_everywhere([tensor for each in (run.parameters, run.gradients) for step in each for tensor in step])


def _assert_trained_alike(run: Trained, other: Trained) -> None:
    for what in ("gradients", "parameters"):
        for step, (mine, theirs) in enumerate(zip(getattr(run, what), getattr(other, what), strict=True)):
            for index, (actual, expected) in enumerate(zip(mine, theirs, strict=True)):
                assert_bitwise(actual, expected, f"{what} {index} of step {step}")


def _assert_means(run: Trained, num_roundings: int) -> None:
    """Gradients against the float64 mean of what each rank computed from the same parameters."""
    for gradients, local in zip(run.gradients, run.local, strict=True):
        for gradient, own in zip(gradients, local, strict=True):
            parts = torchring.all_gather(own.double()[None]) / torchring.size()
            assert_within_rounding(gradient, parts.sum(0), parts.abs().sum(0), num_roundings, own.dtype)


@ranks(2, run_ranks)
def test_two_ranks_train_bit_for_bit_as_under_ddp(rank: int) -> None:
    """torchring first: it takes part in a process group where there is one."""
    found = {}
    for name, case in _CASES.items():
        found[name] = _train(rank, 2, case, "torchring")
        torchring.shutdown()
    dist.init_process_group("gloo")
    for name, case in _CASES.items():
        print(name)  # the last one in the output is the one that failed
        _assert_ranks_agree(found[name])
        _assert_trained_alike(found[name], _train(rank, 2, case, "ddp"))
        for option in ("algorithm", "overlap"):
            if option in case.options:
                assert getattr(found[name].stats, option) == case.options[option]
    dist.barrier()


@pytest.mark.parametrize(
    "name", ["wide", "native", "direct on a thread", "hierarchical", "3 micro-steps, native", "fp64"]
)
@ranks(3)
def test_three_ranks_average_within_rounding(name: str, rank: int) -> None:
    """Two additions, one product with a factor 1/3 that is itself rounded: 4 roundings."""
    run = _train(rank, 3, _CASES[name], "torchring")
    _assert_ranks_agree(run)
    _assert_means(run, 4)


@ranks(2)
def test_these_comparisons_fail_without_a_reduction(rank: int) -> None:
    """The negative control: ranks have different data, so training alone must be told from training together."""
    run, alone = (_train(rank, 2, Case(), way) for way in ("torchring", "alone"))
    with pytest.raises(AssertionError, match="elements differ"):
        _assert_trained_alike(alone, run)
    with pytest.raises(AssertionError, match="rank 1 has"):
        _assert_ranks_agree(alone)
    with pytest.raises(AssertionError, match="roundings"):
        _assert_means(alone, 4)


@ranks(3)
def test_direct_does_not_depend_on_the_bucket_layout(rank: int) -> None:
    """It adds in rank order, so every element meets the same roundings wherever it lies."""
    digests = set()
    for bucket_mb, overlap in ((0, "inline"), (_LAYER_MB, "thread"), (25.0, "inline"), (25.0, "thread")):
        case = Case(options={"algorithm": "direct", "bucket_mb": bucket_mb, "overlap": overlap})
        digests.add(digest(_train(rank, 3, case, "torchring").parameters[-1]))
        torchring.shutdown()
    assert len(digests) == 1
