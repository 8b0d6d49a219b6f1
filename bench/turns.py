"""Rivals that train in processes of their own, as they do for a user, and take turns on one machine.

In one process rivals would share background threads and the allocator: gradients that one rival has freed would spare
another rival its page faults. So every rival has ranks of its own. Ranks sleep while another rival has its turn. A
rival whose background threads would keep working is stopped (SIGSTOP) meanwhile.

The coordinator starts a turn by a message in a store, and ranks answer with their times in the same store. The
coordinator hosts the store, and sleeps during a turn.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist

import torchring
from torchring.bench import measure
from torchring.bench.measure import Launcher

STEPS_PER_TURN: Final = 4
"""The first step of a turn does not count, as the previous rival has filled the caches."""

_TIMEOUT: Final = timedelta(seconds=600)


@dataclass
class Rival:
    """The ranks of one rival, as the coordinator sees them."""

    name: str
    processes: list[subprocess.Popen[bytes]]
    pids_to_stop: list[int] = field(default_factory=list)
    num_turns: int = 0
    turns: list[list[float]] = field(default_factory=list)  # seconds of each step that counts, on the slowest rank

    @property
    def seconds(self) -> list[float]:
        """The seconds of all steps that count."""
        return [seconds for turn in self.turns for seconds in turn]

    def seconds_more_than(self, other: Rival) -> list[float]:
        """For each repetition, by how many seconds the mean step of this rival exceeded that of `other`.

        Both steps of a difference are from the same repetition, so load that comes and goes slows both.
        """
        return [statistics.mean(a) - statistics.mean(b) for a, b in zip(self.turns, other.turns, strict=True)]


class RivalFailed(SystemExit):
    """A rival has ended, or does not answer in time. Ends the run, unless the benchmark goes on without the rival."""


class Coordinator:
    """Starts the ranks of all rivals, and lets one rival train at a time. Close it, also after a signal.

    Args:
        script: run by each rank, with `arguments` and `--worker RIVAL,PORT,FOLDER`; has to call `serve`.
        launchers: how to start the rivals that plain processes cannot run. These are also stopped between their turns,
            as their background threads or their waiting may never sleep (Horovod).
        limit: how long to wait for the start, the turn or the result of a rival.
    """

    def __init__(
        self,
        script: str,
        rivals: Sequence[str],
        ranks: int,
        arguments: Sequence[str],
        *,
        launchers: Mapping[str, Launcher] = {},
        limit: timedelta = _TIMEOUT,
    ) -> None:
        self.ranks = ranks
        self._limit = limit
        self._script, self._arguments = script, arguments
        self.folder = Path(tempfile.mkdtemp(prefix="torchring-bench-"))
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.rivals: dict[str, Rival] = {}
        try:
            for name in rivals:
                self.start(name, launchers.get(name))
        except BaseException:
            self.close()
            raise

    def start(self, name: str, launcher: Launcher | None = None) -> None:
        """Start the ranks of a rival, and wait until they are ready."""
        self.rivals[name] = rival = Rival(name, [])
        arguments = [*self._arguments, "--worker", f"{name},{self._store.port},{self.folder}"]
        for command in measure.rank_commands(self._script, self.ranks, arguments, launcher or Launcher()):
            rival.processes.append(command.start())
        pids = self._answers(rival, "pid")
        rival.pids_to_stop = [int(text) for text in pids] if launcher else []
        self._stop(rival)

    def drop(self, name: str) -> None:
        """End a rival in the middle of the run."""
        rival = self.rivals.pop(name)
        self._continue(rival)
        measure.end(rival.processes)

    def take_turns(self, *, warmups: int, seconds: float, most: int) -> None:
        """Let every rival have a turn, again and again, in an order that rotates. `warmups` turns do not count."""
        names = list(self.rivals)
        started = time.monotonic()
        for repetition in range(-warmups, most):
            for name in measure.in_turn(names, repetition):
                self.turn(name, counts=repetition >= 0)
            if repetition >= 1 and time.monotonic() - started > seconds:
                break

    def turn(self, name: str, *, counts: bool, request: str = "start") -> list[float]:
        """Let one rival make `STEPS_PER_TURN` steps, called with `request`. Returns the seconds of those that count."""
        rival = self.rivals[name]
        number = rival.num_turns
        rival.num_turns += 1
        self._continue(rival)
        self._store.set(f"{name}/turn{number}", request)
        rows = [json.loads(text) for text in self._answers(rival, f"turn{number}")]
        self._stop(rival)
        slowest = [max(times) for times in zip(*rows, strict=True)][1:]
        if counts:
            rival.turns.append(slowest)
        return slowest

    def finish(self) -> dict[str, list[Any]]:
        """End all ranks. Returns the results of each rival's ranks, by rank: what `result` returned in `serve`."""
        results = {}
        for rival in self.rivals.values():
            self._continue(rival)
            self._store.set(f"{rival.name}/turn{rival.num_turns}", "end")
            results[rival.name] = [json.loads(text) for text in self._answers(rival, "result")]
            for process in rival.processes:
                process.wait(timeout=60)
        return results

    def close(self) -> None:
        """Terminate all processes, and remove the folder."""
        for rival in self.rivals.values():
            self._continue(rival)
        measure.end([process for rival in self.rivals.values() for process in rival.processes])
        shutil.rmtree(self.folder, ignore_errors=True)

    def _answers(self, rival: Rival, key: str) -> list[str]:
        keys = [f"{rival.name}/{key}/{rank}" for rank in range(self.ranks)]
        deadline = time.monotonic() + self._limit.total_seconds()
        while not self._store.check(keys):
            codes = [process.poll() for process in rival.processes]
            if any(codes):
                raise RivalFailed(f"{rival.name} ended too early, with exit codes {codes}")
            if time.monotonic() > deadline:
                raise RivalFailed(f"{rival.name} did not answer for {self._limit.total_seconds():.0f} s")
            time.sleep(0.005)
        return [self._store.get(key).decode() for key in keys]

    def _stop(self, rival: Rival) -> None:
        for pid in rival.pids_to_stop:
            os.kill(pid, signal.SIGSTOP)

    def _continue(self, rival: Rival) -> None:
        for pid in rival.pids_to_stop:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


def serve(worker: str, prepare: Callable[[str, Path], tuple[Callable[[str], None], Callable[[], Any]]]) -> None:
    """On a rank: make steps whenever the coordinator asks for a turn, until the coordinator ends the run.

    `prepare` is called with the rival's name and the folder that all ranks share. Returns two functions: one makes a
    step, as the coordinator's request says; the other returns the rank's result at the end, as JSON can hold it.
    """
    rival, port, folder = worker.split(",", 2)
    rank = torchring.rank()
    store = dist.TCPStore("127.0.0.1", int(port), is_master=False, wait_for_workers=False, timeout=_TIMEOUT)
    step, result = prepare(rival, Path(folder))
    torchring.barrier()
    store.set(f"{rival}/pid/{rank}", str(os.getpid()))
    number = 0
    while (request := store.get(f"{rival}/turn{number}").decode()) != "end":
        times = []
        for _ in range(STEPS_PER_TURN):
            torchring.barrier()
            begin = time.perf_counter()
            step(request)
            times.append(time.perf_counter() - begin)
        store.set(f"{rival}/turn{number}/{rank}", json.dumps(times))
        number += 1
    answer = json.dumps(result())
    torchring.barrier()
    store.set(f"{rival}/result/{rank}", answer)
