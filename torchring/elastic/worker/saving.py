"""When a State writes checkpoints, and what it says when it loads one."""

import logging
import time
from datetime import timedelta
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

from torchring.collectives.service import Join, internal_collectives_of
from torchring.elastic.worker.checkpoint import CheckpointWriter, copy_of, newest, newest_step
from torchring.elastic.worker.parts import FORMAT, Parts
from torchring.world import World

_EVERY: Final = timedelta(minutes=5)
_LONGEST_WRITE: Final = 3600.0  # seconds

_log = logging.getLogger("torchring.elastic")


class Saving:
    """The checkpoints of a State, `every` so many steps, or so much time. Without a folder, there are none."""

    def __init__(self, parts: Parts, folder: str | Path | None, every: int | timedelta | None) -> None:
        if every is not None and not (timedelta() < every if isinstance(every, timedelta) else every >= 1):
            raise ValueError(f"every must be a number of steps, 1 or more, or a positive timedelta, got {every!r}")
        self.folder = None if folder is None else Path(folder)  # where they are
        self._parts = parts
        self._every = _EVERY if every is None else every
        self._writer: CheckpointWriter | None = None
        self.begin()

    def newest_step(self) -> int:
        """Number of steps of the newest checkpoint in the folder; -1 for none."""
        step = None if self.folder is None else newest_step(self.folder)
        return -1 if step is None else step

    def begin(self) -> None:
        self._saved_at = (self._parts.counters.steps, time.monotonic())

    def _open(self) -> CheckpointWriter:
        """This rank is the one that writes."""
        assert self.folder is not None
        self._writer = self._writer or CheckpointWriter(self.folder)
        return self._writer

    def load_newest(self) -> bool:
        """Become what the newest checkpoint has; False if there is none. Raises ValueError: it is of another model."""
        found = None if self.folder is None else newest(self.folder)
        if found is None:
            return False
        step, everything = found
        if everything.get("format") != FORMAT:
            raise ValueError(f"the checkpoint of step {step} in {self.folder} is of another version of torchring")
        mine = self._parts.layout()
        if everything["layout"] != mine:
            saved_has, mine_has = difference(everything["layout"], mine)
            raise ValueError(
                f"the checkpoint of step {step} in {self.folder} is of another model or State: it has {saved_has}, "
                f"the script has {mine_has}; use another folder, or remove the checkpoints"
            )
        self._parts.become(everything)
        age = timedelta(seconds=round(time.time() - everything["time"]))
        _log.warning("training goes on from the checkpoint of step %d in %s, which is %s old", step, self.folder, age)
        return True

    def write_if_due(self, world: World) -> None:
        """Collective if an optimizer has shard=True, else of rank 0."""
        is_sharded = bool(self._parts.sharded)
        if self.folder is None or (world.rank != 0 and not is_sharded):
            return
        if is_sharded and world.shared(Join).is_open:  # ranks that have ended do not come here
            return
        now, (steps, at) = self._parts.counters.steps, self._saved_at
        if isinstance(self._every, int):
            is_due = now >= steps + self._every
        else:
            is_due = now > steps and time.monotonic() >= at + self._every.total_seconds()
            if is_sharded and world.size > 1:  # by the clock of rank 0
                is_due = internal_collectives_of(world).any_rank(is_due and world.rank == 0)
        writer = self._open() if world.rank == 0 else None
        is_busy = writer is not None and writer.is_busy
        if is_due and (is_sharded or not is_busy):
            self.begin()
            everything = self._parts.everything()
            if writer is not None and not is_busy:
                writer.write(now, copy_of(everything))

    def save_now(self, everything: dict[str, Any] | None = None) -> str:
        """Write a checkpoint, unless the newest has this step. Returns the path of the newest; "" if there is none.

        By default, it is of what `Parts.everything` returns now.
        """
        writer, steps = self._open(), self._parts.counters.steps
        writer.flush(_LONGEST_WRITE)
        if self.newest_step() != steps:
            writer.write(steps, self._parts.everything() if everything is None else everything)
            writer.flush(_LONGEST_WRITE)
        return str(writer.newest or "")


def difference(theirs: list[str], mine: list[str]) -> tuple[str, str]:
    """The first line that differs, in both."""
    return next(pair for pair in zip_longest(theirs, mine, fillvalue="nothing more") if pair[0] != pair[1])
