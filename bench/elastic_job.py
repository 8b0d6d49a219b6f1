"""The jobs of `torchring bench elastic`: three workers of one rival, whose faults are made and measured from outside.

A job's workers write what they do to files (see elastic_worker.py). A `Job` reads them, and sends signals to workers.
What a fault cost is worked out from the lines alone.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from torchring.bench import measure
from torchring.bench.elastic_worker import Line
from torchring.launch.jobs import OWN_IMPORTS
from torchring.linux import open_process

SIZE: Final = 3  # workers
_SETTLED_STEPS: Final = 6  # of all workers together: then a fault is over
_LOOK_SECONDS: Final = 0.02
_GO_ON_SECONDS: Final = 120.0
_SETTLE_SECONDS: Final = 120.0


class StuckError(Exception):
    """A job did not go on in time, or ended."""


class Worker:
    """A process that has opened its file.

    Attributes:
        pid: its number.
        lines: what it has written so far.
    """

    def __init__(self, file: Path) -> None:
        self.pid = int(file.stem)
        self.lines: list[Line] = []
        self._reader = file.open()
        self._partial = ""
        try:
            self._pidfd: int | None = open_process(self.pid)
        except OSError:  # has ended already
            self._pidfd = None

    @property
    def steps(self) -> list[Line]:
        return [line for line in self.lines if line.event == "step"]

    @property
    def is_alive(self) -> bool:
        return self._pidfd is not None and not select.select([self._pidfd], [], [], 0)[0]

    def read(self) -> None:
        self._partial += self._reader.read()
        *whole, self._partial = self._partial.split("\n")
        self.lines += [Line(**json.loads(text)) for text in whole]

    def send(self, number: signal.Signals) -> None:
        """Send a signal, if the process has not ended."""
        if self.is_alive:
            assert self._pidfd is not None
            signal.pidfd_send_signal(self._pidfd, number)

    def close(self) -> None:
        self.send(signal.SIGKILL)
        self._reader.close()
        if self._pidfd is not None:
            os.close(self._pidfd)
            self._pidfd = None


class Job:
    """Three workers of one rival.

    Args:
        script: run by every worker with `--worker NAME,FOLDER --model MODEL`.
        name: the rival.
        model: name of the model.

    Attributes:
        workers: all processes so far, by pid.
        folder: where workers and launcher write.
        lost: steps that had to be made again: pairs of the world, if all workers restart together, and the step.
    """

    def __init__(self, script: str, name: str, model: str) -> None:
        self.name = name
        self.folder = Path(tempfile.mkdtemp(prefix="torchring-bench-"))
        self.workers: dict[int, Worker] = {}
        self.lost: set[tuple[int, int]] = set()
        self._launcher: subprocess.Popen[bytes] | None = None
        self._output = (self.folder / "output").open("wb")
        self._command = [script, "--worker", f"{name},{self.folder}", "--model", model]
        try:
            self._start()
        except BaseException:
            self.close()
            raise

    @property
    def restarts_all(self) -> bool:
        """Whether the loss of a worker ends the others, too."""
        return self.name == "torchrun"

    @property
    def alive(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.is_alive]

    def look(self) -> None:
        """Read what the workers have written. Raises StuckError."""
        for file in self.folder.glob("*.log"):
            if int(file.stem) not in self.workers:
                self.workers[int(file.stem)] = Worker(file)
        for worker in self.workers.values():
            worker.read()
        if self._launcher is not None and self._launcher.poll() is not None:
            raise StuckError(f"{self.name} ended with exit code {self._launcher.returncode}")

    def wait(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        """Look until the condition holds. Raises StuckError."""
        deadline = time.monotonic() + seconds
        while True:
            self.look()
            if condition():
                return
            if time.monotonic() > deadline:
                raise StuckError(f"{what} took more than {seconds:.0f} s")
            time.sleep(_LOOK_SECONDS)

    def is_settled(self) -> bool:
        """Whether all workers are there, and have trained together for a few steps."""
        if len(workers := self.alive) != SIZE:
            return False
        steps = [worker.steps[-_SETTLED_STEPS:] for worker in workers]
        return all(
            len(each) == _SETTLED_STEPS and all(step.size == SIZE and step.world == each[-1].world for step in each)
            for each in steps
        )

    def by_rank(self, rank: int) -> Worker:
        """The worker of that rank in its newest step."""
        return next(worker for worker in self.alive if worker.steps[-1].rank == rank)

    def wait_for_end(self, seconds: float) -> None:
        """Wait until the launcher has ended by itself. Raises StuckError."""
        assert self._launcher is not None
        try:
            code = self._launcher.wait(seconds)
        except subprocess.TimeoutExpired:
            raise StuckError(f"{self.name} took more than {seconds:.0f} s") from None
        if code:
            raise StuckError(f"{self.name} ended with exit code {code}")

    def output(self, most: int = 4000) -> str:
        """The end of what workers and launcher have printed."""
        return (self.folder / "output").read_text(errors="replace")[-most:]

    def close(self) -> None:
        """Kill all processes, and remove the folder."""
        launchers = [] if self._launcher is None else [self._launcher]
        for process in launchers:
            process.terminate()
        for worker in self.workers.values():
            worker.send(signal.SIGKILL)
        measure.end(launchers)
        for file in self.folder.glob("*.log"):  # of workers that have come in the meantime
            self.workers.setdefault(int(file.stem), Worker(file))
        for worker in self.workers.values():
            worker.close()
        self._output.close()
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start(self) -> None:
        modules = {
            "torchrun": ["torch.distributed.run", "--standalone", f"--nproc-per-node={SIZE}", *TORCHRUN],
            "torchring": ["torchring", "run", "--elastic", "-np", str(SIZE), "--min-np", "2", "--max-np", str(SIZE)],
        }
        module = modules.get(self.name) or modules["torchring"]
        # Without this, restarted workers find the addresses of dead ones in the store (pytorch issue 135712).
        environment = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"} if self.name == "torchrun" else {}
        program = f"{OWN_IMPORTS}import runpy; del sys.argv[0]; runpy.run_module(sys.argv[0], run_name='__main__')"
        command = [sys.executable, "-c", program, *module, *self._command]
        self._launcher = measure.Command(self.name, command, {"OMP_NUM_THREADS": "1", **environment}).start(
            self._output
        )


TORCHRUN: Final = ["--max-restarts=1000", "--monitor-interval=0.1"]


@dataclass(frozen=True)
class Fault:
    """A signal to a worker, and what it cost.

    Attributes:
        signal: its name.
        rank: of the worker.
        pause_s: from the signal until all survivors have finished a step without the lost worker. Where all workers are
            restarted: until all new ones have finished a step.
        gap_s: the longest time between two finished steps of a survivor within the pause.
        new_s: from the signal until a step is finished that was not finished before.
        lost_steps: number of steps that a worker had finished, and that were made again.
        usual_s: time of a step before all faults.
        join_gap_s: the longest time between two finished steps of a survivor from when the replacement was ready to
            when it had finished its second step. None where all workers are restarted.
        start_s: the start-up of the replacement: from the signal until it was ready to join the others.
        whole_s: from the signal until all workers have finished a step in their full number.
    """

    signal: str
    rank: int
    pause_s: float
    gap_s: float
    new_s: float
    lost_steps: int
    usual_s: float
    join_gap_s: float | None
    start_s: float
    whole_s: float


def make_fault(job: Job, number: signal.Signals, rank: int, usual: float, rng: random.Random) -> Fault:
    """Signal the worker of that rank at a random moment of a step, and wait until the job has settled again.

    The job must be settled. Raises StuckError.
    """
    time.sleep(rng.uniform(0, 2 * usual))
    job.look()
    lost = job.by_rank(rank)
    old = job.alive
    worlds = {worker.pid: worker.steps[-1].world for worker in old}
    at = time.monotonic_ns()
    lost.send(number)

    def going_on() -> list[list[Line]]:
        """For each worker that should go on: its steps without the lost worker."""
        if job.restarts_all:
            return [worker.steps for worker in job.alive if worker not in old]
        return [[line for line in worker.steps if line.world > worlds[worker.pid]] for worker in old if worker != lost]

    def goes_on() -> bool:
        if not job.restarts_all and not all(worker.is_alive for worker in old if worker != lost):
            raise StuckError(f"another worker ended after {number.name} to rank {rank}")
        return len(steps := going_on()) == (SIZE if job.restarts_all else SIZE - 1) and all(steps)

    job.wait(goes_on, _GO_ON_SECONDS, f"going on after {number.name} to rank {rank}")
    job.wait(job.is_settled, _SETTLE_SECONDS, f"being {SIZE} workers after {number.name} to rank {rank}")
    new = [worker for worker in job.alive if worker not in old]
    if job.restarts_all:
        before = [line for worker in old for line in worker.steps]
    else:
        before = [line for worker in old for line in worker.steps if worker == lost or line.world <= worlds[worker.pid]]
    resumed = going_on()
    again = max(steps[0].ns for steps in resumed)
    last, first = max(line.step for line in before), min(steps[0].step for steps in resumed)
    job.wait(
        lambda: any(line.step > last for steps in going_on() for line in steps),
        _SETTLE_SECONDS,
        f"a new step after {number.name} to rank {rank}",
    )
    if last >= first:
        job.lost |= {(line.world if job.restarts_all else 0, line.step) for line in before if line.step >= first}
    joined = max(worker.steps[1].ns for worker in new)
    whole = max(
        next(line.ns for line in steps if line.size == SIZE)
        for steps in [*going_on(), *(worker.steps for worker in new)]
    )
    ready = max(line.ns for worker in new for line in worker.lines if line.event == "ready")
    if job.restarts_all:
        gap, join_gap = (again - max(line.ns for line in before)) / 1e9, None
    else:
        others = [worker.steps for worker in old if worker != lost]
        gap = max(longest_gap(steps, at, again) for steps in others)
        join_gap = max(longest_gap(steps, ready, joined) for steps in others)
    return Fault(
        signal=number.name,
        rank=rank,
        pause_s=(again - at) / 1e9,
        gap_s=gap,
        new_s=(min(line.ns for steps in going_on() for line in steps if line.step > last) - at) / 1e9,
        lost_steps=max(0, last - first + 1),
        usual_s=usual,
        join_gap_s=join_gap,
        start_s=(ready - at) / 1e9,
        whole_s=(whole - at) / 1e9,
    )


def longest_gap(steps: Sequence[Line], begin: int, end: int) -> float:
    """The longest time between two steps of a worker of which some lies between `begin` and `end`. In seconds."""
    return max(b.ns - a.ns for a, b in itertools.pairwise(steps) if b.ns > begin and a.ns < end) / 1e9


def check(job: Job) -> int:
    """Compare the workers' digests of each step. Returns the number of comparisons. Raises SystemExit.

    Steps that were lost may differ, and are left out.
    """
    digests: dict[tuple[str, tuple[int, int]], set[int]] = defaultdict(set)
    count = 0
    for worker in job.workers.values():
        if any(b.step <= a.step for a, b in itertools.pairwise(worker.steps)):
            raise SystemExit(f"{job.name}: worker {worker.pid} went back to a step that it had finished")
        for line in worker.lines:
            place = (line.world if job.restarts_all else 0, line.step)
            if line.event in ("step", "digest") and place not in job.lost:
                count += (line.event, place) in digests
                digests[line.event, place].add(line.digest)
    if different := [place for (_, place), values in digests.items() if len(values) > 1]:
        raise SystemExit(f"{job.name}: workers had different parameters after step {min(different)[1]}")
    return count
