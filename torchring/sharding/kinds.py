"""How an optimizer can be cut: anywhere, parameter by parameter, or not at all."""

from __future__ import annotations

import copy
import enum
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any, Final

import torch
from torch.optim import Optimizer

_ELEMENT_WISE: Final = frozenset(
    (
        torch.optim.SGD,
        torch.optim.Adam,
        torch.optim.AdamW,
        torch.optim.Adamax,
        torch.optim.RAdam,
        torch.optim.NAdam,
        torch.optim.Adagrad,
        torch.optim.Adadelta,
        torch.optim.RMSprop,
        torch.optim.Rprop,
        torch.optim.ASGD,
    )
)
SCALARS: Final = frozenset(("step", "mu_product", "eta", "mu"))
"""Names of what these optimizers keep once for each parameter. All else that they keep has the parameter's shape."""
HOOKS: Final = tuple(
    f"_optimizer_{when}_hooks"
    for when in (
        *("step_pre", "step_post", "state_dict_pre", "state_dict_post"),
        *("load_state_dict_pre", "load_state_dict_post"),
    )
)
_MOST_TRIED: Final = 3  # parameters
_TRIED_LENGTH: Final = 4  # of each dimension, at most
_NUM_STEPS: Final = 2


class Kind(enum.Enum):
    """What the optimizer needs to see of a parameter."""

    ELEMENTS = "any slice of it"
    WHOLE = "all of it"


def kind_of(optimizer: Optimizer) -> Kind:
    """Find out how `optimizer` can be cut. Raises ValueError, with the reason, if it cannot."""
    name = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "shard=True does not work with LBFGS, whose step looks at all parameters together and evaluates a closure; "
            "leave shard out"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ValueError(f"shard=True does not work with {name}(differentiable=True): a step would leave no graph")
    if type(optimizer) in _ELEMENT_WISE:
        return Kind.ELEMENTS
    module = type(optimizer).__module__
    if not module.startswith("torch.optim") and (reason := _why_together(optimizer)):
        raise ValueError(f"shard=True does not work with {name}: {reason}. Leave shard out")
    return Kind.WHOLE


def cost_of(parameter: torch.Tensor, group: dict[str, Any], optimizer: Optimizer) -> float:
    """The cost of one parameter's step: floating-point operations for Newton-Schulz, else a number of elements."""
    if type(optimizer).__name__ != "Muon" or parameter.dim() != 2:
        return float(parameter.numel())
    few, many = sorted(parameter.shape)
    return float(group.get("ns_steps", 5)) * (4.0 * few * few * many + 2.0 * few**3)


def _why_together(optimizer: Optimizer) -> str:
    """Why parameters cannot be stepped on different ranks; "" if they can.

    Steps a few tiny parameters together and each by itself, with the optimizer's own code and hyperparameters, and
    compares bit by bit. A norm over all parameters, or an estimate that all share (Prodigy), makes a difference.
    """
    if any(not isinstance(key, torch.Tensor) for key in optimizer.state):
        return "its state has entries that belong to no parameter"
    groups = [(index, p) for index, group in enumerate(optimizer.param_groups) for p in group["params"]]
    trained = [(index, p) for index, p in groups if p.requires_grad][:_MOST_TRIED]
    shapes = [(index, [min(n, _TRIED_LENGTH + i) for n in p.shape], p.data) for i, (index, p) in enumerate(trained)]
    if len(shapes) == 1:
        shapes = shapes * 2
    try:
        with torch.random.fork_rng(devices=[p.device.index for _, p in trained[:1] if p.is_cuda]):
            everything = _try_steps(optimizer, shapes, range(len(shapes)))
            for alone in range(len(shapes)):
                parameters, groups_after = _try_steps(optimizer, shapes, [alone])
                index = shapes[alone][0]
                if not torch.equal(parameters[0], everything[0][alone]) or groups_after[index] != everything[1][index]:
                    return "a parameter's step depends on other parameters, which another rank would step"
    except Exception as error:
        return f"it cannot step some of its parameters alone ({type(error).__name__}: {error})"
    return ""


def _try_steps(
    optimizer: Optimizer, shapes: Sequence[tuple[int, Sequence[int], torch.Tensor]], chosen: Sequence[int]
) -> tuple[list[torch.Tensor], list[dict[str, str]]]:
    """Step these of the tiny parameters with a trial optimizer. Returns them, and the plain values of its groups."""
    trial: Any = object.__new__(type(optimizer))
    trial.__dict__.update(optimizer.__dict__)
    trial.__dict__.update({name: OrderedDict() for name in HOOKS})
    trial.state = defaultdict(dict)
    trial.param_groups = [
        {**copy.deepcopy({key: value for key, value in group.items() if key != "params"}), "params": []}
        for group in optimizer.param_groups
    ]
    parameters = []
    for number in chosen:
        index, shape, like = shapes[number]
        generator = torch.Generator("cpu").manual_seed(number)  # not torch's own, whose seeding reaches all devices
        values, gradient = torch.randn(2, *shape, generator=generator, device="cpu").to(like)
        parameter = torch.nn.Parameter(values)
        parameter.grad = 1e3 * gradient
        trial.param_groups[index]["params"].append(parameter)
        parameters.append(parameter)
    for _ in range(_NUM_STEPS):
        type(optimizer).step(trial)  # not the step that a scheduler has put into the instance
    plain = [
        {key: repr(value) for key, value in group.items() if key != "params" and not isinstance(value, list)}
        for group in trial.param_groups
    ]
    return [parameter.detach() for parameter in parameters], plain
