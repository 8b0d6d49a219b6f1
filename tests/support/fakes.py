"""A transport whose network is a dictionary in this process: ranks are threads, and nothing depends on sockets."""

from __future__ import annotations

import functools
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch

from torchring.errors import PeerLostError, PeerTimeoutError, RingError


class FakeNetwork:
    """Connects `size` ranks. `transport(rank, stream)` is one rank's end of one stream."""

    def __init__(self, size: int, timeout_seconds: float = 20.0) -> None:
        self.size = size
        self.timeout_seconds = timeout_seconds
        self.dead: set[int] = set()
        self.closed: set[tuple[str, int]] = set()
        self.changed = threading.Condition()
        self.gathered: defaultdict[tuple[object, ...], dict[int, torch.Tensor]] = defaultdict(dict)

    def transport(self, rank: int, stream: str = "stream") -> FakeTransport:
        return FakeTransport(self, rank, stream)

    def kill(self, rank: int) -> None:
        """The rank dies: whoever waits, now or later, hears of it."""
        with self.changed:
            self.dead.add(rank)
            self.changed.notify_all()


@dataclass
class FakeTransfer:
    """See `Transfer`."""

    wait: Callable[[], object]


class FakeTransport:
    """See `Transport`."""

    engine = "fake"

    def __init__(self, network: FakeNetwork, rank: int, stream: str) -> None:
        self._num_gathers = 0
        self.rank = rank
        self.ranks = tuple(range(network.size))
        self._network = network
        self._stream = stream

    def sums(self, dtype: torch.dtype) -> bool:
        return dtype in (torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64)

    def start_all_reduce(self, tensor: torch.Tensor) -> FakeTransfer:
        return self._start(tensor, "sum", lambda parts: torch.stack(parts).sum(0))

    def start_broadcast(self, tensor: torch.Tensor, src: int) -> FakeTransfer:
        return self._start(tensor, f"from {src}", lambda parts: parts[src])

    def _start(
        self, tensor: torch.Tensor, what: str, result: Callable[[list[torch.Tensor]], torch.Tensor]
    ) -> FakeTransfer:
        """Gives `tensor` to all ranks that do the same."""
        if not tensor.is_contiguous():
            raise ValueError(f"a transport moves contiguous tensors, got strides {tensor.stride()}")
        with self._network.changed:
            if (self._stream, self.rank) in self._network.closed:
                raise PeerLostError("this transport is closed", rank=self.rank)
            parts = self._network.gathered[self._stream, self._num_gathers, what]
            self._num_gathers += 1
            parts[self.rank] = tensor.clone()
            self._network.changed.notify_all()
        return FakeTransfer(functools.cache(lambda: tensor.copy_(result(self._gather(parts)))))

    def _gather(self, parts: dict[int, torch.Tensor]) -> list[torch.Tensor]:
        network = self._network
        started = time.monotonic()
        with network.changed:

            def missing() -> list[int]:
                return [rank for rank in self.ranks if rank not in parts]

            def gone() -> list[int]:
                closed = [rank for rank in self.ranks if (self._stream, rank) in network.closed]
                return [r for r in missing() if r in network.dead or r in closed or self.rank in closed]

            network.changed.wait_for(lambda: not missing() or gone(), network.timeout_seconds)
            seconds = time.monotonic() - started
            if lost := gone():
                raise PeerLostError("peers are gone", rank=self.rank, peers=lost, seconds=seconds)
            if late := missing():
                raise PeerTimeoutError("no answer", rank=self.rank, peers=late, seconds=seconds)
            return [parts[rank] for rank in self.ranks]

    def fail(self, error: RingError) -> RingError:
        self.close()
        return error

    def close(self) -> None:
        with self._network.changed:
            self._network.closed.add((self._stream, self.rank))
            self._network.changed.notify_all()
