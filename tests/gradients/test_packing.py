"""Packing on the stand-in device: which streams are waited for, and what is prepared once."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support.fake_device import FakeAccelerator
from torchring.devices import cuda
from torchring.devices import packing as packing_module
from torchring.devices.cuda import CudaAccelerator, CudaMark, CudaStream
from torchring.devices.packing import DevicePacking
from torchring.gradients.plan import ParameterSpec, build_plan
from torchring.kernels.pack import NOT_FOUND

CPU = torch.device("cpu")


@pytest.fixture
def accelerator() -> Iterator[FakeAccelerator]:
    with FakeAccelerator().installed() as accelerator:
        yield accelerator


def _bucket(accelerator: FakeAccelerator, num_slots: int = 1) -> Any:
    """Gradients of one element."""
    specs = [ParameterSpec(f"p{i}", (1,), (1,), torch.float32, CPU) for i in range(num_slots)]
    [plan] = build_plan(specs, bucket_bytes=1 << 20, order=range(num_slots)).buckets
    stream = accelerator.open_stream()
    all_reduce: Any = SimpleNamespace(accelerator=accelerator, stream=stream, hold_for_earlier=mock.Mock())
    wire, found = torch.zeros(plan.numel), torch.full((2,), NOT_FOUND, dtype=torch.int32)
    packing = DevicePacking(0.5, plan, wire, found, 2, all_reduce, set())
    views = [wire[slot.offset : slot.offset + 1] for slot in plan.slots]
    return SimpleNamespace(packing=packing, wire=wire, views=views, stream=stream, held=all_reduce.hold_for_earlier)


def test_what_is_reduced_was_packed(accelerator: FakeAccelerator) -> None:
    """The stream that reduces follows the stream that computes, also for gradients that were scaled in place."""
    bucket = _bucket(accelerator, num_slots=2)
    first, second = bucket.views
    second.fill_(3.0)
    bucket.packing.pack([0], [torch.full((1,), 4.0)], [first])
    bucket.packing.scale_in_place([1], [second])
    bucket.packing.finish_packing()
    bucket.stream.run(lambda: bucket.wire.mul_(10.0))
    bucket.stream.mark().hold_current()
    assert (first.item(), second.item()) == (20.0, 15.0)
    assert accelerator.races == []
    assert accelerator.calls["join"] == 0
    assert bucket.held.call_count == 2, "the wire may still be reduced"


def test_launches_are_prepared_once(accelerator: FakeAccelerator) -> None:
    bucket = _bucket(accelerator)
    with mock.patch.object(packing_module, "prepare_pack", wraps=packing_module.prepare_pack) as prepare:
        for factor, dtype, times in (
            (1.0, torch.float32, 1),
            (1.0, torch.float32, 1),
            (2.0, torch.float32, 2),
            (2.0, torch.float16, 3),
        ):
            bucket.packing.pack([0], [torch.full((1,), 4.0, dtype=dtype)], bucket.views, factor)
            accelerator.synchronize()
            assert bucket.views[0].item() == 2.0 * factor
            assert prepare.call_count == times


# Events of CUDA, without CUDA


class _Event:
    made = 0

    def __init__(self, enable_timing: bool = False) -> None:
        _Event.made += 1
        self.enable_timing = enable_timing
        self.recorded: list[object] = []

    def record(self, stream: object) -> None:
        self.recorded.append(stream)


@pytest.fixture
def _events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(cuda, "_spare_events", {})
    _Event.made = 0


@pytest.mark.usefixtures("_events")
def test_an_event_is_used_again_when_its_mark_is_gone() -> None:
    gpus = torch.device("cuda", 0), torch.device("cuda", 1)
    marks: list[Any] = [CudaMark("a", gpus[0]), CudaMark("b", gpus[0])]
    events = [mark._event for mark in marks]
    assert events[0] is not events[1]
    assert all(event.enable_timing for event in events)
    del marks[0]
    marks += [CudaMark("c", gpus[0]), CudaMark("d", gpus[0]), CudaMark("e", gpus[1])]
    assert [event.recorded for event in events] == [["a", "c"], ["b"]]
    assert _Event.made == 4, "the second GPU has events of its own"


@pytest.mark.usefixtures("_events")
def test_a_stream_follows_another_with_one_event(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[object] = []
    mine = SimpleNamespace(wait_event=lambda event: waited.append(event.recorded[-1]))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "current")
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: mine)
    stream = CudaStream(torch.device("cuda", 0))
    stream.follow()
    stream.follow()
    assert waited == ["current", "current"]
    assert _Event.made == 1


def test_the_current_stream_joins_others_and_keeps_what_they_have_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[object] = []
    current = SimpleNamespace(wait_stream=joined.append)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.cuda, "Stream", lambda **ids: tuple(ids.values()))
    accelerator = object.__new__(CudaAccelerator)
    accelerator.device = torch.device("cuda", 0)
    gradient: Any = SimpleNamespace(record_stream=joined.append)
    accelerator.join([(5, 0, 1)], [gradient])
    assert joined == [(5, 0, 1), current]
