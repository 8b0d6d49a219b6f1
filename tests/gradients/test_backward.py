"""The end of the outermost backward is noticed exactly once, however backward is nested or ends."""

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


def test_every_backward_that_reaches_a_parameter_has_its_own_end_before_it_returns_and_on_its_thread() -> None:
    a, b = linears(2)
    recorder, another = Recorder(a, b), Recorder(b)
    threads: list[threading.Thread] = []
    recorder.at_end.append(lambda: threads.append(threading.current_thread()))
    for _ in range(2):
        b(a(X())).sum().backward()
    a(X()).sum().backward()
    loss = b(a(X())).sum()
    loss.backward(retain_graph=True)
    loss.backward()
    torch.autograd.grad(a(X()).sum(), a.weight)
    assert recorder.take() == ["p1", "p0", "end"] * 2 + ["p0", "end"] + ["p1", "p0", "end"] * 2
    assert another.take() == ["p0", "end"] * 4
    assert threads == [threading.current_thread()] * 5


# Reentrant checkpointing: a backward inside a backward

GRAPHS: dict[str, tuple[int, Callable[..., torch.Tensor]]] = {
    "a row of layers": (3, lambda x, a, b, c: c(b(a(x)))),
    "parameters in the inner backward only": (2, lambda x, a, b: reentrant(lambda y: b(a(y)), x)),
    "inner ones, and outer ones on both sides": (3, lambda x, a, b, c: c(reentrant(b, a(x)))),
    "layers without parameters": (
        2, lambda x, a, b: reentrant(b, torch.tanh(reentrant(lambda y: torch.relu(a(y)), x * 2) * 3)).sin().exp()
    ),
    "nested twice, parameters in the innermost only": (
        1, lambda x, a: reentrant(lambda y: reentrant(lambda z: a(torch.relu(z)), y * 2) + 1, x * 3).tanh()
    ),
    "nested and plain": (
        5,
        lambda x, a, b, c, d, e: e(
            checkpoint(d, reentrant(lambda y: c(reentrant(b, y)), a(x)), use_reentrant=False)
        ),
    ),
    "in one of two branches": (2, lambda x, a, b: reentrant(b, x) + a(x)),
}  # fmt: skip


def all_of(count: int) -> list[str]:
    return [*(f"p{i}" for i in reversed(range(count))), "end"]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("graph", GRAPHS)
def test_end_comes_once_after_all_gradients(graph: str) -> None:
    count, output = GRAPHS[graph]
    layers = linears(count)
    recorder = Recorder(*layers)
    for _ in range(2):
        output(X(), *layers).sum().backward()
        events = recorder.take()
        assert (sorted(events[:-1], reverse=True), events[-1]) == (all_of(count)[:-1], "end")
        assert "branches" in graph or events == all_of(count)


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


def fail(x: torch.Tensor) -> torch.Tensor:
    return Fail.apply(x)


ABORTED: dict[str, tuple[int, Callable[..., torch.Tensor], list[str]]] = {
    "in a row of layers": (2, lambda x, a, b: b(fail(a(x))), ["p1", "abort"]),
    "before any gradient": (2, lambda x, a, b: fail(b(a(x))), []),
    "in the inner": (3, lambda x, a, b, c: c(reentrant(lambda y: b(fail(y)), a(x))), ["p2", "p1", "abort"]),
    "before the inner": (3, lambda x, a, b, c: c(fail(reentrant(b, a(x)))), ["p2", "abort"]),
    "only the inner has parameters": (1, lambda x, a: reentrant(a, fail(x * 2)), ["p0", "abort"]),
    "nested twice": (
        2, lambda x, a, b: reentrant(lambda y: b(reentrant(lambda z: a(fail(z)), y)), x), ["p1", "p0", "abort"]
    ),
}  # fmt: skip


@pytest.mark.parametrize("where", ABORTED)
def test_abort_comes_once_and_the_next_backward_is_fine(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    count, output, events = ABORTED[where]
    layers = linears(count)
    recorder = Recorder(*layers)
    for _ in range(2):
        monkeypatch.setattr(Fail, "broken", True)
        loss = output(X(), *layers).sum()
        with pytest.raises(ValueError, match="aborted") as caught:  # which lives on, as does the graph
            loss.backward(retain_graph=True)
        assert recorder.take() == events
        monkeypatch.setattr(Fail, "broken", False)
        output(X(), *layers).sum().backward()
        assert recorder.take() == all_of(count)
        assert str(caught.value) == "aborted"


@pytest.mark.parametrize(
    ("where", "events"),
    [
        ("hook", ["p1", "p0", "abort"]),
        ("end", ["p1", "p0", "end", "abort"]),
    ],  # what the end had half done is taken back
)
def test_a_hook_or_an_end_that_raises_comes_out_of_backward(where: str, events: list[str]) -> None:
    a, b = linears(2)
    recorder = Recorder(a, b)

    def refuse(*_: torch.Tensor) -> None:
        raise ValueError("no more")

    handle = a.weight.register_post_accumulate_grad_hook(refuse) if where == "hook" else None
    if handle is None:
        recorder.at_end.append(refuse)
    with pytest.raises(ValueError, match="no more"):
        b(a(X())).sum().backward()
    assert recorder.take() == events
    recorder.at_end.clear()
    if handle is not None:
        handle.remove()
    b(a(X())).sum().backward()
    assert recorder.take() == ["p1", "p0", "end"]
