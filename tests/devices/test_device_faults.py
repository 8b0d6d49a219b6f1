"""Ranks that die, stop and raise while others wait for them on a (fake) device: see test_on_device.py."""

from __future__ import annotations

import functools
import math
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchring
from tests.support.checks import assert_same_on_all_ranks, digest
from tests.support.fake_device import FakeAccelerator
from tests.support.harness import patient, ranks, run_ranks
from tests.support.scenarios import INTERPRETED
from tests.support.training import attempt
from torchring.devices import watchdog
from torchring.errors import RingError
from torchring.memory import host as host_module

pytestmark = pytest.mark.sim

_FATAL_STEP = 3
_TIMEOUT_SECONDS = 2.0
_TOO_LATE = 4.0  # seconds; a death is noticed in about one, and a loaded machine is given the rest


def _train(
    rank: int, steps: int, in_backward: Callable[[int], None] = lambda step: None
) -> tuple[int, str, str, tuple[int, ...], float]:
    """(step, error, its text, its peers, seconds that the last step took); the error is "" if all went well."""
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, bucket_mb=400 / 2**20)
    at = 0

    def hook(gradient: Tensor) -> Tensor:
        in_backward(at)
        return gradient

    model[1].weight.register_hook(hook)  # of four layers, two have their gradients by now
    for at in range(steps):
        started = time.monotonic()
        try:
            optimizer.zero_grad()
            model(torch.full((1, 8), float(rank + at))).sum().backward()
            optimizer.step()
        except ArithmeticError:  # caught by the script, which goes on with the next batch
            continue
        except Exception as error:
            peers = error.peers if isinstance(error, RingError) else ()
            return at, type(error).__name__, str(error), tuple(peers), time.monotonic() - started
    return steps, "", digest(model.parameters()), (), 0.0


@ranks(3, start=run_ranks, env=INTERPRETED, deadline=40, expect_exit={2: -signal.SIGKILL})
def test_a_rank_that_is_killed_is_named_by_all_others(rank: int, world_size: int) -> None:
    """Their devices wait for it at that time, and have to be told to give up."""

    def die(step: int) -> None:
        if rank == world_size - 1 and step == _FATAL_STEP:
            os.kill(os.getpid(), signal.SIGKILL)

    with FakeAccelerator().installed() as accelerator:
        torchring.init(timeout_seconds=30.0)
        step, error, text, peers, seconds = _train(rank, 8, die)
        assert (step, error, peers) == (_FATAL_STEP, "PeerLostError", (2,)), text
        assert "rank 2" in text
        assert seconds < patient(_TOO_LATE)
        assert 1 in map(int, accelerator.host_words)


@ranks(2, start=run_ranks, env=INTERPRETED, deadline=40, expect_exit={1: -signal.SIGKILL})
def test_a_rank_of_another_host_that_is_killed_while_the_device_waits(rank: int) -> None:
    """Rank 1 dies when its backward and its calls have returned, and before its device has done its part.

    What NCCL leaves of a sum is not used: the host had launched the rest of the step, and could not know.
    """
    host_module._host_identity = lambda: f"host {rank}"
    watchdog._AFAR_SECONDS = 0.5
    with FakeAccelerator("lazy").installed():
        torchring.init(timeout_seconds=60.0)
        model = nn.Linear(8, 8)
        optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)

        def backward() -> None:
            optimizer.zero_grad()
            model(torch.ones(1, 8)).sum().backward()

        backward()
        optimizer.step()
        torchring.all_reduce(torch.ones(1))
        backward()
        of_all, largest, sent = torch.ones(3, 3)
        torchring.all_reduce(of_all)
        torchring.all_reduce(largest, "max")
        torchring.broadcast(sent, src=1)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        started = time.monotonic()
        left = [*(p.grad for p in model.parameters()), sent, largest, of_all]
        assert all(each is not None and math.isnan(each.sum()) for each in left)  # waits for the device
        assert time.monotonic() - started < patient(2 * _TOO_LATE)
        for call in (backward, lambda: torchring.all_reduce(torch.ones(3))):
            error = attempt(call)
            assert error.startswith("PeerLostError"), error
            assert "rank 1" in error


def _in_turn(rank: int, size: int) -> dict[str, Any]:
    """One world after the other in the same processes; some of them end in an error."""

    def sleep(step: int) -> None:
        if rank == 1 and step == _FATAL_STEP:
            time.sleep(2.0 * _TIMEOUT_SECONDS)

    def fail_half_way(step: int) -> None:
        if rank == 1 and step == _FATAL_STEP:
            raise ArithmeticError("an error in a custom function")

    def fail_on_all(step: int) -> None:
        if step == _FATAL_STEP:
            raise ArithmeticError("an error in a custom function")

    def lose_device(step: int) -> None:
        if rank == 1 and step == _FATAL_STEP:
            accelerator.fault = "an illegal memory access was encountered (700)"
            time.sleep(patient(1.0))

    watchdog._ASK_SECONDS = 0.1
    results: dict[str, Any] = {}
    for name, mode, timeout_seconds, in_backward in (
        ("raised on all", "lazy", 30.0, fail_on_all),  # nobody else waits while one imports Triton
        ("stuck", "lazy", _TIMEOUT_SECONDS, sleep),
        ("raised", "lazy", 30.0, fail_half_way),
        ("faulted", "lazy", 30.0, lose_device),
        ("well", "lazy", 30.0, lambda step: None),
        ("well, late", "late", 30.0, lambda step: None),
    ):
        with FakeAccelerator(mode).installed() as accelerator:
            torchring.init(timeout_seconds=timeout_seconds)
            results[name] = [*_train(rank, 6, in_backward), accelerator.races]
            time.sleep(0.3)  # alive: nobody may need this rank's end to hear of it
            torchring.shutdown()
    return results


@functools.cache
def _results_in_turn() -> list[dict[str, Any]]:
    return run_ranks(_in_turn, 2, env=INTERPRETED, deadline=60)


def test_a_rank_that_keeps_others_waiting() -> None:
    """The host says which rank it was; nobody waits for ever, nor steps."""
    waiting, late = (of_rank["stuck"] for of_rank in _results_in_turn())
    for step, error, text, _, seconds, _ in (waiting, late):
        assert (step, error) == (_FATAL_STEP, "PeerTimeoutError"), text
        assert seconds < patient(3 * _TIMEOUT_SECONDS + _TOO_LATE)
    assert waiting[3] == (1,)
    assert "rank 1" in waiting[2]


def test_a_rank_whose_device_has_failed_is_named_while_its_process_lives() -> None:
    for step, error, text, peers, seconds, _ in (of_rank["faulted"] for of_rank in _results_in_turn()):
        assert (step, error, peers) == (_FATAL_STEP, "PeerLostError", (1,)), text
        assert "the GPU of rank 1 has failed: an illegal memory access was encountered (700)" in text
        assert seconds < patient(_TOO_LATE)


def test_a_backward_aborted_on_one_rank() -> None:
    """Its later buckets meet others' earlier ones on the device; hosts find out before anybody steps."""
    first, second = (of_rank["raised"] for of_rank in _results_in_turn())
    assert (first[0], second[0]) == (_FATAL_STEP, _FATAL_STEP + 1)
    for _, error, text, peers, seconds, _ in (first, second):
        assert error == "PlanMismatchError", text
        assert peers == (1,), text
        assert "a backward was aborted on rank 1" in text
        assert seconds < patient(_TOO_LATE)


def test_a_backward_aborted_on_all_ranks() -> None:
    results = [of_rank["raised on all"] for of_rank in _results_in_turn()]
    assert [error for _, error, *_ in results] == ["", ""], results
    assert_same_on_all_ranks([trained for _, _, trained, *_ in results])


def test_after_all_that_a_new_world_works() -> None:
    trained = [of_rank[name] for of_rank in _results_in_turn() for name in ("well", "well, late")]
    assert [(step, error, races) for step, error, _, _, _, races in trained] == [(6, "", [])] * 4
    assert_same_on_all_ranks([parameters for _, _, parameters, *_ in trained])
