"""`sync_buffers`: what forward does to the buffers of a model is made equal on all ranks, after the step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import torchring
from tests.support.checks import assert_same_on_all_ranks, logged
from tests.support.grids import grid
from tests.support.harness import run_pooled
from tests.support.training import TINY_MB, attempt
from torchring.participants.buffers import BufferSync, buffer_specs

_STEPS = 4


def buffers_of(optimizer: Any) -> BufferSync:
    return next(each for each in optimizer._sync.participants if isinstance(each, BufferSync))


def norm_model(dtype: torch.dtype = torch.float64) -> nn.Module:
    device = torch.get_default_device()
    with torch.device("cpu"):  # a GPU has other random numbers
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2), nn.BatchNorm1d(2))
    return model.to(device, dtype)


def norm_batch(rank: int, step: int, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    draw = torch.randn(5, 4, generator=generator, device="cpu") * (rank + 1) + rank
    return draw.to(torch.get_default_device(), dtype)


def _is_absent(rank: int, step: int, skips: Sequence[int]) -> bool:
    return step == 2 and rank in skips


def train_norms(
    rank: int, size: int, options: dict[str, Any], skips: Sequence[int] = (), weighs: bool = False
) -> dict[str, Tensor]:
    """What the model is after a few steps. In one of them, the ranks in `skips` have no batch, or none that counts."""
    model = norm_model()
    optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, **{"bucket_mb": TINY_MB, **options})
    for step in range(_STEPS):
        optimizer.zero_grad()
        is_absent, batch = _is_absent(rank, step, skips), norm_batch(rank, step)
        if weighs:
            optimizer.weigh(0 if is_absent else 5)
            model(batch * torch.nan if is_absent else batch).square().mean().backward()
        elif is_absent:
            optimizer.skip()
        else:
            model(batch).square().mean().backward()
        optimizer.step()
    return {name: value.clone() for name, value in model.state_dict().items()}


def expected_norms(size: int, mode: str | None, skips: Sequence[int] = ()) -> dict[str, Tensor]:
    """The same in one process, which runs each rank's forward on a model of its own."""
    models = [norm_model() for _ in range(size)]
    parameters = [list(model.parameters()) for model in models]
    optimizers = [torch.optim.SGD(of_model, lr=0.1) for of_model in parameters]
    for step in range(_STEPS):
        present = [rank for rank in range(size) if not _is_absent(rank, step, skips)]
        for rank in present:
            models[rank].zero_grad()
            models[rank](norm_batch(rank, step)).square().mean().backward()
        means = [sum(parameters[r][i].grad for r in present) / len(present) for i in range(len(parameters[0]))]
        for of_model, optimizer in zip(parameters, optimizers, strict=True):
            for parameter, mean in zip(of_model, means, strict=True):
                parameter.grad = mean.clone()
            optimizer.step()
        if mode is not None:
            _equalize([dict(model.named_buffers()) for model in models], present, mode)
    return models[0].state_dict()


def _equalize(buffers: Sequence[dict[str, Tensor]], present: Sequence[int], mode: str) -> None:
    for name, first in buffers[0].items():
        if mode == "mean" and first.is_floating_point():
            value = sum(buffers[rank][name] for rank in present) / len(present)
        else:
            value = buffers[present[0]][name].clone()
        for of_rank in buffers:
            of_rank[name].copy_(value)


def check_norms(results: Sequence[dict[str, Tensor]], expected: dict[str, Tensor]) -> None:
    for name, right in expected.items():
        assert_same_on_all_ranks([result[name] for result in results])
        torch.testing.assert_close(results[0][name], right, rtol=1e-6, atol=1e-6)


@grid(
    "mode, options",
    ["mean", "rank0"],
    [{}, {"algorithm": "native"}, {"overlap": "thread"}, {"bucket_mb": 25.0}],
    keep=lambda mode, options: mode == "mean" or not options,
)
def test_running_statistics_follow_all_ranks_or_rank_0(mode: str, options: dict[str, Any]) -> None:
    results = run_pooled(train_norms, 3, {"sync_buffers": mode, **options})
    check_norms(results, expected_norms(3, mode))


@pytest.mark.parametrize(("mode", "skips"), [("mean", (0,)), ("mean", (1, 2)), ("rank0", (0,))], ids=str)
@pytest.mark.parametrize("weighs", [False, True])
def test_a_rank_without_a_batch_does_not_count(mode: str, skips: Sequence[int], weighs: bool) -> None:
    """A batch of weight 0, which may well be NaN, is no batch. What has no mean follows the lowest other rank."""
    results = run_pooled(train_norms, 3, {"sync_buffers": mode}, skips, weighs)
    check_norms(results, expected_norms(3, mode, skips))


def test_none_leaves_them_alone() -> None:
    results = run_pooled(train_norms, 2, {"sync_buffers": None})
    assert not torch.equal(results[0]["1.running_mean"], results[1]["1.running_mean"])
    torch.testing.assert_close(results[0]["1.running_mean"], expected_norms(2, None)["1.running_mean"])


class _Kinds(nn.Module):
    """Buffers of all sorts, which forward changes in all sorts of ways."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("total", torch.zeros((), dtype=torch.float64))
        self.register_buffer("narrow", torch.zeros(3, dtype=torch.bfloat16))
        self.register_buffer("phase", torch.zeros(2, dtype=torch.complex64))
        self.register_buffer("counts", torch.zeros(2, 2, dtype=torch.int64))
        self.register_buffer("mask", torch.full((2, 2), -torch.inf).triu(1), persistent=False)
        self.register_buffer("seen", torch.zeros(3, dtype=torch.bool))
        self.register_buffer("hidden", torch.zeros(2))
        self.register_buffer("replaced", torch.zeros(2))
        self.register_buffer("constant", torch.ones(2), persistent=False)
        self.register_buffer("empty", torch.zeros(0))
        self.register_buffer("nothing", None)

    def forward(self, value: int, is_first: bool) -> Tensor:
        self.total += value
        self.narrow.fill_(value)
        self.phase.mul_(0.5).add_(complex(value, -value))
        self.counts[0, 0] += 2**40 * value
        self.seen[value % 3] = True
        self.hidden.data.fill_(value)  # without a trace in its version
        self.replaced = self.replaced + value
        self.empty.zero_()
        if is_first:
            self.mask.add_(float(value))
        return (self.weight * value).sum()


def _kinds(rank: int, size: int, mode: str, algorithm: str) -> dict[str, Any]:
    model = _Kinds()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = torchring.wrap(sgd, model, sync_buffers={"": mode}, algorithm=algorithm)
    after, copy_all = [], torch._foreach_copy_

    def copy_alike(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
        assert len({(to.dtype, of.dtype) for to, of in zip(targets, sources, strict=True)}) == 1, "many launches"
        copy_all(targets, sources)

    for step in range(4):
        optimizer.zero_grad()
        model(rank + step + 1, step == 0).backward()
        before = model.total.clone()
        with mock.patch.object(torch, "_foreach_copy_", copy_alike):
            optimizer.step()
        after.append({name: value.clone() for name, value in model.named_buffers()})
    return {"after": after, "before the last step": before}


@pytest.mark.parametrize("algorithm", ["direct", "native"])
def test_buffers_of_all_kinds(algorithm: str) -> None:
    results = run_pooled(_kinds, 2, "mean", algorithm)
    for step in (0, -1):
        for name in results[0]["after"][step]:
            assert_same_on_all_ranks([result["after"][step][name] for result in results])
    first, last = results[0]["after"][0], results[0]["after"][-1]
    assert first["total"] == 1.5
    assert last["total"] == 1.5 + 2.5 + 3.5 + 4.5
    assert first["narrow"].tolist() == [1.5] * 3
    assert first["phase"].tolist() == [1.5 - 1.5j] * 2
    assert last["counts"].tolist() == [[2**40 * (1 + 2 + 3 + 4), 0], [0, 0]]
    assert first["seen"].tolist() == [False, True, False]
    assert last["hidden"].tolist() == [4.5, 4.5]
    assert last["replaced"].tolist() == [12.0, 12.0]
    assert first["mask"].tolist() == [[1.5, -torch.inf], [1.5, 1.5]]
    assert [float(result["before the last step"]) for result in results] == [11.5, 12.5]  # nothing before the step


def _no_step(rank: int, size: int) -> list[Tensor]:
    """A buffer changes once, in a step that is left out, as with a GradScaler."""
    model = nn.Linear(2, 1)
    model.register_buffer("scale", torch.ones(2))
    optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, sync_buffers={"": "mean"})
    after = []
    for step in range(4):
        optimizer.zero_grad()
        if step == 0:
            model.scale += rank
        model(torch.ones(3, 2) * model.scale).sum().backward()
        if step > 0:
            optimizer.step()
        after.append(model.scale.clone())
    return after


def test_a_change_before_a_step_that_is_left_out_is_not_forgotten() -> None:
    results = run_pooled(_no_step, 2)
    assert [result[0].tolist() for result in results] == [[1.0, 1.0], [2.0, 2.0]]
    for result in results:
        assert [after.tolist() for after in result[1:]] == [[1.5, 1.5]] * 3


class _Normalizes(nn.Module):
    """Runs the kernel of BatchNorm on buffers of its own, which the kernel writes to without a trace."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("running_mean", torch.zeros(2))
        self.register_buffer("running_var", torch.ones(2))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.batch_norm(x, self.running_mean, self.running_var, training=True)


def _without_a_trace(rank: int, size: int) -> list[Tensor]:
    model = nn.Sequential(nn.Linear(4, 2), _Normalizes(), torch.jit.trace(nn.BatchNorm1d(2), torch.ones(3, 2)))
    optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    model(norm_batch(rank, 0, torch.float32)).square().mean().backward()
    optimizer.step()
    return [value.clone() for value in model.buffers()]


def test_statistics_of_layers_that_are_no_batchnorm() -> None:
    results = run_pooled(_without_a_trace, 2)
    assert len(results[0]) == 5
    for each in zip(*results, strict=True):
        assert_same_on_all_ranks(each)
        assert float(each[0].double().square().sum()) > 0


def _large(rank: int, size: int, dtype: torch.dtype) -> list[Any]:
    """Masks of the largest finite value, and numbers that fp64 does not hold."""
    model = nn.Linear(2, 1)
    model.register_buffer("mask", torch.full((2,), torch.finfo(dtype).min, dtype=dtype))
    model.register_buffer("code", torch.tensor([2**63 - 1 - 2**20, -5]))
    optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, sync_buffers={"": "mean"})
    found = []
    for step in range(2):
        optimizer.zero_grad()
        if step == 1:
            model.mask.mul_(1.0 if rank else 0.5)
            model.code += 3 - rank
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        found += [model.mask.clone(), model.code.clone()]
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_values_as_large_as_can_be(dtype: torch.dtype) -> None:
    largest, code = torch.finfo(dtype).min, 2**63 - 1 - 2**20
    for mask, same_code, changed, changed_code in run_pooled(_large, 3, dtype):
        assert (mask / largest).tolist() == ([pytest.approx(1.0, rel=1e-15)] if dtype == torch.float64 else [1.0]) * 2
        assert same_code.tolist() == [code, -5]
        torch.testing.assert_close(changed / largest, torch.full((2,), 2.5 / 3, dtype=dtype))
        assert changed_code.tolist() == [code + 3, -2]


def _statistics(model: nn.Module) -> list[Tensor]:
    return [value.clone() for value in model.buffers()]


def _several_of_one_model(rank: int, size: int) -> dict[str, list[Tensor]]:
    """Two optimizers of one model, of which one steps more often, or is closed."""
    model = norm_model()
    parts = [list(model[:2].parameters()), list(model[3:].parameters())]
    body, head = (torchring.wrap(torch.optim.SGD(part, lr=0.1), model) for part in parts)
    found = {}

    def backward(step: int, **kwargs: Any) -> None:
        model(norm_batch(rank, step)).square().mean().backward(**kwargs)

    backward(0)
    body.step()
    found["first"] = _statistics(model)
    head.step()
    found["both"] = _statistics(model)
    backward(1)
    head.step()
    found["head only"] = _statistics(model)
    backward(2, inputs=parts[1])
    head.step()
    found["head alone reached"] = _statistics(model)
    backward(3, inputs=parts[1])
    body.close()
    head.step()
    found["close() before the step"] = _statistics(model)
    backward(4, inputs=parts[1])
    head.step()
    found["after close()"] = _statistics(model)
    return found


def test_buffers_are_equal_after_the_step_of_any_optimizer_of_the_model() -> None:
    results = run_pooled(_several_of_one_model, 2)
    for when in results[0]:
        for each in zip(*(result[when] for result in results), strict=True):
            assert_same_on_all_ranks(each)
    last = [results[0][when] for when in results[0]]
    assert not any(torch.equal(*pair) for pair in zip(last[-1], last[-2], strict=True) if pair[0].is_floating_point())


class _Owns(nn.Module):
    """A queue of keys and a hidden state belong to the rank; a moving average does not; a cache is in no checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(2)
        self.register_buffer("queue", torch.zeros(4))
        self.register_buffer("average", torch.zeros(2))
        self.register_buffer("grows", torch.zeros(1))
        self.register_buffer("cache", torch.zeros(2), persistent=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor, value: float) -> Tensor:
        self.queue[0] = value
        self.average += value
        self.grows = torch.full((2,), value)
        self.cache.fill_(value)
        self.count += 1  # alike on all ranks
        return self.norm(x)


def _owning(
    rank: int, size: int, choices: Any, steps: int = 5, skips: bool = False, alike: int = 0
) -> tuple[dict[str, Tensor], list[str]]:
    """alike: in so many steps, all ranks have the same values."""
    model = _Owns()
    with logged() as texts:
        optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, sync_buffers=choices)
        for step in range(steps):
            optimizer.zero_grad()
            if skips and rank == 1:
                optimizer.skip()
            else:
                value = 1.0 if step < alike else rank + step + 1.0
                model(norm_batch(rank, step, torch.float32)[:, :2], value).square().mean().backward()
            optimizer.step()
    return dict(model.named_buffers()), texts


@pytest.mark.parametrize(("steps", "alike"), [(5, 0), (101, 2)])
def test_a_buffer_that_belongs_to_a_rank_stays_and_is_named_once(steps: int, alike: int) -> None:
    """Whatever has written to it: these are compared in the first reduction, and every 100."""
    results = run_pooled(_owning, 2, "mean", steps, False, alike)
    for rank, (buffers, texts) in enumerate(results):
        assert buffers["queue"].tolist() == [rank + steps, 0.0, 0.0, 0.0]
        assert buffers["grows"].tolist() == [rank + steps] * 2
        assert buffers["count"] == steps
        assert len(texts) == (rank == 0)
    assert (results[1][0]["average"] - results[0][0]["average"]).tolist() == [steps - alike] * 2
    (text,) = results[0][1]
    assert text.startswith("buffers queue, average, grows of the model are not the same on all ranks")
    assert "sync_buffers={'queue': None}" in text
    for name in ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked"):
        assert_same_on_all_ranks([buffers[name] for buffers, _ in results])


def test_a_rank_without_a_batch_is_not_told_that_its_buffers_differ() -> None:
    """Only forward changes them."""
    for rank, (buffers, texts) in enumerate(run_pooled(_owning, 2, "mean", 1, True)):
        assert texts == []
        assert buffers["queue"][0] == 1 - rank


def test_a_choice_for_each_buffer() -> None:
    results = run_pooled(_owning, 2, {"queue": None, "average": "mean", "count": "rank0", "grows": None, "norm": None})
    for rank, (buffers, texts) in enumerate(results):
        assert buffers["queue"].tolist() == [rank + 5.0, 0.0, 0.0, 0.0]
        assert buffers["average"].tolist() == [17.5] * 2
        assert buffers["count"] == 5
        assert texts == []
    means = [buffers["norm.running_mean"] for buffers, _ in results]
    assert not torch.equal(*means)


def _without_a_step(rank: int, size: int) -> dict[str, Any]:
    """Forwards in training mode after the last step, as in torch.optim.swa_utils.update_bn."""
    model = norm_model()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = torchring.wrap(sgd, model)
    handle = model[0].weight.register_hook(lambda _: optimizer.sync_buffers())
    errors = [attempt(model(norm_batch(rank, 0)).square().mean().backward)]
    handle.remove()
    optimizer.zero_grad()
    model(norm_batch(rank, 0)).square().mean().backward()
    optimizer.step()
    torch.optim.swa_utils.update_bn([norm_batch(rank, step) for step in range(3)], model)
    own = _statistics(model)
    optimizer.sync_buffers()
    found = _statistics(model)
    optimizer.step()  # of gradients that are older
    assert all(map(torch.equal, found, model.buffers()))
    optimizer.close()
    with torchring.join(optimizer := torchring.wrap(sgd, model)):
        errors.append(attempt(optimizer.sync_buffers))
    optimizer.close()
    errors.append(attempt(torchring.wrap(sgd).sync_buffers))
    return {"own": own, "found": found, "errors": errors}


def test_forwards_that_no_step_follows() -> None:
    results = run_pooled(_without_a_step, 2)
    for i, means in enumerate(zip(*(result["found"] for result in results), strict=True)):
        own = [result["own"][i] for result in results]
        assert_same_on_all_ranks(means)
        torch.testing.assert_close(means[0], sum(own) / 2 if own[0].is_floating_point() else own[0])
    assert not torch.equal(results[0]["own"][0], results[1]["own"][0])
    for result in results:
        in_backward, in_join, no_model = result["errors"]
        assert "sync_buffers() was called inside backward()" in in_backward
        assert "sync_buffers()" in in_join
        assert "inside torchring.join()" in in_join
        assert no_model.startswith("ValueError: sync_buffers() makes the buffers of a model equal; pass the model")


def _hooked(rank: int, size: int, how: str) -> list[Any]:
    """An average of the model, of whose buffers a hook of the wrapped optimizer takes the mean."""
    model = norm_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    inner.register_step_post_hook(lambda *_: average.update_parameters(model))
    optimizer = torchring.wrap(inner, model)
    for step in range(3):
        optimizer.zero_grad()
        loss = model(norm_batch(rank, step)).square().mean()
        loss.backward()
        (inner if how == "wrapped" else optimizer).step()
    with optimizer.no_sync():
        model(norm_batch(rank, 3)).square().mean().backward()
    refused, averaged = attempt(inner.step), copy.deepcopy(average.state_dict())
    optimizer.close()
    return [refused, attempt(inner.step), *averaged.values()]


@pytest.mark.parametrize("how", ["wrapped", "wrapper"])
def test_buffers_are_equal_before_hooks_and_where_the_wrapped_optimizer_is_stepped(how: str) -> None:
    results = run_pooled(_hooked, 2, how)
    for each in zip(*(result[2:] for result in results), strict=True):
        assert_same_on_all_ranks(each)
    for refused, closed, *_ in results:
        assert "holds local contributions" in refused
        assert closed == ""


def _left_out_and_thawed(rank: int, size: int) -> list[Tensor]:
    """The first reduction is followed by a reduction for what was thawed, and its step is left out."""
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))
    model.register_buffer("scale", torch.ones(()))
    model[1].bias.requires_grad_(False)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = torchring.wrap(sgd, model, on_nonfinite="skip", sync_buffers={"scale": "mean"})
    model[1].bias.requires_grad_(True)
    model.scale.add_(rank)
    (model(norm_batch(rank, 0, torch.float32)).square().mean() * (torch.nan if rank else 1.0)).backward()
    optimizer.step()
    assert optimizer.stats().num_skipped_steps == 1
    return [value.clone() for value in model.buffers()]


def test_buffers_are_equal_after_a_step_that_is_skipped() -> None:
    for each in zip(*run_pooled(_left_out_and_thawed, 2), strict=True):
        assert_same_on_all_ranks(each)


def _once_more_before_the_step(rank: int, size: int) -> str:
    model = norm_model()
    optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    loss = model(norm_batch(rank, 0)).square().mean()

    def twice() -> None:
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()

    return attempt(twice)


def test_a_graph_may_be_used_again_until_the_step() -> None:
    assert run_pooled(_once_more_before_the_step, 2) == ["", ""]


def _refused(rank: int, size: int) -> dict[str, str]:
    def wrap(change: Callable[[nn.Module], Any], **options: Any) -> str:
        model = norm_model()
        change(model)
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        return attempt(lambda: torchring.wrap(sgd, model, **options).close())

    def add_buffer(model: nn.Module) -> None:
        model.register_buffer(f"of_rank_{rank}", torch.zeros(2))

    return {
        "unknown": wrap(lambda model: None, sync_buffers="max"),
        "other buffers": wrap(add_buffer, sync_initial_state=False),
        "other modes": wrap(lambda model: None, sync_buffers=["mean", "rank0"][rank]),
        "not looked at": wrap(add_buffer, sync_initial_state=False, sync_buffers=None),
        "of one": wrap(lambda model: None, sync_buffers={"1": "max"}),
        "no such name": wrap(lambda model: None, sync_buffers={"1.running_median": None}),
    }


def test_wrong_options_and_other_buffers_are_refused_on_every_rank() -> None:
    for errors in run_pooled(_refused, 2):
        assert errors["unknown"] == "ValueError: sync_buffers must be one of 'mean', 'rank0', None, got 'max'"
        assert errors["of one"].startswith("ValueError: sync_buffers['1'] must be one of 'mean', 'rank0'")
        assert errors["no such name"].startswith(
            "ValueError: sync_buffers has '1.running_median', which is the name of"
        )
        assert errors["other buffers"].startswith("PlanMismatchError")
        assert "buffer 0: rank 0 has of_rank_0 float32 (2,) own; rank 1 has of_rank_1" in errors["other buffers"]
        assert "sync_buffers='mean'" in errors["other modes"]
        assert "sync_buffers='rank0'" in errors["other modes"]
        assert errors["not looked at"] == ""


def _of_another_shape(rank: int, size: int, is_late: bool) -> str:
    model = _Owns()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = torchring.wrap(sgd, model, sync_buffers={"": None, "average": "mean"})
    if is_late:
        model.norm(torch.rand(3, 2)).square().mean().backward()
    if rank == 1:
        model.average = torch.zeros(3)
    if is_late:
        optimizer.step()  # on all ranks alike
    return attempt(lambda: (model.norm(torch.rand(3, 2)).square().mean().backward(), optimizer.step()))


@pytest.mark.parametrize("is_late", [False, True])
def test_a_buffer_that_changes_its_shape_is_named_on_all_ranks(is_late: bool) -> None:
    """Also one that changes between backward() and step()."""
    text = "buffer average of the model was float32 (2,) in torchring.wrap, and on rank 1 it is float32 (3,)"
    other, own = run_pooled(_of_another_shape, 2, is_late)
    assert own.startswith(f"GradientError: {text}")
    assert other.startswith(f"PlanMismatchError: rank 1 cannot exchange its buffers: GradientError: {text}")


def test_what_nobody_can_write_to_is_left_out() -> None:
    model = _Kinds()
    model.register_buffer("expanded", torch.zeros(1).expand(4))
    model.register_module("synced", torchring.SyncBatchNorm(2))
    model.register_module("shared", model.synced)
    model.register_buffer("again", model.total)
    model.register_module("norm", nn.BatchNorm1d(2))
    names = [spec.name for spec in buffer_specs(model, {"": "mean"})]
    assert {"total", "constant", "norm.running_mean"} <= {*names}
    left_out = {"expanded", "nothing", "again", *(f"synced.{key}" for key, _ in model.synced.named_buffers())}
    assert len(left_out) == 6
    assert left_out.isdisjoint(names)


def test_a_model_that_is_gone_keeps_no_memory() -> None:
    model = _Kinds()
    spec = buffer_specs(model, {"": "mean"})[0]
    assert spec.find() is model.total
    del model
    assert spec.find() is None
