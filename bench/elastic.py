"""Lost and new workers: how long an elastic job pauses when a worker is killed, leaves, and is replaced.

    torchring bench elastic                        30 kills
    torchring bench elastic --quick                3 kills, in one turn
    torchring bench elastic --json results.jsonl

A GPT of 17 M parameters (AdamW) trains with three workers of one thread each: torchring.elastic.State with commit() in
each step, under `torchring run --elastic -np 3 --min-np 2`. A turn begins with undisturbed training. Then workers of
all ranks get SIGKILL, and then SIGTERM, one at a time at random moments of a step. Each lost worker is replaced at
once, and the next signal follows when three workers train together again.
Workers write the time of each finished step to files, and all times are from these files. Replicas must be equal after
each step, and after each change all of their parameters.
"""

import argparse
import itertools
import json
import os
import random
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from torchring.bench import measure
from torchring.bench.elastic_worker import Line, train
from torchring.bench.measure import Spread
from torchring.bench.options import parser
from torchring.launch.jobs import OWN_IMPORTS
from torchring.linux import open_process

SIZE: Final = 3  # workers
_SETTLED_STEPS: Final = 6  # of all workers together: then a fault is over
_LOOK_SECONDS: Final = 0.02
_PATIENCE_SECONDS: Final = 120.0


def main() -> int:
    options = parser("elastic").parse_args()
    if options.worker:
        train(Path(options.worker), options.model)
        return 0
    if options.quick:
        options.kills, options.polite, options.turns, options.seconds = 3, 1, 1, 10.0
    about = measure.provenance() | {"script": Path(__file__).name, "seed": options.seed}
    with measure.stopped_by_signals():
        row = run(options)
    report(row, about)
    measure.write_rows(options.json, [row], about)
    return 0


def run(options: argparse.Namespace) -> dict[str, Any]:
    """All turns. Raises SystemExit if a job does not go on after a signal."""
    rng = random.Random(options.seed)
    faults: list[Fault] = []
    steps: list[float] = []
    comparisons = 0
    for turn in range(options.turns):
        numbers = [signal.SIGKILL] * len(range(turn, options.kills, options.turns))
        numbers += [signal.SIGTERM] * len(range(turn, options.polite, options.turns))
        with closing(Job(__file__, options.model)) as job:
            job.wait(job.is_settled, _PATIENCE_SECONDS, "the start")
            steps += undisturbed(job, options.seconds)
            for number, rank in zip(numbers, _ranks(rng), strict=False):
                faults.append(make_fault(job, number, rank, statistics.median(steps), rng))
                print(faults[-1], file=sys.stderr)
            comparisons += check(job)
    return {
        "rival": "torchring",
        "model": options.model,
        "ranks": SIZE,
        "steps_per_s": len(steps) / sum(steps),
        "step_ms": vars(Spread.of(steps)),
        "faults": [asdict(fault) for fault in faults],
        "comparisons": comparisons,
    }


def _ranks(rng: random.Random) -> Iterator[int]:
    """All ranks, again and again, in random order."""
    while True:
        yield from rng.sample(range(SIZE), SIZE)


class Worker:
    """A process that has opened its file, and the lines that it has written so far."""

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
    """Three workers, which run `script` with `--worker FOLDER --model MODEL`."""

    def __init__(self, script: str, model: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="torchring-bench-"))
        self.workers: dict[int, Worker] = {}  # all processes so far, by pid
        self.lost: set[int] = set()  # steps that had to be made again
        self._output = (self.folder / "output").open("wb")
        program = f"{OWN_IMPORTS}import runpy; del sys.argv[0]; runpy.run_module(sys.argv[0], run_name='__main__')"
        launcher = ["torchring", "run", "--elastic", "-np", str(SIZE), "--min-np", "2", "--max-np", str(SIZE)]
        command = [sys.executable, "-c", program, *launcher, script, "--worker", str(self.folder), "--model", model]
        self._launcher: subprocess.Popen[bytes] = measure.Command("torchring", command, {"OMP_NUM_THREADS": "1"}).start(
            self._output
        )

    @property
    def alive(self) -> list[Worker]:
        return [worker for worker in self.workers.values() if worker.is_alive]

    def look(self) -> None:
        """Read what the workers have written."""
        for file in self.folder.glob("*.log"):
            if int(file.stem) not in self.workers:
                self.workers[int(file.stem)] = Worker(file)
        for worker in self.workers.values():
            worker.read()
        if self._launcher.poll() is not None:
            self.fail(f"the job ended with exit code {self._launcher.returncode}")

    def wait(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        """Look until the condition holds."""
        deadline = time.monotonic() + seconds
        while True:
            self.look()
            if condition():
                return
            if time.monotonic() > deadline:
                self.fail(f"{what} took more than {seconds:.0f} s")
            time.sleep(_LOOK_SECONDS)

    def fail(self, what: str) -> None:
        """Raise SystemExit, with the end of what workers and launcher have printed."""
        raise SystemExit(f"{what}; it printed:\n{(self.folder / 'output').read_text(errors='replace')[-4000:]}")

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

    def close(self) -> None:
        """Kill all processes, and remove the folder."""
        self._launcher.terminate()
        for worker in self.workers.values():
            worker.send(signal.SIGKILL)
        measure.end([self._launcher])
        for file in self.folder.glob("*.log"):  # of workers that have come in the meantime
            self.workers.setdefault(int(file.stem), Worker(file))
        for worker in self.workers.values():
            worker.close()
        self._output.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def undisturbed(job: Job, seconds: float) -> list[float]:
    """Seconds of the steps of one worker, during `seconds`."""
    begin = time.monotonic_ns()
    end = time.monotonic() + seconds
    job.wait(lambda: time.monotonic() > end, 2 * seconds, "training")
    times = [line.ns for line in job.by_rank(0).steps if line.ns > begin]
    return [(b - a) / 1e9 for a, b in itertools.pairwise(times)]


@dataclass(frozen=True)
class Fault:
    """A signal to a worker, and what it cost."""

    signal: str
    rank: int  # of the worker
    pause_s: float  # from the signal until all survivors have finished a step without the lost worker
    gap_s: float  # the longest time between two finished steps of a survivor within the pause
    new_s: float  # from the signal until a step is finished that was not finished before
    lost_steps: int  # that a worker had finished, and that were made again
    usual_s: float  # of a step before all faults
    # The longest time between two finished steps of a survivor from when the replacement was ready to its second step.
    join_gap_s: float
    start_s: float  # from the signal until the replacement was ready to join the others


def make_fault(job: Job, number: signal.Signals, rank: int, usual: float, rng: random.Random) -> Fault:
    """Signal the worker of that rank at a random moment of a step, and wait until the job has settled again.

    The job must be settled.
    """
    time.sleep(rng.uniform(0, 2 * usual))
    job.look()
    lost, old = job.by_rank(rank), job.alive
    others = [worker for worker in old if worker != lost]
    worlds = {worker.pid: worker.steps[-1].world for worker in old}
    at = time.monotonic_ns()
    lost.send(number)

    def without_it() -> list[list[Line]]:
        """For each survivor: its steps in later worlds."""
        if not all(worker.is_alive for worker in others):
            job.fail(f"another worker ended after {number.name} to rank {rank}")
        return [[line for line in worker.steps if line.world > worlds[worker.pid]] for worker in others]

    job.wait(lambda: all(without_it()), _PATIENCE_SECONDS, f"going on after {number.name} to rank {rank}")
    job.wait(job.is_settled, _PATIENCE_SECONDS, f"being {SIZE} workers after {number.name} to rank {rank}")
    new = [worker for worker in job.alive if worker not in old]
    before = [line for worker in old for line in worker.steps if worker == lost or line.world <= worlds[worker.pid]]
    resumed = without_it()
    again = max(steps[0].ns for steps in resumed)
    last, first = max(line.step for line in before), min(steps[0].step for steps in resumed)
    job.lost |= {line.step for line in before if line.step >= first}
    ready = max(line.ns for worker in new for line in worker.lines if line.event == "ready")
    joined = max(worker.steps[1].ns for worker in new)
    return Fault(
        signal=number.name,
        rank=rank,
        pause_s=(again - at) / 1e9,
        gap_s=max(longest_gap(worker.steps, at, again) for worker in others),
        new_s=(min(line.ns for steps in resumed for line in steps if line.step > last) - at) / 1e9,
        lost_steps=max(0, last - first + 1),
        usual_s=usual,
        join_gap_s=max(longest_gap(worker.steps, ready, joined) for worker in others),
        start_s=(ready - at) / 1e9,
    )


def longest_gap(steps: Sequence[Line], begin: int, end: int) -> float:
    """The longest time between two steps of a worker of which some lies between `begin` and `end`. In seconds."""
    return max(b.ns - a.ns for a, b in itertools.pairwise(steps) if b.ns > begin and a.ns < end) / 1e9


def check(job: Job) -> int:
    """Compare the workers' digests of each step. Returns the number of comparisons. Raises SystemExit.

    Steps that were lost may differ, and are left out.
    """
    digests: dict[tuple[str, int], set[int]] = defaultdict(set)
    count = 0
    for worker in job.workers.values():
        if any(b.step <= a.step for a, b in itertools.pairwise(worker.steps)):
            raise SystemExit(f"worker {worker.pid} went back to a step that it had finished")
        for line in worker.lines:
            if line.event in ("step", "digest") and line.step not in job.lost:
                count += (line.event, line.step) in digests
                digests[line.event, line.step].add(line.digest)
    if different := [step for (_, step), values in digests.items() if len(values) > 1]:
        raise SystemExit(f"workers had different parameters after step {min(different)}")
    return count


def report(row: dict[str, Any], about: dict[str, Any]) -> None:
    """Print the tables. Cells are medians with their 20 % and 80 % quantiles, and the worst."""
    tables: dict[str, tuple[Sequence[str], dict[str, Callable[[dict[str, Any]], float]]]] = {
        f"A worker gets SIGKILL {measure.origin(about)}": (
            ["SIGKILL"],
            {
                "next step s": lambda fault: fault["pause_s"],
                "new step s": lambda fault: fault["new_s"],
                "lost steps": lambda fault: fault["lost_steps"],
            },
        ),
        "A worker gets SIGTERM": (
            ["SIGTERM"],
            {
                "without a step s": lambda fault: fault["gap_s"],
                "more than a step s": lambda fault: fault["gap_s"] - fault["usual_s"],
                "lost steps": lambda fault: fault["lost_steps"],
            },
        ),
        "The replacement joins": (
            ["SIGKILL", "SIGTERM"],
            {
                "without a step s": lambda fault: fault["join_gap_s"],
                "more than a step s": lambda fault: fault["join_gap_s"] - fault["usual_s"],
                "start-up s": lambda fault: fault["start_s"],
            },
        ),
    }
    for title, (signals, columns) in tables.items():
        faults = [fault for fault in row["faults"] if fault["signal"] in signals]
        cells = [str(len(faults))]
        for value in columns.values():
            found = [value(fault) for fault in faults]
            cells += [Spread.of([each / 1e3 for each in found]).text(2), f"{max(found):.2f}"] if found else ["", ""]
        measure.print_table(title, ["times", *(text for name in columns for text in (name, "worst"))], [cells])
    cells = [f"{row['steps_per_s']:.2f}", Spread(**row["step_ms"]).text(0), str(row["comparisons"])]
    measure.print_table(f"Without faults, {SIZE} workers", ["steps/s", "step ms", "equal digests"], [cells])


if __name__ == "__main__":
    sys.exit(main())
