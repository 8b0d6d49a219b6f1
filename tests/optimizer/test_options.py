"""Arguments of wrap and init: a wrong one is a ValueError or TypeError that says what was received, and the other ranks
get an error, too. And `on_nonfinite`: what becomes of a step with a NaN.

Arguments of wrap, on all ranks or on one · closed optimizers · ranks with different models, options, world sizes
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import torchring
from tests.support.checks import assert_same_on_all_ranks, digest
from tests.support.grids import grid
from tests.support.harness import patient, ranks, run_pooled, run_ranks
from tests.support.training import attempt, loss_on, small_model, values
from torchring import accelerators


def _model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def _wrap(**options: Any) -> Callable[[], Any]:
    model = _model()
    return lambda: torchring.wrap(_sgd(model), model, **options)


def _with_member(member: Callable[[nn.Module], Any], pass_model: bool = True) -> Callable[[], Any]:
    """The optimizer's list of parameters has one more entry, which torch.optim itself would not have taken."""
    model = _model()
    optimizer = _sgd(model)
    optimizer.param_groups[0]["params"].append(member(model))
    return lambda: torchring.wrap(optimizer, model if pass_model else None)


def _sparse_buffer() -> Callable[[], Any]:
    model = _model()
    model.register_buffer("adjacency", torch.eye(2).to_sparse())
    return lambda: torchring.wrap(_sgd(model), model)


def _closed() -> Callable[[], Any]:
    model = _model()
    optimizer = torchring.wrap(_sgd(model), model)
    optimizer.close()
    return lambda: torchring.wrap(optimizer, model)


def _taken() -> Callable[[], Any]:
    model = _model()
    optimizer = torchring.wrap(_sgd(model), model)
    return lambda: (torchring.wrap(_sgd(model), model), optimizer)


def _grad_dtype() -> Callable[[], Any]:
    model = _model().bfloat16()
    model[2].bias.grad_dtype = torch.float32
    return lambda: torchring.wrap(_sgd(model), model)


def _lazy() -> Callable[[], Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = nn.Sequential(nn.Linear(4, 5), nn.LazyLinear(2))
    optimizer = torch.optim.SGD([model[0].weight], lr=0.1)
    optimizer.param_groups[0]["params"].append(model[1].weight)
    return lambda: torchring.wrap(optimizer, model)


def _meta() -> Callable[[], Any]:
    model = _model()
    model[2] = nn.Linear(5, 2, device="meta")
    return lambda: torchring.wrap(_sgd(model), model)


def _on_two_devices() -> None:
    with mock.patch.dict(accelerators._open, {torch.device("meta"): "a GPU"}):
        _meta()()


def _with_buffer(buffer: torch.Tensor) -> Callable[[], Any]:
    model = _model()
    model[0].register_buffer("odd", buffer)
    return lambda: torchring.wrap(_sgd(model), model)


def _all_frozen() -> Callable[[], Any]:
    model = _model().requires_grad_(False)
    return lambda: torchring.wrap(_sgd(model), model)


def _other_model() -> Callable[[], Any]:
    mine, other = _model(), _model()
    return lambda: torchring.wrap(_sgd(other), mine)


def _half_foreign() -> Callable[[], Any]:
    mine, other = _model(), nn.Linear(3, 7)
    optimizer = torch.optim.SGD([{"params": mine.parameters()}, {"params": other.parameters()}], lr=0.1)
    return lambda: torchring.wrap(optimizer, mine)


def _swapped() -> Callable[[], Any]:
    model = _model()
    return lambda: torchring.wrap(model, _sgd(model))  # type: ignore[arg-type]


def _no_module() -> Callable[[], Any]:
    model = _model()
    return lambda: torchring.wrap(_sgd(model), model.state_dict())  # type: ignore[arg-type]


def _parameters() -> Callable[[], Any]:
    return lambda: torchring.wrap(list(_model().parameters()))  # type: ignore[arg-type]


_BAD: dict[str, tuple[Callable[[], Callable[[], Any]], str, tuple[str, ...]]] = {
    "op": (lambda: _wrap(op="average"), "ValueError", ("op", "'average'", "'mean'", "'sum'")),
    "op None": (lambda: _wrap(op=None), "ValueError", ("op", "None")),
    "algorithm": (lambda: _wrap(algorithm="tree"), "ValueError", ("algorithm", "'tree'", "'direct'", "'ring'")),
    "compression": (lambda: _wrap(compression="int8"), "ValueError", ("compression", "'int8'", "'fp16'", "'bf16'")),
    "compression dtype": (lambda: _wrap(compression=torch.float16), "ValueError", ("compression", "torch.float16")),
    "compression list": (lambda: _wrap(compression=["fp16"]), "ValueError", ("compression", "['fp16']")),
    "overlap": (lambda: _wrap(overlap=True), "ValueError", ("overlap", "True", "'inline'", "'thread'")),
    "inline": (lambda: _wrap(overlap="inline", algorithm="native"), "ValueError", ("algorithm='direct'", "'native'")),
    "bucket_mb negative": (lambda: _wrap(bucket_mb=-1), "ValueError", ("bucket_mb", "-1")),
    "bucket_mb nan": (lambda: _wrap(bucket_mb=float("nan")), "ValueError", ("bucket_mb", "nan")),
    "bucket_mb text": (lambda: _wrap(bucket_mb="25"), "ValueError|TypeError", ("bucket_mb", "'25'")),
    "accumulate 0": (lambda: _wrap(accumulate=0), "ValueError", ("accumulate", "0")),
    "accumulate 1.5": (lambda: _wrap(accumulate=1.5), "ValueError|TypeError", ("accumulate", "1.5")),
    "accumulate None": (lambda: _wrap(accumulate=None), "ValueError|TypeError", ("accumulate", "None")),
    "unknown option": (lambda: _wrap(buckets=3), "TypeError", ("buckets",)),
    "sparse": (_sparse_buffer, "ValueError", ("adjacency cannot be broadcast", "or pass sync_initial_state=False")),
    "swapped": (_swapped, "TypeError", ("wrap(optimizer, model): the optimizer comes first", "Sequential")),
    "no optimizer": (_parameters, "TypeError", ("Optimizer", "list")),
    "no module": (_no_module, "TypeError", ("Module", "OrderedDict|dict")),
    "closed": (_closed, "ValueError", ()),
    "taken": (_taken, "ValueError", ("0.weight", "close")),
    "grad_dtype": (_grad_dtype, "ValueError", ("2.bias", "grad_dtype=torch.float32")),
    "other model": (_other_model, "ValueError", ("model", "(5, 4)")),
    "half foreign": (_half_foreign, "ValueError", ("group1.param0", "(7, 3)")),
    "foreign tensor": (lambda: _with_member(lambda _: nn.Parameter(torch.zeros(3, 9))), "ValueError", ("(3, 9)",)),
    "non-leaf": (lambda: _with_member(lambda m: m[0].weight * 2, False), "ValueError|TypeError", ("leaf", "param4")),
    "non-leaf, model": (lambda: _with_member(lambda m: m[0].weight * 2), "ValueError|TypeError", ("param4",)),
    "not a tensor": (lambda: _with_member(lambda _: 3.5, False), "TypeError|ValueError", ("param4", "float|3.5")),
    "twice": (lambda: _with_member(lambda m: m[2].bias), "ValueError", ("2.bias", "twice|again|dupl")),
    "sparse buffer": (lambda: _with_buffer(torch.eye(3).to_sparse()), "ValueError", ("0.odd", "sparse", "to_dense")),
    "expanded buffer": (lambda: _with_buffer(torch.zeros(3, 1).expand(3, 4)), "ValueError", ("0.odd", "clone")),
    "lazy": (_lazy, "ValueError", ("1.weight",)),
    "meta": (_meta, "ValueError", ("2.weight", "meta")),
    "two devices": (lambda: _on_two_devices, "ValueError", ("2.weight is on meta, 0.weight on cpu; one optimizer",)),
    "frozen": (_all_frozen, "ValueError", ("gradient",)),
}


def _bad_call(rank: int, world_size: int, name: str, on: tuple[int, ...]) -> list[Any]:
    """The error, how long it took, and whether all ranks train together after it."""
    torchring.init(timeout_seconds=5)
    bad = _BAD[name][0]()
    good_model = _model()
    good = _sgd(good_model)
    started = time.monotonic()
    problem = attempt(bad if rank in on else lambda: torchring.wrap(good, good_model))
    seconds = time.monotonic() - started
    after = _model()
    optimizer = torchring.wrap(_sgd(after), after)
    after(torch.full((2, 4), float(rank))).square().mean().backward()
    optimizer.step()
    torchring.shutdown()
    return [problem, seconds, digest(after.parameters())]


def _in_turn(rank: int, world_size: int, fn: Callable[..., Any], calls: list[tuple[Any, ...]]) -> list[Any]:
    """The results of fn(rank, world_size, *arguments), each of which has a world of its own."""
    results = []
    for arguments in calls:
        print(arguments)  # the last one in the output is the one that failed
        results.append(fn(rank, world_size, *arguments))
    return results


def _assert_says(problem: str, name: str) -> None:
    _, kinds, fragments = _BAD[name]
    assert problem.split(":")[0] in kinds.split("|"), problem
    for fragment in fragments:
        assert any(option in problem for option in fragment.split("|")), f"{fragment!r} is not in: {problem}"


def test_on_all_ranks_it_is_the_callers_error(subtests: pytest.Subtests) -> None:
    per_rank = run_ranks(_in_turn, 2, _bad_call, [(name, (0, 1)) for name in _BAD])
    for name, *results in zip(_BAD, *per_rank, strict=True):
        with subtests.test(name):
            for problem, _, _ in results:
                _assert_says(problem, name)
            assert_same_on_all_ranks([trained for _, _, trained in results])


def test_on_one_rank_the_others_are_told(subtests: pytest.Subtests) -> None:
    """PlanMismatchError on the good ranks, naming the bad one and what it was, at once; and the world still works."""
    names = [name for name in _BAD if name not in ("unknown option", "inline")]  # which is known after the comparison
    per_rank = run_ranks(_in_turn, 3, _bad_call, [(name, (1,)) for name in names])
    for name, *results in zip(names, *per_rank, strict=True):
        with subtests.test(name):
            _assert_says(results[1][0], name)
            reason = results[1][0].split(": ", 1)[1]
            for problem, seconds, _ in (results[0], results[2]):
                assert problem.startswith("PlanMismatchError")
                assert "rank 1" in problem
                assert reason[:40] in problem
                assert seconds < patient(5)
            assert_same_on_all_ranks([trained for _, _, trained in results])


def test_in_a_world_of_one_too(subtests: pytest.Subtests) -> None:
    names = ["op", "bucket_mb negative", "closed", "other model", "twice", "meta", "swapped"]
    (results,) = run_ranks(_in_turn, 1, _bad_call, [(name, (0,)) for name in names], launcher_env=False)
    for name, (problem, _, _) in zip(names, results, strict=True):
        with subtests.test(name):
            _assert_says(problem, name)


class _Named(nn.Module):
    def __init__(self, swapped: bool = False, name: str = "middle", **buffers: torch.Tensor) -> None:
        super().__init__()
        torch.manual_seed(3)
        parts = {"first": nn.Linear(4, 4), name: nn.Linear(4, 4), "last": nn.Linear(4, 2)}
        for key in reversed(parts) if swapped else parts:
            setattr(self, key, parts[key])
        for key, value in buffers.items():
            self.register_buffer(key, value)


def _edited(change: Callable[[_Named], Any]) -> _Named:
    model = _Named()
    change(model)
    return model


_ODD: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], tuple[str, ...]]] = {
    "shape": (lambda: _edited(lambda m: setattr(m, "middle", nn.Linear(4, 4, bias=False))), {}, ("middle.bias",)),
    "size": (lambda: _edited(lambda m: setattr(m, "last", nn.Linear(4, 3))), {}, ("last.weight", "(3, 4)", "(2, 4)")),
    "one more": (lambda: _edited(lambda m: setattr(m, "more", nn.Linear(2, 2))), {}, ("more.weight",)),
    "one less": (lambda: _edited(lambda m: delattr(m, "last")), {}, ("last.weight",)),
    "dtype": (lambda: _edited(lambda m: m.middle.double()), {}, ("middle.weight", "float64")),
    "order": (lambda: _Named(swapped=True), {}, ("first.weight", "last.weight")),
    "name": (lambda: _Named(name="centre"), {}, ("middle.weight", "centre.weight")),
    "frozen": (lambda: _edited(lambda m: m.middle.requires_grad_(False)), {}, ("middle.weight",)),
    "buffers": (lambda: _Named(running=torch.zeros(3)), {}, ("running",)),
    "op": (_Named, {"op": "sum"}, ("op='sum'", "op='mean'")),
    "bucket_mb": (_Named, {"bucket_mb": 1.0}, ("bucket_mb=1.0", "bucket_mb=None")),
    "accumulate": (_Named, {"accumulate": 2}, ("accumulate=2",)),
    "compression": (_Named, {"compression": "bf16"}, ("compression='bf16'",)),
    "algorithm": (_Named, {"algorithm": "ring"}, ("algorithm='ring'",)),
    "no initial state": (_Named, {"sync_initial_state": False}, ("sync_initial_state=False",)),
}


def _odd_one(rank: int, world_size: int, name: str, odd: int, pass_model: bool) -> dict[str, Any]:
    make, options, _ = _ODD[name]
    model = make() if rank == odd else _Named()
    started = time.monotonic()
    seen = {"type": "none", "text": "", "peers": (), "seconds": 0.0}
    try:
        torchring.wrap(_sgd(model), model if pass_model else None, **(options if rank == odd else {}))
    except torchring.RingError as error:
        seconds = time.monotonic() - started
        seen = {"type": type(error).__name__, "text": str(error), "peers": error.peers, "seconds": seconds}
    torchring.shutdown()
    return seen


@pytest.mark.parametrize("odd", [0, 1])
def test_a_rank_with_another_model_or_option_is_named_on_every_rank(odd: int, subtests: pytest.Subtests) -> None:
    per_rank = run_ranks(_in_turn, 3, _odd_one, [(name, odd, True) for name in _ODD])
    for name, *results in zip(_ODD, *per_rank, strict=True):
        for seen in results:
            with subtests.test(name):
                assert seen["type"] == "PlanMismatchError", seen
                assert seen["seconds"] < patient(5)
                assert f"rank {odd}" in seen["text"]
                for fragment in _ODD[name][2]:
                    assert fragment in seen["text"], f"{fragment!r} is not in: {seen['text']}"
                assert seen["peers"] == ((1,) if odd == 1 else (1, 2))  # rank 0 is what the others are compared with


def test_without_the_model_parameters_have_numbers(subtests: pytest.Subtests) -> None:
    names = ["size", "one more", "one less", "dtype", "frozen"]
    per_rank = run_ranks(_in_turn, 3, _odd_one, [(name, 2, False) for name in names])
    for name, *results in zip(names, *per_rank, strict=True):
        for seen in results:
            with subtests.test(name):
                assert seen["type"] == "PlanMismatchError", seen
                assert "group0.param" in seen["text"]
                assert seen["peers"] == (2,)


def _odd_optimizer(rank: int, world_size: int, kind: str) -> str:
    torchring.init(timeout_seconds=5)
    model = _model()
    if rank == 0:
        optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    elif kind == "groups":
        optimizer = torch.optim.SGD([{"params": p} for p in model.parameters()], lr=0.1, momentum=0.9)
    else:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def train() -> None:
        wrapped = torchring.wrap(optimizer, model)
        for _ in range(3):
            wrapped.zero_grad()
            model(torch.ones(2, 4)).sum().backward()
            wrapped.step()
        torchring.barrier()

    return attempt(train) or digest(model.parameters())


@pytest.mark.parametrize("kind", ["groups", "class"])
def test_a_rank_with_another_optimizer_is_an_error_everywhere(kind: str) -> None:
    """Ring errors or value errors, but no rank trains on by itself."""
    results = run_ranks(_odd_optimizer, 2, kind, deadline=30)
    assert all("Error: " in result for result in results), results


# on_nonfinite. What "raise" does: test_mistakes.py, i


_POISONED = 1  # the step


_STEPS = 4


def _flat(model: nn.Module) -> Tensor:
    return torch.cat([value.flatten() for value in values(model)])


def _skipping(rank: int, size: int, value: float, options: dict[str, Any]) -> tuple[Tensor, int, list[Any]]:
    """Parameters, number of skipped steps, step counts of the optimizer."""
    model = small_model()
    optimizer = torchring.wrap(torch.optim.Adam(model.parameters(), lr=0.05), model, on_nonfinite="skip", **options)
    with pytest.raises(ValueError, match="does not work with on_nonfinite='skip'"):
        optimizer.step(lambda: 0.0)
    for step in range(_STEPS):
        optimizer.zero_grad()
        is_bad = step == _POISONED and rank == size - 1
        (loss_on(model, rank, step) * (value if is_bad else 1.0)).backward()
        optimizer.step()
    counts = [int(state["step"]) for state in optimizer.state.values() if "step" in state]
    return _flat(model), optimizer.stats().num_skipped_steps, counts


def _as_one(size: int) -> Tensor:
    """One process that has all batches, and leaves the poisoned step out."""
    model = small_model()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for step in set(range(_STEPS)) - {_POISONED}:
        optimizer.zero_grad()
        torch.stack([loss_on(model, rank, step) for rank in range(size)]).mean().backward()
        optimizer.step()
    return _flat(model)


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
def test_a_step_is_left_out_on_all_ranks(value: float) -> None:
    results = run_pooled(_skipping, 2, value, {})
    assert_same_on_all_ranks([parameters for parameters, *_ in results])
    torch.testing.assert_close(results[0][0], _as_one(2), rtol=1e-9, atol=1e-9)
    for _, num_skipped, counts in results:
        assert num_skipped == 1
        assert set(counts) <= {_STEPS - 1}


@grid(
    "options",
    [{"algorithm": "native"}, {"overlap": "thread"}, {"compression": "bf16"}],
    keep=lambda options: "algorithm" in options,
)
def test_by_every_way_to_reduce(options: dict[str, Any]) -> None:
    results = run_pooled(_skipping, 3, float("nan"), options)
    assert_same_on_all_ranks([parameters for parameters, *_ in results])
    for parameters, num_skipped, counts in results:
        assert num_skipped == 1
        assert set(counts) == {_STEPS - 1}
        assert bool(parameters.isfinite().all())


@ranks(2)
def test_other_ways(rank: int) -> None:
    """ "ignore"; a sparse gradient; one that the script mends; a GradScaler; options that differ."""
    x = torch.ones(1, 3) * (float("nan") if rank == 1 else 1.0)

    model = nn.Linear(3, 2)
    optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, on_nonfinite="ignore")
    model(x).sum().backward()
    optimizer.step()
    assert [bool(p.isnan().any()) for p in model.parameters()] == [True, False]
    optimizer.close()

    embedding = nn.Embedding(4, 2, sparse=True)
    optimizer = torchring.wrap(torch.optim.SGD(embedding.parameters(), lr=0.1), embedding, on_nonfinite="skip")
    before = values(embedding)
    for _ in range(2):  # in the second, `.grad` is there already
        (embedding(torch.tensor([rank])) * x[0, 0]).sum().backward()
        optimizer.step()
    assert torch.equal(values(embedding)[0], before[0])
    assert optimizer.stats().num_skipped_steps == 2
    optimizer.close()

    model = nn.Linear(3, 2)
    optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, on_nonfinite="skip")
    model(x).sum().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        parameter.grad.nan_to_num_(0.5)
    before = values(model)
    optimizer.step()
    assert all(bool((p != old).all()) for p, old in zip(model.parameters(), before, strict=True))
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0, growth_interval=100)
    for step in range(3):
        optimizer.zero_grad()
        scaler.scale(model(x if step == 1 else torch.ones(1, 3)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
    assert (scaler.get_scale(), optimizer.stats().num_skipped_steps) == (2.0, 0)  # the scaler has skipped it by itself
    optimizer.close()

    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    said = attempt(lambda: torchring.wrap(sgd, model, on_nonfinite=("skip", "ignore")[rank]))
    assert said.startswith("PlanMismatchError")
    assert "on_nonfinite='skip'" in said


def test_a_world_of_one() -> None:
    weight = nn.Parameter(torch.ones(3, dtype=torch.complex64))
    optimizer = torchring.wrap(torch.optim.SGD([weight], lr=0.1), on_nonfinite="skip")
    for factor in (float("nan"), 1.0):
        optimizer.zero_grad()
        before = weight.detach().clone()
        (weight * factor).abs().sum().backward()
        optimizer.step()
        assert torch.equal(weight.detach(), before) == (factor != 1.0)
    assert optimizer.stats().num_skipped_steps == 1
    optimizer.close()
    with pytest.raises(ValueError, match="on_nonfinite must be one of 'raise', 'skip', 'ignore', got 'stop'"):
        torchring.wrap(torch.optim.SGD([weight], lr=0.1), on_nonfinite="stop")  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["raise", "skip"])
@ranks(2)
def test_a_nan_is_not_forgotten_where_all_ranks_skip_the_next_backward(mode: str, rank: int) -> None:
    """NaN in one backward, and none at all in the next, which all ranks leave out."""
    model = small_model()
    optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, on_nonfinite=mode)
    start = _flat(model)
    (loss_on(model, rank, 0) * (torch.nan if rank == 0 else 1.0)).backward()
    optimizer.skip()
    error = attempt(optimizer.step)
    has_stepped = not torch.equal(_flat(model), start)
    optimizer.zero_grad()
    optimizer.skip()
    optimizer.step()
    loss_on(model, rank, 1).backward()
    optimizer.step()
    assert ("is not finite; NaN or infinity came from rank 0" in error) == (mode == "raise")
    assert not has_stepped
    assert optimizer.stats().num_skipped_steps == (mode == "skip")
    assert _flat(model).isfinite().all()
