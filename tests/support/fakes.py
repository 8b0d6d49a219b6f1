"""A transport whose network is a dictionary in this process: ranks are threads, and nothing depends on sockets.

It follows the contract to the letter and no further: a tensor is read when sender and receiver have both started, so
whoever changes one before `wait` has returned is found out.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from torchring.errors import PeerLostError, PeerTimeoutError, RingError

Link = tuple[str, int, int]  # stream, sender, receiver


class FakeNetwork:
    """Links between `size` ranks. `transport(rank, stream)` is one rank's end of one stream."""

    def __init__(self, size: int, timeout_seconds: float = 20.0) -> None:
        self.size = size
        self.timeout_seconds = timeout_seconds
        self.dead: set[int] = set()
        self.closed: set[tuple[str, int]] = set()
        self.changed = threading.Condition()
        self.sends: defaultdict[Link, deque[FakeTransfer]] = defaultdict(deque)
        self.receives: defaultdict[Link, deque[FakeTransfer]] = defaultdict(deque)
        self.gathered: defaultdict[tuple[str, int], dict[int, torch.Tensor]] = defaultdict(dict)  # (stream, turn)

    def transport(self, rank: int, stream: str = "stream") -> FakeTransport:
        return FakeTransport(self, rank, stream)

    def kill(self, rank: int) -> None:
        """The rank dies: whoever waits, now or later, hears of it."""
        with self.changed:
            self.dead.add(rank)
            self.changed.notify_all()


@dataclass
class FakeSum:
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

    def send(self, tensor: torch.Tensor, peer: int) -> FakeTransfer:
        return self._start(tensor, peer, (self._stream, self.rank, peer), sends=True)

    def receive(self, tensor: torch.Tensor, peer: int) -> FakeTransfer:
        return self._start(tensor, peer, (self._stream, peer, self.rank), sends=False)

    def sums(self, dtype: torch.dtype) -> bool:
        return dtype in (torch.int64, torch.float16, torch.bfloat16, torch.float32, torch.float64)

    def start_all_reduce(self, tensor: torch.Tensor) -> FakeSum:
        if not tensor.is_contiguous() or not self.sums(tensor.dtype):
            raise ValueError(f"the fake does not add up {tensor.dtype} with strides {tensor.stride()}")
        gather = self._start_gather(tensor)
        return FakeSum(functools.cache(lambda: tensor.copy_(torch.stack(gather()).sum(0))))

    def _start_gather(self, tensor: torch.Tensor) -> Callable[[], list[torch.Tensor]]:
        """Gives `tensor` to all ranks. Returns a function that waits for theirs."""
        with self._network.changed:
            parts = self._network.gathered[self._stream, self._num_gathers]
            self._num_gathers += 1
            parts[self.rank] = tensor.clone()
            self._network.changed.notify_all()
        return lambda: self._gather(parts)

    def _gather(self, parts: dict[int, torch.Tensor]) -> list[torch.Tensor]:
        network = self._network
        started = time.monotonic()
        with network.changed:

            def missing() -> list[int]:
                return [rank for rank in self.ranks if rank not in parts]

            def gone() -> list[int]:
                return [r for r in missing() if r in network.dead or (self._stream, r) in network.closed]

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

    def _start(self, tensor: torch.Tensor, peer: int, link: Link, *, sends: bool) -> FakeTransfer:
        if not tensor.is_contiguous():
            raise ValueError(f"a transport moves contiguous tensors, got strides {tensor.stride()}")
        network = self._network
        transfer = FakeTransfer(network, self._stream, self.rank, peer, tensor.detach().reshape(-1).view(torch.uint8))
        with network.changed:
            if (self._stream, self.rank) in network.closed:
                raise PeerLostError("this transport is closed", rank=self.rank)
            (network.sends if sends else network.receives)[link].append(transfer)
            while network.sends[link] and network.receives[link]:
                source, target = network.sends[link].popleft(), network.receives[link].popleft()
                target.data.copy_(source.data)
                source.done = target.done = True
            network.changed.notify_all()
        return transfer


class FakeTransfer:
    """See `Transfer`."""

    def __init__(self, network: FakeNetwork, stream: str, rank: int, peer: int, data: torch.Tensor) -> None:
        self.data = data
        self.done = False
        self._network, self._stream, self._rank, self._peer = network, stream, rank, peer

    def wait(self) -> None:
        network, peer = self._network, self._peer
        started = time.monotonic()
        with network.changed:
            network.changed.wait_for(lambda: self.done or self._lost(), network.timeout_seconds)
            seconds = time.monotonic() - started
            if self.done:
                return
            if self._lost():
                culprits = network.dead or {peer}
                raise PeerLostError("peers are gone", rank=self._rank, peers=sorted(culprits), seconds=seconds)
            raise PeerTimeoutError("no answer", rank=self._rank, peers=(peer,), seconds=seconds)

    def _lost(self) -> bool:
        network = self._network
        return bool(network.dead) or not {(self._stream, self._peer), (self._stream, self._rank)}.isdisjoint(
            network.closed
        )
