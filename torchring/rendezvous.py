"""Where ranks find each other: a key-value store with deadlines and names in its errors.

The store itself is torch.distributed's (TCPStore under torchrun, HashStore between threads). It carries addresses, plan
descriptions and last words, never gradients.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

import torch.distributed as dist
from torch.distributed import Store

from torchring.errors import PeerLostError, PeerTimeoutError, TopologyError

_T = TypeVar("_T")
_LONGEST_PAUSE_SECONDS: Final = 0.02  # between two looks for a key


class Rendezvous:
    """The store as seen by one rank of one world.

    Args:
        store: shared by exactly the ranks of this world (use a PrefixStore to separate worlds).
        rank: this process, 0 <= rank < size.
        size: number of ranks that this process was told to expect.
        timeout_seconds: how long a rank may keep the others waiting.

    Attributes:
        watch: raises if one of the given ranks is known to be dead; None while nobody knows.
        store_host: the rank whose process hosts the store, None if it is no rank's.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout_seconds: float) -> None:
        self.store = store
        self.rank = rank
        self.size = size
        self.timeout_seconds = timeout_seconds
        self.watch: Callable[[Sequence[int]], None] | None = None
        self.store_host: int | None = None
        self._num_exchanges: dict[str, int] = {}

    def agree_on_size(self) -> None:
        """Raise TopologyError on every rank if ranks were told different world sizes, before anyone waits for more."""
        mine = str(self.size)
        agreed = self._call(lambda: self.store.compare_set("size", "", mine)).decode()
        if agreed != mine:
            text = f"rank {self.rank} was started for a world of {mine}, another rank for a world of {agreed}"
            self.give_up(text)
            raise TopologyError(text + "; give every rank the same WORLD_SIZE", rank=self.rank)

    def publish(self, key: str, value: bytes) -> None:
        """Make `value` readable by every rank under `key`. Does not wait."""
        self._call(lambda: self.store.set(key, value))  # type: ignore[arg-type]  # takes bytes, too

    def fetch(self, key: str, owner: int) -> bytes:
        """Wait for `key`, which rank `owner` publishes.

        Raises PeerTimeoutError naming the owner when it does not come, or what another rank gave up with.
        """
        started = time.monotonic()
        pause = 0.0005
        # Polling, because TCPStore.wait with a short timeout prints a C++ warning each time the timeout passes.
        while not self.is_published(key):
            waited = time.monotonic() - started
            if waited > self.timeout_seconds:
                raise PeerTimeoutError(
                    f"rank {owner} did not publish {key!r}; it is stuck, was never started, or cannot reach the store",
                    rank=self.rank,
                    peers=(owner,),
                    seconds=waited,
                )
            if self.watch is not None:
                self.watch((owner,))
            if self.is_published("gave_up"):
                raise TopologyError(self._call(lambda: self.store.get("gave_up")).decode(), rank=self.rank)
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE_SECONDS)
        value: bytes = self._call(lambda: self.store.get(key))
        return value

    def exchange(self, name: str, value: bytes) -> list[bytes]:
        """All-gather of small values: returns what every rank passed, in rank order. Every rank must call it."""
        count = self._num_exchanges.get(name, 0)
        self._num_exchanges[name] = count + 1
        self.publish(f"{name}/{count}/{self.rank}", value)
        return [self.fetch(f"{name}/{count}/{rank}", rank) for rank in range(self.size)]

    def is_published(self, key: str) -> bool:
        """Whether `key` is there already; never waits."""
        return bool(self._call(lambda: self.store.check([key])))

    def give_up(self, text: str) -> None:
        """Tell every rank that waits in `fetch`, now or later, that this world will not come to be."""
        self._call(lambda: self.store.set("gave_up", text))

    def _call(self, operation: Callable[[], _T]) -> _T:
        try:
            return operation()
        except dist.DistError as error:
            host = "the launcher" if self.store_host is None else f"rank {self.store_host}"
            raise PeerLostError(
                f"the rendezvous store is out of reach, so the process that hosts it, {host}, is gone ({error})",
                rank=self.rank,
                peers=() if self.store_host is None else (self.store_host,),
            ) from error
