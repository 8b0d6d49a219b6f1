"""Whole lines from many processes: each prints into a pipe of its own, and a thread passes on complete lines.

    rank 0 stdout ---- pipe ----
    rank 0 stderr ---- pipe ---- thread ---- stdout and stderr, log files
    rank 1 stdout ---- pipe ----

Unbuffered Python writes `print(a, b)` in four pieces. Buffered Python writes blocks of lines, late. Ranks are
unbuffered, and this module puts the pieces together. A line that stays unfinished for a moment, such as a question or a
progress bar, is passed on unfinished.
"""

import contextlib
import errno
import fcntl
import os
import re
import select
import termios
import threading
import time
import tty
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from torchring.safe_files import create

STDOUT: Final = 1
STDERR: Final = 2
_HOLD_SECONDS: Final = 0.2  # for the rest of a line
_LONGEST_LINE: Final = 1 << 20  # bytes; a longer one is passed on in parts
_READ_BYTES: Final = 1 << 16
_LAST_READS: Final = 64  # per pipe, once its process has ended: more than fits into one
_SETTLE_SECONDS: Final = 0.02  # for a terminal's driver to pass on what was written last


@dataclass(frozen=True)
class OutputOptions:
    tag: bool = False  # put "[rank] " before each line
    log_dir: str | None = None  # also write the output of rank N to rankN.log (of worker N to workerN.log) there
    is_quiet: bool = False  # show nothing


@dataclass
class _Source:
    """A process's stdout or stderr. `rank` is None if the process is not a rank."""

    reading: int
    stream: int
    rank: int | None
    is_terminal: bool
    pending: bytearray = field(default_factory=bytearray)
    pending_since: float = 0.0


@dataclass
class _Target:
    """A stream where output is shown: this process's own stdout or stderr."""

    descriptor: int
    unfinished: _Source | None = None  # of the last line, if the line has no end yet
    is_broken: bool = False


class Output:
    """Passes on what processes print into its pipes, from `start` to `close`.

    `pipe` may be called before and after `start`. A pipe is forgotten when the last process that can write to it has
    ended: processes may come and go for as long as they like.
    """

    def __init__(
        self, options: OutputOptions, *, out: int = STDOUT, err: int = STDERR, log_name: str = "rank{}.log"
    ) -> None:
        """`out` and `err` are the descriptors to write to. Raises OSError if the log directory cannot be made."""
        self.options = options
        self._log_name = log_name
        self._lock = threading.Lock()  # of `_new`, and of log files, which both threads open
        self._new: list[_Source] = []  # not yet seen by the thread
        self._sources: dict[int, _Source] = {}  # by their descriptor; of the thread once it runs
        self._targets = {STDOUT: _Target(out), STDERR: _Target(err)}
        self._logs: dict[int, int] = {}
        self._unlogged: set[int] = set()
        self._wake, self._waker = os.pipe()
        self._thread = threading.Thread(target=self._run, name="torchring-output", daemon=True)
        if options.log_dir is not None:
            Path(options.log_dir).mkdir(parents=True, exist_ok=True)

    def pipe(self, stream: int, rank: int | None = None) -> int:
        """A descriptor for a process to print to. The caller closes the descriptor.

        The descriptor is a terminal if this process's own output is a terminal and lines are shown unchanged. So
        colours and progress bars look as without torchring.
        """
        plain = not (self.options.tag or self.options.is_quiet or self.options.log_dir)
        is_terminal = plain and rank is not None and os.isatty(self._targets[stream].descriptor)
        if is_terminal:
            reading, writing = os.openpty()
            tty.setraw(writing)  # no "\r\n" for "\n", and no echo
            with contextlib.suppress(OSError):
                size = fcntl.ioctl(self._targets[stream].descriptor, termios.TIOCGWINSZ, bytes(8))
                fcntl.ioctl(reading, termios.TIOCSWINSZ, size)
        else:
            reading, writing = os.pipe()
        self._log(rank, b"")  # empties the log file of an earlier run
        with self._lock:
            self._new.append(_Source(reading, stream, rank, is_terminal))
        os.write(self._waker, b"+")
        return writing

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Pass on what the processes printed before they ended. A process that prints later gets EPIPE."""
        os.close(self._waker)
        if self._thread.ident is not None:
            self._thread.join()
        self._take_new()
        for descriptor in [*self._sources, *self._logs.values(), self._wake]:
            os.close(descriptor)
        self._sources.clear()

    def _run(self) -> None:
        try:
            self._pass_on_all()
        finally:
            for stream in self._targets:
                self._break(stream)  # also after an error here, so that no process blocks on a full pipe

    def _pass_on_all(self) -> None:
        waiting = select.poll()
        waiting.register(self._wake, select.POLLIN)
        is_closing = False
        while not is_closing:
            ready = [descriptor for descriptor, _ in waiting.poll(self._patience())]
            for descriptor in ready:
                if descriptor == self._wake:
                    is_closing = not os.read(self._wake, 4096)
                    for source in self._take_new():
                        waiting.register(source.reading, select.POLLIN)
                elif not self._read(self._sources[descriptor]):
                    waiting.unregister(descriptor)
                    self._forget(self._sources.pop(descriptor))
            now = time.monotonic()
            for source in self._sources.values():
                if source.pending and now - source.pending_since >= _HOLD_SECONDS:
                    self._pass_on(source, len(source.pending))
        for source in self._sources.values():
            self._read_the_rest(source)
            self._pass_on(source, len(source.pending))

    def _take_new(self) -> list[_Source]:
        with self._lock:
            new, self._new = self._new, []
        self._sources |= {source.reading: source for source in new}
        for stream, target in self._targets.items():
            if new and target.is_broken and self.options.log_dir is None:
                self._break(stream)
        return new

    def _forget(self, source: _Source) -> None:
        os.close(source.reading)
        with self._lock:
            is_last = all(other.rank != source.rank for other in [*self._sources.values(), *self._new])
            if is_last and source.rank in self._logs:
                os.close(self._logs.pop(source.rank))

    def _patience(self) -> float | None:
        """Milliseconds until an unfinished line is due."""
        since = [source.pending_since for source in self._sources.values() if source.pending]
        return max(0.0, min(since) + _HOLD_SECONDS - time.monotonic()) * 1e3 if since else None

    def _read(self, source: _Source) -> bool:
        """Returns whether there may be more."""
        try:
            data = os.read(source.reading, _READ_BYTES)
        except OSError as error:
            if error.errno != errno.EIO:  # of a terminal whose last writer has closed it
                raise
            data = b""
        if not source.pending:
            source.pending_since = time.monotonic()
        source.pending += data
        end = source.pending.rfind(b"\n") + 1
        if not data or len(source.pending) - end > _LONGEST_LINE:
            end = len(source.pending)
        if end:
            self._pass_on(source, end)
            source.pending_since = time.monotonic()
        return bool(data)

    def _read_the_rest(self, source: _Source) -> None:
        """Read without waiting for the end of the pipe: a process that outlives its rank may hold the pipe for ever."""
        waiting = select.poll()
        waiting.register(source.reading, select.POLLIN)
        for _ in range(_LAST_READS):
            if not waiting.poll(_SETTLE_SECONDS * 1e3 if source.is_terminal else 0) or not self._read(source):
                return

    def _pass_on(self, source: _Source, end: int) -> None:
        text = bytes(source.pending[:end])
        del source.pending[:end]
        if text:
            self._log(source.rank, text)
            self._show(source.stream, source.rank, text, source)

    def _log(self, rank: int | None, text: bytes) -> None:
        if self.options.log_dir is None or rank is None:
            return
        file = Path(self.options.log_dir, self._log_name.format(rank))
        try:
            with self._lock:
                if rank not in self._logs:
                    self._logs[rank] = create(file)
                descriptor = self._logs[rank]
            _write(descriptor, text)
        except OSError as error:  # a full disk is no reason to stop training
            if rank not in self._unlogged:
                self._unlogged.add(rank)
                self._show(STDERR, None, f"torchring run: cannot write {file}: {error.strerror}\n".encode())

    def _show(self, stream: int, rank: int | None, text: bytes, owner: _Source | None = None) -> None:
        target = self._targets[stream]
        if target.is_broken or (self.options.is_quiet and rank is not None):
            return
        is_rest = target.unfinished is owner
        # Text that moves the cursor itself, such as a progress bar, needs no new line.
        is_in_the_way = target.unfinished is not None and not is_rest and text[:1] not in b"\r\n\x1b"
        target.unfinished = None if text.endswith(b"\n") else owner
        if self.options.tag and rank is not None:
            tag = b"[%d] " % rank
            text = re.sub(rb"\n(?!\Z)", b"\n" + tag, text if is_rest else tag + text)
        try:
            _write(target.descriptor, b"\n" + text if is_in_the_way else text)
        except OSError:  # the reader has gone; the ranks get an error when they print
            target.is_broken = True
            if self.options.log_dir is None:
                self._break(stream)

    def _break(self, stream: int) -> None:
        """Close the reading ends of the pipes, so that processes that write to them get an error."""
        for source in self._sources.values():
            if source.stream == stream:
                nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
                os.dup2(nothing, source.reading, inheritable=False)
                os.close(nothing)


def _write(descriptor: int, data: bytes) -> None:
    """Write all of `data`, also to a non-blocking descriptor."""
    view = memoryview(data)
    while view:
        try:
            view = view[os.write(descriptor, view) :]
        except BlockingIOError:
            select.select([], [descriptor], [])
