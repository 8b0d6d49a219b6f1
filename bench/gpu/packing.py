"""Packing and unpacking as a share of the rate of a copy, which reads and writes as many bytes."""

from collections.abc import Callable
from functools import partial
from typing import Final

import torch

from torchring.bench.gpu.timing import gpu_seconds, shares
from torchring.bench.models import gpt2
from torchring.kernels import reference
from torchring.kernels.chunks import ChunkTable, layout
from torchring.kernels.pack import NOT_FOUND, prepare_pack, prepare_unpack

_POISON: Final = 12288.0  # exact in every dtype here, and rare in random data
_SCALE: Final = 1 / 3


def shapes_of(load: str) -> list[torch.Size]:
    """The shapes of GPT-2's parameters ("gpt2"), or 2,000 of 1,000 elements ("tiny")."""
    if load == "tiny":
        return [torch.Size([1000])] * 2000
    with torch.device("meta"):
        return [parameter.shape for parameter in gpt2().model.parameters()]


def share_of_a_copy(op: str, shapes: list[torch.Size], source: torch.dtype, target: torch.dtype) -> float:
    """`op` of random gradients: "pack", which looks for NaN and infinity as in training, or "unpack".

    Before its turns and after them, the result is overwritten, made anew, and compared with a reference, bit for bit.
    """
    grad_dtype, wire_dtype = (source, target) if op == "pack" else (target, source)
    grads = [torch.randn(shape, device="cuda").to(grad_dtype) for shape in shapes]
    offsets, end = [], 0
    for grad in grads:  # each at a multiple of 64 bytes
        offsets.append(end)
        end += -(-grad.numel() * wire_dtype.itemsize // 64) * 64 // wire_dtype.itemsize
    wire = torch.randn(end, device="cuda").to(wire_dtype)
    layouts = [layout(grad) for grad in grads]
    table = ChunkTable([grad.numel() for grad in grads], offsets, device=wire.device, layouts=layouts)
    views = [wire.as_strided(grad.size(), grad.stride(), start) for grad, start in zip(grads, offsets, strict=True)]
    outputs = views if op == "pack" else grads
    expected = [torch.empty_like(output) for output in outputs]
    if op == "pack":
        reference.pack(grads, expected, scale=_SCALE)
        found = torch.full((2,), NOT_FOUND, dtype=torch.int32, device="cuda")
        run = partial(prepare_pack(wire, table, grad_dtype, scale=_SCALE, found=found, num_ranks=8), grads)
    else:
        reference.unpack(views, expected)
        run = partial(prepare_unpack(wire, table, grad_dtype), grads)

    def check() -> None:
        for output in outputs:
            output.fill_(_POISON)
        run()
        if not all(map(torch.equal, outputs, expected)):
            raise RuntimeError(f"{op} differs from the reference")

    num_bytes = sum(grad.numel() for grad in grads) * (source.itemsize + target.itemsize) // 2
    original = torch.randint(0, 200, (num_bytes,), dtype=torch.uint8, device="cuda")
    copy = torch.empty_like(original)
    works: dict[str, Callable[[], object]] = {"copy": partial(copy.copy_, original), op: run}
    check()
    times = gpu_seconds(works, lead=2e-3 + 1e-5 * len(shapes))  # as the host looks at each tensor
    check()
    return shares(times, "copy")[op]
