"""The driver of an elastic job: what it decides, with a clock of the test's, and what it does, with workers that only
speak its protocol."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from harness import is_running, patient, wait_until

from torchring import cli
from torchring.elastic.protocol import Beat, Broken, Card, Plan
from torchring.launch.elastic import hosts as hosts_module
from torchring.launch.elastic import membership as m
from torchring.launch.elastic.cooldown import Cooldown
from torchring.launch.elastic.hosts import Hosts
from torchring.launch.elastic.membership import Limits, Membership
from torchring.launch.launcher import Host, LaunchError

ROOT = Path(__file__).resolve().parent.parent

# ---- processes

# A worker that only speaks the protocol: it trains until there is a file "finish".
WORKER = """
import json, os, pathlib, signal, sys, time
from datetime import timedelta
from torch.distributed import TCPStore
from torchring.elastic.protocol import *

me = invitation(os.environ)
store = TCPStore(me.addresses[0], me.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=30))
read = lambda key: store.get(PREFIX + key)
assert read(TOKEN).decode() == me.token
folder = pathlib.Path(sys.argv[1])
received = []
signal.signal(signal.SIGTERM, lambda number, _: received.append(number))
generation, ranks, count, steps, state, told = 0, (), 0, 0, "meeting", ""

def say(new):
    global state
    state = new
    store.set(PREFIX + card_key(me.worker), Card(new, generation, "last.pt").encode())
    store.check([PREFIX + card_key(me.worker)])  # the driver has it
    facts = {"pid": os.getpid(), "state": new, "generation": generation, "ranks": ranks, "slot": me.slot}
    facts |= {"broken": told, "local_rank": os.environ["LOCAL_RANK"], "environ": sorted(os.environ), "size": me.size}
    path = folder / f"{me.worker}"
    path.with_name(f".{me.worker}").write_text(json.dumps(facts))
    path.with_name(f".{me.worker}").rename(path)

print("worker", me.worker, "starts")
say("meeting")
while state not in ("leaving", "finished"):
    time.sleep(0.02)
    count += 1
    store.set(PREFIX + beat_key(me.worker), Beat(count, steps).encode())
    if received or read(END):
        say("leaving")
    elif state == "meeting":
        latest = int(read(LATEST))
        if latest > generation and me.worker in (plan := Plan.decode(read(plan_key(latest)))).workers:
            generation, ranks = latest, plan.workers
            say("running")
    else:
        steps += 1
        broken = Broken.decode(read(BROKEN))
        if broken.generation >= generation:
            told = store.get(PREFIX + world_prefix(generation) + "/gave_up").decode()
            say("meeting")
        elif int(read(CALL)) == generation:
            say("meeting")
        elif (folder / "finish").exists():
            say("finished")
"""


class Job:
    """`torchring run --elastic` in a folder of its own."""

    def __init__(self, folder: Path, code: str, *options: str) -> None:
        self.folder = folder
        (folder / "train.py").write_text(code)
        command = [sys.executable, "-m", "torchring.cli", "run", *options, "train.py", str(folder)]
        inherited = {"WORLD_SIZE": "7", "RANK": "3", "MASTER_ADDR": "nowhere", "PYTHONPATH": str(ROOT)}
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **inherited},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def facts(self) -> dict[int, dict[str, Any]]:
        """What each worker has said last."""
        return {int(file.name): json.loads(file.read_text()) for file in self.folder.glob("[0-9]*")}

    def wait_for(self, generation: int, ranks: Sequence[int]) -> dict[int, dict[str, Any]]:
        """Until exactly these workers run in the generation."""

        def there() -> bool:
            assert self.process.poll() is None, self.process.communicate()
            facts = self.facts()
            ran = [facts[rank] for rank in ranks if rank in facts]
            return len(ran) == len(ranks) and all(
                fact["state"] == "running" and fact["generation"] == generation and fact["ranks"] == list(ranks)
                for fact in ran
            )

        wait_until(there, f"generation {generation} of {ranks}")
        return self.facts()

    def close(self) -> None:
        for fact in self.facts().values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(fact["pid"], signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


def test_a_job_from_start_to_finish(tmp_path: Path) -> None:
    """A worker is killed, another told to end; both are replaced."""
    job = Job(tmp_path, WORKER, "--elastic", "-np", "2", "--max-np", "3", "--tag-output", "--log-dir", "logs")
    try:
        first = job.wait_for(1, [0, 1])
        assert [first[worker]["slot"] for worker in (0, 1)] == [0, 1]
        assert first[0]["size"] == 2
        assert first[1]["local_rank"] == "1"
        assert "OMP_NUM_THREADS" in first[0]["environ"]
        assert {"RANK", "WORLD_SIZE", "MASTER_ADDR", "TORCH_CPP_LOG_LEVEL"}.isdisjoint(first[0]["environ"])
        job.wait_for(2, [0, 1, 2])
        os.kill(first[0]["pid"], signal.SIGKILL)
        job.wait_for(3, [1, 2])
        facts = job.wait_for(4, [1, 2, 3])
        assert "killed by SIGKILL" in facts[1]["broken"]
        assert facts[3]["slot"] == 0
        os.kill(facts[2]["pid"], signal.SIGTERM)
        job.wait_for(5, [1, 3])
        job.wait_for(6, [1, 3, 4])
        (tmp_path / "finish").touch()
        out, err = job.process.communicate(timeout=patient(60))
    finally:
        job.close()
    print(out, err)
    assert job.process.returncode == 0, err
