"""The way of a gradient is as the documents list it, and short: seen in one backward of two ranks."""

import functools
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import torchring
import torchring.gradients
from tests.support.harness import run_pooled

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "torchring"

# On the way beside `gradients/`. Waiting for a late rank, and nothing else, leads to the last three.
ENGINE = {
    *("allreduce/direct.py", "allreduce/slices.py", "memory/channel.py", "interruption.py"),
    *("observer.py", "observe/flight_recorder/entries.py", "observe/inputs.py", "observe/data_check.py"),
    *("world.py", "errors.py", "collectives/shared_memory.py"),
    *("participants/ownership.py", "participants/replicas.py", "participants/heap.py"),
}
WAITING = {"memory/host.py", "memory/noticeboard.py", "memory/semaphore.py"}

# Of one step: zero_grad, forward, backward, step. These numbers only fall. A rank that waits takes more
# calls, so the calls are those of the rank that takes fewer.
MOST_FILES, MOST_CALLS = 30, 490
MOST_NESTED = {"hook": 5, "_ended": 9}  # frames, of a hook that does not begin the backward, and of its end


@dataclass
class Trace:
    """The files of torchring that are passed, the calls, and by the first one how many frames were nested at most.

    Frames that wait for another rank are not counted.
    """

    files: set[str] = field(default_factory=set)
    num_calls: int = 0
    nested: dict[str, int] = field(default_factory=dict)
    begins: bool = False

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or (file := _file(frame)) is None:
            return
        self.files.add(file)
        self.num_calls += 1
        own, outer = [], frame
        while outer is not None:
            if _file(outer) not in {None, *WAITING}:
                own.append(outer.f_code.co_name)
            outer = outer.f_back  # type: ignore[assignment]
        self.begins = own == [] or (self.begins and len(own) > 1) or own[0] == "begin_backward"
        if not self.begins:
            self.nested[own[-1]] = max(self.nested.get(own[-1], 0), len(own))


def _file(frame: FrameType) -> str | None:
    """The frame's file within the package; None for a frame of somebody else, and for a comprehension."""
    return (
        None if frame.f_code.co_name in ("<listcomp>", "<setcomp>", "<dictcomp>") else _within(frame.f_code.co_filename)
    )


@functools.cache
def _within(file: str) -> str | None:
    return str(Path(file).relative_to(PACKAGE)) if Path(file).is_relative_to(PACKAGE) else None


def _traced(rank: int, size: int) -> tuple[Trace, Trace]:
    """Of a backward, and of a whole step: of several, the one in which this rank waited least."""
    model = nn.Sequential(*(nn.Linear(300, 300) for _ in range(6)))  # a weight is copied on arrival, a bias is small
    optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=1e-6), model, algorithm="direct", bucket_mb=0.5)
    for _ in range(8):  # the buckets are laid out, and arrivals are written down no more
        optimizer.zero_grad()
        model(torch.randn(8, 300)).sum().backward()
        optimizer.step()
    trace, steps = Trace(), [Trace() for _ in range(20)]
    x = torch.randn(8, 300)
    for whole_step in steps:
        sys.setprofile(whole_step.note)
        try:
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
        finally:
            sys.setprofile(None)
    optimizer.zero_grad()
    loss = model(x).sum()
    sys.setprofile(trace.note)
    try:
        loss.backward()
    finally:
        sys.setprofile(None)
    optimizer.step()
    return trace, min(steps, key=lambda step: step.num_calls)


def listed(text: str, prefix: str = "") -> set[str]:
    return set(re.findall(rf"^(?:    |\d+\. `){prefix}([a-z_/]+\.py)", text, re.MULTILINE))


@pytest.mark.takes_2_12
def test_the_way_of_a_gradient_is_short_and_is_the_one_that_is_listed() -> None:
    traces = run_pooled(_traced, 2)
    assert min(whole_step.num_calls for _, whole_step in traces) <= MOST_CALLS
    for trace, whole_step in traces:
        assert len(whole_step.files - WAITING) <= MOST_FILES
        assert all(trace.nested[first] <= most for first, most in MOST_NESTED.items()), trace.nested

        way = {file.removeprefix("gradients/") for file in trace.files if file.startswith("gradients/")}
        doc = torchring.gradients.__doc__
        assert doc is not None
        assert way - {"weights.py"} == listed(doc)
        assert trace.files - WAITING - {f"gradients/{file}" for file in way} == ENGINE

        page = listed((ROOT / "docs" / "background" / "how-it-works.md").read_text(), "torchring/")
        assert page <= trace.files
        assert {f"gradients/{file}" for file in listed(doc)} - page == {
            f"gradients/{file}" for file in ("views.py", "ledger.py", "agreement.py", "group.py", "reduction.py")
        }
        assert len(page) == 8
        assert sum((PACKAGE / file).read_bytes().count(b"\n") for file in page) <= 2_600
