"""The worker's side of `protocol.py`: `Worker` tells the driver how this process is, and meets the others.

One thread talks to the driver's store, because a store whose driver is stopped, or whose host is cut off, does not
answer for as long as TCP waits. The main thread waits for that thread, and can be interrupted.
"""

import logging
import os
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final

import torch.distributed as dist
from torch.distributed import Store

from torchring.elastic import protocol
from torchring.elastic.protocol import Card, Invitation, Orders, WorkerState
from torchring.elastic.worker.generation import leave_generation, open_generation
from torchring.elastic.worker.membership import MembershipChange
from torchring.errors import PeerLostError, TopologyError
from torchring.observe.flight_recorder.entries import FlightRecorder
from torchring.observe.services import monitor_of
from torchring.rendezvous.environment import CHOICE, ELASTIC, INVITATION
from torchring.rendezvous.rendezvous import within
from torchring.rendezvous.signed import sealed, signed
from torchring.rendezvous.store import search
from torchring.threads import end_at_exit
from torchring.world import World

_CONNECT_SECONDS: Final = 30.0
_MEETING_LOOK_SECONDS: Final = 0.01
_SILENT_SECONDS: Final = 60.0  # without an answer, after which the driver counts as gone
_GOODBYE_SECONDS: Final = 2.0  # for the last card

_log = logging.getLogger("torchring.elastic")


class JobOverError(Exception):
    """The driver has ended the job, or is gone, or this worker was told to end. The text says why."""


class Worker:
    """This process as a worker of an elastic job."""

    def __init__(self, invitation: Invitation) -> None:
        self.number = invitation.worker  # number of this worker
        self.generation = 0  # number of the generation that this worker belongs to, or has belonged to last; 0 for none
        self.num_steps = -1  # number of optimizer steps that the state has behind it; -1 for none. The driver is told.
        self.leaves = False  # True once this worker was told to end
        self._pid = os.getpid()
        self._changed = threading.Condition()  # guards what both threads use
        self._world: World | None = None  # of the current generation
        self._flight_recorder: FlightRecorder | None = None  # of that world
        # From the main thread to the driver
        self._card = Card("starting")
        self._has_new_card = False
        # From the driver
        self._orders = Orders()  # the newest
        self._over = ""  # why the job is over
        self._answered_at = time.monotonic()
        # The thread
        self._num_cards = 0
        self._num_made = 0  # steps that this process has made
        self._beat_at = 0.0  # when the next one is due
        self._store_of_worlds = _connect(invitation)  # the main thread's own connection
        self._store = _connect(invitation)
        self._wake = threading.Event()
        self._is_closed = False
        self._thread = threading.Thread(target=self._watch, name="torchring-elastic", daemon=True)
        self._thread.start()
        end_at_exit(self, self._thread)

    def meet(self, reason: str, *, has_lost_peer: bool = False, given_up: Sequence[int] = ()) -> World:
        """Leave the generation, wait for a new one that this worker belongs to, and open its world. Collective.

        Args:
            reason: why this worker has left its generation, for people; "" if there is nothing to say.
            has_lost_peer: it has left because the connection to another worker broke.
            given_up: ranks of that generation for which it has waited in vain.

        Raises:
            JobOverError: the job is over, the driver is gone, or this worker was told to end before there was a
                generation in which it could do so.
            RingError: a worker of the new generation is lost already. Meet again.
        """
        self.leave()
        self._say("meeting", reason, has_lost_peer=has_lost_peer, given_up=tuple(given_up))
        began_at = time.monotonic()
        with self._changed:
            while not self._has_news():
                self._changed.wait(protocol.LOOK_SECONDS)
                if self.seems_alone():
                    self._over = f"`{ELASTIC}` has not answered for {_SILENT_SECONDS:g} s"
                elif self.leaves and (self.num_steps < 0 or time.monotonic() - began_at > _GOODBYE_SECONDS):
                    raise JobOverError("this worker was told to end")
            if self._over:
                raise JobOverError(self._over)
            orders = self._orders
        self.generation = orders.generation
        rank, size = orders.workers.index(self.number), len(orders.workers)
        _log.info("generation %d: rank %d of %d, because %s", self.generation, rank, size, orders.reason)
        world = open_generation(within(self._store_of_worlds, protocol.world_prefix(self.generation)), rank, size)
        self._say("running")
        with self._changed:
            self._world = world
            monitor = world.shared(monitor_of)
            self._flight_recorder = None if monitor is None else monitor.recorder
            self._pass_on()
        return world

    def leave(self) -> None:
        with self._changed:
            self._world = self._flight_recorder = None
        leave_generation()

    @property
    def is_own(self) -> bool:
        """False in a forked child."""
        return os.getpid() == self._pid

    def seems_alone(self) -> bool:
        """True if the driver has not answered for so long that it counts as gone."""
        return time.monotonic() - self._answered_at > _SILENT_SECONDS

    def has_stepped(self, num_steps: int) -> None:
        """This process has made a step. `num_steps`: of the state, with this one."""
        self.num_steps = num_steps
        self._num_made += 1
        if self._num_made == 1:  # a driver that does not know would take an early loss for an error of the script
            self._beat_at = 0.0
            self._wake.set()

    def ask_to_leave(self) -> None:
        """End at the end of this step. From a signal handler, too."""
        self.leaves = True
        if (world := self._world) is not None:
            change = world.shared(MembershipChange)
            change.leaves = change.is_wanted = True

    def say_goodbye(self, reason: str) -> None:
        """This worker takes part in nothing more, and is about to exit. `close` comes next."""
        self._say("leaving", reason)

    def finish(self) -> None:
        """The training function has returned on all workers. The world stays open."""
        self._say("finished")
        self.close()

    def _has_news(self) -> bool:
        return bool(self._over) or (self._orders.generation > self.generation and self.number in self._orders.workers)

    def _say(self, state: WorkerState, reason: str = "", **more: Any) -> None:
        with self._changed:
            self._card = Card(state, self.generation, reason, pid=self._pid, **more)
            self._has_new_card = True
        self._wake.set()

    def close(self) -> None:
        """Say nothing more. Waits until the driver has heard the last card, 2 s at most. Called at exit, too."""
        self._is_closed = True
        self._wake.set()
        self._thread.join(_GOODBYE_SECONDS)

    # On the thread

    def _watch(self) -> None:
        while True:
            is_last = self._is_closed
            try:
                self._look()
            except dist.DistError as error:
                first_line = str(error).partition("\n")[0]
                self._end(f"`{ELASTIC}` is gone: its store does not answer ({first_line})")
                return
            except RuntimeError as error:  # the interpreter is ending
                self._end(str(error))
                return
            if is_last:
                return
            is_meeting = self._card.state == "meeting"
            self._wake.wait(_MEETING_LOOK_SECONDS if is_meeting else protocol.LOOK_SECONDS)
            self._wake.clear()

    def _look(self) -> None:
        """Send the card if it is due, and read what the driver says."""
        now = time.monotonic()
        with self._changed:
            card, is_new, self._has_new_card = self._card, self._has_new_card, False
        if is_new or now >= self._beat_at or self._is_closed:
            self._beat_at = now + protocol.BEAT_SECONDS
            self._num_cards += 1
            recorder = self._flight_recorder
            progress, waits = (0, False) if recorder is None else recorder.progress
            card = replace(
                card,
                count=self._num_cards,
                steps=self.num_steps,
                made=self._num_made,
                is_last=self._is_closed,
                progress=progress,
                waits=waits,
            )
            self._store.set(protocol.card_key(self.number), card.encode())  # type: ignore[arg-type]  # takes bytes, too
        orders = Orders.decode(self._store.get(protocol.ORDERS))
        self._answered_at = time.monotonic()
        with self._changed:
            self._orders, self._over = orders, self._over or orders.over
            self._pass_on()
            self._changed.notify_all()

    def _end(self, reason: str) -> None:
        with self._changed:
            self._over = self._over or reason
            self._pass_on()
            self._changed.notify_all()

    def _pass_on(self) -> None:
        if (world := self._world) is None:
            return
        change = world.shared(MembershipChange)
        if self._over or self.leaves or self._orders.call >= self.generation:
            change.is_wanted = True
            change.leaves = self.leaves
        orders = self._orders
        if orders.broken >= self.generation and world.failure is None:
            ranks = orders.lost if orders.broken == self.generation else ()
            world.fail(PeerLostError(orders.how, rank=world.rank, peers=ranks))


_the_worker: Worker | None = None  # of this process


def worker_of_process() -> Worker | None:
    """This process as a worker, the same object at each call. None if no driver has started this process.

    Raises TopologyError if the driver's store does not answer.
    """
    global _the_worker
    if CHOICE in os.environ or INVITATION not in os.environ:
        return None
    if _the_worker is None or not _the_worker.is_own:
        _the_worker = Worker(Invitation.decode(os.environ[INVITATION]))
    return _the_worker


def _connect(invitation: Invitation) -> Store:
    """Raises TopologyError, with what was tried, if the driver's store does not answer at any of its addresses."""
    token = sealed(invitation.secret, protocol.TOKEN, b"").decode()
    store, tried = search(invitation.addresses, invitation.port, token, _CONNECT_SECONDS, key=protocol.TOKEN)
    if store is None:
        raise TopologyError(
            f"worker {invitation.worker} on {invitation.host} reaches the store of `{ELASTIC}` at none "
            f"of its addresses, port {invitation.port}, within {_CONNECT_SECONDS:g} s: {', '.join(tried)}; the "
            "driver may have ended, or a firewall may be in between"
        )
    store.set_timeout(timedelta(seconds=_SILENT_SECONDS))  # a driver may be stopped for a while
    return signed(store, invitation.secret)
