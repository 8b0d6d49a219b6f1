"""Nine ways to train on silently with replicas that are none, all of which DistributedDataParallel lets pass.

a reentrant checkpoint around a layer that is used twice · b the model called past a wrapper · c two forwards, then two
backwards · d torch.autograd.grad · e parameters that come later · f unfreezing · g a hook that steps · h replicas made
different · i NaN on one rank

Each either gives what one process would compute, or a GradientError that names the parameter, on every rank. In
`test_ddp_mistakes.py`, the plainest script of each kind runs under DDP, too; here are its variations.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import torchring
from tests.optimizer.test_contract import (
    TINY_MB,
    Side,
    assert_as_one_process,
    attempt,
    batch,
    loss_on,
    small_model,
    values,
)
from tests.support.checks import assert_same_on_all_ranks, digest
from tests.support.grids import grid
from tests.support.harness import run_pooled, run_ranks


def _momentum(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def _detected(error: str, *names: str) -> bool:
    """Whether it is a GradientError about one of the parameters."""
    return error.startswith("GradientError") and any(name in error for name in names)


# a: reentrant checkpoints


class _UsedTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.shared = nn.Linear(4, 4).double()

    def forward(self, x: Tensor, is_checkpointed: bool) -> Tensor:
        x = x.detach().requires_grad_()
        for _ in range(2):
            x = torch.tanh(checkpoint(self.shared, x, use_reentrant=True) if is_checkpointed else self.shared(x))
        return x


def _used_twice(rank: int, world_size: int, options: dict[str, Any], is_collected: bool) -> tuple[str, list[Tensor]]:
    model = _UsedTwice()
    optimizer = torchring.wrap(_momentum(model), model, **options)
    try:
        for step in range(3):
            optimizer.zero_grad()
            with optimizer.no_sync() if is_collected else contextlib.nullcontext():
                model(batch(rank, step)[0], True).square().mean().backward()
            if is_collected:
                optimizer.synchronize()
            optimizer.step()
    except torchring.RingError as error:
        return f"{type(error).__name__}: {error}", []
    return "", values(model)


@pytest.mark.parametrize("is_collected", [False, True], ids=["directly", "with the way out that the error tells"])
@pytest.mark.parametrize("options", [{"bucket_mb": 0}, {}, {"overlap": "thread", "bucket_mb": 0}], ids=str)
def test_a_reentrant_checkpoint_of_a_layer_that_is_used_twice(options: dict[str, Any], is_collected: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        results = run_pooled(_used_twice, 2, options, is_collected)
    if any(error for error, _ in results):
        assert not is_collected
        assert all(_detected(error, "shared.weight", "shared.bias") for error, _ in results), results
        return
    model = _UsedTwice()
    optimizer = _momentum(model)
    for step in range(3):
        optimizer.zero_grad()
        torch.stack([model(batch(rank, step)[0], False).square().mean() for rank in range(2)]).mean().backward()
        optimizer.step()
    assert_same_on_all_ranks([digest(trained) for _, trained in results])
    for mine, expected in zip(results[0][1], values(model), strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-9, atol=1e-12)


# c: forwards in advance; b is in test_ddp_mistakes.py alone


def _two_and_two(side: Side, options: dict[str, Any]) -> Sequence[Any]:
    model = small_model()
    optimizer = side.wrap(_momentum(model), model, **options)
    for step in range(3):
        optimizer.zero_grad()
        losses = [side.mean(lambda rank, at=10 * step + i: loss_on(model, rank, at)) for i in range(2)]
        for loss in losses:
            loss.backward()
        optimizer.step()
    return values(model)


@pytest.mark.parametrize("options", [{"overlap": "thread"}, {"compression": "bf16"}], ids=str)
def test_c_two_forwards_then_two_backwards(options: dict[str, Any]) -> None:
    assert_as_one_process(_two_and_two, options, tolerance=5e-2 if "compression" in options else 1e-9)


# d: gradients that no backward put there


def _autograd_grad(rank: int, world_size: int, options: dict[str, Any], how: str) -> list[Any]:
    """Two ordinary steps, then one with gradients from torch.autograd.grad."""
    model = nn.Linear(4, 2).double()
    optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, **options)
    for step in range(2):
        optimizer.zero_grad()
        loss_on(model, rank, step).backward()
        optimizer.step()
    if how == "not zeroed":
        pass
    elif how == "zeroed in place":
        optimizer.zero_grad(set_to_none=False)
    else:
        optimizer.zero_grad()
    gradients = torch.autograd.grad(loss_on(model, rank, 2), [model.weight])
    model.weight.grad = gradients[0]
    before = digest(model.parameters())
    problem = attempt(optimizer.step)
    is_untouched = digest(model.parameters()) == before
    optimizer.synchronize()
    optimizer.step()
    return [problem, is_untouched, model.weight.grad.clone(), gradients[0], digest(model.parameters())]


@grid(
    "how, options",
    ["zeroed", "zeroed in place", "not zeroed"],
    [{}, {"compression": "fp16"}, {"algorithm": "ring"}],
    keep=lambda how, options: not options or how == "zeroed",
)
def test_d_torch_autograd_grad(options: dict[str, Any], how: str) -> None:
    """step() refuses; after synchronize() it is the mean."""
    results = run_pooled(_autograd_grad, 2, options, how)
    for problem, is_untouched, *_ in results:
        assert _detected(problem, "weight"), problem
        assert "synchronize" in problem
        assert is_untouched
    assert_same_on_all_ranks([trained for *_, trained in results])
    mean = (results[0][3] + results[1][3]) / 2
    tolerance = 2e-3 if "compression" in options else 1e-9
    torch.testing.assert_close(results[0][2], mean, rtol=tolerance, atol=tolerance)


def _same_address(rank: int, world_size: int, compression: str | None) -> list[str]:
    """The allocator gives a fresh gradient the place of the reduced one that was just dropped."""
    model = nn.Linear(40, 1, bias=False)
    optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, compression=compression)
    problems = []
    for step in range(4):
        optimizer.zero_grad()
        model(torch.full((1, 40), float(rank + step))).sum().backward()
        optimizer.step()
        model.weight.grad = None
        model.weight.grad = torch.full((1, 40), float(rank))
        problems.append(attempt(optimizer.step))
    return problems


@pytest.mark.parametrize("compression", [None, "fp16"])
def test_d_a_local_gradient_in_the_place_of_a_reduced_one(compression: str | None) -> None:
    for problems in run_pooled(_same_address, 2, compression):
        assert all(_detected(problem, "weight") for problem in problems), problems


# e, f: parameters that come later


def _past_the_wrapper(model: nn.Sequential, plain: torch.optim.Optimizer, how: str) -> None:
    """Change the parameters in what the wrapper shares with the optimizer that it wraps."""
    mine = plain.param_groups[0]["params"]
    if how == "order":
        plain.param_groups[0]["params"] = mine[::-1]
    elif how == "removed":
        del mine[2]
    elif how == "replaced":
        model[2] = nn.Linear(7, 3).double()
        plain.param_groups[0]["params"] = list(model.parameters())
    else:
        model.append(nn.Linear(2, 2).double())
        added = list(model[5].parameters())
        if how == "group":
            plain.add_param_group({"params": added})
        else:
            mine.extend(added)


def _changed_past_the_wrapper(rank: int, world_size: int) -> dict[str, tuple[str, str]]:
    found = {}
    for how in _CHANGES:
        model = small_model()
        plain = _momentum(model)
        optimizer = torchring.wrap(plain, model)

        def train(model: nn.Module = model, optimizer: Any = optimizer) -> None:
            for step in range(2):
                optimizer.zero_grad()
                loss_on(model, rank, step).backward()
                optimizer.step()

        train()
        _past_the_wrapper(model, plain, how)
        found[how] = attempt(train), digest(values(model))
        optimizer.close()
    return found


_CHANGES = {
    "group": "group1.param0 of the wrapped optimizer, shape (2, 2),",
    "list": "group0.param6 of the wrapped optimizer, shape (2, 2),",
    "replaced": "group0.param2 of the wrapped optimizer, shape (3, 7),",
    "removed": "2.weight was taken out",
    "order": "",
}


def test_e_parameters_that_change_past_the_wrapper() -> None:
    """What is only put in another order goes on."""
    results = run_pooled(_changed_past_the_wrapper, 2)
    for how, fragment in _CHANGES.items():
        for error, _ in (result[how] for result in results):
            assert error.startswith("GradientError: ") == bool(fragment), error
            assert fragment in error
    assert_same_on_all_ranks([result["order"][1] for result in results])


def _unfrozen(side: Side, when: str) -> Sequence[Any]:
    model = small_model()
    model[0].requires_grad_(False)
    optimizer = side.wrap(_momentum(model), model)
    for step in range(4):
        if when == "before the first step" or step >= 2:
            model[0].requires_grad_(True)
        optimizer.zero_grad()
        side.mean(lambda rank, step=step: loss_on(model, rank, step)).backward()
        optimizer.step()
    return values(model)


@pytest.mark.parametrize("when", ["before the first step", "later"])
def test_f_unfreezing(when: str) -> None:
    assert_as_one_process(_unfrozen, when)


def _unfrozen_on_one(rank: int, world_size: int) -> str:
    torchring.init(timeout_seconds=3)
    model = small_model()
    model[0].requires_grad_(False)
    optimizer = torchring.wrap(_momentum(model), model)

    def train() -> None:
        for step in range(3):
            if step == 1 and rank == 0:
                model[0].requires_grad_(True)
            optimizer.zero_grad()
            loss_on(model, rank, step).backward()
            optimizer.step()

    return attempt(train)


def test_f_unfreezing_on_one_rank_only_is_an_error_on_all() -> None:
    for problem in run_pooled(_unfrozen_on_one, 2):
        assert problem.split(":")[0] in ("GradientError", "PlanMismatchError", "PeerTimeoutError"), problem


# g: a hook that steps


def _stepping_hook(rank: int, world_size: int, how: str, model_of: Callable[[], nn.Module], mb: float) -> list[Any]:
    model = model_of()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    own = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    optimizer = torchring.wrap(plain, model, bucket_mb=mb)

    def hook(parameter: Tensor) -> None:
        if how == "wrapper":
            optimizer.step()
        elif how.startswith("wrapped"):
            plain.step()
        else:
            own[parameter].step()
        if "zero" in how:
            parameter.grad = None

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(hook)

    def train() -> None:
        for step in range(3):
            loss_on(model, rank, step).backward()
            if "zero" not in how:
                optimizer.step()
                optimizer.zero_grad()

    return [attempt(train), digest(model.parameters())]


def _wide_model() -> nn.Sequential:
    """Its first matrix, 320 KB, is big enough to be copied on arrival."""
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(4, 10_000), nn.Tanh(), nn.Linear(10_000, 2)).double()


@grid(
    "how, model_of, bucket_mb",
    ["wrapper", "wrapped", "wrapped, zeroed", "others", "others, zeroed"],
    [small_model, _wide_model],
    [TINY_MB, 25.0],
)
def test_g_hooks_that_step_in_the_middle_of_backward(
    how: str, model_of: Callable[[], nn.Module], bucket_mb: float
) -> None:
    results = run_ranks(_stepping_hook, 2, how, model_of, bucket_mb)
    for problem, _ in results:
        assert problem.startswith("GradientError"), problem
        assert any(name in problem for name, _ in model_of().named_parameters()) or "inside backward" in problem


# h: replicas made different


def _drift(model: nn.Sequential, optimizer: Any, how: str) -> None:
    if how == "in place":
        with torch.no_grad():
            model[2].bias[1] += 1e-6
    elif how == "load_state_dict":
        model.load_state_dict({**model.state_dict(), "2.bias": torch.ones(3)})
    elif how == "data":
        model[2].bias.data[1] += 1e-6
    elif how == "data, another tensor":
        model[2].bias.data = model[2].bias.data + 1e-6
    elif how == "a learning rate":
        optimizer.param_groups[0]["lr"] *= 1.5
    else:
        assert how == "optimizer state"
        optimizer.state[model[2].bias]["momentum_buffer"].add_(1e-3)


def _drifting(rank: int, world_size: int, how: str, culprit: int) -> dict[str, Any]:
    """One rank changes something in step 3. Which step notices?"""
    model = small_model()
    optimizer = torchring.wrap(_momentum(model), model, bucket_mb=TINY_MB)
    for step in range(205):
        if step == 3 and rank == culprit:
            _drift(model, optimizer, how)
        optimizer.zero_grad()
        try:
            loss_on(model, rank, step).backward()
            optimizer.step()
        except torchring.GradientError as error:
            return {"step": step, "text": str(error), "peers": error.peers, "parameters": error.parameters}
    return {"step": None, "text": "", "peers": (), "parameters": ()}


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize(
    ("how", "latest"),
    [("in place", 4), ("load_state_dict", 4), ("data", 200), ("data, another tensor", 200), ("a learning rate", 200),
     ("optimizer state", 200)],
)  # fmt: skip
def test_h_replicas_that_are_made_different(how: str, latest: int, culprit: int) -> None:
    """Noticed at once where PyTorch counts the change, and within 200 steps otherwise."""
    results = run_pooled(_drifting, 2, how, culprit)
    assert results[0]["step"] == results[1]["step"]
    for seen in results:
        assert seen["step"] is not None
        assert seen["step"] <= latest
        assert seen["peers"] == (1,)  # with two ranks nobody can tell whose fault it is; rank 0 is the standard
        assert seen["parameters"][0] in seen["text"]
        if how in ("in place", "load_state_dict", "data"):
            assert seen["parameters"] == ("2.bias",)


def _changed_alike(side: Side) -> Sequence[Any]:
    """What all ranks do alike is their own affair: weights clipped in every step, others swapped in and out."""
    model = small_model()
    optimizer = side.wrap(_momentum(model), model)
    for step in range(12):
        optimizer.zero_grad()
        side.mean(lambda rank, step=step: loss_on(model, rank, step)).backward()
        optimizer.step()
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-0.3, 0.3)
        if step == 5:
            model.load_state_dict(small_model(seed=9).state_dict())
    return values(model)


def _converted_with_gradients(rank: int, size: int) -> str:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    x = torch.full((4, 4), float(rank))
    model(x).square().mean().backward()
    optimizer.step()
    model.double()  # the gradients, too, which are views of torchring's buffer and stay the same objects
    with pytest.raises(torchring.GradientError) as error:
        model(x.double()).square().mean().backward()
    return str(error.value)


def _in_another_way(rank: int, size: int, way: str) -> str:
    """What the error says."""
    models = [small_model() for _ in range(2 if way == "threads" else 1)]
    optimizers = [torchring.wrap(_momentum(model), model) for model in models]
    weight = models[0][0].weight
    said: list[str] = []
    if way == "a hook replaces a gradient":
        weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad * 2))
        said.append(attempt(loss_on(models[0], rank, 0).backward))
    elif way == "parameters are exchanged":
        torch.__future__.set_swap_module_params_on_conversion(True)
        models[0].load_state_dict(small_model(seed=9).state_dict())
        torch.__future__.set_swap_module_params_on_conversion(False)
        loss_on(models[0], rank, 0).backward()
        said.append(attempt(optimizers[0].step))
        optimizers[0].close()
        optimizers = [torchring.wrap(_momentum(models[0]), models[0])]
        loss_on(models[0], rank, 0).backward()
        optimizers[0].step()
    else:  # the second backward runs while the first one has not ended
        late = threading.Thread(target=lambda: said.append(attempt(loss_on(models[1], rank, 0).backward)))
        weight.register_hook(lambda grad: (late.start(), late.join(), grad)[2])
        attempt(loss_on(models[0], rank, 0).backward)
    torchring.shutdown()
    return said[0]


@pytest.mark.parametrize(
    ("way", "text"),
    [
        ("a hook replaces a gradient", "0.weight was changed between its accumulation and its reduction; a hook that"),
        ("parameters are exchanged", "set_swap_module_params_on_conversion(True). close() this optimizer and call"),
        ("threads", "GradientError: two threads run backward() at the same time"),
    ],
)
def test_what_cannot_be_trained_on_says_why(way: str, text: str) -> None:
    for said in run_pooled(_in_another_way, 2, way):
        assert text in said


def test_h_a_model_that_is_converted_with_its_gradients_is_refused() -> None:
    for text in run_pooled(_converted_with_gradients, 2):
        assert "is not what it was when it was wrapped (its gradient, now torch.float64" in text


def test_h_changes_that_all_ranks_make_alike_are_no_drift() -> None:
    assert_as_one_process(_changed_alike)


def _mended(rank: int, world_size: int) -> list[str]:
    model = small_model()
    optimizer = torchring.wrap(_momentum(model), model)
    problems = []
    for step in range(6):
        if step == 2 and rank == 1:
            with torch.no_grad():
                model[0].weight.zero_()
        optimizer.zero_grad()
        problem = attempt(loss_on(model, rank, step).backward)
        problems.append(problem or attempt(optimizer.step))
        if problems[-1]:
            torchring.broadcast_parameters(model)
    return [*problems, digest(model.parameters())]


def test_h_drift_can_be_mended_as_the_error_says() -> None:
    results = run_pooled(_mended, 2)
    for *problems, _ in results:
        assert [bool(problem) for problem in problems].count(True) == 1
        assert "broadcast_parameters" in "".join(problems)
    assert_same_on_all_ranks([result[-1] for result in results])


# i: NaN on one rank


def _poisoned(rank: int, world_size: int, value: float, where: int, options: dict[str, Any]) -> dict[str, Any]:
    model = small_model(torch.float32)
    optimizer = torchring.wrap(_momentum(model), model, bucket_mb=TINY_MB, **options)
    seen: dict[str, Any] = {}
    for step in range(4):
        optimizer.zero_grad()
        handle = None
        if step == 1 and rank == world_size - 1:
            handle = model[where].weight.register_hook(lambda gradient: torch.full_like(gradient, value))
        loss_on(model, rank, step).backward()
        if handle is not None:
            handle.remove()
        before = digest(model.parameters())
        try:
            optimizer.step()
        except torchring.GradientError as error:
            seen |= {"step": step, "text": str(error), "peers": error.peers, "parameters": error.parameters}
            seen["untouched"] = before == digest(model.parameters())
    return {**seen, "digest": digest(model.parameters())}


@pytest.mark.parametrize(("value", "where"), [(float("nan"), 0), (float("-inf"), 4)], ids=["first layer", "last layer"])
@pytest.mark.parametrize(
    "options",
    [{}, {"overlap": "thread"}, {"algorithm": "ring"}, {"algorithm": "native"}, {"compression": "fp16"},
     {"compression": "bf16", "algorithm": "ring"}],
    ids=str,
)  # fmt: skip
def test_i_nan_on_one_rank_names_it(value: float, where: int, options: dict[str, Any]) -> None:
    results = run_pooled(_poisoned, 3, value, where, options)
    for seen in results:
        assert seen["step"] == 1
        assert seen["untouched"]
        assert seen["peers"] == (2,)
        assert seen["parameters"] == (f"{where}.weight",)
        assert "rank 2" in seen["text"]
        assert f"{where}.weight" in seen["text"]
    assert_same_on_all_ranks([seen["digest"] for seen in results])


def _poisoned_where_others_have_no_gradient(rank: int, world_size: int) -> list[str]:
    """Only rank 0 uses `b`; then the script mends the gradient on all ranks."""
    model = nn.ParameterDict({name: nn.Parameter(torch.ones(3)) for name in "ab"})
    optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    loss = model["a"].sum()
    if rank == 0:
        loss = loss + (model["b"] * float("nan")).sum()
    loss.backward()
    problems = [attempt(optimizer.step)]
    model["b"].grad.nan_to_num_(0.0)
    return [*problems, attempt(optimizer.step)]


def test_i_nan_in_a_gradient_that_other_ranks_do_not_have() -> None:
    for first, second in run_pooled(_poisoned_where_others_have_no_gradient, 2):
        assert _detected(first, "b")
        assert "rank 0" in first
        assert second == "", "the script has mended the gradient"


def _poisoned_embedding(rank: int, world_size: int) -> str:
    torch.manual_seed(0)
    model = nn.Embedding(5, 3, sparse=True)
    optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)

    def train() -> None:
        (model(torch.tensor([1, 2])) * (float("nan") if rank == 1 else 1.0)).sum().backward()
        optimizer.step()

    return attempt(train)


def test_i_nan_in_a_sparse_gradient() -> None:
    for problem in run_pooled(_poisoned_embedding, 2):
        assert _detected(problem, "weight")
        assert "rank 1" in problem
