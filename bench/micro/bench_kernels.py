"""pack and accumulate (`kernels/reference.py`) against PyTorch's own calls.

The gradients have the shapes of the models in `bench/models.py`; one more list has 2,000 tensors of 32 elements. As in
training, gradients are scaled while they are packed into a bf16 wire, but not while they are packed into an fp32 wire.
All rivals have to agree bit for bit.
"""

import math
from dataclasses import dataclass

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor

from torchring.allreduce.slices import BLOCK_BYTES
from torchring.bench.models import MODELS
from torchring.kernels import reference

PERIOD = 251  # of the test values: below 256, so that bf16 is exact, and prime, so that a shift is noticed
WIRES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CLIPPED_NUMEL = 20_000  # largest tensor with --benchmark-disable
SCALE = 0.5
rivals = pytest.mark.parametrize("rival", ["torchring", "torch"])


@dataclass(frozen=True)
class Load:
    """Gradients of some shapes, and a wire buffer that they fill without gaps."""

    name: str  # title of the table
    shapes: list[torch.Size]
    values: Tensor  # the right values of all gradients, one after the other, in fp32
    grads: list[Tensor]  # in fp32
    wire: Tensor  # in the wire's dtype
    views: list[Tensor]  # the part of `wire` that belongs to each gradient, in the gradient's shape
    scale: float  # of packing

    def pieces(self, flat: Tensor) -> list[Tensor]:
        pieces = torch.split(flat, [shape.numel() for shape in self.shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]


@pytest.fixture(scope="module", params=["resnet", "gpt", "vgg", "tiny"])
def named_shapes(request: pytest.FixtureRequest) -> tuple[str, list[torch.Size]]:
    shapes = [torch.Size([32])] * 2000
    if request.param != "tiny":
        shapes = [parameter.shape for parameter in MODELS[request.param]().model.parameters()]
    if request.config.getoption("benchmark_disable"):
        shapes = [shape if shape.numel() < CLIPPED_NUMEL else torch.Size([CLIPPED_NUMEL]) for shape in shapes]
    return request.param, shapes


@pytest.fixture(scope="module", params=list(WIRES))
def load(named_shapes: tuple[str, list[torch.Size]], request: pytest.FixtureRequest) -> Load:
    name, shapes = named_shapes
    dtype = WIRES[request.param]
    total = sum(shape.numel() for shape in shapes)
    values = torch.arange(float(PERIOD)).repeat(math.ceil(total / PERIOD))[:total]
    scale = 1.0 if dtype == torch.float32 else SCALE
    load = Load(f"{request.param} wire, {name}", shapes, values, [], torch.empty(total, dtype=dtype), [], scale)
    load.grads.extend(piece.clone() for piece in load.pieces(values))
    load.views.extend(load.pieces(load.wire))
    return load


@rivals
def bench_pack(benchmark: BenchmarkFixture, load: Load, rival: str) -> None:
    benchmark.group = f"pack: {load.name}"
    load.wire.fill_(-1)

    def foreach() -> None:
        grads = load.grads if load.scale == 1 else torch._foreach_mul(load.grads, load.scale)
        torch._foreach_copy_(load.views, grads)

    if rival == "torch":
        benchmark(foreach)
    else:
        benchmark(reference.pack, load.grads, load.views, scale=load.scale)
    assert torch.equal(load.wire, (load.values * load.scale).to(load.wire.dtype))


@rivals
def bench_accumulate(benchmark: BenchmarkFixture, load: Load, rival: str) -> None:
    """Two ranks' wires summed: in blocks that fit into the L2 cache, as `DirectAllReduce` does; or whole."""
    benchmark.group = f"accumulate: {load.name}"
    others = load.values.flip(0)
    wires = [load.values.to(load.wire.dtype), others.to(load.wire.dtype), load.wire.fill_(-1)]
    numel = BLOCK_BYTES // load.wire.element_size()
    scratch = torch.empty(numel)
    blocks = list(zip(*(torch.split(wire, numel) for wire in wires), strict=True))

    def accumulate() -> None:
        for first, second, out in blocks:
            reference.Accumulation([first, second], out, scratch).run()

    def add() -> None:
        first, second, out = wires
        if out.dtype == torch.float32:
            torch.add(first, second, out=out)
        else:
            out.copy_(first.float().add_(second))

    benchmark(add if rival == "torch" else accumulate)
    assert torch.equal(load.wire, (load.values + others).to(load.wire.dtype))
