"""Random trainings as plain data: run on ranks under torchring, and in one process without torchring, then compared.

The one process computes in fp64 what the documentation promises: per rank and micro-step a gradient of its own, by
torch.autograd.grad, and from these the sum, mean or weighted mean. `soak.py` draws the cases.
"""

from __future__ import annotations

import contextlib
import unittest.mock
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import torchring
from tests.support.checks import assert_same_on_all_ranks, digest
from tests.support.harness import run_pooled
from torchring.memory import host as host_module

WIDTH = 4
NUM_STEPS = 3
_DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
_ROUNDING = {"fp64": 1e-9, "fp32": 1e-3, "bf16": 0.25}  # of three steps
_ROUNDING_OF_WIRE = {None: 0.0, "fp16": 1e-2, "bf16": 6e-2}


# The description of a training


@dataclass(frozen=True)
class Part:
    """One layer.

    kind: see `_layer`. "again" is the layer at index `of` once more; "tied" has the weight of that layer.
    owner: index of the optimizer that trains the layer.
    is_frozen: in each step.
    absent: where the layer is left out, as (rank, step, micro-step).
    """

    kind: str
    owner: int = 0
    dtype: str = "fp64"
    of: int = 0
    is_frozen: tuple[bool, ...] = (False,) * NUM_STEPS
    absent: frozenset[tuple[int, int, int]] = frozenset()


@dataclass(frozen=True)
class Step:
    """One step of the optimizers.

    samples: batch sizes, by micro-step and rank.
    how: "each" micro-step runs outside no_sync(), all but the last run "inside", or all, which are then "collected". Or
        no backward runs: torch.autograd.grad gives the gradients, which are put into `.grad` "by hand".
    zero: gradients are set to "none" or "zeros" before the step, to none by the "model", or "kept" from the last step.
    skips: ranks that call skip(), by micro-step.
    is_one_graph: the micro-steps are backwards of several losses on one graph.
    clips: gradients are clipped to a norm of 0.1.
    poison: the rank whose first loss is NaN.
    """

    samples: tuple[tuple[int, ...], ...]
    how: str = "each"
    zero: str = "none"
    skips: tuple[frozenset[int], ...] = (frozenset(),) * 3
    is_one_graph: bool = False
    clips: bool = False
    poison: int | None = None

    @property
    def num_micros(self) -> int:
        return len(self.samples)


@dataclass(frozen=True)
class Case:
    """One training.

    parts: the layers. There is one "scale" for each optimizer at the front. Where that one is absent, the last
        backward of a step may not reach the optimizer, and gradients of earlier ones may be left.
    optimizers: a kind for each.
    unit: the weight of a sample; None if the losses have no weights.
    starts_differ: every rank starts with parameters of its own, and wrap() copies those of rank 0.
    options: of wrap().
    """

    seed: int
    parts: tuple[Part, ...]
    optimizers: tuple[str, ...]
    steps: tuple[Step, ...]
    unit: float | None = None
    starts_differ: bool = False
    options: tuple[tuple[str, Any], ...] = ()

    def option(self, name: str, default: Any = None) -> Any:
        return dict(self.options).get(name, default)

    @property
    def accumulate(self) -> int:
        return int(self.option("accumulate", 1))

    def windows(self, step: Step) -> list[list[int]]:
        """The micro-steps of a step that are reduced together."""
        micros = list(range(step.num_micros))
        if step.how != "each":
            return [micros]
        return [micros[begin : begin + self.accumulate] for begin in range(0, len(micros), self.accumulate)]

    def is_left_over(self, step: Step) -> bool:
        """Whether gradients stay local after the last backward."""
        if step.how == "each":
            return step.num_micros % self.accumulate > 0
        return step.how in ("collected", "by hand") or self.accumulate > 1

    @property
    def tolerance(self) -> float:
        wire = self.option("compression")
        return max(_ROUNDING_OF_WIRE[wire], *(_ROUNDING[part.dtype] for part in self.parts))


@dataclass(frozen=True)
class Batch:
    """Trainings that the same ranks run one after the other. hosts: the host that each rank believes to be on."""

    hosts: tuple[int, ...]
    cases: tuple[Case, ...]


def features(batch: Batch, case: Case) -> set[str]:
    """What is special about a case, for counting."""
    found = {f"{len(batch.hosts)} ranks"} | {part.kind for part in case.parts} | {part.dtype for part in case.parts}
    found |= {f"{name}={value}" for name, value in case.options if name != "bucket_mb"}
    found |= {f"zero {step.zero}" for step in case.steps} | {step.how for step in case.steps}
    num_ranks = len(batch.hosts)
    special = {
        "several hosts": len(set(batch.hosts)) > 1,
        "several optimizers": len(case.optimizers) > 1,
        "weights": case.unit is not None,
        "starts differ": case.starts_differ,
        "frozen": any(part.is_frozen[0] for part in case.parts),
        "thaws": any(part.is_frozen[0] and not all(part.is_frozen) for part in case.parts),
        "absent": any(rank < num_ranks for part in case.parts for rank, _, _ in part.absent),
        "empty batch": any(0 in sizes for step in case.steps for sizes in step.samples),
        "several backwards": any(step.num_micros > 1 for step in case.steps),
        "skip()": any(any(step.skips[: step.num_micros]) for step in case.steps),
        "one graph": any(step.is_one_graph and step.num_micros > 1 for step in case.steps),
        "clipped": any(step.clips for step in case.steps),
        "NaN": any(step.poison is not None for step in case.steps),
        "synchronize()": any(case.is_left_over(step) for step in case.steps),
        **{f"optimizer {kind}": kind in case.optimizers for kind in ("sgd", "momentum", "adam")},
    }
    return found | {name for name, is_there in special.items() if is_there}


# The model


class _Scale(nn.Module):
    def __init__(self, shape: Sequence[int], dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape, dtype=dtype))

    def forward(self, h: Tensor) -> Tensor:
        weight = self.weight.abs().sum().to(h.dtype) if self.weight.is_complex() else self.weight
        return h * weight


class _Empty(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.empty(0)), nn.Parameter(torch.empty(3, 0))

    def forward(self, h: Tensor) -> Tensor:
        return h + self.first.sum() + self.second.sum()


class _Unused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))

    def forward(self, h: Tensor) -> Tensor:
        return h


class _Conv2d(nn.Conv2d):
    """On images of 2 x 2 pixels, with weights in channels_last."""

    def __init__(self) -> None:
        super().__init__(3, WIDTH, 2)
        self.to(memory_format=torch.channels_last)

    def forward(self, h: Tensor) -> Tensor:
        return super().forward(h.reshape(-1, 1, 2, 2).repeat(1, 3, 1, 1)).flatten(1)


class _Conv1d(nn.Conv1d):
    def __init__(self) -> None:
        super().__init__(1, 2, 3, padding=1, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        return super().forward(h.unsqueeze(1)).mean(1)


LAYERS = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "no bias": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    "wide": lambda: nn.Sequential(nn.Linear(WIDTH, 10_000), nn.Tanh(), nn.Linear(10_000, WIDTH)),  # copied on arrival
    "scale": lambda: _Scale((WIDTH,)),
    "0-dim": lambda: _Scale(()),
    "empty": _Empty,
    "unused": _Unused,
    "complex": lambda: _Scale((2,), torch.complex128),
    "words": lambda: nn.Embedding(7, WIDTH),
    "sparse": lambda: nn.Embedding(7, WIDTH, sparse=True),
    "norm": lambda: nn.LayerNorm(WIDTH),
    "conv1d": _Conv1d,
    "conv2d": _Conv2d,
    "tied": lambda: nn.Linear(WIDTH, WIDTH),
}


class Model(nn.Module):
    """The layers of a case. `in_fp64`: with the values of the case's dtypes, but to compute with in fp64."""

    def __init__(self, case: Case, seed: int, *, in_fp64: bool) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.parts = case.parts
        layers: list[nn.Module] = []
        for part in case.parts:
            if part.kind == "again":
                layers.append(layers[part.of])
                continue
            layer = LAYERS["words" if in_fp64 and part.kind == "sparse" else part.kind]().double()
            tied_to = layers[part.of] if part.kind == "tied" else None
            dtype = _DTYPES[part.dtype]
            if isinstance(tied_to, nn.Linear) and isinstance(layer, nn.Linear):
                layer.weight, dtype = tied_to.weight, tied_to.weight.dtype
            for parameter in layer.parameters():
                if parameter.is_complex():
                    narrow = torch.complex128 if dtype == torch.float64 else torch.complex64
                    parameter.data = parameter.data.to(narrow)
                else:
                    parameter.data = parameter.data.to(dtype)
                if in_fp64:
                    parameter.data = parameter.data.to(torch.complex128 if parameter.is_complex() else torch.float64)
            layers.append(layer)
        self.layers = nn.ModuleList(layers)
        self._in_fp64 = in_fp64

    def own(self, index: int) -> list[nn.Parameter]:
        """The parameters that a layer has and that no earlier layer has."""
        earlier = {parameter for layer in list(self.layers)[:index] for parameter in layer.parameters()}
        return [parameter for parameter in self.layers[index].parameters() if parameter not in earlier]

    def freeze(self, step: int) -> None:
        for i, part in enumerate(self.parts):
            for parameter in self.own(i):
                parameter.requires_grad_(not part.is_frozen[step])

    def loss(self, place: tuple[int, int, int], x: Tensor, words: Tensor) -> Tensor:
        """The mean over the samples; NaN if there are none."""
        h = x
        for part, layer in zip(self.parts, self.layers, strict=True):
            if place in part.absent:
                continue
            dtype = next(layer.parameters()).dtype
            if not dtype.is_floating_point:
                dtype = torch.float64
            found = layer(words) if isinstance(layer, nn.Embedding) else layer(h.to(dtype))
            h = torch.tanh(h + found.to(h.dtype))
        return (h - x.flip(1)).square().mean()


def _optimizers(case: Case, model: Model) -> list[torch.optim.Optimizer]:
    found: list[torch.optim.Optimizer] = []
    for owner, kind in enumerate(case.optimizers):
        mine = [p for i, part in enumerate(case.parts) if part.owner == owner for p in model.own(i)]
        if kind == "adam":  # a small eps would make steps of rounding errors
            found.append(torch.optim.Adam(mine, lr=0.05, eps=1e-2))
        else:
            found.append(torch.optim.SGD(mine, lr=0.05, momentum=0.9 if kind == "momentum" else 0.0))
    return found


def _loss(case: Case, model: Model, rank: int, step: int, micro: int) -> Tensor:
    """Of one rank's batch; the micro-steps of one graph share their batch and the layers that they use."""
    of = case.steps[step]
    at = 0 if of.is_one_graph else micro
    generator = torch.Generator().manual_seed(case.seed + 1000 * rank + 100 * step + at)
    n = of.samples[at][rank]
    x = torch.randn(n, WIDTH, generator=generator, dtype=torch.float64)
    words = torch.randint(7, (n,), generator=generator)
    return model.loss((rank, step, at), x, words)


def _factor(of: Step, rank: int, micro: int) -> float:
    return float("nan") if of.poison == rank and micro == 0 else (micro + 2) / 3


def _weight(case: Case, of: Step, rank: int, micro: int) -> float:
    assert case.unit is not None
    return case.unit * of.samples[0 if of.is_one_graph else micro][rank]


def _zero(how: str, model: Model, optimizers: Sequence[Any]) -> None:
    if how == "model":
        model.zero_grad()
    elif how != "kept":
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=how == "none")


# Under torchring


def _put_gradients(loss: Tensor, model: Model) -> None:
    """What backward does, past its hooks."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    grads = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
    for parameter, grad in zip(parameters, grads, strict=True):
        if grad is not None:
            parameter.grad = grad if parameter.grad is None else parameter.grad + grad


def _train(rank: int, case: Case) -> list[list[Tensor]]:
    """The parameters after each step."""
    model = Model(case, case.seed + (rank if case.starts_differ else 0), in_fp64=False)
    model.freeze(0)
    optimizers = [torchring.wrap(inner, model, **dict(case.options)) for inner in _optimizers(case, model)]
    seen = []
    for s, of in enumerate(case.steps):
        model.freeze(s)
        _zero(of.zero, model, optimizers)
        graph = _loss(case, model, rank, s, 0) if of.is_one_graph else None
        for micro in range(of.num_micros):
            is_last = micro + 1 == of.num_micros
            with contextlib.ExitStack() as inside:
                if of.how == "collected" or (of.how == "inside" and not is_last):
                    for optimizer in optimizers:
                        inside.enter_context(optimizer.no_sync())
                if rank in of.skips[micro]:
                    optimizers[0].skip()
                    continue
                if case.unit is not None:
                    for optimizer in optimizers:
                        optimizer.weigh(_weight(case, of, rank, micro))
                loss = graph if graph is not None else _loss(case, model, rank, s, micro)
                loss = loss * _factor(of, rank, micro)
                if of.how == "by hand":
                    _put_gradients(loss, model)
                else:
                    loss.backward(retain_graph=graph is not None and not is_last)
        if case.is_left_over(of) or any(part.absent for part in case.parts[: len(optimizers)]):
            for optimizer in optimizers:
                optimizer.synchronize()
        if of.clips:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        for optimizer in optimizers:
            optimizer.step()
        seen.append([parameter.detach().clone() for parameter in model.parameters()])
    for optimizer in optimizers:
        optimizer.close()
    return seen


def _train_all(rank: int, size: int, batch: Batch) -> list[Any]:
    """For each case, what the parameters are after each step on rank 0, and their digests on the others."""
    host = unittest.mock.patch.object(host_module, "_host_identity", return_value=f"host {batch.hosts[rank]}")
    with host:
        torchring.init(timeout_seconds=60)
        found = [_train(rank, case) for case in batch.cases]
        torchring.shutdown()
    digests = [[digest(values) for values in steps] for steps in found]
    return [digests, found if rank == 0 else None]


# In one process


def _train_alone(case: Case, num_ranks: int) -> Iterator[list[Tensor]]:
    """The parameters after each step."""
    model = Model(case, case.seed, in_fp64=True)
    optimizers = _optimizers(case, model)
    for s, of in enumerate(case.steps):
        model.freeze(s)
        _zero(of.zero, model, optimizers)
        for window in case.windows(of):
            _add_gradients(case, model, s, window, num_ranks)
        if of.clips:
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        for optimizer in optimizers:
            grads = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            if all(bool(grad.isfinite().all()) for grad in grads):
                optimizer.step()
        yield [parameter.detach().clone() for parameter in model.parameters()]


def _add_gradients(case: Case, model: Model, step: int, window: Sequence[int], num_ranks: int) -> None:
    """Add to each `.grad` what a reduction of these micro-steps gives."""
    of = case.steps[step]
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    sums: list[Tensor | None] = [None] * len(parameters)
    total_weight = 0.0
    present = set()
    for rank in range(num_ranks):
        for micro in window:
            if rank in of.skips[micro]:
                continue
            present.add(rank)
            loss = _loss(case, model, rank, step, micro) * _factor(of, rank, micro)
            weight = 1.0 if case.unit is None else _weight(case, of, rank, micro)
            total_weight += weight
            for i, grad in enumerate(torch.autograd.grad(loss, parameters, allow_unused=True)):
                if grad is not None:
                    part = grad * weight if weight else torch.zeros_like(grad)
                    before = sums[i]
                    sums[i] = part if before is None else before + part
    divisor = total_weight or 1.0
    if case.unit is None:
        divisor = 1.0 if case.option("op") == "sum" else float(len(present))
    for parameter, total in zip(parameters, sums, strict=True):
        if total is not None:
            grad = total / divisor
            parameter.grad = grad if parameter.grad is None else parameter.grad + grad


# The comparison


def check(batch: Batch, counts: Counter[str] | None = None) -> None:
    """Run all cases of the batch on ranks, and compare them with one process. Raises AssertionError."""
    num_ranks = len(batch.hosts)
    torch.set_num_threads(1)  # models are tiny, and threads would only wait for cores
    results = run_pooled(_train_all, num_ranks, batch, deadline=120)
    for i, case in enumerate(batch.cases):
        for s, expected in enumerate(_train_alone(case, num_ranks)):
            assert_same_on_all_ranks([digests[i][s] for digests, _ in results])
            _assert_close(results[0][1][i][s], expected, case.tolerance, f"case {i}, step {s}")
        if counts is not None:
            counts.update(features(batch, case))
            counts["cases"] += 1


def _assert_close(found: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float, where: str) -> None:
    for i, (mine, right) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(
            mine.to(right.dtype),
            right,
            rtol=tolerance,
            atol=tolerance,
            msg=lambda text, i=i: f"{where}, parameter {i}: {text}",
        )
