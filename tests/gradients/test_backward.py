"""The end of the outermost backward is noticed exactly once, however backward is nested or ends."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from torchring.gradients.hooks import BackwardWatch


class Recorder:
    """What hooks.py does with a watch: every gradient arms it if it is not armed. `events` is what happened."""

    def __init__(self, *modules: torch.nn.Module) -> None:
        self.events: list[str] = []
        self.at_end: list[Callable[[], None]] = []
        self.watch = BackwardWatch(self._end, lambda: self.events.append("abort"))
        self.modules = modules
        self.parameters = [p for module in modules for p in module.parameters()]
        for i, parameter in enumerate(self.parameters):
            parameter.register_post_accumulate_grad_hook(lambda _, i=i: self._arrived(i))

    def _arrived(self, index: int) -> None:
        if not self.watch.is_armed:
            self.watch.arm()
        self.events.append(f"p{index}")

    def _end(self) -> None:
        self.events.append("end")
        for action in self.at_end:
            action()

    def take(self) -> list[str]:
        events, self.events = self.events, []
        for parameter in self.parameters:
            parameter.grad = None
        assert not self.watch.is_armed
        return events


def linears(count: int) -> list[torch.nn.Linear]:
    return [torch.nn.Linear(3, 3, bias=False) for _ in range(count)]


def X() -> torch.Tensor:
    return torch.randn(2, 3, requires_grad=True)


def reentrant(function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return checkpoint(function, x, use_reentrant=True)


def test_end_comes_once_after_all_gradients() -> None:
    a, b, c = linears(3)
    recorder = Recorder(a, b, c)
    c(b(a(X()))).sum().backward()
    assert recorder.take() == ["p2", "p1", "p0", "end"]


def test_end_comes_before_backward_returns_and_on_its_thread() -> None:
    (a,) = linears(1)
    recorder = Recorder(a)
    threads: list[threading.Thread] = []
    recorder.at_end.append(lambda: threads.append(threading.current_thread()))
    a(X()).sum().backward()
    assert threads == [threading.current_thread()]
    assert a.weight.grad is not None


def test_every_backward_has_its_own_end() -> None:
    a, b = linears(2)
    recorder = Recorder(a, b)
    for _ in range(3):
        b(a(X())).sum().backward()
    a(X()).sum().backward()
    assert recorder.take() == ["p1", "p0", "end"] * 3 + ["p0", "end"]


def test_retain_graph() -> None:
    a, b = linears(2)
    recorder = Recorder(a, b)
    loss = b(a(X())).sum()
    loss.backward(retain_graph=True)
    loss.backward(retain_graph=True)
    loss.backward()
    assert recorder.take() == ["p1", "p0", "end"] * 3


def test_a_backward_that_reaches_none_of_the_parameters() -> None:
    a, b = linears(2)
    recorder = Recorder(a)
    b(X()).sum().backward()
    torch.autograd.grad(a(X()).sum(), a.weight)
    assert recorder.take() == []


def test_two_watches_on_one_backward() -> None:
    a, b = linears(2)
    first, second = Recorder(a), Recorder(b)
    b(a(X())).sum().backward()
    assert [first.take(), second.take()] == [["p0", "end"], ["p0", "end"]]


def test_a_backward_started_at_the_end_of_another() -> None:
    a, b = linears(2)
    recorder = Recorder(a, b)

    def another() -> None:
        recorder.at_end.clear()
        with torch.enable_grad():
            b(X()).sum().backward()

    recorder.at_end.append(another)
    a(X()).sum().backward()
    assert recorder.take() == ["p0", "end", "p1", "end"]


# Reentrant checkpointing: a backward inside a backward


def test_parameters_in_the_inner_backward_only() -> None:
    a, b = linears(2)
    recorder = Recorder(a, b)
    for _ in range(2):
        reentrant(lambda x: b(a(x)), X()).sum().backward()
        assert recorder.take() == ["p1", "p0", "end"]


def test_inner_parameters_and_outer_ones_on_both_sides() -> None:
    a, b, c = linears(3)
    recorder = Recorder(a, b, c)
    for _ in range(2):
        c(reentrant(b, a(X()))).sum().backward()
        assert recorder.take() == ["p2", "p1", "p0", "end"]


def test_inner_first_then_outer() -> None:
    a, b = linears(2)
    recorder = Recorder(a, b)
    reentrant(b, a(X())).sum().backward()
    assert recorder.take() == ["p1", "p0", "end"]


def test_several_inner_backwards_in_one_outer() -> None:
    layers = linears(4)
    recorder = Recorder(*layers)
    for _ in range(2):
        x = X()
        for layer in layers:
            x = reentrant(layer, x)
        x.sum().backward()
        assert recorder.take() == ["p3", "p2", "p1", "p0", "end"]


def test_inner_backward_among_layers_that_have_no_parameters() -> None:
    a, b = linears(2)
    recorder = Recorder(a, b)
    x = torch.tanh(reentrant(lambda x: torch.relu(a(x)), X() * 2) * 3)
    y = torch.sin(reentrant(b, x))
    y.exp().sum().backward()
    assert recorder.take() == ["p1", "p0", "end"]


def test_nested_twice() -> None:
    a, b, c = linears(3)
    recorder = Recorder(a, b, c)
    for _ in range(2):
        reentrant(lambda x: c(reentrant(lambda y: b(reentrant(a, y)), x)), X()).sum().backward()
        assert recorder.take() == ["p2", "p1", "p0", "end"]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_nested_twice_with_parameters_in_the_innermost_only() -> None:
    (a,) = linears(1)
    recorder = Recorder(a)
    for _ in range(2):
        loss = reentrant(lambda x: reentrant(lambda y: a(torch.relu(y)), x * 2) + 1, X() * 3).tanh().sum()
        loss.backward()
        assert recorder.take() == ["p0", "end"]


def test_nested_and_plain_mixed() -> None:
    a, b, c, d, e = linears(5)
    recorder = Recorder(a, b, c, d, e)
    for _ in range(2):
        x = a(X())
        x = reentrant(lambda x: c(reentrant(b, x)), x)
        x = checkpoint(d, x, use_reentrant=False)
        e(x).sum().backward()
        assert recorder.take() == ["p4", "p3", "p2", "p1", "p0", "end"]


def test_inner_backward_in_one_of_two_branches() -> None:
    a, b, c = linears(3)
    recorder = Recorder(a, b, c)
    x = c(X())
    (reentrant(a, x) + b(x)).sum().backward()
    events = recorder.take()
    assert sorted(events[:2]) == ["p0", "p1"]
    assert events[2:] == ["p2", "end"]


def test_checkpoint_without_reentrance() -> None:
    a, b = linears(2)
    recorder = Recorder(a, b)
    checkpoint(lambda x: b(a(x)), X(), use_reentrant=False).sum().backward()
    assert recorder.take() == ["p1", "p0", "end"]


# Backward raises


class Fail(torch.autograd.Function):
    """Identity whose backward raises while `broken`."""

    broken = True

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:
        if Fail.broken:
            raise ValueError("aborted")
        return grad


def backward_fails(loss: torch.Tensor) -> None:
    Fail.broken = True
    try:
        with pytest.raises(ValueError, match="aborted"):
            loss.backward()
    finally:
        Fail.broken = False


def fail(x: torch.Tensor) -> torch.Tensor:
    return Fail.apply(x)


def test_abort_comes_once_and_the_next_backward_is_fine() -> None:
    a, b = linears(2)
    recorder = Recorder(a, b)
    for _ in range(2):
        backward_fails(b(fail(a(X()))).sum())
        assert recorder.take() == ["p1", "abort"]
        b(a(X())).sum().backward()
        assert recorder.take() == ["p1", "p0", "end"]


def test_backward_that_fails_before_any_gradient() -> None:
    a, b = linears(2)
    recorder = Recorder(a, b)
    backward_fails(fail(b(a(X()))).sum())
    assert recorder.take() == []
    b(a(X())).sum().backward()
    assert recorder.take() == ["p1", "p0", "end"]


def test_abort_although_the_exception_and_the_graph_live_on() -> None:
    a, b = linears(2)
    recorder = Recorder(a, b)
    loss = b(fail(a(X()))).sum()
    Fail.broken = True
    kept: list[BaseException] = []
    try:
        loss.backward(retain_graph=True)
    except ValueError as error:
        kept.append(error)
    Fail.broken = False
    assert len(kept) == 1
    assert recorder.take() == ["p1", "abort"]
    loss.backward()
    assert recorder.take() == ["p1", "p0", "end"]


@pytest.mark.parametrize("place", ["in the inner", "after the inner", "before the inner"])
def test_abort_around_an_inner_backward(place: str) -> None:
    a, b, c = linears(3)
    recorder = Recorder(a, b, c)

    def inner(x: torch.Tensor) -> torch.Tensor:
        return b(fail(x) if place == "in the inner" else x)

    def loss() -> torch.Tensor:
        x = a(X())
        x = reentrant(inner, fail(x) if place == "after the inner" else x)
        return c(fail(x) if place == "before the inner" else x).sum()

    for _ in range(2):
        backward_fails(loss())
        reached = ["p2"] if place == "before the inner" else ["p2", "p1"]
        assert recorder.take() == [*reached, "abort"]
        loss().backward()
        assert recorder.take() == ["p2", "p1", "p0", "end"]


def test_abort_where_only_the_inner_backward_had_parameters() -> None:
    (a,) = linears(1)
    recorder = Recorder(a)
    for _ in range(2):
        backward_fails(reentrant(a, fail(X() * 2)).sum())
        assert recorder.take() == ["p0", "abort"]
        reentrant(a, X()).sum().backward()
        assert recorder.take() == ["p0", "end"]


def test_abort_in_an_inner_backward_nested_twice() -> None:
    a, b = linears(2)
    recorder = Recorder(a, b)
    backward_fails(reentrant(lambda x: b(reentrant(lambda y: a(fail(y)), x)), X()).sum())
    assert recorder.take() == ["p1", "p0", "abort"]
    b(a(X())).sum().backward()
    assert recorder.take() == ["p1", "p0", "end"]


def test_a_hook_that_raises() -> None:
    a, b = linears(2)
    recorder = Recorder(a, b)

    def refuse(_: torch.Tensor) -> None:
        raise ValueError("no more")

    handle = a.weight.register_post_accumulate_grad_hook(refuse)
    with pytest.raises(ValueError, match="no more"):
        b(a(X())).sum().backward()
    assert recorder.take() == ["p1", "p0", "abort"]
    handle.remove()
    b(a(X())).sum().backward()
    assert recorder.take() == ["p1", "p0", "end"]


def test_an_end_that_raises_comes_out_of_backward() -> None:
    a, b = linears(2)
    recorder = Recorder(a, b)

    def refuse() -> None:
        raise ValueError("cannot finish")

    recorder.at_end.append(refuse)
    with pytest.raises(ValueError, match="cannot finish"):
        b(a(X())).sum().backward()
    assert recorder.take() == ["p1", "p0", "end", "abort"]  # what the end had left half done is taken back
    recorder.at_end.clear()
    b(a(X())).sum().backward()
    assert recorder.take() == ["p1", "p0", "end"]
