"""The flight recorder of a rank: memory in which the rank says what it is doing, and which other ranks read any time.

The rank that writes need not be able to run when others read: it may be stopped, or hold the interpreter's lock in C
code. So the threads that train write to shared memory themselves: one or two words at a time, a handful of times in a
step and for each bucket.

An `Entry` is one sequence of operations that all ranks begin in the same order: the script's collectives, or the
buckets of one optimizer. Positions count the operations of a sequence. A rank whose position is less is behind.

    words   0 ..   5    pid, phase, times, length and checksum of the text
    words   6 .. 261    64 entries: key, operations begun, operations finished, waiting since
    the rest            JSON of the timer thread: what the training thread waits for, and where it is in the script

Times are those of CLOCK_MONOTONIC in nanoseconds, which all processes of a host share.
"""

import contextlib
import json
import os
import threading
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from torchring.observer import OPTIMIZER, Observer, Phase, Progress, Wait

MEMORY_BYTES: Final = 8192
_NUM_ENTRIES: Final = 64
_FIRST_ENTRY: Final = 6
_ENTRY_WORDS: Final = 4
_KEY, _BEGUN, _FINISHED, _WAITING_SINCE = range(_ENTRY_WORDS)
_NUM_WORDS: Final = _FIRST_ENTRY + _NUM_ENTRIES * _ENTRY_WORDS
_ENTRIES: Final = range(_FIRST_ENTRY, _NUM_WORDS, _ENTRY_WORDS)  # their first words
_TEXT: Final = 8 * _NUM_WORDS
_TRIES: Final = 3  # to read a text that the timer thread is writing


# PHASE: of the training thread; its step times 256, plus the phase. SAMPLED_AT: when the timer thread has run last.
PID, PHASE, PHASE_SINCE, SAMPLED_AT, TEXT_BYTES, TEXT_CHECKSUM = range(6)


class Entry(Progress):
    """How far this rank has come, where other ranks read it. See `Progress`."""

    def __init__(self, recorder: "FlightRecorder", name: str, words: memoryview) -> None:
        self.key = zlib.crc32(name.encode()) + 1  # not 0, the same on all ranks, and unlike that of other entries
        self.wait = Wait(name)  # what a thread waits for. Means nothing if `waiting_since` is 0.
        self.thread = 0  # the thread that waits
        self._recorder = recorder
        self._words = words
        words[_BEGUN] = words[_FINISHED] = words[_WAITING_SINCE] = 0
        words[_KEY] = self.key

    @property
    def num_begun(self) -> int:
        return int(self._words[_BEGUN])

    @property
    def waiting_since(self) -> int:
        return int(self._words[_WAITING_SINCE])

    def begin(self, position: int) -> None:
        self._words[_BEGUN] = position + 1

    def finish(self, position: int) -> None:
        self._words[_FINISHED] = position + 1

    def waiting(self, wait: Wait) -> "Entry":
        self.wait = wait
        self.thread = threading.get_ident()
        self._words[_WAITING_SINCE] = time.monotonic_ns()
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._words[_WAITING_SINCE] = 0

    @contextlib.contextmanager
    def operation(self, what: str) -> Iterator[None]:
        position = self.num_begun
        self.begin(position)
        try:
            with self.waiting(Wait(what)):
                yield
        finally:
            self.finish(position)

    def close(self) -> None:
        """Make room for another entry. A second call does nothing."""
        if self in self._recorder.entries:
            self._recorder.entries.remove(self)
            self._words[_KEY] = 0


class FlightRecorder(Observer):
    """Where this rank says what it is doing, for the threads that train.

    `memory` has MEMORY_BYTES bytes, zeroed, which other ranks may read; `operations` the outermost operation between
    ranks that each thread is in, by thread.
    """

    def __init__(self, memory: memoryview, operations: Mapping[int, str]) -> None:
        self.thread = threading.get_ident()  # the thread that trains
        self.entries: list[Entry] = []  # the open ones
        self._operations = operations
        self._text = memory[_TEXT:MEMORY_BYTES]
        self._words = memory[:_TEXT].cast("q")
        self._words[PID] = os.getpid()
        self._words[PHASE_SINCE] = time.monotonic_ns()
        self._awaited: dict[int, tuple[int, tuple[int, ...]]] = {}  # by thread
        self._sampled = -1, 0  # the phase that the timer thread has seen, and since when
        self._written = b""
        self._num_named: dict[str, int] = {}

    def phase(self, phase: int, step: int) -> None:
        words = self._words
        words[PHASE_SINCE] = time.monotonic_ns()
        words[PHASE] = step << 8 | phase
        if phase == OPTIMIZER:  # parts of a backward may run on threads of autograd's
            self.thread = threading.get_ident()

    def open_progress(self, name: str) -> Entry | None:
        """A new entry, with a number behind its name. None if there are too many.

        All ranks open entries of one name in the same order, and those of different names in any order.
        """
        number = self._num_named[name] = self._num_named.get(name, 0) + 1
        for first in _ENTRIES:
            if not self._words[first + _KEY]:
                entry = Entry(self, f"{name} {number}", self._words[first : first + _ENTRY_WORDS])
                self.entries.append(entry)
                return entry
        return None

    def await_ranks(self, ranks: Sequence[int], seconds: float) -> None:
        """The calling thread has waited for `ranks` for `seconds`. Without ranks, its wait is over."""
        thread = threading.get_ident()
        if ranks:
            since = time.monotonic_ns() - int(seconds * 1e9)
            self._awaited[thread] = self._awaited.get(thread, (since, ()))[0], tuple(ranks)
        else:
            self._awaited.pop(thread, None)

    @property
    def progress(self) -> tuple[int, bool]:
        """A number that changes with each operation and phase, and whether a thread waits for other ranks."""
        counts = [self._words[first + field] for first in _ENTRIES for field in (_BEGUN, _FINISHED)]
        return hash((self._words[PHASE_SINCE], *counts)), bool(self.waits())

    # For the timer thread

    def waits(self) -> "list[CurrentWait]":
        """What threads of this rank wait for, now."""
        found = []
        for entry in list(self.entries):
            since, wait, thread, position = entry.waiting_since, entry.wait, entry.thread, entry.num_begun - 1
            if since and since == entry.waiting_since:  # not a mixture of two waits
                if not wait.parameter and (outer := self._operations.get(thread)) not in (None, wait.operation):
                    wait = wait._replace(operation=f"{outer} ({wait.operation})")
                _, awaited = self._awaited.get(thread, (0, ()))
                found.append(CurrentWait(entry.key, position, since, wait, awaited, thread == self.thread))
        in_entries = {entry.thread for entry in list(self.entries) if entry.waiting_since}
        for thread, (since, ranks) in list(self._awaited.items()):
            what = self._operations.get(thread)
            if not self.entries:  # the script has not called anything else yet
                what = what or "torchring.init()"
            if thread not in in_entries and what is not None:  # else it is a helper of a thread that waits in an entry
                found.append(CurrentWait(0, 0, since, Wait(what), ranks, thread == self.thread))
        return found

    def write_sample(
        self, phase: Phase, call_site: str, waits: "Sequence[CurrentWait]", elsewhere: Sequence[object] | None = None
    ) -> None:
        """Write what the timer thread has seen. `elsewhere`: a wait of this rank in another world, as `said` below."""
        words, now = self._words, time.monotonic_ns()
        if self._sampled[0] != phase or words[PHASE_SINCE] > words[SAMPLED_AT]:
            self._sampled = int(phase), max(words[PHASE_SINCE], words[SAMPLED_AT])
        said = next(([w.key, w.since, str(w.wait)[:200], None] for w in waits if w.is_in_training), elsewhere)
        sample = [*self._sampled, said, call_site[:400]]  # fits, even if JSON writes each character as six
        text = json.dumps(sample, ensure_ascii=False).encode(errors="replace")
        if text != self._written:
            self._written = text
            words[TEXT_CHECKSUM] = 0
            self._text[: len(text)] = text
            words[TEXT_BYTES] = len(text)
            words[TEXT_CHECKSUM] = zlib.crc32(text)
        words[SAMPLED_AT] = now


class CurrentWait(NamedTuple):
    key: int  # of the entry; 0 for a wait outside of all entries
    position: int  # of the operation in its sequence
    since: int
    wait: Wait
    awaited: tuple[int, ...]  # ranks whose signal is missing, as far as the waiting thread knows
    is_in_training: bool  # the training thread waits


class EntryState(NamedTuple):
    """How far a rank has come in one sequence of operations, and whether it waits there."""

    num_begun: int
    num_finished: int
    waits: bool


class RankState(NamedTuple):
    """What a rank's flight recorder says. Ages are in seconds."""

    pid: int
    step: int  # number of the optimizer step
    phase: Phase
    age: float  # how long the rank has been in `phase`
    call_site: str  # where the script was when the timer thread looked last
    last_seen: float | None  # how long ago the timer thread ran; None if the rank has no timer thread
    entries: Mapping[int, EntryState]  # by key
    waits: tuple[str, float] | None  # what the training thread waits for, and for how long; None if it does not wait
    awaits: tuple[int, ...] | None = None  # ranks of the job, if it waits in another world; None if it does not


def read_state(memory: memoryview | bytes, now: int | None = None) -> RankState | None:
    """What the flight recorder of a rank says at time `now`. None if the rank has not begun to write."""
    now = time.monotonic_ns() if now is None else now
    for _ in range(_TRIES):
        words = memoryview(bytes(memory[:_TEXT])).cast("q")
        text = bytes(memory[_TEXT : _TEXT + min(max(words[TEXT_BYTES], 0), MEMORY_BYTES - _TEXT)])
        if zlib.crc32(text) == words[TEXT_CHECKSUM]:
            break
    else:
        text = b""
    if not words[PID]:
        return None
    *sampled, said, call_site = json.loads(text) if text else (None, "")
    phase, since, sampled_at = words[PHASE] & 0xFF, words[PHASE_SINCE], words[SAMPLED_AT]
    if sampled and sampled_at > since:  # the stack, which the timer thread has seen since, tells more than the stamp
        phase, since = sampled
    entries = {}
    new = 0  # when a wait began that the timer thread has not seen yet
    for first in _ENTRIES:
        key, begun, finished, waiting = words[first : first + _ENTRY_WORDS]
        if key:
            entries[key] = EntryState(begun, finished, waiting > 0)
            new = waiting if waiting > sampled_at else new
            if said is not None and said[0] == key and said[1] != waiting:
                said = None  # it is over
    waits = awaits = None
    if said is not None:
        waits, awaits = (said[2], (now - said[1]) / 1e9), said[3] and tuple(said[3])
    elif new:
        waits = "an operation between ranks", (now - new) / 1e9
    return RankState(
        pid=words[PID],
        step=words[PHASE] >> 8,
        phase=Phase(phase),
        age=max(0.0, (now - since) / 1e9),
        call_site=call_site,
        last_seen=(now - sampled_at) / 1e9 if sampled_at else None,
        entries=entries,
        waits=waits,
        awaits=awaits,
    )
