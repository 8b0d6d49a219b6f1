"""Who is named when a transfer fails: also this rank itself, where the others waited for it."""

import concurrent.futures
import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist

from torchring.errors import PeerTimeoutError
from torchring.rendezvous.rendezvous import Rendezvous
from torchring.transport.diagnosis.culprit import Culprits


def culprits_of(size: int) -> list[Culprits]:
    store = dist.HashStore()
    return [Culprits(Rendezvous(store, rank, size, 7.0), "stream", None, range(size)) for rank in range(size)]


def test_a_rank_for_which_its_peer_waited_too_long_names_itself() -> None:
    late, peer = culprits_of(2)
    peer.suspect(timed_out=True)
    error = late.explain(0.0, timed_out=False)  # upon which the peer closed the link
    assert isinstance(error, PeerTimeoutError)
    assert error.peers == (0,)
    assert "rank 1 waited for this rank for 7 s and gave up" in error.message


def test_a_rank_for_which_all_others_waited_in_a_collective_names_itself() -> None:
    late, *others = culprits_of(3)
    for other in others:
        other.suspect(timed_out=True)
    error = late.explain(0.0, timed_out=False)
    assert error.peers == (0,)
    assert "ranks 1, 2 waited for this rank" in error.message


def test_who_waited_too_long_as_well_does_not_name_itself() -> None:
    first, second = culprits_of(2)
    first.suspect(timed_out=True)
    second.suspect(timed_out=True)
    assert second.explain(7.0, timed_out=True).peers == (0,)


def test_ranks_that_all_wait_are_sent_to_look_at_the_network() -> None:
    """Large packets may not get through. The store's are small."""
    for size, who in ((2, "rank 1"), (3, "some rank")):
        ranks = culprits_of(size)
        for rank in ranks:
            rank.suspect(timed_out=True)
        error = ranks[0].explain(7.0, timed_out=True)
        assert error.message.startswith(f"{who} did not answer within 7 s; ranks wait for each other although")
        assert "MTU" in error.message
    late = culprits_of(2)[0].explain(7.0, timed_out=True)
    assert late.message == "rank 1 did not answer within 7 s", "it computes"


@contextlib.contextmanager
def _ending_as_the_waiter_gives_up() -> Iterator[threading.Event]:
    """A function that waits for the event ends after the timeout of whoever waits for it, and before the next look."""
    gate = threading.Event()

    def late(method: Callable[..., Any]) -> Callable[..., Any]:
        def wait(future: concurrent.futures.Future[Any], timeout: float | None = None) -> Any:
            try:
                return method(future, timeout)
            except TimeoutError:
                gate.set()
                concurrent.futures.wait([future])
                raise

        return wait

    with pytest.MonkeyPatch.context() as patch:
        for name in ("result", "exception"):
            patch.setattr(concurrent.futures.Future, name, late(getattr(concurrent.futures.Future, name)))
        yield gate


def test_an_answer_of_the_store_in_the_last_moment_counts() -> None:
    rendezvous = Rendezvous(dist.HashStore(), 0, 2, 0.05)
    with _ending_as_the_waiter_gives_up() as gate:
        assert rendezvous._call(gate.wait)
