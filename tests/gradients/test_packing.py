"""Packing on the stand-in device: whose memory goes back when, and what is prepared once."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from tests.support.fake_device import COMPUTE, FakeAccelerator
from torchring.devices import cuda
from torchring.devices import packing as packing_module
from torchring.devices.cuda import CudaMark, CudaStream
from torchring.devices.packing import DevicePacking, UnreadGradients
from torchring.devices.stream import NOTHING_FOUND
from torchring.gradients.plan import ParameterSpec, build_plan

CPU = torch.device("cpu")


@pytest.fixture
def accelerator() -> Iterator[FakeAccelerator]:
    with FakeAccelerator().installed() as accelerator:
        yield accelerator


def _buckets(accelerator: FakeAccelerator, num_slots: int = 1, num_buckets: int = 1) -> list[Any]:
    """Buckets of gradients of one element, which are packed in one stream and reduced in another."""
    specs = [ParameterSpec(f"p{i}", (1,), (1,), torch.float32, CPU) for i in range(num_slots)]
    [plan] = build_plan(specs, bucket_bytes=1 << 20, order=range(num_slots)).buckets
    reduction_stream, stream = accelerator.open_stream(), accelerator.open_stream()
    unread = UnreadGradients(accelerator)
    buckets = []
    for _ in range(num_buckets):
        wire = torch.zeros(plan.numel)
        found = torch.full((1,), NOTHING_FOUND, dtype=torch.int32)
        packing = DevicePacking(
            0.5, plan, wire, found, stream, accelerator, reduction_stream=reduction_stream, unread=unread
        )
        views = [wire[slot.offset : slot.offset + 1] for slot in plan.slots]
        buckets.append(SimpleNamespace(packing=packing, wire=wire, views=views, reduction_stream=reduction_stream))
    return buckets


def _pack(bucket: Any, value: float = 1.0) -> None:
    bucket.packing.follow_current_stream()
    bucket.packing.pack([0], [torch.full((1,), value)], bucket.views[:1])
    bucket.packing.finish_packing()


def test_after_a_reduction_that_was_aborted_gradients_in_place_are_waited_for(accelerator: FakeAccelerator) -> None:
    (bucket,) = _buckets(accelerator, num_slots=2)
    bucket.packing.follow_current_stream()
    bucket.packing.pack([0], [torch.full((1,), 4.0)], bucket.views[:1])  # and packing the other one raises
    accelerator.synchronize()
    bucket.packing.reset()
    for view in bucket.views:
        view.fill_(3.0)
    bucket.packing.finish_packing()
    bucket.reduction_stream.run(lambda: bucket.wire.mul_(10.0))
    bucket.reduction_stream.mark().hold_current()
    assert [float(view) for view in bucket.views] == [30.0, 30.0]


def test_a_gradient_is_kept_until_the_next_bucket_is_packed(accelerator: FakeAccelerator) -> None:
    first, second, third = _buckets(accelerator, num_buckets=3)
    _pack(first)
    with accelerator.executing():  # a look that is no work of the current stream
        assert not first.views[0].item(), "not packed so far"
    assert first.packing.original(0) is not None
    _pack(second)
    assert first.views[0].item() == 0.5, "the current stream has waited"
    assert first.packing.original(0) is None
    assert second.packing.original(0) is not None
    second.packing.release()
    waited = accelerator.calls["hold_current"]
    _pack(third)
    assert accelerator.calls["hold_current"] == waited, "there was nothing to wait for"
    assert accelerator.races == []


def test_gradients_of_several_streams_are_kept_until_they_are_read(accelerator: FakeAccelerator) -> None:
    """The current stream's waiting says nothing about what the memory's own stream does next."""
    first, second, third = _buckets(accelerator, num_buckets=3)
    with accelerator.on_stream("another"):
        first.packing.follow_current_stream()
    _pack(first)
    _pack(second)
    assert first.packing.original(0) is not None
    assert second.packing.original(0) is not None, "packed later, so read later"
    accelerator.synchronize()
    _pack(third)
    assert first.packing.original(0) is second.packing.original(0) is None
    with accelerator.on_stream("another"):
        accelerator.synchronize()
        third.packing.release()
        _pack(first)
    _pack(second)
    assert first.packing.original(0) is not None, "another stream's"
    with accelerator.on_stream("another"):
        _pack(third)
    assert first.packing.original(0) is None
    assert second.packing.original(0) is not None


def test_what_is_reduced_was_packed(accelerator: FakeAccelerator) -> None:
    """The stream that reduces waits for the stream that packs, also for gradients that were scaled in place since."""
    [bucket] = _buckets(accelerator, num_slots=2)
    first, second = bucket.views
    second.fill_(3.0)
    bucket.packing.follow_current_stream()
    bucket.packing.pack([0], [torch.full((1,), 4.0)], [first])
    second.mul_(2.0)
    bucket.packing.follow_current_stream()
    bucket.packing.finish_packing()
    bucket.reduction_stream.run(lambda: bucket.wire.mul_(10.0))
    bucket.reduction_stream.mark().hold_current()
    assert (first.item(), second.item()) == (20.0, 60.0)
    assert accelerator.races == []


def test_launches_are_prepared_once(accelerator: FakeAccelerator) -> None:
    [bucket] = _buckets(accelerator)
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


def test_the_table_that_was_not_used_for_longest_is_forgotten(accelerator: FakeAccelerator) -> None:
    [bucket] = _buckets(accelerator, num_slots=5)
    sets = [tuple(i for i in range(5) if mask >> i & 1) for mask in range(1, 19)]

    def pack(slots: tuple[int, ...]) -> None:
        bucket.packing.pack(slots, [torch.ones(1) for _ in slots], [bucket.views[i] for i in slots])

    for slots in sets[:16]:
        pack(slots)
    pack(sets[0])
    pack(sets[16])
    assert sets[0] in bucket.packing._tables
    assert sets[1] not in bucket.packing._tables
    assert len(bucket.packing._tables) == 16
    assert accelerator.current == COMPUTE


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
def test_a_stream_follows_others_with_one_event(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[object] = []
    mine = SimpleNamespace(wait_event=lambda event: waited.append(event.recorded[-1]))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "current")
    monkeypatch.setattr(torch.cuda, "Stream", lambda device=None, priority=0, **ids: tuple(ids.values()) or mine)
    stream = CudaStream(torch.device("cuda", 0))
    stream.follow()
    stream.follow([(5, 0, 1)])
    assert waited == ["current", "current", (5, 0, 1)]
    assert _Event.made == 1
