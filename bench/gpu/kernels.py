"""Sections of `torchring bench gpu` about memory: the rate of a copy, and the kernels' share of that rate.

Inputs are random. Each rival works on several input sets in turn, which together exceed the cache. Before every timed
section the outputs are overwritten; after the section they are compared with a reference, bit for bit.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from torchring.bench.gpu import models
from torchring.bench.gpu.models import Shapes
from torchring.bench.gpu.timing import NO_TIME, Timer, rates, shares, spreads, take_turns
from torchring.kernels import ChunkTable, accumulate, pack, reference, unpack
from torchring.kernels.finite import NOT_FOUND

Row = dict[str, Any]
POISON = 12288.0  # exact in every dtype here, and rare in random data
SCALE = 1 / 3
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
OURS = ("torchring", "checked")
_MOST_SETS = 32
_CALLS = 8  # largest number of calls in a timed section
_LIMIT_BYTES = 1 << 30  # largest number of bytes moved in a timed section, unless two calls move more


@dataclass(frozen=True)
class Rival:
    """One way to do an operation. All functions take the index of an input set.

    Attributes:
        run: the function to time.
        poison: overwrites the outputs of `run`.
        is_right: whether the outputs are those of the reference.
    """

    run: Callable[[int], object]
    poison: Callable[[int], object]
    is_right: Callable[[int], bool]


class WrongResultError(RuntimeError):
    """The outputs of a rival differ from those of the reference."""


def compare(
    timer: Timer, rivals: Mapping[str, Rival], *, num_bytes: int, num_sets: int, until: float, most: int
) -> Row:
    """Time all rivals, one of which is "copy". Returns the part of a row that holds the measurements.

    A rival that fails, or is wrong, in its first turn is left out and named under "problems". If the rival is one of
    torchring's, the row also gets a "problem". In later turns a wrong result raises WrongResultError.

    Args:
        num_bytes: bytes that a call reads and writes in all.
        num_sets: number of input sets.
        until: stop about then, in time.monotonic().
        most: largest number of repetitions.
    """
    timer.reset()
    calls = max(2, min(_CALLS, _LIMIT_BYTES // num_bytes))
    done = dict.fromkeys(rivals, 0)

    def turn(name: str) -> float:
        rival, first = rivals[name], done[name]
        sets = [(first + i) % num_sets for i in range(calls)]
        done[name] = first + calls
        for i in set(sets):
            rival.poison(i)
        timer.evict()
        seconds = timer.seconds(name, lambda: [rival.run(i) for i in sets])
        for i in set(sets):
            if not rival.is_right(i):
                raise WrongResultError(f"{name} differs from the reference in input set {i}")
        return seconds / calls

    problems: dict[str, str] = {}
    for name in rivals:
        try:
            turn(name)
        except (RuntimeError, TypeError, ValueError) as error:
            if name == "copy":
                raise
            problems[name] = f"{type(error).__name__}: {error}"
    timer.late.clear()
    turns = {name: functools.partial(turn, name) for name in rivals if name not in problems}
    times = take_turns(turns, until=until, most=most)
    row: Row = {
        "bytes": num_bytes,
        "sets": num_sets,
        "calls": calls,
        "ms": spreads(times),
        "gb_per_s": rates(times, num_bytes),
        "of_copy": shares(times, "copy"),
        "host_fell_behind": {name: late for name, late in timer.late.items() if late},
        "is_checked": True,
    }
    if problems:
        row["problems"] = problems
    if ours := [text for name, text in problems.items() if name in OURS]:
        row["problem"] = ours[0]
    return row


def copy_rival(num_bytes: int, num_sets: int, device: torch.device) -> Rival:
    """A device-to-device copy, which reads and writes `num_bytes` in all."""
    half = max(num_bytes // 2, 1)
    sources = [torch.randint(0, 200, (half,), dtype=torch.uint8, device=device) for _ in range(num_sets)]
    targets = [torch.empty_like(source) for source in sources]
    return Rival(
        run=lambda i: targets[i].copy_(sources[i]),
        poison=lambda i: targets[i].fill_(255),
        is_right=lambda i: torch.equal(targets[i], sources[i]),
    )


def num_sets_of(num_bytes: int, timer: Timer) -> int:
    """The number of input sets that make up four times the cache, 2 to 32, for calls that move `num_bytes`."""
    return max(2, min(_MOST_SETS, math.ceil(4 * timer.cache_bytes / num_bytes)))


def ceilings(timer: Timer, sizes: Sequence[int], *, until: float, most: int) -> Iterator[Row]:
    """A row for each size in bytes, with the rates of CUDA's copy and of a kernel that multiplies by one."""
    started = time.monotonic()
    for i, size in enumerate(sizes):
        num_sets = num_sets_of(2 * size, timer)
        sources = [torch.randn(size // 4, device=timer.device) for _ in range(num_sets)]
        targets = [torch.empty_like(source) for source in sources]

        def multiply(i: int, sources: list[Tensor] = sources, targets: list[Tensor] = targets) -> object:
            return torch.mul(sources[i], 1.0, out=targets[i])

        def poison(i: int, targets: list[Tensor] = targets) -> object:
            return targets[i].fill_(POISON)

        def is_right(i: int, sources: list[Tensor] = sources, targets: list[Tensor] = targets) -> bool:
            return torch.equal(sources[i], targets[i])

        rivals = {"copy": copy_rival(2 * size, num_sets, timer.device), "kernel": Rival(multiply, poison, is_right)}
        limit = started + (until - started) * (i + 1) / len(sizes)
        row = compare(timer, rivals, num_bytes=2 * size, num_sets=num_sets, until=limit, most=most)
        yield {"section": "copy", "size": size} | row


@dataclass(frozen=True)
class Case:
    """An operation to time.

    Attributes:
        load: the name of a gradient list, or the number of parts in a sum.
        source, target: names of the dtypes of input and output.
    """

    op: str
    load: str
    source: str
    target: str


def cases(loads: Sequence[str]) -> list[Case]:
    """All cases. The most important cases come first, in case time runs out."""
    first = [Case("pack", load, *way) for way in (("fp32", "fp32"), ("fp32", "bf16")) for load in loads]
    back = [Case("unpack", load, *way) for way in (("fp32", "fp32"), ("bf16", "fp32")) for load in loads]
    sums = [Case("accumulate", f"{n} parts", dtype, dtype) for dtype in ("fp32", "bf16") for n in (2, 4, 8)]
    rest = [Case("pack", load, *way) for way in (("bf16", "bf16"), ("fp32", "fp16")) for load in loads]
    return [*first, *back, *sums, *rest]


def kernels(timer: Timer, lists: Mapping[str, Shapes], part_numel: int, *, until: float, most: int) -> Iterator[Row]:
    """A row for each case. If a case fails, or has no time left, its row has a "problem".

    Args:
        lists: lists of gradient shapes, by name.
        part_numel: number of elements of each part in a sum.
    """
    todo = cases(list(lists))
    for i, case in enumerate(todo):
        row: Row = {"section": "kernels", **vars(case)}
        now = time.monotonic()
        if now > until:
            yield row | {"problem": NO_TIME}
            continue
        limit = now + (until - now) / (len(todo) - i)
        try:
            if case.op == "accumulate":
                yield row | _time_sum(timer, case, int(case.load.split()[0]), part_numel, limit, most)
            else:
                yield row | _time_list(timer, case, lists[case.load], limit, most)
        except (RuntimeError, TypeError, ValueError, AssertionError) as error:
            yield row | {"problem": f"{type(error).__name__}: {error}"}


@dataclass
class Gradients:
    """One input set: separate gradients, placed as the allocator would place them, and a wire buffer for them.

    Attributes:
        memory: the memory of the gradients, each of which begins at a multiple of 512 bytes.
        wire: the buffer, filled with POISON; the part of each gradient begins at a multiple of 64 bytes.
        views: the part of the wire buffer that belongs to each gradient.
        found: int32 [1], the argument of `pack` of the same name.
    """

    memory: Tensor
    grads: list[Tensor]
    wire: Tensor
    views: list[Tensor]
    table: ChunkTable
    found: Tensor

    @staticmethod
    def new(shapes: Shapes, grad_dtype: torch.dtype, wire_dtype: torch.dtype, device: torch.device) -> Gradients:
        numels = [shape.numel() for shape in shapes]
        line, page = 64 // wire_dtype.itemsize, 512 // grad_dtype.itemsize
        offsets = _starts(numels, line)
        places = _starts(numels, page)
        memory = torch.randn(places[-1] + numels[-1], device=device).to(grad_dtype)
        grads = _pieces(memory, places, shapes)
        wire = torch.full((offsets[-1] + numels[-1],), POISON, dtype=wire_dtype, device=device)
        table = ChunkTable(numels, offsets, wire_dtype=wire_dtype, device=device)
        found = torch.full((1,), NOT_FOUND, dtype=torch.int32, device=device)
        return Gradients(memory, grads, wire, table.views_like(grads, wire), table, found)


def _time_list(timer: Timer, case: Case, shapes: Shapes, until: float, most: int) -> Row:
    source, target = DTYPES[case.source], DTYPES[case.target]
    numel = sum(shape.numel() for shape in shapes)
    num_bytes = numel * (source.itemsize + target.itemsize)
    num_sets = num_sets_of(num_bytes, timer)
    if case.op == "pack":
        sets = [Gradients.new(shapes, source, target, timer.device) for _ in range(num_sets)]
        rivals = pack_rivals(sets, 1.0 if source == target else SCALE)
    else:
        sets = [Gradients.new(shapes, target, source, timer.device) for _ in range(num_sets)]
        rivals = unpack_rivals(sets)
    rivals["copy"] = copy_rival(num_bytes, num_sets, timer.device)
    row = compare(timer, rivals, num_bytes=num_bytes, num_sets=num_sets, until=until, most=most)
    return {"tensors": len(shapes), "parameters": numel} | row


def pack_rivals(sets: Sequence[Gradients], scale: float) -> dict[str, Rival]:
    """Ways to copy gradients into the wire buffer, scaled and cast. "checked" also looks for NaN and infinity."""
    whole: list[Tensor] = []  # the right content of each wire buffer, including gaps
    dense: list[Tensor] = []  # the right content without gaps
    for inputs in sets:
        expected = torch.full_like(inputs.wire, POISON)
        views = inputs.table.views_like(inputs.grads, expected)
        reference.pack(inputs.grads, views, scale=scale)
        whole.append(expected)
        dense.append(torch.cat([view.reshape(-1) for view in views]))
    results: list[Tensor] = [torch.full_like(expected, POISON) for expected in dense]

    def plain(i: int) -> None:
        pack(sets[i].grads, sets[i].wire, sets[i].table, scale=scale)

    def checked(i: int) -> None:
        pack(sets[i].grads, sets[i].wire, sets[i].table, scale=scale, found=sets[i].found)

    def foreach(i: int) -> None:
        grads = sets[i].grads if scale == 1 else list(torch._foreach_mul(sets[i].grads, scale))
        torch._foreach_copy_(sets[i].views, grads)

    def flatten(i: int) -> None:
        flat = _flatten_dense_tensors(sets[i].grads)  # type: ignore[no-untyped-call]
        if scale == 1:
            results[i] = flat
        else:
            results[i].copy_(flat.mul_(scale))

    def cat(i: int) -> None:
        flat = [grad.view(-1) for grad in sets[i].grads]
        if scale == 1:
            torch.cat(flat, out=results[i])
        else:
            results[i].copy_(torch.cat(flat).mul_(scale))

    def poison(i: int) -> None:
        sets[i].wire.fill_(POISON)
        sets[i].found.fill_(NOT_FOUND)

    def poison_dense(i: int) -> None:
        results[i].fill_(POISON)

    def is_right(i: int) -> bool:
        return torch.equal(sets[i].wire, whole[i]) and int(sets[i].found) == NOT_FOUND

    def is_right_dense(i: int) -> bool:
        return torch.equal(results[i], dense[i])

    ours = {"torchring": Rival(plain, poison, is_right), "checked": Rival(checked, poison, is_right)}
    return {
        **ours,
        "foreach": Rival(foreach, poison, is_right),
        "flatten": Rival(flatten, poison_dense, is_right_dense),
        "cat": Rival(cat, poison_dense, is_right_dense),
    }


def unpack_rivals(sets: Sequence[Gradients]) -> dict[str, Rival]:
    """Ways to copy the wire buffer back into gradients."""
    expected: list[Tensor] = []
    for one in sets:
        one.wire.copy_(torch.randn(one.wire.shape, device=one.wire.device))
        memory = torch.full_like(one.memory, POISON)
        places = [int(grad.storage_offset()) for grad in one.grads]
        reference.unpack(one.views, _pieces(memory, places, [grad.shape for grad in one.grads]))
        expected.append(memory)
    dense = [torch.cat([view.reshape(-1) for view in one.views]) for one in sets]

    def ours(i: int) -> None:
        unpack(sets[i].wire, sets[i].grads, sets[i].table)

    def foreach(i: int) -> None:
        torch._foreach_copy_(sets[i].grads, sets[i].views)

    def unflatten(i: int) -> None:
        pieces = _unflatten_dense_tensors(dense[i], sets[i].grads)  # type: ignore[no-untyped-call]
        torch._foreach_copy_(sets[i].grads, pieces)

    def poison(i: int) -> object:
        return sets[i].memory.fill_(POISON)

    def is_right(i: int) -> bool:
        return torch.equal(sets[i].memory, expected[i])

    runs = {"torchring": ours, "foreach": foreach, "unflatten": unflatten}
    return {name: Rival(run, poison, is_right) for name, run in runs.items()}


def _time_sum(timer: Timer, case: Case, num_parts: int, numel: int, until: float, most: int) -> Row:
    dtype, device = DTYPES[case.source], timer.device
    num_bytes = (num_parts + 1) * numel * dtype.itemsize
    num_sets = num_sets_of(num_bytes, timer)
    parts = [[torch.randn(numel, device=device).to(dtype) for _ in range(num_parts)] for _ in range(num_sets)]
    rivals = sum_rivals(parts) | {"copy": copy_rival(num_bytes, num_sets, device)}
    row = compare(timer, rivals, num_bytes=num_bytes, num_sets=num_sets, until=until, most=most)
    return {"parts": num_parts, "parameters": numel} | row


def sum_rivals(sets: Sequence[Sequence[Tensor]]) -> dict[str, Rival]:
    """Ways to compute the mean of tensors: in one pass, or by a call for each tensor (only in fp32)."""
    scale = 1 / len(sets[0])
    outs = [torch.empty_like(parts[0]) for parts in sets]
    expected = [torch.empty_like(parts[0]) for parts in sets]
    for parts, right in zip(sets, expected, strict=True):
        reference.accumulate(parts, right, scale=scale)

    def ours(i: int) -> None:
        accumulate(sets[i], outs[i], scale=scale)

    def add(i: int) -> None:
        torch.add(sets[i][0], sets[i][1], out=outs[i])
        for part in sets[i][2:]:
            outs[i].add_(part)
        outs[i].mul_(scale)

    def poison(i: int) -> object:
        return outs[i].fill_(POISON)

    def is_right(i: int) -> bool:
        return torch.equal(outs[i], expected[i])

    rivals = {"torchring": Rival(ours, poison, is_right)}
    if outs[0].dtype == torch.float32:
        rivals["add"] = Rival(add, poison, is_right)
    return rivals


def lists_of(names: Sequence[str], *, is_dry: bool) -> dict[str, Shapes]:
    """Gradient lists by name. In a dry run, each list has at most four tensors of at most 40 elements."""
    lists = {name: models.LISTS[name]() for name in names}
    if not is_dry:
        return lists
    return {name: [torch.Size([min(shape.numel(), 40)]) for shape in shapes[:4]] for name, shapes in lists.items()}


def _pieces(memory: Tensor, places: Sequence[int], shapes: Sequence[torch.Size]) -> list[Tensor]:
    return [memory[place : place + shape.numel()].view(shape) for place, shape in zip(places, shapes, strict=True)]


def _starts(numels: Sequence[int], multiple: int) -> list[int]:
    """The offsets of tensors that lie one after the other, each at a multiple of `multiple` elements."""
    starts, end = [], 0
    for numel in numels:
        starts.append(end)
        end += -(-numel // multiple) * multiple
    return starts
