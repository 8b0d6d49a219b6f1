"""Actions that the coordinator has the driver carry out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from torchring.elastic.protocol import Broken, Generation


@dataclass(frozen=True)
class Start:
    """Start a worker."""

    worker: int
    host: str
    slot: int


@dataclass(frozen=True)
class Send:
    """Send a worker a signal."""

    worker: int
    number: int


@dataclass(frozen=True)
class Publish:
    """Tell the workers that a generation begins."""

    generation: Generation


@dataclass(frozen=True)
class Break:
    """Tell the workers of a generation that it is broken, those too that are opening its world."""

    broken: Broken


@dataclass(frozen=True)
class Call:
    """Tell the workers of a generation to meet at the end of their step."""

    generation: int


@dataclass(frozen=True)
class Over:
    """Tell all workers that the job is over."""

    reason: str


@dataclass(frozen=True)
class Forget:
    """Remove what is known of a worker that has ended."""

    worker: int


@dataclass(frozen=True)
class Say:
    """Tell the user."""

    text: str


@dataclass(frozen=True)
class Exit:
    """All workers have ended: end the driver."""

    code: int


Action: TypeAlias = Start | Send | Publish | Break | Call | Over | Forget | Say | Exit
