"""What ends a job, or keeps a slot out of it: losses without a step in between, failures in a slot, and the end itself.

A job may lose any number of workers, as long as it makes new steps in between. Where workers fail again and again, the
slot is left out, as by Horovod's blacklist with a cooldown. The first failure leaves the slot in use. The second
failure in a row leaves the slot out for a second, the third for two, and so on up to ten minutes, each time with
jitter: slots that fail for the same reason shall not all come back at the same moment.
"""

from __future__ import annotations

import math
import random
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final

_STORM_SECONDS: Final = 60.0  # for which signals from outside may end worker after worker
_LIVES: Final = 3  # losses of all workers, one after another, without a new step
_LOSSES_PER_SLOT: Final = 3  # losses in a row without a step, after which the script is taken to be wrong
_FEWEST_SLOTS: Final = 4  # that this is counted for
_JITTER: Final = 0.25  # of a delay is random


@dataclass
class Ending:
    """How far the job is from its end.

    Attributes:
        is_near: a worker has finished.
        began_at: when the job was over; None before.
        code: exit code of the driver; None if the training has finished.
        failed_code: of the first process of the current generation that failed.
        is_hurried: workers were told to end at last.
        num_signals: number of signals that the driver has got.
    """

    is_near: bool = False
    began_at: float | None = None
    code: int | None = None
    failed_code: int = 0
    is_hurried: bool = False
    num_signals: int = 0


class Losses:
    """The losses of a job since its last step, and the steps.

    Attributes:
        first: the first worker that failed, as text, and its exit code: since all workers were started anew, or since a
            generation began after a step. None if no worker has failed.
        has_stepped: True if a step was made since all workers were started anew.
        checkpoint: path of the newest checkpoint; "" for none.
    """

    def __init__(self) -> None:
        self.first: tuple[str, int] | None = None
        self.has_stepped = False
        self.checkpoint = ""
        # Losses without a step in between
        self._number = 0
        self._since = 0.0
        self._are_from_outside = True  # all of them: signals that others than the script send
        # Steps of the state, now and when all workers were lost
        self._steps = -1
        self._steps_before = -1
        self._checkpoint_before = ""
        self._idle_lives = 0

    def note_steps(self, steps: int, *, is_new: bool) -> None:
        """A worker has told its number of steps. `is_new`: it has made one itself."""
        self._steps = max(self._steps, steps)
        if is_new:
            self.has_stepped, self._number = True, 0

    def note_loss(self, what: str, code: int, now: float, *, from_outside: bool) -> None:
        """A worker was lost. `what`: which one and how, for people."""
        if not self._number:
            self._since, self._are_from_outside = now, True
        self._number += 1
        self._are_from_outside = self._are_from_outside and from_outside
        if self.first is None or (code and not self.first[1]):
            self.first = (what, code)

    def begin_anew(self) -> None:
        """All workers have ended, and new ones start."""
        self.first, self.has_stepped = None, False

    def why_too_many(self, num_slots: int, now: float) -> tuple[str, int] | None:
        """Why the losses in a row show that the script is wrong, and the exit code. None if they do not."""
        if self._number <= _LOSSES_PER_SLOT * max(num_slots, _FEWEST_SLOTS) or self._is_storm(now):
            return None
        what, code = self.first or ("", 1)
        return f"{self._number} workers were lost in a row without a step in between; first {what}", code or 1

    def why_no_start(self, now: float) -> tuple[str, int] | None:
        """All workers have ended: why the script cannot even begin, and the exit code. None if it can."""
        if self.first is None or self.has_stepped or (self._steps > 0 and self._is_storm(now)):
            return None
        what, code = self.first
        hint = "" if code else "; does the script call torchring.elastic.run?"
        return f"all workers have ended, and none of them has made a step; first {what}{hint}", code

    def end_life(self, now: float) -> tuple[str, int] | None:
        """No worker of the last generation is left. Returns why new ones would get no further, and the exit code."""
        has_progressed = self._steps > self._steps_before or self.checkpoint != self._checkpoint_before
        self._idle_lives = 0 if has_progressed else self._idle_lives + 1
        self._steps_before, self._checkpoint_before = self._steps, self.checkpoint
        if self._idle_lives < _LIVES or self._is_storm(now):
            return None
        what, code = self.first or ("they were told to end", 1)
        return f"all workers were lost {self._idle_lives} times without a new step; first {what}", code or 1

    def _is_storm(self, now: float) -> bool:
        """True if all losses since the last step came from outside, and the first of them is not long ago.

        Hosts that are taken away say nothing about the script. But the kernel kills a script that needs too much
        memory by the same signal, again and again.
        """
        return self._are_from_outside and now - self._since < _STORM_SECONDS


class Cooldown:
    """Counts failures, of slots or of whole hosts.

    Args:
        shortest, longest: seconds for which a slot is left out, after its second failure in a row, and at most.
        randomness: where the jitter comes from.
    """

    def __init__(self, shortest: float, longest: float, randomness: random.Random) -> None:
        self._shortest = shortest
        self._longest = longest
        self._random = randomness
        self._failures: dict[Hashable, int] = {}
        self._until: dict[Hashable, float] = {}

    def fail(self, slot: Hashable, now: float) -> float:
        """Note that a worker has failed there. Returns for how many seconds the slot is left out."""
        failures = self._failures[slot] = self._failures.get(slot, 0) + 1
        if failures == 1:
            return 0.0
        delay = min(self._longest, self._shortest * 2.0 ** min(failures - 2, 40))
        delay *= 1 - _JITTER * self._random.random()
        self._until[slot] = now + delay
        return delay

    def exclude(self, slot: Hashable) -> None:
        """Leave the slot out for good."""
        self._until[slot] = math.inf

    def succeed(self, slot: Hashable) -> None:
        """Note that a worker has done well there: earlier failures count no more."""
        self._failures.pop(slot, None)
        self._until.pop(slot, None)

    def is_over(self, slot: Hashable, now: float) -> bool:
        """Return True if the slot may be used."""
        return now >= self._until.get(slot, now)

    def failures(self, slot: Hashable) -> int:
        """Number of failures in a row."""
        return self._failures.get(slot, 0)
