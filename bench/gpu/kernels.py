"""Sections of `torchring bench gpu` about memory: the rate of a copy, and the kernels' share of that rate.

Gradients are random. Before its turns and after them, the outputs of a rival are overwritten, made anew, and compared
with a reference, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from torchring.bench.gpu.timing import Case, Row, gpu_seconds, shares, spreads
from torchring.bench.models import Workload, gpt2, resnet, vgg
from torchring.kernels import ChunkTable, accumulate, pack, reference, unpack
from torchring.kernels.finite import NOT_FOUND

Shapes = list[torch.Size]

COPY_BYTES: Final = [1 << 20, 4 << 20, 16 << 20, 64 << 20, 256 << 20, 1 << 30]
POISON: Final = 12288.0  # exact in every dtype here, and rare in random data
SCALE: Final = 1 / 3
DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_PART_NUMEL: Final = 1 << 24
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
    "vgg16": lambda: shapes_of(lambda: vgg(side=224)),
    "tiny": lambda: [torch.Size([1000])] * 2000,
    "tiny32": lambda: [torch.Size([32])] * 2000,
}


@dataclass(frozen=True)
class Rival:
    """One way to do an operation.

    Attributes:
        run: the function to time.
        output: tensor that `run` writes to.
        expected: the right content of `output`.
    """

    run: Callable[[], object]
    output: Tensor
    expected: Tensor

    def is_right(self) -> bool:
        self.output.fill_(POISON)
        self.run()
        return torch.equal(self.output, self.expected)


def compare(rivals: Mapping[str, Rival], num_bytes: int) -> Row:
    """Time all rivals, and a copy. A wrong rival raises RuntimeError.

    num_bytes: bytes that a call reads and writes in all.
    """
    source = torch.randint(0, 200, (num_bytes // 2,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    works: dict[str, Callable[[], object]] = {"copy": lambda: target.copy_(source)}
    works |= {name: rival.run for name, rival in rivals.items()}

    def check() -> None:
        if wrong := [name for name, rival in rivals.items() if not rival.is_right()]:
            raise RuntimeError(f"{', '.join(wrong)} differ from the reference")

    check()
    times = gpu_seconds(works)
    check()
    rates = {name: num_bytes / spread["p50"] / 1e6 for name, spread in spreads(times).items()}
    return {"bytes": num_bytes, "ms": spreads(times), "gb_per_s": rates, "of_copy": shares(times, "copy")}


def copies() -> Iterator[Case]:
    """CUDA's copy, and a kernel that multiplies by one, by size."""
    for size in COPY_BYTES:
        source = torch.randn(size // 4, device="cuda")
        target = torch.empty_like(source)
        kernel = Rival(partial(torch.mul, source, 1.0, out=target), target, source)
        yield {"size": size}, partial(compare, {"kernel": kernel}, 2 * size)


def kernels() -> Iterator[Case]:
    """Packing, unpacking and sums; the most important ones come first, in case time runs out."""
    for op, source, target in _WAYS:
        for load, shapes in LISTS.items():
            about = {"op": op, "load": load, "source": source, "target": target}
            yield about, partial(_time_list, op, shapes(), DTYPES[source], DTYPES[target])
    for dtype in ("fp32", "bf16"):
        for count in (2, 4, 8):
            yield {"op": "accumulate", "load": f"{count} parts", "source": dtype}, partial(_time_sum, count, dtype)


def _time_list(op: str, shapes: Shapes, source: torch.dtype, target: torch.dtype) -> Row:
    is_pack = op == "pack"
    gradients = Gradients(shapes, *((source, target) if is_pack else (target, source)))
    scale = 1.0 if source == target else SCALE
    rivals = pack_rivals(gradients, scale) if is_pack else unpack_rivals(gradients)
    numel = sum(shape.numel() for shape in shapes)
    row = compare(rivals, numel * (source.itemsize + target.itemsize))
    return {"tensors": len(shapes), "parameters": numel} | row


class Gradients:
    """Gradients placed as the allocator would place them, and a wire buffer for them.

    Attributes:
        memory: the memory of the gradients, each of which begins at a multiple of 512 bytes.
        wire: the buffer; the part of each gradient begins at a multiple of 64 bytes.
        views: the part of the wire buffer that belongs to each gradient.
    """

    def __init__(self, shapes: Shapes, grad_dtype: torch.dtype, wire_dtype: torch.dtype, device: str = "cuda") -> None:
        numels = [shape.numel() for shape in shapes]
        offsets = _starts(numels, 64 // wire_dtype.itemsize)
        self._shapes, self._places = shapes, _starts(numels, 512 // grad_dtype.itemsize)
        self.memory = torch.randn(self._places[-1] + numels[-1], device=device).to(grad_dtype)
        self.grads = self.pieces(self.memory)
        self.wire = torch.full((offsets[-1] + numels[-1],), POISON, dtype=wire_dtype, device=device)
        self.table = ChunkTable(numels, offsets, wire_dtype=wire_dtype, device=self.wire.device)
        self.views = self.table.views_like(self.grads, self.wire)

    def pieces(self, memory: Tensor) -> list[Tensor]:
        """The part of each gradient in `memory`, which is laid out like the gradients."""
        places = zip(self._places, self._shapes, strict=True)
        return [memory[place : place + shape.numel()].view(shape) for place, shape in places]


def pack_rivals(gradients: Gradients, scale: float) -> dict[str, Rival]:
    """Ways to copy gradients into the wire buffer, scaled and cast. "checked" also looks for NaN and infinity."""
    grads, wire, table = gradients.grads, gradients.wire, gradients.table
    whole = torch.full_like(wire, POISON)  # with the gaps between gradients
    views = table.views_like(grads, whole)
    reference.pack(grads, views, scale=scale)
    dense = torch.cat([view.reshape(-1) for view in views])
    result = torch.empty_like(dense)
    found = torch.full((1,), NOT_FOUND, dtype=torch.int32, device=wire.device)

    def foreach() -> None:
        scaled = grads if scale == 1 else list(torch._foreach_mul(grads, scale))
        torch._foreach_copy_(gradients.views, scaled)

    def flatten() -> None:
        flat = _flatten_dense_tensors(grads)  # type: ignore[no-untyped-call]
        result.copy_(flat if scale == 1 else flat.mul_(scale))

    def cat() -> None:
        flat = [grad.view(-1) for grad in grads]
        if scale == 1:
            torch.cat(flat, out=result)
        else:
            result.copy_(torch.cat(flat).mul_(scale))

    return {
        "torchring": Rival(partial(pack, grads, wire, table, scale=scale), wire, whole),
        "checked": Rival(partial(pack, grads, wire, table, scale=scale, found=found), wire, whole),
        "foreach": Rival(foreach, wire, whole),
        "flatten": Rival(flatten, result, dense),
        "cat": Rival(cat, result, dense),
    }


def unpack_rivals(gradients: Gradients) -> dict[str, Rival]:
    """Ways to copy the wire buffer back into gradients."""
    grads, wire, memory = gradients.grads, gradients.wire, gradients.memory
    wire.copy_(torch.randn(wire.shape, device=wire.device))
    expected = torch.full_like(memory, POISON)
    reference.unpack(gradients.views, gradients.pieces(expected))
    dense = torch.cat([view.reshape(-1) for view in gradients.views])

    def unflatten() -> None:
        torch._foreach_copy_(grads, _unflatten_dense_tensors(dense, grads))  # type: ignore[no-untyped-call]

    return {
        "torchring": Rival(partial(unpack, wire, grads, gradients.table), memory, expected),
        "foreach": Rival(partial(torch._foreach_copy_, grads, gradients.views), memory, expected),
        "unflatten": Rival(unflatten, memory, expected),
    }


def _time_sum(count: int, dtype: str) -> Row:
    parts = [torch.randn(_PART_NUMEL, device="cuda").to(DTYPES[dtype]) for _ in range(count)]
    return compare(sum_rivals(parts), (count + 1) * parts[0].nbytes)


def sum_rivals(parts: list[Tensor]) -> dict[str, Rival]:
    """Ways to compute the mean of tensors: in one pass, or by a call for each tensor (only in fp32)."""
    scale = 1 / len(parts)
    out, expected = torch.empty_like(parts[0]), torch.empty_like(parts[0])
    reference.accumulate(parts, expected, scale=scale)

    def add() -> None:
        torch.add(parts[0], parts[1], out=out)
        for part in parts[2:]:
            out.add_(part)
        out.mul_(scale)

    rivals = {"torchring": Rival(partial(accumulate, parts, out, scale=scale), out, expected)}
    return rivals if out.dtype != torch.float32 else rivals | {"add": Rival(add, out, expected)}


def _starts(numels: list[int], multiple: int) -> list[int]:
    """The offsets of tensors that lie one after the other, each at a multiple of `multiple` elements."""
    starts, end = [], 0
    for numel in numels:
        starts.append(end)
        end += -(-numel // multiple) * multiple
    return starts
