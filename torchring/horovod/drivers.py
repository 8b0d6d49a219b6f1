"""The driver of an elastic job, as one of its workers sees it: that of `torchring run --elastic`, or Horovod's own.

Either of them starts workers, says which of them train together, and announces changes. `init()` joins the ranks that
there are, and `elastic.run` goes on after a change.

Horovod's driver is horovodrun with --min-np or --host-discovery-script, as of Horovod 0.28. What a worker has to do:

    first init()      rank and size are in the environment
    later init()      GET /rank_and_size/HOST:LOCAL_RANK, which the driver answers when each worker has asked or ended.
                      "rank,size,local_rank,local_size,cross_rank,cross_size"; rank -1: this worker is not needed
    at any time       be told of changed hosts: see notices.py

Ask once for each change: a second request of a worker would count as that of another worker.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import logging
import os
import signal
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any, Final, NoReturn, Protocol

import torch

from torchring import default_world as worlds
from torchring.collectives.service import collectives_of
from torchring.elastic.worker.loop import Signals
from torchring.elastic.worker.member import JobOverError, Member, member_of_process
from torchring.errors import TopologyError
from torchring.generation import Change
from torchring.horovod.notices import NoticeService
from torchring.horovod.settings import Settings
from torchring.rendezvous.environment import ELASTIC
from torchring.rendezvous.key_values import get
from torchring.world import World

# What changed, as Horovod's launcher counts: bits that add up.
NO_UPDATE, REMOVED, ADDED = 0, 1, 2

_HOROVODRUN: Final = "horovodrun"
_PLACE: Final = (
    "HOROVOD_GLOO_RENDEZVOUS_ADDR",
    "HOROVOD_GLOO_RENDEZVOUS_PORT",
    "HOROVOD_HOSTNAME",
    "HOROVOD_LOCAL_RANK",
)
_TOLD_ANEW: Final = tuple(
    f"HOROVOD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE")
)
_ELASTIC_SECONDS: Final = 600.0  # Horovod's, for which its driver waits for hosts
_MORE_SECONDS: Final = 60.0  # the driver ends the job by itself after the time above

_log = logging.getLogger("torchring.horovod.elastic")


class Driver(Protocol):
    """What `init`, `shutdown` and `elastic.run` need of a driver.

    Attributes:
        reason: why this worker has left its ranks, for people; "" if there is nothing to say.
        num_commits: how many commits this worker has behind it, for people.
    """

    reason: str
    num_commits: int

    def join(self, settings: Settings) -> World:
        """Wait until the driver says who trains together, this worker among them, and meet these. Collective.

        Ends this process if the job is over, or goes on without this worker. Raises RingError if a worker is lost
        meanwhile: leave, and join again.
        """

    def leave(self) -> None:
        """Close the world. Does nothing if none is open."""

    def changes(self) -> int:
        """What the driver has announced since this worker has joined: REMOVED, ADDED, or both added up."""

    def training(self) -> contextlib.AbstractContextManager[object]:
        """Inside, this worker leaves at a commit if it is told to end."""

    def end_if_told(self) -> None:
        """End this process if it was told to end."""

    def finish(self) -> None:
        """Training has ended on this rank, and so on all. Collective."""


def agree(name: str, *values: float) -> list[float]:
    """The largest of each value, over all ranks. Collective."""
    hvd: Any = importlib.import_module("torchring.horovod")  # which imports this module
    found: list[float] = hvd.allreduce(torch.tensor(values, dtype=torch.float64), name=name, op=hvd.Max).tolist()
    return found


_driver: Driver | None = None  # through which this process joins
_pid: int | None = None
_server: tuple[str | None, ...] = ()  # of Horovod's launcher; its Spark and Ray executors start one job after the other


def find(settings: Settings) -> Driver | None:
    """The driver that has started this process. None if ranks stay as they are.

    Raises TopologyError if the driver does not answer.
    """
    global _driver, _pid, _server
    launcher = worlds.launcher()
    server = (launcher, *(os.environ.get(key) for key in _PLACE[:2]))
    if (_pid, _server) == (os.getpid(), server):
        return _driver
    if _pid == os.getpid() and isinstance(_driver, HorovodDriver):
        _driver.close()
    found: Driver | None = None
    if launcher == ELASTIC:
        member = member_of_process()
        found = None if member is None else TorchringDriver(member)
    elif launcher == _HOROVODRUN and settings.is_elastic and all(key in os.environ for key in _PLACE):
        found = HorovodDriver(os.environ)
    _driver, _pid, _server = found, os.getpid(), server
    return found


def current() -> Driver | None:
    """The driver that `init` has found. None before, and if ranks stay as they are."""
    return _driver if _pid == os.getpid() else None


class TorchringDriver:
    """That of `torchring run --elastic`."""

    def __init__(self, member: Member) -> None:
        self.reason = ""
        self._member = member
        self._signals: Signals | None = None
        self._is_over = False
        atexit.register(self._finish_at_exit, os.getpid())

    @property
    def num_commits(self) -> int:
        return self._member.num_steps

    @num_commits.setter
    def num_commits(self, number: int) -> None:
        self._member.num_steps = number

    def join(self, settings: Settings) -> World:
        if self._is_over:
            raise TopologyError(
                "the training of this elastic job has finished, and its workers meet no more; call all training from "
                "one function that hvd.elastic.run decorates"
            )
        if not worlds.is_initialized():
            worlds.init(timeout_seconds=settings.timeout_seconds)
        try:
            return self._member.meet(self.reason)
        except JobOverError as over:
            self._say_goodbye(str(over))
            if self._member.leaves:
                self._end()
            print(f"torchring: {over}", file=sys.stderr, flush=True)
            sys.exit(0 if self._member.num_steps < 0 else 1)  # 0: it came when the others had finished

    def leave(self) -> None:
        self._member.leave()

    def changes(self) -> int:
        change = worlds.default_world().shared(Change)
        if change.leaves:
            return REMOVED
        return ADDED if change.is_wanted else NO_UPDATE

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        with Signals([signal.SIGTERM, signal.SIGINT]) as self._signals:
            self._signals.on_signal(self._member.ask_to_leave)
            yield

    def end_if_told(self) -> None:
        if self._member.leaves:
            self._say_goodbye("it was told to end")
            self._end()

    def finish(self) -> None:
        world = worlds.default_world()
        if world.size > 1:
            collectives_of(world).barrier()
        self._is_over = True
        self._member.finish()

    def _say_goodbye(self, reason: str) -> None:
        self._is_over = True
        self._member.say_goodbye(reason)
        self._member.close()

    def _end(self) -> NoReturn:
        if self._signals is not None:
            self._signals.end()
        sys.exit(128 + signal.SIGTERM)

    def _finish_at_exit(self, pid: int) -> None:
        """A script without `elastic.run` has trained until its end."""
        has_failed = getattr(sys, "last_value", None) is not None
        if os.getpid() == pid and self._member.generation and not self._is_over and not has_failed:
            self._member.finish()


class HorovodDriver:
    """Horovod's own.

    Args:
        environ: of this process. Rank and sizes are changed there, as Horovod does, whenever the driver says new ones.
    """

    def __init__(self, environ: os._Environ[str]) -> None:
        self.reason = ""
        self.num_commits = -1
        self._environ = environ
        self._server = (environ["HOROVOD_GLOO_RENDEZVOUS_ADDR"], int(environ["HOROVOD_GLOO_RENDEZVOUS_PORT"]))
        # The driver knows this worker under the name that it had at first.
        self._name = f"{environ['HOROVOD_HOSTNAME']}:{environ['HOROVOD_LOCAL_RANK']}"
        self._timeout_seconds = _timeout(environ) + _MORE_SECONDS
        self._has_joined = False
        self._changes = NO_UPDATE
        self._notices: NoticeService | None = None

    def join(self, settings: Settings) -> World:
        if self._notices is None:
            self._notices = NoticeService(self._server, self._name, self._environ.get("HOROVOD_GLOO_IFACE"), self._hear)
        if self._has_joined:
            worlds.leave_launch()
            self._changes = NO_UPDATE  # those that come from now on may be announced twice, which does no harm
            self._ask_for_rank()
        self._has_joined = True
        return worlds.init(timeout_seconds=None if worlds.is_initialized() else settings.timeout_seconds)

    def leave(self) -> None:
        worlds.shutdown()

    def changes(self) -> int:
        return self._changes

    def training(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()  # this driver's SIGTERM ends workers

    def end_if_told(self) -> None:
        return

    def finish(self) -> None:
        return  # the driver sees the exit code

    def close(self) -> None:
        """Hear of nothing more."""
        if self._notices is not None:
            self._notices.close()

    def _hear(self, timestamp: float, changes: int) -> None:
        """On the thread of the service."""
        _log.info("the driver has announced at %s that hosts were %s", time.ctime(timestamp), _in_words(changes))
        self._changes |= changes

    def _ask_for_rank(self) -> None:
        try:
            said = get(self._server, self._name, scope="rank_and_size", seconds=self._timeout_seconds)
            numbers = [int(number) for number in (said or b"").split(b",")]
            if len(numbers) != len(_TOLD_ANEW):
                raise ValueError(f"{len(_TOLD_ANEW)} numbers are needed, got {said!r}")
        except (OSError, ValueError) as error:
            raise TopologyError(
                f"horovodrun's driver at {self._server[0]}:{self._server[1]} does not say which rank {self._name} is "
                f"now: {type(error).__name__}: {error}; it may have ended the job"
            ) from error
        if numbers[0] < 0:
            print(f"torchring: {self._name} has been removed from the elastic job", file=sys.stderr, flush=True)
            sys.exit(1)  # which the driver ignores; 0 would mean that training has finished
        _log.info("%s is rank %d of %d now", self._name, *numbers[:2])
        self._environ.update({key: str(number) for key, number in zip(_TOLD_ANEW, numbers, strict=True)})


def _timeout(environ: Mapping[str, str]) -> float:
    try:
        return float(environ.get("HOROVOD_ELASTIC_TIMEOUT", _ELASTIC_SECONDS))
    except ValueError:
        return _ELASTIC_SECONDS


def _in_words(changes: int) -> str:
    return " and ".join(word for bit, word in ((ADDED, "added"), (REMOVED, "removed")) if changes & bit) or "changed"
