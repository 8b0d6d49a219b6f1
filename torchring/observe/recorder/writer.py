"""Writes the traces of this process to a folder: the last steps now and then, and all at the end."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from torchring.accelerators import accelerator_of
from torchring.default_world import open_world
from torchring.errors import RingError
from torchring.gradients.reducer import Reducer
from torchring.observe import TRACE, loading
from torchring.observe.periodic import PeriodicThread
from torchring.observe.recorder import files
from torchring.observe.recorder.clocks import offsets_of
from torchring.observe.recorder.recorder import NUM_STEPS, Recorder
from torchring.observe.recorder.recording import ReductionRecording, describe, parameter_records
from torchring.observer import Wrapped
from torchring.threads import at_last
from torchring.world import World

_SAMPLE_SECONDS: Final = 0.1
_LAST_SAMPLES: Final = 20  # in two seconds
_LAST_STEPS: Final = 50
_log = logging.getLogger("torchring")
_recorders: weakref.WeakSet[Recorder] = weakref.WeakSet()
writers: list[TraceWriter] = []  # worlds that are opened now are recorded if there are any


class TraceWriter:
    """Writes traces of this process to a folder, from now on. For any thread.

    Every other second a thread writes the last 50 steps, for `torchring top` and for reports of ranks that are killed.
    Ten times a second it looks where the script is, which takes 10 us.
    When a recorder ends, its whole trace takes their place. If a file cannot be written, training goes on, and one
    warning says so.

    The folder is made when something is written. With `is_of_block`, steps that have ended before now are left out.
    """

    def __init__(self, folder: Path, *, is_of_block: bool = False) -> None:
        self.folder = folder
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._has_warned = False
        begun = {each: each.num_steps for each in _recorders} if is_of_block else {}
        self._first = weakref.WeakKeyDictionary(begun)  # numbers of the first steps that are written
        self._num_ticks = 0
        self._ended: weakref.WeakSet[Recorder] = weakref.WeakSet()
        self._num_written: weakref.WeakKeyDictionary[Recorder, int] = weakref.WeakKeyDictionary()
        self._thread = PeriodicThread("torchring-trace", self._tick, _SAMPLE_SECONDS)
        writers.append(self)

    def write(self, recorder: Recorder, ended_by: str = "") -> None:
        """Write the last steps of `recorder`, or all of them and nothing after that: it was ended by `ended_by`."""
        if os.getpid() != self._pid:  # a thread may have had the lock when this process was forked
            return
        with self._lock:
            first = self._first.get(recorder, 0)
            known = max(first, 0 if ended_by else self._num_written.get(recorder, 0))
            if recorder in self._ended or recorder.num_steps <= known:
                return
            self._num_written[recorder] = recorder.num_steps
            if ended_by:
                self._ended.add(recorder)
            try:
                trace, steps = recorder.trace(ended_by, NUM_STEPS if ended_by else _LAST_STEPS, first)
                files.write(files.path_of(self.folder, trace.run_info.rank), trace, steps)
            except Exception as error:
                if not self._has_warned:
                    _log.warning("no trace is written to %s: %s; training goes on", self.folder, error)
                self._has_warned = True

    def close(self, ended_by: str = "end") -> None:
        """Write all traces, and no more after that."""
        writers.remove(self)
        self._thread.close()
        for recorder in list(_recorders):
            self.write(recorder, ended_by)

    def _tick(self) -> None:
        self._num_ticks += 1
        for recorder in list(_recorders):
            recorder.sample()
            if self._num_ticks % _LAST_SAMPLES == 0:
                self.write(recorder)


class WorldRecorder(Recorder):
    """Records the steps of this rank in `world` and in groups of its ranks, as one sequence.

    The trace is written when one of these worlds breaks, or `world` closes.
    """

    def __init__(self, world: World) -> None:
        super().__init__(world.num_steps)
        self.world: World | None = world  # until it is closed
        # Numbers of optimizers, which may be wrapped again, by their groups, and names and sizes of their parameters
        self._numbers: dict[object, int] = {}
        self.clock = world.shared(offsets_of)
        if (folder := os.environ.get(TRACE)) and not is_writing_to(path := Path(folder).absolute()):
            TraceWriter(path)
        _recorders.add(self)
        loading.watch(self.loading)
        world.on_close(self.close)

    def connected(self, wrapped: Wrapped) -> None:
        if self.world is None:
            return
        if accelerator := next(filter(None, (accelerator_of(each.device) for each in wrapped.names)), None):
            self.follow(accelerator)
        reducer: Reducer | None = wrapped.reducer
        layout = None if reducer is None else reducer.layout
        about = wrapped.members, *((name, each.numel()) for each, name in wrapped.names.items())
        number = self._numbers.setdefault(about, len(self._numbers))
        self.run_info = describe(self.world, wrapped, layout)
        self.parameters[number] = parameter_records(wrapped, layout, number)
        if wrapped.members:
            info, clock = self.run_info, [] if reducer is None else reducer.world.shared(offsets_of)
            how = {"algorithm": info.algorithm, "overlap": info.overlap, "options": info.options, "clock": clock}
            self.groups[str(number)] = {"ranks": wrapped.members, **how}
        if reducer is not None:
            reducer.take_in(ReductionRecording(self, reducer, number))

    def fail(self, error: RingError) -> None:
        for writer in list(writers):
            writer.write(self, str(error))

    def close(self) -> None:
        for writer in list(writers):
            writer.write(self, "end")
        self.world = None
        _recorders.discard(self)  # a later world writes to the same file
        loading.forget(self.loading)


def recorder_of(world: World) -> Recorder:
    """Writes down the steps of this rank, in the world of all ranks and its groups, from the first call on."""
    recorder = world.outer.shared(WorldRecorder)
    for each in (world.outer, *world.outer.groups.values(), world):
        if recorder not in each.observer.listeners:
            each.observer.add(recorder)
            each.on_failure(recorder)
    return recorder


def is_writing_to(path: Path) -> bool:
    return any(each.folder == path for each in writers)


@at_last
def _write_at_exit() -> None:
    # Python sets last_value to an exception that nobody caught. In an interactive session it may be an old one.
    error = getattr(sys, "last_value", None) if not hasattr(sys, "ps1") else None
    for writer in list(writers):
        writer.close("end" if error is None else f"{type(error).__name__}: {error}")


@contextlib.contextmanager
def trace(folder: str | os.PathLike[str]) -> Iterator[None]:
    """A context manager: the steps of its block, the last 1,000 at most, are written to `folder`. Not collective.

        with torchring.trace("trace"):
            train()

    `torchring report trace` shows what the traces of all ranks say. Each rank writes a file of its own: at the end of
    the block, and when another rank is lost. If hosts do not share `folder`, copy the files to one place. Inside the
    block, the files have the last 50 steps, and `torchring top trace` shows how training goes.

    `torchring run --trace DIR` and TORCHRING_TRACE=DIR trace a whole script.

    Args:
        folder: is made if it does not exist. Files of an earlier trace are overwritten. If it cannot be written to, a
            warning is logged, and training goes on.
    """
    path = Path(folder).absolute()
    if is_writing_to(path):  # the environment asks for the same
        yield
        return
    if (world := open_world()) is not None:
        recorder_of(world)
    writer = TraceWriter(path, is_of_block=True)
    ended_by = "end"
    try:
        yield
    except BaseException as error:
        ended_by = f"{type(error).__name__}: {error}"
        raise
    finally:
        writer.close(ended_by)
