"""Decides which workers start, which of them train together, and when the job is over. No input, no output, no clock.

    driver.py                          Coordinator
    hosts, cards, ends         ---->   remembers what it is told
    the time                   ---->   tick()  ---->  start, send, forget and say of the driver, orders, code

Survivors do not wait for replacements: those join later. But where no survivor is left, at the start and after the loss
of all workers, a generation begins when all workers that were started have come. It begins without those that have
ended, and without those that have not come 30 s after there were enough.
"""

import signal
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from torchring.elastic.driver.endings import Cooldown, Ending, Losses
from torchring.elastic.driver.workers import UNLIMITED, Limits, Stage, WorkerRecord
from torchring.elastic.protocol import BEAT_SECONDS, Card, Orders
from torchring.launch.hosts import Host

if TYPE_CHECKING:
    from torchring.elastic.driver.driver import Driver

_LONGEST_GAP: Final = BEAT_SECONDS  # seconds between two ticks; what goes beyond does not count: the driver was stopped
_JOIN_SECONDS: Final = 0.5  # that a new worker waits for others that are starting
_STRAGGLER_SECONDS: Final = 30.0  # that a first generation waits for more workers once there are enough
_LEAVE_SECONDS: Final = 300.0  # for a worker to leave a generation after the first has, and then to end
_MISSED_SECONDS: Final = 3 * BEAT_SECONDS  # of silence, after which a worker is lost if others have lost a connection
_STEADY_SECONDS: Final = 60.0  # after which a failure has nothing to do with earlier ones
_GOODBYE_SECONDS: Final = 30.0  # for workers to end by themselves when the job is over
_FROM_OUTSIDE: Final = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Coordinator:
    """Starts workers, puts them together to generations, and ends the job. *Current* workers: of the newest.

    Args:
        limits: the limits that the user sets.
        now: the time in seconds, of a clock that does not jump.
        hands: carries out what `tick` decides.
    """

    def __init__(self, limits: Limits, now: float, hands: "Driver") -> None:
        self.limits = limits
        self.size = limits.size  # number of workers with which the job starts, known once there are hosts
        self.orders = Orders()  # what all workers are to hear
        self.code: int | None = None  # exit code of the job, once all is over
        self._hands = hands
        self._now = now
        self._clock = 0.0  # seconds, without those in which the driver was stopped

        # Hosts and workers
        self._slots: dict[str, int] = {}  # by host
        self._workers: dict[int, WorkerRecord] = {}  # those whose processes run, and current ones
        self._num_started = 0
        self._num_started_anew = 0  # since all workers were started anew
        self._cooldown = Cooldown(*limits.cooldown)
        self._losses = Losses()

        # The current generation
        self.stage = Stage.LEFT
        self._left_at: float | None = None  # when its first worker left
        self._gone: list[str] = []  # why current workers are there no more
        self._stalled_since = -1.0  # of the stall that the user was told of

        # Waiting for the next generation
        self._short_since: float | None = 0.0  # since when there have been too few workers
        self._has_said_short = False
        self._enough_since: float | None = None
        self._end = Ending()

    @property
    def is_settled(self) -> bool:
        """True if nothing is about to happen: a generation runs, or workers start, and nobody waits."""
        is_quiet = self.stage in (Stage.RUNNING, Stage.LEFT) and not self._in_state("meeting")
        return is_quiet and self._end.began_at is None

    # What has happened

    def set_hosts(self, hosts: Iterable[Host]) -> None:
        """These hosts can be used from now on."""
        self._slots = {host.name: host.slots for host in hosts}

    def note_card(self, number: int, card: Card) -> None:
        worker = self._workers[number]
        before, worker.card = worker.card, card
        if card.state != before.state:
            worker.changed_at = worker.moved_at = self._clock
        if card.count == before.count:
            return
        if card.made:
            self._losses.note_steps(card.steps)
        worker.said_at = self._clock
        if not before.count or (card.steps, card.progress, card.waits) != (before.steps, before.progress, before.waits):
            worker.moved_at = self._clock

    def note_end(self, number: int, code: int) -> None:
        worker = self._workers[number]
        is_current = number in self.orders.workers
        is_known = bool(worker.lost) and worker.rank >= 0
        worker.note_end(code)
        has_left = worker.card.state == "leaving"
        if is_current and not has_left:
            self._end.failed_code = self._end.failed_code or code
        if worker.is_dismissed or worker.card.state == "finished" or self._end.began_at is not None:
            return
        if not has_left:
            self._losses.note_loss(f"{worker.name} {worker.lost}", code)
            if not is_current and not is_known:
                self._hands.say(f"{worker.name} {worker.lost}")
        is_steady = has_left or code - 128 in _FROM_OUTSIDE or self._clock - worker.started_at > _STEADY_SECONDS
        if worker.card.made and is_steady:
            self._cooldown.succeed(worker.slot)
        if delay := self._cooldown.fail(worker.slot, self._clock):
            host, slot = worker.slot
            failures = self._cooldown.failures[worker.slot]
            self._hands.say(
                f"slot {slot} of {host} is left out for {delay:.1f} s: workers have failed there {failures} times in a "
                "row"
            )

    def note_signal(self, number: int) -> None:
        """The driver was told to end. The second signal kills the workers."""
        self._end.num_signals += 1
        for_workers = signal.SIGTERM if number == signal.SIGHUP else number  # they write checkpoints at SIGTERM
        if self._end.num_signals == 1 and self._end.began_at is None:
            reason = f"torchring run was told to end by {signal.Signals(number).name}"
            self._over(reason, 128 + number, for_workers)
        elif self._end.num_signals == 1:
            self._end.code = 128 + number
            self._send_all(for_workers)
        elif self._end.num_signals == 2:
            self._send_all(signal.SIGKILL)

    def tick(self, now: float) -> None:
        """Decide what is to be done now, and have it done."""
        self._clock += max(0.0, min(now - self._now, _LONGEST_GAP))
        self._now = now
        if self._end.began_at is None:
            self._kill_silent()
            self._kill_stuck()
            self._break()
            self._dismiss()
            self._form()
        if self._end.began_at is None:
            self._start_workers()
            self._call()
            self._judge_script()
        self._forget()
        if self._end.began_at is not None:
            self._wait_for_ends()

    # Workers

    def _living(self) -> list[WorkerRecord]:
        return [worker for worker in self._workers.values() if not worker.is_lost]

    def _running_processes(self) -> list[WorkerRecord]:
        return [worker for worker in self._workers.values() if worker.code is None]

    def _current(self) -> list[WorkerRecord]:
        return [self._workers[number] for number in self.orders.workers]

    def _in_state(self, state: str) -> list[WorkerRecord]:
        return [worker for worker in self._living() if worker.card.state == state and not worker.is_dismissed]

    def _has_left(self, worker: WorkerRecord) -> bool:
        """True if a worker has left the current generation by itself."""
        return worker.card.generation >= self.orders.generation and worker.card.state != "running"

    def _send_all(self, number: int) -> None:
        for worker in self._running_processes():
            self._hands.send(worker.number, number)

    def _kill(self, worker: WorkerRecord, why: str) -> None:
        worker.lost, worker.is_killed = f"{why}, and was killed", True
        self._hands.send(worker.number, signal.SIGKILL)

    def _kill_silent(self) -> None:
        # Where a host dies, ssh may not notice, and srun does not; but connections to its workers break. A worker whose
        # process has ended explains that: the others may be busy, and get all of their time.
        current = self._current()
        is_explained = any(worker.code is not None and not worker.is_killed for worker in current)
        is_missed = not is_explained and any(self._has_left(one) and one.card.has_lost_peer for one in current)
        for worker in self._running_processes():
            card, heartbeat = worker.card, self.limits.heartbeat_timeout
            since, patience, what = worker.said_at, heartbeat, "gave no sign of life for"
            if worker.is_killed or card.state == "finished":
                continue
            if card.state == "leaving":  # its signs of life may have stopped, and it may have files to write
                since, patience, what = worker.changed_at, _LEAVE_SECONDS, "did not end within"
            elif card.is_last:  # it may have files to write, too; but the others wait for it
                patience, what = _LEAVE_SECONDS, "did not end within"
                if self._clock - since > heartbeat:
                    worker.lost = f"did not end within {heartbeat:g} s after its script"
            elif not card.count:
                since, patience = worker.started_at, self.limits.elastic_timeout
                what = "did not come to torchring.elastic.run within"
            elif is_missed and worker in current and not self._has_left(worker):
                patience = min(_MISSED_SECONDS, heartbeat)
            if self._clock - since > patience:
                self._kill(worker, f"{what} {patience:g} s")

    def _kill_stuck(self) -> None:
        """Say whom the current workers wait for if none of them moves, and kill it after `--stall-timeout`."""
        current = [worker for worker in [*self._in_state("running"), *self._in_state("meeting")] if worker.rank >= 0]
        stuck = [w for w in current if w.card.state == "running" and w.card.count and not w.card.waits]
        if not stuck or len(stuck) == len(current):
            return
        since = max(worker.moved_at for worker in current)
        seconds, limit = self._clock - since, self.limits.stall_timeout
        if seconds > self.limits.heartbeat_timeout and self._stalled_since != since:
            self._stalled_since = since
            end = "it is killed" if len(stuck) == 1 else "they are killed"
            when = "timeout_seconds of torchring.init (set --stall-timeout)" if limit is None else f"{limit:g} s"
            names = " and ".join(worker.name for worker in stuck)
            self._hands.say(
                f"the others have waited for {names} for {seconds:.0f} s, without progress; {end} after {when}"
            )
        if limit is not None and seconds > limit:
            for worker in stuck:
                self._kill(worker, f"made no progress for {limit:g} s while others waited for it (--stall-timeout)")

    def _break(self) -> None:
        """Break the generation if workers of it are lost: the others have to hear of it."""
        lost = []
        for worker in self._current():
            has_left = self._has_left(worker)
            # A worker that goes before it has seen the generation will not open the world that the others open.
            if (worker.is_lost or (worker.is_going and not has_left)) and not worker.is_broken_off:
                worker.is_broken_off = True
                self._gone.append(worker.end)
                if not has_left:
                    lost.append(worker)
        if lost:
            self.stage = max(self.stage, Stage.BROKEN)
            orders = self.orders
            before = orders.lost if orders.broken == orders.generation else ()
            ranks = tuple(sorted([*before, *(worker.rank for worker in lost)]))
            how = "; ".join(
                f"rank {worker.rank} (worker {worker.number}{f', pid {worker.card.pid}' if worker.card.pid else ''}, "
                f"on {worker.slot[0]}) {worker.lost or 'was told to end'}"
                for worker in lost
            )
            self.orders = replace(orders, broken=orders.generation, lost=ranks, how=how)

    def _dismiss(self) -> None:
        """Tell workers to end whose slot is gone."""
        for worker in self._living():
            host, slot = worker.slot
            is_gone = slot >= self._slots.get(host, 0)
            if is_gone and not worker.is_dismissed and worker.card.state != "finished":
                worker.is_dismissed = True
                self._hands.say(
                    f"{worker.name} is told to end: the host is gone from the list of hosts, or has fewer slots"
                )
                self._hands.send(worker.number, signal.SIGTERM)

    # Generations

    def _form(self) -> None:
        """Begin the next generation if all workers have left the current one, and there are enough workers."""
        current = self._current()
        if self.stage is Stage.PUBLISHED and all(worker.card.state == "running" for worker in current):
            self.stage = Stage.RUNNING
        finished = [worker for worker in current if worker.card.state == "finished"]
        self._end.is_near = self._end.is_near or bool(finished)
        staying = [worker for worker in current if not worker.is_lost and not self._has_left(worker)]
        if staying:
            if len(staying) < len(current):
                self._wait_for_leaving(staying)
            return
        self.stage, self._left_at = Stage.LEFT, None
        meeting = self._in_state("meeting")
        survivors = [worker for worker in meeting if worker in current]
        if finished:
            meeting = survivors  # a new worker has nothing left to do
            if not survivors:
                self._over("the training has finished", None)
                return
        if current and all(worker.code == 0 and not worker.is_dismissed for worker in current):
            reason = "the script has ended with exit code 0 on all ranks, without a return from the training function"
            self._over(reason, 0)
            return
        needed = 1 if finished else self.limits.min_size
        if len(meeting) < needed:
            self._enough_since = None
            self._wait_for_workers(len(meeting), needed)
            return
        if not survivors and self._in_state("starting"):
            self._enough_since = self._clock if self._enough_since is None else self._enough_since
            if self._clock - self._enough_since <= _STRAGGLER_SECONDS:
                return
        if self.orders.generation and not survivors:
            what, _ = self._losses.first or ("they were told to end", 1)
            self._hands.say(
                f"all workers that have trained are lost, first {what}; new ones begin with the newest checkpoint, if "
                "there is one"
            )
        self._publish(meeting)

    def _wait_for_leaving(self, staying: Sequence[WorkerRecord]) -> None:
        self._left_at = self._clock if self._left_at is None else self._left_at
        given_up = {rank for worker in self._current() if self._has_left(worker) for rank in worker.card.given_up}
        for worker in staying:
            patience = self.limits.heartbeat_timeout if worker.rank in given_up else _LEAVE_SECONDS
            if self._clock - self._left_at > patience:
                self._kill(worker, f"did not leave its step for {patience:g} s")

    def _wait_for_workers(self, num: int, needed: int) -> None:
        if self._short_since is None:
            self._short_since = self._clock
        if self.orders.generation and not self._has_said_short and self._living():
            self._has_said_short = True
            gone = self._all_gone()
            why = f", because {'; '.join(gone)}" if gone else ""
            self._hands.say(f"waiting for more workers: there are {num} of {needed}{why}")
        if self._clock - self._short_since > self.limits.elastic_timeout:
            self._over(
                f"for {self.limits.elastic_timeout:g} s (--elastic-timeout) there were fewer than {needed} workers "
                f"(--min-np): {num}",
                1,
            )

    def _all_gone(self) -> list[str]:
        """Why current workers are there no more, those too that have gone by themselves."""
        going = [worker.end for worker in self._current() if worker.is_going and not worker.is_broken_off]
        return [*self._gone, *going]

    def _publish(self, meeting: Sequence[WorkerRecord]) -> None:
        # Workers that have belonged to a generation come first, in the order of ranks.
        order = sorted(meeting, key=lambda worker: (worker.rank < 0, worker.rank, worker.number))
        numbers = tuple(worker.number for worker in order)
        reason = self._reason(order)
        number = self.orders.generation + 1
        self.orders = replace(self.orders, generation=number, workers=numbers, reason=reason)
        self.stage = Stage.PUBLISHED
        for rank, worker in enumerate(order):
            worker.rank, worker.is_broken_off = rank, False
        self._gone = []
        self._end.failed_code = 0
        self._short_since = self._enough_since = None
        self._has_said_short = False
        size = f"{len(order)} worker{'s' if len(order) > 1 else ''}"
        by_host: dict[str, list[str]] = {}
        for worker in order:
            by_host.setdefault(worker.slot[0], []).append(str(worker.number))
        where = "; ".join(f"{host}: {', '.join(workers)}" for host, workers in by_host.items())
        self._hands.say(f"generation {number} begins, {size} ({where}), because {reason}")

    def _reason(self, order: Sequence[WorkerRecord]) -> str:
        """Why there is a new generation, of these workers."""
        if not self.orders.generation:
            return "the job starts"
        reasons = self._all_gone()
        if came := [str(worker.number) for worker in order if worker.number not in self.orders.workers]:
            reasons.append(f"worker{'s' if len(came) > 1 else ''} {', '.join(came)} joined")
        said = dict.fromkeys(worker.card.reason for worker in order if worker.card.reason)
        return "; ".join(reasons or said or ["its workers met again"])

    def _call(self) -> None:
        """Have the current workers meet at the end of their step, if one has left, or if others wait."""
        if self.stage >= Stage.CALLED or self._end.is_near:
            return
        if not any(map(self._has_left, self._current())):
            if self.stage is Stage.BROKEN:
                return
            waiting = [worker for worker in self._in_state("meeting") if worker.number not in self.orders.workers]
            has_waited = any(self._clock - worker.changed_at >= _JOIN_SECONDS for worker in waiting)
            if not has_waited and (not waiting or self._in_state("starting")):
                return
        self.stage = Stage.CALLED
        self.orders = replace(self.orders, call=self.orders.generation)

    # Processes

    def _start_workers(self) -> None:
        num_slots = sum(self._slots.values())
        if self._end.is_near or not num_slots:
            return
        if not self._num_started_anew:
            self.size = self.limits.size if self.limits.size < UNLIMITED else max(num_slots, self.limits.min_size)
        processes = self._running_processes()
        room = min(self.limits.max_size - len(processes), self._num_wanted(len(processes)))
        taken = {worker.slot for worker in processes}
        for slot in ((host, number) for host, slots in self._slots.items() for number in range(slots)):
            if room > 0 and slot not in taken and self._cooldown.is_over(slot, self._clock):
                room -= 1
                worker = WorkerRecord(self._num_started, slot, self._clock, changed_at=self._clock)
                self._workers[worker.number] = worker
                self._num_started += 1
                self._num_started_anew += 1
                self._hands.start(worker.number, slot)

    def _num_wanted(self, num_processes: int) -> int:
        """Number of workers to start, if there are slots. Until a step has been made, only as many as are needed."""
        if self._num_started_anew < self.size:
            return self.size - self._num_started_anew
        if any(worker.card.made for worker in self._living()):
            return self.limits.max_size - num_processes
        meeting = self._in_state("meeting")
        if self._short_since is None or not meeting or self._in_state("starting"):
            return 0
        return self.limits.min_size - len(meeting)

    def _judge_script(self) -> None:
        """End the job if it gets nowhere. If all workers are lost, but have made steps, let new ones start."""
        all_ended = self._num_started_anew > 0 and not self._running_processes()
        if hopeless := self._losses.why_hopeless(self.size, all_ended=all_ended):
            self._over(*hopeless)
        elif all_ended:
            self._num_started_anew = 0
            self._enough_since = None

    def _forget(self) -> None:
        for worker in list(self._workers.values()):
            if worker.code is not None and worker.number not in self.orders.workers:
                del self._workers[worker.number]
                self._hands.forget(worker.number)

    # The end

    def _over(self, reason: str, code: int | None, number: int | None = None) -> None:
        """End the job. `code` is None if the training has finished. `number`: the signal that workers get."""
        self._end.began_at = self._clock
        self._end.code = code
        if code is not None:
            self._hands.say(reason)
        self.orders = replace(self.orders, over=reason)
        for worker in self._living():
            if number is not None or worker.card.state == "starting":
                self._hands.send(worker.number, number or signal.SIGTERM)

    def _wait_for_ends(self) -> None:
        left = self._running_processes()
        if not left:
            self.code = self._end.failed_code if self._end.code is None else self._end.code
            return
        self._break()
        end = self._end
        if end.began_at is not None and not end.is_hurried and self._clock - end.began_at > _GOODBYE_SECONDS:
            end.is_hurried = True  # but a script may do more after the training
            for worker in left:
                if worker.card.state != "finished":
                    self._hands.send(worker.number, signal.SIGTERM)
