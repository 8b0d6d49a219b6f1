"""`sync_buffers`: what forward does to the buffers of a model is made equal on all ranks, after the step."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchring
from tests.support.checks import assert_same_everywhere, assert_same_on_all_ranks, logged
from tests.support.harness import ranks
from tests.support.training import TINY_MB, attempt
from torchring.participants.buffers import buffer_specs

_STEPS = 4


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
        for of_ranks in zip(*(model.buffers() for model in models), strict=True) if mode else ():
            value = of_ranks[present[0]].clone()
            if mode == "mean" and value.is_floating_point():
                value = torch.stack([of_ranks[rank] for rank in present]).mean(0)
            for buffer in of_ranks:
                buffer.copy_(value)
    return models[0].state_dict()


def check_norms(results: Sequence[dict[str, Tensor]], expected: dict[str, Tensor]) -> None:
    for name, right in expected.items():
        assert_same_on_all_ranks([result[name] for result in results])
        torch.testing.assert_close(results[0][name], right, rtol=1e-6, atol=1e-6)


def _wrapped(model: nn.Module, **options: Any) -> Any:
    return torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, **options)


def _step(optimizer: Any, loss: Tensor) -> None:
    loss.backward()
    optimizer.step()


@pytest.mark.parametrize("weighs", [False, True])
@ranks(3)
def test_statistics_follow_all_ranks_that_have_a_batch_or_the_first_of_them(weighs: bool, rank: int) -> None:
    """A batch of weight 0, which may well be NaN, is no batch. What has no mean follows the lowest other rank."""
    cases: list[tuple[str | None, tuple[int, ...], dict[str, Any]]] = [
        *(("mean", (0,), {}), ("mean", (1, 2), {}), ("rank0", (0,), {}), ("rank0", (), {})),
        *(
            ("mean", (), {"algorithm": "native"}),
            ("mean", (), {"overlap": "thread"}),
            ("mean", (), {"bucket_mb": 25.0}),
        ),
    ]
    for mode, skips, options in cases:
        found = train_norms(rank, 3, {"sync_buffers": mode, **options}, skips, weighs)
        assert_same_everywhere(found.values())
        check_norms([found], expected_norms(3, mode, skips))
    found = train_norms(rank, 3, {"sync_buffers": None})
    assert rank or torch.allclose(found["1.running_mean"], expected_norms(3, None)["1.running_mean"])
    assert len(set(torchring.all_gather_object(str(found["1.running_mean"])))) == 3


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


@pytest.mark.parametrize("algorithm", ["direct", "native"])
@ranks(2)
def test_buffers_of_all_kinds(algorithm: str, rank: int) -> None:
    model = _Kinds()
    optimizer = _wrapped(model, sync_buffers={"": "mean"}, algorithm=algorithm)
    after = []
    for step in range(4):
        optimizer.zero_grad()
        model(rank + step + 1, step == 0).backward()
        before = model.total.clone()
        optimizer.step()
        after.append({name: value.clone() for name, value in model.named_buffers()})
        assert_same_everywhere(after[-1].values())
    first, last = after[0], after[-1]
    assert first["total"] == 1.5
    assert last["total"] == 1.5 + 2.5 + 3.5 + 4.5
    assert first["narrow"].tolist() == [1.5] * 3
    assert first["phase"].tolist() == [1.5 - 1.5j] * 2
    assert last["counts"].tolist() == [[2**40 * (1 + 2 + 3 + 4), 0], [0, 0]]
    assert first["seen"].tolist() == [False, True, False]
    assert last["hidden"].tolist() == [4.5, 4.5]
    assert last["replaced"].tolist() == [12.0, 12.0]
    assert first["mask"].tolist() == [[1.5, -torch.inf], [1.5, 1.5]]
    assert before == 11.5 + rank  # nothing before the step


@ranks(2)
def test_a_change_before_a_step_that_is_left_out_is_not_forgotten(rank: int) -> None:
    """A buffer changes once, in a step that is left out, as with a GradScaler."""
    model = nn.Linear(2, 1)
    model.register_buffer("scale", torch.ones(2))
    optimizer = _wrapped(model, sync_buffers={"": "mean"})
    for step in range(4):
        optimizer.zero_grad()
        if step == 0:
            model.scale += rank
        model(torch.ones(3, 2) * model.scale).sum().backward()
        if step > 0:
            optimizer.step()
        assert model.scale.tolist() == [1.5 if step else 1.0 + rank] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@ranks(3)
def test_values_as_large_as_can_be(dtype: torch.dtype, rank: int) -> None:
    """Masks of the largest finite value, and numbers that fp64 does not hold."""
    largest, code = torch.finfo(dtype).min, 2**63 - 1 - 2**20
    model = nn.Linear(2, 1)
    model.register_buffer("mask", torch.full((2,), largest, dtype=dtype))
    model.register_buffer("code", torch.tensor([code, -5]))
    optimizer = _wrapped(model, sync_buffers={"": "mean"})
    _step(optimizer, model(torch.ones(1, 2)).sum())
    whole = pytest.approx(1.0, rel=1e-15) if dtype == torch.float64 else 1.0
    assert (model.mask / largest).tolist() == [whole] * 2
    assert model.code.tolist() == [code, -5]
    optimizer.zero_grad()
    model.mask.mul_(1.0 if rank else 0.5)
    model.code += 3 - rank
    _step(optimizer, model(torch.ones(1, 2)).sum())
    torch.testing.assert_close(model.mask / largest, torch.full((2,), 2.5 / 3, dtype=dtype))
    assert model.code.tolist() == [code + 3, -2]


@ranks(2)
def test_buffers_are_equal_after_the_step_of_any_optimizer_of_the_model(rank: int) -> None:
    """Two optimizers of one model, of which one steps more often, or is closed."""
    model = norm_model()
    parts = [list(model[:2].parameters()), list(model[3:].parameters())]
    body, head = (torchring.wrap(torch.optim.SGD(part, lr=0.1), model) for part in parts)

    def step(step: int | None, *optimizers: Any, inputs: Any = None) -> list[Tensor]:
        if step is not None:
            model(norm_batch(rank, step)).square().mean().backward(inputs=inputs)
        for optimizer in optimizers:
            optimizer.step()
            assert_same_everywhere(model.buffers())
        return [value.clone() for value in model.buffers()]

    step(0, body, head)
    step(1, head)
    step(2, head, inputs=parts[1])  # head alone is reached
    step(3, inputs=parts[1])
    body.close()
    before = step(None, head)
    after = step(4, head, inputs=parts[1])
    assert not any(torch.equal(a, b) for a, b in zip(before, after, strict=True) if a.is_floating_point())


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
        self.queue.data[0] = value  # leaves no version
        self.average += value
        self.grows = torch.full((2,), value)
        self.cache.fill_(value)
        self.count += 1  # alike on all ranks
        return self.norm(x)


def _own(rank: int, choices: Any, steps: int = 5, alike: int = 0, skips: bool = False) -> tuple[_Owns, list[str]]:
    """alike: in so many steps, all ranks have the same values."""
    model = _Owns()
    with logged() as texts:
        optimizer = _wrapped(model, sync_buffers=choices)
        for step in range(steps):
            optimizer.zero_grad()
            if skips and rank == 1:
                optimizer.skip()
            else:
                value = 1.0 if step < alike else rank + step + 1.0
                model(norm_batch(rank, step, torch.float32)[:, :2], value).square().mean().backward()
            optimizer.step()
    return model, texts


@pytest.mark.parametrize(("steps", "alike"), [(5, 0), (101, 2)])
@ranks(2)
def test_a_buffer_that_belongs_to_a_rank_stays_and_is_named_once(steps: int, alike: int, rank: int) -> None:
    """Whatever has written to it: these are compared in the first reduction, and every 100."""
    model, texts = _own(rank, "mean", steps, alike)
    assert model.queue.tolist() == [rank + steps, 0.0, 0.0, 0.0]
    assert model.grows.tolist() == [rank + steps] * 2
    assert model.average.tolist() == [alike + sum(rank + step + 1.0 for step in range(alike, steps))] * 2
    assert model.count == steps
    assert_same_everywhere(model.norm.buffers())
    assert len(texts) == (rank == 0)
    for text in texts:
        assert text.startswith("buffers queue, average, grows of the model are not the same on all ranks")
        assert "sync_buffers={'queue': None}" in text


@ranks(2)
def test_a_choice_for_each_buffer(rank: int) -> None:
    """And a rank without a batch is not told that its buffers differ: only forward changes them."""
    model, texts = _own(rank, {"queue": None, "average": "mean", "count": "rank0", "grows": None, "norm": None})
    assert model.queue.tolist() == [rank + 5.0, 0.0, 0.0, 0.0]
    assert model.average.tolist() == [17.5] * 2
    assert (model.count, texts) == (5, [])
    assert len(set(torchring.all_gather_object(str(model.norm.running_mean)))) == 2
    model, texts = _own(rank, "mean", 1, skips=True)
    assert (model.queue[0], texts) == (1 - rank, [])


@ranks(2)
def test_forwards_that_no_step_follows(rank: int) -> None:
    """Forwards in training mode after the last step, as in torch.optim.swa_utils.update_bn."""
    model = norm_model()
    optimizer = _wrapped(model)
    _step(optimizer, model(norm_batch(rank, 0)).square().mean())
    torch.optim.swa_utils.update_bn([norm_batch(rank, step) for step in range(3)], model)
    own = torchring.all_gather_object([value.clone() for value in model.buffers()])
    assert not torch.equal(own[0][0], own[1][0])
    optimizer.sync_buffers()
    assert_same_everywhere(model.buffers())
    for found, *values in zip(model.buffers(), *own, strict=True):
        torch.testing.assert_close(found, sum(values) / 2 if found.is_floating_point() else values[0])
    found = [value.clone() for value in model.buffers()]
    optimizer.step()  # of gradients that are older
    assert all(map(torch.equal, found, model.buffers()))


@pytest.mark.parametrize("how", ["wrapped", "wrapper"])
@ranks(2)
def test_buffers_are_equal_before_hooks_and_where_the_wrapped_optimizer_is_stepped(how: str, rank: int) -> None:
    """An average of the model, of whose buffers a hook of the wrapped optimizer takes the mean."""
    model = norm_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    inner.register_step_post_hook(lambda *_: average.update_parameters(model))
    optimizer = torchring.wrap(inner, model)
    for step in range(3):
        optimizer.zero_grad()
        _step(inner if how == "wrapped" else optimizer, model(norm_batch(rank, step)).square().mean())
    with optimizer.no_sync():
        model(norm_batch(rank, 3)).square().mean().backward()
    assert "holds local contributions" in attempt(inner.step)
    assert_same_everywhere(average.state_dict().values())
    optimizer.close()
    assert attempt(inner.step) == ""


@ranks(2)
def test_buffers_are_equal_after_a_step_that_is_skipped(rank: int) -> None:
    """The first reduction is followed by a reduction for what was thawed, and its step is left out."""
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 2))
    model.register_buffer("scale", torch.ones(()))
    model[1].bias.requires_grad_(False)
    optimizer = _wrapped(model, on_nonfinite="skip", sync_buffers={"scale": "mean"})
    model[1].bias.requires_grad_(True)
    model.scale.add_(rank)
    _step(optimizer, model(norm_batch(rank, 0, torch.float32)).square().mean() * (torch.nan if rank else 1.0))
    assert optimizer.stats().num_skipped_steps == 1
    assert_same_everywhere(model.buffers())


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
    spec = buffer_specs(model, {"": "mean"})[0]
    assert spec.find() is model.total
    del model
    assert spec.find() is None, "this keeps the memory of a model that is gone"


@ranks(2)
def test_a_graph_may_be_used_again_until_the_step(rank: int) -> None:
    model = norm_model()
    optimizer = _wrapped(model)
    loss = model(norm_batch(rank, 0)).square().mean()
    loss.backward(retain_graph=True)
    _step(optimizer, loss)


@ranks(2)
def test_statistics_of_layers_that_are_no_batchnorm(rank: int) -> None:
    model = nn.Sequential(nn.Linear(4, 2), torch.jit.trace(nn.BatchNorm1d(2), torch.ones(3, 2)))
    _step(_wrapped(model), model(norm_batch(rank, 0, torch.float32)).square().mean())
    assert len(list(model.buffers())) == 3
    assert_same_everywhere(model.buffers())
    assert all(float(each.double().square().sum()) > 0 for each in model.buffers())
