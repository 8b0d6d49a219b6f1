"""The driver of an elastic job: what it decides, with a clock of the test's, and what it does, with workers that only
speak its protocol."""

import contextlib
import dataclasses
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore

from tests.support.commands import Launcher
from tests.support.harness import is_running, wait_until
from torchring.elastic.driver import driver_store as store_module
from torchring.elastic.driver import host_list as hosts_module
from torchring.elastic.driver.coordinator import Coordinator
from torchring.elastic.driver.driver import Driver
from torchring.elastic.driver.driver_store import DriverStore, Listener
from torchring.elastic.driver.endings import Slot
from torchring.elastic.driver.workers import Limits
from torchring.elastic.protocol import ORDERS, Card, Orders, card_key
from torchring.errors import TopologyError
from torchring.launch import hosts as launch_hosts
from torchring.launch.hosts import Host, LaunchError

TICK = 0.02


class Job:
    """A coordinator, its clock, and workers whose cards and beats the test sets. What was done is in the attributes."""

    def __init__(self, hosts: str = "a:4", **limits: Any) -> None:
        self.now = 1000.0
        self.coordinator = Coordinator(Limits(**{"size": 2, "max_size": 4, **limits}), self.now, self)
        self.started: list[tuple[int, str, int]] = []
        self.sent: list[tuple[int, int]] = []
        self.said: list[str] = []
        self.generations: list[Orders] = []  # the orders that began one
        self.broken: list[tuple[int, tuple[int, ...], str]] = []  # generation, ranks that were lost, and how
        self.called: list[int] = []
        self.over: list[str] = []
        self._orders = Orders()
        self.cards: dict[int, Card] = {}
        self.set_hosts(hosts)

    def set_hosts(self, hosts: str) -> None:
        pairs = [host.split(":") for host in hosts.split(",") if host]
        self.coordinator.set_hosts([Host(name, int(slots)) for name, slots in pairs])
        self.tick()

    def tick(self, seconds: float = TICK) -> None:
        """Time passes in one piece."""
        self.now += seconds
        self.coordinator.tick(self.now)
        before, self._orders = self._orders, self.coordinator.orders
        if self._orders.generation != before.generation:
            self.generations.append(self._orders)
        if (self._orders.broken, self._orders.lost) != (before.broken, before.lost):
            self.broken.append((self._orders.broken, self._orders.lost, self._orders.how))
        self.called += [self._orders.call] * (self._orders.call != before.call)
        self.over += [self._orders.over] * (self._orders.over != before.over)

    @property
    def code(self) -> int | None:
        return self.coordinator.code

    @property
    def workers(self) -> tuple[int, ...]:
        return self._orders.workers

    def start(self, worker: int, slot: Slot) -> None:
        self.started.append((worker, *slot))

    def send(self, worker: int, number: int) -> None:
        self.sent.append((worker, number))

    def forget(self, worker: int) -> None:
        self.cards.pop(worker, None)

    def say(self, text: str) -> None:
        self.said.append(text)

    def wait(self, seconds: float, *beating: int, **card: Any) -> None:
        """Time passes, and these workers show that they live."""
        for _ in range(round(seconds / 0.5)):
            for worker in beating:
                self.note_beat(worker, **card)
            self.tick(0.5)

    def show(self, state: Any, *workers: int, generation: int | None = None, **card: Any) -> None:
        """The workers set their cards, by default with the newest generation that they belong to."""
        for worker in workers:
            newest = max([each.generation for each in self.generations if worker in each.workers], default=0)
            said = self.cards.get(worker, Card("starting"))
            beats = {name: getattr(said, name) for name in ("pid", "count", "steps", "made", "progress", "waits")}
            self._show(worker, Card(state, newest if generation is None else generation, **card, **beats))
        self.tick()

    def meet(self, *workers: int) -> None:
        self.show("meeting", *workers)
        self.show("running", *workers)

    def beat(self, *workers: int, steps: int = 0, **card: Any) -> None:
        for worker in workers:
            self.note_beat(worker, steps, **card)
        self.tick()

    def note_beat(self, worker: int, steps: int = 0, **more: Any) -> None:
        card = self.cards.get(worker, Card("starting"))
        made = max(card.steps, 0) + steps
        self._show(worker, dataclasses.replace(card, count=card.count + 1, steps=made, made=made, **more))

    def _show(self, worker: int, card: Card) -> None:
        self.cards[worker] = card
        self.coordinator.note_card(worker, card)

    def step(self, *workers: int) -> None:
        self.beat(*workers, steps=1)

    def end(self, worker: int, code: int = 128 + signal.SIGKILL) -> None:
        self.coordinator.note_end(worker, code)
        self.tick()


def running(hosts: str = "a:4", num: int = 2, *, works: bool = True, **limits: Any) -> Job:
    """A job whose first generation runs, and, if it `works`, has made steps."""
    job = Job(hosts, **{"size": num, "max_size": num, **limits})
    workers = range(num)
    job.meet(*workers)
    if works:
        job.step(*workers)
    return job


# ---- the first generation


def test_a_job_starts_when_all_workers_have_come() -> None:
    job = Job("a:1,b:5", size=3)
    assert job.started == [(0, "a", 0), (1, "b", 0), (2, "b", 1)]
    job.show("meeting", 2, 0)
    assert job.generations == []
    job.show("meeting", 1)
    assert job.generations == [Orders(1, (0, 1, 2), "the job starts")]
    assert job.said == ["generation 1 begins, 3 workers (a: 0; b: 1, 2), because the job starts"]


def test_a_job_starts_without_workers_that_have_died() -> None:
    job = Job(size=3, min_size=2)
    job.end(1, 3)
    job.show("meeting", 0)
    assert (job.generations, len(job.started)) == ([], 3)
    job.show("meeting", 2)
    assert job.workers == (0, 2)
    assert "worker 1 on a ended with exit code 3 before it came to torchring.elastic.run" in job.said
    job = Job(size=3, min_size=2, max_size=3)
    job.show("meeting", 0)
    job.end(1, 1)
    assert len(job.started) == 3
    job.end(2, 1)
    assert job.started[3:] == [(3, "a", 1)], "too few are left, and nobody is starting"


def test_a_job_starts_without_workers_that_take_long() -> None:
    job = Job(size=3, min_size=2)
    job.show("meeting", 0)
    job.wait(60)
    job.show("meeting", 1)
    job.wait(29)
    assert job.generations == []
    job.wait(2)
    assert job.workers == (0, 1)


# ---- losses


def test_survivors_go_on_at_once_and_in_order() -> None:
    job = running(num=4)
    job.beat(0, pid=77)
    job.end(0)
    assert job.broken == [(1, (0,), "rank 0 (worker 0, pid 77, on a) was killed by SIGKILL")]
    assert job.started[4:] == [(4, "a", 0)]
    job.show("meeting", 3)
    job.show("meeting", 2)
    assert len(job.generations) == 1
    job.show("meeting", 1)
    assert (job.workers, job.generations[1].reason) == ((1, 2, 3), "worker 0 on a was killed by SIGKILL")
    job.show("running", 1, 2, 3)
    job.show("meeting", 4)
    assert job.called == [1, 2]  # by the first that left, and for the new one
    job.show("meeting", 3, 1, 2)
    assert (job.workers, job.generations[2].reason) == ((1, 2, 3, 4), "worker 4 joined")


def test_who_goes_between_plan_and_pick_up_breaks_the_generation() -> None:
    job = running(num=3)
    job.show("meeting", 0, 1, 2)
    assert len(job.generations) == 2
    job.end(1)  # its card says "meeting", of generation 1
    assert job.broken == [(2, (1,), "rank 1 (worker 1, on a) was killed by SIGKILL")]
    job.show("meeting", 0, 2)
    assert job.workers == (0, 2)
    job.show("leaving", 2, generation=2)
    assert job.broken[1:] == [(3, (1,), "rank 1 (worker 2, on a) was told to end")]
    job.end(2, 0)
    assert len(job.broken) == 2


def test_a_death_after_leaving_breaks_nothing() -> None:
    job = running(num=3)
    job.show("meeting", 1, reason="out of memory")
    job.end(1)
    job.show("leaving", 2)
    job.end(2, 0)
    assert (job.broken, job.called) == ([], [1])
    job.show("meeting", 0)
    assert job.workers == (0,)
    assert job.generations[1].reason == "worker 1 on a was killed by SIGKILL; worker 2 on a left"


_LOST = {"has_lost_peer": True, "reason": "PeerLostError: rank 2 died or exited"}
_MET = [("meeting", 0, 1)]


@pytest.mark.parametrize(
    ("limits", "seconds", "shows", "card", "beats", "reason"),
    [
        ({"heartbeat_timeout": 4}, 4, [], {}, False, "gave no sign of life for 4 s"),
        ({"heartbeat_timeout": 4}, 1.5, [("meeting", 0)], _LOST, False, "gave no sign of life for 1.5 s"),
        ({"heartbeat_timeout": 4}, 4, [("meeting", 0)], {}, False, "gave no sign of life for 4 s"),
        ({"num": 2, "max_size": 3, "elastic_timeout": 20}, 20, [], {}, False, ""),  # worker 2 never comes
        ({}, 300, _MET, {}, True, "did not leave its step for 300 s"),
        ({}, 10, _MET, {"given_up": (2,)}, True, "did not leave its step for 10 s"),
        ({"stall_timeout": 20}, 20, _MET, {}, True, "made no progress for 20 s while others waited for it (--stall-"),
        ({}, 300, [("leaving", 2), *_MET, ("running", 0, 1)], {}, False, ""),  # and does not end
    ],
)
def test_a_worker_is_killed_after_a_while(
    limits: Any, seconds: float, shows: list[Any], card: dict[str, Any], beats: bool, reason: str
) -> None:
    """The others hear of it before it is dead. Its slot is free after that."""
    job = running(**{"num": 3, **limits})
    for show in shows:
        job.show(*show, **card)
    beating = (0, 1, 2) if beats else (0, 1)
    job.wait(seconds - 1, *beating)
    assert job.sent == []
    job.wait(2, *beating)
    assert job.sent == [(2, signal.SIGKILL)]
    assert [reason in how for _, _, how in job.broken] == [True] * bool(reason)
    assert len(job.started) == 3
    job.end(2)
    assert job.started[3:] == [(3, "a", 2)]
    assert len(job.sent) == 1


def test_a_worker_whose_end_is_known_explains_what_others_have_lost() -> None:
    job = running(num=3, heartbeat_timeout=4)
    job.end(1, 137)
    job.show("meeting", 0, reason="PeerLostError: rank 1 died or exited", has_lost_peer=True)
    job.wait(3.5, 0)
    assert job.sent == []


def test_a_worker_that_takes_long_to_end_is_given_up_but_not_killed_for_a_while() -> None:
    """Its exit handlers may write files. The others, and its exit code, do not wait for that."""
    job = running(num=2, heartbeat_timeout=4)
    job.beat(1, is_last=True)
    job.wait(3.5, 0)
    assert (job.broken, job.sent) == ([], [])
    job.wait(1, 0)
    assert job.broken == [(1, (1,), "rank 1 (worker 1, on a) did not end within 4 s after its script")]
    assert job.sent == []
    assert len(job.started) == 2, "its slot is not free"
    job.meet(0)
    assert job.workers == (0,)
    job.wait(294, 0)
    assert job.sent == []
    job.wait(2, 0)
    assert job.sent == [(1, signal.SIGKILL)]
    job.end(1)
    assert job.started[2:] == [(2, "a", 1)]
    assert len(job.sent) == 1


def test_silence_while_the_driver_was_stopped_does_not_count() -> None:
    job = running(num=2, heartbeat_timeout=4)
    job.tick(1000)
    assert job.sent == []
    job.wait(3.5)
    assert [worker for worker, _ in job.sent] == [0, 1]


@pytest.mark.parametrize("limit", [30.0, None])
def test_a_worker_that_the_others_wait_for_and_that_does_not_move_is_killed(limit: float | None) -> None:
    job = running(num=3, stall_timeout=limit)

    def wait(seconds: float, progress: int = 0, *, waits: bool = True) -> None:
        for _ in range(round(seconds / 0.5)):
            job.note_beat(1, progress=progress)
            job.wait(0.5, 0, 2, waits=waits)

    wait(60, waits=False)  # all compute
    for progress in range(1, 5):  # one works alone
        wait(9, progress)
    said = len(job.said)
    wait(29, 5)
    assert job.sent == []
    when = "30 s" if limit else "timeout_seconds of torchring.init (set --stall-timeout)"
    text = f"the others have waited for worker 1 on a for 10 s, without progress; it is killed after {when}"
    assert job.said[said:] == [text]
    wait(2, 5)
    assert job.sent == ([(1, signal.SIGKILL)] if limit else [])
    if limit:
        assert "made no progress for 30 s while others waited for it" in job.broken[0][2]


# ---- new workers


def test_new_workers_wait_for_each_other_for_a_moment() -> None:
    job = running(num=1, max_size=3)
    assert len(job.started) == 3
    job.show("meeting", 1)
    assert job.called == []
    job.tick(0.5)
    assert job.called == [1]
    job.show("meeting", 2)
    job.show("meeting", 0)
    assert job.workers == (0, 1, 2)
    assert job.called == [1]


def test_new_workers_start_when_hosts_come_and_end_when_hosts_go() -> None:
    job = running("a:1,b:1", num=2, max_size=3)
    assert len(job.started) == 2
    job.set_hosts("a:1,b:1,c:8")
    assert job.started[2:] == [(2, "c", 0)]
    job.set_hosts("a:1,c:8")
    assert job.sent == [(1, signal.SIGTERM)]
    assert job.started[3:] == [], "worker 1 still takes part"
    job.show("leaving", 1)
    job.show("meeting", 0)
    assert job.generations[1].reason == "worker 1 on b was told to end"
    job.end(1, 0)
    assert job.started[3:] == [(3, "c", 1)]
    assert len(job.sent) == 1


# ---- too few, too often


def test_with_fewer_than_min_np_the_job_waits_and_then_ends() -> None:
    job = running("a:2", num=2, min_size=2, elastic_timeout=30)
    job.set_hosts("a:1")
    job.show("leaving", 1)
    job.show("meeting", 0)
    job.end(1, 0)
    assert job.said[-1] == "waiting for more workers: there are 1 of 2, because worker 1 on a was told to end"
    job.wait(29, 0)
    assert (len(job.generations), job.over) == (1, [])
    job.wait(2, 0)
    expected = "for 30 s (--elastic-timeout) there were fewer than 2 workers (--min-np): 1"
    assert (job.over, job.said[-1]) == ([expected], expected)
    job.wait(24, 0)  # for it to end by itself
    assert job.sent == [(1, signal.SIGTERM)]
    job.wait(10, 0)
    assert job.sent[1:] == [(0, signal.SIGTERM)]
    assert job.code is None
    job.end(0, 0)
    assert job.code == 1


def test_a_replacement_in_time_ends_the_wait() -> None:
    job = running("a:2", num=2, min_size=2, elastic_timeout=30)
    job.end(1)
    job.show("meeting", 0)
    job.wait(20, 0)
    job.show("meeting", 2)
    assert job.workers == (0, 2)
    job.wait(20, 0, 2)
    assert job.over == []


def test_without_hosts_the_job_ends_after_a_while() -> None:
    job = Job("", elastic_timeout=30)
    job.wait(29)
    assert job.code is None
    job.wait(2)
    assert job.code == 1


# ---- scripts that are wrong, places that are wrong


@pytest.mark.parametrize(
    ("codes", "code", "said"),
    [
        ((4, 3), 3, "none of them has made a step; first worker 1 on a ended with exit code 3"),
        ((0, 0), 0, "does the script call torchring.elastic.run?"),
    ],
)
def test_a_script_that_ends_at_once_ends_the_job(codes: tuple[int, int], code: int, said: str) -> None:
    job = Job(size=2)
    for worker in (1, 0):
        job.end(worker, codes[worker])
    assert (job.code, len(job.started)) == (code, 2)
    assert said in job.said[-1]


def lose_all(job: Job, steps: int) -> None:
    """All workers of a new life make so many steps, and fail."""
    while len(job.started) < 2 or job.started[-2][0] in job.workers:
        job.tick(0.5)
    workers = [worker for worker, _, _ in job.started[-2:]]
    job.meet(*workers)
    for _ in range(steps):
        job.step(*workers)
    for worker in workers:
        job.coordinator.note_end(worker, 1)
    job.tick()


def test_after_the_loss_of_all_workers_new_ones_start_as_long_as_they_get_further() -> None:
    job = Job("a:2", size=2, max_size=2)
    for steps in (4, 5, 6, 7, 3, 7):
        lose_all(job, steps)
        assert job.over == []
    assert any("all workers that have trained are lost, first worker 6 on a ended" in said for said in job.said)
    while not job.over:
        lose_all(job, 7)
    assert job.over == ["14 workers were lost in a row without a new step; first worker 6 on a ended with exit code 1"]
    assert job.code == 1


def test_a_partner_that_is_lost_again_and_again_before_the_first_step_ends_the_job() -> None:
    job = running(num=2, min_size=2, works=False)
    while not job.over:
        assert len(job.started) < 30
        survivor, partner = job.workers
        job.end(partner, 5)
        job.show("meeting", survivor)
        while job.started[-1][0] == partner and not job.over:
            job.wait(0.5, survivor)
        job.meet(*{survivor, job.started[-1][0]})
    assert "workers were lost in a row without a new step; first worker 1 on a" in job.over[0]


def test_a_slot_is_left_out_for_longer_and_longer() -> None:
    job = running("a:2", num=2, cooldown=(1, 8))
    delays = []
    for worker in range(1, 7):
        job.end(worker, 1)
        job.meet(0)
        begin = job.now
        while len(job.started) < worker + 2:
            job.beat(0)
            job.tick(0.05)
        delays.append(job.now - begin)
        job.beat(0, steps=1)
    assert delays[0] < 0.1
    shares = [delay / min(2**i, 8) for i, delay in enumerate(delays[1:])]
    assert all(0.9 < share < 1.2 for share in shares)
    assert {slot for _, _, slot in job.started[1:]} == {1}
    assert any(said.startswith("slot 1 of a is left out for 1.0 s") for said in job.said)


def test_a_slot_whose_workers_make_steps_and_are_killed_is_used_at_once() -> None:
    job = running("a:2", num=2)
    for worker in range(1, 7):
        job.end(worker)
        assert job.started[-1] == (worker + 1, "a", 1)
        job.meet(0, worker + 1)
        job.step(0, worker + 1)


# ---- the end


@pytest.mark.parametrize("code", [0, 7])
def test_the_job_ends_as_its_workers_do_when_they_have_finished(code: int) -> None:
    job = running(num=2, max_size=3)
    job.show("finished", 0)
    assert job.over == []
    job.show("finished", 1)
    assert job.over == ["the training has finished"]
    assert job.sent == [(2, signal.SIGTERM)], "has nothing left to do"
    for worker, ended in [(0, 0), (2, 143), (1, code)]:
        assert job.code is None
        job.end(worker, ended)
    assert job.code == code
    assert len(job.started) == 3


def test_who_has_not_finished_goes_on_even_alone() -> None:
    job = running(num=3, min_size=3, max_size=4)
    job.show("meeting", 3)
    job.show("finished", 0)
    job.end(0, 0)
    job.end(1)
    assert job.broken[0][1] == (1,)
    job.show("meeting", 2)
    assert job.workers == (2,)
    assert job.generations[1].reason == "worker 0 on a has finished; worker 1 on a was killed by SIGKILL"
    assert len(job.started) == 4
    job.show("running", 2)
    job.show("finished", 2)
    assert job.over == ["the training has finished"]
    job.end(2, 0)
    job.end(3, 0)
    assert job.code == 0


@pytest.mark.parametrize("received", [signal.SIGINT, signal.SIGHUP])
def test_a_signal_is_passed_on_once_and_the_second_kills(received: signal.Signals) -> None:
    """A lost connection is SIGTERM to the workers, which note that, and write a checkpoint."""
    job = running(num=2)
    job.coordinator.note_signal(received)
    job.tick()
    told = signal.SIGINT if received == signal.SIGINT else signal.SIGTERM
    assert job.sent == [(0, told), (1, told)]
    assert job.over == [f"torchring run was told to end by {received.name}"]
    job.show("leaving", 0)
    job.end(0, 0)
    assert len(job.started) == 2
    job.coordinator.note_signal(signal.SIGTERM)
    job.tick()
    assert job.sent[2:] == [(1, signal.SIGKILL)]
    job.end(1)
    assert job.code == 128 + received


def test_a_script_that_exits_with_0_on_all_ranks_has_ended_well() -> None:
    job = running(num=2)
    job.end(0, 0)
    assert len(job.started) == 3
    job.show("meeting", 1, 2)  # as if rank 0 alone had left
    assert job.generations[-1].workers == (1, 2)
    job.show("running", 1, 2)
    for worker in (1, 2):
        job.end(worker, 0)
    assert job.said[-1].startswith("the script has ended with exit code 0 on all ranks")
    for worker, *_ in job.started[3:]:  # came too late
        job.end(worker, 143)
    assert job.code == 0


# ---- hosts


def script(folder: Path, code: str) -> str:
    file = folder / "discover"
    file.write_text(f"#!/bin/sh\n{code}\n")
    file.chmod(0o755)
    return str(file)


def test_a_discovery_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts = hosts_module.from_script(script(tmp_path, "echo a:2; echo b; echo 127.0.0.1:1; echo localhost:3"), 5)
    monkeypatch.setattr(launch_hosts, "is_here", lambda name: name in ("localhost", "127.0.0.1"))
    assert (hosts.known, hosts.may_change) == (None, True)
    hosts.ask()
    assert hosts.known == (Host("a", 2), Host("b", 5), Host("127.0.0.1", 4))
    script(tmp_path, "echo '# two machines'; echo 'a:0  # leaves'; echo b:1")
    hosts.ask()
    assert hosts.known == (Host("b", 1),)
    script(tmp_path, "echo b:0")
    hosts.ask()
    assert (hosts.known, hosts.problem) == ((), "")


@pytest.mark.parametrize(
    ("code", "trouble"),
    [
        ("echo is gone >&2; exit 3", "failed with exit code 3: is gone"),
        ("echo a:2; echo 'a b:0'", "printed 'a b:0'; expected `host:slots` or `host` on each line"),
        ("echo a:2; echo 'a b c'", "printed 'a b c'; expected `host:slots` or `host` on each line"),
        ("echo '# a:2'", "printed no host; expected lines `host:slots`"),
        ("echo a:1; sleep 60", "did not end within 0.3 s, and was killed"),
        ("echo a:1; sleep 60 & exit 0", "did not end within 0.3 s, and was killed"),
        ("yes a:1", "printed more than 1048576 bytes"),
    ],
)
def test_discovery_scripts_that_fail(code: str, trouble: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if "sleep" in code:
        monkeypatch.setattr(hosts_module, "_SCRIPT_SECONDS", 0.3)
    hosts = hosts_module.from_script(script(tmp_path, code))
    hosts.ask()
    assert (hosts.known, hosts.problem) == (None, f"the discovery script '{tmp_path}/discover' {trouble}")


def test_after_a_failure_the_last_good_answer_stays_in_force(tmp_path: Path) -> None:
    hosts = hosts_module.from_script(script(tmp_path, "echo localhost:2"))
    hosts.ask()
    script(tmp_path, "exit 3")
    hosts.ask()
    assert hosts.problem.endswith("failed with exit code 3; the hosts known so far are kept")
    assert hosts.known == (Host("localhost", 2),)
    script(tmp_path, "echo localhost:3")
    hosts.ask()
    assert (hosts.known, hosts.problem) == ((Host("localhost", 3),), "")


def test_a_script_that_runs_is_killed_when_the_job_is_over(tmp_path: Path) -> None:
    hosts = hosts_module.from_script(
        script(tmp_path, f"echo $$ >{tmp_path}/new; mv {tmp_path}/new {tmp_path}/pid; sleep 60")
    )
    hosts.start()
    wait_until((tmp_path / "pid").exists, "the script")
    hosts.close()
    assert not is_running(int((tmp_path / "pid").read_text()))


# ---- the store


def test_the_store_listens_on_loopback_unless_others_can_come(tmp_path: Path) -> None:
    hosts = hosts_module.Hosts(None, [Host("localhost", 2)])
    with contextlib.closing(Listener(hosts, "nonsense")) as listener:
        assert (listener.addresses, listener.socket.getsockname()) == (("127.0.0.1",), ("127.0.0.1", listener.port))
    hosts = hosts_module.from_script(script(tmp_path, "echo localhost:2"))
    with contextlib.closing(Listener(hosts, "lo")) as listener:
        assert (listener.addresses, listener.socket.getsockname()[0]) == (("127.0.0.1",), "127.0.0.1")
    with pytest.raises(LaunchError, match="no network interface 'nonsense'"):
        Listener(hosts, "nonsense")
    assert store_module._choose(hosts, "")[0] == ""
    assert "127.0.0.1" not in store_module._choose(hosts, "")[1]


def test_a_message_that_is_none_is_one_clear_error() -> None:
    for data in ("nonsense", '{"state": "running", "evil": 1}', "[1]", "[" * 100_000, "{}", "5"):
        with pytest.raises(TopologyError, match="a message of an elastic job is not a Card of torchring's"):
            Card.decode(data)


@pytest.mark.parametrize("key", [ORDERS, card_key(7)])
def test_a_stranger_in_the_store_ends_the_job_with_one_sentence(key: str, capfd: pytest.CaptureFixture[str]) -> None:
    listener = Listener(hosts_module.Hosts(None, [Host("localhost", 2)]))
    store = DriverStore(listener)
    store.add_worker(7)
    theirs = TCPStore("127.0.0.1", listener.port, is_master=False)
    theirs.set(key, Card("meeting").encode())
    driver = object.__new__(Driver)
    driver._coordinator = Coordinator(Limits(1), 0.0, driver)
    driver.tick = lambda received: store.read([card_key(7)])  # type: ignore[method-assign, assignment, return-value]
    assert driver.run([]) == 1
    said = capfd.readouterr().err.splitlines()
    assert len(said) == 1
    assert said[0].startswith(f"torchring run: this job ends, because the rendezvous store has a value under {key!r}")
    theirs.delete_key(key)
    assert driver.run([]) == 1
    assert "because the rendezvous store lacks a value" in capfd.readouterr().err


# ---- processes

# It only speaks the protocol: importing what trains takes another second.
WORKER = """
import json, os, pathlib, signal, sys, time
from datetime import timedelta
from torch.distributed import TCPStore
from torchring.elastic.protocol import *
from torchring.rendezvous.environment import INVITATION
from torchring.rendezvous.signed import signed

me, folder = Invitation.decode(os.environ[INVITATION]), pathlib.Path(os.environ["REPORTS"])
signal.signal(signal.SIGTERM, lambda number, _: sys.exit(0))
store = TCPStore(me.addresses[0], me.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=30))
store = signed(store, me.secret)
print("worker", me.worker, "starts")
generation, count, steps, state = 0, 0, 0, "meeting"
while True:
    count, steps = count + 1, steps + (state == "running")
    store.set(card_key(me.worker), Card(state, generation, count=count, steps=steps, made=steps).encode())
    time.sleep(0.02)
    orders = Orders.decode(store.get(ORDERS))
    if state == "meeting" and orders.generation > generation and me.worker in orders.workers:
        generation, state = orders.generation, "running"
        path = folder / f".{me.worker}.{generation}"
        path.write_text(json.dumps({"pid": os.getpid(), "environ": dict(os.environ)}))
        path.rename(folder / f"{me.worker}.{generation}")
    elif state == "running" and generation in (orders.broken, orders.call):
        state = "meeting"
"""

# Behind ssh there is little of the environment.
SSH = {"192.0.2.1": 'exec env -i PATH="$PATH" HOME="$HOME" REPORTS="$REPORTS" sh -c "$*"'}


def test_a_job_from_start_to_finish(tmp_path: Path) -> None:
    """A worker of another host is killed and replaced. A signal to the driver ends all."""
    launcher = Launcher(tmp_path, SSH)
    line = "run --elastic -H localhost:1,192.0.2.1:1 --env GLOO_SOCKET_IFNAME=lo -np 2 --tag-output --log-dir logs"
    inherited = {"WORLD_SIZE": "7", "RANK": "3", "MASTER_ADDR": "nowhere"}
    process = launcher.start(*line.split(), launcher.script(WORKER), **inherited)

    def wait_for(*names: str) -> list[dict[str, Any]]:
        """Until exactly these workers have run in the generation. What they have said."""

        def is_there() -> bool:
            assert process.poll() is None, process.communicate()
            return {name for name in launcher.reports() if name.endswith(names[0][-2:])} == {*names}

        wait_until(is_there, f"workers {names}")
        return [launcher.reports()[name] for name in names]

    try:
        first = wait_for("0.1", "1.1")
        os.kill(first[1]["pid"], signal.SIGKILL)
        wait_for("0.2")
        wait_for("0.3", "2.3")
        process.send_signal(signal.SIGTERM)
    finally:
        ran = launcher.finish(process)
    assert ran.returncode == 128 + signal.SIGTERM
    for said in first:
        assert said["environ"].keys() >= {"OMP_NUM_THREADS", "TORCHRING_JOB", "GLOO_SOCKET_IFNAME"}
        assert said["environ"].keys().isdisjoint({"RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCH_CPP_LOG_LEVEL"})
    assert sorted(ran.stdout.splitlines()) == [f"[{worker}] worker {worker} starts" for worker in range(3)]
    for worker in range(3):
        assert (launcher.folder / "logs" / f"worker{worker}.log").read_text() == f"worker {worker} starts\n"
    assert ran.stderr.splitlines() == [
        f"torchring run: {said}"
        for said in (
            "generation 1 begins, 2 workers (localhost: 0; 192.0.2.1: 1), because the job starts",
            "generation 2 begins, 1 worker (localhost: 0), because worker 1 on 192.0.2.1 was killed by SIGKILL",
            "generation 3 begins, 2 workers (localhost: 0; 192.0.2.1: 2), because worker 2 joined",
            "torchring run was told to end by SIGTERM",
        )
    ]


WAITS = """
import json, os, pathlib, signal, sys, time
path = pathlib.Path(os.environ["REPORTS"], os.environ["LOCAL_RANK"])
signal.signal(signal.SIGTERM, lambda number, _: (path.with_name(f"told{path.name}").touch(), sys.exit(0)))
path.with_name("new" + path.name).write_text(json.dumps({"pid": os.getpid()}))
path.with_name("new" + path.name).rename(path)
time.sleep(60)
"""


def test_when_the_driver_is_killed_its_workers_are_told(tmp_path: Path) -> None:
    """So that they can save."""
    launcher = Launcher(tmp_path)
    process = launcher.start("run", "--elastic", "-np", "2", "--min-np", "1", launcher.script(WAITS))
    try:
        wait_until(lambda: launcher.reports().keys() == {"0", "1"}, "the workers")
        pids = launcher.pids()
        assert all(map(is_running, pids))
        process.kill()
        wait_until(lambda: not any(map(is_running, pids)), "the workers to end")
        assert {file.name for file in launcher.reports_folder.glob("told*")} == {"told0", "told1"}
    finally:
        launcher.finish(process)
