"""Finds options, parameters and models that cannot be reduced, in `wrap` and before a step. Errors say what to do."""

from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Final, Literal, NoReturn, cast, get_args

import torch
from torch.optim import Optimizer

from torchring.accelerators import accelerator_of
from torchring.allreduce.select import ALGORITHMS, OVERLAPS
from torchring.errors import GradientError, with_way_out
from torchring.gradients.hooks import is_compiled_backward
from torchring.gradients.layout import Options
from torchring.gradients.packing import is_finite
from torchring.gradients.reduction import NonFiniteGradient
from torchring.gradients.views import local_of
from torchring.rooms import room

GradientOp = Literal["mean", "sum"]
OnNonfinite = Literal["raise", "skip", "ignore"]


def check_options(options: Options, model: torch.nn.Module | None) -> None:
    """Raise ValueError for an option that does not exist. The error lists the options that do."""
    for name, value, choices in (
        ("op", options.op, get_args(GradientOp)),
        ("algorithm", options.algorithm, ALGORITHMS),
        ("overlap", options.overlap, OVERLAPS),
        ("on_nonfinite", options.on_nonfinite, get_args(OnNonfinite)),
    ):
        if value not in choices:
            raise ValueError(f"{name} must be one of {', '.join(map(repr, choices))}, got {value!r}")
    bucket_mb = 0 if options.bucket_mb is None else options.bucket_mb
    if not isinstance(bucket_mb, (int, float)) or not 0 <= bucket_mb < float("inf"):
        raise ValueError(f"bucket_mb must be a size in MiB, 0 or more, got {options.bucket_mb!r}")
    if not isinstance(options.shard, bool):
        raise ValueError(f"shard must be True or False, got {options.shard!r}")
    if options.sync_buffers not in ("mean", None):
        room("buffers").check_choices(options.sync_buffers, model)
    if options.scheme is not None:
        options.scheme.check(options)
    elif options.max_error is not None:
        raise ValueError("max_error takes a compression that checks itself, such as 'int8'")
    if not isinstance(options.noise_scale, bool):
        raise ValueError(f"noise_scale must be True or False, got {options.noise_scale!r}")
    if not isinstance(options.accumulate, int) or options.accumulate < 1:
        raise ValueError(f"accumulate must be a whole number of micro-steps, 1 or more, got {options.accumulate!r}")


def named_parameters(optimizer: Optimizer, model: torch.nn.Module | None) -> dict[torch.nn.Parameter, str]:
    """The optimizer's parameters, in its order, with the model's names for them.

    Raises TypeError or ValueError that names a parameter which cannot be reduced.
    """
    if not isinstance(optimizer, Optimizer):
        kind = type(optimizer).__name__
        raise TypeError(f"wrap(optimizer, model): the optimizer comes first, a torch.optim.Optimizer, got {kind}")
    if model is not None and not isinstance(model, torch.nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {type(model).__name__}")
    if model is not None:
        room("module wrappers").check_model(model)
    of_model = {p: name for name, p in model.named_parameters()} if model is not None else {}
    names: dict[torch.nn.Parameter, str] = {}
    for g, group in enumerate(optimizer.param_groups):
        for i, parameter in enumerate(group["params"]):
            position = f"group{g}.param{i}"
            if not isinstance(parameter, torch.Tensor):
                raise TypeError(f"{position} of the optimizer is a {type(parameter).__name__}, not a tensor")
            parameter = cast(torch.nn.Parameter, parameter)
            name = of_model.get(parameter, position)
            if not parameter.is_leaf:
                raise ValueError(f"{name} is the result of a computation (non-leaf), so it gets no gradient to reduce")
            if (grad_dtype := getattr(parameter, "grad_dtype", parameter.dtype)) != parameter.dtype:
                raise ValueError(
                    f"{name} is {parameter.dtype} and has grad_dtype={grad_dtype}; torchring reduces gradients in the "
                    "dtype of their parameter. Set grad_dtype to that"
                )
            if parameter in names:
                raise ValueError(f"{name} is in the optimizer twice (again at {position}); it would be stepped twice")
            if model is not None and parameter not in of_model:
                raise ValueError(
                    f"{position} of the optimizer, shape {tuple(parameter.shape)}, is not a parameter of the model; "
                    "pass the model that the optimizer trains. If a loss has parameters of its own, pass "
                    "torch.nn.ModuleList([model, loss])"
                )
            if isinstance(parameter, torch.nn.parameter.UninitializedParameter):
                raise ValueError(f"{name} has no shape yet; run a batch through the lazy module before wrapping")
            if parameter.device.type != "cpu" and accelerator_of(parameter.device) is None:
                raise ValueError(f"{name} is on {parameter.device}; gradients on the CPU or on CUDA can be reduced")
            first = next(iter(names), parameter)
            if parameter.device != first.device:
                raise ValueError(
                    f"{name} is on {parameter.device}, {names[first]} on {first.device}; one optimizer reduces "
                    "parameters of one device: give every rank a GPU of its own, or every device an optimizer"
                )
            names[local_of(parameter)] = name
    if not any(parameter.requires_grad for parameter in names):
        raise ValueError("none of the optimizer's parameters requires a gradient, so there is nothing to reduce")
    return names


def sparse_parameters(modules: Iterable[torch.nn.Module]) -> set[torch.nn.Parameter]:
    """The weights of layers built with sparse=True, whose gradients come as sparse tensors."""
    layers = (torch.nn.Embedding, torch.nn.EmbeddingBag)
    return {local_of(m.weight) for m in modules if isinstance(m, layers) and m.sparse}


def parameters_of(optimizer: Optimizer) -> Iterator[torch.nn.Parameter]:
    """The optimizer's parameters, in the order of its groups."""
    return map(local_of, chain.from_iterable(group["params"] for group in optimizer.param_groups))


def refuse_part_of_state(optimizer: Optimizer) -> None:
    """Raise ValueError if the optimizer has state that an earlier `wrap(..., shard=True)` has left."""
    own = set(parameters_of(optimizer))
    if any(isinstance(key, torch.Tensor) and key not in own for key in optimizer.state):
        raise ValueError(PART_OF_STATE)


PART_OF_STATE: Final = (
    "this optimizer has the state of a part of the parameters only, as torchring.wrap(..., shard=True) has left it; "
    "call its load_state_dict() with what state_dict() of the wrapped optimizer returned before close(), or build a "
    "new optimizer"
)


def is_finite_gradient(parameter: torch.nn.Parameter) -> bool:
    """Whether `.grad` has no NaN and no infinity, or is None. Reads all of it."""
    grad = parameter.grad
    if grad is None:
        return True
    values = grad.coalesce().values() if grad.is_sparse else grad
    return is_finite(torch.view_as_real(values) if values.is_complex() else values)


def refuse_backward(failure: BaseException | None, *, is_captured: bool, reduces: bool) -> None:
    """Raise GradientError if the backward that begins now could not be reduced right."""
    if failure is not None:
        text = str(failure) or type(failure).__name__
        raise GradientError(with_way_out(f"an earlier backward failed: {text}")) from failure
    if is_compiled_backward():
        raise GradientError(
            "compiled autograd runs this backward() and does not say when it ends, so gradients would never be "
            "reduced. Set torch._dynamo.config.compiled_autograd = False; torch.compile works without it"
        )
    if reduces and torch.is_grad_enabled():
        raise GradientError(
            "backward(create_graph=True) leaves a graph on the gradients that averaging would cut. Run it inside "
            "optimizer.no_sync(), and call optimizer.synchronize() afterwards; or take inner gradients with "
            "torch.autograd.grad(..., create_graph=True), and call backward() for the outer loss"
        )
    if is_captured:
        raise GradientError(
            "backward() is being captured into a CUDA graph, whose replays would reduce without torchring's "
            "checks and bookkeeping. Capture the model with torch.cuda.make_graphed_callables, whose gradients "
            "arrive outside the graph, or capture nothing but the forward pass"
        )


def refuse_thawed(name: str, rank: int) -> NoReturn:
    raise GradientError(
        f"{name} was frozen and has a gradient now that has never been reduced; call optimizer.synchronize() before "
        "step()",
        rank=rank,
        parameters=(name,),
    )


def refuse_unsettled(name: str, state: str, *, are_hooked: bool, rank: int, step: int) -> NoReturn:
    """A step would use a gradient that is not reduced. `are_hooked`: the parameters have torchring's hooks."""
    advice = "Call optimizer.synchronize() before step() to reduce what is local"
    if not are_hooked:
        state = "is this rank's own"
        advice = (
            "torchring's hooks are gone: parameters were exchanged, as load_state_dict() does after "
            "torch.__future__.set_swap_module_params_on_conversion(True). close() this optimizer and call "
            "torchring.wrap() again, on all ranks"
        )
    text = f"the gradient of {name} {state}; stepping on it would let the ranks drift apart. {advice}"
    raise GradientError(text, rank=rank, parameters=(name,), step=step)


def refuse_non_finite(found: NonFiniteGradient, compression: str | None, *, rank: int, step: int) -> NoReturn:
    text = f"the gradient of {found.name} is not finite; {found.origin(compression)}"
    peers = () if found.rank is None else (found.rank,)
    raise GradientError(text, rank=rank, peers=peers, parameters=(found.name,), step=step)
