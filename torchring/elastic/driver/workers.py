"""What the coordinator knows of a worker and of a generation, and the limits that the user sets."""

from __future__ import annotations

import enum
import signal
from dataclasses import dataclass, field
from typing import Final

from torchring.elastic.protocol import Card

UNLIMITED: Final = 1 << 30
_PROOF_SECONDS: Final = 5.0  # of running that prove a worker whose number of steps is unknown


@dataclass(frozen=True)
class Limits:
    """The limits that the user sets.

    Attributes:
        size: number of workers to begin with; UNLIMITED for as many as there are slots.
        min_size, max_size: fewest and most workers that train.
        elastic_timeout: seconds that the job waits for `min_size` workers, and for a worker to come.
        heartbeat_timeout: seconds of silence after which a worker is killed.
        stall_timeout: seconds after which a worker is killed that does not move while others wait for it; None: never.
        reset_limit: number of generations that may follow the first one; None for any number.
        cooldown: shortest and longest time in seconds for which a slot is left out where workers fail.
    """

    size: int
    min_size: int = 1
    max_size: int = UNLIMITED
    elastic_timeout: float = 600.0  # Horovod's
    heartbeat_timeout: float = 10.0
    stall_timeout: float | None = None
    reset_limit: int | None = None
    cooldown: tuple[float, float] = (1.0, 600.0)


class Stage(enum.IntEnum):
    """The stage of the current generation. A generation only moves forward, and may skip stages."""

    PUBLISHED = 1  # its workers open a world together
    RUNNING = 2  # they train
    BROKEN = 3  # a worker is lost: the others are told at once, and meet
    CALLED = 4  # a worker has left, or new workers wait: the others are told, and meet at the end of their step
    LEFT = 5  # each worker has met, has ended, or is about to end: the next generation can begin


@dataclass(eq=False)
class Worker:
    number: int
    host: str
    slot: int
    started_at: float
    # What it says
    card: Card = field(default_factory=lambda: Card("starting"))
    changed_at: float = 0.0  # when its state changed last
    said_at: float = 0.0  # when it gave a sign of life last
    moved_at: float = 0.0  # when it was seen to make progress, or to begin to wait
    pid: int | None = None
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
        return f"worker {self.number} on {self.host}"

    @property
    def end(self) -> str:
        """Text for people that says how it has gone."""
        if self.is_dismissed:
            return f"{self.name} was told to end"
        if self.is_going:
            return f"{self.name} {'left' if self.card.state == 'leaving' else 'has finished'}"
        return f"{self.name} {self.lost}"

    def has_worked(self, clock: float) -> bool:
        """True if it has made steps."""
        if self.card.made >= 0:
            return self.card.made > 0
        return self.card.state == "running" and clock - self.changed_at > _PROOF_SECONDS


def how_it_ended(code: int, worker: Worker, is_ssh: bool) -> str:
    if worker.card.state == "unfit":
        return f"does not fit the others: {worker.card.reason}"
    if is_ssh:
        return "could not be started, or ended with exit code 255: see what ssh says above"
    try:
        if code > 128:
            return f"was killed by {signal.Signals(code - 128).name}"
    except ValueError:
        pass
    early = " before it came to torchring.elastic.run" if worker.card.state == "starting" else ""
    return f"ended with exit code {code}{early}"
