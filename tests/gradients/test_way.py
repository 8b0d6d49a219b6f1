"""The way of a gradient is as the documents list it, and short: seen in one backward of two ranks."""

from __future__ import annotations

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
}
WAITING = {"memory/host.py", "memory/noticeboard.py", "memory/semaphore.py"}
PARTICIPANTS = {"ownership.py", "replicas.py", "heap.py"}

# Of one step: zero_grad, forward, backward, step. These numbers only fall. A rank that waits takes more
# calls, so the calls are those of the rank that takes fewer.
MOST_FILES, MOST_CALLS = 30, 490


@dataclass
class Trace:
    """The files of torchring that a backward passes, and how deep its frames are nested.

    Attributes:
        depths: of each call from outside: the function, those below it, the largest number of nested frames, without
            those that wait for another rank.
        num_calls: number of calls of the package's functions.
    """

    files: set[str] = field(default_factory=set)
    depths: list[tuple[str, set[str], int]] = field(default_factory=list)
    num_calls: int = 0

    def note(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call" or (file := _file(frame)) is None:
            return
        self.files.add(file)
        self.num_calls += 1
        depth, outer = int(file not in WAITING), frame.f_back
        while outer is not None:
            depth += _file(outer) not in {None, *WAITING}
            outer = outer.f_back
        if depth == 1:
            self.depths.append((frame.f_code.co_name, set(), 1))
        entry, below, deepest = self.depths[-1]
        below.add(frame.f_code.co_name)
        self.depths[-1] = entry, below, max(depth, deepest)

    def deepest(self, entry: str, *, with_: str = "", without: tuple[str, ...] = ()) -> int:
        return max(
            depth
            for name, below, depth in self.depths
            if name == entry and (not with_ or with_ in below) and below.isdisjoint(without)
        )


def _file(frame: FrameType) -> str | None:
    """The frame's file within the package; None for a frame of somebody else, and for a comprehension."""
    file = Path(frame.f_code.co_filename)
    if not file.is_relative_to(PACKAGE) or frame.f_code.co_name in ("<listcomp>", "<setcomp>", "<dictcomp>"):
        return None
    return str(file.relative_to(PACKAGE))


def _traced(rank: int, size: int) -> tuple[Trace, Trace]:
    """Of a backward, and of a whole step: of several, the one in which this rank waited least."""
    model = nn.Sequential(*(nn.Linear(300, 300) for _ in range(6)))  # a weight is copied on arrival, a bias is small
    optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=1e-6), model, algorithm="direct", bucket_mb=0.5)
    for _ in range(8):  # the buckets are laid out, and arrivals are written down no more
        optimizer.zero_grad()
        model(torch.randn(8, 300)).sum().backward()
        optimizer.step()
    trace, steps = Trace(), [Trace() for _ in range(6)]
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
        assert trace.deepest("hook", without=("mark_ready", "begin_backward")) == 1, "a small gradient"
        assert trace.deepest("hook", with_="begin_reduce", without=("begin_backward",)) <= 5, "a full bucket"
        assert trace.deepest("_ended") <= 9, "the end of backward"

        way = {file.removeprefix("gradients/") for file in trace.files if file.startswith("gradients/")}
        participants = {file for file in trace.files if file.startswith("participants/")}
        assert participants == {f"participants/{file}" for file in PARTICIPANTS}
        doc = torchring.gradients.__doc__
        assert doc is not None
        assert way - {"weights.py"} == listed(doc)
        assert trace.files - WAITING - {f"gradients/{file}" for file in way} - participants == ENGINE

        page = listed((ROOT / "docs" / "background" / "how-it-works.md").read_text(), "torchring/")
        assert page <= trace.files
        assert {f"gradients/{file}" for file in listed(doc)} - page == {
            f"gradients/{file}" for file in ("views.py", "ledger.py", "agreement.py", "group.py", "reduction.py")
        }
        assert len(page) == 8
        assert sum((PACKAGE / file).read_bytes().count(b"\n") for file in page) <= 2_600
