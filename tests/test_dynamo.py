"""torch.compile around the training step: backward runs inside, and Dynamo looks at every hook that it calls.

And a model that is compiled as a whole: it trains right, and torchring says that no communication is hidden.
"""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal

import pytest
import torch
from torchring.participants.recording import BurstWatch

import torchring
from tests.support.checks import assert_bitwise
from tests.support.harness import run_ranks
from torchring.default_world import default_world
from torchring.observe.services import recorder_of
from torchring.participants import recording


def _train(rank: int, compile: Callable[[Any], Any] | None) -> tuple[list[torch.Tensor], list[float]]:
    """Three steps; the second one lays out the buckets anew. The sum is one that breaks the graph, too."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = (model(x) - y).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return torchring.all_reduce(loss.detach())

    if compile is not None:
        step = compile(step)
    data = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(float(step(torch.randn(5, 4, generator=data), torch.randn(5, 2, generator=data))))
        optimizer.step()
    optimizer.close()
    return [parameter.detach() for parameter in model.parameters()], losses


def _with(backend: str) -> Callable[[Any], Any]:
    return lambda step: torch.compile(step, backend=backend)


def _compile(rank: int, size: int) -> Any:
    expected, losses = _train(rank, None)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Dynamo does not know how to trace")  # a page each
        for compile in (_with("eager"), _with("aot_eager")):
            torch._dynamo.reset()  # type: ignore[no-untyped-call]
            parameters, compiled_losses = _train(rank, compile)
            for parameter, same in zip(parameters, expected, strict=True):
                assert_bitwise(parameter, same)
            assert compiled_losses == losses
    torch._dynamo.reset()  # type: ignore[no-untyped-call]
    with (
        torch._dynamo.config.patch(compiled_autograd=True),  # type: ignore[no-untyped-call]
        pytest.raises(torchring.GradientError, match=r"torch._dynamo.config.compiled_autograd = False"),
    ):
        _train(rank, _with("eager"))
    return [parameter.tolist() for parameter in expected]


def _on_a_rank(rank: int, size: int) -> tuple[Any, Any]:
    return _compile(rank, size), _looks(rank)


@pytest.fixture(scope="module")
def of_ranks() -> list[tuple[Any, Any]]:
    return run_ranks(_on_a_rank, 2, deadline=150.0)


def test_a_compiled_step_gives_the_same_bits_and_compiled_autograd_is_refused(of_ranks: list[tuple[Any, Any]]) -> None:
    (first, _), (second, _) = of_ranks
    assert first == second


# Gradients that arrive together


def _notes(compile: Callable[[Any], Any], overlap: Literal["thread", "inline"]) -> list[tuple[int, int, bool]]:
    """(gradients, nanoseconds since the last step, whether forward was seen) of each backward that was looked at."""
    notes: list[tuple[int, int, bool]] = []

    def note(self: BurstWatch, ready_ns: Sequence[int], before_ns: int, *, is_forward_known: bool, hides: bool) -> None:
        notes.append((len(ready_ns), before_ns, is_forward_known))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BurstWatch, "note", note)
        model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = torchring.wrap(sgd, model, overlap=overlap, bucket_mb=1e-4)
        assert optimizer.stats().num_buckets > 1
        run = compile(model)
        for _ in range(4):
            optimizer.zero_grad()
            run(torch.ones(2, 8)).sum().backward()
            optimizer.step()
        optimizer.close()
    return notes


def _looks(rank: int) -> list[Any]:
    whole = _notes(_with("aot_eager"), "thread")
    layers = _notes(lambda model: model, "thread")
    inline = _notes(lambda model: model, "inline")
    assert all(length == 6 and before_ns > 0 for length, before_ns, _ in (*whole, *layers))
    return [[is_known for *_, is_known in notes] for notes in (whole, layers, inline)]


def test_only_backwards_that_could_hide_communication_are_looked_at(of_ranks: list[tuple[Any, Any]]) -> None:
    """From the third on, when buckets are final. A graph leaves out the hooks that see forward."""
    assert [looks for _, looks in of_ranks] == [[[False] * 2, [True] * 2, []]] * 2


TOGETHER, APART = [100, 104, 109], [10, 60, 109]


@pytest.mark.parametrize(
    ("backwards", "hides", "is_told"),
    [
        ([TOGETHER] * 3, False, True),
        ([TOGETHER] * 9, True, False),
        ([TOGETHER] * 2, False, False),
        ([TOGETHER, TOGETHER, APART] * 9, False, False),
        ([[100, -1, -1]] * 9, False, False),
    ],
)
def test_gradients_that_arrive_together_are_found(
    backwards: list[list[int]], hides: bool, is_told: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "has_compiled", lambda: True)
    watch = BurstWatch()
    for ready in backwards:
        watch.note(ready, 1_000_000, is_forward_known=True, hides=hides)
    assert bool(watch.finding) == is_told
    assert not is_told or "layer.compile()" in watch.finding


def test_without_the_end_of_forward_the_whole_step_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a script that compiles nothing has some other reason."""

    def is_told(before_ns: int, *, compiles: bool = True) -> bool:
        monkeypatch.setattr(recording, "has_compiled", lambda: compiles)
        watch = BurstWatch()
        for _ in range(3):
            watch.note([0, 5, 10], before_ns, is_forward_known=False, hides=False)
        return bool(watch.finding)

    assert is_told(90)
    assert not is_told(89)
    assert not is_told(90, compiles=False)


class _ListHandler(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def _train_whole(rank: int, size: int) -> tuple[str, str, list[str]]:
    """Train a model in one graph whose gradients arrive at once: what stats(), the trace and the log say."""
    handler = _ListHandler()
    logging.getLogger("torchring").addHandler(handler)
    note = BurstWatch.note

    def note_burst(self: BurstWatch, ready_ns: Sequence[int], before_ns: int, **known: bool) -> None:
        note(self, [10**9 + i for i in range(len(ready_ns))], before_ns, is_forward_known=True, hides=False)

    def train(model: torch.nn.Module, run: Any) -> str:
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = torchring.wrap(sgd, model, overlap="thread", bucket_mb=1e-4)
        for step in range(6):
            optimizer.zero_grad()
            run(torch.full((2, 8), rank + step / 8.0)).square().sum().backward()
            optimizer.step()
        reason = optimizer.stats().reason
        optimizer.close()
        return reason

    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
    plain = copy.deepcopy(model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(BurstWatch, "note", note_burst)
        torch._dynamo.reset()  # type: ignore[no-untyped-call]
        reason = train(model, torch.compile(model, backend="aot_eager"))
        run_info = recorder_of(default_world()).run_info
    train(plain, plain)
    for parameter, same in zip(model.parameters(), plain.parameters(), strict=True):
        assert_bitwise(parameter.detach(), same.detach())
    assert run_info is not None
    return reason, run_info.finding, handler.messages


def test_a_model_in_one_graph_trains_right_and_says_what_that_costs() -> None:
    for rank, (in_stats, in_trace, logged) in enumerate(run_ranks(_train_whole, 2, deadline=150.0)):
        assert "all gradients arrive together at the end of backward()" in in_stats
        assert "all gradients arrive together" in in_trace
        assert len(logged) == (rank == 0), "rank 0 warns once"
