"""Prepared launches: what reaches Triton's launcher, on which stream, without a GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, no_type_check

import pytest
import torch

from tests.support.driver import DEVICE, Driver, OnDevice, driver_of
from torchring.kernels.lazy import Kernel, lazy_jit

if TYPE_CHECKING:
    import triton.language as tl

pytestmark = pytest.mark.sim
ARGUMENTS: tuple[Any, ...] = (DEVICE, 3, OnDevice(), torch.zeros(1), 5, None, 0.5, 16)
OPTIONS: dict[str, Any] = {"WIDTH": 2, "num_warps": 2}


@lazy_jit(do_not_specialize=("numel",))
@no_type_check
def _some_kernel(source, host, numel, found, scale, even, WIDTH: tl.constexpr, OFFSET: tl.constexpr = 8):
    tl.store(source, tl.load(host) * scale + OFFSET + WIDTH, mask=numel > even)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("triton")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Iterator[Driver]:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache))
    with driver_of("sm_90") as fake:
        yield fake
        _some_kernel.jitted.device_caches.clear()


@pytest.mark.smoke
def test_a_file_may_be_imported_after_what_it_uses_was_jitted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_some_kernel.fn.__globals__, "helper", None)
    helper: Any = SimpleNamespace(fn=SimpleNamespace(__name__="helper"))  # as `triton.jit` has returned
    assert Kernel(_some_kernel.fn, [], [helper]).jitted is not None
    assert _some_kernel.fn.__globals__["helper"] is helper


@pytest.mark.smoke
def test_without_triton_the_error_says_where_it_comes_from(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ModuleNotFoundError, match=r"need Triton, .*pip install 'torchring\[gpu\]'"):
        _ = Kernel(_some_kernel.fn, [], []).jitted


def test_a_prepared_launch_is_triton_s(gpu: Driver) -> None:
    """All but the stream, and tensors that have become addresses."""
    _some_kernel.launch(*ARGUMENTS[1:], **OPTIONS)
    launch = _some_kernel.prepare(*ARGUMENTS, **OPTIONS)
    assert len(gpu.launched) == 1, "nothing is launched yet"
    for gpu.stream in (7, 8, 9):
        launch()
    ordinary, first, second, third = gpu.launched
    assert first[:3] == (3, 1, 1)
    assert first[-8:-6] == ARGUMENTS[2:4]
    assert first == ordinary
    assert [later[3] for later in (second, third)] == [8, 9], "the stream that is current at the launch"
    for later in (second, third):
        assert later[-8] == 4096
        assert later[-7] is ARGUMENTS[3], "the driver may know pinned memory by another address"
        assert (*later[:3], *later[4:]) == (*first[:3], *first[4:-8], 4096, *first[-7:])
    assert len(_some_kernel.jitted.device_caches[0][0]) == 1


def test_a_launcher_that_has_changed_is_not_used_again(gpu: Driver) -> None:
    launch = _some_kernel.prepare(*ARGUMENTS, **OPTIONS)
    launch()
    gpu.refuses = True
    launch()
    gpu.refuses = False
    launch()
    assert [isinstance(launched[-8], OnDevice) for launched in gpu.launched] == [True] * 3


def test_another_current_device_is_left(gpu: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = _some_kernel.prepare(*ARGUMENTS, **OPTIONS)
    entered: list[Any] = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext(entered.append(device)))
    launch()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    launch()
    assert (entered, len(gpu.launched)) == ([DEVICE], 2)
