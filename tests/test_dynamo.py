"""torch.compile around the training step: backward runs inside, and Dynamo looks at every hook that it calls.

And a model that is compiled as a whole: it trains right, and the report says that no communication is hidden. With
torchring's backend its gradients arrive layer by layer.
"""

import copy
import dataclasses
import warnings
from typing import Any

import pytest
import torch

import torchring
from tests.support.checks import assert_bitwise, assert_same_everywhere
from tests.support.harness import ranks, run_ranks
from tests.support.traces import decoded
from torchring.observe.recorder.records import Arrivals, RankTrace
from torchring.observe.recorder.writer import recorder_of
from torchring.report.model.merge import merge
from torchring.report.verdict.analysis import analyse


def _train(rank: int, backend: str | None) -> tuple[list[torch.Tensor], list[float]]:
    """Three steps; the second one lays out the buckets anew. The sum is one that breaks the graph, too."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
    optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = (model(x) - y).square().mean()
        loss.backward()  # type: ignore[no-untyped-call]
        return torchring.all_reduce(loss.detach())

    if backend is not None:
        step = torch.compile(step, backend=backend)
    data = torch.Generator().manual_seed(rank)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        losses.append(float(step(torch.randn(5, 4, generator=data), torch.randn(5, 2, generator=data))))
        optimizer.step()
    optimizer.close()
    return [parameter.detach() for parameter in model.parameters()], losses


@ranks(2, run_ranks, deadline=150.0)
def test_a_compiled_step_gives_the_same_bits_and_compiled_autograd_is_refused(rank: int) -> None:
    expected, losses = _train(rank, None)
    torch._dynamo.reset()  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "Dynamo does not know how to trace")  # a page each
        parameters, compiled_losses = _train(rank, "aot_eager")
    for parameter, same in zip(parameters, expected, strict=True):
        assert_bitwise(parameter, same)
    assert compiled_losses == losses
    torch._dynamo.reset()  # type: ignore[no-untyped-call]
    with (
        torch._dynamo.config.patch(compiled_autograd=True),  # type: ignore[no-untyped-call]
        pytest.raises(torchring.GradientError, match=r"torch._dynamo.config.compiled_autograd = False"),
    ):
        _train(rank, "eager")
    assert_same_everywhere(expected)


def _train_whole(rank: int, size: int) -> RankTrace:
    """Train a model in one graph, whose gradients arrive at once."""

    def train(model: torch.nn.Module, run: Any) -> RankTrace:
        recorder = recorder_of(torchring.init())
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = torchring.wrap(sgd, model, overlap="thread", bucket_mb=1e-4)
        for step in range(6):
            optimizer.zero_grad()
            run(torch.full((2, 8), rank + step / 8.0)).square().sum().backward()
            optimizer.step()
        optimizer.close()
        return decoded(*recorder.trace())

    model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
    plain, in_parts = copy.deepcopy(model), copy.deepcopy(model)
    torch._dynamo.reset()  # type: ignore[no-untyped-call]
    trace = train(model, torch.compile(model, backend="aot_eager"))
    backend = torchring.compile_backend("aot_eager", bucket_mb=1e-4)  # a layer in each part
    train(in_parts, compiled := torch.compile(in_parts, backend=backend))
    train(plain, plain)
    for others in zip(model.parameters(), in_parts.parameters(), plain.parameters(), strict=True):
        assert_bitwise(others[0].detach(), others[2].detach())
        assert_bitwise(others[1].detach(), others[2].detach())
    order = _order_of_backward(in_parts, compiled)
    assert [{*part} for part in order.split("g")] == [set(), {*"45"}, {*"23"}, {*"01"}]
    return trace


def _order_of_backward(model: torch.nn.Module, compiled: Any) -> str:
    """g: a graph is about to run. 5: parameter 5 has its gradient."""
    order: list[str] = []
    for i, parameter in enumerate(model.parameters()):
        parameter.register_post_accumulate_grad_hook(lambda _, i=i: order.append(str(i)))  # type: ignore[no-untyped-call]
    out = compiled(torch.ones(2, 8))
    node = out.grad_fn
    while node is not None:
        node.register_prehook(lambda _: order.append("g"))
        node = next((other for other, _ in node.next_functions if other and "Compiled" in other.name()), None)
    out.sum().backward()
    return "".join(order)


def test_a_model_in_one_graph_trains_right_and_the_report_says_what_that_costs() -> None:
    traces = run_ranks(_train_whole, 2, deadline=150.0)
    assert all(trace.run_info.is_compiled and trace.arrivals for trace in traces)
    # A loaded machine may put a rank to sleep between two gradients.
    traces = [dataclasses.replace(it, arrivals=[Arrivals(9, (9, 9, 8, 8, 8, 8))], steps=it.steps[2:]) for it in traces]
    assert any("All gradients arrive together" in problem for problem in analyse(merge(traces)).problems)


def test_a_backend_that_does_not_exist_is_refused_at_once() -> None:
    with pytest.raises(RuntimeError, match="ductor"):
        torchring.compile_backend("ductor")
    with pytest.raises(ValueError, match="bucket_mb must be positive, got 0"):
        torchring.compile_backend(bucket_mb=0)
