"""Gloo does what `transport/gloo_links.py` relies on, and says so in the words that are looked for there."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
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

LONG = timedelta(seconds=20)
Meet = Callable[[], object]


def run_groups(size: int, body: Callable[[int, list[Any], Meet], Any]) -> list[Any]:
    """body(rank, [its group], meet) on every rank, in threads; the list holds the only reference to the group."""
    barrier = threading.Barrier(size)

    def on_rank(rank: int, size: int, store: dist.Store) -> Any:
        return body(rank, [ProcessGroupGloo(store, rank, size, LONG)], lambda: barrier.wait(20))

    return run_threads(on_rank, size)


def failure_of(group: Any, peer: int, timeout: timedelta = LONG) -> RuntimeError:
    """Of a receive that is never answered."""
    with pytest.raises(RuntimeError) as caught:
        group.recv([torch.empty(8)], peer, 0).wait(timeout)
    return caught.value


def test_a_wait_that_is_too_long_says_so_and_so_does_another_that_fails_with_it() -> None:
    def body(rank: int, groups: list[Any], meet: Meet) -> Any:
        answers = []
        if rank == 0:
            others: list[RuntimeError] = []
            other = threading.Thread(target=lambda: others.append(failure_of(groups[0], 2)))
            other.start()
            time.sleep(0.1)
            own = failure_of(groups[0], 1, timedelta(milliseconds=50))
            other.join(10)
            answers = [gloo_links.has_timed_out(own), gloo_links.has_timed_out(others[0])]
        meet()
        return answers

    assert run_groups(3, body)[0] == [True, True]


def test_closing_all_links_wakes_the_peers_that_wait() -> None:
    def body(rank: int, groups: list[Any], meet: Meet) -> Any:
        meet()
        if rank == 0:
            time.sleep(0.2)
            gloo_links.close_links(groups[0], 0, 3)
            meet()
            return None
        started = time.monotonic()
        failure = failure_of(groups[0], 0)
        seconds = time.monotonic() - started
        meet()
        return gloo_links.has_timed_out(failure), seconds < 5

    assert run_groups(3, body) == [None, (False, True), (False, True)]


def test_a_closed_link_is_found() -> None:
    def body(rank: int, groups: list[Any], meet: Meet) -> Any:
        before = gloo_links.find_failure(groups[0], 1 - rank)
        meet()
        if rank == 1:
            gloo_links.close_links(groups[0], 1, 2)
        end = time.monotonic() + 10
        while gloo_links.find_failure(groups[0], 1 - rank) is None and time.monotonic() < end:
            time.sleep(0.01)
        after = gloo_links.find_failure(groups[0], 1 - rank)
        meet()
        return before is None, isinstance(after, RuntimeError)

    assert run_groups(2, body) == [(True, True)] * 2


def test_dropping_the_last_reference_closes_the_links() -> None:
    def body(rank: int, groups: list[Any], meet: Meet) -> Any:
        meet()
        if rank == 0:
            gloo_links.drop(groups)
            assert groups == []
            meet()
            return None
        failure = failure_of(groups[0], 0)
        meet()
        return gloo_links.has_timed_out(failure)

    assert run_groups(2, body) == [None, False]


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
