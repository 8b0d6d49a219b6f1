"""A section of `torchring bench gpu`: several ranks as streams of one process, all on one GPU at the same time.

Processes that share a GPU take turns in time slices. Streams of one process do not: all blocks of all ranks are on the
GPU at once, as they are on GPUs of their own. So one GPU shows whether meetings and the order of memory hold, how long
meetings take, and what blocks that wait cost a matrix multiplication beside them. Signals and data stay in the memory
of one GPU. NVLink adds about a microsecond to each hop, and limits the bandwidth.

A kernel that hangs would hang the process. So the abort word is set after 20 s, which ends all kernels.

Rows, by "kind", the most telling first:

    abort        from the host's store to the abort word until the kernel has ended
    gemm         how much longer a matrix multiplication takes beside blocks that wait for a late rank
    meeting      until all ranks have met, in two meetings of `direct` or in the steps of `ring`
    sum          a reduction at the latency of local memory, by wire and number of blocks
    order        results of ranks that come late by random times: do signals carry the data with them? As many rows as
                 there is time for
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Final

import torch

from torchring.allreduce.slices import slice_bounds
from torchring.bench.gpu.timing import Case, Row, gpu_seconds, microseconds
from torchring.kernels import reference
from torchring.kernels.direct import prepare_direct
from torchring.kernels.ring import prepare_ring
from torchring.kernels.signals import MAX_BLOCKS, block_words, signal_bytes

ENVIRONMENT: Final = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}  # a hardware queue for each stream, so that none waits
_BUCKET_NUMEL: Final = 6_553_600  # fp32, 25 MiB
_RANKS: Final = (2, 4, 8)
_CHECK_SECONDS: Final = 1.5
_LAST_ORDER_SECONDS: Final = 90.0  # when the last row may begin: the section ends after 110
_SCALE: Final = 0.5
_MEETING_BLOCKS: Final = (1, 8)
_TILE_NUMEL: Final = 4096  # fp32: at least what a block loads at a time
_WAITING_BLOCKS: Final = (8, 16, 24, 32)
_GEMM_SIZE: Final = 8192
_NUM_GEMMS: Final = 30
_SETTLE_SECONDS: Final = 0.005  # until a kernel that was launched waits
_PATIENCE_SECONDS: Final = 20.0
_LONGEST_DELAY_CYCLES: Final = 60_000


def ranks_as_streams() -> Iterator[Case]:
    """All cases of the section."""
    began = time.monotonic()
    yield {"kind": "abort", "ranks": 2, "blocks": MAX_BLOCKS}, _time_abort
    for blocks in _WAITING_BLOCKS:
        yield {"kind": "gemm", "ranks": 2}, partial(_time_gemm, blocks)
    ways = [(size, op) for size in _RANKS for op in ("direct", "ring")]
    for size, op in ways:
        for blocks in _MEETING_BLOCKS:
            yield {"kind": "meeting", "op": op, "ranks": size}, partial(_time_meeting, op, size, blocks)
    for size, op in ways:
        wires = [(_BUCKET_NUMEL, MAX_BLOCKS), (_BUCKET_NUMEL // 25, MAX_BLOCKS)]
        if op == "direct":
            wires += [(_BUCKET_NUMEL, blocks) for blocks in (8, 16, 48)]
        for numel, blocks in wires:
            yield (
                {"kind": "sum", "op": op, "ranks": size, "size": 4 * numel},
                partial(_time_sum, op, size, numel, blocks),
            )
    for numel in (_BUCKET_NUMEL, 70_001, 70):
        for dtype in (torch.float32, torch.bfloat16):
            for size, op in ways:
                if time.monotonic() - began > _LAST_ORDER_SECONDS:
                    return
                about = {"kind": "order", "op": op, "ranks": size, "dtype": str(dtype)[6:], "size": numel}
                yield about, partial(_check_order, op, size, numel, dtype)


def one_of_eight() -> Iterator[Case]:
    """`direct` of one rank of eight, whose signals are all there beforehand: for profilers, which run one at a time."""
    yield {"kind": "one of 8", "op": "direct", "size": 4 * _BUCKET_NUMEL}, _run_one_of_eight


class StreamRanks:
    """Ranks that share a device and a process. Rank r has stream r, with high priority.

    Attributes:
        wires: [numel] of each rank.
        streams: of each rank.
        abort: int32 [1] on the host, which all kernels look at.
        max_blocks: of a rank: at most a share of the processors, so that all blocks fit on the device.
    """

    def __init__(self, size: int, numel: int, dtype: torch.dtype, max_blocks: int) -> None:
        self.size = size
        self.max_blocks = fitting_blocks(size, max_blocks)
        self.wires = [torch.zeros(numel, dtype=dtype, device="cuda") for _ in range(size)]
        words = signal_bytes(size, self.max_blocks) // 4
        self._pads = [torch.zeros(words, dtype=torch.int32, device="cuda") for _ in range(size)]
        self._wire_addresses = torch.tensor([wire.data_ptr() for wire in self.wires], device="cuda")
        self._pad_addresses = torch.tensor([pad.data_ptr() for pad in self._pads], device="cuda")
        self._bounds = slice_bounds(numel, size, dtype.itemsize)
        self.abort = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._was_ended = False
        self._launches: dict[tuple[int, str, float], Callable[[], None]] = {}
        self.streams = [torch.cuda.Stream(priority=-1) for _ in range(size)]  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()

    def launch(self, rank: int, op: str = "direct", scale: float = 1.0) -> None:
        """Launch a rank's kernel in the current stream. It is prepared at the first launch, as for a bucket."""
        key = rank, op, scale
        if key not in self._launches:
            pads = self._wire_addresses, self._pad_addresses, self.wires[rank]
            options: dict[str, Any] = {"rank": rank, "num_ranks": self.size, "scale": scale, "abort": self.abort}
            if op == "direct":
                begin, end = self._bounds[rank]
                launch = prepare_direct(*pads, begin=begin, end=end, max_blocks=self.max_blocks, **options)
            else:
                launch = prepare_ring(*pads, max_blocks=self.max_blocks, **options)
            self._launches[key] = launch
        self._launches[key]()

    def prepare(self, op: str = "direct") -> None:
        """Compile and load all kernels. A kernel that was loaded while others wait for it might never be loaded."""
        self.abort.fill_(1)
        for rank in range(self.size):
            self.launch(rank, op)
        torch.cuda.synchronize()
        self.reset()

    def reset(self) -> None:
        """Make ready for another round after an abort. No kernel may run."""
        self.abort.zero_()
        for tensor in (*self._pads, *self.wires):
            tensor.zero_()
        torch.cuda.synchronize()

    def round(self, op: str = "direct", scale: float = 1.0, *, delays: bool = False) -> None:
        """Launch a round of all ranks, between what the current stream did before and what it does next.

        delays: whether each kernel comes late by a random time.
        """
        for stream in self.streams:
            stream.wait_stream(torch.cuda.current_stream())
        for rank, stream in enumerate(self.streams):
            with torch.cuda.stream(stream):
                if delays:
                    torch.cuda._sleep(int(torch.randint(1, _LONGEST_DELAY_CYCLES, (1,))))  # type: ignore[no-untyped-call]
                self.launch(rank, op, scale)
        for stream in self.streams:
            torch.cuda.current_stream().wait_stream(stream)

    def let_all_come_early(self) -> None:
        """Make a round's signals of all other ranks be there, whichever rank is launched first. No kernel may run."""
        for rank, pad in enumerate(self._pads):
            words = pad.view(-1, block_words(self.size))[:, : self.size]
            words.fill_(100)
            words[:, rank] = 0

    @contextmanager
    def limited(self) -> Iterator[None]:
        """Inside, kernels are aborted if they have not ended after a while. At the end that raises RuntimeError."""
        guard = threading.Timer(_PATIENCE_SECONDS, self._end)
        guard.daemon = True
        guard.start()
        try:
            yield
            torch.cuda.synchronize()
        finally:
            guard.cancel()
        if self._was_ended:
            raise RuntimeError(f"kernels were still waiting after {_PATIENCE_SECONDS:.0f} s")

    def _end(self) -> None:
        self._was_ended = True
        self.abort.fill_(1)


def fitting_blocks(size: int, most: int) -> int:
    """How many blocks of each rank fit on the GPU, at one block a processor, if all ranks run at once."""
    return max(1, min(most, num_processors() // size))


def num_processors() -> int:
    return torch.cuda.get_device_properties().multi_processor_count


def _check_order(op: str, size: int, numel: int, dtype: torch.dtype) -> Row:
    """Rounds with random delays. `direct` has to give the bits of the reference, and `ring` equal bits."""
    ranks = StreamRanks(size, numel, dtype, MAX_BLOCKS)
    ranks.prepare(op)
    end, rounds = time.monotonic() + _CHECK_SECONDS, 0
    while time.monotonic() < end:
        rounds += 1
        sources = [torch.randn(numel, device="cuda").to(dtype) for _ in range(size)]
        for wire, source in zip(ranks.wires, sources, strict=True):
            wire.copy_(source)
        with ranks.limited():
            ranks.round(op, _SCALE, delays=True)
        expected = torch.empty_like(sources[0])
        reference.accumulate(sources, expected, scale=_SCALE)
        far = 0.25 if dtype.itemsize == 2 else 1e-4  # a ring rounds each sum, and adds in another order
        is_near = torch.allclose(ranks.wires[0].float(), expected.float(), rtol=0.0, atol=far)
        if not is_near or any(not torch.equal(wire, ranks.wires[0]) for wire in ranks.wires):
            raise RuntimeError("the result is wrong")
        if op == "direct" and not torch.equal(ranks.wires[0], expected):
            raise RuntimeError("the result has other bits than the reference")
    return {"is_right": True, "rounds": rounds}


def _time_meeting(op: str, size: int, blocks: int) -> Row:
    """Little to sum for each block, so that time goes into meetings; and the same for one rank, which meets nobody."""
    blocks = fitting_blocks(size, blocks)
    numel = blocks * size * _TILE_NUMEL
    ranks = {name: StreamRanks(n, numel, torch.float32, blocks) for name, n in (("together", size), ("alone", 1))}
    seconds = _time_rounds(ranks, op)
    num_meetings = 2 if op == "direct" else 2 * size - 1  # a ring waits once a step, and once at the end
    each = [(a - b) / num_meetings for a, b in zip(seconds["together"], seconds["alone"], strict=True)]
    of_round = {name: microseconds(own) for name, own in seconds.items()}
    return {"blocks": blocks, "us": microseconds(each), "us_of_a_round": of_round}


def _time_sum(op: str, size: int, numel: int, blocks: int) -> Row:
    ranks = StreamRanks(size, numel, torch.float32, blocks)
    us = microseconds(_time_rounds({"together": ranks}, op)["together"])
    # Each rank reads the slices of all ranks, and writes a slice to all ranks. A ring moves as much.
    return {"blocks": ranks.max_blocks, "us": us, "gb_per_s": 2 * 4 * numel * size / us["p50"] / 1e3}


def _time_rounds(ranks: dict[str, StreamRanks], op: str) -> dict[str, list[float]]:
    """Seconds of a round."""
    with ExitStack() as stack:
        for each in ranks.values():
            each.prepare(op)
            stack.enter_context(each.limited())
        return gpu_seconds({name: partial(each.round, op) for name, each in ranks.items()})


def _time_gemm(blocks: int) -> Row:
    """How much longer a matrix multiplication takes beside blocks that wait for a rank that does not come."""
    factor = torch.randn(_GEMM_SIZE, _GEMM_SIZE, device="cuda").to(torch.bfloat16)
    product = torch.empty_like(factor)

    def multiply() -> None:
        for _ in range(_NUM_GEMMS):
            torch.mm(factor, factor, out=product)

    ranks = StreamRanks(2, _BUCKET_NUMEL, torch.float32, blocks)
    ranks.prepare()
    _stream_seconds(multiply)
    alone, beside = [], []
    for _ in range(3):
        alone.append(_stream_seconds(multiply))
        with ranks.limited():
            with torch.cuda.stream(ranks.streams[0]):
                ranks.launch(0)
            time.sleep(_SETTLE_SECONDS)
            beside.append(_stream_seconds(multiply))
            ranks.abort.fill_(1)
            torch.cuda.synchronize()
        ranks.reset()
    return {
        "blocks": ranks.max_blocks,
        "share_of_processors": ranks.max_blocks / num_processors(),
        "ms_alone": 1e3 * statistics.median(alone) / _NUM_GEMMS,
        "slower_by": statistics.median(beside) / statistics.median(alone) - 1,
    }


def _time_abort() -> Row:
    """From the host's store to the abort word until a kernel that waits has ended, with NaN in its wire."""
    ranks = StreamRanks(2, 70_001, torch.float32, MAX_BLOCKS)
    ranks.prepare()
    with ranks.limited():
        with torch.cuda.stream(ranks.streams[0]):
            ranks.launch(0)
        time.sleep(_SETTLE_SECONDS)
        began = time.perf_counter()
        ranks.abort.fill_(1)
        ranks.streams[0].synchronize()
        seconds = time.perf_counter() - began
    if not bool(ranks.wires[0].isnan().all()):
        raise RuntimeError("the wire of an aborted kernel holds numbers")
    return {"us": microseconds([seconds])}


def _run_one_of_eight() -> Row:
    ranks = StreamRanks(8, _BUCKET_NUMEL, torch.float32, MAX_BLOCKS)
    ranks.let_all_come_early()
    with ranks.limited():
        ranks.launch(0)
    return {"blocks": ranks.max_blocks}


def _stream_seconds(work: Callable[[], None]) -> float:
    """Seconds of work on the current stream. Waits for no other stream."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    begin.record()
    work()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3
