"""An elastic job whose workers are forked from the harness's server, so that a new one takes 0.05 s instead of 2 s.

    with ElasticJob(train, size=3) as job:                train() is the whole script of a worker
        job.run_until(lambda: job.last_step() > 20, "20 steps")
        job.send(job.workers[0])
        code = job.run()

The driver is the one of `torchring run --elastic`, in this process. Workers write what they do to a file: see `note`.
"""

import contextlib
import functools
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from tests.support.harness import _clean_environ, _leave_server, _Leftovers, _start_method, patient
from torchring.elastic.driver import driver as drivers
from torchring.elastic.driver import driver_store
from torchring.elastic.driver.driver import Driver
from torchring.elastic.driver.driver_store import DriverStore, Listener
from torchring.elastic.driver.host_list import Hosts
from torchring.elastic.driver.workers import Limits
from torchring.launch.hosts import Host
from torchring.launch.output import Output, OutputOptions

NOTES = "TORCHRING_TEST_NOTES"
_STEPS_LEFT = 300  # when a job is asked to stop: no worker may be further ahead than that of what the test knows


def note(**what: Any) -> None:
    """Write a line to this worker's file. A line is there when this returns, even if the worker is killed then."""
    line = json.dumps({"at": time.monotonic(), "pid": os.getpid(), **what}) + "\n"
    descriptor = os.open(os.environ[NOTES], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(descriptor, line.encode())
    os.close(descriptor)


def is_last(step: int) -> bool:
    """Whether the job is to stop after this step: see `ElasticJob.stop`. The same on all workers."""
    with contextlib.suppress(FileNotFoundError, ValueError):
        return step >= int(Path(os.environ[NOTES]).with_name("last").read_text())
    return False


class _Job:
    """A worker, in place of `jobs.HostJob`: no reaper stands in front of it."""

    is_remote = True

    def __init__(self, job: "ElasticJob", name: str, command: list[str], env: dict[str, str], **how: Any) -> None:
        self.command = command
        self._job = job
        self._host = name
        self._environ = {**how["environ"], **env}

    def start(self, output: Output, worker: int) -> None:
        files = self._job.folder / f"worker{worker}"
        environ = {**self._environ, NOTES: str(files.with_suffix(".jsonl"))}
        arguments = (self._job.script, environ, str(files.with_suffix(".log")), self._job.enter_host, self._host)
        process = self._job.context.Process(target=_main, args=arguments, name=f"worker {worker}", daemon=True)
        process.start()
        process.poll = lambda: process.exitcode  # as of `subprocess.Popen`
        self.process = process
        self._job.pids[worker] = process.pid

    def tell(self, number: int) -> None:
        if not number:
            self._job.num_heartbeats += 1
        elif self.process.poll() is None:
            os.kill(self.process.pid, number)

    def close(self) -> None:
        self.process.kill()
        self.process.join()


def _main(
    script: Callable[[], object], environ: dict[str, str], log: str, enter: Callable[[str], object], host: str
) -> None:
    _leave_server()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    os.close(descriptor)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    os.environ.clear()
    os.environ.update(environ)
    if "torchring.alone" in sys.modules:
        vars(sys.modules["torchring.alone"])["_imported_by"] = os.getpid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    enter(host)
    script()


def _stay(host: str) -> None:
    """For jobs whose hosts are one machine."""


class Slots(Hosts):
    may_change = True

    def __init__(self, names: list[str], slots: int = 2) -> None:
        super().__init__(None, [Host(name, slots) for name in names])
        self.names = names

    def offer(self, slots: dict[str, int]) -> None:
        self.known = tuple(Host(name, number) for name, number in slots.items() if number)


class ElasticJob:
    """A job that runs while `tick`, `run_until` or `run` do."""

    def __init__(
        self,
        script: Callable[[], object],  # a module-level function, or a partial of one: what a worker runs
        size: int,  # number of workers to begin with
        *,
        hosts: Hosts | None = None,  # where; by default this machine, with `max_size` slots
        enter_host: Callable[[str], object] = _stay,  # called first in each worker, with the name of its host
        interface: str = "",  # of the network, where the store listens
        **limits: Any,  # of `workers.Limits`
    ) -> None:
        self.script = script
        self.enter_host = enter_host
        self._interface = interface
        self.pids: dict[int, int] = {}  # of all workers
        self._limits = Limits(size=size, **{"min_size": 1, "max_size": size, "cooldown": (0.05, 0.2), **limits})
        self._hosts = hosts or Hosts(None, [Host("localhost", self._limits.max_size)])
        self._stack = contextlib.ExitStack()
        self.received: list[int] = []
        self.num_heartbeats = 0  # that reapers would have got
        self._notes: list[dict[str, Any]] = []
        self._num_read: dict[Path, int] = {}

    def __enter__(self) -> "ElasticJob":
        self.context = _start_method(_clean_environ())
        self.leftovers = self._stack.enter_context(_Leftovers())
        self.folder = Path(self.leftovers.folder)  # of notes and logs
        patch = self._stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(drivers, "host_job", functools.partial(_Job, self))
        patch.setattr(drivers, "HEARTBEAT_SECONDS", 1.0)
        for module in (drivers, driver_store):
            patch.setattr(module, "is_here", lambda name: True)  # other hosts are namespaces
        patch.setenv("OMP_NUM_THREADS", "1")
        for name, value in self.leftovers.environ.items():
            patch.setenv(name, value)
        listener = Listener(self._hosts, self._interface)
        self._stack.callback(listener.close)
        output = Output(OutputOptions())
        self._stack.callback(output.close)
        self.driver = Driver(["script"], self._limits, self._hosts, {}, output, [], listener)
        self._stack.callback(self.driver.close)
        while not self.pids:
            self.tick()
        self.driver._opening = Future()
        self.driver._opening.set_result(DriverStore(listener))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if error is not None and hasattr(error, "add_note"):
            for log in sorted(self.folder.glob("*.log")):
                error.add_note(f"--- {log.name}\n{log.read_text()[-4000:]}")
        with self._stack:
            if error is None:
                self.driver.close()
                assert (left := self.leftovers.sweep()) == [], left

    @property
    def code(self) -> int | None:
        """The exit code of `torchring run`, once it has ended."""
        return self.driver._coordinator.code

    @property
    def workers(self) -> tuple[int, ...]:
        """The workers of the newest generation, in the order of ranks."""
        return self.driver._coordinator.orders.workers

    @property
    def generation(self) -> int:
        return self.driver._coordinator.orders.generation

    def is_alive(self, worker: int) -> bool:
        process = self.driver._processes.get(worker)
        return process is not None and process.code is None

    def send(self, worker: int, number: int = signal.SIGKILL) -> None:
        os.kill(self.pids[worker], number)

    def tick(self) -> None:
        self.driver.tick(self.received)
        self.driver._sleep()

    def run_until(self, condition: Callable[[], object], what: str, seconds: float = 60.0) -> None:
        end = time.monotonic() + patient(seconds)
        while not condition():
            assert self.code is None, f"the job has ended with {self.code}, before {what}"
            assert time.monotonic() < end, f"no {what} within {seconds} s"
            self.tick()

    def run(self, seconds: float = 60.0) -> int:
        """Run the job to its end. Returns the exit code."""
        end = time.monotonic() + patient(seconds)
        while self.code is None:
            assert time.monotonic() < end, f"the job has not ended within {seconds} s"
            self.tick()
        return self.code

    def stop(self, steps_left: int = _STEPS_LEFT) -> int:
        """Have the workers stop a while after the step that they are at. Returns the last step."""
        last = self.last_step() + steps_left
        (self.folder / "new").write_text(str(last))
        (self.folder / "new").rename(self.folder / "last")
        return last

    def notes(self, what: str | None = None) -> list[dict[str, Any]]:
        """What the workers have noted, in the order of time; only lines that have `what`."""
        for file in self.folder.glob("*.jsonl"):
            with file.open("rb") as lines:
                lines.seek(self._num_read.get(file, 0))
                for line in lines:
                    if line.endswith(b"\n"):  # else a worker is writing
                        self._num_read[file] = self._num_read.get(file, 0) + len(line)
                        self._notes.append(json.loads(line))
        self._notes.sort(key=lambda each: each["at"])
        return [each for each in self._notes if what is None or what in each]

    def last_step(self) -> int:
        """The newest step that some worker has noted; 0 for none."""
        return max((each["step"] for each in self.notes("step")), default=0)
