"""Groups of ranks train as jobs of their own do: over one dimension of a mesh, in pipelines, and beside each other."""

import contextlib
import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any, Final
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, schedules

import torchring
from tests.gradients.test_weights import skipping, weighted
from tests.optimizer import test_parity as parity
from tests.optimizer.test_semantics import CASES
from tests.support.harness import ranks, run_pooled, run_ranks
from tests.support.scripts import branches
from tests.support.training import Side, assert_alike, attempt, in_turn
from tests.test_joining import _train_unevenly

_PAIRS: Final = [[0, 2], [1, 3]]
_OF_OPTIMIZERS: Final = ("SAM, own", "GradScaler, clipped, inf on rank 1", "deepcopy")
_SCRIPTS: Final = {  # those that a group could break: with collectives, weights, ranks unlike each other, connections
    **CASES["several"],
    **{how: CASES["several backwards"][how] for how in ("synchronize", "accumulate, two are left")},
    **{name: CASES["optimizers"][name] for name in _OF_OPTIMIZERS},
    "alternating, native": (branches, "alternating", False, {"algorithm": "native"}),
    "an exception": CASES["the graph"]["an exception, late"],
    "clip": CASES["zeroing and clipping"]["clip"],
    "a closure": CASES["closures"]["lbfgs, a rank skips"],
    "sparse": CASES["sparse"]["step"],
    "weigh, in no_sync": (weighted, 3, "no_sync", 1, {"algorithm": "native"}),
    "skip": (skipping, True, {}),
    "join": (_train_unevenly, (2, 5), 2, False, {}),
}


class _GroupSide(Side):
    def wrap(self, optimizer: torch.optim.Optimizer, model: nn.Module | None = None, **options: Any) -> Any:
        return super().wrap(optimizer, model, group=_PAIRS, **options)


def _in_groups(rank: int, world_size: int) -> dict[str, Sequence[Any]]:
    """Each group is a job of its own. Others run the scripts in the opposite order, at the same time."""
    names = ("size", "all_gather", "all_reduce", "reduce_scatter", "all_to_all", "broadcast_object")
    of_group = {name: partial(getattr(torchring, name), group=_PAIRS) for name in names}
    with mock.patch.multiple(torchring, **of_group):
        return in_turn(rank // 2, 2, dict([*_SCRIPTS.items()][:: -1 if rank % 2 else 1]), _GroupSide)


def test_groups_train_as_jobs_of_their_own(subtests: pytest.Subtests) -> None:
    per_rank = run_pooled(_in_groups, 4, deadline=120)
    for name, (script, *args) in _SCRIPTS.items():
        with subtests.test(name):
            expected = script(Side((0, 1), False), *args)
            assert_alike([results[name] for results in per_rank], expected, 1e-7 if name == "a closure" else 1e-10)


@ranks(4, run_ranks)
def test_bits_are_those_of_ddp_in_a_group(rank: int) -> None:
    dist.init_process_group("gloo")
    group = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))["dp"].get_group()
    for name in ("adamw", "native", "3 micro-steps"):
        case = parity._CASES[name]
        case = dataclasses.replace(case, options={**case.options, "group": group})
        # Other data in each group, and there on each rank.
        found, right, alone = (parity._train(rank, 2, case, way) for way in ("torchring", "ddp", "alone"))
        parity._assert_trained_alike(found, right)
        with pytest.raises(AssertionError, match="elements differ"):
            parity._assert_trained_alike(alone, right)
    torchring.shutdown()
    dist.barrier()
    dist.destroy_process_group()


# Pipelines

_MICRO_BATCHES: Final = 4
_STEPS: Final = 3
_ZERO_BUBBLE: Final = ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")


def _parts(count: int) -> nn.ModuleList:
    torch.manual_seed(3)
    return nn.ModuleList(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).double() for _ in range(count))


def _clip(parts: nn.ModuleList) -> None:
    for part in parts:
        nn.utils.clip_grad_norm_(part.parameters(), 0.05)


def _batch(replica: int, step: int) -> tuple[Tensor, Tensor]:
    draw = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(10 * step + replica), dtype=torch.float64)
    return draw[0], draw[1]


class _Pipeline:
    """The stages of this rank, in a mesh of 2 stages by 2 replicas."""

    def __init__(self, mesh: DeviceMesh, name: str) -> None:
        is_single = name in ("GPipe", "1F1B")
        self.count = 2 if is_single else 4
        rank, self.replica = (mesh[dimension].get_local_rank() for dimension in ("pp", "dp"))
        others = [] if is_single else [rank + 2 if name not in ("ZBVZeroBubble", "DualPipeV") else 3 - rank]
        self.mine = [rank, *others]
        self.all = _parts(self.count)
        self.model = nn.ModuleList(self.all[i] for i in self.mine)
        stages = [
            PipelineStage(self.all[i], i, self.count, torch.device("cpu"), group=mesh["pp"].get_group())
            for i in self.mine
        ]
        kind: Any = getattr(schedules, f"Schedule{name}")
        self._schedule = kind(stages[0] if is_single else stages, _MICRO_BATCHES, loss_fn=nn.functional.mse_loss)

    def backward(self, step: int) -> None:
        inputs, targets = _batch(self.replica, step)
        is_last = self.count - 1 in self.mine
        self._schedule.step(*[inputs] * (0 in self.mine), **{"target": targets} if is_last else {})

    def error(self, skips: Sequence[tuple[int, int]] = ()) -> float:
        """How far the parameters are from those of one process. skips: (step, replica)."""
        right = _parts(self.count)
        optimizer = torch.optim.SGD(right.parameters(), lr=0.1, momentum=0.9)
        for step in range(_STEPS):
            optimizer.zero_grad()
            present = [replica for replica in range(2) if (step, replica) not in skips]
            for hidden, target in (_batch(replica, step) for replica in present):
                for part in right:
                    hidden = part(hidden)
                (nn.functional.mse_loss(hidden, target) / len(present)).backward()
            _clip(right)
            optimizer.step()
        pairs = zip(self.model.parameters(), (p for i in self.mine for p in right[i].parameters()), strict=True)
        return max(float((p - q).detach().abs().max()) for p, q in pairs)


@ranks(4, run_ranks, deadline=240)
def test_pipelines_reduce_once_a_step(rank: int) -> None:
    """With the last micro-batch, where backward() runs for each; or in synchronize(), whatever the schedule runs."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    group = mesh["dp"]

    def wrap(model: nn.Module, accumulate: int) -> Any:
        return torchring.wrap(
            torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), model, group=group, accumulate=accumulate
        )

    for name in ("GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B", *_ZERO_BUBBLE):
        for how in ("synchronize", "accumulate", "an optimizer a stage"):
            if how != "synchronize" and name in _ZERO_BUBBLE:
                continue
            print(name, how)  # the last one in the output is the one that failed
            pipeline = _Pipeline(mesh, name)
            num_backwards = _MICRO_BATCHES * len(pipeline.mine)
            if how == "an optimizer a stage":
                optimizers = [wrap(part, _MICRO_BATCHES) for part in pipeline.model]
            else:
                optimizers = [wrap(pipeline.model, num_backwards if how == "accumulate" else 1)]
            skips = [(1, 1)] if how == "synchronize" else []
            for step in range(_STEPS):
                with contextlib.ExitStack() as stack:
                    for optimizer in optimizers:
                        optimizer.zero_grad()
                        if how == "synchronize":
                            stack.enter_context(optimizer.no_sync())
                    if (step, pipeline.replica) in skips:
                        optimizers[0].skip()
                    else:
                        pipeline.backward(step)
                if how == "synchronize":
                    optimizers[0].synchronize()
                _clip(pipeline.model)
                for optimizer in optimizers:
                    optimizer.step()
            assert pipeline.error(skips) <= 1e-10
            assert [it.stats().num_reductions for it in optimizers] == [_STEPS] * len(optimizers)
            for optimizer in optimizers:
                optimizer.close()

    # What these schedules add to gradients past backward() is missed, in the next step at the latest.
    for name in _ZERO_BUBBLE:
        print(name)
        pipeline = _Pipeline(mesh, name)
        optimizer = wrap(pipeline.model, 1)
        pipeline.backward(0)
        problem = attempt(optimizer.step)
        if not problem:
            optimizer.zero_grad()
            torch.stack([p.sum() for p in pipeline.model.parameters()]).sum().backward()
            problem = attempt(optimizer.step)
        is_right_by_chance = name == "DualPipeV" and rank < 2
        assert is_right_by_chance or "all optimizer.synchronize() before step()" in problem, problem
        optimizer.close()
    torchring.shutdown()
    dist.barrier()
    dist.destroy_process_group()


class _Experts(nn.Module):
    """Ranks 0 and 2 train expert 0, ranks 1 and 3 train expert 1; all train the rest."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.dense, self.out, self.spare = nn.Linear(4, 5), nn.Linear(5, 2), nn.Linear(4, 5)
        self.experts = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.double()

    def loss(self, rank: int, at: int) -> Tensor:
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(10 * at + rank), dtype=torch.float64)
        hidden = self.dense(x) + (self.spare(x) if rank == 3 and at % 2 else 0)
        if at != 4 and (rank, at) != (2, 3):  # no token comes here: on any rank, or on this one
            hidden = hidden + self.experts[rank % 2](hidden)
        return self.out(hidden).square().mean()


def _train_experts(
    rank: int | None, micros: int = 1, weighs: bool = False, skips: bool = False, silent: bool = False, **options: Any
) -> list[Tensor]:
    """On a rank; None: in one process. The dense part, and the expert of this rank, or both."""
    model = _Experts()
    experts = [list(expert.parameters()) for expert in model.experts]
    dense = [p for p in model.parameters() if all(p is not q for q in [*experts[0], *experts[1]])]
    parts = [dense, *(experts if rank is None else [experts[rank % 2]])]
    optimizers: list[Any] = [torch.optim.SGD(part, lr=0.1, momentum=0.9) for part in parts]
    if rank is not None:
        how: dict[str, Any] = {"bucket_mb": 1e-4, "accumulate": 1 if silent else micros}
        model_of_rank = nn.ModuleList([model.dense, model.out, model.spare, model.experts[rank % 2]])
        optimizers[1] = torchring.wrap(optimizers[1], model_of_rank, group=_PAIRS, **how)
        optimizers[0] = torchring.wrap(optimizers[0], model_of_rank, **how, **options)
    for step in range(6):
        for optimizer in optimizers:
            optimizer.zero_grad()
        if rank is None:
            _reduce(model, parts, step, micros, weighs, skips)
        for micro in range(micros if rank is not None else 0):
            if skips and (step, rank) in ((5, 1), (4, 0)):
                optimizers[0].skip()
                continue
            with contextlib.ExitStack() as stack:
                for optimizer in optimizers:
                    if weighs:
                        optimizer.weigh(rank + micro + 1)
                    if silent and micro + 1 < micros:
                        stack.enter_context(optimizer.no_sync())
                model.loss(rank, step + 6 * micro).backward()
        for part, optimizer in zip(parts, optimizers, strict=True):
            nn.utils.clip_grad_norm_(part, 0.1)
            optimizer.step()
    return [p.detach().clone() for part in parts for p in part]


def _reduce(
    model: _Experts, parts: list[list[nn.Parameter]], step: int, micros: int, weighs: bool, skips: bool
) -> None:
    for number, part in enumerate(parts):
        total, losses = 0.0, []
        for rank in range(4) if number == 0 else _PAIRS[number - 1]:
            if not (skips and (step, rank) in ((5, 1), (4, 0))):
                weights = [rank + micro + 1 if weighs else 1 for micro in range(micros)]
                losses += [model.loss(rank, step + 6 * micro) * weight for micro, weight in enumerate(weights)]
                total += sum(weights) if weighs else 1
        gradients = torch.autograd.grad(torch.stack(losses).sum() / total, part, allow_unused=True)
        for p, gradient in zip(part, gradients, strict=True):
            p.grad = gradient


@ranks(4)
def test_experts_train_over_a_group_and_the_rest_over_all_ranks(rank: int) -> None:
    cases: list[dict[str, Any]] = [
        {},
        {"micros": 2, "weighs": True, "silent": True},
        {"skips": True, "micros": 2, "weighs": True},
        {"shard": True},
        {"algorithm": "native", "skips": True},
    ]
    for case in cases:
        print(case)  # the last one in the output is the one that failed
        found = _train_experts(rank, **case)
        right = _train_experts(
            None, **{name: value for name, value in case.items() if name not in ("shard", "algorithm")}
        )
        del right[len(found) - 2 + 2 * (1 - rank % 2) : len(found) + 2 * (1 - rank % 2)]
        for actual, expected in zip(found, right, strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
        torchring.shutdown()
