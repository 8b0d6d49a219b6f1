"""The page on which a rank writes what it is doing, and where the other ranks read that at any time.

The rank that writes need not be able to run when others read: it may be stopped, or hold the interpreter's lock in C
code. So the threads that train write to shared memory themselves. A stamp is a store of one or two words, and there are
a handful of stamps in a step and for each bucket.

A `Track` is one sequence of operations that all ranks begin in the same order: the script's collectives, or the buckets
of one optimizer. Positions count the operations of a track. A rank whose position is less has not come as far.

    words   0 ..  15    pid, phase, times, see `_Word`
    words  16 .. 271    64 tracks: key, operations begun, operations finished, waiting since
    the rest            JSON of the timer thread: the place in the script, and what the rank waits for

Times are those of CLOCK_MONOTONIC in nanoseconds, which all processes of a host share.
"""

from __future__ import annotations

import json
import os
import threading
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, Final, NamedTuple, TypeVar

_T = TypeVar("_T")
PAGE_BYTES: Final = 4096
_NUM_TRACKS: Final = 64
_FIRST_TRACK: Final = 16
_TRACK_WORDS: Final = 4
_KEY, _BEGUN, _FINISHED, _WAITING_SINCE = range(_TRACK_WORDS)
_NUM_WORDS: Final = _FIRST_TRACK + _NUM_TRACKS * _TRACK_WORDS
_TEXT: Final = 8 * _NUM_WORDS
_TRIES: Final = 3  # to read a text that the timer thread is writing


class Phase(IntEnum):
    """What a rank is doing, as far as the training thread or the timer thread knows."""

    OUTSIDE = 0
    FORWARD = 1
    BACKWARD = 2
    STEP = 3

    def __str__(self) -> str:
        return _PHASES[self]


_PHASES: Final = {
    Phase.OUTSIDE: "outside of forward, backward and step()",
    Phase.FORWARD: "in forward",
    Phase.BACKWARD: "in backward",
    Phase.STEP: "in step()",
}


class _Word(IntEnum):
    """Where the page has what.

    PHASE: optimizer step times 256, plus the phase. Of the training thread, as PHASE_SINCE is.
    SAMPLED_PHASE, SAMPLED_SINCE, SAMPLED_AT: of the timer thread. SAMPLED_AT also says that the process runs.
    WANTED: a number for the stall about which other ranks want to see this rank's stacks. SIGNALLED: the same number,
    if they have sent STACK_SIGNAL for them. Written by other ranks.
    """

    PID = 0
    STACK_SIGNAL = 1
    PHASE = 2
    PHASE_SINCE = 3
    SAMPLED_PHASE = 4
    SAMPLED_SINCE = 5
    SAMPLED_AT = 6
    WANTED = 7
    SIGNALLED = 8
    TEXT_BYTES = 9
    TEXT_CHECKSUM = 10


_PHASE_AT: Final = int(_Word.PHASE)  # a store through an enum takes three times as long
_PHASE_SINCE_AT: Final = int(_Word.PHASE_SINCE)


class Wait(NamedTuple):
    """What a thread waits for. `parameter` is the first one of the bucket."""

    operation: str
    step: int | None = None
    bucket: int | None = None
    parameter: str = ""

    def __str__(self) -> str:
        where = []
        if self.step is not None:
            where.append(f"step {self.step}")
        if self.bucket is not None:
            where.append(f"bucket {self.bucket}")
        if self.parameter:
            where.append(f"first parameter {self.parameter}")
        return f"{self.operation} ({', '.join(where)})" if where else self.operation


class Track:
    """What this rank has done in one sequence of operations.

    Attributes:
        key: equal on all ranks, and unlike that of other tracks of this world.
        wait: what a thread waits for. Means nothing if `waiting_since` is 0.
        thread: the thread that waits.
    """

    def __init__(self, name: str, words: memoryview, first: int) -> None:
        self.key = key_of(name)
        self.wait = Wait(name)
        self.thread = 0
        self._words = words
        self._begun = first + _BEGUN
        self._finished = first + _FINISHED
        self._waiting_since = first + _WAITING_SINCE
        words[self._begun] = words[self._finished] = words[self._waiting_since] = 0
        words[first + _KEY] = self.key

    @classmethod
    def private(cls, name: str) -> Track:
        """A track that no other rank reads."""
        return cls(name, memoryview(bytearray(8 * _TRACK_WORDS)).cast("q"), 0)

    @property
    def num_begun(self) -> int:
        return int(self._words[self._begun])

    @property
    def waiting_since(self) -> int:
        return int(self._words[self._waiting_since])

    def begin(self, position: int) -> None:
        """This rank has begun operation number `position`, and all before it."""
        self._words[self._begun] = position + 1

    def finish(self, position: int) -> None:
        """Operation number `position`, and all before it, are over for this rank."""
        self._words[self._finished] = position + 1

    def waiting(self, wait: Wait, operation: Callable[..., _T], *arguments: Any) -> _T:
        """Run `operation(*arguments)`, in which other ranks may keep this rank waiting."""
        self.wait = wait
        self.thread = threading.get_ident()
        self._words[self._waiting_since] = time.monotonic_ns()
        try:
            return operation(*arguments)
        finally:
            self._words[self._waiting_since] = 0

    def run(self, what: str, operation: Callable[..., _T], *arguments: Any) -> _T:
        """Run `operation(*arguments)`, the next operation of this track. Messages call the operation `what`."""
        position = self.num_begun
        self.begin(position)
        try:
            return self.waiting(Wait(what), operation, *arguments)
        finally:
            self.finish(position)


class Progress:
    """This rank's page, for the threads that train.

    Args:
        page: PAGE_BYTES bytes of zeroed memory, which other ranks may read.

    Attributes:
        thread: the thread that trains.
        tracks: the open ones.
        operations: the outermost operation between ranks that each thread is in, by thread.
    """

    def __init__(self, page: memoryview) -> None:
        self.thread = threading.get_ident()
        self.tracks: list[Track] = []
        self.operations: dict[int, str] = {}
        self._text = page[_TEXT:PAGE_BYTES]
        self._words = page[:_TEXT].cast("q")
        self._words[_Word.PID] = os.getpid()
        self._words[_PHASE_SINCE_AT] = time.monotonic_ns()
        self._awaited: dict[int, tuple[int, tuple[int, ...]]] = {}  # by thread
        self._written = b""
        self._num_named: dict[str, int] = {}

    def enter(self, phase: Phase, step: int) -> None:
        """The training thread enters a phase of optimizer step `step`."""
        words = self._words
        words[_PHASE_SINCE_AT] = time.monotonic_ns()
        words[_PHASE_AT] = step << 8 | phase
        if phase == Phase.STEP:  # parts of a backward may run on threads of autograd's
            self.thread = threading.get_ident()

    def open_track(self, name: str) -> Track:
        """A new track. Ranks may open tracks in different orders. If there are too many, nobody else reads this one."""
        for first in range(_FIRST_TRACK, _NUM_WORDS, _TRACK_WORDS):
            if not self._words[first + _KEY]:
                track = Track(name, self._words, first)
                self.tracks.append(track)
                return track
        return Track.private(name)

    def open_numbered_track(self, name: str) -> Track:
        """As `open_track`, with a number behind the name. All ranks open tracks of this name in the same order."""
        number = self._num_named[name] = self._num_named.get(name, 0) + 1
        return self.open_track(f"{name} {number}")

    def close_track(self, track: Track) -> None:
        """Another track may take its place on the page."""
        if track in self.tracks:
            self.tracks.remove(track)
            for first in range(_FIRST_TRACK, _NUM_WORDS, _TRACK_WORDS):
                if self._words[first + _KEY] == track.key:
                    self._words[first + _KEY] = 0

    def await_ranks(self, ranks: Sequence[int], seconds: float) -> None:
        """The calling thread has waited for `ranks` for `seconds`. Without ranks, its wait is over."""
        thread = threading.get_ident()
        if ranks:
            since = time.monotonic_ns() - int(seconds * 1e9)
            self._awaited[thread] = self._awaited.get(thread, (since, ()))[0], tuple(ranks)
        else:
            self._awaited.pop(thread, None)

    # For the timer thread

    def waits(self) -> list[CurrentWait]:
        """What threads of this rank wait for, now."""
        found = []
        for track in list(self.tracks):
            since, wait, thread, position = track.waiting_since, track.wait, track.thread, track.num_begun - 1
            if since and since == track.waiting_since:  # not a mixture of two waits
                if not wait.parameter and (outer := self.operations.get(thread)) not in (None, wait.operation):
                    wait = wait._replace(operation=f"{outer} ({wait.operation})")
                _, awaited = self._awaited.get(thread, (0, ()))
                found.append(CurrentWait(track.key, position, since, wait, awaited, thread == self.thread))
        in_tracks = {track.thread for track in list(self.tracks) if track.waiting_since}
        for thread, (since, ranks) in list(self._awaited.items()):
            what = self.operations.get(thread)
            if not self.tracks:  # the script has not called anything else yet
                what = what or "torchring.init()"
            if thread not in in_tracks and what is not None:  # else it is a helper of a thread that waits in a track
                found.append(CurrentWait(0, 0, since, Wait(what), ranks, thread == self.thread))
        return found

    def write_sample(self, phase: Phase, place: str, waits: Sequence[CurrentWait]) -> None:
        """What the timer thread has seen."""
        words, now = self._words, time.monotonic_ns()
        if words[_Word.SAMPLED_PHASE] != phase or words[_PHASE_SINCE_AT] > words[_Word.SAMPLED_AT]:
            words[_Word.SAMPLED_SINCE] = max(words[_PHASE_SINCE_AT], words[_Word.SAMPLED_AT])
            words[_Word.SAMPLED_PHASE] = phase
        lines = [[wait.key, wait.since, str(wait.wait)[:200], wait.is_in_training] for wait in waits]
        samples = (
            {"place": place[:400], "waits": lines[:4]},
            {"place": place[:100], "waits": []},
            {"place": "", "waits": []},
        )
        texts = (json.dumps(sample, ensure_ascii=False).encode(errors="replace") for sample in samples)
        text = next(text for text in texts if len(text) <= len(self._text))
        if text != self._written:
            self._written = text
            words[_Word.TEXT_CHECKSUM] = 0
            self._text[: len(text)] = text
            words[_Word.TEXT_BYTES] = len(text)
            words[_Word.TEXT_CHECKSUM] = zlib.crc32(text)
        words[_Word.SAMPLED_AT] = now

    def offer_stacks(self, number: int) -> None:
        """Signal `number` has this process print its stacks."""
        self._words[_Word.STACK_SIGNAL] = number

    def stacks_wanted(self) -> int:
        """Number of the stall about which others want to see stacks, if they could not send the signal; else 0."""
        wanted = int(self._words[_Word.WANTED])
        return 0 if wanted == self._words[_Word.SIGNALLED] else wanted


class CurrentWait(NamedTuple):
    """A wait of this rank.

    Attributes:
        key: of the track; 0 for a wait outside of all tracks.
        position: of the operation in the track.
        since: when the wait began.
        awaited: ranks whose signal is missing, as far as the waiting thread knows.
        is_in_training: whether the training thread waits.
    """

    key: int
    position: int
    since: int
    wait: Wait
    awaited: tuple[int, ...]
    is_in_training: bool


@dataclass(frozen=True)
class TrackState:
    """How far a rank has come in one track. `waits` is whether it waits there."""

    num_begun: int
    num_finished: int
    waits: bool


@dataclass(frozen=True)
class Snapshot:
    """What a page says. Ages are in seconds.

    Attributes:
        step: number of the optimizer step.
        age: how long the rank has been in `phase`.
        place: where the script was when the timer thread looked last.
        last_seen: how long ago the timer thread ran; None if the rank has no timer thread.
        tracks: by key.
        waits: what the training thread waits for, and for how long. None if it does not wait.
        stack_signal: has the process print its stacks; 0 if there is no such signal.
    """

    pid: int
    step: int
    phase: Phase
    age: float
    place: str
    last_seen: float | None
    tracks: Mapping[int, TrackState]
    waits: tuple[str, float] | None
    stack_signal: int

    def older(self, seconds: float) -> Snapshot:
        """The same, as it is `seconds` later if nothing has changed."""
        return replace(
            self,
            age=self.age + seconds,
            last_seen=None if self.last_seen is None else self.last_seen + seconds,
            waits=None if self.waits is None else (self.waits[0], self.waits[1] + seconds),
        )


def read_page(page: memoryview | bytes, now: int | None = None) -> Snapshot | None:
    """What a page says at time `now`. None if the rank has not begun to write."""
    now = time.monotonic_ns() if now is None else now
    for _ in range(_TRIES):
        words = memoryview(bytes(page[:_TEXT])).cast("q")
        text = bytes(page[_TEXT : _TEXT + min(max(words[_Word.TEXT_BYTES], 0), PAGE_BYTES - _TEXT)])
        if zlib.crc32(text) == words[_Word.TEXT_CHECKSUM]:
            break
    else:
        text = b""
    if not words[_Word.PID]:
        return None
    said: dict[str, Any] = json.loads(text) if text else {"place": "", "waits": []}
    phase, since = words[_PHASE_AT] & 0xFF, words[_PHASE_SINCE_AT]
    if words[_Word.SAMPLED_AT] > since:  # the stack, which the timer thread has seen since, tells more than the stamp
        phase, since = words[_Word.SAMPLED_PHASE], words[_Word.SAMPLED_SINCE]
    tracks, since_of = {}, {}
    for first in range(_FIRST_TRACK, _NUM_WORDS, _TRACK_WORDS):
        key, begun, finished, waiting = words[first : first + _TRACK_WORDS]
        if key:
            tracks[key] = TrackState(begun, finished, waiting > 0)
            since_of[key] = waiting
    return Snapshot(
        pid=words[_Word.PID],
        step=words[_PHASE_AT] >> 8,
        phase=Phase(phase),
        age=max(0.0, (now - since) / 1e9),
        place=said["place"],
        last_seen=(now - words[_Word.SAMPLED_AT]) / 1e9 if words[_Word.SAMPLED_AT] else None,
        tracks=tracks,
        waits=_wait_in_training(said["waits"], since_of, now),
        stack_signal=words[_Word.STACK_SIGNAL],
    )


def _wait_in_training(
    said: Sequence[tuple[int, int, str, bool]], since_of: Mapping[int, int], now: int
) -> tuple[str, float] | None:
    """What the training thread waits for.

    Args:
        said: what the timer thread has written: key, since, text, and whether the training thread waits.
        since_of: for each track, when the wait there began, by now; 0 if nothing waits.
    """
    for key, since, text, is_in_training in said:
        if is_in_training and since_of.get(key, since) == since:
            return text, (now - since) / 1e9
    known = {(key, since) for key, since, _, _ in said}
    for key, since in since_of.items():
        if since and (key, since) not in known:  # too new for the timer thread
            return "an operation between ranks", (now - since) / 1e9
    return None


def want_stacks(page: memoryview, stall: int, send: Callable[[int], bool]) -> bool:
    """Have the rank of `page` print its stacks, once for each stall. Returns whether nobody has asked before.

    Args:
        send: sends the given signal to the rank. Returns False if that is not possible; then the rank's timer thread
            prints the stacks when it runs.
    """
    words = page[:_TEXT].cast("q")
    if words[_Word.WANTED] == stall:
        return False
    if words[_Word.STACK_SIGNAL] > 0 and send(int(words[_Word.STACK_SIGNAL])):
        words[_Word.SIGNALLED] = stall
    words[_Word.WANTED] = stall
    return True


def key_of(name: str) -> int:
    """Not 0, and the same in all processes."""
    return zlib.crc32(name.encode()) + 1
