"""A section of `torchring bench gpu`: the kernels' share of the rate of a copy.

Gradients are random. Before its turns and after them, the outputs of a rival are overwritten, made anew, and compared
with a reference, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import Tensor

from torchring.bench.gpu.timing import Case, Row, gpu_seconds, shares, spreads
from torchring.bench.models import Workload, gpt2, resnet
from torchring.kernels import reference
from torchring.kernels.chunks import ChunkTable, layout
from torchring.kernels.pack import NOT_FOUND, prepare_pack, prepare_unpack

Shapes = list[torch.Size]

POISON: Final = 12288.0  # exact in every dtype here, and rare in random data
SCALE: Final = 1 / 3
DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_WAYS: Final = (
    ("pack", "fp32", "fp32"), ("pack", "fp32", "bf16"), ("unpack", "fp32", "fp32"), ("unpack", "bf16", "fp32"),
    ("pack", "bf16", "bf16"), ("pack", "fp32", "fp16"),
)  # fmt: skip


def shapes_of(build: Callable[[], Workload]) -> Shapes:
    """The shapes of a model's parameters, in registration order. Allocates no memory for the parameters."""
    with torch.device("meta"):
        return [parameter.shape for parameter in build().model.parameters()]


LISTS: Final[dict[str, Callable[[], Shapes]]] = {
    "resnet50": lambda: shapes_of(lambda: resnet(side=224)),
    "gpt2": lambda: shapes_of(gpt2),
    "tiny": lambda: [torch.Size([1000])] * 2000,
    "tiny32": lambda: [torch.Size([32])] * 2000,
}


@dataclass(frozen=True)
class Rival:
    """One way to do an operation."""

    run: Callable[[], object]  # is timed
    outputs: Sequence[Tensor]  # `run` writes to them
    expected: Sequence[Tensor]  # their right content

    def is_right(self) -> bool:
        for output in self.outputs:
            output.fill_(POISON)
        self.run()
        return all(map(torch.equal, self.outputs, self.expected))


def compare(rivals: Mapping[str, Rival], num_bytes: int, lead: float) -> Row:
    """Time all rivals, and a copy. A wrong rival raises RuntimeError.

    num_bytes: bytes that a call reads and writes in all.
    lead: see `gpu_seconds`.
    """
    source = torch.randint(0, 200, (num_bytes // 2,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    works: dict[str, Callable[[], object]] = {"copy": lambda: target.copy_(source)}
    works |= {name: rival.run for name, rival in rivals.items()}

    def check() -> None:
        if wrong := [name for name, rival in rivals.items() if not rival.is_right()]:
            raise RuntimeError(f"{', '.join(wrong)} differ from the reference")

    check()
    times = gpu_seconds(works, lead)
    check()
    rates = {name: num_bytes / spread["p50"] / 1e6 for name, spread in spreads(times).items()}
    return {"bytes": num_bytes, "ms": spreads(times), "gb_per_s": rates, "of_copy": shares(times, "copy")}


def kernels() -> Iterator[Case]:
    """Packing and unpacking; the most important ones come first, in case time runs out."""
    for op, source, target in _WAYS:
        for load, shapes in LISTS.items():
            about = {"op": op, "load": load, "source": source, "target": target}
            yield about, partial(time_list, op, shapes(), DTYPES[source], DTYPES[target])


def time_list(op: str, shapes: Shapes, source: torch.dtype, target: torch.dtype) -> Row:
    """All gradients of a list, into the wire buffer or out of it. "checked" also looks for NaN and infinity."""
    grad_dtype, wire_dtype = (source, target) if op == "pack" else (target, source)
    scale = 1.0 if source == target else SCALE
    grads = [torch.randn(shape, device="cuda").to(grad_dtype) for shape in shapes]
    offsets, end = [], 0
    for grad in grads:  # each at a multiple of 64 bytes
        offsets.append(end)
        end += -(-grad.numel() * wire_dtype.itemsize // 64) * 64 // wire_dtype.itemsize
    wire = torch.randn(end, device="cuda").to(wire_dtype)
    layouts = [layout(grad) for grad in grads]
    table = ChunkTable([grad.numel() for grad in grads], offsets, device=wire.device, layouts=layouts)
    views = [wire.as_strided(grad.size(), grad.stride(), start) for grad, start in zip(grads, offsets, strict=True)]
    rivals: dict[str, Rival]
    if op == "pack":
        expected = [torch.empty_like(view) for view in views]
        reference.pack(grads, expected, scale=scale)
        pack = prepare_pack(wire, table, grad_dtype, scale=scale)
        found = torch.full((2,), NOT_FOUND, dtype=torch.int32, device="cuda")
        look = prepare_pack(wire, table, grad_dtype, scale=scale, found=found, num_ranks=8)

        def foreach() -> None:
            torch._foreach_copy_(views, grads if scale == 1 else list(torch._foreach_mul(grads, scale)))

        rivals = {
            "torchring": Rival(partial(pack, grads), views, expected),
            "checked": Rival(partial(look, grads), views, expected),
            "foreach": Rival(foreach, views, expected),
        }
    else:
        expected = [torch.empty_like(grad) for grad in grads]
        reference.unpack(views, expected)
        rivals = {
            "torchring": Rival(partial(prepare_unpack(wire, table, grad_dtype), grads), grads, expected),
            "foreach": Rival(partial(torch._foreach_copy_, grads, views), grads, expected),
        }
    numel = sum(grad.numel() for grad in grads)
    lead = 2e-3 + 1e-5 * len(shapes)  # _foreach_mul and _foreach_copy_ take the host 7 ms for 2,000 tensors
    row = compare(rivals, numel * (source.itemsize + target.itemsize), lead)
    return {"tensors": len(shapes), "parameters": numel} | row
