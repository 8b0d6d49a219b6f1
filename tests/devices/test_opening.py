"""What `wrap` finds out before it trusts an algorithm on a device, and how ranks get out of what does not work."""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import torchring
from tests.support.fake_device import FakeAccelerator
from tests.support.harness import run_ranks
from tests.support.training import attempt
from torchring.devices import opening
from torchring.kernels.lazy import Kernel

pytestmark = pytest.mark.sim


class _TritonError(Exception):
    """As Triton's, which are no RuntimeErrors."""


def _wrapped(**options: Any) -> tuple[str, str]:
    """(algorithm, reason), or ("", the error); and a step is taken."""
    model = nn.Linear(8, 8)
    found = ["", ""]

    def train() -> None:
        optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, **options)
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        stats = optimizer.stats()
        found[:] = stats.algorithm, stats.reason

    problem = attempt(train)
    return (found[0], found[1]) if not problem else ("", problem)


def _raises(error: Exception) -> Any:
    def raise_it(*_: object, **__: object) -> None:
        raise error

    return raise_it


@contextmanager
def _no_compiler(rank: int, culprits: tuple[int, ...]) -> Iterator[None]:
    with mock.patch.object(Kernel, "launch", _raises(_TritonError("Failed to find C compiler"))):
        yield


def _ask_for_determinism(rank: int) -> tuple[str, str]:
    """On one rank only."""
    with FakeAccelerator().installed(), mock.patch.object(opening, "FEWEST_MEASURED", 2):
        torch.use_deterministic_algorithms(rank == 1)
        try:
            return _wrapped()
        finally:
            torch.use_deterministic_algorithms(False)


def _stuck_while_measuring() -> Any:
    def measure(world: Any, all_reduces: Any, *_: object, **__: object) -> None:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            for all_reduce in all_reduces.values():
                all_reduce.check()
            time.sleep(0.01)

    with (
        FakeAccelerator().installed(),
        mock.patch.multiple(opening, FEWEST_MEASURED=2, measure_in_turns=measure),
    ):
        return _wrapped()


def _stuck_while_connecting() -> Any:
    with (
        FakeAccelerator().installed(),
        mock.patch.object(opening, "all_reduce", lambda backend, buffer: backend._aborted.wait(60)),
    ):
        return _wrapped(algorithm="native")


def _choose(rank: int, size: int) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, memory, options in (
        ("never meet", "apart", {}),
        ("lose data", "lossy", {}),
        ("lose data, asked for", "lossy", {"algorithm": "ring"}),
    ):
        with FakeAccelerator(memory=memory).installed(), mock.patch.object(opening, "_TRIAL_SECONDS", 0.5):
            found[name] = _wrapped(**options)
        torchring.shutdown()
    for name, culprits in (("no compiler", (0, 1)), ("no compiler on one", (1,))):
        with FakeAccelerator().installed():
            if rank in culprits:
                with _no_compiler(rank, culprits):
                    found[name] = _wrapped()
            else:
                found[name] = _wrapped()
        torchring.shutdown()
    same = "ranks 0 and 1 use the same GPU; give each rank its own"
    with FakeAccelerator(problem=same).installed() as accelerator:
        accelerator.open_backend = _raises(RuntimeError("NCCL error: Duplicate GPU detected"))  # type: ignore[method-assign]
        found["same GPU"] = _wrapped()
    torchring.shutdown()
    found["deterministic"] = _ask_for_determinism(rank)
    torchring.shutdown()
    for name, stuck in (("connecting", _stuck_while_connecting), ("measuring", _stuck_while_measuring)):
        torchring.init(timeout_seconds=3.0)
        started = time.monotonic()
        found[name] = [*stuck(), time.monotonic() - started]
        torchring.shutdown()
    with FakeAccelerator().installed():
        found["well"] = _wrapped()
    return found


@functools.cache
def _choices() -> list[dict[str, Any]]:
    return run_ranks(_choose, 2, env={"TRITON_INTERPRET": "1"}, deadline=90)


@pytest.mark.parametrize(
    ("name", "why"), [("never meet", "did not come to an end within 0.5 s"), ("lose data", "gave a wrong sum")]
)
def test_peer_access_that_is_announced_and_does_not_work_is_not_used(name: str, why: str) -> None:
    for found in _choices():
        algorithm, reason = found[name]
        assert algorithm == "native", reason
        assert reason.startswith("direct is not to be had: direct, tried out, "), reason
        assert why in reason
    for found in _choices():
        assert found["lose data, asked for"][1].startswith("TopologyError: ring, tried out, gave a wrong sum")


@pytest.mark.parametrize("name", ["no compiler", "no compiler on one"])
def test_kernels_that_cannot_be_compiled_are_an_error_of_wrap_on_all_ranks(name: str) -> None:
    for found in _choices():
        algorithm, text = found[name]
        assert algorithm == "", "training would come to a kernel"
        assert text.startswith("TopologyError: kernels cannot be compiled or launched (Triton needs a C compiler"), text
        assert "Failed to find C compiler" in text
        assert ("(rank 1 says so)" in text) is (name != "no compiler")


def test_ranks_on_one_gpu_are_told_so_first() -> None:
    for found in _choices():
        algorithm, text = found["same GPU"]
        assert algorithm == ""
        assert text.startswith("TopologyError: ranks 0 and 1 use the same GPU; give each rank its own; and "), text
        assert "Duplicate GPU" in text


def test_a_deterministic_run_measures_nothing() -> None:
    """If one rank asks for it: all ranks do the same."""
    for found in _choices():
        algorithm, reason = found["deterministic"]
        assert algorithm == "direct"
        assert "not measured, because torch.use_deterministic_algorithms(True)" in reason


@pytest.mark.parametrize(
    ("name", "error"),
    [("connecting", "TopologyError: torch.distributed's backend does not connect: no answer within 1.5 s"),
     ("measuring", "PeerTimeoutError: ")],
)  # fmt: skip
def test_no_candidate_keeps_all_ranks_waiting_for_ever(name: str, error: str) -> None:
    for found in _choices():
        _, text, seconds = found[name]
        assert text.startswith(error), text
        assert seconds < 20
    assert any("measuring did not come to an end" in found["measuring"][1] for found in _choices())


def test_after_all_that_direct_works() -> None:
    for found in _choices():
        assert found["well"] == ("direct", "the GPUs of all ranks reach each other's memory")
