"""What the coordinator knows of a worker and of a generation, and the limits that the user sets."""

import enum
import signal
from dataclasses import dataclass, field
from typing import Final

from torchring.elastic.driver.endings import Slot
from torchring.elastic.protocol import Card

UNLIMITED: Final = 1 << 30


@dataclass(frozen=True)
class Limits:
    """The limits that the user sets. Times are seconds."""

    size: int  # how many workers to begin with; UNLIMITED for as many as there are slots
    min_size: int = 1  # fewest workers that train
    max_size: int = UNLIMITED  # most workers
    elastic_timeout: float = 600.0  # that the job waits for `min_size` workers, and for a worker to come; Horovod's
    heartbeat_timeout: float = 10.0  # of silence, after which a worker is killed
    stall_timeout: float | None = None  # after which a worker is killed that does not move while others wait for it
    cooldown: tuple[float, float] = (1.0, 600.0)  # shortest and longest, of a slot that is left out where workers fail


class Stage(enum.IntEnum):
    """The stage of the current generation. A generation only moves forward, and may skip stages."""

    PUBLISHED = 1  # its workers open a world together
    RUNNING = 2  # they train
    BROKEN = 3  # a worker is lost: the others are told at once, and meet
    CALLED = 4  # a worker has left, or new workers wait: the others are told, and meet at the end of their step
    LEFT = 5  # each worker has met, has ended, or is about to end: the next generation can begin


@dataclass(eq=False)
class WorkerRecord:
    number: int
    slot: Slot
    started_at: float
    # What it says
    card: Card = field(default_factory=lambda: Card("starting"))
    changed_at: float = 0.0  # when its state changed last
    said_at: float = 0.0  # when it gave a sign of life last
    moved_at: float = 0.0  # when it was seen to make progress, or to begin to wait
    # What the driver knows of it
    rank: int = -1  # in the last generation that it belonged to
    code: int | None = None  # its exit code
    lost: str = ""  # how it ended, or why it was killed or given up
    is_killed: bool = False
    is_broken_off: bool = False  # the others know that it is lost
    is_dismissed: bool = False  # the driver has told it to end

    @property
    def is_lost(self) -> bool:
        return self.code is not None or bool(self.lost)

    @property
    def is_going(self) -> bool:
        return self.card.state in ("leaving", "finished")

    @property
    def name(self) -> str:
        return f"worker {self.number} on {self.slot[0]}"

    @property
    def end(self) -> str:
        """Text for people that says how it has gone."""
        if self.is_dismissed:
            return f"{self.name} was told to end"
        if self.is_going:
            return f"{self.name} {'left' if self.card.state == 'leaving' else 'has finished'}"
        return f"{self.name} {self.lost}"

    def note_end(self, code: int) -> None:
        self.code = code
        if not self.lost:
            self.lost = f"ended with exit code {code}"
            if (number := code - 128) > 0:
                name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
                self.lost = f"was killed by {name}"
            if code == 255 and not self.card.count:
                self.lost = "could not be started, or ended with exit code 255: ssh, if it is the cause, says why above"
            elif code <= 128 and self.card.state == "starting":
                self.lost += " before it came to torchring.elastic.run"
