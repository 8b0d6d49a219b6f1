"""Counts the workers that a job loses, and decides when the script is at fault, so that new workers would be lost too.

A job may lose any number of workers, as long as it makes new steps in between.
"""

from __future__ import annotations

from typing import Final

_STORM_SECONDS: Final = 60.0  # for which signals from outside may end worker after worker
_LIVES: Final = 3  # losses of all workers, one after another, without a new step
_LOSSES_PER_SLOT: Final = 3  # losses in a row without a step, after which the script is taken to be wrong
_FEWEST_SLOTS: Final = 4  # that this is counted for


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

        Machines that are taken away say nothing about the script. But the kernel kills a script that needs too much
        memory by the same signal, again and again.
        """
        return self._are_from_outside and now - self._since < _STORM_SECONDS
