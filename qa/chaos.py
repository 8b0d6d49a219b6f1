"""`make chaos`: an elastic job trains while a seeded adversary kills, stops, cuts off, dismisses and adds workers.

    make chaos SECONDS=600        another order of events in each run
    make chaos SECONDS=60 SEED=7  the events of seed 7, at the same times

An event comes every second on average, at random moments: in backward, in the reduction, in the step, while workers
meet again, while one joins. In the end, and for each step: replicas are equal bit for bit, each sample was used once,
the parameters are those of one process, and no worker has grown with the number of changes.
"""

import argparse
import contextlib
import functools
import os
import random
import secrets
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from tests.elastic.test_elastic import check_books, check_growth, check_result, train_worker
from tests.support.elastic_job import ElasticJob, Slots
from tests.support.harness import run_ranks
from tests.support.netns import enter, inside, why_skipped
from torchring.bench.netns import INTERFACE, Network

__all__ = ["Adversary", "Slots", "run", "run_ranks"]  # the harness preloads modules that have `run_ranks`
_MEAN_SECONDS = 1.0  # between two events


class Adversary:
    """Does something to the job every now and then."""

    def __init__(self, job: ElasticJob, seed: int, hosts: Slots, network: Network | None, folder: Path) -> None:
        self.num_events: Counter[str] = Counter()  # of each kind, so far
        self._job = job
        self._random = random.Random(seed)
        self._hosts = hosts
        self._network = network
        self._folder = folder
        self._later: list[tuple[float, Callable[[], object]]] = []
        self._next_at = time.monotonic() + self._random.expovariate(1 / _MEAN_SECONDS)
        self._kinds: dict[str, tuple[float, Callable[[], object]]] = {
            "kill": (5, lambda: self._send(self._any(), signal.SIGKILL)),
            "kill rank 0": (1, lambda: self._send(self._job.workers[:1], signal.SIGKILL)),
            "polite end": (2, lambda: self._send(self._any(at_least=2), signal.SIGTERM)),
            "stop": (0.4, self._stop),
            "wait for a checkpoint to be written": (1, self._kill_writer),
            "other slots": (0.7, self._change_slots),
            "cut": (0.3 if network else 0, self._cut),
        }

    def tick(self) -> None:
        """Do what is due."""
        now = time.monotonic()
        for at, action in list(self._later):
            if now >= at:
                self._later.remove((at, action))
                action()
        if now >= self._next_at:
            self._next_at = now + self._random.expovariate(1 / _MEAN_SECONDS)
            (kind,) = self._random.choices(list(self._kinds), [weight for weight, _ in self._kinds.values()])
            self.num_events[kind] += self._kinds[kind][1]() is not False

    def end(self) -> None:
        """Undo what can be undone."""
        for _, action in self._later.copy():
            action()
        self._later.clear()  # what waits for a file that is not finished would wait again
        self._hosts.offer(dict.fromkeys(self._hosts.names, 2))

    def _any(self, at_least: int = 1) -> tuple[int, ...]:
        """A worker that lives, if so many do."""
        alive = [worker for worker in self._job.pids if self._job.is_alive(worker)]
        return (self._random.choice(alive),) if len(alive) >= at_least else ()

    def _send(self, workers: tuple[int, ...], number: int) -> bool:
        alive = [worker for worker in workers if self._job.is_alive(worker)]
        for worker in alive:
            with contextlib.suppress(ProcessLookupError):
                self._job.send(worker, number)
        return bool(alive)

    def _do_later(self, least: float, most: float, action: Callable[[], object]) -> None:
        self._later.append((time.monotonic() + self._random.uniform(least, most), action))

    def _stop(self) -> bool:
        workers = self._any()
        self._do_later(1.0, 20.0, lambda: self._send(workers, signal.SIGCONT))
        return self._send(workers, signal.SIGSTOP)

    def _kill_writer(self) -> None:
        if any(file.suffix == ".tmp" for file in self._folder.iterdir()):
            self.num_events["kill while a checkpoint is written"] += self._send(self._job.workers[:1], signal.SIGKILL)
        else:
            self._later.append((0.0, self._kill_writer))  # until there is a file that is not finished

    def _change_slots(self) -> None:
        few = [1, 2] if len(self._hosts.names) > 1 else [2, 3, 4]
        self._hosts.offer({name: self._random.choice(few) for name in self._hosts.names})

    def _cut(self) -> bool | None:
        if (network := self._network) is None:
            return False
        network.set_link(1, False)
        self._do_later(0.5, 15.0, lambda: network.set_link(1, True))
        return None


def run(seconds: float, seed: int, network: Network | None = None) -> str:
    """Let the adversary act for that long. Returns what has happened, as text. Raises AssertionError.

    With a network of two hosts, this process has to be on host 0.
    """
    with tempfile.TemporaryDirectory(prefix="torchring-chaos-") as name:
        folder = Path(name)
        script = functools.partial(train_worker, checkpoint=folder, every=50)
        how = {"max_size": 4, "heartbeat_timeout": 6.0}
        if network is None:
            hosts = Slots(["a"], 4)
            start = functools.partial(ElasticJob, script, 3, hosts=hosts, **how)
        else:
            hosts = Slots(["a", "b"])
            enters = functools.partial(_enter, {"b": network.name(1)})
            start = functools.partial(ElasticJob, script, 4, hosts=hosts, enter_host=enters, interface=INTERFACE, **how)
        with start() as job:
            job.run_until(lambda: job.last_step() > 100, "100 steps")
            adversary = Adversary(job, seed, hosts, network, folder)
            _train_under(adversary, job, time.monotonic() + seconds)
            adversary.end()
            num_steps = job.stop()
            code = job.run(120)
            assert code == 0, f"the job has ended with {code}"
            check_books(job, num_steps)
            check_result(job, num_steps)
            grown = check_growth(job)
            events = ", ".join(f"{count} x {kind}" for kind, count in adversary.num_events.most_common())
            what = f"{job.generation} generations, {len(job.pids)} workers, {num_steps} steps; {events}"
            return f"{what}. The most that a worker has grown: {grown}"


def _train_under(adversary: Adversary, job: ElasticJob, end: float) -> None:
    step, at = job.last_step(), time.monotonic()
    while (now := time.monotonic()) < end:
        assert job.code is None, f"the job has ended with {job.code}"
        assert now - at < 90, "no step for 90 s"
        adversary.tick()
        job.tick()
        if (newest := job.last_step()) > step:
            step, at = newest, now


def _enter(namespaces: dict[str, str], host: str) -> None:
    if host in namespaces:
        enter(namespaces[host])


def main() -> int:
    parser = argparse.ArgumentParser(description="Train while an adversary kills workers.")
    parser.add_argument("--seconds", type=float, default=600)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    seed = secrets.randbelow(10**6) if options.seed is None else options.seed
    print(f"seed {seed}", flush=True)
    if (reason := why_skipped()) is not None:
        print(f"one host only: {reason}", flush=True)
        print(run(options.seconds, seed))
        return 0
    with Network(2) as network, inside(network.name(0)):
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE
        print(run(options.seconds, seed, network), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
