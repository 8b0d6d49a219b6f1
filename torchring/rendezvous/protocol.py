"""What the driver of an elastic job and its workers tell each other, through the store that the driver hosts.

A *worker* is a process. It gets a number when it starts, which no other worker gets. A *generation* is a world:
workers that train together, with ranks 0 .. size - 1. Generations are numbered from 1.

    worker                                   store                            driver

    meets: "I have left generation 3"        worker/7                         reads all cards every 50 ms, or 10
                                             plan/4, then latest              "generation 4 is 7, 2, 9"
    opens the world of generation 4          world/4/...
    runs, says now and then that it lives    worker/7, beat/7                 kills a worker that has been silent
                                             broken                           "a worker of generation 4 is lost"
    leaves at the end of a step              call                             "generation 4 is to meet: 12 has come"
    saves, and ends                          end                              "the job is over, because ..."

The driver alone decides who belongs to a generation, so workers need not agree on that. The driver sees the end of the
processes that it has started, and kills a worker that has been silent for a while. What a worker knows of the others of
its generation comes from their world.

The driver sets `call`, `broken`, `latest` and `end` before it starts a worker, and `worker/N` and `beat/N` before it
starts worker N: reading never waits. Nothing here imports torch, which takes seconds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Final, Literal

VARIABLE: Final = "TORCHRING_ELASTIC"  # holds an `Invitation`
PREFIX: Final = "torchring/elastic/"  # of all keys
TOKEN: Final = "token"  # the driver's, by which a worker knows that the store is the right one
CALL: Final = "call"  # the number of the generation that is to meet at the end of its step; 0 for none
BROKEN: Final = "broken"  # a `Broken`
LATEST: Final = "latest"  # the number of the newest plan; 0 for none
END: Final = "end"  # why the job is over, for people; empty as long as it is not
LAYOUT: Final = "layout"  # what the workers' states consist of, a JSON list of lines; from rank 0 of each generation

BEAT_SECONDS: Final = 0.5  # between two signs of life of a worker
LOOK_SECONDS: Final = 0.1  # between two looks of a worker at `call`, `broken` and `end`

State = Literal["starting", "meeting", "running", "leaving", "finished"]


def card_key(worker: int) -> str:
    """The key of worker N's `Card`."""
    return f"worker/{worker}"


def beat_key(worker: int) -> str:
    """The key of worker N's `Beat`."""
    return f"beat/{worker}"


def plan_key(generation: int) -> str:
    """The key of a generation's `Plan`. Written once, before `LATEST` says so."""
    return f"plan/{generation}"


def world_prefix(generation: int) -> str:
    """The prefix of the keys of a generation's world. A driver that breaks the generation writes `gave_up` there."""
    return f"world/{generation}"


@dataclass(frozen=True)
class Invitation:
    """What the driver tells a worker in its environment.

    Attributes:
        worker: the worker's number.
        slot: number of the place on its host, and so of its GPU. A replacement has the slot of the lost worker.
        size: number of workers with which the job starts.
        addresses: where the store listens, the likeliest address first.
        port: of the store.
        token: what the store has under `TOKEN`.
        host: the name of the worker's host, as the driver knows it.
    """

    worker: int
    slot: int
    size: int
    addresses: tuple[str, ...]
    port: int
    token: str
    host: str

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Invitation:
        """Raises ValueError, TypeError or KeyError for another text."""
        read = json.loads(text)
        return cls(**{**read, "addresses": tuple(read["addresses"])})


@dataclass(frozen=True)
class Card:
    """What a worker says of itself. It replaces its card as a whole.

    Attributes:
        state: "starting": its script has not come to `torchring.elastic.run` yet.
            "meeting": waits for a plan of a generation that is newer than `generation`.
            "running": belongs to `generation`.
            "leaving": was told to end (SIGTERM), has finished its step, and is about to exit.
            "finished": its training function has returned, as those of all workers of `generation`.
        generation: the newest generation that the worker has belonged to, or tried to open; 0 for none.
        checkpoint: path of the newest checkpoint that the worker knows of; "" for none.
        reason: why the worker has left its generation, for people; "" if there is nothing to say.
    """

    state: State
    generation: int = 0
    checkpoint: str = ""
    reason: str = ""

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> Card:
        return cls(**json.loads(data))


@dataclass(frozen=True)
class Beat:
    """A worker's sign of life, every BEAT_SECONDS.

    Attributes:
        count: grows with each sign.
        steps: number of optimizer steps that the worker's state has behind it; -1 for none that it knows of.
        made: how many of them this process has made; -1 if it does not know.
    """

    count: int
    steps: int = -1
    made: int = -1

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> Beat:
        return cls(**json.loads(data))


@dataclass(frozen=True)
class Plan:
    """Who belongs to a generation.

    Attributes:
        generation: its number.
        workers: numbers of its workers: the worker of rank 0 first. Workers that have trained before come before new
            ones, in the order of their earlier ranks.
        reason: why there is a new generation, for people: "worker 3 on b was killed by SIGKILL".
    """

    generation: int
    workers: tuple[int, ...]
    reason: str

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> Plan:
        read = json.loads(data)
        return cls(**{**read, "workers": tuple(read["workers"])})


@dataclass(frozen=True)
class Broken:
    """Generations up to `generation` are broken: some of their workers are lost.

    Attributes:
        generation: number of the newest one; 0 for none.
        ranks: the lost ranks of that generation.
        reason: what happened to them, for people.
    """

    generation: int = 0
    ranks: tuple[int, ...] = ()
    reason: str = ""

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> Broken:
        read = json.loads(data)
        return cls(**{**read, "ranks": tuple(read["ranks"])})


def invitation(environ: Mapping[str, str]) -> Invitation | None:
    """What the driver has told this process. None if no driver has started it."""
    text = environ.get(VARIABLE)
    return None if text is None else Invitation.from_json(text)
