"""How an optimizer can be cut: anywhere, parameter by parameter, or not at all."""

import copy
import enum
from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from typing import Any, Final, TypeAlias

import torch
from torch.optim import Optimizer

from torchring.gradients.views import local_of

_ELEMENT_WISE: Final = (
    "SGD", "Adam", "AdamW", "Adamax", "RAdam", "NAdam", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD",
)  # fmt: skip
_SCALARS: Final = frozenset(("step", "mu_product", "eta", "mu"))
"""Names of what these optimizers keep once for each parameter. All else that they keep has the parameter's shape."""
_Tried: TypeAlias = tuple[int, Sequence[int], torch.Tensor]  # the group, the tiny shape, a parameter like it
_MOST_TRIED: Final = 3  # parameters of a group
_TRIED_LENGTH: Final = 4  # of each dimension, at most
_NUM_STEPS: Final = 20
_SCALES: Final = (1e-3, 1.0, 1e3)  # of gradients


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
    if any(type(optimizer) is getattr(torch.optim, each) for each in _ELEMENT_WISE):
        return Kind.ELEMENTS
    if any(local_of(p) is not p for group in optimizer.param_groups for p in group["params"]):
        raise ValueError(
            f"shard=True does not work with {name} and DTensors, of which ranks have parts; leave shard out"
        )
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


def is_scalar(key: str, value: Any) -> bool:
    """Whether an optimizer that steps elements keeps this once for each tensor, and not for each element."""
    return key in _SCALARS or not isinstance(value, torch.Tensor)


def _why_together(optimizer: Optimizer) -> str:
    """Why parameters cannot be stepped on different ranks; "" if they can.

    Steps a few tiny parameters of each group together and each by itself, with the optimizer's own code and
    hyperparameters, and compares bit by bit. A norm over all parameters, or an estimate that all share (Prodigy), makes
    a difference. Gradients are small, ordinary and large: a clip acts on large ones only, and a decay is lost beside
    them. In the first half of the steps they stay the same, from which estimates grow (SWATS); then they differ, as
    a common factor of equal ones cancels in Adam.
    """
    if any(not isinstance(key, torch.Tensor) for key in optimizer.state):
        return "its state has entries that belong to no parameter"
    tried: list[_Tried] = []
    for index, group in enumerate(optimizer.param_groups):
        trained = [p for p in group["params"] if p.requires_grad][:_MOST_TRIED]
        for number, p in enumerate(trained * 2 if len(trained) == 1 else trained):
            tried.append((index, [min(n, _TRIED_LENGTH + number) for n in p.shape], p.data))
    devices = [tried[0][2].device.index] if tried and tried[0][2].is_cuda else []
    with torch.random.fork_rng(devices=devices):
        for scale in _SCALES:
            try:
                everything = _try_steps(optimizer, tried, range(len(tried)), scale)
            except Exception as error:
                return (
                    f"a step of tiny parameters raised {type(error).__name__}: {error}. If it has modes, as "
                    "Schedule-Free has, call its train() before torchring.wrap()"
                )
            for alone in range(len(tried)):
                try:
                    (parameter,) = _try_steps(optimizer, tried, [alone], scale)
                except Exception as error:
                    return f"it cannot step some of its parameters alone ({type(error).__name__}: {error})"
                if not torch.allclose(parameter, everything[alone], rtol=0, atol=0, equal_nan=True):
                    return "a parameter's step depends on other parameters, which another rank would step"
    return ""


def _try_steps(
    optimizer: Optimizer, tried: Sequence[_Tried], chosen: Sequence[int], scale: float
) -> list[torch.Tensor]:
    """Step these of the tiny parameters with a trial optimizer. Returns each after each step."""
    trial: Any = object.__new__(type(optimizer))
    trial.__dict__.update({name: _copied(value) for name, value in vars(optimizer).items()})
    trial.__dict__.update({name: OrderedDict() for name in vars(optimizer) if name.endswith("_hooks")})
    trial.state = defaultdict(dict)
    trial.param_groups = [
        {**copy.deepcopy({key: value for key, value in group.items() if key != "params"}), "params": []}
        for group in optimizer.param_groups
    ]
    for group in trial.param_groups:
        if not isinstance(group.get("lr", 1), torch.Tensor) and group.get("lr", 1) == 0:  # a warm-up begins
            group["lr"] = group.get("initial_lr") or 1e-3
    parameters = []
    for number in chosen:
        index, shape, like = tried[number]
        parameters.append(torch.nn.Parameter(_random(number, shape).to(like)))
        trial.param_groups[index]["params"].append(parameters[-1])
    after: list[list[torch.Tensor]] = [[] for _ in chosen]
    for step in range(1, _NUM_STEPS + 1):
        for number, parameter in zip(chosen, parameters, strict=True):
            seed = len(tried) * (1 + max(0, step - _NUM_STEPS // 2)) + number
            parameter.grad = scale * _random(seed, parameter.shape).to(parameter)
        type(optimizer).step(trial)  # not the step that a scheduler has put into the instance
        for parameter, its in zip(parameters, after, strict=True):
            its.append(parameter.detach().clone())
    return list(map(torch.stack, after))


def _random(seed: int, shape: Sequence[int]) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)  # not torch's own, whose seeding reaches all devices
    return torch.randn(shape, generator=generator, device="cpu")


def _copied(value: Any) -> Any:
    """An attribute for a trial, which must not count on in that of the script."""
    if isinstance(value, (dict, list, set)) or (isinstance(value, torch.Tensor) and value.numel() == 1):
        return copy.copy(value) if not isinstance(value, torch.Tensor) else value.detach().clone()
    return value
