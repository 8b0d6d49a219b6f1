"""Ranks as streams of one process, which share one GPU: for `streams.py`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

import torch

from torchring.allreduce.slices import slice_bounds
from torchring.kernels import prepare_direct, prepare_ring
from torchring.kernels.signals import signal_bytes

_PATIENCE_SECONDS: Final = 20.0
_LONGEST_DELAY_CYCLES: Final = 60_000


class StreamRanks:
    """Ranks that share a device and a process. Rank r has stream r, with high priority.

    Attributes:
        wires: [numel] of each rank.
        abort: int32 [1] on the host, which all kernels look at.
        max_blocks: of a rank: at most a share of the processors, so that all blocks fit on the device.
    """

    def __init__(self, device: torch.device, size: int, numel: int, dtype: torch.dtype, max_blocks: int) -> None:
        self.device, self.size = device, size
        self.max_blocks = fitting_blocks(device, size, max_blocks)
        self.wires = [torch.zeros(numel, dtype=dtype, device=device) for _ in range(size)]
        words = signal_bytes(size, self.max_blocks) // 4
        self._pads = [torch.zeros(words, dtype=torch.int32, device=device) for _ in range(size)]
        self._wire_addresses = torch.tensor([wire.data_ptr() for wire in self.wires], device=device)
        self._pad_addresses = torch.tensor([pad.data_ptr() for pad in self._pads], device=device)
        self._bounds = slice_bounds(numel, size, dtype.itemsize)
        is_cuda = device.type == "cuda"
        self.abort = torch.zeros(1, dtype=torch.int32, pin_memory=is_cuda)
        self._launches: dict[tuple[int, str, float], Callable[[], None]] = {}
        self._streams: list[torch.cuda.Stream] = []  # none on the CPU
        if is_cuda:
            self._streams = [torch.cuda.Stream(device, priority=-1) for _ in range(size)]  # type: ignore[no-untyped-call]
        self._synchronize()

    def launch(self, rank: int, op: str = "direct", scale: float = 1.0) -> None:
        """Launch a rank's kernel in the current stream. It is prepared at the first launch, as for a bucket."""
        key = rank, op, scale
        if key not in self._launches:
            self._launches[key] = self._prepared(rank, op, scale)
        self._launches[key]()

    def _prepared(self, rank: int, op: str, scale: float) -> Callable[[], None]:
        addresses = (self._wire_addresses, self._pad_addresses)
        if op == "ring":
            return prepare_ring(
                *addresses, self.wires[rank], rank=rank, num_ranks=self.size,
                scale=scale, abort=self.abort, max_blocks=self.max_blocks,
            )  # fmt: skip
        begin, end = self._bounds[rank]
        return prepare_direct(
            *addresses, self.wires[rank], rank=rank, num_ranks=self.size, begin=begin, end=end,
            scale=scale, abort=self.abort, max_blocks=self.max_blocks,
        )  # fmt: skip

    def prepare(self, op: str = "direct") -> None:
        """Compile and load all kernels. A kernel that was loaded while others wait for it might never be loaded."""
        self.abort.fill_(1)
        for rank in range(self.size):
            self.launch(rank, op)
        self._synchronize()
        self.reset()

    def reset(self) -> None:
        """Make ready for another round after an abort. No kernel may run."""
        self.abort.zero_()
        for tensor in (*self._pads, *self.wires):
            tensor.zero_()
        self._synchronize()

    def rounds(self, count: int, op: str = "direct", scale: float = 1.0, *, delays: bool = False) -> None:
        """Launch rounds of all ranks, between what the current stream did before and what it does next.

        delays: whether each kernel comes late by a random time.
        """
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream(self.device))
        for _ in range(count):
            for rank in range(self.size):
                with self.stream(rank):
                    if delays and self._streams:
                        torch.cuda._sleep(int(torch.randint(1, _LONGEST_DELAY_CYCLES, (1,))))  # type: ignore[no-untyped-call]
                    self.launch(rank, op, scale)
        for stream in self._streams:
            torch.cuda.current_stream(self.device).wait_stream(stream)

    def stream(self, rank: int) -> AbstractContextManager[Any]:
        """Inside, the stream of a rank is the current one."""
        return torch.cuda.stream(self._streams[rank]) if self._streams else nullcontext()

    def wait_for(self, rank: int) -> None:
        """The host waits for the stream of a rank."""
        if self._streams:
            self._streams[rank].synchronize()

    @contextmanager
    def ended_in_time(self) -> Iterator[None]:
        """Inside, kernels are aborted if they have not ended after a while."""
        guard = threading.Timer(_PATIENCE_SECONDS, self.abort.fill_, (1,))
        guard.daemon = True
        guard.start()
        try:
            yield
            self._synchronize()
        finally:
            guard.cancel()

    @contextmanager
    def limited(self) -> Iterator[None]:
        """Raises RuntimeError at the end if kernels had to be aborted, because they did not end by themselves."""
        with self.ended_in_time():
            yield
        if int(self.abort):
            raise RuntimeError(f"kernels were still waiting after {_PATIENCE_SECONDS:.0f} s")

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def fitting_blocks(device: torch.device, size: int, most: int) -> int:
    """How many blocks of each rank fit on the device, at one block a processor, if all ranks run at once."""
    return max(1, min(most, num_processors(device) // size))


def num_processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; in a dry run, some number."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 8
