"""Decides which workers start, which of them train together, and when the job is over. No input, no output, no clock.

    driver.py                          Membership
    hosts, cards, beats, ends  ---->   remembers what it is told
    the time                   ---->   tick()  ---->  actions, which driver.py carries out

The life of a generation:

    published    its members open a world together
    running      they train
    broken       a member died, or was silent: the others are told, and meet again
    called       a new worker has come, or a member has left: the members are told, and meet again at the end of
                 their step
    left         each member has met, has ended, or is about to end: the next generation can be formed

Survivors do not wait for replacements: those join later. But where no survivor is left, at the start and after the loss
of all workers, a generation begins when all workers that were started have come. It begins without those that have
ended, and without those that have not come 30 s after there were enough.
"""

from __future__ import annotations

import random
import signal
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from torchring.elastic.driver.cooldown import DEFAULT_RANGE, Cooldown
from torchring.launch.launcher import Host
from torchring.rendezvous.protocol import Beat, Broken, Card, Plan

UNLIMITED: Final = 1 << 30
_LONGEST_GAP: Final = 1.0  # seconds between two ticks; what goes beyond does not count: the driver was stopped
_JOIN_SECONDS: Final = 0.5  # that a new worker waits for others that are starting
_STRAGGLER_SECONDS: Final = 30.0  # that a first generation waits for more workers once there are enough
_LEAVE_SECONDS: Final = 300.0  # for a member to leave a generation after the first has, and then to end
_PROOF_SECONDS: Final = 5.0  # of running that prove a worker whose number of steps is unknown
_STEADY_SECONDS: Final = 60.0  # after which a failure has nothing to do with earlier ones
_STORM_SECONDS: Final = 60.0  # for which signals from outside may end worker after worker
_GOODBYE_SECONDS: Final = 30.0  # for workers to end by themselves when the job is over
_LIVES: Final = 3  # losses of all workers, one after another, without a new step
_LOSSES_PER_SLOT: Final = 3  # losses in a row without a step, after which the script is taken to be wrong
_FEWEST_SLOTS: Final = 4  # that this is counted for
_FROM_OUTSIDE: Final = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@dataclass(frozen=True)
class Limits:
    """What the user allows.

    Attributes:
        size: number of workers to begin with; UNLIMITED for as many as there are slots.
        min_size, max_size: fewest and most workers that train.
        elastic_timeout: seconds that the job waits for `min_size` workers, and for a worker to come.
        heartbeat_timeout: seconds of silence after which a worker is killed.
        reset_limit: how many generations may follow the first one; None for any number.
        cooldown: shortest and longest time in seconds for which a place is left out where workers fail.
    """

    size: int
    min_size: int = 1
    max_size: int = UNLIMITED
    elastic_timeout: float = 600.0
    heartbeat_timeout: float = 10.0
    reset_limit: int | None = None
    cooldown: tuple[float, float] = DEFAULT_RANGE


# ---- what is to be done


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
    """A generation begins."""

    plan: Plan


@dataclass(frozen=True)
class Break:
    """Tell the members of a generation that it is broken, and those that are opening its world."""

    broken: Broken


@dataclass(frozen=True)
class Call:
    """Tell the members of a generation to meet at the end of their step."""

    generation: int


@dataclass(frozen=True)
class Over:
    """Tell all workers that the job is over."""

    reason: str


@dataclass(frozen=True)
class Forget:
    """Nobody needs what the store has of a worker that has ended."""

    worker: int


@dataclass(frozen=True)
class Say:
    """Tell the user."""

    text: str


@dataclass(frozen=True)
class Exit:
    """All workers have ended, and so does the driver."""

    code: int


Action: TypeAlias = Start | Send | Publish | Break | Call | Over | Forget | Say | Exit


# ---- what is known


@dataclass(eq=False)
class _Worker:
    number: int
    host: str
    slot: int
    started_at: float
    card: Card = field(default_factory=lambda: Card("starting"))
    pid: int | None = None
    changed_at: float = 0.0  # when its state changed last
    beat: Beat | None = None
    beat_at: float = 0.0
    rank: int = -1  # in the last generation that it belonged to
    code: int | None = None  # its exit code
    lost: str = ""  # how it ended, or why it was killed
    is_broken_off: bool = False  # whether the others know that it is lost
    is_dismissed: bool = False  # whether the driver has told it to end

    @property
    def is_lost(self) -> bool:
        return self.code is not None or bool(self.lost)

    @property
    def name(self) -> str:
        return f"worker {self.number} on {self.host}"

    def has_worked(self, clock: float) -> bool:
        """Whether it has made steps."""
        if self.beat is not None and self.beat.made >= 0:
            return self.beat.made > 0
        return self.card.state == "running" and clock - self.changed_at > _PROOF_SECONDS


class Membership:
    """Who belongs to the job.

    Args:
        limits: what the user allows.
        now: the time in seconds, of a clock that does not jump.
        randomness: where the jitter of cooldowns comes from.
    """

    def __init__(self, limits: Limits, now: float, randomness: random.Random | None = None) -> None:
        self.limits = limits
        self._last = now
        self._clock = 0.0  # seconds, without those in which the driver was stopped
        self._hosts: tuple[Host, ...] = ()
        self._workers: dict[int, _Worker] = {}
        self._num_started = 0
        self._cooldown = Cooldown(*limits.cooldown, randomness or random.Random())
        self._actions: list[Action] = []
        # the current generation
        self._plan = Plan(0, (), "")
        self._broken_ranks: tuple[int, ...] = ()
        self._is_called = False
        self._left_at: float | None = None  # when its first member left
        self._gone: list[str] = []  # why members are there no more
        # no generation
        self._short_since: float | None = 0.0  # since when there have been too few workers
        self._has_said_short = False
        self._enough_since: float | None = None
        # since all workers were started anew
        self._is_anew = True
        self._size = limits.size  # number of workers to begin with
        self._num_started_anew = 0
        self._has_stepped = False
        self._first_failure: tuple[str, int] | None = None
        # the job
        self._losses = 0  # in a row, without a step
        self._losses_since = 0.0
        self._are_from_outside = True  # all of them: signals that others than the script send
        self._steps = -1  # the furthest
        self._steps_before = -1  # the furthest when all workers were lost
        self._idle_lives = 0
        self._checkpoint = ""
        self._checkpoint_before = ""
        self._is_finishing = False
        self._final_code = 0  # of the first process of the current generation that failed
        # the end
        self._code: int | None = None  # of the driver
        self._over_at: float | None = None
        self._is_hurried = False
        self._signals = 0

    @property
    def generation(self) -> int:
        """The number of the current generation, 0 for none."""
        return self._plan.generation

    @property
    def size(self) -> int:
        """Number of workers with which the job starts, known once there are hosts."""
        return self._size

    @property
    def is_over(self) -> bool:
        """Whether the job is over. Workers may still have to end."""
        return self._over_at is not None

    @property
    def is_settled(self) -> bool:
        """Whether nothing is about to happen: the generation runs, and nobody waits."""
        members = self._members()
        return not (
            self.is_over
            or any(self._has_left(worker) or worker.card.state != "running" for worker in members)
            or self._in_state("meeting")
        )

    # ---- what has happened

    def set_hosts(self, hosts: Iterable[Host]) -> None:
        """These hosts can be used from now on."""
        self._hosts = tuple(hosts)

    def note_card(self, number: int, card: Card) -> None:
        """A worker has said this of itself."""
        worker = self._workers[number]
        if card.state != worker.card.state:
            worker.changed_at = self._clock
        worker.card = card
        if card.checkpoint:
            self._checkpoint = card.checkpoint

    def note_beat(self, number: int, beat: Beat) -> None:
        """A worker has shown that it lives."""
        worker = self._workers[number]
        if worker.beat is not None and beat.count == worker.beat.count:
            return
        before, worker.beat = worker.beat, beat
        has_stepped = beat.made < 0 or before is None or beat.made > before.made
        if has_stepped and worker.has_worked(self._clock):
            self._has_stepped, self._losses = True, 0
        self._steps = max(self._steps, beat.steps)
        worker.beat_at = self._clock

    def note_pid(self, number: int, pid: int) -> None:
        """The number of a worker's process, for messages."""
        self._workers[number].pid = pid

    def note_end(self, number: int, code: int, *, is_ssh: bool = False) -> None:
        """A worker's process has ended. `is_ssh`: it is ssh that has ended with this code."""
        worker = self._workers[number]
        worker.code = code
        how = _ending(code, worker, is_ssh)
        has_left = worker.card.state in ("leaving", "finished")
        from_outside = code - 128 in _FROM_OUTSIDE
        is_known = bool(worker.lost) and worker.rank >= 0
        worker.lost = worker.lost or how
        is_member = number in self._plan.workers
        if is_member and worker.card.state != "leaving":
            self._final_code = self._final_code or code
        if worker.is_dismissed or worker.card.state == "finished" or self.is_over:
            return
        if not has_left:
            if not self._losses:
                self._losses_since, self._are_from_outside = self._clock, True
            self._losses += 1
            self._are_from_outside = self._are_from_outside and from_outside
            if self._first_failure is None or (code and not self._first_failure[1]):
                self._first_failure = (f"{worker.name} {worker.lost}", code)
        if not is_member and not has_left and not is_known:
            self._say(f"{worker.name} {worker.lost}")
        self._note_failure(worker, is_ssh=is_ssh, from_outside=has_left or from_outside)

    def note_signal(self, number: int) -> None:
        """The driver was told to end. The second signal kills the workers."""
        self._signals += 1
        if self._signals == 1:
            name = signal.Signals(number).name
            if self._over_at is None:
                self._over(f"torchring run was told to end by {name}", 128 + number, _for_workers(number))
            else:
                self._code = 128 + number
                self._send_all(_for_workers(number))
        elif self._signals == 2:
            self._send_all(signal.SIGKILL)

    def tick(self, now: float) -> list[Action]:
        """What is to be done now. Carry it out before the next call."""
        self._clock += max(0.0, min(now - self._last, _LONGEST_GAP))
        self._last = now
        if not self.is_over:
            self._end_silent()
            self._break_off()
            self._dismiss()
            self._form()
        if not self.is_over:
            self._start_workers()
            self._call()
            self._judge_script()
        self._forget()
        if self.is_over:
            self._wait_for_ends()
        actions, self._actions = self._actions, []
        return actions

    # ---- workers

    def _living(self) -> list[_Worker]:
        return [worker for worker in self._workers.values() if not worker.is_lost]

    def _members(self) -> list[_Worker]:
        return [self._workers[number] for number in self._plan.workers]

    def _in_state(self, *states: str) -> list[_Worker]:
        return [worker for worker in self._living() if worker.card.state in states and not worker.is_dismissed]

    def _has_left(self, worker: _Worker) -> bool:
        """Whether a member has left the current generation."""
        return worker.is_lost or self._left_by_itself(worker)

    def _is_away(self, worker: _Worker) -> bool:
        """Whether a member has left for good, and `_gone` does not say so yet."""
        return not worker.is_broken_off and worker.card.state in ("leaving", "finished")

    def _left_by_itself(self, worker: _Worker) -> bool:
        return worker.card.generation >= self.generation and worker.card.state != "running"

    def _say(self, text: str) -> None:
        self._actions.append(Say(text))

    def _send_all(self, number: int) -> None:
        self._actions += [Send(worker.number, number) for worker in self._workers.values() if worker.code is None]

    def _kill(self, worker: _Worker, why: str) -> None:
        worker.lost = why
        self._actions.append(Send(worker.number, signal.SIGKILL))

    def _end_silent(self) -> None:
        for worker in self._living():
            state, limits = worker.card.state, self.limits
            if state in ("finished", "leaving"):  # may have stopped its signs of life, and have files to write
                silence = 0.0
                if state == "leaving" and self._clock - worker.changed_at > _LEAVE_SECONDS:
                    self._kill(worker, f"did not end within {_LEAVE_SECONDS:g} s, and was killed")
            elif worker.beat is not None:
                silence = self._clock - worker.beat_at
            else:
                silence = 0.0
                if state == "starting" and self._clock - worker.started_at > limits.elastic_timeout:
                    self._kill(worker, f"did not come to torchring.elastic.run within {limits.elastic_timeout:g} s")
            if silence > limits.heartbeat_timeout:
                self._kill(worker, f"gave no sign of life for {limits.heartbeat_timeout:g} s, and was killed")

    def _break_off(self) -> None:
        """Find members that are lost, and have the others hear of it."""
        lost = []
        for worker in self._members():
            is_leaving_early = worker.card.state in ("leaving", "finished") and not self._left_by_itself(worker)
            if worker.is_lost and not worker.is_broken_off:
                worker.is_broken_off = True
                self._gone.append(_gone(worker))
                if not self._left_by_itself(worker):
                    lost.append(worker)
            elif is_leaving_early and not worker.is_broken_off:  # it will not open the world that the others open
                worker.is_broken_off = True
                self._gone.append(_gone(worker))
                lost.append(worker)
        if lost:
            self._broken_ranks += tuple(worker.rank for worker in lost)
            reason = "; ".join(
                f"rank {worker.rank} (worker {worker.number}{f', pid {worker.pid}' if worker.pid else ''}, on "
                f"{worker.host}) {worker.lost or 'was told to end'}"
                for worker in lost
            )
            self._actions.append(Break(Broken(self.generation, tuple(sorted(self._broken_ranks)), reason)))

    def _dismiss(self) -> None:
        """Tell workers to end whose slot is gone."""
        slots = _slots(self._hosts)
        for worker in self._living():
            state = worker.card.state
            if worker.slot >= slots.get(worker.host, 0) and not worker.is_dismissed and state != "finished":
                worker.is_dismissed = True
                self._say(f"{worker.name} is told to end: the host is gone from the list of hosts, or has fewer slots")
                self._actions.append(Send(worker.number, signal.SIGTERM))

    # ---- generations

    def _form(self) -> None:
        """Begin the next generation if all members have left the current one, and there are enough workers."""
        members = self._members()
        finished = [worker for worker in members if worker.card.state == "finished"]
        self._is_finishing = self._is_finishing or bool(finished)
        staying = [worker for worker in members if not self._has_left(worker)]
        if staying:
            self._wait_for_leaving(members, staying)
            return
        self._left_at = None
        meeting = self._in_state("meeting")
        survivors = [worker for worker in meeting if worker.number in self._plan.workers]
        if finished:
            meeting = survivors  # a new worker has nothing left to do
            if not survivors:
                self._over("the training has finished", None)
                return
        if members and all(worker.code == 0 and not worker.is_dismissed for worker in members):
            reason = "the script has ended with exit code 0 on all ranks, without a return from the training function"
            self._over(reason, 0)
            return
        if self.generation and not self._may_change():
            self._over(f"the workers have changed more often than --reset-limit {self.limits.reset_limit} allows", 1)
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
        if self.generation and not survivors and not self._is_anew and not self._survives_loss():
            return
        self._publish(meeting)

    def _wait_for_leaving(self, members: Sequence[_Worker], staying: Sequence[_Worker]) -> None:
        if len(staying) == len(members):
            return
        self._left_at = self._clock if self._left_at is None else self._left_at
        if self._clock - self._left_at > _LEAVE_SECONDS:
            for worker in staying:
                self._kill(worker, f"did not leave its step for {_LEAVE_SECONDS:g} s, and was killed")

    def _wait_for_workers(self, num: int, needed: int) -> None:
        if self._short_since is None:
            self._short_since = self._clock
        if self.generation and not self._has_said_short and self._living():
            self._has_said_short = True
            gone = [*self._gone, *(_gone(worker) for worker in self._members() if self._is_away(worker))]
            why = f", because {'; '.join(gone)}" if gone else ""
            self._say(f"waiting for more workers: there are {num} of {needed}{why}")
        if self._clock - self._short_since > self.limits.elastic_timeout:
            self._over(
                f"for {self.limits.elastic_timeout:g} s (--elastic-timeout) there were fewer than {needed} workers "
                f"(--min-np): {num}",
                1,
            )

    def _publish(self, meeting: Sequence[_Worker]) -> None:
        # Who has belonged to a generation comes first, in the order of ranks.
        order = sorted(meeting, key=lambda worker: (worker.rank < 0, worker.rank, worker.number))
        self._gone += [_gone(worker) for worker in self._members() if self._is_away(worker) and worker not in order]
        reason = self._reason(order)
        self._plan = Plan(self.generation + 1, tuple(worker.number for worker in order), reason)
        for rank, worker in enumerate(order):
            worker.rank = rank
            worker.is_broken_off = False
        self._broken_ranks, self._is_called, self._gone = (), False, []
        self._final_code, self._is_anew = 0, False
        if self._has_stepped:
            self._first_failure = None
        self._short_since = self._enough_since = None
        self._has_said_short = False
        self._actions.append(Publish(self._plan))
        number = f"{len(order)} worker{'s' if len(order) > 1 else ''}"
        self._say(f"generation {self.generation} begins, {number} ({_places(order)}), because {reason}")

    def _reason(self, order: Sequence[_Worker]) -> str:
        if not self.generation:
            return "the job starts"
        reasons = list(self._gone)
        if came := [worker for worker in order if worker.number not in self._plan.workers]:
            names = ", ".join(str(worker.number) for worker in came)
            reasons.append(f"worker{'s' if len(came) > 1 else ''} {names} joined")
        if not reasons:
            said = dict.fromkeys(worker.card.reason for worker in order if worker.card.reason)
            reasons = list(said) or ["its workers met again"]
        return "; ".join(reasons)

    def _call(self) -> None:
        """Have the members meet at the end of their step, if one has left, or if workers wait that are not members."""
        if not self.generation or self._is_called or self._is_finishing:
            return
        if any(self._left_by_itself(worker) for worker in self._members()):
            self._is_called = True
            self._actions.append(Call(self.generation))
            return
        if not self._may_change() or self._broken_ranks:
            return
        waiting = [worker for worker in self._in_state("meeting") if worker.number not in self._plan.workers]
        if not waiting:
            return
        has_waited = any(self._clock - worker.changed_at >= _JOIN_SECONDS for worker in waiting)
        if has_waited or not self._in_state("starting"):
            self._is_called = True
            self._actions.append(Call(self.generation))

    def _may_change(self) -> bool:
        """Whether --reset-limit allows another generation."""
        return self.limits.reset_limit is None or self.generation <= self.limits.reset_limit

    # ---- processes

    def _start_workers(self) -> None:
        num_slots = sum(host.slots for host in self._hosts)
        if self._is_finishing or not self._may_change() or not num_slots:
            return
        if not self._num_started_anew:
            self._size = self.limits.size if self.limits.size < UNLIMITED else max(num_slots, self.limits.min_size)
        processes = [worker for worker in self._workers.values() if worker.code is None]
        room = min(self.limits.max_size - len(processes), self._num_wanted(len(processes)))
        if room <= 0:
            return
        taken = {(worker.host, worker.slot) for worker in processes}
        for host, slots in _slots(self._hosts).items():
            for slot in range(slots):
                if room <= 0 or not self._cooldown.is_over(host, self._clock):
                    break
                if (host, slot) not in taken and self._cooldown.is_over((host, slot), self._clock):
                    room -= 1
                    self._start_worker(host, slot)

    def _start_worker(self, host: str, slot: int) -> None:
        worker = _Worker(self._num_started, host, slot, self._clock, changed_at=self._clock)
        self._workers[worker.number] = worker
        self._num_started += 1
        self._num_started_anew += 1
        self._actions.append(Start(worker.number, host, slot))

    def _num_wanted(self, num_processes: int) -> int:
        """How many workers to start, if there are slots. Until a step has been made, only as many as are needed."""
        if self._num_started_anew < self._size:
            return self._size - self._num_started_anew
        if self._has_stepped:
            return self.limits.max_size - num_processes
        if self._short_since is None or not self._in_state("meeting") or self._in_state("starting"):
            return 0
        return self.limits.min_size - len(self._in_state("meeting"))

    def _note_failure(self, worker: _Worker, *, is_ssh: bool, from_outside: bool) -> None:
        place: Hashable = worker.host if is_ssh else (worker.host, worker.slot)
        if worker.has_worked(self._clock) and (from_outside or self._clock - worker.started_at > _STEADY_SECONDS):
            self._cooldown.succeed(worker.host)
            self._cooldown.succeed(place)
        if delay := self._cooldown.fail(place, self._clock):
            name = worker.host if is_ssh else f"slot {worker.slot} of {worker.host}"
            failures = self._cooldown.failures(place)
            self._say(f"{name} is left out for {delay:.1f} s: workers have failed there {failures} times in a row")

    def _judge_script(self) -> None:
        """End the job if it gets nowhere. If all workers are lost, but have made steps, let new ones start."""
        if self._losses > _LOSSES_PER_SLOT * max(self._size, _FEWEST_SLOTS) and not self._is_storm():
            what, code = self._first_failure or ("", 1)
            self._over(f"{self._losses} workers were lost in a row without a step in between; first {what}", code or 1)
            return
        if not self._num_started_anew or any(worker.code is None for worker in self._workers.values()):
            return
        if self._first_failure is None:  # all were told to end
            self._begin_anew()
        elif not self._has_stepped and not (self._steps > 0 and self._is_storm()):
            what, code = self._first_failure
            hint = "" if code else "; does the script call torchring.elastic.run?"
            self._over(f"all workers have ended, and none of them has made a step; first {what}{hint}", code)
        elif self._is_anew or self._survives_loss():
            self._begin_anew()

    def _is_storm(self) -> bool:
        """Whether all losses since the last step came from outside, and the first of them not long ago.

        Machines that are taken away say nothing about the script. But the kernel kills a script that needs too much
        memory by the same signal, again and again.
        """
        return self._are_from_outside and self._clock - self._losses_since < _STORM_SECONDS

    def _survives_loss(self) -> bool:
        """No worker of the last generation is left. Returns whether new ones can get further than those."""
        has_progressed = self._steps > self._steps_before or self._checkpoint != self._checkpoint_before
        self._idle_lives = 0 if has_progressed else self._idle_lives + 1
        self._steps_before, self._checkpoint_before = self._steps, self._checkpoint
        what, code = self._first_failure or ("they were told to end", 1)
        if self._idle_lives >= _LIVES and not self._is_storm():
            self._over(f"all workers were lost {self._idle_lives} times without a new step; first {what}", code or 1)
            return False
        where = f"load {self._checkpoint}" if self._checkpoint else "start from the beginning: there is no checkpoint"
        self._say(f"all workers that have trained are lost, first {what}; new ones {where}")
        self._first_failure = None
        return True

    def _begin_anew(self) -> None:
        self._is_anew = True
        self._num_started_anew = 0
        self._has_stepped = False
        self._first_failure = None
        self._enough_since = None

    def _forget(self) -> None:
        for worker in [worker for worker in self._workers.values() if worker.code is not None]:
            if worker.number not in self._plan.workers:
                del self._workers[worker.number]
                self._actions.append(Forget(worker.number))

    # ---- the end

    def _over(self, reason: str, code: int | None, number: int | None = None) -> None:
        """The job is over. `code` is None if it has finished. `number`: of the signal that workers get."""
        self._over_at = self._clock
        self._code = code
        if code is not None:
            where = f"; the newest checkpoint is {self._checkpoint}" if self._checkpoint else ""
            self._say(f"{reason}{where}")
        self._actions.append(Over(reason))
        for worker in self._living():
            if number is not None or worker.card.state == "starting":
                self._actions.append(Send(worker.number, number or signal.SIGTERM))

    def _wait_for_ends(self) -> None:
        left = [worker for worker in self._workers.values() if worker.code is None]
        if not left:
            self._actions.append(Exit(self._final_code if self._code is None else self._code))
            return
        self._break_off()
        if self._over_at is not None and not self._is_hurried and self._clock - self._over_at > _GOODBYE_SECONDS:
            self._is_hurried = True  # but a script may do more after the training
            self._actions += [Send(worker.number, signal.SIGTERM) for worker in left if worker.card.state != "finished"]


def _slots(hosts: Iterable[Host]) -> Mapping[str, int]:
    slots: dict[str, int] = {}
    for host in hosts:
        slots[host.name] = slots.get(host.name, 0) + host.slots
    return slots


def _places(workers: Iterable[_Worker]) -> str:
    """ "a: 0, 1; b: 5" """
    by_host: dict[str, list[str]] = {}
    for worker in workers:
        by_host.setdefault(worker.host, []).append(str(worker.number))
    return "; ".join(f"{host}: {', '.join(numbers)}" for host, numbers in by_host.items())


def _for_workers(number: int) -> int:
    """The signal that workers get for one that the driver has got. A lost connection ends the job, with checkpoints."""
    return signal.SIGTERM if number == signal.SIGHUP else number


def _gone(worker: _Worker) -> str:
    if worker.is_dismissed:
        return f"{worker.name} was told to end"
    if worker.card.state in ("leaving", "finished"):
        return f"{worker.name} {'left' if worker.card.state == 'leaving' else 'has finished'}"
    return f"{worker.name} {worker.lost}"


def _ending(code: int, worker: _Worker, is_ssh: bool) -> str:
    if is_ssh:
        return "could not be started, or ended with exit code 255: see what ssh says above"
    try:
        if code > 128:
            return f"was killed by {signal.Signals(code - 128).name}"
    except ValueError:
        pass
    if worker.card.state == "starting":
        return f"ended with exit code {code} before it came to torchring.elastic.run"
    return f"ended with exit code {code}"
