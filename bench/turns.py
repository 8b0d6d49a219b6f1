"""Rivals that train in processes of their own, as they would for a user, and take turns on one machine.

In one process they would share background threads, and an allocator in which one's freed gradients spare another its
page faults. So every rival has its own ranks, which sleep while it is not their turn, or are stopped (SIGSTOP) where a
background thread would go on. The referee, asleep itself, calls a turn by a message in a store that it hosts, and gets
the times back in the same way.
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist

import torchring
from torchring.bench import measure

STEPS_PER_TURN: Final = 4
"""The first of which is not counted: it finds the caches full of what others left there."""

_PATIENCE: Final = timedelta(seconds=600)


@dataclass
class Team:
    """One rival's ranks, as the referee sees them."""

    name: str
    processes: list[subprocess.Popen[bytes]]
    pids_to_stop: list[int] = field(default_factory=list)
    num_turns: int = 0
    turns: list[list[float]] = field(default_factory=list)  # seconds of each counted step, of the slowest rank

    @property
    def seconds(self) -> list[float]:
        """Of all counted steps."""
        return [seconds for turn in self.turns for seconds in turn]

    def seconds_more_than(self, other: Team) -> list[float]:
        """For each repetition, by how much its mean step was longer than the other's: what slows a machine down for a
        while slows both."""
        return [statistics.mean(a) - statistics.mean(b) for a, b in zip(self.turns, other.turns, strict=True)]


class Referee:
    """Starts the ranks of all rivals and lets one of them work at a time. See `referee`.

    Args:
        script: what each rank runs, with `arguments` and `--worker RIVAL,PORT,FOLDER`; it calls `play`.
        mpi: rivals that have to be started by mpirun, and whose background threads do not sleep (Horovod).
    """

    def __init__(
        self, script: str, rivals: Sequence[str], ranks: int, arguments: Sequence[str], *, mpi: Sequence[str] = ()
    ) -> None:
        self.ranks = ranks
        self.folder = Path(tempfile.mkdtemp(prefix="torchring-bench-"))
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.teams: dict[str, Team] = {}
        try:
            for rival in rivals:
                self.teams[rival] = team = Team(rival, [])
                for command in measure.rank_commands(
                    script,
                    ranks,
                    [*arguments, "--worker", f"{rival},{self._store.port},{self.folder}"],
                    mpi=rival in mpi,
                    rendezvous=measure.free_port(),
                ):
                    team.processes.append(command.start())
                pids = self._answers(team, "pid")
                team.pids_to_stop = [int(text) for text in pids] if rival in mpi else []
                self._stop(team)
        except BaseException:
            self.close()
            raise

    def take_turns(self, *, warmups: int, seconds: float, most: int) -> None:
        """Every rival has a turn, again and again, in an order that rotates.

        Args:
            warmups: turns of each that are not counted.
            seconds: stop after about this long.
            most: counted turns of each at the most.
        """
        names = list(self.teams)
        started = time.monotonic()
        for repetition in range(-warmups, most):
            for name in measure.in_turn(names, repetition):
                self.turn(name, counts=repetition >= 0)
            if repetition >= 1 and time.monotonic() - started > seconds:
                break

    def turn(self, rival: str, *, counts: bool) -> None:
        """Let one rival make its steps."""
        team = self.teams[rival]
        number = team.num_turns
        team.num_turns += 1
        self._continue(team)
        self._store.set(f"{rival}/turn{number}", "play")
        rows = [json.loads(text) for text in self._answers(team, f"turn{number}")]
        self._stop(team)
        slowest = [max(times) for times in zip(*rows, strict=True)]
        if counts:
            team.turns.append(slowest[1:])

    def end(self) -> dict[str, list[Any]]:
        """The game is over: what each rank of each rival returns from `play`'s `result`."""
        results = {}
        for team in self.teams.values():
            self._continue(team)
            self._store.set(f"{team.name}/turn{team.num_turns}", "end")
            results[team.name] = [json.loads(text) for text in self._answers(team, "result")]
            for process in team.processes:
                process.wait(timeout=60)
        return results

    def close(self) -> None:
        """End every process, and remove the folder."""
        for team in self.teams.values():
            self._continue(team)
        measure.end([process for team in self.teams.values() for process in team.processes])
        shutil.rmtree(self.folder, ignore_errors=True)

    def _answers(self, team: Team, key: str) -> list[str]:
        keys = [f"{team.name}/{key}/{rank}" for rank in range(self.ranks)]
        deadline = time.monotonic() + _PATIENCE.total_seconds()
        while not self._store.check(keys):
            codes = [process.poll() for process in team.processes]
            if any(code is not None for code in codes):
                raise SystemExit(f"{team.name} ended before its time, exit codes {codes}")
            if time.monotonic() > deadline:
                raise SystemExit(f"{team.name} did not answer for {_PATIENCE}")
            time.sleep(0.005)
        return [self._store.get(key).decode() for key in keys]

    def _stop(self, team: Team) -> None:
        for pid in team.pids_to_stop:
            os.kill(pid, signal.SIGSTOP)

    def _continue(self, team: Team) -> None:
        for pid in team.pids_to_stop:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@contextmanager
def referee(
    script: str, rivals: Sequence[str], ranks: int, arguments: Sequence[str], *, mpi: Sequence[str] = ()
) -> Iterator[Referee]:
    """A `Referee` whose processes are gone afterwards, whatever happens."""
    with measure.stopped_by_signals():
        one = Referee(script, rivals, ranks, arguments, mpi=mpi)
        try:
            yield one
        finally:
            one.close()


def play(worker: str, prepare: Callable[[str, Path], tuple[Callable[[], None], Callable[[], Any]]]) -> None:
    """A rank's side: wait for turns until the end.

    Args:
        worker: what followed `--worker`.
        prepare: called with the rival's name and a folder shared by all; returns what makes a step, and what returns
            the rank's result (as JSON can hold it) at the end.
    """
    rival, port, folder = worker.split(",", 2)
    rank = torchring.rank()
    store = dist.TCPStore("127.0.0.1", int(port), is_master=False, wait_for_workers=False, timeout=_PATIENCE)
    step, result = prepare(rival, Path(folder))
    torchring.barrier()
    store.set(f"{rival}/pid/{rank}", str(os.getpid()))
    number = 0
    while store.get(f"{rival}/turn{number}") == b"play":
        times = []
        for _ in range(STEPS_PER_TURN):
            torchring.barrier()
            begin = time.perf_counter()
            step()
            times.append(time.perf_counter() - begin)
        store.set(f"{rival}/turn{number}/{rank}", json.dumps(times))
        number += 1
    answer = json.dumps(result())
    torchring.barrier()
    store.set(f"{rival}/result/{rank}", answer)
