"""Arguments of wrap and init: a wrong one is a ValueError or TypeError that says what was received, and the other ranks
get an error, too. And `on_nonfinite`: what becomes of a step with a NaN.

Arguments of wrap, on all ranks or on one · ranks with different models and options
"""

import re
import time
import warnings
from collections.abc import Callable
from typing import Any, Final
from unittest import mock

import pytest
import torch
from torch import nn

import torchring
from tests.support.checks import assert_same_everywhere
from tests.support.harness import patient, ranks, run_ranks
from tests.support.training import attempt, loss_on, small_model, values
from torchring import accelerators


def _model() -> Any:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2))


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


Call = Callable[[], object]


def _wrap(change: Callable[[Any], object] = lambda model: None, pass_model: bool = True, **options: Any) -> Call:
    """The model is changed before there is an optimizer."""

    def call() -> Any:
        model = _model()
        change(model)
        return torchring.wrap(_sgd(model), model if pass_model else None, **options)

    return call


def _with_member(member: Callable[[Any], Any], pass_model: bool = True) -> Call:
    """The optimizer's list of parameters has one more entry, which torch.optim itself would not have taken."""

    def call() -> Any:
        model = _model()
        optimizer = _sgd(model)
        optimizer.param_groups[0]["params"].append(member(model))
        return torchring.wrap(optimizer, model if pass_model else None)

    return call


def _grad_dtype(model: Any) -> None:
    model.bfloat16()[2].bias.grad_dtype = torch.float32


def _lazy() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model: Any = nn.Sequential(nn.Linear(4, 5), nn.LazyLinear(2))
    optimizer = torch.optim.SGD([model[0].weight], lr=0.1)
    optimizer.param_groups[0]["params"].append(model[1].weight)
    return torchring.wrap(optimizer, model)


def _meta(model: Any) -> None:
    model[2] = nn.Linear(5, 2, device="meta")


def _on_two_devices() -> None:
    with mock.patch.dict(accelerators._open, {torch.device("meta"): "a GPU"}):
        _wrap(_meta)()


def _half_foreign() -> Any:
    mine, other = _model(), nn.Linear(3, 7)
    return torchring.wrap(torch.optim.SGD([{"params": each.parameters()} for each in (mine, other)], lr=0.1), mine)


wrap: Any = torchring.wrap  # which takes everything here
_SPARSE: Final = torch.eye(3).to_sparse()
_IGNORE: Final = "ValueError: ignore has "

# What is called, and what the error says.
_BAD: Final[dict[str, tuple[Call, str]]] = {
    "op": (_wrap(op="average"), "ValueError: op .*'mean'.*'sum'.*'average'"),
    "algorithm": (_wrap(algorithm="tree"), "ValueError: algorithm .*'direct'.*'ring'.*'tree'"),
    "compression": (_wrap(compression="int4"), "ValueError: compression .*'fp16'.*'bf16'.*'int4'"),
    "compression dtype": (_wrap(compression=torch.float16), "ValueError: compression .*torch.float16"),
    "overlap": (_wrap(overlap=True), "ValueError: overlap .*'inline'.*'thread'.*True"),
    "inline": (_wrap(overlap="inline", algorithm="native"), "ValueError: .*algorithm='direct'.*'native'"),
    "bucket_mb negative": (_wrap(bucket_mb=-1), "ValueError: bucket_mb .*-1"),
    "bucket_mb nan": (_wrap(bucket_mb=float("nan")), "ValueError: bucket_mb .*nan"),
    "bucket_mb text": (_wrap(bucket_mb="25"), "(Value|Type)Error: bucket_mb .*'25'"),
    "accumulate 0": (_wrap(accumulate=0), "ValueError: accumulate .*0"),
    "accumulate 1.5": (_wrap(accumulate=1.5), "(Value|Type)Error: accumulate .*1.5"),
    "on_nonfinite": (
        _wrap(on_nonfinite="stop"),
        "ValueError: on_nonfinite must be one of 'raise', 'skip', 'ignore', got 'stop'",
    ),
    "unknown option": (_wrap(buckets=3), "TypeError: .*buckets"),
    "sync_buffers": (
        _wrap(sync_buffers="max"),
        "ValueError: sync_buffers must be one of 'mean', 'rank0', None, got 'max'",
    ),
    "sync_buffers of one": (
        _wrap(lambda model: model.register_buffer("odd", torch.zeros(2)), sync_buffers={"odd": "max"}),
        r"ValueError: sync_buffers\['odd'\] must be one of 'mean', 'rank0'",
    ),
    "sync_buffers of none": (
        _wrap(sync_buffers={"1.running_median": None}),
        "ValueError: sync_buffers has '1.running_median', which",
    ),
    "ignore text": (_wrap(ignore="0"), "TypeError: ignore takes a list"),
    "ignore number": (_wrap(ignore=[0]), "TypeError: ignore takes names, modules and parameters, got a int"),
    "ignore name": (_wrap(ignore=["5"]), f"{_IGNORE}'5', which is no parameter, buffer or module of the model"),
    "ignore module": (_wrap(ignore=[nn.Linear(1, 1)]), f"{_IGNORE}a Linear"),
    "ignore, no model": (_wrap(pass_model=False, ignore=["0"]), "ValueError: .*pass the model"),
    "swapped": (
        lambda: wrap(_model(), _sgd(_model())),
        r"TypeError: .*wrap\(optimizer, model\): the optimizer comes first.*Sequential",
    ),
    "no optimizer": (lambda: wrap(list(_model().parameters())), "TypeError: .*Optimizer.*list"),
    "no module": (lambda: wrap(_sgd(_model()), _model().state_dict()), "TypeError: .*Module.*(OrderedDict|dict)"),
    "grad_dtype": (_wrap(_grad_dtype), "ValueError: .*2.bias.*grad_dtype=torch.float32"),
    "other model": (lambda: wrap(_sgd(_model()), _model()), r"ValueError: .*\(5, 4\).*model"),
    "half foreign": (
        _half_foreign,
        r"ValueError: group1.param0.*\(7, 3\)(?s:.*)pass torch.nn.ModuleList\(\[model, loss\]\)",
    ),
    "foreign tensor": (_with_member(lambda _: nn.Parameter(torch.zeros(3, 9))), r"ValueError: .*\(3, 9\)"),
    "non-leaf": (_with_member(lambda model: model[0].weight * 2, False), "(Value|Type)Error: .*param4.*leaf"),
    "not a tensor": (_with_member(lambda _: 3.5, False), "(Value|Type)Error: .*param4.*(float|3.5)"),
    "twice": (_with_member(lambda model: model[2].bias), "ValueError: .*2.bias.*(twice|again|dupl)"),
    "sparse buffer": (
        _wrap(lambda model: model[0].register_buffer("odd", _SPARSE)),
        "ValueError: .*0.odd cannot be broadcast.*sparse.*to_dense.* or pass sync_initial_state=False",
    ),
    "expanded buffer": (
        _wrap(lambda model: model[0].register_buffer("odd", torch.zeros(3, 1).expand(3, 4))),
        "ValueError: .*0.odd.*clone",
    ),
    "lazy": (_lazy, "ValueError: .*1.weight"),
    "meta": (_wrap(_meta), "ValueError: .*2.weight.*meta"),
    "two devices": (_on_two_devices, "ValueError: .*2.weight is on meta, 0.weight on cpu; one optimizer"),
    "frozen": (_wrap(lambda model: model.requires_grad_(False)), "ValueError: .*gradient"),
}


def _train(rank: int) -> None:
    """The world still works."""
    model = _model()
    optimizer = torchring.wrap(_sgd(model), model)
    model(torch.full((2, 4), float(rank))).square().mean().backward()
    optimizer.step()
    assert_same_everywhere(model.parameters())


@pytest.mark.parametrize("world_size", [1, 2])
@ranks(None, run_ranks)
def test_on_all_ranks_it_is_the_callers_error(world_size: int, rank: int) -> None:
    for name in _BAD if world_size > 1 else ("op", "other model", "twice", "swapped"):
        call, said = _BAD[name]
        problem = attempt(call)
        assert re.match(f"(?s){said}", problem), f"{name}: {problem or 'no error'}"
    _train(rank)


@ranks(3, run_ranks)
def test_on_one_rank_the_others_are_told(rank: int) -> None:
    """PlanMismatchError on the good ranks, naming the bad one and what it was, at once; and the world still works."""
    torchring.init(timeout_seconds=5)
    for name, (call, said) in _BAD.items():
        if name in ("unknown option", "inline"):  # which is known after the comparison
            continue
        model = _model()
        started = time.monotonic()
        problem = attempt(call if rank == 1 else lambda model=model: torchring.wrap(_sgd(model), model))
        reasons = torchring.all_gather_object(problem)
        assert re.match(f"(?s){said}", reasons[1]), f"{name}: {reasons[1]}"
        if rank != 1:
            assert problem.startswith("PlanMismatchError"), problem
            assert "rank 1" in problem
            assert reasons[1].split(": ", 1)[1][:40] in problem
            assert time.monotonic() - started < patient(5)
    _train(rank)


class _Named(nn.Module):
    def __init__(self, swapped: bool = False, name: str = "middle", **buffers: torch.Tensor) -> None:
        super().__init__()
        torch.manual_seed(3)
        parts = {"first": nn.Linear(4, 4), name: nn.Linear(4, 4), "last": nn.Linear(4, 2)}
        for key in reversed(parts) if swapped else parts:
            setattr(self, key, parts[key])
        for key, value in buffers.items():
            self.register_buffer(key, value)


def _edited(change: Callable[[_Named], Any]) -> Callable[[], _Named]:
    def make() -> _Named:
        model = _Named()
        change(model)
        return model

    return make


# Of the odd rank: its model, its options, and what every rank's error says.
_ODD: Final[dict[str, tuple[Callable[[], nn.Module], dict[str, Any], tuple[str, ...]]]] = {
    "shape": (_edited(lambda m: setattr(m, "middle", nn.Linear(4, 4, bias=False))), {}, ("middle.bias",)),
    "size": (_edited(lambda m: setattr(m, "last", nn.Linear(4, 3))), {}, ("last.weight", "(3, 4)", "(2, 4)")),
    "one more": (_edited(lambda m: setattr(m, "more", nn.Linear(2, 2))), {}, ("more.weight",)),
    "one less": (_edited(lambda m: delattr(m, "last")), {}, ("last.weight",)),
    "dtype": (_edited(lambda m: m.middle.double()), {}, ("middle.weight", "float64")),
    "order": (lambda: _Named(swapped=True), {}, ("first.weight", "last.weight")),
    "name": (lambda: _Named(name="centre"), {}, ("middle.weight", "centre.weight")),
    "frozen": (_edited(lambda m: m.middle.requires_grad_(False)), {}, ("middle.weight",)),
    "buffers": (lambda: _Named(running=torch.zeros(3)), {}, ("running",)),
    "op": (_Named, {"op": "sum"}, ("op='sum'", "op='mean'")),
    "bucket_mb": (_Named, {"bucket_mb": 1.0}, ("bucket_mb=1.0", "bucket_mb=None")),
    "accumulate": (_Named, {"accumulate": 2}, ("accumulate=2",)),
    "compression": (_Named, {"compression": "bf16"}, ("compression='bf16'",)),
    "algorithm": (_Named, {"algorithm": "ring"}, ("algorithm='ring'",)),
    "sync_buffers": (_Named, {"sync_buffers": "rank0"}, ("sync_buffers='rank0'", "sync_buffers='mean'")),
    "on_nonfinite": (_Named, {"on_nonfinite": "skip"}, ("on_nonfinite='skip'", "on_nonfinite='raise'")),
    "no initial state": (_Named, {"sync_initial_state": False}, ("sync_initial_state=False",)),
}


@ranks(3, run_ranks)
def test_a_rank_with_another_model_or_option_is_named_on_every_rank(rank: int) -> None:
    """Without the model, parameters have numbers."""
    numbered = [(name, 2, False) for name in ("size", "one more", "one less", "dtype", "frozen")]
    for name, odd, pass_model in [*((name, odd, True) for odd in (0, 1) for name in _ODD), *numbered]:
        make, options, fragments = _ODD[name]
        model = make() if rank == odd else _Named()
        started = time.monotonic()
        with pytest.raises(torchring.PlanMismatchError) as caught:
            torchring.wrap(_sgd(model), model if pass_model else None, **(options if rank == odd else {}))
        assert time.monotonic() - started < patient(5)
        assert caught.value.peers == ((odd,) if odd else (1, 2))  # rank 0 is what the others are compared with
        for fragment in (f"rank {odd}", *fragments) if pass_model else ["group0.param"]:
            assert fragment in str(caught.value), f"{name}: {fragment!r} is not in {caught.value}"
        torchring.shutdown()


# on_nonfinite. What "raise" does: test_mistakes.py; that "skip" leaves out a step on all ranks: test_semantics.py


@ranks(2)
def test_other_ways_with_what_is_not_finite(rank: int) -> None:
    """ "ignore"; a sparse gradient; one that the script mends."""
    x = torch.ones(1, 3) * (float("nan") if rank == 1 else 1.0)

    model = nn.Linear(3, 2)
    optimizer = torchring.wrap(_sgd(model), model, on_nonfinite="ignore")
    model(x).sum().backward()
    optimizer.step()
    assert [bool(p.isnan().any()) for p in model.parameters()] == [True, False]
    optimizer.close()

    embedding = nn.Embedding(4, 2, sparse=True)
    optimizer = torchring.wrap(_sgd(embedding), embedding, on_nonfinite="skip")
    before = values(embedding)
    for _ in range(2):  # in the second, `.grad` is there already
        (embedding(torch.tensor([rank])) * x[0, 0]).sum().backward()
        optimizer.step()
    assert torch.equal(values(embedding)[0], before[0])
    assert optimizer.stats().num_skipped_steps == 2
    optimizer.close()

    model = nn.Linear(3, 2)
    optimizer = torchring.wrap(_sgd(model), model, on_nonfinite="skip")
    model(x).sum().backward()
    for parameter in model.parameters():
        parameter.grad.nan_to_num_(0.5)
    before = values(model)
    optimizer.step()
    assert all(bool((p != old).all()) for p, old in zip(model.parameters(), before, strict=True))


def test_a_world_of_one_skips_too() -> None:
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


@pytest.mark.parametrize("mode", ["raise", "skip"])
@ranks(2)
def test_a_nan_is_not_forgotten_where_all_ranks_skip_the_next_backward(mode: Any, rank: int) -> None:
    """NaN in one backward, and none at all in the next, which all ranks leave out."""
    model = small_model()
    optimizer = torchring.wrap(_sgd(model), model, on_nonfinite=mode)
    before = values(model)
    (loss_on(model, rank, 0) * (torch.nan if rank == 0 else 1.0)).backward()
    optimizer.skip()
    error = attempt(optimizer.step)
    assert ("is not finite; NaN or infinity came from rank 0" in error) == (mode == "raise")
    assert all(map(torch.equal, model.parameters(), before))
    optimizer.zero_grad()
    optimizer.skip()
    optimizer.step()
    loss_on(model, rank, 1).backward()
    optimizer.step()
    assert optimizer.stats().num_skipped_steps == (mode == "skip")
    assert all(bool(p.isfinite().all()) for p in model.parameters())
