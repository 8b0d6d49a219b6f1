"""SyncBatchNorm: what one process computes on the batches of all ranks, forward and backward; and what cannot be."""

import copy
import math
import pickle
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchring
from tests.support.grids import grid
from tests.support.harness import ranks
from tests.support.training import Side, assert_as_one_process, attempt

_SIZES = {2: (3, 5), 3: (4, 0, 1)}  # samples per rank: unequal, none, one
_STEPS = 2


def _model(dtype: torch.dtype, *, affine: bool = True, momentum: float | None = 0.1) -> nn.Sequential:
    torch.manual_seed(0)
    norms = (nn.BatchNorm2d(4, affine=affine, momentum=momentum), nn.BatchNorm1d(3, affine=affine))
    return nn.Sequential(nn.Conv2d(2, 4, 3), norms[0], nn.ReLU(), nn.Flatten(), nn.Linear(16, 3), norms[1]).to(dtype)


def _batch(rank: int, size: int, step: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    n = _SIZES[size][rank]
    x = 50 + 3 * torch.randn(n, 2, 4, 4, generator=generator, dtype=torch.float64)
    return x.to(dtype), torch.randn(n, 3, generator=generator, dtype=torch.float64).to(dtype)


def _train(side: Side, size: int, dtype: torch.dtype, options: dict[str, Any], no_sync: bool = False) -> list[Tensor]:
    """What the layers compute, and what the model is in the end. The loss is a sum, so batches may differ in size."""
    model: nn.Module = _model(dtype, **options)
    if side.is_wrapped:
        model = torchring.convert_sync_batchnorm(model)
    optimizer = side.wrap(torch.optim.SGD(model.parameters(), lr=0.01), model, op="sum")

    def of_all(own: Tensor) -> Tensor:
        return torch.cat(torchring.all_gather_object(own.detach()) if side.is_wrapped else [own])

    found = []
    for step in range(_STEPS):
        x, y = map(torch.cat, zip(*(_batch(rank, size, step, dtype) for rank in side.mine), strict=True))
        x.requires_grad_()
        optimizer.zero_grad()
        with optimizer.no_sync() if no_sync and side.is_wrapped else nullcontext():
            result = model(x)
            (result * y).sum().backward()
        if no_sync and side.is_wrapped:
            optimizer.synchronize()
        assert x.grad is not None
        found += [of_all(x.grad), of_all(result), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
    model.eval()
    with torch.no_grad():
        evaluated = model(torch.full((1, 2, 4, 4), 49.0, dtype=result.dtype))
    return [*found, *model.state_dict().values(), evaluated]


@grid(
    "size, dtype, options",
    [2, 3],
    [torch.float64, torch.float32],
    [{}, {"affine": False}, {"momentum": None}],
    keep=lambda size, dtype, options: size == 2 or (dtype == torch.float64 and not options),
)
def test_ranks_are_as_one_process_with_all_batches(size: int, dtype: torch.dtype, options: dict[str, Any]) -> None:
    tolerance = 1e-9 if dtype == torch.float64 else 1e-3
    assert_as_one_process(_train, size, dtype, options, world_size=size, tolerance=tolerance)


def test_inside_no_sync_statistics_are_of_all_ranks_too() -> None:
    assert_as_one_process(_train, 2, torch.float64, {}, True)


# Samples of each rank's micro-steps. Below 0: samples of NaN, which get weight 0.
_SHARES = {2: [(2, 6), (5, 0), (3, -2)], 3: [(3, 1, 5), (4, -2, 2), (0, 3, -1)]}


def _weighed_batch(rank: int, size: int, micro: int) -> tuple[Tensor, Tensor, int]:
    generator = torch.Generator().manual_seed(10 * micro + rank)
    n = _SHARES[size][micro][rank]
    x = (1 + rank) * torch.randn(abs(n), 2, 4, 4, generator=generator, dtype=torch.float64)
    y = torch.randn(abs(n), 3, generator=generator, dtype=torch.float64)
    return (x * math.nan if n < 0 else x), y, int(n > 0)


def _weighed(side: Side, size: int) -> list[Any]:
    """Gradients and statistics."""
    model: nn.Module = _model(torch.float64)
    if side.is_wrapped:
        model = torchring.convert_sync_batchnorm(model)
    optimizer = side.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, accumulate=3)
    total = 0
    for micro in range(3):
        batches = [_weighed_batch(rank, size, micro) for rank in side.mine]
        if side.is_wrapped:
            optimizer.weigh(batches[0][2])
        else:
            batches = [batch for batch in batches if batch[2]]
        x, y = (torch.cat([batch[i] for batch in batches]) for i in range(2))
        sizes = [len(batch[0]) for batch in batches]
        losses = map(nn.functional.mse_loss, model(x).split(sizes), y.split(sizes))
        sum(losses, start=torch.zeros(())).backward()
        total += len(sizes)
    divisor = 1 if side.is_wrapped else total
    found = [p.grad / divisor for p in model.parameters() if p.grad is not None]
    found += [value.clone() for value in model.buffers()]
    if side.is_wrapped:
        x, y, _ = _weighed_batch(0, size, 0)
        optimizer.zero_grad()
        optimizer.weigh(0)  # on all ranks
        result = model(x)
        result.sum().backward()
        assert result.isfinite().all()
        assert all(map(torch.equal, found[-len([*model.buffers()]) :], model.buffers()))
    return found


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_batch_of_weight_zero_does_not_count(world_size: int) -> None:
    assert_as_one_process(_weighed, world_size, world_size=world_size)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("weight 0 after forward", "so its forward must know the weight: call weigh(0) before forward"),
        ("a number of samples", "a batch has weight 5, and SyncBatchNorm's backward takes only weigh(1), and weigh(0)"),
        ("weight 0 of one of two", "a batch has weight 0: call weigh(0) on all optimizers of the model"),
        ("forward twice", "SyncBatchNorm(1 backward)"),
        ("another layer", "SyncBatchNorm(1 forward)"),
        ("no values", "needs more than one value of each channel, got 0 on all ranks"),
    ],
)
@ranks(2)
def test_what_does_not_fit_together_is_refused(rank: int, how: str, said: str) -> None:
    """Weights that are not clear, and ranks that do not run the same."""
    torch.manual_seed(0)
    model = torchring.convert_sync_batchnorm(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)))
    optimizers = [torchring.wrap(torch.optim.SGD(layer.parameters(), lr=0.1), model) for layer in (model[0], model[2])]
    other, x = torchring.SyncBatchNorm(4), torch.randn(5, 3)

    def run() -> None:
        if how == "forward twice" and rank == 1:
            model(x)
        if how == "another layer" and rank == 1:
            other(x[:, :1].expand(5, 4))
        result = model(x[:0] if how == "no values" else x)
        if "weight 0" in how or how == "a number of samples":
            optimizers[0].weigh(5 if how == "a number of samples" else 1 - rank)
        if how == "weight 0 after forward":
            optimizers[1].weigh(1 - rank)
        result.sum().backward()

    problem = attempt(run)
    torchring.shutdown()
    problems = torchring.all_gather_object(problem)
    assert all(problems)
    assert any(said in problem for problem in problems), problems
    if "weigh" not in how:
        assert said in problem
    if how in ("forward twice", "another layer"):
        assert ("SyncBatchNorm(forward)" if how == "another layer" else "SyncBatchNorm(1 forward)") in problem


@ranks(2)
def test_half_precision(rank: int) -> None:
    """Outputs of a layer in bf16 and of the same layer under autocast are near to those in fp32."""
    torch.manual_seed(rank)
    x = torch.randn(64, 4, 3)
    layers = [torchring.SyncBatchNorm(4, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.float32)]
    exact = layers[0](x)
    inputs = [x.bfloat16().requires_grad_() for _ in range(2)]
    results = [layers[1](inputs[0])]
    with torch.autocast("cpu", torch.bfloat16):
        results.append(layers[2](inputs[1]))
    for result, given in zip(results, inputs, strict=True):
        result.float().square().sum().backward()
        assert result.dtype == given.grad.dtype == torch.bfloat16
        torch.testing.assert_close(result.float(), exact, rtol=0, atol=0.05)
    wide = torchring.SyncBatchNorm(4, dtype=torch.float16)
    wide(x.half() * 400)
    torch.testing.assert_close(wide.running_var.float() / 400**2, layers[0].running_var - 0.9, rtol=0, atol=0.05)
    for kept in (copy.deepcopy(layers[1]), pickle.loads(pickle.dumps(layers[1]))):
        assert torch.equal(kept.running_mean, layers[1].running_mean)


def test_conversion_keeps_what_there_is() -> None:
    shared, calls = nn.BatchNorm1d(4), []
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(nn.BatchNorm2d(2, momentum=None), nn.LayerNorm(4))})
    model["twice"] = shared
    model["theirs"] = nn.SyncBatchNorm(3)
    shared.register_forward_hook(lambda *_: calls.append(1))

    def identities() -> dict[str, int]:
        return {name: id(value) for name, value in [*model.named_parameters(), *model.named_buffers()]}

    before, keys = identities(), list(model.state_dict())
    assert torchring.convert_sync_batchnorm(model) is model
    assert identities() == before
    assert list(model.state_dict()) == keys
    assert model["a"] is model["twice"]
    layers = [model["a"], model["b"][0], model["theirs"]]
    assert all(type(layer) is torchring.SyncBatchNorm for layer in layers)
    assert [layer._label for layer in layers] == ["a", "b.0", "theirs"]
    assert isinstance(model["b"][1], nn.LayerNorm)
    model["a"](torch.randn(3, 4))
    assert calls == [1]
    assert torchring.convert_sync_batchnorm(layers[1]) is layers[1]
    assert isinstance(torchring.convert_sync_batchnorm(nn.BatchNorm3d(2)), torchring.SyncBatchNorm)


def test_a_world_of_one_is_batch_norm() -> None:
    torch.manual_seed(1)
    theirs, x = nn.BatchNorm2d(3), torch.randn(4, 3, 2, 2)
    ours = torchring.convert_sync_batchnorm(copy.deepcopy(theirs))
    assert torch.equal(ours(x), theirs(x))
    assert torch.equal(ours.running_var, theirs.running_var)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"takes inputs of shape \[N, C\] or \[N, C, ...\], got \[3\]"):
        ours(x[0, :, 0, 0])


def test_layers_that_cannot_be_converted_are_named() -> None:
    class Activated(nn.BatchNorm1d):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input).relu()

    for layer, said in (
        (nn.LazyBatchNorm1d(), "1 has no shape yet"),
        (Activated(2), "1 is a Activated, which has a forward of its own"),
        (nn.utils.parametrizations.weight_norm(nn.BatchNorm1d(2)), "1 is parametrized; convert first"),
    ):
        with pytest.raises(ValueError, match=said):
            torchring.convert_sync_batchnorm(nn.Sequential(nn.Linear(2, 2), layer))
