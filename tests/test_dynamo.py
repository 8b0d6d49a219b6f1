"""torch.compile around the training step: backward runs inside, and Dynamo looks at every hook that it calls.

And torchring.compile, which cuts a model so that gradients arrive while backward still computes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from checks import assert_bitwise
from harness import run_ranks
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.backends.distributed import DDPOptimizer

import torchring


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


def test_a_compiled_step_gives_the_same_bits_and_compiled_autograd_is_refused() -> None:
    first, second = run_ranks(_compile, 2, deadline=150.0)
    assert first == second


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


def test_gradients_arrive_part_by_part() -> None:
    """A layer has 80 bytes. torch.compile computes all gradients before it hands over the first."""
    assert sorted(_events(torch.compile)[1:]) == ["0", "1", "2"]

    def in_parts(num_bytes: int) -> list[str]:
        torch._dynamo.reset()  # type: ignore[no-untyped-call]
        return _events(lambda model, backend: torchring.compile(model, backend=backend, bucket_mb=num_bytes / 2**20))

    assert in_parts(80) == ["part", "2", "part", "1", "part", "0"]
    of_two = in_parts(81)  # the first 81 bytes are those of two layers
    assert [of_two[0], {*of_two[1:3]}, *of_two[3:]] == ["part", {"1", "2"}, "part", "0"]


def test_options_reach_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor has other names for them than torch.compile."""
    given: list[Any] = []

    def inductor(graph: Any, inputs: Any, **arguments: Any) -> Any:
        given.append(arguments)
        return graph

    def compile(**options: Any) -> Any:
        torch._dynamo.reset()  # type: ignore[no-untyped-call]
        torchring.compile(torch.nn.Linear(2, 2), **options)(torch.ones(1, 2))
        return given.pop()

    assert compile(backend=inductor, mode="fast", fullgraph=True) == {"mode": "fast"}
    find = torch._dynamo.lookup_backend
    monkeypatch.setattr(torch._dynamo, "lookup_backend", lambda name: inductor if name == "inductor" else find(name))
    assert compile() == {}
    assert compile(options={"max_autotune": True}) == {"config_patches": {"max_autotune": True}}
    modes = torch._inductor.list_mode_options()
    assert compile(mode="reduce-overhead") == {"config_patches": modes["reduce-overhead"]}
    with pytest.raises(ValueError, match="bucket_mb must be greater than 0, got 0"):
        torchring.compile(torch.nn.Linear(2, 2), bucket_mb=0)


def test_a_model_that_cannot_be_cut_is_compiled_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_fn(self: DDPOptimizer, *_: Any) -> Any:
        raise NotImplementedError("a higher order op")

    monkeypatch.setattr(DDPOptimizer, "compile_fn", compile_fn)
    with pytest.warns(RuntimeWarning, match="compiles this graph as a whole: a higher order op"):
        assert _events(lambda model, backend: torchring.compile(model, backend=backend, bucket_mb=1e-5))[0] == "part"
