"""Ranks of a group raise, are interrupted, die and wait crosswise: its ranks say so, and other groups go on."""

import contextlib
import functools
import os
import signal
import time
from collections.abc import Callable

import pytest
import torch

import torchring
from tests.support.checks import logged
from tests.support.harness import patient, ranks, run_ranks
from torchring.default_world import default_world, leave
from torchring.errors import PeerLostError, PeerTimeoutError, RingError
from torchring.memory import host as host_module
from torchring.rendezvous.rendezvous import Rendezvous

_PAIRS = [[0, 2], [1, 3]]
_TOO_LATE = 3.0  # seconds; a death is noticed in about one, and a loaded machine is given the rest


def _train(group: list[list[int]], hook: Callable[[], None] | None = None) -> None:
    """A step in which each parameter has a bucket of its own. `hook` is called amid backward."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(3)])
    optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, group=group, bucket_mb=0.0)
    if hook is not None:
        model[1].register_full_backward_hook(lambda *_: hook())
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    optimizer.close()


def _raise(error: BaseException) -> None:
    raise error


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _interrupted() -> None:
    """Ctrl-C in a collective of a group, to which the other rank comes later."""
    signal.signal(signal.SIGALRM, lambda *_: _raise(KeyboardInterrupt()))
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        torchring.barrier(group=_PAIRS)
    finally:
        _store().publish("interrupted", b"")


def _store() -> Rendezvous:
    rendezvous = default_world().rendezvous
    assert rendezvous is not None
    return rendezvous


def _leave() -> None:
    leave("its script had ended")
    raise SystemExit(3)


@ranks(4, run_ranks)
def test_an_error_stays_in_its_group_and_all_can_begin_anew(rank: int) -> None:
    """Rank 3 raises amid backward, is interrupted in a collective, and leaves while the group opens."""
    failing = functools.partial(_raise, ValueError("no batch"))
    for fault, said in (
        (lambda: _train(_PAIRS, failing), "it called torchring.shutdown"),
        (_interrupted, "interrupted by KeyboardInterrupt"),
        (_leave, "its script had ended"),
    ):
        torchring.init(timeout_seconds=patient(20))
        if fault is not _leave:
            _train(_PAIRS)
        if rank % 2 == 0:
            for _ in range(2):
                _train(_PAIRS)
            assert default_world().failure is None, "nobody of this group has failed"
        elif rank == 3:
            with pytest.raises((ValueError, KeyboardInterrupt, SystemExit)):
                fault()
        else:
            call = functools.partial(_train, _PAIRS)
            if fault is _interrupted:
                _store().fetch("interrupted", 3)
                call = functools.partial(torchring.barrier, group=_PAIRS)
                with contextlib.suppress(RingError):  # rank 3 may have done its part before
                    call()
            for _ in range(2):
                with pytest.raises(RingError, match=rf"\brank 3 .*{said}") as caught:
                    call()
                assert "rank 0" not in str(caught.value)
        torchring.shutdown()


@pytest.mark.parametrize("topology", ["memory", "native", "hierarchical"])
@ranks(4, run_ranks, expect_exit={3: -signal.SIGKILL})
def test_a_death_is_named_in_its_group_alone(topology: str, rank: int) -> None:
    """Two hosts: pairs across them, and three ranks of which two share memory."""
    if topology != "memory":
        host_module._host_identity = lambda: f"host {rank // 2}"
    torchring.init(timeout_seconds=patient(20))
    group = [[0], [1, 2, 3]] if topology == "hierarchical" else _PAIRS
    _train(group)
    if rank in next(each for each in group if 3 in each):
        started = time.monotonic()
        with pytest.raises(PeerLostError, match=r"\brank 3 \(\d of its group\)") as caught:
            _train(group, _die if rank == 3 else None)
        assert caught.value.members == tuple(next(each for each in group if 3 in each))
        assert time.monotonic() - started < patient(_TOO_LATE)
    else:
        for _ in range(3):
            _train(group)
        with pytest.raises(PeerLostError, match=r"\brank [13]\b"):
            torchring.barrier()


@ranks(4, run_ranks)
def test_ranks_that_wait_crosswise_name_both_groups(rank: int) -> None:
    """Ranks 0 and 1 use two groups in other orders. Rank 2 opens a group, to which rank 3 does not come."""
    torchring.init(timeout_seconds=4, stall_warning_seconds=1)
    _store().timeout_seconds = patient(60)
    pairs, three = [[0, 1], [2, 3]], [[0, 1, 2], [3]]
    one = torch.ones(1)
    torchring.all_reduce(one, group=three)
    if rank < 2:
        torchring.all_reduce(one, group=pairs)
    error = ""
    with logged() as said:
        if rank < 2:
            with pytest.raises(PeerTimeoutError) as caught:
                torchring.all_reduce(one, group=pairs if rank == 0 else three)
            error, crossing = (
                str(caught.value),
                f"Rank {1 - rank} ({1 - rank} of its group) and this rank wait for each other",
            )
            mine, theirs = [("0, 1", "0-2"), ("0-2", "0, 1")][rank]
            assert "itself has waited" in said[0]
            assert f"in all_reduce in the group of ranks {theirs}, at" in said[0]
            assert crossing in said[0]
            for text in (said[0], error):
                assert text.endswith(f"(a group of ranks {mine})")
        elif rank == 2:
            _store().timeout_seconds = 3
            what = "opening the group of ranks 2, 3"
            with pytest.raises(PeerTimeoutError, match=f"^rank 3 did not come where this rank is {what} .* Rank 3 "):
                torchring.barrier(group=pairs)
            _store().timeout_seconds = patient(60)
            assert said[0].startswith("rank 2 has waited for")
            assert f" in {what} for rank 3. Rank 3 (pid" in said[0]
    errors = _store().all_gather("over", error.encode())
    assert any(b"wait for each other" in each for each in errors), "of the rank whose time was over first"
