"""Where ranks find each other: a key-value store with deadlines and names in its errors.

The store itself is torch.distributed's (TCPStore under torchrun, HashStore between threads). It carries addresses, plan
descriptions and last words, never gradients.
"""

from __future__ import annotations

import atexit
import copy
import os
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, Final, TypeVar

import torch.distributed as dist
from torch.distributed import Store

from torchring.errors import PeerLostError, PeerTimeoutError, RingError, TopologyError, decode_error, encode_error
from torchring.threads import SerialThread

_T = TypeVar("_T")
_LONGEST_PAUSE_SECONDS: Final = 0.02  # between two looks for a key
_STAY_SECONDS: Final = 1.0  # how long the store outlives a world that is given up, unless all know before


def ended_key(rank: int) -> str:
    """Where a rank whose script has ended says so."""
    return f"ended/{rank}"


class Rendezvous:
    """The store as seen by one rank of one world.

    Args:
        store: shared by exactly the ranks of this world (use a PrefixStore to separate worlds).
        rank: this process, 0 <= rank < size.
        size: number of ranks that this process was told to expect.
        timeout_seconds: how long a rank, or the store, may keep the others waiting.

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
        self._noted: dict[str, bytes] = {}
        self._line = _Line()
        self._stays = False

    def hurried(self, seconds: float) -> Rendezvous:
        """The same, for one who has no more than `seconds` for any one thing."""
        other = copy.copy(self)
        other.timeout_seconds = min(seconds, self.timeout_seconds)
        return other

    def stay_until_published(self, keys: Sequence[str], seconds: float) -> None:
        """If this process hosts the store: it does not end before `keys` are there, or `seconds` from now have passed.

        For ranks that will still ask, each of which publishes a key when it is done. The first call counts.
        """
        if self.store_host == self.rank and not self._stays:
            self._stays = True
            atexit.register(_stay, self.hurried(seconds), keys, time.monotonic() + seconds, os.getpid())

    def agree_on_size(self) -> None:
        """Raise TopologyError on every rank if ranks were told different world sizes, before anyone waits for more."""
        mine = str(self.size)
        agreed = self._call(lambda: self.store.compare_set("size", "", mine)).decode()
        if agreed != mine:
            text = (
                f"rank {self.rank} was started for a world of {mine}, another rank for a world of {agreed}; give every "
                "rank the same WORLD_SIZE"
            )
            error = TopologyError(text, rank=self.rank)
            self.give_up_opening(error)
            raise error

    def check_job(self, job: str) -> None:
        """Raise TopologyError if rank 0, which waits for its own ranks, is of another job; "" is any."""
        if self.rank == 0:
            self.publish("job", job.encode())
            return
        theirs = self.fetch("job", 0).decode()
        if job and theirs and job != theirs:
            raise TopologyError(
                f"rank {self.rank} of job {job} has come to the store of job {theirs}: both use the same address and "
                "port; give one of the two another MASTER_PORT",
                rank=self.rank,
            )

    def claim_rank(self) -> None:
        """Raise TopologyError if another process has this rank already."""
        mine = f"pid {os.getpid()} on {socket.gethostname()}"
        token = secrets.token_hex(8)  # that text may be the same in two containers
        claimed = self._call(lambda: self.store.compare_set(f"claimed/{self.rank}", "", f"{token} {mine}")).decode()
        token_of_first, _, first = claimed.partition(" ")
        if token_of_first != token:
            text = (
                f"two processes were started as rank {self.rank} of {self.size}: {first}, and {mine}; give every "
                "process a RANK of its own, and every job a MASTER_PORT of its own. If the first one has ended, the "
                "store has outlived it: start all ranks again, with a store of their own"
            )
            error = TopologyError(text, rank=self.rank)
            self.give_up_opening(error)
            raise error

    def confirm_opening(self) -> None:
        """Say that all ranks have met: who comes later is a stranger, and cannot give up for them."""
        if self.rank == 0:
            self.publish("open", b"")

    def give_up_opening(self, error: RingError) -> None:
        """Have every rank raise `error`, unless all have met."""
        if not self.is_published("open"):
            self.give_up(error)

    def publish(self, key: str, value: bytes) -> None:
        """Make `value` readable by every rank under `key`. Does not wait."""
        self._call(lambda: self.store.set(key, value))  # type: ignore[arg-type]  # takes bytes, too

    def note(self, key: str, value: bytes) -> None:
        """As `publish`, but only what this rank notes first under `key`, be it through a `hurried` one, counts."""
        if self._noted.setdefault(key, value) is value:
            self.publish(key, value)

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
                try:
                    self.watch((owner,))
                except RingError:
                    if self.is_published(key):  # the owner left after it had published
                        break
                    raise
            self.raise_if_given_up()
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

    def give_up(self, error: RingError) -> None:
        """Have every rank that waits in `fetch`, now or later, raise `error`: what it waits for will not come."""
        self._call(lambda: self.store.set("gave_up", encode_error(error)))  # type: ignore[arg-type]  # takes bytes, too

    def raise_if_given_up(self) -> None:
        """Raise what a rank gave up with."""
        if self.is_published("gave_up"):
            self.publish(f"told/{self.rank}", b"")
            self.stay_until_published([f"told/{rank}" for rank in range(self.size)], _STAY_SECONDS)
            error = decode_error(self._call(lambda: self.store.get("gave_up")), None)
            error.rank = self.rank
            raise error

    def _call(self, operation: Callable[[], _T]) -> _T:
        host = "the launcher" if self.store_host is None else f"rank {self.store_host}"
        peers = () if self.store_host is None else (self.store_host,)
        try:
            return self._line.call(operation, self.timeout_seconds)
        except FutureTimeout:
            raise PeerTimeoutError(
                f"the rendezvous store, which {host} hosts, did not answer within {self.timeout_seconds:g} s; the way "
                "there is cut, or its host is down",
                rank=self.rank,
                peers=peers,
            ) from None
        except dist.DistError as error:
            raise PeerLostError(
                f"the rendezvous store is out of reach, so the process that hosts it, {host}, is gone ({error})",
                rank=self.rank,
                peers=peers,
            ) from error


class _Line:
    """Calls of a store with a deadline: on a thread of their own, one after the other.

    Where the way there is cut, TCPStore waits for as long as TCP does, whatever it was told.
    """

    def __init__(self) -> None:
        self._worker = SerialThread("torchring-store")
        self._submitting = threading.RLock()  # a signal handler may call, too
        self._unanswered: Future[Any] | None = None
        self._broken: dist.DistNetworkError | None = None
        # When nobody can call any more. At exit the thread ends by itself.
        weakref.finalize(self, self._worker.close).atexit = False

    def call(self, operation: Callable[[], _T], seconds: float) -> _T:
        """What `operation` returns or raises. FutureTimeout if it takes longer, or an earlier one still does."""
        with self._submitting:
            if self._broken is not None:  # for good, and each try would print a warning
                raise self._broken
            if self._unanswered is not None and not self._unanswered.done():
                raise FutureTimeout
            future = self._worker.submit(operation)
        try:
            return future.result(seconds)
        except FutureTimeout:
            self._unanswered = future
            raise
        except dist.DistNetworkError as error:
            self._broken = error
            raise


def _stay(rendezvous: Rendezvous, keys: Sequence[str], end: float, pid: int) -> None:
    """See `stay_until_published`. Not in a fork, which does not host the store."""
    if os.getpid() != pid:
        return
    try:
        while time.monotonic() < end and not all(rendezvous.is_published(key) for key in keys):
            time.sleep(_LONGEST_PAUSE_SECONDS)
    except RingError:  # the store is gone
        return
