"""`weigh` and `skip`: gradients are those of the mean over all samples, whatever the ranks' shares are."""

import contextlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchring
from tests.support.checks import digest
from tests.support.harness import ranks, run_pooled, run_ranks
from tests.support.scripts import Raises
from tests.support.training import TINY_MB, Side, assert_as_one_process, attempt, momentum, small_model, values
from torchring.gradients.weights import check_weight


def _samples(rank: int, step: int, micro: int) -> Tensor:
    """Of a rank's micro-step: another number each time, none now and then."""
    n = (3 * rank + 5 * step + 2 * micro) % 7
    return torch.randn(n, 6, generator=torch.Generator().manual_seed(100 * step + 10 * rank + micro)).double()


def _loss(model: nn.Module, samples: Tensor) -> Tensor:
    """The mean over the samples; NaN if there are none."""
    samples = samples.to(next(model.parameters()).dtype)
    return nn.functional.mse_loss(model(samples[:, :4]), samples[:, 4:])


def weighted(side: Side, micros: int, how: str, unit: float, options: dict[str, Any]) -> list[Tensor]:
    """Each step takes the mean over the samples of all ranks and micro-steps."""
    model = small_model(torch.float32 if "compression" in options else torch.float64)
    accumulate = micros if how == "accumulate" else 1
    optimizer = side.wrap(momentum(model), model, accumulate=accumulate, **options)
    for step in range(4):
        (optimizer if step < 3 else model).zero_grad(set_to_none=step != 2)
        parts = [_samples(rank, step, micro) for rank in side.mine for micro in range(micros)]
        for micro, samples in enumerate(parts if side.is_wrapped else [torch.cat(parts)]):
            if side.is_wrapped:
                optimizer.weigh(len(samples) * unit)
            is_local = side.is_wrapped and how == "no_sync" and micro + 1 < micros
            with optimizer.no_sync() if is_local else contextlib.nullcontext():
                _loss(model, samples).backward()
        optimizer.step()
    return values(model)


@pytest.mark.parametrize(
    ("size", "micros", "how", "options"),
    [
        (1, 3, "accumulate", {}),
        (1, 3, "no_sync", {}),
        (2, 1, "accumulate", {}),
        (2, 3, "no_sync", {}),
        (3, 3, "accumulate", {}),
        (2, 2, "no_sync", {"overlap": "thread"}),
        (2, 2, "no_sync", {"bucket_mb": 25.0}),
        (3, 2, "no_sync", {"algorithm": "native"}),
    ],
)
def test_the_mean_is_over_all_samples(size: int, micros: int, how: str, options: dict[str, Any]) -> None:
    assert_as_one_process(weighted, micros, how, 1, options, world_size=size)


@pytest.mark.parametrize("unit", [1.0, 1e-3, 4096.0, 3e5], ids=str)
def test_weights_of_any_size_in_16_bits(unit: float) -> None:
    assert_as_one_process(weighted, 2, "accumulate", unit, {"compression": "bf16"}, tolerance=0.02)


@ranks(2)
def test_equal_weights_change_no_bit(rank: int) -> None:
    trained = []
    for weight in (None, 8):
        model = small_model(torch.float32)
        optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, bucket_mb=TINY_MB)
        for step in range(3):
            optimizer.zero_grad()
            if weight is not None:
                optimizer.weigh(weight)
            _loss(model, _samples(rank + 1, step + 1, 1)).backward()
            optimizer.step()
        optimizer.close()
        trained.append(digest(model.parameters()))
    assert trained[0] == trained[1]


def _kinds(side: Side, compression: str | None) -> list[Tensor]:
    """Large, sparse, complex, unused and frozen parameters, the last of which thaws; gradients that lie in the wire."""
    torch.manual_seed(0)
    large, words = nn.Linear(300, 300).double(), nn.Embedding(5, 300, sparse=True, dtype=torch.float64)
    phase = nn.Parameter(torch.ones(3, dtype=torch.complex128))
    late, unused = nn.Parameter(torch.ones(3).double(), requires_grad=False), nn.Parameter(torch.ones(2).double())
    model = nn.ParameterDict({"phase": phase, "late": late, "unused": unused})
    model["large"], model["words"] = large, words  # type: ignore[assignment]
    optimizer = side.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, bucket_mb=None, compression=compression)
    for step, shares in enumerate([(1.0, 3.0), (2.0, 2.0), (0.5, 1.5)]):
        late.requires_grad_(step == 2)
        optimizer.zero_grad(set_to_none=step == 0)

        def loss_of(rank: int, step: int = step) -> Tensor:
            loss = large(words(torch.tensor([rank, step]))).square().mean() * (rank + 1)
            return loss + (phase * (1 + rank + 1j)).abs().sum() + (late * (rank + step)).sum()

        if side.is_wrapped:
            optimizer.weigh(shares[side.mine[0]])
        losses = torch.stack([loss_of(rank) * shares[rank] for rank in side.mine])
        (losses.sum() / sum(shares[rank] for rank in side.mine)).backward()
        optimizer.step()
    return values(model)


@pytest.mark.parametrize("compression", [None, "bf16"])
def test_all_kinds_of_parameters(compression: str | None) -> None:
    assert_as_one_process(_kinds, compression, tolerance=0.02 if compression else 1e-9)


# Skipping


def skipping(side: Side, weighs: bool, options: dict[str, Any]) -> list[Tensor]:
    model = small_model()
    optimizer = side.wrap(torch.optim.Adam(model.parameters(), lr=0.05), model, **options)
    for step in range(6):
        if step != 3:
            optimizer.zero_grad()
        parts = [_samples(rank + 1, 1, step) for rank in side.mine if (rank + step) % 3]
        if not parts:
            optimizer.skip()
        else:
            shares = [len(part) if weighs else 1 for part in parts]
            if side.is_wrapped and weighs:
                optimizer.weigh(shares[0])
            losses = [_loss(model, part) * share for part, share in zip(parts, shares, strict=True)]
            (torch.stack(losses).sum() / sum(shares)).backward()
        optimizer.step()
    return values(model)


@pytest.mark.parametrize(("weighs", "options"), [(False, {}), (True, {}), (True, {"algorithm": "native"})])
def test_the_mean_is_over_ranks_that_do_not_skip(weighs: bool, options: dict[str, Any]) -> None:
    assert_as_one_process(skipping, weighs, options, world_size=3)


def _pair(**options: Any) -> tuple[list[nn.Parameter], Any]:
    parameters = [nn.Parameter(torch.zeros(2).double()) for _ in range(2)]
    return parameters, torchring.wrap(torch.optim.SGD(parameters, lr=1.0), **options)


def _first(*parameters: nn.Parameter) -> list[float | None]:
    return [None if p.grad is None else float(p.grad[0]) for p in parameters]


def _backward(optimizer: Any, loss: Tensor, weight: float | None = None, *, is_local: bool = False) -> None:
    with optimizer.no_sync() if is_local else contextlib.nullcontext():
        if weight is not None:
            optimizer.weigh(weight)
        loss.sum().backward()


def _skip_on_1(rank: int, optimizer: Any, loss: Tensor) -> None:
    if rank == 1:
        optimizer.skip()
    else:
        loss.sum().backward()


@ranks(2)
def test_skipping_micro_steps(rank: int) -> None:
    (a, _), optimizer = _pair(accumulate=2)
    (a * (rank + 1)).sum().backward()
    _skip_on_1(rank, optimizer, a * 10)
    assert _first(a) == [6.5]  # (1 + 10 + 2) / 2
    optimizer.zero_grad()
    for _ in range(2):
        optimizer.skip()
    assert _first(a) == [None]
    _skip_on_1(rank, optimizer, a * 4)
    optimizer.synchronize()  # ends an incomplete group
    assert _first(a) == [4.0]
    for zeros in ("in place", "new"):  # past the optimizer: these are no gradient of a rank that skips
        if zeros == "new" or a.grad is None:
            a.grad = torch.zeros_like(a)
        a.grad.zero_()
        _skip_on_1(rank, optimizer, a * 4)
        said = attempt(optimizer.synchronize)
        assert ("zeros that were written to .grad" if rank == 1 else "refused on another rank") in said
        optimizer.zero_grad()
    _skip_on_1(rank, optimizer, a * 4)
    if rank == 1:
        a.grad = torch.full_like(a, 7.0)  # a gradient that the script has computed itself counts
    optimizer.synchronize()
    assert _first(a) == [5.5]


@ranks(2)
def test_skipping_a_backward_that_reaches_several_optimizers(rank: int) -> None:
    (a, _), first = _pair()
    (b, _), second = _pair()
    _skip_on_1(rank, first, a * 3 + b * 5)
    assert _first(a, b) == [3.0, 5.0]
    assert rank == 0 or "stands for a whole backward" in attempt(second.skip)
    first.step()
    second.step()
    for is_local in (False, True):  # what was given for the backward that is left out is forgotten
        with contextlib.ExitStack() as no_sync:
            for optimizer in (first, second):
                optimizer.zero_grad()
                optimizer.weigh(2)
                no_sync.enter_context(optimizer.no_sync() if is_local else contextlib.nullcontext())
            _skip_on_1(rank, first, a * 3 + b * 5)
        first.synchronize()
        second.synchronize()
        assert _first(a, b) == [3.0, 5.0]


@pytest.mark.parametrize("skips", [(0, 1), (1,)], ids=str)
@ranks(2)
def test_gradients_of_an_earlier_backward_stay_where_a_rank_skips(skips: Sequence[int], rank: int) -> None:
    """The first backward shows another order than that of the plan, and the second one changes the plan."""
    (a, b), optimizer = _pair(bucket_mb=0)
    (b.sum() + a.sum()).backward()
    _skip_on_1(int(rank in skips), optimizer, a)
    assert attempt(optimizer.step) == ""
    assert _first(a, b) == [1.0 if len(skips) == 2 else 2.0, 1.0]


# What is refused


def _by_hand_on_rank_1(optimizer: Any, parameters: Sequence[nn.Parameter], rank: int) -> None:
    if rank == 1:
        parameters[0].grad = torch.ones_like(parameters[0])
    else:
        _backward(optimizer, parameters[0], 1, is_local=True)
    optimizer.synchronize()


def _thawed_in_between(optimizer: Any, parameters: Sequence[nn.Parameter], rank: int) -> None:
    a, b = parameters
    a.requires_grad_(False)
    optimizer.weigh(0)
    a.requires_grad_(True)
    b.requires_grad_(False)  # as many are trained as before


# What a script does before a backward of both parameters, and what is raised, on the rank that does it or on both.
_REFUSED: dict[str, tuple[Callable[[Any, list[nn.Parameter], int], object], str]] = {
    "-1": (lambda o, _, __: o.weigh(-1), "a weight must be 0, or from 0.000976562 to 2.68435e+08, got -1"),
    "a sum": (lambda *_: _pair(op="sum")[1].weigh(3), "weigh() takes op='mean'; with op='sum', multiply the loss"),
    "twice": (lambda o, _, __: [o.weigh(1), o.weigh(1)], "weigh() was called twice before one backward()"),
    "after an unweighted one": (
        lambda o, p, _: [_backward(o, p[0], is_local=True), o.weigh(1)],
        "weigh() was called after a backward() without a weight",
    ),
    "then an unweighted one": (
        lambda o, p, _: _backward(o, p[0], 1, is_local=True),
        "this backward() has no weight, but an earlier one had one",
    ),
    "no backward": (
        lambda o, p, _: [_backward(o, p[0], 1, is_local=True), o.weigh(1), o.synchronize()],
        "weigh() was called before synchronize(), and no backward() came in between",
    ),
    "by hand on rank 1": (_by_hand_on_rank_1, "rank 1 did not call optimizer.weigh()"),
    "thawed in between": (_thawed_in_between, "a parameter was unfrozen between weigh() and backward()"),
    "on results": (
        lambda o, p, _: [_backward(o, p[0]), _backward(o, p[0], 2, is_local=True)],
        "weights were given with gradients of an earlier step in .grad",
    ),
    "forgotten on rank 1": (
        lambda o, _, rank: o.weigh(3) if rank == 0 else None,
        "rank 1 did not call optimizer.weigh() before this backward()",
    ),
}


@pytest.mark.parametrize("how", _REFUSED)
@ranks(2)
def test_what_cannot_be_weighed_is_an_error(how: str, rank: int) -> None:
    (a, b), optimizer = _pair()
    script, said = _REFUSED[how]
    problem = attempt(lambda: [script(optimizer, [a, b], rank), (a + b).sum().backward()])
    assert problem.startswith(f"{'ValueError' if how in ('-1', 'a sum') else 'GradientError'}: {said}"), problem
    if how in ("forgotten on rank 1", "then an unweighted one"):
        assert attempt(optimizer.step).startswith("GradientError")


def test_what_is_a_weight() -> None:
    assert [check_weight(w) for w in (3, 0, 0.5, torch.tensor(7), torch.tensor([2.5]))] == [3, 0, 0.5, 7, 2.5]
    for wrong in (float("nan"), float("inf"), 2.0**29, 2.0**-11):
        assert attempt(lambda wrong=wrong: check_weight(wrong)).startswith("ValueError: a weight must be 0, or from ")
    for wrong in ("3", True):
        said = attempt(lambda wrong=wrong: check_weight(wrong))
        assert said == f"TypeError: a weight is a number of samples or tokens, got {type(wrong).__name__}"


# Odd ways through


def _dropped_after_weigh(rank: int, size: int) -> list[float | None]:
    """The script drops the gradients of a micro-step past the optimizer, when it has given the next weight already."""
    for how in ("in place", "by new tensors", "set to none"):
        (a, b), optimizer = _pair()
        _backward(optimizer, a + b, 2, is_local=True)
        optimizer.weigh(1 + 2 * rank)
        if how == "by new tensors":
            a.grad, b.grad = torch.zeros_like(a), torch.zeros_like(b)
        else:
            optimizer.optimizer.zero_grad(set_to_none=how == "set to none")
        said = attempt(((a + 2 * b) * (rank + 1)).sum().backward)
        assert ("were zeroed past the optimizer" in said) is (how != "set to none"), how
        optimizer.close()
        if size > 1 and how != "set to none":
            torchring.shutdown()
            torchring.init()
    return _first(a, b)


@pytest.mark.parametrize("size", [1, 2])
def test_a_weight_goes_with_its_gradients(size: int) -> None:
    for found in (run_pooled if size == 1 else run_ranks)(_dropped_after_weigh, size):
        assert found == ([1.0, 2.0] if size == 1 else [1.75, 3.5])


@ranks(2)
def test_zeros_of_weight_0_are_not_taken_for_gradients_that_were_zeroed(rank: int) -> None:
    """Rank 1 has weight 0. The script changes gradients before they are reduced, or drops them."""
    for drops in (False, True):
        (a, b), optimizer = _pair()
        _backward(optimizer, a + b, 2.0 * (1 - rank), is_local=True)
        for each in (a, b):
            each.grad = None if drops or each.grad is None else each.grad.mul_(2.0)
        if drops:
            _backward(optimizer, a + 3 * b, 1.0)
        else:
            optimizer.synchronize()
        assert _first(a, b) == ([1.0, 3.0] if drops else [2.0, 2.0])
        optimizer.close()


@ranks(2)
def test_several_optimizers_match_backwards_that_do_not_reduce_too(rank: int) -> None:
    (a, _), first = _pair(accumulate=2)
    (b, _), _second = _pair(accumulate=2)
    _skip_on_1(rank, first, a + b)
    (a * 2 + b).sum().backward()
    assert _first(a) == [2.5]  # (1 + 2 on rank 0, 2 on rank 1) / 2


@ranks(2, start=run_ranks)
def test_odd_ways(rank: int) -> None:
    (a, b), optimizer = _pair()
    optimizer.weigh(0.0)
    optimizer.close()
    optimizer = torchring.wrap(torch.optim.SGD([a, b], lr=1.0))
    (a + b).sum().backward()
    assert _first(a, b) == [1.0, 1.0]

    optimizer.zero_grad()
    _backward(optimizer, a + b, is_local=True)
    a.grad = b.grad = None  # past the optimizer
    _skip_on_1(rank, optimizer, a + b)
    assert _first(a, b) == [1.0, 1.0]

    optimizer.zero_grad()
    _backward(optimizer, a + b, is_local=True)  # without a weight
    a.grad = b.grad = None
    _backward(optimizer, (a + b) * (rank + 1.0), 1.0 + 2 * rank)
    assert _first(a, b) == [1.75, 1.75]

    optimizer.zero_grad()
    _backward(optimizer, a, 2, is_local=True)
    said = attempt(lambda: _backward(optimizer, Raises.apply(a).sum() + b.sum(), 6, is_local=True))  # type: ignore[no-untyped-call]
    assert said == "ArithmeticError: an error in a custom function"
    b.grad = None
    _backward(optimizer, a * 4, 4)
    assert _first(a, b) == [3.0, None]

    optimizer.zero_grad()
    a.grad = torch.full_like(a, 3.0 * rank)  # zeros of a rank that has skipped nothing
    optimizer.synchronize()
    assert _first(a, b) == [1.5, None]

    optimizer.zero_grad()
    with optimizer.no_sync():
        _skip_on_1(rank, optimizer, a + b)
    optimizer.zero_grad()  # nobody has skipped anything any more
    a.grad = torch.full_like(a, 3.0) if rank == 0 else None
    optimizer.synchronize()
    assert _first(a) == [1.5]

    optimizer.zero_grad()
    b.requires_grad_(False)
    _backward(optimizer, a * (rank + 1.0), float(rank))  # 0 on rank 0
    assert _first(a, b) == [2.0, None]
    optimizer.close()

    (a, b), optimizer = _pair()
    (a + b).sum().backward()
    optimizer.weigh(4)
    with optimizer.no_sync():
        assert "weights were given with gradients of an earlier step" in attempt((a + b).sum().backward)


@ranks(2)
def test_parameters_that_thaw(rank: int) -> None:
    """Before a local backward, with a weight and without."""
    for weight, expected in ((1, [4.0, 4.0]), (None, [1.5, 1.5])):
        a, frozen = (nn.Parameter(torch.zeros(2).double(), requires_grad=i == 0) for i in range(2))
        optimizer = torchring.wrap(torch.optim.SGD([a, frozen], lr=1.0))
        frozen.requires_grad_(True)
        if weight is None:
            _backward(optimizer, (a + frozen) * (rank + 1), is_local=True)
            optimizer.synchronize()
        else:
            optimizer.weigh(weight)
            _backward(optimizer, a + frozen, is_local=True)
            _backward(optimizer, a * 5 + frozen * 5, 3)
        assert [*_first(a, frozen), attempt(optimizer.step)] == [*expected, ""]
        optimizer.close()


@pytest.mark.parametrize(("inside", "shares"), [(False, (1.0, 3.0)), (True, (1.0, 3.0)), (False, (2.0, 0.0))])
@ranks(2)
def test_a_weight_for_gradients_of_autograd_grad(inside: bool, shares: tuple[float, float], rank: int) -> None:
    (a, b), optimizer = _pair()
    with torchring.join(optimizer) if inside else contextlib.nullcontext():
        optimizer.weigh(shares[rank])
        a.grad = torch.full_like(a, rank + 1.0 if shares[rank] else math.nan)
        optimizer.synchronize()
        expected = 1.75 if shares[1] else 1.0
        assert _first(a, b) == [expected, None]
        (a * (rank + 1)).sum().backward()  # without a weight
        assert _first(a) == [expected + 1.5]


@ranks(2)
def test_a_parameter_thaws_where_no_rank_has_samples() -> None:
    """A parameter thaws in a step in which no rank has samples: a second reduction for the same backward."""
    w, late = nn.Parameter(torch.ones(1).double()), nn.Parameter(torch.ones(1).double(), requires_grad=False)
    optimizer = torchring.wrap(torch.optim.SGD([w, late], lr=0.1))
    for step in range(3):
        late.requires_grad_(step > 0)
        optimizer.zero_grad()
        optimizer.weigh(0 if step < 2 else 1)
        (w * late).sum().backward()
        optimizer.step()
    assert w.tolist() == late.tolist() == [0.9]


@pytest.mark.parametrize("world_size", [1, 2])
@ranks()
def test_a_backward_that_adds_to_results(world_size: int, rank: int) -> None:
    w = nn.Parameter(torch.zeros(1).double())
    optimizer = torchring.wrap(torch.optim.SGD([w], lr=0.1))

    def train(*weights: float) -> list[float | None]:
        optimizer.zero_grad()
        for i, weight in enumerate(weights):
            _backward(optimizer, w * (1 + 4 * i), weight)
        return _first(w)

    assert [train(1, 3), train(2, 2 - 2 * min(rank, 1)), train(0, 1)] == [[6.0], [6.0], [5.0]]
    all_zero = attempt(lambda: train(1, 0))
    if world_size > 1:
        assert all_zero.startswith("GradientError: all ranks gave weight 0 to a backward() that adds")


def test_groups_of_backwards_in_a_world_of_one() -> None:
    """Which reduces nothing."""
    (a, _), optimizer = _pair(accumulate=2)
    _backward(optimizer, a * 5, 1)
    optimizer.skip()
    assert "gradients of an earlier step" in attempt(lambda: optimizer.weigh(3))

    (a, _), optimizer = _pair(accumulate=2)
    _backward(optimizer, a * 5, 1)
    with optimizer.no_sync():  # what is skipped here does not count
        optimizer.skip()
        optimizer.weigh(3)
        assert torch.autograd.grad((a * 7).sum(), a)[0].tolist() == [7.0, 7.0], "not of the mean"
        optimizer.skip()
    assert _first(a) == [5.0]
    _backward(optimizer, a, 3)
    assert _first(a) == [2.0], "the mean of 5 and three times 1"


def test_odd_ways_in_a_world_of_one() -> None:
    (weight, _), optimizer = _pair()
    for set_to_none in (True, False):
        for zeroes_first in (False, True, False, True):
            if zeroes_first:
                optimizer.zero_grad(set_to_none=set_to_none)
            optimizer.weigh(4)
            if not zeroes_first:
                optimizer.zero_grad(set_to_none=set_to_none)
            weight.sum().backward()
            assert _first(weight) == [1.0]
    optimizer.weigh(4)
    optimizer.skip()
    assert _first(weight) == [1.0]
    optimizer.zero_grad()
    optimizer.weigh(0)
    weight.sum().backward()
    assert _first(weight) == [0.0]
    optimizer.zero_grad()
    weight.sum().backward()
    assert _first(weight) == [1.0]
    optimizer.weigh(0)
    optimizer.close()
    weight.sum().backward()
    assert _first(weight) == [2.0]


def test_sparse_gradients_of_one_rank_have_the_weights_of_their_micro_steps() -> None:
    words = nn.Embedding(3, 1, sparse=True)
    with torch.no_grad():
        words.weight.fill_(1.0)
    optimizer = torchring.wrap(torch.optim.SGD(words.parameters(), lr=1.0), words, accumulate=2)
    for weight in (1.0, 3.0):
        optimizer.weigh(weight)
        words(torch.tensor([int(weight) - 1])).sum().backward()
    optimizer.step()
    assert words.weight.flatten().tolist() == [0.75, 1.0, 0.25]
