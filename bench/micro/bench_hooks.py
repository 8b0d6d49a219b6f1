"""The time that hooks add to a backward: 802 tensors of at most 16 KiB, one rank, and an all-reduce that does nothing.

Rivals: no hooks; torchring's hooks, which count, pack, and set `.grad` to views of the wire. The gradients are passed
to autograd, so that backward does little except run hooks.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture

from torchring.allreduce import Wire
from torchring.bench.models import small
from torchring.errors import RingError
from torchring.gradients import layout
from torchring.gradients.contract import Setup
from torchring.gradients.group import OptimizerGroup
from torchring.gradients.reducer import Reducer
from torchring.rooms import participants
from torchring.world import World

ROUNDS = 60
HOOKS = ["none", "torchring"]


@dataclass
class NoOpWire:
    tensor: torch.Tensor


class NoOpReduction:
    """The all-reduce of a bucket that has nothing to do."""

    span = None

    def advance(self, *, waits: bool = False) -> bool:
        return True

    def wait(self) -> None: ...


class NoOpAllReduce:
    """An all-reduce that leaves its buffers as they are, which is right for a world of one rank."""

    algorithm = "none"
    in_background = False

    def __init__(self) -> None:
        self.wires: list[NoOpWire] = []
        self.num_calls = 0

    def open_wires(self, specs: Sequence[tuple[int, torch.dtype]]) -> Sequence[Wire]:
        self.wires = [NoOpWire(torch.zeros(numel, dtype=dtype)) for numel, dtype in specs]
        return self.wires

    def start(self, wire: Wire) -> NoOpReduction:
        self.num_calls += 1
        return NoOpReduction()

    def fail(self, error: RingError) -> None: ...

    def close(self) -> None: ...


class Owner:
    """Stands in for the optimizer, to which hooks keep a weak reference."""


@contextmanager
def hooked(model: torch.nn.Module, all_reduce: NoOpAllReduce) -> Iterator[Reducer]:
    """Register torchring's hooks on all parameters, as `wrap` does."""
    world, owner = World(None, 0, 1), Owner()
    names = {parameter: name for name, parameter in model.named_parameters()}
    sgd = torch.optim.SGD(names, lr=0.1)
    options = layout.Options("mean", None, 25.0, 1, "direct", "inline")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layout, "open_all_reduce", lambda *_: all_reduce)
        group = world.shared(OptimizerGroup)
        setup = Setup(world, sgd, None, names, set(), set(), options, None, False)
        reducer = Reducer(setup, group, participants(setup), owner=owner)
    try:
        yield reducer
    finally:
        world.close()


def lies_in(gradient: torch.Tensor, wire: torch.Tensor) -> bool:
    start = wire.data_ptr()
    return start <= gradient.data_ptr() < start + wire.nbytes


@pytest.mark.parametrize("hooks", HOOKS)
@pytest.mark.benchmark(group="backward of 802 given gradients", disable_gc=True)
def bench_gradients(benchmark: BenchmarkFixture, hooks: str) -> None:
    """Checks that gradients are those of a backward without hooks."""
    model = small().model
    parameters = list(model.parameters())
    gradients = [torch.full_like(parameter, i) for i, parameter in enumerate(parameters)]
    expected = [gradient.clone() for gradient in gradients]
    all_reduce = NoOpAllReduce()

    def backward() -> None:
        torch.autograd.backward(parameters, gradients)

    with hooked(model, all_reduce) if hooks == "torchring" else nullcontext():
        for _ in range(2):  # the first round ends with a new plan
            model.zero_grad()
            backward()
        before = all_reduce.num_calls
        rounds = ROUNDS if benchmark.enabled else 1
        benchmark.pedantic(backward, setup=model.zero_grad, rounds=rounds)
        if hooks == "torchring":
            assert all_reduce.num_calls - before == rounds * len(all_reduce.wires)
            for parameter in parameters:
                assert parameter.grad is not None
                assert any(lies_in(parameter.grad, wire.tensor) for wire in all_reduce.wires)
    for parameter, right in zip(parameters, expected, strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, right)
