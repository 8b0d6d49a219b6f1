"""One all-reduce by size, on two ranks: of a gradient bucket, of an ordinary tensor, and with Gloo.

This process is rank 0. Both ranks start from a barrier, and rank 0's time counts. `bench/allreduce.py` compares more
carefully: more rivals take turns, with more sizes, and the slowest rank's time counts.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from datetime import timedelta

import pytest
import torch.distributed as dist
from pytest_benchmark.fixture import BenchmarkFixture

import torchring
from torchring.bench.measure import human_bytes
from torchring.bench.micro.conftest import Remark
from torchring.bench.micro.peer import DEADLINE_SECONDS, RIVALS, SIZE, Case, CaseRunner, join, leave
from torchring.launch.jobs import OWN_IMPORTS

ROUNDS = {1 << 10: 500, 64 << 10: 500, 1 << 20: 200, 25 << 20: 30}


@pytest.fixture(scope="module")
def _peer() -> Iterator[None]:
    """Start rank 1, a process that repeats what this process does. Ends the peer after the last benchmark here."""
    timeout = timedelta(seconds=DEADLINE_SECONDS)
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timeout)
    program = f"{OWN_IMPORTS}from torchring.bench.micro.peer import main; main()"
    command = [sys.executable, "-c", program, str(store.port)]
    peer = subprocess.Popen(command, stdin=subprocess.PIPE)
    try:
        join(store, 0)
        yield
    finally:  # kill, because an interrupted benchmark may have left the peer in the middle of a collective
        peer.kill()
        peer.communicate()
        leave()


@pytest.mark.usefixtures("_peer")
@pytest.mark.parametrize("rival", RIVALS)
@pytest.mark.parametrize("num_bytes", list(ROUNDS), ids=human_bytes)
def bench_allreduce(benchmark: BenchmarkFixture, remark: Remark, num_bytes: int, rival: str) -> None:
    benchmark.group = f"all-reduce of {human_bytes(num_bytes)}, {SIZE} ranks"
    case = Case(rival, num_bytes)
    torchring.broadcast_object(case)
    with closing(CaseRunner(case)) as runner:

        def setup() -> None:
            torchring.broadcast_object(True)
            runner.prepare()

        rounds = ROUNDS[num_bytes] if benchmark.enabled else 1
        benchmark.pedantic(runner.reduce, setup=setup, rounds=rounds, warmup_rounds=3)
        torchring.broadcast_object(False)
        assert runner.is_right()
    if benchmark.stats is not None:
        remark("GB/s", round(num_bytes / benchmark.stats.stats.median / 1e9, 3))
