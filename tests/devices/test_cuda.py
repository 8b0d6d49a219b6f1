"""Events and streams of CUDA, without CUDA."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from torchring.devices import cuda
from torchring.devices.cuda import CudaAccelerator, CudaMark, CudaStream

GPU = torch.device("cuda", 0)


class _Event:
    made: list[_Event]

    def __init__(self, enable_timing: bool = False) -> None:
        _Event.made.append(self)
        self.enable_timing = enable_timing
        self.recorded: list[object] = []

    def record(self, stream: object) -> None:
        self.recorded.append(stream)


@pytest.fixture(autouse=True)
def _events(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(cuda, "_spare_events", {})
    _Event.made = []


def test_an_event_is_used_again_when_its_mark_is_gone() -> None:
    marks: list[Any] = [CudaMark("a", GPU), CudaMark("b", GPU)]
    del marks[0]
    marks += [CudaMark("c", GPU), CudaMark("d", GPU), CudaMark("e", torch.device("cuda", 1))]
    assert [event.recorded for event in _Event.made] == [["a", "c"], ["b"], ["d"], ["e"]]
    assert all(event.enable_timing for event in _Event.made)


def test_a_stream_follows_another_with_one_event(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[object] = []
    mine = SimpleNamespace(wait_event=lambda event: waited.append(event.recorded[-1]))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: "current")
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: mine)
    stream = CudaStream(GPU)
    stream.follow()
    stream.follow()
    assert waited == ["current", "current"]
    assert len(_Event.made) == 1


def test_the_current_stream_joins_others_and_keeps_what_they_have_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    joined: list[object] = []
    current = SimpleNamespace(wait_stream=joined.append)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current)
    monkeypatch.setattr(torch.cuda, "Stream", lambda **ids: tuple(ids.values()))
    accelerator = object.__new__(CudaAccelerator)
    accelerator.device = GPU
    gradient: Any = SimpleNamespace(record_stream=joined.append)
    accelerator.join([(5, 0, 1)], [gradient])
    assert joined == [(5, 0, 1), current]
