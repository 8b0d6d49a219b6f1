"""When a backward reduces and when it does not: accumulation, no_sync, several optimizers, and backwards that raise.

Gradients are exact: the loss is linear in the parameters, and inputs are small integers, different on every rank.
"""

import contextlib
import functools
import math
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torchring
from tests.support.checks import assert_bitwise, assert_same_everywhere, digest, exact_inputs
from tests.support.harness import RanksFailed, patient, ranks, run_pooled, run_ranks, wait_until
from tests.support.scripts import Raises
from tests.support.training import attempt
from torchring import DistributedOptimizer
from torchring.default_world import default_world
from torchring.errors import GradientError, RingError
from torchring.gradients.group import OptimizerGroup
from torchring.gradients.layout import BucketLayout
from torchring.gradients.reducer import Reducer
from torchring.gradients.views import CAN_SWAP
from torchring.memory import semaphore


class Net(torch.nn.Module):
    """Two layers that a loss may use one without the other.

    Gradients become ready in the order of registration, so the plan is rebuilt after the first reduction.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Linear(3, 2)
        self.second = torch.nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return 2 * self.second(x).sum() + self.first(x).sum()


def batch(rank: int, step: int = 0) -> Tensor:
    return exact_inputs(6, torch.float32, seed=rank + 7 * step).view(2, 3)


def gradients(loss: Callable[[Tensor], Tensor], model: torch.nn.Module, inputs: Sequence[Tensor]) -> list[Tensor]:
    """The sum of the loss's gradients over `inputs`, without a hook: zero where the loss does not reach."""
    parameters = list(model.parameters())
    total = [torch.zeros_like(p) for p in parameters]
    for x in inputs:
        for mine, new in zip(total, torch.autograd.grad(loss(x), parameters, allow_unused=True), strict=True):
            mine += new if new is not None else 0
    return total


def check_gradients(model: torch.nn.Module, expected: Sequence[Tensor | None], what: str = "") -> None:
    for (name, parameter), value in zip(model.named_parameters(), expected, strict=True):
        assert (parameter.grad is None) is (value is None), f"{what} {name}: {parameter.grad}"
        if parameter.grad is not None and value is not None:
            assert_bitwise(parameter.grad, value, f"{what} {name}")


def mean_over_ranks(losses: Sequence[Callable[[Tensor], Tensor]], model: nn.Module, step: int = 0) -> list[Tensor]:
    """Of one loss for each rank."""
    per_rank = [gradients(loss, model, [batch(rank, step)]) for rank, loss in enumerate(losses)]
    return [torch.stack(each).sum(0) / len(losses) for each in zip(*per_rank, strict=True)]


def wrapped(model: torch.nn.Module, **options: object) -> DistributedOptimizer:
    return torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.5), model, **options)  # type: ignore[arg-type]


# One optimizer


def _local(optimizer: DistributedOptimizer, forward: Callable[[], Tensor]) -> None:
    with optimizer.no_sync():
        forward().backward()


def _after_an_inner_one(optimizer: DistributedOptimizer, forward: Callable[[], Tensor]) -> None:
    with optimizer.no_sync():
        with optimizer.no_sync():
            pass
        forward().backward()


def _left_by_an_exception(optimizer: DistributedOptimizer, forward: Callable[[], Tensor]) -> None:
    with contextlib.suppress(IndexError), optimizer.no_sync(), optimizer.no_sync():
        forward().backward()
        raise IndexError("out of data")


def _after_no_sync(optimizer: DistributedOptimizer, forward: Callable[[], Tensor]) -> None:
    optimizer.no_sync()
    with optimizer.no_sync():
        loss = forward()
    loss.backward()


def _forward_before_no_sync(optimizer: DistributedOptimizer, forward: Callable[[], Tensor]) -> None:
    loss = forward()
    with optimizer.no_sync():
        loss.backward()


# One backward each. "r" is "l" on rank 1 alone; and "z" is zero_grad(), "s" synchronize().
WAYS = {"b": lambda _, forward: forward().backward(), "l": _local, "r": _local, "n": _after_an_inner_one,
        "x": _left_by_an_exception, "a": _after_no_sync, "f": _forward_before_no_sync}  # fmt: skip


@pytest.mark.parametrize(
    ("options", "script", "counts"),
    [
        ({}, "b b z b s", "1 2 2 3 3"),
        ({"compression": "bf16"}, "b b z l b", "1 2 2 2 3"),
        ({"bucket_mb": 0.0}, "b s z b s s z b s", "1 1 1 2 2 2 2 3 3"),
        ({"bucket_mb": 0.0, "op": "sum"}, "b s z b s s z b s", "1 1 1 2 2 2 2 3 3"),
        ({"bucket_mb": 0.0, "op": "sum", "compression": "fp16"}, "b s z b s s z l b", "1 1 1 2 2 2 2 2 3"),
        ({"accumulate": 3}, "b b b z b b b", "0 0 1 1 1 1 2"),
        ({}, "l n l b z a f x b", "0 0 0 1 1 2 2 2 3"),
        ({"accumulate": 2}, "b l l b z l b b", "0 0 0 1 1 1 1 2"),
        ({"accumulate": 3}, "b b b z b s s z b b b z r s", "0 0 1 1 1 2 2 2 2 2 3 3 3 4"),
    ],
)
@ranks(2)
def test_when_a_backward_reduces(options: dict[str, Any], script: str, counts: str, rank: int, world_size: int) -> None:
    """And the number of reductions after each step."""
    model = Net()
    optimizer = wrapped(model, **options)
    total = [torch.zeros_like(p) for p in model.parameters()]  # of which all ranks know
    own: list[list[int]] = [[], []]  # the backwards of each rank that the other does not know of
    found = [0]
    for step, what in enumerate(script.split()):
        if what == "s":
            optimizer.synchronize()
        elif what == "z":
            optimizer.zero_grad()
            total, own = [torch.zeros_like(p) for p in model.parameters()], [[], []]
        else:
            if what != "r" or rank == 1:
                WAYS[what](optimizer, lambda step=step: model(batch(rank, step)))
            for steps in own[1:] if what == "r" else own:
                steps.append(step)
        found.append(optimizer.stats().num_reductions)
        if found[-1] > found[-2]:
            inputs = [batch(each, s) for each, steps in enumerate(own) for s in steps]
            scale = 1.0 if "op" in options else 1 / world_size
            torch._foreach_add_(total, gradients(model, model, inputs), alpha=scale)
            own = [[], []]
        if what not in "zr":
            mine = gradients(model, model, [batch(rank, s) for s in own[rank]])
            check_gradients(model, torch._foreach_add(total, mine), f"{step} {what}")
            assert ("synchronize()" in attempt(optimizer.step)) is bool(own[rank])
    assert " ".join(map(str, found[1:])) == counts
    assert_same_everywhere(model.parameters())


@ranks(2)
def test_no_sync_sends_nothing_where_there_is_another_optimizer(rank: int) -> None:
    """Ranks may run different numbers of backwards inside it, whatever other optimizers there are."""
    model, other = Net(), Net()
    optimizer, _other = wrapped(model), wrapped(other)
    with optimizer.no_sync():
        for step in range(3 - 2 * rank):
            model(batch(rank, step)).backward()
    model(batch(rank, 9)).backward()
    batches = [batch(0, 0), batch(0, 1), batch(0, 2), batch(0, 9), batch(1, 0), batch(1, 9)]
    check_gradients(model, [gradient / 2 for gradient in gradients(model, model, batches)])
    # One of the backwards inside it reaches the other optimizer, too, which is to reduce.
    inside = optimizer.no_sync() if rank == 0 else contextlib.nullcontext()
    with inside, pytest.raises(GradientError, match=r"no_sync\(\) on all ranks, of all optimizers"):
        (model(batch(rank)) + other(batch(rank))).backward()


# Large gradients


@pytest.mark.takes_2_12
@pytest.mark.parametrize("overlap", ["inline", "thread"])
@ranks(2)
def test_large_gradients_are_exact(overlap: str, rank: int, world_size: int) -> None:
    """A rank's own slice of a large gradient is summed from the gradient itself."""
    model = torch.nn.Sequential(*(torch.nn.Linear(420, 420) for _ in range(4)))
    optimizer = wrapped(model, bucket_mb=1.5, algorithm="direct", overlap=overlap)

    def loss(x: Tensor) -> Tensor:
        return torch.stack([(i + 1) * layer(x).sum() for i, layer in enumerate(model)]).sum()

    seen: list[Tensor | None] = []
    for layer in model:
        layer.weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad))
    for step in range(6):
        if step != 4:  # that step's gradients come on top of results
            optimizer.zero_grad(set_to_none=step != 5)
        before = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
        inputs = [exact_inputs(840, torch.float32, seed=10 * step + of).view(2, 420) for of in range(world_size)]
        seen.clear()
        loss(inputs[rank]).backward()
        if rank == 0 and step < 3:  # rank 1's gradients complete a bucket, which leaves before this hook runs
            results = [layer.weight.grad for layer in model]
            assert any(all(grad is not result for result in results) for grad in seen), "all were copied"
        for value, *each in zip(before, *(gradients(loss, model, [x]) for x in inputs), strict=True):
            value += torch.stack(each).sum(0) / world_size
        check_gradients(model, before, f"step {step}")
    assert_same_everywhere(p.grad for p in model.parameters())
    model[3].weight.register_post_accumulate_grad_hook(lambda weight: seen.append(weight.grad.mul_(2)))
    optimizer.zero_grad()
    with pytest.raises(RingError, match=r"3\.weight was written to"):  # on rank 1, which hears of it, too
        loss(inputs[rank]).backward()
    seen.clear()  # autograd's queue still has what has not run, and so the hooks


@ranks(2)
def test_a_new_plan_does_not_take_a_second_set_of_buffers(rank: int) -> None:
    """It is laid out when zero_grad() has let go of the old buffers."""
    layers = [nn.Linear(4, 4) for _ in range(4)]
    model = nn.Sequential(*layers[::-1])  # uses them from the last to the first
    optimizer = wrapped(nn.ModuleList(layers), bucket_mb=80 / 2**20)
    layout = optimizer._sync.layout
    old = [weakref.ref(bucket.wire) for bucket in layout.buckets]
    num_held: list[int] = []
    open_wires = layout.all_reduce.open_wires

    def watched(specs: Any) -> Any:
        num_held.append(sum(wire() is not None for wire in old))
        return open_wires(specs)

    layout.all_reduce.open_wires = watched  # type: ignore[method-assign]
    for step in range(3):
        optimizer.zero_grad()
        model(exact_inputs(8, torch.float32, step).view(2, 4)).sum().backward()
        optimizer.step()
    assert num_held == [0]


# Graphs of other shapes


@ranks(2)
def test_create_graph_is_refused_where_it_averages(rank: int, world_size: int) -> None:
    model = Net()
    with torch.no_grad():
        for parameter in model.parameters():  # small integers, so that everything stays exact
            parameter.copy_(exact_inputs(parameter.numel(), torch.float32, 3).view_as(parameter))
    optimizer = wrapped(model)
    with pytest.raises(GradientError, match=r"create_graph=True.*autograd\.grad"):
        model(batch(rank)).backward(create_graph=True)
    optimizer.zero_grad()

    def squared(x: Tensor) -> Tensor:
        return (model.first(x) ** 2).sum() + (model.second(x) ** 2).sum()

    with optimizer.no_sync():  # nothing is averaged here
        squared(batch(rank)).backward(create_graph=True)
    norm = sum((p.grad**2).sum() for p in model.parameters() if p.grad is not None)
    assert all(part.any() for part in torch.autograd.grad(norm, list(model.parameters())))
    optimizer.synchronize()
    check_gradients(model, mean_over_ranks([squared] * world_size, model, 0))
    assert not CAN_SWAP or not any(p.grad is not None and p.grad.requires_grad for p in model.parameters())


@ranks(2, start=run_ranks)
def test_not_inside_backward(rank: int) -> None:
    for what in ("step", "synchronize", "sync_buffers", "weigh", "skip"):
        model = Net()
        optimizer = wrapped(model)
        arguments = (1,) if what == "weigh" else ()
        call = functools.partial(getattr(optimizer, what), *arguments)
        model.first.weight.register_post_accumulate_grad_hook(lambda _, call=call: call())
        with pytest.raises(GradientError, match=rf"{what}\(\) was called inside backward\(\)"):
            model(batch(rank)).backward()
        optimizer.close()


# Backward raises


class Deep(torch.nn.Module):
    """Six layers in a row; `fails`: backward does, in the middle."""

    fails = False

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(3, 3) for _ in range(6))
        with torch.no_grad():
            for layer in self.layers:
                layer.weight.copy_(torch.tensor([[1.0, 0.0, 1.0], [0.0, -1.0, 0.0], [0.0, 1.0, 1.0]]))  # type: ignore[union-attr,operator]
                layer.bias.fill_(1.0)  # type: ignore[union-attr,operator]

    def forward(self, x: Tensor) -> Tensor:
        for i, layer in enumerate(self.layers):
            x = Raises.apply(layer(x)) if i == 3 and self.fails else layer(x)
        return x.sum()


@pytest.mark.parametrize(
    ("overlap", "compression", "set_to_none", "algorithm", "num_optimizers"),
    [
        ("inline", None, True, "auto", 1),
        ("inline", "fp16", False, "auto", 1),
        ("thread", None, False, "auto", 1),
        ("thread", "fp16", True, "auto", 1),
        ("thread", None, True, "native", 1),  # where ranks compare no tags
        ("auto", None, True, "direct", 2),
        ("auto", None, True, "native", 2),
    ],
)
@ranks(2)
def test_a_backward_aborted_on_all_ranks_is_forgotten(
    overlap: str,
    compression: str | None,
    set_to_none: bool,
    algorithm: str,
    num_optimizers: int,
    rank: int,
    world_size: int,
) -> None:
    """Some buckets had left already, and may still be on their way."""
    model = Deep()
    options = {"bucket_mb": 0.0, "overlap": overlap, "compression": compression, "algorithm": algorithm}
    parts = [model] if num_optimizers == 1 else [model.layers[:3], model.layers[3:]]
    *others, optimizer = [wrapped(part, **options) for part in parts]
    for step in range(7):
        for each in (*others, optimizer):
            each.zero_grad(set_to_none=set_to_none)
        model.fails = step in (0, 2, 5)
        # One is behind when it fails, and ahead afterwards: what had left is under way while gradients are zeroed.
        time.sleep(0.02 * (rank == model.fails))
        if model.fails:
            with pytest.raises(ArithmeticError):
                model(batch(rank, step)).backward()
            state = "was lost" if CAN_SWAP and compression is None else "holds local contributions"
            with pytest.raises(GradientError, match=rf"\w\.\w+ {state}"):
                optimizer.step()
            continue
        model(batch(rank, step)).backward()
        check_gradients(model, mean_over_ranks([model] * world_size, model, step), f"step {step}")
    assert_same_everywhere(p.grad for p in model.parameters())


@pytest.mark.parametrize(
    ("overlap", "algorithm"),
    [("inline", "auto"), ("thread", "auto"), ("thread", "native")],  # the last compares no tags
)
@ranks(2)
def test_a_backward_aborted_on_one_rank_is_told_not_trained_through(overlap: str, algorithm: str, rank: int) -> None:
    """Its next reduction is not the one that the other is in: mixing the two would be a silent wrong answer.

    The buckets of that reduction have other lengths than those that the other rank waits for.
    """
    torchring.init(timeout_seconds=3)
    deep = Deep()
    model = torch.nn.Sequential(Deep().layers[0], torch.nn.BatchNorm1d(3), deep)
    optimizer = wrapped(model, bucket_mb=0.0, overlap=overlap, algorithm=algorithm)
    outcomes, stepped = [], []
    for step in range(3):
        optimizer.zero_grad()
        deep.fails = step == 1 and rank == 1
        outcomes.append(attempt(model(batch(rank, step)).backward))
        stepped.append(attempt(optimizer.step) == "")
    assert outcomes[0] == ""
    assert rank == 0 or outcomes[1] == "ArithmeticError: an error in a custom function"
    assert "a backward was aborted on rank 1 after part of its gradients had left" in outcomes[1 + rank]
    assert stepped == [True, False, False]


@pytest.mark.parametrize("overlap", ["inline", "thread"])
@ranks(2)
def test_a_backward_that_fails_before_anything_has_left_is_the_ranks(overlap: str, rank: int, world_size: int) -> None:
    """The next one is that which the other rank is in. There is one bucket, which does not become full."""
    model = Deep()
    optimizer = wrapped(model, overlap=overlap)
    for step in range(3):
        optimizer.zero_grad()
        if rank == 1:
            model.fails = True
            assert attempt(model(batch(rank, step)).backward).startswith("ArithmeticError")
            assert attempt(optimizer.step).startswith("GradientError")
            optimizer.zero_grad()
            model.fails = False
        model(batch(rank, step)).backward()
        check_gradients(model, mean_over_ranks([model] * world_size, model, step), f"step {step}")
    assert optimizer.stats().num_reductions == 3


@ranks(2, start=run_ranks)
def test_a_reduction_that_cannot_begin_on_one_rank_begins_on_none(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 cannot have the buffers that the order of the first reduction asks for. The other learns why, at once."""
    torchring.init(timeout_seconds=20)
    model = Net()
    optimizer = wrapped(model, bucket_mb=0.0)
    model(batch(rank, 0)).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    if rank == 1:
        monkeypatch.setattr(BucketLayout, "_open", mock.Mock(side_effect=OSError("no space left")))
    first = attempt(model(batch(rank, 1)).backward)
    told = "rank 1 stopped: the reduction of gradients was interrupted by OSError: no space left"
    assert first == "OSError: no space left" if rank == 1 else told in first
    assert "the last backward did not reduce its gradients" in attempt(optimizer.step)
    assert "an earlier backward failed" in attempt(model(batch(rank, 1)).backward)


@ranks(2, start=run_ranks)
def test_a_skip_that_fails_ends_as_a_backward_that_fails(rank: int) -> None:
    model = Net()
    optimizer = wrapped(model)
    if rank == 1:
        torchring.shutdown()
        return
    first, second = attempt(optimizer.skip), attempt(model(batch(rank)).sum().backward)
    assert first.startswith("PeerLostError"), first
    assert second.startswith("GradientError: an earlier backward failed: "), second


# Several optimizers

USES = {
    "one each": ["a", "b"],
    "the other way round": ["b", "a"],
    "both and one": ["ab", "a"],
    "one and both": ["b", "ab"],
    "both, in another order": ["ab", "ba"],
    "all three and one": ["abc", "c"],
    "neighbours": ["ab", "bc"],
    "the same one": ["c", "c"],
}


class Three(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (torch.nn.Linear(3, n) for n in (2, 3, 4))

    def loss_of(self, use: str) -> Callable[[Tensor], Tensor]:
        return lambda x: sum((getattr(self, name)(x).sum() for name in use), torch.zeros(()))


@pytest.mark.parametrize(("overlap", "algorithm"), [("inline", "direct"), ("thread", "direct"), ("auto", "native")])
@ranks(2)
def test_optimizers_that_ranks_reach_differently(overlap: str, algorithm: str, rank: int, world_size: int) -> None:
    """Buckets of all leave during backward."""
    model = Three()
    names = [name for name, _ in model.named_parameters()]
    options = {"bucket_mb": 0.0, "overlap": overlap, "algorithm": algorithm}
    optimizers = {name: wrapped(part, **options) for name, part in model.named_children()}

    def have_left(_: Tensor) -> None:
        """Of each optimizer that the backward under way has reached, which has come to the input."""
        syncs = {name: optimizer._sync for name, optimizer in optimizers.items()}
        left.append({name for name, sync in syncs.items() if sync.in_backward and sync.launcher.reduction.num_launched})

    seen = []
    for turn in range(2):
        for step, (what, uses) in enumerate(USES.items()):
            for optimizer in optimizers.values():
                optimizer.zero_grad()
            left: list[set[str]] = []
            x = batch(rank, step).requires_grad_()
            x.register_hook(have_left)
            model.loss_of(uses[rank])(x).backward()
            assert left == [set(uses[rank])], f"reduction {turn}, {what}"
            mean = zip(names, mean_over_ranks([*map(model.loss_of, uses)], model, step), strict=True)
            is_used = "".join(uses)
            check_gradients(model, [value if name[0] in is_used else None for name, value in mean], f"{turn}, {what}")
            for optimizer in optimizers.values():
                optimizer.step()
            seen.append(digest(model.parameters()))
    assert len(set(seen)) == len(seen)
    assert torchring.all_gather_object(seen) == [seen] * 2


@ranks(2)
def test_a_rank_that_is_ahead_reduces_while_it_waits_for_what_others_reach(rank: int, world_size: int) -> None:
    """Rank 1 begins its backward when rank 0 has ended its own, and ends it when rank 0 has done its part meanwhile."""
    model = Three()
    optimizers = [wrapped(part, bucket_mb=0.0, algorithm="direct", overlap="inline") for part in (model.a, model.b)]
    reducers = [optimizer._sync for optimizer in optimizers]

    def wait_for_peer(signal: str, count_of: Callable[[Reducer], int]) -> None:
        for reducer in reducers:
            ((inbox, _),) = getattr(reducer.layout.all_reduce._host, signal)._incoming
            count = count_of(reducer)
            assert count
            wait_until(lambda at=inbox, least=count: semaphore.value(at) >= least, f"{signal} of rank 0")

    for step in range(2):
        model.zero_grad()
        x = batch(rank, step).requires_grad_()
        loss = model.loss_of("ab")(x)
        if rank == 1:
            loss.register_hook(lambda _: wait_for_peer("packed", lambda reducer: len(reducer.layout.buckets)))
            x.register_hook(lambda _: wait_for_peer("done", lambda reducer: reducer.reduction.num_launched))
        loss.backward()
    check_gradients(model.b, mean_over_ranks([model.loss_of("b")] * world_size, model.b, 1))


@pytest.mark.parametrize("is_aborted", [False, True])
@ranks(2)
def test_what_ranks_do_unlike_each_other_is_told_at_once(is_aborted: bool, rank: int) -> None:
    """Rank 0 reaches `a`, rank 1 `b`: its backward raises when `b` has left, or reaches `a` inside no_sync(), too."""
    torchring.init(timeout_seconds=20)
    model = Three()
    a, _ = (wrapped(part, bucket_mb=0.0) for part in (model.a, model.b))
    outcomes = []
    for step in range(2):
        model.zero_grad()
        x = batch(rank, step).requires_grad_()
        is_unlike = rank == 1 and step == 0
        use = "b" if rank else "a"
        if is_unlike and is_aborted:
            x.register_hook(lambda _: 1 / 0)
        elif is_unlike:
            use = "ab"
        with a.no_sync() if use == "ab" else contextlib.nullcontext():
            started = time.monotonic()
            outcomes.append(attempt(model.loss_of(use)(x).backward))
            assert time.monotonic() - started < patient(3)
    told = "GradientError: a backward() ran inside no_sync() on some ranks only"
    if is_aborted:
        told = "a backward was aborted on rank 1 after part of its gradients had left"
        assert rank == 0 or outcomes.pop(0).startswith("ZeroDivisionError")
    assert told in outcomes[0]
    assert all(outcomes)


@pytest.mark.parametrize(
    "uses",
    [
        [["ab", "ab"]] * 6,
        [["ab", "ab"]] * 2 + [["ab", "b"]] + [["ab", "ab"]] * 5,  # rank 1 is one backward of `a` behind
        [["ab", "b"], ["ab", "ab"]] * 4,
    ],
    ids=["alike", "one behind", "every other one"],
)
@ranks(2)
def test_several_optimizers_of_which_one_accumulates(uses: list[list[str]], rank: int, world_size: int) -> None:
    """Where ranks no longer agree on which backward is the n-th, one that wants to reduce takes the others along."""
    model = Three()
    optimizers = [wrapped(part, accumulate=2 if part is model.a else 1) for part in model.children()]
    total = [torch.zeros_like(p) for p in model.parameters()]
    for use in uses:
        torch._foreach_add_(total, mean_over_ranks([*map(model.loss_of, use)], model))
        model.loss_of(use[rank])(batch(rank)).backward()
    for optimizer in optimizers:
        optimizer.synchronize()
    check_gradients(nn.ModuleList([model.a, model.b]), total[:4])


@ranks(2)
def test_an_optimizer_that_leaves_its_neighbour(rank: int, world_size: int) -> None:
    def reducing() -> list[str]:
        return [thread.name for thread in threading.enumerate() if thread.name.startswith("torchring-reductions")]

    model = Three()
    first, second = wrapped(model.a, overlap="thread"), wrapped(model.b, overlap="inline")
    model.loss_of("ab")(batch(rank)).backward()
    assert reducing()
    first.close()
    wait_until(lambda: not reducing(), "its thread to end")
    second.zero_grad()
    model.a.zero_grad()
    model.loss_of("ab")(batch(rank)).backward()
    check_gradients(model.a, gradients(model.loss_of("a"), model.a, [batch(rank)]), "local")
    check_gradients(model.b, mean_over_ranks([model.loss_of("b")] * world_size, model.b, 0), "reduced")


# What goes wrong between ranks


@pytest.mark.parametrize("op", ["mean", "sum"])
@ranks(2)
def test_a_gradient_that_one_rank_has_written_to_is_synchronized_or_refused(op: str, tmp_path: Path, rank: int) -> None:
    torchring.init(timeout_seconds=6)
    model = Net()
    optimizer = wrapped(model, op=op)
    for step in range(2):
        optimizer.zero_grad()
        model(batch(rank, step)).backward()
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    if rank == 1:
        assert model.first.weight.grad is not None
        model.first.weight.grad += 2.0
    if op == "mean":
        optimizer.synchronize()
        before[0] += 1.0
        check_gradients(model, before)
        return
    started = time.monotonic()
    error = attempt(optimizer.synchronize)
    assert time.monotonic() - started < patient(3)
    assert error.startswith("GradientError")
    assert rank == 0 or "was written to after it was summed over ranks" in error
    if rank == 1:  # alive, but not coming: its peer must not have to wait for it
        wait_until((tmp_path / "told").exists, "the peer")
    (tmp_path / "told").touch()


@ranks(2)
def test_a_dropped_optimizer_leaves_its_group_and_is_of_no_use_where_it_was_kept(rank: int, world_size: int) -> None:
    first, second = Net(), Net()
    dropped = wrapped(first)
    first(batch(rank)).backward()
    dropped.step()
    dropped.zero_grad(set_to_none=False)
    kept = dropped if rank == 1 else None
    del dropped
    optimizer = wrapped(second)
    second(batch(rank)).backward()
    check_gradients(second, mean_over_ranks([second] * world_size, second, 0))
    optimizer.step()
    assert len(list(default_world().shared(OptimizerGroup).reducers)) == 1
    if kept is not None:
        first(batch(rank)).backward()
        assert attempt(kept.step).startswith(("GradientError", "ValueError"))


def _wrong_gradient(rank: int, world_size: int) -> None:
    model = Net()
    optimizer = wrapped(model)
    model(batch(rank)).backward()
    check_gradients(model, gradients(model, model, [batch(rank)]))
    optimizer.step()


def test_the_check_of_gradients_can_fail() -> None:
    with pytest.raises(RanksFailed, match="elements differ"):
        run_pooled(_wrong_gradient, 2)


class _Linear(torch.nn.Module):
    """Has the gradients that it is told: `large` is copied on arrival, `small` when the bucket is full."""

    def __init__(self) -> None:
        super().__init__()
        self.small = torch.nn.Parameter(torch.zeros(5))
        self.large = torch.nn.Parameter(torch.zeros(300, 300))

    def forward(self, large: Tensor | float, small: Tensor | float, *, fails: bool = False) -> Tensor:
        first = Raises.apply(self.small) if fails else self.small
        return (first * small).sum() + (self.large * large).sum()


@pytest.mark.takes_2_12
@ranks(2)
def test_between_hosts_gradients_are_scaled_and_looked_at_when_they_are_packed(rank: int) -> None:
    model = _Linear()
    optimizer = wrapped(model, algorithm="native")

    def gives(large: float, small: float | None) -> None:
        check_gradients(model, [small if small is None else torch.full((5,), small), torch.full((300, 300), large)])

    for set_to_none in (True, False):  # new gradients, and gradients that grow in the buffer
        optimizer.zero_grad(set_to_none=set_to_none)
        model(2.0 + rank, 6.0 * rank).backward()
        gives(2.5, 3.0)
        model(torch.full((300, 300), 2.0 * rank).t(), 4.0).backward()
        gives(3.5, 7.0)
        optimizer.zero_grad(set_to_none=set_to_none)
        with pytest.raises(ArithmeticError):
            model(2.0 + rank, 6.0, fails=True).backward()
        gives(2.0 + rank, None if set_to_none else 0.0)
    optimizer.zero_grad()
    optimizer.weigh(float(1 + 2 * rank))
    model(4.0, 8.0 * rank).backward()
    gives(4.0, 6.0)
    optimizer.zero_grad()
    model(3e38, -3e38).backward()  # the squares overflow, the mean does not
    gives(3e38, -3e38)

    said = []
    column = torch.zeros(300, 300)
    column[7, 3] = math.inf if rank == 1 else 0.0
    for large, small in ((column, 1.0), (1.0, math.nan if rank == 0 else 1.0)):
        optimizer.zero_grad()
        model(large, small).backward()
        said.append(attempt(optimizer.step))
    model.large.register_post_accumulate_grad_hook(lambda p: p.grad.clamp_(-1.0, 1.0).is_sparse or None)
    optimizer.zero_grad()
    said.append(attempt(model(1.0, 1.0).backward))
    optimizer.close()

    model = _Linear()
    total = wrapped(model, algorithm="native", op="sum")
    model(3e38, 1.0).backward()
    said.append(attempt(total.step))
    total.close()

    model = _Linear()
    optimizer = wrapped(model, algorithm="native")
    ones = torch.ones((), requires_grad=True)
    twice = [checkpoint(lambda x: (model.large * x).sum(), ones, use_reentrant=True) for _ in range(2)]
    said.append(attempt(sum(twice).backward))  # type: ignore[union-attr]
    assert model.large.grad.isnan().all(), "scaled in part"
    expected = [
        "large is not finite; NaN or infinity came from rank 1",
        "small is not finite; NaN or infinity came from rank 0",
        "large was written to while it was being reduced",
        "large is not finite; the sum over ranks overflowed",
        "use_reentrant=False",
    ]
    for text, part in zip(said, expected, strict=True):
        assert part in text
