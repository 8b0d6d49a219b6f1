"""Gloo does what `transport/gloo_links.py` relies on, and says so in the words that are looked for there."""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroupGloo

from tests.support.harness import run_threads
from torchring.rendezvous.rendezvous import Rendezvous
from torchring.transport import c10d, gloo_links


def failure_of(group: Any, peer: int, seconds: float) -> RuntimeError:
    """Of a receive that is never answered."""
    with pytest.raises(RuntimeError) as caught:
        group.recv([torch.empty(8)], peer, 0).wait(timedelta(seconds=seconds))
    return caught.value


def test_a_wait_that_is_too_long_says_so_and_so_does_another_that_fails_with_it() -> None:
    barrier = threading.Barrier(3)

    def body(rank: int, size: int, store: dist.Store) -> list[bool]:
        group = ProcessGroupGloo(store, rank, size, timedelta(seconds=20))
        failures = []
        if rank == 0:
            with ThreadPoolExecutor(1) as pool:
                other = pool.submit(failure_of, group, 2, 20.0)
                time.sleep(0.1)
                failures = [failure_of(group, 1, 0.05), other.result()]
        barrier.wait(20)
        return list(map(gloo_links.has_timed_out, failures))

    assert run_threads(body, 3)[0] == [True, True]


def _gloo_threads() -> set[str]:
    """Of this process. Earlier tests may have left some that are about to end."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):
            found |= {task.name} if "gloo" in (task / "comm").read_text() else set()
    return found


def test_none_of_its_threads_is_left_when_the_interpreter_goes_down() -> None:
    """Such a thread may still have to drop a tensor, for which it needs the interpreter: SIGABRT."""
    before = _gloo_threads()
    barrier = threading.Barrier(2)

    def body(rank: int, size: int, store: dist.Store) -> Any:
        transport = c10d.C10dTransport(Rendezvous(store, rank, size, 20.0), "ending")
        transport.start_all_reduce(torch.ones(3)).wait()
        barrier.wait(20)
        during = _gloo_threads() - before
        barrier.wait(20)
        if rank == 0:
            c10d._let_go_at_exit()
        barrier.wait(20)
        return during

    during = set().union(*run_threads(body, 2))
    assert during
    assert not during & _gloo_threads()
