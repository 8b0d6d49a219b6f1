"""Figures: the kernels of one GPU. See `qa.gpu.check`.

Ranks are streams of one process. Processes that share a GPU take turns in time slices. All blocks of streams are on the
GPU at once, as they are on GPUs of their own.
"""

import threading
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any, Final

import torch
from torch import Tensor

from qa.gpu.check import Figure
from torchring.allreduce.slices import slice_bounds
from torchring.bench.gpu.packing import shapes_of, share_of_a_copy
from torchring.bench.gpu.timing import event, gpu_seconds, sleep
from torchring.devices.engines import _WAITING_SHARE
from torchring.kernels.direct import prepare_direct
from torchring.kernels.signals import MAX_BLOCKS, block_words, signal_bytes

_BUCKET_NUMEL: Final = 6_553_600  # fp32, 25 MiB
_MANY_MEETINGS: Final = 1_000_000  # more than any rank comes to
_PATIENCE_SECONDS: Final = 15.0
_SETTLE_SECONDS: Final = 0.005  # until a kernel that was launched waits
_REPETITIONS: Final = 7


def figures() -> Iterator[Figure]:
    yield from _direct()
    yield from _abort()
    yield from _late_peers()
    yield from _gemm()
    yield from _packing()


class _Ranks:
    """Ranks that share a GPU and a process. Rank r has stream r."""

    def __init__(self, wires: list[Tensor], *, blocks: int = MAX_BLOCKS, sums: bool = True) -> None:
        """sums: False leaves the meetings alone."""
        self.wires = wires  # of each rank, fp32
        size, numel = len(wires), wires[0].numel()
        self._pads = [torch.zeros(signal_bytes(size, blocks) // 4, dtype=torch.int32, device="cuda") for _ in wires]
        # On the host, int32 [1], which all kernels look at. It is set after a while, as a hang would be for ever.
        self.abort = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self.streams = [torch.cuda.Stream() for _ in wires]  # type: ignore[no-untyped-call]
        addresses, signals = (torch.tensor([t.data_ptr() for t in own], device="cuda") for own in (wires, self._pads))
        bounds = slice_bounds(numel, size, 4) if sums else [(0, 0)] * size
        of_all: Any = {"num_ranks": size, "abort": self.abort, "max_blocks": blocks}
        self.launches = [  # of rank r's kernel of `direct`, in the current stream
            prepare_direct(addresses, signals, wire, rank=rank, begin=begin, end=end, **of_all)
            for rank, (wire, (begin, end)) in enumerate(zip(wires, bounds, strict=True))
            if wire.is_cuda
        ]
        self.come_early()  # a kernel that is loaded while others wait for it might never be loaded
        for launch in self.launches:
            launch()
        self.reset()
        timer = threading.Timer(_PATIENCE_SECONDS, self.abort.fill_, [1])
        timer.daemon = True
        timer.start()

    def come_early(self) -> None:
        """All ranks find the signals of all others there. No kernel may run."""
        for rank, pad in enumerate(self._pads):
            words = pad.view(-1, block_words(len(self.wires)))[:, : len(self.wires)]
            words.fill_(_MANY_MEETINGS)
            words[:, rank] = 0

    def reset(self) -> None:
        """Make ready for a round, after an abort, too."""
        torch.cuda.synchronize()
        self.abort.zero_()
        for pad in self._pads:
            pad.zero_()
        torch.cuda.synchronize()

    def launch(self, rank: int) -> None:
        with torch.cuda.stream(self.streams[rank]):
            self.launches[rank]()


def _wires(size: int, numel: int = _BUCKET_NUMEL) -> list[Tensor]:
    return [torch.zeros(numel, device="cuda") for _ in range(size)]


def _direct() -> Iterator[Figure]:
    """One rank sums a wire of its own: loads and stores. With another rank's wire in host memory, over PCIe."""
    num_processors = torch.cuda.get_device_properties().multi_processor_count
    alone = {blocks: _Ranks(_wires(1), blocks=blocks) for blocks in (MAX_BLOCKS, num_processors)}
    works: dict[str, Callable[[], object]] = {str(blocks): ranks.launches[0] for blocks, ranks in alone.items()}
    us = {name: 1e6 * median(seconds) for name, seconds in gpu_seconds(works).items()}
    yield Figure(f"direct of one rank, 25 MiB, {num_processors} blocks", us[str(num_processors)], "us", 27)
    yield Figure(
        f"direct of one rank, 25 MiB, {MAX_BLOCKS} blocks (51 with 16 KiB under way)", us[str(MAX_BLOCKS)], "us", 40
    )
    apart = _Ranks([torch.zeros(2**20, device="cuda"), torch.zeros(2**20).pin_memory()], blocks=1)
    apart.come_early()
    (seconds,) = gpu_seconds({"one block": apart.launches[0]}).values()
    rate = 4 * 2**19 / median(seconds) / 1e9
    yield Figure("a block's reads from a peer's wire in host memory", rate, "GB/s", 10, at_least=True)


def _abort() -> Iterator[Figure]:
    """From the host's store to the abort word until all kernels have ended, which wait for the last rank."""
    ranks, ms = _Ranks(_wires(8)), []
    for _ in range(_REPETITIONS):
        for rank in range(7):
            ranks.launch(rank)
        time.sleep(_SETTLE_SECONDS)
        began = time.perf_counter()
        ranks.abort.fill_(1)
        torch.cuda.synchronize()
        ms.append(1e3 * (time.perf_counter() - began))
        if not all(bool(wire.isnan().all()) for wire in ranks.wires[:7]):
            raise RuntimeError("the wire of an aborted kernel holds numbers")
        ranks.reset()
    yield Figure(f"seven ranks that wait in {MAX_BLOCKS} blocks each have ended after an abort", max(ms), "ms", 5)


def _late_peers() -> Iterator[Figure]:
    """How much longer two meetings take, from when the late rank begins, than if it finds all signals there."""
    ranks = _Ranks(_wires(2), sums=False)

    def after_late(skew: float | None) -> float:
        """skew: seconds that rank 1 is late; None if rank 0 has been there long ago."""
        torch.cuda.synchronize()
        if skew is None:
            ranks.come_early()
        sleep(2e-3)
        for stream in ranks.streams:
            stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(ranks.streams[1]):
            sleep(skew or 0.0)
            begin = event()
            ranks.launches[1]()
            ends = [event()]
        if skew is not None:
            with torch.cuda.stream(ranks.streams[0]):
                ranks.launches[0]()
                ends.append(event())
        ranks.reset()
        return max(1e3 * float(begin.elapsed_time(end)) for end in ends)

    alone = median(after_late(None) for _ in range(_REPETITIONS))
    for us in (5, 25, 35, 50, 100, 500):
        longer = median(after_late(1e-6 * us) for _ in range(_REPETITIONS)) - alone
        yield Figure(f"two meetings with a peer that is {us} us late, beyond {alone:.1f} us", longer, "us", 6)


def _gemm() -> Iterator[Figure]:
    """A matrix product beside blocks that wait for a rank that does not come."""
    factor = torch.randn(8192, 8192, device="cuda").to(torch.bfloat16)
    product = torch.empty_like(factor)
    blocks = min(MAX_BLOCKS, torch.cuda.get_device_properties().multi_processor_count // _WAITING_SHARE)
    ranks = _Ranks(_wires(2), blocks=blocks)
    ms: dict[bool, list[float]] = {False: [], True: []}
    for repetition in range(-1, _REPETITIONS):
        for is_beside, own in ms.items():
            if is_beside:
                ranks.launch(0)
                time.sleep(_SETTLE_SECONDS)
            begin = event()
            for _ in range(5):
                torch.mm(factor, factor, out=product)
            end = event()
            end.synchronize()
            ranks.abort.fill_(1)
            ranks.reset()
            if repetition >= 0:
                own.append(begin.elapsed_time(end))
    slower = median(ms[True]) / median(ms[False]) - 1
    yield Figure(f"a product of 8192 x 8192 beside {blocks} blocks that wait, slower by", slower, "", 0.2)


def _packing() -> Iterator[Figure]:
    for load, least in (("gpt2", 0.93), ("tiny", 0.70)):
        for op, source, target in (
            ("pack", torch.float32, torch.float32),
            ("unpack", torch.float32, torch.float32),
            ("pack", torch.float32, torch.bfloat16),
        ):
            share = share_of_a_copy(op, shapes_of(load), source, target)
            name = f"{op} {load} {source} to {target}, over a copy's rate".replace("torch.", "")
            yield Figure(name, share, "", least, at_least=True)
