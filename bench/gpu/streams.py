"""A section of `torchring bench gpu`: several ranks as streams of one process, all on one GPU at the same time.

Processes that share a GPU take turns in time slices. Streams of one process do not: all blocks of all ranks are on the
GPU at once, as they are on GPUs of their own. So one GPU shows whether meetings and the order of memory hold, how long
meetings take, and what blocks that wait cost a matrix multiplication beside them. Signals and data stay in the memory
of one GPU. NVLink adds about a microsecond to each hop, and limits the bandwidth.

A kernel that hangs would hang the process. So the abort word is set after 20 s, which ends all kernels.

Rows, by "kind":

    order        results of ranks that come late by random times: do signals carry the data with them?
    meeting      microseconds until all ranks have met, in two meetings of `direct` or in the steps of `ring`
    sum          a reduction at the latency of local memory, by wire and number of blocks
    alone        `direct` of one rank, the pass that scales and checks after NCCL, as a share of a copy
    gemm         how much longer a matrix multiplication takes beside blocks that wait for a late rank
    under gemm   a reduction that is launched while matrices are multiplied: how soon high priority helps
    abort        from the host's store to the abort word until the kernel has ended
    host         the host's time for each part of a bucket
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from torchring.accelerators import accelerator_of
from torchring.bench.gpu.stream_ranks import StreamRanks, fitting_blocks, num_processors
from torchring.bench.gpu.timing import NO_TIME, Stopwatch, Timer, quantiles, take_turns
from torchring.kernels import ChunkTable, direct, pack, reference
from torchring.kernels.signals import MAX_BLOCKS, signal_bytes

Row = dict[str, Any]
ENVIRONMENT: Final = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}  # a hardware queue for each stream, so that none waits
_BUCKET_NUMEL: Final = 6_553_600  # fp32, 25 MiB
_SECONDS: Final = 0.3  # for a row
_ROUNDS: Final = 8  # in a timed section
_NUM_CHECKS: Final = 10
_SCALE: Final = 0.5
_MEETING_BLOCKS: Final = (1, 8)
_TILE_NUMEL: Final = 4096  # fp32: at least what a block loads at a time
_WAITING_BLOCKS: Final = (8, 16, 24, 32)
_GEMM_SIZE: Final = 8192
_NUM_GEMMS: Final = 30
_SETTLE_SECONDS: Final = 0.005  # until a kernel that was launched waits


def ranks_as_streams(timer: Timer, *, is_dry: bool, until: float, most: int) -> Iterator[Row]:
    """All rows of the section. A row that fails, or has no time left, has a "problem"."""
    for row, measure in _measurements(timer, most, is_dry=is_dry):
        row = {"section": "streams", **row}
        if time.monotonic() > until and not is_dry:
            yield row | {"problem": NO_TIME}
            continue
        try:
            yield row | measure()
        except (RuntimeError, TypeError, ValueError, AssertionError) as error:
            yield row | {"problem": f"{type(error).__name__}: {error}"}


def _measurements(timer: Timer, most: int, *, is_dry: bool) -> Iterator[tuple[Row, Callable[[], Row]]]:
    """(what a row is about, how to measure the rest of the row), in order."""
    device = timer.device
    # An interpreted kernel has ended when its launch returns, so that in a dry run it can meet nobody.
    sizes = (1,) if is_dry else (2, 4, 8)
    bucket = 70 if is_dry else _BUCKET_NUMEL
    for size in sizes:
        for op in ("direct", "ring"):
            for dtype in (torch.float32, torch.bfloat16):
                for numel in (70,) if is_dry else (70, 70_001, _BUCKET_NUMEL):
                    about = {"kind": "order", "op": op, "ranks": size, "dtype": str(dtype)[6:], "size": numel}
                    yield about, functools.partial(_check_order, device, op, size, numel, dtype)
    for size in sizes:
        for op in ("direct", "ring"):
            for blocks in _MEETING_BLOCKS:
                about = {"kind": "meeting", "op": op, "ranks": size, "blocks": blocks}
                yield about, functools.partial(_time_meeting, timer, op, size, blocks, most)
            shapes = [(bucket // 25, MAX_BLOCKS), (bucket, MAX_BLOCKS)]
            if op == "direct":
                shapes += [(bucket, blocks) for blocks in (8, 16, 48)]
            for numel, blocks in shapes:
                about = {"kind": "sum", "op": op, "ranks": size, "blocks": blocks, "size": 4 * numel}
                yield about, functools.partial(_time_sum, timer, op, size, numel, blocks, most)
    processors = num_processors(device)
    for blocks in dict.fromkeys((MAX_BLOCKS, processors, 2 * processors, 4 * processors)):
        yield (
            {"kind": "alone", "blocks": blocks, "size": 4 * bucket},
            functools.partial(_time_alone, timer, bucket, blocks, most),
        )
    for blocks in _WAITING_BLOCKS:
        about = {"kind": "gemm", "blocks": blocks, "ranks": 2}
        yield about, functools.partial(_time_gemm, device, blocks, bucket, is_dry=is_dry)
        about = {"kind": "under gemm", "blocks": blocks, "ranks": sizes[0], "size": 4 * bucket}
        yield about, functools.partial(_time_under_gemm, device, sizes[0], blocks, bucket, is_dry=is_dry)
    yield {"kind": "abort", "ranks": 2, "blocks": MAX_BLOCKS}, functools.partial(_time_abort, device, is_dry=is_dry)
    for what, call in _host_calls(device, is_dry=is_dry).items():
        yield {"kind": "host", "op": what}, functools.partial(_time_host, device, call, most)


def _check_order(device: torch.device, op: str, size: int, numel: int, dtype: torch.dtype) -> Row:
    """Rounds with random delays. `direct` has to give the bits of the reference, and `ring` equal bits."""
    ranks = StreamRanks(device, size, numel, dtype, MAX_BLOCKS)
    ranks.prepare(op)
    for _ in range(_NUM_CHECKS if device.type == "cuda" else 1):
        sources = [torch.randn(numel, device=device).to(dtype) for _ in range(size)]
        for wire, source in zip(ranks.wires, sources, strict=True):
            wire.copy_(source)
        with ranks.limited():
            ranks.rounds(1, op, _SCALE, delays=True)
        expected = torch.empty_like(sources[0])
        reference.accumulate(sources, expected, scale=_SCALE)
        far = 0.25 if dtype.itemsize == 2 else 1e-4  # a ring rounds each sum, and adds in another order
        is_near = torch.allclose(ranks.wires[0].float(), expected.float(), rtol=0.0, atol=far)
        if not is_near or any(not torch.equal(wire, ranks.wires[0]) for wire in ranks.wires):
            raise RuntimeError("the result is wrong")
        if op == "direct" and device.type == "cuda" and not torch.equal(ranks.wires[0], expected):
            raise RuntimeError("the result has other bits than the reference")
    return {"is_checked": True}


def _time_meeting(timer: Timer, op: str, size: int, blocks: int, most: int) -> Row:
    """Little to sum for each block, so that time goes into meetings; and the same for one rank, which meets nobody."""
    blocks = fitting_blocks(timer.device, size, blocks)
    numel = blocks * (64 if timer.device.type == "cpu" else size * _TILE_NUMEL)
    sizes = {"together": size, "alone": 1}
    ranks = {name: StreamRanks(timer.device, each, numel, torch.float32, blocks) for name, each in sizes.items()}
    seconds, late = _time_rounds(timer, ranks, op, most)
    num_meetings = 2 if op == "direct" else 2 * size - 1  # a ring waits once a step, and once at the end
    each = [(a - b) / num_meetings for a, b in zip(seconds["together"], seconds["alone"], strict=True)]
    return {
        "blocks": blocks,
        "us": _in_us(seconds["together"]),
        "us_alone": _in_us(seconds["alone"]),
        "us_of_a_meeting": _in_us(each),
        "host_fell_behind": late,
    }


def _time_sum(timer: Timer, op: str, size: int, numel: int, blocks: int, most: int) -> Row:
    ranks = StreamRanks(timer.device, size, numel, torch.float32, blocks)
    seconds, late = _time_rounds(timer, {"together": ranks}, op, most)
    us = _in_us(seconds["together"])
    # Each rank reads the slices of all ranks, and writes a slice to all ranks. A ring moves as much.
    rate = 2 * 4 * numel * size / max(us["p50"], 1e-9) / 1e3
    return {"blocks": ranks.max_blocks, "us": us, "gb_per_s": rate, "host_fell_behind": late}


def _time_rounds(
    timer: Timer, ranks: dict[str, StreamRanks], op: str, most: int
) -> tuple[dict[str, list[float]], dict[str, int]]:
    """Seconds of a round, and how often the host was late."""
    timer.reset()
    for each in ranks.values():
        each.prepare(op)

    count = _ROUNDS if timer.device.type == "cuda" else 1

    def turn(name: str) -> float:
        with ranks[name].limited():
            return timer.seconds(name, lambda: ranks[name].rounds(count, op)) / count

    turns = {name: functools.partial(turn, name) for name in ranks}
    times = take_turns(turns, until=time.monotonic() + _SECONDS, most=most)
    return times, {name: late for name, late in timer.late.items() if late}


def _time_alone(timer: Timer, numel: int, blocks: int, most: int) -> Row:
    """`direct` of one rank, as it scales and checks what the backend's own all-reduce has summed."""
    timer.reset()
    wire = torch.ones(numel, device=timer.device)
    pad = torch.zeros(signal_bytes(1, blocks) // 4, dtype=torch.int32, device=timer.device)
    wires, pads = (torch.tensor([tensor.data_ptr()], device=timer.device) for tensor in (wire, pad))
    abort = torch.zeros(1, dtype=torch.int32, pin_memory=timer.device.type == "cuda")
    found = torch.full((1,), 2**31 - 1, dtype=torch.int32, device=timer.device)
    target = torch.empty_like(wire)

    def scale() -> None:
        direct(
            wires, pads, wire, rank=0, num_ranks=1, begin=0, end=numel, scale=-1.0,
            abort=abort, found=found, spread=False, max_blocks=blocks,
        )  # fmt: skip

    def turn(name: str, work: Callable[[], object]) -> float:
        timer.evict()
        return timer.seconds(name, work)

    works: dict[str, Callable[[], object]] = {"direct": scale, "copy": lambda: target.copy_(wire)}
    turns = {name: functools.partial(turn, name, work) for name, work in works.items()}
    times = take_turns(turns, until=time.monotonic() + _SECONDS, most=most)
    if not bool((wire.abs() == 1).all()):
        raise RuntimeError("the result is wrong")
    shares = [copy / own for copy, own in zip(times["copy"], times["direct"], strict=True)]
    return {"us": _in_us(times["direct"]), "of_copy": quantiles(shares)}


def _time_gemm(device: torch.device, blocks: int, numel: int, *, is_dry: bool) -> Row:
    """How much longer a matrix multiplication takes beside blocks that wait for a rank that does not come."""
    multiply = _gemms(device, is_dry=is_dry)
    ranks = StreamRanks(device, 2, numel, torch.float32, blocks)
    ranks.prepare()
    multiply().seconds()
    alone, beside = [], []
    for _ in range(3):
        alone.append(multiply().seconds())
        if is_dry:
            ranks.abort.fill_(1)  # else the interpreter would wait forever
        with ranks.stream(0):
            ranks.launch(0)
        time.sleep(_SETTLE_SECONDS)
        beside.append(multiply().seconds())
        ranks.abort.fill_(1)
        ranks.wait_for(0)
        ranks.reset()
    return {
        "blocks": ranks.max_blocks,
        "share_of_processors": ranks.max_blocks / num_processors(device),
        "ms_alone": 1e3 * statistics.median(alone) / _NUM_GEMMS,
        "slower_by": statistics.median(beside) / statistics.median(alone) - 1,
    }


def _time_under_gemm(device: torch.device, size: int, blocks: int, numel: int, *, is_dry: bool) -> Row:
    """From the launch of a reduction to its end, while matrices are multiplied: how soon high priority gets its way."""
    multiply = _gemms(device, is_dry=is_dry)
    ranks = StreamRanks(device, size, numel, torch.float32, blocks)
    ranks.prepare()
    times = []
    for _ in range(3):
        busy = multiply()
        time.sleep(_SETTLE_SECONDS)
        with ranks.limited():
            begin = time.perf_counter()
            for rank in range(size):
                with ranks.stream(rank):
                    ranks.launch(rank)
            for rank in range(size):
                ranks.wait_for(rank)
            times.append(time.perf_counter() - begin)
        busy.seconds()
    return {"blocks": ranks.max_blocks, "us": _in_us(times)}


def _time_abort(device: torch.device, *, is_dry: bool) -> Row:
    """From the host's store to the abort word until a kernel that waits has ended, with NaN in its wire."""
    ranks = StreamRanks(device, 2, 70_001 if not is_dry else 70, torch.float32, MAX_BLOCKS)
    ranks.prepare()
    if is_dry:
        ranks.abort.fill_(1)
    with ranks.stream(0):
        ranks.launch(0)
    time.sleep(_SETTLE_SECONDS)
    begin = time.perf_counter()
    ranks.abort.fill_(1)
    ranks.wait_for(0)
    seconds = time.perf_counter() - begin
    if not bool(ranks.wires[0].isnan().all()):
        raise RuntimeError("the wire of an aborted kernel holds numbers")
    return {"us": _in_us([seconds])}


def _host_calls(device: torch.device, *, is_dry: bool) -> dict[str, Callable[[], object]]:
    """What the host does for each bucket."""
    numel = 24 if is_dry else 546_133
    accelerator = accelerator_of(device)
    assert accelerator is not None
    stream = accelerator.open_stream()
    ranks = StreamRanks(device, 1, 12 * (numel + 16), torch.float32, MAX_BLOCKS)
    grads = [torch.randn(numel, device=device) for _ in range(12)]
    line = -(-numel // 16) * 16
    table = ChunkTable([numel] * 12, [i * line for i in range(12)], wire_dtype=torch.float32, device=device)
    return {
        "launch direct": lambda: ranks.launch(0),
        "pack 12 gradients": lambda: pack(grads, ranks.wires[0], table),
        "mark": stream.mark,
        "follow": stream.follow,
        "run nothing": lambda: stream.run(lambda: None),
    }


def _time_host(device: torch.device, call: Callable[[], object], most: int) -> Row:
    """The host's time for a call. A device that lags behind is waited for between turns, untimed."""
    times = []
    for _ in range(most + 1):
        begin = time.perf_counter()
        for _ in range(10):
            call()
        times.append((time.perf_counter() - begin) / 10)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return {"us": _in_us(times[1:])}


def _gemms(device: torch.device, *, is_dry: bool) -> Callable[[], Stopwatch]:
    """A function that launches matrix multiplications, and measures them."""
    size = 8 if is_dry else _GEMM_SIZE
    factor: Tensor = torch.randn(size, size, device=device).to(torch.bfloat16)
    product = torch.empty_like(factor)

    def multiply() -> Stopwatch:
        watch = Stopwatch(device)
        for _ in range(_NUM_GEMMS):
            torch.mm(factor, factor, out=product)
        return watch.stop()

    return multiply


def _in_us(seconds: Sequence[float]) -> dict[str, float]:
    return quantiles([1e6 * each for each in seconds])
