"""pack, unpack and accumulate (`kernels/reference.py`) against other ways to copy tensors and to add two buffers.

The gradients have the shapes of the models in `bench/models.py`; one more list has 2,000 tensors of 32 elements. As in
training, gradients are scaled while they are packed into a bf16 wire, but not while they are packed into an fp32 wire.
All rivals have to agree bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from pytest_benchmark.fixture import BenchmarkFixture
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from torchring.allreduce.slices import BLOCK_BYTES
from torchring.bench.models import MODELS
from torchring.kernels import reference

PERIOD = 251  # of the test values: below 256, so that bf16 is exact, and prime, so that a shift is noticed
WIRES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CLIPPED_NUMEL = 20_000  # largest tensor with --benchmark-disable
SCALE = 0.5


@dataclass(frozen=True)
class Load:
    """Gradients of some shapes, and a wire buffer that they fill without gaps.

    Attributes:
        name: title of the table.
        values: the right values of all gradients, one after the other, in fp32.
        grads: the gradients, in fp32.
        wire: the wire buffer, in the wire's dtype.
        views: the part of `wire` that belongs to each gradient, in the gradient's shape.
        scale: the factor of packing.
    """

    name: str
    shapes: list[torch.Size]
    values: Tensor
    grads: list[Tensor]
    wire: Tensor
    views: list[Tensor]
    scale: float

    def pieces(self, flat: Tensor) -> list[Tensor]:
        pieces = torch.split(flat, [shape.numel() for shape in self.shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=True)]


def load_of(name: str, shapes: list[torch.Size], wire: str) -> Load:
    dtype = WIRES[wire]
    total = sum(shape.numel() for shape in shapes)
    values = torch.arange(float(PERIOD)).repeat(math.ceil(total / PERIOD))[:total]
    scale = 1.0 if dtype == torch.float32 else SCALE
    load = Load(f"{wire} wire, {name}", shapes, values, [], torch.empty(total, dtype=dtype), [], scale)
    load.grads.extend(piece.clone() for piece in load.pieces(values))
    load.views.extend(load.pieces(load.wire))
    return load


def shapes_of(name: str) -> list[torch.Size]:
    if name == "tiny":
        return [torch.Size([32])] * 2000
    return [parameter.shape for parameter in MODELS[name]().model.parameters()]


@pytest.fixture(scope="module", params=["resnet", "gpt", "vgg", "tiny"])
def named_shapes(request: pytest.FixtureRequest) -> tuple[str, list[torch.Size]]:
    shapes = shapes_of(request.param)
    if request.config.getoption("benchmark_disable"):
        shapes = [shape if shape.numel() < CLIPPED_NUMEL else torch.Size([CLIPPED_NUMEL]) for shape in shapes]
    return request.param, shapes


@pytest.fixture(scope="module", params=list(WIRES))
def load(named_shapes: tuple[str, list[torch.Size]], request: pytest.FixtureRequest) -> Load:
    return load_of(*named_shapes, request.param)


def rivals(*functions: Callable[..., object]) -> pytest.MarkDecorator:
    """Run the benchmark for each function. Names each benchmark after its function: pack_loop -> "loop"."""
    return pytest.mark.parametrize("rival", functions, ids=[f.__name__.partition("_")[2] for f in functions])


# Gradients into the wire. Each rival returns the buffer that it has packed.


def pack_torchring(load: Load) -> Tensor:
    reference.pack(load.grads, load.views, scale=load.scale)
    return load.wire


def pack_foreach(load: Load) -> Tensor:
    grads = load.grads if load.scale == 1 else torch._foreach_mul(load.grads, load.scale)
    torch._foreach_copy_(load.views, grads)
    return load.wire


def pack_cat(load: Load) -> Tensor:
    flat = [grad.view(-1) for grad in load.grads]
    if load.scale == 1:
        return torch.cat(flat, out=load.wire)
    return load.wire.copy_(torch.cat(flat).mul_(load.scale))


def pack_flatten(load: Load) -> Tensor:
    flat: Tensor = _flatten_dense_tensors(load.grads)  # type: ignore[no-untyped-call]
    return flat if load.scale == 1 else load.wire.copy_(flat.mul_(load.scale))


@rivals(pack_torchring, pack_foreach, pack_cat, pack_flatten)
def bench_pack(benchmark: BenchmarkFixture, load: Load, rival: Callable[[Load], Tensor]) -> None:
    benchmark.group = f"pack: {load.name}"
    load.wire.fill_(-1)
    wire = benchmark(rival, load)
    assert wire.dtype == load.wire.dtype
    assert torch.equal(wire, (load.values * load.scale).to(wire.dtype))


# The wire back into gradients.


def unpack_torchring(load: Load) -> None:
    reference.unpack(load.views, load.grads)


def unpack_foreach(load: Load) -> None:
    torch._foreach_copy_(load.grads, load.views)


def unpack_split(load: Load) -> None:
    sizes = [grad.numel() for grad in load.grads]
    torch.split_with_sizes_copy(load.wire, sizes, out=[grad.view(-1) for grad in load.grads])


def unpack_unflatten(load: Load) -> None:
    pieces = _unflatten_dense_tensors(load.wire, load.grads)  # type: ignore[no-untyped-call]
    for grad, piece in zip(load.grads, pieces, strict=True):
        grad.copy_(piece)


@rivals(unpack_torchring, unpack_foreach, unpack_split, unpack_unflatten)
def bench_unpack(benchmark: BenchmarkFixture, load: Load, rival: Callable[[Load], None]) -> None:
    if rival is unpack_split and load.wire.dtype != torch.float32:
        pytest.skip("split_with_sizes_copy does not cast")
    benchmark.group = f"unpack: {load.name}"
    load.wire.copy_(load.values)
    torch._foreach_zero_(load.grads)
    benchmark(rival, load)
    for grad, right in zip(load.grads, load.pieces(load.values), strict=True):
        assert torch.equal(grad, right)


# Two ranks' wires summed and scaled.


@dataclass(frozen=True)
class Parts:
    """The wires of two ranks and a third wire for the mean: as a whole, cut into blocks, and cut into gradients."""

    whole: list[Tensor]
    scratch: Tensor
    blocks: list[tuple[Tensor, ...]]
    gradients: list[tuple[Tensor, ...]]


def accumulate_torchring(parts: Parts) -> None:
    """Accumulates in blocks that fit into the L2 cache, as `DirectAllReduce` does."""
    for first, second, out in parts.blocks:
        reference.accumulate([first, second], out, scale=SCALE, scratch=parts.scratch)


def accumulate_whole(parts: Parts) -> None:
    first, second, out = parts.whole
    reference.accumulate([first, second], out, scale=SCALE)


def accumulate_add(parts: Parts) -> None:
    _add(*parts.whole)


def accumulate_foreach(parts: Parts) -> None:
    firsts, seconds, outs = (list(tensors) for tensors in zip(*parts.gradients, strict=True))
    if outs[0].dtype == torch.float32:
        torch._foreach_copy_(outs, firsts)
        torch._foreach_add_(outs, seconds)
        torch._foreach_mul_(outs, SCALE)
    else:
        sums = torch._foreach_add([first.float() for first in firsts], seconds)
        torch._foreach_copy_(outs, torch._foreach_mul(sums, SCALE))


def _add(first: Tensor, second: Tensor, out: Tensor) -> None:
    if out.dtype == torch.float32:
        torch.add(first, second, out=out).mul_(SCALE)
    else:
        out.copy_(first.float().add_(second).mul_(SCALE))


@rivals(accumulate_torchring, accumulate_whole, accumulate_add, accumulate_foreach)
def bench_accumulate(benchmark: BenchmarkFixture, load: Load, rival: Callable[[Parts], None]) -> None:
    benchmark.group = f"accumulate: {load.name}"
    others = load.values.flip(0)
    whole = [load.values.to(load.wire.dtype), others.to(load.wire.dtype), load.wire.fill_(-1)]
    numel = BLOCK_BYTES // load.wire.element_size()
    parts = Parts(
        whole,
        torch.empty(numel),
        list(zip(*(torch.split(wire, numel) for wire in whole), strict=True)),
        list(zip(*(load.pieces(wire) for wire in whole), strict=True)),
    )
    benchmark(rival, parts)
    assert torch.equal(load.wire, ((load.values + others) * SCALE).to(load.wire.dtype))
