"""Writes the traces of this process's recorders to a folder: at the end, on SIGUSR1, and when training breaks."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Final

from torchring.accelerators import accelerator_of
from torchring.default_world import open_world
from torchring.errors import RingError
from torchring.gradients.reducer import Reducer
from torchring.linux import is_caught
from torchring.observe import PROGRESS, TRACE, loading
from torchring.observe.recorder import files
from torchring.observe.recorder.clocks import offsets_of
from torchring.observe.recorder.recorder import Recorder
from torchring.observe.recorder.recording import ReductionRecording, describe
from torchring.observe.recorder.records import ENDED_WELL
from torchring.observer import Wrapped
from torchring.threads import PeriodicThread, at_last
from torchring.world import World

_LIVE_SECONDS: Final = 2.0
_LIVE_STEPS: Final = 50
_log = logging.getLogger("torchring")
_recorders: weakref.WeakSet[Recorder] = weakref.WeakSet()
_writer: TraceWriter | None = None


class TraceWriter:
    """Writes traces of this process to a folder. For any thread.

    Every other second a thread writes the last 50 steps, for `torchring top`, to a file that is removed when the whole
    trace is written. If a file cannot be written, training goes on, and one warning says so.

    Args:
        folder: where to write; made when something is written.
        is_for_progress: nobody has asked for a trace. `torchring run --progress` reads the last steps.
        is_of_block: leave out steps that have ended before now.
    """

    def __init__(self, folder: Path, *, is_for_progress: bool = False, is_of_block: bool = False) -> None:
        self.folder = folder
        self.is_for_progress = is_for_progress
        self._pid = os.getpid()
        self._lock = threading.RLock()  # a signal handler may write while the main thread writes
        self._has_warned = False
        self._is_closed = False
        begun = {each: each.num_steps for each in _recorders} if is_of_block else {}
        self._first = weakref.WeakKeyDictionary(begun)  # numbers of the first steps that are written
        self._broken: weakref.WeakSet[Recorder] = weakref.WeakSet()
        self._num_live: weakref.WeakKeyDictionary[Recorder, int] = weakref.WeakKeyDictionary()
        self._signals = not is_for_progress and _takes_signal()
        if self._signals:
            signal.signal(signal.SIGUSR1, self._handle)
        self._thread = PeriodicThread("torchring-trace", self._write_live, _LIVE_SECONDS)

    def write(self, recorder: Recorder, ended_by: str = "end") -> None:
        """Write what `recorder` holds. After an error, only what the error has left is kept."""
        if recorder in self._broken or not self._has_steps(recorder) or os.getpid() != self._pid:
            return
        if ended_by not in ENDED_WELL:
            self._broken.add(recorder)
        with self._lock, self._warning():
            trace, steps = recorder.trace(ended_by, first=self._first.get(recorder, 0))
            path = files.write(files.path_of(self.folder, trace.run_info.rank), trace, steps)
            files.path_of(self.folder, trace.run_info.rank, live=True).unlink(missing_ok=True)
            _log.info("the trace of rank %d is in %s", trace.run_info.rank, path)

    def close(self, ended_by: str = "end") -> None:
        """Write all traces, and no more after that."""
        self._thread.close()
        for recorder in list(_recorders):
            self.write(recorder, ended_by)
        self._is_closed = True
        if self._signals and signal.getsignal(signal.SIGUSR1) == self._handle:
            signal.signal(signal.SIGUSR1, signal.SIG_DFL)

    def _has_steps(self, recorder: Recorder) -> bool:
        return recorder.run_info is not None and recorder.num_steps > self._first.get(recorder, 0)

    def _write_live(self) -> None:
        for recorder in list(_recorders):
            if not self._has_steps(recorder) or self._num_live.get(recorder) == recorder.num_steps:
                continue
            self._num_live[recorder] = recorder.num_steps
            with self._lock, self._warning():
                if self._is_closed or recorder in self._broken:  # the whole trace is written
                    return
                trace, steps = recorder.trace("", _LIVE_STEPS, self._first.get(recorder, 0))
                # The names of all parameters would take most of the time.
                trace = replace(trace, run_info=replace(trace.run_info, parameters=()), arrivals=())
                files.write(files.path_of(self.folder, trace.run_info.rank, live=True), trace, steps)

    @contextlib.contextmanager
    def _warning(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not self._has_warned:
                _log.warning("no trace is written to %s: %s; training goes on", self.folder, error)
            self._has_warned = True

    def _handle(self, number: int, frame: FrameType | None) -> None:
        for recorder in list(_recorders):
            self.write(recorder, "SIGUSR1")


def _takes_signal() -> bool:
    """Whether this thread may handle SIGUSR1, and nobody else does."""
    is_main = threading.current_thread() is threading.main_thread()
    return is_main and signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL and not is_caught(signal.SIGUSR1)


class WorldRecorder(Recorder):
    """Records the steps of this rank in `world`. The trace is written when the world breaks or closes."""

    def __init__(self, world: World) -> None:
        super().__init__(world.observer.num_steps)
        self.world: World | None = world  # until it is closed
        self.clock = world.shared(offsets_of)
        _recorders.add(self)
        loading.watch(self.loading)
        world.observer.add(self)
        world.on_failure(self)
        world.on_close(self.close)
        global _writer
        if _writer is None and os.environ.get(TRACE):
            start(os.environ[TRACE])
        elif _writer is None and os.environ.get(PROGRESS):
            _writer = TraceWriter(Path(os.environ[PROGRESS]), is_for_progress=True)

    def connected(self, wrapped: Wrapped) -> None:
        if self.world is None:
            return
        if accelerator := next(filter(None, (accelerator_of(each.device) for each in wrapped.names)), None):
            self.follow(accelerator)
        reducer: Reducer | None = wrapped.reducer
        layout = None if reducer is None else reducer.layout
        self.run_info, number = describe(self.world, wrapped, layout, self.run_info)
        if reducer is not None:
            reducer.take_in(ReductionRecording(self, reducer, number))

    def fail(self, error: RingError) -> None:
        if _writer is not None:
            _writer.write(self, str(error))

    def close(self) -> None:
        if _writer is not None:
            _writer.write(self)
        self.world = None
        _recorders.discard(self)  # a later world writes to the same file
        loading.forget(self.loading)


def recorder_of(world: World) -> Recorder:
    """Writes down the steps of this rank in `world`, from the first call on."""
    return world.shared(WorldRecorder)


def is_writing() -> bool:
    """Whether worlds that are opened now are to be recorded."""
    return _writer is not None


def start(folder: str | os.PathLike[str], *, is_of_block: bool = False) -> TraceWriter:
    """Write traces from now on. Raises ValueError if they are written somewhere else already."""
    global _writer
    path = Path(folder).absolute()
    if _writer is not None and not _writer.is_for_progress:
        raise ValueError(f"traces are written to {_writer.folder} already, and cannot be written to {path} as well")
    _writer = TraceWriter(path, is_of_block=is_of_block)
    return _writer


@at_last
def _write_at_exit() -> None:
    if _writer is not None:
        # Python sets last_value to an exception that nobody caught. In an interactive session it may be an old one.
        error = getattr(sys, "last_value", None) if not hasattr(sys, "ps1") else None
        _writer.close("end" if error is None else f"{type(error).__name__}: {error}")


@contextlib.contextmanager
def trace(folder: str | os.PathLike[str]) -> Iterator[None]:
    """A context manager: the steps of its block, the last 1,000 at most, are written to `folder`. Not collective.

        with torchring.trace("trace"):
            train()

    `torchring report trace` shows what the traces of all ranks say. Each rank writes a file of its own: at the end of
    the block, when it gets SIGUSR1, and when another rank is lost. If hosts do not share `folder`, copy the files to
    one place. Inside the block, `torchring top trace` shows how training goes.

    `torchring run --trace DIR` and TORCHRING_TRACE=DIR trace a whole script.

    Args:
        folder: is made if it does not exist. Files of an earlier trace are overwritten. If it cannot be written to, a
            warning is logged, and training goes on.

    Raises:
        ValueError: this process is being traced already.
    """
    global _writer
    if _writer is not None and _writer.folder == Path(folder).absolute():  # the environment asks for the same
        yield
        return
    if (world := open_world()) is not None:
        recorder_of(world)
    before = _writer  # whose thread goes on
    writer = start(folder, is_of_block=True)
    ended_by = "end"
    try:
        yield
    except BaseException as error:
        ended_by = f"{type(error).__name__}: {error}"
        raise
    finally:
        _writer = before
        writer.close(ended_by)
