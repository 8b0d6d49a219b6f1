"""Actions that the coordinator has the driver carry out."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from torchring.elastic.protocol import Broken, Generation


class Start(NamedTuple):
    """Start a worker."""

    worker: int
    host: str
    slot: int


class Send(NamedTuple):
    """Send a worker a signal."""

    worker: int
    number: int


class Publish(NamedTuple):
    """Tell the workers that a generation begins."""

    generation: Generation


class Break(NamedTuple):
    """Tell the workers of a generation that it is broken, those too that are opening its world."""

    broken: Broken


class Call(NamedTuple):
    """Tell the workers of a generation to meet at the end of their step."""

    generation: int


class Over(NamedTuple):
    """Tell all workers that the job is over."""

    reason: str


class Forget(NamedTuple):
    """Remove what is known of a worker that has ended."""

    worker: int


class Say(NamedTuple):
    """Tell the user."""

    text: str


class Exit(NamedTuple):
    """All workers have ended: end the driver."""

    code: int


Action: TypeAlias = Start | Send | Publish | Break | Call | Over | Forget | Say | Exit
