"""LARS and LAMB against their papers' formulas in fp64, alone, wrapped and sharded."""

import copy
import pickle
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tests.support.checks import assert_bitwise
from tests.support.training import Side, assert_as_one_process, small_model, train, values
from torchring.recipes import LAMB, LARS

# The last one is 0, and so is the last but one's gradient.
_SHAPES: list[tuple[int, ...]] = [(7, 5), (4, 3, 3), (6,), (), (0, 3), (9, 2), (3, 3)]
_RATES = [0.5, 0.5, 2.0, 1.0, 0.25]  # of each step
_NUM_STEPS = len(_RATES)
_DECAY = 0.1


def _parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    torch.manual_seed(0)
    values = [torch.randn(shape) for shape in _SHAPES]
    values[-1].zero_()
    return [nn.Parameter(value.to(dtype)) for value in values]


def _gradients(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    gradients = [torch.randn(shape, generator=generator) for shape in _SHAPES]
    gradients[-2].zero_()
    return gradients


def _train(optimizer: Optimizer, parameters: list[nn.Parameter], steps: Iterable[int] = range(_NUM_STEPS)) -> None:
    for step in steps:
        for p, gradient in zip(parameters, _gradients(step), strict=True):
            p.grad = gradient.to(p.dtype)
        for group in optimizer.param_groups:
            group["lr"] = torch.full_like(lr, _RATES[step]) if isinstance(lr := group["lr"], Tensor) else _RATES[step]
        optimizer.step()
        for p, gradient in zip(parameters, _gradients(step), strict=True):
            assert_bitwise(p.grad, gradient.to(p.dtype))  # not touched


def _lars(momentum: float, nesterov: bool, excluded: Callable[[Tensor], bool], eta: float = 0.02) -> list[Tensor]:
    """The paper's algorithm 1, whose v has the learning rate as a factor, and Goyal et al., equation 10, for the v of a
    learning rate that changes."""
    results = []
    for i, p in enumerate(_parameters()):
        w, v = p.detach().double(), torch.zeros(p.shape, dtype=torch.float64)
        for step in range(_NUM_STEPS):
            g = _gradients(step)[i].double()
            local, decay = 1.0, 0.0
            if not excluded(w):
                decay = _DECAY
                if w.norm() > 0 and g.norm() > 0:
                    local = float(eta * w.norm() / (g.norm() + decay * w.norm()))
            move = _RATES[step] * local * (g + decay * w)
            v = momentum * _RATES[step] / _RATES[max(0, step - 1)] * v + move
            w = w - (move + momentum * v if nesterov else v)
        results.append(w)
    return results


def _lamb(bias_correction: bool, excluded: Callable[[Tensor], bool], eps: float = 1e-6) -> list[Tensor]:
    """The paper's algorithm 2."""
    results = []
    for i, p in enumerate(_parameters()):
        x = p.detach().double()
        m = v = torch.zeros_like(x)
        for step in range(_NUM_STEPS):
            g = _gradients(step)[i].double()
            m = 0.8 * m + 0.2 * g
            v = 0.9 * v + 0.1 * g**2
            by_m, by_v = (1 - 0.8 ** (step + 1), 1 - 0.9 ** (step + 1)) if bias_correction else (1.0, 1.0)
            u = m / by_m / ((v / by_v).sqrt() + eps)
            ratio = 1.0
            if not excluded(x):
                u = u + _DECAY * x
                if x.norm() > 0 and u.norm() > 0:
                    ratio = float(x.norm() / u.norm())
            x = x - _RATES[step] * ratio * u
        results.append(x)
    return results


def _optimizers(lr: float | Tensor = 0.5, **options: Any) -> list[tuple[Callable[[Any], Optimizer], list[Tensor]]]:
    """How to make an optimizer, and what it should come to."""
    found: list[tuple[Callable[[Any], Optimizer], list[Tensor]]] = []
    options |= {"lr": lr, "weight_decay": _DECAY}
    excludes: dict[Any, Callable[[Tensor], bool]] = {"1d": _is_1d, True: lambda w: True, False: lambda w: False}
    for momentum, nesterov, exclude in (
        *((0.0, False, "1d"), (0.9, False, "1d"), (0.9, True, "1d"), (0.9, False, True), (0.9, True, False)),
    ):
        chosen = {"momentum": momentum, "nesterov": nesterov, "exclude": exclude, "trust_coefficient": 0.02}
        found.append((partial(LARS, **chosen, **options), _lars(momentum, nesterov, excludes[exclude])))
    for bias_correction, exclude in ((True, "1d"), (False, "1d"), (True, False), (True, True)):
        chosen = {"bias_correction": bias_correction, "exclude": exclude, "betas": (0.8, 0.9)}
        found.append((partial(LAMB, **chosen, **options), _lamb(bias_correction, excludes[exclude])))
    return found


def _is_1d(w: Tensor) -> bool:
    return w.ndim <= 1


@pytest.mark.parametrize("foreach", [False, True])
def test_as_in_the_papers(foreach: bool) -> None:
    for make, expected in _optimizers(foreach=foreach):
        _assert_comes_to(expected, make)
    wrong = partial(LARS, lr=0.5, trust_coefficient=0.021, weight_decay=_DECAY, foreach=foreach)
    with pytest.raises(AssertionError):
        _assert_comes_to(_lars(0.9, False, _is_1d), wrong)


def _assert_comes_to(expected: list[Tensor], make: Callable[[Any], Optimizer]) -> None:
    parameters = _parameters()
    _train(make(parameters), parameters)
    torch.testing.assert_close([p.detach().double() for p in parameters], expected, rtol=2e-5, atol=2e-6)


def test_foreach_and_one_by_one_have_the_same_bits() -> None:
    """Also with mixed dtypes. With a tensor as learning rate, there is one rounding more."""
    for (one, _), (together, _), (with_tensor, _) in zip(
        _optimizers(foreach=False), _optimizers(foreach=True), _optimizers(lr=torch.tensor([0.5])), strict=True
    ):
        results = []
        for make in (one, together, with_tensor):
            parameters = [*_parameters(), *_parameters(torch.bfloat16), *_parameters(torch.float64)]
            optimizer = make(parameters)
            for part in range(3):
                _train(optimizer, parameters[part * len(_SHAPES) : (part + 1) * len(_SHAPES)])
                for p in parameters:
                    p.grad = None
            results.append(parameters)
        for first, second, third in zip(*results, strict=True):
            assert_bitwise(second.detach(), first.detach())
            torch.testing.assert_close(third, first)


def test_groups_state_dict_deepcopy_and_pickling() -> None:
    for kind in (LARS, LAMB):
        parameters = _parameters()
        first, second = {"exclude": True}, {"weight_decay": 0.3, "exclude": False}
        optimizer = kind([{"params": parameters[:2], **first}, {"params": parameters[2:], **second}], lr=0.1)
        groups = [(group["exclude"], group["weight_decay"]) for group in optimizer.param_groups]
        assert groups == [(True, 0.0), (False, 0.3)]
        _train(optimizer, parameters, range(2))
        twins = copy.deepcopy((optimizer, parameters)), pickle.loads(pickle.dumps((optimizer, parameters)))
        loaded = [nn.Parameter(p.detach().clone()) for p in parameters]
        resumed = kind([{"params": loaded[:2]}, {"params": loaded[2:]}], lr=7.0)  # type: ignore[arg-type]
        resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        _train(optimizer, parameters, range(2, _NUM_STEPS))
        for other, its in (*twins, (resumed, loaded)):
            _train(other, its, range(2, _NUM_STEPS))
            assert all(map(torch.equal, parameters, its))


def test_closures_and_parameters_without_gradient() -> None:
    for kind in (LARS, LAMB):
        p, unused = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2, 2))
        optimizer = kind([p, unused], lr=0.1)

        def closure(p: Tensor = p) -> Tensor:
            loss = p.square().sum()
            loss.backward()
            return loss

        assert optimizer.step(closure) == 4.0
        assert (p < 1).all()
        assert (unused == 1).all()
        assert unused not in optimizer.state


def test_steps_read_nothing_from_the_device() -> None:
    """On the device "meta", a value that the CPU needs is an error."""
    for make in (
        lambda p: LARS(p, 0.5, weight_decay=0.1, nesterov=True),
        lambda p: LAMB(p, 0.5, weight_decay=0.1),
        lambda p: LAMB(p, 0.5, foreach=False),
    ):
        parameters = [nn.Parameter(torch.empty(shape, device="meta")) for shape in _SHAPES]
        optimizer = make(parameters)
        for lr in (0.5, torch.tensor(0.5, device="meta")):
            optimizer.param_groups[0]["lr"] = lr
            for p in parameters:
                p.grad = torch.empty_like(p)
            optimizer.step()


def test_options_that_make_no_sense() -> None:
    for make, text in (
        (lambda p: LARS(p, -0.1), "lr must be 0 or more, got -0.1"),
        (lambda p: LAMB(p, float("nan")), "lr must be 0 or more, got nan"),
        (lambda p: LAMB(p, torch.ones(2)), "tensor of one element, got 2"),
        (lambda p: LARS(p, 1, momentum=1.0), "momentum must be at least 0 and less than 1, got 1.0"),
        (lambda p: LARS(p, 1, momentum=0.0, nesterov=True), "nesterov=True needs a momentum"),
        (lambda p: LAMB(p, betas=(0.9, 1.0)), r"betas\[1\] must be at least 0 and less than 1, got 1.0"),
        (lambda p: LAMB([{"params": p, "weight_decay": -1}]), "weight_decay must be 0 or more, got -1"),
        (lambda p: LARS(p, 1, exclude="2d"), "exclude must be '1d', True or False, got '2d'"),
    ):
        with pytest.raises(ValueError, match=text):
            make([nn.Parameter(torch.ones(2, 2))])


def test_sparse_and_complex_gradients_are_refused() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ValueError, match=r"LARS takes no sparse gradients.* shape \(4, 2\)"):
        LARS(table.parameters(), 1.0).step()
    p = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    p.grad = torch.ones_like(p)
    with pytest.raises(ValueError, match="LAMB takes no complex gradients"):
        LAMB([p]).step()


_MAKERS: list[tuple[Callable[[Any], Optimizer], int]] = [  # and how many tensors of state a parameter has
    (lambda p: LARS(p, 2.0, weight_decay=0.01), 1),
    (lambda p: LAMB(p, 0.05, weight_decay=0.01), 2),
    (lambda p: LAMB([{"params": list(p), "exclude": False}], 0.05, foreach=True), 2),
]


def _layerwise(side: Side, i: int, shard: bool) -> list[Tensor]:
    make, num_tensors = _MAKERS[i]
    net = small_model(torch.float32)
    optimizer = side.wrap(make(net.parameters()), net, shard=shard)
    train(side, net, optimizer, range(3))
    if side.is_wrapped:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict(all_ranks=True)))
    train(side, net, optimizer, range(3, 6))
    state = [t for e in optimizer.state.values() for t in e.values() if isinstance(t, Tensor) and t.numel() > 1]
    num_elements = sum(p.numel() for p in net.parameters()) * num_tensors
    assert (sum(t.numel() for t in state) < num_elements) is (shard and side.is_wrapped)
    return values(net)


@pytest.mark.parametrize("i", range(len(_MAKERS)))
def test_wrapped_and_sharded(i: int) -> None:
    """As one process that has all data; and sharded, to the last bit as not sharded."""
    plain, sharded = (assert_as_one_process(_layerwise, i, shard, tolerance=1e-4)[0] for shard in (False, True))
    assert all(map(torch.equal, plain, sharded))
