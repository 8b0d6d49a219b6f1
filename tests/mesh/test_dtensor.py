"""Tensor parallelism x data parallelism, 2 x 2: parameters are DTensors, and gradients are reduced over mesh["dp"]."""

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.distributed.tensor.parallel.ddp import _pre_dp_module_transform
from torch.nn.parallel import DistributedDataParallel

import torchring
from tests.support.harness import ranks, run_ranks
from tests.support.training import attempt
from torchring.errors import GradientError
from torchring.sharding import DistributedState
from torchring.world import World

_STEPS = 3


class Net(nn.Module):
    """Its norm computes on a part of the sequence, so the gradients of its weights are Partial."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.up, self.norm, self.down, self.spare = nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 4), nn.Linear(4, 4)

    def forward(self, batch: Tensor, has_spare: bool = False) -> Tensor:
        hidden = self.down(self.norm(self.up(batch)))
        return self.spare(hidden) if has_spare else hidden


def _made(tp: DeviceMesh | None, has_spare: bool = True) -> nn.Module:
    model: Any = Net().double()
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
    model.spare = model.spare if has_spare else nn.Identity()
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


def _clipping(model: nn.Module, optimizer: Any, d: int, set_to_none: bool = True) -> None:
    """In place, a rank has gradients that its peers do not have."""
    for step in range(_STEPS):
        optimizer.zero_grad(set_to_none)
        model(_batch(step, d), has_spare=set_to_none or (step > 1 and d == 1)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


def _clipping_in_place(model: nn.Module, optimizer: Any, d: int) -> None:
    _clipping(model, optimizer, d, set_to_none=False)


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


def _thawed_and_copied(model: nn.Module, optimizer: Any, d: int) -> None:
    for is_trained in (False, True):
        model.down.weight.requires_grad_(is_trained)
        _plainly(model, optimizer, d)
    other, again = copy.deepcopy((model, optimizer))
    optimizer.close()
    _plainly(other, again, d)
    for parameter, value in zip(model.parameters(), other.parameters(), strict=True):
        parameter.data.copy_(value.data)
    again.close()


def _scaling(model: nn.Module, optimizer: Any, d: int) -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    for step in range(4):
        optimizer.zero_grad()
        scaler.scale(model(_batch(step, d)).square().mean() * (1e308 if step == 1 else 1)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 8.0


_SCRIPTS: list[tuple[Callable[[nn.Module, Any, int], None], dict[str, Any], dict[str, Any]]] = [
    (_clipping, {"foreach": True}, {"bucket_mb": 0}),
    (_clipping, {"fused": True}, {"shard": True}),
    (_clipping_in_place, {}, {"op": "sum"}),
    (_accumulating, {}, {"accumulate": 2}),
    (_weighing, {}, {}),
    (_with_kept_gradients, {}, {}),
    (_synchronizing, {}, {}),
    (_thawed_and_copied, {}, {}),
    (_scaling, {}, {"on_nonfinite": "ignore"}),
]


def _check_scripts(mesh: DeviceMesh) -> None:
    for script, of_optimizer, options in _SCRIPTS:
        models = []
        for tp in (mesh["tp"], None):
            model = _made(tp)
            plain = torch.optim.AdamW(model.parameters(), 0.05, **of_optimizer)
            optimizer = torchring.wrap(plain, model, group=mesh["dp"], **options)
            script(model, optimizer, mesh.get_local_rank("dp"))
            optimizer.close()
            models.append(model)
        apart = _apart(*models)
        print(script.__name__, of_optimizer, options, apart)
        assert apart < 1e-10


def _wrap(model: nn.Module, group: Any, **options: Any) -> Any:
    return torchring.wrap(torch.optim.AdamW(model.parameters(), 0.05), model, group=group, **options)


# Mistakes: what a script does with the mesh, and words of its error.


def _frozen_and_sharded(mesh: DeviceMesh) -> None:
    model = nn.ModuleList([_made(mesh["tp"]).requires_grad_(False), nn.Linear(2, 2)])
    torchring.wrap(torch.optim.SGD(model[1].parameters(), 0.1), model)


def _fully_sharded(mesh: DeviceMesh) -> None:
    model = Net()
    fully_shard(model, mesh=mesh["dp"])
    _wrap(model, mesh["dp"])


def _of_other_ranks(mesh: DeviceMesh) -> None:
    others = DeviceMesh("cpu", [0, 1])
    _placed(mesh, DTensor.from_local(torch.ones(2), others, [Replicate()], run_check=False))


def _placed(mesh: DeviceMesh, value: Tensor) -> Any:
    return torchring.wrap(torch.optim.SGD([nn.Parameter(value)], 0.1), group=mesh["dp"])


def _added_later(mesh: DeviceMesh) -> None:
    optimizer = _wrap(_made(mesh["tp"]), mesh["dp"])
    wrong = nn.Parameter(distribute_tensor(torch.ones(2), mesh["dp"], [Shard(0)]))
    try:
        optimizer.add_param_group({"params": [wrong]})
    finally:
        assert len(optimizer.param_groups) == 1
        optimizer.close()


def _muon(mesh: DeviceMesh) -> None:
    model = _made(mesh["tp"])
    torchring.wrap(torch.optim.Muon([model.up.weight, model.down.weight]), model, group=mesh["dp"], shard=True)


def _summed_by_dtensor(mesh: DeviceMesh) -> None:
    model = nn.Linear(2, 2, bias=False)
    model.weight = nn.Parameter(distribute_tensor(torch.ones(2, 2), mesh, [Replicate(), Shard(0)]))
    optimizer = torchring.wrap(torch.optim.SGD(model.parameters(), 0.1), model, group=mesh["dp"])
    batch = distribute_tensor(torch.ones(4, 2), mesh, [Shard(0), Replicate()])
    try:
        model(batch).sum().backward()
    finally:
        optimizer.close()


def _groups_on_one_machine(mesh: DeviceMesh) -> None:
    with mock.patch.object(World, "shares_memory", property(lambda world: world.outer is not world)):
        _wrap(_made(mesh["tp"]), mesh["dp"], compression="int8")


_OF_ALL = torchring.ddp_hook(None, allreduce_hook)
_PARTS = "up.weight is a DTensor, as fully_shard() makes them", "have different parts", "group=mesh[...]"
_MISTAKES: list[tuple[Callable[[DeviceMesh], object], str, tuple[str, ...]]] = [
    (lambda m: _wrap(_made(m["tp"]), m["tp"]), "ValueError", (*_PARTS, "Train the bare model")),
    (lambda m: _wrap(_made(m["tp"]), None), "ValueError", _PARTS),
    (_frozen_and_sharded, "ValueError", ("0.up.weight cannot be broadcast: 0.up.weight is a DTensor", "sync_initial")),
    (lambda m: torchring.broadcast_parameters(_made(m["tp"])), "ValueError", _PARTS),
    (_fully_sharded, "ValueError", _PARTS),
    (
        lambda m: _wrap(_made(m["tp"]), [[0, 3], [1, 2]]),
        "PlanMismatchError",
        ("up.weight", "at (0, 0) of (6, 4)", "at (3, 0) of (6, 4)"),
    ),
    (_of_other_ranks, "ValueError|PlanMismatchError", ("without rank",)),
    (
        lambda m: _placed(m, DTensor.from_local(torch.ones(2), m["tp"], [Partial()], run_check=False)),
        "ValueError",
        ("group0.param0 is placed (Partial(sum),)", "redistribute()"),
    ),
    (_added_later, "ValueError", ("group1.param0 is a DTensor", "different parts")),
    (
        lambda m: _wrap(_made(m["tp"]), m["dp"], on_nonfinite="skip"),
        "ValueError",
        ("on_nonfinite='skip'", "GradScaler"),
    ),
    (lambda m: _wrap(_made(m["tp"]), m["dp"], compression="int8", max_error=1), "ValueError", ("leave max_error out",)),
    (lambda m: _wrap(_made(m["tp"]), m["dp"], compression=_OF_ALL), "ValueError", ("must be the ProcessGroup of the",)),
    (_groups_on_one_machine, "ValueError", ("this group lies on one", "leave it out")),
    (_muon, "ValueError", ("shard=True does not work with Muon and DTensors",)),
    (_summed_by_dtensor, "GradientError", ("gradient of weight is placed (Partial(sum), ", "mesh['tp']")),
]


def _check_mistakes(mesh: DeviceMesh) -> None:
    for script, kinds, words in _MISTAKES:
        problem = attempt(lambda script=script: script(mesh))
        print(words, problem)
        assert problem.partition(":")[0] in kinds.split("|")
        assert all(word in problem for word in words)
        torchring.barrier()


def _check_ddp(mesh: DeviceMesh) -> None:
    """The same bits as DDP, which adds up two ranks in either order."""
    d, group = mesh.get_local_rank("dp"), mesh.get_group("dp")
    for compression in (None, torchring.ddp_hook(group, allreduce_hook)):
        model, theirs = _made(mesh["tp"], False), _made(mesh["tp"], False)
        sgd = torch.optim.SGD(model.parameters(), 0.1)
        _plainly(model, torchring.wrap(sgd, model, group=group, compression=compression), d)
        _pre_dp_module_transform(theirs)
        ddp = DistributedDataParallel(theirs, process_group=group)
        local = list(ddp.parameters())
        _plainly(ddp, torch.optim.SGD(local, 0.1), d)
        assert all(torch.equal(p.to_local(), q) for p, q in zip(model.parameters(), local, strict=True))


def _check_checkpoints(mesh: DeviceMesh, folder: str) -> None:
    """A run with sharded steps goes on with whole ones, and the other way round."""
    d = mesh.get_local_rank("dp")
    for number, has_shards in enumerate((True, False)):
        model, other = _made(mesh["tp"], False), _made(mesh["tp"], False)
        optimizer, another = _wrap(model, mesh["dp"], shard=has_shards), _wrap(other, mesh["dp"], shard=not has_shards)
        _plainly(model, optimizer, d)
        saved, loaded = DistributedState(optimizer), DistributedState(another)
        path = f"{folder}/{number}"
        dcp.save(dict(zip("mo", get_state_dict(model, saved), strict=True)), checkpoint_id=path)
        optimizer.zero_grad()
        of_model, of_optimizer = get_state_dict(other, loaded)
        dcp.load({"m": of_model, "o": of_optimizer}, checkpoint_id=path)
        set_state_dict(other, loaded, model_state_dict=of_model, optim_state_dict=of_optimizer)
        for each, its in ((model, optimizer), (other, another)):
            _plainly(each, its, d)
        assert _apart(model, other) < 1e-10
        state = optimizer.state_dict(all_ranks=True)["state"][0]["exp_avg"]
        assert isinstance(state, DTensor)
        assert state.shape == model.up.weight.shape
        another.load_state_dict(optimizer.state_dict(all_ranks=True))
        optimizer.close()
        another.close()
    model = _made(mesh["tp"], False)
    plain = torch.optim.AdamW(model.parameters(), 0.05)
    if d == 0:  # the only rank of its group with a state
        _plainly(model, plain, d)
    torchring.wrap(plain, model, group=mesh["dp"]).close()
    mine = torch.cat([plain.state[p]["exp_avg"].to_local().flatten() for p in model.parameters()])
    first, second = torchring.all_gather(mine[None], group=mesh["dp"])
    assert torch.equal(first, second)


def _check_fully_sharded(mesh: DeviceMesh) -> None:
    """fully_shard() in one dimension, and torchring in the other one."""
    models = [_made(None, False), _made(None, False)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fully_shard(models[1], mesh=mesh["tp"])
        for model in models:
            optimizer = _wrap(model, mesh["dp"], accumulate=2, shard=True)
            _accumulating(model, optimizer, mesh.get_local_rank("dp"))
            if model is models[1]:
                optimizer.weigh(1)
                model(_batch(0, 0)).sum().backward()
                with pytest.raises(GradientError, match=r"weigh\(\) takes one weight above 0 for each reduction"):
                    optimizer.weigh(2)
            optimizer.close()
    assert _apart(*models) < 1e-10


def _check_group_of_one(mesh: DeviceMesh) -> None:
    models = [_made(mesh["tp"]), _made(mesh["tp"])]
    optimizer = _wrap(models[0], [[0], [1], [2], [3]])
    _plainly(models[0], optimizer, 0)
    _plainly(models[1], torch.optim.AdamW(models[1].parameters(), 0.05), 0)
    assert all(a.equal(b) for a, b in zip(*(map(_whole, model.parameters()) for model in models), strict=True))


@ranks(4, start=run_ranks)  # what torch keeps of a mesh keeps its process groups
def test_tensor_parallel_models(rank: int, tmp_path: Path) -> None:
    torchring.init(timeout_seconds=20.0, process_group=True)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    _check_ddp(mesh)
    _check_checkpoints(mesh, str(tmp_path))
    _check_fully_sharded(mesh)
    _check_group_of_one(mesh)
    _check_mistakes(mesh)
    _check_scripts(mesh)
