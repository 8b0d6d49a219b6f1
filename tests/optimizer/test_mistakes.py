"""Mistakes of scripts, and the error that each gets on all ranks. For arguments of wrap see test_options.py.

First the nine of docs/guides/ddp.md: each script runs under DDP on two ranks, where it ends without an exception and
leaves what is wrong, under torchring, and in one process that has the batches of both. Then `REFUSED`: a row is a
script of a few lines, and the error that it gets. For replicas that become different see participants/test_replicas.py.
"""

import functools
import math
import re
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import torchring
from tests.support.checks import assert_same_everywhere, digest
from tests.support.harness import ranks, run_ranks
from tests.support.training import TINY_MB, Side, attempt, batch, loss_on, momentum, small_model, train, values
from torchring.gradients.views import CAN_SWAP
from torchring.participants import replicas

# A model of a script, any; its optimizer, wrapped or not.
Model = Any
Optimizer = Any


@dataclass(frozen=True)
class Way(Side):
    """How a script trains: under "ddp" or "torchring" with the batches of one rank, or "alone" with those of both."""

    name: str

    def values_after(self, script: Callable[..., object], make: Callable[[], Model]) -> Any:
        """What script(way, model, what to call forward on, optimizer) leaves of a model."""
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        net = DistributedDataParallel(model) if self.name == "ddp" else model
        script(self, model, net, self.wrap(optimizer, model))
        return values(model)


class _UsedTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.shared = nn.Linear(4, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        for _ in range(2):
            x = torch.tanh(checkpoint(self.shared, x, use_reentrant=True))
        return x


def _two_and_two(way: Way, model: Model, net: Any, optimizer: Optimizer) -> None:
    for step in range(2):
        optimizer.zero_grad()
        losses = [way.mean(lambda rank, at=10 * step + i: loss_on(net, rank, at)) for i in range(2)]
        for loss in losses:
            loss.backward()
        optimizer.step()


def _autograd_grad(way: Way, model: Model, net: Any, optimizer: Optimizer) -> None:
    gradients = torch.autograd.grad(way.mean(lambda rank: loss_on(net, rank, 0)), list(model.parameters()))
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()


def _grows(way: Way, model: Model, net: Any, optimizer: Optimizer) -> None:
    torch.manual_seed(8)
    model.append(nn.Linear(2, 2).double())
    optimizer.add_param_group({"params": list(model[5].parameters())})
    train(way, net, optimizer, range(2))


def _unfreezes(way: Way, model: Model, net: Any, optimizer: Optimizer) -> None:
    train(way, net, optimizer, [0])
    model[0].requires_grad_(True)
    train(way, net, optimizer, [1, 2])


def _steps_in_a_hook(way: Way, model: Model, net: Any, optimizer: Optimizer) -> None:
    own = {parameter: torch.optim.SGD([parameter], lr=0.1) for parameter in model.parameters()}
    with ExitStack() as hooks:  # a parameter and its hook keep each other alive
        for parameter in model.parameters():
            hooks.callback(parameter.register_post_accumulate_grad_hook(lambda p: own[p].step()).remove)
        for step in range(2):
            optimizer.zero_grad()
            way.mean(lambda rank, step=step: loss_on(net, rank, step)).backward()


def _drifts(way: Way, model: Model, net: Any, optimizer: Optimizer) -> None:
    train(way, net, optimizer, [0])
    if 1 in way.mine:
        with torch.no_grad():
            model[2].bias.add_(0.5)
    train(way, net, optimizer, range(1, 4))


def _first_frozen() -> Model:
    model = small_model()
    model[0].requires_grad_(False)
    return model


_TWICE: Final = ("shared.", "received another gradient in the same backward")
_UNREDUCED: Final = ("the gradient of 4.bias has never been reduced", "optimizer.synchronize()")

# By name: the script, and words of torchring's error; none if it trains as one process does.
OF_DDP: Final[dict[str, tuple[Callable[[Way, Model, Any, Optimizer], object], tuple[str, ...]]]] = {
    "no mistake": (lambda way, model, net, it: train(way, net, it, range(2)), ()),
    "a layer is used twice": (
        lambda way, model, net, it: train(
            way, model, it, range(2), lambda rank, step: net(batch(rank, step)[0]).square().mean()
        ),
        _TWICE,
    ),
    "past the wrapper": (lambda way, model, net, it: train(way, model, it, range(2)), ()),
    "two forwards, two backwards": (_two_and_two, ()),
    "autograd.grad": (_autograd_grad, _UNREDUCED),
    "a layer is added": (_grows, ()),
    "a layer is unfrozen": (_unfreezes, ()),
    "a hook steps": (_steps_in_a_hook, ("is not the same on all ranks", "outside optimizer.step()")),
    "one rank changes": (_drifts, ("2.bias", "rank 1")),
    "NaN": (
        lambda way, model, net, it: train(
            way, net, it, [0], lambda rank, step: loss_on(net, rank, step) * (math.nan if rank == 1 else 1.0)
        ),
        ("came from rank 1", "the gradient of 4."),
    ),
}
_MODELS: Final = {"a layer is used twice": _UsedTwice, "a layer is unfrozen": _first_frozen}


@ranks(2, run_ranks)
def test_mistakes_that_ddp_does_not_notice(rank: int) -> None:
    warnings.simplefilter("ignore")  # of PyTorch, on reentrant checkpoints
    for name, (script, words) in OF_DDP.items():
        print(name)  # the last one in the output is the one that failed
        found: list[Any] = []
        make, way = _MODELS.get(name, small_model), Way((rank,), True, "torchring")
        problem = attempt(lambda: found.append(way.values_after(script, make)))  # noqa: B023
        assert bool(found) != bool(words), problem or "no error"
        assert not words or problem.startswith("GradientError: "), problem
        assert all(word in problem for word in words), problem
        for trained in found:
            assert_same_everywhere(trained)
            alone = Way((0, 1), False, "alone").values_after(script, make)
            torch.testing.assert_close(trained, alone, rtol=1e-9, atol=1e-12)
        torchring.shutdown()
    dist.init_process_group("gloo")
    for name, (script, _) in OF_DDP.items():
        print(f"{name}, DDP")
        trained = Way((rank,), False, "ddp").values_after(script, _MODELS.get(name, small_model))
        of_ddp = torch.cat([value.flatten() for value in trained])
        first, second = torchring.all_gather(of_ddp[None])
        if name == "NaN":
            assert first.isnan().all()
        else:
            assert (float((first - second).abs().max()) > 1e-4) == (name != "no mistake")
    torchring.shutdown()
    dist.destroy_process_group()


# What is refused: scripts for a rank.


def _wrapped(model: Model = None, **options: Any) -> tuple[Model, Optimizer]:
    model = small_model() if model is None else model
    return model, torchring.wrap(torch.optim.SGD(model.parameters(), lr=0.1), model, **options)


def _go_on(model: Model, optimizer: Optimizer, rank: int, steps: int = 3) -> None:
    train(Side((rank,), True), model, optimizer, range(steps))


def _then(change: Callable[[Model, Optimizer, int], object], **options: Any) -> Callable[[int], None]:
    def script(rank: int) -> None:
        model, optimizer = _wrapped(**options)
        _go_on(model, optimizer, rank, 2)
        change(model, optimizer, rank)
        _go_on(model, optimizer, rank, 5)
        assert_same_everywhere(model.parameters())

    return script


def _exchange_parameters(model: Model, optimizer: Optimizer, rank: int) -> None:
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.load_state_dict(small_model(seed=9).state_dict())
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


def _collect(rank: int) -> None:
    """The way out that the error of reentrant checkpoints tells."""
    model, optimizer = _wrapped(_UsedTwice())
    for step in range(3):
        optimizer.zero_grad()
        with optimizer.no_sync():
            model(batch(rank, step)[0]).square().mean().backward()
        optimizer.synchronize()
        optimizer.step()
    assert_same_everywhere(model.parameters())


def _replace_a_layer(model: Model, optimizer: Optimizer, rank: int) -> None:
    model[2] = nn.Linear(7, 3).double()
    optimizer.optimizer.param_groups[0]["params"] = list(model.parameters())


def _add_a_layer(model: Model) -> list[nn.Parameter]:
    model.append(nn.Linear(2, 2).double())
    return list(model[5].parameters())


def _add_a_group(model: Model, optimizer: Optimizer, rank: int) -> None:
    optimizer.optimizer.add_param_group({"params": _add_a_layer(model)})


def _reorder(model: Model, optimizer: Optimizer, rank: int) -> None:
    group = optimizer.optimizer.param_groups[0]
    group["params"] = group["params"][::-1]


def _two_threads(rank: int) -> None:
    """The second backward runs while the first one has not ended."""
    (model, _), (other, _) = _wrapped(), _wrapped()
    loss = loss_on(other, rank, 0)
    with ThreadPoolExecutor(1) as thread:
        model[0].weight.register_hook(lambda grad: thread.submit(loss.backward).result())
        loss_on(model, rank, 0).backward()


def _convert(rank: int) -> None:
    """Its gradients, too, which are views of torchring's buffer and stay the same objects."""
    model, optimizer = _wrapped(small_model(torch.float32))
    _go_on(model, optimizer, rank, 1)
    loss_on(model.double(), rank, 0).backward()


def _unfreeze_on_one_rank(rank: int) -> None:
    torchring.init(timeout_seconds=3)
    model = small_model()
    model[0].requires_grad_(False)
    _, optimizer = _wrapped(model)
    _go_on(model, optimizer, rank, 1)
    model[0].requires_grad_(rank == 0)
    _go_on(model, optimizer, rank)


def _hook(act: Callable[[Any], object]) -> Callable[[int], None]:
    def script(rank: int) -> None:
        model, optimizer = _wrapped()
        model[0].weight.register_post_accumulate_grad_hook(act)
        _go_on(model, optimizer, rank)

    return script


def _move_gradient(parameter: Any) -> None:
    parameter.main_grad, parameter.grad = parameter.grad, None


def _steps_within(whose: str, zeroes: bool, is_wide: bool, bucket_mb: float) -> Callable[[int], None]:
    """A hook steps an optimizer in the middle of backward, and may drop the gradient."""

    def script(rank: int) -> None:
        torch.manual_seed(4)  # the wide model's first matrix, 320 KB, is big enough to be copied on arrival
        wide = nn.Sequential(nn.Linear(4, 10_000), nn.Tanh(), nn.Linear(10_000, 2)).double()
        model, optimizer = _wrapped(wide if is_wide else None, bucket_mb=bucket_mb)
        own = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

        def hook(parameter: Tensor) -> None:
            {"wrapper": optimizer, "own": optimizer.optimizer, "another": own[parameter]}[whose].step()
            if zeroes:
                parameter.grad = None

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(hook)
        for step in range(3):
            loss_on(model, rank, step).backward()
            if not zeroes:
                optimizer.step()
                optimizer.zero_grad()

    return script


def _mended_drift(rank: int) -> None:
    """As the error says."""
    model, optimizer = _wrapped()
    problems = []
    for step in range(6):
        if step == 2 and rank == 1:
            with torch.no_grad():
                model[0].weight.zero_()
        problems.append(attempt(lambda: _go_on(model, optimizer, rank, 1)))
        if problems[-1]:
            torchring.broadcast_parameters(model)
    assert [bool(problem) for problem in problems].count(True) == 1
    assert "broadcast_parameters" in "".join(problems)
    assert_same_everywhere(model.parameters())


def _nan_that_others_do_not_have(rank: int) -> None:
    """Only rank 0 uses `b`."""
    model, optimizer = _wrapped(nn.ParameterDict({name: nn.Parameter(torch.ones(3)) for name in "ab"}))
    loss = model["a"].sum()
    if rank == 0:
        loss = loss + (model["b"] * float("nan")).sum()
    loss.backward()
    optimizer.step()


def _of_size(value: Callable[[int], float]) -> Callable[[int], None]:
    """Gradients of this size, in fp16."""

    def script(rank: int) -> None:
        model, optimizer = _wrapped(small_model(torch.float32), compression="fp16")
        parameters = list(model.parameters())
        torch.autograd.backward(parameters, [torch.full_like(p, value(rank)) for p in parameters])
        optimizer.step()

    return script


# Parameters that no wrapped optimizer has


class _Fixed(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return self.layer(x)


def _owning(
    layers: range, when: int, change: Callable[[Model], object], prepare: Callable[[Model], object] = lambda model: None
) -> Callable[[int], None]:
    """The wrapped optimizer has some layers. Before the error nothing has stepped by gradients of other layers."""

    def script(rank: int) -> None:
        model = small_model()
        prepare(model)
        own = [p for i in layers for p in model[i].parameters()]
        optimizer = torchring.wrap(torch.optim.SGD(own, lr=0.1), model)
        try:
            _go_on(model, optimizer, rank, when)
            change(model)
            _go_on(model, optimizer, rank, 5 - when)
        finally:
            assert_same_everywhere(own)

    return script


def _assign(model: Model) -> None:
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)


def _new_head(model: Model) -> None:
    model[4] = nn.Linear(3, 2).double()


def _freeze(model: Model) -> None:
    model[4].requires_grad_(False)


def _thaw(model: Model) -> None:
    model[4].requires_grad_(True)


def _fix_first_layer(model: Model) -> None:
    """Gradients of an earlier training, of what is not trained any more."""
    loss_on(model, 0, 0).backward()
    model[0] = _Fixed(model[0])
    model[3].register_module("auxiliary", nn.Linear(2, 2).double())


def _plain_beside(rank: int) -> None:
    model = small_model()
    optimizer = torchring.wrap(torch.optim.SGD(model[:3].parameters(), lr=0.1), model)
    other = momentum(model[4])
    train(Side((rank,), True), model, optimizer, range(5), before_step=lambda step: other.step())


def _experts(rank: int, first: int = 0) -> None:
    """Each rank has a last layer of its own, whose optimizer is wrapped first, or second."""
    model = small_model()
    nn.init.constant_(model[4].weight, rank)  # type: ignore[arg-type]
    parts = [(model[4], {"group": [[0], [1]]}), (model[:4], {})]
    one, other = (torchring.wrap(momentum(parts[i][0]), model, **parts[i][1]) for i in (first, 1 - first))
    assert bool((model[4].weight == rank).all())
    train(Side((rank,), True), model, one, range(3), before_step=lambda step: other.step())


def _add_in_a_closure(rank: int) -> None:
    model, extra = small_model(), nn.Parameter(torch.ones(2, dtype=torch.float64))
    _, optimizer = _wrapped(model)

    def closure() -> Tensor:
        loss = loss_on(model, rank, 0) + (1 + rank) * extra.sum()
        loss.backward()
        optimizer.param_groups[0]["params"].append(extra)
        return loss

    try:
        optimizer.step(closure)
    finally:
        assert extra.tolist() == [1, 1]


# Optimizers that would step in another way on another rank


class _OfItsOwn(torch.optim.SGD):
    """Keeps whatever it likes where others have a dict with a number of steps, from the first step on."""

    def step(self, closure: Any = None) -> None:
        for i, p in enumerate(self.param_groups[0]["params"]):
            self.state[p] = {"step": [1, 2]} if i else torch.ones_like(p)


def _group(of_rank: Callable[[int], dict[str, Any]], kind: Any = torch.optim.AdamW, **options: Any) -> Any:
    def script(rank: int) -> None:
        model = nn.Linear(3, 2)
        optimizer = torchring.wrap(kind(model.parameters(), lr=0.1), model, **options)
        optimizer.param_groups[0] |= of_rank(rank)
        for _ in range(2):
            model(torch.ones(1, 3)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    return script


def _state_on_one_rank(rank: int) -> None:
    model = nn.Linear(3, 2)
    plain = torch.optim.AdamW(model.parameters())
    optimizer = torchring.wrap(plain, model)
    if rank == 0:
        trained = torch.optim.AdamW(other := [p.detach().clone() for p in model.parameters()])
        for p in other:
            p.grad = torch.ones_like(p)
        trained.step()
        optimizer.load_state_dict(trained.state_dict() | {"param_groups": plain.state_dict()["param_groups"]})
    model(torch.ones(1, 3)).sum().backward()


def _another_optimizer(of_rank_1: Callable[[Model], torch.optim.Optimizer]) -> Callable[[int], None]:
    def script(rank: int) -> None:
        model = small_model()
        optimizer = torchring.wrap(of_rank_1(model) if rank == 1 else momentum(model), model)
        _go_on(model, optimizer, rank)

    return script


def _skip_a_closure(rank: int) -> None:
    _, optimizer = _wrapped(on_nonfinite="skip")
    optimizer.step(lambda: 0.0)


def _renormalise(rank: int) -> None:
    model, optimizer = _wrapped(nn.Embedding(8, 3, max_norm=0.1))
    for _ in range(8):
        model(torch.tensor([rank, 2 + rank])).sum().backward()
        optimizer.step()


# Sparse gradients


class _Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 2))

    def forward(self, words: Tensor) -> Tensor:
        return nn.functional.embedding(words, self.weight, sparse=True)


def _look_up(act: Callable[[Any, Optimizer, int], object], table: Any = None, **options: Any) -> Callable[[int], None]:
    """The script looks rows up in a sparse table, and then does something. `act` gets a function that does so, too."""

    def script(rank: int) -> None:
        model = table() if table else nn.Embedding(4, 2, sparse=True)
        _, optimizer = _wrapped(model, **options)

        def backward(factor: float = 1.0) -> None:
            (model(torch.tensor([1, 2])) * factor).sum().backward()

        backward()
        act(backward, optimizer, rank)

    return script


def _sparse_without_model(rank: int) -> None:
    table = nn.Embedding(4, 2, sparse=True)
    torchring.wrap(torch.optim.SGD(table.parameters(), lr=0.1))
    table(torch.tensor([1, 2])).sum().backward()


def _step_with_local(backward: Any, optimizer: Optimizer, rank: int) -> None:
    with optimizer.no_sync():
        backward()
    optimizer.step()


def _tied(is_used: Callable[[int], bool]) -> Callable[[int], None]:
    def script(rank: int) -> None:
        table, head = nn.Embedding(7, 3, sparse=True), nn.Linear(3, 7, bias=False)
        head.weight = table.weight
        _, optimizer = _wrapped(nn.ModuleDict({"table": table, "head": head}))
        rows = table(torch.tensor([1, 2]))
        try:
            (head(rows) if is_used(rank) else rows).sum().backward()
        finally:
            assert "GradientError" in attempt(optimizer.step)

    return script


def _reshape_a_buffer(is_late: bool) -> Callable[[int], None]:
    """On rank 1, before backward(), or between it and step()."""

    def script(rank: int) -> None:
        model = nn.Linear(3, 2)
        model.register_buffer("average", torch.zeros(2))
        _, optimizer = _wrapped(model, sync_buffers={"average": "mean"})
        for change in (is_late, not is_late, False):
            model(torch.ones(1, 3)).sum().backward()
            if change and rank == 1:
                model.average = torch.zeros(3)
            optimizer.step()

    return script


def _synchronize_in_join(rank: int) -> None:
    _, optimizer = _wrapped()
    with torchring.join(optimizer):
        optimizer.sync_buffers()


def _synchronize_without_model(rank: int) -> None:
    torchring.wrap(momentum(small_model())).sync_buffers()


_SAME: Final = ""  # nothing is refused
_CHANGED: Final = "0.weight was changed between its accumulation and its reduction; a hook that"
_TIED: Final = r"table\.weight .*sparse=True but has a dense gradient.*sparse=False"
_SUMMED: Final = r".*gradient of weight, .*summed over ranks before.*zero_grad\(\)"
_REPLACED: Final = "is not a parameter of the model any more"
_NOBODY: Final = "get gradients that nobody reduces"
_CANNOT: Final = "^PlanMismatchError: rank 1 cannot exchange"
_BUFFER: Final = r"buffer average of the model was float32 \(2,\) in torchring.wrap, and on rank 1 it is float32 \(3,\)"
_STEPS: Final = [
    (whose, zeroes, wide, size)
    for whose, zeroes in (("wrapper", False), *((whose, zeroes) for whose in ("own", "another") for zeroes in (0, 1)))
    for wide, size in ((False, TINY_MB), (False, 25.0), (True, 25.0))
]

# By name: what a rank does, and its error, a GradientError where nothing else is said; or one error for each rank.
REFUSED: Final[dict[str, tuple[Callable[[int], object], str | tuple[str, str]]]] = {
    # Hooks, threads, parameters in another place
    "a hook replaces a gradient": (_hook(lambda p: setattr(p, "grad", p.grad * 2)), _CHANGED),
    "a hook moves gradients": (_hook(_move_gradient), r"moves .grad elsewhere \(to main_grad\)"),
    **{
        f"a step within backward {how}": (_steps_within(*how), r"(\d\.(weight|bias)|inside backward)") for how in _STEPS
    },
    "reentrant checkpoints, collected": (_collect, _SAME),
    "two threads": (_two_threads, "two threads run backward.. at the same time"),
    "exchanged": (_then(_exchange_parameters), "on_conversion.True.. close.. this optimizer and call"),
    "the model is converted": (_convert, r"is not what it was when it was wrapped \(it"),
    "a group past the wrapper": (_then(_add_a_group), r"group1.param0 of the wrapped optimizer, shape \(2, 2\),"),
    "replaced past the wrapper": (_then(_replace_a_layer), r"group0.param2 of the wrapped optimizer, shape \(3, 7\),"),
    "taken out": (_then(lambda m, it, _: it.optimizer.param_groups[0]["params"].pop(2)), "2.weight was taken out"),
    "in another order": (_then(_reorder), _SAME),
    "added in a closure": (_add_in_a_closure, "came there past torchring"),
    "unfrozen on one rank": (_unfreeze_on_one_rank, "^(GradientError|PlanMismatchError|PeerTimeoutError):"),
    "drift is mended": (_mended_drift, _SAME),
    # Values
    "NaN that others do not have": (_nan_that_others_do_not_have, "gradient of b .*rank 0"),
    "too large": (_of_size(lambda r: 1e7**r), "fp16 came from rank 1. fp16 ends at 65504; compression='bf16'"),
    "too large together": (_of_size(lambda r: 1e5), "fit fp16"),
    # Parameters that no wrapped optimizer has
    "a plain optimizer": (_plain_beside, f"4.weight, 4.bias {_NOBODY}: each rank would train alone what its SGD"),
    "experts": (_experts, _SAME),
    "experts last": (
        functools.partial(_experts, first=1),
        "^ValueError: 4.weight was copied to ranks 0, 1 with .* fewer",
    ),
    "assigned early": (_owning(range(5), 0, _assign), _REPLACED),
    "assigned": (_owning(range(5), 1, _assign), _REPLACED),
    "a new head": (_owning(range(5), 0, _new_head), f"4.weight .*{_REPLACED}, and 4.weight, 4.bias {_NOBODY}"),
    "a layer is added": (_owning(range(5), 2, _add_a_layer), f"5.weight, 5.bias {_NOBODY}, because no optimizer has"),
    "parametrized": (_owning(range(5), 2, lambda m: parametrizations.weight_norm(m[2])), _REPLACED),
    "unfrozen": (_owning(range(3), 3, _thaw, _freeze), "because no optimizer has what was added .* or unfrozen"),
    "trained earlier": (_owning(range(2, 5), 1, lambda m: delattr(m[3], "auxiliary"), _fix_first_layer), _SAME),
    # Optimizers that step in another way
    "lr": (_group(lambda r: {"lr": 0.1 + 0.1 * r}), "lr of param_groups.0. is 0.2 on rank 1, 0.1 on rank 0, so"),
    "weight_decay": (_group(lambda r: {"weight_decay": 0.1 * r}), "weight_decay of .* is 0.1 on rank 1, 0.0 on rank 0"),
    "state": (_state_on_one_rank, "step of .* is 0.0 on rank 1, 1.0 on rank 0.*broadcast_optimizer_state"),
    "another class": (
        _another_optimizer(lambda m: torch.optim.AdamW(m.parameters())),
        "^KeyError: 'betas'|^PeerLostError: rank 1",
    ),
    "other groups": (
        _another_optimizer(lambda m: torch.optim.SGD([{"params": [p]} for p in m.parameters()])),
        "^.*different number of parameter groups",
    ),
    "a closure that may be skipped": (_skip_a_closure, "^ValueError: .* does not work with on_nonfinite='skip'"),
    "names of groups": (_group(lambda r: {"name": f"of rank {r}"}), _SAME),
    "lr in a tensor": (_group(lambda r: {"lr": torch.tensor(0.1)}), _SAME),
    "state of any kind": (_group(lambda r: {}, _OfItsOwn), _SAME),
    **({"sharded": (_group(lambda r: {}, shard=True), _SAME)} if CAN_SWAP else {}),
    "max_norm": (_renormalise, "weight of an Embedding with max_norm.*Leave max_norm out"),
    # Sparse gradients, and buffers
    "sparse, functional": (_look_up(lambda *_: None, _Table), "those of nn.Embedding and nn.EmbeddingBag in the model"),
    "sparse, no model": (_sparse_without_model, "Pass the model, or compute with sparse=False"),
    "sparse, summed twice": (_look_up(lambda backward, *_: backward(), op="sum"), _SUMMED),
    "sparse, local": (_look_up(_step_with_local), "weight holds local contributions"),
    "tied": (_tied(lambda r: True), _TIED),
    "tied on rank 1": (_tied(lambda r: r == 1), (f"^.*Error: .*rank 1.*{_TIED}", _TIED)),
    "buffers in join": (_synchronize_in_join, r"^ValueError: .*sync_buffers\(\) .*inside torchring.join\(\)"),
    "buffers, no model": (_synchronize_without_model, "^ValueError: sync_buffers.. .* equal; pass the model"),
    "a buffer gets another shape": (_reshape_a_buffer(False), (f"{_CANNOT} its buffers: .*{_BUFFER}", _BUFFER)),
    "it does, late": (_reshape_a_buffer(True), (f"{_CANNOT} its buffers: .*{_BUFFER}", _BUFFER)),
}


@ranks(2, run_ranks)
def test_what_is_refused_has_its_error_on_every_rank(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "STEPS_BETWEEN_CHECKS", 2)
    faults = {}
    for name, (script, said) in REFUSED.items():
        print(name)  # the last one in the output is the one that hangs
        found = attempt(lambda script=script: script(rank))
        words = said if isinstance(said, str) else said[rank]
        if words and not words.startswith("^"):
            words = f"^GradientError: .*{words}"
        if not re.search(f"(?s){words or '^$'}", found):
            faults[name] = found or "no error"
        torchring.shutdown()
    assert not faults


@ranks(3)
def test_nan_on_one_rank_names_it(rank: int) -> None:
    for value, layer, options in (
        (math.nan, 0, {}),
        (-math.inf, 4, {}),
        (math.nan, 4, {"overlap": "thread"}),
        (-math.inf, 0, {"algorithm": "native"}),
        (math.nan, 0, {"algorithm": "native"}),
        (-math.inf, 4, {"compression": "fp16"}),
        (math.nan, 4, {"compression": "bf16", "algorithm": "native"}),
    ):
        model, optimizer = _wrapped(small_model(torch.float32), bucket_mb=TINY_MB, **options)
        _go_on(model, optimizer, rank, 1)
        optimizer.zero_grad()
        if rank == 2:
            handle = model[layer].weight.register_hook(lambda grad, value=value: torch.full_like(grad, value))
        loss_on(model, rank, 1).backward()
        before = digest(model.parameters())
        with pytest.raises(torchring.GradientError, match=rf"{layer}\.weight .*rank 2") as caught:
            optimizer.step()
        assert digest(model.parameters()) == before
        assert (caught.value.peers, caught.value.parameters) == ((2,), (f"{layer}.weight",))
        if rank == 2:
            handle.remove()
        _go_on(model, optimizer, rank, 2)
        assert_same_everywhere(model.parameters())
        optimizer.close()


@pytest.mark.parametrize("is_mended", [False, True])
@ranks(2)
def test_a_sparse_gradient_that_is_not_finite(is_mended: bool, rank: int) -> None:
    """Backward returns, and a step is refused, until the script mends the gradient or zeroes it."""
    table, optimizer = _wrapped(nn.Embedding(4, 2, sparse=True))
    (table(torch.tensor([1, 2])) * (math.inf if rank == 1 else 1.0)).sum().backward()
    before = table.weight.detach().clone()
    with pytest.raises(torchring.GradientError, match=r"weight is not finite.*rank 1"):
        optimizer.step()
    assert torch.equal(table.weight, before)
    if is_mended:
        table.weight.grad._values().nan_to_num_(0.5, 0.5, 0.5)
    else:
        optimizer.zero_grad()
        table(torch.tensor([1, 2])).sum().backward()
    optimizer.step()  # it was that reduction's
    assert (table.weight != before).any(dim=1).tolist() == [False, True, True, False]
    assert_same_everywhere([table.weight])
