"""Ranks that die, stop and raise while others wait for them on a (fake) device: see test_on_device.py."""

import math
import os
import signal
import time
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import nn

import torchring
from tests.support.checks import digest
from tests.support.fake_device import FakeAccelerator
from tests.support.harness import patient, ranks, run_ranks
from tests.support.scenarios import INTERPRETED
from tests.support.training import attempt
from torchring.devices import watchdog
from torchring.errors import PeerLostError, PeerTimeoutError, PlanMismatchError, RingError
from torchring.memory import host as host_module

pytestmark = pytest.mark.sim

_FATAL_STEP = 3
_TIMEOUT_SECONDS = 2.0
_TOO_LATE = 4.0  # seconds; a death is noticed in about one, and a loaded machine is given the rest


def _train(act_in_backward: Callable[[int], None], rank: int) -> tuple[int, RingError | None]:
    """How many steps went well, and the error that ended them, which came in time. `act_in_backward` gets the step."""
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))
    optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, bucket_mb=400 / 2**20)
    at = 0
    model[1].weight.register_hook(lambda gradient: act_in_backward(at))  # two of four layers have their gradients
    for at in range(6):
        started = time.monotonic()
        try:
            optimizer.zero_grad()
            model(torch.full((1, 8), float(rank + at))).sum().backward()
            optimizer.step()
        except ArithmeticError:  # caught by the script, which goes on with the next batch
            continue
        except RingError as error:
            assert time.monotonic() - started < patient(3 * _TIMEOUT_SECONDS + _TOO_LATE)
            return at, error
    assert len(set(torchring.all_gather_object(digest(model.parameters())))) == 1
    return 6, None


@ranks(3, start=run_ranks, env=INTERPRETED, deadline=40, expect_exit={2: -signal.SIGKILL})
def test_a_rank_that_is_killed_is_named_by_all_others(rank: int) -> None:
    """Their devices wait for it at that time, and have to be told to give up."""

    def die(step: int) -> None:
        if rank == 2 and step == _FATAL_STEP:
            os.kill(os.getpid(), signal.SIGKILL)

    with FakeAccelerator().installed() as accelerator:
        torchring.init(timeout_seconds=30.0)
        step, error = _train(die, rank)
        assert (step, type(error)) == (_FATAL_STEP, PeerLostError), error
        assert error.peers == (2,)
        assert "rank 2" in str(error)
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


class Fault(NamedTuple):
    """What ranks do in a backward, what they are told, and in which step."""

    act: Callable[[], None]
    error: type[RingError] | None = None
    text: str = ""
    steps: tuple[int, int] = (_FATAL_STEP, _FATAL_STEP)
    culprits: tuple[int, ...] = (1,)
    timeout_seconds: float = 30.0
    mode: str = "lazy"


@ranks(2, start=run_ranks, env=INTERPRETED, deadline=60)
def test_ranks_that_raise_stop_or_lose_their_device(rank: int) -> None:
    """Nobody waits for ever, nor steps. One world after another in the same processes: the last ones work."""

    def fail() -> None:
        raise ArithmeticError("an error in a custom function")

    def lose_device() -> None:
        accelerator.fault = "an illegal memory access was encountered (700)"
        time.sleep(patient(1.0))

    lost = "the GPU of rank 1 has failed: an illegal memory access was encountered (700)"
    aborted = "a backward was aborted on rank 1"
    watchdog._ASK_SECONDS = 0.1
    for fault in (
        Fault(fail, culprits=(0, 1)),  # nobody else waits while one imports Triton
        Fault(lambda: time.sleep(2.0 * _TIMEOUT_SECONDS), PeerTimeoutError, timeout_seconds=_TIMEOUT_SECONDS),
        # Its later buckets meet others' earlier ones on the device; hosts find out before anybody steps.
        Fault(fail, PlanMismatchError, aborted, steps=(_FATAL_STEP, _FATAL_STEP + 1)),
        Fault(lose_device, PeerLostError, lost),  # its process lives
        Fault(lambda: None),
        Fault(lambda: None, mode="late"),
    ):
        with FakeAccelerator(fault.mode).installed() as accelerator:
            torchring.init(timeout_seconds=fault.timeout_seconds)
            is_culprit = rank in fault.culprits
            step, error = _train(lambda at: fault.act() if is_culprit and at == _FATAL_STEP else None, rank)  # noqa: B023
            if fault.error is None:
                assert (step, error, accelerator.races) == (6, None, []), fault
            else:
                assert (step, type(error)) == (fault.steps[rank], fault.error), error
                assert fault.text in str(error)
                # One that was late itself only knows that some rank was.
                assert error.peers == (1,) or (fault.error is PeerTimeoutError and is_culprit), error
            time.sleep(0.3)  # alive: nobody may need this rank's end to hear of it
            torchring.shutdown()
