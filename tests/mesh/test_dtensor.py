"""Tensor parallelism x data parallelism, 2 x 2: parameters are DTensors, and gradients are reduced over mesh["dp"]."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import torchring
from tests.support.harness import ranks, run_ranks

_STEPS = 4
Made = tuple[nn.Module, Any]


class Net(nn.Module):
    """Its norm computes on a part of the sequence, so the gradients of its weights are Partial."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up, self.norm, self.down, self.spare = nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 4), nn.Linear(4, 4)

    def forward(self, batch: Tensor, has_spare: bool = False) -> Tensor:
        hidden = self.down(self.norm(self.up(batch)))
        return self.spare(hidden) if has_spare else hidden


def _made(tp: DeviceMesh | None) -> nn.Module:
    model = Net().double()
    if tp is not None:
        plan = {
            "up": ColwiseParallel(output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "down": RowwiseParallel(input_layouts=Shard(1)),
            "spare": ColwiseParallel(output_layouts=Replicate()),
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parallelize_module(model, tp, plan)
    return model


def _batch(step: int, dp_rank: int) -> Tensor:
    return torch.randn(1, 2, 4, generator=torch.Generator().manual_seed(10 * step + dp_rank), dtype=torch.float64)


def _whole(tensor: Tensor) -> Tensor:
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def _apart(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((_whole(a) - _whole(b)).abs().max()) for a, b in pairs)


# Scripts, each of which a plain model runs, too. They train the model on rank `d` of the dimension of data parallelism.


def _plainly(model: nn.Module, optimizer: Any, d: int) -> None:
    for step in range(_STEPS):
        optimizer.zero_grad()
        model(_batch(step, d)).square().mean().backward()
        optimizer.step()


def _zeroing_in_place(model: nn.Module, optimizer: Any, d: int) -> None:
    for step in range(_STEPS):
        optimizer.zero_grad(set_to_none=False)
        model(_batch(step, d), has_spare=step > 1 and d == 1).square().mean().backward()
        optimizer.step()


def _clipping(model: nn.Module, optimizer: Any, d: int) -> None:
    for step in range(_STEPS):
        optimizer.zero_grad()
        model(_batch(step, d), has_spare=True).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


def _accumulating(model: nn.Module, optimizer: Any, d: int) -> None:
    for step in range(2 * _STEPS):
        model(_batch(step, d)).square().mean().backward()
        if step % 2:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step == 3)


def _weighing(model: nn.Module, optimizer: Any, d: int) -> None:
    for step in range(_STEPS):
        optimizer.zero_grad()
        with optimizer.no_sync():
            optimizer.weigh(1 + d)
            model(_batch(step, d)).square().mean().backward()
        if step == 2 and d == 0:
            optimizer.skip()
        else:
            optimizer.weigh(step)
            model(_batch(10 + step, d)).square().mean().backward()
        optimizer.step()


def _with_kept_gradients(model: nn.Module, optimizer: Any, d: int) -> None:
    """Gradients that the script keeps are its own: those of an earlier step, and those that it has put into `.grad`."""
    parameters = list(model.parameters())[:6]
    kept: list[list[Tensor]] = []
    values: list[list[Tensor]] = []
    for step in range(_STEPS):
        optimizer.zero_grad()
        if step == 2:
            for parameter in parameters:
                parameter.grad = torch.zeros_like(parameter)
        mine = [parameter.grad for parameter in parameters]
        model(_batch(step, d)).square().mean().backward()
        grads = [parameter.grad for parameter in parameters]
        assert step != 2 or all(a is b for a, b in zip(mine, grads, strict=True))
        for earlier, value in zip(kept, values, strict=True):
            assert all(torch.equal(_whole(a), b) for a, b in zip(earlier, value, strict=True))
        kept.append([grad for grad in grads if grad is not None])
        values.append([_whole(grad).clone() for grad in kept[-1]])
        optimizer.step()


def _synchronizing(model: nn.Module, optimizer: Any, d: int) -> None:
    for step in range(_STEPS):
        optimizer.zero_grad()
        with optimizer.no_sync():
            model(_batch(step, d)).square().mean().backward()
        optimizer.synchronize()
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(1.0 + d)  # which has to be reduced again
        optimizer.synchronize()
        optimizer.step()


def _thawing(model: nn.Module, optimizer: Any, d: int) -> None:
    model.down.weight.requires_grad_(False)
    _plainly(model, optimizer, d)
    model.down.weight.requires_grad_(True)
    _plainly(model, optimizer, d)


def _copied(model: nn.Module, optimizer: Any, d: int) -> None:
    _plainly(model, optimizer, d)
    other, again = copy.deepcopy((model, optimizer))
    optimizer.close()
    _plainly(other, again, d)
    for parameter, value in zip(model.parameters(), other.parameters(), strict=True):
        parameter.data.copy_(value.data)
    again.close()


def _scaling(model: nn.Module, optimizer: Any, d: int) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    for step in range(_STEPS):
        optimizer.zero_grad()
        scaler.scale(model(_batch(step, d)).square().mean() * (1e308 if step == 1 else 1)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 8.0


_SCRIPTS: list[tuple[Callable[[nn.Module, Any, int], None], dict[str, Any], dict[str, Any]]] = [
    (_plainly, {"foreach": True}, {}),
    (_plainly, {"fused": True}, {"bucket_mb": 0}),
    (_plainly, {}, {"shard": True}),
    (_clipping, {"foreach": True}, {}),
    (_clipping, {"fused": True}, {"shard": True}),
    (_zeroing_in_place, {}, {}),
    (_accumulating, {}, {"accumulate": 2}),
    (_accumulating, {}, {"accumulate": 2, "shard": True}),
    (_weighing, {}, {}),
    (_with_kept_gradients, {}, {}),
    (_synchronizing, {}, {}),
    (_thawing, {}, {}),
    (_copied, {}, {}),
    (_scaling, {}, {"on_nonfinite": "ignore"}),
    (_plainly, {}, {"op": "sum"}),
]


@ranks(4, start=run_ranks)  # what torch keeps of a mesh keeps its process groups
def test_trains_as_a_plain_model_does(rank: int) -> None:
    torchring.init(timeout_seconds=20.0, process_group=True)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    d = mesh.get_local_rank("dp")
    for script, of_optimizer, options in _SCRIPTS:
        models = []
        for tp in (mesh["tp"], None):
            model = _made(tp)
            plain = torch.optim.AdamW(model.parameters(), 0.05, **of_optimizer)
            optimizer = torchring.wrap(plain, model, group=mesh["dp"], **options)
            script(model, optimizer, d)
            optimizer.close()
            models.append(model)
        apart = _apart(*models)
        print(script.__name__, of_optimizer, options, apart)
        assert apart < 1e-10
