"""The store with deadlines and names."""

import os
import select
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import torchring
from tests.support.commands import free_port
from tests.support.harness import patient, ranks, run_ranks, run_threads, wait_until
from tests.support.training import attempt
from torchring.errors import PeerLostError, PeerTimeoutError
from torchring.linux import has_ended, open_process, process_id
from torchring.memory.links import Listener
from torchring.rendezvous.rendezvous import Rendezvous


def run(size: int, body: Callable[..., Any], *, timeout_seconds: float = 10.0) -> list[Any]:
    def on_rank(rank: int, size: int, store: dist.Store) -> Any:
        return body(Rendezvous(store, rank, size, timeout_seconds))

    return run_threads(on_rank, size)


@pytest.mark.parametrize("size", [1, 3])
def test_an_all_gather_gives_everybody_everybodys_value_in_rank_order(size: int) -> None:
    """Of any length; those of other names do not mix with it."""

    def body(rendezvous: Rendezvous) -> None:
        rank = rendezvous.rank
        with ThreadPoolExecutor(1) as thread:
            other = thread.submit(rendezvous.all_gather, "other", b"x" * (2**20 * rank))
            for turn in range(3):  # the same name again is another all-gather
                if rank == turn:
                    time.sleep(0.05)
                expected = [bytes([turn, r, 0, 255]) for r in range(size)]
                assert rendezvous.all_gather("name", expected[rank]) == expected
            assert other.result() == [b"x" * (2**20 * r) for r in range(size)]

    run(size, body)


def test_a_missing_value_is_a_time_out_that_names_its_owner() -> None:
    rendezvous = Rendezvous(dist.HashStore(), 0, 3, 0.3)
    with pytest.raises(PeerTimeoutError, match="rank 2") as caught:
        rendezvous.fetch("key", 2)
    assert (caught.value.peers, caught.value.rank) == ((2,), 0)
    assert 0.3 <= (caught.value.seconds or 0.0) < patient(3.0)


def test_who_has_left_after_it_had_published_is_heard() -> None:
    rendezvous = Rendezvous(dist.HashStore(), 0, 2, 5.0)

    def watch(owners: object) -> None:
        if has_published:
            rendezvous.publish("key", b"1")
        raise PeerLostError("gone")

    rendezvous.watch, has_published = watch, False
    with pytest.raises(PeerLostError, match="gone"):
        rendezvous.fetch("key", 1)
    has_published = True
    assert rendezvous.fetch("key", 1) == b"1"


def test_a_store_whose_host_is_gone_is_a_lost_peer() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=2))
    rendezvous = Rendezvous(client, 1, 2, 5.0)
    rendezvous.publish("key", b"1")
    del server
    started = time.monotonic()
    with pytest.raises(PeerLostError, match="store"):
        rendezvous.fetch("other", 0)
    assert time.monotonic() - started < patient(4.0)


class _SilentStore:
    """As one whose host's cable is cut: it answers when it is plugged in again."""

    def __init__(self) -> None:
        self.plugged_in = threading.Event()
        self.num_asked = 0

    def check(self, keys: list[str]) -> bool:
        self.num_asked += 1
        assert self.plugged_in.wait(20.0)
        return True


def test_a_store_that_does_not_answer_is_a_time_out_that_names_its_host() -> None:
    store: Any = _SilentStore()
    rendezvous = Rendezvous(store, 1, 3, 0.2)
    rendezvous.store_host = 2
    for _ in range(3):
        with pytest.raises(PeerTimeoutError, match=r"which rank 2 hosts, did not answer within 0\.2 s") as caught:
            rendezvous.is_published("key")
        assert caught.value.peers == (2,)
    assert store.num_asked == 1  # nothing piles up behind the first
    store.plugged_in.set()
    # The first call may still be on its way back.
    wait_until(lambda: not attempt(lambda: rendezvous.is_published("key")), "somebody to ask the store that is back")


def test_who_is_in_a_hurry_waits_less_for_the_same_store() -> None:
    store: Any = _SilentStore()
    with pytest.raises(PeerTimeoutError, match=r"the launcher hosts, did not answer within 0\.1 s"):
        Rendezvous(store, 0, 2, 20.0).with_timeout(0.1).is_published("key")
    assert Rendezvous(store, 0, 2, 1.0).with_timeout(5.0).timeout_seconds == 1.0
    store.plugged_in.set()


@pytest.mark.parametrize("stays_seconds", [600.0, 0.0])
@ranks(2, run_ranks)
def test_the_host_of_the_store_stays_for_those_who_will_ask(rank: int, stays_seconds: float, port: int) -> None:
    """For as long as it was told, and no longer than they need: not for ten minutes. Rank 0 hosts the store and ends as
    soon as it may, rank 1 asks later."""
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False)
    rendezvous = Rendezvous(store, rank, 2, 20.0)
    rendezvous.store_host = 0
    rendezvous.publish(f"words/{rank}", b"why")
    pids = rendezvous.all_gather("met", str(os.getpid()).encode())
    rendezvous.stay_until_published(["heard"], stays_seconds)
    if rank == 0:
        rendezvous.fetch("has met", 1)
        return
    host = open_process(int(pids[0]))
    rendezvous.publish("has met", b"1")
    select.select([host], [], [], patient(10.0) if stays_seconds == 0.0 else 0.5)
    os.close(host)
    if stays_seconds:
        assert rendezvous.fetch("words/0", 0) == b"why"
        rendezvous.publish("heard", b"1")
    else:
        with pytest.raises(PeerLostError):
            rendezvous.fetch("words/0", 0)


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.mark.parametrize(("name", "is_met"), [("host", True), ("reachable", True), ("reachable", False)])
@ranks(3, run_ranks, expect_exit={1: -signal.SIGKILL})
def test_a_rank_that_dies_in_init_is_named_at_once(rank: int, name: str, is_met: bool) -> None:
    """Also to rank 2, which waits for rank 0, which has not heard rank 1's call in time, and ends."""
    if rank == 0 and not is_met:
        Listener.admit = lambda *_: None  # type: ignore[method-assign]
    if rank == 1:
        all_gather = Rendezvous.all_gather

        def die(self: Rendezvous, what: str, value: bytes) -> list[bytes]:
            if what == name:
                os.kill(os.getpid(), signal.SIGKILL)
            return all_gather(self, what, value)

        Rendezvous.all_gather = die  # type: ignore[method-assign]
    started = time.monotonic()
    with pytest.raises(PeerLostError, match=r"rank 1 \(pid ") as caught:
        torchring.init(timeout_seconds=60.0)
    assert caught.value.peers == (1,)
    assert time.monotonic() - started < patient(5.0)


def test_a_process_is_told_from_others_of_its_number() -> None:
    place, _, began = process_id().rpartition("/")
    assert not has_ended(process_id())
    assert has_ended(f"{place}/{int(began) + 1}")  # an earlier process of this number
    for other in ("", "nonsense", f"another machine/{place}/1", f"{place.rpartition('/')[0]}/x/1"):
        assert not has_ended(other)
    with subprocess.Popen(["true"]) as ended:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)  # a zombie is no rank any more
        stat = Path(f"/proc/{ended.pid}/stat").read_text().rpartition(")")[2].split()
        process = f"{place.rpartition('/')[0]}/{ended.pid}/{stat[19]}"
        assert has_ended(process)
    assert has_ended(process)
