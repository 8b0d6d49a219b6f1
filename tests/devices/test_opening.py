"""What `wrap` finds out before it trusts an algorithm on a device, and how ranks get out of what does not work."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import torchring
from tests.support.fake_device import FakeAccelerator
from tests.support.scenarios import Scenarios
from tests.support.training import attempt
from torchring.devices import opening
from torchring.devices.cuda import CudaAccelerator
from torchring.kernels.lazy import Kernel

pytestmark = pytest.mark.sim
scenario = Scenarios(__name__)


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


@scenario(["apart", "lossy"])
def test_peer_access_that_is_announced_and_does_not_work_is_not_used(memory: str, rank: int) -> None:
    why = {"apart": "did not come to an end within 0.5 s", "lossy": "gave a wrong sum"}[memory]
    with mock.patch.object(opening, "_TRIAL_SECONDS", 0.5), FakeAccelerator(memory=memory).installed():
        algorithm, reason = _wrapped()
        assert algorithm == "native", reason
        assert reason.startswith("direct is not to be had: direct, tried out, "), reason
        assert why in reason
        torchring.shutdown()
    if memory == "lossy":
        with FakeAccelerator(memory=memory).installed():
            assert _wrapped(algorithm="ring")[1].startswith("TopologyError: ring, tried out, gave a wrong sum")


@scenario([(0, 1), (1,)])
def test_kernels_that_cannot_be_compiled_are_an_error_of_wrap_on_all_ranks(
    culprits: tuple[int, ...], rank: int
) -> None:
    broken = mock.patch.object(Kernel, "launch", _raises(_TritonError("Failed to find C compiler")))
    with FakeAccelerator().installed(), broken if rank in culprits else nullcontext():
        algorithm, text = _wrapped()
    assert algorithm == "", "training would come to a kernel"
    assert text.startswith("TopologyError: kernels cannot be compiled or launched (Triton needs a C compiler"), text
    assert "Failed to find C compiler" in text
    assert ("(rank 1 says so)" in text) is (len(culprits) == 1)


_NO_KERNELS = "kernels cannot be compiled or launched (Triton needs a C compiler, and the headers of Python): "
_LACKING: dict[str, tuple[type, str, Any, dict[str, str], str]] = {
    "an old GPU": (Kernel, "launch", RuntimeError("needs CUDA Capability >= 8.0"), {}, f"{_NO_KERNELS}needs CUDA"),
    "another Triton": (Kernel, "launch", TypeError("no argument maxnreg"), {}, f"{_NO_KERNELS}no argument maxnreg"),
    "no NCCL": (  # the PyTorch of these tests has none
        *(FakeAccelerator, "open_backend", CudaAccelerator.open_backend, {"algorithm": "native"}),
        "torch.distributed's backend cannot be opened: module 'torch.distributed' has no attribute 'ProcessGroupNCCL'",
    ),
    "one GPU": (
        *(FakeAccelerator, "open_backend", RuntimeError("Duplicate GPU detected"), {"algorithm": "native"}),
        "torch.distributed's backend cannot be opened: Duplicate GPU detected",
    ),
}


@scenario(_LACKING)
def test_a_machine_that_cannot_do_it_is_an_error_of_wrap(name: str, rank: int) -> None:
    kind, method, does, options, why = _LACKING[name]
    does = _raises(does) if isinstance(does, Exception) else does
    with FakeAccelerator().installed(), mock.patch.object(kind, method, does):
        algorithm, text = _wrapped(**options)
    assert algorithm == ""
    assert text.startswith(f"TopologyError: {why}"), text


@scenario()
def test_ranks_on_one_gpu_are_told_so_first(rank: int) -> None:
    same = "ranks 0 and 1 use the same GPU; give each rank its own"
    with FakeAccelerator(problem=same).installed() as accelerator:
        accelerator.open_backend = _raises(RuntimeError("NCCL error: Duplicate GPU detected"))  # type: ignore[method-assign]
        algorithm, text = _wrapped()
    assert algorithm == ""
    assert text.startswith(f"TopologyError: {same}; and "), text
    assert "Duplicate GPU" in text


@scenario()
def test_a_deterministic_run_measures_nothing(rank: int) -> None:
    """If one rank asks for it: all ranks do the same."""
    with FakeAccelerator(own_devices=True).installed():
        torch.use_deterministic_algorithms(rank == 1)
        try:
            algorithm, reason = _wrapped()
        finally:
            torch.use_deterministic_algorithms(False)
    assert algorithm == "direct"
    assert "not measured, because torch.use_deterministic_algorithms(True)" in reason


def _measure_for_ever(world: Any, all_reduce: Any, *_: object) -> None:
    end = time.monotonic() + 60
    while time.monotonic() < end:
        all_reduce.check()
        time.sleep(0.01)


def _some_say(results: list[str], case: Any) -> None:
    assert case == "connecting" or any("measuring did not come to an end" in text for text in results)


@scenario(["connecting", "measuring"], check=_some_say)
def test_no_candidate_keeps_all_ranks_waiting_for_ever(what: str, rank: int) -> str:
    torchring.init(timeout_seconds=3.0)
    started = time.monotonic()
    stuck: Any = {"_PRODUCT_SIDE": 8, "_seconds_together": _measure_for_ever}
    if what == "connecting":
        stuck = {"all_reduce": lambda backend, buffer: backend._aborted.wait(60)}
    with FakeAccelerator(own_devices=True).installed(), mock.patch.multiple(opening, **stuck):
        _, text = _wrapped(**({"algorithm": "native"} if what == "connecting" else {}))
    connecting = "TopologyError: torch.distributed's backend does not connect: no answer within 1.5 s"
    assert text.startswith(connecting if what == "connecting" else "PeerTimeoutError: "), text
    assert time.monotonic() - started < 20
    return text


@scenario()
def test_after_all_that_direct_works(rank: int) -> None:
    with FakeAccelerator().installed():
        why = "the GPUs of all ranks reach each other's memory; not measured, because ranks share a GPU"
        assert _wrapped() == ("direct", why)
