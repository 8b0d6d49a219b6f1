"""Ranks find each other through a key-value store. Calls have deadlines, and errors name the missing rank.

The store is torch.distributed's: a TCPStore between processes, a HashStore between threads. The store carries
addresses, descriptions of plans and notices of ranks, never gradients.
"""

import atexit
import copy
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, Final, NoReturn, TypeVar

import torch.distributed as dist
from torch.distributed import PrefixStore, Store

from torchring.errors import (
    PeerLostError,
    PeerTimeoutError,
    RingError,
    TopologyError,
    decode_error,
    encode_error,
    in_group,
    ranks_in_words,
)
from torchring.linux import has_ended, host_name, process_id
from torchring.threads import SerialThread, is_done_within

_logger: Final = logging.getLogger("torchring")
_T = TypeVar("_T")
_LONGEST_PAUSE_SECONDS: Final = 0.02  # between two checks for a key
_LOOK_SECONDS: Final = 0.25  # between two looks at the process of a rank that is waited for
_STAY_SECONDS: Final = 1.0  # how long the store outlives a world that was given up, so that every rank learns why


def notice_key(rank: int) -> str:
    """The key under which a rank says why it has failed or left; see `Noticeboard`."""
    return f"notice/{rank}"


def within(store: Store, name: str) -> Store:
    """Keys of a store that begin with `name`. PrefixStore keeps no Python store alive: `SignedStore` has a method."""
    of_python: Callable[[str], Store] | None = getattr(store, "within", None)
    return PrefixStore(name, store) if of_python is None else of_python(name)


class Rendezvous:
    """The store as seen by one rank of one world.

    Args:
        store: shared by exactly the ranks of this world (use a PrefixStore to separate worlds).
        rank: this process, 0 <= rank < size.
        size: number of ranks that this process was told to expect.
        timeout_seconds: how long a rank, or the store, may keep the others waiting.
        members: the ranks of the job, if the world is of a group of them.
    """

    def __init__(self, store: Store, rank: int, size: int, timeout_seconds: float, members: Sequence[int] = ()) -> None:
        self.store = store
        self.rank = rank
        self.size = size
        self.timeout_seconds = timeout_seconds
        self.members = members
        # raises if one of the given ranks is known to be dead. None until there is a way to know.
        self.watch: Callable[[Sequence[int]], None] | None = None
        # the rank whose process hosts the store. None if another process hosts the store.
        self.store_host: int | None = None
        self.is_one_host = False  # whether the launcher says that all ranks run on this host
        # called now and then while this rank waits for ranks: with the ranks, and the seconds so far. Called without
        # ranks when the wait is over.
        self.on_wait: Callable[[Sequence[int], float], None] | None = None
        self._num_all_gathers: dict[str, int] = {}
        self._published_once: dict[str, bytes] = {}
        self._claims: dict[int, str] = {}
        self._store_calls = _CallsWithDeadline()

    @property
    def is_signed(self) -> bool:
        """Whether ranks know by a secret of the launcher that the others belong to it."""
        return hasattr(self.store, "within")

    def warn_of_absent(self, limit: float) -> None:
        """Have `on_wait` log one warning when this rank has waited for `limit` seconds for a rank. 0: no warning."""
        has_warned, rank, members = limit == 0, self.rank, self.members  # without self: copies keep on_wait

        def on_wait(ranks: Sequence[int], seconds: float) -> None:
            nonlocal has_warned
            if not has_warned and ranks and seconds >= limit:
                has_warned = True
                where = "opening the group" if members else "torchring.init()"
                text = (
                    f"rank {rank} has waited for {seconds:.{0 if seconds >= 10 else 1}f} s in {where} "
                    f"for {ranks_in_words(ranks)}, which {'has' if len(ranks) == 1 else 'have'} not come there yet, or "
                    "cannot reach the store"
                )
                _logger.warning("%s", in_group(text, members))

        self.on_wait = on_wait

    def with_timeout(self, seconds: float) -> "Rendezvous":
        """The same rendezvous with a shorter timeout: `seconds` for each call, unless its own timeout is shorter."""
        other = copy.copy(self)
        other.timeout_seconds = min(seconds, self.timeout_seconds)
        return other

    def stay_until_published(self, keys: Sequence[str], seconds: float) -> None:
        """Have this process, if it hosts the store, not exit before `keys` are published or `seconds` have passed.

        Other ranks may still need the store; each of them publishes one of `keys` when it is done.
        """
        if self.store_host == self.rank:
            atexit.register(_stay, self.with_timeout(seconds), keys, time.monotonic() + seconds, os.getpid())

    def agree_on_size(self) -> None:
        """Raise TopologyError on every rank if ranks were told different world sizes. Does not wait for other ranks."""
        mine = str(self.size)
        agreed = self._call(lambda: self.store.compare_set("size", "", mine)).decode()
        if agreed != mine:
            self.refuse(
                f"rank {self.rank} was started for a world of {mine}, another rank for a world of {agreed}; give every "
                "rank the same WORLD_SIZE"
            )

    def check_job(self, job: str) -> None:
        """Raise TopologyError if rank 0 belongs to another job. The job "" fits all jobs."""
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
        mine = f"pid {os.getpid()} on {host_name()}"
        token = f"{secrets.token_hex(8)}/{process_id()}"  # `mine` may be the same text in two containers
        claimed = self._call(lambda: self.store.compare_set(f"claimed/{self.rank}", "", f"{token} {mine}")).decode()
        token_of_first, _, first = claimed.partition(" ")
        if token_of_first != token:
            self.refuse(
                f"two processes were started as rank {self.rank} of {self.size}: {first}, and {mine}; give every "
                "process a RANK of its own, and every job a MASTER_PORT of its own. If the first one has ended, the "
                "store has outlived it: start all ranks again, with a store of their own"
            )

    def host_of(self, rank: int) -> str:
        """The name of the host on which a rank has claimed its number. "" if it has claimed none."""
        return self._claim_of(rank).rpartition(" ")[2]

    def error_of_ended(self, ranks: Iterable[int]) -> RingError | None:
        """The error if the process of a rank that is on this host, and has claimed its number, has ended."""
        for rank in ranks:
            token, _, who = self._claim_of(rank).partition(" ")
            if has_ended(token.partition("/")[2]):
                self.raise_if_given_up()
                if self.is_published(notice_key(rank)):
                    return decode_error(self.fetch(notice_key(rank), rank), rank)
                text = f"rank {rank} ({who}) has ended, in torchring.init() or after it. Its own output may say why"
                return PeerLostError(text, rank=self.rank, peers=(rank,))
        return None

    def run(self) -> str:
        """A text that no other run has: that with which rank 0 has claimed its number."""
        return self._claim_of(0).partition(" ")[0]

    def _claim_of(self, rank: int) -> str:
        key = f"claimed/{rank}"
        if rank not in self._claims and self.is_published(key):
            self._claims[rank] = self._call(lambda: self.store.get(key)).decode()
        return self._claims.get(rank, "")

    def refuse(self, text: str) -> NoReturn:
        """Raise TopologyError; on every rank, unless all ranks have met already."""
        error = TopologyError(text, rank=self.rank)
        if not self.is_published("open"):
            self.give_up(error)
        raise error

    def publish(self, key: str, value: bytes) -> None:
        """Make `value` readable by every rank under `key`. Does not wait for other ranks."""
        self._call(lambda: self.store.set(key, value))  # type: ignore[arg-type]  # takes bytes, too

    def publish_once(self, key: str, value: bytes) -> None:
        """As `publish`, but later calls with the same `key` have no effect, `with_timeout` copies included."""
        if self._published_once.setdefault(key, value) is value:
            self.publish(key, value)

    def fetch(self, key: str, owner: int) -> bytes:
        """Wait for `key`, which rank `owner` publishes, and return its value.

        Raises PeerTimeoutError that names the owner if the key does not appear in time, or the error that another rank
        passed to `give_up`.
        """
        try:
            self._wait_for(key, owner)
        finally:
            if self.on_wait is not None:
                self.on_wait((), 0.0)
        value: bytes = self._call(lambda: self.store.get(key))
        return value

    def _wait_for(self, key: str, owner: int) -> None:
        started, look_at = time.monotonic(), _LOOK_SECONDS
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
            if waited > look_at:
                look_at = waited + _LOOK_SECONDS
                if (lost := self.error_of_ended([owner])) is not None and not self.is_published(key):
                    raise lost
            if self.on_wait is not None:
                self.on_wait((owner,), waited)
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE_SECONDS)

    def all_gather(self, name: str, value: bytes) -> list[bytes]:
        """All-gather small values: returns the value of every rank, in rank order. Every rank must call it."""
        count = self._num_all_gathers.get(name, 0)
        self._num_all_gathers[name] = count + 1
        self.publish(f"{name}/{count}/{self.rank}", value)
        return [self.fetch(f"{name}/{count}/{rank}", rank) for rank in range(self.size)]

    def is_published(self, key: str) -> bool:
        """Whether `key` is there already. Does not wait for `key`."""
        return bool(self._call(lambda: self.store.check([key])))

    def start(self, operation: Callable[[Store], _T]) -> Future[_T]:
        """Call `operation` with the store, after the calls under way. Does not wait; nobody else hears of errors."""
        return self._store_calls.start(lambda: operation(self.store))

    def give_up(self, error: RingError) -> None:
        """Have every rank that waits in `fetch`, now or later, raise `error` instead of waiting for the timeout."""
        self._call(lambda: self.store.set("gave_up", encode_error(error)))  # type: ignore[arg-type]  # takes bytes, too

    def raise_if_given_up(self) -> None:
        """Raise the error that a rank passed to `give_up`, if any."""
        if self.is_published("gave_up"):
            self.publish(f"told/{self.rank}", b"")
            self.stay_until_published([f"told/{rank}" for rank in range(self.size)], _STAY_SECONDS)
            error = decode_error(self._call(lambda: self.store.get("gave_up")), None)
            error.rank = self.rank
            raise error

    def _call(self, operation: Callable[[], _T]) -> _T:
        host = "the launcher" if self.store_host is None else f"rank {self.store_host}"
        host += " or a rank outside the group" * (self.store_host is None and bool(self.members))
        peers = () if self.store_host is None else (self.store_host,)
        try:
            return self._store_calls.call(operation, self.timeout_seconds)
        except FutureTimeout:
            raise PeerTimeoutError(
                f"the rendezvous store, which {host} hosts, did not answer within {self.timeout_seconds:g} s; the way "
                "there is cut, or its host is down",
                rank=self.rank,
                peers=peers,
            ) from None
        except dist.DistError as error:
            text = f"the rendezvous store is out of reach, so the process that hosts it, {host}, is gone ({error})"
            raise PeerLostError(text, rank=self.rank, peers=peers) from error


class _CallsWithDeadline:
    """Calls a store on a thread of its own, one call after the other, and waits for each no longer than a deadline.

    TCPStore itself has no such deadline: if the connection is cut, TCPStore waits for as long as TCP does, whatever
    timeout it was given.
    """

    def __init__(self) -> None:
        self._worker = SerialThread("torchring-store")
        self._unanswered: Future[Any] | None = None
        self._broken: dist.DistNetworkError | None = None

    def start(self, operation: Callable[[], _T]) -> Future[_T]:
        """Run `operation` without waiting for what it returns or raises."""

        def run() -> _T:
            if self._broken is not None:  # TCPStore does not reconnect, and each try would print a warning
                raise self._broken
            try:
                return operation()
            except dist.DistNetworkError as error:
                self._broken = error
                raise

        return self._worker.submit(run)

    def call(self, operation: Callable[[], _T], seconds: float) -> _T:
        """Run `operation`. Raises FutureTimeout after `seconds`, or if an earlier operation still runs."""
        if self._unanswered is not None and not self._unanswered.done():
            raise FutureTimeout
        future = self.start(operation)
        if not is_done_within(future, seconds):
            self._unanswered = future
            raise FutureTimeout
        return future.result()


def _stay(rendezvous: Rendezvous, keys: Sequence[str], end: float, pid: int) -> None:
    """See `stay_until_published`. Does nothing in a forked child, which does not host the store."""
    if os.getpid() != pid:
        return
    try:
        while time.monotonic() < end and not all(rendezvous.is_published(key) for key in keys):
            time.sleep(_LONGEST_PAUSE_SECONDS)
    except RingError:  # the store is gone
        return
