"""The messages between the driver of an elastic job and its workers. They go through the store that the driver hosts.

    worker                                   store, below torchring/elastic   driver

    meets: "I have left generation 3"        worker/7                         reads all cards every 50 ms, or 10
                                             orders                           "generation 4 is 7, 2, 9"
    opens the world of generation 4          world/4/...
    runs, says now and then that it lives    worker/7                         kills a worker that has been silent
                                             orders                           "a worker of generation 4 is lost"
    leaves at the end of a step              orders                           "generation 4 is to meet: 12 has come"
    saves, and ends                          orders                           "the job is over, because ..."

The driver alone decides which workers belong to a generation, so the workers need not agree on that. The driver sees
when the processes end that it has started, and kills a worker that has been silent for a while. A worker learns through
the world of its generation what the other workers of this generation do.

Reading never waits: the driver sets `orders` before it starts a worker, and `worker/N` before it starts worker N.
Nothing here imports torch, which takes seconds.
"""

import json
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Final, Literal

from torchring.errors import TopologyError

if TYPE_CHECKING:
    from typing_extensions import Self

_ROOT: Final = "torchring/elastic"  # all keys begin so
TOKEN: Final = f"{_ROOT}/token"  # signed, by which a worker knows that the store is the right one
ORDERS: Final = f"{_ROOT}/orders"  # the `Orders` of the driver

BEAT_SECONDS: Final = 0.5  # between two signs of life of a worker
LOOK_SECONDS: Final = 0.1  # between two looks of a worker at the orders

WorkerState = Literal[
    "starting",  # its script has not come to `torchring.elastic.run` yet
    "meeting",  # waits for a generation that is newer than `Card.generation`
    "running",  # belongs to that generation
    "leaving",  # was told to end (SIGTERM), has finished its step, and is about to exit
    "finished",  # its training function has returned, as those of all workers of that generation
]


def card_key(worker: int) -> str:
    return f"{_ROOT}/worker/{worker}"


def world_prefix(generation: int) -> str:
    """The prefix of the keys of a generation's world. A driver that breaks the generation writes `gave_up` there."""
    return f"{_ROOT}/world/{generation}"


class _Message:
    """A dataclass that travels as JSON. Its sequences are tuples."""

    def encode(self) -> bytes:
        return json.dumps(asdict(self)).encode()  # type: ignore[call-overload]

    @classmethod
    def decode(cls, data: bytes | str) -> "Self":
        try:
            read = json.loads(data)
            return cls(**{name: tuple(value) if isinstance(value, list) else value for name, value in read.items()})
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise TopologyError(
                f"a message of an elastic job is not a {cls.__name__} of torchring's ({type(error).__name__}): give "
                "all workers the same release of torchring"
            ) from error


@dataclass(frozen=True)
class Invitation(_Message):
    """The driver's message to a worker in its environment, under `rendezvous.environment.INVITATION`."""

    worker: int  # the worker's number
    slot: int  # number of the slot on its host, and so of its GPU. A replacement has the slot of the lost worker.
    size: int  # number of workers with which the job starts
    addresses: tuple[str, ...]  # where the store listens, the likeliest address first
    port: int  # of the store
    secret: str  # signs all values in the store. See `rendezvous.signed`.
    host: str  # the name of the worker's host, as the driver knows it


@dataclass(frozen=True)
class Card(_Message):
    """A worker's message about itself, and sign of life, every BEAT_SECONDS at least. Each card replaces the last."""

    state: WorkerState
    generation: int = 0  # number of the newest generation that the worker has belonged to, or tried to open; 0 for none
    reason: str = ""  # why the worker has left its generation, for people; "" if there is nothing to say
    has_lost_peer: bool = False  # it has left its generation because the connection to another worker broke
    given_up: tuple[int, ...] = ()  # ranks of its generation for which it has waited in vain
    pid: int = 0  # number of its process, for messages; 0 if unknown
    count: int = 0  # grows with each card; 0 before the first
    steps: int = -1  # number of optimizer steps that the worker's state has behind it; -1 for none that it knows of
    made: int = 0  # how many of them this process has made
    is_last: bool = False  # the script has ended, and the process is about to: no more cards come
    # changes with each operation between ranks that the worker begins or finishes, and each part of a step
    progress: int = 0
    waits: bool = False  # for other ranks


@dataclass(frozen=True)
class Orders(_Message):
    """All that the driver says. Each message replaces the last."""

    generation: int = 0  # number of the newest generation, from 1; 0 before the first
    # numbers of its workers: the worker of rank 0 first. Workers that have trained before come before new ones, in the
    # order of their earlier ranks.
    workers: tuple[int, ...] = ()
    reason: str = ""  # why there is this generation, for people: "worker 3 on b was killed by SIGKILL"
    broken: int = 0  # generations up to this number are broken: some of their workers are lost
    lost: tuple[int, ...] = ()  # the lost ranks of that generation
    how: str = ""  # what happened to them, for people
    call: int = 0  # number of the generation that is to meet at the end of its step; 0 for none
    over: str = ""  # why the job is over, for people; "" as long as it is not
