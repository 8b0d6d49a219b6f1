"""torch.compile around the training step: backward runs inside, and Dynamo looks at every hook that it calls.

And torchring.compile, which cuts a model so that gradients arrive while backward still computes.
"""

from __future__ import annotations

import importlib
import logging
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, cast

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.distributed import DDPOptimizer
from torch._inductor.utils import get_donated_idxs

import torchring
from tests.support.checks import assert_bitwise
from tests.support.harness import run_ranks
from torchring import dynamo
from torchring.dynamo import has_compiled_whole
from torchring.gradients import bursts
from torchring.gradients.bursts import BurstWatch


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


def _in_parts(step: Any) -> Any:
    return torchring.compile(step, backend="aot_eager", bucket_mb=1e-5)


def _compile(rank: int, size: int) -> Any:
    expected, losses = _train(rank, None)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Dynamo does not know how to trace")  # a page each
        for compile in (_with("eager"), _with("aot_eager"), _in_parts):
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
    """By one rank, from the third on, when buckets are final. A graph leaves out the hooks that see forward."""
    assert [looks for _, looks in of_ranks] == [[[False] * 2, [True] * 2, []], [[], [], []]]


TOGETHER, APART = [100, 104, 109], [10, 60, 109]


@pytest.mark.parametrize(
    ("backwards", "hides", "num_warnings"),
    [
        ([TOGETHER] * 9, False, 1),
        ([TOGETHER] * 9, True, 0),
        ([TOGETHER] * 2, False, 0),
        ([TOGETHER, TOGETHER, APART] * 9, False, 0),
        ([[100, -1, -1]] * 9, False, 0),
    ],
)
def test_gradients_that_arrive_together_are_said_so_once(
    backwards: list[list[int]],
    hides: bool,
    num_warnings: int,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(bursts, "has_compiled_whole", lambda: True)
    caplog.set_level(logging.WARNING)
    watch = BurstWatch()
    for ready in backwards:
        watch.note(ready, 1_000_000, is_forward_known=True, hides=hides)
    assert [each.name for each in caplog.records] == ["torchring"] * num_warnings
    assert all("torchring.compile(model)" in each.message for each in caplog.records)


def test_without_the_end_of_forward_the_whole_step_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a script that compiles nothing has some other reason."""

    def is_told(before_ns: int, *, compiles: bool = True) -> bool:
        monkeypatch.setattr(bursts, "has_compiled_whole", lambda: compiles)
        watch = BurstWatch()
        for _ in range(3):
            watch.note([0, 5, 10], before_ns, is_forward_known=False, hides=False)
        return watch.is_over

    assert is_told(90)
    assert not is_told(89)
    assert not is_told(90, compiles=False)


# torchring.compile


@pytest.fixture(autouse=True)
def _forget_graphs() -> Iterator[None]:
    yield
    torch._dynamo.reset()  # type: ignore[no-untyped-call]


def _events(compile: Callable[..., Any]) -> list[str]:
    """What happens in a backward through three layers: "part" when a compiled part computes, and gradients."""
    events: list[str] = []

    def compile_backward(graph: Any, inputs: Any) -> Any:
        def run(*arguments: Any) -> Any:
            events.append("part")
            return graph(*arguments)

        return torch._functorch.aot_autograd.make_boxed_func(run)

    def compile_forward(graph: Any, inputs: Any) -> Any:
        return torch._functorch.aot_autograd.make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=compile_forward, bw_compiler=compile_backward)
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
    for name, parameter in model.named_parameters():
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: events.append(name))
    compile(model, backend=backend)(torch.ones(2, 4)).sum().backward()
    return [name.removesuffix(".weight") for name in events if not name.endswith("bias")]


def test_gradients_arrive_part_by_part(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer has 80 bytes. torch.compile computes all gradients before it hands over the first."""
    monkeypatch.setattr(dynamo, "_has_cut", False)
    torch._dynamo.utils.counters.clear()
    assert not has_compiled_whole()
    assert sorted(_events(torch.compile)[1:]) == ["0", "1", "2"]
    assert has_compiled_whole()

    def in_parts(num_bytes: int) -> list[str]:
        torch._dynamo.reset()  # type: ignore[no-untyped-call]
        return _events(lambda model, backend: torchring.compile(model, backend=backend, bucket_mb=num_bytes / 2**20))

    assert in_parts(80) == ["part", "2", "part", "1", "part", "0"]
    assert not has_compiled_whole(), "who has cut a graph needs no advice"
    of_two = in_parts(81)  # the first 81 bytes are those of two layers
    assert [of_two[0], {*of_two[1:3]}, *of_two[3:]] == ["part", {"1", "2"}, "part", "0"]


def test_options_reach_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor has other names for them than torch.compile."""
    given: list[Any] = []

    def backend(graph: Any, inputs: Any, **arguments: Any) -> Any:
        given.append(arguments)
        return graph

    def compile(**options: Any) -> Any:
        torch._dynamo.reset()  # type: ignore[no-untyped-call]
        torchring.compile(**options)(torch.nn.Linear(2, 2))(torch.ones(1, 2))
        return given.pop()

    assert compile(backend=backend, mode="fast", fullgraph=True) == {"mode": "fast"}
    inductor = importlib.import_module("torch._inductor.compile_fx")
    monkeypatch.setattr(inductor, "compile_fx", lambda *args, config_patches, **_: backend(*args, **config_patches))
    assert compile(bucket_mb=1) == {}
    assert compile(options={"max-autotune": True}) == {"max_autotune": True}
    assert compile(mode="reduce-overhead") == torch._inductor.list_mode_options("reduce-overhead")


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"bucket_mb": 0}, ValueError, "bucket_mb must be a size in MiB greater than 0, got 0"),
        ({"bucket_mb": float("inf")}, ValueError, "got inf"),
        ({"bucket_mb": "25"}, ValueError, "got '25'"),
        ({"mode": "fastest"}, RuntimeError, "fastest"),
        ({"options": {"unheard_of": 1}}, RuntimeError, "unheard_of"),
        ({"mode": "default", "options": {}}, RuntimeError, "either mode or options"),
    ],
)
def test_options_that_do_not_exist_are_errors_at_once(options: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        torchring.compile(torch.nn.Linear(2, 2), **options)


def test_a_model_that_cannot_be_cut_is_compiled_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_fn(self: DDPOptimizer, *_: Any) -> Any:
        raise NotImplementedError("a higher order op")

    monkeypatch.setattr(DDPOptimizer, "compile_fn", compile_fn)
    with pytest.warns(RuntimeWarning, match="compiles this graph as a whole: a higher order op"):
        assert _events(lambda model, backend: torchring.compile(model, backend=backend, bucket_mb=1e-5))[0] == "part"


def test_an_error_of_the_backend_is_raised() -> None:
    """It is no reason to compile the graph again as a whole."""
    num_calls = 0

    def backend(graph: Any, inputs: Any) -> Any:
        nonlocal num_calls
        num_calls += 1
        raise NotImplementedError("this operator")

    with pytest.raises(Exception, match="this operator"):
        torchring.compile(torch.nn.Linear(2, 2), backend=backend)(torch.ones(1, 2))
    assert num_calls == 1


class _Writes(torch.nn.Module):
    """Changes the parameter of a later part. No value leads from the write to the read."""

    def forward(self, layers: torch.nn.Sequential, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            layers[2].weight.mul_(0.5)
        return cast(torch.Tensor, layers(x))


class _MapsAndPullsBack(torch.nn.Module):
    """torch.func with two layers inside. `pull_back` takes values from where the gradient's level is over."""

    def forward(self, layers: torch.nn.Sequential, x: torch.Tensor) -> torch.Tensor:
        x = torch.vmap(layers[:2])(x)
        y, pull_back = torch.func.vjp(layers[1:], x)
        (gradient,) = pull_back(torch.ones_like(y))
        return layers[2](y + gradient)  # type: ignore[no-any-return]


class _Infers(torch.nn.Module):
    """torch.inference_mode with two layers inside."""

    def forward(self, layers: torch.nn.Sequential, x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode():
            scale = layers(x).detach().max()
        return cast(torch.Tensor, layers(x + scale.clone()))


@pytest.mark.parametrize("use", [_Writes(), _MapsAndPullsBack(), _Infers()], ids=lambda use: type(use).__name__)
def test_what_belongs_together_is_not_cut(use: torch.nn.Module) -> None:
    """Small parts give the same bits as no parts."""

    def gradients(compile: Callable[[Any], Any]) -> list[torch.Tensor]:
        torch.manual_seed(0)
        layers = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
        compile(use)(layers, torch.linspace(-1, 1, 8).view(2, 4)).square().sum().backward()
        return [parameter.grad for parameter in layers.parameters() if parameter.grad is not None]

    for expected, gradient in zip(gradients(lambda use: use), gradients(_in_parts), strict=True):
        assert_bitwise(gradient, expected)


def test_no_backward_of_a_part_reuses_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch takes one part for another when it compiles a backward, if the loss leaves out the last part."""
    monkeypatch.setattr(torch._functorch.config, "donated_buffer", True)
    asked: list[Any] = []

    def compile_backward(graph: Any, inputs: Any) -> Any:
        asked.append(get_donated_idxs())
        return torch._functorch.aot_autograd.make_boxed_func(graph.forward)

    def compile_forward(graph: Any, inputs: Any) -> Any:
        return torch._functorch.aot_autograd.make_boxed_func(graph.forward)

    first, last = (torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.Tanh()) for _ in range(2))

    def forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = first(x)
        return x, last(x)

    backend = aot_autograd(fw_compiler=compile_forward, bw_compiler=compile_backward)
    torchring.compile(forward, backend=backend, bucket_mb=1e-5)(torch.ones(2, 4))[0].sum().backward()
    assert asked == [None]
