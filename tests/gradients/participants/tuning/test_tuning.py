"""bucket_mb="auto": what is found is tried, kept or dropped, remembered, and never changes a parameter.

Times are scripted where a test needs a certain decision, and real where it must not matter what is decided.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import torchring
from tests.support.checks import assert_same_on_all_ranks, digest
from tests.support.harness import run_pooled, run_ranks
from torchring.allreduce.device.stream import OnStream
from torchring.gradients.participants.tuning import best_plan, candidates, plan_cache, tuning
from torchring.gradients.participants.tuning.best_plan import cost_alone, find_groups, predict, slowdown, slowed
from torchring.gradients.participants.tuning.boundaries import Cut, ReductionCost
from torchring.gradients.participants.tuning.candidates import Tuned
from torchring.gradients.participants.tuning.plan_cache import FoundBuckets
from torchring.gradients.participants.tuning.trial import Times
from torchring.gradients.participants.tuning.tuning import open_tuner, tunes_by_default
from torchring.gradients.plan import ParameterSpec, Plan, build_plan
from torchring.memory import host as host_module

_NUM_LAYERS = 4


def _turn(total: float, exposed: float) -> list[Times]:
    """Milliseconds, give or take 1."""
    return [Times((total + by) / 1e3, (exposed + by) / 1e3, 0.01) for by in (-1, 0, 1)]


_SLOW = _turn(20, 10)
_FAST = _turn(15, 5)
_LONGER = _turn(20.5, 5)  # reductions are hidden, but not for free, though by less than the noise
_ALIKE = _turn(20, 9)


def _model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(_NUM_LAYERS)])


def _loss(model: nn.Module, rank: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    loss: Tensor = model(torch.randn(3, 4, generator=generator)).square().mean()
    return loss


def _wrap(model: nn.Module, **options: Any) -> torchring.DistributedOptimizer:
    return torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9), model, **options)


@contextlib.contextmanager
def _scripted(folder: str, turns: Sequence[list[Times]] = ()) -> Iterator[None]:
    """Inside, a turn has three rounds. With `turns`, they take these times, and one bucket per parameter is found."""
    script = map(list, turns)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict("os.environ", TORCHRING_CACHE=folder))
        stack.enter_context(mock.patch.object(tuning, "_NUM_ROUNDS", 3))
        if turns:
            stack.enter_context(mock.patch.object(tuning.Tuner, "_agree_on_times", side_effect=script))
            stack.enter_context(mock.patch.object(best_plan, "best_cut", _one_by_one))
            stack.enter_context(
                mock.patch.object(candidates, "predict", lambda plan, *_: 1.0 - 0.1 * len(plan.buckets))
            )
            stack.enter_context(mock.patch.object(tuning, "measure_cost", return_value=[(1024, 1e-3)]))
        yield


def _one_by_one(ready: Sequence[float], num_bytes: Sequence[float], *_: Any, **__: Any) -> Cut:
    assert list(ready) == sorted(ready)
    assert list(num_bytes) == [64.0] * _NUM_LAYERS
    return Cut(tuple(range(1, _NUM_LAYERS + 1)), 1.0)


def _train(rank: int, model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[int]:
    """Returns the number of buckets in each step."""
    numbers = []
    for step in range(steps):
        optimizer.zero_grad()
        _loss(model, rank, step).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        assert isinstance(optimizer, torchring.DistributedOptimizer)
        numbers.append(optimizer.stats().num_buckets)
    return numbers


def _bytes_of(model: nn.Module) -> str:
    return digest(torch.cat([p.detach().flatten() for p in model.parameters()]))


# What is found is tried


def _tried(rank: int, _: int, folder: str, options: dict[str, Any], turns: list[list[Times]]) -> dict[str, Any]:
    with _scripted(folder, turns):
        result: dict[str, Any] = {}
        for name, bucket_mb in (("default", None), ("auto", "auto"), ("again", "auto")):
            model = _model()
            optimizer = _wrap(model, bucket_mb=bucket_mb, **options)
            result[name] = _train(rank, model, optimizer, 19), optimizer.stats().reason, _bytes_of(model)
            optimizer.close()
        return result


@pytest.mark.parametrize("options", [{}, {"overlap": "thread"}, {"algorithm": "native"}], ids=str)
def test_better_buckets_are_kept_and_known_to_the_next_start(options: dict[str, Any], tmp_path: Path) -> None:
    for result in run_pooled(_tried, 2, str(tmp_path), options, [_SLOW, [*_FAST, *_FAST], _SLOW, _FAST]):
        (first, plain, expected), (numbers, reason, tuned), (at_once, recalled, again) = result.values()
        assert expected == tuned == again  # not a bit of a parameter depends on the buckets
        assert first == [1] * 19
        assert numbers == [1] * 5 + [4] * 4 + [1] * 4 + [4] * 6  # a round that does not count, and three that do
        assert at_once == [4] * 19
        found, predicted = reason.removeprefix(f"{plain}; 4 buckets found for this model: ").split("; ")
        assert found == "5 ms exposed instead of 10 ms, and backward took 15 ms instead of 20 ms"
        assert predicted.endswith("ms exposed was predicted")
        assert recalled == f"{reason}, as measured by an earlier run"
    (file,) = tmp_path.rglob("*.json")
    assert json.loads(file.read_text())["groups"] == [[3], [2], [1], [0]]


@pytest.mark.parametrize("found", [_ALIKE, _LONGER, _SLOW], ids=["noise", "slower backward", "equal"])
def test_others_are_dropped_and_not_tried_again(found: list[Times], tmp_path: Path) -> None:
    for result in run_pooled(_tried, 2, str(tmp_path), {}, [_SLOW, found, _SLOW, found]):
        (_, plain, expected), (numbers, reason, tuned), (at_once, recalled, again) = result.values()
        assert expected == tuned == again
        assert numbers == [1] * 5 + [4] * 4 + [1] * 4 + [4] * 4 + [1] * 2
        assert at_once == [1] * 19
        assert reason.startswith(f"{plain}; default buckets, as 4 buckets found for this model were not better: ")
        assert recalled == f"{reason}, as measured by an earlier run"


# Where it must not matter what is decided


class _Odd(nn.Module):
    """Parameters of two dtypes, a sparse one, one that is used in odd steps only, and one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.words = nn.Embedding(8, 4, sparse=True)
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.odd = nn.Linear(4, 4)
        self.wide = nn.Parameter(torch.ones(4, dtype=torch.float64))
        self.unused = nn.Parameter(torch.ones(3))

    def loss(self, rank: int, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(100 * step + rank)
        x = self.words(torch.randint(0, 8, (3,), generator=generator))
        for layer in [*self.layers, *([self.odd] if step % 2 else [])]:
            x = torch.tanh(layer(x))
        return (x.double() * self.wide).square().mean()


def _odd_training(rank: int, size: int, bucket_mb: Any) -> tuple[list[str], str]:
    """Two micro-steps a step. A backward is broken off on all ranks, and one is left out on one rank."""
    model = _Odd()
    parameters = list(model.parameters())
    optimizer = torchring.wrap(torch.optim.SGD(parameters[:-1], lr=0.1), bucket_mb=bucket_mb, accumulate=2)
    optimizer.close()
    optimizer = torchring.wrap(torch.optim.SGD(parameters, lr=0.1), model, bucket_mb=bucket_mb, accumulate=2)
    for step in range(20):
        optimizer.zero_grad()
        model.loss(rank, step).backward()  # type: ignore[no-untyped-call]
        if step == 5:
            handle = model.layers[0].weight.register_hook(_raise)
            with pytest.raises(ArithmeticError):
                model.loss(rank, step).backward()  # type: ignore[no-untyped-call]
            handle.remove()
            optimizer.zero_grad()
            model.loss(rank, step).backward()  # type: ignore[no-untyped-call]
        if step == 8 and rank == 1:
            optimizer.skip()
        else:
            model.loss(rank, step + 50).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    reason = optimizer.stats().reason
    optimizer.close()
    return [digest(p.detach()) for p in parameters], reason


def _raise(_: Tensor) -> None:
    raise ArithmeticError


def _both_ways(rank: int, size: int, folder: str) -> tuple[list[str], list[str], str]:
    with _scripted(folder):
        default, _ = _odd_training(rank, size, None)
        auto, reason = _odd_training(rank, size, "auto")
        return default, auto, reason.partition("; ")[2]


def test_parameters_do_not_depend_on_what_is_decided(tmp_path: Path) -> None:
    results = run_pooled(_both_ways, 2, str(tmp_path))
    for default, auto, reason in results:
        assert default == auto
        assert "until backwards have been measured" not in reason  # all of it has happened
        assert "are being tried" not in reason
    assert_same_on_all_ranks([reason for _, _, reason in results])


# By default


def _between_two_hosts(rank: int, _: int, folder: str) -> dict[str, Any]:
    host_module._host_identity = lambda: f"host {rank // 2}"
    result: dict[str, Any] = {}
    with _scripted(folder, [_SLOW, [*_FAST, *_FAST], _SLOW, _FAST]):
        for name, options in (("fixed", {"bucket_mb": 12}), ("default", {})):
            model = _model()
            optimizer = _wrap(model, algorithm="hierarchical", **options)
            result[name] = _train(rank, model, optimizer, 19)[-1], optimizer.stats().reason, _bytes_of(model)
            optimizer.close()
    return result


def test_between_two_hosts_buckets_are_tuned_unless_they_have_a_size(tmp_path: Path) -> None:
    for result in run_ranks(_between_two_hosts, 4, str(tmp_path)):
        (number, reason, expected), (tuned_number, tuned_reason, tuned) = result.values()
        assert (number, reason) == (1, "asked for")
        assert (tuned_number, tuned_reason.partition(":")[0]) == (4, "asked for; 4 buckets found for this model")
        assert tuned == expected


@pytest.mark.parametrize(
    ("hosts", "algorithm", "dtype", "expected"),
    [
        (((0,), (1,)), "ring", torch.float32, True),
        (((0,), (1,)), "native", torch.bfloat16, True),
        (((0, 1), (2, 3)), "hierarchical", torch.float32, True),
        (((0, 1), (2,)), "hierarchical", torch.bfloat16, False),  # a host's sum is rounded, the other's is not
        (((0, 1), (2, 3)), "native", torch.float32, False),
        (((0, 1), (2, 3)), "ring", torch.float32, False),
        (((0,), (1,), (2,)), "ring", torch.float32, False),
        (((0, 1),), "direct", torch.float32, False),
    ],
)
def test_by_default_buckets_are_tuned_where_no_bit_depends_on_them(
    hosts: tuple[tuple[int, ...], ...], algorithm: str, dtype: torch.dtype, expected: bool
) -> None:
    world, all_reduce = mock.Mock(hosts=hosts, size=sum(map(len, hosts))), mock.Mock(algorithm=algorithm)
    plan = build_plan(_specs(dtype), bucket_bytes=0)
    assert tunes_by_default(world, all_reduce, plan) is expected
    assert not tunes_by_default(world, mock.Mock(spec=OnStream, algorithm=algorithm), plan)


# Where it makes no sense


def _not_tuned(rank: int, _: int, folder: str) -> dict[str, str]:
    reasons = {}
    with _scripted(folder, [_SLOW, _FAST]):
        a, b = _model(), _model()
        first, second = _wrap(a, bucket_mb="auto"), _wrap(b, bucket_mb="auto")
        for step in range(6):
            (_loss(a, rank, step) + _loss(b, rank, step)).backward()  # type: ignore[no-untyped-call]
        reasons["several"] = second.stats().reason
        first.close()
        second.close()
        grown = _wrap(a, bucket_mb="auto")
        _train(rank, a, grown, 3)
        grown.add_param_group({"params": list(b.parameters())})
        reasons["added"] = grown.stats().reason
        assert _train(rank, a, grown, 4) == [2] * 4
        grown.close()
        words = nn.Embedding(4, 2, sparse=True)
        sparse = _wrap_plain(words)
        words(torch.arange(4)).sum().backward()
        reasons["sparse"] = sparse.stats().reason
        sparse.close()
        few = _wrap(a, bucket_mb="auto")
        _train(rank, a, few, 2)
        with mock.patch.object(tuning.Tuner, "_agree_on_times", return_value=_SLOW[:2]):
            _train(rank, a, few, 4)
        reasons["few"] = few.stats().reason
        few.close()
    return reasons


def _wrap_plain(model: nn.Module) -> torchring.DistributedOptimizer:
    return torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, bucket_mb="auto")


def test_where_tuning_makes_no_sense_the_reason_says_so(tmp_path: Path) -> None:
    for reasons in run_pooled(_not_tuned, 2, str(tmp_path)):
        assert {name: reason.partition("; ")[2] for name, reason in reasons.items()} == {
            "several": "nothing is tuned with several optimizers",
            "added": "default plan, as parameters were added before another plan had won a trial",
            "sparse": "no buckets, as all gradients are sparse",
            "few": "default buckets: too few backwards reduced gradients of all ranks while these were measured",
        }
    assert not [*tmp_path.rglob("*.json")]


def test_nothing_is_tuned_on_a_gpu() -> None:
    all_reduce, plan = mock.Mock(spec=OnStream), build_plan(_specs(torch.float32), bucket_bytes=0)
    all_reduce.algorithm, all_reduce.in_background = "native", True
    tuner = open_tuner(mock.Mock(), all_reduce, mock.Mock(), plan, [], Tuned(True, 0, (None, "bf16")))
    tuner.order_is_known()
    assert tuner.next_plan(plan, []) is None
    assert tuner.reason == "nothing is tuned on a GPU"


# What is kept for the next start


def _start_with(rank: int, _: int, folder: str, content: bytes) -> tuple[int, str]:
    with _scripted(folder, [_SLOW, _FAST]):
        if rank == 0:
            with mock.patch.object(plan_cache, "read", return_value=content):
                optimizer = _wrap(_model(), bucket_mb="auto")
        else:
            optimizer = _wrap(_model(), bucket_mb="auto")
        stats = optimizer.stats()
        optimizer.close()
        return stats.num_buckets, stats.reason.partition("; ")[2]


def _content(**changes: Any) -> bytes:
    return json.dumps(
        {"format": 2, "groups": [[3, 2], [1, 0]], "compression": None, "text": "fine", **changes}
    ).encode()


def _starts(rank: int, size: int, folder: str, contents: list[bytes]) -> list[tuple[int, str]]:
    return [_start_with(rank, size, folder, content) for content in contents]


def test_buckets_that_do_not_fit_are_not_used(tmp_path: Path) -> None:
    wrong: list[bytes] = [
        *(b"", b"\xff", _content()[:30], b"[]", b"[" * 100_000, _content(format=1), _content(text=None)),
        *(_content(compression=16), _content(compression="bf16")),
        *(_content(groups=groups) for groups in ("3210", [3, 2], [[3, 2], [1]], [[3, 2], [1, 0, 0]], [[3, 2, 1, 4]])),
        *(_content(groups=groups) for groups in ([[3, 2], [1, False]], [[3, 2], [1, 0], []], [[3, 2], [1.0, 0]])),
    ]
    for results in run_pooled(_starts, 2, str(tmp_path), [*wrong, _content()]):
        *refused, used = results
        assert refused == [(1, "default buckets, until backwards have been measured")] * len(wrong)
        assert used == (2, "fine, as measured by an earlier run")  # on the rank that has no file, too


def test_kept_for_the_same_subject_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHRING_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    found = FoundBuckets([[1, 0]], "bf16", "text")
    plan_cache.write(["model", "2 ranks"], found)
    assert FoundBuckets.decode(plan_cache.read(["model", "2 ranks"])) == found
    assert plan_cache.read(["model", "3 ranks"]) == plan_cache.read(["model 2 ranks"]) == b""
    assert [path.parent for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / "torchring" / "plans"]


def test_nothing_is_kept_where_nothing_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_the_way = tmp_path / "file"
    in_the_way.touch()
    monkeypatch.setenv("TORCHRING_CACHE", str(in_the_way))
    plan_cache.write(["model"], FoundBuckets(None, None, "text"))
    assert plan_cache.read(["model"]) == b""
    monkeypatch.setenv("TORCHRING_CACHE", str(tmp_path))
    with mock.patch.object(Path, "replace", side_effect=OSError("full")):
        plan_cache.write(["model"], FoundBuckets(None, None, "text"))
    assert [*(tmp_path / "plans").iterdir()] == []


# Numbers


def _specs(*dtypes: torch.dtype) -> list[ParameterSpec]:
    return [ParameterSpec(f"p{i}", (8,), (1,), dtype, torch.device("cpu")) for i, dtype in enumerate(dtypes)]


def _groups(plan: Plan) -> list[list[int]]:
    return [[slot.parameter for slot in bucket.slots] for bucket in plan.buckets]


def test_other_dtypes_keep_their_default_buckets_and_the_first_bucket_its_dtype() -> None:
    """The first bucket carries the sum of weights, whose rounding depends on the dtype."""
    fp32, fp64 = torch.float32, torch.float64
    specs = _specs(fp32, fp64, fp32, fp32, fp64, fp32, fp32)
    current = build_plan(specs, bucket_bytes=1000)
    assert _groups(current) == [[4, 1], [6, 5, 3, 2, 0]]
    cost = ReductionCost((0.0, 32.0), (0.1, 1.1))  # a gradient of fp32 takes 1.1 s
    ready = [9.0, 8.0, 5.0, 2.0, 3.0, 1.0, 0.0]
    groups = find_groups(specs, current, ready, cost, 1000, None)
    assert groups == [[4, 1], [6, 5, 3], [2], [0]]
    assert find_groups(specs, current, ready, cost, 64, None) == [[4, 1], [6, 5], [3, 2], [0]]
    assert find_groups(specs, current, ready, cost, 64, "fp16") == [[4, 1], [6, 5], [3, 2], [0]]  # of half the bytes


def test_prediction_counts_what_travels() -> None:
    specs = _specs(*[torch.float32] * 3)
    plan = build_plan(specs, bucket_bytes=0)
    sizes = [bucket.num_bytes for bucket in plan.buckets]
    cost = ReductionCost((0.0, 1.0), (0.0, 1.0))
    assert predict(plan, [1000.0, 2.0, 1.0], cost) == 1000.0 + sizes[2]
    assert predict(plan, [3.0, 2.0, 1.0], cost) == 1.0 + sum(sizes)


def test_reductions_take_longer_beside_a_backward() -> None:
    plan = build_plan(_specs(torch.float32), bucket_bytes=0)
    size = plan.num_bytes
    points = [(size, 2.0), (2 * size, 3.0)]
    for busy, seconds in ((5.0, (5.0, 7.5)), (1.0, (2.0, 3.0)), (100.0, (8.0, 12.0))):
        alone = cost_alone(points, in_background=True)
        cost = slowed(alone, slowdown(alone, plan, busy))
        assert cost.seconds == seconds
        assert not math.isnan(cost.launch_seconds)


def test_a_small_model_where_larger_reductions_took_much_longer() -> None:
    """A line through what was measured would have small buckets take no time at all."""
    plan = build_plan(_specs(torch.float32), bucket_bytes=0)
    alone = cost_alone([(64 << 10, 1e-3), (512 << 10, 20e-3)], in_background=True)
    assert slowdown(alone, plan, 1e-6) == 1.0
    assert slowdown(alone, plan, 1.0) == 4.0
