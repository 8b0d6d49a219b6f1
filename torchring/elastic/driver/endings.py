"""What ends a job, or keeps a slot out of it: losses without a new step in between, failures in a slot, and the end.

A job may lose any number of workers, as long as its state gets further in between. Where workers fail again and again,
the slot is left out, as by Horovod's blacklist with a cooldown. The first failure leaves the slot in use. The second
failure in a row leaves the slot out for a second, the third for two, and so on up to ten minutes.
"""

from dataclasses import dataclass, field
from typing import Final, TypeAlias

_LOSSES_PER_SLOT: Final = 3  # losses in a row without a new step, after which the script is taken to be wrong
_FEWEST_SLOTS: Final = 4  # that this is counted for

Slot: TypeAlias = tuple[str, int]  # a host, and the number of the slot there


@dataclass
class Ending:
    """How far the job is from its end."""

    is_near: bool = False  # a worker has finished
    began_at: float | None = None  # when the job was over; None before
    code: int | None = None  # exit code of the driver; None if the training has finished
    failed_code: int = 0  # of the first process of the current generation that failed
    is_hurried: bool = False  # workers were told to end at last
    num_signals: int = 0  # number of signals that the driver has got


@dataclass
class Losses:
    """The losses of a job since it was further than ever before."""

    first: tuple[str, int] | None = None  # the first worker that failed, as text, and its exit code; None if none has
    number: int = 0  # of workers that were lost
    # the most steps that the state has had behind it, at a worker that has made one of them; -1 for none
    steps: int = -1

    def note_steps(self, steps: int) -> None:
        """A worker that has made steps has told how many the state has behind it."""
        if steps > self.steps:
            self.steps, self.number, self.first = steps, 0, None

    def note_loss(self, what: str, code: int) -> None:
        """A worker was lost. `what`: which one and how, for people."""
        self.number += 1
        if self.first is None or (code and not self.first[1]):
            self.first = (what, code)

    def why_hopeless(self, num_slots: int, *, all_ended: bool) -> tuple[str, int] | None:
        """Why the losses show that the script is wrong, and the exit code. None if they do not."""
        what, code = self.first or ("", 1)
        if self.number > _LOSSES_PER_SLOT * max(num_slots, _FEWEST_SLOTS):
            return f"{self.number} workers were lost in a row without a new step; first {what}", code or 1
        if all_ended and self.first is not None and self.steps < 0:
            hint = "" if code else "; does the script call torchring.elastic.run?"
            return f"all workers have ended, and none of them has made a step; first {what}{hint}", code
        return None


@dataclass
class Cooldown:
    """Counts failures of slots."""

    shortest: float  # seconds for which a slot is left out after its second failure in a row
    longest: float  # the same, at most
    failures: dict[Slot, int] = field(default_factory=dict)  # in a row, by slot
    _until: dict[Slot, float] = field(default_factory=dict)

    def fail(self, slot: Slot, now: float) -> float:
        """Note that a worker has failed there. Returns for how many seconds the slot is left out."""
        failures = self.failures[slot] = self.failures.get(slot, 0) + 1
        if failures == 1:
            return 0.0
        delay = min(self.longest, self.shortest * 2.0 ** min(failures - 2, 40))
        self._until[slot] = now + delay
        return delay

    def succeed(self, slot: Slot) -> None:
        """Note that a worker has done well there: earlier failures count no more."""
        self.failures.pop(slot, None)
        self._until.pop(slot, None)

    def is_over(self, slot: Slot, now: float) -> bool:
        """Return True if the slot may be used."""
        return now >= self._until.get(slot, now)
