"""The timer thread of a rank: it looks where the script is, and warns if this rank waits for too long.

Between hosts the thread also sends what this rank has recorded to the store, three times within the limit, on the
connection that the rendezvous has, without waiting for an answer. Nothing of this happens on the way of a gradient.
"""

import contextlib
import logging
import socket
import struct
import time
import zlib
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Final

from torch.distributed import Store, TCPStore

from torchring.errors import in_group, ranks_in_words
from torchring.linux import stat_of
from torchring.memory.host import HostGroup, SharedBlock
from torchring.observe.flight_recorder.call_sites import call_site_of
from torchring.observe.flight_recorder.entries import CurrentWait, FlightRecorder, read_state
from torchring.observe.flight_recorder.stall_report import Peer, describe_ranks, describe_wait, missing_ranks
from torchring.observe.periodic import PeriodicThread
from torchring.rendezvous.rendezvous import Rendezvous
from torchring.rendezvous.signed import bottom
from torchring.threads import is_done_within

_SHORTEST_TICK_SECONDS: Final = 0.02
_LONGEST_TICK_SECONDS: Final = 1.0
_LONGEST_PAUSE_SECONDS: Final = 10.0  # between two messages to the store
_SILENT_PAUSES: Final = 1.4  # without a message
_SILENT_SECONDS: Final = 3.0
_SILENT_HERE: Final = 5.0  # timer threads run once a second
_LASTING: Final = 0.1  # of the pause between two messages: a shorter wait is over when the message is read
_MOST_AWAITED: Final = 64
_ANSWER_SECONDS: Final = 2.0  # for the store
_JOIN_SECONDS: Final = 1.0
# The sender's time, seconds between two messages, seconds since the ranks have met.
_HEADER: Final = struct.Struct("=qdd")
_logger: Final = logging.getLogger("torchring")


class StallMonitor:
    """Watches how long this rank waits, and knows what the other ranks do."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        host: HostGroup,
        block: SharedBlock,  # memory for the flight recorders of the ranks of this host, `entries.MEMORY_BYTES` each
        limit: float,  # seconds of waiting after which this rank warns; 0 for never. Then there is no timer thread.
        operations: Mapping[int, str],  # see `FlightRecorder`
        monitors: "list[StallMonitor]",  # of this rank, in the world of all ranks and its groups; this one is added
    ) -> None:
        self._rank = rendezvous.rank
        self._limit = limit
        self._rendezvous = rendezvous
        self._host = host
        self._memory = {
            rank: memoryview(part.numpy())  # type: ignore[arg-type]  # numpy's stubs before 3.12 lack Buffer
            for rank, part in zip(host.ranks, block.parts, strict=True)
        }
        self.recorder = FlightRecorder(self._memory[self._rank], operations)  # the flight recorder of this rank
        self._members = rendezvous.members or range(rendezvous.size)
        self._monitors = monitors
        monitors.append(self)
        self._has_warned: set[tuple[int, int]] = set()  # (key, since) of the waits under way
        # Ranks of other hosts
        self._others = [rank for rank in range(rendezvous.size) if rank not in self._memory]
        # All ranks have just met in the store. From here on they count seconds alike, whatever their clocks say.
        self._met_at = time.clock_gettime(time.CLOCK_BOOTTIME)
        self._messages: dict[int, bytes] = {}  # what was last heard. This rank reads messages only when it waits.
        self._publish_at = 0.0
        self._publishing: Future[Any] | None = None

        self._thread: PeriodicThread | None = None
        self._seconds = max(_SHORTEST_TICK_SECONDS, min(_LONGEST_TICK_SECONDS, limit / 4))
        self._ticked_at = time.monotonic()
        if limit > 0:
            self._thread = PeriodicThread("torchring-stalls", self.tick, self._seconds)

    def close(self) -> None:
        thread, self._thread = self._thread, None
        if self in self._monitors:
            self._monitors.remove(self)
        if thread is not None:
            thread.close()
            thread.join(_JOIN_SECONDS)

    def tick(self) -> None:
        """Sample what this rank does, publish it if that is due, and warn. The timer thread calls this."""
        waits = self.recorder.waits()
        found = (each.wait_elsewhere() for each in list(self._monitors) if each is not self)
        self.recorder.write_sample(*call_site_of(self.recorder.thread), waits, next(filter(None, found), None))
        ticked_at, self._ticked_at = self._ticked_at, time.monotonic()
        # This process may have been stopped itself, and not have taken in yet what has come meanwhile.
        was_stopped = self._ticked_at - ticked_at > _SILENT_SECONDS + self._seconds
        if self._others:
            self._publish()
        now = time.monotonic_ns()
        under_way = {(wait.key, wait.since) for wait in waits}
        self._has_warned &= under_way
        for wait in waits:
            seconds, identity = (now - wait.since) / 1e9, (wait.key, wait.since)
            if seconds >= self._limit and not was_stopped and identity not in self._has_warned:
                self._has_warned.add(identity)
                self._warn(wait, seconds)

    def wait_elsewhere(self) -> list[object] | None:
        """What the training thread waits for in this world, for those who read of it in another one."""
        for wait in self.recorder.waits():
            if wait.is_in_training:
                peers = self._peers()
                awaited = [self._members[r] for r in missing_ranks(wait, peers) if peers[r].state is not None]
                where = f"{str(wait.wait)[:200]} in the group of {ranks_in_words(self._members)[:100]}"
                return [0, wait.since, where, awaited[:_MOST_AWAITED]]
        return None

    def explain(self, ranks: Iterable[int]) -> str:
        """Say what `ranks`, or all other ranks if there are none, did last: a sentence each. From any thread."""
        late = [rank for rank in sorted(ranks) or range(self._rendezvous.size) if rank != self._rank]
        if any(rank in self._others for rank in late):
            self._look()
        return describe_ranks(late, self._peers(), self._members[self._rank]) if late else ""

    def _warn(self, wait: CurrentWait, seconds: float) -> None:
        if self._others:
            self._look()
        text = describe_wait(self._rank, wait, self._peers(), seconds, self._limit, self._members[self._rank])
        _logger.warning("%s", in_group(text, self._rendezvous.members))

    def _peers(self) -> dict[int, Peer]:
        found = {}
        for rank, memory in self._memory.items():
            if rank != self._rank:
                process = self._host.process_of(rank)
                state = read_state(memory)
                stopped = process is not None and is_stopped(process[0])
                found[rank] = Peer(state, stopped, state is not None and (state.last_seen or 0.0) > _SILENT_HERE)
        found |= {rank: self._peer_elsewhere(self._messages.get(rank)) for rank in self._others}
        return dict(sorted(found.items()))

    def _peer_elsewhere(self, message: bytes | None) -> Peer:
        if message is None:
            return Peer(None)
        then, pause, seconds_then = _HEADER.unpack_from(message)
        age = max(0.0, self._seconds_since_meeting() - seconds_then)
        state = read_state(zlib.decompress(message[_HEADER.size :]), then + int(age * 1e9))
        if state is not None and state.waits is not None and state.waits[1] - age < _LASTING * pause:
            state = state._replace(waits=None)
        is_late = age > max(_SILENT_SECONDS, _SILENT_PAUSES * pause)
        return Peer(state, is_silent=is_late, message_age=age)

    # Messages between hosts

    def _publish(self) -> None:
        """Send what this rank has recorded to the store, if that is due."""
        if time.monotonic() < self._publish_at or (self._publishing is not None and not self._publishing.done()):
            return
        pause = min(_LONGEST_PAUSE_SECONDS, self._limit / 3)
        self._publish_at = time.monotonic() + pause
        header = _HEADER.pack(time.monotonic_ns(), pause, self._seconds_since_meeting())
        message = header + zlib.compress(bytes(self._memory[self._rank]), 1)
        may_be_gone = self._rendezvous.store_host not in (None, self._rank)
        self._publishing = self._rendezvous.start(partial(_send, _state_key(self._rank), message, may_be_gone))

    def _look(self) -> None:
        """Read the messages of the ranks of other hosts, if the store answers soon."""
        reading = self._rendezvous.start(partial(_read, [_state_key(rank) for rank in self._others]))
        if is_done_within(reading, _ANSWER_SECONDS):
            with contextlib.suppress(Exception):  # the store is gone
                found = zip(self._others, reading.result(), strict=True)
                self._messages |= {rank: message for rank, message in found if message is not None}

    def _seconds_since_meeting(self) -> float:
        return time.clock_gettime(time.CLOCK_BOOTTIME) - self._met_at


def _send(key: str, message: bytes, may_be_gone: bool, store: Store) -> None:
    """Publish a message, unless the rank that hosts the store has ended: then TCPStore would print a page."""
    if not may_be_gone or _listens(store):
        store.set(key, message)  # type: ignore[arg-type]  # takes bytes, too


def _listens(store: Store) -> bool:
    store = bottom(store)
    if isinstance(store, TCPStore):
        try:
            socket.create_connection((store.host, store.port), timeout=_ANSWER_SECONDS).close()
        except OSError:
            return False
    return True


def _read(keys: Sequence[str], store: Store) -> list[bytes | None]:
    """The values of `keys`; None for a key that is not set."""
    return [store.get(key) if store.check([key]) else None for key in keys]


def _state_key(rank: int) -> str:
    return f"stalls/state/{rank}"


def is_stopped(pid: int) -> bool:
    """Whether a process of this host is stopped by SIGSTOP, or by a debugger."""
    try:
        return stat_of(pid)[0] in ("T", "t")
    except (OSError, IndexError):
        return False
