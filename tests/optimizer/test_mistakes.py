"""Scripts that DistributedDataParallel trains wrong without an error, and other ways to replicas that are none.

a reentrant checkpoint around a layer that is used twice · b the model called past a wrapper · c two forwards, then two
backwards · d torch.autograd.grad · e parameters that come later · f unfreezing · g a hook that steps · h replicas made
different · i NaN on one rank

First the nine of docs/guides/ddp.md: each script runs under DDP on two ranks, where it ends without an exception and
leaves what is wrong, under torchring, and in one process that has the batches of both. Under torchring the result is
that of one process, or step() raises a GradientError that says what is wrong, on every rank. Then their variations.
"""

from __future__ import annotations

import contextlib
import math
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import torchring
from tests.support.checks import assert_same_everywhere, assert_same_on_all_ranks, digest, exact_inputs, logged
from tests.support.grids import grid
from tests.support.harness import ranks, run_pooled, run_ranks
from tests.support.training import (
    TINY_MB,
    Script,
    Side,
    assert_as_one_process,
    attempt,
    batch,
    loss_on,
    momentum,
    small_model,
    train,
    values,
)
from torchring.errors import GradientError
from torchring.participants import replicas


@dataclass(frozen=True)
class Way(Side):
    """How a script trains: under "ddp" or "torchring" with the batches of one rank, or "alone" with those of both."""

    name: str

    def start(self, model: nn.Module) -> tuple[Any, Any]:
        """What to call forward on, and the optimizer."""
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return DistributedDataParallel(model) if self.name == "ddp" else model, self.wrap(optimizer, model)


@contextmanager
def _process_group(rank: int, size: int, file: str) -> Any:
    """The default process group. PyTorch exchanges the excepthook for its own, and does not put it back."""
    excepthook = sys.excepthook
    dist.init_process_group("gloo", store=dist.FileStore(file, size), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        sys.excepthook = excepthook


def _both(rank: int, size: int, script: Script, file: str) -> tuple[Sequence[Tensor], Any]:
    """What the script leaves under DDP; what it leaves under torchring, or the text of its error."""
    warnings.simplefilter("ignore")  # of PyTorch, on reentrant checkpoints
    with _process_group(rank, size, file):
        of_ddp = script(Way((rank,), False, "ddp"))
    try:
        return of_ddp, script(Way((rank,), True, "torchring"))
    except torchring.GradientError as error:
        return of_ddp, str(error)


@dataclass(frozen=True)
class Outcome:
    """What a script leaves on each rank under DDP and under torchring, and in one process."""

    ddp: list[Sequence[Tensor]]
    torchring: list[Any]
    alone: Sequence[Tensor]

    def assert_ddp_differs_between_ranks(self) -> None:
        first, second = self.ddp
        assert digest(first) != digest(second)
        assert max(float((a - b).abs().max()) for a, b in zip(first, second, strict=True)) > 1e-4

    def assert_torchring_is_right(self) -> None:
        assert not any(isinstance(found, str) for found in self.torchring), self.torchring
        assert_same_on_all_ranks([digest(found) for found in self.torchring])
        for found, right in zip(self.torchring[0], self.alone, strict=True):
            torch.testing.assert_close(found, right, rtol=1e-9, atol=1e-12)

    def assert_torchring_raises(self, *fragments: str) -> None:
        for found in self.torchring:
            assert isinstance(found, str), "no error"
            assert all(fragment in found for fragment in fragments), found


@pytest.fixture
def run(tmp_path: Path) -> Callable[[Script], Outcome]:
    def run(script: Script) -> Outcome:
        of_ddp, of_torchring = zip(*run_pooled(_both, 2, script, str(tmp_path / "store")), strict=True)
        return Outcome(list(of_ddp), list(of_torchring), script(Way((0, 1), False, "alone")))

    return run


Run = Callable[[Script], Outcome]


def _correct(way: Way) -> Sequence[Tensor]:
    model = small_model()
    net, optimizer = way.start(model)
    train(way, net, optimizer, range(2))
    return values(model)


def test_without_a_mistake_all_agree(run: Run) -> None:
    outcome = run(_correct)
    outcome.assert_torchring_is_right()
    with pytest.raises(AssertionError):
        outcome.assert_ddp_differs_between_ranks()
    torch.testing.assert_close(outcome.ddp[0], outcome.alone, rtol=1e-9, atol=1e-12)


class _UsedTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.shared = nn.Linear(4, 4).double()

    def forward(self, x: Tensor, is_checkpointed: bool = True) -> Tensor:
        x = x.detach().requires_grad_()
        for _ in range(2):
            x = torch.tanh(checkpoint(self.shared, x, use_reentrant=True) if is_checkpointed else self.shared(x))
        return x


def _checkpointed(way: Way) -> Sequence[Tensor]:
    model = _UsedTwice()
    net, optimizer = way.start(model)
    for step in range(2):
        optimizer.zero_grad()
        way.mean(lambda rank, step=step: net(batch(rank, step)[0]).square().mean()).backward()
        optimizer.step()
    return values(model)


def test_a_layer_under_reentrant_checkpoints_is_used_twice(run: Run) -> None:
    outcome = run(_checkpointed)
    outcome.assert_ddp_differs_between_ranks()
    outcome.assert_torchring_raises("shared.", "received another gradient in the same backward")


def _past_forward(way: Way) -> Sequence[Tensor]:
    model = small_model()
    net, optimizer = way.start(model)
    inner = net.module if way.name == "ddp" else net
    train(way, inner, optimizer, range(2))
    return values(model)


def test_the_model_is_called_past_the_wrapper(run: Run) -> None:
    outcome = run(_past_forward)
    outcome.assert_ddp_differs_between_ranks()
    outcome.assert_torchring_is_right()


def _two_and_two(way: Way) -> Sequence[Tensor]:
    model = small_model()
    net, optimizer = way.start(model)
    for step in range(2):
        optimizer.zero_grad()
        losses = [way.mean(lambda rank, at=10 * step + i: loss_on(net, rank, at)) for i in range(2)]
        for loss in losses:
            loss.backward()
        optimizer.step()
    return values(model)


def test_two_forwards_are_followed_by_two_backwards(run: Run) -> None:
    outcome = run(_two_and_two)
    outcome.assert_ddp_differs_between_ranks()
    outcome.assert_torchring_is_right()


def _autograd_grad(way: Way) -> Sequence[Tensor]:
    model = small_model()
    net, optimizer = way.start(model)
    loss = way.mean(lambda rank: loss_on(net, rank, 0))
    for parameter, gradient in zip(
        model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
    ):
        parameter.grad = gradient
    optimizer.step()
    return values(model)


def test_gradients_come_from_autograd_grad(run: Run) -> None:
    outcome = run(_autograd_grad)
    outcome.assert_ddp_differs_between_ranks()
    outcome.assert_torchring_raises("the gradient of 4.bias has never been reduced", "optimizer.synchronize()")


def _grows(way: Way) -> Sequence[Tensor]:
    model = small_model()
    net, optimizer = way.start(model)
    torch.manual_seed(8)
    model.append(nn.Linear(2, 2).double())
    optimizer.add_param_group({"params": list(model[5].parameters())})
    train(way, net, optimizer, range(2))
    return values(model)


def test_a_layer_is_added_later(run: Run) -> None:
    outcome = run(_grows)
    outcome.assert_ddp_differs_between_ranks()
    outcome.assert_torchring_is_right()


def _unfreezes(way: Way) -> Sequence[Tensor]:
    model = small_model()
    model[0].requires_grad_(False)
    net, optimizer = way.start(model)
    for step in range(3):
        if step == 1:
            model[0].requires_grad_(True)
        train(way, net, optimizer, [step])
    return values(model)


def test_a_layer_is_unfrozen_later(run: Run) -> None:
    outcome = run(_unfreezes)
    outcome.assert_ddp_differs_between_ranks()
    outcome.assert_torchring_is_right()


def _steps_in_a_hook(way: Way) -> Sequence[Tensor]:
    model = small_model()
    net, optimizer = way.start(model)
    own = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}

    def hook(parameter: Tensor) -> None:
        own[parameter].step()

    with ExitStack() as hooks:  # a parameter and its hook keep each other alive
        for parameter in model.parameters():
            hooks.callback(parameter.register_post_accumulate_grad_hook(hook).remove)
        for step in range(2):
            optimizer.zero_grad()
            way.mean(lambda rank, step=step: loss_on(net, rank, step)).backward()
    return values(model)


def test_a_hook_steps_inside_backward(run: Run) -> None:
    outcome = run(_steps_in_a_hook)
    outcome.assert_ddp_differs_between_ranks()
    outcome.assert_torchring_raises("is not the same on all ranks", "outside optimizer.step()")


def _drifts(way: Way) -> Sequence[Tensor]:
    model = small_model()
    net, optimizer = way.start(model)
    for step in range(4):
        if step == 1 and 1 in way.mine:
            with torch.no_grad():
                model[2].bias.add_(0.5)
        train(way, net, optimizer, [step])
    return values(model)


def test_one_rank_changes_a_parameter(run: Run) -> None:
    outcome = run(_drifts)
    outcome.assert_ddp_differs_between_ranks()
    outcome.assert_torchring_raises("2.bias", "rank 1")


def _nan_on_one_rank(way: Way) -> Sequence[Tensor]:
    model = small_model()
    net, optimizer = way.start(model)
    optimizer.zero_grad()
    way.mean(lambda rank: loss_on(net, rank, 0) * (float("nan") if rank == 1 else 1.0)).backward()
    optimizer.step()
    return values(model)


def test_a_gradient_is_nan_on_one_rank(run: Run) -> None:
    outcome = run(_nan_on_one_rank)
    for trained in outcome.ddp:
        assert all(bool(parameter.isnan().all()) for parameter in trained)
    outcome.assert_torchring_raises("came from rank 1", "the gradient of 4.")


# Variations: options, places, ways out


def is_about(error: str, *names: str) -> bool:
    """Whether it is a GradientError about one of the parameters."""
    return error.startswith("GradientError") and any(name in error for name in names)


def _collected(side: Side) -> Sequence[Tensor]:
    model = _UsedTwice()
    optimizer = side.wrap(momentum(model), model)
    for step in range(3):
        optimizer.zero_grad()
        with optimizer.no_sync() if side.is_wrapped else contextlib.nullcontext():
            side.mean(lambda rank, step=step: model(batch(rank, step)[0], side.is_wrapped).square().mean()).backward()
        if side.is_wrapped:
            optimizer.synchronize()
        optimizer.step()
    return values(model)


def test_a_the_way_out_that_the_error_of_reentrant_checkpoints_tells() -> None:
    assert_as_one_process(_collected)


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


@pytest.mark.parametrize(
    ("how", "fragment"),
    [
        ("group", "group1.param0 of the wrapped optimizer, shape (2, 2),"),
        ("list", "group0.param6 of the wrapped optimizer, shape (2, 2),"),
        ("replaced", "group0.param2 of the wrapped optimizer, shape (3, 7),"),
        ("removed", "2.weight was taken out"),
        ("order", ""),
    ],
)
@ranks(2)
def test_e_parameters_that_change_past_the_wrapper(how: str, fragment: str, rank: int) -> None:
    """What is only put in another order goes on."""
    model = small_model()
    plain = momentum(model)
    optimizer = torchring.wrap(plain, model)

    def train() -> None:
        for step in range(2):
            optimizer.zero_grad()
            loss_on(model, rank, step).backward()
            optimizer.step()

    train()
    _past_the_wrapper(model, plain, how)
    error = attempt(train)
    assert error.startswith("GradientError: ") == bool(fragment), error
    assert fragment in error
    if how == "order":
        assert_same_everywhere(model.parameters())


@ranks(2)
def test_f_unfreezing_on_one_rank_only_is_an_error_on_all(rank: int) -> None:
    torchring.init(timeout_seconds=3)
    model = small_model()
    model[0].requires_grad_(False)
    optimizer = torchring.wrap(momentum(model), model)

    def train() -> None:
        for step in range(3):
            if step == 1 and rank == 0:
                model[0].requires_grad_(True)
            optimizer.zero_grad()
            loss_on(model, rank, step).backward()
            optimizer.step()

    problem = attempt(train)
    assert problem.split(":")[0] in ("GradientError", "PlanMismatchError", "PeerTimeoutError"), problem


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
@ranks(2, start=run_ranks)
def test_g_hooks_that_step_in_the_middle_of_backward(
    how: str, model_of: Callable[[], nn.Module], bucket_mb: float, rank: int
) -> None:
    model = model_of()
    plain = torch.optim.SGD(model.parameters(), lr=0.1)
    own = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    optimizer = torchring.wrap(plain, model, bucket_mb=bucket_mb)

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

    problem = attempt(train)
    assert problem.startswith("GradientError"), problem
    assert any(name in problem for name, _ in model.named_parameters()) or "inside backward" in problem


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


@pytest.mark.parametrize("culprit", [0, 1])
@pytest.mark.parametrize(
    ("how", "latest"),
    [("in place", 4), ("load_state_dict", 4), ("data", 200), ("data, another tensor", 200), ("a learning rate", 200),
     ("optimizer state", 200)],
)  # fmt: skip
@ranks(2)
def test_h_replicas_that_are_made_different(how: str, latest: int, culprit: int, rank: int) -> None:
    """One rank changes something in step 3: noticed at once where PyTorch counts the change, else within 200 steps."""
    model = small_model()
    optimizer = torchring.wrap(momentum(model), model, bucket_mb=TINY_MB)
    for step in range(205):
        if step == 3 and rank == culprit:
            _drift(model, optimizer, how)
        optimizer.zero_grad()
        try:
            loss_on(model, rank, step).backward()
            optimizer.step()
        except torchring.GradientError as error:
            noticed = error
            break
    assert 3 <= step <= latest
    assert torchring.all_gather_object(step) == [step] * 2
    assert noticed.peers == (1,)  # with two ranks nobody can tell whose fault it is; rank 0 is the standard
    assert noticed.parameters[0] in str(noticed)
    if how in ("in place", "load_state_dict", "data"):
        assert noticed.parameters == ("2.bias",)


@pytest.mark.parametrize(
    ("way", "text"),
    [
        ("a hook replaces a gradient", "0.weight was changed between its accumulation and its reduction; a hook that"),
        ("parameters are exchanged", "set_swap_module_params_on_conversion(True). close() this optimizer and call"),
        ("threads", "GradientError: two threads run backward() at the same time"),
    ],
)
@ranks(2)
def test_what_cannot_be_trained_on_says_why(way: str, text: str, rank: int) -> None:
    """What the error says."""
    models = [small_model() for _ in range(2 if way == "threads" else 1)]
    optimizers = [torchring.wrap(momentum(model), model) for model in models]
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
        optimizers = [torchring.wrap(momentum(models[0]), models[0])]
        loss_on(models[0], rank, 0).backward()
        optimizers[0].step()
    else:  # the second backward runs while the first one has not ended
        late = threading.Thread(target=lambda: said.append(attempt(loss_on(models[1], rank, 0).backward)))
        weight.register_hook(lambda grad: (late.start(), late.join(), grad)[2])
        attempt(loss_on(models[0], rank, 0).backward)
    torchring.shutdown()
    assert text in said[0]


@ranks(2)
def test_h_a_model_that_is_converted_with_its_gradients_is_refused(rank: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    x = torch.full((4, 4), float(rank))
    model(x).square().mean().backward()
    optimizer.step()
    model.double()  # the gradients, too, which are views of torchring's buffer and stay the same objects
    with pytest.raises(torchring.GradientError) as error:
        model(x.double()).square().mean().backward()
    assert "is not what it was when it was wrapped (it" in str(error.value)


@ranks(2)
def test_h_drift_can_be_mended_as_the_error_says(rank: int) -> None:
    model = small_model()
    optimizer = torchring.wrap(momentum(model), model)
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
    assert [bool(problem) for problem in problems].count(True) == 1
    assert "broadcast_parameters" in "".join(problems)
    assert_same_everywhere(model.parameters())


@pytest.mark.parametrize(
    ("value", "where", "options"),
    [
        (math.nan, 0, {}),
        (-math.inf, 4, {}),
        (math.nan, 4, {"overlap": "thread"}),
        (-math.inf, 0, {"algorithm": "native"}),
        (math.nan, 0, {"algorithm": "native"}),
        (-math.inf, 4, {"compression": "fp16"}),
        (math.nan, 4, {"compression": "bf16", "algorithm": "native"}),
    ],
)
@ranks(3)
def test_i_nan_on_one_rank_names_it(
    value: float, where: int, options: dict[str, Any], rank: int, world_size: int
) -> None:
    model = small_model(torch.float32)
    optimizer = torchring.wrap(momentum(model), model, bucket_mb=TINY_MB, **options)
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
    assert seen["step"] == 1
    assert seen["untouched"]
    assert seen["peers"] == (2,)
    assert seen["parameters"] == (f"{where}.weight",)
    assert "rank 2" in seen["text"]
    assert f"{where}.weight" in seen["text"]
    assert_same_everywhere(model.parameters())


@ranks(2)
def test_i_nan_in_a_gradient_that_other_ranks_do_not_have(rank: int) -> None:
    """Only rank 0 uses `b`; then the script mends the gradient on all ranks."""
    model = nn.ParameterDict({name: nn.Parameter(torch.ones(3)) for name in "ab"})
    optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    loss = model["a"].sum()
    if rank == 0:
        loss = loss + (model["b"] * float("nan")).sum()
    loss.backward()
    first = attempt(optimizer.step)
    model["b"].grad.nan_to_num_(0.0)
    second = attempt(optimizer.step)
    assert is_about(first, "b")
    assert "rank 0" in first
    assert second == "", "the script has mended the gradient"


# Replicas that become different


def model_and_optimizer(**options: object) -> tuple[torch.nn.Module, torchring.DistributedOptimizer]:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.5), model, **options)  # type: ignore[arg-type]
    return model, optimizer


def train_on(model: torch.nn.Module, optimizer: torchring.DistributedOptimizer, rank: int, step: int) -> None:
    optimizer.zero_grad()
    model(exact_inputs(6, torch.float32, rank + 7 * step).view(2, 3)).sum().backward()
    optimizer.step()


Watched = tuple[str, Tensor, Callable[[int], object]]  # a parameter's name, the parameter, and train_step(step)


def check_named(error: GradientError, name: str, rank: int) -> None:
    assert (error.parameters, error.peers) == ((name,), (rank,))
    text = str(error)
    assert text.startswith(f"{name} is not the same on all ranks: rank {rank} differ")
    assert "broadcast_parameters" in text


@pytest.mark.parametrize("when", ["before backward", "after backward", "after step"])
@pytest.mark.parametrize(("world_size", "overlap"), [(2, "inline"), (3, "thread")])
@ranks()
def test_changed_in_place_on_one_rank(world_size: int, overlap: str, when: str, rank: int) -> None:
    model, optimizer = model_and_optimizer(overlap=overlap)
    culprit = world_size - 1

    def change() -> None:
        if rank == culprit:
            with torch.no_grad():
                model[2].weight[1, 3] += 2**-20  # type: ignore[index,union-attr]

    for step in range(5):
        train_on(model, optimizer, rank, step)
    optimizer.zero_grad()
    if when == "before backward":
        change()
    else:
        model(torch.ones(2, 3)).sum().backward()
        if when == "after backward":
            change()  # the alarm can travel with the next backward only
        optimizer.step()
        if when == "after step":
            change()
        optimizer.zero_grad()
    before = digest(model.parameters())
    loss = model(torch.ones(2, 3)).sum()
    loss.backward()
    with pytest.raises(GradientError) as caught:
        optimizer.step()
    check_named(caught.value, "2.weight", culprit)
    assert caught.value.rank == rank
    assert digest(model.parameters()) == before  # it comes before anything is stepped


@ranks(2)
def test_replicas_that_differ_from_the_beginning(rank: int) -> None:
    for is_synchronized, name in ((True, "0.bias"), (False, "0.weight")):  # ranks are seeded differently
        model, optimizer = model_and_optimizer(sync_initial_state=is_synchronized)
        if is_synchronized and rank == 1:
            model[0].bias.data += 1  # type: ignore[index]
        model(torch.ones(2, 3)).sum().backward()
        with pytest.raises(GradientError) as caught:
            optimizer.step()
        check_named(caught.value, name, 1)
        optimizer.close()


@ranks(2, start=run_ranks)
def test_the_same_change_on_all_ranks_is_no_error(rank: int) -> None:
    replicas.STEPS_BETWEEN_CHECKS = 3  # type: ignore[misc]
    model, optimizer = model_and_optimizer()
    for step in range(12):
        train_on(model, optimizer, rank, step)
        with torch.no_grad():  # weight clipping, in every step
            for parameter in model.parameters():
                parameter.clamp_(-0.5, 0.5)
        if step == 5:
            for parameter in model.parameters():
                parameter.data = parameter.data * 0.5
        if step == 7:
            model.load_state_dict({name: torch.ones_like(value) for name, value in model.state_dict().items()})
    assert_same_everywhere(model.parameters())


def _with_a_closure(rank: int) -> Watched:
    """Which evaluates the model itself."""
    model, optimizer = model_and_optimizer()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(torch.ones(2, 3)).sum()
        loss.backward()
        return loss

    return "0.bias", model[0].bias, lambda step: optimizer.step(closure)  # type: ignore[index]


def _all_sparse(rank: int) -> Watched:
    """No bucket that the alarm could travel with."""
    table = torch.nn.Embedding(5, 3, sparse=True)
    optimizer = torchring.wrap(torch.optim.SGD(table.parameters(), lr=0.5), table)

    def train_step(step: int) -> None:
        optimizer.zero_grad()
        table(torch.tensor([0, 1])).sum().backward()
        optimizer.step()

    return "weight", table.weight, train_step


def _beside_another_optimizer(rank: int) -> Watched:
    """Each of which watches its own."""
    (first, g), (second, d) = model_and_optimizer(), model_and_optimizer()

    def train_step(step: int) -> None:
        for optimizer in (g, d):
            optimizer.zero_grad()
        (first(torch.ones(2, 3)).sum() + second(torch.ones(2, 3)).sum()).backward()
        g.step()
        d.step()

    return "2.bias", second[2].bias, train_step  # type: ignore[index]


def _among_the_same(rank: int) -> Watched:
    """All ranks change everything in every step, too."""
    model, optimizer = model_and_optimizer()

    def train_step(step: int) -> None:
        train_on(model, optimizer, rank, step)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.99)

    return "0.bias", model[0].bias, train_step  # type: ignore[index]


@pytest.mark.parametrize(
    ("watched", "latest"),
    [(_with_a_closure, 1), (_all_sparse, 1), (_beside_another_optimizer, 0), (_among_the_same, 20)],
)
@ranks(2)
def test_a_change_on_one_rank_is_found_however_it_trains(
    watched: Callable[[int], Watched], latest: int, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At most `latest` steps after it, by all ranks in the same step."""
    monkeypatch.setattr(replicas, "STEPS_BETWEEN_CHECKS", 20)
    name, parameter, train_step = watched(rank)
    found = -1
    for step in range(40):
        if rank == 1 and step == 3:
            with torch.no_grad():
                parameter[-1] += 1
        try:
            train_step(step)
        except GradientError as error:
            check_named(error, name, 1)
            found = step
            break
    assert 3 <= found <= 3 + latest
    assert torchring.all_gather_object(found) == [found] * 2


def first_error(train_step: Callable[[int], None]) -> GradientError:
    """What the first of a few steps raises that raises something."""
    for step in range(8):
        try:
            train_step(step)
        except GradientError as error:
            return error
    raise AssertionError("no step raised GradientError")


@ranks(2)
def test_machines_of_two_kinds_may_differ_by_rounding(rank: int) -> None:
    """On rank 1 the last bits differ, and in the end a number does."""
    platform = {"architecture": "x86_64", "torch": ["2.13.0", "2.12.1"][rank]}
    with (
        mock.patch.object(replicas, "_platform", return_value=platform),
        mock.patch.object(replicas, "STEPS_BETWEEN_CHECKS", 4),
        logged() as texts,
    ):
        model, optimizer = model_and_optimizer()
        for step in range(9):
            if rank == 1 and step:
                for parameter in model.parameters():
                    parameter.data.mul_(1 + 2**-22)
            train_on(model, optimizer, rank, step)
        assert_same_everywhere(model.parameters())
        if rank == 1:
            model[2].weight.data[1, 3] += 2**-8  # type: ignore[index,union-attr]
        error = first_error(lambda step: train_on(model, optimizer, rank, step))
    assert (error.parameters, error.peers) == (("2.weight",), (1,))
    differ = "torch is 2.12.1 on rank 1, 2.13.0 on rank 0"
    assert str(error).partition(" [")[0].endswith(differ)
    assert len(texts) == (rank == 0)
    assert all(text.startswith(f"the ranks do not compute alike: {differ}.") for text in texts)


@ranks(2)
def test_what_changes_a_replica_is_named(rank: int) -> None:
    def renormalise(step: int) -> None:
        model(torch.tensor([rank, 2 + rank])).sum().backward()
        optimizer.step()

    def schedule(step: int) -> None:
        train_on(model, optimizer, rank, step)
        scheduler.step(float(step if rank == 1 else -step))

    with mock.patch.object(replicas, "STEPS_BETWEEN_CHECKS", 2):
        model, optimizer = model_and_optimizer()
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, cooldown=9)
        lr = str(first_error(schedule))
        optimizer.close()
        model = torch.nn.Embedding(8, 3, max_norm=0.1)
        optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.5), model)
        max_norm = str(first_error(renormalise))
    assert "lr of param_groups[0] is 0.05 on rank 1, 0.5 on rank 0" in lr
    assert "weight of an Embedding with max_norm" in max_norm
    assert "Leave max_norm out" in max_norm


@ranks(2)
def test_a_frozen_parameter_is_watched_too(rank: int) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    model[0].requires_grad_(False)
    optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.5), model)
    train_on(model, optimizer, rank, 0)
    if rank == 1:
        with torch.no_grad():
            model[0].weight[0, 0] += 1  # type: ignore[index,union-attr]
    model(torch.ones(2, 3)).sum().backward()
    with pytest.raises(GradientError) as caught:
        optimizer.step()
    check_named(caught.value, "0.weight", 1)


def _stepped_on_one(rank: int, world_size: int, culprit: int, what: str) -> tuple[int, tuple[int, ...], str]:
    """Returns how many backwards after the uneven step it is found, who is named, and the error."""
    model, optimizer = model_and_optimizer()
    for step in range(8):
        optimizer.zero_grad()
        try:
            model(exact_inputs(6, torch.float32, rank + 7 * step).view(2, 3)).sum().backward()
        except GradientError as error:
            return step - 3, error.peers, str(error)
        if step == 3 and rank == culprit:
            if what == "skipped":
                continue
            optimizer.step()
        optimizer.step()
    return 1000, (), ""


@pytest.mark.parametrize("what", ["skipped", "stepped twice"])
@pytest.mark.parametrize(("world_size", "culprit"), [(2, 0), (2, 1), (3, 0), (3, 2)])
def test_a_step_more_or_less_on_one_rank_is_found_in_the_next_backward(
    world_size: int, culprit: int, what: str
) -> None:
    named = (culprit,) if culprit else tuple(range(1, world_size))  # rank 0 is what the others are compared with
    odd = 3 if what == "skipped" else 5
    steps, other = (odd, 4) if culprit == 0 else (4, odd), 1 if culprit == 0 else culprit
    for delay, peers, text in run_pooled(_stepped_on_one, world_size, culprit, what):
        assert (delay, peers) == (1, named)
        told = f"rank 0 has called optimizer.step() {steps[0]} times, rank {other} {steps[1]} times"
        assert f"In 5 reductions {told}" in text
        assert "inside optimizer.no_sync()" in text


@ranks(2, start=run_ranks)
def test_a_step_left_out_on_all_ranks_is_no_error() -> None:
    """What a GradScaler does, and what accumulating without `accumulate` looks like. No check is needed for it."""
    model, optimizer = model_and_optimizer()
    checks = count_checks()
    for step in range(9):
        optimizer.zero_grad()
        model(torch.ones(2, 3)).sum().backward()
        if step % 3:
            optimizer.step()
    assert len(checks) == 1  # the first reduction's
    assert_same_everywhere(model.parameters())


def count_checks() -> list[int]:
    """Grows by one with every comparison from now on."""
    checks: list[int] = []
    compare = replicas.ReplicaCheck.compare

    def counted(self: replicas.ReplicaCheck) -> None:
        checks.append(1)
        compare(self)

    replicas.ReplicaCheck.compare = counted  # type: ignore[method-assign]
    return checks


@ranks(2, start=run_ranks)
def test_training_that_nobody_disturbs_is_checked_by_the_rhythm_only(rank: int) -> None:
    replicas.STEPS_BETWEEN_CHECKS = 5  # type: ignore[misc]
    model, optimizer = model_and_optimizer()
    checks = count_checks()
    seen = []
    for step in range(12):
        before = len(checks)
        train_on(model, optimizer, rank, step)
        if len(checks) > before:
            seen.append(step)
    assert seen == [0, 5, 10]


class _Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 2))

    def forward(self, words: Tensor) -> Tensor:
        return nn.functional.embedding(words, self.weight, sparse=True)


@ranks(2, start=run_ranks)
def test_what_messages_advise(rank: int) -> None:
    """A schedule may begin long before its optimizer: nothing is logged then."""

    def with_gradients(value: float) -> str:
        model = nn.Linear(2, 1)
        optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, compression="fp16")
        torch.autograd.backward(list(model.parameters()), [torch.full_like(p, value) for p in model.parameters()])
        problem = attempt(optimizer.step)
        optimizer.close()
        return problem

    def moves(parameter: Any) -> None:
        parameter.main_grad, parameter.grad = parameter.grad, None

    found = {
        "too large": with_gradients(1e7 if rank == 1 else 1.0),
        "too large together": with_gradients(1e5),
    }
    model, loss = nn.Linear(2, 2), nn.Linear(2, 1)
    both = [*model.parameters(), *loss.parameters()]
    found["loss"] = attempt(lambda: torchring.wrap(torch.optim.SGD(both, lr=0.1), model))
    first = torchring.wrap(torch.optim.Adam(model.parameters()), model)
    late = torchring.wrap(torch.optim.Adam(loss.parameters()), loss)
    schedule = torch.optim.lr_scheduler.StepLR(late, 100)
    with logged() as lines, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(21):
            y = model(torch.ones(3, 2))
            y.sum().backward()
            first.step()
            if step == 20:
                loss(y.detach()).sum().backward()
                late.step()
            schedule.step()
    first.close()
    late.close()
    torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model)
    model.weight.register_post_accumulate_grad_hook(moves)
    found["main_grad"] = attempt(model(torch.ones(3, 2)).sum().backward)
    torchring.shutdown()
    table = _Table()
    torchring.wrap(torch.optim.SGD(table.parameters(), lr=0.1), table)
    found["functional"] = attempt(table(torch.tensor([1, 2])).sum().backward)
    expected = {
        "too large": "a number that does not fit fp16 came from rank 1. fp16 ends at 65504; compression='bf16'",
        "too large together": "fit fp16",
        "loss": "pass torch.nn.ModuleList([model, loss])",
        "main_grad": "moves .grad elsewhere (to main_grad)",
        "functional": "those of nn.Embedding and nn.EmbeddingBag in the model",
    }
    for case, fragment in expected.items():
        assert fragment in found[case], (case, found[case])
    assert not lines
