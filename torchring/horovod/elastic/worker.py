"""This process as a worker of `torchring run --elastic`, for `init()`, `shutdown()` and `elastic.run`.

The driver starts workers, says which of them train together, and announces changes. torchring.elastic's own worker
talks to the driver; this module translates between the two.
"""

import atexit
import contextlib
import signal
import sys
from collections.abc import Iterator
from typing import NoReturn

import torch

import torchring.horovod as hvd
from torchring import default_world as worlds
from torchring.collectives.service import collectives_of
from torchring.elastic.worker.loop import Signals
from torchring.elastic.worker.membership import MembershipChange
from torchring.elastic.worker.worker import JobOverError, Worker, worker_of_process
from torchring.errors import TopologyError
from torchring.rendezvous.environment import ELASTIC
from torchring.world import World

_worker: "ElasticWorker | None" = None  # of this process


def find_worker() -> "ElasticWorker | None":
    """This process as a worker. None if `torchring run --elastic` did not start it: ranks stay as they are.

    Raises TopologyError if the driver does not answer.
    """
    global _worker
    worker = worker_of_process() if worlds.launcher() == ELASTIC else None
    if worker is None:
        _worker = None
    elif current_worker() is None:
        _worker = ElasticWorker(worker)
    return _worker


def current_worker() -> "ElasticWorker | None":
    """The worker that `init` has found. None before `init`, and if ranks stay as they are."""
    return _worker if _worker is not None and _worker.elastic.is_own else None


def agree(name: str, *values: float) -> list[float]:
    """The largest of each value over all ranks. Collective."""
    found: list[float] = hvd.allreduce(torch.tensor(values, dtype=torch.float64), name=name, op=hvd.Max).tolist()
    return found


class ElasticWorker:
    """This process as a worker."""

    def __init__(self, worker: Worker) -> None:
        self.elastic = worker
        # Why this worker has left its ranks, for people, and whether another one is lost, or may be.
        self.reason, self.has_lost_peer = "", False
        self._signals: Signals | None = None
        self._is_over = False
        atexit.register(self._finish_at_exit)

    def join(self, timeout_seconds: float | None) -> World:
        """Wait until the driver says who trains together, this worker among them, and meet these. Collective.

        Ends this process if the job is over, or goes on without this worker. Raises RingError if another worker is lost
        meanwhile: leave, and join again.
        """
        if self._is_over:
            raise TopologyError(
                "the training of this elastic job has finished, and its workers meet no more; call all training from "
                "one function that hvd.elastic.run decorates"
            )
        if not worlds.is_initialized():
            worlds.init(timeout_seconds=timeout_seconds)
        try:
            return self.elastic.meet(self.reason, has_lost_peer=self.has_lost_peer)
        except JobOverError as over:
            self._say_goodbye(str(over))
            if self.elastic.leaves:
                self._end()
            print(f"torchring: {over}", file=sys.stderr, flush=True)
            sys.exit(0 if self.elastic.num_steps < 0 else 1)  # 0: it came when the others had finished

    def changes(self) -> tuple[bool, bool]:
        """Whether this worker is to leave; and whether the driver has announced other changes since it has joined."""
        change = worlds.default_world().shared(MembershipChange)
        return change.leaves, change.is_wanted and not change.leaves

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Inside, a worker that is told to end leaves at its next commit."""
        with Signals([signal.SIGTERM, signal.SIGINT]) as self._signals:
            self._signals.on_signal(self.elastic.ask_to_leave)
            yield

    def end_if_told(self) -> None:
        """End this process if it was told to end."""
        if self.elastic.leaves:
            self._say_goodbye("it was told to end")
            self._end()

    def finish(self) -> None:
        """Training has ended on this rank, and so on all. Collective."""
        world = worlds.default_world()
        if world.size > 1:
            collectives_of(world).barrier()
        self._is_over = True
        self.elastic.finish()

    def _say_goodbye(self, reason: str) -> None:
        self._is_over = True
        self.elastic.say_goodbye(reason)
        self.elastic.close()

    def _end(self) -> NoReturn:
        if self._signals is not None:
            self._signals.end()
        sys.exit(128 + signal.SIGTERM)

    def _finish_at_exit(self) -> None:
        """A script without `elastic.run` has trained until its end."""
        has_failed = getattr(sys, "last_value", None) is not None
        if self.elastic.is_own and self.elastic.generation and not self._is_over and not has_failed:
            self.elastic.finish()
