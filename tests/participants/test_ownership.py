"""Who else trains the parameters: DDP and FSDP around them, other optimizers, and a rank on purpose.

DDP or FSDP around a parameter that torchring reduces is an error, whichever came first; around others it is none. For
parameters that no wrapped optimizer has see optimizer/test_mistakes.py.
"""

import gc
import warnings
from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._composable import replicate
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as plain

import torchring
from tests.support.checks import assert_same_everywhere, logged
from tests.support.harness import ranks, run_ranks
from tests.support.training import Side, attempt, loss_on, momentum, small_model, train, values


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def _train(net: nn.Module, optimizer: Any, rank: int, steps: int = 1) -> None:
    train(Side((rank,), True), net, optimizer, range(steps))


def _fsdp(model: nn.Module, use_orig_params: bool) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return FullyShardedDataParallel(model, use_orig_params=use_orig_params, device_id=torch.device("cpu"))


# With a model, and `wrap(*given)`, which wraps an optimizer of it.
Mistake = Callable[[Any, Callable[..., Any], int], object]


def _first(around: Callable[[Any], Any], *, is_given: bool = True) -> Mistake:
    return lambda model, wrap, rank: [around(model), wrap(*([model] if is_given else []))]


def _later(around: Callable[[Any], Any], steps: int = 0) -> Mistake:
    def make(model: Any, wrap: Callable[..., Any], rank: int) -> None:
        optimizer = wrap(model)
        _train(model, optimizer, rank, steps)
        _train(around(model), optimizer, rank)

    return make


def _parameters_thawed_later(model: Any, wrap: Callable[..., Any], rank: int) -> None:
    part = model[4].requires_grad_(False)
    optimizer = wrap(model)
    net = DistributedDataParallel(part.requires_grad_(True))
    _train(nn.Sequential(model[:4], net), optimizer, rank)


def _fsdp_first(use_orig_params: bool) -> Mistake:
    return lambda model, wrap, rank: [net := _fsdp(model, use_orig_params), torchring.wrap(_sgd(net))]


_DDP, _FSDP = DistributedDataParallel, "FullyShardedDataParallel"
_OTHER = "not a parameter of the model any more"
# The mistake, the type of the error, and what it names
_MISTAKES: Final[list[tuple[Mistake, str, str, str]]] = [
    (_first(_DDP), "ValueError", "0.weight", "DistributedDataParallel"),
    (_first(_DDP, is_given=False), "ValueError", "group0.param0", "DistributedDataParallel"),
    (lambda model, wrap, rank: wrap(_DDP(model)), "ValueError", "the model", "DistributedDataParallel"),
    (_first(lambda model: _DDP(model[2])), "ValueError", "2.weight", "DistributedDataParallel"),
    (_later(_DDP), "GradientError", "0.weight", "DistributedDataParallel"),
    (_later(_DDP, steps=3), "GradientError", "0.weight", "DistributedDataParallel"),  # buckets were laid out anew
    (_later(replicate), "GradientError", "0.weight", "DistributedDataParallel"),
    (_parameters_thawed_later, "GradientError", "4.weight", "DistributedDataParallel"),
    (_fsdp_first(True), "ValueError", "group0.param0", _FSDP),
    (_fsdp_first(False), "ValueError", "group0.param0", _FSDP),
    (_later(lambda model: _fsdp(model, True)), "GradientError", "0.weight", _FSDP),
    (_later(lambda model: _fsdp(model, False)), "GradientError", "0.weight", _OTHER),
    (_first(fully_shard, is_given=False), "ValueError", "group0.param0", "DTensor"),
    (_first(fully_shard), "ValueError", "0.weight", "DTensor"),
    (_later(fully_shard), "GradientError", "0.weight", _OTHER),
]


def _drop_in_a_cycle(model: nn.Module) -> None:
    cycle: list[Any] = [DistributedDataParallel(model)]
    cycle.append(cycle)


def _told_to_ignore(model: nn.Module) -> nn.Module:
    both = nn.ModuleDict({"mine": model, "theirs": nn.Linear(2, 2).double()})
    ignored = [name for name, _ in both.named_parameters() if name.startswith("mine")]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(both, ignored)
    return DistributedDataParallel(both)


# What is done to the model before it is wrapped, and after that. What it returns is kept.
_NO_MISTAKES: Final[list[tuple[Callable[[nn.Module], object], Callable[[nn.Module], object]]]] = [
    (lambda model: DistributedDataParallel(model) and None, lambda model: None),
    (lambda model: None, lambda model: DistributedDataParallel(model) and None),
    (_drop_in_a_cycle, lambda model: None),
    (lambda model: DistributedDataParallel(small_model()), lambda model: None),
    (_told_to_ignore, lambda model: None),
]


@ranks(2, start=run_ranks)
def test_ddp_and_fsdp(rank: int) -> None:
    gc.freeze()  # what was imported: each case collects garbage, which takes 0.2 s otherwise
    dist.init_process_group("gloo")
    for number, (mistake, kind, *fragments) in enumerate(_MISTAKES):
        model, wrapped = small_model(), []

        def wrap(*given: nn.Module, model: nn.Module = model, wrapped: list[Any] = wrapped) -> Any:
            wrapped.append(torchring.wrap(_sgd(model), *given))
            return wrapped[0]

        problem = attempt(lambda mistake=mistake, model=model, wrap=wrap: mistake(model, wrap, rank))
        assert problem.startswith(f"{kind}: "), f"{number}: {problem or 'no error'}"
        for fragment in (*fragments, "bare model", "Accelerate", "Trainer", "Lightning"):
            assert fragment in problem, f"{number}: {fragment!r} is not in {problem}"
        for optimizer in wrapped:
            optimizer.close()
    right = small_model()
    train(Side((0, 1), False), right, _sgd(right), range(2))
    for before, after in _NO_MISTAKES:
        model = small_model()
        kept = [before(model)]
        optimizer = torchring.wrap(_sgd(model), model)
        kept.append(after(model))
        _train(model, optimizer, rank, 2)
        torch.testing.assert_close(values(model), values(right), rtol=1e-12, atol=1e-12)
        optimizer.close()
    torchring.shutdown()
    dist.destroy_process_group()


@ranks(2)
def test_ignored_parameters_and_buffers_belong_to_a_rank(rank: int) -> None:
    """The second layer is an expert of the rank's own, with a buffer, and on rank 1 wider."""
    model = small_model()
    torch.manual_seed(rank)
    model[2] = nn.Sequential(nn.Linear(7, 4 + rank), nn.BatchNorm1d(4 + rank), nn.Linear(4 + rank, 3)).double()
    shared = [p for i in (0, 4) for p in model[i].parameters()]
    before = values(model[2])
    optimizer = torchring.wrap(torch.optim.SGD(shared, lr=0.1), model, ignore=["2", model[2][0].weight])
    own = torch.optim.SGD(model[2].parameters(), lr=0.1)
    assert all(map(torch.equal, before, model[2].parameters()))
    for step in range(2):
        optimizer.zero_grad()
        own.zero_grad()
        loss_on(model, rank, step).backward()
        optimizer.step()
        own.step()
    assert_same_everywhere(shared)
    assert model[2][1].running_mean.shape == (4 + rank,)
    problem = attempt(lambda: torchring.wrap(momentum(model[2]), model, ignore=[model[2]]))
    assert problem.startswith("ValueError: 2.0.weight is ignored, and in the optimizer")
    optimizer.close()


_BESIDE: Final = {  # what is logged of an optimizer beside the wrapped one: the parameter, and its way
    "loss": "a SGD that was not wrapped steps the weight of a Linear",
    "backbone": "a SGD that was not wrapped steps a parameter of shape (2, 2)",
    "wrapped": "",
    "ignored": "",
    "model of its own": "",
    "zeroed before": "",
}


@ranks(2, start=run_ranks)
def test_a_plain_optimizer_that_the_same_backward_reaches_is_named_once(rank: int) -> None:
    for case, said in _BESIDE.items():
        model, loss, backbone = nn.Linear(2, 2), nn.Linear(2, 1), nn.Parameter(torch.eye(2))
        own = [backbone] if case == "backbone" else [*loss.parameters()]
        stepped: Any = torch.optim.SGD(own, lr=0.1)
        if case == "wrapped":
            stepped = torchring.wrap(stepped, loss)
        whole, ignore = (nn.ModuleList([model, loss]), [loss]) if case == "ignored" else (model, [])
        optimizer = torchring.wrap(_sgd(model), whole, ignore=ignore)
        with logged() as lines:
            for _ in range(4):
                optimizer.zero_grad()
                stepped.zero_grad()
                y = model(torch.randn(3, 2) @ backbone)
                if case == "model of its own":
                    y.sum().backward()
                    loss(y.detach()).sum().backward()
                elif case == "zeroed before":
                    stepped.step()
                    y.sum().backward()
                else:
                    loss(y).sum().backward()
                optimizer.step()
                stepped.step()
        assert len(lines) == (rank == 0 and bool(said)), (case, lines)
        assert all(line.startswith(said) for line in lines), (case, lines)
        torchring.shutdown()
        assert not plain._global_optimizer_pre_hooks
        assert not own[0]._post_accumulate_grad_hooks
